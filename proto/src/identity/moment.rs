//! A second on the calendar, as certificates hold them.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

pub const DAY_SECONDS: i64 = 86_400;
/// From so many days before its end on, a certificate is warned about.
pub const EXPIRY_WARNED_DAYS: i64 = 30;

/// Seconds since 1970, UTC. Written as `2026-12-31T18:30:00Z`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub i64);

impl Moment {
    pub fn now() -> Moment {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Moment(i64::try_from(since.unwrap_or_default().as_secs()).unwrap_or(i64::MAX))
    }

    /// Whole days from then until this, negative where it is earlier.
    pub fn days_from(self, then: Moment) -> i64 {
        self.0.saturating_sub(then.0).div_euclid(DAY_SECONDS)
    }

    /// So many seconds later, or earlier where they are negative.
    pub fn after(self, seconds: i64) -> Moment {
        Moment(self.0.saturating_add(seconds))
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = OffsetDateTime::from_unix_timestamp(self.0)
            .ok()
            .and_then(|moment| moment.format(&Rfc3339).ok());
        f.write_str(text.as_deref().unwrap_or("a time beyond the calendar"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_written_in_utc() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
            (1_798_675_200, "2026-12-31T00:00:00Z"),
            (253_402_300_799, "9999-12-31T23:59:59Z"),
            (i64::MAX, "a time beyond the calendar"),
        ] {
            assert_eq!(Moment(seconds).to_string(), text);
        }
    }
}
