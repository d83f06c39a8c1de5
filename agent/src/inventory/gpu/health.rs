//! What is wrong with a GPU: flags with their reasons, decided from the facts alone.

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::gpu::{
    DriverState, FabricState, Gpu, GpuProcess, HealthCode, HealthFlag,
};

use super::facts::{Cause, FabricFacts, GpuFacts, counted};

/// An idle GPU shows up to this much as used: what the driver reserves (472 MiB on an H100 by NVML's old count),
/// a desktop (596 MiB). More without a process is memory that somebody left behind.
pub const IDLE_USE_MAX_MIB: u64 = 600;

/// The flags that follow from what the driver says of one GPU, in order of their codes.
pub fn flags(facts: &GpuFacts) -> Vec<HealthFlag> {
    let mut flags = Vec::new();
    for fault in &facts.faults {
        let code = match fault {
            Cause::Lost => HealthCode::Lost,
            Cause::NeedsReset => HealthCode::NeedsReset,
            _ => HealthCode::DriverError,
        };
        add(&mut flags, code, fault.to_string());
    }
    if let Ok(Some(action)) = &facts.recovery {
        add(
            &mut flags,
            HealthCode::NeedsReset,
            format!("the driver asks for `{action}`"),
        );
    }
    memory_errors(facts, &mut flags);
    fabric(&facts.fabric, &mut flags);
    if facts.mig == Ok(true) {
        let slices = facts.slices.as_ref().map_or(0, Vec::len);
        let reason = match (&facts.slices, slices) {
            (Err(cause), _) => format!("MIG is on, and its slices are unknown: {cause}"),
            (Ok(_), 0) => "MIG is on, and it has no slices".to_string(),
            (Ok(_), count) => {
                let slices = counted(count, "slice is", "slices are");
                format!("MIG is on: its {slices} offered instead")
            }
        };
        add(&mut flags, HealthCode::Mig, reason);
    }
    flags.sort_by_key(|flag| flag.code);
    flags
}

/// Volatile errors and rows that wait or failed are faults; the aggregate alone is history.
fn memory_errors(facts: &GpuFacts, flags: &mut Vec<HealthFlag>) {
    if let Ok(count @ 1..) = facts.ecc_volatile {
        let errors = if count == 1 { "error" } else { "errors" };
        let reason = format!("{count} uncorrected memory {errors} since the driver was loaded");
        add(flags, HealthCode::UncorrectedEcc, reason);
    }
    if facts.remap_pending == Ok(true) {
        let reason = "a memory row waits for a reset to be replaced".to_string();
        add(flags, HealthCode::RowRemapPending, reason);
    }
    if facts.remap_failed == Ok(true) {
        let reason = "a memory row could not be replaced: return the GPU".to_string();
        add(flags, HealthCode::RowRemapFailed, reason);
    }
}

fn fabric(facts: &FabricFacts, flags: &mut Vec<HealthFlag>) {
    match facts.state {
        Ok(state @ (FabricState::NotStarted | FabricState::InProgress)) => {
            let word = if state == FabricState::NotStarted {
                "not started"
            } else {
                "in progress"
            };
            let reason = format!(
                "the NVLink fabric is {word}: CUDA fails with error 802 until the fabric manager is done"
            );
            add(flags, HealthCode::FabricNotReady, reason);
        }
        Ok(FabricState::Completed) => {
            if let Ok(status) = &facts.status
                && status != "Success"
            {
                let reason = format!("the NVLink fabric ended with `{status}`");
                add(flags, HealthCode::FabricFailed, reason);
            }
        }
        _ => {}
    }
}

/// Flags a GPU whose driver does not answer any more. Without an age in the text: each look would be news.
pub fn flag_silence(gpu: &mut Gpu, driver: DriverState) {
    let what = match driver {
        DriverState::Answering => return,
        DriverState::Absent => "is gone",
        DriverState::Failing => "fails",
        DriverState::Unresponsive | DriverState::Other => "does not respond",
    };
    let reason = format!("the driver {what}, and what is known is from before");
    add(&mut gpu.health, HealthCode::DriverError, reason);
    gpu.health.sort_by_key(|flag| flag.code);
}

/// Sets or takes away the flag for memory that others hold, now that it is known which processes are `own`.
pub fn settle_memory_held(gpu: &mut Gpu, own: &dyn Fn(u32) -> bool) {
    gpu.health
        .retain(|flag| flag.code != HealthCode::MemoryHeld);
    // A parent's memory is its slices', and the list of processes is the parent's too.
    if gpu.slice.is_some() || gpu.mig.value() == Some(&true) {
        return;
    }
    if let Some(reason) = held(gpu, own) {
        add(&mut gpu.health, HealthCode::MemoryHeld, reason);
        gpu.health.sort_by_key(|flag| flag.code);
    }
}

/// Why somebody else holds its memory; `None`: nobody is known to.
fn held(gpu: &Gpu, own: &dyn Fn(u32) -> bool) -> Option<String> {
    let processes = gpu.processes.value().map_or(&[][..], Vec::as_slice);
    let foreign: Vec<&GpuProcess> = processes
        .iter()
        .filter(|process| !own(process.pid))
        .collect();
    if let Some(largest) = foreign
        .iter()
        .max_by_key(|process| process.memory_mib.value())
    {
        let memory = match largest.memory_mib.value() {
            Some(mib) => format!("{mib} MiB"),
            None => "memory that is not told".to_string(),
        };
        let more = match foreign.len() - 1 {
            0 => String::new(),
            others => {
                let others = counted(others, "more process uses", "more processes use");
                format!(", and {others} it")
            }
        };
        return Some(format!("process {} holds {memory}{more}", largest.pid));
    }
    // Memory that is also the machine's is used by everybody.
    if gpu.memory.unified {
        return None;
    }
    let used = *gpu.memory.used_mib.value()?;
    let own_use = processes.iter().try_fold(0_u64, |sum, process| {
        Some(sum.saturating_add(*process.memory_mib.value()?))
    });
    let unexplained = used.saturating_sub(own_use?);
    (unexplained >= IDLE_USE_MAX_MIB).then(|| match &gpu.processes {
        Reading::Unknown(why) => {
            format!("{unexplained} MiB are in use; by which process is unknown: {why}")
        }
        _ => format!("{unexplained} MiB are in use and no process is listed for them"),
    })
}

fn add(flags: &mut Vec<HealthFlag>, code: HealthCode, reason: String) {
    let known = flags
        .iter()
        .any(|flag| flag.code == code && flag.reason == reason);
    if !known {
        flags.push(HealthFlag { code, reason });
    }
}
