//! Which replica a request goes to, and what is known about each.
//!
//! - [`fleet`]: the pools of all models. [`pool`]: the replicas of one model, and the choice among them.
//! - [`replica`]: one engine as the gateway sees it. [`locality`]: where it is.
//! - [`score`]: the pure choice. [`prefix`]: who has cached what. [`learned`]: how fast each one is.
//! - [`outlook`]: what to expect of a model whose replicas the server starts itself.
//! - [`breaker`], [`errors_window`]: what faults lead to. [`retry_budget`]: how many retries an outage may cause.
//! - [`probe`], [`scrape`]: what each engine is asked beside the requests.

pub mod breaker;
pub mod errors_window;
pub mod fetch;
pub mod fleet;
pub mod learned;
pub mod locality;
pub mod outlook;
pub mod pool;
pub mod prefix;
pub mod probe;
pub mod replica;
pub mod retry_budget;
pub mod score;
pub mod scrape;
