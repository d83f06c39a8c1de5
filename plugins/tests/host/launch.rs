//! Which commands the shipped plugins start, and what they have against a profile.

use llmgw_plugins::{EngineCommand, ErrorKind, ModelView, PolicySet, ProfileView, ShardView};

use crate::Dir;

fn shard(engine: &str) -> ShardView<'_> {
    ShardView {
        model: "m",
        source: "org/m",
        served_name: "m",
        profile: "p",
        engine,
        nodes: 1,
        leader_address: "10.0.0.1",
        port: 21000,
        rendezvous_port: Some(21001),
        tensor_parallel: 4,
        pipeline_parallel: 1,
        slots: Some(8),
        gpus: 4,
        advertise: Some("10.0.0.1"),
        ..ShardView::default()
    }
}

fn lines(engine: &str, shard: &ShardView<'_>) -> Vec<String> {
    let commands = PolicySet::built_in()
        .commands(engine, shard)
        .expect("it renders");
    let line = |command: &EngineCommand| {
        let mark = if command.sidecar { "& " } else { "" };
        let wait = command
            .wait_for
            .as_ref()
            .map(|address| format!("[{address}] "))
            .unwrap_or_default();
        format!("{mark}{wait}{} {}", command.command, command.args.join(" "))
    };
    commands.iter().map(line).collect()
}

#[test]
fn llama_cpp_gets_enough_http_threads_and_its_metrics() {
    let args = ["-c".to_owned(), "4096".to_owned()];
    let shard = ShardView {
        source: "/models/m.gguf",
        cpus: Some(8),
        args: &args,
        ..shard("llamacpp")
    };
    assert_eq!(
        lines("llamacpp", &shard),
        [
            "llama-server --model /models/m.gguf --alias m --host 10.0.0.1 --port 21000 --parallel 8 --threads-http 72 --metrics \
          --sse-ping-interval 5 --threads 8 -c 4096"
        ]
    );
}

#[test]
fn vllm_starts_alone_natively_over_nodes_and_under_ray() {
    let serve = "vllm serve org/m --served-model-name m --host 10.0.0.1 --port 21000 --tensor-parallel-size 4 --pipeline-parallel-size 1 \
                 --max-num-seqs 8";
    assert_eq!(lines("vllm", &shard("vllm")), [serve]);
    let gang = ShardView {
        nodes: 2,
        ..shard("vllm")
    };
    let ranks = "--nnodes 2 --node-rank";
    let master = "--master-addr 10.0.0.1 --master-port 21001";
    assert_eq!(
        lines("vllm", &gang),
        [format!("{serve} {ranks} 0 {master}")]
    );
    assert_eq!(
        lines("vllm", &ShardView { rank: 1, ..gang }),
        [format!("{serve} {ranks} 1 {master} --headless")]
    );
    let ray = ShardView {
        launch_mode: Some("ray"),
        ..gang
    };
    assert_eq!(
        lines("vllm", &ray),
        [
            "& ray start --head --port 21001 --node-ip-address 10.0.0.1 --num-gpus 4 --include-dashboard false --disable-usage-stats --block".to_owned(),
            format!("[10.0.0.1:21001] {serve} --distributed-executor-backend ray"),
        ]
    );
    assert_eq!(
        lines(
            "vllm",
            &ShardView {
                rank: 1,
                advertise: Some("10.0.0.2"),
                ..ray
            }
        ),
        [
            "ray start --address 10.0.0.1:21001 --node-ip-address 10.0.0.2 --num-gpus 4 --disable-usage-stats --block"
        ]
    );
}

#[test]
fn a_gang_gets_exactly_the_chosen_adapters() {
    let adapters = ["mlx5_0".to_owned(), "mlx5_1".to_owned()];
    let env = [("HF_HOME".to_owned(), "/models".to_owned())];
    for engine in ["vllm", "sglang"] {
        let gang = ShardView {
            nodes: 2,
            adapters: &adapters,
            socket_interface: Some("eth0"),
            env: &env,
            ..shard(engine)
        };
        let commands = PolicySet::built_in()
            .commands(engine, &gang)
            .expect("it renders");
        let value = |name: &str| commands[0].env.get(name).map(String::as_str);
        assert_eq!(value("NCCL_IB_HCA"), Some("=mlx5_0,mlx5_1"), "{engine}");
        assert_eq!(value("NCCL_SOCKET_IFNAME"), Some("eth0"), "{engine}");
        assert_eq!(value("HF_HOME"), Some("/models"), "{engine}");
    }
}

#[test]
fn sglang_is_told_where_its_ranks_meet() {
    let gang = ShardView {
        nodes: 2,
        rank: 1,
        ..shard("sglang")
    };
    assert_eq!(
        lines("sglang", &gang),
        [
            "sglang serve --model-path org/m --served-model-name m --host 10.0.0.1 --port 21000 --tp-size 4 --pp-size 1 \
          --enable-metrics --max-running-requests 8 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:21001 --api-key ${LLMGW_API_KEY}"
        ]
    );
}

#[test]
fn arguments_that_llmgw_owns_and_shapes_that_cannot_be_are_refused() {
    let set = PolicySet::built_in();
    let model = ModelView {
        name: "m",
        source: Some("org/m"),
        replicas: 1,
    };
    let validate = |engine: &str, profile: &ProfileView<'_>| set.validate(engine, profile, &model);
    let plain = ProfileView {
        name: "p",
        nodes: 1,
        tensor_parallel: 1,
        pipeline_parallel: 1,
        ..ProfileView::default()
    };
    for (engine, owned) in [
        ("vllm", "--port"),
        ("vllm", "--host=::"),
        ("vllm", "-tp"),
        ("sglang", "--tp"),
        ("llamacpp", "--alias"),
        ("llamacpp", "-np"),
    ] {
        assert_eq!(validate(engine, &plain), Vec::<String>::new());
        let args = [owned.to_owned()];
        let found = validate(
            engine,
            &ProfileView {
                args: &args,
                ..plain
            },
        );
        let flag = owned.split('=').next().unwrap_or(owned);
        assert_eq!(
            found,
            [format!(
                "argument `{flag}` belongs to llmgw: remove it from `args`"
            )],
            "{engine} {owned}"
        );
    }
    let args = ["--portable".to_owned()];
    assert_eq!(
        validate(
            "vllm",
            &ProfileView {
                args: &args,
                ..plain
            }
        ),
        Vec::<String>::new(),
        "only whole names"
    );
    assert!(validate("llamacpp", &ProfileView { nodes: 2, ..plain })[0].contains("one machine"));
    assert!(
        validate(
            "llamacpp",
            &ProfileView {
                tensor_parallel: 2,
                ..plain
            }
        )[0]
        .contains("tensor")
    );
    assert_eq!(
        validate(
            "sglang",
            &ProfileView {
                launch_mode: Some("ray"),
                ..plain
            }
        ),
        ["SGLang knows launch_mode `native` only, not `ray`"]
    );
    assert_eq!(
        validate("vlm", &plain),
        ["there is no engine plugin 'vlm' (did you mean 'vllm'?)"]
    );
    assert_eq!(validate("openai", &plain), Vec::<String>::new());
}

#[test]
fn a_command_that_the_plugin_does_not_list_is_refused() {
    let refused = |body: &str| {
        let text = format!(
            "local M = {{ api = 1, executables = {{ 'tgi' }} }}\nfunction M.commands(shard)\n  if shard.rank == 0 then return {{ {{ command = 'tgi' }} }} end\n  {body}\nend\nreturn M\n"
        );
        let set = Dir::with(&[("engines/tgi.lua", &text)])
            .load()
            .expect("it loads");
        let fault = set
            .commands(
                "tgi",
                &ShardView {
                    rank: 1,
                    ..shard("tgi")
                },
            )
            .expect_err(body);
        (fault.kind, fault.message)
    };
    let says = |kind, message: &str| (kind, message.to_owned());
    assert_eq!(
        refused("return { { command = 'bash' } }"),
        says(
            ErrorKind::Unknown,
            "command 'bash' is none of the plugin's `executables`"
        )
    );
    assert_eq!(
        refused("return { { command = '/bin/tgi' } }"),
        says(
            ErrorKind::Range,
            "command '/bin/tgi' must be a name, the node knows the path"
        )
    );
    assert_eq!(
        refused("return { { command = 'tgi', arg = {} } }"),
        says(
            ErrorKind::Unknown,
            "unknown key of a command 'arg' (did you mean 'args'?)"
        )
    );
    assert_eq!(
        refused("return { { command = 'tgi', args = { 5 } } }"),
        says(ErrorKind::Error, "`args` is a number, a text is needed")
    );
    assert_eq!(
        refused("return { { command = 'tgi', sidecar = true } }"),
        says(
            ErrorKind::Error,
            "the last command is the shard, it can't be a sidecar"
        )
    );
    assert_eq!(
        refused("return {}"),
        says(
            ErrorKind::Range,
            "commands returned 0 commands, 1 to 16 are possible"
        )
    );
    assert_eq!(refused("return nil").0, ErrorKind::Nil);
}

#[test]
fn an_engine_may_read_its_scrape_itself() {
    let text = "local M = { api = 1 }\nfunction M.map(samples, previous, dt_ms)\n  local used, total = samples.used, samples.total\n  \
                if not used then return {} end\n  return { running = previous and previous.running or 1, kv = used[1].value / total[1].value, waiting = #samples.used }\nend\nreturn M\n";
    let set = Dir::with(&[("engines/tgi.lua", text)])
        .load()
        .expect("it loads");
    let samples =
        llmgw_plugins::Samples::parse("used{pool=\"a\"} 25\nused{pool=\"b\"} 1\ntotal 100\n");
    let load = set
        .map_metrics("tgi", &samples, None, 1000.0)
        .expect("it maps");
    assert_eq!(
        (load.running, load.waiting, load.kv),
        (Some(1.0), Some(2.0), Some(0.25))
    );
    let previous = llmgw_plugins::Load {
        running: Some(9.0),
        ..load
    };
    assert_eq!(
        set.map_metrics("tgi", &samples, Some(&previous), 1000.0)
            .and_then(|load| load.running),
        Some(9.0)
    );
    assert_eq!(
        set.map_metrics("vllm", &samples, None, 1000.0),
        None,
        "it has no map"
    );
}
