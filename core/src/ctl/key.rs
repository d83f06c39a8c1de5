//! API keys of tenants: made here, kept by the tenant, known to the server only as a hash.

use std::fmt;

use llmgw_proto::hex::hex;
use llmgw_proto::units::HumanDuration;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::config::UtcTime;
use crate::random;

/// What every key starts with, so that secret scanners can find one that leaked.
pub const KEY_PREFIX: &str = "sk-llmgw-";
const TENANT_MAX_BYTES: usize = 128;
const DAY_SECONDS: u64 = 86_400;

/// A new key.
pub struct Key {
    tenant: String,
    secret: String,
    expires: Option<UtcTime>,
}

/// Why there is no new key.
#[derive(Debug)]
pub enum KeyError {
    /// Not a name that a configuration takes.
    Tenant(String),
    /// No date, no duration, or none that is still to come.
    Expires(String),
    /// The system gave no random bytes.
    NoRandom,
}

impl KeyError {
    pub fn exit_status(&self) -> u8 {
        match self {
            KeyError::Tenant(_) | KeyError::Expires(_) => 2,
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
            KeyError::Expires(text) => write!(
                f,
                "`{}` is no time to come: give a duration such as `90d` or `12h`, or a date such as `2026-12-31` (UTC)",
                super::table::plain(text)
            ),
            KeyError::NoRandom => f.write_str("the system gave no random bytes, no key was made"),
        }
    }
}

impl Key {
    /// Makes a key of 32 random bytes for a tenant. `expires` is a duration from `now` on, or a date.
    pub fn new(tenant: &str, expires: Option<&str>, now: UtcTime) -> Result<Key, KeyError> {
        let good = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
        if tenant.is_empty() || tenant.len() > TENANT_MAX_BYTES || !tenant.chars().all(good) {
            return Err(KeyError::Tenant(tenant.to_owned()));
        }
        let expires = match expires {
            Some(text) => {
                Some(end_of(text, now).ok_or_else(|| KeyError::Expires(text.to_owned()))?)
            }
            None => None,
        };
        let secret = random::secret().ok_or(KeyError::NoRandom)?;
        Ok(Key {
            tenant: tenant.to_owned(),
            secret: format!("{KEY_PREFIX}{secret}"),
            expires,
        })
    }

    /// What the configuration holds: `sha256:` and the hash of the whole key, prefix included.
    pub fn hash(&self) -> String {
        format!("sha256:{}", hex(&Sha256::digest(self.secret.as_bytes())))
    }

    /// The key, and the tenant's line for the configuration.
    pub fn text(&self) -> String {
        let hash = self.hash();
        let line = match self.expires {
            Some(expires) => format!("{{hash: \"{hash}\", expires: {expires}}}"),
            None => format!("\"{hash}\""),
        };
        format!(
            "key     {}\nconfig  - {{name: {}, keys: [{line}]}}\n",
            self.secret, self.tenant
        )
    }

    pub fn json(&self) -> Value {
        let expires = self.expires.map(|expires| expires.to_string());
        json!({"tenant": self.tenant, "key": self.secret, "hash": self.hash(), "expires": expires})
    }
}

/// The moment that a text names; one that is past is none.
pub(super) fn end_of(text: &str, now: UtcTime) -> Option<UtcTime> {
    let seconds = match text.strip_suffix('d') {
        Some(days) => days.parse::<u64>().ok()?.checked_mul(DAY_SECONDS)?,
        None => match text.parse::<HumanDuration>() {
            Ok(duration) => duration.0.as_secs(),
            Err(_) => text.parse::<UtcTime>().ok()?.0.checked_sub(now.0)?,
        },
    };
    let end = UtcTime(now.0.checked_add(seconds).filter(|_| seconds > 0)?);
    (end <= UtcTime::LAST).then_some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_keys_differ_and_the_hash_is_that_of_the_whole_key() {
        let key = || Key::new("research", None, UtcTime(0)).unwrap();
        let (one, two) = (key(), key());
        assert_ne!(one.secret, two.secret);
        assert_eq!(one.secret.len(), KEY_PREFIX.len() + 64);
        let known = Key {
            tenant: "t".into(),
            secret: "abc".into(),
            expires: None,
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
            assert!(
                matches!(Key::new(name, None, UtcTime(0)), Err(KeyError::Tenant(_))),
                "{name}"
            );
        }
    }

    #[test]
    fn a_key_expires_after_a_duration_or_on_a_date_to_come() {
        let now: UtcTime = "2026-11-29T12:00:00Z".parse().unwrap();
        for (text, expires) in [
            ("90d", "2027-02-27T12:00:00Z"),
            ("12h", "2026-11-30T00:00:00Z"),
            ("2026-12-31", "2026-12-31T00:00:00Z"),
            ("2026-11-29T12:00:01Z", "2026-11-29T12:00:01Z"),
        ] {
            let key = Key::new("t", Some(text), now).unwrap();
            let line = format!("keys: [{{hash: \"{}\", expires: {expires}}}]", key.hash());
            assert!(key.text().contains(&line), "{}", key.text());
            assert_eq!(key.json()["expires"], expires);
        }
        let past = [
            "",
            "0d",
            "0s",
            "d",
            "-1d",
            "soon",
            "2026-11-29T12:00:00Z",
            "2020-01-01",
            "9999999d",
        ];
        for text in past {
            let error = Key::new("t", Some(text), now).err().unwrap();
            assert_eq!(error.exit_status(), 2);
            assert!(error.to_string().contains("`90d`"), "{error}");
        }
    }
}
