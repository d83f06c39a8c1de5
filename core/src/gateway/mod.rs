//! The data path: from a client's request to an engine's answer.
//!
//! `request` tells the story; each step is a file of its own:
//! - [`server`] accepts, [`auth`] names the tenant, `peek` and `multipart` read what matters, `splice` changes it.
//! - [`forward`] tries replicas, [`answer`] looks at what they say, [`relay`] streams, `assemble` puts together, [`outgoing`] leaves.
//! - [`respond`] is the only place that turns a failure into a status and a body.

pub mod answer;
pub mod assemble;
pub mod auth;
pub mod band;
pub mod body;
pub mod client_io;
pub mod client_room;
pub mod dialect;
pub mod engine_error;
pub mod events;
pub mod exchange;
pub mod forward;
pub mod gathered;
pub mod headers;
pub mod hold;
pub mod job;
pub mod limit_headers;
pub mod models;
pub mod multipart;
pub mod outgoing;
pub mod pass;
pub mod peek;
pub mod refusal;
pub mod relay;
pub mod rename;
pub mod request;
pub mod respond;
pub mod server;
pub mod silence;
pub mod splice;
pub mod sse;
pub mod stalled;
pub mod state;
pub mod upload;
pub mod usage;
mod wait;

#[cfg(test)]
mod recordings;
