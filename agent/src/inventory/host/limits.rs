//! What control groups leave of the machine to this process, in both versions of them.

use std::path::{Path, PathBuf};

use crate::inventory::sysfs;
use crate::process_files::Cgroups;

/// Where both versions are mounted, below the root of sysfs.
const MOUNT: &str = "fs/cgroup";

/// Groups within groups. Deeper ones are not looked at.
const DEPTH_MAX: usize = 32;

/// Version 1 says "no limit" with a number near 2^63.
const NO_LIMIT_BYTES: u64 = 1 << 60;

/// The tightest memory limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimit {
    pub limit_bytes: u64,
    /// What is left below it; `None` where the use cannot be read.
    pub left_bytes: Option<u64>,
    /// The group that sets it, `/` for the root.
    pub group: String,
}

/// The group of a process, from the inside out, as directories.
struct Ladder {
    mount: PathBuf,
    group: String,
}

impl Ladder {
    /// Each group up to the root. Those that are not there are left out: in a container of version 1 the path is the host's.
    fn groups(&self) -> impl Iterator<Item = (PathBuf, String)> {
        let steps: Vec<&str> = self
            .group
            .split('/')
            .filter(|part| !part.is_empty() && *part != "..")
            .take(DEPTH_MAX)
            .collect();
        (0..=steps.len()).rev().filter_map(move |length| {
            let path = steps[..length].join("/");
            let directory = self.mount.join(&path);
            directory.is_dir().then(|| (directory, format!("/{path}")))
        })
    }
}

/// The ladders to look for a controller: that of version 2, and that of version 1 where it is mounted.
fn ladders(sys: &Path, cgroups: &Cgroups, controller: &str, mounts: &[&str]) -> Vec<Ladder> {
    let root = sys.join(MOUNT);
    let mut ladders = Vec::new();
    if let Some(group) = &cgroups.unified {
        ladders.push(Ladder {
            mount: root.clone(),
            group: group.clone(),
        });
    }
    if let Some(group) = cgroups.controllers.get(controller) {
        ladders.extend(mounts.iter().map(|name| Ladder {
            mount: root.join(name),
            group: group.clone(),
        }));
    }
    ladders
}

/// The limit that leaves the least.
pub fn memory(sys: &Path, cgroups: &Cgroups) -> Option<MemoryLimit> {
    let of_group = |(directory, group): (PathBuf, String)| {
        let number = |name: &str| sysfs::value(&directory, name).ok()?.trim().parse().ok();
        let limit: u64 = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
        let used: Option<u64> =
            number("memory.current").or_else(|| number("memory.usage_in_bytes"));
        let stat = sysfs::value(&directory, "memory.stat").unwrap_or_default();
        // Pages of files that nobody uses are given back before anything is killed.
        let idle = idle_files(&stat).unwrap_or(0);
        (limit < NO_LIMIT_BYTES).then(|| MemoryLimit {
            limit_bytes: limit,
            left_bytes: used.map(|used| limit.saturating_sub(used.saturating_sub(idle))),
            group,
        })
    };
    ladders(sys, cgroups, "memory", &["memory"])
        .iter()
        .flat_map(Ladder::groups)
        .filter_map(of_group)
        .min_by_key(|limit| limit.left_bytes.unwrap_or(limit.limit_bytes))
}

/// The tightest limit on processor time, in thousandths of a thread.
pub fn cpu_millis(sys: &Path, cgroups: &Cgroups) -> Option<u64> {
    let of_group = |(directory, _): (PathBuf, String)| {
        let read = |name: &str| sysfs::value(&directory, name).ok();
        if let Some(text) = read("cpu.max") {
            return quota_millis(&text);
        }
        let (quota, period) = (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?);
        quota_millis(&format!("{} {}", quota.trim(), period.trim()))
    };
    ladders(sys, cgroups, "cpu", &["cpu", "cpu,cpuacct"])
        .iter()
        .flat_map(Ladder::groups)
        .filter_map(of_group)
        .min()
}

/// `200000 100000` is two threads; `max 100000` and, in version 1, `-1 100000` are no limit.
pub fn quota_millis(text: &str) -> Option<u64> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.trim().parse().ok()?);
    quota.checked_mul(1_000)?.checked_div(period)
}

/// `inactive_file` of a memory.stat, or version 1's sum over the groups below.
pub fn idle_files(stat: &str) -> Option<u64> {
    let number = |name: &str| {
        stat.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    number("total_inactive_file").or_else(|| number("inactive_file"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorded::TempTree;

    #[test]
    fn quotas_are_read_in_both_versions() {
        for (text, expected) in [
            ("200000 100000", Some(2_000)),
            ("50000 100000\n", Some(500)),
            ("max 100000", None),
            ("-1 100000", None),
            ("100000 0", None),
            ("18446744073709551615 1", None),
            ("", None),
        ] {
            assert_eq!(quota_millis(text), expected, "{text}");
        }
    }

    #[test]
    fn the_limit_that_leaves_the_least_counts_also_when_an_outer_group_sets_it() {
        let tree = TempTree::empty();
        tree.add(
            "@ fs/cgroup/a.slice\nmemory.max = 8000\nmemory.current = 7000\nmemory.stat = inactive_file 500\n\
             cpu.max = 150000 100000\n\
             @ fs/cgroup/a.slice/b.service\nmemory.max = 4000\nmemory.current = 1000\ncpu.max = max 100000\n",
        );
        let cgroups = Cgroups::parse("0::/a.slice/b.service\n");
        assert_eq!(
            memory(tree.path(), &cgroups),
            Some(MemoryLimit {
                limit_bytes: 8_000,
                left_bytes: Some(1_500),
                group: "/a.slice".to_owned()
            })
        );
        assert_eq!(cpu_millis(tree.path(), &cgroups), Some(1_500));
    }

    #[test]
    fn version_1_is_read_where_it_is_mounted_and_its_huge_number_is_no_limit() {
        let tree = TempTree::empty();
        tree.add(
            "@ fs/cgroup/memory\nmemory.limit_in_bytes = 9223372036854771712\n\
             @ fs/cgroup/memory/docker\nmemory.limit_in_bytes = 2000\nmemory.usage_in_bytes = 500\n\
             memory.stat = total_inactive_file 100\n\
             @ fs/cgroup/cpu,cpuacct/docker\ncpu.cfs_quota_us = 300000\ncpu.cfs_period_us = 100000\n",
        );
        let cgroups = Cgroups::parse("4:memory:/docker\n3:cpu,cpuacct:/docker\n0::/\n");
        let limit = memory(tree.path(), &cgroups).unwrap();
        assert_eq!((limit.limit_bytes, limit.left_bytes), (2_000, Some(1_600)));
        assert_eq!(cpu_millis(tree.path(), &cgroups), Some(3_000));
        // The path of a container is the host's, and only the mount's root is there.
        let inside = Cgroups::parse("4:memory:/docker/5eed\n");
        assert_eq!(memory(tree.path(), &inside).unwrap().group, "/docker");
    }

    #[test]
    fn no_limit_is_none() {
        let tree = TempTree::empty();
        tree.add("@ fs/cgroup/a\nmemory.max = max\ncpu.max = max 100000\n");
        let cgroups = Cgroups::parse("0::/a\n");
        assert_eq!(memory(tree.path(), &cgroups), None);
        assert_eq!(cpu_millis(tree.path(), &cgroups), None);
        assert_eq!(memory(Path::new("/nowhere"), &cgroups), None);
    }
}
