//! What a shard's machine makes of its engine's answers, and of none.

use llmgw_proto::shard::ShardState;

use super::{Action, Life, Plan, Probed, Reason};

/// So many answers in a row that say "not ready" take a ready engine out. Answers that do not come say nothing.
pub const UNREADY_PROBES: u32 = 3;
/// A ready engine that answered nothing for so long has that said of it.
pub const SILENCE_TOLD_MS: u64 = 60_000;
/// And after so long it is no engine any more: it fails, and another one takes its place.
pub const SILENCE_MAX_MS: u64 = 10 * 60_000;
/// What one question adds to that at most; two of them are less apart. An agent that was frozen did not ask meanwhile.
const SILENCE_STEP_MAX_MS: u64 = 20_000;

/// How long an engine has not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Silence {
    /// The end of the last question.
    asked_ms: u64,
    lasted_ms: u64,
}

impl Life {
    pub(super) fn probed(&mut self, plan: &Plan, probed: &Probed, now_ms: u64) -> Vec<Action> {
        match (self.state, probed) {
            (ShardState::Loading, Probed::Ready) => self.ready(Action::ProbeSeldom),
            (ShardState::Ready, Probed::Ready) => {
                self.unready_probes = 0;
                self.heard()
            }
            (ShardState::Loading, Probed::NotReady(what) | Probed::Silent(what)) => {
                if self.reason == *what {
                    return Vec::new();
                }
                self.reason.clone_from(what);
                vec![Action::Report]
            }
            (ShardState::Ready, Probed::NotReady(what)) => {
                let heard = self.heard();
                self.unready_probes += 1;
                if self.unready_probes < UNREADY_PROBES {
                    return heard;
                }
                self.state = ShardState::Loading;
                self.start_by_ms = Some(now_ms.saturating_add(plan.start_deadline_ms));
                self.reason = format!("it was ready, and is not any more: {what}");
                vec![
                    Action::RecordReady(false),
                    Action::Report,
                    Action::ProbeOften,
                ]
            }
            (ShardState::Ready, Probed::Silent(what)) => self.silent(plan, what, now_ms),
            _ => Vec::new(),
        }
    }

    /// A ready engine answered, whatever it said.
    fn heard(&mut self) -> Vec<Action> {
        self.silence = None;
        if self.reason.is_empty() {
            return Vec::new();
        }
        self.reason.clear();
        vec![Action::Report]
    }

    /// A ready engine did not answer. It may be busy: the gateway sees whether requests are answered. What lasts is said, and not for ever.
    fn silent(&mut self, plan: &Plan, what: &str, now_ms: u64) -> Vec<Action> {
        let lasted_ms = self.silence.map_or(0, |silence| {
            let passed_ms = now_ms.saturating_sub(silence.asked_ms);
            silence.lasted_ms + passed_ms.min(SILENCE_STEP_MAX_MS)
        });
        self.silence = Some(Silence {
            asked_ms: now_ms,
            lasted_ms,
        });
        let text = |limit_ms: u64| format!("no answer for {} s: {what}", limit_ms / 1_000);
        if lasted_ms >= SILENCE_MAX_MS {
            let reason = Reason::new("unresponsive", text(SILENCE_MAX_MS));
            return self.fail(plan, reason, None, now_ms);
        }
        if lasted_ms < SILENCE_TOLD_MS || !self.reason.is_empty() {
            return Vec::new();
        }
        self.reason = text(SILENCE_TOLD_MS);
        vec![Action::Report]
    }
}
