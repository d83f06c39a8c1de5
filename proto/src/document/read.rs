//! Typed reading of nodes: each reader either returns a value or reports what is wrong, so that one pass finds all problems.

use std::fmt::Display;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

pub use super::field::{Field, Fields};

use super::expand::{Expanded, expand};
use super::problem::{Finding, Place, Step};
use super::suggest::suggestion;
use super::yaml::{Node, shown};
use crate::units::{ByteSize, HumanDuration, UnitError};

/// The problems found so far, and where `${VAR}` is looked up.
pub struct Report<'e> {
    env: &'e dyn Fn(&str) -> Option<String>,
    findings: Vec<Finding>,
}

impl<'e> Report<'e> {
    pub fn new(env: &'e dyn Fn(&str) -> Option<String>) -> Self {
        Report {
            env,
            findings: Vec::new(),
        }
    }

    pub fn add(&mut self, place: &Place, wrong: impl Into<String>, right: impl Into<String>) {
        self.findings
            .push(Finding::new(place.clone(), wrong, right));
    }

    /// What was found here and what the rules found, less those rules that looked at something unreadable.
    pub fn finish(self, rules: Vec<Finding>) -> Vec<Finding> {
        let mut findings = self.findings;
        let unread: Vec<Vec<Step>> = findings
            .iter()
            .map(|finding| finding.place.steps.clone())
            .collect();
        findings.extend(rules.into_iter().filter(|rule| {
            let scope = rule.place.scope();
            !unread
                .iter()
                .any(|steps| steps.starts_with(scope) || scope.starts_with(steps))
        }));
        findings
    }

    /// The entries of a mapping; unknown and duplicate keys are reported.
    pub fn fields<'n>(&mut self, field: &Field<'n>, known: &[&str]) -> Option<Fields<'n>> {
        let Node::Mapping(_) = field.node else {
            let example = known.first().map_or("", |key| key);
            self.wrong_type(
                field,
                "a mapping",
                &format!("write e.g. `{{{example}: ...}}`"),
            );
            return None;
        };
        let mut entries = self.entries(field);
        entries.retain(|(key, _)| {
            let is_known = known.contains(key);
            if !is_known {
                let place = field.place.key(key).at_key();
                self.add(
                    &place,
                    format!("unknown key `{}`", shown(key)),
                    suggestion(key, known),
                );
            }
            is_known
        });
        Some(Fields {
            place: field.place.clone(),
            entries,
        })
    }

    /// The entries of a mapping with keys of the user's own choice; duplicates are reported and left out.
    fn entries<'n>(&mut self, field: &Field<'n>) -> Vec<(&'n str, &'n Node)> {
        let Node::Mapping(all) = field.node else {
            return Vec::new();
        };
        let mut entries: Vec<(&str, &Node)> = Vec::new();
        for (key, value) in all {
            let Node::Text(key) = key else {
                self.add(
                    &field.place,
                    format!("a key is {} instead of text", key.describe()),
                    "put the key in quotes",
                );
                continue;
            };
            let nth = all
                .iter()
                .take_while(|(_, other)| !std::ptr::eq(other, value));
            let nth = nth
                .filter(|(other, _)| matches!(other, Node::Text(other) if other == key))
                .count();
            if nth > 0 {
                let place = field.place.nth_key(key, nth).at_key();
                self.add(
                    &place,
                    format!("duplicate key `{}`", shown(key)),
                    "keep one of them",
                );
                continue;
            }
            entries.push((key, value));
        }
        entries
    }

    /// The items of a list.
    pub fn list<'n>(&mut self, field: &Field<'n>) -> Vec<Field<'n>> {
        let right = match field.node {
            Node::List(_) => return field.items(),
            Node::Text(text) if !text.contains("${") => format!("write `[\"{}\"]`", shown(text)),
            Node::Mapping(_) => "put `- ` before the entry".to_owned(),
            _ => "write `[...]`, or leave the key out".to_owned(),
        };
        self.wrong_type(field, "a list", &right);
        Vec::new()
    }

    /// The items of a list that may hold credentials.
    pub fn quiet_list<'n>(&mut self, field: &Field<'n>) -> Vec<Field<'n>> {
        if !matches!(field.node, Node::List(_)) {
            self.add_quietly(
                field,
                "expected a list",
                "write `[...]`, or leave the key out",
            );
        }
        field.items()
    }

    /// A list of texts; one that cannot be read is reported and empty.
    pub fn texts(&mut self, field: &Field<'_>) -> Vec<String> {
        self.list(field)
            .iter()
            .map(|item| self.text(item).unwrap_or_default())
            .collect()
    }

    /// A text, or a list of texts.
    pub fn text_or_texts(&mut self, field: &Field<'_>) -> Vec<String> {
        match field.node {
            Node::List(_) => self.texts(field),
            _ => self.text(field).into_iter().collect(),
        }
    }

    /// The entries of a mapping from names of the user's choice.
    pub fn named_fields<'n>(&mut self, field: &Field<'n>) -> Vec<(&'n str, Field<'n>)> {
        let Node::Mapping(_) = field.node else {
            let right = "write `{name: ...}`, or leave the key out";
            self.wrong_type(field, "a mapping", right);
            return Vec::new();
        };
        let entry = |(key, node)| {
            let place = field.place.key(key);
            (key, Field { node, place })
        };
        self.entries(field).into_iter().map(entry).collect()
    }

    /// A mapping from names of the user's choice to texts.
    pub fn named_texts(&mut self, field: &Field<'_>) -> Vec<(String, String)> {
        let Node::Mapping(_) = field.node else {
            let right = "write `{name: \"value\"}`, or leave the key out";
            self.wrong_type(field, "a mapping", right);
            return Vec::new();
        };
        let mut texts = Vec::new();
        for (key, node) in self.entries(field) {
            let value = Field {
                node,
                place: field.place.key(key),
            };
            texts.extend(self.text(&value).map(|text| (key.to_owned(), text)));
        }
        texts
    }

    /// A mapping from names of the user's choice to credentials.
    pub fn secrets(&mut self, field: &Field<'_>) -> Vec<(String, String)> {
        let Node::Mapping(_) = field.node else {
            let right = "write `{NAME: \"value\"}`, or leave the key out";
            self.add_quietly(field, "expected a mapping", right);
            return Vec::new();
        };
        let mut secrets = Vec::new();
        for (key, node) in self.entries(field) {
            let value = Field {
                node,
                place: field.place.key(key),
            };
            secrets.extend(self.quiet_text(&value).map(|text| (key.to_owned(), text)));
        }
        secrets
    }

    /// A text that is not empty.
    pub fn text(&mut self, field: &Field<'_>) -> Option<String> {
        let expanded = self.expanded(field, false)?;
        if expanded.value.is_empty() {
            self.add(
                &field.place,
                expanded.is_what("is empty"),
                "write a text, or leave the key out",
            );
            return None;
        }
        Some(expanded.value)
    }

    /// A credential: not empty, printable ASCII since it travels in a header, and in no message.
    pub fn secret(&mut self, field: &Field<'_>) -> Option<String> {
        let text = self.quiet_text(field)?;
        if text.is_empty() {
            self.add_quietly(field, "is empty", "write a value, or leave the key out");
            return None;
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            let right = "write printable ASCII without spaces or line breaks";
            self.add_quietly(field, "has a character that no header may carry", right);
            return None;
        }
        Some(text)
    }

    /// A text that no message repeats.
    pub fn quiet_text(&mut self, field: &Field<'_>) -> Option<String> {
        self.expanded(field, true).map(|expanded| expanded.value)
    }

    pub fn add_quietly(&mut self, field: &Field<'_>, wrong: &str, right: &str) {
        let mut finding = Finding::new(field.place.clone(), wrong, right);
        finding.sensitive = true;
        self.findings.push(finding);
    }

    pub fn boolean(&mut self, field: &Field<'_>) -> Option<bool> {
        if let Node::Bool(value) = field.node {
            return Some(*value);
        }
        let right = match field.node {
            Node::Text(text)
                if matches!(text.to_ascii_lowercase().as_str(), "yes" | "on" | "true") =>
            {
                "write `true`"
            }
            Node::Text(text)
                if matches!(text.to_ascii_lowercase().as_str(), "no" | "off" | "false") =>
            {
                "write `false`"
            }
            _ => "write `true` or `false`",
        };
        if let Some(expanded) = self.variable(field) {
            match expanded.value.as_str() {
                "true" => return Some(true),
                "false" => return Some(false),
                _ => self.add(
                    &field.place,
                    expanded.is_what("is not `true` or `false`"),
                    right,
                ),
            }
            return None;
        }
        self.wrong_type(field, "`true` or `false`", right);
        None
    }

    /// A whole number within the range.
    pub fn whole(&mut self, field: &Field<'_>, range: RangeInclusive<u64>) -> Option<u64> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        let number = match field.node {
            Node::Integer(number) => u64::try_from(*number).ok(),
            _ => self
                .variable(field)
                .and_then(|expanded| expanded.value.parse().ok()),
        };
        if let Some(number) = number.filter(|number| range.contains(number)) {
            return Some(number);
        }
        let quoted = matches!(field.node, Node::Text(text) if text.parse::<u64>().is_ok());
        self.wrong_type(
            field,
            &expected,
            if quoted { "leave out the quotes" } else { "" },
        );
        None
    }

    /// [`Report::whole`] for what fits in 32 bits.
    pub fn count(&mut self, field: &Field<'_>, range: RangeInclusive<u32>) -> Option<u32> {
        let wide = u64::from(*range.start())..=u64::from(*range.end());
        self.whole(field, wide)
            .and_then(|number| u32::try_from(number).ok())
    }

    /// A number within the range.
    pub fn number(&mut self, field: &Field<'_>, range: RangeInclusive<f64>) -> Option<f64> {
        let number = match field.node {
            Node::Integer(number) => Some(*number as f64),
            Node::Float(number) => Some(*number),
            _ => self
                .variable(field)
                .and_then(|expanded| expanded.value.parse().ok()),
        };
        let found = number.filter(|number| range.contains(number));
        if found.is_none() {
            self.wrong_type(
                field,
                &format!("a number from {} to {}", range.start(), range.end()),
                "",
            );
        }
        found
    }

    /// A duration within the range.
    pub fn duration(
        &mut self,
        field: &Field<'_>,
        range: RangeInclusive<Duration>,
    ) -> Option<Duration> {
        let range = HumanDuration(*range.start())..=HumanDuration(*range.end());
        self.measure(field, "a duration such as `30s`", range)
            .map(|duration| duration.0)
    }

    /// A size in bytes within the range.
    pub fn size(&mut self, field: &Field<'_>, range: RangeInclusive<u64>) -> Option<u64> {
        let range = ByteSize(*range.start())..=ByteSize(*range.end());
        self.measure(field, "a size such as `64MiB`", range)
            .map(|size| size.0)
    }

    pub fn measure<T>(
        &mut self,
        field: &Field<'_>,
        expected: &str,
        range: RangeInclusive<T>,
    ) -> Option<T>
    where
        T: FromStr<Err = UnitError> + PartialOrd + Display,
    {
        let expanded = match field.node {
            Node::Integer(number) => Expanded::unchanged(number.to_string()),
            Node::Text(_) => self.expanded(field, false)?,
            _ => {
                self.wrong_type(field, expected, "");
                return None;
            }
        };
        match expanded.value.parse::<T>() {
            Ok(value) if range.contains(&value) => return Some(value),
            Ok(value) => {
                let right = format!("write one from `{}` to `{}`", range.start(), range.end());
                self.add(&field.place, format!("`{value}` is out of range"), right);
            }
            // The parser's message has the text, which a variable's is kept out of.
            Err(_) if expanded.is_changed() => {
                self.add(
                    &field.place,
                    expanded.is_what(&format!("is not {expected}")),
                    "",
                );
            }
            Err(error) => self.add(&field.place, error.wrong, error.right),
        }
        None
    }

    /// An IP address and a port.
    pub fn address(&mut self, field: &Field<'_>) -> Option<SocketAddr> {
        let example = "write an IP address and a port, e.g. `127.0.0.1:8080` or `[::1]:8080`";
        if let Node::Integer(port) = field.node {
            self.wrong_type(
                field,
                "an address",
                &format!("write `127.0.0.1:{port}`, or `0.0.0.0:{port}` for all interfaces"),
            );
            return None;
        }
        let expanded = self.expanded(field, false)?;
        if let Ok(address) = expanded.value.parse() {
            return Some(address);
        }
        let right = match expanded.written.rsplit_once(':') {
            Some((_, port)) if port.parse::<u32>().is_ok_and(|port| port > 65535) => {
                "write a port up to 65535".to_owned()
            }
            Some(("localhost", port)) => {
                format!("write `127.0.0.1:{port}`; host names are not looked up")
            }
            Some(("" | "*", port)) => format!("write `0.0.0.0:{port}` for all interfaces"),
            Some((host, _)) if host.contains(char::is_alphabetic) && !host.contains(':') => {
                format!("{example}; host names are not looked up")
            }
            _ => example.to_owned(),
        };
        self.add(&field.place, expanded.is_what("is not an address"), right);
        None
    }

    /// One of a few words.
    pub fn word<T: Copy>(&mut self, field: &Field<'_>, words: &[(&str, T)]) -> Option<T> {
        let expanded = self.expanded(field, false)?;
        let found = words
            .iter()
            .find(|(word, _)| *word == expanded.value)
            .map(|(_, value)| *value);
        if found.is_none() {
            let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            let right = suggestion(&expanded.value, &known);
            self.add(&field.place, expanded.is_what("is not known here"), right);
        }
        found
    }

    /// A value that is written as nothing but text with `${VAR}`, where the type is not text.
    fn variable(&mut self, field: &Field<'_>) -> Option<Expanded> {
        match field.node {
            Node::Text(text) if text.contains("${") => self.expanded(field, false),
            _ => None,
        }
    }

    fn expanded(&mut self, field: &Field<'_>, quiet: bool) -> Option<Expanded> {
        let Node::Text(written) = field.node else {
            let right = match field.node {
                Node::Integer(_) | Node::Float(_) | Node::Bool(_) => "put it in quotes",
                Node::Null => "write a text, or leave the key out",
                _ => "",
            };
            match quiet {
                true => self.add_quietly(field, "expected a text", right),
                false => self.wrong_type(field, "a text", right),
            }
            return None;
        };
        match expand(written, self.env) {
            Ok(value) => Some(Expanded {
                value,
                written: written.clone(),
            }),
            Err((wrong, right)) => {
                self.add(&field.place, wrong, right);
                None
            }
        }
    }

    /// A required key is not there; where the mapping itself could not be read, that was said already.
    pub fn missing(&mut self, fields: &Fields<'_>, key: &str, right: &str) {
        if self
            .findings
            .iter()
            .any(|finding| finding.place == fields.place)
        {
            return;
        }
        self.add(&fields.place, format!("has no `{key}`"), right);
    }

    fn wrong_type(&mut self, field: &Field<'_>, expected: &str, right: &str) {
        // A failed `${VAR}` has its own finding already.
        if self
            .findings
            .last()
            .is_some_and(|last| last.place == field.place)
        {
            return;
        }
        let wrong = format!("expected {expected}, found {}", field.node.describe());
        self.add(&field.place, wrong, right);
    }
}
