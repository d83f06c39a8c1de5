//! The Prometheus text format, read fast and without trust.

use std::ops::Range;

/// A scrape may be this long; the rest is not read. vLLM's is 50 KB.
pub const SAMPLES_MAX_BYTES: usize = 8 * 1024 * 1024;

/// The series of one scrape.
///
/// Comments, timestamps and exemplars are skipped; so is a line that makes no sense, because one bad line must not hide
/// the numbers around it.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    text: String,
    series: Vec<Series>,
}

/// Where one line's parts are in the text.
#[derive(Clone, Debug)]
struct Series {
    name: Range<usize>,
    /// Between the braces; empty without any.
    labels: Range<usize>,
    value: f64,
}

impl Samples {
    /// Reads the text of a `/metrics` answer.
    pub fn parse(text: &str) -> Samples {
        let mut end = text.len().min(SAMPLES_MAX_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let text = &text[..end];
        let mut series = Vec::new();
        let mut start = 0;
        for line in text.split('\n') {
            if let Some(found) = parse_line(line, start) {
                series.push(found);
            }
            start += line.len() + 1;
        }
        Samples {
            text: text.to_owned(),
            series,
        }
    }

    /// How many series there are.
    pub fn len(&self) -> usize {
        self.series.len()
    }

    /// Nothing could be read.
    pub fn is_empty(&self) -> bool {
        self.series.is_empty()
    }

    /// The values of all series of this name.
    pub fn values<'s>(&'s self, name: &'s str) -> impl Iterator<Item = f64> + 's {
        self.named(name).map(|series| series.value)
    }

    /// All series of this name: their labels, unescaped, and their values.
    pub fn series<'s>(
        &'s self,
        name: &'s str,
    ) -> impl Iterator<Item = (Vec<(&'s str, String)>, f64)> + 's {
        self.named(name)
            .map(|series| (labels(&self.text[series.labels.clone()]), series.value))
    }

    /// Every series: name, labels, value.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, Vec<(&str, String)>, f64)> + '_ {
        self.series.iter().map(|series| {
            (
                &self.text[series.name.clone()],
                labels(&self.text[series.labels.clone()]),
                series.value,
            )
        })
    }

    fn named<'s>(&'s self, name: &'s str) -> impl Iterator<Item = &'s Series> + 's {
        self.series
            .iter()
            .filter(move |series| &self.text[series.name.clone()] == name)
    }
}

/// One line: `name{labels} value [timestamp]`. `start` is where it begins in the text.
fn parse_line(line: &str, start: usize) -> Option<Series> {
    let trimmed = line.trim_start_matches([' ', '\t']);
    let offset = start + line.len() - trimmed.len();
    if trimmed.is_empty() || trimmed.starts_with('#') {
        return None;
    }
    let bytes = trimmed.as_bytes();
    let name_len = bytes
        .iter()
        .position(|b| !(b.is_ascii_alphanumeric() || matches!(b, b'_' | b':' | b'.')))?;
    if name_len == 0 || bytes[0].is_ascii_digit() {
        return None;
    }
    let mut after = name_len
        + bytes[name_len..]
            .iter()
            .take_while(|b| matches!(b, b' ' | b'\t'))
            .count();
    let mut labels = name_len..name_len;
    if bytes.get(after) == Some(&b'{') {
        let close = closing_brace(&bytes[after..])?;
        labels = after + 1..after + close;
        after += close + 1;
    } else if after == name_len {
        return None;
    }
    let value = trimmed[after..].split_ascii_whitespace().next()?;
    let value = parse_value(value)?;
    Some(Series {
        name: offset..offset + name_len,
        labels: offset + labels.start..offset + labels.end,
        value,
    })
}

/// Where the brace that was opened at 0 is closed, outside of quotes.
fn closing_brace(bytes: &[u8]) -> Option<usize> {
    let mut quoted = false;
    let mut escaped = false;
    for (at, byte) in bytes.iter().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return Some(at),
            _ => {}
        }
    }
    None
}

/// Rust reads `NaN`, `inf` and `Infinity` in any case, which covers Prometheus' `+Inf`; hexadecimal and such are no values.
fn parse_value(text: &str) -> Option<f64> {
    text.parse().ok()
}

/// `a="x",b="y\"z"`. Stops where it stops making sense.
fn labels(text: &str) -> Vec<(&str, String)> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some((name, after)) = rest.split_once("=\"") {
        let mut value = String::new();
        let mut chars = after.char_indices();
        let mut end = None;
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    end = Some(at);
                    break;
                }
                '\\' => match chars.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, other)) => value.push(other),
                    None => break,
                },
                other => value.push(other),
            }
        }
        let Some(end) = end else { break };
        found.push((name.trim_start_matches([',', ' ']).trim_end(), value));
        rest = &after[end + 1..];
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_engines_and_hostile_texts_print_is_read_line_by_line() {
        let text = r#"# HELP x A "quoted {help}
# TYPE x gauge
x 1
  x{a="1"} 2 1700000000000
x{a="}",b="q\"uote\\",c="line\nend",} 3.5e1
x { a="spaced" } +Inf
x{} NaN
x{a="open 7
x seven
{a="1"} 5
9x 5
x
x{a="1"}6 # {trace="t"} 1 2
ünïcode 5
"#;
        let samples = Samples::parse(text);
        let values: Vec<f64> = samples.values("x").collect();
        assert_eq!(values.len(), 6);
        assert_eq!(&values[..4], &[1.0, 2.0, 35.0, f64::INFINITY]);
        assert!(values[4].is_nan());
        assert_eq!(values[5], 6.0);
        let (labels, _) = samples.series("x").nth(2).expect("third series");
        assert_eq!(
            labels,
            vec![
                ("a", "}".to_owned()),
                ("b", "q\"uote\\".to_owned()),
                ("c", "line\nend".to_owned())
            ]
        );
        assert_eq!(samples.values("y").count(), 0);
    }

    #[test]
    fn a_carriage_return_and_an_empty_text_do_no_harm() {
        assert_eq!(
            Samples::parse("a 1\r\nb 2\r\n")
                .values("b")
                .collect::<Vec<_>>(),
            vec![2.0]
        );
        assert!(Samples::parse("").is_empty());
        assert!(Samples::parse("<html>not metrics</html>").is_empty());
    }
}
