//! Which process a number means: a pid is used again, a pid with its start time and boot is not.
//!
//! What `/proc/PID/stat` looks like was recorded on Linux 6.1; see `tests/recordings/proc`.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

/// `/proc/PID/stat` is one line of 52 fields and a name of at most 64 bytes.
const STAT_MAX_BYTES: usize = 4 * 1024;

/// Among the flags of a process, on every Linux.
const PF_KTHREAD: u32 = 0x0020_0000;

/// The kernel's word for the group of a process that was reaped while its line was written.
const REAPED: &str = "-1";

/// A process for certain: one number at one time since one boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessId {
    pub pid: u32,
    /// Clock ticks after boot.
    pub start_ticks: u64,
    /// `/proc/sys/kernel/random/boot_id`: after a reboot the ticks begin again.
    pub boot_id: String,
}

/// What the kernel says of a process right now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// `R` running, `S` sleeping, `D` waiting in the kernel, `Z` zombie, …
    pub state: char,
    pub parent: u32,
    pub group: u32,
    pub session: u32,
    /// Those that run, and the first one for as long as it is not reaped.
    pub threads: u32,
    /// Clock ticks after boot.
    pub start_ticks: u64,
    /// The kernel's own: it has no environment.
    pub is_kernel_thread: bool,
}

/// A stat line that is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatError {
    pub field: &'static str,
}

impl fmt::Display for StatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no `{}` in the stat line", self.field)
    }
}

impl std::error::Error for StatError {}

impl ProcessId {
    /// Reads who `pid` is now, below a proc directory (`/proc`). `None`: nobody alive.
    pub fn read(proc: &Path, pid: u32) -> io::Result<Option<ProcessId>> {
        let Some(stat) = read_stat(proc, pid)? else {
            return Ok(None);
        };
        if !stat.is_alive() {
            return Ok(None);
        }
        let boot_id = fs::read_to_string(proc.join("sys/kernel/random/boot_id"))?;
        Ok(Some(ProcessId {
            pid,
            start_ticks: stat.start_ticks,
            boot_id: boot_id.trim().to_string(),
        }))
    }

    /// Whether this very process of ours still lives. A zombie is dead, and a pid that another process got is not it: least of all one
    /// that is not for us to see (`hidepid`), as in [`read_stats`].
    pub fn is_alive(&self, proc: &Path) -> io::Result<bool> {
        match ProcessId::read(proc, self.pid) {
            Ok(id) => Ok(id.as_ref() == Some(self)),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Stat {
    /// Reads a stat line. The name may hold spaces and parentheses, so the fields begin after the last one.
    pub fn parse(line: &str) -> Result<Stat, StatError> {
        let (_, fields) = line.rsplit_once(')').ok_or(StatError { field: "comm" })?;
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        if fields.get(2) == Some(&REAPED) {
            return Ok(Stat {
                state: 'X',
                parent: 0,
                group: 0,
                session: 0,
                threads: 0,
                start_ticks: number(&fields, 19, "starttime")?,
                is_kernel_thread: false,
            });
        }
        Ok(Stat {
            state: fields
                .first()
                .and_then(|state| state.chars().next())
                .ok_or(StatError { field: "state" })?,
            parent: number(&fields, 1, "ppid")?,
            group: number(&fields, 2, "pgrp")?,
            session: number(&fields, 3, "session")?,
            threads: number(&fields, 17, "num_threads")?,
            start_ticks: number(&fields, 19, "starttime")?,
            is_kernel_thread: number::<u32>(&fields, 6, "flags")? & PF_KTHREAD != 0,
        })
    }

    /// A zombie has ended, and so has `X`: nothing of it runs any more. The state is the first thread's, though: while another one
    /// is left, all that the process holds is still held.
    pub fn is_alive(&self) -> bool {
        match self.state {
            'X' | 'x' => false,
            'Z' => self.threads > 1,
            _ => true,
        }
    }
}

/// The stat of `pid`; `None` where there is no such process.
pub fn read_stat(proc: &Path, pid: u32) -> io::Result<Option<Stat>> {
    let bytes = match fs::read(proc.join(pid.to_string()).join("stat")) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // It ended between opening and reading.
        Err(error) if error.raw_os_error() == Some(ESRCH) => return Ok(None),
        Err(error) => return Err(error),
    };
    let line = String::from_utf8_lossy(&bytes[..bytes.len().min(STAT_MAX_BYTES)]);
    Stat::parse(&line).map(Some).map_err(io::Error::other)
}

/// The stats of every process below a proc directory. Those that end meanwhile are left out, and those that are not for us to see
/// (`hidepid`): they are another user's.
///
/// # Errors
/// Where one can't be read for any other reason: who asks must not take it for gone.
pub fn read_stats(proc: &Path) -> io::Result<BTreeMap<u32, Stat>> {
    let mut stats = BTreeMap::new();
    for entry in fs::read_dir(proc)? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        match read_stat(proc, pid) {
            Ok(Some(stat)) => drop(stats.insert(pid, stat)),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            Err(error) => return Err(error),
        }
    }
    Ok(stats)
}

/// "No such process", on every Linux.
const ESRCH: i32 = 3;

fn number<T: std::str::FromStr>(
    fields: &[&str],
    index: usize,
    field: &'static str,
) -> Result<T, StatError> {
    fields
        .get(index)
        .and_then(|text| text.parse().ok())
        .ok_or(StatError { field })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE_ONLY: &str = "/sys/bus/platform/drivers_probe";

    fn recorded(name: &str) -> Stat {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../tests/recordings/proc")
            .join(name);
        Stat::parse(&fs::read_to_string(path).unwrap()).unwrap()
    }

    #[test]
    fn a_name_with_parentheses_and_a_state_in_it_hides_nothing() {
        let stat = recorded("comm-with-parens-and-state.stat");
        assert_eq!((stat.state, stat.is_alive()), ('Z', false));
    }

    #[test]
    fn zombies_and_the_dead_are_dead_and_a_process_stuck_in_the_kernel_lives() {
        for (name, alive) in [
            ("dead-x.stat", false),
            ("nvidia-smi-dstate.stat", true),
            ("vllm-api.stat", true),
            ("comm-empty.stat", true),
            ("comm-with-spaces.stat", true),
        ] {
            assert_eq!(recorded(name).is_alive(), alive, "{name}");
        }
    }

    #[test]
    fn a_process_that_was_measured_alive_and_as_a_zombie_keeps_its_start_and_is_dead() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"));
        let text = fs::read_to_string(path.join("../tests/recordings/proc/measured.txt")).unwrap();
        let line = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            Stat::parse(line.unwrap()).unwrap()
        };
        let (live, zombie) = (line("live: "), line("zombie: "));
        assert_eq!((live.state, live.is_alive()), ('S', true));
        assert_eq!((zombie.state, zombie.is_alive()), ('Z', false));
        assert_eq!(live.start_ticks, 79_210);
        assert_eq!(zombie.start_ticks, live.start_ticks);
    }

    #[test]
    fn a_process_whose_first_thread_ended_lives_until_the_last_one_has() {
        for (state, threads, alive) in [('Z', 3, true), ('Z', 1, false), ('X', 3, false)] {
            let line =
                format!("7 (x) {state} 1 7 7 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 {threads} 0 100 0");
            assert_eq!(Stat::parse(&line).unwrap().is_alive(), alive, "{line}");
        }
    }

    #[test]
    fn a_thread_of_the_kernel_is_told_from_an_engine() {
        let line = "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 20 0 0";
        assert!(Stat::parse(line).unwrap().is_kernel_thread);
        assert!(!recorded("vllm-api.stat").is_kernel_thread);
    }

    #[test]
    fn a_process_that_was_reaped_as_it_was_read_is_dead() {
        let line = "7 (x) S 0 -1 -1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 0 0 100 0";
        assert!(!Stat::parse(line).unwrap().is_alive());
    }

    #[test]
    fn a_process_that_cannot_be_read_is_not_taken_for_gone() {
        let proc = std::env::temp_dir().join(format!("llmgw-stats-{}", std::process::id()));
        fs::create_dir_all(proc.join("7")).unwrap();
        assert_eq!(read_stats(&proc).unwrap(), [].into(), "no file: it ended");
        fs::create_dir_all(proc.join("7/stat")).unwrap();
        let error = read_stats(&proc).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
        fs::remove_dir_all(proc).unwrap();
    }

    #[test]
    fn a_number_that_was_used_again_has_another_start() {
        let (engine, other) = (recorded("vllm-api.stat"), recorded("pid-reused.stat"));
        assert_eq!(
            (engine.start_ticks, other.start_ticks),
            (812_345, 9_812_345)
        );
        assert!(other.is_alive());
    }

    #[test]
    fn a_scheduler_that_left_its_parent_can_be_found_by_its_session() {
        let stat = recorded("sglang-scheduler.stat");
        assert_eq!((stat.parent, stat.session), (1, 2_505_700));
        assert_eq!((stat.group, stat.start_ticks), (2_505_700, 99_123_456));
    }

    #[test]
    fn an_orphaned_engine_core_belongs_to_init_and_keeps_its_session() {
        let stat = recorded("vllm-enginecore-orphan.stat");
        assert_eq!(stat.parent, 1);
        assert_ne!(stat.session, 1);
    }

    #[test]
    fn a_line_that_is_cut_off_names_the_field_that_is_missing() {
        for (line, field) in [
            ("", "comm"),
            ("1 (x)", "state"),
            ("1 (x) S", "ppid"),
            ("1 (x) S 1 2 3 0 -1", "num_threads"),
            ("1 (x) S 1 2 3 0 -1 0 0 0 0 0 0 0 0 0 20 0 1", "starttime"),
        ] {
            assert_eq!(Stat::parse(line), Err(StatError { field }), "{line}");
        }
    }

    #[test]
    fn this_process_is_itself_and_none_that_started_at_another_time() {
        let proc = Path::new("/proc");
        let me = ProcessId::read(proc, std::process::id()).unwrap().unwrap();
        assert!(me.is_alive(proc).unwrap());
        let recycled = ProcessId {
            start_ticks: me.start_ticks + 1,
            ..me
        };
        assert!(!recycled.is_alive(proc).unwrap());
    }

    #[test]
    fn a_number_that_is_not_for_us_to_see_any_more_is_another_users() {
        let proc = std::env::temp_dir().join(format!("llmgw-unseen-{}", std::process::id()));
        fs::create_dir_all(proc.join("7")).unwrap();
        // Nobody may read it, root included.
        std::os::unix::fs::symlink(WRITE_ONLY, proc.join("7/stat")).unwrap();
        let id = ProcessId {
            pid: 7,
            start_ticks: 100,
            boot_id: "5eed".to_owned(),
        };
        let (read, is_alive) = (ProcessId::read(&proc, 7), id.is_alive(&proc));
        fs::remove_dir_all(proc).unwrap();
        // Elsewhere there may be no such file.
        if read.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) {
            assert!(!is_alive.unwrap());
        }
    }

    #[test]
    fn a_child_that_was_not_reaped_yet_is_dead() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        // `wait` would reap it, so its state is read instead.
        while read_stat(Path::new("/proc"), pid).unwrap().unwrap().state != 'Z' {
            std::thread::yield_now();
        }
        assert_eq!(ProcessId::read(Path::new("/proc"), pid).unwrap(), None);
        child.wait().unwrap();
    }
}
