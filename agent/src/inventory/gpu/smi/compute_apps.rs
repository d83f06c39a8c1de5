//! `nvidia-smi --query-compute-apps`: which process computes on which GPU.

use std::collections::BTreeMap;

use llmgw_proto::inventory::gpu::GpuProcess;

use super::cells;
use crate::inventory::gpu::facts::{Fact, counted, quote, reading};

/// What is asked for. The name of a process is left out: it may hold commas.
pub const FIELDS: &str = "pid,gpu_uuid,used_memory";

const PROCESSES_PER_GPU_MAX: usize = 256;
const GPUS_MAX: usize = 512;

/// The processes by the GPU's uuid, as far as they could be read. A GPU that is absent has none.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Answer {
    pub by_gpu: BTreeMap<String, Fact<Vec<GpuProcess>>>,
    /// That there were lines that are no rows.
    pub problem: Option<String>,
}

/// Reads rows of pid, uuid and memory, or of uuid, pid, name and memory: from both ends, since names hold commas.
pub fn parse(text: &str) -> Answer {
    let mut answer = Answer::default();
    let mut foreign: Vec<&str> = Vec::new();
    for (line, whole) in cells::lines(text) {
        let is_row = whole && answer.add(line);
        if !is_row && line.trim() != "No running processes found" {
            foreign.push(line);
        }
    }
    answer.problem = foreign.first().map(|first| {
        format!(
            "nvidia-smi's list of processes has {} none, the first of them `{}`",
            counted(foreign.len(), "line that is", "lines that are"),
            quote(first)
        )
    });
    answer
}

impl Answer {
    /// Whether the line was a row.
    fn add(&mut self, line: &str) -> bool {
        let row = cells::split(line);
        let [first, second, .., last] = row.as_slice() else {
            return false;
        };
        let (uuid, pid) = match (cells::uuid(first), cells::uuid(second)) {
            (Ok(uuid), Err(_)) => (uuid, second),
            (Err(_), Ok(uuid)) => (uuid, first),
            _ => return false,
        };
        let pid = match cells::number::<u32>(pid) {
            Ok(0) => return false,
            Ok(pid) => Ok(pid),
            Err(_) if cells::cause(pid).is_none() => return false,
            Err(cause) => Err(cause),
        };
        let memory = cells::mib(last);
        if memory.is_err() && cells::cause(last).is_none() {
            return false;
        }
        if self.by_gpu.len() == GPUS_MAX && !self.by_gpu.contains_key(&uuid) {
            return false;
        }
        let processes = self.by_gpu.entry(uuid).or_insert_with(|| Ok(Vec::new()));
        match (processes, pid) {
            (processes, Err(cause)) => *processes = Err(cause),
            (Ok(known), Ok(pid)) if known.len() < PROCESSES_PER_GPU_MAX => {
                known.push(GpuProcess {
                    pid,
                    memory_mib: reading(&memory),
                });
            }
            // Beyond the limit there is nothing more to conclude; after an error the rest stays unknown.
            _ => {}
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmgw_proto::inventory::Reading;

    const GPU: &str = "GPU-5eed0001-0a0a-4b4b-8c8c-000000000001";

    fn recorded(name: &str) -> Answer {
        let path = format!(
            "{}/../tests/recordings/hw/smi/query-compute-apps/{name}.csv",
            env!("CARGO_MANIFEST_DIR")
        );
        let answer = parse(&std::fs::read_to_string(path).unwrap());
        assert_eq!(answer.problem, None, "{name}");
        answer
    }

    fn on_the_gpu(name: &str) -> Vec<(u32, Option<u64>)> {
        let answer = recorded(name);
        let processes = answer.by_gpu[GPU].as_ref().unwrap();
        processes
            .iter()
            .map(|process| (process.pid, process.memory_mib.known().copied()))
            .collect()
    }

    #[test]
    fn the_recorded_lists_name_each_process_and_its_memory() {
        assert_eq!(
            on_the_gpu("h100-three-procs"),
            [
                (11_327, Some(2_566)),
                (11_328, Some(1_542)),
                (11_345, Some(15_690))
            ]
        );
        assert_eq!(
            on_the_gpu("gb10-unified"),
            [(3_150, Some(218)), (6_330, Some(96_073))]
        );
        assert_eq!(on_the_gpu("leaked-vllm"), [(396_079, Some(108_863))]);
        assert_eq!(
            on_the_gpu("with-name-not-found"),
            [(2_151_955, Some(56_510))]
        );
        assert!(recorded("none").by_gpu.is_empty());
    }

    #[test]
    fn memory_that_is_not_told_is_unknown_and_never_zero() {
        assert_eq!(
            on_the_gpu("container-or-wddm-na"),
            [(2_140, None), (13_264, None)]
        );
    }

    #[test]
    fn a_refused_list_leaves_the_processes_unknown() {
        let answer = recorded("insufficient-permissions");
        assert_eq!(
            answer.by_gpu[GPU].as_ref().unwrap_err().to_string(),
            "insufficient permissions"
        );
    }

    #[test]
    fn names_with_commas_don_t_shift_the_memory() {
        let answer = parse(&format!("{GPU}, 77, python -c \"a, b\", more, 12 MiB\n"));
        let processes = answer.by_gpu[GPU].as_ref().unwrap();
        assert_eq!(processes[0].pid, 77);
        assert_eq!(processes[0].memory_mib, Reading::Known(12));
    }

    #[test]
    fn what_is_no_row_is_told_and_the_rest_is_kept() {
        let text =
            format!("hello\n0, {GPU}, 5\nx, {GPU}, 5\n9, {GPU}, y\n8, {GPU}, 4\n7, {GPU}, 12");
        let answer = parse(&text);
        assert_eq!(
            answer.problem.as_deref(),
            Some(
                "nvidia-smi's list of processes has 5 lines that are none, the first of them `hello`"
            )
        );
        assert_eq!(answer.by_gpu[GPU].as_ref().unwrap().len(), 1);
    }
}
