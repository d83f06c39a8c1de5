//! Hints that files may have changed: from the directories that they lie in, and now and then without any.
//!
//! A directory is watched instead of its files, because files are replaced (by editors, by a rename, by the swap of a
//! symbolic link) and a watch on the file itself then hears nothing more. A hint says nothing but "look": whoever gets
//! one reads, and compares what was read.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

/// How long the directories must be quiet before one looks.
const QUIET: Duration = Duration::from_millis(150);
/// Directories that are never quiet do not put off a look for longer.
const QUIET_MAX: Duration = Duration::from_millis(600);
/// File systems that send nothing (NFS, some overlays), and directories that were themselves replaced.
const REREAD: Duration = Duration::from_secs(10);
/// Symbolic links that are followed from one path; the kernel's own limit.
const LINKS_MAX: usize = 40;

/// Hears of changes in a set of directories.
pub struct Hints {
    /// None: the system gives no watches, so only the time says that one should look.
    watcher: Option<RecommendedWatcher>,
    heard: mpsc::Receiver<()>,
    watched: BTreeSet<PathBuf>,
    /// How often one looks without a hint.
    pub reread: Duration,
}

impl Hints {
    /// `what` is what is read, for the message that there will be no hints.
    pub fn new(what: &str) -> Hints {
        // One hint is as good as many, so more are dropped.
        let (hint, heard) = mpsc::channel(1);
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if !event.is_ok_and(|event| is_reading(event.kind)) {
                let _ = hint.try_send(());
            }
        });
        let watcher = watcher.inspect_err(
            |error| tracing::warn!(%error, "{what} is only read again every {REREAD:?}"),
        );
        Hints {
            watcher: watcher.ok(),
            heard,
            watched: BTreeSet::new(),
            reread: REREAD,
        }
    }

    /// Watches what these paths go through, and nothing else any more. To be called before the files are read, each
    /// time: watching again what is watched already costs nothing, and finds a directory that was replaced.
    pub fn watch<'a>(&mut self, paths: impl IntoIterator<Item = &'a Path>) {
        let Some(watcher) = &mut self.watcher else {
            return;
        };
        let mut wanted = BTreeSet::new();
        for path in paths {
            directories(path, &mut wanted);
        }
        for stale in self.watched.difference(&wanted) {
            // One that is gone is not watched either.
            let _ = watcher.unwatch(stale);
        }
        for directory in &wanted {
            if let Err(error) = watcher.watch(directory, RecursiveMode::NonRecursive) {
                tracing::debug!(%error, "{} cannot be watched", directory.display());
            }
        }
        self.watched = wanted;
    }

    /// Waits until one should look: something happened and it is quiet again, or it is time.
    pub async fn next(&mut self) {
        tokio::select! {
            Some(()) = self.heard.recv() => self.settle().await,
            () = sleep(self.reread) => {}
        }
    }

    /// Waits until it is quiet, so that nothing is read half written.
    async fn settle(&mut self) {
        let latest = Instant::now() + QUIET_MAX;
        loop {
            let until = (Instant::now() + QUIET).min(latest);
            match timeout_at(until, self.heard.recv()).await {
                Ok(Some(())) if Instant::now() < latest => {}
                Ok(None) => return sleep_until(until).await,
                _ => return,
            }
        }
    }
}

/// Without this each look would be a hint for the next.
fn is_reading(kind: EventKind) -> bool {
    kind.is_access() && kind != EventKind::Access(AccessKind::Close(AccessMode::Write))
}

/// Adds the directories in which an entry decides what `path` leads to: the one that holds the file, and those that
/// hold a symbolic link on the way to it.
fn directories(path: &Path, found: &mut BTreeSet<PathBuf>) {
    let mut path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    for _ in 0..LINKS_MAX {
        let link = path
            .ancestors()
            .find_map(|prefix| Some((prefix.to_owned(), std::fs::read_link(prefix).ok()?)));
        let Some((link, target)) = link else { break };
        let Some(directory) = link.parent() else {
            break;
        };
        found.insert(real(directory));
        let rest = path.strip_prefix(&link).unwrap_or(Path::new(""));
        let mut next = directory.join(target);
        // Joining an empty path would add a slash to a file's name.
        if rest != Path::new("") {
            next.push(rest);
        }
        path = next;
    }
    if let Some(directory) = path.parent() {
        found.insert(real(directory));
    }
}

/// A directory has one name here: watches go by inode, and two names for one would end each other's watch.
fn real(directory: &Path) -> PathBuf {
    std::fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// What a test waits for at most; reached only by a failure.
    const PATIENCE: Duration = Duration::from_secs(60);

    struct Directory(PathBuf);

    impl Directory {
        fn new() -> Self {
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path =
                std::env::temp_dir().join(format!("llmgw-hints-{}-{number}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Directory(real(&path))
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.join(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn of(path: &Path) -> Vec<PathBuf> {
        let mut found = BTreeSet::new();
        directories(path, &mut found);
        found.into_iter().collect()
    }

    /// What a Kubernetes volume looks like: `tls.crt -> ..data/tls.crt`, `..data -> ..1`.
    fn volume(directory: &Directory) -> PathBuf {
        fs::create_dir_all(directory.at("tls/..1")).unwrap();
        fs::write(directory.at("tls/..1/tls.crt"), "1").unwrap();
        symlink("..1", directory.at("tls/..data")).unwrap();
        symlink("..data/tls.crt", directory.at("tls/tls.crt")).unwrap();
        directory.at("tls/tls.crt")
    }

    #[test]
    fn every_directory_that_decides_where_a_path_leads_is_watched() {
        let directory = Directory::new();
        let file = volume(&directory);
        let both = [directory.at("tls"), directory.at("tls/..1")];
        assert_eq!(of(&file), both);
        // A directory that is itself a link, and a file that is not there yet.
        symlink(directory.at("tls"), directory.at("current")).unwrap();
        assert_eq!(
            of(&directory.at("current/tls.crt")),
            [vec![directory.0.clone()], both.to_vec()].concat()
        );
        assert_eq!(of(&directory.at("tls/none.pem")), [directory.at("tls")]);
        // A circle ends.
        symlink("b", directory.at("a")).unwrap();
        symlink("a", directory.at("b")).unwrap();
        assert_eq!(of(&directory.at("a")), std::slice::from_ref(&directory.0));
    }

    async fn hinted(hints: &mut Hints) {
        tokio::time::timeout(PATIENCE, hints.next()).await.unwrap();
    }

    #[tokio::test]
    async fn a_swap_a_rename_and_a_write_in_place_are_all_heard() {
        let directory = Directory::new();
        let file = volume(&directory);
        let mut hints = Hints::new("the test");
        hints.reread = Duration::from_secs(3600);
        for number in 2..4 {
            hints.watch([&*file]);
            let version = format!("tls/..{number}");
            fs::create_dir_all(directory.at(&version)).unwrap();
            fs::write(directory.at(&version).join("tls.crt"), "n").unwrap();
            symlink(format!("..{number}"), directory.at("tls/..new")).unwrap();
            fs::rename(directory.at("tls/..new"), directory.at("tls/..data")).unwrap();
            hinted(&mut hints).await;
        }
        hints.watch([&*file]);
        fs::write(directory.at("tls/..3/new"), "renamed").unwrap();
        fs::rename(directory.at("tls/..3/new"), directory.at("tls/..3/tls.crt")).unwrap();
        hinted(&mut hints).await;
        hints.watch([&*file]);
        fs::write(&file, "in place, through the links").unwrap();
        hinted(&mut hints).await;
    }

    #[test]
    fn to_read_a_file_is_no_hint_to_read_it_again_and_all_else_is_one() {
        use notify::event::{CreateKind, ModifyKind, RemoveKind};
        let close = |mode| EventKind::Access(AccessKind::Close(mode));
        for (kind, expected) in [
            (EventKind::Access(AccessKind::Open(AccessMode::Any)), true),
            (close(AccessMode::Read), true),
            (close(AccessMode::Write), false),
            (EventKind::Modify(ModifyKind::Any), false),
            (EventKind::Create(CreateKind::Any), false),
            (EventKind::Remove(RemoveKind::Any), false),
            (EventKind::Other, false),
        ] {
            assert_eq!(is_reading(kind), expected, "{kind:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_looks_now_and_then_without_any_hint() {
        let mut hints = Hints::new("the test");
        let before = Instant::now();
        hints.next().await;
        assert_eq!(before.elapsed(), REREAD);
    }
}
