//! The fake speaks as the engines spoke: recorded requests are sent again, and status, header names and the key order and
//! types of every JSON object have to be those of the recorded answers.
//!
//! Recordings: vLLM 0.32.0, SGLang 0.5.23, llama.cpp b11434.

mod client;

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::PathBuf;

use client::{Answer, Client, get};
use fake_engine::{Kind, Options, Running, start};
use serde_json::Value;

const KINDS: [Kind; 3] = [Kind::Vllm, Kind::Sglang, Kind::Llamacpp];

#[test]
fn every_recorded_request_is_answered_in_the_recorded_shape() {
    for kind in KINDS {
        let engine = engine(kind, 0);
        let mut compared = 0;
        for name in names(kind) {
            let request = fs::read(folder(kind).join(format!("{name}.http.req"))).unwrap();
            let recorded = parse(&fs::read(folder(kind).join(format!("{name}.http"))).unwrap());
            let mut client = Client::new(engine.addr());
            client.send(&request);
            let answer = client.answer().unwrap();
            let place = format!("{} {name}", kind.name());
            assert_eq!(answer.status, recorded.status, "{place}: {}", answer.text());
            assert_eq!(header_names(&answer), header_names(&recorded), "{place}");
            assert_eq!(
                answer.header("content-type"),
                recorded.header("content-type"),
                "{place}"
            );
            // The order of choices of n=2 streams is a matter of scheduling; their events are not.
            let (mut ours, mut theirs) = (shapes(&answer), shapes(&recorded));
            if name == "chat-stream-n2" {
                ours.sort();
                ours.dedup();
                theirs.sort();
                theirs.dedup();
            }
            assert_eq!(ours, theirs, "{place}");
            compared += 1;
        }
        assert!(
            compared > 15,
            "{} has only {compared} recordings",
            kind.name()
        );
    }
}

#[test]
fn llamacpp_answers_503_on_every_route_while_loading() {
    let engine = engine(Kind::Llamacpp, 60_000);
    for (name, path) in [
        ("loading_health", "/health"),
        ("loading_v1_models", "/v1/models"),
        ("loading_metrics", "/metrics"),
    ] {
        let recorded =
            parse(&fs::read(folder(Kind::Llamacpp).join(format!("{name}.http"))).unwrap());
        let answer = get(engine.addr(), path).unwrap();
        assert_eq!(
            (answer.status, answer.text()),
            (recorded.status, recorded.text()),
            "{path}"
        );
    }
}

#[test]
fn every_metric_has_a_name_and_labels_that_were_recorded() {
    for kind in KINDS {
        let recorded = fs::read_to_string(folder(kind).join("metrics.txt")).unwrap();
        let recorded: BTreeSet<String> = recorded.lines().map(series).collect();
        let page = get(engine(kind, 0).addr(), "/metrics").unwrap().text();
        let ours: Vec<&str> = page
            .lines()
            .filter(|line| {
                !line.starts_with('#') && !line.contains("_bucket") && !line.contains("_created")
            })
            .collect();
        assert!(ours.len() > 8, "{page}");
        for line in ours {
            assert!(recorded.contains(&series(line)), "{}: {line}", kind.name());
        }
    }
}

#[test]
fn llamacpp_sends_the_role_with_the_first_token_and_usage_with_the_finish() {
    let recorded = parse(&fs::read(folder(Kind::Llamacpp).join("chat-stream-usage.http")).unwrap());
    let request = fs::read(folder(Kind::Llamacpp).join("chat-stream-usage.http.req")).unwrap();
    let engine = engine(Kind::Llamacpp, 0);
    let mut client = Client::new(engine.addr());
    client.send(&request);
    let events = |answer: &Answer| -> Vec<usize> {
        answer
            .chunks
            .iter()
            .map(|chunk| String::from_utf8_lossy(chunk).matches("\n\n").count())
            .collect()
    };
    assert_eq!(events(&client.answer().unwrap()), events(&recorded));
}

fn engine(kind: Kind, load_ms: u64) -> Running {
    let main = if kind == Kind::Llamacpp {
        "smol"
    } else {
        "tiny"
    };
    let mut models = vec![main.to_owned()];
    if kind == Kind::Vllm {
        models.push("tiny-alias".to_owned());
    }
    start(Options {
        models,
        load_ms,
        ..Options::new(kind)
    })
    .unwrap()
}

fn folder(kind: Kind) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/recordings")
        .join(kind.name())
}

fn names(kind: Kind) -> Vec<String> {
    let files = fs::read_dir(folder(kind))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = files
        .filter_map(|file| file.strip_suffix(".http.req").map(str::to_owned))
        .collect();
    names.sort();
    names
}

/// Parses recorded bytes by sending them through a socket.
fn parse(bytes: &[u8]) -> Answer {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = Client::new(listener.local_addr().unwrap());
    let (mut server, _) = listener.accept().unwrap();
    let owned = bytes.to_vec();
    let sender = std::thread::spawn(move || {
        std::io::Write::write_all(&mut server, &owned).unwrap();
        server.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = server.read(&mut [0]);
    });
    let answer = client.answer().unwrap();
    drop(client);
    sender.join().unwrap();
    answer
}

fn header_names(answer: &Answer) -> BTreeSet<String> {
    answer
        .headers
        .iter()
        .map(|(name, _)| name.to_ascii_lowercase())
        .collect()
}

/// The shape of a body: of each event of a stream (repeats once), or of the JSON, or whether there is text.
fn shapes(answer: &Answer) -> Vec<String> {
    let text = answer.text();
    if !answer
        .header("content-type")
        .is_some_and(|kind| kind.starts_with("text/event-stream"))
    {
        let shape = serde_json::from_str(&text).map(|value| shape(&value));
        return vec![shape.unwrap_or_else(|_| {
            if text.is_empty() {
                String::new()
            } else {
                "text".to_owned()
            }
        })];
    }
    let line_shape = |line: &str| match line.strip_prefix("data: {") {
        Some(rest) => shape(&serde_json::from_str(&format!("{{{rest}")).unwrap()),
        None => line.to_owned(),
    };
    let events = text
        .split_terminator("\n\n")
        .map(|event| event.lines().map(line_shape).collect::<Vec<_>>().join(" "));
    let mut shapes: Vec<String> = events.collect();
    shapes.dedup();
    shapes
}

/// Keys in order, and types.
fn shape(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let fields: Vec<String> = fields
                .iter()
                .map(|(key, value)| format!("{key}:{}", shape(value)))
                .collect();
            format!("{{{}}}", fields.join(","))
        }
        Value::Array(items) => format!("[{}]", items.first().map(shape).unwrap_or_default()),
        Value::Null => "null".to_owned(),
        Value::Bool(_) => "bool".to_owned(),
        Value::String(_) => "string".to_owned(),
        Value::Number(_) => "number".to_owned(),
    }
}

/// Name and label names of a metrics line.
fn series(line: &str) -> String {
    let name = line.split(['{', ' ']).next().unwrap_or_default();
    let labels = line
        .split_once('{')
        .and_then(|(_, rest)| rest.rsplit_once('}'))
        .map_or("", |(labels, _)| labels);
    let names: BTreeSet<&str> = labels
        .split(',')
        .filter_map(|label| label.split('=').next())
        .collect();
    format!("{name} {names:?}")
}
