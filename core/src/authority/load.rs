//! An authority out of its files.

use std::path::Path;

use llmgw_proto::identity::Authorities;
use llmgw_proto::identity::certificate::Validity;
use llmgw_proto::identity::files::{self, FileFault, FileProblem, Readers, read_key};
use llmgw_proto::identity::moment::Moment;
use llmgw_proto::regular;
use pem::{EncodeConfig, LineEnding, Pem};
use rcgen::{Issuer, KeyPair, PublicKeyData};
use rustls::pki_types::CertificateDer;

use super::{Authority, AuthorityProblem};

/// In an authority's directory.
pub const CERTIFICATE_FILE: &str = "ca.pem";
pub const KEY_FILE: &str = "ca-key.pem";
/// What the key of an authority is for, where its certificate limits that.
const SIGNS_CERTIFICATES: &str = "keyCertSign";

impl Authority {
    /// From the directory that `ctl cert ca` wrote.
    pub fn load(directory: &Path, now: Moment) -> Result<Authority, AuthorityProblem> {
        let certificate = directory.join(CERTIFICATE_FILE);
        Authority::from_files(&certificate, &directory.join(KEY_FILE), now)
    }

    /// Of several authorities in the file, the one that the key belongs to.
    pub fn from_files(
        certificate: &Path,
        key: &Path,
        now: Moment,
    ) -> Result<Authority, AuthorityProblem> {
        let text = text_of(certificate)?;
        let authorities =
            Authorities::from_pem(&text).map_err(|fault| FileProblem::new(certificate, fault))?;
        let own = KeyPair::try_from(&read_key(key, Readers::Owner)?)
            .map_err(|_| FileProblem::new(key, FileFault::BadKey))?;
        let public_key = own.subject_public_key_info();
        let trusted = pem_of(&authorities.der);
        let pairs = authorities.certificates.into_iter().zip(authorities.der);
        let mut pairs = pairs.filter(|(facts, _)| facts.public_key == public_key);
        let Some((facts, der)) = pairs.next() else {
            return Err(AuthorityProblem::NotItsKey {
                certificate: certificate.to_owned(),
                key: key.to_owned(),
            });
        };
        if !facts.key_usages.is_empty() && !facts.key_usages.contains(&SIGNS_CERTIFICATES) {
            return Err(AuthorityProblem::MayNotIssue {
                file: certificate.to_owned(),
            });
        }
        match facts.validity(now) {
            Validity::Current => {}
            validity => {
                return Err(AuthorityProblem::NotInForce {
                    file: certificate.to_owned(),
                    certificate: Box::new(facts),
                    validity,
                });
            }
        }
        Ok(Authority {
            issuer: Issuer::from_ca_cert_der(&der, own)?,
            der,
            certificate: facts,
            trusted,
        })
    }
}

/// Certificates alone, whatever stands between them in the file that they are from.
pub(crate) fn pem_of(certificates: &[CertificateDer<'_>]) -> String {
    let config = EncodeConfig::new().set_line_ending(LineEnding::LF);
    let block = |der: &CertificateDer<'_>| {
        pem::encode_config(&Pem::new("CERTIFICATE", der.to_vec()), config)
    };
    certificates.iter().map(block).collect()
}

fn text_of(path: &Path) -> Result<Vec<u8>, FileProblem> {
    let in_file = |fault| FileProblem::new(path, fault);
    let bytes = regular::read(path, files::FILE_MAX_BYTES + 1)
        .map_err(|error| in_file(FileFault::Io(error)))?;
    if bytes.len() as u64 > files::FILE_MAX_BYTES {
        return Err(in_file(FileFault::TooLarge));
    }
    Ok(bytes)
}
