//! Paths into a snapshot: `nodes["ml-07"].gpus[0].healthy`. Positions count from 0.

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Key(String),
    Index(usize),
}

/// Reads a path; `nodes.ml-07` means `nodes["ml-07"]`. The error says what is wrong with it.
pub(super) fn parse(path: &str) -> Result<Vec<Step>, String> {
    let mut steps = Vec::new();
    let mut rest = path;
    while !rest.is_empty() {
        if let Some(inner) = rest.strip_prefix('[') {
            let (step, after) = bracket(inner)?;
            steps.push(step);
            rest = after;
        } else {
            let word = match rest.strip_prefix('.') {
                Some(word) if !steps.is_empty() => word,
                Some(_) => return Err("it begins with a `.`".to_owned()),
                None if steps.is_empty() => rest,
                None => return Err(format!("a `.` or `[` is missing before `{rest}`")),
            };
            let end = word.find(['.', '[']).unwrap_or(word.len());
            if end == 0 {
                return Err("a name is missing in it".to_owned());
            }
            steps.push(Step::Key(word[..end].to_owned()));
            rest = &word[end..];
        }
    }
    if steps.is_empty() {
        return Err("it is empty".to_owned());
    }
    Ok(steps)
}

fn bracket(inner: &str) -> Result<(Step, &str), String> {
    if inner.starts_with('"') {
        let mut values = serde_json::Deserializer::from_str(inner).into_iter::<String>();
        let Some(Ok(key)) = values.next() else {
            return Err("a `\"` is not closed in it".to_owned());
        };
        let after = inner[values.byte_offset()..]
            .strip_prefix(']')
            .ok_or("a `]` is missing in it")?;
        return Ok((Step::Key(key), after));
    }
    let (number, after) = inner.split_once(']').ok_or("a `]` is missing in it")?;
    let index = number
        .parse()
        .map_err(|_| format!("`{number}` is no position; names go in quotes: `[\"{number}\"]`"))?;
    Ok((Step::Index(index), after))
}

pub(super) fn show(steps: &[Step]) -> String {
    let mut text = String::new();
    for step in steps {
        match step {
            Step::Index(index) => text.push_str(&format!("[{index}]")),
            Step::Key(key) if key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') => {
                if !text.is_empty() {
                    text.push('.');
                }
                text.push_str(key);
            }
            Step::Key(key) => text.push_str(&format!("[{key:?}]")),
        }
    }
    text
}

/// Where in a JSON text the byte at `end` is; the text before it is well-formed.
pub(super) fn at_offset(text: &str, end: usize) -> Vec<Step> {
    let bytes = text.as_bytes();
    let mut open: Vec<Option<Step>> = Vec::new();
    let mut wants_key = false;
    let mut at = 0;
    while at < end.min(bytes.len()) {
        match bytes[at] {
            b'{' => {
                open.push(None);
                wants_key = true;
            }
            b'[' => open.push(Some(Step::Index(0))),
            b'}' | b']' => {
                open.pop();
                wants_key = false;
            }
            b',' => match open.last_mut() {
                Some(Some(Step::Index(index))) => *index += 1,
                _ => wants_key = true,
            },
            b'"' => {
                let start = at;
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                if wants_key && let Some(last) = open.last_mut() {
                    let quoted = text.get(start..=at).unwrap_or("\"\"");
                    *last = Some(Step::Key(serde_json::from_str(quoted).unwrap_or_default()));
                    wants_key = false;
                }
            }
            _ => {}
        }
        at += 1;
    }
    open.into_iter().flatten().collect()
}
