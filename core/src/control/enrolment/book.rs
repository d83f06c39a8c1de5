//! The tokens that were handed out, and what became of each: a pure table of (token, key, now) → verdict.
//!
//! It knows hashes only. A node has one token at a time, the last that was made for it. One that was used stays until it is forgotten, with
//! the key that used it and the certificate that it became: whoever has that key gets that certificate again, since the answer may have been lost,
//! and never a second one, so that to revoke a certificate is to be done with its token too.
//!
//! Beside the tokens it knows which keys nodes got certificates for, for as long as those are good: a key whose certificate was revoked gets none
//! with a later token either.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use llmgw_proto::enrolment::EnrolmentRefusalCode;
use llmgw_proto::identity::Serial;
use llmgw_proto::identity::token::{EnrolmentToken, SecretHash};
use subtle::ConstantTimeEq;

use super::Certified;
use crate::config::UtcTime;

/// Tokens at a time, expired ones included.
pub const TOKENS_MAX: usize = 4_096;
/// Keys that are remembered beyond their tokens. Of more the one whose certificate ends first is forgotten.
pub const KEYS_MAX: usize = 2 * TOKENS_MAX;
/// How long a token that expired is still told from one that never was.
const EXPIRED_KEPT: Duration = Duration::from_secs(7 * 24 * 3_600);

/// The SHA-256 of a public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyDigest(pub [u8; 32]);

/// A token that was handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    pub secret: SecretHash,
    pub expires: UtcTime,
    pub used: Option<Used>,
}

/// What became of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Used {
    pub by: KeyDigest,
    pub certified: Certified,
}

/// A key that a node got a certificate for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificated {
    pub node: String,
    pub by: KeyDigest,
    pub serial: String,
    pub not_after: UtcTime,
}

/// All of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Book {
    /// By the node that each is for.
    tokens: BTreeMap<String, Token>,
    keys: Vec<Certificated>,
}

/// What a token allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allowed {
    First,
    /// The same key had its certificate already: this one.
    Again(Certified),
}

/// Why a token allows nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotAllowed {
    OtherNode {
        node: String,
        claimed: String,
    },
    Unknown {
        node: String,
    },
    Expired {
        node: String,
        at: UtcTime,
    },
    Used {
        node: String,
    },
    /// What this key had was revoked.
    RevokedKey {
        node: String,
        serial: String,
    },
    /// Another authority signs now than the one that the token is from.
    OtherAuthority {
        node: String,
    },
}

/// There is no room for another token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl Book {
    /// Takes in a new token, in place of the node's last one. Those that expired long ago are forgotten, and all that expired where there is no room.
    ///
    /// # Errors
    /// [`TOKENS_MAX`] other nodes have a token that still works.
    pub fn add(
        &mut self,
        node: &str,
        secret: SecretHash,
        expires: UtcTime,
        now: UtcTime,
    ) -> Result<(), Full> {
        self.tokens.remove(node);
        let kept_from = UtcTime(now.0.saturating_sub(EXPIRED_KEPT.as_secs()));
        self.tokens.retain(|_, token| token.expires > kept_from);
        if self.tokens.len() >= TOKENS_MAX {
            self.tokens.retain(|_, token| token.expires > now);
        }
        if self.tokens.len() >= TOKENS_MAX {
            return Err(Full);
        }
        let token = Token {
            secret,
            expires,
            used: None,
        };
        self.tokens.insert(node.to_owned(), token);
        Ok(())
    }

    /// Whether the token works for some key, before anything that comes with it is looked at.
    ///
    /// # Errors
    /// Why it does not.
    pub fn find(
        &self,
        token: &EnrolmentToken,
        claimed: &str,
        now: UtcTime,
    ) -> Result<&Token, NotAllowed> {
        let node = token.node().to_owned();
        if claimed != node {
            let claimed = claimed.to_owned();
            return Err(NotAllowed::OtherNode { node, claimed });
        }
        let secret = token.secret_hash();
        let is_it = |known: &&Token| bool::from(known.secret.0.ct_eq(&secret.0));
        match self.tokens.get(&node).filter(is_it) {
            None => Err(NotAllowed::Unknown { node }),
            Some(known) if known.expires <= now => {
                let at = known.expires;
                Err(NotAllowed::Expired { node, at })
            }
            Some(known) => Ok(known),
        }
    }

    /// Whether the token works for this key, which must not be one that had a certificate which is denied now.
    ///
    /// # Errors
    /// Why it does not.
    pub fn check(
        &self,
        token: &EnrolmentToken,
        claimed: &str,
        key: KeyDigest,
        denied: &BTreeSet<Serial>,
        now: UtcTime,
    ) -> Result<Allowed, NotAllowed> {
        let found = self.find(token, claimed, now)?;
        let is_denied = |serial: &str| serial.parse().is_ok_and(|serial| denied.contains(&serial));
        // Whichever node it was.
        let serials = self.keys.iter().filter(|known| known.by == key);
        let serials = serials.map(|known| &known.serial);
        let last = found.used.iter().filter(|used| used.by == key);
        let mut serials = serials.chain(last.map(|used| &used.certified.serial));
        if let Some(serial) = serials.find(|serial| is_denied(serial)) {
            return Err(NotAllowed::RevokedKey {
                node: token.node().to_owned(),
                serial: serial.clone(),
            });
        }
        match &found.used {
            None => Ok(Allowed::First),
            Some(used) if used.by == key => Ok(Allowed::Again(used.certified.clone())),
            Some(_) => Err(NotAllowed::Used {
                node: token.node().to_owned(),
            }),
        }
    }

    /// From now on the node's token is for this key and this certificate alone.
    pub fn use_up(&mut self, node: &str, by: KeyDigest, certified: Certified, now: UtcTime) {
        self.keys.retain(|known| known.not_after > now);
        // One whose end can't be read is kept for as long as there is room.
        let not_after = certified.not_after.parse().unwrap_or(UtcTime::LAST);
        self.remember(Certificated {
            node: node.to_owned(),
            by,
            serial: certified.serial.clone(),
            not_after,
        });
        if let Some(token) = self.tokens.get_mut(node) {
            token.used = Some(Used { by, certified });
        }
    }

    /// Takes in a key that had a certificate.
    pub fn remember(&mut self, key: Certificated) {
        if self.keys.len() >= KEYS_MAX {
            let first = self.keys.iter().enumerate();
            let first = first.min_by_key(|(_, known)| known.not_after);
            if let Some((at, _)) = first {
                self.keys.remove(at);
            }
        }
        self.keys.push(key);
    }

    pub fn tokens(&self) -> impl Iterator<Item = (&str, &Token)> {
        self.tokens
            .iter()
            .map(|(node, token)| (node.as_str(), token))
    }

    pub fn keys(&self) -> &[Certificated] {
        &self.keys
    }

    /// `false`: the node has one already.
    #[must_use]
    pub fn restore(&mut self, node: String, token: Token) -> bool {
        self.tokens.insert(node, token).is_none()
    }
}

impl NotAllowed {
    pub fn code(&self) -> EnrolmentRefusalCode {
        match self {
            NotAllowed::OtherNode { .. } => EnrolmentRefusalCode::OtherNode,
            NotAllowed::Unknown { .. } | NotAllowed::OtherAuthority { .. } => {
                EnrolmentRefusalCode::UnknownToken
            }
            NotAllowed::Expired { .. } => EnrolmentRefusalCode::Expired,
            NotAllowed::Used { .. } => EnrolmentRefusalCode::Used,
            NotAllowed::RevokedKey { .. } => EnrolmentRefusalCode::RevokedKey,
        }
    }
}

impl fmt::Display for NotAllowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = match self {
            NotAllowed::OtherNode { node, claimed } => {
                return write!(f, "the token is for node `{node}`, not for `{claimed}`");
            }
            NotAllowed::Unknown { node } => {
                write!(
                    f,
                    "the token of node `{node}` is not the last one that was made for it here"
                )?;
                node
            }
            NotAllowed::Expired { node, at } => {
                write!(f, "the token of node `{node}` expired at {at}")?;
                node
            }
            NotAllowed::Used { node } => {
                write!(
                    f,
                    "the token of node `{node}` was used already, for another key"
                )?;
                node
            }
            NotAllowed::RevokedKey { node, serial } => {
                return write!(
                    f,
                    "the key of node `{node}` is that of the certificate with serial {serial}, which was revoked: remove its `agent-key.pem` too, \
                     so that it makes another, and give it a new token (`llmgw ctl cert token --node {node}`)"
                );
            }
            NotAllowed::OtherAuthority { node } => {
                write!(
                    f,
                    "the token of node `{node}` is from another authority than the one that signs now"
                )?;
                node
            }
        };
        write!(f, "; make one with `llmgw ctl cert token --node {node}`")
    }
}

#[cfg(test)]
mod tests {
    use llmgw_proto::identity::Fingerprint;

    use super::*;

    const NOW: UtcTime = UtcTime(1_796_000_000);
    const HOUR: UtcTime = UtcTime(NOW.0 + 3_600);

    fn token(node: &str, secret: u8) -> EnrolmentToken {
        EnrolmentToken::new(node, [secret; 16], Fingerprint([9; 32])).unwrap()
    }

    fn key(number: u8) -> KeyDigest {
        KeyDigest([number; 32])
    }

    fn certified(serial: &str) -> Certified {
        Certified {
            certificate: format!("certificate {serial}"),
            serial: serial.to_owned(),
            not_after: String::new(),
        }
    }

    fn book(tokens: &[&EnrolmentToken]) -> Book {
        let mut book = Book::default();
        for token in tokens {
            book.add(token.node(), token.secret_hash(), HOUR, NOW)
                .unwrap();
        }
        book
    }

    fn code(refused: Result<Allowed, NotAllowed>) -> &'static str {
        refused.unwrap_err().code().as_str()
    }

    #[test]
    fn a_token_works_for_one_key_as_often_as_it_asks_and_for_no_other() {
        let one = token("n1", 1);
        let mut book = book(&[&one]);
        assert_eq!(
            book.check(&one, "n1", key(1), &BTreeSet::new(), NOW),
            Ok(Allowed::First)
        );
        assert_eq!(
            book.check(&one, "n1", key(2), &BTreeSet::new(), NOW),
            Ok(Allowed::First),
            "to check is not to use"
        );
        book.use_up("n1", key(1), certified("a"), NOW);
        let again = Ok(Allowed::Again(certified("a")));
        assert_eq!(book.check(&one, "n1", key(1), &BTreeSet::new(), NOW), again);
        let refused = book
            .check(&one, "n1", key(2), &BTreeSet::new(), NOW)
            .unwrap_err();
        assert_eq!(refused.code().as_str(), "used_token");
        assert_eq!(
            refused.to_string(),
            "the token of node `n1` was used already, for another key; make one with `llmgw ctl cert token --node n1`"
        );
    }

    #[test]
    fn a_token_is_for_its_own_node_and_an_unknown_one_is_for_none() {
        let (one, two) = (token("n1", 1), token("n2", 2));
        let book = book(&[&one]);
        let refused = book
            .check(&one, "n2", key(1), &BTreeSet::new(), NOW)
            .unwrap_err();
        assert_eq!(refused.code().as_str(), "other_node");
        assert_eq!(
            refused.to_string(),
            "the token is for node `n1`, not for `n2`"
        );
        let unknown = [&two, &token("n1", 3)];
        for token in unknown {
            let refused = book.check(token, token.node(), key(1), &BTreeSet::new(), NOW);
            assert_eq!(code(refused), "unknown_token");
        }
    }

    #[test]
    fn a_token_ends_with_its_second_and_says_so_even_where_it_was_used() {
        let one = token("n1", 1);
        let mut book = book(&[&one]);
        book.use_up("n1", key(1), certified("a"), NOW);
        let last = UtcTime(HOUR.0 - 1);
        let again = Ok(Allowed::Again(certified("a")));
        assert_eq!(
            book.check(&one, "n1", key(1), &BTreeSet::new(), last),
            again
        );
        let refused = book
            .check(&one, "n1", key(1), &BTreeSet::new(), HOUR)
            .unwrap_err();
        assert_eq!(refused.code().as_str(), "expired_token");
        let said = refused.to_string();
        assert!(said.contains(&format!("expired at {HOUR}")), "{said}");
    }

    #[test]
    fn a_newer_token_takes_the_place_of_the_nodes_older_one() {
        let (old, new) = (token("n1", 1), token("n1", 2));
        let mut book = book(&[&old, &new]);
        assert_eq!(
            code(book.check(&old, "n1", key(1), &BTreeSet::new(), NOW)),
            "unknown_token"
        );
        book.use_up("n1", key(1), certified("a"), NOW);
        book.add("n1", new.secret_hash(), HOUR, NOW).unwrap();
        assert_eq!(
            book.check(&new, "n1", key(2), &BTreeSet::new(), NOW),
            Ok(Allowed::First),
            "another key is free to use it"
        );
    }

    #[test]
    fn a_key_whose_certificate_was_revoked_gets_none_with_a_later_token_of_any_node() {
        let end = UtcTime(NOW.0 + 365 * 24 * 3_600);
        let made = Certified {
            not_after: end.to_string(),
            ..certified("0a")
        };
        let (first, later) = (token("n1", 1), token("n1", 2));
        let mut book = book(&[&first]);
        book.use_up("n1", key(1), made, NOW);
        let denied: BTreeSet<Serial> = ["A".parse().unwrap()].into();
        let refused = book.check(&first, "n1", key(1), &denied, NOW).unwrap_err();
        assert_eq!(
            refused.code().as_str(),
            "revoked_key",
            "the token that made it"
        );
        // Months later, when that token is long forgotten.
        let now = UtcTime(end.0 - 30 * 24 * 3_600);
        let other = token("n2", 3);
        for token in [&later, &other] {
            let expires = UtcTime(end.0 + 3_600);
            let hash = token.secret_hash();
            book.add(token.node(), hash, expires, now).unwrap();
            let refused = book.check(token, token.node(), key(1), &denied, now);
            assert_eq!(
                refused.unwrap_err().to_string(),
                format!(
                    "the key of node `{node}` is that of the certificate with serial 0a, which was revoked: remove its `agent-key.pem` too, \
                     so that it makes another, and give it a new token (`llmgw ctl cert token --node {node}`)",
                    node = token.node()
                )
            );
            let allowed = book.check(token, token.node(), key(2), &denied, now);
            assert_eq!(allowed, Ok(Allowed::First), "another key");
            let allowed = book.check(token, token.node(), key(1), &BTreeSet::new(), now);
            assert_eq!(allowed, Ok(Allowed::First), "nothing is denied");
        }
        // It is remembered for as long as its certificate would be good.
        book.use_up("n2", key(2), certified("b"), end);
        assert!(book.keys().iter().all(|known| known.by == key(2)));
    }

    #[test]
    fn keys_are_remembered_up_to_a_limit_and_those_that_end_first_are_forgotten() {
        let mut book = Book::default();
        for number in 0..=KEYS_MAX as u64 {
            book.remember(Certificated {
                node: "n1".to_owned(),
                by: key(1),
                serial: number.to_string(),
                not_after: UtcTime(NOW.0 + (number + 1) % 10),
            });
        }
        assert_eq!(book.keys().len(), KEYS_MAX);
        assert_eq!(book.keys()[8].serial, "8");
        assert_eq!(book.keys()[9].serial, "10", "the ninth ended first");
    }

    #[test]
    fn a_full_book_forgets_what_expired_and_refuses_where_nothing_did() {
        let mut book = Book::default();
        for number in 0..TOKENS_MAX {
            let expires = match number {
                0 => UtcTime(NOW.0 + 10),
                _ => HOUR,
            };
            let secret = token("n", 1).secret_hash();
            book.add(&format!("n{number}"), secret, expires, NOW)
                .unwrap();
        }
        let one = token("more", 1);
        let mut add = |at: UtcTime| book.add("more", one.secret_hash(), HOUR, at);
        assert_eq!(add(NOW), Err(Full));
        assert_eq!(add(UtcTime(NOW.0 + 10)), Ok(()));
        assert_eq!(book.tokens().count(), TOKENS_MAX);
        let long_after = UtcTime(HOUR.0 + EXPIRED_KEPT.as_secs());
        book.add("later", one.secret_hash(), UtcTime(u64::MAX), long_after)
            .unwrap();
        assert_eq!(book.tokens().count(), 1);
    }
}
