//! Credentials of the configuration: compared in constant time, and shown by nothing.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// The SHA-256 of an API key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyHash(pub(super) [u8; 32]);

/// A text that neither `Debug` nor `Display` shows.
#[derive(Clone, Eq)]
pub struct Secret(Arc<str>);

impl KeyHash {
    /// The hash of a key as a client sends it.
    pub fn of(key: &[u8]) -> Self {
        KeyHash(Sha256::digest(key).into())
    }

    /// From the `sha256:<64 hex>` of the configuration.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let hex = text.strip_prefix("sha256:")?;
        if hex.len() != 64 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let mut bytes = [0; 32];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16).ok()?;
        }
        Some(KeyHash(bytes))
    }

    /// Equality in constant time.
    pub fn matches(&self, other: &KeyHash) -> bool {
        self.0.ct_eq(&other.0).into()
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// As the configuration writes it; a hash is no secret, but a long one is no help in a log either.
impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "sha256:{:02x}{:02x}{:02x}{:02x}...",
            self.0[0], self.0[1], self.0[2], self.0[3]
        )
    }
}

impl Secret {
    pub fn new(text: &str) -> Self {
        Secret(text.into())
    }

    /// The text itself, for the one place that sends or compares it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Equality in a time that depends on neither the texts nor, since hashes are compared, their lengths.
    pub fn matches(&self, other: &[u8]) -> bool {
        Sha256::digest(self.0.as_bytes())
            .ct_eq(&Sha256::digest(other))
            .into()
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        self.matches(other.0.as_bytes())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
