//! A failure as it is told: once, in the log and in the counts.

use std::fmt;

use llmgw_proto::text::plain;

use super::Failure;

/// A failure, as it is told once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureNews {
    pub model: String,
    pub failure: Failure,
    /// It was over before this server saw it run: an earlier server may have told of it.
    pub is_old: bool,
    /// Until the next attempt; 0: it is made now.
    pub wait_ms: u64,
}

/// What the engine said last is shown up to this length.
const LAST_LINE_MAX_CHARS: usize = 200;
/// Longer first words of a reason are no code.
const REASON_CODE_MAX_BYTES: usize = 40;
/// The code of a reason that begins with none.
const OTHER_REASON: &str = "other";

impl FailureNews {
    /// What the reason begins with, for programs.
    pub fn code(&self) -> &str {
        let reason = &self.failure.reason;
        let code = reason.split_once(": ").map_or("", |(code, _)| code);
        let is_code = code
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        match is_code && (1..=REASON_CODE_MAX_BYTES).contains(&code.len()) {
            true => code,
            false => OTHER_REASON,
        }
    }
}

impl fmt::Display for FailureNews {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failure = &self.failure;
        // A node wrote them, and the log is for the server to write.
        let reason = plain(&failure.reason);
        match self.is_old {
            true => write!(f, "had failed before this server saw it run: {reason}")?,
            false => write!(f, "failed: {reason}")?,
        }
        let mut lines = failure.lines.iter().rev().map(|line| line.text.trim());
        if let Some(last) = lines.find(|line| !line.is_empty()) {
            let end = last.char_indices().nth(LAST_LINE_MAX_CHARS);
            let (shown, dots) = end.map_or((last, ""), |(end, _)| (&last[..end], "…"));
            write!(f, "; its last line was `{}{dots}`", plain(shown))?;
        }
        match self.wait_ms {
            0 => f.write_str("; the next attempt is made now"),
            ms => write!(f, "; next attempt in {} s", ms.div_ceil(1_000)),
        }
    }
}
