//! Placement hooks: fail closed, share one budget, and equal the native score.

use std::time::{Duration, Instant};

use llmgw_plugins::{
    CandidateView, Domain, Hook, JobView, NodeView, PolicySet, Score, TRIP_ERRORS, Verdict,
    init_dir,
};

use crate::{Dir, hook};

const DOMAINS: [Domain; 2] = [Domain { gpus: 4, free: 4 }, Domain { gpus: 4, free: 0 }];

fn job() -> JobView<'static> {
    JobView {
        kind: "gpu",
        model: "m",
        profile: "p",
        engine: "vllm",
        gpus: 4,
        gpus_per_node: 4,
        nodes: 1,
        replicas: 1,
        ..JobView::default()
    }
}

fn node(id: &str) -> NodeView<'_> {
    NodeView {
        id,
        gpus: 8,
        gpus_free: 4,
        domains: &DOMAINS,
        cpus: 64,
        cpus_free: 64,
        state: "ready",
        ..NodeView::default()
    }
}

fn filter(body: &str, id: &str) -> Verdict {
    let dir = Dir::with(&[("placement.lua", &hook("filter(job, node)", body))]);
    dir.load()
        .expect("it behaves for the example")
        .decision()
        .filter(&job(), &node(id))
}

fn unfit(code: &str, text: &str) -> Verdict {
    Verdict::Unfit {
        code: code.to_owned(),
        text: text.to_owned(),
    }
}

#[test]
fn a_filter_refuses_with_a_code_and_a_text() {
    assert_eq!(filter("  return true", "a"), Verdict::Fit);
    assert_eq!(
        filter("  return node.id ~= 'a', 'reserved', 'kept for x'", "a"),
        unfit("reserved", "kept for x")
    );
    assert_eq!(
        filter("  return node.id ~= 'a', 'no_room'", "a"),
        unfit("no_room", "no room")
    );
    assert_eq!(
        filter(
            "  local d = node.domains[1] or {}\n  return node.id ~= 'a' or d.gpus - d.free > 0, 'domain', tostring(#node.domains)",
            "a"
        ),
        unfit("domain", "2")
    );
}

#[test]
fn a_filter_that_fails_refuses_the_node() {
    let cases = [
        ("return nil", "filter returned nil, true or false is needed"),
        (
            "return 1",
            "filter returned a number, true or false is needed",
        ),
        ("return false", "filter returned false without a code"),
        (
            "return false, 'No Room'",
            "code 'No Room' is not 1 to 32 of a-z and _",
        ),
    ];
    for (body, expected) in cases {
        let body = format!("  if node.id ~= 'a' then return true end\n  {body}");
        assert_eq!(filter(&body, "b"), Verdict::Fit);
        assert_eq!(
            filter(&body, "a"),
            unfit("policy_error", expected),
            "{body}"
        );
    }
    let misspelt = "  if node.id ~= 'a' then return true end\n  return node.gpu_free > 2, 'x'";
    let Verdict::Unfit { code, text } = filter(misspelt, "a") else {
        panic!("it must fail closed")
    };
    assert_eq!(code, "policy_error");
    assert!(
        text.ends_with("placement.lua:4: no field 'gpu_free' (did you mean 'gpus_free'?)"),
        "{text}"
    );
}

#[test]
fn a_filter_that_is_switched_off_refuses_all_nodes_until_the_next_generation() {
    let body = "  if node.id ~= 'a' then error('boom') end\n  return true";
    let guarded = format!("  if job.model == 'example' then return true end\n{body}");
    let dir = Dir::with(&[("placement.lua", &hook("filter(job, node)", &guarded))]);
    let policies = dir.open().expect("it behaves for the example");
    let set = policies.current();
    let ask = |id: &str| policies.current().decision().filter(&job(), &node(id));
    assert_eq!(ask("a"), Verdict::Fit);
    for _ in 0..TRIP_ERRORS {
        assert!(matches!(ask("b"), Verdict::Unfit { code, .. } if code == "policy_error"));
    }
    assert_eq!(policies.status().trips, [Hook::PlacementFilter]);
    let switched_off = unfit(
        "policy_error",
        "placement.filter failed too often and is switched off: see `llmgw ctl policies`",
    );
    assert_eq!(
        ask("b"),
        switched_off,
        "not fit because nobody asks any more"
    );
    assert_eq!(ask("a"), switched_off);
    dir.write("placement.lua", hook("filter(job, node)", "  return true"));
    policies.reload().expect("it loads");
    assert_eq!(policies.status().trips, []);
    assert_eq!(ask("b"), Verdict::Fit);
    assert_eq!(
        set.decision().filter(&job(), &node("a")),
        switched_off,
        "what began before stays as it was"
    );
}

#[test]
fn a_decision_has_one_budget_for_all_its_calls() {
    let body = "  if node.id == 'slow' then while true do end end\n  return true";
    let dir = Dir::with(&[("placement.lua", &hook("filter(job, node)", body))]);
    let policies = dir.open().expect("it behaves for the example");
    let set = policies.current();
    let mut decision = set.decision();
    let start = Instant::now();
    for _ in 0..1000 {
        assert!(matches!(
            decision.filter(&job(), &node("slow")),
            Verdict::Unfit { .. }
        ));
    }
    assert!(
        matches!(
            decision.filter(&job(), &node("fine")),
            Verdict::Unfit { .. }
        ),
        "nothing is left"
    );
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(
        set.decision().filter(&job(), &node("fine")),
        Verdict::Fit,
        "the next decision is whole again"
    );
    assert!(
        policies.status().trips.is_empty(),
        "one overrun is counted once"
    );
}

#[test]
fn a_score_is_a_number_or_named_parts_within_their_range() {
    let score = |body: &str| {
        let dir = Dir::with(&[("placement.lua", &hook("score(job, candidate)", body))]);
        let policies = dir.open().expect("it behaves for the example");
        let nodes = ["a".to_owned()];
        let candidate = CandidateView {
            nodes: &nodes,
            gpus: 9,
            ..CandidateView::default()
        };
        let score = policies.current().decision().score(&job(), &candidate);
        (
            score.map(|score| (score.total, score.parts.len())),
            policies.error_counts().len(),
        )
    };
    assert_eq!(score("  return 5"), (Some((5.0, 1)), 0));
    assert_eq!(score("  return { a = 1, b = -3 }"), (Some((-2.0, 2)), 0));
    assert_eq!(
        score("  return { a = candidate.gpus == 9 and 5000 or 1 }"),
        (Some((1000.0, 1)), 1)
    );
    assert_eq!(
        score("  if candidate.gpus == 9 then return 0/0 end\n  return 1"),
        (None, 1)
    );
    assert_eq!(
        score("  if candidate.gpus == 9 then return 'x' end\n  return 1"),
        (None, 1)
    );
    assert_eq!(score("  return #candidate.nodes"), (Some((1.0, 1)), 0));
}

#[test]
fn the_shipped_score_equals_the_native_one() {
    let dir = Dir::new();
    init_dir(&dir.0).expect("the shipped files can be written out");
    let text = std::fs::read_to_string(dir.path("placement.lua")).expect("it was written");
    dir.write("placement.lua", format!("{text}\n"));
    let (lua, native) = (dir.load().expect("it loads"), PolicySet::built_in());
    assert!(lua.defines(Hook::PlacementScore) && !native.defines(Hook::PlacementScore));
    let nodes = ["a".to_owned()];
    let mut seed = 5u64;
    let mut below = |n: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((seed >> 33) % n) as u32
    };
    for _ in 0..2000 {
        let job = JobView {
            kind: if below(2) == 0 { "cpu" } else { "gpu" },
            ..job()
        };
        let candidate = CandidateView {
            nodes: &nodes,
            gpu_after: f64::from(below(9)) / 8.0,
            cpu_after: f64::from(below(65)) / 64.0,
            frag_delta: f64::from(below(5)) - 2.0,
            fabrics: below(4),
            same_node: below(2),
            same_rack: below(2),
            same_zone: below(2),
            cached: (below(3) > 0).then(|| f64::from(below(2))),
            ..CandidateView::default()
        };
        let native = native.decision().score(&job, &candidate);
        assert_eq!(native, Some(Score::native(&job, &candidate)));
        assert_eq!(
            lua.decision().score(&job, &candidate),
            native,
            "{job:?} {candidate:?}"
        );
        assert_eq!(lua.decision().filter(&job, &node("a")), Verdict::Fit);
    }
}
