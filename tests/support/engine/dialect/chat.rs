//! `/v1/chat/completions` in the words of each kind, key for key as recorded.

use super::logprobs;
use super::reply::{Burst, Reply, data, quoted, timings};
use crate::engine::options::Kind;

/// vLLM's fingerprint of the recorded version.
pub const VLLM_FINGERPRINT: &str = "vllm-0.32.0-3a50ea54";
/// llama.cpp's fingerprint of the recorded version.
pub const LLAMACPP_FINGERPRINT: &str = "b11434-unknown";
/// Pieces in which a tool call's arguments come.
const ARGUMENT_PIECES: [&str; 3] = ["{\"city\":", "\"t0", "\"}"];

/// The role chunk of each choice; llama.cpp sends it together with the first token (see [`token`]).
pub fn opening(reply: &Reply) -> Vec<Burst> {
    if reply.kind == Kind::Llamacpp && reply.tool.is_none() {
        return Vec::new();
    }
    (0..reply.n)
        .rev()
        .map(|choice| Burst::one(role(reply, choice)))
        .collect()
}

/// The event of one token; for a tool call the tokens show nothing until [`closing`].
pub fn token(reply: &Reply, choice: u64, index: u64, text: &str) -> String {
    if reply.tool.is_some() {
        return String::new();
    }
    let delta = match reply.kind {
        Kind::Sglang => format!(r#"{{"reasoning_content":null,"content":{}}}"#, quoted(text)),
        _ => format!(r#"{{"content":{}}}"#, quoted(text)),
    };
    let probabilities = reply
        .logprobs
        .map(|_| logprobs::chat(reply, &[text.to_owned()]));
    // vLLM ends a choice on its last content chunk, the others on one of their own.
    let finish = (reply.kind == Kind::Vllm && reply.is_last(index)).then(|| reply.finish_reason());
    let event = chunk(
        reply,
        &choice_json(reply, choice, &delta, probabilities.as_deref(), finish),
        index + 1,
        finish,
    );
    if reply.kind == Kind::Llamacpp && index == 0 {
        role(reply, choice) + &event
    } else {
        event
    }
}

/// Tool calls, finish chunks, the usage chunk, `[DONE]`.
pub fn closing(reply: &Reply) -> Vec<Burst> {
    let mut bursts = Vec::new();
    if let Some(name) = &reply.tool {
        for choice in (0..reply.n).rev() {
            bursts.extend(tool_deltas(reply, choice, name).into_iter().map(Burst::one));
        }
    }
    let mut last = Vec::new();
    if reply.kind != Kind::Vllm || reply.tool.is_some() || reply.tokens == 0 {
        for choice in (0..reply.n).rev() {
            let delta = match reply.kind {
                Kind::Sglang => r#"{"reasoning_content":null}"#,
                Kind::Vllm => r#"{"content":""}"#,
                _ => "{}",
            };
            let finish = Some(reply.finish_reason());
            let choice = choice_json(reply, choice, delta, None, finish);
            last.push(chunk(reply, &choice, reply.tokens, finish));
        }
    }
    if reply.include_usage {
        last.push(data(&envelope(reply, "", &usage_tail(reply))));
    }
    if reply.kind == Kind::Llamacpp {
        // llama.cpp sends the finish chunk and the usage chunk together.
        bursts.push(Burst::of(last));
    } else {
        bursts.extend(last.into_iter().map(Burst::one));
    }
    bursts.push(Burst::one("data: [DONE]\n\n".to_owned()));
    bursts
}

/// The answer that is not streamed.
pub fn whole(reply: &Reply) -> String {
    let text = quoted(&reply.full_text());
    let choices: Vec<String> = (0..reply.n)
        .map(|choice| whole_choice(reply, choice, &text))
        .collect();
    let (choices, usage) = (choices.join(","), usage(reply));
    let (id, created, model) = (&reply.id, reply.created, quoted(&reply.model));
    match reply.kind {
        Kind::Llamacpp => format!(
            r#"{{"choices":[{choices}],"created":{created},"model":{model},"system_fingerprint":"{LLAMACPP_FINGERPRINT}","object":"chat.completion","usage":{usage},"id":"chatcmpl-{id}","timings":{}}}"#,
            timings(reply)
        ),
        Kind::Vllm => format!(
            r#"{{"id":"chatcmpl-{id}","object":"chat.completion","created":{created},"model":{model},"choices":[{choices}],"service_tier":null,"system_fingerprint":"{VLLM_FINGERPRINT}","usage":{usage},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}}"#
        ),
        Kind::Sglang => format!(
            r#"{{"id":"{id}","object":"chat.completion","created":{created},"model":{model},"choices":[{choices}],"usage":{usage},"metadata":{}}}"#,
            sglang_metadata(reply)
        ),
        Kind::Openai => format!(
            r#"{{"id":"chatcmpl-{id}","object":"chat.completion","created":{created},"model":{model},"choices":[{choices}],"usage":{usage},"service_tier":"default","system_fingerprint":"fp_fake"}}"#
        ),
    }
}

/// SGLang's `metadata`.
pub fn sglang_metadata(reply: &Reply) -> String {
    let end = reply.tokens;
    format!(
        r#"{{"weight_version":"default","weight_versions":[{{"version":"default","start":0,"end":{end}}}]}}"#
    )
}

/// The `usage` of an answer that is not streamed.
pub fn usage(reply: &Reply) -> String {
    let (prompt, completion) = (reply.prompt_tokens, reply.completion_tokens());
    let total = prompt + completion;
    match reply.kind {
        Kind::Llamacpp => format!(
            r#"{{"completion_tokens":{completion},"prompt_tokens":{prompt},"total_tokens":{total},"prompt_tokens_details":{{"cached_tokens":0}}}}"#
        ),
        Kind::Vllm => format!(
            r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion},"prompt_tokens_details":null,"completion_tokens_details":null}}"#
        ),
        Kind::Sglang => format!(
            r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion},"prompt_tokens_details":null,"reasoning_tokens":0,"completion_tokens_details":null}}"#
        ),
        Kind::Openai => format!(
            r#"{{"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{total},"prompt_tokens_details":{{"cached_tokens":0,"audio_tokens":0}},"completion_tokens_details":{{"reasoning_tokens":0}}}}"#
        ),
    }
}

/// The usage that a chunk in the middle carries, when every chunk does; `so_far` tokens are out.
pub fn running_usage(reply: &Reply, so_far: u64) -> String {
    let prompt = reply.prompt_tokens;
    let total = prompt + so_far;
    format!(
        r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{so_far},"completion_tokens_details":null}}"#
    )
}

fn whole_choice(reply: &Reply, choice: u64, text: &str) -> String {
    let finish = reply.finish_reason();
    let call = reply
        .tool
        .as_deref()
        .map(|name| tool_call(reply, choice, name, &ARGUMENT_PIECES.concat(), None));
    let texts = || {
        (0..reply.tokens)
            .map(|index| reply.token_text(index))
            .collect::<Vec<String>>()
    };
    let scores = reply
        .logprobs
        .filter(|_| call.is_none())
        .map(|_| logprobs::chat(reply, &texts()));
    let (content, calls) = match &call {
        Some(call) if reply.kind == Kind::Llamacpp => {
            ("\"\"", format!(r#","tool_calls":[{call}]"#))
        }
        Some(call) => ("null", format!(r#","tool_calls":[{call}]"#)),
        None => (text, String::new()),
    };
    let or_null = scores.as_deref().unwrap_or("null");
    match reply.kind {
        Kind::Llamacpp => {
            let scores = scores
                .map(|scores| format!(r#","logprobs":{scores}"#))
                .unwrap_or_default();
            format!(
                r#"{{"finish_reason":"{finish}","index":{choice},"message":{{"role":"assistant","content":{content}{calls}}}{scores}}}"#
            )
        }
        Kind::Vllm => format!(
            r#"{{"index":{choice},"message":{{"role":"assistant","content":{content},"refusal":null,"annotations":null,"audio":null,"function_call":null{calls},"reasoning":null}},"logprobs":{or_null},"finish_reason":"{finish}","stop_reason":null,"token_ids":null,"routed_experts":null}}"#
        ),
        Kind::Sglang => format!(
            r#"{{"index":{choice},"message":{{"role":"assistant","content":{content},"reasoning_content":null{calls}}},"logprobs":{or_null},"finish_reason":"{finish}","matched_stop":null}}"#
        ),
        Kind::Openai => format!(
            r#"{{"index":{choice},"message":{{"role":"assistant","content":{content}{calls},"refusal":null,"annotations":[]}},"logprobs":{or_null},"finish_reason":"{finish}"}}"#
        ),
    }
}

fn role(reply: &Reply, choice: u64) -> String {
    let delta = match reply.kind {
        Kind::Llamacpp => r#"{"role":"assistant","content":null}"#,
        Kind::Vllm => r#"{"role":"assistant","content":""}"#,
        Kind::Sglang => r#"{"reasoning_content":null,"role":"assistant","content":""}"#,
        Kind::Openai => r#"{"role":"assistant","content":"","refusal":null}"#,
    };
    if reply.kind == Kind::Vllm {
        let choice =
            format!(r#"{{"index":{choice},"delta":{delta},"logprobs":null,"finish_reason":null}}"#);
        let tail = format!(
            r#"{},"prompt_token_ids":null,"prompt_text":null"#,
            continuous_tail(reply, 0)
        );
        return data(&envelope(reply, &choice, &tail));
    }
    chunk(
        reply,
        &choice_json(reply, choice, delta, None, None),
        0,
        None,
    )
}

/// One entry of `choices`.
fn choice_json(
    reply: &Reply,
    choice: u64,
    delta: &str,
    scores: Option<&str>,
    finish: Option<&str>,
) -> String {
    let reason = finish.map_or("null".to_owned(), |finish| format!("\"{finish}\""));
    let or_null = scores.unwrap_or("null");
    match reply.kind {
        Kind::Llamacpp => {
            let scores = scores
                .map(|scores| format!(r#","logprobs":{scores}"#))
                .unwrap_or_default();
            format!(r#"{{"finish_reason":{reason},"index":{choice},"delta":{delta}{scores}}}"#)
        }
        Kind::Vllm => {
            let stop = if finish.is_some() {
                r#","stop_reason":null"#
            } else {
                ""
            };
            format!(
                r#"{{"index":{choice},"delta":{delta},"logprobs":{or_null},"finish_reason":{reason}{stop},"token_ids":null}}"#
            )
        }
        Kind::Sglang => format!(
            r#"{{"index":{choice},"delta":{delta},"logprobs":{or_null},"finish_reason":{reason},"matched_stop":null}}"#
        ),
        Kind::Openai => {
            format!(
                r#"{{"index":{choice},"delta":{delta},"logprobs":{or_null},"finish_reason":{reason}}}"#
            )
        }
    }
}

/// One event with one choice; `so_far` tokens are out.
fn chunk(reply: &Reply, choice: &str, so_far: u64, finish: Option<&str>) -> String {
    let mut tail = continuous_tail(reply, so_far);
    if finish.is_some() && !reply.include_usage {
        match reply.kind {
            Kind::Vllm => tail.push_str(&format!(r#","system_fingerprint":"{VLLM_FINGERPRINT}""#)),
            Kind::Llamacpp => tail.push_str(&format!(r#","timings":{}"#, timings(reply))),
            Kind::Sglang | Kind::Openai => {}
        }
    }
    data(&envelope(reply, choice, &tail))
}

fn continuous_tail(reply: &Reply, so_far: u64) -> String {
    match (reply.continuous, reply.kind) {
        (true, _) => format!(r#","usage":{}"#, running_usage(reply, so_far)),
        // OpenAI says `null` in every chunk but the last.
        (false, Kind::Openai) if reply.include_usage => r#","usage":null"#.to_owned(),
        (false, _) => String::new(),
    }
}

fn usage_tail(reply: &Reply) -> String {
    let (prompt, completion) = (reply.prompt_tokens, reply.completion_tokens());
    let total = prompt + completion;
    match reply.kind {
        Kind::Llamacpp => format!(r#","usage":{},"timings":{}"#, usage(reply), timings(reply)),
        Kind::Vllm => format!(
            r#","usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion}}},"system_fingerprint":"{VLLM_FINGERPRINT}""#
        ),
        Kind::Sglang | Kind::Openai => format!(r#","usage":{}"#, usage(reply)),
    }
}

/// The fields around `choices`.
fn envelope(reply: &Reply, choices: &str, tail: &str) -> String {
    let (id, created, model) = (&reply.id, reply.created, quoted(&reply.model));
    match reply.kind {
        Kind::Llamacpp => format!(
            r#"{{"choices":[{choices}],"created":{created},"id":"chatcmpl-{id}","model":{model},"system_fingerprint":"{LLAMACPP_FINGERPRINT}","object":"chat.completion.chunk"{tail}}}"#
        ),
        Kind::Vllm => format!(
            r#"{{"id":"chatcmpl-{id}","object":"chat.completion.chunk","created":{created},"model":{model},"choices":[{choices}]{tail}}}"#
        ),
        Kind::Sglang => format!(
            r#"{{"id":"{id}","object":"chat.completion.chunk","created":{created},"model":{model},"choices":[{choices}]{tail}}}"#
        ),
        Kind::Openai => format!(
            r#"{{"id":"chatcmpl-{id}","object":"chat.completion.chunk","created":{created},"model":{model},"service_tier":"default","system_fingerprint":"fp_fake","choices":[{choices}]{tail}}}"#
        ),
    }
}

fn tool_deltas(reply: &Reply, choice: u64, name: &str) -> Vec<String> {
    let event = |call: String| {
        let delta = match reply.kind {
            Kind::Sglang => format!(r#"{{"reasoning_content":null,"tool_calls":[{call}]}}"#),
            _ => format!(r#"{{"tool_calls":[{call}]}}"#),
        };
        chunk(
            reply,
            &choice_json(reply, choice, &delta, None, None),
            reply.tokens,
            None,
        )
    };
    let mut events = vec![event(tool_call(reply, choice, name, "", Some(0)))];
    for piece in ARGUMENT_PIECES {
        events.push(event(format!(
            r#"{{"index":0,"function":{{"arguments":{}}}}}"#,
            quoted(piece)
        )));
    }
    events
}

/// A whole tool call; `index` is for streams.
fn tool_call(
    reply: &Reply,
    choice: u64,
    name: &str,
    arguments: &str,
    index: Option<u64>,
) -> String {
    let (name, arguments) = (quoted(name), quoted(arguments));
    let id = format!("call_{}{choice}", reply.id);
    let index = index
        .map(|index| format!(r#""index":{index},"#))
        .unwrap_or_default();
    match reply.kind {
        Kind::Llamacpp if index.is_empty() => format!(
            r#"{{"type":"function","function":{{"name":{name},"arguments":{arguments}}},"id":"{id}"}}"#
        ),
        _ => format!(
            r#"{{{index}"id":"{id}","type":"function","function":{{"name":{name},"arguments":{arguments}}}}}"#
        ),
    }
}
