//! One fake engine: its options, its counters, and the switches that tests turn while it runs.

pub mod behave;
pub mod options;
pub mod state;

mod dialect;
mod embed;
mod error;
mod failure;
mod generate;
mod metrics;
mod out;
mod route;
pub(crate) mod server;
mod small;
mod wire;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::time::Instant;

use behave::{Behave, BehaveError, Defaults, Metrics};
use metrics::Numbers;
use options::{Kind, Options};
use state::{Counted, State};

/// llama.cpp notices a departure only after this long without any result for anybody, in milliseconds
/// (the poll in its result queue, b11434).
const QUIET_MS: u64 = 1000;
/// Requests at which an engine without slots counts as full, for the KV number.
const UNLIMITED_SLOTS: f64 = 256.0;

/// A running fake engine.
pub struct Engine {
    pub options: Options,
    pub addr: SocketAddr,
    pub defaults: Defaults,
    pub state: State,
    started: Instant,
    slots: Option<Semaphore>,
    /// Numbers the replies, for their ids.
    replies: AtomicU64,
    /// Requests that `fail_first` has failed.
    failed: AtomicU64,
    /// Generation requests, for `exit_after`.
    generations: AtomicU64,
    prompt_tokens: AtomicU64,
    /// When anybody last got a result (llama.cpp).
    last_result: Mutex<Instant>,
    /// The page that `metrics: frozen` shows.
    frozen: Mutex<Option<String>>,
    /// Whether the listener is open.
    pub accepting: watch::Sender<bool>,
    /// Whether it is open by now.
    pub listening: watch::Sender<bool>,
    /// Everything ends, as if the process were gone.
    pub stopped: watch::Sender<bool>,
    /// The share of loading that is over whatever the time says.
    pub loaded: watch::Sender<f64>,
    /// The most tokens of an answer for now.
    held_after: watch::Sender<Option<u64>>,
    runtime: Handle,
}

/// A slot, and the count of those running; both go back on Drop.
pub struct Slot<'e> {
    _permit: Option<SemaphorePermit<'e>>,
    _running: Counted<'e>,
}

/// A place in the queue for a slot.
pub struct Place<'e> {
    engine: &'e Engine,
    waiting: Option<Counted<'e>>,
    permit: Option<SemaphorePermit<'e>>,
}

/// The queue is full.
pub struct Full;

/// How far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Loading,
    Ready,
}

impl Engine {
    pub fn new(options: Options, addr: SocketAddr, runtime: Handle) -> Result<Engine, BehaveError> {
        let defaults = Defaults::new(&options.behave)?;
        let engine = Engine {
            slots: (options.slots > 0).then(|| Semaphore::new(options.slots)),
            accepting: watch::Sender::new(true),
            listening: watch::Sender::new(false),
            stopped: watch::Sender::new(false),
            loaded: watch::Sender::new(0.0),
            held_after: watch::Sender::new(None),
            state: State::new(),
            started: Instant::now(),
            replies: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            generations: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            last_result: Mutex::new(Instant::now()),
            frozen: Mutex::new(None),
            options,
            addr,
            defaults,
            runtime,
        };
        Ok(engine)
    }

    /// Where the kind is in its start-up.
    pub fn phase(&self) -> Phase {
        let load = Duration::from_millis(self.options.load_ms);
        if self.started.elapsed() < load && *self.loaded.borrow() < 1.0 {
            Phase::Loading
        } else {
            Phase::Ready
        }
    }

    /// The share of loading after which the listener opens: vLLM and a hosted server when ready, SGLang half-way, llama.cpp at once.
    fn listens_from(&self) -> f64 {
        match self.options.kind {
            Kind::Llamacpp => 0.0,
            Kind::Sglang => 0.5,
            Kind::Vllm | Kind::Openai => 1.0,
        }
    }

    fn listen_at(&self) -> Instant {
        let load = Duration::from_millis(self.options.load_ms);
        self.started + load.mul_f64(self.listens_from())
    }

    pub fn listens_at_once(&self) -> bool {
        self.listen_at() <= self.started
    }

    /// Returns when loading has come so far that the listener opens.
    pub async fn may_listen(&self) {
        let mut loaded = self.loaded.subscribe();
        let told = loaded.wait_for(|share| *share >= self.listens_from());
        // The engine outlives its listener.
        let _ = tokio::time::timeout_at(self.listen_at(), told).await;
    }

    /// Whether the listener is as `accept` wants it, as far as loading allows.
    pub fn is_settled(&self) -> bool {
        let is_told = *self.loaded.borrow() >= self.listens_from();
        let may_listen = is_told || Instant::now() >= self.listen_at();
        !may_listen || *self.listening.borrow() == *self.accepting.borrow()
    }

    /// Returns when it is.
    pub async fn settled(&self) {
        let mut listening = self.listening.subscribe();
        while !self.is_settled() {
            if listening.changed().await.is_err() {
                return;
            }
        }
    }

    /// Turns the switches that the engine is started with.
    pub fn begin(self: &Arc<Engine>) {
        self.apply(&self.defaults.current());
    }

    /// How long a connection may be idle.
    pub fn idle(&self) -> Duration {
        Duration::from_millis(
            self.defaults
                .current()
                .close_idle_ms
                .unwrap_or(self.options.keepalive_ms),
        )
    }

    /// Changes the engine's defaults; see [`Defaults::merge`].
    pub fn merge(self: &Arc<Engine>, json: &str) -> Result<(), BehaveError> {
        let behave = self.defaults.merge(json)?;
        self.apply(&behave);
        Ok(())
    }

    /// Counters to nothing, behaviour to what the engine was started with.
    pub fn reset(self: &Arc<Engine>) {
        let behave = self.defaults.reset();
        self.state.reset();
        for counter in [&self.failed, &self.generations, &self.prompt_tokens] {
            counter.store(0, Ordering::Relaxed);
        }
        self.apply(&behave);
    }

    /// Takes a place in the queue, or says that it is full.
    pub fn enter(&self) -> Result<Place<'_>, Full> {
        let Some(slots) = &self.slots else {
            return Ok(Place {
                engine: self,
                waiting: None,
                permit: None,
            });
        };
        if let Ok(permit) = slots.try_acquire() {
            return Ok(Place {
                engine: self,
                waiting: None,
                permit: Some(permit),
            });
        }
        // llama.cpp has no bound on its queue.
        let limit = self
            .options
            .max_queue
            .filter(|_| self.options.kind != Kind::Llamacpp);
        let waiting = self.state.wait(limit.unwrap_or(usize::MAX)).ok_or(Full)?;
        Ok(Place {
            engine: self,
            waiting: Some(waiting),
            permit: None,
        })
    }

    /// What holds for this request once `fail_first` has been counted.
    pub fn fail_first(&self, behave: Arc<Behave>) -> Arc<Behave> {
        let Some(limit) = behave.fail_first else {
            return behave;
        };
        let counted = self
            .failed
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |failed| {
                (failed < limit).then_some(failed + 1)
            });
        Arc::new(if counted.is_ok() {
            behave.with_failure()
        } else {
            behave.without_failure()
        })
    }

    /// Counts a generation request; ends the engine when `exit_after` of them have been.
    pub async fn count_generation(&self, behave: &Behave) {
        let before = self.generations.fetch_add(1, Ordering::Relaxed);
        if behave.exit_after.is_some_and(|limit| before >= limit) {
            self.exit().await;
        }
    }

    /// Ends the process; within a test process, ends all that a dead process would end.
    pub async fn exit(&self) {
        if self.options.may_exit {
            std::process::exit(1);
        }
        self.stopped.send_replace(true);
        std::future::pending::<()>().await;
    }

    pub fn reply_number(&self) -> u64 {
        self.replies.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub fn count_prompt(&self, tokens: u64) {
        self.prompt_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Returns when an answer that has so many tokens may get another one.
    pub async fn let_go(&self, tokens: u64) {
        let mut held_after = self.held_after.subscribe();
        // The engine outlives its answers.
        let _ = held_after
            .wait_for(|limit| limit.is_none_or(|limit| tokens < limit))
            .await;
    }

    /// Somebody got a result.
    pub fn result(&self) {
        if self.options.kind == Kind::Llamacpp {
            *self
                .last_result
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner()) = Instant::now();
        }
    }

    /// Returns when nobody has had a result for a while.
    pub async fn quiet(&self) {
        loop {
            let last = *self
                .last_result
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            let quiet_at = last + Duration::from_millis(QUIET_MS);
            if quiet_at <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(quiet_at).await;
        }
    }

    /// The metrics page, unless the kind has none.
    pub fn metrics_page(&self, behave: &Behave) -> Option<String> {
        if behave.metrics == Metrics::Frozen {
            let frozen = self
                .frozen
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner())
                .clone();
            return frozen.or_else(|| self.live_page(behave));
        }
        self.live_page(behave)
    }

    /// Requests waiting and the share of the KV cache in use, as `endpoint-load-metrics` tells them.
    pub fn numbers(&self) -> Numbers {
        let (running, waiting, finished) = self.state.load();
        let slots = if self.options.slots > 0 {
            self.options.slots as f64
        } else {
            UNLIMITED_SLOTS
        };
        Numbers {
            running: running as f64,
            waiting: waiting as f64,
            kv: (running as f64 / slots).min(1.0),
            prompt_tokens: self.prompt_tokens.load(Ordering::Relaxed),
            tokens: self.state.tokens(),
            finished,
        }
    }

    /// The first served name.
    pub fn model(&self) -> &str {
        self.options.models.first().map_or("fake", String::as_str)
    }

    fn live_page(&self, behave: &Behave) -> Option<String> {
        let numbers = self
            .numbers()
            .with(behave.metrics_values.unwrap_or_default());
        metrics::page(self.options.kind, self.model(), &numbers)
    }

    /// Turns the switches that are no mere lookups.
    fn apply(self: &Arc<Engine>, behave: &Behave) {
        let mut frozen = self
            .frozen
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if behave.metrics != Metrics::Frozen {
            *frozen = None;
        } else if frozen.is_none() {
            *frozen = self.live_page(behave);
        }
        drop(frozen);
        self.loaded.send_replace(behave.loaded.unwrap_or(0.0));
        self.held_after.send_replace(behave.hold_after);
        let accept = behave.accept.unwrap_or(true);
        self.accepting.send_replace(accept);
        if let (false, Some(again_ms)) = (accept, behave.accept_again_ms) {
            let engine = self.clone();
            self.runtime.spawn(async move {
                tokio::time::sleep(Duration::from_millis(again_ms)).await;
                let _ = engine.merge(r#"{"accept":null,"accept_again_ms":null}"#);
            });
        }
    }
}

impl<'e> Place<'e> {
    /// Waits for the slot.
    pub async fn slot(mut self) -> Slot<'e> {
        let permit = match (self.permit.take(), &self.engine.slots) {
            // The semaphore is never closed.
            (None, Some(slots)) => slots.acquire().await.ok(),
            (permit, _) => permit,
        };
        self.waiting = None;
        Slot {
            _permit: permit,
            _running: self.engine.state.run(),
        }
    }
}
