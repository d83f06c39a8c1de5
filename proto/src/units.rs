//! Durations (`500ms`, `30s`, `5m`, `1h`) and sizes (`64MiB`, `10MB`, plain bytes) as people write them in configuration files.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, Visitor};

/// A length of time, written as a whole number and one of `ms`, `s`, `m`, `h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct HumanDuration(pub Duration);

/// A number of bytes, written as a whole number with or without a unit: `B`, decimal `KB MB GB TB`, binary `KiB MiB GiB TiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(pub u64);

/// Why a text is no duration or size, with what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitError {
    /// What is wrong, in lower case, the text in backticks.
    pub wrong: String,
    /// What to write instead.
    pub right: String,
}

/// Milliseconds in each unit of a duration, the largest first.
const DURATION_UNITS: [(&str, u64); 4] = [("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// Bytes in each unit of a size, the largest first; binary before decimal, so that `Display` prefers it.
const SIZE_UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

/// The longest input that a message repeats in full.
const SHOWN_MAX_CHARS: usize = 40;

impl FromStr for HumanDuration {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let (digits, unit) = split(text);
        let factor = DURATION_UNITS
            .iter()
            .find(|(name, _)| *name == unit)
            .map(|(_, factor)| *factor);
        let Some(factor) = factor else {
            return Err(duration_error(text, digits, unit));
        };
        let count = whole(text, digits, "a duration such as `30s`")?;
        let ms = count
            .checked_mul(factor)
            .ok_or_else(|| too_large(text, "a duration"))?;
        Ok(HumanDuration(Duration::from_millis(ms)))
    }
}

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let (digits, unit) = split(text);
        let factor = match unit {
            "" => Some(1),
            _ => SIZE_UNITS
                .iter()
                .find(|(name, _)| *name == unit)
                .map(|(_, factor)| *factor),
        };
        let Some(factor) = factor else {
            return Err(size_error(text, digits, unit));
        };
        let count = whole(text, digits, "a size such as `64MiB`")?;
        let bytes = count
            .checked_mul(factor)
            .ok_or_else(|| too_large(text, "a size"))?;
        Ok(ByteSize(bytes))
    }
}

/// The number and the rest; a number with a fraction stays whole, so that the message can name it.
fn split(text: &str) -> (&str, &str) {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    text.split_at(end)
}

fn whole(text: &str, digits: &str, example: &str) -> Result<u64, UnitError> {
    if digits.contains('.') {
        return Err(UnitError {
            wrong: format!("`{}` has a fraction", shown(text)),
            right: "write a whole number of a smaller unit".to_owned(),
        });
    }
    if digits.is_empty() {
        return Err(UnitError {
            wrong: format!("`{}` has no number", shown(text)),
            right: format!("write {example}"),
        });
    }
    digits.parse().map_err(|_| too_large(text, "a number"))
}

fn too_large(text: &str, what: &str) -> UnitError {
    UnitError {
        wrong: format!("`{}` is too large for {what}", shown(text)),
        right: "write a smaller one".to_owned(),
    }
}

fn duration_error(text: &str, digits: &str, unit: &str) -> UnitError {
    if text.trim().is_empty() {
        return UnitError {
            wrong: "the duration is empty".to_owned(),
            right: "write e.g. `30s`".to_owned(),
        };
    }
    if !digits.is_empty() && unit.is_empty() {
        return UnitError {
            wrong: format!("`{}` has no unit", shown(text)),
            right: format!("write `{digits}s` for seconds or `{digits}ms` for milliseconds"),
        };
    }
    let meant = match unit.trim().to_ascii_lowercase().as_str() {
        "ms" | "msec" | "msecs" | "millis" | "milliseconds" => Some("ms"),
        "s" | "sec" | "secs" | "second" | "seconds" => Some("s"),
        "m" | "min" | "mins" | "minute" | "minutes" => Some("m"),
        "h" | "hr" | "hrs" | "hour" | "hours" => Some("h"),
        _ => None,
    };
    let right = match meant {
        Some(meant) if !digits.is_empty() => format!("write `{digits}{meant}`"),
        _ => "write a whole number and one unit of ms, s, m, h, e.g. `500ms`, `30s`, `5m`, `1h`"
            .to_owned(),
    };
    UnitError {
        wrong: format!("`{}` is not a duration", shown(text)),
        right,
    }
}

fn size_error(text: &str, digits: &str, unit: &str) -> UnitError {
    if text.trim().is_empty() {
        return UnitError {
            wrong: "the size is empty".to_owned(),
            right: "write e.g. `64MiB`".to_owned(),
        };
    }
    let bare = unit.trim().to_ascii_lowercase();
    let meant = match bare.as_str() {
        "k" | "m" | "g" | "t" => {
            let letter = bare.to_ascii_uppercase();
            Some(format!(
                "write `{digits}{letter}iB` (binary) or `{digits}{letter}B` (decimal)"
            ))
        }
        "ki" | "mi" | "gi" | "ti" => Some(format!(
            "write `{digits}{}iB`",
            bare[..1].to_ascii_uppercase()
        )),
        "byte" | "bytes" => Some(format!("write `{digits}`")),
        _ => SIZE_UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(&bare))
            .map(|(name, _)| format!("write `{digits}{name}`")),
    };
    let right = match meant {
        Some(meant) if !digits.is_empty() => meant,
        _ => "write a whole number and one unit of KiB, MiB, GiB, KB, MB, GB, e.g. `64MiB`, or plain bytes".to_owned(),
    };
    UnitError {
        wrong: format!("`{}` is not a size", shown(text)),
        right,
    }
}

fn shown(text: &str) -> String {
    if text.chars().count() <= SHOWN_MAX_CHARS {
        return text.to_owned();
    }
    text.chars()
        .take(SHOWN_MAX_CHARS)
        .chain("...".chars())
        .collect()
}

/// The largest unit that leaves a whole number, so that what is printed parses to the same value (to the millisecond).
impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        if ms == 0 {
            return f.write_str("0s");
        }
        let exact = DURATION_UNITS
            .iter()
            .find(|(_, factor)| ms.is_multiple_of(u128::from(*factor)));
        let (name, factor) = exact.unwrap_or(&("ms", 1));
        write!(f, "{}{name}", ms / u128::from(*factor))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("0");
        }
        let exact = SIZE_UNITS
            .iter()
            .find(|(name, factor)| *name != "B" && self.0.is_multiple_of(*factor));
        match exact {
            Some((name, factor)) => write!(f, "{}{name}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

impl fmt::Display for UnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.wrong, self.right)
    }
}

impl std::error::Error for UnitError {}

impl<'de> Deserialize<'de> for HumanDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = HumanDuration;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a duration such as `30s`")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<HumanDuration, E> {
                text.parse().map_err(E::custom)
            }

            // A bare number is the usual slip; the parser's own message says which unit to add.
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<HumanDuration, E> {
                number.to_string().parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Text)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as `64MiB`")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }
        }
        deserializer.deserialize_any(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_a_whole_number_and_one_unit() {
        for (text, ms) in [
            ("500ms", 500),
            ("30s", 30_000),
            ("5m", 300_000),
            ("1h", 3_600_000),
            ("0s", 0),
        ] {
            assert_eq!(
                text.parse(),
                Ok(HumanDuration(Duration::from_millis(ms))),
                "{text}"
            );
        }
    }

    #[test]
    fn a_size_is_bytes_with_or_without_a_unit() {
        let cases = [
            ("64MiB", 64 << 20),
            ("1KiB", 1024),
            ("1GiB", 1 << 30),
            ("10MB", 10_000_000),
            ("4096", 4096),
            ("12B", 12),
            ("0", 0),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn a_wrong_duration_says_what_would_be_right() {
        let cases = [
            (
                "30",
                "`30` has no unit: write `30s` for seconds or `30ms` for milliseconds",
            ),
            ("30 s", "`30 s` is not a duration: write `30s`"),
            ("5min", "`5min` is not a duration: write `5m`"),
            ("2H", "`2H` is not a duration: write `2h`"),
            (
                "1.5h",
                "`1.5h` has a fraction: write a whole number of a smaller unit",
            ),
            ("", "the duration is empty: write e.g. `30s`"),
            ("s", "`s` has no number: write a duration such as `30s`"),
            (
                "1h30m",
                "`1h30m` is not a duration: write a whole number and one unit of ms, s, m, h, e.g. `500ms`, `30s`, `5m`, `1h`",
            ),
            (
                "-1s",
                "`-1s` is not a duration: write a whole number and one unit of ms, s, m, h, e.g. `500ms`, `30s`, `5m`, `1h`",
            ),
            (
                "99999999999999999h",
                "`99999999999999999h` is too large for a duration: write a smaller one",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(
                text.parse::<HumanDuration>().unwrap_err().to_string(),
                expected
            );
        }
    }

    #[test]
    fn a_wrong_size_says_what_would_be_right() {
        let cases = [
            (
                "64M",
                "`64M` is not a size: write `64MiB` (binary) or `64MB` (decimal)",
            ),
            ("64mib", "`64mib` is not a size: write `64MiB`"),
            ("64Mi", "`64Mi` is not a size: write `64MiB`"),
            ("64 MiB", "`64 MiB` is not a size: write `64MiB`"),
            (
                "1.5GiB",
                "`1.5GiB` has a fraction: write a whole number of a smaller unit",
            ),
            (
                "big",
                "`big` is not a size: write a whole number and one unit of KiB, MiB, GiB, KB, MB, GB, e.g. `64MiB`, or plain bytes",
            ),
            (
                "99999999999TiB",
                "`99999999999TiB` is too large for a size: write a smaller one",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse::<ByteSize>().unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn what_is_printed_reads_back_the_same() {
        for text in ["500ms", "30s", "5m", "1h", "90s", "0s", "1001ms"] {
            assert_eq!(text.parse::<HumanDuration>().unwrap().to_string(), text);
        }
        for text in ["64MiB", "1KiB", "10MB", "1023", "0"] {
            assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn serde_reads_both_and_refuses_a_duration_without_a_unit() {
        assert_eq!(
            serde_json::from_str::<HumanDuration>("\"30s\"").unwrap().0,
            Duration::from_secs(30)
        );
        assert_eq!(
            serde_json::from_str::<ByteSize>("4096").unwrap(),
            ByteSize(4096)
        );
        assert_eq!(
            serde_json::from_str::<ByteSize>("\"1KiB\"").unwrap(),
            ByteSize(1024)
        );
        let error = serde_json::from_str::<HumanDuration>("30")
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("`30` has no unit: write `30s`"),
            "{error}"
        );
    }
}
