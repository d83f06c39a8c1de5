//! Tables and paragraphs within the width of a page.

/// What a terminal has, and what fits into a mail.
pub const WIDTH_CHARS: usize = 80;

/// Below this the last column of a table gets a line of its own.
const LAST_COLUMN_MIN_CHARS: usize = 12;

/// A paragraph: the first line begins with `first`, the others below its text. A word that is too long stands alone.
pub fn wrapped(first: &str, text: &str) -> String {
    let indent = " ".repeat(first.chars().count());
    let mut out = String::new();
    for (index, line) in lines(text, WIDTH_CHARS.saturating_sub(indent.len()))
        .iter()
        .enumerate()
    {
        let start = if index == 0 { first } else { &indent };
        let line = format!("{start}{line}");
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Rows of cells, the first row being the heads. The last column is wrapped.
pub fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let before: usize = widths[..N - 1].iter().map(|width| width + 2).sum();
    let mut out = String::new();
    for row in rows {
        let mut first = String::from("  ");
        for (cell, width) in row[..N - 1].iter().zip(widths) {
            first.push_str(cell);
            first.push_str(&" ".repeat(width + 2 - cell.chars().count()));
        }
        let last = &row[N - 1];
        let left = WIDTH_CHARS.saturating_sub(2 + before);
        if left >= LAST_COLUMN_MIN_CHARS || last.chars().count() <= left {
            out.push_str(&wrapped(&first, last));
        } else {
            out.push_str(first.trim_end());
            out.push('\n');
            out.push_str(&wrapped("      ", last));
        }
    }
    out
}

/// The words of a text in lines of at most `width`; a longer word is cut. One empty line for no words.
fn lines(text: &str, width: usize) -> Vec<String> {
    let width = width.max(1);
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        if used > 0 && used + 1 + word.len() > width {
            lines.push(String::new());
            used = 0;
        }
        while used == 0 && word.len() > width {
            let rest = word.split_off(width);
            lines.last_mut().unwrap().extend(word);
            lines.push(String::new());
            word = rest;
        }
        let line = lines.last_mut().unwrap();
        if used > 0 {
            line.push(' ');
            used += 1;
        }
        used += word.len();
        line.extend(word);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paragraph_stays_within_the_page_and_below_its_first_word() {
        let text = "word ".repeat(40);
        let out = wrapped("  - ", &text);
        assert!(out.lines().all(|line| line.chars().count() <= WIDTH_CHARS));
        assert!(out.lines().skip(1).all(|line| line.starts_with("    word")));
        assert_eq!(wrapped("  x ", ""), "  x\n");
        let long = wrapped("", &"a".repeat(200));
        let widths: Vec<usize> = long.lines().map(str::len).collect();
        assert_eq!(widths, [80, 80, 40]);
    }

    #[test]
    fn the_last_column_of_a_table_is_wrapped_or_gets_its_own_line() {
        let rows = |width: usize| {
            [
                ["name", "state"],
                [
                    "x",
                    "down: switched off or no carrier, as it seems to be here",
                ],
            ]
            .map(|[name, state]| [format!("{name:width$}"), state.to_owned()])
        };
        let narrow = table(&rows(30));
        assert!(
            narrow
                .lines()
                .all(|line| line.chars().count() <= WIDTH_CHARS)
        );
        assert_eq!(narrow.lines().count(), 3);
        let wide = table(&rows(70));
        assert!(wide.lines().all(|line| line.chars().count() <= WIDTH_CHARS));
        assert!(wide.contains("\n      down: switched off"), "{wide}");
    }
}
