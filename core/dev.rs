//! `llmgw dev`: server and agent in one process, over a loopback stream.

use std::path::{Path, PathBuf};

use llmgw_agent::daemon::{LocalAgent, run_local};
use llmgw_core::serve::{self, Opened, ServerOptions};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Beside the configuration.
const AGENT_FILE: &str = "agent.yaml";

/// Runs both to their end: requests finish, then the server ends, then the agent with its engines. An error is what is said, and the exit status.
pub async fn run(config: PathBuf, policies: Option<PathBuf>) -> Result<(), (String, u8)> {
    let directory = config.parent().unwrap_or(Path::new("")).to_owned();
    let options = ServerOptions {
        config,
        policies,
        listen: None,
        admin: None,
        agents: None,
        check: false,
        dev: true,
    };
    let (opened, is_open) = oneshot::channel();
    let server = serve::run(options, |it| {
        // Nobody waits only when the process is about to end.
        let _ = opened.send(it);
    });
    let stop = CancellationToken::new();
    let agent = agent(is_open, directory, stop.clone());
    tokio::pin!(server, agent);
    let served = tokio::select! {
        // In this order: where the server could not start there is no agent, and its reason is the one to say.
        biased;
        served = &mut server => served,
        ended = &mut agent => return ended,
    };
    stop.cancel();
    let ended = agent.await;
    served.map_err(|error| (error.to_string(), error.exit_status()))?;
    ended
}

async fn agent(
    is_open: oneshot::Receiver<Opened>,
    directory: PathBuf,
    stop: CancellationToken,
) -> Result<(), (String, u8)> {
    let Ok(opened) = is_open.await else {
        return Ok(());
    };
    let Some(server) = opened.agents else {
        return Err(("the server opened no address for its agent".to_owned(), 1));
    };
    let beside = directory.join(AGENT_FILE);
    let local = LocalAgent {
        server,
        config: beside.exists().then_some(beside),
        state: opened.state.join("agent"),
        // As for every path in the configuration. The directory of a bare file name is empty, which is no path by itself.
        models_dir: directory.join("."),
        executables: opened.executables,
    };
    let ran = run_local(local, stop).await;
    ran.map_err(|error| (error.to_string(), error.exit_status()))
}
