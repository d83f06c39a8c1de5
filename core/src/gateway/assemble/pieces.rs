//! JSON values that arrive in pieces, one in each chunk of a stream, and how the pieces become one.

use std::borrow::Cow;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::super::dialect::Key;
use super::{AssembleError, PARTS_MAX_COUNT};

/// What a member costs beyond its own text.
pub(super) const MEMBER_BYTES: usize = 64;

/// Members in the order in which they came first.
#[derive(Debug, Default)]
pub(super) struct Object(pub Vec<(String, Value)>);

#[derive(Debug)]
pub(super) enum Value {
    /// JSON text.
    Raw(String),
    /// What stands between the quotes of a string.
    Text(String),
    /// What stands between the brackets of an array.
    List(String),
    Object(Object),
    /// Tool calls by index.
    Calls(Vec<(u64, Object)>),
}

/// How the values that chunks give for one key become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// The first that isn't null.
    First,
    /// The last that isn't null.
    Last,
    /// The last that is neither null nor an empty string. llama.cpp sends a tool's name again when it grew.
    LastFilled,
    /// Strings are pieces of one.
    Text,
    /// Arrays are pieces of one.
    List,
    /// Objects of which each member has its own rule.
    Object(Part),
    /// Arrays of objects that say by `index` which call they are a piece of.
    Calls,
    /// Means something in a stream only.
    Drop,
}

/// The kinds of object in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Answer,
    Choice,
    Message,
    Call,
    /// A called function: its name and arguments.
    Function,
    /// `logprobs`: chat's lists of tokens and the parallel arrays of text completions.
    Lists,
}

impl Part {
    fn rule(self, key: &str, raw: &str) -> Rule {
        match (self, key) {
            (Part::Answer, "id" | "created" | "model") => Rule::First,
            // llama.cpp's report while it reads the prompt.
            (Part::Answer, "prompt_progress") => Rule::Drop,
            (Part::Choice, "text") => Rule::Text,
            (Part::Choice, "logprobs") => Rule::Object(Part::Lists),
            (Part::Choice, "token_ids") => Rule::List,
            (Part::Choice, "delta") => Rule::Object(Part::Message),
            (Part::Choice | Part::Call, "index") => Rule::Drop,
            (Part::Message, "role") => Rule::First,
            (Part::Message, "content" | "reasoning_content" | "reasoning" | "refusal") => {
                Rule::Text
            }
            (Part::Message, "tool_calls") => Rule::Calls,
            (Part::Message, "function_call") | (Part::Call, "function" | "custom") => {
                Rule::Object(Part::Function)
            }
            (Part::Call, "id" | "type") | (Part::Function, "name") => Rule::LastFilled,
            (Part::Function, "arguments" | "input") => Rule::Text,
            (Part::Lists, _) => Rule::List,
            (Part::Message, _) if raw.starts_with('[') => Rule::List,
            _ => Rule::Last,
        }
    }
}

/// The part with `index`, begun if it is new, and by how much that makes the whole larger.
pub(super) fn part(
    parts: &mut Vec<(u64, Object)>,
    index: u64,
) -> Result<(&mut Object, usize), AssembleError> {
    // Pieces mostly belong to one of the last parts.
    if let Some(at) = parts.iter().rposition(|(known, _)| *known == index) {
        return Ok((&mut parts[at].1, 0));
    }
    if parts.len() == PARTS_MAX_COUNT {
        return Err(AssembleError::TooManyParts {
            max_count: PARTS_MAX_COUNT,
        });
    }
    parts.push((index, Object::default()));
    let last = parts.len() - 1;
    Ok((&mut parts[last].1, MEMBER_BYTES))
}

impl Object {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0
            .iter()
            .find(|(known, _)| known == key)
            .map(|(_, value)| value)
    }

    pub fn get_mut(&mut self, key: &str) -> Option<&mut Value> {
        self.0
            .iter_mut()
            .find(|(known, _)| known == key)
            .map(|(_, value)| value)
    }

    pub fn set(&mut self, key: &str, value: Value) {
        match self.get_mut(key) {
            Some(known) => *known = value,
            None => self.0.push((key.to_owned(), value)),
        }
    }

    /// Keeps a place for a member that is written at the end.
    pub fn mark(&mut self, key: &str) -> usize {
        if self.get(key).is_some() {
            return 0;
        }
        self.set(key, Value::Raw(String::new()));
        key.len() + MEMBER_BYTES
    }

    /// Takes a chunk's value for `key`, and returns by how much the object grew.
    pub fn merge(&mut self, part: Part, key: &str, raw: &str) -> Result<usize, AssembleError> {
        let rule = part.rule(key, raw);
        if rule == Rule::Drop {
            return Ok(0);
        }
        match self.get_mut(key) {
            Some(known) => known.merge(rule, raw),
            None => {
                let mut value = Value::Raw("null".to_owned());
                let grown = value.merge(rule, raw)?;
                self.0.push((key.to_owned(), value));
                Ok(grown + key.len() + MEMBER_BYTES)
            }
        }
    }

    pub fn write(&self, out: &mut String) {
        out.push('{');
        for (at, (key, value)) in self.0.iter().enumerate() {
            if at > 0 {
                out.push(',');
            }
            out.push_str(&serde_json::to_string(key).expect("a string always has a JSON text"));
            out.push(':');
            value.write(out);
        }
        out.push('}');
    }
}

impl Value {
    fn merge(&mut self, rule: Rule, raw: &str) -> Result<usize, AssembleError> {
        if raw == "null" {
            return Ok(0);
        }
        let is_first = matches!(self, Value::Raw(text) if text == "null");
        match rule {
            Rule::First if !is_first => Ok(0),
            Rule::LastFilled if raw == "\"\"" && !is_first => Ok(0),
            Rule::Text if raw.starts_with('"') => Ok(self.append_text(&raw[1..raw.len() - 1])),
            Rule::List if raw.starts_with('[') => {
                Ok(self.append_items(raw[1..raw.len() - 1].trim()))
            }
            Rule::Object(part) if raw.starts_with('{') => self.merge_object(part, raw),
            Rule::Calls if raw.starts_with('[') => self.merge_calls(raw),
            _ => {
                let grown = match self {
                    Value::Raw(old) => raw.len().saturating_sub(old.len()),
                    _ => raw.len(),
                };
                *self = Value::Raw(raw.to_owned());
                Ok(grown)
            }
        }
    }

    /// Two texts within quotes, one after the other, are one text, also where a pair of escapes was split.
    fn append_text(&mut self, piece: &str) -> usize {
        match self {
            Value::Text(text) => text.push_str(piece),
            _ => *self = Value::Text(piece.to_owned()),
        }
        piece.len()
    }

    fn append_items(&mut self, items: &str) -> usize {
        if !matches!(self, Value::List(_)) {
            *self = Value::List(String::new());
        }
        if let (Value::List(list), false) = (self, items.is_empty()) {
            comma(list);
            list.push_str(items);
        }
        items.len() + 1
    }

    fn merge_object(&mut self, part: Part, raw: &str) -> Result<usize, AssembleError> {
        if !matches!(self, Value::Object(_)) {
            *self = Value::Object(Object::default());
        }
        let members: Members<'_> = serde_json::from_str(raw).map_err(AssembleError::bad_chunk)?;
        let mut grown = 0;
        if let Value::Object(object) = self {
            for (key, raw) in members.0 {
                grown += object.merge(part, &key, raw.get())?;
            }
        }
        Ok(grown)
    }

    fn merge_calls(&mut self, raw: &str) -> Result<usize, AssembleError> {
        if !matches!(self, Value::Calls(_)) {
            *self = Value::Calls(Vec::new());
        }
        let pieces: Vec<Members<'_>> =
            serde_json::from_str(raw).map_err(AssembleError::bad_chunk)?;
        let Value::Calls(calls) = self else {
            return Ok(0);
        };
        let mut grown = 0;
        for piece in pieces {
            // Without an index, a piece with an id begins a call, and others go on with the last.
            let next = calls.last().map_or(0, |(index, _)| index + 1);
            let begins = piece
                .0
                .iter()
                .any(|(key, raw)| key == "id" && raw.get().len() > 2 && raw.get() != "null");
            let index = piece
                .index()
                .unwrap_or(if begins { next } else { next.saturating_sub(1) });
            let (call, added) = part(calls, index)?;
            grown += added;
            for (key, raw) in piece.0 {
                grown += call.merge(Part::Call, &key, raw.get())?;
            }
        }
        Ok(grown)
    }

    fn write(&self, out: &mut String) {
        match self {
            Value::Raw(raw) => out.push_str(raw),
            Value::Text(text) => {
                out.push('"');
                out.push_str(text);
                out.push('"');
            }
            Value::List(items) => {
                out.push('[');
                out.push_str(items);
                out.push(']');
            }
            Value::Object(object) => object.write(out),
            Value::Calls(calls) => {
                let mut items = String::new();
                for (_, call) in calls {
                    comma(&mut items);
                    call.write(&mut items);
                }
                out.push('[');
                out.push_str(&items);
                out.push(']');
            }
        }
    }
}

pub(super) fn comma(list: &mut String) {
    if !list.is_empty() {
        list.push(',');
    }
}

/// The members of an object, borrowed.
pub(super) struct Members<'a>(pub Vec<(Cow<'a, str>, &'a RawValue)>);

impl Members<'_> {
    pub fn index(&self) -> Option<u64> {
        let index = self.0.iter().find(|(key, _)| key == "index");
        index.and_then(|(_, raw)| raw.get().parse().ok())
    }
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some((Key(key), value)) = map.next_entry()? {
                    members.push((key, value));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}
