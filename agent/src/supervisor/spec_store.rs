//! What the agent keeps on disk of each shard: its spec, what was asked of it and which processes it has. Written whole,
//! atomically and synced, readable by the agent's user only, since it holds the engine's key.
//!
//! `STATE/shards/NAME/shard.json`, with the engine's output beside it. What was read and is no record is set aside;
//! a record that can't be read now is not, since its engine would be killed as a stray: the agent does not start.

use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use llmgw_proto::regular;
use llmgw_proto::shard::{ApiKey, ShardSpec};
use serde::{Deserialize, Serialize};

use crate::durable::{self, write_whole};
use crate::process_id::ProcessId;

/// The form of the file. Another one is set aside.
const VERSION: u32 = 1;
/// A spec is some kilobytes.
const RECORD_MAX_BYTES: u64 = 4 * 1024 * 1024;
/// The name of a shard's directory; file systems allow 255 bytes.
const NAME_MAX_BYTES: usize = 200;
/// Files set aside that are kept; older ones are deleted.
const SET_ASIDE_MAX: usize = 16;

/// What is on record of one shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    version: u32,
    pub spec: ShardSpec,
    pub asked: Asked,
    /// It was ready; still so for an agent that finds its processes alive.
    pub ready: bool,
    /// In the order of their start.
    pub processes: Vec<RecordedProcess>,
    /// Its control group, where it has one.
    pub cgroup: Option<PathBuf>,
}

/// What the server wants of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Asked {
    Run,
    Drain,
    Stop,
    /// Without a grace period.
    Kill,
}

/// A process of a shard, on record before it executes anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedProcess {
    /// The number of its command.
    pub command: usize,
    pub pid: u32,
    pub start_ticks: u64,
    pub boot_id: String,
    /// It was seen executing. One that was not, and is gone, may never have run.
    pub confirmed: bool,
    /// It was to end before the next one started, and did.
    pub done: bool,
}

/// The shards of one state directory.
#[derive(Clone, Debug)]
pub struct SpecStore {
    root: PathBuf,
}

/// A file that could not be read, and where it lies now.
#[derive(Debug)]
pub struct SetAside {
    pub file: PathBuf,
    pub cause: String,
    pub kept_as: Option<PathBuf>,
}

/// What was found on disk.
#[derive(Debug, Default)]
pub struct Found {
    pub records: Vec<Record>,
    pub set_aside: Vec<SetAside>,
}

/// The record of a shard could not be kept.
#[derive(Debug)]
pub struct StoreError {
    pub path: PathBuf,
    pub source: io::Error,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` can't be written: {}",
            self.path.display(),
            self.source
        )
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

impl Record {
    pub fn new(spec: ShardSpec) -> Record {
        Record {
            version: VERSION,
            spec,
            asked: Asked::Run,
            ready: false,
            processes: Vec::new(),
            cgroup: None,
        }
    }
}

impl RecordedProcess {
    pub fn new(command: usize, id: &ProcessId) -> RecordedProcess {
        RecordedProcess {
            command,
            pid: id.pid,
            start_ticks: id.start_ticks,
            boot_id: id.boot_id.clone(),
            confirmed: false,
            done: false,
        }
    }

    pub fn id(&self) -> ProcessId {
        ProcessId {
            pid: self.pid,
            start_ticks: self.start_ticks,
            boot_id: self.boot_id.clone(),
        }
    }
}

impl SpecStore {
    /// Makes the directories that are missing, for this user only.
    pub fn open(state_dir: &Path) -> Result<SpecStore, StoreError> {
        let store = SpecStore {
            root: state_dir.join("shards"),
        };
        for directory in [state_dir.to_owned(), store.root.clone()] {
            make_directory(&directory).map_err(|source| StoreError {
                path: directory,
                source,
            })?;
        }
        Ok(store)
    }

    /// Reads all records. What is no record is moved to `STATE/set-aside` and told.
    ///
    /// # Errors
    /// One can't be read now, which says nothing about what it holds.
    pub fn load(&self) -> io::Result<Found> {
        let mut found = Found::default();
        for entry in fs::read_dir(&self.root)? {
            let directory = entry?.path();
            let file = directory.join("shard.json");
            // Left by an agent that died while it wrote.
            let _ = fs::remove_file(durable::temporary(&file));
            // A link that leads nowhere, or a disk that does not answer, is no record that was never written.
            let looked = fs::symlink_metadata(&file);
            if looked.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
                // It died before the first record of a shard was whole, or while it deleted one: nothing ran.
                remove_directory(&directory);
                continue;
            }
            match read(&file) {
                Ok(record) if self.directory(&record.spec.shard) == Some(directory.clone()) => {
                    found.records.push(record);
                }
                Ok(record) => {
                    let cause = format!("it is of shard `{}`", record.spec.shard);
                    found
                        .set_aside
                        .push(self.set_aside(&directory, file, cause));
                }
                Err(Unread::NoRecord(cause)) => found
                    .set_aside
                    .push(self.set_aside(&directory, file, cause)),
                Err(Unread::NotNow(error)) => return Err(not_now(&file, &error)),
            }
        }
        found
            .records
            .sort_by(|a, b| a.spec.shard.cmp(&b.spec.shard));
        Ok(found)
    }

    /// Writes a record: when this returns it survives a power cut, and until then the one before it does.
    pub fn save(&self, record: &Record) -> Result<(), StoreError> {
        let directory = self.directory(&record.spec.shard).unwrap_or_default();
        let file = directory.join("shard.json");
        let write = || -> io::Result<()> {
            let bytes = serde_json::to_vec_pretty(record).map_err(io::Error::other)?;
            if !directory.exists() {
                make_directory(&directory)?;
                File::open(&self.root)?.sync_all()?;
            }
            write_whole(&file, &bytes)
        };
        write().map_err(|source| StoreError {
            path: file.clone(),
            source,
        })
    }

    /// Writes the engine's key to a file of its own, for engines that take one.
    pub fn save_key(&self, shard: &str, key: &ApiKey) -> Result<PathBuf, StoreError> {
        let path = self.directory(shard).unwrap_or_default().join("key");
        write_whole(&path, key.expose().as_bytes()).map_err(|source| StoreError {
            path: path.clone(),
            source,
        })?;
        Ok(path)
    }

    /// Where the engine's output goes.
    pub fn output_path(&self, shard: &str) -> PathBuf {
        self.directory(shard).unwrap_or_default().join("output.log")
    }

    /// Forgets a shard: first its record, so that what is left is nothing.
    pub fn remove(&self, shard: &str) -> io::Result<()> {
        let Some(directory) = self.directory(shard) else {
            return Ok(());
        };
        match fs::remove_file(directory.join("shard.json")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        match fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => File::open(&self.root)?.sync_all(),
        }
    }

    /// The directory of a shard; `None` where its name cannot be one.
    fn directory(&self, shard: &str) -> Option<PathBuf> {
        Some(self.root.join(directory_name(shard)?))
    }

    fn set_aside(&self, directory: &Path, file: PathBuf, cause: String) -> SetAside {
        let aside = self.root.with_file_name("set-aside");
        let moved = || -> io::Result<PathBuf> {
            make_directory(&aside)?;
            let name = directory
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let target = (0..)
                .map(|number| aside.join(format!("{name}.{number}")))
                .find(|target| !target.exists())
                .ok_or(io::ErrorKind::AlreadyExists)?;
            fs::rename(directory, &target)?;
            if let Err(error) = keep_newest(&aside) {
                let aside = aside.display();
                tracing::warn!(%error, "older files in `{aside}` can't be removed");
            }
            Ok(target)
        };
        let kept_as = moved().ok();
        SetAside {
            file,
            cause,
            kept_as,
        }
    }
}

/// A shard's id as the name of a directory and of a control group: what is no letter, digit, `-`, `_` or `.` becomes
/// `%XX`, so that no two ids meet and none leads elsewhere. `None`: empty, or too long.
pub fn directory_name(shard: &str) -> Option<String> {
    let mut name = String::with_capacity(shard.len());
    for (at, byte) in shard.bytes().enumerate() {
        let plain =
            byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') || byte == b'.' && at > 0;
        match plain {
            true => name.push(char::from(byte)),
            false => name.push_str(&format!("%{byte:02x}")),
        }
    }
    (!name.is_empty() && name.len() <= NAME_MAX_BYTES).then_some(name)
}

/// The shard whose directory or control group has this name, as far as it is one that [`directory_name`] gives.
pub fn shard_of(name: &str) -> String {
    let mut shard = Vec::with_capacity(name.len());
    let mut bytes = name.as_bytes();
    while let Some((&first, rest)) = bytes.split_first() {
        let hex = rest.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        let coded = hex.filter(|_| first == b'%');
        let byte = coded.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        shard.push(byte.unwrap_or(first));
        bytes = byte.map_or(rest, |_| &rest[2..]);
    }
    String::from_utf8_lossy(&shard).into_owned()
}

/// Why there is no record.
enum Unread {
    /// What is there makes no sense.
    NoRecord(String),
    /// The disk or its permissions do not let it be seen.
    NotNow(io::Error),
}

fn read(file: &Path) -> Result<Record, Unread> {
    let bytes =
        regular::read(file, RECORD_MAX_BYTES + 1).map_err(|error| {
            match is_about_what_it_is(&error) {
                true => Unread::NoRecord(error.to_string()),
                false => Unread::NotNow(error),
            }
        })?;
    if bytes.len() as u64 > RECORD_MAX_BYTES {
        let text = format!("it is larger than {RECORD_MAX_BYTES} bytes");
        return Err(Unread::NoRecord(text));
    }
    parse(&bytes).map_err(Unread::NoRecord)
}

/// No file, another kind of one, or a link that leads to none.
fn is_about_what_it_is(error: &io::Error) -> bool {
    const CODES: [i32; 5] = [
        libc::ENOENT,
        libc::ENOTDIR,
        libc::EISDIR,
        libc::ELOOP,
        libc::ENXIO,
    ];
    let code = error.raw_os_error();
    code.is_none_or(|code| CODES.contains(&code))
}

fn not_now(file: &Path, error: &io::Error) -> io::Error {
    let file = file.display();
    let text = format!(
        "`{file}`: {error}; its engine runs on: see to it that this user can read the file, or stop the engine and move the directory away"
    );
    io::Error::new(error.kind(), text)
}

fn parse(bytes: &[u8]) -> Result<Record, String> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    // The version first: a newer file may well have fields that this agent does not know.
    let version: Version = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if version.version != VERSION {
        return Err(format!(
            "it has version {}, this agent reads {VERSION}",
            version.version
        ));
    }
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

fn make_directory(directory: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
}

/// A shard's directory without a record.
fn remove_directory(directory: &Path) {
    if let Err(error) = fs::remove_dir_all(directory) {
        tracing::warn!(directory = %directory.display(), %error, "a left-over directory can't be removed");
    }
}

fn keep_newest(aside: &Path) -> io::Result<()> {
    let mut kept: Vec<(std::time::SystemTime, PathBuf)> = Vec::new();
    for entry in fs::read_dir(aside)? {
        let entry = entry?;
        kept.push((entry.metadata()?.modified()?, entry.path()));
    }
    kept.sort();
    let surplus = kept.len().saturating_sub(SET_ASIDE_MAX);
    for (_, path) in kept.drain(..surplus) {
        // What lay among the shards' directories need not have been one.
        match fs::symlink_metadata(&path)?.is_dir() {
            true => fs::remove_dir_all(path)?,
            false => fs::remove_file(path)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
