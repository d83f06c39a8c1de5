//! `--enroll`: a token, or `@FILE` that holds one.

use std::fmt;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use llmgw_proto::identity::EnrolmentToken;
use llmgw_proto::identity::token::{NoToken, TOKEN_MAX_BYTES};
use llmgw_proto::regular;
use llmgw_proto::text::word;

/// A token, and the line's end that an editor puts behind it.
const FILE_MAX_BYTES: u64 = TOKEN_MAX_BYTES as u64 + 64;

/// As it was given. No message shows it.
#[derive(Clone)]
pub struct TokenArgument(String);

/// Why it is no token.
#[derive(Debug)]
pub enum NoTokenGiven {
    Text(NoToken),
    File { file: PathBuf, cause: io::Error },
    InFile { file: PathBuf, why: NoToken },
}

impl TokenArgument {
    /// A variable that is set to nothing is not set.
    pub fn is_empty(&self) -> bool {
        self.0.trim().is_empty()
    }

    /// Reads the file only now: one that was deleted after the first contact is missed by nobody.
    pub(super) fn read(&self) -> Result<EnrolmentToken, NoTokenGiven> {
        let Some(file) = self.0.strip_prefix('@') else {
            return self.0.trim().parse().map_err(NoTokenGiven::Text);
        };
        let file = Path::new(file);
        let text = regular::read(file, FILE_MAX_BYTES).map_err(|cause| NoTokenGiven::File {
            file: file.to_owned(),
            cause,
        })?;
        say_open(file);
        let text = String::from_utf8_lossy(&text);
        text.trim().parse().map_err(|why| NoTokenGiven::InFile {
            file: file.to_owned(),
            why,
        })
    }
}

/// Whoever read it may have been first.
fn say_open(file: &Path) {
    let mode = std::fs::metadata(file).map_or(0, |meta| meta.permissions().mode());
    if mode & 0o077 != 0 {
        tracing::warn!(
            "{}: others than its owner can read the enrolment token; run `chmod 600 {}` before you write the next one",
            file.display(),
            word(&file.display().to_string())
        );
    }
}

impl From<String> for TokenArgument {
    fn from(text: String) -> TokenArgument {
        TokenArgument(text)
    }
}

impl fmt::Debug for TokenArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Display for NoTokenGiven {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoTokenGiven::Text(why) => write!(f, "{why}; a file with one is given as `@FILE`"),
            NoTokenGiven::File { file, cause } => {
                write!(f, "{}: it cannot be read: {cause}", file.display())
            }
            NoTokenGiven::InFile { file, why } => write!(f, "{}: {why}", file.display()),
        }
    }
}
