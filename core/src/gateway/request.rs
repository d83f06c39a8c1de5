//! A request's whole story, one line a step.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderName};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Request, Response, Version};
use hyper::body::Incoming;
use llmgw_plugins::PolicySet;

use super::auth::Caller;
use super::band::{self, OPEN_BAND};
use super::body::ClientBody;
use super::dialect::Dialect;
use super::forward;
use super::gathered::Gathered;
use super::headers::{self, X_LLMGW_BAND, X_LLMGW_DEBUG, X_LLMGW_MODEL, X_REQUEST_ID};
use super::hold::Held;
use super::job::{Body, Facts, Job};
use super::limit_headers;
use super::models;
use super::multipart;
use super::peek;
use super::refusal;
use super::respond::{self, Failure};
use super::silence::Silence;
use super::state::{Gateway, Runtime};
use super::upload::Upload;
use crate::config::Model;
use crate::flow::tenant::TenantAccount;
use crate::random;
use crate::routing::pool::Wanted;
use crate::routing::prefix::PromptHashes;
use crate::telemetry::OpenRecord;
use crate::telemetry::access::{AccessRecord, Outcome};

/// How long a client may pause in the middle of its own body.
const BODY_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// A longer name of a model is not shown back: 50 MB of one would be copied into error and record.
const MODEL_NAME_MAX_BYTES: usize = 1024;
/// A session name longer than this is cut: it is a hint, not data.
const SESSION_MAX_BYTES: usize = 256;
/// A band's name is shorter than this.
const SERVICE_TIER_MAX_BYTES: usize = 128;

/// Answers one request. Every failure goes through `respond::failure`, every record through its own drop.
pub async fn handle(gateway: Arc<Gateway>, request: Request<Incoming>) -> Response<ClientBody> {
    let (parts, body) = request.into_parts();
    let request_id = headers::request_id(&parts.headers);
    let dialect = Dialect::of_path(parts.uri.path());
    let version = parts.version;
    let mut upload = Upload::new(body, &parts);
    let mut record = Some(gateway.telemetry.open(AccessRecord {
        request_id: String::from_utf8_lossy(request_id.as_bytes()).into_owned(),
        method: parts.method.clone(),
        path: parts.uri.path().to_string(),
        ..AccessRecord::default()
    }));
    let mut account = None;
    let served = serve(
        &gateway,
        parts,
        &request_id,
        &mut upload,
        dialect,
        &mut record,
        &mut account,
    )
    .await;
    upload.discard();
    let mut response = served.unwrap_or_else(|failure| {
        if let Some(record) = &mut record {
            forward::record_failure(record, &failure);
        }
        respond::failure(&failure, dialect)
    });
    response.headers_mut().insert(X_REQUEST_ID, request_id);
    if let Some(account) = account {
        limit_headers::write(response.headers_mut(), &account.balance());
    }
    if gateway.is_draining() && version < Version::HTTP_2 {
        let close = http::HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    response
}

async fn serve(
    gateway: &Arc<Gateway>,
    parts: Parts,
    request_id: &http::HeaderValue,
    upload: &mut Upload,
    dialect: Dialect,
    record: &mut Option<OpenRecord>,
    account: &mut Option<Arc<TenantAccount>>,
) -> Result<Response<ClientBody>, Failure> {
    if gateway.is_draining() {
        return Err(Failure::ShuttingDown);
    }
    let runtime = gateway.runtime.load_full();
    let path = parts.uri.path();
    // A tunnel is none of our routes, and TRACE would show the client the key that the engine gets.
    let is_for_proxies = matches!(parts.method, Method::CONNECT | Method::TRACE);
    if is_for_proxies || !path.starts_with("/v1/") || has_dot_segment(path) {
        return Err(Failure::UnknownRoute {
            method: parts.method.to_string(),
            path: path.to_string(),
        });
    }
    let caller = runtime.tenants.authenticate(&parts.headers)?;
    note(record, |record| record.tenant = caller.name.clone());
    let account = account.insert(caller.account.clone());
    if let Some(wanted) = models::asked(&parts.method, path) {
        let response = models::answer(&runtime, &caller, &wanted)?;
        note(record, |record| {
            record.status = response.status().as_u16();
            record.outcome = Outcome::Ok;
        });
        return Ok(response);
    }
    let bytes = read_body(&parts.headers, upload, runtime.config.limits.body_max).await?;
    let understood = understand(&parts, bytes, dialect)?;
    let asked_name = name_asked(&understood, &parts.headers, dialect, &runtime, &caller)?;
    if asked_name.len() > MODEL_NAME_MAX_BYTES {
        let text = format!("the model's name is longer than {MODEL_NAME_MAX_BYTES} bytes");
        return Err(Failure::InvalidJson(text));
    }
    note(record, |record| record.model_asked = asked_name.to_string());
    let model = resolve(&runtime, &caller, &asked_name)?;
    let set = gateway.policies.current();
    let arrived = Arrived {
        parts,
        request_id: request_id.clone(),
        understood,
        asked_name,
        model,
        caller,
        dialect,
    };
    let mut job = prepare(gateway, &runtime, set, arrived, record)?;
    admit(&mut job, account)?;
    send(job).await
}

/// What the body said.
struct Understood {
    body: Body,
    model: Option<String>,
    facts: Facts,
    prompt: PromptHashes,
}

/// Reads the fields that matter, in one pass over borrowed bytes.
fn understand(parts: &Parts, bytes: Bytes, dialect: Dialect) -> Result<Understood, Failure> {
    let content_type = parts
        .headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or("");
    if content_type
        .trim_start()
        .to_ascii_lowercase()
        .starts_with("multipart/form-data")
    {
        let range = multipart::find_model(&bytes, content_type)
            .map_err(|error| Failure::InvalidJson(error.to_string()))?;
        let model = range.map(|range| String::from_utf8_lossy(&bytes[range]).into_owned());
        return Ok(Understood {
            model,
            body: Body::Form {
                bytes,
                content_type: content_type.to_string(),
            },
            facts: Facts::default(),
            prompt: PromptHashes::of(&[]),
        });
    }
    let is_json = dialect != Dialect::Other || says_json(content_type) || content_type.is_empty();
    if bytes.is_empty() && !(dialect != Dialect::Other && parts.method == Method::POST) {
        return Ok(Understood::opaque(bytes));
    }
    if !is_json {
        return Ok(Understood::opaque(bytes));
    }
    let peek = match peek::peek(&bytes) {
        Ok(peek) => peek,
        // Nobody said that it is JSON, so it need not be.
        Err(_) if dialect == Dialect::Other && content_type.is_empty() => {
            return Ok(Understood::opaque(bytes));
        }
        Err(error) => return Err(Failure::InvalidJson(error.to_string())),
    };
    let mut facts = Facts::of(&peek);
    for (text, max_bytes) in [
        (&mut facts.session, SESSION_MAX_BYTES),
        (&mut facts.service_tier, SERVICE_TIER_MAX_BYTES),
    ] {
        if let Some(text) = text {
            truncate(text, max_bytes);
        }
    }
    Ok(Understood {
        model: peek.model.as_deref().map(str::to_string),
        facts,
        prompt: PromptHashes::of(&peek.prompt_parts()),
        body: Body::Json(bytes.clone()),
    })
}

impl Understood {
    fn opaque(bytes: Bytes) -> Understood {
        Understood {
            body: Body::Opaque(bytes),
            model: None,
            facts: Facts::default(),
            prompt: PromptHashes::of(&[]),
        }
    }
}

/// Whether a path could lead out of `/v1/` at an engine, or at a proxy before it, that resolves `..`.
fn has_dot_segment(path: &str) -> bool {
    path.split(['/', '\\']).any(|segment| {
        let segment = segment.to_ascii_lowercase().replace("%2e", ".");
        segment == "." || segment == ".." || segment.contains("%2f..") || segment.contains("..%2f")
    })
}

fn says_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or("").trim();
    kind.eq_ignore_ascii_case("application/json") || kind.ends_with("+json")
}

fn truncate(text: &mut String, max_bytes: usize) {
    if text.len() > max_bytes {
        let end = (0..=max_bytes)
            .rev()
            .find(|index| text.is_char_boundary(*index))
            .unwrap_or(0);
        text.truncate(end);
    }
}

/// The model's name as the client wrote it: in the body, else in `x-llmgw-model`, else the only one there is.
fn name_asked(
    understood: &Understood,
    headers: &HeaderMap,
    dialect: Dialect,
    runtime: &Runtime,
    caller: &Caller,
) -> Result<Arc<str>, Failure> {
    if let Some(model) = &understood.model {
        return Ok(Arc::from(model.as_str()));
    }
    if let Some(value) = headers.get(X_LLMGW_MODEL) {
        return Ok(Arc::from(&*String::from_utf8_lossy(value.as_bytes())));
    }
    // A chat without a model is a mistake, even where it could only mean one.
    let by_definition_has_one = dialect != Dialect::Other;
    match runtime.config.catalog.models.as_slice() {
        [only] if !by_definition_has_one && caller.may_use(&only.name) => Ok(only.name.clone()),
        _ => Err(Failure::MissingModel {
            known: models::names(runtime, caller),
        }),
    }
}

/// An alias is resolved before any check, so that it is no way around one.
fn resolve(runtime: &Runtime, caller: &Caller, asked: &str) -> Result<Arc<Model>, Failure> {
    match runtime.config.catalog.resolve(asked) {
        Some(model) if caller.may_use(&model.name) => Ok(model.clone()),
        _ => Err(Failure::UnknownModel {
            asked: asked.to_string(),
            known: models::names(runtime, caller),
        }),
    }
}

/// A request whose model is known.
struct Arrived {
    parts: Parts,
    request_id: http::HeaderValue,
    understood: Understood,
    asked_name: Arc<str>,
    model: Arc<Model>,
    caller: Caller,
    dialect: Dialect,
}

/// Puts together everything that the attempts need.
fn prepare(
    gateway: &Arc<Gateway>,
    runtime: &Runtime,
    set: Arc<PolicySet>,
    arrived: Arrived,
    record: &mut Option<OpenRecord>,
) -> Result<Box<Job>, Failure> {
    let Arrived {
        mut parts,
        request_id,
        understood,
        asked_name,
        model,
        caller,
        dialect,
    } = arrived;
    let Some(pool) = runtime.fleet.pool(&model.name) else {
        return Err(Failure::UnknownModel {
            asked: asked_name.to_string(),
            known: models::names(runtime, &caller),
        });
    };
    let header = text_of(&parts.headers, &X_LLMGW_BAND);
    let debug = text_of(&parts.headers, &X_LLMGW_DEBUG).is_some_and(|value| value == "1");
    headers::towards_engine(&mut parts.headers);
    parts.headers.insert(X_REQUEST_ID, request_id);
    let facts = understood.facts;
    let band_hint = band::hint(&set, &caller, header, &facts);
    let prompt_bytes = understood.body.bytes().len() as u64;
    let is_text = matches!(understood.body, Body::Json(_)) && !facts.has_images;
    let mut job = Box::new(Job {
        gateway: gateway.clone(),
        config: runtime.config.clone(),
        pool: pool.clone(),
        method: parts.method,
        path_and_query: parts
            .uri
            .path_and_query()
            .cloned()
            // Only `CONNECT` and `*` have none, and their paths begin with no `/v1/`.
            .unwrap_or_else(|| PathAndQuery::from_static("/")),
        headers: parts.headers,
        body: understood.body,
        dialect,
        asked: pool.ask(&Wanted {
            tenant: &caller.name,
            input_bytes: prompt_bytes,
            max_tokens: facts.max_tokens,
            choices: facts.n,
            is_text,
        }),
        asked_name,
        facts,
        prompt: understood.prompt,
        tenant: caller.name.clone(),
        weight: caller.account.weight(),
        flow: None,
        band: band::unlisted(OPEN_BAND.into()),
        band_hint,
        queue_ttl: None,
        ahead: None,
        seed: random::next(),
        needs_usage: caller.tenant.is_some(),
        debug,
        committed: None,
        set,
        record: None,
        reservation: None,
    });
    band::classify(&mut job, &caller);
    if let Some(record) = record {
        record.set_model(pool.metrics.clone());
        record.set_account(caller.account.clone());
        record.band = job.band.name.clone();
        record.stream = job.facts.stream;
    }
    job.record = record.take();
    Ok(job)
}

fn text_of(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_string)
}

/// Takes what the request needs of its tenant's own limits, or refuses it.
fn admit(job: &mut Job, account: &Arc<TenantAccount>) -> Result<(), Failure> {
    match account.admit(job.wanted()) {
        Ok(reservation) => {
            job.reservation = Some(reservation);
            Ok(())
        }
        Err(refused) => {
            let tenant = account.name.clone();
            let failure = Failure::TenantLimit { tenant, refused };
            Err(refusal::leave(job, failure))
        }
    }
}

/// Runs the attempts. Where comments are wanted, the client gets its headers while an engine is still silent.
async fn send(mut job: Box<Job>) -> Result<Response<ClientBody>, Failure> {
    // Only these are known to be event streams.
    let is_stream = job.facts.stream && job.dialect.expects_end();
    let every = job.config.limits.keepalive.filter(|_| is_stream);
    let dialect = job.dialect;
    let Some(every) = every else {
        return forward::attempts(job).await;
    };
    let committed = Arc::new(AtomicBool::new(false));
    job.committed = Some(committed.clone());
    let mut attempts = Box::pin(forward::attempts(job));
    tokio::select! {
        biased;
        answered = &mut attempts => answered,
        () = tokio::time::sleep(every) => {
            committed.store(true, Ordering::Relaxed);
            let held = Held::new(attempts, every, dialect);
            let mut response = Response::new(ClientBody::Held(Box::new(held)));
            let headers = response.headers_mut();
            headers.insert(CONTENT_TYPE, http::HeaderValue::from_static("text/event-stream"));
            headers::for_stream(headers);
            Ok(response)
        }
    }
}

/// Reads the body to its end, within the limit. It is kept, since another replica may have to get it too, and
/// since a client that leaves is only noticed once its body was read.
async fn read_body(
    headers: &HeaderMap,
    upload: &mut Upload,
    limit_bytes: u64,
) -> Result<Bytes, Failure> {
    let too_large = || Failure::BodyTooLarge { limit_bytes };
    let announced = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limit_bytes) {
        return Err(too_large());
    }
    let mut gathered = Gathered::announced(announced.unwrap_or(0) as usize);
    let mut silence = Silence::new(BODY_IDLE_TIMEOUT, None);
    loop {
        let polled = poll_fn(|context| match upload.poll_frame(context) {
            Poll::Ready(frame) => Poll::Ready(Ok(frame)),
            Poll::Pending => silence.poll_due(context).map(Err),
        });
        let frame = match polled.await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(error))) => return Err(Failure::UnreadableBody(error.to_string())),
            Ok(None) => break,
            Err(_) => {
                let text = format!("nothing came for {BODY_IDLE_TIMEOUT:?}");
                return Err(Failure::UnreadableBody(text));
            }
        };
        silence.heard();
        let Ok(chunk) = frame.into_data() else {
            continue;
        };
        if (gathered.len() + chunk.len()) as u64 > limit_bytes {
            return Err(too_large());
        }
        gathered.push(chunk);
    }
    Ok(gathered.into_bytes())
}

fn note(record: &mut Option<OpenRecord>, write: impl FnOnce(&mut OpenRecord)) {
    if let Some(record) = record {
        write(record);
    }
}
