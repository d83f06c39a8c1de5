//! How a failure leaves the request story: the policy's word on a refusal, what was reserved, the record.

use std::time::Duration;

use super::forward;
use super::job::Job;
use super::respond::Failure;
use crate::flow::retry_after::jittered;
use crate::random;

/// Called once for each request that gets an error instead of an answer, with what is left of it.
pub fn leave(job: &mut Job, failure: Failure) -> Failure {
    let failure = decide(job, failure);
    if let Some(reservation) = job.reservation.take() {
        reservation.refuse();
    }
    if let Some(record) = &mut job.record {
        forward::record_failure(record, &failure);
    }
    failure
}

/// Asks the policy how a refusal is to be answered. All other failures are what they are.
fn decide(job: &Job, failure: Failure) -> Failure {
    let is_refusal = matches!(
        failure,
        Failure::QueueFull { .. }
            | Failure::QueuedBytes { .. }
            | Failure::Shed { .. }
            | Failure::QueueTimeout { .. }
            | Failure::TenantLimit { .. }
            | Failure::NoReplica { .. }
    );
    if !is_refusal {
        return failure;
    }
    let answer = job.set.reject(&job.view(0), failure.code());
    let wait = answer.wait_ms.map(Duration::from_millis);
    // Where it never helps to come back, nobody is told when to.
    let wait = wait.or_else(|| failure.retry_after());
    Failure::Decided {
        status: answer.status,
        wait: wait.map(|wait| jittered(wait, random::next())),
        why: Box::new(failure),
    }
}
