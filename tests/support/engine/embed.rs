//! `/v1/embeddings`: four numbers for each input, as floats or base64.

use serde_json::Value;

use super::dialect::reply::quoted;
use super::error::Problem;
use super::options::Kind;
use super::out::{End, Out};
use super::route::{not_found, problem};
use super::server::Exchange;
use super::small;
use super::wire::Gone;

/// Every input's embedding.
const VECTOR: [f32; 4] = [0.5, -0.25, 0.125, 1.0];

pub async fn embeddings(exchange: &Exchange<'_>, out: &mut Out<'_, '_>) -> Result<End, Gone> {
    let engine = exchange.engine;
    let kind = engine.options.kind;
    if !engine.options.embeddings {
        return unsupported(out, kind).await;
    }
    let body = serde_json::from_slice::<Value>(exchange.body).unwrap_or_default();
    if let Some(end) = small::misbehave(exchange, out, body.get("fake")).await? {
        return Ok(end);
    }
    let asked = body.get("model").and_then(Value::as_str);
    if let (Some(ticket), Some(model)) = (exchange.ticket, asked) {
        ticket.model(model);
    }
    let model = match kind {
        Kind::Sglang | Kind::Openai => asked.unwrap_or(engine.model()),
        Kind::Vllm | Kind::Llamacpp => engine.model(),
    };
    let inputs = match body.get("input") {
        Some(Value::Array(items)) if items.iter().any(Value::is_string) => items.len(),
        _ => 1,
    };
    let base64 = body.get("encoding_format").and_then(Value::as_str) == Some("base64");
    out.json(200, &answer(kind, model, inputs, base64)).await
}

fn answer(kind: Kind, model: &str, inputs: usize, base64: bool) -> String {
    let vector = if base64 {
        let bytes: Vec<u8> = VECTOR
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect();
        format!("\"{}\"", encode_base64(&bytes))
    } else {
        format!("{VECTOR:?}").replace(' ', "")
    };
    let entries: Vec<String> = (0..inputs)
        .map(|index| format!(r#"{{"embedding":{vector},"index":{index},"object":"embedding"}}"#))
        .collect();
    let (model, entries) = (quoted(model), entries.join(","));
    let usage = format!(r#"{{"prompt_tokens":{inputs},"total_tokens":{inputs}}}"#);
    match kind {
        Kind::Llamacpp => {
            format!(r#"{{"model":{model},"object":"list","usage":{usage},"data":[{entries}]}}"#)
        }
        _ => format!(r#"{{"object":"list","data":[{entries}],"model":{model},"usage":{usage}}}"#),
    }
}

/// A generation model refuses, each kind in its own way.
async fn unsupported(out: &mut Out<'_, '_>, kind: Kind) -> Result<End, Gone> {
    let error = match kind {
        Kind::Vllm => return not_found(out, kind).await,
        Kind::Llamacpp => Problem::new(
            501,
            "not_supported_error",
            "This server does not support embeddings. Start it with `--embeddings`",
        ),
        Kind::Sglang => Problem::new(
            400,
            "BadRequestError",
            "This model does not appear to be an embedding model by default. Please add `--is-embedding` when launching the server or try another model.",
        ),
        Kind::Openai => Problem::new(
            403,
            "invalid_request_error",
            "You are not allowed to generate embeddings from this model",
        ),
    };
    problem(out, kind, &error, None, None).await
}

fn encode_base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let byte = |index: usize| u32::from(group.get(index).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for position in 0..4_usize {
            let index = (bits >> (18 - 6 * position)) & 63;
            let digit = char::from(ALPHABET[index as usize]);
            text.push(if position <= group.len() { digit } else { '=' });
        }
    }
    text
}
