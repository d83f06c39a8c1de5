//! The end of a shard: signals to everything that belongs to it, round by round until nothing is left, and then the look
//! whether its GPUs are free.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc};

use super::cgroup::ShardCgroup;
use super::gpu::{self, GpuFacts, Release};
use super::machine::Event;
use super::process::{self, Process};
use super::tree::{Environs, Member, ProcessTable, Traces, UNSEEN};
use crate::process_id::ProcessId;

/// The first look after a signal comes this soon, each later one after half as long again.
const LOOK_FIRST: Duration = Duration::from_millis(5);
/// While processes may still end by themselves.
const LOOK_TERMINATED_MAX: Duration = Duration::from_millis(200);
/// After SIGKILL: what is still there after some looks waits in the kernel, maybe for hours.
const LOOK_KILLED_MAX: Duration = Duration::from_secs(2);
/// Between two looks at GPUs.
const LOOK_GPU: Duration = Duration::from_millis(200);
/// Between two requests for a look at what is held still: each costs the driver some 100 ms, and it frees memory over seconds.
const ASK_GPU: Duration = Duration::from_secs(2);
/// Processes that a reason names.
const SHOWN_MAX: usize = 8;

/// Everything that a look at a shard's processes needs.
#[derive(Clone)]
pub struct Scan {
    pub proc: PathBuf,
    pub traces: Traces,
    /// Those of its leaders that this agent watches.
    pub held: Vec<Arc<Process>>,
    pub cgroup: Option<ShardCgroup>,
}

/// Which signal a round sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Force {
    /// SIGTERM once, to all that is there.
    Terminate,
    /// SIGKILL in every round, to whatever is there by then.
    Kill,
}

impl Scan {
    /// What lives of the shard now. What was found once is known from then on, wherever it moves.
    ///
    /// Nothing is nothing twice: the process table is not read at one instant, so that a child with a number that was passed
    /// already, of a parent that ended before its number was reached, is seen by the second look only.
    ///
    /// # Errors
    /// Where something can't be seen; `TimedOut` where nothing is found, and an environment has not come yet.
    pub fn look(&mut self) -> io::Result<Vec<Member>> {
        let members = self.look_once()?;
        match members.is_empty() {
            true => self.look_once(),
            false => Ok(members),
        }
    }

    fn look_once(&mut self) -> io::Result<Vec<Member>> {
        if let Some(cgroup) = &self.cgroup {
            self.traces.in_cgroup = cgroup.pids()?;
        }
        let table = ProcessTable::read(&self.proc)?;
        let environs = Environs::of(&self.proc);
        let mut members = table.members(&self.traces, &|pid| environs.read(pid));
        for process in &self.held {
            if !members.iter().any(|member| member.id == process.id) && !process.has_ended()? {
                // The group tells no more of it than its number.
                members.retain(|member| member.id.pid != process.id.pid);
                members.push(Member {
                    id: process.id.clone(),
                    state: UNSEEN,
                });
            }
        }
        if members.is_empty() {
            environs.all_came()?;
        }
        self.traces.seen = members.iter().map(|member| member.id.clone()).collect();
        Ok(members)
    }

    /// Kills what is in the group, and then whatever else a look finds: before it, since it may take long or fail. Without a group it
    /// has to come first, for what descends from the engine is found only while that lives; where it fails, what is known has to do.
    /// What a kill cannot reach is found by the next look.
    fn kill(&mut self) -> io::Result<Vec<Member>> {
        self.kill_group();
        let members = self.look();
        match &members {
            Ok(members) => self.send(ids(members), libc::SIGKILL),
            Err(_) => self.send(
                self.traces.leaders.iter().chain(&self.traces.seen),
                libc::SIGKILL,
            ),
        }
        members
    }

    fn kill_group(&self) {
        if let Some(cgroup) = &self.cgroup
            && let Err(error) = cgroup.kill()
        {
            let group = cgroup.directory().display().to_string();
            tracing::warn!(shard = self.traces.shard, group, %error, "the control group can't be killed");
        }
    }

    /// A frozen process is thawed, or it would not get to end itself.
    fn terminate(&mut self) -> io::Result<Vec<Member>> {
        let members = self.look()?;
        self.send(ids(&members), libc::SIGTERM);
        self.send(ids(&members), libc::SIGCONT);
        Ok(members)
    }

    fn send<'a>(&self, ids: impl Iterator<Item = &'a ProcessId>, signal: i32) {
        for id in ids {
            // One that the process table does not show can be signalled by its descriptor only.
            let held = self.held.iter().find(|process| process.id == *id);
            let sent = match held {
                Some(process) => process.signal(signal),
                None => process::signal(id, &self.proc, signal).map(drop),
            };
            if let Err(error) = sent {
                let (shard, pid) = (&self.traces.shard, id.pid);
                tracing::warn!(shard, pid, signal, %error, "a process can't be signalled");
            }
        }
    }
}

fn ids(members: &[Member]) -> impl Iterator<Item = &ProcessId> {
    members.iter().map(|member| &member.id)
}

/// Signals everything, and tells what remains until nothing does. Each look leaves in `traces` what it saw, and `look_now` shortens the
/// wait for the next one.
pub async fn until_gone(
    mut scan: Scan,
    force: Force,
    traces: Arc<Mutex<Traces>>,
    look_now: Arc<Notify>,
    events: mpsc::Sender<Event>,
) {
    let mut pause = LOOK_FIRST;
    let mut told = String::new();
    let mut first = true;
    let pause_max = match force {
        Force::Terminate => LOOK_TERMINATED_MAX,
        Force::Kill => LOOK_KILLED_MAX,
    };
    loop {
        let round = tokio::task::spawn_blocking(move || {
            let members = match force {
                Force::Terminate if first => scan.terminate(),
                Force::Terminate => scan.look(),
                Force::Kill => scan.kill(),
            };
            (scan, members)
        });
        let Ok((back, members)) = round.await else {
            return;
        };
        // What could not be seen was not asked to end either.
        (scan, first) = (back, first && members.is_err());
        keep_seen(&traces, scan.traces.seen.clone());
        let remains = match members {
            Ok(members) if members.is_empty() => {
                let _ = events.send(Event::Gone).await;
                return;
            }
            Ok(members) => in_words(&members),
            Err(error) => format!("what runs can't be seen: {error}"),
        };
        if remains != told {
            told.clone_from(&remains);
            if events.send(Event::Remains(remains)).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => pause = (pause + pause / 2).min(pause_max),
            () = look_now.notified() => pause = LOOK_FIRST,
        }
    }
}

/// For a later look, which it may be all that leads to them.
pub fn keep_seen(traces: &Mutex<Traces>, seen: Vec<ProcessId>) {
    traces.lock().unwrap_or_else(PoisonError::into_inner).seen = seen;
}

/// Kills what is there of a shard before anything else happens to it; which processes that were. Blocks, at most `within` and until each
/// environment has come or is known to hang.
///
/// # Errors
/// Where what is left can't be seen. What is known was killed all the same.
pub fn kill_now(mut scan: Scan, within: Duration) -> io::Result<BTreeSet<u32>> {
    let deadline = Instant::now() + within;
    // First: of those that the group's kill ends, no look finds any more.
    let in_group = scan.cgroup.as_ref().map(ShardCgroup::pids);
    let in_group = in_group.transpose().unwrap_or_default();
    let mut killed: BTreeSet<u32> = in_group.unwrap_or_default().into_iter().collect();
    loop {
        let members = match scan.kill() {
            // It comes, or is known to hang in the end.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                std::thread::sleep(LOOK_FIRST);
                continue;
            }
            members => members?,
        };
        killed.extend(ids(&members).map(|id| id.pid));
        if members.is_empty() || Instant::now() >= deadline {
            return Ok(killed);
        }
        std::thread::sleep(LOOK_FIRST);
    }
}

/// Has the GPUs looked at until their memory has fallen, and tells what holds them meanwhile.
pub async fn until_free(
    shard: String,
    uuids: Vec<String>,
    gpus: Arc<dyn GpuFacts>,
    events: mpsc::Sender<Event>,
) {
    let gone = Instant::now();
    if !uuids.is_empty() {
        gpus.look_now();
    }
    let mut asked = tokio::time::Instant::now();
    let mut told = None;
    loop {
        let mut held = None;
        for uuid in &uuids {
            match gpu::release(uuid, gpus.gpu(uuid).as_ref(), gone) {
                Release::Free => {}
                Release::Unseen(what) => held = held.or(Some(Event::Unseen(what))),
                Release::Held(what) => held = held.or(Some(Event::Held(what))),
                Release::Unknown(what) => {
                    tracing::warn!(
                        shard,
                        "{what}; its processes are gone, so it counts as free"
                    );
                }
            }
        }
        let Some(event) = held.clone() else {
            let _ = events.send(Event::Released).await;
            return;
        };
        if matches!(event, Event::Held(_)) && asked.elapsed() >= ASK_GPU {
            gpus.look_now();
            asked = tokio::time::Instant::now();
        }
        if held != told {
            told = held;
            if events.send(event).await.is_err() {
                return;
            }
        }
        tokio::time::sleep(LOOK_GPU).await;
    }
}

fn in_words(members: &[Member]) -> String {
    let shown: Vec<String> = members
        .iter()
        .take(SHOWN_MAX)
        .map(|member| match member.state {
            UNSEEN => format!("process {} (not to be seen)", member.id.pid),
            state => format!("process {} ({state})", member.id.pid),
        })
        .collect();
    match members.len().saturating_sub(SHOWN_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::{Child, Command};

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;
    use crate::supervisor::gpu::GpuFact;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// A GPU that is free at the third look.
    #[derive(Default)]
    struct FreedLate {
        looks: Mutex<Vec<Instant>>,
    }

    impl GpuFacts for FreedLate {
        fn gpu(&self, _: &str) -> Option<GpuFact> {
            let looks = self.looks.lock().unwrap();
            Some(GpuFact {
                problems: Vec::new(),
                used_mib: Some(if looks.len() < 3 { 9_000 } else { 3 }),
                holders: Vec::new(),
                read_at: *looks.last().unwrap(),
            })
        }

        fn look_now(&self) {
            self.looks.lock().unwrap().push(Instant::now());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_gpu_that_is_held_still_is_looked_at_again_and_not_all_the_time() {
        let began = tokio::time::Instant::now();
        let (gpus, uuids) = (Arc::new(FreedLate::default()), vec!["GPU-1".to_owned()]);
        let (sender, mut events) = mpsc::channel(8);
        let frees = until_free("m/0/0".to_owned(), uuids, gpus.clone(), sender);
        tokio::time::timeout(PATIENCE, frees).await.unwrap();
        assert!(matches!(events.recv().await, Some(Event::Held(_))));
        assert_eq!(events.recv().await, Some(Event::Released));
        assert_eq!(gpus.looks.lock().unwrap().len(), 3);
        assert!(began.elapsed() >= 2 * ASK_GPU);
    }

    /// A process of the test's, and a proc directory in which it is and which can't be read.
    struct Unseen {
        child: Child,
        proc: PathBuf,
    }

    impl Unseen {
        fn new(name: &str) -> Unseen {
            let child = Command::new("/bin/sleep").arg("600").spawn().unwrap();
            let proc = std::env::temp_dir().join(format!("llmgw-{name}-{}", std::process::id()));
            let (pid, boot_id) = (child.id().to_string(), "sys/kernel/random/boot_id");
            fs::create_dir_all(proc.join(boot_id).parent().unwrap()).unwrap();
            fs::write(proc.join(boot_id), "5eed").unwrap();
            fs::create_dir_all(proc.join(&pid)).unwrap();
            let stat = fs::read(Path::new("/proc").join(&pid).join("stat")).unwrap();
            fs::write(proc.join(&pid).join("stat"), stat).unwrap();
            fs::create_dir_all(proc.join("9999999/stat")).unwrap();
            Unseen { child, proc }
        }

        /// What looks like a control group with nothing in it.
        fn group(&self) -> PathBuf {
            let group = self.proc.join("group");
            fs::create_dir(&group).unwrap();
            fs::write(group.join("cgroup.kill"), "").unwrap();
            group
        }

        /// From now on it can.
        fn show(&self) {
            fs::remove_dir_all(self.proc.join("9999999")).unwrap();
        }

        fn scan(&self) -> Scan {
            let leader = ProcessId::read(&self.proc, self.child.id()).unwrap();
            Scan {
                proc: self.proc.clone(),
                traces: Traces {
                    leaders: leader.into_iter().collect(),
                    ..Traces::default()
                },
                held: Vec::new(),
                cgroup: None,
            }
        }

        /// The signal that ended it.
        async fn signal(&mut self) -> Option<i32> {
            let ended = async {
                loop {
                    if let Some(status) = self.child.try_wait().unwrap() {
                        return status.signal();
                    }
                    tokio::time::sleep(LOOK_FIRST).await;
                }
            };
            tokio::time::timeout(PATIENCE, ended).await.unwrap()
        }
    }

    impl Drop for Unseen {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
            let _ = fs::remove_dir_all(&self.proc);
        }
    }

    #[tokio::test]
    async fn what_could_not_be_seen_at_first_is_asked_to_end_once_it_is() {
        let mut unseen = Unseen::new("terminate");
        let (sender, mut events) = mpsc::channel(8);
        let look_now = Arc::new(Notify::new());
        let ends = until_gone(
            unseen.scan(),
            Force::Terminate,
            Arc::default(),
            look_now.clone(),
            sender,
        );
        let ends = tokio::spawn(ends);
        let said = events.recv().await;
        let expected = "what runs can't be seen: Is a directory (os error 21)";
        assert_eq!(said, Some(Event::Remains(expected.to_owned())));
        unseen.show();
        look_now.notify_one();
        assert_eq!(unseen.signal().await, Some(libc::SIGTERM));
        fs::remove_dir_all(unseen.proc.join(unseen.child.id().to_string())).unwrap();
        while events.recv().await.unwrap() != Event::Gone {}
        ends.await.unwrap();
    }

    #[tokio::test]
    async fn what_cannot_be_seen_is_killed_all_the_same() {
        let mut unseen = Unseen::new("kill");
        let group = unseen.group();
        let scan = Scan {
            cgroup: ShardCgroup::open(&group),
            ..unseen.scan()
        };
        let (sender, mut events) = mpsc::channel(8);
        let ends = tokio::spawn(until_gone(
            scan,
            Force::Kill,
            Arc::default(),
            Arc::default(),
            sender,
        ));
        assert_eq!(unseen.signal().await, Some(libc::SIGKILL));
        assert!(matches!(events.recv().await, Some(Event::Remains(_))));
        ends.abort();
        assert!(ends.await.unwrap_err().is_cancelled());
        // A round may be under way still: it empties the file before it writes.
        let deadline = Instant::now() + PATIENCE;
        while fs::read_to_string(group.join("cgroup.kill")).unwrap() != "1" {
            assert!(Instant::now() < deadline, "the group is not killed");
            std::thread::yield_now();
        }
    }

    #[tokio::test]
    async fn what_is_to_be_killed_at_once_is_killed_though_no_time_is_left_or_it_cannot_be_seen() {
        for seen in [true, false] {
            let mut unseen = Unseen::new(&format!("now-{seen}"));
            let group = unseen.group();
            let scan = Scan {
                cgroup: ShardCgroup::open(&group),
                ..unseen.scan()
            };
            if seen {
                unseen.show();
            }
            let killed = kill_now(scan, Duration::ZERO).ok();
            assert_eq!(killed, seen.then(|| [unseen.child.id()].into()));
            assert_eq!(fs::read_to_string(group.join("cgroup.kill")).unwrap(), "1");
            assert_eq!(unseen.signal().await, Some(libc::SIGKILL));
        }
    }

    #[test]
    fn nothing_is_left_only_once_each_environment_has_come() {
        let unseen = Unseen::new("late");
        unseen.show();
        let mut scan = unseen.scan();
        (scan.traces.shard, scan.traces.state_dir) = ("m/0/0".to_owned(), "/state".to_owned());
        scan.traces.leaders.clear();
        let environ = unseen.proc.join(format!("{}/environ", unseen.child.id()));
        mkfifo(&environ, Mode::S_IRWXU).unwrap();
        let error = scan.look().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // That read ends, which opened what was there when it began.
        fs::write(&environ, "").unwrap();
        fs::remove_file(&environ).unwrap();
        fs::write(&environ, "LLMGW_SHARD=m/0/0\0LLMGW_STATE=/state\0").unwrap();
        let deadline = Instant::now() + PATIENCE;
        let members = loop {
            match scan.look() {
                Ok(members) => break members,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
        };
        assert_eq!(members.len(), 1);
    }

    #[tokio::test]
    async fn an_engine_that_the_process_table_does_not_show_is_ended_and_not_taken_for_gone() {
        for (force, signal, is_grouped) in [
            (Force::Terminate, libc::SIGTERM, false),
            (Force::Terminate, libc::SIGTERM, true),
            (Force::Kill, libc::SIGKILL, false),
        ] {
            let mut unseen = Unseen::new(&format!("hidden-{signal}-{is_grouped}"));
            unseen.show();
            let pid = unseen.child.id();
            fs::remove_dir_all(unseen.proc.join(pid.to_string())).unwrap();
            let id = ProcessId::read(Path::new("/proc"), pid).unwrap().unwrap();
            let held = Process::adopt(&id, Path::new("/proc")).unwrap().unwrap();
            let group = unseen.group();
            fs::write(group.join("cgroup.procs"), pid.to_string()).unwrap();
            let scan = Scan {
                held: vec![Arc::new(held)],
                cgroup: ShardCgroup::open(&group).filter(|_| is_grouped),
                ..unseen.scan()
            };
            let (sender, mut events) = mpsc::channel(8);
            let ends = tokio::spawn(until_gone(
                scan,
                force,
                Arc::default(),
                Arc::default(),
                sender,
            ));
            let remains = format!("process {pid} (not to be seen)");
            assert_eq!(events.recv().await, Some(Event::Remains(remains)));
            assert_eq!(unseen.signal().await, Some(signal));
            // What a group lists is gone once it does not any more.
            fs::write(group.join("cgroup.procs"), "").unwrap();
            assert_eq!(events.recv().await, Some(Event::Gone));
            ends.await.unwrap();
        }
    }
}
