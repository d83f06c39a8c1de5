//! Several hosts on one machine: network namespaces on a switch, of which each can be cut off without anybody being told.
//!
//! Nothing here has a name outside of this process. A namespace lives as long as a descriptor or a process in it, so that tests don't meet
//! each other, and one that panics or is killed leaves nothing behind.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sched::{CloneFlags, setns, unshare};

/// Set for a test that runs once more, in a user namespace of its own.
const INSIDE: &str = "LLMGW_TEST_IN_NAMESPACE";
/// Names within the switch's namespace, which nobody else sees.
const BRIDGE: &str = "switch";

/// Ports of one node, for its engines, or of a server.
pub const PORTS_IN_A_ROW_MAX: u16 = 10;
/// Below those that the system hands out by itself, above those that agents have without being told and that `tests/dev.rs` uses.
const PORTS_FIRST: u16 = 23_000;
const PORTS: u32 = 9_000;

/// A switch and its hosts.
pub struct Net {
    switch: Namespace,
    hosts: Vec<Namespace>,
}

/// A network of its own: interfaces, addresses, routes, ports.
struct Namespace(File);

/// Whether a test that needs a [`Net`] goes on. Where this user may not make one, but may have a user namespace, the test named here runs in
/// such a one, and is over when this returns `false`. Where neither works it is skipped, having said so.
///
/// # Panics
/// When it failed in there, or can't run although `LLMGW_REQUIRE_REAL=1`.
pub fn is_possible(test: &str) -> bool {
    let direct = Net::try_new(0).err();
    let Some(reason) = direct else {
        return true;
    };
    let inside = std::env::var_os(INSIDE).is_some();
    let reason = match inside {
        true => reason,
        false => match in_user_namespace(test) {
            None => return false,
            Some(more) => format!("{reason}; {more}"),
        },
    };
    let required = std::env::var("LLMGW_REQUIRE_REAL");
    assert_ne!(
        required.as_deref(),
        Ok("1"),
        "no network namespace: {reason}"
    );
    assert!(
        !inside,
        "no network namespace in a user namespace: {reason}"
    );
    // Not `eprintln!`, which the test runner keeps to itself when a test passes.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
    false
}

/// Runs a test of this executable as the root of a user namespace. Why that is not possible, if it is not.
fn in_user_namespace(test: &str) -> Option<String> {
    let as_root = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user"]);
        command
    };
    let tried = as_root().arg("true").output();
    match tried {
        Ok(output) if output.status.success() => {}
        Ok(output) => return Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => return Some(format!("`unshare` can't be started: {error}")),
    }
    let ran = as_root()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .status()
        .unwrap();
    assert!(ran.success(), "{test} failed in a user namespace: {ran}");
    None
}

impl Net {
    /// So many hosts, each reaching all others.
    pub fn new(hosts: usize) -> Net {
        Net::try_new(hosts).unwrap()
    }

    fn try_new(hosts: usize) -> Result<Net, String> {
        let switch = Namespace::new()?;
        switch.ip(&format!("link add {BRIDGE} type bridge"))?;
        switch.ip(&format!("link set {BRIDGE} up"))?;
        let mut net = Net {
            switch,
            hosts: Vec::new(),
        };
        for number in 0..hosts {
            let host = Namespace::new()?;
            net.plug(&host, number)?;
            net.hosts.push(host);
        }
        Ok(net)
    }

    /// Connects a host to the switch.
    fn plug(&self, host: &Namespace, number: usize) -> Result<(), String> {
        let port = port(number);
        let place = host.path();
        self.switch.ip(&format!(
            "link add {port} type veth peer name eth0 netns {place}"
        ))?;
        self.switch
            .ip(&format!("link set {port} master {BRIDGE} up"))?;
        host.ip("link set lo up")?;
        host.ip("link set eth0 up")?;
        host.ip(&format!("address add {}/24 dev eth0", Net::address(number)))?;
        // Usable at once: nobody else has it.
        host.ip(&format!(
            "address add {}/64 dev eth0 nodad",
            Net::address6(number)
        ))
    }

    pub fn address(host: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, u8::try_from(host).unwrap() + 1)
    }

    pub fn address6(host: usize) -> Ipv6Addr {
        let last = u16::try_from(host).unwrap() + 1;
        Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, last)
    }

    /// Does something on a host: sockets that it makes and processes that it starts are that host's for good.
    pub fn on<T: Send>(&self, host: usize, what: impl FnOnce() -> T + Send) -> T {
        self.hosts[host].within(what)
    }

    /// From now on nothing leaves the host and nothing reaches it. Its link stays up and nothing is answered in its stead.
    pub fn cut(&self, host: usize) {
        self.set(host, "nomaster");
    }

    /// Undoes a cut.
    pub fn heal(&self, host: usize) {
        self.set(host, &format!("master {BRIDGE}"));
    }

    fn set(&self, host: usize, to: &str) {
        let port = port(host);
        self.switch.ip(&format!("link set {port} {to}")).unwrap();
    }
}

/// The first of so many ports in a row, free a moment ago and not given to anybody else here.
pub fn free_ports(count: u16) -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..PORTS / u32::from(PORTS_IN_A_ROW_MAX) {
        let number = NEXT.fetch_add(1, Ordering::Relaxed) + std::process::id().wrapping_mul(31);
        let row = number % (PORTS / u32::from(PORTS_IN_A_ROW_MAX));
        let first = PORTS_FIRST + u16::try_from(row).unwrap() * PORTS_IN_A_ROW_MAX;
        let mut ports = first..first + count;
        if ports.all(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()) {
            return first;
        }
    }
    panic!("no ports are free");
}

/// The TCP ports on which somebody listens, on the host where this is called.
pub fn listening() -> BTreeSet<u16> {
    const LISTENS: &str = "0A";
    let tables = ["tcp", "tcp6"].map(|table| {
        let path = format!("/proc/thread-self/net/{table}");
        std::fs::read_to_string(path).unwrap_or_default()
    });
    let port = |line: &str| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (local, state) = (fields.next()?, fields.nth(1)?);
        let (_, port) = local.rsplit_once(':')?;
        (state == LISTENS).then(|| u16::from_str_radix(port, 16).ok())?
    };
    tables
        .iter()
        .flat_map(|table| table.lines())
        .filter_map(port)
        .collect()
}

/// A host's port on the switch.
fn port(host: usize) -> String {
    format!("port{host}")
}

impl Namespace {
    fn new() -> Result<Namespace, String> {
        let making = || -> std::io::Result<File> {
            unshare(CloneFlags::CLONE_NEWNET)?;
            File::open("/proc/thread-self/ns/net")
        };
        // The thread that made it ends in it, so that this one stays where it is.
        let made = std::thread::spawn(making).join().unwrap();
        made.map(Namespace)
            .map_err(|error| format!("a network namespace can't be made: {error}"))
    }

    /// Where other processes of this user find it.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    fn within<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        let entered = || {
            setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
            what()
        };
        let ended = std::thread::scope(|scope| scope.spawn(entered).join());
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// `ip` with these words.
    fn ip(&self, words: &str) -> Result<(), String> {
        let ran = self.within(|| {
            let mut command = Command::new("ip");
            let words = words.split(' ');
            command.args(words).stdin(Stdio::null()).output()
        });
        match ran {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                Err(format!("`ip {words}`: {}", said.trim()))
            }
            Err(error) => Err(format!("`ip` can't be started: {error}")),
        }
    }
}
