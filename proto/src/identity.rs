//! Who may speak: certificates as both sides read them, the files that hold them, requests to sign a key, and tokens for a first contact.

pub mod certificate;
pub mod dialling;
pub mod files;
pub mod host;
pub mod listening;
pub mod moment;
pub mod opening;
pub mod placing;
pub mod problem;
pub mod request;
#[cfg(test)]
mod testing;
pub mod token;
pub mod verdict;

pub use certificate::{Certificate, Fingerprint, NoCertificate, Serial, Usages};
pub use files::{Authorities, FileProblem, Identity};
pub use host::Host;
pub use moment::Moment;
pub use request::RequestedKey;
pub use token::EnrolmentToken;
