//! A catalog that would stop most of what runs is a mistake until an operator says that it is not, at a reload and at a start alike.

use std::collections::BTreeMap;
use std::fmt;

use crate::control::memory::Memory;
use crate::control::observed::Observed;
use crate::control::reconcile::{Action, Desired, Why, would_stop};

/// What would stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Replicas that would stop, by model.
    pub stops: BTreeMap<String, usize>,
    /// Replicas that run.
    pub of: usize,
}

/// The catalog that the server started with: nobody could be asked before it was in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum StartHold {
    /// The fleet had no time to report yet.
    #[default]
    Unjudged,
    /// What it would stop goes on running.
    Held(Held),
    /// It is meant.
    Over,
}

impl Held {
    /// None: at most half of what runs would stop.
    pub(super) fn of(after: &Desired, observed: &Observed, memory: &Memory) -> Option<Held> {
        let (stops, of) = would_stop(after, observed, memory);
        let number: usize = stops.values().sum();
        (number * 2 > of).then_some(Held { stops, of })
    }
}

impl StartHold {
    /// Once, when the recovery is over: what is too much later is the fleet's doing, not the catalog's.
    pub(super) fn judge(&mut self, desired: &Desired, observed: &Observed, memory: &Memory) {
        if *self != StartHold::Unjudged || observed.recovering {
            return;
        }
        *self = match Held::of(desired, observed, memory) {
            Some(held) => {
                tracing::error!("{}", StartHold::sentence(&held));
                StartHold::Held(held)
            }
            None => StartHold::Over,
        };
    }

    /// Whether this is done only once an operator means it.
    pub(super) fn keeps_from(&self, action: &Action) -> bool {
        let (Action::Leave { why, .. } | Action::Stop { why, .. }) = action else {
            return false;
        };
        let is_catalogs = matches!(why, Why::NotInCatalog | Why::Surplus);
        is_catalogs && matches!(self, StartHold::Held(_))
    }

    /// What is held, for people.
    pub(super) fn said(&self) -> Option<String> {
        match self {
            StartHold::Held(held) => Some(StartHold::sentence(held)),
            StartHold::Unjudged | StartHold::Over => None,
        }
    }

    fn sentence(held: &Held) -> String {
        format!("the configuration that the server started with {held}")
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stops: usize = self.stops.values().sum();
        let models = self.stops.iter();
        let models: Vec<String> = models
            .map(|(model, number)| format!("{model}: {number}"))
            .collect();
        write!(
            f,
            "would stop {stops} of {} running replicas ({}), so it is held; `llmgw ctl reload --confirm` puts it in force",
            self.of,
            models.join(", ")
        )
    }
}
