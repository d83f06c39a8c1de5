//! An event stream on its way from an engine to a client: whole events only, each as it arrives.
//!
//! The relay knows how its dialect ends. A stream that ends in any other way is given an error event of
//! that dialect, and then the connection is cut, so that nobody takes half an answer for a whole one.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Frame;
use tokio::time::Sleep;

use super::body::Unfinished;
use super::dialect::{Dialect, ErrorBody, ErrorCode, StreamError};
use super::events::{Batch, EventStream, Step};
use super::exchange::{Ending, Exchange};
use super::rename::{self, Shown};
use super::silence::{Due, Silence};
use super::splice::ModelFinder;
use super::sse::{self, Event};
use super::usage;

/// What a client gets while the engine is silent: a comment that every event-stream parser ignores.
pub const KEEPALIVE_COMMENT: &[u8] = b": keep-alive\n\n";
/// For the engine to end its HTTP body after the dialect's own end; then its connection can be reused.
const END_GRACE: Duration = Duration::from_millis(1_000);

/// How a stream is changed on its way, if at all.
pub struct Changes {
    /// The name the client asked for, until the engine was seen to answer under the same one.
    pub show_model: Option<Arc<str>>,
    /// The gateway asked for usage, the client did not: the chunk that carries only that is taken out.
    pub drop_usage_chunk: bool,
}

/// One client's event stream.
pub struct Relay {
    events: EventStream,
    dialect: Dialect,
    changes: Changes,
    silence: Silence,
    /// Absent once the stream failed: what it holds of an engine is given back, and `events` closed, while its last words are on their way.
    exchange: Option<Exchange>,
    /// Remembers where this stream's events have the model's name.
    finder: ModelFinder,
    /// Events that were looked at before the client's headers went out.
    first: Option<Batch>,
    phase: Phase,
}

enum Phase {
    Open,
    /// The dialect's end was forwarded.
    Ended {
        grace: Pin<Box<Sleep>>,
        /// It ended with a CR, and the LF that may belong to it has not come yet.
        owes_lf: bool,
    },
    /// The error event was forwarded.
    Failed(Option<Unfinished>),
    Done,
}

/// What the first look at a stream showed.
pub enum First {
    /// A stream that began properly, and the events read so far.
    Stream(EventStream, Batch),
    /// The engine's first event was an error: nothing was admitted, it can be tried elsewhere.
    Refused(StreamError),
    /// The stream ended or broke before its first event.
    Nothing(String),
}

/// Reads up to the first event. An engine's `200` is no admission: vLLM sends it while it queues, and SGLang
/// with an error right behind it.
pub async fn first(mut events: EventStream, dialect: Dialect) -> First {
    loop {
        let batch = match events.step().await {
            Step::Events(batch) => batch,
            Step::End { rest } if rest.is_empty() => {
                return First::Nothing("the stream ended without an event".to_string());
            }
            Step::End { .. } => {
                return First::Nothing("the stream ended inside its first event".to_string());
            }
            Step::Broken(error) => {
                return First::Nothing(format!("the stream broke off: {error}"));
            }
        };
        // An engine's own keep-alive is no event: the client's headers are not out yet.
        let Some(event) = sse::events(batch.whole()).find(|event| !event.is_comment) else {
            if events.is_inside_oversize() {
                return First::Stream(events, batch);
            }
            continue;
        };
        if let Some(error) = dialect.stream_error(&event) {
            return First::Refused(error);
        }
        return First::Stream(events, batch);
    }
}

impl Relay {
    pub fn new(
        events: EventStream,
        first: Batch,
        dialect: Dialect,
        changes: Changes,
        silence: Silence,
        mut exchange: Exchange,
    ) -> Relay {
        exchange.first_byte();
        Relay {
            events,
            dialect,
            changes,
            silence,
            exchange: Some(exchange),
            finder: ModelFinder::new(),
            first: Some(first),
            phase: Phase::Open,
        }
    }

    pub fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Unfinished>>> {
        loop {
            match &mut self.phase {
                Phase::Done => return Poll::Ready(None),
                Phase::Failed(unfinished) => return Poll::Ready(unfinished.take().map(Err)),
                Phase::Ended { grace, owes_lf } => {
                    let over = grace.as_mut().poll(context).is_ready();
                    match self.events.poll_step(context) {
                        _ if over => self.phase = Phase::Done,
                        Poll::Ready(Step::End { .. } | Step::Broken(_)) => self.phase = Phase::Done,
                        // What an engine says after its own end is nobody's business, save the rest of that end.
                        Poll::Ready(Step::Events(batch)) => {
                            if std::mem::take(owes_lf) && batch.bytes.starts_with(b"\n") {
                                return Poll::Ready(Some(Ok(Frame::data(batch.bytes.slice(..1)))));
                            }
                        }
                        Poll::Pending => return Poll::Pending,
                    }
                    continue;
                }
                Phase::Open => {}
            }
            let step = match self.first.take() {
                Some(batch) => Poll::Ready(Step::Events(batch)),
                None => self.events.poll_step(context),
            };
            let out = match step {
                Poll::Ready(Step::Events(batch)) => self.on_events(batch),
                Poll::Ready(Step::End { rest }) => self.on_end(rest),
                Poll::Ready(Step::Broken(error)) => self.fail(Ending::Broken(format!(
                    "the engine's stream broke off: {error}"
                ))),
                Poll::Pending => match std::task::ready!(self.silence.poll_due(context)) {
                    Due::Comment if self.events.is_inside_oversize() => None,
                    Due::Comment => Some(Bytes::from_static(KEEPALIVE_COMMENT)),
                    Due::TimedOut => self.fail(Ending::Silent(format!(
                        "the engine sent nothing for {:?}",
                        self.silence.limit()
                    ))),
                },
            };
            if let Some(bytes) = out
                && !bytes.is_empty()
            {
                self.note(|exchange| exchange.sent(bytes.len()));
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
        }
    }

    /// Looks at each event of a batch. Nothing is copied unless an event has to go or to change.
    fn on_events(&mut self, batch: Batch) -> Option<Bytes> {
        self.silence.heard();
        let mut edit = Edit::default();
        let bytes = &batch.bytes;
        for event in sse::events(batch.whole()) {
            if event.is_comment {
                continue;
            }
            if let Some(error) = self.dialect.stream_error(&event) {
                let kept = edit.until(bytes, &event);
                return self.fail_with_engine_error(kept, &event, error);
            }
            self.note(Exchange::event);
            if let Some(found) = usage::find_usage(&event.data) {
                self.note(|exchange| exchange.usage(found));
                if self.changes.drop_usage_chunk && usage::is_usage_only_chunk(&event.data) {
                    edit.cut(bytes, &event);
                    continue;
                }
            }
            // The end has a name in it too: `response.completed` repeats the whole answer.
            self.show_asked_model(&mut edit, bytes, &event);
            if self.dialect.ends(&event) {
                let kept = edit.through(bytes, &event);
                self.note(|exchange| exchange.end(Ending::Complete));
                self.phase = Phase::Ended {
                    grace: Box::pin(tokio::time::sleep(END_GRACE)),
                    owes_lf: kept.ends_with(b"\r"),
                };
                return Some(kept);
            }
        }
        Some(edit.finish(&batch.bytes))
    }

    /// Puts the name the client asked for where the engine wrote its own.
    fn show_asked_model(&mut self, edit: &mut Edit, batch: &Bytes, event: &Event<'_>) {
        let Some(asked) = &self.changes.show_model else {
            return;
        };
        match rename::in_event(&mut self.finder, event, asked) {
            Shown::Nothing => {}
            Shown::AsAsked => self.changes.show_model = None,
            Shown::Renamed(replaced) => edit.replace(batch, event, &replaced),
        }
    }

    fn on_end(&mut self, rest: Bytes) -> Option<Bytes> {
        let is_over = if self.dialect.expects_end() {
            // Some servers leave out the blank line of their very last event.
            let whole = [&rest[..], b"\n\n"].concat();
            let mut last = sse::events(&whole);
            last.any(|event| self.dialect.ends(&event))
        } else {
            true
        };
        if is_over {
            self.note(|exchange| exchange.end(Ending::Complete));
            self.phase = Phase::Done;
            return Some(rest);
        }
        let reason = match rest.is_empty() {
            true => "the engine's stream ended without its proper end",
            false => "the engine's stream ended inside an event",
        };
        self.fail(Ending::Broken(reason.to_string()))
    }

    /// Ends the stream with an error event in the client's own dialect.
    fn fail(&mut self, ending: Ending) -> Option<Bytes> {
        let reason = ending.reason().to_string();
        let body = ErrorBody {
            message: reason.clone(),
            kind: "server_error".into(),
            code: ErrorCode::Name("upstream_failed".into()),
            param: None,
        };
        let mut out = BytesMut::new();
        if self.events.is_inside_oversize() {
            // The piece that is out can't be taken back; a blank line at least ends it.
            out.extend_from_slice(b"\n\n");
        }
        out.extend_from_slice(&self.dialect.error_event(&body));
        Some(self.cut(ending, reason, out))
    }

    /// Forwards what came before, then the engine's own error, once and in one shape.
    fn fail_with_engine_error(
        &mut self,
        kept: Bytes,
        event: &Event<'_>,
        error: StreamError,
    ) -> Option<Bytes> {
        let mut out = BytesMut::from(&kept[..]);
        if error.is_native {
            out.extend_from_slice(event.raw);
        } else {
            out.extend_from_slice(&self.dialect.error_event(&error.error));
        }
        let reason = format!("the engine reported: {}", error.error.message);
        Some(self.cut(Ending::of_error(error.status, reason.clone()), reason, out))
    }

    fn note(&mut self, what: impl FnOnce(&mut Exchange)) {
        if let Some(exchange) = &mut self.exchange {
            what(exchange);
        }
    }

    /// Its last words, behind which it is cut.
    fn cut(&mut self, ending: Ending, reason: String, words: BytesMut) -> Bytes {
        self.events.close();
        if let Some(mut exchange) = self.exchange.take() {
            exchange.sent(words.len());
            exchange.end(ending);
        }
        let (words, unfinished) = Unfinished::behind(words.freeze(), reason);
        self.phase = Phase::Failed(Some(unfinished));
        words
    }
}

/// A batch with some events taken out or changed; untouched, it stays the engine's own bytes.
#[derive(Default)]
struct Edit {
    out: BytesMut,
    /// Up to where the batch is in `out` or left out on purpose.
    done: usize,
}

impl Edit {
    fn start(batch: &Bytes, event: &Event<'_>) -> usize {
        event.raw.as_ptr() as usize - batch.as_ptr() as usize
    }

    fn cut(&mut self, batch: &Bytes, event: &Event<'_>) {
        let start = Self::start(batch, event);
        self.out.extend_from_slice(&batch[self.done..start]);
        self.done = start + event.raw.len();
    }

    fn replace(&mut self, batch: &Bytes, event: &Event<'_>, with: &[u8]) {
        self.cut(batch, event);
        self.out.extend_from_slice(with);
    }

    fn until(&mut self, batch: &Bytes, event: &Event<'_>) -> Bytes {
        let start = Self::start(batch, event);
        self.take(batch.slice(..start))
    }

    fn through(&mut self, batch: &Bytes, event: &Event<'_>) -> Bytes {
        let end = Self::start(batch, event) + event.raw.len();
        self.take(batch.slice(..end))
    }

    fn finish(mut self, batch: &Bytes) -> Bytes {
        self.take(batch.clone())
    }

    fn take(&mut self, batch: Bytes) -> Bytes {
        if self.done == 0 {
            return batch;
        }
        let mut out = std::mem::take(&mut self.out);
        out.extend_from_slice(&batch[self.done..]);
        out.freeze()
    }
}
