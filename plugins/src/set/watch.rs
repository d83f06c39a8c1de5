//! Notices that the policy directory changed.
//!
//! Watching the files would miss what editors and Kubernetes do (rename over, swap `..data`), so the directory is watched,
//! any event is only a hint, and everything is read again. A slower look at everything covers what events miss: network
//! file systems, a directory that was removed and made again.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::set::reload::Policies;

/// Events that come in this close to each other are one change.
const DEBOUNCE: Duration = Duration::from_millis(150);
/// A directory that never rests is read this often anyway.
const DEBOUNCE_MAX: Duration = Duration::from_millis(500);
/// Without any event everything is read this often.
const POLL: Duration = Duration::from_secs(1);

impl Policies {
    /// Reloads on every change of the directory, until `stop`. Returns at once when there is no directory.
    pub async fn watch(self: Arc<Self>, stop: CancellationToken) {
        let Some(dir) = self.dir().map(Path::to_path_buf) else {
            return;
        };
        let (hint, mut hints) = mpsc::channel(1);
        let mut watched = Watched::default();
        loop {
            watched.renew(&dir, &hint);
            tokio::select! {
                () = stop.cancelled() => return,
                _ = hints.recv() => settle(&mut hints).await,
                () = sleep_until(Instant::now() + POLL) => {}
            }
            let policies = Arc::clone(&self);
            // The outcome is recorded in the status and in the log.
            let _ = tokio::task::spawn_blocking(move || policies.reload().map(drop)).await;
        }
    }
}

/// Waits until no hint came for a while.
async fn settle(hints: &mut mpsc::Receiver<()>) {
    let latest = Instant::now() + DEBOUNCE_MAX;
    while Instant::now() < latest
        && timeout_at(Instant::now() + DEBOUNCE, hints.recv())
            .await
            .is_ok_and(|hint| hint.is_some())
    {}
}

/// The watch, and the directories that it is on.
#[derive(Default)]
struct Watched {
    watcher: Option<RecommendedWatcher>,
    /// Device and inode of the directory and of its folders: a new one of the same name needs a new watch.
    identity: Vec<Option<(u64, u64)>>,
}

impl Watched {
    fn renew(&mut self, dir: &Path, hint: &mpsc::Sender<()>) {
        let folders = [dir.to_path_buf(), dir.join("engines"), dir.join("lib")];
        let identity: Vec<_> = folders
            .iter()
            .map(|folder| std::fs::metadata(folder).ok().map(|m| (m.dev(), m.ino())))
            .collect();
        if self.watcher.is_some() && identity == self.identity {
            return;
        }
        let hint = hint.clone();
        // A full channel holds a hint already, and one is enough.
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if !event.is_ok_and(|event| event.kind.is_access()) {
                let _ = hint.try_send(());
            }
        });
        self.watcher = match watcher {
            Ok(mut watcher) => {
                for folder in folders.iter().filter(|folder| folder.is_dir()) {
                    if let Err(e) = watcher.watch(folder, RecursiveMode::NonRecursive) {
                        tracing::debug!(folder = %folder.display(), "no events for policies, they are polled: {e}");
                    }
                }
                Some(watcher)
            }
            Err(e) => {
                tracing::debug!("no events for policies, they are polled: {e}");
                None
            }
        };
        self.identity = identity;
    }
}
