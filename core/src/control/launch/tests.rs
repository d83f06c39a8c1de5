//! Shards of the three engines, what they are made from, and their ports.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use llmgw_plugins::PolicySet;
use llmgw_proto::session::SessionId;
use llmgw_proto::shard::{ApiKey, ShardSpec, ShardState};

use super::{
    Chosen, LaunchError, definition, desired, free_port, problems, random_key, shard_spec,
};
use crate::config::{self, Catalog};
use crate::control::memory::{Memory, Start};
use crate::control::observed::ObservedNode;
use crate::control::tests::nodes::{Nodes, node, spec};

const KEY: &str = "0123456789abcdef";

/// A model `m` with this profile.
fn catalog(profile: &str) -> Catalog {
    let text =
        format!("models:\n- {{name: m, source: org/model, replicas: 3, profiles: [{profile}]}}\n");
    let parsed = config::parse(Path::new("llmgw.yaml"), text, &|_| None);
    parsed.unwrap_or_else(|errors| panic!("{errors}")).catalog
}

fn made(profile: &str) -> ShardSpec {
    let catalog = catalog(profile);
    let model = &catalog.models[0];
    let chosen = Chosen {
        model,
        profile: &model.profiles[0],
        number: 2,
        node: &node("a", 0),
        gpus: &["GPU-0a".to_owned()],
    };
    let set = PolicySet::built_in();
    shard_spec(&set, &chosen, 21_007, ApiKey::new(KEY.to_owned())).expect("it renders")
}

const VLLM: &str = "{name: p, engine: vllm, gpu: h100-sxm-80g, gpus_per_node: 2, tensor_parallel: 2, args: [--max-model-len, '2048']}";
const SGLANG: &str =
    "{name: p, engine: sglang, gpu: h100-sxm-80g, args: [--mem-fraction-static, '0.8']}";
const LLAMACPP: &str = "{name: p, engine: llamacpp, cpus: 4, memory: 2GiB, slots: 3, args: [--ctx-size, '8192'], env: {GGML_X: a}}";

#[test]
fn a_shard_has_all_that_starting_and_judging_it_needs() {
    let spec = made(LLAMACPP);
    assert_eq!(
        (&*spec.shard, &*spec.replica, &*spec.profile),
        ("m/2/0", "m/2", "p")
    );
    assert_eq!(spec.address().as_deref(), Some("10.0.0.1:21007"));
    assert_eq!(
        (spec.cpus, spec.memory_bytes, spec.slots),
        (Some(4), Some(2 << 30), Some(3))
    );
    assert_eq!(spec.gpus, ["GPU-0a"]);
    assert_eq!(
        (&*spec.readiness.health, &*spec.readiness.served_name),
        ("/health", "m")
    );
    assert_eq!(spec.readiness.start_deadline_ms, 600_000);
    assert_eq!(spec.commands[0].env["GGML_X"], "a");
    assert_eq!(made(SGLANG).readiness.health, "/ready");
}

#[test]
fn each_engine_gets_what_it_was_recorded_with() {
    let vllm = "serve org/model --served-model-name m --host 10.0.0.1 --port 21007 --tensor-parallel-size 2 \
                --pipeline-parallel-size 1 --max-model-len 2048";
    let sglang = "serve --model-path org/model --served-model-name m --host 10.0.0.1 --port 21007 --tp-size 1 --pp-size 1 \
                  --enable-metrics --api-key ${LLMGW_API_KEY} --mem-fraction-static 0.8";
    // The node's models_dir and the relative path.
    let llamacpp = "--model /models/org/model --alias m --host 10.0.0.1 --port 21007 --parallel 3 --threads-http 67 --metrics \
                    --sse-ping-interval 5 --threads 4 --ctx-size 8192";
    for (profile, executable, args) in [
        (VLLM, "vllm", vllm),
        (SGLANG, "sglang", sglang),
        (LLAMACPP, "llama-server", llamacpp),
    ] {
        let spec = made(profile);
        let command = &spec.commands[0];
        assert_eq!(command.executable, executable);
        assert_eq!(command.args.join(" "), args);
    }
}

#[test]
fn an_engine_loads_and_serves_as_its_profile_says() {
    let fp8 = |profile: &str| profile.replace("gpu:", "quantization: fp8, slots: 64, gpu:");
    for (profile, told) in [
        (VLLM, "--quantization fp8 --max-num-seqs 64"),
        (SGLANG, "--quantization fp8 --max-running-requests 64"),
    ] {
        let args = made(&fp8(profile)).commands[0].args.join(" ");
        assert!(args.contains(told), "{args}");
    }
}

/// What a node with this models_dir is told to load, or why nothing.
fn loaded(engine: &str, source: &str, models_dir: Option<&str>) -> Result<String, String> {
    let text = format!(
        "models:\n- {{name: m, source: {source}, profiles: [{{name: p, engine: {engine}, gpu: l40s-45g}}]}}\n"
    );
    let parsed = config::parse(Path::new("llmgw.yaml"), text, &|_| None);
    let catalog = parsed.unwrap_or_else(|errors| panic!("{errors}")).catalog;
    let mut node = ObservedNode::clone(&node("a", 0));
    node.models_dir = models_dir.map(str::to_owned);
    let chosen = Chosen {
        model: &catalog.models[0],
        profile: &catalog.models[0].profiles[0],
        number: 0,
        node: &node,
        gpus: &[],
    };
    let set = PolicySet::built_in();
    let spec = shard_spec(&set, &chosen, 21_007, ApiKey::new(KEY.to_owned()));
    let spec = spec.map_err(|error| error.to_string())?;
    // `serve MODEL` and `--model FILE`.
    Ok(spec.commands[0].args[1].clone())
}

#[test]
fn a_relative_path_is_one_below_the_nodes_models_dir() {
    let models = Some("/srv/models");
    for (engine, source, at) in [
        ("llamacpp", "m.gguf", "/srv/models/m.gguf"),
        ("llamacpp", "./org/m.gguf", "/srv/models/org/m.gguf"),
        ("llamacpp", "/data/m.gguf", "/data/m.gguf"),
        ("vllm", "org/model", "org/model"),
        ("vllm", "./org/model", "/srv/models/org/model"),
        ("vllm", "/data/model", "/data/model"),
    ] {
        assert_eq!(
            loaded(engine, source, models).as_deref(),
            Ok(at),
            "{engine} {source}"
        );
    }
    assert_eq!(
        loaded("vllm", "org/model", None).as_deref(),
        Ok("org/model")
    );
    for (engine, source) in [("llamacpp", "m.gguf"), ("vllm", "./m"), ("sglang", "./m")] {
        let why = loaded(engine, source, None).unwrap_err();
        let reason =
            format!("source `{source}` is a relative path, and the node has no `models_dir`");
        assert!(why.contains(&reason), "{why}");
    }
}

#[test]
fn every_option_is_one_that_the_engine_lists() {
    const VLLM_OPTIONS: &str =
        include_str!("../../../../tests/recordings/engines/vllm/options.txt");
    const SGLANG_OPTIONS: &str =
        include_str!("../../../../tests/recordings/engines/sglang/options.txt");
    const LLAMACPP_OPTIONS: &str =
        include_str!("../../../../tests/recordings/engines/llamacpp/options.txt");
    for (profile, options) in [
        (VLLM, VLLM_OPTIONS),
        (SGLANG, SGLANG_OPTIONS),
        (LLAMACPP, LLAMACPP_OPTIONS),
    ] {
        let known: BTreeSet<&str> = options.lines().skip(1).collect();
        let spec = made(profile);
        let given = spec.commands[0]
            .args
            .iter()
            .filter(|arg| arg.starts_with('-'));
        let unknown: Vec<&String> = given.filter(|arg| !known.contains(arg.as_str())).collect();
        assert!(
            unknown.is_empty(),
            "{} does not know {unknown:?}",
            spec.engine
        );
    }
}

#[test]
fn the_key_is_named_where_the_engine_reads_it_and_never_written_out() {
    for (profile, place) in [(VLLM, "VLLM_API_KEY"), (LLAMACPP, "LLAMA_API_KEY")] {
        let spec = made(profile);
        let command = &spec.commands[0];
        assert_eq!(command.env[place], "${LLMGW_API_KEY}");
        assert!(
            command.args.iter().all(|arg| !arg.contains("API_KEY")),
            "{place}"
        );
        assert_eq!(spec.api_key.as_ref().map(ApiKey::expose), Some(KEY));
        let shown = format!("{:?}", spec);
        assert!(!shown.contains(KEY), "{shown}");
    }
    let (a, b) = (
        random_key().expect("there is chance"),
        random_key().expect("and more"),
    );
    assert_eq!(a.expose().len(), 64);
    assert_ne!(a, b);
}

#[test]
fn a_definition_changes_with_what_the_replica_is_made_from_only() {
    let of = |profile: &str| {
        let catalog = catalog(profile);
        definition(&catalog.models[0], &catalog.models[0].profiles[0])
    };
    let base = of(LLAMACPP);
    assert_eq!(base, of(LLAMACPP));
    assert_eq!(base, of(&LLAMACPP.replace("name: p", "name: q")));
    for (from, to) in [
        ("cpus: 4", "cpus: 5"),
        ("slots: 3", "slots: 4"),
        ("8192", "4096"),
        ("GGML_X: a", "GGML_X: b"),
    ] {
        assert_ne!(base, of(&LLAMACPP.replace(from, to)), "{to}");
    }
    let selected = LLAMACPP.replace("cpus: 4", "node_selector: {zone: a}, cpus: 4");
    assert_ne!(base, of(&selected));
    assert_ne!(of(&selected), of(&selected.replace("zone: a", "zone: b")));
    // A server that knows more keys than the one before replaces nothing that runs.
    assert_eq!(
        base,
        "05a763406f1c7868034d24547bc554ada2028a5856c9b4a0df3a53b7c9579d4c"
    );
    assert_eq!(made(LLAMACPP).definition, base);
    let desired = desired(&catalog(LLAMACPP));
    assert_eq!(desired.models["m"].replicas, 3);
    assert_eq!(desired.models["m"].definitions["p"], base);
}

#[test]
fn a_profile_that_can_not_be_started_says_why() {
    let set = PolicySet::built_in();
    let said = |profile: &str| {
        let catalog = catalog(profile);
        problems(&set, &catalog.models[0], &catalog.models[0].profiles[0])
    };
    assert_eq!(said(LLAMACPP), Vec::<String>::new());
    assert!(said("{name: p, engine: vlm}")[0].contains("no engine plugin"));
    assert!(said("{name: p, engine: openai}")[0].contains("no `commands`"));
    let gang = VLLM.replace("tensor_parallel: 2", "nodes: 2, tensor_parallel: 4");
    assert!(said(&gang)[0].contains("come with multi-node"));
    let owned = said("{name: p, engine: llamacpp, args: [--port, '1']}");
    assert!(owned[0].contains("`--port` belongs to llmgw"), "{owned:?}");
}

#[test]
fn a_port_is_the_least_that_nothing_on_this_address_has_and_that_was_not_refused() {
    let with_port = |replica: &str, port: u16| {
        let mut spec = spec(replica);
        spec.ports = vec![port];
        spec
    };
    // Two agents on one machine have one address.
    let nodes = Nodes::new(&["a", "b", "c"])
        .edit("b", |node| node.advertise = "10.0.0.1".to_owned())
        .with_spec("a", with_port("m/0", 21_000), ShardState::Ready)
        .with_spec("b", with_port("m/1", 21_001), ShardState::Ready)
        .with_spec("c", with_port("m/2", 21_002), ShardState::Ready);
    let mut memory = Memory::default();
    let port = |memory: &Memory| free_port("a", &nodes.0.nodes["a"], &nodes.0, memory);
    assert_eq!(port(&memory).expect("there are some"), 21_002);
    let start = Start {
        spec: Arc::new(with_port("m/3", 21_002)),
        sent_ms: 0,
        session: SessionId(0),
    };
    memory.start("a", start);
    assert_eq!(port(&memory).expect("there are some"), 21_003);
    let full = nodes.edit("a", |node| node.ports.last = 21_002);
    let none = free_port("a", &full.0.nodes["a"], &full.0, &memory);
    assert!(matches!(
        none,
        Err(LaunchError::NoPort {
            first: 21_000,
            last: 21_002
        })
    ));
}
