//! The last lines of an engine's output: bounded, with time stamps, without what a terminal would obey.

pub mod output;

use std::collections::VecDeque;

use llmgw_proto::shard::LogLine;

/// Lines that are kept.
pub const TAIL_MAX_LINES: usize = 1_000;
/// Text that is kept.
const TAIL_MAX_BYTES: usize = 512 * 1024;
/// A longer line is cut.
pub const LINE_MAX_BYTES: usize = 4 * 1024;
/// What stands in place of a key that the engine printed.
const REDACTED: &str = "******";

/// The last lines of a shard, numbered from its start.
#[derive(Debug, Default)]
pub struct LogTail {
    lines: VecDeque<LogLine>,
    bytes: usize,
    /// The number of the next line, so of the lines there ever were.
    next: u64,
    partial: Partial,
    secret: Option<String>,
}

/// The line that has no end yet.
#[derive(Debug, Default)]
struct Partial {
    bytes: Vec<u8>,
    cut_bytes: u64,
    /// A carriage return came: what follows replaces the line, as on a terminal. So a progress bar is one line.
    returned: bool,
}

/// Where a text stands within an escape sequence.
enum Escape {
    No,
    /// After ESC.
    Begun,
    /// `ESC [`, up to a letter.
    Control,
    /// `ESC ]` and others, up to BEL or `ESC \`.
    Text,
}

impl LogTail {
    /// `secret`: the engine's key, which some engines print with their arguments.
    pub fn new(secret: Option<String>) -> LogTail {
        LogTail {
            secret: secret.filter(|secret| !secret.is_empty()),
            ..LogTail::default()
        }
    }

    /// Takes bytes as they came, cut anywhere.
    pub fn take(&mut self, bytes: &[u8], now_ms: u64) {
        for &byte in bytes {
            match byte {
                b'\n' => self.end_line(now_ms),
                b'\r' => self.partial.returned = true,
                byte => self.partial.push(byte),
            }
        }
    }

    /// Makes a line of what has no end yet; the engine is gone.
    pub fn finish(&mut self, now_ms: u64) {
        if !self.partial.bytes.is_empty() {
            self.end_line(now_ms);
        }
    }

    /// A line of the agent's own among the engine's.
    pub fn note(&mut self, text: &str, now_ms: u64) {
        self.push(format!("[llmgw-agent] {text}"), now_ms);
    }

    /// The last lines, at most so many.
    pub fn last(&self, lines: usize) -> Vec<LogLine> {
        let from = self.lines.len().saturating_sub(lines);
        self.lines.range(from..).cloned().collect()
    }

    /// The last lines, at most so many and of at most so many bytes.
    pub fn last_within(&self, lines: usize, bytes: usize) -> Vec<LogLine> {
        let mut left = bytes;
        let fitting = self.lines.iter().rev().take(lines).take_while(|line| {
            let fits = line.text.len() <= left;
            left = left.saturating_sub(line.text.len());
            fits
        });
        let mut last: Vec<LogLine> = fitting.cloned().collect();
        last.reverse();
        last
    }

    /// The lines from number `from` on that are still kept, at most so many, and the number to go on with.
    pub fn from(&self, from: u64, lines: usize) -> (Vec<LogLine>, u64) {
        let first = self.next - self.lines.len() as u64;
        let skip = usize::try_from(from.saturating_sub(first)).unwrap_or(usize::MAX);
        let taken: Vec<LogLine> = self.lines.iter().skip(skip).take(lines).cloned().collect();
        let next = (first.max(from) + taken.len() as u64).min(self.next);
        (taken, next)
    }

    fn end_line(&mut self, now_ms: u64) {
        let partial = std::mem::take(&mut self.partial);
        let mut text = clean(&String::from_utf8_lossy(&partial.bytes));
        if let Some(secret) = &self.secret {
            text = text.replace(secret.as_str(), REDACTED);
        }
        if partial.cut_bytes > 0 {
            text.push_str(&format!(" … ({} bytes cut)", partial.cut_bytes));
        }
        self.push(text, now_ms);
    }

    fn push(&mut self, text: String, now_ms: u64) {
        self.bytes += text.len();
        self.next += 1;
        self.lines.push_back(LogLine {
            at_ms: now_ms,
            text,
        });
        while self.lines.len() > TAIL_MAX_LINES || self.bytes > TAIL_MAX_BYTES {
            let Some(line) = self.lines.pop_front() else {
                return;
            };
            self.bytes -= line.text.len();
        }
    }
}

impl Partial {
    fn push(&mut self, byte: u8) {
        if self.returned {
            *self = Partial::default();
        }
        if self.bytes.len() < LINE_MAX_BYTES {
            self.bytes.push(byte);
        } else {
            self.cut_bytes += 1;
        }
    }
}

/// Without escape sequences, control characters and what turns the direction of text; a tab becomes a space.
fn clean(text: &str) -> String {
    let mut escape = Escape::No;
    let mut clean = String::with_capacity(text.len());
    for char in text.chars() {
        escape = match (escape, char) {
            (Escape::Begun, '[') => Escape::Control,
            (Escape::Begun, ']' | 'P' | 'X' | '^' | '_') => Escape::Text,
            // Two or three characters: `ESC ( B`, `ESC =`.
            (Escape::Begun, ' '..='/') => Escape::Begun,
            (Escape::Begun, _) => Escape::No,
            (Escape::Control, '@'..='~') => Escape::No,
            (Escape::Control, _) => Escape::Control,
            (Escape::Text, '\u{7}') => Escape::No,
            (Escape::Text | Escape::No, '\u{1b}') => Escape::Begun,
            (Escape::Text, _) => Escape::Text,
            (Escape::No, '\u{9b}') => Escape::Control,
            (Escape::No, '\t') => {
                clean.push(' ');
                Escape::No
            }
            (Escape::No, char) => {
                if !char.is_control() && !turns_text(char) {
                    clean.push(char);
                }
                Escape::No
            }
        };
    }
    clean
}

fn turns_text(char: char) -> bool {
    matches!(char, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(tail: &LogTail) -> Vec<String> {
        tail.last(usize::MAX)
            .into_iter()
            .map(|line| line.text)
            .collect()
    }

    fn lines(bytes: &[u8]) -> Vec<String> {
        let mut tail = LogTail::new(None);
        tail.take(bytes, 7);
        tail.finish(8);
        texts(&tail)
    }

    #[test]
    fn what_a_terminal_would_obey_is_dropped() {
        for (bytes, expected) in [
            ("\u{1b}[1;32mINFO\u{1b}[0m ready\n", "INFO ready"),
            ("\u{1b}]0;title\u{7}text\n", "text"),
            ("\u{1b}]8;;http://x\u{1b}\\link\n", "link"),
            ("\u{1b}(Bplain\u{1b}=\n", "plain"),
            ("a\tb\u{0}\u{8}c\u{7f}\n", "a bc"),
            ("\u{9b}31mred\n", "red"),
            ("user\u{202e}txt\n", "usertxt"),
            ("unfinished \u{1b}[12\n", "unfinished "),
        ] {
            assert_eq!(lines(bytes.as_bytes()), [expected], "{bytes:?}");
        }
    }

    #[test]
    fn bytes_that_are_no_utf_8_are_replaced_and_a_character_may_come_in_two_pieces() {
        assert_eq!(lines(b"a\xffb\n"), ["a\u{fffd}b"]);
        let mut tail = LogTail::new(None);
        tail.take(&"ü".as_bytes()[..1], 1);
        tail.take(&"ü".as_bytes()[1..], 2);
        tail.take(b"\n", 3);
        assert_eq!(
            tail.last(9),
            [LogLine {
                at_ms: 3,
                text: "ü".to_owned()
            }]
        );
    }

    #[test]
    fn a_progress_bar_is_one_line_and_a_windows_line_is_whole() {
        assert_eq!(lines(b"\r 1%\r 50%\r100%\nnext\r\n"), ["100%", "next"]);
        assert_eq!(lines(b"no end"), ["no end"]);
    }

    #[test]
    fn a_long_line_is_cut_and_says_by_how_much() {
        let long = vec![b'x'; LINE_MAX_BYTES + 3];
        let line = lines(&long).remove(0);
        assert!(line.ends_with("x … (3 bytes cut)"), "{line}");
    }

    #[test]
    fn lines_and_bytes_are_bounded_and_the_last_ones_stay() {
        let mut tail = LogTail::new(None);
        for number in 0..TAIL_MAX_LINES + 5 {
            tail.take(format!("{number}\n").as_bytes(), 0);
        }
        assert_eq!(texts(&tail).len(), TAIL_MAX_LINES);
        assert_eq!(texts(&tail)[0], "5");
        for _ in 0..TAIL_MAX_LINES {
            tail.take(&vec![b'x'; LINE_MAX_BYTES], 0);
            tail.take(b"\n", 0);
        }
        assert_eq!(texts(&tail).len(), TAIL_MAX_BYTES / LINE_MAX_BYTES);
    }

    #[test]
    fn the_last_lines_are_those_that_fit() {
        let mut tail = LogTail::new(None);
        tail.take(b"1111\n2222\n3333\n4\n", 0);
        for (lines, bytes, expected) in [
            (9, 99, vec!["1111", "2222", "3333", "4"]),
            (2, 99, vec!["3333", "4"]),
            (9, 9, vec!["2222", "3333", "4"]),
            (9, 8, vec!["3333", "4"]),
            (9, 0, vec![]),
        ] {
            let last = tail.last_within(lines, bytes);
            let texts: Vec<&str> = last.iter().map(|line| line.text.as_str()).collect();
            assert_eq!(texts, expected);
        }
    }

    #[test]
    fn whoever_follows_gets_each_line_once_and_goes_on_after_a_gap() {
        let mut tail = LogTail::new(None);
        tail.take(b"a\nb\nc\n", 0);
        let (first, next) = tail.from(0, 2);
        assert_eq!((first.len(), next), (2, 2));
        let (second, next) = tail.from(next, 9);
        assert_eq!((second[0].text.as_str(), next), ("c", 3));
        assert_eq!(tail.from(next, 9), (Vec::new(), 3));
        for _ in 0..2 * TAIL_MAX_LINES {
            tail.take(b"x\n", 0);
        }
        let (late, next) = tail.from(3, 1);
        assert_eq!((late.len(), next), (1, 3 + TAIL_MAX_LINES as u64 + 1));
    }

    #[test]
    fn the_engines_key_is_never_shown() {
        let mut tail = LogTail::new(Some("sk-secret".to_owned()));
        tail.take(b"non-default args: {'api_key': 'sk-secret'}\n", 0);
        assert_eq!(texts(&tail), ["non-default args: {'api_key': '******'}"]);
    }
}
