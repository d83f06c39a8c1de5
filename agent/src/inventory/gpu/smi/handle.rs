//! The line that nvidia-smi prints for a GPU that it can't open, in all its spellings.

use crate::inventory::gpu::facts::{Cause, Fact, GpuFacts, pci_address};

const BEGINNING: &str = "Unable to determine the device handle for ";

/// A GPU that the driver lists and can't open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadHandle {
    pub pci: Fact<String>,
    pub cause: Cause,
}

impl BadHandle {
    /// `… for GPU0000:07:00.0: Unknown Error`, `GPU 0000:02:00.0: …`, `GPU1: 0000:34:00.0: …`, `gpu 0000:18:00.0: …`.
    pub fn parse(line: &str) -> Option<BadHandle> {
        let rest = line.trim().strip_prefix(BEGINNING)?;
        let rest = rest
            .strip_prefix("GPU")
            .or_else(|| rest.strip_prefix("gpu"));
        let rest = rest?.trim_start();
        // The address ends in a dot and one digit; what stands before it is a number of the driver's.
        let (device, cause) = match rest.find('.') {
            Some(dot) => {
                let end = rest[dot..].find(':').map_or(rest.len(), |at| dot + at);
                (&rest[..end], rest[end..].trim_start_matches(':'))
            }
            None => ("", rest),
        };
        let mut parts = device.rsplit(':');
        let function = parts.next().unwrap_or_default();
        let bus = parts.next().unwrap_or_default();
        let domain = parts.next().unwrap_or_default().trim();
        Some(BadHandle {
            pci: pci_address(&format!("{domain}:{bus}:{function}")),
            cause: Cause::from_driver(cause),
        })
    }

    /// A GPU of which this is all there is.
    pub fn into_facts(self) -> GpuFacts {
        let mut gpu = GpuFacts::unread(&self.cause);
        gpu.pci = self.pci;
        gpu.faults.push(self.cause);
        gpu
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_gives_the_address_and_the_cause() {
        for (line, pci, cause) in [
            (
                "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error",
                "0000:07:00.0",
                Cause::UnknownError,
            ),
            (
                "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the system to recover this GPU",
                "0000:02:00.0",
                Cause::Lost,
            ),
            (
                "Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error",
                "0000:34:00.0",
                Cause::UnknownError,
            ),
            (
                "Unable to determine the device handle for gpu 0000:18:00.0: Unknown Error",
                "0000:18:00.0",
                Cause::UnknownError,
            ),
        ] {
            let bad = BadHandle::parse(line).unwrap();
            assert_eq!(
                (bad.pci.as_deref(), &bad.cause),
                (Ok(pci), &cause),
                "{line}"
            );
        }
        assert_eq!(BadHandle::parse("No devices were found"), None);
        let cut = BadHandle::parse("Unable to determine the device handle for GPU0000:0").unwrap();
        assert!(cut.pci.is_err());
    }
}
