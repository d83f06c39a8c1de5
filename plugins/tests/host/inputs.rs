//! Inputs are kept in a VM and brought up to date: a script sees what it was given, and nothing of an earlier call.

use llmgw_plugins::{PolicySet, ReplicaView, RequestView};

use crate::{Dir, hook};

/// Replicas over all calls: more than rows are kept.
const REPLICAS: u64 = 3000;
/// Calls of the test with changing candidates.
const CALLS: u64 = 4000;

/// A small generator of numbers: the same ones in each run.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
    *state >> 33
}

fn reason(set: &PolicySet, replicas: &[ReplicaView<'_>]) -> String {
    let request = RequestView::default();
    let ranked = set.rank(&request, replicas).expect("the hook answers");
    ranked.reason.expect("it says what it saw")
}

#[test]
fn rank_sees_the_candidates_of_this_call_whichever_came_before() {
    let body = r#"
        local seen = {}
        for i, replica in replicas do
            seen[i] = replica.id .. (replica.node or "-") .. replica.inflight
        end
        return n, table.concat(seen, " ")"#;
    let dir = Dir::with(&[("routing.lua", &hook("rank(request, replicas, n)", body))]);
    let set = dir.load().expect("it loads");
    let ids: Vec<String> = (0..REPLICAS).map(|n| format!("r{n}")).collect();
    let mut state = 7;
    for call in 0..CALLS {
        let count = 1 + next(&mut state) % 5;
        let first = next(&mut state) % REPLICAS;
        // Now and then a whole other part of the fleet, in any order, and the same replica with other values.
        let chosen = |at: u64| (first + at * (1 + call % 7)) % REPLICAS;
        let replicas: Vec<ReplicaView<'_>> = (0..count)
            .map(|at| ReplicaView {
                id: &ids[chosen(at) as usize],
                node: (call % 3 == 0).then_some("n"),
                inflight: (call % 10) as u32,
                ..ReplicaView::default()
            })
            .collect();
        let expected: Vec<String> = replicas
            .iter()
            .map(|r| format!("{}{}{}", r.id, r.node.unwrap_or("-"), r.inflight))
            .collect();
        assert_eq!(
            reason(&set, &replicas),
            expected.join(" "),
            "call {call} with {count} candidates"
        );
    }
}

#[test]
fn a_field_of_every_type_comes_and_goes() {
    let body = r#"
        local r = replicas[1]
        return 1, string.format("%s %s %s %s %s", tostring(r.rack), tostring(r.kv), tostring(r.labels.tier), tostring(request.stream), tostring(request.session))"#;
    let dir = Dir::with(&[("routing.lua", &hook("rank(request, replicas, n)", body))]);
    let set = dir.load().expect("it loads");
    let labels = [("tier".to_owned(), "gold".to_owned())];
    let full = ReplicaView {
        id: "a",
        rack: Some("r1"),
        kv: Some(0.5),
        labels: &labels,
        ..ReplicaView::default()
    };
    let empty = ReplicaView {
        id: "a",
        ..ReplicaView::default()
    };
    let session = RequestView {
        stream: true,
        session: Some("s"),
        ..RequestView::default()
    };
    let see = |request: &RequestView<'_>, replica: ReplicaView<'_>| {
        let ranked = set.rank(request, &[replica]).expect("the hook answers");
        ranked.reason.expect("it says what it saw")
    };
    for _ in 0..3 {
        assert_eq!(see(&session, full), "r1 0.5 gold true s");
        assert_eq!(
            see(&RequestView::default(), empty),
            "nil nil nil false nil",
            "what is unknown now is nil, also where it was known before"
        );
    }
}

#[test]
fn a_text_that_no_hook_may_return_is_cut_and_counted_by_its_true_length() {
    let dir = Dir::with(&[
        (
            "routing.lua",
            &hook("rank(request, replicas, n)", "return 1, ('é'):rep(40)"),
        ),
        (
            "fairness.lua",
            &hook(
                "key(request, tenant)",
                "return ('k'):rep(request.n == 7 and 1000000 or 64)",
            ),
        ),
    ]);
    let set = dir.load().expect("it loads");
    let replica = ReplicaView {
        id: "a",
        ..ReplicaView::default()
    };
    assert_eq!(reason(&set, &[replica]), format!("{}…", "é".repeat(32)));
    let tenant = llmgw_plugins::TenantView::default();
    let key = |n| {
        let request = RequestView {
            n,
            ..RequestView::default()
        };
        set.key(&request, &tenant)
    };
    assert_eq!(key(1), Some("k".repeat(64)));
    assert_eq!(key(7), None, "a key of a million bytes is none");
}
