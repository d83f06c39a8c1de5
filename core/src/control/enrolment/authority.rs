//! The authority that signs for nodes: its files are read each time, so that a key that was replaced or locked away counts at once.

use std::path::PathBuf;

use llmgw_proto::enrolment::AUTHORITY_MAX_BYTES;
use llmgw_proto::identity::{Fingerprint, Moment, RequestedKey};
use sha2::{Digest, Sha256};

use super::book::KeyDigest;
use super::{Certified, Signer, Signing, Trusted};
use crate::authority::{Authority, AuthorityProblem};
use crate::config::Agents;

/// Where they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorityFiles {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

impl AuthorityFiles {
    /// `None`: nodes get no certificates from this server.
    pub fn of(agents: &Agents) -> Option<AuthorityFiles> {
        let tls = agents.tls.as_ref()?;
        Some(AuthorityFiles {
            certificate: tls.ca.clone()?,
            key: tls.ca_key.clone()?,
        })
    }

    /// That they can be used now, and whose they are.
    ///
    /// # Errors
    /// What is wrong with which of them.
    pub fn check(&self) -> Result<Fingerprint, AuthorityProblem> {
        Ok(self.load()?.certificate.fingerprint)
    }

    fn load(&self) -> Result<Authority, AuthorityProblem> {
        Authority::from_files(&self.certificate, &self.key, Moment::now())
    }
}

impl Signing for AuthorityFiles {
    fn authority(&self) -> Result<Box<dyn Signer>, String> {
        let authority = self.load().map_err(|problem| problem.to_string())?;
        if authority.trusted.len() > AUTHORITY_MAX_BYTES {
            return Err(format!(
                "{}: it has more than {AUTHORITY_MAX_BYTES} bytes, which is more than an agent takes",
                self.certificate.display()
            ));
        }
        Ok(Box::new(authority))
    }

    fn requested_key(&self, request: &str) -> Result<KeyDigest, String> {
        let key = RequestedKey::from_pem(request).map_err(|why| why.to_string())?;
        Ok(KeyDigest(Sha256::digest(key.der()).into()))
    }
}

impl Signer for Authority {
    fn trusted(&self) -> Trusted {
        Trusted {
            fingerprint: self.certificate.fingerprint,
            pem: self.trusted.clone(),
        }
    }

    fn sign(&self, node: &str, request: &str) -> Result<Certified, String> {
        let key = RequestedKey::from_pem(request).map_err(|why| why.to_string())?;
        let made = Authority::sign(self, node, &key, Moment::now());
        let made = made.map_err(|problem| problem.to_string())?;
        Ok(Certified {
            certificate: made.pem,
            serial: made.certificate.serial.to_string(),
            not_after: made.certificate.not_after.to_string(),
        })
    }
}
