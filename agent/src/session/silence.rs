//! A connection that remembers when it last yielded anything: one that died without a word ends as one that broke.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::AsyncRead;
use tokio::time::Instant;
use tokio_util::io::InspectReader;

/// What is read passes through, and is noted.
pub(super) type Listened<S> = InspectReader<S, Box<dyn FnMut(&[u8]) + Send>>;

/// When a [`Listened`] connection last yielded anything.
#[derive(Clone, Debug)]
pub(super) struct LastHeard(Arc<Mutex<Instant>>);

pub(super) fn listen<S: AsyncRead>(inner: S) -> (Listened<S>, LastHeard) {
    let last = LastHeard(Arc::new(Mutex::new(Instant::now())));
    let heard = last.clone();
    let note = move |read: &[u8]| {
        if !read.is_empty() {
            heard.now();
        }
    };
    (InspectReader::new(inner, Box::new(note)), last)
}

impl LastHeard {
    /// How long nothing was heard.
    pub(super) fn silence(&self) -> Duration {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.elapsed()
    }

    fn now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}
