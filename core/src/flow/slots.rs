//! What one engine has at work, counted once however many models it serves: slots, unfinished prompts, and who waits for it.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Requests at once on an engine that says nothing of its slots.
pub const UNKNOWN_SLOTS: u32 = 256;
/// The limit of an engine whose slots are its own affair.
const NO_LIMIT: u32 = u32::MAX;

/// How much may be sent to an engine; the rest waits in the gateway, where it can still be ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub inflight_max: u32,
    /// Tokens of unfinished prompts; an engine that has nothing to do gets a request of any size.
    pub prefill_max_tokens: u64,
}

/// One engine's counters. Shared by the replicas of every model that it serves, by their permits, and by the scorer, which reads them.
pub struct Slots {
    /// `NO_LIMIT` where unknown. A reload may change it.
    limit: AtomicU32,
    inflight: AtomicU32,
    queued: AtomicU32,
    /// Input tokens of requests that were sent and wait for their first byte.
    sent_tokens: AtomicU64,
    /// Input tokens of requests that wait in the gateway for this engine.
    queued_tokens: AtomicU64,
    /// Told when a slot is given back: the queues of all models that have this engine.
    watchers: Mutex<Vec<Weak<dyn Watcher>>>,
    /// Counts what was taken, so that the watchers take turns at being told first.
    turn: AtomicU32,
}

/// A queue that may have somebody for a slot.
pub trait Watcher: Send + Sync {
    fn freed(&self, slots: &Arc<Slots>);
}

impl Slots {
    pub fn new(limit: Option<u32>) -> Arc<Slots> {
        Arc::new(Slots {
            limit: AtomicU32::new(limit.unwrap_or(NO_LIMIT)),
            inflight: AtomicU32::new(0),
            queued: AtomicU32::new(0),
            sent_tokens: AtomicU64::new(0),
            queued_tokens: AtomicU64::new(0),
            watchers: Mutex::default(),
            turn: AtomicU32::new(0),
        })
    }

    /// Requests the engine works on at once, where that is known.
    pub fn limit(&self) -> Option<u32> {
        let limit = self.limit.load(Ordering::Relaxed);
        (limit != NO_LIMIT).then_some(limit)
    }

    /// Another number of slots holds from now on; what is at work stays.
    pub fn set_limit(&self, limit: Option<u32>) {
        self.limit
            .store(limit.unwrap_or(NO_LIMIT), Ordering::Relaxed);
    }

    pub fn inflight(&self) -> u32 {
        self.inflight.load(Ordering::Relaxed)
    }

    pub fn queued(&self) -> u32 {
        self.queued.load(Ordering::Relaxed)
    }

    /// Input tokens that are ahead of the next request: sent and unfinished ones, and those that wait here.
    pub fn prefill_tokens(&self) -> u64 {
        self.sent_tokens() + self.queued_tokens.load(Ordering::Relaxed)
    }

    /// Of these, the sent ones.
    pub fn sent_tokens(&self) -> u64 {
        self.sent_tokens.load(Ordering::Relaxed)
    }

    /// Every slot is taken.
    #[cfg(test)]
    fn is_full(&self) -> bool {
        self.inflight() >= self.limit.load(Ordering::Relaxed)
    }

    pub fn has_room(&self, room: &Room) -> bool {
        fits(self.inflight(), self.sent_tokens(), self.most(room), room)
    }

    /// Takes a slot for a prompt of so many uncached tokens, if there is room; the count never goes above the limit.
    pub fn try_take(&self, tokens: u64, room: &Room) -> bool {
        let most = self.most(room);
        let taken = self
            .inflight
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |inflight| {
                fits(inflight, self.sent_tokens(), most, room).then(|| inflight + 1)
            });
        if taken.is_ok() {
            self.sent_tokens.fetch_add(tokens, Ordering::Relaxed);
            self.turn.fetch_add(1, Ordering::Relaxed);
        }
        taken.is_ok()
    }

    /// A prompt was read: its tokens are no longer ahead of anybody.
    pub(super) fn read(&self, tokens: u64) {
        self.sent_tokens.fetch_sub(tokens, Ordering::Relaxed);
    }

    /// Gives a slot back.
    pub fn give_back(&self) {
        self.inflight.fetch_sub(1, Ordering::Relaxed);
    }

    pub fn enter(&self, tokens: u64) {
        self.queued.fetch_add(1, Ordering::Relaxed);
        self.queued_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    pub fn leave(&self, tokens: u64) {
        self.queued.fetch_sub(1, Ordering::Relaxed);
        self.queued_tokens.fetch_sub(tokens, Ordering::Relaxed);
    }

    pub fn watch(&self, watcher: Weak<dyn Watcher>) {
        let mut watchers = self.lock();
        watchers.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&watcher));
        watchers.push(watcher);
    }

    /// The queues to tell of room, another one first after every slot that was taken; none where only one model has this engine,
    /// whose queue knows by itself. Not after every call: a request makes room twice, and of two models the same one would
    /// always be first when its slot is free.
    pub fn watchers(&self) -> Vec<Arc<dyn Watcher>> {
        let watchers = self.lock();
        if watchers.len() < 2 {
            return Vec::new();
        }
        let turn = self.turn.load(Ordering::Relaxed) as usize;
        let first = turn % watchers.len();
        let (before, after) = watchers.split_at(first);
        after
            .iter()
            .chain(before)
            .filter_map(Weak::upgrade)
            .collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Weak<dyn Watcher>>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn most(&self, room: &Room) -> u32 {
        self.limit.load(Ordering::Relaxed).min(room.inflight_max)
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at work, {} queued", self.inflight(), self.queued())
    }
}

fn fits(inflight: u32, sent_tokens: u64, most: u32, room: &Room) -> bool {
    inflight < most && (inflight == 0 || sent_tokens < room.prefill_max_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room {
        inflight_max: UNKNOWN_SLOTS,
        prefill_max_tokens: 1_000,
    };

    #[test]
    fn slots_are_taken_up_to_the_limit_and_given_back() {
        let slots = Slots::new(Some(2));
        assert!(slots.try_take(10, &ROOM) && slots.try_take(20, &ROOM));
        assert!(slots.is_full() && !slots.try_take(30, &ROOM));
        assert_eq!((slots.inflight(), slots.sent_tokens()), (2, 30));
        slots.read(10);
        slots.give_back();
        assert!(slots.try_take(30, &ROOM));
        assert_eq!((slots.inflight(), slots.sent_tokens()), (2, 50));
    }

    #[test]
    fn an_idle_engine_takes_a_prompt_of_any_size_and_a_busy_one_no_more_than_the_gate_lets() {
        let slots = Slots::new(None);
        assert!(slots.try_take(5_000, &ROOM));
        assert!(!slots.try_take(1, &ROOM), "5000 tokens are ahead");
        slots.read(5_000);
        assert!(slots.try_take(999, &ROOM) && slots.try_take(5_000, &ROOM));
        assert!(!slots.has_room(&ROOM));
    }

    #[test]
    fn the_gate_counts_where_the_slots_are_unknown_and_a_reload_may_change_them() {
        let slots = Slots::new(None);
        let narrow = Room {
            inflight_max: 1,
            ..ROOM
        };
        assert_eq!(slots.limit(), None);
        assert!(slots.try_take(0, &narrow) && !slots.try_take(0, &narrow));
        assert!(slots.try_take(0, &ROOM));
        slots.set_limit(Some(2));
        assert!(slots.is_full() && !slots.try_take(0, &ROOM));
        slots.set_limit(Some(3));
        assert!(slots.try_take(0, &ROOM));
    }

    #[test]
    fn the_queues_of_an_engine_take_turns_by_the_slots_that_are_taken() {
        struct Queue(u32);
        impl Watcher for Queue {
            fn freed(&self, slots: &Arc<Slots>) {
                assert!(slots.try_take(self.0.into(), &ROOM));
            }
        }
        let slots = Slots::new(Some(1));
        let queues: Vec<Arc<dyn Watcher>> = vec![Arc::new(Queue(1)), Arc::new(Queue(2))];
        queues
            .iter()
            .for_each(|queue| slots.watch(Arc::downgrade(queue)));
        let mut taken = Vec::new();
        for _ in 0..4 {
            slots.watchers()[0].freed(&slots);
            let tokens = slots.sent_tokens();
            taken.push(tokens);
            // It is told that the prompt was read, and then that the slot is free.
            slots.read(tokens);
            slots.watchers();
            slots.give_back();
        }
        assert_eq!(taken, [1, 2, 1, 2]);
    }

    #[test]
    fn the_limit_is_exact_whoever_comes_at_the_same_time() {
        let slots = Slots::new(Some(100));
        let taken: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| (0..100).filter(|_| slots.try_take(0, &ROOM)).count()))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        assert_eq!((taken, slots.inflight()), (100, 100));
    }
}
