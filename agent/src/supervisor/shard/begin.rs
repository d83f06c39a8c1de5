//! The beginning of a shard: the node's check, each process, the address that one waits for, the engine's own word.

use std::sync::Arc;
use std::time::Duration;

use llmgw_proto::shard::Exit;
use tokio::net::TcpStream;

use super::{Background, ShardTask};
use crate::supervisor::StartInstant;
use crate::supervisor::cgroup::ShardCgroup;
use crate::supervisor::launch::{self, EngineAllowance};
use crate::supervisor::logs::output::Output;
use crate::supervisor::machine::{Event, Probed, Reason};
use crate::supervisor::preflight::{self, Node};
use crate::supervisor::probe::Probe;
use crate::supervisor::process::{Launch, Process, Turn};
use crate::supervisor::spec_store::{RecordedProcess, directory_name};

/// Between two tries to reach an address that a command waits for.
const ADDRESS_EVERY: Duration = Duration::from_millis(100);
/// How long one try may take.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(1);

impl ShardTask {
    /// Whether the node can run it; if so it goes on record, before anything of it runs.
    pub(super) async fn check(&mut self) -> Event {
        let context = self.context.clone();
        let (spec, claims) = (self.handle.spec.clone(), self.claims.clone());
        let checked = tokio::task::spawn_blocking(move || {
            let node = Node {
                allow: &context.options.allow,
                gpus: context.options.gpus.as_ref(),
                proc: &context.options.proc_root,
                claims: &claims,
            };
            preflight::check(&spec, &node)
        });
        match checked.await {
            Ok(Ok(())) => {}
            Ok(Err(refusal)) => return Event::Refused(refusal.reason()),
            Err(error) => return Event::Refused(Reason::new("not_checked", error.to_string())),
        }
        let name = directory_name(&self.handle.spec.shard).unwrap_or_default();
        let root = self.context.options.cgroup_root.as_deref();
        let name = self.context.groups.name(&name);
        self.cgroup = root.and_then(|root| ShardCgroup::make(root, &name));
        let made = self.cgroup.as_ref();
        self.record.cgroup = made.map(|cgroup| cgroup.directory().to_owned());
        if let Err(error) = self.write().await {
            return Event::Refused(Reason::new("not_recorded", error));
        }
        self.context.options.reached(StartInstant::SpecWritten);
        self.open_output();
        Event::Checked
    }

    /// Waits until no other start is under way.
    pub(super) fn await_turn(&mut self, command: usize) {
        let turn = async move { (command, Turn::next().await) };
        self.turn = Some(Box::pin(turn));
    }

    pub(super) async fn start(&mut self, command: usize, turn: Turn) -> Event {
        let not_started = |error: String| Event::NotStarted { command, error };
        let launch = match self.write_key(command).await {
            Ok(key_file) => self.launch(command, &key_file),
            Err(error) => Err(error),
        };
        let launch = match launch {
            Ok(launch) => launch,
            Err(error) => return not_started(error),
        };
        let context = self.context.clone();
        let cgroup = self.cgroup.clone();
        let mut record = self.record.clone();
        let started = tokio::task::spawn_blocking(move || {
            let options = &context.options;
            let started = Process::start(turn, launch, &options.proc_root, |id| {
                options.reached(StartInstant::Forked);
                if let Some(Err(error)) = cgroup.as_ref().map(|cgroup| cgroup.join(id.pid)) {
                    // Its session still tells what is its.
                    tracing::warn!(pid = id.pid, %error, "a process can't be put into its control group");
                }
                record
                    .processes
                    .retain(|process| process.command != command);
                record.processes.push(RecordedProcess::new(command, id));
                context.store.save(&record).map_err(std::io::Error::other)?;
                options.reached(StartInstant::PidWritten);
                Ok(())
            });
            (record, started)
        });
        let (record, started) = match started.await {
            Ok(outcome) => outcome,
            Err(error) => return not_started(error.to_string()),
        };
        self.record = record;
        match started {
            Ok(process) => {
                self.context.options.reached(StartInstant::Executed);
                self.confirm(command).await;
                self.context.options.reached(StartInstant::Confirmed);
                self.watch(command, process);
                Event::Started { command }
            }
            Err(error) => {
                self.record
                    .processes
                    .retain(|process| process.command != command);
                self.save("that nothing was started").await;
                not_started(error.to_string())
            }
        }
    }

    /// The path of a file with the engine's key; empty where the command wants none.
    async fn write_key(&self, command: usize) -> Result<String, String> {
        let spec = self.handle.spec.clone();
        let wants = spec
            .commands
            .get(command)
            .is_some_and(launch::wants_key_file);
        let Some(key) = spec.api_key.clone().filter(|_| wants) else {
            return Ok(String::new());
        };
        let context = self.context.clone();
        let written =
            tokio::task::spawn_blocking(move || context.store.save_key(&spec.shard, &key));
        match written.await {
            Ok(Ok(path)) => Ok(path.to_string_lossy().into_owned()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn launch(&self, command: usize, key_file: &str) -> Result<Launch, String> {
        let spec = &self.handle.spec;
        let command = spec
            .commands
            .get(command)
            .ok_or("there is no such command")?;
        let none = EngineAllowance::default();
        let allowance = self
            .context
            .options
            .allow
            .get(&spec.engine)
            .unwrap_or(&none);
        let executable = allowance.executables.get(&command.executable);
        let executable = executable.ok_or("the executable is not allowed any more")?;
        let output = Output::writer(&self.context.store.output_path(&spec.shard));
        let state_dir = &self.context.state_dir;
        let agents = |name: &str| std::env::var(name).ok();
        Ok(Launch {
            executable: executable.clone(),
            args: launch::arguments(spec, command, key_file),
            env: launch::environment(spec, command, allowance, state_dir, key_file, &agents),
            output: output.map_err(|error| format!("its output can't be kept: {error}"))?,
        })
    }

    /// Puts on record that a process executes.
    async fn confirm(&mut self, command: usize) {
        self.change(command, |process| process.confirmed = true);
        self.save("that a process runs").await;
        self.share_traces();
    }

    pub(super) fn change(&mut self, command: usize, change: impl FnOnce(&mut RecordedProcess)) {
        let mut processes = self.record.processes.iter_mut();
        if let Some(process) = processes.find(|process| process.command == command) {
            change(process);
        }
    }

    pub(super) fn watch(&mut self, command: usize, process: Process) {
        let sender = self.sender.clone();
        let shard = self.handle.spec.shard.clone();
        let process = Arc::new(process);
        self.held.push(process.clone());
        let exits = async move {
            let exit = process.ended().await.unwrap_or_else(|error| {
                tracing::error!(shard, %error, "how a process ended can't be read");
                Exit::Unknown
            });
            let _ = sender.send(Event::Exited { command, exit }).await;
        };
        self.exits.push(Background(tokio::spawn(exits)));
    }

    pub(super) fn await_address(&mut self, command: usize) {
        let Some(wait) = self
            .plan
            .commands
            .get(command)
            .and_then(|planned| planned.wait_for.clone())
        else {
            return;
        };
        let sender = self.sender.clone();
        let tries = async move {
            loop {
                let connect = TcpStream::connect(&wait.address);
                if let Ok(Ok(_)) = tokio::time::timeout(ADDRESS_TIMEOUT, connect).await {
                    let _ = sender.send(Event::Listens { command }).await;
                    return;
                }
                tokio::time::sleep(ADDRESS_EVERY).await;
            }
        };
        self.asking = Some(Background(tokio::spawn(tries)));
    }

    pub(super) fn probe(&mut self, every: Duration) {
        let timeout = self.context.options.pace.probe_timeout;
        let Some(probe) = Probe::of(&self.handle.spec, timeout) else {
            let text = "it serves HTTP, and its spec has no port".to_owned();
            let _ = self.sender.try_send(Event::Probed(Probed::NotReady(text)));
            return;
        };
        let sender = self.sender.clone();
        let asks = async move {
            loop {
                let probed = probe.ask().await;
                if sender.send(Event::Probed(probed)).await.is_err() {
                    return;
                }
                tokio::time::sleep(every).await;
            }
        };
        self.asking = Some(Background(tokio::spawn(asks)));
    }
}
