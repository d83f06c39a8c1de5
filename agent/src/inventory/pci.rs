//! NVIDIA's GPUs on the PCI bus, also those that the driver does not list.

use std::io::ErrorKind;
use std::path::Path;

use super::sysfs;

const DEVICES_DIRECTORY: &str = "bus/pci/devices";
const NVIDIA: &str = "0x10de";
/// VGA and 3D controllers: the class without its programming interface.
const DISPLAY_CLASSES: [&str; 2] = ["0x0300", "0x0302"];

/// Addresses as sysfs writes them. `Err`: the bus could not be listed; a machine without PCI has none.
pub fn nvidia_gpus(sys: &Path) -> Result<Vec<String>, String> {
    let devices = sys.join(DEVICES_DIRECTORY);
    let mut addresses = match sysfs::names(&devices) {
        Ok(names) => names,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(format!("{}: {}", devices.display(), sysfs::cause(&error))),
    };
    addresses.retain(|address| is_address(address) && is_nvidia_gpu(&devices.join(address)));
    // Hexadecimal digits of a fixed number: the alphabet's order is that of the bus.
    addresses.sort();
    Ok(addresses)
}

/// `0000:1b:00.0`. Domains may be longer than four digits.
pub fn is_address(name: &str) -> bool {
    let hex = |part: &str, digits: std::ops::RangeInclusive<usize>| {
        digits.contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let mut parts = name.split(':');
    let (Some(domain), Some(bus), Some(slot), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let Some((slot, function)) = slot.split_once('.') else {
        return false;
    };
    hex(domain, 4..=8) && hex(bus, 2..=2) && hex(slot, 2..=2) && hex(function, 1..=1)
}

/// A virtual function is not counted: it is a GPU of the machine that it was given to.
fn is_nvidia_gpu(device: &Path) -> bool {
    let class = sysfs::value(device, "class").unwrap_or_default();
    sysfs::value(device, "vendor").is_ok_and(|vendor| vendor == NVIDIA)
        && DISPLAY_CLASSES.iter().any(|known| class.starts_with(known))
        && device.join("physfn").symlink_metadata().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorded::{TempTree, sysfs};

    #[test]
    fn display_controllers_of_nvidia_are_found_and_nothing_else_of_theirs() {
        let tree = TempTree::empty();
        for (address, vendor, class) in [
            ("0000:1b:00.0", "0x10de", "0x030200"),
            ("0000:01:00.0", "0x10de", "0x030000"),
            ("0008:01:00.0", "0x10de", "0x030200"),
            // The sound on a graphics card, an NVSwitch, another vendor's card.
            ("0000:01:00.1", "0x10de", "0x040300"),
            ("0000:c4:00.0", "0x10de", "0x068000"),
            ("0000:02:00.0", "0x1a03", "0x030000"),
        ] {
            tree.add(&format!(
                "@ bus/pci/devices/{address}\nvendor = {vendor}\nclass = {class}\n"
            ));
        }
        tree.add("@ bus/pci/devices/0000:03:00.0\nvendor !\nclass = 0x030000\n");
        tree.add(
            "@ bus/pci/devices/0000:1b:00.4\nvendor = 0x10de\nclass = 0x030200\nphysfn -> ../0000:1b:00.0\n",
        );
        assert_eq!(
            nvidia_gpus(tree.path()).unwrap(),
            ["0000:01:00.0", "0000:1b:00.0", "0008:01:00.0"]
        );
    }

    #[test]
    fn a_dgx_has_eight_and_a_machine_without_pci_none() {
        let tree = sysfs("dgx-h100");
        let found = nvidia_gpus(&tree.path().join("sys")).unwrap();
        assert_eq!(found.len(), 8);
        assert_eq!(found[0], "0000:1b:00.0");
        assert_eq!(nvidia_gpus(tree.path()).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn pci_addresses_are_told_from_other_names() {
        for (name, expected) in [
            ("0000:1b:00.0", true),
            ("10000:e1:00.1", true),
            ("0008:01:00.0", true),
            ("rxe0", false),
            ("1b:00.0", false),
            ("0000:1b:00", false),
            ("0000:1b:00.0:0", false),
            ("usb1", false),
        ] {
            assert_eq!(is_address(name), expected, "{name}");
        }
    }
}
