//! Secrets stay where they belong: a fleet over TLS is used well and badly, and then no key, token or private key is in a log, a list of
//! processes, an answer, a page of metrics or a file, but in the places that are named here.
//!
//! SGLang takes its key on the command line only (`docs/guides/secure-a-fleet.md`), so no engine here is one.

mod harness;

use std::fs::{self, File};
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use harness::{Answer, Client, chat};

/// No test waits for longer; none waits for less than what it waits for.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Nothing shorter is looked for: it could be there by chance.
const SECRET_MIN_BYTES: usize = 32;
/// Where the number that is the secret is in the base64 of an ECDSA P-256 key (PKCS#8).
const KEY_CHARACTERS: std::ops::Range<usize> = 48..88;
/// What `ctl` is asked, besides what is asked of one model or replica.
const ASKED: [&str; 6] = [
    "status", "models", "replicas", "policies", "nodes", "snapshot",
];
const PAGES: [&str; 8] = [
    "/metrics",
    "/v1/status",
    "/v1/models",
    "/v1/replicas",
    "/v1/policies",
    "/v1/nodes",
    "/v1/started",
    "/v1/snapshot",
];
/// Where a secret may be: the beginning of its name, and a part of the path. Nowhere else.
const PLACES: [(&str, &str); 7] = [
    ("the authority's key", "/ca/ca-key.pem"),
    ("the server's key", "/server/server-key.pem"),
    ("the key of n1", "/state-n1/tls/agent-key.pem"),
    ("the key of n2", "/n2/agent-key.pem"),
    (
        "the key that was not signed",
        "/state-late/tls/agent-key.pem",
    ),
    // Made by the test, as an operator does.
    ("the token", "/token"),
    // What an agent was told to run, to adopt it after a restart; the directory is its owner's only.
    ("an engine's key", "/shards/"),
];
/// Becomes the fake engine, or fails at once where it is to be broken. The key goes on as it came, in the environment.
const ENGINE: &str = r#"#!/bin/sh
for argument in "$@"; do
  case "$before" in
    --alias) name=$argument ;;
    --host) host=$argument ;;
    --port) port=$argument ;;
  esac
  before=$argument
done
if [ -n "$BROKEN" ]; then echo 'the model is not there' >&2; exit 3; fi
FAKE_ENGINE_API_KEY=$LLAMA_API_KEY exec PROGRAM --kind llamacpp --model "$name" --listen "$host:$port"
"#;

/// A text that must not be seen, and what it is.
struct Secret {
    name: String,
    text: String,
}

/// The processes, all ended when dropped, and their directory.
struct Site {
    dir: PathBuf,
    children: Vec<Child>,
    /// Where clients, operators and agents connect.
    addresses: [SocketAddr; 3],
    admin_token: String,
    tenant_key: String,
    far_key: String,
    secrets: Vec<Secret>,
}

#[test]
fn no_secret_is_seen_where_logs_are_text_for_debugging() {
    asserts_kept("{format: text, level: debug}");
}

#[test]
fn no_secret_is_seen_where_logs_are_json_with_everything() {
    asserts_kept("{format: json, level: trace}");
}

fn asserts_kept(log: &str) {
    let mut site = Site::new(log);
    site.start();
    let said = [site.ask_well_and_badly(), site.configure_badly(log)].concat();
    site.knows_engines();
    let mut shown = said;
    for words in ASKED {
        shown.push(site.ctl(&[words]));
        shown.push(site.ctl(&[words, "--format", "json"]));
    }
    for words in [["explain", "fake"], ["explain", "bad"], ["logs", "fake/0"]] {
        shown.push(site.ctl(&words));
        shown.push(site.ctl(&[words[0], words[1], "--format", "json"]));
    }
    for page in PAGES {
        let (status, text) = site.admin(page);
        assert_eq!(status, 200, "{page}: {text}");
        shown.push(text);
    }
    // It was worth looking: what fails is told, and the log has what was asked of it.
    assert!(
        shown
            .iter()
            .any(|text| text.contains("the model is not there"))
    );
    let level = log
        .rsplit(' ')
        .next()
        .unwrap()
        .trim_end_matches('}')
        .to_uppercase();
    assert!(site.said("server").contains(&level), "{}", site.story());
    for text in &shown {
        site.asserts_absent("an answer", text);
    }
    site.asserts_processes();
    site.asserts_files();
}

/// Random, as `openssl rand -hex` makes them.
fn random() -> String {
    let mut text = String::new();
    for _ in 0..2 {
        text.push_str(
            fs::read_to_string("/proc/sys/kernel/random/uuid")
                .unwrap()
                .trim(),
        );
    }
    text.replace('-', "")
}

fn llmgw() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llmgw"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    for name in [
        "LLMGW_ENROLL_TOKEN",
        "LLMGW_ADMIN_TOKEN",
        "LLMGW_ADMIN",
        "LLMGW_ADMIN_CA",
    ] {
        command.env_remove(name);
    }
    command
}

impl Site {
    /// Certificates, keys and the configuration; nothing runs yet.
    fn new(log: &str) -> Site {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-secrets-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        let mut site = Site {
            dir,
            children: Vec::new(),
            addresses: [SocketAddr::from(([127, 0, 0, 1], 0)); 3],
            admin_token: random(),
            tenant_key: String::new(),
            far_key: random(),
            secrets: Vec::new(),
        };
        site.ran(&["ctl", "cert", "ca", "--out", "ca"]);
        let hosts = ["--host", "127.0.0.1", "--ca", "ca", "--out", "server"];
        site.ran(&[&["ctl", "cert", "server"], &hosts[..]].concat());
        site.ran(&[
            "ctl", "cert", "agent", "--ca", "ca", "--node", "n2", "--out", "n2",
        ]);
        let made = site.ran(&[
            "ctl", "key", "new", "--tenant", "research", "--format", "json",
        ]);
        let made: Value = serde_json::from_slice(&made.stdout).unwrap();
        site.tenant_key = made["key"].as_str().unwrap().to_owned();
        for (name, text) in [
            ("the admin token", site.admin_token.clone()),
            ("a tenant's key", site.tenant_key.clone()),
            ("an endpoint's key", site.far_key.clone()),
        ] {
            site.keep(name, &text);
        }
        for (name, file) in [
            ("the authority's key", "ca/ca-key.pem"),
            ("the server's key", "server/server-key.pem"),
            ("the key of n2", "n2/agent-key.pem"),
        ] {
            site.keep_key(name, file);
        }
        site.configure(&site.good(log, made["hash"].as_str().unwrap()));
        let fake = Path::new(env!("CARGO_BIN_EXE_llmgw")).with_file_name("fake-engine");
        let engine = site.at("engine");
        let script = ENGINE.replace("PROGRAM", fake.to_str().unwrap());
        fs::write(&engine, script).unwrap();
        fs::set_permissions(&engine, PermissionsExt::from_mode(0o755)).unwrap();
        site
    }

    /// The configuration that is right.
    fn good(&self, log: &str, hash: &str) -> String {
        format!(
            "listen: 127.0.0.1:0\nadmin: {{listen: \"127.0.0.1:0\", token: \"${{ADMIN_TOKEN}}\"}}\nstate: state-server\nlog: {log}\n\
             agents: {{heartbeat: 10s, recovery: 0s, listen: \"127.0.0.1:0\", \
             tls: {{cert: server/server.pem, key: server/server-key.pem, ca: ca/ca.pem, ca_key: ca/ca-key.pem}}}}\n\
             tenants:\n  - {{name: research, keys: [\"{hash}\"]}}\n\
             models:\n  - {{name: fake, source: /m.gguf, replicas: 2, profiles: [{{name: cpu, engine: llamacpp, slots: 4}}]}}\n  \
             - {{name: bad, source: /m.gguf, replicas: 1, profiles: [{{name: cpu, engine: llamacpp, slots: 1, env: {{BROKEN: \"1\"}}}}]}}\n  \
             - {{name: far, endpoints: [{{url: \"http://127.0.0.1:9\", engine: openai, api_key: \"${{FAR_KEY}}\"}}]}}\n"
        )
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn configure(&self, text: &str) {
        let new = self.at("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.at("llmgw.yaml")).unwrap();
    }

    fn keep(&mut self, name: &str, text: &str) {
        assert!(text.len() >= SECRET_MIN_BYTES, "{name} is too short");
        self.secrets.push(Secret {
            name: name.to_owned(),
            text: text.to_owned(),
        });
    }

    /// The secret part of a private key's text, in lines as they are in the file and in one.
    fn keep_key(&mut self, name: &str, file: &str) {
        let text = fs::read_to_string(self.at(file)).unwrap();
        let lines = text.lines().filter(|line| !line.starts_with("-----"));
        // What follows is the public key, which certificates hold too.
        let lines: Vec<&str> = lines.take(2).collect();
        let whole = lines.concat();
        for part in [lines[0], lines[1], &whole[KEY_CHARACTERS]] {
            self.keep(name, part);
        }
    }

    /// The key of every engine that runs, from where it was given to it.
    fn knows_engines(&mut self) {
        let prefix = format!("LLMGW_STATE={}/", self.dir.display());
        let mut keys = Vec::new();
        for pid in pids() {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let environment = String::from_utf8_lossy(&environment).into_owned();
            let mut variables = environment.split('\0');
            if variables
                .clone()
                .any(|variable| variable.starts_with(&prefix))
            {
                keys.extend(
                    variables
                        .find_map(|one| one.strip_prefix("LLAMA_API_KEY="))
                        .map(str::to_owned),
                );
            }
        }
        assert!(keys.len() >= 2, "{keys:?}\n{}", self.story());
        for key in keys {
            self.keep("an engine's key", &key);
        }
    }

    // Processes.

    /// Runs `llmgw` in the directory. It has to succeed.
    fn ran(&self, words: &[&str]) -> Output {
        let mut command = llmgw();
        command
            .args(words)
            .current_dir(&self.dir)
            .stdout(Stdio::piped());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        output
    }

    /// The server, n1 that enrols, n2 with copied files, and one that comes too late with the token of n1.
    fn start(&mut self) {
        let mut server = llmgw();
        server
            .args(["server", "--config", "llmgw.yaml"])
            .env("ADMIN_TOKEN", &self.admin_token)
            .env("FAR_KEY", &self.far_key);
        self.spawn(server, "server");
        for (at, mark) in [
            "clients on http://",
            "admin on http://",
            "for agents on https://",
        ]
        .iter()
        .enumerate()
        {
            self.until(mark, |site| site.said("server").contains(mark));
            let said = self.said("server");
            let (_, rest) = said.split_once(mark).unwrap();
            let end = rest
                .find(|c: char| !c.is_ascii_digit() && c != '.' && c != ':')
                .unwrap();
            self.addresses[at] = rest[..end].parse().unwrap();
        }
        let token = self.ctl(&["cert", "token", "--node", "n1", "--format", "json"]);
        let token: Value = serde_json::from_str(&token).unwrap();
        let token = token["token"].as_str().unwrap().to_owned();
        let secret = token.rsplit('.').nth(1).unwrap().to_owned();
        self.keep("the token", &secret);
        let file = self.at("token");
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(file)
            .unwrap();
        file.write_all(token.as_bytes()).unwrap();
        self.start_agent("n1", "n1", "", &["--enroll", "@token"]);
        let tls = "tls: {ca: n2/ca.pem, cert: n2/agent.pem, key: n2/agent-key.pem}\n";
        self.start_agent("n2", "n2", tls, &[]);
        self.until("both replicas serve", |site| {
            let (_, text) = site.admin("/v1/replicas");
            let page: Value = serde_json::from_str(&text).unwrap();
            let rows = page["replicas"].as_array().unwrap();
            rows.iter()
                .filter(|row| row["model"] == "fake" && row["state"] == "ready")
                .count()
                == 2
        });
        self.keep_key("the key of n1", "state-n1/tls/agent-key.pem");
        self.start_agent("late", "n1", "", &["--enroll", "@token"]);
        self.until("the token is refused", |site| {
            site.said("late").contains("used_token")
        });
        self.keep_key(
            "the key that was not signed",
            "state-late/tls/agent-key.pem",
        );
    }

    fn start_agent(&mut self, name: &str, node: &str, tls: &str, words: &[&str]) {
        let engine = self.at("engine");
        let config = format!(
            "{tls}state: state-{name}\nengines: {{llamacpp: {{commands: {{llama-server: {engine:?}}}}}}}\n"
        );
        let file = format!("{name}.yaml");
        fs::write(self.at(&file), config).unwrap();
        let url = format!("https://{}", self.addresses[2]);
        let mut agent = llmgw();
        agent
            .args(["agent", "--config", &file, "--node", node, "--server", &url])
            .args(words);
        self.spawn(agent, name);
    }

    fn spawn(&mut self, mut command: Command, name: &str) {
        let log = File::create(self.at(&format!("{name}.log"))).unwrap();
        let child = command.current_dir(&self.dir).stderr(log).spawn();
        self.children.push(child.unwrap());
    }

    fn said(&self, name: &str) -> String {
        fs::read_to_string(self.at(&format!("{name}.log"))).unwrap_or_default()
    }

    fn story(&self) -> String {
        ["server", "n1", "n2", "late"]
            .map(|name| format!("{name}:\n{}", self.said(name)))
            .join("\n")
    }

    fn until(&self, what: &str, holds: impl Fn(&Site) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(self) {
            assert!(
                Instant::now() < deadline,
                "in vain: {what}\n{}",
                self.story()
            );
            std::thread::sleep(LOOK_EVERY);
        }
    }

    // What is asked.

    /// What `llmgw ctl` prints on both outputs.
    fn ctl(&self, words: &[&str]) -> String {
        self.ctl_as(&self.admin_token, words)
    }

    fn ctl_as(&self, token: &str, words: &[&str]) -> String {
        let admin = format!("http://{}", self.addresses[1]);
        let output = llmgw()
            .args(["ctl", "--admin", &admin])
            .args(words)
            .env("LLMGW_ADMIN_TOKEN", token)
            .stdout(Stdio::piped())
            .output()
            .unwrap();
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    }

    fn admin(&self, path: &str) -> (u16, String) {
        let key = format!("Bearer {}", self.admin_token);
        let answer = ask(self.addresses[1], "GET", path, ("authorization", &key), "");
        (answer.status(), answer.text())
    }

    /// Requests that are answered and requests that are refused; all that was said to them, and every wrong secret is one from now on.
    fn ask_well_and_badly(&mut self) -> Vec<String> {
        let clients = self.addresses[0];
        let good = format!("Bearer {}", self.tenant_key);
        let (wrong_key, wrong_token) = (random(), random());
        self.keep("a wrong key", &wrong_key);
        self.keep("a wrong token", &wrong_token);
        let bad = format!("Bearer {wrong_key}");
        let path = "/v1/chat/completions";
        let far = chat(false).replace("fake", "far");
        let unknown = chat(false).replace("fake", "unknown");
        let failing = chat(false).replace("fake", "bad");
        let mut said = Vec::new();
        let asked: [(u16, (&str, &str), String); 6] = [
            (200, ("authorization", &good), chat(false)),
            (200, ("x-api-key", &self.tenant_key), chat(true)),
            (401, ("authorization", &bad), chat(false)),
            (401, ("x-api-key", &wrong_key), chat(true)),
            (404, ("authorization", &good), unknown),
            (400, ("authorization", &good), "{".to_owned()),
        ];
        for (status, header, body) in asked {
            let answer = ask(clients, "POST", path, header, &body);
            assert_eq!(answer.status(), status, "{}", answer.text());
            said.push(answer.text());
        }
        for body in [far, failing] {
            let answer = ask(clients, "POST", path, ("authorization", &good), &body);
            assert!(answer.status() >= 500, "{}", answer.text());
            said.push(answer.text());
        }
        let refused = self.ctl_as(&wrong_token, &["status"]);
        assert!(refused.contains("admin token"), "{refused}");
        let bearer = format!("Bearer {wrong_token}");
        let page = ask(
            self.addresses[1],
            "GET",
            "/v1/status",
            ("authorization", &bearer),
            "",
        );
        assert_eq!(page.status(), 401);
        said.extend([refused, page.text()]);
        said
    }

    /// Configurations that hold secrets and are wrong, each of them refused; what was said of them.
    fn configure_badly(&mut self, log: &str) -> Vec<String> {
        let good = fs::read_to_string(self.at("llmgw.yaml")).unwrap();
        let mut said = Vec::new();
        for (number, wrong) in [
            "admin: {listen: 127.0.0.1:0, token: SECRET, bogus: 1}\nmodels: []\n",
            "admin: {listen: 127.0.0.1:0, token: [SECRET]}\nmodels: []\n",
            "tenants:\n  - {name: t, keys: [SECRET]}\nmodels: []\n",
            "tenants:\n  - name: t\n    keys:\n      - SECRET\nmodels: []\n",
            "models: [{name: a, endpoints: [{url: \"http://h:1\", api_key: SECRET, slots: x}]}]\n",
            "models: [{name: a, endpoints: [{url: \"http://me:SECRET@h:1\", slots: x}]}]\n",
            "models:\n  - name: a\n    profiles: [{name: p, engine: vllm, env: {HF_TOKEN: SECRET}, gpu: 7}]\n",
            "admin: {listen: 127.0.0.1:0, token: SECRET\nmodels: []\n",
        ]
        .iter()
        .enumerate()
        {
            let secret = random();
            self.keep(&format!("what the wrong configuration {number} holds"), &secret);
            self.configure(&wrong.replace("SECRET", &secret));
            let told = self.ctl(&["reload"]);
            assert!(told.contains("llmgw.yaml"), "{wrong}: {told}");
            said.extend([told, self.ctl(&["status"]), self.admin("/v1/status").1]);
        }
        self.configure(&good);
        let told = self.ctl(&["reload"]);
        said.push(told);
        assert!(good.contains(log));
        said
    }

    // What must hold.

    fn asserts_absent(&self, place: &str, text: &str) {
        for secret in &self.secrets {
            assert!(
                !text.contains(&secret.text),
                "{} is in {place}:\n{text}",
                secret.name
            );
        }
    }

    /// Nobody's command line shows one, on this whole machine.
    fn asserts_processes(&self) {
        for pid in pids() {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            self.asserts_absent(&format!("the command line of {pid}"), &line);
        }
    }

    /// Logs, states and all else: each secret is in its places only, and those are read by their owner only.
    fn asserts_files(&self) {
        let mut directories = vec![self.dir.clone()];
        let mut count = 0;
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let Ok(bytes) = fs::read(&path) else { continue };
                count += 1;
                self.asserts_file(&path, &String::from_utf8_lossy(&bytes));
            }
        }
        assert!(count > 20, "{count} files");
    }

    fn asserts_file(&self, path: &Path, text: &str) {
        let shown = path.display().to_string();
        for secret in self
            .secrets
            .iter()
            .filter(|secret| text.contains(&secret.text))
        {
            let is_its = PLACES
                .iter()
                .any(|(name, part)| secret.name == *name && shown.contains(part));
            assert!(is_its, "{} is in {shown}", secret.name);
            let holders = path.ancestors().take_while(|holder| *holder != self.dir);
            let closed = holders.into_iter().any(|holder| {
                let mode = fs::metadata(holder).unwrap().permissions().mode();
                mode & 0o077 == 0
            });
            assert!(
                closed,
                "{shown}, which holds {}, can be read by others",
                secret.name
            );
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        // Engines outlive their agents.
        let prefix = format!("LLMGW_STATE={}/", self.dir.display());
        for pid in pids() {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            if environment
                .split(|byte| *byte == 0)
                .any(|one| one.starts_with(prefix.as_bytes()))
            {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn ask(address: SocketAddr, method: &str, path: &str, header: (&str, &str), body: &str) -> Answer {
    let mut client = Client::new(address);
    let headers = [("content-type", "application/json"), header];
    client.request(method, path, &headers, body.as_bytes());
    client.answer()
}
