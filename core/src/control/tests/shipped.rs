//! The snapshots in `policies/fleets`: each shows what its name says.

use std::collections::BTreeSet;

use serde_json::json;

use super::{codes, fleet, fleets, indexes, placed};
use crate::control::snapshot::Snapshot;

#[test]
fn every_shipped_fleet_is_read_and_reads_the_same_when_written() {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(fleets()).expect("the directory is there") {
        let file = entry.expect("it can be listed").path();
        let snapshot = Snapshot::read(&file).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(Snapshot::parse(&file, &snapshot.to_json()), Ok(snapshot));
        names.insert(
            file.file_stem()
                .expect("it has a name")
                .to_string_lossy()
                .into_owned(),
        );
    }
    let expected = [
        "cpu-pair",
        "full-pool",
        "lost-node",
        "mixed-bad-gpu",
        "thousand",
        "two-racks",
    ];
    assert!(
        expected.iter().all(|name| names.contains(*name)),
        "{names:?}"
    );
}

#[test]
fn in_two_racks_the_example_of_the_policy_contract_holds() {
    let mut fleet = fleet("two-racks");
    fleet
        .set("nodes[\"ml-07\"].gpus_free", json!(4))
        .expect("the path is right");
    let decision = placed(&fleet, "llama-3.3-70b");
    assert_eq!(decision.nodes(), ["ml-07"]);
    assert_eq!(codes(&decision, "ml-03"), ["gpu_class", "gpus_busy"]);
    let shown = serde_json::to_value(&decision).expect("it has string keys only");
    assert_eq!(shown["placed"], json!(true));
    assert_eq!(shown["nodes"], json!(["ml-07"]));
    assert_eq!(shown["gpus"], json!({"ml-07": [0, 1, 2, 3]}));
    assert_eq!(shown["refused"]["ml-03"]["code"], json!("gpu_class"));
    assert_eq!(shown["refused"]["ml-01"]["reasons"][0]["have"], json!(0));
    let parts = json!({"cached": 0.0, "fabric": 0.0, "frag": 25.0, "pack": 40.0, "spread": 20.0});
    assert_eq!(
        (shown["parts"].clone(), shown["score"].clone()),
        (parts, json!(85.0))
    );
}

#[test]
fn in_two_racks_a_gang_shares_the_fabric() {
    let decision = placed(&fleet("two-racks"), "deepseek-v3");
    assert_eq!(decision.nodes(), ["ml-02", "ml-04"]);
    assert_eq!(
        codes(&decision, "ml-03"),
        ["gpu_class", "gpus_busy", "fabric"]
    );
}

#[test]
fn in_a_pair_of_cpu_nodes_the_second_replica_goes_to_the_other() {
    let decision = placed(&fleet("cpu-pair"), "smollm2");
    assert_eq!(decision.nodes(), ["cpu-02"]);
    assert_eq!(decision.attempts[0].candidates.len(), 2);
}

#[test]
fn with_a_bad_gpu_the_others_are_used() {
    let fleet = fleet("mixed-bad-gpu");
    let decision = placed(&fleet, "mistral-24b");
    assert_eq!(
        (decision.nodes(), indexes(&decision)),
        (&["gpu-02".to_owned()][..], vec![vec![1, 2]])
    );
    let decision = placed(&fleet, "llama-3.3-70b");
    assert_eq!(decision.nodes(), ["gpu-03"]);
    assert_eq!(indexes(&decision), [[0, 1, 2, 3]]);
    let mut eight = fleet.clone();
    eight
        .models
        .get_mut("llama-3.3-70b")
        .expect("it is there")
        .profiles
        .remove(0);
    let decision = placed(&eight, "llama-3.3-70b");
    assert_eq!(codes(&decision, "gpu-03"), ["unhealthy"]);
    assert!(
        decision.refused("gpu-03")[0]
            .text
            .starts_with("GPU 5 needs reset; 7 of 8 GPUs are healthy")
    );
}

#[test]
fn with_a_lost_node_only_ready_ones_are_used() {
    let fleet = fleet("lost-node");
    let decision = placed(&fleet, "llama-3.3-70b");
    assert_eq!(decision.nodes(), ["ml-01"]);
    for node in ["ml-02", "ml-03", "ml-04"] {
        assert_eq!(codes(&decision, node)[0], "node_state");
    }
    let decision = placed(&fleet, "deepseek-v3");
    assert!(!decision.placed());
    assert_eq!(codes(&decision, "ml-02"), ["node_state", "gpus_busy"]);
}
