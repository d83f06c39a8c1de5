//! What an endpoint's streams and errors look like: how a stream ends, how an engine says that it
//! failed, and how we say it.

use std::borrow::Cow;
use std::fmt;
use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::{self, Finder};
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use super::sse::Event;

/// The API that an endpoint speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`, Anthropic's
    Messages,
    /// Everything else: embeddings, models, audio, …
    Other,
}

/// An error as clients read it, whatever its shape on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorBody {
    pub message: String,
    /// `type`, e.g. `invalid_request_error`.
    pub kind: Cow<'static, str>,
    pub code: ErrorCode,
    /// The request's field that is to blame.
    pub param: Option<String>,
}

/// `code`: ours are names, engines mostly send the status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ErrorCode {
    Name(Cow<'static, str>),
    Number(i64),
    /// `null`
    None,
}

/// An event with which an engine says that it failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamError {
    /// The status that the engine would have answered with, where its code is one (400 to 599).
    pub status: Option<u16>,
    pub error: ErrorBody,
    /// It is in a shape that the dialect's clients know, so it can pass as it is.
    /// If not, [`Dialect::error_event`] writes `error` down.
    pub is_native: bool,
}

impl Dialect {
    /// The dialect of a path without its query.
    pub fn of_path(path: &str) -> Self {
        match path.trim_end_matches('/') {
            "/v1/chat/completions" => Dialect::Chat,
            "/v1/completions" => Dialect::Completions,
            "/v1/responses" => Dialect::Responses,
            "/v1/messages" => Dialect::Messages,
            _ => Dialect::Other,
        }
    }

    /// Whether a stream of this dialect says itself that it is over, so that one that doesn't was cut off.
    pub fn expects_end(self) -> bool {
        self != Dialect::Other
    }

    /// Whether `event` is the one that ends a stream properly. `response.failed` does too: it is the
    /// end that the API itself has for a failure, and [`stream_error`](Self::stream_error) tells.
    pub fn ends(self, event: &Event<'_>) -> bool {
        match self {
            Dialect::Chat | Dialect::Completions => {
                !event.is_comment && event.data.as_ref() == b"[DONE]"
            }
            Dialect::Responses => is_typed(
                event,
                &[
                    "response.completed",
                    "response.incomplete",
                    "response.failed",
                ],
            ),
            Dialect::Messages => is_typed(event, &["message_stop"]),
            Dialect::Other => false,
        }
    }

    /// The event that tells a client that its stream failed.
    pub fn error_event(self, error: &ErrorBody) -> Bytes {
        let (name, body) = match self {
            Dialect::Responses => ("event: error\n", to_json(&Flat(error))),
            Dialect::Messages => ("event: error\n", to_json(&Typed(error))),
            Dialect::Chat | Dialect::Completions | Dialect::Other => ("", to_json(&Nested(error))),
        };
        // JSON text has no raw line ending in it, so one data line holds it.
        let mut event = Vec::with_capacity(name.len() + body.len() + 8);
        event.extend_from_slice(name.as_bytes());
        event.extend_from_slice(b"data: ");
        event.extend_from_slice(&body);
        event.extend_from_slice(b"\n\n");
        Bytes::from(event)
    }

    /// The JSON body of an answer that is an error.
    pub fn error_body(self, error: &ErrorBody) -> Bytes {
        Bytes::from(match self {
            Dialect::Messages => to_json(&Typed(error)),
            _ => to_json(&Nested(error)),
        })
    }

    /// The error in `event`, if it is one. Ordinary events cost one search.
    ///
    /// Engines send `{"error": {…}}` (vLLM, llama.cpp), `{"object": "error", …}` (SGLang),
    /// `{"error": "…"}`, and the events `error` and `response.failed` of the newer APIs.
    pub fn stream_error(self, event: &Event<'_>) -> Option<StreamError> {
        let named = event.name == Some(b"error");
        if event.is_comment || !(named || self.mentions_error(&event.data)) {
            return None;
        }
        let text = String::from_utf8_lossy(&event.data);
        let Ok(found) = serde_json::from_str::<ErrorFields<'_>>(&text) else {
            return named.then(|| StreamError::new(ErrorBody::plain(text.trim()), false));
        };
        let (error, shape) = match found.error() {
            Some(found) => found,
            None if named => (ErrorBody::plain(text.trim()), ErrorShape::Unknown),
            None => return None,
        };
        let is_native = match self {
            Dialect::Responses => matches!(shape, ErrorShape::Typed | ErrorShape::Failed),
            Dialect::Messages => shape == ErrorShape::TypedNested,
            _ => matches!(shape, ErrorShape::Nested | ErrorShape::TypedNested),
        };
        Some(StreamError::new(error, is_native))
    }

    fn mentions_error(self, data: &[u8]) -> bool {
        ERROR.find(data).is_some() || (self == Dialect::Responses && FAILED.find(data).is_some())
    }
}

impl ErrorBody {
    /// An error of the server's own, with nothing known but its text.
    pub fn plain(message: impl Into<String>) -> Self {
        ErrorBody {
            message: message.into(),
            kind: Cow::Borrowed("server_error"),
            code: ErrorCode::None,
            param: None,
        }
    }

    /// The error in a JSON object, where it is in one of the shapes that engines use.
    pub(super) fn from_json(json: &str) -> Option<(ErrorBody, ErrorShape)> {
        serde_json::from_str::<ErrorFields<'_>>(json).ok()?.error()
    }
}

impl ErrorCode {
    /// The code, where it is an HTTP status that tells of an error.
    pub fn status(&self) -> Option<u16> {
        match self {
            ErrorCode::Number(code @ 400..=599) => Some(*code as u16),
            _ => None,
        }
    }
}

impl StreamError {
    fn new(error: ErrorBody, is_native: bool) -> Self {
        StreamError {
            status: error.code.status(),
            error,
            is_native,
        }
    }
}

/// How an error was written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ErrorShape {
    /// `{"error": {"message", "type", …}}`: OpenAI's, and what clients of most endpoints know.
    Nested,
    /// `{"type": "error", "error": {…}}`: Anthropic's.
    TypedNested,
    /// `{"type": "error", "message", "code", …}`: that of a Responses stream.
    Typed,
    /// `{"type": "response.failed", "response": {"error": {…}}}`
    Failed,
    /// `{"object": "error", "message", …}`
    Flat,
    /// `{"error": "…"}`
    Bare,
    Unknown,
}

/// The members of an object that an error may be in. A later duplicate wins, as it does for clients.
#[derive(Default)]
struct ErrorFields<'a> {
    error: Option<&'a RawValue>,
    response: Option<&'a RawValue>,
    object: Option<&'a RawValue>,
    kind: Option<&'a RawValue>,
    message: Option<&'a RawValue>,
    code: Option<&'a RawValue>,
    param: Option<&'a RawValue>,
}

impl ErrorFields<'_> {
    fn error(&self) -> Option<(ErrorBody, ErrorShape)> {
        let kind = text(self.kind);
        if kind.as_deref() == Some("response.failed") {
            let response: ErrorFields<'_> = serde_json::from_str(self.response?.get()).ok()?;
            let (error, _) = response
                .error()
                .unwrap_or((ErrorBody::plain("the response failed"), ErrorShape::Unknown));
            return Some((error, ErrorShape::Failed));
        }
        let is_typed = kind.as_deref() == Some("error");
        if let Some(error) = self.error {
            let raw = error.get();
            if raw.starts_with('{') {
                let fields: ErrorFields<'_> = serde_json::from_str(raw).ok()?;
                let shape = if is_typed {
                    ErrorShape::TypedNested
                } else {
                    ErrorShape::Nested
                };
                return Some((fields.body(text(fields.kind), raw), shape));
            }
            if let Some(message) = text(Some(error)) {
                let error = ErrorBody {
                    message,
                    ..self.body(kind.filter(|_| !is_typed), raw)
                };
                return Some((error, ErrorShape::Bare));
            }
            if raw == "true" {
                return Some((self.body(kind, raw), ErrorShape::Flat));
            }
        }
        if is_typed {
            return Some((self.body(None, ""), ErrorShape::Typed));
        }
        let is_flat = text(self.object).as_deref() == Some("error");
        is_flat.then(|| (self.body(kind, ""), ErrorShape::Flat))
    }

    /// The error whose fields these are; `raw` is its message if it has none.
    fn body(&self, kind: Option<String>, raw: &str) -> ErrorBody {
        let code = match self
            .code
            .map(|code| serde_json::from_str::<AnyCode>(code.get()))
        {
            Some(Ok(AnyCode::Number(code))) => ErrorCode::Number(code),
            Some(Ok(AnyCode::Name(code))) => ErrorCode::Name(Cow::Owned(code)),
            _ => ErrorCode::None,
        };
        ErrorBody {
            message: text(self.message).unwrap_or_else(|| raw.to_owned()),
            kind: kind.map_or(Cow::Borrowed("server_error"), Cow::Owned),
            code,
            param: text(self.param),
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum AnyCode {
    Number(i64),
    Name(String),
}

impl<'de> Deserialize<'de> for ErrorFields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = ErrorFields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<ErrorFields<'de>, A::Error> {
                let mut found = ErrorFields::default();
                while let Some(Key(key)) = map.next_key()? {
                    let field = match key.as_ref() {
                        "error" => &mut found.error,
                        "response" => &mut found.response,
                        "object" => &mut found.object,
                        "type" => &mut found.kind,
                        "message" => &mut found.message,
                        "code" => &mut found.code,
                        "param" => &mut found.param,
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                            continue;
                        }
                    };
                    *field = Some(map.next_value()?);
                }
                Ok(found)
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// A key, or any string, borrowed unless it is written with escapes.
#[derive(Deserialize)]
pub(super) struct Key<'a>(#[serde(borrow)] pub Cow<'a, str>);

/// The value, if it is a string.
fn text(value: Option<&RawValue>) -> Option<String> {
    serde_json::from_str(value?.get()).ok()
}

/// `error` as a whole string is in every shape, as a key or as a value, and in hardly any other event.
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"error\""));
static FAILED: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("response.failed"));

/// Whether the event's name, or else its JSON's `type`, is one of `kinds`.
fn is_typed(event: &Event<'_>, kinds: &[&str]) -> bool {
    if event.is_comment {
        return false;
    }
    if let Some(name) = event.name {
        if kinds.iter().any(|kind| kind.as_bytes() == name) {
            return true;
        }
        if name != b"message" {
            return false;
        }
    }
    if !kinds
        .iter()
        .any(|kind| memmem::find(&event.data, kind.as_bytes()).is_some())
    {
        return false;
    }
    let Ok(fields) = serde_json::from_slice::<ErrorFields<'_>>(&event.data) else {
        return false;
    };
    text(fields.kind).is_some_and(|found| kinds.contains(&found.as_str()))
}

/// OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.
struct Nested<'a>(&'a ErrorBody);
/// That of a Responses stream.
struct Flat<'a>(&'a ErrorBody);
/// Anthropic's, whose errors have a type and a message only.
struct Typed<'a>(&'a ErrorBody);

#[derive(Serialize)]
struct NestedFields<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: &'a ErrorCode,
}

#[derive(Serialize)]
struct TypedFields<'a> {
    r#type: &'a str,
    message: &'a str,
}

impl Serialize for Nested<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ErrorBody {
            message,
            kind,
            code,
            param,
        } = self.0;
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry(
            "error",
            &NestedFields {
                message,
                r#type: kind,
                param: param.as_deref(),
                code,
            },
        )?;
        map.end()
    }
}

impl Serialize for Flat<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(4))?;
        map.serialize_entry("type", "error")?;
        map.serialize_entry("code", &self.0.code)?;
        map.serialize_entry("message", &self.0.message)?;
        map.serialize_entry("param", &self.0.param)?;
        map.end()
    }
}

impl Serialize for Typed<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(2))?;
        map.serialize_entry("type", "error")?;
        map.serialize_entry(
            "error",
            &TypedFields {
                r#type: &self.0.kind,
                message: &self.0.message,
            },
        )?;
        map.end()
    }
}

impl Serialize for ErrorCode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            ErrorCode::Name(name) => serializer.serialize_str(name),
            ErrorCode::Number(number) => serializer.serialize_i64(*number),
            ErrorCode::None => serializer.serialize_none(),
        }
    }
}

fn to_json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings and numbers always have a JSON text")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::recordings::{self, recording};
    use crate::gateway::sse::events;

    const DIALECTS: [Dialect; 5] = [
        Dialect::Chat,
        Dialect::Completions,
        Dialect::Responses,
        Dialect::Messages,
        Dialect::Other,
    ];

    fn dialect_of(name: &str) -> Dialect {
        match name.split('/').nth(1).unwrap() {
            name if name.starts_with("completions") => Dialect::Completions,
            name if name.starts_with("responses") => Dialect::Responses,
            name if name.starts_with("messages") => Dialect::Messages,
            _ => Dialect::Chat,
        }
    }

    fn nasty(message: &str) -> ErrorBody {
        ErrorBody {
            message: message.to_owned(),
            kind: Cow::Borrowed("server_error"),
            code: ErrorCode::Name(Cow::Borrowed("upstream_failed")),
            param: Some("a\"b".to_owned()),
        }
    }

    #[test]
    fn paths_name_their_dialect() {
        let cases = [
            ("/v1/chat/completions", Dialect::Chat),
            ("/v1/completions", Dialect::Completions),
            ("/v1/responses", Dialect::Responses),
            ("/v1/responses/resp_1", Dialect::Other),
            ("/v1/messages", Dialect::Messages),
            ("/v1/messages/count_tokens", Dialect::Other),
            ("/v1/embeddings", Dialect::Other),
            ("/v1/chat/completions/input_tokens", Dialect::Other),
        ];
        for (path, dialect) in cases {
            assert_eq!(Dialect::of_path(path), dialect, "{path}");
        }
    }

    #[test]
    fn every_whole_recorded_stream_ends_once_and_a_cut_one_never() {
        for recording in recordings::all()
            .iter()
            .filter(|recording| recording.is_stream())
        {
            let (body, dialect) = (recording.body(), dialect_of(&recording.name));
            let ends: Vec<bool> = events(&body).map(|event| dialect.ends(&event)).collect();
            let expected = usize::from(recording.name != "llamacpp/sigterm-mid-stream");
            assert_eq!(
                ends.iter().filter(|is_end| **is_end).count(),
                expected,
                "{}",
                recording.name
            );
            assert_eq!(ends.last(), Some(&(expected == 1)), "{}", recording.name);
        }
    }

    #[test]
    fn text_that_looks_like_an_end_is_none() {
        let cases = [
            (
                Dialect::Chat,
                "data: {\"choices\":[{\"delta\":{\"content\":\"data: [DONE]\\n\\n\"}}]}\n\n",
                false,
            ),
            (Dialect::Chat, "data: [DONE]x\n\n", false),
            (Dialect::Chat, ": [DONE]\n\n", false),
            (Dialect::Chat, "data: \ndata: [DONE]\n\n", false),
            (Dialect::Chat, "data:[DONE]\r\n\r\n", true),
            (Dialect::Responses, "data: [DONE]\n\n", false),
            (
                Dialect::Responses,
                "data: {\"type\":\"response.output_text.delta\",\"delta\":\"response.completed\"}\n\n",
                false,
            ),
            (
                Dialect::Responses,
                "data: {\"response\":{\"type\":\"x\"},\"type\":\"response.incomplete\"}\n\n",
                true,
            ),
            (
                Dialect::Responses,
                "event: response.output_text.delta\ndata: {\"type\":\"response.completed\"}\n\n",
                false,
            ),
            (
                Dialect::Responses,
                "event: response.completed\ndata: {}\n\n",
                true,
            ),
            (
                Dialect::Messages,
                "data: {\"type\":\"message_stop\"}\n\n",
                true,
            ),
            (
                Dialect::Messages,
                "data: {\"delta\":{\"type\":\"message_stop\"}}\n\n",
                false,
            ),
            (Dialect::Other, "data: [DONE]\n\n", false),
        ];
        for (dialect, text, is_end) in cases {
            assert_eq!(
                dialect.ends(&events(text.as_bytes()).next().unwrap()),
                is_end,
                "{dialect:?} {text:?}"
            );
        }
    }

    #[test]
    fn every_error_frame_parses_and_is_recognised_whatever_its_text_holds() {
        for message in [
            "plain",
            "quotes \" and\nnew\r\nlines\u{2028}\0",
            "data: [DONE]\n\n",
            "\u{fffd}\\u12",
        ] {
            for dialect in DIALECTS {
                let error = nasty(message);
                let frame = dialect.error_event(&error);
                let mut read = events(&frame);
                let event = read.next().unwrap();
                assert_eq!(read.next(), None, "one event");
                let value: serde_json::Value = serde_json::from_slice(&event.data).unwrap();
                let found = value.get("error").unwrap_or(&value);
                assert_eq!(found["message"], *message, "{dialect:?}");
                let seen = dialect.stream_error(&event).unwrap();
                assert_eq!(
                    (seen.error.message.as_str(), seen.is_native),
                    (message, true),
                    "{dialect:?}"
                );
                assert!(!dialect.ends(&event));
                let body: serde_json::Value =
                    serde_json::from_slice(&dialect.error_body(&error)).unwrap();
                assert_eq!(body["error"]["message"], *message);
            }
        }
    }

    #[test]
    fn frames_have_the_shape_of_their_dialect() {
        let error = nasty("no");
        let chat = r#"{"error":{"message":"no","type":"server_error","param":"a\"b","code":"upstream_failed"}}"#;
        let responses =
            r#"{"type":"error","code":"upstream_failed","message":"no","param":"a\"b"}"#;
        let messages = r#"{"type":"error","error":{"type":"server_error","message":"no"}}"#;
        assert_eq!(
            Dialect::Chat.error_event(&error),
            format!("data: {chat}\n\n")
        );
        assert_eq!(
            Dialect::Responses.error_event(&error),
            format!("event: error\ndata: {responses}\n\n")
        );
        assert_eq!(
            Dialect::Messages.error_event(&error),
            format!("event: error\ndata: {messages}\n\n")
        );
        assert_eq!(Dialect::Responses.error_body(&error), chat);
        assert_eq!(Dialect::Messages.error_body(&error), messages);
    }

    #[test]
    fn engines_errors_are_recognised_in_every_shape() {
        let nested =
            r#"{"error": {"message": "queue full", "type": "E", "param": null, "code": 503}}"#;
        let flat =
            r#"{"object":"error","message":"queue full","type":"E","param":null,"code":503}"#;
        let failed = r#"{"type":"response.failed","response":{"id":"r","error":{"code":"server_error","message":"queue full"}}}"#;
        let typed = r#"{"type":"error","code":503,"message":"queue full","param":null}"#;
        let typed_nested =
            r#"{"type":"error","error":{"type":"E","message":"queue full","code":503}}"#;
        let bare = r#"{"error":"queue full","code":503}"#;
        let cases = [
            (Dialect::Chat, nested, Some(503), true),
            (Dialect::Chat, flat, Some(503), false),
            (Dialect::Chat, bare, Some(503), false),
            (Dialect::Responses, nested, Some(503), false),
            (Dialect::Responses, typed, Some(503), true),
            (Dialect::Responses, failed, None, true),
            (Dialect::Messages, nested, Some(503), false),
            (Dialect::Messages, typed_nested, Some(503), true),
        ];
        for (dialect, json, status, is_native) in cases {
            let text = format!("data: {json}\n\n");
            let found = dialect
                .stream_error(&events(text.as_bytes()).next().unwrap())
                .expect(json);
            assert_eq!(found.error.message, "queue full", "{json}");
            assert_eq!(
                (found.status, found.is_native),
                (status, is_native),
                "{dialect:?} {json}"
            );
        }
        let named = Dialect::Messages.stream_error(
            &events(b"event: error\ndata: broken \xff\n\n")
                .next()
                .unwrap(),
        );
        assert_eq!(named.unwrap().error.message, "broken \u{fffd}");
    }

    #[test]
    fn only_a_recorded_death_is_an_error_in_a_stream() {
        for recording in recordings::all()
            .iter()
            .filter(|recording| recording.is_stream())
        {
            let (body, dialect) = (recording.body(), dialect_of(&recording.name));
            let errors = events(&body)
                .filter_map(|event| dialect.stream_error(&event))
                .count();
            assert_eq!(
                errors,
                usize::from(recording.name == "vllm/sigterm-mid-stream"),
                "{}",
                recording.name
            );
        }
        let body = recording("vllm", "sigterm-mid-stream").body();
        let error = events(&body)
            .find_map(|event| Dialect::Chat.stream_error(&event))
            .unwrap();
        assert_eq!(
            (error.status, error.error.kind.as_ref(), error.is_native),
            (Some(500), "InternalServerError", true)
        );
    }

    #[test]
    fn text_that_says_error_is_none() {
        for json in [
            r#"{"choices":[{"delta":{"content":"error"}}]}"#,
            r#"{"choices":[{"delta":{"content":"{\"error\":{}}"}}],"error":null}"#,
            r#"{"response":{"error":null,"object":"response"},"type":"response.created"}"#,
            r#"{"choices":[{"logprobs":{"content":[{"token":"error"}]}}]}"#,
            r#"["error"]"#,
            r#"{"error":false}"#,
        ] {
            let text = format!("data: {json}\n\n");
            for dialect in DIALECTS {
                assert_eq!(
                    dialect.stream_error(&events(text.as_bytes()).next().unwrap()),
                    None,
                    "{json}"
                );
            }
        }
    }
}
