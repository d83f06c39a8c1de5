//! A stream whose engine is still silent while the client has its headers: comments until the first event.
//!
//! Only where `limits.keepalive` asks for it, since it commits to a `200`: what fails afterwards can only
//! be told as an error event.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame};
use tokio::time::{Interval, MissedTickBehavior, interval_at};

use super::body::{ClientBody, Unfinished};
use super::dialect::Dialect;
use super::relay::KEEPALIVE_COMMENT;
use super::respond::Failure;

/// What the attempts come to: an answer, or why there is none.
pub type Attempts = Pin<Box<dyn Future<Output = Result<Response<ClientBody>, Failure>> + Send>>;

/// Comments now, the answer of the attempts when it is there.
pub struct Held {
    state: State,
    comments: Interval,
    dialect: Dialect,
    /// The comment that made the wait visible goes out with the headers.
    owes_comment: bool,
}

enum State {
    Waiting(Attempts),
    Answering(ClientBody),
    /// The error event was handed out.
    Failed(Option<Unfinished>),
}

impl Held {
    pub fn new(attempts: Attempts, every: Duration, dialect: Dialect) -> Held {
        let mut comments = interval_at(tokio::time::Instant::now() + every, every);
        comments.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Held {
            state: State::Waiting(attempts),
            comments,
            dialect,
            owes_comment: true,
        }
    }

    pub fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Unfinished>>> {
        if std::mem::take(&mut self.owes_comment) {
            return comment();
        }
        loop {
            match &mut self.state {
                State::Waiting(attempts) => match attempts.as_mut().poll(context) {
                    Poll::Ready(Ok(response)) if response.status().is_success() => {
                        self.state = State::Answering(response.into_body());
                    }
                    Poll::Ready(Ok(response)) => {
                        // Failures come as such; an engine's own odd status is told by its number.
                        let text = format!("the engine answered {}", response.status());
                        return self.fail(&Failure::UpstreamFailed {
                            attempts: vec![text],
                        });
                    }
                    Poll::Ready(Err(failure)) => {
                        return self.fail(&failure);
                    }
                    Poll::Pending => {
                        if self.comments.poll_tick(context).is_ready() {
                            return comment();
                        }
                        return Poll::Pending;
                    }
                },
                State::Answering(body) => return Pin::new(body).poll_frame(context),
                State::Failed(unfinished) => return Poll::Ready(unfinished.take().map(Err)),
            }
        }
    }

    fn fail(&mut self, failure: &Failure) -> Poll<Option<Result<Frame<Bytes>, Unfinished>>> {
        let event = self.dialect.error_event(&failure.error_body());
        let (event, unfinished) = Unfinished::behind(event, failure.message());
        self.state = State::Failed(Some(unfinished));
        Poll::Ready(Some(Ok(Frame::data(event))))
    }
}

fn comment() -> Poll<Option<Result<Frame<Bytes>, Unfinished>>> {
    let bytes = Bytes::from_static(KEEPALIVE_COMMENT);
    Poll::Ready(Some(Ok(Frame::data(bytes))))
}
