//! An authority, a server with TLS and agents that enrol with it, as processes.

use std::fs::{self, File};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fake_engine::Patience;
use serde_json::Value;

use super::harness::Client;

/// No test waits for longer; none waits for less than what it waits for.
const PATIENCE: Duration = Duration::from_secs(90);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// An authority, a server with TLS, and the agents of one test. All ended when dropped, and their directory removed.
pub struct Site {
    dir: PathBuf,
    server: Option<Child>,
    pub agents: Vec<Child>,
    /// Where clients, operators and agents connect. They stay the same when the server is started again.
    pub addresses: [SocketAddr; 3],
}

impl Site {
    /// The authority's key is on the server, unless `signs` is not set.
    pub fn new(signs: bool) -> Site {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("llmgw-site-{}-{number}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut site = Site {
            dir,
            server: None,
            agents: Vec::new(),
            addresses: [SocketAddr::from(([127, 0, 0, 1], 0)); 3],
        };
        site.cert(&["ca", "--out", &site.at("ca")]);
        let hosts = ["server", "--host", "127.0.0.1", "--host", "localhost"];
        site.cert(
            &[
                &hosts[..],
                &["--ca", &site.at("ca"), "--out", &site.at("tls")],
            ]
            .concat(),
        );
        site.configure(signs);
        site.start_server();
        site
    }

    pub fn configure(&self, signs: bool) {
        let key = match signs {
            true => ", ca_key: ca/ca-key.pem",
            false => "",
        };
        let text = format!(
            "state: server\nagents: {{heartbeat: 10s, recovery: 0s, \
             tls: {{cert: tls/server.pem, key: tls/server-key.pem, ca: ca/ca.pem{key}}}}}\nmodels: []\n"
        );
        fs::write(self.dir.join("llmgw.yaml"), text).unwrap();
    }

    pub fn at(&self, name: &str) -> String {
        self.dir.join(name).to_str().unwrap().to_owned()
    }

    /// `llmgw ctl cert` with these words, which has to succeed.
    pub fn cert(&self, words: &[&str]) {
        let done = llmgw().args(["ctl", "cert"]).args(words).output().unwrap();
        assert!(done.status.success(), "{words:?}: {done:?}");
    }

    pub fn start_server(&mut self) {
        let mut command = llmgw();
        command.args(["server", "--config", &self.at("llmgw.yaml")]);
        for (flag, address) in ["--listen", "--admin", "--agents"]
            .iter()
            .zip(self.addresses)
        {
            command.arg(flag).arg(address.to_string());
        }
        self.server = Some(command.stderr(self.log("server")).spawn().unwrap());
        for (at, mark) in ["clients on ", "admin on ", "for agents on "]
            .iter()
            .enumerate()
        {
            self.until(mark, |site| site.said("server").contains(mark));
            self.addresses[at] = address_after(&self.said("server"), mark);
        }
    }

    pub fn kill_server(&mut self) {
        end(&mut self.server.take().unwrap());
    }

    /// Asks for a token with these further words.
    pub fn ask_token(&self, node: &str, words: &[&str]) -> Output {
        let admin = format!("http://{}", self.addresses[1]);
        llmgw()
            .args(["ctl", "--admin", &admin, "cert", "token", "--node", node])
            .args(words)
            .stdout(Stdio::piped())
            .output()
            .unwrap()
    }

    /// `llmgw ctl` with these words, to the server.
    pub fn ctl(&self, words: &[&str]) -> Output {
        let admin = format!("http://{}", self.addresses[1]);
        llmgw()
            .args(["ctl", "--admin", &admin])
            .args(words)
            .output()
            .unwrap()
    }

    pub fn token(&self, node: &str) -> String {
        let made = self.ask_token(node, &[]);
        assert!(made.status.success(), "{made:?}");
        let text = String::from_utf8(made.stdout).unwrap();
        text.trim_end().to_owned()
    }

    /// Writes a token to a file that only its owner reads; `@FILE`.
    pub fn token_file(&self, token: &str) -> String {
        let path = self.at("token");
        let _ = fs::remove_file(&path);
        let mut options = File::options();
        let file = options.write(true).create_new(true).mode(0o600).open(&path);
        file.unwrap().write_all(token.as_bytes()).unwrap();
        format!("@{path}")
    }

    /// An agent of this node, with its log and state under `name`.
    pub fn agent(&self, name: &str, node: &str, server: &str, words: &[&str]) -> Command {
        let mut command = llmgw();
        command
            .args(["agent", "--server", server, "--node", node])
            .args(["--state", &self.at(name)])
            .args(words)
            .stderr(self.log(name));
        command
    }

    pub fn start_agent(&mut self, name: &str, node: &str, server: &str, words: &[&str]) {
        let agent = self.agent(name, node, server, words).spawn().unwrap();
        self.agents.push(agent);
    }

    pub fn kill_agents(&mut self) {
        self.agents.iter_mut().for_each(end);
        self.agents.clear();
    }

    /// Runs an agent that ends by itself: its exit status, and what it said.
    pub fn agent_ends(
        &mut self,
        name: &str,
        node: &str,
        server: &str,
        words: &[&str],
    ) -> (i32, String) {
        self.start_agent(name, node, server, words);
        let mut status = None;
        self.until_mut("the agent ends", |site| {
            status = site.agents[0].try_wait().unwrap();
            status.is_some()
        });
        self.agents.clear();
        (status.unwrap().code().unwrap(), self.said(name))
    }

    pub fn url(&self) -> String {
        format!("https://{}", self.addresses[2])
    }

    /// A new file each time: what an earlier process said is no word of this one.
    pub fn log(&self, name: &str) -> File {
        let log = self.dir.join(format!("{name}.log"));
        let _ = fs::rename(&log, self.dir.join(format!("{name}.log.before")));
        File::create(log).unwrap()
    }

    pub fn said(&self, name: &str) -> String {
        fs::read_to_string(self.dir.join(format!("{name}.log"))).unwrap_or_default()
    }

    pub fn admin(&self, path: &str) -> String {
        let mut client = Client::new(self.addresses[1]);
        client.request("GET", path, &[], b"");
        client.answer().text()
    }

    pub fn ready(&self, node: &str) {
        self.until(&format!("node {node} is ready"), |site| {
            let page: Value = serde_json::from_str(&site.admin("/v1/nodes")).unwrap();
            let mut rows = page["nodes"].as_array().unwrap().iter();
            rows.any(|row| row["id"] == node && row["state"] == "ready")
        });
    }

    pub fn until(&self, what: &str, mut holds: impl FnMut(&Site) -> bool) {
        let mut patience = Patience::new(PATIENCE);
        while !holds(self) {
            assert!(!patience.is_over(), "in vain: {what}\n{}", self.story());
            std::thread::sleep(LOOK_EVERY);
        }
    }

    pub fn until_mut(&mut self, what: &str, mut holds: impl FnMut(&mut Site) -> bool) {
        let mut patience = Patience::new(PATIENCE);
        while !holds(self) {
            assert!(!patience.is_over(), "in vain: {what}\n{}", self.story());
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// What everybody said, for a test that fails.
    pub fn story(&self) -> String {
        let logs = ["server", "n1", "other"].map(|name| format!("{name}:\n{}", self.said(name)));
        logs.join("\n")
    }

    /// Every file of the site but those of the authority and what the test wrote itself, logs included.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut directories = vec![self.dir.clone()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => directories.push(path),
                    false if path.ends_with("token") => {}
                    false => found.push(path),
                }
            }
        }
        found
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.server.iter_mut().chain(&mut self.agents).for_each(end);
        let _ = fs::remove_dir_all(&self.dir);
    }
}

pub fn llmgw() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llmgw"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.env_remove("LLMGW_ENROLL_TOKEN");
    command
}

/// Ends a process as a crash would.
fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// The address of the URL that follows `mark`.
fn address_after(text: &str, mark: &str) -> SocketAddr {
    let (_, rest) = text.split_once(mark).unwrap();
    let (_, address) = rest.split_once("://").unwrap();
    let is_part = |c: char| c.is_ascii_digit() || c == '.' || c == ':';
    let end = address.find(|c| !is_part(c)).unwrap_or(address.len());
    address[..end].trim_end_matches(':').parse().unwrap()
}
