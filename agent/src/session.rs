//! The agent's session with the server: dials out, registers everything, reports what changes, does what it is told, and comes back for ever.
//!
//! ```text
//! attempt   dial.rs      a socket, TLS, a session on it; what is shown is read anew (credentials.rs)
//! register  report.rs    what the node is and all that it runs, at every connect
//! serve     serve.rs     heartbeats and changes go up, commands come down
//! wait      backoff.rs   full jitter: after a broken stream for seconds, after a refusal for minutes
//! ```

pub mod backoff;
pub mod credentials;
pub mod dial;
mod report;
mod serve;
mod silence;

use std::future::Future;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use llmgw_proto::identity::{Certificate, Fingerprint, Moment, problem};
use llmgw_proto::inventory::Inventory;
use llmgw_proto::link::KeepAlive;
use llmgw_proto::session::{PortRange, Refusal, RefusalCode, ShardReport};
use llmgw_proto::shard::{LogLine, ShardSpec, ShardStatus};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use backoff::{Backoff, Outcome, unit};
use credentials::RefusedOne;
use dial::ServerUrl;
use serve::Serving;

use crate::config::AgentTls;

/// What runs the shards of this node.
pub trait ShardHost: Send + Sync + 'static {
    /// All of them, for a registration.
    fn shards(&self) -> Vec<(ShardSpec, ShardStatus)>;

    /// Changes from now on.
    fn changes(&self) -> Box<dyn ShardChanges>;

    /// Returns at once; what becomes of it is a change. One that runs already stays as it is.
    ///
    /// # Errors
    /// It is refused, and nothing else will be heard of it: what the server is to be told. With the spec, unless something else of
    /// this node has its name.
    fn start_shard(&self, spec: ShardSpec) -> Result<(), Box<ShardReport>>;

    /// `false`: there is no such shard.
    fn drain_shard(&self, shard: &str) -> bool;

    /// `false`: there is no such shard.
    fn stop_shard(&self, shard: &str, force: bool) -> bool;

    /// The last lines of its output. `None`: there is no such shard.
    fn tail(&self, shard: &str, lines: usize) -> Option<Vec<LogLine>>;
}

/// Changes of shards, for one reader.
pub trait ShardChanges: Send {
    /// Waits for a change, and returns the latest status of each shard that changed. Nothing queues up for a slow reader, and nothing is
    /// lost where this is dropped before it returns.
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Vec<ShardStatus>> + Send + '_>>;
}

/// What this node is.
pub trait InventorySource: Send + Sync + 'static {
    /// As last read. Returns at once.
    fn latest(&self) -> Arc<Inventory>;
}

/// Whether an operator takes this node out of use. Kept across restarts of the agent.
pub trait DrainFlag: Send + Sync + 'static {
    fn is_draining(&self) -> bool;

    /// # Errors
    /// It could not be kept. The node drains all the same, until the agent is restarted.
    fn set(&self, draining: bool) -> std::io::Result<()>;
}

/// How a session is held.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    pub server: ServerUrl,
    /// What is shown to a server with TLS, and whom it has to come from.
    pub tls: Option<AgentTls>,
    /// How often the files of `tls` are looked at while a session is up.
    pub look_every: Duration,
    pub node: String,
    /// Where the gateway reaches engines. `None`: the address that the stream uses.
    pub advertise: Option<IpAddr>,
    pub ports: PortRange,
    /// Names of the engines that may be started.
    pub engines: Vec<String>,
    /// Absolute: where a source that is a relative path lies.
    pub models_dir: Option<String>,
    /// Absolute: what tells this agent from another one of its machine.
    pub state_dir: String,
    pub keep_alive: KeepAlive,
    /// For each step of an attempt: the connection, the session, the welcome.
    pub patience: Duration,
}

/// The agent's side of all its sessions, one after the other.
pub struct Session {
    pub options: SessionOptions,
    pub shards: Arc<dyn ShardHost>,
    pub inventory: Arc<dyn InventorySource>,
    pub drain: Arc<dyn DrainFlag>,
    run: String,
    machine: String,
    connected: watch::Sender<bool>,
    /// The certificate that the server saw last, for the operator.
    shown: Mutex<Option<Certificate>>,
    /// The engines are being stopped: nothing new may come, and what they ran is to come up elsewhere.
    stops_engines: watch::Sender<bool>,
    /// The engines run on when the agent stops.
    engines_stay: AtomicBool,
}

/// Why an attempt or a session ended.
#[derive(Debug)]
enum Ended {
    /// The agent stops.
    Stopped,
    /// The server does not want it.
    Refused(Refusal),
    /// The server is not the one that is meant, or its certificate is not good.
    Distrusted(String),
    /// The server leaves, and says so.
    ServerLeaves(String),
    /// The stream could not be opened or did not last.
    Broken(String),
}

/// Whether another session took the old one's place.
enum Replaced {
    Yes,
    No,
}

impl Ended {
    /// What the next wait depends on. `lasted`: for how long there was a session.
    fn outcome(&self, lasted: Option<Duration>) -> Outcome {
        match self {
            Ended::Refused(refusal) if refusal.code.needs_a_person() => Outcome::Refused,
            Ended::Distrusted(_) => Outcome::Refused,
            _ if lasted.is_some_and(|lasted| lasted >= STEADY) => Outcome::Lasted,
            _ => Outcome::Broke,
        }
    }
}

/// A session that lasted for so long was a good one: the next attempt begins with the shortest wait.
const STEADY: Duration = Duration::from_secs(30);
/// After a renewed certificate that led to no session, before that one is tried again.
const RENEWAL_PAUSE: Duration = Duration::from_secs(5 * 60);
/// For the goodbye to leave and be read, when the agent stops.
const GOODBYE_MAX: Duration = Duration::from_millis(800);

impl Session {
    pub fn new(
        options: SessionOptions,
        shards: Arc<dyn ShardHost>,
        inventory: Arc<dyn InventorySource>,
        drain: Arc<dyn DrainFlag>,
    ) -> Session {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        Session {
            options,
            shards,
            inventory,
            drain,
            run: format!("{:016x}", backoff::random()),
            machine: boot.map(|boot| boot.trim().to_owned()).unwrap_or_default(),
            connected: watch::Sender::new(false),
            shown: Mutex::new(None),
            stops_engines: watch::Sender::new(false),
            engines_stay: AtomicBool::new(true),
        }
    }

    /// Whether the server welcomed the session that there is.
    pub fn connected(&self) -> watch::Receiver<bool> {
        self.connected.subscribe()
    }

    /// The engines are stopped from now on: the server is told at once that this node drains, which no restart remembers.
    pub fn stops_engines(&self) {
        self.stops_engines.send_replace(true);
    }

    /// Whether the server is to give this node nothing new.
    fn drains(&self) -> bool {
        self.drain.is_draining() || *self.stops_engines.borrow()
    }

    /// The goodbye will say that no engine runs on.
    pub fn engines_were_stopped(&self) {
        self.engines_stay.store(false, Ordering::Relaxed);
    }

    /// Holds sessions until it is told to stop; then it takes at most [`GOODBYE_MAX`].
    pub async fn run(&self, stop: CancellationToken) {
        let mut backoff = Backoff::default();
        loop {
            let mut welcomed_at = None;
            let ended = self.attempt(&stop, &mut welcomed_at).await;
            self.connected.send_replace(false);
            let lasted = welcomed_at.map(|at: Instant| at.elapsed());
            if matches!(ended, Ended::Stopped) {
                return;
            }
            let wait = backoff.next(ended.outcome(lasted), unit());
            self.say(&ended, wait);
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// One session, from the dialling to its end. That another one takes its place because the certificate was renewed is no end.
    async fn attempt(&self, stop: &CancellationToken, welcomed_at: &mut Option<Instant>) -> Ended {
        let opened = tokio::select! {
            opened = self.open() => opened,
            () = stop.cancelled() => return Ended::Stopped,
        };
        let mut serving = match opened {
            Ok(serving) => serving,
            Err(ended) => return ended,
        };
        *welcomed_at = Some(Instant::now());
        self.connected.send_replace(true);
        let mut refused = None;
        loop {
            let shown = serving.shown;
            let ended = tokio::select! {
                ended = serving.run(stop) => ended,
                () = self.renewed(shown, refused) => {
                    let before = self.lock_shown().clone();
                    match self.replace(&mut serving, stop).await {
                        Ok(Replaced::Yes) => {
                            refused = None;
                            continue;
                        }
                        // What the server does not take is not shown to it every time that somebody looks.
                        Ok(Replaced::No) => {
                            refused = self.refused_one();
                            *self.lock_shown() = before;
                            continue;
                        }
                        Err(ended) => {
                            // What ended is the session of the certificate before.
                            *self.lock_shown() = before;
                            ended
                        }
                    }
                }
            };
            if matches!(ended, Ended::Stopped) {
                serving.goodbye().await;
            }
            return ended;
        }
    }

    async fn open(&self) -> Result<Serving<'_>, Ended> {
        Serving::welcomed(self, dial::open(self).await?).await
    }

    /// Waits until the certificate is another one than the session was opened with.
    async fn renewed(&self, shown: Option<Fingerprint>, refused: Option<RefusedOne>) {
        let look_every = self.options.look_every;
        match (&self.options.tls, shown) {
            (Some(tls), Some(shown)) => tls.renewed(shown, refused, look_every).await,
            _ => std::future::pending().await,
        }
    }

    /// The certificate that was shown last, which led to no session.
    fn refused_one(&self) -> Option<RefusedOne> {
        let shown = self.lock_shown();
        shown.as_ref().map(|certificate| RefusedOne {
            shown: certificate.fingerprint,
            until: Instant::now() + RENEWAL_PAUSE,
        })
    }

    /// Opens a session with what is in the files now, and leaves the old one for it. Where the server does not want the new one the old one goes on.
    async fn replace<'a>(
        &'a self,
        serving: &mut Serving<'a>,
        stop: &CancellationToken,
    ) -> Result<Replaced, Ended> {
        tracing::info!("the certificate was renewed: a new session takes this one's place");
        let opened = {
            let mut opening = pin!(self.open());
            tokio::select! {
                opened = &mut opening => opened,
                ended = serving.run(stop) => match ended {
                    Ended::Stopped => return Err(Ended::Stopped),
                    // The server ends the old one as soon as the new one is there. Nobody else listens to `stop` meanwhile.
                    ended => tokio::select! {
                        opened = &mut opening => Ok(opened.map_err(|_| ended)?),
                        () = stop.cancelled() => return Err(Ended::Stopped),
                    },
                },
            }
        };
        match opened {
            Ok(new) => {
                *serving = new;
                Ok(Replaced::Yes)
            }
            Err(ended) => {
                let why = self.told(&ended);
                tracing::error!(
                    "the renewed certificate did not lead to a session: {why}; the old session goes on"
                );
                Ok(Replaced::No)
            }
        }
    }

    fn shows(&self, certificate: &Certificate) {
        *self.lock_shown() = Some(certificate.clone());
    }

    fn lock_shown(&self) -> MutexGuard<'_, Option<Certificate>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What an end says, in one sentence.
    fn told(&self, ended: &Ended) -> String {
        match ended {
            Ended::Stopped => "the agent stops".to_owned(),
            Ended::Refused(refusal) if refusal.code == RefusalCode::Identity => {
                let own = self.lock_shown().clone().zip(self.options.tls.as_ref());
                let own = own.map(|(shown, tls)| {
                    problem::own(&shown, &tls.cert.display().to_string(), Moment::now())
                });
                own.map_or_else(|| refusal.to_string(), |own| format!("{refusal}; {own}"))
            }
            Ended::Refused(refusal) => refusal.to_string(),
            Ended::Distrusted(why) | Ended::ServerLeaves(why) | Ended::Broken(why) => why.clone(),
        }
    }

    fn say(&self, ended: &Ended, wait: Duration) {
        let (server, node) = (&self.options.server, &self.options.node);
        let why = self.told(ended);
        let wait = format!("next attempt in {:.1} s", wait.as_secs_f64());
        match ended {
            Ended::Stopped => {}
            Ended::Refused(_) => tracing::error!("{server} refused node `{node}`: {why}; {wait}"),
            Ended::Distrusted(_) => tracing::error!("no session with {server}: {why}; {wait}"),
            Ended::ServerLeaves(_) => tracing::info!("{server} leaves: {why}; {wait}"),
            Ended::Broken(_) => tracing::warn!("no session with {server}: {why}; {wait}"),
        }
    }
}

#[cfg(test)]
mod tests;
