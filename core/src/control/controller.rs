//! Keeps what runs like what is declared: looks at the fleet, asks [`reconcile`] what to do, and does it.
//!
//! One thread looks at every change, and twice a second. A look is a function without await; its steps, in this order: take in what
//! agents said; decide; take those that leave out of the pool; send the commands; place what is missing; tell the gateway what to expect.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use llmgw_plugins::{Policies, PolicySet};
use llmgw_proto::session::{DrainNode, ServerMessage, StopHow, StopShard};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use self::hold::StartHold;
use self::outbox::{Outbox, Told};
use self::placing::Unplaced;
use super::launch;
use super::memory::{FailureNews, Memory};
use super::observed::{Commands, Observed};
use super::reconcile::{Action, Desired, Place, Traffic, Wanted, reconcile};
use super::replicas::{Replica, ShardKey};
use super::snapshot::NodeState;
use crate::config::{Config, Endpoint, EngineUrl, Labels, Secret};
use crate::routing::fleet::Started;
use crate::routing::locality::{Locality, Placed};
use crate::routing::outlook::Outlook;

mod hold;
mod node;
mod operator;
mod outbox;
mod outlook;
mod output;
mod placing;
mod waiting;

pub use hold::Held;
pub use node::{CertificateReport, NodeReport};
pub use operator::{FailureReport, ModelExplanation, OperatorError, ReplicaReport};
pub use output::Output;
pub use waiting::WaitingReport;

/// Without any news the fleet is looked at this often: deadlines pass silently.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Between two looks, however much is reported.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// The gateway, as far as the controller needs it.
pub trait Serving: Send + Sync {
    /// The configuration in force.
    fn config(&self) -> Arc<Config>;
    /// Requests on the engine at this `host:port`.
    fn requests(&self, address: &str) -> u32;
    /// From now on these are the endpoints beside those that are configured. Requests on others end in their own time.
    fn serve(&self, endpoints: Arc<Started>);
    /// What requests are told while a model has no replica.
    fn expect(&self, outlooks: BTreeMap<String, Outlook>);
    /// A replica failed. Told once, and not of one that failed before this server saw it run.
    fn failed(&self, news: &FailureNews);
}

/// See the module.
pub struct Controller {
    observed: watch::Receiver<Arc<Observed>>,
    commands: Arc<dyn Commands>,
    policies: Arc<Policies>,
    serving: Arc<dyn Serving>,
    /// Held for a whole look. Operators' questions and orders come in between.
    state: Mutex<State>,
    /// What `state.hold` says, for those who can't wait for a look.
    held: ArcSwapOption<String>,
    wake: Notify,
}

#[derive(Default)]
struct State {
    memory: Memory,
    outbox: Outbox,
    desired: Desired,
    /// What `desired` was made from.
    config: Option<Arc<Config>>,
    /// The policies' generation at the last look.
    generation: u64,
    hold: StartHold,
    served: Arc<Started>,
    outlooks: BTreeMap<String, Outlook>,
    /// Models that miss a replica and have no place for it.
    unplaced: BTreeMap<String, Unplaced>,
}

/// What one look, or one answer, is about.
struct View {
    config: Arc<Config>,
    observed: Arc<Observed>,
    set: Arc<PolicySet>,
}

/// The running thread. Dropped, it is ended and waited for: it waits on the runtime's timers, and must be gone before the runtime is.
pub struct Looking {
    stop: CancellationToken,
    /// Taken by the drop.
    thread: Option<JoinHandle<()>>,
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // A look that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Controller {
    pub fn new(
        observed: watch::Receiver<Arc<Observed>>,
        commands: Arc<dyn Commands>,
        policies: Arc<Policies>,
        serving: Arc<dyn Serving>,
    ) -> Arc<Controller> {
        Arc::new(Controller {
            observed,
            commands,
            policies,
            serving,
            state: Mutex::default(),
            held: ArcSwapOption::empty(),
            wake: Notify::new(),
        })
    }

    /// Looks until the server stops, on a thread of its own: placement asks Lua, which keeps what it loaded by thread. To be called within
    /// a runtime of several threads.
    pub fn start(self: &Arc<Controller>, stop: CancellationToken) -> std::io::Result<Looking> {
        let (controller, runtime) = (self.clone(), Handle::current());
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || {
                // Replicas that the gateway makes have tasks.
                let _entered = runtime.enter();
                let mut observed = controller.observed.clone();
                while !stopped.is_cancelled() {
                    observed.borrow_and_update();
                    let look = AssertUnwindSafe(|| controller.look());
                    if std::panic::catch_unwind(look).is_err() {
                        tracing::error!("a look at the fleet panicked, the next one follows");
                    }
                    runtime.block_on(controller.news(&mut observed, &stopped));
                }
            })?;
        Ok(Looking {
            stop,
            thread: Some(thread),
        })
    }

    /// Waits until there is something to look at.
    async fn news(
        &self,
        observed: &mut watch::Receiver<Arc<Observed>>,
        stopped: &CancellationToken,
    ) {
        let news = async {
            tokio::time::sleep(LOOK_PAUSE).await;
            tokio::select! {
                changed = observed.changed() => if changed.is_err() {
                    // Nobody listens to agents any more; what is declared may still change.
                    tokio::time::sleep(LOOK_INTERVAL).await;
                },
                () = self.wake.notified() => {}
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
            }
        };
        tokio::select! {
            () = stopped.cancelled() => {}
            () = news => {}
        }
    }

    /// Has the fleet looked at soon: something changed that no agent reports, such as the configuration.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// One look. May block for as long as the decisions take.
    pub fn look(&self) {
        let (mut state, view) = self.locked();
        state.take_in(&view);
        self.publish_hold(&state);
        self.tell_failures(&mut state, &view);
        let traffic = self.traffic(&state, &view);
        let mut actions = reconcile(&state.desired, &view.observed, &state.memory, &traffic);
        actions.retain(|action| !state.hold.keeps_from(action));
        let mut places: Vec<Place> = Vec::new();
        let mut commands: Vec<Action> = Vec::new();
        for action in actions {
            match action {
                Action::Place(place) => places.push(place),
                other => {
                    state.note(&other, view.observed.now_ms);
                    commands.push(other);
                }
            }
        }
        // Before any command: nobody is to be sent to an engine that ends.
        self.serve(&mut state, &view);
        for command in &commands {
            self.command(&mut state, &view, command);
        }
        self.repeat_starts(&mut state, &view);
        self.place(&mut state, &view, places);
        self.tell_failures(&mut state, &view);
        self.expect(&mut state, &view);
    }

    fn publish_hold(&self, state: &State) {
        self.held.store(state.hold.said().map(Arc::new));
    }

    /// What is remembered, and what there is. The lock comes first: what was seen before it may be older than what is remembered by now, such as
    /// an order for a node that had not registered then, or the end of a hold that came with another catalog.
    fn locked(&self) -> (MutexGuard<'_, State>, View) {
        let state = self.lock();
        let view = View {
            config: self.serving.config(),
            observed: self.observed.borrow().clone(),
            set: self.policies.current(),
        };
        (state, view)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A look that panicked left what it remembered; the next one starts from what agents say.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn traffic(&self, state: &State, view: &View) -> Traffic {
        let ending = Replica::all(&view.observed, &state.memory)
            .into_iter()
            .filter(|replica| state.memory.leaving(&replica.key).is_some());
        let requests = ending.filter_map(|replica| {
            let address = replica.spec.address()?;
            Some((replica.key, self.serving.requests(&address)))
        });
        let drain_timeout = view.config.limits.drain_timeout.as_millis();
        Traffic {
            requests: requests.collect(),
            drain_timeout_ms: u64::try_from(drain_timeout).unwrap_or(u64::MAX),
        }
    }

    /// Gives the gateway the ready replicas, where they are others than before.
    fn serve(&self, state: &mut State, view: &View) {
        let mut endpoints = Started::new();
        let mut replicas = Replica::all(&view.observed, &state.memory);
        replicas
            .retain(|replica| replica.is_ready() && state.memory.leaving(&replica.key).is_none());
        replicas.retain(|replica| !replica.is_elsewhere);
        // An engine of a lost node may serve on, which the gateway finds out by itself. It is asked until others are ready in its stead.
        replicas.sort_by_key(|replica| replica.node_state == NodeState::Lost);
        for replica in &replicas {
            let model = endpoints.entry(replica.model().to_owned()).or_default();
            let wanted = state.desired.models.get(replica.model());
            let is_replaced = wanted.is_none_or(|wanted| model.len() >= wanted.replicas as usize);
            if replica.node_state != NodeState::Lost || !is_replaced {
                model.extend(placed(replica, &view.observed));
            }
        }
        if *state.served != endpoints {
            state.served = Arc::new(endpoints);
            self.serving.serve(state.served.clone());
        }
    }

    /// Sends a command, unless its session has it already.
    fn command(&self, state: &mut State, view: &View, action: &Action) {
        let (node, shard, told) = match action {
            Action::Place(_) => return,
            Action::Leave { key, .. } => (&key.node, &*key.shard, Told::Stop(StopHow::Drain)),
            Action::Stop { key, how, .. } => (&key.node, &*key.shard, Told::Stop(*how)),
            Action::Clear { key } => (&key.node, &*key.shard, Told::Clear),
            Action::OrderNode { node, draining } => (node, "", Told::Drain(*draining)),
        };
        let session = view.observed.nodes.get(node).and_then(|node| node.session);
        let Some(session) = session else {
            return;
        };
        let key = ShardKey {
            node: node.clone(),
            shard: shard.to_owned(),
        };
        let now_ms = view.observed.now_ms;
        if state.outbox.has(&key, session, told, now_ms) {
            return state.told(action, now_ms);
        }
        let message = match told {
            Told::Drain(draining) => ServerMessage::DrainNode(DrainNode { draining }),
            Told::Stop(how) => stop(shard, how),
            Told::Clear => stop(shard, StopHow::Stop),
        };
        match self.commands.send(node, session, message) {
            Ok(()) => {
                say(action);
                state.outbox.sent(key, session, told, now_ms);
                state.told(action, now_ms);
            }
            Err(error) => tracing::debug!(%node, "a command was not sent: {error}"),
        }
    }

    fn repeat_starts(&self, state: &mut State, view: &View) {
        for (node, session, spec) in state.memory.starts_to_repeat(&view.observed) {
            let shard = spec.shard.clone();
            if let Err(error) = self
                .commands
                .send(&node, session, ServerMessage::start(spec))
            {
                tracing::debug!(%node, %shard, "a start was not repeated: {error}");
            }
        }
    }

    /// Says what failed since it was said last.
    fn tell_failures(&self, state: &mut State, view: &View) {
        for news in state.memory.take_news(view.observed.now_ms) {
            let replica = &news.failure.replica;
            let node = news.failure.node.as_deref().unwrap_or("none");
            if news.is_old {
                tracing::info!(%replica, %node, "{news}");
                continue;
            }
            tracing::warn!(%replica, %node, "{news}");
            self.serving.failed(&news);
        }
    }

    /// Tells the gateway what to expect, where that is news.
    fn expect(&self, state: &mut State, view: &View) {
        let outlooks = outlook::of_all(state, view);
        if state.outlooks != outlooks {
            state.outlooks.clone_from(&outlooks);
            self.serving.expect(outlooks);
        }
    }
}

impl State {
    fn take_in(&mut self, view: &View) {
        let changed = self.take_in_declared(view);
        let desired = &self.desired;
        let has = |model: &str| desired.models.contains_key(model);
        self.memory.retain_models(has);
        self.unplaced.retain(|model, _| has(model));
        self.memory.observe(&view.observed);
        // Behind what is reported: what fails in this look is still of what was declared before.
        for model in &changed {
            self.memory.forgive(model);
        }
        self.outbox.retain(&view.observed);
        let State { hold, memory, .. } = self;
        hold.judge(&self.desired, &view.observed, memory);
    }

    /// Takes in what is declared. The models whose replicas are made from something else than at the last look; any may be by another
    /// generation of the engine plugins.
    fn take_in_declared(&mut self, view: &View) -> Vec<String> {
        let mut changed = Vec::new();
        let is_known = self.config.as_ref();
        if !is_known.is_some_and(|known| Arc::ptr_eq(known, &view.config)) {
            let before =
                std::mem::replace(&mut self.desired, launch::desired(&view.config.catalog));
            self.config = Some(view.config.clone());
            // A pool may be a new one, though its model was there at the last look: it is told, whatever the one before was.
            self.outlooks.clear();
            let is_other = |model: &str, wanted: &Wanted| {
                let known = before.models.get(model);
                known.is_some_and(|known| known.definitions != wanted.definitions)
            };
            let models = self.desired.models.iter();
            let others = models.filter(|(model, wanted)| is_other(model, wanted));
            changed.extend(others.map(|(model, _)| model.clone()));
        }
        let generation = view.set.generation();
        if std::mem::replace(&mut self.generation, generation) != generation {
            changed = self.desired.models.keys().cloned().collect();
        }
        changed
    }

    /// Runs on although the catalog has no such model: nobody said yet that it is meant.
    fn is_held(&self, replica: &Replica) -> bool {
        let is_wanted = self.desired.models.contains_key(replica.model());
        !is_wanted && self.hold.is_held()
    }

    /// Remembers that a node has an order in its session.
    fn told(&mut self, action: &Action, now_ms: u64) {
        if let Action::OrderNode { node, .. } = action {
            self.memory.told(node, now_ms);
        }
    }

    /// Remembers who leaves.
    fn note(&mut self, action: &Action, now_ms: u64) {
        match action {
            Action::Leave { key, why } => self.memory.leave(key, *why, false, now_ms),
            Action::Stop { key, why, .. } => self.memory.leave(key, *why, true, now_ms),
            Action::Place(_) | Action::Clear { .. } | Action::OrderNode { .. } => {}
        }
    }
}

fn stop(shard: &str, how: StopHow) -> ServerMessage {
    ServerMessage::StopShard(StopShard {
        shard: shard.to_owned(),
        how,
    })
}

/// Where a replica is reached; none where it serves no HTTP, or says an address that is none.
fn placed(replica: &Replica, observed: &Observed) -> Option<Placed> {
    let spec = &replica.spec;
    let url = EngineUrl::parse(&format!("http://{}", spec.address()?));
    let url = url
        .inspect_err(|error| tracing::warn!(shard = %replica.key, "its address {error:?}"))
        .ok()?;
    Some(Placed {
        endpoint: Endpoint {
            url,
            engine: spec.engine.clone(),
            slots: spec.slots,
            api_key: spec.api_key.as_ref().map(|key| Secret::new(key.expose())),
            serves: Some(spec.readiness.served_name.clone()),
            labels: Labels::default(),
        },
        locality: locality(replica, observed),
    })
}

fn locality(replica: &Replica, observed: &Observed) -> Arc<Locality> {
    let node = observed.nodes.get(&replica.key.node);
    let cards = node.and_then(|node| node.inventory.as_ref().ok());
    let mut cards = cards.into_iter().flat_map(|known| &known.gpus.devices);
    let own = |uuid: &String| replica.spec.gpus.contains(uuid);
    // A replica's GPUs are all of one class.
    let gpu = cards.find(|card| card.uuid.value().is_some_and(own));
    let labels = node.map(|node| node.labels.clone().into_iter().collect());
    Locality::new(
        Some(replica.key.node.clone()),
        gpu.and_then(|card| card.class.value().cloned()),
        Labels::new(labels.unwrap_or_default()),
    )
}

fn say(action: &Action) {
    match action {
        Action::Place(_) => {}
        Action::Leave { key, why } => tracing::info!(shard = %key, "leaves the pool: {why}"),
        Action::Stop { key, why, .. } => tracing::info!(shard = %key, "is stopped: {why}"),
        Action::Clear { key } => tracing::debug!(shard = %key, "its failure is noted"),
        Action::OrderNode { node, draining } => {
            let what = match draining {
                true => "is taken out of use",
                false => "is put back into use",
            };
            tracing::info!(%node, "{what}");
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
