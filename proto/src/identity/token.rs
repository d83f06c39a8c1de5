//! The token of a node's first contact: it proves who may become this node, and pins the authority that the server must come from.
//!
//! `llmgw1.NODE.SECRET.AUTHORITY`: 32 hex digits of a secret that works once, and the SHA-256 of the authority's certificate in 64.
//! A node id may hold dots, so it is read from the right. Neither `Debug` nor an error shows the secret.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use super::certificate::{FINGERPRINT_BYTES, Fingerprint};
use crate::hex::{hex, unhex};
use crate::session::{NODE_ID_MAX_BYTES, is_node_id};

const FORM: &str = "llmgw1";
pub const SECRET_BYTES: usize = 16;
/// The longest token.
pub const TOKEN_MAX_BYTES: usize =
    FORM.len() + NODE_ID_MAX_BYTES + 2 * SECRET_BYTES + 2 * FINGERPRINT_BYTES + 3;

/// What lets one machine become one node, once.
#[derive(Clone, PartialEq, Eq)]
pub struct EnrolmentToken {
    node: String,
    secret: [u8; SECRET_BYTES],
    /// Of the authority's certificate.
    authority: Fingerprint,
}

/// What the server keeps of a token's secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecretHash(pub [u8; 32]);

/// A text that is no token. It may be most of one, so it is not repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoToken(&'static str);

impl EnrolmentToken {
    /// # Errors
    /// `node` can't be a node's id.
    pub fn new(
        node: &str,
        secret: [u8; SECRET_BYTES],
        authority: Fingerprint,
    ) -> Result<EnrolmentToken, NoToken> {
        if !is_node_id(node) {
            return Err(NoToken("it names no node"));
        }
        Ok(EnrolmentToken {
            node: node.to_owned(),
            secret,
            authority,
        })
    }

    pub fn node(&self) -> &str {
        &self.node
    }

    /// Who must have issued the server's certificate.
    pub fn authority(&self) -> Fingerprint {
        self.authority
    }

    pub fn secret_hash(&self) -> SecretHash {
        SecretHash(Sha256::digest(self.secret).into())
    }

    /// The whole of it, secret included: to print it once, and to send it.
    pub fn expose(&self) -> String {
        let (secret, authority) = (hex(&self.secret), hex(&self.authority.0));
        format!("{FORM}.{}.{secret}.{authority}", self.node)
    }
}

impl FromStr for EnrolmentToken {
    type Err = NoToken;

    fn from_str(text: &str) -> Result<EnrolmentToken, NoToken> {
        if text.len() > TOKEN_MAX_BYTES {
            return Err(NoToken("it is too long"));
        }
        let rest = text
            .strip_prefix(FORM)
            .and_then(|rest| rest.strip_prefix('.'))
            .ok_or(NoToken("it does not begin with `llmgw1.`"))?;
        let parts = rest.rsplit_once('.').and_then(|(rest, authority)| {
            let (node, secret) = rest.rsplit_once('.')?;
            Some((node, secret, authority))
        });
        let (node, secret, authority) = parts.ok_or(NoToken("a part of it is missing"))?;
        let secret = unhex(secret).ok_or(NoToken("its third part is not 32 hex digits"))?;
        let authority = unhex(authority).ok_or(NoToken("its last part is not 64 hex digits"))?;
        EnrolmentToken::new(node, secret, Fingerprint(authority))
    }
}

impl fmt::Debug for EnrolmentToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the token of `{}`", self.node)
    }
}

impl fmt::Display for NoToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "that is no token: {}; one looks like `llmgw1.NODE.<32 hex digits>.<64 hex digits>`, and `llmgw ctl cert token --node NODE` makes it",
            self.0
        )
    }
}

impl std::error::Error for NoToken {}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(node: &str) -> EnrolmentToken {
        EnrolmentToken::new(node, [0xab; 16], Fingerprint([0xcd; 32])).unwrap()
    }

    #[test]
    fn a_token_is_read_from_the_right_since_a_node_id_may_hold_dots() {
        let longest = "n".repeat(NODE_ID_MAX_BYTES);
        for node in ["gpu-01", "rack.1.gpu_01", ".", "a..b", &longest] {
            let text = token(node).expose();
            let read: EnrolmentToken = text.parse().unwrap();
            assert_eq!(read, token(node));
            assert_eq!(read.node(), node);
            assert_eq!(read.authority(), Fingerprint([0xcd; 32]));
        }
        assert_eq!(token(&longest).expose().len(), TOKEN_MAX_BYTES);
        assert_eq!(
            token("n").expose(),
            format!("llmgw1.n.{}.{}", "ab".repeat(16), "cd".repeat(32))
        );
    }

    #[test]
    fn what_is_no_token_says_what_one_looks_like_and_repeats_nothing() {
        let (secret, authority) = ("ab".repeat(16), "cd".repeat(32));
        for (text, why) in [
            (String::new(), "does not begin with `llmgw1.`"),
            (
                format!("llmgw2.n.{secret}.{authority}"),
                "does not begin with",
            ),
            (
                format!("llmgw1n.{secret}.{authority}"),
                "does not begin with",
            ),
            ("llmgw1.".to_owned(), "a part of it is missing"),
            (format!("llmgw1.{secret}"), "a part of it is missing"),
            (
                format!("llmgw1.{secret}.{authority}"),
                "a part of it is missing",
            ),
            (format!("llmgw1..{secret}.{authority}"), "it names no node"),
            (
                format!("llmgw1.a b.{secret}.{authority}"),
                "it names no node",
            ),
            (
                format!("llmgw1.n.{}.{authority}", &secret[1..]),
                "third part is not 32 hex digits",
            ),
            (
                format!("llmgw1.n.{}.{authority}", secret.to_uppercase()),
                "third part is not 32 hex digits",
            ),
            (
                format!("llmgw1.n.{secret}.{}", &authority[..62]),
                "last part is not 64 hex digits",
            ),
            (
                format!("llmgw1.n.{secret}.{authority}\n"),
                "last part is not 64 hex digits",
            ),
            (
                format!("llmgw1.{}.{secret}.{authority}", "n".repeat(65)),
                "it is too long",
            ),
        ] {
            let error = text.parse::<EnrolmentToken>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
            assert!(
                error.contains("llmgw ctl cert token --node NODE"),
                "{error}"
            );
            assert!(!error.contains("abab"), "{error}");
        }
    }

    #[test]
    fn a_token_never_prints_its_secret_and_is_known_by_a_hash() {
        let shown = format!("{:?} {:?}", token("n"), token("n").secret_hash());
        assert!(!shown.contains("abab"), "{shown}");
        let expected: [u8; 32] = Sha256::digest([0xab; 16]).into();
        assert_eq!(token("n").secret_hash(), SecretHash(expected));
    }
}
