//! A node, for people and tools: what there is of it, what it runs, and until when its certificate is good.

use std::collections::BTreeMap;

use llmgw_proto::identity::Moment;
use llmgw_proto::identity::moment::EXPIRY_WARNED_DAYS;
use serde::Serialize;

use super::operator::drain_reason;
use super::{State, View};
use crate::control::observed::{NodeCertificate, ObservedNode};
use crate::control::replicas::Replica;
use crate::control::snapshot::{NodeState, Snapshot};

/// A node, for people and tools.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeReport {
    pub id: String,
    pub state: &'static str,
    /// Why it is absent, what is wrong with it, or what its drain waits for; empty: nothing.
    pub reason: String,
    pub address: String,
    pub agent_version: String,
    pub labels: BTreeMap<String, String>,
    pub engines: Vec<String>,
    pub gpu_class: Option<String>,
    pub gpus: usize,
    pub gpus_free: usize,
    pub cpus: u32,
    pub cpus_free: u32,
    pub memory_gib: f64,
    pub memory_gib_free: f64,
    pub replicas: Vec<String>,
    /// Those of them that are out of the pool for good. An absent node hears of it when it is back.
    pub leaving: Vec<String>,
    pub last_heard_ms_ago: u64,
    /// What it speaks with; none without TLS.
    pub certificate: Option<CertificateReport>,
}

/// What a node speaks with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CertificateReport {
    pub name: String,
    pub serial: String,
    /// As `2026-12-31T18:30:00Z`.
    pub not_after: String,
    /// Whole days by the server's clock, negative once it is over.
    pub days_left: i64,
}

impl CertificateReport {
    fn of(certificate: &NodeCertificate, now: Moment) -> CertificateReport {
        CertificateReport {
            name: certificate.name.clone(),
            serial: certificate.serial.to_string(),
            not_after: certificate.not_after.to_string(),
            days_left: certificate.not_after.days_from(now),
        }
    }

    /// What is said of it while there is time, and when there is none.
    fn soon(&self) -> Option<String> {
        let (days, end) = (self.days_left, &self.not_after);
        match days {
            ..0 => Some(format!(
                "its certificate expired at {end}: it is not let in again without a new one"
            )),
            0..EXPIRY_WARNED_DAYS => Some(format!(
                "its certificate expires in {days} d, at {end}: `llmgw ctl cert renew` makes it last longer"
            )),
            _ => None,
        }
    }
}

pub(super) fn node_report(
    id: &str,
    seen: &ObservedNode,
    fleet: &Snapshot,
    replicas: &[Replica],
    state: &State,
    view: &View,
    requests: &dyn Fn(&str) -> u32,
) -> NodeReport {
    let node = fleet.nodes.get(id).cloned().unwrap_or_default();
    let mine: Vec<&Replica> = replicas
        .iter()
        .filter(|replica| replica.key.node == id)
        .collect();
    let certificate = seen.certificate.as_ref();
    let certificate = certificate.map(|shown| CertificateReport::of(shown, Moment::now()));
    let is_draining = node.state == NodeState::Draining;
    let mut reason = match (&seen.absence, &node.problem) {
        (Some(absence), _) => match &absence.refused {
            Some(why) => format!("refused: {why}"),
            None => absence.cause.to_string(),
        },
        (None, Some(problem)) => problem.clone(),
        (None, None) if is_draining && mine.is_empty() => "it is empty".to_owned(),
        (None, None) if is_draining => drain_reason(&mine, state, requests),
        (None, None) => String::new(),
    };
    let soon = certificate.as_ref().and_then(CertificateReport::soon);
    for more in not_gone(seen).into_iter().chain(soon) {
        let gap = if reason.is_empty() { "" } else { "; " };
        reason = format!("{reason}{gap}{more}");
    }
    NodeReport {
        id: id.to_owned(),
        state: node.state.as_str(),
        reason,
        address: seen.advertise.clone(),
        agent_version: seen.agent_version.clone(),
        labels: seen.labels.clone(),
        engines: seen.engines.clone(),
        gpu_class: node.gpus.first().map(|gpu| gpu.class.clone()),
        gpus: node.gpus.len(),
        gpus_free: node.gpus.iter().filter(|gpu| gpu.free()).count(),
        cpus: node.cpus,
        cpus_free: node.cpus_free,
        memory_gib: node.memory_gib,
        memory_gib_free: node.memory_gib_free,
        replicas: names(mine.iter().copied()),
        leaving: names(
            mine.iter()
                .copied()
                .filter(|replica| state.memory.leaving(&replica.key).is_some()),
        ),
        last_heard_ms_ago: view.observed.now_ms.saturating_sub(seen.last_heard_ms),
        certificate,
    }
}

fn names<'a>(replicas: impl Iterator<Item = &'a Replica>) -> Vec<String> {
    replicas
        .map(|replica| replica.spec.replica.clone())
        .collect()
}

/// What holds GPUs, cores and memory although it failed.
fn not_gone(seen: &ObservedNode) -> Option<String> {
    let left = seen.shards.values();
    let left: Vec<&str> = left
        .filter(|shard| shard.status.is_not_gone())
        .map(|shard| &*shard.spec.replica)
        .collect();
    (!left.is_empty()).then(|| {
        format!(
            "what is left of {} does not end and keeps its place (not_gone)",
            left.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_is_near_or_past_is_said_with_what_to_do() {
        const DAY: i64 = 86_400;
        let certificate = NodeCertificate {
            name: "n1".to_owned(),
            serial: "0a".parse().expect("it is hex"),
            not_after: Moment(100 * DAY),
        };
        for (now, days, said) in [
            (0, 100, None),
            (70 * DAY, 30, None),
            (
                70 * DAY + 1,
                29,
                Some(
                    "its certificate expires in 29 d, at 1970-04-11T00:00:00Z: `llmgw ctl cert renew`",
                ),
            ),
            (100 * DAY, 0, Some("expires in 0 d")),
            (
                100 * DAY + 1,
                -1,
                Some("its certificate expired at 1970-04-11T00:00:00Z: it is not let in again"),
            ),
        ] {
            let report = CertificateReport::of(&certificate, Moment(now));
            assert_eq!((report.days_left, report.serial.as_str()), (days, "a"));
            match (report.soon(), said) {
                (Some(told), Some(said)) => assert!(told.contains(said), "{told}"),
                (told, said) => assert_eq!(told.as_deref(), said),
            }
        }
    }
}
