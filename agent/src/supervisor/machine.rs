//! A shard's life as a pure function: (plan, life, event, now) to what to do next. Nothing here waits, starts or kills.
//!
//! ```text
//! pending -> starting -> loading <-> ready -> draining -> stopping -> stopped
//!                    any of them -> stopping -> failed
//! ```
//!
//! A shard that fails is `stopping` until nothing of it is left and its GPUs are free, so that `failed` and `stopped` both
//! mean that its place can be given away. The one exception says so: processes that no signal ends.

mod ending;
mod probing;

use std::fmt;

use llmgw_proto::shard::{Exit, ShardSpec, ShardState, WaitFor};

use super::spec_store::Asked;
use super::tree::HANGS_AFTER;
use probing::Silence;

/// What is left of a shard that failed gets this long between SIGTERM and SIGKILL, or its own grace if that is shorter.
pub const FAILURE_GRACE_MAX_MS: u64 = 5_000;
/// How long the processes may take to go after SIGKILL. Those that stay wait in the kernel.
pub const KILL_WAIT_MAX_MS: u64 = 30_000;
// A stranger's environment that hangs must not make one that went at once a failure, nor a machine that stood still.
const _: () = assert!(KILL_WAIT_MAX_MS as u128 >= 2 * HANGS_AFTER.as_millis());
/// How long it may take until the GPUs are looked at once the processes are gone: a probe that is under way, and then the one that was
/// asked for, each to its deadline and killed.
pub const LOOK_WAIT_MAX_MS: u64 = 65_000;
/// How long the GPUs' memory may take to fall from that look on.
pub const RELEASE_WAIT_MAX_MS: u64 = 30_000;

/// What of a spec the machine needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub commands: Vec<Planned>,
    pub serves_http: bool,
    pub start_deadline_ms: u64,
    pub stop_grace_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    pub name: String,
    pub kind: Kind,
    pub wait_for: Option<WaitFor>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It must end with status 0 before the next one starts.
    Step,
    /// It runs as long as the shard; its end is the shard's failure.
    Sidecar,
    /// The last one: its end is the shard's.
    Main,
}

/// Where a shard is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Life {
    pub state: ShardState,
    /// Why; empty where there is nothing to say.
    pub reason: String,
    pub exit: Option<Exit>,
    /// The command to start, or the one that is being started.
    next: usize,
    /// It waits for its turn to be started, or is.
    is_being_started: bool,
    failure: Option<Reason>,
    /// Ready by then, or failed.
    start_by_ms: Option<u64>,
    /// The awaited address listens by then, or the shard has failed.
    listens_by_ms: Option<u64>,
    /// The end of the step of the stop that is under way.
    step_by_ms: Option<u64>,
    ending: Ending,
    unready_probes: u32,
    /// Of a ready engine, from the first question that it did not answer on.
    silence: Option<Silence>,
    /// What is still there, while it is stopped.
    remains: String,
}

/// How far a stop has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    No,
    Terminated,
    Killed,
    /// Nothing runs any more; its GPUs were not looked at since.
    Looking,
    /// They were, and something held them still.
    Releasing,
    /// Some processes do not die. The shard is over, and still holds what it had.
    Haunted,
    Over,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The node can run it, and it is on record.
    Checked,
    Refused(Reason),
    Listens {
        command: usize,
    },
    Started {
        command: usize,
    },
    NotStarted {
        command: usize,
        error: String,
    },
    Exited {
        command: usize,
        exit: Exit,
    },
    Probed(Probed),
    Asked(Asked),
    /// So much is left of it, in words.
    Remains(String),
    /// No process of it is left.
    Gone,
    Released,
    /// Its GPUs were not looked at since it has no process, in words.
    Unseen(String),
    /// They were, and are not free, in words.
    Held(String),
    Tick,
}

/// What a look at the engine said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probed {
    Ready,
    /// It said no, or refused the connection; in words.
    NotReady(String),
    /// No answer in time. It may just be busy.
    Silent(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Look whether the node can run it, and put it on record.
    Check,
    Await {
        command: usize,
    },
    Start {
        command: usize,
    },
    /// Ask the engine often, until it is ready.
    ProbeOften,
    /// Ask it now and then.
    ProbeSeldom,
    /// No more questions, no more waiting for addresses or for a turn to be started. A start that is under way ends first.
    LetBe,
    /// Put on record whether it is ready.
    RecordReady(bool),
    /// SIGTERM to every process of it, and a look now and then whether any is left.
    Terminate,
    /// SIGKILL likewise.
    Kill,
    /// Look whether its GPUs are free.
    Release,
    Report,
    /// Nothing is left: its record goes. Before the last report, upon which the same shard may be started again.
    Forget,
}

/// Why a shard was refused or failed: a code that stays the same, and a sentence with the facts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    pub code: &'static str,
    pub text: String,
}

/// What an agent found of a shard that an earlier one had started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remnant {
    /// The commands up to `next` run or are done.
    Runs { next: usize, was_ready: bool },
    /// Something that must run does not.
    Broken(Reason),
    /// Nothing of it ever ran.
    Untouched,
}

impl Reason {
    pub fn new(code: &'static str, text: impl Into<String>) -> Reason {
        Reason {
            code,
            text: text.into(),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.text)
    }
}

impl Plan {
    pub fn of(spec: &ShardSpec) -> Plan {
        let last = spec.commands.len().saturating_sub(1);
        let planned = spec
            .commands
            .iter()
            .enumerate()
            .map(|(at, command)| Planned {
                name: command.executable.clone(),
                kind: match (at == last, command.sidecar) {
                    (true, _) => Kind::Main,
                    (false, true) => Kind::Sidecar,
                    (false, false) => Kind::Step,
                },
                wait_for: command.wait_for.clone(),
            });
        Plan {
            commands: planned.collect(),
            serves_http: spec.serves_http,
            start_deadline_ms: spec.readiness.start_deadline_ms,
            stop_grace_ms: spec.stop_grace_ms,
        }
    }

    fn name(&self, command: usize) -> &str {
        self.commands
            .get(command)
            .map_or("?", |planned| &planned.name)
    }
}

impl Life {
    /// A shard that was just accepted.
    pub fn new() -> (Life, Vec<Action>) {
        let life = Life {
            state: ShardState::Pending,
            reason: String::new(),
            exit: None,
            next: 0,
            is_being_started: false,
            failure: None,
            start_by_ms: None,
            listens_by_ms: None,
            step_by_ms: None,
            ending: Ending::No,
            unready_probes: 0,
            silence: None,
            remains: String::new(),
        };
        (life, vec![Action::Report, Action::Check])
    }

    /// A shard that an earlier agent had.
    pub fn adopted(
        plan: &Plan,
        remnant: Remnant,
        asked: Asked,
        now_ms: u64,
    ) -> (Life, Vec<Action>) {
        let (mut life, first) = Life::new();
        if asked >= Asked::Stop {
            // Whatever is left: that it ended meanwhile is what was asked for.
            let actions = life.ask(plan, asked, now_ms);
            return (life, actions);
        }
        let actions = match remnant {
            Remnant::Broken(reason) => life.fail(plan, reason, Some(Exit::Unknown), now_ms),
            _ if asked == Asked::Drain => life.ask(plan, asked, now_ms),
            Remnant::Untouched => first,
            Remnant::Runs { next, was_ready } => {
                life.start_by_ms = Some(now_ms.saturating_add(plan.start_deadline_ms));
                life.state = ShardState::Starting;
                life.next = next;
                match next < plan.commands.len() {
                    true => life.begin(plan, now_ms),
                    false if was_ready && plan.serves_http => life.ready(Action::ProbeSeldom),
                    false => life.all_started(plan),
                }
            }
        };
        (life, actions)
    }

    /// The next event, if it is none from outside: a [`Event::Tick`] at this time.
    pub fn next_tick_ms(&self) -> Option<u64> {
        [self.start_by_ms, self.listens_by_ms, self.step_by_ms]
            .into_iter()
            .flatten()
            .min()
    }

    /// Over, and nothing left to wait for.
    pub fn is_over(&self) -> bool {
        self.ending == Ending::Over
    }

    /// It has failed, or is on its way there.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some() || self.state == ShardState::Failed
    }

    /// What happens at `now_ms`, on a clock that never goes back.
    pub fn step(&self, plan: &Plan, event: &Event, now_ms: u64) -> (Life, Vec<Action>) {
        let mut life = self.clone();
        let actions = match life.ending {
            Ending::No => life.live(plan, event, now_ms),
            Ending::Over => Vec::new(),
            _ => life.end(plan, event, now_ms),
        };
        (life, actions)
    }

    /// A step while the shard is meant to run.
    fn live(&mut self, plan: &Plan, event: &Event, now_ms: u64) -> Vec<Action> {
        let starting = self.state == ShardState::Starting;
        match event {
            Event::Checked if self.state == ShardState::Pending => {
                self.state = ShardState::Starting;
                self.start_by_ms = Some(now_ms.saturating_add(plan.start_deadline_ms));
                self.begin(plan, now_ms)
            }
            Event::Refused(reason) => {
                self.state = ShardState::Failed;
                self.ending = Ending::Over;
                self.reason = reason.to_string();
                vec![Action::Forget, Action::Report]
            }
            Event::Listens { command } if starting && *command == self.next => {
                self.listens_by_ms = None;
                self.is_being_started = true;
                vec![Action::Start { command: *command }]
            }
            Event::Started { command } if starting && *command == self.next => {
                self.is_being_started = false;
                self.started(plan, now_ms)
            }
            Event::NotStarted { error, .. } => {
                let reason = Reason::new("not_started", error.clone());
                self.fail(plan, reason, None, now_ms)
            }
            Event::Exited { command, exit } => self.exited(plan, *command, *exit, now_ms),
            Event::Probed(probed) => self.probed(plan, probed, now_ms),
            Event::Asked(asked) => self.ask(plan, *asked, now_ms),
            Event::Tick => self.tick(plan, now_ms),
            _ => Vec::new(),
        }
    }

    /// Waits for the next command's address, or starts it.
    fn begin(&mut self, plan: &Plan, now_ms: u64) -> Vec<Action> {
        let command = self.next;
        let wait_for = plan
            .commands
            .get(command)
            .and_then(|planned| planned.wait_for.as_ref());
        let act = match wait_for {
            Some(wait) => {
                self.listens_by_ms = Some(now_ms.saturating_add(wait.timeout_ms));
                self.reason = format!("`{}` waits for {}", plan.name(command), wait.address);
                Action::Await { command }
            }
            None => {
                self.reason.clear();
                self.is_being_started = true;
                Action::Start { command }
            }
        };
        vec![Action::Report, act]
    }

    fn started(&mut self, plan: &Plan, now_ms: u64) -> Vec<Action> {
        match plan.commands.get(self.next).map(|planned| planned.kind) {
            Some(Kind::Step) => Vec::new(),
            Some(Kind::Sidecar) => {
                self.next += 1;
                self.begin(plan, now_ms)
            }
            Some(Kind::Main) | None => {
                self.next += 1;
                self.all_started(plan)
            }
        }
    }

    fn all_started(&mut self, plan: &Plan) -> Vec<Action> {
        self.reason.clear();
        if !plan.serves_http {
            return self.ready(Action::LetBe);
        }
        self.state = ShardState::Loading;
        vec![Action::Report, Action::ProbeOften]
    }

    fn ready(&mut self, then: Action) -> Vec<Action> {
        self.state = ShardState::Ready;
        self.start_by_ms = None;
        self.unready_probes = 0;
        self.silence = None;
        self.reason.clear();
        vec![Action::RecordReady(true), Action::Report, then]
    }

    fn exited(&mut self, plan: &Plan, command: usize, exit: Exit, now_ms: u64) -> Vec<Action> {
        let is_step = plan
            .commands
            .get(command)
            .is_some_and(|planned| planned.kind == Kind::Step);
        if is_step && exit == Exit::Status(0) {
            let was_awaited = self.state == ShardState::Starting && command == self.next;
            if !was_awaited {
                return Vec::new();
            }
            self.next += 1;
            return self.begin(plan, now_ms);
        }
        let name = plan.name(command);
        let text = match exit {
            Exit::Status(0) => format!("`{name}` {exit} without being asked to"),
            exit => format!("`{name}` {exit}"),
        };
        self.fail(plan, Reason::new("exited", text), Some(exit), now_ms)
    }

    fn ask(&mut self, plan: &Plan, asked: Asked, now_ms: u64) -> Vec<Action> {
        let kill = match asked {
            Asked::Run => return Vec::new(),
            Asked::Drain if self.state == ShardState::Draining => return Vec::new(),
            Asked::Drain => {
                self.state = ShardState::Draining;
                self.reason.clear();
                (self.start_by_ms, self.listens_by_ms) = (None, None);
                return vec![Action::LetBe, Action::Report];
            }
            Asked::Stop => false,
            Asked::Kill => true,
        };
        self.reason.clear();
        self.stop(plan.stop_grace_ms, kill, now_ms)
    }

    fn fail(
        &mut self,
        plan: &Plan,
        reason: Reason,
        exit: Option<Exit>,
        now_ms: u64,
    ) -> Vec<Action> {
        self.reason = reason.to_string();
        self.failure = Some(reason);
        self.exit = exit;
        self.stop(plan.stop_grace_ms.min(FAILURE_GRACE_MAX_MS), false, now_ms)
    }

    fn tick(&mut self, plan: &Plan, now_ms: u64) -> Vec<Action> {
        let is_due = |at: Option<u64>| at.is_some_and(|at| at <= now_ms);
        let planned = plan.commands.get(self.next);
        if let (true, Some(planned)) = (is_due(self.listens_by_ms), planned) {
            let address = planned
                .wait_for
                .as_ref()
                .map_or("", |wait| wait.address.as_str());
            let timeout_ms = planned.wait_for.as_ref().map_or(0, |wait| wait.timeout_ms);
            let text = format!(
                "`{}` was not started: {address} did not listen within {timeout_ms} ms",
                planned.name
            );
            return self.fail(plan, Reason::new("wait_timeout", text), None, now_ms);
        }
        if is_due(self.start_by_ms) {
            let last = match self.is_being_started {
                // Another one may hang, and it is all that this one waits for.
                true => format!(
                    "; at last: `{}` was not executed yet, and processes are started one at a time",
                    plan.name(self.next)
                ),
                false if self.reason.is_empty() => String::new(),
                false => format!("; at last: {}", self.reason),
            };
            let text = format!(
                "it was not ready within {} ms{last}",
                plan.start_deadline_ms
            );
            return self.fail(plan, Reason::new("start_deadline", text), None, now_ms);
        }
        Vec::new()
    }
}

#[cfg(test)]
mod tests;
