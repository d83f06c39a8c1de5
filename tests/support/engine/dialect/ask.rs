//! What a generation request asks for: the few fields that change the answer.

use serde_json::Value;

use crate::engine::error::Problem;
use crate::engine::options::Kind;

/// The endpoint's way of speaking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages` (Anthropic)
    Messages,
}

/// A generation request.
#[derive(Debug)]
pub struct Ask {
    pub dialect: Dialect,
    pub model: Option<String>,
    pub stream: bool,
    pub include_usage: bool,
    /// vLLM's `continuous_usage_stats`.
    pub continuous: bool,
    /// A quarter of the bytes of the prompt's texts, at least 1.
    pub prompt_tokens: u64,
    pub max_tokens: Option<u64>,
    pub n: u64,
    /// Alternatives to show for each token, when log probabilities are wanted.
    pub logprobs: Option<usize>,
    /// The function that has to be called.
    pub tool: Option<String>,
}

impl Dialect {
    pub fn of(path: &str) -> Option<Dialect> {
        match path {
            "/v1/chat/completions" => Some(Dialect::Chat),
            "/v1/completions" => Some(Dialect::Completions),
            "/v1/responses" => Some(Dialect::Responses),
            "/v1/messages" => Some(Dialect::Messages),
            _ => None,
        }
    }

    /// The field that holds the prompt.
    fn prompt_field(self) -> &'static str {
        match self {
            Dialect::Chat | Dialect::Messages => "messages",
            Dialect::Completions => "prompt",
            Dialect::Responses => "input",
        }
    }
}

impl Ask {
    pub fn read(kind: Kind, dialect: Dialect, body: &Value) -> Result<Ask, Problem> {
        let field = dialect.prompt_field();
        let Some(prompt) = body.get(field) else {
            return Err(missing(kind, field));
        };
        if kind != Kind::Llamacpp && prompt.as_array().is_some_and(Vec::is_empty) {
            let text = match kind {
                Kind::Vllm => {
                    "Cannot apply chat template to an empty conversation. Provide at least one message."
                }
                _ => "Messages cannot be empty.",
            };
            return Err(Problem::plain(kind, 400, Some(text)));
        }
        let greedy = body.get("temperature").and_then(Value::as_f64) == Some(0.0);
        let n = body.get("n").and_then(Value::as_u64).unwrap_or(1).max(1);
        if kind == Kind::Vllm && greedy && n > 1 {
            let text = format!("n must be 1 when using greedy sampling, got {n}.");
            return Err(Problem::plain(kind, 400, Some(&text)));
        }
        let mut bytes = text_bytes(prompt);
        for instructions in ["system", "instructions"] {
            bytes += body.get(instructions).map_or(0, text_bytes);
        }
        let number = |name: &str| body.get(name).and_then(Value::as_u64);
        let flag = |value: Option<&Value>| value.and_then(Value::as_bool).unwrap_or(false);
        let options = body.get("stream_options");
        Ok(Ask {
            dialect,
            model: body.get("model").and_then(Value::as_str).map(str::to_owned),
            stream: flag(body.get("stream")),
            include_usage: flag(options.and_then(|options| options.get("include_usage"))),
            continuous: flag(options.and_then(|options| options.get("continuous_usage_stats"))),
            prompt_tokens: (bytes / 4).max(1) as u64,
            max_tokens: number("max_completion_tokens")
                .or_else(|| number("max_tokens"))
                .or_else(|| number("max_output_tokens")),
            n,
            logprobs: logprobs(body),
            tool: forced_tool(body),
        })
    }
}

fn missing(kind: Kind, field: &'static str) -> Problem {
    match kind {
        Kind::Llamacpp => Problem::new(
            400,
            "invalid_request_error",
            format!("'{field}' is required"),
        ),
        Kind::Openai => Problem::new(
            400,
            "invalid_request_error",
            format!("Missing required parameter: '{field}'."),
        ),
        Kind::Vllm | Kind::Sglang => {
            let message = format!(
                "1 validation error:\n  {{'type': 'missing', 'loc': 'body.{field}', 'msg': 'Field required'}}"
            );
            let param = (kind == Kind::Vllm).then(|| format!("body.{field}"));
            Problem {
                param,
                ..Problem::new(400, "Bad Request", message)
            }
        }
    }
}

/// Bytes of all texts in a prompt: the string itself, or the `content` and `text` of messages and parts.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(fields) => ["content", "text"]
            .iter()
            .filter_map(|name| fields.get(*name))
            .map(text_bytes)
            .sum(),
        // A token of a tokenised prompt.
        Value::Number(_) => 4,
        Value::Null | Value::Bool(_) => 0,
    }
}

/// `logprobs: true` with `top_logprobs` (chat), or `logprobs: N` (completions).
fn logprobs(body: &Value) -> Option<usize> {
    let top = body
        .get("top_logprobs")
        .and_then(Value::as_u64)
        .unwrap_or(0);
    let wanted = match body.get("logprobs") {
        Some(Value::Bool(true)) => Some(top),
        Some(Value::Number(number)) => number.as_u64(),
        _ => None,
    };
    wanted.and_then(|count| usize::try_from(count).ok())
}

fn forced_tool(body: &Value) -> Option<String> {
    let name = |tool: &Value| {
        let function = tool.get("function").unwrap_or(tool);
        function
            .get("name")
            .and_then(Value::as_str)
            .map(str::to_owned)
    };
    let first = body
        .get("tools")
        .and_then(Value::as_array)
        .and_then(|tools| tools.first());
    match body.get("tool_choice") {
        Some(Value::String(choice)) if choice == "required" => first.and_then(name),
        Some(choice @ Value::Object(_)) => name(choice).or_else(|| first.and_then(name)),
        _ => None,
    }
}
