//! Runs nvidia-smi once: bounded in time and size. What it printed counts whatever its exit status is.

use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::inventory::gpu::bounded::{End, collect};

/// The answers of a node with 16 GPUs are below 100 kB.
const OUTPUT_MAX_BYTES: usize = 1 << 20;

/// Where nvidia-smi is when it is not on the path of a system service.
const DIRECTORIES: [&str; 6] = [
    "/usr/bin",
    "/usr/local/bin",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/bin",
    "/opt/bin",
    "/run/current-system/sw/bin",
];

/// What nvidia-smi answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// `None`: a signal ended it.
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Why nvidia-smi did not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunError {
    /// `None`: not in any of the usual places.
    NotFound {
        path: Option<PathBuf>,
    },
    NotStarted {
        path: PathBuf,
        reason: String,
    },
    Deadline {
        arguments: String,
        waited: Duration,
    },
    TooMuch {
        arguments: String,
    },
}

/// Something that answers as nvidia-smi does: the program, or a recording of it.
pub trait Smi {
    fn run(&self, arguments: &[&str]) -> Result<Ran, RunError>;
}

/// The program.
pub struct Program {
    path: PathBuf,
    /// Of all its runs together.
    deadline: Instant,
    started: Instant,
}

impl Program {
    pub fn new(path: PathBuf, deadline: Instant) -> Program {
        Program {
            path,
            deadline,
            started: Instant::now(),
        }
    }

    /// Looks for nvidia-smi on the path, then where drivers put it.
    pub fn find(deadline: Instant) -> Result<Program, RunError> {
        let on_path = std::env::var_os("PATH").unwrap_or_default();
        let directories = std::env::split_paths(&on_path)
            .filter(|directory| directory.is_absolute())
            .chain(DIRECTORIES.iter().map(PathBuf::from));
        Program::find_in(directories, deadline)
    }

    fn find_in(
        directories: impl Iterator<Item = PathBuf>,
        deadline: Instant,
    ) -> Result<Program, RunError> {
        directories
            .map(|directory| directory.join("nvidia-smi"))
            .find(|path| path.is_file())
            .map(|path| Program::new(path, deadline))
            .ok_or(RunError::NotFound { path: None })
    }
}

impl Smi for Program {
    fn run(&self, arguments: &[&str]) -> Result<Ran, RunError> {
        let not_started = |reason: String| RunError::NotStarted {
            path: self.path.clone(),
            reason,
        };
        let mut child = Command::new(&self.path)
            .args(arguments)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| match error.kind() {
                ErrorKind::NotFound => RunError::NotFound {
                    path: Some(self.path.clone()),
                },
                _ => not_started(error.to_string()),
            })?;
        let collected = collect(&mut child, self.deadline, OUTPUT_MAX_BYTES)
            .map_err(|error| not_started(error.to_string()))?;
        let status = match collected.end {
            End::Exited => child
                .wait()
                .map_err(|error| not_started(error.to_string()))?
                .code(),
            unfinished => {
                // One that hangs in the kernel outlives this; the probe's process group still shows it.
                let _ = child.kill();
                let arguments = short(arguments);
                return Err(match unfinished {
                    End::TooMuch => RunError::TooMuch { arguments },
                    _ => RunError::Deadline {
                        arguments,
                        waited: self.started.elapsed(),
                    },
                });
            }
        };
        Ok(Ran {
            status,
            stdout: String::from_utf8_lossy(&collected.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&collected.stderr).into_owned(),
        })
    }
}

/// The question without the fields that it asks for.
fn short(arguments: &[&str]) -> String {
    let words = arguments
        .iter()
        .filter(|word| !word.starts_with("--format"));
    let names: Vec<&str> = words.filter_map(|word| word.split('=').next()).collect();
    names.join(" ")
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::NotFound { path: Some(path) } => {
                write!(f, "there is no `{}`", path.display())
            }
            RunError::NotFound { path: None } => write!(
                f,
                "there is no nvidia-smi on the path, nor in {}",
                DIRECTORIES.join(", ")
            ),
            RunError::NotStarted { path, reason } => {
                write!(f, "`{}` can't be run: {reason}", path.display())
            }
            RunError::Deadline { arguments, waited } => write!(
                f,
                "`nvidia-smi {arguments}` had not answered {} ms after the first question",
                waited.as_millis()
            ),
            RunError::TooMuch { arguments } => write!(
                f,
                "`nvidia-smi {arguments}` printed more than {OUTPUT_MAX_BYTES} bytes"
            ),
        }
    }
}

impl std::error::Error for RunError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::gpu::scripts::Scripts;

    #[test]
    fn the_program_is_found_where_drivers_put_it_and_what_was_tried_is_told() {
        let scripts = Scripts::new("find");
        let path = scripts.program("nvidia-smi", "echo found");
        let directories = || {
            let empty = ["/nonexistent/bin", "/nonexistent/wsl"];
            empty.into_iter().map(PathBuf::from)
        };
        let deadline = Instant::now() + Duration::from_secs(120);
        let there = directories().chain([scripts.path().to_path_buf()]);
        let program = Program::find_in(there, deadline).unwrap();
        assert_eq!(program.path, path);
        assert_eq!(program.run(&["-L"]).unwrap().stdout, "found\n");

        let error = Program::find_in(directories(), deadline).err().unwrap();
        assert_eq!(
            error.to_string(),
            "there is no nvidia-smi on the path, nor in /usr/bin, /usr/local/bin, /usr/lib/wsl/lib, /usr/local/nvidia/bin, /opt/bin, /run/current-system/sw/bin"
        );
    }

    #[test]
    fn a_program_that_prints_without_end_is_stopped() {
        let scripts = Scripts::new("endless");
        let path = scripts.program("nvidia-smi", "exec yes");
        let deadline = Instant::now() + Duration::from_secs(120);
        let error = Program::new(path, deadline)
            .run(&["topo", "-m"])
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "`nvidia-smi topo -m` printed more than 1048576 bytes"
        );
    }
}
