//! The table of nodes: events and the time go in, what changed comes out. No I/O, no clock of its own, no random numbers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use llmgw_proto::inventory::{Inventory, Reading};
use llmgw_proto::session::{
    Goodbye, GpuBeat, Heartbeat, Refusal, RefusalCode, Register, SessionId, ShardReport, Told,
};
use llmgw_proto::shard::ShardState;

use super::{
    Absence, Cause, Change, Ignored, NODE_SHARDS_MAX, NodeCertificate, NodeEvent, Observed,
    ObservedNode, ObservedShard, Timing,
};
use crate::control::snapshot::{NODES_MAX, NodeState};

/// The one place that decides what a node's state is.
#[derive(Debug)]
pub struct NodeTable {
    pub(super) timing: Timing,
    pub(super) observed: Observed,
    /// The caller's clock at the last event.
    last_now_ms: u64,
    /// The latest session that each node ever had: an older one can't take it back.
    pub(super) latest: BTreeMap<String, SessionId>,
    /// When the first node registered, on the table's clock: only from then on can the fleet report. None: no node has yet.
    pub(super) first_joined_ms: Option<u64>,
}

impl NodeTable {
    /// An empty table at the server's start.
    pub fn new(timing: Timing, now_ms: u64) -> NodeTable {
        NodeTable {
            timing,
            observed: Observed {
                recovering: !timing.recovery.is_zero(),
                ..Observed::default()
            },
            last_now_ms: now_ms,
            latest: BTreeMap::new(),
            first_joined_ms: None,
        }
    }

    pub fn observed(&self) -> &Observed {
        &self.observed
    }

    pub fn set_timing(&mut self, timing: Timing) {
        self.timing = timing;
    }

    /// Takes one event in. `now_ms` is the server's monotonic clock.
    pub fn apply(&mut self, event: NodeEvent, now_ms: u64) -> Vec<Change> {
        self.advance(now_ms);
        let changes = match event {
            NodeEvent::Registered {
                session,
                register,
                certificate,
                is_local,
            } => self.register(session, *register, certificate, is_local),
            NodeEvent::Heartbeat {
                node,
                session,
                heartbeat,
            } => self.heartbeat(&node, session, *heartbeat),
            NodeEvent::Shard {
                node,
                session,
                report,
            } => self.shard(&node, session, *report),
            NodeEvent::Goodbye {
                node,
                session,
                goodbye,
            } => self.goodbye(&node, session, goodbye),
            NodeEvent::Ended { node, session, why } => {
                // That the stream of a session which was superseded ends is the rule.
                match self.speaks(&node, session) {
                    true => self.leaves(&node, Cause::StreamEnded(why)),
                    false => Vec::new(),
                }
            }
            NodeEvent::Dismissed {
                node,
                session,
                cause,
            } => self.dismissed(&node, session, cause),
            NodeEvent::Tick => self.tick(),
        };
        if changes.iter().any(Change::is_seen) {
            self.observed.revision += 1;
        }
        changes
    }

    /// Time counts only as far as this server was awake to hear something: after a pause (the process stopped, the machine asleep,
    /// a clock that jumped) at most one heartbeat has passed, else every node would seem silent at once.
    fn advance(&mut self, now_ms: u64) {
        let passed = now_ms.saturating_sub(self.last_now_ms);
        self.last_now_ms = now_ms;
        self.observed.now_ms += passed.min(millis(self.timing.heartbeat));
    }

    fn dismissed(&mut self, id: &str, session: SessionId, cause: Cause) -> Vec<Change> {
        if self.speaks(id, session) {
            return self.leaves(id, cause);
        }
        if let Cause::Refused(why) = cause
            && let Some(node) = self.observed.nodes.get_mut(id)
            && let Some(absence) = &mut Arc::make_mut(node).absence
        {
            // No decision hangs on it: who looks sees it after the next tick.
            absence.refused = Some(why);
        }
        Vec::new()
    }

    fn speaks(&self, node: &str, session: SessionId) -> bool {
        let found = self.observed.nodes.get(node);
        found.is_some_and(|node| node.session == Some(session))
    }

    fn register(
        &mut self,
        session: SessionId,
        register: Register,
        certificate: Option<NodeCertificate>,
        is_local: bool,
    ) -> Vec<Change> {
        let node = register.node.clone();
        let mut changes = Vec::new();
        if let Some(refusal) = self.refusal(session, &register) {
            return vec![Change::Refused { session, refusal }];
        }
        if self.first_joined_ms.is_none() {
            // The others come back about now. Their replicas are not missing because they are slower than the first one.
            self.first_joined_ms = Some(self.observed.now_ms);
            self.observed.recovering = !self.timing.recovery.is_zero();
        }
        let before = self.observed.nodes.get(&node).cloned();
        if before.is_none() && self.observed.nodes.len() >= NODES_MAX {
            changes.extend(self.forget_longest_lost());
        }
        let superseded = before.as_ref().and_then(|node| node.session);
        if let Some(old) = superseded.filter(|old| *old != session) {
            let message = match before.as_ref().is_some_and(|b| b.run == register.run) {
                true => "the same agent has a newer session",
                false => "another agent process speaks for this node now",
            };
            changes.push(Change::Refused {
                session: old,
                refusal: refuse(RefusalCode::Superseded, message, &node),
            });
        }
        let joined = ObservedNode {
            certificate,
            is_local,
            heartbeat: self.timing.heartbeat,
            ..registered(session, register, self.observed.now_ms)
        };
        let (from, to) = (before.as_ref().map(|node| node.state), joined.state);
        changes.push(Change::Joined {
            node: node.clone(),
            session,
            is_new: from.is_none_or(|state| state == NodeState::Lost),
        });
        if from != Some(to) {
            changes.push(Change::State {
                node: node.clone(),
                from,
                to,
                cause: None,
            });
        }
        changes.push(Change::Inventory { node: node.clone() });
        changes.push(Change::Shards { node: node.clone() });
        self.latest.insert(node.clone(), session);
        self.observed.nodes.insert(node, Arc::new(joined));
        changes
    }

    /// Why a registration is not accepted, if it is not.
    fn refusal(&self, session: SessionId, register: &Register) -> Option<Refusal> {
        let node = &register.node;
        if self
            .latest
            .get(node)
            .is_some_and(|latest| *latest > session)
        {
            let message = "a newer session of this node came first";
            return Some(refuse(RefusalCode::Superseded, message, node));
        }
        let Some(known) = self.observed.nodes.get(node) else {
            let is_full = self.observed.nodes.len() >= NODES_MAX
                && self
                    .observed
                    .nodes
                    .values()
                    .all(|node| node.state != NodeState::Lost);
            return is_full.then(|| {
                let message = format!("the server holds {NODES_MAX} nodes, which is all it can");
                refuse(RefusalCode::Full, &message, node)
            });
        };
        known.session?;
        let heard = format!(
            "last heard {} ms ago",
            self.observed.now_ms - known.last_heard_ms
        );
        let message = match other(known, register)? {
            Other::Machine => format!(
                "another machine is connected as `{node}` ({heard}): give each machine a node id of its own"
            ),
            Other::Agent => format!(
                "another agent of this machine is connected as `{node}` ({heard}), with the state directory `{}`: stop that one, or give this one, with `{}`, another `node`",
                known.state_dir, register.state_dir
            ),
        };
        Some(refuse(RefusalCode::NodeTaken, &message, node))
    }

    /// The node that this session speaks for, heard just now.
    fn heard(&mut self, node: &str, session: SessionId) -> Result<&mut ObservedNode, Vec<Change>> {
        let now_ms = self.observed.now_ms;
        match self.observed.nodes.get_mut(node) {
            Some(found) if found.session == Some(session) => {
                let found = Arc::make_mut(found);
                found.last_heard_ms = now_ms;
                Ok(found)
            }
            _ => Err(vec![ignored(node, session, Ignored::NotItsSession)]),
        }
    }

    fn heartbeat(&mut self, id: &str, session: SessionId, heartbeat: Heartbeat) -> Vec<Change> {
        let node = match self.heard(id, session) {
            Ok(node) => node,
            Err(ignored) => return ignored,
        };
        let mut changes = Vec::new();
        if node.draining != heartbeat.draining {
            let from = node.state;
            node.draining = heartbeat.draining;
            node.state = connected_state(heartbeat.draining);
            changes.push(Change::State {
                node: id.to_owned(),
                from: Some(from),
                to: node.state,
                cause: None,
            });
        }
        let mut is_seen = heartbeat.inventory.is_some();
        if let Some(told) = heartbeat.inventory {
            let (inventory, labels) = readable(told);
            node.inventory = inventory;
            node.labels = labels.unwrap_or_else(|| node.labels.clone());
        }
        if let Ok(inventory) = &mut node.inventory {
            is_seen |= beat(inventory, &heartbeat.gpus);
        }
        if is_seen {
            changes.push(Change::Inventory {
                node: id.to_owned(),
            });
        }
        changes
    }

    fn shard(&mut self, id: &str, session: SessionId, report: ShardReport) -> Vec<Change> {
        let node = match self.heard(id, session) {
            Ok(node) => node,
            Err(ignored) => return ignored,
        };
        let shard = report.status.shard.clone();
        let known = node.shards.get(&shard);
        if report.status.state == ShardState::Stopped {
            let was_there = node.shards.remove(&shard).is_some();
            let changed = was_there.then(|| Change::Shards {
                node: id.to_owned(),
            });
            return changed.into_iter().collect();
        }
        if known.is_none() && node.shards.len() >= NODE_SHARDS_MAX {
            return vec![ignored(id, session, Ignored::TooManyShards)];
        }
        // Somebody wanted another spec under this name, and the node refused: what runs goes on.
        let is_other = |known: &ObservedShard| known.status.spec_hash != report.status.spec_hash;
        if report.status.state == ShardState::Failed
            && known.is_some_and(|known| is_other(known) && !known.status.state.is_over())
        {
            return vec![ignored(id, session, Ignored::OtherSpec)];
        }
        let Some(spec) = report
            .spec
            .or_else(|| known.map(|known| known.spec.clone()))
        else {
            return vec![ignored(id, session, Ignored::UnknownShard)];
        };
        let now = ObservedShard {
            spec,
            status: report.status,
        };
        if known == Some(&now) {
            return Vec::new();
        }
        node.shards.insert(shard, now);
        vec![Change::Shards {
            node: id.to_owned(),
        }]
    }

    fn goodbye(&mut self, node: &str, session: SessionId, goodbye: Goodbye) -> Vec<Change> {
        match self.speaks(node, session) {
            true => self.leaves(node, Cause::Goodbye(goodbye)),
            false => vec![ignored(node, session, Ignored::NotItsSession)],
        }
    }

    /// The node has no session from now on. What it runs is kept: its engines go on serving.
    pub(super) fn leaves(&mut self, id: &str, cause: Cause) -> Vec<Change> {
        let now_ms = self.observed.now_ms;
        let Some(node) = self.observed.nodes.get_mut(id) else {
            return Vec::new();
        };
        let node = Arc::make_mut(node);
        let from = node.state;
        node.session = None;
        node.state = NodeState::Unreachable;
        node.absence = Some(Absence {
            since_ms: now_ms,
            counts_from_ms: now_ms,
            lost_since_ms: None,
            cause: cause.clone(),
            refused: None,
        });
        vec![Change::State {
            node: id.to_owned(),
            from: Some(from),
            to: NodeState::Unreachable,
            cause: Some(cause),
        }]
    }
}

/// Who claims a node that somebody else speaks for. Both could take it from each other for ever, and what the first one runs would count as gone.
enum Other {
    Machine,
    /// Of the same machine.
    Agent,
}

/// None: it is the agent that was known, perhaps started again. A machine that was started again is let in once its old session is dead.
fn other(known: &ObservedNode, register: &Register) -> Option<Other> {
    // One that does not say which it is may be any machine. An agent that does not is an older one, of this state directory as likely as not.
    let is_other_agent = || {
        let said = !known.state_dir.is_empty() && !register.state_dir.is_empty();
        said && known.state_dir != register.state_dir
    };
    match () {
        () if !known.machine.is_empty() && known.machine != register.machine => {
            Some(Other::Machine)
        }
        () if is_other_agent() => Some(Other::Agent),
        () => None,
    }
}

impl Change {
    /// Those who look at [`Observed`] see it there.
    fn is_seen(&self) -> bool {
        !matches!(
            self,
            Change::Refused { .. } | Change::Expired { .. } | Change::Ignored { .. }
        )
    }
}

fn registered(session: SessionId, register: Register, now_ms: u64) -> ObservedNode {
    let (inventory, labels) = readable(register.inventory);
    let shards = register
        .shards
        .into_iter()
        .filter(|report| report.status.state != ShardState::Stopped)
        .take(NODE_SHARDS_MAX)
        .filter_map(|report| {
            let spec = report.spec?;
            let status = report.status;
            Some((status.shard.clone(), ObservedShard { spec, status }))
        })
        .collect();
    ObservedNode {
        state: connected_state(register.draining),
        session: Some(session),
        absence: None,
        last_heard_ms: now_ms,
        heartbeat: Duration::ZERO,
        draining: register.draining,
        certificate: None,
        agent_version: register.agent_version,
        run: register.run,
        machine: register.machine,
        advertise: register.advertise,
        is_local: false,
        ports: register.ports,
        engines: register.engines,
        models_dir: register.models_dir,
        state_dir: register.state_dir,
        labels: labels.unwrap_or_default(),
        inventory,
        shards,
    }
}

type Readable = (
    Result<Arc<Inventory>, String>,
    Option<BTreeMap<String, String>>,
);

fn readable(told: Told) -> Readable {
    match told {
        Told::Inventory(inventory) => {
            let labels = inventory.labels.clone();
            (Ok(inventory), Some(labels))
        }
        Told::Unreadable(why) => (Err(why), None),
    }
}

/// Puts a heartbeat's words about GPUs into the inventory. True where a GPU's health changed: its use alone is no news.
fn beat(inventory: &mut Arc<Inventory>, gpus: &[GpuBeat]) -> bool {
    let mut is_seen = false;
    for said in gpus {
        let position = inventory
            .gpus
            .devices
            .iter()
            .position(|gpu| gpu.uuid.value() == Some(&said.uuid));
        let Some(position) = position else { continue };
        let used_mib = match said.used_mib {
            Some(used_mib) => Reading::Known(used_mib),
            None => Reading::unknown("not in the last heartbeat"),
        };
        let known = &inventory.gpus.devices[position];
        let is_ill = known.health != said.health;
        if is_ill || known.memory.used_mib != used_mib {
            let known = &mut Arc::make_mut(inventory).gpus.devices[position];
            known.memory.used_mib = used_mib;
            known.health.clone_from(&said.health);
        }
        is_seen |= is_ill;
    }
    is_seen
}

fn connected_state(draining: bool) -> NodeState {
    match draining {
        true => NodeState::Draining,
        false => NodeState::Ready,
    }
}

fn refuse(code: RefusalCode, message: &str, node: &str) -> Refusal {
    Refusal {
        code,
        message: message.to_owned(),
        certificate: None,
        claimed: node.to_owned(),
    }
}

fn ignored(node: &str, session: SessionId, why: Ignored) -> Change {
    Change::Ignored {
        node: node.to_owned(),
        session,
        why,
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
