//! What the engine saw: counters that a test asserts on, and the last requests byte for byte.
//!
//! Only work counts (`/v1/...` without `GET /v1/models`): a gateway's probes and scrapes show up in `by_path` alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::wire::Head;

/// Requests that are remembered.
const LAST_MAX: usize = 50;
/// Larger bodies are not remembered.
const BODY_REMEMBERED_MAX_BYTES: usize = 64 * 1024;

/// The counters, as `GET /fake/state` shows them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StateView {
    /// Requests being served now, from head to last byte.
    pub open: u64,
    /// Of those, the ones whose event stream has begun.
    pub open_streams: u64,
    /// The most requests that were open at a time.
    pub peak_open: u64,
    /// Requests that hold a slot.
    pub running: u64,
    /// Requests that wait for a slot.
    pub waiting: u64,
    pub peak_running: u64,
    /// Connections accepted so far, on the main address.
    pub accepted_connections: u64,
    /// Connections open now, on the main address.
    pub open_connections: u64,
    /// Requests so far.
    pub total: u64,
    /// Answered to the end, errors that were asked for by status included.
    pub completed: u64,
    /// Given up because the client left before the end.
    pub cancelled: u64,
    /// Clients that left before the end, whether the engine stopped for them (`cancelled`) or not (llama.cpp).
    pub left: u64,
    /// Ended by the engine's own misbehaviour.
    pub broken: u64,
    /// Tokens generated.
    pub tokens: u64,
    /// Requests by `METHOD path`, probes included.
    pub by_path: BTreeMap<String, u64>,
    /// The last 50, oldest first.
    pub last: Vec<RequestView>,
}

/// One request of the past.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RequestView {
    /// From 1, in the order of arrival.
    pub n: u64,
    pub method: String,
    /// Path and query, as sent.
    pub path: String,
    /// In the order and the case they were sent in.
    pub headers: Vec<(String, String)>,
    /// The body if it is UTF-8 and under 64 KiB.
    pub body: Option<String>,
    pub body_bytes: u64,
    /// The `model` that the body named.
    pub model: Option<String>,
    /// `open`, `completed`, `cancelled` or `broken`.
    pub outcome: String,
    /// Milliseconds since the engine's start.
    pub started_ms: u64,
    /// Milliseconds since the engine's start, when it ended; for `cancelled` when the departure was noticed.
    pub ended_ms: Option<u64>,
    /// Tokens sent.
    pub tokens: u64,
}

/// The engine's counters.
pub struct State {
    start: Instant,
    seen: Mutex<Seen>,
    changes: watch::Sender<u64>,
    tokens: AtomicU64,
}

/// One open request: gives its count back when it ends, on Drop at the latest, as cancelled unless it was said otherwise.
pub struct Ticket<'a> {
    state: &'a State,
    n: u64,
    /// As what it is counted, once it has ended.
    ended: Mutex<Option<&'static str>>,
    broken: AtomicBool,
    streaming: AtomicBool,
    pub tokens: AtomicU64,
}

/// One open connection: gives its count back on Drop.
pub struct Connected<'a>(&'a State);

/// Counts a request as waiting or running until dropped.
pub struct Counted<'a> {
    state: &'a State,
    running: bool,
}

#[derive(Default)]
struct Seen {
    view: StateView,
    last: VecDeque<(RequestView, Bytes)>,
}

impl StateView {
    /// The newest request to this path.
    pub fn newest(&self, path: &str) -> Option<&RequestView> {
        self.last.iter().rev().find(|request| request.path == path)
    }

    fn ended_as(&mut self, outcome: &str) -> &mut u64 {
        match outcome {
            "broken" => &mut self.broken,
            "completed" => &mut self.completed,
            _ => &mut self.cancelled,
        }
    }
}

impl RequestView {
    /// The first value of a header, by any case of its name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }
}

impl State {
    pub fn new() -> State {
        State {
            start: Instant::now(),
            seen: Mutex::default(),
            changes: watch::Sender::new(0),
            tokens: AtomicU64::new(0),
        }
    }

    /// Counts a request from its head on.
    pub fn open(&self, head: &Head) -> Ticket<'_> {
        let started_ms = self.now_ms();
        let n = self.change(|seen| {
            let view = &mut seen.view;
            view.total += 1;
            view.open += 1;
            view.peak_open = view.peak_open.max(view.open);
            let request = RequestView {
                n: view.total,
                method: head.method.clone(),
                path: head.target.clone(),
                headers: head.headers.clone(),
                outcome: "open".to_owned(),
                started_ms,
                ..RequestView::default()
            };
            if seen.last.len() == LAST_MAX {
                seen.last.pop_front();
            }
            seen.last.push_back((request, Bytes::new()));
            view.total
        });
        Ticket {
            state: self,
            n,
            ended: Mutex::new(None),
            broken: AtomicBool::new(false),
            streaming: AtomicBool::new(false),
            tokens: AtomicU64::new(0),
        }
    }

    /// Counts any request in `by_path`.
    pub fn count_path(&self, head: &Head) {
        let key = format!("{} {}", head.method, head.path());
        self.change(|seen| *seen.view.by_path.entry(key).or_default() += 1);
    }

    pub fn connected(&self) -> Connected<'_> {
        self.change(|seen| {
            seen.view.accepted_connections += 1;
            seen.view.open_connections += 1;
        });
        Connected(self)
    }

    /// A client left before the end.
    pub fn left(&self) {
        self.change(|seen| seen.view.left += 1);
    }

    /// Counts a request as running until dropped.
    pub fn run(&self) -> Counted<'_> {
        self.change(|seen| {
            let view = &mut seen.view;
            view.running += 1;
            view.peak_running = view.peak_running.max(view.running);
        });
        Counted {
            state: self,
            running: true,
        }
    }

    /// Counts a request as waiting until dropped, unless `limit` wait already.
    pub fn wait(&self, limit: usize) -> Option<Counted<'_>> {
        let fits = self.change(|seen| {
            let fits = seen.view.waiting < limit as u64;
            seen.view.waiting += u64::from(fits);
            fits
        });
        // Lazily: a count that is made and dropped counts down.
        fits.then(|| Counted {
            state: self,
            running: false,
        })
    }

    pub fn view(&self) -> StateView {
        let seen = self
            .seen
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let last = seen.last.iter().map(|(request, body)| RequestView {
            body: remembered(body),
            ..request.clone()
        });
        StateView {
            tokens: self.tokens.load(Ordering::Relaxed),
            last: last.collect(),
            ..seen.view.clone()
        }
    }

    /// The counters alone: running, waiting, completed.
    pub fn load(&self) -> (u64, u64, u64) {
        let seen = self
            .seen
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        (seen.view.running, seen.view.waiting, seen.view.completed)
    }

    pub fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    /// Sets what has been counted to nothing; what is open stays.
    pub fn reset(&self) {
        self.tokens.store(0, Ordering::Relaxed);
        self.change(|seen| {
            let old = std::mem::take(&mut seen.view);
            seen.last.clear();
            seen.view = StateView {
                open: old.open,
                peak_open: old.open,
                open_streams: old.open_streams,
                running: old.running,
                peak_running: old.running,
                waiting: old.waiting,
                open_connections: old.open_connections,
                ..StateView::default()
            };
        });
    }

    /// A number that moves with every change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn change<T>(&self, apply: impl FnOnce(&mut Seen) -> T) -> T {
        let out = apply(
            &mut self
                .seen
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner()),
        );
        self.changes.send_modify(|number| *number += 1);
        out
    }
}

impl Ticket<'_> {
    /// The body is here: remembers it, and the model it named.
    pub fn received(&self, body: &Bytes) {
        self.entry(|(request, kept)| {
            request.body_bytes = body.len() as u64;
            if body.len() < BODY_REMEMBERED_MAX_BYTES {
                *kept = body.clone();
            }
        });
    }

    pub fn model(&self, model: &str) {
        self.entry(|(request, _)| request.model = Some(model.to_owned()));
    }

    /// The answer's head is out, and it is a stream.
    pub fn streaming(&self) {
        if !self.streaming.swap(true, Ordering::Relaxed) {
            self.state.change(|seen| seen.view.open_streams += 1);
        }
    }

    /// A token is generated.
    pub fn token(&self) {
        self.tokens.fetch_add(1, Ordering::Relaxed);
        self.state.tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// What follows is the engine's own fault.
    pub fn broken(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    /// Answered to the end, or as good as: to be said before the last bytes go out, since whoever has them may look at the
    /// counters, or ask again, before the engine gets to run.
    pub fn completed(&self) {
        self.end("completed");
    }

    /// The client left, also if it was to get its last bytes just now.
    pub fn cancelled(&self) {
        self.end("cancelled");
    }

    fn end(&self, outcome: &'static str) {
        let outcome = match self.broken.load(Ordering::Relaxed) {
            true => "broken",
            false => outcome,
        };
        let before = self
            .ended
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .replace(outcome);
        if before == Some(outcome) {
            return;
        }
        let ended_ms = Some(self.state.now_ms());
        self.entry(|(request, _)| {
            request.outcome = outcome.to_owned();
            request.ended_ms = ended_ms;
            request.tokens = self.tokens.load(Ordering::Relaxed);
        });
        let was_stream = self.streaming.load(Ordering::Relaxed);
        self.state.change(|seen| {
            let view = &mut seen.view;
            match before {
                None => {
                    view.open -= 1;
                    view.open_streams -= u64::from(was_stream);
                }
                // A reset may have come between.
                Some(before) => {
                    let count = view.ended_as(before);
                    *count = count.saturating_sub(1);
                }
            }
            *view.ended_as(outcome) += 1;
        });
    }

    fn entry(&self, apply: impl FnOnce(&mut (RequestView, Bytes))) {
        let mut seen = self
            .state
            .seen
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(entry) = seen
            .last
            .iter_mut()
            .rev()
            .find(|(request, _)| request.n == self.n)
        {
            apply(entry);
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let ended = self
            .ended
            .get_mut()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if ended.is_none() {
            self.cancelled();
        }
    }
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        self.0.change(|seen| seen.view.open_connections -= 1);
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.state.change(|seen| {
            let count = if self.running {
                &mut seen.view.running
            } else {
                &mut seen.view.waiting
            };
            *count -= 1;
        });
    }
}

fn remembered(body: &Bytes) -> Option<String> {
    String::from_utf8(body.to_vec()).ok()
}
