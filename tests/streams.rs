//! A stream that dies, lies or comes in pieces: the client is told in the dialect of its endpoint, once, and never takes
//! half an answer for a whole one.

mod harness;

use fake_engine::{Kind, Options, start};
use harness::ask::{self, Ask};
use harness::{Answer, End, Gateway, Setup, chat, data};
use serde_json::{Value, json};

const KINDS: [(&str, Kind); 4] = [
    ("vllm", Kind::Vllm),
    ("sglang", Kind::Sglang),
    ("llamacpp", Kind::Llamacpp),
    ("openai", Kind::Openai),
];
/// What an engine may say about itself, and no frame may break at.
const NASTY: &str = "he said \"no\"\nand\r\n\ndata: [DONE]\n\n\tback\\slash \u{1} end";

/// One request on a connection of its own.
fn send(gateway: &Gateway, ask: &Ask, fake: &Value) -> Answer {
    let mut client = gateway.client();
    ask.send(&mut client, &fake.to_string());
    client.answer()
}

/// A request that succeeds, so that the faults before it don't add up to an open breaker.
fn recover(gateway: &Gateway) {
    assert_eq!(
        gateway
            .post("/v1/chat/completions", &chat(false), "")
            .status(),
        200
    );
}

/// Events as (name, data); data that isn't JSON or `[DONE]` fails the test.
fn events(text: &str) -> Vec<(Option<String>, Value)> {
    let blocks = text.split("\n\n").filter(|block| !block.trim().is_empty());
    blocks
        .filter(|block| !block.starts_with(':'))
        .map(|block| {
            let name = block.lines().find_map(|line| line.strip_prefix("event: "));
            let data = data(block).join("\n");
            let value = match data.as_str() {
                "[DONE]" => Value::from("[DONE]"),
                json => {
                    serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {block}"))
                }
            };
            (name.map(str::to_owned), value)
        })
        .collect()
}

/// Checks that a stream ended as a failure: some content, one error event as the last, no proper end, the body cut.
/// The error's message.
fn assert_failed(case: &str, ask: &Ask, answer: &Answer) -> String {
    let text = answer.text();
    assert_eq!(answer.status(), 200, "{case}: {text}");
    assert_ne!(
        answer.end,
        End::Complete,
        "{case}: a clean end after {text}"
    );
    assert!(text.ends_with("\n\n"), "{case}: {text}");
    let events = events(&text);
    let (name, last) = events.last().unwrap();
    for (_, before) in &events[..events.len() - 1] {
        assert!(
            before.get("error").is_none_or(Value::is_null),
            "{case}: two errors in {text}"
        );
    }
    for (name, event) in &events {
        let kinds = [name.as_deref(), event["type"].as_str(), event.as_str()];
        assert!(!kinds.contains(&Some(ask.end_mark)), "{case}: {text}");
    }
    let error = match ask.path {
        "/v1/responses" => {
            assert_eq!(
                (name.as_deref(), &last["type"]),
                (Some("error"), &json!("error")),
                "{case}"
            );
            last
        }
        "/v1/messages" => {
            assert_eq!(
                (name.as_deref(), &last["type"]),
                (Some("error"), &json!("error")),
                "{case}"
            );
            &last["error"]
        }
        _ => {
            assert_eq!(*name, None, "{case}");
            &last["error"]
        }
    };
    error["message"]
        .as_str()
        .unwrap_or_else(|| panic!("{case}: {text}"))
        .to_owned()
}

#[test]
fn an_engine_that_dies_in_mid_stream_shows_as_an_error_event_and_a_cut_body() {
    std::thread::scope(|scope| {
        for (name, kind) in KINDS {
            scope.spawn(move || {
                let engine = start(Options::new(kind)).unwrap();
                let gateway = Gateway::over(name, &[&engine]);
                for ask in ask::streams() {
                    for how in ["rst", "fin", "clean_end", "half_event"] {
                        let case = format!("{name} {ask} {how}");
                        let answer = send(&gateway, &ask, &json!({"die_after": 3, "how": how}));
                        let message = assert_failed(&case, &ask, &answer);
                        assert!(message.contains("stream"), "{case}: {message}");
                        assert!(
                            answer.text().contains("t2"),
                            "{case}: what came before is kept"
                        );
                        recover(&gateway);
                    }
                }
                gateway.counters_are_zero();
            });
        }
    });
}

#[test]
fn an_error_event_followed_by_the_proper_end_is_an_error() {
    std::thread::scope(|scope| {
        for (name, kind) in KINDS {
            scope.spawn(move || {
                let engine = start(Options::new(kind)).unwrap();
                let gateway = Gateway::over(name, &[&engine]);
                for ask in ask::streams() {
                    let case = format!("{name} {ask}");
                    let fake = json!({"die_after": 3, "how": "error_event_then_done", "error_message": NASTY});
                    let message = assert_failed(&case, &ask, &send(&gateway, &ask, &fake));
                    assert_eq!(message, NASTY, "{case}");
                    recover(&gateway);
                }
            });
        }
    });
}

#[test]
fn an_engine_that_falls_silent_or_exits_in_mid_stream_shows_as_an_error_too() {
    std::thread::scope(|scope| {
        for ask in ask::streams() {
            // Of a limit that is short for the one, the other has nothing to fear.
            for (how, said, idle_timeout) in [
                ("stall", "sent nothing", "300ms"),
                ("exit", "stream", "60s"),
            ] {
                let (path, end_mark) = (ask.path, ask.end_mark);
                let body = ask.body.clone();
                scope.spawn(move || {
                    let engine = start(Options::new(Kind::Vllm)).unwrap();
                    let gateway = Setup::new()
                        .limit("idle_timeout", idle_timeout)
                        .model("fake", "")
                        .endpoint("vllm", &engine.url(), "")
                        .start();
                    gateway.ready("fake", 1);
                    let ask = Ask {
                        path,
                        content_type: "application/json",
                        body,
                        stream: true,
                        end_mark,
                    };
                    let answer = send(&gateway, &ask, &json!({"die_after": 3, "how": how}));
                    let message = assert_failed(&format!("{ask} {how}"), &ask, &answer);
                    assert!(message.contains(said), "{message}");
                });
            }
        }
    });
}

#[test]
fn an_engine_that_dies_before_its_first_event_is_no_answer() {
    for (name, kind) in [("vllm", Kind::Vllm), ("llamacpp", Kind::Llamacpp)] {
        let engine = start(Options::new(kind)).unwrap();
        let gateway = Setup::new()
            .limit("retries", "0")
            .model("fake", "")
            .endpoint(name, &engine.url(), "")
            .start();
        gateway.ready("fake", 1);
        for ask in ask::all() {
            for how in ["rst", "fin"] {
                let answer = send(&gateway, &ask, &json!({"die_after": 0, "how": how}));
                let case = format!("{name} {ask} {how}: {}", answer.text());
                assert_eq!(
                    (answer.status(), answer.end),
                    (502, End::Complete),
                    "{case}"
                );
                let error = &answer.json()["error"];
                assert!(
                    error["message"]
                        .as_str()
                        .unwrap()
                        .contains("before the first byte"),
                    "{case}"
                );
                recover(&gateway);
            }
        }
    }
}

/// A failing engine and a good one: what comes of each request until the failing one was asked.
fn beside_a_good_one(ask: &Ask, fake: &Value) -> Vec<Answer> {
    let engines = [(); 2].map(|()| start(Options::new(Kind::Sglang)).unwrap());
    let [failing, good] = &engines;
    failing.behave(&fake.to_string());
    let gateway = Gateway::over("sglang", &[failing, good]);
    let mut answers = Vec::new();
    while failing.state().total == 0 {
        // Each with a prompt of its own: the same one would stay where it was answered first.
        let mut client = gateway.client();
        let body = ask
            .body
            .replace("hello", &format!("{} hello", answers.len()));
        client.post(ask.path, &body, "");
        answers.push(client.answer());
        assert!(
            answers.len() < 100,
            "{ask} {fake}: the failing engine is never asked"
        );
    }
    gateway.counters_are_zero();
    answers
}

#[test]
fn what_fails_before_the_first_event_is_answered_by_another_replica() {
    let failures = [
        json!({"refuse": true}),
        json!({"die_after": 0}),
        json!({"die_after": 0, "how": "half_event"}),
        json!({"first_event_error": true}),
        json!({"short_body": true}),
        json!({"status": 503}),
        json!({"status": 500, "error_shape": "html"}),
    ];
    std::thread::scope(|scope| {
        for fake in &failures {
            scope.spawn(move || {
                for ask in ask::all()
                    .iter()
                    .filter(|ask| ask.path != "/v1/audio/transcriptions")
                {
                    let streamed_only = fake["first_event_error"] == true;
                    let whole_only = fake["short_body"] == true;
                    if (streamed_only && !ask.stream) || (whole_only && ask.stream) {
                        continue;
                    }
                    // What the fake engine's embeddings don't do: they refuse and answer with a status.
                    let unknown_there = fake["how"] == "half_event" || whole_only;
                    if ask.path == "/v1/embeddings" && unknown_there {
                        continue;
                    }
                    for answer in beside_a_good_one(ask, fake) {
                        assert_eq!(answer.status(), 200, "{ask} {fake}: {}", answer.text());
                        assert_eq!(answer.end, End::Complete, "{ask} {fake}");
                    }
                }
            });
        }
    });
}

#[test]
fn a_first_event_that_is_an_error_is_answered_with_its_status_where_nobody_else_can_be_asked() {
    for (name, kind) in KINDS {
        let engine = start(Options::new(kind)).unwrap();
        let gateway = Gateway::over(name, &[&engine]);
        for ask in ask::streams() {
            let fake = json!({"first_event_error": true, "error_message": NASTY});
            let answer = send(&gateway, &ask, &fake);
            let case = format!("{name} {ask}: {}", answer.text());
            // The events of the two newer APIs carry no status.
            let status = if ask.end_mark == "[DONE]" { 503 } else { 502 };
            assert_eq!(
                (answer.status(), answer.end),
                (status, End::Complete),
                "{case}"
            );
            assert_eq!(answer.json()["error"]["message"], NASTY, "{case}");
            recover(&gateway);
        }
    }
}

#[test]
fn a_stream_that_ends_before_its_first_event_is_no_answer() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    for raw in [
        json!([]),
        json!([""]),
        json!([": only a comment\n\n"]),
        json!(["data: {\"half\":"]),
    ] {
        for ask in ask::streams() {
            let answer = send(&gateway, &ask, &json!({"raw": raw}));
            assert_eq!(answer.status(), 502, "{ask} {raw}: {}", answer.text());
            recover(&gateway);
        }
    }
}

#[test]
fn text_that_looks_like_the_end_of_a_stream_is_text() {
    let texts = [
        "data: [DONE]",
        "\n\ndata: [DONE]\n\n",
        "[DONE]",
        "message_stop",
        "{\"error\":{\"message\":\"x\"}}",
    ];
    for (name, kind) in KINDS {
        let engine = start(Options::new(kind)).unwrap();
        let gateway = Gateway::over(name, &[&engine]);
        for ask in ask::streams() {
            let case = format!("{name} {ask}");
            let answer = send(&gateway, &ask, &json!({"text": texts, "tokens": 5}));
            let whole = answer.text();
            assert_eq!(
                (answer.status(), answer.end),
                (200, End::Complete),
                "{case}: {whole}"
            );
            for text in texts {
                let json = json!(text).to_string();
                assert!(
                    whole.contains(json.trim_matches('"')),
                    "{case}: {text} is lost in {whole}"
                );
            }
            assert!(
                whole
                    .trim_end()
                    .lines()
                    .last()
                    .unwrap()
                    .contains(ask.end_mark),
                "{case}: {whole}"
            );
            // The same text, and no end: that is a failure still.
            let answer = send(
                &gateway,
                &ask,
                &json!({"text": texts, "tokens": 9, "die_after": 5, "how": "clean_end"}),
            );
            let failed = answer.text();
            assert_ne!(answer.end, End::Complete, "{case}: {failed}");
            assert!(
                failed.contains("without its proper end"),
                "{case}: {failed}"
            );
            recover(&gateway);
        }
    }
}

#[test]
fn an_engines_error_comes_out_once_in_one_shape_with_its_status() {
    std::thread::scope(|scope| {
        for (name, kind) in KINDS {
            scope.spawn(move || {
                let engine = start(Options::new(kind)).unwrap();
                let gateway = Gateway::over(name, &[&engine]);
                for shape in ["nested", "flat", "string", "html", "empty"] {
                    for status in [400, 404, 422, 429, 500, 503] {
                        for ask in ask::all() {
                            let fake = json!({"status": status, "error_shape": shape, "error_message": NASTY, "retry_after": 7});
                            let answer = send(&gateway, &ask, &fake);
                            assert_error(&format!("{name} {ask} {shape} {status}"), &answer, status, shape);
                            if status >= 500 {
                                recover(&gateway);
                            }
                        }
                    }
                }
            });
        }
    });
}

fn assert_error(case: &str, answer: &Answer, status: u16, shape: &str) {
    let text = answer.text();
    assert_eq!(
        (answer.status(), answer.end),
        (status, End::Complete),
        "{case}: {text}"
    );
    assert_eq!(answer.header("retry-after"), Some("7"), "{case}");
    assert!(
        answer
            .header("content-type")
            .unwrap()
            .starts_with("application/json"),
        "{case}"
    );
    let error = &answer.json()["error"];
    let message = error["message"]
        .as_str()
        .unwrap_or_else(|| panic!("{case}: {text}"));
    assert!(error["type"].is_string(), "{case}: {text}");
    match shape {
        "nested" | "flat" | "string" => assert_eq!(message, NASTY, "{case}"),
        _ => assert!(message.contains(&status.to_string()), "{case}: {message}"),
    }
    assert_eq!(
        text.matches("\"message\"").count(),
        1,
        "{case}: wrapped twice: {text}"
    );
}

#[test]
fn an_engines_own_nested_error_passes_byte_for_byte() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    let direct = {
        let mut client = harness::Client::new(engine.addr());
        client.post(
            "/v1/chat/completions",
            r#"{"model":"fake","messages":[]}"#,
            "",
        );
        client.answer()
    };
    let through = gateway.post(
        "/v1/chat/completions",
        r#"{"model":"fake","messages":[]}"#,
        "",
    );
    assert_eq!(direct.status(), 400);
    assert_eq!((through.status(), through.text()), (400, direct.text()));
    assert_eq!(
        through.header("content-type"),
        direct.header("content-type")
    );
}

#[test]
fn a_body_shorter_than_its_length_is_never_a_200_that_looks_whole() {
    for (name, kind) in KINDS {
        let engine = start(Options::new(kind)).unwrap();
        let gateway = Gateway::over(name, &[&engine]);
        for ask in ask::all().iter().filter(|ask| !ask.stream).take(4) {
            for fake in [
                json!({"short_body": true}),
                json!({"die_after": 3, "how": "half_event"}),
            ] {
                // llama.cpp is asked for a stream, which has no length.
                if kind == Kind::Llamacpp && fake["short_body"] == true && ask.end_mark == "[DONE]"
                {
                    continue;
                }
                let answer = send(&gateway, ask, &fake);
                assert_eq!(
                    answer.status(),
                    502,
                    "{name} {ask} {fake}: {}",
                    answer.text()
                );
                assert_eq!(
                    answer.json()["error"]["type"].as_str().map(str::is_empty),
                    Some(false)
                );
                recover(&gateway);
            }
        }
    }
    // Too large to be read before the client's headers go out: then at least the body is cut.
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    let fake = json!({"text": "x".repeat(100_000), "tokens": 16, "short_body": true});
    let body =
        json!({"model": "fake", "messages": [{"role": "user", "content": "hi"}], "fake": fake});
    let answer = gateway.post("/v1/chat/completions", &body.to_string(), "");
    assert_eq!(answer.status(), 200);
    assert!(
        answer
            .header("content-length")
            .unwrap()
            .parse::<usize>()
            .unwrap()
            > 1_600_000
    );
    assert_ne!(answer.end, End::Complete);
}

#[test]
fn a_stream_that_llamacpp_breaks_is_no_whole_answer_either() {
    let engine = start(Options::new(Kind::Llamacpp)).unwrap();
    let gateway = Gateway::over("llamacpp", &[&engine]);
    for ask in ask::all().iter().filter(|ask| !ask.stream).take(2) {
        for how in [
            "rst",
            "fin",
            "clean_end",
            "half_event",
            "error_event_then_done",
        ] {
            let answer = send(&gateway, ask, &json!({"die_after": 3, "how": how}));
            let case = format!("{ask} {how}: {}", answer.text());
            assert!(matches!(answer.status(), 500 | 502), "{case}");
            assert!(answer.json()["error"]["message"].is_string(), "{case}");
            recover(&gateway);
        }
    }
}

#[test]
fn a_known_model_without_a_ready_replica_is_503_and_an_unknown_one_404() {
    let empty = start(Options::new(Kind::Vllm).behave(r#"{"models":"empty"}"#)).unwrap();
    let sick = start(Options::new(Kind::Vllm).behave(r#"{"health":"503"}"#)).unwrap();
    let gone = start(Options::new(Kind::Vllm)).unwrap();
    let nowhere = gone.url();
    gone.stop();
    let gateway = Setup::new()
        .model("empty", "")
        .endpoint("vllm", &empty.url(), "")
        .model("sick", "")
        .endpoint("vllm", &sick.url(), "")
        .model("fake", "")
        .endpoint("vllm", &nowhere, "")
        .start();
    for model in ["empty", "sick", "fake"] {
        for ask in ask::all()
            .iter()
            .filter(|ask| ask.content_type == "application/json")
        {
            let mut client = gateway.client();
            let body = ask.body.replace("fake", model);
            client.post(ask.path, &body, "");
            let answer = client.answer();
            assert_eq!(answer.status(), 503, "{model} {ask}: {}", answer.text());
            let seconds: u64 = answer.header("retry-after").unwrap().parse().unwrap();
            assert!((1..=60).contains(&seconds));
            if ask.path != "/v1/messages" {
                assert_eq!(answer.code(), "no_replica");
            }
            client.post(ask.path, &ask.body.replace("fake", "nobody"), "");
            let answer = client.answer();
            assert_eq!(answer.status(), 404, "{ask}: {}", answer.text());
            let message = answer.json()["error"]["message"]
                .as_str()
                .unwrap()
                .to_owned();
            assert!(
                message.contains("`nobody`") && message.contains("`sick`"),
                "{message}"
            );
        }
    }
    assert_eq!(empty.state().total + sick.state().total, 0);
}

/// Events of every kind that a parser may meet, two of them with characters of several bytes.
const EVENTS: [&str; 8] = [
    "data: {\"model\":\"fake\",\"id\":\"1\",\"choices\":[{\"delta\":{\"content\":\"t\\u00e9 日本語 🦀\"}}]}\n\n",
    // Before the first event it would be dropped: the client's headers wait for something to say.
    ": a comment\n\n",
    "event: ping\ndata: {\"model\":\"fake\",\"type\": \"ping\"}\n\n",
    "id: 7\nretry: 10\ndata: {\"model\":\"fake\",\ndata: \"choices\":[]}\n\n",
    "data:{\"model\":\"fake\",\"n\":1.50,\"choices\":[],\"text\":\"data: [DONE]\\n\\n\"}\n\n",
    "\n\ndata: {\"model\":\"fake\",\"choices\":[{\"delta\":{\"content\":\"\"}}]}\n\n",
    "data: {\"model\":\"fake\",\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2,\"total_tokens\":3}}\n\n",
    "data: [DONE]\n\n",
];

fn raw(gateway: &Gateway, fake: Value) -> Answer {
    let body = json!({"model": "fake", "stream": true, "messages": [{"role": "user", "content": "hi"}], "fake": fake});
    gateway.post("/v1/chat/completions", &body.to_string(), "")
}

#[test]
fn events_arrive_byte_for_byte_however_the_packets_were_cut() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    let expected = EVENTS.concat();
    for crlf in [false, true] {
        let wanted = if crlf {
            expected.replace('\n', "\r\n")
        } else {
            expected.clone()
        };
        for split in (1..24).chain([31, 64, 100, 257, 4096]) {
            let answer = raw(
                &gateway,
                json!({"raw": EVENTS, "split": split, "crlf": crlf}),
            );
            assert_eq!(
                (answer.status(), answer.end),
                (200, End::Complete),
                "split {split}"
            );
            assert_eq!(answer.text(), wanted, "split {split}, crlf {crlf}");
        }
        for merge in 2..=9 {
            let answer = raw(
                &gateway,
                json!({"raw": EVENTS, "merge": merge, "crlf": crlf}),
            );
            assert_eq!(answer.text(), wanted, "merge {merge}, crlf {crlf}");
        }
    }
    let cr = expected.replace('\n', "\r");
    let answer = raw(&gateway, json!({"raw": cr, "split": 5}));
    assert_eq!((answer.text(), answer.end), (cr, End::Complete));
}

#[test]
fn every_dialects_stream_survives_pieces_of_any_size() {
    std::thread::scope(|scope| {
        for (name, kind) in KINDS {
            scope.spawn(move || {
                let engine = start(Options::new(kind)).unwrap();
                let gateway = Gateway::over(name, &[&engine]);
                for ask in ask::streams() {
                    for fake in [
                        json!({"split": 1}),
                        json!({"split": 7}),
                        json!({"merge": 3}),
                        json!({"crlf": true}),
                        json!({"crlf": true, "split": 3}),
                        json!({"usage_every_chunk": true, "comments": true, "comment_ms": 5, "token_ms": 10}),
                    ] {
                        let answer = send(&gateway, &ask, &fake);
                        let case = format!("{name} {ask} {fake}");
                        assert_eq!((answer.status(), answer.end), (200, End::Complete), "{case}");
                        let text = answer.text().replace("\r\n", "\n");
                        let last = events(&text).pop().unwrap();
                        let last = [last.0.unwrap_or_default(), last.1["type"].to_string(), last.1.to_string()];
                        assert!(last.iter().any(|part| part.contains(ask.end_mark)), "{case}: {text}");
                        assert!((0..16).all(|token| text.contains(&format!("t{token}"))), "{case}: {text}");
                    }
                }
            });
        }
    });
}

#[test]
fn an_event_too_large_to_hold_passes_in_pieces() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    for ask in ask::streams() {
        let answer = send(
            &gateway,
            &ask,
            &json!({"chunk_bytes": 3 << 19, "tokens": 3}),
        );
        assert_eq!((answer.status(), answer.end), (200, End::Complete), "{ask}");
        assert!(
            answer.body.len() > 9 << 19,
            "{ask}: {} bytes",
            answer.body.len()
        );
        let events = events(&answer.text());
        assert!(events.len() >= 4, "{ask}: {} events", events.len());
        assert!(
            answer.text().trim_end().ends_with("[DONE]") || answer.text().contains(ask.end_mark),
            "{ask}"
        );
        // It dies inside such an event: the client has a piece of it already, and still gets a whole error after it.
        let answer = send(
            &gateway,
            &ask,
            &json!({"chunk_bytes": 3 << 20, "tokens": 3, "die_after": 1, "how": "half_event"}),
        );
        assert_ne!(answer.end, End::Complete, "{ask}");
        let last = data(&answer.text()).pop().unwrap();
        let last: Value =
            serde_json::from_str(&last).unwrap_or_else(|_| panic!("{ask}: no error at the end"));
        assert!(
            last["error"]["message"].is_string() || last["message"].is_string(),
            "{ask}: {last}"
        );
        recover(&gateway);
    }
    // As the very first event.
    let long = format!(
        "data: {{\"model\":\"fake\",\"choices\":[],\"text\":\"{}\"}}\n\n",
        "y".repeat(2 << 20)
    );
    let answer = raw(
        &gateway,
        json!({"raw": [long, "data: [DONE]\n\n"], "split": 100_000}),
    );
    assert_eq!((answer.status(), answer.end), (200, End::Complete));
    assert_eq!(answer.body.len(), long.len() + "data: [DONE]\n\n".len());
}

#[test]
fn every_failed_stream_is_on_record_as_one() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    for how in ["rst", "clean_end"] {
        gateway.post(
            "/v1/chat/completions",
            &chat(true),
            &json!({"die_after": 2, "how": how}).to_string(),
        );
    }
    gateway.until("both are counted", || {
        gateway.metric("llmgw_requests_total", "upstream_failed") == 2.0
    });
    assert_eq!(
        gateway.metric("llmgw_upstream_errors_total", "truncated"),
        2.0
    );
}

#[test]
fn an_error_in_one_packet_with_what_came_before_is_the_last_thing_the_client_sees() {
    for (name, kind) in KINDS {
        let engine = start(Options::new(kind)).unwrap();
        let gateway = Gateway::over(name, &[&engine]);
        for ask in ask::streams() {
            for more in [
                json!({"merge": 40}),
                json!({"split": 3}),
                json!({"crlf": true, "merge": 3}),
            ] {
                let mut fake =
                    json!({"die_after": 4, "how": "error_event_then_done", "error_message": NASTY});
                fake.as_object_mut()
                    .unwrap()
                    .extend(more.as_object().unwrap().clone());
                let mut answer = send(&gateway, &ask, &fake);
                let text = answer.text().replace("\r\n", "\n");
                answer.body = text.into_bytes();
                let case = format!("{name} {ask} {more}");
                assert_eq!(assert_failed(&case, &ask, &answer), NASTY, "{case}");
                assert!(
                    answer.text().contains("t3"),
                    "{case}: what came before is kept"
                );
                recover(&gateway);
            }
        }
    }
}

#[test]
fn a_body_of_another_kind_that_breaks_off_is_cut_as_well() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    for how in ["rst", "fin"] {
        let headers = json!({"Content-Type": "audio/mpeg"});
        let fake = json!({"die_after": 3, "how": how, "token_ms": 20, "headers": headers});
        let answer = gateway.post("/v1/chat/completions", &chat(true), &fake.to_string());
        assert_eq!(answer.status(), 200);
        assert_ne!(answer.end, End::Complete, "{how}: {}", answer.text());
        assert!(
            !answer.text().contains("error"),
            "{how}: no event belongs there"
        );
        recover(&gateway);
    }
}
