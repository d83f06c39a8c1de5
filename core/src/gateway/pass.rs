//! An engine's body that goes through as it comes: audio, files, and answers too large to look into.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::body::Unfinished;
use super::exchange::{Ending, Exchange};
use super::silence::{Due, Silence};
use crate::upstream::UpstreamBody;

/// Bytes out of an engine, with the permit and the record that last as long as they flow.
pub struct Passing {
    /// Read before the rest, sent first.
    read: Bytes,
    body: UpstreamBody,
    silence: Silence,
    exchange: Exchange,
}

impl Passing {
    pub fn new(
        read: Bytes,
        body: UpstreamBody,
        silence: Silence,
        mut exchange: Exchange,
    ) -> Passing {
        // A body that has no bytes is never asked for them.
        if read.is_empty() && body.is_end_stream() {
            exchange.first_byte();
            exchange.end(Ending::Complete);
        }
        Passing {
            read,
            body,
            silence,
            exchange,
        }
    }

    pub fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Unfinished>>> {
        if !self.read.is_empty() {
            let read = std::mem::take(&mut self.read);
            self.exchange.passed(&read);
            return Poll::Ready(Some(Ok(Frame::data(read))));
        }
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                self.silence.heard();
                if let Some(chunk) = frame.data_ref() {
                    self.exchange.passed(chunk);
                }
                if self.body.is_end_stream() {
                    self.exchange.end(Ending::Complete);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                let reason = format!("the engine's answer broke off: {error}");
                self.exchange.end(Ending::Broken(reason.clone()));
                Poll::Ready(Some(Err(Unfinished::new(reason))))
            }
            Poll::Ready(None) => {
                self.exchange.end(Ending::Complete);
                Poll::Ready(None)
            }
            Poll::Pending => match self.silence.poll_due(context) {
                Poll::Ready(Due::TimedOut) => {
                    let reason = format!("the engine sent nothing for {:?}", self.silence.limit());
                    self.exchange.end(Ending::Silent(reason.clone()));
                    Poll::Ready(Some(Err(Unfinished::new(reason))))
                }
                // Only event streams carry comments; this silence was made without an interval.
                Poll::Ready(Due::Comment) | Poll::Pending => Poll::Pending,
            },
        }
    }

    pub fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.body.is_end_stream()
    }

    pub fn size_hint(&self) -> SizeHint {
        let rest = self.body.size_hint();
        match rest.exact() {
            Some(rest) => SizeHint::with_exact(rest + self.read.len() as u64),
            None => SizeHint::default(),
        }
    }
}
