//! The access record: what is kept about one request, and the line that it becomes.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::Method;

use super::escape::{Stamp, push_ms, push_quoted, push_u64, push_word};
use super::log::LogFormat;

/// What is known about one request in the end. Empty strings and `None` mean "never got that far".
///
/// Names come from the configuration where the field is an `Arc<str>`, from the client where it is a
/// `String`: the latter are never used as a metric's label. Paths are without their query, which may hold secrets.
#[derive(Clone, Debug, Default)]
pub struct AccessRecord {
    pub request_id: String,
    pub method: Method,
    pub path: String,
    pub tenant: Arc<str>,
    /// What the client put into `model`. Differs from `model` exactly when it used an alias.
    pub model_asked: String,
    /// The catalog's name; set by [`OpenRecord::set_model`](super::OpenRecord::set_model).
    pub model: Arc<str>,
    /// The replica that was tried last.
    pub replica: Arc<str>,
    pub engine: Arc<str>,
    pub band: Arc<str>,
    /// What the client was sent; 0 when it left before any status was.
    pub status: u16,
    /// The error code of ours that was answered (`queue_full`, …), also one sent as an event in a stream.
    pub code: &'static str,
    pub outcome: Outcome,
    pub stream: bool,
    pub input_tokens: Option<u64>,
    /// The part of `input_tokens` that the engine had in its prefix cache.
    pub cached_tokens: Option<u64>,
    pub output_tokens: Option<u64>,
    /// The token counts are the gateway's own estimate: the engine said none.
    pub tokens_estimated: bool,
    /// What the tenant was charged, in thousandths of a token's price (`fairness.prices`); written in whole ones.
    pub cost: u64,
    /// Replicas that were tried.
    pub attempts: u32,
    /// Time spent waiting for a permit.
    pub queue: Duration,
    /// From arrival to the first byte of the answer's body.
    pub first_byte: Option<Duration>,
    /// From arrival to the end; set when the record closes.
    pub total: Duration,
    /// Body bytes sent to the client.
    pub bytes_out: u64,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// Not ended yet. A record that closes so is one whose client left.
    #[default]
    Open,
    /// The engine answered, and the answer was delivered whole.
    Ok,
    /// The client went away before the end.
    ClientLeft,
    /// The engine's own error was passed on.
    EngineError,
    /// No engine gave an answer, or one broke off in the middle of it.
    UpstreamFailed,
    /// The gateway said no: the request, its key, a limit, no replica.
    Refused,
}

impl Outcome {
    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Open => "open",
            Outcome::Ok => "ok",
            Outcome::ClientLeft => "client_left",
            Outcome::EngineError => "engine_error",
            Outcome::UpstreamFailed => "upstream_failed",
            Outcome::Refused => "refused",
        }
    }
}

impl AccessRecord {
    /// Appends the record's line, newline included. The beginning is that of the log's own lines in the same format.
    pub fn push_line(
        &self,
        out: &mut Vec<u8>,
        format: LogFormat,
        stamp: &mut Stamp,
        now: SystemTime,
    ) {
        match format {
            LogFormat::Text => {
                stamp.push(out, now);
                out.extend_from_slice(b"  INFO access: request");
                self.push_fields(&mut Fields { out, json: false });
            }
            LogFormat::Json => {
                out.extend_from_slice(b"{\"timestamp\":\"");
                stamp.push(out, now);
                out.extend_from_slice(
                    b"\",\"level\":\"INFO\",\"target\":\"access\",\"message\":\"request\"",
                );
                self.push_fields(&mut Fields { out, json: true });
                out.push(b'}');
            }
        }
        out.push(b'\n');
    }

    fn push_fields(&self, fields: &mut Fields<'_>) {
        fields.text("request_id", &self.request_id);
        fields.text("method", self.method.as_str());
        fields.text("path", &self.path);
        fields.number(
            "status",
            (self.status != 0).then_some(u64::from(self.status)),
        );
        fields.text("outcome", self.outcome.as_str());
        fields.text("code", self.code);
        fields.text("tenant", &self.tenant);
        fields.text("model", &self.model);
        fields.text("model_asked", &self.model_asked);
        fields.text("band", &self.band);
        fields.text("replica", &self.replica);
        fields.text("engine", &self.engine);
        fields.flag("stream", self.stream);
        fields.number("attempts", Some(u64::from(self.attempts)));
        fields.number("input_tokens", self.input_tokens);
        fields.number("cached_tokens", self.cached_tokens);
        fields.number("output_tokens", self.output_tokens);
        fields.flag("tokens_estimated", self.tokens_estimated);
        fields.number("cost", Some(self.cost.div_ceil(1_000)));
        fields.ms("queue_ms", Some(self.queue));
        fields.ms("first_byte_ms", self.first_byte);
        fields.ms("total_ms", Some(self.total));
        fields.number("bytes_out", Some(self.bytes_out));
    }
}

/// Appends fields one after the other. JSON has every field always (`null` for unknown), text only what is known.
struct Fields<'a> {
    out: &'a mut Vec<u8>,
    json: bool,
}

impl Fields<'_> {
    fn text(&mut self, key: &str, value: &str) {
        if self.json {
            self.key(key);
            push_quoted(self.out, value);
        } else if !value.is_empty() {
            self.key(key);
            push_word(self.out, value);
        }
    }

    fn number(&mut self, key: &str, value: Option<u64>) {
        self.optional(key, value, push_u64);
    }

    fn ms(&mut self, key: &str, value: Option<Duration>) {
        self.optional(key, value, push_ms);
    }

    fn flag(&mut self, key: &str, value: bool) {
        if self.json || value {
            self.key(key);
            self.out
                .extend_from_slice(if value { b"true" } else { b"false" });
        }
    }

    fn optional<T>(&mut self, key: &str, value: Option<T>, push: fn(&mut Vec<u8>, T)) {
        match value {
            Some(value) => {
                self.key(key);
                push(self.out, value);
            }
            None if self.json => {
                self.key(key);
                self.out.extend_from_slice(b"null");
            }
            None => {}
        }
    }

    fn key(&mut self, key: &str) {
        if self.json {
            self.out.extend_from_slice(b",\"");
            self.out.extend_from_slice(key.as_bytes());
            self.out.extend_from_slice(b"\":");
        } else {
            self.out.push(b' ');
            self.out.extend_from_slice(key.as_bytes());
            self.out.push(b'=');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    fn line(record: &AccessRecord, format: LogFormat) -> String {
        let mut out = Vec::new();
        record.push_line(
            &mut out,
            format,
            &mut Stamp::default(),
            UNIX_EPOCH + Duration::from_secs(1_795_978_221),
        );
        String::from_utf8(out).unwrap()
    }

    fn served() -> AccessRecord {
        AccessRecord {
            request_id: "r-1".into(),
            method: Method::POST,
            path: "/v1/chat/completions".into(),
            tenant: "research".into(),
            model_asked: "default".into(),
            model: "smollm2".into(),
            replica: "smollm2/0".into(),
            engine: "llamacpp".into(),
            band: "interactive".into(),
            status: 200,
            outcome: Outcome::Ok,
            stream: true,
            input_tokens: Some(12),
            output_tokens: Some(34),
            attempts: 1,
            queue: Duration::from_micros(250),
            first_byte: Some(Duration::from_millis(80)),
            total: Duration::from_millis(1500),
            bytes_out: 4096,
            ..AccessRecord::default()
        }
    }

    #[test]
    fn text_has_what_is_known_and_nothing_else() {
        assert_eq!(
            line(&served(), LogFormat::Text),
            "2026-11-29T18:50:21.000000Z  INFO access: request request_id=r-1 method=POST path=/v1/chat/completions \
             status=200 outcome=ok tenant=research model=smollm2 model_asked=default band=interactive \
             replica=smollm2/0 engine=llamacpp stream=true attempts=1 input_tokens=12 output_tokens=34 \
             cost=0 queue_ms=0.250 first_byte_ms=80.000 total_ms=1500.000 bytes_out=4096\n"
        );
    }

    #[test]
    fn json_has_every_field_and_null_for_what_is_unknown() {
        let json: serde_json::Value =
            serde_json::from_str(&line(&AccessRecord::default(), LogFormat::Json)).unwrap();
        for unknown in [
            "status",
            "input_tokens",
            "cached_tokens",
            "output_tokens",
            "first_byte_ms",
        ] {
            assert!(
                json[unknown].is_null() && json.get(unknown).is_some(),
                "{unknown}"
            );
        }
        let json: serde_json::Value =
            serde_json::from_str(&line(&served(), LogFormat::Json)).unwrap();
        assert_eq!(json["timestamp"], "2026-11-29T18:50:21.000000Z");
        assert_eq!(json["first_byte_ms"], 80.0);
        assert_eq!(json["stream"], true);
        assert_eq!(json["code"], "");
    }

    #[test]
    fn a_model_name_with_a_newline_and_quotes_stays_one_field_of_one_line() {
        let model_asked =
            "x\" outcome=ok\n2026-01-01T00:00:00Z  INFO access: request status=200 \u{1b}[2J";
        let record = AccessRecord {
            model_asked: model_asked.into(),
            ..AccessRecord::default()
        };
        for format in [LogFormat::Text, LogFormat::Json] {
            let line = line(&record, format);
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            assert!(!line.contains('\u{1b}'), "{line}");
        }
        let json: serde_json::Value =
            serde_json::from_str(&line(&record, LogFormat::Json)).unwrap();
        assert_eq!(json["model_asked"], model_asked);
    }
}
