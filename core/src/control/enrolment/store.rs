//! The book of tokens on disk, `STATE/enrolment.json`: written whole, synced before anybody acts on it, and readable by the server's user only.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use llmgw_proto::hex::{hex, unhex};
use llmgw_proto::identity::FileProblem;
use llmgw_proto::identity::files::FileFault;
use llmgw_proto::identity::placing::{KEY_MODE, NewFile, replace};
use llmgw_proto::identity::token::SecretHash;
use llmgw_proto::regular;
use llmgw_proto::session::is_node_id;
use serde::{Deserialize, Serialize};

use super::Certified;
use super::book::{Book, Certificated, KEYS_MAX, KeyDigest, TOKENS_MAX, Token, Used};
use crate::config::UtcTime;

const FILE: &str = "enrolment.json";
/// Held by the one server that may write the book.
const LOCK_FILE: &str = "enrolment.lock";
/// Where a file lies that could not be read.
const SET_ASIDE: &str = "enrolment.json.unreadable";
const VERSION: u32 = 1;
/// Of [`TOKENS_MAX`] tokens each takes less than this, its certificate and two keys included.
const FILE_MAX_BYTES: u64 = (TOKENS_MAX as u64) << 13;
const HASH: &str = "sha256:";

/// The file of one state directory.
#[derive(Clone, Debug)]
pub struct Store {
    file: PathBuf,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    tokens: Vec<Row>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    keys: Vec<KeyRow>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    node: String,
    /// Of the secret, not the secret.
    secret: String,
    expires: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    used: Option<UsedRow>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UsedRow {
    /// Of the public key.
    by: String,
    serial: String,
    not_after: String,
    /// PEM. It is no secret.
    certificate: String,
}

/// Of a key that got a certificate: what it takes to know it again when that is revoked.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyRow {
    node: String,
    by: String,
    serial: String,
    not_after: String,
}

impl Store {
    pub fn of(state: &Path) -> Store {
        Store {
            file: state.join(FILE),
        }
    }

    /// Reads the book. A file that makes no sense is set aside, and its tokens work no more: better than to take one that was used.
    ///
    /// # Errors
    /// There is a file, and the system does not let it be read or moved.
    pub fn load(&self) -> Result<Book, FileProblem> {
        let problem = |error| FileProblem::new(&self.file, FileFault::Io(error));
        let text = match regular::read(&self.file, FILE_MAX_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Book::default()),
            Err(error) => return Err(problem(error)),
        };
        match parse(&text) {
            Ok(book) => Ok(book),
            Err(why) => {
                let aside = self.file.with_file_name(SET_ASIDE);
                fs::rename(&self.file, &aside).map_err(problem)?;
                tracing::error!(
                    "{}: {why}; it is kept as {}, and the enrolment tokens in it work no more: make new ones",
                    self.file.display(),
                    aside.display()
                );
                Ok(Book::default())
            }
        }
    }

    /// Takes the state directory for this server, until what is returned is dropped or the process ends: of two that wrote the book each would
    /// forget which tokens the other one took.
    ///
    /// # Errors
    /// Another server has it, or the file can't be made.
    pub fn lock(&self) -> Result<File, FileProblem> {
        let path = self.file.with_file_name(LOCK_FILE);
        let problem = |error| FileProblem::new(&path, FileFault::NotWritten(error));
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(problem)?;
        }
        let mut options = File::options();
        let options = options.create(true).truncate(false).write(true);
        let file = options.mode(KEY_MODE).open(&path).map_err(problem)?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(TryLockError::WouldBlock) => Err(problem(std::io::Error::other(
                "another server that enrols nodes has the same `state`: give each its own",
            ))),
            Err(TryLockError::Error(error)) => Err(problem(error)),
        }
    }

    /// When this returns, the book survives a power cut; until then the one before it does.
    ///
    /// # Errors
    /// It could not be written.
    pub fn save(&self, book: &Book) -> Result<(), FileProblem> {
        let problem = |error| FileProblem::new(&self.file, FileFault::NotWritten(error));
        if let Some(directory) = self.file.parent() {
            fs::create_dir_all(directory).map_err(problem)?;
        }
        let text = serde_json::to_vec_pretty(&Stored::of(book));
        replace(&NewFile {
            path: self.file.clone(),
            text: text.map_err(|error| problem(error.into()))?,
            mode: KEY_MODE,
        })
    }
}

impl Stored {
    fn of(book: &Book) -> Stored {
        let row = |(node, token): (&str, &Token)| Row {
            node: node.to_owned(),
            secret: format!("{HASH}{}", hex(&token.secret.0)),
            expires: token.expires.to_string(),
            used: token.used.as_ref().map(UsedRow::of),
        };
        Stored {
            version: VERSION,
            tokens: book.tokens().map(row).collect(),
            keys: book.keys().iter().map(KeyRow::of).collect(),
        }
    }
}

/// The error says what is wrong with the text.
fn parse(text: &[u8]) -> Result<Book, String> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    // The version first: a newer file may well have fields that this server does not know.
    let found: Version = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if found.version != VERSION {
        return Err(format!(
            "it has version {}, this server reads {VERSION}",
            found.version
        ));
    }
    let stored: Stored = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if stored.tokens.len() > TOKENS_MAX {
        return Err(format!("it holds more than {TOKENS_MAX} tokens"));
    }
    let mut book = Book::default();
    for (at, row) in stored.tokens.into_iter().enumerate() {
        let token = row.token().filter(|_| is_node_id(&row.node));
        let token = token.ok_or_else(|| format!("`tokens[{at}]` makes no sense"))?;
        if !book.restore(row.node, token) {
            return Err(format!("`tokens[{at}]` is of a node that has one already"));
        }
    }
    if stored.keys.len() > KEYS_MAX {
        return Err(format!("it holds more than {KEYS_MAX} keys"));
    }
    for (at, row) in stored.keys.into_iter().enumerate() {
        let key = row.key().filter(|key| is_node_id(&key.node));
        book.remember(key.ok_or_else(|| format!("`keys[{at}]` makes no sense"))?);
    }
    Ok(book)
}

impl Row {
    fn token(&self) -> Option<Token> {
        let used = match &self.used {
            Some(row) => Some(row.used()?),
            None => None,
        };
        Some(Token {
            secret: SecretHash(digest(&self.secret)?),
            expires: self.expires.parse::<UtcTime>().ok()?,
            used,
        })
    }
}

impl KeyRow {
    fn of(known: &Certificated) -> KeyRow {
        KeyRow {
            node: known.node.clone(),
            by: format!("{HASH}{}", hex(&known.by.0)),
            serial: known.serial.clone(),
            not_after: known.not_after.to_string(),
        }
    }

    fn key(self) -> Option<Certificated> {
        Some(Certificated {
            by: KeyDigest(digest(&self.by)?),
            not_after: self.not_after.parse().ok()?,
            node: self.node,
            serial: self.serial,
        })
    }
}

impl UsedRow {
    fn of(used: &Used) -> UsedRow {
        let Certified {
            certificate,
            serial,
            not_after,
        } = used.certified.clone();
        UsedRow {
            by: format!("{HASH}{}", hex(&used.by.0)),
            serial,
            not_after,
            certificate,
        }
    }

    fn used(&self) -> Option<Used> {
        Some(Used {
            by: KeyDigest(digest(&self.by)?),
            certified: Certified {
                certificate: self.certificate.clone(),
                serial: self.serial.clone(),
                not_after: self.not_after.clone(),
            },
        })
    }
}

fn digest(text: &str) -> Option<[u8; 32]> {
    unhex(text.strip_prefix(HASH)?)
}

#[cfg(test)]
mod tests;
