use super::*;

#[test]
fn duplicates_are_refused() {
    let hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    check(&[
        (
            "models: []\nlisten: 127.0.0.1:1\nmodels: []\n",
            &["3 models: duplicate key `models` (keep one of them)"],
        ),
        (
            &model("source: a\n    source: b"),
            &["4 models[0].source: duplicate key `source` (keep one of them)"],
        ),
        (
            "models:\n  - {name: a, endpoints: [{url: \"http://h:1\"}]}\n  - {name: a, endpoints: [{url: \"http://h:1\"}]}\n",
            &["3 models[1].name: models[0] is called `a` too (give each model its own name)"],
        ),
        (
            "models:\n  - {name: a, aliases: [b], endpoints: [{url: \"http://h:1\"}]}\n  - {name: b, endpoints: [{url: \"http://h:1\"}]}\n",
            &[
                "2 models[0].aliases[0]: `b` is the name of models[1] already (a name leads to one model: keep one of them)",
            ],
        ),
        (
            "models:\n  - {name: a, aliases: [x], endpoints: [{url: \"http://h:1\"}]}\n  - {name: b, aliases: [x], endpoints: [{url: \"http://h:1\"}]}\n",
            &[
                "3 models[1].aliases[0]: `x` is an alias of models[0] already (a name leads to one model: keep one of them)",
            ],
        ),
        (
            &model("aliases: [a]"),
            &[
                "3 models[0].aliases[0]: `a` is the name of this model already (a name leads to one model: keep one of them)",
            ],
        ),
        (
            &model("source: models/../../m.gguf"),
            &[
                "3 models[0].source: `models/../../m.gguf` leads out of a node's `models_dir` (write a path below `models_dir` without `..`, or an absolute one as `source`)",
            ],
        ),
        (
            "models:\n  - {name: ../m, profiles: [{name: p, engine: llamacpp}]}\n",
            &[
                "2 models[0].name: `../m` leads out of a node's `models_dir` (write a path below `models_dir` without `..`, or an absolute one as `source`)",
            ],
        ),
        (
            "models:\n  - name: a\n    endpoints:\n      - url: http://h:80/\n      - url: http://h\n",
            &[
                "5 models[0].endpoints[1].url: endpoints[0] has `http://h:80` too (list each engine once)",
            ],
        ),
        (
            "tenants:\n  - {name: t}\n  - {name: t}\n",
            &["3 tenants[1].name: tenants[0] is called `t` too (give each tenant its own name)"],
        ),
        (
            &format!(
                "tenants:\n  - {{name: t, keys: [\"{hash}\"]}}\n  - {{name: u, keys: [\"{hash}\"]}}\n"
            ),
            &[
                "3 tenants[1].keys[0]: is a key of tenants[0] (`t`) too (a key names one tenant: keep one of them)",
            ],
        ),
    ]);
}

#[test]
fn a_key_may_expire() {
    let hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    let tenant = |keys: &str| format!("tenants:\n  - name: t\n    keys:\n{keys}models: []\n");
    let text = tenant(&format!(
        "      - \"{hash}\"\n      - {{hash: \"sha256:{}\", expires: 2026-12-31}}\n",
        "0f".repeat(32)
    ));
    let keys = &good(&text).tenants[0].keys;
    assert_eq!((keys.len(), keys[0].expires), (2, None));
    assert_eq!(keys[1].expires, Some(UtcTime(1_798_675_200)));
    check(&[
        (
            &tenant(&format!("      - {{hash: \"{hash}\", expires: soon}}\n")),
            &[
                "4 tenants[0].keys[0].expires: `soon` is not a date (write e.g. `2026-12-31` or `2026-12-31T18:30:00Z`, in UTC)",
            ],
        ),
        (
            &tenant("      - {expires: 2026-12-31}\n"),
            &["4 tenants[0].keys[0]: has no `hash` (write `hash: \"sha256:...\"`)"],
        ),
        (
            &tenant(&format!(
                "      - {{hash: \"{hash}\", until: 2026-12-31}}\n"
            )),
            &[
                "4 tenants[0].keys[0]: has an unknown key (write `{hash: \"sha256:...\", expires: 2026-12-31}`)",
            ],
        ),
        (
            &tenant(&format!(
                "      - \"{hash}\"\n      - {{hash: \"{hash}\", expires: 2026-12-31}}\n"
            )),
            &["5 tenants[0].keys[1]: is listed twice (a key names one tenant: keep one of them)"],
        ),
    ]);
}

#[test]
fn tenants_that_contradict_themselves_are_refused() {
    check(&[
        (
            &tenant("bands: []"),
            &[
                "3 tenants[0].bands: is empty: the tenant could use no band (list at least one band, or leave the key out for all of them)",
            ],
        ),
        (
            &tenant("models: []"),
            &[
                "3 tenants[0].models: is empty: the tenant could use no model (write `[\"*\"]` for all models, or remove the tenant)",
            ],
        ),
        (
            &tenant("bands: [a, b, a]"),
            &["3 tenants[0].bands[2]: `a` is listed twice (keep one of them)"],
        ),
        (
            "tenants: [{weight: 1}]\n",
            &["1 tenants[0]: has no `name` (give each tenant a name)"],
        ),
        (
            "tenants: [{name: \"a b\"}]\n",
            &[
                "1 tenants[0].name: `a b` is not a name for a tenant (use at most 64 of letters, digits, `_`, `-` and `.`)",
            ],
        ),
        (
            "agents: {listen: \"0.0.0.0:8443\"}\n",
            &[
                "1 agents.listen: `0.0.0.0:8443` is not loopback and has no `tls` (set `tls: {cert, key, ca}`, or `allow_plaintext: true`)",
            ],
        ),
        (
            "agents: {require_identity: true}\n",
            &[
                "1 agents.require_identity: needs `tls.ca`: without an authority no certificate can be asked for (set `tls.ca`, or `require_identity: false`)",
            ],
        ),
        (
            "agents: {deny_serials: [\"zz\"]}\n",
            &[
                "1 agents.deny_serials[0]: `zz` is not a serial number (write hex digits, e.g. `\"0a:1b:2c\"`)",
            ],
        ),
    ]);
}

#[test]
fn endpoints_and_models_are_checked() {
    let url = |url: &str| format!("models: [{{name: a, endpoints: [{{url: \"{url}\"}}]}}]\n");
    check(&[
        (
            &url("127.0.0.1:9001"),
            &[
                "1 models[0].endpoints[0].url: is no URL: it does not begin with `http://` (write e.g. `http://127.0.0.1:8000`)",
            ],
        ),
        (
            &url("https://h"),
            &[
                "1 models[0].endpoints[0].url: is https, which is not supported towards engines (use `http://`; where the network is not trusted, put a TLS tunnel beside the gateway)",
            ],
        ),
        (
            &url("http://h/v1"),
            &[
                "1 models[0].endpoints[0].url: ends in `/v1` (leave out `/v1`: the client's own path is appended)",
            ],
        ),
        (
            "models: [{name: a}]\n",
            &[
                "1 models[0]: has neither `endpoints` nor `profiles` (list `endpoints` for engines that run already, or `profiles` for agents to start)",
            ],
        ),
        (
            "models: [{name: a, endpoints: [{engine: vllm}]}]\n",
            &[
                "1 models[0].endpoints[0]: has no `url` (write e.g. `url: \"http://127.0.0.1:8000\"`)",
            ],
        ),
        (
            "models: [{endpoints: [{url: \"http://h\"}]}]\n",
            &["1 models[0]: has no `name` (write the name that clients ask for)"],
        ),
        (
            &model("aliases: [\"a b\"]"),
            &[
                "3 models[0].aliases[0]: `a b` is not a model's name (use at most 256 bytes without spaces, control characters and `*`)",
            ],
        ),
        (
            &model("replicas: 2"),
            &[
                "3 models[0].replicas: has no effect without `profiles` (remove it: each endpoint is a replica)",
            ],
        ),
        (
            &model("metrics: {path: metrics}"),
            &["3 models[0].metrics.path: does not begin with `/` (write e.g. `path: /metrics`)"],
        ),
        (
            &model("metrics: {kv: []}"),
            &[
                "3 models[0].metrics.kv: names no metric (write a metric's name, or leave the key out)",
            ],
        ),
    ]);
    let metrics = |text: &str| {
        good(&model(text)).catalog.models[0]
            .metrics
            .clone()
            .unwrap()
    };
    assert_eq!(metrics("metrics: {}"), MetricOverride::default());
    assert_eq!(
        metrics("metrics: {running: [a, b]}").running,
        Some(vec!["a".to_owned(), "b".to_owned()])
    );
}

#[test]
fn profiles_are_checked_before_anything_is_launched() {
    check(&[
        (
            &profile("gpu: h100-sxm-80g, gpus_per_node: 8, nodes: 2, tensor_parallel: 8"),
            &[
                "4 models[0].profiles[0].tensor_parallel: nodes x gpus_per_node is 2 x 8 = 16, but tensor_parallel x pipeline_parallel is 8 x 1 = 8 (set `tensor_parallel: 16`)",
            ],
        ),
        (
            &profile("gpus_per_node: 2"),
            &[
                "4 models[0].profiles[0].gpus_per_node: is set, but the profile has no `gpu` class and so means CPU (name the class, e.g. `gpu: h100-sxm-80g`, or remove `gpus_per_node`)",
            ],
        ),
        (
            &profile("nodes: 2"),
            &[
                "4 models[0].profiles[0].nodes: is set, but the profile has no `gpu` class and so means CPU (name the class, e.g. `gpu: h100-sxm-80g`, or remove `nodes`)",
            ],
        ),
        (
            &profile("gpu: H100"),
            &[
                "4 models[0].profiles[0].gpu: `H100` is not a GPU class (write lower case with dashes: `h100`)",
            ],
        ),
        (
            &profile("gpu: h100"),
            &[
                "4 models[0].profiles[0].gpu: `h100` is not a GPU class (write the model and the GiB that the driver reports, e.g. `h100-sxm-80g`; `llmgw agent inventory` prints it)",
            ],
        ),
        (
            &profile("gpu: [l40s-45g, a100-sxm4-80g], quantization: fp8"),
            &[
                "4 models[0].profiles[0].gpu[1]: fp8 needs compute capability 8.9, which `a100-sxm4-80g` does not have (remove the class, or choose another `quantization`)",
            ],
        ),
        (
            &profile("launch_mode: slurm"),
            &[
                "4 models[0].profiles[0].launch_mode: `slurm` is not known here (known here: native, ray)",
            ],
        ),
        (
            &profile("env: {\"A B\": c}"),
            &[
                "4 models[0].profiles[0].env.A B: `A B` is no name of an environment variable (use letters, digits and `_`)",
            ],
        ),
        (
            "models: [{name: a, profiles: [{name: p}]}]\n",
            &[
                "1 models[0].profiles[0]: has no `engine` (write which engine runs it, e.g. `engine: vllm`)",
            ],
        ),
    ]);
}

#[test]
fn a_pattern_covers_the_whole_name() {
    let cases = [
        ("*", "a", true),
        ("*", "", true),
        ("a", "a", true),
        ("a", "ab", false),
        ("a*", "ab", true),
        ("*b", "ab", true),
        ("a*b", "ab", true),
        ("a*b", "a", false),
        ("ab*ba", "aba", false),
        ("a*b*c", "aXbYc", true),
        ("a*b*c", "aXcYb", false),
        ("a**c", "ac", true),
    ];
    for (pattern, name, expected) in cases {
        assert_eq!(
            ModelPattern::new(pattern).matches(name),
            expected,
            "{pattern} {name}"
        );
    }
}
