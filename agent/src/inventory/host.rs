//! The machine around the GPUs, and what of it this process may use.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use llmgw_proto::inventory::host::{Cpu, Memory};
use llmgw_proto::inventory::{Host, Reading};

use super::sysfs;
use crate::process_files::Cgroups;

pub mod limits;

/// What `/proc/cpuinfo` has on a machine with some hundreds of threads.
const CPUINFO_MAX_BYTES: u64 = 4 << 20;
const STATUS_MAX_BYTES: u64 = 64 * 1024;

/// More than any machine has; a longer list is none.
const CPUS_MAX: u32 = 16_384;

/// What `/proc/meminfo` says, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Meminfo {
    pub total_bytes: Option<u64>,
    pub available_bytes: Option<u64>,
}

/// Reads the machine. `drivers`: versions that other parts found.
pub fn host(sys: &Path, proc: &Path, drivers: BTreeMap<String, Reading<String>>) -> Host {
    let kernel = proc.join("sys/kernel");
    let cgroups = Cgroups::read(proc, "self")
        .ok()
        .flatten()
        .unwrap_or_default();
    Host {
        hostname: sysfs::text(&kernel, "hostname"),
        kernel: sysfs::text(&kernel, "osrelease"),
        cpu: cpu(sys, proc, &cgroups),
        memory: memory(sys, proc, &cgroups),
        drivers,
    }
}

fn cpu(sys: &Path, proc: &Path, cgroups: &Cgroups) -> Cpu {
    let cpuinfo = sysfs::read(&proc.join("cpuinfo"), CPUINFO_MAX_BYTES).unwrap_or_default();
    let directory = sys.join("devices/system/cpu");
    let listed = sysfs::value(sys, "devices/system/cpu/online").and_then(|text| {
        cpu_list(&text).ok_or_else(|| format!("processors read `{}`", sysfs::shown(&text)))
    });
    let threads = match (&listed, processors(&cpuinfo)) {
        (Ok(online), _) => Reading::Known(count(online)),
        (Err(_), Some(number)) => Reading::Known(number),
        (Err(why), None) => Reading::unknown(why),
    };
    let topology = |name: &str| -> Reading<u32> {
        let online = match &listed {
            Ok(online) => online,
            Err(why) => return Reading::unknown(why),
        };
        let of_cpu = |cpu: &u32| {
            let path = directory.join(format!("cpu{cpu}/topology"));
            sysfs::value(&path, name)
        };
        match online
            .iter()
            .map(of_cpu)
            .collect::<Result<BTreeSet<_>, _>>()
        {
            Ok(groups) => Reading::Known(u32::try_from(groups.len()).unwrap_or(u32::MAX)),
            Err(why) => Reading::Unknown(why),
        }
    };
    let (available_millis, limited_by) = available(sys, proc, cgroups, &threads);
    Cpu {
        model: match field(&cpuinfo, "model name") {
            Some(name) => Reading::Known(name.to_owned()),
            None => Reading::unknown("`cpuinfo` names none"),
        },
        sockets: topology("physical_package_id"),
        // Threads of one core name the same siblings; core numbers repeat between dies.
        cores: topology("thread_siblings_list"),
        threads,
        numa_nodes: sysfs::parsed(sys, "devices/system/node/online", |text| {
            cpu_list(text).map(|nodes| count(&nodes))
        }),
        available_millis,
        limited_by,
    }
}

/// The least of: threads of the machine, threads that this process may run on, its groups' quota.
fn available(
    sys: &Path,
    proc: &Path,
    cgroups: &Cgroups,
    threads: &Reading<u32>,
) -> (Reading<u64>, Option<String>) {
    let status = sysfs::read(&proc.join("self/status"), STATUS_MAX_BYTES).unwrap_or_default();
    let allowed = field(&status, "Cpus_allowed_list").and_then(cpu_list);
    let millis = |number: u32| u64::from(number) * 1_000;
    let mut least = match threads {
        Reading::Known(number) => Some(millis(*number)),
        _ => None,
    };
    let mut limited_by = None;
    let limits = [
        (allowed.map(|cpus| millis(count(&cpus))), "CPU set"),
        (limits::cpu_millis(sys, cgroups), "cgroup quota"),
    ];
    for (limit, name) in limits {
        let Some(limit) = limit else { continue };
        if least.is_none_or(|least| limit < least) {
            // The first number that is known limits nothing.
            limited_by = least.map(|_| name.to_owned());
            least = Some(limit);
        }
    }
    let unknown = || Reading::unknown("neither the machine nor a limit says");
    (least.map_or_else(unknown, Reading::Known), limited_by)
}

fn memory(sys: &Path, proc: &Path, cgroups: &Cgroups) -> Memory {
    let text = match sysfs::value(proc, "meminfo") {
        Ok(text) => text,
        Err(why) => {
            return Memory {
                total_bytes: Reading::unknown(&why),
                available_bytes: Reading::unknown(why),
                limit_bytes: None,
                limited_by: None,
            };
        }
    };
    let info = meminfo(&text);
    let or_unknown = |bytes: Option<u64>, name: &str| match bytes {
        Some(bytes) => Reading::Known(bytes),
        None => Reading::unknown(format!("`meminfo` has no {name}")),
    };
    // A limit beyond what there is limits nothing.
    let limit = limits::memory(sys, cgroups).filter(|limit| {
        info.total_bytes
            .is_none_or(|total| limit.limit_bytes < total)
    });
    let left = limit.as_ref().and_then(|limit| limit.left_bytes);
    let available = match (info.available_bytes, left) {
        (Some(available), Some(left)) => Some(available.min(left)),
        (available, _) => available,
    };
    Memory {
        total_bytes: or_unknown(info.total_bytes, "MemTotal"),
        available_bytes: or_unknown(available, "MemAvailable"),
        limit_bytes: limit.as_ref().map(|limit| limit.limit_bytes),
        limited_by: limit.map(|limit| limit.group),
    }
}

/// Parses `/proc/meminfo`.
pub fn meminfo(text: &str) -> Meminfo {
    let bytes = |name: &str| {
        let kib: u64 = field(text, name)?
            .strip_suffix(" kB")?
            .trim()
            .parse()
            .ok()?;
        kib.checked_mul(1_024)
    };
    Meminfo {
        total_bytes: bytes("MemTotal"),
        available_bytes: bytes("MemAvailable"),
    }
}

/// The value of the first `name : value` line.
fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| {
        let (found, value) = line.split_once(':')?;
        (found.trim() == name).then(|| value.trim())
    })
}

/// How many processors `/proc/cpuinfo` lists; 0 is no answer.
fn processors(cpuinfo: &str) -> Option<u32> {
    let lines = cpuinfo.lines().filter(|line| {
        line.split_once(':')
            .is_some_and(|(name, _)| name.trim() == "processor")
    });
    u32::try_from(lines.count())
        .ok()
        .filter(|number| *number > 0)
}

/// `0-3,8`. `None` for what is no such list, or names more than [`CPUS_MAX`].
pub fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || last >= CPUS_MAX || cpus.len() > CPUS_MAX as usize {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

fn count(list: &[u32]) -> u32 {
    let different: BTreeSet<&u32> = list.iter().collect();
    u32::try_from(different.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorded::TempTree;

    /// Two sockets of two cores of two threads, one thread offline.
    const MACHINE: &str = "\
@ proc
meminfo = MemTotal:       2097152 kB\\nMemFree: 1 kB\\nMemAvailable:   1048576 kB
cpuinfo = processor\\t: 0\\nmodel name\\t: A Processor @ 2.0GHz
sys/kernel/osrelease = 6.18.5
sys/kernel/hostname = gpu-01
self/status = Name:\\tx\\nCpus_allowed_list:\\t0-6
self/cgroup = 0::/a
@ sys/devices/system
cpu/online = 0-6
node/online = 0-1
cpu/cpu0/topology/physical_package_id = 0
cpu/cpu1/topology/physical_package_id = 0
cpu/cpu2/topology/physical_package_id = 0
cpu/cpu3/topology/physical_package_id = 0
cpu/cpu4/topology/physical_package_id = 1
cpu/cpu5/topology/physical_package_id = 1
cpu/cpu6/topology/physical_package_id = 1
cpu/cpu0/topology/thread_siblings_list = 0-1
cpu/cpu1/topology/thread_siblings_list = 0-1
cpu/cpu2/topology/thread_siblings_list = 2-3
cpu/cpu3/topology/thread_siblings_list = 2-3
cpu/cpu4/topology/thread_siblings_list = 4-5
cpu/cpu5/topology/thread_siblings_list = 4-5
cpu/cpu6/topology/thread_siblings_list = 6
";

    fn read(tree: &TempTree) -> Host {
        let (sys, proc) = (tree.path().join("sys"), tree.path().join("proc"));
        host(&sys, &proc, BTreeMap::new())
    }

    fn machine(more: &str) -> Host {
        let tree = TempTree::empty();
        tree.add(MACHINE);
        tree.add(more);
        read(&tree)
    }

    #[test]
    fn sockets_cores_and_threads_are_counted_apart() {
        let host = machine("");
        let cpu = &host.cpu;
        assert_eq!(cpu.sockets, Reading::Known(2));
        assert_eq!(cpu.cores, Reading::Known(4));
        assert_eq!(cpu.threads, Reading::Known(7));
        assert_eq!(cpu.numa_nodes, Reading::Known(2));
        assert_eq!(cpu.available_millis, Reading::Known(7_000));
        assert_eq!(cpu.limited_by, None);
        assert_eq!(cpu.model, Reading::Known("A Processor @ 2.0GHz".to_owned()));
        assert_eq!(host.kernel, Reading::Known("6.18.5".to_owned()));
        assert_eq!(host.hostname, Reading::Known("gpu-01".to_owned()));
        assert_eq!(host.memory.total_bytes, Reading::Known(2 << 30));
        assert_eq!(host.memory.available_bytes, Reading::Known(1 << 30));
        assert_eq!(host.memory.limit_bytes, None);
    }

    #[test]
    fn a_container_has_what_its_limits_leave_and_says_which() {
        let limited = machine(
            "@ sys/fs/cgroup/a\nmemory.max = 1073741824\nmemory.current = 943718400\ncpu.max = 250000 100000\n",
        );
        assert_eq!(limited.cpu.available_millis, Reading::Known(2_500));
        assert_eq!(limited.cpu.limited_by.as_deref(), Some("cgroup quota"));
        assert_eq!(limited.memory.limit_bytes, Some(1 << 30));
        assert_eq!(limited.memory.available_bytes, Reading::Known(124 << 20));
        assert_eq!(limited.memory.limited_by.as_deref(), Some("/a"));
        assert_eq!(limited.memory.total_bytes, Reading::Known(2 << 30));
        let pinned = machine("@ proc\nself/status = Cpus_allowed_list:\\t0-1\n");
        assert_eq!(pinned.cpu.available_millis, Reading::Known(2_000));
        assert_eq!(pinned.cpu.limited_by.as_deref(), Some("CPU set"));
    }

    #[test]
    fn a_limit_beyond_what_there_is_limits_nothing() {
        let host = machine(
            "@ sys/fs/cgroup/a\nmemory.max = 8589934592\nmemory.current = 0\ncpu.max = 9900000 100000\n",
        );
        assert_eq!(host.memory.limit_bytes, None);
        assert_eq!(host.cpu.limited_by, None);
    }

    #[test]
    fn nothing_to_read_makes_everything_unknown_and_nothing_zero() {
        let host = read(&TempTree::empty());
        let why = "`meminfo`: no such file";
        let no_list = "`devices/system/cpu/online`: no such file";
        assert_eq!(host.memory.total_bytes, Reading::unknown(why));
        assert_eq!(host.memory.available_bytes, Reading::unknown(why));
        assert_eq!(host.cpu.threads, Reading::unknown(no_list));
        assert_eq!(host.cpu.sockets, Reading::unknown(no_list));
        assert_eq!(
            host.cpu.available_millis,
            Reading::unknown("neither the machine nor a limit says")
        );
        assert_eq!(host.kernel, Reading::unknown("`osrelease`: no such file"));
    }

    #[test]
    fn without_a_list_the_processors_of_cpuinfo_count_and_arm_has_no_model_name() {
        let tree = TempTree::empty();
        tree.add("@ proc\ncpuinfo = processor\\t: 0\\nBogoMIPS\\t: 2\\n\\nprocessor\\t: 1\n");
        let host = read(&tree);
        assert_eq!(host.cpu.threads, Reading::Known(2));
        assert_eq!(host.cpu.model, Reading::unknown("`cpuinfo` names none"));
    }

    #[test]
    fn meminfo_without_a_line_or_with_another_unit_is_unknown() {
        let bytes = |text: &str| meminfo(text).total_bytes;
        assert_eq!(bytes("MemTotal:  4 kB\n"), Some(4_096));
        for text in [
            "",
            "MemTotal: 4 MB",
            "MemTotal: -4 kB",
            "MemTotal: 99999999999999999999 kB",
        ] {
            assert_eq!(bytes(text), None, "{text}");
        }
        // Kernels before 3.14.
        assert_eq!(meminfo("MemTotal: 4 kB").available_bytes, None);
    }

    #[test]
    fn lists_of_processors_are_bounded() {
        for (text, expected) in [
            ("0-3,8\n", Some(5)),
            ("0", Some(1)),
            ("0-1,1-2", Some(3)),
            ("", None),
            ("3-1", None),
            ("0-4294967295", None),
            ("0-3,x", None),
        ] {
            assert_eq!(cpu_list(text).map(|list| count(&list)), expected, "{text}");
        }
    }

    #[test]
    fn this_machine_has_processors_and_memory() {
        let host = host(Path::new("/sys"), Path::new("/proc"), BTreeMap::new());
        assert!(host.cpu.threads.value().is_some_and(|threads| *threads > 0));
        let (total, available) = (&host.memory.total_bytes, &host.memory.available_bytes);
        assert!(available.value().unwrap() <= total.value().unwrap());
    }
}
