//! Moments as people write them: `2026-12-31`, `2026-12-31T18:30:00Z`. Always UTC.

use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use llmgw_proto::units::UnitError;

const DAY_SECONDS: u64 = 86_400;
/// Before it no key was made, so an earlier year is a typing error.
const YEARS: std::ops::RangeInclusive<u64> = 2000..=9999;
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
    let (date, clock) = match text.split_once('T') {
        Some((date, clock)) => (date, clock.strip_suffix('Z')?),
        None => (text, "00:00:00"),
    };
    let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
    let [hour, minute, second] = numbers(clock, ':', [2, 2, 2])?;
    let is_clock = hour < 24 && minute < 60 && second < 60;
    if !is_clock || !YEARS.contains(&year) || !(1..=12).contains(&month) {
        return None;
    }
    if day == 0 || day > days_of_month(year, month) {
        return None;
    }
    let days = days_before_year(year) - days_before_year(1970);
    let days = days
        + (1..month)
            .map(|month| days_of_month(year, month))
            .sum::<u64>()
        + day
        - 1;
    Some(UtcTime(
        days * DAY_SECONDS + hour * 3600 + minute * 60 + second,
    ))
}

/// Digits only, each of them there.
fn numbers(text: &str, between: char, widths: [usize; 3]) -> Option<[u64; 3]> {
    let mut parts = text.split(between);
    let mut found = [0; 3];
    for (number, width) in found.iter_mut().zip(widths) {
        let part = parts.next()?;
        if part.len() != width || !part.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        *number = part.parse().ok()?;
    }
    parts.next().is_none().then_some(found)
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_before_year(year: u64) -> u64 {
    let past = year - 1;
    past * 365 + past / 4 - past / 100 + past / 400
}

fn days_of_month(year: u64, month: u64) -> u64 {
    match month {
        2 => 28 + u64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

impl fmt::Display for UtcTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut days, clock) = (self.0 / DAY_SECONDS, self.0 % DAY_SECONDS);
        days += days_before_year(1970);
        // A guess that is never too late, and at most one year too early.
        let mut year = days / 366 + 1;
        while days_before_year(year + 1) <= days {
            year += 1;
        }
        days -= days_before_year(year);
        let mut month = 1;
        while days >= days_of_month(year, month) {
            days -= days_of_month(year, month);
            month += 1;
        }
        write!(
            f,
            "{year:04}-{month:02}-{:02}T{:02}:{:02}:{:02}Z",
            days + 1,
            clock / 3600,
            clock / 60 % 60,
            clock % 60
        )
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

    #[test]
    fn every_day_is_written_as_it_is_read() {
        let first: UtcTime = "2000-01-01".parse().unwrap();
        for day in 0..200_000 {
            let time = UtcTime(first.0 + day * DAY_SECONDS + 1);
            assert_eq!(time.to_string().parse::<UtcTime>().unwrap(), time);
        }
    }
}
