//! What the gateway itself puts into an answer or takes out of it: comments while an engine is silent, whole answers made
//! of streams, usage that only it asked for.

mod harness;

use fake_engine::{Kind, Options, Running, start};
use harness::ask;
use harness::{CANCEL_MAX, Client, End, Gateway, Setup, chat, data};
use serde_json::Value;

/// The SHA-256 of `key`, as the configuration has it.
const KEY_HASH: &str = "sha256:2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683";

fn with_keepalive(kind: Kind, name: &str) -> (Running, Gateway) {
    let engine = start(Options::new(kind)).unwrap();
    let gateway = Setup::new()
        .limit("keepalive", "60ms")
        .model("fake", "")
        .endpoint(name, &engine.url(), "")
        .start();
    gateway.ready("fake", 1);
    (engine, gateway)
}

#[test]
fn a_stream_whose_engine_is_silent_gets_comments_that_parsers_ignore() {
    let kinds = [("vllm", Kind::Vllm), ("llamacpp", Kind::Llamacpp)];
    let running = kinds.map(|(name, kind)| with_keepalive(kind, name));
    let asks = &ask::streams();
    // All at once: the silence is much longer than what lies between two comments, on a machine that stalls too.
    std::thread::scope(|scope| {
        for (_, gateway) in &running {
            for ask in asks {
                for fake in [r#"{"first_ms":12000}"#, r#"{"tokens":2,"token_ms":12000}"#] {
                    scope.spawn(move || gets_comments(gateway, ask, fake));
                }
            }
        }
    });
    for (engine, gateway) in &running {
        engine.reset();
        for ask in asks {
            // Cancelled while only comments flow.
            let mut client = gateway.client();
            ask.send(&mut client, r#"{"first_ms":60000}"#);
            client.head();
            client.body_until(": keep-alive");
            drop(client);
            // llama.cpp notices at once, but before its first byte stops only when it has been quiet for a while.
            engine.wait(CANCEL_MAX, |state| state.left == 1).unwrap();
            engine.reset();
        }
        gateway.counters_are_zero();
    }
}

/// Whose engine is silent for a while gets comments, and then its answer.
fn gets_comments(gateway: &Gateway, ask: &ask::Ask, fake: &str) {
    let mut client = gateway.client();
    ask.send(&mut client, fake);
    let answer = client.answer();
    let text = answer.text();
    assert_eq!(
        (answer.status(), answer.end),
        (200, End::Complete),
        "{ask} {fake}: {text}"
    );
    assert!(
        text.matches(": keep-alive\n\n").count() >= 2,
        "{ask} {fake}: {text}"
    );
    assert!(
        answer
            .header("content-type")
            .unwrap()
            .starts_with("text/event-stream")
    );
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    let is_json = |event: &String| serde_json::from_str::<Value>(event).is_ok();
    let mut events = data(&text).into_iter();
    assert!(events.all(|event| event == "[DONE]" || is_json(&event)));
    assert!(text.trim_end().contains(ask.end_mark), "{ask}: {text}");
}

#[test]
fn a_refusal_after_a_comment_is_an_error_event_in_the_dialect_and_a_cut() {
    let (_engine, gateway) = with_keepalive(Kind::Vllm, "vllm");
    // All at once: the silence is much longer than what lies before the first comment, on a machine that stalls too.
    let asked = ask::streams().into_iter().map(|ask| {
        let mut client = gateway.client();
        ask.send(
            &mut client,
            r#"{"first_ms":12000,"status":400,"error_message":"too \"long\"\nreally"}"#,
        );
        (ask, client)
    });
    for (ask, mut client) in asked.collect::<Vec<_>>() {
        let answer = client.answer();
        let text = answer.text();
        assert_eq!(answer.status(), 200, "{text}");
        assert!(text.starts_with(": keep-alive\n\n"), "{text}");
        assert_ne!(answer.end, End::Complete, "{ask}: {text}");
        assert!(!text.contains(ask.end_mark), "{ask}: {text}");
        let event: Value = serde_json::from_str(&data(&text).pop().unwrap()).unwrap();
        let message = event["error"]["message"]
            .as_str()
            .or(event["message"].as_str())
            .unwrap();
        assert!(message.contains("too \"long\""), "{ask}: {message}");
        let named = matches!(ask.path, "/v1/responses" | "/v1/messages");
        assert_eq!(named, text.contains("event: error\n"), "{ask}: {text}");
    }
    // Who did not ask for a stream gets the status, however long it takes.
    let answer = gateway.post(
        "/v1/chat/completions",
        &chat(false),
        r#"{"first_ms":200,"status":400}"#,
    );
    assert_eq!(answer.status(), 400);
}

/// What differs between two answers of one engine to one request.
fn without_chance(mut answer: Value) -> Value {
    for key in ["id", "created", "timings"] {
        let value = &mut answer[key];
        *value = Value::from(!value.is_null());
    }
    if let Some(choices) = answer["choices"].as_array_mut() {
        for choice in choices {
            for call in choice["message"]["tool_calls"]
                .as_array_mut()
                .into_iter()
                .flatten()
            {
                call["id"] = Value::from(call["id"].is_string());
            }
        }
    }
    answer
}

#[test]
fn a_whole_answer_put_together_from_llamacpps_stream_is_the_one_it_would_have_sent() {
    let engine = start(Options::new(Kind::Llamacpp)).unwrap();
    let gateway = Gateway::over("llamacpp", &[&engine]);
    let tool = r#""tools":[{"type":"function","function":{"name":"weather","parameters":{}}}],"tool_choice":"required""#;
    for more in [
        "\"n\":1",
        "\"n\":2",
        "\"max_tokens\":3",
        "\"logprobs\":true,\"top_logprobs\":2",
        tool,
    ] {
        for (path, prompt) in [
            (
                "/v1/chat/completions",
                r#""messages":[{"role":"user","content":"hello you"}]"#,
            ),
            ("/v1/completions", r#""prompt":"hello you""#),
        ] {
            let more = if path == "/v1/completions" {
                more.replace("true,\"top_logprobs\":2", "2")
            } else {
                more.to_owned()
            };
            let body = format!(r#"{{"model":"fake",{prompt},{more}}}"#);
            let mut direct = Client::new(engine.addr());
            direct.post(path, &body, "");
            let direct = direct.answer();
            let through = gateway.post(path, &body, "");
            assert_eq!(
                (direct.status(), through.status()),
                (200, 200),
                "{}",
                through.text()
            );
            assert_eq!(
                without_chance(through.json()),
                without_chance(direct.json()),
                "{path} {more}"
            );
            assert_eq!(
                through.header("content-type"),
                direct.header("content-type")
            );
            let seen = engine.state().newest(path).unwrap().body.clone().unwrap();
            assert!(
                seen.contains("\"stream\":true"),
                "it was not streamed: {seen}"
            );
        }
    }
}

#[test]
fn usage_that_only_the_gateway_asked_for_is_counted_and_taken_out_again() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Setup::new()
        .top(&format!(
            "tenants:\n  - {{name: someone, keys: [\"{KEY_HASH}\"], models: [\"*\"]}}"
        ))
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .start();
    gateway.ready("fake", 1);
    for ask in ask::streams().iter().filter(|ask| ask.end_mark == "[DONE]") {
        for (asked, fake) in [
            (false, "{}"),
            (true, "{}"),
            (false, r#"{"merge":40}"#),
            (false, r#"{"crlf":true,"split":9}"#),
        ] {
            let body = match asked {
                false => ask.body.clone(),
                true => ask
                    .body
                    .replacen('{', r#"{"stream_options":{"include_usage":true},"#, 1),
            };
            let headers = [("authorization", "Bearer key"), ("x-fake", fake)];
            let mut client = gateway.client();
            client.request("POST", ask.path, &headers, body.as_bytes());
            let answer = client.answer();
            assert_eq!((answer.status(), answer.end), (200, End::Complete));
            let usage = data(&answer.text())
                .iter()
                .filter(|event| event.contains("\"usage\":{"))
                .count();
            assert_eq!(usage, usize::from(asked), "{ask}: {}", answer.text());
            let chunks = data(&answer.text());
            assert_eq!(chunks.last().unwrap(), "[DONE]");
            assert!(
                chunks
                    .iter()
                    .all(|chunk| !chunk.contains("\"choices\":[]") || asked),
                "{chunks:#?}"
            );
            let seen = engine
                .state()
                .newest(ask.path)
                .unwrap()
                .body
                .clone()
                .unwrap();
            assert!(seen.contains("\"include_usage\":true"), "{seen}");
        }
    }
    // Four streams of two endpoints: 16 tokens each, as the engine counted them.
    gateway.until("the tokens are counted", || {
        gateway.metric("llmgw_tokens_total", "kind=\"output\"") == 128.0
    });
    gateway.await_log("output_tokens=16");
}

#[test]
fn without_tenants_nobody_needs_the_usage_and_the_request_stays_as_it_is() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    assert_eq!(
        gateway
            .post("/v1/chat/completions", &chat(true), "")
            .status(),
        200
    );
    let seen = engine
        .state()
        .newest("/v1/chat/completions")
        .unwrap()
        .body
        .clone();
    assert_eq!(seen, Some(chat(true)));
}
