//! Which request is answered by what: probes and lists here, generation and the rest in their own files.

use super::behave::{Behave, Health, Metrics, Models, Shape};
use super::dialect::ask::Dialect;
use super::dialect::reply::quoted;
use super::error::Problem;
use super::options::Kind;
use super::out::{End, Out, unix_seconds};
use super::server::Exchange;
use super::wire::{Gone, Head};
use super::{Phase, embed, generate, metrics, small};

/// Milliseconds that SGLang's `/health` takes: it generates a token first.
const SGLANG_HEALTH_MS: u64 = 1000;

/// Whether a request is work rather than a probe.
pub fn is_work(head: &Head) -> bool {
    head.path().starts_with("/v1/") && head.path() != "/v1/models"
}

/// Answers one request.
pub async fn route(exchange: &Exchange<'_>, out: &mut Out<'_, '_>) -> Result<End, Gone> {
    let (engine, head) = (exchange.engine, exchange.head);
    if let Some(path) = head.path().strip_prefix("/fake/") {
        return control(exchange, out, path).await;
    }
    let behave = engine.defaults.current();
    if behave.hang {
        return std::future::pending().await;
    }
    if let Some(end) = before_routing(exchange, out, &behave).await? {
        return Ok(end);
    }
    let path = head.path();
    match (head.method.as_str(), path) {
        ("GET" | "HEAD", "/health" | "/v1/health") => health(exchange, out, &behave).await,
        ("GET", "/ready" | "/health_generate") if engine.options.kind == Kind::Sglang => {
            ready(exchange, out).await
        }
        ("GET", "/ping") if matches!(engine.options.kind, Kind::Vllm | Kind::Sglang) => {
            out.whole(200, &[], b"").await
        }
        ("GET", "/version") if engine.options.kind == Kind::Vllm => {
            out.json(200, r#"{"version":"0.32.0"}"#).await
        }
        ("GET" | "HEAD", "/v1/models") => models(exchange, out, &behave).await,
        ("GET", "/metrics") => metrics_page(exchange, out, &behave).await,
        ("POST", "/v1/embeddings") => embed::embeddings(exchange, out).await,
        ("POST", "/v1/audio/transcriptions" | "/v1/audio/translations") => {
            small::transcription(exchange, out).await
        }
        (_, path) if path == "/v1/echo" || path.starts_with("/v1/echo/") => {
            match small::misbehave(exchange, out, None).await? {
                Some(end) => Ok(end),
                None => small::echo(exchange, out).await,
            }
        }
        ("POST", path) => match Dialect::of(path) {
            Some(dialect) => generate::generate(exchange, out, dialect).await,
            None => not_found(out, engine.options.kind).await,
        },
        (_, path) if Dialect::of(path).is_some() && engine.options.kind != Kind::Llamacpp => {
            let headers = [("Allow", "POST"), ("Content-Type", "application/json")];
            out.whole(405, &headers, br#"{"detail":"Method Not Allowed"}"#)
                .await
        }
        _ => not_found(out, engine.options.kind).await,
    }
}

/// Writes an error in `shape`, or in the kind's own.
pub async fn problem(
    out: &mut Out<'_, '_>,
    kind: Kind,
    problem: &Problem,
    shape: Option<Shape>,
    retry_after: Option<u64>,
) -> Result<End, Gone> {
    let (content_type, body) = problem.body(kind, shape.unwrap_or(Problem::own_shape(kind)));
    let seconds = retry_after.map(|seconds| seconds.to_string());
    let mut headers = vec![("Content-Type", content_type)];
    headers.extend(seconds.as_deref().map(|seconds| ("Retry-After", seconds)));
    out.whole(problem.status, &headers, body.as_bytes()).await
}

/// Loading and keys come before every route.
async fn before_routing(
    exchange: &Exchange<'_>,
    out: &mut Out<'_, '_>,
    behave: &Behave,
) -> Result<Option<End>, Gone> {
    let (engine, path) = (exchange.engine, exchange.head.path());
    let kind = engine.options.kind;
    let loading = engine.phase() == Phase::Loading;
    if loading && kind == Kind::Llamacpp {
        let body = r#"{"error":{"message":"Loading model","type":"unavailable_error","code":503}}"#;
        return out.json(503, body).await.map(Some);
    }
    if path == "/health" && behave.health == Health::Refuse {
        return Ok(Some(End::Close));
    }
    let guarded = path.starts_with("/v1/") && path != "/v1/health"
        || path == "/metrics" && kind == Kind::Llamacpp;
    let Some(key) = engine.options.api_key.as_deref().filter(|_| guarded) else {
        return Ok(None);
    };
    let bearer = exchange
        .head
        .header("authorization")
        .and_then(|value| value.strip_prefix("Bearer "));
    if bearer == Some(key) || exchange.head.header("x-api-key") == Some(key) {
        return Ok(None);
    }
    let body = match kind {
        Kind::Llamacpp => {
            r#"{"error":{"message":"Invalid API Key","type":"authentication_error","code":401}}"#
        }
        Kind::Vllm | Kind::Sglang => r#"{"error":"Unauthorized"}"#,
        Kind::Openai => {
            r#"{"error":{"message":"Incorrect API key provided.","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}"#
        }
    };
    out.json(401, body).await.map(Some)
}

async fn health(
    exchange: &Exchange<'_>,
    out: &mut Out<'_, '_>,
    behave: &Behave,
) -> Result<End, Gone> {
    let engine = exchange.engine;
    let kind = engine.options.kind;
    match behave.health {
        Health::Hang => return std::future::pending().await,
        Health::Refuse => return Ok(End::Close),
        Health::Unavailable => return out.whole(503, &[], b"").await,
        Health::Ok => {}
    }
    if engine.phase() == Phase::Loading {
        return out.whole(503, &[], b"").await;
    }
    let takes_ms = behave.health_ms.unwrap_or(if kind == Kind::Sglang {
        SGLANG_HEALTH_MS
    } else {
        0
    });
    if takes_ms > 0 {
        tokio::time::sleep(std::time::Duration::from_millis(takes_ms)).await;
    }
    match kind {
        Kind::Vllm | Kind::Sglang => out.whole(200, &[], b"").await,
        Kind::Llamacpp | Kind::Openai => out.json(200, r#"{"status":"ok"}"#).await,
    }
}

async fn ready(exchange: &Exchange<'_>, out: &mut Out<'_, '_>) -> Result<End, Gone> {
    let engine = exchange.engine;
    let behave = engine.defaults.current();
    if exchange.head.path() == "/health_generate" || behave.health != Health::Ok {
        return health(exchange, out, &behave).await;
    }
    let status = if engine.phase() == Phase::Ready {
        200
    } else {
        503
    };
    out.whole(status, &[], b"").await
}

async fn models(
    exchange: &Exchange<'_>,
    out: &mut Out<'_, '_>,
    behave: &Behave,
) -> Result<End, Gone> {
    let options = &exchange.engine.options;
    let names: &[String] = match behave.models {
        Models::Ok => &options.models,
        Models::Empty => &[],
        Models::Fail => {
            let error = Problem::plain(options.kind, 500, behave.error_message.as_deref());
            return problem(out, options.kind, &error, None, None).await;
        }
    };
    let cards: Vec<String> = names
        .iter()
        .map(|name| model_card(options.kind, name))
        .collect();
    let cards = cards.join(",");
    let body = match options.kind {
        Kind::Llamacpp => {
            let short: Vec<String> = names.iter().map(|name| llamacpp_short_card(name)).collect();
            format!(
                r#"{{"models":[{}],"object":"list","data":[{cards}]}}"#,
                short.join(",")
            )
        }
        _ => format!(r#"{{"object":"list","data":[{cards}]}}"#),
    };
    out.json(200, &body).await
}

fn model_card(kind: Kind, name: &str) -> String {
    let (id, created) = (quoted(name), unix_seconds());
    match kind {
        Kind::Vllm => format!(
            r#"{{"id":{id},"object":"model","created":{created},"owned_by":"vllm","root":{id},"parent":null,"max_model_len":2048,"permission":[{{"id":"modelperm-0000000000000001","object":"model_permission","created":{created},"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}}]}}"#
        ),
        Kind::Sglang => format!(
            r#"{{"id":{id},"object":"model","created":{created},"owned_by":"sglang","root":{id},"parent":null,"max_model_len":4096}}"#
        ),
        Kind::Llamacpp => format!(
            r#"{{"id":{id},"aliases":[{id}],"tags":[],"object":"model","architecture":{{"input_modalities":["text"],"output_modalities":["text"]}},"created":{created},"owned_by":"llamacpp","meta":{{"vocab_type":2,"n_vocab":49152,"n_ctx":1024,"n_ctx_train":8192,"n_embd":576,"n_params":134515008,"size":96576768,"ftype":"Q4_1"}}}}"#
        ),
        Kind::Openai => {
            format!(r#"{{"id":{id},"object":"model","created":{created},"owned_by":"system"}}"#)
        }
    }
}

fn llamacpp_short_card(name: &str) -> String {
    let name = quoted(name);
    format!(
        r#"{{"name":{name},"model":{name},"modified_at":"","size":"","digest":"","type":"model","description":"","tags":[""],"capabilities":["completion"],"parameters":"","details":{{"parent_model":"","format":"gguf","family":"","families":[""],"parameter_size":"","quantization_level":""}}}}"#
    )
}

async fn metrics_page(
    exchange: &Exchange<'_>,
    out: &mut Out<'_, '_>,
    behave: &Behave,
) -> Result<End, Gone> {
    let engine = exchange.engine;
    let kind = engine.options.kind;
    // A scrape is a result too: llama.cpp's poll for departed clients starts anew.
    engine.result();
    match behave.metrics {
        Metrics::Hang => return std::future::pending().await,
        Metrics::Fail => {
            return problem(out, kind, &Problem::plain(kind, 500, None), None, None).await;
        }
        Metrics::Garbage => {
            let garbage =
                b"<html>\xff\xfe not metrics {{{ = 1e\nvllm:num_requests_running{ NaN nan\n\n";
            return out
                .whole(200, &[("Content-Type", "text/plain")], garbage)
                .await;
        }
        Metrics::Ok | Metrics::Frozen => {}
    }
    match engine.metrics_page(behave) {
        Some(page) => {
            out.whole(
                200,
                &[("Content-Type", metrics::content_type(kind))],
                page.as_bytes(),
            )
            .await
        }
        None => not_found(out, kind).await,
    }
}

pub async fn not_found(out: &mut Out<'_, '_>, kind: Kind) -> Result<End, Gone> {
    let body = match kind {
        Kind::Llamacpp => {
            r#"{"error":{"message":"File Not Found","type":"not_found_error","code":404}}"#
        }
        Kind::Vllm | Kind::Sglang => r#"{"detail":"Not Found"}"#,
        Kind::Openai => {
            r#"{"error":{"message":"Invalid URL","type":"invalid_request_error","param":null,"code":null}}"#
        }
    };
    out.json(404, body).await
}

/// `GET /fake/state`, `POST /fake/behave`, `POST /fake/reset`.
async fn control(exchange: &Exchange<'_>, out: &mut Out<'_, '_>, path: &str) -> Result<End, Gone> {
    let engine = exchange.engine;
    match (exchange.head.method.as_str(), path) {
        ("GET", "state") => {
            let state = serde_json::to_string(&engine.state.view()).unwrap_or_default();
            out.json(200, &state).await
        }
        ("POST", "behave") => match engine.merge(&String::from_utf8_lossy(exchange.body)) {
            Ok(()) => {
                engine.settled().await;
                out.json(200, "{}").await
            }
            Err(error) => {
                out.json(
                    400,
                    &format!(r#"{{"error":{}}}"#, quoted(&error.to_string())),
                )
                .await
            }
        },
        ("POST", "reset") => {
            engine.reset();
            out.json(200, "{}").await
        }
        _ => out.json(404, r#"{"error":"no such control"}"#).await,
    }
}
