//! Whether one node can carry its part of a job, with which GPUs, and every reason why not.

use std::collections::BTreeMap;

use serde::Serialize;

use super::need::Need;
use super::reason::{Reason, code, counted};
use crate::config::lacks_fp8;
use crate::control::snapshot::{FOREIGN, Gpu, Node, NodeState, capability_of};

/// What the kernel found out about one node.
#[derive(Debug)]
pub(super) struct Fit<'a> {
    /// The class, as a position in [`Need::classes`].
    pub class: Option<usize>,
    /// GPUs to take, by index; empty for CPU and where there are reasons.
    pub gpus: Vec<&'a Gpu>,
    pub reasons: Vec<Reason>,
}

/// A GPU of a placement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Taken {
    pub index: u32,
    pub uuid: String,
}

/// The least compute capability that has fp8 units.
const FP8_CAPABILITY: (u32, u32) = (8, 9);

/// Asks every question, whatever the earlier answers were.
pub(super) fn fit<'a>(need: &Need, node: &'a Node) -> Fit<'a> {
    let mut fit = Fit {
        class: None,
        gpus: Vec::new(),
        reasons: Vec::new(),
    };
    if node.state != NodeState::Ready {
        let state = node.state.as_str();
        fit.reasons.push(Reason::new(
            code::NODE_STATE,
            format!("the node is {state}"),
            state.to_owned(),
            format!("to be ready (it is {state})"),
        ));
    }
    if let Some(problem) = &node.problem {
        fit.reasons.push(Reason::new(
            code::NODE_STATE,
            problem.clone(),
            problem.clone(),
            format!("to be sound ({problem})"),
        ));
    }
    fit.reasons.extend(not_allowed(need, node));
    fit.reasons.extend(not_selected(need, node));
    if need.gpus > 0 {
        gpus(need, node, &mut fit);
    }
    fit.reasons.extend(cores_and_memory(need, node));
    fit.reasons.extend(no_port(node));
    if need.nodes > 1 && node.fabrics.is_empty() {
        fit.reasons.push(Reason::new(
            code::FABRIC,
            "no fabric is known that it shares with others".to_owned(),
            "no fabric known".to_owned(),
            "a fabric label".to_owned(),
        ));
    }
    fit
}

/// The agent starts only what its own configuration lists.
fn not_allowed(need: &Need, node: &Node) -> Option<Reason> {
    let engines = node.engines.as_ref()?;
    let engine = &need.engine;
    (!engines.contains(engine)).then(|| {
        let listed = match engines.is_empty() {
            true => "none".to_owned(),
            false => engines.join(", "),
        };
        Reason::new(
            code::ENGINE,
            format!("its agent.yaml lists no engine `{engine}` (it lists {listed})"),
            format!("no {engine} in its agent.yaml"),
            format!("`{engine}` under `engines` of its agent.yaml"),
        )
    })
}

/// All labels that are missing or otherwise, in one reason.
fn not_selected(need: &Need, node: &Node) -> Option<Reason> {
    let mut texts = Vec::new();
    let mut shorts = Vec::new();
    let mut lacks = Vec::new();
    for (name, value) in &need.node_selector {
        let label = match node.label(name) {
            Some(label) if label == value => continue,
            Some(label) => format!("`{name}` is `{label}`"),
            None => format!("no label `{name}`"),
        };
        texts.push(format!("{label}, `{value}` is needed"));
        shorts.push(label);
        lacks.push(format!("`{name}: {value}`"));
    }
    (!texts.is_empty()).then(|| {
        Reason::new(
            code::LABELS,
            texts.join("; "),
            shorts.join(", "),
            format!("{} under `labels` of its agent.yaml", lacks.join(" and ")),
        )
    })
}

fn cores_and_memory(need: &Need, node: &Node) -> Vec<Reason> {
    let mut reasons = Vec::new();
    let cpus = need.cpus.unwrap_or(0);
    if node.cpus_free < cpus {
        let (free, missing) = (node.cpus_free, cpus - node.cpus_free);
        let reason = Reason::new(
            code::CPUS,
            format!(
                "{free} of {} cores are unclaimed, {cpus} are needed",
                node.cpus
            ),
            format!("{free} cores free of {}", node.cpus),
            counted(missing as usize, "more core"),
        );
        reasons.push(reason.with(f64::from(free), f64::from(cpus), "cores"));
    }
    let gib = need.memory_gib.unwrap_or(0.0);
    if node.memory_gib_free < gib {
        let (free, all) = (node.memory_gib_free, node.memory_gib);
        let reason = Reason::new(
            code::MEMORY,
            format!("{free} of {all} GiB of memory are unclaimed, {gib} are needed"),
            format!("{free} GiB free of {all}"),
            format!("{} GiB more memory", gib - free),
        );
        reasons.push(reason.with(free, gib, "GiB"));
    }
    reasons
}

/// Each shard listens on one port of its own.
fn no_port(node: &Node) -> Option<Reason> {
    (node.ports_free == Some(0)).then(|| {
        Reason::new(
            code::PORTS,
            "none of the ports that its agent.yaml gives to engines is free".to_owned(),
            "0 ports free".to_owned(),
            "a free port (`ports` of its agent.yaml)".to_owned(),
        )
        .with(0.0, 1.0, "ports")
    })
}

/// The first class in order with which the node can do it; else the reasons of the first that it has enough cards of.
fn gpus<'a>(need: &Need, node: &'a Node, fit: &mut Fit<'a>) {
    if node.gpus.is_empty() {
        fit.reasons.push(Reason::new(
            code::NO_GPU,
            "the node has no GPU".to_owned(),
            "no GPU".to_owned(),
            format!(
                "{} of {}",
                counted(need.gpus as usize, "GPU"),
                need.classes.join(" or ")
            ),
        ));
        return;
    }
    let wanted = need.gpus as usize;
    let mut refusal = None;
    for (class, name) in need.classes.iter().enumerate() {
        let members = of_class(node, name);
        if members.len() < wanted {
            continue;
        }
        match within_class(need, name, &members, wanted) {
            Ok(gpus) => {
                fit.class = Some(class);
                fit.gpus = gpus;
                return;
            }
            Err(reasons) if refusal.is_none() => refusal = Some((class, reasons)),
            Err(_) => {}
        }
    }
    let Some((class, reasons)) = refusal else {
        return fit.reasons.extend(wrong_class(need, node));
    };
    fit.class = Some(class);
    fit.reasons.extend(reasons);
}

fn of_class<'a>(node: &'a Node, class: &str) -> Vec<&'a Gpu> {
    node.gpus.iter().filter(|gpu| gpu.class == class).collect()
}

/// No class of the profile has enough cards here. What else is wrong is judged by the cards that there are.
fn wrong_class(need: &Need, node: &Node) -> Vec<Reason> {
    let wanted = need.gpus as usize;
    let mut classes: BTreeMap<&str, usize> = BTreeMap::new();
    for gpu in &node.gpus {
        *classes.entry(&gpu.class).or_default() += 1;
    }
    let asked = need.classes.join(" or ");
    let own = classes
        .iter()
        .filter(|(class, _)| need.classes.iter().any(|name| name == *class))
        .max_by_key(|(_, number)| **number);
    let mut reasons = Vec::new();
    let class = match own {
        Some((class, number)) => {
            let reason = Reason::new(
                code::GPU_COUNT,
                format!(
                    "the node has {} of {class}, {wanted} are needed",
                    counted(*number, "GPU")
                ),
                format!("{number} {class}"),
                format!("{} of {class}", counted(wanted - number, "more GPU")),
            );
            reasons.push(reason.with(*number as f64, wanted as f64, "GPUs"));
            *class
        }
        None => {
            let list: Vec<&str> = classes.keys().copied().collect();
            let list = list.join(", ");
            reasons.push(Reason::new(
                code::GPU_CLASS,
                format!("its GPUs are {list}, {asked} is needed"),
                list,
                format!("GPUs of {asked}"),
            ));
            let most = classes.iter().max_by_key(|(_, number)| **number);
            most.map_or("", |(class, _)| class)
        }
    };
    let members = of_class(node, class);
    let wanted = wanted.min(members.len());
    reasons.extend(not_free(&members, wanted));
    reasons
}

/// GPUs of one class, of which there are enough on the node.
fn within_class<'a>(
    need: &Need,
    class: &str,
    members: &[&'a Gpu],
    wanted: usize,
) -> Result<Vec<&'a Gpu>, Vec<Reason>> {
    let mut reasons = Vec::new();
    if need.fp8 && without_fp8(class, members) {
        reasons.push(Reason::new(
            code::FP8,
            format!("fp8 needs compute capability 8.9, which {class} does not have"),
            class.to_owned(),
            "GPUs of compute capability 8.9".to_owned(),
        ));
    }
    reasons.extend(not_free(members, wanted));
    let chosen = match choose(need, members) {
        Some(gpus) => gpus,
        None if reasons.iter().all(|reason| reason.code == code::FP8) => {
            reasons.push(domain_split(need, members));
            Vec::new()
        }
        None => Vec::new(),
    };
    match reasons.is_empty() {
        true => Ok(chosen),
        false => Err(reasons),
    }
}

/// What the agent reported, else what is known about the class.
fn without_fp8(class: &str, members: &[&Gpu]) -> bool {
    let reported = members
        .iter()
        .find_map(|gpu| capability_of(gpu.compute_capability.as_deref()?));
    reported.map_or_else(|| lacks_fp8(class), |has| has < FP8_CAPABILITY)
}

/// Why so many of these can't be had. Each cause counts where it alone would be enough to refuse; where only all of them
/// together are, the one that replicas or others can undo is named.
fn not_free(members: &[&Gpu], wanted: usize) -> Vec<Reason> {
    let all = members.len();
    let sick: Vec<&&Gpu> = members.iter().filter(|gpu| !gpu.healthy).collect();
    let user = |gpu: &Gpu, foreign: bool| {
        gpu.used_by
            .as_deref()
            .is_some_and(|user| (user == FOREIGN) == foreign)
    };
    let held: Vec<&&Gpu> = members.iter().filter(|gpu| user(gpu, true)).collect();
    let busy = members.iter().filter(|gpu| user(gpu, false)).count();
    let free = members.iter().filter(|gpu| gpu.free()).count();
    let together = free < wanted
        && [sick.len(), held.len(), busy]
            .iter()
            .all(|number| all - number >= wanted);
    let mut reasons = Vec::new();
    let (have, need) = (free as f64, wanted as f64);
    if all - sick.len() < wanted {
        let reason = Reason::new(
            code::UNHEALTHY,
            format!(
                "{}; {} of {all} GPUs are healthy, {wanted} are needed",
                ailments(&sick),
                all - sick.len()
            ),
            ailments(&sick),
            format!("{} to be healthy ({})", numbers(&sick), ailments(&sick)),
        );
        reasons.push(reason.with((all - sick.len()) as f64, need, "GPUs"));
    }
    if all - held.len() < wanted || (together && busy == 0) {
        let reason = Reason::new(
            code::GPUS_HELD,
            format!(
                "a process that llmgw did not start holds {}; {free} of {all} GPUs are free, {wanted} are needed",
                numbers(&held)
            ),
            format!("{} held by another process", numbers(&held)),
            format!("{} released by another process", numbers(&held)),
        );
        reasons.push(reason.with(have, need, "GPUs"));
    }
    if all - busy < wanted || (together && busy > 0) {
        let mut text = format!("{free} of {all} GPUs are free, {wanted} are needed");
        if !sick.is_empty() {
            text.push_str(&format!(" ({} not healthy)", sick.len()));
        }
        let reason = Reason::new(
            code::GPUS_BUSY,
            text,
            format!("{free} free of {all}"),
            counted(wanted - free, "more GPU"),
        );
        reasons.push(reason.with(have, need, "GPUs"));
    }
    reasons
}

/// `GPU 4 uncorrected ECC`.
fn ailments(sick: &[&&Gpu]) -> String {
    let each = |gpu: &&&Gpu| {
        let reason = gpu.reason.as_deref().filter(|text| !text.is_empty());
        format!("GPU {} {}", gpu.index, reason.unwrap_or("not healthy"))
    };
    sick.iter().map(each).collect::<Vec<_>>().join(", ")
}

/// `GPU 4`, `GPUs 4, 5`.
fn numbers(gpus: &[&&Gpu]) -> String {
    let list: Vec<String> = gpus.iter().map(|gpu| gpu.index.to_string()).collect();
    let plural = if gpus.len() == 1 { "" } else { "s" };
    format!("GPU{plural} {}", list.join(", "))
}

fn domain_split(need: &Need, members: &[&Gpu]) -> Reason {
    let free: Vec<usize> = domains(members)
        .into_values()
        .map(|domain| domain.free.len())
        .filter(|free| *free > 0)
        .collect();
    let list: Vec<String> = free.iter().map(usize::to_string).collect();
    let list = list.join(" + ");
    let most = free.iter().max().copied().unwrap_or(0);
    let groups = match need.groups() {
        1 => String::new(),
        groups => format!(", {groups} times"),
    };
    Reason::new(
        code::DOMAIN_SPLIT,
        format!(
            "the free GPUs are {list} in its NVLink domains, {} are needed in one{groups}",
            need.group
        ),
        format!("{list} free, {} needed in one domain", need.group),
        format!("{} free GPUs in one NVLink domain{groups}", need.group),
    )
    .with(most as f64, f64::from(need.group), "GPUs")
}

/// GPUs of a node that reach each other over NVLink.
#[derive(Debug, Default)]
struct Linked<'a> {
    /// All of them, used or not.
    size: usize,
    free: Vec<&'a Gpu>,
}

/// By number; a GPU without NVLink is a domain of its own, numbered behind the others.
fn domains<'a>(members: &[&'a Gpu]) -> BTreeMap<(Option<u32>, u32), Linked<'a>> {
    let mut domains: BTreeMap<(Option<u32>, u32), Linked<'a>> = BTreeMap::new();
    for gpu in members {
        let key = match gpu.domain {
            Some(number) => (Some(number), 0),
            None => (None, gpu.index),
        };
        let domain = domains.entry(key).or_default();
        domain.size += 1;
        if gpu.free() {
            domain.free.push(gpu);
        }
    }
    for domain in domains.values_mut() {
        domain.free.sort_by_key(|gpu| gpu.index);
    }
    domains
}

/// The best GPUs: each group in the domain where it leaves the fewest behind. Where no domain of the node is large enough
/// for a group, as with cards on PCIe, groups may spread over as few domains as possible.
fn choose<'a>(need: &Need, members: &[&'a Gpu]) -> Option<Vec<&'a Gpu>> {
    let mut domains: Vec<Linked<'a>> = domains(members).into_values().collect();
    let (group, wanted) = (need.group as usize, need.gpus as usize);
    let mut chosen = Vec::with_capacity(wanted);
    if domains.iter().any(|domain| domain.size >= group) {
        for _ in 0..need.groups() {
            let best = domains
                .iter_mut()
                .filter(|domain| domain.free.len() >= group)
                .min_by_key(|domain| domain.free.len())?;
            chosen.extend(best.free.drain(..group));
        }
    } else {
        domains.sort_by_key(|domain| std::cmp::Reverse(domain.free.len()));
        let free = domains.into_iter().flat_map(|domain| domain.free);
        chosen.extend(free.take(wanted));
    }
    chosen.sort_by_key(|gpu| gpu.index);
    (chosen.len() == wanted).then_some(chosen)
}
