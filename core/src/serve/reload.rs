//! A configuration that changed: read whole, checked, put in force, or refused with the last good one kept.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::agents::check_authority;
use super::fleet::Fleet;
use super::{ServerOptions, check_engines};
use crate::certificates::{Certificates, Staged};
use crate::clock;
use crate::config::{self, Config, ConfigWatch};
use crate::gateway::state::Gateway;

/// Changes of the file that may wait to be looked at: only the last one matters.
const PENDING_MAX: usize = 1;
/// How often a configuration is tried again that was not taken.
const RETRY: Duration = Duration::from_secs(10);

/// Reloads of one server: by a file that changed, by SIGHUP, by `ctl reload`.
pub struct Reloads {
    options: ServerOptions,
    gateway: Arc<Gateway>,
    /// The agents, and what runs on them. None: nothing is started here.
    fleet: Option<Fleet>,
    certificates: Arc<Certificates>,
    /// The configuration of the start: what needs a restart is in force from it.
    at_start: Arc<Config>,
    /// Held from reading the file until it is in force: of two reloads at once the later one must win, and each must
    /// see the fleet that the other one made, else its probes would never end.
    turn: Mutex<()>,
    /// A reload in the background waits for its turn; a further one would find nothing else.
    is_waiting: AtomicBool,
    background_turn: Mutex<()>,
    state: Mutex<State>,
}

/// Whether an operator means it, whatever it stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confirmed {
    Yes,
    No,
}

/// What is in force, and what is not.
#[derive(Debug, Clone)]
pub struct State {
    pub loaded_at_ms: u64,
    pub last_error: Option<String>,
    /// What is wrong may be over without a word.
    is_retried: bool,
    /// The text as it was last read, where it could be.
    looked_at: Option<Digest>,
    /// The text that an operator confirmed, while it can't be used yet. Whoever reads it next, it is meant.
    confirmed: Option<Digest>,
}

/// Of a configuration's text.
type Digest = [u8; 32];

/// Why the configuration is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Occasion {
    /// Somebody asked.
    Asked(Confirmed),
    /// The file changed.
    Changed,
    /// What kept it from being taken may be over.
    Retry,
}

/// Why a configuration is not in force.
struct NotTaken {
    why: String,
    /// An operator has to mean it. All else may be over by itself: certificates, keys and plugins may come later than what names them, and the
    /// file may have been half written or away as it was read, though the watch had seen it whole.
    is_held: bool,
}

impl From<String> for NotTaken {
    fn from(why: String) -> NotTaken {
        NotTaken {
            why,
            is_held: false,
        }
    }
}

impl Reloads {
    pub fn new(
        options: ServerOptions,
        gateway: Arc<Gateway>,
        fleet: Option<Fleet>,
        certificates: Arc<Certificates>,
    ) -> Arc<Reloads> {
        let at_start = gateway.runtime.load().config.clone();
        Arc::new(Reloads {
            options,
            at_start,
            gateway,
            fleet,
            certificates,
            turn: Mutex::new(()),
            is_waiting: AtomicBool::new(false),
            background_turn: Mutex::new(()),
            state: Mutex::new(State {
                loaded_at_ms: clock::unix_ms(),
                last_error: None,
                is_retried: false,
                looked_at: None,
                confirmed: None,
            }),
        })
    }

    pub fn state(&self) -> State {
        self.lock().clone()
    }

    /// Settings that changed since the start and take effect with the next one.
    pub fn needs_restart(&self) -> Vec<&'static str> {
        config::needs_restart(&self.at_start, &self.gateway.runtime.load().config)
    }

    /// What the configuration of the start would stop, and does not until an operator means it.
    pub fn held_since_start(&self) -> Option<String> {
        self.fleet.as_ref()?.controller.held_since_start()
    }

    /// Follows the file until the server stops.
    pub async fn watch(self: Arc<Self>, stop: CancellationToken) {
        let watch = ConfigWatch::new(&self.gateway.runtime.load().config);
        let (changed, mut changes) = mpsc::channel(PENDING_MAX);
        let mut policies = self.gateway.policies.changes();
        let watching = watch.run(stop.clone(), changed);
        let applying = async {
            loop {
                let occasion = tokio::select! {
                    changed = changes.recv() => match changed {
                        Some(_) => Occasion::Changed,
                        None => return,
                    },
                    // Perhaps the plugin of an engine that the configuration named before it was there.
                    Ok(()) = policies.changed() => Occasion::Retry,
                    () = tokio::time::sleep(RETRY) => Occasion::Retry,
                };
                if occasion == Occasion::Retry && !self.state().is_retried {
                    continue;
                }
                let reloads = self.clone();
                // The outcome is in the log and on the admin address. The file is read again, since a reload that
                // was asked for may have taken a newer one meanwhile.
                let taken = tokio::task::spawn_blocking(move || reloads.take(occasion));
                let _ = taken.await;
            }
        };
        tokio::join!(watching, applying);
    }

    /// Reads everything again, policies and certificates included. May block.
    pub fn now(&self, confirmed: Confirmed) -> Result<String, String> {
        let policies = self
            .gateway
            .policies
            .reload_asked()
            .map(|set| set.generation())
            .map_err(|error| error.to_string());
        let config = self.take(Occasion::Asked(confirmed));
        let certificates = self.certificates.look_now();
        match (config, policies, certificates) {
            (Ok(()), Ok(generation), Ok(())) => {
                let file = self.options.config.display();
                let mut said = format!("{file} is in force, policies generation {generation}");
                for key in self.needs_restart() {
                    said.push_str(&format!(
                        "; `{key}` changed: takes effect with the next start"
                    ));
                }
                Ok(said)
            }
            (config, policies, certificates) => {
                Err([config.err(), policies.err(), certificates.err()]
                    .into_iter()
                    .flatten()
                    .collect::<Vec<_>>()
                    .join("\n"))
            }
        }
    }

    /// As `now`, without waiting for it.
    pub fn in_background(self: Arc<Self>) {
        // Each holds a thread, for as long as the file system hangs: one at work and one that waits are enough.
        if self.is_waiting.swap(true, Ordering::Relaxed) {
            return;
        }
        tokio::task::spawn_blocking(move || {
            let turn = &self.background_turn;
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            self.is_waiting.store(false, Ordering::Relaxed);
            let _ = self.now(Confirmed::No);
        });
    }

    fn take(&self, occasion: Occasion) -> Result<(), String> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let read = config::load(&self.options.config);
        let text = read.as_ref().ok().map(Config::digest);
        // Nothing is to be confirmed again: while agents still report, what was confirmed has not stopped yet.
        let is_asked = matches!(occasion, Occasion::Asked(_));
        if !is_asked && text == Some(self.gateway.runtime.load().config.digest()) {
            self.nothing_wrong();
            return Ok(());
        }
        // A text that is new is the watch's, which waits until it is written whole. One that the watch doesn't bring is taken when it is found twice.
        let before = std::mem::replace(&mut self.lock().looked_at, text);
        if occasion == Occasion::Retry && text.is_some() && text != before {
            return Ok(());
        }
        let confirmed = match occasion {
            Occasion::Asked(Confirmed::Yes) => Confirmed::Yes,
            _ if text.is_some() && text == self.state().confirmed => Confirmed::Yes,
            _ => Confirmed::No,
        };
        let outcome = read
            .map_err(|errors| NotTaken::from(errors.to_string()))
            .and_then(|config| self.checked(config, confirmed))
            .map(|(staged, config)| self.apply(config, staged, confirmed));
        self.note(occasion, &outcome);
        if let Some(text) = text {
            let waits = outcome.is_err() && confirmed == Confirmed::Yes;
            self.lock().confirmed = waits.then_some(text);
        }
        outcome.map_err(|not| not.why)
    }

    /// Keeps what came of it, for people and for the next try.
    fn note(&self, occasion: Occasion, outcome: &Result<(), NotTaken>) {
        let mut state = self.lock();
        // What a retry finds as it was is known; who asks is told each time.
        let is_news = match outcome {
            Ok(()) => true,
            Err(not) => occasion != Occasion::Retry || state.last_error.as_ref() != Some(&not.why),
        };
        if is_news {
            let metrics = &self.gateway.telemetry.metrics;
            metrics.config_reloaded(outcome.is_ok());
        }
        state.is_retried = outcome.as_ref().is_err_and(|not| !not.is_held);
        match outcome {
            Ok(()) => {
                state.loaded_at_ms = clock::unix_ms();
                state.last_error = None;
            }
            Err(NotTaken { why, .. }) => {
                if is_news {
                    tracing::error!(
                        "the configuration was not reloaded, the last good one stays:\n{why}"
                    );
                }
                state.last_error = Some(why.clone());
            }
        }
    }

    /// The file holds what is in force, also after a mistake was taken back.
    fn nothing_wrong(&self) {
        let mut state = self.lock();
        (state.is_retried, state.confirmed) = (false, None);
        if state.last_error.take().is_some() {
            tracing::info!("the configuration's file holds what is in force again");
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The configuration of now, and what is in the files that it names.
    fn checked(&self, config: Config, confirmed: Confirmed) -> Result<(Staged, Config), NotTaken> {
        // The command line wins over the file at a reload as it does at the start.
        let config = self.options.over(config)?;
        check_engines(&config, &self.gateway.policies).map_err(|error| error.to_string())?;
        check_authority(&config)?;
        let config = self.meant(config, confirmed)?;
        let staged = self.certificates.stage(&config)?;
        if let Some(fleet) = &self.fleet {
            let signs = fleet.may_sign(config.agents.as_ref());
            signs.map_err(|problem| problem.to_string())?;
        }
        Ok((staged, config))
    }

    /// A change that would stop most of what runs is a mistake until somebody says that it is not.
    fn meant(&self, config: Config, confirmed: Confirmed) -> Result<Config, NotTaken> {
        let held = match (confirmed, &self.fleet) {
            (Confirmed::No, Some(fleet)) => fleet.controller.held(&config.catalog),
            _ => None,
        };
        match held {
            None => Ok(config),
            Some(held) => Err(NotTaken {
                why: format!("the change {held}"),
                is_held: true,
            }),
        }
    }

    fn apply(&self, config: Config, staged: Staged, confirmed: Confirmed) {
        for key in config::needs_restart(&self.at_start, &config) {
            tracing::warn!("`{key}` changed; it takes effect with the next start");
        }
        let models = config.catalog.models.len();
        if let Some(fleet) = &self.fleet {
            fleet.configured(config.agents.as_ref());
        }
        self.certificates.put(staged);
        self.gateway.apply(config);
        if let Some(fleet) = &self.fleet {
            fleet.controller.configured(confirmed == Confirmed::Yes);
        }
        tracing::info!("configuration reloaded: {models} models");
    }
}

#[cfg(test)]
mod tests;
