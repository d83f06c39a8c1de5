//! The guide to secure a fleet, executed on hosts of its own as `harness/guide.rs` says: a prompt `n1$ ` is a shell on the host `n1`.
//!
//! Every host has a network namespace with the address that the guide names, and directories of its own in place of [`OWN`], so that all
//! paths are those of the guide. `scp` copies between hosts. A command that ends in `&` runs until the guide's end, or until `kill $!`;
//! variables that are exported stay. What looks at something is repeated until it shows what the guide says.

#[path = "harness/guide.rs"]
mod guide;
#[path = "harness/net.rs"]
mod net;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guide::{LLAMA_SERVER, Place, of_the_machine};
use net::Net;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

/// How long what is looked at may take to be as the guide says.
const PATIENCE: Duration = Duration::from_secs(120);
/// The same where the guide is being written, and what it says may never come.
const PATIENCE_WRITING: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The hosts, in the order of their addresses: 10.77.0.1 and so on.
const HOSTS: [&str; 5] = ["server", "n1", "n2", "n3", "ops"];
/// A name of the server.
const NAME: &str = "ctl.example";
/// What each host has for itself.
const OWN: [&str; 3] = ["etc", "var/lib", "opt"];
/// What the programs of a guide want of this machine's `/etc`, where it is there.
const OF_ETC: [&str; 4] = ["passwd", "group", "nsswitch.conf", "ssl/openssl.cnf"];
/// Copies to another host, whose files are beside this one's.
const SCP: &str = r#"#!/bin/sh
for last in "$@"; do :; done
while [ $# -gt 1 ]; do
  cp "$1" "${0%/bin/scp}/${last%%:*}${last#*:}" || exit 1
  shift
done
"#;
/// What runs on and on sees its own processes only: an agent looks for engines that an earlier one left, by the path of its state.
const PROCESSES: [&str; 4] = ["--pid", "--fork", "--kill-child", "--mount-proc"];
/// Begins what is run on a host, of which `$0` is the directory.
const ENTER: &str = r#"for own in etc var/lib opt; do mount --bind "$0/$own" "/$own" || exit 1; done
cd "$0/root" && exec sh -c "$1""#;
/// Commands that change nothing.
const LOOKS: [&str; 5] = [
    "llmgw ctl nodes",
    "llmgw ctl replicas",
    "llmgw ctl status",
    "curl ",
    "grep ",
];

/// The hosts of the guide, and what runs on them.
struct Hosts {
    dir: PathBuf,
    net: Net,
    /// `export` commands by host.
    exports: BTreeMap<String, Vec<String>>,
    children: Vec<Child>,
    /// The latest of them on each host.
    latest: BTreeMap<String, u32>,
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL);
            let _ = child.wait();
        }
        self.end_engines();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn the_guide_to_secure_a_fleet_is_true() {
    let name = "the_guide_to_secure_a_fleet_is_true";
    if !net::is_possible(name) || !has_mounts(name) {
        return;
    }
    for tool in ["openssl", "curl"] {
        let found = Command::new(tool).arg("--version").output();
        assert!(found.is_ok(), "{tool} is needed: install Debian's package");
    }
    guide::follow("secure-a-fleet", &mut Hosts::new());
}

/// Whether a process may have directories and processes to itself. Where not, the test is skipped, having said so.
fn has_mounts(test: &str) -> bool {
    let mut tried = Command::new("unshare");
    tried.arg("--mount").args(PROCESSES);
    tried.args(["sh", "-c", "mount --bind /etc /etc"]);
    let reason = match tried.output() {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    let required = std::env::var("LLMGW_REQUIRE_REAL");
    assert_ne!(required.as_deref(), Ok("1"), "no namespaces: {reason}");
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
    false
}

impl Hosts {
    fn new() -> Hosts {
        let dir = std::env::temp_dir().join(format!("llmgw-secure-guide-{}", std::process::id()));
        let bin = dir.join("bin");
        fs::create_dir_all(&bin).unwrap();
        let built = Path::new(env!("CARGO_BIN_EXE_llmgw"));
        // Where they were built may be hidden by a host's own directories.
        for name in ["llmgw", "fake-engine"] {
            let (from, to) = (built.with_file_name(name), bin.join(name));
            fs::hard_link(&from, &to)
                .or_else(|_| fs::copy(&from, &to).map(drop))
                .unwrap();
        }
        write_executable(&bin.join("scp"), SCP);
        for host in HOSTS {
            furnish(&dir.join(host), &bin);
        }
        Hosts {
            net: Net::new(HOSTS.len()),
            dir,
            exports: BTreeMap::new(),
            children: Vec::new(),
            latest: BTreeMap::new(),
        }
    }

    /// A shell on a host that is to do this, in further namespaces.
    fn shell(&self, host: &str, further: &[&str], what: &str) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut script = "exec 2>&1; ".to_owned();
        for export in self.exports.get(host).into_iter().flatten() {
            script.push_str(&format!("{export}; "));
        }
        let mut shell = Command::new("unshare");
        shell
            .arg("--mount")
            .args(further)
            .args(["sh", "-c", ENTER])
            .arg(self.dir.join(host))
            .arg(script + what)
            .env_clear()
            .env("PATH", format!("{}:{path}", self.dir.join("bin").display()))
            .stdin(Stdio::null());
        shell
    }

    fn on<T: Send>(&self, host: &str, what: impl FnOnce() -> T + Send) -> T {
        let number = HOSTS.iter().position(|name| *name == host);
        let number = number.unwrap_or_else(|| panic!("there is no host `{host}`"));
        self.net.on(number, what)
    }

    /// Starts a command, which takes the shell's place.
    fn start(&mut self, host: &str, command: &str) {
        let mut shell = self.shell(host, &PROCESSES, &format!("exec {command}"));
        shell.stdout(Stdio::null()).process_group(0);
        let child = self.on(host, || shell.spawn()).unwrap();
        self.latest.insert(host.to_owned(), child.id());
        self.children.push(child);
    }

    fn printed(&self, host: &str, command: &str) -> Vec<String> {
        let latest = self.latest.get(host).map_or(String::new(), u32::to_string);
        let mut shell = self.shell(host, &[], &command.replace("$!", &latest));
        let output = self.on(host, || shell.output()).unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    /// What is left on the hosts: engines outlive their agents.
    fn end_engines(&self) {
        let network = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
        let hosts = HOSTS.map(|host| self.on(host, || network("thread-self")));
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name().into_string().unwrap_or_default();
            let (Ok(pid), Some(network)) = (name.parse(), network(&name)) else {
                continue;
            };
            if hosts.contains(&Some(network)) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
}

/// Makes a host's directories, with a fake llama.cpp and the name of the server.
fn furnish(host: &Path, bin: &Path) {
    for own in OWN.into_iter().chain(["etc/ssl", "opt/llama.cpp", "root"]) {
        fs::create_dir_all(host.join(own)).unwrap();
    }
    for file in OF_ETC {
        let _ = fs::copy(Path::new("/etc").join(file), host.join("etc").join(file));
    }
    let hosts = format!("127.0.0.1 localhost\n{} {NAME}\n", Net::address(0));
    fs::write(host.join("etc/hosts"), hosts).unwrap();
    let script = guide::llama_server(&bin.join("fake-engine"));
    write_executable(&host.join(LLAMA_SERVER.trim_start_matches('/')), &script);
}

fn write_executable(file: &Path, text: &str) {
    fs::write(file, text).unwrap();
    fs::set_permissions(file, PermissionsExt::from_mode(0o755)).unwrap();
}

impl Place for Hosts {
    /// A path is `HOST:PATH`; a relative one starts where the host's prompt is.
    fn write(&mut self, path: &str, text: &str) {
        let (host, path) = path.split_once(':').unwrap();
        let path = match path.strip_prefix('/') {
            Some(path) => self.dir.join(host).join(path),
            None => self.dir.join(host).join("root").join(path),
        };
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn run(
        &mut self,
        host: &str,
        command: &str,
        is_expected: &dyn Fn(&[String]) -> bool,
    ) -> Vec<String> {
        if let Some(command) = command.strip_suffix('&') {
            self.start(host, command);
            return Vec::new();
        }
        if command.starts_with("export ") {
            let exports = self.exports.entry(host.to_owned()).or_default();
            exports.push(command.to_owned());
            return Vec::new();
        }
        let looks = LOOKS.iter().any(|start| command.starts_with(start));
        let patience = match std::env::var_os("LLMGW_UPDATE_DOCS") {
            Some(_) => PATIENCE_WRITING,
            None => PATIENCE,
        };
        let deadline = Instant::now() + patience;
        loop {
            let lines = self.printed(host, command);
            if !looks || is_expected(&lines) || Instant::now() > deadline {
                return lines;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn steady(command: &str, line: &str) -> String {
        let words = line.split_whitespace().map(|word| match word {
            word if is_date(word) => "<date>",
            word if command.starts_with("llmgw ctl") => of_the_machine(word),
            word => word,
        });
        words.collect::<Vec<_>>().join(" ")
    }
}

/// `2027-01-31`, with or without a time, and with what a sentence puts behind it.
fn is_date(word: &str) -> bool {
    let mut parts = word.splitn(3, '-');
    let mut digits = |count| {
        let part = parts.next().unwrap_or_default();
        part.len() >= count && part.bytes().take(count).all(|byte| byte.is_ascii_digit())
    };
    digits(4) && digits(2) && digits(2)
}
