//! Handshakes over real sockets, as the server sees them: what agents show, what it is worth, and who does not even speak TLS.

use fake_engine::authority::{Authority, Issued, Leaf, Use};
use rustls::{ClientConfig, HandshakeKind, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use super::*;
use crate::identity::Moment;
use crate::identity::problem::CertificateProblem;
use crate::identity::testing::{authorities, handshake, identity, sockets, trust};

struct Fleet {
    authority: Authority,
    tls: AgentsTls,
}

impl Fleet {
    fn new() -> Fleet {
        let authority = Authority::new("fleet");
        let server = identity(&authority.server(&["localhost", "127.0.0.1"]));
        let tls = AgentsTls::new(server, Some(authorities(&[&authority]))).unwrap();
        Fleet { authority, tls }
    }

    /// What the server makes of an agent that shows this.
    async fn shown(&self, issued: Option<&Issued>) -> Showing {
        let identity = issued.map(identity);
        let trust = trust(&self.authority);
        let (dialled, accepted) =
            handshake(&self.tls, "localhost", &trust, identity.as_ref()).await;
        dialled.unwrap();
        accepted.unwrap().showing
    }

    async fn refused(&self, issued: &Issued) -> CertificateProblem {
        match self.shown(Some(issued)).await.shown {
            Shown::Refused { why, certificate } => {
                assert_eq!(certificate.serial.to_string(), issued.serial);
                why
            }
            other => panic!("it was not refused: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_certificate_of_the_authority_for_a_client_is_known_by_its_name() {
    let fleet = Fleet::new();
    let issued = fleet.authority.agent("gpu-01");
    let Shown::Known(certificate) = fleet.shown(Some(&issued)).await.shown else {
        panic!("it is not known");
    };
    assert_eq!(certificate.common_name.as_deref(), Some("gpu-01"));
    assert_eq!(certificate.serial.to_string(), issued.serial);
}

#[tokio::test]
async fn whoever_shows_nothing_gets_through_the_handshake_and_is_nobody() {
    let fleet = Fleet::new();
    assert_eq!(fleet.shown(None).await.shown, Shown::Nothing);
}

#[tokio::test]
async fn a_server_without_an_authority_asks_for_no_certificate() {
    let authority = Authority::new("fleet");
    let tls = AgentsTls::new(identity(&authority.server(&["localhost"])), None).unwrap();
    let agent = identity(&authority.agent("gpu-01"));
    let (dialled, accepted) = handshake(&tls, "localhost", &trust(&authority), Some(&agent)).await;
    dialled.unwrap();
    assert_eq!(accepted.unwrap().showing.shown, Shown::Nothing);
}

#[tokio::test]
async fn certificates_that_are_over_or_not_yet_in_force_are_refused_with_the_clock_that_was_asked()
{
    let fleet = Fleet::new();
    let before = Moment::now();
    let leaf = Leaf {
        name: Some("gpu-01"),
        days: -10..-1,
        ..Leaf::agent()
    };
    let CertificateProblem::Expired { now } = fleet.refused(&fleet.authority.issue(&leaf)).await
    else {
        panic!("it is not over");
    };
    assert!(before <= now && now <= Moment::now());
    let leaf = Leaf {
        days: 1..10,
        ..leaf
    };
    let why = fleet.refused(&fleet.authority.issue(&leaf)).await;
    assert!(matches!(why, CertificateProblem::NotYet { .. }), "{why:?}");
}

#[tokio::test]
async fn an_authority_that_is_not_known_is_refused_with_both_fingerprints_although_its_name_is_the_same()
 {
    let fleet = Fleet::new();
    let known = vec![Fingerprint::of(&fleet.authority.der)];
    for name in ["other", "fleet"] {
        let other = Authority::new(name);
        let issued = other.agent("gpu-01");
        // Sent without the authority.
        let named = match name {
            "fleet" => CertificateProblem::Forged { authority: None },
            _ => CertificateProblem::UnknownAuthority {
                shown: None,
                known: known.clone(),
            },
        };
        assert_eq!(fleet.refused(&issued).await, named);
        // As agents send it.
        let mut agent = identity(&issued);
        agent.chain.push(other.der.clone().into());
        let trust = trust(&fleet.authority);
        let (_, accepted) = handshake(&fleet.tls, "localhost", &trust, Some(&agent)).await;
        let Shown::Refused { why, .. } = accepted.unwrap().showing.shown else {
            panic!("it was not refused");
        };
        let shown = Some(Fingerprint::of(&other.der));
        let known = known.clone();
        assert_eq!(why, CertificateProblem::UnknownAuthority { shown, known });
    }
}

#[tokio::test]
async fn of_a_strangers_certificate_neither_dates_nor_use_are_told_but_that_nobody_vouches_for_it()
{
    let fleet = Fleet::new();
    let stranger = Authority::new("other");
    let leaf = Leaf {
        name: Some("gpu-01"),
        ..Leaf::agent()
    };
    let over = Leaf {
        days: -10..-1,
        ..leaf.clone()
    };
    let early = Leaf {
        days: 1..10,
        ..leaf.clone()
    };
    let servers = Leaf {
        used: Use::Server,
        ..leaf
    };
    for leaf in [over, early, servers] {
        let why = fleet.refused(&stranger.issue(&leaf)).await;
        assert_eq!(why.kind(), "unknown_authority", "{why:?}");
    }
}

#[tokio::test]
async fn a_chain_that_is_not_looked_at_is_refused_and_stays_so_whatever_is_trusted_later() {
    let fleet = Fleet::new();
    let mut agent = identity(&fleet.authority.agent("gpu-01"));
    let further = vec![fleet.authority.der.clone().into(); CHAIN_MAX];
    agent.chain.extend(further);
    let trust = trust(&fleet.authority);
    let (_, accepted) = handshake(&fleet.tls, "localhost", &trust, Some(&agent)).await;
    let long = accepted.unwrap().showing;
    let Shown::Refused { why, .. } = &long.shown else {
        panic!("it was not refused: {long:?}");
    };
    assert!(
        format!("{why:?}").contains("more than 8 certificates"),
        "{why:?}"
    );
    let none = fleet
        .tls
        .current()
        .look(&[CertificateDer::from(vec![1, 2, 3])]);
    assert!(matches!(none.shown, Shown::Unreadable(_)), "{none:?}");
    let server = identity(&fleet.authority.server(&["localhost"]));
    let trusted = authorities(&[&fleet.authority]);
    fleet.tls.replace(server, Some(trusted)).unwrap();
    for showing in [long, none] {
        assert_eq!(fleet.tls.judge_again(&showing), showing.shown);
    }
}

#[tokio::test]
async fn an_authority_that_is_sent_along_by_a_stranger_makes_nothing_known() {
    let fleet = Fleet::new();
    let stranger = Authority::new("fleet");
    let mut agent = identity(&stranger.agent("gpu-01"));
    agent.chain.push(fleet.authority.der.clone().into());
    let trust = trust(&fleet.authority);
    let (_, accepted) = handshake(&fleet.tls, "localhost", &trust, Some(&agent)).await;
    let Shown::Refused { why, .. } = accepted.unwrap().showing.shown else {
        panic!("it was not refused");
    };
    let authority = Some(Fingerprint::of(&fleet.authority.der));
    assert_eq!(why, CertificateProblem::Forged { authority });
}

#[tokio::test]
async fn a_servers_certificate_is_no_agents_and_neither_is_an_authoritys() {
    let fleet = Fleet::new();
    let leaf = Leaf {
        name: Some("gpu-01"),
        used: Use::Server,
        hosts: &["gpu-01"],
        ..Leaf::agent()
    };
    let why = fleet.refused(&fleet.authority.issue(&leaf)).await;
    assert_eq!(why, CertificateProblem::WrongUse);

    let judge = ClientJudge::new(authorities(&[&fleet.authority])).unwrap();
    let chain = [CertificateDer::from(fleet.authority.der.clone())];
    let own = Certificate::from_der(&fleet.authority.der).unwrap();
    let shown = judge.judge(&chain, own, UnixTime::now());
    assert!(matches!(shown, Shown::Refused { .. }), "{shown:?}");
}

#[tokio::test]
async fn a_certificate_without_its_key_gets_nobody_through() {
    let fleet = Fleet::new();
    let mut stolen = identity(&fleet.authority.agent("gpu-01"));
    // rustls itself refuses to pair them, so the signature has to be forged below it.
    stolen.key = identity(&fleet.authority.agent("gpu-02")).key;
    let trust = trust(&fleet.authority);
    let (dialled, accepted) = handshake(&fleet.tls, "localhost", &trust, Some(&stolen)).await;
    assert!(dialled.is_err() && accepted.is_err());

    let roots = Arc::new(roots(&fleet.authority));
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_cert_resolver(Arc::new(Thief(stolen.clone())));
    let (client, server) = sockets().await;
    let dialling = async {
        let connector = TlsConnector::from(Arc::new(config));
        let name = "localhost".try_into().unwrap();
        // The client is done before the server has looked.
        let mut stream = connector.connect(name, client).await.unwrap();
        let mut read = Vec::new();
        stream.read_to_end(&mut read).await.unwrap_err().to_string()
    };
    let (told, accepted) = tokio::join!(dialling, fleet.tls.accept(server));
    assert!(matches!(accepted, Err(AcceptProblem::Io(_))));
    assert!(told.contains("alert"), "{told}");
}

/// Shows a certificate and signs with another key.
#[derive(Debug)]
struct Thief(Identity);

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.certificate.fmt(f)
    }
}

impl rustls::client::ResolvesClientCert for Thief {
    fn resolve(
        &self,
        _: &[&[u8]],
        _: &[SignatureScheme],
    ) -> Option<Arc<rustls::sign::CertifiedKey>> {
        let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(&self.0.key).unwrap();
        let chain = self.0.chain.clone();
        Some(Arc::new(rustls::sign::CertifiedKey::new(chain, key)))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

fn roots(authority: &Authority) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(authority.der.clone().into()).unwrap();
    roots
}

/// Connects twice with a client that would resume, and says how each handshake went.
async fn twice(tls: &AgentsTls, config: &Arc<ClientConfig>) -> Vec<Option<HandshakeKind>> {
    let mut kinds = Vec::new();
    for _ in 0..2 {
        let (client, server) = sockets().await;
        let dialling = async {
            let connector = TlsConnector::from(config.clone());
            let name = "localhost".try_into().unwrap();
            let mut stream = connector.connect(name, client).await.unwrap();
            // Where there are tickets, they come before the first byte.
            let mut word = [0; 2];
            stream.read_exact(&mut word).await.unwrap();
            stream.get_ref().1.handshake_kind()
        };
        let accepting = async {
            let mut accepted = tls.accept(server).await.unwrap();
            accepted.stream.write_all(b"hi").await.unwrap();
            accepted.stream.flush().await.unwrap();
            accepted.stream.get_ref().1.handshake_kind()
        };
        let (client, server) = tokio::join!(dialling, accepting);
        assert_eq!(client, server);
        kinds.push(client);
    }
    kinds
}

#[tokio::test]
async fn no_session_is_resumed_by_a_client_that_could() {
    let fleet = Fleet::new();
    let agent = identity(&fleet.authority.agent("gpu-01"));
    let client = || {
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots(&fleet.authority))
            .with_client_auth_cert(agent.chain.clone(), agent.key.clone_key())
            .unwrap();
        Arc::new(config)
    };
    let full = Some(HandshakeKind::Full);
    assert_eq!(twice(&fleet.tls, &client()).await, [full, full]);

    // The same client and a server as rustls makes it by itself: it does resume.
    let resuming = Fleet::new_resuming(&fleet.authority);
    let kinds = twice(&resuming, &client()).await;
    assert_eq!(kinds, [full, Some(HandshakeKind::Resumed)]);
}

impl Fleet {
    fn new_resuming(authority: &Authority) -> AgentsTls {
        let server = identity(&authority.server(&["localhost"]));
        let mut current = Current::new(server, Some(authorities(&[authority]))).unwrap();
        let config = Arc::get_mut(&mut current.config).unwrap();
        config.session_storage = rustls::server::ServerSessionMemoryCache::new(8);
        config.send_tls13_tickets = 2;
        AgentsTls {
            current: RwLock::new(Arc::new(current)),
        }
    }
}

#[tokio::test]
async fn files_that_are_replaced_count_for_the_next_handshake_and_sessions_are_judged_by_them_too()
{
    let fleet = Fleet::new();
    let old = fleet.authority.agent("gpu-01");
    let before = fleet.shown(Some(&old)).await;
    assert_eq!(fleet.tls.judge_again(&before), before.shown);

    let next = Authority::new("next");
    let server = next.server(&["localhost"]);
    let both = authorities(&[&fleet.authority, &next]);
    fleet.tls.replace(identity(&server), Some(both)).unwrap();
    assert_eq!(fleet.tls.certificate().serial.to_string(), server.serial);
    assert!(matches!(
        fleet.tls.judge_again(&before),
        Shown::Known(certificate) if certificate.serial.to_string() == old.serial
    ));

    let only = Some(authorities(&[&next]));
    fleet.tls.replace(identity(&server), only).unwrap();
    let Shown::Refused { why, .. } = fleet.tls.judge_again(&before) else {
        panic!("it is still known");
    };
    assert_eq!(why.kind(), "unknown_authority");
    let agent = identity(&old);
    let (dialled, accepted) = handshake(&fleet.tls, "localhost", &trust(&next), Some(&agent)).await;
    dialled.unwrap();
    let Shown::Refused { why, .. } = accepted.unwrap().showing.shown else {
        panic!("it was let in");
    };
    assert_eq!(why.kind(), "unknown_authority");
}

#[test]
fn a_server_leads_to_the_authority_that_issued_its_certificate_and_to_no_other() {
    let (old, new) = (Authority::new("fleet"), Authority::new("fleet"));
    let both = || Some(authorities(&[&old, &new]));
    let tls = AgentsTls::new(identity(&old.server(&["localhost"])), both()).unwrap();
    let [of_old, of_new] = [&old, &new].map(|authority| Fingerprint::of(&authority.der));
    assert!(tls.leads_to(&of_old) && !tls.leads_to(&of_new));
    tls.replace(identity(&new.server(&["localhost"])), both())
        .unwrap();
    assert!(tls.leads_to(&of_new) && !tls.leads_to(&of_old));
    // Sent along is not enough.
    let mut odd = identity(&old.server(&["localhost"]));
    odd.chain.push(new.der.clone().into());
    tls.replace(odd, None).unwrap();
    assert!(!tls.leads_to(&of_new) && !tls.leads_to(&of_old));
}

#[tokio::test]
async fn who_was_let_in_is_not_cut_off_because_time_passes() {
    let fleet = Fleet::new();
    let mut showing = fleet.shown(Some(&fleet.authority.agent("gpu-01"))).await;
    let days_ago = |days: u64| {
        let seconds = UnixTime::now().as_secs() - days * 86_400;
        UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds))
    };
    // The same authority, so that its word is asked again.
    let server = identity(&fleet.authority.server(&["localhost"]));
    let same = Some(authorities(&[&fleet.authority]));
    fleet.tls.replace(server, same).unwrap();
    assert!(matches!(fleet.tls.judge_again(&showing), Shown::Known(_)));
    // Let in long before the certificate was in force, which no handshake would have done: its time is what counts.
    showing.at = days_ago(300);
    let Shown::Refused { why, .. } = fleet.tls.judge_again(&showing) else {
        panic!("another time was asked");
    };
    assert_eq!(why.kind(), "not_yet");
}

#[tokio::test]
async fn clients_without_tls_are_told_and_named() {
    let fleet = Fleet::new();
    for (said, opening, answer) in [
        (
            &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
            Opening::Http2,
            &[21u8, 3, 3][..],
        ),
        (
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
            Opening::Http1,
            b"HTTP/1.1 400 ",
        ),
        (&[0xaa; 100], Opening::Other, &[21, 3, 3]),
    ] {
        let (mut client, server) = sockets().await;
        let speaking = async {
            client.write_all(said).await.unwrap();
            let mut read = Vec::new();
            client.read_to_end(&mut read).await.unwrap();
            drop(client);
            read
        };
        let (read, accepted) = tokio::join!(speaking, fleet.tls.accept(server));
        assert!(read.starts_with(answer), "{read:?}");
        let problem = accepted.err().unwrap();
        assert!(
            matches!(problem, AcceptProblem::NoTls(found) if found == opening),
            "{problem}"
        );
        let said = problem.to_string();
        assert!(
            said.contains(opening.in_words()) && said.contains("https://"),
            "{said}"
        );
    }
    let (client, server) = sockets().await;
    drop(client);
    let problem = fleet.tls.accept(server).await.err().unwrap();
    assert_eq!(problem.kind(), "nothing");
}

#[tokio::test]
async fn a_client_that_refuses_our_certificate_is_understood_by_its_alert() {
    let fleet = Fleet::new();
    let other = Authority::new("other");
    for (host, trust, said) in [
        (
            "ctl.example",
            trust(&fleet.authority),
            "what it dials is none of `localhost`, `127.0.0.1`",
        ),
        (
            "localhost",
            trust(&other),
            "it does not know the authority that issued it",
        ),
    ] {
        let (dialled, accepted) = handshake(&fleet.tls, host, &trust, None).await;
        assert!(dialled.is_err());
        let problem = accepted.err().unwrap();
        assert_eq!(problem.kind(), "alerted");
        assert!(problem.to_string().contains(said), "{problem}");
    }
}
