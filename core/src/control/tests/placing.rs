//! Where jobs go in small fleets, and the reason for each refusal.

use serde_json::json;

use super::{Build, codes, cpu_profile, gpu_profile, indexes};
use crate::control::placement::{Decision, GANGS_MAX, JobSpec, NativePolicy, place};

const H100: &str = "h100-sxm-80g";

fn nodes(decision: &Decision) -> Vec<&str> {
    decision.nodes().iter().map(String::as_str).collect()
}

fn text(decision: &Decision, node: &str) -> String {
    decision.refused(node)[0].text.clone()
}

#[test]
fn a_tensor_parallel_group_stays_in_one_nvlink_domain() {
    let fleet = Build::default()
        .gpus("a", "h100-nvl-94g", &[2, 2])
        .model(json!([gpu_profile("h100-nvl-94g", 2, 1)]))
        .set("nodes.a.gpus[0].used_by", "reserved");
    assert_eq!(indexes(&fleet.place()), [[2, 3]], "not 1 and 2");
    let split = fleet.set("nodes.a.gpus[3].used_by", "reserved").place();
    assert_eq!(codes(&split, "a"), ["domain_split"]);
    assert_eq!(
        text(&split, "a"),
        "the free GPUs are 1 + 1 in its NVLink domains, 2 are needed in one"
    );
}

#[test]
fn a_group_larger_than_any_domain_may_span_them() {
    for domains in [&[2, 2][..], &[0, 0, 0, 0], &[3, 0]] {
        let fleet = Build::default()
            .gpus("a", H100, domains)
            .model(json!([gpu_profile(H100, 4, 1)]));
        assert_eq!(indexes(&fleet.place()), [[0, 1, 2, 3]], "{domains:?}");
    }
}

#[test]
fn a_domain_with_a_broken_gpu_is_no_reason_to_span_domains() {
    let fleet = Build::default()
        .gpus("a", H100, &[4, 4])
        .model(json!([gpu_profile(H100, 4, 1)]))
        .set("nodes.a.gpus[0].healthy", false)
        .set("nodes.a.gpus[7].healthy", false);
    assert_eq!(codes(&fleet.place(), "a"), ["domain_split"]);
}

#[test]
fn several_groups_on_a_node_each_have_a_domain() {
    let profile = json!([{"name": "p", "engine": "vllm", "gpu": [H100], "gpus_per_node": 4, "tensor_parallel": 2,
        "pipeline_parallel": 2}]);
    let fleet = Build::default().gpus("a", H100, &[3, 3]).model(profile);
    assert_eq!(indexes(&fleet.place()), [[0, 1, 3, 4]]);
}

#[test]
fn a_replica_goes_where_it_leaves_the_fewest_gpus_stranded() {
    let fleet = Build::default()
        .gpus("a", H100, &[8])
        .gpus("b", H100, &[8])
        .gpus("c", H100, &[8])
        .model(json!([gpu_profile(H100, 4, 1)]))
        .set("nodes.b.gpus_free", 4)
        .set("nodes.c.gpus_free", 5);
    assert_eq!(nodes(&fleet.place()), ["b"]);
    let inside = Build::default()
        .gpus("a", H100, &[4, 4])
        .model(json!([gpu_profile(H100, 2, 1)]))
        .set("nodes.a.gpus_free", 6);
    assert_eq!(
        indexes(&inside.place()),
        [[4, 5]],
        "the domain that it fills"
    );
}

#[test]
fn gpus_on_pcie_look_no_better_than_a_whole_domain() {
    let fleet = Build::default()
        .gpus("pcie", H100, &[0; 8])
        .gpus("switch", H100, &[8])
        .model(json!([gpu_profile(H100, 8, 1)]));
    let decision = fleet.place();
    assert_eq!(nodes(&decision), ["switch"]);
    assert_eq!(decision.attempts[0].candidates[1].candidate.domains, 8);
}

#[test]
fn a_full_node_is_refused_with_a_reason() {
    let fleet = Build::default()
        .gpus("a", H100, &[8])
        .model(json!([gpu_profile(H100, 4, 1)]))
        .set("nodes.a.gpus_free", 2);
    let decision = fleet.place();
    assert!(!decision.placed());
    let reason = &decision.refused("a")[0];
    assert_eq!(reason.code, "gpus_busy");
    assert_eq!(reason.text, "2 of 8 GPUs are free, 4 are needed");
    let amount = reason.amount.expect("GPUs are counted");
    assert_eq!((amount.have, amount.need, amount.unit), (2.0, 4.0, "GPUs"));
}

#[test]
fn each_cause_has_its_code_and_nothing_hides_behind_another() {
    let profile = json!([{"name": "p", "engine": "vllm", "gpu": [H100], "gpus_per_node": 4, "tensor_parallel": 4,
        "cpus": 16, "memory_gib": 64}]);
    let build = || {
        Build::default()
            .gpus("a", H100, &[4])
            .model(profile.clone())
    };
    let busy = |build: Build| build.set("nodes.a.gpus_free", 3);
    let sick = |build: Build| {
        build
            .set("nodes.a.gpus[1].healthy", false)
            .set("nodes.a.gpus[1].reason", "uncorrected ECC")
    };
    let held = |build: Build| build.set("nodes.a.gpus[2].used_by", "foreign");
    let poor = |build: Build| {
        build
            .set("nodes.a.cpus_free", 8)
            .set("nodes.a.memory_gib_free", 32)
            .set("nodes.a.state", "draining")
    };
    let cases: [(Build, &[&str]); 8] = [
        (build(), &[]),
        (busy(build()), &["gpus_busy"]),
        (sick(build()), &["unhealthy"]),
        (held(build()), &["gpus_held"]),
        (poor(build()), &["node_state", "cpus", "memory"]),
        (
            poor(held(sick(busy(build())))),
            &[
                "node_state",
                "unhealthy",
                "gpus_held",
                "gpus_busy",
                "cpus",
                "memory",
            ],
        ),
        (build().set("nodes.a.gpu_class", "l40s-45g"), &["gpu_class"]),
        (
            sick(build()).set("nodes.a.gpu_class", "l40s-45g"),
            &["gpu_class", "unhealthy"],
        ),
    ];
    for (fleet, expected) in cases {
        assert_eq!(codes(&fleet.place(), "a"), expected);
    }
    let none = Build::default().cores("a", 64).model(profile.clone());
    assert_eq!(codes(&none.place(), "a"), ["no_gpu"]);
    let few = Build::default().gpus("a", H100, &[2]).model(profile);
    assert_eq!(codes(&few.place(), "a"), ["gpu_count"]);
    assert_eq!(
        text(&few.place(), "a"),
        "the node has 2 GPUs of h100-sxm-80g, 4 are needed"
    );
}

#[test]
fn causes_that_only_together_are_too_many_still_give_a_reason() {
    let fleet = Build::default()
        .gpus("a", H100, &[8])
        .model(json!([gpu_profile(H100, 4, 1)]))
        .set("nodes.a.gpus_free", 5)
        .set("nodes.a.gpus[0].healthy", false)
        .set("nodes.a.gpus[1].used_by", "foreign");
    let decision = fleet.place();
    assert_eq!(codes(&decision, "a"), ["gpus_busy"]);
    assert_eq!(
        text(&decision, "a"),
        "3 of 8 GPUs are free, 4 are needed (1 not healthy)"
    );
    let no_replica = Build::default()
        .gpus("a", H100, &[4])
        .model(json!([gpu_profile(H100, 3, 1)]))
        .set("nodes.a.gpus[0].healthy", false)
        .set("nodes.a.gpus[1].used_by", "foreign");
    assert_eq!(codes(&no_replica.place(), "a"), ["gpus_held"]);
}

#[test]
fn classes_are_taken_in_the_order_of_the_profile_and_never_mixed() {
    let profile = json!([{"name": "p", "engine": "vllm", "gpu": ["h200-140g", H100], "gpus_per_node": 4,
        "tensor_parallel": 4}]);
    let fleet = Build::default()
        .gpus("a", H100, &[4])
        .gpus("b", "h200-140g", &[8])
        .model(profile);
    let decision = fleet.place();
    assert_eq!(nodes(&decision), ["b"], "although `a` would be filled");
    assert_eq!(decision.attempts[0].candidates.len(), 2);
    let fleet = fleet.set("nodes.b.gpus_free", 0);
    assert_eq!(nodes(&fleet.place()), ["a"]);
    let mut mixed = Build::default()
        .gpus("a", H100, &[4])
        .model(json!([gpu_profile(H100, 4, 1)]));
    mixed = mixed.set("nodes.a.gpus[3].class", "h100-pcie-80g");
    assert_eq!(codes(&mixed.place(), "a"), ["gpu_count"]);
}

#[test]
fn profiles_are_tried_in_order_and_each_refusal_is_kept() {
    let fleet = Build::default()
        .gpus("a", "l40s-45g", &[0, 0])
        .model(json!([
            gpu_profile(H100, 4, 1),
            gpu_profile("l40s-45g", 2, 1),
            cpu_profile(8)
        ]));
    let decision = fleet.place();
    assert_eq!(decision.attempts.len(), 2, "the third is not asked for");
    assert_eq!(decision.attempts[0].refused["a"][0].code, "gpu_class");
    assert_eq!(
        decision.chosen().expect("it fits").0.need.profile,
        "l40s-45g"
    );
}

#[test]
fn a_profile_that_only_fits_where_the_model_failed_gives_way_to_the_next_one() {
    let fleet = Build::default()
        .gpus("a", H100, &[1])
        .gpus("b", "l40s-45g", &[0])
        .model(json!([
            gpu_profile(H100, 1, 1),
            gpu_profile("a100-80g", 1, 1),
            gpu_profile("l40s-45g", 1, 1),
            cpu_profile(8)
        ]));
    let place = |avoid: &[&str]| {
        let mut job = JobSpec::of(&fleet.0, "m", None).expect("it is there");
        job.avoid = avoid.iter().map(|node| (*node).to_owned()).collect();
        let decision = place(&fleet.0, &job, &mut NativePolicy);
        let tried: Vec<String> = decision
            .attempts
            .iter()
            .map(|attempt| attempt.need.profile.clone())
            .collect();
        (nodes(&decision).join(" "), tried)
    };
    let (first, second) = ("a".to_owned(), "b".to_owned());
    assert_eq!(place(&[]), (first.clone(), vec![H100.to_owned()]));
    let all = [H100, "a100-80g", "l40s-45g"].map(str::to_owned);
    assert_eq!(place(&["a"]), (second, all.to_vec()));
    let (node, tried) = place(&["a", "b"]);
    assert_eq!((node, tried), (first, vec![H100.to_owned()]), "as before");
}

#[test]
fn a_node_without_a_free_port_is_refused_and_each_replica_takes_one() {
    let mut fleet = Build::default()
        .cores("a", 32)
        .model(json!([cpu_profile(1)]))
        .set("nodes.a.ports_free", 2);
    for _ in 0..2 {
        assert!(fleet.place().apply(&mut fleet.0));
    }
    let full = fleet.place();
    assert_eq!(codes(&full, "a"), ["ports"]);
    assert_eq!(
        text(&full, "a"),
        "none of the ports that its agent.yaml gives to engines is free"
    );
    assert!(fleet.0.release("m/1"));
    assert!(fleet.place().placed());
}

#[test]
fn a_node_without_the_labels_that_a_profile_asks_for_is_refused() {
    let mut profile = cpu_profile(1);
    profile["node_selector"] = json!({"disk": "nvme", "zone": "b"});
    let fleet = Build::default()
        .cores("a", 32)
        .cores("b", 32)
        .cores("c", 32)
        .model(json!([profile]))
        .set("nodes.a.zone", "b")
        .set("nodes.a.labels", json!({"disk": "nvme"}))
        .set("nodes.b.labels", json!({"disk": "ssd", "zone": "b"}));
    let decision = fleet.place();
    assert_eq!(nodes(&decision), ["a"]);
    assert_eq!(codes(&decision, "b"), ["labels"]);
    assert_eq!(text(&decision, "b"), "`disk` is `ssd`, `nvme` is needed");
    let reason = &decision.refused("c")[0];
    assert_eq!(reason.code, "labels");
    assert_eq!(
        reason.text,
        "no label `disk`, `nvme` is needed; no label `zone`, `b` is needed"
    );
    assert_eq!(
        reason.lacks,
        "`disk: nvme` and `zone: b` under `labels` of its agent.yaml"
    );
    let need = &decision.attempts[0].need;
    assert_eq!(
        need.to_string(),
        "profile cpu: 1 node with 1 cores and 16 GiB of memory, labelled disk=nvme and zone=b"
    );
}

#[test]
fn fp8_is_refused_below_compute_capability_8_9() {
    let mut profile = gpu_profile("rtx3060-12g", 1, 1);
    profile["quantization"] = json!("fp8");
    let fleet = Build::default()
        .gpus("a", "rtx3060-12g", &[0])
        .model(json!([profile]));
    assert!(fleet.place().placed(), "nothing is known about it");
    for (capability, expected) in [("8.6", &["fp8"][..]), ("8.9", &[]), ("12.0", &[])] {
        let mut build = Build(fleet.0.clone());
        build = build.set("nodes.a.gpus[0].compute_capability", capability);
        assert_eq!(codes(&build.place(), "a"), expected, "{capability}");
    }
}

#[test]
fn cpu_replicas_spread_and_prefer_idle_nodes() {
    let mut fleet = Build::default()
        .cores("a", 32)
        .cores("b", 32)
        .cores("c", 32)
        .model(json!([cpu_profile(8)]))
        .set("nodes.a.cpus_free", 10);
    let mut order = Vec::new();
    for _ in 0..4 {
        let decision = fleet.place();
        order.extend(decision.nodes().to_vec());
        assert!(decision.apply(&mut fleet.0));
    }
    assert_eq!(order, ["b", "c", "a", "b"]);
    assert_eq!(codes(&fleet.place(), "a"), ["cpus"]);
    assert_eq!(
        text(&fleet.place(), "a"),
        "2 of 32 cores are unclaimed, 8 are needed"
    );
}

#[test]
fn a_node_that_is_not_ready_is_not_used() {
    for state in ["draining", "unreachable", "lost"] {
        let fleet = Build::default()
            .cores("a", 32)
            .model(json!([cpu_profile(8)]))
            .set("nodes.a.state", state);
        let decision = fleet.place();
        assert_eq!(codes(&decision, "a"), ["node_state"]);
        assert_eq!(text(&decision, "a"), format!("the node is {state}"));
    }
}

#[test]
fn a_gang_stays_inside_one_fabric() {
    let mut fleet = Build::default().model(json!([gpu_profile(H100, 8, 2)]));
    for (id, fabric) in [("a", "ib-1"), ("b", "ib-2"), ("c", "ib-2"), ("d", "ib-1")] {
        fleet = fleet
            .gpus(id, H100, &[8])
            .set(&format!("nodes.{id}.fabric"), fabric);
    }
    fleet = fleet.gpus("e", H100, &[8]);
    let decision = fleet.place();
    let found: Vec<_> = decision.attempts[0]
        .candidates
        .iter()
        .map(|ranking| ranking.candidate.nodes.join("+"))
        .collect();
    assert_eq!(found, ["a+d", "b+c"]);
    assert_eq!(decision.attempts[0].candidates[0].candidate.fabrics, 1);
    assert_eq!(codes(&decision, "e"), ["fabric"]);
    let decision = fleet
        .set("nodes.d.gpus_free", 7)
        .set("nodes.c.gpus_free", 7)
        .place();
    assert!(!decision.placed());
    assert_eq!(codes(&decision, "a"), ["fabric"], "it fits, but alone");
    assert_eq!(
        text(&decision, "a"),
        "1 node of fabric ib-1 fits, 2 are needed"
    );
}

#[test]
fn gangs_are_enumerated_up_to_a_bound_and_every_fabric_has_a_part() {
    let mut fleet = Build::default().model(json!([gpu_profile(H100, 8, 4)]));
    for number in 0..60 {
        let id = format!("n{number:02}");
        let fabric = if number < 50 { "ib-large" } else { "ib-small" };
        fleet = fleet
            .gpus(&id, H100, &[8])
            .set(&format!("nodes.{id}.fabric"), fabric);
    }
    let decision = fleet.place();
    let attempt = &decision.attempts[0];
    assert!(attempt.bounded && attempt.candidates.len() <= GANGS_MAX);
    for fabric in ["n00", "n50"] {
        let with = |ranking: &&crate::control::placement::Ranking| {
            ranking.candidate.nodes[0].as_str() == fabric
        };
        assert!(attempt.candidates.iter().find(with).is_some(), "{fabric}");
    }
    assert_eq!(fleet.place(), decision);
}

#[test]
fn a_replica_that_failed_goes_elsewhere_first() {
    let fleet = Build::default()
        .gpus("a", H100, &[4])
        .gpus("b", H100, &[8])
        .model(json!([gpu_profile(H100, 4, 1)]));
    let mut job = crate::control::placement::JobSpec::of(&fleet.0, "m", None).expect("it is there");
    let mut native = crate::control::placement::NativePolicy;
    let mut place = |job: &_| crate::control::placement::place(&fleet.0, job, &mut native);
    assert_eq!(nodes(&place(&job)), ["a"]);
    job.avoid = vec!["a".to_owned()];
    assert_eq!(nodes(&place(&job)), ["b"]);
    job.avoid.push("b".to_owned());
    assert_eq!(nodes(&place(&job)), ["a"], "better there than nowhere");
}

#[test]
fn equals_are_told_apart_by_name() {
    let fleet = Build::default()
        .gpus("b", H100, &[8])
        .gpus("a", H100, &[8])
        .model(json!([gpu_profile(H100, 4, 1)]));
    assert_eq!(nodes(&fleet.place()), ["a"]);
}
