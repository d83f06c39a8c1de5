//! What `/proc/PID` says of a process beside its identity: arguments, environment, control groups.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// The kernel allows more; an engine's command line is some kilobytes.
const CMDLINE_MAX_BYTES: u64 = 1 << 20;
const ENVIRON_MAX_BYTES: u64 = 1 << 20;
const CGROUP_MAX_BYTES: u64 = 64 * 1024;

/// The control groups that a process is in.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cgroups {
    /// In the unified hierarchy (version 2). `/` in a container with a namespace of its own, and where version 2 has no controllers.
    pub unified: Option<String>,
    /// By controller, where version 1 has them: `memory` to `/system.slice/x.service`. systemd's own is `name=systemd`.
    pub controllers: BTreeMap<String, String>,
}

impl Cgroups {
    /// Reads `/proc/PID/cgroup`. Lines that are none are passed over.
    pub fn parse(text: &str) -> Cgroups {
        let mut cgroups = Cgroups::default();
        for line in text.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(number), Some(controllers), Some(path)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if number == "0" && controllers.is_empty() {
                cgroups.unified = Some(path.to_owned());
                continue;
            }
            for controller in controllers.split(',').filter(|name| !name.is_empty()) {
                cgroups
                    .controllers
                    .insert(controller.to_owned(), path.to_owned());
            }
        }
        cgroups
    }

    /// The groups of `pid`, a number or `self`; `None` where there is no such process.
    pub fn read(proc: &Path, pid: &str) -> io::Result<Option<Cgroups>> {
        let bytes = read_file(&proc.join(pid).join("cgroup"), CGROUP_MAX_BYTES)?;
        Ok(bytes.map(|bytes| Cgroups::parse(&String::from_utf8_lossy(&bytes))))
    }

    /// The systemd unit that the process is in: what a stop of that unit reaches.
    pub fn unit(&self) -> Option<&str> {
        let systemd = self.controllers.get("name=systemd");
        [systemd, self.unified.as_ref()]
            .into_iter()
            .flatten()
            .find_map(|path| {
                path.rsplit('/').find(|part| {
                    [".service", ".scope"]
                        .iter()
                        .any(|kind| part.ends_with(kind))
                })
            })
    }
}

/// The arguments of `pid`; `None` where there is no such process. Empty for a zombie and for a thread of the kernel.
/// A process may overwrite them, so they do not identify it.
pub fn arguments(proc: &Path, pid: u32) -> io::Result<Option<Vec<String>>> {
    let bytes = read_file(
        &proc.join(pid.to_string()).join("cmdline"),
        CMDLINE_MAX_BYTES,
    )?;
    Ok(bytes.map(|bytes| split_arguments(&bytes)))
}

/// The environment that `pid` was started with, as names and values; `None` where there is no such process.
pub fn environment(proc: &Path, pid: u32) -> io::Result<Option<Vec<(String, String)>>> {
    let bytes = read_file(
        &proc.join(pid.to_string()).join("environ"),
        ENVIRON_MAX_BYTES,
    )?;
    Ok(bytes.map(|bytes| split_environment(&bytes)))
}

/// Splits a cmdline. A title that was written over it is padded with zeros, which are no arguments.
pub fn split_arguments(bytes: &[u8]) -> Vec<String> {
    let end = bytes
        .iter()
        .rposition(|byte| *byte != 0)
        .map_or(0, |at| at + 1);
    if end == 0 {
        return Vec::new();
    }
    bytes[..end]
        .split(|byte| *byte == 0)
        .map(|argument| String::from_utf8_lossy(argument).into_owned())
        .collect()
}

/// Splits an environ; entries without `=` are passed over, and the first of two with one name counts, as for `getenv`.
pub fn split_environment(bytes: &[u8]) -> Vec<(String, String)> {
    let mut entries: Vec<(String, String)> = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    for entry in bytes.split(|byte| *byte == 0) {
        let entry = String::from_utf8_lossy(entry);
        let Some((name, value)) = entry.split_once('=') else {
            continue;
        };
        if seen.insert(name.to_owned()) {
            entries.push((name.to_owned(), value.to_owned()));
        }
    }
    entries
}

/// `None`: the process is gone.
fn read_file(path: &Path, max_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(max_bytes).read_to_end(&mut bytes)) {
        Ok(_) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        // It ended between opening and reading.
        Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(name: &str) -> Vec<u8> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        std::fs::read(root.join("../tests/recordings/proc").join(name)).unwrap()
    }

    fn cgroups(name: &str) -> Cgroups {
        Cgroups::parse(&String::from_utf8(recorded(name)).unwrap())
    }

    #[test]
    fn control_groups_are_read_in_both_versions() {
        let scope = cgroups("v2-own-scope.cgroup");
        assert_eq!(
            scope.unified.as_deref(),
            Some("/system.slice/llmgw.slice/engine-5eed.scope")
        );
        assert_eq!(scope.unit(), Some("engine-5eed.scope"));
        let inside = cgroups("v2-inside-agent-service.cgroup");
        assert_eq!(inside.unit(), Some("llmgw-agent.service"));
        let container = cgroups("v2-container.cgroup");
        assert_eq!(
            (container.unified.as_deref(), container.unit()),
            (Some("/"), None)
        );
        let hybrid = cgroups("hybrid-v1.cgroup");
        assert_eq!(hybrid.unified.as_deref(), Some("/"));
        assert_eq!(
            hybrid.controllers["memory"],
            "/system.slice/llmgw-agent.service"
        );
        assert_eq!(hybrid.unit(), Some("llmgw-agent.service"));
    }

    #[test]
    fn lines_that_are_no_control_group_are_passed_over_and_colons_stay_in_the_path() {
        let found = Cgroups::parse("x\n4:cpu,cpuacct:/a:b\n0::/c\n:\n7::/nothing\n");
        assert_eq!(found.unified.as_deref(), Some("/c"));
        assert_eq!(found.controllers["cpu"], "/a:b");
        assert_eq!(found.controllers["cpuacct"], "/a:b");
        assert_eq!(found.controllers.len(), 2);
    }

    #[test]
    fn arguments_keep_spaces_and_lose_the_padding_of_a_title() {
        assert_eq!(
            split_arguments(&recorded("vllm-api.cmdline")),
            [
                "/opt/vllm/bin/python3",
                "/opt/vllm/bin/vllm",
                "serve",
                "org/model",
                "--port",
                "8000"
            ]
        );
        assert_eq!(
            split_arguments(&recorded("setproctitle.cmdline")),
            ["VLLM::EngineCore"]
        );
        assert_eq!(
            split_arguments(&recorded("zombie.cmdline")),
            Vec::<String>::new()
        );
        assert_eq!(split_arguments(b"a b\0\0c\0"), ["a b", "", "c"]);
    }

    #[test]
    fn an_environment_keeps_the_first_of_two_and_what_follows_the_first_equals_sign() {
        let found = split_environment(b"A=1=2\0none\0A=3\0=x\0B=\0");
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(found, [pair("A", "1=2"), pair("", "x"), pair("B", "")]);
        assert_eq!(split_environment(b""), []);
    }

    #[test]
    fn this_process_is_read_and_one_that_is_not_there_is_none() {
        let proc = Path::new("/proc");
        let me = std::process::id();
        let arguments_of_me = arguments(proc, me).unwrap().unwrap();
        assert_eq!(arguments_of_me[0], std::env::args().next().unwrap());
        assert!(
            environment(proc, me)
                .unwrap()
                .unwrap()
                .iter()
                .any(|(name, _)| name == "CARGO_MANIFEST_DIR")
        );
        assert!(Cgroups::read(proc, "self").unwrap().is_some());
        // Numbers end below this.
        let nobody = 1 << 30;
        assert_eq!(arguments(proc, nobody).unwrap(), None);
        assert_eq!(environment(proc, nobody).unwrap(), None);
        assert_eq!(Cgroups::read(proc, &nobody.to_string()).unwrap(), None);
    }
}
