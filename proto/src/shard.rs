//! A shard: the part of a replica that runs on one node, as the server describes it and the agent keeps it.
//!
//! The spec is what the server sends, what the agent writes to disk and adopts by, and what it registers again at every
//! connect: a server that restarted knows from it everything it knew before.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::hex::hex;

/// The variable in an engine's environment that names its shard; adoption looks for it.
pub const SHARD_VARIABLE: &str = "LLMGW_SHARD";
/// What stands in `args` and `env` for the replica's API key. The agent puts the key there when it starts the process, so that
/// neither log nor explanation ever holds it.
pub const API_KEY_PLACE: &str = "${LLMGW_API_KEY}";
/// The same for engines that take a file with the key: the agent writes one that only its user can read, and puts its path here.
pub const API_KEY_FILE_PLACE: &str = "${LLMGW_API_KEY_FILE}";

/// The code in a failed shard's reason when processes are left that no signal ends: they keep its GPUs and ports.
pub const NOT_GONE: &str = "not_gone";
/// The last words of that reason once they ended after all.
pub const GONE_NOW: &str = "they are gone now";

/// Everything that starting and judging one shard needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardSpec {
    /// `<replica>/<rank>`, unique in the fleet: `llama-3.3-70b/0/0`.
    pub shard: String,
    /// `<model>/<number>`.
    pub replica: String,
    pub model: String,
    pub profile: String,
    /// SHA-256, in hex, of what it was made from: the model's source and the profile as configured. A replica with another one is
    /// outdated. What may change under a running engine (policies, ports, keys) is not in it.
    pub definition: String,
    /// 0 is the leader.
    pub rank: u32,
    /// The name of its plugin, and of its entry in the node's allow-list.
    pub engine: String,
    /// In the order of their start. The last one is the shard; those before it are sidecars, unless they are to end first.
    pub commands: Vec<ShardCommand>,
    /// By uuid; none: it runs on CPUs.
    pub gpus: Vec<String>,
    /// What it claims of the machine.
    pub cpus: Option<u32>,
    pub memory_bytes: Option<u64>,
    /// Reserved for it on its node; the first one serves HTTP.
    pub ports: Vec<u16>,
    /// The address that the engine listens on and the gateway dials, without the port.
    pub host: String,
    pub serves_http: bool,
    pub readiness: Readiness,
    /// Requests that the engine works on at once.
    pub slots: Option<u32>,
    /// Between SIGTERM and SIGKILL.
    pub stop_grace_ms: u64,
    /// The engine's own key, which the gateway presents.
    pub api_key: Option<ApiKey>,
}

/// One process of a shard. Started as it stands, never through a shell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardCommand {
    /// A name in the node's allow-list, which says what file that is.
    pub executable: String,
    pub args: Vec<String>,
    /// Added to the node's own for this engine.
    pub env: BTreeMap<String, String>,
    /// `host:port` that must listen before this one starts.
    pub wait_for: Option<WaitFor>,
    /// It is kept alive beside the last command, and stopped with it.
    pub sidecar: bool,
}

/// An address that must listen, and for how long it is waited for: later the shard has failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WaitFor {
    /// `host:port`.
    pub address: String,
    pub timeout_ms: u64,
}

/// When a shard that serves HTTP is ready: the engine says so itself and lists the served name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Readiness {
    /// `/health`.
    pub health: String,
    /// `/v1/models`.
    pub models: String,
    /// The name that it must list.
    pub served_name: String,
    /// Not ready after this long, it has failed.
    pub start_deadline_ms: u64,
}

/// A key that is never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ApiKey(String);

impl ApiKey {
    pub fn new(key: String) -> ApiKey {
        ApiKey(key)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("******")
    }
}

impl ShardSpec {
    /// What tells two specs apart: SHA-256 of the whole, in hex.
    pub fn hash(&self) -> String {
        // Maps are ordered and there are no floats, so the text is the same for the same spec.
        let text = serde_json::to_vec(self).unwrap_or_default();
        hex(&Sha256::digest(text))
    }

    /// Where it serves HTTP, if it does: `host:port`.
    pub fn address(&self) -> Option<String> {
        let port = self.ports.first().filter(|_| self.serves_http)?;
        Some(match self.host.contains(':') {
            true => format!("[{}]:{port}", self.host),
            false => format!("{}:{port}", self.host),
        })
    }
}

/// Where a shard is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardState {
    /// Accepted, nothing started.
    Pending,
    /// Its processes are being started.
    Starting,
    /// They are up; the engine is not ready.
    Loading,
    /// The engine says that it is ready and lists the served name; or it serves no HTTP and its commands run.
    Ready,
    /// It takes nothing new; what it has may finish.
    Draining,
    Stopping,
    Stopped,
    Failed,
}

impl ShardState {
    pub const ALL: [ShardState; 8] = [
        ShardState::Pending,
        ShardState::Starting,
        ShardState::Loading,
        ShardState::Ready,
        ShardState::Draining,
        ShardState::Stopping,
        ShardState::Stopped,
        ShardState::Failed,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            ShardState::Pending => "pending",
            ShardState::Starting => "starting",
            ShardState::Loading => "loading",
            ShardState::Ready => "ready",
            ShardState::Draining => "draining",
            ShardState::Stopping => "stopping",
            ShardState::Stopped => "stopped",
            ShardState::Failed => "failed",
        }
    }

    /// Nothing of it runs any more, and nothing will.
    pub fn is_over(self) -> bool {
        matches!(self, ShardState::Stopped | ShardState::Failed)
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    Status(i32),
    Signal(i32),
    /// It was adopted, so only its end is known.
    Unknown,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Status(status) => write!(f, "exited with status {status}"),
            Exit::Signal(signal) => write!(f, "was killed by signal {signal}"),
            Exit::Unknown => f.write_str("ended, how is not known"),
        }
    }
}

/// One line of an engine's output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// Cut where it was too long; no control characters.
    pub text: String,
}

/// What an agent reports of a shard, at every change and at every connect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardStatus {
    pub shard: String,
    /// Of the spec that runs.
    pub spec_hash: String,
    pub state: ShardState,
    /// Why, in words; empty where there is nothing to say.
    pub reason: String,
    pub exit: Option<Exit>,
    /// The last lines, with a failure.
    pub log_tail: Vec<LogLine>,
    /// Since when it has this state, in milliseconds since 1970.
    pub since_ms: u64,
    /// It was taken over from an earlier agent: its output up to then is gone.
    pub adopted: bool,
}

impl ShardStatus {
    /// It failed, and what is left of it keeps its GPUs, cores, memory and ports.
    pub fn is_not_gone(&self) -> bool {
        // What went wrong first stands before it: `exited: …; not_gone: …`.
        let mut parts = self.reason.split("; ");
        let is_code = |part: &str| {
            part.split_once(':')
                .is_some_and(|(code, _)| code == NOT_GONE)
        };
        self.state == ShardState::Failed && !self.reason.ends_with(GONE_NOW) && parts.any(is_code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_shard_keeps_its_place_from_not_gone_until_gone_now() {
        let is_not_gone = |state, reason: &str| {
            let status = ShardStatus {
                shard: "m/0/0".into(),
                spec_hash: String::new(),
                state,
                reason: reason.into(),
                exit: None,
                log_tail: Vec::new(),
                since_ms: 0,
                adopted: false,
            };
            status.is_not_gone()
        };
        let left = "not_gone: SIGKILL did not end process 7 (D)";
        assert!(is_not_gone(ShardState::Failed, left));
        let after = format!("exited: it exited with status 1; {left}");
        assert!(is_not_gone(ShardState::Failed, &after));
        assert!(!is_not_gone(
            ShardState::Failed,
            &format!("{after}; {GONE_NOW}")
        ));
        assert!(!is_not_gone(
            ShardState::Failed,
            "exited: it said not_gone: 7"
        ));
        assert!(!is_not_gone(ShardState::Stopped, left));
    }

    fn spec() -> ShardSpec {
        ShardSpec {
            shard: "smollm2/0/0".into(),
            replica: "smollm2/0".into(),
            model: "smollm2".into(),
            profile: "cpu".into(),
            definition: "d1".into(),
            rank: 0,
            engine: "llamacpp".into(),
            commands: Vec::new(),
            gpus: Vec::new(),
            cpus: Some(2),
            memory_bytes: None,
            ports: vec![21_000],
            host: "10.0.0.1".into(),
            serves_http: true,
            readiness: Readiness {
                health: "/health".into(),
                models: "/v1/models".into(),
                served_name: "smollm2".into(),
                start_deadline_ms: 600_000,
            },
            slots: Some(4),
            stop_grace_ms: 30_000,
            api_key: Some(ApiKey::new("secret".into())),
        }
    }

    #[test]
    fn specs_that_differ_in_anything_have_other_hashes_and_equal_ones_the_same() {
        let other = ShardSpec {
            ports: vec![21_001],
            ..spec()
        };
        assert_eq!(spec().hash(), spec().hash());
        assert_ne!(spec().hash(), other.hash());
    }

    #[test]
    fn a_key_is_never_shown() {
        assert!(!format!("{:?}", spec()).contains("secret"));
    }

    #[test]
    fn the_address_of_a_shard_that_serves_http_brackets_ipv6() {
        let v6 = ShardSpec {
            host: "fd00::1".into(),
            ..spec()
        };
        assert_eq!(spec().address().unwrap(), "10.0.0.1:21000");
        assert_eq!(v6.address().unwrap(), "[fd00::1]:21000");
        let silent = ShardSpec {
            serves_http: false,
            ..spec()
        };
        assert_eq!(silent.address(), None);
    }
}
