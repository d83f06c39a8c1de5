//! Replays requests over the dispatcher under a virtual clock, to see who waits how long before it is tried on people.
//!
//! The rules are not copied: [`simulate`] drives the same `Dispatcher`, the same scorer and the same policy set as the
//! gateway. What is made up is the outside: clients, and engines with slots, one reader of prompts, and streams that slow each
//! other down. Prefix caches are left out: every prompt is read whole. The same plan gives the same outcome.
//!
//! - [`plan`]: who asks for what, and of which engines. [`trace`]: plans out of recorded or drawn arrivals.
//! - `run`: the events in their order. `request`: one request's way. `engine`: one replica. `policy`: what the policies say meanwhile.
//! - `queueing`: the dispatcher, or one of two simple `line`s to compare it with.
//! - [`outcome`]: what came of it, as figures, a table and JSON.

mod engine;
mod line;
pub mod outcome;
pub mod plan;
mod policy;
mod queueing;
mod request;
mod run;
pub mod trace;

#[cfg(test)]
mod tests;

pub use outcome::Outcome;
pub use plan::Plan;
pub use queueing::Discipline;
pub use run::{TooLong, simulate};
