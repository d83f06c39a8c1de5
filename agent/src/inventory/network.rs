//! Interfaces and routes: which one leads to the server, and which IP subnet an address is in.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use llmgw_proto::inventory::adapter::AdapterKind;
use llmgw_proto::inventory::host::{Route, RouteDecision};
use llmgw_proto::inventory::{Adapter, Reading};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use super::sysfs;

/// A routing table of a node that routes for many containers.
const ROUTES_MAX_BYTES: u64 = 1 << 20;
const ADDRESSES_MAX: usize = 4096;
/// How long the server's name may take to be looked up.
const LOOKUP_MAX: Duration = Duration::from_millis(3_000);

/// The flag of a route that leads through a gateway is 2; 1 says that it is up, 0x200 that it refuses.
const ROUTE_UP: u32 = 0x1;
const ROUTE_REJECT: u32 = 0x200;

/// One address of one interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceAddress {
    pub interface: String,
    pub address: IpAddr,
    pub prefix_bits: u8,
}

/// A line of `/proc/net/route`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ipv4Route {
    pub interface: String,
    pub destination: Ipv4Addr,
    pub mask: Ipv4Addr,
    pub metric: u32,
}

/// The addresses of this machine's interfaces that are up.
pub fn addresses() -> Result<Vec<InterfaceAddress>, String> {
    let all = getifaddrs().map_err(|error| format!("interfaces: {}", error.desc()))?;
    let one = |entry: nix::ifaddrs::InterfaceAddress| {
        if !entry.flags.contains(InterfaceFlags::IFF_UP) {
            return None;
        }
        let (address, mask) = (entry.address?, entry.netmask?);
        let (address, prefix_bits) = match address.as_sockaddr_in() {
            Some(v4) => (
                IpAddr::V4(v4.ip()),
                mask.as_sockaddr_in()?.ip().to_bits().leading_ones(),
            ),
            None => (
                IpAddr::V6(address.as_sockaddr_in6()?.ip()),
                mask.as_sockaddr_in6()?.ip().to_bits().leading_ones(),
            ),
        };
        Some(InterfaceAddress {
            interface: entry.interface_name,
            address,
            prefix_bits: u8::try_from(prefix_bits).ok()?,
        })
    };
    Ok(all.filter_map(one).take(ADDRESSES_MAX).collect())
}

/// Gives each RoCE adapter the IP subnet of its address, whose mask only the interface knows.
pub fn set_subnets(adapters: &mut [Adapter], addresses: &Result<Vec<InterfaceAddress>, String>) {
    for adapter in adapters {
        if adapter.kind != AdapterKind::Roce {
            continue;
        }
        let Some(address) = adapter.address.value().copied() else {
            continue;
        };
        adapter.subnet = match addresses {
            Err(why) => Reading::unknown(why),
            Ok(all) => match all.iter().find(|entry| entry.address == address) {
                Some(entry) => Reading::Known(entry.subnet()),
                None => Reading::unknown(format!("no interface has address {address}")),
            },
        };
    }
}

impl InterfaceAddress {
    /// `10.1.0.0/24`.
    pub fn subnet(&self) -> String {
        let bits = u32::from(self.prefix_bits);
        match self.address {
            IpAddr::V4(address) => {
                let mask = u32::MAX.checked_shl(32 - bits.min(32)).unwrap_or(0);
                format!("{}/{bits}", Ipv4Addr::from_bits(address.to_bits() & mask))
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.checked_shl(128 - bits.min(128)).unwrap_or(0);
                format!("{}/{bits}", Ipv6Addr::from_bits(address.to_bits() & mask))
            }
        }
    }
}

/// The lines of `/proc/net/route` that lead anywhere.
pub fn ipv4_routes(text: &str) -> Vec<Ipv4Route> {
    let address = |field: &str| {
        let bits = u32::from_str_radix(field, 16).ok()?;
        // The kernel prints the four bytes as one number in the machine's own order.
        Some(Ipv4Addr::from(bits.to_ne_bytes()))
    };
    let one = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[
            interface,
            destination,
            _gateway,
            flags,
            _,
            _,
            metric,
            mask,
            ..,
        ] = fields.as_slice()
        else {
            return None;
        };
        let flags = u32::from_str_radix(flags, 16).ok()?;
        (flags & ROUTE_UP != 0 && flags & ROUTE_REJECT == 0).then_some(())?;
        Some(Ipv4Route {
            interface: interface.to_owned(),
            destination: address(destination)?,
            mask: address(mask)?,
            metric: metric.parse().ok()?,
        })
    };
    text.lines().skip(1).filter_map(one).collect()
}

/// The interface of the IPv6 default route in `/proc/net/ipv6_route`.
pub fn ipv6_default(text: &str) -> Option<String> {
    let one = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[destination, bits, _, _, _, metric, _, _, flags, interface] = fields.as_slice()
        else {
            return None;
        };
        let flags = u32::from_str_radix(flags, 16).ok()?;
        let metric = u32::from_str_radix(metric, 16).ok()?;
        let is_default = bits == "00" && destination.bytes().all(|byte| byte == b'0');
        let is_real = flags & ROUTE_UP != 0 && flags & ROUTE_REJECT == 0 && interface != "lo";
        (is_default && is_real).then(|| (metric, interface.to_owned()))
    };
    let best = text
        .lines()
        .filter_map(one)
        .min_by_key(|(metric, _)| *metric);
    best.map(|(_, interface)| interface)
}

/// The interface of the default route: IPv4's, else IPv6's.
pub fn default_interface(proc: &Path) -> Reading<String> {
    let file = |name: &str| sysfs::read(&proc.join("net").join(name), ROUTES_MAX_BYTES);
    let ipv4 = match file("route") {
        Ok(text) => text,
        Err(error) => {
            return Reading::unknown(format!("`net/route`: {}", sysfs::cause(&error)));
        }
    };
    let default = ipv4_routes(&ipv4)
        .into_iter()
        .filter(|route| route.destination.is_unspecified() && route.mask.is_unspecified())
        .min_by_key(|route| route.metric)
        .map(|route| route.interface);
    // A machine without IPv6 has no such file.
    match default.or_else(|| ipv6_default(&file("ipv6_route").unwrap_or_default())) {
        Some(interface) => Reading::Known(interface),
        None => Reading::unknown("there is no default route"),
    }
}

/// The way to the server. `socket_interface` is the operator's word.
pub fn route(
    proc: &Path,
    server: Option<&str>,
    socket_interface: Option<&str>,
    addresses: &Result<Vec<InterfaceAddress>, String>,
) -> Route {
    let source = match server {
        Some(server) => match source_address(server) {
            Ok(source) => Reading::Known(source),
            Err(why) => Reading::Unknown(why),
        },
        None => Reading::unknown("no server is configured"),
    };
    let of_address = |address: IpAddr| {
        let all = addresses.as_ref().ok()?;
        let entry = all.iter().find(|entry| entry.address == address)?;
        Some(entry.interface.clone())
    };
    let (interface, decided_by) = match (socket_interface, source.value()) {
        (Some(name), _) => (Reading::Known(name.to_owned()), RouteDecision::Operator),
        (None, Some(address)) => match of_address(*address) {
            Some(name) => (Reading::Known(name), RouteDecision::SourceAddress),
            None => (
                Reading::unknown(format!("no interface has address {address}")),
                RouteDecision::Undecided,
            ),
        },
        // The way to this server is not known, so no other route is passed off as it.
        (None, None) if server.is_some() => {
            let why = "there is no way to the server";
            (Reading::unknown(why), RouteDecision::Undecided)
        }
        (None, None) => match default_interface(proc) {
            Reading::Unknown(why) => (Reading::Unknown(why), RouteDecision::Undecided),
            interface => (interface, RouteDecision::DefaultRoute),
        },
    };
    Route {
        server: server.map(str::to_owned),
        interface,
        source,
        decided_by,
    }
}

/// The address that packets to the server leave with: the kernel chooses it when a socket is connected. Nothing is sent.
fn source_address(server: &str) -> Result<IpAddr, String> {
    let (host, port) = host_and_port(server).ok_or(format!("`{server}` is no address"))?;
    let address = look_up(&host, port)?;
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let connected = UdpSocket::bind(any).and_then(|socket| {
        socket.connect(address)?;
        socket.local_addr()
    });
    match connected {
        Ok(local) => Ok(local.ip()),
        Err(error) => Err(format!("{host}: {}", sysfs::cause(&error))),
    }
}

/// The first address of a name, within [`LOOKUP_MAX`]: the resolver itself cannot be told how long to take.
fn look_up(host: &str, port: u16) -> Result<SocketAddr, String> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok((address, port).into());
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    std::thread::spawn(move || {
        let found = (name.as_str(), port)
            .to_socket_addrs()
            .map(|mut all| all.next());
        // Nobody waits any more once it took too long.
        let _ = sender.send(found);
    });
    match receiver.recv_timeout(LOOKUP_MAX) {
        Ok(Ok(Some(address))) => Ok(address),
        Ok(Ok(None)) => Err(format!("{host} has no address")),
        Ok(Err(error)) => Err(format!("{host}: {}", sysfs::cause(&error))),
        Err(_) => Err(format!(
            "looking up {host} takes longer than {} s",
            LOOKUP_MAX.as_secs()
        )),
    }
}

/// Host and port of `https://ctl.example:8443`, of `[fd00::1]:8443`, or of a bare host.
pub fn host_and_port(server: &str) -> Option<(String, u16)> {
    let (scheme, rest) = server.split_once("://").unwrap_or(("https", server));
    let default = if scheme == "http" { 80 } else { 443 };
    let authority = rest.split(['/', '?', '#']).next()?;
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']')?;
            (host, after.strip_prefix(':'))
        }
        None => match authority.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = match port {
        Some(port) => port.parse().ok()?,
        None => default,
    };
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorded::TempTree;

    const ROUTES: &str = "\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth1\t00000000\t0100A8C0\t0003\t0\t0\t200\t00000000\t0\t0\t0
eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
*\t0000FEA9\t00000000\t0200\t0\t0\t0\t0000FFFF\t0\t0\t0
short line
";

    const ROUTES_V6: &str = "\
00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     ens5
fd000000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     ens6
";

    #[test]
    fn the_default_route_with_the_lowest_metric_is_the_one() {
        let routes = ipv4_routes(ROUTES);
        assert_eq!(routes.len(), 3);
        assert_eq!(routes[2].mask, Ipv4Addr::new(255, 255, 255, 0));
        let tree = TempTree::empty();
        std::fs::create_dir(tree.path().join("net")).unwrap();
        let net = |name: &str| tree.path().join("net").join(name);
        std::fs::write(net("route"), ROUTES).unwrap();
        std::fs::write(net("ipv6_route"), ROUTES_V6).unwrap();
        assert_eq!(
            default_interface(tree.path()),
            Reading::Known("eth0".to_owned())
        );
        // Only IPv6: the unreachable default of the loopback is none.
        std::fs::write(net("route"), ROUTES.lines().next().unwrap()).unwrap();
        assert_eq!(
            default_interface(tree.path()),
            Reading::Known("ens5".to_owned())
        );
        std::fs::write(net("ipv6_route"), "").unwrap();
        assert_eq!(
            default_interface(tree.path()),
            Reading::unknown("there is no default route")
        );
        std::fs::remove_file(net("route")).unwrap();
        assert_eq!(
            default_interface(tree.path()),
            Reading::unknown("`net/route`: no such file")
        );
    }

    #[test]
    fn a_server_is_read_with_and_without_scheme_and_port() {
        let some = |host: &str, port| Some((host.to_owned(), port));
        for (text, expected) in [
            ("https://ctl.example:8443", some("ctl.example", 8443)),
            ("https://ctl.example/x", some("ctl.example", 443)),
            ("http://10.0.0.1", some("10.0.0.1", 80)),
            ("https://[fd00::1]:8443", some("fd00::1", 8443)),
            ("ctl.example:8443", some("ctl.example", 8443)),
            ("https://:8443", None),
            ("https://ctl.example:port", None),
            ("https://[fd00::1", None),
            ("", None),
        ] {
            assert_eq!(host_and_port(text), expected, "{text}");
        }
    }

    fn address(interface: &str, address: &str, prefix_bits: u8) -> InterfaceAddress {
        InterfaceAddress {
            interface: interface.to_owned(),
            address: address.parse().unwrap(),
            prefix_bits,
        }
    }

    #[test]
    fn the_interface_of_the_route_is_the_one_with_the_source_address() {
        let addresses = Ok(vec![address("lo", "127.0.0.1", 8)]);
        let proc = Path::new("/nowhere");
        let to_itself = route(proc, Some("http://127.0.0.1:1"), None, &addresses);
        assert_eq!(to_itself.interface, Reading::Known("lo".to_owned()));
        assert_eq!(to_itself.decided_by, RouteDecision::SourceAddress);
        assert_eq!(to_itself.source, Reading::Known(Ipv4Addr::LOCALHOST.into()));
        let operator = route(proc, Some("http://127.0.0.1:1"), Some("eth7"), &addresses);
        assert_eq!(operator.interface, Reading::Known("eth7".to_owned()));
        assert_eq!(operator.decided_by, RouteDecision::Operator);
        let nobody = route(proc, Some("http://127.0.0.1:1"), None, &Ok(Vec::new()));
        assert_eq!(
            nobody.interface,
            Reading::unknown("no interface has address 127.0.0.1")
        );
        let wrong = route(proc, Some("https://:1"), None, &addresses);
        assert_eq!(wrong.source, Reading::unknown("`https://:1` is no address"));
        assert_eq!(wrong.decided_by, RouteDecision::Undecided);
        let none = route(proc, None, None, &addresses);
        assert_eq!(none.source, Reading::unknown("no server is configured"));
        assert_eq!(
            none.interface,
            Reading::unknown("`net/route`: no such file")
        );
    }

    #[test]
    fn a_subnet_is_the_address_under_its_mask() {
        for (entry, expected) in [
            (address("a", "192.168.10.11", 24), "192.168.10.0/24"),
            (address("a", "10.0.0.21", 32), "10.0.0.21/32"),
            (address("a", "10.0.0.21", 0), "0.0.0.0/0"),
            (address("a", "fd00::5", 64), "fd00::/64"),
        ] {
            assert_eq!(entry.subnet(), expected);
        }
    }

    #[test]
    fn this_machine_has_a_loopback() {
        let addresses = addresses().unwrap();
        let loopback = addresses
            .iter()
            .find(|entry| entry.address == IpAddr::V4(Ipv4Addr::LOCALHOST));
        assert_eq!(loopback.unwrap().prefix_bits, 8);
    }
}
