//! Placement hooks: may a job run on a node, and how good is a candidate.
//!
//! Both are asked many times for one decision, so they share one budget: a [`Decision`].

use std::time::{Duration, Instant};

use mlua::Value;
use serde::Serialize;

use crate::error::{ErrorKind, Fault};
use crate::hooks::Hook;
use crate::hooks::returns::{self, Clamped};
use crate::hooks::views::{Domain, FieldDoc, IntoField, LuaType, View, view};
use crate::set::PolicySet;
use crate::test::inputs::{Given, Overlay};
use crate::vm::Vm;
use crate::vm::budget::{DECISION_MAX, Limit};
use crate::vm::crossing::Answer;

view! {
    /// One replica that needs a place.
    "job" JobView<'a> {
        /// `gpu` or `cpu`.
        kind: &'a str,
        /// The model.
        model: &'a str,
        /// The profile that is tried.
        profile: &'a str,
        /// Its engine.
        engine: &'a str,
        /// GPUs in all.
        gpus: u32,
        /// GPUs on each node.
        gpus_per_node: u32,
        /// Nodes that it spans.
        nodes: u32,
        /// GPU class; unknown for CPU.
        gpu_class: Option<&'a str>,
        /// Cores on each node.
        cpus: Option<u32>,
        /// Memory on each node, in GiB.
        memory_gib: Option<f64>,
        /// Number of this replica, from 0.
        replica: u32,
        /// Replicas wanted.
        replicas: u32,
        /// The model's labels.
        labels: &'a [(String, String)],
    }
}

view! {
    /// A machine.
    "node" NodeView<'a> {
        /// Its name.
        id: &'a str,
        /// Labels that the operator gave it.
        labels: &'a [(String, String)],
        /// Its rack.
        rack: Option<&'a str>,
        /// Its zone.
        zone: Option<&'a str>,
        /// The fabric of its adapters.
        fabric: Option<&'a str>,
        /// Class of its GPUs; unknown without any.
        gpu_class: Option<&'a str>,
        /// GPUs.
        gpus: u32,
        /// Of these, free and healthy ones.
        gpus_free: u32,
        /// Its NVLink domains.
        domains: &'a [Domain],
        /// Cores.
        cpus: u32,
        /// Of these, unclaimed ones.
        cpus_free: u32,
        /// Unclaimed memory, in GiB.
        memory_gib_free: f64,
        /// `ready`, `draining`, `unreachable` or `lost`.
        state: &'a str,
    }
}

view! {
    /// A complete place for a job: one node, or a gang of them.
    "candidate" CandidateView<'a> {
        /// Names of its nodes.
        nodes: &'a [String],
        /// GPUs that it would take.
        gpus: u32,
        /// NVLink domains that it would touch.
        domains: u32,
        /// Of these, domains that would be full afterwards.
        domains_filled: u32,
        /// Share of its nodes' GPUs that would be in use afterwards, 0..1.
        gpu_after: f64,
        /// Share of its nodes' cores that would be claimed afterwards, 0..1.
        cpu_after: f64,
        /// NVLink domains that it would break up, less those that it would fill.
        frag_delta: f64,
        /// Fabrics that it would span.
        fabrics: u32,
        /// Replicas of the same model on its nodes.
        same_node: u32,
        /// Replicas of the same model in its racks.
        same_rack: u32,
        /// Replicas of the same model in its zones.
        same_zone: u32,
        /// Share of its nodes that hold the weights already, 0..1.
        cached: Option<f64>,
    }
}

/// Whether a job may run on a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It may.
    Fit,
    /// It may not.
    Unfit {
        /// Stable reason, `[a-z_]{1,32}`; `policy_error` when the hook failed.
        code: String,
        /// For people.
        text: String,
    },
}

/// How good a candidate is; higher is better.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Score {
    /// The sum of all parts.
    pub total: f64,
    /// What it is made of, sorted by name; `explain` shows it.
    pub parts: Vec<(String, f64)>,
}

/// The code of a node that is unfit because the hook failed.
pub const POLICY_ERROR: &str = "policy_error";
/// Why a filter that has tripped refuses.
const SWITCHED_OFF: &str =
    "placement.filter failed too often and is switched off: see `llmgw ctl policies`";
/// Range of one part of a score.
const PART_RANGE: (f64, f64) = (-1000.0, 1000.0);
/// Parts at most.
const PARTS_MAX: usize = 32;
/// Length of a refusal's text.
const TEXT_MAX_BYTES: usize = 200;

/// One placement decision: its calls share 500 ms.
#[derive(Debug)]
pub struct Decision<'s> {
    set: &'s PolicySet,
    /// Time that hooks have used so far.
    used: Duration,
}

impl PolicySet {
    /// Begins a decision. It sees this generation only.
    pub fn decision(&self) -> Decision<'_> {
        Decision {
            set: self,
            used: Duration::ZERO,
        }
    }
}

impl Decision<'_> {
    /// May this job run on this node? Fails closed: a hook that fails refuses the node, and one that failed so often that it
    /// is switched off refuses all, since nobody knows any more what it would have kept out.
    pub fn filter(&mut self, job: &JobView<'_>, node: &NodeView<'_>) -> Verdict {
        if !self.set.defined[Hook::PlacementFilter as usize] {
            return Verdict::Fit;
        }
        if self.set.trips.is_tripped(Hook::PlacementFilter) {
            return Verdict::Unfit {
                code: POLICY_ERROR.to_owned(),
                text: SWITCHED_OFF.to_owned(),
            };
        }
        self.call(Hook::PlacementFilter, |vm, limit| {
            filter(vm, limit, job, node)
        })
        .unwrap_or_else(|fault| Verdict::Unfit {
            code: POLICY_ERROR.to_owned(),
            text: crate::vm::sandbox::cut(&fault.message, TEXT_MAX_BYTES),
        })
    }

    /// How good is this candidate? `None`: the hook failed, so the candidate goes last; when it failed for all of them
    /// [`Score::native`] decides.
    pub fn score(&mut self, job: &JobView<'_>, candidate: &CandidateView<'_>) -> Option<Score> {
        if !self.set.defines(Hook::PlacementScore) {
            return Some(Score::native(job, candidate));
        }
        let (score, faults) = self
            .call(Hook::PlacementScore, |vm, limit| {
                score(vm, limit, job, candidate)
            })
            .ok()?;
        faults
            .iter()
            .for_each(|fault| self.set.note(Hook::PlacementScore, fault));
        Some(score)
    }

    fn call<R>(
        &mut self,
        hook: Hook,
        work: impl FnOnce(&mut Vm, Limit) -> Result<R, Fault>,
    ) -> Result<R, Fault> {
        let left = DECISION_MAX.saturating_sub(self.used);
        if left.is_zero() {
            // Noted when it happened: the rest of the decision is no further failure.
            let message = format!(
                "the decision took longer than {} ms",
                DECISION_MAX.as_millis()
            );
            return Err(Fault::new(ErrorKind::Budget, message));
        }
        let start = Instant::now();
        let result = self.set.run(|vm| work(vm, Limit::Clock(left)));
        self.used += start.elapsed();
        if let Err(fault) = &result {
            self.set.note(hook, fault);
        }
        result
    }
}

impl Score {
    /// The native score, which `placement.lua` writes out.
    pub fn native(job: &JobView<'_>, candidate: &CandidateView<'_>) -> Score {
        let apart = match candidate {
            CandidateView { same_node: 1.., .. } => 0.0,
            CandidateView { same_rack: 1.., .. } => 0.5,
            CandidateView { same_zone: 1.., .. } => 0.75,
            _ => 1.0,
        };
        let parts = if job.kind == "cpu" {
            vec![
                ("idle", 40.0 * (1.0 - candidate.cpu_after)),
                ("spread", 60.0 * apart),
            ]
        } else {
            vec![
                ("cached", 10.0 * candidate.cached.unwrap_or(0.0)),
                (
                    "fabric",
                    -10.0 * f64::from(candidate.fabrics.saturating_sub(1)),
                ),
                ("frag", -25.0 * candidate.frag_delta),
                ("pack", 40.0 * candidate.gpu_after),
                ("spread", 20.0 * apart),
            ]
        };
        Score::of(
            parts
                .into_iter()
                .map(|(name, part)| (name.to_owned(), part + 0.0))
                .collect(),
        )
    }

    fn of(mut parts: Vec<(String, f64)>) -> Score {
        parts.sort_by(|a, b| a.0.cmp(&b.0));
        Score {
            total: parts.iter().map(|(_, part)| part).sum(),
            parts,
        }
    }
}

pub(crate) fn filter(
    vm: &mut Vm,
    limit: Limit,
    job: &JobView<'_>,
    node: &NodeView<'_>,
) -> Result<Verdict, Fault> {
    let answers = vm.ask(Hook::PlacementFilter, limit, 0, |inputs, into| {
        Ok([inputs.job.arg(into, job)?, inputs.node.arg(into, node)?])
    })?;
    verdict(&answers)
}

fn verdict([fits, code, text]: &[Answer<'_>; 3]) -> Result<Verdict, Fault> {
    match fits {
        Answer::Flag(true) => Ok(Verdict::Fit),
        Answer::Flag(false) => {
            let code = code.text(TEXT_MAX_BYTES).ok_or_else(|| {
                Fault::new(ErrorKind::Nil, "filter returned false without a code")
            })?;
            let is_code = (1..=32).contains(&code.len())
                && code.bytes().all(|b| b == b'_' || b.is_ascii_lowercase());
            if !is_code {
                return Err(Fault::new(
                    ErrorKind::Range,
                    format!("code '{code}' is not 1 to 32 of a-z and _"),
                ));
            }
            Ok(Verdict::Unfit {
                text: text
                    .text(TEXT_MAX_BYTES)
                    .unwrap_or_else(|| code.replace('_', " ")),
                code,
            })
        }
        Answer::Nil => Err(Fault::new(
            ErrorKind::Nil,
            "filter returned nil, true or false is needed",
        )),
        other => Err(Fault::new(
            ErrorKind::Error,
            format!(
                "filter returned a {}, true or false is needed",
                other.type_name()
            ),
        )),
    }
}

pub(crate) fn score(
    vm: &mut Vm,
    limit: Limit,
    job: &JobView<'_>,
    candidate: &CandidateView<'_>,
) -> Result<Clamped<Score>, Fault> {
    let value = vm.call(Hook::PlacementScore, limit, 0, |inputs, into| {
        Ok([
            inputs.job.arg(into, job)?,
            inputs.candidate.arg(into, candidate)?,
        ])
    })?;
    parts(&value)
}

fn parts(value: &Value) -> Result<Clamped<Score>, Fault> {
    let mut faults = Vec::new();
    let Value::Table(table) = value else {
        let total = returns::clamped(value, "score", PART_RANGE, &mut faults)?;
        return Ok((Score::of(vec![("score".to_owned(), total)]), faults));
    };
    let mut parts = Vec::new();
    for pair in table.pairs::<Value, Value>() {
        let (name, value) = pair.map_err(|e| crate::vm::sandbox::fault(&e))?;
        let Value::String(name) = &name else {
            return Err(Fault::new(
                ErrorKind::Error,
                "a part of a score needs a name",
            ));
        };
        if parts.len() == PARTS_MAX {
            return Err(Fault::new(
                ErrorKind::Range,
                format!("a score has at most {PARTS_MAX} parts"),
            ));
        }
        let name = crate::vm::sandbox::cut(&name.to_string_lossy(), 32);
        let part = returns::clamped(&value, &format!("part '{name}'"), PART_RANGE, &mut faults)?;
        parts.push((name, part));
    }
    Ok((Score::of(parts), faults))
}
