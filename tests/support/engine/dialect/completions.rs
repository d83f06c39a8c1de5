//! `/v1/completions` in the words of each kind, key for key as recorded.

use super::chat::{LLAMACPP_FINGERPRINT, VLLM_FINGERPRINT, running_usage, sglang_metadata, usage};
use super::logprobs;
use super::reply::{Burst, Reply, data, quoted, timings};
use crate::engine::options::Kind;

/// The event of one token. The last one carries the finish reason, except with llama.cpp.
pub fn token(reply: &Reply, choice: u64, index: u64, text: &str) -> String {
    let finish =
        (reply.kind != Kind::Llamacpp && reply.is_last(index)).then(|| reply.finish_reason());
    let scores = reply
        .logprobs
        .map(|_| logprobs::completions(reply, &[text.to_owned()]));
    let choice = choice_json(reply, choice, text, scores.as_deref(), finish);
    let usage = if reply.continuous {
        Some(running_usage(reply, index + 1))
    } else {
        None
    };
    let tail = match (usage, reply.kind) {
        (Some(usage), _) => format!(r#","usage":{usage}"#),
        (None, Kind::Sglang) => r#","usage":null"#.to_owned(),
        (None, Kind::Openai) if reply.include_usage => r#","usage":null"#.to_owned(),
        (None, _) => String::new(),
    };
    data(&envelope(reply, &choice, &tail))
}

/// llama.cpp's finish chunk (with usage, asked for or not), the usage chunk of the others, `[DONE]`.
pub fn closing(reply: &Reply) -> Vec<Burst> {
    let mut bursts = Vec::new();
    if reply.kind == Kind::Llamacpp {
        for choice in (0..reply.n).rev() {
            let choice = choice_json(reply, choice, "", None, Some(reply.finish_reason()));
            let tail = format!(r#","usage":{}"#, usage(reply));
            bursts.push(Burst::one(data(&envelope(reply, &choice, &tail))));
        }
    } else if reply.include_usage {
        bursts.push(Burst::one(data(&envelope(reply, "", &usage_tail(reply)))));
    }
    bursts.push(Burst::one("data: [DONE]\n\n".to_owned()));
    bursts
}

/// The answer that is not streamed.
pub fn whole(reply: &Reply) -> String {
    let texts: Vec<String> = (0..reply.tokens)
        .map(|index| reply.token_text(index))
        .collect();
    let scores = reply.logprobs.map(|_| logprobs::completions(reply, &texts));
    let choices: Vec<String> = (0..reply.n)
        .map(|choice| whole_choice(reply, choice, &texts.concat(), scores.as_deref()))
        .collect();
    let (choices, usage) = (choices.join(","), usage(reply));
    match reply.kind {
        Kind::Llamacpp => envelope(reply, &choices, &format!(r#","usage":{usage}"#)),
        Kind::Vllm => envelope(
            reply,
            &choices,
            &format!(
                r#","service_tier":null,"system_fingerprint":"{VLLM_FINGERPRINT}","usage":{usage},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null"#
            ),
        ),
        Kind::Sglang => envelope(
            reply,
            &choices,
            &format!(r#","usage":{usage},"metadata":{}"#, sglang_metadata(reply)),
        ),
        Kind::Openai => envelope(reply, &choices, &format!(r#","usage":{usage}"#)),
    }
}

fn whole_choice(reply: &Reply, choice: u64, text: &str, scores: Option<&str>) -> String {
    let (text, finish, scores) = (
        quoted(text),
        reply.finish_reason(),
        scores.unwrap_or("null"),
    );
    match reply.kind {
        Kind::Llamacpp => format!(
            r#"{{"text":{text},"index":{choice},"logprobs":{scores},"finish_reason":"{finish}"}}"#
        ),
        Kind::Vllm => format!(
            r#"{{"index":{choice},"text":{text},"logprobs":{scores},"finish_reason":"{finish}","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}}"#
        ),
        Kind::Sglang => format!(
            r#"{{"index":{choice},"text":{text},"logprobs":{scores},"finish_reason":"{finish}","matched_stop":null}}"#
        ),
        Kind::Openai => {
            format!(
                r#"{{"text":{text},"index":{choice},"logprobs":{scores},"finish_reason":"{finish}"}}"#
            )
        }
    }
}

fn choice_json(
    reply: &Reply,
    choice: u64,
    text: &str,
    scores: Option<&str>,
    finish: Option<&str>,
) -> String {
    let (text, scores) = (quoted(text), scores.unwrap_or("null"));
    let finish = finish.map_or("null".to_owned(), |finish| format!("\"{finish}\""));
    match reply.kind {
        Kind::Llamacpp | Kind::Openai => {
            format!(
                r#"{{"text":{text},"index":{choice},"logprobs":{scores},"finish_reason":{finish}}}"#
            )
        }
        Kind::Vllm => format!(
            r#"{{"index":{choice},"text":{text},"logprobs":{scores},"finish_reason":{finish},"stop_reason":null,"prompt_token_ids":null,"token_ids":null}}"#
        ),
        Kind::Sglang => format!(
            r#"{{"index":{choice},"text":{text},"logprobs":{scores},"finish_reason":{finish},"matched_stop":null}}"#
        ),
    }
}

fn usage_tail(reply: &Reply) -> String {
    let (prompt, completion) = (reply.prompt_tokens, reply.completion_tokens());
    let total = prompt + completion;
    match reply.kind {
        Kind::Vllm => format!(
            r#","usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion}}},"system_fingerprint":"{VLLM_FINGERPRINT}""#
        ),
        Kind::Sglang => format!(
            r#","usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion},"reasoning_tokens":0}}"#
        ),
        Kind::Llamacpp | Kind::Openai => format!(r#","usage":{}"#, usage(reply)),
    }
}

/// The fields around `choices`. llama.cpp puts the id after the usage, and `timings` where the usage is.
fn envelope(reply: &Reply, choices: &str, tail: &str) -> String {
    let (id, created, model) = (&reply.id, reply.created, quoted(&reply.model));
    match reply.kind {
        Kind::Llamacpp => {
            let timing = if tail.is_empty() {
                String::new()
            } else {
                format!(r#","timings":{}"#, timings(reply))
            };
            format!(
                r#"{{"choices":[{choices}],"created":{created},"model":{model},"system_fingerprint":"{LLAMACPP_FINGERPRINT}","object":"text_completion"{tail},"id":"chatcmpl-{id}"{timing}}}"#
            )
        }
        Kind::Sglang => format!(
            r#"{{"id":"{id}","object":"text_completion","created":{created},"model":{model},"choices":[{choices}]{tail}}}"#
        ),
        Kind::Vllm | Kind::Openai => format!(
            r#"{{"id":"cmpl-{id}","object":"text_completion","created":{created},"model":{model},"choices":[{choices}]{tail}}}"#
        ),
    }
}
