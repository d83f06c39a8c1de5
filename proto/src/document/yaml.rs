//! The text of the file: read within bounds, parsed into nodes that keep what serde would lose, and searched again for the line of a problem.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use super::Kind;
use super::problem::{At, ConfigErrors, Place, Step};

/// A YAML value. Mappings keep their order and duplicate keys, which serde's own maps drop silently.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    Null,
    Bool(bool),
    Integer(i128),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    /// A key that is not text (`1:`, `[a]:`) is kept as a node, to be refused with its place.
    Mapping(Vec<(Node, Node)>),
}

impl Node {
    /// Whether a mapping has this key, whatever is under it.
    pub fn has_key(&self, wanted: &str) -> bool {
        let Node::Mapping(entries) = self else {
            return false;
        };
        let is_wanted = |key: &Node| matches!(key, Node::Text(text) if text == wanted);
        entries.iter().any(|(key, _)| is_wanted(key))
    }
}

/// The largest file that is read.
const FILE_MAX_BYTES: u64 = 8 << 20;

/// The longest value that a message repeats in full.
const SHOWN_MAX_CHARS: usize = 60;

/// Reads the file as text.
pub fn read_file(path: &Path, kind: &Kind) -> Result<String, ConfigErrors> {
    let whole = |wrong: String, right: &str| Err(ConfigErrors::whole(path, wrong, right));
    if path.is_dir() {
        return whole(
            "is a directory".to_owned(),
            &format!(
                "give the configuration file itself, e.g. `{}`",
                kind.example
            ),
        );
    }
    let mut bytes = Vec::new();
    let read =
        File::open(path).and_then(|file| file.take(FILE_MAX_BYTES + 1).read_to_end(&mut bytes));
    match read {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return whole(
                "no such file".to_owned(),
                "give the path of a configuration file",
            );
        }
        Err(error) => return whole(format!("cannot be read: {error}"), ""),
        Ok(_) if bytes.len() as u64 > FILE_MAX_BYTES => {
            let right = "give a configuration file; this one is probably something else";
            return whole(
                format!("is larger than {} MiB", FILE_MAX_BYTES >> 20),
                right,
            );
        }
        Ok(_) => {}
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..valid]
            .iter()
            .filter(|byte| **byte == b'\n')
            .count();
        let wrong = format!(
            "is not UTF-8: byte 0x{:02x} in line {line}",
            error.as_bytes()[valid]
        );
        ConfigErrors::whole(path, wrong, "save the file as UTF-8")
    })
}

/// Parses the text into its one document.
pub fn parse(path: &Path, text: &str, kind: &Kind) -> Result<Node, ConfigErrors> {
    let nothing = text.lines().all(|line| {
        let line = line.trim_start_matches('\u{feff}').trim();
        line.is_empty() || line.starts_with('#') || line == "---"
    });
    if nothing {
        return Err(ConfigErrors::whole(
            path,
            "the file is empty".to_owned(),
            kind.least,
        ));
    }
    serde_yaml::from_str(text).map_err(|error: serde_yaml::Error| {
        let position = error
            .location()
            .map(|location| (location.line(), location.column()));
        let wrong = without_position(&error.to_string());
        let right = syntax_hint(
            &wrong,
            position.and_then(|(line, _)| text.lines().nth(line - 1)),
        );
        ConfigErrors::at(path, text, position, wrong, right)
    })
}

/// The parser's message without the position that is shown before it; the place of the surrounding construct stays.
fn without_position(message: &str) -> String {
    let Some(at) = message.find(" at line ") else {
        return message.to_owned();
    };
    let rest = &message[at + " at line ".len()..];
    let tail = rest.find(", ").map_or("", |comma| &rest[comma..]);
    format!("{}{tail}", &message[..at])
}

/// What usually is behind a syntax error.
fn syntax_hint(message: &str, line: Option<&str>) -> String {
    let line = line.unwrap_or("");
    let indent = &line[..line.len() - line.trim_start().len()];
    let hint = if indent.contains('\t') {
        "indent with spaces: this line begins with a tab"
    } else if message.contains("more than one document") {
        "keep one document: remove the `---` in the middle of the file"
    } else if line.contains("${") && !message.contains("limit") {
        "put a value with `${VAR}` in quotes"
    } else if message.contains("mapping values are not allowed") {
        "check the indentation, and put a value that contains `: ` in quotes"
    } else if message.contains("alias") || message.contains("anchor") {
        "put a value that begins with `*` or `&` in quotes"
    } else if message.contains("cannot start any token") {
        "put a value that begins with a special character in quotes"
    } else if message.contains("block mapping") || message.contains("block collection") {
        "check that this line is indented like its neighbours"
    } else if message.contains("flow") {
        "check that each `{` and `[` is closed and that a comma stands between entries"
    } else {
        ""
    };
    hint.to_owned()
}

/// Line and column of a place, from 1. The parser gives positions only with errors, so one is raised there.
/// Where the place is not in the text (a key that is missing), it is that of the nearest value around it.
pub fn position(text: &str, place: &Place) -> Option<(usize, usize)> {
    let mut steps = place.steps.as_slice();
    let mut at = place.at;
    loop {
        let seed = Follow { steps, at };
        if let Err(error) = seed.deserialize(serde_yaml::Deserializer::from_str(text)) {
            return error
                .location()
                .map(|location| (location.line(), location.column()));
        }
        steps = steps.split_last()?.1;
        at = At::Value;
    }
}

impl Node {
    /// What a message says was found.
    pub fn describe(&self) -> String {
        match self {
            Node::Null => "nothing".to_owned(),
            Node::Bool(value) => format!("`{value}`"),
            Node::Integer(value) => format!("the number `{value}`"),
            Node::Float(value) => format!("the number `{value}`"),
            Node::Text(value) => format!("the text `{}`", shown(value)),
            Node::List(_) => "a list".to_owned(),
            Node::Mapping(_) => "a mapping".to_owned(),
        }
    }
}

/// A value as a message repeats it: on one line and not too long.
pub fn shown(text: &str) -> String {
    let clipped = text.chars().count() > SHOWN_MAX_CHARS;
    let tail = if clipped { "..." } else { "" };
    text.chars()
        .take(SHOWN_MAX_CHARS)
        .map(|c| if c.is_control() { ' ' } else { c })
        .chain(tail.chars())
        .collect()
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value without a `!tag`")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_none<E: de::Error>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Integer(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Integer(value.into()))
    }

    fn visit_i128<E: de::Error>(self, value: i128) -> Result<Node, E> {
        Ok(Node::Integer(value))
    }

    fn visit_u128<E: de::Error>(self, value: u128) -> Result<Node, E> {
        Ok(i128::try_from(value).map_or(Node::Float(value as f64), Node::Integer))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Node, E> {
        Ok(Node::Float(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Node::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Node, A::Error> {
        let mut mapping = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            mapping.push(entry);
        }
        Ok(Node::Mapping(mapping))
    }
}

/// Walks along the steps and fails at their end, so that the error carries the position. Off the path nothing is kept.
#[derive(Clone, Copy)]
struct Follow<'s> {
    steps: &'s [Step],
    at: At,
}

/// Reads a key, and fails on it when it is the place.
struct FollowKey<'k, 's> {
    follow: Follow<'s>,
    /// How many entries of the wanted name are still to be passed.
    remaining: &'k mut usize,
}

/// The message is never shown.
const FOUND: &str = "found";

impl<'de> DeserializeSeed<'de> for Follow<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Follow<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(FOUND)
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        self.scalar()
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<(), E> {
        self.scalar()
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_i128<E: de::Error>(self, _: i128) -> Result<(), E> {
        self.scalar()
    }

    fn visit_u128<E: de::Error>(self, _: u128) -> Result<(), E> {
        self.scalar()
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_str<E: de::Error>(self, _: &str) -> Result<(), E> {
        self.scalar()
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let wanted = match self.steps.split_first() {
            None => return Err(de::Error::custom(FOUND)),
            Some((Step::Index(index), rest)) => Some((*index, rest)),
            Some((Step::Key(..), _)) => None,
        };
        let mut index = 0;
        loop {
            let more = match wanted {
                Some((at, rest)) if at == index => items
                    .next_element_seed(Follow {
                        steps: rest,
                        at: self.at,
                    })?
                    .is_some(),
                _ => items.next_element::<IgnoredAny>()?.is_some(),
            };
            if !more {
                return Ok(());
            }
            index += 1;
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let (mut remaining, rest) = match self.steps.split_first() {
            None => return Err(de::Error::custom(FOUND)),
            Some((Step::Key(_, nth), rest)) => (*nth, rest),
            Some((Step::Index(_), rest)) => (0, rest),
        };
        while let Some(here) = entries.next_key_seed(FollowKey {
            follow: self,
            remaining: &mut remaining,
        })? {
            match here {
                true => entries.next_value_seed(Follow {
                    steps: rest,
                    at: self.at,
                })?,
                false => entries.next_value::<IgnoredAny>().map(|_| ())?,
            }
        }
        Ok(())
    }
}

impl Follow<'_> {
    fn scalar<E: de::Error>(self) -> Result<(), E> {
        if self.steps.is_empty() {
            Err(E::custom(FOUND))
        } else {
            Ok(())
        }
    }
}

impl<'de> DeserializeSeed<'de> for FollowKey<'_, '_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for FollowKey<'_, '_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(FOUND)
    }

    fn visit_str<E: de::Error>(self, key: &str) -> Result<bool, E> {
        let [Step::Key(name, _), rest @ ..] = self.follow.steps else {
            return Ok(false);
        };
        if name != key {
            return Ok(false);
        }
        if *self.remaining > 0 {
            *self.remaining -= 1;
            return Ok(false);
        }
        if rest.is_empty() && self.follow.at == At::Key {
            Err(E::custom(FOUND))
        } else {
            Ok(true)
        }
    }
}

#[cfg(test)]
mod tests;
