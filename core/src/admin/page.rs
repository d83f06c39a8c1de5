//! The `/metrics` page: the counts of requests, and what is read from the live fleet at this scrape.
//!
//! A replica's series exist only while the replica does, and a node's while the node is known: nothing keeps them between two scrapes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use llmgw_plugins::PolicyStatus;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::status::{BandStatus, ReplicaState, ReplicaStatus, StatusReport, TenantStatus};
use crate::certificates::Ends;
use crate::telemetry::exposition::{Labels, counters, gauges, page};
use crate::telemetry::metrics::Metrics;

/// Renders the page.
pub fn metrics_page(
    metrics: Arc<Metrics>,
    report: StatusReport,
    policies: PolicyStatus,
    ends: Vec<Ends>,
) -> String {
    page(Scrape {
        metrics,
        report,
        policies,
        ends,
    })
}

/// All that one scrape shows, taken at one moment.
struct Scrape {
    metrics: Arc<Metrics>,
    report: StatusReport,
    policies: PolicyStatus,
    ends: Vec<Ends>,
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").finish_non_exhaustive()
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.metrics.encode(&mut encoder)?;
        self.encode_replicas(&mut encoder)?;
        self.encode_bands(&mut encoder)?;
        self.encode_policies(&mut encoder)?;
        self.encode_certificates(&mut encoder)
    }
}

/// A gauge of each replica: name, help, and the number where it is known.
type ReplicaGauge = (
    &'static str,
    &'static str,
    fn(&ReplicaStatus) -> Option<f64>,
);

const REPLICA_GAUGES: [ReplicaGauge; 8] = [
    (
        "llmgw_replica_ready",
        "Whether the replica takes requests.",
        |replica| Some(f64::from(u8::from(replica.state == ReplicaState::Ready))),
    ),
    (
        "llmgw_replica_inflight",
        "Requests that this gateway has there.",
        |replica| Some(replica.inflight as f64),
    ),
    (
        "llmgw_replica_queued",
        "Requests that wait in this gateway for a slot there.",
        |replica| Some(replica.queued as f64),
    ),
    (
        "llmgw_replica_slots",
        "Requests that may be there at once.",
        |replica| replica.slots.map(|slots| slots as f64),
    ),
    (
        "llmgw_replica_running",
        "Requests that run, as the engine says.",
        |replica| replica.running,
    ),
    (
        "llmgw_replica_waiting",
        "Requests that wait in the engine, as it says.",
        |replica| replica.waiting,
    ),
    (
        "llmgw_replica_kv_ratio",
        "Share of the KV cache in use, as the engine says.",
        |replica| replica.kv,
    ),
    (
        "llmgw_replica_metrics_age_seconds",
        "Age of the engine's numbers.",
        |replica| replica.metrics_age_ms.map(|age| age as f64 / 1000.0),
    ),
];

/// A gauge of each band of a model.
type BandGauge = (&'static str, &'static str, fn(&BandStatus) -> Option<f64>);

const BAND_GAUGES: [BandGauge; 4] = [
    (
        "llmgw_band_queued",
        "Requests that wait in this band.",
        |band| Some(band.queued as f64),
    ),
    (
        "llmgw_band_oldest_seconds",
        "How long the request that waits longest has waited.",
        |band| band.oldest_ms.map(|age| age as f64 / 1000.0),
    ),
    (
        "llmgw_band_inflight",
        "Requests of this band that engines work on.",
        |band| Some(band.inflight as f64),
    ),
    (
        "llmgw_band_share_ratio",
        "Share of the model's service in the last 10 s.",
        |band| band.share_10s,
    ),
];

/// A gauge of each tenant that has requests or was served lately.
type TenantGauge = (&'static str, &'static str, fn(&TenantStatus) -> Option<f64>);

const TENANT_GAUGES: [TenantGauge; 3] = [
    (
        "llmgw_tenant_inflight",
        "Requests of this tenant that engines work on.",
        |tenant| Some(tenant.inflight as f64),
    ),
    (
        "llmgw_tenant_queued",
        "Requests of this tenant that wait.",
        |tenant| Some(tenant.queued as f64),
    ),
    (
        "llmgw_tenant_share_ratio",
        "Share of all service in the last minute, by cost.",
        |tenant| tenant.share_1m,
    ),
];

impl Scrape {
    fn encode_bands(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, read) in BAND_GAUGES {
            let mut rows: Vec<(Labels<'_, 2>, f64)> = Vec::new();
            for model in &self.report.models {
                for band in &model.bands {
                    let labels = [("model", &*model.name), ("band", &*band.name)];
                    rows.extend(read(band).map(|value| (labels, value)));
                }
            }
            gauges(encoder, name, help, rows)?;
        }
        for (name, help, read) in TENANT_GAUGES {
            let mut rows: Vec<(Labels<'_, 1>, f64)> = Vec::new();
            for tenant in &self.report.tenants {
                rows.extend(read(tenant).map(|value| ([("tenant", &*tenant.name)], value)));
            }
            gauges(encoder, name, help, rows)?;
        }
        Ok(())
    }

    fn encode_replicas(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, read) in REPLICA_GAUGES {
            let mut rows: Vec<(Labels<'_, 3>, f64)> = Vec::new();
            for model in &self.report.models {
                for replica in &model.replicas {
                    let labels = [
                        ("model", &*model.name),
                        ("replica", &*replica.id),
                        ("engine", &*replica.engine),
                    ];
                    rows.extend(read(replica).map(|value| (labels, value)));
                }
            }
            gauges(encoder, name, help, rows)?;
        }
        Ok(())
    }

    fn encode_policies(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let generation = vec![([], self.policies.generation as f64)];
        gauges(
            encoder,
            "llmgw_policy_generation",
            "Number of the policy set in force.",
            generation,
        )?;
        let errors = self.policies.errors.iter();
        let errors = errors
            .map(|row| {
                (
                    [("hook", row.hook.name()), ("kind", row.kind.name())],
                    row.count,
                )
            })
            .collect();
        counters(
            encoder,
            "llmgw_policy_errors",
            "Calls of a hook that fell back, by how they failed.",
            errors,
        )?;
        let failures = vec![([], self.policies.reload_failures)];
        counters(
            encoder,
            "llmgw_policy_reload_failures",
            "Policy sets that were not taken.",
            failures,
        )
    }

    /// Of several authorities in one file, the one that ends first counts.
    fn encode_certificates(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut first: BTreeMap<(&str, &str), i64> = BTreeMap::new();
        for ends in &self.ends {
            let end = ends.not_after.0;
            let earliest = first
                .entry((ends.owner.serves(), ends.owner.node()))
                .or_insert(end);
            *earliest = end.min(*earliest);
        }
        let rows = first
            .into_iter()
            .map(|((serves, node), end)| ([("use", serves), ("node", node)], end as f64));
        gauges(
            encoder,
            "llmgw_certificate_expiry_timestamp_seconds",
            "When a certificate ends, in seconds since 1970.",
            rows.collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::ModelStatus;
    use crate::certificates::tests::{Make, NOW};
    use crate::certificates::{Owner, Use};
    use crate::telemetry::exposition::tests::value;
    use llmgw_proto::identity::moment::DAY_SECONDS;

    fn report(replicas: Vec<ReplicaStatus>) -> StatusReport {
        let model = ModelStatus {
            name: "smollm2".into(),
            ready: true,
            replicas,
            ..ModelStatus::default()
        };
        StatusReport {
            models: vec![model],
            ..StatusReport::default()
        }
    }

    fn replica(id: &str) -> ReplicaStatus {
        ReplicaStatus {
            id: id.into(),
            engine: "vllm".into(),
            state: ReplicaState::Ready,
            inflight: 3,
            kv: Some(0.25),
            metrics_age_ms: Some(1500),
            ..ReplicaStatus::default()
        }
    }

    fn scrape(metrics: &Arc<Metrics>, report: StatusReport) -> String {
        scrape_with(metrics, report, Vec::new())
    }

    fn scrape_with(metrics: &Arc<Metrics>, report: StatusReport, ends: Vec<Ends>) -> String {
        let policies =
            llmgw_plugins::Policies::open(llmgw_plugins::PolicyOptions::default()).unwrap();
        metrics_page(metrics.clone(), report, policies.status(), ends)
    }

    /// Every line is a comment or `name{label="value",…} number`.
    fn assert_parses(text: &str) {
        for line in text
            .lines()
            .filter(|line| !line.starts_with("# HELP ") && !line.starts_with("# TYPE "))
        {
            let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
            value.parse::<f64>().unwrap_or_else(|_| panic!("{line}"));
            let name = series.split('{').next().unwrap();
            assert!(name.starts_with("llmgw_"), "{line}");
            assert!(
                name.bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte == b'_'),
                "{line}"
            );
            assert!(
                series.len() == name.len() || series.ends_with("\"}"),
                "{line}"
            );
            assert!(
                text.contains(&format!("# TYPE {name} ")) || name.contains("_seconds_"),
                "{line}"
            );
        }
    }

    #[test]
    fn unknown_numbers_are_absent_and_known_ones_have_their_labels() {
        let text = scrape(&Arc::default(), report(vec![replica("smollm2/0")]));
        assert_parses(&text);
        let labels = "{model=\"smollm2\",replica=\"smollm2/0\",engine=\"vllm\"}";
        for (series, expected) in [
            (format!("llmgw_replica_ready{labels}"), 1.0),
            (format!("llmgw_replica_inflight{labels}"), 3.0),
            (format!("llmgw_replica_kv_ratio{labels}"), 0.25),
            (format!("llmgw_replica_metrics_age_seconds{labels}"), 1.5),
            ("llmgw_policy_generation".to_owned(), 1.0),
            ("llmgw_policy_reload_failures_total".to_owned(), 0.0),
        ] {
            assert_eq!(value(&text, &series), Some(expected), "{series}\n{text}");
        }
        assert!(
            !text.contains("llmgw_replica_running") && !text.contains("llmgw_replica_waiting"),
            "{text}"
        );
    }

    #[test]
    fn the_series_of_a_replica_vanish_with_it_and_those_of_requests_stay() {
        let metrics = Arc::new(Metrics::default());
        metrics
            .model("smollm2")
            .finished(&crate::telemetry::access::AccessRecord {
                outcome: crate::telemetry::access::Outcome::Ok,
                replica: "gone".into(),
                ..Default::default()
            });
        assert!(
            scrape(&metrics, report(vec![replica("gone"), replica("stays")])).contains("\"gone\"")
        );
        let text = scrape(&metrics, report(vec![replica("stays")]));
        assert!(
            !text.contains("\"gone\"") && text.contains("\"stays\""),
            "{text}"
        );
        assert!(text.contains("llmgw_requests_total{"), "{text}");
    }

    #[test]
    fn each_certificate_has_its_end_and_of_several_authorities_the_first_counts() {
        let ending = |owner: Owner, until_days| {
            let make = Make {
                until_days,
                ..Make::default()
            };
            Ends::of(owner, &make.read())
        };
        let ca = || Owner::Trusted("ca.pem".into());
        let ends = vec![
            ending(Owner::Shown(Use::Agents, "server.pem".into()), 9),
            ending(ca(), 30),
            ending(ca(), 20),
            ending(ca(), 40),
            ending(Owner::Node("gpu-1".into()), -3),
        ];
        let page = scrape_with(&Arc::default(), report(Vec::new()), ends);
        assert_parses(&page);
        for (serves, node, days) in [
            ("agents", "", 9),
            ("agents_ca", "", 20),
            ("node", "gpu-1", -3),
        ] {
            let name = "llmgw_certificate_expiry_timestamp_seconds";
            let series = format!("{name}{{use=\"{serves}\",node=\"{node}\"}}");
            let expected = (NOW.0 + days * DAY_SECONDS) as f64;
            assert_eq!(value(&page, &series), Some(expected), "{page}");
        }
        let without = scrape(&Arc::default(), report(Vec::new()));
        assert!(!without.contains("llmgw_certificate"), "{without}");
    }

    #[test]
    fn a_name_with_quotes_and_newlines_stays_one_label() {
        let text = scrape(&Arc::default(), report(vec![replica("a\"} 1\nforged 2\\")]));
        assert_parses(&text);
        assert!(text.contains(r#"replica="a\"} 1\nforged 2\\","#), "{text}");
    }
}
