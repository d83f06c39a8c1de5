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
        let (look_now, sender) = (self.look_now.clone(), self.sender.clone());
        let gone = ending::until_gone(self.scan(), force, look_now, sender);
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
    pub(super) async fn remember(&mut self) {
        let every = self.context.options.pace.remember;
        if self.cgroup.is_some() || self.ending.is_some() || self.remembered.elapsed() < every {
            return;
        }
        self.remembered = Instant::now();
        let mut scan = self.scan();
        let looked = tokio::task::spawn_blocking(move || scan.look().map(|_| scan.traces.seen));
        if let Ok(Ok(seen)) = looked.await {
            let mut traces = self
                .handle
                .traces
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            traces.seen = seen;
        }
    }

    fn scan(&self) -> Scan {
        let traces = self.handle.traces.lock();
        Scan {
            proc: self.context.options.proc_root.clone(),
            traces: traces.unwrap_or_else(PoisonError::into_inner).clone(),
            cgroup: self.cgroup.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use llmgw_proto::shard::{Exit, ShardState};
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::supervisor::board::Board;
    use crate::supervisor::shard::{Context, Handle};
    use crate::supervisor::spec_store::{Asked, SpecStore};
    use crate::supervisor::{Claims, SupervisorOptions, testing};

    fn task(name: &str) -> ShardTask {
        let directory =
            std::env::temp_dir().join(format!("llmgw-end-{}-{name}", std::process::id()));
        let context = Context {
            state_dir: directory.to_string_lossy().into_owned(),
            store: SpecStore::open(&directory).unwrap(),
            options: SupervisorOptions::new(directory, [].into()),
            board: Board::default(),
            epoch: Instant::now(),
            cancel: CancellationToken::new(),
            lost: CancellationToken::new(),
        };
        let handle = Handle::new(testing::spec("m/0/0"), Asked::Run);
        ShardTask::new(context.into(), handle, Claims::default())
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
        std::fs::remove_dir_all(&task.context.options.state_dir).unwrap();
    }
}
