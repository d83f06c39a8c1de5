//! The access log: lines wait in a bounded buffer, and one thread writes them out.
//!
//! A system call for each request would cost about as much as parsing it, so requests only append to memory.

use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use prometheus_client::metrics::counter::Counter;

use super::access::AccessRecord;
use super::escape::Stamp;
use super::log::LogFormat;

/// Lines that may wait for the sink; beyond it records are dropped and counted.
pub const ACCESS_BUFFER_MAX_BYTES: usize = 4 << 20;
/// Written at once when this much waits,
const FLUSH_AT_BYTES: usize = 64 << 10;
/// or after this long.
const FLUSH_AFTER_MS: u64 = 50;
/// The buffer's memory is given back beyond this, after a burst.
const SPARE_MAX_BYTES: usize = 512 << 10;
/// How long [`AccessLog::flush`] waits for a sink that doesn't take its bytes.
const FLUSH_WAIT_MAX_MS: u64 = 2000;

/// Where records become lines. Dropping it flushes.
pub struct AccessLog {
    shared: Arc<Shared>,
    dropped: Counter,
}

/// Held by the log and by its thread.
struct Shared {
    format: LogFormat,
    state: Mutex<State>,
    /// Wakes the thread: the buffer got its first line, is due, or a flush was asked for.
    pending: Condvar,
    /// Wakes those who flush.
    written: Condvar,
}

#[derive(Default)]
struct State {
    bytes: Vec<u8>,
    stamp: Stamp,
    /// The thread is between taking bytes and having written them.
    writing: bool,
    flush: bool,
    closed: bool,
}

impl AccessLog {
    /// Starts the thread that writes to `sink`. `dropped` counts records for which there was no room, and those that
    /// the sink refused.
    pub fn start(format: LogFormat, sink: Box<dyn Write + Send>, dropped: Counter) -> AccessLog {
        let shared = Arc::new(Shared {
            format,
            state: Mutex::default(),
            pending: Condvar::new(),
            written: Condvar::new(),
        });
        let (writer, lost) = (shared.clone(), dropped.clone());
        let thread = thread::Builder::new()
            .name("access-log".into())
            .spawn(move || writer.write_out(sink, &lost));
        if let Err(error) = thread {
            tracing::error!(%error, "no thread for the access log, it stays empty");
            shared.lock().closed = true;
        }
        AccessLog { shared, dropped }
    }

    /// Appends the record's line, or drops it when the sink is [`ACCESS_BUFFER_MAX_BYTES`] behind. Never blocks on I/O.
    pub fn write(&self, record: &AccessRecord) {
        let now = SystemTime::now();
        let mut state = self.shared.lock();
        if state.closed || state.bytes.len() >= ACCESS_BUFFER_MAX_BYTES {
            drop(state);
            self.dropped.inc();
            return;
        }
        let before = state.bytes.len();
        let State { bytes, stamp, .. } = &mut *state;
        record.push_line(bytes, self.shared.format, stamp, now);
        let wake = before == 0 || (before < FLUSH_AT_BYTES && bytes.len() >= FLUSH_AT_BYTES);
        drop(state);
        if wake {
            self.shared.pending.notify_one();
        }
    }

    /// Blocks until what was appended so far is written, for two seconds at most.
    pub fn flush(&self) {
        let deadline = Instant::now() + Duration::from_millis(FLUSH_WAIT_MAX_MS);
        let mut state = self.shared.lock();
        state.flush = true;
        self.shared.pending.notify_one();
        while state.writing || (!state.bytes.is_empty() && !state.closed) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = wait(&self.shared.written, state, left);
        }
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        self.flush();
        self.shared.lock().closed = true;
        self.shared.pending.notify_one();
    }
}

impl Shared {
    /// The thread: takes what waits, writes it outside of the lock, until closed.
    fn write_out(&self, mut sink: Box<dyn Write + Send>, lost: &Counter) {
        let mut batch = Vec::new();
        while self.take(&mut batch) {
            if sink.write_all(&batch).and_then(|()| sink.flush()).is_err() {
                lost.inc_by(batch.iter().filter(|byte| **byte == b'\n').count() as u64);
            }
            batch.clear();
            batch.shrink_to(SPARE_MAX_BYTES);
            self.lock().writing = false;
            self.written.notify_all();
        }
    }

    /// Waits for lines, lets more gather, and swaps them into `batch`. False: closed, and nothing is left.
    fn take(&self, batch: &mut Vec<u8>) -> bool {
        let mut state = self.lock();
        while state.bytes.is_empty() {
            state.flush = false;
            if state.closed {
                return false;
            }
            state = self
                .pending
                .wait(state)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        let due = Instant::now() + Duration::from_millis(FLUSH_AFTER_MS);
        while state.bytes.len() < FLUSH_AT_BYTES && !state.flush && !state.closed {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = wait(&self.pending, state, left);
        }
        std::mem::swap(&mut state.bytes, batch);
        state.flush = false;
        state.writing = true;
        true
    }

    /// A thread that panicked while it held the lock left at worst half a line: go on.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn wait<'a>(
    on: &Condvar,
    state: MutexGuard<'a, State>,
    at_most: Duration,
) -> MutexGuard<'a, State> {
    on.wait_timeout(state, at_most)
        .unwrap_or_else(|poisoned| poisoned.into_inner())
        .0
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// A sink that tests read.
    #[derive(Clone, Default)]
    pub(crate) struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Sink {
        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// A sink that says when it was given bytes, and takes them when told.
    struct Stalled(Sender<usize>, Receiver<()>);

    impl Write for Stalled {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let _ = self.0.send(bytes.len());
            let _ = self.1.recv();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn record(id: usize) -> AccessRecord {
        AccessRecord {
            request_id: format!("r{id}"),
            path: "p".repeat(200),
            ..AccessRecord::default()
        }
    }

    #[test]
    fn lines_come_out_whole_and_in_order_from_many_threads() {
        let sink = Sink::default();
        let log = AccessLog::start(LogFormat::Json, Box::new(sink.clone()), Counter::default());
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..500).for_each(|id| log.write(&record(id))));
            }
        });
        log.flush();
        let text = sink.text();
        assert_eq!(text.lines().count(), 2000);
        for line in text.lines() {
            serde_json::from_str::<serde_json::Value>(line).unwrap();
        }
    }

    #[test]
    fn lines_are_written_without_anybody_asking() {
        let (given, got) = channel();
        let (_go, wait) = channel();
        let log = AccessLog::start(
            LogFormat::Text,
            Box::new(Stalled(given, wait)),
            Counter::default(),
        );
        log.write(&record(0));
        assert!(got.recv().unwrap() > 200);
        drop(_go);
    }

    #[test]
    fn a_sink_that_stalls_costs_records_not_memory_and_they_are_counted() {
        let (given, got) = channel();
        let (go, wait) = channel();
        let dropped = Counter::default();
        let log = AccessLog::start(
            LogFormat::Text,
            Box::new(Stalled(given, wait)),
            dropped.clone(),
        );
        log.write(&record(0));
        let line_bytes = got.recv().unwrap();
        let fits = ACCESS_BUFFER_MAX_BYTES.div_ceil(line_bytes) + 10;
        (0..fits + 100).for_each(|_| log.write(&record(1)));
        assert!(dropped.get() >= 90, "{}", dropped.get());
        assert!(log.shared.lock().bytes.len() < ACCESS_BUFFER_MAX_BYTES + line_bytes * 2);
        drop(go);
        log.flush();
        assert!(log.shared.lock().bytes.is_empty());
    }

    #[test]
    fn dropping_the_log_flushes_it() {
        let sink = Sink::default();
        let log = AccessLog::start(LogFormat::Text, Box::new(sink.clone()), Counter::default());
        log.write(&record(7));
        drop(log);
        assert!(sink.text().contains("request_id=r7"));
    }
}
