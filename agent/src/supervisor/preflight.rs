//! What only the node knows before a start: the executable is one that its operator allows and is there, the GPUs are there,
//! free and healthy, the ports are free. The first thing that is not so is the refusal.

pub mod ports;
mod variables;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use llmgw_proto::shard::ShardSpec;
use nix::unistd::{AccessFlags, access};

use super::gpu::{self, FREE_MAX_MIB, GpuFacts};
use super::launch::{self, EngineAllowance};
use super::machine::Reason;
use super::spec_store::directory_name;
use ports::PortOwner;

/// Processes of one shard.
const COMMANDS_MAX: usize = 16;

/// GPUs and ports that other shards of this node have, started or about to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    /// Whose each is.
    pub gpus: BTreeMap<String, String>,
    pub ports: BTreeMap<u16, String>,
}

/// What the checks look at.
pub struct Node<'a> {
    pub allow: &'a BTreeMap<String, EngineAllowance>,
    pub gpus: &'a dyn GpuFacts,
    pub proc: &'a Path,
    pub claims: &'a Claims,
}

/// Why this node does not start a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    ShardName {
        shard: String,
    },
    Commands {
        count: usize,
    },
    NulByte {
        what: &'static str,
    },
    Engine {
        engine: String,
        allowed: Vec<String>,
    },
    NotAllowed {
        engine: String,
        executable: String,
        allowed: Vec<String>,
    },
    Executable {
        executable: String,
        path: PathBuf,
        cause: String,
    },
    Variable {
        name: String,
    },
    NoKey {
        executable: String,
    },
    GpuMissing {
        uuid: String,
    },
    GpuUnhealthy {
        uuid: String,
        problems: Vec<String>,
    },
    GpuClaimed {
        uuid: String,
        shard: String,
    },
    GpuBusy {
        uuid: String,
        used_mib: u64,
        holders: Vec<u32>,
    },
    PortClaimed {
        port: u16,
        shard: String,
    },
    PortTaken {
        host: String,
        port: u16,
        owner: Option<PortOwner>,
    },
    Address {
        host: String,
        port: u16,
        cause: String,
    },
}

impl Refusal {
    /// Stays the same; what the server decides by.
    pub fn code(&self) -> &'static str {
        match self {
            Refusal::ShardName { .. } => "shard_name",
            Refusal::Commands { .. } => "commands",
            Refusal::NulByte { .. } => "nul_byte",
            Refusal::Engine { .. } => "engine_not_allowed",
            Refusal::NotAllowed { .. } => "executable_not_allowed",
            Refusal::Executable { .. } => "executable_missing",
            Refusal::Variable { .. } => "variable_not_allowed",
            Refusal::NoKey { .. } => "no_api_key",
            Refusal::GpuMissing { .. } => "gpu_missing",
            Refusal::GpuUnhealthy { .. } => "gpu_unhealthy",
            Refusal::GpuClaimed { .. } => "gpu_claimed",
            Refusal::GpuBusy { .. } => "gpu_busy",
            Refusal::PortClaimed { .. } => "port_claimed",
            Refusal::PortTaken { .. } => "port_taken",
            Refusal::Address { .. } => "address",
        }
    }

    pub fn reason(&self) -> Reason {
        Reason::new(self.code(), self.to_string())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::ShardName { shard } => {
                write!(
                    f,
                    "`{shard}` is empty, or too long for the name of a directory"
                )
            }
            Refusal::Commands { count } => {
                write!(f, "{count} commands, where 1 to {COMMANDS_MAX} can be")
            }
            Refusal::NulByte { what } => write!(f, "a zero byte is in {what}"),
            Refusal::Engine { engine, allowed } => write!(
                f,
                "the node's configuration does not list engine `{engine}`, only {}",
                list(allowed)
            ),
            Refusal::NotAllowed {
                engine,
                executable,
                allowed,
            } => write!(
                f,
                "the node's configuration does not let engine `{engine}` start `{executable}`, only {}",
                list(allowed)
            ),
            Refusal::Executable {
                executable,
                path,
                cause,
            } => {
                let path = path.display();
                write!(
                    f,
                    "`{executable}` is `{path}`, which can't be executed: {cause}"
                )
            }
            Refusal::Variable { name } => write!(
                f,
                "variable `{name}` decides what code runs: only the node's configuration may set it, in `engines`"
            ),
            Refusal::NoKey { executable } => {
                write!(f, "`{executable}` wants an API key, and the shard has none")
            }
            Refusal::GpuMissing { uuid } => write!(f, "GPU {uuid} is not here"),
            Refusal::GpuUnhealthy { uuid, problems } => {
                write!(f, "GPU {uuid} is not healthy: {}", problems.join("; "))
            }
            Refusal::GpuClaimed { uuid, shard } => write!(f, "GPU {uuid} is shard `{shard}`'s"),
            Refusal::GpuBusy {
                uuid,
                used_mib,
                holders,
            } => {
                let by = gpu::by(holders);
                write!(f, "GPU {uuid} has {used_mib} MiB in use, by {by}")
            }
            Refusal::PortClaimed { port, shard } => write!(f, "port {port} is shard `{shard}`'s"),
            Refusal::PortTaken { host, port, owner } => {
                let unseen = "by whom could not be seen".to_owned();
                let by = owner.as_ref().map_or(unseen, PortOwner::by);
                write!(f, "port {port} on {host} is taken, {by}")
            }
            Refusal::Address { host, port, cause } => {
                write!(f, "nothing can listen on {host}, port {port}: {cause}")
            }
        }
    }
}

impl std::error::Error for Refusal {}

/// Looks whether this node can start a shard now. Blocks for as long as a name's resolution takes.
pub fn check(spec: &ShardSpec, node: &Node<'_>) -> Result<(), Refusal> {
    check_form(spec)?;
    check_commands(spec, node)?;
    for uuid in &spec.gpus {
        check_gpu(uuid, node)?;
    }
    for port in &spec.ports {
        check_port(&spec.host, *port, node)?;
    }
    Ok(())
}

fn check_form(spec: &ShardSpec) -> Result<(), Refusal> {
    if directory_name(&spec.shard).is_none() {
        return Err(Refusal::ShardName {
            shard: spec.shard.clone(),
        });
    }
    let count = spec.commands.len();
    if count == 0 || count > COMMANDS_MAX {
        return Err(Refusal::Commands { count });
    }
    refuse_nul("the shard's id", [&spec.shard])?;
    refuse_nul("a GPU's uuid", &spec.gpus)?;
    for command in &spec.commands {
        refuse_nul("an argument", &command.args)?;
        refuse_nul(
            "a variable",
            command.env.iter().flat_map(|(name, value)| [name, value]),
        )?;
    }
    Ok(())
}

fn refuse_nul<'a>(
    what: &'static str,
    texts: impl IntoIterator<Item = &'a String>,
) -> Result<(), Refusal> {
    match texts.into_iter().any(|text| text.contains('\0')) {
        true => Err(Refusal::NulByte { what }),
        false => Ok(()),
    }
}

fn check_commands(spec: &ShardSpec, node: &Node<'_>) -> Result<(), Refusal> {
    let Some(allowance) = node.allow.get(&spec.engine) else {
        return Err(Refusal::Engine {
            engine: spec.engine.clone(),
            allowed: node.allow.keys().cloned().collect(),
        });
    };
    for command in &spec.commands {
        let executable = &command.executable;
        let Some(path) = allowance.executables.get(executable) else {
            return Err(Refusal::NotAllowed {
                engine: spec.engine.clone(),
                executable: executable.clone(),
                allowed: allowance.executables.keys().cloned().collect(),
            });
        };
        if let Some(cause) = not_executable(path) {
            return Err(Refusal::Executable {
                executable: executable.clone(),
                path: path.clone(),
                cause,
            });
        }
        let forbidden =
            |name: &&String| name.is_empty() || name.contains('=') || variables::decides_code(name);
        if let Some(name) = command.env.keys().find(forbidden) {
            return Err(Refusal::Variable { name: name.clone() });
        }
        if spec.api_key.is_none() && launch::wants_key(command) {
            return Err(Refusal::NoKey {
                executable: executable.clone(),
            });
        }
    }
    Ok(())
}

impl EngineAllowance {
    /// Its files that could not be started now, each with the cause.
    pub fn missing(&self) -> Vec<(&str, &Path, String)> {
        let files = self.executables.iter();
        let missing = files.filter_map(|(name, path)| {
            let cause = not_executable(path)?;
            Some((name.as_str(), path.as_path(), cause))
        });
        missing.collect()
    }
}

fn not_executable(path: &Path) -> Option<String> {
    if !path.is_absolute() {
        return Some("the path is not absolute".to_owned());
    }
    match path.metadata() {
        Err(error) => return Some(error.to_string()),
        Ok(metadata) if !metadata.is_file() => return Some("it is no file".to_owned()),
        Ok(_) => {}
    }
    let denied = access(path, AccessFlags::X_OK).err()?;
    Some(denied.desc().to_lowercase())
}

fn check_gpu(uuid: &str, node: &Node<'_>) -> Result<(), Refusal> {
    let uuid = uuid.to_owned();
    let Some(fact) = node.gpus.gpu(&uuid) else {
        return Err(Refusal::GpuMissing { uuid });
    };
    if let Some(shard) = node.claims.gpus.get(&uuid) {
        let shard = shard.clone();
        return Err(Refusal::GpuClaimed { uuid, shard });
    }
    if !fact.problems.is_empty() {
        let problems = fact.problems;
        return Err(Refusal::GpuUnhealthy { uuid, problems });
    }
    match fact.used_mib {
        Some(used_mib) if used_mib > FREE_MAX_MIB => Err(Refusal::GpuBusy {
            uuid,
            used_mib,
            holders: fact.holders,
        }),
        _ => Ok(()),
    }
}

fn check_port(host: &str, port: u16, node: &Node<'_>) -> Result<(), Refusal> {
    if let Some(shard) = node.claims.ports.get(&port) {
        let shard = shard.clone();
        return Err(Refusal::PortClaimed { port, shard });
    }
    let Err(error) = ports::check_free(host, port) else {
        return Ok(());
    };
    let host = host.to_owned();
    if error.kind() == std::io::ErrorKind::AddrInUse {
        let owner = ports::owner(node.proc, port);
        return Err(Refusal::PortTaken { host, port, owner });
    }
    let cause = error.to_string();
    Err(Refusal::Address { host, port, cause })
}

fn list(names: &[String]) -> String {
    match names.is_empty() {
        true => "none".to_owned(),
        false => format!("`{}`", names.join("`, `")),
    }
}

#[cfg(test)]
mod tests;
