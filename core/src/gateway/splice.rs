//! Changes single values of a JSON text in place: all other bytes, number formats and key order included, survive.

use std::fmt;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::dialect::Key;
use super::peek::{Peek, range_in};
use super::sse::Event;

/// Replacements that are made all at once. Ranges are those of the original bytes and don't overlap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Edits {
    /// In the order of their ranges; those at one place in the order in which they were asked for.
    replacements: Vec<(Range<usize>, Vec<u8>)>,
}

/// Finds the model's name in the chunks of one stream.
///
/// Most engines start each chunk with the same bytes up to the name. Where they do, the name is
/// where it was in the chunk before, and nothing has to be parsed.
#[derive(Debug, Default)]
pub struct ModelFinder {
    /// The last chunk found, up to the end of the name.
    prefix: Vec<u8>,
    /// Where the name starts in it.
    start: usize,
}

/// The longest beginning of a chunk that is remembered.
pub const PREFIX_MAX_BYTES: usize = 1024;

impl Edits {
    pub fn new() -> Self {
        Edits::default()
    }

    pub fn is_empty(&self) -> bool {
        self.replacements.is_empty()
    }

    /// Puts `text` in the place of `range`; an empty range inserts.
    pub fn replace(&mut self, range: Range<usize>, text: impl Into<Vec<u8>>) {
        let at = self
            .replacements
            .partition_point(|(other, _)| other.start <= range.start);
        debug_assert!(
            at == 0 || self.replacements[at - 1].0.end <= range.start,
            "edits overlap"
        );
        debug_assert!(
            self.replacements
                .get(at)
                .is_none_or(|(other, _)| range.end <= other.start),
            "edits overlap"
        );
        self.replacements.insert(at, (range, text.into()));
    }

    /// How long the result is.
    pub fn edited_len(&self, original: usize) -> usize {
        self.replacements
            .iter()
            .fold(original, |len, (range, text)| {
                len + text.len() - range.len()
            })
    }

    /// The edited text. Without edits it is `body` itself.
    pub fn apply(&self, body: &Bytes) -> Bytes {
        if self.is_empty() {
            return body.clone();
        }
        let mut edited = BytesMut::with_capacity(self.edited_len(body.len()));
        let mut at = 0;
        for (range, text) in &self.replacements {
            edited.extend_from_slice(&body[at..range.start]);
            edited.extend_from_slice(text);
            at = range.end;
        }
        edited.extend_from_slice(&body[at..]);
        edited.freeze()
    }

    /// The edited text in pieces, of which the untouched ones are slices of `body`: for a body that is too long to copy.
    pub fn pieces(self, body: &Bytes) -> Vec<Bytes> {
        let mut pieces = Vec::with_capacity(2 * self.replacements.len() + 1);
        let mut at = 0;
        for (range, text) in self.replacements {
            pieces.extend([body.slice(at..range.start), Bytes::from(text)]);
            at = range.end;
        }
        pieces.push(body.slice(at..));
        pieces.retain(|piece| !piece.is_empty());
        pieces
    }
}

impl ModelFinder {
    pub fn new() -> Self {
        ModelFinder::default()
    }

    /// As [`response_model_range`], for the chunks of one stream.
    pub fn range(&mut self, json: &[u8]) -> Option<Range<usize>> {
        // Equal bytes leave a parser in the same state: what follows the prefix can't move the name.
        if !self.prefix.is_empty() && json.starts_with(&self.prefix) {
            return Some(self.start..self.prefix.len());
        }
        let range = response_model_range(json)?;
        self.prefix.clear();
        if range.end <= PREFIX_MAX_BYTES {
            self.prefix.extend_from_slice(&json[..range.end]);
        }
        self.start = range.start;
        Some(range)
    }

    /// The event with `name` in the place of the model's name, or `None` where it has none.
    pub fn rename(&mut self, event: &Event<'_>, name: &str) -> Option<Bytes> {
        let range = self.range(&event.data)?;
        if let Some(data) = event.data_range() {
            return Some(replace_model(
                event.raw,
                data.start + range.start..data.start + range.end,
                name,
            ));
        }
        // The data came in several lines; a name has no raw line ending in it, so the lines are kept.
        let data = replace_model(&event.data, range, name);
        let mut renamed = Vec::with_capacity(data.len() + 64);
        if let Some(name) = event.name {
            renamed.extend_from_slice(b"event: ");
            renamed.extend_from_slice(name);
            renamed.push(b'\n');
        }
        for line in data.split(|byte| *byte == b'\n') {
            renamed.extend_from_slice(b"data: ");
            renamed.extend_from_slice(line);
            renamed.push(b'\n');
        }
        renamed.push(b'\n');
        Some(Bytes::from(renamed))
    }
}

/// Makes the request ask for `name`.
pub fn rename_model(edits: &mut Edits, peek: &Peek<'_>, name: &str) {
    match &peek.model_range {
        Some(range) => edits.replace(range.clone(), quote(name)),
        None => insert_member(edits, peek, "model", &quote(name)),
    }
}

/// Makes the request ask for a stream, and with `include_usage` for its usage.
pub fn force_stream(edits: &mut Edits, peek: &Peek<'_>, include_usage: bool) {
    if !peek.stream {
        match &peek.stream_range {
            Some(range) => edits.replace(range.clone(), *b"true"),
            None => insert_member(edits, peek, "stream", b"true"),
        }
    }
    if include_usage {
        ask_usage(edits, peek);
    }
}

/// Makes the request ask for the usage of its stream. Other stream options stay.
pub fn ask_usage(edits: &mut Edits, peek: &Peek<'_>) {
    const OPTIONS: &[u8] = b"{\"include_usage\":true}";
    let Some(options) = &peek.stream_options else {
        return insert_member(edits, peek, "stream_options", OPTIONS);
    };
    match (&options.include_usage_range, options.object_start) {
        _ if peek.include_usage => {}
        (Some(range), _) => edits.replace(range.clone(), *b"true"),
        (None, Some(_)) if options.is_empty => edits.replace(options.range.clone(), OPTIONS),
        (None, Some(start)) => edits.replace(start..start, *b"\"include_usage\":true,"),
        (None, None) => edits.replace(options.range.clone(), OPTIONS),
    }
}

/// Puts a member in front of the body's others.
fn insert_member(edits: &mut Edits, peek: &Peek<'_>, key: &str, value: &[u8]) {
    let start = peek.object_start;
    // In an empty object the comma stands between the inserted ones, else behind each.
    let is_alone = peek.is_empty
        && !edits
            .replacements
            .iter()
            .any(|(range, _)| *range == (start..start));
    let mut member = Vec::with_capacity(key.len() + value.len() + 4);
    if peek.is_empty && !is_alone {
        member.push(b',');
    }
    member.extend_from_slice(&quote(key));
    member.push(b':');
    member.extend_from_slice(value);
    if !peek.is_empty {
        member.push(b',');
    }
    edits.replace(start..start, member);
}

/// Where an answer, or a chunk of one, names its model: `model`, or that of its `response` (a Responses
/// stream) or `message` (a Messages stream). Of the value, quotes included; only where it is a string.
pub fn response_model_range(json: &[u8]) -> Option<Range<usize>> {
    let fields: ModelFields<'_> = serde_json::from_slice(json).ok()?;
    let name = fields
        .model
        .map(RawValue::get)
        .or_else(|| model_of(fields.response))
        .or_else(|| model_of(fields.message))?;
    name.starts_with('"')
        .then(|| range_in(json, name.as_bytes()))
}

/// The `model` of an object within an answer.
fn model_of(raw: Option<&RawValue>) -> Option<&str> {
    let raw = raw?.get();
    if !raw.starts_with('{') {
        return None;
    }
    let fields: ModelFields<'_> = serde_json::from_str(raw).ok()?;
    fields.model.map(RawValue::get)
}

/// `bytes` with `name` as a JSON string in the place of `range`.
pub fn replace_model(bytes: &[u8], range: Range<usize>, name: &str) -> Bytes {
    let name = quote(name);
    let mut renamed = BytesMut::with_capacity(bytes.len() - range.len() + name.len());
    renamed.extend_from_slice(&bytes[..range.start]);
    renamed.extend_from_slice(&name);
    renamed.extend_from_slice(&bytes[range.end..]);
    renamed.freeze()
}

fn quote(text: &str) -> Vec<u8> {
    serde_json::to_vec(text).expect("a string always has a JSON text")
}

#[derive(Default)]
struct ModelFields<'a> {
    model: Option<&'a RawValue>,
    response: Option<&'a RawValue>,
    message: Option<&'a RawValue>,
}

impl<'de> Deserialize<'de> for ModelFields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = ModelFields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<ModelFields<'de>, A::Error> {
                let mut found = ModelFields::default();
                while let Some(Key(key)) = map.next_key()? {
                    match key.as_ref() {
                        "model" => found.model = Some(map.next_value()?),
                        "response" => found.response = Some(map.next_value()?),
                        "message" => found.message = Some(map.next_value()?),
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(found)
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::peek::peek;
    use crate::gateway::recordings;
    use crate::gateway::sse::events;

    /// Applies edits, and checks that both ways of applying agree and that the result is valid.
    fn edit(body: &str, edits: impl Fn(&mut Edits, &Peek<'_>)) -> String {
        let mut asked = Edits::new();
        edits(&mut asked, &peek(body.as_bytes()).unwrap());
        let bytes = Bytes::copy_from_slice(body.as_bytes());
        let edited = asked.apply(&bytes);
        assert_eq!(edited.len(), asked.edited_len(body.len()));
        assert_eq!(asked.pieces(&bytes).concat(), edited);
        peek(&edited).expect("still valid");
        String::from_utf8(edited.to_vec()).unwrap()
    }

    #[test]
    fn only_the_edited_bytes_change() {
        let body = "{ \"temperature\":0.10000000000000000555, \"model\" :\t\"a\\u0062\",\"x\":[1e400 ,-0.0],\"é\":null }\n";
        let renamed = edit(body, |edits, peek| rename_model(edits, peek, "c\"d"));
        assert_eq!(renamed, body.replace("\"a\\u0062\"", "\"c\\\"d\""));
    }

    #[test]
    fn a_stream_and_its_usage_are_asked_for_whatever_was_there() {
        let usage = r#""stream_options":{"include_usage":true}"#;
        let cases = [
            (
                r#"{"a":1}"#.to_owned(),
                format!(r#"{{"stream":true,{usage},"a":1}}"#),
            ),
            ("{ }".to_owned(), format!(r#"{{"stream":true,{usage} }}"#)),
            (
                r#"{"stream":false}"#.to_owned(),
                format!(r#"{{{usage},"stream":true}}"#),
            ),
            (
                r#"{"stream":null,"stream_options":null}"#.to_owned(),
                format!(r#"{{"stream":true,{usage}}}"#),
            ),
            (
                r#"{"stream":true,"stream_options":{ }}"#.to_owned(),
                format!(r#"{{"stream":true,{usage}}}"#),
            ),
            (
                r#"{"stream_options":{"x":1},"stream":true}"#.to_owned(),
                r#"{"stream_options":{"include_usage":true,"x":1},"stream":true}"#.to_owned(),
            ),
            (
                r#"{"stream":true,"stream_options":{"include_usage": false ,"x":1}}"#.to_owned(),
                r#"{"stream":true,"stream_options":{"include_usage": true ,"x":1}}"#.to_owned(),
            ),
            (
                format!(r#"{{"stream":true,{usage}}}"#),
                format!(r#"{{"stream":true,{usage}}}"#),
            ),
        ];
        for (body, expected) in cases {
            assert_eq!(
                edit(&body, |edits, peek| force_stream(edits, peek, true)),
                expected,
                "{body}"
            );
        }
        let all = edit("{}", |edits, peek| {
            rename_model(edits, peek, "m");
            force_stream(edits, peek, false);
        });
        assert_eq!(all, r#"{"model":"m","stream":true}"#);
        let all = edit(
            r#"{"stream":false,"prompt":"x","model":"a"}"#,
            |edits, peek| {
                rename_model(edits, peek, "long-name");
                force_stream(edits, peek, true);
            },
        );
        assert_eq!(
            all,
            format!(r#"{{{usage},"stream":true,"prompt":"x","model":"long-name"}}"#)
        );
    }

    #[test]
    fn no_edit_is_no_copy() {
        let body = Bytes::from_static(b"{\"model\":\"a\"}");
        assert_eq!(Edits::new().apply(&body).as_ptr(), body.as_ptr());
    }

    #[test]
    fn the_model_of_an_answer_is_found_at_the_top_only() {
        let cases = [
            (
                r#"{"choices":[{"model":"no"}],"model":"yes"}"#,
                Some("\"yes\""),
            ),
            (r#"{"choices":[],"mode\u006c":"ye\"s"}"#, Some(r#""ye\"s""#)),
            (
                r#"{"response":{"tools":[{"model":"no"}],"model":"yes"},"type":"response.created"}"#,
                Some("\"yes\""),
            ),
            (
                r#"{"type":"message_start","message":{"model":"yes"}}"#,
                Some("\"yes\""),
            ),
            (r#"{"message":"text","model":"yes"}"#, Some("\"yes\"")),
            (
                r#"{"choices":[{"message":{"content":"\"model\":\"no\""}}]}"#,
                None,
            ),
            (r#"{"model":null}"#, None),
            (r#"{"model":{"x":"y"}}"#, None),
            (r#"[{"model":"no"}]"#, None),
            (r#"{"model":"cut"#, None),
            ("[DONE]", None),
        ];
        for (json, expected) in cases {
            let found = response_model_range(json.as_bytes()).map(|range| &json[range]);
            assert_eq!(found, expected, "{json}");
        }
    }

    #[test]
    fn every_recorded_answer_is_renamed_and_otherwise_the_same() {
        let mut renamed_events = 0;
        for recording in recordings::all()
            .iter()
            .filter(|recording| recording.is_stream())
        {
            let body = recording.body();
            let mut finder = ModelFinder::new();
            for event in events(&body) {
                let found = finder.range(&event.data);
                assert_eq!(
                    found,
                    response_model_range(&event.data),
                    "{}",
                    recording.name
                );
                let Some(renamed) = finder.rename(&event, "asked-for") else {
                    continue;
                };
                renamed_events += 1;
                let back = renamed.to_vec();
                let back = String::from_utf8(back)
                    .unwrap()
                    .replace("\"asked-for\"", "\"smol\"");
                assert_eq!(
                    back,
                    String::from_utf8_lossy(event.raw).replace("\"tiny\"", "\"smol\"")
                );
            }
        }
        assert!(renamed_events > 200, "{renamed_events}");
    }

    #[test]
    fn an_event_of_several_data_lines_is_renamed_too() {
        let text = b"event: x\nid: 1\ndata: {\"a\":1,\ndata: \"model\":\"a\"}\n\n";
        let renamed = ModelFinder::new()
            .rename(&events(text).next().unwrap(), "b")
            .unwrap();
        assert_eq!(
            renamed,
            "event: x\ndata: {\"a\":1,\ndata: \"model\":\"b\"}\n\n"
        );
    }
}
