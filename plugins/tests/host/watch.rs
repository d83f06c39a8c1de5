//! Noticing changes: what editors, Kubernetes and people do to a directory.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use llmgw_plugins::{Policies, PoolView};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{Dir, hook};

/// How long a change may take on a machine that does other things too. Idle it is some 200 ms.
const NOTICE_MAX: Duration = Duration::from_secs(60);

fn weights(kv: u32) -> String {
    hook("weights(pool)", &format!("  return {{ kv = {kv} }}"))
}

/// A directory that is being watched.
struct Watched {
    dir: Dir,
    policies: Arc<Policies>,
    _stop: DropGuard,
}

impl Watched {
    fn start(dir: Dir) -> Watched {
        let policies = dir.open().expect("the first set loads");
        let stop = CancellationToken::new();
        tokio::spawn(Arc::clone(&policies).watch(stop.clone()));
        Watched {
            dir,
            policies,
            _stop: stop.drop_guard(),
        }
    }

    fn kv(&self) -> f64 {
        self.policies
            .current()
            .routing_weights(&PoolView {
                model: "m",
                ..PoolView::default()
            })
            .kv
    }

    async fn until(&self, what: &str, reached: impl Fn(&Watched) -> bool) {
        let mut changes = self.policies.changes();
        let wait = async {
            while !reached(self) {
                changes.changed().await.expect("the policies are there");
            }
        };
        tokio::time::timeout(NOTICE_MAX, wait)
            .await
            .unwrap_or_else(|_| panic!("not noticed: {what}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_way_of_saving_a_file_is_noticed() {
    let watched = Watched::start(Dir::with(&[("routing.lua", &weights(1))]));
    let path = watched.dir.path("routing.lua");

    fs::write(&path, weights(2)).expect("in place");
    watched.until("a write in place", |w| w.kv() == 2.0).await;

    let unfinished = watched.dir.path(".routing.lua.tmp");
    fs::write(&unfinished, weights(3)).expect("write beside");
    fs::rename(&unfinished, &path).expect("rename over");
    watched.until("a rename over it", |w| w.kv() == 3.0).await;

    fs::write(&path, weights(4)).expect("in place");
    watched
        .until("a write after the rename", |w| w.kv() == 4.0)
        .await;

    fs::rename(&path, watched.dir.path("routing.lua~")).expect("backup");
    fs::write(&path, weights(5)).expect("new file");
    watched
        .until("a backup and a new file", |w| w.kv() == 5.0)
        .await;

    fs::write(&path, weights(98)).expect("first save");
    fs::write(&path, weights(6)).expect("second save");
    watched
        .until("the second of two saves within a millisecond", |w| {
            w.kv() == 6.0
        })
        .await;

    fs::remove_file(&path).expect("remove");
    watched
        .until("a removed file: built in again", |w| w.kv() == 500.0)
        .await;

    watched.dir.write("engines/tgi.lua", "return { api = 1 }");
    watched
        .until("a folder with an engine", |w| {
            w.policies.current().engine("tgi").is_some()
        })
        .await;
    watched
        .dir
        .write("engines/tgi.lua", "return { api = 1, needs_gpu = true }");
    let needs_gpu = |w: &Watched| {
        w.policies
            .current()
            .engine("tgi")
            .is_some_and(|plugin| plugin.needs_gpu)
    };
    watched
        .until("a change in a folder that is new", needs_gpu)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_config_map_swap_is_noticed_each_time() {
    let dir = Dir::new();
    let generation = |name: &str, kv| {
        fs::create_dir(dir.path(name)).expect("mkdir");
        fs::write(dir.path(name).join("routing.lua"), weights(kv)).expect("write");
    };
    generation("..2026_1", 1);
    symlink("..2026_1", dir.path("..data")).expect("link");
    symlink("..data/routing.lua", dir.path("routing.lua")).expect("link");
    let root = dir.0.clone();
    let watched = Watched::start(dir);
    assert_eq!(watched.kv(), 1.0);
    for (n, kv) in [(2, 2), (3, 3)] {
        let name = format!("..2026_{n}");
        fs::create_dir(root.join(&name)).expect("mkdir");
        fs::write(root.join(&name).join("routing.lua"), weights(kv)).expect("write");
        symlink(&name, root.join("..data_tmp")).expect("link");
        fs::rename(root.join("..data_tmp"), root.join("..data")).expect("swap");
        fs::remove_dir_all(root.join(format!("..2026_{}", n - 1))).expect("remove the old one");
        watched
            .until(&format!("swap to {name}"), |w| w.kv() == f64::from(kv))
            .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_which_no_event_tells_is_found_by_looking() {
    // As on a network file system: what changes is in a directory that nobody watches.
    let elsewhere = Dir::with(&[("routing.lua", &weights(1))]);
    let dir = Dir::new();
    symlink(elsewhere.path("routing.lua"), dir.path("routing.lua")).expect("link");
    let watched = Watched::start(dir);
    assert_eq!(watched.kv(), 1.0);
    elsewhere.write("routing.lua", weights(2));
    watched.until("the file behind", |w| w.kv() == 2.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_is_removed_and_made_again_is_followed() {
    let watched = Watched::start(Dir::with(&[("routing.lua", &weights(1))]));
    fs::remove_dir_all(&watched.dir.0).expect("remove");
    watched
        .until("the removal", |w| w.policies.status().last_error.is_some())
        .await;
    assert_eq!(watched.kv(), 1.0, "the last good set stays");

    let beside = watched.dir.0.with_extension("new");
    fs::create_dir(&beside).expect("mkdir");
    fs::write(beside.join("routing.lua"), weights(2)).expect("write");
    fs::rename(&beside, &watched.dir.0).expect("put it there");
    watched.until("the new directory", |w| w.kv() == 2.0).await;
    assert_eq!(watched.policies.status().last_error, None);
    watched.dir.write("routing.lua", weights(3));
    watched
        .until("a change in the new directory", |w| w.kv() == 3.0)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_save_is_explained_once_and_changes_nothing() {
    let watched = Watched::start(Dir::with(&[("routing.lua", &weights(1))]));
    watched.dir.write(
        "routing.lua",
        "return {\n  api = 1,\n  weights = functoin() end }",
    );
    watched
        .until("the mistake", |w| w.policies.status().last_error.is_some())
        .await;
    let error = watched.policies.status().last_error.expect("it is on show");
    assert_eq!(
        (error.line, error.text.as_deref()),
        (Some(3), Some("weights = functoin() end }"))
    );
    assert_eq!(
        (watched.kv(), watched.policies.current().generation()),
        (1.0, 1)
    );
    watched.dir.write("routing.lua", weights(2));
    watched.until("the correction", |w| w.kv() == 2.0).await;
    assert_eq!(watched.policies.status().last_error, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_come_and_go_are_never_half_seen() {
    let dir = Dir::with(&[("routing.lua", &weights(1)), ("lib/x.lua", "return 1")]);
    let policies = dir.open().expect("the first set loads");
    let (root, done) = (dir.0.clone(), CancellationToken::new());
    let stop = done.clone();
    let writer = std::thread::spawn(move || {
        for n in 0u32.. {
            if stop.is_cancelled() {
                break;
            }
            churn(&root, n);
        }
    });
    for _ in 0..60 {
        // Each outcome is a whole set, or a refusal that names a file that went away; nothing panics.
        if let Err(error) = policies.reload() {
            assert!(error.reason.contains("went away"), "{error}");
        }
        let kv = policies
            .current()
            .routing_weights(&PoolView {
                model: "m",
                ..PoolView::default()
            })
            .kv;
        assert!([1.0, 2.0, 500.0].contains(&kv), "{kv}");
    }
    done.cancel();
    writer.join().expect("the writer ends");
}

/// Renames, removes and writes policy files.
fn churn(root: &Path, n: u32) {
    let _ = fs::write(root.join(".new"), weights(1 + n % 2));
    let _ = fs::rename(root.join(".new"), root.join("routing.lua"));
    let _ = fs::remove_file(root.join("lib/x.lua"));
    let _ = fs::write(root.join(".x"), "return 1");
    let _ = fs::rename(root.join(".x"), root.join("lib/x.lua"));
    if n.is_multiple_of(7) {
        let _ = fs::remove_file(root.join("routing.lua"));
    }
}

#[tokio::test]
async fn a_person_can_go_back_and_stay_there() {
    let dir = Dir::with(&[("routing.lua", &weights(1))]);
    let policies = dir.open().expect("it loads");
    dir.write("routing.lua", weights(2));
    policies.reload().expect("it loads");
    assert_eq!(
        policies
            .pin(None)
            .expect("there is an earlier one")
            .generation(),
        1
    );
    dir.write("routing.lua", weights(3));
    assert_eq!(policies.reload().expect("nothing is done").generation(), 1);
    assert!(policies.status().pinned && policies.status().history == [1, 2]);
    assert!(
        policies
            .pin(Some(9))
            .expect_err("no such generation")
            .reason
            .ends_with("there are 1, 2")
    );
    let set = policies.unpin().expect("the directory is followed again");
    assert_eq!(
        (
            set.generation(),
            set.routing_weights(&PoolView::default()).kv
        ),
        (3, 3.0)
    );
}
