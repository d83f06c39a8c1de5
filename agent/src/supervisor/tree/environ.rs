//! What a process's environment says about whose it is. To read it takes a lock on the process's memory, and a process that hangs in a
//! driver can hold that for as long: so other threads read, and who asks goes on without an answer that does not come.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use llmgw_proto::shard::SHARD_VARIABLE;

use super::STATE_VARIABLE;
use crate::process_files;

/// A read takes microseconds, or as long as a driver likes.
const LIMITS: Limits = Limits {
    wait: Duration::from_secs(2),
    wait_beside_hung: Duration::from_millis(100),
    hangs_after: HANGS_AFTER,
};
/// From then on a read hangs in the kernel. Before, its thread may not have come to run.
pub const HANGS_AFTER: Duration = Duration::from_secs(10);
/// Processes whose read hangs, each with its thread. With more, no other one is asked.
const HUNG_MAX: usize = 64;
/// Threads that wait for the next read: as many as there are looks at the same time.
const IDLE_MAX: usize = 4;
/// Between two looks for what has not come yet.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What a process's environment says about whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Environ {
    Engine {
        shard: String,
        state_dir: String,
    },
    /// Readable, and no engine's.
    Other,
    /// Empty, overwritten, or not for us to read.
    Illegible,
}

/// The environments that one look at processes asks for, each read once at most.
pub struct Environs<'a> {
    proc: &'a Path,
    read: RefCell<BTreeMap<u32, Environ>>,
    /// Whose have not come yet.
    late: RefCell<Vec<u32>>,
}

/// How long a read is waited for.
#[derive(Clone, Copy)]
struct Limits {
    wait: Duration,
    /// While others hang: their waits would add up.
    wait_beside_hung: Duration,
    hangs_after: Duration,
}

/// One read, for one of the threads.
struct Ask {
    proc: PathBuf,
    pid: u32,
    answer: Sender<Environ>,
}

/// A read that did not end in time.
struct Hung {
    proc: PathBuf,
    pid: u32,
    since: Instant,
    /// Tells when it has.
    answer: Receiver<Environ>,
}

/// Shared by all that look at processes.
struct Readers {
    idle: Vec<Sender<Ask>>,
    hung: Vec<Hung>,
}

static READERS: Mutex<Readers> = Mutex::new(Readers {
    idle: Vec::new(),
    hung: Vec::new(),
});

/// A look that is repeated until each environment that it asks for has come, or is known to hang. Blocks.
pub fn look_until_all_came<T>(proc: &Path, look: impl Fn(&dyn Fn(u32) -> Environ) -> T) -> T {
    let environs = Environs::of(proc);
    loop {
        let seen = look(&|pid| environs.read(pid));
        if environs.all_came().is_ok() {
            return seen;
        }
        // What came stays: of thousands some may be late each time.
        environs.ask_late_again();
        std::thread::sleep(LOOK_EVERY);
    }
}

impl Environs<'_> {
    pub fn of(proc: &Path) -> Environs<'_> {
        Environs {
            proc,
            read: RefCell::default(),
            late: RefCell::default(),
        }
    }

    /// Whose engine a process is. Illegible where that has not come yet, too.
    pub fn read(&self, pid: u32) -> Environ {
        let mut read = self.read.borrow_mut();
        let environ = read.entry(pid).or_insert_with(|| {
            read_within(self.proc, pid, LIMITS).unwrap_or_else(|| {
                self.late.borrow_mut().push(pid);
                Environ::Illegible
            })
        });
        environ.clone()
    }

    fn ask_late_again(&self) {
        let mut read = self.read.borrow_mut();
        for pid in self.late.take() {
            read.remove(&pid);
        }
    }

    /// # Errors
    /// Where one has not come yet. It may be of whoever is looked for, so who was not found is not gone.
    pub fn all_came(&self) -> io::Result<()> {
        let Some(pid) = self.late.borrow().first().copied() else {
            return Ok(());
        };
        let text = format!("the environment of process {pid} has not come yet");
        Err(io::Error::new(io::ErrorKind::TimedOut, text))
    }
}

/// `None`: it has not come yet. One that hangs is illegible, and is not read again until that read has ended.
fn read_within(proc: &Path, pid: u32, limits: Limits) -> Option<Environ> {
    let since = Instant::now();
    let (reader, wait) = {
        let mut readers = readers();
        if let Some(since) = readers.hangs_since(proc, pid) {
            return (since.elapsed() >= limits.hangs_after).then_some(Environ::Illegible);
        }
        let Some(reader) = readers.take() else {
            return Some(Environ::Illegible);
        };
        match readers.hung.is_empty() {
            true => (reader, limits.wait),
            false => (reader, limits.wait_beside_hung),
        }
    };
    let (answer, answered) = channel();
    let proc = proc.to_owned();
    let ask = Ask {
        proc: proc.clone(),
        pid,
        answer,
    };
    if reader.send(ask).is_err() {
        return Some(Environ::Illegible);
    }
    match answered.recv_timeout(wait) {
        Ok(environ) => {
            readers().give_back(reader);
            Some(environ)
        }
        Err(RecvTimeoutError::Timeout) => {
            readers().add_hung(Hung {
                proc,
                pid,
                since,
                answer: answered,
            });
            None
        }
        Err(RecvTimeoutError::Disconnected) => Some(Environ::Illegible),
    }
}

fn readers() -> MutexGuard<'static, Readers> {
    READERS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Readers {
    fn hangs_since(&mut self, proc: &Path, pid: u32) -> Option<Instant> {
        let hangs = |hung: &Hung| hung.answer.try_recv() == Err(TryRecvError::Empty);
        self.hung.retain(hangs);
        let is_it = |hung: &&Hung| hung.pid == pid && hung.proc == proc;
        self.hung.iter().find(is_it).map(|hung| hung.since)
    }

    /// Once for each process, however many asked at the same time.
    fn add_hung(&mut self, hung: Hung) {
        if self.hangs_since(&hung.proc, hung.pid).is_none() {
            let pid = hung.pid;
            tracing::warn!(
                pid,
                "the environment of a process does not come; where it hangs in the kernel, the process is looked at without it"
            );
            self.hung.push(hung);
        }
    }

    /// A thread to ask; none where too many hang.
    fn take(&mut self) -> Option<Sender<Ask>> {
        match self.hung.len() < HUNG_MAX {
            true => self.idle.pop().or_else(start),
            false => None,
        }
    }

    fn give_back(&mut self, reader: Sender<Ask>) {
        if self.idle.len() < IDLE_MAX {
            self.idle.push(reader);
        }
    }
}

/// A thread that reads until nobody can ask it any more.
fn start() -> Option<Sender<Ask>> {
    let (asks, asked) = channel::<Ask>();
    let reads = move || {
        for Ask { proc, pid, answer } in asked {
            let _ = answer.send(read(&proc, pid));
        }
    };
    let thread = std::thread::Builder::new().name("environ".to_owned());
    thread.spawn(reads).ok()?;
    Some(asks)
}

fn read(proc: &Path, pid: u32) -> Environ {
    match process_files::environment(proc, pid) {
        Ok(Some(entries)) => whose(&entries),
        Ok(None) | Err(_) => Environ::Illegible,
    }
}

fn whose(entries: &[(String, String)]) -> Environ {
    let value = |name: &str| {
        let entry = entries.iter().find(|(theirs, _)| theirs == name);
        entry.map(|(_, value)| value.clone())
    };
    if let (Some(shard), Some(state_dir)) = (value(SHARD_VARIABLE), value(STATE_VARIABLE)) {
        return Environ::Engine { shard, state_dir };
    }
    // A title may hold a `=` too.
    let is_variable = |name: &str| {
        !name.is_empty()
            && name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    match entries.iter().any(|(name, _)| is_variable(name)) {
        true => Environ::Other,
        false => Environ::Illegible,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::OpenOptionsExt;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn an_environment_is_an_engines_another_ones_or_illegible() {
        let cases: [(&[u8], Environ); 7] = [
            (
                b"A=1\0LLMGW_SHARD=m/0/0\0LLMGW_STATE=/state\0",
                Environ::Engine {
                    shard: "m/0/0".to_owned(),
                    state_dir: "/state".to_owned(),
                },
            ),
            (b"A=1\0LLMGW_SHARD=m/0/0\0", Environ::Other),
            (b"XLLMGW_SHARD=m\0LLMGW_STATE=/state\0", Environ::Other),
            (b"", Environ::Illegible),
            (b"\0\0\0\0", Environ::Illegible),
            (b"VLLM::Worker_TP0\0\0", Environ::Illegible),
            (b"ray::Actor.run(x=1)\0\0", Environ::Illegible),
        ];
        for (bytes, expected) in cases {
            let entries = process_files::split_environment(bytes);
            assert_eq!(whose(&entries), expected, "{bytes:?}");
        }
    }

    const PATIENCE: Duration = Duration::from_secs(60);
    const MOMENT: Duration = Duration::from_millis(1);
    const NEVER: Duration = Duration::from_secs(600);

    /// A proc directory whose processes' environments can't be read to their ends.
    struct Hanging(PathBuf);

    impl Hanging {
        fn new(name: &str, pids: &[u32]) -> Hanging {
            let name = format!("llmgw-environ-{name}-{}", std::process::id());
            let hanging = Hanging(std::env::temp_dir().join(name));
            for pid in pids {
                fs::create_dir_all(hanging.environ(*pid).parent().unwrap()).unwrap();
                mkfifo(&hanging.environ(*pid), Mode::S_IRWXU).unwrap();
            }
            hanging
        }

        fn environ(&self, pid: u32) -> PathBuf {
            self.0.join(format!("{pid}/environ"))
        }

        fn read(&self, pid: u32, hangs_after: Duration) -> Option<Environ> {
            let limits = Limits {
                wait: MOMENT,
                wait_beside_hung: MOMENT,
                hangs_after,
            };
            read_within(&self.0, pid, limits)
        }

        /// Ends the read of this one, which opened what was there when it began, and lets later ones come.
        fn let_come(&self, pid: u32) {
            fs::write(self.environ(pid), "").unwrap();
            fs::remove_file(self.environ(pid)).unwrap();
            fs::write(self.environ(pid), "A=1\0").unwrap();
        }
    }

    impl Drop for Hanging {
        fn drop(&mut self) {
            // The reads that are left end: beside any that hangs, other tests' reads get less time.
            for process in fs::read_dir(&self.0).into_iter().flatten().flatten() {
                let mut writer = fs::OpenOptions::new();
                writer.write(true).custom_flags(libc::O_NONBLOCK);
                let _ = writer.open(process.path().join("environ"));
            }
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_read_that_hangs_is_repeated_when_it_has_ended_and_is_illegible_only_after_a_while() {
        let proc = Hanging::new("hangs", &[7]);
        assert_eq!(proc.read(7, NEVER), None);
        assert_eq!(proc.read(7, NEVER), None, "it has not come yet");
        assert_eq!(proc.read(7, Duration::ZERO), Some(Environ::Illegible));
        proc.let_come(7);
        let deadline = Instant::now() + PATIENCE;
        while proc.read(7, NEVER) != Some(Environ::Other) {
            assert!(Instant::now() < deadline, "it does not come");
            std::thread::yield_now();
        }
    }

    #[test]
    fn beside_a_read_that_hangs_no_other_one_is_waited_for_as_long() {
        let proc = Hanging::new("beside", &[7, 8]);
        assert_eq!(proc.read(7, NEVER), None);
        let limits = Limits {
            wait: NEVER,
            wait_beside_hung: MOMENT,
            hangs_after: NEVER,
        };
        assert_eq!(read_within(&proc.0, 8, limits), None);
    }

    fn hung(pid: u32, answer: Receiver<Environ>) -> Hung {
        Hung {
            proc: PathBuf::from("/proc"),
            pid,
            since: Instant::now(),
            answer,
        }
    }

    #[test]
    fn a_read_that_hangs_counts_once_however_many_asked_at_the_same_time() {
        let mut readers = Readers {
            idle: Vec::new(),
            hung: Vec::new(),
        };
        let (asked, answers): (Vec<_>, Vec<_>) = (0..3).map(|_| channel::<Environ>()).unzip();
        for (pid, answer) in [7, 7, 8].into_iter().zip(answers) {
            readers.add_hung(hung(pid, answer));
        }
        assert_eq!(readers.hung.len(), 2);
        drop(asked);
    }

    #[test]
    fn a_thread_reads_again_and_none_is_started_while_too_many_hang() {
        let mut readers = Readers {
            idle: Vec::new(),
            hung: Vec::new(),
        };
        let reader = readers.take().unwrap();
        readers.give_back(reader);
        let (answers, answer) = channel();
        let asked = |reader: Sender<Ask>| {
            let (proc, pid, answer) = (PathBuf::from("/nowhere"), 7, answers.clone());
            reader.send(Ask { proc, pid, answer }).unwrap();
            reader
        };
        let reader = asked(readers.take().unwrap());
        assert!(readers.idle.is_empty(), "it was the one that is back");
        assert_eq!(answer.recv(), Ok(Environ::Illegible));
        readers.give_back(reader);
        let (hangs, answers): (Vec<_>, Vec<_>) = (0..HUNG_MAX).map(|_| channel()).unzip();
        for (pid, answer) in (0..).zip(answers) {
            assert!(readers.take().is_some(), "{pid} hang");
            readers.add_hung(hung(pid, answer));
        }
        assert!(readers.take().is_none());
        drop(hangs);
        readers.hangs_since(Path::new("/proc"), 0);
        assert!(readers.take().is_some(), "their reads have ended");
    }

    #[test]
    fn a_look_says_which_environment_has_not_come() {
        let proc = Hanging::new("look", &[7]);
        let environs = Environs::of(&proc.0);
        assert_eq!(environs.read(9), Environ::Illegible, "nobody is there");
        assert!(environs.all_came().is_ok());
        assert_eq!(environs.read(7), Environ::Illegible);
        let error = environs.all_came().unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string().as_str()),
            (
                io::ErrorKind::TimedOut,
                "the environment of process 7 has not come yet"
            )
        );
    }
}
