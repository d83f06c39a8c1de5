//! RDMA adapters from `/sys/class/infiniband`: InfiniBand told from RoCE and from what only looks like it, each port with what it is good for.
//!
//! A file that cannot be read makes one value unknown. Nothing here fails.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use llmgw_proto::inventory::adapter::{
    AdapterKind, Function, LinkLayer, PortState, Reason, ReasonCode, Usability,
};
use llmgw_proto::inventory::{Adapter, Reading};

use super::sysfs;

mod judge;
pub mod text;

pub use judge::set_management_aside;
use judge::{Marks, judge};

/// A node has at most some dozens of devices, and up to 127 virtual functions for each port.
const DEVICES_MAX: usize = 512;
const PORTS_MAX: usize = 16;
/// Drivers have 256 at most.
const GIDS_MAX: usize = 1024;

/// What marks an adapter as one of the bridges to the NVSwitches of a B200 board, in its vital product data.
const NVSWITCH_MARK: &str = "SMDL=SW_MNG";

/// The ports of all devices. `Err`: there is a class directory that cannot be listed; without one there are none.
/// `dev`: where device nodes are, `None` for a `sys` that is not this machine's.
pub fn adapters(sys: &Path, dev: Option<&Path>) -> Result<Vec<Adapter>, String> {
    let class = sys.join("class/infiniband");
    let names = match sysfs::names(&class) {
        Ok(names) => names,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(format!("{}: {}", class.display(), sysfs::cause(&error))),
    };
    let nodes = dev.map(|dev| (dev, verbs_nodes(sys)));
    let one = |name: &String| {
        let mut device = Device::read(sys, name);
        device.marks.closed_node = nodes
            .as_ref()
            .and_then(|(dev, nodes)| closed_node(dev, nodes.get(name)));
        device.adapters()
    };
    Ok(names.iter().take(DEVICES_MAX).flat_map(one).collect())
}

/// The device nodes by adapter, as `uverbs0`.
fn verbs_nodes(sys: &Path) -> BTreeMap<String, String> {
    let class = sys.join("class/infiniband_verbs");
    let nodes = sysfs::names(&class).unwrap_or_default();
    nodes
        .into_iter()
        .filter_map(|node| Some((sysfs::value(&class.join(&node), "ibdev").ok()?, node)))
        .collect()
}

/// Why a device cannot be opened. In a container `/sys` shows all devices, also those that it was not given.
fn closed_node(dev: &Path, node: Option<&String>) -> Option<String> {
    let Some(node) = node else {
        return Some("it has no device node: is the module ib_uverbs loaded?".to_owned());
    };
    let path = dev.join("infiniband").join(node);
    match OpenOptions::new().read(true).write(true).open(&path) {
        Ok(_) => None,
        Err(error) => Some(format!("{}: {}", path.display(), sysfs::cause(&error))),
    }
}

/// Versions of the drivers behind the adapters, as far as they say one.
pub fn driver_versions(sys: &Path, adapters: &[Adapter]) -> BTreeMap<String, Reading<String>> {
    let mut versions = BTreeMap::new();
    for driver in adapters.iter().filter_map(|adapter| adapter.driver.value()) {
        let version = || match sysfs::text(&sys.join("module").join(driver), "version") {
            // Drivers of the kernel's own tree go by its version.
            Reading::Unknown(_) => Reading::unknown("the kernel's own"),
            version => version,
        };
        versions.entry(driver.clone()).or_insert_with(version);
    }
    versions
}

/// A device before it is split into its ports.
struct Device<'s> {
    sys: &'s Path,
    path: PathBuf,
    /// What all ports share, as an adapter without a port.
    shared: Adapter,
    marks: Marks,
}

impl<'s> Device<'s> {
    fn read(sys: &'s Path, name: &str) -> Device<'s> {
        let path = sys.join("class/infiniband").join(name);
        let hardware = path.join("device");
        let driver = sysfs::link_name(&hardware, "driver");
        let absent = || "the device has no ports".to_owned();
        let shared = Adapter {
            device: name.to_owned(),
            port: None,
            kind: AdapterKind::Other,
            function: function(&path),
            usability: Usability::Unusable,
            reasons: Vec::new(),
            link_layer: Reading::Unknown(absent()),
            state: Reading::Unknown(absent()),
            physical_state: Reading::Unknown(absent()),
            rate_mbps: Reading::Unknown(absent()),
            lid: Reading::Unknown(absent()),
            sm_lid: Reading::Unknown(absent()),
            subnet: Reading::Unknown(absent()),
            address: Reading::Unknown(absent()),
            gid_index: Reading::Unknown(absent()),
            netdev: Reading::Unknown(absent()),
            netdev_members: Vec::new(),
            pci_address: pci_address(&hardware),
            numa_node: sysfs::parsed(&hardware, "numa_node", text::numa_node),
            driver,
            model: sysfs::text(&path, "hca_type"),
            firmware: sysfs::text(&path, "fw_ver"),
            node_guid: sysfs::parsed(&path, "node_guid", text::guid),
            card_guid: sysfs::parsed(&path, "sys_image_guid", text::guid),
        };
        let is_nvswitch_bridge = shared
            .driver
            .value()
            .is_some_and(|name| name == "mlx5_core")
            && has_mark(&hardware);
        Device {
            sys,
            path,
            shared,
            marks: Marks {
                is_nvswitch_bridge,
                ..Marks::default()
            },
        }
    }

    /// One adapter for each port, or one that says why there are none.
    fn adapters(self) -> Vec<Adapter> {
        let ports: Vec<u32> = sysfs::names(&self.path.join("ports"))
            .unwrap_or_default()
            .iter()
            .filter_map(|name| name.parse().ok())
            .take(PORTS_MAX)
            .collect();
        if ports.is_empty() {
            return vec![self.without_ports()];
        }
        ports.into_iter().map(|port| self.port(port)).collect()
    }

    fn without_ports(&self) -> Adapter {
        let mut adapter = self.shared.clone();
        adapter.kind = self.kind(None);
        if !self.path.exists() {
            let detail = "listed, but its directory is gone";
            adapter.reasons = vec![Reason::new(ReasonCode::Unreadable, detail)];
            return adapter;
        }
        (adapter.usability, adapter.reasons) = judge(&adapter, &self.marks);
        // That nothing is known of its transport goes without saying.
        adapter
            .reasons
            .retain(|reason| reason.code != ReasonCode::UnknownTransport);
        adapter
    }

    fn port(&self, port: u32) -> Adapter {
        let path = self.path.join("ports").join(port.to_string());
        let mut adapter = self.shared.clone();
        adapter.port = Some(port);
        adapter.link_layer = sysfs::parsed(&path, "link_layer", text::link_layer);
        adapter.state = sysfs::parsed(&path, "state", text::state);
        adapter.physical_state = sysfs::parsed(&path, "phys_state", text::physical_state);
        adapter.kind = self.kind(adapter.link_layer.value().copied());
        adapter.rate_mbps = rate(&path, &adapter);
        adapter.lid = sysfs::parsed(&path, "lid", text::lid);
        adapter.sm_lid = sysfs::parsed(&path, "sm_lid", text::lid);
        self.set_addresses(&path, port, &mut adapter);
        let mut marks = self.marks.clone();
        if let Some(netdev) = adapter.netdev.value() {
            let class = self.sys.join("class/net").join(netdev);
            adapter.netdev_members = members(&class);
            // An InfiniBand port works with its IP interface down.
            marks.is_interface_down = adapter.kind != AdapterKind::Infiniband
                && sysfs::value(&class, "operstate").is_ok_and(|state| state == "down");
        }
        (adapter.usability, adapter.reasons) = judge(&adapter, &marks);
        adapter
    }

    /// The transport: the node's type where it says one, then the driver, then the link layer.
    fn kind(&self, link_layer: Option<LinkLayer>) -> AdapterKind {
        let node_type = sysfs::value(&self.path, "node_type").unwrap_or_default();
        let driver = self.shared.driver.value().map_or("", String::as_str);
        match (node_type.split(':').next(), driver, link_layer) {
            (_, "efa", _) => AdapterKind::Efa,
            (_, "hfi1", _) => AdapterKind::OmniPath,
            (Some("4"), _, _) => AdapterKind::Iwarp,
            (Some("5" | "6"), _, _) => AdapterKind::Usnic,
            (_, _, Some(LinkLayer::Infiniband)) => AdapterKind::Infiniband,
            (_, _, Some(LinkLayer::Ethernet)) => AdapterKind::Roce,
            _ => AdapterKind::Other,
        }
    }

    /// Subnet, address and interface, which come from the GID table in ways that differ by transport.
    fn set_addresses(&self, path: &Path, port: u32, adapter: &mut Adapter) {
        let none = |what: &str| format!("{} has no {what}", adapter.kind.as_str());
        if adapter.kind == AdapterKind::Roce {
            match RoceGid::find(path) {
                Ok(found) => {
                    adapter.address = Reading::Known(found.address);
                    adapter.gid_index = Reading::Known(found.index);
                    adapter.netdev = Reading::Known(found.netdev);
                }
                Err(why) => {
                    adapter.address = Reading::Unknown(why.clone());
                    adapter.gid_index = Reading::Unknown(why);
                    adapter.netdev = self.interface(path, port);
                }
            }
            // The mask is the interface's: the inventory adds it.
            adapter.subnet = Reading::unknown("no address");
            adapter.lid = Reading::unknown("Ethernet has no LID");
            adapter.sm_lid = Reading::unknown("Ethernet has no subnet manager");
            return;
        }
        adapter.address = Reading::Unknown(none("IP address"));
        adapter.gid_index = Reading::Unknown(none("GID to choose"));
        adapter.subnet = match adapter.kind {
            AdapterKind::Infiniband | AdapterKind::OmniPath => {
                sysfs::parsed(path, "gids/0", |value| {
                    text::gid(value).and_then(text::prefix)
                })
            }
            _ => Reading::Unknown(none("subnet")),
        };
        adapter.netdev = self.interface(path, port);
    }

    /// The interface beside the device, where no GID names one.
    fn interface(&self, path: &Path, port: u32) -> Reading<String> {
        let net = self.path.join("device/net");
        let names = sysfs::names(&net).unwrap_or_default();
        let of_port = |name: &&String| {
            // Ports are numbered from 1, this from 0.
            sysfs::value(&net.join(name), "dev_port")
                .is_ok_and(|value| value.parse().ok() == port.checked_sub(1))
        };
        let beside = match names.as_slice() {
            [only] => Some(only),
            several => several.iter().find(of_port),
        };
        let of_gid = || sysfs::value(path, "gid_attrs/ndevs/0").ok();
        match beside.cloned().or_else(of_gid) {
            Some(name) => Reading::Known(name),
            None => Reading::unknown("no interface belongs to the port"),
        }
    }
}

/// The GID that NCCL chooses by itself: RoCE v2 with an IPv4 address.
struct RoceGid {
    index: u32,
    address: IpAddr,
    netdev: String,
}

impl RoceGid {
    /// Looks at the whole table: gaps come before valid entries, and what belongs to another container cannot be read.
    fn find(port: &Path) -> Result<RoceGid, String> {
        let indices = match sysfs::names(&port.join("gids")) {
            Ok(names) => names,
            Err(error) => return Err(format!("`gids`: {}", sysfs::cause(&error))),
        };
        let usable = indices
            .iter()
            .take(GIDS_MAX)
            .filter_map(|name| RoceGid::read(port, name));
        // An address that the host gave itself leads nowhere; any other comes first.
        usable
            .min_by_key(|found| matches!(found.address, IpAddr::V4(ip) if ip.is_link_local()))
            .ok_or_else(|| "no RoCE v2 GID with an IPv4 address".to_owned())
    }

    fn read(port: &Path, index: &str) -> Option<RoceGid> {
        let gid = text::gid(&sysfs::value(&port.join("gids"), index).ok()?)?;
        let address = IpAddr::V4(text::ipv4_of(gid)?);
        let attributes = port.join("gid_attrs");
        let kind = sysfs::value(&attributes.join("types"), index).ok()?;
        let netdev = sysfs::value(&attributes.join("ndevs"), index).ok()?;
        (kind == "RoCE v2").then_some(RoceGid {
            index: index.parse().ok()?,
            address,
            netdev,
        })
    }
}

/// The rate, where the kernel's word for it means one.
fn rate(path: &Path, adapter: &Adapter) -> Reading<u64> {
    let printed = match sysfs::value(path, "rate") {
        Ok(printed) => printed,
        Err(why) => return Reading::Unknown(why),
    };
    let is_down = matches!(
        adapter.state.value(),
        Some(PortState::Down | PortState::Nop)
    );
    if is_down {
        let shown = sysfs::shown(&printed);
        return Reading::unknown(format!("the port is down: `{shown}` is a placeholder"));
    }
    // Kernels print a speed that is newer than they are as the oldest one.
    if adapter.kind == AdapterKind::Infiniband && printed == "10 Gb/sec (4X SDR)" {
        return Reading::unknown(format!(
            "`{printed}` is what this kernel prints for a speed that it does not know"
        ));
    }
    match text::rate_mbps(&printed) {
        Some(rate) => Reading::Known(rate),
        None => Reading::unknown(format!("`rate` reads `{}`", sysfs::shown(&printed))),
    }
}

/// Whether the card says that it manages NVSwitches. Only root may read that; for others it is a card like any other.
/// The bus is slow here, so it is read of the one driver that such cards have.
fn has_mark(hardware: &Path) -> bool {
    sysfs::read(&hardware.join("vpd"), sysfs::VALUE_MAX_BYTES)
        .is_ok_and(|data| data.contains(NVSWITCH_MARK))
}

fn function(path: &Path) -> Function {
    let hardware = path.join("device");
    if !hardware.exists() {
        return Function::Software;
    }
    match hardware.join("physfn").symlink_metadata() {
        Ok(_) => Function::Virtual,
        Err(_) => Function::Physical,
    }
}

/// The directory's own name, where it is that of a PCI device.
fn pci_address(hardware: &Path) -> Reading<String> {
    let name = match hardware.canonicalize() {
        Ok(path) => path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned()),
        Err(error) => return Reading::unknown(format!("`device`: {}", sysfs::cause(&error))),
    };
    match name.filter(|name| super::pci::is_address(name)) {
        Some(name) => Reading::Known(name),
        None => Reading::unknown("not a PCI device"),
    }
}

/// The interfaces of a bond.
fn members(class: &Path) -> Vec<String> {
    sysfs::value(&class.join("bonding"), "slaves")
        .unwrap_or_default()
        .split_ascii_whitespace()
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests;
