//! Reading `/sys` and `/proc`: small files that may be missing, refuse to be read, or hold anything.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use llmgw_proto::inventory::Reading;
use llmgw_proto::regular;

/// What sysfs gives for one attribute: a page.
pub const VALUE_MAX_BYTES: u64 = 4 * 1024;

/// The kernel's own names are shorter.
const NAME_MAX_BYTES: usize = 64;
/// Entries of one directory that are looked at.
const ENTRIES_MAX: usize = 1024;

/// The value of `directory/name` without the newline at its end, or why there is none.
pub fn value(directory: &Path, name: &str) -> Result<String, String> {
    read(&directory.join(name), VALUE_MAX_BYTES)
        .map(|text| text.trim_end_matches(['\n', '\0']).to_owned())
        .map_err(|error| format!("`{name}`: {}", cause(&error)))
}

/// [`value`] that `parse` understands.
pub fn parsed<T>(
    directory: &Path,
    name: &str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Reading<T> {
    match value(directory, name) {
        Ok(text) => match parse(&text) {
            Some(value) => Reading::Known(value),
            None => Reading::unknown(format!("`{name}` reads `{}`", shown(&text))),
        },
        Err(why) => Reading::Unknown(why),
    }
}

/// A value that is not empty.
pub fn text(directory: &Path, name: &str) -> Reading<String> {
    match value(directory, name) {
        Ok(text) if text.trim().is_empty() => Reading::unknown(format!("`{name}` is empty")),
        Ok(text) => Reading::Known(text.trim().to_owned()),
        Err(why) => Reading::Unknown(why),
    }
}

/// The names in a directory in the order that people count, `mlx5_2` before `mlx5_10`; the first [`ENTRIES_MAX`] of them. What no kernel
/// calls a device (control characters, 64 bytes and more) is left out: it would only upset the terminal it is shown on.
pub fn names(directory: &Path) -> io::Result<Vec<String>> {
    let is_name = |name: &String| name.len() < NAME_MAX_BYTES && !name.contains(char::is_control);
    let mut names: Vec<String> = fs::read_dir(directory)?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(is_name)
        .collect();
    names.sort_by_key(|name| natural(name));
    names.truncate(ENTRIES_MAX);
    Ok(names)
}

/// At most `max_bytes` of a file as text; what is no UTF-8 is replaced.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<String> {
    let bytes = regular::read(path, max_bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The last part of where a symbolic link leads.
pub fn link_name(directory: &Path, name: &str) -> Reading<String> {
    let last = |target: std::path::PathBuf| Some(target.file_name()?.to_str()?.to_owned());
    match fs::read_link(directory.join(name)) {
        Ok(target) => match last(target) {
            Some(last) => Reading::Known(last),
            None => Reading::unknown(format!("`{name}` leads to no name")),
        },
        Err(error) => Reading::unknown(format!("`{name}`: {}", cause(&error))),
    }
}

/// An error as a message says it: without the number that it ends with.
pub fn cause(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => "no such file".to_owned(),
        ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => {
            let text = error.to_string();
            let text = text.split(" (os error").next().unwrap_or("");
            text.to_lowercase()
        }
    }
}

/// A value as a message repeats it.
pub fn shown(text: &str) -> String {
    const SHOWN_MAX_CHARS: usize = 40;
    text.chars()
        .take(SHOWN_MAX_CHARS)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Digits compare as numbers. Of two parts one is empty, so that text sorts against text.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        let (number, after) = rest.split_at(digits);
        let text = after
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(after.len());
        let (text, after) = after.split_at(text);
        if !number.is_empty() {
            parts.push((String::new(), number.parse().unwrap_or(u64::MAX)));
        }
        if !text.is_empty() {
            parts.push((text.to_owned(), 0));
        }
        rest = after;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_as_people_count() {
        let mut names = ["mlx5_10", "mlx5_2", "mlx5_bond_0", "efa", "mlx5_1", ""];
        names.sort_by_key(|name| natural(name));
        assert_eq!(
            names,
            ["", "efa", "mlx5_1", "mlx5_2", "mlx5_10", "mlx5_bond_0"]
        );
    }

    #[test]
    fn names_that_no_kernel_gives_are_left_out() {
        let tree = crate::recorded::TempTree::empty();
        for name in ["mlx5_0", "a\x1b[2J", "b\nc", &"long".repeat(20)] {
            std::fs::write(tree.path().join(name), "").unwrap();
        }
        assert_eq!(names(tree.path()).unwrap(), ["mlx5_0"]);
    }

    #[test]
    fn what_cannot_be_read_says_which_file_and_why() {
        let tree = crate::recorded::TempTree::empty();
        tree.add("state !\nrate = fast\nempty =\n");
        assert_eq!(
            value(tree.path(), "state").unwrap_err(),
            "`state`: is a directory"
        );
        assert_eq!(
            value(tree.path(), "lid").unwrap_err(),
            "`lid`: no such file"
        );
        assert_eq!(
            parsed(tree.path(), "rate", |_| None::<u32>),
            Reading::unknown("`rate` reads `fast`")
        );
        assert_eq!(
            text(tree.path(), "empty"),
            Reading::unknown("`empty` is empty")
        );
    }
}
