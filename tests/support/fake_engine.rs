//! The fake engine as a process: `fake-engine --kind vllm --listen 127.0.0.1:0 --model NAME`.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use clap::Parser;
use fake_engine::{Kind, Options, start};
use nix::libc;
use tokio::signal::unix::{SignalKind, signal};

/// A grandchild that nobody killed ends by itself after this many seconds.
const GRANDCHILD_MAX_S: u64 = 600;

/// An OpenAI server that speaks as an inference engine and misbehaves on request.
#[derive(Parser)]
struct Args {
    /// vllm, sglang, llamacpp or openai.
    #[arg(long, default_value = "openai", value_parser = parse_kind)]
    kind: Kind,
    /// Where to listen; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Where /fake/... alone is served, whatever happens to the main address. A second line on stdout says where.
    #[arg(long)]
    control: Option<SocketAddr>,
    /// A served name; the first is the main one.
    #[arg(long, default_value = "fake")]
    model: Vec<String>,
    /// Requests generated at a time; 0 is no limit.
    #[arg(long, default_value_t = 0)]
    slots: usize,
    /// Requests that may wait for a slot.
    #[arg(long)]
    max_queue: Option<usize>,
    /// From start to ready.
    #[arg(long, default_value_t = 0)]
    load_ms: u64,
    /// From slot to first token.
    #[arg(long, default_value_t = 0)]
    prefill_ms: u64,
    /// Between tokens.
    #[arg(long, default_value_t = 0)]
    token_ms: u64,
    /// Tokens of an answer when the request sets no lower limit.
    #[arg(long, default_value_t = 16)]
    tokens: u64,
    /// The key that /v1/... wants.
    #[arg(long, env = "FAKE_ENGINE_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// The engine's own behaviour, as a JSON object.
    #[arg(long, default_value = "{}")]
    behave: String,
    /// Do nothing on SIGTERM.
    #[arg(long)]
    ignore_sigterm: bool,
    /// Leave a process behind, in a session of its own.
    #[arg(long)]
    grandchild: bool,
    /// Serve from a second thread and end the first one: the process looks like a zombie, and goes on.
    #[arg(long)]
    end_first_thread: bool,
    /// Idle connections are closed after this many seconds.
    #[arg(long, default_value_t = 5.0)]
    keepalive_s: f64,
    /// Requests on a connection; 0 is no limit. Default: 100 for llamacpp.
    #[arg(long)]
    keepalive_max: Option<u64>,
    /// Refuse /v1/embeddings as the kind refuses it.
    #[arg(long)]
    no_embeddings: bool,
    /// Threads.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Exit with this code at the end of loading.
    #[arg(long)]
    crash_at_load: Option<i32>,
    /// Be the process that is left behind.
    #[arg(long, hide = true)]
    be_grandchild: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.be_grandchild {
        be_grandchild();
        return ExitCode::SUCCESS;
    }
    if args.end_first_thread {
        end_first_thread(args);
    }
    ExitCode::from(status(&args))
}

/// Serves, and says with which status to exit then.
fn status(args: &Args) -> u8 {
    match run(args) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("fake-engine: {error}");
            1
        }
    }
}

/// Goes on in a second thread; the process ends with that one.
fn end_first_thread(args: Args) -> ! {
    std::thread::spawn(move || std::process::exit(i32::from(status(&args))));
    loop {
        // SAFETY: it ends this thread alone, and nothing on its stack is anybody else's.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

fn run(args: &Args) -> io::Result<()> {
    let mut stdout = io::stdout();
    if args.grandchild {
        let mut left = Command::new(std::env::current_exe()?)
            .arg("--be-grandchild")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        // It says when it has left the session.
        if let Some(mut out) = left.stdout.take() {
            out.read_exact(&mut [0])?;
        }
        writeln!(stdout, "grandchild {}", left.id())?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(serve(args, stdout))
}

/// Serves until SIGTERM or SIGINT, or until the crash.
async fn serve(args: &Args, mut stdout: io::Stdout) -> io::Result<()> {
    // Before the address is told: whoever knows it may send signals.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let engine = start(options(args))?;
    writeln!(stdout, "listening {}", engine.addr())?;
    if let Some(control) = engine.control() {
        writeln!(stdout, "control {control}")?;
    }
    stdout.flush()?;
    let load = tokio::time::sleep(Duration::from_millis(args.load_ms));
    let mut load = std::pin::pin!(load);
    let mut crash_at_load = args.crash_at_load;
    loop {
        tokio::select! {
            _ = terminate.recv() => if !args.ignore_sigterm {
                // At once, as vLLM does by default: streams are cut.
                std::process::exit(0);
            },
            _ = interrupt.recv() => std::process::exit(0),
            () = &mut load, if crash_at_load.is_some() => {
                std::process::exit(crash_at_load.take().unwrap_or(1));
            }
        }
    }
}

fn options(args: &Args) -> Options {
    Options {
        listen: args.listen,
        control: args.control,
        models: args.model.clone(),
        slots: args.slots,
        max_queue: args.max_queue,
        load_ms: args.load_ms,
        prefill_ms: args.prefill_ms,
        token_ms: args.token_ms,
        tokens: args.tokens,
        api_key: args.api_key.clone(),
        behave: args.behave.clone(),
        keepalive_ms: Duration::try_from_secs_f64(args.keepalive_s)
            .map_or(5000, |time| u64::try_from(time.as_millis()).unwrap_or(5000)),
        keepalive_max: args.keepalive_max,
        embeddings: !args.no_embeddings,
        threads: args.threads,
        may_exit: true,
        ..Options::new(args.kind)
    }
}

fn parse_kind(name: &str) -> Result<Kind, String> {
    Kind::parse(name).ok_or_else(|| format!("`{name}` is none of vllm, sglang, llamacpp, openai"))
}

/// Leaves the session, so that killing the group does not reach it, and waits to be killed.
fn be_grandchild() {
    if let Err(error) = nix::unistd::setsid() {
        eprintln!("fake-engine: no session of its own: {error}");
    }
    println!();
    std::thread::sleep(Duration::from_secs(GRANDCHILD_MAX_S));
}
