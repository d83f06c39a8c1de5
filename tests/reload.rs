//! What happens while files change: policies and configuration are taken whole or not at all, and no request notices.

mod harness;
#[path = "harness/more.rs"]
mod more;

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use fake_engine::{Kind, Options, Running};
use nix::fcntl::OFlag;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;

use harness::{Answer, Gateway, PATIENCE, Setup, chat};
use more::{Load, assert_ok, at_once, begin_stream, ctl, engine, finish_stream, signal};

const CHAT: &str = "/v1/chat/completions";

/// A policy that sends all requests to the replica with this id.
fn always(id: &str) -> String {
    format!(
        "local M = {{ api = 1 }}\nfunction M.rank(request, replicas, n)\n  for i = 1, n do\n    if replicas[i].id == \"{id}\" then\n      return i, \"chosen by hand\"\n    end\n  end\nend\nreturn M\n"
    )
}

fn id(engine: &Running) -> String {
    engine.addr().to_string()
}

fn policies(gateway: &Gateway) -> Value {
    gateway.admin_get("/v1/policies").json()
}

fn generation(gateway: &Gateway) -> u64 {
    policies(gateway)["generation"].as_u64().unwrap()
}

/// Replaces a file as editors do: whole, by a rename.
fn save(path: &Path, text: &str) {
    let fresh = path.with_extension("fresh");
    std::fs::write(&fresh, text).unwrap();
    std::fs::rename(&fresh, path).unwrap();
}

/// Two engines behind a gateway whose routing policy is a file.
fn by_hand() -> (Vec<Running>, Gateway) {
    let engines: Vec<Running> = (0..2).map(|_| engine(Kind::Vllm, "{}")).collect();
    let mut setup = Setup::new()
        .top("policies: policies")
        .file("policies/routing.lua", &always(&id(&engines[0])))
        .model("fake", "");
    for engine in &engines {
        setup = setup.endpoint("vllm", &engine.url(), "");
    }
    let gateway = setup.start();
    gateway.ready("fake", 2);
    (engines, gateway)
}

/// One request; the replica that answered it.
fn asked(gateway: &Gateway) -> String {
    let headers = [("content-type", "application/json"), ("x-llmgw-debug", "1")];
    let mut client = gateway.client();
    client.request("POST", CHAT, &headers, chat(false).as_bytes());
    let answer: Answer = client.answer();
    assert_eq!(answer.status(), 200, "{}", answer.text());
    answer.header("x-llmgw-replica").unwrap().to_owned()
}

#[test]
fn a_saved_policy_places_under_load_and_no_request_fails() {
    let (engines, gateway) = by_hand();
    let file = gateway.dir.join("policies/routing.lua");
    assert_eq!(asked(&gateway), id(&engines[0]));
    let load = Load::start(gateway.addr, 4, chat(false), "");
    for round in 1..=4 {
        let wanted = id(&engines[round % 2]);
        save(&file, &always(&wanted));
        gateway.until("it is in force", || asked(&gateway) == wanted);
    }
    let answers = load.stop();
    assert!(answers.len() > 20, "{}", answers.len());
    assert_ok(&answers);
    assert_eq!(generation(&gateway), 5);
}

#[test]
fn a_broken_policy_keeps_the_last_good_one_and_says_file_line_and_reason() {
    let (engines, gateway) = by_hand();
    let file = gateway.dir.join("policies/routing.lua");
    let good = std::fs::read_to_string(&file).unwrap();
    for (index, (broken, line, reason)) in [
        // Half a file, as a slow editor leaves it.
        (&good[..good.len() / 2], None, ""),
        ("local M = { api = 1 }\nfunction M.rank(\n", Some(2), ""),
        (
            "local M = { api = 1 }\n\nM.rnak = function() end\nreturn M\n",
            None,
            "rnak",
        ),
        (
            "local M = { api = 1 }\nos.execute(\"true\")\nreturn M\n",
            Some(2),
            "os",
        ),
        ("while true do end\n", None, ""),
    ]
    .into_iter()
    .enumerate()
    {
        save(&file, broken);
        gateway.until("the mistake is on show", || {
            policies(&gateway)["reload_failures"] == index as u64 + 1
        });
        let shown = policies(&gateway)["last_error"].to_string();
        assert!(
            shown.contains("routing.lua") && shown.contains(reason),
            "{shown}"
        );
        let status = policies(&gateway);
        let error = &status["last_error"];
        assert_eq!(status["generation"], 1);
        if let Some(line) = line {
            let named = error["line"].as_u64().unwrap();
            assert!(named.abs_diff(line) <= 1, "{error}");
        }
        let ran = ctl(&gateway, &["policies"]);
        assert_eq!(ran.status, 0, "{}", ran.stderr);
        let shown = &ran.stdout;
        let text = error["reason"].as_str().unwrap();
        assert!(shown.contains("routing.lua"), "{shown}");
        assert!(
            shown.contains(text.lines().next().unwrap()),
            "`{text}` in {shown}"
        );
        if let Some(line) = error["line"].as_u64() {
            assert!(shown.contains(&line.to_string()), "{shown}");
        }
        assert_eq!(
            asked(&gateway),
            id(&engines[0]),
            "the last good one is in force"
        );
    }
    assert!(gateway.log().contains("routing.lua"), "{}", gateway.log());
    assert!(gateway.metric("llmgw_policy_reload_failures_total", "") >= 5.0);
    save(&file, &always(&id(&engines[1])));
    gateway.until("the next good one is in force", || {
        asked(&gateway) == id(&engines[1])
    });
    assert!(policies(&gateway)["last_error"].is_null());
}

#[test]
fn endpoints_come_and_go_without_a_dropped_stream_or_a_failed_request() {
    let engines: Vec<Running> = (0..3).map(|_| engine(Kind::Vllm, "{}")).collect();
    let over = |chosen: &[usize]| {
        let mut setup = Setup::new().model("fake", "");
        for index in chosen {
            setup = setup.endpoint("vllm", &engines[*index].url(), "");
        }
        setup
    };
    let gateway = over(&[0, 1]).start();
    gateway.ready("fake", 2);
    let slow = r#"{"token_ms":20,"tokens":150}"#;
    let streams: Vec<_> = (0..4)
        .map(|_| begin_stream(&gateway, &chat(true), slow))
        .collect();
    let load = Load::start(gateway.addr, 3, chat(false), "");
    for chosen in [&[0, 1, 2][..], &[2], &[1, 2], &[0]] {
        gateway.write_config(&over(chosen).yaml());
        gateway.ready("fake", chosen.len());
        gateway.until("the fleet is the new one", || {
            gateway.replicas().len() == chosen.len()
        });
        for index in chosen {
            let before = engines[*index].state().total;
            gateway.until("each of it is used", || {
                engines[*index].state().total > before + 2
            });
        }
    }
    assert_ok(&load.stop());
    streams.into_iter().for_each(finish_stream);
    gateway.counters_are_zero();
    for engine in &engines {
        assert_eq!(engine.state().cancelled, 0);
    }
}

#[test]
fn a_request_that_waits_for_a_slot_goes_to_the_replica_that_a_reload_brought() {
    let slow = Options {
        slots: 1,
        ..Options::new(Kind::Llamacpp)
    };
    let busy = fake_engine::start(slow).unwrap();
    let fresh = engine(Kind::Vllm, "{}");
    let setup = || Setup::new().model("fake", "");
    let gateway = setup()
        .endpoint("llamacpp", &busy.url(), "slots: 1")
        .start();
    gateway.ready("fake", 1);
    let holds = begin_stream(&gateway, &chat(true), r#"{"token_ms":60000}"#);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| gateway.post(CHAT, &chat(false), ""));
        gateway.queued(1);
        gateway.write_config(&setup().endpoint("vllm", &fresh.url(), "").yaml());
        assert_ok(&[waits.join().unwrap()]);
    });
    assert_eq!(fresh.state().total, 1);
    drop(holds);
}

#[test]
fn a_broken_configuration_keeps_the_last_good_one_and_is_on_show() {
    let engine = engine(Kind::Vllm, "{}");
    let good = || {
        Setup::new()
            .model("fake", "")
            .endpoint("vllm", &engine.url(), "")
            .yaml()
    };
    let gateway = Gateway::over("vllm", &[&engine]);
    let error = || gateway.admin_get("/v1/status").json()["config"]["last_error"].clone();
    for (broken, parts) in [
        (format!("{}tpyo: 1\n", good()), &["llmgw.yaml:", "tpyo"][..]),
        (
            good().replace("engine: vllm", "engine: vlmm"),
            &["llmgw.yaml:", "vlmm"],
        ),
        (good()[..good().len() - 10].to_owned(), &["llmgw.yaml"]),
        (String::new(), &["llmgw.yaml"]),
    ] {
        gateway.write_config(&broken);
        gateway.until("the mistake is on show", || {
            let text = error().as_str().unwrap_or_default().to_owned();
            parts.iter().all(|part| text.contains(part))
        });
        let ran = ctl(&gateway, &["status"]);
        assert_eq!(ran.status, 0, "{}", ran.stderr);
        for part in parts {
            assert!(ran.stdout.contains(part), "`{part}` in {}", ran.stdout);
        }
        let ran = ctl(&gateway, &["reload"]);
        assert_eq!(ran.status, 1, "{} {}", ran.stdout, ran.stderr);
        assert_ok(&[gateway.post(CHAT, &chat(false), "")]);
    }
    gateway.write_config(&good());
    gateway.until("nothing is wrong any more", || error().is_null());
    assert_eq!(ctl(&gateway, &["reload"]).status, 0);
}

#[test]
fn a_configuration_that_names_an_engine_before_its_plugin_is_there_comes_into_force_with_the_plugin()
 {
    let engine = engine(Kind::Vllm, "{}");
    let setup = |kind: &str| {
        Setup::new()
            .top("policies: policies")
            .file("policies/engines/README.md", "")
            .model("fake", "")
            .endpoint(kind, &engine.url(), "")
    };
    let gateway = setup("vllm").start();
    gateway.ready("fake", 1);
    let error = || gateway.admin_get("/v1/status").json()["config"]["last_error"].clone();
    gateway.write_config(&setup("corvid").yaml());
    gateway.until("the engine is missed", || {
        error().as_str().unwrap_or_default().contains("corvid")
    });
    let plugin = "return { api = 1, name = \"corvid\", needs_gpu = false, multi_node = false, tensor_parallel = false, \
                  readiness = { models = \"/v1/models\", start_deadline_ms = 600000 } }\n";
    save(&gateway.dir.join("policies/engines/corvid.lua"), plugin);
    gateway.until("nothing is wrong any more", || error().is_null());
    gateway.ready("fake", 1);
    assert_eq!(gateway.replicas()[0]["engine"], "corvid");
    assert_eq!(generation(&gateway), 2);
}

#[test]
fn what_waits_for_the_next_start_is_said_by_every_reload_and_the_status_until_it_is_undone() {
    let gateway = Gateway::over("vllm", &[&engine(Kind::Vllm, "{}")]);
    let before = std::fs::read_to_string(gateway.dir.join("llmgw.yaml")).unwrap();
    let after = before.replace("state: state", "state: other");
    assert_ne!(before, after);
    gateway.write_config(&after);
    for _ in 0..2 {
        let ran = ctl(&gateway, &["reload"]);
        assert_eq!(ran.status, 0, "{}", ran.stderr);
        let said = "; `state` changed: takes effect with the next start\n";
        assert!(ran.stdout.ends_with(said), "{}", ran.stdout);
    }
    let shown = "state changed: takes effect with the next start";
    let ran = ctl(&gateway, &["status"]);
    assert!(ran.stdout.contains(shown), "{}", ran.stdout);
    gateway.write_config(&before);
    let ran = ctl(&gateway, &["reload"]);
    assert!(!ran.stdout.contains("next start"), "{}", ran.stdout);
    let ran = ctl(&gateway, &["status"]);
    assert!(!ran.stdout.contains(shown), "{}", ran.stdout);
}

#[test]
fn sighup_reloads_and_kills_nothing() {
    let engine = engine(Kind::Vllm, "{}");
    let mut gateway = Gateway::over("vllm", &[&engine]);
    let reloads = |gateway: &Gateway| gateway.metric("llmgw_config_reloads_total", "result=\"ok\"");
    let stream = begin_stream(&gateway, &chat(true), r#"{"token_ms":20,"tokens":40}"#);
    for _ in 0..3 {
        let before = reloads(&gateway);
        signal(&gateway, Signal::SIGHUP);
        gateway.until("it was reloaded", || reloads(&gateway) > before);
    }
    finish_stream(stream);
    assert!(gateway.exited(Duration::ZERO).is_none());
    assert_ok(&[gateway.post(CHAT, &chat(false), "")]);
}

/// Opens a pipe for writing once somebody reads it.
fn open_when_read(pipe: &Path) -> File {
    let deadline = Instant::now() + PATIENCE;
    let mut options = File::options();
    options.write(true).custom_flags(OFlag::O_NONBLOCK.bits());
    loop {
        match options.open(pipe) {
            Ok(file) => return file,
            Err(error) => assert!(Instant::now() < deadline, "nobody reads it: {error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_sighup_that_comes_while_the_server_starts_is_a_reload_once_it_serves() {
    let setup = Setup::new()
        .model("fake", "")
        .endpoint("vllm", "http://127.0.0.1:9", "");
    // What it reads as it starts lasts until it is written.
    let starts = setup.launch(|config| mkfifo(config, Mode::S_IRUSR | Mode::S_IWUSR).unwrap());
    let config = starts.dir.join("llmgw.yaml");
    let mut pipe = open_when_read(&config);
    signal(&starts, Signal::SIGHUP);
    save(&config, &setup.yaml());
    pipe.write_all(setup.yaml().as_bytes()).unwrap();
    drop(pipe);
    let gateway = starts.serving();
    gateway.until("it was reloaded", || {
        gateway.metric("llmgw_config_reloads_total", "result=\"ok\"") == 1.0
    });
}

#[test]
fn twenty_reloads_change_neither_the_rate_of_probes_nor_what_was_learned() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = Gateway::over("vllm", &[&engine]);
    let probes = || {
        engine
            .state()
            .by_path
            .get("GET /health")
            .copied()
            .unwrap_or(0)
    };
    let connections = engine.state().open_connections;
    for number in 0..20 {
        if number % 4 == 0 {
            // A change that leaves the endpoints as they are.
            let keepalive = format!("{}s", 10 + number);
            let setup = Setup::new()
                .limit("keepalive", &keepalive)
                .model("fake", "");
            gateway.write_config(&setup.endpoint("vllm", &engine.url(), "").yaml());
        }
        assert_eq!(gateway.admin_post("/v1/reload").status(), 200);
        assert_eq!(
            gateway.replicas()[0]["state"],
            "ready",
            "it was not made anew"
        );
    }
    // One a second: what is measured is a rate. The first may be due at once.
    let (before, since) = (probes(), Instant::now());
    gateway.until("it is probed on", || probes() >= before + 4);
    let took = since.elapsed();
    assert!(took > Duration::from_secs(2), "four probes in {took:?}");
    assert!(engine.state().open_connections <= connections + 1);
    assert_ok(&at_once(4, |_| gateway.post(CHAT, &chat(false), "")));
}

#[test]
fn the_knobs_of_a_policy_hold_from_the_first_request_after_a_reload() {
    let engines: Vec<Running> = (0..2).map(|_| engine(Kind::Vllm, "{}")).collect();
    // No prefix that is shorter than the prompt is worth anything.
    let knobs = "local M = { api = 1 }\nfunction M.weights(pool)\n  return { affinity_min = 1 }\nend\nreturn M\n";
    let mut setup = Setup::new()
        .top("policies: policies")
        .file("policies/routing.lua", knobs)
        .model("fake", "");
    for engine in &engines {
        setup = setup.endpoint("vllm", &engine.url(), "");
    }
    let gateway = setup.start();
    gateway.ready("fake", 2);
    let reason = |words: usize| {
        let text = "word ".repeat(words);
        let body =
            serde_json::json!({"model": "fake", "messages": [{"role": "user", "content": text}]});
        let headers = [("content-type", "application/json"), ("x-llmgw-debug", "1")];
        let mut client = gateway.client();
        client.request("POST", CHAT, &headers, body.to_string().as_bytes());
        client.answer().header("x-llmgw-reason").unwrap().to_owned()
    };
    reason(200);
    gateway.until("the knobs are in force", || reason(300) != "prefix");
    for round in 0..10 {
        assert_eq!(gateway.admin_post("/v1/reload").status(), 200);
        // Each prompt goes on from the one before.
        assert_ne!(reason(300 + 50 * round), "prefix");
    }
}
