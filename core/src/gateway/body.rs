//! What goes back to a client: a whole answer, or one of the three streams.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use tokio::task::coop;
use tokio::time::Sleep;

use super::hold::Held;
use super::pass::Passing;
use super::relay::Relay;

/// A response body. Dropping it is how hyper says that the client left.
pub enum ClientBody {
    Whole(Full<Bytes>),
    /// An engine's bytes as they come, not looked into.
    Passing(Box<Passing>),
    /// An event stream.
    Relay(Box<Relay>),
    /// A stream whose first event has not come yet: comments meanwhile.
    Held(Box<Held>),
}

/// The answer can't be finished: the connection is cut, so that no client takes it for a whole one.
#[derive(Debug)]
pub struct Unfinished(pub String);

impl std::fmt::Display for Unfinished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "answer cut short: {}", self.0)
    }
}

impl std::error::Error for Unfinished {}

/// Between an error event and the cut, so that the event leaves the socket first.
const CUT_DELAY: Duration = Duration::from_millis(50);

/// The end of a stream that failed: its error event was handed out, the connection is cut a moment later.
pub struct Cut {
    delay: Pin<Box<Sleep>>,
    reason: String,
}

impl Cut {
    pub fn new(reason: String) -> Cut {
        Cut {
            delay: Box::pin(tokio::time::sleep(CUT_DELAY)),
            reason,
        }
    }

    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<Unfinished> {
        self.delay
            .as_mut()
            .poll(context)
            .map(|()| Unfinished(std::mem::take(&mut self.reason)))
    }
}

impl ClientBody {
    pub fn full(bytes: Bytes) -> ClientBody {
        ClientBody::Whole(Full::new(bytes))
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = Unfinished;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Unfinished>>> {
        // A frame counts as a read does against what a task may do in one turn: else a stream whose engine and
        // client are both fast would run on for 128 reads of hundreds of frames each, and starve all others.
        let turn = std::task::ready!(coop::poll_proceed(context));
        let polled = match self.get_mut() {
            ClientBody::Whole(body) => Pin::new(body)
                .poll_frame(context)
                .map_err(|never| match never {}),
            ClientBody::Passing(body) => body.poll_frame(context),
            ClientBody::Relay(body) => body.poll_frame(context),
            ClientBody::Held(body) => body.poll_frame(context),
        };
        if polled.is_ready() {
            turn.made_progress();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match self {
            ClientBody::Whole(body) => body.is_end_stream(),
            ClientBody::Passing(body) => body.is_end_stream(),
            ClientBody::Relay(_) | ClientBody::Held(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ClientBody::Whole(body) => body.size_hint(),
            ClientBody::Passing(body) => body.size_hint(),
            ClientBody::Relay(_) | ClientBody::Held(_) => SizeHint::default(),
        }
    }
}
