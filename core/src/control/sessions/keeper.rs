//! The one task that owns the table of nodes: takes in what sessions say, does what the table decides, publishes what it holds.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use llmgw_proto::identity::problem::IdentityProblem;
use llmgw_proto::session::{Refusal, RefusalCode, ServerMessage, SessionId, Welcome};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;

use super::INPUTS_MAX;
use super::door::Gate;
use super::seats::{Seat, Seats, too_slow};
use super::tails::Tails;
use crate::clock;
use crate::control::observed::{Cause, Change, Ignored, NodeEvent, NodeTable, Observed, Timing};
use crate::control::snapshot::NodeState;

/// Messages that are taken in before anything else is looked at.
const BATCH_MAX: usize = 512;
/// Between two copies for those who look: in a storm of registrations each copy would cost more than the change.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(10);
/// How often time passes in the table.
const TICK_MAX: Duration = Duration::from_secs(1);
const TICK_MIN: Duration = Duration::from_millis(20);
/// Ticks in one heartbeat.
const TICKS_PER_HEARTBEAT: u32 = 8;

/// What the keeper is told.
#[derive(Debug)]
pub(super) enum Input {
    /// A session registers. It sits from now on, unless the table says otherwise.
    Registers {
        session: SessionId,
        event: NodeEvent,
        seat: Seat,
    },
    Said(NodeEvent),
    Ended {
        session: SessionId,
        event: NodeEvent,
    },
}

pub(super) struct Keeper {
    /// What is configured; a reload changes it.
    timing: watch::Receiver<Timing>,
    table: NodeTable,
    seats: Arc<Seats>,
    gate: Arc<Gate>,
    tails: Arc<Tails>,
    published: watch::Sender<Arc<Observed>>,
    /// The revision that was published.
    revision: u64,
}

/// When time passes although words wait: without it one agent that says more than is taken in would stop it for all.
struct Pace {
    period: Duration,
    ticked_at: Instant,
    /// Words that were taken in since the next tick was due.
    late_words: usize,
}

impl Pace {
    fn new(period: Duration, now: Instant) -> Pace {
        Pace {
            period,
            ticked_at: now,
            late_words: 0,
        }
    }

    fn took(&mut self, words: usize, now: Instant) {
        if now.duration_since(self.ticked_at) >= self.period {
            self.late_words += words;
        }
    }

    /// All that waited when the tick was due has been heard.
    fn is_overdue(&self) -> bool {
        self.late_words >= INPUTS_MAX
    }
}

impl Keeper {
    pub(super) fn new(
        timing: watch::Receiver<Timing>,
        seats: Arc<Seats>,
        gate: Arc<Gate>,
        tails: Arc<Tails>,
    ) -> (Keeper, watch::Receiver<Arc<Observed>>) {
        let table = NodeTable::new(*timing.borrow(), clock::now_ms());
        let (published, observed) = watch::channel(Arc::new(table.observed().clone()));
        let keeper = Keeper {
            timing,
            table,
            seats,
            gate,
            tails,
            published,
            revision: 0,
        };
        (keeper, observed)
    }

    pub(super) async fn run(mut self, mut inputs: mpsc::Receiver<Input>, stop: CancellationToken) {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        let mut ticks = ticks(*self.timing.borrow());
        let mut published_at = Instant::now();
        let mut pace = Pace::new(ticks.period(), published_at);
        loop {
            let is_stale = self.table.observed().revision != self.revision;
            tokio::select! {
                // Words before time: a node whose heartbeat waits in the queue is not silent. But time is not kept waiting for ever.
                biased;
                () = stop.cancelled() => return,
                () = sleep_until(published_at + PUBLISH_INTERVAL), if is_stale => {
                    self.publish();
                    published_at = Instant::now();
                }
                () = ready(()), if pace.is_overdue() => {
                    published_at = self.tick();
                    pace = Pace::new(ticks.period(), published_at);
                    ticks.reset();
                }
                taken = inputs.recv_many(&mut batch, BATCH_MAX) => {
                    if taken == 0 {
                        return;
                    }
                    for input in batch.drain(..) {
                        self.take(input);
                    }
                    pace.took(taken, Instant::now());
                }
                changed = self.timing.changed(), if self.timing.has_changed().is_ok() => {
                    if changed.is_ok() {
                        let timing = *self.timing.borrow_and_update();
                        self.table.set_timing(timing);
                        ticks = self::ticks(timing);
                    }
                }
                _ = ticks.tick() => {
                    published_at = self.tick();
                    pace = Pace::new(ticks.period(), published_at);
                }
            }
        }
    }

    /// Time passes. Returns when that was published.
    fn tick(&mut self) -> Instant {
        self.apply(NodeEvent::Tick);
        // Also without a change: when each node was last heard is in it.
        self.publish();
        Instant::now()
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Registers {
                session,
                event,
                seat,
            } => {
                let intrudes = self.intrudes(&event);
                self.seats.put(session, seat);
                if let Some(refusal) = intrudes {
                    tracing::warn!("session {session} was refused: {refusal}");
                    self.seats.dismiss(session, ServerMessage::Refused(refusal));
                    return;
                }
                // What is denied or trusted may have changed since it was let in. Now that it sits, a further change finds it here, or has
                // ended it already; none comes between this look and the table, which so never hears of one that may not speak.
                let gate = self.gate.clone();
                let _held = gate.hold();
                if !self.seats.judge(session, &self.gate) && self.seats.has(session) {
                    self.apply(event);
                }
            }
            Input::Said(event) => self.apply(event),
            Input::Ended { session, event } => {
                self.seats.remove(session);
                self.tails.end(session);
                self.apply(event);
            }
        }
    }

    /// Why a registration without a certificate is not to take the place of a session that has one: where none is required, it would
    /// otherwise be enough to claim the node's id.
    fn intrudes(&self, event: &NodeEvent) -> Option<Refusal> {
        let NodeEvent::Registered {
            register,
            certificate: None,
            ..
        } = event
        else {
            return None;
        };
        let known = self.table.observed().nodes.get(&register.node)?;
        (known.session.is_some() && known.certificate.is_some()).then(|| Refusal {
            code: RefusalCode::Identity,
            message: IdentityProblem::NotAsBefore.sentence(&register.node),
            certificate: None,
            claimed: register.node.clone(),
        })
    }

    fn apply(&mut self, event: NodeEvent) {
        for change in self.table.apply(event, clock::now_ms()) {
            self.act(change);
        }
    }

    fn publish(&mut self) {
        self.revision = self.table.observed().revision;
        self.published
            .send_replace(Arc::new(self.table.observed().clone()));
    }

    fn act(&self, change: Change) {
        match change {
            Change::Joined { node, session, .. } => {
                // What the table goes by: a reload may have come meanwhile.
                let seen = self.table.observed().nodes.get(&node);
                let heartbeat = seen.map_or(self.timing.borrow().heartbeat, |seen| seen.heartbeat);
                let welcome = ServerMessage::Welcome(Welcome {
                    heartbeat_ms: heartbeat.as_millis() as u64,
                    server_version: env!("CARGO_PKG_VERSION").to_owned(),
                });
                // Its queue is empty; where it left already, its end follows.
                let _ = self.seats.send(&node, session, welcome);
                tracing::info!("node `{node}` is connected (session {session})");
            }
            Change::Refused { session, refusal } => {
                tracing::warn!("session {session} was refused: {refusal}");
                self.seats.dismiss(session, ServerMessage::Refused(refusal));
            }
            Change::Expired { node, session } => self.seats.dismiss(session, too_slow(&node)),
            Change::Ignored { node, session, why } => match why {
                Ignored::NotItsSession => {
                    tracing::debug!("node `{node}`: words of session {session}, which is over");
                }
                why => tracing::warn!("node `{node}`: a shard's status was ignored: {why:?}"),
            },
            Change::State {
                node,
                to,
                cause: Some(cause),
                ..
            } => say_absent(&node, to, &cause),
            Change::State { node, to, .. } => {
                tracing::info!("node `{node}` is {}", to.as_str());
            }
            Change::BrakeHeld(brake) => tracing::error!(
                "{} of {} nodes vanished at once: this is taken for the server's own trouble, none of them counts as lost; \
                 their replicas are not placed elsewhere until most of them are back, or `llmgw ctl drain NODE --force` gives a node up",
                brake.absent,
                brake.of
            ),
            Change::BrakeReleased => {
                tracing::info!(
                    "most nodes are back: those that are not have `lost_after` from now"
                );
            }
            Change::Recovered => {
                tracing::info!("recovery is over: what is not reported by now is not there")
            }
            Change::Forgotten { node } => tracing::info!("node `{node}` is forgotten"),
            Change::Shards { .. } | Change::Inventory { .. } => {}
        }
    }
}

fn say_absent(node: &str, to: NodeState, cause: &Cause) {
    let to = to.as_str();
    match cause {
        // Somebody here meant it, and a refusal was said with who was refused.
        Cause::Goodbye(_) | Cause::Refused(_) | Cause::ServerStops => {
            tracing::info!("node `{node}` is {to}: {cause}")
        }
        Cause::StreamEnded(_) | Cause::Silent => tracing::warn!("node `{node}` is {to}: {cause}"),
    }
}

fn ticks(timing: Timing) -> tokio::time::Interval {
    let period = (timing.heartbeat / TICKS_PER_HEARTBEAT).clamp(TICK_MIN, TICK_MAX);
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_once_all_that_waited_when_it_was_due_has_been_heard() {
        let began = Instant::now();
        let period = Duration::from_millis(100);
        let mut pace = Pace::new(period, began);
        for _ in 0..100 {
            pace.took(INPUTS_MAX, began + period / 2);
        }
        assert!(!pace.is_overdue(), "the tick is not due yet");
        pace.took(INPUTS_MAX - 1, began + period);
        assert!(!pace.is_overdue(), "one word may still be from before");
        pace.took(1, began + period);
        assert!(pace.is_overdue());
    }
}
