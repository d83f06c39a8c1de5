//! The file as a person writes it, and what a person is told of it.

use super::*;

/// A whole file, with keys that later parts read.
const EXAMPLE: &str = "\
server: https://ctl.example:8443
node: gpu-01
advertise: 10.0.0.11
state: /var/lib/llmgw
ports: 21000-21999
tls: {ca: ca.pem, cert: agent.pem, key: agent-key.pem}
allow_plaintext: true
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
    assert_eq!(config.advertise, "10.0.0.11".parse().ok());
    assert_eq!(config.state.as_deref(), Some(Path::new("/var/lib/llmgw")));
    let ports = PortRange {
        first: 21_000,
        last: 21_999,
    };
    assert_eq!(config.ports, Some(ports));
    assert_eq!(
        config.tls.as_ref().unwrap().cert,
        Path::new("agent.pem"),
        "beside the file"
    );
    assert!(config.allow_plaintext);
    let vllm = &config.engines["vllm"];
    assert_eq!(vllm.commands["ray"], Path::new("/opt/vllm/bin/ray"));
    assert_eq!(vllm.env["HF_HOME"], "/models");
    assert!(!format!("{config:?}").contains("HF_HOME\": \"/models"));
    assert_eq!(config.models_dir.as_deref(), Some(Path::new("/models")));
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
            "1:7: node: `a b` is not a node id|help: write at most 64 letters, digits, `.`, `_` and `-`",
        ),
        (
            "node: nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn",
            "1:7: node: `nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn` is not a node id|help: write at most 64 letters, digits, `.`, `_` and `-`",
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
            "advertise: 0.0.0.0",
            "1:12: advertise: `0.0.0.0` is not an address|help: write the address that the gateway reaches this node by, e.g. `10.0.0.11`",
        ),
        (
            "ports: 22000-21000",
            "1:8: ports: `22000-21000` is not a range of ports|help: write the first and the last one, e.g. `21000-21999`",
        ),
        (
            "ports: 0-10",
            "1:8: ports: `0-10` is not a range of ports|help: write the first and the last one, e.g. `21000-21999`",
        ),
        (
            "tls: {ca: ca.pem, cert: agent.pem}",
            "1:6: tls: has no `key`|help: write `key: FILE.pem`",
        ),
        (
            "allow_plaintext: 1",
            "1:18: allow_plaintext: expected `true` or `false`, found the number `1`|help: write `true` or `false`",
        ),
        (
            "engines: {vllm: {env: {A: b}}}",
            "1:17: engines.vllm: has no `commands`|help: name at least one file that it may start, e.g. `{vllm: /opt/vllm/bin/vllm}`",
        ),
        (
            "engines: {vllm: {commands: {a: b}, envs: {}}}",
            "1:36: engines.vllm.envs: unknown key `envs`|help: did you mean `env`?",
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
