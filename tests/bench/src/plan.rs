//! What is measured, in which order, and how the figures come about.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::children::{self, Running};
use crate::load::Outcome;
use crate::proxies::{Kind, Target, load_arguments};
use crate::table::Samples;

/// Bytes of the request bodies.
const BODIES_BYTES: [(usize, &str); 3] = [(1_000, "1 KB"), (8_000, "8 KB"), (100_000, "100 KB")];
const CLOSED_CONNECTIONS: usize = 32;
const CLOSED_MS: u64 = 700;
/// Requests a second at which latency is measured: a load that every proxy carries without queueing.
const RATE: u64 = 500;
const RATE_CONNECTIONS: usize = 16;
const RATE_MS: u64 = 2_000;
const STREAMS: usize = 64;
const STREAM_EVENTS: u32 = 64;
const STREAM_MS: u64 = 1_000;
/// Between two events of a paced stream: 64 streams make 12,800 events a second.
const STREAM_GAP_US: u64 = 5_000;
/// For a process to settle before its memory is read.
const SETTLE: Duration = Duration::from_millis(300);
/// A spell with or without swaps, at the fixed rate.
const SWAP_SPELL_MS: u64 = 2_000;
const SWAPS_A_SPELL: u32 = 5;
const RELOADS: u32 = 10;
const RELOAD_EVERY: Duration = Duration::from_millis(400);

#[derive(clap::Args)]
pub struct Options {
    /// Rounds; each figure is the median over them.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Streams that are open at once while memory is measured; 10000 needs as many file descriptors three times over.
    #[arg(long, default_value_t = 1_000)]
    idle_streams: usize,
    /// Streams that are open at once while generations of policies are swapped; like the memory's they want file descriptors.
    #[arg(long, default_value_t = 1_000)]
    in_flight: usize,
    /// Builds of llmgw to measure, as `NAME=PATH`; without any, the workspace's own is built.
    #[arg(long, value_name = "NAME=PATH")]
    llmgw: Vec<String>,
    /// Only these parts.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
}

#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
enum Part {
    Requests,
    Latency,
    Streams,
    Memory,
    Reload,
    Swap,
}

/// Measures everything and prints the table.
pub fn run(options: &Options) -> Result<(), String> {
    let started = Instant::now();
    measure(options).map_err(|error| error.to_string())?;
    say(&format!(
        "done after {:.0} s",
        started.elapsed().as_secs_f64()
    ));
    Ok(())
}

fn measure(options: &Options) -> io::Result<()> {
    raise_file_limit();
    let dir = std::env::temp_dir().join(format!("llmgw-bench-{}", std::process::id()));
    fs::create_dir_all(&dir)?;
    let _remove = RemoveOnDrop(dir.clone());
    let kinds = kinds(options)?;
    let bench = Bench {
        options,
        engines: [children::free_address()?, children::free_address()?],
        dir,
        kinds,
    };
    let _engine = bench.start_engine()?;
    let mut samples = Samples::default();
    if bench.wants(Part::Requests) || bench.wants(Part::Latency) || bench.wants(Part::Streams) {
        bench.rounds(&mut samples)?;
    }
    if bench.wants(Part::Memory) {
        bench.memory(&mut samples)?;
    }
    let names: Vec<String> = bench
        .kinds
        .iter()
        .map(|kind| kind.name().to_string())
        .collect();
    println!("{}", samples.markdown(&names, "nginx"));
    println!(
        "Medians of {} rounds; in brackets the ratio to nginx of the same round. {} CPUs.",
        options.rounds,
        std::thread::available_parallelism().map_or(0, usize::from)
    );
    if bench.wants(Part::Reload) {
        bench.reload()?;
    }
    if bench.wants(Part::Swap) {
        bench.swap()?;
    }
    Ok(())
}

/// The ways that are compared.
fn kinds(options: &Options) -> io::Result<Vec<Kind>> {
    let mut kinds = vec![Kind::Direct];
    if has_nginx() {
        kinds.extend([false, true].map(|access_log| Kind::Nginx { access_log }));
    } else {
        say("no `nginx` on the PATH: it is left out (Debian: apt-get install nginx-light)");
    }
    for given in &options.llmgw {
        let (name, path) = given.split_once('=').unwrap_or(("llmgw", given));
        kinds.push(Kind::Llmgw {
            name: name.to_string(),
            binary: PathBuf::from(path),
        });
    }
    if options.llmgw.is_empty() {
        kinds.push(Kind::Llmgw {
            name: "llmgw".to_string(),
            binary: build()?,
        });
    }
    Ok(kinds)
}

fn has_nginx() -> bool {
    let asked = Command::new("nginx")
        .arg("-v")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    asked.is_ok_and(|status| status.success())
}

/// Builds the gateway as this program was built.
fn build() -> io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let profile = if cfg!(debug_assertions) {
        say("this is a debug build: its figures say nothing; run with --release");
        "dev"
    } else {
        "release"
    };
    say("building llmgw (minutes, the first time)");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let built = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args([
            "build",
            "--profile",
            profile,
            "--package",
            "llmgw",
            "--bin",
            "llmgw",
        ])
        .current_dir(root)
        .stdout(Stdio::null())
        .status()?;
    if !built.success() {
        return Err(io::Error::other("llmgw did not build"));
    }
    Ok(own.with_file_name("llmgw"))
}

/// What all parts need.
struct Bench<'a> {
    options: &'a Options,
    engines: [SocketAddr; 2],
    dir: PathBuf,
    kinds: Vec<Kind>,
}

impl Bench<'_> {
    fn wants(&self, part: Part) -> bool {
        self.options.only.is_empty() || self.options.only.contains(&part)
    }

    fn start_engine(&self) -> io::Result<Running> {
        let mut command = children::part("engine")?;
        for engine in &self.engines {
            command.arg("--listen").arg(engine.to_string());
        }
        let mut engine = Running::start(command.stdout(Stdio::piped()))?;
        engine.wait_ready()?;
        Ok(engine)
    }

    fn rounds(&self, samples: &mut Samples) -> io::Result<()> {
        let targets = self
            .kinds
            .iter()
            .map(|kind| kind.start(&self.engines, &self.dir))
            .collect::<io::Result<Vec<_>>>()?;
        for round in 0..self.options.rounds {
            say(&format!("round {} of {}", round + 1, self.options.rounds));
            // Nobody is always the one who comes after a certain other.
            let mut order: Vec<&Target> = targets.iter().collect();
            order.rotate_left(round as usize % targets.len());
            if self.wants(Part::Requests) {
                for (bytes, label) in BODIES_BYTES {
                    for target in &order {
                        requests(samples, target, bytes, label)?;
                    }
                }
            }
            if self.wants(Part::Latency) {
                latency(samples, &order)?;
            }
            if self.wants(Part::Streams) {
                for target in &order {
                    streams(samples, target, STREAM_GAP_US, "12,800 a second")?;
                }
                for target in &order {
                    streams(samples, target, 0, "as fast as it goes")?;
                }
            }
        }
        Ok(())
    }

    /// On fresh processes, since memory that was used before would hide what a stream takes.
    fn memory(&self, samples: &mut Samples) -> io::Result<()> {
        for (bytes, label) in &BODIES_BYTES[..2] {
            for kind in self.kinds.iter().filter(|kind| **kind != Kind::Direct) {
                say(&format!("memory, {label}: {}", kind.name()));
                let target = kind.start(&self.engines, &self.dir)?;
                let Some(process) = target.measured() else {
                    continue;
                };
                std::thread::sleep(SETTLE);
                let before = process.anonymous_bytes()?;
                let streams = self.options.idle_streams;
                let open = open_streams(&target, streams, *bytes)?;
                std::thread::sleep(SETTLE);
                let taken = process.anonymous_bytes()?.saturating_sub(before);
                drop(open);
                let figure = format!("KiB a stream, {streams} open, {label} prompts");
                samples.add(&figure, kind.name(), taken as f64 / 1024.0 / streams as f64);
            }
        }
        Ok(())
    }

    /// What swaps of generations add to the latency at a fixed rate, with many streams open that began before them. Spells
    /// with swaps and spells without take turns.
    fn swap(&self) -> io::Result<()> {
        let mut arguments = load_arguments("rate", RATE_CONNECTIONS, 1_000, SWAP_SPELL_MS);
        arguments.extend(["--rate".to_string(), RATE.to_string()]);
        let pause = Duration::from_millis(SWAP_SPELL_MS) / (SWAPS_A_SPELL + 1);
        for kind in &self.kinds {
            let target = kind.start(&self.engines, &self.dir)?;
            let Some(policies) = target.policies.clone() else {
                continue;
            };
            say(&format!("swaps: {}", kind.name()));
            let held = self.options.in_flight;
            let streams = open_streams(&target, held, 1_000)?;
            let before = target.policy_generation()?;
            let (mut calm, mut swapped) = (Vec::new(), Vec::new());
            for round in 0..self.options.rounds {
                let (outcome, _) = target.load(&arguments)?;
                check(&target, &outcome)?;
                calm.push(outcome.p99_us);
                let (outcome, _) = std::thread::scope(|scope| {
                    let load = scope.spawn(|| target.load(&arguments));
                    for number in 0..SWAPS_A_SPELL {
                        std::thread::sleep(pause);
                        change_policy(&policies, round * SWAPS_A_SPELL + number)?;
                    }
                    load.join()
                        .map_err(|_| io::Error::other("the load panicked"))?
                })?;
                check(&target, &outcome)?;
                swapped.push(outcome.p99_us);
            }
            let swaps = target.policy_generation()? - before;
            let closed = streams.end()?.failed;
            let added = calm
                .iter()
                .zip(&swapped)
                .map(|(calm, swapped)| swapped - calm);
            println!(
                "{}: {swaps} swaps with {held} streams open, {closed} of them closed, no request failed. p99 at {RATE}/s: {:.0} us \
                 without, {:.0} us with, added {:.0} us (medians of {} rounds).",
                kind.name(),
                median(calm.clone()),
                median(swapped.clone()),
                median(added.collect()),
                self.options.rounds
            );
        }
        Ok(())
    }

    /// Policies that change under full load.
    fn reload(&self) -> io::Result<()> {
        for kind in &self.kinds {
            if !matches!(kind, Kind::Llmgw { .. }) {
                continue;
            }
            let target = kind.start(&self.engines, &self.dir)?;
            let Some(policies) = target.policies.clone() else {
                continue;
            };
            say(&format!("reloads: {}", kind.name()));
            let ms = RELOAD_EVERY.as_millis() as u64 * u64::from(RELOADS + 2);
            let arguments = load_arguments("closed", CLOSED_CONNECTIONS, 1_000, ms);
            let before = target.policy_generation()?;
            let (outcome, _) = std::thread::scope(|scope| {
                let load = scope.spawn(|| target.load(&arguments));
                for serial in 0..RELOADS {
                    std::thread::sleep(RELOAD_EVERY);
                    change_policy(&policies, serial)?;
                }
                load.join()
                    .map_err(|_| io::Error::other("the load panicked"))?
            })?;
            println!(
                "{}: {} policy changes in force under full load: {} requests, {} failed{}.",
                kind.name(),
                target.policy_generation()? - before,
                outcome.requests,
                outcome.failed,
                outcome
                    .first_failure
                    .map_or_else(String::new, |why| format!(" ({why})"))
            );
        }
        Ok(())
    }
}

fn requests(samples: &mut Samples, target: &Target, bytes: usize, label: &str) -> io::Result<()> {
    let arguments = load_arguments("closed", CLOSED_CONNECTIONS, bytes, CLOSED_MS);
    let (outcome, cpu_ns) = target.load(&arguments)?;
    check(target, &outcome)?;
    let name = target.kind.name();
    let answered = outcome.requests as f64;
    samples.add(
        &format!("requests/s, {label}"),
        name,
        answered / outcome.seconds,
    );
    if let Some(cpu_ns) = cpu_ns {
        let each = cpu_ns as f64 / 1e3 / answered;
        samples.add(&format!("CPU us a request, {label}"), name, each);
    }
    Ok(())
}

/// What each proxy adds to the direct way's latency of the same round.
fn latency(samples: &mut Samples, order: &[&Target]) -> io::Result<()> {
    let mut arguments = load_arguments("rate", RATE_CONNECTIONS, 1_000, RATE_MS);
    arguments.extend(["--rate".to_string(), RATE.to_string()]);
    let mut measured = Vec::new();
    for target in order {
        let (outcome, cpu_ns) = target.load(&arguments)?;
        check(target, &outcome)?;
        measured.push((target, outcome, cpu_ns));
    }
    let direct = measured
        .iter()
        .find(|(target, ..)| target.kind == Kind::Direct)
        .map(|(_, outcome, _)| (outcome.p50_us, outcome.p99_us));
    let (p50, p99) = direct.unwrap_or_default();
    for (target, outcome, cpu_ns) in &measured {
        let name = target.kind.name();
        let (own_p50, own_p99) = match target.kind {
            Kind::Direct => (outcome.p50_us, outcome.p99_us),
            _ => (outcome.p50_us - p50, outcome.p99_us - p99),
        };
        samples.add("p50 us at 500/s (proxies: added)", name, own_p50);
        samples.add("p99 us at 500/s (proxies: added)", name, own_p99);
        if let Some(cpu_ns) = cpu_ns {
            let each = *cpu_ns as f64 / 1e3 / outcome.requests as f64;
            samples.add("CPU us a request at 500/s", name, each);
        }
    }
    Ok(())
}

fn streams(samples: &mut Samples, target: &Target, gap_us: u64, label: &str) -> io::Result<()> {
    let mut arguments = load_arguments("stream", STREAMS, 1_000, STREAM_MS);
    arguments.extend(["--events".to_string(), STREAM_EVENTS.to_string()]);
    arguments.extend(["--gap-us".to_string(), gap_us.to_string()]);
    let (outcome, cpu_ns) = target.load(&arguments)?;
    check(target, &outcome)?;
    let name = target.kind.name();
    let events = outcome.events as f64;
    samples.add(
        &format!("chunks/s, 64 streams, {label}"),
        name,
        events / outcome.seconds,
    );
    if let Some(cpu_ns) = cpu_ns {
        let each = cpu_ns as f64 / 1e3 / events;
        samples.add(&format!("CPU us a chunk, {label}"), name, each);
    }
    Ok(())
}

/// A figure of requests that failed would flatter whoever failed them.
fn check(target: &Target, outcome: &Outcome) -> io::Result<()> {
    match &outcome.first_failure {
        None if outcome.requests > 0 => Ok(()),
        None => Err(io::Error::other(format!(
            "{} answered nothing",
            target.kind.name()
        ))),
        Some(why) => Err(io::Error::other(format!(
            "{} failed {} of {} requests: {why}",
            target.kind.name(),
            outcome.failed,
            outcome.requests + outcome.failed
        ))),
    }
}

fn open_streams(target: &Target, streams: usize, body_bytes: usize) -> io::Result<Running> {
    let mut command = children::part("load")?;
    command
        .args(["--address", &target.address.to_string()])
        .args(load_arguments("idle", streams, body_bytes, 0))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut load = Running::start(&mut command)?;
    load.wait_ready()?;
    Ok(load)
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or_default()
}

fn change_policy(dir: &Path, serial: u32) -> io::Result<()> {
    let file = dir.join("admission.lua");
    let text = fs::read_to_string(&file)?;
    let fresh = dir.join("admission.lua.new");
    fs::write(&fresh, format!("-- Change {serial}.\n{text}"))?;
    fs::rename(fresh, file)
}

fn raise_file_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

fn say(text: &str) {
    eprintln!("bench: {text}");
}

struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
