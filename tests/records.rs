//! What is written down about requests: one record each, the engines' own token counts, and no secrets.

mod harness;
#[path = "harness/more.rs"]
mod more;

use fake_engine::Kind;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use harness::{Answer, Gateway, Setup};
use more::{at_once, await_records, chat_of, engine, record_of};

const CHAT: &str = "/v1/chat/completions";
const KEY: &str = "client-key-0c1d2e3f";
const ENGINE_KEY: &str = "engine-key-4a5b6c7d";
const ADMIN_TOKEN: &str = "admin-token-8e9f0a1b";
const PROMPT: &str = "a prompt that is nobody else's business";

fn tenants() -> String {
    let digest = Sha256::digest(KEY.as_bytes());
    let hash: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("tenants:\n  - {{name: research, keys: [\"sha256:{hash}\"]}}")
}

/// Sends a request with the tenant's key under this id; the client stays for the answer, or leaves at once.
fn send(gateway: &Gateway, id: &str, body: &str, fake: &str, stays: bool) {
    let bearer = format!("Bearer {KEY}");
    let headers = [
        ("content-type", "application/json"),
        ("authorization", &*bearer),
        ("x-request-id", id),
        ("x-fake", fake),
    ];
    let mut client = gateway.client();
    client.request("POST", CHAT, &headers, body.as_bytes());
    if stays {
        client.answer();
    } else {
        // Noticed by the gateway: an engine has the request by now.
        gateway.until("it is at work", || {
            gateway.replicas().iter().any(|row| row["inflight"] == 1)
        });
    }
}

#[test]
fn every_request_has_one_record_however_it_ends() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = Setup::new()
        .top("log: {format: json}")
        .top(&tenants())
        .model("fake", "aliases: [nick]")
        .endpoint("vllm", &engine.url(), "")
        // Its breaker opens, so it has a replica of its own.
        .model("broken", "")
        .endpoint("vllm", &engine.url(), "serves: fake")
        .start();
    // With a limit that no other request must meet.
    let impatient = Setup::new()
        .top("log: {format: json}")
        .top(&tenants())
        .limit("first_byte_timeout", "1s")
        .model("silent", "")
        .endpoint("vllm", &engine.url(), "serves: fake")
        .start();
    gateway.ready("fake", 1);
    gateway.ready("broken", 1);
    impatient.ready("silent", 1);
    let cases = [
        ("whole", "fake", false, "{}", true, 200, "ok", ""),
        ("stream", "nick", true, "{}", true, 200, "ok", ""),
        (
            "engine-400",
            "fake",
            false,
            r#"{"status":400}"#,
            true,
            400,
            "engine_error",
            "engine_error",
        ),
        (
            "refused",
            "broken",
            false,
            r#"{"refuse":true}"#,
            true,
            502,
            "upstream_failed",
            "upstream_failed",
        ),
        (
            "cut",
            "broken",
            true,
            r#"{"die_after":2}"#,
            true,
            200,
            "upstream_failed",
            "upstream_failed",
        ),
        (
            "late",
            "silent",
            false,
            r#"{"first_ms":60000}"#,
            true,
            504,
            "upstream_failed",
            "first_byte_timeout",
        ),
        (
            "no-model",
            "absent",
            false,
            "{}",
            true,
            404,
            "refused",
            "model_not_found",
        ),
        (
            "left-early",
            "fake",
            false,
            r#"{"first_ms":60000}"#,
            false,
            0,
            "client_left",
            "",
        ),
        (
            "left-late",
            "fake",
            true,
            r#"{"token_ms":10000}"#,
            false,
            200,
            "client_left",
            "",
        ),
    ];
    for (id, model, stream, fake, stays, ..) in cases {
        let gateway = match model {
            "silent" => &impatient,
            _ => &gateway,
        };
        send(gateway, id, &chat_of(model, stream), fake, stays);
        gateway.counters_are_zero();
    }
    let mut stranger = gateway.client();
    stranger.request("POST", CHAT, &[("x-request-id", "no-key")], b"{}");
    assert_eq!(stranger.answer().status(), 401);
    let mut records = await_records(&gateway, cases.len());
    let counted = gateway.metric("llmgw_requests_total", "");
    assert_eq!((records.len(), counted), (cases.len(), cases.len() as f64));
    records.extend(await_records(&impatient, 1));
    assert_eq!(records.len(), cases.len() + 1);
    for (id, model, stream, _, stays, status, outcome, code) in cases {
        let record = record_of(&records, id);
        assert_eq!(record["outcome"], outcome, "{record}");
        assert_eq!(record["code"], code, "{record}");
        if stays {
            assert_eq!(record["status"], status, "{record}");
        }
        assert_eq!(record["model_asked"], model, "{record}");
        assert_eq!(record["tenant"], "research", "{record}");
        if status != 404 {
            assert_eq!(record["stream"], stream, "{record}");
            assert_eq!(
                record["replica"],
                engine.addr().to_string().as_str(),
                "{record}"
            );
        }
        assert!(record["total_ms"].as_f64().unwrap() > 0.0, "{record}");
    }
    let stream = record_of(&records, "stream");
    assert_eq!(
        (&stream["model"], &stream["tokens_estimated"]),
        (&json!("fake"), &json!(false))
    );
    assert_eq!(record_of(&records, "no-key")["code"], "invalid_api_key");
    // The counters of `/metrics` are of the same requests.
    assert_eq!(impatient.metric("llmgw_requests_total", ""), 1.0);
    assert_eq!(
        gateway.metric("llmgw_requests_total", "code=\"client_left\""),
        2.0
    );
    gateway.counters_are_zero();
}

#[test]
fn the_sum_of_tokens_is_what_the_engines_generated() {
    for (kind, name) in [
        (Kind::Vllm, "vllm"),
        (Kind::Sglang, "sglang"),
        (Kind::Llamacpp, "llamacpp"),
    ] {
        let engine = engine(kind, r#"{"tokens":7}"#);
        let gateway = Setup::new()
            .top("log: {format: json}")
            .top(&tenants())
            .model("fake", "")
            .endpoint(name, &engine.url(), "")
            .start();
        gateway.ready("fake", 1);
        at_once(20, |number| {
            let body = chat_of("fake", number % 2 == 0);
            send(&gateway, &format!("r{number}"), &body, "{}", true);
        });
        let records = await_records(&gateway, 20);
        for record in &records {
            assert_eq!(record["outcome"], "ok", "{name} {record}");
        }
        let sum = |field: &str| -> u64 {
            let counts = records.iter().map(|record| record[field].as_u64().unwrap());
            counts.sum()
        };
        assert_eq!(sum("output_tokens"), engine.state().tokens, "{name}");
        assert_eq!(sum("output_tokens"), 140, "{name}");
        assert!(
            records
                .iter()
                .all(|record| record["tokens_estimated"] == false)
        );
        let shown = |kind: &str| gateway.metric("llmgw_tokens_total", kind);
        assert_eq!(shown("kind=\"output\""), 140.0);
        assert_eq!(shown("kind=\"input\""), sum("input_tokens") as f64);
    }
}

#[test]
fn a_stream_that_its_client_left_is_charged_for_what_was_seen() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = Setup::new()
        .top("log: {format: json}")
        .top(&tenants())
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .start();
    gateway.ready("fake", 1);
    let bearer = format!("Bearer {KEY}");
    let headers = [
        ("content-type", "application/json"),
        ("authorization", &*bearer),
        ("x-fake", r#"{"token_ms":20,"tokens":1000}"#),
    ];
    let mut client = gateway.client();
    client.request("POST", CHAT, &headers, chat_of("fake", true).as_bytes());
    assert_eq!(client.head().status, 200);
    for _ in 0..10 {
        client.body_until("data:");
    }
    drop(client);
    let record: Value = await_records(&gateway, 1).remove(0);
    assert_eq!(record["outcome"], "client_left");
    assert_eq!(record["tokens_estimated"], true);
    let output = record["output_tokens"].as_u64().unwrap();
    let generated = engine.state().tokens;
    assert!(
        output >= 8 && output <= generated + 2,
        "{output} of {generated}"
    );
    assert!(record["input_tokens"].as_u64().unwrap() > 0);
}

/// What a server whose admin address has a token says there.
fn admin(gateway: &Gateway, method: &str, path: &str) -> Answer {
    let mut client = harness::Client::new(gateway.admin);
    let bearer = format!("Bearer {ADMIN_TOKEN}");
    client.request(method, path, &[("authorization", &bearer)], b"");
    let answer = client.answer();
    assert_eq!(answer.status(), 200, "{}", answer.text());
    answer
}

#[test]
fn no_secret_and_no_prompt_is_ever_logged_shown_or_forwarded() {
    for format in ["json", "text"] {
        let engine = fake_engine::start(fake_engine::Options {
            api_key: Some(ENGINE_KEY.to_owned()),
            ..fake_engine::Options::new(Kind::Vllm)
        })
        .unwrap();
        let gateway = Setup::new()
            .top(&format!("log: {{format: {format}, level: trace}}"))
            .top(&format!(
                "admin: {{listen: \"127.0.0.1:0\", token: {ADMIN_TOKEN}}}"
            ))
            .top(&tenants())
            .model("fake", "")
            .endpoint("vllm", &engine.url(), &format!("api_key: {ENGINE_KEY}"))
            .start();
        gateway.await_log("ready, serves");
        let answers = ask_in_every_way(&gateway);
        let statuses: Vec<u16> = answers.iter().map(Answer::status).collect();
        let expected = [
            200, 200, 200, 401, 401, 404, 404, 404, 401, 401, 400, 400, 400, 401, 401,
        ];
        assert_eq!(statuses, expected);
        let reload = admin(&gateway, "POST", "/v1/reload");
        let record = |line: &&str| line.contains("access") && line.contains(CHAT);
        gateway.until("all requests are in the log", || {
            gateway.log().lines().filter(record).count() == expected.len()
        });
        let mut shown = vec![("the log".to_owned(), gateway.log())];
        for path in [
            "/metrics",
            "/v1/status",
            "/v1/models",
            "/v1/replicas",
            "/v1/policies",
        ] {
            shown.push((path.to_owned(), admin(&gateway, "GET", path).text()));
        }
        let answers = answers.iter().chain([&reload]);
        shown.extend(answers.map(|answer| (format!("{:?}", answer.head), answer.text())));
        for (place, text) in &shown {
            for secret in [KEY, ENGINE_KEY, ADMIN_TOKEN, PROMPT] {
                let line = text.lines().find(|line| line.contains(secret));
                let is_echo = secret == PROMPT && *place != "the log";
                assert!(
                    line.is_none() || is_echo,
                    "`{secret}` is in {place}: {line:?}"
                );
                assert!(!place.contains(secret), "{place}");
            }
        }
        let got = engine.state().last;
        let chats = got.iter().filter(|request| request.method == "POST");
        assert_eq!(chats.clone().count(), 3);
        for request in chats {
            let bearer = format!("Bearer {ENGINE_KEY}");
            assert_eq!(request.header("authorization"), Some(&*bearer));
            assert_eq!(request.header("x-api-key"), None);
        }
        for request in &got {
            let (headers, body) = (format!("{:?}", request.headers), request.body.clone());
            for secret in [KEY, ADMIN_TOKEN] {
                let text = format!("{headers} {}", body.as_deref().unwrap_or_default());
                assert!(!text.contains(secret), "an engine got `{secret}`: {text}");
            }
        }
    }
}

/// Requests that end well, at no model and in a bad body, each with the key in both headers' and in wrong ways.
fn ask_in_every_way(gateway: &Gateway) -> Vec<Answer> {
    let bodies = [
        json!({"model": "fake", "messages": [{"role": "user", "content": PROMPT}]}),
        json!({"model": "absent", "messages": [{"role": "user", "content": PROMPT}]}),
        json!({"model": 7, "prompt": PROMPT}),
    ];
    let (right, wrong) = (format!("Bearer {KEY}"), format!("Bearer wrong-{KEY}"));
    let ways = [
        vec![("authorization", &*right)],
        vec![("x-api-key", KEY)],
        vec![("authorization", &*right), ("x-api-key", KEY)],
        vec![("authorization", &*wrong)],
        // No scheme that the gateway knows: it is no key, and still a secret.
        vec![("authorization", KEY)],
    ];
    let mut answers = Vec::new();
    for body in &bodies {
        for headers in &ways {
            let mut client = gateway.client();
            // A query is the engine's, and no log's.
            let path = format!("{CHAT}?api_key={KEY}");
            client.request("POST", &path, headers, body.to_string().as_bytes());
            answers.push(client.answer());
        }
    }
    answers
}
