//! A real `llmgw server` over fake engines, and a client that sees every byte of what it answers.
//!
//! [`Setup`] writes a configuration and starts the binary; [`Gateway`] is the process, asked through its admin address;
//! [`Client`] is one connection of a client. Everything waits with a limit, nothing sleeps and hopes.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code, unused_imports)]

pub mod ask;
mod client;
mod held_up;

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use fake_engine::Patience;
use serde_json::Value;

pub use client::{Answer, Client, End, Head, chat, data};
pub use held_up::unless_held_up;

/// How long anything that must happen may take, on a machine that is slow: only a test that fails waits for it. See [`Patience`] for one
/// that stands still.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How long a client's departure may take to reach an engine: long for a machine that is slow, short of the 60 s and more that engines here
/// would go on for.
pub const CANCEL_MAX: Duration = Duration::from_secs(30);
/// Between two looks at the admin address.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A configuration in the making.
#[derive(Default)]
pub struct Setup {
    top: String,
    limits: String,
    models: String,
    files: Vec<(String, String)>,
    arguments: Vec<String>,
    open_files: Option<u32>,
}

/// A running server, killed when dropped; its directory goes with it.
pub struct Gateway {
    child: Child,
    /// Where clients connect.
    pub addr: SocketAddr,
    /// Where operators do.
    pub admin: SocketAddr,
    /// Holds `llmgw.yaml`, and `policies/` if [`Setup::file`] put something there.
    pub dir: PathBuf,
    log: Arc<Log>,
}

/// What the server wrote to its standard error, as it comes.
#[derive(Default)]
struct Log {
    text: Mutex<String>,
    grew: Condvar,
}

// === impl Setup ===

impl Setup {
    pub fn new() -> Setup {
        Setup::default()
    }

    /// Adds top-level YAML, whole lines.
    pub fn top(mut self, yaml: &str) -> Setup {
        let _ = writeln!(self.top, "{yaml}");
        self
    }

    /// `limits.NAME: VALUE`
    pub fn limit(mut self, name: &str, value: &str) -> Setup {
        let _ = writeln!(self.limits, "  {name}: {value}");
        self
    }

    /// Begins a model; `more` are further keys such as `aliases: [a, b]`, or nothing.
    pub fn model(mut self, name: &str, more: &str) -> Setup {
        let more = match more {
            "" => String::new(),
            more => format!("    {more}\n"),
        };
        let _ = write!(self.models, "  - name: {name}\n{more}    endpoints:\n");
        self
    }

    /// Adds an endpoint to the model begun last; `more` are further keys such as `slots: 1`, or nothing.
    pub fn endpoint(mut self, engine: &str, url: &str, more: &str) -> Setup {
        let comma = if more.is_empty() { "" } else { ", " };
        let _ = writeln!(
            self.models,
            "      - {{url: \"{url}\", engine: {engine}{comma}{more}}}"
        );
        self
    }

    /// A file beside `llmgw.yaml`, which can name it by its relative path.
    pub fn file(mut self, path: &str, contents: &str) -> Setup {
        self.files.push((path.to_owned(), contents.to_owned()));
        self
    }

    /// An argument of `llmgw server`.
    pub fn argument(mut self, argument: &str) -> Setup {
        self.arguments.push(argument.to_owned());
        self
    }

    /// The server may have no more files open than this.
    pub fn open_files(mut self, limit: u32) -> Setup {
        self.open_files = Some(limit);
        self
    }

    /// The configuration's text.
    pub fn yaml(&self) -> String {
        let limits = match self.limits.as_str() {
            "" => String::new(),
            limits => format!("limits:\n{limits}"),
        };
        // They may be given in full, with TLS or a token.
        let given = |key: &str| self.top.lines().any(|line| line.starts_with(key));
        let listen = match given("listen:") {
            true => "",
            false => "listen: 127.0.0.1:0\n",
        };
        let admin = match given("admin:") {
            true => "",
            false => "admin: 127.0.0.1:0\n",
        };
        let (top, models) = (&self.top, &self.models);
        format!("{listen}{admin}state: state\n{top}{limits}models:\n{models}")
    }

    /// Starts the server and waits until it listens.
    pub fn start(self) -> Gateway {
        self.launch(|config| write(config, &self.yaml())).serving()
    }

    /// Starts the server over what is laid where its configuration is to be, and does not wait for it.
    pub fn launch(&self, lay: impl FnOnce(&Path)) -> Gateway {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("llmgw-test-{}-{number}", std::process::id()));
        for (path, contents) in &self.files {
            write(&dir.join(path), contents);
        }
        std::fs::create_dir_all(&dir).unwrap();
        lay(&dir.join("llmgw.yaml"));
        let llmgw = env!("CARGO_BIN_EXE_llmgw");
        let mut command = match self.open_files {
            None => Command::new(llmgw),
            Some(limit) => {
                let script = format!("ulimit -n {limit} && exec \"$0\" \"$@\"");
                let mut shell = Command::new("sh");
                shell.args(["-c", &script, llmgw]);
                shell
            }
        };
        let mut child = command
            .arg("server")
            .arg("--config")
            .arg(dir.join("llmgw.yaml"))
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Log::default());
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let keep = log.clone();
        std::thread::spawn(move || keep.follow(stderr));
        // From here on Drop cleans up, whatever panics.
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let (addr, admin) = (nowhere, nowhere);
        Gateway {
            child,
            addr,
            admin,
            dir,
            log,
        }
    }
}

/// For its owner alone, since it may be a private key.
fn write(path: &Path, contents: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(path).unwrap();
    file.write_all(contents.as_bytes()).unwrap();
}

/// The address of the URL that follows `mark`.
fn address_after(line: &str, mark: &str) -> SocketAddr {
    let url = line.split_once(mark).unwrap().1;
    let address = url.split_once("://").unwrap().1;
    let end = address
        .find(|c: char| !(c.is_ascii_digit() || c == '.' || c == ':'))
        .unwrap_or(address.len());
    address[..end].parse().unwrap()
}

// === impl Gateway ===

impl Gateway {
    /// A server over these engines of one kind, serving the model `fake`, ready.
    pub fn over(engine: &str, engines: &[&fake_engine::Running]) -> Gateway {
        let mut setup = Setup::new().model("fake", "");
        for running in engines {
            setup = setup.endpoint(engine, &running.url(), "");
        }
        let gateway = setup.start();
        gateway.ready("fake", engines.len());
        gateway
    }

    /// Waits until the server listens.
    pub fn serving(mut self) -> Gateway {
        let line = self.await_log("serving clients on ");
        self.addr = address_after(&line, "clients on ");
        self.admin = address_after(&line, "admin on ");
        self
    }

    /// A new connection.
    pub fn client(&self) -> Client {
        Client::new(self.addr)
    }

    /// One GET on a connection of its own.
    pub fn get(&self, path: &str) -> Answer {
        let mut client = self.client();
        client.request("GET", path, &[], b"");
        client.answer()
    }

    /// One POST of JSON on a connection of its own; `fake` are directives for the engine, or nothing.
    pub fn post(&self, path: &str, body: &str, fake: &str) -> Answer {
        let mut client = self.client();
        client.post(path, body, fake);
        client.answer()
    }

    /// One GET of the admin address.
    pub fn admin_get(&self, path: &str) -> Answer {
        let mut client = Client::new(self.admin);
        client.request("GET", path, &[], b"");
        client.answer()
    }

    /// One empty POST to the admin address.
    pub fn admin_post(&self, path: &str) -> Answer {
        let mut client = Client::new(self.admin);
        client.request("POST", path, &[], b"");
        client.answer()
    }

    /// Every replica as the admin address shows it: `model`, `id`, `state`, `inflight`, `queued`, `breaker`, …
    pub fn replicas(&self) -> Vec<Value> {
        let mut page = self.admin_get("/v1/replicas").json();
        page["replicas"].as_array_mut().map(std::mem::take).unwrap()
    }

    /// Waits until so many replicas of a model take requests.
    pub fn ready(&self, model: &str, count: usize) {
        self.until(&format!("{count} replicas of `{model}` are ready"), || {
            let ready = |row: &&Value| row["model"] == model && row["state"] == "ready";
            self.replicas().iter().filter(ready).count() == count
        });
    }

    /// Waits until nothing is counted as at work or queued: on any replica, in any band, of any tenant, or in all.
    pub fn counters_are_zero(&self) {
        self.until("all counters are zero", || {
            let idle = |row: &Value| row["inflight"] == 0 && row["queued"] == 0;
            let status = self.admin_get("/v1/status").json();
            let bands = status["models"].as_array().unwrap().iter();
            let bands = bands.flat_map(|model| model["bands"].as_array().unwrap());
            let tenants = status["tenants"].as_array().unwrap().iter();
            // The gauge falls with a request's record, which is written last.
            let all_idle = self.replicas().iter().all(idle) && bands.chain(tenants).all(idle);
            all_idle && self.metric("llmgw_inflight_requests", "") == 0.0
        });
    }

    /// Waits until so many requests wait for a slot of any replica.
    pub fn queued(&self, count: u64) {
        self.until(&format!("{count} requests are queued"), || {
            let queued = |row: &Value| row["queued"].as_u64().unwrap();
            self.replicas().iter().map(queued).sum::<u64>() == count
        });
    }

    /// Waits until `holds`.
    ///
    /// # Panics
    /// When it never does, with the server's log.
    pub fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let mut patience = Patience::new(PATIENCE);
        while !holds() {
            assert!(
                !patience.is_over(),
                "not within {PATIENCE:?}: {what}\n{:#?}\n{}",
                self.replicas(),
                self.log()
            );
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// The sum over all series of a metric whose labels contain `label`; 0 where there is none.
    pub fn metric(&self, name: &str, label: &str) -> f64 {
        let page = self.admin_get("/metrics").text();
        let series = page.lines().filter(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(['{', ' ']) && rest.contains(label))
        });
        series
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
            .sum()
    }

    /// What the server has logged so far.
    pub fn log(&self) -> String {
        self.log.lock().clone()
    }

    /// Waits for a line of the log that contains this; that line.
    pub fn await_log(&self, wanted: &str) -> String {
        let mut patience = Patience::new(PATIENCE);
        let mut text = self.log.lock();
        loop {
            if let Some(line) = text.lines().find(|line| line.contains(wanted)) {
                return line.to_owned();
            }
            let is_over = patience.is_over();
            assert!(!is_over, "no `{wanted}` in the log:\n{}", *text);
            let woken = self.log.grew.wait_timeout(text, LOOK_EVERY);
            text = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Replaces the configuration's text; the server notices by itself, or by `POST /v1/reload`.
    pub fn write_config(&self, yaml: &str) {
        write(&self.dir.join("llmgw.yaml"), yaml);
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Memory that the process holds, in KiB.
    pub fn rss_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let value = line.unwrap().split_whitespace().nth(1).unwrap();
        value.parse().unwrap()
    }

    /// SIGTERM, without waiting.
    pub fn terminate(&self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    }

    /// Waits for the process's end; `None`: it still runs.
    pub fn exited(&mut self, within: Duration) -> Option<ExitStatus> {
        let mut patience = Patience::new(within);
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => return Some(status),
                None if patience.is_over() => return None,
                None => std::thread::sleep(LOOK_EVERY),
            }
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Log {
    fn follow(&self, lines: impl BufRead) {
        for line in lines.split(b'\n').map_while(Result::ok) {
            let _ = writeln!(self.lock(), "{}", String::from_utf8_lossy(&line));
            self.grew.notify_all();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, String> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
