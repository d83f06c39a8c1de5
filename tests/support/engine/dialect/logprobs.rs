//! Log probabilities, in the key order of each engine.

use super::reply::{Reply, quoted};
use crate::engine::options::Kind;

/// The chat shape for these tokens: `{"content":[...]}`.
pub fn chat(reply: &Reply, texts: &[String]) -> String {
    let top = reply.logprobs.unwrap_or(0);
    let entries: Vec<String> = texts
        .iter()
        .map(|text| {
            let alternatives: Vec<String> = (0..top)
                .map(|rank| entry(reply.kind, text, rank, None))
                .collect();
            entry(reply.kind, text, 0, Some(&alternatives.join(",")))
        })
        .collect();
    format!(r#"{{"content":[{}]}}"#, entries.join(","))
}

/// The completions shape of vLLM and SGLang; llama.cpp uses the chat shape for both.
pub fn completions(reply: &Reply, texts: &[String]) -> String {
    if reply.kind == Kind::Llamacpp {
        return chat(reply, texts);
    }
    let tokens: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
    let mut offsets = Vec::new();
    let mut offset = 0;
    for text in texts {
        offsets.push(offset.to_string());
        offset += text.chars().count();
    }
    let scores = vec!["-0.5"; texts.len()].join(",");
    let tops: Vec<String> = tokens
        .iter()
        .map(|token| format!("{{{token}:-0.5}}"))
        .collect();
    format!(
        r#"{{"text_offset":[{}],"token_logprobs":[{scores}],"tokens":[{}],"top_logprobs":[{}]}}"#,
        offsets.join(","),
        tokens.join(","),
        tops.join(",")
    )
}

fn entry(kind: Kind, text: &str, rank: usize, top: Option<&str>) -> String {
    let text = if rank == 0 {
        text.to_owned()
    } else {
        format!("{text}~{rank}")
    };
    let bytes: Vec<String> = text.bytes().map(|byte| byte.to_string()).collect();
    let (token, bytes, score) = (quoted(&text), bytes.join(","), -0.5 - rank as f64);
    let tail = top
        .map(|top| format!(r#","top_logprobs":[{top}]"#))
        .unwrap_or_default();
    match kind {
        Kind::Llamacpp => {
            format!(
                r#"{{"id":{},"token":{token},"bytes":[{bytes}],"logprob":{score:?}{tail}}}"#,
                100 + rank
            )
        }
        Kind::Sglang => {
            format!(r#"{{"token":{token},"bytes":[{bytes}],"logprob":{score:?}{tail}}}"#)
        }
        Kind::Vllm | Kind::Openai => {
            format!(r#"{{"token":{token},"logprob":{score:?},"bytes":[{bytes}]{tail}}}"#)
        }
    }
}
