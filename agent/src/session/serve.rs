//! A session that was welcomed: what goes up and what comes down until it ends.
//!
//! Nothing here waits for a server that does not read: messages that it does not take stay in a bounded queue, and while that is full neither changes nor
//! commands are taken in. Changes do not pile up meanwhile; the supervisor keeps the latest of each shard.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use llmgw_proto::convert::Framed;
use llmgw_proto::identity::Fingerprint;
use llmgw_proto::link::{Dialled, Heard, Hearing, KeepAlive};
use llmgw_proto::session::{
    AgentMessage, Goodbye, LogChunk, ServerMessage, SessionId, ShardReport, StartShard, StopHow,
    StopShard, TailLog,
};
use llmgw_proto::shard::{LogLine, ShardState, ShardStatus};
use tokio::sync::{mpsc, watch};
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::dial::Opened;
use super::report::Told;
use super::silence::LastHeard;
use super::{Ended, GOODBYE_MAX, Session, ShardChanges};

/// Messages that wait for the server to read.
const WAITING_MAX: usize = 64;
/// Lines in one part of an answer.
const CHUNK_LINES: usize = 100;
/// Lines of one answer.
const TAIL_LINES_MAX: usize = 2_000;
/// A server that took nothing for so many heartbeats does not read.
const UNREAD_HEARTBEATS_MAX: u32 = 3;

pub(super) struct Serving<'a> {
    session: &'a Session,
    id: SessionId,
    /// The certificate that was shown. None: without TLS.
    pub(super) shown: Option<Fingerprint>,
    heartbeats: Interval,
    heard: Hearing<ServerMessage>,
    outgoing: mpsc::Sender<Framed<AgentMessage>>,
    dialled: Dialled,
    last_heard: LastHeard,
    changes: Box<dyn ShardChanges>,
    stops_engines: watch::Receiver<bool>,
    told: Told,
    waiting: VecDeque<AgentMessage>,
    /// Heartbeats that were due since the server last took something.
    unread: u32,
    has_skipped: bool,
}

/// What happened next.
enum Step {
    Stop,
    Sent { is_open: bool },
    Heard(Heard<ServerMessage>),
    Changed(Vec<ShardStatus>),
    StopsEngines,
    Beat,
}

impl<'a> Serving<'a> {
    /// Waits for the server's first words.
    pub(super) async fn welcomed(
        session: &'a Session,
        opened: Opened,
    ) -> Result<Serving<'a>, Ended> {
        let Opened {
            mut heard,
            outgoing,
            dialled,
            last_heard,
            changes,
            told,
            shown,
        } = opened;
        let patience = session.options.patience;
        let first = timeout(patience, heard.next()).await;
        let first = first
            .map_err(|_| Ended::Broken(format!("the server said nothing within {patience:?}")))?;
        let (id, welcome) = match first {
            Heard::Message(Framed {
                session,
                message: ServerMessage::Welcome(welcome),
            }) => (session, welcome),
            Heard::Message(other) => return Err(last_words(other.message)),
            other => return Err(ended(other)),
        };
        tracing::info!(
            "connected to {} as `{}` (session {id}, server {})",
            session.options.server,
            session.options.node,
            welcome.server_version
        );
        let mut heartbeats = interval(Duration::from_millis(welcome.heartbeat_ms));
        heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Serving {
            session,
            id,
            shown,
            heartbeats,
            heard,
            outgoing,
            dialled,
            last_heard,
            changes,
            stops_engines: session.stops_engines.subscribe(),
            told,
            waiting: VecDeque::new(),
            unread: 0,
            has_skipped: false,
        })
    }

    /// Until it ends, or is asked to. Nothing is lost if this is dropped and called again.
    pub(super) async fn run(&mut self, stop: &CancellationToken) -> Ended {
        loop {
            let has_room = self.waiting.len() < WAITING_MAX;
            let step = tokio::select! {
                () = stop.cancelled() => Step::Stop,
                permit = self.outgoing.reserve(), if !self.waiting.is_empty() => {
                    if let (Ok(permit), Some(message)) = (permit, self.waiting.pop_front()) {
                        permit.send(Framed { session: self.id, message });
                        self.unread = 0;
                    }
                    // A connection that is gone is heard of as the end.
                    Step::Sent { is_open: !self.outgoing.is_closed() }
                }
                heard = self.heard.next(), if has_room => Step::Heard(heard),
                statuses = self.changes.next(), if has_room => Step::Changed(statuses),
                Ok(()) = self.stops_engines.changed() => Step::StopsEngines,
                _ = self.heartbeats.tick() => Step::Beat,
            };
            let over = match step {
                Step::Stop => return Ended::Stopped,
                Step::Sent { is_open: true } => None,
                Step::Sent { is_open: false } => {
                    // Why, is heard from the other half; where that says nothing, the stream has ended all the same.
                    let last = tokio::select! {
                        last = timeout(self.session.options.patience, self.heard.next()) => last,
                        () = stop.cancelled() => return Ended::Stopped,
                    };
                    Some(last.map_or_else(|_| ended(Heard::End), ended))
                }
                Step::Heard(heard) => self.hear(heard),
                Step::Changed(statuses) => {
                    for status in statuses {
                        self.report(status);
                    }
                    None
                }
                Step::StopsEngines => {
                    self.say_alive();
                    None
                }
                Step::Beat => self.beat(),
            };
            if let Some(over) = over {
                return self.explained(over);
            }
        }
    }

    /// A link that is cut without a word ends with what the connection makes of a peer that acknowledges nothing.
    fn explained(&self, over: Ended) -> Ended {
        let KeepAlive { interval, timeout } = self.session.options.keep_alive;
        let silence = self.last_heard.silence();
        match over {
            // A server that lives answers each ping long before.
            Ended::Broken(why) if silence >= interval + timeout / 2 => Ended::Broken(format!(
                "nothing was heard from the server for {:.1} s ({why})",
                silence.as_secs_f64()
            )),
            over => over,
        }
    }

    fn report(&mut self, status: ShardStatus) {
        // Its place can be given away as soon as the server hears of it: the GPUs as they are now come first.
        if status.state.is_over() {
            self.say_alive();
        }
        let message = self.told.status(status, &*self.session.shards);
        self.waiting.push_back(message);
    }

    fn beat(&mut self) -> Option<Ended> {
        if self.unread >= UNREAD_HEARTBEATS_MAX {
            return Some(Ended::Broken("the server reads nothing".to_owned()));
        }
        self.unread += 1;
        self.say_alive();
        None
    }

    /// Only the newest heartbeat is worth sending. It brings the inventory that the one in whose place it comes was to bring.
    fn say_alive(&mut self) {
        let draining = self.session.drains();
        let inventory = self.session.inventory.latest();
        let mut newer = self.told.heartbeat(&inventory, draining);
        let older = self.waiting.iter_mut().find_map(|waiting| match waiting {
            AgentMessage::Heartbeat(older) => Some(older),
            _ => None,
        });
        match older {
            // In its place: what a shard's end is told behind stays before it.
            Some(older) => {
                newer.inventory = newer.inventory.or(older.inventory.take());
                *older = newer;
            }
            None => self.waiting.push_back(AgentMessage::Heartbeat(newer)),
        }
    }

    fn hear(&mut self, heard: Heard<ServerMessage>) -> Option<Ended> {
        let framed = match heard {
            Heard::Message(framed) => framed,
            Heard::Skipped(error) => {
                if !std::mem::replace(&mut self.has_skipped, true) {
                    tracing::warn!("the server says what this agent does not know: {error}");
                }
                return None;
            }
            other => return Some(ended(other)),
        };
        // A command for a session before this one must not be obeyed.
        if framed.session != self.id {
            tracing::warn!(
                "a `{}` for session {} was ignored: this is session {}",
                framed.message.name(),
                framed.session,
                self.id
            );
            return None;
        }
        match framed.message {
            ServerMessage::StartShard(start) => self.start(*start),
            ServerMessage::StopShard(stop) => self.stop(stop),
            ServerMessage::DrainNode(drain) => {
                if let Err(error) = self.session.drain.set(drain.draining) {
                    tracing::error!(
                        "that this node drains is forgotten with the next restart: {error}"
                    );
                }
                self.say_alive();
            }
            ServerMessage::TailLog(tail) => self.tail(&tail),
            ServerMessage::Welcome(_) => {}
            last @ (ServerMessage::Refused(_) | ServerMessage::Leaving(_)) => {
                return Some(last_words(last));
            }
        }
        None
    }

    fn start(&mut self, start: StartShard) {
        let StartShard { spec, spec_hash } = start;
        if spec.hash() == spec_hash {
            let refused = self.session.shards.start_shard(Arc::unwrap_or_clone(spec));
            if let Err(report) = refused {
                self.waiting.push_back(AgentMessage::ShardStatus(report));
            }
            return;
        }
        // A part of it that this version does not know may be what keeps it from harm.
        let reason = format!(
            "spec_not_understood: agent {} does not understand all of what the server describes; it needs an upgrade",
            env!("CARGO_PKG_VERSION")
        );
        tracing::error!("shard `{}` is not started: {reason}", spec.shard);
        let status = over(spec.shard.clone(), spec_hash, ShardState::Failed, reason);
        let report = ShardReport {
            spec: Some(spec),
            status,
        };
        self.waiting
            .push_back(AgentMessage::ShardStatus(Box::new(report)));
    }

    fn stop(&mut self, stop: StopShard) {
        let shards = &self.session.shards;
        let is_here = match stop.how {
            StopHow::Drain => shards.drain_shard(&stop.shard),
            StopHow::Stop => shards.stop_shard(&stop.shard, false),
            StopHow::Kill => shards.stop_shard(&stop.shard, true),
        };
        // The server must not wait for the end of what is not here.
        if !is_here && stop.how != StopHow::Drain {
            let reason = "not_here: there is no such shard on this node".to_owned();
            let status = over(stop.shard, "none".to_owned(), ShardState::Stopped, reason);
            self.report(status);
        }
    }

    fn tail(&mut self, tail: &TailLog) {
        let lines = (tail.lines as usize).min(TAIL_LINES_MAX);
        let chunk = |lines: &[LogLine], is_last, problem| {
            AgentMessage::LogChunk(LogChunk {
                request: tail.request,
                lines: lines.to_vec(),
                is_last,
                problem,
            })
        };
        let Some(lines) = self.session.shards.tail(&tail.shard, lines) else {
            let problem = format!("there is no shard `{}` on this node", tail.shard);
            self.waiting.push_back(chunk(&[], true, Some(problem)));
            return;
        };
        let mut chunks = lines.chunks(CHUNK_LINES).peekable();
        if chunks.peek().is_none() {
            self.waiting.push_back(chunk(&[], true, None));
        }
        while let Some(part) = chunks.next() {
            let message = chunk(part, chunks.peek().is_none(), None);
            self.waiting.push_back(message);
        }
    }

    /// Says what changed until now and that the agent stops on purpose, and waits until that was read.
    pub(super) async fn goodbye(mut self) {
        // The last shard's end and the word to stop come at the same time, and nobody would tell it later.
        let changed = tokio::select! {
            biased;
            statuses = self.changes.next() => statuses,
            () = std::future::ready(()) => Vec::new(),
        };
        for status in changed {
            self.report(status);
        }
        let goodbye = AgentMessage::Goodbye(Goodbye {
            reason: "the agent was told to stop".to_owned(),
            engines_stay: self.session.engines_stay.load(Ordering::Relaxed),
        });
        let Serving {
            id,
            mut heard,
            outgoing,
            dialled,
            waiting,
            ..
        } = self;
        let leaving = async {
            for message in waiting.into_iter().chain([goodbye]) {
                let framed = Framed {
                    session: id,
                    message,
                };
                if outgoing.send(framed).await.is_err() {
                    return;
                }
            }
            // Its end tells the server that nothing follows; the server's end tells that it has read all.
            drop(outgoing);
            while matches!(heard.next().await, Heard::Message(_) | Heard::Skipped(_)) {}
        };
        if timeout(GOODBYE_MAX, leaving).await.is_err() {
            tracing::warn!("the server did not take the goodbye");
        }
        drop(dialled);
    }
}

/// A status of a shard that no supervisor has.
fn over(shard: String, spec_hash: String, state: ShardState, reason: String) -> ShardStatus {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    ShardStatus {
        shard,
        spec_hash,
        state,
        reason,
        exit: None,
        log_tail: Vec::new(),
        since_ms: since.map_or(0, |since| since.as_millis() as u64),
        adopted: false,
    }
}

fn last_words(message: ServerMessage) -> Ended {
    match message {
        ServerMessage::Refused(refusal) => Ended::Refused(refusal),
        ServerMessage::Leaving(reason) => Ended::ServerLeaves(reason),
        other => Ended::Broken(format!("the server began with `{}`", other.name())),
    }
}

fn ended(heard: Heard<ServerMessage>) -> Ended {
    match heard {
        Heard::Malformed(why) => {
            Ended::Broken(format!("what the server said can't be read: {why}"))
        }
        Heard::Broken(why) => Ended::Broken(why),
        Heard::End => Ended::Broken("the server closed the stream".to_owned()),
        Heard::Message(framed) => last_words(framed.message),
        Heard::Skipped(error) => Ended::Broken(error.to_string()),
    }
}
