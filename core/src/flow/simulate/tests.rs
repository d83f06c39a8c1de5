use std::sync::Arc;

use llmgw_plugins::PolicySet;

use super::plan::{Load, Plan, ReplicaPlan, Span, TenantPlan};
use super::queueing::{Discipline, Queueing};
use super::run::Run;
use super::trace::{Trace, Traced};
use super::{Outcome, simulate};

/// A fast engine: 10,000 prompt tokens a second.
fn replica(slots: u32) -> ReplicaPlan {
    ReplicaPlan {
        slots,
        ms_per_prefill_token: 0.1,
        ..ReplicaPlan::default()
    }
}

fn tenant(name: &str, band: &str, load: Load, input: u64, output: u64) -> TenantPlan {
    TenantPlan {
        load,
        input_tokens: Span::exactly(input),
        output_tokens: Span::exactly(output),
        ..TenantPlan::new(name, &Arc::from(band))
    }
}

fn clients(count: u32) -> Load {
    Load::Clients { count, think_ms: 0 }
}

fn plan(seconds: u64, replicas: Vec<ReplicaPlan>, tenants: Vec<TenantPlan>) -> Plan {
    Plan {
        seed: 1,
        end_ms: Some(seconds * 1_000),
        events_max: 1_000_000,
        replicas,
        tenants,
        recorded: Vec::new(),
    }
}

fn outcome(plan: &Plan, discipline: Discipline) -> Outcome {
    simulate(plan, &PolicySet::built_in(), discipline).unwrap()
}

/// Two tenants of equal weight: `heavy` asks 20 times as often, for prompts that are 30 times as long.
fn light_and_heavy(seed: u64) -> Plan {
    let tenants = vec![
        tenant("light", "standard", Load::Rate { per_s: 0.5 }, 100, 50),
        tenant("heavy", "standard", Load::Rate { per_s: 10.0 }, 3_000, 50),
    ];
    Plan {
        seed,
        ..plan(120, vec![replica(4), replica(4)], tenants)
    }
}

#[test]
fn a_light_tenant_waits_less_than_a_second_while_a_heavy_one_queues() {
    for seed in 0..3 {
        let plan = light_and_heavy(seed);
        let fair = outcome(&plan, Discipline::Policy);
        let (light, heavy) = (fair.tenant("light").unwrap(), fair.tenant("heavy").unwrap());
        assert!(
            light.requests > 30 && light.waiting <= 1,
            "{seed}: {light:?}"
        );
        assert!(
            light.wait_ms(90).unwrap() < 1_000.0,
            "seed {seed}\n{}",
            fair.table()
        );
        assert!(heavy.waiting > 100 && heavy.wait_ms(90).unwrap() > 10_000.0);
        let unfair = outcome(&plan, Discipline::FirstCome);
        let waited = unfair.tenant("light").unwrap().wait_ms(90).unwrap();
        assert!(
            waited > 10_000.0,
            "first come, first served would do: {waited}"
        );
    }
}

#[test]
fn a_batch_flood_delays_an_interactive_request_by_one_service_time_at_most() {
    let one_at_a_time = Load::Clients {
        count: 1,
        think_ms: 700,
    };
    for slots in [1, 2, 8] {
        let tenants = vec![
            tenant("person", "interactive", one_at_a_time, 200, 40),
            tenant("flood", "batch", clients(200), 1_000, 100),
        ];
        let plan = plan(200, vec![replica(slots)], tenants);
        let outcome = outcome(&plan, Discipline::Policy);
        // A prompt is read in 100 ms, behind at most the 500 ms that the gate lets through; an answer takes 2 s.
        let longest_ms = 500.0 + 100.0 + 2_000.0;
        let person = outcome.tenant("person").unwrap();
        assert!(person.served > 40 && outcome.tenant("flood").unwrap().waiting > 100);
        assert!(
            person.wait_ms(100).unwrap() <= longest_ms,
            "{slots} slots\n{}",
            outcome.table()
        );
    }
}

#[test]
fn tenants_of_equal_weight_share_equally_and_others_by_weight() {
    let mut tenants = vec![
        tenant("short", "standard", clients(20), 50, 20),
        tenant("long", "standard", clients(20), 2_000, 200),
        tenant("double", "standard", clients(20), 500, 100),
    ];
    tenants[2].weight = 2.0;
    let outcome = outcome(&plan(120, vec![replica(4)], tenants), Discipline::Policy);
    for (name, share) in [("short", 0.25), ("long", 0.25), ("double", 0.5)] {
        let found = outcome.share(name);
        assert!(
            (found - share).abs() < 0.03,
            "{name}: {found}\n{}",
            outcome.table()
        );
    }
}

#[test]
fn the_same_plan_gives_the_same_outcome_and_another_seed_another() {
    let json = |seed| outcome(&light_and_heavy(seed), Discipline::Policy).json();
    assert_eq!(json(3), json(3));
    assert_ne!(json(3), json(4));
}

#[test]
fn nothing_is_left_or_lost_whatever_happens_to_clients_and_replicas() {
    for discipline in Discipline::ALL {
        for seed in 0..8 {
            let mut plan = busy_and_unlucky(seed);
            plan.seed = seed;
            let set = PolicySet::built_in();
            let mut run = Run::new(&plan, &set, discipline);
            run.all().unwrap();
            for slots in &run.slots {
                let counters = (slots.inflight(), slots.queued(), slots.prefill_tokens());
                assert_eq!(counters, (0, 0, 0), "{discipline:?}, seed {seed}");
            }
            assert_eq!(run.queueing.queued(), 0);
            if let Queueing::Policy(dispatcher) = &mut run.queueing {
                for band in dispatcher.band_reports(u64::MAX / 4) {
                    let counters = (band.queued, band.inflight, band.queued_cost);
                    assert_eq!(counters, (0, 0, 0), "{}, seed {seed}", band.name);
                }
            }
            let all = run.outcome().all;
            let ended = all.served + all.refused + all.timed_out + all.failed + all.left;
            assert_eq!((ended, all.waiting), (all.requests, 0));
            assert!(all.served > 0 && all.left > 0, "{all:?}");
        }
    }
}

/// A trace on replicas that die, with clients that leave and answers that come at once.
fn busy_and_unlucky(seed: u64) -> Plan {
    let dying = ReplicaPlan {
        dies_ms: Some(3_000),
        returns_ms: Some(9_000),
        ..replica(3)
    };
    let bands: Vec<Arc<str>> = ["interactive", "standard", "batch"].map(Arc::from).to_vec();
    let trace = Trace::drawn(150, seed);
    let mut plan = trace.plan(vec![dying, replica(2)], 3.0, &bands, seed);
    for (at, tenant) in plan.tenants.iter_mut().enumerate() {
        tenant.stream = at % 3 != 0;
        tenant.leaves_ms = (at % 4 == 0).then_some(5_000);
    }
    plan
}

#[test]
fn a_simulation_that_is_too_long_says_so() {
    let plan = Plan {
        events_max: 1_000,
        ..light_and_heavy(1)
    };
    let error = simulate(&plan, &PolicySet::built_in(), Discipline::Policy).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("more than 1000 events, after ")
    );
}

#[test]
fn the_first_come_is_served_first_and_tenants_take_turns_in_the_comparisons() {
    let tenants = vec![
        tenant("many", "standard", clients(9), 100, 50),
        tenant("one", "standard", clients(1), 100, 50),
    ];
    let plan = plan(60, vec![replica(1)], tenants);
    let served = |discipline| {
        let outcome = outcome(&plan, discipline);
        let of = |name| outcome.tenant(name).unwrap().served;
        of("one") as f64 / of("many") as f64
    };
    assert!((served(Discipline::FirstCome) - 1.0 / 9.0).abs() < 0.05);
    assert!((served(Discipline::RoundRobin) - 1.0).abs() < 0.05);
}

#[test]
fn a_table_fits_80_columns_and_tells_all_tenants() {
    let bands: Vec<Arc<str>> = ["interactive", "standard"].map(Arc::from).to_vec();
    let plan = Trace::drawn(300, 5).plan(vec![replica(4)], 2.0, &bands, 5);
    let table = outcome(&plan, Discipline::Policy).table();
    assert!(table.lines().all(|line| line.len() <= 80), "{table}");
    assert!(
        table.contains("44 others") && table.contains("\nall "),
        "{table}"
    );
}

#[test]
fn traces_are_read_in_both_formats() {
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                 2023-11-16 18:59:59.5000000,4808,10\n\
                 2023-11-16 19:00:00.2500000,3180,8\n";
    let traced = |at_us, input_tokens, output_tokens| Traced {
        at_us,
        input_tokens,
        output_tokens,
        conversation: None,
    };
    let expected = [traced(0, 4808, 10), traced(750_000, 3180, 8)];
    assert_eq!(Trace::parse(azure, 1).unwrap().requests, expected);

    let line = |first: u64, second: u64| {
        format!(
            "{{\"timestamp\": 3000, \"input_length\": 700, \"output_length\": 5, \"hash_ids\": [{first}, {second}]}}\n"
        )
    };
    let text = line(0, 1) + &line(0, 2) + &line(0, 1);
    let trace = Trace::parse(&text, 1).unwrap();
    let mut conversations: Vec<_> = trace
        .requests
        .iter()
        .map(|request| request.conversation)
        .collect();
    conversations.sort();
    conversations.dedup();
    assert_eq!((trace.requests.len(), conversations.len()), (3, 2));
    assert!(trace.requests.is_sorted_by_key(|request| request.at_us));
    assert!(
        trace
            .requests
            .iter()
            .all(|request| request.at_us < 6_000_000)
    );

    let error = Trace::parse("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", 1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "line 2: the time is not like `2023-11-16 18:17:03.9799600`"
    );
}

#[test]
fn tenants_ask_by_zipfs_law_and_a_conversation_stays_with_its_tenant() {
    let mut trace = Trace::drawn(20_000, 3);
    for (at, request) in trace.requests.iter_mut().enumerate().take(1_000) {
        request.conversation = Some(at as u64 % 10);
    }
    let plan = trace.plan(vec![replica(4)], 1.0, &[Arc::from("standard")], 9);
    let of = |tenant| {
        plan.recorded
            .iter()
            .filter(|request| request.tenant == tenant)
            .count() as f64
    };
    assert!((of(0) / of(1) / 2f64.powf(1.1) - 1.0).abs() < 0.2);
    for conversation in 0..10 {
        let mut tenants: Vec<usize> = (0..100)
            .map(|round| plan.recorded[round * 10 + conversation].tenant)
            .collect();
        tenants.dedup();
        assert_eq!(tenants.len(), 1);
    }
}

#[test]
fn a_trace_keeps_replicas_as_busy_as_asked() {
    let trace = Trace::drawn(3_000, 3);
    let bands = [Arc::from("standard")];
    let plan = trace.plan(vec![replica(8)], 0.5, &bands, 9);
    let outcome = outcome(&plan, Discipline::Policy);
    let busy_ms: f64 = plan
        .recorded
        .iter()
        .map(|request| request.input_tokens as f64 * 0.1 + request.output_tokens as f64 * 20.0)
        .sum();
    let load = busy_ms / 8.0 / outcome.ms as f64;
    assert!((load - 0.5).abs() < 0.03, "{load}");
}
