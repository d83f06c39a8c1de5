//! A tenant's own limits, over the real binary: what is refused and how, what is given back, what clients are shown.

mod harness;
#[path = "harness/more.rs"]
mod more;

use std::time::Instant;

use fake_engine::{Kind, Running};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use harness::{Answer, Client, Gateway, Setup};
use more::{at_once, chat_of, ctl, engine};

const CHAT: &str = "/v1/chat/completions";

/// A tenant whose key is its name; `more` are further keys such as `max_concurrency: 1`.
fn tenant(name: &str, more: &str) -> String {
    let digest = Sha256::digest(name.as_bytes());
    let hash: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("  - {{name: {name}, keys: [\"sha256:{hash}\"], {more}}}")
}

fn setup(engine: &Running, tenants: &[String]) -> Setup {
    Setup::new()
        .top("log: {format: json}")
        .top(&format!("tenants:\n{}", tenants.join("\n")))
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
}

fn start(engine: &Running, tenants: &[String]) -> Gateway {
    let gateway = setup(engine, tenants).start();
    gateway.ready("fake", 1);
    gateway
}

/// Sends a request with a tenant's key and further headers, without waiting for the answer.
fn send(gateway: &Gateway, key: &str, more: &[(&str, &str)], body: &str) -> Client {
    let bearer = format!("Bearer {key}");
    let mut headers = vec![
        ("content-type", "application/json"),
        ("authorization", &*bearer),
    ];
    headers.extend_from_slice(more);
    let mut client = gateway.client();
    client.request("POST", CHAT, &headers, body.as_bytes());
    client
}

fn ask(gateway: &Gateway, key: &str, fake: &str) -> Answer {
    send(gateway, key, &[("x-fake", fake)], &chat_of("fake", false)).answer()
}

/// A number in a header.
fn number(answer: &Answer, header: &str) -> u64 {
    let value = answer.header(header);
    let value = value.unwrap_or_else(|| panic!("no `{header}` in {:?}", answer.head));
    value
        .parse()
        .unwrap_or_else(|_| panic!("{header}: {value}"))
}

/// A duration in a header, in seconds.
fn seconds(answer: &Answer, header: &str) -> f64 {
    let value = answer.header(header).unwrap();
    if let Some(ms) = value.strip_suffix("ms") {
        return ms.parse::<f64>().unwrap() / 1e3;
    }
    let (minutes, rest) = value.split_once('m').unwrap_or(("0", value));
    let rest: f64 = rest.strip_suffix('s').unwrap().parse().unwrap();
    minutes.parse::<f64>().unwrap() * 60.0 + rest
}

fn assert_refused(answer: &Answer, status: u16, parts: &[&str]) -> Value {
    assert_eq!(answer.status(), status, "{}", answer.text());
    let error = answer.json()["error"].clone();
    assert_eq!(error["code"], "tenant_limit", "{error}");
    let message = error["message"].as_str().unwrap();
    for part in parts {
        assert!(message.contains(part), "`{part}` in {message}");
    }
    error
}

#[test]
fn a_tenant_at_its_concurrency_is_refused_and_others_are_not() {
    let engine = engine(Kind::Vllm, "{}");
    let tenants = [tenant("narrow", "max_concurrency: 2"), tenant("other", "")];
    let gateway = start(&engine, &tenants);
    let stream = |fake| {
        let mut client = send(
            &gateway,
            "narrow",
            &[("x-fake", fake)],
            &chat_of("fake", true),
        );
        assert_eq!(client.head().status, 200);
        client.body_until("data:");
        client
    };
    let open = [
        stream(r#"{"token_ms":60000}"#),
        stream(r#"{"token_ms":60000}"#),
    ];
    let refused = ask(&gateway, "narrow", "{}");
    let error = assert_refused(
        &refused,
        429,
        &["`narrow`", "2 requests", "`max_concurrency`"],
    );
    assert_eq!(error["type"], "rate_limit_error");
    assert_eq!(
        number(&refused, "retry-after").clamp(1, 2),
        number(&refused, "retry-after")
    );
    assert_eq!(refused.header("x-ratelimit-limit-requests"), None);
    assert_eq!(ask(&gateway, "other", "{}").status(), 200);
    assert_eq!(engine.state().newest(CHAT).unwrap().n, engine.state().total);
    // Both are given back: by a client that leaves, with its connection.
    drop(open);
    gateway.until("its requests are given back", || {
        ask(&gateway, "narrow", "{}").status() == 200
    });
    let again = [stream("{}"), stream("{}")];
    drop(again);
    gateway.counters_are_zero();
}

#[test]
fn requests_a_minute_are_counted_for_what_engines_got_and_shown_on_every_answer() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = start(&engine, &[tenant("slow", "requests_per_minute: 2")]);
    let began = Instant::now();
    let mut left = Vec::new();
    for _ in 0..2 {
        let answer = ask(&gateway, "slow", "{}");
        assert_eq!(answer.status(), 200, "{}", answer.text());
        assert_eq!(number(&answer, "x-ratelimit-limit-requests"), 2);
        assert_eq!(answer.header("x-ratelimit-limit-tokens"), None);
        left.push(number(&answer, "x-ratelimit-remaining-requests"));
    }
    let refused = ask(&gateway, "slow", "{}");
    // One comes back every 30 s: not before this test is over, or the machine is too slow for it.
    assert!(began.elapsed().as_secs() < 30);
    assert_eq!(left, [1, 0]);
    assert_refused(&refused, 429, &["`requests_per_minute` (2)", " s"]);
    let retry = number(&refused, "retry-after");
    assert!((1..=36).contains(&retry), "{retry}");
    assert_eq!(number(&refused, "x-ratelimit-remaining-requests"), 0);
    let reset = seconds(&refused, "x-ratelimit-reset-requests");
    let elapsed = began.elapsed().as_secs_f64();
    assert!(reset <= 60.0 && reset >= 60.0 - elapsed - 0.01, "{reset}");
    assert_eq!(engine.state().by_path[&format!("POST {CHAT}")], 2);
}

#[test]
fn fifty_at_once_pass_no_cap() {
    let engine = engine(Kind::Vllm, r#"{"first_ms":50}"#);
    let tenants = [
        tenant("narrow", "max_concurrency: 4"),
        tenant("slow", "requests_per_minute: 5"),
    ];
    let gateway = start(&engine, &tenants);
    let passed = |key: &str| {
        let answers = at_once(50, |_| ask(&gateway, key, "{}").status());
        assert!(answers.iter().all(|status| matches!(status, 200 | 429)));
        answers.iter().filter(|status| **status == 200).count()
    };
    let began = Instant::now();
    assert!(passed("narrow") >= 4);
    let peak = engine.state().peak_running;
    assert!((1..=4).contains(&peak), "{peak}");
    let passed = passed("slow");
    // One comes back every 12 s.
    let most = 5 + began.elapsed().as_secs().div_ceil(12) as usize;
    assert!((5..=most).contains(&passed), "{passed}");
}

#[test]
fn a_refused_request_uses_up_nothing_and_neither_does_one_that_leaves_the_queue() {
    let (wide, narrow) = (engine(Kind::Vllm, "{}"), engine(Kind::Vllm, "{}"));
    let limits = "max_concurrency: 2, requests_per_minute: 4";
    let gateway = setup(&wide, &[tenant("t", limits)])
        .model("one", "")
        .endpoint("vllm", &narrow.url(), "serves: fake, slots: 1")
        .start();
    gateway.ready("one", 1);
    gateway.ready("fake", 1);
    let slow = [("x-fake", r#"{"token_ms":60000}"#)];
    let mut open = send(&gateway, "t", &slow, &chat_of("one", true));
    assert_eq!(open.head().status, 200);
    let waits = send(&gateway, "t", &[], &chat_of("one", false));
    gateway.queued(1);
    for _ in 0..10 {
        assert_refused(&ask(&gateway, "t", "{}"), 429, &["2 requests open"]);
    }
    // It never reached an engine.
    drop(waits);
    gateway.queued(0);
    gateway.until("its place is free again", || {
        ask(&gateway, "t", "{}").status() == 200
    });
    let answer = ask(&gateway, "t", "{}");
    assert_eq!(answer.status(), 200, "{}", answer.text());
    // The stream and two answers were sent; one more may come back in 15 s.
    let left = number(&answer, "x-ratelimit-remaining-requests");
    assert!((1..=2).contains(&left), "{left}");
    drop(open);
}

#[test]
fn a_request_that_no_engine_got_costs_nothing_and_an_error_no_tokens() {
    let engine = engine(Kind::Vllm, "{}");
    let limits = "requests_per_minute: 5, tokens_per_minute: 5000";
    let mut setup = setup(&engine, &[tenant("t", limits)]);
    // Nothing listens there.
    setup = setup
        .model("away", "")
        .endpoint("vllm", "http://127.0.0.1:9", "");
    let gateway = setup.start();
    gateway.ready("fake", 1);
    let bodies = [
        chat_of("away", false),
        chat_of("absent", false),
        "{".to_owned(),
    ];
    for (body, status) in bodies.iter().zip([503, 404, 400]) {
        let answer = send(&gateway, "t", &[], body).answer();
        assert_eq!(answer.status(), status, "{}", answer.text());
        assert_eq!(number(&answer, "x-ratelimit-remaining-requests"), 5);
        assert_eq!(number(&answer, "x-ratelimit-remaining-tokens"), 5000);
    }
    let models = {
        let mut client = gateway.client();
        client.request("GET", "/v1/models", &[("x-api-key", "t")], b"");
        client.answer()
    };
    assert_eq!(number(&models, "x-ratelimit-remaining-requests"), 5);
    // An engine's own error is a request of which nothing was used.
    let error = ask(&gateway, "t", r#"{"status":400}"#);
    assert_eq!(error.status(), 400, "{}", error.text());
    assert_eq!(number(&error, "x-ratelimit-remaining-requests"), 4);
    assert_eq!(number(&error, "x-ratelimit-remaining-tokens"), 5000);
}

#[test]
fn tokens_are_reserved_while_a_request_is_open_and_settled_by_what_it_used() {
    let engine = engine(Kind::Vllm, r#"{"tokens":7}"#);
    let gateway = start(&engine, &[tenant("t", "tokens_per_minute: 6000")]);
    let began = Instant::now();
    // What a minute's limit gives back since, at most.
    let given_back = || (began.elapsed().as_secs_f64() * 100.0).ceil() as u64;
    let mut used = 0;
    for _ in 0..3 {
        let answer = ask(&gateway, "t", "{}");
        let usage = &answer.json()["usage"];
        used += usage["total_tokens"].as_u64().unwrap();
        let left = number(&answer, "x-ratelimit-remaining-tokens");
        let least = 6000 - used;
        assert!(
            (least..=least + given_back()).contains(&left),
            "{left} of {least}"
        );
    }
    // Open: at least the 256 tokens that the first answers are taken to have, less what was learned since.
    let fake = r#"{"token_ms":60000,"tokens":500}"#;
    let body = json!({"model": "fake", "stream": true, "max_tokens": 500,
        "messages": [{"role": "user", "content": "word ".repeat(800)}]});
    let mut open = send(&gateway, "t", &[("x-fake", fake)], &body.to_string());
    let head = open.head();
    open.body_until("data:");
    let left: u64 = head
        .header("x-ratelimit-remaining-tokens")
        .unwrap()
        .parse()
        .unwrap();
    assert!(left < 6000 - used - 800 + given_back(), "{left}");
    // The client leaves: it costs its prompt and what it saw, not what was reserved.
    drop(open);
    gateway.counters_are_zero();
    let after = ask(&gateway, "t", "{}");
    used += after.json()["usage"]["total_tokens"].as_u64().unwrap();
    let left_after = number(&after, "x-ratelimit-remaining-tokens");
    let prompt = 4_000 / 4;
    let most = 6000 - used - prompt + given_back();
    assert!(
        left_after <= most && left_after >= 6000 - used - 1_500,
        "{left_after} of {most}"
    );
}

#[test]
fn a_request_that_is_tried_twice_costs_what_one_does() {
    // Its answers are put together from streams, which die on the way.
    let dies = engine(Kind::Llamacpp, r#"{"die_after":2}"#);
    let works = engine(Kind::Llamacpp, r#"{"tokens":40}"#);
    let limits = "requests_per_minute: 60, tokens_per_minute: 7200, max_concurrency: 1";
    let gateway = Setup::new()
        .top(&format!("tenants:\n{}", tenant("t", limits)))
        .model("fake", "")
        .endpoint("llamacpp", &dies.url(), "")
        .endpoint("llamacpp", &works.url(), "")
        .start();
    gateway.ready("fake", 2);
    let began = Instant::now();
    let tried = || {
        dies.state()
            .by_path
            .get(&format!("POST {CHAT}"))
            .copied()
            .unwrap_or(0)
    };
    let (mut sent, mut used) = (0, 0);
    let mut last = None;
    // The one that dies is tried first sooner or later: each time with a chance of one half.
    while tried() == 0 || last.is_none() {
        assert!(sent < 40, "the other one was always chosen");
        let answer = ask(&gateway, "t", "{}");
        assert_eq!(answer.status(), 200, "{}", answer.text());
        used += answer.json()["usage"]["total_tokens"].as_u64().unwrap();
        sent += 1;
        last = Some(answer);
    }
    let last = last.unwrap();
    let passed = began.elapsed().as_secs_f64();
    for (header, least, a_second) in [
        ("x-ratelimit-remaining-requests", 60 - sent, 1.0),
        ("x-ratelimit-remaining-tokens", 7_200 - used, 120.0),
    ] {
        let most = least + (passed * a_second).ceil() as u64;
        let left = number(&last, header);
        assert!(
            (least..=most).contains(&left),
            "{header}: {left}, not {least} to {most}"
        );
    }
}

#[test]
fn a_prompt_above_a_minutes_tokens_is_refused_for_good_and_says_so() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = start(&engine, &[tenant("t", "tokens_per_minute: 500")]);
    let body =
        json!({"model": "fake", "messages": [{"role": "user", "content": "word ".repeat(1000)}]});
    let refused = send(&gateway, "t", &[], &body.to_string()).answer();
    assert_refused(
        &refused,
        429,
        &["can never pass", "`t`", "500 a minute", "shorten"],
    );
    assert_eq!(refused.header("retry-after"), None);
    assert_eq!(number(&refused, "x-ratelimit-remaining-tokens"), 500);
    // The same bytes as an image may be a few hundred tokens.
    let image = json!({"model": "fake", "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{}", "A".repeat(5000))}}]}]});
    let answer = send(&gateway, "t", &[], &image.to_string()).answer();
    assert_eq!(answer.status(), 200, "{}", answer.text());
}

#[test]
fn a_tenant_in_debt_waits_for_it_and_is_told_how_long() {
    let engine = engine(Kind::Vllm, r#"{"tokens":900}"#);
    let gateway = start(&engine, &[tenant("t", "tokens_per_minute: 600")]);
    let began = Instant::now();
    let first = ask(&gateway, "t", "{}");
    assert_eq!(first.status(), 200, "{}", first.text());
    assert_eq!(number(&first, "x-ratelimit-remaining-tokens"), 0);
    let refused = ask(&gateway, "t", "{}");
    assert_refused(&refused, 429, &["`tokens_per_minute` (600)", "0 of"]);
    let passed = began.elapsed().as_secs_f64();
    let retry = number(&refused, "retry-after");
    let least = (24.0 - passed).max(1.0) as u64;
    assert!((least..=60).contains(&retry), "{retry}");
    assert!(seconds(&refused, "x-ratelimit-reset-tokens") > 60.0 - passed);
}

#[test]
fn a_reload_changes_limits_and_keeps_what_was_taken() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = start(&engine, &[tenant("t", "requests_per_minute: 4")]);
    let began = Instant::now();
    for _ in 0..3 {
        assert_eq!(ask(&gateway, "t", "{}").status(), 200);
    }
    let limits = |limits: &str| {
        gateway.write_config(&setup(&engine, &[tenant("t", limits)]).yaml());
        assert_eq!(gateway.admin_post("/v1/reload").status(), 200);
    };
    limits("requests_per_minute: 6, max_concurrency: 1");
    let answer = ask(&gateway, "t", "{}");
    assert_eq!(number(&answer, "x-ratelimit-limit-requests"), 6);
    let left = number(&answer, "x-ratelimit-remaining-requests");
    // At most one comes back in 10 s.
    let most = 2 + began.elapsed().as_secs().div_ceil(10);
    assert!((2..=most).contains(&left), "{left}");
    // What is open over a reload counts against the limit that it brought.
    let mut open = send(
        &gateway,
        "t",
        &[("x-fake", r#"{"token_ms":60000}"#)],
        &chat_of("fake", true),
    );
    assert_eq!(open.head().status, 200);
    limits("max_concurrency: 1");
    assert_refused(&ask(&gateway, "t", "{}"), 429, &["1 requests open"]);
    drop(open);
    gateway.until("it is given back", || {
        ask(&gateway, "t", "{}").status() == 200
    });
}

#[test]
fn an_engines_own_limits_pass_to_tenants_without_one_and_are_replaced_for_the_others() {
    let engine = engine(
        Kind::Vllm,
        r#"{"headers":{"x-ratelimit-remaining-requests":"77","x-ratelimit-remaining-tokens":"88"}}"#,
    );
    let tenants = [
        tenant("free", ""),
        tenant("bound", "requests_per_minute: 600"),
    ];
    let gateway = start(&engine, &tenants);
    let free = ask(&gateway, "free", "{}");
    assert_eq!(number(&free, "x-ratelimit-remaining-requests"), 77);
    assert_eq!(number(&free, "x-ratelimit-remaining-tokens"), 88);
    let bound = ask(&gateway, "bound", "{}");
    assert_eq!(number(&bound, "x-ratelimit-limit-requests"), 600);
    assert!(number(&bound, "x-ratelimit-remaining-requests") >= 598);
    assert_eq!(bound.header("x-ratelimit-remaining-tokens"), None);
}

/// Refusals as an operator may want them.
const REJECT: &str = r#"
local M = { api = 1 }
function M.bands(pool)
  return { { name = "standard", priority = 1, max_queue = 1, ttl_ms = 60000 } }
end
function M.reject(request, why)
  if why == "tenant_limit" then
    return 503, 30000
  elseif why == "no_replica" then
    return 429, 10000
  elseif why == "queue_full" then
    return 503
  end
end
return M
"#;

#[test]
fn a_policy_may_answer_a_refusal_with_another_status_and_wait() {
    let engine = engine(Kind::Vllm, "{}");
    let tenants = [tenant("t", ""), tenant("narrow", "max_concurrency: 1")];
    let gateway = Setup::new()
        .top("log: {format: json}")
        .top(&format!("tenants:\n{}", tenants.join("\n")))
        .top("policies: policies")
        .file("policies/admission.lua", REJECT)
        .model("away", "")
        .endpoint("vllm", "http://127.0.0.1:9", "")
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "slots: 1")
        .start();
    gateway.ready("fake", 1);
    let slow = [("x-fake", r#"{"token_ms":60000}"#)];
    let mut open = send(&gateway, "narrow", &slow, &chat_of("fake", true));
    assert_eq!(open.head().status, 200);
    let waits = send(&gateway, "t", &[], &chat_of("fake", false));
    gateway.queued(1);
    // Each wait is moved by a fifth at most.
    for (key, model, code, status, kind, waits_s) in [
        (
            "narrow",
            "fake",
            "tenant_limit",
            503,
            "server_error",
            24..=36,
        ),
        ("t", "away", "no_replica", 429, "rate_limit_error", 8..=12),
        // The policy says no wait: the gateway works it out.
        ("t", "fake", "queue_full", 503, "server_error", 1..=60),
    ] {
        let answer = send(&gateway, key, &[], &chat_of(model, false)).answer();
        let error = &answer.json()["error"];
        assert_eq!(
            (answer.status(), &error["code"]),
            (status, &json!(code)),
            "{error}"
        );
        assert_eq!(error["type"], kind);
        let retry = number(&answer, "retry-after");
        assert!(waits_s.contains(&retry), "{code}: {retry}");
    }
    drop((open, waits));
    gateway.counters_are_zero();
    let records = more::await_records(&gateway, 5);
    let record = |code: &str| {
        records
            .iter()
            .find(|record| record["code"] == code)
            .unwrap()
    };
    let shown = |code: &str| {
        (
            record(code)["status"].clone(),
            record(code)["outcome"].clone(),
        )
    };
    assert_eq!(shown("tenant_limit"), (json!(503), json!("refused")));
    assert_eq!(shown("no_replica"), (json!(429), json!("refused")));
}

#[test]
fn a_band_is_asked_for_by_header_or_in_the_body_and_never_above_what_the_tenant_may_use() {
    let engine = engine(Kind::Vllm, "{}");
    let tenants = [
        tenant("low", "bands: [standard, batch]"),
        tenant("ends", "bands: [batch, interactive]"),
    ];
    let gateway = start(&engine, &tenants);
    for (key, header, fields, expected) in [
        ("low", None, json!({}), "standard"),
        ("low", Some("batch"), json!({}), "batch"),
        ("low", Some("interactive"), json!({}), "standard"),
        (
            "low",
            Some("no-such-band"),
            json!({"service_tier": "batch"}),
            "standard",
        ),
        ("low", None, json!({"service_tier": "flex"}), "batch"),
        (
            "low",
            None,
            json!({"service_tier": "interactive"}),
            "standard",
        ),
        ("low", None, json!({"service_tier": "priority"}), "standard"),
        (
            "low",
            Some("standard"),
            json!({"service_tier": "flex"}),
            "standard",
        ),
        ("ends", None, json!({}), "batch"),
        ("ends", None, json!({"service_tier": "auto"}), "batch"),
        (
            "ends",
            None,
            json!({"service_tier": "priority"}),
            "interactive",
        ),
        ("ends", None, json!({"priority": -1}), "interactive"),
        ("ends", None, json!({"priority": 0}), "batch"),
        (
            "ends",
            Some("interactive"),
            json!({"priority": 5}),
            "interactive",
        ),
        // Not one of its bands, and nothing is above it.
        ("ends", Some("standard"), json!({}), "batch"),
    ] {
        let mut body: Value = serde_json::from_str(&chat_of("fake", false)).unwrap();
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let body = body.to_string();
        let mut more = vec![("x-llmgw-debug", "1")];
        more.extend(header.map(|band| ("x-llmgw-band", band)));
        let answer = send(&gateway, key, &more, &body).answer();
        assert_eq!(answer.status(), 200, "{}", answer.text());
        assert_eq!(
            answer.header("x-llmgw-band"),
            Some(expected),
            "{key} {header:?} {fields}"
        );
        let state = engine.state();
        let got = state.newest(CHAT).unwrap();
        assert_eq!(
            got.body.as_deref(),
            Some(&*body),
            "the body goes on unchanged"
        );
        assert_eq!(got.header("x-llmgw-band"), None);
    }
}

#[test]
fn a_key_that_was_made_here_works_until_it_expires() {
    let engine = engine(Kind::Vllm, "{}");
    let bare = Setup::new()
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "");
    let gateway = bare.start();
    let made = ctl(
        &gateway,
        &["key", "new", "--tenant", "t", "--expires", "90d"],
    );
    assert_eq!(made.status, 0, "{}", made.stderr);
    let after = |mark: &str| {
        let line = made.stdout.lines().find_map(|line| line.strip_prefix(mark));
        line.unwrap().trim().to_owned()
    };
    let (key, line) = (after("key"), after("config"));
    assert!(line.contains("expires: 20"), "{line}");
    let gateway = setup(&engine, &[format!("  {line}")]).start();
    gateway.ready("fake", 1);
    let answer = ask(&gateway, &key, "{}");
    assert_eq!(answer.status(), 200, "{}", answer.text());
    // The same key, a while later.
    let (before, _) = line.split_once("expires: ").unwrap();
    let past = format!("  {before}expires: 2026-01-01T00:00:00Z}}]}}");
    gateway.write_config(&setup(&engine, &[past]).yaml());
    assert_eq!(gateway.admin_post("/v1/reload").status(), 200);
    let refused = ask(&gateway, &key, "{}");
    assert_eq!(refused.status(), 401, "{}", refused.text());
    let error = &refused.json()["error"];
    assert_eq!(error["code"], "invalid_api_key");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("expired at 2026-01-01T00:00:00Z"),
        "{message}"
    );
}
