//! `${VAR}` in values, expanded after parsing.

use super::yaml::shown;

/// A text with `${VAR}` expanded, and as the file has it, which is what messages repeat.
pub struct Expanded {
    pub value: String,
    pub written: String,
}

impl Expanded {
    /// Of a text without variables.
    pub fn unchanged(text: String) -> Self {
        Expanded {
            value: text.clone(),
            written: text,
        }
    }

    pub fn is_changed(&self) -> bool {
        self.value != self.written
    }

    /// The text as the file has it, since a variable may hold a credential.
    pub fn is_what(&self, what: &str) -> String {
        match !self.is_changed() {
            true => format!("`{}` {what}", shown(&self.written)),
            false => format!("the value of `{}` {what}", shown(&self.written)),
        }
    }
}

/// Replaces each `${NAME}` by the variable's value, once; `$${` is a literal `${`.
pub fn expand(
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<String, (String, String)> {
    let mut value = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        if rest[..at].ends_with('$') {
            value.push_str(&rest[..at - 1]);
            value.push_str("${");
            rest = &rest[at + 2..];
            continue;
        }
        value.push_str(&rest[..at]);
        let after = &rest[at + 2..];
        let Some(end) = after.find('}') else {
            return Err((
                "`${` is not closed".to_owned(),
                "write `${NAME}`, or `$${` for a literal `${`".to_owned(),
            ));
        };
        let name = &after[..end];
        let valid = name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && name
                .bytes()
                .next()
                .is_some_and(|byte| !byte.is_ascii_digit());
        if !valid {
            let right = "write `${NAME}` with letters, digits and `_`, or `$${` for a literal `${`";
            return Err((
                format!("`${{{}}}` names no variable", shown(name)),
                right.to_owned(),
            ));
        }
        let Some(found) = env(name) else {
            let right =
                format!("set `{name}` where llmgw is started, or write `$${{` for a literal `${{`");
            return Err((
                format!("the environment variable `{name}` is not set"),
                right,
            ));
        };
        value.push_str(&found);
        rest = &after[end + 1..];
    }
    value.push_str(rest);
    Ok(value)
}
