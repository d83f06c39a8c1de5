//! Hot reload: notices that the file changed, reads it whole, and hands over the new configuration or what is wrong with it.
//!
//! When to look says [`Hints`]; what counts is whether the text differs.

use std::path::PathBuf;

use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Config, ConfigErrors, KIND, parse, yaml};
use crate::hints::Hints;

/// Follows one configuration file.
pub struct ConfigWatch {
    path: PathBuf,
    /// The digest of what was last read, whether it was good or not; None after a failure to read.
    seen: Option<[u8; 32]>,
    /// The last failure to read, so that it is said once.
    unreadable: Option<ConfigErrors>,
    hints: Hints,
}

impl ConfigWatch {
    /// Follows the file that `loaded` came from, and takes `loaded` as known.
    pub fn new(loaded: &Config) -> Self {
        ConfigWatch {
            path: loaded.source.clone(),
            seen: Some(loaded.digest()),
            unreadable: None,
            hints: Hints::new("the configuration"),
        }
    }

    /// Sends the configuration, or its problems, each time the file's text changed; ends with `stop` or when nobody receives.
    pub async fn run(
        mut self,
        stop: CancellationToken,
        changed: mpsc::Sender<Result<Config, ConfigErrors>>,
    ) {
        loop {
            self.hints.watch([&*self.path]);
            // Also before the first wait: the file may have changed since it was loaded.
            if let Some(outcome) = self.reread_file().await
                && changed.send(outcome).await.is_err()
            {
                return;
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = changed.closed() => return,
                () = self.hints.next() => {}
            }
        }
    }

    /// The new configuration, None while the text is what it was.
    async fn reread_file(&mut self) -> Option<Result<Config, ConfigErrors>> {
        let path = self.path.clone();
        let seen = self.seen;
        // Reading and checking a large file takes a tenth of a second, too long for a thread that serves.
        let read = tokio::task::spawn_blocking(move || {
            let text = yaml::read_file(&path, &KIND)?;
            let digest: [u8; 32] = Sha256::digest(text.as_bytes()).into();
            let fresh = (Some(digest) != seen)
                .then(|| parse(&path, text, &|name| std::env::var(name).ok()));
            Ok((digest, fresh))
        });
        match read.await.ok()? {
            Ok((digest, fresh)) => {
                self.seen = Some(digest);
                self.unreadable = None;
                fresh
            }
            Err(errors) if self.unreadable.as_ref() == Some(&errors) => None,
            Err(errors) => {
                self.seen = None;
                self.unreadable = Some(errors.clone());
                Some(Err(errors))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::super::load;
    use super::*;

    /// What a test waits for at most; reached only by a failure.
    const PATIENCE: Duration = Duration::from_secs(60);
    const HOUR: Duration = Duration::from_secs(3600);

    struct Directory(PathBuf);

    impl Directory {
        fn new() -> Self {
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path =
                std::env::temp_dir().join(format!("llmgw-watch-{}-{number}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Directory(path)
        }

        fn write(&self, text: &str) -> PathBuf {
            let path = self.0.join("llmgw.yaml");
            let new = self.0.join(".new");
            fs::write(&new, text).unwrap();
            fs::rename(&new, &path).unwrap();
            path
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    type Changes = mpsc::Receiver<Result<Config, ConfigErrors>>;

    fn follow(watch: ConfigWatch) -> (Changes, CancellationToken) {
        let (sender, receiver) = mpsc::channel(8);
        let stop = CancellationToken::new();
        tokio::spawn(watch.run(stop.clone(), sender));
        (receiver, stop)
    }

    async fn next(changes: &mut Changes) -> Result<Config, ConfigErrors> {
        tokio::time::timeout(PATIENCE, changes.recv())
            .await
            .unwrap()
            .unwrap()
    }

    fn text(port: u16) -> String {
        format!("listen: 127.0.0.1:{port}\nmodels: []\n")
    }

    #[tokio::test]
    async fn a_replaced_file_is_sent_once_and_a_broken_one_as_its_problems() {
        let directory = Directory::new();
        let path = directory.write(&text(1));
        let mut watch = ConfigWatch::new(&load(&path).unwrap());
        watch.hints.reread = HOUR;
        let (mut changes, stop) = follow(watch);
        directory.write(&text(2));
        assert_eq!(next(&mut changes).await.unwrap().listen.address.port(), 2);
        directory.write("listen: 3\nmodels: []\n");
        assert_eq!(
            next(&mut changes).await.unwrap_err().problems[0].path,
            "listen"
        );
        // The same text again is no change, so the next thing that arrives is the one after it.
        directory.write("listen: 3\nmodels: []\n");
        directory.write(&text(4));
        assert_eq!(next(&mut changes).await.unwrap().listen.address.port(), 4);
        stop.cancel();
        assert!(
            tokio::time::timeout(PATIENCE, changes.recv())
                .await
                .unwrap()
                .is_none()
        );
    }

    #[tokio::test]
    async fn a_change_is_found_without_any_event_and_before_the_first_one() {
        let directory = Directory::new();
        let path = directory.write(&text(1));
        let mut watch = ConfigWatch::new(&load(&path).unwrap());
        directory.write(&text(2));
        watch.hints.reread = HOUR;
        let (mut changes, _stop) = follow(watch);
        assert_eq!(next(&mut changes).await.unwrap().listen.address.port(), 2);
    }

    #[tokio::test]
    async fn a_missing_file_is_said_once_and_its_return_is_noticed() {
        let directory = Directory::new();
        let path = directory.write(&text(1));
        let mut watch = ConfigWatch::new(&load(&path).unwrap());
        watch.hints.reread = Duration::from_millis(20);
        let (mut changes, _stop) = follow(watch);
        fs::remove_file(&path).unwrap();
        assert_eq!(
            next(&mut changes).await.unwrap_err().problems[0].wrong,
            "no such file"
        );
        directory.write(&text(1));
        assert_eq!(next(&mut changes).await.unwrap().listen.address.port(), 1);
    }
}
