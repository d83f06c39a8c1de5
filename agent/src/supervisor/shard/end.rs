//! The end of a shard: the looks for what is left of it, how its processes ended, and the way of its GPUs back.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::{Background, ShardTask};
use crate::supervisor::ending::{self, Force, Scan};
use crate::supervisor::machine::{Action, Event};

/// How long a process that is dead may take to be reaped.
const REAP_MAX: Duration = Duration::from_secs(5);

impl ShardTask {
    pub(super) fn end(&mut self, force: Force) {
        self.remembering = None;
        let (look_now, sender) = (self.look_now.clone(), self.sender.clone());
        // For the next round: what obeys the first one may leave something behind that nothing else leads to.
        let traces = self.handle.traces.clone();
        let gone = ending::until_gone(self.scan(), force, traces, look_now, sender);
        self.ending = Some(Background(tokio::spawn(gone)));
    }

    /// No process of it is left. How each ended is heard first: once the shard is over, nobody listens any more.
    pub(super) async fn gone(&mut self) -> Vec<Action> {
        self.reap().await;
        let mut actions = Vec::new();
        while let Ok(event) = self.events.try_recv() {
            actions.extend(self.step(event).await);
        }
        actions.extend(self.step(Event::Gone).await);
        actions
    }

    /// Its processes have ended; whoever was their parent has to say so, or they stay as zombies.
    pub(super) async fn reap(&mut self) {
        let waiting = self.exits.iter_mut().filter(|exit| !exit.0.is_finished());
        for exit in waiting {
            let _ = tokio::time::timeout(REAP_MAX, &mut exit.0).await;
        }
    }

    pub(super) fn release(&mut self) {
        let shard = self.handle.spec.shard.clone();
        let gpus = self.context.options.gpus.clone();
        let uuids = self.handle.spec.gpus.clone();
        let free = ending::until_free(shard, uuids, gpus, self.sender.clone());
        self.ending = Some(Background(tokio::spawn(free)));
    }

    /// Without a control group, members that move away are known only if they were seen before they did.
    /// Beside the shard's events, for a look may take long.
    pub(super) fn remember(&mut self) {
        let every = self.context.options.pace.remember;
        let looks = |looking: &Background| !looking.0.is_finished();
        if self.cgroup.is_some()
            || self.ending.is_some()
            || self.remembering.as_ref().is_some_and(looks)
            || self.remembered.elapsed() < every
        {
            return;
        }
        self.remembered = Instant::now();
        let (mut scan, traces) = (self.scan(), self.handle.traces.clone());
        let remembers = async move {
            let looked = tokio::task::spawn_blocking(move || scan.look().map(|_| scan.traces.seen));
            if let Ok(Ok(seen)) = looked.await {
                ending::keep_seen(&traces, seen);
            }
        };
        self.remembering = Some(Background(tokio::spawn(remembers)));
    }

    fn scan(&self) -> Scan {
        let traces = self.handle.traces.lock();
        Scan {
            proc: self.context.options.proc_root.clone(),
            traces: traces.unwrap_or_else(PoisonError::into_inner).clone(),
            held: self.held.clone(),
            cgroup: self.cgroup.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::sync::Arc;

    use llmgw_proto::shard::{Exit, ShardState, ShardStatus};
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::supervisor::board::Board;
    use crate::supervisor::cgroup::Groups;
    use crate::supervisor::machine::Remnant;
    use crate::supervisor::shard::{Context, Handle};
    use crate::supervisor::spec_store::{Asked, Record, SpecStore};
    use crate::supervisor::{Claims, SupervisorOptions, testing};

    const PATIENCE: Duration = Duration::from_secs(60);
    const LOOK_EVERY: Duration = Duration::from_millis(1);

    fn context(name: &str) -> Context {
        let directory =
            std::env::temp_dir().join(format!("llmgw-end-{}-{name}", std::process::id()));
        Context {
            state_dir: directory.to_string_lossy().into_owned(),
            store: SpecStore::open(&directory).unwrap(),
            groups: Groups::of(&directory).unwrap(),
            options: SupervisorOptions::new(directory, [].into()),
            board: Board::default(),
            epoch: Instant::now(),
            cancel: CancellationToken::new(),
            lost: CancellationToken::new(),
        }
    }

    fn handle() -> Handle {
        Handle::new(testing::spec("m/0/0"), Asked::Run)
    }

    fn task(name: &str) -> ShardTask {
        ShardTask::new(context(name).into(), handle(), Claims::default())
    }

    #[tokio::test]
    async fn how_a_process_ended_is_told_although_the_look_found_it_gone_first() {
        let mut task = task("exit");
        task.step(Event::Asked(Asked::Stop)).await;
        let sender = task.sender.clone();
        let exits = async move {
            let (command, exit) = (0, Exit::Signal(9));
            let _ = sender.send(Event::Exited { command, exit }).await;
        };
        // On the test's one thread it has not run when the look's word comes.
        task.exits.push(Background(tokio::spawn(exits)));
        let actions = task.gone().await;
        assert_eq!(actions, [Action::Release]);
        task.act(actions).await;
        assert_eq!(task.events.recv().await, Some(Event::Released));
        task.step(Event::Released).await;
        let ended = (task.life.state, task.life.exit);
        assert_eq!(ended, (ShardState::Stopped, Some(Exit::Signal(9))));
        fs::remove_dir_all(&task.context.options.state_dir).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_shard_is_gone_although_how_a_process_ended_is_never_told() {
        let mut task = task("untold");
        task.step(Event::Asked(Asked::Stop)).await;
        let exits = tokio::spawn(std::future::pending());
        task.exits.push(Background(exits));
        assert_eq!(task.gone().await, [Action::Release]);
        assert_eq!(task.life.exit, None);
        fs::remove_dir_all(&task.context.options.state_dir).unwrap();
    }

    #[tokio::test]
    async fn a_stop_is_heard_while_the_look_at_what_is_there_hangs() {
        let mut context = context("look");
        let (directory, options) = (context.options.state_dir.clone(), &mut context.options);
        let boot_id = directory.join("sys/kernel/random/boot_id");
        fs::create_dir_all(boot_id.parent().unwrap()).unwrap();
        mkfifo(&boot_id, Mode::S_IRWXU).unwrap();
        options.proc_root.clone_from(&directory);
        (options.pace.remember, options.pace.read_output) = (Duration::ZERO, LOOK_EVERY);
        let (context, handle) = (Arc::new(context), handle());
        let runs = Remnant::Runs {
            next: 1,
            was_ready: false,
        };
        let record = Record::new(testing::spec("m/0/0"));
        let task = ShardTask::taken_over(context.clone(), handle.clone(), record, runs, vec![]);
        let mut changes = context.board.changes();
        let runs = tokio::spawn(task.run());
        // Opened once the look has, which then waits for what is written.
        let path = boot_id.clone();
        let hangs = move || OpenOptions::new().write(true).open(path).unwrap();
        let hangs = tokio::task::spawn_blocking(hangs).await.unwrap();
        handle.asked.send_replace(Asked::Stop);
        let heard = async {
            let is_heard = |status: &ShardStatus| status.state == ShardState::Stopping;
            while !changes.next().await.iter().any(is_heard) {}
        };
        let heard = tokio::time::timeout(PATIENCE, heard).await;
        fs::remove_file(&boot_id).unwrap();
        drop(hangs);
        context.cancel.cancel();
        runs.await.unwrap();
        fs::remove_dir_all(&directory).unwrap();
        heard.unwrap();
    }
}
