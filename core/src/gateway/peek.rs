//! Reads what the gateway must know out of a request's JSON body, in one pass and without rebuilding it.
//!
//! The pass validates the whole body, so that an engine is never bothered with a broken one, and
//! refuses two spellings of a key that is read here: an engine would see the other one.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use memchr::{memchr2, memchr2_iter, memmem};
use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::dialect::Key;
use super::usage::value_after;

/// How deep a body may nest. Engines' own parsers recurse, and give up somewhere below 1000.
pub const NESTING_MAX_LEVELS: usize = 128;

/// The fields that matter, borrowed from the body.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Peek<'a> {
    /// `None` where it is absent or null.
    pub model: Option<Cow<'a, str>>,
    /// Of the value, quotes included. Present also where the value is null.
    pub model_range: Option<Range<usize>>,
    /// True only where the body says `true`.
    pub stream: bool,
    pub stream_range: Option<Range<usize>>,
    pub stream_options: Option<StreamOptions>,
    /// True only where `stream_options` say `"include_usage": true`.
    pub include_usage: bool,
    /// The first of `max_completion_tokens`, `max_output_tokens` and `max_tokens` that is a number.
    /// Negative ones (llama.cpp: no limit) count as absent.
    pub max_tokens: Option<u64>,
    pub n: Option<u64>,
    pub has_tools: bool,
    /// The prompt holds image parts, as far as a search for their `type` can tell.
    pub has_images: bool,
    /// The first string among `prompt_cache_key`, `session_id` and `user`.
    pub session: Option<Cow<'a, str>>,
    /// `service_tier`, where it is a string.
    pub service_tier: Option<Cow<'a, str>>,
    /// `priority`, as vLLM and SGLang take it: an integer.
    pub priority: Option<i64>,
    prompt: [Option<&'a [u8]>; 3],
    /// Just behind the body's `{`: where a member can be inserted.
    pub object_start: usize,
    /// The object has no member yet.
    pub is_empty: bool,
}

/// What the body asks of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamOptions {
    /// Of the whole value, which may also be null or (wrongly) something else.
    pub range: Range<usize>,
    /// Just behind its `{`; `None` where it is no object.
    pub object_start: Option<usize>,
    pub is_empty: bool,
    /// Of the value of its `include_usage`.
    pub include_usage_range: Option<Range<usize>>,
}

/// Why a body is refused. All are the client's fault; `ModelNotString` is about the one field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeekError {
    NotUtf8 {
        offset: usize,
    },
    /// Not JSON, or not only JSON. Line and column count from 1, the offset in bytes from 0.
    Syntax {
        offset: usize,
        line: usize,
        column: usize,
        reason: String,
    },
    NotAnObject,
    DuplicateKey {
        key: &'static str,
        offset: usize,
        line: usize,
    },
    TooDeep {
        offset: usize,
    },
    ModelNotString,
}

impl std::error::Error for PeekError {}

impl fmt::Display for PeekError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeekError::NotUtf8 { offset } => write!(f, "the body is not UTF-8 at byte {offset}"),
            PeekError::Syntax {
                offset,
                line,
                column,
                reason,
            } => {
                write!(
                    f,
                    "the body is not valid JSON at line {line} column {column} (byte {offset}): {reason}"
                )
            }
            PeekError::NotAnObject => f.write_str("the body must be a JSON object"),
            PeekError::DuplicateKey { key, offset, line } => {
                write!(
                    f,
                    "the body has the key `{key}` twice, again at line {line} (before byte {offset})"
                )
            }
            PeekError::TooDeep { offset } => {
                write!(
                    f,
                    "the body nests deeper than {NESTING_MAX_LEVELS} levels at byte {offset}"
                )
            }
            PeekError::ModelNotString => f.write_str("`model` must be a string"),
        }
    }
}

/// The members that are read, in the order of `KEYS`.
type Members<'a> = [Option<&'a RawValue>; KEYS.len()];

const KEYS: [&str; 19] = [
    "model",
    "stream",
    "stream_options",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "n",
    "tools",
    "functions",
    "system",
    "instructions",
    "messages",
    "prompt",
    "input",
    "prompt_cache_key",
    "session_id",
    "user",
    "service_tier",
    "priority",
];

/// Reads the fields that matter out of `body`.
pub fn peek(body: &[u8]) -> Result<Peek<'_>, PeekError> {
    let text = std::str::from_utf8(body).map_err(|error| PeekError::NotUtf8 {
        offset: error.valid_up_to(),
    })?;
    let start = text.find(|c: char| !is_whitespace(c)).unwrap_or(text.len());
    let members = read_members(text, start)?;
    check_depth(body)?;
    Peek::of_members(body, start + 1, &members)
}

impl<'a> Peek<'a> {
    /// The JSON of `tools`, of `system` or `instructions`, and of `messages`, `prompt` or `input`, as far as
    /// they are there, in the order in which chat templates put them: equal beginnings are equal prompts
    /// to a prefix cache.
    pub fn prompt_parts(&self) -> Vec<&'a [u8]> {
        self.prompt.into_iter().flatten().collect()
    }

    fn of_members(
        body: &'a [u8],
        object_start: usize,
        members: &Members<'a>,
    ) -> Result<Self, PeekError> {
        let [
            model,
            stream,
            stream_options,
            completion_tokens,
            output_tokens,
            max_tokens,
            n,
            tools,
            functions,
            system,
            instructions,
            messages,
            prompt,
            input,
            cache_key,
            session_id,
            user,
            service_tier,
            priority,
        ] = *members;
        let range = |raw: &'a RawValue| range_in(body, raw.get().as_bytes());
        let part = |raw: Option<&'a RawValue>| {
            raw.map(RawValue::get)
                .filter(|raw| *raw != "null")
                .map(str::as_bytes)
        };
        let tools = part(tools).or(part(functions));
        let content = part(messages).or(part(prompt)).or(part(input));
        let stream_options = match stream_options {
            Some(raw) => Some(StreamOptions::new(raw, range(raw))?),
            None => None,
        };
        let usage = stream_options
            .as_ref()
            .and_then(|options| options.include_usage_range.clone());
        let rest = body[object_start..]
            .iter()
            .find(|byte| !byte.is_ascii_whitespace());
        Ok(Peek {
            model: match model.filter(|raw| raw.get() != "null") {
                Some(raw) => Some(string(Some(raw)).ok_or(PeekError::ModelNotString)?),
                None => None,
            },
            model_range: model.map(range),
            stream: stream.is_some_and(|raw| raw.get() == "true"),
            stream_range: stream.map(range),
            stream_options,
            include_usage: usage.is_some_and(|range| &body[range] == b"true"),
            max_tokens: count(completion_tokens)
                .or(count(output_tokens))
                .or(count(max_tokens)),
            n: count(n),
            has_tools: tools
                .is_some_and(|raw| raw.starts_with(b"[") && raw[1..].trim_ascii_start() != b"]"),
            has_images: content.is_some_and(has_images),
            session: string(cache_key)
                .or_else(|| string(session_id))
                .or_else(|| string(user)),
            service_tier: string(service_tier),
            priority: priority.and_then(|raw| raw.get().parse().ok()),
            prompt: [tools, part(system).or(part(instructions)), content],
            object_start,
            is_empty: rest == Some(&b'}'),
        })
    }
}

impl StreamOptions {
    fn new(raw: &RawValue, range: Range<usize>) -> Result<Self, PeekError> {
        let text = raw.get();
        let object_start = text.starts_with('{').then_some(range.start + 1);
        let [include_usage] = match object_start {
            Some(_) => read_keys(text, &["include_usage"])
                .map_err(|refusal| refusal.at(range.start, text))?,
            None => [None],
        };
        Ok(StreamOptions {
            object_start,
            is_empty: text[1..].trim_start().starts_with('}'),
            include_usage_range: include_usage.map(|raw| {
                let inner = range_in(text.as_bytes(), raw.get().as_bytes());
                range.start + inner.start..range.start + inner.end
            }),
            range,
        })
    }
}

/// Where `inner` lies in `outer`, of which it must be a part.
pub(super) fn range_in(outer: &[u8], inner: &[u8]) -> Range<usize> {
    let start = inner.as_ptr() as usize - outer.as_ptr() as usize;
    start..start + inner.len()
}

fn is_whitespace(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

fn string(raw: Option<&RawValue>) -> Option<Cow<'_, str>> {
    serde_json::from_str::<Key<'_>>(raw?.get())
        .ok()
        .map(|key| key.0)
}

/// A count, which clients also write as `16.0`.
fn count(raw: Option<&RawValue>) -> Option<u64> {
    let text = raw?.get();
    let whole = |number: f64| {
        (number >= 0.0 && number.fract() == 0.0 && number <= u32::MAX.into())
            .then_some(number as u64)
    };
    text.parse()
        .ok()
        .or_else(|| text.parse().ok().and_then(whole))
}

/// OpenAI's `image_url` and `input_image` parts, and Anthropic's `image`.
fn has_images(prompt: &[u8]) -> bool {
    let kinds = [
        b"\"image_url\"".as_slice(),
        b"\"input_image\"",
        b"\"image\"",
    ];
    let is_image = |at: usize| {
        let value = value_after(prompt, at + "\"type\"".len());
        value.is_some_and(|value| kinds.iter().any(|kind| value.starts_with(kind)))
    };
    memmem::find(prompt, b"image").is_some() && memmem::find_iter(prompt, b"\"type\"").any(is_image)
}

fn read_members(text: &str, start: usize) -> Result<Members<'_>, PeekError> {
    if !text[start..].starts_with('{') {
        // What isn't JSON at all is told apart from what isn't an object.
        return Err(match serde_json::from_str::<IgnoredAny>(text) {
            Ok(_) => PeekError::NotAnObject,
            Err(error) => syntax(text, &error),
        });
    }
    read_keys(text, &KEYS).map_err(|refusal| refusal.at(0, text))
}

/// Why an object was refused, and serde's error, which knows where.
struct Refusal {
    duplicate: Option<&'static str>,
    error: serde_json::Error,
}

impl Refusal {
    /// `base` is where `text` starts in the body.
    fn at(self, base: usize, text: &str) -> PeekError {
        let PeekError::Syntax {
            offset,
            line,
            column,
            reason,
        } = syntax(text, &self.error)
        else {
            unreachable!("syntax() makes nothing else")
        };
        match self.duplicate {
            Some(key) => PeekError::DuplicateKey {
                key,
                offset: base + offset,
                line,
            },
            None => PeekError::Syntax {
                offset: base + offset,
                line,
                column,
                reason,
            },
        }
    }
}

/// The raw values of some keys of a JSON object, each of which may be there once.
fn read_keys<'a, const N: usize>(
    text: &'a str,
    keys: &[&'static str; N],
) -> Result<[Option<&'a RawValue>; N], Refusal> {
    let mut duplicate = None;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let object = KeysSeed {
        keys,
        duplicate: &mut duplicate,
    };
    let found = object
        .deserialize(&mut deserializer)
        .and_then(|found| deserializer.end().map(|()| found));
    found.map_err(|error| Refusal { duplicate, error })
}

struct KeysSeed<'k, const N: usize> {
    keys: &'k [&'static str; N],
    duplicate: &'k mut Option<&'static str>,
}

impl<'de, const N: usize> DeserializeSeed<'de> for KeysSeed<'_, N> {
    type Value = [Option<&'de RawValue>; N];

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, const N: usize> Visitor<'de> for KeysSeed<'_, N> {
    type Value = [Option<&'de RawValue>; N];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = [None; N];
        while let Some(key) = map.next_key::<Key<'de>>()? {
            let Some(index) = self.keys.iter().position(|known| *known == key.0) else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            if found[index].is_some() {
                *self.duplicate = Some(self.keys[index]);
                return Err(A::Error::custom("duplicate key"));
            }
            found[index] = Some(map.next_value::<&RawValue>()?);
        }
        Ok(found)
    }
}

fn syntax(text: &str, error: &serde_json::Error) -> PeekError {
    let (line, column) = (error.line(), error.column());
    let before = match line {
        0 | 1 => 0,
        _ => memchr::memchr_iter(b'\n', text.as_bytes())
            .nth(line - 2)
            .map_or(0, |at| at + 1),
    };
    let offset = (before + column.saturating_sub(1)).min(text.len());
    let reason = error.to_string();
    let reason = reason
        .split(" at line ")
        .next()
        .unwrap_or_default()
        .to_owned();
    PeekError::Syntax {
        offset,
        line,
        column,
        reason,
    }
}

/// Refuses a valid body that nests too deep.
fn check_depth(body: &[u8]) -> Result<(), PeekError> {
    // No body nests deeper than it has opening brackets, and that is quickly counted.
    if memchr2_iter(b'{', b'[', body)
        .nth(NESTING_MAX_LEVELS)
        .is_none()
    {
        return Ok(());
    }
    let (mut depth, mut at) = (0, 0);
    while at < body.len() {
        match body[at] {
            b'"' => at = end_of_string(body, at + 1),
            b'{' | b'[' => {
                depth += 1;
                if depth > NESTING_MAX_LEVELS {
                    return Err(PeekError::TooDeep { offset: at });
                }
            }
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        at += 1;
    }
    Ok(())
}

/// Where the closing quote is of the string whose text starts at `at`.
fn end_of_string(body: &[u8], mut at: usize) -> usize {
    // Most strings are short keys, for which a search isn't worth its start.
    let near = (at + 16).min(body.len());
    while at < near {
        match body[at] {
            b'"' => return at,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    while let Some(len) = memchr2(b'"', b'\\', body.get(at..).unwrap_or_default()) {
        at += len;
        if body[at] == b'"' {
            return at;
        }
        at += 2;
    }
    body.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Peek<'_> {
        super::peek(body.as_bytes()).unwrap_or_else(|error| panic!("{body}: {error}"))
    }

    fn refused(body: &str) -> PeekError {
        super::peek(body.as_bytes()).expect_err(body)
    }

    #[test]
    fn the_fields_that_matter_are_read_wherever_they_stand() {
        let body = r#" {"x":{"model":"no","stream":false},"messages":[{"role":"user","content":[{"type":"image_url"}]}],
            "stream" : true ,"max_tokens":7,"max_completion_tokens":9,"n":2,"user":"u","session_id":"s",
            "tools":[{"a":1}],"system":"be good","priority":-3,"service_tier":"flex",
            "stream_options":{"continuous_usage_stats":true,"include_usage":true},"model":"smol"}"#;
        let peek = read(body);
        assert_eq!(peek.model.as_deref(), Some("smol"));
        assert!(matches!(peek.model, Some(Cow::Borrowed(_))));
        assert_eq!(&body[peek.model_range.clone().unwrap()], "\"smol\"");
        assert_eq!(
            (peek.stream, &body[peek.stream_range.clone().unwrap()]),
            (true, "true")
        );
        let options = peek.stream_options.clone().unwrap();
        assert_eq!((peek.include_usage, options.is_empty), (true, false));
        assert_eq!(&body[options.include_usage_range.unwrap()], "true");
        assert!(body[options.object_start.unwrap()..].starts_with("\"continuous"));
        assert_eq!(
            (peek.max_tokens, peek.n, peek.priority),
            (Some(9), Some(2), Some(-3))
        );
        assert_eq!(
            (peek.session.as_deref(), peek.service_tier.as_deref()),
            (Some("s"), Some("flex"))
        );
        assert!(peek.has_tools && peek.has_images && !peek.is_empty);
        let parts: Vec<_> = peek
            .prompt_parts()
            .into_iter()
            .map(|part| std::str::from_utf8(part).unwrap())
            .collect();
        let messages = r#"[{"role":"user","content":[{"type":"image_url"}]}]"#;
        assert_eq!(parts, [r#"[{"a":1}]"#, "\"be good\"", messages]);
        assert!(body[peek.object_start..].starts_with("\"x\""));
    }

    #[test]
    fn fields_of_other_types_count_as_absent_but_keep_their_place() {
        let body = r#"{"model":null,"stream":null,"stream_options":null,"max_tokens":-1,"n":"2","tools":[ ],"user":3,"messages":null,"prompt":["image","type","image"]}"#;
        let peek = read(body);
        assert_eq!(
            (peek.model.clone(), peek.stream, peek.max_tokens, peek.n),
            (None, false, None, None)
        );
        assert_eq!(&body[peek.model_range.clone().unwrap()], "null");
        assert_eq!(&body[peek.stream_range.clone().unwrap()], "null");
        let options = peek.stream_options.clone().unwrap();
        assert_eq!((&body[options.range], options.object_start), ("null", None));
        assert!(!peek.has_tools && !peek.has_images && peek.session.is_none());
        assert_eq!(
            peek.prompt_parts(),
            [b"[ ]".as_slice(), br#"["image","type","image"]"#.as_slice()]
        );
        assert_eq!(read(r#"{"max_tokens":16.0}"#).max_tokens, Some(16));
    }

    #[test]
    fn a_name_with_escapes_is_read_and_its_place_is_known() {
        let body = r#"{"mod\u0065l":"a\/b\u00e9"}"#;
        let peek = read(body);
        assert_eq!(peek.model.as_deref(), Some("a/bé"));
        assert_eq!(&body[peek.model_range.unwrap()], r#""a\/b\u00e9""#);
    }

    #[test]
    fn a_kept_key_twice_is_refused_however_it_is_spelled() {
        for body in [
            r#"{"model":"a","model":"b"}"#,
            r#"{"model":"a","x":{},"\u006dodel":"b"}"#,
            r#"{"mode\u006C":"a","model":"b"}"#,
            "{\"model\":\"a\",\n\"stream\":true,\"strea\\u006d\":false}",
            r#"{"stream_options":{"include_usage":true,"include\u005fusage":false}}"#,
            r#"{"messages":[],"messages":[]}"#,
            r#"{"model":"a","model":"a"}"#,
        ] {
            let PeekError::DuplicateKey { offset, .. } = refused(body) else {
                panic!("{body}")
            };
            assert!(offset > 10 && offset < body.len(), "{body} {offset}");
        }
        assert_eq!(
            read(r#"{"model":"a","x":1,"x":2,"y":{"model":1,"model":2}}"#)
                .model
                .as_deref(),
            Some("a")
        );
    }

    #[test]
    fn what_is_not_one_json_object_is_refused_with_its_place() {
        let syntax = |body: &str| match refused(body) {
            PeekError::Syntax { offset, line, .. } => (offset, line),
            other => panic!("{body}: {other:?}"),
        };
        assert_eq!(syntax("{\"model\":\n  \"a\",}"), (16, 2));
        assert_eq!(syntax("{\"model\":\"a\"} x"), (14, 1));
        assert_eq!(syntax("{\"model\":\"a\"}{}"), (13, 1));
        assert_eq!(syntax("{\"x\":01}"), (6, 1));
        assert_eq!(syntax("{\"x\":NaN}"), (5, 1));
        assert_eq!(syntax("").1, 1);
        assert_eq!(syntax("{\"model\":\"a\"").1, 1);
        assert_eq!(syntax("{\"model\":\"a\u{1}\"}").1, 1);
        assert_eq!(syntax("nul").1, 1);
        for body in ["[]", "\"x\"", "null", " 1 "] {
            assert_eq!(refused(body), PeekError::NotAnObject, "{body}");
        }
        for body in [r#"{"model":1}"#, r#"{"model":["a"]}"#, r#"{"model":true}"#] {
            assert_eq!(refused(body), PeekError::ModelNotString, "{body}");
        }
        assert_eq!(
            super::peek(b"{\"model\":\"\xff\"}"),
            Err(PeekError::NotUtf8 { offset: 10 })
        );
    }

    #[test]
    fn nesting_is_bounded_and_brackets_in_text_are_none() {
        let nested = |levels: usize| {
            format!(
                "{{\"x\":{}{}}}",
                "[".repeat(levels - 1),
                "]".repeat(levels - 1)
            )
        };
        assert!(super::peek(nested(NESTING_MAX_LEVELS).as_bytes()).is_ok());
        let expected = PeekError::TooDeep {
            offset: 5 + NESTING_MAX_LEVELS - 1,
        };
        assert_eq!(refused(&nested(NESTING_MAX_LEVELS + 1)), expected);
        assert!(matches!(
            refused(&nested(1_000_000)),
            PeekError::TooDeep { .. }
        ));
        let text = "[{\\\"".repeat(500);
        assert!(super::peek(format!("{{\"prompt\":\"{text}\",\"x\":[[]]}}").as_bytes()).is_ok());
        let wide = "[{}],".repeat(500);
        assert!(super::peek(format!("{{\"input\":[{wide}1]}}").as_bytes()).is_ok());
    }

    #[test]
    fn every_cut_and_every_flipped_byte_gives_an_answer_or_an_error_and_no_panic() {
        let body = br#"{"model":"a\u00e9","stream_options":{"include_usage":false},"n":1,"messages":[{"c":"\\\""}]} "#;
        for at in 0..body.len() {
            let _ = super::peek(&body[..at]);
            for byte in [0, b'"', b'\\', b'{', b'}', b'[', 0xff, b' '] {
                let mut changed = *body;
                changed[at] = byte;
                if let Ok(peek) = super::peek(&changed) {
                    assert!(
                        serde_json::from_slice::<serde_json::Value>(&changed).is_ok(),
                        "{at} {byte}"
                    );
                    assert!(peek.object_start == 1);
                }
            }
        }
    }
}
