//! What this node is, looked at again and again, for the session, which reports it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use llmgw_proto::inventory::gpu::{DriverState, Gpu};
use llmgw_proto::inventory::{Gpus, Inventory};
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::config::AgentConfig;
use crate::inventory::gpu::health::settle_memory_held;
use crate::inventory::gpu::{GpuSources, GpuWatch, PROBE_DEADLINE, PROBE_INTERVAL};
use crate::inventory::{self, Sources, network};
use crate::session::InventorySource;
use crate::supervisor::gpu::{GpuFact, GpuFacts, fact};
use crate::supervisor::machine::LOOK_WAIT_MAX_MS;
use crate::supervisor::{Processes, Supervisor};

/// How often the rest of the node is looked at, and the GPUs' last probe taken over.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
// A stopped shard waits for the probe that is under way and for the next one.
const _: () = assert!(2 * PROBE_DEADLINE.as_millis() < LOOK_WAIT_MAX_MS as u128);

pub(super) struct Node {
    sources: Sources,
    watch: GpuWatch,
    inventory: Mutex<Arc<Inventory>>,
    /// The GPUs as they were last looked at. They do not wait for the rest of the inventory, which may wait for a name server.
    looked: Mutex<LookedAt>,
}

/// The GPUs, once it is known whose the processes on them are.
#[derive(Clone, Debug)]
struct LookedAt {
    gpus: Gpus,
    /// When the driver was asked for it.
    asked: Instant,
}

/// The processes of this node's shards, with those that ended since the driver was last asked: it lists them still, and they are no
/// stranger's.
#[derive(Debug, Default)]
struct OwnPids {
    now: BTreeSet<u32>,
    /// Each with the look at which it was gone.
    ended: BTreeMap<u32, Instant>,
}

impl Node {
    /// Looks for the first time. Takes as long as the GPUs' driver does, up to its deadline.
    ///
    /// # Errors
    /// The thread that looks at the GPUs can't be started, or has ended.
    pub(super) async fn start(config: &AgentConfig) -> io::Result<Arc<Node>> {
        let sources = Sources {
            gpus: GpuSources::default(),
            sys: PathBuf::from("/sys"),
            proc: PathBuf::from("/proc"),
            dev: Some(PathBuf::from("/dev")),
            config: config.clone(),
        };
        let watch = GpuWatch::start(sources.gpus.clone(), PROBE_INTERVAL)?;
        Node::with(sources, watch).await
    }

    async fn with(sources: Sources, watch: GpuWatch) -> io::Result<Arc<Node>> {
        let mut probes = watch.probes();
        let looked = loop {
            if let Some(looked) = LookedAt::now(&watch) {
                break looked;
            }
            probes.next().await.map_err(io::Error::other)?;
        };
        let inventory = look(sources.clone(), looked.gpus.clone()).await?;
        Ok(Arc::new(Node {
            sources,
            watch,
            inventory: Mutex::new(inventory),
            looked: Mutex::new(looked),
        }))
    }

    /// Looks again and again, until it is dropped. Ends where it can't go on, which is in the log.
    pub(super) async fn keep(self: Arc<Node>, supervisor: Arc<Supervisor>) {
        tokio::select! {
            () = self.keep_gpus(&supervisor) => {}
            () = self.keep_inventory() => {}
        }
    }

    /// Every few seconds, and as soon as the driver has answered. Ends with the runtime, and with the thread that asks the driver.
    async fn keep_gpus(&self, supervisor: &Arc<Supervisor>) {
        let mut looks = looks();
        let mut probes = self.watch.probes();
        let mut own = OwnPids::default();
        loop {
            tokio::select! {
                _ = looks.tick() => {}
                probed = probes.next() => if let Err(ended) = probed {
                    tracing::error!("{ended}");
                    return;
                },
            }
            let Some(mut looked) = LookedAt::now(&self.watch) else {
                continue;
            };
            // After the driver: whoever began since is not in its list.
            if !looked.gpus.devices.is_empty() {
                let supervisor = supervisor.clone();
                let read = tokio::task::spawn_blocking(move || supervisor.processes());
                let Ok(processes) = read.await else {
                    return;
                };
                own.settle(processes, &mut looked, Instant::now());
            }
            *lock(&self.looked) = looked;
        }
    }

    async fn keep_inventory(&self) {
        let mut looks = looks();
        loop {
            looks.tick().await;
            let gpus = lock(&self.looked).gpus.clone();
            match look(self.sources.clone(), gpus).await {
                Ok(inventory) => *lock(&self.inventory) = inventory,
                Err(error) => tracing::warn!("the node can't be looked at: {error}"),
            }
        }
    }
}

fn looks() -> Interval {
    let mut looks = interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    looks
}

impl LookedAt {
    /// As if no process were this node's own. `None`: the first probe is still on its way.
    fn now(watch: &GpuWatch) -> Option<LookedAt> {
        let (gpus, asked) = watch.latest()?;
        Some(LookedAt { gpus, asked })
    }

    fn settle(&mut self, own: &dyn Fn(u32) -> bool) {
        for gpu in &mut self.gpus.devices {
            settle_memory_held(gpu, own);
        }
    }

    fn lists(&self, pid: u32) -> bool {
        let processes = |gpu: &Gpu| {
            let listed = gpu.processes.value().map_or(&[][..], Vec::as_slice);
            listed.iter().any(|process| process.pid == pid)
        };
        self.gpus.devices.iter().any(processes)
    }

    fn find(&self, uuid: &str) -> Option<&Gpu> {
        let is_it = |gpu: &&Gpu| gpu.uuid.value().is_some_and(|theirs| theirs == uuid);
        self.gpus.devices.iter().find(is_it)
    }

    /// An inventory with what is known of its GPUs by now.
    fn renew(&self, mut inventory: Arc<Inventory>) -> Arc<Inventory> {
        let newer = |gpu: &Gpu| {
            let newer = self.find(gpu.uuid.value()?)?;
            (newer != gpu).then(|| newer.clone())
        };
        let found: Vec<Option<Gpu>> = inventory.gpus.devices.iter().map(newer).collect();
        for (at, newer) in found.into_iter().enumerate() {
            if let Some(newer) = newer {
                Arc::make_mut(&mut inventory).gpus.devices[at] = newer;
            }
        }
        inventory
    }
}

impl OwnPids {
    /// Says of a look at the GPUs which of them strangers hold.
    fn settle(&mut self, processes: io::Result<Processes>, looked: &mut LookedAt, now: Instant) {
        match processes {
            Ok(processes) => self.look(&processes, looked, now),
            // Those of the look before it has to do: one that began since is taken for a stranger's, which only keeps new ones off.
            Err(error) => tracing::warn!("the processes of the shards can't be told: {error}"),
        }
        looked.settle(&|pid| self.has(pid));
    }

    /// Takes in who runs now.
    fn look(&mut self, processes: &Processes, looked: &LookedAt, now: Instant) {
        let before = std::mem::replace(&mut self.now, processes.own.clone());
        for pid in before.difference(&self.now) {
            self.ended.entry(*pid).or_insert(now);
        }
        // A probe that was under way when they ended may list them too.
        let (own, ended) = (&self.now, &mut self.ended);
        ended.retain(|pid, since| {
            // While the driver is silent its list is only what it was.
            let is_coming = looked.gpus.driver == DriverState::Answering;
            let may_be_listed = looked.asked <= *since && (is_coming || looked.lists(*pid));
            may_be_listed && !own.contains(pid) && !processes.living.contains(pid)
        });
    }

    fn has(&self, pid: u32) -> bool {
        self.now.contains(&pid) || self.ended.contains_key(&pid)
    }
}

/// Puts an inventory together. It reads files and may look up the server's name, so it has a thread to itself.
async fn look(sources: Sources, gpus: Gpus) -> io::Result<Arc<Inventory>> {
    let looking = tokio::task::spawn_blocking(move || {
        Arc::new(inventory::assemble(&sources, gpus, &network::addresses()))
    });
    looking.await.map_err(io::Error::other)
}

impl InventorySource for Node {
    fn latest(&self) -> Arc<Inventory> {
        let inventory = lock(&self.inventory).clone();
        lock(&self.looked).renew(inventory)
    }
}

/// The supervisor sees of a GPU what the session tells of it: one that it reports as given back is not told as held.
impl GpuFacts for Node {
    fn gpu(&self, uuid: &str) -> Option<GpuFact> {
        let looked = lock(&self.looked);
        let found = looked.find(uuid)?;
        Some(fact(found, looked.asked))
    }

    fn look_now(&self) {
        self.watch.look_now();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use llmgw_proto::inventory::Reading;
    use llmgw_proto::inventory::gpu::{GpuProcess, HealthCode};
    use tokio::time::timeout;

    use super::*;
    use crate::inventory::gpu::assemble::without_source;
    use crate::inventory::gpu::prober::Probed;
    use crate::supervisor::SupervisorOptions;

    /// No test waits for longer.
    const PATIENCE: Duration = Duration::from_secs(60);

    const INVENTORY: &str = include_str!("../../../tests/recordings/inventory/two-gpus.json");

    /// A probe that found these processes on the first GPU.
    fn probed(asked: Instant, pids: &[u32]) -> LookedAt {
        let inventory: Inventory = serde_json::from_str(INVENTORY).unwrap();
        let mut gpus = inventory.gpus;
        let process = |pid: &u32| GpuProcess {
            pid: *pid,
            memory_mib: Reading::Known(9_000),
        };
        gpus.devices[0].processes = Reading::Known(pids.iter().map(process).collect());
        gpus.devices[0].memory.used_mib = Reading::Known(9_000 * pids.len() as u64);
        LookedAt { gpus, asked }
    }

    fn processes(own: &[u32], living: &[u32]) -> Processes {
        Processes {
            own: own.iter().copied().collect(),
            living: living.iter().copied().collect(),
        }
    }

    fn is_held(looked: &mut LookedAt, own: &OwnPids) -> bool {
        looked.settle(&|pid| own.has(pid));
        looked.gpus.devices[0].has(HealthCode::MemoryHeld)
    }

    #[test]
    fn a_gpu_that_a_shard_has_just_given_back_is_no_strangers() {
        let start = Instant::now();
        let second = |seconds| start + Duration::from_secs(seconds);
        let mut own = OwnPids::default();
        // It runs, and the driver lists it; then it has ended, and was not asked again.
        let mut first = probed(start, &[10]);
        own.look(&processes(&[10], &[10, 99]), &first, second(1));
        assert!(!is_held(&mut first, &own));
        own.look(&processes(&[], &[99]), &first, second(2));
        assert!(!is_held(&mut first, &own));
        // A probe that had begun before lists it too; the next one does not.
        let mut second_one = probed(second(1), &[10]);
        own.look(&processes(&[], &[99]), &second_one, second(4));
        assert!(!is_held(&mut second_one, &own));
        own.look(&processes(&[], &[99]), &probed(second(5), &[]), second(6));
        assert!(own.ended.is_empty());
    }

    #[test]
    fn the_shards_processes_are_no_strangers_while_they_cannot_be_told() {
        let start = Instant::now();
        let mut own = OwnPids::default();
        own.settle(
            Ok(processes(&[10], &[10])),
            &mut probed(start, &[10]),
            start,
        );
        for (listed, is_strangers) in [(10, false), (11, true)] {
            let mut looked = probed(start, &[listed]);
            let error = io::ErrorKind::IsADirectory.into();
            own.settle(Err(error), &mut looked, start);
            let is_held = looked.gpus.devices[0].has(HealthCode::MemoryHeld);
            assert_eq!(is_held, is_strangers, "{listed}");
        }
    }

    #[test]
    fn memory_that_a_shard_left_behind_is_held_by_somebody() {
        let start = Instant::now();
        let second = |seconds| start + Duration::from_secs(seconds);
        let mut own = OwnPids::default();
        own.look(&processes(&[10], &[10]), &probed(start, &[10]), second(1));
        own.look(&processes(&[], &[]), &probed(start, &[10]), second(2));
        // Its process is gone, and the driver, asked anew, has not let its memory go.
        let mut stuck = probed(second(3), &[10]);
        own.look(&processes(&[], &[]), &stuck, second(4));
        assert!(is_held(&mut stuck, &own));
    }

    #[test]
    fn a_silent_driver_keeps_nobody_in_mind_but_whom_it_lists() {
        let start = Instant::now();
        let mut own = OwnPids::default();
        let mut silent = probed(start, &[10]);
        silent.gpus.driver = DriverState::Unresponsive;
        own.look(&processes(&[10, 11], &[10, 11]), &silent, start);
        own.look(&processes(&[], &[]), &silent, start);
        assert_eq!(own.ended.keys().collect::<Vec<_>>(), [&10]);
    }

    #[test]
    fn what_runs_and_is_not_a_shards_holds_its_gpu_also_with_the_number_of_one_that_was() {
        let start = Instant::now();
        let mut own = OwnPids::default();
        let mut listed = probed(start, &[10, 99]);
        own.look(&processes(&[10], &[10, 99]), &listed, start);
        assert!(is_held(&mut listed, &own));
        let mut reused = probed(start, &[10]);
        own.look(&processes(&[], &[10, 99]), &reused, start);
        assert!(is_held(&mut reused, &own));
        // One that never was a shard's and is not to be seen may be behind another /proc.
        let mut unseen = probed(start, &[11]);
        own.look(&processes(&[], &[99]), &unseen, start);
        assert!(is_held(&mut unseen, &own));
    }

    #[test]
    fn an_inventory_tells_the_gpus_as_they_are_by_now() {
        let start = Instant::now();
        let inventory: Arc<Inventory> = Arc::new(serde_json::from_str(INVENTORY).unwrap());
        let mut looked = probed(start, &[10]);
        looked.gpus.devices.remove(1);
        assert!(is_held(&mut looked, &OwnPids::default()));
        let renewed = looked.renew(inventory.clone());
        assert_eq!(renewed.gpus.devices[0], looked.gpus.devices[0]);
        assert_eq!(renewed.gpus.devices[1..], inventory.gpus.devices[1..]);
        let same = probed(start, &[]).renew(inventory.clone());
        assert_eq!(same.gpus.devices, inventory.gpus.devices);
    }

    fn without_gpus() -> Probed {
        Probed::Answered(without_source(Vec::new()))
    }

    async fn node(
        place: &Path,
        every: Duration,
        probe: impl FnMut() -> Probed + Send + 'static,
    ) -> io::Result<Arc<Node>> {
        let sources = Sources {
            gpus: GpuSources::default(),
            sys: place.to_owned(),
            proc: place.to_owned(),
            dev: None,
            config: AgentConfig::default(),
        };
        let watch = GpuWatch::with(probe, every)?;
        Node::with(sources, watch).await
    }

    #[tokio::test]
    async fn the_look_at_the_node_ends_with_the_thread_that_looks_at_the_gpus() {
        let place = std::env::temp_dir().join(format!("llmgw-node-{}", std::process::id()));
        let every = Duration::from_millis(1);
        let first = node(&place, every, || panic!("a first probe that panics"));
        let first = timeout(PATIENCE, first).await.expect("nothing is to come");
        let why = first.err().expect("nothing is known of the GPUs");
        assert_eq!(
            why.to_string(),
            "the thread that looks at the GPUs has ended"
        );

        let mut left = 1;
        let later = node(&place, every, move || {
            assert!(left > 0, "a later probe that panics");
            left -= 1;
            without_gpus()
        });
        let node = later.await.expect("it has looked");
        let options = SupervisorOptions::new(place.clone(), BTreeMap::new());
        let (supervisor, _) = Supervisor::start(options)
            .await
            .expect("nothing runs there");
        let looks = node.keep(supervisor.clone());
        timeout(PATIENCE, looks).await.expect("it can't go on");
        supervisor.shutdown(false).await;
        std::fs::remove_dir_all(&place).expect("it is there");
    }

    #[tokio::test]
    async fn the_driver_is_asked_anew_for_a_shard_that_has_ended() {
        let (asks, mut asked) = tokio::sync::mpsc::unbounded_channel();
        let probe = move || {
            let _ = asks.send(());
            without_gpus()
        };
        let node = node(Path::new("/nowhere"), PATIENCE * 60, probe).await;
        let node = node.expect("it has looked");
        asked.recv().await.expect("it has looked");
        node.look_now();
        let again = timeout(PATIENCE, asked.recv()).await;
        again.expect("it looks at once").expect("it looks");
    }
}
