//! The snapshot of what agents said: who has what, what is left, and that the file reads back and places the same.

use std::path::Path;
use std::sync::Arc;

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::fabric::{Fabric, FabricDecision, Standing};
use llmgw_proto::inventory::gpu::{HealthCode, HealthFlag};
use llmgw_proto::session::SessionId;
use llmgw_proto::shard::ShardState as Told;

use super::snapshot;
use crate::config::{self, Config, UtcTime};
use crate::control::memory::{Memory, Start};
use crate::control::observed::{Observed, ObservedNode};
use crate::control::placement::{JobSpec, NativePolicy, place};
use crate::control::reconcile::Why;
use crate::control::snapshot::{FOREIGN, Node, NodeState, ShardState, Snapshot};
use crate::control::tests::nodes::{Nodes, key, spec};

fn config() -> Config {
    let text = "models:\n- {name: m, replicas: 2, profiles: [{name: p, engine: vllm, gpu: h100-sxm-80g}, \
                {name: cpu, engine: llamacpp, cpus: 8, memory: 16GiB}]}\n";
    config::parse(Path::new("llmgw.yaml"), text.to_owned(), &|_| None).expect("it is one")
}

fn taken(observed: &Observed, memory: &Memory) -> Snapshot {
    let catalog = config().catalog;
    let snapshot = snapshot(&catalog, observed, memory, UtcTime(1_767_225_600));
    let text = snapshot.to_json();
    let read =
        Snapshot::parse(Path::new("fleet.json"), &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    assert_eq!(read, snapshot, "what is written is read");
    snapshot
}

fn of(nodes: &Nodes) -> Snapshot {
    taken(&nodes.0, &Memory::default())
}

fn card(
    node: &mut ObservedNode,
    at: usize,
    change: impl FnOnce(&mut llmgw_proto::inventory::gpu::Gpu),
) {
    let inventory = node.inventory.as_mut().expect("it is readable");
    change(&mut Arc::make_mut(inventory).gpus.devices[at]);
}

fn users(node: &Node) -> Vec<Option<&str>> {
    node.gpus.iter().map(|gpu| gpu.used_by.as_deref()).collect()
}

#[test]
fn a_node_is_what_its_inventory_says() {
    let snapshot = of(&Nodes::new(&["a"]));
    let node = &snapshot.nodes["a"];
    assert_eq!((node.cpus, node.cpus_free), (96, 96));
    assert_eq!((node.memory_gib, node.memory_gib_free), (540.0, 540.0));
    assert_eq!(
        (node.rack.as_deref(), node.zone.as_deref()),
        (Some("r1"), Some("a"))
    );
    let gpu = &node.gpus[1];
    assert_eq!(
        (&*gpu.uuid, gpu.index, &*gpu.class),
        ("GPU-0b-a", 1, "h100-sxm-80g")
    );
    assert_eq!(
        (gpu.domain, gpu.compute_capability.as_deref()),
        (Some(0), Some("9.0"))
    );
    assert_eq!((gpu.healthy, gpu.memory_free_gib), (true, Some(79.6)));
    assert_eq!(snapshot.taken_at, "2026-01-01T00:00:00Z");
    assert_eq!(snapshot.models["m"].replicas, 2);
}

#[test]
fn what_replicas_have_is_taken_also_where_it_is_only_sent_and_not_on_lost_nodes() {
    let with = |replica: &str, gpu: &str| {
        let mut spec = spec(replica);
        spec.gpus = vec![gpu.to_owned()];
        (spec.cpus, spec.memory_bytes) = (Some(8), Some(16 << 30));
        spec
    };
    let nodes = |state| {
        Nodes::new(&["a", "b"])
            .with_spec("a", with("m/0", "GPU-0a-a"), state)
            .with_spec("b", with("m/1", "GPU-0a-b"), Told::Ready)
            .absent("b", NodeState::Lost)
    };
    let mut memory = Memory::default();
    let start = Start {
        spec: Arc::new(with("m/2", "GPU-0b-a")),
        sent_ms: 1_000_000,
        session: SessionId(0),
    };
    memory.start("a", start);
    let snapshot = taken(&nodes(Told::Loading).0, &memory);
    assert_eq!(users(&snapshot.nodes["a"]), [Some("m/0"), Some("m/2")]);
    assert_eq!(snapshot.nodes["a"].cpus_free, 80);
    assert_eq!(snapshot.nodes["a"].memory_gib_free, 508.0);
    assert_eq!(users(&snapshot.nodes["b"]), [None, None]);
    assert_eq!(snapshot.running("m"), 2);
    // What failed has given back what it had; what leaves has not, but is no replica that stays.
    let snapshot = taken(&nodes(Told::Failed).0, &memory);
    assert_eq!(users(&snapshot.nodes["a"]), [None, Some("m/2")]);
    memory.leave(&key("a", "m/0"), Why::Surplus, false, 0);
    let snapshot = taken(&nodes(Told::Ready).0, &memory);
    assert_eq!(users(&snapshot.nodes["a"])[0], Some("m/0"));
    assert_eq!(snapshot.replicas["m/0"].state, ShardState::Draining);
}

#[test]
fn what_is_left_of_a_failed_replica_keeps_its_gpus_cores_and_memory_until_it_is_gone() {
    let with_reason = |reason: &str| {
        let mut left = spec("m/0");
        left.gpus = vec!["GPU-0a-a".to_owned()];
        (left.cpus, left.memory_bytes) = (Some(8), Some(16 << 30));
        Nodes::new(&["a"])
            .with_spec("a", left, Told::Failed)
            .edit("a", |node| {
                let shard = node.shards.get_mut("m/0/0").expect("it is there");
                shard.status.reason = reason.to_owned();
            })
    };
    let left = "exited: it exited with status 1; not_gone: SIGKILL did not end process 7 (D)";
    let snapshot = of(&with_reason(left));
    let node = &snapshot.nodes["a"];
    assert_eq!(users(node), [Some("m/0"), None]);
    assert_eq!((node.cpus_free, node.memory_gib_free), (88, 524.0));
    assert_eq!(snapshot.running("m"), 0);
    let read = Snapshot::parse(Path::new("f"), &snapshot.to_json()).expect("it is one");
    let mut job = JobSpec::of(&read, "m", Some("p")).expect("it is there");
    job.profiles[0].gpus_per_node = 2;
    let decision = place(&read, &job, &mut NativePolicy);
    let refused = decision.refused("a");
    let said = "held by what is left of m/0 (not_gone)";
    assert!(refused[0].text.contains(said), "{refused:?}");
    let snapshot = of(&with_reason(&format!("{left}; they are gone now")));
    assert_eq!(users(&snapshot.nodes["a"]), [None, None]);
    assert_eq!(snapshot.nodes["a"].cpus_free, 96);
}

#[test]
fn memory_that_others_hold_makes_a_gpu_foreign_and_any_other_flag_makes_it_sick() {
    let flag = |code, reason: &str| HealthFlag {
        code,
        reason: reason.to_owned(),
    };
    let nodes = Nodes::new(&["a"]).edit("a", |node| {
        card(node, 0, |gpu| {
            gpu.health = vec![flag(HealthCode::MemoryHeld, "pid 7 has 3 GiB")]
        });
        card(node, 1, |gpu| {
            gpu.health = vec![flag(HealthCode::UncorrectedEcc, "1 uncorrected error")]
        });
    });
    let snapshot = of(&nodes);
    let gpus = &snapshot.nodes["a"].gpus;
    assert_eq!(
        (gpus[0].healthy, gpus[0].used_by.as_deref()),
        (true, Some(FOREIGN))
    );
    assert_eq!(
        (gpus[1].healthy, gpus[1].reason.as_deref()),
        (false, Some("1 uncorrected error"))
    );
}

#[test]
fn slices_have_numbers_of_their_own_and_a_gpu_that_two_agents_list_is_the_first_ones() {
    let nodes = Nodes::new(&["a", "b"])
        .edit("a", |node| {
            card(node, 1, |gpu| gpu.index = Reading::Known(0))
        })
        .edit("b", |node| {
            card(node, 0, |gpu| {
                gpu.uuid = Reading::Known("GPU-0a-a".to_owned())
            });
            card(node, 1, |gpu| gpu.class = Reading::unknown("no name"));
        });
    let snapshot = of(&nodes);
    let indexes: Vec<u32> = snapshot.nodes["a"]
        .gpus
        .iter()
        .map(|gpu| gpu.index)
        .collect();
    assert_eq!(indexes, [0, 1]);
    assert!(snapshot.nodes["b"].gpus.is_empty());
}

#[test]
fn a_card_that_moved_to_another_node_is_of_the_one_that_speaks_and_free_once_nobody_has_it() {
    let listed_by_both = |state: Option<NodeState>| {
        let mut held = spec("m/0");
        held.gpus = vec!["GPU-0a-a".to_owned()];
        let nodes = Nodes::new(&["a", "b"])
            .with_spec("a", held, Told::Ready)
            .edit("b", |node| {
                card(node, 0, |gpu| {
                    gpu.uuid = Reading::Known("GPU-0a-a".to_owned())
                });
            });
        match state {
            Some(state) => nodes.absent("a", state),
            None => nodes,
        }
    };
    let cards = |nodes: &Nodes| {
        let snapshot = of(nodes);
        ["a", "b"].map(|id| {
            let gpus = snapshot.nodes[id].gpus.iter();
            let mut shown = gpus.map(|gpu| (gpu.uuid.clone(), gpu.used_by.clone()));
            shown.find(|(uuid, _)| uuid == "GPU-0a-a")
        })
    };
    let of_user = |user: &str| Some(("GPU-0a-a".to_owned(), Some(user.to_owned())));
    assert_eq!(cards(&listed_by_both(None)), [of_user("m/0"), None]);
    let unreachable = listed_by_both(Some(NodeState::Unreachable));
    assert_eq!(
        cards(&unreachable),
        [None, of_user(FOREIGN)],
        "its engine may run on"
    );
    let lost = listed_by_both(Some(NodeState::Lost));
    let free = Some(("GPU-0a-a".to_owned(), None));
    assert_eq!(cards(&lost), [None, free]);
}

#[test]
fn only_fabrics_that_are_certain_are_told_the_primary_one_first() {
    let fabric = |name: &str, standing, ambiguous: Option<&str>| Fabric {
        name: name.to_owned(),
        adapters: Vec::new(),
        decided_by: FabricDecision::OperatorLabel,
        ambiguous: ambiguous.map(str::to_owned),
        standing,
        standing_reason: String::new(),
    };
    let nodes = Nodes::new(&["a"]).edit("a", |node| {
        let inventory = node.inventory.as_mut().expect("it is readable");
        Arc::make_mut(inventory).fabrics = vec![
            fabric("storage", Standing::Secondary, None),
            fabric(
                "default",
                Standing::Primary,
                Some("every subnet has this prefix"),
            ),
            fabric("ib-east", Standing::Primary, None),
        ];
    });
    assert_eq!(of(&nodes).nodes["a"].fabrics, ["ib-east", "storage"]);
}

#[test]
fn nothing_goes_to_a_node_whose_inventory_or_allow_list_speaks_against_it() {
    let nodes = Nodes::new(&["a", "b", "c"])
        .edit("a", |node| {
            node.inventory = Err("it is from a newer release".to_owned())
        })
        .edit("b", |node| node.engines = vec!["llamacpp".to_owned()])
        .draining("c");
    let snapshot = of(&nodes);
    let job = JobSpec::of(&snapshot, "m", Some("p")).expect("it is there");
    let decision = place(&snapshot, &job, &mut NativePolicy);
    let told = |node: &str| -> Vec<String> {
        let reasons = decision.refused(node).iter();
        reasons
            .map(|reason| format!("{}: {}", reason.code, reason.text))
            .collect()
    };
    assert_eq!(
        told("a")[0],
        "node_state: its inventory can't be read: it is from a newer release"
    );
    assert_eq!(
        told("b"),
        ["engine: its agent.yaml lists no engine `vllm` (it lists llamacpp)"]
    );
    assert_eq!(told("c"), ["node_state: the node is draining"]);
    let cpu = JobSpec::of(&snapshot, "m", Some("cpu")).expect("it is there");
    assert_eq!(place(&snapshot, &cpu, &mut NativePolicy).nodes(), ["b"]);
}

#[test]
fn a_written_snapshot_places_the_same() {
    let mut held = spec("m/0");
    held.gpus = vec!["GPU-0a-a".to_owned()];
    let nodes = Nodes::new(&["a", "b"]).with_spec("a", held, Told::Ready);
    let snapshot = of(&nodes);
    let read = Snapshot::parse(Path::new("f"), &snapshot.to_json()).expect("it is one");
    let decide = |snapshot: &Snapshot| {
        let job = JobSpec::of(snapshot, "m", None).expect("it is there");
        place(snapshot, &job, &mut NativePolicy)
    };
    assert!(decide(&snapshot).placed());
    assert_eq!(decide(&snapshot), decide(&read));
}

#[test]
fn the_same_replica_on_two_nodes_is_written_as_one_and_a_strange_one_only_holds_its_gpus() {
    let mut strange = spec("m/0");
    strange.shard = "x".to_owned();
    strange.replica = "x".to_owned();
    strange.gpus = vec!["GPU-0b-a".to_owned()];
    let nodes = Nodes::new(&["a", "b"])
        .with("a", "m/0", Told::Ready)
        .with("b", "m/0", Told::Loading)
        .with_spec("a", strange, Told::Ready);
    let snapshot = of(&nodes);
    assert_eq!(snapshot.replicas.len(), 1);
    assert_eq!(snapshot.replicas["m/0"].shards.len(), 2);
    assert_eq!(users(&snapshot.nodes["a"]), [None, Some(FOREIGN)]);
}
