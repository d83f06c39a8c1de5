//! What llmgw says about itself: logs for people, one access record a request, and numbers for Prometheus.
//!
//! A request opens a record ([`Telemetry::open`]) and fills it in while it lives. Dropping the record is
//! what writes the line and counts the request, so that a request that is aborted anywhere is recorded too.

pub mod access;
pub mod buffer;
pub mod escape;
pub mod exposition;
pub mod histogram;
pub mod log;
pub mod metrics;

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Instant;

use tokio_util::task::TaskTracker;

use access::{AccessRecord, Outcome};
use buffer::AccessLog;
use log::LogFormat;
use metrics::{Metrics, ModelMetrics};

use crate::flow::tenant::TenantAccount;

/// The access log and the metrics of one process. Shared by every request.
pub struct Telemetry {
    /// Also read by the admin listener.
    pub metrics: Arc<Metrics>,
    access: AccessLog,
    /// Requests that came and whose answers are not sent: what a shutdown waits for. Their connections hold its tokens, longer than their
    /// records are open.
    pub at_work: TaskTracker,
}

impl Telemetry {
    /// Access lines go to stderr: they are for people and log collectors, stdout is for data.
    pub fn start(format: LogFormat) -> Arc<Telemetry> {
        Telemetry::start_with(format, Box::new(std::io::stderr()))
    }

    /// As [`Telemetry::start`], with access lines written to `sink`.
    pub fn start_with(format: LogFormat, sink: Box<dyn std::io::Write + Send>) -> Arc<Telemetry> {
        let metrics = Arc::new(Metrics::default());
        let dropped = metrics.access_records_dropped.clone();
        Arc::new(Telemetry {
            metrics,
            access: AccessLog::start(format, sink, dropped),
            at_work: TaskTracker::new(),
        })
    }

    /// Opens the record of a request that arrived now.
    pub fn open(self: &Arc<Self>, record: AccessRecord) -> OpenRecord {
        OpenRecord {
            telemetry: self.clone(),
            model: None,
            account: None,
            started: Instant::now(),
            record,
        }
    }

    /// Waits (bounded, see [`AccessLog::flush`]) until every record closed so far has been written. Blocks:
    /// call it at the end of a shutdown, off the runtime.
    pub fn flush(&self) {
        self.access.flush();
    }
}

/// The record of a request that is still being served. Writes and counts itself when dropped.
pub struct OpenRecord {
    telemetry: Arc<Telemetry>,
    model: Option<Arc<ModelMetrics>>,
    /// Whose it is, once that is known.
    account: Option<Arc<TenantAccount>>,
    started: Instant,
    record: AccessRecord,
}

impl OpenRecord {
    /// Says which catalog model the request is for: from here on it counts as in flight there.
    pub fn set_model(&mut self, model: Arc<ModelMetrics>) {
        if let Some(before) = &self.model {
            before.inflight.dec();
        }
        model.inflight.inc();
        self.record.model = model.name.clone();
        self.model = Some(model);
    }

    /// Says whose request it is: from its end on it counts in what the tenant used lately, once it came to a queue.
    pub fn set_account(&mut self, account: Arc<TenantAccount>) {
        self.account = Some(account);
    }

    /// When the request arrived; the base of all durations in the record.
    pub fn started(&self) -> Instant {
        self.started
    }
}

impl Deref for OpenRecord {
    type Target = AccessRecord;

    fn deref(&self) -> &AccessRecord {
        &self.record
    }
}

impl DerefMut for OpenRecord {
    fn deref_mut(&mut self) -> &mut AccessRecord {
        &mut self.record
    }
}

impl Drop for OpenRecord {
    fn drop(&mut self) {
        self.record.total = self.started.elapsed();
        // Nobody said how it ended, so it was dropped by the connection: the client is gone.
        if self.record.outcome == Outcome::Open {
            self.record.outcome = Outcome::ClientLeft;
        }
        // One that was refused before it came to a queue used nothing and waited for nothing.
        if let Some(account) = &self.account
            && (self.record.attempts > 0 || !self.record.queue.is_zero())
        {
            account.used(self.record.cost, self.record.queue);
        }
        match &self.model {
            Some(model) => {
                model.inflight.dec();
                model.finished(&self.record);
            }
            None => self
                .telemetry
                .metrics
                .unknown_model()
                .finished(&self.record),
        }
        self.telemetry.access.write(&self.record);
    }
}

#[cfg(test)]
mod tests {
    use super::buffer::tests::Sink;
    use super::*;

    #[test]
    fn a_dropped_record_is_one_line_and_one_count_and_the_client_left() {
        let sink = Sink::default();
        let telemetry = Telemetry::start_with(LogFormat::Json, Box::new(sink.clone()));
        let model = telemetry.metrics.model("smollm2");
        let mut record = telemetry.open(AccessRecord {
            request_id: "r1".into(),
            ..AccessRecord::default()
        });
        record.set_model(model.clone());
        assert_eq!(model.inflight.get(), 1);
        drop(record);
        telemetry.flush();
        assert_eq!(model.inflight.get(), 0);
        let line: serde_json::Value = serde_json::from_str(&sink.text()).unwrap();
        assert_eq!(line["outcome"], "client_left");
        assert_eq!(line["model"], "smollm2");
        assert_eq!(model.request("", "").count("client_left"), 1);
    }

    #[test]
    fn a_request_for_no_known_model_is_counted_as_unknown_whatever_it_asked_for() {
        let telemetry = Telemetry::start_with(LogFormat::Text, Box::new(Sink::default()));
        let mut record = telemetry.open(AccessRecord {
            model_asked: "gpt-9".into(),
            ..AccessRecord::default()
        });
        record.code = "model_not_found";
        record.outcome = Outcome::Refused;
        record.status = 404;
        drop(record);
        assert_eq!(
            telemetry
                .metrics
                .model("")
                .request("", "")
                .count("model_not_found"),
            1
        );
    }
}
