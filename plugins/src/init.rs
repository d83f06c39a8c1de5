//! `llmgw policy init`: writes the embedded policies out, to be edited, and what editors need to help with that.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind as IoKind, Write};
use std::path::{Path, PathBuf};

use crate::error::PolicyError;
use crate::set::bundle::BUILT_IN;
use crate::test::BUILT_IN_TESTS;

/// Writes every embedded policy, its test, and every stub that `dir` doesn't have yet and returns the paths written. Never overwrites one.
pub fn init_dir(dir: &Path) -> Result<Vec<PathBuf>, PolicyError> {
    let mut written = Vec::new();
    let embedded = BUILT_IN.into_iter().chain(BUILT_IN_TESTS);
    let embedded = embedded.map(|(key, text)| (key, text.to_owned()));
    for (key, text) in embedded.chain(crate::stubs::files()) {
        let path = dir.join(key);
        let failed = |e: std::io::Error| {
            PolicyError::in_file(path.display().to_string(), format!("can't be written: {e}"))
        };
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        // `create_new`, so that not even a file that appears this moment is overwritten.
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(mut file) => {
                file.write_all(text.as_bytes()).map_err(failed)?;
                written.push(path);
            }
            Err(e) if e.kind() == IoKind::AlreadyExists => {}
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(written)
}
