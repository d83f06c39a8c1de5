//! The snapshot file: what is refused, with which words; and varying it by path.

use std::path::Path;

use serde_json::{Value, json};

use super::{Build, fleet, gpu_profile};
use crate::control::snapshot::{SCHEMA, Snapshot};

const HEAD: &str =
    r#"{"schema": "llmgw.fleet/1", "generated_by": "t", "taken_at": "2026-07-01T12:00:00Z", "#;
const NODE: &str = r#""cpus": 4, "cpus_free": 4, "memory_gib": 8, "memory_gib_free": 8"#;

fn refusal(text: &str) -> String {
    match Snapshot::parse(Path::new("f.json"), text) {
        Ok(_) => panic!("it must be refused: {text}"),
        Err(error) => error.to_string(),
    }
}

/// Without the column, which is where the reader noticed.
fn without_column(message: &str) -> String {
    let parts: Vec<&str> = message.splitn(4, ':').collect();
    match parts[..] {
        [file, line, column, rest] if column.parse::<usize>().is_ok() => {
            format!("{file}:{line}:{rest}")
        }
        _ => message.to_owned(),
    }
}

#[test]
fn what_is_wrong_with_a_file_is_told_with_line_path_and_suggestion() {
    let node = |inner: &str| format!("{HEAD}\n\"nodes\": {{\n\"a\": {{{NODE}, {inner}}}}}}}");
    let whole = |inner: &str| format!("{HEAD}\n{inner}}}");
    let gpu = r#""uuid": "G", "index": 0, "class": "l4-22g""#;
    let cases = [
        (node(r#""gpuz": []"#), "f.json:3: nodes.a.gpuz: unknown key `gpuz`\n  help: did you mean `gpus`?"),
        (
            node(&format!(r#""gpus": [{{{gpu}, "helthy": true}}]"#)),
            "f.json:3: nodes.a.gpus[0].helthy: unknown key `helthy`\n  help: did you mean `healthy`?",
        ),
        (
            node(r#""gpus": [{"uuid": "G", "index": 0}]"#),
            "f.json:3: nodes.a.gpus[0]: missing field `class`",
        ),
        (
            node(r#""state": "gone""#),
            "f.json:3: nodes.a.state: unknown value `gone`\n  help: known here: ready, draining, unreachable, lost",
        ),
        (
            node(r#""rack": 4"#),
            "f.json:3: nodes.a.rack: invalid type: integer `4`, expected a string",
        ),
        (
            whole(&format!(r#""nodes": {{"ml-1": {{{NODE}}}, "ml-1": {{{NODE}}}}}"#)),
            "f.json:2: nodes[\"ml-1\"]: `ml-1` is there twice",
        ),
        (
            node(r#""gpus": [{"uuid": "G", "index": 0, "class": "l4-22g", "used_by": "x/0"}]"#),
            "f.json: nodes[\"a\"].gpus[0].used_by: `replicas` has no `x/0` with a shard here; `foreign` is for processes that llmgw did not start",
        ),
        (
            node(r#""adapters": [{"name": "mlx5_0", "link": "roce", "fabric": "x"}]"#),
            "f.json: nodes[\"a\"].adapters[0].fabric: `x` is none of the node's `fabrics`",
        ),
        (
            whole(r#""nodes": {}, "models": {"m": {"profiles": [{"name": "p", "engine": "vllm", "gpu": ["h100-sxm-80g"], "tensor_parallel": 2}]}}"#),
            "f.json: models[\"m\"].profiles[0]: tensor_parallel: nodes x gpus_per_node is 1 x 1 = 1, but tensor_parallel x pipeline_parallel is 2 x 1 = 2; set `tensor_parallel: 1`",
        ),
        (
            whole(r#""nodes": {}, "models": {"m": {"profiles": [{"name": "p", "engine": "vllm", "gpu": ["a100-sxm4-80g"], "quantization": "fp8"}]}}"#),
            "f.json: models[\"m\"].profiles[0]: gpu: fp8 needs compute capability 8.9, which `a100-sxm4-80g` does not have; remove the class, or choose another `quantization`",
        ),
        (
            whole(r#""nodes": {}, "replicas": {"m": {"model": "m", "profile": "p", "state": "ready", "shards": []}}"#),
            "f.json: replicas[\"m\"]: a replica's id is `m/<number>`",
        ),
        (
            whole(r#""nodes": {}}"#),
            "f.json:2: trailing characters",
        ),
        (
            r#"{"schema": "llmgw.fleet/2"}"#.to_owned(),
            "f.json: the file's schema is `llmgw.fleet/2`\n  help: this llmgw reads `llmgw.fleet/1`; `llmgw ctl snapshot` of the same version writes it",
        ),
        (
            "{}".to_owned(),
            "f.json: the file has no `schema`\n  help: this llmgw reads `llmgw.fleet/1`; `llmgw ctl snapshot` of the same version writes it",
        ),
        (
            r#"{"schema": "llmgw.fleet/1", "generated_by": "t", "taken_at": "today", "nodes": {}}"#.to_owned(),
            "f.json: taken_at: `today` is no time such as `2026-07-01T12:00:00Z`",
        ),
        (
            r#"{"schema": "llmgw.fleet/1", "generated_by": "t", "generate": {"seed": 1, "nodes": 10001}}"#.to_owned(),
            "f.json: generate.nodes: more than 10000 nodes",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(without_column(&refusal(&text)), expected, "{text}");
    }
    let missing =
        Snapshot::read(Path::new("/nonexistent/f.json")).expect_err("there is no such file");
    assert!(missing.to_string().contains("No such file"), "{missing}");
}

#[test]
fn a_snapshot_written_and_read_is_the_same() {
    let snapshot = Build::default()
        .gpus("a b", "h100-sxm-80g", &[4, 0])
        .model(json!([gpu_profile("h100-sxm-80g", 4, 1)]))
        .set("nodes[\"a b\"].gpus_free", 2)
        .0;
    let text = snapshot.to_json();
    assert!(text.contains(SCHEMA));
    assert_eq!(
        Snapshot::parse(Path::new("f"), &text).as_ref(),
        Ok(&snapshot)
    );
}

#[test]
fn a_value_is_read_and_set_by_path() {
    let mut fleet = fleet("two-racks");
    let cases = [
        ("nodes[\"ml-07\"].gpus_free", json!(8), json!(4.0), json!(4)),
        ("nodes.ml-07.gpus_free", json!(4), json!(6), json!(6)),
        (
            "nodes[\"ml-07\"].gpus[7].used_by",
            json!("reserved"),
            json!(null),
            json!(null),
        ),
        ("nodes[\"ml-07\"].gpus_free", json!(7), json!(8), json!(8)),
        (
            "nodes[\"ml-03\"].gpu_class",
            json!("l40s-45g"),
            json!("h200-140g"),
            json!("h200-140g"),
        ),
        (
            "nodes[\"ml-01\"].fabric",
            json!("ib-east"),
            json!("ib-west"),
            json!("ib-west"),
        ),
        (
            "nodes[\"ml-03\"].fabric",
            json!(null),
            json!("ib-west"),
            json!("ib-west"),
        ),
        (
            "nodes[\"ml-02\"].labels.tier",
            json!(null),
            json!("gold"),
            json!("gold"),
        ),
        (
            "nodes[\"ml-02\"].zone",
            json!("a"),
            json!(null),
            json!(null),
        ),
        (
            "nodes[\"ml-02\"].state",
            json!("ready"),
            json!("lost"),
            json!("lost"),
        ),
        (
            "models[\"llama-3.3-70b\"].replicas",
            json!(2),
            json!(3),
            json!(3),
        ),
        (
            "models[\"llama-3.3-70b\"].profiles[0].cpus",
            json!(null),
            json!(16),
            json!(16),
        ),
        (
            "replicas[\"qwen3-235b/0\"].state",
            json!("ready"),
            json!("draining"),
            json!("draining"),
        ),
        (
            "pools[\"qwen3-235b\"][0].kv",
            json!(0.61),
            json!(0.5),
            json!(0.5),
        ),
        (
            "nodes.ml-05.domains",
            json!([{"gpus": 8, "free": 8}]),
            Value::Null,
            Value::Null,
        ),
    ];
    for (path, before, value, after) in cases {
        assert_eq!(fleet.get(path), Ok(before), "{path}");
        if path.ends_with("domains") {
            continue;
        }
        assert_eq!(fleet.set(path, value), Ok(()), "{path}");
        assert_eq!(fleet.get(path), Ok(after), "{path}");
    }
    let text = fleet.to_json();
    assert_eq!(Snapshot::parse(Path::new("f"), &text), Ok(fleet));
}

#[test]
fn a_misspelt_path_fails_with_a_suggestion_and_changes_nothing() {
    let mut snapshot = fleet("two-racks");
    let before = snapshot.clone();
    let cases = [
        (
            "nodes[\"ml-07\"].gpu_free",
            json!(4),
            "unknown key `gpu_free` (did you mean `gpus_free`?)",
        ),
        (
            "nodes[\"ml-7\"].gpus_free",
            json!(4),
            "there is no node `ml-7` (did you mean `ml-07`?)",
        ),
        (
            "node.ml-07.gpus_free",
            json!(4),
            "unknown key `node` (did you mean `nodes`?)",
        ),
        (
            "nodes[\"ml-07\"].gpus[8].healthy",
            json!(false),
            "there is no item 8, the list has 8",
        ),
        (
            "nodes[\"ml-07\"].gpus[0].helthy",
            json!(false),
            "unknown key `helthy` (did you mean `healthy`?)",
        ),
        (
            "nodes[\"ml-07\"].gpus_free",
            json!(9),
            "the node has 8 GPUs, of which 8 are healthy",
        ),
        (
            "nodes[\"ml-07\"].gpus_free",
            json!("4"),
            "\"4\" is no number of GPUs",
        ),
        (
            "nodes[\"ml-07\"].domains",
            json!([]),
            "`domains` follows from the GPUs (set `gpus[0].domain` and so on)",
        ),
        (
            "nodes[\"ml-07\"].cpus_free",
            json!(1000),
            "cpus_free: 1000 cores are free of 192",
        ),
        (
            "nodes[ml-07].cpus",
            json!(1),
            "`ml-07` is no position; names go in quotes: `[\"ml-07\"]`",
        ),
        (
            "nodes",
            json!({}),
            "`nodes` is a map by name (write `nodes[\"name\"]`)",
        ),
        ("", json!(1), "it is empty"),
        (
            "models.llama.replicas",
            json!(1),
            "there is no model `llama` (known here: deepseek-v3, embed-small, llama-3.3-70b, qwen3-235b)",
        ),
        (
            "models[\"llama-3.3-70b\"].profiles[0].gpus_per_node",
            json!(2),
            "profiles[0]: tensor_parallel: nodes x gpus_per_node is 1 x 2 = 2, but tensor_parallel x pipeline_parallel is 4 x 1 = 4; set `tensor_parallel: 2`",
        ),
    ];
    for (path, value, expected) in cases {
        let error = snapshot.set(path, value).expect_err(path);
        assert_eq!(error.to_string(), format!("{path}: {expected}"));
        assert_eq!(snapshot, before, "{path}");
    }
    let error = snapshot
        .get("nodes[\"ml-07\"].quue")
        .expect_err("there is no such field");
    assert!(error.wrong.contains("unknown key `quue`"), "{error}");
}

#[test]
fn entries_come_and_go_whole() {
    let mut snapshot = fleet("two-racks");
    snapshot
        .set("replicas[\"qwen3-235b/0\"]", Value::Null)
        .expect("it is there");
    assert_eq!(
        snapshot.get("nodes.ml-01.gpus_free"),
        Ok(json!(8)),
        "what it had is free"
    );
    snapshot
        .set("nodes.ml-03", Value::Null)
        .expect("it is there");
    assert!(snapshot.replicas.is_empty(), "its replica is gone too");
    let node = json!({"cpus": 4, "cpus_free": 4, "memory_gib": 8, "memory_gib_free": 8});
    snapshot.set("nodes[\"new\"]", node).expect("it is a node");
    assert_eq!(snapshot.get("nodes.new.state"), Ok(json!("ready")));
    let text = snapshot.to_json();
    assert_eq!(Snapshot::parse(Path::new("f"), &text), Ok(snapshot));
}

#[test]
fn the_reference_shows_a_snapshot_that_is_read() {
    let page = include_str!("../../../../docs/reference/snapshot.md");
    let mut examples = page.split("```json\n").skip(1);
    for _ in 0..2 {
        let example = examples.next().expect("the page has two examples");
        let text = example.split("```").next().unwrap_or("");
        Snapshot::parse(Path::new("snapshot.md"), text).unwrap_or_else(|error| panic!("{error}"));
    }
}
