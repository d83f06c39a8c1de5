//! One request on one replica, from the permit to the settled bill: what it holds, what it learned, how it ended.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::StatusCode;

use super::usage::{self, Usage};
use crate::flow::permit::Permit;
use crate::flow::tenant::Reservation;
use crate::routing::breaker::Fault;
use crate::routing::pool::{Asked, Pool};
use crate::routing::replica::Admitted;
use crate::telemetry::OpenRecord;
use crate::telemetry::access::Outcome;
use crate::telemetry::metrics::UpstreamError;

/// How much of a passing answer's end is kept to read the usage from.
const TAIL_MAX_BYTES: usize = 4 * 1024;

/// How an exchange ended.
#[derive(Debug, Clone)]
pub enum Ending {
    Complete,
    /// The engine's connection or its framing broke.
    Broken(String),
    /// The engine fell silent for longer than the limit.
    Silent(String),
    /// The engine said itself that it failed.
    EngineError(String),
    /// The engine said that it is the request's own fault (4xx): nothing against the replica.
    ClientFault(String),
}

impl Ending {
    /// What an error event in mid-stream is, by the status that it names.
    pub fn of_error(status: Option<u16>, reason: String) -> Ending {
        match status {
            Some(400..=499) => Ending::ClientFault(reason),
            _ => Ending::EngineError(reason),
        }
    }

    pub fn reason(&self) -> &str {
        match self {
            Ending::Complete => "",
            Ending::Broken(reason)
            | Ending::Silent(reason)
            | Ending::EngineError(reason)
            | Ending::ClientFault(reason) => reason,
        }
    }
}

/// What a failed exchange leaves to the next attempt.
pub struct Unsettled {
    pub record: OpenRecord,
    pub reservation: Option<Reservation>,
}

/// Given back when dropped: the slot, the breaker's leave, the access record. Dropped before it ended, the
/// client left.
pub struct Exchange {
    /// Absent once another attempt has taken it over.
    record: Option<OpenRecord>,
    /// What the request holds of its tenant's limits, settled with the bill.
    pub reservation: Option<Reservation>,
    permit: Permit,
    admitted: Admitted,
    pool: Arc<Pool>,
    asked: Asked,
    sent_at: Instant,
    first_byte_at: Option<Instant>,
    usage: Usage,
    /// Events with data: an estimate of the tokens where no usage comes.
    events: u64,
    /// The last bytes of an answer that is not looked into.
    tail: Vec<u8>,
    ending: Option<Ending>,
}

impl Exchange {
    pub fn new(
        record: OpenRecord,
        permit: Permit,
        admitted: Admitted,
        pool: Arc<Pool>,
        asked: Asked,
        sent_at: Instant,
    ) -> Exchange {
        Exchange {
            record: Some(record),
            reservation: None,
            permit,
            admitted,
            pool,
            asked,
            sent_at,
            first_byte_at: None,
            usage: Usage::default(),
            events: 0,
            tail: Vec::new(),
            ending: None,
        }
    }

    pub fn answered(&mut self, status: StatusCode) {
        if let Some(record) = &mut self.record {
            record.status = status.as_u16();
        }
    }

    /// The engine's first event, or its whole short answer, is here.
    pub fn first_byte(&mut self) {
        if self.first_byte_at.is_some() {
            return;
        }
        let now = Instant::now();
        self.first_byte_at = Some(now);
        self.permit.first_byte();
        self.admitted.heard();
        if let Some(record) = &mut self.record {
            record.first_byte = Some(now.duration_since(record.started()));
        }
        if self.admitted.is_trial() {
            self.admitted.succeeded();
        }
    }

    pub fn event(&mut self) {
        self.events += 1;
        self.permit.streamed(1);
        self.admitted.heard();
    }

    pub fn usage(&mut self, found: Usage) {
        self.usage.merge(found);
    }

    /// Bytes that leave towards the client.
    pub fn sent(&mut self, bytes: usize) {
        if let Some(record) = &mut self.record {
            record.bytes_out += bytes as u64;
        }
    }

    /// Bytes of an answer that passes unread.
    pub fn passed(&mut self, chunk: &Bytes) {
        self.first_byte();
        self.sent(chunk.len());
        let keep = chunk.len().min(TAIL_MAX_BYTES);
        let fresh = &chunk[chunk.len() - keep..];
        let excess = (self.tail.len() + keep).saturating_sub(TAIL_MAX_BYTES);
        self.tail.drain(..excess);
        self.tail.extend_from_slice(fresh);
    }

    /// How it ended; the first word counts.
    pub fn end(&mut self, ending: Ending) {
        if self.ending.is_none() {
            self.ending = Some(ending);
        }
    }

    /// It failed before the client saw a byte: the replica is at fault, and the books go on to the next attempt.
    pub fn fail(mut self, ending: Ending) -> Unsettled {
        self.permit.failed();
        self.blame(&ending);
        // The record is only ever taken here, and `self` ends with it.
        let record = self.record.take();
        Unsettled {
            record: record.expect("an exchange keeps its record until it fails"),
            reservation: self.reservation.take(),
        }
    }

    fn settle(&mut self, mut record: OpenRecord) {
        if let Some(found) = usage::find_usage_in_tail(&self.tail) {
            self.usage.merge(found);
        }
        self.write_tokens(&mut record);
        if let Some(reservation) = self.reservation.take() {
            reservation.settle(self.usage.input, self.usage.output.unwrap_or(self.events));
        }
        let Some(ending) = self.ending.take() else {
            record.outcome = Outcome::ClientLeft;
            return;
        };
        record.outcome = match ending {
            Ending::Complete => Outcome::Ok,
            Ending::EngineError(_) | Ending::ClientFault(_) => Outcome::EngineError,
            Ending::Broken(_) | Ending::Silent(_) => Outcome::UpstreamFailed,
        };
        if matches!(ending, Ending::Complete) {
            self.admitted.succeeded();
            self.learn(&record.tenant);
            return;
        }
        record.code = match ending {
            Ending::EngineError(_) | Ending::ClientFault(_) => "engine_error",
            _ => "upstream_failed",
        };
        self.blame(&ending);
        tracing::warn!(
            request_id = %record.request_id,
            model = %self.pool.model.name,
            replica = %self.admitted.replica.id,
            "{}",
            ending.reason()
        );
    }

    /// The engine's own count where there is one, else an estimate: an aborted stream has its price too.
    fn write_tokens(&mut self, record: &mut OpenRecord) {
        let counted = self.usage.output.is_some() || self.usage.input.is_some();
        record.tokens_estimated = !counted;
        record.input_tokens = Some(self.input_tokens());
        record.cached_tokens = self.usage.cached;
        record.output_tokens = self.usage.output.or(Some(self.events));
        if counted || self.events > 0 {
            let output = self.usage.output.unwrap_or(self.events);
            self.permit
                .settle(self.input_tokens(), self.cached_tokens(), output);
        }
        record.cost = self.permit.cost();
    }

    /// As the engine counted them, else as they were estimated.
    fn input_tokens(&self) -> u64 {
        self.usage.input.unwrap_or(self.asked.ask.input_tokens)
    }

    /// An engine that does not say had what the router believed.
    fn cached_tokens(&self) -> u64 {
        self.usage.cached.unwrap_or(self.asked.prefix_tokens)
    }

    fn blame(&mut self, ending: &Ending) {
        let (fault, error) = match ending {
            Ending::Complete => return,
            Ending::ClientFault(_) => return self.admitted.succeeded(),
            Ending::Broken(_) => (Fault::Reset, UpstreamError::Truncated),
            Ending::Silent(_) => (Fault::IdleTimeout, UpstreamError::IdleTimeout),
            Ending::EngineError(_) => (Fault::Status5xx, UpstreamError::ErrorEvent),
        };
        self.admitted.fault(fault);
        self.pool.metrics.upstream_error(error);
    }

    /// What this exchange taught about the replica's speed and the model's tokens.
    fn learn(&self, tenant: &Arc<str>) {
        let Some(first) = self.first_byte_at else {
            return;
        };
        let first_byte = first.duration_since(self.sent_at);
        let (input, cached) = (self.input_tokens(), self.cached_tokens());
        // A whole answer comes at once: its first byte says nothing about the prompt alone.
        if self.events > 0 {
            let replica = &self.admitted.replica;
            let before = self.asked.prefill_before;
            replica.learn_prefill(first_byte, before + input.saturating_sub(cached));
            replica.learn_decode(first.elapsed(), self.events.saturating_sub(1));
            self.pool.learn_first_byte(first_byte);
        }
        self.pool.learn_usage(&self.asked, &self.usage, tenant);
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if let Some(record) = self.record.take() {
            self.settle(record);
        }
    }
}
