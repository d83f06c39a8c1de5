//! Thousands of clients at once on four engines: each is answered as it must be, and nothing is left of them.
//!
//! `LLMGW_LOAD_CLIENTS=10000` makes the crowd larger.

#[path = "harness/crowd.rs"]
mod crowd;
mod harness;
#[path = "harness/more.rs"]
mod more;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fake_engine::{Kind, Running};
use serde_json::Value;
use tokio::runtime::Runtime;

use crowd::{Door, Got};
use harness::{Gateway, PATIENCE, Setup};
use more::engine;

const CLIENTS: usize = 2_048;
const ENGINES: usize = 4;
const SLOTS: usize = 64;
/// More than ever wait here.
const QUEUE_MAX: usize = 100_000;
/// What a crowd that comes once more may add for each client, in KiB: less than its connection, its request or its task holds.
const GROWTH_PER_CLIENT_MAX_KIB: u64 = 2;
/// How often it may come until that is so: the allocator takes a few rounds to find its size, a leak grows in every one.
const ROUNDS_MAX: usize = 10;
/// What one waiting client may take, in KiB: its connection's buffers, its request, its place in the queue.
const WAITING_CLIENT_MAX_KIB: u64 = 64;
/// How long a crowd may take to come, in a debug build on a busy machine.
const CROWD_PATIENCE: Duration = Duration::from_secs(60);
/// A stream that has begun and never ends.
const HOLDS: &str = r#"{"die_after":1,"how":"stall"}"#;

/// A gateway over four engines, in whose only band so many may wait.
struct Fleet {
    engines: Vec<Running>,
    gateway: Gateway,
    clients: usize,
    runtime: Runtime,
}

impl Fleet {
    fn start(queue_max: usize) -> Fleet {
        let engines: Vec<Running> = (0..ENGINES).map(|_| engine(Kind::Vllm, "{}")).collect();
        let admission = format!(
            "local M = {{ api = 1 }}\nfunction M.bands(pool)\n  return {{ {{ name = 'standard', priority = 0, floor = 0, \
             max_queue = {queue_max}, ttl_ms = 600000 }} }}\nend\nreturn M\n"
        );
        let mut setup = Setup::new()
            .top("policies: policies")
            .file("policies/admission.lua", &admission)
            .model("fake", "");
        for engine in &engines {
            setup = setup.endpoint("vllm", &engine.url(), &format!("slots: {SLOTS}"));
        }
        let gateway = setup.start();
        gateway.ready("fake", ENGINES);
        let clients = std::env::var("LLMGW_LOAD_CLIENTS");
        Fleet {
            engines,
            gateway,
            clients: clients.map_or(CLIENTS, |count| count.parse().unwrap()),
            runtime: Runtime::new().unwrap(),
        }
    }

    /// A connection for each client, where there are file descriptors enough.
    fn door(&self) -> Arc<Door> {
        let addr = self.gateway.addr;
        Arc::new(match crowd::fits_http1(self.clients) {
            true => Door::Http1(addr),
            false => self.runtime.block_on(Door::http2(addr, self.clients)),
        })
    }

    /// Takes every slot of every engine, until what is returned is dropped.
    fn hold(&self) -> Vec<crowd::Begun> {
        let door = Door::Http1(self.gateway.addr);
        let held = (0..ENGINES * SLOTS).map(|number| {
            let begun = self
                .runtime
                .block_on(door.begin(number, crowd::chat(true, HOLDS)));
            begun.unwrap()
        });
        let held: Vec<_> = held.collect();
        for row in self.gateway.replicas() {
            assert_eq!(row["inflight"], SLOTS, "{row}");
        }
        held
    }

    /// The crowd asks, half of it for streams, and everybody is answered.
    fn serve(&self, door: &Arc<Door>) {
        let began = Instant::now();
        let answers = self.runtime.block_on(async {
            let ask = |number: usize| crowd::chat(number.is_multiple_of(2), "");
            let mut answers = crowd::send(door, self.clients, ask);
            crowd::next(&mut answers, self.clients).await
        });
        answers.iter().for_each(assert_answered);
        println!("{} clients in {:?}", self.clients, began.elapsed());
        self.nothing_is_left();
    }

    /// Waits until the whole crowd waits for a slot.
    fn all_wait(&self) {
        let deadline = Instant::now() + CROWD_PATIENCE;
        let queued = |row: &Value| row["queued"].as_u64().unwrap();
        loop {
            let rows = self.gateway.replicas();
            let count: u64 = rows.iter().map(queued).sum();
            if count == self.clients as u64 {
                return;
            }
            assert!(Instant::now() < deadline, "{count} wait");
        }
    }

    fn nothing_is_left(&self) {
        self.gateway.counters_are_zero();
        for engine in &self.engines {
            engine.wait(PATIENCE, |state| state.open == 0).unwrap();
        }
    }

    /// What the engines were asked for so far.
    fn asked(&self) -> u64 {
        more::calls(&self.engines)
    }
}

fn assert_answered(got: &Got) {
    assert!(got.is_ok(), "{got:?}");
}

/// Many clients at once, again and again, over connections of their own or shared ones.
fn serve_again_and_again(fleet: &Fleet, door: &Arc<Door>) {
    let rounds = until_no_more_memory_is_taken(fleet, || fleet.serve(door));
    assert_eq!(fleet.asked(), (rounds * fleet.clients) as u64);
    for engine in &fleet.engines {
        let peak = engine.state().peak_open;
        assert!(peak <= SLOTS as u64, "{peak} at once on {SLOTS} slots");
    }
}

/// Has the same crowd come until it adds next to nothing to the gateway's memory; how often it came.
fn until_no_more_memory_is_taken(fleet: &Fleet, mut crowd_comes: impl FnMut()) -> usize {
    crowd_comes();
    let mut sizes_kib = vec![fleet.gateway.rss_kib()];
    let most_kib = fleet.clients as u64 * GROWTH_PER_CLIENT_MAX_KIB;
    for round in 2..=ROUNDS_MAX {
        crowd_comes();
        let (before, after) = (sizes_kib[round - 2], fleet.gateway.rss_kib());
        sizes_kib.push(after);
        if after <= before + most_kib {
            println!("memory after each round, in KiB: {sizes_kib:?}");
            return round;
        }
    }
    panic!("every round takes more memory, in KiB: {sizes_kib:?}");
}

#[test]
fn thousands_of_clients_are_all_answered_and_the_same_again_takes_no_more_memory() {
    let fleet = Fleet::start(QUEUE_MAX);
    serve_again_and_again(&fleet, &fleet.door());
}

#[test]
fn thousands_of_streams_on_a_few_connections_are_all_answered() {
    let fleet = Fleet::start(QUEUE_MAX);
    let door = fleet
        .runtime
        .block_on(Door::http2(fleet.gateway.addr, fleet.clients));
    serve_again_and_again(&fleet, &Arc::new(door));
}

#[test]
fn as_many_wait_as_the_band_allows_and_exactly_the_others_are_refused_at_once() {
    let waiting = CLIENTS / 4;
    let fleet = Fleet::start(waiting);
    let held = fleet.hold();
    let door = fleet.door();
    let (answers, refused) = fleet.runtime.block_on(async {
        let mut answers = crowd::send(&door, fleet.clients, |number| {
            crowd::chat(number.is_multiple_of(2), "")
        });
        let refused = crowd::next(&mut answers, fleet.clients - waiting).await;
        (answers, refused)
    });
    for got in &refused {
        assert_eq!((got.status, &*got.code), (429, "queue_full"), "{got:?}");
        let seconds: u64 = got.headers["retry-after"]
            .to_str()
            .unwrap()
            .parse()
            .unwrap();
        assert!((1..=60).contains(&seconds), "{got:?}");
    }
    fleet.gateway.queued(waiting as u64);
    assert!(answers.is_empty(), "a waiting client was answered");
    drop(held);
    let mut answers = answers;
    let answered = fleet.runtime.block_on(crowd::next(&mut answers, waiting));
    answered.iter().for_each(assert_answered);
    assert_eq!(fleet.asked(), (ENGINES * SLOTS + waiting) as u64);
    fleet.nothing_is_left();
}

#[test]
fn thousands_of_clients_that_leave_the_queue_at_once_reach_no_engine_and_give_their_memory_back() {
    let fleet = Fleet::start(QUEUE_MAX);
    let held = fleet.hold();
    let door = fleet.door();
    let empty = fleet.gateway.rss_kib();
    let mut waiting = Vec::new();
    until_no_more_memory_is_taken(&fleet, || {
        let ask = |number: usize| crowd::chat(number.is_multiple_of(2), "");
        let answers = fleet
            .runtime
            .block_on(async { crowd::send(&door, fleet.clients, ask) });
        fleet.all_wait();
        waiting.push(fleet.gateway.rss_kib());
        drop(answers);
        fleet.gateway.queued(0);
    });
    let first = waiting[0];
    let most = empty + fleet.clients as u64 * WAITING_CLIENT_MAX_KIB;
    assert!(first <= most, "{empty} KiB, {first} KiB when all wait");
    drop(held);
    fleet.nothing_is_left();
    assert_eq!(fleet.asked(), (ENGINES * SLOTS) as u64);
}
