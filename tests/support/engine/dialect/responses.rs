//! `/v1/responses`: vLLM's and llama.cpp's events as recorded; SGLang's stream, of which there is no recording, follows vLLM's.

use super::reply::{Burst, Reply, named, quoted, timings};
use crate::engine::options::Kind;

pub fn opening(reply: &Reply) -> Vec<Burst> {
    if reply.kind == Kind::Llamacpp {
        return Vec::new();
    }
    opening_events(reply).into_iter().map(Burst::one).collect()
}

/// The event of one token; llama.cpp sends all that precedes it together with the first.
pub fn token(reply: &Reply, index: u64, text: &str) -> String {
    let (item, text) = (item_id(reply), quoted(text));
    if reply.kind == Kind::Llamacpp {
        let delta = named(
            "response.output_text.delta",
            &format!(
                r#"{{"type":"response.output_text.delta","item_id":"{item}","delta":{text}}}"#
            ),
        );
        return if index == 0 {
            opening_events(reply).concat() + &delta
        } else {
            delta
        };
    }
    let number = index + 4;
    named(
        "response.output_text.delta",
        &format!(
            r#"{{"content_index":0,"delta":{text},"item_id":"{item}","logprobs":[],"output_index":0,"sequence_number":{number},"type":"response.output_text.delta"}}"#
        ),
    )
}

pub fn closing(reply: &Reply) -> Vec<Burst> {
    let (item, text, part) = (item_id(reply), quoted(&reply.full_text()), part(reply));
    let message = message(reply);
    let object = object(reply, true);
    if reply.kind == Kind::Llamacpp {
        let timings = timings(reply);
        let events = [
            (
                "output_text.done",
                format!(r#""item_id":"{item}","text":{text}"#),
            ),
            (
                "content_part.done",
                format!(r#""item_id":"{item}","part":{part}"#),
            ),
            ("output_item.done", format!(r#""item":{message}"#)),
            (
                "completed",
                format!(r#""response":{object},"timings":{timings}"#),
            ),
        ];
        return vec![Burst::of(
            events
                .iter()
                .map(|(name, fields)| llamacpp_event(name, fields))
                .collect(),
        )];
    }
    let events = [
        (
            "output_text.done",
            format!(r#""content_index":0,"item_id":"{item}","logprobs":[],"output_index":0"#),
        ),
        (
            "content_part.done",
            format!(r#""content_index":0,"item_id":"{item}","output_index":0,"part":{part}"#),
        ),
        (
            "output_item.done",
            format!(r#""item":{message},"output_index":0"#),
        ),
        ("completed", format!(r#""response":{object}"#)),
    ];
    let numbered = events.iter().zip(reply.tokens + 4..);
    let extra = |name: &str| {
        if name == "output_text.done" {
            format!(r#","text":{text}"#)
        } else {
            String::new()
        }
    };
    numbered
        .map(|((name, fields), number)| Burst::one(event(name, fields, number, &extra(name))))
        .collect()
}

pub fn whole(reply: &Reply) -> String {
    if reply.kind != Kind::Llamacpp {
        return object(reply, true);
    }
    // The whole answer has other fields than the object in the stream.
    let (created, id, model, usage) =
        (reply.created, &reply.id, quoted(&reply.model), usage(reply));
    let (item, part) = (item_id(reply), part(reply));
    format!(
        r#"{{"completed_at":{created},"created_at":{created},"id":"resp_{id}","model":{model},"object":"response","output":[{{"content":[{part}],"id":"{item}","role":"assistant","status":"completed","type":"message"}}],"status":"completed","usage":{usage}}}"#
    )
}

fn opening_events(reply: &Reply) -> Vec<String> {
    let item = item_id(reply);
    let object = object(reply, false);
    if reply.kind == Kind::Llamacpp {
        let item_fields = format!(
            r#""item":{{"content":[],"id":"{item}","role":"assistant","status":"in_progress","type":"message"}}"#
        );
        return vec![
            llamacpp_event("created", &format!(r#""response":{object}"#)),
            llamacpp_event("in_progress", &format!(r#""response":{object}"#)),
            llamacpp_event("output_item.added", &item_fields),
            llamacpp_event(
                "content_part.added",
                &format!(r#""item_id":"{item}","part":{{"type":"output_text","text":""}}"#),
            ),
        ];
    }
    let item_fields = format!(
        r#""item":{{"id":"{item}","content":[],"role":"assistant","status":"in_progress","type":"message","phase":null}},"output_index":0"#
    );
    let part_fields = format!(
        r#""content_index":0,"item_id":"{item}","output_index":0,"part":{{"annotations":[],"text":"","type":"output_text","logprobs":[]}}"#
    );
    vec![
        event("created", &format!(r#""response":{object}"#), 0, ""),
        event("in_progress", &format!(r#""response":{object}"#), 1, ""),
        event("output_item.added", &item_fields, 2, ""),
        event("content_part.added", &part_fields, 3, ""),
    ]
}

fn llamacpp_event(name: &str, fields: &str) -> String {
    named(
        &format!("response.{name}"),
        &format!(r#"{{"type":"response.{name}",{fields}}}"#),
    )
}

fn event(name: &str, fields: &str, number: u64, extra: &str) -> String {
    let json =
        format!(r#"{{{fields},"sequence_number":{number}{extra},"type":"response.{name}"}}"#);
    named(&format!("response.{name}"), &json)
}

fn item_id(reply: &Reply) -> String {
    format!("msg_{}", reply.id)
}

fn part(reply: &Reply) -> String {
    let text = quoted(&reply.full_text());
    match reply.kind {
        Kind::Llamacpp => {
            format!(r#"{{"type":"output_text","annotations":[],"logprobs":[],"text":{text}}}"#)
        }
        _ => format!(r#"{{"annotations":[],"text":{text},"type":"output_text","logprobs":null}}"#),
    }
}

fn message(reply: &Reply) -> String {
    let (item, part) = (item_id(reply), part(reply));
    match reply.kind {
        Kind::Llamacpp => format!(
            r#"{{"type":"message","status":"completed","id":"{item}","content":[{part}],"role":"assistant"}}"#
        ),
        kind => {
            let phase = if kind == Kind::Sglang {
                "\"final_answer\""
            } else {
                "null"
            };
            format!(
                r#"{{"id":"{item}","content":[{part}],"role":"assistant","status":"completed","type":"message","phase":{phase}}}"#
            )
        }
    }
}

fn usage(reply: &Reply) -> String {
    let (prompt, tokens) = (reply.prompt_tokens, reply.completion_tokens());
    let total = prompt + tokens;
    match reply.kind {
        Kind::Llamacpp => format!(
            r#"{{"input_tokens":{prompt},"output_tokens":{tokens},"total_tokens":{total},"input_tokens_details":{{"cached_tokens":0}}}}"#
        ),
        Kind::Vllm => format!(
            r#"{{"input_tokens":{prompt},"input_tokens_details":{{"cached_tokens":0,"cache_write_tokens":0,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]}},"output_tokens":{tokens},"output_tokens_details":{{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]}},"total_tokens":{total}}}"#
        ),
        Kind::Sglang | Kind::Openai => format!(
            r#"{{"input_tokens":{prompt},"input_tokens_details":{{"cached_tokens":0,"cache_write_tokens":0}},"output_tokens":{tokens},"output_tokens_details":{{"reasoning_tokens":0}},"total_tokens":{total}}}"#
        ),
    }
}

/// The response object; `done`: at the end rather than at the start.
fn object(reply: &Reply, done: bool) -> String {
    let (id, created, model) = (&reply.id, reply.created, quoted(&reply.model));
    let limit = reply
        .limit
        .map_or("null".to_owned(), |limit| limit.to_string());
    let output = if done { message(reply) } else { String::new() };
    let usage = if done {
        usage(reply)
    } else {
        "null".to_owned()
    };
    let status = match (done, reply.cut && reply.kind != Kind::Llamacpp) {
        (false, _) => "in_progress",
        (true, true) => "incomplete",
        (true, false) => "completed",
    };
    let incomplete = match status {
        "incomplete" => r#"{"reason":"max_output_tokens"}"#,
        _ => "null",
    };
    match reply.kind {
        Kind::Llamacpp if !done => {
            format!(r#"{{"id":"resp_{id}","object":"response","status":"in_progress"}}"#)
        }
        Kind::Llamacpp => format!(
            r#"{{"id":"resp_{id}","object":"response","created_at":{created},"status":"{status}","model":{model},"output":[{output}],"usage":{usage}}}"#
        ),
        Kind::Vllm => format!(
            r#"{{"id":"resp_{id}","created_at":{created},"incomplete_details":{incomplete},"instructions":null,"metadata":null,"model":{model},"object":"response","output":[{output}],"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"none","tools":[],"top_p":1.0,"background":false,"max_output_tokens":{limit},"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto","status":"{status}","text":null,"top_logprobs":null,"truncation":"disabled","usage":{usage},"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}}"#
        ),
        Kind::Sglang | Kind::Openai => format!(
            r#"{{"id":"resp_{id}","object":"response","created_at":{created},"model":{model},"output":[{output}],"status":"{status}","usage":{usage},"parallel_tool_calls":true,"tool_choice":"auto","tools":[],"error":null,"incomplete_details":{incomplete},"instructions":null,"max_output_tokens":{limit},"previous_response_id":null,"reasoning":{{"effort":null,"summary":null}},"store":true,"temperature":null,"text":{{"format":{{"type":"text"}}}},"top_p":null,"truncation":"disabled","user":null,"metadata":{{}}}}"#
        ),
    }
}
