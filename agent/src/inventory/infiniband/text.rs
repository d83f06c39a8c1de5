//! What the kernel writes into `/sys/class/infiniband`, parsed: states, rates, LIDs and GIDs.

use std::net::{Ipv4Addr, Ipv6Addr};

use llmgw_proto::inventory::adapter::{LinkLayer, PhysicalState, PortState};

/// `4: ACTIVE`. The word has to go with the number: what a newer kernel calls 6 is nothing that is known here.
pub fn state(text: &str) -> Option<PortState> {
    Some(match text.trim() {
        "0: NOP" => PortState::Nop,
        "1: DOWN" => PortState::Down,
        "2: INIT" => PortState::Init,
        "3: ARMED" => PortState::Armed,
        "4: ACTIVE" => PortState::Active,
        "5: ACTIVE_DEFER" => PortState::ActiveDefer,
        _ => return None,
    })
}

/// `5: LinkUp`.
pub fn physical_state(text: &str) -> Option<PhysicalState> {
    Some(match text.trim() {
        "1: Sleep" => PhysicalState::Sleep,
        "2: Polling" => PhysicalState::Polling,
        "3: Disabled" => PhysicalState::Disabled,
        "4: PortConfigurationTraining" => PhysicalState::Training,
        "5: LinkUp" => PhysicalState::LinkUp,
        "6: LinkErrorRecovery" => PhysicalState::LinkErrorRecovery,
        "7: Phy Test" => PhysicalState::PhyTest,
        _ => return None,
    })
}

/// `InfiniBand`, `Ethernet`, or `Unknown`.
pub fn link_layer(text: &str) -> Option<LinkLayer> {
    Some(match text.trim() {
        "InfiniBand" => LinkLayer::Infiniband,
        "Ethernet" => LinkLayer::Ethernet,
        "Unknown" => LinkLayer::Unspecified,
        _ => return None,
    })
}

/// Megabits a second of `400 Gb/sec (4X NDR)` or `2.5 Gb/sec (1X SDR)`; the name in parentheses is optional.
pub fn rate_mbps(text: &str) -> Option<u64> {
    let (number, rest) = text.trim().split_once(' ')?;
    if !rest.starts_with("Gb/sec") {
        return None;
    }
    let (whole, half) = match number.split_once('.') {
        None => (number, 0),
        Some((whole, "5")) => (whole, 500),
        Some(_) => return None,
    };
    if whole.is_empty() || !whole.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    whole
        .parse::<u64>()
        .ok()?
        .checked_mul(1_000)?
        .checked_add(half)
}

/// `0x2a2`.
pub fn hex(text: &str) -> Option<u32> {
    let digits = text.trim().strip_prefix("0x")?;
    // `from_str_radix` would take a sign.
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    u32::from_str_radix(digits, 16).ok()
}

/// A local identifier that a subnet manager gave: neither 0 nor 0xffff, which mean that there is none.
pub fn lid(text: &str) -> Option<u32> {
    hex(text).filter(|lid| !matches!(lid, 0 | 0xffff))
}

/// A GID: the kernel writes all eight groups of four digits.
pub fn gid(text: &str) -> Option<Ipv6Addr> {
    let text = text.trim();
    let groups: Vec<&str> = text.split(':').collect();
    let is_whole = groups.len() == 8
        && groups
            .iter()
            .all(|group| group.len() == 4 && group.bytes().all(|byte| byte.is_ascii_hexdigit()));
    match is_whole {
        true => text.parse().ok(),
        false => None,
    }
}

/// The IPv4 address that a RoCE GID stands for.
pub fn ipv4_of(gid: Ipv6Addr) -> Option<Ipv4Addr> {
    gid.to_ipv4_mapped()
}

/// The upper half of a GID: the subnet's prefix. `None` for the empty GID.
pub fn prefix(gid: Ipv6Addr) -> Option<String> {
    if gid.is_unspecified() {
        return None;
    }
    let groups = gid.segments();
    Some(format!(
        "{:04x}:{:04x}:{:04x}:{:04x}",
        groups[0], groups[1], groups[2], groups[3]
    ))
}

/// A GUID such as `5eed:0b03:00f0:0e50`; `None` for one of zeros, which means that the driver has none.
pub fn guid(text: &str) -> Option<String> {
    let text = text.trim();
    let groups: Vec<&str> = text.split(':').collect();
    let is_whole = groups.len() == 4
        && groups
            .iter()
            .all(|group| group.len() == 4 && group.bytes().all(|byte| byte.is_ascii_hexdigit()));
    (is_whole && text.bytes().any(|byte| !matches!(byte, b'0' | b':'))).then(|| text.to_owned())
}

/// NUMA nodes are numbered from 0; -1 means that the machine has none or does not say.
pub fn numa_node(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_known_by_number_and_word_together() {
        for (text, expected) in [
            ("0: NOP", Some(PortState::Nop)),
            ("1: DOWN", Some(PortState::Down)),
            ("2: INIT", Some(PortState::Init)),
            ("3: ARMED", Some(PortState::Armed)),
            ("4: ACTIVE\n", Some(PortState::Active)),
            ("5: ACTIVE_DEFER", Some(PortState::ActiveDefer)),
            ("6: UNKNOWN", None),
            ("4: DOWN", None),
            ("4", None),
            ("", None),
        ] {
            assert_eq!(state(text), expected, "{text}");
        }
        for (text, expected) in [
            ("1: Sleep", Some(PhysicalState::Sleep)),
            ("2: Polling", Some(PhysicalState::Polling)),
            ("3: Disabled", Some(PhysicalState::Disabled)),
            (
                "4: PortConfigurationTraining",
                Some(PhysicalState::Training),
            ),
            ("5: LinkUp", Some(PhysicalState::LinkUp)),
            (
                "6: LinkErrorRecovery",
                Some(PhysicalState::LinkErrorRecovery),
            ),
            ("7: Phy Test", Some(PhysicalState::PhyTest)),
            ("8: <unknown>", None),
        ] {
            assert_eq!(physical_state(text), expected, "{text}");
        }
        for (text, expected) in [
            ("InfiniBand", Some(LinkLayer::Infiniband)),
            ("Ethernet", Some(LinkLayer::Ethernet)),
            ("Unknown", Some(LinkLayer::Unspecified)),
            ("infiniband", None),
        ] {
            assert_eq!(link_layer(text), expected, "{text}");
        }
    }

    #[test]
    fn every_spelling_of_a_rate_that_kernels_print_is_read() {
        for (text, expected) in [
            ("400 Gb/sec (4X NDR)", Some(400_000)),
            ("800 Gb/sec (4X XDR)", Some(800_000)),
            ("200 Gb/sec (2X NDR)", Some(200_000)),
            ("100 Gb/sec (4X EDR)", Some(100_000)),
            ("25 Gb/sec (1X EDR)", Some(25_000)),
            ("2.5 Gb/sec (1X SDR)", Some(2_500)),
            ("10 Gb/sec (4X)", Some(10_000)),
            ("fast", None),
            ("", None),
            ("-1 Gb/sec", None),
            ("+1 Gb/sec", None),
            (".5 Gb/sec", None),
            ("2.25 Gb/sec", None),
            ("400 Mb/sec", None),
            ("99999999999999999999 Gb/sec", None),
            ("18446744073709551615 Gb/sec", None),
        ] {
            assert_eq!(rate_mbps(text), expected, "{text}");
        }
    }

    #[test]
    fn gids_give_a_prefix_or_an_address() {
        let link_local = gid("fe80:0000:0000:a1b2:5eed:0103:00c0:0b20").unwrap();
        assert_eq!(prefix(link_local).unwrap(), "fe80:0000:0000:a1b2");
        assert_eq!(ipv4_of(link_local), None);
        let mapped = gid("0000:0000:0000:0000:0000:ffff:c0a8:0a0b").unwrap();
        assert_eq!(ipv4_of(mapped), Some(Ipv4Addr::new(192, 168, 10, 11)));
        let empty = gid("0000:0000:0000:0000:0000:0000:0000:0000").unwrap();
        assert_eq!((prefix(empty), ipv4_of(empty)), (None, None));
        for wrong in [
            "",
            "fe80::1",
            "::ffff:10.0.0.1",
            "fe80:0:0:0:0:0:0:1",
            "N/A",
        ] {
            assert_eq!(gid(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn guids_of_zeros_and_numbers_that_are_none_are_not_known() {
        assert_eq!(
            guid("5eed:0b03:00f0:0e50\n").unwrap(),
            "5eed:0b03:00f0:0e50"
        );
        for wrong in ["0000:0000:0000:0000", "", "5eed", "5eed:0b03:00f0:0e5g"] {
            assert_eq!(guid(wrong), None, "{wrong}");
        }
        for (text, expected) in [
            ("0x2a2", Some(0x2a2)),
            ("0x0", Some(0)),
            ("0xffff", Some(0xffff)),
            ("0x+1", None),
            ("12", None),
            ("0x1ffffffff", None),
            ("0x", None),
        ] {
            assert_eq!(hex(text), expected, "{text}");
        }
        assert_eq!(
            (lid("0x2a2"), lid("0x0"), lid("0xffff")),
            (Some(0x2a2), None, None)
        );
        assert_eq!((numa_node("1"), numa_node("-1")), (Some(1), None));
    }
}
