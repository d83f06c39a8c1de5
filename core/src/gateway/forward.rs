//! A request's way to an answer: choose, wait for a slot, send, look at the first event; another replica if need be.
//!
//! Everything here happens before the client has seen a byte, so everything here may be tried again, within
//! `limits.retries` and the gateway's retry budget.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Response;
use llmgw_plugins::ErrorClass;

use super::answer::{self, Accepted, Refused};
use super::body::ClientBody;
use super::exchange::Exchange;
use super::job::{Job, Outgoing};
use super::refusal;
use super::respond::{EngineAnswer, Failure};
use super::wait;
use crate::clock;
use crate::flow::permit::Permit;
use crate::routing::breaker::Fault;
use crate::routing::pool::Chosen;
use crate::routing::replica::Admitted;
use crate::telemetry::OpenRecord;
use crate::telemetry::access::Outcome;
use crate::telemetry::metrics::UpstreamError;
use crate::upstream::SendError;

/// A suspect replica gets one request as its trial, and that request no more than this, if another replica is there.
const TRIAL_FIRST_BYTE_MAX: Duration = Duration::from_secs(30);

/// What a failed attempt leaves behind.
enum Setback {
    /// Another replica may do better.
    Elsewhere(Trouble),
    /// It is the request's own fault, or trying again would make it worse.
    Final(Failure),
}

/// One line of what went wrong, and what it was.
struct Trouble {
    text: String,
    kind: TroubleKind,
}

enum TroubleKind {
    /// No connection was made: the engine knows nothing of it.
    Unreachable,
    Transport,
    Silent(Duration),
    Answered(EngineAnswer),
}

/// Runs the attempts and records how they ended.
pub async fn attempts(mut job: Box<Job>) -> Result<Response<ClientBody>, Failure> {
    let result = run(&mut job).await;
    result.map_err(|failure| refusal::leave(&mut job, failure))
}

/// Writes down why a request was not answered.
pub fn record_failure(record: &mut OpenRecord, failure: &Failure) {
    record.status = failure.status().as_u16();
    record.code = failure.code();
    record.outcome = match failure {
        Failure::Engine(_) => Outcome::EngineError,
        Failure::UpstreamFailed { .. } | Failure::FirstByteTimeout { .. } => {
            Outcome::UpstreamFailed
        }
        _ => Outcome::Refused,
    };
}

async fn run(job: &mut Job) -> Result<Response<ClientBody>, Failure> {
    job.gateway.retry_budget.deposit();
    let mut tried: Vec<Arc<str>> = Vec::new();
    let mut troubles: Vec<Trouble> = Vec::new();
    let calls_max = job.config.limits.retries + 1;
    // Counted at the connections: a reused one that died may have delivered the request nevertheless, one that
    // was refused has not.
    let mut calls = 0;
    loop {
        let (chosen, permit) = match wait::place(job, &tried).await {
            Ok(placed) => placed,
            Err(refusal) if troubles.is_empty() => return Err(refusal),
            // Nobody is left to try: what went wrong before says more than that.
            Err(_) => return Err(verdict(troubles)),
        };
        if let Some(last) = troubles.last() {
            // A call that no engine got multiplies nothing, so it is free.
            let is_free = matches!(last.kind, TroubleKind::Unreachable);
            if !is_free && !job.gateway.retry_budget.withdraw(clock::now_ms()) {
                let text = "no more retries: the gateway's retry budget is spent".to_string();
                return Err(verdict_with(troubles, text));
            }
            job.pool.metrics.retried();
        }
        let replica = chosen.admitted.replica.clone();
        match attempt(job, chosen, permit, tried.len() as u32, &mut calls).await {
            Ok(response) => return Ok(response),
            Err(Setback::Final(failure)) => return Err(failure),
            Err(Setback::Elsewhere(trouble)) => {
                tracing::info!(
                    request_id = %job.record.as_ref().map_or("", |record| &record.request_id),
                    model = %job.pool.model.name,
                    "attempt failed: {}",
                    trouble.text
                );
                troubles.push(trouble);
                tried.push(replica.id.clone());
            }
        }
        if calls.max(troubles.len() as u32) >= calls_max {
            return Err(verdict(troubles));
        }
    }
}

/// One call of one engine, up to the first event or the whole short answer.
async fn attempt(
    job: &mut Job,
    chosen: Chosen,
    mut permit: Permit,
    attempt: u32,
    calls: &mut u32,
) -> Result<Response<ClientBody>, Setback> {
    let Chosen {
        mut admitted,
        reason,
        prefix_tokens,
        prefill_before,
        ..
    } = chosen;
    let replica = admitted.replica.clone();
    let Some(served) = replica.served_name() else {
        // It stopped being ready in this very moment.
        permit.failed();
        return Err(elsewhere(
            &replica.id,
            "is no longer ready",
            TroubleKind::Transport,
        ));
    };
    let outgoing = job.outgoing(&replica, &served).map_err(Setback::Final)?;
    job.asked.prefix_tokens = prefix_tokens;
    job.asked.prefill_before = prefill_before;
    if let Some(record) = &mut job.record {
        record.attempts = attempt + 1;
        record.replica = replica.id.clone();
        record.engine = replica.engine.clone();
        // A client that leaves before the engine says anything has used this.
        record.input_tokens = Some(job.asked.ask.input_tokens);
        record.tokens_estimated = true;
        record.cost = permit.cost();
    }
    if let Some(reservation) = &mut job.reservation {
        reservation.sent();
    }
    permit.sent();
    let sent_at = Instant::now();
    let accepted = match call(job, &mut admitted, &outgoing, attempt, calls).await {
        Ok(accepted) => accepted,
        Err(setback) => {
            permit.failed();
            if let Some(record) = &mut job.record {
                record.input_tokens = None;
                record.tokens_estimated = false;
                record.cost = 0;
            }
            return Err(setback);
        }
    };
    // Nothing of an answer that passes unread is waited for, so its body may come minutes later. Where there is no other replica, nobody else would
    // be let in meanwhile; where there is one, a head alone proves nothing.
    let passes = matches!(accepted, Accepted::Passing { .. }) && accepted.status().is_success();
    if passes && admitted.is_trial() && job.pool.replicas.len() == 1 {
        admitted.succeeded();
    }
    let Some(record) = job.record.take() else {
        return Err(Setback::Final(Failure::ShuttingDown));
    };
    let debug = job.debug.then(|| answer::Debug {
        replica: replica.id.clone(),
        band: job.band.name.clone(),
        queue: record.queue,
        ahead: job.ahead,
        generation: job.set.generation(),
        reason,
    });
    let mut exchange = Exchange::new(
        record,
        permit,
        admitted,
        job.pool.clone(),
        job.asked,
        sent_at,
    );
    exchange.reservation = job.reservation.take();
    exchange.answered(accepted.status());
    // Only now: noted when it was sent, a burst of one prompt would all follow its first request.
    job.pool.remember(&job.prompt, &replica);
    answer::finish(job, accepted, exchange, debug)
        .await
        .map_err(|(unsettled, broken)| {
            job.record = Some(unsettled.record);
            job.reservation = unsettled.reservation;
            elsewhere(&replica.id, &broken, TroubleKind::Transport)
        })
}

/// Sends a request and looks at what comes, within the time that this replica deserves.
async fn call(
    job: &Job,
    admitted: &mut Admitted,
    outgoing: &Outgoing,
    attempt: u32,
    calls: &mut u32,
) -> Result<Accepted, Setback> {
    let replica = admitted.replica.clone();
    let first_byte_timeout = job.config.limits.first_byte_timeout;
    // A whole answer is silent until it is done, which may take minutes: only where events are due does silence tell.
    let tells_by_silence = job.pool.replicas.len() > 1 && (job.facts.stream || outgoing.assemble);
    let limit = match admitted.is_trial() && tells_by_silence {
        true => first_byte_timeout.min(TRIAL_FIRST_BYTE_MAX),
        false => first_byte_timeout,
    };
    admitted.sent(tells_by_silence);
    let answered = async {
        let request = || job.request(&replica, outgoing);
        // Only the first attempt may meet a stale connection: its transparent retry is a call too.
        let response = match attempt {
            0 => replica.upstream.send(request, calls).await?,
            _ => replica.upstream.send_fresh(request, calls).await?,
        };
        Ok(answer::look(job, outgoing, response).await)
    };
    match tokio::time::timeout(limit, answered).await {
        Ok(Ok(Ok(accepted))) => Ok(accepted),
        Ok(Ok(Err(refused))) => Err(refusal(job, admitted, refused)),
        Ok(Err(error)) => Err(unsent(job, admitted, error)),
        Err(_) => {
            admitted.fault(Fault::FirstByteTimeout);
            let metrics = &job.pool.metrics;
            metrics.upstream_error(UpstreamError::FirstByteTimeout);
            let text = format!("sent nothing within {limit:?}");
            Err(elsewhere(&replica.id, &text, TroubleKind::Silent(limit)))
        }
    }
}

/// Nothing came back at all.
fn unsent(job: &Job, admitted: &mut Admitted, error: SendError) -> Setback {
    let (fault, counted, kind) = match &error {
        SendError::Connect(_) => (
            Fault::Connect,
            UpstreamError::Connect,
            TroubleKind::Unreachable,
        ),
        SendError::ConnectTimeout(_) => (
            Fault::Connect,
            UpstreamError::ConnectTimeout,
            TroubleKind::Unreachable,
        ),
        SendError::Reset(_) => (Fault::Reset, UpstreamError::Closed, TroubleKind::Transport),
    };
    admitted.fault(fault);
    job.pool.metrics.upstream_error(counted);
    elsewhere(&admitted.replica.id, &error.to_string(), kind)
}

/// An engine said no, or nothing that is an answer.
fn refusal(job: &Job, admitted: &mut Admitted, refused: Refused) -> Setback {
    let replica = admitted.replica.clone();
    let mut answer = match refused {
        Refused::Broken(text) => {
            admitted.fault(Fault::Reset);
            job.pool.metrics.upstream_error(UpstreamError::Truncated);
            return elsewhere(&replica.id, &text, TroubleKind::Transport);
        }
        Refused::Answered(answer) => answer,
    };
    answer.summary = format!(
        "{} answered {}: {}",
        replica.id, answer.status, answer.summary
    );
    if matches!(answer.status, 401 | 403) {
        tracing::warn!(
            replica = %replica.id,
            "the engine refused the gateway's own key ({}); set `api_key` of its endpoint",
            answer.status
        );
    }
    // The client's key goes no further than the gateway, so this is never the client's fault: the engine is another one than it was, on the
    // same port, or its key is not what is configured.
    if answer.status == 401 {
        admitted.fault(Fault::Status5xx);
        job.pool.metrics.upstream_error(UpstreamError::Status);
        return Setback::Elsewhere(Trouble {
            text: answer.summary,
            kind: TroubleKind::Transport,
        });
    }
    let class = job
        .set
        .classify_error(&replica.endpoint.engine, answer.status, &answer.body);
    match class {
        ErrorClass::ClientFault => {
            admitted.succeeded();
            Setback::Final(Failure::Engine(Box::new(answer)))
        }
        ErrorClass::Busy => {
            admitted.busy();
            Setback::Elsewhere(Trouble {
                text: answer.summary.clone(),
                kind: TroubleKind::Answered(answer),
            })
        }
        ErrorClass::RetryOther | ErrorClass::Fatal => {
            admitted.fault(Fault::Status5xx);
            job.pool.metrics.upstream_error(UpstreamError::Status);
            if class == ErrorClass::Fatal {
                return Setback::Final(Failure::Engine(Box::new(answer)));
            }
            Setback::Elsewhere(Trouble {
                text: answer.summary.clone(),
                kind: TroubleKind::Answered(answer),
            })
        }
    }
}

fn elsewhere(replica: &str, text: &str, kind: TroubleKind) -> Setback {
    Setback::Elsewhere(Trouble {
        text: format!("{replica}: {text}"),
        kind,
    })
}

fn verdict(troubles: Vec<Trouble>) -> Failure {
    let attempts: Vec<String> = troubles
        .iter()
        .map(|trouble| trouble.text.clone())
        .collect();
    match troubles.into_iter().next_back().map(|trouble| trouble.kind) {
        // What an engine said itself is the better answer.
        Some(TroubleKind::Answered(answer)) => Failure::Engine(Box::new(answer)),
        Some(TroubleKind::Silent(limit)) => Failure::FirstByteTimeout { limit, attempts },
        Some(TroubleKind::Transport | TroubleKind::Unreachable) | None => {
            Failure::UpstreamFailed { attempts }
        }
    }
}

fn verdict_with(troubles: Vec<Trouble>, note: String) -> Failure {
    match verdict(troubles) {
        Failure::UpstreamFailed { mut attempts } => {
            attempts.push(note);
            Failure::UpstreamFailed { attempts }
        }
        other => other,
    }
}
