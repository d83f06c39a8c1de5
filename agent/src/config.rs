//! `agent.yaml`: what the operator of a node decides, read whole with every problem named by its line.
//!
//! Relative paths are relative to the directory that holds the file.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use llmgw_proto::document::problem::Place;
use llmgw_proto::document::read::{Field, Fields, Report};
use llmgw_proto::document::yaml::{self, Node};
use llmgw_proto::document::{ConfigErrors, Kind};
use llmgw_proto::session::{NODE_ID_MAX_BYTES, PortRange, is_node_id};

use crate::inventory::fabrics::FabricLabel;
use crate::inventory::network::host_and_port;

/// What the file says, checked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AgentConfig {
    /// Where the server is, `https://ctl.example:8443`.
    pub server: Option<String>,
    /// This node's id. `None`: the host name.
    pub node: Option<String>,
    /// The operator's words about this node, for placement.
    pub labels: BTreeMap<String, String>,
    /// Which adapters make a fabric. Wins over what the adapters say themselves.
    pub fabrics: Vec<FabricLabel>,
    /// The interface that engines of several nodes find each other by. `None`: that of the route to the server.
    pub socket_interface: Option<String>,
    /// Where the gateway reaches engines. `None`: the address that the stream to the server uses.
    pub advertise: Option<IpAddr>,
    /// Where what must survive a restart of the agent is kept.
    pub state: Option<PathBuf>,
    /// What engines may listen on.
    pub ports: Option<PortRange>,
    pub tls: Option<AgentTls>,
    /// A server off this machine may be dialled without TLS.
    pub allow_plaintext: bool,
    /// The allow-list, by engine: all that this node starts.
    pub engines: BTreeMap<String, EngineEntry>,
    /// Where a `source` that is a relative path is found.
    pub models_dir: Option<PathBuf>,
}

/// PEM files; that they exist is found out when they are opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentTls {
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// What may be started for one engine.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct EngineEntry {
    /// Files, by the name that a profile's plugin gives them.
    pub commands: BTreeMap<String, PathBuf>,
    /// Values may be credentials, so they do not print.
    pub env: BTreeMap<String, String>,
}

const KIND: Kind = Kind {
    example: "agent.yaml",
    least: "write e.g. `server: https://ctl.example:8443`, or leave `--config` out",
};

const KEYS: [&str; 12] = [
    "server",
    "node",
    "advertise",
    "state",
    "ports",
    "tls",
    "allow_plaintext",
    "labels",
    "fabrics",
    "socket_interface",
    "engines",
    "models_dir",
];

/// An interface's name, at most as long as the kernel allows.
const INTERFACE_MAX_BYTES: usize = 15;
/// Engines of one node; a registration takes no more.
const ENGINES_MAX: usize = 64;

/// Reads and checks the file at `path`; `${VAR}` comes from the process's environment.
///
/// # Errors
/// All problems that were found, each with its line.
pub fn load(path: &Path) -> Result<AgentConfig, ConfigErrors> {
    let text = yaml::read_file(path, &KIND)?;
    parse(path, &text, &|name| std::env::var(name).ok())
}

/// Parses and checks `text` as the contents of the file `path`, which is not read.
///
/// # Errors
/// As [`load`].
pub fn parse(
    path: &Path,
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<AgentConfig, ConfigErrors> {
    let root = yaml::parse(path, text, &KIND)?;
    let mut report = Report::new(env);
    let directory = path.parent().unwrap_or(Path::new(""));
    let config = decode(&mut report, &root, directory);
    let problems = report.finish(Vec::new());
    match problems.is_empty() {
        true => Ok(config),
        false => Err(ConfigErrors::locate(path, text, problems)),
    }
}

fn decode(report: &mut Report<'_>, root: &Node, directory: &Path) -> AgentConfig {
    let root = Field {
        node: root,
        place: Place::root(),
    };
    let fields = report
        .fields(&root, &KEYS)
        .unwrap_or_else(|| Fields::none(Place::root()));
    AgentConfig {
        server: fields
            .get("server")
            .and_then(|field| server(report, &field)),
        node: fields.get("node").and_then(|field| node(report, &field)),
        labels: fields
            .get("labels")
            .map(|field| report.named_texts(&field))
            .unwrap_or_default()
            .into_iter()
            .collect(),
        fabrics: fields
            .get("fabrics")
            .map(|field| fabrics(report, &field))
            .unwrap_or_default(),
        socket_interface: fields
            .get("socket_interface")
            .and_then(|field| interface(report, &field)),
        advertise: fields
            .get("advertise")
            .and_then(|field| advertise(report, &field)),
        state: fields
            .get("state")
            .and_then(|field| file(report, &field, directory)),
        ports: fields.get("ports").and_then(|field| ports(report, &field)),
        tls: fields
            .get("tls")
            .and_then(|field| tls(report, &field, directory)),
        allow_plaintext: fields
            .get("allow_plaintext")
            .and_then(|field| report.boolean(&field))
            .unwrap_or(false),
        engines: fields
            .get("engines")
            .map(|field| engines(report, &field, directory))
            .unwrap_or_default(),
        models_dir: fields
            .get("models_dir")
            .and_then(|field| file(report, &field, directory)),
    }
}

fn file(report: &mut Report<'_>, field: &Field<'_>, directory: &Path) -> Option<PathBuf> {
    report.text(field).map(|text| directory.join(text))
}

fn advertise(report: &mut Report<'_>, field: &Field<'_>) -> Option<IpAddr> {
    let text = report.text(field)?;
    match text.parse::<IpAddr>() {
        Ok(address) if !address.is_unspecified() && !address.is_multicast() => Some(address),
        _ => {
            let right = "write the address that the gateway reaches this node by, e.g. `10.0.0.11`";
            report.add(&field.place, format!("`{text}` is not an address"), right);
            None
        }
    }
}

fn ports(report: &mut Report<'_>, field: &Field<'_>) -> Option<PortRange> {
    let text = report.text(field)?;
    let range = text.split_once('-').and_then(|(first, last)| {
        let (first, last): (u16, u16) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (1..=last)
            .contains(&first)
            .then_some(PortRange { first, last })
    });
    if range.is_none() {
        let right = "write the first and the last one, e.g. `21000-21999`";
        let wrong = format!("`{text}` is not a range of ports");
        report.add(&field.place, wrong, right);
    }
    range
}

fn tls(report: &mut Report<'_>, field: &Field<'_>, directory: &Path) -> Option<AgentTls> {
    let fields = report.fields(field, &["ca", "cert", "key"])?;
    let mut file = |key: &str| match fields.get(key) {
        Some(field) => self::file(report, &field, directory),
        None => {
            report.missing(&fields, key, &format!("write `{key}: FILE.pem`"));
            None
        }
    };
    let (ca, cert, key) = (file("ca"), file("cert"), file("key"));
    Some(AgentTls {
        ca: ca?,
        cert: cert?,
        key: key?,
    })
}

fn engines(
    report: &mut Report<'_>,
    field: &Field<'_>,
    directory: &Path,
) -> BTreeMap<String, EngineEntry> {
    let entries = report.named_fields(field);
    if entries.len() > ENGINES_MAX {
        let wrong = format!("lists more than {ENGINES_MAX} engines");
        report.add(&field.place, wrong, "keep those that this node runs");
    }
    let entry = |(name, field): (&str, Field<'_>)| {
        let fields = report.fields(&field, &["commands", "env"])?;
        let commands = fields
            .get("commands")
            .map(|field| report.named_texts(&field))
            .unwrap_or_default();
        if commands.is_empty() {
            let right =
                "name at least one file that it may start, e.g. `{vllm: /opt/vllm/bin/vllm}`";
            report.add(&field.place, "has no `commands`", right);
        }
        let env = fields
            .get("env")
            .map(|field| report.secrets(&field))
            .unwrap_or_default();
        let entry = EngineEntry {
            commands: commands
                .into_iter()
                .map(|(name, path)| (name, directory.join(path)))
                .collect(),
            env: env.into_iter().collect(),
        };
        Some((name.to_owned(), entry))
    };
    entries.into_iter().filter_map(entry).collect()
}

impl fmt::Debug for EngineEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineEntry")
            .field("commands", &self.commands)
            .field("env", &self.env.keys())
            .finish()
    }
}

fn server(report: &mut Report<'_>, field: &Field<'_>) -> Option<String> {
    let text = report.text(field)?;
    let has_scheme = text.starts_with("https://") || text.starts_with("http://");
    if !has_scheme || host_and_port(&text).is_none() {
        let right = "write e.g. `https://ctl.example:8443`";
        report.add(&field.place, format!("`{text}` is not a server"), right);
        return None;
    }
    Some(text)
}

/// A node's id is a name in certificates and in commands.
fn node(report: &mut Report<'_>, field: &Field<'_>) -> Option<String> {
    let text = report.text(field)?;
    if !is_node_id(&text) {
        let right = format!("write at most {NODE_ID_MAX_BYTES} letters, digits, `.`, `_` and `-`");
        report.add(&field.place, format!("`{text}` is not a node id"), right);
        return None;
    }
    Some(text)
}

fn interface(report: &mut Report<'_>, field: &Field<'_>) -> Option<String> {
    let text = report.text(field)?;
    let is_name = |c: char| !c.is_whitespace() && !"/,=^:".contains(c);
    if text.len() > INTERFACE_MAX_BYTES || !text.chars().all(is_name) {
        let right = "write the name of one interface, e.g. `eth0`";
        report.add(&field.place, format!("`{text}` is not an interface"), right);
        return None;
    }
    Some(text)
}

fn fabrics(report: &mut Report<'_>, field: &Field<'_>) -> Vec<FabricLabel> {
    let mut labels: Vec<FabricLabel> = Vec::new();
    for item in report.list(field) {
        let Some(fields) = report.fields(&item, &["name", "adapters"]) else {
            continue;
        };
        let name = match fields.get("name") {
            Some(field) => report.text(&field),
            None => {
                report.missing(
                    &fields,
                    "name",
                    "give each fabric a name, the same on every node",
                );
                None
            }
        };
        if let Some(name) = &name
            && labels.iter().any(|label| label.name == *name)
        {
            let right = "list all adapters of a fabric in one entry";
            report.add(
                &item.place.key("name"),
                format!("two fabrics are `{name}`"),
                right,
            );
        }
        let label = FabricLabel {
            name: name.unwrap_or_default(),
            adapters: adapters(report, &fields, &labels),
        };
        labels.push(label);
    }
    labels
}

fn adapters(report: &mut Report<'_>, fields: &Fields<'_>, before: &[FabricLabel]) -> Vec<String> {
    let Some(field) = fields.get("adapters") else {
        report.missing(
            fields,
            "adapters",
            "list its adapters, e.g. `[mlx5_0, mlx5_1]`",
        );
        return Vec::new();
    };
    let items = report.list(&field);
    if items.is_empty() && matches!(field.node, Node::List(_)) {
        report.add(
            &field.place,
            "lists no adapter",
            "list at least one, e.g. `[mlx5_0]`",
        );
    }
    let mut names: Vec<String> = Vec::new();
    for item in &items {
        let Some(name) = report.text(item) else {
            continue;
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || "_-.:".contains(c);
        if !name.chars().all(is_name) {
            let right = "write the name below /sys/class/infiniband, e.g. `mlx5_0`, or `mlx4_0:2` for its second port";
            report.add(&item.place, format!("`{name}` is not an adapter"), right);
            continue;
        }
        let owner = before.iter().find(|label| label.adapters.contains(&name));
        if let Some(owner) = owner {
            let wrong = format!("adapter `{name}` is in fabric `{}` already", owner.name);
            report.add(&item.place, wrong, "an adapter is in one fabric");
        } else if names.contains(&name) {
            report.add(
                &item.place,
                format!("adapter `{name}` is listed twice"),
                "keep one of them",
            );
        }
        names.push(name);
    }
    names
}

#[cfg(test)]
mod tests;
