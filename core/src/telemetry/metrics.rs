//! Counts of requests, kept so that finishing one is a few additions: no lock, and one hash of the tenant's name.
//!
//! Labels are bounded: models, tenants and bands are names from the configuration, codes and kinds are fixed lists.
//! What describes a replica is not here: it is rendered from the live fleet at each scrape (`admin::page`), and so
//! vanishes with the replica.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use arc_swap::ArcSwap;
use foldhash::fast::RandomState;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

use super::access::{AccessRecord, Outcome};
use super::exposition::{counters, family, gauges};
use super::histogram::Seconds;

/// Pairs of tenant and band counted apart within a model; further ones are counted as `other`. The names come from
/// the configuration, so reaching it is a mistake in the caller: a bound on what that costs.
pub const SERIES_PER_MODEL_MAX: usize = 4096;
/// Pairs of node and reason by which a model's failures are counted apart; further ones are counted as `other`. Nodes come and go.
pub const FAILURE_SERIES_MAX: usize = 1024;
/// Models counted apart; further ones are counted as `other`.
pub const MODELS_MAX: usize = 4096;

/// The values of the label `code`: how the request ended, and why if not well.
pub const CODES: [&str; 21] = [
    "ok",
    "client_left",
    "engine_4xx",
    "engine_5xx",
    "engine_error",
    "invalid_json",
    "missing_model",
    "unreadable_body",
    "invalid_api_key",
    "model_not_found",
    "unknown_route",
    "body_too_large",
    "queue_full",
    "tenant_limit",
    "upstream_failed",
    "queue_timeout",
    "no_replica",
    "shutting_down",
    "first_byte_timeout",
    "idle_timeout",
    "other",
];

const UNKNOWN: &str = "unknown";
const OTHER: &str = "other";

/// Why an attempt at a replica failed: the label `kind` of `llmgw_upstream_errors_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamError {
    /// No connection: refused, unreachable, a name that does not resolve.
    Connect,
    ConnectTimeout,
    /// The connection closed or broke before the first byte of an answer.
    Closed,
    FirstByteTimeout,
    /// Silent for too long within an answer.
    IdleTimeout,
    /// The answer ended before its proper end.
    Truncated,
    /// The engine sent an error as an event of a stream.
    ErrorEvent,
    /// A status of 500 or above.
    Status,
    /// Not HTTP, or not an answer that can be passed on.
    Protocol,
}

impl UpstreamError {
    pub const ALL: [UpstreamError; 9] = [
        UpstreamError::Connect,
        UpstreamError::ConnectTimeout,
        UpstreamError::Closed,
        UpstreamError::FirstByteTimeout,
        UpstreamError::IdleTimeout,
        UpstreamError::Truncated,
        UpstreamError::ErrorEvent,
        UpstreamError::Status,
        UpstreamError::Protocol,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            UpstreamError::Connect => "connect",
            UpstreamError::ConnectTimeout => "connect_timeout",
            UpstreamError::Closed => "closed",
            UpstreamError::FirstByteTimeout => "first_byte_timeout",
            UpstreamError::IdleTimeout => "idle_timeout",
            UpstreamError::Truncated => "truncated",
            UpstreamError::ErrorEvent => "error_event",
            UpstreamError::Status => "status",
            UpstreamError::Protocol => "protocol",
        }
    }
}

/// The clients of `listen`.
#[derive(Debug, Default)]
pub struct ClientMetrics {
    pub open: Gauge,
    pub max: Gauge,
    /// Those that had to wait for room.
    pub waited: Counter,
}

/// All counts of the process.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Also held by the access log, which counts.
    pub access_records_dropped: Counter,
    /// Kept by the listener.
    pub clients: ClientMetrics,
    reloads_ok: Counter,
    reloads_failed: Counter,
    models: ArcSwap<Map<ModelMetrics>>,
    /// Taken to add a model, not to read one.
    growing: Mutex<()>,
    unknown: OnceLock<Arc<ModelMetrics>>,
}

/// The counts of one model. The catalog's model holds it, so that a request finds it without a look-up.
#[derive(Debug)]
pub struct ModelMetrics {
    pub name: Arc<str>,
    pub inflight: Gauge,
    retries: Counter,
    errors: [AtomicU64; UpstreamError::ALL.len()],
    /// Of replicas that were started, by node and reason.
    failures: Mutex<BTreeMap<(String, String), u64>>,
    duration: Seconds,
    first_byte: Seconds,
    series: ArcSwap<Series>,
    /// Taken to add a tenant or a band, not to count.
    growing: Mutex<()>,
}

/// The counts of one (model, tenant, band).
#[derive(Debug)]
pub struct RequestMetrics {
    tenant: Arc<str>,
    band: Arc<str>,
    codes: [AtomicU64; CODES.len()],
    tokens: Arc<Tokens>,
    queue: Arc<Seconds>,
}

type Map<T> = HashMap<Arc<str>, Arc<T>, RandomState>;

/// What a model's counts are split by. Replaced whole when a name is new.
#[derive(Clone, Debug, Default)]
struct Series {
    requests: HashMap<Arc<str>, Vec<Arc<RequestMetrics>>, RandomState>,
    tokens: Map<Tokens>,
    queues: Map<Seconds>,
}

/// The token counts of one (model, tenant).
#[derive(Debug, Default)]
struct Tokens {
    input: AtomicU64,
    cached: AtomicU64,
    output: AtomicU64,
    /// In thousandths of a price.
    cost: AtomicU64,
}

impl Metrics {
    /// The counts of a catalog model, made when first asked for. An empty name is `unknown`.
    pub fn model(&self, name: &str) -> Arc<ModelMetrics> {
        let name = if name.is_empty() { UNKNOWN } else { name };
        if let Some(model) = self.models.load().get(name) {
            return model.clone();
        }
        let _growing = self
            .growing
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let models = self.models.load();
        let name = if models.len() < MODELS_MAX {
            name
        } else {
            OTHER
        };
        if let Some(model) = models.get(name) {
            return model.clone();
        }
        let mut models = Map::clone(&models);
        let model = models
            .entry(name.into())
            .or_insert_with(|| Arc::new(ModelMetrics::new(name)))
            .clone();
        self.models.store(Arc::new(models));
        model
    }

    /// Where requests are counted whose model is none of the catalog's.
    pub fn unknown_model(&self) -> &ModelMetrics {
        self.unknown.get_or_init(|| self.model(UNKNOWN))
    }

    /// Forgets models that `keep` refuses: those that left the catalog. Requests still in flight there go uncounted.
    pub fn retain_models(&self, keep: impl Fn(&str) -> bool) {
        let _growing = self
            .growing
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut models = Map::clone(&self.models.load());
        models.retain(|name, _| &**name == UNKNOWN || &**name == OTHER || keep(name));
        self.models.store(Arc::new(models));
    }

    /// Counts a reload of the configuration.
    pub fn config_reloaded(&self, ok: bool) {
        if ok {
            self.reloads_ok.inc()
        } else {
            self.reloads_failed.inc()
        };
    }

    /// Writes every family, models and tenants in the order of their names.
    pub fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut models: Vec<_> = self.models.load().values().cloned().collect();
        models.sort_by(|a, b| a.name.cmp(&b.name));
        let series: Vec<_> = models
            .iter()
            .map(|model| (&*model.name, model.series.load_full()))
            .collect();
        encode_requests(encoder, &series)?;
        encode_models(encoder, &models)?;
        encode_failures(encoder, &models)?;
        let reloads = vec![
            ([("result", "ok")], self.reloads_ok.get()),
            ([("result", "failed")], self.reloads_failed.get()),
        ];
        counters(
            encoder,
            "llmgw_config_reloads",
            "Reloads of the configuration.",
            reloads,
        )?;
        let dropped = vec![([], self.access_records_dropped.get())];
        counters(
            encoder,
            "llmgw_access_records_dropped",
            "Access records that were not written.",
            dropped,
        )?;
        self.clients.encode(encoder)?;
        let version = vec![([("version", env!("CARGO_PKG_VERSION"))], 1.0)];
        gauges(
            encoder,
            "llmgw_build_info",
            "The version that runs.",
            version,
        )
    }
}

impl ClientMetrics {
    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, gauge) in [
            (
                "llmgw_client_connections",
                "Clients that are connected.",
                &self.open,
            ),
            (
                "llmgw_client_connections_max",
                "Clients that may be connected: the others wait.",
                &self.max,
            ),
        ] {
            gauges(encoder, name, help, vec![([], gauge.get() as f64)])?;
        }
        counters(
            encoder,
            "llmgw_client_connections_waited",
            "Clients that had to wait until another one left.",
            vec![([], self.waited.get())],
        )
    }
}

impl ModelMetrics {
    fn new(name: &str) -> ModelMetrics {
        ModelMetrics {
            name: name.into(),
            inflight: Gauge::default(),
            retries: Counter::default(),
            errors: Default::default(),
            failures: Mutex::default(),
            duration: Seconds::default(),
            first_byte: Seconds::default(),
            series: ArcSwap::default(),
            growing: Mutex::default(),
        }
    }

    /// The counts of a tenant's requests in a band, made when first asked for. Both are names from the configuration;
    /// an empty one is `unknown`.
    pub fn request(&self, tenant: &str, band: &str) -> Arc<RequestMetrics> {
        let tenant = if tenant.is_empty() { UNKNOWN } else { tenant };
        let band = if band.is_empty() { UNKNOWN } else { band };
        match self.series.load().find(tenant, band) {
            Some(found) => found.clone(),
            None => self.grow(tenant, band),
        }
    }

    /// Counts a request that ended.
    pub fn finished(&self, record: &AccessRecord) {
        let request = self.request(&record.tenant, &record.band);
        request.codes[code_index(record)].fetch_add(1, Ordering::Relaxed);
        self.duration.observe(record.total);
        if let Some(first_byte) = record.first_byte {
            self.first_byte.observe(first_byte);
        }
        // Not for those refused before they came to a queue.
        if record.attempts > 0 || !record.queue.is_zero() {
            request.queue.observe(record.queue);
        }
        let tokens = [
            (&request.tokens.input, record.input_tokens),
            (&request.tokens.cached, record.cached_tokens),
            (&request.tokens.output, record.output_tokens),
            (&request.tokens.cost, Some(record.cost)),
        ];
        for (counter, count) in tokens {
            if let Some(count) = count {
                counter.fetch_add(count, Ordering::Relaxed);
            }
        }
    }

    /// Counts an attempt after a request's first one.
    pub fn retried(&self) {
        self.retries.inc();
    }

    /// Counts an attempt at a replica that failed.
    pub fn upstream_error(&self, kind: UpstreamError) {
        self.errors[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a replica that failed; the node is empty where it did not get as far as one.
    pub fn replica_failed(&self, node: &str, reason: &str) {
        let mut failures = self
            .failures
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut key = (node.to_owned(), reason.to_owned());
        if failures.len() >= FAILURE_SERIES_MAX && !failures.contains_key(&key) {
            key = (OTHER.to_owned(), OTHER.to_owned());
        }
        *failures.entry(key).or_default() += 1;
    }

    fn grow(&self, tenant: &str, band: &str) -> Arc<RequestMetrics> {
        let _growing = self
            .growing
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let series = self.series.load();
        let known = series.requests.values().map(Vec::len).sum::<usize>();
        let full = known >= SERIES_PER_MODEL_MAX;
        let (tenant, band) = if full { (OTHER, OTHER) } else { (tenant, band) };
        if let Some(found) = series.find(tenant, band) {
            return found.clone();
        }
        let mut series = Series::clone(&series);
        let (tenant, band): (Arc<str>, Arc<str>) = (tenant.into(), band.into());
        let request = Arc::new(RequestMetrics {
            tenant: tenant.clone(),
            band: band.clone(),
            codes: Default::default(),
            tokens: series.tokens.entry(tenant.clone()).or_default().clone(),
            queue: series.queues.entry(band).or_default().clone(),
        });
        series
            .requests
            .entry(tenant)
            .or_default()
            .push(request.clone());
        self.series.store(Arc::new(series));
        request
    }
}

impl RequestMetrics {
    /// Requests that ended with `code`, one of [`CODES`].
    pub fn count(&self, code: &str) -> u64 {
        let index = CODES.iter().position(|known| *known == code);
        index.map_or(0, |index| self.codes[index].load(Ordering::Relaxed))
    }
}

impl Series {
    fn find(&self, tenant: &str, band: &str) -> Option<&Arc<RequestMetrics>> {
        self.requests
            .get(tenant)?
            .iter()
            .find(|request| &*request.band == band)
    }
}

/// What the client was told counts most; a request that was answered well but not read to the end is `client_left`.
fn code_index(record: &AccessRecord) -> usize {
    let code = match record.outcome {
        // An error in a stream comes under a status of 200: it stays `engine_error`.
        Outcome::EngineError if (400..500).contains(&record.status) => "engine_4xx",
        Outcome::EngineError if record.status >= 500 => "engine_5xx",
        Outcome::EngineError => "engine_error",
        _ if !record.code.is_empty() => record.code,
        Outcome::Ok => "ok",
        Outcome::ClientLeft => "client_left",
        Outcome::UpstreamFailed => "upstream_failed",
        Outcome::Refused | Outcome::Open => OTHER,
    };
    CODES
        .iter()
        .position(|known| *known == code)
        .unwrap_or(CODES.len() - 1)
}

type ModelSeries<'a> = [(&'a str, Arc<Series>)];

fn encode_requests(encoder: &mut DescriptorEncoder<'_>, models: &ModelSeries<'_>) -> fmt::Result {
    let mut requests = Vec::new();
    let mut tokens = Vec::new();
    let mut costs = Vec::new();
    let mut queues = Vec::new();
    for (model, series) in models {
        let mut rows: Vec<_> = series.requests.values().flatten().collect();
        rows.sort_by(|a, b| (&a.tenant, &a.band).cmp(&(&b.tenant, &b.band)));
        for row in rows {
            for (code, count) in CODES.iter().zip(&row.codes) {
                let labels = [
                    ("model", *model),
                    ("tenant", &*row.tenant),
                    ("band", &*row.band),
                    ("code", *code),
                ];
                let count = count.load(Ordering::Relaxed);
                if count > 0 {
                    requests.push((labels, count));
                }
            }
        }
        for (tenant, counts) in by_name(&series.tokens) {
            for (kind, count) in [
                ("input", &counts.input),
                ("cached", &counts.cached),
                ("output", &counts.output),
            ] {
                let labels = [("model", *model), ("tenant", tenant), ("kind", kind)];
                tokens.push((labels, count.load(Ordering::Relaxed)));
            }
            let labels = [("model", *model), ("tenant", tenant)];
            costs.push((labels, counts.cost.load(Ordering::Relaxed).div_ceil(1_000)));
        }
        queues.extend(
            by_name(&series.queues)
                .map(|(band, seconds)| ([("model", *model), ("band", band)], seconds)),
        );
    }
    counters(
        encoder,
        "llmgw_requests",
        "Requests that ended, by how.",
        requests,
    )?;
    counters(
        encoder,
        "llmgw_tokens",
        "Tokens of requests that ended; cached ones are part of the input.",
        tokens,
    )?;
    counters(
        encoder,
        "llmgw_cost",
        "What requests that ended were charged, in prices of tokens.",
        costs,
    )?;
    let help = "Time that requests waited for their turn on a replica.";
    family(
        encoder,
        "llmgw_queue_seconds",
        help,
        MetricType::Histogram,
        queues.into_iter(),
    )
}

fn encode_models(encoder: &mut DescriptorEncoder<'_>, models: &[Arc<ModelMetrics>]) -> fmt::Result {
    let seconds = [
        (
            "llmgw_request_duration_seconds",
            "From a request's arrival to its end.",
        ),
        (
            "llmgw_first_byte_seconds",
            "From a request's arrival to the first byte of its answer.",
        ),
    ];
    for (which, (name, help)) in seconds.into_iter().enumerate() {
        let rows = models.iter().map(|model| {
            let seconds = if which == 0 {
                &model.duration
            } else {
                &model.first_byte
            };
            ([("model", &*model.name)], seconds)
        });
        family(encoder, name, help, MetricType::Histogram, rows)?;
    }
    let inflight = models
        .iter()
        .map(|model| ([("model", &*model.name)], model.inflight.get() as f64))
        .collect();
    gauges(
        encoder,
        "llmgw_inflight_requests",
        "Requests that are being served or wait.",
        inflight,
    )?;
    let retries = models
        .iter()
        .map(|model| ([("model", &*model.name)], model.retries.get()))
        .collect();
    counters(
        encoder,
        "llmgw_retries",
        "Attempts after a request's first one.",
        retries,
    )?;
    let mut errors = Vec::new();
    for model in models {
        for (kind, count) in UpstreamError::ALL.iter().zip(&model.errors) {
            let labels = [("model", &*model.name), ("kind", kind.as_str())];
            errors.push((labels, count.load(Ordering::Relaxed)));
        }
    }
    counters(
        encoder,
        "llmgw_upstream_errors",
        "Attempts at a replica that failed, by how.",
        errors,
    )
}

fn encode_failures(
    encoder: &mut DescriptorEncoder<'_>,
    models: &[Arc<ModelMetrics>],
) -> fmt::Result {
    let of_model = |model: &Arc<ModelMetrics>| {
        let failures = model.failures.lock();
        failures
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .clone()
    };
    let all: Vec<_> = models
        .iter()
        .map(|model| (&*model.name, of_model(model)))
        .collect();
    let rows = all.iter().flat_map(|(model, failures)| {
        failures.iter().map(|((node, reason), count)| {
            let labels = [("model", *model), ("node", node), ("reason", reason)];
            (labels, *count)
        })
    });
    counters(
        encoder,
        "llmgw_replica_failures",
        "Replicas that were started and failed, by where and why.",
        rows.collect(),
    )
}

fn by_name<T>(map: &Map<T>) -> impl Iterator<Item = (&str, &T)> {
    let mut rows: Vec<_> = map
        .iter()
        .map(|(name, value)| (&**name, &**value))
        .collect();
    rows.sort_by_key(|(name, _)| *name);
    rows.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::exposition::page;
    use crate::telemetry::exposition::tests::value;
    use prometheus_client::collector::Collector;
    use std::time::Duration;

    #[derive(Clone)]
    struct All(Arc<Metrics>);

    impl fmt::Debug for All {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("All")
        }
    }

    impl Collector for All {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            self.0.encode(&mut encoder)
        }
    }

    fn record(outcome: Outcome, status: u16, code: &'static str) -> AccessRecord {
        AccessRecord {
            tenant: "research".into(),
            band: "batch".into(),
            outcome,
            status,
            code,
            ..AccessRecord::default()
        }
    }

    #[test]
    fn the_code_says_how_a_request_ended() {
        let cases = [
            (Outcome::Ok, 200, "", "ok"),
            (Outcome::ClientLeft, 200, "", "client_left"),
            (Outcome::ClientLeft, 0, "", "client_left"),
            (Outcome::EngineError, 400, "", "engine_4xx"),
            (Outcome::EngineError, 501, "engine_error", "engine_5xx"),
            (Outcome::EngineError, 200, "engine_error", "engine_error"),
            (Outcome::UpstreamFailed, 200, "", "upstream_failed"),
            (
                Outcome::UpstreamFailed,
                504,
                "first_byte_timeout",
                "first_byte_timeout",
            ),
            (Outcome::Refused, 429, "queue_full", "queue_full"),
            (Outcome::Refused, 418, "teapot", "other"),
            (Outcome::Refused, 418, "", "other"),
        ];
        for (outcome, status, code, expected) in cases {
            assert_eq!(
                CODES[code_index(&record(outcome, status, code))],
                expected,
                "{outcome:?} {status} {code}"
            );
        }
    }

    #[test]
    fn upstream_errors_index_their_own_name() {
        for (index, kind) in UpstreamError::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
        }
    }

    #[test]
    fn a_finished_request_shows_in_every_family() {
        let metrics = Arc::new(Metrics::default());
        let model = metrics.model("smollm2");
        model.upstream_error(UpstreamError::Closed);
        model.retried();
        model.finished(&AccessRecord {
            attempts: 2,
            queue: Duration::from_millis(3),
            first_byte: Some(Duration::from_millis(40)),
            total: Duration::from_millis(700),
            input_tokens: Some(10),
            cached_tokens: Some(4),
            output_tokens: Some(20),
            ..record(Outcome::Ok, 200, "")
        });
        let text = page(All(metrics));
        for (series, expected) in [
            (
                "llmgw_requests_total{model=\"smollm2\",tenant=\"research\",band=\"batch\",code=\"ok\"}",
                1.0,
            ),
            (
                "llmgw_tokens_total{model=\"smollm2\",tenant=\"research\",kind=\"cached\"}",
                4.0,
            ),
            (
                "llmgw_tokens_total{model=\"smollm2\",tenant=\"research\",kind=\"output\"}",
                20.0,
            ),
            (
                "llmgw_queue_seconds_bucket{model=\"smollm2\",band=\"batch\",le=\"0.005\"}",
                1.0,
            ),
            (
                "llmgw_request_duration_seconds_bucket{model=\"smollm2\",le=\"0.5\"}",
                0.0,
            ),
            (
                "llmgw_request_duration_seconds_bucket{model=\"smollm2\",le=\"1\"}",
                1.0,
            ),
            (
                "llmgw_request_duration_seconds_bucket{model=\"smollm2\",le=\"+Inf\"}",
                1.0,
            ),
            ("llmgw_request_duration_seconds_sum{model=\"smollm2\"}", 0.7),
            ("llmgw_first_byte_seconds_count{model=\"smollm2\"}", 1.0),
            ("llmgw_inflight_requests{model=\"smollm2\"}", 0.0),
            ("llmgw_retries_total{model=\"smollm2\"}", 1.0),
            (
                "llmgw_upstream_errors_total{model=\"smollm2\",kind=\"closed\"}",
                1.0,
            ),
            ("llmgw_config_reloads_total{result=\"ok\"}", 0.0),
            ("llmgw_access_records_dropped_total", 0.0),
            ("llmgw_client_connections", 0.0),
            ("llmgw_client_connections_max", 0.0),
            ("llmgw_client_connections_waited_total", 0.0),
        ] {
            assert_eq!(value(&text, series), Some(expected), "{series}\n{text}");
        }
        assert!(
            text.contains("# TYPE llmgw_requests_total counter\n"),
            "{text}"
        );
    }

    #[test]
    fn the_counts_of_a_request_are_found_again_and_shared_where_labels_are() {
        let metrics = Metrics::default();
        let model = metrics.model("m");
        assert!(Arc::ptr_eq(&model, &metrics.model("m")));
        let batch = model.request("a", "batch");
        assert!(Arc::ptr_eq(&batch, &model.request("a", "batch")));
        let interactive = model.request("a", "interactive");
        assert!(Arc::ptr_eq(&batch.tokens, &interactive.tokens));
        assert!(Arc::ptr_eq(
            &batch.queue,
            &model.request("b", "batch").queue
        ));
    }

    #[test]
    fn label_sets_are_bounded_whatever_the_caller_passes() {
        let model = ModelMetrics::new("m");
        for tenant in 0..SERIES_PER_MODEL_MAX + 5 {
            // Growing is quadratic, by design for configured names: fill the map directly.
            if tenant < SERIES_PER_MODEL_MAX - 1 {
                continue;
            }
            if tenant == SERIES_PER_MODEL_MAX - 1 {
                fill(&model, tenant);
            }
            model.request(&format!("t{tenant}"), "batch");
        }
        let series = model.series.load();
        assert_eq!(series.requests.len(), SERIES_PER_MODEL_MAX + 1);
        assert!(series.find(OTHER, OTHER).is_some());
    }

    fn fill(model: &ModelMetrics, count: usize) {
        let template = model.request("t", "batch");
        let mut series = Series::clone(&model.series.load());
        for tenant in 1..count {
            series
                .requests
                .insert(format!("filler{tenant}").into(), vec![template.clone()]);
        }
        model.series.store(Arc::new(series));
    }

    #[test]
    fn failures_are_counted_by_node_and_reason_and_bounded() {
        let metrics = Arc::new(Metrics::default());
        let model = metrics.model("m");
        model.replica_failed("n1", "exited");
        model.replica_failed("n1", "exited");
        for node in 0..FAILURE_SERIES_MAX + 5 {
            model.replica_failed(&format!("x{node}"), "exited");
        }
        let text = page(All(metrics));
        for (node, reason, expected) in [("n1", "exited", 2.0), ("other", "other", 6.0)] {
            let series = format!(
                "llmgw_replica_failures_total{{model=\"m\",node=\"{node}\",reason=\"{reason}\"}}"
            );
            assert_eq!(value(&text, &series), Some(expected), "{series}");
        }
    }

    #[test]
    fn a_model_that_left_the_catalog_takes_its_series_along() {
        let metrics = Arc::new(Metrics::default());
        metrics
            .model("stays")
            .finished(&record(Outcome::Ok, 200, ""));
        metrics
            .model("goes")
            .finished(&record(Outcome::Ok, 200, ""));
        metrics
            .unknown_model()
            .finished(&record(Outcome::Refused, 404, "model_not_found"));
        metrics.retain_models(|name| name == "stays");
        let text = page(All(metrics));
        assert!(
            text.contains("\"stays\"")
                && text.contains("\"unknown\"")
                && !text.contains("\"goes\""),
            "{text}"
        );
    }
}
