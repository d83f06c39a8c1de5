//! Certificates of `llmgw ctl cert` between hosts of their own: an agent dials a server by its bare address, IPv4 and IPv6, and a host that the certificate lacks is
//! refused until it is made with it.

#[path = "harness/net.rs"]
mod net;
#[path = "harness/said.rs"]
mod said;

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use net::Net;
use said::Process;

const NODE: &str = "gpu-01";
const PORT: u16 = 8_443;
/// The hosts, by number.
const SERVER: usize = 0;
const AGENT: usize = 1;
/// One that nobody has.
const NOBODY: usize = 8;

/// Two hosts, an authority, and the files of a server and an agent. All gone afterwards.
struct Site {
    directory: PathBuf,
    net: Net,
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn llmgw() -> Command {
    Command::new(env!("CARGO_BIN_EXE_llmgw"))
}

impl Site {
    fn new(name: &str) -> Site {
        let name = format!("llmgw-identity-hosts-{}-{name}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir_all(&directory).unwrap();
        let site = Site {
            directory,
            net: Net::new(2),
        };
        site.cert("ca --out ca");
        site.cert(&format!("agent --ca ca --node {NODE} --out agent"));
        site
    }

    fn cert(&self, words: &str) {
        let mut command = llmgw();
        command.current_dir(&self.directory).args(["ctl", "cert"]);
        let ran = command
            .args(words.split(' '))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{words}: {said}");
    }

    /// A server on its host's address, with the certificate in the directory `files`.
    fn server(&self, files: &str, address: IpAddr) -> Process {
        let listen = std::net::SocketAddr::new(address, PORT);
        let text = format!(
            "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nstate: state\nmodels: []\n\
             agents:\n  listen: \"{listen}\"\n  recovery: 0s\n  \
             tls: {{cert: {files}/server.pem, key: {files}/server-key.pem, ca: {files}/ca.pem}}\n"
        );
        let config = self.directory.join("llmgw.yaml");
        fs::write(&config, text).unwrap();
        let mut command = llmgw();
        command.arg("server").arg("--config").arg(config);
        let mut server = self.net.on(SERVER, || Process::start(&mut command));
        server.says(&["waiting for agents on https://"]);
        server
    }

    fn agent(&self, address: IpAddr) -> Process {
        let server = std::net::SocketAddr::new(address, PORT);
        let text = format!(
            "server: https://{server}\nnode: {NODE}\nstate: agent-state\n\
             tls: {{ca: agent/ca.pem, cert: agent/agent.pem, key: agent/agent-key.pem}}\n"
        );
        let config = self.directory.join("agent.yaml");
        fs::write(&config, text).unwrap();
        let mut command = llmgw();
        command.arg("agent").arg("--config").arg(config);
        self.net.on(AGENT, || Process::start(&mut command))
    }
}

/// Refused with a certificate for another address, let in with the one that the agent's log asks for.
fn check(name: &str, address: IpAddr, other: IpAddr) {
    if !net::is_possible(name) {
        return;
    }
    let site = Site::new(name);
    site.cert(&format!("server --ca ca --host {other} --out other"));
    let mut server = site.server("other", address);
    let mut agent = site.agent(address);
    let wanted = format!("--host {other} --host {address}");
    let of_agent = match address {
        IpAddr::V4(_) => format!("{}:", Net::address(AGENT)),
        IpAddr::V6(_) => format!("[{}]:", Net::address6(AGENT)),
    };
    agent.says(&[
        "ERROR",
        &format!("`{address}` was dialled, and the server's certificate is for `{other}`: "),
        &format!("`llmgw ctl cert server --ca DIR {wanted} --out DIR`"),
    ]);
    server.says(&[
        &of_agent,
        &format!("the agent refused this server's certificate: what it dials is none of `{other}`"),
        &format!("`llmgw ctl cert server --ca DIR --host {other} --host NEW --out DIR`"),
    ]);
    assert!(!agent.has_said("connected to"), "it was let in");
    server.kill();

    site.cert(&format!("server --ca ca {wanted} --out both"));
    let mut server = site.server("both", address);
    agent.says(&["connected to https://", &format!("as `{NODE}`")]);
    server.kill();
    agent.kill();

    site.cert(&format!("server --ca ca --host {address} --out alone"));
    let _server = site.server("alone", address);
    let mut agent = site.agent(address);
    agent.says(&["connected to https://", &format!("as `{NODE}`")]);
}

#[test]
fn a_server_is_dialled_by_its_bare_ipv4_address_where_its_certificate_has_that() {
    check(
        "a_server_is_dialled_by_its_bare_ipv4_address_where_its_certificate_has_that",
        Net::address(SERVER).into(),
        Net::address(NOBODY).into(),
    );
}

#[test]
fn a_server_is_dialled_by_its_bare_ipv6_address_where_its_certificate_has_that() {
    check(
        "a_server_is_dialled_by_its_bare_ipv6_address_where_its_certificate_has_that",
        Net::address6(SERVER).into(),
        Net::address6(NOBODY).into(),
    );
}
