//! A stream costs what an answer that comes at once does.

use std::sync::Arc;

use super::{band, property, wide_gate};
use crate::flow::dispatch::{Arrival, Arrived, Dispatcher, Settled, Size, Unseen};
use crate::flow::lane::LaneFacts;
use crate::flow::slots::Slots;

const OUTPUT_COST: u64 = 2_000;
const INPUT_COST: u64 = 1_000;

#[test]
fn a_stream_costs_what_an_answer_that_comes_at_once_does() {
    property(500, |draws| {
        let requests: Vec<(usize, u64, u64, u64)> = (0..draws.whole(1, 40))
            .map(|_| {
                let (tenant, input, output) =
                    (draws.index(3), draws.whole(0, 1_000), draws.whole(1, 200));
                // How far it comes before its client leaves.
                (
                    tenant,
                    input,
                    output,
                    draws.pick(&[0, 1, output / 2, output, output]),
                )
            })
            .collect();
        let [streamed, at_once] = [true, false].map(|stream| settled(&requests, stream));
        for (one, other) in streamed.iter().zip(&at_once) {
            // Parts of an answer are rounded, each by less than one.
            let apart = one.0.abs_diff(other.0).max(one.1.abs_diff(other.1));
            assert!(apart <= requests.len() as u64, "{streamed:?} {at_once:?}");
        }
    });
}

/// What each tenant was charged, and what all of it took of its turns.
fn settled(requests: &[(usize, u64, u64, u64)], stream: bool) -> Vec<(u64, u64)> {
    let mut dispatcher = Dispatcher::new(&[band("only", 0.0, 0.0)]);
    dispatcher.set_gate(wide_gate());
    let facts = LaneFacts {
        open: true,
        ms_per_prefill_token: 0.5,
        kv: None,
    };
    dispatcher.add_lane(Arc::from("r"), Slots::new(None), facts);
    let tenants: Vec<Arc<str>> = (0..3).map(|at| Arc::from(format!("t{at}"))).collect();
    let mut costs = [0; 3];
    let mut now_ms = 0;
    for &(tenant, input, output, came) in requests {
        let arrival = Arrival {
            band: &band("only", 0.0, 0.0),
            tenant: &tenants[tenant],
            weight: 1.0,
            flow: None,
            size: Size {
                input_tokens: input,
                todo_tokens: input,
                first_cost: input * INPUT_COST,
                expected_cost: input * INPUT_COST + output * OUTPUT_COST,
                unseen: (!stream).then_some(Unseen {
                    cost: output * OUTPUT_COST,
                    ms: output as f64,
                }),
            },
            lane: 0,
            goes_first: false,
            stay_until_ms: 0,
        };
        let Arrived::Granted(mut grant) = dispatcher.arrive(&arrival, now_ms) else {
            panic!("there is room");
        };
        // A token a millisecond.
        now_ms += came;
        if stream {
            grant.charge(came * OUTPUT_COST);
        }
        let settled = match came == output {
            true => Settled::Cost(input * INPUT_COST + output * OUTPUT_COST),
            false => Settled::AsCharged,
        };
        costs[tenant] += dispatcher.release(grant, settled, now_ms);
    }
    // What was charged is counted at an account's next turn.
    for tenant in &tenants {
        let arrival = Arrival {
            band: &band("only", 0.0, 0.0),
            tenant,
            weight: 1.0,
            flow: None,
            size: Size::default(),
            lane: 0,
            goes_first: false,
            stay_until_ms: 0,
        };
        let Arrived::Granted(grant) = dispatcher.arrive(&arrival, now_ms) else {
            panic!("there is room");
        };
        dispatcher.release(grant, Settled::AsCharged, now_ms);
    }
    let time = |name: &str| {
        let tenants = dispatcher.tenants();
        let found = tenants[0].1.iter().find(|tenant| *tenant.name == *name);
        found.map_or(0, |tenant| tenant.time)
    };
    let times = tenants.iter().map(|name| time(name));
    costs.iter().copied().zip(times).collect()
}
