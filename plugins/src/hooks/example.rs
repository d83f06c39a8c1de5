//! One call of each hook on an example, at load: a misspelt knob or field is found before it is in force.

use std::sync::Arc;

use crate::engine::EnginePlugin;
use crate::engine::samples::Samples;
use crate::error::Fault;
use crate::hooks::calls::{
    RANK_CANDIDATES_MAX, classify, classify_error, key, map_metrics, pool_call, prices, rank,
    reject, weight,
};
use crate::hooks::launch::{
    EngineCommand, ModelView, ProfileView, ShardView, commands, serves_http, validate,
};
use crate::hooks::placement::{CandidateView, JobView, NodeView, filter, score};
use crate::hooks::returns::{self, Clamped};
use crate::hooks::views::{
    BandQueue, Domain, PoolView, ReplicaView, RequestView, TenantView, UsageView,
};
use crate::hooks::{BandSpec, Hook};
use crate::vm::Vm;
use crate::vm::budget::{Limit, TICK_MAX};

/// Calls each defined hook once on an example, so that a set with a misspelt knob or field is refused at load; and
/// asks for the bands. Here a value out of its range is a mistake, not something to clamp.
pub(crate) fn examine(
    vm: &mut Vm,
    defined: &[bool; Hook::ALL.len()],
) -> Result<Vec<BandSpec>, (Hook, Fault)> {
    let bands = strict(
        Hook::Bands,
        pool_call(vm, Hook::Bands, &example_pool()).and_then(|value| returns::bands(&value)),
    );
    // A file without `bands` has the embedded ones.
    let bands = if defined[Hook::Bands as usize] || bands.is_ok() {
        bands?
    } else {
        native_bands()
    };
    for hook in Hook::ALL.into_iter().filter(|hook| defined[*hook as usize]) {
        if let Some(faults) = call(vm, hook, &bands, 0, "session") {
            strict(hook, faults.map(|faults| ((), faults)))?;
        }
    }
    Ok(bands)
}

/// One call of a policy file's hook on an example; each round, with its session, is a request of its own. `None` for engines' hooks.
/// The faults are what was clamped.
pub(crate) fn call(
    vm: &mut Vm,
    hook: Hook,
    bands: &[BandSpec],
    round: u64,
    session: &str,
) -> Option<Result<Vec<Fault>, Fault>> {
    let request = RequestView {
        session: Some(session),
        input_tokens: 300 + round,
        ..example_request()
    };
    let (pool, tenant, nodes) = (example_pool(), example_tenant(), ["node-1".to_owned()]);
    let decision = Limit::Clock(TICK_MAX);
    let faults = match hook {
        Hook::Bands => faults(pool_call(vm, hook, &pool).and_then(|value| returns::bands(&value))),
        Hook::Weights => {
            faults(pool_call(vm, hook, &pool).and_then(|value| returns::weights(&value)))
        }
        Hook::Gate => faults(pool_call(vm, hook, &pool).and_then(|value| returns::gate(&value))),
        Hook::Prices => faults(prices(vm, "model").and_then(|value| returns::prices(&value))),
        Hook::Weight => faults(weight(vm, &tenant, &example_usage())),
        Hook::Classify => faults(classify(vm, &request, &tenant, bands)),
        Hook::Reject => reject(vm, &request, "queue_full")
            .map(|refusal| refusal.map(|(_, faults)| faults).unwrap_or_default()),
        Hook::Key => key(vm, &request, &tenant).map(|_| Vec::new()),
        Hook::Rank => rank(vm, &request, &example_replicas()).map(|_| Vec::new()),
        Hook::PlacementFilter => {
            filter(vm, decision, &example_job(), &example_node(&DOMAINS)).map(|_| Vec::new())
        }
        Hook::PlacementScore => faults(score(
            vm,
            decision,
            &example_job(),
            &example_candidate(&nodes),
        )),
        _ => return None,
    };
    Some(faults)
}

fn faults<T>(result: Result<Clamped<T>, Fault>) -> Result<Vec<Fault>, Fault> {
    result.map(|(_, faults)| faults)
}

/// The same for an engine's functions.
pub(crate) fn examine_engine(vm: &mut Vm, plugin: &EnginePlugin) -> Result<(), (Hook, Fault)> {
    let args = ["--verbose".to_owned()];
    let env = [("NAME".to_owned(), "value".to_owned())];
    if plugin.maps {
        let samples = Samples::parse("example_running 1\n");
        let mapped = map_metrics(vm, &plugin.name, &samples, None, 1000.0);
        strict(Hook::EngineMap, mapped)?;
    }
    if plugin.classifies_errors {
        classify_error(vm, &plugin.name, 500, b"{}")
            .map_err(|fault| (Hook::EngineClassifyError, fault))?;
    }
    if plugin.validates {
        complaints(vm, plugin, &args).map_err(|fault| (Hook::EngineValidate, fault))?;
    }
    if plugin.starts {
        let shard = example_shard(&plugin.name, &args, &env);
        commands(vm, plugin, &shard).map_err(|fault| (Hook::EngineCommands, fault))?;
    }
    Ok(())
}

/// What an engine has against an example profile with these arguments.
pub(crate) fn complaints(
    vm: &mut Vm,
    plugin: &EnginePlugin,
    args: &[String],
) -> Result<Vec<String>, Fault> {
    let env = [("NAME".to_owned(), "value".to_owned())];
    let profile = example_profile(&plugin.name, args, &env);
    let model = ModelView {
        name: "example",
        source: Some("org/example"),
        replicas: 1,
    };
    validate(vm, &plugin.name, &profile, &model)
}

/// The commands of an example shard without arguments of its own.
pub(crate) fn example_commands(
    vm: &mut Vm,
    plugin: &EnginePlugin,
) -> Result<Vec<EngineCommand>, Fault> {
    commands(vm, plugin, &example_shard(&plugin.name, &[], &[]))
}

/// One call of an engine's function on an example. `None` for the hooks of policy files.
pub(crate) fn call_engine(
    vm: &mut Vm,
    plugin: &EnginePlugin,
    hook: Hook,
) -> Option<Result<(), Fault>> {
    let result = match hook {
        Hook::EngineMap => {
            let samples = Samples::parse("example_running 1\n");
            map_metrics(vm, &plugin.name, &samples, None, 1000.0).map(|_| ())
        }
        Hook::EngineClassifyError => classify_error(vm, &plugin.name, 500, b"{}").map(|_| ()),
        Hook::EngineValidate => complaints(vm, plugin, &["--verbose".to_owned()]).map(|_| ()),
        Hook::EngineCommands => example_commands(vm, plugin).map(|_| ()),
        Hook::EngineServesHttp => {
            let shard = example_shard(&plugin.name, &[], &[]);
            serves_http(vm, &plugin.name, &shard).map(|_| ())
        }
        _ => return None,
    };
    Some(result)
}

fn strict<T>(hook: Hook, result: Result<Clamped<T>, Fault>) -> Result<T, (Hook, Fault)> {
    match result {
        Ok((value, faults)) => match faults.into_iter().next() {
            None => Ok(value),
            Some(fault) => Err((hook, fault)),
        },
        Err(fault) => Err((hook, fault)),
    }
}

/// The bands of `policies.md`, for a set whose `admission.lua` doesn't define any.
fn native_bands() -> Vec<BandSpec> {
    let band = |name, priority, floor, max_queue, ttl_ms, shed| BandSpec {
        name: Arc::from(name),
        priority,
        floor,
        max_queue,
        ttl_ms,
        shed,
    };
    vec![
        band("interactive", 100.0, 0.0, 2000, 30_000, None),
        band("standard", 50.0, 0.10, 5000, 120_000, None),
        band("batch", 0.0, 0.02, 20_000, 3_600_000, Some(1.0)),
    ]
}

const QUEUES: [BandQueue<'static>; 2] = [
    BandQueue {
        name: "interactive",
        queued: 1,
        oldest_ms: Some(20.0),
    },
    BandQueue {
        name: "standard",
        queued: 0,
        oldest_ms: None,
    },
];

fn example_usage() -> UsageView {
    UsageView {
        cost_1m: 1000.0,
        share_1m: 0.5,
        queued: 0,
        inflight: 1,
        wait_p90_ms: Some(10.0),
    }
}

fn example_pool() -> PoolView<'static> {
    PoolView {
        model: "example",
        now_ms: 1.8e12,
        replicas: 2,
        ready: 2,
        slots: Some(8),
        saturation: Some(0.5),
        kv: Some(0.4),
        queued: 1,
        queued_cost: 300.0,
        ttft_p50_ms: Some(120.0),
        ttft_p90_ms: Some(400.0),
        arrivals_s: 3.0,
        rejected_s: 0.0,
        bands: &QUEUES,
    }
}

fn example_request() -> RequestView<'static> {
    RequestView {
        model: "example",
        path: "/v1/chat/completions",
        stream: true,
        input_tokens: 300,
        max_tokens: Some(200),
        est_output_tokens: 150,
        n: 1,
        age_ms: 0.2,
        ..RequestView::default()
    }
}

fn example_tenant() -> TenantView<'static> {
    TenantView {
        name: "example",
        band: "standard",
        best_band: "interactive",
        weight: 1.0,
        inflight: 1,
        ..TenantView::default()
    }
}

/// As many as a call gets at most, so that what is measured is what it costs when it counts.
fn example_replicas() -> [ReplicaView<'static>; RANK_CANDIDATES_MAX] {
    const IDS: [&str; RANK_CANDIDATES_MAX] = [
        "example/0",
        "example/1",
        "example/2",
        "example/3",
        "example/4",
        "example/5",
        "example/6",
        "example/7",
    ];
    let replica = ReplicaView {
        id: "example/0",
        ms_per_prefill_token: Some(0.5),
        slots: Some(4),
        running: Some(1.0),
        waiting: Some(0.0),
        kv: Some(0.2),
        metrics_age_ms: Some(100.0),
        est_ttft_ms: Some(150.0),
        ..ReplicaView::default()
    };
    std::array::from_fn(|at| ReplicaView {
        id: IDS[at],
        inflight: at as u32,
        prefix_tokens: 100 * (at as u64 % 3),
        ..replica
    })
}

const DOMAINS: [Domain; 1] = [Domain { gpus: 8, free: 8 }];

fn example_job() -> JobView<'static> {
    JobView {
        kind: "gpu",
        model: "example",
        profile: "example",
        engine: "vllm",
        gpus: 4,
        gpus_per_node: 4,
        nodes: 1,
        gpu_class: Some("h100-sxm-80g"),
        cpus: Some(8),
        memory_gib: Some(64.0),
        replica: 0,
        replicas: 1,
        labels: &[],
    }
}

fn example_node(domains: &[Domain]) -> NodeView<'_> {
    NodeView {
        id: "node-1",
        labels: &[],
        rack: Some("r1"),
        zone: Some("z1"),
        fabric: Some("ib"),
        gpu_class: Some("h100-sxm-80g"),
        gpus: 8,
        gpus_free: 8,
        domains,
        cpus: 64,
        cpus_free: 64,
        memory_gib_free: 500.0,
        state: "ready",
    }
}

fn example_candidate(nodes: &[String]) -> CandidateView<'_> {
    CandidateView {
        nodes,
        gpus: 4,
        domains: 1,
        domains_filled: 0,
        gpu_after: 0.5,
        cpu_after: 0.1,
        frag_delta: 1.0,
        fabrics: 1,
        same_node: 0,
        same_rack: 0,
        same_zone: 0,
        cached: Some(0.0),
    }
}

fn example_profile<'a>(
    engine: &'a str,
    args: &'a [String],
    env: &'a [(String, String)],
) -> ProfileView<'a> {
    ProfileView {
        name: "example",
        engine,
        gpus_per_node: Some(1),
        nodes: 1,
        tensor_parallel: 1,
        pipeline_parallel: 1,
        slots: Some(4),
        cpus: Some(8),
        memory_gib: Some(16.0),
        launch_mode: Some("native"),
        args,
        env,
        ..ProfileView::default()
    }
}

fn example_shard<'a>(
    engine: &'a str,
    args: &'a [String],
    env: &'a [(String, String)],
) -> ShardView<'a> {
    ShardView {
        model: "example",
        source: "org/example",
        served_name: "example",
        profile: "example",
        engine,
        nodes: 1,
        leader_address: "10.0.0.1",
        port: 21000,
        rendezvous_port: Some(21001),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        slots: Some(4),
        gpus: 1,
        cpus: Some(8),
        memory_gib: Some(16.0),
        args,
        env,
        socket_interface: Some("eth0"),
        advertise: Some("10.0.0.1"),
        models_dir: Some("/models"),
        launch_mode: Some("native"),
        ..ShardView::default()
    }
}
