//! What this node is, read from its drivers, `/sys` and `/proc`.

pub mod infiniband;
pub mod pci;
mod sysfs;
