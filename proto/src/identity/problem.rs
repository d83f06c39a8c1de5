//! Why a peer's certificate is not taken, and the sentences that say so: facts go in, one sentence with the way out comes out.
//!
//! A sentence about an agent's certificate is written by the server, which knows its own clock and authorities, and is read in both logs. One
//! about the server's certificate is written by the agent; the server's log has what the alert tells ([`alerted`]).

use std::fmt::Write as _;

use rustls::AlertDescription;

use super::{Certificate, Fingerprint, Host, Moment, Usages};
use crate::text::{plain, word};

/// Hosts and fingerprints that one sentence lists.
const LISTED_MAX: usize = 16;
/// Of a name in a certificate, so much is shown.
const NAME_SHOWN_MAX_BYTES: usize = 200;

/// What is wrong with a certificate that could be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CertificateProblem {
    /// It is over, by the clock of who looked at `now`.
    Expired {
        now: Moment,
    },
    NotYet {
        now: Moment,
    },
    /// It is for another use than it is put to.
    WrongUse,
    UnknownAuthority {
        /// The authority's certificate, where the peer sent it along.
        shown: Option<Fingerprint>,
        known: Vec<Fingerprint>,
    },
    /// The authority that it names is a known one, whose key did not sign it.
    Forged {
        authority: Option<Fingerprint>,
    },
    /// It is not for the host that was dialled.
    WrongHost {
        dialled: String,
    },
    /// In the words of the verifier.
    Invalid(String),
}

/// Why an agent with a certificate that is valid by itself, or without one, may not speak for a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityProblem<'a> {
    NothingShown,
    /// What was shown is no certificate, in the words of its reader.
    Unreadable(&'a str),
    /// Nothing was shown where a session that showed a certificate speaks for the node.
    NotAsBefore,
    OtherName(&'a Certificate),
    Revoked(&'a Certificate),
    Refused(&'a Certificate, &'a CertificateProblem),
}

impl CertificateProblem {
    /// One word for it, to tell repeated lines from each other.
    pub fn kind(&self) -> &'static str {
        match self {
            CertificateProblem::Expired { .. } => "expired",
            CertificateProblem::NotYet { .. } => "not_yet",
            CertificateProblem::WrongUse => "wrong_use",
            CertificateProblem::UnknownAuthority { .. } => "unknown_authority",
            CertificateProblem::Forged { .. } => "forged",
            CertificateProblem::WrongHost { .. } => "wrong_host",
            CertificateProblem::Invalid(_) => "invalid",
        }
    }
}

impl IdentityProblem<'_> {
    /// One word for it, to tell repeated lines from each other.
    pub fn kind(&self) -> &'static str {
        match self {
            IdentityProblem::NothingShown => "nothing_shown",
            IdentityProblem::Unreadable(_) => "unreadable",
            IdentityProblem::NotAsBefore => "not_as_before",
            IdentityProblem::OtherName(_) => "other_name",
            IdentityProblem::Revoked(_) => "revoked",
            IdentityProblem::Refused(_, problem) => problem.kind(),
        }
    }

    /// What the server says to an agent that claims to be `claimed`.
    pub fn sentence(&self, claimed: &str) -> String {
        let make = make_agent(claimed);
        match self {
            IdentityProblem::NothingShown => format!(
                "no certificate was shown, and the server asks for one: \
                 set `tls: {{ca: ca.pem, cert: agent.pem, key: agent-key.pem}}` in agent.yaml; {make} makes them"
            ),
            IdentityProblem::Unreadable(why) => {
                format!("the certificate that was shown can't be read ({why}): {make} makes one")
            }
            IdentityProblem::NotAsBefore => format!(
                "`{claimed}` is connected with a certificate, and nobody without one takes its place: \
                 set `tls: {{ca: ca.pem, cert: agent.pem, key: agent-key.pem}}` in agent.yaml"
            ),
            IdentityProblem::OtherName(certificate) => match &certificate.common_name {
                Some(name) => {
                    let name = shown(name);
                    format!(
                        "the certificate is for `{name}`, not for `{claimed}`: \
                         {make} makes one for it, `node: {name}` in agent.yaml claims the other"
                    )
                }
                None => format!(
                    "the certificate has no common name, so it is for no node: {make} makes one for it"
                ),
            },
            IdentityProblem::Revoked(certificate) => format!(
                "the certificate with serial {} was revoked, it is in the server's `agents.deny_serials`: {make} makes a new one",
                certificate.serial
            ),
            IdentityProblem::Refused(certificate, problem) => {
                of_agent(certificate, problem, claimed)
            }
        }
    }
}

fn of_agent(certificate: &Certificate, problem: &CertificateProblem, claimed: &str) -> String {
    let make = make_agent(claimed);
    match problem {
        CertificateProblem::Expired { now } => format!(
            "the certificate expired at {}, and the server's clock says {now}: \
             `llmgw ctl cert renew agent.pem --ca DIR` makes it last longer, unless a clock is wrong",
            certificate.not_after
        ),
        CertificateProblem::NotYet { now } => format!(
            "the certificate is not valid before {}, and the server's clock says {now}: one of the clocks is wrong",
            certificate.not_before
        ),
        CertificateProblem::WrongUse => format!(
            "the certificate is for {}, not for clientAuth: {make} makes an agent's",
            uses(&certificate.usages)
        ),
        CertificateProblem::UnknownAuthority { shown, known } => format!(
            "the certificate was issued by {}, and `agents.tls.ca` of the server has {}: {make} makes one, with the DIR of the server's authority",
            authority(certificate, shown.as_ref()),
            fingerprints(known)
        ),
        CertificateProblem::Forged { authority } => forged(authority.as_ref()),
        CertificateProblem::WrongHost { dialled } => {
            format!("the certificate is not for `{}`", shown(dialled))
        }
        CertificateProblem::Invalid(why) => format!("the certificate can't be verified: {why}"),
    }
}

/// What an agent says of the certificate that the server showed.
pub fn of_server(certificate: &Certificate, problem: &CertificateProblem) -> String {
    match problem {
        CertificateProblem::Expired { now } => format!(
            "the server's certificate expired at {}, and this machine's clock says {now}: \
             `llmgw ctl cert renew server.pem --ca DIR` makes it last longer, unless a clock is wrong",
            certificate.not_after
        ),
        CertificateProblem::NotYet { now } => format!(
            "the server's certificate is not valid before {}, and this machine's clock says {now}: one of the clocks is wrong",
            certificate.not_before
        ),
        CertificateProblem::WrongUse => format!(
            "the certificate that the server shows is for {}, not for serverAuth: {} makes a server's",
            uses(&certificate.usages),
            make_server(&certificate.hosts, "HOST")
        ),
        CertificateProblem::UnknownAuthority { shown, known } => format!(
            "the server's certificate was issued by {}, and `tls.ca` of this agent has {}: copy the server's ca.pem to this node",
            authority(certificate, shown.as_ref()),
            fingerprints(known)
        ),
        CertificateProblem::Forged { authority } => {
            format!(
                "whoever answers is not the server: {}",
                forged(authority.as_ref())
            )
        }
        CertificateProblem::WrongHost { dialled } => {
            let dialled = shown(dialled);
            format!(
                "`{dialled}` was dialled, and the server's certificate is for {}: {} makes one for it",
                hosts(&certificate.hosts),
                make_server(&certificate.hosts, &dialled)
            )
        }
        CertificateProblem::Invalid(why) => {
            format!("the server's certificate can't be verified: {why}")
        }
    }
}

/// What an agent adds to a refusal over identity: which certificate it showed, and its own clock.
pub fn own(certificate: &Certificate, file: &str, now: Moment) -> String {
    let name = certificate.common_name.as_deref().map_or_else(
        || "without a common name".to_owned(),
        |name| format!("for `{}`", shown(name)),
    );
    format!(
        "this agent showed {file} ({name}, serial {}, valid from {} to {}), and its clock says {now}",
        certificate.serial, certificate.not_before, certificate.not_after
    )
}

/// What a server says of an agent that refused its certificate with an alert.
pub fn alerted(
    alert: AlertDescription,
    own: &Certificate,
    authority: Option<&Fingerprint>,
    now: Moment,
) -> String {
    let refused = "the agent refused this server's certificate";
    match alert {
        AlertDescription::BadCertificate => format!(
            "{refused}: what it dials is none of {}; {} makes one for it",
            hosts(&own.hosts),
            make_server(&own.hosts, "NEW")
        ),
        AlertDescription::CertificateExpired => format!(
            "{refused} over its dates: it is valid from {} to {}, and this server's clock says {now}",
            own.not_before, own.not_after
        ),
        AlertDescription::UnknownCA => format!(
            "{refused}: it does not know the authority that issued it, {}; copy ca.pem to its node",
            self::authority(own, authority)
        ),
        AlertDescription::UnsupportedCertificate => format!(
            "{refused}: it does not take it for a server's, it is for {}; {} makes a server's",
            uses(&own.usages),
            make_server(&own.hosts, "HOST")
        ),
        other => format!("the agent ended the handshake: {other:?}"),
    }
}

/// A name from elsewhere on one line, cut where it is too long for one.
pub fn shown(name: &str) -> String {
    let mut text = plain(name);
    if text.len() > NAME_SHOWN_MAX_BYTES {
        let end = (0..=NAME_SHOWN_MAX_BYTES)
            .rev()
            .find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
        text.push('…');
    }
    text
}

fn make_agent(node: &str) -> String {
    format!("`llmgw ctl cert agent --ca DIR --node {node} --out DIR`")
}

/// The command that makes a server's certificate for the same hosts and one more. What a certificate holds and is no host is not repeated, for
/// somebody types this into a shell; what is left out is told.
pub fn make_server(present: &[Host], further: &str) -> String {
    let is_host = |host: &&Host| host.to_string().parse::<Host>().as_ref() == Ok(*host);
    let good: Vec<&Host> = present.iter().filter(is_host).take(LISTED_MAX).collect();
    let mut command = "`llmgw ctl cert server --ca DIR".to_owned();
    for host in &good {
        let _ = write!(command, " --host {}", word(&host.to_string()));
    }
    let _ = write!(command, " --host {} --out DIR`", word(further));
    match present.len() - good.len() {
        0 => {}
        others => {
            let _ = write!(
                command,
                " (with `--host ..` for the other {others} as well)"
            );
        }
    }
    command
}

fn uses(usages: &Usages) -> &'static str {
    match (usages.server_auth, usages.client_auth) {
        (true, true) => "both serverAuth and clientAuth",
        (true, false) => "serverAuth",
        (false, true) => "clientAuth",
        (false, false) => "neither serverAuth nor clientAuth",
    }
}

fn forged(authority: Option<&Fingerprint>) -> String {
    let which = authority.map_or_else(String::new, |authority| format!(" ({authority})"));
    format!("the certificate was not signed by the key of the authority that it names{which}")
}

fn authority(certificate: &Certificate, fingerprint: Option<&Fingerprint>) -> String {
    let issuer = shown(&certificate.issuer);
    match fingerprint {
        Some(fingerprint) => format!("`{issuer}` ({fingerprint})"),
        None => format!("`{issuer}` (whose certificate was not sent)"),
    }
}

fn fingerprints(known: &[Fingerprint]) -> String {
    listed(known.iter().map(|fingerprint| fingerprint.to_string()))
}

fn hosts(hosts: &[Host]) -> String {
    match hosts.is_empty() {
        true => "no host at all (a subject does not count)".to_owned(),
        false => listed(hosts.iter().map(|host| format!("`{host}`"))),
    }
}

fn listed(items: impl ExactSizeIterator<Item = String>) -> String {
    let further = items.len().saturating_sub(LISTED_MAX);
    let mut text = items.take(LISTED_MAX).collect::<Vec<_>>().join(", ");
    if further > 0 {
        let _ = write!(text, " and {further} more");
    }
    text
}

#[cfg(test)]
mod tests;
