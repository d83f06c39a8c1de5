//! Engine hooks of the control plane: is a profile sensible, and which commands start a shard.

use std::collections::BTreeMap;

use mlua::{Table, Value};
use serde::Serialize;

use crate::engine::EnginePlugin;
use crate::error::{ErrorKind, Fault, did_you_mean};
use crate::hooks::Hook;
use crate::hooks::views::{FieldDoc, IntoField, LuaType, View, view};
use crate::set::PolicySet;
use crate::test::inputs::{Given, Overlay};
use crate::vm::Vm;
use crate::vm::budget::{ENGINE_MAX, Limit};
use crate::vm::sandbox::{cut, fault};

view! {
    /// One way to run a model, as configured.
    "profile" ProfileView<'a> {
        /// Its name.
        name: &'a str,
        /// The engine.
        engine: &'a str,
        /// GPU classes that it may run on; empty means CPU.
        gpu: &'a [String],
        /// GPUs on each node.
        gpus_per_node: Option<u32>,
        /// Nodes.
        nodes: u32,
        /// GPUs that share each layer.
        tensor_parallel: u32,
        /// Stages that layers are split into.
        pipeline_parallel: u32,
        /// As configured, e.g. `fp8`.
        quantization: Option<&'a str>,
        /// Requests that it works on at the same time.
        slots: Option<u32>,
        /// Cores.
        cpus: Option<u32>,
        /// Memory in GiB.
        memory_gib: Option<f64>,
        /// `native` or `ray`.
        launch_mode: Option<&'a str>,
        /// Arguments for the engine.
        args: &'a [String],
        /// Environment for the engine.
        env: &'a [(String, String)],
    }
}

view! {
    /// A model of the catalog.
    "model" ModelView<'a> {
        /// The name that clients use.
        name: &'a str,
        /// What the engine loads.
        source: Option<&'a str>,
        /// Replicas wanted.
        replicas: u32,
    }
}

view! {
    /// The part of a replica on one node.
    "shard" ShardView<'a> {
        /// The model.
        model: &'a str,
        /// What the engine loads: a name, or a path. A relative one has no `..` in it.
        source: &'a str,
        /// The name that the engine must list.
        served_name: &'a str,
        /// The profile.
        profile: &'a str,
        /// The engine.
        engine: &'a str,
        /// 0 is the leader.
        rank: u32,
        /// Nodes of the replica.
        nodes: u32,
        /// Address of the leader's node.
        leader_address: &'a str,
        /// Where it serves HTTP.
        port: u16,
        /// Where ranks meet.
        rendezvous_port: Option<u16>,
        /// More ports that are reserved for it.
        extra_ports: &'a [u16],
        /// GPUs that share each layer.
        tensor_parallel: u32,
        /// Stages that layers are split into.
        pipeline_parallel: u32,
        /// As configured, e.g. `fp8`.
        quantization: Option<&'a str>,
        /// Requests that it works on at the same time.
        slots: Option<u32>,
        /// GPUs on this node.
        gpus: u32,
        /// Cores on this node.
        cpus: Option<u32>,
        /// Memory on this node, in GiB.
        memory_gib: Option<f64>,
        /// Arguments from the profile.
        args: &'a [String],
        /// Environment from the profile.
        env: &'a [(String, String)],
        /// Names of the chosen fabric's adapters on this node.
        adapters: &'a [String],
        /// Network interface for TCP between ranks.
        socket_interface: Option<&'a str>,
        /// Address where the gateway reaches this node.
        advertise: Option<&'a str>,
        /// Where this node has a source that is a relative path; absolute.
        models_dir: Option<&'a str>,
        /// `native` or `ray`.
        launch_mode: Option<&'a str>,
    }
}

/// One process of a shard. It is started as it stands, never through a shell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EngineCommand {
    /// Name of an executable; the node's allow-list says which file that is.
    pub command: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its environment, added to the node's own.
    pub env: BTreeMap<String, String>,
    /// `host:port` that must listen before this one starts.
    pub wait_for: Option<String>,
    /// It is kept alive beside the last command, which is the shard.
    pub sidecar: bool,
}

/// Calls of a hook that is late each time.
const ATTEMPTS_MAX: u32 = 3;
/// Processes of one shard.
const COMMANDS_MAX: usize = 16;
/// Arguments, or variables, of one process.
const ARGS_MAX: usize = 1024;
/// Complaints about one profile.
const COMPLAINTS_MAX: usize = 64;
/// Length of one argument or variable.
const ARG_MAX_BYTES: usize = 32 * 1024;

impl PolicySet {
    /// What the engine has against a profile; empty: nothing. A plugin that fails refuses it.
    pub fn validate(
        &self,
        engine: &str,
        profile: &ProfileView<'_>,
        model: &ModelView<'_>,
    ) -> Vec<String> {
        let Some(plugin) = self.engines.get(engine) else {
            let hint = did_you_mean(engine, self.engines.keys().map(String::as_str));
            return vec![format!("there is no engine plugin '{engine}'{hint}")];
        };
        if !plugin.validates {
            return Vec::new();
        }
        self.run_again(|vm| validate(vm, engine, profile, model))
            .unwrap_or_else(|fault| {
                self.note(Hook::EngineValidate, &fault);
                vec![format!("the engine plugin failed: {fault}")]
            })
    }

    /// The processes of a shard; the last one is the shard itself. A plugin that fails fails the replica, with the reason.
    pub fn commands(
        &self,
        engine: &str,
        shard: &ShardView<'_>,
    ) -> Result<Vec<EngineCommand>, Fault> {
        let Some(plugin) = self.engines.get(engine).filter(|plugin| plugin.starts) else {
            return Err(Fault::new(
                ErrorKind::Unknown,
                format!("engine '{engine}' has no plugin with `commands`"),
            ));
        };
        self.run_again(|vm| commands(vm, plugin, shard))
            .inspect_err(|fault| self.note(Hook::EngineCommands, fault))
    }

    /// These hooks are rare and decide much, and nobody waits for them: one that was late is asked again. Its file is loaded within its
    /// first call on a thread, and a busy machine may be to blame.
    fn run_again<R>(&self, work: impl Fn(&mut Vm) -> Result<R, Fault>) -> Result<R, Fault> {
        let mut answer = self.run(&work);
        for _ in 1..ATTEMPTS_MAX {
            match &answer {
                Err(fault) if fault.kind == ErrorKind::Budget => answer = self.run(&work),
                _ => break,
            }
        }
        answer
    }

    /// Whether this shard serves HTTP. By default rank 0 does.
    pub fn serves_http(&self, engine: &str, shard: &ShardView<'_>) -> bool {
        let native = shard.rank == 0;
        if !self
            .engines
            .get(engine)
            .is_some_and(|plugin| plugin.decides_http)
            || !self.defines(Hook::EngineServesHttp)
        {
            return native;
        }
        let answer = self.run(|vm| serves_http(vm, engine, shard));
        answer.unwrap_or_else(|fault| {
            self.note(Hook::EngineServesHttp, &fault);
            native
        })
    }
}

pub(crate) fn serves_http(vm: &mut Vm, engine: &str, shard: &ShardView<'_>) -> Result<bool, Fault> {
    let value = vm.call_engine(
        engine,
        Hook::EngineServesHttp,
        Limit::Clock(ENGINE_MAX),
        |inputs, into| inputs.shard.table(into, shard),
    )?;
    match value {
        Value::Boolean(serves) => Ok(serves),
        other => Err(wrong("what serves_http returned", &other, "true or false")),
    }
}

pub(crate) fn validate(
    vm: &mut Vm,
    engine: &str,
    profile: &ProfileView<'_>,
    model: &ModelView<'_>,
) -> Result<Vec<String>, Fault> {
    let value = vm.call_engine(
        engine,
        Hook::EngineValidate,
        Limit::Clock(ENGINE_MAX),
        |inputs, into| {
            Ok((
                inputs.profile.table(into, profile)?,
                inputs.model.table(into, model)?,
            ))
        },
    )?;
    match &value {
        Value::Nil => Ok(Vec::new()),
        Value::Table(list) => texts(list, "what validate returned", COMPLAINTS_MAX),
        other => Err(wrong("what validate returned", other, "a list of texts")),
    }
}

pub(crate) fn commands(
    vm: &mut Vm,
    plugin: &EnginePlugin,
    shard: &ShardView<'_>,
) -> Result<Vec<EngineCommand>, Fault> {
    let value = vm.call_engine(
        &plugin.name,
        Hook::EngineCommands,
        Limit::Clock(ENGINE_MAX),
        |inputs, into| inputs.shard.table(into, shard),
    )?;
    let Value::Table(list) = &value else {
        return Err(wrong("what commands returned", &value, "a list"));
    };
    let count = list.raw_len();
    if count == 0 || count > COMMANDS_MAX {
        return Err(Fault::new(
            ErrorKind::Range,
            format!("commands returned {count} commands, 1 to {COMMANDS_MAX} are possible"),
        ));
    }
    let mut commands = Vec::with_capacity(count);
    for at in 1..=count {
        let value: Value = list.raw_get(at).map_err(|e| fault(&e))?;
        let Value::Table(table) = &value else {
            return Err(wrong("a command", &value, "a table"));
        };
        commands.push(command(plugin, table)?);
    }
    if commands.last().is_some_and(|last| last.sidecar) {
        return Err(Fault::new(
            ErrorKind::Error,
            "the last command is the shard, it can't be a sidecar",
        ));
    }
    Ok(commands)
}

fn command(plugin: &EnginePlugin, table: &Table) -> Result<EngineCommand, Fault> {
    let known = ["command", "args", "env", "wait_for", "sidecar"];
    crate::hooks::returns::only(table, "key of a command", &known)?;
    let get = |key: &str| table.raw_get::<Value>(key).map_err(|e| fault(&e));
    let command = match get("command")? {
        Value::String(name) => cut(&name.to_string_lossy(), 64),
        other => return Err(wrong("`command`", &other, "a name")),
    };
    if command.is_empty() || command.contains('/') {
        return Err(Fault::new(
            ErrorKind::Range,
            format!("command '{command}' must be a name, the node knows the path"),
        ));
    }
    if !plugin.commands.is_empty() && !plugin.commands.contains(&command) {
        let hint = did_you_mean(&command, plugin.commands.iter().map(String::as_str));
        return Err(Fault::new(
            ErrorKind::Unknown,
            format!("command '{command}' is none of the plugin's `executables`{hint}"),
        ));
    }
    Ok(EngineCommand {
        command,
        args: match get("args")? {
            Value::Nil => Vec::new(),
            Value::Table(list) => texts(&list, "`args`", ARGS_MAX)?,
            other => return Err(wrong("`args`", &other, "a list")),
        },
        env: match get("env")? {
            Value::Nil => BTreeMap::new(),
            Value::Table(table) => environment(&table)?,
            other => return Err(wrong("`env`", &other, "a table")),
        },
        wait_for: match get("wait_for")? {
            Value::Nil => None,
            Value::String(address) => Some(address.to_string_lossy()),
            other => return Err(wrong("`wait_for`", &other, "host:port")),
        },
        sidecar: match get("sidecar")? {
            Value::Nil => false,
            Value::Boolean(sidecar) => sidecar,
            other => return Err(wrong("`sidecar`", &other, "true or false")),
        },
    })
}

fn environment(table: &Table) -> Result<BTreeMap<String, String>, Fault> {
    let mut variables = BTreeMap::new();
    for pair in table.pairs::<Value, Value>() {
        let (name, value) = pair.map_err(|e| fault(&e))?;
        let Value::String(name) = &name else {
            return Err(wrong("a variable's name", &name, "a text"));
        };
        if variables.len() == ARGS_MAX {
            return Err(Fault::new(
                ErrorKind::Range,
                format!("more than {ARGS_MAX} variables"),
            ));
        }
        variables.insert(
            text(&Value::String(name.clone()), "a variable's name")?,
            text(&value, "a variable")?,
        );
    }
    Ok(variables)
}

fn texts(list: &Table, what: &str, max: usize) -> Result<Vec<String>, Fault> {
    let count = list.raw_len();
    if count > max {
        return Err(Fault::new(
            ErrorKind::Range,
            format!("{what} has {count} entries, at most {max} are possible"),
        ));
    }
    (1..=count)
        .map(|at| text(&list.raw_get(at).map_err(|e| fault(&e))?, what))
        .collect()
}

/// A text that a process can be given. A number would be a guess at its format.
fn text(value: &Value, what: &str) -> Result<String, Fault> {
    let Value::String(text) = value else {
        return Err(wrong(what, value, "a text"));
    };
    let text = text
        .to_str()
        .map_err(|_| Fault::new(ErrorKind::Error, format!("{what} is not UTF-8")))?;
    if text.len() > ARG_MAX_BYTES || text.contains('\0') {
        return Err(Fault::new(
            ErrorKind::Range,
            format!("{what} is longer than {ARG_MAX_BYTES} bytes, or has a zero byte"),
        ));
    }
    Ok(text.to_owned())
}

fn wrong(what: &str, value: &Value, wanted: &str) -> Fault {
    let kind = if value.is_nil() {
        ErrorKind::Nil
    } else {
        ErrorKind::Error
    };
    Fault::new(
        kind,
        format!(
            "{what} is a {}, {wanted} is needed",
            crate::vm::sandbox::type_name(value)
        ),
    )
}
