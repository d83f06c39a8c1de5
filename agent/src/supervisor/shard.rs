//! One shard, one task: what the machine decides is done here, and what happens is told to the machine.

mod begin;
mod end;

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use llmgw_proto::shard::{Exit, ShardSpec, ShardState, ShardStatus};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::SupervisorOptions;
use super::board::Board;
use super::cgroup::{Groups, ShardCgroup};
use super::ending::Force;
use super::logs::LogTail;
use super::logs::output::Output;
use super::machine::{Action, Event, Kind, Life, Plan, Remnant};
use super::preflight::Claims;
use super::process::{Process, Turn};
use super::spec_store::{Asked, Record, RecordedProcess, SpecStore};
use super::tree::Traces;

/// Events that wait for the task; whoever has more waits.
const EVENTS_MAX: usize = 64;
/// Lines that a status carries with a failure.
const STATUS_TAIL_LINES: usize = 50;
/// And their text: a registration carries many statuses in one message.
const STATUS_TAIL_MAX_BYTES: usize = 16 * 1024;

/// What all shards of a supervisor share.
pub struct Context {
    pub options: SupervisorOptions,
    /// The state directory as [`super::tree::STATE_VARIABLE`] has it.
    pub state_dir: String,
    /// How its shards' control groups are called.
    pub groups: Groups,
    pub store: SpecStore,
    pub board: Board,
    /// The machine's clock begins here.
    pub epoch: Instant,
    pub cancel: CancellationToken,
    /// A shard's task panicked: nobody looks after its processes.
    pub lost: CancellationToken,
}

/// Held by a shard's task; tells where it panics.
struct Watch(CancellationToken);

impl Drop for Watch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.cancel();
        }
    }
}

/// What the supervisor keeps of a shard beside its task.
#[derive(Clone)]
pub struct Handle {
    pub spec: Arc<ShardSpec>,
    pub spec_hash: String,
    pub asked: watch::Sender<Asked>,
    pub tail: Arc<Mutex<LogTail>>,
    /// Nothing of it is left, and its place is free.
    pub over: Arc<AtomicBool>,
    /// The processes that it started.
    traces: Arc<Mutex<Traces>>,
    /// Where it has one.
    cgroup: Arc<Mutex<Option<ShardCgroup>>>,
}

/// A command's wait for its turn to be started.
type Waits = Pin<Box<dyn Future<Output = (usize, Turn)> + Send + Sync>>;

/// A task that ends with its owner.
struct Background(JoinHandle<()>);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub struct ShardTask {
    context: Arc<Context>,
    handle: Handle,
    asked: watch::Receiver<Asked>,
    plan: Plan,
    life: Life,
    /// What it begins with.
    first: Vec<Action>,
    record: Record,
    claims: Claims,
    cgroup: Option<ShardCgroup>,
    output: Option<Output>,
    adopted: bool,
    since: (ShardState, u64),
    events: mpsc::Receiver<Event>,
    sender: mpsc::Sender<Event>,
    /// The processes that it started or adopted.
    held: Vec<Arc<Process>>,
    /// One for each of them, waiting for its end.
    exits: Vec<Background>,
    /// Waits for its turn, before a start.
    turn: Option<Waits>,
    /// Asks the engine, or tries to reach an address.
    asking: Option<Background>,
    /// Looks whether anything is left.
    ending: Option<Background>,
    look_now: Arc<Notify>,
    /// Looks what there is, while it is meant to run.
    remembering: Option<Background>,
    remembered: Instant,
}

impl Handle {
    pub fn new(spec: ShardSpec, asked: Asked) -> Handle {
        let secret = spec.api_key.as_ref().map(|key| key.expose().to_owned());
        Handle {
            spec_hash: spec.hash(),
            spec: Arc::new(spec),
            asked: watch::Sender::new(asked),
            tail: Arc::new(Mutex::new(LogTail::new(secret))),
            over: Arc::default(),
            traces: Arc::default(),
            cgroup: Arc::default(),
        }
    }

    /// What leads to its processes now, and whether its control group is among it. Reads that.
    pub fn traces(&self) -> io::Result<(Traces, bool)> {
        let traces = self.traces.lock();
        let mut traces = traces.unwrap_or_else(PoisonError::into_inner).clone();
        let cgroup = self.cgroup.lock();
        let cgroup = cgroup.unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(cgroup) = &cgroup {
            traces.in_cgroup = cgroup.pids()?;
        }
        Ok((traces, cgroup.is_some()))
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    pub fn tail(&self) -> MutexGuard<'_, LogTail> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ShardTask {
    /// A shard that the server asked for. It is reported as pending at once.
    pub fn new(context: Arc<Context>, handle: Handle, claims: Claims) -> ShardTask {
        let record = Record::new((*handle.spec).clone());
        let mut task = ShardTask::with(context, handle, claims, record);
        task.report();
        task
    }

    /// A shard that an earlier agent had, with the processes of it that run. It is reported as it is at once.
    pub fn taken_over(
        context: Arc<Context>,
        handle: Handle,
        record: Record,
        remnant: Remnant,
        alive: Vec<(usize, Process)>,
    ) -> ShardTask {
        let mut task = ShardTask::with(context, handle, Claims::default(), record);
        task.adopted = remnant != Remnant::Untouched;
        let made = task.record.cgroup.as_deref();
        task.cgroup = made.and_then(ShardCgroup::open);
        task.share_traces();
        for (command, process) in alive {
            task.watch(command, process);
        }
        let (asked, now_ms) = (task.record.asked, task.now_ms());
        (task.life, task.first) = Life::adopted(&task.plan, remnant, asked, now_ms);
        task.open_output();
        task.report();
        task
    }

    fn with(context: Arc<Context>, handle: Handle, claims: Claims, record: Record) -> ShardTask {
        let (life, first) = Life::new();
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let task = ShardTask {
            plan: Plan::of(&record.spec),
            asked: handle.asked.subscribe(),
            since: (life.state, wall_ms()),
            context,
            handle,
            life,
            first,
            record,
            claims,
            cgroup: None,
            output: None,
            adopted: false,
            events,
            sender,
            held: Vec::new(),
            exits: Vec::new(),
            turn: None,
            asking: None,
            ending: None,
            look_now: Arc::default(),
            remembering: None,
            remembered: Instant::now(),
        };
        task.share_traces();
        task
    }

    /// Lives until the shard is over, or the agent ends.
    pub async fn run(mut self) {
        let _watch = Watch(self.context.lost.clone());
        let mut actions = std::mem::take(&mut self.first);
        let mut reads = tokio::time::interval(self.context.options.pace.read_output);
        reads.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let cancel = self.context.cancel.clone();
        loop {
            self.act(actions).await;
            if self.life.is_over() {
                return self.reap().await;
            }
            let tick = self.next_tick();
            let event = tokio::select! {
                biased;
                () = cancel.cancelled() => return,
                Ok(()) = self.asked.changed() => {
                    let asked = *self.asked.borrow_and_update();
                    Some(Event::Asked(asked))
                }
                Some(event) = self.events.recv() => Some(event),
                (command, turn) = its_turn(&mut self.turn) => {
                    self.turn = None;
                    Some(self.start(command, turn).await)
                }
                () = tick => Some(Event::Tick),
                _ = reads.tick() => None,
            };
            actions = match event {
                Some(Event::Gone) => self.gone().await,
                Some(event) => self.step(event).await,
                None => {
                    self.read_output();
                    self.remember();
                    Vec::new()
                }
            };
        }
    }

    /// The machine's next deadline.
    fn next_tick(&self) -> impl Future<Output = ()> + use<> {
        let at = self
            .life
            .next_tick_ms()
            .map(|at_ms| self.context.epoch + Duration::from_millis(at_ms));
        async move {
            match at {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        }
    }

    async fn step(&mut self, event: Event) -> Vec<Action> {
        self.note(&event).await;
        let (life, actions) = self.life.step(&self.plan, &event, self.now_ms());
        self.life = life;
        actions
    }

    /// What an event changes beside the machine.
    async fn note(&mut self, event: &Event) {
        match event {
            Event::Asked(asked) if *asked > self.record.asked => {
                // On record before any signal: an agent that dies during the stop goes on with it.
                self.record.asked = *asked;
                self.save("what was asked of the shard").await;
            }
            Event::Exited { command, exit } => {
                self.read_output();
                self.look_now.notify_one();
                let is_step = self.plan.commands.get(*command).map(|planned| planned.kind);
                if is_step == Some(Kind::Step) && *exit == Exit::Status(0) {
                    self.change(*command, |process| process.done = true);
                    self.save("the end of a step").await;
                }
            }
            _ => {}
        }
    }

    /// Does what the machine decided, and what it decides upon the outcome.
    async fn act(&mut self, actions: Vec<Action>) {
        let mut actions = std::collections::VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            if let Some(event) = self.perform(action).await {
                actions.extend(self.step(event).await);
            }
        }
    }

    async fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            // The next agent goes on with it.
            Action::Check | Action::Start { .. } if self.context.cancel.is_cancelled() => {}
            Action::Check => return Some(self.check().await),
            Action::Start { command } => self.await_turn(command),
            Action::Await { command } => self.await_address(command),
            Action::ProbeOften => self.probe(self.context.options.pace.probe_loading),
            Action::ProbeSeldom => self.probe(self.context.options.pace.probe_ready),
            Action::LetBe => (self.turn, self.asking) = (None, None),
            Action::RecordReady(ready) => {
                self.record.ready = ready;
                self.save("whether the shard is ready").await;
            }
            Action::Terminate => self.end(Force::Terminate),
            Action::Kill => self.end(Force::Kill),
            Action::Release => self.release(),
            Action::Report => self.report(),
            Action::Forget => self.forget().await,
        }
        None
    }

    fn share_traces(&self) {
        let mut traces = self
            .handle
            .traces
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        traces.shard.clone_from(&self.handle.spec.shard);
        traces.state_dir.clone_from(&self.context.state_dir);
        traces.leaders = self
            .record
            .processes
            .iter()
            .map(RecordedProcess::id)
            .collect();
        drop(traces);
        let mut cgroup = self.handle.cgroup.lock();
        let cgroup = cgroup
            .as_mut()
            .unwrap_or_else(|poisoned| poisoned.get_mut());
        cgroup.clone_from(&self.cgroup);
    }

    fn open_output(&mut self) {
        let path = self.context.store.output_path(&self.handle.spec.shard);
        match Output::open(&path) {
            Ok(output) => self.output = Some(output),
            Err(error) => {
                let shard = &self.handle.spec.shard;
                tracing::warn!(shard, %error, "the engine's output can't be read");
            }
        }
        if !self.adopted {
            return;
        }
        self.read_output();
        let note = "adopted by a restarted agent: of the lines above only the last are kept, and their times are those of the adoption";
        self.handle.tail().note(note, wall_ms());
    }

    fn read_output(&mut self) {
        let Some(output) = &mut self.output else {
            return;
        };
        if let Err(error) = output.read_into(&mut self.handle.tail(), wall_ms()) {
            let shard = &self.handle.spec.shard;
            tracing::warn!(shard, %error, "the engine's output can't be read or bounded now; tried again for as long as it runs");
        }
    }

    fn report(&mut self) {
        if self.since.0 != self.life.state {
            self.since = (self.life.state, wall_ms());
        }
        let mut log_tail = Vec::new();
        if self.life.has_failed() {
            self.read_output();
            let mut tail = self.handle.tail();
            if self.life.state.is_over() {
                tail.finish(wall_ms());
            }
            log_tail = tail.last_within(STATUS_TAIL_LINES, STATUS_TAIL_MAX_BYTES);
        }
        let status = ShardStatus {
            shard: self.handle.spec.shard.clone(),
            spec_hash: self.handle.spec_hash.clone(),
            state: self.life.state,
            reason: self.life.reason.clone(),
            exit: self.life.exit,
            log_tail,
            since_ms: self.since.1,
            adopted: self.adopted,
        };
        let (state, reason) = (status.state.as_str(), status.reason.as_str());
        match self.life.has_failed() {
            true => tracing::warn!(shard = status.shard, state, reason, "a shard fails"),
            false => tracing::info!(shard = status.shard, state, reason, "a shard's state"),
        }
        let is_over = self.life.is_over();
        // Neither before nor after: whoever sees that it is over may start it again, and so may whoever reads the status.
        self.context.board.put_with(status, || {
            if is_over {
                self.handle.over.store(true, Ordering::Release);
            }
        });
    }

    /// Puts the record on disk, on a thread that may wait for it.
    async fn write(&self) -> Result<(), String> {
        let (context, record) = (self.context.clone(), self.record.clone());
        let written = tokio::task::spawn_blocking(move || context.store.save(&record));
        match written.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The same where the shard's life goes on either way.
    async fn save(&self, what: &str) {
        if let Err(error) = self.write().await {
            let shard = &self.handle.spec.shard;
            tracing::error!(shard, error, "{what} can't be put on record");
        }
    }

    async fn forget(&mut self) {
        self.asking = None;
        self.ending = None;
        let (context, shard) = (self.context.clone(), self.handle.spec.shard.clone());
        let cgroup = self.cgroup.take();
        let removed = tokio::task::spawn_blocking(move || {
            if let Some(cgroup) = cgroup {
                cgroup.remove();
            }
            context.store.remove(&shard)
        });
        if let Ok(Err(error)) = removed.await {
            let shard = &self.handle.spec.shard;
            tracing::error!(shard, %error, "the record of a shard that is over can't be removed");
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.context.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

async fn its_turn(waits: &mut Option<Waits>) -> (usize, Turn) {
    match waits {
        Some(waits) => waits.await,
        None => std::future::pending().await,
    }
}

/// Milliseconds since 1970, for people; the machine has a clock that never goes back.
pub fn wall_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
