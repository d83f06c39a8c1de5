//! How long an engine has been silent, with one timer a stream that is not touched when a chunk comes.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// What the silence calls for.
#[derive(Debug, PartialEq, Eq)]
pub enum Due {
    /// Nothing for the keep-alive interval: tell the client that the stream lives.
    Comment,
    /// Nothing for longer than the limit: the engine hangs.
    TimedOut,
}

/// Moving a timer for each chunk costs a lock; instead the time of the last chunk is noted, and the timer,
/// when it fires, looks at it and sleeps on.
pub struct Silence {
    limit: Duration,
    keepalive: Option<Duration>,
    heard: Instant,
    commented: Instant,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Silence {
    pub fn new(limit: Duration, keepalive: Option<Duration>) -> Silence {
        let now = Instant::now();
        Silence {
            limit,
            keepalive,
            heard: now,
            commented: now,
            timer: None,
        }
    }

    /// The engine sent something.
    pub fn heard(&mut self) {
        self.heard = Instant::now();
    }

    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Registers for the next deadline; to be polled whenever the engine has nothing.
    pub fn poll_due(&mut self, context: &mut Context<'_>) -> Poll<Due> {
        loop {
            let next = self.next_deadline();
            let timer = self
                .timer
                .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(next)));
            if timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            let now = Instant::now();
            let due = self.due_at(now);
            let next = self.next_deadline();
            if let Some(timer) = &mut self.timer {
                timer.as_mut().reset(next);
            }
            if let Some(due) = due {
                return Poll::Ready(due);
            }
        }
    }

    fn due_at(&mut self, now: Instant) -> Option<Due> {
        if now >= self.heard + self.limit {
            return Some(Due::TimedOut);
        }
        let interval = self.keepalive?;
        if now >= self.heard.max(self.commented) + interval {
            self.commented = now;
            return Some(Due::Comment);
        }
        None
    }

    fn next_deadline(&self) -> Instant {
        let timeout = self.heard + self.limit;
        match self.keepalive {
            Some(interval) => timeout.min(self.heard.max(self.commented) + interval),
            None => timeout,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    async fn due(silence: &mut Silence) -> (Due, Duration) {
        let start = Instant::now();
        let due = poll_fn(|context| silence.poll_due(context)).await;
        (due, start.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn comments_come_at_their_interval_until_the_limit_ends_it() {
        let mut silence = Silence::new(Duration::from_secs(40), Some(Duration::from_secs(15)));
        assert_eq!(due(&mut silence).await.0, Due::Comment);
        assert_eq!(due(&mut silence).await.0, Due::Comment);
        let (last, after) = due(&mut silence).await;
        assert_eq!(last, Due::TimedOut);
        assert_eq!(after.as_secs(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn a_chunk_starts_the_silence_anew() {
        let mut silence = Silence::new(Duration::from_secs(10), None);
        tokio::time::advance(Duration::from_secs(9)).await;
        silence.heard();
        let (due, after) = due(&mut silence).await;
        assert_eq!((due, after.as_secs()), (Due::TimedOut, 10));
    }
}
