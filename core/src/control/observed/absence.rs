//! The table's passing of time: who is silent, who is lost, and when so many vanish that nobody is.

use std::sync::Arc;

use llmgw_proto::session::SessionId;

use super::table::{NodeTable, millis};
use super::{Absence, Brake, Cause, Change, ObservedNode};
use crate::control::snapshot::NodeState;

/// A node is dead after so many heartbeats that did not come.
const HEARTBEATS_MISSED_MAX: u32 = 3;
/// The smallest number of absent nodes that the brake holds for.
const BRAKE_NODES_MIN: usize = 3;
/// A node that is lost for longer is not kept.
const FORGOTTEN_AFTER_MS: u64 = 24 * 60 * 60 * 1_000;

impl NodeTable {
    pub(super) fn tick(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        let now_ms = self.observed.now_ms;
        let recovers_from_ms = self.first_joined_ms.unwrap_or(0);
        if self.observed.recovering && now_ms - recovers_from_ms >= millis(self.timing.recovery) {
            self.observed.recovering = false;
            changes.push(Change::Recovered);
        }
        self.expire(&mut changes);
        self.lose(&mut changes);
        self.forget(&mut changes);
        changes
    }

    fn expire(&mut self, changes: &mut Vec<Change>) {
        let now_ms = self.observed.now_ms;
        let deadline_ms = |node: &ObservedNode| millis(node.heartbeat * HEARTBEATS_MISSED_MAX);
        let silent: Vec<(String, SessionId)> = self
            .observed
            .connected()
            .filter(|(_, _, node)| now_ms - node.last_heard_ms >= deadline_ms(node))
            .map(|(id, session, _)| (id.to_owned(), session))
            .collect();
        for (node, session) in silent {
            changes.extend(self.leaves(&node, Cause::Silent));
            changes.push(Change::Expired { node, session });
        }
    }

    /// Nodes that were absent for `lost_after` become lost, unless the brake holds.
    fn lose(&mut self, changes: &mut Vec<Change>) {
        let (now_ms, lost_after_ms) = (self.observed.now_ms, millis(self.timing.lost_after));
        let is_due = |absence: &Absence| {
            absence.lost_since_ms.is_none() && now_ms - absence.counts_from_ms >= lost_after_ms
        };
        let due: Vec<String> = self
            .observed
            .nodes
            .iter()
            .filter(|(_, node)| node.absence.as_ref().is_some_and(is_due))
            .map(|(id, _)| id.clone())
            .collect();
        let (absent, of) = self.vanished();
        let is_mass = absent >= BRAKE_NODES_MIN && absent * 2 > of;
        match (self.observed.brake, is_mass) {
            (Some(brake), true) => {
                self.observed.brake = Some(Brake {
                    absent,
                    of,
                    ..brake
                });
                return;
            }
            (Some(_), false) => return self.release_brake(changes),
            (None, true) if !due.is_empty() => {
                let brake = Brake {
                    since_ms: now_ms,
                    absent,
                    of,
                };
                self.observed.brake = Some(brake);
                changes.push(Change::BrakeHeld(brake));
                return;
            }
            (None, _) => {}
        }
        for id in due {
            changes.extend(self.lost(id));
        }
    }

    /// Those that are absent get their whole time again: they may be about to come back like the others.
    fn release_brake(&mut self, changes: &mut Vec<Change>) {
        self.observed.brake = None;
        changes.push(Change::BrakeReleased);
        let now_ms = self.observed.now_ms;
        for node in self.observed.nodes.values_mut() {
            if node.state == NodeState::Unreachable
                && let Some(absence) = &mut Arc::make_mut(node).absence
            {
                absence.counts_from_ms = now_ms;
            }
        }
    }

    /// How many nodes are absent or became lost within the last `lost_after`, and of how many.
    fn vanished(&self) -> (usize, usize) {
        let lost_after_ms = millis(self.timing.lost_after);
        let mut absent = 0;
        let mut of = 0;
        for node in self.observed.nodes.values() {
            let is_old = node
                .lost_since_ms()
                .is_some_and(|since_ms| self.observed.now_ms - since_ms >= lost_after_ms);
            of += usize::from(!is_old);
            absent += usize::from(!is_old && node.session.is_none());
        }
        (absent, of)
    }

    fn lost(&mut self, id: String) -> Option<Change> {
        let now_ms = self.observed.now_ms;
        let node = Arc::make_mut(self.observed.nodes.get_mut(&id)?);
        let absence = node.absence.as_mut()?;
        absence.lost_since_ms = Some(now_ms);
        let cause = Some(absence.cause.clone());
        let from = Some(node.state);
        node.state = NodeState::Lost;
        Some(Change::State {
            node: id,
            from,
            to: NodeState::Lost,
            cause,
        })
    }

    fn forget(&mut self, changes: &mut Vec<Change>) {
        let now_ms = self.observed.now_ms;
        let is_old = |node: &ObservedNode| {
            let since_ms = node.lost_since_ms();
            since_ms.is_some_and(|since_ms| now_ms - since_ms >= FORGOTTEN_AFTER_MS)
        };
        let old: Vec<String> = self
            .observed
            .nodes
            .iter()
            .filter(|(_, node)| is_old(node))
            .map(|(id, _)| id.clone())
            .collect();
        for node in old {
            changes.push(self.remove(node));
        }
    }

    pub(super) fn forget_longest_lost(&mut self) -> Option<Change> {
        let longest = self
            .observed
            .nodes
            .iter()
            .filter_map(|(id, node)| Some((node.lost_since_ms()?, id)))
            .min()
            .map(|(_, id)| id.clone())?;
        Some(self.remove(longest))
    }

    fn remove(&mut self, node: String) -> Change {
        self.observed.nodes.remove(&node);
        self.latest.remove(&node);
        Change::Forgotten { node }
    }
}

impl ObservedNode {
    fn lost_since_ms(&self) -> Option<u64> {
        self.absence.as_ref()?.lost_since_ms
    }
}
