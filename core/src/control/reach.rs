//! At which addresses a node may say that it is reached. A certificate is for a node's own id: it is no reason to send the gateway's
//! requests to the server's own machine, where others trust whoever is on it, or to a service that a network has for its machines.
//!
//! Other ordinary addresses are not looked into: a node may have several, and nobody but the operator knows which are whose.

use std::net::IpAddr;

const NO_HOST: &str = "no host's address";
const OF_A_LINK: &str = "an address that means another machine on each link";
const OWN: &str = "an address of the server's own machine, where the agent is not";

/// What a node registers as its address: `peer` is where its connection comes from, `own` where it reached this machine.
///
/// # Errors
/// What is wrong with it, as the end of "which is ..".
pub fn may_advertise(address: &str, peer: IpAddr, own: IpAddr) -> Result<(), &'static str> {
    let is_here = is_here(peer, own);
    let (peer, own) = (peer.to_canonical(), own.to_canonical());
    let address = parsed(address).ok_or(NO_HOST)?;
    match () {
        // It is there: that much the connection proves.
        () if address == peer => Ok(()),
        () if is_no_host(address) => Err(NO_HOST),
        () if address.is_loopback() || address == own => is_here.then_some(()).ok_or(OWN),
        () if is_of_a_link(address) => Err(OF_A_LINK),
        () => Ok(()),
    }
}

/// Whether an agent that connects from `peer` is on this machine, which it reached at `own`.
pub fn is_here(peer: IpAddr, own: IpAddr) -> bool {
    let (peer, own) = (peer.to_canonical(), own.to_canonical());
    peer.is_loopback() || peer == own
}

/// Where a node's engine is said to be. One that was started when the node had another address is there still: also on loopback, where
/// the agent is on this machine.
pub fn may_serve_at(host: &str, advertise: &str, is_here: bool) -> bool {
    let (Some(host), advertise) = (parsed(host), parsed(advertise)) else {
        return false;
    };
    match () {
        () if advertise == Some(host) => true,
        () if host.is_loopback() => is_here,
        () => !is_no_host(host) && !is_of_a_link(host),
    }
}

fn parsed(text: &str) -> Option<IpAddr> {
    text.parse()
        .ok()
        .map(|address: IpAddr| address.to_canonical())
}

fn is_no_host(address: IpAddr) -> bool {
    match address {
        // All of 0.0.0.0/8 is "this network"; what is sent to 0.0.0.0 stays on the machine.
        IpAddr::V4(address) => {
            address.octets()[0] == 0 || address.is_multicast() || address.is_broadcast()
        }
        IpAddr::V6(address) => address.is_unspecified() || address.is_multicast(),
    }
}

fn is_of_a_link(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_says_where_it_is_and_not_where_the_server_or_a_service_of_its_network_is() {
        let far = ("10.0.0.2", "10.0.0.1");
        for ((peer, own), address, verdict) in [
            (far, "10.0.0.2", Ok(())),
            // Another network of the same machine, which an operator names in `advertise`.
            (far, "192.168.7.2", Ok(())),
            (far, "fd00::2", Ok(())),
            (far, "evil.example", Err(NO_HOST)),
            (far, "", Err(NO_HOST)),
            (far, "0.0.0.0", Err(NO_HOST)),
            (far, "0.0.0.1", Err(NO_HOST)),
            (far, "::", Err(NO_HOST)),
            (far, "::ffff:0.0.0.0", Err(NO_HOST)),
            (far, "224.0.0.1", Err(NO_HOST)),
            (far, "ff02::1", Err(NO_HOST)),
            (far, "255.255.255.255", Err(NO_HOST)),
            (far, "127.0.0.1", Err(OWN)),
            (far, "127.1.2.3", Err(OWN)),
            (far, "::1", Err(OWN)),
            (far, "::ffff:127.0.0.1", Err(OWN)),
            (far, "10.0.0.1", Err(OWN)),
            (far, "169.254.169.254", Err(OF_A_LINK)),
            (far, "fe80::1", Err(OF_A_LINK)),
            (("::ffff:10.0.0.2", "::ffff:10.0.0.1"), "10.0.0.2", Ok(())),
            (("::ffff:10.0.0.2", "::ffff:10.0.0.1"), "10.0.0.1", Err(OWN)),
            // On the server's own machine, by either of its addresses.
            (("127.0.0.1", "127.0.0.1"), "127.0.0.1", Ok(())),
            (("127.0.0.1", "127.0.0.1"), "10.0.0.1", Ok(())),
            (("::1", "::1"), "127.0.0.1", Ok(())),
            (("10.0.0.1", "10.0.0.1"), "10.0.0.1", Ok(())),
            (("10.0.0.1", "10.0.0.1"), "127.0.0.1", Ok(())),
            (
                ("127.0.0.1", "127.0.0.1"),
                "169.254.169.254",
                Err(OF_A_LINK),
            ),
            // Two machines on a cable.
            (("169.254.1.2", "169.254.1.1"), "169.254.1.2", Ok(())),
            (
                ("169.254.1.2", "169.254.1.1"),
                "169.254.169.254",
                Err(OF_A_LINK),
            ),
        ] {
            let (peer, own) = (peer.parse().unwrap(), own.parse().unwrap());
            let said = may_advertise(address, peer, own);
            assert_eq!(said, verdict, "{address} of {peer} at {own}");
        }
    }

    #[test]
    fn an_engine_is_where_its_node_is_or_was() {
        for (host, advertise, may) in [
            ("10.0.0.2", "10.0.0.2", true),
            ("10.0.0.7", "10.0.0.2", true),
            ("::ffff:10.0.0.2", "10.0.0.2", true),
            ("127.0.0.1", "127.0.0.1", true),
            ("127.0.0.2", "127.0.0.1", true),
            ("169.254.1.2", "169.254.1.2", true),
            ("127.0.0.1", "10.0.0.2", false),
            ("::1", "10.0.0.2", false),
            ("0.0.0.0", "10.0.0.2", false),
            ("169.254.169.254", "10.0.0.2", false),
            ("evil.example", "10.0.0.2", false),
            ("evil.example", "evil.example", false),
        ] {
            let is_here = advertise == "127.0.0.1";
            let found = may_serve_at(host, advertise, is_here);
            assert_eq!(found, may, "{host} of {advertise}");
        }
        // Its agent dialled loopback when they were started, and has an address of its own now.
        assert!(may_serve_at("127.0.0.1", "10.0.0.2", true));
        assert!(!may_serve_at("evil.example", "10.0.0.2", true));
    }
}
