//! Finds how many tokens an answer says that it took.

use std::fmt;
use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::dialect::Key;

/// No request has more tokens than this.
const TOKENS_MAX: u64 = 1_000_000_000;

/// Tokens of one request. `None` where no engine said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt, cached ones included (in Anthropic's API they are not, and are added here).
    pub input: Option<u64>,
    /// Of the prompt, those that came from a prefix cache.
    pub cached: Option<u64>,
    pub output: Option<u64>,
}

impl Usage {
    /// Without counts that no engine can mean: they are as good as none.
    fn plausible(self) -> Usage {
        let plausible = |count: Option<u64>| count.filter(|count| *count <= TOKENS_MAX);
        Usage {
            input: plausible(self.input),
            cached: plausible(self.cached),
            output: plausible(self.output),
        }
    }

    /// Takes what `later` knows. A Messages stream tells the input first and the output at the end.
    pub fn merge(&mut self, later: Usage) {
        self.input = later.input.or(self.input);
        self.cached = later.cached.or(self.cached);
        self.output = later.output.or(self.output);
    }

    pub fn is_empty(&self) -> bool {
        *self == Usage::default()
    }
}

static KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));

/// The usage in an answer, or in a chunk of one: `usage`, or that of its `response` or `message`.
///
/// Only these places count. A request's own text comes back in some answers (tools, metadata), and must
/// not be able to set what it costs. Chunks without the word cost one search.
pub fn find_usage(json: &[u8]) -> Option<Usage> {
    if !mentions_usage(json) {
        return None;
    }
    let fields: UsageFields<'_> = serde_json::from_slice(json).ok()?;
    let inner = |raw: Option<&RawValue>| -> Option<Usage> {
        let fields: UsageFields<'_> = serde_json::from_str(raw?.get()).ok()?;
        Usage::of_object(fields.usage?.get())
    };
    let own = fields.usage.and_then(|raw| Usage::of_object(raw.get()));
    own.or_else(|| inner(fields.response))
        .or_else(|| inner(fields.message))
}

/// The last usage in the end of an answer whose beginning is gone: for answers too long to hold, such as
/// embeddings. Without the beginning it can't tell where the object stands.
pub fn find_usage_in_tail(tail: &[u8]) -> Option<Usage> {
    let mut places: Vec<usize> = KEY.find_iter(tail).collect();
    while let Some(at) = places.pop() {
        let value = value_after(tail, at + "\"usage\"".len())?;
        let mut values = serde_json::Deserializer::from_slice(value).into_iter::<&RawValue>();
        if let Some(usage) = values
            .next()
            .and_then(Result::ok)
            .and_then(|raw| Usage::of_object(raw.get()))
        {
            return Some(usage);
        }
    }
    None
}

/// Whether a chunk is the extra one with the usage: no choices and a usage. It is what is taken out
/// again where the client didn't ask for it.
pub fn is_usage_only_chunk(data: &[u8]) -> bool {
    if !mentions_usage(data) {
        return false;
    }
    let Ok(fields) = serde_json::from_slice::<UsageFields<'_>>(data) else {
        return false;
    };
    let has_usage = fields.usage.is_some_and(|raw| raw.get().starts_with('{'));
    has_usage
        && fields
            .choices
            .is_some_and(|raw| serde_json::from_str::<[IgnoredAny; 0]>(raw.get()).is_ok())
}

/// Whether some `usage` in `json` may be an object. SGLang sends a null with every chunk.
fn mentions_usage(json: &[u8]) -> bool {
    KEY.find_iter(json).any(|at| {
        value_after(json, at + "\"usage\"".len()).is_some_and(|value| value.starts_with(b"{"))
    })
}

/// What follows the colon behind a key.
pub(super) fn value_after(json: &[u8], end_of_key: usize) -> Option<&[u8]> {
    Some(
        json[end_of_key..]
            .trim_ascii_start()
            .strip_prefix(b":")?
            .trim_ascii_start(),
    )
}

#[derive(Default)]
struct UsageFields<'a> {
    usage: Option<&'a RawValue>,
    choices: Option<&'a RawValue>,
    response: Option<&'a RawValue>,
    message: Option<&'a RawValue>,
}

impl<'de> Deserialize<'de> for UsageFields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = UsageFields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<UsageFields<'de>, A::Error> {
                let mut found = UsageFields::default();
                while let Some(Key(key)) = map.next_key()? {
                    match key.as_ref() {
                        "usage" => found.usage = Some(map.next_value()?),
                        "choices" => found.choices = Some(map.next_value()?),
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

impl Usage {
    /// Reads a usage object of any API; `None` where it counts nothing.
    fn of_object(json: &str) -> Option<Usage> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Details {
            cached_tokens: Option<u64>,
        }

        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Fields {
            prompt_tokens: Option<u64>,
            completion_tokens: Option<u64>,
            input_tokens: Option<u64>,
            output_tokens: Option<u64>,
            prompt_tokens_details: Option<Details>,
            input_tokens_details: Option<Details>,
            cache_read_input_tokens: Option<u64>,
            cache_creation_input_tokens: Option<u64>,
        }

        let fields: Fields = serde_json::from_str(json).ok()?;
        let details = fields.prompt_tokens_details.or(fields.input_tokens_details);
        // Anthropic counts what was read from and written to the cache apart from `input_tokens`.
        let apart = fields
            .cache_read_input_tokens
            .unwrap_or(0)
            .saturating_add(fields.cache_creation_input_tokens.unwrap_or(0));
        let usage = Usage {
            input: fields.prompt_tokens.or(fields
                .input_tokens
                .map(|tokens| tokens.saturating_add(apart))),
            cached: details
                .and_then(|details| details.cached_tokens)
                .or(fields.cache_read_input_tokens),
            output: fields.completion_tokens.or(fields.output_tokens),
        };
        let usage = usage.plausible();
        (!usage.is_empty()).then_some(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_no_engine_can_mean_is_none() {
        let json = r#"{"usage":{"prompt_tokens":9000000000000000,"completion_tokens":7}}"#;
        let found = find_usage(json.as_bytes()).unwrap();
        assert_eq!((found.input, found.output), (None, Some(7)));
        let json =
            r#"{"usage":{"prompt_tokens":18446744073709551615,"completion_tokens":1000000001}}"#;
        assert_eq!(find_usage(json.as_bytes()), None);
    }
    use crate::gateway::recordings::recording;
    use crate::gateway::sse::events;

    fn usage(input: u64, cached: Option<u64>, output: Option<u64>) -> Usage {
        Usage {
            input: Some(input),
            cached,
            output,
        }
    }

    fn of_stream(engine: &str, name: &str) -> Usage {
        let body = recording(engine, name).body();
        let mut total = Usage::default();
        events(&body)
            .filter_map(|event| find_usage(&event.data))
            .for_each(|found| total.merge(found));
        total
    }

    #[test]
    fn recorded_answers_tell_their_usage() {
        let cases = [
            ("llamacpp", "chat-nonstream", usage(33, Some(0), Some(8))),
            ("llamacpp", "completions", usage(4, Some(0), Some(8))),
            ("llamacpp", "responses", usage(32, Some(26), Some(8))),
            ("llamacpp", "messages", usage(33, Some(26), Some(8))),
            ("llamacpp", "embeddings-ok", usage(2, None, None)),
            ("vllm", "chat-nonstream", usage(29, None, Some(8))),
            ("vllm", "responses", usage(21, Some(0), Some(4))),
            ("vllm", "messages", usage(29, None, Some(4))),
            ("sglang", "chat-n2", usage(29, None, Some(6))),
            ("sglang", "responses", usage(21, Some(6), Some(2))),
        ];
        for (engine, name, expected) in cases {
            let body = recording(engine, name).body();
            assert_eq!(find_usage(&body), Some(expected), "{engine}/{name}");
            assert_eq!(
                find_usage_in_tail(&body[1..]),
                Some(expected),
                "{engine}/{name}"
            );
        }
    }

    #[test]
    fn recorded_streams_tell_their_usage() {
        let cases = [
            (
                "llamacpp",
                "chat-stream-usage",
                usage(33, Some(32), Some(8)),
            ),
            ("llamacpp", "completions-stream", usage(4, Some(3), Some(4))),
            ("llamacpp", "responses-stream", usage(32, Some(31), Some(4))),
            ("vllm", "chat-stream-usage", usage(29, None, Some(8))),
            (
                "vllm",
                "chat-stream-continuous-usage",
                usage(29, None, Some(8)),
            ),
            ("vllm", "messages-stream", usage(29, None, Some(3))),
            ("sglang", "completions-stream", usage(4, None, Some(4))),
            ("sglang", "messages-stream", usage(29, None, Some(3))),
            ("sglang", "chat-stream", Usage::default()),
        ];
        for (engine, name, expected) in cases {
            assert_eq!(of_stream(engine, name), expected, "{engine}/{name}");
        }
    }

    #[test]
    fn only_the_extra_chunk_is_taken_for_one() {
        let cases = [
            ("llamacpp", "chat-stream-usage", 1),
            ("llamacpp", "chat-stream", 0),
            ("llamacpp", "completions-stream-usage", 0),
            ("vllm", "chat-stream-usage", 1),
            ("vllm", "chat-stream-continuous-usage", 1),
            ("vllm", "completions-stream", 1),
            ("sglang", "chat-stream-usage", 1),
            ("sglang", "completions-stream", 1),
            ("sglang", "chat-stream", 0),
        ];
        for (engine, name, expected) in cases {
            let body = recording(engine, name).body();
            let found = events(&body)
                .filter(|event| is_usage_only_chunk(&event.data))
                .count();
            assert_eq!(found, expected, "{engine}/{name}");
        }
        assert!(is_usage_only_chunk(
            b"{\"choices\": [ ] ,\"usage\" : {\"prompt_tokens\":1}}"
        ));
        assert!(!is_usage_only_chunk(
            b"{\"choices\":[],\"usage\":null,\"x\":{\"usage\":{}}}"
        ));
        assert!(!is_usage_only_chunk(b"{\"choices\":[{}],\"usage\":{}}"));
    }

    #[test]
    fn the_text_of_a_request_cannot_set_what_it_costs() {
        let cases = [
            (
                r#"{"usage":{"input_tokens":9,"output_tokens":1},"tools":[{"usage":{"input_tokens":0,"output_tokens":0}}]}"#,
                Some(9),
            ),
            (r#"{"tools":[{"usage":{"input_tokens":0}}]}"#, None),
            (
                r#"{"choices":[{"delta":{"content":"\"usage\":{\"prompt_tokens\":5}"}}]}"#,
                None,
            ),
            (
                r#"{"response":{"metadata":{"usage":{"input_tokens":1}},"usage":{"input_tokens":7}}}"#,
                Some(7),
            ),
            (r#"{"usage":{}}"#, None),
            (r#"{"usage":{"prompt_tokens":-1}}"#, None),
            (r#"{"usage":{"prompt_tokens":3"#, None),
        ];
        for (json, input) in cases {
            assert_eq!(
                find_usage(json.as_bytes()).and_then(|usage| usage.input),
                input,
                "{json}"
            );
        }
    }

    #[test]
    fn the_end_of_a_long_answer_is_enough() {
        let tail = br#".25,0.5],"index":9}],"usage":{"prompt_tokens":12,"total_tokens":12},"x":{"usage":null,"usage":1}}"#;
        assert_eq!(find_usage_in_tail(tail), Some(usage(12, None, None)));
        assert_eq!(find_usage_in_tail(b"\"usage\""), None);
        assert_eq!(find_usage_in_tail(b"\"usage\":{\"prompt_tokens\":12"), None);
    }
}
