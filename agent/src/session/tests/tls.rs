//! Sessions over TLS: what is shown, whom the agent talks to, and what becomes of a session whose certificate is renewed.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;

use fake_engine::authority::{Authority, Issued, write};
use llmgw_proto::identity::listening::AgentsTls;
use llmgw_proto::identity::verdict::Shown;
use llmgw_proto::identity::{Authorities, Identity};

use super::{
    Accepting, AgentMessage, Arc, CancellationToken, Duration, Ended, Heard, Held, Node, Ordering,
    PATIENCE, QUIET, Refusal, RefusalCode, Running, Server, ServerMessage, Session, SessionId,
    ShardState, SocketAddr, TcpListener, Welcome, link, mpsc, session, spec, status,
};
use crate::config::AgentTls;
use crate::session::backoff::Outcome;

/// The files of a node, gone afterwards.
struct Files(PathBuf);

impl Files {
    fn new() -> Files {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-session-tls-{}-{count}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir_all(&directory).unwrap();
        Files(directory)
    }

    fn of(authority: &Authority, issued: &Issued) -> Files {
        let files = Files::new();
        write(&files.0.join("ca.pem"), &authority.pem);
        issued.write(&files.0, "agent");
        files
    }

    fn identity(issued: &Issued) -> Identity {
        let files = Files::new();
        issued.write(&files.0, "x");
        Identity::load(&files.0.join("x.pem"), &files.0.join("x-key.pem")).unwrap()
    }

    fn tls(&self) -> AgentTls {
        AgentTls {
            ca: self.0.join("ca.pem"),
            cert: self.0.join("agent.pem"),
            key: self.0.join("agent-key.pem"),
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A server with TLS whose sessions a test holds by hand. What each showed comes in the same order.
async fn server(authority: &Authority, hosts: &[&str]) -> (Server, mpsc::UnboundedReceiver<Shown>) {
    let own = Files::identity(&authority.server(hosts));
    let trusted = Authorities::from_pem(authority.pem.as_bytes()).unwrap();
    let tls = Arc::new(AgentsTls::new(own, Some(trusted)).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sessions, held) = mpsc::unbounded_channel();
    let (shown, showings) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            let Ok(accepted) = tls.accept(socket).await else {
                continue;
            };
            let _ = shown.send(accepted.showing.shown);
            let connection = CancellationToken::new();
            let accepting = Accepting {
                sessions: sessions.clone(),
                connection: connection.clone(),
            };
            tokio::spawn(async move {
                tokio::select! {
                    _ = link::serve(accepted.stream, Arc::new(accepting), QUIET) => {}
                    () = connection.cancelled() => {}
                }
            });
        }
    });
    let server = Server {
        address,
        sessions: held,
    };
    (server, showings)
}

fn agent(
    address: SocketAddr,
    files: &Files,
    node: &Arc<Node>,
    look_every: Duration,
) -> Arc<Session> {
    let mut session = session(address, node, QUIET);
    let options = &mut Arc::get_mut(&mut session).unwrap().options;
    options.server = format!("https://{address}").parse().unwrap();
    options.tls = Some(files.tls());
    options.look_every = look_every;
    session
}

fn serial(shown: &Shown) -> String {
    match shown {
        Shown::Known(certificate) => certificate.serial.to_string(),
        other => panic!("it is not known: {other:?}"),
    }
}

async fn attempt(session: &Session) -> Ended {
    let stop = CancellationToken::new();
    let mut welcomed_at = None;
    let attempt = session.attempt(&stop, &mut welcomed_at);
    let ended = tokio::time::timeout(PATIENCE, attempt).await;
    ended.expect("it goes on")
}

async fn welcome(held: &Held) {
    let welcome = ServerMessage::Welcome(Welcome {
        heartbeat_ms: 60_000,
        server_version: "0.1.0".to_owned(),
    });
    held.say(welcome).await;
}

#[tokio::test]
async fn an_agent_shows_what_is_in_its_files_at_that_time() {
    let authority = Authority::new("fleet");
    let (first, second) = (authority.agent("gpu-01"), authority.agent("gpu-01"));
    let (mut server, mut shown) = server(&authority, &["127.0.0.1"]).await;
    let files = Files::of(&authority, &first);
    let (node, _asked) = Node::new();
    let running = Running::start(agent(server.address, &files, &node, PATIENCE));
    let (held, register) = server.welcomed(60_000).await;
    assert_eq!(register.node, "gpu-01");
    assert_eq!(serial(&shown.recv().await.unwrap()), first.serial);
    second.write(&files.0, "agent");
    held.connection.cancel();
    let _again = server.welcomed(60_000).await;
    assert_eq!(serial(&shown.recv().await.unwrap()), second.serial);
    running.stop.cancel();
    running.ends().await;
}

#[tokio::test]
async fn a_renewed_certificate_is_shown_in_a_new_session_and_the_old_one_lasts_until_that_is_there()
{
    let authority = Authority::new("fleet");
    let (first, second) = (authority.agent("gpu-01"), authority.agent("gpu-01"));
    let (mut server, mut shown) = server(&authority, &["127.0.0.1"]).await;
    let files = Files::of(&authority, &first);
    let (node, _asked) = Node::new();
    let look_every = Duration::from_millis(20);
    let running = Running::start(agent(server.address, &files, &node, look_every));
    let (mut old, before) = server.welcomed(60_000).await;
    assert_eq!(serial(&shown.recv().await.unwrap()), first.serial);
    old.heartbeat().await;
    second.write(&files.0, "agent");
    let (mut held, register) = server.registered().await;
    assert_eq!(serial(&shown.recv().await.unwrap()), second.serial);
    assert_eq!(register.run, before.run, "it is the same agent");

    // Not welcomed yet: what changes is still told in the old session.
    node.runs("m/0/0", ShardState::Ready);
    let ready = status(&spec("m/0/0"), ShardState::Ready);
    node.changes.send_replace(vec![ready]);
    assert_eq!(old.report().await.status.shard, "m/0/0");

    // As a server does it: the old one is told that it is superseded, and ended.
    held.id = SessionId(8);
    welcome(&held).await;
    let superseded = ServerMessage::Refused(Refusal {
        code: RefusalCode::Superseded,
        message: "the same agent has a newer session".to_owned(),
        certificate: None,
        claimed: "gpu-01".to_owned(),
    });
    // It may be gone already.
    let session = old.id;
    let message = superseded;
    let _ = old
        .down
        .send(llmgw_proto::convert::Framed { session, message })
        .await;
    held.heartbeat().await;
    let end = tokio::time::timeout(PATIENCE, async {
        while matches!(old.heard.next().await, Heard::Message(_)) {}
    });
    end.await.expect("the old session is let go of");
    assert!(*running.session.connected().borrow());
    running.stop.cancel();
    held.until(|message| matches!(message, AgentMessage::Goodbye(_)).then_some(()))
        .await;
    drop(held);
    running.ends().await;
    assert!(
        server.sessions.try_recv().is_err(),
        "nothing more was dialled"
    );
}

#[tokio::test]
async fn a_renewed_certificate_that_the_server_refuses_costs_no_session() {
    let authority = Authority::new("fleet");
    let (mut server, mut shown) = server(&authority, &["127.0.0.1"]).await;
    let first = authority.agent("gpu-01");
    let files = Files::of(&authority, &first);
    let (node, _asked) = Node::new();
    let look_every = Duration::from_millis(20);
    let running = Running::start(agent(server.address, &files, &node, look_every));
    let (mut old, _) = server.welcomed(60_000).await;
    shown.recv().await.unwrap();
    authority.agent("gpu-02").write(&files.0, "agent");
    let (new, _) = server.registered().await;
    new.say(ServerMessage::Refused(Refusal {
        code: RefusalCode::Identity,
        message: "the certificate is for `gpu-02`, not for `gpu-01`".to_owned(),
        certificate: Some("gpu-02".to_owned()),
        claimed: "gpu-01".to_owned(),
    }))
    .await;
    drop(new);
    // The old one is still served, and the new one is not tried again at once.
    let ready = status(&spec("m/0/0"), ShardState::Ready);
    node.runs("m/0/0", ShardState::Ready);
    node.changes.send_replace(vec![ready]);
    assert_eq!(old.report().await.status.shard, "m/0/0");
    assert!(*running.session.connected().borrow());
    // What the server says of the old session from now on is about the old certificate.
    let is_first_again = async {
        let serial = || {
            running
                .session
                .lock_shown()
                .as_ref()
                .unwrap()
                .serial
                .to_string()
        };
        while serial() != first.serial {
            tokio::time::sleep(look_every).await;
        }
    };
    let restored = tokio::time::timeout(PATIENCE, is_first_again).await;
    restored.expect("it explains refusals with a certificate that has no session");
    // The mistake is corrected, and seen at the next look.
    authority.agent("gpu-01").write(&files.0, "agent");
    let (corrected, _) = server.registered().await;
    drop(corrected);
    running.stop.cancel();
    old.until(|message| matches!(message, AgentMessage::Goodbye(_)).then_some(()))
        .await;
    drop(old);
    running.ends().await;
}

/// The old session ends while the new one waits for a welcome that does not come.
#[tokio::test]
async fn an_agent_that_is_told_to_stop_between_two_sessions_waits_for_neither() {
    const NEVER: Duration = Duration::from_secs(3_600);
    // Enough for whatever has been sent to be read.
    const TURNS: usize = 10_000;
    let authority = Authority::new("fleet");
    let (mut server, mut shown) = server(&authority, &["127.0.0.1"]).await;
    let files = Files::of(&authority, &authority.agent("gpu-01"));
    let (node, _asked) = Node::new();
    let mut session = agent(server.address, &files, &node, Duration::from_millis(20));
    Arc::get_mut(&mut session).unwrap().options.patience = NEVER;
    let running = Running::start(session);
    let (old, _) = server.welcomed(60_000).await;
    shown.recv().await.unwrap();
    authority.agent("gpu-01").write(&files.0, "agent");
    let (_new, _) = server.registered().await;
    old.say(ServerMessage::Leaving("the server stops".to_owned()))
        .await;
    for _ in 0..TURNS {
        tokio::task::yield_now().await;
    }
    running.stop.cancel();
    running.ends().await;
}

#[tokio::test]
async fn files_that_can_not_be_used_are_named_and_tried_again() {
    let authority = Authority::new("fleet");
    let issued = authority.agent("gpu-01");
    let (mut server, _shown) = server(&authority, &["127.0.0.1"]).await;
    let files = Files::of(&authority, &issued);
    let key = files.tls().key;
    fs::remove_file(&key).unwrap();
    let (node, _asked) = Node::new();
    let session = agent(server.address, &files, &node, PATIENCE);
    let Ended::Broken(why) = attempt(&session).await else {
        panic!("it was dialled");
    };
    assert!(
        why.starts_with("`tls`: ") && why.contains("agent-key.pem"),
        "{why}"
    );
    let running = Running::start(session);
    issued.write(&files.0, "agent");
    let _held = server.welcomed(60_000).await;
    running.stop.cancel();
    running.ends().await;
}

#[tokio::test]
async fn servers_that_are_not_to_be_trusted_are_refused_and_the_waits_grow_as_after_a_refusal() {
    let (authority, other) = (Authority::new("fleet"), Authority::new("other"));
    let (node, _asked) = Node::new();
    for (issuer, hosts, said) in [
        (
            &authority,
            &["ctl.example"][..],
            "`127.0.0.1` was dialled, and the server's certificate is for `ctl.example`",
        ),
        (
            &other,
            &["127.0.0.1"],
            "copy the server's ca.pem to this node",
        ),
    ] {
        let (server, _shown) = server(issuer, hosts).await;
        let files = Files::of(&authority, &authority.agent("gpu-01"));
        let session = agent(server.address, &files, &node, PATIENCE);
        let ended = attempt(&session).await;
        let Ended::Distrusted(why) = &ended else {
            panic!("{ended:?}");
        };
        assert!(why.contains(said), "{why}");
        assert_eq!(ended.outcome(None), Outcome::Refused);
    }
    let ended = Ended::Broken("the network is down".to_owned());
    assert_eq!(ended.outcome(None), Outcome::Broke);
}

#[tokio::test]
async fn a_refusal_over_identity_is_told_with_what_was_shown_and_this_machines_clock() {
    let authority = Authority::new("fleet");
    let issued = authority.agent("gpu-02");
    let (mut server, _shown) = server(&authority, &["127.0.0.1"]).await;
    let files = Files::of(&authority, &issued);
    let (node, _asked) = Node::new();
    let session = agent(server.address, &files, &node, PATIENCE);
    let refusing = async {
        let (held, _) = server.registered().await;
        held.say(ServerMessage::Refused(Refusal {
            code: RefusalCode::Identity,
            message: "the certificate is for `gpu-02`, not for `gpu-01`".to_owned(),
            certificate: Some("gpu-02".to_owned()),
            claimed: "gpu-01".to_owned(),
        }))
        .await;
        held
    };
    let (ended, _held) = tokio::join!(attempt(&session), refusing);
    assert_eq!(ended.outcome(None), Outcome::Refused);
    let told = session.told(&ended);
    for said in [
        "(identity; claimed node `gpu-01`, certificate `gpu-02`); this agent showed ",
        "agent.pem (for `gpu-02`, serial ",
        &issued.serial,
        "and its clock says 20",
    ] {
        assert!(told.contains(said), "{said}: {told}");
    }
}

#[tokio::test]
async fn plaintext_to_a_port_with_tls_and_the_reverse_are_explained() {
    let authority = Authority::new("fleet");
    let files = Files::of(&authority, &authority.agent("gpu-01"));
    let (node, _asked) = Node::new();
    let (with_tls, _shown) = server(&authority, &["127.0.0.1"]).await;
    let plain = session(with_tls.address, &node, QUIET);
    let Ended::Broken(why) = attempt(&plain).await else {
        panic!("it was served");
    };
    let right = format!(
        "its port wants TLS, so write `server: https://{}`",
        with_tls.address
    );
    assert!(why.contains(&right), "{why}");

    let without = Server::start(QUIET).await;
    let secure = agent(without.address, &files, &node, PATIENCE);
    let Ended::Broken(why) = attempt(&secure).await else {
        panic!("it was served");
    };
    assert!(
        why.starts_with("the server speaks no TLS there: write `http://`"),
        "{why}"
    );
}

#[tokio::test]
async fn https_without_files_dials_nobody() {
    let (node, _asked) = Node::new();
    let server = Server::start(QUIET).await;
    let mut session = session(server.address, &node, QUIET);
    let options = &mut Arc::get_mut(&mut session).unwrap().options;
    options.server = format!("https://{}", server.address).parse().unwrap();
    let Ended::Broken(why) = attempt(&session).await else {
        panic!("it was dialled");
    };
    assert_eq!(why, "`tls`: it is not set");
}
