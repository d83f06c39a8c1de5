//! The last good certificate of each listener: followed while the server runs, and never given up for half a change.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use llmgw_proto::identity::{Certificate, Moment};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::Level;

use super::expiry::{self, Ends, Owner, Reminders};
use super::trial::{SETTLE_MS, Trial, Verdict};
use super::{Files, Material, Opened, TlsListener, fit};
use crate::clock;
use crate::config::Config;
use crate::hints::Hints;

/// What the calendar says.
pub type Clock = Arc<dyn Fn() -> Moment + Send + Sync>;
/// The ends of the certificates that nodes showed, of those that are known now.
pub type Nodes = Arc<dyn Fn() -> Vec<Ends> + Send + Sync>;

/// Who shows a certificate to those who connect. Connections that are open keep what they have.
pub trait Shows: Send + Sync {
    fn show(&self, material: &Material);
}

/// All certificates of a server.
pub struct Certificates {
    /// Held while files are read, which takes as long as their file system likes.
    listeners: Mutex<Vec<Kept>>,
    /// What is in force, for those who must not wait.
    held: ArcSwap<Vec<Held>>,
    reminders: Mutex<Reminders>,
    clock: Clock,
    nodes: Nodes,
    /// Other files are followed from now on.
    moved: Notify,
}

/// One listener's certificate, and who shows it.
struct Kept {
    listener: TlsListener,
    material: Arc<Material>,
    trial: Trial,
    /// Good files that trust fewer authorities than before, and since when they were found so.
    shrunk: Option<(Material, u64)>,
    shows: Arc<dyn Shows>,
}

/// What is in force at one listener.
#[derive(Clone)]
pub struct Held {
    pub listener: TlsListener,
    pub material: Arc<Material>,
    /// Why its files as they are now are not.
    pub problem: Option<String>,
}

/// Files that a new configuration names, read and good.
pub struct Staged(Vec<Opened>);

impl Certificates {
    /// `listeners` are what was opened, each with who shows it.
    pub fn new(
        listeners: Vec<(Opened, Arc<dyn Shows>)>,
        nodes: Nodes,
        clock: Clock,
    ) -> Arc<Certificates> {
        let kept = |(opened, shows): (Opened, Arc<dyn Shows>)| Kept {
            listener: opened.listener,
            material: Arc::new(opened.material),
            trial: Trial::default(),
            shrunk: None,
            shows,
        };
        let listeners: Vec<Kept> = listeners.into_iter().map(kept).collect();
        let certificates = Certificates {
            held: ArcSwap::from_pointee(listeners.iter().map(Kept::held).collect()),
            listeners: Mutex::new(listeners),
            reminders: Mutex::default(),
            clock,
            nodes,
            moved: Notify::new(),
        };
        Arc::new(certificates)
    }

    /// What is in force at each listener.
    pub fn held(&self) -> Arc<Vec<Held>> {
        self.held.load_full()
    }

    pub fn now(&self) -> Moment {
        (self.clock)()
    }

    /// The ends of all that is shown, trusted, and was shown by nodes.
    pub fn ends(&self) -> Vec<Ends> {
        let held = self.held();
        let own = held.iter().flat_map(Held::certificates);
        let own = own.map(|(owner, certificate)| Ends::of(owner, certificate));
        own.chain((self.nodes)()).collect()
    }

    /// Follows the files until the server stops.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut hints = Hints::new("TLS");
        loop {
            let held = self.held();
            hints.watch(held.iter().flat_map(|held| held.listener.files.paths()));
            let certificates = self.clone();
            let look = tokio::task::spawn_blocking(move || {
                let waits = certificates.look(clock::now_ms());
                certificates.remind();
                waits
            });
            let waits = look.await.unwrap_or(false);
            let settled = async {
                match waits {
                    true => tokio::time::sleep(Duration::from_millis(SETTLE_MS)).await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = hints.next() => {}
                () = settled => {}
                () = self.moved.notified() => {}
            }
        }
    }

    /// Looks at all files, because a person asked.
    ///
    /// # Errors
    /// Which of them are not in force as they are now, and why.
    pub fn look_now(&self) -> Result<(), String> {
        self.look_as(clock::now_ms(), true);
        let held = self.held();
        let wrong: Vec<String> = held
            .iter()
            .filter_map(|held| {
                let problem = held.problem.as_ref()?;
                Some(format!("`{}`: {problem}", held.listener.serves.key()))
            })
            .collect();
        match wrong.is_empty() {
            true => Ok(()),
            false => Err(wrong.join("\n")),
        }
    }

    /// Looks at all files. True: one of them may be half changed, so one should look again soon.
    pub(super) fn look(&self, now_ms: u64) -> bool {
        self.look_as(now_ms, false)
    }

    fn look_as(&self, now_ms: u64, is_asked: bool) -> bool {
        let now = self.now();
        let mut listeners = self.lock();
        let mut waits = false;
        for kept in listeners.iter_mut() {
            waits |= kept.look(now, now_ms, is_asked);
        }
        self.publish(&listeners);
        waits
    }

    /// Says which certificates end soon, each once a day.
    fn remind(&self) {
        let mut reminders = self
            .reminders
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for (level, sentence) in reminders.due(&self.ends(), self.now()) {
            match level {
                Level::ERROR => tracing::error!("{sentence}"),
                _ => tracing::warn!("{sentence}"),
            }
        }
    }

    /// Reads the files that a new configuration names in place of others.
    ///
    /// # Errors
    /// What is wrong with one of them.
    pub fn stage(&self, config: &Config) -> Result<Staged, String> {
        let held = self.held();
        let mut staged = Vec::new();
        for mut listener in TlsListener::all(config) {
            let same = |held: &&Held| held.listener.serves == listener.serves;
            let Some(own) = held.iter().find(same) else {
                continue;
            };
            let (before, after) = (&own.listener.files, &listener.files);
            // One that asks for other clients' certificates, or for none any more, is another listener.
            if before == after || before.ca.is_some() != after.ca.is_some() {
                continue;
            }
            // Listeners stay where they are until the next start.
            listener.address = own.listener.address;
            let material = Material::read(&listener).and_then(|material| {
                material.may_follow(&own.material, &listener, self.now())?;
                Ok(material)
            });
            match material {
                Ok(material) => staged.push(Opened { listener, material }),
                Err(problem) => return Err(format!("`{}`: {problem}", listener.serves.key())),
            }
        }
        Ok(Staged(staged))
    }

    /// Puts in force what was staged.
    pub fn put(&self, Staged(staged): Staged) {
        if staged.is_empty() {
            return;
        }
        let mut listeners = self.lock();
        for Opened { listener, material } in staged {
            let same = |kept: &&mut Kept| kept.listener.serves == listener.serves;
            if let Some(kept) = listeners.iter_mut().find(same) {
                kept.listener = listener;
                kept.trial = Trial::default();
                kept.shrunk = None;
                kept.take(material);
            }
        }
        self.publish(&listeners);
        self.moved.notify_one();
    }

    fn publish(&self, listeners: &[Kept]) {
        let held = listeners.iter().map(Kept::held).collect();
        self.held.store(Arc::new(held));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Kept>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// What is shown and trusted here: the listener's own first.
    pub fn certificates(&self) -> impl Iterator<Item = (Owner, &Certificate)> {
        expiry::certificates(&self.listener, &self.material)
    }
}

impl Files {
    fn paths(&self) -> impl Iterator<Item = &Path> {
        [Some(&self.cert), Some(&self.key), self.ca.as_ref()]
            .into_iter()
            .flatten()
            .map(|path| &**path)
    }
}

impl Kept {
    fn held(&self) -> Held {
        Held {
            listener: self.listener.clone(),
            material: self.material.clone(),
            problem: self.trial.problem().map(str::to_owned),
        }
    }

    /// Reads the files, and takes what they hold if it is new and good. True: it may be half a change.
    fn look(&mut self, now: Moment, now_ms: u64, is_asked: bool) -> bool {
        let key = self.listener.serves.key();
        let found = Material::read(&self.listener).and_then(|found| {
            if found.is_same(&self.material) {
                return Ok(None);
            }
            found.may_follow(&self.material, &self.listener, now)?;
            Ok(Some(found))
        });
        let found = match found {
            Ok(found) => found,
            Err(problem) => {
                let problem = problem.to_string();
                let verdict = self.trial.wrong(problem.clone(), now_ms, is_asked);
                if verdict == Verdict::Say {
                    tracing::error!(
                        "`{key}` was not reloaded, the certificate with serial {} stays: {problem}",
                        self.material.certificate().serial
                    );
                }
                return verdict == Verdict::Wait;
            }
        };
        // Half of several authorities is a good file as well, and would cut off every agent of the others.
        if !is_asked && self.may_be_half(found.as_ref(), now_ms) {
            return true;
        }
        let is_healed = self.trial.right() == Verdict::Healed;
        match found {
            Some(material) => self.take(material),
            None if is_healed => {
                tracing::info!("`{key}`: the files hold what is in force again");
            }
            None => {}
        }
        false
    }

    /// Whether an authority is missing in what was found, which another part of the file may still bring.
    fn may_be_half(&mut self, found: Option<&Material>, now_ms: u64) -> bool {
        let Some(found) = found.filter(|found| found.lacks_authority_of(&self.material)) else {
            self.shrunk = None;
            return false;
        };
        match &self.shrunk {
            Some((before, since_ms)) if before.is_same(found) => {
                now_ms.saturating_sub(*since_ms) < SETTLE_MS
            }
            _ => {
                self.shrunk = Some((found.clone(), now_ms));
                true
            }
        }
    }

    /// Shows it from now on.
    fn take(&mut self, material: Material) {
        // Before anything is said: who reads of it may count on it.
        self.shows.show(&material);
        let (old, new) = (self.material.certificate(), material.certificate());
        let key = self.listener.serves.key();
        match old.fingerprint == new.fingerprint {
            true => tracing::info!(
                "`{key}`: what belongs to the certificate with serial {} changed, and is in force",
                new.serial
            ),
            false => tracing::info!(
                "`{key}`: new connections see the certificate with serial {}, for {}, until {}; it was {}",
                new.serial,
                new.hosts_shown(),
                new.not_after,
                old.serial
            ),
        }
        for remark in fit::remarks(&self.listener, new) {
            tracing::warn!("{remark}");
        }
        self.material = Arc::new(material);
    }
}
