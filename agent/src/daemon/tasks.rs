//! What an agent can't go on without: the tasks that it has for as long as it runs, and those of its shards.

use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{DaemonError, Stop};

/// Its own two end with their owner.
pub(super) struct Tasks {
    /// Holds the session with the server; ends once it was told to.
    pub(super) session: JoinHandle<()>,
    /// Looks at the node again and again; ends with the thread that asks the GPUs' driver.
    pub(super) looks: JoinHandle<()>,
    /// Cancelled where a shard's task panicked.
    pub(super) shard_lost: CancellationToken,
}

impl Tasks {
    /// Waits until the agent is to stop.
    ///
    /// # Errors
    /// Where a task ended, though nobody told it to: it panicked, or what it can't do without did.
    pub(super) async fn until_asked(&mut self, stop: &mut Stop) -> Result<(), DaemonError> {
        let (task, ended) = tokio::select! {
            () = stop.asked() => return Ok(()),
            ended = &mut self.session => ("the session with the server", ended),
            ended = &mut self.looks => ("the look at the node", ended),
            () = self.shard_lost.cancelled() => {
                let cause = "it panicked, as is said above".to_owned();
                return Err(DaemonError::Lost { task: "the task of a shard", cause });
            }
        };
        let cause = ended.err().as_ref().map(JoinError::to_string);
        Err(DaemonError::Lost {
            task,
            cause: cause.unwrap_or_else(|| "nothing told it to".to_owned()),
        })
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.session.abort();
        self.looks.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    async fn until_asked(
        session: impl Future<Output = ()> + Send + 'static,
        looks: impl Future<Output = ()> + Send + 'static,
        asked: &CancellationToken,
    ) -> Result<(), String> {
        let mut tasks = Tasks {
            session: tokio::spawn(session),
            looks: tokio::spawn(looks),
            shard_lost: CancellationToken::new(),
        };
        let mut stop = Stop::Once(Some(asked.clone()));
        let waited = tasks.until_asked(&mut stop).await;
        waited.map_err(|error| {
            assert_eq!(error.exit_status(), 1);
            error.to_string()
        })
    }

    #[tokio::test]
    async fn an_agent_whose_session_or_look_panics_ends_and_says_which() {
        let never = CancellationToken::new();
        let session = async { panic!("no such field") };
        let said = until_asked(session, pending(), &never).await.unwrap_err();
        assert!(
            said.starts_with("the session with the server ended: task "),
            "{said}"
        );
        assert!(
            said.contains("panicked with message \"no such field\""),
            "{said}"
        );
        let said = until_asked(pending(), async {}, &never).await.unwrap_err();
        assert_eq!(
            said,
            "the look at the node ended: nothing told it to; the agent can't go on without it, and is to be started again"
        );
    }

    #[tokio::test]
    async fn an_agent_that_is_asked_to_stop_has_lost_nothing() {
        let asked = CancellationToken::new();
        asked.cancel();
        assert_eq!(until_asked(pending(), pending(), &asked).await, Ok(()));
    }

    #[tokio::test]
    async fn an_agent_that_lost_the_task_of_a_shard_ends() {
        let mut tasks = Tasks {
            session: tokio::spawn(pending()),
            looks: tokio::spawn(pending()),
            shard_lost: CancellationToken::new(),
        };
        tasks.shard_lost.cancel();
        let lost = tasks.until_asked(&mut Stop::Once(None)).await.unwrap_err();
        let said = lost.to_string();
        assert!(
            said.starts_with("the task of a shard ended: it panicked"),
            "{said}"
        );
    }
}
