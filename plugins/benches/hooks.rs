//! `cargo bench -p llmgw-plugins`: the hooks that have a target, called as the gateway calls them, as a table. A word after `--`
//! chooses rows.
//!
//! No framework: the median of some batches is what a target of "at most" can be held against, and one dependency less.

use std::fmt::Write as _;
use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use llmgw_plugins::{
    CandidateView, JobView, Policies, PolicyOptions, PolicySet, ReplicaView, RequestView,
    TenantView, init_dir,
};

const BATCHES: usize = 15;
const BATCH_TIME: Duration = Duration::from_millis(20);
const NODES: usize = 1000;

/// A directory that goes with the program.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn main() {
    let dir = Directory(std::env::temp_dir().join(format!("llmgw-bench-{}", std::process::id())));
    init_dir(&dir.0).expect("the policies can be written");
    let native = open(None).current();
    for (file, hook) in [("admission.lua", "classify"), ("routing.lua", "rank")] {
        // The hooks that are shipped switched off, switched on.
        edit(
            &dir.0,
            file,
            &format!("-- M.{hook} = {hook}"),
            &format!("M.{hook} = {hook}"),
        );
    }
    // A file that differs from the embedded one is asked instead of the native rule.
    edit(&dir.0, "placement.lua", "pack = 40,", "pack = 41,");
    let policies = open(Some(&dir.0));
    let lua = policies.current();
    let rows: [(&str, f64, &dyn Fn() -> f64); 6] = [
        ("admission.classify, Lua", 0.5e3, &|| classify(&lua)),
        ("admission.classify, native", f64::NAN, &|| {
            classify(&native)
        }),
        ("routing.rank, 8 replicas, Lua", 3e3, &|| rank(&lua)),
        ("placement.score, 1,000 nodes x 8 GPUs, Lua", 10e6, &|| {
            score(&lua)
        }),
        (
            "placement.score, 1,000 nodes x 8 GPUs, native",
            f64::NAN,
            &|| score(&native),
        ),
        ("staging of the default set", 50e6, &|| {
            stage(&policies, &dir.0)
        }),
    ];
    println!("{:<48} {:>12} {:>12}", "", "median", "at most");
    let only = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let wanted = |what: &str| only.as_deref().is_none_or(|only| what.contains(only));
    let mut over = 0;
    for (what, most, measure) in rows.into_iter().filter(|(what, ..)| wanted(what)) {
        let ns = measure();
        let (target, verdict) = match most.is_nan() {
            true => (String::new(), ""),
            false if ns <= most => (time(most), ""),
            false => (time(most), "  OVER"),
        };
        over += usize::from(!verdict.is_empty());
        println!("{what:<48} {:>12} {target:>12}{verdict}", time(ns));
    }
    if over > 0 {
        println!("{over} over their targets, which are for release builds on an idle machine");
    }
}

fn open(dir: Option<&Path>) -> Arc<Policies> {
    let options = PolicyOptions {
        dir: dir.map(Path::to_path_buf),
        state: None,
    };
    Policies::open(options).expect("the policies load")
}

fn edit(dir: &Path, file: &str, from: &str, to: &str) {
    let path = dir.join(file);
    let text = fs::read_to_string(&path).expect("it was written");
    assert!(text.contains(from), "{file} has no `{from}`");
    fs::write(path, text.replace(from, to)).expect("it can be written");
}

fn request(seed: u64) -> RequestView<'static> {
    RequestView {
        model: "llama-3.3-70b",
        band_hint: Some("batch"),
        path: "/v1/chat/completions",
        stream: true,
        input_tokens: 300 + seed % 64,
        est_output_tokens: 200,
        n: 1,
        session: Some("session"),
        seed,
        ..RequestView::default()
    }
}

fn classify(set: &PolicySet) -> f64 {
    let tenant = TenantView {
        name: "research",
        band: "standard",
        best_band: "interactive",
        weight: 2.0,
        ..TenantView::default()
    };
    median(&mut |round| {
        black_box(set.classify(&request(round), &tenant));
    })
}

fn rank(set: &PolicySet) -> f64 {
    let ids: Vec<String> = (0..8).map(|n| format!("llama-3.3-70b/{n}")).collect();
    let mut replicas: Vec<ReplicaView<'_>> = ids
        .iter()
        .map(|id| ReplicaView {
            id,
            node: Some("node-1"),
            rack: Some("r1"),
            gpu: Some("h100-sxm-80g"),
            ms_per_prefill_token: Some(0.5),
            slots: Some(64),
            kv: Some(0.4),
            metrics_age_ms: Some(150.0),
            ..ReplicaView::default()
        })
        .collect();
    median(&mut |round| {
        // What changes from one request to the next: counts, and the prefix of this prompt.
        for (at, replica) in replicas.iter_mut().enumerate() {
            replica.inflight = ((round + at as u64) % 16) as u32;
            replica.prefill_tokens = (round * 37 + at as u64 * 101) % 4000;
            replica.prefix_tokens = if at == 3 { 128 } else { 0 };
            replica.metrics_age_ms = Some((round % 100) as f64);
        }
        let chosen = set.rank(&request(round), &replicas);
        assert!(chosen.is_some(), "the hook failed");
    })
}

/// One decision over all nodes.
fn score(set: &PolicySet) -> f64 {
    let names: Vec<[String; 1]> = (0..NODES).map(|n| [format!("node-{n:04}")]).collect();
    let job = JobView {
        kind: "gpu",
        model: "llama-3.3-70b",
        profile: "h100",
        engine: "vllm",
        gpus: 4,
        gpus_per_node: 4,
        nodes: 1,
        gpu_class: Some("h100-sxm-80g"),
        replicas: 2,
        ..JobView::default()
    };
    median(&mut |_| {
        let mut decision = set.decision();
        for (at, nodes) in names.iter().enumerate() {
            let free = at % 9;
            let candidate = CandidateView {
                nodes,
                gpus: 4,
                domains: 1,
                domains_filled: u32::from(free == 4),
                gpu_after: (12 - free) as f64 / 8.0,
                cpu_after: 0.3,
                frag_delta: if free == 4 { -1.0 } else { 1.0 },
                fabrics: 1,
                same_rack: (at % 3 == 0).into(),
                ..CandidateView::default()
            };
            assert!(
                decision.score(&job, &candidate).is_some(),
                "the hook failed"
            );
        }
    })
}

/// A reload after an edit: reading, compiling, checking and swapping.
fn stage(policies: &Policies, dir: &Path) -> f64 {
    let path = dir.join("routing.lua");
    let mut text = fs::read_to_string(&path).expect("it was written");
    let mut times = Vec::new();
    for round in 0..BATCHES {
        let _ = writeln!(text, "-- edit {round}");
        fs::write(&path, &text).expect("it can be written");
        let start = Instant::now();
        policies.reload().expect("it loads");
        times.push(start.elapsed().as_secs_f64() * 1e9);
    }
    middle(times)
}

/// The median of some batches, in ns a call: CPU time of the thread, since what others on the machine do is not the hook's.
fn median(call: &mut dyn FnMut(u64)) -> f64 {
    let mut batch = |calls: u64| {
        let start = thread_cpu_time();
        (0..calls).for_each(&mut *call);
        thread_cpu_time().saturating_sub(start)
    };
    let mut calls = 1;
    while batch(calls) < BATCH_TIME {
        calls *= 2;
    }
    middle(
        (0..BATCHES)
            .map(|_| batch(calls).as_secs_f64() * 1e9 / calls as f64)
            .collect(),
    )
}

fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn time(ns: f64) -> String {
    match ns {
        ..1e3 => format!("{ns:.0} ns"),
        ..1e6 => format!("{:.2} us", ns / 1e3),
        _ => format!("{:.2} ms", ns / 1e6),
    }
}

fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a live timespec, and the clock exists on every Linux.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(rc, 0, "the thread's clock can be read");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
