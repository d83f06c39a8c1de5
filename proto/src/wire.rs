//! The session on the wire: what the protobuf compiler made of `llmgw/v1/agent.proto`, read under limits.
//!
//! Nothing outside of this crate sees these messages: `convert` makes words of ours of them.

pub(crate) mod codec;
pub mod error;
pub(crate) mod shape;

pub(crate) use generated::*;

#[allow(clippy::all, clippy::pedantic, dead_code, unreachable_pub)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/llmgw.v1.rs"));
}
