//! Certificates that are replaced under a running server: new handshakes see the new one, nobody who is connected notices, and half a change is none.

#[path = "harness/fleet.rs"]
mod fleet;
mod harness;
#[path = "harness/more.rs"]
mod more;

use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use fake_engine::authority::{Authority, Issued, Leaf, Use, write};
use fake_engine::{Kind, Running};
use llmgw_proto::identity::{Certificate, Fingerprint};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use fleet::{Fleet, NODES, PATIENT, Program};
use harness::{Client, End, Gateway, PATIENCE, Setup, chat};
use more::{Ran, ctl, engine, llmgw};

const HOST: &str = "localhost";
const CHAT: &str = "/v1/chat/completions";
const EXPIRY: &str = "llmgw_certificate_expiry_timestamp_seconds";
/// A stream that is still open after everything else, and ends when the engine is done.
const SLOW: &str = r#"{"token_ms":40,"tokens":100}"#;

type Over = StreamOwned<ClientConnection, TcpStream>;

/// A client that trusts this authority and offers these protocols.
fn trusting(authority: &Authority, alpn: &[&[u8]]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from(authority.der.clone()))
        .unwrap();
    let mut config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    // A session that is resumed shows no certificate.
    config.resumption = rustls::client::Resumption::disabled();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Arc::new(config)
}

/// A connection whose handshake is done, and the serial of the certificate that it saw.
fn shake(address: SocketAddr, config: Arc<ClientConfig>) -> (Over, String) {
    shake_as(HOST, address, config)
}

/// The same for a certificate of this host.
fn shake_as(host: &'static str, address: SocketAddr, config: Arc<ClientConfig>) -> (Over, String) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_nodelay(true).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let name = ServerName::try_from(host).unwrap();
    let mut session = ClientConnection::new(config, name).unwrap();
    while session.is_handshaking() {
        session.complete_io(&mut socket).unwrap();
    }
    let leaf = &session.peer_certificates().unwrap()[0];
    let serial = Certificate::from_der(leaf).unwrap().serial.to_string();
    (StreamOwned::new(session, socket), serial)
}

/// The serial that a handshake sees now.
fn seen(address: SocketAddr, authority: &Authority) -> String {
    shake(address, trusting(authority, &[b"http/1.1"])).1
}

/// A server over TLS for clients, with the authority of its certificate, and the first of them.
fn serving() -> (Running, Gateway, Authority, Issued) {
    let authority = Authority::new("test authority");
    let first = authority.server(&[HOST]);
    let engine = engine(Kind::Vllm, "{}");
    let gateway = Setup::new()
        .top("listen: {listen: \"127.0.0.1:0\", tls: {cert: server.pem, key: server-key.pem}}")
        .file("server.pem", &first.pem)
        .file("server-key.pem", &first.key_pem)
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .start();
    gateway.ready("fake", 1);
    (engine, gateway, authority, first)
}

fn count(text: &str, wanted: &str) -> usize {
    text.lines().filter(|line| line.contains(wanted)).count()
}

/// The row of a listener's certificate in the status.
fn status(gateway: &Gateway, serves: &str) -> serde_json::Value {
    let mut status = gateway.admin_get("/v1/status").json();
    let rows = status["certificates"].as_array_mut().unwrap();
    let row = rows.iter_mut().find(|row| row["use"] == serves);
    row.unwrap().take()
}

#[test]
fn a_stream_goes_on_to_its_end_while_new_handshakes_see_the_new_certificate() {
    let (_engine, gateway, authority, first) = serving();
    let (stream, serial) = shake(gateway.addr, trusting(&authority, &[b"http/1.1"]));
    assert_eq!(serial, first.serial);
    let mut client = Client::over(stream);
    client.post(CHAT, &chat(true), SLOW);
    assert_eq!(client.head().status, 200);
    client.body_until("data:");
    let expiry = gateway.metric(EXPIRY, "use=\"listen\",node=\"\"");
    let second = authority.issue(&Leaf {
        name: Some("llmgw server"),
        hosts: &[HOST],
        used: Use::Server,
        days: -1..300,
    });
    second.write(&gateway.dir, "server");
    gateway.until("a handshake sees the new certificate", || {
        seen(gateway.addr, &authority) == second.serial
    });
    gateway.until("the status has the new certificate", || {
        status(&gateway, "listen")["serial"] == *second.serial
    });
    assert!(gateway.metric(EXPIRY, "use=\"listen\"") > expiry + 200.0 * 86_400.0);
    let row = status(&gateway, "listen");
    let days = row["days_left"].as_i64().unwrap();
    assert!((298..=300).contains(&days), "{days}");
    let shown = ctl(&gateway, &["status"]);
    assert!(shown.stdout.contains(&second.serial), "{}", shown.stdout);
    // What was connected before is where it was: the stream ends well, and the next request is answered.
    let (text, end) = client.rest();
    assert_eq!(end, End::Complete, "{text}");
    assert!(text.contains("data: [DONE]"), "{text}");
    client.post(CHAT, &chat(false), "");
    assert_eq!(client.answer().status(), 200);
    let log = gateway.log();
    assert_eq!(
        count(&log, "new connections see the certificate with serial"),
        1,
        "{log}"
    );
    assert_eq!(count(&log, "ERROR"), 0, "{log}");
}

#[test]
fn half_a_change_keeps_the_old_certificate_and_is_said_only_if_it_stays() {
    let (_engine, gateway, authority, first) = serving();
    let second = authority.server(&[HOST]);
    write(&gateway.dir.join("server.pem"), &second.pem);
    let line = gateway.await_log("`listen.tls` was not reloaded");
    assert!(
        line.contains(&format!(
            "the certificate with serial {} stays",
            first.serial
        )),
        "{line}"
    );
    assert!(
        line.contains("server-key.pem: this key does not belong to the certificate in"),
        "{line}"
    );
    assert_eq!(seen(gateway.addr, &authority), first.serial);
    gateway.until("the status has the problem", || {
        let problem = status(&gateway, "listen")["problem"].to_string();
        problem.contains("does not belong")
    });
    let asked = ctl(&gateway, &["reload"]);
    assert_eq!(asked.status, 1, "{}", asked.stdout);
    assert!(
        asked.stderr.contains("`listen.tls`: ") && asked.stderr.contains("does not belong"),
        "{}",
        asked.stderr
    );
    write(&gateway.dir.join("server-key.pem"), &second.key_pem);
    gateway.until("a handshake sees the new certificate", || {
        seen(gateway.addr, &authority) == second.serial
    });
    gateway.until("the status has no problem", || {
        status(&gateway, "listen")["problem"].is_null()
    });
    assert_eq!(count(&gateway.log(), "`listen.tls` was not reloaded"), 1);
    assert_eq!(ctl(&gateway, &["reload"]).status, 0);
    // A file that breaks off, and one that is gone, are named.
    write(
        &gateway.dir.join("server.pem"),
        &first.pem[..first.pem.len() / 2],
    );
    gateway.await_log("server.pem: its PEM cannot be read");
    std::fs::remove_file(gateway.dir.join("server.pem")).unwrap();
    gateway.await_log("server.pem: it cannot be read: No such file");
    assert_eq!(seen(gateway.addr, &authority), second.serial);
    // A key that others can read is not taken either.
    second.write(&gateway.dir, "server");
    gateway.await_log("the files hold what is in force again");
    first.write(&gateway.dir, "server");
    gateway.until("the first certificate is back", || {
        seen(gateway.addr, &authority) == first.serial
    });
    let key = gateway.dir.join("server-key.pem");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    gateway.await_log(
        "server-key.pem: others than its owner get at this private key (mode 0644); run `chmod 600",
    );
}

#[test]
fn other_files_are_taken_with_the_configuration_that_names_them_or_both_are_not() {
    let (_engine, gateway, authority, first) = serving();
    let path = gateway.dir.join("llmgw.yaml");
    let yaml = std::fs::read_to_string(&path).unwrap();
    let moved = yaml
        .replace("server.pem", "other.pem")
        .replace("server-key.pem", "other-key.pem");
    gateway.write_config(&moved);
    gateway.await_log("the configuration was not reloaded, the last good one stays");
    let error = gateway.admin_get("/v1/status").json()["config"]["last_error"].to_string();
    assert!(
        error.contains("`listen.tls`: ") && error.contains("other.pem: it cannot be read"),
        "{error}"
    );
    assert_eq!(seen(gateway.addr, &authority), first.serial);
    let other = authority.server(&[HOST]);
    other.write(&gateway.dir, "other");
    let reloaded = ctl(&gateway, &["reload"]);
    assert_eq!(reloaded.status, 0, "{}", reloaded.stderr);
    assert_eq!(seen(gateway.addr, &authority), other.serial);
    // From TLS to plaintext and back is another listener: what listens stays as it is.
    let plain = yaml.replace(", tls: {cert: server.pem, key: server-key.pem}", "");
    gateway.write_config(&plain);
    let line = gateway.await_log("takes effect with the next start");
    assert!(line.contains("`tls` changed"), "{line}");
    assert_eq!(seen(gateway.addr, &authority), other.serial);
}

#[test]
fn a_client_without_tls_is_told_so_and_said_once() {
    let (_engine, gateway, authority, first) = serving();
    for _ in 0..2 {
        let mut client = gateway.client();
        client.request("GET", "/v1/models", &[], b"");
        let answer = client.answer();
        assert_eq!(answer.status(), 400);
        assert!(answer.text().contains("https://"), "{}", answer.text());
    }
    for bytes in [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
        b"SSH-2.0-OpenSSH\r\n",
    ] {
        let mut client = gateway.client();
        client.send(bytes);
        client.closed();
    }
    let line = gateway.await_log("wants TLS");
    assert!(
        line.contains("a client spoke HTTP/1.1 without TLS on `listen`"),
        "{line}"
    );
    assert_eq!(count(&gateway.log(), "wants TLS"), 1);
    // One that says nothing holds nobody up.
    let _silent = gateway.client();
    assert_eq!(seen(gateway.addr, &authority), first.serial);
}

/// How often an agent was let in.
fn connected(fleet: &Fleet, node: &str) -> usize {
    count(
        &fleet.said("server"),
        &format!("node `{node}` is connected"),
    )
}

#[test]
fn agents_stay_when_the_servers_certificate_is_renewed_and_go_with_the_authority_of_their_own() {
    let fleet = Fleet::over_tls(PATIENT, Program::Fake);
    let authority = fleet.authority.as_ref().unwrap();
    let page = fleet.metrics();
    for node in NODES {
        let series = format!("{EXPIRY}{{use=\"node\",node=\"{node}\"}} ");
        assert_eq!(count(&page, &series), 1, "{page}");
        // It is logged a moment after it is so.
        fleet.until("the log says so", |fleet| connected(fleet, node) == 1);
    }
    for serves in ["agents", "agents_ca"] {
        let series = format!("{EXPIRY}{{use=\"{serves}\",node=\"\"}} ");
        assert_eq!(count(&page, &series), 1, "{page}");
    }
    let renewed = authority.server(&["127.0.0.1"]);
    renewed.write(&fleet.path(""), "server");
    let line = format!(
        "`agents.tls`: new connections see the certificate with serial {}",
        renewed.serial
    );
    fleet.until("the renewed certificate is in force", |fleet| {
        fleet.said("server").contains(&line)
    });
    fleet.until("the status has the renewed certificate", |fleet| {
        fleet.shown(&["status"]).contains(&renewed.serial)
    });
    let address = fleet.agents_url().replace("https://", "");
    let config = trusting(authority, &[b"h2"]);
    assert_eq!(
        shake_as("127.0.0.1", address.parse().unwrap(), config).1,
        renewed.serial
    );
    for node in NODES {
        fleet.until("the node is still there", |fleet| {
            fleet.node_state(node) == "ready"
        });
        assert_eq!(connected(&fleet, node), 1, "{}", fleet.story());
    }
    // An authority that replaces theirs ends their sessions; with their own back they come back.
    let ca = fleet.path("ca.pem");
    write(&ca, &Authority::new("another authority").pem);
    fleet.until("both agents are cut off", |fleet| {
        fleet.said("server").contains("2 agents were cut off")
    });
    fleet.until("neither node is ready", |fleet| {
        NODES.iter().all(|node| fleet.node_state(node) != "ready")
    });
    write(&ca, &authority.pem);
    fleet.until("both nodes are ready", |fleet| {
        NODES.iter().all(|node| fleet.node_state(node) == "ready")
    });
}

/// `llmgw ctl` over https, with this authority's file.
fn ctl_over_tls(gateway: &Gateway, host: &str, ca: &str) -> Ran {
    let admin = format!("https://{host}:{}", gateway.admin.port());
    llmgw(
        &gateway.dir,
        &["ctl", "--admin", &admin, "--admin-ca", ca, "status"],
    )
}

#[test]
fn ctl_speaks_tls_with_an_authority_of_the_operators_and_says_what_it_met_instead() {
    let authority = Authority::new("test authority");
    let stranger = Authority::new("another authority");
    let first = authority.server(&[HOST]);
    let gateway = Setup::new()
        .top("admin: {listen: \"127.0.0.1:0\", tls: {cert: server.pem, key: server-key.pem}, token: s3cret}")
        .file("server.pem", &first.pem)
        .file("server-key.pem", &first.key_pem)
        .file("ca.pem", &authority.pem)
        .file("other-ca.pem", &stranger.pem)
        .model("fake", "")
        .endpoint("vllm", "http://127.0.0.1:9", "")
        .start();
    let ran = ctl_over_tls(&gateway, HOST, "ca.pem");
    assert_eq!(ran.status, 3, "{}", ran.stdout);
    assert!(
        ran.stderr.contains("LLMGW_ADMIN_TOKEN"),
        "the token is asked for over TLS too: {}",
        ran.stderr
    );
    let admin = format!("https://{HOST}:{}", gateway.admin.port());
    let asked = [
        "ctl",
        "--admin",
        &admin,
        "--admin-ca",
        "ca.pem",
        "--token",
        "s3cret",
        "status",
    ];
    let ran = llmgw(&gateway.dir, &asked);
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    assert!(ran.stdout.contains("admin     https://"), "{}", ran.stdout);
    assert!(ran.stdout.contains(&first.serial), "{}", ran.stdout);
    let fingerprint = |der: &[u8]| Fingerprint::of(der).to_string();
    // Which host is dialled, whose word is asked for, and what is said.
    let cases: [(&str, &str, &[&str]); 2] = [
        (
            HOST,
            "other-ca.pem",
            &[
                "was issued by `CN=test authority`",
                "other-ca.pem holds",
                &fingerprint(&stranger.der),
                &fingerprint(&first.der),
            ],
        ),
        (
            "127.0.0.1",
            "ca.pem",
            &[
                "`127.0.0.1` was dialled, and the server's certificate is for `localhost`",
                "`llmgw ctl cert server --ca DIR --host localhost --host 127.0.0.1 --out DIR`",
                &first.serial,
            ],
        ),
    ];
    for (host, ca, parts) in cases {
        let ran = ctl_over_tls(&gateway, host, ca);
        assert_eq!((ran.status, &*ran.stdout), (3, ""), "{}", ran.stderr);
        for part in parts {
            assert!(ran.stderr.contains(part), "`{part}` in {}", ran.stderr);
        }
    }
    // Without TLS it is told what to write.
    let plain = format!("http://{HOST}:{}", gateway.admin.port());
    let ran = llmgw(&gateway.dir, &["ctl", "--admin", &plain, "status"]);
    assert_eq!(ran.status, 3);
    assert!(ran.stderr.contains("write https://"), "{}", ran.stderr);
    // Who offers HTTP/2 there is not promised it.
    let (session, _) = shake(gateway.admin, trusting(&authority, &[b"h2", b"http/1.1"]));
    assert_eq!(session.conn.alpn_protocol(), Some(&b"http/1.1"[..]));
    // The admin address has its certificate renewed as well.
    let second = authority.server(&[HOST]);
    second.write(&gateway.dir, "server");
    gateway.await_log(&format!(
        "`admin.tls`: new connections see the certificate with serial {}",
        second.serial
    ));
    assert_eq!(seen(gateway.admin, &authority), second.serial);
}

#[test]
fn ctl_says_that_an_admin_address_speaks_no_tls() {
    let authority = Authority::new("test authority");
    let gateway = Setup::new()
        .file("ca.pem", &authority.pem)
        .model("fake", "")
        .endpoint("vllm", "http://127.0.0.1:9", "")
        .start();
    let ran = ctl_over_tls(&gateway, HOST, "ca.pem");
    assert_eq!((ran.status, &*ran.stdout), (3, ""), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("no TLS is spoken there: write http://"),
        "{}",
        ran.stderr
    );
}

/// Writes a configuration with this line beside the files of a certificate, and checks it.
fn check(dir: &Path, line: &str, issued: &Issued) -> Ran {
    issued.write(dir, "server");
    let yaml = format!(
        "{line}\nmodels:\n- {{name: m, endpoints: [{{url: \"http://127.0.0.1:9\", engine: vllm}}]}}\n"
    );
    std::fs::write(dir.join("llmgw.yaml"), yaml).unwrap();
    llmgw(dir, &["server", "--config", "llmgw.yaml", "--check"])
}

#[test]
fn a_check_names_certificates_that_would_not_serve_with_the_way_out() {
    const CLIENTS: &str =
        "listen: {listen: \"127.0.0.1:0\", tls: {cert: server.pem, key: server-key.pem}}";
    const ALL: &str =
        "listen: {listen: \"0.0.0.0:0\", tls: {cert: server.pem, key: server-key.pem}}";
    const FAR: &str =
        "admin: {listen: \"192.0.2.7:1\", tls: {cert: server.pem, key: server-key.pem}}";
    const AGENTS: &str = "agents: {listen: \"127.0.0.1:0\", tls: {cert: server.pem, key: server-key.pem, ca: ca.pem}}";
    const SWAPPED: &str = "agents: {listen: \"127.0.0.1:0\", tls: {cert: server.pem, key: server-key.pem, ca: server.pem}}";
    let dir = std::env::temp_dir().join(format!("llmgw-check-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let authority = Authority::new("test authority");
    write(&dir.join("ca.pem"), &authority.pem);
    let issue = |hosts: &[&str], used, days| {
        authority.issue(&Leaf {
            name: Some("s"),
            hosts,
            used,
            days,
        })
    };
    // Status, and what is said; a warning leaves it at 0.
    let cases = [
        (CLIENTS, issue(&[HOST], Use::Server, -1..90), 0, ""),
        (
            CLIENTS,
            issue(&[HOST], Use::Server, -9..20),
            0,
            "warning: `listen.tls`: server.pem: the certificate with serial ",
        ),
        (
            CLIENTS,
            issue(&[HOST], Use::Server, -9..-1),
            0,
            "`llmgw ctl cert renew server.pem --ca DIR` makes it last longer",
        ),
        (
            CLIENTS,
            issue(&[HOST], Use::Server, 1..9),
            0,
            "is not valid before",
        ),
        (
            ALL,
            issue(&[HOST, "127.0.0.1"], Use::Server, -1..90),
            0,
            "is only for localhost, 127.0.0.1, so clients on other machines refuse it",
        ),
        (
            FAR,
            issue(&["192.0.2.8"], Use::Server, -1..90),
            0,
            "`llmgw ctl cert server --ca DIR --host 192.0.2.8 --host 192.0.2.7 --out DIR`",
        ),
        (
            CLIENTS,
            issue(&[], Use::Server, -1..90),
            0,
            "for no host at all",
        ),
        (
            AGENTS,
            issue(&[HOST], Use::Agent, -1..90),
            2,
            "`agents.tls`: server.pem: the certificate of `s` is for clientAuth only",
        ),
        (
            SWAPPED,
            issue(&[HOST], Use::Server, -1..90),
            2,
            "server.pem: the certificate of `s` in it is no authority's",
        ),
        (AGENTS, issue(&[HOST], Use::Server, -1..90), 0, ""),
    ];
    for (line, issued, status, said) in cases {
        let ran = check(&dir, line, &issued);
        assert_eq!(ran.status, status, "{line} {}", ran.stderr);
        assert_eq!(
            ran.stderr.is_empty(),
            said.is_empty(),
            "{line} {}",
            ran.stderr
        );
        assert!(ran.stderr.contains(said), "`{said}` in {}", ran.stderr);
    }
    let (one, other) = (authority.server(&[HOST]), authority.server(&[HOST]));
    one.write(&dir, "server");
    write(&dir.join("server-key.pem"), &other.key_pem);
    let ran = llmgw(&dir, &["server", "--config", "llmgw.yaml", "--check"]);
    assert_eq!(ran.status, 2);
    assert!(
        ran.stderr
            .contains("server-key.pem: this key does not belong to the certificate in"),
        "{}",
        ran.stderr
    );
    std::fs::remove_dir_all(&dir).unwrap();
}
