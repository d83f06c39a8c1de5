//! A control group of its own for each shard, where version 2 is delegated to the agent: nothing escapes it, and one write
//! kills all that is in it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::process_files::Cgroups;

/// Where the unified hierarchy is mounted: alone, or beside those of version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Groups that an engine may make within its own are looked through to this depth.
const DEPTH_MAX: usize = 8;

/// The group of one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardCgroup {
    directory: PathBuf,
}

impl ShardCgroup {
    /// Makes `ROOT/llmgw-NAME`. `None` where that is no group with `cgroup.kill` (version 1, a kernel before 5.14, not delegated).
    pub fn make(root: &Path, name: &str) -> Option<ShardCgroup> {
        let directory = root.join(format!("llmgw-{name}"));
        match fs::create_dir(&directory) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(_) => return None,
        }
        let group = ShardCgroup { directory };
        if group.directory.join("cgroup.kill").exists() {
            return Some(group);
        }
        group.remove();
        None
    }

    /// The group that an earlier agent made; `None` where it is gone.
    pub fn open(directory: &Path) -> Option<ShardCgroup> {
        directory.join("cgroup.kill").exists().then(|| ShardCgroup {
            directory: directory.to_owned(),
        })
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Moves a process into it; all that it starts from then on is in it too.
    pub fn join(&self, pid: u32) -> io::Result<()> {
        fs::write(self.directory.join("cgroup.procs"), pid.to_string())
    }

    /// Kills everything in it at once, forks in progress included.
    pub fn kill(&self) -> io::Result<()> {
        fs::write(self.directory.join("cgroup.kill"), "1")
    }

    /// What is in it, zombies included. A group that is gone has nothing in it.
    pub fn pids(&self) -> io::Result<Vec<u32>> {
        let mut pids = Vec::new();
        collect(&self.directory, 0, &mut pids)?;
        Ok(pids)
    }

    /// Gives the group back, those within it first. One that is not empty stays.
    pub fn remove(&self) {
        remove(&self.directory, 0);
    }
}

/// How the groups of one agent's shards are called. Agents may share the group around them and have shards of one name; in containers their state
/// directories even have one path, so it is the directory itself that tells them apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    device: u64,
    inode: u64,
}

impl Groups {
    pub fn of(state_dir: &Path) -> io::Result<Groups> {
        let directory = fs::metadata(state_dir)?;
        Ok(Groups {
            device: directory.dev(),
            inode: directory.ino(),
        })
    }

    /// Of a shard's group.
    pub fn name(&self, shard: &str) -> String {
        format!("{:x}-{:x}-{shard}", self.device, self.inode)
    }

    /// Those in `root`, each with the shard's part of its name.
    pub fn below(&self, root: &Path) -> Vec<(String, ShardCgroup)> {
        let begin = format!("llmgw-{}", self.name(""));
        let directories = directories(root).unwrap_or_default();
        let named = directories.into_iter().filter_map(|directory| {
            let name = directory.file_name()?.to_str()?.strip_prefix(&begin)?;
            Some((name.to_owned(), ShardCgroup::open(&directory)?))
        });
        named.collect()
    }
}

/// The group that the agent may make others in: the one it is in itself. `None` where it may not.
pub fn delegated(proc: &Path) -> Option<PathBuf> {
    let own = Cgroups::read(proc, "self").ok()??.unified?;
    MOUNTS.iter().find_map(|mount| {
        let root = root(&own, Path::new(mount));
        let probe = ShardCgroup::make(&root, &format!("probe-{}", std::process::id()))?;
        probe.remove();
        Some(root)
    })
}

/// Where shards get their groups, for an agent in the group `own`.
fn root(own: &str, mount: &Path) -> PathBuf {
    let path = own.trim_start_matches('/');
    let group = mount.join(path);
    // systemd can put the agent into a group below the one that it delegates (DelegateSubgroup=agent).
    let delegated = path.strip_suffix("/agent").map(|parent| mount.join(parent));
    delegated.unwrap_or(group)
}

fn collect(directory: &Path, depth: usize, pids: &mut Vec<u32>) -> io::Result<()> {
    match fs::read_to_string(directory.join("cgroup.procs")) {
        Ok(text) => pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok())),
        Err(error) if is_gone(&error) => return Ok(()),
        // One of threads: their processes are listed by the group above.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        Err(error) => return Err(error),
    }
    if depth < DEPTH_MAX {
        let inner = match directories(directory) {
            Err(error) if is_gone(&error) => Vec::new(),
            inner => inner?,
        };
        for inner in inner {
            collect(&inner, depth + 1, pids)?;
        }
    }
    Ok(())
}

/// A group that was removed, before its file was opened or since.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
}

fn remove(directory: &Path, depth: usize) {
    if depth < DEPTH_MAX {
        for inner in directories(directory).unwrap_or_default() {
            remove(&inner, depth + 1);
        }
    }
    // Fails while something is in it, which is then reported as left over anyway.
    let _ = fs::remove_dir(directory);
}

fn directories(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_own_group_is_where_the_shards_get_theirs() {
        for (own, expected) in [
            ("/", "/sys/fs/cgroup"),
            (
                "/system.slice/x.service",
                "/sys/fs/cgroup/system.slice/x.service",
            ),
            // With DelegateSubgroup=agent, but not for a group that merely has the name.
            (
                "/system.slice/x.service/agent",
                "/sys/fs/cgroup/system.slice/x.service",
            ),
            ("/agent", "/sys/fs/cgroup/agent"),
            ("/llm-agent", "/sys/fs/cgroup/llm-agent"),
        ] {
            assert_eq!(
                root(own, Path::new("/sys/fs/cgroup")),
                Path::new(expected),
                "{own}"
            );
        }
    }

    #[test]
    fn agents_that_share_a_group_do_not_share_the_groups_of_their_shards() {
        let root = std::env::temp_dir().join(format!("llmgw-groups-{}", std::process::id()));
        let state = root.join("state");
        fs::create_dir_all(&state).unwrap();
        let name = || Groups::of(&state).unwrap().name("m%2f0%2f0");
        let first = name();
        assert_eq!(name(), first);
        // As in another container, which has its own directory at this path.
        fs::rename(&state, root.join("theirs")).unwrap();
        fs::create_dir(&state).unwrap();
        assert_ne!(name(), first);
        assert!(first.ends_with("-m%2f0%2f0"), "{first}");
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_directory_that_is_no_control_group_is_left_as_it_was() {
        let root = std::env::temp_dir().join(format!("llmgw-cgroup-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        assert_eq!(ShardCgroup::make(&root, "a"), None);
        assert_eq!(directories(&root).unwrap(), Vec::<PathBuf>::new());
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_group_that_is_gone_is_empty_and_one_that_cannot_be_read_is_not() {
        let root = std::env::temp_dir().join(format!("llmgw-procs-{}", std::process::id()));
        let group = ShardCgroup {
            directory: root.clone(),
        };
        assert_eq!(group.pids().unwrap(), [0_u32; 0]);
        fs::create_dir_all(root.join("inner")).unwrap();
        fs::write(root.join("cgroup.procs"), "7\n").unwrap();
        assert_eq!(group.pids().unwrap(), [7]);
        fs::create_dir_all(root.join("inner/cgroup.procs")).unwrap();
        let error = group.pids().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
        fs::remove_dir_all(&root).unwrap();
    }
}
