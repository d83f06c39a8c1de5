//! Golden values: what a decision was when a person last looked at it, kept in `golden/` beside the policies.

use std::path::PathBuf;

use serde_json::Value as Json;

use crate::test::host::Host;
use crate::test::plain::Plain;
use crate::test::report::TestFailure;

/// Of a case's name in a file's name.
const NAME_MAX_CHARS: usize = 80;
/// A golden file.
const GOLDEN_MAX_BYTES: u64 = 4 << 20;

/// Compares a value with the one on file, or puts it there.
pub(crate) fn compare(host: &Host, value: &Json) -> Result<(), Box<TestFailure>> {
    let number = {
        let mut case = host.case.borrow_mut();
        case.goldens += 1;
        case.goldens
    };
    let failed = |message: String| {
        Box::new(TestFailure {
            message,
            ..TestFailure::default()
        })
    };
    let Some(path) = path(host, number) else {
        return Err(failed(
            "golden values need a directory of policies to keep them in".to_owned(),
        ));
    };
    let shown = path.display();
    if host.update_golden {
        write(&path, value).map_err(|e| failed(format!("{shown} can't be written: {e}")))?;
        host.golden_written.borrow_mut().push(shown.to_string());
        return Ok(());
    }
    let kept = match read(&path) {
        Ok(text) => serde_json::from_str::<Json>(&text)
            .map_err(|e| failed(format!("{shown} is no JSON: {e}")))?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let message =
                format!("there is no {shown} yet: look at the value, then run --update-golden");
            return Err(Box::new(TestFailure {
                message,
                actual: Some(Plain::of_json(value).show()),
                ..TestFailure::default()
            }));
        }
        Err(e) => return Err(failed(format!("{shown} can't be read: {e}"))),
    };
    let (actual, expected) = (Plain::of_json(value), Plain::of_json(&kept));
    let Some(found) = actual.difference(&expected) else {
        return Ok(());
    };
    Err(Box::new(TestFailure {
        message: format!("differs from {shown}; if the new value is right, run --update-golden"),
        expected: Some(expected.show()),
        actual: Some(actual.show()),
        difference: Some(format!(
            "at {}: expected {}, actual {}",
            found.path, found.expected, found.actual
        )),
        ..TestFailure::default()
    }))
}

/// `golden/placement_test/a_70b_replica_goes_where.json`; a case's second value ends in `-2`.
fn path(host: &Host, number: u32) -> Option<PathBuf> {
    let mut path = host.dir.as_ref()?.join("golden");
    path.push(host.file.key.trim_end_matches(".lua"));
    let mut name = String::new();
    for c in host.case.borrow().name.chars().take(NAME_MAX_CHARS) {
        if c.is_alphanumeric() {
            name.extend(c.to_lowercase());
        } else if !name.ends_with('_') && !name.is_empty() {
            name.push('_');
        }
    }
    let name = name.trim_end_matches('_');
    let suffix = if number > 1 {
        format!("-{number}")
    } else {
        String::new()
    };
    path.push(format!("{name}{suffix}.json"));
    Some(path)
}

fn read(path: &std::path::Path) -> std::io::Result<String> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() || metadata.len() > GOLDEN_MAX_BYTES {
        return Err(std::io::Error::other("it is no small file"));
    }
    std::fs::read_to_string(path)
}

fn write(path: &std::path::Path, value: &Json) -> std::io::Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    std::fs::write(path, text)
}
