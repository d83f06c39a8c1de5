//! The machine's second half: a shard that is being stopped, because somebody asked for it or because it failed.

use llmgw_proto::shard::{GONE_NOW, NOT_GONE, ShardState};

use super::{
    Action, Ending, Event, KILL_WAIT_MAX_MS, LOOK_WAIT_MAX_MS, Life, Plan, RELEASE_WAIT_MAX_MS,
    Reason,
};
use crate::supervisor::spec_store::Asked;

impl Life {
    pub(super) fn stop(&mut self, grace_ms: u64, kill: bool, now_ms: u64) -> Vec<Action> {
        self.state = ShardState::Stopping;
        (self.start_by_ms, self.listens_by_ms) = (None, None);
        self.ending = Ending::Terminated;
        self.step_by_ms = Some(now_ms.saturating_add(grace_ms));
        let mut actions = vec![Action::LetBe, Action::Report];
        match kill {
            true => actions.push(self.kill(now_ms)),
            false => actions.push(Action::Terminate),
        }
        actions
    }

    fn kill(&mut self, now_ms: u64) -> Action {
        self.ending = Ending::Killed;
        self.step_by_ms = Some(now_ms.saturating_add(KILL_WAIT_MAX_MS));
        Action::Kill
    }

    /// A step while the shard is being stopped.
    pub(super) fn end(&mut self, plan: &Plan, event: &Event, now_ms: u64) -> Vec<Action> {
        let is_due = self.step_by_ms.is_some_and(|at| at <= now_ms);
        match (self.ending, event) {
            (Ending::Terminated, Event::Asked(Asked::Kill)) => vec![self.kill(now_ms)],
            // Asked again, or asked to stop what fails: the shorter of the two graces stays.
            (_, Event::Asked(_)) => Vec::new(),
            (Ending::Terminated | Ending::Killed, Event::Remains(what)) => {
                self.remains.clone_from(what);
                Vec::new()
            }
            (Ending::Terminated | Ending::Killed, Event::Gone) => {
                self.ending = Ending::Looking;
                self.step_by_ms = Some(now_ms.saturating_add(LOOK_WAIT_MAX_MS));
                self.remains.clear();
                vec![Action::Release]
            }
            (Ending::Terminated, Event::Tick) if is_due => vec![self.kill(now_ms)],
            (Ending::Killed, Event::Tick) if is_due => self.haunt(),
            (Ending::Haunted, Event::Gone) => {
                self.ending = Ending::Over;
                self.reason.push_str(&format!("; {GONE_NOW}"));
                vec![Action::Forget, Action::Report]
            }
            (Ending::Looking | Ending::Releasing, Event::Released) => self.over(),
            (Ending::Looking, Event::Unseen(what)) | (Ending::Releasing, Event::Held(what)) => {
                self.remains.clone_from(what);
                Vec::new()
            }
            (Ending::Looking, Event::Held(what)) => {
                self.ending = Ending::Releasing;
                self.step_by_ms = Some(now_ms.saturating_add(RELEASE_WAIT_MAX_MS));
                self.remains.clone_from(what);
                Vec::new()
            }
            (Ending::Looking | Ending::Releasing, Event::Tick) if is_due => {
                let text = format!("its processes are gone, and {}", self.remains);
                self.blame(Reason::new("gpu_held", text));
                self.over()
            }
            (_, Event::Exited { exit, .. }) if plan.commands.len() == 1 && self.exit.is_none() => {
                self.exit = Some(*exit);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// What waits in the kernel is not waited for any longer.
    fn haunt(&mut self) -> Vec<Action> {
        let text = format!("SIGKILL did not end {}", self.remains);
        self.blame(Reason::new(NOT_GONE, text));
        self.ending = Ending::Haunted;
        self.step_by_ms = None;
        self.state = ShardState::Failed;
        vec![Action::Report]
    }

    /// Adds to what is already known to have gone wrong.
    fn blame(&mut self, reason: Reason) {
        self.reason = match &self.failure {
            Some(first) => format!("{first}; {reason}"),
            None => reason.to_string(),
        };
        self.failure.get_or_insert(reason);
    }

    fn over(&mut self) -> Vec<Action> {
        self.ending = Ending::Over;
        self.step_by_ms = None;
        self.state = match self.failure {
            Some(_) => ShardState::Failed,
            None => ShardState::Stopped,
        };
        vec![Action::Forget, Action::Report]
    }
}
