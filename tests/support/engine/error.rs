//! Error bodies in the shapes of the engines, as recorded.

use serde_json::Value;

use super::behave::Shape;
use super::options::Kind;

/// An error answer.
pub struct Problem {
    pub status: u16,
    pub message: String,
    /// The `type` of the error, in the words of the kind.
    pub class: &'static str,
    pub param: Option<String>,
}

impl Problem {
    pub fn new(status: u16, class: &'static str, message: impl Into<String>) -> Problem {
        Problem {
            status,
            message: message.into(),
            class,
            param: None,
        }
    }

    /// An error of no particular cause.
    pub fn plain(kind: Kind, status: u16, message: Option<&str>) -> Problem {
        let class = match (kind, status) {
            (Kind::Llamacpp, 400..=499) => "invalid_request_error",
            (Kind::Llamacpp, 501) => "not_supported_error",
            (Kind::Llamacpp, 503) => "unavailable_error",
            (Kind::Llamacpp | Kind::Openai, _) if status >= 500 => "server_error",
            (Kind::Openai, 429) => "rate_limit_exceeded",
            (Kind::Openai, _) => "invalid_request_error",
            (_, 400..=499) => "BadRequestError",
            (_, 503) => "ServiceUnavailableError",
            _ => "InternalServerError",
        };
        Problem::new(
            status,
            class,
            message.unwrap_or("the fake engine was asked to fail"),
        )
    }

    /// A body that is no JSON.
    pub fn bad_json(kind: Kind) -> Problem {
        match kind {
            Kind::Llamacpp => Problem::new(
                400,
                "invalid_request_error",
                "[json.exception.parse_error.101] parse error at line 1, column 1: syntax error while parsing value",
            ),
            Kind::Openai => Problem::new(
                400,
                "invalid_request_error",
                "We could not parse the JSON body of your request.",
            ),
            Kind::Vllm | Kind::Sglang => Problem::new(
                400,
                "Bad Request",
                "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body', 'msg': 'JSON decode error'}",
            ),
        }
    }

    /// The shape that the kind itself uses.
    pub fn own_shape(kind: Kind) -> Shape {
        if kind == Kind::Sglang {
            Shape::Flat
        } else {
            Shape::Nested
        }
    }

    /// Content type and body.
    pub fn body(&self, kind: Kind, shape: Shape) -> (&'static str, String) {
        let message = Value::from(self.message.as_str()).to_string();
        let (class, status) = (self.class, self.status);
        let param = Value::from(self.param.clone()).to_string();
        let json = match (shape, kind) {
            (Shape::Nested, Kind::Llamacpp) => {
                format!(r#"{{"error":{{"code":{status},"message":{message},"type":"{class}"}}}}"#)
            }
            (Shape::Nested, Kind::Openai) => {
                format!(
                    r#"{{"error":{{"message":{message},"type":"{class}","param":{param},"code":null}}}}"#
                )
            }
            (Shape::Nested, _) => {
                format!(
                    r#"{{"error":{{"message":{message},"type":"{class}","param":{param},"code":{status}}}}}"#
                )
            }
            (Shape::Flat, _) => format!(
                r#"{{"object":"error","message":{message},"type":"{class}","param":{param},"code":{status}}}"#
            ),
            (Shape::String, _) => format!(r#"{{"error":{message}}}"#),
            (Shape::Html, _) => {
                let html = format!(
                    "<html><body><h1>{status}</h1>{}</body></html>\n",
                    self.message
                );
                return ("text/html", html);
            }
            (Shape::Empty, _) => return ("text/plain", String::new()),
        };
        let json_type = if kind == Kind::Llamacpp {
            "application/json; charset=utf-8"
        } else {
            "application/json"
        };
        (json_type, json)
    }

    /// An error in the middle of a stream, as the engines send it whatever their shape is elsewhere.
    pub fn event_json(&self) -> String {
        let message = Value::from(self.message.as_str());
        let (class, status) = (self.class, self.status);
        format!(
            r#"{{"error": {{"message": {message}, "type": "{class}", "param": null, "code": {status}}}}}"#
        )
    }
}
