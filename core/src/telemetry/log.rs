//! The log for people: tracing events on stderr, as text or as one JSON object a line.

use std::io::{IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// How log and access lines are written (`log.format` in the configuration).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// `time level target: message key=value`.
    #[default]
    Text,
    /// One object a line: `timestamp` (RFC 3339, UTC), `level`, `target`, `message` and the event's fields.
    Json,
}

/// What is said where nobody chose.
pub const INFO: LevelFilter = LevelFilter::INFO;

/// Libraries whose debug events describe single frames, and would drown ours.
const QUIET_TARGETS: [&str; 3] = ["h2", "hyper", "hyper_util"];

/// Lines that may wait for a stderr that takes none; beyond it they are lost, and their number is said later.
const LINES_WAITING_MAX: usize = 4_096;
/// How long [`flush`] waits for a stderr that takes nothing.
const FLUSH_WAIT_MAX: Duration = Duration::from_millis(1_000);

/// The process's queue, once logging has started.
static QUEUE: OnceLock<Queue> = OnceLock::new();
/// Lines for which there was no room and that nobody was told of yet.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Hands lines to the one thread that writes them: whoever stops reading our stderr must not stop a thread that serves.
#[derive(Clone)]
struct Queue(SyncSender<Entry>);

enum Entry {
    Line(Vec<u8>),
    /// Answered when everything before it was written.
    Flush(SyncSender<()>),
}

impl Queue {
    fn start() -> std::io::Result<Queue> {
        let (sender, entries) = sync_channel(LINES_WAITING_MAX);
        thread::Builder::new()
            .name("log".into())
            .spawn(move || write_out(&entries, &mut std::io::stderr()))?;
        Ok(Queue(sender))
    }
}

/// An event arrives as one write of its whole line.
impl Write for Queue {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        if self.0.try_send(Entry::Line(line.to_vec())).is_err() {
            LOST.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn write_out(entries: &Receiver<Entry>, sink: &mut dyn Write) {
    for entry in entries {
        match entry {
            Entry::Line(line) => {
                let _ = sink.write_all(&line);
                let lost = LOST.swap(0, Ordering::Relaxed);
                if lost > 0 {
                    let _ = writeln!(sink, "{lost} log lines were lost: stderr was not read");
                }
            }
            Entry::Flush(done) => {
                let _ = done.try_send(());
            }
        }
    }
}

/// Blocks until what was logged so far is written, for a second at most: call it when the process ends.
pub fn flush() {
    let (done, written) = sync_channel(1);
    if let Some(queue) = QUEUE.get()
        && queue.0.try_send(Entry::Flush(done)).is_ok()
    {
        let _ = written.recv_timeout(FLUSH_WAIT_MAX);
    }
}

/// Starts logging to stderr. The first call in a process wins.
pub fn init(format: LogFormat, level: LevelFilter) {
    let colour = std::io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    // Fails only when a subscriber is set already, which is then the one in force.
    let _ = match Queue::start() {
        Ok(queue) => {
            let queue = QUEUE.get_or_init(|| queue).clone();
            subscriber(format, level, colour, move || queue.clone()).try_init()
        }
        Err(_) => subscriber(format, level, colour, std::io::stderr).try_init(),
    };
}

fn subscriber<W>(
    format: LogFormat,
    level: LevelFilter,
    colour: bool,
    writer: W,
) -> impl Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let quiet = if level == LevelFilter::TRACE {
        level
    } else {
        level.min(LevelFilter::WARN)
    };
    let targets = Targets::new()
        .with_default(level)
        .with_targets(QUIET_TARGETS.into_iter().map(|target| (target, quiet)));
    let layer = tracing_subscriber::fmt::layer().with_writer(writer);
    let layer = match format {
        LogFormat::Text => layer.with_ansi(colour).boxed(),
        LogFormat::Json => layer
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .with_ansi(false)
            .boxed(),
    };
    tracing_subscriber::registry().with(layer.with_filter(targets))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::buffer::tests::Sink;

    fn logged(format: LogFormat, level: LevelFilter, event: impl FnOnce()) -> String {
        let sink = Sink::default();
        let writer = sink.clone();
        tracing::subscriber::with_default(
            subscriber(format, level, false, move || writer.clone()),
            event,
        );
        sink.text()
    }

    #[test]
    fn a_json_line_is_one_object_with_an_rfc_3339_time_even_if_a_field_holds_a_newline() {
        let text = logged(LogFormat::Json, LevelFilter::INFO, || {
            tracing::warn!(file = "a\n\"b\"", line = 3, "policy did not load");
        });
        assert_eq!(text.lines().count(), 1);
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["level"], "WARN");
        assert_eq!(line["message"], "policy did not load");
        assert_eq!(line["file"], "a\n\"b\"");
        assert_eq!(line["line"], 3);
        let time = line["timestamp"].as_str().unwrap();
        assert!(time.ends_with('Z') && time.as_bytes()[10] == b'T', "{time}");
    }

    #[test]
    fn text_is_plain_and_the_level_filters() {
        let text = logged(LogFormat::Text, LevelFilter::INFO, || {
            tracing::debug!("unseen");
            tracing::info!(model = "m", "seen");
        });
        assert!(
            text.contains("INFO") && text.contains("seen model=\"m\""),
            "{text}"
        );
        assert!(
            !text.contains("unseen") && !text.contains('\u{1b}'),
            "{text}"
        );
    }

    #[test]
    fn frame_by_frame_events_of_libraries_are_left_out_unless_tracing() {
        let event = || tracing::debug!(target: "h2::codec", "frame");
        assert_eq!(logged(LogFormat::Text, LevelFilter::DEBUG, event), "");
        assert!(logged(LogFormat::Text, LevelFilter::TRACE, event).contains("frame"));
    }
}
