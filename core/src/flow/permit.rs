//! The right to have one request on one replica: counted while it lasts, given back when dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, TryAcquireError};

/// What one replica has at work, as the gateway itself knows it. Shared by the router, which reads it,
/// and by every permit, which changes it on the way in and out.
pub struct Slots {
    /// Requests the engine works on at once; unknown for an engine whose batch size is its own affair.
    limit: Option<u32>,
    free: Option<Arc<Semaphore>>,
    inflight: AtomicU32,
    queued: AtomicU32,
    /// Input tokens of requests that wait for their first byte, queued ones included.
    prefill_tokens: AtomicU64,
    /// Wakes requests that wait for another replica of the pool, once a slot is free that nobody here waits for.
    freed: Arc<Notify>,
}

impl Slots {
    pub fn new(limit: Option<u32>, freed: Arc<Notify>) -> Arc<Slots> {
        Arc::new(Slots {
            limit,
            free: limit.map(|slots| Arc::new(Semaphore::new(slots as usize))),
            inflight: AtomicU32::new(0),
            queued: AtomicU32::new(0),
            prefill_tokens: AtomicU64::new(0),
            freed,
        })
    }

    pub fn limit(&self) -> Option<u32> {
        self.limit
    }

    pub fn inflight(&self) -> u32 {
        self.inflight.load(Ordering::Relaxed)
    }

    pub fn queued(&self) -> u32 {
        self.queued.load(Ordering::Relaxed)
    }

    pub fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens.load(Ordering::Relaxed)
    }

    /// Every slot is taken: a request that chose this replica would wait.
    pub fn is_full(&self) -> bool {
        self.free
            .as_ref()
            .is_some_and(|free| free.available_permits() == 0)
    }

    /// Takes a slot at once, or says that none is free.
    pub fn try_take(self: &Arc<Self>, input_tokens: u64) -> Option<Permit> {
        let slot = match &self.free {
            None => None,
            Some(free) => match free.clone().try_acquire_owned() {
                Ok(slot) => Some(slot),
                Err(TryAcquireError::NoPermits | TryAcquireError::Closed) => return None,
            },
        };
        Some(Permit::new(self.clone(), slot, input_tokens))
    }

    /// Waits for a slot in arrival order. Dropped while it waits, it leaves the queue.
    pub async fn take(self: &Arc<Self>, input_tokens: u64) -> Permit {
        let _waiting = Waiting::new(self, input_tokens);
        let slot = match &self.free {
            // The semaphore is never closed: it lives as long as the slots that own it.
            Some(free) => free.clone().acquire_owned().await.ok(),
            None => None,
        };
        Permit::new(self.clone(), slot, input_tokens)
    }
}

/// A queued request: counted as load on the replica it waits for, since it will be.
struct Waiting<'a> {
    slots: &'a Slots,
    input_tokens: u64,
}

impl<'a> Waiting<'a> {
    fn new(slots: &'a Slots, input_tokens: u64) -> Self {
        slots.queued.fetch_add(1, Ordering::Relaxed);
        slots
            .prefill_tokens
            .fetch_add(input_tokens, Ordering::Relaxed);
        Waiting {
            slots,
            input_tokens,
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.slots.queued.fetch_sub(1, Ordering::Relaxed);
        self.slots
            .prefill_tokens
            .fetch_sub(self.input_tokens, Ordering::Relaxed);
    }
}

/// One request on one replica.
pub struct Permit {
    slots: Arc<Slots>,
    slot: Option<OwnedSemaphorePermit>,
    /// Counted as unfinished prefill until the first byte; 0 afterwards.
    prefill_tokens: u64,
}

impl Permit {
    fn new(slots: Arc<Slots>, slot: Option<OwnedSemaphorePermit>, prefill_tokens: u64) -> Permit {
        slots.inflight.fetch_add(1, Ordering::Relaxed);
        slots
            .prefill_tokens
            .fetch_add(prefill_tokens, Ordering::Relaxed);
        Permit {
            slots,
            slot,
            prefill_tokens,
        }
    }

    /// The first byte came: the prompt is no longer ahead of anybody.
    pub fn first_byte(&mut self) {
        let tokens = std::mem::take(&mut self.prefill_tokens);
        self.slots
            .prefill_tokens
            .fetch_sub(tokens, Ordering::Relaxed);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.first_byte();
        self.slots.inflight.fetch_sub(1, Ordering::Relaxed);
        // Given back first: who is woken looks at once. Where somebody waited for it, it is taken again already.
        if self.slot.take().is_some()
            && let Some(free) = &self.slots.free
            && free.available_permits() > 0
        {
            self.slots.freed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn counts(slots: &Slots) -> (u32, u32, u64) {
        (slots.inflight(), slots.queued(), slots.prefill_tokens())
    }

    #[test]
    fn a_permit_counts_while_it_lasts_and_its_prompt_until_the_first_byte() {
        let slots = Slots::new(None, Arc::default());
        let mut permit = slots.try_take(100).unwrap();
        assert_eq!(counts(&slots), (1, 0, 100));
        permit.first_byte();
        assert_eq!(counts(&slots), (1, 0, 0));
        drop(permit);
        assert_eq!(counts(&slots), (0, 0, 0));
    }

    #[test]
    fn a_waiter_gets_the_slot_that_was_given_back_and_one_that_leaves_counts_no_more() {
        let slots = Slots::new(Some(1), Arc::default());
        let first = slots.try_take(10).unwrap();
        assert!(slots.try_take(10).is_none());
        let mut context = Context::from_waker(Waker::noop());
        let mut waiting = pin!(slots.take(20));
        {
            let mut leaving = Box::pin(slots.take(30));
            assert!(waiting.as_mut().poll(&mut context).is_pending());
            assert!(leaving.as_mut().poll(&mut context).is_pending());
            assert_eq!(counts(&slots), (1, 2, 60));
        }
        assert_eq!(counts(&slots), (1, 1, 30));
        drop(first);
        assert!(waiting.as_mut().poll(&mut context).is_ready());
        assert_eq!(counts(&slots), (0, 0, 0));
    }
}
