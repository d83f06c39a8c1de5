//! `nvidia-smi --version`: lines of a name, a colon and a version. Old drivers lack the option.

use super::cells;
use crate::inventory::gpu::facts::{Cause, Fact};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versions {
    pub driver: Fact<String>,
    pub cuda: Fact<String>,
}

pub fn parse(text: &str) -> Versions {
    let find = |name: &str| {
        cells::lines(text)
            .filter_map(|(line, _)| line.split_once(':'))
            .find(|(key, _)| key.trim().eq_ignore_ascii_case(name))
            .map(|(_, value)| version(value.trim()))
            .unwrap_or(Err(Cause::TooOld))
    };
    Versions {
        driver: find("DRIVER version"),
        cuda: find("CUDA Version"),
    }
}

fn version(text: &str) -> Fact<String> {
    let version = cells::text(text)?;
    let is_one = version.starts_with(|c: char| c.is_ascii_digit())
        && version
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '.' || c == '-');
    is_one
        .then_some(version)
        .ok_or_else(|| Cause::unreadable(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recorded_answer_names_driver_and_cuda() {
        let text = include_str!("../../../../../tests/recordings/hw/smi/version/595.txt");
        let versions = parse(text);
        assert_eq!(versions.driver.as_deref(), Ok("595.80"));
        assert_eq!(versions.cuda.as_deref(), Ok("13.2"));
        assert_eq!(parse("Invalid combination").cuda, Err(Cause::TooOld));
        assert!(parse("CUDA Version: x y\n").cuda.is_err());
    }
}
