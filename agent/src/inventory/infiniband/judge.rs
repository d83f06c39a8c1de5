//! Whether engines may use a port: every rule is asked, so that each reason is named.

use llmgw_proto::inventory::adapter::{
    AdapterKind, Function, PhysicalState, PortState, Reason, ReasonCode, Usability,
};
use llmgw_proto::inventory::{Adapter, Reading};

/// What decides beside the adapter's own fields.
#[derive(Debug, Clone, Default)]
pub struct Marks {
    /// Its vital product data says that it manages NVSwitches.
    pub is_nvswitch_bridge: bool,
    /// The interface that carries the port says that it is down.
    pub is_interface_down: bool,
    /// Why its device node cannot be opened.
    pub closed_node: Option<String>,
}

/// The verdict and its reasons.
pub fn judge(adapter: &Adapter, marks: &Marks) -> (Usability, Vec<Reason>) {
    let mut reasons = Vec::new();
    reasons.extend(transport(adapter.kind));
    reasons.extend(function(adapter.function));
    if marks.is_nvswitch_bridge {
        let detail = "manages this node's NVSwitches";
        reasons.push(Reason::new(ReasonCode::NvswitchBridge, detail));
    }
    if let Some(why) = &marks.closed_node {
        reasons.push(Reason::new(ReasonCode::NoDeviceNode, why));
    }
    if adapter.port.is_none() {
        reasons.push(Reason::new(ReasonCode::NoPorts, "the device has no ports"));
        return (Usability::Unusable, reasons);
    }
    reasons.extend(state(adapter));
    if marks.is_interface_down && is_up(adapter) {
        let netdev = adapter.netdev.value().map_or("", String::as_str);
        let detail = format!("interface {netdev} is down");
        reasons.push(Reason::new(ReasonCode::InterfaceDown, detail));
    }
    // A port that is down has no address yet.
    if adapter.kind == AdapterKind::Roce
        && is_up(adapter)
        && let Reading::Unknown(why) = &adapter.address
    {
        reasons.push(Reason::new(ReasonCode::NoAddress, why));
    }
    let is_degraded = |reason: &Reason| reason.code == ReasonCode::Recovering;
    let usability = match reasons.as_slice() {
        [] => Usability::Usable,
        all if all.iter().all(is_degraded) => Usability::Degraded,
        _ => Usability::Unusable,
    };
    (usability, reasons)
}

/// Refuses the ports that carry the node's own traffic, where others are there for engines.
/// `interfaces`: those of the default route and of the route to the server.
pub fn set_management_aside(adapters: &mut [Adapter], interfaces: &[String]) {
    let carries = |adapter: &Adapter| {
        let of_adapter = |name: &String| {
            adapter.netdev.value() == Some(name) || adapter.netdev_members.contains(name)
        };
        adapter.kind == AdapterKind::Roce && interfaces.iter().any(of_adapter)
    };
    if !adapters
        .iter()
        .any(|adapter| adapter.is_usable() && !carries(adapter))
    {
        return;
    }
    for adapter in adapters {
        if adapter.is_usable() && carries(adapter) {
            let detail = "carries the node's own traffic; others are for engines";
            adapter.usability = Usability::Unusable;
            adapter
                .reasons
                .push(Reason::new(ReasonCode::Management, detail));
        }
    }
}

fn transport(kind: AdapterKind) -> Option<Reason> {
    let (code, detail) = match kind {
        AdapterKind::Infiniband | AdapterKind::OmniPath | AdapterKind::Roce => return None,
        AdapterKind::Efa => (
            ReasonCode::Efa,
            "EFA: NCCL needs the aws-ofi-nccl plugin for it",
        ),
        AdapterKind::Usnic => (ReasonCode::Usnic, "usNIC: NCCL does not speak it"),
        AdapterKind::Iwarp => (ReasonCode::Iwarp, "iWARP: NCCL does not speak it"),
        AdapterKind::Other => (
            ReasonCode::UnknownTransport,
            "neither InfiniBand nor RoCE as far as can be read",
        ),
    };
    Some(Reason::new(code, detail))
}

fn function(function: Function) -> Option<Reason> {
    let (code, detail) = match function {
        Function::Physical | Function::Other => return None,
        Function::Virtual => (
            ReasonCode::VirtualFunction,
            "a virtual function, for a VM or a container",
        ),
        Function::Software => (ReasonCode::Software, "RDMA in software"),
    };
    Some(Reason::new(code, detail))
}

fn is_up(adapter: &Adapter) -> bool {
    matches!(
        adapter.state.value(),
        Some(PortState::Active | PortState::ActiveDefer)
    )
}

fn state(adapter: &Adapter) -> Option<Reason> {
    let not_active = |detail: &str| Some(Reason::new(ReasonCode::NotActive, detail));
    let state = match &adapter.state {
        Reading::Known(state) | Reading::Stale { value: state, .. } => *state,
        Reading::Unknown(why) => {
            return Some(Reason::new(ReasonCode::Unreadable, why));
        }
    };
    match (state, adapter.physical_state.value()) {
        (PortState::Active, _) => None,
        (PortState::ActiveDefer, _) => Some(Reason::new(
            ReasonCode::Recovering,
            "recovers from link errors (ACTIVE_DEFER)",
        )),
        (PortState::Down, Some(PhysicalState::Polling)) => not_active("down: no cable or no peer"),
        (PortState::Down, Some(PhysicalState::Disabled)) => {
            not_active("down: switched off or no carrier")
        }
        (PortState::Down, Some(PhysicalState::Training)) => {
            not_active("down: the link is being negotiated")
        }
        (PortState::Down, _) => not_active("down"),
        (PortState::Init, _) => not_active("no subnet manager has set it up (INIT)"),
        (PortState::Armed, _) => not_active("a subnet manager is setting it up (ARMED)"),
        (PortState::Nop, _) => not_active("the port has no state (NOP)"),
        (PortState::Other, _) => not_active("in a state that is not known here"),
    }
}
