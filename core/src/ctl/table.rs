//! Plain tables: columns as wide as they must be, two spaces between, no rule and no colour.

pub use llmgw_proto::text::plain;

/// Shown for what is not known.
pub const UNKNOWN: &str = "-";

/// Lays out rows under their headings. The last column is not padded, so that it may be long.
pub fn table<const N: usize>(headings: [&str; N], rows: &[[String; N]]) -> String {
    let headings = headings.map(str::to_owned);
    let rows: Vec<[String; N]> = std::iter::once(&headings)
        .chain(rows)
        .map(|row| row.each_ref().map(|cell| plain(cell)))
        .collect();
    let widths: [usize; N] = std::array::from_fn(|column| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    });
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            line.push_str(&format!("{cell:width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Text of several lines, each of them on one.
pub fn plain_lines(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(plain).collect();
    lines.join("\n")
}

/// A duration in its two largest units: `3h12m`, `45s`, `250ms`.
pub fn span(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0 => format!("{ms}ms"),
        1..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_control_characters_do_not_reach_the_terminal() {
        let rows = [
            ["smollm2".to_owned(), "1".to_owned()],
            ["é\u{1b}[2J\n".to_owned(), "22".to_owned()],
        ];
        assert_eq!(
            table(["MODEL", "N"], &rows),
            "MODEL    N\nsmollm2  1\né?[2J?   22\n"
        );
    }

    #[test]
    fn lines_stay_lines_and_nothing_else_moves_the_cursor() {
        let said = "unknown key `replcas`\r\n 10 |  replcas: 3\n\u{1b}[2J^";
        assert_eq!(
            plain_lines(said),
            "unknown key `replcas`\n 10 |  replcas: 3\n?[2J^"
        );
    }

    #[test]
    fn spans_show_two_units() {
        let cases = [
            (0, "0ms"),
            (999, "999ms"),
            (59_999, "59s"),
            (61_000, "1m1s"),
            (11_520_000, "3h12m"),
            (90_000_000, "1d1h"),
        ];
        for (ms, expected) in cases {
            assert_eq!(span(ms), expected);
        }
    }
}
