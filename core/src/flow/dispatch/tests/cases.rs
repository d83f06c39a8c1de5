//! Cases that the properties, and a stranger's look, found.

use std::collections::HashMap;
use std::sync::Arc;

use llmgw_plugins::BandSpec;

use super::{band, wide_gate};
use crate::flow::dispatch::{Arrival, Arrived, Dispatcher, Grant, LAG_MAX, Settled, Size, Unseen};
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

/// An answer that comes at once, of a prompt of 1,000 tokens: half a second of reading.
fn whole(dispatcher: &mut Dispatcher, tenant: &str, band: &BandSpec, now_ms: u64) -> Arrived {
    let arrival = Arrival {
        band,
        tenant: &Arc::from(tenant),
        weight: 1.0,
        flow: None,
        size: Size {
            input_tokens: 1_000,
            todo_tokens: 1_000,
            first_cost: 1_000_000,
            expected_cost: 2_000_000,
            unseen: Some(Unseen {
                cost: 1_000_000,
                ms: 10_000.0,
            }),
        },
        lane: 0,
        goes_first: false,
        stay_until_ms: 0,
    };
    dispatcher.arrive(&arrival, now_ms)
}

/// One replica of so many slots, at half a millisecond a prompt token.
fn replica(slots: u32, bands: &[BandSpec]) -> Dispatcher {
    let mut dispatcher = Dispatcher::new(bands);
    let facts = LaneFacts {
        open: true,
        ms_per_prefill_token: 0.5,
        kv: None,
    };
    dispatcher.add_lane(Arc::from("0"), Slots::new(Some(slots)), facts);
    dispatcher
}

#[test]
fn answers_that_come_at_once_fill_the_slots_as_fast_as_their_prompts_are_read() {
    let only = band("only", 0.0, 0.0);
    let mut dispatcher = replica(8, std::slice::from_ref(&only));
    let mut running = vec![granted(whole(&mut dispatcher, "a", &only, 0))];
    (0..7).for_each(|_| {
        queued(whole(&mut dispatcher, "a", &only, 0));
    });
    // Nobody sees a first byte: each is read half a second after the one before it.
    for step in 1..=40 {
        let mut more = Vec::new();
        dispatcher.fill(0, step * 100, &mut more);
        running.extend(more.into_iter().map(|(_, grant)| grant));
        assert!(running.len() as u64 <= 2 + step * 100 / 500, "{step}");
    }
    assert_eq!(running.len(), 8);
    let slots = running[0].slots.clone();
    for grant in running {
        dispatcher.release(grant, Settled::Cost(5), 9_000);
    }
    assert_eq!((slots.inflight(), slots.sent_tokens()), (0, 0));
}

#[test]
fn a_band_gets_its_floor_though_each_request_lasts_longer_than_the_window() {
    let bands = [
        band("high", 100.0, 0.0),
        band("middle", 50.0, 0.10),
        band("low", 0.0, 0.05),
    ];
    let mut dispatcher = replica(1, &bands);
    let mut running = granted(whole(&mut dispatcher, "a", &bands[0], 0));
    let mut names: HashMap<Ticket, usize> = HashMap::new();
    for (at, band) in bands.iter().enumerate() {
        for _ in 0..300 {
            names.insert(queued(whole(&mut dispatcher, "a", band, 0)), at);
        }
    }
    let mut served = [0_u32; 3];
    for turn in 1..=200_u64 {
        let now = turn * 15_000;
        dispatcher.release(running, Settled::Cost(2_000_000), now);
        let mut granted = Vec::new();
        dispatcher.fill(0, now, &mut granted);
        let (ticket, grant) = granted.pop().unwrap();
        served[names[&ticket]] += 1;
        running = grant;
    }
    assert!(served[1] >= 20 && served[2] >= 10, "{served:?}");
    assert!(served[0] >= 150, "{served:?}");
}

#[test]
fn a_full_band_puts_out_the_newest_of_the_greediest_for_one_who_has_less() {
    let only = BandSpec {
        max_queue: 5,
        ..band("only", 0.0, 0.0)
    };
    let mut dispatcher = replica(1, std::slice::from_ref(&only));
    let _running = granted(whole(&mut dispatcher, "heavy", &only, 0));
    let heavy: Vec<Ticket> = (0..5)
        .map(|_| queued(whole(&mut dispatcher, "heavy", &only, 0)))
        .collect();
    assert!(matches!(
        whole(&mut dispatcher, "heavy", &only, 0),
        Arrived::Full(_)
    ));
    let put_out: Vec<Option<Ticket>> = (0..3)
        .map(|_| match whole(&mut dispatcher, "light", &only, 0) {
            Arrived::Queued { displaced, .. } => displaced,
            _ => None,
        })
        .collect();
    // Three and two are as even as five can be.
    assert_eq!(put_out, [Some(heavy[4]), Some(heavy[3]), None]);
    assert_eq!(dispatcher.queued(), 5);
}

#[test]
fn nobody_is_refused_for_a_full_band_while_another_replica_has_room() {
    let only = BandSpec {
        max_queue: 0,
        ..band("only", 0.0, 0.0)
    };
    let mut dispatcher = replica(1, std::slice::from_ref(&only));
    let facts = LaneFacts {
        open: true,
        ms_per_prefill_token: 0.5,
        kv: None,
    };
    dispatcher.add_lane(Arc::from("1"), Slots::new(Some(1)), facts);
    let lanes: Vec<u32> = (0..2)
        .map(|_| granted(whole(&mut dispatcher, "a", &only, 0)).lane)
        .collect();
    assert_eq!(lanes, [0, 1]);
    assert!(matches!(
        whole(&mut dispatcher, "a", &only, 0),
        Arrived::Full(_)
    ));
}

#[test]
fn what_is_free_takes_turns_too() {
    let mut dispatcher = pool(1);
    let mut running = granted(arrive(&mut dispatcher, "first", 0, 0, 0));
    let mut names: HashMap<Ticket, &str> = HashMap::new();
    for tenant in ["first", "second"] {
        for _ in 0..4 {
            names.insert(queued(arrive(&mut dispatcher, tenant, 0, 0, 0)), tenant);
        }
    }
    let mut order = Vec::new();
    for _ in 0..8 {
        dispatcher.release(running, Settled::Cost(0), 0);
        let mut granted = Vec::new();
        dispatcher.fill(0, 0, &mut granted);
        let (ticket, grant) = granted.pop().unwrap();
        order.push(names[&ticket]);
        running = grant;
    }
    let firsts = order[..4].iter().filter(|name| **name == "first").count();
    assert_eq!(firsts, 2, "{order:?}");
}

#[test]
fn who_waits_for_a_closed_replica_chooses_again_as_soon_as_another_one_opens() {
    let mut dispatcher = pool(2);
    let _hangs = granted(arrive(&mut dispatcher, "a", 0, 10, 0));
    let facts = |open| LaneFacts {
        open,
        ms_per_prefill_token: 0.5,
        kv: None,
    };
    for lane in 0..2 {
        assert!(dispatcher.tell(lane, facts(false), 0).is_empty());
    }
    let trial = Arrival {
        band: &band("only", 0.0, 0.0),
        tenant: &Arc::from("a"),
        weight: 1.0,
        flow: None,
        size: Size::default(),
        lane: 0,
        goes_first: true,
        stay_until_ms: 0,
    };
    let trial = queued(dispatcher.arrive(&trial, 0));
    assert_eq!(dispatcher.tell(1, facts(true), 0), [trial]);
    // Told again, it is no news: who waits for a closed replica then was there when it was chosen.
    assert!(dispatcher.bind(trial, 0, true));
    assert!(dispatcher.tell(1, facts(true), 0).is_empty());
    assert!(dispatcher.bind(trial, 1, true));
    assert_eq!(sent_to(&mut dispatcher, 1), [trial]);
}
