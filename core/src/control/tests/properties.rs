//! What holds for every fleet.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::placed;
use crate::control::explain::explain;
use crate::control::placement::{Decision, JobSpec, NativePolicy, place};
use crate::control::snapshot::{Draws, NodeState, Snapshot, generate};

/// Random fleets that are looked at.
const FLEETS: u64 = 24;
/// Replicas that are placed in each.
const REPLICAS: usize = 8;

fn reread(snapshot: &Snapshot) -> Snapshot {
    Snapshot::parse(Path::new("written.json"), &snapshot.to_json())
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Every rule that a placement must keep, looked up in the fleet as it was before.
fn check(snapshot: &Snapshot, decision: &Decision) {
    let Some((attempt, ranking)) = decision.chosen() else {
        for attempt in &decision.attempts {
            assert_eq!(
                attempt.refused.len(),
                snapshot.nodes.len(),
                "each with a reason"
            );
        }
        return;
    };
    let (need, candidate) = (&attempt.need, &ranking.candidate);
    assert_eq!(candidate.nodes.len(), need.nodes as usize);
    let mut uuids = BTreeSet::new();
    let mut classes = BTreeSet::new();
    let mut fabrics: Option<BTreeSet<&String>> = None;
    for (id, taken) in candidate.nodes.iter().zip(&candidate.taken) {
        let node = &snapshot.nodes[id];
        assert_eq!(node.state, NodeState::Ready);
        assert_eq!(taken.len(), need.gpus as usize);
        assert!(node.cpus_free >= need.cpus.unwrap_or(0));
        assert!(node.memory_gib_free >= need.memory_gib.unwrap_or(0.0));
        let own: BTreeSet<&String> = node.fabrics.iter().collect();
        fabrics = Some(fabrics.map_or(own.clone(), |seen| &seen & &own));
        let mut domains = BTreeSet::new();
        for taken in taken {
            let gpu = node.gpus.iter().find(|gpu| gpu.uuid == taken.uuid);
            let gpu = gpu.expect("it is a GPU of the node");
            assert!(gpu.healthy && gpu.used_by.is_none(), "{gpu:?}");
            assert!(uuids.insert(&gpu.uuid), "a GPU twice");
            classes.insert(&gpu.class);
            domains.insert(gpu.domain);
        }
        let fits = |domain: &Option<u32>| {
            let mut members = node.gpus.iter();
            domain.is_some()
                && members.by_ref().filter(|gpu| gpu.domain == *domain).count()
                    >= need.group as usize
        };
        let any_fits = node.gpus.iter().any(|gpu| fits(&gpu.domain));
        assert!(need.groups() != 1 || !any_fits || domains.len() == 1);
    }
    assert!(classes.len() <= 1, "mixed classes");
    assert!(need.nodes == 1 || fabrics.is_some_and(|common| !common.is_empty()));
}

#[test]
fn no_gpu_is_taken_twice_none_is_broken_and_the_decision_is_the_same_after_a_round_trip() {
    for seed in 0..FLEETS {
        let mut draws = Draws(seed);
        let size = 1 + draws.below(40) as usize;
        let mut snapshot = generate(seed, size);
        let models: Vec<String> = snapshot.models.keys().cloned().collect();
        for _ in 0..REPLICAS {
            let model = &models[draws.below(models.len() as u64) as usize];
            let decision = placed(&snapshot, model);
            check(&snapshot, &decision);
            assert_eq!(
                decision,
                placed(&snapshot, model),
                "seed {seed}: not deterministic"
            );
            let again = reread(&snapshot);
            assert_eq!(again, snapshot, "seed {seed}");
            assert_eq!(
                decision,
                placed(&again, model),
                "seed {seed}: other after a round trip"
            );
            decision.apply(&mut snapshot);
        }
    }
}

#[test]
fn a_replica_that_leaves_gives_back_all_that_it_had() {
    for seed in 0..FLEETS {
        let before = generate(seed, 30);
        let mut snapshot = before.clone();
        let placed: Vec<Decision> = before
            .models
            .keys()
            .filter_map(|model| {
                let decision = placed(&snapshot, model);
                decision.apply(&mut snapshot).then_some(decision)
            })
            .collect();
        for decision in placed {
            assert!(snapshot.release(&decision.replica_id()));
        }
        assert_eq!(snapshot, before, "seed {seed}");
    }
}

#[test]
fn no_answer_is_empty_whatever_the_fleet() {
    for seed in 0..FLEETS {
        let snapshot = generate(seed, (seed % 12) as usize);
        for model in snapshot.models.keys() {
            let job = JobSpec::of(&snapshot, model, None).expect("it is there");
            let mut decide =
                |snapshot: &Snapshot, job: &JobSpec| place(snapshot, job, &mut NativePolicy);
            let decision = decide(&snapshot, &job);
            let answer = explain(&snapshot, &job, decision, None, &mut decide);
            for profile in answer.profiles.iter().filter(|_| !answer.placed) {
                assert!(!profile.why.is_empty());
                assert!(profile.why.iter().all(|count| !count.detail.is_empty()));
                let lacks = profile.nearest.iter().flat_map(|near| &near.lacks);
                assert!(lacks.clone().all(|lack| !lack.is_empty()));
            }
            for change in &answer.fits_if {
                assert!(!change.text.is_empty() && !change.nodes.is_empty());
            }
            assert!(serde_json::to_string(&answer).is_ok());
        }
    }
}

#[test]
fn a_seed_always_gives_the_same_fleet() {
    let digest = Sha256::digest(generate(2026, 1000).to_json());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        hex, "84c5cfc7653a8e882b5bba64a792297f649a26df16d756585980c7688d978438",
        "fleets/thousand.json means another fleet now: tests of policies that use it may fail"
    );
}

#[test]
fn a_thousand_nodes_are_decided_about_the_same_way_each_time_and_soon() {
    let snapshot = super::fleet("thousand");
    assert_eq!(snapshot.nodes.len(), 1000);
    for model in snapshot.models.keys() {
        let begin = Instant::now();
        let decision = placed(&snapshot, model);
        // Generous: the build is not optimised, and the machine may be busy or stall.
        assert!(begin.elapsed() < Duration::from_secs(60));
        check(&snapshot, &decision);
        assert!(decision.placed(), "{model}");
        assert_eq!(decision, placed(&generate(2026, 1000), model));
    }
}
