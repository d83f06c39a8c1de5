//! Making certificates: an authority's own, and those that it issues.

use std::path::Path;

use llmgw_proto::hex::hex;
use llmgw_proto::identity::certificate::{Certificate, NoCertificate, Usages, is_issued_by};
use llmgw_proto::identity::moment::{DAY_SECONDS, Moment};
use llmgw_proto::identity::{Host, RequestedKey};
use llmgw_proto::session::{NODE_ID_MAX_BYTES, is_node_id};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, SanType, SerialNumber, SubjectPublicKeyInfo,
};
use rustls::pki_types::CertificateDer;
use time::OffsetDateTime;

use super::{
    AUTHORITY_DAYS, AUTHORITY_SKEW_SECONDS, Authority, AuthorityProblem, LEAF_DAYS, NotRenewed,
    SKEW_SECONDS,
};

const SERIAL_BYTES: usize = 16;
/// Bytes of the serial number in an authority's name, which tell it from another one.
const NAME_BYTES: usize = 4;
/// A server's common name where its first host is too long for one. Nobody compares it.
const SERVER_NAME: &str = "llmgw server";

/// Whom a certificate is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    name: String,
    hosts: Vec<Host>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Server,
    Agent,
}

/// A certificate that was issued.
#[derive(Clone, Debug)]
pub struct Made {
    pub pem: String,
    pub certificate: Certificate,
}

/// A new authority. No `Debug`: it holds a secret.
pub struct MadeAuthority {
    pub pem: String,
    pub key_pem: String,
    pub certificate: Certificate,
}

/// Makes an authority that issues to leaves only.
pub fn make(now: Moment) -> Result<MadeAuthority, AuthorityProblem> {
    let key = KeyPair::generate()?;
    let serial = serial()?;
    let name = format!("llmgw authority {}", hex(&serial[..NAME_BYTES]));
    let from = now.after(-AUTHORITY_SKEW_SECONDS);
    let until = now.after(AUTHORITY_DAYS * DAY_SECONDS);
    let mut params = params(&name, serial, from, until)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let made = params.self_signed(&key)?;
    Ok(MadeAuthority {
        pem: made.pem(),
        key_pem: key.serialize_pem(),
        certificate: read(made.der())?,
    })
}

impl Authority {
    /// Issues a certificate for a public key: SubjectPublicKeyInfo in DER.
    pub fn issue(
        &self,
        holder: &Holder,
        public_key: &[u8],
        now: Moment,
    ) -> Result<Made, AuthorityProblem> {
        let from = now.after(-SKEW_SECONDS).max(self.certificate.not_before);
        let until = now.after(LEAF_DAYS * DAY_SECONDS);
        let until = until.min(self.certificate.not_after);
        let mut params = params(&holder.name, serial()?, from, until)?;
        params.is_ca = IsCa::ExplicitNoCa;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![match holder.kind {
            Kind::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Kind::Agent => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        params.subject_alt_names = holder
            .hosts
            .iter()
            .map(alternative_name)
            .collect::<Result<_, _>>()?;
        let key = SubjectPublicKeyInfo::from_der(public_key)?;
        let made = params.signed_by(&key, &self.issuer)?;
        if !is_issued_by(made.der(), &self.der) {
            return Err(AuthorityProblem::NotVerified);
        }
        Ok(Made {
            pem: made.pem(),
            certificate: read(made.der())?,
        })
    }

    /// Issues an agent's first certificate, for the key that it made itself.
    pub fn sign(
        &self,
        node: &str,
        key: &RequestedKey,
        now: Moment,
    ) -> Result<Made, AuthorityProblem> {
        self.issue(&Holder::agent(node), key.der(), now)
    }

    /// Issues a certificate like one that it issued before: for the same names and the same key.
    pub fn renew(
        &self,
        file: &Path,
        old: &CertificateDer<'_>,
        now: Moment,
    ) -> Result<Made, AuthorityProblem> {
        let refuse = |why| AuthorityProblem::NotRenewed {
            file: file.to_owned(),
            why,
        };
        let facts = read(old)?;
        if facts.is_authority {
            return Err(refuse(NotRenewed::Authority));
        }
        if !is_issued_by(old, &self.der) {
            return Err(refuse(NotRenewed::OtherIssuer {
                issuer: facts.issuer,
                authority: self.certificate.subject.clone(),
            }));
        }
        let holder = Holder::of(&facts).map_err(refuse)?;
        self.issue(&holder, &facts.public_key, now)
    }
}

impl Holder {
    /// A server that agents dial by these hosts.
    pub fn server(hosts: Vec<Host>) -> Holder {
        let first = hosts.first().map(Host::to_string);
        let name = first.filter(|name| name.len() <= NODE_ID_MAX_BYTES);
        Holder {
            name: name.unwrap_or_else(|| SERVER_NAME.to_owned()),
            hosts,
            kind: Kind::Server,
        }
    }

    /// The agent of a node.
    pub fn agent(node: &str) -> Holder {
        Holder {
            name: node.to_owned(),
            hosts: Vec::new(),
            kind: Kind::Agent,
        }
    }

    /// Whom a certificate of ours was for.
    fn of(facts: &Certificate) -> Result<Holder, NotRenewed> {
        let name = match &facts.common_name {
            Some(name) => name.clone(),
            None => return Err(NotRenewed::OtherName(facts.subject.clone())),
        };
        let kind = match facts.usages {
            Usages {
                client_auth: true,
                server_auth: false,
            } => Kind::Agent,
            Usages {
                client_auth: false,
                server_auth: true,
            } => Kind::Server,
            usages => return Err(NotRenewed::OtherKind(usages)),
        };
        if kind == Kind::Agent && !is_node_id(&name) {
            return Err(NotRenewed::OtherName(name));
        }
        for host in &facts.hosts {
            let text = host.to_string();
            if text.parse().as_ref() != Ok(host) {
                return Err(NotRenewed::OtherName(text));
            }
        }
        Ok(Holder {
            name,
            hosts: facts.hosts.clone(),
            kind,
        })
    }
}

fn params(
    name: &str,
    serial: [u8; SERIAL_BYTES],
    from: Moment,
    until: Moment,
) -> Result<CertificateParams, AuthorityProblem> {
    let date = |moment: Moment| {
        OffsetDateTime::from_unix_timestamp(moment.0)
            .map_err(|_| AuthorityProblem::Make(rcgen::Error::Time))
    };
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.not_before = date(from)?;
    params.not_after = date(until)?;
    Ok(params)
}

/// Random, positive, and always of the same length.
fn serial() -> Result<[u8; SERIAL_BYTES], AuthorityProblem> {
    let mut serial = [0; SERIAL_BYTES];
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    provider
        .secure_random
        .fill(&mut serial)
        .map_err(|_| AuthorityProblem::NoRandom)?;
    serial[0] = serial[0] & 0x7f | 0x40;
    Ok(serial)
}

fn alternative_name(host: &Host) -> Result<SanType, rcgen::Error> {
    Ok(match host {
        Host::Name(name) => SanType::DnsName(name.as_str().try_into()?),
        Host::Address(address) => SanType::IpAddress(*address),
    })
}

fn read(der: &CertificateDer<'_>) -> Result<Certificate, AuthorityProblem> {
    Certificate::from_der(der).map_err(|error: NoCertificate| {
        AuthorityProblem::Make(rcgen::Error::X509(error.to_string()))
    })
}
