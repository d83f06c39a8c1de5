//! The configuration: what `llmgw.yaml` declares, as types that the rest of the gateway reads directly.
//!
//! [`load`] reads the file in four steps: the text, its shape (`decode`), its meaning (`check`),
//! and, where any of them found something, one report of all problems with their lines; what is not about this file in particular is
//! [`llmgw_proto::document`]. A reload takes the same path (`watch`).
//! Relative paths in the file are relative to the directory that holds it. `${VAR}` is expanded after parsing, so that a value cannot add YAML.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use foldhash::{HashMap, HashMapExt};
use llmgw_plugins::MetricOverride;
use llmgw_proto::document::{Kind, problem, read, suggest, yaml};
use llmgw_proto::identity::Serial;
use sha2::{Digest, Sha256};

mod check;
mod date;
mod decode;
mod notes;
mod profile;
mod secret;
mod url;
mod watch;

pub use check::check_engines;
pub use date::UtcTime;
pub(crate) use llmgw_proto::document::suggestion;
pub use llmgw_proto::document::{ConfigErrors, Problem};
pub use notes::{needs_restart, not_yet_enforced, recovery_warning, warnings};
pub(crate) use profile::{lacks_fp8, problems as profile_problems};
pub use secret::{KeyHash, Secret};
pub use url::EngineUrl;
pub use watch::ConfigWatch;

/// What messages call this file.
const KIND: Kind = Kind {
    example: "llmgw.yaml",
    least: "a configuration lists at least `models`, and may set `listen: 127.0.0.1:8080`",
};

/// The whole configuration, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where clients connect. Default `127.0.0.1:8080`.
    pub listen: Listen,
    /// Where `ctl`, `/metrics`, `/healthz` and `/readyz` answer. Default `127.0.0.1:8081`.
    pub admin: AdminListen,
    /// The policy directory, None = the built-in policies.
    pub policies: Option<PathBuf>,
    /// Where the last good policies are kept. Default `.llmgw`.
    pub state: PathBuf,
    pub log: Log,
    /// Where agents connect, None = not configured.
    pub agents: Option<Agents>,
    pub limits: Limits,
    /// Empty = open: everyone is the tenant `default`.
    pub tenants: Vec<Tenant>,
    pub catalog: Catalog,
    /// The file this was read from.
    pub source: PathBuf,
    /// The file's text, for the lines of later problems and to see whether it changed.
    text: SourceText,
}

/// The public address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    pub address: SocketAddr,
    pub tls: Option<TlsFiles>,
}

/// The admin address. Beyond loopback it has a token or TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminListen {
    pub address: SocketAddr,
    pub tls: Option<TlsFiles>,
    pub token: Option<Secret>,
}

/// PEM files of a listener; that they exist is found out when they are opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// Default [`LogFormat::Text`].
    pub format: LogFormat,
    /// Default `info`.
    pub level: tracing::Level,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

/// The listener for agents and how long their silence is tolerated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agents {
    /// Default `127.0.0.1:8443`.
    pub address: SocketAddr,
    pub tls: Option<AgentsTls>,
    /// The certificate's common name must be the node's id. Default: true when `tls.ca` is set.
    pub require_identity: bool,
    /// Plaintext beyond loopback. Default false.
    pub allow_plaintext: bool,
    /// Serial numbers of revoked certificates.
    pub deny_serials: Vec<Serial>,
    /// How often an agent reports; dead after three. Default 5 s.
    pub heartbeat: Duration,
    /// How long a node stays unreachable before it counts as lost. Default 60 s.
    pub lost_after: Duration,
    /// How long nothing is placed after a start. Default 15 s.
    pub recovery: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentsTls {
    pub cert: PathBuf,
    pub key: PathBuf,
    /// The authority that agents' certificates come from.
    pub ca: Option<PathBuf>,
    /// That authority's key, where nodes get their certificates from this server.
    pub ca_key: Option<PathBuf>,
}

/// Bounds of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest request body in bytes, 413 beyond. Default 64 MiB.
    pub body_max: u64,
    /// Bodies of all requests that wait for their turn, in bytes; 429 beyond. Default 1 GiB.
    pub queued_bytes_max: u64,
    /// To an engine. Default 2 s.
    pub connect_timeout: Duration,
    /// Default 10 min.
    pub first_byte_timeout: Duration,
    /// Between two chunks. Default 5 min.
    pub idle_timeout: Duration,
    /// How long a silent stream waits for a comment, None = never (the default).
    pub keepalive: Option<Duration>,
    /// On other replicas, before the first byte. Default 2.
    pub retries: u32,
    /// How long streams may go on after SIGTERM. Default 3 min.
    pub drain_timeout: Duration,
}

/// Who is asking, named by API keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenant {
    pub name: Arc<str>,
    /// The share against other tenants of a band, 0.01 to 100. Default 1.
    pub weight: f64,
    /// For policies.
    pub labels: Labels,
    /// The bands it may use, the first is its default; empty = not limited.
    pub bands: Vec<Arc<str>>,
    pub keys: Vec<TenantKey>,
    /// What it may use, matched against names, not aliases. Default `*`.
    pub models: Vec<ModelPattern>,
    pub max_concurrency: Option<u32>,
    pub requests_per_minute: Option<u64>,
    pub tokens_per_minute: Option<u64>,
}

/// The operator's words about something, sorted by name, for policies. llmgw itself reads a node's or endpoint's `rack` and `zone`.
pub type Labels = Arc<Vec<(String, String)>>;

/// One API key of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantKey {
    pub hash: KeyHash,
    /// From then on it is refused; `None` = never.
    pub expires: Option<UtcTime>,
}

/// A model's name, in which each `*` stands for any text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelPattern(Arc<str>);

/// What the configuration declares: models and how each can be reached or run.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    /// In the file's order.
    pub models: Vec<Arc<Model>>,
    /// Names and aliases; no text is both.
    by_name: HashMap<Arc<str>, Arc<Model>>,
}

/// A served name.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    pub name: Arc<str>,
    pub aliases: Vec<Arc<str>>,
    /// For policies.
    pub labels: Labels,
    /// What the engine loads, None = the name.
    pub source: Option<String>,
    /// How many copies to keep running under `profiles`. Default 1.
    pub replicas: u32,
    /// Engines that run already.
    pub endpoints: Vec<Endpoint>,
    /// None = the engine's own metric names; empty = vLLM's; one that names `running` is complete.
    pub metrics: Option<MetricOverride>,
    /// Ways to run it, in order of preference.
    pub profiles: Vec<Profile>,
}

/// The address of an engine that runs already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub url: EngineUrl,
    /// The engine plugin. Default `openai`.
    pub engine: String,
    /// Requests that it serves at a time, None = not known.
    pub slots: Option<u32>,
    /// Sent to the engine as a bearer token.
    pub api_key: Option<Secret>,
    /// The name that the engine itself serves; None = whichever of the model's name, `source` and aliases it lists.
    pub serves: Option<String>,
    /// For policies; `rack` and `zone` say where it is.
    pub labels: Labels,
}

impl Endpoint {
    /// Whether both are reached and used in the same way, whatever is said about them.
    pub fn is_same_engine(&self, other: &Endpoint) -> bool {
        let labels = other.labels.clone();
        Endpoint {
            labels,
            ..self.clone()
        } == *other
    }
}

/// One way to run a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    pub name: Arc<str>,
    pub engine: String,
    /// GPU classes that will do; a replica's GPUs are all of one. Empty = it runs on CPUs.
    pub gpu: Vec<String>,
    /// 0 without `gpu`, else default 1.
    pub gpus_per_node: u32,
    /// Default 1.
    pub nodes: u32,
    /// Default 1.
    pub tensor_parallel: u32,
    /// Default 1.
    pub pipeline_parallel: u32,
    pub cpus: Option<u32>,
    /// Bytes.
    pub memory: Option<u64>,
    /// Labels that each of its nodes must have, with these values.
    pub node_selector: BTreeMap<String, String>,
    pub quantization: Option<String>,
    /// Requests that a replica serves at a time, None = not known.
    pub slots: Option<u32>,
    /// Default [`LaunchMode::Native`].
    pub launch_mode: LaunchMode,
    pub args: Vec<String>,
    /// Values may be credentials, so they do not print.
    pub env: BTreeMap<String, Secret>,
}

/// How the shards of a multi-node replica find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LaunchMode {
    #[default]
    Native,
    Ray,
}

/// The text of the file; `Debug` does not show it, since it may hold credentials.
#[derive(Clone)]
pub(crate) struct SourceText(Arc<str>);

/// Reads and checks the file at `path`; `${VAR}` comes from the process's environment.
///
/// # Errors
/// All problems that were found, each with its line.
pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
    load_with(path, &|name| std::env::var(name).ok())
}

/// [`load`] with the environment given, for tests.
///
/// # Errors
/// As [`load`].
pub fn load_with(
    path: &Path,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Config, ConfigErrors> {
    let text = yaml::read_file(path, &KIND)?;
    parse(path, text, env)
}

/// Parses and checks `text` as the contents of the file `path`, which is not read.
///
/// # Errors
/// As [`load`].
pub fn parse(
    path: &Path,
    text: String,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Config, ConfigErrors> {
    let root = yaml::parse(path, &text, &KIND)?;
    let mut report = read::Report::new(env);
    let directory = path.parent().unwrap_or(Path::new(""));
    let mut config = decode::config(&mut report, &root, directory);
    config.source = path.to_owned();
    config.text = SourceText(text.into());
    let rules = check::rules(&config);
    let mut problems = report.finish(rules);
    // Said when nothing else is wrong: a file that was cut off before its models must not take them all away.
    if problems.is_empty() && !root.has_key("models") {
        let right = "list the models, or write `models: []` to serve none yet";
        problems.push(problem::Finding::new(
            problem::Place::root(),
            "has no `models`",
            right,
        ));
    }
    if problems.is_empty() {
        return Ok(config);
    }
    Err(ConfigErrors::locate(path, &config.text.0, problems))
}

impl Config {
    /// The SHA-256 of the file's text, equal exactly when nothing was written.
    pub fn digest(&self) -> [u8; 32] {
        Sha256::digest(self.text.0.as_bytes()).into()
    }
}

impl AdminListen {
    /// The rule for addresses that others can reach; to be asked again when a flag replaced the address.
    ///
    /// # Errors
    /// What is missing.
    pub fn check(&self) -> Result<(), String> {
        if self.address.ip().is_loopback() || self.token.is_some() || self.tls.is_some() {
            return Ok(());
        }
        Err(format!(
            "the admin address `{}` is not loopback and has neither a token nor TLS",
            self.address
        ))
    }
}

impl Agents {
    /// The rule for addresses that others can reach; to be asked again when a flag replaced the address.
    ///
    /// # Errors
    /// What is missing.
    pub fn check(&self) -> Result<(), String> {
        if self.address.ip().is_loopback() || self.tls.is_some() || self.allow_plaintext {
            return Ok(());
        }
        Err(format!(
            "`{}` is not loopback and has no `tls`",
            self.address
        ))
    }
}

impl Default for Log {
    fn default() -> Self {
        Log {
            format: LogFormat::Text,
            level: tracing::Level::INFO,
        }
    }
}

impl Default for Agents {
    fn default() -> Self {
        Agents {
            address: SocketAddr::from(([127, 0, 0, 1], 8443)),
            tls: None,
            require_identity: false,
            allow_plaintext: false,
            deny_serials: Vec::new(),
            heartbeat: Duration::from_secs(5),
            lost_after: Duration::from_secs(60),
            recovery: Duration::from_secs(15),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            body_max: 64 << 20,
            queued_bytes_max: 1 << 30,
            connect_timeout: Duration::from_secs(2),
            first_byte_timeout: Duration::from_secs(600),
            idle_timeout: Duration::from_secs(300),
            keepalive: None,
            retries: 2,
            drain_timeout: Duration::from_secs(180),
        }
    }
}

impl Tenant {
    /// Whether it may use the model of this name (not an alias).
    pub fn may_use(&self, model: &str) -> bool {
        self.models.iter().any(|pattern| pattern.matches(model))
    }
}

impl ModelPattern {
    pub fn new(text: &str) -> Self {
        ModelPattern(text.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the whole of `name` is covered.
    pub fn matches(&self, name: &str) -> bool {
        let mut parts = self.0.split('*');
        let first = parts.next().unwrap_or("");
        let Some(mut rest) = name.strip_prefix(first) else {
            return false;
        };
        let mut parts = parts.peekable();
        if parts.peek().is_none() {
            return rest.is_empty();
        }
        // Each middle part takes its first occurrence; the last one must end the name.
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return rest.ends_with(part);
            }
            match rest.find(part) {
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        true
    }
}

impl Catalog {
    /// A name or alias that is taken already keeps its first owner; [`load`] refuses such a file.
    pub fn new(models: Vec<Arc<Model>>) -> Self {
        let mut by_name = HashMap::new();
        for model in &models {
            for name in std::iter::once(&model.name).chain(&model.aliases) {
                by_name.entry(name.clone()).or_insert_with(|| model.clone());
            }
        }
        Catalog { models, by_name }
    }

    /// The model of this name or alias.
    pub fn resolve(&self, name: &str) -> Option<&Arc<Model>> {
        self.by_name.get(name)
    }

    /// The models' names without aliases, in the file's order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.models.iter().map(|model| &*model.name)
    }
}

impl LaunchMode {
    pub fn as_str(self) -> &'static str {
        match self {
            LaunchMode::Native => "native",
            LaunchMode::Ray => "ray",
        }
    }
}

impl fmt::Debug for SourceText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

#[cfg(test)]
mod tests;
