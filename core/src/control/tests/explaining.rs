//! What a person reads.

use super::{Build, cpu_profile, fleet, gpu_profile};
use crate::control::explain::{Change, Explanation, explain};
use crate::control::placement::{JobSpec, NativePolicy, place};
use crate::control::snapshot::Snapshot;
use serde_json::json;

fn answer(snapshot: &Snapshot, model: &str, profile: Option<&str>) -> Explanation {
    let job = JobSpec::of(snapshot, model, profile).expect("the fleet has the model");
    let mut decide = |snapshot: &Snapshot, job: &JobSpec| place(snapshot, job, &mut NativePolicy);
    let decision = decide(snapshot, &job);
    explain(snapshot, &job, decision, Some(17), &mut decide)
}

/// Compares with the text, whose first line is for the eye.
fn check(answer: &Explanation, expected: &str) {
    assert_eq!(format!("\n{answer}"), expected, "\n{answer}");
}

#[test]
fn a_full_pool_is_explained_by_code_with_what_would_make_room() {
    check(
        &answer(&fleet("full-pool"), "qwen3-235b", None),
        "
qwen3-235b  1 of 2 replicas missing
asked    profile h100: 1 node x 8 h100-sxm-80g in one NVLink domain
fleet    42 nodes: 30 without GPU, 12 considered, 0 fit
why        nodes  alone  detail
gpus_busy      9      7  best ml-07: 6 free of 8
gpu_class      2      1  l40s-45g
unhealthy      4      1  ml-03: GPU 4 uncorrected ECC
nearest  ml-07: needs 2 more GPUs
         ml-04: needs 6 more GPUs
         ml-06: needs 6 more GPUs
fits if  embed-small/2 leaves ml-07 (2 GPUs)
retry    when a replica stops, a node joins, or the catalog or policy changes (generation 17)
",
    );
}

#[test]
fn a_profile_that_is_avoided_is_shown_with_the_reason() {
    let fleet = Build::default()
        .gpus("a", "h100-sxm-80g", &[1])
        .gpus("b", "l40s-45g", &[0])
        .model(json!([
            gpu_profile("h100-sxm-80g", 1, 1),
            gpu_profile("l40s-45g", 1, 1)
        ]));
    let mut job = JobSpec::of(&fleet.0, "m", None).expect("it is there");
    job.avoid = vec!["a".to_owned()];
    let mut decide = |snapshot: &Snapshot, job: &JobSpec| place(snapshot, job, &mut NativePolicy);
    let decision = decide(&fleet.0, &job);
    let text = explain(&fleet.0, &job, decision, None, &mut decide).to_string();
    let avoided = text.lines().find(|line| line.starts_with("avoided"));
    let avoided = avoided.unwrap_or_else(|| panic!("{text}"));
    assert!(avoided.starts_with("avoided  a GPU 0: "), "{avoided}");
    assert!(avoided.ends_with("; it failed there lately"), "{avoided}");
    assert_eq!(text.matches("placed   b GPU 0: ").count(), 1, "{text}");
}

#[test]
fn a_place_is_explained_by_its_score() {
    check(
        &answer(&fleet("two-racks"), "llama-3.3-70b", None),
        "
llama-3.3-70b  2 of 2 replicas missing
asked    profile h100: 1 node x 4 h100-sxm-80g in one NVLink domain
fleet    8 nodes: 8 considered, 6 fit
placed   ml-02 GPUs 0-3: 15 = frag -25, pack 20, spread 20
next     ml-04 GPUs 0-3: 15 = frag -25, pack 20, spread 20
         ml-05 GPUs 0-3: 15 = frag -25, pack 20, spread 20
         ml-06 GPUs 0-3: 15 = frag -25, pack 20, spread 20
why        nodes  alone  detail
gpus_busy      2      1  best ml-01: 0 free of 8
gpu_class      1      0  l40s-45g
",
    );
}

#[test]
fn a_gang_is_explained_by_its_fabric() {
    check(
        &answer(&fleet("lost-node"), "deepseek-v3", None),
        "
deepseek-v3  1 of 1 replica missing
asked    profile two-nodes: 2 nodes x 8 h100-sxm-80g, one NVLink domain each, all in one fabric
fleet    4 nodes: 4 considered, 0 fit
why         nodes  alone  detail
node_state      3      1  ml-02: lost, ml-03: unreachable, ml-04: draining
gpus_busy       3      1  best ml-01: 4 free of 8
nearest  ml-01: needs 4 more GPUs
         ml-03: needs to be ready (it is unreachable)
         ml-02: needs to be ready (it is lost), 4 more GPUs
fits if  2 nodes x 8 h100-sxm-80g, one NVLink domain each, all in one fabric join
retry    when a replica stops, a node joins, or the catalog or policy changes (generation 17)
",
    );
}

#[test]
fn each_profile_that_was_tried_is_explained() {
    let snapshot = Build::default()
        .gpus("a", "l40s-45g", &[0, 0])
        .cores("b", 4)
        .model(json!([gpu_profile("h100-sxm-80g", 4, 1), cpu_profile(96)]))
        .0;
    check(
        &answer(&snapshot, "m", None),
        "
m  2 of 2 replicas missing
asked    profile h100-sxm-80g: 1 node x 4 h100-sxm-80g in one NVLink domain
fleet    2 nodes: 1 without GPU, 1 considered, 0 fit
why        nodes  alone  detail
gpu_class      1      1  l40s-45g
nearest  a: needs GPUs of h100-sxm-80g
asked    profile cpu: 1 node with 96 cores and 16 GiB of memory
fleet    2 nodes: 2 considered, 0 fit
why        nodes  alone  detail
cpus           2      2  best a: 64 cores free of 64
nearest  a: needs 32 more cores
         b: needs 92 more cores
fits if  1 node x 4 h100-sxm-80g in one NVLink domain joins
retry    when a replica stops, a node joins, or the catalog or policy changes (generation 17)
",
    );
}

#[test]
fn a_fleet_without_nodes_or_without_gpus_gives_a_reason_too() {
    let model = || Build::default().model(json!([gpu_profile("h100-sxm-80g", 4, 1)]));
    check(
        &answer(&model().0, "m", None),
        "
m  2 of 2 replicas missing
asked    profile h100-sxm-80g: 1 node x 4 h100-sxm-80g in one NVLink domain
fleet    0 nodes: 0 considered, 0 fit
why        nodes  alone  detail
no_nodes       0      0  no node has registered
fits if  1 node x 4 h100-sxm-80g in one NVLink domain joins
retry    when a replica stops, a node joins, or the catalog or policy changes (generation 17)
",
    );
    check(
        &answer(&model().cores("a", 4).0, "m", None),
        "
m  2 of 2 replicas missing
asked    profile h100-sxm-80g: 1 node x 4 h100-sxm-80g in one NVLink domain
fleet    1 node: 1 without GPU, 0 considered, 0 fit
why        nodes  alone  detail
no_gpu         1      1  no GPU
fits if  1 node x 4 h100-sxm-80g in one NVLink domain joins
retry    when a replica stops, a node joins, or the catalog or policy changes (generation 17)
",
    );
}

#[test]
fn alternatives_are_changes_that_the_kernel_tried() {
    let h100 = "h100-sxm-80g";
    let build = || {
        Build::default()
            .gpus("a", h100, &[4])
            .model(json!([gpu_profile(h100, 4, 1), cpu_profile(8)]))
    };
    let changes = |build: Build, profile: Option<&str>| -> Vec<String> {
        let answer = answer(&build.0, "m", profile);
        answer.fits_if.into_iter().map(|each| each.text).collect()
    };
    assert_eq!(
        changes(build().set("nodes.a.state", "draining"), Some(h100)),
        ["a is undrained"]
    );
    assert_eq!(
        changes(build().set("nodes.a.gpus[1].healthy", false), Some(h100)),
        ["profile cpu may be used", "a has GPU 1 healthy again"]
    );
    assert_eq!(
        changes(
            build().set("nodes.a.gpus[1].used_by", "foreign"),
            Some(h100)
        ),
        [
            "profile cpu may be used",
            "a has GPU 1 released by another process"
        ]
    );
    let mut shared = Build::default()
        .gpus("a", h100, &[4])
        .model(json!([gpu_profile(h100, 2, 1)]));
    for _ in 0..2 {
        assert!(shared.place().apply(&mut shared.0));
    }
    let own = shared.model(json!([gpu_profile(h100, 4, 1)]));
    assert_eq!(
        answer(&own.0, "m", None).fits_if[0].change,
        Change::NodesJoin { count: 1 },
        "one of its own replicas less is no help"
    );
    let mut shared = own.0;
    shared
        .models
        .insert("other".to_owned(), shared.models["m"].clone());
    let answer = answer(&shared, "other", None);
    assert_eq!(answer.fits_if[0].text, "m/0 and m/1 leave a (4 GPUs)");
    assert_eq!(
        answer.fits_if[0].change,
        Change::ReplicasLeave {
            replicas: vec!["m/0".to_owned(), "m/1".to_owned()],
            on: "a".to_owned()
        }
    );
    assert_eq!(answer.tried, 3);
}
