//! Keeps credentials out of the source lines that messages show.

/// A key whose last word is one of these has a credential as its value.
const CREDENTIAL_WORDS: [&str; 7] = [
    // Of a key: what stands there may be the key itself, by mistake.
    "hash",
    "token",
    "secret",
    "password",
    "keys",
    "authorization",
    "credential",
];

/// The line with each character of a credential's value replaced, so that columns stay what they were.
/// It works on the text alone, because the line may be one that did not parse.
pub fn mask(line: &str) -> String {
    let mut shown = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(colon) = rest.find(": ") {
        let (before, after) = rest.split_at(colon + 2);
        shown.push_str(before);
        rest = after;
        if names_credential(&before[..colon]) {
            let end = value_end(rest);
            let (value, tail) = rest.split_at(end);
            // A reference to the environment is no secret, and is what the reader looks for.
            match value.trim_matches([' ', '"', '\'']).starts_with("${") {
                true => shown.push_str(value),
                false => shown.extend(value.chars().map(|c| if c == ' ' { ' ' } else { '*' })),
            }
            rest = tail;
        }
    }
    shown.push_str(rest);
    mask_user(shown)
}

/// The same for what stands between `://` and `@` of a URL.
fn mask_user(line: String) -> String {
    let Some(start) = line.find("://").map(|at| at + 3) else {
        return line;
    };
    let end = line[start..]
        .find(['/', '"', '\'', ' ', ','])
        .map_or(line.len(), |at| start + at);
    let Some(at) = line[start..end].rfind('@') else {
        return line;
    };
    let stars = "*".repeat(line[start..start + at].chars().count());
    format!("{}{stars}{}", &line[..start], &line[start + at..])
}

fn names_credential(before_colon: &str) -> bool {
    let start = before_colon.rfind(|c: char| !(c.is_ascii_alphanumeric() || "_-\"'".contains(c)));
    let key = before_colon[start.map_or(0, |at| at + 1)..]
        .trim_matches(['"', '\''])
        .to_ascii_lowercase();
    let last = key.rsplit(['_', '-']).next().unwrap_or("");
    // A lone `key` is a file of `tls`; `api_key` is a credential.
    CREDENTIAL_WORDS.contains(&last) || (last == "key" && key != "key")
}

/// Where the value at the start of `rest` ends: its quote, its bracket, or the next separator.
fn value_end(rest: &str) -> usize {
    let close = match rest.chars().next() {
        Some('"') => '"',
        Some('\'') => '\'',
        Some('[') => ']',
        _ => {
            return rest
                .find([',', '}', ']'])
                .or_else(|| rest.find(" #"))
                .unwrap_or(rest.len());
        }
    };
    rest[1..].find(close).map_or(rest.len(), |at| at + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_masked_wherever_they_stand_in_a_line() {
        let cases = [
            ("token: hunter2", "token: *******"),
            (
                "  - {url: x, api_key: \"sk-1\", slots: four}",
                "  - {url: x, api_key: ******, slots: four}",
            ),
            (
                "keys: [sk-1, sk-2], weight: x",
                "keys: ****** *****, weight: x",
            ),
            ("env: {HF_TOKEN: abc}", "env: {HF_TOKEN: ***}"),
            ("- {hash: sk-1, expires: x}", "- {hash: ****, expires: x}"),
            ("api_key: \"${ENGINE_KEY}\"", "api_key: \"${ENGINE_KEY}\""),
            (
                "tls: {cert: a.pem, key: b.pem}",
                "tls: {cert: a.pem, key: b.pem}",
            ),
            ("url: \"http://me:pw@h/a@b\"", "url: \"http://*****@h/a@b\""),
            ("tokens_per_minute: 12", "tokens_per_minute: 12"),
        ];
        for (line, expected) in cases {
            assert_eq!(mask(line), expected);
        }
    }
}
