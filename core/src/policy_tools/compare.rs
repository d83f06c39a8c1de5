//! Two policy sets over the same questions: where a replica goes, which replica gets a request, which band it waits in.

use std::collections::{BTreeMap, BTreeSet};

use llmgw_plugins::{
    Band, PolicySet, PoolView, RANK_CANDIDATES_MAX, ReplicaView, RequestView, TenantView,
};
use serde_json::Value;

use super::diff::{Change, Difference};
use crate::control::placement::{Attempt, Decision, JobSpec, Ranking, place};
use crate::control::snapshot::{PoolReplica, Snapshot};
use crate::policy::kernels;
use crate::routing::score::{Ask, Candidate, choose};

/// Prompts of the requests that are routed and classified, in tokens.
const PROMPTS_TOKENS: [u64; 3] = [200, 2000, 16_000];
/// Answers that they expect, in tokens.
const ANSWER_TOKENS: u64 = 200;
/// The same for both sets, so that equal candidates are told apart in the same way.
const SEED: u64 = 1;
/// Names of nodes that a line shows.
const NAMES_MAX: usize = 5;

/// Two sets, and what differs so far.
pub(super) struct Comparison<'s> {
    before: &'s PolicySet,
    after: &'s PolicySet,
    pub(super) found: Difference,
}

impl<'s> Comparison<'s> {
    pub(super) fn new(before: &'s PolicySet, after: &'s PolicySet) -> Comparison<'s> {
        Comparison {
            before,
            after,
            found: Difference::default(),
        }
    }

    /// What tick hooks say about an idle and a full pool. These are no decisions, but explain some.
    pub(super) fn numbers(&mut self) {
        let (idle, full) = (sample_pool(0.0), sample_pool(1.5));
        let named = [("", &idle), (" of a full pool", &full)];
        let mut seen = BTreeSet::new();
        for (suffix, pool) in named {
            let (before, after) = (numbers(self.before, pool), numbers(self.after, pool));
            let names: BTreeSet<&(&str, String)> = before.keys().chain(after.keys()).collect();
            for name in names {
                let shown = |numbers: &Numbers| numbers.get(name).cloned().unwrap_or("none".into());
                let (before, after) = (shown(&before), shown(&after));
                let change = (name.clone(), before.clone(), after.clone());
                if before != after && seen.insert(change) {
                    let (hook, field) = name;
                    self.found.changes.push(Change {
                        snapshot: None,
                        decision: format!("{field}{suffix}"),
                        before,
                        after,
                        reason: (*hook).to_owned(),
                    });
                }
            }
        }
    }

    /// The band of sample requests: every hint, by tenants of every default and best band.
    pub(super) fn bands(&mut self) {
        let mut bands: Vec<String> = Vec::new();
        for set in [self.before, self.after] {
            for band in set.bands_at_load() {
                if !bands.iter().any(|known| **known == *band.name) {
                    bands.push(band.name.to_string());
                }
            }
        }
        let hints: Vec<Option<&str>> = std::iter::once(None)
            .chain(bands.iter().map(|band| Some(band.as_str())))
            .collect();
        for (default, best) in bands.iter().flat_map(|d| bands.iter().map(move |b| (d, b))) {
            let tenant = TenantView {
                name: "example",
                band: default,
                best_band: best,
                weight: 1.0,
                ..TenantView::default()
            };
            for (hint, tokens) in hints
                .iter()
                .flat_map(|hint| PROMPTS_TOKENS.map(|n| (*hint, n)))
            {
                let request = sample_request("example", tokens, hint);
                let before = self.before.classify(&request, &tenant);
                let after = self.after.classify(&request, &tenant);
                let asks = hint.map_or(String::new(), |hint| format!(", asks for {hint}"));
                let decision = format!("band of {tokens} tokens, tenant {default}..{best}{asks}");
                let reason = "admission.classify, admission.bands".to_owned();
                self.compared(
                    None,
                    decision,
                    shown_band(&before),
                    shown_band(&after),
                    || reason,
                );
            }
        }
    }

    /// Every model's next replica, and sample requests to every pool.
    pub(super) fn fleet(&mut self, file: &str, snapshot: &Snapshot) {
        for model in snapshot.models.keys() {
            let Some(job) = JobSpec::of(snapshot, model, None) else {
                continue;
            };
            let before = place(snapshot, &job, &mut self.before.decision());
            let after = place(snapshot, &job, &mut self.after.decision());
            for attempt in &before.attempts {
                if let Some(other) = attempt_of(&after, &attempt.need.profile) {
                    self.refusals(file, model, attempt, other);
                }
            }
            self.compared(
                Some(file),
                format!("place {model}"),
                shown_place(&before),
                shown_place(&after),
                || place_reason(&before, &after),
            );
        }
        for (model, replicas) in &snapshot.pools {
            for tokens in PROMPTS_TOKENS {
                let before = route(self.before, snapshot, model, replicas, tokens);
                let after = route(self.after, snapshot, model, replicas, tokens);
                let reason = match (&before, &after) {
                    (Some((_, false)), Some((_, false))) => "routing.weights",
                    _ => "routing.rank",
                };
                let shown = |route: &Option<(String, bool)>| {
                    route
                        .as_ref()
                        .map_or("nowhere".to_owned(), |(id, _)| id.clone())
                };
                self.compared(
                    Some(file),
                    format!("route {tokens} tokens to {model}"),
                    shown(&before),
                    shown(&after),
                    || reason.to_owned(),
                );
            }
        }
    }

    /// Which nodes the filter refuses for a profile.
    fn refusals(&mut self, file: &str, model: &str, before: &Attempt, after: &Attempt) {
        let (old, new) = (by_policy(before), by_policy(after));
        let codes: BTreeSet<&str> = old.keys().chain(new.keys()).copied().collect();
        self.found.decisions += 1;
        let mut changed = false;
        for code in codes {
            let none = BTreeSet::new();
            let (old, new) = (
                old.get(code).unwrap_or(&none),
                new.get(code).unwrap_or(&none),
            );
            if old == new {
                continue;
            }
            changed = true;
            self.found.changes.push(Change {
                snapshot: Some(file.to_owned()),
                decision: format!("nodes refused for {model}, profile {}", before.need.profile),
                before: shown_nodes(old),
                after: shown_nodes(new),
                reason: filter_reason(code),
            });
        }
        self.found.changed += usize::from(changed);
    }

    fn compared(
        &mut self,
        snapshot: Option<&str>,
        decision: String,
        before: String,
        after: String,
        reason: impl FnOnce() -> String,
    ) {
        self.found.decisions += 1;
        if before != after {
            self.found.changed += 1;
            self.found.changes.push(Change {
                snapshot: snapshot.map(str::to_owned),
                decision,
                before,
                after,
                reason: reason(),
            });
        }
    }
}

/// Values by hook and field.
type Numbers = BTreeMap<(&'static str, String), String>;

fn numbers(set: &PolicySet, pool: &PoolView<'_>) -> Numbers {
    let mut found = Numbers::new();
    let mut add = |hook: &'static str, prefix: &str, value: Result<Value, serde_json::Error>| {
        let Ok(Value::Object(fields)) = value else {
            return;
        };
        for (field, value) in fields.into_iter().filter(|(_, value)| !value.is_null()) {
            let value = value.as_f64().map_or(value.to_string(), |n| n.to_string());
            found.insert((hook, format!("{prefix}{field}")), value);
        }
    };
    add(
        "routing.weights",
        "",
        serde_json::to_value(set.routing_weights(pool)),
    );
    add(
        "admission.gate",
        "",
        serde_json::to_value(set.admission_gate(pool)),
    );
    add(
        "fairness.prices",
        "",
        serde_json::to_value(set.prices(pool.model)),
    );
    for band in set.admission_bands(pool) {
        let prefix = format!("{}.", band.name);
        add("admission.bands", &prefix, serde_json::to_value(&band));
    }
    found
}

fn sample_pool(saturation: f64) -> PoolView<'static> {
    PoolView {
        model: "example",
        replicas: 4,
        ready: 4,
        slots: Some(64),
        saturation: Some(saturation),
        kv: Some(saturation.min(1.0)),
        queued: if saturation > 1.0 { 100 } else { 0 },
        ..PoolView::default()
    }
}

fn sample_request<'a>(model: &'a str, tokens: u64, hint: Option<&'a str>) -> RequestView<'a> {
    RequestView {
        model,
        band_hint: hint,
        path: "/v1/chat/completions",
        stream: true,
        input_tokens: tokens,
        est_output_tokens: ANSWER_TOKENS,
        n: 1,
        seed: SEED,
        ..RequestView::default()
    }
}

fn shown_band(band: &Band) -> String {
    match band.ttl_ms {
        Some(ttl_ms) => format!("{} for {ttl_ms} ms", band.name),
        None => band.name.to_string(),
    }
}

fn shown_place(decision: &Decision) -> String {
    match decision.chosen() {
        Some((attempt, ranking)) => format!(
            "{} ({})",
            ranking.candidate.nodes.join(" "),
            attempt.need.profile
        ),
        None => "nowhere".to_owned(),
    }
}

fn shown_nodes(nodes: &BTreeSet<&str>) -> String {
    let names: Vec<&str> = nodes.iter().take(NAMES_MAX).copied().collect();
    match nodes.len() {
        0 => "none".to_owned(),
        count if count > NAMES_MAX => format!("{} and {} more", names.join(" "), count - NAMES_MAX),
        _ => names.join(" "),
    }
}

fn filter_reason(code: &str) -> String {
    format!("placement.filter: {code}")
}

fn attempt_of<'d>(decision: &'d Decision, profile: &str) -> Option<&'d Attempt> {
    decision
        .attempts
        .iter()
        .find(|attempt| attempt.need.profile == profile)
}

/// The nodes that the policy refuses, by code.
fn by_policy(attempt: &Attempt) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut nodes: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (node, reasons) in &attempt.refused {
        for reason in reasons.iter().filter(|reason| reason.policy) {
            nodes.entry(&reason.code).or_default().insert(node);
        }
    }
    nodes
}

/// Why a replica goes elsewhere: a node that is refused on one side only, else the part of the score that moved most.
fn place_reason(before: &Decision, after: &Decision) -> String {
    for (place, other) in [(before, after), (after, before)] {
        let Some((attempt, ranking)) = place.chosen() else {
            continue;
        };
        let refused = attempt_of(other, &attempt.need.profile).and_then(|attempt| {
            let reasons = ranking.candidate.nodes.iter();
            reasons
                .filter_map(|node| attempt.refused.get(node))
                .flatten()
                .find(|reason| reason.policy)
        });
        if let Some(reason) = refused {
            return filter_reason(&reason.code);
        }
    }
    let moved = moved_part(before, after);
    moved.map_or("placement.score".to_owned(), |part| {
        format!("placement.score: {part}")
    })
}

/// The part whose difference between the two places changed most from one set to the other.
fn moved_part(before: &Decision, after: &Decision) -> Option<String> {
    let (_, old) = before.chosen()?;
    let (attempt, new) = after.chosen()?;
    let profile = &attempt.need.profile;
    let margins = |decision: &Decision| -> Option<BTreeMap<String, f64>> {
        let candidates = &attempt_of(decision, profile)?.candidates;
        let find = |nodes: &[String]| candidates.iter().find(|r| r.candidate.nodes == nodes);
        let (old, new) = (find(&old.candidate.nodes)?, find(&new.candidate.nodes)?);
        let mut margins = BTreeMap::new();
        for (sign, ranking) in [(-1.0, old), (1.0, new)] {
            for (part, value) in parts(ranking) {
                *margins.entry(part.clone()).or_insert(0.0) += sign * value;
            }
        }
        Some(margins)
    };
    let (before, after) = (margins(before)?, margins(after)?);
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let margin = |of: &BTreeMap<String, f64>, part: &String| of.get(part).copied().unwrap_or(0.0);
    let shift = |part: &&String| (margin(&after, part) - margin(&before, part)).abs();
    names
        .into_iter()
        .max_by(|a, b| shift(a).total_cmp(&shift(b)))
        .cloned()
}

fn parts(ranking: &Ranking) -> &[(String, f64)] {
    ranking.score.as_ref().map_or(&[], |score| &score.parts)
}

/// The replica that a request goes to, and whether `routing.rank` chose it. None: none takes requests.
fn route(
    set: &PolicySet,
    snapshot: &Snapshot,
    model: &str,
    replicas: &[PoolReplica],
    tokens: u64,
) -> Option<(String, bool)> {
    let open: Vec<&PoolReplica> = replicas
        .iter()
        .filter(|replica| kernels::closed(snapshot, replica).is_none())
        .collect();
    let candidates: Vec<Candidate> = open.iter().map(|replica| replica.candidate()).collect();
    let ask = Ask {
        input_tokens: tokens,
        est_output_tokens: ANSWER_TOKENS,
    };
    let pool = PoolView {
        model,
        replicas: replicas.len() as u64,
        ready: open.len() as u64,
        ..PoolView::default()
    };
    let choice = choose(&ask, &candidates, &set.routing_weights(&pool), SEED)?;
    // As the gateway does: the native choice is among the few that the hook sees.
    let mut seen: Vec<usize> = (0..open.len()).filter(|at| *at != choice.index).collect();
    seen.truncate(RANK_CANDIDATES_MAX - 1);
    seen.push(choice.index);
    seen.sort_unstable();
    let labels: Vec<Vec<(String, String)>> =
        seen.iter().map(|at| open[*at].label_pairs()).collect();
    let views: Vec<ReplicaView<'_>> = seen
        .iter()
        .zip(&labels)
        .map(|(at, labels)| open[*at].view(labels))
        .collect();
    let ranked = set.rank(&sample_request(model, tokens, None), &views);
    let by_hook = ranked.is_some();
    let index = ranked.map_or(choice.index, |ranked| seen[ranked.index]);
    Some((open[index].id.clone(), by_hook))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    use super::super::open;
    use super::*;

    /// A directory that goes with the test.
    struct Directory(PathBuf);

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn set(name: &str, files: &[(&str, &str)]) -> (Directory, Arc<PolicySet>) {
        let path = std::env::temp_dir().join(format!("llmgw-diff-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        for (file, text) in files {
            std::fs::write(path.join(file), text).unwrap();
        }
        let set = open(Some(&path)).unwrap();
        (Directory(path), set)
    }

    fn compared(name: &str, file: &str, text: &str) -> Difference {
        let (_before, before) = set(&format!("{name}-before"), &[]);
        let (_after, after) = set(&format!("{name}-after"), &[(file, text)]);
        let mut comparison = Comparison::new(&before, &after);
        comparison.numbers();
        comparison.bands();
        comparison.fleet("office.json", &office());
        comparison.found
    }

    fn office() -> Snapshot {
        let text = r#"{
            "schema": "llmgw.fleet/1", "generated_by": "a test", "taken_at": "2026-07-01T12:00:00Z",
            "nodes": {
                "attic": {"rack": "r1", "cpus": 32, "cpus_free": 32, "memory_gib": 128, "memory_gib_free": 128},
                "cellar": {"rack": "r2", "cpus": 32, "cpus_free": 24, "memory_gib": 128, "memory_gib_free": 112},
                "hall": {"rack": "r2", "cpus": 16, "cpus_free": 16, "memory_gib": 64, "memory_gib_free": 64}
            },
            "models": {
                "smollm2": {"replicas": 2, "profiles": [{"name": "cpu", "engine": "llamacpp", "cpus": 8, "memory_gib": 16}]}
            },
            "replicas": {
                "smollm2/0": {"model": "smollm2", "profile": "cpu", "state": "ready", "shards": [{"node": "cellar", "cpus": 8, "memory_gib": 16}]}
            },
            "pools": {
                "smollm2": [
                    {"id": "smollm2/0", "slots": 4, "kv": 0.9, "metrics_age_ms": 10, "prefix_tokens": 150},
                    {"id": "smollm2/1", "slots": 4, "kv": 0.1, "metrics_age_ms": 10, "prefill_tokens": 3000}
                ]
            }
        }"#;
        Snapshot::parse(Path::new("office.json"), text).unwrap()
    }

    fn line(change: &Change) -> String {
        let Change {
            decision,
            before,
            after,
            reason,
            ..
        } = change;
        format!("{reason} | {decision}: {before} -> {after}")
    }

    #[test]
    fn equal_sets_decide_alike() {
        let text = include_str!("../../../policies/routing.lua");
        let found = compared("equal", "routing.lua", text);
        assert_eq!((found.changed, found.changes.len()), (0, 0));
        assert!(found.decisions > 100, "{}", found.decisions);
    }

    #[test]
    fn a_filter_is_the_reason_of_what_it_moves() {
        let text = "return { api = 1, filter = function(job, node) if node.id == 'attic' then return false, 'reserved' end return true end }";
        let found = compared("filter", "placement.lua", text);
        let lines: Vec<String> = found.changes.iter().map(line).collect();
        assert_eq!(
            lines,
            [
                "placement.filter: reserved | nodes refused for smollm2, profile cpu: none -> attic",
                "placement.filter: reserved | place smollm2: attic (cpu) -> hall (cpu)",
            ]
        );
        assert_eq!(found.changed, 2);
    }

    #[test]
    fn a_score_is_named_by_the_part_that_moved() {
        let text = "return { api = 1, score = function(job, c) return { idle = 40 * (1 - c.cpu_after), near = 100 * c.same_node } end }";
        let found = compared("score", "placement.lua", text);
        let lines: Vec<String> = found.changes.iter().map(line).collect();
        assert_eq!(
            lines,
            ["placement.score: near | place smollm2: attic (cpu) -> cellar (cpu)"]
        );
    }

    #[test]
    fn a_knob_is_shown_beside_the_routes_that_it_changes() {
        let text =
            "return { api = 1, weights = function() return { kv = 10000, affinity_min = 1 } end }";
        let found = compared("knob", "routing.lua", text);
        let lines: Vec<String> = found.changes.iter().map(line).collect();
        assert_eq!(
            lines,
            [
                "routing.weights | affinity_min: 0.3 -> 1",
                "routing.weights | kv: 500 -> 10000",
                "routing.weights | route 200 tokens to smollm2: smollm2/0 -> smollm2/1",
                "routing.weights | route 2000 tokens to smollm2: smollm2/0 -> smollm2/1",
                "routing.weights | route 16000 tokens to smollm2: smollm2/0 -> smollm2/1",
            ]
        );
    }

    #[test]
    fn a_band_that_long_prompts_get_is_found() {
        let text = "local M = { api = 1 }\n\
             function M.classify(request, tenant) if request.input_tokens > 10000 then return 'batch' end return request.band_hint or tenant.band end\n\
             return M";
        let found = compared("classify", "admission.lua", text);
        assert!(found.changed > 0 && found.changed < found.decisions / 3);
        for change in &found.changes {
            assert!(
                change.decision.starts_with("band of 16000 tokens") && change.after == "batch",
                "{}",
                line(change)
            );
        }
    }
}
