//! The admin routes: one table, one function that answers.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, ORIGIN, WWW_AUTHENTICATE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use llmgw_plugins::PolicyStatus;
use serde::Serialize;
use serde_json::{Value, json};

use super::fleet::{self, FleetError, FleetOrder, FleetQuestion, Query};
use super::guard::Denied;
use super::page::metrics_page;
use super::policies::{self, ActionError, PolicyAction};
use super::{ADMIN_HEADER, Admin};
use crate::serve::reload::Confirmed;
use crate::telemetry::exposition;

/// No route needs more of a body than this.
const BODY_MAX_BYTES: usize = 64 << 10;
const BODY_TIMEOUT_MS: u64 = 5000;
/// Of a host's name that is refused, so much is repeated: no name is longer.
const HOST_SHOWN_MAX_CHARS: usize = 255;

type Answer = Response<Full<Bytes>>;

/// What can be asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Route {
    Metrics,
    Health,
    Ready,
    Status,
    Models,
    Replicas,
    Policies,
    ChangePolicies(PolicyAction),
    Reload,
    Fleet(FleetQuestion),
    ChangeFleet(FleetOrder),
    NewToken,
}

const ROUTES: [(&str, Route); 21] = [
    ("/metrics", Route::Metrics),
    ("/healthz", Route::Health),
    ("/readyz", Route::Ready),
    ("/v1/status", Route::Status),
    ("/v1/models", Route::Models),
    ("/v1/replicas", Route::Replicas),
    ("/v1/policies", Route::Policies),
    (
        "/v1/policies/rollback",
        Route::ChangePolicies(PolicyAction::Rollback),
    ),
    ("/v1/policies/pin", Route::ChangePolicies(PolicyAction::Pin)),
    (
        "/v1/policies/unpin",
        Route::ChangePolicies(PolicyAction::Unpin),
    ),
    (
        "/v1/policies/untrip",
        Route::ChangePolicies(PolicyAction::Untrip),
    ),
    ("/v1/reload", Route::Reload),
    ("/v1/nodes", Route::Fleet(FleetQuestion::Nodes)),
    ("/v1/started", Route::Fleet(FleetQuestion::Started)),
    ("/v1/explain", Route::Fleet(FleetQuestion::Explain)),
    ("/v1/snapshot", Route::Fleet(FleetQuestion::Snapshot)),
    ("/v1/logs", Route::Fleet(FleetQuestion::Logs)),
    ("/v1/nodes/drain", Route::ChangeFleet(FleetOrder::Drain)),
    ("/v1/nodes/undrain", Route::ChangeFleet(FleetOrder::Undrain)),
    ("/v1/replicas/stop", Route::ChangeFleet(FleetOrder::Stop)),
    ("/v1/tokens/new", Route::NewToken),
];

/// Why a request was refused. [`refuse`] is the one place that turns it into an answer.
enum Refusal {
    NotFound(String),
    Method(&'static str),
    Denied(Denied),
    CrossOrigin,
    Body,
    ReloadFailed(String),
    Policies(ActionError),
    Fleet(FleetError),
    Died(&'static str),
}

/// Answers any request on the admin listener.
pub async fn answer(admin: &Admin, request: Request<Incoming>) -> Answer {
    let mut answer = match dispatch(admin, request).await {
        Ok(answer) => answer,
        Err(refusal) => refuse(refusal),
    };
    let yes = HeaderValue::from_static("1");
    answer.headers_mut().insert(ADMIN_HEADER, yes);
    answer
}

async fn dispatch(admin: &Admin, request: Request<Incoming>) -> Result<Answer, Refusal> {
    let route = ROUTES
        .iter()
        .find(|(path, _)| *path == request.uri().path())
        .map(|(_, route)| *route);
    let open = matches!(route, Some(Route::Health | Route::Ready));
    if !open {
        let admitted = admin.guard.admit(request.uri(), request.headers());
        admitted.map_err(Refusal::Denied)?;
    }
    let route = route.ok_or_else(|| Refusal::NotFound(request.uri().path().to_owned()))?;
    match route {
        Route::Reload => return reload(admin, request).await,
        Route::ChangePolicies(action) => return change_policies(admin, action, request).await,
        Route::ChangeFleet(order) => {
            let query = Query::of(request.uri());
            accept_change(request).await?;
            let message = fleet::order(admin.fleet.as_ref(), order, query).await;
            let message = message.map_err(Refusal::Fleet)?;
            return Ok(json_answer(StatusCode::OK, &json!({"message": message})));
        }
        Route::NewToken => {
            let query = Query::of(request.uri());
            accept_change(request).await?;
            let token = fleet::token(admin.fleet.as_ref(), query).await;
            let token = token.map_err(Refusal::Fleet)?;
            return Ok(json_answer(StatusCode::OK, &token));
        }
        _ => {}
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return Err(Refusal::Method("GET, HEAD"));
    }
    Ok(match route {
        Route::Metrics => metrics(admin, policy_status(admin).await),
        Route::Health => json_answer(StatusCode::OK, &json!({"status": "ok"})),
        Route::Ready => ready(admin),
        Route::Status => json_answer(StatusCode::OK, &(admin.report)()),
        Route::Models => json_answer(StatusCode::OK, &json!({"models": (admin.report)().models})),
        Route::Replicas => replicas(admin),
        Route::Fleet(question) => {
            let query = Query::of(request.uri());
            let answer = fleet::ask(admin.fleet.as_ref(), question, query).await;
            json_answer(StatusCode::OK, &answer.map_err(Refusal::Fleet)?)
        }
        Route::Policies
        | Route::ChangePolicies(_)
        | Route::ChangeFleet(_)
        | Route::NewToken
        | Route::Reload => json_answer(StatusCode::OK, &policy_status(admin).await),
    })
}

/// It waits for a reload that is under way: not on the threads that relay streams.
async fn policy_status(admin: &Admin) -> PolicyStatus {
    let policies = admin.policies.clone();
    match tokio::task::spawn_blocking(move || policies.status()).await {
        Ok(status) => status,
        Err(died) => std::panic::resume_unwind(died.into_panic()),
    }
}

fn metrics(admin: &Admin, policies: PolicyStatus) -> Answer {
    let text = metrics_page(
        admin.metrics.clone(),
        (admin.report)(),
        policies,
        (admin.ends)(),
    );
    with_type(StatusCode::OK, exposition::CONTENT_TYPE, text.into())
}

fn ready(admin: &Admin) -> Answer {
    match (admin.ready)() {
        Ok(()) => json_answer(StatusCode::OK, &json!({"ready": true})),
        Err(reason) => json_answer(
            StatusCode::SERVICE_UNAVAILABLE,
            &json!({"ready": false, "reason": reason}),
        ),
    }
}

/// Every replica, each with its model's name.
fn replicas(admin: &Admin) -> Answer {
    let report = (admin.report)();
    let rows: Vec<Value> = report
        .models
        .iter()
        .flat_map(|model| model.replicas.iter().map(move |replica| (model, replica)))
        .map(|(model, replica)| {
            let mut row = json!({"model": model.name});
            if let (Some(row), Ok(Value::Object(fields))) =
                (row.as_object_mut(), serde_json::to_value(replica))
            {
                row.extend(fields);
            }
            row
        })
        .collect();
    json_answer(StatusCode::OK, &json!({"replicas": rows}))
}

async fn reload(admin: &Admin, request: Request<Incoming>) -> Result<Answer, Refusal> {
    let confirmed = match Query::of(request.uri()).has("confirm") {
        true => Confirmed::Yes,
        false => Confirmed::No,
    };
    accept_change(request).await?;
    let reload = admin.reload.clone();
    // It reads files and checks policies: not on the threads that relay streams.
    match tokio::task::spawn_blocking(move || reload(confirmed)).await {
        Ok(Ok(message)) => Ok(json_answer(StatusCode::OK, &json!({"message": message}))),
        Ok(Err(reason)) => Err(Refusal::ReloadFailed(reason)),
        Err(_) => Err(Refusal::Died("the reload")),
    }
}

async fn change_policies(
    admin: &Admin,
    action: PolicyAction,
    request: Request<Incoming>,
) -> Result<Answer, Refusal> {
    let query = request.uri().query().map(str::to_owned);
    accept_change(request).await?;
    let policies = admin.policies.clone();
    let change = move || {
        let message = policies::act(&policies, action, query.as_deref())?;
        Ok((message, policies.status()))
    };
    // It may wait for a reload, or be one.
    match tokio::task::spawn_blocking(change).await {
        Ok(Ok((message, status))) => Ok(json_answer(
            StatusCode::OK,
            &json!({"message": message, "policies": status}),
        )),
        Ok(Err(error)) => Err(Refusal::Policies(error)),
        Err(_) => Err(Refusal::Died("the change of policies")),
    }
}

/// Whether a request may change something: sent as POST, by no web page, with a small body that is read and ignored.
async fn accept_change(request: Request<Incoming>) -> Result<(), Refusal> {
    if request.method() != Method::POST {
        return Err(Refusal::Method("POST"));
    }
    // No token on loopback: a web page that the operator has open must not be able to do this.
    if request.headers().contains_key(ORIGIN) {
        return Err(Refusal::CrossOrigin);
    }
    let body = Limited::new(request.into_body(), BODY_MAX_BYTES).collect();
    let body = tokio::time::timeout(Duration::from_millis(BODY_TIMEOUT_MS), body).await;
    if !matches!(body, Ok(Ok(_))) {
        return Err(Refusal::Body);
    }
    Ok(())
}

fn refuse(refusal: Refusal) -> Answer {
    let (status, code, message) = match &refusal {
        Refusal::NotFound(path) => {
            let known: Vec<&str> = ROUTES.iter().map(|(path, _)| *path).collect();
            let message = format!("no admin route `{path}`; there are {}", known.join(", "));
            (StatusCode::NOT_FOUND, "not_found", message)
        }
        Refusal::Method(allowed) => {
            let message = format!("this route takes {allowed} only");
            (
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                message,
            )
        }
        Refusal::Denied(Denied::Token) => {
            let message =
                "the admin token is missing or wrong; send it as `authorization: Bearer TOKEN`"
                    .to_owned();
            (StatusCode::UNAUTHORIZED, "invalid_admin_token", message)
        }
        Refusal::Denied(Denied::Host(host)) => {
            let host: String = host.chars().take(HOST_SHOWN_MAX_CHARS).collect();
            let message = format!(
                "without a token only requests for `localhost`, `127.0.0.1` or `[::1]` are answered, and this one is for `{host}`; dial one of those, or set `admin.token`"
            );
            (StatusCode::FORBIDDEN, "foreign_host", message)
        }
        Refusal::CrossOrigin => {
            let message = "requests of web pages may change nothing here".to_owned();
            (StatusCode::FORBIDDEN, "cross_origin", message)
        }
        Refusal::Body => {
            let message = format!("the body did not arrive, or is over {BODY_MAX_BYTES} bytes");
            (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
        }
        Refusal::ReloadFailed(reason) => (
            StatusCode::UNPROCESSABLE_ENTITY,
            "reload_failed",
            reason.clone(),
        ),
        Refusal::Policies(error) => {
            let status = match error {
                ActionError::Generation(_) => StatusCode::BAD_REQUEST,
                ActionError::UnknownGeneration(_) => StatusCode::NOT_FOUND,
                ActionError::DirectoryBroken(_) => StatusCode::UNPROCESSABLE_ENTITY,
            };
            (status, error.code(), error.message().to_owned())
        }
        Refusal::Fleet(error) => (error.status(), error.code(), error.to_string()),
        Refusal::Died(what) => {
            let message = format!("{what} panicked; what was in force still is, see the log");
            (StatusCode::INTERNAL_SERVER_ERROR, "died", message)
        }
    };
    let kind = if status.is_server_error() {
        "server_error"
    } else {
        "invalid_request_error"
    };
    let body = json!({"error": {"message": message, "type": kind, "code": code, "param": null}});
    let mut answer = json_answer(status, &body);
    match refusal {
        Refusal::Denied(Denied::Token) => {
            answer
                .headers_mut()
                .insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        Refusal::Method(allowed) => {
            answer
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static(allowed));
        }
        _ => {}
    }
    answer
}

fn json_answer(status: StatusCode, body: &impl Serialize) -> Answer {
    // Our own types: strings as keys and no failing Serialize, so this cannot fail.
    let mut text = serde_json::to_vec_pretty(body).unwrap_or_default();
    text.push(b'\n');
    with_type(status, "application/json", text.into())
}

fn with_type(status: StatusCode, content_type: &'static str, body: Bytes) -> Answer {
    let mut answer = Response::new(Full::new(body));
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
        .headers_mut()
        .insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}
