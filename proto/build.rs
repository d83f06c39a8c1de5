//! Compiles `llmgw/v1/agent.proto` without protoc.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=llmgw/v1/agent.proto");
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?);
    let files = protox::compile([root.join("llmgw/v1/agent.proto")], [&root])?;
    tonic_prost_build::configure()
        .codec_path("crate::wire::codec::BoundedCodec")
        .build_transport(false)
        // It holds a token: `wire.rs` writes one that shows none.
        .skip_debug(["llmgw.v1.EnrollRequest"])
        .compile_fds(files)?;
    Ok(())
}
