//! Every sentence of a refusal: facts in, what a person reads out.

use fake_engine::authority::{Authority, Leaf, Use};

use super::*;

const DAY: i64 = 86_400;

struct Facts {
    agent: Certificate,
    server: Certificate,
    ours: Fingerprint,
    theirs: Fingerprint,
    now: Moment,
}

fn facts() -> Facts {
    let authority = Authority::new("fleet");
    let read = |der: &[u8]| Certificate::from_der(der).unwrap();
    let server = authority.server(&["ctl.example", "10.0.0.1"]);
    Facts {
        agent: Certificate {
            not_before: Moment(0),
            not_after: Moment(DAY),
            serial: "0a1b2c".parse().unwrap(),
            ..read(&authority.agent("n1").der)
        },
        server: Certificate {
            not_before: Moment(0),
            not_after: Moment(DAY),
            ..read(&server.der)
        },
        ours: Fingerprint([0; 32]),
        theirs: Fingerprint([0xff; 32]),
        now: Moment(2 * DAY),
    }
}

const OURS: &str = "sha256:0000000000000000000000000000000000000000000000000000000000000000";
const THEIRS: &str = "sha256:ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff";
const MAKE: &str = "`llmgw ctl cert agent --ca DIR --node n2 --out DIR`";

#[test]
fn what_is_said_of_an_agents_certificate_has_both_sides_facts_and_the_way_out() {
    let facts = facts();
    let Facts { agent, now, .. } = &facts;
    let now = *now;
    let early = Moment(-DAY);
    let refused = |why: CertificateProblem| IdentityProblem::Refused(agent, &why).sentence("n2");
    let nameless = Certificate {
        common_name: None,
        ..agent.clone()
    };
    let known = vec![facts.ours];
    let unknown = |shown| CertificateProblem::UnknownAuthority {
        shown,
        known: known.clone(),
    };
    let servers = Certificate {
        usages: facts.server.usages,
        ..agent.clone()
    };
    for (said, expected) in [
        (
            IdentityProblem::NothingShown.sentence("n2"),
            format!("no certificate was shown, and the server asks for one: set `tls: {{ca: ca.pem, cert: agent.pem, key: agent-key.pem}}` in agent.yaml; {MAKE} makes them"),
        ),
        (
            IdentityProblem::Unreadable("it is odd").sentence("n2"),
            format!("the certificate that was shown can't be read (it is odd): {MAKE} makes one"),
        ),
        (
            IdentityProblem::NotAsBefore.sentence("n2"),
            "`n2` is connected with a certificate, and nobody without one takes its place: set `tls: {ca: ca.pem, cert: agent.pem, key: agent-key.pem}` in agent.yaml".to_owned(),
        ),
        (
            IdentityProblem::OtherName(agent).sentence("n2"),
            format!("the certificate is for `n1`, not for `n2`: {MAKE} makes one for it, `node: n1` in agent.yaml claims the other"),
        ),
        (
            IdentityProblem::OtherName(&nameless).sentence("n2"),
            format!("the certificate has no common name, so it is for no node: {MAKE} makes one for it"),
        ),
        (
            IdentityProblem::Revoked(agent).sentence("n2"),
            format!("the certificate with serial a1b2c was revoked, it is in the server's `agents.deny_serials`: {MAKE} makes a new one"),
        ),
        (
            refused(CertificateProblem::Expired { now }),
            "the certificate expired at 1970-01-02T00:00:00Z, and the server's clock says 1970-01-03T00:00:00Z: `llmgw ctl cert renew agent.pem --ca DIR` makes it last longer, unless a clock is wrong".to_owned(),
        ),
        (
            refused(CertificateProblem::NotYet { now: early }),
            "the certificate is not valid before 1970-01-01T00:00:00Z, and the server's clock says 1969-12-31T00:00:00Z: one of the clocks is wrong".to_owned(),
        ),
        (
            refused(unknown(Some(facts.theirs))),
            format!("the certificate was issued by `CN=fleet` ({THEIRS}), and `agents.tls.ca` of the server has {OURS}: {MAKE} makes one, with the DIR of the server's authority"),
        ),
        (
            refused(unknown(None)),
            format!("the certificate was issued by `CN=fleet` (whose certificate was not sent), and `agents.tls.ca` of the server has {OURS}: {MAKE} makes one, with the DIR of the server's authority"),
        ),
        (
            refused(CertificateProblem::Forged { authority: Some(facts.ours) }),
            format!("the certificate was not signed by the key of the authority that it names ({OURS})"),
        ),
        (
            IdentityProblem::Refused(&servers, &CertificateProblem::WrongUse).sentence("n2"),
            format!("the certificate is for serverAuth, not for clientAuth: {MAKE} makes an agent's"),
        ),
        (
            refused(CertificateProblem::Invalid("it is odd".to_owned())),
            "the certificate can't be verified: it is odd".to_owned(),
        ),
    ] {
        assert_eq!(said, expected);
    }
    assert_eq!(
        own(agent, "/etc/llmgw/agent.pem", now),
        "this agent showed /etc/llmgw/agent.pem (for `n1`, serial a1b2c, valid from 1970-01-01T00:00:00Z to 1970-01-02T00:00:00Z), \
         and its clock says 1970-01-03T00:00:00Z"
    );
}

#[test]
fn what_is_said_of_a_servers_certificate_has_both_sides_facts_and_the_way_out() {
    let facts = facts();
    let (server, now) = (&facts.server, facts.now);
    let make = |host: &str| {
        format!(
            "`llmgw ctl cert server --ca DIR --host ctl.example --host 10.0.0.1 --host {host} --out DIR`"
        )
    };
    let agents = Certificate {
        usages: facts.agent.usages,
        ..server.clone()
    };
    let wrong_host = CertificateProblem::WrongHost {
        dialled: "10.0.0.2".to_owned(),
    };
    let unknown = CertificateProblem::UnknownAuthority {
        shown: Some(facts.theirs),
        known: vec![facts.ours],
    };
    for (certificate, problem, expected) in [
        (
            server,
            CertificateProblem::Expired { now },
            "the server's certificate expired at 1970-01-02T00:00:00Z, and this machine's clock says 1970-01-03T00:00:00Z: `llmgw ctl cert renew server.pem --ca DIR` makes it last longer, unless a clock is wrong".to_owned(),
        ),
        (
            server,
            CertificateProblem::NotYet { now: Moment(-DAY) },
            "the server's certificate is not valid before 1970-01-01T00:00:00Z, and this machine's clock says 1969-12-31T00:00:00Z: one of the clocks is wrong".to_owned(),
        ),
        (
            &agents,
            CertificateProblem::WrongUse,
            format!("the certificate that the server shows is for clientAuth, not for serverAuth: {} makes a server's", make("HOST")),
        ),
        (
            server,
            unknown,
            format!("the server's certificate was issued by `CN=fleet` ({THEIRS}), and `tls.ca` of this agent has {OURS}: copy the server's ca.pem to this node"),
        ),
        (
            server,
            CertificateProblem::Forged { authority: None },
            "whoever answers is not the server: the certificate was not signed by the key of the authority that it names".to_owned(),
        ),
        (
            server,
            wrong_host,
            format!("`10.0.0.2` was dialled, and the server's certificate is for `ctl.example`, `10.0.0.1`: {} makes one for it", make("10.0.0.2")),
        ),
    ] {
        assert_eq!(of_server(certificate, &problem), expected);
    }
}

#[test]
fn what_a_server_concludes_from_an_alert_has_its_own_facts() {
    let facts = facts();
    let own = &facts.server;
    for (alert, expected) in [
        (
            AlertDescription::BadCertificate,
            "the agent refused this server's certificate: what it dials is none of `ctl.example`, `10.0.0.1`; \
             `llmgw ctl cert server --ca DIR --host ctl.example --host 10.0.0.1 --host NEW --out DIR` makes one for it".to_owned(),
        ),
        (
            AlertDescription::CertificateExpired,
            "the agent refused this server's certificate over its dates: it is valid from 1970-01-01T00:00:00Z to 1970-01-02T00:00:00Z, \
             and this server's clock says 1970-01-03T00:00:00Z".to_owned(),
        ),
        (
            AlertDescription::UnknownCA,
            format!("the agent refused this server's certificate: it does not know the authority that issued it, `CN=fleet` ({OURS}); copy ca.pem to its node"),
        ),
        (
            AlertDescription::UnsupportedCertificate,
            "the agent refused this server's certificate: it does not take it for a server's, it is for serverAuth; \
             `llmgw ctl cert server --ca DIR --host ctl.example --host 10.0.0.1 --host HOST --out DIR` makes a server's".to_owned(),
        ),
        (
            AlertDescription::InternalError,
            "the agent ended the handshake: InternalError".to_owned(),
        ),
    ] {
        assert_eq!(alerted(alert, own, Some(&facts.ours), facts.now), expected);
    }
}

#[test]
fn what_a_stranger_wrote_into_a_certificate_neither_breaks_a_line_nor_fills_it() {
    let authority = Authority::new("fleet");
    let name = format!("n1\n\u{1b}[2J{}", "é".repeat(500));
    let leaf = Leaf {
        name: Some(&name),
        used: Use::Agent,
        ..Leaf::agent()
    };
    let certificate = Certificate::from_der(&authority.issue(&leaf).der).unwrap();
    let said = IdentityProblem::OtherName(&certificate).sentence("n2");
    assert!(
        said.starts_with("the certificate is for `n1??[2Jé"),
        "{said}"
    );
    assert!(
        said.len() < 1_000 && !said.contains(['\n', '\u{1b}']),
        "{said}"
    );
    assert!(shown(&name).len() <= NAME_SHOWN_MAX_BYTES + '…'.len_utf8());
}

#[test]
fn a_command_repeats_hosts_only_and_tells_how_many_it_left_out() {
    let name = |text: &str| Host::Name(text.to_owned());
    let odd = ["$(touch x)", "a;touch x", "`touch x`", "a b", "x'y", ""].map(name);
    let mut present = vec![name("ctl.example"), name("*.ctl.example")];
    present.extend(odd);
    assert_eq!(
        make_server(&present, "HOST"),
        "`llmgw ctl cert server --ca DIR --host ctl.example --host '*.ctl.example' --host HOST --out DIR` \
         (with `--host ..` for the other 6 as well)"
    );
    let many: Vec<Host> = (0..20).map(|number| name(&format!("h{number}"))).collect();
    let said = make_server(&many, "$(touch x)");
    assert!(
        said.contains(" --host h15 --host '$(touch x)' --out DIR`"),
        "{said}"
    );
    assert!(
        said.ends_with(" (with `--host ..` for the other 4 as well)"),
        "{said}"
    );
}
