use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;
use crate::supervisor::gpu::GpuFact;

const PATIENCE: Duration = Duration::from_secs(60);

/// A process of the test's, and a proc directory in which it is and which can't be read.
struct Unseen {
    child: Child,
    proc: PathBuf,
}

impl Unseen {
    fn new(name: &str) -> Unseen {
        let child = Command::new("/bin/sleep").arg("600").spawn().unwrap();
        let proc = std::env::temp_dir().join(format!("llmgw-{name}-{}", std::process::id()));
        let (pid, boot_id) = (child.id().to_string(), "sys/kernel/random/boot_id");
        fs::create_dir_all(proc.join(boot_id).parent().unwrap()).unwrap();
        fs::write(proc.join(boot_id), "5eed").unwrap();
        fs::create_dir_all(proc.join(&pid)).unwrap();
        let stat = fs::read(Path::new("/proc").join(&pid).join("stat")).unwrap();
        fs::write(proc.join(&pid).join("stat"), stat).unwrap();
        fs::create_dir_all(proc.join("9999999/stat")).unwrap();
        Unseen { child, proc }
    }

    /// What looks like a control group with nothing in it.
    fn group(&self) -> PathBuf {
        let group = self.proc.join("group");
        fs::create_dir(&group).unwrap();
        fs::write(group.join("cgroup.kill"), "").unwrap();
        group
    }

    /// From now on it can.
    fn show(&self) {
        fs::remove_dir_all(self.proc.join("9999999")).unwrap();
    }

    fn scan(&self) -> Scan {
        let leader = ProcessId::read(&self.proc, self.child.id()).unwrap();
        Scan {
            proc: self.proc.clone(),
            traces: Traces {
                leaders: leader.into_iter().collect(),
                ..Traces::default()
            },
            held: Vec::new(),
            cgroup: None,
        }
    }

    /// The signal that ended it.
    async fn signal(&mut self) -> Option<i32> {
        let ended = async {
            loop {
                if let Some(status) = self.child.try_wait().unwrap() {
                    return status.signal();
                }
                tokio::time::sleep(LOOK_FIRST).await;
            }
        };
        tokio::time::timeout(PATIENCE, ended).await.unwrap()
    }
}

impl Drop for Unseen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.proc);
    }
}

#[tokio::test]
async fn what_could_not_be_seen_at_first_is_asked_to_end_once_it_is() {
    let mut unseen = Unseen::new("terminate");
    let (sender, mut events) = mpsc::channel(8);
    let look_now = Arc::new(Notify::new());
    let ends = until_gone(
        unseen.scan(),
        Force::Terminate,
        Arc::default(),
        look_now.clone(),
        sender,
    );
    let ends = tokio::spawn(ends);
    let said = events.recv().await;
    let expected = "what runs can't be seen: Is a directory (os error 21)";
    assert_eq!(said, Some(Event::Remains(expected.to_owned())));
    unseen.show();
    look_now.notify_one();
    assert_eq!(unseen.signal().await, Some(libc::SIGTERM));
    fs::remove_dir_all(unseen.proc.join(unseen.child.id().to_string())).unwrap();
    while events.recv().await.unwrap() != Event::Gone {}
    ends.await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_seen_is_killed_all_the_same() {
    let mut unseen = Unseen::new("kill");
    let group = unseen.group();
    let scan = Scan {
        cgroup: ShardCgroup::open(&group),
        ..unseen.scan()
    };
    let (sender, mut events) = mpsc::channel(8);
    let ends = tokio::spawn(until_gone(
        scan,
        Force::Kill,
        Arc::default(),
        Arc::default(),
        sender,
    ));
    assert_eq!(unseen.signal().await, Some(libc::SIGKILL));
    assert!(matches!(events.recv().await, Some(Event::Remains(_))));
    ends.abort();
    assert!(ends.await.unwrap_err().is_cancelled());
    // A round may be under way still: it empties the file before it writes.
    let deadline = Instant::now() + PATIENCE;
    while fs::read_to_string(group.join("cgroup.kill")).unwrap() != "1" {
        assert!(Instant::now() < deadline, "the group is not killed");
        std::thread::yield_now();
    }
}

#[tokio::test]
async fn what_is_to_be_killed_at_once_is_killed_though_no_time_is_left_or_it_cannot_be_seen() {
    for seen in [true, false] {
        let mut unseen = Unseen::new(&format!("now-{seen}"));
        let group = unseen.group();
        let scan = Scan {
            cgroup: ShardCgroup::open(&group),
            ..unseen.scan()
        };
        if seen {
            unseen.show();
        }
        let killed = kill_now(scan, Duration::ZERO).ok();
        assert_eq!(killed, seen.then(|| [unseen.child.id()].into()));
        assert_eq!(fs::read_to_string(group.join("cgroup.kill")).unwrap(), "1");
        assert_eq!(unseen.signal().await, Some(libc::SIGKILL));
    }
}

#[test]
fn nothing_is_left_only_once_each_environment_has_come() {
    let unseen = Unseen::new("late");
    unseen.show();
    let mut scan = unseen.scan();
    (scan.traces.shard, scan.traces.state_dir) = ("m/0/0".to_owned(), "/state".to_owned());
    scan.traces.leaders.clear();
    let environ = unseen.proc.join(format!("{}/environ", unseen.child.id()));
    mkfifo(&environ, Mode::S_IRWXU).unwrap();
    let error = scan.look().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    // That read ends, which opened what was there when it began.
    fs::write(&environ, "").unwrap();
    fs::remove_file(&environ).unwrap();
    fs::write(&environ, "LLMGW_SHARD=m/0/0\0LLMGW_STATE=/state\0").unwrap();
    let deadline = Instant::now() + PATIENCE;
    let members = loop {
        match scan.look() {
            Ok(members) if !members.is_empty() => break members,
            // Nobody: after a pause of the machine that read was taken to hang.
            seen => assert!(Instant::now() < deadline, "{seen:?}"),
        }
    };
    assert_eq!(members.len(), 1);
}

#[tokio::test]
async fn an_engine_that_the_process_table_does_not_show_is_ended_and_not_taken_for_gone() {
    for (force, signal, is_grouped) in [
        (Force::Terminate, libc::SIGTERM, false),
        (Force::Terminate, libc::SIGTERM, true),
        (Force::Kill, libc::SIGKILL, false),
    ] {
        let mut unseen = Unseen::new(&format!("hidden-{signal}-{is_grouped}"));
        unseen.show();
        let pid = unseen.child.id();
        fs::remove_dir_all(unseen.proc.join(pid.to_string())).unwrap();
        let id = ProcessId::read(Path::new("/proc"), pid).unwrap().unwrap();
        let held = Process::adopt(&id, Path::new("/proc")).unwrap().unwrap();
        let group = unseen.group();
        fs::write(group.join("cgroup.procs"), pid.to_string()).unwrap();
        let scan = Scan {
            held: vec![Arc::new(held)],
            cgroup: ShardCgroup::open(&group).filter(|_| is_grouped),
            ..unseen.scan()
        };
        let (sender, mut events) = mpsc::channel(8);
        let ends = tokio::spawn(until_gone(
            scan,
            force,
            Arc::default(),
            Arc::default(),
            sender,
        ));
        let remains = format!("process {pid} (not to be seen)");
        assert_eq!(events.recv().await, Some(Event::Remains(remains)));
        assert_eq!(unseen.signal().await, Some(signal));
        // What a group lists is gone once it does not any more.
        fs::write(group.join("cgroup.procs"), "").unwrap();
        assert_eq!(events.recv().await, Some(Event::Gone));
        ends.await.unwrap();
    }
}

/// A GPU that is free at the third look.
#[derive(Default)]
struct FreedLate {
    looks: Mutex<Vec<Instant>>,
}

impl GpuFacts for FreedLate {
    fn gpu(&self, _: &str) -> Option<GpuFact> {
        let looks = self.looks.lock().unwrap();
        Some(GpuFact {
            problems: Vec::new(),
            used_mib: Some(if looks.len() < 3 { 9_000 } else { 3 }),
            holders: Vec::new(),
            read_at: *looks.last().unwrap(),
        })
    }

    fn look_now(&self) {
        self.looks.lock().unwrap().push(Instant::now());
    }
}

#[tokio::test(start_paused = true)]
async fn a_gpu_that_is_held_still_is_looked_at_again_and_not_all_the_time() {
    let began = tokio::time::Instant::now();
    let (gpus, uuids) = (Arc::new(FreedLate::default()), vec!["GPU-1".to_owned()]);
    let (sender, mut events) = mpsc::channel(8);
    let frees = until_free("m/0/0".to_owned(), uuids, gpus.clone(), sender);
    tokio::time::timeout(PATIENCE, frees).await.unwrap();
    assert!(matches!(events.recv().await, Some(Event::Held(_))));
    assert_eq!(events.recv().await, Some(Event::Released));
    assert_eq!(gpus.looks.lock().unwrap().len(), 3);
    assert!(began.elapsed() >= 2 * ASK_GPU);
}
