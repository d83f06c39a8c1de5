//! The last good policies, kept in the state directory for the next start.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::set::bundle::{BUNDLE_MAX_BYTES, Bundle, SourceFile};

/// Name of the file. It never holds anything but policies.
const FILE: &str = "policies.last-good.json";
const SCHEMA: &str = "llmgw.policies/1";
/// JSON escapes may double a text.
const STORE_MAX_BYTES: u64 = 2 * BUNDLE_MAX_BYTES + 1024 * 1024;

#[derive(Serialize, Deserialize)]
struct Stored {
    schema: String,
    /// The directory's own files by key; embedded ones are left out, so that they follow the binary.
    files: BTreeMap<String, String>,
}

/// Where it is.
pub(crate) fn path(state: &Path) -> PathBuf {
    state.join(FILE)
}

/// Writes a bundle, whole or not at all.
pub(crate) fn save(state: &Path, bundle: &Bundle) -> std::io::Result<()> {
    let files = bundle.files.iter().filter(|(_, file)| !file.built_in);
    let stored = Stored {
        schema: SCHEMA.to_owned(),
        files: files
            .map(|(key, file)| (key.clone(), file.text.clone()))
            .collect(),
    };
    fs::create_dir_all(state)?;
    let unfinished = state.join(format!("{FILE}.new"));
    let mut file = File::create(&unfinished)?;
    file.write_all(&serde_json::to_vec_pretty(&stored)?)?;
    file.sync_all()?;
    fs::rename(&unfinished, path(state))
}

/// Reads it back; labels name the directory that the files came from, since that is where a person looks.
pub(crate) fn load(state: &Path, dir: &Path) -> Option<Bundle> {
    let mut text = String::new();
    File::open(path(state))
        .ok()?
        .take(STORE_MAX_BYTES)
        .read_to_string(&mut text)
        .ok()?;
    let stored: Stored = serde_json::from_str(&text)
        .ok()
        .filter(|stored: &Stored| stored.schema == SCHEMA)?;
    let files = stored.files.into_iter().map(|(key, text)| {
        let label = dir.join(&key).display().to_string();
        (
            key,
            SourceFile {
                text,
                label,
                built_in: false,
            },
        )
    });
    Some(Bundle::over_built_in(files.collect()))
}
