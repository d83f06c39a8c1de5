//! A catalog that would stop most of what runs is a mistake until an operator says that it is not, at a reload and at a start alike.

use std::collections::{BTreeMap, BTreeSet};
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
pub(super) struct StartHold {
    verdict: Verdict,
    /// Nodes whose replicas were judged, of those that there are.
    judged: BTreeSet<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Verdict {
    /// The fleet had no time to report yet, or nothing ran on it.
    #[default]
    Unjudged,
    /// It stops little of what ran so far. Nodes that join later may run more.
    Fine,
    /// What it would stop goes on running.
    Held {
        held: Held,
        /// So does what there is too much of.
        with_surplus: bool,
    },
    /// It is meant.
    Over,
}

impl Held {
    /// None: at most half of what runs would stop.
    pub(super) fn of(after: &Desired, observed: &Observed, memory: &Memory) -> Option<Held> {
        let (stops, of) = would_stop(after, observed, memory);
        Held::of_stops(stops, of)
    }

    fn of_stops(stops: BTreeMap<String, usize>, of: usize) -> Option<Held> {
        let number: usize = stops.values().sum();
        (number * 2 > of).then_some(Held { stops, of })
    }
}

impl StartHold {
    /// First what runs when the recovery is over, then again with each node that registers for the first time. Of a model that is declared,
    /// what is too much later is the fleet's doing (a lost node came back), not the catalog's.
    pub(super) fn judge(&mut self, desired: &Desired, observed: &Observed, memory: &Memory) {
        if observed.recovering || self.verdict == Verdict::Over {
            return;
        }
        let with_surplus = match &self.verdict {
            Verdict::Held { with_surplus, .. } => *with_surplus,
            verdict => *verdict == Verdict::Unjudged,
        };
        let nodes = &observed.nodes;
        self.judged.retain(|id| nodes.contains_key(id));
        let is_late = |id: &String| !self.judged.contains(id);
        if self.verdict != Verdict::Unjudged && !nodes.keys().any(is_late) {
            return;
        }
        let (mut stops, of) = would_stop(desired, observed, memory);
        if of == 0 {
            return;
        }
        stops.retain(|model, _| with_surplus || !desired.models.contains_key(model));
        self.judged = nodes.keys().cloned().collect();
        match (Held::of_stops(stops, of), &self.verdict) {
            (Some(held), before) => {
                if !matches!(before, Verdict::Held { .. }) {
                    tracing::error!("{}", StartHold::sentence(&held));
                }
                self.verdict = Verdict::Held { held, with_surplus };
            }
            (None, Verdict::Unjudged) => self.verdict = Verdict::Fine,
            (None, _) => {}
        }
    }

    /// Another catalog is in force, which an operator said is meant, or which was seen to stop little.
    pub(super) fn end(&mut self, is_confirmed: bool) {
        // While the fleet still reports, or runs nothing, little was seen of what would stop.
        if is_confirmed || self.verdict != Verdict::Unjudged {
            self.verdict = Verdict::Over;
            self.judged.clear();
        }
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(self.verdict, Verdict::Held { .. })
    }

    /// Whether this is done only once an operator means it.
    pub(super) fn keeps_from(&self, action: &Action) -> bool {
        let (Action::Leave { why, .. } | Action::Stop { why, .. }) = action else {
            return false;
        };
        let Verdict::Held { with_surplus, .. } = self.verdict else {
            return false;
        };
        *why == Why::NotInCatalog || (with_surplus && *why == Why::Surplus)
    }

    /// What is held, for people.
    pub(super) fn said(&self) -> Option<String> {
        match &self.verdict {
            Verdict::Held { held, .. } => Some(StartHold::sentence(held)),
            Verdict::Unjudged | Verdict::Fine | Verdict::Over => None,
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

#[cfg(test)]
mod tests {
    use llmgw_proto::session::StopHow;
    use llmgw_proto::shard::ShardState::Ready;

    use super::*;
    use crate::control::reconcile::Wanted;
    use crate::control::tests::nodes::{Nodes, key};

    /// So many of model `m`, and no other model.
    fn wanted(replicas: u32) -> Desired {
        let wanted = Wanted {
            replicas,
            ..Wanted::default()
        };
        Desired {
            models: [("m".to_owned(), wanted)].into(),
        }
    }

    fn judged(hold: &mut StartHold, desired: &Desired, nodes: &Nodes) -> Option<(usize, usize)> {
        hold.judge(desired, &nodes.0, &Memory::default());
        match &hold.verdict {
            Verdict::Held { held, .. } => Some((held.stops.values().sum(), held.of)),
            _ => None,
        }
    }

    fn keeps(hold: &StartHold, why: Why) -> bool {
        hold.keeps_from(&Action::Stop {
            key: key("a", "m/0"),
            how: StopHow::Stop,
            why,
        })
    }

    #[test]
    fn an_empty_fleet_judges_nothing_and_nodes_that_join_late_are_judged_as_they_come() {
        let (mut hold, catalog) = (StartHold::default(), wanted(1));
        // As with `recovery: 0s`.
        assert_eq!(judged(&mut hold, &catalog, &Nodes::new(&[])), None);
        assert_eq!(judged(&mut hold, &catalog, &Nodes::new(&["c"])), None);
        hold.end(false);
        assert_eq!(hold.verdict, Verdict::Unjudged, "nothing was seen to stop");
        let first = || Nodes::new(&["a", "b"]).with("a", "m/0", Ready);
        assert_eq!(judged(&mut hold, &catalog, &first()), None);
        let late = Nodes::new(&["a", "b", "c"])
            .with("a", "m/0", Ready)
            .with("c", "x/0", Ready)
            .with("c", "x/1", Ready);
        assert_eq!(judged(&mut hold, &catalog, &late), Some((2, 3)));
        assert!(keeps(&hold, Why::NotInCatalog) && !keeps(&hold, Why::Surplus));
        let later = late.edit("b", |_| {});
        assert_eq!(judged(&mut hold, &catalog, &later), Some((2, 3)));
        hold.end(false);
        assert!(!keeps(&hold, Why::NotInCatalog));
        assert_eq!(judged(&mut hold, &wanted(0), &later), None, "a reload asks");
    }

    #[test]
    fn a_smaller_number_is_held_at_the_first_judgement_and_what_a_lost_node_brings_back_is_not() {
        let three = || {
            Nodes::new(&["a", "b"])
                .with("a", "m/0", Ready)
                .with("b", "m/1", Ready)
                .with("b", "m/2", Ready)
        };
        let mut hold = StartHold::default();
        assert_eq!(judged(&mut hold, &wanted(1), &three()), Some((2, 3)));
        assert!(keeps(&hold, Why::Surplus) && !keeps(&hold, Why::NodeDrains));
        let mut hold = StartHold::default();
        let one = Nodes::new(&["a"]).with("a", "m/0", Ready);
        assert_eq!(judged(&mut hold, &wanted(1), &one), None);
        assert_eq!(judged(&mut hold, &wanted(1), &three()), None);
        assert!(!keeps(&hold, Why::Surplus));
    }
}
