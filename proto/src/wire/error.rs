//! What can be wrong with a message: which field of which, and how.

use std::fmt;

/// A message that can't be taken as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireError {
    /// `register.shards[3].spec.host`; empty: the whole message.
    pub field: String,
    pub problem: WireProblem,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WireProblem {
    TooMany {
        max: usize,
    },
    TooLong {
        max_bytes: usize,
    },
    Missing,
    /// A number that its meaning does not allow.
    OutOfRange(u64),
    /// A number of an enum that this version has no word for.
    UnknownWord(i32),
    /// A message of a kind that this version does not know.
    UnknownKind,
    /// A text where an IP address has to be: a name would lead wherever whoever owns it says, anew at each connect.
    NoAddress(String),
    Garbled(String),
}

impl WireError {
    pub(crate) fn at(field: &str, problem: WireProblem) -> WireError {
        WireError {
            field: field.to_owned(),
            problem,
        }
    }

    /// The same, seen from the message that holds it.
    pub(crate) fn within(self, field: &str, index: Option<usize>) -> WireError {
        let outer = match index {
            Some(index) => format!("{field}[{index}]"),
            None => field.to_owned(),
        };
        let field = match self.field.is_empty() {
            true => outer,
            false => format!("{outer}.{}", self.field),
        };
        WireError { field, ..self }
    }

    /// Probably the peer is newer and said something that it may say: the message is skipped, and the session goes on.
    pub fn is_of_a_newer_peer(&self) -> bool {
        matches!(
            self.problem,
            WireProblem::UnknownKind | WireProblem::UnknownWord(_)
        )
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.field.is_empty() {
            true => f.write_str("the message ")?,
            false => write!(f, "`{}` ", self.field)?,
        }
        match &self.problem {
            WireProblem::TooMany { max } => write!(f, "has more than {max} elements"),
            WireProblem::TooLong { max_bytes } => write!(f, "is longer than {max_bytes} bytes"),
            WireProblem::Missing => f.write_str("is missing"),
            WireProblem::OutOfRange(value) => write!(f, "can't be {value}"),
            WireProblem::UnknownWord(value) => {
                write!(f, "is {value}, which this version does not know")
            }
            WireProblem::UnknownKind => f.write_str("is of a kind that this version does not know"),
            WireProblem::NoAddress(text) => write!(f, "is {text:?}, which is no IP address"),
            WireProblem::Garbled(how) => write!(f, "is garbled: {how}"),
        }
    }
}

impl std::error::Error for WireError {}
