//! Certificates for tests: an authority, and whatever it issues, right or wrong.

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber,
};
use time::{Duration, OffsetDateTime};

/// What a test's authority issues where it is not told otherwise: in force since yesterday.
const DAYS: Range<i64> = -1..90;

/// An authority of a test.
pub struct Authority {
    pub pem: String,
    pub der: Vec<u8>,
    issuer: Issuer<'static, KeyPair>,
}

/// What a certificate says it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Server,
    Agent,
    /// It does not say.
    Unsaid,
}

/// A certificate to issue.
#[derive(Clone, Debug)]
pub struct Leaf<'a> {
    /// Its common name.
    pub name: Option<&'a str>,
    /// Names and addresses.
    pub hosts: &'a [&'a str],
    pub used: Use,
    /// In force from and to so many days from now.
    pub days: Range<i64>,
}

/// A certificate and its key.
#[derive(Clone, Debug)]
pub struct Issued {
    pub pem: String,
    pub der: Vec<u8>,
    pub key_pem: String,
    pub key_der: Vec<u8>,
    /// Hex without leading zeros, as a configuration lists it.
    pub serial: String,
}

impl Authority {
    pub fn new(name: &str) -> Authority {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        in_force(&mut params, &DAYS);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        Authority {
            pem: certificate.pem(),
            der: certificate.der().to_vec(),
            issuer: Issuer::new(params, key),
        }
    }

    pub fn server(&self, hosts: &[&str]) -> Issued {
        self.issue(&Leaf {
            name: Some("llmgw server"),
            hosts,
            used: Use::Server,
            days: DAYS,
        })
    }

    pub fn agent(&self, node: &str) -> Issued {
        self.issue(&Leaf {
            name: Some(node),
            ..Leaf::agent()
        })
    }

    pub fn issue(&self, leaf: &Leaf<'_>) -> Issued {
        self.issue_to(leaf, &KeyPair::generate().unwrap())
    }

    /// For a key that is there already, in PEM.
    pub fn issue_for(&self, leaf: &Leaf<'_>, key_pem: &str) -> Issued {
        self.issue_to(leaf, &KeyPair::from_pem(key_pem).unwrap())
    }

    fn issue_to(&self, leaf: &Leaf<'_>, key: &KeyPair) -> Issued {
        let hosts: Vec<String> = leaf.hosts.iter().map(|host| (*host).to_owned()).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        if let Some(name) = leaf.name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match leaf.used {
            Use::Server => vec![ExtendedKeyUsagePurpose::ServerAuth],
            Use::Agent => vec![ExtendedKeyUsagePurpose::ClientAuth],
            Use::Unsaid => Vec::new(),
        };
        params.use_authority_key_identifier_extension = true;
        in_force(&mut params, &leaf.days);
        // Of the key, so that two certificates differ and a test can name one.
        let serial = key.public_key_raw()[1..9].to_vec();
        let serial = [&[1][..], &serial].concat();
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        let certificate = params.signed_by(key, &self.issuer).unwrap();
        let digits: String = serial.iter().map(|byte| format!("{byte:02x}")).collect();
        Issued {
            pem: certificate.pem(),
            der: certificate.der().to_vec(),
            key_pem: key.serialize_pem(),
            key_der: key.serialize_der(),
            serial: digits.trim_start_matches('0').to_owned(),
        }
    }
}

impl Leaf<'_> {
    /// An agent's, for nobody yet.
    pub fn agent() -> Leaf<'static> {
        Leaf {
            name: None,
            hosts: &[],
            used: Use::Agent,
            days: DAYS,
        }
    }
}

impl Issued {
    /// Writes `NAME.pem` and `NAME-key.pem`, each at once.
    pub fn write(&self, directory: &Path, name: &str) {
        write(&directory.join(format!("{name}-key.pem")), &self.key_pem);
        write(&directory.join(format!("{name}.pem")), &self.pem);
    }
}

/// Writes a file that only its owner reads, so that nobody sees half of it.
pub fn write(path: &Path, text: &str) {
    let new = path.with_extension("new");
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(&new).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    fs::rename(new, path).unwrap();
}

fn in_force(params: &mut CertificateParams, days: &Range<i64>) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now + Duration::days(days.start);
    // Days that are left are counted whole: an hour less, so that the same number is left whenever a test looks.
    params.not_after = now + Duration::days(days.end) - Duration::hours(1);
}
