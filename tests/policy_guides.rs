//! The guides for one machine, executed as `harness/guide.rs` says.
//!
//! A command that ends in `&` runs until the guide's end. Ages, times, counts of failed calls and all numbers of `policy bench` differ from
//! run to run and are not compared.

#[path = "harness/guide.rs"]
mod guide;
#[path = "harness/net.rs"]
mod net;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guide::{LLAMA_SERVER, Place, of_the_machine};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long the server may take to do what a guide says it does.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The addresses that guides use; the tests put free ones in their place.
const CLIENTS: &str = "127.0.0.1:8080";
const ADMIN: &str = "127.0.0.1:8081";
const AGENTS: &str = "127.0.0.1:8443";
/// As long as a port that the system chooses, so that columns are as wide.
const ENGINE: &str = "127.0.0.1:30001";

/// A guide being followed, in a directory of its own.
struct Reader {
    dir: PathBuf,
    /// What the guide says, and what it is here.
    addresses: Vec<(&'static str, String)>,
    /// Servers and agents.
    children: Vec<Child>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        // Engines outlive their agents.
        for pid in engines_below(&self.dir) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn the_guide_to_write_a_policy_is_true() {
    follow("write-a-policy", None);
}

#[test]
fn the_guide_to_add_an_engine_is_true() {
    let engine = corvid();
    follow("add-an-engine", Some(engine));
}

#[test]
fn the_guide_to_operate_is_true() {
    follow("operate", None);
}

/// The processes whose environment names an agent's state below this directory.
fn engines_below(dir: &Path) -> Vec<i32> {
    let state = format!("LLMGW_STATE={}/", dir.display());
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &i32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        variables.any(|variable| variable.starts_with(state.as_bytes()))
    })
    .collect()
}

/// Puts the fake llama.cpp into the guide's directory.
fn llama_server(dir: &Path) -> String {
    let fake = Path::new(env!("CARGO_BIN_EXE_llmgw")).with_file_name("fake-engine");
    let file = dir.join("llama-server");
    std::fs::write(&file, guide::llama_server(&fake)).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
    file.to_str().unwrap().to_owned()
}

fn follow(name: &str, engine: Option<SocketAddr>) {
    let dir = std::env::temp_dir().join(format!("llmgw-guide-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let mut addresses = vec![
        (CLIENTS, free_address()),
        (ADMIN, free_address()),
        (AGENTS, free_address()),
        (LLAMA_SERVER, llama_server(&dir)),
    ];
    addresses.extend(engine.map(|engine| (ENGINE, engine.to_string())));
    let mut reader = Reader {
        dir,
        addresses,
        children: Vec::new(),
    };
    guide::follow(name, &mut reader);
}

/// An address that was free a moment ago.
fn free_address() -> String {
    format!("127.0.0.1:{}", net::free_ports(1))
}

impl Place for Reader {
    fn write(&mut self, path: &str, text: &str) {
        let path = self.dir.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, self.here(text)).unwrap();
    }

    /// Runs a command once; one that only looks at the server, until it prints what is expected.
    fn run(
        &mut self,
        _prompt: &str,
        command: &str,
        is_expected: &dyn Fn(&[String]) -> bool,
    ) -> Vec<String> {
        if let Some(command) = command.strip_suffix('&') {
            let mut shell = self.shell(&format!("exec {command} >/dev/null 2>&1"));
            self.children.push(shell.spawn().unwrap());
            return Vec::new();
        }
        if let Some(arguments) = command.strip_prefix("curl -s ") {
            let answer = self.there(&post(&self.here(arguments)));
            return answer.lines().map(str::to_owned).collect();
        }
        let looks = command.starts_with("llmgw ctl") && !command.contains("policies ");
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.shell(command).output().unwrap();
            let text = self.there(&String::from_utf8(output.stdout).unwrap());
            let lines: Vec<String> = text.lines().map(str::to_owned).collect();
            if !looks || is_expected(&lines) || Instant::now() > deadline {
                return lines;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn steady(command: &str, line: &str) -> String {
        steady(command, line)
    }
}

impl Reader {
    fn shell(&self, command: &str) -> Command {
        let binary = Path::new(env!("CARGO_BIN_EXE_llmgw")).parent().unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut shell = Command::new("sh");
        shell
            .arg("-c")
            .arg(format!("exec 2>&1; {}", self.here(command)))
            .env("PATH", format!("{}:{path}", binary.display()))
            .env("LLMGW_ADMIN", self.here(&format!("http://{ADMIN}")))
            .env_remove("LLMGW_UPDATE_DOCS")
            .current_dir(&self.dir)
            .stdin(Stdio::null());
        shell
    }

    fn here(&self, text: &str) -> String {
        let replace = |text: String, (there, here): &(&str, String)| text.replace(there, here);
        self.addresses.iter().fold(text.to_owned(), replace)
    }

    fn there(&self, text: &str) -> String {
        let replace = |text: String, (there, here): &(&str, String)| text.replace(here, there);
        self.addresses.iter().fold(text.to_owned(), replace)
    }
}

/// What `curl -s http://ADDRESS/PATH -d 'BODY'` prints: not every machine that runs tests has one.
fn post(arguments: &str) -> String {
    let (url, body) = arguments.split_once(" -d ").unwrap();
    let (address, path) = url
        .strip_prefix("http://")
        .unwrap()
        .split_once('/')
        .unwrap();
    let body = body.trim_matches('\'');
    let length = body.len();
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "POST /{path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split_once("\r\n\r\n").unwrap().1.to_owned()
}

/// A line without what differs from run to run.
fn steady(command: &str, line: &str) -> String {
    if command.contains("policy bench") {
        let words = line.split_whitespace().map(|word| match word {
            "ns" | "us" | "ms" => "time",
            word if word.starts_with(|c: char| c.is_ascii_digit()) => "number",
            word => word,
        });
        return words.collect::<Vec<_>>().join(" ");
    }
    let words: Vec<&str> = line.split_whitespace().collect();
    let shows_nodes = ["llmgw ctl nodes", "llmgw ctl replicas", "llmgw ctl logs"];
    if shows_nodes.iter().any(|start| command.starts_with(start)) {
        return words
            .into_iter()
            .map(of_the_machine)
            .collect::<Vec<_>>()
            .join(" ");
    }
    match words[..] {
        ["llmgw", version, "up", _] => format!("llmgw {version} up"),
        // A row of `hooks that fell back` ends with how often.
        [hook, kind, _] if hook.contains('.') => format!("{hook} {kind}"),
        // How long a run of tests took.
        ["#", .., "in", _, "s"] => words[..words.len() - 2].join(" "),
        [.., _, "ago"] => words[..words.len() - 2].join(" "),
        _ => line.to_owned(),
    }
}

/// The engine of the guide: an OpenAI server with paths, metric names and errors of its own. It ends with the tests.
fn corvid() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || answer(stream));
        }
    });
    address
}

/// Answers requests on one connection until it ends.
fn answer(stream: TcpStream) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    loop {
        let (mut request, mut length) = (String::new(), 0);
        reader
            .read_line(&mut request)
            .ok()
            .filter(|read| *read > 0)?;
        loop {
            let mut header = String::new();
            reader
                .read_line(&mut header)
                .ok()
                .filter(|read| *read > 0)?;
            if header.trim().is_empty() {
                break;
            }
            if let Some((name, value)) = header.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().ok()?;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        let body = String::from_utf8_lossy(&body);
        let (status, kind, text) = match request.split(' ').nth(1)? {
            "/livez" => ("200 OK", "text/plain", "alive\n"),
            "/v1/models" => (
                "200 OK",
                "application/json",
                r#"{"object":"list","data":[{"id":"raven-7b","object":"model"}]}"#,
            ),
            "/stats" => (
                "200 OK",
                "text/plain",
                "corvid_active_requests 3\ncorvid_backlog 1\ncorvid_cache_percent 42\n",
            ),
            "/v1/chat/completions" if body.contains("too long") => (
                "500 Internal Server Error",
                "application/json",
                r#"{"fault":"prompt_length","detail":"the prompt has 9000 tokens, 8192 is the limit"}"#,
            ),
            "/v1/chat/completions" => (
                "200 OK",
                "application/json",
                r#"{"id":"1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"Caw."},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}"#,
            ),
            _ => ("404 Not Found", "text/plain", "no such path\n"),
        };
        let length = text.len();
        write!(
            stream,
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n{text}"
        )
        .ok()?;
    }
}
