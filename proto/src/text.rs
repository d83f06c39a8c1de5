//! Text from elsewhere, made safe for one line of a terminal or a log.

/// Whether `c` can break a line, or make a terminal show something other than what is there.
pub fn hides(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The text on one line: what could break or fake it becomes `?`.
pub fn plain(text: &str) -> String {
    text.chars()
        .map(|c| if hides(c) { '?' } else { c })
        .collect()
}
