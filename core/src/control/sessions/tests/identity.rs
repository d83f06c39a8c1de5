//! Who is let in over TLS, who is not, and who is cut off: nothing that somebody else says may reach the table of nodes.

use std::collections::BTreeSet;

use fake_engine::authority::{Authority, Issued, Leaf, Use};
use llmgw_proto::identity::dialling::{Trust, connect};
use llmgw_proto::identity::listening::{AgentsTls, Showing};
use llmgw_proto::identity::{Authorities, Certificate, Identity, Serial};
use llmgw_proto::session::{Refusal, SessionId};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::super::Peer;
use super::super::door::Gate;
use super::super::keeper::{Input, Keeper};
use super::super::seats::{Seat, Seats};
use super::{
    Agent, AgentMessage, Arc, AsyncReadExt, AsyncWriteExt, Cause, Door, Goodbye, Heartbeat,
    NodeState, RefusalCode, Server, ServerMessage, SessionsOptions, ShardReport, ShardState,
    TcpStream, Told, quiet, read_to_the_end, register, spec, status,
};

use crate::control::observed::NodeEvent;

fn identity(issued: &Issued) -> Identity {
    Identity {
        chain: vec![CertificateDer::from(issued.der.clone())],
        key: Arc::new(PrivateKeyDer::try_from(issued.key_der.clone()).unwrap()),
        certificate: Certificate::from_der(&issued.der).unwrap(),
    }
}

fn authorities(of: &[&Authority]) -> Authorities {
    let text: String = of.iter().map(|authority| authority.pem.as_str()).collect();
    Authorities::from_pem(text.as_bytes()).unwrap()
}

/// A server with TLS that asks for certificates, and the authority that it trusts.
struct Guarded {
    server: Server,
    authority: Authority,
    tls: Arc<AgentsTls>,
}

impl Guarded {
    async fn start() -> Guarded {
        Guarded::with(SessionsOptions {
            require_identity: true,
            ..quiet()
        })
        .await
    }

    async fn with(options: SessionsOptions) -> Guarded {
        let authority = Authority::new("fleet");
        let own = identity(&authority.server(&["127.0.0.1"]));
        let tls = AgentsTls::new(own, Some(authorities(&[&authority]))).unwrap();
        let tls = Arc::new(tls);
        let server = Server::behind(Door::Tls(tls.clone()), options).await;
        Guarded {
            server,
            authority,
            tls,
        }
    }

    async fn dial(&self, shown: Option<&Issued>, first: AgentMessage) -> Agent {
        let socket = TcpStream::connect(self.server.address).await.unwrap();
        let trust = Trust::Authorities(authorities(&[&self.authority]));
        let own = shown.map(identity);
        let stream = connect(socket, "127.0.0.1", &trust, own.as_ref()).await;
        Agent::over(stream.unwrap(), first).await
    }

    /// One that is let in.
    async fn agent(&self, shown: &Issued, node: &str) -> Agent {
        let mut agent = self.dial(Some(shown), register(node)).await;
        let welcome = agent.hear().await;
        assert!(
            matches!(welcome.message, ServerMessage::Welcome(_)),
            "{welcome:?}"
        );
        agent.session = welcome.session;
        agent
    }

    async fn refusal(&self, shown: Option<&Issued>, first: AgentMessage) -> Refusal {
        last_words(&mut self.dial(shown, first).await).await
    }
}

async fn last_words(agent: &mut Agent) -> Refusal {
    let ServerMessage::Refused(refusal) = agent.hear().await.message else {
        panic!("it was not refused");
    };
    agent.hear_the_end().await;
    refusal
}

fn serials(of: &[&Issued]) -> BTreeSet<Serial> {
    of.iter()
        .map(|issued| issued.serial.parse().unwrap())
        .collect()
}

#[tokio::test]
async fn a_certificate_of_the_authority_lets_its_own_node_in_and_the_table_knows_it() {
    let mut guarded = Guarded::start().await;
    let issued = guarded.authority.agent("n1");
    let _agent = guarded.agent(&issued, "n1").await;
    let observed = guarded.server.until_state("n1", NodeState::Ready).await;
    let certificate = observed.nodes["n1"].certificate.clone().unwrap();
    assert_eq!(certificate.name, "n1");
    assert_eq!(certificate.serial.to_string(), issued.serial);
    let read = Certificate::from_der(&issued.der).unwrap();
    assert_eq!(certificate.not_after, read.not_after);
}

#[tokio::test]
async fn who_is_not_the_node_neither_registers_nor_reports_nor_takes_its_session() {
    let mut guarded = Guarded::start().await;
    let own = guarded.authority.agent("n1");
    let agent = guarded.agent(&own, "n1").await;
    guarded.server.until_state("n1", NodeState::Ready).await;

    let stranger = Authority::new("fleet");
    let expired = Leaf {
        name: Some("n1"),
        days: -9..-1,
        ..Leaf::agent()
    };
    let servers = Leaf {
        name: Some("n1"),
        used: Use::Server,
        ..Leaf::agent()
    };
    let nameless = Leaf {
        hosts: &["n1"],
        ..Leaf::agent()
    };
    let longer = guarded.authority.agent("n11");
    let beats = AgentMessage::Heartbeat(Box::default());
    for (shown, first, code, said) in [
        (
            Some(guarded.authority.agent("n2")),
            register("n1"),
            RefusalCode::Identity,
            "for `n2`, not for `n1`",
        ),
        (
            Some(guarded.authority.agent("N1")),
            register("n1"),
            RefusalCode::Identity,
            "for `N1`, not for `n1`",
        ),
        (
            Some(longer),
            register("n1"),
            RefusalCode::Identity,
            "for `n11`, not for `n1`",
        ),
        (
            None,
            register("n1"),
            RefusalCode::Identity,
            "no certificate was shown",
        ),
        (
            Some(stranger.agent("n1")),
            register("n1"),
            RefusalCode::Identity,
            "was not signed by the key of the authority",
        ),
        (
            Some(guarded.authority.issue(&expired)),
            register("n1"),
            RefusalCode::Identity,
            "the certificate expired at ",
        ),
        (
            Some(guarded.authority.issue(&servers)),
            register("n1"),
            RefusalCode::Identity,
            "is for serverAuth, not for clientAuth",
        ),
        (
            Some(guarded.authority.issue(&nameless)),
            register("n1"),
            RefusalCode::Identity,
            "has no common name",
        ),
        (
            Some(guarded.authority.agent("n2")),
            beats.clone(),
            RefusalCode::Malformed,
            "it began with `heartbeat`",
        ),
        (
            None,
            beats,
            RefusalCode::Identity,
            "no certificate was shown",
        ),
        (
            None,
            status("m/0/0", ShardState::Ready, 1),
            RefusalCode::Identity,
            "no certificate was shown",
        ),
    ] {
        let refusal = guarded.refusal(shown.as_ref(), first).await;
        assert_eq!(refusal.code, code, "{refusal}");
        assert!(refusal.message.contains(said), "{said}: {refusal}");
        assert_eq!(refusal.certificate.is_some(), shown.is_some(), "{refusal}");
    }

    // The session that there was goes on, and nothing else is known.
    agent.say(status("m/0/0", ShardState::Ready, 1)).await;
    let observed = guarded
        .server
        .until("its own words", |observed| {
            !observed.nodes["n1"].shards.is_empty()
        })
        .await;
    assert_eq!(observed.nodes["n1"].session, Some(agent.session));
    assert_eq!(observed.nodes.len(), 1);
}

#[tokio::test]
async fn a_stranger_is_not_listened_to_for_long() {
    let guarded = Guarded::start().await;
    let big = |node| {
        let AgentMessage::Register(mut register) = register(node) else {
            panic!("it is a registration");
        };
        register.inventory = Told::Unreadable(String::new());
        let spec = spec("m/0/0", vec!["x".repeat(30_000); 10]);
        let AgentMessage::ShardStatus(report) = status("m/0/0", ShardState::Ready, 1) else {
            panic!("it is a report");
        };
        let report = ShardReport {
            spec: Some(spec),
            ..*report
        };
        register.shards = vec![report];
        AgentMessage::Register(register)
    };
    let refusal = guarded.refusal(None, big("n1")).await;
    assert_eq!(
        (refusal.code, refusal.claimed.as_str()),
        (RefusalCode::Identity, "")
    );
    // Whoever is known may say as much.
    let issued = guarded.authority.agent("n1");
    let mut agent = guarded.dial(Some(&issued), big("n1")).await;
    assert!(matches!(
        agent.hear().await.message,
        ServerMessage::Welcome(_)
    ));
}

#[tokio::test]
async fn words_for_another_nodes_session_change_nothing() {
    let mut guarded = Guarded::start().await;
    let one = guarded.agent(&guarded.authority.agent("n1"), "n1").await;
    let mut other = guarded.agent(&guarded.authority.agent("n2"), "n2").await;
    let own = other.session;
    // It knows the number of the other session, and speaks in its name.
    other.session = one.session;
    let goodbye = AgentMessage::Goodbye(Goodbye {
        reason: "forged".to_owned(),
        engines_stay: false,
    });
    other.say(status("forged/0/0", ShardState::Ready, 1)).await;
    other
        .say(AgentMessage::Heartbeat(Box::new(Heartbeat {
            draining: true,
            ..Heartbeat::default()
        })))
        .await;
    other.say(goodbye).await;
    other.session = own;
    other.say(status("m/0/0", ShardState::Ready, 1)).await;
    let observed = guarded
        .server
        .until("its own words", |observed| {
            observed
                .nodes
                .get("n2")
                .is_some_and(|node| node.shards.contains_key("m/0/0"))
        })
        .await;
    let node = &observed.nodes["n1"];
    assert_eq!(
        (node.state, node.session),
        (NodeState::Ready, Some(one.session))
    );
    assert!(node.shards.is_empty() && !node.draining);
    assert!(!observed.nodes["n2"].shards.contains_key("forged/0/0"));
}

#[tokio::test]
async fn without_the_duty_to_show_one_a_wrong_certificate_is_refused_all_the_same() {
    let guarded = Guarded::with(quiet()).await;
    let mut nobody = guarded.dial(None, register("n1")).await;
    assert!(matches!(
        nobody.hear().await.message,
        ServerMessage::Welcome(_)
    ));
    let wrong = guarded.authority.agent("n2");
    let refusal = guarded.refusal(Some(&wrong), register("n3")).await;
    assert!(
        refusal.message.contains("for `n2`, not for `n3`"),
        "{refusal}"
    );
    let stranger = Authority::new("other").agent("n3");
    let refusal = guarded.refusal(Some(&stranger), register("n3")).await;
    assert!(
        refusal.message.contains("was issued by `CN=other`"),
        "{refusal}"
    );
}

#[tokio::test]
async fn a_serial_that_is_denied_ends_its_session_at_once_and_lets_nobody_in_again() {
    let mut guarded = Guarded::start().await;
    let (lost, kept) = (guarded.authority.agent("n1"), guarded.authority.agent("n2"));
    let mut cut = guarded.agent(&lost, "n1").await;
    let _stays = guarded.agent(&kept, "n2").await;
    guarded.server.until_state("n2", NodeState::Ready).await;
    guarded.server.sessions.deny(serials(&[&lost]));
    let refusal = last_words(&mut cut).await;
    assert_eq!(refusal.code, RefusalCode::Identity);
    let said = format!("the certificate with serial {} was revoked", lost.serial);
    assert!(refusal.message.starts_with(&said), "{refusal}");
    let observed = guarded
        .server
        .until_state("n1", NodeState::Unreachable)
        .await;
    assert_eq!(observed.nodes["n2"].state, NodeState::Ready);
    let absence = observed.nodes["n1"].absence.clone().unwrap();
    assert_eq!(absence.cause, Cause::Refused(refusal.message.clone()));
    let again = guarded.refusal(Some(&lost), register("n1")).await;
    assert!(again.message.starts_with(&said), "{again}");
    // Whoever looks for the node sees what its agent is told.
    let is_shown = |observed: &crate::control::observed::Observed| {
        let absence = observed.nodes["n1"].absence.as_ref();
        absence.and_then(|absence| absence.refused.as_ref()) == Some(&again.message)
    };
    guarded.server.until("its refusal is shown", is_shown).await;
    // A new one for the same node does, and so does the old one once it is no longer listed.
    let _new = guarded.agent(&guarded.authority.agent("n1"), "n1").await;
    guarded.server.sessions.deny(BTreeSet::new());
    let _old = guarded.agent(&lost, "n1").await;
}

#[tokio::test]
async fn serials_that_are_denied_from_the_start_let_nobody_in() {
    let authority = Authority::new("fleet");
    let lost = authority.agent("n1");
    let own = identity(&authority.server(&["127.0.0.1"]));
    let tls = Arc::new(AgentsTls::new(own, Some(authorities(&[&authority]))).unwrap());
    let options = SessionsOptions {
        require_identity: true,
        denied: serials(&[&lost]),
        ..quiet()
    };
    let server = Server::behind(Door::Tls(tls.clone()), options).await;
    let guarded = Guarded {
        server,
        authority,
        tls,
    };
    let refusal = guarded.refusal(Some(&lost), register("n1")).await;
    assert!(refusal.message.contains("was revoked"), "{refusal}");
}

#[tokio::test]
async fn an_authority_that_is_replaced_ends_the_sessions_that_it_vouched_for_and_no_others() {
    let mut guarded = Guarded::start().await;
    let next = Authority::new("next");
    let both = Some(authorities(&[&guarded.authority, &next]));
    let own = identity(&guarded.authority.server(&["127.0.0.1"]));
    let trust = |authorities| {
        let (sessions, own) = (&guarded.server.sessions, own.clone());
        sessions.trust(|| guarded.tls.replace(own, authorities))
    };
    assert_eq!(trust(both).unwrap(), 0);
    let mut cut = guarded.agent(&guarded.authority.agent("n1"), "n1").await;
    let _stays = guarded.agent(&next.agent("n2"), "n2").await;
    guarded.server.until_state("n1", NodeState::Ready).await;
    guarded.server.until_state("n2", NodeState::Ready).await;
    let sessions = guarded.server.sessions.clone();
    let next = Some(authorities(&[&next]));
    assert_eq!(
        sessions.trust(|| guarded.tls.replace(own, next)).unwrap(),
        1
    );
    let refusal = last_words(&mut cut).await;
    assert!(
        refusal.message.contains("was issued by `CN=fleet`"),
        "{refusal}"
    );
    let observed = guarded
        .server
        .until_state("n1", NodeState::Unreachable)
        .await;
    assert_eq!(observed.nodes["n2"].state, NodeState::Ready);
}

#[tokio::test]
async fn what_is_denied_between_the_handshake_and_the_registration_counts() {
    let guarded = Guarded::start().await;
    let lost = guarded.authority.agent("n1");
    let socket = TcpStream::connect(guarded.server.address).await.unwrap();
    let trust = Trust::Authorities(authorities(&[&guarded.authority]));
    let own = identity(&lost);
    let stream = connect(socket, "127.0.0.1", &trust, Some(&own))
        .await
        .unwrap();
    guarded.server.sessions.deny(serials(&[&lost]));
    let mut agent = Agent::over(stream, register("n1")).await;
    let refusal = last_words(&mut agent).await;
    assert!(refusal.message.contains("was revoked"), "{refusal}");
    assert!(guarded.server.observed.borrow().nodes.is_empty());
}

#[tokio::test]
async fn what_is_denied_while_a_registration_waits_for_the_table_counts() {
    let guarded = Guarded::start().await;
    let lost = guarded.authority.agent("n1");
    let own = identity(&lost);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let trust = Trust::Authorities(authorities(&[&guarded.authority]));
    let dialling = async {
        let socket = TcpStream::connect(address).await.unwrap();
        connect(socket, "127.0.0.1", &trust, Some(&own))
            .await
            .unwrap()
    };
    let accepting = async {
        let (socket, _) = listener.accept().await.unwrap();
        guarded.tls.accept(socket).await.unwrap()
    };
    let (_dialled, accepted) = tokio::join!(dialling, accepting);
    // It was let in, and the list changed before the table heard of it.
    let gate = Gate::new(Door::Tls(guarded.tls.clone()), true, serials(&[&lost]));
    let timing = watch::Sender::new(quiet().timing);
    let (seats, tails) = (Arc::new(Seats::new()), Arc::default());
    let (keeper, mut observed) = Keeper::new(timing.subscribe(), seats, Arc::new(gate), tails);
    let (outgoing, mut sent) = mpsc::channel(8);
    let (inputs, received) = mpsc::channel(8);
    let AgentMessage::Register(register) = register("n1") else {
        panic!("it is a registration");
    };
    let session = SessionId(1);
    let over = CancellationToken::new();
    let registers = Input::Registers {
        session,
        event: NodeEvent::Registered {
            session,
            register,
            certificate: None,
            is_local: false,
        },
        seat: Seat {
            node: "n1".to_owned(),
            peer: Peer {
                address,
                own: address.ip(),
                showing: Arc::new(accepted.showing),
            },
            outgoing,
            over: over.clone(),
            last: Arc::default(),
        },
    };
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    tokio::spawn(keeper.run(received, stop));
    inputs.send(registers).await.unwrap();
    over.cancelled().await;
    // What is published with the next tick is what there is after it.
    observed.borrow_and_update();
    observed.changed().await.unwrap();
    let ServerMessage::Refused(refusal) = sent.recv().await.unwrap().message else {
        panic!("it was not refused");
    };
    assert!(refusal.message.contains("was revoked"), "{refusal}");
    assert!(sent.recv().await.is_none(), "nothing follows");
    assert!(observed.borrow().nodes.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_was_ended_while_its_registration_waited_never_reaches_the_table() {
    let gate = Arc::new(Gate::new(Door::Plain, false, BTreeSet::new()));
    let timing = watch::Sender::new(quiet().timing);
    let (seats, tails) = (Arc::new(Seats::new()), Arc::default());
    let (keeper, mut observed) =
        Keeper::new(timing.subscribe(), seats.clone(), gate.clone(), tails);
    let (outgoing, _sent) = mpsc::channel(8);
    let (inputs, received) = mpsc::channel(8);
    let AgentMessage::Register(register) = register("n1") else {
        panic!("it is a registration");
    };
    let (session, address) = (SessionId(1), "127.0.0.1:1".parse().unwrap());
    let registers = Input::Registers {
        session,
        event: NodeEvent::Registered {
            session,
            register,
            certificate: None,
            is_local: false,
        },
        seat: Seat {
            node: "n1".to_owned(),
            peer: Peer {
                address,
                own: address.ip(),
                showing: Arc::new(Showing::nothing()),
            },
            outgoing,
            over: CancellationToken::new(),
            last: Arc::default(),
        },
    };
    inputs.send(registers).await.unwrap();
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    {
        let _held = gate.hold();
        tokio::spawn(keeper.run(received, stop));
        while !seats.has(session) {
            std::thread::yield_now();
        }
        seats.dismiss(session, ServerMessage::Leaving("denied".to_owned()));
    }
    // Two ticks later it was taken in for certain.
    for _ in 0..2 {
        observed.changed().await.unwrap();
    }
    assert!(observed.borrow().nodes.is_empty());
}

#[tokio::test]
async fn the_certificate_of_an_authority_that_is_shown_and_denied_lets_nobody_in() {
    let guarded = Guarded::start().await;
    let der = CertificateDer::from(guarded.authority.der.clone());
    let serial = Certificate::from_der(&der).unwrap().serial;
    let mut own = identity(&guarded.authority.agent("n1"));
    own.chain.push(der);
    let trust = Trust::Authorities(authorities(&[&guarded.authority]));
    for denied in [BTreeSet::new(), [serial.clone()].into()] {
        let is_denied = !denied.is_empty();
        guarded.server.sessions.deny(denied);
        let socket = TcpStream::connect(guarded.server.address).await.unwrap();
        let stream = connect(socket, "127.0.0.1", &trust, Some(&own)).await;
        let mut agent = Agent::over(stream.unwrap(), register("n1")).await;
        match agent.hear().await.message {
            ServerMessage::Welcome(_) => assert!(!is_denied),
            ServerMessage::Refused(refusal) => {
                let said = format!("the certificate with serial {serial} was revoked");
                assert!(is_denied && refusal.message.contains(&said), "{refusal}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_chain_that_is_too_long_to_be_looked_at_is_answered() {
    let guarded = Guarded::start().await;
    let mut own = identity(&guarded.authority.agent("n1"));
    own.chain
        .extend(vec![CertificateDer::from(guarded.authority.der.clone()); 8]);
    let socket = TcpStream::connect(guarded.server.address).await.unwrap();
    let trust = Trust::Authorities(authorities(&[&guarded.authority]));
    let stream = connect(socket, "127.0.0.1", &trust, Some(&own)).await;
    let mut agent = Agent::over(stream.unwrap(), register("n1")).await;
    let refusal = last_words(&mut agent).await;
    assert_eq!(refusal.code, RefusalCode::Identity);
    assert!(
        refusal.message.contains("more than 8 certificates"),
        "{refusal}"
    );
}

#[tokio::test]
async fn who_shows_nothing_takes_no_place_of_who_shows_a_certificate_though_none_is_required() {
    let mut guarded = Guarded::with(quiet()).await;
    let issued = guarded.authority.agent("n1");
    let agent = guarded.agent(&issued, "n1").await;
    guarded.server.until_state("n1", NodeState::Ready).await;
    let refusal = guarded.refusal(None, register("n1")).await;
    assert_eq!(refusal.code, RefusalCode::Identity);
    assert!(
        refusal
            .message
            .starts_with("`n1` is connected with a certificate"),
        "{refusal}"
    );
    let session = |observed: &crate::control::observed::Observed| observed.nodes["n1"].session;
    let observed = guarded.server.observed.borrow().clone();
    assert_eq!(session(&observed), Some(agent.session));
    // Its own next session does, and once it is gone anybody may, as it is configured.
    let next = guarded.agent(&issued, "n1").await;
    let is_next =
        |observed: &crate::control::observed::Observed| session(observed) == Some(next.session);
    guarded
        .server
        .until("the next session is there", is_next)
        .await;
    drop(next);
    guarded
        .server
        .until("it is gone", |observed| session(observed).is_none())
        .await;
    let mut anybody = guarded.dial(None, register("n1")).await;
    let welcome = anybody.hear().await.message;
    assert!(matches!(welcome, ServerMessage::Welcome(_)), "{welcome:?}");
}

#[tokio::test]
async fn a_certificate_that_became_known_after_the_handshake_is_in_the_table() {
    let mut guarded = Guarded::start().await;
    let other = Authority::new("other");
    let issued = other.agent("n1");
    let socket = TcpStream::connect(guarded.server.address).await.unwrap();
    let trust = Trust::Authorities(authorities(&[&guarded.authority]));
    let own = identity(&issued);
    let stream = connect(socket, "127.0.0.1", &trust, Some(&own))
        .await
        .unwrap();
    // The server has judged it once it says its first word, which HTTP/2 does unasked.
    let mut stream = tokio::io::BufReader::new(stream);
    tokio::io::AsyncBufReadExt::fill_buf(&mut stream)
        .await
        .unwrap();
    let server = identity(&guarded.authority.server(&["127.0.0.1"]));
    let both = authorities(&[&guarded.authority, &other]);
    guarded.tls.replace(server, Some(both)).unwrap();
    let mut agent = Agent::over(stream, register("n1")).await;
    let welcome = agent.hear().await.message;
    assert!(matches!(welcome, ServerMessage::Welcome(_)), "{welcome:?}");
    let observed = guarded.server.until_state("n1", NodeState::Ready).await;
    let certificate = observed.nodes["n1"].certificate.clone().unwrap();
    assert_eq!(certificate.serial.to_string(), issued.serial);
}

#[tokio::test]
async fn silent_clients_stop_nobody_and_are_cut_after_the_patience() {
    let mut guarded = Guarded::with(SessionsOptions {
        require_identity: true,
        patience: std::time::Duration::from_secs(10),
        ..quiet()
    })
    .await;
    let address = guarded.server.address;
    let connect = || TcpStream::connect(address);
    let silent = connect().await.unwrap();
    let mut half = connect().await.unwrap();
    half.write_all(&[22, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3])
        .await
        .unwrap();
    let mut plain = connect().await.unwrap();
    plain
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .unwrap();
    let mut browser = connect().await.unwrap();
    browser
        .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let agent = guarded.agent(&guarded.authority.agent("n1"), "n1").await;
    let mut answer = [0; 3];
    plain.read_exact(&mut answer).await.unwrap();
    assert_eq!(
        answer,
        [21, 3, 3],
        "an alert, which tells an agent to write https"
    );
    let page = read_to_the_end(browser).await;
    assert!(page.ends_with(b"write https://\n"), "{page:?}");
    for socket in [silent, half, plain] {
        read_to_the_end(socket).await;
    }
    let observed = guarded.server.until_state("n1", NodeState::Ready).await;
    assert_eq!(observed.nodes["n1"].session, Some(agent.session));
}

#[tokio::test]
async fn a_client_that_speaks_tls_to_a_port_without_it_is_told() {
    let server = Server::start(quiet()).await;
    let socket = TcpStream::connect(server.address).await.unwrap();
    let authority = Authority::new("fleet");
    let trust = Trust::Authorities(authorities(&[&authority]));
    let own = identity(&authority.agent("n1"));
    let problem = connect(socket, "127.0.0.1", &trust, Some(&own))
        .await
        .unwrap_err();
    assert!(
        problem
            .to_string()
            .starts_with("the server speaks no TLS there"),
        "{problem}"
    );
}
