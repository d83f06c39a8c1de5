//! Moments as people write them: `2026-12-31`, `2026-12-31T18:30:00Z`. Always UTC.

use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use llmgw_proto::identity::Moment;
use llmgw_proto::units::UnitError;
use time::format_description::BorrowedFormatItem;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;
use time::{Date, OffsetDateTime};

/// A date alone.
const DAY: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day]");
/// Before it no key was made, so an earlier year is a typing error.
const YEARS: std::ops::RangeInclusive<i32> = 2000..=9999;
/// The longest input that a message repeats in full.
const SHOWN_MAX_CHARS: usize = 40;

/// A second since 1970, UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UtcTime(pub u64);

impl UtcTime {
    /// The last one that is written with a year of four digits.
    pub const LAST: UtcTime = UtcTime(253_402_300_799);

    pub fn now() -> UtcTime {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        UtcTime(since.unwrap_or_default().as_secs())
    }
}

/// A date alone is its first second.
impl FromStr for UtcTime {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<UtcTime, UnitError> {
        parse(text).ok_or_else(|| {
            let shown: String = text.chars().take(SHOWN_MAX_CHARS).collect();
            UnitError {
                wrong: format!("`{shown}` is not a date"),
                right: "write e.g. `2026-12-31` or `2026-12-31T18:30:00Z`, in UTC".to_owned(),
            }
        })
    }
}

fn parse(text: &str) -> Option<UtcTime> {
    let moment = if text.contains('T') {
        let moment = OffsetDateTime::parse(text, &Rfc3339).ok()?;
        moment.offset().is_utc().then_some(moment)?
    } else {
        Date::parse(text, DAY).ok()?.midnight().assume_utc()
    };
    if !YEARS.contains(&moment.year()) {
        return None;
    }
    u64::try_from(moment.unix_timestamp()).ok().map(UtcTime)
}

impl fmt::Display for UtcTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = i64::try_from(self.0.min(UtcTime::LAST.0)).unwrap_or_default();
        Moment(seconds).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_read_and_written() {
        for (text, seconds, written) in [
            ("2026-12-31", 1_798_675_200, "2026-12-31T00:00:00Z"),
            (
                "2026-11-29T18:50:21Z",
                1_795_978_221,
                "2026-11-29T18:50:21Z",
            ),
            ("2000-02-29T23:59:59Z", 951_868_799, "2000-02-29T23:59:59Z"),
            ("2100-03-01", 4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            let time: UtcTime = text.parse().unwrap();
            assert_eq!((time.0, &*time.to_string()), (seconds, written));
        }
        assert_eq!(UtcTime::LAST.to_string(), "9999-12-31T23:59:59Z");
        assert_eq!(UtcTime(0).to_string(), "1970-01-01T00:00:00Z");
    }

    #[test]
    fn what_is_no_date_is_refused_with_an_example() {
        for text in [
            "",
            "soon",
            "2026-13-01",
            "2026-02-29",
            "2100-02-29",
            "2026-00-10",
            "2026-01-00",
            "26-01-01",
            "2026-1-1",
            "2026-01-01T00:00:00",
            "2026-01-01T24:00:00Z",
            "2026-01-01T00:00:00+02:00",
            "2026-01-01-01",
            "+026-01-01",
            "1999-01-01",
        ] {
            let error = text.parse::<UtcTime>().unwrap_err();
            assert_eq!(error.wrong, format!("`{text}` is not a date"));
            assert!(error.right.contains("`2026-12-31`"));
        }
    }
}
