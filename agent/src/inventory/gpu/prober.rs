//! Runs probes and survives what they get stuck in: a deadline, SIGKILL, and never a second one beside a stuck one.
//!
//! A process that hangs in the kernel can't be killed or reaped. It is left alone and looked at again: as long as any
//! process of its group lives, the driver counts as unresponsive and no further probe is started.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use llmgw_proto::inventory::gpu::{Backend, Gpus, SourceCause, SourceFailure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use super::assemble::without_source;
use super::bounded::{Collected, End, collect};
use super::facts::{quote, source_failure};
use crate::process_id::read_stats;

/// nvidia-smi takes seconds for each question on eight GPUs without persistence mode.
pub const PROBE_DEADLINE: Duration = Duration::from_secs(30);
/// An inventory of 16 GPUs with slices and processes is some 200 kB.
const OUTPUT_MAX_BYTES: usize = 4 << 20;
/// How long a killed probe is waited for before it counts as stuck.
const REAP_WAIT: Duration = Duration::from_millis(200);
const REAP_TICK: Duration = Duration::from_millis(5);
/// Where this process's own children are looked at, whatever else is read from elsewhere.
const PROC: &str = "/proc";

/// Where GPUs are looked for.
#[derive(Debug, Clone)]
pub struct GpuSources {
    /// Ask this nvidia-smi, and not NVML.
    pub nvidia_smi: Option<PathBuf>,
    /// Load this NVML library instead of looking for one.
    pub nvml_library: Option<PathBuf>,
    /// Has `meminfo`, for unified memory.
    pub proc: PathBuf,
    /// Has `bus/pci/devices`, for NUMA nodes.
    pub sysfs: PathBuf,
    /// The executable whose `agent probe-gpus` is the probe; `None`: this one.
    pub executable: Option<PathBuf>,
    pub deadline: Duration,
}

/// How a probe went.
#[derive(Debug)]
pub enum Probed {
    Answered(Gpus),
    /// Nothing came in time, or one that is stuck is still there.
    Silent(SourceFailure),
    /// It ended without an answer.
    Broken(SourceFailure),
}

/// Starts probes, one at a time.
pub struct Prober {
    sources: GpuSources,
    stuck: Option<Stuck>,
    /// How a group is killed; tests replace it by what a process that hangs in the kernel does with a signal.
    kill: fn(Pid),
}

/// A probe that outlived its SIGKILL.
struct Stuck {
    child: Child,
    group: Pid,
    since: Instant,
}

impl Default for GpuSources {
    fn default() -> GpuSources {
        GpuSources {
            nvidia_smi: None,
            nvml_library: None,
            proc: PathBuf::from("/proc"),
            sysfs: PathBuf::from("/sys"),
            executable: None,
            deadline: PROBE_DEADLINE,
        }
    }
}

impl Probed {
    /// The inventory that this alone amounts to.
    pub fn into_gpus(self) -> Gpus {
        match self {
            Probed::Answered(gpus) => gpus,
            Probed::Silent(failure) | Probed::Broken(failure) => without_source(vec![failure]),
        }
    }
}

impl Prober {
    pub fn new(sources: GpuSources) -> Prober {
        Prober {
            sources,
            stuck: None,
            kill: kill_group,
        }
    }

    /// One probe. Blocks until its deadline at most, plus a moment for the kill. One that NVML breaks is repeated without NVML.
    pub fn probe(&mut self) -> Probed {
        match self.probe_with(None) {
            Probed::Broken(failure)
                if failure.source == Backend::Nvml && self.sources.nvidia_smi.is_none() =>
            {
                self.probe_with(Some(&failure.message))
            }
            probed => probed,
        }
    }

    fn probe_with(&mut self, without_nvml: Option<&str>) -> Probed {
        if let Some(silent) = self.still_stuck() {
            return silent;
        }
        let source = if self.sources.nvidia_smi.is_some() || without_nvml.is_some() {
            Backend::NvidiaSmi
        } else {
            Backend::Nvml
        };
        let broken =
            |said: String| Probed::Broken(source_failure(source, SourceCause::Other, &said));
        let started = Instant::now();
        let mut child = match self.command(without_nvml).spawn() {
            Ok(child) => child,
            Err(error) => return broken(format!("the probe can't be started: {error}")),
        };
        let group = group_of(&child);
        let collected = collect(
            &mut child,
            started + self.sources.deadline,
            OUTPUT_MAX_BYTES,
        );
        // Also after a good end: nvidia-smi may have left something behind.
        (self.kill)(group);
        let probed = match collected {
            Ok(Collected {
                end: End::Exited,
                stdout,
                stderr,
            }) => match child.wait() {
                Ok(status) => {
                    answer(status, &stdout, &stderr).map_or_else(broken, Probed::Answered)
                }
                Err(error) => broken(format!("the probe can't be waited for: {error}")),
            },
            Ok(Collected {
                end: End::TooMuch, ..
            }) => broken(format!(
                "the probe printed more than {OUTPUT_MAX_BYTES} bytes"
            )),
            Ok(Collected {
                end: End::Deadline, ..
            }) => {
                let waited = self.sources.deadline.as_millis();
                let said =
                    format!("the driver did not answer within {waited} ms: the probe was killed");
                Probed::Silent(source_failure(source, SourceCause::Unresponsive, &said))
            }
            Err(error) => broken(format!("the probe can't be read: {error}")),
        };
        self.stuck = Stuck::outlives(child, group, started);
        probed
    }

    /// Whether the last probe still is there; if not, it is forgotten.
    fn still_stuck(&mut self) -> Option<Probed> {
        let stuck = self.stuck.as_mut()?;
        if !stuck.is_alive() {
            self.stuck = None;
            return None;
        }
        let said = format!(
            "a probe has hung in the driver for {} s (process group {}); no other is started beside it",
            stuck.since.elapsed().as_secs(),
            stuck.group
        );
        let source = if self.sources.nvidia_smi.is_some() {
            Backend::NvidiaSmi
        } else {
            Backend::Nvml
        };
        Some(Probed::Silent(source_failure(
            source,
            SourceCause::Unresponsive,
            &said,
        )))
    }

    fn command(&self, without_nvml: Option<&str>) -> Command {
        let sources = &self.sources;
        let executable = sources.executable.clone().unwrap_or_else(own_executable);
        let mut command = Command::new(executable);
        command.args(["agent", "probe-gpus", "--deadline-ms"]);
        command.arg(sources.deadline.as_millis().to_string());
        command.arg("--proc").arg(&sources.proc);
        command.arg("--sysfs").arg(&sources.sysfs);
        if let Some(path) = &sources.nvidia_smi {
            command.arg("--nvidia-smi").arg(path);
        }
        if let Some(path) = &sources.nvml_library {
            command.arg("--nvml-library").arg(path);
        }
        if let Some(why) = without_nvml {
            command.arg(format!("--without-nvml={why}"));
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        command
    }
}

impl Stuck {
    /// Waits a moment for the killed group to go. `None`: it went.
    fn outlives(child: Child, group: Pid, since: Instant) -> Option<Stuck> {
        let mut stuck = Stuck {
            child,
            group,
            since,
        };
        let until = Instant::now() + REAP_WAIT;
        while stuck.is_alive() {
            if Instant::now() >= until {
                return Some(stuck);
            }
            std::thread::sleep(REAP_TICK);
        }
        None
    }

    /// Reaps the child if it can be, without waiting; then looks for any other of its group.
    fn is_alive(&mut self) -> bool {
        match self.child.try_wait() {
            Ok(None) => true,
            // Somebody else reaped it, or it is reaped now.
            Ok(Some(_)) | Err(_) => is_group_alive(self.group),
        }
    }
}

/// One probe for somebody who asks once. Never fails: what went wrong is in the answer.
pub fn probe_once(sources: &GpuSources) -> Gpus {
    Prober::new(sources.clone()).probe().into_gpus()
}

/// The last line of what the probe printed; libraries may have printed before it.
fn answer(status: ExitStatus, stdout: &[u8], stderr: &[u8]) -> Result<Gpus, String> {
    let text = String::from_utf8_lossy(stdout);
    let last = text.lines().rfind(|line| !line.trim().is_empty());
    let parsed = last.map(serde_json::from_str);
    match parsed {
        Some(Ok(gpus)) if status.success() => Ok(gpus),
        _ => {
            let said = String::from_utf8_lossy(stderr);
            let said = said.lines().rfind(|line| !line.trim().is_empty());
            let said = said.map_or_else(String::new, |line| format!(": {}", quote(line)));
            Err(format!(
                "the probe ended without an answer ({status}){said}"
            ))
        }
    }
}

/// This executable, also after an upgrade replaced the file.
fn own_executable() -> PathBuf {
    std::env::current_exe()
        .ok()
        .filter(|path| path.exists())
        .unwrap_or_else(|| PathBuf::from("/proc/self/exe"))
}

fn group_of(child: &Child) -> Pid {
    // Linux numbers processes up to 2^22.
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX))
}

fn kill_group(group: Pid) {
    // Nobody is left: that is what was wanted.
    let _ = killpg(group, Signal::SIGKILL);
}

/// Whether any process of a group lives. Zombies that nobody reaps are dead.
fn is_group_alive(group: Pid) -> bool {
    let everybody = Pid::from_raw(-group.as_raw());
    if kill(everybody, None) == Err(Errno::ESRCH) {
        return false;
    }
    // Where the processes can't be looked at, the signal's word counts.
    has_living_member(Path::new(PROC), group).unwrap_or(true)
}

fn has_living_member(proc: &Path, group: Pid) -> io::Result<bool> {
    let group = group.as_raw().unsigned_abs();
    let stats = read_stats(proc)?;
    Ok(stats
        .values()
        .any(|stat| stat.group == group && stat.is_alive()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::inventory::gpu::scripts::Scripts;
    use llmgw_proto::inventory::gpu::DriverState;

    fn sources(scripts: &Scripts, script: &str, deadline: Duration) -> GpuSources {
        GpuSources {
            executable: Some(scripts.program("probe", script)),
            deadline,
            ..GpuSources::default()
        }
    }

    /// Where it is reached, the test has failed.
    const NEVER: Duration = Duration::from_secs(120);
    const SHORT: Duration = Duration::from_millis(300);

    fn json() -> String {
        serde_json::to_string(&without_source(Vec::new())).unwrap()
    }

    /// What was killed is gone: later than the prober waits for it, where the machine stalls.
    fn nothing_is_left(prober: &mut Prober) {
        let until = Instant::now() + NEVER;
        while prober.still_stuck().is_some() {
            assert!(Instant::now() < until, "SIGKILL did not end it");
            std::thread::sleep(REAP_TICK);
        }
    }

    #[test]
    fn the_answer_is_the_last_line_whatever_a_library_prints_before_it() {
        let scripts = Scripts::new("answer");
        let script = format!("echo noise; echo '{}'", json());
        let mut prober = Prober::new(sources(&scripts, &script, NEVER));
        let probed = prober.probe();
        assert!(matches!(probed, Probed::Answered(_)), "{probed:?}");
        nothing_is_left(&mut prober);
    }

    #[test]
    fn a_probe_that_never_ends_is_killed_and_the_driver_unresponsive() {
        let scripts = Scripts::new("hang");
        let script = "trap '' TERM INT; while :; do sleep 1; done";
        let mut prober = Prober::new(sources(&scripts, script, SHORT));
        let gpus = prober.probe().into_gpus();
        assert_eq!(gpus.driver, DriverState::Unresponsive);
        assert_eq!(
            gpus.passed_over[0].message,
            "the driver did not answer within 300 ms: the probe was killed"
        );
        assert!(gpus.passed_over[0].help.is_some());
        nothing_is_left(&mut prober);
    }

    #[test]
    fn a_grandchild_with_the_pipe_is_killed_after_a_good_answer() {
        let scripts = Scripts::new("grandchild");
        let left = scripts.path().join("left");
        let script = format!(
            "(trap '' TERM; exec sleep 300) & echo $! > {}; echo '{}'",
            left.display(),
            json()
        );
        let mut prober = Prober::new(sources(&scripts, &script, NEVER));
        assert!(matches!(prober.probe(), Probed::Answered(_)));
        nothing_is_left(&mut prober);
        let pid = fs::read_to_string(left).unwrap().trim().parse().unwrap();
        let process = crate::process_id::ProcessId::read(Path::new("/proc"), pid).unwrap();
        assert_eq!(process, None, "the grandchild is gone");
    }

    #[test]
    fn no_second_probe_is_started_beside_one_that_can_t_be_killed() {
        let scripts = Scripts::new("stuck");
        let starts = scripts.path().join("starts");
        // The first one hangs, a later one would answer.
        let script = format!(
            "if [ -e {0} ]; then echo started >> {0}; echo '{1}'; exit; fi; echo started > {0}; exec sleep 300",
            starts.display(),
            json()
        );
        let mut prober = Prober::new(sources(&scripts, &script, SHORT));
        // What a signal does to a process that hangs in the kernel: nothing.
        prober.kill = |_| {};
        assert!(matches!(prober.probe(), Probed::Silent(_)));
        let group = prober.stuck.as_ref().unwrap().group;
        while !starts.exists() {
            std::thread::yield_now();
        }
        for _ in 0..3 {
            let Probed::Silent(failure) = prober.probe() else {
                panic!("a probe was started");
            };
            assert_eq!(failure.cause, SourceCause::Unresponsive);
            assert!(
                failure.message.contains("no other is started"),
                "{}",
                failure.message
            );
        }
        assert_eq!(fs::read_to_string(&starts).unwrap().lines().count(), 1);

        // The driver came back: the process ends, and the next probe is a new one.
        kill_group(group);
        let child = &mut prober.stuck.as_mut().unwrap().child;
        child.wait().unwrap();
        prober.kill = kill_group;
        prober.sources.deadline = NEVER;
        assert!(matches!(prober.probe(), Probed::Answered(_)));
        assert_eq!(fs::read_to_string(&starts).unwrap().lines().count(), 2);
    }

    #[test]
    fn a_member_of_the_group_that_hangs_counts_and_a_zombie_does_not() {
        let proc = Scripts::new("proc");
        let stat = |pid: u32, state: char, group: u32| {
            let directory = proc.path().join(pid.to_string());
            fs::create_dir_all(&directory).unwrap();
            let line = format!(
                "{pid} (nvidia-smi) {state} 1 {group} {group} 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 99 0\n"
            );
            fs::write(directory.join("stat"), line).unwrap();
        };
        fs::create_dir_all(proc.path().join("self")).unwrap();
        stat(70, 'Z', 70);
        stat(71, 'S', 99);
        let group = Pid::from_raw(70);
        assert!(!has_living_member(proc.path(), group).unwrap());
        stat(72, 'D', 70);
        assert!(has_living_member(proc.path(), group).unwrap());
        assert!(has_living_member(Path::new("/nonexistent"), group).is_err());
        fs::remove_file(proc.path().join("72/stat")).unwrap();
        fs::create_dir(proc.path().join("72/stat")).unwrap();
        assert!(has_living_member(proc.path(), group).is_err());
    }

    #[test]
    fn a_probe_that_nvml_breaks_is_repeated_without_it() {
        let scripts = Scripts::new("crash");
        let script = format!(
            "case \"$*\" in *--without-nvml*) echo '{}';; *) kill -SEGV $$;; esac",
            json()
        );
        let mut prober = Prober::new(sources(&scripts, &script, NEVER));
        assert!(matches!(prober.probe(), Probed::Answered(_)));
    }

    #[test]
    fn a_probe_without_an_answer_says_how_it_ended() {
        let scripts = Scripts::new("broken");
        for (script, said) in [
            (
                "echo sad >&2; exit 3",
                "the probe ended without an answer (exit status: 3): sad",
            ),
            (
                "echo '{\"driver\": 1}'",
                "the probe ended without an answer (exit status: 0)",
            ),
            ("exec yes", "the probe printed more than 4194304 bytes"),
        ] {
            let mut prober = Prober::new(sources(&scripts, script, NEVER));
            let gpus = prober.probe().into_gpus();
            assert_eq!(gpus.driver, DriverState::Failing);
            assert_eq!(gpus.passed_over[0].message, said);
        }
        let mut sources = sources(&scripts, "", NEVER);
        sources.executable = Some(scripts.path().join("absent"));
        let gpus = probe_once(&sources);
        assert!(
            gpus.passed_over[0]
                .message
                .starts_with("the probe can't be started")
        );
    }
}
