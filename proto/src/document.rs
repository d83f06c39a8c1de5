//! A configuration file as people write it: YAML read whole, every problem with its line, and what would be right.
//!
//! The text (`yaml`), typed reading that goes on after a problem (`read`), `${VAR}` in values (`expand`), the report (`problem`).
//! Credentials are kept out of it (`mask`).

mod expand;
mod field;
mod mask;
pub mod problem;
pub mod read;
pub mod suggest;
pub mod yaml;

pub use problem::{ConfigErrors, Problem};
pub use suggest::suggestion;

/// Which file is meant, for messages.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// `llmgw.yaml`.
    pub example: &'static str,
    /// What an empty one lacks.
    pub least: &'static str,
}
