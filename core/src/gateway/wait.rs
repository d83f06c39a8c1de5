//! A request's wait for its turn: a replica is chosen, a place in its queue taken, another one chosen when that replica fails.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::job::Job;
use super::respond::Failure;
use super::state::Gateway;
use crate::clock;
use crate::flow::dispatch::Ahead;
#[cfg(test)]
use crate::flow::meanwhile;
use crate::flow::permit::Permit;
use crate::flow::queues::{Entered, Place, Turn};
use crate::routing::pool::{Chosen, Unavailable};
use crate::routing::replica::{Replica, Standing};

/// How long a request waits for the first probe of a replica that was just configured: longer than its two questions may take.
const FIRST_PROBE_WAIT: Duration = Duration::from_secs(5);
/// For agents to say what runs after the server's start. The recovery ends long before, unless it is configured to be long.
const RECOVERY_WAIT_MAX: Duration = Duration::from_secs(60);
/// How long a request that has waited for its turn goes on waiting when the last replica takes nothing any more: an engine that failed three
/// times in a row is tried again after a second.
const REPLICAS_GONE_WAIT: Duration = Duration::from_secs(10);
/// How often choice and queue may disagree on whether a replica takes requests, for one request.
const CLOSED_MAX: u32 = 3;
/// Who is refused is told to come back after this, where nothing is known of how fast the model is served.
const UNKNOWN_WAIT: Duration = Duration::from_secs(10);

/// Chooses a replica and waits for its turn there. Most requests find both free.
pub async fn place(job: &mut Job, tried: &[Arc<str>]) -> Result<(Chosen, Permit), Failure> {
    if !tried.is_empty() {
        job.follow_reload();
    }
    let mut wait = Wait::new();
    let placed = loop {
        let chosen = match choose(job, tried) {
            Ok(chosen) => chosen,
            Err(_) => probed(job, tried, &mut wait).await?,
        };
        let Some(permit) = wait.turn(job, &chosen, tried).await? else {
            continue;
        };
        if let Some(chosen) = wait.settle(job, chosen, &permit) {
            break (chosen, permit);
        }
        // The replica failed somebody else in this very moment.
        wait.give_back(permit);
    };
    if let Some(record) = &mut job.record {
        record.queue += wait.started.elapsed();
    }
    job.ahead = job.ahead.or(wait.ahead);
    Ok(placed)
}

/// A replica whose first probe is under way, or whose trial is, may change everything: waits for that. So does, for a while, a request that
/// has waited for its turn already: all who wait would be thrown out by one short failure of the only replica.
async fn probed(job: &mut Job, tried: &[Arc<str>], wait: &mut Wait) -> Result<Chosen, Failure> {
    loop {
        let pool = job.pool.clone();
        let changed = pool.queues.changed.notified();
        tokio::pin!(changed);
        // Registered before any look, so that no change between the two is missed.
        changed.as_mut().enable();
        #[cfg(test)]
        meanwhile::reached(meanwhile::Point::Listening);
        if job.follow_reload() {
            wait.undecided_since = Instant::now();
            continue;
        }
        let unavailable = match choose(job, tried) {
            Ok(chosen) => return Ok(chosen),
            Err(unavailable) => unavailable,
        };
        let most = match wait.waited {
            _ if unavailable.recovering => RECOVERY_WAIT_MAX,
            true => REPLICAS_GONE_WAIT,
            false if unavailable.undecided => FIRST_PROBE_WAIT,
            false => Duration::ZERO,
        };
        let own = (wait.waited && !unavailable.recovering).then(|| wait.left(job));
        // Nobody knows yet whether there is a replica: its time is over, and that is all there is to tell.
        if own == Some(Duration::ZERO) && unavailable.undecided {
            return Err(queue_timeout(job, wait.waited_for(job)));
        }
        let left = left_without_replica(most, wait.undecided_since.elapsed(), own);
        if left.is_zero() {
            return Err(no_replica(job, unavailable));
        }
        // A trial becomes due without anybody saying so.
        let _ = tokio::time::timeout(left.min(unavailable.retry_in), changed).await;
    }
}

/// A request's wait for its turn, over all the replicas that it is bound to meanwhile.
struct Wait {
    started: Instant,
    /// Since when a replica without a probe is waited for.
    undecided_since: Instant,
    /// Taken with the first wait, and kept over the others; gone once it had its turn.
    place: Option<Place>,
    /// How long its band lets it wait, as that was when it first had to.
    ttl: Duration,
    /// Its body, which is kept meanwhile.
    held: Option<HeldBytes>,
    /// What was before it when it came.
    ahead: Option<Ahead>,
    /// It waited, so what it was told of the replica is old, and it is not sent away at once where there is none.
    waited: bool,
    /// It had its turn once, and could not use it.
    goes_first: bool,
    closed: u32,
}

impl Wait {
    fn new() -> Wait {
        let now = Instant::now();
        Wait {
            started: now,
            undecided_since: now,
            place: None,
            ttl: Duration::ZERO,
            held: None,
            ahead: None,
            waited: false,
            goes_first: false,
            closed: 0,
        }
    }

    /// Waits for the permit. `None`: another replica has to be chosen.
    async fn turn(
        &mut self,
        job: &mut Job,
        chosen: &Chosen,
        tried: &[Arc<str>],
    ) -> Result<Option<Permit>, Failure> {
        #[cfg(test)]
        meanwhile::reached(meanwhile::Point::Chosen);
        let replica = &chosen.admitted.replica;
        let goes_first = self.goes_first || chosen.admitted.is_trial() || !tried.is_empty();
        if let Some(place) = &mut self.place {
            if !place.bind(replica.lane, goes_first) {
                return self.closed(job, replica);
            }
        } else {
            match job.pool.queues.enter(&job.arrival(chosen, goes_first)) {
                Entered::Now(permit) => return Ok(Some(permit)),
                Entered::Full(ahead) => return Err(queue_full(job, ahead)),
                Entered::Shed(saturation) => return Err(shed(job, saturation)),
                Entered::Closed => return self.closed(job, replica),
                Entered::Waits(place) => {
                    if !self.waited {
                        self.held = Some(HeldBytes::take(job, place.ahead)?);
                        self.ahead = Some(place.ahead);
                        self.ttl = Duration::from_millis(place.ttl_ms);
                    }
                    self.place = Some(place);
                }
            }
        }
        self.waited = true;
        // Another one may have opened between the choice and the queue, when nobody waited for a trial yet.
        if chosen.admitted.is_trial() && is_any_open(job, tried) {
            job.pool.queues.release_trials();
        }
        let left = self.left(job);
        let Some(place) = &mut self.place else {
            return Ok(None);
        };
        let turn = tokio::time::timeout(left, place.turn()).await;
        // Until now there was a replica to wait for: the time for a first probe begins when there is none.
        self.undecided_since = Instant::now();
        match turn {
            Ok(Turn::Granted(permit)) => Ok(Some(permit)),
            Ok(Turn::ChooseAgain) => {
                job.follow_reload();
                Ok(None)
            }
            Ok(Turn::Displaced) => {
                let ahead = job.pool.queues.ahead_of(&job.band.name);
                Err(queue_full(job, ahead))
            }
            Err(_) => Err(queue_timeout(job, self.waited_for(job))),
        }
    }

    /// All its waiting, that before an engine failed it included.
    fn waited_for(&self, job: &Job) -> Duration {
        let before = job
            .record
            .as_ref()
            .map_or(Duration::ZERO, |record| record.queue);
        before + self.started.elapsed()
    }

    /// How long it may go on.
    fn left(&self, job: &Job) -> Duration {
        let ttl = job.queue_ttl.unwrap_or(self.ttl);
        ttl.saturating_sub(self.waited_for(job))
    }

    /// The queue knows better than the choice, or the other way round: they are told, a few times.
    fn closed(&mut self, job: &mut Job, replica: &Replica) -> Result<Option<Permit>, Failure> {
        self.closed += 1;
        if self.closed > CLOSED_MAX {
            let unavailable = Unavailable {
                reason: format!("{}: it left while the request waited for it", replica.id),
                retry_in: Duration::from_secs(1),
                undecided: false,
                recovering: false,
            };
            return Err(no_replica(job, unavailable));
        }
        replica.tell_queue();
        job.follow_reload();
        Ok(None)
    }

    /// The replica that the permit is for, which may be another one than was chosen long ago.
    fn settle(&self, job: &mut Job, chosen: Chosen, permit: &Permit) -> Option<Chosen> {
        let is_same = permit.lane() == Some(chosen.admitted.replica.lane);
        if is_same && (!self.waited || chosen.admitted.is_trial()) {
            return Some(Chosen {
                prefill_before: permit.sent_before(),
                ..chosen
            });
        }
        job.follow_reload();
        let id = permit.replica()?;
        let replica = job.pool.replicas.iter().find(|replica| replica.id == *id)?;
        Some(Chosen {
            admitted: replica.admit(clock::now_ms())?,
            prefix_tokens: if is_same { chosen.prefix_tokens } else { 0 },
            prefill_before: permit.sent_before(),
            reason: match is_same {
                true => chosen.reason,
                false => "free_first".to_string(),
            },
            stay: chosen.stay,
        })
    }

    /// Its turn came to nothing. It waits on, and goes first next time, in a place of its own that is new: the old one is used up.
    fn give_back(&mut self, mut permit: Permit) {
        permit.failed();
        self.place = None;
        self.goes_first = true;
    }
}

/// The bytes of a body that waits; given back when dropped.
struct HeldBytes {
    gateway: Arc<Gateway>,
    bytes: u64,
}

impl HeldBytes {
    fn take(job: &Job, ahead: Ahead) -> Result<HeldBytes, Failure> {
        let bytes = job.body.bytes().len() as u64;
        let limit_bytes = job.config.limits.queued_bytes_max;
        let held = HeldBytes {
            gateway: job.gateway.clone(),
            bytes,
        };
        let before = job.gateway.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        match before + bytes <= limit_bytes {
            true => Ok(held),
            false => Err(Failure::QueuedBytes {
                limit_bytes,
                retry_after: retry_after(ahead),
            }),
        }
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        let bytes = &self.gateway.queued_bytes;
        bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

fn queue_full(job: &Job, ahead: Ahead) -> Failure {
    Failure::QueueFull {
        model: job.pool.model.name.to_string(),
        band: job.band.name.to_string(),
        queued: ahead.requests,
        retry_after: retry_after(ahead),
    }
}

fn shed(job: &Job, saturation: f64) -> Failure {
    Failure::Shed {
        model: job.pool.model.name.to_string(),
        band: job.band.name.to_string(),
        saturation,
        retry_after: retry_after(job.pool.queues.ahead_of(&job.band.name)),
    }
}

/// `most` is counted from when there was no replica any more; a request's own time has been running for longer.
fn left_without_replica(most: Duration, without: Duration, own: Option<Duration>) -> Duration {
    let left = most.saturating_sub(without);
    own.map_or(left, |own| left.min(own))
}

fn queue_timeout(job: &Job, waited: Duration) -> Failure {
    Failure::QueueTimeout {
        model: job.pool.model.name.to_string(),
        waited,
        retry_after: retry_after(job.pool.queues.ahead_of(&job.band.name)),
    }
}

/// How long what is queued ahead takes at the speed of the last minute.
fn retry_after(ahead: Ahead) -> Duration {
    match ahead.wait_ms {
        Some(wait_ms) => Duration::from_secs_f64(wait_ms.clamp(0.0, 3_600_000.0) / 1e3),
        None if ahead.requests == 0 => Duration::ZERO,
        None => UNKNOWN_WAIT,
    }
}

fn choose(job: &Job, tried: &[Arc<str>]) -> Result<Chosen, Unavailable> {
    let view = job.view(tried.len() as u32);
    job.pool
        .choose(&job.asked, &job.prompt, tried, &job.set, &view)
}

fn is_any_open(job: &Job, tried: &[Arc<str>]) -> bool {
    let now = clock::now_ms();
    let replicas = &mut job.pool.replicas.iter();
    replicas.any(|replica| !tried.contains(&replica.id) && replica.standing(now) == Standing::Open)
}

fn no_replica(job: &Job, unavailable: Unavailable) -> Failure {
    Failure::NoReplica {
        model: job.pool.model.name.to_string(),
        reason: unavailable.reason,
        retry_after: unavailable.retry_in,
    }
}

#[cfg(test)]
mod tests;
