//! The control plane's pure parts: the fleet as data, where a replica goes in it, and why not elsewhere.
//!
//! - [`snapshot`]: the fleet at one moment, the file `schema: llmgw.fleet/1`.
//! - [`placement`]: `place(snapshot, job, policy) -> Decision`; nothing here does I/O, reads a clock or draws a random number.
//! - [`explain`]: a decision for people: why does it not run, and what would make it.

pub mod explain;
pub mod placement;
pub mod snapshot;

#[cfg(test)]
mod tests;
