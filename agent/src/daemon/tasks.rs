//! The two tasks that an agent has for as long as it runs: without either of them it would be a node that nobody can reach.

use tokio::task::{JoinError, JoinHandle};

use super::{DaemonError, Stop};

/// Both end with their owner.
pub(super) struct Tasks {
    /// Holds the session with the server; ends once it was told to.
    pub(super) session: JoinHandle<()>,
    /// Looks at the node again and again, and never ends.
    pub(super) looks: JoinHandle<()>,
}

impl Tasks {
    /// Waits until the agent is to stop.
    ///
    /// # Errors
    /// Where a task ended, though nobody told it to: it panicked.
    pub(super) async fn until_asked(&mut self, stop: &mut Stop) -> Result<(), DaemonError> {
        let (task, ended) = tokio::select! {
            () = stop.asked() => return Ok(()),
            ended = &mut self.session => ("the session with the server", ended),
            ended = &mut self.looks => ("the look at the node", ended),
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

    use tokio_util::sync::CancellationToken;

    use super::*;

    async fn until_asked(
        session: impl Future<Output = ()> + Send + 'static,
        looks: impl Future<Output = ()> + Send + 'static,
        asked: &CancellationToken,
    ) -> Result<(), String> {
        let mut tasks = Tasks {
            session: tokio::spawn(session),
            looks: tokio::spawn(looks),
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
}
