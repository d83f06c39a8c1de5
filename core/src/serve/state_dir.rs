//! Whether the server can write its `state`, tried before anything depends on it.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// What is lost where the directory can't be written; `None`: it can. Leaves nothing behind, so that a check may ask.
pub fn remark(state: &Path) -> Option<String> {
    let error = tried(state).err()?;
    Some(format!(
        "`state` {} can't be written by this user: {error}; the last good policies and the enrolment tokens are forgotten when the server ends",
        state.display()
    ))
}

fn tried(state: &Path) -> io::Result<()> {
    let missing: Vec<PathBuf> = state
        .ancestors()
        .take_while(|directory| !directory.as_os_str().is_empty() && !directory.exists())
        .map(Path::to_owned)
        .collect();
    let written = fs::create_dir_all(state).and_then(|()| write_one(state));
    for directory in missing {
        // Only one that is empty goes: another process may have put something there.
        let _ = fs::remove_dir(directory);
    }
    written
}

fn write_one(state: &Path) -> io::Result<()> {
    let file = state.join(format!(".written-by-{}", std::process::id()));
    let written = fs::File::create(&file).and_then(|mut file| file.write_all(b"."));
    let _ = fs::remove_file(&file);
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_cant_be_written_is_told_and_one_that_can_is_left_as_it_was() {
        let directory = std::env::temp_dir().join(format!("llmgw-state-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let file = directory.join("file");
        fs::write(&file, "").unwrap();
        // Not even root makes a directory in the first one.
        for state in [Path::new("/proc/llmgw"), &file, &file.join("below")] {
            let said = remark(state).unwrap_or_default();
            let begin = format!(
                "`state` {} can't be written by this user: ",
                state.display()
            );
            assert!(said.starts_with(&begin), "{said}");
        }
        assert_eq!(remark(&directory.join("a/b")), None);
        assert_eq!(remark(&directory), None);
        let left: Vec<_> = fs::read_dir(&directory).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        fs::remove_dir_all(&directory).unwrap();
    }
}
