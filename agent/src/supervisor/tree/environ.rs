//! What a process's environment says about whose it is. To read it takes a lock on the process's memory, and a process that hangs in a
//! driver can hold that for as long: so other threads read, and who asks goes on without an answer that does not come.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use llmgw_proto::shard::SHARD_VARIABLE;

use super::STATE_VARIABLE;
use crate::process_files;

/// A read takes microseconds, or as long as a driver likes.
const READ_MAX: Duration = Duration::from_secs(2);
/// Reads that hang, each with its thread. With more, no other process is asked.
const HUNG_MAX: usize = 64;
/// Threads that wait for the next read: as many as there are looks at the same time.
const IDLE_MAX: usize = 4;

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

/// Reads whose engine a process is. One whose environment can't be read in time is illegible, and is not asked again until that read
/// has ended.
pub fn read_environ(proc: &Path, pid: u32) -> Environ {
    read_within(proc, pid, READ_MAX)
}

fn read_within(proc: &Path, pid: u32, within: Duration) -> Environ {
    let Some(reader) = readers().take(proc, pid) else {
        return Environ::Illegible;
    };
    let (answer, answered) = channel();
    let proc = proc.to_owned();
    let ask = Ask {
        proc: proc.clone(),
        pid,
        answer,
    };
    if reader.send(ask).is_err() {
        return Environ::Illegible;
    }
    match answered.recv_timeout(within) {
        Ok(environ) => {
            readers().give_back(reader);
            environ
        }
        Err(RecvTimeoutError::Timeout) => {
            tracing::warn!(
                pid,
                "the environment of a process can't be read: it hangs in the kernel, and is looked at without it"
            );
            let answer = answered;
            readers().hung.push(Hung { proc, pid, answer });
            Environ::Illegible
        }
        Err(RecvTimeoutError::Disconnected) => Environ::Illegible,
    }
}

fn readers() -> MutexGuard<'static, Readers> {
    READERS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Readers {
    /// A thread to ask; none where the process hangs, or too many do.
    fn take(&mut self, proc: &Path, pid: u32) -> Option<Sender<Ask>> {
        let hangs = |hung: &Hung| hung.answer.try_recv() == Err(TryRecvError::Empty);
        self.hung.retain(hangs);
        let is_it = |hung: &Hung| hung.pid == pid && hung.proc == proc;
        if self.hung.len() >= HUNG_MAX || self.hung.iter().any(is_it) {
            return None;
        }
        self.idle.pop().or_else(start)
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

    #[test]
    fn a_read_that_hangs_is_not_waited_for_nor_repeated_until_it_has_ended() {
        let proc = std::env::temp_dir().join(format!("llmgw-environ-{}", std::process::id()));
        let environ = proc.join("7/environ");
        fs::create_dir_all(proc.join("7")).unwrap();
        mkfifo(&environ, Mode::S_IRWXU).unwrap();
        let never = Duration::from_secs(600);
        let moment = Duration::from_millis(1);
        assert_eq!(read_within(&proc, 7, moment), Environ::Illegible);
        assert_eq!(read_within(&proc, 7, never), Environ::Illegible);
        // The end of that read, which opens what was there when it began.
        fs::write(&environ, "").unwrap();
        fs::remove_file(&environ).unwrap();
        fs::write(&environ, "A=1\0").unwrap();
        while read_within(&proc, 7, never) != Environ::Other {
            std::thread::yield_now();
        }
        fs::remove_dir_all(proc).unwrap();
    }
}
