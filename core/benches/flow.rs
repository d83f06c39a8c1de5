//! `cargo bench -p llmgw-core --bench flow`: what admission, fairness and routing take of the processor for each request, as a table.
//!
//! Time is the thread's own processor time, and a figure is the median of some batches, so that a busy machine disturbs little.

use std::collections::{HashMap, VecDeque};
use std::hint::black_box;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use llmgw_core::flow::LaneFacts;
use llmgw_core::flow::dispatch::{Arrival, Arrived, Dispatcher, Grant, Settled, Size};
use llmgw_core::flow::queues::{Entered, Queues};
use llmgw_core::flow::slots::Slots;
use llmgw_core::flow::{ledger, tenant::TenantAccount};
use llmgw_core::routing::score::{self, Ask, Candidate};
use llmgw_plugins::{BandSpec, Gate, PolicySet, RequestView, RoutingWeights, TenantView};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use tokio::sync::oneshot;

const BATCHES: usize = 15;
const BATCH_TIME: Duration = Duration::from_millis(20);
const LANES: usize = 8;
const SLOTS: u32 = 64;
const INPUT_TOKENS: u64 = 500;
const OUTPUT_TOKENS: u64 = 256;
const FAST_MAX_NS: f64 = 5e3;
const QUEUED_MAX_NS: f64 = 15e3;

fn main() {
    let set = PolicySet::built_in();
    let mut over = 0;
    println!(
        "{:<50} {:>10} {:>7} {:>10}",
        "", "median", "ratio", "at most"
    );
    let mut rows = |what: &str, counts: &[usize], most: f64, run: &dyn Fn(usize) -> f64| {
        let mut first = None;
        for count in counts {
            let ns = run(*count);
            let ratio = ns / *first.get_or_insert(ns);
            let (target, verdict) = match most.is_nan() {
                true => (String::new(), ""),
                false if ns <= most => (time(most), ""),
                false => (time(most), "  OVER"),
            };
            over += usize::from(!verdict.is_empty());
            let name = format!("{what}{}", grouped(*count));
            println!(
                "{name:<50} {:>10} {ratio:>7.2} {target:>10}{verdict}",
                time(ns)
            );
        }
    };
    rows(
        "choice among 8 replicas, tenants: ",
        &[1],
        f64::NAN,
        &|_| choice(),
    );
    rows(
        "a request, no queue; tenants: ",
        &[10, 1_000, 10_000],
        FAST_MAX_NS,
        &|tenants| fast(&set, tenants),
    );
    rows(
        "a queued request, 20,000 wait; tenants: ",
        &[10, 1_000, 10_000],
        QUEUED_MAX_NS,
        &|tenants| queued(&set, tenants, 20_000),
    );
    rows(
        "a queued request, 1,000 tenants; waiting: ",
        &[10, 1_000, 100_000],
        QUEUED_MAX_NS,
        &|waiting| queued(&set, 1_000, waiting),
    );
    // Under the lock, ten times or once a second.
    rows(
        "tick: balance, 1,000 tenants; waiting: ",
        &[10, 1_000, 100_000],
        f64::NAN,
        &|waiting| {
            tick(1_000, waiting, &|full| {
                full.dispatcher.balance(5_000.0, full.now_ms)
            })
        },
    );
    rows(
        "tick: tidy, 1,000 wait; tenants: ",
        &[10, 1_000, 10_000],
        f64::NAN,
        &|tenants| tick(tenants, 1_000, &|full| full.dispatcher.tidy()),
    );
    if over > 0 {
        println!("{over} over their targets, which are for release builds on an idle machine");
    }
}

fn band() -> BandSpec {
    BandSpec {
        name: Arc::from("standard"),
        priority: 50.0,
        floor: 0.1,
        max_queue: u64::MAX,
        ttl_ms: 120_000,
        shed: None,
    }
}

fn bands() -> Vec<BandSpec> {
    let named = |name: &str, priority| BandSpec {
        name: Arc::from(name),
        priority,
        ..band()
    };
    vec![named("interactive", 100.0), band(), named("batch", 0.0)]
}

fn names(tenants: usize) -> Vec<Arc<str>> {
    (0..tenants)
        .map(|at| Arc::from(format!("tenant-{at}")))
        .collect()
}

fn accounts(tenants: usize) -> Vec<Arc<TenantAccount>> {
    let account = |name: Arc<str>| Arc::new(TenantAccount::open(&name));
    names(tenants).into_iter().map(account).collect()
}

fn ask() -> ledger::Ask {
    ledger::Ask {
        input_tokens: INPUT_TOKENS,
        output_tokens: OUTPUT_TOKENS,
        is_text: true,
    }
}

fn candidate(slots: &Slots) -> Candidate {
    Candidate {
        inflight: slots.inflight(),
        queued: slots.queued(),
        slots: slots.limit(),
        prefill_tokens: slots.prefill_tokens(),
        sent_tokens: slots.sent_tokens(),
        ..Candidate::default()
    }
}

fn choose(slots: &[Arc<Slots>], random: u64) -> usize {
    let candidates: Vec<Candidate> = slots.iter().map(|slots| candidate(slots)).collect();
    let ask = Ask {
        input_tokens: INPUT_TOKENS,
        est_output_tokens: OUTPUT_TOKENS,
    };
    let choice = score::choose(&ask, &candidates, &RoutingWeights::default(), random);
    choice.expect("there are replicas").index
}

fn classify(set: &PolicySet, tenant: &str, round: u64) {
    let request = RequestView {
        model: "example",
        path: "/v1/chat/completions",
        stream: true,
        input_tokens: INPUT_TOKENS,
        est_output_tokens: OUTPUT_TOKENS,
        n: 1,
        seed: round,
        ..RequestView::default()
    };
    let tenant = TenantView {
        name: tenant,
        band: "standard",
        best_band: "interactive",
        weight: 1.0,
        ..TenantView::default()
    };
    black_box(set.classify(&request, &tenant));
    black_box(set.key(&request, &tenant));
}

fn size() -> Size {
    Size {
        input_tokens: INPUT_TOKENS,
        todo_tokens: INPUT_TOKENS,
        first_cost: INPUT_TOKENS * 1_000,
        expected_cost: INPUT_TOKENS * 1_000 + OUTPUT_TOKENS * 2_000,
        unseen: None,
    }
}

fn facts() -> LaneFacts {
    LaneFacts {
        open: true,
        ms_per_prefill_token: 0.001,
        kv: None,
    }
}

fn choice() -> f64 {
    let slots: Vec<Arc<Slots>> = (0..LANES).map(|_| Slots::new(Some(SLOTS))).collect();
    median(&mut |round| {
        black_box(choose(&slots, round));
    })
}

/// Classified, chosen for, permitted, charged for each 8 tokens, settled.
fn fast(set: &PolicySet, tenants: usize) -> f64 {
    let queues = Queues::new(&bands());
    let slots: Vec<Arc<Slots>> = (0..LANES).map(|_| Slots::new(Some(SLOTS))).collect();
    let lanes: Vec<u32> = slots
        .iter()
        .enumerate()
        .map(|(at, slots)| {
            let lane = queues.lane(&Arc::from(at.to_string()), slots);
            queues.tell([(lane, facts())]);
            lane
        })
        .collect();
    let (accounts, band) = (accounts(tenants), band());
    // Each tenant is known, and owes something.
    let mut request = |round: u64| {
        let account = &accounts[(round as usize).wrapping_mul(7919) % tenants];
        classify(set, &account.name, round);
        let mut reservation = account.admit(ask()).expect("nothing limits it");
        let chosen = choose(&slots, round);
        let entered = queues.enter(&Arrival {
            band: &band,
            tenant: &account.name,
            weight: account.weight(),
            flow: None,
            size: size(),
            lane: lanes[chosen],
            goes_first: false,
            stay_until_ms: 0,
        });
        let Entered::Now(mut permit) = entered else {
            panic!("there is room");
        };
        reservation.sent();
        permit.first_byte();
        (0..OUTPUT_TOKENS).for_each(|_| permit.streamed(1));
        permit.settle(INPUT_TOKENS, 0, OUTPUT_TOKENS);
        account.used(permit.cost(), Duration::ZERO);
        reservation.settle(Some(INPUT_TOKENS), OUTPUT_TOKENS);
    };
    (0..2 * tenants as u64).for_each(&mut request);
    median(&mut request)
}

/// A pool whose slots are all taken.
struct Full {
    dispatcher: Dispatcher,
    slots: Vec<Arc<Slots>>,
    running: Vec<VecDeque<Grant>>,
    /// Who is told of its turn, as `Queues` keeps them.
    waiters: HashMap<u64, oneshot::Sender<u64>>,
    turns: HashMap<u64, oneshot::Receiver<u64>>,
    names: Vec<Arc<str>>,
    band: BandSpec,
    now_ms: u64,
}

impl Full {
    fn new(tenants: usize, waiting: usize) -> Full {
        let mut dispatcher = Dispatcher::new(&bands());
        dispatcher.set_gate(Gate {
            hold_ms: 1e9,
            kv_max: 0.9,
            inflight_max: None,
        });
        let slots: Vec<Arc<Slots>> = (0..LANES).map(|_| Slots::new(Some(SLOTS))).collect();
        for (at, slots) in slots.iter().enumerate() {
            dispatcher.add_lane(Arc::from(at.to_string()), slots.clone(), facts());
        }
        let mut full = Full {
            dispatcher,
            slots,
            running: (0..LANES).map(|_| VecDeque::new()).collect(),
            waiters: HashMap::new(),
            turns: HashMap::new(),
            names: names(tenants),
            band: band(),
            now_ms: 0,
        };
        let requests = LANES * SLOTS as usize + waiting;
        for round in 0..requests as u64 {
            full.arrive(round, round as usize % LANES);
        }
        full
    }

    fn arrive(&mut self, round: u64, lane: usize) {
        let tenant = &self.names[(round as usize).wrapping_mul(7919) % self.names.len()];
        let arrival = Arrival {
            band: &self.band,
            tenant,
            weight: 1.0,
            flow: None,
            size: size(),
            lane: lane as u32,
            goes_first: false,
            stay_until_ms: 0,
        };
        match self.dispatcher.arrive(&arrival, self.now_ms) {
            Arrived::Granted(grant) => self.running[lane].push_back(grant),
            Arrived::Queued { ticket, .. } => {
                let (tell, turn) = oneshot::channel();
                self.waiters.insert(ticket, tell);
                self.turns.insert(ticket, turn);
            }
            _ => panic!("there is room in the queue"),
        }
    }

    /// The oldest request on a replica ends, and the next one begins.
    fn end_one(&mut self, lane: usize) {
        let Some(mut grant) = self.running[lane].pop_front() else {
            return;
        };
        grant.first_byte();
        (0..OUTPUT_TOKENS / 8).for_each(|_| grant.charge(8 * 2_000));
        let cost = INPUT_TOKENS * 1_000 + OUTPUT_TOKENS * 2_000;
        self.dispatcher
            .release(grant, Settled::Cost(cost), self.now_ms);
        let mut granted = Vec::new();
        self.dispatcher.fill(lane as u32, self.now_ms, &mut granted);
        for (ticket, grant) in granted {
            self.running[lane].push_back(grant);
            if let Some(waiter) = self.waiters.remove(&ticket) {
                let _ = waiter.send(ticket);
            }
            black_box(self.turns.remove(&ticket));
        }
    }
}

/// Classified, chosen for, queued; later sent, charged for each 8 tokens, settled.
fn queued(set: &PolicySet, tenants: usize, waiting: usize) -> f64 {
    let full = Full::new(tenants, waiting);
    let slots = full.slots.clone();
    let (full, accounts) = (Mutex::new(full), accounts(tenants));
    median(&mut |round| {
        let account = &accounts[(round as usize).wrapping_mul(7919) % tenants];
        classify(set, &account.name, round);
        let mut reservation = account.admit(ask()).expect("nothing limits it");
        let lane = choose(&slots, round);
        full.lock().expect("one thread").arrive(round, lane);
        let mut full = full.lock().expect("one thread");
        full.now_ms += round % 2;
        full.end_one(lane);
        reservation.sent();
        account.used(1, Duration::ZERO);
        reservation.settle(Some(INPUT_TOKENS), OUTPUT_TOKENS);
    })
}

fn tick(tenants: usize, waiting: usize, run: &dyn Fn(&mut Full)) -> f64 {
    let mut full = Full::new(tenants, waiting);
    // Speeds are known, and everybody has been served.
    (0..LANES * SLOTS as usize).for_each(|round| full.end_one(round % LANES));
    full.now_ms = 1_000;
    median(&mut |_| run(&mut full))
}

/// The median of some batches, in ns a call.
fn median(call: &mut dyn FnMut(u64)) -> f64 {
    let mut round = 0;
    let mut batch = |calls: u64| {
        let start = processor_time();
        for _ in 0..calls {
            call(round);
            round += 1;
        }
        processor_time() - start
    };
    let mut calls = 1;
    while batch(calls) < BATCH_TIME {
        calls *= 2;
    }
    let mut times: Vec<f64> = (0..BATCHES)
        .map(|_| batch(calls).as_secs_f64() * 1e9 / calls as f64)
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// What this thread has had of the processor.
fn processor_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).expect("it can always be asked");
    let us = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(us as u64)
}

fn time(ns: f64) -> String {
    match ns {
        ..1e3 => format!("{ns:.0} ns"),
        ..1e6 => format!("{:.2} us", ns / 1e3),
        _ => format!("{:.2} ms", ns / 1e6),
    }
}

fn grouped(count: usize) -> String {
    match count {
        ..1_000 => count.to_string(),
        _ => format!("{},{:03}", count / 1_000, count % 1_000),
    }
}
