//! `/v1/messages` (Anthropic), as the engines speak it; llama.cpp's stream lacks `message_start`, as recorded.

use super::reply::{Burst, Reply, named, quoted};
use crate::engine::options::Kind;

pub fn opening(reply: &Reply) -> Vec<Burst> {
    if reply.kind == Kind::Llamacpp {
        return Vec::new();
    }
    let (id, model, prompt) = (id(reply), quoted(&reply.model), reply.prompt_tokens);
    let reasons = if reply.kind == Kind::Sglang {
        ""
    } else {
        r#""stop_reason":null,"stop_sequence":null,"#
    };
    let start = format!(
        r#"{{"type":"message_start","message":{{"id":"{id}","type":"message","role":"assistant","content":[],"model":{model},{reasons}"usage":{{"input_tokens":{prompt},"output_tokens":0}}}}}}"#
    );
    vec![
        Burst::one(named("message_start", &start)),
        Burst::one(block_start(reply.kind)),
    ]
}

/// The event of one token; llama.cpp sends the block's start together with the first.
pub fn token(reply: &Reply, index: u64, text: &str) -> String {
    let text = quoted(text);
    if reply.kind == Kind::Vllm {
        return named(
            "content_block_delta",
            &format!(
                r#"{{"type":"content_block_delta","delta":{{"type":"text_delta","text":{text}}},"index":0}}"#
            ),
        );
    }
    let delta = named(
        "content_block_delta",
        &format!(
            r#"{{"type":"content_block_delta","index":0,"delta":{{"type":"text_delta","text":{text}}}}}"#
        ),
    );
    if reply.kind == Kind::Llamacpp && index == 0 {
        block_start(reply.kind) + &delta
    } else {
        delta
    }
}

pub fn closing(reply: &Reply) -> Vec<Burst> {
    let (stop, tokens, prompt) = (
        stop_reason(reply),
        reply.completion_tokens(),
        reply.prompt_tokens,
    );
    let (sequence, usage) = match reply.kind {
        Kind::Sglang => ("", format!(r#"{{"output_tokens":{tokens}}}"#)),
        Kind::Llamacpp => (
            r#","stop_sequence":null"#,
            format!(r#"{{"output_tokens":{tokens}}}"#),
        ),
        _ => (
            r#","stop_sequence":null"#,
            format!(r#"{{"input_tokens":{prompt},"output_tokens":{tokens}}}"#),
        ),
    };
    let delta = format!(
        r#"{{"type":"message_delta","delta":{{"stop_reason":"{stop}"{sequence}}},"usage":{usage}}}"#
    );
    let events = vec![
        named(
            "content_block_stop",
            r#"{"type":"content_block_stop","index":0}"#,
        ),
        named("message_delta", &delta),
        named("message_stop", r#"{"type":"message_stop"}"#),
    ];
    if reply.kind == Kind::Llamacpp {
        return vec![Burst::of(events)];
    }
    events.into_iter().map(Burst::one).collect()
}

pub fn whole(reply: &Reply) -> String {
    let (id, model, stop) = (id(reply), quoted(&reply.model), stop_reason(reply));
    let (text, prompt, tokens) = (
        quoted(&reply.full_text()),
        reply.prompt_tokens,
        reply.completion_tokens(),
    );
    let (sequence, cached) = match reply.kind {
        Kind::Llamacpp => (
            r#","stop_sequence":null"#,
            r#""cache_read_input_tokens":0,"#,
        ),
        _ => ("", ""),
    };
    format!(
        r#"{{"id":"{id}","type":"message","role":"assistant","content":[{{"type":"text","text":{text}}}],"model":{model},"stop_reason":"{stop}"{sequence},"usage":{{{cached}"input_tokens":{prompt},"output_tokens":{tokens}}}}}"#
    )
}

fn block_start(kind: Kind) -> String {
    if kind == Kind::Vllm {
        let json =
            r#"{"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}"#;
        return named("content_block_start", json);
    }
    named(
        "content_block_start",
        r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#,
    )
}

fn id(reply: &Reply) -> String {
    match reply.kind {
        Kind::Vllm | Kind::Llamacpp => format!("chatcmpl-{}", reply.id),
        Kind::Sglang | Kind::Openai => format!("msg_{}", reply.id),
    }
}

fn stop_reason(reply: &Reply) -> &'static str {
    if reply.cut { "max_tokens" } else { "end_turn" }
}
