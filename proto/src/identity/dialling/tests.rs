//! Handshakes over real sockets, as the agent sees them: which servers it talks to, and what it says of the others.

use fake_engine::authority::{Authority, Leaf, Use};
use rustls::HandshakeKind;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::identity::listening::AgentsTls;
use crate::identity::testing::{authorities, handshake, identity, sockets, trust};

const LOCAL: &[&str] = &["localhost", "127.0.0.1", "::1"];

fn server(authority: &Authority, leaf: &Leaf<'_>) -> AgentsTls {
    let issued = identity(&authority.issue(leaf));
    AgentsTls::new(issued, Some(authorities(&[authority]))).unwrap()
}

fn leaf() -> Leaf<'static> {
    Leaf {
        hosts: LOCAL,
        used: Use::Server,
        ..Leaf::agent()
    }
}

#[tokio::test]
async fn names_and_bare_addresses_are_dialled_where_the_certificate_has_them() {
    let authority = Authority::new("fleet");
    let server = server(&authority, &leaf());
    for host in LOCAL {
        let (dialled, accepted) = handshake(&server, host, &trust(&authority), None).await;
        assert!(accepted.is_ok(), "{host}");
        assert!(dialled.is_ok(), "{host}: {:?}", dialled.err());
    }
}

#[tokio::test]
async fn a_host_that_is_not_in_the_certificate_is_refused_with_those_that_are_whatever_its_subject_says()
 {
    let authority = Authority::new("fleet");
    let named = Leaf {
        name: Some("10.0.0.1"),
        ..leaf()
    };
    let alone = Leaf {
        hosts: &[],
        ..named.clone()
    };
    for (leaf, said) in [
        (
            named,
            "`10.0.0.1` was dialled, and the server's certificate is for `localhost`, `127.0.0.1`, `::1`: \
             `llmgw ctl cert server --ca DIR --host localhost --host 127.0.0.1 --host ::1 --host 10.0.0.1 --out DIR` makes one for it",
        ),
        (
            alone,
            "`10.0.0.1` was dialled, and the server's certificate is for no host at all (a subject does not count): \
             `llmgw ctl cert server --ca DIR --host 10.0.0.1 --out DIR` makes one for it",
        ),
    ] {
        let server = server(&authority, &leaf);
        let (dialled, _) = handshake(&server, "10.0.0.1", &trust(&authority), None).await;
        let problem = dialled.unwrap_err();
        assert_eq!(problem.to_string(), said);
        assert!(problem.needs_a_person());
    }
}

#[tokio::test]
async fn servers_that_are_not_to_be_talked_to_are_named_by_what_is_wrong() {
    let fleet = Authority::new("fleet");
    let other = Authority::new("other");
    let same_name = Authority::new("fleet");
    let expired = Leaf {
        days: -10..-1,
        ..leaf()
    };
    let early = Leaf {
        days: 1..10,
        ..leaf()
    };
    let agents = Leaf {
        used: Use::Agent,
        ..leaf()
    };
    for (server, kind, said) in [
        (
            server(&fleet, &expired),
            "expired",
            "and this machine's clock says ",
        ),
        (server(&fleet, &early), "not_yet", "is not valid before "),
        (
            server(&other, &leaf()),
            "unknown_authority",
            "copy the server's ca.pem to this node",
        ),
        (
            server(&same_name, &leaf()),
            "unknown_authority",
            "copy the server's ca.pem to this node",
        ),
        (
            server(&fleet, &agents),
            "wrong_use",
            "is for clientAuth, not for serverAuth",
        ),
        // What a stranger wrote into a certificate explains nothing.
        (
            server(&other, &expired),
            "unknown_authority",
            "copy the server's ca.pem to this node",
        ),
        (
            server(&other, &early),
            "unknown_authority",
            "copy the server's ca.pem to this node",
        ),
        (
            server(&other, &agents),
            "unknown_authority",
            "copy the server's ca.pem to this node",
        ),
    ] {
        let (dialled, accepted) = handshake(&server, "localhost", &trust(&fleet), None).await;
        let problem = dialled.unwrap_err();
        let ConnectProblem::Certificate { problem: why, .. } = &problem else {
            panic!("{problem}");
        };
        assert_eq!(why.kind(), kind, "{problem}");
        assert!(problem.to_string().contains(said), "{problem}");
        assert!(problem.needs_a_person());
        assert!(accepted.is_err());
    }
}

#[tokio::test]
async fn an_unknown_authority_is_told_with_both_fingerprints() {
    let (fleet, other) = (Authority::new("fleet"), Authority::new("other"));
    let server = server(&other, &leaf());
    let (dialled, _) = handshake(&server, "localhost", &trust(&fleet), None).await;
    let said = dialled.unwrap_err().to_string();
    let theirs = Fingerprint::of(&other.der).to_string();
    let ours = Fingerprint::of(&fleet.der).to_string();
    assert!(said.contains(&theirs) && said.contains(&ours), "{said}");
}

#[tokio::test]
async fn a_pinned_authority_is_found_in_what_the_server_sends_and_no_other_one_will_do() {
    let (fleet, other) = (Authority::new("fleet"), Authority::new("other"));
    let server = server(&fleet, &leaf());
    let pin = Trust::Pinned(Fingerprint::of(&fleet.der));
    let (dialled, accepted) = handshake(&server, "localhost", &pin, None).await;
    assert!(dialled.is_ok() && accepted.is_ok());
    let (dialled, _) = handshake(&server, "ctl.example", &pin, None).await;
    let said = dialled.unwrap_err().to_string();
    assert!(said.starts_with("`ctl.example` was dialled"), "{said}");

    let pin = Trust::Pinned(Fingerprint::of(&other.der));
    let (dialled, _) = handshake(&server, "localhost", &pin, None).await;
    let problem = dialled.unwrap_err();
    assert!(problem.needs_a_person());
    let said = problem.to_string();
    let (sent, pinned) = (Fingerprint::of(&fleet.der), Fingerprint::of(&other.der));
    let both = format!(
        "the token names the authority {pinned}, and the server's certificate was issued by `CN=fleet` ({sent})"
    );
    assert!(said.starts_with(&both), "{said}");
    assert!(said.contains("make a new token"), "{said}");
    assert!(!said.contains("ca.pem"), "the node has none: {said}");

    // The pinned authority's certificate alone, sent by a stranger, proves nothing.
    let mut stranger = identity(&other.issue(&leaf()));
    stranger.chain.push(fleet.der.clone().into());
    let server = AgentsTls::new(stranger, None).unwrap();
    let pin = Trust::Pinned(Fingerprint::of(&fleet.der));
    let (dialled, _) = handshake(&server, "localhost", &pin, None).await;
    let said = dialled.unwrap_err().to_string();
    assert!(said.starts_with("the token names the authority "), "{said}");
    // Nor is the authority itself a server.
    let (chain, leaf) = (vec![fleet.der.clone().into()], Fingerprint::of(&fleet.der));
    let judge = ServerJudge::pinned(&chain, leaf).unwrap().unwrap();
    let own = Certificate::from_der(&fleet.der).unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    assert!(judge.judge(&chain, &own, &name, UnixTime::now()).is_err());
}

#[tokio::test]
async fn no_session_is_resumed_although_the_server_would() {
    let authority = Authority::new("fleet");
    let server = identity(&authority.issue(&leaf()));
    // As rustls makes it: with tickets.
    let config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(server.chain.clone(), server.key.clone_key())
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let trust = trust(&authority);
    let judging = Arc::new(Judging::new(&trust).unwrap());
    let ours = config_of(&judging, &trust);
    let mut resuming = ours.clone();
    resuming.resumption = Resumption::in_memory_sessions(8);
    let mut kinds = Vec::new();
    for config in [ours, resuming] {
        let connector = TlsConnector::from(Arc::new(config));
        for _ in 0..2 {
            let (client, accepted) = sockets().await;
            let dialling = async {
                let name = ServerName::try_from("localhost").unwrap();
                let mut stream = connector.connect(name, client).await.unwrap();
                let mut word = [0; 2];
                stream.read_exact(&mut word).await.unwrap();
                stream.get_ref().1.handshake_kind()
            };
            let accepting = async {
                let mut stream = acceptor.accept(accepted).await.unwrap();
                stream.write_all(b"hi").await.unwrap();
                stream.flush().await.unwrap();
            };
            kinds.extend(tokio::join!(dialling, accepting).0);
        }
    }
    use HandshakeKind::{Full, Resumed};
    assert_eq!(kinds, [Full, Full, Full, Resumed]);
}

fn config_of(judging: &Arc<Judging>, trust: &Trust) -> ClientConfig {
    config(ALPN, judging.clone(), trust, None).unwrap()
}

#[tokio::test]
async fn what_answers_and_is_no_tls_is_told_from_what_hangs_up() {
    let authority = Authority::new("fleet");
    for (answer, kind) in [
        // HTTP/2's first frame, and what our own port without TLS says.
        (
            &[0u8, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 4][..],
            "NoTls",
        ),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "NoTls"),
        (b"", "HungUp"),
    ] {
        let (client, mut server) = sockets().await;
        let answering = async {
            let mut hello = [0; 64];
            server.read_exact(&mut hello).await.unwrap();
            server.write_all(answer).await.unwrap();
            drop(server);
        };
        let trust = trust(&authority);
        let (dialled, ()) = tokio::join!(connect(client, "localhost", &trust, None), answering);
        let problem = dialled.unwrap_err();
        assert_eq!(format!("{problem:?}"), kind);
        assert!(!problem.needs_a_person(), "it may be about to change");
    }
    let said = ConnectProblem::NoTls.to_string();
    assert!(
        said.contains("write `http://`") && said.contains("`agents.tls`"),
        "{said}"
    );
}

#[tokio::test]
async fn a_host_that_no_certificate_can_be_for_is_not_dialled() {
    let (client, _server) = sockets().await;
    let trust = trust(&Authority::new("fleet"));
    let problem = connect(client, "a b", &trust, None).await.unwrap_err();
    assert!(
        problem.to_string().starts_with("`a b` is no name"),
        "{problem}"
    );
}
