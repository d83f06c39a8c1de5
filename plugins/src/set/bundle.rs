//! All policy files of one moment: the directory's, and the built-in ones where it has none.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind as IoKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{PolicyError, did_you_mean};
use crate::test::BUILT_IN_TESTS;

/// A policy file may be this long.
pub const FILE_MAX_BYTES: u64 = 256 * 1024;
/// A directory may hold this many policy files.
pub const FILES_MAX: usize = 256;
/// And this much of them together.
pub const BUNDLE_MAX_BYTES: u64 = 4 * 1024 * 1024;
/// Luau cuts longer names in its messages, and then the line couldn't be found again.
const LABEL_MAX_BYTES: usize = 200;
/// How often a directory is listed again because a file went away between listing and reading.
const GATHER_TRIES_MAX: usize = 5;
/// Names of the files directly in the directory.
const TOP_FILES: [&str; 4] = [
    "placement.lua",
    "admission.lua",
    "fairness.lua",
    "routing.lua",
];

/// The files that are embedded at build time: `(key, text)`. `policy init` writes them out.
pub(crate) const BUILT_IN: [(&str, &str); 8] = [
    (
        "placement.lua",
        include_str!("../../../policies/placement.lua"),
    ),
    (
        "admission.lua",
        include_str!("../../../policies/admission.lua"),
    ),
    (
        "fairness.lua",
        include_str!("../../../policies/fairness.lua"),
    ),
    ("routing.lua", include_str!("../../../policies/routing.lua")),
    ("engines/vllm.lua", include_str!("../../engines/vllm.lua")),
    (
        "engines/sglang.lua",
        include_str!("../../engines/sglang.lua"),
    ),
    (
        "engines/llamacpp.lua",
        include_str!("../../engines/llamacpp.lua"),
    ),
    (
        "engines/openai.lua",
        include_str!("../../engines/openai.lua"),
    ),
];

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SourceFile {
    /// The text.
    pub(crate) text: String,
    /// What messages call it: the path that the operator knows, or `(built-in)/routing.lua`.
    pub(crate) label: String,
    /// The text is the embedded one, wherever it was read from: native defaults answer for its hooks.
    pub(crate) built_in: bool,
}

/// Everything that one generation is made of, by key: the path inside of the directory, with `/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bundle {
    pub(crate) files: BTreeMap<String, SourceFile>,
    /// Of keys and texts; equal hashes mean that nothing has to be loaded.
    pub(crate) hash: [u8; 32],
}

impl Bundle {
    /// The embedded files alone.
    pub(crate) fn built_in() -> Bundle {
        Bundle::over_built_in(BTreeMap::new())
    }

    /// Puts files of a directory, or of the last good set, over the embedded ones.
    pub(crate) fn over_built_in(own: BTreeMap<String, SourceFile>) -> Bundle {
        let mut files = own;
        for (key, text) in BUILT_IN {
            match files.get_mut(key) {
                Some(file) => file.built_in = file.text == text,
                None => {
                    let label = format!("(built-in)/{key}");
                    files.insert(
                        key.to_owned(),
                        SourceFile {
                            text: text.to_owned(),
                            label,
                            built_in: true,
                        },
                    );
                }
            }
        }
        // Tests are not put over a directory's: which of them are run depends on what it replaces.
        for (key, text) in BUILT_IN_TESTS {
            if let Some(file) = files.get_mut(key) {
                file.built_in = file.text == text;
            }
        }
        let mut hasher = Sha256::new();
        for (key, file) in &files {
            hasher.update((key.len() as u64).to_le_bytes());
            hasher.update(key.as_bytes());
            hasher.update((file.text.len() as u64).to_le_bytes());
            hasher.update(file.text.as_bytes());
        }
        Bundle {
            files,
            hash: hasher.finalize().into(),
        }
    }

    /// Reads a directory. A file that goes away meanwhile makes it start over, so that a rename by an editor or
    /// a ConfigMap swap is seen before or after, not in the middle.
    pub(crate) fn gather(dir: &Path) -> Result<Bundle, PolicyError> {
        let mut tries = 0;
        loop {
            tries += 1;
            match gather_once(dir) {
                Ok(files) => return Ok(Bundle::over_built_in(files)),
                Err(Gather::Vanished(_)) if tries < GATHER_TRIES_MAX => {}
                Err(Gather::Vanished(error) | Gather::Refused(error)) => return Err(error),
            }
        }
    }
}

/// Why one pass over a directory gave nothing.
enum Gather {
    /// A listed file was gone; listing again may help.
    Vanished(PolicyError),
    Refused(PolicyError),
}

fn gather_once(dir: &Path) -> Result<BTreeMap<String, SourceFile>, Gather> {
    let mut found = Vec::new();
    for (prefix, required) in [("", true), ("engines/", false), ("lib/", false)] {
        list(dir, prefix, required, &mut found)?;
    }
    let mut files = BTreeMap::new();
    let mut total_bytes = 0;
    for (key, path) in found {
        let text = read(&path)?;
        total_bytes += text.len() as u64;
        if total_bytes > BUNDLE_MAX_BYTES {
            let reason =
                format!("the policy files together are larger than {BUNDLE_MAX_BYTES} bytes");
            return Err(Gather::Refused(PolicyError::in_file(
                dir.display().to_string(),
                reason,
            )));
        }
        let path = path.display().to_string();
        let label = if path.len() > LABEL_MAX_BYTES {
            key.clone()
        } else {
            path
        };
        files.insert(
            key,
            SourceFile {
                text,
                label,
                built_in: false,
            },
        );
    }
    Ok(files)
}

/// Adds the policy files of `dir/prefix`: `(key, path)`.
fn list(
    dir: &Path,
    prefix: &str,
    required: bool,
    found: &mut Vec<(String, PathBuf)>,
) -> Result<(), Gather> {
    let path = if prefix.is_empty() {
        dir.to_path_buf()
    } else {
        dir.join(prefix.trim_end_matches('/'))
    };
    let entries = match fs::read_dir(&path) {
        Ok(entries) => entries,
        Err(e)
            if e.kind() == IoKind::NotFound
                && !required
                && fs::symlink_metadata(&path).is_err() =>
        {
            return Ok(());
        }
        Err(e) => {
            let reason = format!("can't read the policy directory: {e}");
            return Err(Gather::Refused(PolicyError::in_file(
                path.display().to_string(),
                reason,
            )));
        }
    };
    for entry in entries {
        let entry = entry.map_err(|e| Gather::Refused(unreadable(&path, &e)))?;
        let Some(name) = policy_name(&entry.path()) else {
            continue;
        };
        if prefix.is_empty() && !TOP_FILES.contains(&name.as_str()) && !name.ends_with("_test.lua")
        {
            let hint = did_you_mean(&name, TOP_FILES);
            let reason = format!(
                "unknown policy file{hint}; shared code belongs into lib/, engines into engines/"
            );
            return Err(Gather::Refused(PolicyError::in_file(
                entry.path().display().to_string(),
                reason,
            )));
        }
        if found.len() == FILES_MAX {
            let reason = format!("more than {FILES_MAX} policy files");
            return Err(Gather::Refused(PolicyError::in_file(
                path.display().to_string(),
                reason,
            )));
        }
        found.push((format!("{prefix}{name}"), entry.path()));
    }
    Ok(())
}

/// The file's name if it is a policy file's: what editors leave behind (`.x.lua.swp`, `x.lua~`) and ConfigMaps'
/// `..data` are not.
fn policy_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    (name.ends_with(".lua") && !name.starts_with('.')).then(|| name.to_owned())
}

/// Reads one file, bounded. Its type is checked before it is opened, since opening a device can do something; and what took
/// its place meanwhile is not waited for.
fn read(path: &Path) -> Result<String, Gather> {
    let metadata = fs::metadata(path).map_err(|e| failed(path, &e))?;
    let refuse =
        |reason: String| Gather::Refused(PolicyError::in_file(path.display().to_string(), reason));
    if metadata.is_dir() {
        return Err(refuse("is a directory, not a file".to_owned()));
    }
    if !metadata.is_file() {
        return Err(refuse("is not a regular file".to_owned()));
    }
    let too_long = || refuse(format!("is longer than {FILE_MAX_BYTES} bytes"));
    if metadata.len() > FILE_MAX_BYTES {
        return Err(too_long());
    }
    let mut bytes = Vec::with_capacity(metadata.len() as usize);
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(|e| failed(path, &e))?;
    file.take(FILE_MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| failed(path, &e))?;
    if bytes.len() as u64 > FILE_MAX_BYTES {
        return Err(too_long());
    }
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(refuse(
            "is not a text file (Lua source in UTF-8 is expected)".to_owned(),
        )),
    }
}

fn failed(path: &Path, e: &std::io::Error) -> Gather {
    if e.kind() == IoKind::NotFound {
        let reason = "went away while it was read, or is a link that leads nowhere";
        return Gather::Vanished(PolicyError::in_file(path.display().to_string(), reason));
    }
    Gather::Refused(unreadable(path, e))
}

fn unreadable(path: &Path, e: &std::io::Error) -> PolicyError {
    PolicyError::in_file(path.display().to_string(), format!("can't be read: {e}"))
}
