//! An RDMA adapter's port: what the kernel says of it, and whether engines of several nodes can talk over it.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::Reading;

/// One port of an RDMA device. A device that lists no ports is one adapter without a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adapter {
    /// `mlx5_0`, as in `NCCL_IB_HCA`.
    pub device: String,
    /// Some drivers make two devices of a card with two ports, others one device with ports 1 and 2.
    pub port: Option<u32>,
    pub kind: AdapterKind,
    pub function: Function,
    pub usability: Usability,
    /// Why it is not usable, or only just. Empty for a usable one.
    pub reasons: Vec<Reason>,
    pub link_layer: Reading<LinkLayer>,
    pub state: Reading<PortState>,
    pub physical_state: Reading<PhysicalState>,
    /// Megabits a second. Unknown on a port that is down, where the kernel prints a placeholder.
    pub rate_mbps: Reading<u64>,
    pub lid: Reading<u32>,
    /// The subnet manager's address within the subnet.
    pub sm_lid: Reading<u32>,
    /// InfiniBand: the upper half of GID 0, `fe80:0000:0000:0000`. Ethernet: the IP subnet, `10.1.0.0/24`.
    pub subnet: Reading<String>,
    /// Ethernet: the address behind the GID that is used, and the GID's index, which differs between nodes and drifts.
    pub address: Reading<IpAddr>,
    pub gid_index: Reading<u32>,
    /// The network interface; of a bond, the bond.
    pub netdev: Reading<String>,
    /// The interfaces that a bond is made of.
    pub netdev_members: Vec<String>,
    pub pci_address: Reading<String>,
    pub numa_node: Reading<u32>,
    pub driver: Reading<String>,
    /// `MT4129`.
    pub model: Reading<String>,
    pub firmware: Reading<String>,
    pub node_guid: Reading<String>,
    /// The same for all devices of one card.
    pub card_guid: Reading<String>,
}

/// What speaks over the port. `link_layer` alone does not tell: EFA has none, Omni-Path says InfiniBand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdapterKind {
    Infiniband,
    OmniPath,
    Roce,
    Iwarp,
    Efa,
    Usnic,
    #[serde(other)]
    Other,
}

/// Which kind of device it is to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Function {
    /// Also a virtual function inside a virtual machine, which looks like this.
    Physical,
    /// A virtual function whose physical one this host sees.
    Virtual,
    /// A driver without a device, such as `rxe`.
    Software,
    /// A word of a newer release.
    #[serde(other)]
    Other,
}

/// Whether engines may use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Usability {
    Usable,
    /// Its link works, but NCCL passes it over in this state.
    Degraded,
    /// Also what a newer release calls by a word that is not known here.
    #[serde(other)]
    Unusable,
}

/// One reason, as a code that tests and policies can name and a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    pub code: ReasonCode,
    pub detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReasonCode {
    /// The port's state is not ACTIVE.
    NotActive,
    /// ACTIVE_DEFER: the link recovers from errors.
    Recovering,
    /// The state says ACTIVE, the network interface that carries it is down.
    InterfaceDown,
    /// The device lists no port.
    NoPorts,
    /// What decides could not be read.
    Unreadable,
    /// `/dev/infiniband/uverbsN` is missing, or this process may not open it, as in a container that was not given the device.
    NoDeviceNode,
    /// Spoken by libfabric, not by NCCL's verbs.
    Efa,
    Usnic,
    Iwarp,
    UnknownTransport,
    Software,
    VirtualFunction,
    /// It manages the NVSwitches of this node and carries no traffic of engines.
    NvswitchBridge,
    /// It carries the node's own traffic, and others are there for engines.
    Management,
    /// RoCE without a RoCE v2 GID of an IPv4 address.
    NoAddress,
    /// A word of a newer release.
    #[serde(other)]
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkLayer {
    Infiniband,
    Ethernet,
    /// The kernel prints `Unknown`, as it does for EFA.
    #[serde(other)]
    Unspecified,
}

/// The logical state of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortState {
    Nop,
    Down,
    Init,
    Armed,
    Active,
    ActiveDefer,
    /// A word of a newer release.
    #[serde(other)]
    Other,
}

/// The state of the physical link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PhysicalState {
    Sleep,
    Polling,
    Disabled,
    Training,
    LinkUp,
    LinkErrorRecovery,
    PhyTest,
    /// A word of a newer release.
    #[serde(other)]
    Other,
}

impl Adapter {
    /// `mlx5_0`, or `mlx4_0:2` where the port is not the first: the way NCCL names it.
    pub fn name(&self) -> String {
        match self.port {
            None | Some(1) => self.device.clone(),
            Some(port) => format!("{}:{port}", self.device),
        }
    }

    pub fn is_usable(&self) -> bool {
        self.usability == Usability::Usable
    }
}

impl AdapterKind {
    /// As a page for people writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            AdapterKind::Infiniband => "InfiniBand",
            AdapterKind::OmniPath => "Omni-Path",
            AdapterKind::Roce => "RoCE",
            AdapterKind::Iwarp => "iWARP",
            AdapterKind::Efa => "EFA",
            AdapterKind::Usnic => "usNIC",
            AdapterKind::Other => "other",
        }
    }
}

impl PortState {
    /// As the kernel writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            PortState::Nop => "NOP",
            PortState::Down => "DOWN",
            PortState::Init => "INIT",
            PortState::Armed => "ARMED",
            PortState::Active => "ACTIVE",
            PortState::ActiveDefer => "ACTIVE_DEFER",
            PortState::Other => "other",
        }
    }
}

impl Reason {
    pub fn new(code: ReasonCode, detail: impl Into<String>) -> Reason {
        Reason {
            code,
            detail: detail.into(),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}
