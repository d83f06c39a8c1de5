//! The scorer's rules, case by case, and what must hold for any input.

use llmgw_plugins::RoutingWeights;

use super::{Ask, Candidate, Choice, Reason, SplitMix, TIE_MS, TIE_SHARE, choose};
use crate::routing::breaker::{Breaker, Fault};
use crate::routing::errors_window::ErrorsWindow;

const ASK: Ask = Ask {
    input_tokens: 1_000,
    est_output_tokens: 200,
};

/// The choice with the default knobs.
fn chosen(candidates: &[Candidate]) -> (usize, Reason) {
    let choice = choose(&ASK, candidates, &RoutingWeights::default(), 0).unwrap();
    (choice.index, choice.reason)
}

fn idle() -> Candidate {
    Candidate::default()
}

fn with_metrics(running: f64, kv: f64, age_ms: f64) -> Candidate {
    Candidate {
        running: Some(running),
        waiting: Some(0.0),
        kv: Some(kv),
        metrics_age_ms: Some(age_ms),
        ..idle()
    }
}

#[test]
fn the_score_is_the_formula() {
    let candidate = Candidate {
        inflight: 2,
        slots: Some(4),
        prefill_tokens: 3_000,
        ms_per_prefill_token: 0.25,
        ms_per_decode_step: 10.0,
        kv: Some(0.5),
        errors_1m: 3,
        prefix_tokens: 200,
        metrics_age_ms: Some(100.0),
        ..idle()
    };
    let stale = Candidate {
        metrics_age_ms: Some(2_001.0),
        ..candidate
    };
    let cached = Candidate {
        prefix_tokens: 5_000,
        ..candidate
    };
    let decode = RoutingWeights {
        decode: 0.5,
        ..RoutingWeights::default()
    };
    let cases = [
        (
            "default knobs",
            candidate,
            RoutingWeights::default(),
            950.0 + 250.0 + 750.0,
        ),
        (
            "decode weighed",
            candidate,
            decode.clone(),
            950.0 + 500.0 + 250.0 + 750.0,
        ),
        (
            "stale: penalty, KV unknown",
            stale,
            RoutingWeights::default(),
            950.0 + 750.0 + 1_000.0,
        ),
        (
            "a cached prompt still costs a token",
            cached,
            RoutingWeights::default(),
            750.25 + 250.0 + 750.0,
        ),
        (
            "slots unknown are 256",
            Candidate {
                slots: None,
                ..candidate
            },
            decode,
            950.0 + 7.8125 + 1_000.0,
        ),
    ];
    for (name, candidate, weights, score_ms) in cases {
        let choice = choose(&ASK, &[candidate], &weights, 0).unwrap();
        assert_eq!(
            choice,
            Choice {
                index: 0,
                score_ms,
                reason: Reason::OnlyOne
            },
            "{name}"
        );
    }
    assert_eq!(choose(&ASK, &[], &RoutingWeights::default(), 0), None);
}

#[test]
fn the_choice_and_its_reason() {
    let busy = Candidate {
        prefill_tokens: 5_000,
        inflight: 5,
        ..idle()
    };
    let streams = |inflight, slots| Candidate {
        inflight,
        slots,
        ..idle()
    };
    let near = |prefix_tokens, prefill_tokens| Candidate {
        prefix_tokens,
        prefill_tokens,
        ..idle()
    };
    let nan = Candidate {
        ms_per_prefill_token: f64::NAN,
        ..idle()
    };
    #[rustfmt::skip] // One case a line.
    let cases: &[(&str, &[Candidate], (usize, Reason))] = &[
        ("least unfinished prefill", &[busy, idle(), busy], (1, Reason::LeastScore)),
        ("a faster replica, though busy", &[Candidate { ms_per_prefill_token: 9.0, ..idle() }, busy], (1, Reason::LeastScore)),
        ("errors count", &[Candidate { errors_1m: 2, ..idle() }, idle()], (1, Reason::LeastScore)),
        ("decode weighs 0, so streams break the tie", &[streams(9, None), streams(3, None)], (1, Reason::Tie)),
        ("streams per slot", &[streams(6, Some(16)), streams(3, Some(4))], (0, Reason::Tie)),
        ("slots unknown: plain", &[streams(6, Some(16)), streams(3, None)], (1, Reason::Tie)),
        ("queued ones are load", &[Candidate { queued: 4, ..idle() }, streams(3, None)], (1, Reason::Tie)),
        ("then what engines report", &[with_metrics(5.0, 0.2, 10.0), with_metrics(2.0, 0.2, 10.0)], (1, Reason::Tie)),
        ("own load before theirs", &[Candidate { inflight: 1, ..with_metrics(0.0, 0.2, 10.0) }, with_metrics(9.0, 0.2, 10.0)], (1, Reason::Tie)),
        ("24 ms apart is a tie", &[Candidate { inflight: 2, ..near(0, 0) }, near(0, 48)], (1, Reason::Tie)),
        ("9 % apart is a tie", &[Candidate { inflight: 2, ..near(0, 9_000) }, near(0, 9_900)], (1, Reason::Tie)),
        ("11 % apart is none", &[Candidate { inflight: 2, ..near(0, 9_000) }, near(0, 10_100)], (0, Reason::LeastScore)),
        ("a full one is left out", &[streams(4, Some(4)), busy], (1, Reason::OnlyFree)),
        ("unless all are full", &[streams(4, Some(4)), streams(9, Some(4))], (0, Reason::Tie)),
        ("256 are full where slots are unknown", &[streams(256, None), streams(4, None), streams(3, None)], (2, Reason::Tie)),
        ("the longest prefix", &[idle(), near(400, 2_000), near(300, 0)], (1, Reason::Prefix)),
        ("the least loaded of those with the prefix", &[near(900, 3_000), near(900, 2_000), idle()], (1, Reason::Prefix)),
        ("a prefix below affinity_min is none", &[idle(), near(299, 2_000)], (0, Reason::LeastScore)),
        ("a prefix isn't worth more than the penalty", &[idle(), near(900, 11_000)], (0, Reason::LeastScore)),
        ("nor a full replica", &[Candidate { inflight: 1, ..idle() }, idle(), Candidate { slots: Some(0), ..near(900, 0) }], (1, Reason::Tie)),
        ("NaN goes last", &[nan, busy], (1, Reason::LeastScore)),
        ("NaN goes last with a prefix too", &[Candidate { prefix_tokens: 1_000, ..nan }, busy], (1, Reason::LeastScore)),
        ("negative speed goes last", &[Candidate { ms_per_prefill_token: -1.0, ..idle() }, busy], (1, Reason::LeastScore)),
        ("all NaN: own load", &[Candidate { inflight: 1, ..nan }, nan], (1, Reason::Tie)),
    ];
    for (name, candidates, expected) in cases {
        assert_eq!(chosen(candidates), *expected, "{name}");
    }
}

#[test]
fn unknown_metrics_are_neither_idle_nor_saturated() {
    let unknown = idle();
    #[rustfmt::skip] // One case a line.
    let cases: &[(&str, &[Candidate], (usize, Reason))] = &[
        ("KV unknown is as the known ones", &[unknown, with_metrics(0.0, 0.9, 10.0)], (1, Reason::Tie)),
        ("not as the fullest", &[unknown, with_metrics(0.0, 0.2, 10.0), with_metrics(0.0, 0.9, 10.0)], (1, Reason::LeastScore)),
        ("not as the emptiest", &[unknown, with_metrics(0.0, 0.9, 10.0), with_metrics(0.0, 0.0, 10.0)], (2, Reason::LeastScore)),
        ("frozen at idle is no idleness", &[with_metrics(0.0, 0.0, 60_000.0), with_metrics(8.0, 0.9, 10.0)], (1, Reason::LeastScore)),
        ("all stale: own counts only", &[Candidate { inflight: 1, ..with_metrics(0.0, 0.0, 9e4) }, with_metrics(9.0, 1.0, 9e3)], (1, Reason::Tie)),
        ("stale and alone still serves", &[with_metrics(0.0, 1.0, 9e9)], (0, Reason::OnlyOne)),
        ("NaN metrics are unknown", &[with_metrics(f64::NAN, f64::NAN, f64::NAN), busy_engine()], (1, Reason::Tie)),
    ];
    for (name, candidates, expected) in cases {
        let seeds = if expected.1 == Reason::Tie {
            0..64
        } else {
            0..1
        };
        let weights = RoutingWeights::default();
        let hit = seeds.map(|seed| choose(&ASK, candidates, &weights, seed).unwrap());
        let hit: Vec<_> = hit.map(|choice| (choice.index, choice.reason)).collect();
        assert!(hit.contains(expected), "{name}: {hit:?}");
    }
}

fn busy_engine() -> Candidate {
    with_metrics(50.0, 1.0, 10.0)
}

#[test]
fn equal_replicas_take_turns() {
    for choices in [0, 1, 2, 3] {
        let weights = RoutingWeights {
            choices,
            ..RoutingWeights::default()
        };
        let mut random = SplitMix(5);
        let mut hits = [0; 4];
        for _ in 0..4_000 {
            hits[choose(&ASK, &[idle(); 4], &weights, random.next())
                .unwrap()
                .index] += 1;
        }
        assert!(
            hits.iter().all(|hits| (850..1_150).contains(hits)),
            "{choices} choices: {hits:?}"
        );
    }
}

#[test]
fn with_two_choices_the_worst_replica_is_never_chosen_and_the_second_worst_seldom() {
    let weights = RoutingWeights {
        choices: 2,
        ..RoutingWeights::default()
    };
    let candidates: Vec<_> = (0..4)
        .map(|i| Candidate {
            prefill_tokens: i * 4_000,
            ..idle()
        })
        .collect();
    let mut hits = [0; 4];
    (0..6_000).for_each(|seed| hits[choose(&ASK, &candidates, &weights, seed).unwrap().index] += 1);
    assert!(
        (2_800..3_200).contains(&hits[0]) && (850..1_150).contains(&hits[2]) && hits[3] == 0,
        "{hits:?}"
    );
}

#[test]
fn fifty_requests_at_once_on_four_slow_replicas_are_spread_evenly() {
    for (input_tokens, slots) in [
        (10, None),
        (1_000, None),
        (40_000, None),
        (1_000, Some(4)),
        (1_000, Some(256)),
    ] {
        let ask = Ask {
            input_tokens,
            ..ASK
        };
        // What the engines report is frozen at idle, as between two scrapes.
        let mut replicas = [Candidate {
            slots,
            ..with_metrics(0.0, 0.0, 500.0)
        }; 4];
        let mut random = SplitMix(input_tokens);
        for _ in 0..50 {
            let choice =
                choose(&ask, &replicas, &RoutingWeights::default(), random.next()).unwrap();
            let replica = &mut replicas[choice.index];
            replica.inflight += 1;
            replica.prefill_tokens += input_tokens;
        }
        let spread = replicas.map(|replica| replica.inflight);
        assert!(
            spread.iter().all(|count| (12..=13).contains(count)),
            "{input_tokens} tokens, {slots:?}: {spread:?}"
        );
    }
}

#[test]
fn a_replica_frozen_at_idle_gets_no_more_than_its_share() {
    let mut hits = [0; 4];
    let mut random = SplitMix(1);
    for _ in 0..400 {
        let own = |index: usize| Candidate {
            inflight: hits[index],
            prefill_tokens: u64::from(hits[index]) * 100,
            ..idle()
        };
        let frozen = Candidate {
            metrics_age_ms: Some(30_000.0),
            running: Some(0.0),
            waiting: Some(0.0),
            kv: Some(0.0),
            ..own(0)
        };
        let live = |index| Candidate {
            metrics_age_ms: Some(50.0),
            running: Some(9.0),
            waiting: Some(1.0),
            kv: Some(0.7),
            ..own(index)
        };
        let candidates = [frozen, live(1), live(2), live(3)];
        hits[choose(&ASK, &candidates, &RoutingWeights::default(), random.next())
            .unwrap()
            .index] += 1;
    }
    assert!(
        hits[0] <= 100 && hits[0] > 50,
        "lower trust, but not closed: {hits:?}"
    );
}

#[test]
fn a_replica_that_fails_fast_is_no_black_hole() {
    for (fault, most) in [(Fault::Connect, 1), (Fault::Status5xx, 3)] {
        let mut breaker = Breaker::default();
        let mut errors = ErrorsWindow::default();
        let (mut inflight, mut failed) = ([0; 4], 0);
        // 40 requests within 400 ms; the others take longer, so replica 0 always has the fewest in flight.
        for now_ms in (0..400).step_by(10) {
            let replica = |index: usize| Candidate {
                inflight: inflight[index],
                ..idle()
            };
            let broken = Candidate {
                errors_1m: errors.count(now_ms),
                ..replica(0)
            };
            let candidates = [replica(1), replica(2), replica(3), broken];
            let open = &candidates[..if breaker.admits(now_ms) { 4 } else { 3 }];
            let choice = choose(&ASK, open, &RoutingWeights::default(), now_ms).unwrap();
            if choice.index == 3 {
                let admission = breaker.admit(now_ms);
                breaker.fault(admission, fault, now_ms, 0);
                errors.record(now_ms);
                failed += 1;
            } else {
                inflight[choice.index + 1] += 1;
            }
        }
        assert!(
            (1..=most).contains(&failed),
            "{fault:?}: {failed} requests failed"
        );
    }
}

fn odd_number(random: &mut SplitMix) -> f64 {
    match random.below(12) {
        0 => f64::NAN,
        1 => f64::INFINITY,
        2 => -1.0,
        3 => 0.0,
        _ => random.below(10_000) as f64 / 1_000.0,
    }
}

fn any_candidate(random: &mut SplitMix, odd: bool) -> Candidate {
    let mut number = |scale: f64| {
        if odd {
            odd_number(random)
        } else {
            random.below(1_000) as f64 / 1_000.0 * scale
        }
    };
    let mut candidate = Candidate {
        ms_per_prefill_token: number(5.0),
        ms_per_decode_step: number(50.0),
        running: Some(number(20.0)),
        waiting: Some(number(20.0)),
        kv: Some(number(1.0)),
        metrics_age_ms: Some(number(4_000.0)),
        ..idle()
    };
    candidate.inflight = random.below(10) as u32;
    candidate.queued = random.below(3) as u32;
    candidate.slots = [None, Some(random.below(16) as u32)][random.below(2)];
    candidate.prefill_tokens =
        [random.below(20_000) as u64, u64::MAX][usize::from(odd && random.below(9) == 0)];
    candidate.errors_1m = random.below(40).saturating_sub(36) as u32;
    candidate.prefix_tokens = random.below(4) as u64 * 400;
    candidate
}

#[test]
fn any_input_gives_the_same_choice_twice_within_range_and_never_a_nan() {
    let mut random = SplitMix(17);
    for round in 0..4_000 {
        let length = 1 + random.below(if round % 1_000 == 0 { 4_096 } else { 8 });
        let candidates: Vec<_> = (0..length)
            .map(|_| any_candidate(&mut random, true))
            .collect();
        let mut weights = RoutingWeights {
            choices: random.below(5) as u32,
            ..RoutingWeights::default()
        };
        if round % 3 == 0 {
            weights.decode = odd_number(&mut random);
            weights.affinity_min = odd_number(&mut random);
            weights.affinity_penalty_ms = odd_number(&mut random);
            weights.stale_ms = odd_number(&mut random);
        }
        let seed = random.next();
        let choice = choose(&ASK, &candidates, &weights, seed).unwrap();
        assert_eq!(Some(choice), choose(&ASK, &candidates, &weights, seed));
        assert!(
            choice.index < length && choice.score_ms.is_finite(),
            "{choice:?}"
        );
        let speed = candidates[choice.index].ms_per_prefill_token;
        if !speed.is_finite() && weights.choices == 0 && choice.reason == Reason::LeastScore {
            panic!("{speed} won against {candidates:?}");
        }
    }
}

/// The rule of the module's head, written down once more with lists.
fn allowed(candidates: &[Candidate]) -> Vec<usize> {
    let weights = RoutingWeights::default();
    let is_free = |c: &Candidate| c.load() < u64::from(c.slots.unwrap_or(256));
    let any_free = candidates.iter().any(is_free);
    let fresh: Vec<f64> = candidates
        .iter()
        .filter(|c| c.metrics_age_ms.unwrap() <= 2_000.0)
        .map(|c| c.kv.unwrap())
        .collect();
    let mean = if fresh.is_empty() {
        0.0
    } else {
        fresh.iter().sum::<f64>() / fresh.len() as f64
    };
    let score = |c: &Candidate| {
        let todo = ASK.input_tokens.saturating_sub(c.prefix_tokens).max(1) + c.prefill_tokens;
        let (kv, stale) = if c.metrics_age_ms.unwrap() <= 2_000.0 {
            (c.kv.unwrap(), 0.0)
        } else {
            (mean, 1_000.0)
        };
        todo as f64 * c.ms_per_prefill_token + 500.0 * kv + 250.0 * f64::from(c.errors_1m) + stale
    };
    let field: Vec<usize> = (0..candidates.len())
        .filter(|i| !any_free || is_free(&candidates[*i]))
        .collect();
    let least = |of: &[usize]| {
        of.iter()
            .map(|i| score(&candidates[*i]))
            .fold(f64::INFINITY, f64::min)
    };
    let longest = field
        .iter()
        .map(|i| candidates[*i].prefix_tokens)
        .max()
        .unwrap();
    let near: Vec<usize> = field
        .iter()
        .copied()
        .filter(|i| candidates[*i].prefix_tokens == longest)
        .collect();
    let is_near = longest as f64 >= weights.affinity_min * 1_000.0
        && longest > 0
        && least(&near) - least(&field) <= 5_000.0;
    let from = if is_near { near } else { field };
    let line = least(&from) + TIE_MS.max(TIE_SHARE * least(&from));
    from.into_iter()
        .filter(|i| score(&candidates[*i]) < line)
        .collect()
}

#[test]
fn the_choice_is_always_one_that_the_rule_allows() {
    let mut random = SplitMix(23);
    for _ in 0..4_000 {
        let length = 1 + random.below(8);
        let candidates: Vec<_> = (0..length)
            .map(|_| any_candidate(&mut random, false))
            .collect();
        let choice = choose(&ASK, &candidates, &RoutingWeights::default(), random.next()).unwrap();
        let allowed = allowed(&candidates);
        assert!(
            allowed.contains(&choice.index),
            "{choice:?}, allowed {allowed:?} of {candidates:#?}"
        );
    }
}

#[test]
fn one_that_is_busy_is_passed_over_until_all_are_busy_or_full() {
    let busy = Candidate {
        busy: true,
        ..idle()
    };
    let loaded = Candidate {
        inflight: 200,
        prefill_tokens: 100_000,
        ..idle()
    };
    assert_eq!(chosen(&[busy, loaded]), (1, Reason::OnlyFree));
    assert_eq!(chosen(&[busy]), (0, Reason::OnlyOne));
    let full = Candidate {
        inflight: 256,
        prefill_tokens: 100_000,
        ..idle()
    };
    assert_eq!(chosen(&[busy, full]).0, 0);
}
