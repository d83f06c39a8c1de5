//! Cases that the properties found.

use std::sync::Arc;

use super::{band, wide_gate};
use crate::flow::dispatch::{Arrival, Arrived, Dispatcher, Grant, LAG_MAX, Size};
use crate::flow::lane::LaneFacts;
use crate::flow::rotation::Ticket;
use crate::flow::slots::Slots;

/// Replicas of one slot each.
fn pool(lanes: usize) -> Dispatcher {
    let mut dispatcher = Dispatcher::new(&[band("only", 0.0, 0.0)]);
    dispatcher.set_gate(wide_gate());
    for lane in 0..lanes {
        let facts = LaneFacts {
            open: true,
            ms_per_prefill_token: 0.5,
            kv: None,
        };
        dispatcher.add_lane(Arc::from(lane.to_string()), Slots::new(Some(1)), facts);
    }
    dispatcher
}

fn arrive(
    dispatcher: &mut Dispatcher,
    tenant: &str,
    lane: u32,
    cost: u64,
    stay_until_ms: u64,
) -> Arrived {
    let arrival = Arrival {
        band: &band("only", 0.0, 0.0),
        tenant: &Arc::from(tenant),
        weight: 1.0,
        flow: None,
        size: Size {
            input_tokens: 1,
            todo_tokens: 1,
            first_cost: cost,
            expected_cost: cost,
            unseen: None,
        },
        lane,
        goes_first: false,
        stay_until_ms,
    };
    dispatcher.arrive(&arrival, 0)
}

fn granted(arrived: Arrived) -> Grant {
    match arrived {
        Arrived::Granted(grant) => grant,
        _ => panic!("there is room"),
    }
}

fn queued(arrived: Arrived) -> Ticket {
    match arrived {
        Arrived::Queued { ticket, .. } => ticket,
        _ => panic!("there is no room"),
    }
}

fn sent_to(dispatcher: &mut Dispatcher, lane: u32) -> Vec<Ticket> {
    let mut granted = Vec::new();
    dispatcher.fill(lane, 0, &mut granted);
    granted.into_iter().map(|(ticket, _)| ticket).collect()
}

#[test]
fn an_idle_replica_takes_one_that_waits_behind_those_who_stay() {
    let mut dispatcher = pool(2);
    let _busy = granted(arrive(&mut dispatcher, "a", 0, 10, 0));
    queued(arrive(&mut dispatcher, "a", 0, 10, 5_000));
    let behind = queued(arrive(&mut dispatcher, "a", 0, 10, 0));
    assert_eq!(sent_to(&mut dispatcher, 1), [behind]);
}

#[test]
fn an_idle_replica_takes_nothing_for_a_tenant_that_is_far_ahead() {
    let mut dispatcher = pool(3);
    let mut ahead = granted(arrive(&mut dispatcher, "ahead", 0, 10, 0));
    let _behind = granted(arrive(&mut dispatcher, "behind", 1, 10, 0));
    ahead.charge(LAG_MAX + 1_000);
    queued(arrive(&mut dispatcher, "ahead", 0, 5_000_000, 0));
    let waits = queued(arrive(&mut dispatcher, "behind", 1, 10, 0));
    // The other's queue is the longer one.
    assert_eq!(sent_to(&mut dispatcher, 2), [waits]);
}
