//! Which processes belong to a shard, told from one look at the process table.
//!
//! Where the shard has a control group, that is the answer. Elsewhere there are several traces, since each of them gets
//! lost somewhere: a parent that died, a session that was left, an environment overwritten by `setproctitle`.

mod environ;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use crate::process_id::{ProcessId, Stat, read_stats};
pub use environ::{Environ, Environs, HANGS_AFTER, look_until_all_came};

/// The variable in an engine's environment that names the state directory of its agent: several agents may share a machine,
/// and none of them may take or kill another one's engines.
pub const STATE_VARIABLE: &str = "LLMGW_STATE";

/// The state of a process that is there and that the process table does not show (`hidepid`).
pub const UNSEEN: char = '?';

/// init, which adopts every orphan: nobody's engine.
const INIT: u32 = 1;

/// Every process there was at one moment.
#[derive(Clone, Debug, Default)]
pub struct ProcessTable {
    boot_id: String,
    stats: BTreeMap<u32, Stat>,
}

/// What is known of a shard's processes.
#[derive(Clone, Debug, Default)]
pub struct Traces {
    pub shard: String,
    /// Of this agent, as [`STATE_VARIABLE`] has it.
    pub state_dir: String,
    /// The processes that the agent started, each the leader of its own session; some may be dead.
    pub leaders: Vec<ProcessId>,
    /// Members found by an earlier look.
    pub seen: Vec<ProcessId>,
    /// What is in the shard's control group.
    pub in_cgroup: Vec<u32>,
}

/// A process of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub id: ProcessId,
    /// Of its first thread. `D`: it waits in the kernel, and no signal ends it. `Z`: that one has ended, and others have not.
    /// [`UNSEEN`]: not known.
    pub state: char,
}

impl ProcessTable {
    /// Looks at every process below a proc directory that may be seen. Those that end meanwhile are left out.
    pub fn read(proc: &Path) -> io::Result<ProcessTable> {
        let boot_id = fs::read_to_string(proc.join("sys/kernel/random/boot_id"))?;
        Ok(ProcessTable {
            boot_id: boot_id.trim().to_owned(),
            stats: read_stats(proc)?,
        })
    }

    /// The living members of a shard. `environ` reads a process's environment; it is asked only where nothing else decides.
    pub fn members(&self, traces: &Traces, environ: &dyn Fn(u32) -> Environ) -> Vec<Member> {
        let mut found: BTreeSet<u32> = BTreeSet::new();
        for id in traces.leaders.iter().chain(&traces.seen) {
            if self.is(id) {
                found.insert(id.pid);
            }
        }
        found.extend(
            traces
                .in_cgroup
                .iter()
                .filter(|pid| self.alive(**pid).is_some()),
        );
        // Nothing that is older than the shard can be its.
        let oldest = traces
            .leaders
            .iter()
            .map(|id| id.start_ticks)
            .min()
            .unwrap_or(0);
        for (&pid, stat) in &self.stats {
            let may_be = stat.start_ticks >= oldest && may_be_ours(pid, stat);
            if may_be && !found.contains(&pid) && self.belongs(pid, stat, traces, environ) {
                found.insert(pid);
            }
        }
        self.add_descendants(&mut found);
        // It may just have ended; the next look tells.
        let unseen = traces.in_cgroup.iter();
        let unseen = unseen.filter(|pid| !self.stats.contains_key(pid));
        let unseen = unseen.map(|pid| Member {
            id: ProcessId {
                pid: *pid,
                start_ticks: 0,
                boot_id: self.boot_id.clone(),
            },
            state: UNSEEN,
        });
        let own = std::process::id();
        found
            .into_iter()
            .filter(|pid| *pid != own && *pid != INIT)
            .filter_map(|pid| Some((pid, self.alive(pid)?)))
            .map(|(pid, stat)| Member {
                id: self.id(pid, stat),
                state: stat.state,
            })
            .chain(unseen)
            .collect()
    }

    /// Engines of this state directory, by the shard that their environment names.
    pub fn engines(
        &self,
        state_dir: &str,
        environ: &dyn Fn(u32) -> Environ,
    ) -> Vec<(String, ProcessId)> {
        self.stats
            .iter()
            .filter(|(pid, stat)| may_be_ours(**pid, stat))
            .filter_map(|(&pid, stat)| match environ(pid) {
                Environ::Engine {
                    shard,
                    state_dir: theirs,
                } if theirs == state_dir => Some((shard, self.id(pid, stat))),
                _ => None,
            })
            .collect()
    }

    /// Zombies left out.
    pub fn living(&self) -> BTreeSet<u32> {
        let living = self.stats.iter().filter(|(_, stat)| stat.is_alive());
        living.map(|(pid, _)| *pid).collect()
    }

    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// Whether this very process lives.
    pub fn is(&self, id: &ProcessId) -> bool {
        self.boot_id == id.boot_id
            && self
                .alive(id.pid)
                .is_some_and(|stat| stat.start_ticks == id.start_ticks)
    }

    /// The session and the environment, for a process that is neither recorded nor in the group.
    fn belongs(
        &self,
        pid: u32,
        stat: &Stat,
        traces: &Traces,
        environ: &dyn Fn(u32) -> Environ,
    ) -> bool {
        let leader = traces
            .leaders
            .iter()
            .find(|leader| leader.pid == stat.session && leader.boot_id == self.boot_id);
        if leader.is_some_and(|leader| self.holds_number(leader)) {
            return true;
        }
        match environ(pid) {
            Environ::Engine { shard, state_dir } => {
                shard == traces.shard && state_dir == traces.state_dir
            }
            Environ::Other => false,
            // Its session's leader is dead. Engines overwrite their environment with a title, other people's programs that
            // got the same session number hardly do; and a session leader with that number would be another process.
            Environ::Illegible => leader.is_some() && !self.stats.contains_key(&stat.session),
        }
    }

    /// The leader's number is still its own: it lives, or waits as a zombie to be reaped.
    fn holds_number(&self, leader: &ProcessId) -> bool {
        self.stats
            .get(&leader.pid)
            .is_some_and(|stat| stat.start_ticks == leader.start_ticks)
    }

    /// Children of members are members, to any depth.
    fn add_descendants(&self, found: &mut BTreeSet<u32>) {
        // Each round but the last adds at least one process, so this ends.
        loop {
            let more: Vec<u32> = self
                .stats
                .iter()
                .filter(|(pid, stat)| !found.contains(pid) && found.contains(&stat.parent))
                .map(|(pid, _)| *pid)
                .collect();
            if more.is_empty() {
                return;
            }
            found.extend(more);
        }
    }

    fn alive(&self, pid: u32) -> Option<&Stat> {
        self.stats.get(&pid).filter(|stat| stat.is_alive())
    }

    fn id(&self, pid: u32, stat: &Stat) -> ProcessId {
        ProcessId {
            pid,
            start_ticks: stat.start_ticks,
            boot_id: self.boot_id.clone(),
        }
    }
}

/// Neither init nor the agent itself, whatever their environment says. Threads of the kernel have none, and there are hundreds of them.
fn may_be_ours(pid: u32, stat: &Stat) -> bool {
    let is_never_ours = pid == INIT || pid == std::process::id() || stat.is_kernel_thread;
    stat.is_alive() && !is_never_ours
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const BOOT: &str = "5eed";

    /// `(pid, parent, session, start, state)`.
    fn table(processes: &[(u32, u32, u32, u64, char)]) -> ProcessTable {
        let stats = processes
            .iter()
            .map(|&(pid, parent, session, start_ticks, state)| {
                let stat = Stat {
                    state,
                    parent,
                    group: session,
                    session,
                    threads: 1,
                    start_ticks,
                    is_kernel_thread: false,
                };
                (pid, stat)
            });
        ProcessTable {
            boot_id: BOOT.to_owned(),
            stats: stats.collect(),
        }
    }

    fn id(pid: u32, start_ticks: u64) -> ProcessId {
        ProcessId {
            pid,
            start_ticks,
            boot_id: BOOT.to_owned(),
        }
    }

    fn traces(leaders: &[ProcessId]) -> Traces {
        Traces {
            shard: "m/0/0".to_owned(),
            state_dir: "/state".to_owned(),
            leaders: leaders.to_vec(),
            ..Traces::default()
        }
    }

    fn engine(shard: &str, state_dir: &str) -> Environ {
        Environ::Engine {
            shard: shard.to_owned(),
            state_dir: state_dir.to_owned(),
        }
    }

    fn pids(table: &ProcessTable, traces: &Traces, environ: &dyn Fn(u32) -> Environ) -> Vec<u32> {
        let members = table.members(traces, environ);
        members.iter().map(|member| member.id.pid).collect()
    }

    #[test]
    fn a_leader_its_session_and_their_descendants_in_other_sessions_are_members() {
        let table = table(&[
            (10, 1, 10, 5, 'S'),
            (11, 10, 10, 6, 'S'),
            // It left the session, and its child after it.
            (12, 11, 12, 7, 'S'),
            (13, 12, 13, 8, 'S'),
            // Orphaned in the session.
            (14, 1, 10, 8, 'S'),
            (20, 1, 20, 9, 'S'),
        ]);
        let other = |_| Environ::Other;
        assert_eq!(
            pids(&table, &traces(&[id(10, 5)]), &other),
            [10, 11, 12, 13, 14]
        );
    }

    #[test]
    fn an_orphan_that_left_the_session_is_found_by_its_environment_and_another_agents_is_not() {
        let table = table(&[
            (12, 1, 12, 7, 'S'),
            (13, 1, 13, 7, 'S'),
            (14, 1, 14, 7, 'S'),
        ]);
        let environ = |pid| match pid {
            12 => engine("m/0/0", "/state"),
            13 => engine("m/0/0", "/other"),
            _ => engine("m/1/0", "/state"),
        };
        assert_eq!(pids(&table, &traces(&[id(10, 5)]), &environ), [12]);
    }

    #[test]
    fn orphans_with_an_overwritten_environment_are_found_by_the_session_of_a_dead_leader() {
        let table = table(&[(11, 1, 10, 6, 'S')]);
        assert_eq!(
            pids(&table, &traces(&[id(10, 5)]), &|_| Environ::Illegible),
            [11]
        );
        assert_eq!(
            pids(&table, &traces(&[id(10, 5)]), &|_| Environ::Other),
            [0_u32; 0]
        );
    }

    #[test]
    fn a_process_that_got_a_dead_leaders_number_is_no_member_nor_is_its_session() {
        let table = table(&[(10, 1, 10, 99, 'S'), (11, 10, 10, 100, 'S')]);
        for environ in [Environ::Other, Environ::Illegible] {
            let found = pids(&table, &traces(&[id(10, 5)]), &|_| environ.clone());
            assert_eq!(found, [0_u32; 0], "{environ:?}");
        }
    }

    #[test]
    fn a_zombie_is_no_member_and_its_children_are() {
        let table = table(&[(10, 1, 10, 5, 'Z'), (11, 10, 10, 6, 'D')]);
        let members = table.members(&traces(&[id(10, 5)]), &|_| Environ::Other);
        assert_eq!(members.len(), 1);
        assert_eq!((members[0].id.pid, members[0].state), (11, 'D'));
    }

    #[test]
    fn what_was_seen_before_is_a_member_however_it_looks_now() {
        let table = table(&[(12, 1, 12, 7, 'S'), (13, 1, 13, 9, 'S')]);
        let traces = Traces {
            seen: vec![id(12, 7), id(13, 8)],
            ..traces(&[id(10, 5)])
        };
        assert_eq!(pids(&table, &traces, &|_| Environ::Illegible), [12]);
    }

    #[test]
    fn what_is_in_the_group_is_a_member_though_the_table_does_not_show_it() {
        let table = table(&[(11, 1, 11, 7, 'S'), (12, 1, 12, 7, 'Z')]);
        let traces = Traces {
            in_cgroup: vec![11, 12, 13],
            ..traces(&[])
        };
        let members = table.members(&traces, &|_| Environ::Other);
        let found: Vec<(u32, char)> = members
            .iter()
            .map(|member| (member.id.pid, member.state))
            .collect();
        assert_eq!(found, [(11, 'S'), (13, UNSEEN)]);
    }

    #[test]
    fn neither_the_dead_nor_init_the_agent_or_the_kernels_threads_are_asked_for_their_environments()
    {
        let own = std::process::id();
        let mut table = table(&[
            (INIT, 0, 1, 0, 'S'),
            (own, 1, own, 7, 'S'),
            (3_000_000_000, 2, 0, 7, 'S'),
            (3_000_000_001, 1, 1, 7, 'Z'),
            (3_000_000_002, 1, 1, 7, 'S'),
        ]);
        let kernel = table.stats.get_mut(&3_000_000_000).unwrap();
        kernel.is_kernel_thread = true;
        let asked = RefCell::new(Vec::new());
        let environ = |pid| {
            asked.borrow_mut().push(pid);
            Environ::Other
        };
        assert_eq!(table.engines("/state", &environ), []);
        assert_eq!(pids(&table, &traces(&[]), &environ), [0_u32; 0]);
        assert_eq!(asked.take(), [3_000_000_002, 3_000_000_002]);
    }

    #[test]
    fn nothing_older_than_the_shard_and_nothing_of_another_boot_is_a_member() {
        let table = table(&[(9, 1, 9, 4, 'S'), (10, 1, 10, 5, 'S')]);
        let named = |_| engine("m/0/0", "/state");
        assert_eq!(pids(&table, &traces(&[id(10, 5)]), &named), [10]);
        let before = ProcessId {
            boot_id: "0".to_owned(),
            ..id(10, 5)
        };
        assert_eq!(
            pids(&table, &traces(&[before]), &|_| Environ::Other),
            [0_u32; 0]
        );
    }
}
