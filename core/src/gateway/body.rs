//! What goes back to a client: a whole answer, or one of the three streams.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use tokio::task::coop;

use super::hold::Held;
use super::outgoing::{Leaving, leaving};
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
pub struct Unfinished {
    reason: String,
    /// What has to leave before the cut.
    behind: Option<Leaving>,
}

impl Unfinished {
    pub fn new(reason: String) -> Unfinished {
        Unfinished {
            reason,
            behind: None,
        }
    }

    /// The cut behind an error event; the event, to be handed out first.
    pub fn behind(event: Bytes, reason: String) -> (Bytes, Unfinished) {
        let (event, leaving) = leaving(event);
        let unfinished = Unfinished {
            reason,
            behind: Some(leaving),
        };
        (event, unfinished)
    }

    pub fn take_behind(&mut self) -> Option<Leaving> {
        self.behind.take()
    }
}

impl std::fmt::Display for Unfinished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "answer cut short: {}", self.reason)
    }
}

impl std::error::Error for Unfinished {}

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
