//! The fake does what it was told: a test of the gateway is worth as much as this.

mod client;

use std::net::TcpStream;
use std::time::{Duration, Instant};

use client::{Client, chat, get, post};
use fake_engine::{Kind, Options, Running, StateView, start};

const CHAT: &str = "/v1/chat/completions";
/// Only a test that fails waits for it.
const SOON: Duration = Duration::from_secs(60);
/// How long a departure may take to be noticed: short of what an engine would go on for.
const LEFT_MAX: Duration = Duration::from_secs(30);

fn engine(kind: Kind) -> Running {
    start(Options::new(kind)).unwrap()
}

#[test]
fn a_stream_dies_in_each_of_the_ways() {
    let engine = engine(Kind::Vllm);
    for (how, whole, reset, done) in [
        ("rst", false, true, false),
        ("fin", false, false, false),
        ("clean_end", true, false, false),
        ("half_event", false, false, false),
        ("error_event_then_done", true, false, true),
        ("exit", false, false, false),
    ] {
        let fake = format!(r#"{{"die_after":3,"how":"{how}"}}"#);
        let answer = post(engine.addr(), CHAT, &chat(true), &fake).unwrap();
        let text = answer.text();
        assert_eq!(
            (answer.status, answer.whole, answer.reset),
            (200, whole, reset),
            "{how}: {text}"
        );
        assert_eq!(
            answer.data().last().is_some_and(|data| data == "[DONE]"),
            done,
            "{how}: {text}"
        );
        assert!(
            text.contains("t2") && !text.contains(r#""content":" t3""#),
            "{how}: {text}"
        );
        assert_eq!(text.ends_with("\n\n"), how != "half_event", "{how}: {text}");
        assert_eq!(
            text.contains(r#"data: {"error""#),
            how == "error_event_then_done",
            "{how}: {text}"
        );
    }
    let state = engine.wait(SOON, |state| state.open == 0).unwrap();
    assert_eq!((state.broken, state.cancelled), (6, 0));
}

#[test]
fn an_answer_that_is_not_streamed_dies_before_its_first_byte_or_half_way() {
    let engine = engine(Kind::Vllm);
    let answer = |fake: &str| post(engine.addr(), CHAT, &chat(false), fake);
    assert!(answer(r#"{"die_after":0,"how":"fin"}"#).is_none());
    assert!(answer(r#"{"die_after":0,"how":"rst"}"#).is_none());
    assert!(answer(r#"{"refuse":true}"#).is_none());
    assert!(
        !answer(r#"{"die_after":1,"how":"half_event"}"#)
            .unwrap()
            .whole
    );
    assert!(!answer(r#"{"short_body":true}"#).unwrap().whole);
    let cut = answer(r#"{"die_after":1,"how":"clean_end"}"#).unwrap();
    assert!(cut.whole && serde_json::from_slice::<serde_json::Value>(&cut.body).is_err());
}

#[test]
fn a_status_comes_in_each_of_the_shapes() {
    let engine = engine(Kind::Sglang);
    for (shape, body) in [
        ("nested", r#"{"error":{"message":"a \"b\"\nc","type":"#),
        (
            "flat",
            r#"{"object":"error","message":"a \"b\"\nc","type":"#,
        ),
        ("string", r#"{"error":"a \"b\"\nc"}"#),
        ("html", "<html><body><h1>503</h1>a \"b\"\nc</body></html>\n"),
        ("empty", ""),
    ] {
        let fake = format!(
            r#"{{"status":503,"error_shape":"{shape}","retry_after":7,"error_message":"a \"b\"\nc"}}"#
        );
        let answer = post(engine.addr(), CHAT, &chat(true), &fake).unwrap();
        assert_eq!(
            (answer.status, answer.header("retry-after")),
            (503, Some("7")),
            "{shape}"
        );
        assert!(
            answer.text().starts_with(body),
            "{shape}: {}",
            answer.text()
        );
    }
}

#[test]
fn an_error_may_be_the_first_event_of_a_200() {
    let engine = engine(Kind::Sglang);
    let answer = post(
        engine.addr(),
        CHAT,
        &chat(true),
        r#"{"first_event_error":true}"#,
    )
    .unwrap();
    let data = answer.data();
    assert_eq!(
        (answer.status, answer.whole, data.len(), data[1].as_str()),
        (200, true, 2, "[DONE]")
    );
    assert!(
        data[0].starts_with(r#"{"error": {"message": "The request queue is full.""#),
        "{data:?}"
    );
    assert_eq!(
        post(
            engine.addr(),
            CHAT,
            &chat(false),
            r#"{"first_event_error":true}"#
        )
        .unwrap()
        .status,
        503
    );
}

#[test]
fn only_the_first_requests_fail_when_told_so() {
    let engine = engine(Kind::Openai);
    let status =
        |fake: &str| post(engine.addr(), CHAT, &chat(false), fake).map(|answer| answer.status);
    assert_eq!(status(r#"{"fail_first":2}"#), None);
    assert_eq!(status(r#"{"fail_first":2,"status":500}"#), Some(500));
    assert_eq!(status(r#"{"fail_first":2,"status":500}"#), Some(200));
    engine.reset();
    assert_eq!(status(r#"{"fail_first":1}"#), None);
}

#[test]
fn a_key_that_does_not_exist_is_refused() {
    let engine = engine(Kind::Vllm);
    let answer = post(engine.addr(), CHAT, &chat(false), r#"{"die_afer":1}"#).unwrap();
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("die_afer"), "{}", answer.text());
    assert_eq!(
        post(engine.addr(), "/fake/behave", r#"{"nope":1}"#, "{}")
            .unwrap()
            .status,
        400
    );
}

#[test]
fn directives_come_by_header_by_body_and_for_the_whole_engine() {
    let engine = engine(Kind::Vllm);
    let tokens = |body: &str, fake: &str| {
        let answer = post(engine.addr(), CHAT, body, fake).unwrap().json();
        answer["usage"]["completion_tokens"].as_u64().unwrap()
    };
    let with_body = r#"{"messages":[{"role":"user","content":"hi"}],"fake":{"tokens":5}}"#;
    assert_eq!(tokens(&chat(false), "{}"), 16);
    assert_eq!(tokens(&chat(false), r#"{"tokens":4}"#), 4);
    assert_eq!(tokens(with_body, "{}"), 5);
    assert_eq!(tokens(with_body, r#"{"tokens":4}"#), 4);
    engine.behave(r#"{"tokens":3}"#);
    assert_eq!(tokens(&chat(false), "{}"), 3);
    engine.behave(r#"{"tokens":null}"#);
    assert_eq!(tokens(&chat(false), "{}"), 16);
    let limited = r#"{"messages":[{"role":"user","content":"12345678"}],"max_tokens":2}"#;
    let answer = post(engine.addr(), CHAT, limited, "{}").unwrap().json();
    assert_eq!(answer["usage"]["prompt_tokens"], 2);
    assert_eq!(answer["choices"][0]["message"]["content"], "t0 t1");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[test]
fn events_are_cut_and_joined_as_told() {
    let engine = engine(Kind::Vllm);
    let plain = post(engine.addr(), CHAT, &chat(true), "{}").unwrap();
    // Role, 16 tokens (the last with the finish reason), the end.
    assert_eq!(plain.chunks.len(), 18);
    let split = post(engine.addr(), CHAT, &chat(true), r#"{"split":7}"#).unwrap();
    assert!(split.chunks.iter().all(|chunk| chunk.len() <= 7) && split.data().len() == 18);
    let merged = post(engine.addr(), CHAT, &chat(true), r#"{"merge":5}"#).unwrap();
    assert_eq!((merged.chunks.len(), merged.data().len()), (4, 18));
    let crlf = post(engine.addr(), CHAT, &chat(true), r#"{"crlf":true}"#).unwrap();
    assert_eq!(crlf.text().matches("\r\n\r\n").count(), 18);
    let padded = post(
        engine.addr(),
        CHAT,
        &chat(true),
        r#"{"chunk_bytes":1000,"tokens":3}"#,
    )
    .unwrap();
    assert!(padded.chunks[1..4].iter().all(|chunk| chunk.len() == 1000));
    let text = post(
        engine.addr(),
        CHAT,
        &chat(true),
        r#"{"text":["a","data: [DONE]\n\n","c"]}"#,
    )
    .unwrap();
    assert!(
        text.data()[2].contains(r#""content":"data: [DONE]\n\n""#) && text.data().len() == 5,
        "{text:?}"
    );
    let usage = post(
        engine.addr(),
        CHAT,
        &chat(true),
        r#"{"usage_every_chunk":true,"tokens":2}"#,
    )
    .unwrap();
    assert_eq!(usage.text().matches(r#""usage":{"#).count(), 3);
    let raw = post(
        engine.addr(),
        CHAT,
        &chat(true),
        r#"{"raw":["data: x\n","\n"]}"#,
    )
    .unwrap();
    assert_eq!((raw.text().as_str(), raw.chunks.len()), ("data: x\n\n", 2));
}

#[test]
fn a_big_stream_has_the_bytes_asked_for_and_waits_for_its_reader() {
    let engine = engine(Kind::Vllm);
    let answer = post(
        engine.addr(),
        CHAT,
        &chat(true),
        r#"{"total_bytes":5000000}"#,
    )
    .unwrap();
    assert!(
        (5_000_000..5_100_000).contains(&answer.body.len()),
        "{}",
        answer.body.len()
    );
    assert_eq!(answer.data().last().unwrap(), "[DONE]");
    engine.reset();
    let mut slow = Client::new(engine.addr());
    slow.post(CHAT, &chat(true), r#"{"total_bytes":200000000}"#);
    slow.read_until("t1");
    let state = engine.state();
    assert_eq!(state.open_streams, 1);
    assert!(
        state.tokens * 16_384 < 50_000_000,
        "{} tokens were sent to a client that does not read",
        state.tokens
    );
}

#[test]
fn silence_comes_where_it_was_asked_for() {
    let quiet = Duration::from_millis(150);
    for (kind, headers_early) in [
        (Kind::Vllm, true),
        (Kind::Sglang, false),
        (Kind::Llamacpp, false),
    ] {
        let engine = engine(kind);
        let mut client = Client::new(engine.addr());
        client.post(CHAT, &chat(true), r#"{"prefill_ms":4000,"tokens":1}"#);
        match headers_early {
            true => drop(client.read_until("HTTP/1.1 200")),
            false => assert!(client.is_silent(quiet), "{kind:?}"),
        }
        assert_eq!(client.answer().unwrap().data().last().unwrap(), "[DONE]");
        let mut client = Client::new(engine.addr());
        client.post(CHAT, &chat(true), r#"{"first_ms":4000,"tokens":1}"#);
        assert!(client.is_silent(quiet), "{kind:?}");
        let mut client = Client::new(engine.addr());
        client.post(
            CHAT,
            &chat(true),
            r#"{"headers_first":true,"comments":true,"comment_ms":10}"#,
        );
        let seen = client.read_until(": keep-alive\n\n");
        assert!(
            seen.starts_with("HTTP/1.1 200") && !seen.contains("data:"),
            "{seen}"
        );
    }
}

#[test]
fn a_held_engine_adds_no_token_until_it_is_let_go() {
    let quiet = Duration::from_millis(150);
    for stream in [true, false] {
        let engine = engine(Kind::Sglang);
        engine.behave(r#"{"hold_after":0}"#);
        let mut client = Client::new(engine.addr());
        client.post(CHAT, &chat(stream), r#"{"tokens":4}"#);
        engine.wait(SOON, |state| state.open == 1).unwrap();
        assert!(client.is_silent(quiet), "not a byte of it");
        engine.behave(r#"{"hold_after":2}"#);
        engine.wait(SOON, |state| state.tokens == 2).unwrap();
        if stream {
            client.read_until("t1");
        }
        assert!(client.is_silent(quiet));
        assert_eq!(engine.state().tokens, 2);
        engine.behave(r#"{"hold_after":null}"#);
        assert!(client.answer().is_some());
        let state = engine.wait(SOON, |state| state.open == 0).unwrap();
        assert_eq!((state.tokens, state.completed), (4, 1));
    }
}

#[test]
fn a_client_that_leaves_is_noticed_in_every_phase_on_every_endpoint() {
    let bodies = [
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
        ("/v1/embeddings", "input"),
        ("/v1/audio/transcriptions", "file"),
        ("/v1/echo", "any"),
    ];
    let silent = [
        r#"{"hang_generate":true}"#,
        r#"{"headers_first":true,"hang_generate":null,"first_ms":60000}"#,
        r#"{"first_ms":60000}"#,
        r#"{"die_after":1,"how":"stall"}"#,
    ];
    let engine = engine(Kind::Vllm);
    let mut expected = 0;
    for (path, field) in bodies {
        for (stream, fake) in silent.iter().flat_map(|fake| [(true, fake), (false, fake)]) {
            let mut client = Client::new(engine.addr());
            client.post(
                path,
                &format!(r#"{{"{field}":"x","stream":{stream}}}"#),
                fake,
            );
            engine.wait(SOON, |state| state.open == 1).unwrap();
            drop(client);
            expected += 1;
            let state = engine.wait(LEFT_MAX, |state| state.open == 0);
            let state = state.unwrap_or_else(|state| panic!("{path} {stream} {fake}: {state:?}"));
            assert_eq!(
                (state.cancelled, state.left),
                (expected, expected),
                "{path} {stream} {fake}"
            );
        }
    }
    assert_eq!(engine.state().last.last().unwrap().outcome, "cancelled");
}

#[test]
fn an_answer_counts_as_completed_before_its_last_bytes_are_out_and_as_cancelled_if_nobody_takes_them()
 {
    // More than the sockets hold, so that its one write waits for the reader.
    let text = "x".repeat(2 << 20);
    let body =
        format!(r#"{{"messages":[{{"role":"user","content":"hi"}}],"fake":{{"text":"{text}"}}}}"#);
    let engine = start(Options {
        slots: 1,
        ..Options::new(Kind::Vllm)
    })
    .unwrap();
    let counts = |state: &StateView| (state.completed, state.cancelled, state.left);
    for (read, expected) in [(true, (1, 0, 0)), (false, (1, 1, 1))] {
        let mut client = Client::new(engine.addr());
        client.post(CHAT, &body, "{}");
        client.read_until("HTTP/1.1 200");
        let state = engine.state();
        assert_eq!((state.open, state.running), (0, 0), "{state:?}");
        assert_eq!(state.completed, if read { 1 } else { 2 });
        match read {
            true => assert!(client.answer().unwrap().whole),
            false => drop(client),
        }
        engine
            .wait(SOON, |state| counts(state) == expected)
            .unwrap();
        let state = engine.state();
        let outcome = &state.last.last().unwrap().outcome;
        assert_eq!(outcome, if read { "completed" } else { "cancelled" });
    }
}

#[test]
fn a_client_that_leaves_within_its_own_body_is_noticed() {
    let engine = engine(Kind::Vllm);
    let mut client = Client::new(engine.addr());
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: fake\r\nContent-Length: 1000\r\n\r\n{\"half\":");
    engine.wait(SOON, |state| state.open == 1).unwrap();
    drop(client);
    let state = engine.wait(SOON, |state| state.open == 0).unwrap();
    assert_eq!((state.cancelled, state.completed), (1, 0));
}

#[test]
fn llamacpp_goes_on_for_a_client_that_left_while_it_is_busy() {
    let engine = engine(Kind::Llamacpp);
    let mut busy = Client::new(engine.addr());
    busy.post(CHAT, &chat(true), r#"{"token_ms":20,"tokens":100000}"#);
    busy.read_until("t1");
    let mut left = Client::new(engine.addr());
    left.post(CHAT, &chat(false), r#"{"token_ms":20,"tokens":30}"#);
    engine.wait(SOON, |state| state.open == 2).unwrap();
    drop(left);
    engine.wait(SOON, |state| state.left == 1).unwrap();
    let state = engine.wait(SOON, |state| state.completed == 1).unwrap();
    assert_eq!((state.cancelled, state.open), (0, 1), "it ran to its end");
    // Alone, a departure is noticed after a second without results.
    drop(busy);
    engine
        .wait(SOON, |state| state.open == 0 && state.cancelled == 1)
        .unwrap();
    let mut alone = Client::new(engine.addr());
    alone.post(CHAT, &chat(false), r#"{"first_ms":60000}"#);
    engine.wait(SOON, |state| state.open == 1).unwrap();
    drop(alone);
    engine.wait(LEFT_MAX, |state| state.cancelled == 2).unwrap();
}

#[test]
fn llamacpp_goes_on_for_ever_with_a_conversation_id() {
    let engine = engine(Kind::Llamacpp);
    let mut client = Client::new(engine.addr());
    let body = chat(true);
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nX-Conversation-Id: 1\r\nx-fake: {{\"token_ms\":10,\"tokens\":50}}\r\n"
    );
    client.send(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes());
    client.read_until("t1");
    drop(client);
    let state = engine.wait(SOON, |state| state.open == 0).unwrap();
    assert_eq!((state.completed, state.cancelled, state.tokens), (1, 0, 50));
}

#[test]
fn requests_beyond_the_slots_wait_and_beyond_the_queue_are_refused_as_the_kind_does() {
    for (kind, whole, streamed) in [
        (Kind::Vllm, 503, 503),
        (Kind::Sglang, 503, 200),
        (Kind::Openai, 429, 429),
    ] {
        let engine = start(Options {
            slots: 1,
            max_queue: Some(1),
            ..Options::new(kind)
        })
        .unwrap();
        let mut first = Client::new(engine.addr());
        first.post(CHAT, &chat(true), r#"{"die_after":1,"how":"stall"}"#);
        engine.wait(SOON, |state| state.running == 1).unwrap();
        let mut second = Client::new(engine.addr());
        second.post(CHAT, &chat(true), r#"{"tokens":1}"#);
        engine.wait(SOON, |state| state.waiting == 1).unwrap();
        assert_eq!(
            post(engine.addr(), CHAT, &chat(false), "{}")
                .unwrap()
                .status,
            whole,
            "{kind:?}"
        );
        let refused = post(engine.addr(), CHAT, &chat(true), "{}").unwrap();
        assert_eq!(refused.status, streamed, "{kind:?}");
        if kind == Kind::Sglang {
            assert!(refused.data()[0].starts_with(r#"{"error""#) && refused.data()[1] == "[DONE]");
        }
        drop(first);
        assert_eq!(second.answer().unwrap().data().last().unwrap(), "[DONE]");
        let state = engine.wait(SOON, |state| state.open == 0).unwrap();
        assert_eq!(
            (state.running, state.waiting, state.peak_running),
            (0, 0, 1)
        );
    }
}

#[test]
fn probes_fail_as_told() {
    let engine = engine(Kind::Vllm);
    let status = |path: &str| get(engine.addr(), path).map(|answer| answer.status);
    engine.behave(r#"{"health":503,"metrics":500,"models":"500"}"#);
    assert_eq!(
        (status("/health"), status("/metrics"), status("/v1/models")),
        (Some(503), Some(500), Some(500))
    );
    engine.behave(r#"{"health":"refuse","metrics":"garbage","models":"empty"}"#);
    assert_eq!((status("/health"), status("/metrics")), (None, Some(200)));
    assert_eq!(
        get(engine.addr(), "/v1/models").unwrap().text(),
        r#"{"object":"list","data":[]}"#
    );
    engine.behave(
        r#"{"health":"ok","metrics":"ok","metrics_values":{"running":3,"waiting":4,"kv":0.5}}"#,
    );
    let page = || get(engine.addr(), "/metrics").unwrap().text();
    assert!(
        page().contains("num_requests_running{engine=\"0\",model_name=\"fake\"} 3.0\n"),
        "{}",
        page()
    );
    engine.behave(r#"{"metrics":"frozen"}"#);
    let frozen = page();
    engine.behave(r#"{"metrics_values":{"running":9}}"#);
    assert_eq!(page(), frozen);
    engine.behave(r#"{"metrics":"ok"}"#);
    assert_ne!(page(), frozen);
    let mut client = Client::new(engine.addr());
    engine.behave(r#"{"hang":true}"#);
    client.send(b"GET /health HTTP/1.1\r\n\r\n");
    assert!(client.is_silent(Duration::from_millis(100)));
    assert_eq!(status("/fake/state"), Some(200));
}

#[test]
fn the_listener_closes_and_opens_again_on_the_same_port() {
    let engine = engine(Kind::Vllm);
    let mut kept = Client::new(engine.addr());
    kept.send(b"GET /health HTTP/1.1\r\n\r\n");
    assert_eq!(kept.answer().unwrap().status, 200);
    engine.behave(r#"{"accept":false}"#);
    assert!(TcpStream::connect(engine.addr()).is_err());
    kept.send(b"GET /health HTTP/1.1\r\n\r\n");
    assert_eq!(kept.answer().unwrap().status, 200, "open connections stay");
    engine.behave(r#"{"accept":true}"#);
    assert_eq!(get(engine.addr(), "/health").unwrap().status, 200);
}

#[test]
fn connections_close_when_idle_and_on_reuse() {
    let engine = engine(Kind::Llamacpp);
    engine.behave(r#"{"close_idle_ms":100}"#);
    let mut client = Client::new(engine.addr());
    client.send(b"GET /health HTTP/1.1\r\n\r\n");
    assert_eq!(
        client.answer().unwrap().header("keep-alive"),
        Some("timeout=5, max=100")
    );
    let start = Instant::now();
    assert!(client.is_closed() && start.elapsed() >= Duration::from_millis(90));
    engine.behave(r#"{"close_idle_ms":null,"close_on_reuse":true}"#);
    let mut client = Client::new(engine.addr());
    client.post(CHAT, &chat(false), "{}");
    assert_eq!(client.answer().unwrap().status, 200);
    client.post(CHAT, &chat(false), "{}");
    assert!(client.answer().is_none());
    assert_eq!(engine.wait(SOON, |state| state.open == 0).unwrap().total, 1);
}

#[test]
fn loading_looks_as_the_kind_looks() {
    let loading = |kind, load_ms| {
        start(Options {
            load_ms,
            ..Options::new(kind)
        })
        .unwrap()
    };
    // For so long that each phase ends when it is told to.
    let (vllm, sglang, llamacpp) = (
        loading(Kind::Vllm, 600_000),
        loading(Kind::Sglang, 600_000),
        loading(Kind::Llamacpp, 600_000),
    );
    assert!(TcpStream::connect(vllm.addr()).is_err() && TcpStream::connect(sglang.addr()).is_err());
    assert_eq!(get(llamacpp.addr(), "/v1/models").unwrap().status, 503);
    vllm.behave(r#"{"loaded":0.5}"#);
    assert!(TcpStream::connect(vllm.addr()).is_err());
    sglang.behave(r#"{"loaded":0.5}"#);
    let status = |path: &str| get(sglang.addr(), path).unwrap().status;
    assert_eq!(
        (status("/v1/models"), status("/ready"), status("/health")),
        (200, 503, 503)
    );
    for engine in [&vllm, &sglang, &llamacpp] {
        engine.behave(r#"{"loaded":1}"#);
    }
    assert_eq!(get(vllm.addr(), "/health").unwrap().status, 200);
    assert_eq!(get(llamacpp.addr(), "/health").unwrap().status, 200);
    assert_eq!(status("/ready"), 200);
    let start = Instant::now();
    assert_eq!(status("/health"), 200);
    assert!(
        start.elapsed() >= Duration::from_millis(1000),
        "/health generates a token"
    );
    // And when nobody says so, with the time.
    for kind in [Kind::Vllm, Kind::Sglang, Kind::Llamacpp] {
        let (engine, began) = (loading(kind, 200), Instant::now());
        let is_ready = || {
            TcpStream::connect(engine.addr()).is_ok()
                && get(engine.addr(), "/v1/models").unwrap().status == 200
        };
        while !is_ready() {
            assert!(began.elapsed() < SOON, "{kind:?}");
            std::thread::yield_now();
        }
    }
}

#[test]
fn what_was_received_is_remembered_byte_for_byte() {
    let engine = engine(Kind::Vllm);
    let mut client = Client::new(engine.addr());
    let body = r#"{"model":"fake", "b": 1.50, "a":1e2}"#;
    let chunked = format!(
        "{:x}\r\n{}\r\n{:x};x=y\r\n{}\r\n0\r\nT: 1\r\n\r\n",
        10,
        &body[..10],
        body.len() - 10,
        &body[10..]
    );
    client.send(format!("PUT /v1/echo/x?q=1 HTTP/1.1\r\nB-b: 2\r\na: 1\r\nB-b: 3\r\nTransfer-Encoding: chunked\r\n\r\n{chunked}").as_bytes());
    let echo = client.answer().unwrap().json();
    assert_eq!(
        (echo["method"].as_str(), echo["path"].as_str()),
        (Some("PUT"), Some("/v1/echo/x?q=1"))
    );
    assert_eq!(
        echo["headers"],
        serde_json::json!([
            ["B-b", "2"],
            ["a", "1"],
            ["B-b", "3"],
            ["Transfer-Encoding", "chunked"]
        ])
    );
    assert_eq!(
        (echo["body"].as_str(), echo["body_bytes"].as_u64()),
        (Some(body), Some(body.len() as u64))
    );
    let state = engine.wait(SOON, |state| state.completed == 1).unwrap();
    let seen = state.newest("/v1/echo/x?q=1").unwrap();
    assert_eq!(
        (seen.body.as_deref(), seen.header("b-B")),
        (Some(body), Some("2"))
    );
    let form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--b--\r\n";
    let head = "POST /v1/audio/transcriptions HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=b\r\n";
    client.send(format!("{head}Content-Length: {}\r\n\r\n{form}", form.len()).as_bytes());
    assert_eq!(client.answer().unwrap().json()["model"], "whisper");
}

#[test]
fn pipelined_requests_are_answered_in_turn() {
    let engine = engine(Kind::Vllm);
    let mut client = Client::new(engine.addr());
    client.post("/v1/echo/1", "a", "{}");
    client.post("/v1/echo/2", "b", "{}");
    assert_eq!(client.answer().unwrap().json()["body"], "a");
    assert_eq!(client.answer().unwrap().json()["body"], "b");
}

#[test]
fn headers_and_encodings_come_as_told() {
    let engine = engine(Kind::Vllm);
    let fake = r#"{"hop_headers":true,"gzip":true,"headers":{"X-Thing":"1"}}"#;
    let answer = post(engine.addr(), CHAT, &chat(false), fake).unwrap();
    assert_eq!(answer.header("connection"), Some("x-secret-hop"));
    assert_eq!(
        (answer.header("x-secret-hop"), answer.header("x-thing")),
        (Some("1"), Some("1"))
    );
    assert_eq!(
        (answer.header("content-encoding"), &answer.body[..2]),
        (Some("gzip"), &[0x1f, 0x8b][..])
    );
}

#[test]
fn names_are_answered_as_the_kind_answers() {
    let body = r#"{"model":"other","messages":[{"role":"user","content":"x"}]}"#;
    for (kind, status, name) in [
        (Kind::Vllm, 404, None),
        (Kind::Sglang, 200, Some("other")),
        (Kind::Llamacpp, 200, Some("fake")),
        (Kind::Openai, 404, None),
    ] {
        let answer = post(engine(kind).addr(), CHAT, body, "{}").unwrap();
        assert_eq!(
            (answer.status, answer.json()["model"].as_str()),
            (status, name),
            "{kind:?}"
        );
    }
}

#[test]
fn a_required_tool_is_called() {
    let tools =
        r#""tools":[{"type":"function","function":{"name":"weather"}}],"tool_choice":"required""#;
    for kind in [Kind::Vllm, Kind::Sglang, Kind::Llamacpp, Kind::Openai] {
        let engine = engine(kind);
        let body = |stream| {
            format!(r#"{{"messages":[{{"role":"user","content":"x"}}],"stream":{stream},{tools}}}"#)
        };
        let answer = post(engine.addr(), CHAT, &body(false), "{}")
            .unwrap()
            .json();
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{kind:?}");
        assert_eq!(
            choice["message"]["tool_calls"][0]["function"]["name"], "weather",
            "{kind:?}"
        );
        let streamed = post(engine.addr(), CHAT, &body(true), "{}").unwrap();
        let arguments: String = streamed
            .data()
            .iter()
            .filter_map(|data| serde_json::from_str::<serde_json::Value>(data).ok())
            .filter_map(|event| {
                event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"]
                    .as_str()
                    .map(str::to_owned)
            })
            .collect();
        assert_eq!(
            arguments,
            choice["message"]["tool_calls"][0]["function"]["arguments"]
                .as_str()
                .unwrap(),
            "{kind:?}"
        );
    }
}

#[tokio::test]
async fn an_async_test_waits_starts_and_stops_without_a_runtime_of_its_own() {
    let engine = engine(Kind::Vllm);
    let addr = engine.addr();
    let mut client = Client::new(addr);
    client.post(CHAT, &chat(true), r#"{"hang_generate":true}"#);
    engine.until(SOON, |state| state.open == 1).await.unwrap();
    assert!(
        engine
            .until(Duration::from_millis(20), |state| state.open == 2)
            .await
            .is_err()
    );
    drop(client);
    engine
        .until(SOON, |state| state.open == 0 && state.cancelled == 1)
        .await
        .unwrap();
    engine.behave(r#"{"accept":false}"#);
    engine.behave(r#"{"accept":null}"#);
    engine.stop();
    assert!(TcpStream::connect(addr).is_err());
}
