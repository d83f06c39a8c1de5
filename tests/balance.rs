//! Which replica a request goes to, and which it does not (the rows of "Load-balancing mistakes").

mod harness;
#[path = "harness/more.rs"]
mod more;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fake_engine::{Kind, Options, Running};
use serde_json::json;
use sha2::{Digest, Sha256};

use harness::{Answer, Gateway, PATIENCE, Setup, chat, unless_held_up};
use more::{assert_ok, at_once, begin_stream, calls, chat_of, engine, finish_stream, replica};

const CHAT: &str = "/v1/chat/completions";
/// An engine's numbers that are 2 s old are distrusted.
const GAP_MAX: Duration = Duration::from_secs(1);

/// So many engines that behave like this.
fn engines(count: usize, behave: &str) -> Vec<Running> {
    (0..count).map(|_| engine(Kind::Vllm, behave)).collect()
}

fn over(setup: Setup, engines: &[Running]) -> Gateway {
    let mut setup = setup.model("fake", "");
    for engine in engines {
        setup = setup.endpoint("vllm", &engine.url(), "");
    }
    let gateway = setup.start();
    gateway.ready("fake", engines.len());
    gateway
}

#[test]
fn fifty_requests_at_the_same_moment_are_spread_though_no_engine_has_answered_yet() {
    // Not a byte before all are there: an answer that is not streamed has no early head.
    let engines = engines(4, r#"{"hold_after":0}"#);
    let gateway = over(Setup::new(), &engines);
    std::thread::scope(|scope| {
        let answers = scope.spawn(|| at_once(50, |_| gateway.post(CHAT, &chat(false), "")));
        let open = || {
            engines
                .iter()
                .map(|engine| engine.state().open)
                .sum::<u64>()
        };
        gateway.until("all are on their engines", || open() == 50);
        let spread: Vec<u64> = engines.iter().map(|engine| engine.state().open).collect();
        for engine in &engines {
            engine.behave(r#"{"hold_after":null}"#);
        }
        assert_ok(&answers.join().unwrap());
        assert!(
            spread.iter().all(|open| (11..=14).contains(open)),
            "{spread:?} of 50"
        );
    });
    gateway.counters_are_zero();
}

#[test]
fn invalid_requests_are_their_own_fault_and_leave_the_breaker_closed() {
    let llamacpp = fake_engine::start(Options {
        embeddings: false,
        ..Options::new(Kind::Llamacpp)
    })
    .unwrap();
    let vllm = engine(Kind::Vllm, "{}");
    let gateway = Setup::new()
        .model("fake", "")
        .endpoint("vllm", &vllm.url(), "")
        .model("small", "")
        .endpoint("llamacpp", &llamacpp.url(), "serves: fake")
        .start();
    gateway.ready("fake", 1);
    gateway.ready("small", 1);
    for status in [400, 404, 413, 422, 400].repeat(4) {
        let answer = gateway.post(CHAT, &chat(false), &format!(r#"{{"status":{status}}}"#));
        assert_eq!(answer.status(), status, "{}", answer.text());
    }
    // llama.cpp says 500 or 501 to what the client should not have asked.
    for _ in 0..5 {
        let answer = gateway.post("/v1/embeddings", r#"{"model":"small","input":"a"}"#, "");
        assert!(answer.status() >= 400, "{}", answer.text());
    }
    for engine in [&vllm, &llamacpp] {
        let row = replica(&gateway, engine.addr());
        assert_eq!(
            (&row["breaker"], &row["errors_1m"]),
            (&json!("closed"), &json!(0)),
            "{row}"
        );
    }
    assert_eq!(vllm.state().total, 20, "none was tried again");
    assert_eq!(llamacpp.state().total, 5);
    assert_ok(&[gateway.post(CHAT, &chat(false), "")]);
}

#[test]
fn an_engine_that_is_busy_is_not_at_fault() {
    let engines = engines(2, "{}");
    let gateway = over(Setup::new(), &engines);
    let busy = r#"{"status":429,"retry_after":7}"#;
    for _ in 0..20 {
        let answer = gateway.post(CHAT, &chat(false), busy);
        assert_eq!(answer.status(), 429);
        assert_eq!(answer.header("retry-after"), Some("7"));
    }
    for row in gateway.replicas() {
        assert_eq!(
            (&row["breaker"], &row["errors_1m"]),
            (&json!("closed"), &json!(0)),
            "{row}"
        );
    }
}

#[test]
fn a_busy_replica_is_passed_over_for_a_while_and_fails_no_request() {
    let engines = engines(2, "{}");
    let gateway = over(Setup::new(), &engines);
    engines[0].behave(r#"{"status":429}"#);
    let began = Instant::now();
    for _ in 0..100 {
        assert_ok(&[gateway.post(CHAT, &chat(false), "")]);
    }
    let asked = engines[0].state().total;
    // One a second.
    let most = 2 + began.elapsed().as_secs();
    assert!(
        asked <= most,
        "{asked} of 100 requests were refused there first, at most {most}"
    );
    engines[0].behave(r#"{"status":null}"#);
    gateway.until("it gets requests again", || {
        assert_ok(&at_once(4, |_| gateway.post(CHAT, &chat(false), "")));
        engines[0].state().total > asked
    });
}

#[test]
fn an_alias_is_resolved_before_any_check_and_is_no_way_around_one() {
    use sha2::{Digest, Sha256};
    let hash = |key: &str| {
        let digest = Sha256::digest(key.as_bytes());
        digest
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let (mine, other) = (engine(Kind::Vllm, "{}"), engine(Kind::Vllm, "{}"));
    let tenants = format!(
        "tenants:\n  - {{name: allowed, keys: [\"sha256:{}\"], models: [fake]}}\n  - {{name: stranger, keys: [\"sha256:{}\"], models: [other, nick]}}",
        hash("key-allowed"),
        hash("key-stranger"),
    );
    let gateway = Setup::new()
        .top(&tenants)
        .model("fake", "aliases: [nick]")
        .endpoint("vllm", &mine.url(), "")
        .model("other", "")
        .endpoint("vllm", &other.url(), "serves: fake")
        .start();
    gateway.ready("fake", 1);
    let ask = |key: &str| {
        let mut client = gateway.client();
        let bearer = format!("Bearer {key}");
        let headers = [
            ("authorization", &*bearer),
            ("content-type", "application/json"),
        ];
        client.request("POST", CHAT, &headers, chat_of("nick", false).as_bytes());
        client.answer()
    };
    let answer = ask("key-allowed");
    assert_eq!(answer.status(), 200, "{}", answer.text());
    assert_eq!(
        answer.json()["model"],
        "nick",
        "the client sees the name it asked for"
    );
    assert_eq!(
        mine.state().last[0].model.as_deref(),
        Some("fake"),
        "the engine gets its own"
    );
    let answer = ask("key-stranger");
    assert_eq!((answer.status(), &*answer.code()), (404, "model_not_found"));
    assert!(!answer.text().contains("fake"), "{}", answer.text());
    assert_eq!(mine.state().total, 1);
}

#[test]
fn models_that_share_engines_share_their_slots_and_nothing_else() {
    unless_held_up(GAP_MAX, || {
        let engines = engines(2, "{}");
        let mut setup = Setup::new();
        for model in ["fake", "other"] {
            setup = setup.model(model, "");
            for engine in &engines {
                setup = setup.endpoint("vllm", &engine.url(), "serves: fake");
            }
        }
        let gateway = setup.start();
        gateway.ready("fake", 2);
        gateway.ready("other", 2);
        // What one model has on an engine is load for the other.
        let slow = r#"{"token_ms":60000}"#;
        let mut streams = Vec::new();
        for model in ["fake", "other"].repeat(6) {
            streams.push(begin_stream(&gateway, &chat_of(model, true), slow));
        }
        for row in gateway.replicas() {
            assert_eq!(row["inflight"], 6, "{row}");
        }
        for engine in &engines {
            assert_eq!(engine.state().open, 6);
        }
        drop(streams);
        gateway.counters_are_zero();
        // And a breaker that one model opened is closed for the other.
        for _ in 0..6 {
            gateway.post(CHAT, &chat_of("other", false), r#"{"status":500}"#);
        }
        let breakers: Vec<_> = gateway
            .replicas()
            .into_iter()
            .map(|row| (row["model"].clone(), row["breaker"] == "closed"))
            .collect();
        assert!(breakers.contains(&(json!("other"), false)), "{breakers:?}");
        assert!(!breakers.contains(&(json!("fake"), false)), "{breakers:?}");
        assert_ok(&[gateway.post(CHAT, &chat(false), "")]);
    });
}

#[test]
fn after_every_kind_of_end_all_counters_are_zero() {
    let engines = engines(3, r#"{"token_ms":5,"tokens":10}"#);
    let setup = Setup::new()
        .limit("first_byte_timeout", "500ms")
        .limit("idle_timeout", "500ms");
    let gateway = over(setup, &engines);
    let fates = [
        "{}",
        r#"{"refuse":true}"#,
        r#"{"status":500}"#,
        r#"{"status":400}"#,
        r#"{"status":429}"#,
        r#"{"die_after":3}"#,
        r#"{"die_after":3,"how":"fin"}"#,
        r#"{"die_after":3,"how":"clean_end"}"#,
        r#"{"die_after":3,"how":"stall"}"#,
        r#"{"first_ms":5000}"#,
        r#"{"first_event_error":true}"#,
        r#"{"short_body":true}"#,
    ];
    at_once(120, |number| {
        let mut client = gateway.client();
        client.post(CHAT, &chat(number % 2 == 0), fates[number % fates.len()]);
        match number % 3 {
            // It leaves at once, after the head, or not at all.
            0 => {}
            1 => drop(client.try_head()),
            _ => drop(client.try_answer()),
        }
    });
    gateway.counters_are_zero();
    for engine in &engines {
        let idle = engine.wait(PATIENCE, |state| state.open == 0);
        assert!(idle.is_ok(), "{idle:?}");
    }
    // Every breaker closes again, and all that was counted as a fault is forgiven.
    gateway.until("all replicas serve again", || {
        drop(gateway.post(CHAT, &chat(false), ""));
        gateway.replicas().iter().all(|row| row["state"] == "ready")
    });
}

#[test]
fn a_replica_that_refuses_connections_attracts_no_traffic_and_fails_no_request() {
    for parallel in [1, 8, 40] {
        let engines = engines(4, r#"{"first_ms":20}"#);
        let gateway = over(Setup::new(), &engines);
        engines[0].behave(r#"{"accept":false}"#);
        for _ in 0..40 / parallel {
            assert_ok(&at_once(parallel, |_| gateway.post(CHAT, &chat(false), "")));
        }
        assert_eq!(calls(&engines[1..]), 40);
    }
}

#[test]
fn a_replica_that_closes_before_it_answers_attracts_no_traffic_though_its_probes_pass() {
    let engines = engines(4, r#"{"first_ms":20}"#);
    let gateway = over(Setup::new(), &engines);
    engines[0].behave(r#"{"refuse":true}"#);
    for _ in 0..10 {
        assert_ok(&at_once(8, |_| gateway.post(CHAT, &chat(false), "")));
    }
    let tried = engines[0].state().total;
    assert!(tried <= 10, "{tried} of 80 requests went there");
    let row = replica(&gateway, engines[0].addr());
    assert!(row["errors_1m"].as_u64().unwrap() > 0, "{row}");
}

#[test]
fn a_replica_that_hangs_while_its_health_answers_is_taken_out_and_tried_by_one_at_a_time() {
    unless_held_up(GAP_MAX, || {
        let engines = engines(4, "{}");
        let setup = Setup::new().limit("first_byte_timeout", "5s");
        let gateway = over(setup, &engines);
        let hung = &engines[0];
        hung.behave(r#"{"hang_generate":true}"#);
        assert_ok(&at_once(24, |_| gateway.post(CHAT, &chat(false), "")));
        let row = replica(&gateway, hung.addr());
        assert_eq!(row["state"], "open", "{row}");
        assert!(
            row["reason"].as_str().unwrap().contains("fell silent"),
            "{row}"
        );
        let gone = hung.wait(PATIENCE, |state| state.open == 0);
        assert!(gone.is_ok());
        // From now on at most one request at a time finds out, and is answered elsewhere.
        hung.reset();
        hung.behave(r#"{"hang_generate":true}"#);
        let found_out = |count| {
            gateway.until("it is tried again", || {
                assert_ok(&at_once(6, |_| gateway.post(CHAT, &chat(false), "")));
                hung.state().total >= count
            });
        };
        found_out(2);
        assert_eq!(hung.state().peak_open, 1);
        hung.behave(r#"{"hang_generate":null}"#);
        gateway.until("it is back", || {
            assert_ok(&[gateway.post(CHAT, &chat(false), "")]);
            replica(&gateway, hung.addr())["state"] == "ready"
        });
    });
}

/// One turn of a conversation: what was said so far, and which replica answered for what reason.
fn turn(gateway: &Gateway, messages: &[serde_json::Value]) -> (String, String) {
    let body = json!({"model": "fake", "messages": messages}).to_string();
    let headers = [("content-type", "application/json"), ("x-llmgw-debug", "1")];
    let mut client = gateway.client();
    client.request("POST", CHAT, &headers, body.as_bytes());
    let answer: Answer = client.answer();
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let field = |name| answer.header(name).unwrap().to_owned();
    (field("x-llmgw-replica"), field("x-llmgw-reason"))
}

#[test]
fn a_conversation_stays_on_the_replica_that_knows_it_and_conversations_are_spread() {
    let engines = engines(4, "{}");
    let gateway = over(Setup::new(), &engines);
    let mut homes: BTreeMap<String, u32> = BTreeMap::new();
    for number in 0..24 {
        let text = |turn: usize| {
            format!(
                "conversation {number}, turn {turn}: {}",
                "word ".repeat(150)
            )
        };
        let mut messages = vec![json!({"role": "user", "content": text(0)})];
        let (home, _) = turn(&gateway, &messages);
        for count in 1..4 {
            messages.push(json!({"role": "assistant", "content": "yes"}));
            messages.push(json!({"role": "user", "content": text(count)}));
            let (replica, reason) = turn(&gateway, &messages);
            assert_eq!((&replica, &*reason), (&home, "prefix"), "turn {count}");
        }
        *homes.entry(home).or_default() += 1;
    }
    assert!(homes.len() > 1, "{homes:?}");
}

#[test]
fn an_operators_own_choice_sees_the_labels_of_tenants_and_endpoints() {
    let engines = engines(2, "{}");
    let hash = |key: &str| -> String {
        let digest = Sha256::digest(key.as_bytes());
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    };
    let tenants = format!(
        "tenants:\n  - {{name: gold, keys: [\"sha256:{}\"], labels: {{band: interactive}}}}\n  - {{name: other, keys: [\"sha256:{}\"]}}",
        hash("gold"),
        hash("other")
    );
    let gateway = Setup::new()
        .top("policies: policies")
        .top(&tenants)
        .file(
            "policies/routing.lua",
            "return {api = 1, rank = function(request, replicas, n)
                for i = 1, n do
                    local r = replicas[i]
                    if r.zone == 'b' and r.labels.disk == 'nvme' then return i, 'labelled' end
                end
            end}",
        )
        .file(
            "policies/admission.lua",
            "return {api = 1,
                bands = function() return {{name = 'interactive', priority = 2}, {name = 'standard', priority = 1}} end,
                classify = function(request, tenant) return tenant.labels.band or 'standard' end}",
        )
        .model("fake", "")
        .endpoint("vllm", &engines[0].url(), "labels: {zone: a, disk: nvme}")
        .endpoint("vllm", &engines[1].url(), "labels: {zone: b, disk: nvme}")
        .start();
    gateway.ready("fake", 2);
    for (key, band) in [("gold", "interactive"), ("other", "standard")] {
        let bearer = format!("Bearer {key}");
        let headers = [
            ("content-type", "application/json"),
            ("authorization", &*bearer),
            ("x-llmgw-debug", "1"),
        ];
        let mut client = gateway.client();
        client.request("POST", CHAT, &headers, chat(false).as_bytes());
        let answer = client.answer();
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let field = |name| answer.header(name).unwrap();
        assert_eq!(field("x-llmgw-replica"), engines[1].addr().to_string());
        assert_eq!(field("x-llmgw-reason"), "labelled");
        assert_eq!(field("x-llmgw-band"), band);
    }
}

#[test]
fn an_engine_never_gets_more_requests_at_once_than_it_has_slots() {
    let llamacpp = fake_engine::start(Options {
        slots: 2,
        token_ms: 5,
        tokens: 4,
        ..Options::new(Kind::Llamacpp)
    })
    .unwrap();
    let gateway = Setup::new()
        .model("fake", "")
        .endpoint("llamacpp", &llamacpp.url(), "slots: 2")
        .start();
    gateway.ready("fake", 1);
    let send = |number: usize| {
        let mut client = gateway.client();
        client.post(CHAT, &chat(number.is_multiple_of(2)), "");
        client
    };
    // Some leave while they wait: no slot must be given to them.
    llamacpp.behave(r#"{"hold_after":0}"#);
    let mut clients: Vec<_> = (0..2).map(send).collect();
    llamacpp.wait(PATIENCE, |state| state.open == 2).unwrap();
    clients.extend((2..24).map(send));
    gateway.queued(22);
    clients.truncate(20);
    gateway.queued(18);
    llamacpp.behave(r#"{"hold_after":null}"#);
    let answers = clients.iter_mut().map(|client| client.answer());
    assert_ok(&answers.collect::<Vec<_>>());
    let state = llamacpp.state();
    assert!(state.peak_open <= 2, "{} at once", state.peak_open);
    // Some leave at any time: a new connection may bring the next one before the engine sees that they have, and no slot must be lost.
    let answers = at_once(24, |number| {
        let mut client = send(number);
        (number % 4 != 3).then(|| client.answer())
    });
    assert_ok(&answers.into_iter().flatten().collect::<Vec<_>>());
    gateway.counters_are_zero();
    llamacpp.wait(PATIENCE, |state| state.open == 0).unwrap();
    llamacpp.reset();
    llamacpp.behave(r#"{"hold_after":1}"#);
    let streams: Vec<_> = (0..2)
        .map(|_| begin_stream(&gateway, &chat(true), ""))
        .collect();
    let waits = send(0);
    gateway.queued(1);
    assert_eq!(replica(&gateway, llamacpp.addr())["inflight"], 2);
    assert_eq!(llamacpp.state().open, 2);
    llamacpp.behave(r#"{"hold_after":null}"#);
    streams.into_iter().for_each(finish_stream);
    drop(waits);
    gateway.counters_are_zero();
}
