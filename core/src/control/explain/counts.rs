//! One profile's refusals, counted by reason, and the nodes that come closest.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde::Serialize;

use crate::control::placement::{Attempt, Reason, code};

/// What became of one profile.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProfileAnswer {
    pub profile: String,
    /// `1 node x 8 h100-sxm-80g in one NVLink domain`, after the profile's name.
    pub asked: String,
    pub fleet: FleetCount,
    /// The reason that alone refuses most nodes first. Empty only where every node fits.
    pub why: Vec<CodeCount>,
    /// At most [`NEAREST_MAX`], the closest first.
    pub nearest: Vec<Nearest>,
    /// All nodes that come into question, the closest first, for what is tried with them.
    #[serde(skip)]
    pub(super) closest: Vec<String>,
}

/// Nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FleetCount {
    pub nodes: usize,
    /// Nodes that have no GPU where the profile needs one; they are not considered.
    pub without_gpu: usize,
    pub considered: usize,
    /// Nodes that fit, for a gang in enough company.
    pub fit: usize,
}

/// One code.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CodeCount {
    pub code: String,
    /// Nodes that fail on it.
    pub nodes: usize,
    /// Nodes that fail on nothing else.
    pub alone: usize,
    /// `best ml-07: 6 free of 8`.
    pub detail: String,
}

/// A node and all that it lacks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Nearest {
    pub node: String,
    pub codes: Vec<String>,
    /// `2 more GPUs`.
    pub lacks: Vec<String>,
}

/// Nearest nodes that are shown.
pub const NEAREST_MAX: usize = 3;
/// Values that a detail lists.
const LISTED_MAX: usize = 4;
/// The code of a fleet without a node.
const NO_NODES: &str = "no_nodes";

/// A refused node.
type Refused<'a> = (&'a String, &'a Vec<Reason>);

impl ProfileAnswer {
    pub fn of(attempt: &Attempt) -> ProfileAnswer {
        let asked = attempt.need.to_string();
        let mut considered: Vec<Refused<'_>> = attempt
            .refused
            .iter()
            .filter(|(_, reasons)| !has(reasons, code::NO_GPU))
            .collect();
        let without_gpu = attempt.refused.len() - considered.len();
        considered.sort_by(closer);
        let in_question = considered.iter().filter(|(_, reasons)| !hopeless(reasons));
        let closest: Vec<String> = in_question.map(|(node, _)| (*node).clone()).collect();
        let shown = considered.iter().take(NEAREST_MAX);
        ProfileAnswer {
            profile: attempt.need.profile.clone(),
            asked,
            fleet: FleetCount {
                nodes: attempt.nodes,
                without_gpu,
                considered: attempt.nodes - without_gpu,
                fit: attempt.nodes - attempt.refused.len(),
            },
            why: why(attempt, &considered),
            nearest: shown.map(nearest).collect(),
            closest,
        }
    }
}

fn has(reasons: &[Reason], code: &str) -> bool {
    reasons.iter().any(|reason| reason.code == code)
}

/// Nothing that happens to replicas makes this node fit.
fn hopeless(reasons: &[Reason]) -> bool {
    let built_so = [code::NO_GPU, code::GPU_CLASS, code::GPU_COUNT, code::FP8];
    reasons
        .iter()
        .any(|reason| built_so.contains(&reason.code.as_str()))
}

/// How much has to happen: replicas come and go by themselves, somebody has to repair, or other cards are needed.
fn effort(reasons: &[Reason]) -> u8 {
    let by_hand = [
        code::NODE_STATE,
        code::ENGINE,
        code::UNHEALTHY,
        code::GPUS_HELD,
        code::POLICY_ERROR,
    ];
    match hopeless(reasons) {
        true => 2,
        false => u8::from(
            reasons
                .iter()
                .any(|reason| reason.policy || by_hand.contains(&reason.code.as_str())),
        ),
    }
}

/// Nodes for which less has to happen first, then fewer reasons, then less that is missing.
fn closer(a: &Refused<'_>, b: &Refused<'_>) -> Ordering {
    let missing = |reasons: &[Reason]| -> f64 {
        let known = reasons.iter().map(Reason::deficit);
        known.filter(|missing| missing.is_finite()).sum()
    };
    effort(a.1)
        .cmp(&effort(b.1))
        .then_with(|| a.1.len().cmp(&b.1.len()))
        .then_with(|| missing(a.1).total_cmp(&missing(b.1)))
        .then_with(|| a.0.cmp(b.0))
}

fn nearest((node, reasons): &Refused<'_>) -> Nearest {
    Nearest {
        node: (*node).clone(),
        codes: reasons.iter().map(|reason| reason.code.clone()).collect(),
        lacks: reasons.iter().map(|reason| reason.lacks.clone()).collect(),
    }
}

fn why(attempt: &Attempt, considered: &[Refused<'_>]) -> Vec<CodeCount> {
    if attempt.nodes == 0 {
        return vec![CodeCount {
            code: NO_NODES.to_owned(),
            nodes: 0,
            alone: 0,
            detail: "no node has registered".to_owned(),
        }];
    }
    let everyone: Vec<Refused<'_>> = attempt.refused.iter().collect();
    // Where no node has a GPU at all, that is the reason.
    let counted = match considered.is_empty() && attempt.fit == 0 {
        true => &everyone[..],
        false => considered,
    };
    let mut by_code: BTreeMap<&str, Vec<&Refused<'_>>> = BTreeMap::new();
    for refused in counted {
        for reason in refused.1 {
            let nodes = by_code.entry(reason.code.as_str()).or_default();
            // A policy may use a code of the kernel's; the node counts once.
            if nodes.last().is_none_or(|last| last.0 != refused.0) {
                nodes.push(refused);
            }
        }
    }
    let mut counts: Vec<CodeCount> = by_code
        .into_iter()
        .map(|(code, nodes)| CodeCount {
            alone: nodes
                .iter()
                .filter(|(_, reasons)| reasons.len() == 1)
                .count(),
            detail: detail(code, &nodes),
            nodes: nodes.len(),
            code: code.to_owned(),
        })
        .collect();
    let position = |count: &CodeCount| code::ALL.iter().position(|code| *code == count.code);
    counts.sort_by_key(|count| {
        let order = position(count).unwrap_or(code::ALL.len());
        (std::cmp::Reverse(count.alone), order, count.code.clone())
    });
    counts
}

/// The node that comes closest, or what there is instead.
fn detail(code: &str, nodes: &[&Refused<'_>]) -> String {
    let reason = |refused: &Refused<'_>| -> Reason {
        let found = refused.1.iter().find(|reason| reason.code == code);
        found.cloned().expect("the nodes were chosen by this code")
    };
    let reasons: Vec<(&String, Reason)> = nodes.iter().map(|node| (node.0, reason(node))).collect();
    let is_kind = code == code::GPU_CLASS || code == code::NO_GPU;
    if is_kind || code == code::NODE_STATE {
        let one = |(node, reason): &(&String, Reason)| match is_kind {
            true => reason.short.clone(),
            // Somebody has to do something about each of them.
            false => format!("{node}: {}", reason.short),
        };
        let mut kinds: Vec<String> = reasons.iter().map(one).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let more = kinds.len().saturating_sub(LISTED_MAX);
        kinds.truncate(LISTED_MAX);
        let listed = kinds.join(", ");
        return match more {
            0 => listed,
            more => format!("{listed} and {more} more"),
        };
    }
    // Of the nodes that have the right cards, the one that lacks least.
    let least = (0..nodes.len()).min_by(|a, b| {
        let deficit = |at: usize| (hopeless(nodes[at].1), reasons[at].1.deficit());
        let (a, b) = (deficit(*a), deficit(*b));
        a.0.cmp(&b.0).then_with(|| a.1.total_cmp(&b.1))
    });
    let Some((node, best)) = least.map(|at| &reasons[at]) else {
        return String::new();
    };
    let compared = [
        code::GPU_COUNT,
        code::GPUS_BUSY,
        code::DOMAIN_SPLIT,
        code::CPUS,
        code::MEMORY,
    ];
    let prefix = if compared.contains(&code) {
        "best "
    } else {
        ""
    };
    format!("{prefix}{node}: {}", best.short)
}
