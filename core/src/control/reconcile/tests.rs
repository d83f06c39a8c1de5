//! Reconcile in tables: what runs and what is wanted, and every action that follows. `+1` places a replica, `+1!` one that takes over.

use std::sync::Arc;

use llmgw_proto::session::SessionId;
use llmgw_proto::shard::ShardState::{Draining, Failed, Loading, Pending, Ready, Stopping};

use super::{Action, Desired, LEAVE_MIN_MS, Missing, Traffic, Wanted, Why, reconcile, would_stop};
use crate::control::memory::{BACKOFF_FIRST_MS, Memory, NodeOrder, Start};
use crate::control::snapshot::NodeState::{Lost, Unreachable};
use crate::control::tests::nodes::{CURRENT, Nodes, key, spec};

const DRAIN_TIMEOUT_MS: u64 = 180_000;

/// Model `m`, so many times.
fn wanted(replicas: u32) -> Desired {
    let definitions = [("p".to_owned(), CURRENT.to_owned())].into();
    let wanted = Wanted {
        replicas,
        definitions,
    };
    Desired {
        models: [("m".to_owned(), wanted)].into(),
    }
}

fn show(action: &Action) -> String {
    match action {
        Action::Place(place) => {
            let mark = if place.why == Missing::Replacement {
                "!"
            } else {
                ""
            };
            let avoid: Vec<String> = place.avoid.iter().map(|id| format!(" not {id}")).collect();
            format!("+{}{mark}{}", place.number, avoid.join(""))
        }
        Action::Leave { key, why } => format!("leave {key}: {why:?}"),
        Action::Stop { key, why, .. } => format!("stop {key}: {why:?}"),
        Action::Clear { key } => format!("clear {key}"),
        Action::OrderNode { node, draining } => format!("drain {node}: {draining}"),
    }
}

#[derive(Default)]
struct Case {
    memory: Memory,
    traffic: Traffic,
}

impl Case {
    fn new() -> Case {
        Case {
            traffic: Traffic {
                drain_timeout_ms: DRAIN_TIMEOUT_MS,
                ..Traffic::default()
            },
            ..Case::default()
        }
    }

    /// What is said to this.
    fn say(&mut self, desired: &Desired, nodes: &Nodes) -> Vec<String> {
        self.memory.observe(&nodes.0);
        let actions = reconcile(desired, &nodes.0, &self.memory, &self.traffic);
        actions.iter().map(show).collect()
    }
}

#[track_caller]
fn check(name: &str, replicas: u32, nodes: &Nodes, expected: &[&str]) {
    assert_eq!(
        Case::new().say(&wanted(replicas), nodes),
        expected,
        "{name}"
    );
}

#[test]
fn what_is_missing_is_placed_with_the_least_free_numbers() {
    let none = Nodes::new(&["a", "b"]);
    check("none runs", 2, &none, &["+0", "+1"]);
    let one = Nodes::new(&["a", "b"]).with("a", "m/1", Loading);
    check("one runs", 3, &one, &["+0", "+2"]);
    let all = one.with("b", "m/0", Ready);
    check("all run", 2, &all, &[]);
}

#[test]
fn while_the_server_recovers_nothing_happens() {
    let mut nodes = Nodes::new(&["a"])
        .with("a", "gone/0", Ready)
        .with("a", "m/0", Failed);
    nodes.0.recovering = true;
    check("recovering", 2, &nodes, &[]);
}

#[test]
fn a_replica_counts_while_its_node_is_unreachable_and_no_longer_once_it_is_lost() {
    let nodes = |state| {
        Nodes::new(&["a", "b"])
            .with("a", "m/0", Ready)
            .absent("a", state)
    };
    check("unreachable", 1, &nodes(Unreachable), &[]);
    // Number 0 is still taken: the node may come back with it.
    check("lost", 1, &nodes(Lost), &["+1"]);
}

#[test]
fn when_a_lost_node_comes_back_the_newer_replica_goes() {
    let mut case = Case::new();
    let lost = || {
        Nodes::new(&["a", "b"])
            .with("a", "m/0", Ready)
            .absent("a", Lost)
    };
    case.say(&wanted(1), &lost());
    let again = lost().later(5_000).with("b", "m/1", Ready);
    assert_eq!(case.say(&wanted(1), &again), Vec::<String>::new());
    let back = Nodes::new(&["a", "b"])
        .with("a", "m/0", Ready)
        .with("b", "m/1", Ready);
    assert_eq!(
        case.say(&wanted(1), &back.later(6_000)),
        ["leave m/1/0 on b: Surplus"]
    );
}

#[test]
fn a_model_that_the_catalog_does_not_have_leaves_at_once_where_it_does_not_serve() {
    let nodes = Nodes::new(&["a"])
        .with("a", "x/0", Ready)
        .with("a", "x/1", Loading);
    let expected = [
        "leave x/0/0 on a: NotInCatalog",
        "stop x/1/0 on a: NotInCatalog",
    ];
    check("removed", 0, &nodes, &expected);
}

#[test]
fn surplus_goes_by_readiness_then_by_draining_node_then_by_age() {
    let nodes = Nodes::new(&["a", "b"])
        .with("a", "m/0", Ready)
        .with("a", "m/1", Ready)
        .with("b", "m/2", Loading);
    check("one too many", 2, &nodes, &["stop m/2/0 on b: Surplus"]);
    let expected = ["stop m/2/0 on b: Surplus", "leave m/1/0 on a: Surplus"];
    check("two too many", 1, &nodes, &expected);
    let drains = Nodes::new(&["a", "b"])
        .with("a", "m/0", Ready)
        .with("b", "m/1", Ready)
        .draining("a");
    check("one drains", 1, &drains, &["leave m/0/0 on a: NodeDrains"]);
}

#[test]
fn of_two_that_are_ready_the_one_that_nobody_hears_is_the_surplus() {
    let nodes = |on_b| {
        Nodes::new(&["a", "b"])
            .with("a", "m/0", Ready)
            .with("b", "m/1", on_b)
            .absent("a", Unreachable)
    };
    check("both", 1, &nodes(Ready), &["leave m/0/0 on a: Surplus"]);
    // It may be the only one that serves.
    check("b loads", 1, &nodes(Loading), &["stop m/1/0 on b: Surplus"]);
}

#[test]
fn a_failure_is_cleared_waits_and_goes_elsewhere_first() {
    let mut case = Case::new();
    let failed = || Nodes::new(&["a", "b"]).with("a", "m/0", Failed);
    assert_eq!(case.say(&wanted(1), &failed()), ["clear m/0/0 on a"]);
    let soon = Nodes::new(&["a", "b"]).later(BACKOFF_FIRST_MS - 1);
    assert_eq!(case.say(&wanted(1), &soon), Vec::<String>::new());
    let due = Nodes::new(&["a", "b"]).later(BACKOFF_FIRST_MS);
    assert_eq!(case.say(&wanted(1), &due), ["+0 not a"]);
}

#[test]
fn the_wait_after_a_failure_holds_back_as_many_as_failed_and_no_others() {
    let mut case = Case::new();
    let nodes = || Nodes::new(&["a", "b"]).with("b", "m/2", Ready);
    // One fails; two more were on a node that is lost now.
    let failed = nodes().with("a", "m/0", Failed);
    assert_eq!(
        case.say(&wanted(4), &failed),
        ["clear m/0/0 on a", "+1 not a", "+3 not a"]
    );
    let placed = || nodes().with("b", "m/1", Ready).with("b", "m/3", Loading);
    assert_eq!(case.say(&wanted(4), &placed()), Vec::<String>::new());
    let again = placed().with("a", "m/4", Failed).later(1);
    assert_eq!(
        case.say(&wanted(5), &again),
        ["clear m/4/0 on a"],
        "now two"
    );
    let due = placed().later(4 * BACKOFF_FIRST_MS);
    assert_eq!(case.say(&wanted(5), &due), ["+0 not a", "+4 not a"]);
}

#[test]
fn one_that_stops_by_itself_is_not_replaced_before_its_failure_is_known() {
    let stopping = Nodes::new(&["a"]).with("a", "m/0", Stopping);
    check("it is about to fail", 1, &stopping, &[]);
    let outdated = Nodes::new(&["a"]).outdated("a", "m/0", Stopping);
    check("whatever it was", 1, &outdated, &[]);
}

#[test]
fn of_a_changed_profile_one_new_replica_comes_before_one_old_one_goes() {
    let old = |first| Nodes::new(&["a", "b", "c"]).outdated("a", "m/0", first);
    let both = || old(Ready).outdated("b", "m/1", Ready);
    check("change", 2, &both(), &["+2!"]);
    let loading = both().with("c", "m/2", Loading);
    check("the new one loads", 2, &loading, &[]);
    let ready = both().with("c", "m/2", Ready);
    check("it is ready", 2, &ready, &["leave m/1/0 on b: Outdated"]);
    let next = old(Ready).with("c", "m/2", Ready);
    check("the next one", 2, &next, &["+1!"]);
    // One that never served has nothing to lose, and may have the only place.
    check(
        "an old one loads",
        1,
        &old(Loading),
        &["stop m/0/0 on a: Outdated", "+1"],
    );
}

#[test]
fn the_last_ready_one_stays_while_the_change_has_no_place_or_fails() {
    let mut case = Case::new();
    let failed = || {
        Nodes::new(&["a", "b"])
            .outdated("a", "m/0", Ready)
            .with("b", "m/1", Failed)
    };
    assert_eq!(case.say(&wanted(1), &failed()), ["clear m/1/0 on b"]);
    let unheard = Nodes::new(&["a", "b"])
        .outdated("a", "m/0", Ready)
        .with("b", "m/1", Ready)
        .absent("b", Unreachable);
    check("nobody confirms the new one", 1, &unheard, &[]);
}

#[test]
fn a_profile_that_is_gone_is_outdated() {
    let mut spec = spec("m/0");
    spec.profile = "gone".to_owned();
    let nodes = Nodes::new(&["a"]).with_spec("a", spec, Ready);
    check("gone", 1, &nodes, &["+1!"]);
}

#[test]
fn fewer_wanted_while_all_are_outdated_keeps_as_many_as_wanted() {
    let nodes = Nodes::new(&["a"])
        .outdated("a", "m/0", Ready)
        .outdated("a", "m/1", Ready)
        .outdated("a", "m/2", Ready);
    let expected = ["leave m/2/0 on a: Outdated", "leave m/1/0 on a: Outdated"];
    check("3 to 1", 1, &nodes, &expected);
}

#[test]
fn a_node_that_drains_is_left_once_its_replacement_is_ready() {
    let drains = || {
        Nodes::new(&["a", "b"])
            .with("a", "m/0", Ready)
            .draining("a")
    };
    check("first the other", 1, &drains(), &["+1!"]);
    check("it loads", 1, &drains().with("b", "m/1", Loading), &[]);
    let ready = drains().with("b", "m/1", Ready);
    check("it is ready", 1, &ready, &["leave m/0/0 on a: NodeDrains"]);
}

#[test]
fn with_a_timeout_a_draining_node_is_left_without_a_replacement_and_with_force_at_once() {
    let order = |timeout_ms, force| NodeOrder {
        draining: true,
        since_ms: 1_000_000,
        timeout_ms,
        force,
        told_ms: Some(0),
        confirmed_by: None,
    };
    let nodes = || {
        Nodes::new(&["a", "b"])
            .with("a", "m/0", Ready)
            .draining("a")
    };
    let mut case = Case::new();
    case.memory.order("a", order(Some(5_000), false));
    assert_eq!(case.say(&wanted(1), &nodes().later(4_999)), ["+1!"]);
    let expected = ["leave m/0/0 on a: NodeDrains", "+1"];
    assert_eq!(case.say(&wanted(1), &nodes().later(5_000)), expected);
    case.memory.order("a", order(None, true));
    let expected = ["stop m/0/0 on a: NodeDrains", "+1"];
    assert_eq!(case.say(&wanted(1), &nodes()), expected);
    // Also where it leaves already, and has requests.
    let key = key("a", "m/0");
    case.memory.leave(&key, Why::Surplus, false, 1_000_000);
    case.traffic.requests.insert(key, 3);
    let expected = ["stop m/0/0 on a: Surplus", "+1"];
    assert_eq!(case.say(&wanted(1), &nodes()), expected);
}

#[test]
fn a_drain_that_is_ordered_takes_a_model_that_nobody_declares_by_its_own_right() {
    let order = |force| NodeOrder {
        draining: true,
        since_ms: 0,
        timeout_ms: None,
        force,
        told_ms: Some(0),
        confirmed_by: None,
    };
    let nodes = || Nodes::new(&["a"]).with("a", "x/0", Ready).draining("a");
    // What a node says itself may be from before the server started: the catalog's hold goes first.
    let by_catalog = ["leave x/0/0 on a: NotInCatalog"];
    check("nobody ordered it", 0, &nodes(), &by_catalog);
    let mut case = Case::new();
    case.memory.order("a", order(false));
    let expected = ["leave x/0/0 on a: NodeDrains"];
    assert_eq!(case.say(&wanted(0), &nodes()), expected);
    case.memory.order("a", order(true));
    let expected = ["stop x/0/0 on a: NodeDrains"];
    assert_eq!(case.say(&wanted(0), &nodes()), expected);
}

/// An operator's order just now.
fn order(draining: bool) -> NodeOrder {
    NodeOrder {
        draining,
        since_ms: 0,
        timeout_ms: None,
        force: false,
        told_ms: None,
        confirmed_by: None,
    }
}

/// How long what a node says may be from before it was told.
const HEARTBEAT_MS: u64 = 5_000;
const NOW_MS: u64 = 1_000_000;

#[test]
fn an_order_is_repeated_until_the_node_says_so_and_counts_at_once() {
    let mut case = Case::new();
    case.memory.order("a", order(true));
    let nodes = || Nodes::new(&["a", "b"]).with("a", "m/0", Ready);
    assert_eq!(case.say(&wanted(1), &nodes()), ["drain a: true", "+1!"]);
    case.memory.told("a", NOW_MS);
    assert_eq!(case.say(&wanted(1), &nodes().draining("a")), ["+1!"]);
    case.memory.order("a", order(false));
    assert_eq!(
        case.say(&wanted(1), &nodes().draining("a")),
        ["drain a: false"]
    );
    case.memory.told("a", NOW_MS);
    let nothing = Vec::<String>::new();
    assert_eq!(case.say(&wanted(1), &nodes()), nothing);
    let later = nodes().later(HEARTBEAT_MS);
    assert_eq!(case.say(&wanted(1), &later), nothing);
    assert!(case.memory.node_order("a").is_none());
}

#[test]
fn an_order_is_told_although_the_node_says_so_from_an_earlier_one() {
    let nodes = || Nodes::new(&["a"]);
    for last in [true, false] {
        // As with a drain that is taken back, twice, before the node says anything new.
        let stale = || match last {
            true => nodes().draining("a"),
            false => nodes(),
        };
        let mut case = Case::new();
        case.memory.order("a", order(last));
        let told = format!("drain a: {last}");
        assert_eq!(case.say(&wanted(0), &stale()), [told.as_str()]);
        case.memory.told("a", NOW_MS);
        case.say(&wanted(0), &stale());
        // It obeys what came before, which is not what is wanted of it now.
        let before = match last {
            true => nodes(),
            false => nodes().draining("a"),
        };
        assert_eq!(case.say(&wanted(0), &before), [told.as_str()]);
        let kept = case.memory.node_order("a").expect("it stands");
        assert_eq!(kept.draining, last);
    }
}

#[test]
fn a_run_that_does_not_know_of_its_drain_is_told_again_and_the_one_that_knew_is_believed() {
    let nodes = |run: &str| {
        let run = run.to_owned();
        Nodes::new(&["a"]).edit("a", |node| node.run = run)
    };
    let confirmed = || {
        let mut case = Case::new();
        case.memory.order("a", order(true));
        case.memory.told("a", NOW_MS);
        let says_so = nodes("first").draining("a").later(HEARTBEAT_MS);
        assert_eq!(case.say(&wanted(0), &says_so), Vec::<String>::new());
        case
    };
    let mut case = confirmed();
    let next = nodes("next").later(HEARTBEAT_MS);
    assert_eq!(case.say(&wanted(0), &next), ["drain a: true"]);
    assert!(case.memory.drains("a", false), "nothing is placed there");
    let mut case = confirmed();
    let undone = nodes("first").later(HEARTBEAT_MS);
    assert_eq!(case.say(&wanted(0), &undone), Vec::<String>::new());
    assert!(case.memory.node_order("a").is_none());
}

#[test]
fn who_leaves_is_stopped_when_its_requests_are_done_or_its_time_is_up() {
    let since_ms = 1_000_000;
    let mut case = Case::new();
    let nodes = |state, later| Nodes::new(&["a"]).with("a", "x/0", state).later(later);
    case.memory
        .leave(&key("a", "x/0"), Why::NotInCatalog, false, since_ms);
    case.traffic.requests.insert(key("a", "x/0"), 3);
    let (leave, stop) = (
        ["leave x/0/0 on a: NotInCatalog"],
        ["stop x/0/0 on a: NotInCatalog"],
    );
    assert_eq!(case.say(&wanted(0), &nodes(Ready, LEAVE_MIN_MS)), leave);
    assert_eq!(
        case.say(&wanted(0), &nodes(Draining, DRAIN_TIMEOUT_MS - 1)),
        leave
    );
    assert_eq!(
        case.say(&wanted(0), &nodes(Draining, DRAIN_TIMEOUT_MS)),
        stop
    );
    case.traffic.requests.clear();
    // A request may have looked just before.
    assert_eq!(
        case.say(&wanted(0), &nodes(Draining, LEAVE_MIN_MS - 1)),
        leave
    );
    assert_eq!(case.say(&wanted(0), &nodes(Draining, LEAVE_MIN_MS)), stop);
    assert_eq!(
        case.say(&wanted(0), &nodes(Stopping, DRAIN_TIMEOUT_MS)),
        Vec::<String>::new()
    );
}

#[test]
fn one_that_leaves_is_not_counted_and_one_that_drains_for_no_known_reason_is_ended() {
    let nodes = Nodes::new(&["a"]).with("a", "m/0", Draining);
    check("draining", 1, &nodes, &["leave m/0/0 on a: Reported", "+1"]);
    let mut case = Case::new();
    case.memory.leave(&key("a", "m/0"), Why::Operator, true, 0);
    let nodes = Nodes::new(&["a"]).with("a", "m/0", Ready);
    assert_eq!(
        case.say(&wanted(1), &nodes),
        ["stop m/0/0 on a: Operator", "+1"]
    );
}

#[test]
fn a_start_counts_until_it_is_confirmed_or_ten_seconds_have_passed() {
    let start = |session| Start {
        spec: Arc::new(spec("m/0")),
        sent_ms: 1_000_000,
        session: SessionId(session),
    };
    let mut case = Case::new();
    case.memory.start("a", start(0));
    let nodes = || Nodes::new(&["a"]);
    assert_eq!(
        case.say(&wanted(1), &nodes().later(9_999)),
        Vec::<String>::new()
    );
    assert_eq!(case.say(&wanted(1), &nodes().later(10_000)), ["+0"]);
    case.memory.start("a", start(0));
    let told = nodes().with("a", "m/0", Pending);
    assert_eq!(case.say(&wanted(1), &told), Vec::<String>::new());
    assert_eq!(case.memory.starts().count(), 0);
}

#[test]
fn a_change_that_only_replaces_stops_nothing_and_a_smaller_catalog_does() {
    let nodes = Nodes::new(&["a", "b"])
        .outdated("a", "m/0", Ready)
        .with("a", "m/1", Loading)
        .with("b", "x/0", Ready)
        .with("b", "x/1", Draining);
    let count = |after: &Desired| {
        let (stops, all) = would_stop(after, &nodes.0, &Memory::default());
        (stops.into_iter().collect::<Vec<_>>(), all)
    };
    assert_eq!(count(&wanted(2)), (vec![("x".to_owned(), 1)], 3));
    assert_eq!(
        count(&wanted(1)),
        (vec![("m".to_owned(), 1), ("x".to_owned(), 1)], 3)
    );
}
