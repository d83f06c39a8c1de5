//! What requests are told of a model that has no ready replica: the first thing that speaks against it.

use std::collections::BTreeMap;

use llmgw_proto::shard::ShardState;

use super::{State, View};
use crate::control::replicas::Replica;
use crate::control::snapshot::NodeState;
use crate::routing::outlook::{NONE_READY, Outlook};

pub(super) fn of_all(state: &State, view: &View) -> BTreeMap<String, Outlook> {
    let mut starting: BTreeMap<&str, usize> = BTreeMap::new();
    let replicas = Replica::all(&view.observed, &state.memory);
    for replica in &replicas {
        let ends = matches!(replica.state, ShardState::Draining | ShardState::Stopping);
        let comes = !replica.is_ready()
            && !ends
            && replica.node_state != NodeState::Lost
            && state.memory.leaving(&replica.key).is_none();
        *starting.entry(replica.model()).or_default() += usize::from(comes);
    }
    let one = |model: &String| {
        let reason = reason(state, view, model, starting.get(model.as_str()).copied());
        let outlook = Outlook {
            recovering: view.observed.recovering,
            reason,
        };
        (model.clone(), outlook)
    };
    state.desired.models.keys().map(one).collect()
}

fn reason(state: &State, view: &View, model: &str, starting: Option<usize>) -> String {
    if view.observed.recovering {
        return "the server has only just started, and its agents still report".to_owned();
    }
    match starting {
        Some(1) => return "1 replica is starting".to_owned(),
        Some(number @ 2..) => return format!("{number} replicas are starting"),
        Some(0) | None => {}
    }
    if let Some(failures) = state.memory.failures(model)
        && failures.not_before_ms > view.observed.now_ms
        && let Some(last) = failures.kept.back()
    {
        let place = last.node.as_ref();
        let place = place.map_or_else(String::new, |node| format!(" on {node}"));
        return format!(
            "{} failed{place} ({}) and is tried again in a while",
            last.replica, last.reason
        );
    }
    match state.unplaced.get(model) {
        Some(unplaced) => unplaced.reason.clone(),
        None => NONE_READY.to_owned(),
    }
}
