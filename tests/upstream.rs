//! The way to an engine: pooled connections, limits of time, retries (the rows of "Keep-alive and timeouts").

mod harness;
#[path = "harness/more.rs"]
mod more;

use std::time::{Duration, Instant};

use fake_engine::process::{Process, beside_this_test};
use fake_engine::{Kind, Running};

use harness::{CANCEL_MAX, End, Gateway, PATIENCE, Setup, chat, unless_held_up};
use more::{Fading, assert_ok, at_once, begin_stream, calls, chat_of, engine, replica};

const CHAT: &str = "/v1/chat/completions";
/// Where a short limit is to end a request, the others are 20 s.
const OTHER_LIMIT_MAX: Duration = Duration::from_secs(15);

/// Sends waves of ten requests, each wave this long after the one before.
fn waves(gateway: &Gateway, gaps_ms: &[u64]) {
    for gap_ms in [0].iter().chain(gaps_ms) {
        // The age of an idle connection is what this is about.
        std::thread::sleep(Duration::from_millis(*gap_ms));
        let answers = at_once(10, |_| gateway.post(CHAT, &chat(false), ""));
        assert_ok(&answers);
    }
}

#[test]
fn requests_at_the_moment_when_engines_close_their_idle_connections_all_succeed() {
    let kinds = [
        (Kind::Vllm, "vllm"),
        (Kind::Sglang, "sglang"),
        (Kind::Llamacpp, "llamacpp"),
    ];
    std::thread::scope(|scope| {
        for (kind, name) in kinds {
            for gap_ms in [4_900, 5_000, 5_100] {
                scope.spawn(move || {
                    let engine = engine(kind, "{}");
                    let gateway = Gateway::over(name, &[&engine]);
                    waves(&gateway, &[gap_ms]);
                    assert_eq!(engine.state().completed, 20, "{name} {gap_ms}");
                    assert_eq!(replica(&gateway, engine.addr())["errors_1m"], 0);
                });
            }
        }
    });
}

#[test]
fn an_engine_that_closes_idle_connections_earlier_without_saying_so_fails_no_request() {
    let engine = engine(Kind::Vllm, r#"{"close_idle_ms":120}"#);
    let gateway = Gateway::over("vllm", &[&engine]);
    waves(&gateway, &[100, 115, 118, 119, 120, 121, 122, 125, 140]);
    assert_eq!(engine.state().completed, 100);
    assert_eq!(replica(&gateway, engine.addr())["errors_1m"], 0);
    assert_eq!(gateway.metric("llmgw_retries_total", ""), 0.0);
}

#[test]
fn a_reused_connection_that_dies_before_a_byte_gets_one_transparent_retry() {
    let engine = engine(Kind::Vllm, r#"{"close_on_reuse":true}"#);
    let gateway = Gateway::over("vllm", &[&engine]);
    for _ in 0..10 {
        let answer = gateway.post(CHAT, &chat(false), "");
        assert_eq!(answer.status(), 200, "{}", answer.text());
    }
    assert_eq!(engine.state().total, 10);
    let row = replica(&gateway, engine.addr());
    assert_eq!(
        (&row["breaker"], &row["errors_1m"]),
        (&"closed".into(), &0.into())
    );
    assert_eq!(gateway.metric("llmgw_retries_total", ""), 0.0);
}

#[test]
fn connections_are_kept_and_used_again() {
    let began = Instant::now();
    let engine = engine(Kind::Vllm, "{}");
    let gateway = Gateway::over("vllm", &[&engine]);
    for stream in [false, true].repeat(10) {
        assert_ok(&[gateway.post(CHAT, &chat(stream), "")]);
    }
    // One for the requests, one for probes, one for scrapes; one more, should the pace have lost one; and all anew after 4 s of a machine
    // that stalls.
    let most = 4 + 3 * (began.elapsed().as_secs() / 4);
    let accepted = engine.state().accepted_connections;
    assert!(
        accepted <= most,
        "{accepted} connections for 20 requests, at most {most}"
    );
}

#[test]
fn a_host_that_takes_no_connections_costs_the_connect_timeout_and_nothing_else() {
    let mut lost = Fading::start();
    let well = engine(Kind::Vllm, "{}");
    let url = format!("http://{}", lost.addr);
    let setup = Setup::new()
        .limit("connect_timeout", "300ms")
        .limit("first_byte_timeout", "20s")
        .model("fake", "")
        .endpoint("openai", &url, "")
        .model("other", "")
        .endpoint("openai", &url, "serves: fake")
        .endpoint("vllm", &well.url(), "serves: fake");
    let gateway = setup.start();
    gateway.ready("fake", 1);
    gateway.ready("other", 2);
    lost.vanish();
    assert_ok(&at_once(4, |_| {
        gateway.post(CHAT, &chat_of("other", false), "")
    }));
    let started = Instant::now();
    let answer = gateway.post(CHAT, &chat(false), "");
    assert_eq!(
        (answer.status(), &*answer.code()),
        (502, "upstream_failed"),
        "{}",
        answer.text()
    );
    assert!(
        answer.text().contains("no connection within 300ms"),
        "{}",
        answer.text()
    );
    // Not the other limit.
    assert!(
        started.elapsed() < OTHER_LIMIT_MAX,
        "{:?}",
        started.elapsed()
    );
}

#[test]
fn hosts_that_take_no_connections_are_tried_no_more_often_than_the_limit_says() {
    let mut lost: Vec<Fading> = (0..5).map(|_| Fading::start()).collect();
    let mut setup = Setup::new()
        .limit("connect_timeout", "100ms")
        .limit("retries", "2")
        .model("fake", "");
    for host in &lost {
        setup = setup.endpoint("openai", &format!("http://{}", host.addr), "");
    }
    let gateway = setup.start();
    gateway.ready("fake", 5);
    lost.iter_mut().for_each(Fading::vanish);
    let answer = gateway.post(CHAT, &chat(false), "");
    assert_eq!(answer.status(), 502, "{}", answer.text());
    let tried = answer.text().matches("no connection within").count();
    assert_eq!(tried, 3, "{}", answer.text());
}

#[test]
fn a_burst_that_meets_a_lost_host_fails_no_request_whatever_the_retry_budget_says() {
    let mut lost = Fading::start();
    let well = engine(Kind::Openai, "{}");
    let setup = Setup::new()
        .limit("connect_timeout", "500ms")
        .model("fake", "");
    let gateway = setup
        .endpoint("openai", &format!("http://{}", lost.addr), "")
        .endpoint("openai", &well.url(), "")
        .start();
    gateway.ready("fake", 2);
    lost.vanish();
    assert_ok(&at_once(100, |_| gateway.post(CHAT, &chat(false), "")));
    assert_eq!(well.state().total, 100);
}

#[test]
fn an_engine_that_is_silent_before_the_first_byte_costs_the_first_byte_timeout() {
    let engine = engine(Kind::Vllm, "{}");
    let setup = Setup::new()
        .limit("first_byte_timeout", "300ms")
        .limit("idle_timeout", "20s")
        .limit("retries", "0");
    let setup = setup
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .model("other", "")
        .endpoint("vllm", &engine.url(), "serves: fake");
    let gateway = setup.start();
    // A model of its own for each: the first timeout opens the breaker.
    for (model, stream, fake) in [
        ("fake", false, r#"{"first_ms":60000}"#),
        ("other", true, r#"{"headers_first":true}"#),
    ] {
        gateway.ready(model, 1);
        let started = Instant::now();
        let answer = gateway.post(CHAT, &chat_of(model, stream), fake);
        assert_eq!(
            (answer.status(), &*answer.code()),
            (504, "first_byte_timeout"),
            "{}",
            answer.text()
        );
        assert!(
            started.elapsed() < OTHER_LIMIT_MAX,
            "{:?}",
            started.elapsed()
        );
        let gone = engine.wait(CANCEL_MAX, |state| state.open == 0);
        assert!(gone.is_ok(), "the engine was let go");
    }
}

/// What an engine sends the head of at once, and never the body; it passes unread.
const AUDIO_HEAD: &str = r#"{"headers_first":true,"headers":{"Content-Type":"audio/mpeg"}}"#;

/// A gateway over these engines, where the first one's breaker was opened for its silence while it was the only one.
fn with_a_silent_one(engines: &[&Running]) -> Gateway {
    let setup = |first_byte, engines: &[&Running]| {
        let setup = Setup::new()
            .limit("first_byte_timeout", first_byte)
            .limit("retries", "0")
            .model("fake", "");
        engines.iter().fold(setup, |setup, engine| {
            setup.endpoint("vllm", &engine.url(), "")
        })
    };
    let gateway = setup("300ms", &engines[..1]).start();
    gateway.ready("fake", 1);
    let silent = gateway.post(CHAT, &chat(false), r#"{"first_ms":60000}"#);
    assert_eq!(silent.code(), "first_byte_timeout", "{}", silent.text());
    gateway.write_config(&setup("10m", engines).yaml());
    let reloaded = gateway.admin_post("/v1/reload");
    assert_eq!(reloaded.status(), 200, "{}", reloaded.text());
    gateway.ready("fake", engines.len());
    gateway
}

#[test]
fn a_trial_whose_answer_passes_unread_ends_with_its_head() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = with_a_silent_one(&[&engine]);
    let mut trial = gateway.client();
    gateway.until("the breaker lets a trial in", || {
        trial = gateway.client();
        trial.post(CHAT, &chat(true), AUDIO_HEAD);
        trial.head().status == 200
    });
    // Its body never comes, and there is no other replica.
    assert_ok(&[gateway.post(CHAT, &chat(false), "")]);
    let waits = engine.wait(PATIENCE, |state| state.open == 1);
    assert!(waits.is_ok(), "the trial is still there");
}

#[test]
fn the_head_of_an_answer_that_passes_unread_proves_nothing_where_another_replica_serves() {
    let (silent, well) = (engine(Kind::Vllm, "{}"), engine(Kind::Vllm, "{}"));
    let gateway = with_a_silent_one(&[&silent, &well]);
    let mut held = Vec::new();
    gateway.until("the silent one is tried", || {
        let mut client = gateway.client();
        client.post(CHAT, &chat(true), AUDIO_HEAD);
        assert_eq!(client.head().status, 200);
        held.push(client);
        silent.state().open > 0
    });
    assert_eq!(replica(&gateway, silent.addr())["breaker"], "half_open");
    assert_ok(&[gateway.post(CHAT, &chat(false), "")]);
    assert_eq!(replica(&gateway, silent.addr())["breaker"], "half_open");
}

#[test]
fn a_stream_that_falls_silent_costs_the_idle_timeout_and_says_so() {
    let engine = engine(Kind::Vllm, "{}");
    let setup = Setup::new()
        .limit("first_byte_timeout", "20s")
        .limit("idle_timeout", "300ms");
    let gateway = setup
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .start();
    gateway.ready("fake", 1);
    let started = Instant::now();
    let answer = gateway.post(CHAT, &chat(true), r#"{"die_after":3,"how":"stall"}"#);
    assert!(
        started.elapsed() < OTHER_LIMIT_MAX,
        "{:?}",
        started.elapsed()
    );
    assert_eq!(answer.status(), 200);
    assert_ne!(answer.end, End::Complete);
    let data = answer.data();
    assert!(
        data.last().unwrap().contains("300ms"),
        "the last event says why: {data:?}"
    );
    assert!(!answer.text().contains("[DONE]"));
    assert_eq!(
        replica(&gateway, engine.addr())["breaker"],
        "open",
        "silence is a fault"
    );
}

#[test]
fn a_slow_stream_may_last_longer_than_any_single_limit() {
    unless_held_up(Duration::from_secs(2), || {
        let vllm = engine(Kind::Vllm, r#"{"token_ms":100,"tokens":70}"#);
        let llamacpp = engine(Kind::Llamacpp, r#"{"token_ms":100,"tokens":70}"#);
        let setup = Setup::new()
            .limit("connect_timeout", "5s")
            .limit("first_byte_timeout", "5s")
            .limit("idle_timeout", "5s");
        let gateway = setup
            .model("fake", "")
            .endpoint("vllm", &vllm.url(), "")
            .model("other", "")
            .endpoint("llamacpp", &llamacpp.url(), "serves: fake")
            .start();
        gateway.ready("fake", 1);
        gateway.ready("other", 1);
        let answers = at_once(3, |number| match number {
            0 => gateway.post(CHAT, &chat_of("fake", true), ""),
            1 => gateway.post(CHAT, &chat_of("other", true), ""),
            // Streamed between gateway and engine, so its first byte is early too.
            _ => gateway.post(CHAT, &chat_of("other", false), ""),
        });
        assert_ok(&answers);
        for answer in &answers[..2] {
            assert_eq!(answer.data().last().unwrap(), "[DONE]");
        }
        assert_eq!(answers[2].json()["usage"]["completion_tokens"], 70);
    });
}

#[test]
fn an_engine_that_accepts_and_never_answers_harms_no_other() {
    /// Nearly the limit: the first of them may be given up any moment.
    const HELD_UP: Duration = Duration::from_secs(8);
    let (hung, well) = (engine(Kind::Vllm, "{}"), engine(Kind::Vllm, "{}"));
    let setup = Setup::new()
        .limit("first_byte_timeout", "10s")
        .model("fake", "")
        .endpoint("vllm", &hung.url(), "")
        .endpoint("vllm", &well.url(), "")
        .model("other", "")
        .endpoint("vllm", &well.url(), "serves: fake");
    let gateway = setup.start();
    gateway.ready("fake", 2);
    gateway.ready("other", 1);
    hung.behave(r#"{"hang":true}"#);
    let since = Instant::now();
    let shared = std::thread::scope(|scope| {
        let shared = scope.spawn(|| at_once(20, |_| gateway.post(CHAT, &chat(false), "")));
        let caught = hung.wait(PATIENCE, |state| state.open > 0);
        assert!(caught.is_ok(), "some requests are on the hung engine");
        assert_ok(&at_once(20, |_| {
            gateway.post(CHAT, &chat_of("other", true), "")
        }));
        // Where the test was held up meanwhile, they have been given up.
        assert!(
            hung.state().open > 0 || since.elapsed() >= HELD_UP,
            "the other model does not wait for it"
        );
        shared.join().unwrap()
    });
    assert_ok(&shared);
    gateway.counters_are_zero();
    // Its own probes get no answer either; nobody else's are late for that.
    gateway.until("the hung engine is not ready", || {
        replica(&gateway, hung.addr())["state"] == "not_ready"
    });
    assert_eq!(replica(&gateway, well.addr())["state"], "ready");
}

/// Five engines that behave like this, and a gateway over them with so many retries.
fn five(behave: &str, retries: u32) -> (Vec<Running>, Gateway) {
    let engines: Vec<Running> = (0..5).map(|_| engine(Kind::Vllm, behave)).collect();
    let mut setup = Setup::new()
        .limit("retries", &retries.to_string())
        .model("fake", "");
    for engine in &engines {
        setup = setup.endpoint("vllm", &engine.url(), "");
    }
    let gateway = setup.start();
    gateway.ready("fake", 5);
    (engines, gateway)
}

#[test]
fn an_outage_costs_one_call_and_the_retries_whatever_the_engines_do() {
    for (retries, behave, status) in [
        (2, r#"{"refuse":true}"#, 502),
        (0, r#"{"refuse":true}"#, 502),
        (2, r#"{"status":503}"#, 503),
        (1, r#"{"first_event_error":true}"#, 503),
    ] {
        for stream in [false, true] {
            if behave.contains("first_event_error") && !stream {
                continue;
            }
            let (engines, gateway) = five(behave, retries);
            let answer = gateway.post(CHAT, &chat(stream), "");
            assert_eq!(answer.status(), status, "{}", answer.text());
            assert_eq!(
                calls(&engines),
                u64::from(retries) + 1,
                "{behave} {retries}"
            );
        }
    }
}

#[test]
fn the_bound_on_calls_holds_for_reused_connections_too() {
    let (engines, gateway) = five("{}", 2);
    for engine in &engines {
        engine.behave(r#"{"prefill_ms":200}"#);
    }
    assert_ok(&at_once(10, |_| gateway.post(CHAT, &chat(false), "")));
    for engine in &engines {
        engine.behave(r#"{"refuse":true}"#);
    }
    let before = calls(&engines);
    let answer = gateway.post(CHAT, &chat(false), "");
    assert_eq!(answer.status(), 502, "{}", answer.text());
    assert_eq!(calls(&engines) - before, 3);
}

#[test]
fn the_retry_budget_keeps_an_outage_from_multiplying_the_load() {
    // Busy is no fault, so the breakers stay out of this.
    let (engines, gateway) = five(r#"{"status":429}"#, 4);
    let started = Instant::now();
    for _ in 0..100 {
        assert_eq!(gateway.post(CHAT, &chat(false), "").status(), 429);
    }
    // A fifth of the requests, a reserve of ten, and one of those comes back each second.
    let most = 100 + 20 + 10 + started.elapsed().as_secs() + 1;
    let calls = calls(&engines);
    assert!(
        (120..=most).contains(&calls),
        "{calls} calls for 100 requests, at most {most}"
    );
    assert_eq!(
        gateway.metric("llmgw_retries_total", ""),
        (calls - 100) as f64
    );
}

#[test]
fn four_hundred_streams_at_once_go_through_and_none_waits_for_another() {
    let executable = beside_this_test().unwrap();
    // An engine that is full of them is sent no more.
    let arguments = ["--kind", "vllm", "--tokens", "2", "--slots", "1024"];
    let engine = Process::spawn(&executable, arguments).unwrap();
    let setup = Setup::new().model("fake", "");
    let gateway = setup.endpoint("vllm", &engine.url(), "slots: 1024").start();
    gateway.ready("fake", 1);
    let slow = r#"{"token_ms":60000}"#;
    let streams: Vec<_> = (0..400)
        .map(|_| begin_stream(&gateway, &chat(true), slow))
        .collect();
    assert_eq!(engine.state().unwrap().open_streams, 400);
    drop(streams);
    let gone = engine.wait(PATIENCE, |state| state.open == 0);
    assert!(gone.is_ok(), "{:?}", gone.map(|state| state.open));
    gateway.counters_are_zero();
}

#[test]
fn a_key_that_an_engine_refuses_is_no_fault_of_the_client() {
    let refusing = engine(Kind::Vllm, r#"{"status":401}"#);
    let answer = Gateway::over("vllm", &[&refusing]).post(CHAT, &chat(false), "");
    assert_eq!(
        (answer.status(), &*answer.code()),
        (502, "upstream_failed"),
        "{}",
        answer.text()
    );
    assert!(answer.text().contains("answered 401"), "{}", answer.text());
    let other = engine(Kind::Vllm, "{}");
    let gateway = Gateway::over("vllm", &[&refusing, &other]);
    let answers = at_once(8, |_| gateway.post(CHAT, &chat(false), ""));
    assert_ok(&answers);
}
