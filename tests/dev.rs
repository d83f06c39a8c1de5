//! `llmgw dev` as a process: one command serves a model, and its end leaves nothing behind.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[path = "harness/said.rs"]
mod said;

use said::Process;

/// A fake engine that takes the command line which the llama.cpp plugin renders, and notes which file it is to load.
const LLAMA_SERVER: &str = r#"#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in
    --model) echo "$2" > "$0.model" ;;
    --alias) alias=$2 ;;
    --host) host=$2 ;;
    --port) port=$2 ;;
  esac
  shift
done
exec FAKE_ENGINE --kind llamacpp --model "$alias" --listen "$host:$port" --api-key "$LLAMA_API_KEY"
"#;

const CONFIG: &str = "\
listen: 127.0.0.1:0
admin: 127.0.0.1:0
models:
  - name: small
    profiles:
      - {name: cpu, engine: llamacpp, cpus: 1}
";

/// `llmgw dev` in a directory of its own, with a PATH of its own.
struct Dev {
    directory: PathBuf,
    process: Process,
}

impl Dev {
    fn in_directory(name: &str) -> PathBuf {
        let name = format!("llmgw-dev-{}-{name}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir_all(directory.join("bin")).unwrap();
        fs::write(directory.join("llmgw.yaml"), CONFIG).unwrap();
        directory
    }

    fn write_engine(file: &Path) {
        let fake = Path::new(env!("CARGO_BIN_EXE_llmgw")).with_file_name("fake-engine");
        let script = LLAMA_SERVER.replace("FAKE_ENGINE", fake.to_str().unwrap());
        fs::write(file, script).unwrap();
        fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn start(directory: PathBuf) -> Dev {
        let path = format!("{}:/usr/bin:/bin", directory.join("bin").display());
        let process = Process::start(
            Command::new(env!("CARGO_BIN_EXE_llmgw"))
                .arg("dev")
                .current_dir(&directory)
                .env("PATH", path),
        );
        Dev { directory, process }
    }

    /// The file that an engine was told to load.
    fn model_of(&self, engine: &str) -> PathBuf {
        let noted = self.directory.join(format!("{engine}.model"));
        PathBuf::from(fs::read_to_string(noted).unwrap().trim_end())
    }

    /// The engines of this directory: what was started with its state in the environment.
    fn engines(&self) -> Vec<u32> {
        let state = format!("LLMGW_STATE={}", self.directory.display());
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let mut variables = environment.split(|byte| *byte == 0);
            variables.any(|variable| variable.starts_with(state.as_bytes()))
        })
        .collect()
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        self.process.kill();
        for pid in self.engines() {
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// The gateway's address in the line that says that it serves.
fn clients(line: &str) -> String {
    let (_, rest) = line.split_once("clients on http://").unwrap();
    rest.split(',').next().unwrap().to_owned()
}

fn chat(address: &str) -> String {
    let body = r#"{"model": "small", "messages": [{"role": "user", "content": "Hello!"}]}"#;
    let mut stream = TcpStream::connect(address).unwrap();
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    let length = body.len();
    write!(stream, "{head}content-length: {length}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn one_command_serves_a_model_and_leaves_no_process_behind() {
    let directory = Dev::in_directory("serves");
    Dev::write_engine(&directory.join("bin/llama-server"));
    let mut dev = Dev::start(directory);
    let clients = clients(&dev.process.says(&["serving clients on"]));
    dev.process
        .says(&["engine `llamacpp` may be started", "bin/llama-server"]);
    dev.process.says(&["node `local` is ready"]);
    dev.process.says(&["ready, serves `small`"]);
    let answer = chat(&clients);
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(answer.contains("chat.completion"), "{answer}");
    assert_eq!(dev.engines().len(), 1);
    // A path in the configuration starts at the directory that holds it.
    let model = dev.directory.join("small");
    assert_eq!(dev.model_of("bin/llama-server"), model);

    dev.process.signal(Signal::SIGINT);
    assert_eq!(dev.process.ends().code(), Some(0));
    assert_eq!(dev.engines(), [0; 0]);
}

#[test]
fn engines_of_a_run_that_was_killed_are_taken_over_and_end_with_the_next_one() {
    let directory = Dev::in_directory("again");
    // agent.yaml beside the configuration is what counts, where there is one.
    Dev::write_engine(&directory.join("engine.sh"));
    // Ports of its own, since tests run side by side.
    let agent = "node: mine\nports: 22000-22099\nmodels_dir: models\nengines: {llamacpp: {commands: {llama-server: engine.sh}}}\n";
    fs::write(directory.join("agent.yaml"), agent).unwrap();
    let mut dev = Dev::start(directory.clone());
    dev.process.says(&["node `mine` is ready"]);
    dev.process.says(&["ready, serves `small`"]);
    let engines = dev.engines();
    assert_eq!(engines.len(), 1);
    let model = directory.join("models/small");
    assert_eq!(dev.model_of("engine.sh"), model);
    dev.process.signal(Signal::SIGKILL);
    dev.process.ends();
    assert_eq!(dev.engines(), engines, "nobody stopped it");

    let mut next = Dev::start(directory);
    next.process.says(&["shard `small/0/0` is adopted"]);
    next.process.says(&["ready, serves `small`"]);
    assert_eq!(next.engines(), engines);
    // As when the terminal is closed.
    next.process.signal(Signal::SIGHUP);
    assert_eq!(next.process.ends().code(), Some(0));
    assert_eq!(next.engines(), [0; 0]);
}

#[test]
fn what_keeps_it_from_starting_is_said_and_ends_it() {
    let directory = Dev::in_directory("broken");
    fs::write(directory.join("agent.yaml"), "ports: many\n").unwrap();
    let mut dev = Dev::start(directory.clone());
    dev.process
        .says(&["error: agent.yaml", "`many` is not a range of ports"]);
    assert_eq!(dev.process.ends().code(), Some(2));
    fs::remove_file(directory.join("agent.yaml")).unwrap();

    let mut dev = Dev::start(directory.clone());
    dev.process.says(&["no engine is on PATH", "llama-server"]);
    dev.process.says(&["node `local` is ready"]);
    let mut second = Dev::start(directory.clone());
    second.process.says(&["error: ", ".llmgw/agent"]);
    assert_eq!(second.process.ends().code(), Some(1));
    dev.process.signal(Signal::SIGTERM);
    assert_eq!(dev.process.ends().code(), Some(0));

    fs::write(directory.join("llmgw.yaml"), "models: none\n").unwrap();
    let mut dev = Dev::start(directory);
    dev.process.says(&["error: ", "models"]);
    assert_eq!(dev.process.ends().code(), Some(2));
}
