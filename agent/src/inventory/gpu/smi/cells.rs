//! Cells of nvidia-smi's CSV: how a row is split, and what a cell means.

use llmgw_proto::inventory::gpu::{ComputeCapability, FabricState};

use crate::inventory::gpu::facts::{Cause, Fact};

/// Uuids have 40 bytes, `MIG-` ones 40 too, old ones up to 80; names are shorter.
const TEXT_MAX_BYTES: usize = 128;

/// The cells of a row, without the spaces around them. nvidia-smi quotes nothing; other CSV writers in between may.
pub fn split(line: &str) -> Vec<String> {
    let mut cells = Vec::new();
    let mut cell = String::new();
    let mut quoted = false;
    let mut rest = line.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '"' if quoted && rest.peek() == Some(&'"') => {
                cell.push('"');
                rest.next();
            }
            '"' if quoted => quoted = false,
            '"' if cell.trim().is_empty() => {
                quoted = true;
                cell.clear();
            }
            ',' if !quoted => cells.push(std::mem::take(&mut cell).trim().to_string()),
            _ => cell.push(c),
        }
    }
    cells.push(cell.trim().to_string());
    cells
}

/// The lines of an answer without the byte order mark, carriage returns and empty lines. The last one may be cut off:
/// then it has no newline.
pub fn lines(text: &str) -> impl Iterator<Item = (&str, bool)> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    text.split_inclusive('\n')
        .map(|line| (line.trim_end_matches(['\r', '\n']), line.ends_with('\n')))
        .filter(|(line, _)| !line.trim().is_empty())
}

/// The cause in a cell that holds no value: `[N/A]`, `[Unknown Error]`, `ERR!`, nothing.
pub fn cause(cell: &str) -> Option<Cause> {
    let bracketed = cell.starts_with('[') && cell.ends_with(']');
    let bare = ["", "N/A", "ERR!", "Not Supported"].contains(&cell);
    (bracketed || bare).then(|| Cause::from_driver(cell))
}

pub fn text(cell: &str) -> Fact<String> {
    if let Some(cause) = cause(cell) {
        return Err(cause);
    }
    if cell.len() > TEXT_MAX_BYTES || cell.chars().any(char::is_control) {
        return Err(Cause::unreadable(cell));
    }
    Ok(cell.to_string())
}

/// An uuid of a GPU, or of a slice.
pub fn uuid(cell: &str) -> Fact<String> {
    let uuid = text(cell)?;
    let is_one = ["GPU-", "MIG-"]
        .iter()
        .any(|kind| uuid.len() > kind.len() && uuid.starts_with(kind))
        && uuid.bytes().all(|byte| byte.is_ascii_graphic());
    is_one
        .then_some(uuid)
        .ok_or_else(|| Cause::unreadable(cell))
}

pub fn number<T: std::str::FromStr>(cell: &str) -> Fact<T> {
    if let Some(cause) = cause(cell) {
        return Err(cause);
    }
    let is_number = !cell.is_empty() && cell.bytes().all(|byte| byte.is_ascii_digit());
    is_number
        .then(|| cell.parse().ok())
        .flatten()
        .ok_or_else(|| Cause::unreadable(cell))
}

/// MiB, with or without the unit.
pub fn mib(cell: &str) -> Fact<u64> {
    number(cell.strip_suffix(" MiB").unwrap_or(cell))
}

/// `Yes` and `Enabled`, `No` and `Disabled`.
pub fn flag(cell: &str) -> Fact<bool> {
    match cell {
        "Yes" | "Enabled" => Ok(true),
        "No" | "Disabled" => Ok(false),
        other => Err(cause(other).unwrap_or_else(|| Cause::unreadable(other))),
    }
}

pub fn capability(cell: &str) -> Fact<ComputeCapability> {
    if let Some(cause) = cause(cell) {
        return Err(cause);
    }
    cell.parse().map_err(|_| Cause::unreadable(cell))
}

/// `None`, or what the driver wants done.
pub fn recovery(cell: &str) -> Fact<Option<String>> {
    let wanted = text(cell)?;
    Ok(Some(wanted).filter(|wanted| wanted != "None"))
}

pub fn fabric_state(cell: &str) -> Fact<FabricState> {
    match cell {
        "Completed" => Ok(FabricState::Completed),
        "In Progress" => Ok(FabricState::InProgress),
        "Not Started" => Ok(FabricState::NotStarted),
        other => match cause(other) {
            Some(Cause::NotSupported) => Ok(FabricState::NotSupported),
            Some(cause) => Err(cause),
            None => Err(Cause::unreadable(other)),
        },
    }
}

/// A cluster's uuid with dashes and in lower case, whichever way it was written.
pub fn cluster_uuid(cell: &str) -> Fact<String> {
    if let Some(cause) = cause(cell) {
        return Err(cause);
    }
    let digits: String = cell.chars().filter(|c| *c != '-').collect();
    if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(Cause::unreadable(cell));
    }
    let digits = digits.to_ascii_lowercase();
    Ok([
        &digits[..8],
        &digits[8..12],
        &digits[12..16],
        &digits[16..20],
        &digits[20..],
    ]
    .join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_split_at_commas_outside_of_quotes() {
        for (line, cells) in [
            ("0, GPU-1, NVIDIA L4", vec!["0", "GPU-1", "NVIDIA L4"]),
            ("0,GPU-1,", vec!["0", "GPU-1", ""]),
            (r#"1, "a, b", c"#, vec!["1", "a, b", "c"]),
            (r#""say ""hi""", 2"#, vec![r#"say "hi""#, "2"]),
            (r#""never closed, 2"#, vec!["never closed, 2"]),
            ("", vec![""]),
        ] {
            assert_eq!(split(line), cells, "{line}");
        }
    }

    #[test]
    fn lines_are_read_through_marks_and_carriage_returns() {
        let read: Vec<_> = lines("\u{feff}a\r\n\r\nb\nc").collect();
        assert_eq!(read, [("a", true), ("b", true), ("c", false)]);
    }

    #[test]
    fn no_cell_without_a_number_becomes_zero() {
        for cell in [
            "",
            "[N/A]",
            "N/A",
            "ERR!",
            "[Unknown Error]",
            "-1",
            "1.5",
            "0x10",
            "+3",
            "١",
            "1e3",
            "99999999999999999999999",
        ] {
            assert!(mib(cell).is_err(), "{cell}");
            assert!(number::<u32>(cell).is_err(), "{cell}");
        }
        assert_eq!(mib("81559"), Ok(81_559));
        assert_eq!(mib("81559 MiB"), Ok(81_559));
        assert_eq!(mib("0"), Ok(0));
    }

    #[test]
    fn words_of_a_cell_have_their_meaning() {
        assert_eq!(flag("Yes"), Ok(true));
        assert_eq!(flag("Disabled"), Ok(false));
        assert_eq!(flag("[N/A]"), Err(Cause::NotSupported));
        assert_eq!(flag("Maybe"), Err(Cause::Unreadable("Maybe".into())));
        assert_eq!(recovery("None"), Ok(None));
        assert_eq!(
            recovery("Drain and Reset"),
            Ok(Some("Drain and Reset".into()))
        );
        assert_eq!(fabric_state("N/A"), Ok(FabricState::NotSupported));
        assert_eq!(fabric_state("In Progress"), Ok(FabricState::InProgress));
        assert_eq!(
            cluster_uuid("9C5EED5353BF49B5A436B66766C413C3").as_deref(),
            Ok("9c5eed53-53bf-49b5-a436-b66766c413c3")
        );
        assert!(cluster_uuid("9c5eed53").is_err());
        assert!(uuid("GPU-").is_err());
        assert!(uuid("5eed").is_err());
    }
}
