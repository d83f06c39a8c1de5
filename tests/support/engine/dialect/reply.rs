//! A reply being generated: what all dialects share, and the choice of the dialect's words.

use super::ask::{Ask, Dialect};
use super::{chat, completions, messages, responses};
use crate::engine::behave::{Behave, Text};
use crate::engine::options::Kind;

/// Events that an engine sends in one chunk.
#[derive(Debug, PartialEq, Eq)]
pub struct Burst {
    pub text: String,
    pub events: usize,
}

/// A reply: everything its events are made of.
#[derive(Debug)]
pub struct Reply {
    pub kind: Kind,
    pub dialect: Dialect,
    /// The bare id; each dialect puts its prefix in front.
    pub id: String,
    pub created: u64,
    pub model: String,
    pub prompt_tokens: u64,
    /// Tokens of each choice.
    pub tokens: u64,
    pub n: u64,
    pub include_usage: bool,
    /// Usage in every chunk.
    pub continuous: bool,
    pub logprobs: Option<usize>,
    pub tool: Option<String>,
    /// Whether the request's own limit ended it.
    pub cut: bool,
    /// The request's own limit.
    pub limit: Option<u64>,
    pub text: Option<Text>,
    pub chunk_bytes: Option<usize>,
}

impl Burst {
    pub fn one(text: String) -> Burst {
        Burst { text, events: 1 }
    }

    /// Events that go out together.
    pub fn of(texts: Vec<String>) -> Burst {
        Burst {
            events: texts.len(),
            text: texts.concat(),
        }
    }
}

impl Reply {
    /// `number` makes the id; `default_tokens` is the engine's own length.
    pub fn new(
        kind: Kind,
        ask: Ask,
        behave: &Behave,
        model: String,
        number: u64,
        default_tokens: u64,
    ) -> Reply {
        let wanted = match &behave.text {
            Some(Text::Each(texts)) => texts.len() as u64,
            _ => behave.tokens.unwrap_or(default_tokens),
        };
        let limit = ask.max_tokens.unwrap_or(u64::MAX);
        Reply {
            kind,
            dialect: ask.dialect,
            id: id(kind, number),
            created: crate::engine::out::unix_seconds(),
            model,
            prompt_tokens: ask.prompt_tokens,
            tokens: wanted.min(limit),
            n: ask.n,
            include_usage: ask.include_usage,
            continuous: (ask.continuous && ask.include_usage) || behave.usage_every_chunk,
            logprobs: ask.logprobs,
            cut: ask.tool.is_none() && wanted >= limit,
            tool: ask.tool,
            limit: ask.max_tokens,
            text: behave.text.clone(),
            chunk_bytes: behave.chunk_bytes,
        }
    }

    /// The text of token `index`, from 0: `t0`, ` t1`, ` t2` ...
    pub fn token_text(&self, index: u64) -> String {
        match &self.text {
            Some(Text::One(text)) => text.clone(),
            Some(Text::Each(texts)) => usize::try_from(index)
                .ok()
                .and_then(|index| texts.get(index))
                .cloned()
                .unwrap_or_default(),
            None if index == 0 => "t0".to_owned(),
            None => format!(" t{index}"),
        }
    }

    /// The whole text of a choice.
    pub fn full_text(&self) -> String {
        (0..self.tokens)
            .map(|index| self.token_text(index))
            .collect()
    }

    /// The events before the first token.
    pub fn opening(&self) -> Vec<Burst> {
        match self.dialect {
            Dialect::Chat => chat::opening(self),
            Dialect::Completions => Vec::new(),
            Dialect::Responses => responses::opening(self),
            Dialect::Messages => messages::opening(self),
        }
    }

    /// The events of token `index`, one for each choice, padded to `chunk_bytes`.
    pub fn token(&self, index: u64) -> Vec<Burst> {
        // Choices come interleaved, and not in their order: so do the engines.
        (0..self.n)
            .rev()
            .map(|choice| Burst::one(self.token_event(choice, index)))
            .collect()
    }

    /// The events after the last token, the end mark included.
    pub fn closing(&self) -> Vec<Burst> {
        match self.dialect {
            Dialect::Chat => chat::closing(self),
            Dialect::Completions => completions::closing(self),
            Dialect::Responses => responses::closing(self),
            Dialect::Messages => messages::closing(self),
        }
    }

    /// The answer to a request that does not stream.
    pub fn whole(&self) -> String {
        match self.dialect {
            Dialect::Chat => chat::whole(self),
            Dialect::Completions => completions::whole(self),
            Dialect::Responses => responses::whole(self),
            Dialect::Messages => messages::whole(self),
        }
    }

    /// One event that carries `text`.
    pub fn text_event(&self, choice: u64, index: u64, text: &str) -> String {
        match self.dialect {
            Dialect::Chat => chat::token(self, choice, index, text),
            Dialect::Completions => completions::token(self, choice, index, text),
            Dialect::Responses => responses::token(self, index, text),
            Dialect::Messages => messages::token(self, index, text),
        }
    }

    /// Whether this token is the last.
    pub fn is_last(&self, index: u64) -> bool {
        index + 1 == self.tokens
    }

    /// Tokens that the usage shows. llama.cpp counts those of one choice only, as recorded.
    pub fn completion_tokens(&self) -> u64 {
        if self.kind == Kind::Llamacpp {
            self.tokens
        } else {
            self.tokens * self.n
        }
    }

    /// The `finish_reason` of chat and completions.
    pub fn finish_reason(&self) -> &'static str {
        match (&self.tool, self.cut) {
            (Some(_), _) => "tool_calls",
            (None, true) => "length",
            (None, false) => "stop",
        }
    }

    fn token_event(&self, choice: u64, index: u64) -> String {
        let mut text = self.token_text(index);
        let event = self.text_event(choice, index, &text);
        match self.chunk_bytes {
            Some(size) if event.len() < size => {
                text.push_str(&"x".repeat(size - event.len()));
                self.text_event(choice, index, &text)
            }
            _ => event,
        }
    }
}

/// Ids look like the kind's own: 32 letters, 16 hex digits, 32 hex digits.
fn id(kind: Kind, number: u64) -> String {
    match kind {
        Kind::Llamacpp => format!("{number:A>32}"),
        Kind::Vllm => format!("{number:016x}"),
        Kind::Sglang | Kind::Openai => format!("{number:032x}"),
    }
}

/// A JSON string.
pub fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// `data: ...` and the empty line.
pub fn data(json: &str) -> String {
    format!("data: {json}\n\n")
}

/// `event: ...`, `data: ...` and the empty line.
pub fn named(event: &str, json: &str) -> String {
    format!("event: {event}\ndata: {json}\n\n")
}

/// llama.cpp's `timings`, of no particular speed.
pub fn timings(reply: &Reply) -> String {
    let (prompt, predicted) = (reply.prompt_tokens, reply.tokens);
    format!(
        r#"{{"cache_n":0,"prompt_n":{prompt},"prompt_ms":12.5,"prompt_per_token_ms":12.5,"prompt_per_second":80.0,"predicted_n":{predicted},"predicted_ms":12.5,"predicted_per_token_ms":12.5,"predicted_per_second":80.0}}"#
    )
}
