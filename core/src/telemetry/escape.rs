//! Appends to a line under construction: numbers, times, and strings that must not break it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use llmgw_proto::text::hides;

/// Longest string from outside that a line carries; more is cut and marked with `…`.
pub const FIELD_MAX_BYTES: usize = 256;

const DAY_SECONDS: u64 = 86_400;

/// Appends `text` in double quotes, as JSON. Control characters, line separators and characters that
/// reorder or hide text on a terminal come out as `\u` escapes, so that what a client sent stays one field.
pub fn push_quoted(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    let (text, cut) = clip(text);
    if text.bytes().all(is_plain) {
        out.extend_from_slice(text.as_bytes());
    } else {
        text.chars().for_each(|c| push_escaped(out, c));
    }
    if cut {
        out.extend_from_slice("…".as_bytes());
    }
    out.push(b'"');
}

/// Appends `text` bare where it reads as one word (logfmt), quoted otherwise.
pub fn push_word(out: &mut Vec<u8>, text: &str) {
    let bare = !text.is_empty()
        && text.len() <= FIELD_MAX_BYTES
        && text
            .bytes()
            .all(|byte| is_plain(byte) && byte != b' ' && byte != b'=');
    if bare {
        out.extend_from_slice(text.as_bytes());
    } else {
        push_quoted(out, text);
    }
}

/// Appends `value` in decimal.
pub fn push_u64(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// Appends a duration in milliseconds with microseconds as its decimals: `12.345`.
pub fn push_ms(out: &mut Vec<u8>, duration: Duration) {
    let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    push_u64(out, micros / 1000);
    out.push(b'.');
    push_padded(out, micros % 1000, 3);
}

/// The RFC 3339 stamp of a second, kept so that lines of the same second don't compute it again.
#[derive(Default)]
pub struct Stamp {
    second: u64,
    text: Vec<u8>,
}

impl Stamp {
    /// Appends `now` as `2026-11-29T18:50:21.123456Z`.
    pub fn push(&mut self, out: &mut Vec<u8>, now: SystemTime) {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        if self.text.is_empty() || self.second != since.as_secs() {
            self.second = since.as_secs();
            self.text.clear();
            push_second(&mut self.text, self.second);
        }
        out.extend_from_slice(&self.text);
        out.push(b'.');
        push_padded(out, u64::from(since.subsec_micros()), 6);
        out.push(b'Z');
    }
}

/// Days to a civil date after Howard Hinnant, "chrono-compatible low-level date algorithms" (`civil_from_days`),
/// for dates from 1970 on.
fn push_second(out: &mut Vec<u8>, second: u64) {
    let days = second / DAY_SECONDS + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let clock = second % DAY_SECONDS;
    let parts = [
        (year, 4, b'-'),
        (month, 2, b'-'),
        (day, 2, b'T'),
        (clock / 3600, 2, b':'),
        (clock / 60 % 60, 2, b':'),
    ];
    for (value, width, after) in parts {
        push_padded(out, value, width);
        out.push(after);
    }
    push_padded(out, clock % 60, 2);
}

fn push_padded(out: &mut Vec<u8>, value: u64, width: u32) {
    for place in (0..width).rev() {
        out.push(b'0' + (value / 10u64.pow(place) % 10) as u8);
    }
}

fn push_escaped(out: &mut Vec<u8>, c: char) {
    match c {
        '"' => out.extend_from_slice(b"\\\""),
        '\\' => out.extend_from_slice(b"\\\\"),
        '\n' => out.extend_from_slice(b"\\n"),
        '\r' => out.extend_from_slice(b"\\r"),
        '\t' => out.extend_from_slice(b"\\t"),
        c if hides(c) => {
            for unit in c.encode_utf16(&mut [0; 2]) {
                out.extend_from_slice(b"\\u");
                for shift in [12, 8, 4, 0] {
                    out.push(b"0123456789abcdef"[usize::from(*unit >> shift & 0xf)]);
                }
            }
        }
        c => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
    }
}

fn is_plain(byte: u8) -> bool {
    matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\'
}

fn clip(text: &str) -> (&str, bool) {
    if text.len() <= FIELD_MAX_BYTES {
        return (text, false);
    }
    let end = (0..=FIELD_MAX_BYTES)
        .rev()
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0);
    (&text[..end], true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(push: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        push(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn no_string_breaks_out_of_its_field() {
        let cases = [
            ("smollm2", "smollm2", "\"smollm2\""),
            ("", "\"\"", "\"\""),
            ("two words", "\"two words\"", "\"two words\""),
            ("a=b", "\"a=b\"", "\"a=b\""),
            (
                "x\n2026 INFO access: forged",
                "\"x\\n2026 INFO access: forged\"",
                "\"x\\n2026 INFO access: forged\"",
            ),
            ("q\"\\", "\"q\\\"\\\\\"", "\"q\\\"\\\\\""),
            ("\r\t", "\"\\r\\t\"", "\"\\r\\t\""),
            (
                "\u{1b}[31mred\u{7f}\u{85}\0",
                "\"\\u001b[31mred\\u007f\\u0085\\u0000\"",
                "\"\\u001b[31mred\\u007f\\u0085\\u0000\"",
            ),
            (
                "a\u{2028}b\u{202e}c\u{feff}",
                "\"a\\u2028b\\u202ec\\ufeff\"",
                "\"a\\u2028b\\u202ec\\ufeff\"",
            ),
            ("模型😀", "\"模型😀\"", "\"模型😀\""),
        ];
        for (raw, word, quoted) in cases {
            assert_eq!(text_of(|out| push_word(out, raw)), word, "{raw:?}");
            assert_eq!(text_of(|out| push_quoted(out, raw)), quoted, "{raw:?}");
            assert_eq!(serde_json::from_str::<String>(quoted).unwrap(), raw);
        }
    }

    #[test]
    fn a_long_string_is_cut_at_a_character() {
        let text = text_of(|out| push_word(out, &"é".repeat(200)));
        assert_eq!(text, format!("\"{}…\"", "é".repeat(128)));
        let text = text_of(|out| push_word(out, &format!("a{}", "é".repeat(200))));
        assert_eq!(text, format!("\"a{}…\"", "é".repeat(127)));
    }

    #[test]
    fn numbers_and_times_read_as_expected() {
        assert_eq!(text_of(|out| push_u64(out, 0)), "0");
        assert_eq!(
            text_of(|out| push_u64(out, u64::MAX)),
            "18446744073709551615"
        );
        assert_eq!(
            text_of(|out| push_ms(out, Duration::from_micros(12_005))),
            "12.005"
        );
        let cases = [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (951_868_799, "2000-02-29T23:59:59.000000Z"),
            (1_795_978_221, "2026-11-29T18:50:21.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ];
        let mut stamp = Stamp::default();
        for (second, expected) in cases {
            let now = UNIX_EPOCH + Duration::from_secs(second);
            assert_eq!(text_of(|out| stamp.push(out, now)), expected);
        }
        let now = UNIX_EPOCH + Duration::from_micros(1_500_042);
        assert_eq!(
            text_of(|out| stamp.push(out, now)),
            "1970-01-01T00:00:01.500042Z"
        );
    }
}
