//! Who may have a request on an engine, and who waits.

pub mod permit;
pub mod queue;
