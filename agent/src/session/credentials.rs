//! What this node shows of itself and whom it trusts: read from its files at every dial, and looked at again while a session is up.

use std::time::Duration;

use llmgw_proto::identity::{Authorities, FileProblem, Fingerprint, Identity};
use tokio::time::{Instant, sleep};

use super::backoff::unit;
use crate::config::AgentTls;

/// How often the files are looked at while a session is up.
pub const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Nodes whose files are replaced all at once come back one after the other.
const SPREAD_MAX: Duration = Duration::from_secs(5);
/// The spread is this part of the time between two looks, at most.
const SPREADS_PER_LOOK: u32 = 6;

/// What is in the files.
#[derive(Clone)]
pub struct Credentials {
    pub identity: Identity,
    pub authorities: Authorities,
}

/// A certificate that led to no session, and from when it may be tried again.
#[derive(Clone, Copy, Debug)]
pub(super) struct RefusedOne {
    pub(super) shown: Fingerprint,
    pub(super) until: Instant,
}

/// Why they could not be had.
#[derive(Debug)]
pub(super) enum NoCredentials {
    File(FileProblem),
    /// The thread that read them is gone.
    Died,
}

impl AgentTls {
    /// Reads the three files. May block.
    ///
    /// # Errors
    /// What is wrong with which file, and the way out.
    pub fn load(&self) -> Result<Credentials, FileProblem> {
        Ok(Credentials {
            identity: Identity::load(&self.cert, &self.key)?,
            authorities: Authorities::load(&self.ca)?,
        })
    }

    /// As [`load`](AgentTls::load), without blocking a session that is up.
    pub(super) async fn read(&self) -> Result<Credentials, NoCredentials> {
        let files = self.clone();
        let read = tokio::task::spawn_blocking(move || files.load()).await;
        read.map_err(|_| NoCredentials::Died)?
            .map_err(NoCredentials::File)
    }

    /// Waits until there is another certificate than the one that was shown, which can be used. One that can't is said once, and changes nothing;
    /// the one that led to no session is worth no other try before its time.
    pub(super) async fn renewed(
        &self,
        shown: Fingerprint,
        refused: Option<RefusedOne>,
        look_every: Duration,
    ) {
        let is_news = |found: Fingerprint| {
            let waits = refused.is_some_and(|one| one.shown == found && Instant::now() < one.until);
            found != shown && !waits
        };
        let mut said = None;
        loop {
            sleep(look_every).await;
            let problem = match self.read().await {
                Ok(found) if is_news(found.identity.certificate.fingerprint) => break,
                Ok(_) => None,
                Err(problem) => Some(problem.to_string()),
            };
            if let Some(problem) = problem.as_ref().filter(|_| problem != said) {
                tracing::warn!(
                    "the `tls` files changed and can't be used, the session goes on without them: {problem}"
                );
            }
            said = problem;
        }
        let spread = SPREAD_MAX.min(look_every / SPREADS_PER_LOOK);
        sleep(spread.mul_f64(unit())).await;
    }
}

impl std::fmt::Display for NoCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NoCredentials::File(problem) => problem.fmt(f),
            NoCredentials::Died => f.write_str("they could not be read"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use fake_engine::authority::{Authority, write};

    /// The files of a test, gone afterwards.
    struct Files(PathBuf);

    impl Files {
        fn new(authority: &Authority) -> Files {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let name = format!("llmgw-credentials-{}-{count}", std::process::id());
            let files = Files(std::env::temp_dir().join(name));
            fs::create_dir_all(&files.0).unwrap();
            write(&files.0.join("ca.pem"), &authority.pem);
            authority.agent("n1").write(&files.0, "agent");
            files
        }

        fn tls(&self) -> AgentTls {
            AgentTls {
                ca: self.0.join("ca.pem"),
                cert: self.0.join("agent.pem"),
                key: self.0.join("agent-key.pem"),
            }
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_certificate_that_is_replaced_is_noticed_at_the_next_look_and_a_broken_one_is_not_taken()
     {
        let authority = Authority::new("fleet");
        let files = Files::new(&authority);
        let tls = files.tls();
        let shown = tls.load().unwrap().identity.certificate.fingerprint;
        let start = Instant::now();
        let looking = async {
            tls.renewed(shown, None, LOOK_EVERY).await;
            start.elapsed()
        };
        let replacing = async {
            // The same files, written again.
            sleep(LOOK_EVERY * 3 / 2).await;
            let same = fs::read_to_string(&tls.cert).unwrap();
            write(&tls.cert, &same);
            // Another certificate without its key.
            sleep(LOOK_EVERY).await;
            let new = authority.agent("n1");
            write(&tls.cert, &new.pem);
            sleep(LOOK_EVERY).await;
            new.write(&files.0, "agent");
        };
        let (took, ()) = tokio::join!(looking, replacing);
        let noticed = LOOK_EVERY * 4;
        assert!(
            took >= noticed && took <= noticed + SPREAD_MAX + LOOK_EVERY / 10,
            "{took:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_certificate_that_was_refused_waits_for_its_time_and_another_one_does_not() {
        let authority = Authority::new("fleet");
        let files = Files::new(&authority);
        let tls = files.tls();
        let fingerprint = || tls.load().unwrap().identity.certificate.fingerprint;
        let shown = fingerprint();
        authority.agent("n1").write(&files.0, "agent");
        let pause = LOOK_EVERY * 10;
        let start = Instant::now();
        let refused = RefusedOne {
            shown: fingerprint(),
            until: start + pause,
        };
        tls.renewed(shown, Some(refused), LOOK_EVERY).await;
        assert!(start.elapsed() >= pause, "{:?}", start.elapsed());
        let start = Instant::now();
        let refused = RefusedOne {
            shown: fingerprint(),
            until: start + pause,
        };
        authority.agent("n1").write(&files.0, "agent");
        tls.renewed(shown, Some(refused), LOOK_EVERY).await;
        let (took, soon) = (start.elapsed(), LOOK_EVERY + SPREAD_MAX + LOOK_EVERY / 10);
        assert!(took <= soon, "{took:?}");
    }

    #[test]
    fn what_is_wrong_with_the_files_names_the_file() {
        let files = Files::new(&Authority::new("fleet"));
        let tls = files.tls();
        fs::remove_file(&tls.ca).unwrap();
        let problem = tls.load().err().unwrap().to_string();
        assert!(problem.contains("ca.pem"), "{problem}");
        fs::copy(&tls.cert, &tls.ca).unwrap();
        let problem = tls.load().err().unwrap().to_string();
        assert!(problem.contains("ca.pem"), "{problem}");
    }
}
