//! Compute capabilities: which instructions a GPU has.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// `9.0`: what an instruction set is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ComputeCapability {
    pub major: u32,
    pub minor: u32,
}

/// Text that is no compute capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoComputeCapability {
    pub text: String,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for ComputeCapability {
    type Err = NoComputeCapability;

    fn from_str(text: &str) -> Result<ComputeCapability, NoComputeCapability> {
        let digits = |part: &str| {
            let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| part.parse().ok()).flatten()
        };
        text.split_once('.')
            .and_then(|(major, minor)| {
                Some(ComputeCapability {
                    major: digits(major)?,
                    minor: digits(minor)?,
                })
            })
            .ok_or_else(|| NoComputeCapability {
                text: text.to_string(),
            })
    }
}

impl TryFrom<String> for ComputeCapability {
    type Error = NoComputeCapability;

    fn try_from(text: String) -> Result<ComputeCapability, NoComputeCapability> {
        text.parse()
    }
}

impl From<ComputeCapability> for String {
    fn from(capability: ComputeCapability) -> String {
        capability.to_string()
    }
}

impl fmt::Display for NoComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is no compute capability such as `9.0`", self.text)
    }
}

impl std::error::Error for NoComputeCapability {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compute_capabilities_are_ordered_by_number_and_not_by_text() {
        let parse = |text: &str| text.parse::<ComputeCapability>();
        assert!(parse("10.0").unwrap() > parse("8.9").unwrap());
        assert!(parse("8.10").unwrap() > parse("8.9").unwrap());
        assert_eq!(parse("12.1").unwrap().to_string(), "12.1");
        for text in ["", "9", "9.", ".0", "9.0.1", "+9.0", "9.x", "99999999999.0"] {
            let error = parse(text).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("`{text}` is no compute capability such as `9.0`")
            );
        }
    }
}
