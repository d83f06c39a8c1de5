//! The inventory as a page for people: what is wrong comes first, and nothing is wider than 80 columns.

use std::fmt::Write;

use llmgw_proto::inventory::adapter::{Adapter, ReasonCode, Usability};
use llmgw_proto::inventory::fabric::Standing;
use llmgw_proto::inventory::gpu::{
    Backend, DriverState, Gpu, HealthCode, SourceCause, SourceFailure,
};
use llmgw_proto::inventory::host::RouteDecision;
use llmgw_proto::inventory::{Fabric, Gpus, Inventory, Reading};

pub mod layout;

use layout::{table, wrapped};

/// The page, with a newline at its end.
pub fn page(inventory: &Inventory) -> String {
    let mut out = String::new();
    let complaints = complaints(inventory);
    let count = match complaints.len() {
        0 => "nothing is wrong".to_owned(),
        1 => "1 thing to look at".to_owned(),
        more => format!("{more} things to look at"),
    };
    line(&mut out, &format!("node {}: {count}", inventory.node));
    for complaint in &complaints {
        out.push_str(&wrapped("  - ", complaint));
    }
    gpus(&mut out, &inventory.gpus);
    adapters(&mut out, &inventory.adapters);
    fabrics(&mut out, &inventory.fabrics);
    host(&mut out, inventory);
    if out.lines().any(|line| line.contains(UNKNOWN_CELL)) {
        line(&mut out, "\n?: not known; `--format json` says why");
    }
    out
}

/// What stands in a table for what is not known.
const UNKNOWN_CELL: &str = " ? ";

/// Everything that somebody should look at: of the node, its GPUs, its adapters and its fabrics.
pub fn complaints(inventory: &Inventory) -> Vec<String> {
    let mut found = inventory.problems.clone();
    found.extend(of_driver(&inventory.gpus));
    found.extend(of_unlisted(&inventory.gpus));
    found.extend(inventory.gpus.problems.iter().cloned());
    found.extend(inventory.gpus.devices.iter().flat_map(of_gpu));
    found.extend(inventory.adapters.iter().filter_map(of_adapter));
    found.extend(of_fabrics(&inventory.fabrics));
    found
}

/// That there is no driver is wrong only where there are GPUs.
fn of_driver(gpus: &Gpus) -> Vec<String> {
    match gpus.driver {
        DriverState::Answering | DriverState::Other => Vec::new(),
        DriverState::Absent if gpus.devices.is_empty() => Vec::new(),
        DriverState::Absent => vec!["no NVIDIA driver is installed".to_owned()],
        DriverState::Failing | DriverState::Unresponsive => of_sources(&gpus.passed_over),
    }
}

/// What each source said, where a later one does not say the same.
fn of_sources(failures: &[SourceFailure]) -> Vec<String> {
    let is_said_later = |at: usize, failure: &SourceFailure| {
        failure.cause != SourceCause::Other
            && failures[at + 1..]
                .iter()
                .any(|later| later.cause == failure.cause)
    };
    failures
        .iter()
        .enumerate()
        .filter(|(at, failure)| {
            failure.cause != SourceCause::NotAsked && !is_said_later(*at, failure)
        })
        .map(|(_, failure)| {
            let message = failure.message.trim_end_matches('.');
            match &failure.help {
                Some(help) => format!("{message}; {help}"),
                None => message.to_owned(),
            }
        })
        .collect()
}

/// In one sentence, since all of them have the same cause: no driver, or a container that was given only some.
fn of_unlisted(gpus: &Gpus) -> Option<String> {
    let unlisted: Vec<&str> = gpus
        .devices
        .iter()
        .filter(|gpu| gpu.has(HealthCode::NotListed))
        .filter_map(|gpu| gpu.pci.value().map(String::as_str))
        .collect();
    let count = match unlisted.len() {
        0 => return None,
        1 => "a GPU".to_owned(),
        more => format!("{more} GPUs"),
    };
    let what = match gpus.driver {
        DriverState::Answering => "that the driver does not list",
        _ => "of which nothing else is known",
    };
    Some(format!("PCI has {count} {what}: {}", unlisted.join(", ")))
}

/// MIG is a way to use a GPU, no fault.
fn of_gpu(gpu: &Gpu) -> Vec<String> {
    gpu.health
        .iter()
        .filter(|flag| !matches!(flag.code, HealthCode::Mig | HealthCode::NotListed))
        .map(|flag| format!("{}: {}", name_of(gpu), flag.reason))
        .collect()
}

fn name_of(gpu: &Gpu) -> String {
    match (gpu.index.value(), gpu.pci.value()) {
        (Some(index), _) => format!("GPU {index}"),
        (None, Some(pci)) => format!("GPU at {pci}"),
        (None, None) => "a GPU".to_owned(),
    }
}

/// A port without a cable is nothing to look at; one that should work and does not is.
fn of_adapter(adapter: &Adapter) -> Option<String> {
    let is_fault = |code: ReasonCode| {
        matches!(
            code,
            ReasonCode::Unreadable
                | ReasonCode::NoDeviceNode
                | ReasonCode::Recovering
                | ReasonCode::InterfaceDown
        )
    };
    let reason = adapter
        .reasons
        .iter()
        .find(|reason| is_fault(reason.code))?;
    Some(format!("adapter {}: {reason}", adapter.name()))
}

/// Only the fabrics that engines would use, in one sentence: the cause stands with each.
fn of_fabrics(fabrics: &[Fabric]) -> Option<String> {
    let names: Vec<&str> = fabrics
        .iter()
        .filter(|fabric| fabric.ambiguous.is_some() && fabric.standing != Standing::Secondary)
        .map(|fabric| fabric.name.as_str())
        .collect();
    let (noun, them) = match names.len() {
        0 => return None,
        1 => ("fabric", "it"),
        _ => ("fabrics", "them"),
    };
    Some(format!(
        "which nodes share {noun} {} is not known: label {them} under `fabrics` in agent.yaml",
        names.join(", ")
    ))
}

fn gpus(out: &mut String, gpus: &Gpus) {
    if gpus.devices.is_empty() {
        let why = match gpus.driver {
            DriverState::Absent => "no NVIDIA driver is installed, and PCI shows none",
            DriverState::Answering => "the driver lists none, and PCI shows none",
            _ => "the driver does not answer, and PCI shows none",
        };
        line(out, &format!("\nGPUs: none ({why})"));
        return;
    }
    let (usable, all) = (gpus.usable().count(), gpus.devices.len());
    let source = match gpus.backend {
        Backend::None => "no driver answers".to_owned(),
        backend => format!(
            "driver {}, CUDA {}, read through {backend}",
            cell(&gpus.driver_version),
            cell(&gpus.cuda_version)
        ),
    };
    line(out, &format!("\nGPUs: {usable} of {all} usable; {source}"));
    if gpus.driver == DriverState::Answering {
        for failure in &gpus.passed_over {
            let text = format!("not through {}: {}", failure.source, failure.message);
            out.push_str(&wrapped("  ", &text));
        }
    }
    if let Some(age_ms) = age_of(gpus) {
        let text = format!("these values are {} s old", age_ms / 1_000);
        out.push_str(&wrapped("  ", &text));
    }
    let mut rows = vec![
        [
            "GPU", "class", "used", "MiB", "cc", "PCI", "NUMA", "NVL", "state",
        ]
        .map(str::to_owned),
    ];
    rows.extend(gpus.devices.iter().map(|gpu| gpu_row(gpus, gpu)));
    out.push_str(&table(&rows));
    if let Reading::Unknown(why) = &gpus.nvlink_domains {
        out.push_str(&wrapped("  ", &format!("NVLink domains: not known: {why}")));
    }
}

fn gpu_row(gpus: &Gpus, gpu: &Gpu) -> [String; 9] {
    let domain = gpu
        .uuid
        .value()
        .and_then(|uuid| gpus.domain_of(uuid))
        .map(|domain| domain.to_string());
    let codes: Vec<&str> = gpu.health.iter().map(|flag| flag.code.as_str()).collect();
    let state = match codes.is_empty() {
        true if gpu.is_usable() => "ok".to_owned(),
        true => "not known".to_owned(),
        false => codes.join(", "),
    };
    [
        cell(&gpu.index),
        cell(&gpu.class),
        cell(&gpu.memory.used_mib),
        cell(&gpu.memory.total_mib),
        cell(&gpu.compute_capability),
        cell(&gpu.pci),
        cell(&gpu.numa_node),
        domain.unwrap_or_else(|| "-".to_owned()),
        state,
    ]
}

/// How old the values are, where the driver stopped answering.
fn age_of(gpus: &Gpus) -> Option<u64> {
    match &gpus.driver_version {
        Reading::Stale { age_ms, .. } => Some(*age_ms),
        _ => None,
    }
}

fn adapters(out: &mut String, adapters: &[Adapter]) {
    if adapters.is_empty() {
        line(out, "\nadapters: none (no RDMA device)");
        return;
    }
    let usable = adapters.iter().filter(|adapter| adapter.is_usable());
    line(
        out,
        &format!(
            "\nadapters: {} of {} usable",
            usable.count(),
            adapters.len()
        ),
    );
    let mut rows =
        vec![["adapter", "kind", "rate", "interface", "NUMA", "state"].map(str::to_owned)];
    rows.extend(adapters.iter().map(|adapter| {
        let reasons: Vec<&str> = adapter
            .reasons
            .iter()
            .map(|reason| reason.detail.as_str())
            .collect();
        let state = match adapter.usability {
            Usability::Usable => "usable".to_owned(),
            Usability::Degraded | Usability::Unusable => reasons.join("; "),
        };
        [
            adapter.name(),
            adapter.kind.as_str().to_owned(),
            rate(&adapter.rate_mbps),
            cell(&adapter.netdev),
            cell(&adapter.numa_node),
            state,
        ]
    }));
    out.push_str(&table(&rows));
}

fn fabrics(out: &mut String, fabrics: &[Fabric]) {
    if fabrics.is_empty() {
        line(out, "\nfabrics: none");
        return;
    }
    line(out, &format!("\nfabrics: {}", fabrics.len()));
    for fabric in fabrics {
        let standing = match fabric.standing {
            Standing::Primary => "for engines",
            Standing::Secondary => "not for engines",
            Standing::Unclear => "unclear",
        };
        line(out, &format!("  {}", fabric.name));
        let mut say = |text: &str| out.push_str(&wrapped("    ", text));
        say(&format!("{standing}: {}", fabric.standing_reason));
        say(&format!("decided by: {}", fabric.decided_by));
        if !fabric.adapters.is_empty() {
            say(&format!("adapters: {}", fabric.adapters.join(" ")));
        }
        if let Some(why) = &fabric.ambiguous {
            say(&format!("ambiguous: {why}"));
        }
    }
}

fn host(out: &mut String, inventory: &Inventory) {
    let host = &inventory.host;
    line(out, "\nhost");
    let mut say = |name: &str, text: &str| {
        let first = format!("  {name:<8} ");
        out.push_str(&wrapped(&first, text));
    };
    let cpu = &host.cpu;
    let counts = [
        counted(&cpu.sockets, "socket"),
        counted(&cpu.cores, "core"),
        counted(&cpu.threads, "thread"),
        counted(&cpu.numa_nodes, "NUMA node"),
    ];
    say("CPU", &counts.join(", "));
    if let (Some(millis), Some(by)) = (cpu.available_millis.value(), &cpu.limited_by) {
        let threads = format!("{}.{}", millis / 1_000, millis % 1_000 / 100);
        say("", &format!("{threads} threads available, limited by {by}"));
    }
    let memory = &host.memory;
    say(
        "memory",
        &format!(
            "{}, {} available",
            size(&memory.total_bytes),
            size(&memory.available_bytes)
        ),
    );
    if let (Some(limit), Some(by)) = (memory.limit_bytes, &memory.limited_by) {
        let limit = size(&Reading::Known(limit));
        say("", &format!("limited to {limit} by cgroup {by}"));
    }
    say("kernel", &cell(&host.kernel));
    for (name, version) in &host.drivers {
        let version = match version {
            Reading::Unknown(why) => why.clone(),
            version => cell(version),
        };
        say("driver", &format!("{name}: {version}"));
    }
    say("route", &route(inventory));
    for (name, value) in &inventory.labels {
        say("label", &format!("{name}: {value}"));
    }
    say("agent", &inventory.agent_version);
}

fn route(inventory: &Inventory) -> String {
    let route = &inventory.route;
    let interface = match &route.interface {
        Reading::Unknown(why) => return why.clone(),
        interface => cell(interface),
    };
    let how = match route.decided_by {
        RouteDecision::Operator => "named by the operator",
        RouteDecision::SourceAddress => "which has the source address",
        RouteDecision::DefaultRoute => "the default route; no server is configured",
        RouteDecision::Undecided => "undecided",
    };
    match (&route.server, route.source.value()) {
        (Some(server), Some(source)) => format!("{interface} ({how}), {source} to {server}"),
        _ => format!("{interface} ({how})"),
    }
}

fn counted(reading: &Reading<u32>, noun: &str) -> String {
    match reading.value() {
        Some(1) => format!("1 {noun}"),
        Some(number) => format!("{number} {noun}s"),
        None => format!("? {noun}s"),
    }
}

fn rate(reading: &Reading<u64>) -> String {
    match reading.value() {
        Some(mbps) if mbps % 1_000 == 0 => format!("{} Gb/s", mbps / 1_000),
        Some(mbps) => format!("{}.{} Gb/s", mbps / 1_000, mbps % 1_000 / 100),
        None => "?".to_owned(),
    }
}

fn size(reading: &Reading<u64>) -> String {
    let Some(bytes) = reading.value() else {
        return "? memory".to_owned();
    };
    let mib = bytes >> 20;
    match mib {
        0..10_240 => format!("{mib} MiB"),
        _ => format!("{} GiB", mib >> 10),
    }
}

/// A value in a table.
fn cell<T: std::fmt::Display>(reading: &Reading<T>) -> String {
    match reading.value() {
        Some(value) => value.to_string(),
        None => "?".to_owned(),
    }
}

fn line(out: &mut String, text: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{text}");
}

#[cfg(test)]
mod tests;
