//! What the supervisor asks about GPUs: before a start whether they may be used, after a stop whether they are free again.
//!
//! The inventory answers; tests have a fake.

use std::time::Instant;

/// A GPU that is used by less than this is free: drivers keep some for themselves.
pub const FREE_MAX_MIB: u64 = 600;

/// Where facts about GPUs come from. Answers at once, from the last look at the driver.
pub trait GpuFacts: Send + Sync {
    /// `None`: no such GPU here.
    fn gpu(&self, uuid: &str) -> Option<GpuFact>;
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
    /// Not yet, or not known yet: ask again.
    Held(String),
    /// The driver cannot tell. That no process is left is the best evidence then.
    Unknown(String),
}

impl GpuFacts for NoGpus {
    fn gpu(&self, _: &str) -> Option<GpuFact> {
        None
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
        return Release::Held(format!("GPU {uuid} was not looked at since"));
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
                Release::Held("GPU GPU-1 was not looked at since".into()),
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
