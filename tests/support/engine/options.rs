//! What a fake engine is started with.

use std::net::{Ipv4Addr, SocketAddr};

/// Whose manners the engine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// vLLM 0.32: refuses connections while loading, headers at once, replies with its first served name.
    Vllm,
    /// SGLang 0.5.23: lists the model before it is ready, `/health` takes a second, flat errors, 200 on a full queue.
    Sglang,
    /// llama.cpp b11434: 503 while loading, no header before the first token, ignores `model`.
    Llamacpp,
    /// A hosted OpenAI-compatible server without metrics of its own.
    Openai,
}

/// How a fake engine starts.
#[derive(Clone, Debug)]
pub struct Options {
    pub kind: Kind,
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where `/fake/...` alone is served, unaffected by `hang` and `accept: false`. `None`: only on `listen`.
    pub control: Option<SocketAddr>,
    /// Served names, the first being the main one. Default `fake`.
    pub models: Vec<String>,
    /// Requests generated at a time; 0 is no limit. Default 0.
    pub slots: usize,
    /// Requests that may wait for a slot; more are refused as the kind refuses. `None`: no limit.
    pub max_queue: Option<usize>,
    /// From start to ready, in milliseconds.
    pub load_ms: u64,
    /// From slot to first token, in milliseconds.
    pub prefill_ms: u64,
    /// Between tokens, in milliseconds.
    pub token_ms: u64,
    /// Tokens of an answer when the request sets no lower limit. Default 16.
    pub tokens: u64,
    /// The key that `/v1/...` wants, if any.
    pub api_key: Option<String>,
    /// `POST /fake/behave` from the start, as JSON text of an object.
    pub behave: String,
    /// Idle connections are closed after this long, in milliseconds. Default 5000, as all three engines do.
    pub keepalive_ms: u64,
    /// Requests on one connection before it is closed; 0 is no limit. `None`: 100 for llama.cpp, else no limit.
    pub keepalive_max: Option<u64>,
    /// Whether `/v1/embeddings` works; without, it fails as the kind fails. Default true.
    pub embeddings: bool,
    /// Threads of the engine's own runtime. Default 1.
    pub threads: usize,
    /// Whether `how: exit` ends the process; in a test process it closes listener and connections instead.
    pub may_exit: bool,
}

impl Kind {
    /// The name that `--kind` takes.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Vllm => "vllm",
            Kind::Sglang => "sglang",
            Kind::Llamacpp => "llamacpp",
            Kind::Openai => "openai",
        }
    }

    pub fn parse(name: &str) -> Option<Kind> {
        [Kind::Vllm, Kind::Sglang, Kind::Llamacpp, Kind::Openai]
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

impl Options {
    /// An engine of this kind on a free port of the loopback, serving `fake`, as fast as it can.
    pub fn new(kind: Kind) -> Options {
        Options {
            kind,
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            control: None,
            models: vec!["fake".to_owned()],
            slots: 0,
            max_queue: None,
            load_ms: 0,
            prefill_ms: 0,
            token_ms: 0,
            tokens: 16,
            api_key: None,
            behave: "{}".to_owned(),
            keepalive_ms: 5000,
            keepalive_max: None,
            embeddings: true,
            threads: 1,
            may_exit: false,
        }
    }

    pub fn model(mut self, name: &str) -> Options {
        self.models = vec![name.to_owned()];
        self
    }

    /// Sets `behave` from JSON text.
    pub fn behave(mut self, json: &str) -> Options {
        self.behave = json.to_owned();
        self
    }

    pub(crate) fn keepalive_max_requests(&self) -> u64 {
        let default = if self.kind == Kind::Llamacpp { 100 } else { 0 };
        self.keepalive_max.unwrap_or(default)
    }
}
