//! What operators ask of the fleet, and order: nodes, replicas, explanations, logs, drains, stops, the snapshot.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::{StatusCode, Uri};
use llmgw_proto::shard::LogLine;
use serde_json::{Value, json};

use crate::config::UtcTime;
use crate::control::controller::{Controller, OperatorError, Output};
use crate::control::enrolment::{Enrolment, IssueError, LIFETIME_DEFAULT};

/// Asks a node for a shard's last lines; the error is for a person.
pub type Tail = Arc<
    dyn Fn(
            String,
            String,
            u32,
        ) -> Pin<Box<dyn Future<Output = Result<Vec<LogLine>, String>> + Send>>
        + Send
        + Sync,
>;

/// The control plane, as the admin address needs it.
#[derive(Clone)]
pub struct FleetAdmin {
    pub controller: Arc<Controller>,
    /// `(node, shard, lines)`.
    pub tail: Tail,
    /// Who makes tokens. None: nobody does.
    pub enrolment: Option<Arc<Enrolment>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetQuestion {
    Nodes,
    Started,
    /// `?model=M`.
    Explain,
    Snapshot,
    /// `?replica=R`, `&rank=N` (0) and `&lines=K`.
    Logs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetOrder {
    /// `?node=N`, with `&timeout_ms=D` or `&force`.
    Drain,
    /// `?node=N`.
    Undrain,
    /// `?replica=R`, `&force`.
    Stop,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum FleetError {
    /// This server starts no replicas.
    NoFleet,
    /// A part of the query is missing, or no number.
    Query(&'static str),
    Operator(OperatorError),
    /// The node did not give its lines.
    Tail(String),
    /// There is no new token.
    Token(IssueError),
    Died,
}

/// The part behind `?`, decoded.
#[derive(Clone, Debug, Default)]
pub struct Query(Vec<(String, String)>);

/// Lines of a log, where nobody says how many.
const LINES_DEFAULT: u32 = 100;

impl Query {
    pub fn of(uri: &Uri) -> Query {
        let pairs = uri.query().unwrap_or_default().split('&');
        let decoded = pairs.filter(|pair| !pair.is_empty()).map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(name), decode(value))
        });
        Query(decoded.collect())
    }

    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn get(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    fn text(&self, name: &'static str) -> Result<String, FleetError> {
        let given = self.get(name).filter(|value| !value.is_empty());
        given.map(str::to_owned).ok_or(FleetError::Query(name))
    }

    fn number<T: std::str::FromStr>(&self, name: &'static str) -> Result<Option<T>, FleetError> {
        self.get(name)
            .map(|text| text.parse().map_err(|_| FleetError::Query(name)))
            .transpose()
    }
}

/// `%2F` is `/`; what is no such thing stays as it is.
fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = text.get(at + 1..at + 3).filter(|_| bytes[at] == b'%');
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                decoded.push(byte);
                at += 3;
            }
            None => {
                decoded.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// Answers a question.
pub async fn ask(
    fleet: Option<&FleetAdmin>,
    question: FleetQuestion,
    query: Query,
) -> Result<Value, FleetError> {
    let fleet = fleet.ok_or(FleetError::NoFleet)?.clone();
    if question == FleetQuestion::Logs {
        return logs(&fleet, &query).await;
    }
    // A look at the fleet may be under way, and an explanation asks Lua.
    let answer = tokio::task::spawn_blocking(move || answer(&fleet.controller, question, &query));
    answer.await.map_err(|_| FleetError::Died)?
}

fn answer(
    controller: &Controller,
    question: FleetQuestion,
    query: &Query,
) -> Result<Value, FleetError> {
    Ok(match question {
        FleetQuestion::Nodes => json!({"nodes": controller.nodes()}),
        FleetQuestion::Started | FleetQuestion::Logs => {
            json!({"replicas": controller.replicas(), "waiting": controller.waiting()})
        }
        FleetQuestion::Explain => {
            let explained = controller
                .explain(&query.text("model")?)
                .map_err(FleetError::Operator)?;
            json!({"text": explained.to_string(), "explanation": explained})
        }
        FleetQuestion::Snapshot => json!(controller.snapshot()),
    })
}

async fn logs(fleet: &FleetAdmin, query: &Query) -> Result<Value, FleetError> {
    let replica = query.text("replica")?;
    let rank = query.number("rank")?.unwrap_or(0);
    let lines = query.number("lines")?.unwrap_or(LINES_DEFAULT);
    let controller = fleet.controller.clone();
    // A look at the fleet may be under way.
    let output = tokio::task::spawn_blocking(move || controller.output_of(&replica, rank));
    let output = output.await.map_err(|_| FleetError::Died)?;
    let (node, shard) = match output.map_err(FleetError::Operator)? {
        Output::At { node, shard } => (node, shard),
        Output::Kept(failure) => {
            let from = failure.lines.len().saturating_sub(lines as usize);
            let (node, lines) = (failure.node, &failure.lines[from..]);
            return Ok(json!({"node": node, "failed": failure.reason, "lines": lines}));
        }
    };
    let lines = (fleet.tail)(node.clone(), shard.clone(), lines).await;
    let lines = lines.map_err(FleetError::Tail)?;
    Ok(json!({"node": node, "shard": shard, "lines": lines}))
}

/// Carries out an order, and says what comes of it.
pub async fn order(
    fleet: Option<&FleetAdmin>,
    order: FleetOrder,
    query: Query,
) -> Result<String, FleetError> {
    let controller = fleet.ok_or(FleetError::NoFleet)?.controller.clone();
    let carried_out = move || {
        let force = query.has("force");
        let said = match order {
            FleetOrder::Drain => {
                let timeout = query.number("timeout_ms")?.map(Duration::from_millis);
                controller.drain(&query.text("node")?, timeout, force)
            }
            FleetOrder::Undrain => controller.undrain(&query.text("node")?),
            FleetOrder::Stop => controller.stop(&query.text("replica")?, force),
        };
        said.map_err(FleetError::Operator)
    };
    let carried_out = tokio::task::spawn_blocking(carried_out);
    carried_out.await.map_err(|_| FleetError::Died)?
}

/// Makes a token for a node's first contact: `?node=N`, `&lifetime_ms=D`. It is in this answer and nowhere else.
pub async fn token(fleet: Option<&FleetAdmin>, query: Query) -> Result<Value, FleetError> {
    let fleet = fleet.ok_or(FleetError::NoFleet)?;
    let enrolment = fleet.enrolment.clone();
    let enrolment = enrolment.ok_or(FleetError::Token(IssueError::Off))?;
    let made = move || {
        let node = query.text("node")?;
        let lifetime = query.number("lifetime_ms")?.map(Duration::from_millis);
        let lifetime = lifetime.unwrap_or(LIFETIME_DEFAULT);
        let issued = enrolment.issue(&node, lifetime, UtcTime::now());
        let issued = issued.map_err(FleetError::Token)?;
        tracing::info!(
            "a token was made for node `{node}`, which works until {}",
            issued.expires
        );
        Ok(json!({
            "token": issued.token.expose(),
            "node": node,
            "expires": issued.expires.to_string(),
        }))
    };
    // It writes to the disk.
    let made = tokio::task::spawn_blocking(made);
    made.await.map_err(|_| FleetError::Died)?
}

impl FleetError {
    pub fn status(&self) -> StatusCode {
        match self {
            FleetError::Operator(OperatorError::Absent { .. }) => StatusCode::BAD_GATEWAY,
            FleetError::NoFleet | FleetError::Operator(_) => StatusCode::NOT_FOUND,
            FleetError::Query(_) => StatusCode::BAD_REQUEST,
            FleetError::Tail(_) => StatusCode::BAD_GATEWAY,
            FleetError::Token(IssueError::Node(_) | IssueError::Lifetime(_)) => {
                StatusCode::BAD_REQUEST
            }
            FleetError::Token(IssueError::Off | IssueError::Full | IssueError::NotShown(_)) => {
                StatusCode::CONFLICT
            }
            FleetError::Token(_) | FleetError::Died => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// For programs.
    pub fn code(&self) -> &'static str {
        match self {
            FleetError::NoFleet => "no_fleet",
            FleetError::Query(_) => "invalid_query",
            FleetError::Operator(OperatorError::Unknown { .. }) => "unknown_name",
            FleetError::Operator(OperatorError::NoProfiles { .. }) => "no_profiles",
            FleetError::Operator(OperatorError::Absent { .. }) | FleetError::Tail(_) => "no_logs",
            FleetError::Token(IssueError::Off) => "enrolment_off",
            FleetError::Token(_) => "no_token",
            FleetError::Died => "died",
        }
    }
}

impl fmt::Display for FleetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FleetError::NoFleet => f.write_str(
                "this server starts no replicas: its configuration has no `agents` to listen to",
            ),
            FleetError::Query(name) => write!(f, "`{name}` is missing in the query, or is none"),
            FleetError::Operator(error) => error.fmt(f),
            FleetError::Tail(reason) => f.write_str(reason),
            FleetError::Token(error) => error.fmt(f),
            FleetError::Died => f.write_str("the answer panicked, see the log"),
        }
    }
}

impl std::error::Error for FleetError {}

#[cfg(test)]
mod tests;
