//! Questions for a shard's output, and the answers that belong to them.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use llmgw_proto::session::{LogChunk, ServerMessage, SessionId, TailLog};
use llmgw_proto::shard::LogLine;
use tokio::sync::mpsc;

use crate::control::observed::NotSent;

/// Questions that are open at once.
const OPEN_MAX: usize = 64;
/// Parts of an answer that wait to be gathered.
const CHUNKS_MAX: usize = 16;
/// Lines of one answer.
const LINES_MAX: usize = 10_000;
/// For the whole answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// The open questions. Shared by those who ask and by the sessions, which hand in the answers.
#[derive(Debug, Default)]
pub(super) struct Tails {
    open: Mutex<HashMap<u64, (SessionId, mpsc::Sender<LogChunk>)>>,
    asked: AtomicU64,
}

/// An open question; dropped, it is taken back.
pub(super) struct Request {
    number: u64,
    tails: Arc<Tails>,
}

/// Why there is no output to show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TailError {
    NotSent(NotSent),
    /// Too many others are asking.
    Busy,
    /// The node was connected and is not any more, or did not answer in time.
    NoAnswer,
    /// What the node says.
    Refused(String),
}

impl Tails {
    pub(super) fn ask(
        self: &Arc<Tails>,
        session: SessionId,
    ) -> Result<(Request, mpsc::Receiver<LogChunk>), TailError> {
        let mut open = self.lock();
        if open.len() >= OPEN_MAX {
            return Err(TailError::Busy);
        }
        let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let (chunks, received) = mpsc::channel(CHUNKS_MAX);
        open.insert(number, (session, chunks));
        let request = Request {
            number,
            tails: self.clone(),
        };
        Ok((request, received))
    }

    /// Takes a part of an answer. One that nobody asked for, or asked another session for, is dropped; so is one that nobody gathers in time.
    pub(super) fn deliver(&self, session: SessionId, chunk: LogChunk) {
        let open = self.lock();
        if let Some((asked, chunks)) = open.get(&chunk.request)
            && *asked == session
        {
            let _ = chunks.try_send(chunk);
        }
    }

    /// A session that ended answers nothing any more.
    pub(super) fn end(&self, session: SessionId) {
        self.lock().retain(|_, (asked, _)| *asked != session);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, (SessionId, mpsc::Sender<LogChunk>)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Request {
    pub(super) fn message(&self, shard: &str, lines: u32) -> ServerMessage {
        ServerMessage::TailLog(TailLog {
            request: self.number,
            shard: shard.to_owned(),
            lines,
        })
    }

    pub(super) async fn gather(
        self,
        mut chunks: mpsc::Receiver<LogChunk>,
    ) -> Result<Vec<LogLine>, TailError> {
        let gathering = async {
            let mut lines: Vec<LogLine> = Vec::new();
            while let Some(chunk) = chunks.recv().await {
                if let Some(problem) = chunk.problem {
                    return Err(TailError::Refused(problem));
                }
                let room = LINES_MAX.saturating_sub(lines.len());
                lines.extend(chunk.lines.into_iter().take(room));
                if chunk.is_last {
                    return Ok(lines);
                }
            }
            Err(TailError::NoAnswer)
        };
        let gathered = tokio::time::timeout(ANSWER_MAX, gathering).await;
        gathered.unwrap_or(Err(TailError::NoAnswer))
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.tails.lock().remove(&self.number);
    }
}

impl fmt::Display for TailError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TailError::NotSent(why) => why.fmt(f),
            TailError::Busy => write!(f, "{OPEN_MAX} others are reading output already"),
            TailError::NoAnswer => write!(f, "the node did not answer within {ANSWER_MAX:?}"),
            TailError::Refused(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for TailError {}
