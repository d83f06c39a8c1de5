//! Reads and writes snapshot files; an error names the line, the path and what was probably meant.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read as _;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::{SCHEMA, SNAPSHOT_MAX_BYTES, Snapshot, generate, path};
use crate::config::suggestion;

/// Why a snapshot was not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotError {
    pub file: PathBuf,
    /// Line and column, from 1; absent where the text itself is fine.
    pub position: Option<(usize, usize)>,
    /// `nodes["ml-07"].gpus[0]`, empty for the whole file.
    pub path: String,
    /// What is wrong.
    pub wrong: String,
    /// What would be right, empty where the message says it.
    pub right: String,
}

/// A file that stands for a generated fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reference {
    schema: String,
    generated_by: String,
    generate: Seed,
}

/// What [`generate()`](super::generate()) is called with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Seed {
    seed: u64,
    nodes: usize,
}

/// What has to be known before the rest can be read.
#[derive(Deserialize)]
struct Head {
    schema: Option<String>,
    generate: Option<IgnoredAny>,
}

impl Snapshot {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// It can't be read, is no snapshot, is too large, or contradicts itself.
    pub fn read(file: &Path) -> Result<Snapshot, SnapshotError> {
        let fail = |error: std::io::Error| SnapshotError::whole(file, error.to_string(), "");
        let mut text = String::new();
        std::fs::File::open(file)
            .map_err(fail)?
            .take(SNAPSHOT_MAX_BYTES + 1)
            .read_to_string(&mut text)
            .map_err(fail)?;
        Snapshot::parse(file, &text)
    }

    /// Parses and checks `text` as the contents of `file`, which is not read.
    ///
    /// # Errors
    /// As [`Snapshot::read`].
    pub fn parse(file: &Path, text: &str) -> Result<Snapshot, SnapshotError> {
        if text.len() as u64 > SNAPSHOT_MAX_BYTES {
            let wrong = format!("the file is larger than {} MiB", SNAPSHOT_MAX_BYTES >> 20);
            return Err(SnapshotError::whole(file, wrong, ""));
        }
        let head: Head = json(file, text)?;
        if head.schema.as_deref() != Some(SCHEMA) {
            let wrong = match head.schema {
                None => "the file has no `schema`".to_owned(),
                Some(other) => format!("the file's schema is `{other}`"),
            };
            let right = format!(
                "this llmgw reads `{SCHEMA}`; `llmgw ctl snapshot` of the same version writes it"
            );
            return Err(SnapshotError::whole(file, wrong, &right));
        }
        let snapshot = match head.generate {
            None => json(file, text)?,
            Some(_) => {
                let Reference { generate: seed, .. } = json(file, text)?;
                if seed.nodes > super::NODES_MAX {
                    let wrong = format!("more than {} nodes", super::NODES_MAX);
                    return Err(SnapshotError::at(file, "generate.nodes", wrong, ""));
                }
                generate(seed.seed, seed.nodes)
            }
        };
        match snapshot.problem() {
            None => Ok(snapshot),
            Some((path, wrong)) => Err(SnapshotError::at(file, &path, wrong, "")),
        }
    }

    /// The file's text.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a snapshot has string keys only");
        text.push('\n');
        text
    }
}

impl SnapshotError {
    fn whole(file: &Path, wrong: String, right: &str) -> Self {
        SnapshotError::at(file, "", wrong, right)
    }

    fn at(file: &Path, path: &str, wrong: String, right: &str) -> Self {
        SnapshotError {
            file: file.to_owned(),
            position: None,
            path: path.to_owned(),
            wrong,
            right: right.to_owned(),
        }
    }
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if let Some((line, column)) = self.position {
            write!(f, "{line}:{column}:")?;
        }
        if !self.path.is_empty() {
            write!(f, " {}:", self.path)?;
        }
        write!(f, " {}", self.wrong)?;
        if !self.right.is_empty() {
            write!(f, "\n  help: {}", self.right)?;
        }
        Ok(())
    }
}

impl std::error::Error for SnapshotError {}

fn json<'t, T: Deserialize<'t>>(file: &Path, text: &'t str) -> Result<T, SnapshotError> {
    serde_json::from_str(text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let mut message = error.to_string();
        if let Some(end) = message.rfind(" at line ") {
            message.truncate(end);
        }
        let before: usize = text
            .split_inclusive('\n')
            .take(line.saturating_sub(1))
            .map(str::len)
            .sum();
        let place = path::at_offset(text, before + column);
        let (wrong, right) = explained(message);
        SnapshotError {
            position: Some((line, column)),
            ..SnapshotError::at(file, &path::show(&place), wrong, &right)
        }
    })
}

/// Serde's message, and the known word that was probably meant.
pub(super) fn explained(message: String) -> (String, String) {
    let mut words = message.split('`').skip(1).step_by(2);
    let unknown = message.starts_with("unknown field") || message.starts_with("unknown variant");
    let Some(word) = words.next().filter(|_| unknown) else {
        return (message, String::new());
    };
    let known: Vec<&str> = words.collect();
    let kind = if message.starts_with("unknown field") {
        "key"
    } else {
        "value"
    };
    (format!("unknown {kind} `{word}`"), suggestion(word, &known))
}

/// A map in which no key is written twice: of two nodes of one name, one would be lost unseen.
pub(super) fn unique<'de, D, V>(deserializer: D) -> Result<BTreeMap<String, V>, D::Error>
where
    D: Deserializer<'de>,
    V: Deserialize<'de>,
{
    struct Unique<V>(PhantomData<V>);
    impl<'de, V: Deserialize<'de>> Visitor<'de> for Unique<V> {
        type Value = BTreeMap<String, V>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map by name")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
            let mut entries = BTreeMap::new();
            while let Some(key) = access.next_key::<String>()? {
                if entries.contains_key(&key) {
                    return Err(A::Error::custom(format!("`{key}` is there twice")));
                }
                let value = access.next_value()?;
                entries.insert(key, value);
            }
            Ok(entries)
        }
    }
    deserializer.deserialize_map(Unique(PhantomData))
}
