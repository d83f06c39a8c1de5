//! `agent.yaml`: what the operator of a node decides, read whole with every problem named by its line.
//!
//! So far the keys that the inventory needs are read. The others of the file are known, and left to what will need them.

use std::collections::BTreeMap;
use std::path::Path;

use llmgw_proto::document::problem::Place;
use llmgw_proto::document::read::{Field, Fields, Report};
use llmgw_proto::document::yaml::{self, Node};
use llmgw_proto::document::{ConfigErrors, Kind};

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
}

const KIND: Kind = Kind {
    example: "agent.yaml",
    least: "write e.g. `server: https://ctl.example:8443`, or leave `--config` out",
};

const KEYS: [&str; 11] = [
    "server",
    "node",
    "advertise",
    "state",
    "ports",
    "tls",
    "labels",
    "fabrics",
    "socket_interface",
    "engines",
    "models_dir",
];

/// An interface's name, at most as long as the kernel allows.
const INTERFACE_MAX_BYTES: usize = 15;

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
    let config = decode(&mut report, &root);
    let problems = report.finish(Vec::new());
    match problems.is_empty() {
        true => Ok(config),
        false => Err(ConfigErrors::locate(path, text, problems)),
    }
}

fn decode(report: &mut Report<'_>, root: &Node) -> AgentConfig {
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
    let is_name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if !text.chars().all(is_name) {
        let right = "write letters, digits, `.`, `_` and `-`";
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
mod tests {
    use super::*;

    /// A whole file, with keys that later parts read.
    const EXAMPLE: &str = "\
server: https://ctl.example:8443
node: gpu-01
advertise: 10.0.0.11
state: /var/lib/llmgw
ports: 21000-21999
tls: {ca: ca.pem, cert: agent.pem, key: agent-key.pem}
labels: {rack: r1, zone: a}
fabrics: [{name: ib-east, adapters: [mlx5_0, mlx5_1]}]
socket_interface: eth0
engines:
  vllm:     {commands: {vllm: /opt/vllm/bin/vllm, ray: /opt/vllm/bin/ray}, env: {HF_HOME: /models}}
models_dir: /models
";

    fn read(text: &str) -> Result<AgentConfig, ConfigErrors> {
        parse(Path::new("agent.yaml"), text, &|name| {
            (name == "ZONE").then(|| "b".to_owned())
        })
    }

    #[test]
    fn the_whole_example_is_read() {
        let config = read(EXAMPLE).unwrap();
        assert_eq!(config.server.as_deref(), Some("https://ctl.example:8443"));
        assert_eq!(config.node.as_deref(), Some("gpu-01"));
        assert_eq!(config.labels["rack"], "r1");
        assert_eq!(
            config.fabrics,
            [FabricLabel {
                name: "ib-east".to_owned(),
                adapters: vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()]
            }]
        );
        assert_eq!(config.socket_interface.as_deref(), Some("eth0"));
        assert_eq!(
            read("labels: {zone: '${ZONE}'}").unwrap().labels["zone"],
            "b"
        );
        assert_eq!(
            read("node: a").unwrap(),
            AgentConfig {
                node: Some("a".to_owned()),
                ..AgentConfig::default()
            }
        );
    }

    #[test]
    fn each_problem_has_its_line_its_path_and_what_would_be_right() {
        for (text, expected) in [
            (
                "sever: x",
                "1:1: sever: unknown key `sever`|help: did you mean `server`?",
            ),
            (
                "server: ctl.example:8443",
                "1:9: server: `ctl.example:8443` is not a server|help: write e.g. `https://ctl.example:8443`",
            ),
            (
                "node: a b",
                "1:7: node: `a b` is not a node id|help: write letters, digits, `.`, `_` and `-`",
            ),
            (
                "labels: {rack: 1}",
                "1:16: labels.rack: expected a text, found the number `1`|help: put it in quotes",
            ),
            (
                "labels: [a]",
                "1:9: labels: expected a mapping, found a list|help: write `{name: \"value\"}`, or leave the key out",
            ),
            (
                "fabrics:\n  - name: east",
                "2:5: fabrics[0]: has no `adapters`|help: list its adapters, e.g. `[mlx5_0, mlx5_1]`",
            ),
            (
                "fabrics:\n  - adapters: [mlx5_0]",
                "2:5: fabrics[0]: has no `name`|help: give each fabric a name, the same on every node",
            ),
            (
                "fabrics: [{name: a, adapters: []}]",
                "1:31: fabrics[0].adapters: lists no adapter|help: list at least one, e.g. `[mlx5_0]`",
            ),
            (
                "fabrics: [{name: a, adapters: ['=mlx5_0']}]",
                "1:32: fabrics[0].adapters[0]: `=mlx5_0` is not an adapter|help: write the name below /sys/class/infiniband, e.g. `mlx5_0`, or `mlx4_0:2` for its second port",
            ),
            (
                "fabrics:\n  - {name: a, adapters: [x]}\n  - {name: b, adapters: [x]}",
                "3:26: fabrics[1].adapters[0]: adapter `x` is in fabric `a` already|help: an adapter is in one fabric",
            ),
            (
                "fabrics:\n  - {name: a, adapters: [x, x]}",
                "2:29: fabrics[0].adapters[1]: adapter `x` is listed twice|help: keep one of them",
            ),
            (
                "fabrics:\n  - {name: a, adapters: [x]}\n  - {name: a, adapters: [y]}",
                "3:12: fabrics[1].name: two fabrics are `a`|help: list all adapters of a fabric in one entry",
            ),
            (
                "socket_interface: eth0,eth1",
                "1:19: socket_interface: `eth0,eth1` is not an interface|help: write the name of one interface, e.g. `eth0`",
            ),
            (
                "",
                "the file is empty|help: write e.g. `server: https://ctl.example:8443`, or leave `--config` out",
            ),
        ] {
            let message = read(text).unwrap_err().to_string();
            let lines: Vec<&str> = message.lines().collect();
            let found = format!(
                "{}|{}",
                lines[0].trim_start_matches("agent.yaml:").trim_start(),
                lines.last().unwrap().trim()
            );
            assert_eq!(found, expected, "{message}");
        }
    }

    #[test]
    fn several_problems_are_all_reported() {
        let errors = read("nod: a\nlabels: 1\n").unwrap_err();
        assert_eq!(errors.problems.len(), 2);
    }
}
