//! The agent of `llmgw dev`: in the server's process, its engines gone when it ends.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tokio_util::sync::CancellationToken;

use super::{DaemonError, Setup, Stop, run};
use crate::config::{self, AgentConfig, EngineEntry};

/// What an agent needs to know of the server that it shares a process with.
#[derive(Debug)]
pub struct LocalAgent {
    pub server: SocketAddr,
    /// `agent.yaml`, where there is one; what it says of server and state is not for this agent.
    pub config: Option<PathBuf>,
    pub state: PathBuf,
    /// Where a source that is a relative path lies, where the file does not say.
    pub models_dir: PathBuf,
    /// What may be started where the file lists no engines: these, as far as `PATH` has them.
    pub executables: BTreeMap<String, Vec<String>>,
}

const NODE_DEFAULT: &str = "local";

/// Runs until `stop`, and then stops the engines, those of an earlier run that was killed included.
///
/// # Errors
/// Why it did not start.
pub async fn run_local(local: LocalAgent, stop: CancellationToken) -> Result<(), DaemonError> {
    let mut config = match &local.config {
        Some(path) => config::load(path).map_err(DaemonError::Config)?,
        None => AgentConfig::default(),
    };
    if config.engines.is_empty() {
        let path = std::env::var_os("PATH").unwrap_or_default();
        config.engines = allowed(&local.executables, &path);
        say_allowed(&config.engines, &local.executables);
    }
    config.models_dir.get_or_insert(local.models_dir);
    let server = format!("http://{}", local.server);
    let node = config.node.get_or_insert_with(|| NODE_DEFAULT.to_owned());
    let setup = Setup {
        node: node.clone(),
        server: server
            .parse()
            .map_err(|error| DaemonError::Usage(format!("{server}: {error}")))?,
        state: local.state,
        stop_engines: true,
        enrolling: None,
        config: AgentConfig {
            server: Some(server),
            tls: None,
            ..config
        },
    };
    run(setup, Stop::Once(Some(stop))).await
}

/// Engines of which `PATH` has a file, each with those files.
fn allowed(
    executables: &BTreeMap<String, Vec<String>>,
    path: &OsStr,
) -> BTreeMap<String, EngineEntry> {
    let entry = |(engine, names): (&String, &Vec<String>)| {
        let found = |name: &String| Some((name.clone(), find(name, path)?));
        let commands: BTreeMap<String, PathBuf> = names.iter().filter_map(found).collect();
        let entry = EngineEntry {
            commands,
            env: BTreeMap::new(),
        };
        (!entry.commands.is_empty()).then(|| (engine.clone(), entry))
    };
    executables.iter().filter_map(entry).collect()
}

/// The first executable file of this name. Relative directories don't count: what they mean changes.
fn find(name: &str, path: &OsStr) -> Option<PathBuf> {
    let is_executable = |file: &PathBuf| {
        let meta = std::fs::metadata(file);
        meta.is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(path)
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join(Path::new(name)))
        .find(is_executable)
}

fn say_allowed(allowed: &BTreeMap<String, EngineEntry>, wanted: &BTreeMap<String, Vec<String>>) {
    if allowed.is_empty() {
        let names: Vec<&str> = wanted.values().flatten().map(String::as_str).collect();
        tracing::warn!(
            "no engine is on PATH (looked for {}), so none can be started; name them in `engines` of agent.yaml",
            names.join(", ")
        );
    }
    for (engine, entry) in allowed {
        for file in entry.commands.values() {
            tracing::info!("engine `{engine}` may be started: {}", file.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_the_first_executable_of_its_name_on_the_path() {
        let root = std::env::temp_dir().join(format!("llmgw-local-{}", std::process::id()));
        let file = |directory: &str, name: &str, mode: u32| {
            let directory = root.join(directory);
            std::fs::create_dir_all(&directory).unwrap();
            let file = directory.join(name);
            std::fs::write(&file, "").unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
        };
        file("a", "llama-server", 0o644);
        file("b", "llama-server", 0o755);
        file("c", "llama-server", 0o755);
        std::fs::create_dir_all(root.join("a/vllm")).unwrap();
        let path = ["a", "b", "c"].map(|name| root.join(name));
        let path = std::env::join_paths(path).unwrap();
        let executables = BTreeMap::from([
            ("llamacpp".to_owned(), vec!["llama-server".to_owned()]),
            ("vllm".to_owned(), vec!["vllm".to_owned(), "ray".to_owned()]),
            ("openai".to_owned(), Vec::new()),
        ]);
        let found = allowed(&executables, &path);
        let engines: Vec<&String> = found.keys().collect();
        assert_eq!(engines, ["llamacpp"]);
        let file = &found["llamacpp"].commands["llama-server"];
        assert_eq!(*file, root.join("b/llama-server"));
        assert_eq!(find("llama-server", OsStr::new("b:.")), None);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
