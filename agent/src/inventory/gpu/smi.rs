//! GPUs as `nvidia-smi` tells them: the source for nodes where NVML can't be loaded.
//!
//! One answer decides whether there is an inventory (`--query-gpu`); each further one only adds to it, and what is
//! missing from it is unknown with the cause.

pub mod cells;
pub mod compute_apps;
pub mod failure;
pub mod handle;
pub mod links;
pub mod list;
pub mod query;
pub mod run;
pub mod topo;
pub mod version;

#[cfg(test)]
pub mod tests;

use llmgw_proto::inventory::gpu::SourceFailure;

use super::facts::{Cause, DriverFacts, Fact, GpuFacts, counted};
use run::{Ran, RunError, Smi};

/// Without `--help-query-gpu` unknown fields are found one by one.
const TRIES_MAX: usize = query::FIELDS.len();

/// Reads everything. Only a failure of the first question is one of the source: where a later one does not end in time, what it
/// and those after it would have said is unknown.
pub fn read(smi: &dyn Smi) -> Result<DriverFacts, SourceFailure> {
    let (ran, fields) = query_gpus(smi).map_err(|error| failure::not_run(&error))?;
    let answer = query::parse(&ran.stdout, &fields);
    if answer.gpus.is_empty() && !ran.stdout.contains(failure::NO_DEVICES) {
        return Err(failure::failure(&ran));
    }
    let mut facts = DriverFacts {
        driver_version: answer.driver_version,
        cuda_version: Err(Cause::TooOld),
        joined: not_joined_yet(answer.gpus.len()),
        gpus: answer.gpus,
        problems: answer.problems,
    };
    facts
        .problems
        .retain(|problem| !problem.contains(failure::NO_DEVICES));
    if let Err(error) = add_rest(smi, &mut facts) {
        facts.problems.push(error.to_string());
    }
    Ok(facts)
}

/// One GPU has nothing to be joined with.
fn not_joined_yet(gpus: usize) -> Fact<Vec<(usize, usize)>> {
    if gpus > 1 {
        return Err(Cause::NotRead("nvidia-smi topo was not read".to_string()));
    }
    Ok(Vec::new())
}

/// The main question, asked again without the fields that this driver does not know: one of them voids all others.
fn query_gpus(smi: &dyn Smi) -> Result<(Ran, Vec<&'static str>), RunError> {
    let mut fields = query::FIELDS.to_vec();
    for attempt in 0..TRIES_MAX {
        let question = format!("--query-gpu={}", fields.join(","));
        let ran = smi.run(&[&question, "--format=csv,noheader,nounits"])?;
        let Some(unknown) = query::unknown_field(&ran.stdout) else {
            return Ok((ran, fields));
        };
        let count = fields.len();
        fields.retain(|field| *field != unknown);
        if attempt == 0 {
            let help = smi.run(&["--help-query-gpu"])?;
            let known = query::known_fields(&help.stdout);
            // A list that lacks the basic ones is none.
            if known.contains("index") && known.contains("uuid") {
                fields.retain(|field| known.contains(field));
            }
        }
        let left_out_nothing = fields.len() == count;
        if left_out_nothing || fields.len() < 2 {
            return Ok((ran, fields));
        }
    }
    let question = format!("--query-gpu={}", fields.join(","));
    let ran = smi.run(&[&question, "--format=csv,noheader,nounits"])?;
    Ok((ran, fields))
}

fn add_rest(smi: &dyn Smi, facts: &mut DriverFacts) -> Result<(), RunError> {
    let listing = list::parse(&smi.run(&["-L"])?.stdout);
    add_listing(facts, listing);
    if facts.gpus.is_empty() {
        return Ok(());
    }
    let question = format!("--query-compute-apps={}", compute_apps::FIELDS);
    let ran = smi.run(&[&question, "--format=csv,noheader,nounits"])?;
    add_processes(facts, &ran);
    add_topology(smi, facts)?;
    let links = links::parse(&smi.run(&["nvlink", "--status"])?.stdout);
    for gpu in &mut facts.gpus {
        let own = links
            .iter()
            .find(|links| gpu.uuid.as_ref() == Ok(&links.uuid));
        gpu.nvlinks_up = own.map_or(Err(Cause::Missing), |links| links.up.clone());
    }
    let versions = version::parse(&smi.run(&["--version"])?.stdout);
    facts.cuda_version = versions.cuda;
    if facts.driver_version.is_err() && versions.driver.is_ok() {
        facts.driver_version = versions.driver;
    }
    Ok(())
}

/// Adds slices, and the GPUs that the driver counts and gave no row for: it goes on listing lost ones.
fn add_listing(facts: &mut DriverFacts, listing: list::Listing) {
    let mut without_row = Vec::new();
    for handle in listing.handles {
        let is_known = facts.gpus.iter().any(|gpu| gpu.pci == handle.pci);
        if !is_known && handle.pci.is_ok() {
            facts.gpus.push(handle.into_facts());
        }
    }
    for gpu in &mut facts.gpus {
        gpu.slices = Err(Cause::NotRead("nvidia-smi -L does not list it".to_string()));
    }
    for listed in listing.gpus {
        let mut rows = facts.gpus.iter_mut();
        match rows.find(|gpu| gpu.uuid.as_ref() == Ok(&listed.uuid)) {
            Some(gpu) => gpu.slices = Ok(listed.slices),
            None => without_row.push(listed),
        }
    }
    let nameless = |gpu: &&mut GpuFacts| gpu.uuid.is_err();
    if facts.gpus.iter_mut().filter(nameless).count() == without_row.len() {
        // As many rows of errors as GPUs without a row, both in the driver's order: they are the same.
        for (gpu, listed) in facts.gpus.iter_mut().filter(nameless).zip(without_row) {
            name(gpu, listed);
        }
        return;
    }
    for listed in without_row {
        let mut gpu = GpuFacts::unread(&Cause::Missing);
        gpu.faults.push(Cause::NotRead(
            "nvidia-smi -L lists it and --query-gpu does not".to_string(),
        ));
        name(&mut gpu, listed);
        facts.gpus.push(gpu);
    }
}

fn name(gpu: &mut GpuFacts, listed: list::ListedGpu) {
    gpu.index = Ok(listed.index);
    gpu.uuid = Ok(listed.uuid);
    gpu.name = Ok(listed.name);
    gpu.slices = Ok(listed.slices);
}

fn add_processes(facts: &mut DriverFacts, ran: &Ran) {
    let answer = compute_apps::parse(&ran.stdout);
    // An empty answer means none only where the question succeeded.
    let others = if ran.status == Some(0) && answer.problem.is_none() {
        Ok(Vec::new())
    } else {
        let why = "nvidia-smi's list of processes was not understood";
        Err(Cause::NotRead(why.to_string()))
    };
    for gpu in &mut facts.gpus {
        let own = gpu
            .uuid
            .as_ref()
            .ok()
            .and_then(|uuid| answer.by_gpu.get(uuid));
        gpu.processes = own.cloned().unwrap_or_else(|| others.clone());
    }
    facts.problems.extend(answer.problem);
}

/// Which GPUs NVLink joins: what the matrix shows, as far as the driver lets the pair use it.
fn add_topology(smi: &dyn Smi, facts: &mut DriverFacts) -> Result<(), RunError> {
    let topology = match topo::parse(&smi.run(&["topo", "-m"])?.stdout) {
        Ok(topology) => topology,
        Err(cause) => {
            if facts.gpus.len() > 1 {
                facts.joined = Err(cause);
            }
            return Ok(());
        }
    };
    let mut joined = topology.joined;
    if !joined.is_empty() {
        let peers = topo::parse_peers(&smi.run(&["topo", "-p2p", "n"])?.stdout);
        // Old drivers don't have the question; then the matrix alone counts.
        if let Ok(peers) = peers {
            let (usable, refused): (Vec<_>, Vec<_>) =
                joined.into_iter().partition(|pair| peers.contains(pair));
            joined = usable;
            facts
                .problems
                .extend(refused.first().map(|(first, second)| {
                    format!(
                        "{} NVLinks and may not use them, GPU{first} and GPU{second} for one",
                        counted(refused.len(), "pair has", "pairs have")
                    )
                }));
        }
    }
    facts.problems.extend(topology.problems);
    let position = |number: u32| facts.gpus.iter().position(|gpu| gpu.index == Ok(number));
    facts.joined = Ok(joined
        .into_iter()
        .filter_map(|(first, second)| position(first).zip(position(second)))
        .collect());
    for gpu in &mut facts.gpus {
        if let Ok(index) = &gpu.index
            && let Some(numa) = topology.numa.get(index)
        {
            gpu.numa_node = numa.clone();
        }
    }
    Ok(())
}
