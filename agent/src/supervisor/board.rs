//! The latest status of every shard, for one writer each and any number of readers. A slow reader misses states in between,
//! never the latest one, and nothing queues up for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llmgw_proto::shard::ShardStatus;
use tokio::sync::watch;

/// Statuses of shards that are over, once every reader has them; the oldest go.
pub const OVER_MAX: usize = 64;
/// The same, read or not.
pub const UNREAD_OVER_MAX: usize = 1_024;

/// Shared between the shards' tasks, which write, and the session, which reads.
#[derive(Clone, Default)]
pub struct Board {
    entries: Arc<Mutex<Entries>>,
    version: watch::Sender<u64>,
}

#[derive(Default)]
struct Entries {
    version: u64,
    /// By shard and spec: a refused second spec must not hide the state of the first.
    latest: BTreeMap<(String, String), (u64, ShardStatus)>,
    /// Up to where each reader has read.
    readers: BTreeMap<u64, u64>,
    next_reader: u64,
}

/// What changed since the last call, for one reader.
pub struct StatusChanges {
    board: Board,
    version: watch::Receiver<u64>,
    reader: u64,
}

impl Board {
    pub fn put(&self, status: ShardStatus) {
        self.put_with(status, || {});
    }

    /// The same with what goes together with it. `also` runs under the board's lock, so nobody who acts on its effect can put or read a
    /// status before this one.
    pub fn put_with(&self, status: ShardStatus, also: impl FnOnce()) {
        let mut entries = self.lock();
        also();
        entries.version += 1;
        let version = entries.version;
        let key = (status.shard.clone(), status.spec_hash.clone());
        entries.latest.insert(key, (version, status));
        entries.prune();
        drop(entries);
        self.version.send_replace(version);
    }

    pub fn get(&self, shard: &str, spec_hash: &str) -> Option<ShardStatus> {
        let key = (shard.to_owned(), spec_hash.to_owned());
        let entries = self.lock();
        entries.latest.get(&key).map(|(_, status)| status.clone())
    }

    /// Changes from now on.
    pub fn changes(&self) -> StatusChanges {
        let version = self.version.subscribe();
        let mut entries = self.lock();
        let reader = entries.next_reader;
        entries.next_reader += 1;
        let now = entries.version;
        entries.readers.insert(reader, now);
        StatusChanges {
            board: self.clone(),
            version,
            reader,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    /// Forgets the oldest of what is over. What a reader has not seen is kept for it: nobody would tell it again.
    fn prune(&mut self) {
        let read = self.readers.values().min().copied().unwrap_or(u64::MAX);
        let mut over: Vec<(u64, (String, String))> = self
            .latest
            .iter()
            .filter(|(_, (_, status))| status.state.is_over())
            .map(|(key, (version, _))| (*version, key.clone()))
            .collect();
        over.sort();
        let surplus = over.len().saturating_sub(OVER_MAX);
        let must_go = over.len().saturating_sub(UNREAD_OVER_MAX);
        for (at, (version, key)) in over.drain(..surplus).enumerate() {
            if at < must_go || version <= read {
                self.latest.remove(&key);
            }
        }
    }
}

impl StatusChanges {
    /// Waits for a change, and returns the latest status of each shard that changed, in the order of the changes.
    pub async fn next(&mut self) -> Vec<ShardStatus> {
        loop {
            self.version.mark_unchanged();
            let changed = self.now();
            if !changed.is_empty() {
                return changed;
            }
            // Ends only with the board, which this reader holds itself.
            let _ = self.version.changed().await;
        }
    }

    fn now(&mut self) -> Vec<ShardStatus> {
        let mut entries = self.board.lock();
        let now = entries.version;
        let seen = entries.readers.insert(self.reader, now).unwrap_or(now);
        let mut changed: Vec<&(u64, ShardStatus)> = entries
            .latest
            .values()
            .filter(|(version, _)| *version > seen)
            .collect();
        changed.sort_by_key(|(version, _)| *version);
        changed
            .into_iter()
            .map(|(_, status)| status.clone())
            .collect()
    }
}

impl Drop for StatusChanges {
    fn drop(&mut self) {
        self.board.lock().readers.remove(&self.reader);
    }
}

#[cfg(test)]
mod tests {
    use llmgw_proto::shard::ShardState;

    use super::*;

    fn status(shard: &str, hash: &str, state: ShardState) -> ShardStatus {
        ShardStatus {
            shard: shard.to_owned(),
            spec_hash: hash.to_owned(),
            state,
            reason: String::new(),
            exit: None,
            log_tail: Vec::new(),
            since_ms: 0,
            adopted: false,
        }
    }

    #[tokio::test]
    async fn a_slow_reader_gets_the_latest_state_of_each_shard_once() {
        let board = Board::default();
        let mut changes = board.changes();
        board.put(status("a", "1", ShardState::Starting));
        board.put(status("b", "1", ShardState::Starting));
        board.put(status("a", "1", ShardState::Ready));
        let latest = [
            status("b", "1", ShardState::Starting),
            status("a", "1", ShardState::Ready),
        ];
        assert_eq!(changes.next().await, latest);
        board.put(status("b", "1", ShardState::Ready));
        assert_eq!(changes.next().await, [status("b", "1", ShardState::Ready)]);
    }

    #[test]
    fn what_goes_with_a_status_is_not_seen_before_it() {
        let board = Board::default();
        let next = std::thread::scope(|scope| {
            let mut next = None;
            board.put_with(status("a", "1", ShardState::Failed), || {
                // Whoever learns of it here, as who starts the same shard again does, comes after this status.
                next = Some(scope.spawn(|| board.put(status("a", "1", ShardState::Pending))));
                assert!(board.entries.try_lock().is_err());
            });
            next.unwrap().join()
        });
        next.unwrap();
        let last = board.get("a", "1");
        assert_eq!(last, Some(status("a", "1", ShardState::Pending)));
    }

    #[tokio::test]
    async fn a_refused_second_spec_does_not_hide_the_first() {
        let board = Board::default();
        board.put(status("a", "1", ShardState::Ready));
        board.put(status("a", "2", ShardState::Failed));
        assert_eq!(
            board.get("a", "1"),
            Some(status("a", "1", ShardState::Ready))
        );
    }

    #[tokio::test]
    async fn what_is_over_is_kept_for_a_reader_that_has_not_seen_it_up_to_a_limit() {
        let board = Board::default();
        let mut slow = board.changes();
        drop(board.changes());
        let over =
            |number: usize| board.put(status(&format!("{number}"), "1", ShardState::Stopped));
        (0..OVER_MAX + 9).for_each(over);
        assert_eq!(slow.next().await.len(), OVER_MAX + 9);
        over(OVER_MAX + 9);
        assert_eq!(board.get("9", "1"), None, "it was read");
        assert_eq!(slow.next().await.len(), 1);
        (0..UNREAD_OVER_MAX + 9).for_each(over);
        assert_eq!(slow.next().await.len(), UNREAD_OVER_MAX);
    }

    #[test]
    fn what_is_over_is_kept_for_a_while_only() {
        let board = Board::default();
        board.put(status("living", "1", ShardState::Ready));
        for number in 0..=OVER_MAX {
            board.put(status(&format!("{number}"), "1", ShardState::Failed));
        }
        assert_eq!(board.get("0", "1"), None);
        assert!(board.get("1", "1").is_some() && board.get("living", "1").is_some());
    }
}
