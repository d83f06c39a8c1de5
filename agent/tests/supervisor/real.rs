//! The supervisor over the real llama.cpp with a real model.
//!
//! `tests/real/prepare` makes both ready in `.llmgw/`. Without them this prints `skipped: …` and passes, unless
//! LLMGW_REQUIRE_REAL=1.

use std::io::Write;
use std::path::{Path, PathBuf};

use llmgw_agent::supervisor::Outcome;
use llmgw_proto::shard::{ApiKey, Exit, ShardSpec, ShardState};

use crate::harness::{Node, command, free_port, spec};

const SHARD: &str = "smollm2/0/0";

/// The server and its model.
fn prepared() -> Option<(PathBuf, PathBuf)> {
    let engine = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.llmgw/engine");
    let (server, model) = (engine.join("llama-server"), engine.join("model.gguf"));
    if server.exists() && model.exists() {
        return Some((
            server.canonicalize().unwrap(),
            model.canonicalize().unwrap(),
        ));
    }
    let required = std::env::var("LLMGW_REQUIRE_REAL").as_deref() == Ok("1");
    assert!(
        !required,
        "`{}` is missing; tests/real/prepare makes it",
        server.display()
    );
    // Not `eprintln!`, which the test runner keeps to itself when a test passes.
    let said = "skipped: the supervisor over a real engine: tests/real/prepare was not run";
    let _ = writeln!(std::io::stderr(), "{said}");
    None
}

fn llamacpp(model: &Path) -> ShardSpec {
    let (port, model) = (free_port(), model.to_string_lossy().into_owned());
    let port_text = port.to_string();
    let mut args = vec!["-m", &model, "--host", "127.0.0.1", "--port", &port_text];
    args.extend(["--alias", "smollm2", "--parallel", "2", "-c", "2048"]);
    // One thread: with more, llama.cpp's busy waiting starves the other processes of a small machine.
    args.extend(["-t", "1", "-tb", "1", "--threads-http", "16"]);
    args.extend(["--api-key-file", "${LLMGW_API_KEY_FILE}"]);
    let mut spec = spec(SHARD, vec![command("llama-server", &args)]);
    spec.ports = vec![port];
    spec.readiness.served_name = "smollm2".to_owned();
    spec.api_key = Some(ApiKey::new("sk-real".to_owned()));
    spec
}

#[tokio::test]
async fn llamacpp_is_started_with_a_key_adopted_and_stopped() {
    let Some((server, model)) = prepared() else {
        return;
    };
    let mut node = Node::with(|options| {
        let allowance = options.allow.get_mut("fake").unwrap();
        let name = "llama-server".to_owned();
        allowance.executables.insert(name, server);
    })
    .await;
    node.supervisor.start_shard(llamacpp(&model));
    node.until_state(SHARD, ShardState::Ready).await;
    let pid = node.pid(SHARD);
    let arguments = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(!arguments.contains("sk-real"), "{arguments}");
    node.restart().await;
    let outcome = &node.adopted[0].outcome;
    assert_eq!(outcome, &Outcome::Adopted { pids: vec![pid] });
    node.until_state(SHARD, ShardState::Ready).await;
    node.supervisor.stop_shard(SHARD, false);
    let stopped = node.until_state(SHARD, ShardState::Stopped).await;
    // Another agent was its parent.
    let is_unknown = matches!(stopped.exit, None | Some(Exit::Unknown));
    assert!(is_unknown, "{stopped:?}");
    assert_eq!(node.processes(SHARD), [0_u32; 0]);
}
