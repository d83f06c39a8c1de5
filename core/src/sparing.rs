//! A warning about what may happen at any rate, kept from filling the log.

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

/// One line within this time.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// When it was said last.
#[derive(Debug, Default)]
pub struct Sparing {
    said: Option<Instant>,
    unsaid: u64,
}

/// How often it happened without a line. Shown behind the next one, nothing where it never did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsaid(pub(crate) u64);

impl Sparing {
    /// It happened: whether to say so. None: not now.
    pub fn note(&mut self) -> Option<Unsaid> {
        let now = Instant::now();
        if self
            .said
            .is_some_and(|said| now.duration_since(said) < SAID_EVERY)
        {
            self.unsaid += 1;
            return None;
        }
        self.said = Some(now);
        Some(Unsaid(std::mem::take(&mut self.unsaid)))
    }
}

impl fmt::Display for Unsaid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(f, " ({count} more like it were not written)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_line_a_minute_says_how_many_there_were_since_the_last() {
        let mut warning = Sparing::default();
        assert_eq!(warning.note(), Some(Unsaid(0)));
        tokio::time::advance(SAID_EVERY - Duration::from_millis(1)).await;
        assert_eq!((warning.note(), warning.note()), (None, None));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(warning.note(), Some(Unsaid(2)));
        assert_eq!(Unsaid(2).to_string(), " (2 more like it were not written)");
        tokio::time::advance(SAID_EVERY).await;
        assert_eq!(warning.note(), Some(Unsaid(0)));
        assert_eq!(Unsaid(0).to_string(), "");
    }
}
