//! How the engine misbehaves: one set of JSON keys for a request (`x-fake` header, `"fake"` body field) and for the whole
//! engine (`--behave`, `POST /fake/behave`). An unknown key is refused, so that a typing error cannot make a test pass.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

use serde::Deserialize;
use serde_json::{Map, Value};

/// What to do differently. The keys under "engine" mean nothing on a single request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Behave {
    // The answer.
    /// Tokens of the answer; the request's own limit still applies.
    pub tokens: Option<u64>,
    /// Milliseconds between tokens.
    pub token_ms: Option<u64>,
    /// Milliseconds from slot to first token.
    pub prefill_ms: Option<u64>,
    /// Milliseconds of silence before the first byte (after the headers with `headers_first`).
    pub first_ms: Option<u64>,
    /// Send status and headers at once; then silence for `first_ms`, or for ever without it.
    pub headers_first: bool,
    /// The text of every token, or the list of all tokens' texts.
    pub text: Option<Text>,
    /// Pad the text so that each token's event has this many bytes.
    pub chunk_bytes: Option<usize>,
    /// Stream this many bytes of events as fast as the client reads; stands in for `tokens`.
    pub total_bytes: Option<u64>,
    /// As many tokens a second as possible, each its own write, whatever `token_ms` says.
    pub flood: bool,
    /// Usage in every chunk.
    pub usage_every_chunk: bool,
    /// Response headers to add.
    pub headers: BTreeMap<String, String>,
    /// Add `Connection: x-secret-hop`, `x-secret-hop: 1`, `Keep-Alive`, `Proxy-Authenticate`.
    pub hop_headers: bool,
    /// `Content-Encoding: gzip` and a gzip body (answers that are not streamed).
    pub gzip: bool,
    /// Answer with what was received instead (see `/v1/echo`).
    pub echo: bool,
    /// The exact body: one write for each string. Streamed when the request asks for it.
    pub raw: Option<Text>,
    // The framing of a stream.
    /// Cut the event bytes every so many bytes: each piece its own chunk and write.
    pub split: Option<usize>,
    /// Milliseconds between the pieces of `split`.
    pub split_ms: Option<u64>,
    /// Events in one chunk and write.
    pub merge: Option<usize>,
    /// CRLF line ends.
    pub crlf: bool,
    /// Send `: keep-alive` while silent, once the headers are out.
    pub comments: bool,
    /// Milliseconds between comments. Default 100.
    pub comment_ms: Option<u64>,
    // The failure.
    /// Die when so many tokens are out; `how` says in which way.
    pub die_after: Option<u64>,
    /// Default `rst`.
    pub how: How,
    /// Answer with this status and an error.
    pub status: Option<u16>,
    /// The shape of that error. Default: the kind's own.
    pub error_shape: Option<Shape>,
    /// The message of errors.
    pub error_message: Option<String>,
    /// `Retry-After` of that error, in seconds.
    pub retry_after: Option<u64>,
    /// A `Content-Length` larger than what is sent.
    pub short_body: bool,
    /// Close before a byte of the response.
    pub refuse: bool,
    /// 200, then an error as the first event, then the end mark.
    pub first_event_error: bool,
    /// The failure keys hold for the first so many requests only; `refuse` if none is given.
    pub fail_first: Option<u64>,
    /// Do not read the request's body (header only).
    pub ignore_body: bool,
    // The engine.
    /// The share of its loading, from 0 to 1, that is over whatever the time says.
    pub loaded: Option<f64>,
    pub health: Health,
    /// Milliseconds that `/health` takes. Default 1000 for SGLang, else 0.
    pub health_ms: Option<u64>,
    pub metrics: Metrics,
    /// Numbers to show instead of the true ones.
    pub metrics_values: Option<MetricsValues>,
    pub models: Models,
    /// `false` closes the listener; `true` binds it again.
    pub accept: Option<bool>,
    /// With `accept: false`: bind again after so many milliseconds.
    pub accept_again_ms: Option<u64>,
    /// Accept, and answer nothing at all (`/fake/...` excepted).
    pub hang: bool,
    /// Answer everything but generation.
    pub hang_generate: bool,
    /// No answer gets more than so many tokens while this is set; those at work wait too, and go on when it is taken out.
    pub hold_after: Option<u64>,
    /// Close connections idle for so many milliseconds.
    pub close_idle_ms: Option<u64>,
    /// Close when a second request arrives on a connection, before any byte.
    pub close_on_reuse: bool,
    /// Exit 1 when one more than so many generation requests have arrived.
    pub exit_after: Option<u64>,
}

/// One text, or one for each token.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Text {
    One(String),
    Each(Vec<String>),
}

/// In which way a stream dies. An answer that is not streamed dies before its first byte, except for `half_event`
/// (half the body, then the end of the connection) and `clean_end` (half the body, correctly framed).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// A TCP reset.
    #[default]
    Rst,
    /// The connection ends without the terminating chunk.
    Fin,
    /// The terminating chunk, without the dialect's own end.
    CleanEnd,
    /// Cut inside an event, then as `fin`.
    HalfEvent,
    /// An error event, then the dialect's end and a clean end.
    ErrorEventThenDone,
    /// The process exits with 1.
    Exit,
    /// Silent for ever, connection open.
    Stall,
}

/// The shape of an error body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// `{"error":{"message":...}}`
    Nested,
    /// `{"object":"error","message":...}`
    Flat,
    /// `{"error":"..."}`
    String,
    Html,
    Empty,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Health {
    #[default]
    #[serde(rename = "ok")]
    Ok,
    #[serde(rename = "503")]
    Unavailable,
    #[serde(rename = "hang")]
    Hang,
    #[serde(rename = "refuse")]
    Refuse,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Metrics {
    #[default]
    #[serde(rename = "ok")]
    Ok,
    #[serde(rename = "500")]
    Fail,
    #[serde(rename = "hang")]
    Hang,
    /// The page as it was when this was set, for ever.
    #[serde(rename = "frozen")]
    Frozen,
    #[serde(rename = "garbage")]
    Garbage,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Models {
    #[default]
    #[serde(rename = "ok")]
    Ok,
    #[serde(rename = "empty")]
    Empty,
    #[serde(rename = "500")]
    Fail,
}

/// `kv` is from 0 to 1.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsValues {
    pub running: Option<f64>,
    pub waiting: Option<f64>,
    pub kv: Option<f64>,
}

/// A set of keys that was refused.
#[derive(Debug)]
pub struct BehaveError(String);

/// The engine's own defaults, changed while it runs.
pub struct Defaults {
    now: RwLock<(Map<String, Value>, Arc<Behave>)>,
    start: Map<String, Value>,
}

impl std::fmt::Display for BehaveError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "fake: {}", self.0)
    }
}

impl std::error::Error for BehaveError {}

impl Behave {
    /// Whether a failure key is set, so that `fail_first` needs no default.
    fn fails(&self) -> bool {
        let dies = self.die_after.is_some() || self.short_body || self.first_event_error;
        self.status.is_some() || self.refuse || dies
    }

    /// The same without its failure keys.
    pub fn without_failure(&self) -> Behave {
        Behave {
            die_after: None,
            status: None,
            short_body: false,
            refuse: false,
            first_event_error: false,
            ..self.clone()
        }
    }

    /// `fail_first` without a failure key refuses.
    pub fn with_failure(&self) -> Behave {
        Behave {
            refuse: self.refuse || !self.fails(),
            ..self.clone()
        }
    }
}

impl Defaults {
    pub fn new(json: &str) -> Result<Defaults, BehaveError> {
        let start = object(json)?;
        let parsed = Arc::new(parse(&start)?);
        Ok(Defaults {
            now: RwLock::new((start.clone(), parsed)),
            start,
        })
    }

    pub fn current(&self) -> Arc<Behave> {
        self.now
            .read()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .1
            .clone()
    }

    /// Sets the keys of `json`; `null` takes a key out again. All or nothing.
    pub fn merge(&self, json: &str) -> Result<Arc<Behave>, BehaveError> {
        let more = object(json)?;
        let mut now = self
            .now
            .write()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut keys = now.0.clone();
        overlay(&mut keys, more);
        let parsed = Arc::new(parse(&keys)?);
        *now = (keys, parsed.clone());
        Ok(parsed)
    }

    /// Back to what the engine was started with.
    pub fn reset(&self) -> Arc<Behave> {
        let parsed = Arc::new(parse(&self.start).unwrap_or_default());
        *self
            .now
            .write()
            .unwrap_or_else(|poisoned| poisoned.into_inner()) =
            (self.start.clone(), parsed.clone());
        parsed
    }

    /// What holds for one request: its own keys over the engine's.
    pub fn for_request(
        &self,
        header: Option<&str>,
        field: Option<&Value>,
    ) -> Result<Arc<Behave>, BehaveError> {
        if header.is_none() && field.is_none() {
            return Ok(self.current());
        }
        let mut keys = self
            .now
            .read()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .0
            .clone();
        if let Some(field) = field {
            let own = field
                .as_object()
                .cloned()
                .ok_or_else(|| BehaveError("`fake` is no object".to_owned()))?;
            overlay(&mut keys, own);
        }
        if let Some(header) = header {
            overlay(&mut keys, object(header)?);
        }
        Ok(Arc::new(parse(&keys)?))
    }
}

fn object(json: &str) -> Result<Map<String, Value>, BehaveError> {
    serde_json::from_str(json).map_err(|error| BehaveError(error.to_string()))
}

fn parse(keys: &Map<String, Value>) -> Result<Behave, BehaveError> {
    let mut keys = keys.clone();
    for status in ["health", "metrics", "models"] {
        // `503` and `"503"` are both fine.
        if let Some(number) = keys.get(status).and_then(Value::as_u64) {
            keys.insert(status.to_owned(), Value::String(number.to_string()));
        }
    }
    Behave::deserialize(Value::Object(keys)).map_err(|error| BehaveError(error.to_string()))
}

fn overlay(keys: &mut Map<String, Value>, more: Map<String, Value>) {
    for (key, value) in more {
        match value {
            Value::Null => keys.remove(&key),
            value => keys.insert(key, value),
        };
    }
}
