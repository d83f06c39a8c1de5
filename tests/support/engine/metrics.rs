//! `/metrics` of each kind: the series that a gateway reads, in the format and with the labels that were recorded.

use super::behave::MetricsValues;
use super::options::Kind;

/// What the page shows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Numbers {
    pub running: f64,
    pub waiting: f64,
    /// From 0 to 1.
    pub kv: f64,
    pub prompt_tokens: u64,
    pub tokens: u64,
    pub finished: u64,
}

impl Numbers {
    /// Shows what the directives say in place of the truth.
    pub fn with(self, values: MetricsValues) -> Numbers {
        Numbers {
            running: values.running.unwrap_or(self.running),
            waiting: values.waiting.unwrap_or(self.waiting),
            kv: values.kv.unwrap_or(self.kv),
            ..self
        }
    }
}

/// The content type of the page.
pub fn content_type(kind: Kind) -> &'static str {
    match kind {
        Kind::Vllm => "text/plain; version=1.0.0; charset=utf-8",
        Kind::Llamacpp => "text/plain; version=0.0.4",
        Kind::Sglang | Kind::Openai => "text/plain; version=0.0.4; charset=utf-8",
    }
}

/// The page, or none for a hosted server.
pub fn page(kind: Kind, model: &str, numbers: &Numbers) -> Option<String> {
    match kind {
        Kind::Vllm => Some(vllm(model, numbers)),
        Kind::Sglang => Some(sglang(model, numbers)),
        Kind::Llamacpp => Some(llamacpp(numbers)),
        Kind::Openai => None,
    }
}

fn vllm(model: &str, numbers: &Numbers) -> String {
    let labels = format!(r#"engine="0",model_name="{model}""#);
    let (running, waiting, kv) = (numbers.running, numbers.waiting, numbers.kv);
    let mut page = String::new();
    let mut series = |name: &str, class: &str, help: &str, lines: &[(&str, f64)]| {
        page.push_str(&format!(
            "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {class}\n"
        ));
        for (more, value) in lines {
            page.push_str(&format!("vllm:{name}{{{labels}{more}}} {value:?}\n"));
        }
    };
    series(
        "num_requests_running",
        "gauge",
        "Number of requests in model execution batches.",
        &[("", running)],
    );
    series(
        "num_requests_waiting",
        "gauge",
        "Number of requests waiting to be processed.",
        &[("", waiting)],
    );
    series(
        "num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests by reason.",
        &[
            (r#",reason="capacity""#, waiting),
            (r#",reason="deferred""#, 0.0),
        ],
    );
    series(
        "engine_sleep_state",
        "gauge",
        "Engine sleep state.",
        &[(r#",sleep_state="awake""#, 1.0)],
    );
    series(
        "kv_cache_usage_perc",
        "gauge",
        "KV-cache usage. 1 means 100 percent usage.",
        &[("", kv)],
    );
    series(
        "prompt_tokens_total",
        "counter",
        "Number of prefill tokens processed.",
        &[("", numbers.prompt_tokens as f64)],
    );
    series(
        "prompt_tokens_created",
        "gauge",
        "Number of prefill tokens processed.",
        &[("", 1.795970405372148e9)],
    );
    series(
        "generation_tokens_total",
        "counter",
        "Number of generation tokens processed.",
        &[("", numbers.tokens as f64)],
    );
    series(
        "request_success_total",
        "counter",
        "Count of successfully processed requests.",
        &[
            (r#",finished_reason="stop""#, 0.0),
            (r#",finished_reason="length""#, numbers.finished as f64),
        ],
    );
    series(
        "time_to_first_token_seconds",
        "histogram",
        "Histogram of time to first token in seconds.",
        &[],
    );
    for bound in ["0.1", "1.0", "+Inf"] {
        let count = numbers.finished as f64;
        page.push_str(&format!(
            "vllm:time_to_first_token_seconds_bucket{{{labels},le=\"{bound}\"}} {count:?}\n"
        ));
    }
    page
}

fn sglang(model: &str, numbers: &Numbers) -> String {
    let labels = format!(
        r#"engine_type="unified",model_name="{model}",moe_ep_rank="0",pp_rank="0",tp_rank="0""#
    );
    let mut page = String::new();
    let gauges = [
        (
            "max_total_num_tokens",
            "Maximum total number of tokens in the KV cache pool.",
            8192.0,
        ),
        (
            "num_running_reqs",
            "The number of running requests.",
            numbers.running,
        ),
        (
            "num_queue_reqs",
            "The number of requests in the waiting queue.",
            numbers.waiting,
        ),
        (
            "num_grammar_queue_reqs",
            "The number of requests in the grammar waiting queue.",
            0.0,
        ),
        ("token_usage", "The token usage.", numbers.kv),
        (
            "full_token_usage",
            "The token usage for full attention layers.",
            numbers.kv,
        ),
        (
            "num_used_tokens",
            "The number of used tokens.",
            (numbers.kv * 8192.0).round(),
        ),
        (
            "gen_throughput",
            "The generation throughput (token/s).",
            0.0,
        ),
        ("cache_hit_rate", "The prefix cache hit rate.", 0.0),
    ];
    for (name, help, value) in gauges {
        page.push_str(&format!("# HELP sglang:{name} {help}\n# TYPE sglang:{name} gauge\nsglang:{name}{{{labels}}} {value:?}\n"));
    }
    let counters = [
        (
            "prompt_tokens_total",
            "Number of prefill tokens processed.",
            numbers.prompt_tokens,
        ),
        (
            "generation_tokens_total",
            "Number of generation tokens processed.",
            numbers.tokens,
        ),
        (
            "num_requests_total",
            "Number of requests processed.",
            numbers.finished,
        ),
    ];
    for (name, help, value) in counters {
        page.push_str(&format!(
            "# HELP sglang:{name} {help}\n# TYPE sglang:{name} counter\n"
        ));
        for (streaming, share) in [("false", 0.0), ("true", value as f64)] {
            page.push_str(&format!(
                "sglang:{name}{{engine_type=\"unified\",is_streaming=\"{streaming}\",model_name=\"{model}\"}} {share:?}\n"
            ));
        }
    }
    page
}

fn llamacpp(numbers: &Numbers) -> String {
    let rows = [
        (
            "prompt_tokens_total",
            "counter",
            "Number of prompt tokens processed, excluding cached tokens",
            numbers.prompt_tokens as f64,
        ),
        (
            "prompt_tokens_cached_total",
            "counter",
            "Number of prompt tokens reused from the cache",
            0.0,
        ),
        (
            "prompt_seconds_total",
            "counter",
            "Total time spent processing prompts",
            0.0,
        ),
        (
            "tokens_predicted_total",
            "counter",
            "Number of generation tokens processed",
            numbers.tokens as f64,
        ),
        (
            "tokens_predicted_seconds_total",
            "counter",
            "Total time spent generating tokens",
            0.0,
        ),
        (
            "n_decode_total",
            "counter",
            "Total number of llama_decode() calls",
            numbers.tokens as f64,
        ),
        (
            "n_tokens_max",
            "counter",
            "Largest observed sequence length (prompt + generation)",
            0.0,
        ),
        (
            "spec_decode_num_draft_tokens_total",
            "counter",
            "Speculative: Total draft tokens generated",
            0.0,
        ),
        (
            "spec_decode_num_accepted_tokens_total",
            "counter",
            "Speculative: Total draft tokens accepted",
            0.0,
        ),
        (
            "spec_decode_num_drafts_total",
            "counter",
            "Speculative: Total speculative decoding verification steps",
            0.0,
        ),
        (
            "prompt_tokens_seconds",
            "gauge",
            "Average prompt throughput in tokens/s",
            0.0,
        ),
        (
            "predicted_tokens_seconds",
            "gauge",
            "Average generation throughput in tokens/s",
            0.0,
        ),
        (
            "requests_processing",
            "gauge",
            "Number of requests processing",
            numbers.running,
        ),
        (
            "requests_deferred",
            "gauge",
            "Number of requests deferred",
            numbers.waiting,
        ),
        (
            "n_busy_slots_per_decode",
            "gauge",
            "Average number of busy slots per llama_decode() call",
            0.0,
        ),
    ];
    let mut page = String::new();
    for (name, class, help, value) in rows {
        // No labels, and whole numbers without a point.
        page.push_str(&format!("# HELP llamacpp:{name} {help}\n# TYPE llamacpp:{name} {class}\nllamacpp:{name} {value}\n"));
    }
    page
}
