//! Admin connections by the address that they come from, so that one address never has them all.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::control::sessions::network;

/// Connections of one address, or one /64 of IPv6, at once: a scraper, a few probes and operators behind one NAT. This machine's own are
/// not counted.
pub const CONNECTIONS_OF_ADDRESS_MAX: usize = 32;

/// How many each has.
#[derive(Debug, Default)]
pub struct Addresses(Mutex<HashMap<IpAddr, usize>>);

/// One of them, until it is dropped.
#[derive(Debug)]
pub struct Held {
    addresses: Arc<Addresses>,
    /// None: not counted.
    address: Option<IpAddr>,
}

impl Addresses {
    /// None: the address has as many as it may.
    pub fn hold(self: &Arc<Self>, address: IpAddr) -> Option<Held> {
        let is_own = address.to_canonical().is_loopback();
        let address = (!is_own).then(|| network(address));
        if let Some(address) = address {
            let mut counts = self.lock();
            let count = counts.entry(address).or_default();
            if *count >= CONNECTIONS_OF_ADDRESS_MAX {
                return None;
            }
            *count += 1;
        }
        Some(Held {
            addresses: self.clone(),
            address,
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(address) = self.address else { return };
        let mut counts = self.addresses.lock();
        if let Some(count) = counts.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_takes_its_share_and_gives_it_back() {
        let addresses = Arc::new(Addresses::default());
        let hold = |text: &str| addresses.hold(text.parse().expect("it is an address"));
        let mut held: Vec<Held> = (0..CONNECTIONS_OF_ADDRESS_MAX)
            .map(|_| hold("10.0.0.1").expect("there is room"))
            .collect();
        assert!(hold("10.0.0.1").is_none() && hold("::ffff:10.0.0.1").is_none());
        assert!(hold("10.0.0.2").is_some(), "another address");
        held.pop();
        held.push(hold("10.0.0.1").expect("one left"));
        assert!(hold("10.0.0.1").is_none());
        held.extend((0..1_000).map(|_| hold("127.0.0.1").expect("it is this machine")));
        drop(held);
        assert!(addresses.lock().is_empty());
    }
}
