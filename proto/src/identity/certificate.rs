//! A certificate as a person sees it: for whom, by whom, from when until when, for what. Nothing is verified here but what is asked for by name.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use sha2::{Digest, Sha256};
use x509_parser::certificate::X509Certificate;
use x509_parser::error::X509Error;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;
use x509_parser::x509::X509Name;

use super::host::Host;
use super::moment::Moment;
use crate::hex::hex;
use crate::text::plain;

/// More is no certificate of ours, nor of anybody who speaks TLS.
pub const CERTIFICATE_MAX_BYTES: usize = 64 << 10;
/// Of a name within a certificate, so much is kept.
const NAME_MAX_CHARS: usize = 256;
/// Of the hosts, so many are listed in a message.
const HOSTS_SHOWN_MAX: usize = 12;
pub const FINGERPRINT_BYTES: usize = 32;
/// How a fingerprint is written, before its hex digits.
const FINGERPRINT_PREFIX: &str = "sha256:";

/// What a certificate says. Its texts come from elsewhere and are made safe to show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// None also where there are several: such a certificate names nobody.
    pub common_name: Option<String>,
    /// The alternative names that are DNS names or addresses.
    pub hosts: Vec<Host>,
    pub serial: Serial,
    pub not_before: Moment,
    pub not_after: Moment,
    pub subject: String,
    pub issuer: String,
    pub fingerprint: Fingerprint,
    /// The key that it says is its own, and that of its issuer, in hex.
    pub key_id: Option<String>,
    pub issuer_key_id: Option<String>,
    pub is_authority: bool,
    /// How many authorities may stand between this one and a leaf.
    pub path_length: Option<u32>,
    pub usages: Usages,
    /// What its key may do, as RFC 5280 calls it.
    pub key_usages: Vec<&'static str>,
    /// SubjectPublicKeyInfo, DER.
    pub public_key: Vec<u8>,
}

/// What a certificate may be shown for. One that doesn't say may be shown for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usages {
    pub client_auth: bool,
    pub server_auth: bool,
}

/// A certificate's number among those of its issuer: lower-case hex digits without separators and leading zeros.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Serial(String);

/// SHA-256 over a certificate's DER. Written as `sha256:` and 64 hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub [u8; FINGERPRINT_BYTES]);

/// Whether a certificate is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validity {
    NotYet,
    Current,
    Expired,
}

/// Why bytes are no certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoCertificate {
    TooLarge(usize),
    /// What the parser says.
    Malformed(String),
    /// Bytes after its end.
    Trailing(usize),
}

/// A text that is no serial number or no fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotHex;

impl Certificate {
    pub fn from_der(der: &[u8]) -> Result<Certificate, NoCertificate> {
        let x509 = parse(der)?;
        let basic = x509.basic_constraints()?;
        let usages = match x509.extended_key_usage()? {
            Some(extension) => Usages {
                client_auth: extension.value.client_auth,
                server_auth: extension.value.server_auth,
            },
            None => Usages {
                client_auth: true,
                server_auth: true,
            },
        };
        let hosts = match x509.subject_alternative_name()? {
            Some(extension) => extension.value.general_names.iter(),
            None => [].iter(),
        };
        Ok(Certificate {
            common_name: common_name(x509.subject()),
            hosts: hosts.filter_map(host).collect(),
            serial: Serial::from_bytes(x509.raw_serial()),
            not_before: Moment(x509.validity().not_before.timestamp()),
            not_after: Moment(x509.validity().not_after.timestamp()),
            subject: shown(&x509.subject().to_string()),
            issuer: shown(&x509.issuer().to_string()),
            fingerprint: Fingerprint::of(der),
            key_id: key_id(&x509),
            issuer_key_id: issuer_key_id(&x509),
            is_authority: basic.as_ref().is_some_and(|extension| extension.value.ca),
            path_length: basic.and_then(|extension| extension.value.path_len_constraint),
            usages,
            key_usages: key_usages(&x509)?,
            public_key: x509.public_key().raw.to_vec(),
        })
    }

    /// Whole days until it ends, negative once it has.
    pub fn days_left(&self, now: Moment) -> i64 {
        self.not_after.days_from(now)
    }

    pub fn validity(&self, now: Moment) -> Validity {
        if now < self.not_before {
            Validity::NotYet
        } else if now > self.not_after {
            Validity::Expired
        } else {
            Validity::Current
        }
    }

    /// What to call it: its common name, or its whole subject.
    pub fn name(&self) -> &str {
        self.common_name.as_deref().unwrap_or(&self.subject)
    }

    /// Whether it is for a host that is dialled.
    pub fn covers(&self, dialled: &Host) -> bool {
        self.hosts.iter().any(|host| host.covers(dialled))
    }

    /// The hosts on one line, `none` where there are none.
    pub fn hosts_shown(&self) -> String {
        if self.hosts.is_empty() {
            return "none".to_owned();
        }
        let shown: Vec<String> = self
            .hosts
            .iter()
            .take(HOSTS_SHOWN_MAX)
            .map(Host::to_string)
            .collect();
        let more = self.hosts.len() - shown.len();
        match more {
            0 => shown.join(", "),
            _ => format!("{} and {more} more", shown.join(", ")),
        }
    }
}

/// Whether `authority` issued `certificate`: its name is the issuer's, and its key made the signature. Both are DER.
pub fn is_issued_by(certificate: &[u8], authority: &[u8]) -> bool {
    let (Ok(certificate), Ok(authority)) = (parse(certificate), parse(authority)) else {
        return false;
    };
    certificate.issuer().as_raw() == authority.subject().as_raw()
        && certificate
            .verify_signature(Some(authority.public_key()))
            .is_ok()
}

fn parse(der: &[u8]) -> Result<X509Certificate<'_>, NoCertificate> {
    if der.len() > CERTIFICATE_MAX_BYTES {
        return Err(NoCertificate::TooLarge(der.len()));
    }
    let (rest, x509) = X509Certificate::from_der(der)
        .map_err(|error| NoCertificate::Malformed(shown(&error.to_string())))?;
    match rest.len() {
        0 => Ok(x509),
        trailing => Err(NoCertificate::Trailing(trailing)),
    }
}

fn common_name(subject: &X509Name<'_>) -> Option<String> {
    let mut names = subject.iter_common_name();
    let (first, second) = (names.next(), names.next());
    match second {
        None => first?.as_str().ok().map(shown),
        Some(_) => None,
    }
}

fn host(name: &GeneralName<'_>) -> Option<Host> {
    match name {
        GeneralName::DNSName(name) => Some(Host::Name(shown(&name.to_ascii_lowercase()))),
        GeneralName::IPAddress(bytes) => match bytes.len() {
            4 => Some(Host::Address(IpAddr::from(
                <[u8; 4]>::try_from(*bytes).ok()?,
            ))),
            _ => Some(Host::Address(IpAddr::from(
                <[u8; 16]>::try_from(*bytes).ok()?,
            ))),
        },
        _ => None,
    }
}

fn key_id(x509: &X509Certificate<'_>) -> Option<String> {
    x509.iter_extensions()
        .find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SubjectKeyIdentifier(id) => Some(hex(id.0)),
            _ => None,
        })
}

fn issuer_key_id(x509: &X509Certificate<'_>) -> Option<String> {
    x509.iter_extensions()
        .find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::AuthorityKeyIdentifier(id) => {
                id.key_identifier.as_ref().map(|id| hex(id.0))
            }
            _ => None,
        })
}

fn key_usages(x509: &X509Certificate<'_>) -> Result<Vec<&'static str>, NoCertificate> {
    let Some(extension) = x509.key_usage()? else {
        return Ok(Vec::new());
    };
    let usage = extension.value;
    let all = [
        ("digitalSignature", usage.digital_signature()),
        ("nonRepudiation", usage.non_repudiation()),
        ("keyEncipherment", usage.key_encipherment()),
        ("dataEncipherment", usage.data_encipherment()),
        ("keyAgreement", usage.key_agreement()),
        ("keyCertSign", usage.key_cert_sign()),
        ("cRLSign", usage.crl_sign()),
        ("encipherOnly", usage.encipher_only()),
        ("decipherOnly", usage.decipher_only()),
    ];
    let names = all.into_iter().filter(|(_, set)| *set);
    Ok(names.map(|(name, _)| name).collect())
}

/// A text of a certificate, safe to show and not too long.
fn shown(text: &str) -> String {
    let mut shown = plain(text);
    if let Some((end, _)) = shown.char_indices().nth(NAME_MAX_CHARS) {
        shown.truncate(end);
        shown.push('…');
    }
    shown
}

impl Serial {
    pub fn from_bytes(bytes: &[u8]) -> Serial {
        Serial(hex(bytes).trim_start_matches('0').to_owned())
    }
}

/// Also in capitals and with colons, as openssl prints them.
impl FromStr for Serial {
    type Err = NotHex;

    fn from_str(text: &str) -> Result<Serial, NotHex> {
        let digits = text.replace(':', "").to_ascii_lowercase();
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(NotHex);
        }
        Ok(Serial(digits.trim_start_matches('0').to_owned()))
    }
}

impl Fingerprint {
    pub fn of(der: &[u8]) -> Fingerprint {
        Fingerprint(Sha256::digest(der).into())
    }
}

/// With or without `sha256:` before it, in capitals and with colons too.
impl FromStr for Fingerprint {
    type Err = NotHex;

    fn from_str(text: &str) -> Result<Fingerprint, NotHex> {
        let digits = text.strip_prefix(FINGERPRINT_PREFIX).unwrap_or(text);
        let digits = digits.replace(':', "");
        if digits.len() != 2 * FINGERPRINT_BYTES
            || !digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        {
            return Err(NotHex);
        }
        let mut bytes = [0; FINGERPRINT_BYTES];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).map_err(|_| NotHex)?;
        }
        Ok(Fingerprint(bytes))
    }
}

impl From<X509Error> for NoCertificate {
    fn from(error: X509Error) -> NoCertificate {
        NoCertificate::Malformed(shown(&error.to_string()))
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "0" } else { &self.0 })
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{FINGERPRINT_PREFIX}{}", hex(&self.0))
    }
}

impl fmt::Display for Usages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.client_auth, self.server_auth) {
            (true, true) => "clientAuth and serverAuth",
            (true, false) => "clientAuth only",
            (false, true) => "serverAuth only",
            (false, false) => "neither clientAuth nor serverAuth",
        })
    }
}

impl fmt::Display for NoCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoCertificate::TooLarge(bytes) => write!(
                f,
                "a certificate has at most {CERTIFICATE_MAX_BYTES} bytes, this has {bytes}"
            ),
            NoCertificate::Malformed(reason) => write!(f, "it is no X.509 certificate: {reason}"),
            NoCertificate::Trailing(bytes) => {
                write!(f, "{bytes} bytes follow the end of the certificate")
            }
        }
    }
}

impl fmt::Display for NotHex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it is not written in hex digits, or has the wrong number of them")
    }
}

impl std::error::Error for NoCertificate {}
impl std::error::Error for NotHex {}

#[cfg(test)]
mod tests;
