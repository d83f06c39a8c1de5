//! The files that hold an identity: a certificate with its chain, its key, and the authorities that are trusted.
//!
//! What is wrong with one is said with its name and the way out, since who reads it has to mend it by hand.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::aws_lc_rs;
use rustls_pki_types::pem::{PemObject, SectionKind};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::certificate::{Certificate, NoCertificate};
use crate::regular;
use crate::text::word;

/// Some thousand certificates: a whole system's bundle has a fifth of it.
pub const FILE_MAX_BYTES: u64 = 1 << 20;
/// The bits that let others than the owner at a key.
const OTHERS_MODE: u32 = 0o077;
/// The one of them that root may give away: how a key is shared with a service that is not root (Debian's `ssl-cert`, a Kubernetes `fsGroup`).
const GROUP_READS_MODE: u32 = 0o040;
const ROOT: u32 = 0;

/// Who may read a private key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// An authority's key: whoever has it is everybody.
    Owner,
    /// A server's or agent's own: also the group of a file that is root's.
    OwnerOrRootsGroup,
}

/// A private key, as it was read.
pub type PrivateKey = PrivateKeyDer<'static>;

/// A certificate, what was sent along with it, and the key that belongs to it.
#[derive(Clone)]
pub struct Identity {
    /// The certificate itself first.
    pub chain: Vec<CertificateDer<'static>>,
    pub key: Arc<PrivateKeyDer<'static>>,
    pub certificate: Certificate,
}

/// Who is trusted to issue certificates: never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authorities {
    pub certificates: Vec<Certificate>,
    pub der: Vec<CertificateDer<'static>>,
}

/// What is wrong with a file, and the way out.
#[derive(Debug)]
pub struct FileProblem {
    pub file: PathBuf,
    pub fault: FileFault,
}

#[derive(Debug)]
pub enum FileFault {
    Io(io::Error),
    TooLarge,
    /// No PEM in it. True: it looks like bare DER.
    NoPem {
        is_der: bool,
    },
    /// PEM that breaks off or holds something else than base64.
    BadPem(String),
    BadCertificate(NoCertificate),
    /// A certificate was expected, a key is there.
    KeyInstead,
    /// A key was expected, a certificate is there.
    CertificateInstead,
    /// PEM, and neither a certificate nor a key.
    NeitherInstead,
    /// The key is encrypted.
    Passphrase,
    /// No kind of key that TLS can use.
    BadKey,
    /// Others than the owner get at the key.
    OpenToOthers {
        mode: u32,
    },
    /// The key is not the certificate's in `certificate`. True: it is that of a later certificate of the file.
    NotItsKey {
        certificate: PathBuf,
        is_of_later: bool,
    },
    /// A `ca` file with a certificate that is no authority's.
    NoAuthority(Box<Certificate>),
    /// A `ca` file with a private key in it.
    KeyAmongAuthorities,
    /// A new file is to be where one is.
    Exists,
    NotWritten(io::Error),
    /// The file system has no hard links, by which a new file appears whole and over nothing.
    NoLinks,
    /// What takes a file's place can't be given to its owner, who then could not read it.
    OwnerLost {
        user: u32,
        group: u32,
        cause: io::Error,
    },
}

impl Identity {
    /// Reads both files and checks that they belong together, and that the key is its owner's alone.
    pub fn load(certificate: &Path, key: &Path) -> Result<Identity, FileProblem> {
        let chain = read_certificates(certificate)?;
        let private = read_key(key, Readers::OwnerOrRootsGroup)?;
        Identity::of(chain, private, certificate).map_err(|fault| match fault {
            FileFault::BadCertificate(_) => FileProblem::new(certificate, fault),
            fault => FileProblem::new(key, fault),
        })
    }

    /// From the text of a certificate that was sent, and the key that it should be for.
    pub fn from_pem(text: &[u8], key: PrivateKey) -> Result<Identity, FileFault> {
        let chain = Pem::parse(text)?.into_certificates()?;
        Identity::of(chain, key, Path::new("the certificate that was sent"))
    }

    /// `file`: where the certificate is from.
    fn of(
        chain: Vec<CertificateDer<'static>>,
        private: PrivateKey,
        file: &Path,
    ) -> Result<Identity, FileFault> {
        let leaf = read_certificate(&chain[0])?;
        let signing =
            aws_lc_rs::sign::any_supported_type(&private).map_err(|_| FileFault::BadKey)?;
        let own = signing.public_key().ok_or(FileFault::BadKey)?;
        if own.as_ref() != leaf.public_key {
            let is_of_later = chain[1..].iter().any(|der| {
                Certificate::from_der(der).is_ok_and(|later| later.public_key == own.as_ref())
            });
            return Err(FileFault::NotItsKey {
                certificate: file.to_owned(),
                is_of_later,
            });
        }
        Ok(Identity {
            chain,
            key: Arc::new(private),
            certificate: leaf,
        })
    }
}

impl Authorities {
    pub fn load(path: &Path) -> Result<Authorities, FileProblem> {
        let pem = Pem::read(path)?;
        Authorities::of(pem).map_err(|fault| FileProblem::new(path, fault))
    }

    /// From the text of such a file.
    pub fn from_pem(text: &[u8]) -> Result<Authorities, FileFault> {
        Authorities::of(Pem::parse(text)?)
    }

    fn of(pem: Pem) -> Result<Authorities, FileFault> {
        if pem.key.is_some() && !pem.certificates.is_empty() {
            return Err(FileFault::KeyAmongAuthorities);
        }
        let der = pem.into_certificates()?;
        let mut certificates = Vec::with_capacity(der.len());
        for der in &der {
            let certificate = read_certificate(der)?;
            if !certificate.is_authority {
                return Err(FileFault::NoAuthority(Box::new(certificate)));
            }
            certificates.push(certificate);
        }
        Ok(Authorities { certificates, der })
    }
}

/// Reads the certificates of a file, at least one.
pub fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileProblem> {
    Pem::read(path)?.certificates()
}

/// Reads a private key that nobody else gets at.
pub fn read_key(path: &Path, readers: Readers) -> Result<PrivateKeyDer<'static>, FileProblem> {
    let pem = Pem::read(path)?;
    let in_file = |fault| FileProblem::new(path, fault);
    // A certificate in the key's place is the graver slip, and may be open to all.
    let is_certificate = !pem.certificates.is_empty();
    let (mode, owner) = (pem.mode, pem.owner);
    let key = pem.key.ok_or_else(|| {
        in_file(match is_certificate {
            true => FileFault::CertificateInstead,
            false => FileFault::NeitherInstead,
        })
    })?;
    match readers.suffice(mode, owner) {
        true => Ok(key),
        false => Err(in_file(FileFault::OpenToOthers { mode })),
    }
}

impl Readers {
    /// Whether a file of this mode and owner is open to nobody else.
    fn suffice(self, mode: u32, owner: u32) -> bool {
        let open = match self {
            Readers::OwnerOrRootsGroup if owner == ROOT => OTHERS_MODE & !GROUP_READS_MODE,
            Readers::OwnerOrRootsGroup | Readers::Owner => OTHERS_MODE,
        };
        mode & open == 0
    }
}

fn read_certificate(der: &CertificateDer<'_>) -> Result<Certificate, FileFault> {
    Certificate::from_der(der).map_err(FileFault::BadCertificate)
}

/// What a PEM file holds of what matters here.
struct Pem {
    path: PathBuf,
    mode: u32,
    owner: u32,
    certificates: Vec<CertificateDer<'static>>,
    /// The first one.
    key: Option<PrivateKeyDer<'static>>,
}

impl Pem {
    fn read(path: &Path) -> Result<Pem, FileProblem> {
        let in_file = |fault| FileProblem::new(path, fault);
        let io = |error| in_file(FileFault::Io(error));
        let file = regular::open(path).map_err(io)?;
        // Of the open file, not of the name: it may be replaced meanwhile.
        let metadata = file.metadata().map_err(io)?;
        let mode = metadata.permissions().mode() & 0o7777;
        let mut text = Vec::new();
        file.take(FILE_MAX_BYTES + 1)
            .read_to_end(&mut text)
            .map_err(io)?;
        if text.len() as u64 > FILE_MAX_BYTES {
            return Err(in_file(FileFault::TooLarge));
        }
        let pem = Pem::parse(&text).map_err(in_file)?;
        Ok(Pem {
            path: path.to_owned(),
            mode,
            owner: metadata.uid(),
            ..pem
        })
    }

    fn parse(text: &[u8]) -> Result<Pem, FileFault> {
        let mut pem = Pem {
            path: PathBuf::new(),
            mode: 0,
            owner: ROOT,
            certificates: Vec::new(),
            key: None,
        };
        if is_encrypted(text) {
            return Err(FileFault::Passphrase);
        }
        let mut is_empty = true;
        for section in <(SectionKind, Vec<u8>)>::pem_slice_iter(text) {
            let (kind, der) = section.map_err(|error| FileFault::BadPem(bad_pem(&error)))?;
            is_empty = false;
            match kind {
                SectionKind::Certificate => pem.certificates.push(der.into()),
                _ => pem.key = pem.key.or_else(|| PrivateKeyDer::from_pem(kind, der)),
            }
        }
        if is_empty {
            let is_der = text.first() == Some(&DER_SEQUENCE);
            return Err(FileFault::NoPem { is_der });
        }
        Ok(pem)
    }

    /// At least one.
    fn certificates(self) -> Result<Vec<CertificateDer<'static>>, FileProblem> {
        let path = self.path.clone();
        self.into_certificates()
            .map_err(|fault| FileProblem::new(&path, fault))
    }

    fn into_certificates(self) -> Result<Vec<CertificateDer<'static>>, FileFault> {
        match (self.certificates.is_empty(), self.key.is_some()) {
            (false, _) => Ok(self.certificates),
            (true, true) => Err(FileFault::KeyInstead),
            (true, false) => Err(FileFault::NeitherInstead),
        }
    }
}

/// The first byte of a certificate or key in DER.
const DER_SEQUENCE: u8 = 0x30;

/// Both forms of a key that wants a passphrase.
fn is_encrypted(text: &[u8]) -> bool {
    let marks = [
        &b"-----BEGIN ENCRYPTED PRIVATE KEY-----"[..],
        b"\nProc-Type: 4,ENCRYPTED",
        b"\rProc-Type: 4,ENCRYPTED",
    ];
    marks
        .iter()
        .any(|mark| text.windows(mark.len()).any(|window| window == *mark))
}

/// Facts alone: what the file holds may be a key.
fn bad_pem(error: &rustls_pki_types::pem::Error) -> String {
    use rustls_pki_types::pem::Error;
    match error {
        Error::MissingSectionEnd { .. } => "it breaks off before its `-----END`",
        Error::IllegalSectionStart { .. } => "a `-----BEGIN` line is damaged",
        Error::Base64Decode(_) => "what stands between `BEGIN` and `END` is not base64",
        _ => "it is damaged",
    }
    .to_owned()
}

impl FileProblem {
    pub fn new(file: &Path, fault: FileFault) -> FileProblem {
        FileProblem {
            file: file.to_owned(),
            fault,
        }
    }
}

impl fmt::Display for FileProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.display();
        let typed = word(&file.to_string());
        match &self.fault {
            FileFault::OpenToOthers { mode } => write!(
                f,
                "{file}: others than its owner get at this private key (mode {mode:04o}); run `chmod 600 {typed}`"
            ),
            FileFault::NoPem { is_der: true } => write!(
                f,
                "{file}: it is DER, not PEM; convert it: `openssl x509 -inform der -in {typed} -out NEW.pem` (`openssl pkey` for a key)"
            ),
            FileFault::Passphrase => write!(
                f,
                "{file}: the key wants a passphrase, which nobody is there to type; write it without one: `openssl pkey -in {typed} -out NEW.pem`"
            ),
            fault => write!(f, "{file}: {fault}"),
        }
    }
}

impl fmt::Display for FileFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileFault::Io(error) => write!(f, "it cannot be read: {error}"),
            FileFault::TooLarge => write!(
                f,
                "it is larger than {FILE_MAX_BYTES} bytes, which no file of certificates is"
            ),
            FileFault::NoPem { is_der: false } => f.write_str(
                "there is no PEM in it; it should have a line `-----BEGIN CERTIFICATE-----`, or `-----BEGIN PRIVATE KEY-----` for a key",
            ),
            FileFault::NoPem { is_der: true } => f.write_str("it is DER, not PEM"),
            FileFault::BadPem(reason) => write!(f, "its PEM cannot be read: {reason}"),
            FileFault::BadCertificate(error) => error.fmt(f),
            FileFault::KeyInstead => f.write_str(
                "it holds a private key where a certificate is expected; are `cert` and `key` exchanged?",
            ),
            FileFault::CertificateInstead => f.write_str(
                "it holds a certificate where a private key is expected; are `cert` and `key` exchanged?",
            ),
            FileFault::NeitherInstead => {
                f.write_str("it holds PEM, but neither a certificate nor a private key")
            }
            FileFault::Passphrase => f.write_str("the key wants a passphrase"),
            FileFault::BadKey => f.write_str(
                "TLS can't use this private key; it takes RSA from 2048 bits on, ECDSA P-256, P-384 and P-521, and Ed25519",
            ),
            FileFault::OpenToOthers { .. } => {
                f.write_str("others than its owner get at this private key")
            }
            FileFault::NotItsKey {
                certificate,
                is_of_later: false,
            } => write!(
                f,
                "this key does not belong to the certificate in {}; give the key that this certificate was made for",
                certificate.display()
            ),
            FileFault::NotItsKey {
                certificate,
                is_of_later: true,
            } => write!(
                f,
                "this key belongs to a later certificate in {}; its own must come first there",
                certificate.display()
            ),
            FileFault::NoAuthority(certificate) => write!(
                f,
                "the certificate of `{}` in it is no authority's ({}); `ca` wants the authority's own, ca.pem",
                certificate.name(),
                certificate.usages
            ),
            FileFault::KeyAmongAuthorities => f.write_str(
                "it holds a private key beside the authority's certificate; an authority's key stays on one machine, leave only the certificate",
            ),
            FileFault::Exists => f.write_str(
                "it exists already and is not overwritten; move it away, or write to another directory",
            ),
            FileFault::NotWritten(error) => write!(f, "it cannot be written: {error}"),
            FileFault::NoLinks => f.write_str(
                "it cannot be written: this file system has no hard links (FAT has none), which new files need to take no other's place; write to another one, and copy the files from there",
            ),
            FileFault::OwnerLost { user, group, cause } => write!(
                f,
                "it was left as it is: a new one can't be given to its owner (user {user}, group {group}), who could not read it then: {cause}; run this as root or as that user"
            ),
        }
    }
}

impl std::error::Error for FileProblem {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.fault {
            FileFault::Io(error)
            | FileFault::NotWritten(error)
            | FileFault::OwnerLost { cause: error, .. } => Some(error),
            FileFault::BadCertificate(error) => Some(error),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
