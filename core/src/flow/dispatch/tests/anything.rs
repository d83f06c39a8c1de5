//! Whatever happens, in whatever order.

use std::sync::Arc;

use super::world::{BANDS, World};
use super::{Draws, band, property};
use crate::flow::dispatch::Settled;
use crate::flow::slots::UNKNOWN_SLOTS;

const SEEDS: u64 = 1_500;
const STEPS: u64 = 150;

fn settled(draws: &mut Draws) -> Settled {
    match draws.whole(0, 3) {
        0 => Settled::Nothing,
        1 => Settled::AsCharged,
        _ => Settled::Cost(draws.whole(0, 4_000_000)),
    }
}

/// One thing that happens.
fn step(world: &mut World, draws: &mut Draws) {
    match draws.whole(0, 99) {
        0..40 => world.arrive(draws),
        40..65 if !world.running.is_empty() => {
            let at = draws.index(world.running.len());
            let settled = settled(draws);
            world.release(at, settled);
        }
        65..73 if !world.running.is_empty() => {
            let at = draws.index(world.running.len());
            world.first_byte(at);
        }
        73..78 if !world.running.is_empty() => {
            let at = draws.index(world.running.len());
            world.running[at].grant.charge(draws.whole(0, 100_000));
        }
        78..83 => {
            if let Some(ticket) = world.some_ticket(draws) {
                world.cancel(ticket);
            }
        }
        83..87 => a_replica_changes(world, draws),
        87..89 => {
            // As when a reload removes a replica, or adds one.
            match (draws.chance(50), world.some_lane(draws)) {
                (true, Some(lane)) => world.remove_lane(lane),
                _ if world.lanes.len() < 6 => {
                    let engine = draws.index(world.engines.len());
                    world.add_lane(engine, draws.chance(80));
                }
                _ => {}
            }
        }
        89..91 => a_policy_changes(world, draws),
        91..93 => {
            world.balance();
            world.dispatcher.tidy();
        }
        _ => {
            world.pass(draws.pick(&[1, 50, 500, 5_000, 100_000]));
            world.fill_all();
        }
    }
    // Who lost its replica has another one chosen at once, if there is one.
    let orphans: Vec<u64> = world
        .waiting
        .iter()
        .filter(|(_, held)| held.lane.is_none())
        .map(|(ticket, _)| *ticket)
        .collect();
    for ticket in orphans {
        world.bind(draws, ticket);
    }
}

fn a_replica_changes(world: &mut World, draws: &mut Draws) {
    let Some(lane) = world.some_lane(draws) else {
        return;
    };
    let mut facts = world.lanes[&lane].facts;
    match draws.whole(0, 2) {
        0 => facts.open = !facts.open,
        1 => facts.kv = draws.pick(&[None, Some(0.1), Some(0.95)]),
        _ => facts.ms_per_prefill_token = draws.pick(&[0.01, 0.5, 100.0]),
    }
    world.tell(lane, facts);
}

fn a_policy_changes(world: &mut World, draws: &mut Draws) {
    match draws.whole(0, 3) {
        0 => {
            world.gate.hold_ms = draws.pick(&[0.0, 200.0, 5_000.0]);
            world.gate.inflight_max = draws.pick(&[None, Some(1), Some(3)]);
            world.dispatcher.set_gate(world.gate.clone());
        }
        1 => {
            let kept = draws.whole(1, BANDS.len() as u64) as usize;
            world.dispatcher.set_bands(&world.bands[..kept]);
        }
        2 => {
            let engine = draws.index(world.engines.len());
            let slots = draws.chance(80).then(|| draws.whole(1, 4) as u32);
            world.engines[engine].set_limit(slots);
            world.dispatcher.slots_changed();
        }
        _ => {
            world.saturation = draws.pick(&[None, Some(0.3), Some(0.8)]);
            world.dispatcher.set_saturation(world.saturation);
        }
    }
    world.fill_all();
}

#[test]
fn every_counter_is_what_it_counts_nobody_idles_and_nothing_is_lost() {
    property(SEEDS, |draws| {
        let mut world = World::new(draws);
        for _ in 0..draws.whole(1, STEPS) {
            step(&mut world, draws);
            world.check_counters();
            world.check_work_conserving();
        }
        everybody_leaves(&mut world, draws);
    });
}

/// By success, error, cancellation, timeout, death and drain.
fn everybody_leaves(world: &mut World, draws: &mut Draws) {
    if draws.chance(30) {
        while let Some(lane) = world.some_lane(draws) {
            world.remove_lane(lane);
        }
    }
    while !world.running.is_empty() || !world.waiting.is_empty() {
        let is_running = !world.running.is_empty() && draws.chance(60);
        match world.some_ticket(draws) {
            Some(ticket) if !is_running => world.cancel(ticket),
            _ if !world.running.is_empty() => {
                let at = draws.index(world.running.len());
                let settled = settled(draws);
                world.release(at, settled);
            }
            _ => {}
        }
    }
    world.check_counters();
    world.dispatcher.tidy();
    let left = world.figures();
    let counts_time = |name: &str| name.contains(" in ");
    let left: Vec<_> = left.iter().filter(|(name, _)| !counts_time(name)).collect();
    assert!(left.is_empty(), "{left:?}");
    for (band, tenants) in world.dispatcher.tenants() {
        for tenant in tenants {
            assert_eq!(
                (tenant.queued, tenant.inflight),
                (0, 0),
                "{} in {band}",
                tenant.name
            );
        }
    }
}

#[test]
fn all_that_wait_are_served_in_the_end_though_metrics_are_frozen() {
    property(500, |draws| {
        let mut world = World::new(draws);
        for (lane, place) in world.lanes.clone() {
            let kv = draws.pick(&[None, Some(0.99)]);
            world.tell(lane, crate::flow::lane::LaneFacts { kv, ..place.facts });
        }
        for _ in 0..60 {
            world.arrive(draws);
        }
        for _ in 0..1_000 {
            if world.running.is_empty() {
                break;
            }
            let at = draws.index(world.running.len());
            let settled = settled(draws);
            world.release(at, settled);
            world.now_ms += 100;
            world.check_work_conserving();
        }
        // What stays for a prefix goes at the latest with its own replica's turn.
        assert!(
            world.waiting.is_empty(),
            "{} wait for ever",
            world.waiting.len()
        );
    });
}

#[test]
fn a_removed_band_lasts_until_its_last_request_ended() {
    property(300, |draws| {
        let mut world = World::new(draws);
        for _ in 0..40 {
            world.arrive(draws);
        }
        world.dispatcher.set_bands(&world.bands[..1]);
        world.check_counters();
        everybody_leaves(&mut world, draws);
        let left: Vec<Arc<str>> = world
            .dispatcher
            .band_reports(world.now_ms)
            .into_iter()
            .map(|band| band.name)
            .collect();
        assert_eq!(left, [Arc::from(BANDS[0])]);
    });
}

#[test]
fn an_engine_of_unknown_slots_takes_what_the_gate_lets_it() {
    property(50, |draws| {
        let mut world = World::new(draws);
        world.bands = vec![band("high", 1.0, 0.0)];
        world.dispatcher.set_bands(&world.bands);
        world.engines.iter().for_each(|slots| slots.set_limit(None));
        world.dispatcher.slots_changed();
        for _ in 0..600 {
            world.arrive(draws);
            if let Some(at) = world.running.len().checked_sub(1) {
                world.first_byte(at);
            }
        }
        assert!(
            world
                .engines
                .iter()
                .all(|slots| slots.inflight() <= UNKNOWN_SLOTS)
        );
        everybody_leaves(&mut world, draws);
    });
}
