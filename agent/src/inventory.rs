//! What this node is, read from its drivers, `/sys` and `/proc`.

pub mod fabrics;
pub mod gpu;
pub mod host;
pub mod infiniband;
pub mod network;
pub mod pci;
mod sysfs;
