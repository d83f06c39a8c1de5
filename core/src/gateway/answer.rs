//! What an engine answered: looked at before the client's headers go out, then turned into the client's answer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::response::Parts;
use http::{HeaderMap, Method, Response, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;

use super::assemble::{AnswerKind, Assembler, Push};
use super::body::ClientBody;
use super::dialect::{Dialect, StreamError};
use super::engine_error;
use super::events::{Batch, EventStream, Step};
use super::exchange::{Ending, Exchange, Unsettled};
use super::gathered::Gathered;
use super::headers;
use super::job::{Job, Outgoing};
use super::pass::Passing;
use super::relay::{self, Changes, First, Relay};
use super::rename;
use super::respond::EngineAnswer;
use super::silence::Silence;
use super::sse::{self, Event};
use super::usage;
use crate::flow::dispatch::Ahead;
use crate::upstream::UpstreamBody;

/// JSON answers up to this are read whole: cut short they can still be tried elsewhere, and usage and model
/// name are found in them. Longer ones (embeddings of a big batch) pass as they come.
const WHOLE_MAX_BYTES: usize = 1024 * 1024;
/// How much of an engine's error page is kept.
const ERROR_MAX_BYTES: usize = 256 * 1024;
/// What is left of a stream's headers when its answer is put together: the rest described the stream.
const STREAM_HEADERS: [&str; 3] = ["x-accel-buffering", "cache-control", "content-length"];

/// An answer that the client may have.
pub enum Accepted {
    Stream {
        head: Parts,
        events: EventStream,
        first: Batch,
        drop_usage_chunk: bool,
    },
    /// A stream that the gateway asked for, for a client that did not.
    ToAssemble {
        head: Parts,
        events: EventStream,
        first: Batch,
    },
    Whole {
        head: Parts,
        body: Bytes,
    },
    Passing {
        head: Parts,
        /// What was read of it before it turned out to be too long.
        read: Bytes,
        body: UpstreamBody,
    },
}

/// An answer that is none.
pub enum Refused {
    /// It broke off before there was anything to show.
    Broken(String),
    /// The engine said no, by status or by its first event.
    Answered(EngineAnswer),
}

/// What `x-llmgw-debug: 1` asks for.
pub struct Debug {
    pub replica: Arc<str>,
    pub band: Arc<str>,
    pub queue: Duration,
    /// What was before it when it came, if it had to wait.
    pub ahead: Option<Ahead>,
    pub generation: u64,
    pub reason: String,
}

impl Accepted {
    pub fn status(&self) -> StatusCode {
        match self {
            Accepted::Stream { head, .. }
            | Accepted::ToAssemble { head, .. }
            | Accepted::Whole { head, .. }
            | Accepted::Passing { head, .. } => head.status,
        }
    }
}

/// Looks at an engine's answer as far as is needed to know whether it is one.
pub async fn look(
    job: &Job,
    outgoing: &Outgoing,
    response: Response<UpstreamBody>,
) -> Result<Accepted, Refused> {
    let (head, body) = response.into_parts();
    if head.status.is_informational() {
        // 101: nobody asked for another protocol, `Upgrade` ends at the gateway.
        let text = format!("it answered {} to a plain request", head.status);
        return Err(Refused::Broken(text));
    }
    if head.status.is_client_error() || head.status.is_server_error() {
        return Err(refused(job.dialect, head, body).await);
    }
    // What has no body by definition is not to be looked into, whatever its type says.
    let has_body = job.method != Method::HEAD && !matches!(head.status.as_u16(), 204 | 205 | 304);
    let plain = has_body && is_identity(&head.headers);
    if plain && has_type(&head.headers, "text/event-stream") {
        return look_at_stream(job.dialect, outgoing, head, EventStream::new(body)).await;
    }
    if plain && has_type(&head.headers, "application/json") {
        return read_whole(head, body).await;
    }
    Ok(Accepted::Passing {
        head,
        read: Bytes::new(),
        body,
    })
}

async fn look_at_stream(
    dialect: Dialect,
    outgoing: &Outgoing,
    head: Parts,
    events: EventStream,
) -> Result<Accepted, Refused> {
    match relay::first(events, dialect).await {
        First::Stream(events, first) if outgoing.assemble => Ok(Accepted::ToAssemble {
            head,
            events,
            first,
        }),
        First::Stream(events, first) => Ok(Accepted::Stream {
            head,
            events,
            first,
            drop_usage_chunk: outgoing.drop_usage_chunk,
        }),
        First::Refused(error) => Err(Refused::Answered(first_event_error(dialect, &head, error))),
        First::Nothing(text) => Err(Refused::Broken(text)),
    }
}

/// An error as the first event: the status that the engine would have sent, had it waited.
fn first_event_error(dialect: Dialect, head: &Parts, error: StreamError) -> EngineAnswer {
    EngineAnswer {
        status: error.status.unwrap_or(StatusCode::BAD_GATEWAY.as_u16()),
        body: dialect.error_body(&error.error),
        content_type: Some("application/json".to_string()),
        content_encoding: None,
        retry_after: head.headers.get(RETRY_AFTER).cloned(),
        summary: error.error.message,
    }
}

async fn refused(dialect: Dialect, head: Parts, body: UpstreamBody) -> Refused {
    let content_type = head
        .headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .map(str::to_string);
    let body = match read_up_to(body, ERROR_MAX_BYTES).await {
        Read::Whole(bytes) | Read::Longer(bytes, _) | Read::Broken(bytes, _) => bytes,
    };
    if !is_identity(&head.headers) {
        return Refused::Answered(EngineAnswer {
            status: head.status.as_u16(),
            summary: format!("an error in {} compressed bytes", body.len()),
            body,
            content_type,
            content_encoding: head.headers.get(CONTENT_ENCODING).cloned(),
            retry_after: head.headers.get(RETRY_AFTER).cloned(),
        });
    }
    let normal = engine_error::normalise(
        dialect,
        head.status.as_u16(),
        &body,
        content_type.as_deref(),
    );
    Refused::Answered(EngineAnswer {
        status: head.status.as_u16(),
        summary: normal.message,
        body,
        content_type,
        content_encoding: None,
        retry_after: head.headers.get(RETRY_AFTER).cloned(),
    })
}

async fn read_whole(head: Parts, body: UpstreamBody) -> Result<Accepted, Refused> {
    let announced = body.size_hint().exact().unwrap_or(0);
    if announced > WHOLE_MAX_BYTES as u64 {
        return Ok(Accepted::Passing {
            head,
            read: Bytes::new(),
            body,
        });
    }
    match read_up_to(body, WHOLE_MAX_BYTES).await {
        Read::Whole(body) => Ok(Accepted::Whole { head, body }),
        Read::Longer(read, body) => Ok(Accepted::Passing { head, read, body }),
        Read::Broken(_, error) => Err(Refused::Broken(format!("the answer broke off: {error}"))),
    }
}

enum Read {
    Whole(Bytes),
    Longer(Bytes, UpstreamBody),
    Broken(Bytes, hyper::Error),
}

async fn read_up_to(mut body: UpstreamBody, limit: usize) -> Read {
    let mut gathered = Gathered::default();
    loop {
        match body.frame().await {
            None => return Read::Whole(gathered.into_bytes()),
            Some(Err(error)) => return Read::Broken(gathered.into_bytes(), error),
            Some(Ok(frame)) => {
                let Ok(chunk) = frame.into_data() else {
                    continue;
                };
                gathered.push(chunk);
                if gathered.len() > limit {
                    return Read::Longer(gathered.into_bytes(), body);
                }
            }
        }
    }
}

/// Makes the client's answer. An answer that breaks while it is put together gives its record back, so that
/// it can be tried elsewhere.
pub async fn finish(
    job: &Job,
    accepted: Accepted,
    mut exchange: Exchange,
    debug: Option<Debug>,
) -> Result<Response<ClientBody>, (Unsettled, String)> {
    let limits = &job.config.limits;
    let (mut head, body) = match accepted {
        Accepted::Stream {
            mut head,
            events,
            first,
            drop_usage_chunk,
        } => {
            headers::for_stream(&mut head.headers);
            let changes = Changes {
                show_model: Some(job.asked_name.clone()),
                drop_usage_chunk,
            };
            let silence = Silence::new(limits.idle_timeout, limits.keepalive);
            let relay = Relay::new(events, first, job.dialect, changes, silence, exchange);
            (head, ClientBody::Relay(Box::new(relay)))
        }
        Accepted::ToAssemble {
            mut head,
            events,
            first,
        } => {
            let silence = limits.idle_timeout;
            match assemble(job, events, first, silence, &mut exchange).await {
                Ok(body) => {
                    for name in STREAM_HEADERS {
                        head.headers.remove(name);
                    }
                    head.headers.insert(
                        CONTENT_TYPE,
                        HeaderValue::from_static("application/json; charset=utf-8"),
                    );
                    (head, whole(job, body, exchange))
                }
                Err(ending) => {
                    let text = ending.reason().to_string();
                    return Err((exchange.fail(ending), text));
                }
            }
        }
        Accepted::Whole { head, body } => {
            if let Some(found) = usage::find_usage(&body) {
                exchange.usage(found);
            }
            (head, whole(job, body, exchange))
        }
        Accepted::Passing { head, read, body } => {
            let silence = Silence::new(limits.idle_timeout, None);
            let passing = Passing::new(read, body, silence, exchange);
            (head, ClientBody::Passing(Box::new(passing)))
        }
    };
    headers::towards_client(&mut head.headers);
    match &body {
        ClientBody::Whole(whole) => {
            let length = whole.size_hint().exact().unwrap_or(0);
            head.headers
                .insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        ClientBody::Relay(_) | ClientBody::Held(_) => {
            head.headers.remove(CONTENT_LENGTH);
        }
        ClientBody::Passing(_) => {}
    }
    if let Some(debug) = debug {
        add_debug(&mut head.headers, &debug);
    }
    Ok(Response::from_parts(head, body))
}

/// A short answer: the engine is done with it, so its slot is given back here.
fn whole(job: &Job, body: Bytes, mut exchange: Exchange) -> ClientBody {
    let body = rename::in_json(&body, &job.asked_name);
    exchange.first_byte();
    exchange.sent(body.len());
    exchange.end(Ending::Complete);
    ClientBody::full(body)
}

/// Reads a stream to its end and puts the answer together that the engine would have sent at once.
async fn assemble(
    job: &Job,
    mut events: EventStream,
    first: Batch,
    idle_timeout: Duration,
    exchange: &mut Exchange,
) -> Result<Bytes, Ending> {
    exchange.first_byte();
    let kind = match job.dialect {
        Dialect::Completions => AnswerKind::Completion,
        _ => AnswerKind::Chat,
    };
    let mut assembler = Assembler::new(kind);
    let mut batch = first;
    loop {
        // For several prompts llama.cpp begins with a `null`, which is no chunk.
        let is_chunk = |event: &Event<'_>| !event.is_comment && event.data.as_ref() != b"null";
        for event in sse::events(batch.whole()).filter(is_chunk) {
            exchange.event();
            if let Some(found) = usage::find_usage(&event.data) {
                exchange.usage(found);
            }
            match assembler.push(&event.data) {
                Ok(Push::More) => {}
                Ok(Push::Done) => {
                    return assembler
                        .finish()
                        .map_err(|error| Ending::Broken(error.to_string()));
                }
                Ok(Push::Error(error)) => {
                    let text = format!("the engine reported: {}", error.error.message);
                    return Err(Ending::of_error(error.status, text));
                }
                Err(error) => return Err(Ending::Broken(error.to_string())),
            }
        }
        if events.is_inside_oversize() {
            let text = "the engine sent an event that is too large to put an answer together from";
            return Err(Ending::Broken(text.to_string()));
        }
        batch = match tokio::time::timeout(idle_timeout, events.step()).await {
            Ok(Step::Events(batch)) => batch,
            Ok(Step::End { .. }) => {
                let text = "the engine's stream ended without its proper end";
                return Err(Ending::Broken(text.to_string()));
            }
            Ok(Step::Broken(error)) => {
                return Err(Ending::Broken(format!(
                    "the engine's stream broke off: {error}"
                )));
            }
            Err(_) => {
                let text = format!("the engine sent nothing for {idle_timeout:?}");
                return Err(Ending::Silent(text));
            }
        };
    }
}

fn add_debug(headers: &mut HeaderMap, debug: &Debug) {
    let ahead = debug.ahead.unwrap_or_default();
    let mut fields = vec![
        ("x-llmgw-replica", debug.replica.to_string()),
        ("x-llmgw-band", debug.band.to_string()),
        (
            "x-llmgw-queue-ms",
            format!("{:.1}", debug.queue.as_secs_f64() * 1e3),
        ),
        ("x-llmgw-policy-generation", debug.generation.to_string()),
        ("x-llmgw-reason", debug.reason.clone()),
        ("x-llmgw-queue-ahead", ahead.requests.to_string()),
    ];
    if let Some(wait_ms) = ahead.wait_ms {
        fields.push(("x-llmgw-queue-estimate-ms", format!("{wait_ms:.0}")));
    }
    for (name, value) in fields {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(name, value);
        }
    }
}

fn has_type(headers: &HeaderMap, wanted: &str) -> bool {
    headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split(';').next())
        .is_some_and(|kind| kind.trim().eq_ignore_ascii_case(wanted))
}

/// True where the bytes are what the content type says, not a compression of it.
fn is_identity(headers: &HeaderMap) -> bool {
    headers
        .get(CONTENT_ENCODING)
        .is_none_or(|encoding| encoding.as_bytes().eq_ignore_ascii_case(b"identity"))
}
