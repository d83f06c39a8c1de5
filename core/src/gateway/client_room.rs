//! Who may be connected to `listen`: as many clients as the limit of open files leaves room for. One more waits, and in front of the listener
//! the kernel keeps those behind it: a crowd of clients takes no descriptor from engines, agents and operators.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::client_io::Wire;
use crate::sparing::Sparing;
use crate::telemetry::metrics::{ClientMetrics, Metrics};

/// A client that has no request at work is let go after this. In HTTP/1.1 that is said of the time before its first, hyper has a limit for the others.
const SILENCE_MAX: Duration = Duration::from_secs(75);
/// And after this where there is little room.
const CROWDED_SILENCE_MAX: Duration = Duration::from_secs(10);
/// There is little room when less than this part of it is left.
const CROWDED_PART: usize = 4;

/// Room for so many clients.
pub struct ClientRoom {
    clients_max: usize,
    seats: Arc<Semaphore>,
    metrics: Arc<Metrics>,
    full: Mutex<Sparing>,
}

/// A connected client, until it is dropped.
pub struct Seat {
    metrics: Arc<Metrics>,
    /// None: never, the semaphore is not closed.
    _permit: Option<OwnedSemaphorePermit>,
}

impl ClientRoom {
    pub fn new(clients_max: usize, metrics: &Arc<Metrics>) -> Arc<ClientRoom> {
        let clients_max = clients_max.min(Semaphore::MAX_PERMITS);
        metrics.clients.max.set(clients_max as i64);
        Arc::new(ClientRoom {
            clients_max,
            seats: Arc::new(Semaphore::new(clients_max)),
            metrics: metrics.clone(),
            full: Mutex::default(),
        })
    }

    /// A place for a client, once there is one.
    pub async fn seat(&self) -> Seat {
        let free = self.seats.clone().try_acquire_owned();
        let permit = match free {
            Ok(permit) => Some(permit),
            Err(_) => {
                self.waits();
                self.seats.clone().acquire_owned().await.ok()
            }
        };
        let clients: &ClientMetrics = &self.metrics.clients;
        clients.open.inc();
        Seat {
            metrics: self.metrics.clone(),
            _permit: permit,
        }
    }

    /// Ends when a client was silent for as long as it may be. What is left of the room may become little at any time, so it is looked at
    /// again and again, and so is whether the client asked for anything: that is seen up to a step late.
    pub async fn patience(&self, client: Arc<Wire>) {
        let mut left = SILENCE_MAX;
        while !left.is_zero() {
            let step = left.min(CROWDED_SILENCE_MAX);
            tokio::time::sleep(step).await;
            if client.was_at_work() {
                left = SILENCE_MAX;
                continue;
            }
            left -= step;
            if self.is_crowded() {
                return;
            }
        }
    }

    fn is_crowded(&self) -> bool {
        self.seats.available_permits() < self.clients_max / CROWDED_PART
    }

    fn waits(&self) {
        self.metrics.clients.waited.inc();
        let mut full = self.full.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(unsaid) = full.note() {
            tracing::warn!(
                "`listen` is full: {} clients are connected, as many as the limit of open files leaves room for, and others wait until one leaves{unsaid}",
                self.clients_max
            );
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.metrics.clients.open.dec();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn room(clients_max: usize) -> (Arc<ClientRoom>, Arc<Metrics>) {
        let metrics = Arc::<Metrics>::default();
        (ClientRoom::new(clients_max, &metrics), metrics)
    }

    #[tokio::test(start_paused = true)]
    async fn one_client_more_than_there_is_room_for_waits_until_another_leaves() {
        let (room, metrics) = room(2);
        let mut seats = vec![room.seat().await, room.seat().await];
        let counts = || {
            let clients = &metrics.clients;
            (clients.open.get(), clients.max.get(), clients.waited.get())
        };
        assert_eq!(counts(), (2, 2, 0));
        let waiting = tokio::time::timeout(Duration::from_secs(3_600), room.seat());
        assert!(waiting.await.is_err(), "nobody left");
        assert_eq!(counts(), (2, 2, 1));
        let waiting = tokio::spawn({
            let room = room.clone();
            async move { room.seat().await }
        });
        tokio::task::yield_now().await;
        seats.pop();
        seats.push(waiting.await.expect("it has a seat"));
        assert_eq!(counts(), (2, 2, 2));
        drop(seats);
        assert_eq!(counts(), (0, 2, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_is_waited_for_less_where_there_is_little_room() {
        let (room, _) = room(8);
        let waited = async || {
            let since = Instant::now();
            room.patience(Wire::of_a_test()).await;
            since.elapsed()
        };
        assert_eq!(waited().await, SILENCE_MAX);
        let mut seats = Vec::new();
        for _ in 0..6 {
            seats.push(room.seat().await);
        }
        assert_eq!(waited().await, SILENCE_MAX, "a quarter is left");
        seats.push(room.seat().await);
        assert_eq!(waited().await, CROWDED_SILENCE_MAX);
        seats.pop();
        // Also one that came when there was more.
        let later = tokio::time::sleep(Duration::from_secs(25));
        let (waited, ()) = tokio::join!(waited(), async {
            later.await;
            seats.push(room.seat().await);
        });
        assert_eq!(waited, CROWDED_SILENCE_MAX * 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_is_not_silent_while_a_request_of_it_is_at_work() {
        let (room, _) = room(8);
        let wire = Wire::of_a_test();
        let since = Instant::now();
        let requests = async {
            // One that takes long, and one between two looks.
            let request = wire.begin();
            tokio::time::sleep(Duration::from_secs(200)).await;
            drop(request);
            tokio::time::sleep(Duration::from_secs(72)).await;
            drop(wire.begin());
        };
        tokio::join!(room.patience(wire.clone()), requests);
        let looked = Duration::from_secs(280);
        assert_eq!(since.elapsed(), looked + SILENCE_MAX);
    }
}
