//! What the supervisor asks about GPUs: before a start whether they may be used, after a stop whether they are free again.
//!
//! The inventory answers; tests have a fake.

use std::time::Instant;

use llmgw_proto::inventory::gpu::{Gpu, HealthCode};

/// A GPU that is used by less than this is free: drivers keep some for themselves.
pub const FREE_MAX_MIB: u64 = 600;

/// Where facts about GPUs come from. Answers at once, from the last look at the driver.
pub trait GpuFacts: Send + Sync {
    /// `None`: no such GPU here.
    fn gpu(&self, uuid: &str) -> Option<GpuFact>;

    /// Asks for a look at the driver that begins after this. Returns at once. Nothing is to be done where there is no driver, or each
    /// answer is a new look.
    fn look_now(&self) {}
}

/// One GPU, as it was last seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFact {
    /// What is wrong with it, each one sentence; empty: nothing known.
    pub problems: Vec<String>,
    /// `None`: the driver does not say, or the GPU uses the machine's own memory.
    pub used_mib: Option<u64>,
    /// Processes that compute on it, where the driver says so.
    pub holders: Vec<u32>,
    /// When the driver was asked.
    pub read_at: Instant,
}

/// A node without GPUs.
pub struct NoGpus;

/// Whether a GPU was given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Release {
    Free,
    /// Nobody has looked since: ask again.
    Unseen(String),
    /// Not yet: ask again.
    Held(String),
    /// The driver cannot tell. That no process is left is the best evidence then.
    Unknown(String),
}

impl GpuFacts for NoGpus {
    fn gpu(&self, _: &str) -> Option<GpuFact> {
        None
    }
}

/// What the inventory knows of a GPU, for the supervisor. That memory is held stands in the numbers, not among the problems:
/// whose it is depends on who asks.
pub fn fact(gpu: &Gpu, read_at: Instant) -> GpuFact {
    let problems = gpu
        .health
        .iter()
        .filter(|flag| flag.code != HealthCode::MemoryHeld);
    let used_mib = gpu.memory.used_mib.value().copied();
    let processes = gpu.processes.value().map_or(&[][..], Vec::as_slice);
    GpuFact {
        problems: problems
            .map(|flag| format!("{}: {}", flag.code, flag.reason))
            .collect(),
        used_mib: used_mib.filter(|_| !gpu.memory.unified),
        holders: processes.iter().map(|process| process.pid).collect(),
        read_at,
    }
}

/// Who holds a GPU's memory, in words.
pub fn by(holders: &[u32]) -> String {
    match holders {
        [] => "no process that the driver names".to_owned(),
        holders => format!("processes {holders:?}"),
    }
}

/// Judges one GPU whose shard has had no process since `gone`.
pub fn release(uuid: &str, fact: Option<&GpuFact>, gone: Instant) -> Release {
    let Some(fact) = fact else {
        return Release::Unknown(format!("GPU {uuid} is not listed any more"));
    };
    if fact.read_at < gone {
        return Release::Unseen(format!("GPU {uuid} was not looked at since"));
    }
    match fact.used_mib {
        Some(used) if used > FREE_MAX_MIB => Release::Held(format!(
            "GPU {uuid} has {used} MiB in use, by {}",
            by(&fact.holders)
        )),
        Some(_) => Release::Free,
        None => Release::Unknown(format!(
            "the driver does not say what GPU {uuid} has in use"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn gpu(memory: &str, health: &str) -> Gpu {
        let unread = r#"{"unknown": "not read"}"#;
        let text = format!(
            r#"{{"index": 0, "uuid": "GPU-1", "name": "NVIDIA L4", "class": "l4-22g", "memory": {memory},
            "compute_capability": "8.9", "pci": {unread}, "numa_node": {unread}, "health": {health},
            "ecc": {{"uncorrected_volatile": 0, "uncorrected_aggregate": 0, "remap_pending": {unread}, "remap_failed": {unread}}},
            "fabric": {{"state": "not-supported", "clique": null}}, "nvlinks_up": 0, "mig": false,
            "processes": [{{"pid": 4711, "memory_mib": 9000}}]}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn the_inventorys_flags_are_problems_and_held_memory_is_a_number() {
        let memory =
            r#"{"total_mib": 23034, "used_mib": 9000, "reserved_mib": 479, "unified": false}"#;
        let health = r#"[{"code": "uncorrected-ecc", "reason": "2 errors"},
            {"code": "memory-held", "reason": "process 4711 holds 9000 MiB"}]"#;
        let read_at = Instant::now();
        let expected = GpuFact {
            problems: vec!["uncorrected-ecc: 2 errors".to_owned()],
            used_mib: Some(9_000),
            holders: vec![4_711],
            read_at,
        };
        assert_eq!(fact(&gpu(memory, health), read_at), expected);
    }

    #[test]
    fn memory_that_is_the_machines_own_says_nothing_about_the_gpu() {
        let unified =
            r#"{"total_mib": 122570, "used_mib": 30000, "reserved_mib": 0, "unified": true}"#;
        assert_eq!(fact(&gpu(unified, "[]"), Instant::now()).used_mib, None);
        let unread = r#"{"unknown": "not supported"}"#;
        let unread = format!(r#"{{"total_mib": 9, "used_mib": {unread}, "reserved_mib": 0}}"#);
        assert_eq!(fact(&gpu(&unread, "[]"), Instant::now()).used_mib, None);
    }

    #[test]
    fn a_gpu_is_free_once_a_look_after_the_end_shows_its_memory_fallen() {
        let gone = Instant::now();
        let fact = |used_mib, read_at| GpuFact {
            problems: Vec::new(),
            used_mib,
            holders: vec![9],
            read_at,
        };
        let (before, after) = (gone - Duration::from_secs(1), gone + Duration::from_secs(1));
        let held = "GPU GPU-1 has 58222 MiB in use, by processes [9]";
        let silent = "the driver does not say what GPU GPU-1 has in use";
        for (fact, expected) in [
            (
                Some(fact(Some(3), before)),
                Release::Unseen("GPU GPU-1 was not looked at since".into()),
            ),
            (Some(fact(Some(3), after)), Release::Free),
            (Some(fact(Some(58_222), after)), Release::Held(held.into())),
            (Some(fact(None, after)), Release::Unknown(silent.into())),
            (
                None,
                Release::Unknown("GPU GPU-1 is not listed any more".into()),
            ),
        ] {
            assert_eq!(release("GPU-1", fact.as_ref(), gone), expected);
        }
    }
}
