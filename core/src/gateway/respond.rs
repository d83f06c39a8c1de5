//! The one place that turns a failure into a status, a code and a body that says what to do.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};

use super::auth::KeyProblem;
use super::body::ClientBody;
use super::dialect::{Dialect, ErrorBody, ErrorCode};
use super::engine_error;
use crate::flow::ledger;

/// Names shown in one message: more would be noise, and a fleet may have thousands.
const NAMES_SHOWN_MAX: usize = 20;

/// Why a request was not answered by an engine, as facts.
#[derive(Debug)]
pub enum Failure {
    /// The body is no JSON object that can be read, or names a field twice.
    InvalidJson(String),
    /// The body can't be read: the client stopped sending, or broke the framing.
    UnreadableBody(String),
    BodyTooLarge {
        limit_bytes: u64,
    },
    MissingModel {
        known: Vec<String>,
    },
    UnknownModel {
        asked: String,
        known: Vec<String>,
    },
    UnknownRoute {
        method: String,
        path: String,
    },
    InvalidKey(KeyProblem),
    /// A tenant's own cap.
    TenantLimit {
        tenant: Arc<str>,
        refused: ledger::Refused,
    },
    QueueFull {
        model: String,
        band: String,
        /// Those of its band and of higher ones.
        queued: u32,
        retry_after: Duration,
    },
    /// The bodies of those that wait are as many bytes as may be kept.
    QueuedBytes {
        limit_bytes: u64,
        retry_after: Duration,
    },
    /// The band lets nobody in while the pool is this full.
    Shed {
        model: String,
        band: String,
        saturation: f64,
        retry_after: Duration,
    },
    QueueTimeout {
        model: String,
        waited: Duration,
        retry_after: Duration,
    },
    NoReplica {
        model: String,
        reason: String,
        retry_after: Duration,
    },
    /// Every attempt failed before the first byte; one line each.
    UpstreamFailed {
        attempts: Vec<String>,
    },
    FirstByteTimeout {
        limit: Duration,
        attempts: Vec<String>,
    },
    /// An engine answered with an error; the client gets it once, in one shape.
    Engine(Box<EngineAnswer>),
    ShuttingDown,
    /// A refusal, answered as the policy wants it: the reason stays what it was.
    Decided {
        why: Box<Failure>,
        /// 429 or 503.
        status: u16,
        wait: Option<Duration>,
    },
}

/// An engine's own error, as it came.
#[derive(Debug, Clone)]
pub struct EngineAnswer {
    pub status: u16,
    pub body: Bytes,
    pub content_type: Option<String>,
    /// Of a body that is compressed, and passes as it is.
    pub content_encoding: Option<HeaderValue>,
    pub retry_after: Option<HeaderValue>,
    /// What followed from it: replica and short text, for logs.
    pub summary: String,
}

impl Failure {
    pub fn status(&self) -> StatusCode {
        match self {
            Failure::InvalidJson(_) | Failure::UnreadableBody(_) | Failure::MissingModel { .. } => {
                StatusCode::BAD_REQUEST
            }
            Failure::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Failure::UnknownModel { .. } | Failure::UnknownRoute { .. } => StatusCode::NOT_FOUND,
            Failure::InvalidKey(_) => StatusCode::UNAUTHORIZED,
            Failure::TenantLimit { .. }
            | Failure::QueueFull { .. }
            | Failure::QueuedBytes { .. }
            | Failure::Shed { .. } => StatusCode::TOO_MANY_REQUESTS,
            Failure::UpstreamFailed { .. } => StatusCode::BAD_GATEWAY,
            Failure::QueueTimeout { .. } | Failure::NoReplica { .. } | Failure::ShuttingDown => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Failure::FirstByteTimeout { .. } => StatusCode::GATEWAY_TIMEOUT,
            Failure::Engine(answer) => {
                StatusCode::from_u16(answer.status).unwrap_or(StatusCode::BAD_GATEWAY)
            }
            Failure::Decided { why, status, .. } => {
                StatusCode::from_u16(*status).unwrap_or(why.status())
            }
        }
    }

    /// The stable code that clients and tests name.
    pub fn code(&self) -> &'static str {
        match self {
            Failure::InvalidJson(_) => "invalid_json",
            Failure::UnreadableBody(_) => "unreadable_body",
            Failure::BodyTooLarge { .. } => "body_too_large",
            Failure::MissingModel { .. } => "missing_model",
            Failure::UnknownModel { .. } => "model_not_found",
            Failure::UnknownRoute { .. } => "unknown_route",
            Failure::InvalidKey(_) => "invalid_api_key",
            Failure::TenantLimit { .. } => "tenant_limit",
            Failure::QueueFull { .. } | Failure::QueuedBytes { .. } | Failure::Shed { .. } => {
                "queue_full"
            }
            Failure::QueueTimeout { .. } => "queue_timeout",
            Failure::NoReplica { .. } => "no_replica",
            Failure::UpstreamFailed { .. } => "upstream_failed",
            Failure::FirstByteTimeout { .. } => "first_byte_timeout",
            Failure::Engine(_) => "engine_error",
            Failure::ShuttingDown => "shutting_down",
            Failure::Decided { why, .. } => why.code(),
        }
    }

    /// How long the client should wait before it tries again; whole seconds go into `Retry-After`.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Failure::QueueFull { retry_after, .. }
            | Failure::QueuedBytes { retry_after, .. }
            | Failure::Shed { retry_after, .. }
            | Failure::QueueTimeout { retry_after, .. }
            | Failure::NoReplica { retry_after, .. } => Some(*retry_after),
            Failure::TenantLimit { refused, .. } => refused.wait_ms.map(Duration::from_millis),
            Failure::ShuttingDown => Some(Duration::from_secs(1)),
            Failure::Decided { wait, .. } => *wait,
            _ => None,
        }
    }

    fn kind(&self) -> &'static str {
        match self.status().as_u16() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            404 => "not_found_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }

    fn param(&self) -> Option<&'static str> {
        match self {
            Failure::MissingModel { .. } | Failure::UnknownModel { .. } => Some("model"),
            _ => None,
        }
    }

    pub fn message(&self) -> String {
        match self {
            Failure::InvalidJson(reason) => format!("the request body can't be read: {reason}"),
            Failure::UnreadableBody(reason) => {
                format!("the request body ended before it was whole: {reason}")
            }
            Failure::BodyTooLarge { limit_bytes } => {
                format!("the request body is larger than `limits.body_max` ({limit_bytes} bytes)")
            }
            Failure::MissingModel { known } => format!(
                "the request names no model; set `model` in the body or the header `x-llmgw-model` to one of: {}",
                names(known)
            ),
            Failure::UnknownModel { asked, known } if known.is_empty() => {
                format!("there is no model `{asked}`, and none is configured for this key")
            }
            Failure::UnknownModel { asked, known } => {
                format!("there is no model `{asked}`; there are: {}", names(known))
            }
            Failure::UnknownRoute { method, path } => {
                format!("no route for {method} {path}; this gateway serves /v1/…")
            }
            Failure::InvalidKey(KeyProblem::Unknown) => {
                "the API key is none of the configured tenants'".to_string()
            }
            Failure::InvalidKey(KeyProblem::Missing) => {
                "an API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
                    .to_string()
            }
            Failure::InvalidKey(KeyProblem::Expired { at }) => {
                format!("the API key expired at {at}; ask your operator for a new one")
            }
            Failure::TenantLimit { tenant, refused } => tenant_limit(tenant, refused),
            Failure::QueueFull {
                model,
                band,
                queued,
                ..
            } => format!(
                "the queue of model `{model}` is full for band `{band}` ({queued} wait in it and in higher bands)"
            ),
            Failure::QueuedBytes { limit_bytes, .. } => format!(
                "the bodies of the requests that wait are as large as `limits.queued_bytes_max` allows ({limit_bytes} bytes)"
            ),
            Failure::Shed {
                model,
                band,
                saturation,
                ..
            } => format!(
                "model `{model}` is saturated ({saturation:.2}), and band `{band}` does not queue then"
            ),
            Failure::QueueTimeout { model, waited, .. } => format!(
                "no slot of model `{model}` became free within {:.1} s",
                waited.as_secs_f64()
            ),
            Failure::NoReplica { model, reason, .. } => {
                format!("no replica of model `{model}` can take a request: {reason}")
            }
            Failure::UpstreamFailed { attempts } => {
                format!(
                    "every attempt failed before the first byte: {}",
                    attempts.join("; ")
                )
            }
            Failure::FirstByteTimeout { limit, attempts } => format!(
                "the engine sent nothing within {:.1} s: {}",
                limit.as_secs_f64(),
                attempts.join("; ")
            ),
            Failure::Engine(answer) => answer.summary.clone(),
            Failure::ShuttingDown => "the gateway is shutting down".to_string(),
            Failure::Decided { why, .. } => why.message(),
        }
    }

    pub fn error_body(&self) -> ErrorBody {
        ErrorBody {
            message: self.message(),
            kind: self.kind().into(),
            code: ErrorCode::Name(self.code().into()),
            param: self.param().map(str::to_string),
        }
    }
}

/// Answers a failure in the dialect of the endpoint that was asked.
pub fn failure(failure: &Failure, dialect: Dialect) -> Response<ClientBody> {
    let mut content_encoding = None;
    let (body, content_type) = match failure {
        Failure::Engine(answer) if answer.content_encoding.is_some() => {
            content_encoding.clone_from(&answer.content_encoding);
            let own = answer.content_type.as_deref();
            let own = own.and_then(|own| HeaderValue::from_str(own).ok());
            (answer.body.clone(), own)
        }
        Failure::Engine(answer) => {
            let normal = engine_error::normalise(
                dialect,
                answer.status,
                &answer.body,
                answer.content_type.as_deref(),
            );
            let content_type = match (&answer.content_type, normal.changed) {
                (Some(own), false) => HeaderValue::from_str(own).ok(),
                _ => None,
            };
            (normal.body, content_type)
        }
        _ => (dialect.error_body(&failure.error_body()), None),
    };
    let mut response = Response::new(ClientBody::full(body.clone()));
    *response.status_mut() = failure.status();
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        content_type.unwrap_or(HeaderValue::from_static("application/json")),
    );
    headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len() as u64));
    if let Some(encoding) = content_encoding {
        headers.insert(CONTENT_ENCODING, encoding);
    }
    if let Some(value) = retry_after(failure) {
        headers.insert(RETRY_AFTER, value);
    }
    response
}

fn retry_after(failure: &Failure) -> Option<HeaderValue> {
    if let Failure::Engine(answer) = failure {
        return match answer.status {
            429 | 503 => Some(
                answer
                    .retry_after
                    .clone()
                    .unwrap_or(HeaderValue::from_static("1")),
            ),
            _ => answer.retry_after.clone(),
        };
    }
    let seconds = failure.retry_after()?.as_secs_f64().ceil().clamp(1.0, 60.0);
    Some(HeaderValue::from(seconds as u64))
}

fn tenant_limit(tenant: &str, refused: &ledger::Refused) -> String {
    let ledger::Refused {
        limit,
        allowed,
        wanted,
        left,
        wait_ms,
    } = *refused;
    let Some(wait_ms) = wait_ms else {
        return format!(
            "the prompt of about {wanted} tokens can never pass: tenant `{tenant}` may use {allowed} a minute (`{}`); \
             shorten it, or have the limit raised",
            limit.as_str()
        );
    };
    let wait = wait_ms as f64 / 1e3;
    match limit {
        ledger::Limit::MaxConcurrency => {
            format!("tenant `{tenant}` has {allowed} requests open already, its `max_concurrency`")
        }
        ledger::Limit::RequestsPerMinute => format!(
            "tenant `{tenant}` has used up its `requests_per_minute` ({allowed}); the next one can pass in {wait:.1} s"
        ),
        ledger::Limit::TokensPerMinute => format!(
            "tenant `{tenant}` has {left} of its `tokens_per_minute` ({allowed}) left, and this request needs about \
             {wanted}; it can pass in {wait:.1} s"
        ),
    }
}

fn names(known: &[String]) -> String {
    let shown = known.len().min(NAMES_SHOWN_MAX);
    let mut text = known[..shown]
        .iter()
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ");
    if known.len() > shown {
        text.push_str(&format!(" and {} more", known.len() - shown));
    }
    if text.is_empty() {
        text.push_str("(none is configured)");
    }
    text
}
