//! Who is served how much, where everybody always waits.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use llmgw_plugins::BandSpec;

use super::{Draws, band, property, wide_gate};
use crate::flow::dispatch::{Arrival, Arrived, Dispatcher, Grant, LAG_MAX, Settled, Size, Unseen};
use crate::flow::lane::LaneFacts;
use crate::flow::rotation::Ticket;
use crate::flow::slots::Slots;

/// Names of flows.
const KEYS: usize = 16;
/// Requests of each flow that wait at any time.
const BACKLOG: usize = 3;
const OUTPUT_COST: u64 = 2_000;
const INPUT_COST: u64 = 1_000;
const LOT_TOKENS: u64 = 8;
/// Prompt tokens are read ten times as fast as the price says, so that cost and time differ.
const MS_PER_LOT: u64 = 160;
const TOKENS_PER_MS: u64 = 10;

/// One flow that always has requests waiting.
#[derive(Clone, Debug)]
struct Flow {
    tenant: usize,
    key: Option<usize>,
    band: usize,
    weight: f64,
    input: (u64, u64),
    output: (u64, u64),
    /// Its requests come for this replica; absent: for any.
    lane: Option<u32>,
    stream: bool,
}

impl Flow {
    fn most(&self) -> (u64, u64) {
        (self.input.1 * INPUT_COST, self.output.1 * OUTPUT_COST)
    }
}

/// A pool whose flows never run out, on engines with a clock of their own.
struct Backlog<'d> {
    draws: &'d mut Draws,
    dispatcher: Dispatcher,
    bands: Vec<BandSpec>,
    flows: Vec<Flow>,
    tenants: Vec<Arc<str>>,
    keys: Vec<Arc<str>>,
    lanes: u32,
    now_ms: u64,
    /// By ticket: whose, and the tokens of its answer.
    waiting: std::collections::HashMap<Ticket, (usize, u64)>,
    running: BinaryHeap<Reverse<(u64, usize)>>,
    grants: Vec<Option<Running>>,
    /// A flow that is not kept waiting.
    lone: Option<usize>,
    /// What each flow was served.
    served: Vec<u64>,
}

struct Running {
    grant: Grant,
    flow: usize,
    left_tokens: u64,
}

impl<'d> Backlog<'d> {
    fn new(
        draws: &'d mut Draws,
        bands: &[BandSpec],
        flows: Vec<Flow>,
        lanes: u32,
        slots: u32,
    ) -> Backlog<'d> {
        let mut backlog = Backlog::empty(draws, bands, flows, lanes, slots);
        backlog.begin(backlog.flows.len());
        backlog
    }

    fn empty(
        draws: &'d mut Draws,
        bands: &[BandSpec],
        flows: Vec<Flow>,
        lanes: u32,
        slots: u32,
    ) -> Backlog<'d> {
        let mut dispatcher = Dispatcher::new(bands);
        dispatcher.set_gate(wide_gate());
        for lane in 0..lanes {
            let facts = LaneFacts {
                open: true,
                ms_per_prefill_token: 1.0 / TOKENS_PER_MS as f64,
                kv: None,
            };
            dispatcher.add_lane(Arc::from(lane.to_string()), Slots::new(Some(slots)), facts);
        }
        Backlog {
            draws,
            dispatcher,
            bands: bands.to_vec(),
            lone: None,
            served: vec![0; flows.len()],
            tenants: (0..flows.len())
                .map(|at| Arc::from(format!("t{at}")))
                .collect(),
            keys: (0..KEYS).map(|at| Arc::from(format!("k{at}"))).collect(),
            flows,
            lanes,
            now_ms: 0,
            waiting: std::collections::HashMap::new(),
            running: BinaryHeap::new(),
            grants: Vec::new(),
        }
    }

    /// One replica, and a last flow that asks only when it is told to.
    fn without_last(
        draws: &'d mut Draws,
        bands: &[BandSpec],
        flows: Vec<Flow>,
        slots: u32,
    ) -> Backlog<'d> {
        let backlogged = flows.len() - 1;
        let mut backlog = Backlog::empty(draws, bands, flows, 1, slots);
        backlog.lone = Some(backlogged);
        backlog.begin(backlogged);
        backlog
    }

    fn begin(&mut self, flows: usize) {
        for flow in 0..flows {
            while self.waiting_of(flow) < BACKLOG {
                self.push(flow);
            }
        }
        self.fill();
    }

    fn waiting_of(&self, flow: usize) -> usize {
        let of = self.waiting.values().filter(|(other, _)| *other == flow);
        of.count()
    }

    fn push(&mut self, flow: usize) {
        let plan = &self.flows[flow];
        let input = self.draws.whole(plan.input.0, plan.input.1);
        let output = self.draws.whole(plan.output.0, plan.output.1);
        let lane = match plan.lane {
            Some(lane) => lane,
            None => self.draws.whole(0, u64::from(self.lanes) - 1) as u32,
        };
        let arrival = Arrival {
            band: &self.bands[plan.band],
            tenant: &self.tenants[plan.tenant],
            weight: plan.weight,
            flow: plan.key.map(|key| &self.keys[key]),
            size: Size {
                input_tokens: input,
                todo_tokens: input,
                first_cost: input * INPUT_COST,
                expected_cost: input * INPUT_COST + output * OUTPUT_COST,
                unseen: (!plan.stream).then_some(Unseen {
                    cost: output * OUTPUT_COST,
                    ms: 1.0,
                }),
            },
            lane,
            goes_first: false,
            stay_until_ms: 0,
        };
        match self.dispatcher.arrive(&arrival, self.now_ms) {
            Arrived::Queued { ticket, .. } => {
                self.waiting.insert(ticket, (flow, output));
            }
            Arrived::Granted(grant) => self.run(grant, flow, output),
            _ => panic!("there is room in the queue"),
        }
    }

    fn run(&mut self, grant: Grant, flow: usize, tokens: u64) {
        let first = grant.charged();
        self.served[flow] += first;
        let input = if self.flows[flow].stream {
            first
        } else {
            first - tokens * OUTPUT_COST
        } / INPUT_COST;
        let at = self.now_ms + input / TOKENS_PER_MS + MS_PER_LOT;
        self.running.push(Reverse((at, self.grants.len())));
        self.grants.push(Some(Running {
            grant,
            flow,
            left_tokens: tokens,
        }));
    }

    fn fill(&mut self) {
        let mut granted = Vec::new();
        self.dispatcher.fill_all(self.now_ms, &mut granted);
        for (ticket, grant) in granted {
            let (flow, tokens) = self.waiting.remove(&ticket).unwrap();
            self.run(grant, flow, tokens);
            if self.lone != Some(flow) {
                self.push(flow);
            }
        }
    }

    /// The next tokens of some request.
    fn step(&mut self) {
        let Reverse((at, id)) = self.running.pop().unwrap();
        self.now_ms = at;
        let running = self.grants[id].as_mut().unwrap();
        let lot = running.left_tokens.min(LOT_TOKENS);
        running.left_tokens -= lot;
        if self.flows[running.flow].stream {
            running.grant.charge(lot * OUTPUT_COST);
            self.served[running.flow] += lot * OUTPUT_COST;
        }
        if running.left_tokens > 0 {
            self.running.push(Reverse((at + MS_PER_LOT, id)));
            return;
        }
        let running = self.grants[id].take().unwrap();
        let cost = running.grant.charged();
        self.dispatcher
            .release(running.grant, Settled::Cost(cost), at);
        self.fill();
    }

    fn tenant_served(&self, tenant: usize) -> f64 {
        let flows = self.flows.iter().zip(&self.served);
        let own = flows.filter(|(flow, _)| flow.tenant == tenant);
        own.map(|(flow, served)| *served as f64 / flow.weight).sum()
    }

    /// How far two are apart at most, in any window of so many steps.
    fn spread(&mut self, steps: usize, of: impl Fn(&Backlog<'_>) -> f64) -> f64 {
        let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
        for _ in 0..steps {
            self.step();
            let apart = of(self);
            (least, most) = (least.min(apart), most.max(apart));
        }
        most - least
    }
}

/// What one tenant may be ahead of another one on engines with so many slots: twice what can be sent, or generated
/// for it, before it counts.
fn bound(flows: &[Flow], slots: u32) -> f64 {
    let most = flows.iter().map(|flow| {
        let (first, output) = flow.most();
        (first as f64 + f64::from(slots) * output as f64) / flow.weight
    });
    2.0 * most.fold(0.0, f64::max)
}

fn sizes(draws: &mut Draws) -> ((u64, u64), (u64, u64)) {
    let input = draws.pick(&[(1, 50), (100, 100), (500, 4_000), (4_000, 8_000)]);
    let output = draws.pick(&[(1, 8), (50, 100), (200, 400)]);
    (input, output)
}

/// Two tenants; one of them may be split into flows.
fn two_tenants(draws: &mut Draws) -> Vec<Flow> {
    let mut flows = Vec::new();
    for tenant in 0..2 {
        let weight = draws.pick(&[0.5, 1.0, 1.0, 4.0]);
        let keys = if draws.chance(40) {
            draws.whole(2, 6) as usize
        } else {
            1
        };
        for key in 0..keys {
            let (input, output) = sizes(draws);
            flows.push(Flow {
                tenant,
                key: (keys > 1).then_some(key),
                band: 0,
                weight,
                input,
                output,
                lane: None,
                stream: draws.chance(70),
            });
        }
    }
    flows
}

#[test]
fn two_tenants_on_one_replica_are_never_far_apart_however_they_split_their_requests() {
    property(600, |draws| {
        let flows = two_tenants(draws);
        let slots = draws.pick(&[1, 2, 8]);
        let bound = bound(&flows, slots);
        let mut backlog = Backlog::new(draws, &[band("only", 0.0, 0.0)], flows, 1, slots);
        let spread = backlog.spread(600, |backlog| {
            backlog.tenant_served(0) - backlog.tenant_served(1)
        });
        assert!(spread <= bound, "{spread} > {bound}: {:?}", backlog.flows);
    });
}

#[test]
fn two_flows_of_a_tenant_on_one_replica_are_never_far_apart() {
    property(300, |draws| {
        let mut flows = two_tenants(draws);
        for key in 0..2 {
            let (input, output) = sizes(draws);
            let own = Flow {
                tenant: 2,
                key: Some(10 + key),
                weight: 1.0,
                input,
                output,
                ..flows[0].clone()
            };
            flows.push(own);
        }
        let at = flows.len() - 2;
        let slots = draws.pick(&[1, 2, 8]);
        let bound = bound(&flows[at..], slots);
        let mut backlog = Backlog::new(draws, &[band("only", 0.0, 0.0)], flows, 1, slots);
        let spread = backlog.spread(1_000, |backlog| {
            backlog.served[at] as f64 - backlog.served[at + 1] as f64
        });
        assert!(
            spread <= bound,
            "{spread} > {bound}: {:?}",
            &backlog.flows[at..]
        );
    });
}

#[test]
fn two_tenants_over_a_pool_are_never_further_apart_than_the_lag_that_is_let() {
    property(400, |draws| {
        let lanes = draws.whole(2, 4) as u32;
        let mut flows = two_tenants(draws);
        for flow in &mut flows {
            // Each stays with a replica of its own: where its prefixes are.
            flow.lane = draws.chance(80).then_some(flow.tenant as u32);
        }
        let slots = draws.pick(&[1, 4]);
        // Either may be ahead by the lag, one after the other.
        let bound = 2.0 * LAG_MAX as f64 + bound(&flows, slots * lanes);
        let mut backlog = Backlog::new(draws, &[band("only", 0.0, 0.0)], flows, lanes, slots);
        let spread = backlog.spread(1_500, |backlog| {
            backlog.tenant_served(0) - backlog.tenant_served(1)
        });
        assert!(spread <= bound, "{spread} > {bound}: {:?}", backlog.flows);
    });
}

fn flow(tenant: usize, band: usize, input: u64, output: u64) -> Flow {
    Flow {
        tenant,
        key: None,
        band,
        weight: 1.0,
        input: (input, input),
        output: (output, output),
        lane: None,
        stream: true,
    }
}

#[test]
fn a_backlogged_band_gets_its_floor() {
    property(30, |draws| {
        let bands = [
            band("high", 9.0, 0.0),
            band("middle", 5.0, draws.pick(&[0.0, 0.1, 0.3])),
            band("low", 0.0, draws.pick(&[0.02, 0.1, 0.3])),
        ];
        let flows: Vec<Flow> = (0..3)
            .map(|band| {
                let (input, output) = (draws.whole(10, 400), draws.whole(5, 40));
                flow(band, band, input, output)
            })
            .collect();
        let slots = draws.pick(&[2, 8]);
        let largest = flows.iter().map(|flow| flow.most().0 + flow.most().1).max();
        let mut backlog = Backlog::new(draws, &bands, flows, 1, slots);
        // The window of a share is full from here on.
        while backlog.now_ms < 20_000 {
            backlog.step();
        }
        let before = backlog.served.clone();
        let until = backlog.now_ms + 100_000;
        while backlog.now_ms < until {
            backlog.step();
        }
        let got: Vec<u64> = (0..3)
            .map(|band| backlog.served[band] - before[band])
            .collect();
        let all: u64 = got.iter().sum();
        // What has been sent and is not generated yet, at both ends.
        let rest = 2 * u64::from(slots) * largest.unwrap_or(0);
        for (band, got) in bands.iter().zip(&got) {
            let due = band.floor * all as f64 - rest as f64;
            assert!(
                *got as f64 >= due,
                "{}: {got} of {all}, floor {}",
                band.name,
                band.floor
            );
        }
        let floors: f64 = bands.iter().map(|band| band.floor).sum();
        // A band below its floor gets a whole request.
        let most = 0.9 * (1.0 - floors) * all as f64 - rest as f64;
        assert!(
            got[0] as f64 >= most,
            "the rest is the highest band's: {got:?} of {all}"
        );
    });
}

/// What a tenant under its share may wait for: that the request which runs longest ends, and one turn of each other.
#[test]
fn a_tenant_under_its_share_waits_a_bounded_time_whatever_others_send() {
    property(80, |draws| {
        let others = draws.whole(1, 5) as usize;
        let mut flows: Vec<Flow> = (0..others)
            .map(|tenant| {
                let (input, output) = sizes(draws);
                Flow {
                    input,
                    output,
                    stream: draws.chance(70),
                    ..flow(tenant, 0, 1, 1)
                }
            })
            .collect();
        let slots = draws.pick(&[1, 2, 4]);
        let longest_ms = flows
            .iter()
            .map(|flow| {
                flow.input.1 / TOKENS_PER_MS
                    + flow.output.1.div_ceil(LOT_TOKENS).max(1) * MS_PER_LOT
            })
            .max()
            .unwrap();
        // A lone request, as large as theirs or smaller; never more than one of it waits.
        let (input, output) = (
            draws.whole(1, flows[0].input.1),
            draws.whole(1, flows[0].output.1),
        );
        flows.push(flow(others, 0, input, output));
        let mut backlog = Backlog::without_last(draws, &[band("only", 0.0, 0.0)], flows, slots);
        let turns = (others as u64).div_ceil(u64::from(slots)) + 1;
        let every_ms = 2 * (turns + 1) * longest_ms * others as u64;
        for _ in 0..3 {
            let until = backlog.now_ms + every_ms;
            while backlog.now_ms < until {
                backlog.step();
            }
            let came_ms = backlog.now_ms;
            backlog.push(others);
            while backlog.waiting_of(others) > 0 {
                backlog.step();
            }
            let waited = backlog.now_ms - came_ms;
            assert!(
                waited <= turns * longest_ms,
                "{waited} of {longest_ms} each: {:?}",
                backlog.flows
            );
        }
    });
}
