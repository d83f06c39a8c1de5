//! Connections on which nobody has registered yet, counted: by themselves, so that they never take a node's place, and by address, so that one
//! address never takes all of theirs.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Of all addresses: a fleet that comes back at once is let in at once.
pub(super) const STRANGERS_MAX: usize = 6_000;
/// Of one address, or one /64 of IPv6. This machine's own are exempt: who is on it needs no connection to do harm.
pub(super) const STRANGERS_OF_ADDRESS_MAX: usize = 64;

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Strangers(Mutex<Counted>);

#[derive(Debug, Default)]
struct Counted {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Stranger {
    strangers: Arc<Strangers>,
    /// None: not counted by address.
    address: Option<IpAddr>,
}

/// There is no room for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    All,
    Address,
}

impl Strangers {
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr) -> Result<Stranger, Full> {
        let address = counted(address);
        let mut counts = self.lock();
        if counts.all >= STRANGERS_MAX {
            return Err(Full::All);
        }
        if let Some(address) = address {
            let count = counts.by_address.entry(address).or_default();
            if *count >= STRANGERS_OF_ADDRESS_MAX {
                return Err(Full::Address);
            }
            *count += 1;
        }
        counts.all += 1;
        Ok(Stranger {
            strangers: self.clone(),
            address,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut counts = self.strangers.lock();
        counts.all -= 1;
        let Some(address) = self.address else { return };
        if let Some(count) = counts.by_address.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                counts.by_address.remove(&address);
            }
        }
    }
}

/// What an address is counted as. None: by nothing.
fn counted(address: IpAddr) -> Option<IpAddr> {
    let address = address.to_canonical();
    match address {
        _ if address.is_loopback() => None,
        IpAddr::V4(_) => Some(address),
        // Whoever has one address of a /64 has all of them.
        IpAddr::V6(address) => {
            let network = u128::from(address) >> 64 << 64;
            Some(IpAddr::V6(Ipv6Addr::from(network)))
        }
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
        match self {
            Full::All => write!(
                f,
                "{STRANGERS_MAX} connections are open on which no agent has registered yet"
            ),
            Full::Address => write!(
                f,
                "{STRANGERS_OF_ADDRESS_MAX} connections of this address are open on which no agent has registered yet"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_address_takes_its_share_and_gives_it_back() {
        let strangers = Arc::new(Strangers::default());
        let admit = |text| strangers.admit(address(text));
        let mut held: Vec<Stranger> = (0..STRANGERS_OF_ADDRESS_MAX)
            .map(|_| admit("10.0.0.1").unwrap())
            .collect();
        assert_eq!(admit("10.0.0.1").unwrap_err(), Full::Address);
        assert_eq!(admit("::ffff:10.0.0.1").unwrap_err(), Full::Address);
        assert!(admit("10.0.0.2").is_ok(), "another address");
        held.pop();
        held.push(admit("10.0.0.1").unwrap());
        assert_eq!(admit("10.0.0.1").unwrap_err(), Full::Address);
        drop(held);
        assert!(strangers.lock().by_address.is_empty());
        assert_eq!(strangers.lock().all, 0);
    }

    #[test]
    fn a_network_of_ipv6_counts_as_one_address() {
        let strangers = Arc::new(Strangers::default());
        let held: Vec<_> = (0..=STRANGERS_OF_ADDRESS_MAX)
            .map(|number| strangers.admit(address(&format!("2001:db8:0:1::{number:x}"))))
            .collect();
        assert_eq!(held.iter().filter(|one| one.is_err()).count(), 1);
        assert!(strangers.admit(address("2001:db8:0:2::1")).is_ok());
    }

    #[test]
    fn this_machine_is_bounded_by_the_sum_alone() {
        let strangers = Arc::new(Strangers::default());
        let held: Vec<_> = (0..STRANGERS_MAX)
            .map(|_| strangers.admit(address("127.0.0.1")).unwrap())
            .collect();
        for text in ["127.0.0.1", "::1", "10.0.0.1"] {
            assert_eq!(strangers.admit(address(text)).unwrap_err(), Full::All);
        }
        assert!(strangers.lock().by_address.is_empty());
        drop(held);
        assert!(strangers.admit(address("10.0.0.1")).is_ok());
    }
}
