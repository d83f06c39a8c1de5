//! A first certificate without copying a key: the agent makes one, and a request that proves it has it; the server takes the public key from that and nothing else.

use std::fmt;

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateSigningRequestDer, PrivateKeyDer};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::oid_registry::{
    OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY, OID_SIG_ECDSA_WITH_SHA256,
};
use x509_parser::prelude::FromDer;

/// One with a P-256 key and a name has some 250.
pub const REQUEST_MAX_BYTES: usize = 4 << 10;
/// A point of P-256, both coordinates.
const POINT_BYTES: usize = 65;
/// What such a point begins with.
const POINT_UNCOMPRESSED: u8 = 4;

/// A public key whose owner proved to have the private one: SubjectPublicKeyInfo in DER, ECDSA P-256.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestedKey(Vec<u8>);

/// Why no request could be made.
#[derive(Debug)]
pub struct NoKey(rcgen::Error);

/// Why bytes are no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRequest {
    TooLarge(usize),
    Malformed,
    /// Not ECDSA P-256 with SHA-256, which is what agents make.
    OtherAlgorithm,
    /// The signature is not the key's.
    NotProven,
}

/// A new key, as PKCS #8 in PEM. It stays where it was made.
pub fn make_key() -> Result<String, NoKey> {
    let key = KeyPair::generate().map_err(NoKey)?;
    Ok(key.serialize_pem())
}

/// The request to sign a key, as PKCS #10 in PEM.
pub fn request_for(key: &PrivateKeyDer<'_>, node: &str) -> Result<String, NoKey> {
    let key = KeyPair::try_from(key).map_err(NoKey)?;
    let request = unsigned(node).serialize_request(&key).map_err(NoKey)?;
    request.pem().map_err(NoKey)
}

/// The name is for people who look at the request: the server doesn't read it.
fn unsigned(node: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, node);
    params
}

impl RequestedKey {
    /// The same from PEM.
    pub fn from_pem(text: &str) -> Result<RequestedKey, NoRequest> {
        let request = CertificateSigningRequestDer::from_pem_slice(text.as_bytes());
        RequestedKey::from_request(&request.map_err(|_| NoRequest::Malformed)?)
    }

    /// Reads what somebody sent who is not known yet.
    pub fn from_request(der: &[u8]) -> Result<RequestedKey, NoRequest> {
        if der.len() > REQUEST_MAX_BYTES {
            return Err(NoRequest::TooLarge(der.len()));
        }
        let (rest, request) =
            X509CertificationRequest::from_der(der).map_err(|_| NoRequest::Malformed)?;
        if !rest.is_empty() {
            return Err(NoRequest::Malformed);
        }
        let key = &request.certification_request_info.subject_pki;
        let curve = key.algorithm.parameters.as_ref().map(|any| any.as_oid());
        let is_p256 = key.algorithm.algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY
            && matches!(curve, Some(Ok(curve)) if curve == OID_EC_P256);
        if !is_p256 || request.signature_algorithm.algorithm != OID_SIG_ECDSA_WITH_SHA256 {
            return Err(NoRequest::OtherAlgorithm);
        }
        let point = &key.subject_public_key;
        let is_point = point.unused_bits == 0
            && point.data.len() == POINT_BYTES
            && point.data.first() == Some(&POINT_UNCOMPRESSED);
        if !is_point {
            return Err(NoRequest::Malformed);
        }
        request
            .verify_signature()
            .map_err(|_| NoRequest::NotProven)?;
        Ok(RequestedKey(key.raw.to_vec()))
    }

    pub fn der(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for NoKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no key could be made: {}", self.0)
    }
}

impl fmt::Display for NoRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoRequest::TooLarge(bytes) => write!(
                f,
                "a signing request has at most {REQUEST_MAX_BYTES} bytes, this has {bytes}"
            ),
            NoRequest::Malformed => f.write_str("it is no PKCS #10 signing request"),
            NoRequest::OtherAlgorithm => f.write_str(
                "the signing request is for another kind of key; an agent asks for ECDSA P-256 with SHA-256",
            ),
            NoRequest::NotProven => f.write_str(
                "the signing request is not signed with the key that it asks for",
            ),
        }
    }
}

impl std::error::Error for NoKey {}
impl std::error::Error for NoRequest {}

#[cfg(test)]
mod tests {
    use rcgen::{PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PublicKeyData};

    use super::*;

    fn request(key: &KeyPair) -> Vec<u8> {
        let request = CertificateParams::default().serialize_request(key);
        request.unwrap().der().to_vec()
    }

    #[test]
    fn a_request_gives_the_key_that_it_was_made_for_however_often() {
        let made = make_key().unwrap();
        let public = KeyPair::from_pem(&made).unwrap().subject_public_key_info();
        let key = PrivateKeyDer::from_pem_slice(made.as_bytes()).unwrap();
        let texts = [(); 2].map(|()| request_for(&key, "gpu-01").unwrap());
        for text in &texts {
            assert_eq!(RequestedKey::from_pem(text).unwrap().der(), public);
            assert!(text.len() < REQUEST_MAX_BYTES / 4);
        }
        for text in ["", "hello", &texts[0][..texts[0].len() / 2], &made] {
            assert_eq!(RequestedKey::from_pem(text), Err(NoRequest::Malformed));
        }
    }

    #[test]
    fn what_it_asks_for_beside_its_key_makes_no_difference() {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["ctl.example".to_owned()]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
        let greedy = params.serialize_request(&key).unwrap();
        assert_eq!(
            RequestedKey::from_request(greedy.der()),
            RequestedKey::from_request(&request(&key))
        );
    }

    #[test]
    fn what_is_no_request_of_an_agent_is_refused() {
        let good = request(&KeyPair::generate().unwrap());
        let trailing = [&good[..], b"\0"].concat();
        let mut spoilt = good.clone();
        *spoilt.last_mut().unwrap() ^= 1;
        // Another's key within a request that was signed with one's own.
        let other = KeyPair::generate().unwrap();
        let own = KeyPair::generate().unwrap();
        let mut stolen = request(&own);
        let at = stolen
            .windows(POINT_BYTES)
            .position(|window| window == own.der_bytes())
            .unwrap();
        stolen[at..at + POINT_BYTES].copy_from_slice(other.der_bytes());
        let of = |alg| request(&KeyPair::generate_for(alg).unwrap());
        let large = vec![0x30; REQUEST_MAX_BYTES + 1];
        for (der, why) in [
            (&b""[..], NoRequest::Malformed),
            (b"hello", NoRequest::Malformed),
            (&good[..good.len() - 1], NoRequest::Malformed),
            (&trailing, NoRequest::Malformed),
            (&spoilt, NoRequest::NotProven),
            (&stolen, NoRequest::NotProven),
            (&of(&PKCS_ECDSA_P384_SHA384), NoRequest::OtherAlgorithm),
            (&of(&PKCS_ED25519), NoRequest::OtherAlgorithm),
            (&large, NoRequest::TooLarge(large.len())),
        ] {
            assert_eq!(RequestedKey::from_request(der), Err(why));
        }
    }
}
