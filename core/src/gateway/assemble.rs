//! Builds the answer that a client who didn't ask for a stream gets, out of the stream that an engine sent.
//!
//! Values are kept as the JSON text in which they came: numbers keep their digits, strings their escapes,
//! and pieces of a text are joined without being decoded. What is unknown is kept.
//!
//! One thing is out of reach: llama.cpp sends no chunk for a token that shows no text yet (a part of a
//! character, of a stop word or of a tool call's syntax; `to_json_oaicompat_chat` in its server-task.cpp), and
//! with it goes that token's entry in a chat's `logprobs`.

mod pieces;

use std::borrow::Cow;
use std::fmt;

use bytes::Bytes;
use serde_json::value::RawValue;

use self::pieces::{Members, Object, Part, Value, comma, part};
use super::dialect::{Dialect, StreamError};
use super::sse::Event;

/// The largest answer that is put together.
pub const ASSEMBLED_MAX_BYTES: usize = 64 * 1024 * 1024;
/// The most choices in an answer, and the most tool calls in a choice.
pub const PARTS_MAX_COUNT: usize = 1024;

/// The answer to a chat or text completion, as far as it has arrived.
#[derive(Debug)]
pub struct Assembler {
    kind: AnswerKind,
    /// The answer's members, `choices` aside, which are a mark for the place where they belong.
    answer: Object,
    /// By `index`, in the order in which they began.
    choices: Vec<(u64, Object)>,
    held_bytes: usize,
    max_bytes: usize,
    state: State,
    /// `usage` is that of the first choice, or of all.
    has_counts_of_first: bool,
}

/// Which answer is put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerKind {
    /// `chat.completion`
    Chat,
    /// `text_completion`
    Completion,
}

/// What a chunk was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Push {
    More,
    /// The stream's own end.
    Done,
    /// The engine failed; there is no answer.
    Error(StreamError),
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AssembleError {
    /// A chunk isn't a JSON object with what a chunk has.
    BadChunk {
        reason: String,
    },
    TooLarge {
        max_bytes: usize,
    },
    TooManyParts {
        max_count: usize,
    },
    /// The stream ended without saying so.
    Unfinished,
    /// The engine said that it failed.
    Failed,
}

impl std::error::Error for AssembleError {}

impl fmt::Display for AssembleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AssembleError::BadChunk { reason } => {
                write!(f, "the engine sent a chunk that can't be read: {reason}")
            }
            AssembleError::TooLarge { max_bytes } => {
                write!(f, "the engine's answer is larger than {max_bytes} bytes")
            }
            AssembleError::TooManyParts { max_count } => {
                write!(
                    f,
                    "the engine's answer has more than {max_count} choices or tool calls"
                )
            }
            AssembleError::Unfinished => f.write_str("the engine's stream ended too early"),
            AssembleError::Failed => f.write_str("the engine failed in its stream"),
        }
    }
}

/// Whether a chunk is about other choices than the first. One without choices is about all of them.
fn is_of_another(chunk: &Members<'_>) -> Result<bool, AssembleError> {
    let Some((_, raw)) = chunk.0.iter().find(|(key, _)| key == "choices") else {
        return Ok(false);
    };
    if raw.get() == "null" {
        return Ok(false);
    }
    let choices: Vec<Members<'_>> =
        serde_json::from_str(raw.get()).map_err(AssembleError::bad_chunk)?;
    let is_first = |choice: &Members<'_>| choice.index().unwrap_or(0) == 0;
    Ok(!choices.is_empty() && !choices.iter().any(is_first))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Empty,
    Begun,
    Done,
    Failed,
}

impl Assembler {
    pub fn new(kind: AnswerKind) -> Self {
        Assembler::with_limit(kind, ASSEMBLED_MAX_BYTES)
    }

    pub fn with_limit(kind: AnswerKind, max_bytes: usize) -> Self {
        let (answer, choices) = (Object::default(), Vec::new());
        Assembler {
            kind,
            answer,
            choices,
            held_bytes: 0,
            max_bytes,
            state: State::Empty,
            has_counts_of_first: false,
        }
    }

    /// Takes an event's data. What follows the end is ignored.
    pub fn push(&mut self, data: &[u8]) -> Result<Push, AssembleError> {
        if self.state == State::Done {
            return Ok(Push::Done);
        }
        let event = Event {
            raw: data,
            name: None,
            data: Cow::Borrowed(data),
            is_comment: false,
        };
        let dialect = self.kind.dialect();
        if dialect.ends(&event) {
            self.state = if self.state == State::Begun {
                State::Done
            } else {
                self.state
            };
            return Ok(Push::Done);
        }
        if let Some(error) = dialect.stream_error(&event) {
            self.state = State::Failed;
            return Ok(Push::Error(error));
        }
        let chunk: Members<'_> = serde_json::from_slice(data).map_err(AssembleError::bad_chunk)?;
        let has_counts = chunk.0.iter().any(|(key, _)| key == "usage");
        let is_of_another = has_counts && is_of_another(&chunk)?;
        for (key, raw) in chunk.0 {
            match key.as_ref() {
                // For several prompts llama.cpp counts each choice's own, and answers at once with those of the first.
                "usage" | "timings" if is_of_another && self.has_counts_of_first => {}
                "choices" => {
                    self.held_bytes += self.answer.mark("choices");
                    self.push_choices(raw)?;
                }
                "object" => self.held_bytes += self.answer.mark("object"),
                _ => self.held_bytes += self.answer.merge(Part::Answer, &key, raw.get())?,
            }
        }
        self.has_counts_of_first |= has_counts && !is_of_another;
        if self.state == State::Empty {
            self.state = State::Begun;
        }
        if self.held_bytes > self.max_bytes {
            return Err(AssembleError::TooLarge {
                max_bytes: self.max_bytes,
            });
        }
        Ok(Push::More)
    }

    /// The answer. A stream that didn't end properly, or with an error, has none.
    pub fn finish(mut self) -> Result<Bytes, AssembleError> {
        match self.state {
            State::Done => {}
            State::Failed => return Err(AssembleError::Failed),
            State::Empty | State::Begun => return Err(AssembleError::Unfinished),
        }
        self.choices.sort_by_key(|(index, _)| *index);
        let mut choices = String::new();
        for (index, choice) in &mut self.choices {
            comma(&mut choices);
            complete_choice(self.kind, choice);
            choice.set("index", Value::Raw(index.to_string()));
            choice.write(&mut choices);
        }
        let object = if self.kind == AnswerKind::Chat {
            "chat.completion"
        } else {
            "text_completion"
        };
        self.answer.set("object", Value::Text(object.to_owned()));
        self.answer.set("choices", Value::List(choices));
        let mut answer = String::new();
        self.answer.write(&mut answer);
        Ok(Bytes::from(answer))
    }

    fn push_choices(&mut self, raw: &RawValue) -> Result<(), AssembleError> {
        if raw.get() == "null" {
            return Ok(());
        }
        let choices: Vec<Members<'_>> =
            serde_json::from_str(raw.get()).map_err(AssembleError::bad_chunk)?;
        for members in choices {
            let index = members.index().unwrap_or(0);
            let (choice, grown) = part(&mut self.choices, index)?;
            self.held_bytes += grown;
            for (key, raw) in members.0 {
                if key == "index" {
                    self.held_bytes += choice.mark("index");
                } else {
                    self.held_bytes += choice.merge(Part::Choice, &key, raw.get())?;
                }
            }
        }
        Ok(())
    }
}

impl AnswerKind {
    fn dialect(self) -> Dialect {
        match self {
            AnswerKind::Chat => Dialect::Chat,
            AnswerKind::Completion => Dialect::Completions,
        }
    }
}

impl AssembleError {
    fn bad_chunk(error: serde_json::Error) -> Self {
        AssembleError::BadChunk {
            reason: error.to_string(),
        }
    }
}

/// What an answer has also where no chunk had a reason to say it.
fn complete_choice(kind: AnswerKind, choice: &mut Object) {
    if kind == AnswerKind::Completion {
        if !matches!(choice.get("text"), Some(Value::Text(_))) {
            choice.set("text", Value::Text(String::new()));
        }
        return;
    }
    if !matches!(choice.get("delta"), Some(Value::Object(_))) {
        choice.set("delta", Value::Object(Object::default()));
    }
    let Some((key, Value::Object(message))) = choice.0.iter_mut().find(|(key, _)| key == "delta")
    else {
        return;
    };
    "message".clone_into(key);
    if message.get("role").is_none() {
        message.set("role", Value::Text("assistant".to_owned()));
    }
    // llama.cpp begins a stream with a null, and answers with "" where nothing followed it.
    if !matches!(message.get("content"), Some(Value::Text(_))) {
        message.set("content", Value::Text(String::new()));
    }
    let Some(Value::Calls(calls)) = message.get_mut("tool_calls") else {
        return;
    };
    calls.sort_by_key(|(index, _)| *index);
    for (_, call) in calls {
        if call.get("type").is_none() {
            call.set("type", Value::Text("function".to_owned()));
        }
        if let Some(Value::Object(function)) = call.get_mut("function")
            && function.get("arguments").is_none()
        {
            function.set("arguments", Value::Text(String::new()));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value as Json;

    use super::*;
    use crate::gateway::recordings::recording;
    use crate::gateway::sse::events;

    fn assembled(engine: &str, name: &str, kind: AnswerKind) -> Json {
        let body = recording(engine, name).body();
        let mut assembler = Assembler::new(kind);
        for event in events(&body).filter(|event| !event.is_comment) {
            assert!(!matches!(
                assembler.push(&event.data).unwrap(),
                Push::Error(_)
            ));
        }
        serde_json::from_slice(&assembler.finish().unwrap()).unwrap()
    }

    fn answered(engine: &str, name: &str) -> Json {
        serde_json::from_slice(&recording(engine, name).body()).unwrap()
    }

    #[test]
    fn of_several_prompts_the_counts_are_those_of_the_first_whichever_ends_last() {
        let chunk = |index: u32, tokens: u32| {
            format!(
                r#"{{"choices":[{{"text":"x","index":{index},"finish_reason":"length"}}],"usage":{{"prompt_tokens":{tokens}}}}}"#
            )
        };
        for order in [[(0, 5), (1, 2)], [(1, 2), (0, 5)]] {
            let mut assembler = Assembler::new(AnswerKind::Completion);
            for (index, tokens) in order {
                assembler.push(chunk(index, tokens).as_bytes()).unwrap();
            }
            assembler.push(b"[DONE]").unwrap();
            let answer: Json = serde_json::from_slice(&assembler.finish().unwrap()).unwrap();
            assert_eq!(answer["usage"]["prompt_tokens"], 5, "{order:?}");
            assert_eq!(answer["choices"].as_array().unwrap().len(), 2);
        }
    }

    /// Assembles chat chunks, or with `choices` only their `choices`.
    fn chat(chunks: &[&str]) -> Result<String, AssembleError> {
        let mut assembler = Assembler::new(AnswerKind::Chat);
        for chunk in chunks {
            assembler.push(chunk.as_bytes())?;
        }
        assembler.push(b"[DONE]")?;
        assembler
            .finish()
            .map(|answer| String::from_utf8(answer.to_vec()).unwrap())
    }

    fn chat_choices(choices: &[&str]) -> Json {
        let chunks: Vec<String> = choices
            .iter()
            .map(|choices| format!("{{\"choices\":{choices}}}"))
            .collect();
        let chunks: Vec<&str> = chunks.iter().map(String::as_str).collect();
        let mut answer: Json = serde_json::from_str(&chat(&chunks).unwrap()).unwrap();
        answer["choices"].take()
    }

    /// What differs between two answers: `PATH` is in one only, or has other values. Nulls, which only the
    /// engine's own answer has, can't be known from a stream and are left out.
    fn differences(path: &str, ours: &Json, engines: &Json, found: &mut Vec<String>) {
        match (ours, engines) {
            (Json::Object(ours), Json::Object(engines)) => {
                for (key, value) in ours {
                    match engines.get(key) {
                        Some(other) => differences(&format!("{path}/{key}"), value, other, found),
                        None => found.push(format!("+{path}/{key}")),
                    }
                }
                let missing = engines
                    .iter()
                    .filter(|(key, value)| !value.is_null() && !ours.contains_key(*key));
                found.extend(missing.map(|(key, _)| format!("-{path}/{key}")));
            }
            (Json::Array(ours), Json::Array(engines)) if ours.len() == engines.len() => {
                let pairs = ours.iter().zip(engines).enumerate();
                pairs.for_each(|(at, (ours, engines))| {
                    differences(&format!("{path}/{at}"), ours, engines, found)
                });
            }
            _ if ours == engines => {}
            _ => found.push(path.to_owned()),
        }
    }

    #[test]
    fn a_recorded_stream_becomes_what_the_engine_itself_answers() {
        let (all, timings) = (["/id", "/created"], "/timings/");
        let cases: [(&str, &str, &str, AnswerKind, &[&str]); 12] = [
            (
                "llamacpp",
                "chat-stream-usage",
                "chat-nonstream",
                AnswerKind::Chat,
                &["/usage/prompt_tokens_details/cached_tokens"],
            ),
            (
                "llamacpp",
                "chat-stream",
                "chat-nonstream",
                AnswerKind::Chat,
                &["-/usage"],
            ),
            (
                "llamacpp",
                "chat-stream-n2",
                "chat-n2",
                AnswerKind::Chat,
                &["-/usage"],
            ),
            (
                "llamacpp",
                "chat-tools-required-stream",
                "chat-tools-required",
                AnswerKind::Chat,
                &["-/usage"],
            ),
            (
                "llamacpp",
                "completions-stream",
                "completions",
                AnswerKind::Completion,
                &[
                    "/choices/0/text",
                    "/usage/completion_tokens",
                    "/usage/prompt_tokens_details/cached_tokens",
                    "/usage/total_tokens",
                ],
            ),
            (
                "vllm",
                "chat-stream-usage",
                "chat-nonstream",
                AnswerKind::Chat,
                &[],
            ),
            (
                "vllm",
                "chat-stream-continuous-usage",
                "chat-nonstream",
                AnswerKind::Chat,
                &[],
            ),
            (
                "vllm",
                "chat-stream-logprobs",
                "chat-logprobs",
                AnswerKind::Chat,
                &["-/usage"],
            ),
            (
                "vllm",
                "completions-stream",
                "completions",
                AnswerKind::Completion,
                &[
                    "/choices/0/text",
                    "/usage/completion_tokens",
                    "/usage/total_tokens",
                ],
            ),
            (
                "sglang",
                "chat-stream-usage",
                "chat-nonstream",
                AnswerKind::Chat,
                &["-/metadata"],
            ),
            (
                "sglang",
                "chat-stream-n2",
                "chat-n2",
                AnswerKind::Chat,
                &["-/usage", "-/metadata"],
            ),
            (
                "sglang",
                "completions-stream",
                "completions",
                AnswerKind::Completion,
                &[
                    "/choices/0/text",
                    "/usage/completion_tokens",
                    "/usage/total_tokens",
                    "-/metadata",
                ],
            ),
        ];
        for (engine, stream, answer, kind, expected) in cases {
            let mut found = Vec::new();
            differences(
                "",
                &assembled(engine, stream, kind),
                &answered(engine, answer),
                &mut found,
            );
            found.retain(|path| !all.contains(&path.as_str()) && !path.starts_with(timings));
            let (mut expected, mut seen) = (
                expected.to_vec(),
                found.iter().map(String::as_str).collect::<Vec<_>>(),
            );
            expected.sort_unstable();
            seen.sort_unstable();
            assert_eq!(seen, expected, "{engine}/{stream}");
        }
    }

    #[test]
    fn llamacpps_own_answer_has_no_member_that_the_assembled_one_lacks() {
        let keys = |json: &Json| {
            let mut keys: Vec<_> = json.as_object().unwrap().keys().cloned().collect();
            keys.sort();
            keys
        };
        let cases = [
            ("chat-stream-usage", "chat-nonstream", AnswerKind::Chat),
            ("completions-stream", "completions", AnswerKind::Completion),
        ];
        for (stream, answer, kind) in cases {
            let (ours, engines) = (
                assembled("llamacpp", stream, kind),
                answered("llamacpp", answer),
            );
            assert_eq!(keys(&ours), keys(&engines), "{stream}");
            assert_eq!(
                keys(&ours["choices"][0]),
                keys(&engines["choices"][0]),
                "{stream}"
            );
            assert_eq!(
                keys(&ours["timings"]),
                keys(&engines["timings"]),
                "{stream}"
            );
        }
    }

    #[test]
    fn values_keep_their_text_and_unknown_ones_are_kept() {
        let answer = chat(&[
            r#"{"id":"a","created":1,"model":"m","x":1.10,"usage":null,"choices":[{"index":0,"y":1e400,"delta":{"role":"assistant","content":null,"z":[1]}}]}"#,
            r#"{"id":"b","created":2,"x":12345678901234567890.10,"choices":[{"index":0,"delta":{"content":"\ud83d","z":[2, 3]}}],"prompt_progress":{}}"#,
            r#"{"id":"c","choices":[{"index":0,"delta":{"content":"\ude00\/"},"finish_reason":"stop"}],"object":"chat.completion.chunk"}"#,
            r#"{"choices":[],"usage":{"completion_tokens":-0.0}}"#,
        ]);
        let expected = r#"{"id":"a","created":1,"model":"m","x":12345678901234567890.10,"usage":{"completion_tokens":-0.0},"choices":[{"index":0,"y":1e400,"message":{"role":"assistant","content":"\ud83d\ude00\/","z":[1,2, 3]},"finish_reason":"stop"}],"object":"chat.completion"}"#;
        assert_eq!(answer.unwrap(), expected);
    }

    #[test]
    fn choices_come_out_by_index_whoever_began_first() {
        let choices = chat_choices(&[
            r#"[{"index":2,"delta":{"content":"c"}}]"#,
            r#"[{"index":0,"delta":{"content":"a"}},{"index":1,"delta":{"content":"b"}}]"#,
            r#"[{"index":2,"delta":{"content":"C"},"finish_reason":"stop"},{"index":0,"delta":{"content":"A"}}]"#,
        ]);
        let texts: Vec<_> = choices
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["message"]["content"].clone())
            .collect();
        assert_eq!(texts, ["aA", "b", "cC"]);
        let indexes: Vec<_> = choices
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["index"].clone())
            .collect();
        assert_eq!(indexes, [0, 1, 2]);
    }

    #[test]
    fn tool_calls_are_joined_by_index_with_what_a_whole_call_has() {
        let choices = chat_choices(&[
            r#"[{"index":0,"delta":{"role":"assistant","content":null,"tool_calls":[{"index":1,"id":"t1","type":"function","function":{"name":"get","arguments":""}}]}}]"#,
            r#"[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"t0","type":"function","function":{"name":"now"}}]}}]"#,
            r#"[{"index":0,"delta":{"tool_calls":[{"index":1,"id":"t1","type":"function","function":{"name":"get_weather","arguments":"{\"a\""}}]}}]"#,
            r#"[{"index":0,"delta":{"tool_calls":[{"index":1,"id":null,"function":{"name":"","arguments":":1}"}}]},"finish_reason":"tool_calls"}]"#,
        ]);
        let expected = r#"{"role":"assistant","content":"","tool_calls":[
            {"id":"t0","type":"function","function":{"name":"now","arguments":""}},
            {"id":"t1","type":"function","function":{"name":"get_weather","arguments":"{\"a\":1}"}}]}"#;
        assert_eq!(
            choices[0]["message"],
            serde_json::from_str::<Json>(expected).unwrap()
        );
        let without_index = chat_choices(&[
            r#"[{"delta":{"tool_calls":[{"id":"a","function":{"name":"f","arguments":"1"}}]}}]"#,
            r#"[{"delta":{"tool_calls":[{"function":{"arguments":"2"}}]}}]"#,
            r#"[{"delta":{"tool_calls":[{"id":"b","function":{"name":"g","arguments":"3"}}]}}]"#,
        ]);
        let calls = &without_index[0]["message"]["tool_calls"];
        assert_eq!(
            (
                &calls[0]["function"]["arguments"],
                &calls[1]["function"]["arguments"]
            ),
            (&"12".into(), &"3".into())
        );
        let old = chat_choices(&[
            r#"[{"delta":{"function_call":{"name":"f","arguments":""}}}]"#,
            r#"[{"delta":{"function_call":{"arguments":"{}"}}}]"#,
        ]);
        assert_eq!(
            old[0]["message"]["function_call"],
            serde_json::json!({"name": "f", "arguments": "{}"})
        );
    }

    #[test]
    fn reasoning_and_refusals_are_joined_and_nulls_stay() {
        let choices = chat_choices(&[
            r#"[{"index":0,"delta":{"role":"assistant","content":"","reasoning_content":null,"refusal":null},"logprobs":null}]"#,
            r#"[{"index":0,"delta":{"reasoning_content":"th","reasoning":"x"},"logprobs":null}]"#,
            r#"[{"index":0,"delta":{"reasoning_content":"ink","reasoning":"y"},"stop_reason":7}]"#,
        ]);
        let message = serde_json::json!({"role": "assistant", "content": "", "reasoning_content": "think", "refusal": null, "reasoning": "xy"});
        assert_eq!(
            (
                &choices[0]["message"],
                &choices[0]["logprobs"],
                &choices[0]["stop_reason"]
            ),
            (&message, &Json::Null, &7.into())
        );
    }

    #[test]
    fn logprobs_of_both_kinds_are_appended() {
        let chat = chat_choices(&[
            r#"[{"delta":{"content":"a"},"logprobs":{"content":[{"token":"a","logprob":-0.50}],"refusal":null}}]"#,
            r#"[{"delta":{},"logprobs":null}]"#,
            r#"[{"delta":{"content":"b"},"logprobs":{"content":[ {"token":"b"} ],"refusal":null},"token_ids":[1]}]"#,
            r#"[{"delta":{},"logprobs":{"content":[]},"token_ids":[2]}]"#,
        ]);
        let expected = serde_json::json!({"content": [{"token": "a", "logprob": -0.5}, {"token": "b"}], "refusal": null});
        assert_eq!(
            (&chat[0]["logprobs"], &chat[0]["token_ids"]),
            (&expected, &serde_json::json!([1, 2]))
        );
        let mut assembler = Assembler::new(AnswerKind::Completion);
        for chunk in [
            r#"{"choices":[{"index":0,"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[null],"top_logprobs":[{"a":-1}],"text_offset":[0]}}]}"#,
            r#"{"choices":[{"index":0,"text":"b","logprobs":{"tokens":["b"],"token_logprobs":[-2.0],"top_logprobs":[null],"text_offset":[1]},"finish_reason":"length"}]}"#,
            "[DONE]",
        ] {
            assembler.push(chunk.as_bytes()).unwrap();
        }
        let expected = r#"{"choices":[{"index":0,"text":"ab","logprobs":{"tokens":["a","b"],"token_logprobs":[null,-2.0],"top_logprobs":[{"a":-1},null],"text_offset":[0,1]},"finish_reason":"length"}],"object":"text_completion"}"#;
        assert_eq!(assembler.finish().unwrap(), expected);
    }

    #[test]
    fn a_stream_that_failed_or_was_cut_gives_no_answer() {
        let mut assembler = Assembler::new(AnswerKind::Chat);
        assert_eq!(
            assembler.push(br#"{"choices":[{"index":0,"delta":{"content":"a"}}]}"#),
            Ok(Push::More)
        );
        assert_eq!(assembler.finish(), Err(AssembleError::Unfinished));
        assert_eq!(
            Assembler::new(AnswerKind::Chat).finish(),
            Err(AssembleError::Unfinished)
        );
        assert_eq!(
            chat(&[]),
            Err(AssembleError::Unfinished),
            "an end without a beginning"
        );
        let body = recording("vllm", "sigterm-mid-stream").body();
        let mut assembler = Assembler::new(AnswerKind::Chat);
        let pushed: Vec<Push> = events(&body)
            .map(|event| assembler.push(&event.data).unwrap())
            .collect();
        let error = pushed.iter().find_map(|push| {
            if let Push::Error(error) = push {
                Some(error)
            } else {
                None
            }
        });
        assert_eq!(
            (error.unwrap().status, pushed.last()),
            (Some(500), Some(&Push::Done))
        );
        assert_eq!(assembler.finish(), Err(AssembleError::Failed));
        let mut assembler = Assembler::new(AnswerKind::Chat);
        for event in events(&recording("llamacpp", "sigterm-mid-stream").body())
            .filter(|event| !event.is_comment)
        {
            assembler.push(&event.data).unwrap();
        }
        assert_eq!(assembler.finish(), Err(AssembleError::Unfinished));
    }

    #[test]
    fn what_cannot_be_read_or_held_is_refused() {
        for bad in ["{", "[]", r#"{"choices":{}}"#, r#"{"choices":[1]}"#, ""] {
            assert!(
                matches!(chat(&[bad]), Err(AssembleError::BadChunk { .. })),
                "{bad}"
            );
        }
        let chunk = format!(
            r#"{{"choices":[{{"delta":{{"content":"{}"}}}}]}}"#,
            "x".repeat(100)
        );
        let mut assembler = Assembler::with_limit(AnswerKind::Chat, 1000);
        let refused = (0..20).find_map(|_| assembler.push(chunk.as_bytes()).err());
        assert_eq!(refused, Some(AssembleError::TooLarge { max_bytes: 1000 }));
        let mut assembler = Assembler::new(AnswerKind::Chat);
        let chunks = (0..=PARTS_MAX_COUNT)
            .map(|index| format!(r#"{{"choices":[{{"index":{index},"delta":{{}}}}]}}"#));
        let refused = chunks
            .into_iter()
            .find_map(|chunk| assembler.push(chunk.as_bytes()).err());
        assert_eq!(
            refused,
            Some(AssembleError::TooManyParts {
                max_count: PARTS_MAX_COUNT
            })
        );
    }
}
