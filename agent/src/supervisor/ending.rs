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
use super::tree::{Environs, HANGS_AFTER, Member, ProcessTable, Traces, UNSEEN};
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

/// Kills what is there of a shard before anything else happens to it; which processes that were. Blocks, at most `within` and for as long as it
/// takes to know that an environment hangs.
///
/// # Errors
/// Where what is left can't be seen. What is known was killed all the same.
pub fn kill_now(mut scan: Scan, within: Duration) -> io::Result<BTreeSet<u32>> {
    let deadline = Instant::now() + within;
    // First: of those that the group's kill ends, no look finds any more.
    let in_group = scan.cgroup.as_ref().and_then(|group| group.pids().ok());
    let mut killed: BTreeSet<u32> = in_group.unwrap_or_default().into_iter().collect();
    loop {
        let members = match scan.kill() {
            // It comes, or is known to hang in the end.
            Err(error)
                if error.kind() == io::ErrorKind::TimedOut
                    && Instant::now() < deadline + HANGS_AFTER =>
            {
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
mod tests;
