//! Text from elsewhere, made safe for one line of a terminal or a log.

/// Whether `c` can break a line, or make a terminal show something other than what is there.
pub fn hides(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The text as one word of a shell's command: what the shell would read otherwise is quoted. Also the word is on one line.
pub fn word(text: &str) -> String {
    let text = plain(text);
    let good = |c: char| c.is_alphanumeric() || "/._-+:@%=,".contains(c);
    match !text.is_empty() && text.chars().all(good) {
        true => text,
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

/// The text on one line: what could break or fake it becomes `?`.
pub fn plain(text: &str) -> String {
    text.chars()
        .map(|c| if hides(c) { '?' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_means_to_a_shell_what_it_says() {
        for text in [
            "/etc/llmgw/agent.pem",
            "*.ctl.example",
            "~/agent.pem",
            "$(touch x)",
            "`touch x`",
            "a;touch x",
            "a b",
            "it's",
            "a|b&c>d<e",
            "!!",
            "\\",
            "",
        ] {
            let script = format!("printf %s {}", word(text));
            let shell = std::process::Command::new("sh")
                .args(["-c", &script])
                .output();
            let shell = shell.unwrap();
            assert_eq!(String::from_utf8(shell.stdout).unwrap(), text, "{script}");
        }
        assert_eq!(word("/etc/agent.pem"), "/etc/agent.pem");
        assert_eq!(word("a\nb"), "'a?b'");
    }
}
