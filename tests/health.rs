//! What is believed of an engine's readiness and numbers, and for how long (the rows of "Stale metrics and health").

mod harness;
#[path = "harness/more.rs"]
mod more;

use std::time::Duration;

use fake_engine::{Kind, Options, Running};
use serde_json::{Value, json};

use harness::{Client, Gateway, Setup, chat, unless_held_up};
use more::{assert_ok, at_once, begin_stream, chat_of, engine, finish_stream, replica};

const CHAT: &str = "/v1/chat/completions";
/// Numbers that are 2 s old are distrusted, and a probe takes no longer.
const GAP_MAX: Duration = Duration::from_secs(1);

/// Waits until the replica's row is as wanted; that row.
fn row(gateway: &Gateway, engine: &Running, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let mut row = Value::Null;
    gateway.until(what, || {
        row = replica(gateway, engine.addr());
        wanted(&row)
    });
    row
}

fn age_ms(row: &Value) -> u64 {
    row["metrics_age_ms"].as_u64().unwrap_or(0)
}

#[test]
fn the_only_replica_is_used_however_stale_its_metrics_are() {
    std::thread::scope(|scope| {
        for broken in ["500", "hang", "garbage"] {
            scope.spawn(move || {
                let engine = engine(Kind::Vllm, "{}");
                let gateway = Gateway::over("vllm", &[&engine]);
                row(&gateway, &engine, "it has metrics", |row| {
                    !row["running"].is_null()
                });
                engine.behave(&format!(r#"{{"metrics":"{broken}"}}"#));
                // Older than the 2 s after which they are distrusted.
                let stale = row(&gateway, &engine, "its metrics are stale", |row| {
                    age_ms(row) > 2_100 && row["reason"].as_str().unwrap().contains("metrics")
                });
                assert_eq!(stale["state"], "ready", "{stale}");
                assert_ok(&at_once(20, |_| gateway.post(CHAT, &chat(false), "")));
            });
        }
    });
}

#[test]
fn an_engine_without_any_metrics_is_used_like_the_others() {
    unless_held_up(GAP_MAX, || {
        let (dumb, vllm) = (engine(Kind::Openai, "{}"), engine(Kind::Vllm, "{}"));
        let gateway = Setup::new()
            .model("fake", "")
            .endpoint("openai", &dumb.url(), "")
            .endpoint("vllm", &vllm.url(), "")
            .start();
        gateway.ready("fake", 2);
        let slow = r#"{"token_ms":60000}"#;
        let streams: Vec<_> = (0..10)
            .map(|_| begin_stream(&gateway, &chat(true), slow))
            .collect();
        assert_eq!((dumb.state().open, vllm.state().open), (5, 5));
        let unknown = replica(&gateway, dumb.addr());
        for number in ["running", "waiting", "kv", "metrics_age_ms"] {
            assert!(
                unknown[number].is_null(),
                "unknown is not zero: {number} {unknown}"
            );
        }
        drop(streams);
    });
}

#[test]
fn a_page_that_is_frozen_at_idle_does_not_attract_all_traffic() {
    let frozen = engine(
        Kind::Vllm,
        r#"{"metrics_values":{"running":0,"waiting":0,"kv":0}}"#,
    );
    let honest = engine(Kind::Vllm, r#"{"metrics_values":{"kv":0.5}}"#);
    let gateway = Gateway::over("vllm", &[&frozen, &honest]);
    let slow = r#"{"token_ms":60000}"#;
    let mut streams = Vec::new();
    for count in 1..=10 {
        streams.push(begin_stream(&gateway, &chat(true), slow));
        streams.push(begin_stream(&gateway, &chat(true), slow));
        // Each pair is sent on newer numbers than the one before.
        let scrapes = |engine: &Running| engine.state().by_path.get("GET /metrics").copied();
        if count % 3 == 0 {
            let seen = (scrapes(&frozen), scrapes(&honest));
            gateway.until("both pages were read again", || {
                scrapes(&frozen) > seen.0 && scrapes(&honest) > seen.1
            });
        }
    }
    let open = (frozen.state().open, honest.state().open);
    assert!(open.0.abs_diff(open.1) <= 8, "{open:?}");
    drop(streams);
}

#[test]
fn the_series_of_an_endpoint_go_with_it() {
    let (stays, goes) = (engine(Kind::Vllm, "{}"), engine(Kind::Vllm, "{}"));
    let setup = || Setup::new().model("fake", "");
    let both = setup()
        .endpoint("vllm", &stays.url(), "")
        .endpoint("vllm", &goes.url(), "");
    let gateway = both.start();
    gateway.ready("fake", 2);
    assert_ok(&at_once(10, |_| gateway.post(CHAT, &chat(false), "")));
    let page = || gateway.admin_get("/metrics").text();
    let id = goes.addr().to_string();
    assert!(page().contains(&id), "{}", page());
    gateway.write_config(&setup().endpoint("vllm", &stays.url(), "").yaml());
    gateway.until("the endpoint is gone", || gateway.replicas().len() == 1);
    assert!(!page().contains(&id), "{}", page());
    assert!(page().contains(&stays.addr().to_string()));
    // Nobody asks it any more either.
    let probes = |engine: &Running| engine.state().by_path.values().sum::<u64>();
    let (before, other) = (probes(&goes), probes(&stays));
    gateway.until("the other one is probed twice more", || {
        probes(&stays) >= other + 6
    });
    assert!(
        probes(&goes) <= before + 3,
        "{before} then {}",
        probes(&goes)
    );
}

#[test]
fn an_endpoint_that_is_removed_and_added_again_during_requests_counts_right() {
    unless_held_up(GAP_MAX, || {
        let (flaps, stays) = (engine(Kind::Vllm, "{}"), engine(Kind::Vllm, "{}"));
        let setup = || {
            Setup::new()
                .model("fake", "")
                .endpoint("vllm", &stays.url(), "")
        };
        let both = || setup().endpoint("vllm", &flaps.url(), "").yaml();
        let gateway = setup().endpoint("vllm", &flaps.url(), "").start();
        gateway.ready("fake", 2);
        // Held, so that the streams are open for as long as the test wants.
        for engine in [&flaps, &stays] {
            engine.behave(r#"{"hold_after":1}"#);
        }
        let streams: Vec<_> = (0..6)
            .map(|_| begin_stream(&gateway, &chat(true), ""))
            .collect();
        assert_eq!((flaps.state().open, stays.state().open), (3, 3));
        for _ in 0..2 {
            gateway.write_config(&setup().yaml());
            gateway.until("it is gone", || gateway.replicas().len() == 1);
            assert_eq!(replica(&gateway, stays.addr())["inflight"], 3);
            gateway.write_config(&both());
            gateway.ready("fake", 2);
        }
        let short = r#"{"tokens":1}"#;
        assert_ok(&at_once(8, |_| gateway.post(CHAT, &chat(false), short)));
        for engine in [&flaps, &stays] {
            engine.behave(r#"{"hold_after":null}"#);
        }
        streams.into_iter().for_each(finish_stream);
        gateway.counters_are_zero();
        let more = begin_stream(&gateway, &chat(true), r#"{"token_ms":60000}"#);
        gateway.until("a new stream counts as one", || {
            let inflight = |row: &Value| row["inflight"].as_u64().unwrap();
            gateway.replicas().iter().map(inflight).sum::<u64>() == 1
        });
        drop(more);
    });
}

#[test]
fn an_engine_that_comes_back_into_the_configuration_is_not_sent_more_than_its_slots() {
    let llamacpp = fake_engine::start(Options {
        slots: 2,
        token_ms: 100,
        tokens: 20,
        ..Options::new(Kind::Llamacpp)
    })
    .unwrap();
    let other = engine(Kind::Vllm, "{}");
    let with = |url: &str| {
        Setup::new()
            .model("fake", "")
            .endpoint("llamacpp", url, "slots: 2")
    };
    let gateway = with(&llamacpp.url()).start();
    gateway.ready("fake", 1);
    let streams: Vec<_> = (0..2)
        .map(|_| begin_stream(&gateway, &chat(true), ""))
        .collect();
    let id = llamacpp.addr().to_string();
    gateway.write_config(&with(&other.url()).yaml());
    gateway.until("it is gone", || gateway.replicas()[0]["id"] != id.as_str());
    gateway.write_config(&with(&llamacpp.url()).yaml());
    gateway.until("it is back", || {
        let row = &gateway.replicas()[0];
        row["id"] == id.as_str() && row["state"] == "ready"
    });
    std::thread::scope(|scope| {
        let late = scope.spawn(|| gateway.post(CHAT, &chat(false), r#"{"token_ms":0}"#));
        streams.into_iter().for_each(finish_stream);
        assert_ok(&[late.join().unwrap()]);
    });
    assert!(
        llamacpp.state().peak_open <= 2,
        "{}",
        llamacpp.state().peak_open
    );
}

#[test]
fn an_engine_whose_health_says_no_gets_no_traffic() {
    let (sick, well) = (engine(Kind::Vllm, "{}"), engine(Kind::Vllm, "{}"));
    let gateway = Gateway::over("vllm", &[&sick, &well]);
    sick.behave(r#"{"health":"503"}"#);
    let reason = row(&gateway, &sick, "it is not ready", |row| {
        row["state"] == "not_ready"
    });
    assert_eq!(reason["reason"], "/health answers 503", "{reason}");
    let before = sick.state().total;
    assert_ok(&at_once(20, |_| gateway.post(CHAT, &chat(false), "")));
    assert_eq!(sick.state().total, before);
    sick.behave(r#"{"health":"ok"}"#);
    gateway.ready("fake", 2);
}

#[test]
fn an_engine_that_is_loading_gets_no_traffic_and_requests_are_told_why() {
    let kinds = [
        (Kind::Vllm, "vllm"),
        (Kind::Sglang, "sglang"),
        (Kind::Llamacpp, "llamacpp"),
    ];
    std::thread::scope(|scope| {
        for (kind, name) in kinds {
            scope.spawn(move || {
                let engine = fake_engine::start(Options {
                    load_ms: 600_000,
                    ..Options::new(kind)
                })
                .unwrap();
                let setup = Setup::new().model("fake", "");
                let gateway = setup.endpoint(name, &engine.url(), "").start();
                row(&gateway, &engine, "it was probed", |row| {
                    row["state"] == "not_ready"
                });
                let answer = gateway.post(CHAT, &chat(false), "");
                assert_eq!(
                    (answer.status(), &*answer.code()),
                    (503, "no_replica"),
                    "{name} {}",
                    answer.text()
                );
                let seconds = answer
                    .header("retry-after")
                    .unwrap()
                    .parse::<u64>()
                    .unwrap();
                assert!((1..=60).contains(&seconds), "{seconds}");
                let text = answer.json()["error"]["message"]
                    .as_str()
                    .unwrap()
                    .to_owned();
                assert!(
                    text.contains(&engine.addr().to_string()),
                    "names the replica: {text}"
                );
                assert_eq!(engine.state().total, 0, "{name}");
                // The model is known all the while, and says that it is not ready.
                let card = gateway.get("/v1/models").json()["data"][0].clone();
                assert_eq!(
                    (&card["id"], &card["replicas_ready"]),
                    (&json!("fake"), &json!(0))
                );
                engine.behave(r#"{"loaded":1}"#);
                gateway.ready("fake", 1);
                assert_ok(&[gateway.post(CHAT, &chat(false), "")]);
            });
        }
    });
}

#[test]
fn one_probe_without_an_answer_is_not_death_and_three_are() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = Gateway::over("vllm", &[&engine]);
    let asked = |engine: &Running| {
        let paths = engine.state().by_path;
        paths.get("GET /health").copied().unwrap_or(0)
    };
    let before = asked(&engine);
    engine.behave(r#"{"health":"hang"}"#);
    // The second probe that hangs begins when the first has timed out.
    gateway.until("a probe has timed out", || asked(&engine) >= before + 2);
    let after_one = replica(&gateway, engine.addr());
    let answer = gateway.post(CHAT, &chat(false), "");
    // Where the test was held up meanwhile, more of them have.
    if asked(&engine) <= before + 2 {
        assert_eq!(after_one["state"], "ready");
        assert_ok(&[answer]);
    }
    engine.behave(r#"{"health":"ok"}"#);
    gateway.until("a probe is answered", || asked(&engine) >= before + 4);
    gateway.ready("fake", 1);
    engine.behave(r#"{"health":"hang"}"#);
    let dead = row(&gateway, &engine, "it is dead", |row| {
        row["state"] == "not_ready"
    });
    assert!(
        dead["reason"].as_str().unwrap().contains("no answer"),
        "{dead}"
    );
    assert!(asked(&engine) >= before + 6);
}

#[test]
fn each_engine_has_its_own_names_for_the_three_numbers() {
    let values = r#"{"metrics_values":{"running":3,"waiting":2,"kv":0.25}}"#;
    for (kind, name, kv) in [
        (Kind::Vllm, "vllm", json!(0.25)),
        (Kind::Sglang, "sglang", json!(0.25)),
        // Current builds have no such number.
        (Kind::Llamacpp, "llamacpp", Value::Null),
    ] {
        let engine = engine(kind, values);
        let gateway = Gateway::over(name, &[&engine]);
        let known = row(&gateway, &engine, "it was scraped", |row| {
            !row["running"].is_null()
        });
        assert_eq!(
            (&known["running"], &known["waiting"], &known["kv"]),
            (&json!(3.0), &json!(2.0), &kv),
            "{name}"
        );
    }
}

#[test]
fn a_mapping_of_the_model_overrides_its_engines_names_by_the_rules() {
    let values = r#"{"metrics_values":{"running":3,"waiting":2,"kv":0.25}}"#;
    let (vllm, llamacpp) = (engine(Kind::Vllm, values), engine(Kind::Llamacpp, values));
    let swapped = "metrics: {running: \"vllm:num_requests_waiting\"}";
    let gateway = Setup::new()
        // Empty means vLLM's names, which are right for one of them and absent on the other's page.
        .model("empty-vllm", "metrics: {}")
        .endpoint("vllm", &vllm.url(), "serves: fake")
        .model("empty-llamacpp", "metrics: {}")
        .endpoint("llamacpp", &llamacpp.url(), "serves: fake")
        // Naming `running` is a complete statement: the rest stays unknown.
        .model("complete", swapped)
        .endpoint("vllm", &vllm.url(), "serves: fake")
        .model(
            "complete-llamacpp",
            "metrics: {running: \"llamacpp:requests_deferred\"}",
        )
        .endpoint("llamacpp", &llamacpp.url(), "serves: fake")
        .start();
    let number = |model: &str, name: &str| {
        let mut rows = gateway.replicas().into_iter();
        rows.find(|row| row["model"] == model).unwrap()[name].clone()
    };
    for (model, running, waiting, kv) in [
        ("empty-vllm", json!(3.0), json!(2.0), json!(0.25)),
        ("complete", json!(2.0), Value::Null, Value::Null),
        ("complete-llamacpp", json!(2.0), Value::Null, Value::Null),
    ] {
        gateway.until(&format!("`{model}` was scraped"), || {
            !number(model, "running").is_null()
        });
        assert_eq!(number(model, "running"), running, "{model}");
        assert_eq!(number(model, "waiting"), waiting, "{model}");
        assert_eq!(number(model, "kv"), kv, "{model}");
    }
    gateway.until("the other page has none of vLLM's names", || {
        let reason = number("empty-llamacpp", "reason");
        reason
            .as_str()
            .unwrap()
            .contains("none of the mapped names")
    });
    assert!(number("empty-llamacpp", "running").is_null());
    assert_eq!(number("empty-llamacpp", "state"), "ready");
}

#[test]
fn an_engine_that_lists_another_name_is_not_ready_and_serves_says_which_is_meant() {
    let engine = fake_engine::start(Options::new(Kind::Llamacpp).model("weights-q4.gguf")).unwrap();
    let setup = |more: &str| {
        Setup::new()
            .model("fake", "")
            .endpoint("llamacpp", &engine.url(), more)
    };
    let gateway = setup("").start();
    let wrong = row(&gateway, &engine, "it was probed", |row| {
        row["state"] == "not_ready"
    });
    let reason = wrong["reason"].as_str().unwrap();
    for part in ["`weights-q4.gguf`", "`fake`", "`serves`"] {
        assert!(reason.contains(part), "{part} in {reason}");
    }
    let answer = gateway.post(CHAT, &chat(false), "");
    assert_eq!((answer.status(), &*answer.code()), (503, "no_replica"));
    assert!(
        answer.text().contains("weights-q4.gguf"),
        "{}",
        answer.text()
    );
    gateway.write_config(&setup("serves: weights-q4.gguf").yaml());
    gateway.ready("fake", 1);
    let answer = gateway.post(CHAT, &chat(false), "");
    assert_ok(std::slice::from_ref(&answer));
    assert_eq!(answer.json()["model"], "fake");
    assert_eq!(
        engine.state().last[0].model.as_deref(),
        Some("weights-q4.gguf")
    );
}

#[test]
fn a_request_that_arrives_before_the_first_probe_waits_for_it() {
    unless_held_up(GAP_MAX, || {
        let engine = engine(Kind::Vllm, r#"{"health_ms":300}"#);
        let setup = Setup::new().model("fake", "");
        let gateway = setup.endpoint("vllm", &engine.url(), "").start();
        let mut client = Client::new(gateway.addr);
        client.post(CHAT, &chat_of("fake", false), "");
        assert_ok(&[client.answer()]);
    });
}
