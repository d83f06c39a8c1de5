//! Who may speak, with real processes: a fleet over TLS that serves, and every refusal with what both logs say of it.

#[path = "harness/fleet.rs"]
mod fleet;
mod harness;
#[path = "harness/said.rs"]
mod said;

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use fake_engine::authority::{Authority, Issued, Leaf, Use, write};
use llmgw_proto::convert::Framed;
use llmgw_proto::identity::dialling::{Trust, connect};
use llmgw_proto::identity::listening::AgentsTls;
use llmgw_proto::identity::{Authorities, Fingerprint, Identity};
use llmgw_proto::link::{self, Heard, KeepAlive};
use llmgw_proto::session::{AgentMessage, PortRange, Register, ServerMessage, SessionId, Told};
use serde_json::Value;

use fleet::{Fleet, NODES, PATIENT, Program, models};
use said::{PATIENCE, Process};

/// Days in which a certificate is good.
const GOOD: std::ops::Range<i64> = -1..90;

/// A directory of the test's own, gone afterwards.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Directory {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-identity-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        write(&self.path(name), text);
        self.path(name)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn llmgw() -> Command {
    Command::new(env!("CARGO_BIN_EXE_llmgw"))
}

/// A server and an agent that do not come together, and what each of them says.
struct Case<'a> {
    server: &'a Issued,
    /// PEM of those whom the server trusts. None: it serves without TLS.
    server_trusts: Option<String>,
    denied: &'a str,
    agent: &'a Issued,
    agent_trusts: String,
    node: &'a str,
    scheme: &'a str,
    /// What has to be in one line of each log.
    server_says: Vec<String>,
    agent_says: Vec<String>,
}

impl Case<'_> {
    fn check(&self) {
        let directory = Directory::new();
        let mut server = start_server(&directory, self);
        let scheme = if self.server_trusts.is_some() {
            "https"
        } else {
            "http"
        };
        let line = server.says(&["waiting for agents on ", scheme]);
        let address = line.rsplit_once("://").unwrap().1.to_owned();
        write(&directory.path("agent-ca.pem"), &self.agent_trusts);
        self.agent.write(&directory.0, "agent");
        let url = format!("{}://{address}", self.scheme);
        let mut agent = start_agent(&directory, self.node, &url);
        agent.says(&words(&self.agent_says));
        server.says(&words(&self.server_says));
        // It stays so, and both go on trying.
        assert!(!agent.has_said("connected to"), "it was let in");
    }
}

fn words(of: &[String]) -> Vec<&str> {
    of.iter().map(String::as_str).collect()
}

fn start_server(directory: &Directory, case: &Case<'_>) -> Process {
    case.server.write(&directory.0, "server");
    let tls = match &case.server_trusts {
        Some(pem) => {
            directory.write("server-ca.pem", pem);
            format!(
                ", tls: {{cert: server.pem, key: server-key.pem, ca: server-ca.pem}}, deny_serials: [{}]",
                case.denied
            )
        }
        None => String::new(),
    };
    let text = format!(
        "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nstate: state\nagents: {{listen: \"127.0.0.1:0\", recovery: 0s{tls}}}\nmodels: []\n"
    );
    let config = directory.write("llmgw.yaml", &text);
    Process::start(llmgw().arg("server").arg("--config").arg(config))
}

fn start_agent(directory: &Directory, node: &str, url: &str) -> Process {
    let text = match url.starts_with("https://") {
        true => "tls: {ca: agent-ca.pem, cert: agent.pem, key: agent-key.pem}\n",
        false => "labels: {}\n",
    };
    let config = directory.write("agent.yaml", text);
    let mut command = llmgw();
    command.args(["agent", "--node", node, "--server", url]);
    command.arg("--config").arg(config);
    command.arg("--state").arg(directory.path("agent-state"));
    Process::start(&mut command)
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn fingerprint(authority: &Authority) -> String {
    Fingerprint::of(&authority.der).to_string()
}

/// What is good, for a case to change.
struct Good {
    authority: Authority,
    server: Issued,
    agent: Issued,
}

impl Good {
    fn new() -> Good {
        let authority = Authority::new("fleet");
        let server = authority.server(&["127.0.0.1"]);
        let agent = authority.agent("n1");
        Good {
            authority,
            server,
            agent,
        }
    }

    fn case(&self) -> Case<'_> {
        Case {
            server: &self.server,
            server_trusts: Some(self.authority.pem.clone()),
            denied: "",
            agent: &self.agent,
            agent_trusts: self.authority.pem.clone(),
            node: "n1",
            scheme: "https",
            server_says: Vec::new(),
            agent_says: Vec::new(),
        }
    }

    fn leaf(&self, used: Use, days: std::ops::Range<i64>) -> Issued {
        let (name, hosts) = match used {
            Use::Server => ("llmgw server", &["127.0.0.1"][..]),
            _ => ("n1", &[][..]),
        };
        self.authority.issue(&Leaf {
            name: Some(name),
            hosts,
            used,
            days,
        })
    }
}

#[test]
fn a_certificate_for_another_node_is_refused_with_its_name_and_the_claim() {
    let good = Good::new();
    let refused = "the certificate is for `n1`, not for `n2`";
    Case {
        node: "n2",
        server_says: owned(&[
            "WARN",
            "127.0.0.1:",
            &format!("(certificate `n1`, serial {})", good.agent.serial),
            refused,
            "claimed node `n2`",
        ]),
        agent_says: owned(&[
            "ERROR",
            "refused node `n2`",
            refused,
            "`llmgw ctl cert agent --ca DIR --node n2 --out DIR`",
            "claimed node `n2`, certificate `n1`",
            "this agent showed ",
            &good.agent.serial,
        ]),
        ..good.case()
    }
    .check();
}

#[test]
fn certificates_of_agents_that_are_not_in_force_are_refused_with_both_clocks() {
    let good = Good::new();
    for (days, said) in [
        (-9..-1, "the certificate expired at 20"),
        (1..9, "the certificate is not valid before 20"),
    ] {
        let agent = good.leaf(Use::Agent, days);
        let clock = "and the server's clock says 20";
        Case {
            agent: &agent,
            server_says: owned(&["was refused: ", said, clock, &agent.serial]),
            agent_says: owned(&[said, clock, "and its clock says 20"]),
            ..good.case()
        }
        .check();
    }
}

#[test]
fn certificates_of_servers_that_are_not_in_force_are_refused_with_both_clocks() {
    let good = Good::new();
    for (days, said) in [
        (-9..-1, "the server's certificate expired at 20"),
        (1..9, "the server's certificate is not valid before 20"),
    ] {
        let server = good.leaf(Use::Server, days);
        Case {
            server: &server,
            server_says: owned(&[
                "the agent refused this server's certificate over its dates: it is valid from 20",
                "and this server's clock says 20",
            ]),
            agent_says: owned(&["ERROR", said, "and this machine's clock says 20"]),
            ..good.case()
        }
        .check();
    }
}

#[test]
fn a_host_that_the_servers_certificate_lacks_is_named_with_those_that_it_has() {
    let good = Good::new();
    let server = good.authority.server(&["ctl.example", "10.0.0.1"]);
    Case {
        server: &server,
        server_says: owned(&[
            "what it dials is none of `ctl.example`, `10.0.0.1`",
            "`llmgw ctl cert server --ca DIR --host ctl.example --host 10.0.0.1 --host NEW --out DIR`",
        ]),
        agent_says: owned(&[
            "`127.0.0.1` was dialled, and the server's certificate is for `ctl.example`, `10.0.0.1`",
            "`llmgw ctl cert server --ca DIR --host ctl.example --host 10.0.0.1 --host 127.0.0.1 --out DIR`",
        ]),
        ..good.case()
    }
    .check();
}

#[test]
fn authorities_that_are_not_known_are_named_by_both_fingerprints() {
    let (good, other) = (Good::new(), Authority::new("other"));
    let (ours, theirs) = (fingerprint(&good.authority), fingerprint(&other));
    let agent = other.agent("n1");
    let issued = format!("the certificate was issued by `CN=other` ({theirs})");
    let trusted = format!("`agents.tls.ca` of the server has {ours}");
    Case {
        agent: &agent,
        agent_trusts: format!("{}{}", good.authority.pem, other.pem),
        server_says: owned(&["was refused: ", &issued, &trusted]),
        agent_says: owned(&[&issued, &trusted]),
        ..good.case()
    }
    .check();
    Case {
        agent_trusts: other.pem.clone(),
        server_says: owned(&["it does not know the authority that issued it", &ours]),
        agent_says: owned(&[
            &format!("issued by `CN=fleet` ({ours})"),
            &format!("`tls.ca` of this agent has {theirs}"),
            "copy the server's ca.pem to this node",
        ]),
        ..good.case()
    }
    .check();
}

#[test]
fn a_servers_certificate_is_no_agents() {
    let good = Good::new();
    let agent = good.leaf(Use::Server, GOOD);
    let said = "the certificate is for serverAuth, not for clientAuth";
    Case {
        agent: &agent,
        server_says: owned(&["was refused: ", said]),
        agent_says: owned(&[said, "--node n1 --out DIR` makes an agent's"]),
        ..good.case()
    }
    .check();
}

/// A server of ours does not even start with it, so this one is in the test.
#[tokio::test]
async fn an_agents_certificate_is_no_servers() {
    let good = Good::new();
    let directory = Directory::new();
    good.authority
        .issue(&Leaf {
            name: Some("n1"),
            hosts: &["127.0.0.1"],
            used: Use::Agent,
            days: GOOD,
        })
        .write(&directory.0, "x");
    let own = Identity::load(&directory.path("x.pem"), &directory.path("x-key.pem")).unwrap();
    let tls = AgentsTls::new(own, None).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    directory.write("agent-ca.pem", &good.authority.pem);
    good.agent.write(&directory.0, "agent");
    let mut agent = start_agent(&directory, "n1", &url);
    let (socket, _) = listener.accept().await.unwrap();
    let problem = tls.accept(socket).await.err().unwrap().to_string();
    let said = "it does not take it for a server's, it is for clientAuth";
    assert!(problem.contains(said), "{problem}");
    agent.says(&[
        "the certificate that the server shows is for clientAuth, not for serverAuth",
        "`llmgw ctl cert server --ca DIR --host 127.0.0.1 --host HOST --out DIR`",
    ]);
}

#[test]
fn a_serial_that_is_denied_is_refused_as_revoked() {
    let good = Good::new();
    let said = format!(
        "the certificate with serial {} was revoked",
        good.agent.serial
    );
    Case {
        denied: &format!("{:?}", good.agent.serial),
        server_says: owned(&["was refused: ", &said]),
        agent_says: owned(&[&said, "the server's `agents.deny_serials`"]),
        ..good.case()
    }
    .check();
}

#[test]
fn plaintext_on_a_port_with_tls_and_the_reverse_are_told_on_both_sides() {
    let good = Good::new();
    Case {
        scheme: "http",
        server_says: owned(&["it speaks HTTP/2 without TLS", "`https://..`"]),
        agent_says: owned(&["the server hung up on plaintext: its port wants TLS, so write `server: https://127.0.0.1:"]),
        ..good.case()
    }
    .check();
    Case {
        server_trusts: None,
        server_says: owned(&["it speaks TLS, and `agents.tls` is not set"]),
        agent_says: owned(&[
            "the server speaks no TLS there: write `http://` in `server`, or set `agents.tls`",
        ]),
        ..good.case()
    }
    .check();
}

fn register(node: &str) -> AgentMessage {
    AgentMessage::Register(Box::new(Register {
        node: node.to_owned(),
        agent_version: "0.1.0".to_owned(),
        run: "run".to_owned(),
        machine: String::new(),
        advertise: "127.0.0.1".to_owned(),
        ports: PortRange {
            first: 21_000,
            last: 21_999,
        },
        engines: Vec::new(),
        models_dir: None,
        state_dir: String::new(),
        draining: false,
        inventory: Told::Unreadable(String::new()),
        shards: Vec::new(),
    }))
}

/// The server's first word to whoever registers with this certificate, by hand. An attempt that breaks off is none: agents try again too.
async fn first_word(fleet: &Fleet, shown: Option<&str>, node: &str) -> ServerMessage {
    let until = Instant::now() + PATIENCE;
    loop {
        match registered(fleet, shown, node).await {
            Ok(message) => return message,
            Err(broken) => assert!(Instant::now() < until, "no word: {broken}"),
        }
    }
}

async fn registered(
    fleet: &Fleet,
    shown: Option<&str>,
    node: &str,
) -> Result<ServerMessage, String> {
    let file = |name: String| fleet.path(&name);
    let own = shown.map(|name| {
        Identity::load(
            &file(format!("{name}.pem")),
            &file(format!("{name}-key.pem")),
        )
        .unwrap()
    });
    let trust = Trust::Authorities(Authorities::load(&fleet.path("ca.pem")).unwrap());
    let address: SocketAddr = fleet
        .agents_url()
        .rsplit('/')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let stream = connect(socket, "127.0.0.1", &trust, own.as_ref())
        .await
        .unwrap();
    let (up, outgoing) = tokio::sync::mpsc::channel(1);
    let first = Framed {
        session: SessionId(0),
        message: register(node),
    };
    up.send(first).await.unwrap();
    let keep_alive = KeepAlive {
        interval: PATIENCE,
        timeout: PATIENCE,
    };
    let dialled = link::dial(stream, keep_alive, outgoing).await;
    let (mut heard, _dialled) = dialled.map_err(|error| format!("{error:?}"))?;
    match tokio::time::timeout(PATIENCE, heard.next()).await {
        Ok(Heard::Message(framed)) => Ok(framed.message),
        other => Err(format!("{other:?}")),
    }
}

#[test]
fn a_fleet_over_tls_serves_and_nobody_else_speaks_for_its_nodes() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut fleet = Fleet::over_tls(PATIENT, Program::Fake);
    // Somebody who says nothing at all, all the while.
    let address: SocketAddr = fleet
        .agents_url()
        .rsplit('/')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let _silent = TcpStream::connect(address).unwrap();
    fleet.declare(&models(&[("fake", 2)]));
    fleet.ready(2);
    fleet.until("no other engine runs", |fleet| fleet.engines().len() == 2);
    fleet.asserts_chat();
    let engines = fleet.engines();
    let table = fleet.shown(&["nodes"]);
    assert_eq!(table.matches("in 89 d").count(), 2, "{table}");
    let nodes: Value = serde_json::from_str(&fleet.shown(&["nodes", "--format", "json"])).unwrap();
    for (node, row) in NODES.iter().zip(nodes.as_array().unwrap()) {
        let certificate = &row["certificate"];
        assert_eq!(certificate["name"], *node);
        assert_eq!(certificate["days_left"], 89);
        let end = certificate["not_after"].as_str().unwrap();
        assert!(end.starts_with("20") && end.ends_with('Z'), "{end}");
        assert!(!certificate["serial"].as_str().unwrap().is_empty());
    }

    // By hand, with a good certificate for the other node, and with none.
    for (shown, said) in [
        (Some("n2"), "the certificate is for `n2`, not for `n1`"),
        (
            None,
            "no certificate was shown, and the server asks for one: set `tls: {ca: ca.pem,",
        ),
    ] {
        let word = runtime.block_on(first_word(&fleet, shown, "n1"));
        let ServerMessage::Refused(refusal) = word else {
            panic!("{word:?}");
        };
        assert!(refusal.message.starts_with(said), "{refusal}");
        fleet.until(said, |fleet| {
            fleet.said("server").lines().any(|line| {
                let all = [said, "127.0.0.1:", "claimed node `n1`"];
                all.iter().all(|part| line.contains(part))
            })
        });
    }

    // As an agent, with another state directory.
    let state = fleet.path("thief");
    let (config, url) = (fleet.path("n2.yaml"), fleet.agents_url());
    let mut thief = llmgw();
    thief.args(["agent", "--node", "n1", "--server", &url]);
    thief.arg("--config").arg(config).arg("--state").arg(state);
    let mut thief = Process::start(&mut thief);
    thief.says(&["refused node `n1`", "claimed node `n1`, certificate `n2`"]);
    fleet.until("n1 is still there", |fleet| {
        fleet.node_state("n1") == "ready"
    });
    assert!(
        !fleet.said("n1").contains("superseded"),
        "{}",
        fleet.story()
    );
    assert_eq!(fleet.engines(), engines);
    fleet.asserts_chat();
}

#[test]
fn a_serial_that_is_denied_while_its_node_is_connected_ends_the_session_and_touches_no_engine() {
    let mut fleet = Fleet::over_tls(PATIENT, Program::Fake);
    fleet.declare(&models(&[("fake", 2)]));
    fleet.ready(2);
    fleet.until("no other engine runs", |fleet| fleet.engines().len() == 2);
    let engines = fleet.engines();
    let page = fleet.admin_get("/v1/nodes");
    let row = page["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["id"] == "n1");
    let serial = row.unwrap()["certificate"]["serial"]
        .as_str()
        .unwrap()
        .to_owned();
    fleet.deny(&[&serial]);
    fleet.until("n1 is cut off", |fleet| {
        fleet.node_state("n1") == "unreachable"
    });
    let said = format!("the certificate with serial {serial} was revoked");
    fleet.until("both say why", |fleet| {
        fleet.said("n1").contains(&said) && fleet.said("server").contains(&said)
    });
    fleet.until("n2 is still there", |fleet| {
        fleet.node_state("n2") == "ready"
    });
    assert_eq!(fleet.engines(), engines);
    fleet.asserts_chat();
    // A new certificate, which the agent finds at its next attempt.
    fleet
        .authority
        .as_ref()
        .unwrap()
        .agent("n1")
        .write(&fleet.path(""), "n1");
    fleet.until("n1 is back", |fleet| fleet.node_state("n1") == "ready");
}

fn run(arguments: &[&str], config: &Path) -> Output {
    llmgw()
        .args(arguments)
        .arg("--config")
        .arg(config)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

#[test]
fn what_is_wrong_with_the_files_is_said_at_the_start() {
    let good = Good::new();
    let directory = Directory::new();
    good.server.write(&directory.0, "server");
    good.agent.write(&directory.0, "agent");
    directory.write("ca.pem", &good.authority.pem);
    let tls = |text: &str| format!("tls: {text}\n");
    for (name, text, said) in [
        (
            "none",
            "node: n1\n".to_owned(),
            "tls: {ca: ca.pem, cert: agent.pem, key: agent-key.pem}",
        ),
        (
            "missing",
            tls("{ca: ca.pem, cert: gone.pem, key: agent-key.pem}"),
            "gone.pem",
        ),
        (
            "swapped",
            tls("{ca: ca.pem, cert: agent.pem, key: server-key.pem}"),
            "server-key.pem",
        ),
        (
            "leaf",
            tls("{ca: agent.pem, cert: agent.pem, key: agent-key.pem}"),
            "agent.pem",
        ),
    ] {
        let config = directory.write(&format!("{name}.yaml"), &text);
        let output = run(
            &["agent", "--node", "n1", "--server", "https://127.0.0.1:1"],
            &config,
        );
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{name}: {told}");
        assert!(told.contains(said), "{name}: {told}");
    }
    for (name, files, said) in [
        (
            "missing",
            "{cert: gone.pem, key: server-key.pem, ca: ca.pem}",
            "gone.pem",
        ),
        (
            "swapped",
            "{cert: server.pem, key: agent-key.pem, ca: ca.pem}",
            "agent-key.pem",
        ),
        (
            "leaf",
            "{cert: server.pem, key: server-key.pem, ca: server.pem}",
            "server.pem",
        ),
    ] {
        let text = format!("agents: {{tls: {files}}}\nmodels: []\n");
        let config = directory.write(&format!("server-{name}.yaml"), &text);
        for arguments in [&["server"][..], &["server", "--check"]] {
            let output = run(arguments, &config);
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{name}: {told}");
            assert!(
                told.contains("`agents.tls`") && told.contains(said),
                "{name}: {told}"
            );
        }
    }
}
