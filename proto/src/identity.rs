//! Who may speak: certificates as both sides read them, and the files that hold them.

pub mod certificate;
pub mod files;
pub mod host;
pub mod moment;

pub use certificate::{Certificate, Fingerprint, NoCertificate, Serial, Usages};
pub use files::{Authorities, FileProblem, Identity};
pub use host::Host;
pub use moment::Moment;
