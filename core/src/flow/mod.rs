//! Who may have a request on an engine, who waits, and who goes next.
//!
//! `Dispatcher` decides, as a pure structure under a clock that it is given. `Queues` puts one of them behind a lock for each
//! model, and hands out permits.

mod bands;
pub mod cost;
pub mod dispatch;
mod lane;
pub mod ledger;
#[cfg(test)]
pub mod meanwhile;
pub mod permit;
pub mod queues;
pub mod retry_after;
pub mod rotation;
pub mod simulate;
pub mod slots;
pub mod tenant;
pub mod turns;
pub mod window;

pub use bands::BandReport;
pub use lane::LaneFacts;
