//! An end for HTTP/2 streams whose clients stopped reading. hyper asks a body for its next frame only once the client has room for the one before, so
//! nothing in a body runs while its stream is stuck, no timer either: the task around the stream has to end it.
//!
//! Its body says when it hands out a frame and when it is asked again. Only where a turn of the task ends between the two is there a timer.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use hyper::rt::Executor;
use tokio::time::{Instant, Sleep, sleep_until};

/// A client that takes nothing of what waits for it holds an engine's slot. After this long its HTTP/2 stream is reset, where that had no room for
/// the frame at hand, or the kernel ends the connection, where that takes nothing at all.
pub const CLIENT_STALLED_MAX: Duration = Duration::from_secs(300);

/// Whom a stream waits for.
#[derive(Clone, Copy)]
enum Waits {
    /// Its engine: nothing of it waits for the client.
    Engine,
    /// Its client, for a frame that was handed out in this turn of the task. That is not worth a look at the clock: mostly it leaves in the same turn.
    HandedOut,
    /// Its client, since a turn ended with a frame handed out.
    Since(Instant),
}

tokio::task_local! {
    static WAITS: Cell<Waits>;
}

/// To be said by a body of HTTP/2 that hands out a frame.
pub fn waits_for_client() {
    set(Waits::HandedOut);
}

/// To be said by a body of HTTP/2 that is asked for a frame.
pub fn waits_for_engine() {
    set(Waits::Engine);
}

fn set(what: Waits) {
    // Absent in tests that ask a body without a connection.
    let _ = WAITS.try_with(|waits| waits.set(what));
}

/// Runs the streams of HTTP/2 connections, each in a task that ends it where its client stalls.
#[derive(Clone, Copy)]
pub struct Streams;

impl<S: Future<Output = ()> + Send + 'static> Executor<S> for Streams {
    fn execute(&self, stream: S) {
        tokio::spawn(WAITS.scope(Cell::new(Waits::Engine), until_stalled(stream)));
    }
}

/// A stream that is dropped before its end is reset.
async fn until_stalled(stream: impl Future<Output = ()>) {
    let mut stream = pin!(stream);
    let mut timer: Option<Pin<Box<Sleep>>> = None;
    poll_fn(|context| {
        if stream.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        let since = match WAITS.with(Cell::get) {
            Waits::Engine => return Poll::Pending,
            Waits::HandedOut => Instant::now(),
            Waits::Since(since) => since,
        };
        set(Waits::Since(since));
        let end = since + CLIENT_STALLED_MAX;
        let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(end)));
        if timer.deadline() != end {
            timer.as_mut().reset(end);
        }
        timer.as_mut().poll(context)
    })
    .await;
}
