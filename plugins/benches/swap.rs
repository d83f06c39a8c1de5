//! `cargo bench -p llmgw-plugins --bench swap`: generations swapped under requests in flight, as a table.
//!
//! As many threads as there are CPUs serve. Each request asks `classify` when it begins and `rank` when it ends, both of the set
//! that it began with; between the two it is in flight, and so many are at any moment. Spells with swaps and spells without
//! take turns, so that what else the machine does meanwhile hits both.
//!
//! `-- --in-flight N` (10000; 100000 is the target's), `-- --rounds N` (5; a round is a spell of each kind).
//!
//! Ends with 1 when a request got no answer, or another generation's, or when p99 grew by more than the target allows.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use llmgw_plugins::{Policies, PolicyOptions, PolicySet, ReplicaView, RequestView, TenantView};

/// A spell with or without swaps.
const SPELL: Duration = Duration::from_secs(1);
/// Between two swaps.
const SWAP_EVERY: Duration = Duration::from_millis(200);
/// What swaps may add to p99.
const ADDED_P99_MAX: Duration = Duration::from_millis(5);

/// What runs: the two kinds of spell, and the end.
const CALM: u64 = 0;
const SWAPS: u64 = 1;
const END: u64 = 2;

/// A directory that goes with the program.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A request between its two hooks.
struct InFlight {
    set: Arc<PolicySet>,
    number: u64,
}

/// What one thread saw, in ns.
#[derive(Default)]
struct Seen {
    calm: Vec<u32>,
    swaps: Vec<u32>,
    /// Of `swaps`, the requests that were a thread's first of a generation.
    first: Vec<u32>,
    failed: u64,
}

fn main() -> ExitCode {
    let option = |name: &str, default: usize| {
        let mut args = std::env::args().skip_while(|arg| arg != name).skip(1);
        args.next()
            .map_or(default, |n| n.parse().expect("a number"))
    };
    let (in_flight, rounds) = (option("--in-flight", 10_000), option("--rounds", 5));
    let dir = Directory(std::env::temp_dir().join(format!("llmgw-swap-{}", std::process::id())));
    save(&dir.0, 1);
    let options = PolicyOptions {
        dir: Some(dir.0.clone()),
        state: None,
    };
    let policies = Policies::open(options).expect("the policies load");
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let spell = AtomicU64::new(CALM);
    let (seen, swapped) = std::thread::scope(|scope| {
        let serving: Vec<_> = (0..threads)
            .map(|_| scope.spawn(|| serve(&policies, &spell, in_flight / threads)))
            .collect();
        let swapped = swap(&policies, &dir.0, &spell, rounds);
        let seen = serving.into_iter().map(|thread| thread.join());
        (seen.map(|seen| seen.expect("it serves")).collect(), swapped)
    });
    report(seen, in_flight, swapped, policies.error_counts().len())
}

/// Hooks whose answers say which generation they are.
fn save(dir: &Path, generation: u64) {
    fs::create_dir_all(dir).expect("mkdir");
    let admission = format!(
        "local M = {{ api = 1 }}\nfunction M.classify(request, tenant)\n  if request.band_hint == 'batch' then return 'batch', {generation} end\n  return tenant.band, {generation}\nend\nreturn M\n"
    );
    let routing = "local M = { api = 1 }
function M.rank(request, replicas, n)
  local best, least = 1, math.huge
  for i = 1, n do
    local r = replicas[i]
    local score = (r.prefill_tokens + request.input_tokens) * (r.ms_per_prefill_token or 1) + 500 * (r.kv or 0)
    if score < least then best, least = i, score end
  end
  return best, tostring(llmgw.generation)
end
return M
";
    fs::write(dir.join("admission.lua"), admission).expect("write");
    fs::write(dir.join("routing.lua"), routing).expect("write");
}

/// Spells in turn, and swaps in every second one. Gives the number of swaps.
fn swap(policies: &Policies, dir: &Path, spell: &AtomicU64, rounds: usize) -> u64 {
    let mut generation = 1;
    for _ in 0..rounds {
        std::thread::sleep(SPELL);
        spell.store(SWAPS, Ordering::Relaxed);
        let end = Instant::now() + SPELL;
        while Instant::now() < end {
            generation += 1;
            save(dir, generation);
            let set = policies.reload().expect("it loads");
            assert_eq!(set.generation(), generation);
            std::thread::sleep(SWAP_EVERY);
        }
        spell.store(CALM, Ordering::Relaxed);
    }
    spell.store(END, Ordering::Relaxed);
    generation - 1
}

fn serve(policies: &Policies, spell: &AtomicU64, in_flight: usize) -> Seen {
    let ids: Vec<String> = (0..8).map(|n| format!("llama-3.3-70b/{n}")).collect();
    let mut replicas: Vec<ReplicaView<'_>> = ids
        .iter()
        .map(|id| ReplicaView {
            id,
            node: Some("node-1"),
            ms_per_prefill_token: Some(0.5),
            kv: Some(0.4),
            ..ReplicaView::default()
        })
        .collect();
    let mut seen = Seen::default();
    let mut waiting: VecDeque<InFlight> = VecDeque::with_capacity(in_flight + 1);
    let mut generation = 1;
    for number in 0.. {
        let kind = spell.load(Ordering::Relaxed);
        if kind == END {
            break;
        }
        for (at, replica) in replicas.iter_mut().enumerate() {
            replica.prefill_tokens = (number * 37 + at as u64 * 101) % 4000;
        }
        let start = Instant::now();
        let begun = InFlight {
            set: policies.current(),
            number,
        };
        let mut failed = !begins(&begun);
        let now = begun.set.generation();
        waiting.push_back(begun);
        let full = waiting.len() > in_flight;
        let ending = full.then(|| waiting.pop_front()).flatten();
        failed |= ending.is_some_and(|ending| !ends(&ending, &replicas));
        let took = u32::try_from(start.elapsed().as_nanos()).unwrap_or(u32::MAX);
        seen.failed += u64::from(failed);
        if full {
            let samples = if kind == CALM {
                &mut seen.calm
            } else {
                &mut seen.swaps
            };
            samples.push(took);
            if now != generation {
                seen.first.push(took);
            }
        }
        generation = now;
    }
    seen
}

fn request(number: u64) -> RequestView<'static> {
    RequestView {
        model: "llama-3.3-70b",
        band_hint: Some("batch"),
        path: "/v1/chat/completions",
        stream: true,
        input_tokens: 300 + number % 64,
        seed: number,
        ..RequestView::default()
    }
}

/// The first hook. False when the answer is not the set's own.
fn begins(request_in: &InFlight) -> bool {
    let tenant = TenantView {
        name: "research",
        band: "standard",
        best_band: "interactive",
        ..TenantView::default()
    };
    let band = request_in
        .set
        .classify(&request(request_in.number), &tenant);
    &*band.name == "batch" && band.ttl_ms == Some(request_in.set.generation())
}

/// The second hook, of the set that the request began with.
fn ends(request_in: &InFlight, replicas: &[ReplicaView<'_>]) -> bool {
    let ranked = request_in.set.rank(&request(request_in.number), replicas);
    let said = ranked.and_then(|ranked| ranked.reason);
    said == Some(request_in.set.generation().to_string())
}

fn report(seen: Vec<Seen>, in_flight: usize, swapped: u64, faults: usize) -> ExitCode {
    let failed: u64 = seen.iter().map(|seen| seen.failed).sum();
    let gather = |of: fn(&Seen) -> &Vec<u32>| {
        let mut all: Vec<u32> = seen
            .iter()
            .flat_map(|seen| of(seen).iter().copied())
            .collect();
        all.sort_unstable();
        all
    };
    let (calm, swaps, first) = (
        gather(|seen| &seen.calm),
        gather(|seen| &seen.swaps),
        gather(|seen| &seen.first),
    );
    println!("{in_flight} requests in flight, {swapped} swaps, {failed} failed\n");
    println!(
        "{:<36} {:>10} {:>9} {:>9} {:>9} {:>9}",
        "us for the hooks of a request", "requests", "p50", "p99", "p99.9", "most"
    );
    for (what, samples) in [
        ("without swaps", &calm),
        ("with swaps", &swaps),
        ("a thread's first of a generation", &first),
    ] {
        let at = |share: f64| us(quantile(samples, share));
        println!(
            "{what:<36} {:>10} {:>9} {:>9} {:>9} {:>9}",
            samples.len(),
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0)
        );
    }
    let added = quantile(&swaps, 0.99).saturating_sub(quantile(&calm, 0.99));
    println!(
        "\nadded to p99: {} us, at most {} us",
        us(added),
        ADDED_P99_MAX.as_micros()
    );
    if failed > 0 || faults > 0 || Duration::from_nanos(added.into()) > ADDED_P99_MAX {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn quantile(sorted: &[u32], share: f64) -> u32 {
    let at = (sorted.len() as f64 * share) as usize;
    sorted
        .get(at.min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or(0)
}

fn us(ns: u32) -> String {
    format!("{:.1}", f64::from(ns) / 1e3)
}
