//! The way to an engine: pooled HTTP/1.1 connections, each polled by the one request that uses it.
//!
//! - [`connection`]: one connection and the body that gives it back.
//! - [`idle`]: the connections of one engine that wait for the next request.

pub mod connection;
pub mod idle;

pub use connection::{SendError, UpstreamBody};
pub use idle::Upstream;
