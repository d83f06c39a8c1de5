//! The control plane: the fleet as heard and as data, where a replica goes in it and why not elsewhere, and what keeps it running.
//!
//! - [`snapshot`]: the fleet at one moment, the file `schema: llmgw.fleet/1`.
//! - [`sessions`]: the agents' streams, which feed it. With [`enrolment`] the only part with I/O.
//! - [`enrolment`]: the tokens that a new node gets its certificate with.
//! - [`placement`]: `place(snapshot, job, policy) -> Decision`; nothing here does I/O, reads a clock or draws a random number.
//! - [`observed`]: what agents said, and the pure table that keeps it.
//! - [`replicas`]: the replicas in what agents said. [`memory`]: what is remembered beside it: starts, who leaves, failures.
//! - [`reconcile`]: (desired, observed, memory) in, actions out.
//! - [`ports`]: which of a node's ports nothing has.
//! - [`world`]: what agents said as a snapshot. [`launch`]: a decision as a shard, through its engine's plugin.
//! - [`controller`]: the task that looks at the fleet, decides by the parts above, and sends commands.
//! - [`reach`]: at which addresses a node may say that it is reached.
//! - [`explain`]: a decision for people: why does it not run, and what would make it.

pub mod controller;
pub mod enrolment;
pub mod explain;
pub mod launch;
pub mod memory;
pub mod observed;
pub mod placement;
pub mod ports;
pub mod reach;
pub mod reconcile;
pub mod replicas;
pub mod sessions;
pub mod snapshot;
pub mod world;

#[cfg(test)]
mod tests;
