//! Reads the recorded answers of real engines (tests/recordings/engines), for tests.

use std::path::PathBuf;

/// The engines that were recorded.
pub const ENGINES: [&str; 3] = ["llamacpp", "vllm", "sglang"];

/// One recorded answer.
#[derive(Debug)]
pub struct Recording {
    /// `ENGINE/NAME`.
    pub name: String,
    pub status: u16,
    pub content_type: String,
    /// The body's pieces as the engine framed them; one if it wasn't chunked.
    pub chunks: Vec<Vec<u8>>,
}

impl Recording {
    /// The body without its framing.
    pub fn body(&self) -> Vec<u8> {
        self.chunks.concat()
    }

    pub fn is_stream(&self) -> bool {
        self.content_type.starts_with("text/event-stream")
    }
}

/// Reads `NAME.http` of an engine.
pub fn recording(engine: &str, name: &str) -> Recording {
    let path = directory(engine).join(format!("{name}.http"));
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    parse(format!("{engine}/{name}"), &bytes)
}

/// All of them, in a stable order.
pub fn all() -> Vec<Recording> {
    let mut names = Vec::new();
    for engine in ENGINES {
        for entry in
            std::fs::read_dir(directory(engine)).expect("the recordings are in the repository")
        {
            let file = entry
                .expect("a readable directory")
                .file_name()
                .into_string()
                .expect("plain names");
            if let Some(name) = file.strip_suffix(".http") {
                names.push((engine, name.to_owned()));
            }
        }
    }
    names.sort();
    names
        .iter()
        .map(|(engine, name)| recording(engine, name))
        .collect()
}

fn directory(engine: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/recordings/engines")
        .join(engine)
}

fn parse(name: String, bytes: &[u8]) -> Recording {
    let end = memchr::memmem::find(bytes, b"\r\n\r\n").expect("a header section");
    let head = std::str::from_utf8(&bytes[..end]).expect("ASCII headers");
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .and_then(|line| line.split(' ').nth(1))
        .and_then(|code| code.parse().ok());
    let header = |wanted: &str| {
        let found = head.split("\r\n").filter_map(|line| line.split_once(':'));
        let mut found = found.filter(|(name, _)| name.eq_ignore_ascii_case(wanted));
        found
            .next()
            .map(|(_, value)| value.trim().to_owned())
            .unwrap_or_default()
    };
    let body = &bytes[end + 4..];
    let is_chunked = header("transfer-encoding").eq_ignore_ascii_case("chunked");
    let chunks = if is_chunked {
        dechunk(body)
    } else {
        vec![body.to_vec()]
    };
    Recording {
        name,
        status: status.expect("a status line"),
        content_type: header("content-type"),
        chunks,
    }
}

/// The pieces of a chunked body, which may have been cut off.
fn dechunk(mut body: &[u8]) -> Vec<Vec<u8>> {
    let mut chunks = Vec::new();
    while let Some(line) = memchr::memmem::find(body, b"\r\n") {
        let size = std::str::from_utf8(&body[..line])
            .ok()
            .and_then(|hex| usize::from_str_radix(hex, 16).ok());
        let size = size.expect("a chunk size");
        let data = &body[line + 2..];
        if size == 0 {
            break;
        }
        let whole = size.min(data.len());
        chunks.push(data[..whole].to_vec());
        body = data.get(size + 2..).unwrap_or_default();
    }
    chunks
}
