//! API keys of tenants: made here, kept by the tenant, known to the server only as a hash.

use std::fmt;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// What every key starts with, so that secret scanners can find one that leaked.
pub const KEY_PREFIX: &str = "sk-llmgw-";
const KEY_RANDOM_BYTES: usize = 32;
const TENANT_MAX_BYTES: usize = 128;

/// A new key.
pub struct Key {
    tenant: String,
    secret: String,
}

/// Why there is no new key.
#[derive(Debug)]
pub enum KeyError {
    /// Not a name that a configuration takes.
    Tenant(String),
    /// The system gave no random bytes.
    NoRandom,
}

impl KeyError {
    pub fn exit_status(&self) -> u8 {
        match self {
            KeyError::Tenant(_) => 2,
            KeyError::NoRandom => 1,
        }
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyError::Tenant(name) => write!(
                f,
                "`{}` is not a tenant's name: letters, digits, `-`, `_` and `.`, {TENANT_MAX_BYTES} at most",
                super::table::plain(name)
            ),
            KeyError::NoRandom => f.write_str("the system gave no random bytes, no key was made"),
        }
    }
}

impl Key {
    /// Makes a key of 32 random bytes for a tenant.
    pub fn new(tenant: &str) -> Result<Key, KeyError> {
        let good = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
        if tenant.is_empty() || tenant.len() > TENANT_MAX_BYTES || !tenant.chars().all(good) {
            return Err(KeyError::Tenant(tenant.to_owned()));
        }
        let mut random = [0; KEY_RANDOM_BYTES];
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        provider
            .secure_random
            .fill(&mut random)
            .map_err(|_| KeyError::NoRandom)?;
        Ok(Key {
            tenant: tenant.to_owned(),
            secret: format!("{KEY_PREFIX}{}", hex(&random)),
        })
    }

    /// What the configuration holds: `sha256:` and the hash of the whole key, prefix included.
    pub fn hash(&self) -> String {
        format!("sha256:{}", hex(&Sha256::digest(self.secret.as_bytes())))
    }

    /// The key, and the tenant's line for the configuration.
    pub fn text(&self) -> String {
        format!(
            "key     {}\nconfig  - {{name: {}, keys: [\"{}\"]}}\n",
            self.secret,
            self.tenant,
            self.hash()
        )
    }

    pub fn json(&self) -> Value {
        json!({"tenant": self.tenant, "key": self.secret, "hash": self.hash()})
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            // Writing into a String doesn't fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_keys_differ_and_the_hash_is_that_of_the_whole_key() {
        let (one, two) = (Key::new("research").unwrap(), Key::new("research").unwrap());
        assert_ne!(one.secret, two.secret);
        assert_eq!(one.secret.len(), KEY_PREFIX.len() + 64);
        let known = Key {
            tenant: "t".into(),
            secret: "abc".into(),
        };
        // FIPS 180-2, the one-block message sample.
        assert_eq!(
            known.hash(),
            "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert!(known.text().contains("- {name: t, keys: [\"sha256:ba78"));
    }

    #[test]
    fn a_name_that_would_break_the_configuration_is_refused() {
        for name in ["", "a b", "a: {", "x\ny", &"a".repeat(129)] {
            assert!(matches!(Key::new(name), Err(KeyError::Tenant(_))), "{name}");
        }
    }
}
