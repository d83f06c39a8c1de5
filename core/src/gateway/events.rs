//! An engine's event stream as whole events, whatever the packets looked like.

use std::future::poll_fn;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::Body;

use super::sse::EventSplitter;
use crate::upstream::UpstreamBody;

/// What an engine's stream gave next.
pub enum Step {
    /// Bytes to pass on: whole events, and pieces of one that is too large to hold.
    Events(Batch),
    /// The HTTP body ended as HTTP says it should. Whether the dialect ended too, the reader knows.
    End {
        /// What came of an event whose blank line did not.
        rest: Bytes,
    },
    /// The connection broke in mid-body.
    Broken(hyper::Error),
}

/// Bytes that may be passed on, and which of them are whole events.
pub struct Batch {
    pub bytes: Bytes,
    whole: Range<usize>,
}

impl Batch {
    /// The part that consists of whole events. What is beside it belongs to an event that is too large to look at.
    pub fn whole(&self) -> &[u8] {
        &self.bytes[self.whole.clone()]
    }
}

/// Reads an engine's body and splits it at event boundaries. Holds at most one incomplete event.
pub struct EventStream {
    /// None: closed.
    body: Option<UpstreamBody>,
    splitter: EventSplitter,
}

impl EventStream {
    pub fn new(body: UpstreamBody) -> EventStream {
        EventStream {
            body: Some(body),
            splitter: EventSplitter::default(),
        }
    }

    pub fn poll_step(&mut self, context: &mut Context<'_>) -> Poll<Step> {
        loop {
            let frame = match &mut self.body {
                Some(body) => ready!(Pin::new(body).poll_frame(context)),
                None => None,
            };
            match frame {
                Some(Ok(frame)) => {
                    // Trailers carry nothing that an event stream needs.
                    let Ok(chunk) = frame.into_data() else {
                        continue;
                    };
                    if let Some(bytes) = self.splitter.push(chunk) {
                        let whole = self.splitter.whole();
                        return Poll::Ready(Step::Events(Batch { bytes, whole }));
                    }
                }
                Some(Err(error)) => return Poll::Ready(Step::Broken(error)),
                None => {
                    let rest = self.splitter.finish();
                    return Poll::Ready(Step::End { rest });
                }
            }
        }
    }

    pub async fn step(&mut self) -> Step {
        poll_fn(|context| self.poll_step(context)).await
    }

    /// Lets the engine's connection go; to a reader the body has ended.
    pub fn close(&mut self) {
        self.body = None;
    }

    /// True in the middle of an event that was too large to hold and passes in pieces.
    pub fn is_inside_oversize(&self) -> bool {
        self.splitter.is_inside_oversize()
    }
}
