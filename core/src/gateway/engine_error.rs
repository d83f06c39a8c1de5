//! Brings the errors that engines answer with into one shape, once.

use std::borrow::Cow;

use bytes::Bytes;
use memchr::memmem;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::dialect::{Dialect, ErrorBody, ErrorCode, ErrorShape};

/// The longest message for a log line.
pub const SHORT_MESSAGE_MAX_BYTES: usize = 300;

/// The longest text, of a page that isn't JSON, that becomes a message.
pub const PAGE_TEXT_MAX_BYTES: usize = 2048;

/// An engine's error, ready for the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineError {
    /// What the client gets: the engine's own bytes where they are in the client's shape already.
    pub body: Bytes,
    /// `body` was wrapped, so the engine's content type and length no longer hold: it is JSON.
    pub changed: bool,
    /// One line for logs, and for our own errors that tell why an attempt failed.
    pub message: String,
}

/// Normalises the body of an answer with an error status.
///
/// `{"error": {…}}` passes byte for byte. `{"object": "error", …}` (SGLang), `{"error": "…"}` (vLLM and
/// SGLang, a wrong key), `{"detail": …}` (FastAPI), pages, plain text and nothing at all are wrapped.
pub fn normalise(
    dialect: Dialect,
    status: u16,
    body: &Bytes,
    content_type: Option<&str>,
) -> EngineError {
    let parsed = std::str::from_utf8(body)
        .ok()
        .and_then(ErrorBody::from_json);
    let error = match parsed {
        Some((error, ErrorShape::Nested | ErrorShape::TypedNested)) => {
            return EngineError {
                body: body.clone(),
                changed: false,
                message: short(&error.message),
            };
        }
        Some((error, ErrorShape::Flat | ErrorShape::Typed)) => with_defaults(error, status),
        Some((error, _)) => ErrorBody {
            kind: kind(status),
            ..with_defaults(error, status)
        },
        None => ErrorBody {
            message: message_of_page(status, body, content_type),
            kind: kind(status),
            code: ErrorCode::Number(status.into()),
            param: None,
        },
    };
    EngineError {
        body: dialect.error_body(&error),
        changed: true,
        message: short(&error.message),
    }
}

/// The `type` for an error whose engine named none.
fn kind(status: u16) -> Cow<'static, str> {
    Cow::Borrowed(match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        400..=499 => "invalid_request_error",
        _ => "server_error",
    })
}

fn with_defaults(error: ErrorBody, status: u16) -> ErrorBody {
    let code = match error.code {
        ErrorCode::None => ErrorCode::Number(status.into()),
        code => code,
    };
    ErrorBody { code, ..error }
}

fn message_of_page(status: u16, body: &[u8], content_type: Option<&str>) -> String {
    #[derive(Deserialize)]
    struct Other<'a> {
        #[serde(borrow)]
        detail: Option<&'a RawValue>,
        message: Option<String>,
    }

    let text = String::from_utf8_lossy(body);
    let text = text.trim();
    if let Ok(Other { detail, message }) = serde_json::from_str(text) {
        let detail = detail.map(|detail: &RawValue| message_of_detail(detail.get()));
        if let Some(message) = detail.or(message) {
            return message;
        }
    }
    if text.is_empty() {
        return format!("the engine answered {status} without a body");
    }
    let is_page = content_type.is_some_and(|kind| kind.to_ascii_lowercase().contains("html"))
        || text.starts_with('<');
    if is_page {
        return match title(text) {
            Some(title) => format!(
                "the engine answered {status} with a page: {}",
                cut(title, PAGE_TEXT_MAX_BYTES)
            ),
            None => format!("the engine answered {status} with a page"),
        };
    }
    cut(text, PAGE_TEXT_MAX_BYTES).into_owned()
}

/// FastAPI's `detail`: a string, or a list of what is wrong where.
fn message_of_detail(raw: &str) -> String {
    #[derive(Deserialize)]
    struct Item {
        #[serde(default)]
        loc: Vec<serde_json::Value>,
        msg: String,
    }

    if let Ok(message) = serde_json::from_str::<String>(raw) {
        return message;
    }
    let Ok(items) = serde_json::from_str::<Vec<Item>>(raw) else {
        return raw.to_owned();
    };
    let item = |item: &Item| {
        let part = |part: &serde_json::Value| {
            part.as_str()
                .map_or_else(|| part.to_string(), str::to_owned)
        };
        let place: Vec<String> = item.loc.iter().map(part).collect();
        if place.is_empty() {
            item.msg.clone()
        } else {
            format!("{}: {}", place.join("."), item.msg)
        }
    };
    items.iter().map(item).collect::<Vec<_>>().join("; ")
}

fn title(page: &str) -> Option<&str> {
    let lower = page.to_ascii_lowercase();
    let start = memmem::find(lower.as_bytes(), b"<title>")? + "<title>".len();
    let len = memmem::find(&lower.as_bytes()[start..], b"</title>")?;
    Some(page[start..start + len].trim()).filter(|title| !title.is_empty())
}

fn short(message: &str) -> String {
    let one_line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    cut(&one_line, SHORT_MESSAGE_MAX_BYTES).into_owned()
}

/// At most `max_bytes` of `text`, at a character's end.
fn cut(text: &str, max_bytes: usize) -> Cow<'_, str> {
    if text.len() <= max_bytes {
        return Cow::Borrowed(text);
    }
    Cow::Owned(format!(
        "{}…",
        &text[..text.floor_char_boundary(max_bytes - '…'.len_utf8())]
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::recordings::{self, recording};

    fn wrapped(status: u16, body: &str, content_type: &str) -> (String, String) {
        let error = normalise(
            Dialect::Chat,
            status,
            &Bytes::copy_from_slice(body.as_bytes()),
            Some(content_type),
        );
        assert!(error.changed);
        (
            String::from_utf8(error.body.to_vec()).unwrap(),
            error.message,
        )
    }

    #[test]
    fn every_recorded_error_comes_out_in_the_one_shape_and_stays_as_it_is_a_second_time() {
        let mut errors = 0;
        for recording in recordings::all()
            .iter()
            .filter(|recording| recording.status >= 400)
        {
            errors += 1;
            let body = Bytes::from(recording.body());
            let once = normalise(
                Dialect::Chat,
                recording.status,
                &body,
                Some(&recording.content_type),
            );
            let value: serde_json::Value =
                serde_json::from_slice(&once.body).expect(&recording.name);
            assert!(value["error"]["message"].is_string(), "{}", recording.name);
            assert!(value["error"]["type"].is_string(), "{}", recording.name);
            assert_eq!(
                value["error"]["code"], recording.status,
                "{}",
                recording.name
            );
            assert_eq!(
                once.changed,
                !body.starts_with(b"{\"error\":{"),
                "{}",
                recording.name
            );
            assert!(
                !once.message.is_empty()
                    && once.message.len() <= SHORT_MESSAGE_MAX_BYTES
                    && !once.message.contains('\n')
            );
            let twice = normalise(
                Dialect::Chat,
                recording.status,
                &once.body,
                Some("application/json"),
            );
            assert_eq!(
                (twice.changed, &twice.body, &twice.message),
                (false, &once.body, &once.message)
            );
        }
        assert!(errors > 30);
    }

    #[test]
    fn a_nested_error_keeps_its_bytes_and_unknown_fields() {
        let body = Bytes::from(recording("llamacpp", "err-too-long").body());
        let error = normalise(Dialect::Chat, 400, &body, Some("application/json"));
        assert_eq!(
            (error.body.as_ptr(), error.body.len(), error.changed),
            (body.as_ptr(), body.len(), false)
        );
        assert!(error.message.starts_with("request (3031 tokens) exceeds"));
    }

    #[test]
    fn other_shapes_are_wrapped_once() {
        let cases = [
            (
                401,
                r#"{"error":"Unauthorized"}"#,
                r#"{"error":{"message":"Unauthorized","type":"authentication_error","param":null,"code":401}}"#,
            ),
            (
                404,
                r#"{"detail":"Not Found"}"#,
                r#"{"error":{"message":"Not Found","type":"not_found_error","param":null,"code":404}}"#,
            ),
            (
                422,
                r#"{"detail":[{"loc":["body","messages",0],"msg":"Field required","type":"missing"}]}"#,
                r#"{"error":{"message":"body.messages.0: Field required","type":"invalid_request_error","param":null,"code":422}}"#,
            ),
            (
                400,
                r#"{"object":"error","message":"no \"x\"","type":"BadRequestError","param":"x","code":400}"#,
                r#"{"error":{"message":"no \"x\"","type":"BadRequestError","param":"x","code":400}}"#,
            ),
            (
                500,
                "",
                r#"{"error":{"message":"the engine answered 500 without a body","type":"server_error","param":null,"code":500}}"#,
            ),
            (
                503,
                "busy\n",
                r#"{"error":{"message":"busy","type":"server_error","param":null,"code":503}}"#,
            ),
            (
                500,
                "[1]",
                r#"{"error":{"message":"[1]","type":"server_error","param":null,"code":500}}"#,
            ),
        ];
        for (status, body, expected) in cases {
            assert_eq!(wrapped(status, body, "text/plain").0, expected, "{body}");
        }
        let (body, message) = wrapped(
            502,
            "<HTML><Title> Bad\nGateway </title><b>x</b>",
            "text/html; charset=utf-8",
        );
        assert!(body.contains(r"with a page: Bad\nGateway"));
        assert_eq!(message, "the engine answered 502 with a page: Bad Gateway");
    }

    #[test]
    fn bytes_that_are_no_text_and_very_long_ones_still_give_a_valid_body() {
        let long = "é".repeat(5000);
        for body in [b"\xff\xfe{\"error\":{}}".as_slice(), long.as_bytes()] {
            let error = normalise(Dialect::Messages, 500, &Bytes::copy_from_slice(body), None);
            let value: serde_json::Value = serde_json::from_slice(&error.body).unwrap();
            assert_eq!(value["type"], "error");
            assert!(
                error.body.len() < 2 * PAGE_TEXT_MAX_BYTES
                    && error.message.len() <= SHORT_MESSAGE_MAX_BYTES
            );
        }
    }
}
