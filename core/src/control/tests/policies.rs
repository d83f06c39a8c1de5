//! What a policy can do: refuse more, order what is left, and fail without harm.

use llmgw_plugins::{CandidateView, JobView, NodeView, Score, Verdict};
use serde_json::json;

use super::{Build, codes, gpu_profile};
use crate::control::placement::{JobSpec, PlacementPolicy, ScoredBy, place};

const H100: &str = "h100-sxm-80g";

/// Two closures.
struct Told<F, S>(F, S);

impl<F, S> PlacementPolicy for Told<F, S>
where
    F: FnMut(&JobView<'_>, &NodeView<'_>) -> Verdict,
    S: FnMut(&CandidateView<'_>) -> Option<f64>,
{
    fn filter(&mut self, job: &JobView<'_>, node: &NodeView<'_>) -> Verdict {
        self.0(job, node)
    }

    fn score(&mut self, _: &JobView<'_>, candidate: &CandidateView<'_>) -> Option<Score> {
        let total = self.1(candidate)?;
        Some(Score {
            total,
            parts: vec![("told".to_owned(), total)],
        })
    }
}

fn three() -> Build {
    Build::default()
        .gpus("a", H100, &[4])
        .gpus("b", H100, &[8])
        .gpus("c", "l40s-45g", &[0])
        .model(json!([gpu_profile(H100, 4, 1)]))
}

fn job(build: &Build) -> JobSpec {
    JobSpec::of(&build.0, "m", None).expect("it is there")
}

fn unfit(code: &str, text: &str) -> Verdict {
    Verdict::Unfit {
        code: code.to_owned(),
        text: text.to_owned(),
    }
}

#[test]
fn a_policy_refuses_beside_the_kernel_and_is_asked_about_every_node() {
    let fleet = three();
    let mut asked = Vec::new();
    let filter = |_: &JobView<'_>, node: &NodeView<'_>| {
        asked.push((node.id.to_owned(), node.gpus_free));
        match node.id {
            "b" => Verdict::Fit,
            _ => unfit("reserved", "kept for x"),
        }
    };
    let decision = place(
        &fleet.0,
        &job(&fleet),
        &mut Told(filter, |_: &CandidateView<'_>| Some(1.0)),
    );
    assert_eq!(decision.nodes(), ["b"]);
    assert_eq!(codes(&decision, "a"), ["reserved"]);
    assert_eq!(codes(&decision, "c"), ["gpu_class", "reserved"]);
    assert!(decision.refused("a")[0].policy);
    let expected = [("a", 4), ("b", 8), ("c", 1)];
    assert_eq!(asked, expected.map(|(id, free)| (id.to_owned(), free)));
}

#[test]
fn a_filter_that_fails_refuses_and_a_refusal_is_never_empty() {
    let fleet = three();
    for (verdict, code, text) in [
        (
            unfit("policy_error", "placement.lua:4: no"),
            "policy_error",
            "placement.lua:4: no",
        ),
        (unfit("no_room", " "), "no_room", "no room"),
    ] {
        let decision = place(
            &fleet.0,
            &job(&fleet),
            &mut Told(
                |_: &JobView<'_>, _: &NodeView<'_>| verdict.clone(),
                |_: &CandidateView<'_>| Some(1.0),
            ),
        );
        assert!(!decision.placed());
        assert_eq!(codes(&decision, "a"), [code]);
        assert_eq!(decision.refused("a")[0].text, text);
    }
}

#[test]
fn a_candidate_whose_score_fails_goes_last_and_natively_where_all_fail() {
    let fleet = three();
    let fit = |_: &JobView<'_>, _: &NodeView<'_>| Verdict::Fit;
    let only_b = |candidate: &CandidateView<'_>| (candidate.nodes[0] == "b").then_some(-900.0);
    let decision = place(&fleet.0, &job(&fleet), &mut Told(fit, only_b));
    assert_eq!(decision.nodes(), ["b"], "any score is better than none");
    assert_eq!(decision.attempts[0].scored_by, ScoredBy::Policy);
    let decision = place(
        &fleet.0,
        &job(&fleet),
        &mut Told(fit, |_: &CandidateView<'_>| None),
    );
    assert_eq!(decision.nodes(), ["a"]);
    assert_eq!(decision.attempts[0].scored_by, ScoredBy::Native);
}

#[test]
fn the_inputs_are_what_the_contract_names() {
    let mut fleet = Build::default()
        .gpus("a", H100, &[4, 4])
        .gpus("b", H100, &[8])
        .model(json!([gpu_profile(H100, 4, 1)]))
        .set("models.m.labels.tier", "gold")
        .set("nodes.a.rack", "r1")
        .set("nodes.b.rack", "r1")
        .set("nodes.a.zone", "z")
        .set("nodes.a.fabric", "ib")
        .set("nodes.a.cached", json!(["m"]))
        .set("nodes.a.gpus[6].healthy", false);
    let decision = fleet.place();
    assert_eq!(decision.nodes(), ["a"]);
    assert!(decision.apply(&mut fleet.0));
    let mut seen = Vec::new();
    let filter = |job: &JobView<'_>, node: &NodeView<'_>| {
        if node.id == "a" {
            assert_eq!(
                (job.kind, job.model, job.gpus, job.replica, job.replicas),
                ("gpu", "m", 4, 1, 2)
            );
            assert_eq!(
                (job.gpu_class, job.labels),
                (Some(H100), &[("tier".to_owned(), "gold".to_owned())][..])
            );
            let domains: Vec<_> = node.domains.iter().map(|d| (d.gpus, d.free)).collect();
            assert_eq!(domains, [(4, 0), (4, 3)]);
            assert_eq!((node.gpus, node.gpus_free, node.fabric), (8, 3, Some("ib")));
        }
        Verdict::Fit
    };
    let score = |candidate: &CandidateView<'_>| {
        seen.push((
            candidate.nodes.to_vec(),
            candidate.same_node,
            candidate.same_rack,
            candidate.same_zone,
        ));
        assert_eq!((candidate.gpu_after, candidate.frag_delta), (0.5, 1.0));
        assert_eq!(
            (
                candidate.domains,
                candidate.domains_filled,
                candidate.cached
            ),
            (1, 0, None)
        );
        Some(0.0)
    };
    place(&fleet.0, &job(&fleet), &mut Told(filter, score));
    assert_eq!(seen, [(vec!["b".to_owned()], 0, 1, 0)]);
}

#[test]
fn the_lua_policies_are_such_a_policy() {
    let fleet = three();
    let set = llmgw_plugins::PolicySet::built_in();
    let lua = place(&fleet.0, &job(&fleet), &mut set.decision());
    assert_eq!(lua, fleet.place());
}
