//! What a node without a certificate asks of the server, and what it gets: one question, one answer. `convert` has them as bytes.

use std::fmt;

use crate::identity::token::EnrolmentToken;

/// The authorities that an answer names: some twenty at most.
pub const AUTHORITY_MAX_BYTES: usize = 64 << 10;

/// Asks for a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrolmentRequest {
    pub token: EnrolmentToken,
    /// The node that it wants to be.
    pub node: String,
    /// PKCS #10, PEM: the key that the certificate is to be for, and the proof that the agent has it.
    pub signing_request: String,
}

/// What the node shows from now on, and whom it trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enrolled {
    /// PEM.
    pub certificate: String,
    /// PEM: the authority that issued it, and those that are trusted beside it while one is exchanged for another.
    pub authority: String,
}

/// Why a node gets no certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrolmentRefusal {
    pub code: EnrolmentRefusalCode,
    /// One sentence, for the logs of both sides.
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EnrolmentRefusalCode {
    /// This server signs nothing.
    Off,
    /// The connection is not encrypted: whoever listened has the token.
    Plaintext,
    /// What it sent can't be understood, or proves no key.
    Unreadable,
    /// The token is for another node than the one that is claimed.
    OtherNode,
    UnknownToken,
    Expired,
    /// With another key.
    Used,
    /// The server could not do it at this moment. The token still works.
    Failed,
    /// A certificate for this key was revoked: another key may have one.
    RevokedKey,
    /// A word of a newer release.
    Other,
}

impl EnrolmentRefusalCode {
    /// Whether the same question may be answered otherwise by itself, later.
    pub fn passes(self) -> bool {
        self == EnrolmentRefusalCode::Failed
    }

    /// For programs.
    pub fn as_str(self) -> &'static str {
        match self {
            EnrolmentRefusalCode::Off => "enrolment_off",
            EnrolmentRefusalCode::Plaintext => "plaintext",
            EnrolmentRefusalCode::Unreadable => "unreadable_request",
            EnrolmentRefusalCode::OtherNode => "other_node",
            EnrolmentRefusalCode::UnknownToken => "unknown_token",
            EnrolmentRefusalCode::Expired => "expired_token",
            EnrolmentRefusalCode::Used => "used_token",
            EnrolmentRefusalCode::Failed => "enrolment_failed",
            EnrolmentRefusalCode::RevokedKey => "revoked_key",
            EnrolmentRefusalCode::Other => "refused",
        }
    }
}

impl fmt::Display for EnrolmentRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.as_str(), self.message)
    }
}

impl std::error::Error for EnrolmentRefusal {}
