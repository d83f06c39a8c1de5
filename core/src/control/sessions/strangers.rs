//! Connections on which nobody has registered yet, counted: by themselves, so that they never take a node's place, and by address, so that one
//! address never takes all of theirs. Where there is no room for another one the oldest makes it: an agent registers within a moment, and whoever
//! only sits there has had that moment, so that sitting there keeps nobody out.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Of all addresses: a fleet that comes back at once is let in at once.
pub(super) const STRANGERS_MAX: usize = 6_000;
/// Of one address, or one /64 of IPv6. This machine's own are exempt: who is on it needs no connection to do harm.
pub(super) const STRANGERS_OF_ADDRESS_MAX: usize = 64;

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Strangers(Mutex<Counted>);

#[derive(Debug, Default)]
struct Counted {
    /// Of the next one.
    number: u64,
    all: usize,
    /// By address, and by number, the oldest first: how each is told that it has to go.
    by_address: HashMap<Address, BTreeMap<u64, oneshot::Sender<Full>>>,
}

/// What an address is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Address {
    Own,
    Other(IpAddr),
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Stranger {
    strangers: Arc<Strangers>,
    address: Address,
    number: u64,
    displaced: oneshot::Receiver<Full>,
}

/// There was no room for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    All,
    Address,
}

impl Strangers {
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr) -> Stranger {
        let address = Address::of(address);
        let mut counted = self.lock();
        let of_address = counted.by_address.get(&address).map_or(0, BTreeMap::len);
        if address != Address::Own && of_address >= STRANGERS_OF_ADDRESS_MAX {
            counted.displace_oldest(address, Full::Address);
        } else if counted.all >= STRANGERS_MAX {
            counted.displace_of_the_most();
        }
        let number = counted.number;
        let (tell, displaced) = oneshot::channel();
        counted.number += 1;
        counted.all += 1;
        counted
            .by_address
            .entry(address)
            .or_default()
            .insert(number, tell);
        Stranger {
            strangers: self.clone(),
            address,
            number,
            displaced,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counted {
    /// Whoever has the most of them pays, and of several the one that is here for longest.
    fn displace_of_the_most(&mut self) {
        let oldest = |of: &BTreeMap<u64, _>| Reverse(of.keys().next().copied());
        let most = self
            .by_address
            .iter()
            .max_by_key(|(_, of)| (of.len(), oldest(of)));
        if let Some((&address, _)) = most {
            self.displace_oldest(address, Full::All);
        }
    }

    fn displace_oldest(&mut self, address: Address, full: Full) {
        let of_address = self.by_address.get(&address);
        let oldest = of_address.and_then(|of| of.keys().next().copied());
        if let Some(tell) = oldest.and_then(|number| self.remove(address, number)) {
            // Who does not listen any more is gone as well.
            let _ = tell.send(full);
        }
    }

    fn remove(&mut self, address: Address, number: u64) -> Option<oneshot::Sender<Full>> {
        let of_address = self.by_address.get_mut(&address)?;
        let removed = of_address.remove(&number)?;
        if of_address.is_empty() {
            self.by_address.remove(&address);
        }
        self.all -= 1;
        Some(removed)
    }
}

impl Stranger {
    /// Returns when it has to go, and why.
    pub(super) async fn displaced(&mut self) -> Full {
        match (&mut self.displaced).await {
            Ok(full) => full,
            // It is forgotten only when it is told or dropped.
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.strangers.lock().remove(self.address, self.number);
    }
}

impl Address {
    fn of(address: IpAddr) -> Address {
        match address.to_canonical().is_loopback() {
            true => Address::Own,
            false => Address::Other(network(address)),
        }
    }
}

/// What an address is told apart by: whoever has one of a /64 of IPv6 has all of them.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from(u128::from(address) >> 64 << 64)),
    }
}

impl Full {
    /// One word for it, to tell repeated lines from each other.
    pub(super) fn kind(self) -> &'static str {
        match self {
            Full::All => "strangers",
            Full::Address => "strangers_of_address",
        }
    }
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (max, whose) = match self {
            Full::All => (STRANGERS_MAX, ""),
            Full::Address => (STRANGERS_OF_ADDRESS_MAX, " of this address"),
        };
        write!(
            f,
            "more than {max} connections{whose} are open on which no agent has registered yet, and this was the oldest"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admit(strangers: &Arc<Strangers>, address: &str) -> Stranger {
        strangers.admit(address.parse().unwrap())
    }

    fn told(stranger: &mut Stranger) -> Option<Full> {
        stranger.displaced.try_recv().ok()
    }

    #[test]
    fn the_oldest_of_an_address_makes_room_for_its_newest() {
        let strangers = Arc::new(Strangers::default());
        let mut held: Vec<Stranger> = (0..STRANGERS_OF_ADDRESS_MAX)
            .map(|_| admit(&strangers, "10.0.0.1"))
            .collect();
        let mut other = admit(&strangers, "10.0.0.2");
        assert!(held.iter_mut().all(|one| told(one).is_none()));
        for (at, address) in ["10.0.0.1", "::ffff:10.0.0.1"].into_iter().enumerate() {
            let newest = admit(&strangers, address);
            assert_eq!(told(&mut held[at]), Some(Full::Address), "{address}");
            held.push(newest);
        }
        let told_now = held.iter_mut().skip(2).filter_map(told).count();
        assert_eq!(told_now, 0, "nobody else has to go");
        assert_eq!(told(&mut other), None);
        // One that leaves by itself makes room as well.
        held.pop();
        held.push(admit(&strangers, "10.0.0.1"));
        assert_eq!(held.iter_mut().filter_map(told).count(), 0);
        assert_eq!(strangers.lock().all, STRANGERS_OF_ADDRESS_MAX + 1);
        drop((held, other));
        assert!(strangers.lock().by_address.is_empty());
        assert_eq!(strangers.lock().all, 0);
    }

    #[test]
    fn a_network_of_ipv6_counts_as_one_address() {
        let strangers = Arc::new(Strangers::default());
        let mut held: Vec<_> = (0..=STRANGERS_OF_ADDRESS_MAX)
            .map(|number| admit(&strangers, &format!("2001:db8:0:1::{number:x}")))
            .collect();
        let _other = admit(&strangers, "2001:db8:0:2::1");
        assert_eq!(held.iter_mut().filter_map(told).count(), 1);
        assert_eq!(strangers.lock().all, STRANGERS_OF_ADDRESS_MAX + 1);
    }

    #[test]
    fn where_all_is_taken_the_oldest_of_who_has_most_makes_room() {
        let strangers = Arc::new(Strangers::default());
        let mut few = admit(&strangers, "10.0.0.1");
        let mut own: Vec<_> = (1..STRANGERS_MAX)
            .map(|_| admit(&strangers, "127.0.0.1"))
            .collect();
        assert!(own.iter_mut().all(|one| told(one).is_none()));
        for (at, address) in ["10.0.0.2", "::1"].into_iter().enumerate() {
            own.push(admit(&strangers, address));
            assert_eq!(told(&mut own[at]), Some(Full::All), "{address}");
            assert_eq!(strangers.lock().all, STRANGERS_MAX);
        }
        assert_eq!(told(&mut few), None);
        drop((few, own));
        assert_eq!(strangers.lock().all, 0);
    }
}
