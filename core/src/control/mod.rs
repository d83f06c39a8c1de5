//! The control plane: the fleet as heard and as data, where a replica goes in it, and why not elsewhere.
//!
//! - [`snapshot`]: the fleet at one moment, the file `schema: llmgw.fleet/1`.
//! - [`sessions`]: the agents' streams, which feed it. The only part with I/O.
//! - [`placement`]: `place(snapshot, job, policy) -> Decision`; nothing here does I/O, reads a clock or draws a random number.
//! - [`observed`]: what agents said, and the pure table that keeps it.
//! - [`explain`]: a decision for people: why does it not run, and what would make it.

pub mod explain;
pub mod observed;
pub mod placement;
pub mod sessions;
pub mod snapshot;

#[cfg(test)]
mod tests;
