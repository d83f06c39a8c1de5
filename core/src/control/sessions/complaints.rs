//! Lines about connections that go wrong, kept from filling the log: some of each kind from each address in a while, the others counted.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use tokio::time::Instant;

use super::strangers::network;
use crate::sparing::Unsaid;

/// Kinds of trouble of all addresses that are remembered. Whatever does not fit shares one entry for each kind: what only those can cause who
/// have a certificate of ours is heard whatever others do.
const REMEMBERED_MAX: usize = 1_024;
/// Lines of one kind from one address within [`WINDOW`].
const LINES_MAX: u32 = 3;
const WINDOW: Duration = Duration::from_secs(60);
/// Stands for all that are not remembered by themselves.
const OTHERS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// The network that counts as one address, and the kind.
type Key = (IpAddr, &'static str);

/// What was said lately.
#[derive(Debug, Default)]
pub(super) struct Complaints {
    said: HashMap<Key, Said>,
}

#[derive(Debug)]
struct Said {
    since: Instant,
    lines: u32,
    /// Those that were not written since the last one.
    unsaid: u64,
}

impl Complaints {
    /// Whether to write a line of this kind about a connection from this address. None: not now.
    pub(super) fn note(
        &mut self,
        address: IpAddr,
        kind: &'static str,
        now: Instant,
    ) -> Option<Unsaid> {
        let mut key = (network(address), kind);
        if !self.said.contains_key(&key) && self.said.len() >= REMEMBERED_MAX {
            self.said
                .retain(|_, said| now.duration_since(said.since) < WINDOW);
            if self.said.len() >= REMEMBERED_MAX {
                key.0 = OTHERS;
            }
        }
        let said = self.said.entry(key).or_insert(Said {
            since: now,
            lines: 0,
            unsaid: 0,
        });
        if now.duration_since(said.since) >= WINDOW {
            said.since = now;
            said.lines = 0;
        }
        if said.lines >= LINES_MAX {
            said.unsaid = said.unsaid.saturating_add(1);
            return None;
        }
        said.lines += 1;
        Some(Unsaid(std::mem::take(&mut said.unsaid)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u32) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + number))
    }

    #[test]
    fn some_lines_of_a_kind_are_written_and_the_others_are_counted_and_told_with_the_next() {
        let mut complaints = Complaints::default();
        let start = Instant::now();
        let mut note = |seconds, number, kind| {
            let now = start + Duration::from_secs(seconds);
            complaints.note(address(number), kind, now)
        };
        for _ in 0..LINES_MAX {
            assert_eq!(note(0, 1, "no_tls"), Some(Unsaid(0)));
        }
        for second in 0..59 {
            assert_eq!(note(second, 1, "no_tls"), None);
        }
        assert_eq!(note(59, 1, "expired"), Some(Unsaid(0)), "another kind");
        assert_eq!(note(59, 2, "no_tls"), Some(Unsaid(0)), "another address");
        assert_eq!(note(60, 1, "no_tls"), Some(Unsaid(59)));
        assert_eq!(note(60, 1, "no_tls"), Some(Unsaid(0)));
        assert_eq!(
            Unsaid(59).to_string(),
            " (59 more like it were not written)"
        );
        assert_eq!(Unsaid(0).to_string(), "");
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let mut complaints = Complaints::default();
        let now = Instant::now();
        let mut note = |text: &str| complaints.note(text.parse().unwrap(), "no_tls", now);
        let written = (0..1_000).filter(|number| note(&format!("2001:db8::{number:x}")).is_some());
        assert_eq!(written.count(), LINES_MAX as usize);
        assert!(note("2001:db8:0:1::1").is_some(), "another network");
        assert!(note("10.0.0.1").is_some());
        assert_eq!(complaints.said.len(), 3);
    }

    #[test]
    fn many_addresses_neither_fill_the_memory_nor_the_log() {
        let mut complaints = Complaints::default();
        let now = Instant::now();
        let lines = (0..100_000)
            .filter(|number| complaints.note(address(*number), "no_tls", now).is_some())
            .count();
        assert_eq!(lines, REMEMBERED_MAX + LINES_MAX as usize);
        assert!(complaints.said.len() <= REMEMBERED_MAX + 1);
        // What they all say does not hide what somebody else has to say.
        for _ in 0..LINES_MAX {
            assert!(complaints.note(address(0), "revoked", now).is_some());
        }
        // Those that are long ago make room.
        let later = now + WINDOW;
        assert!(complaints.note(address(200_000), "no_tls", later).is_some());
        assert_eq!(complaints.said.len(), 1);
    }
}
