use super::*;

mod catalog;

/// The example of the documentation, with a hash where it has a placeholder.
const EXAMPLE: &str = r#"
listen: 127.0.0.1:8080            # clients; tls: {cert, key} optional
admin: 127.0.0.1:8081             # ctl, /metrics, /healthz, /readyz; {listen, tls, token} where it leaves loopback
policies: policies                # directory; --policies wins
state: .llmgw                     # last good policies and such; never replicas
log: {format: text, level: info}
agents:
  listen: 127.0.0.1:8443
  tls: {cert: server.pem, key: server-key.pem, ca: ca.pem}
  require_identity: true          # default: true when tls.ca is set. Plaintext only on loopback unless allow_plaintext: true
  deny_serials: []                # revoked certificates
  heartbeat: 5s                   # dead after three
  lost_after: 60s
  recovery: 15s
limits:
  body_max: 64MiB                 # 413 beyond
  connect_timeout: 2s
  first_byte_timeout: 10m
  idle_timeout: 5m                # between two chunks
  keepalive: off                  # SSE comments while silent, e.g. 15s. Once one is sent the status is committed
  retries: 2                      # before the first byte, other replicas
  drain_timeout: 3m
tenants:                          # none listed = open, everyone is tenant "default"
  - {name: research, weight: 2, bands: [interactive, batch], keys: ["sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"], models: ["*"], max_concurrency: 64,
     requests_per_minute: 600, tokens_per_minute: 2000000}      # reserved at admission, settled at the end
                                  # default band: the first listed; best band: the highest of them
models:
  - name: smollm2
    aliases: [default]
    endpoints:                    # router-only: no agent involved
      - {url: "http://127.0.0.1:9001", engine: llamacpp, slots: 4, api_key: "${ENGINE_KEY}"}
    metrics: {running: "..."}     # optional
  - name: llama-3.3-70b
    source: meta-llama/Llama-3.3-70B-Instruct    # what the engine loads
    replicas: 2
    profiles:
      - {name: h100, engine: vllm, gpu: [h100-sxm-80g, h100-nvl-94g], gpus_per_node: 4, nodes: 1, tensor_parallel: 4,
         pipeline_parallel: 1, quantization: fp8, slots: 256, launch_mode: native, args: ["--max-model-len", "32768"], env: {}}
      - {name: cpu, engine: llamacpp, cpus: 8, memory: 16GiB, slots: 4}
"#;

fn env(name: &str) -> Option<String> {
    match name {
        "ENGINE_KEY" => Some("sk-engine".to_owned()),
        "PORT" => Some("9100".to_owned()),
        "FOUR" => Some("4".to_owned()),
        "YAML" => Some("x\nevil: {a: [1]} # ${PORT}".to_owned()),
        "HIDDEN" => Some("hunter2".to_owned()),
        "NONE" => Some(String::new()),
        _ => None,
    }
}

fn read(text: &str) -> Result<Config, ConfigErrors> {
    parse(Path::new("etc/llmgw.yaml"), text.to_owned(), &env)
}

/// A text without models is one that is about something else.
fn good(text: &str) -> Config {
    let models = match text.contains("models:") {
        true => "",
        false => "models: []\n",
    };
    read(&format!("{}\n{models}", text.trim_end())).unwrap_or_else(|errors| panic!("{errors}"))
}

#[test]
fn a_file_that_was_cut_off_before_its_models_is_refused() {
    check(&[(
        "listen: 127.0.0.1:8080\nadmin: 127.0.0.1:8081\n",
        &["1 : has no `models` (list the models, or write `models: []` to serve none yet)"],
    )]);
    assert!(good("models: []\n").catalog.models.is_empty());
}

/// The problems as `line path: wrong (right)`.
fn problems(text: &str) -> Vec<String> {
    let Err(errors) = read(text) else {
        panic!("no problem was found in:\n{text}")
    };
    let one = |problem: &Problem| {
        let line = problem
            .position
            .map_or("-".to_owned(), |(line, _)| line.to_string());
        let right = match problem.right.as_str() {
            "" => String::new(),
            right => format!(" ({right})"),
        };
        format!("{line} {}: {}{right}", problem.path, problem.wrong)
    };
    errors.problems.iter().map(one).collect()
}

/// Each case is a text and all problems it has.
fn check(cases: &[(&str, &[&str])]) {
    for (text, expected) in cases {
        assert_eq!(problems(text), *expected, "in:\n{text}");
    }
}

/// A valid file whose one model has this entry, on line 3.
fn model(entry: &str) -> String {
    format!("models:\n  - name: a\n    {entry}\n    endpoints: [{{url: \"http://h:1\"}}]\n")
}

/// A valid file whose one tenant has this entry, on line 3.
fn tenant(entry: &str) -> String {
    format!("tenants:\n  - name: t\n    {entry}\nmodels: []\n")
}

/// A valid file whose one model has this profile, on line 4.
fn profile(entries: &str) -> String {
    format!("models:\n  - name: a\n    profiles:\n      - {{name: p, engine: vllm, {entries}}}\n")
}

#[test]
fn the_documented_example_loads() {
    let config = good(EXAMPLE);
    assert_eq!(config.listen.address.port(), 8080);
    assert_eq!(config.admin.address.port(), 8081);
    assert_eq!(config.policies.as_deref(), Some(Path::new("etc/policies")));
    assert_eq!(config.state, Path::new("etc/.llmgw"));
    assert_eq!(config.limits, Limits::default());
    let agents = config.agents.as_ref().unwrap();
    assert!(agents.require_identity);
    assert_eq!(
        agents.tls.as_ref().unwrap().ca.as_deref(),
        Some(Path::new("etc/ca.pem"))
    );
    let tenant = &config.tenants[0];
    assert_eq!((tenant.weight, tenant.bands.len()), (2.0, 2));
    assert!(tenant.keys[0].hash.matches(&KeyHash::of(b"test")));
    let model = config.catalog.resolve("default").unwrap();
    assert_eq!(&*model.name, "smollm2");
    assert_eq!(
        model.endpoints[0].api_key.as_ref().unwrap().expose(),
        "sk-engine"
    );
    assert_eq!(
        model.metrics.as_ref().unwrap().running,
        Some(vec!["...".to_owned()])
    );
    let profiles = &config.catalog.resolve("llama-3.3-70b").unwrap().profiles;
    assert_eq!(
        (profiles[0].gpus_per_node, profiles[0].tensor_parallel),
        (4, 4)
    );
    assert_eq!(
        (profiles[1].gpus_per_node, profiles[1].memory),
        (0, Some(16 << 30))
    );
    assert_eq!(
        config.catalog.names().collect::<Vec<_>>(),
        ["smollm2", "llama-3.3-70b"]
    );
}

#[test]
fn what_is_not_written_has_its_default() {
    let config = good("models: []\n");
    assert_eq!(config.listen.address.to_string(), "127.0.0.1:8080");
    assert_eq!(config.admin.address.to_string(), "127.0.0.1:8081");
    assert_eq!(config.state, Path::new("etc/.llmgw"));
    assert!(config.policies.is_none() && config.agents.is_none() && config.tenants.is_empty());
    let model = &good(&model("aliases: []")).catalog.models[0];
    let endpoint = &model.endpoints[0];
    assert_eq!(
        (endpoint.engine.as_str(), endpoint.slots, &model.metrics),
        ("openai", None, &None)
    );
}

#[test]
fn an_unknown_key_is_refused_with_what_was_probably_meant() {
    check(&[
        (
            "modells: []\n",
            &["1 modells: unknown key `modells` (did you mean `models`?)"],
        ),
        (
            "models: []\nlimits: {body-max: 1MiB}\n",
            &["2 limits.body-max: unknown key `body-max` (did you mean `body_max`?)"],
        ),
        (
            "models: []\nlog: {colour: red}\n",
            &["2 log.colour: unknown key `colour` (known here: format, level)"],
        ),
        (
            "models:\n  - name: a\n    endpoints:\n      - url: http://h:1\n        slot: 4\n",
            &["5 models[0].endpoints[0].slot: unknown key `slot` (did you mean `slots`?)"],
        ),
        (
            &profile("cpu: 3"),
            &["4 models[0].profiles[0].cpu: unknown key `cpu` (did you mean `cpus`?)"],
        ),
    ]);
}

#[test]
fn a_wrong_type_says_what_was_expected_and_found() {
    check(&[
        (
            "models: {a: 1}\n",
            &["1 models: expected a list, found a mapping (put `- ` before the entry)"],
        ),
        (
            "models:\n",
            &["1 models: expected a list, found nothing (write `[...]`, or leave the key out)"],
        ),
        (
            "- a\n",
            &["1 : expected a mapping, found a list (write e.g. `{listen: ...}`)"],
        ),
        (
            "models: [x]\n",
            &["1 models[0]: expected a mapping, found the text `x` (write e.g. `{name: ...}`)"],
        ),
        (
            &model("aliases: big"),
            &["3 models[0].aliases: expected a list, found the text `big` (write `[\"big\"]`)"],
        ),
        (
            &model("source: 70"),
            &["3 models[0].source: expected a text, found the number `70` (put it in quotes)"],
        ),
        (
            &model("aliases: [1.5]"),
            &["3 models[0].aliases[0]: expected a text, found the number `1.5` (put it in quotes)"],
        ),
        (
            &tenant("max_concurrency: \"4\""),
            &[
                "3 tenants[0].max_concurrency: expected a whole number from 1 to 1000000, found the text `4` (leave out the quotes)",
            ],
        ),
        (
            &tenant("max_concurrency: 0"),
            &[
                "3 tenants[0].max_concurrency: expected a whole number from 1 to 1000000, found the number `0`",
            ],
        ),
        (
            &tenant("weight: 200"),
            &["3 tenants[0].weight: expected a number from 0.01 to 100, found the number `200`"],
        ),
        (
            &tenant("weight: .nan"),
            &["3 tenants[0].weight: expected a number from 0.01 to 100, found the number `NaN`"],
        ),
        (
            "agents: {require_identity: yes}\nmodels: []\n",
            &[
                "1 agents.require_identity: expected `true` or `false`, found the text `yes` (write `true`)",
            ],
        ),
        (
            "agents: {tls: {cert: c, key: k, ca_key: ca-key.pem}}\nmodels: []\n",
            &[
                "1 agents.tls.ca_key: needs `ca`: nodes that enrol get that certificate along with their own (set `ca: ca.pem` beside it)",
            ],
        ),
        (
            "log: {level: warning}\n",
            &[
                "1 log.level: `warning` is not known here (known here: error, warn, info, debug, trace)",
            ],
        ),
        (
            "1: x\nmodels: []\n",
            &["1 : a key is the number `1` instead of text (put the key in quotes)"],
        ),
        (
            &model("metrics:"),
            &[
                "3 models[0].metrics: `metrics` has no value (write `{}` for vLLM's names, or leave the key out for the engine's own)",
            ],
        ),
    ]);
}

#[test]
fn an_authoritys_key_beside_its_certificate_is_taken() {
    let config =
        good("agents: {tls: {cert: c, key: k, ca: ca.pem, ca_key: ca-key.pem}}\nmodels: []\n");
    let tls = config.agents.unwrap().tls.unwrap();
    assert_eq!(tls.ca_key.as_deref(), Some(Path::new("etc/ca-key.pem")));
}

#[test]
fn durations_and_sizes_say_what_would_be_right() {
    check(&[
        (
            "limits:\n  idle_timeout: 30\n",
            &[
                "2 limits.idle_timeout: `30` has no unit (write `30s` for seconds or `30ms` for milliseconds)",
            ],
        ),
        (
            "limits:\n  idle_timeout: 5min\n",
            &["2 limits.idle_timeout: `5min` is not a duration (write `5m`)"],
        ),
        (
            "limits:\n  idle_timeout: 0s\n",
            &["2 limits.idle_timeout: `0s` is out of range (write one from `1ms` to `24h`)"],
        ),
        (
            "limits:\n  keepalive: on\n",
            &[
                "2 limits.keepalive: `on` is not a duration (write a whole number and one unit of ms, s, m, h, e.g. `500ms`, `30s`, `5m`, `1h`)",
            ],
        ),
        (
            "limits:\n  body_max: 64M\n",
            &[
                "2 limits.body_max: `64M` is not a size (write `64MiB` (binary) or `64MB` (decimal))",
            ],
        ),
        (
            "limits:\n  body_max: 10\n",
            &["2 limits.body_max: `10` is out of range (write one from `1KiB` to `4GiB`)"],
        ),
        (
            "limits:\n  body_max: []\n",
            &["2 limits.body_max: expected a size such as `64MiB`, found a list"],
        ),
    ]);
    let limits = good("limits: {keepalive: 15s, body_max: 1048576, drain_timeout: 0s}\n").limits;
    assert_eq!(
        (limits.keepalive, limits.body_max),
        (Some(Duration::from_secs(15)), 1 << 20)
    );
    assert_eq!(good("limits: {keepalive: false}\n").limits.keepalive, None);
}

#[test]
fn addresses_say_what_would_be_right() {
    check(&[
        (
            "listen: 8080\n",
            &[
                "1 listen: expected an address, found the number `8080` (write `127.0.0.1:8080`, or `0.0.0.0:8080` for all interfaces)",
            ],
        ),
        (
            "listen: localhost:8080\n",
            &[
                "1 listen: `localhost:8080` is not an address (write `127.0.0.1:8080`; host names are not looked up)",
            ],
        ),
        (
            "listen: \":8080\"\n",
            &["1 listen: `:8080` is not an address (write `0.0.0.0:8080` for all interfaces)"],
        ),
        (
            "listen: 1.2.3.4:70000\n",
            &["1 listen: `1.2.3.4:70000` is not an address (write a port up to 65535)"],
        ),
        (
            "admin: 127.0.0.1:8080\n",
            &[
                "1 admin: `127.0.0.1:8080` is taken by `listen` already (give each listener its own port)",
            ],
        ),
        (
            "listen: 0.0.0.0:8081\n",
            &[
                "1 admin: `127.0.0.1:8081` is taken by `listen` already (give each listener its own port)",
            ],
        ),
        (
            "admin:\n  listen: 10.0.0.1:8081\n",
            &[
                "2 admin: the admin address `10.0.0.1:8081` is not loopback and has neither a token nor TLS (write `admin: {listen: \"10.0.0.1:8081\", token: \"${LLMGW_ADMIN_TOKEN}\"}` or give it `tls`, or bind `127.0.0.1:8081`)",
            ],
        ),
        (
            "listen: {listen: 1.2.3.4:1, tls: {cert: a, key: b}}\ntls: {cert: a, key: b}\n",
            &["2 tls: `tls` is given here and within `listen` (keep one of them)"],
        ),
        (
            "tls: {cert: a}\nmodels: []\n",
            &["1 tls: has no `key` (write `key: FILE.pem`)"],
        ),
    ]);
    let both = good("listen: 127.0.0.1:0\nadmin: {listen: \"0.0.0.0:0\", token: \"${HIDDEN}\"}\n");
    assert_eq!(both.admin.token.unwrap().expose(), "hunter2");
    let tls = good("listen: 0.0.0.0:443\ntls: {cert: /c.pem, key: k.pem}\n")
        .listen
        .tls
        .unwrap();
    assert_eq!(
        (tls.cert, tls.key),
        (PathBuf::from("/c.pem"), PathBuf::from("etc/k.pem"))
    );
    assert!(
        good("listen: {listen: \"[::]:443\", tls: {cert: c, key: k}}\n")
            .listen
            .tls
            .is_some()
    );
}

#[test]
fn all_problems_come_at_once_in_the_order_of_the_text() {
    let text = "listen: 80\nmodels:\n  - name: a\n    endpoints:\n      - {url: ftp://h, slots: x}\n  - {name: b, aliases: [b]}\nlimits: {retries: -1}\n";
    let lines: Vec<String> = problems(text)
        .iter()
        .map(|line| line.split(": ").next().unwrap().to_owned())
        .collect();
    assert_eq!(
        lines,
        [
            "1 listen",
            "5 models[0].endpoints[0].url",
            "5 models[0].endpoints[0].slots",
            "6 models[1]",
            "6 models[1].aliases[0]",
            "7 limits.retries"
        ]
    );
}

#[test]
fn labels_are_the_operators_words() {
    let config = good(
        "tenants: [{name: t, labels: {tier: gold, cost centre: \"7\"}}]\nmodels:\n  - name: a\n    labels: {team: search}\n    endpoints: [{url: \"http://h\", labels: {zone: b}}]\n",
    );
    let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let sorted = vec![label("cost centre", "7"), label("tier", "gold")];
    assert_eq!(*config.tenants[0].labels, sorted);
    let model = &config.catalog.models[0];
    assert_eq!(*model.labels, [label("team", "search")]);
    assert_eq!(*model.endpoints[0].labels, [label("zone", "b")]);
    check(&[
        (
            "models: [{name: a, labels: search, endpoints: [{url: \"http://h\"}]}]\n",
            &[
                "1 models[0].labels: expected a mapping, found the text `search` (write `{name: \"value\"}`, or leave the key out)",
            ],
        ),
        (
            &profile("node_selector: {zone: [a]}"),
            &["4 models[0].profiles[0].node_selector.zone: expected a text, found a list"],
        ),
    ]);
}

#[test]
fn a_rule_is_silent_about_what_could_not_be_read() {
    check(&[
        (
            "models: [{name: a, endpoints: {url: \"http://h\"}}]\n",
            &[
                "1 models[0].endpoints: expected a list, found a mapping (put `- ` before the entry)",
            ],
        ),
        (
            &profile("gpu: h100-sxm-80g, gpus_per_node: four, tensor_parallel: 4"),
            &[
                "4 models[0].profiles[0].gpus_per_node: expected a whole number from 1 to 64, found the text `four`",
            ],
        ),
    ]);
}

#[test]
fn variables_are_expanded_in_values_and_cannot_inject_yaml() {
    let config = good(
        "listen: 127.0.0.1:${PORT}\nmodels:\n  - name: a\n    source: \"${YAML}\"\n    endpoints:\n      - {url: \"http://h:${PORT}\", slots: \"${FOUR}\", serves: \"$${PORT} $$ $\"}\n",
    );
    assert_eq!(config.listen.address.port(), 9100);
    let model = &config.catalog.models[0];
    assert_eq!(model.source.as_deref(), Some("x\nevil: {a: [1]} # ${PORT}"));
    assert_eq!(model.endpoints[0].slots, Some(4));
    assert_eq!(model.endpoints[0].serves.as_deref(), Some("${PORT} $$ $"));
    check(&[
        (
            &model_with("${ABSENT}"),
            &[
                "3 models[0].source: the environment variable `ABSENT` is not set (set `ABSENT` where llmgw is started, or write `$${` for a literal `${`)",
            ],
        ),
        (
            &model_with("${A:-b}"),
            &[
                "3 models[0].source: `${A:-b}` names no variable (write `${NAME}` with letters, digits and `_`, or `$${` for a literal `${`)",
            ],
        ),
        (
            &model_with("${A"),
            &[
                "3 models[0].source: `${` is not closed (write `${NAME}`, or `$${` for a literal `${`)",
            ],
        ),
        (
            &model_with("${NONE}"),
            &[
                "3 models[0].source: the value of `${NONE}` is empty (write a text, or leave the key out)",
            ],
        ),
        (
            "limits: {retries: \"${ABSENT}\"}\n",
            &[
                "1 limits.retries: the environment variable `ABSENT` is not set (set `ABSENT` where llmgw is started, or write `$${` for a literal `${`)",
            ],
        ),
    ]);
}

fn model_with(source: &str) -> String {
    model(&format!("source: \"{source}\""))
}

#[test]
fn no_message_and_no_debug_output_shows_a_credential() {
    let texts = [
        "tenants:\n  - {name: t, keys: [\"hunter2\"]}\n",
        "tenants:\n  - name: t\n    keys:\n      - hunter2\n",
        "admin: {listen: 8081, token: hunter2}\n",
        "tenants:\n  - name: t\n    keys: hunter2\n",
        "tenants:\n  - name: t\n    keys:\n      a: hunter2\n",
        "tenants:\n  - name: t\n    keys:\n      - {hash: hunter2}\n",
        "tenants:\n  - name: t\n    keys:\n      - hash: hunter2\n        expires: x\n",
        "tenants:\n  - name: t\n    keys:\n      - {hash: hunter2, expires: x}\n",
        "tenants:\n  - name: t\n    keys:\n      - {hunter2: x}\n",
        "models:\n  - name: a\n    profiles:\n      - {name: p, engine: e, env: hunter2}\n",
        "models:\n  - name: a\n    profiles:\n      - {name: p, engine: e, env: {T: [hunter2]}}\n",
        "limits: {idle_timeout: \"${HIDDEN}\"}\n",
        "limits: {body_max: \"${HIDDEN}\"}\n",
        "listen: \"localhost:${HIDDEN}\"\n",
        "log: {level: \"${HIDDEN}\"}\n",
        "admin: {listen: 8081, token: \"hunter2\"}\n",
        "admin:\n  listen: 127.0.0.1:1\n  token: [hunter2]\n",
        "admin:\n  listen: 127.0.0.1:1\n  token: hunter2 hunter2\n",
        "models: [{name: a, endpoints: [{url: \"http://u:hunter2@h\"}]}]\n",
        "models: [{name: a, endpoints: [{url: \"http://u:${HIDDEN}@h\"}]}]\n",
        "listen: ${HIDDEN}\n",
        "models: [{name: a, endpoints: [{url: \"http://h\", api_key: hunter2}, slots: x}]\n",
    ];
    for text in texts {
        let shown = read(text).unwrap_err().to_string();
        assert!(!shown.contains("hunter2"), "{shown}");
    }
    let config = good(
        "admin: {listen: 127.0.0.1:1, token: hunter2}\nmodels: [{name: a, endpoints: [{url: \"http://h\", api_key: hunter2}], profiles: [{name: p, engine: vllm, env: {T: hunter2}}]}]\n",
    );
    assert!(!format!("{config:?}").contains("hunter2"), "{config:?}");
    assert_eq!(config.admin.token.unwrap().to_string(), "***");
}

#[test]
fn syntax_errors_have_a_line_a_caret_and_a_hint() {
    let cases = [
        (
            "models:\n\t- name: a\n",
            "etc/llmgw.yaml:2:1: found character that cannot start any token, while scanning for the next token\n  2 | \t- name: a\n    | ^\n  help: indent with spaces: this line begins with a tab",
        ),
        (
            "models:\n  - {name: a, endpoints: [\nlisten: x\n",
            "etc/llmgw.yaml:4:1: did not find expected ',' or ']', while parsing a flow sequence at line 2 column 26",
        ),
        ("models: [{api_key: ${X}}]\n", "etc/llmgw.yaml:1:"),
        (
            "a: b: c\n",
            "etc/llmgw.yaml:1:5: mapping values are not allowed in this context",
        ),
        (
            "models: []\n---\nmodels: []\n",
            "etc/llmgw.yaml: deserializing from YAML containing more than one document is not supported\n  help: keep one document",
        ),
        (
            "models: *x\n",
            "etc/llmgw.yaml:1:9: unknown anchor\n  1 | models: *x\n    |         ^\n  help: ",
        ),
        ("models: !x []\n", "etc/llmgw.yaml:1:9: "),
        (
            "",
            "etc/llmgw.yaml: the file is empty\n  help: a configuration lists at least `models`, and may set `listen: 127.0.0.1:8080`",
        ),
        ("# nothing\n\n---\n", "etc/llmgw.yaml: the file is empty"),
    ];
    for (text, expected) in cases {
        let shown = read(text).unwrap_err().to_string();
        assert!(
            shown.starts_with(expected),
            "{text:?} gave\n{shown}\ninstead of\n{expected}"
        );
    }
}

#[test]
fn a_problem_is_shown_with_file_line_path_and_caret() {
    let text = "models:\n  - name: a\n    endpoints:\n      - {url: \"http://h\", slots: four}\n";
    assert_eq!(
        read(text).unwrap_err().to_string(),
        "etc/llmgw.yaml:4:34: models[0].endpoints[0].slots: expected a whole number from 1 to 65536, found the text `four`\n  \
           4 |       - {url: \"http://h\", slots: four}\n    \
             |                                  ^"
    );
    let many = "models: []\nlog: [".to_owned()
        + &"x, ".repeat(3)
        + "]\nlimits: {"
        + &(0..30).map(|n| format!("k{n}: 1, ")).collect::<String>()
        + "}\n";
    let errors = read(&many).unwrap_err();
    assert_eq!((errors.problems.len(), errors.omitted), (20, 11));
    assert!(errors.to_string().ends_with("etc/llmgw.yaml: and 11 more"));
}

#[test]
fn aliases_of_yaml_work_and_bombs_do_not() {
    let config = good(
        "models:\n  - name: a\n    endpoints: &e [{url: \"http://h\"}]\n  - {name: b, endpoints: *e}\n",
    );
    assert_eq!(config.catalog.models[1].endpoints.len(), 1);
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for n in 1..10 {
        let items = vec![format!("*a{}", n - 1); 9].join(", ");
        bomb += &format!("a{n}: &a{n} [{items}]\n");
    }
    assert!(
        read(&bomb)
            .unwrap_err()
            .to_string()
            .contains("repetition limit exceeded")
    );
    let deep = "a: ".to_owned() + &"[".repeat(500) + &"]".repeat(500);
    assert!(
        read(&deep)
            .unwrap_err()
            .to_string()
            .contains("recursion limit exceeded")
    );
}

#[test]
fn a_file_that_is_no_text_says_so() {
    let directory = std::env::temp_dir().join(format!("llmgw-config-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let file = directory.join("f.yaml");
    let said = |path: &Path| load(path).unwrap_err().problems[0].wrong.clone();
    assert_eq!(said(&directory), "is a directory");
    assert_eq!(said(&file), "no such file");
    std::fs::write(&file, b"models: []\nx: \xff\n").unwrap();
    assert_eq!(said(&file), "is not UTF-8: byte 0xff in line 2");
    std::fs::write(&file, vec![b'#'; (8 << 20) + 1]).unwrap();
    assert_eq!(said(&file), "is larger than 8 MiB");
    std::fs::write(&file, "models: []\n").unwrap();
    assert_eq!(load(&file).unwrap().source, file);
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn an_engine_without_a_plugin_is_found_once_the_plugins_are_known() {
    let config =
        good("models:\n  - name: a\n    endpoints:\n      - {url: \"http://h\", engine: vlm}\n");
    assert!(check_engines(&config, &["vlm"]).is_ok());
    let errors = check_engines(&config, &["vllm", "openai"]).unwrap_err();
    assert_eq!(
        errors.to_string().lines().next(),
        Some(
            "etc/llmgw.yaml:4:35: models[0].endpoints[0].engine: no engine plugin is called `vlm`"
        )
    );
    assert_eq!(errors.problems[0].right, "did you mean `vllm`?");
}

#[test]
fn changes_that_need_a_restart_are_named() {
    let old = good(EXAMPLE);
    assert!(needs_restart(&old, &old).is_empty());
    let new = good(
        &EXAMPLE
            .replace("8080 ", "8090 ")
            .replace("state: .llmgw", "state: other")
            .replace("retries: 2", "retries: 3"),
    );
    assert_eq!(needs_restart(&old, &new), ["listen", "state"]);
    assert_ne!(old.digest(), new.digest());
    // It may be that somebody knows the old one.
    let token = |token: &str| {
        good(&format!(
            "admin: {{listen: 127.0.0.1:1, token: {token}}}\nmodels: []\n"
        ))
    };
    assert!(needs_restart(&token("a"), &token("a")).is_empty());
    assert_eq!(needs_restart(&token("a"), &token("b")), ["admin.token"]);
    // Other files are taken at once; another kind of listener is not.
    let of = |listen: &str, agents: &str| {
        good(&format!(
            "listen: {{listen: 1.2.3.4:1{listen}}}\nagents: {{{agents}}}\nmodels: []\n"
        ))
    };
    let old = of(", tls: {cert: a, key: b}", "tls: {cert: c, key: d, ca: e}");
    let files = of(", tls: {cert: f, key: g}", "tls: {cert: h, key: i, ca: j}");
    assert!(needs_restart(&old, &files).is_empty());
    let other = of("", "tls: {cert: c, key: d}, require_identity: false");
    assert_eq!(needs_restart(&old, &other)[..2], ["tls", "agents.tls"]);
}

#[test]
fn a_recovery_that_agents_may_not_be_back_in_is_told() {
    let of = |recovery: &str| {
        let config = good(&format!("agents: {{recovery: {recovery}}}\nmodels: []\n"));
        recovery_warning(&config)
    };
    for short in ["0s", "5s", "11999ms"] {
        let told = of(short).unwrap_or_default();
        assert!(told.starts_with("`agents.recovery` "), "{short}: {told}");
        assert!(told.contains(" is less than 12s: "), "{short}: {told}");
    }
    assert_eq!(of("12s"), None);
    assert_eq!(recovery_warning(&good("agents: {}\nmodels: []\n")), None);
    assert_eq!(recovery_warning(&good("models: []\n")), None);
}

#[test]
fn what_is_not_enforced_yet_and_what_is_probably_not_meant_is_said() {
    assert!(not_yet_enforced(&good(EXAMPLE)).is_empty());
    let alone = "models:\n- {name: m, profiles: [{name: p, engine: llamacpp}]}\n";
    let told = not_yet_enforced(&good(alone)).join("\n");
    assert!(told.contains("without `agents`"), "{told}");
    assert!(not_yet_enforced(&good(&model("aliases: []"))).is_empty());
    assert_eq!(
        warnings(&good("models: []\n")),
        ["`models` is empty: every request is answered with 404"]
    );
    let text = model("aliases: [b]") + "tenants: [{name: t, models: [b]}]\n";
    assert_eq!(
        warnings(&good(&text)),
        [
            "tenant `t` has no `keys`: nobody can be it",
            "tenant `t`: `b` matches no model; it is an alias of `a`, name that"
        ]
    );
}

#[test]
fn agents_that_anybody_can_let_in_are_warned_about() {
    let tls = "cert: c.pem, key: k.pem, ca: ca.pem";
    let open = model("aliases: []")
        + &format!(
            "agents: {{tls: {{{tls}, ca_key: ca-key.pem}}, require_identity: false, deny_serials: [\"0a\"]}}\n"
        );
    let said = warnings(&good(&open));
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(
        said[0].starts_with("`agents.tls.ca_key` is set, and `admin.token` is not: "),
        "{said:?}"
    );
    assert!(
        said[1].starts_with(
            "`agents.deny_serials` keeps nobody out without `agents.require_identity`"
        ),
        "{said:?}"
    );
    let closed = model("aliases: []")
        + &format!(
            "admin: {{token: a-long-enough-token}}\nagents: {{tls: {{{tls}, ca_key: ca-key.pem}}, deny_serials: [\"0a\"]}}\n"
        );
    assert_eq!(warnings(&good(&closed)), Vec::<String>::new());
}

#[test]
fn an_admin_address_that_others_reach_is_warned_about_unless_it_has_both_token_and_tls() {
    let token = "token: a-long-enough-token";
    let tls = "tls: {cert: c.pem, key: k.pem}";
    for (admin, expected) in [
        (
            format!("listen: 0.0.0.0:8081, {tls}"),
            Some("`admin.token` is not set: TLS keeps nobody out"),
        ),
        (
            format!("listen: '[::]:8081', {token}"),
            Some("`admin.tls` is not set: whoever is on the way reads `admin.token`"),
        ),
        (format!("listen: 10.0.0.1:8081, {token}, {tls}"), None),
        ("listen: 127.0.0.1:8081".to_owned(), None),
        (format!("listen: 127.0.0.1:8081, {token}"), None),
        (format!("listen: '[::1]:8081', {tls}"), None),
    ] {
        let said = warnings(&good(
            &(model("aliases: []") + &format!("admin: {{{admin}}}\n")),
        ));
        match expected {
            Some(expected) => assert!(
                said.len() == 1 && said[0].contains(expected),
                "{admin}: {said:?}"
            ),
            None => assert!(said.is_empty(), "{admin}: {said:?}"),
        }
    }
}
