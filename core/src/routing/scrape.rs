//! What an engine's metrics page says about its load, once a second, each replica on its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use llmgw_plugins::{MetricNames, MetricOverride, Policies, Samples};

use super::fetch::{NoAnswer, Questions};
use super::replica::Replica;
use crate::random;

const SCRAPE_INTERVAL: Duration = Duration::from_millis(1_000);
const SCRAPE_TIMEOUT: Duration = Duration::from_millis(2_000);
/// The engine whose names an empty mapping means.
const NAMES_BY_DEFAULT: &str = "vllm";

/// Scrapes one replica until it leaves the configuration.
pub async fn run(replica: Arc<Replica>, mapping: Option<MetricOverride>, policies: Arc<Policies>) {
    let questions = Questions::new(replica.clone(), SCRAPE_TIMEOUT);
    let mut last = Instant::now();
    loop {
        let failed = scrape(
            &replica,
            &questions,
            mapping.as_ref(),
            &policies,
            last.elapsed(),
        )
        .await;
        match failed {
            None => last = Instant::now(),
            Some(error) => {
                if replica.scrape_failed(error.clone()) {
                    tracing::info!(
                        replica = %replica.id,
                        "no load from its metrics, own counters only: {error}"
                    );
                }
            }
        }
        let wait = SCRAPE_INTERVAL.mul_f64(0.9 + 0.2 * random::unit());
        tokio::select! {
            () = replica.retired.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// One scrape; the reason where it gave nothing.
async fn scrape(
    replica: &Replica,
    questions: &Questions,
    mapping: Option<&MetricOverride>,
    policies: &Policies,
    since_last: Duration,
) -> Option<String> {
    let set = policies.current();
    let engine = &replica.endpoint.engine;
    let own = set.engine(engine).and_then(|plugin| plugin.metrics.clone());
    let vllm = set
        .engine(NAMES_BY_DEFAULT)
        .and_then(|plugin| plugin.metrics.clone())
        .unwrap_or_default();
    let Some(names) = MetricNames::resolve(own.as_ref(), mapping, &vllm) else {
        return Some(format!("engine `{engine}` has no metrics"));
    };
    let held_before = replica.slots.inflight();
    let page = match questions.get(&names.path).await {
        Ok(answer) if answer.status.is_success() => answer.body,
        Ok(answer) => return Some(format!("{} answers {}", names.path, answer.status.as_u16())),
        Err(NoAnswer::TimedOut) => {
            return Some(format!(
                "{} not answered within {SCRAPE_TIMEOUT:?}",
                names.path
            ));
        }
        Err(NoAnswer::Failed(reason)) => return Some(reason),
    };
    let samples = Samples::parse(&String::from_utf8_lossy(&page));
    // A mapping of the configuration is a complete statement; a plugin's `map` speaks for its own names.
    let mapped = match mapping {
        Some(_) => None,
        None => set.map_metrics(
            engine,
            &samples,
            replica.previous_load().as_ref(),
            since_last.as_secs_f64() * 1e3,
        ),
    };
    let load = mapped.unwrap_or_else(|| names.read(&samples));
    if load == Default::default() {
        return Some(format!("{} has none of the mapped names", names.path));
    }
    let held = held_before.min(replica.slots.inflight());
    let contradiction = replica.disbelieved(&load, held);
    if contradiction.is_none() {
        replica.scraped(load);
    }
    contradiction
}
