//! The session on the wire: what the protobuf compiler made of `llmgw/v1/agent.proto`, read under limits.
//!
//! Nothing outside of this crate sees these messages: `convert` makes words of ours of them.

pub(crate) mod codec;
pub mod error;
pub(crate) mod shape;

use std::fmt;

pub(crate) use generated::*;

impl fmt::Debug for EnrollRequest {
    /// Whoever reads the token can become the node.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EnrollRequest")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

#[allow(clippy::all, clippy::pedantic, dead_code, unreachable_pub)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/llmgw.v1.rs"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_with_a_token_prints_without_it() {
        let request = EnrollRequest {
            node: "gpu-01".to_owned(),
            token: "llmgw1.gpu-01.secret".to_owned(),
            ..EnrollRequest::default()
        };
        let shown = format!("{request:?}");
        assert_eq!(shown, "EnrollRequest { node: \"gpu-01\", .. }");
    }
}
