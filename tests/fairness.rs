//! Who goes next, seen by the engines behind the real binary: tenants, bands, places in a queue, and what becomes of those who wait.
//!
//! A stream that never ends holds a slot until all who compete for it wait. What is asserted then is the order in which the engine
//! gets them, never a time.

mod harness;
#[path = "harness/more.rs"]
mod more;

use std::time::Duration;

use fake_engine::process::{Process, beside_this_test};
use fake_engine::{Kind, RequestView, Running, StateView};
use serde_json::json;
use sha2::{Digest, Sha256};

use harness::{Client, End, Gateway, PATIENCE, Setup, data};
use more::{assert_ok, at_once, await_records, chat_of, engine, record_of};

const CHAT: &str = "/v1/chat/completions";
/// A stream that has begun and never ends.
const HOLDS: &str = r#"{"die_after":1,"how":"stall"}"#;

/// One request, named so that the engine's record of it can be told from others.
#[derive(Clone, Copy)]
struct Ask<'a> {
    mark: &'a str,
    key: &'a str,
    band: &'a str,
    /// Of the prompt, beside the mark.
    words: usize,
    stream: bool,
    fake: &'a str,
}

impl Default for Ask<'_> {
    fn default() -> Self {
        Ask {
            mark: "",
            key: "",
            band: "",
            words: 2,
            stream: false,
            fake: "{}",
        }
    }
}

impl Ask<'_> {
    fn send(&self, gateway: &Gateway) -> Client {
        let prompt = format!("[{}]{}", self.mark, " word".repeat(self.words));
        let body = json!({"model": "fake", "stream": self.stream, "messages": [{"role": "user", "content": prompt}]});
        let bearer = format!("Bearer {}", self.key);
        let mut headers = vec![
            ("content-type", "application/json"),
            ("x-request-id", self.mark),
            ("x-llmgw-debug", "1"),
            ("x-fake", self.fake),
        ];
        if !self.key.is_empty() {
            headers.push(("authorization", &bearer));
        }
        if !self.band.is_empty() {
            headers.push(("x-llmgw-band", self.band));
        }
        let mut client = gateway.client();
        client.request("POST", CHAT, &headers, body.to_string().as_bytes());
        client
    }

    /// Sends it when others wait already, and returns when it waits too.
    fn queue(&self, gateway: &Gateway, others: usize) -> Client {
        let client = self.send(gateway);
        gateway.queued(others as u64 + 1);
        client
    }

    /// Sends it as a stream that has a slot until it is dropped.
    fn hold(&self, gateway: &Gateway) -> Client {
        let held = Ask {
            stream: true,
            fake: HOLDS,
            ..*self
        };
        let mut client = held.send(gateway);
        assert_eq!(client.head().status, 200);
        client.body_until("data:");
        client
    }
}

/// Queues requests of one kind, in this order.
fn queue_all(gateway: &Gateway, others: usize, marks: &[String], ask: Ask<'_>) -> Vec<Client> {
    let queue = |(number, mark): (usize, &String)| {
        let ask = Ask { mark, ..ask };
        ask.queue(gateway, others + number)
    };
    marks.iter().enumerate().map(queue).collect()
}

fn marks(name: &str, count: usize) -> Vec<String> {
    (0..count)
        .map(|number| format!("{name}-{number:02}"))
        .collect()
}

fn mark_of(request: &RequestView) -> String {
    let body = request.body.as_deref().unwrap();
    let (_, rest) = body.split_once('[').unwrap();
    let (_, rest) = rest.split_once('[').unwrap();
    rest.split_once(']').unwrap().0.to_owned()
}

/// The marks of all requests in the order in which the engine got them, without those that held its slots.
fn order(state: &StateView) -> Vec<String> {
    let marks = state.last.iter().map(mark_of);
    marks.filter(|mark| !mark.starts_with("holder")).collect()
}

fn all_answered(clients: Vec<Client>) {
    let answers: Vec<_> = clients
        .into_iter()
        .map(|mut client| client.answer())
        .collect();
    assert_ok(&answers);
}

/// Where in the order those of this name are, from 1.
fn positions(order: &[String], name: &str) -> Vec<usize> {
    let numbered = order.iter().zip(1..);
    numbered
        .filter(|(mark, _)| mark.starts_with(name))
        .map(|(_, at)| at)
        .collect()
}

/// Tenants whose keys are their names.
fn tenants(tenants: &[(&str, &str)]) -> String {
    let line = |(name, more): &(&str, &str)| {
        let digest = Sha256::digest(name.as_bytes());
        let hash: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("\n  - {{name: {name}, keys: [\"sha256:{hash}\"], {more}}}")
    };
    let lines: String = tenants.iter().map(line).collect();
    format!("tenants:{lines}")
}

/// A policy with these bands, highest first: name, how many may wait, how long in milliseconds.
fn bands(bands: &[(&str, usize, u64)]) -> String {
    let line = |(number, (name, max_queue, ttl_ms)): (usize, &(&str, usize, u64))| {
        let priority = 100 - number;
        format!(
            "    {{ name = '{name}', priority = {priority}, floor = 0, max_queue = {max_queue}, ttl_ms = {ttl_ms} }},\n"
        )
    };
    let lines: String = bands.iter().enumerate().map(line).collect();
    format!(
        "local M = {{ api = 1 }}\nfunction M.bands(pool)\n  return {{\n{lines}  }}\nend\nreturn M\n"
    )
}

/// A gateway over one engine with one slot.
fn over(setup: Setup, engine: &Running) -> Gateway {
    let gateway = setup
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "slots: 1")
        .start();
    gateway.ready("fake", 1);
    gateway
}

fn with_bands(specs: &[(&str, usize, u64)]) -> Setup {
    Setup::new()
        .top("policies: policies")
        .file("policies/admission.lua", &bands(specs))
}

#[test]
fn a_light_tenant_waits_for_no_more_than_one_request_of_a_heavy_one_at_each_of_its_own() {
    let engine = engine(Kind::Vllm, "{}");
    let setup = Setup::new().top(&tenants(&[("heavy", "weight: 1"), ("light", "weight: 1")]));
    let gateway = over(setup, &engine);
    let heavy = Ask {
        key: "heavy",
        words: 300,
        ..Ask::default()
    };
    let light = Ask {
        key: "light",
        words: 10,
        ..Ask::default()
    };
    let held = Ask {
        mark: "holder",
        ..heavy
    }
    .hold(&gateway);
    let mut clients = queue_all(&gateway, 0, &marks("heavy", 40), heavy);
    clients.extend(queue_all(&gateway, 40, &marks("light", 4), light));
    drop(held);
    all_answered(clients);
    let order = order(&engine.state());
    for (at, nth) in positions(&order, "light").into_iter().zip(1..) {
        assert!(
            at <= 2 * nth,
            "the light tenant's request {nth} was number {at}: {order:?}"
        );
    }
    // Those of one tenant go in the order in which they came.
    let of_heavy: Vec<&String> = order
        .iter()
        .filter(|mark| mark.starts_with("heavy"))
        .collect();
    assert!(of_heavy.is_sorted(), "{order:?}");
}

#[test]
fn tenants_are_served_by_their_weights() {
    let engine = engine(Kind::Vllm, "{}");
    let setup = Setup::new().top(&tenants(&[("one", "weight: 1"), ("three", "weight: 3")]));
    let gateway = over(setup, &engine);
    let of = |key| Ask {
        key,
        ..Ask::default()
    };
    let held = Ask {
        mark: "holder",
        ..of("one")
    }
    .hold(&gateway);
    let mut clients = queue_all(&gateway, 0, &marks("one", 20), of("one"));
    clients.extend(queue_all(&gateway, 20, &marks("three", 20), of("three")));
    drop(held);
    all_answered(clients);
    let order = order(&engine.state());
    let served = positions(&order[..20], "three").len();
    assert!(
        (14..=17).contains(&served),
        "{served} of the first 20: {order:?}"
    );
}

#[test]
fn an_interactive_request_goes_next_when_a_slot_is_free_whatever_batch_has_queued() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = over(Setup::new(), &engine);
    let batch = Ask {
        band: "batch",
        words: 300,
        ..Ask::default()
    };
    let held = Ask {
        mark: "holder",
        ..batch
    }
    .hold(&gateway);
    let mut clients = queue_all(&gateway, 0, &marks("batch", 30), batch);
    let urgent = Ask {
        mark: "urgent",
        band: "interactive",
        ..Ask::default()
    };
    clients.push(urgent.queue(&gateway, 30));
    drop(held);
    all_answered(clients);
    let order = order(&engine.state());
    assert_eq!(order[0], "urgent", "{order:?}");
    assert_eq!(order.len(), 31);
}

#[test]
fn an_interactive_flood_leaves_batch_its_floor() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = over(Setup::new(), &engine);
    let of = |band| Ask {
        band,
        ..Ask::default()
    };
    let held = Ask {
        mark: "holder",
        ..of("interactive")
    }
    .hold(&gateway);
    let mut clients = queue_all(&gateway, 0, &marks("flood", 30), of("interactive"));
    clients.extend(queue_all(&gateway, 30, &marks("batch", 2), of("batch")));
    drop(held);
    all_answered(clients);
    let order = order(&engine.state());
    // It had nothing of the last 10 s; with one request it has more than its 2 %, and the flood goes on.
    // A machine so slow that the 10 s are over sooner ends in between.
    let batch = positions(&order, "batch");
    assert!(batch[0] == 1 && batch[1] > 20, "{order:?}");
}

#[test]
fn a_client_that_leaves_the_queue_frees_its_place_for_another() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = over(with_bands(&[("standard", 3, 600_000)]), &engine);
    let ask = |mark| Ask {
        mark,
        ..Ask::default()
    };
    let held = ask("holder").hold(&gateway);
    let mut clients = queue_all(&gateway, 0, &marks("first", 3), Ask::default());
    let refused = ask("refused").send(&gateway).answer();
    assert_eq!((refused.status(), &*refused.code()), (429, "queue_full"));
    let retry_after: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&retry_after), "{retry_after}");
    drop(clients.remove(1));
    gateway.queued(2);
    clients.push(ask("second").queue(&gateway, 2));
    let refused = ask("refused").send(&gateway).answer();
    assert_eq!((refused.status(), &*refused.code()), (429, "queue_full"));
    drop(held);
    all_answered(clients);
    assert_eq!(order(&engine.state()), ["first-00", "first-02", "second"]);
    gateway.counters_are_zero();
}

#[test]
fn each_band_has_its_own_bound_and_its_own_time_to_wait() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = over(
        with_bands(&[("quick", 1, 300), ("patient", 1, 600_000)]),
        &engine,
    );
    let of = |mark, band| Ask {
        mark,
        band,
        ..Ask::default()
    };
    let held = of("holder", "patient").hold(&gateway);
    let mut patient = of("patient", "patient").queue(&gateway, 0);
    let refused = of("refused", "patient").send(&gateway).answer();
    assert_eq!((refused.status(), &*refused.code()), (429, "queue_full"));
    // The other band's place is free, and its request gives up by itself.
    let late = of("quick", "quick").send(&gateway).answer();
    assert_eq!(
        (late.status(), &*late.code()),
        (503, "queue_timeout"),
        "{}",
        late.text()
    );
    assert!(late.header("retry-after").is_some());
    gateway.queued(1);
    drop(held);
    assert_ok(&[patient.answer()]);
    assert_eq!(order(&engine.state()), ["patient"]);
}

#[test]
fn the_debug_headers_say_the_band_how_long_a_request_waited_and_behind_how_many() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = over(Setup::new(), &engine);
    let of = |mark, band| Ask {
        mark,
        band,
        ..Ask::default()
    };
    let at_once = of("at-once", "batch").send(&gateway).answer();
    assert_eq!(at_once.header("x-llmgw-band"), Some("batch"));
    assert_eq!(at_once.header("x-llmgw-queue-ahead"), Some("0"));
    let held = of("holder", "batch").hold(&gateway);
    let mut behind = [
        of("first", "interactive").queue(&gateway, 0),
        of("second", "batch").queue(&gateway, 1),
    ];
    // Those of lower bands are not before it.
    let mut third = of("third", "interactive").queue(&gateway, 2);
    let mut fourth = of("fourth", "batch").queue(&gateway, 3);
    drop(held);
    for (client, band, ahead) in [
        (&mut third, "interactive", "1"),
        (&mut fourth, "batch", "3"),
    ] {
        let answer = client.answer();
        assert_eq!(answer.status(), 200, "{}", answer.text());
        assert_eq!(answer.header("x-llmgw-band"), Some(band));
        assert_eq!(answer.header("x-llmgw-queue-ahead"), Some(ahead), "{band}");
        let waited: f64 = answer.header("x-llmgw-queue-ms").unwrap().parse().unwrap();
        assert!(waited > 0.0, "{waited}");
    }
    behind
        .iter_mut()
        .for_each(|client| assert_ok(&[client.answer()]));
}

#[test]
fn a_stream_that_waits_gets_comments_then_its_answer_or_its_refusal_as_an_event() {
    let engine = engine(Kind::Vllm, "{}");
    let setup = with_bands(&[("quick", 10, 5_000), ("patient", 10, 600_000)]);
    let setup = setup.top("log: {format: json}");
    let gateway = over(setup.limit("keepalive", "100ms"), &engine);
    let of = |mark, band| Ask {
        mark,
        band,
        stream: true,
        ..Ask::default()
    };
    let held = of("holder", "patient").hold(&gateway);
    let mut served = of("served", "patient").queue(&gateway, 0);
    let mut refused = of("refused", "quick").send(&gateway);
    for client in [&mut served, &mut refused] {
        let head = client.head();
        assert_eq!(head.status, 200);
        assert_eq!(head.header("content-type"), Some("text/event-stream"));
        client.body_until(": keep-alive\n\n");
    }
    let (rest, end) = refused.rest();
    let events = data(&rest);
    assert_eq!(events.len(), 1, "{rest}");
    assert!(events[0].contains(r#""code":"queue_timeout""#), "{rest}");
    assert_ne!(end, End::Complete, "a refused stream has no proper end");
    drop(held);
    let (rest, end) = served.rest();
    assert_eq!(
        (data(&rest).last().map(String::as_str), end),
        (Some("[DONE]"), End::Complete)
    );
    assert_eq!(order(&engine.state()), ["served"]);
    // On record is the status that the client got.
    let records = await_records(&gateway, 3);
    let record = record_of(&records, "refused");
    let told = (&record["status"], &record["outcome"], &record["code"]);
    assert_eq!(
        told,
        (&json!(200), &json!("refused"), &json!("queue_timeout"))
    );
}

#[test]
fn when_a_replica_dies_all_who_waited_for_it_are_served_by_the_other_in_their_order() {
    const WAITING: usize = 20;
    let mut dies = Process::spawn(&beside_this_test().unwrap(), ["--kind", "vllm"]).unwrap();
    let stays = engine(Kind::Vllm, "{}");
    let gateway = Setup::new()
        .top("log: {format: json}")
        .model("fake", "")
        .endpoint("vllm", &dies.url(), "slots: 1")
        .endpoint("vllm", &stays.url(), "slots: 1")
        .start();
    gateway.ready("fake", 2);
    let hold = |mark| {
        Ask {
            mark,
            ..Ask::default()
        }
        .hold(&gateway)
    };
    let held = [hold("holder-0"), hold("holder-1")];
    let marks = marks("waits", WAITING);
    let clients = queue_all(&gateway, 0, &marks, Ask::default());
    let own_queue = |row: &serde_json::Value| row["queued"].as_u64().unwrap();
    assert!(
        gateway.replicas().iter().all(|row| own_queue(row) > 0),
        "both have a queue"
    );
    dies.kill().unwrap();
    // Its slot is free when it dies, and is tried before that is known: what fails there waits again.
    gateway.until("all wait for the other one", || {
        let rows = gateway.replicas();
        let on = |url: &str| rows.iter().find(|row| row["url"] == url).map(own_queue);
        (on(&dies.url()), on(&stays.url())) == (Some(0), Some(WAITING as u64))
    });
    drop(held);
    all_answered(clients);
    let order = order(&stays.state());
    let records = await_records(&gateway, WAITING + 2);
    let (tried, others): (Vec<&String>, Vec<&String>) = order
        .iter()
        .partition(|mark| record_of(&records, mark)["attempts"].as_u64().unwrap() > 1);
    assert_eq!(order.len(), WAITING, "{order:?}");
    assert!(
        others.is_sorted() && tried.is_sorted(),
        "{order:?}, tried: {tried:?}"
    );
    let first: Vec<&String> = order.iter().take(tried.len()).collect();
    assert_eq!(first, tried, "what failed once goes first");
    gateway.counters_are_zero();
}

#[test]
fn a_full_queue_refuses_nobody_who_was_let_in_and_whose_engine_died() {
    let spawn = || Process::spawn(&beside_this_test().unwrap(), ["--kind", "vllm"]).unwrap();
    let mut engines = [spawn(), spawn()];
    let gateway = with_bands(&[("standard", 1, 600_000)])
        .model("fake", "")
        .endpoint("vllm", &engines[0].url(), "slots: 1")
        .endpoint("vllm", &engines[1].url(), "slots: 1")
        .start();
    gateway.ready("fake", 2);
    let ask = |mark| Ask {
        mark,
        ..Ask::default()
    };
    let held = ask("holder").hold(&gateway);
    let is_idle = |engine: &Process| engine.state().unwrap().open == 0;
    let dies = engines.iter().position(is_idle).unwrap();
    engines[dies].behave(r#"{"hang_generate":true}"#).unwrap();
    let at_work = ask("at-work").send(&gateway);
    engines[dies]
        .wait(PATIENCE, |state| state.open == 1)
        .unwrap();
    let waits = ask("waits").queue(&gateway, 0);
    engines[dies].kill().unwrap();
    // The slot is free for a moment, and the one that waits is sent to it, too.
    gateway.queued(2);
    drop(held);
    all_answered(vec![at_work, waits]);
    gateway.counters_are_zero();
}

#[test]
fn who_has_waited_for_long_waits_for_the_first_probe_of_an_engine_that_a_reload_brings() {
    /// Longer than any request waits for a first probe.
    const LONG: Duration = Duration::from_millis(5_200);
    let (old, new) = (engine(Kind::Vllm, "{}"), engine(Kind::Vllm, "{}"));
    let gateway = over(Setup::new(), &old);
    let ask = |mark| Ask {
        mark,
        ..Ask::default()
    };
    let held = ask("holder").hold(&gateway);
    let mut waits = ask("waits").queue(&gateway, 0);
    std::thread::sleep(LONG);
    // Its first probe takes a moment.
    new.behave(r#"{"health_ms":300}"#);
    let config = std::fs::read_to_string(gateway.dir.join("llmgw.yaml")).unwrap();
    gateway.write_config(&config.replace(&old.url(), &new.url()));
    let reloaded = gateway.admin_post("/v1/reload");
    assert_eq!(reloaded.status(), 200, "{}", reloaded.text());
    assert_ok(&[waits.answer()]);
    assert_eq!(order(&new.state()), ["waits"]);
    drop(held);
}

#[test]
fn two_models_on_one_engine_share_its_slots_and_both_are_served() {
    const SLOTS: u64 = 4;
    let shared = engine(Kind::Vllm, r#"{"token_ms":2}"#);
    let mut setup = Setup::new();
    for model in ["fake", "other"] {
        setup = setup
            .model(model, "")
            .endpoint("vllm", &shared.url(), "slots: 4, serves: fake");
    }
    let gateway = setup.start();
    gateway.ready("fake", 1);
    gateway.ready("other", 1);
    let answers = at_once(48, |number| {
        let model = ["fake", "other"][number % 2];
        gateway.post(CHAT, &chat_of(model, number % 4 < 2), "")
    });
    assert_ok(&answers);
    let peak = shared.state().peak_open;
    assert!(peak <= SLOTS, "{peak} at once on {SLOTS} slots");
    gateway.counters_are_zero();
}

#[test]
fn a_model_that_has_the_slots_of_a_shared_engine_full_gives_the_other_its_turn() {
    let shared = engine(Kind::Vllm, "{}");
    let mut setup = Setup::new();
    for model in ["fake", "other"] {
        setup = setup
            .model(model, "")
            .endpoint("vllm", &shared.url(), "slots: 1, serves: fake");
    }
    let gateway = setup.start();
    gateway.ready("fake", 1);
    gateway.ready("other", 1);
    let held = Ask {
        mark: "holder",
        ..Ask::default()
    }
    .hold(&gateway);
    // Each model shows what waits of its own.
    let marks = marks("fake", 20);
    let queue = |(mark, count): (&String, u64)| {
        let client = Ask {
            mark,
            ..Ask::default()
        }
        .send(&gateway);
        gateway.queued(count);
        client
    };
    let clients: Vec<Client> = marks.iter().zip(1..).map(queue).collect();
    let mut other = gateway.client();
    let body = chat_of("other", false).replace("hello you", "[other]");
    other.post(CHAT, &body, "");
    gateway.queued(21);
    drop(held);
    assert_ok(&[other.answer()]);
    all_answered(clients);
    let order = order(&shared.state());
    let at = positions(&order, "other")[0];
    assert!(
        at <= 2,
        "the other model's only request was number {at}: {order:?}"
    );
}

#[test]
fn a_saturated_model_never_holds_up_another() {
    let (busy, idle) = (engine(Kind::Vllm, "{}"), engine(Kind::Vllm, "{}"));
    let gateway = Setup::new()
        .model("fake", "")
        .endpoint("vllm", &busy.url(), "slots: 1")
        .model("other", "")
        .endpoint("vllm", &idle.url(), "slots: 1, serves: fake")
        .start();
    gateway.ready("fake", 1);
    gateway.ready("other", 1);
    let held = Ask {
        mark: "holder",
        ..Ask::default()
    }
    .hold(&gateway);
    let clients = queue_all(&gateway, 0, &marks("waits", 20), Ask::default());
    for _ in 0..20 {
        assert_ok(&[gateway.post(CHAT, &chat_of("other", false), "")]);
    }
    assert_eq!(order(&busy.state()), [""; 0]);
    gateway.queued(20);
    drop(held);
    all_answered(clients);
    busy.wait(PATIENCE, |state| state.open == 0).unwrap();
    gateway.counters_are_zero();
}

#[test]
fn bodies_that_wait_are_no_more_bytes_than_may_be_kept_and_each_place_gives_its_own_back() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = over(Setup::new().limit("queued_bytes_max", "1MiB"), &engine);
    let held = Ask {
        mark: "holder",
        ..Ask::default()
    }
    .hold(&gateway);
    // Five bytes a word.
    let large = |mark| Ask {
        mark,
        words: 150_000,
        ..Ask::default()
    };
    let first = large("first").queue(&gateway, 0);
    let refused = large("second").send(&gateway).answer();
    assert_eq!((refused.status(), &*refused.code()), (429, "queue_full"));
    assert!(
        refused.text().contains("limits.queued_bytes_max"),
        "{}",
        refused.text()
    );
    // It leaves, and its bytes with it.
    drop(first);
    gateway.queued(0);
    let third = large("third").queue(&gateway, 0);
    drop(held);
    all_answered(vec![third]);
    gateway.counters_are_zero();
}

/// A request that is not streamed shows no first byte: its prompt counts as read when it should be.
#[test]
fn whole_answers_to_long_prompts_fill_an_engines_slots_too() {
    let engine = engine(Kind::Vllm, "{}");
    let setup = Setup::new().model("fake", "");
    let gateway = setup.endpoint("vllm", &engine.url(), "slots: 8").start();
    gateway.ready("fake", 1);
    let clients: Vec<Client> = marks("whole", 8)
        .iter()
        .map(|mark| {
            Ask {
                mark,
                words: 500,
                fake: HOLDS,
                ..Ask::default()
            }
            .send(&gateway)
        })
        .collect();
    // Each prompt is more than the gate lets be unread at a time.
    engine.wait(PATIENCE, |state| state.open == 8).unwrap();
    drop(clients);
    gateway.counters_are_zero();
}
