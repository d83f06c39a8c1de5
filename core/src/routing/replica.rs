//! One engine as the gateway sees it: readiness, load, faults and speed, each from its own source.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use http::HeaderValue;
use llmgw_plugins::Load;
use tokio_util::sync::CancellationToken;

use super::breaker::{Admission, Breaker, BreakerState, Fault};
use super::errors_window::ErrorsWindow;
use super::learned::Learned;
use super::locality::Locality;
use super::prefix::ReplicaSlot;
use super::score::Candidate;
use crate::clock;
use crate::config::Endpoint;
use crate::flow::LaneFacts;
use crate::flow::queues::Queues;
use crate::flow::slots::Slots;
use crate::flow::turns::LaneId;
use crate::random;
use crate::upstream::Upstream;

/// A client that leaves after this long, with nothing heard from the replica meanwhile, makes it suspect.
const SILENCE_SUSPECT_AFTER: Duration = Duration::from_secs(5);
/// Fewer requests of our own prove nothing against an engine's numbers, which lag a little.
const DISBELIEF_MIN_REQUESTS: u32 = 4;
/// How long a replica that answered that it is busy gets requests only when all others are busy or full too.
const BUSY_MS: u64 = 1_000;
/// An older KV-cache use holds nothing back.
pub const KV_FRESH_MS: u64 = 2_000;

/// What the engine's own probes say.
#[derive(Debug, Clone, PartialEq)]
pub enum Readiness {
    /// Not asked yet.
    Unknown,
    NotReady {
        reason: String,
    },
    /// The engine says that it is ready and lists a name that the model goes by.
    Ready {
        served: Arc<str>,
        /// The engine's own model card, as it sent it.
        card: Arc<str>,
    },
}

impl Readiness {
    /// Engines put the time into their cards, so a card that differs is no news.
    fn says_the_same_as(&self, other: &Readiness) -> bool {
        match (self, other) {
            (Readiness::Ready { served, .. }, Readiness::Ready { served: now, .. }) => {
                served == now
            }
            _ => self == other,
        }
    }
}

/// One engine behind a model.
pub struct Replica {
    /// `host:port`, with the base path where there is one; unique within its model.
    pub id: Arc<str>,
    pub engine: Arc<str>,
    pub endpoint: Endpoint,
    locality: ArcSwap<Locality>,
    /// `Bearer KEY`, where the engine asks for one; marked as sensitive.
    authorization: Option<HeaderValue>,
    /// What its requests say in `Host`.
    host: Option<HeaderValue>,
    /// Names under which the engine may list the model, best first.
    pub names: Vec<Arc<str>>,
    pub upstream: Arc<Upstream>,
    pub slots: Arc<Slots>,
    /// Its place in the pool's prefix index.
    pub prefix_slot: ReplicaSlot,
    /// Events and answers that came from it, over all requests: one that stands still is silent.
    heard: AtomicU64,
    /// Ends its probe and its scrape when it leaves the configuration; requests on it go on.
    pub retired: CancellationToken,
    /// Where requests wait for it, and its number there.
    queues: Arc<Queues>,
    pub lane: LaneId,
    state: Mutex<State>,
}

/// What changes. Held for a few instructions at a time, never across an await.
struct State {
    readiness: Readiness,
    breaker: Breaker,
    errors: ErrorsWindow,
    /// Until then it is taken to be as busy as it said.
    busy_until_ms: u64,
    learned: Learned,
    load: Load,
    /// When `load` was read; none was, where it is absent.
    load_at_ms: Option<u64>,
    scrape_error: Option<String>,
}

/// What the router may do with a replica right now.
#[derive(Debug, Clone, PartialEq)]
pub enum Standing {
    Open,
    /// Suspect: one request may try it.
    Trial,
    /// Suspect, and one request is trying it.
    OnTrial,
    Closed {
        reason: String,
        retry_in_ms: u64,
    },
    Unknown,
}

/// A replica's numbers, for the admin address.
#[derive(Debug, Clone)]
pub struct Numbers {
    pub readiness: Readiness,
    pub breaker: &'static str,
    pub errors_1m: u32,
    pub load: Load,
    pub metrics_age_ms: Option<u64>,
    pub scrape_error: Option<String>,
    pub ms_per_prefill_token: f64,
}

impl Replica {
    pub fn new(
        endpoint: Endpoint,
        locality: Arc<Locality>,
        names: Vec<Arc<str>>,
        connect_timeout: Duration,
        slots: Arc<Slots>,
        prefix_slot: ReplicaSlot,
        queues: Arc<Queues>,
    ) -> Arc<Replica> {
        let id = Replica::id(&endpoint);
        let lane = queues.lane(&id, &slots);
        let authorization = endpoint.api_key.as_ref().and_then(|key| {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", key.expose())).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Arc::new(Replica {
            id,
            engine: Arc::from(endpoint.engine.as_str()),
            authorization,
            host: HeaderValue::from_str(endpoint.url.authority()).ok(),
            upstream: Upstream::new(endpoint.url.host(), endpoint.url.port(), connect_timeout),
            slots,
            endpoint,
            locality: ArcSwap::new(locality),
            names,
            prefix_slot,
            heard: AtomicU64::new(0),
            retired: CancellationToken::new(),
            queues,
            lane,
            state: Mutex::new(State {
                readiness: Readiness::Unknown,
                breaker: Breaker::default(),
                errors: ErrorsWindow::default(),
                busy_until_ms: 0,
                learned: Learned::default(),
                load: Load::default(),
                load_at_ms: None,
                scrape_error: None,
            }),
        })
    }

    /// The name of this endpoint's replica.
    pub fn id(endpoint: &Endpoint) -> Arc<str> {
        format!("{}{}", endpoint.url.authority(), endpoint.url.base()).into()
    }

    /// Where it is.
    pub fn locality(&self) -> Arc<Locality> {
        self.locality.load_full()
    }

    /// Its node says something else about itself now.
    pub fn set_locality(&self, locality: Arc<Locality>) {
        self.locality.store(locality);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn authorization(&self) -> Option<HeaderValue> {
        self.authorization.clone()
    }

    pub fn host(&self) -> Option<HeaderValue> {
        self.host.clone()
    }

    /// How often anything came from it: one that counts on is alive.
    pub fn heard(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }

    // Readiness.

    pub fn readiness(&self) -> Readiness {
        self.state().readiness.clone()
    }

    /// The name to send to the engine, and whether it may get requests at all.
    pub fn served_name(&self) -> Option<Arc<str>> {
        match &self.state().readiness {
            Readiness::Ready { served, .. } => Some(served.clone()),
            _ => None,
        }
    }

    /// Takes the verdict of a probe that began at `started_ms`, and says whether it is another one than before.
    pub fn probed(&self, verdict: Readiness, started_ms: u64) -> bool {
        let mut state = self.state();
        let breaker = state.breaker.state();
        if matches!(verdict, Readiness::Ready { .. }) {
            state.breaker.probe_ok(started_ms);
        }
        let changed = !state.readiness.says_the_same_as(&verdict);
        state.readiness = verdict;
        // Those who wait look again only when told, else when the breaker was due.
        let is_news = changed || state.breaker.state() != breaker;
        drop(state);
        if is_news {
            self.announce();
        }
        changed
    }

    /// Whether a request may go there, without taking a trial.
    pub fn standing(&self, now_ms: u64) -> Standing {
        let state = self.state();
        match &state.readiness {
            Readiness::Unknown => Standing::Unknown,
            Readiness::NotReady { reason } => Standing::Closed {
                reason: format!("{}: {reason}", self.id),
                retry_in_ms: 1_000,
            },
            Readiness::Ready { .. } if state.breaker.state() == BreakerState::HalfOpen => {
                Standing::OnTrial
            }
            Readiness::Ready { .. } if !state.breaker.admits(now_ms) => Standing::Closed {
                reason: format!("{}: {}", self.id, fault_text(state.breaker.last_fault())),
                retry_in_ms: state.breaker.retry_in_ms(now_ms),
            },
            Readiness::Ready { .. } => match state.breaker.state() {
                BreakerState::Closed => Standing::Open,
                BreakerState::Open | BreakerState::HalfOpen => Standing::Trial,
            },
        }
    }

    /// Takes the right to send one request; `None` when another one just took it.
    pub fn admit(self: &Arc<Self>, now_ms: u64) -> Option<Admitted> {
        let admission = self.state().breaker.admit(now_ms);
        match admission {
            Admission::Refused { .. } => None,
            Admission::Closed { .. } | Admission::Trial { .. } => Some(Admitted {
                replica: self.clone(),
                admission,
                waiting: None,
            }),
        }
    }

    /// Tells those who wait what it is like now.
    pub fn announce(&self) {
        self.tell_queue();
        self.queues.changed.notify_waiters();
    }

    /// Tells the queue what may be sent here.
    pub fn tell_queue(&self) {
        self.queues.tell(self.news());
    }

    /// What the queue has to know of it now. Nothing once it is retired: another one may have its place by then.
    pub fn news(&self) -> Option<(LaneId, LaneFacts)> {
        (!self.retired.is_cancelled()).then(|| (self.lane, self.facts(clock::now_ms())))
    }

    fn facts(&self, now_ms: u64) -> LaneFacts {
        let open = self.standing(now_ms) == Standing::Open;
        let state = self.state();
        let is_fresh = state
            .load_at_ms
            .is_some_and(|at| now_ms.saturating_sub(at) <= KV_FRESH_MS);
        LaneFacts {
            open,
            ms_per_prefill_token: state.learned.ms_per_prefill_token(),
            kv: state.load.kv.filter(|_| is_fresh),
        }
    }

    // Load.

    pub fn scraped(&self, load: Load) {
        let mut state = self.state();
        state.load = load;
        state.load_at_ms = Some(clock::now_ms());
        state.scrape_error = None;
    }

    /// Forgets the engine's numbers where its page counts less than half of the requests that this gateway alone had
    /// there while the page was read. Such a page is frozen, or counts something else: taken for idle, the replica
    /// would attract all traffic. Unknown, its own in-flight count decides. Returns the contradiction.
    pub fn disbelieved(&self, load: &Load, held: u32) -> Option<String> {
        let counted = load.running? + load.waiting.unwrap_or(0.0);
        if held < DISBELIEF_MIN_REQUESTS || counted * 2.0 >= f64::from(held) {
            return None;
        }
        let mut state = self.state();
        state.load = Load::default();
        state.load_at_ms = None;
        Some(
            "they count less than half of the requests that this gateway alone has there"
                .to_string(),
        )
    }

    /// The numbers stay, with their age: stale lowers trust, it closes nothing. True when the text is new.
    pub fn scrape_failed(&self, error: String) -> bool {
        let mut state = self.state();
        let news = state.scrape_error.as_ref() != Some(&error);
        state.scrape_error = Some(error);
        news
    }

    pub fn previous_load(&self) -> Option<Load> {
        let state = self.state();
        state.load_at_ms.map(|_| state.load)
    }

    /// What the scorer sees.
    pub fn candidate(&self, now_ms: u64, prefix_tokens: u64) -> Candidate {
        let state = self.state();
        Candidate {
            inflight: self.slots.inflight(),
            queued: self.slots.queued(),
            slots: self.slots.limit(),
            prefill_tokens: self.slots.prefill_tokens(),
            sent_tokens: self.slots.sent_tokens(),
            ms_per_prefill_token: state.learned.ms_per_prefill_token(),
            ms_per_decode_step: state.learned.ms_per_decode_step(),
            running: state.load.running,
            waiting: state.load.waiting,
            kv: state.load.kv,
            metrics_age_ms: state.load_at_ms.map(|at| now_ms.saturating_sub(at) as f64),
            errors_1m: state.errors.count(now_ms),
            busy: now_ms < state.busy_until_ms,
            prefix_tokens,
        }
    }

    pub fn numbers(&self, now_ms: u64) -> Numbers {
        let state = self.state();
        Numbers {
            readiness: state.readiness.clone(),
            breaker: state.breaker.state().as_str(),
            errors_1m: state.errors.count(now_ms),
            load: state.load,
            metrics_age_ms: state.load_at_ms.map(|at| now_ms.saturating_sub(at)),
            scrape_error: state.scrape_error.clone(),
            ms_per_prefill_token: state.learned.ms_per_prefill_token(),
        }
    }

    // Speed.

    /// Milliseconds between two tokens of one stream.
    pub fn ms_per_decode_step(&self) -> f64 {
        self.state().learned.ms_per_decode_step()
    }

    /// `prefill_tokens`: what the engine had to work through before this first byte, others' prompts included.
    pub fn learn_prefill(&self, first_byte: Duration, prefill_tokens: u64) {
        self.state()
            .learned
            .first_byte(first_byte.as_secs_f64() * 1e3, prefill_tokens);
    }

    pub fn learn_decode(&self, streamed: Duration, steps: u64) {
        self.state()
            .learned
            .decoded(streamed.as_secs_f64() * 1e3, steps);
    }
}

/// The breaker's leave for one request. Dropped without a word, a trial is free for the next request; dropped
/// after a long wait in which the replica said nothing to anybody, it counts as silence: clients have less
/// patience than `first_byte_timeout`, and leave.
pub struct Admitted {
    pub replica: Arc<Replica>,
    admission: Admission,
    waiting: Option<Waiting>,
}

/// A request that was sent and has heard nothing.
struct Waiting {
    since: Instant,
    /// What the replica's counter stood at.
    heard: u64,
}

impl Admitted {
    pub fn is_trial(&self) -> bool {
        matches!(self.admission, Admission::Trial { .. })
    }

    /// The request goes out. Where there is no other replica, a client that leaves proves nothing: there is
    /// nobody who would do better.
    pub fn sent(&mut self, has_alternative: bool) {
        self.waiting = has_alternative.then(|| Waiting {
            since: Instant::now(),
            heard: self.replica.heard.load(Ordering::Relaxed),
        });
    }

    /// The replica said something.
    pub fn heard(&mut self) {
        self.waiting = None;
        self.replica.heard.fetch_add(1, Ordering::Relaxed);
    }

    /// A trial succeeds at its first byte, any other request at its end.
    pub fn succeeded(&mut self) {
        let trial = self.is_trial();
        self.heard();
        self.admission = self.replica.state().breaker.success(self.admission);
        if trial {
            self.replica.announce();
        }
    }

    /// Busy is no fault. But it answers so fast that, with nothing in flight, it would attract all that comes.
    pub fn busy(&mut self) {
        // It answered, so it is not silent, however long it took.
        self.heard();
        self.replica.state().busy_until_ms = clock::now_ms() + BUSY_MS;
    }

    pub fn fault(&mut self, fault: Fault) {
        let now = clock::now_ms();
        self.waiting = None;
        let mut state = self.replica.state();
        state.errors.record(now);
        state
            .breaker
            .fault(self.admission, fault, now, random::next());
        drop(state);
        // Those who wait for it may have to go elsewhere.
        self.replica.announce();
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        if let Some(waiting) = self.waiting.take()
            && waiting.since.elapsed() >= SILENCE_SUSPECT_AFTER
            && self.replica.heard.load(Ordering::Relaxed) == waiting.heard
        {
            self.fault(Fault::FirstByteTimeout);
        } else if self.is_trial() {
            self.replica.state().breaker.abandon_trial(self.admission);
            // Whoever waits for what comes of it may be the next to try.
            self.replica.announce();
        }
    }
}

/// What the last fault was, in words.
fn fault_text(fault: Option<Fault>) -> &'static str {
    match fault {
        Some(Fault::Connect) => "refused the connection",
        Some(Fault::Reset) => "broke off its answers",
        Some(Fault::FirstByteTimeout | Fault::IdleTimeout) => "fell silent",
        Some(Fault::Status5xx) => "answered with server errors",
        None => "was suspect",
    }
}

#[cfg(test)]
mod tests;
