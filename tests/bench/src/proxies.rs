//! What is measured: nothing at all, nginx in two ways, and llmgw with a policy at work.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::children::{self, Running};
use crate::load::Outcome;
use crate::process::Measured;
use crate::prompt;

const READY_TIMEOUT: Duration = Duration::from_secs(20);
/// Requests that go through a proxy before anything is measured.
const WARM_UP_MS: u64 = 300;

/// A way from the load to the engine.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    Direct,
    Nginx {
        access_log: bool,
    },
    /// A build of llmgw, by its name in the table.
    Llmgw {
        name: String,
        binary: PathBuf,
    },
}

/// More than are ever open: what is measured is the way to an engine, not waiting for one.
const SLOTS: u32 = 65_536;

/// One of them, running.
pub struct Target {
    pub kind: Kind,
    pub address: SocketAddr,
    /// Absent for the direct way.
    process: Option<Running>,
    /// Where llmgw reads its policies.
    pub policies: Option<PathBuf>,
}

impl Kind {
    pub fn name(&self) -> &str {
        match self {
            Kind::Direct => "direct",
            Kind::Nginx { access_log: false } => "nginx",
            Kind::Nginx { access_log: true } => "nginx, access log",
            Kind::Llmgw { name, .. } => name,
        }
    }

    pub fn start(&self, engines: &[SocketAddr], dir: &Path) -> io::Result<Target> {
        let dir = dir.join(self.name().replace([' ', ','], "-"));
        fs::create_dir_all(&dir)?;
        let target = match self {
            Kind::Direct => Target {
                kind: self.clone(),
                address: engines[0],
                process: None,
                policies: None,
            },
            Kind::Nginx { access_log } => self.nginx(engines, &dir, *access_log)?,
            Kind::Llmgw { binary, .. } => self.llmgw(engines, &dir, binary)?,
        };
        target.wait_ready()?;
        Ok(target)
    }

    fn nginx(&self, engines: &[SocketAddr], dir: &Path, access_log: bool) -> io::Result<Target> {
        let address = children::free_address()?;
        let config = dir.join("nginx.conf");
        fs::write(&config, nginx_config(engines, address, dir, access_log))?;
        let mut command = Command::new("nginx");
        command
            .arg("-c")
            .arg(&config)
            .arg("-e")
            .arg(dir.join("error.log"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.running(address, command, None)
    }

    fn llmgw(&self, engines: &[SocketAddr], dir: &Path, binary: &Path) -> io::Result<Target> {
        let address = children::free_address()?;
        let admin = children::free_address()?;
        let policies = dir.join("policies");
        write_policies(binary, &policies)?;
        let config = dir.join("llmgw.yaml");
        fs::write(&config, llmgw_config(engines, address, admin, dir))?;
        let mut command = Command::new(binary);
        command
            .arg("server")
            .arg("--config")
            .arg(&config)
            .arg("--policies")
            .arg(&policies)
            .stdin(Stdio::null())
            .stdout(File::create(dir.join("out.log"))?)
            .stderr(File::create(dir.join("err.log"))?);
        self.running(address, command, Some(policies))
    }

    fn running(
        &self,
        address: SocketAddr,
        mut command: Command,
        policies: Option<PathBuf>,
    ) -> io::Result<Target> {
        Ok(Target {
            kind: self.clone(),
            address,
            process: Some(Running::start(&mut command)?),
            policies,
        })
    }
}

impl Target {
    pub fn measured(&self) -> Option<Measured> {
        self.process.as_ref().map(Running::measured)
    }

    /// Sends this target a load, and says what CPU time its proxy took meanwhile.
    pub fn load(&self, arguments: &[String]) -> io::Result<(Outcome, Option<u64>)> {
        let before = self.measured().map(Measured::cpu_ns).transpose()?;
        let mut all = vec!["--address".to_string(), self.address.to_string()];
        all.extend_from_slice(arguments);
        let outcome = children::run_load(&all)?;
        let after = self.measured().map(Measured::cpu_ns).transpose()?;
        let cpu_ns = before
            .zip(after)
            .map(|(before, after)| after.saturating_sub(before));
        Ok((outcome, cpu_ns))
    }

    /// The generation of the policies that answered one request.
    pub fn policy_generation(&self) -> io::Result<u64> {
        const HEADER: &str = "x-llmgw-policy-generation: ";
        let mut stream = TcpStream::connect(self.address)?;
        let request = String::from_utf8_lossy(&prompt::request(1_000, 0, None)).into_owned();
        let request = request.replacen("\r\n", "\r\nx-llmgw-debug: 1\r\nconnection: close\r\n", 1);
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        answer
            .lines()
            .find_map(|line| line.strip_prefix(HEADER)?.parse().ok())
            .ok_or_else(|| io::Error::other(format!("no `{HEADER}` in the answer")))
    }

    /// Waits until requests come back answered.
    fn wait_ready(&self) -> io::Result<()> {
        children::wait_for(self.address)?;
        let started = Instant::now();
        loop {
            let arguments = load_arguments("closed", 4, 1_000, WARM_UP_MS);
            let (outcome, _) = self.load(&arguments)?;
            if outcome.requests > 0 && outcome.failed == 0 {
                return Ok(());
            }
            if started.elapsed() > READY_TIMEOUT {
                let name = self.kind.name();
                let why = outcome.first_failure.unwrap_or_default();
                return Err(io::Error::other(format!(
                    "{name} does not get ready: {why}"
                )));
            }
        }
    }
}

/// The load's command line, less the address.
pub fn load_arguments(mode: &str, connections: usize, body_bytes: usize, ms: u64) -> Vec<String> {
    [
        "--mode",
        mode,
        "--connections",
        &connections.to_string(),
        "--body-bytes",
        &body_bytes.to_string(),
        "--seconds-milli",
        &ms.to_string(),
    ]
    .map(str::to_string)
    .to_vec()
}

/// As one would set it up for engines: kept connections, no temporary files for prompts, no buffered streams
/// (the engine's `X-Accel-Buffering: no` says which answers those are). Started by anybody but root it ignores `user`.
fn nginx_config(
    engines: &[SocketAddr],
    address: SocketAddr,
    dir: &Path,
    access_log: bool,
) -> String {
    let dir = dir.display();
    let log = if access_log {
        format!("access_log {dir}/access.log combined buffer=64k flush=1s;")
    } else {
        "access_log off;".to_string()
    };
    let servers: String = engines
        .iter()
        .map(|engine| format!("server {engine};"))
        .collect();
    format!(
        "user root;
worker_processes 2;
worker_rlimit_nofile 65536;
daemon off;
pid {dir}/nginx.pid;
events {{ worker_connections 32768; }}
http {{
  {log}
  client_body_temp_path {dir}/body;
  proxy_temp_path {dir}/proxy;
  fastcgi_temp_path {dir}/fastcgi;
  uwsgi_temp_path {dir}/uwsgi;
  scgi_temp_path {dir}/scgi;
  client_body_buffer_size 128k;
  client_max_body_size 32m;
  keepalive_requests 1000000000;
  upstream engines {{ {servers} keepalive 256; keepalive_requests 1000000000; }}
  server {{
    listen {address} backlog=4096;
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection \"\";
      proxy_read_timeout 600s;
    }}
  }}
}}
"
    )
}

fn llmgw_config(
    engines: &[SocketAddr],
    address: SocketAddr,
    admin: SocketAddr,
    dir: &Path,
) -> String {
    let endpoints: String = engines
        .iter()
        .map(|engine| {
            format!("      - {{url: \"http://{engine}\", engine: vllm, slots: {SLOTS}}}\n")
        })
        .collect();
    format!(
        "listen: {address}
admin: {admin}
state: {}
models:
  - name: {}
    endpoints:
{endpoints}",
        dir.join("state").display(),
        prompt::MODEL
    )
}

/// The built-in policies with one hook switched on that runs Lua for every request.
fn write_policies(binary: &Path, dir: &Path) -> io::Result<()> {
    // `policy init` keeps what is there; a run that broke off may have left a changed copy.
    let _ = fs::remove_dir_all(dir);
    let done = Command::new(binary)
        .args(["policy", "init"])
        .arg(dir)
        .stdout(Stdio::null())
        .status()?;
    if !done.success() {
        return Err(io::Error::other("`llmgw policy init` failed"));
    }
    let file = dir.join("admission.lua");
    let text = fs::read_to_string(&file)?;
    let switched = text.replace("-- M.classify = classify", "M.classify = classify");
    if switched == text {
        let message = "admission.lua has no `-- M.classify = classify` to switch on";
        return Err(io::Error::other(message));
    }
    fs::write(file, switched)
}
