//! `llmgw ctl nodes | explain | logs | drain | undrain | stop | snapshot`, and the started replicas of `ctl replicas`.

mod drain;

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

use clap::Subcommand;
use llmgw_proto::units::HumanDuration;
use serde::Deserialize;
use serde_json::Value;

use super::client::{Admin, ClientError, parsed};
use super::table::{UNKNOWN, plain, table};
use super::{CtlError, OutputFormat};

/// Codes of refusals that are the answer to what was asked, and no trouble with the server.
const FAILED_CODES: [&str; 6] = [
    "unknown_name",
    "no_profiles",
    "no_logs",
    "no_fleet",
    "enrolment_off",
    "no_token",
];

/// What can be asked of the fleet, and ordered.
#[derive(Debug, Subcommand)]
pub enum FleetCommand {
    /// Nodes: state, what is free on them, and what they run.
    Nodes,
    /// Why a model does or does not run, and what would make it.
    Explain { model: String },
    /// The last lines that a replica wrote, also one that failed.
    Logs {
        /// `<model>/<number>`, or its address.
        replica: String,
        /// Which of its shards; 0 is the leader.
        #[arg(long, default_value_t = 0)]
        rank: u32,
        /// How many lines.
        #[arg(long, default_value_t = 100, value_name = "N")]
        lines: u32,
    },
    /// Take a node out of use: replacements first, then its replicas leave. Waits until it is empty.
    Drain {
        node: String,
        /// After this time its replicas leave even without replacements; requests in flight finish.
        #[arg(long, value_name = "D")]
        timeout: Option<HumanDuration>,
        /// Its replicas stop at once, whatever `--timeout` says; requests in flight are cut off.
        #[arg(long)]
        force: bool,
    },
    /// Put a node back into use.
    Undrain { node: String },
    /// Stop a replica; another one takes its place.
    Stop {
        /// `<model>/<number>`, or its address.
        replica: String,
        /// Its requests may not finish.
        #[arg(long)]
        force: bool,
    },
    /// The fleet as policies see it, for `llmgw policy test` and `explain`.
    Snapshot {
        /// The file; standard output where it is left out.
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

/// What `ctl` reads of a node.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Node {
    id: String,
    state: String,
    reason: String,
    gpu_class: Option<String>,
    gpus: u64,
    gpus_free: u64,
    cpus: u64,
    cpus_free: u64,
    memory_gib: f64,
    memory_gib_free: f64,
    replicas: Vec<String>,
    leaving: Vec<String>,
    certificate: Option<Certificate>,
}

/// What `ctl` reads of a node's certificate.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Certificate {
    days_left: i64,
}

/// What `ctl` reads of a replica that the server started.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Started {
    id: String,
    state: String,
    node: String,
    node_state: String,
    profile: String,
    reason: String,
    address: Option<String>,
    outdated: bool,
}

/// What `ctl` reads of replicas that wait to be started.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Waiting {
    model: String,
    replicas: u64,
    node: Option<String>,
    profile: Option<String>,
    reason: String,
    waits_ms: u64,
}

/// What the server starts: the replicas that there are, and those that wait.
#[derive(Debug, Default)]
pub(super) struct StartedPage {
    pub(super) replicas: Vec<Value>,
    pub(super) waiting: Vec<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Line {
    text: String,
}

/// Runs one of them.
pub(super) async fn run(
    admin: &Admin,
    command: &FleetCommand,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CtlError> {
    match command {
        FleetCommand::Nodes => {
            let answer = got(admin.get("/v1/nodes").await)?;
            let nodes = answer.get("nodes").cloned().unwrap_or_default();
            match format {
                OutputFormat::Json => writeln!(out, "{nodes:#}")?,
                OutputFormat::Text => write!(out, "{}", node_table(&parsed::<Vec<Node>>(nodes)?))?,
            }
        }
        FleetCommand::Explain { model } => return explain(admin, model, format, out).await,
        FleetCommand::Logs {
            replica,
            rank,
            lines,
        } => return logs(admin, replica, *rank, *lines, format, out).await,
        FleetCommand::Drain {
            node,
            timeout,
            force,
        } => {
            let order = drain::Order {
                node,
                timeout: timeout.as_ref(),
                force: *force,
            };
            return drain::run(admin, order, format, out, drain::interrupted()).await;
        }
        FleetCommand::Undrain { node } => return undrain(admin, node, format, out).await,
        FleetCommand::Stop { replica, force } => {
            let replica = named(admin, replica).await?;
            let path = format!(
                "/v1/replicas/stop?replica={}{}",
                encode(&replica),
                flag(*force)
            );
            let answer = got(admin.post(&path).await)?;
            show_said(&answer, &text_of(&answer), format, out)?;
        }
        FleetCommand::Snapshot { output } => {
            let mut text = format!("{:#}", got(admin.get("/v1/snapshot").await)?);
            text.push('\n');
            match output {
                Some(file) => std::fs::write(file, text)?,
                None => write!(out, "{text}")?,
            }
        }
    }
    Ok(())
}

async fn explain(
    admin: &Admin,
    model: &str,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CtlError> {
    let path = format!("/v1/explain?model={}", encode(model));
    let answer = got(admin.get(&path).await)?;
    if format == OutputFormat::Json {
        let explanation = answer.get("explanation").unwrap_or(&Value::Null);
        return Ok(writeln!(out, "{explanation:#}")?);
    }
    let text = answer.get("text").and_then(Value::as_str);
    for line in text.unwrap_or_default().lines() {
        writeln!(out, "{}", plain(line))?;
    }
    Ok(())
}

async fn logs(
    admin: &Admin,
    replica: &str,
    rank: u32,
    lines: u32,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CtlError> {
    let replica = encode(&named(admin, replica).await?);
    let path = format!("/v1/logs?replica={replica}&rank={rank}&lines={lines}");
    let answer = got(admin.get(&path).await)?;
    let lines = answer.get("lines").cloned().unwrap_or_default();
    if let Some(reason) = answer.get("failed").and_then(Value::as_str) {
        let node = answer.get("node").and_then(Value::as_str);
        let node = node.map_or_else(String::new, |node| format!(" on {node}"));
        eprintln!(
            "it failed{node} ({}); what was kept of its last lines:",
            plain(reason)
        );
    }
    if format == OutputFormat::Json {
        return Ok(writeln!(out, "{lines:#}")?);
    }
    for line in parsed::<Vec<Line>>(lines)? {
        writeln!(out, "{}", plain(&line.text))?;
    }
    Ok(())
}

/// The replicas that the server started or will; none where it starts none.
pub(super) async fn started(admin: &Admin) -> Result<StartedPage, CtlError> {
    match admin.get("/v1/started").await {
        Ok(answer) => {
            let part = |name: &str| {
                let rows = answer.get(name).and_then(Value::as_array);
                rows.cloned().unwrap_or_default()
            };
            Ok(StartedPage {
                replicas: part("replicas"),
                waiting: part("waiting"),
            })
        }
        // An older server, or one without a fleet, has none.
        Err(ClientError::Refused { code, .. })
            if ["no_fleet", "not_found"].contains(&code.as_str()) =>
        {
            Ok(StartedPage::default())
        }
        Err(error) => Err(error.into()),
    }
}

/// Below the replicas in the pools; nothing where nothing is to be started.
pub(super) fn started_table(page: StartedPage) -> Result<String, CtlError> {
    let replicas: Vec<Started> = parsed(Value::Array(page.replicas))?;
    let waiting: Vec<Waiting> = parsed(Value::Array(page.waiting))?;
    if replicas.is_empty() && waiting.is_empty() {
        return Ok(String::new());
    }
    let mut rows: Vec<[String; 5]> = replicas
        .into_iter()
        .map(|replica| {
            let node = match &*replica.node_state {
                "ready" => replica.node,
                state => format!("{} ({state})", replica.node),
            };
            let mut why = replica.reason;
            // One that leaves says why by itself.
            if replica.outdated && !why.starts_with("leaves: ") {
                let gap = if why.is_empty() { "" } else { "; " };
                write!(why, "{gap}outdated: its model or profile changed").ok();
            }
            [replica.id, replica.state, node, replica.profile, why]
        })
        .collect();
    rows.extend(waiting.into_iter().map(waiting_row));
    let head = ["STARTED", "STATE", "NODE", "PROFILE", "WHY"];
    Ok(format!("\n{}", table(head, &rows)))
}

/// A row of the same table. There is no replica yet, so the model stands for it.
fn waiting_row(waiting: Waiting) -> [String; 5] {
    let count = match waiting.replicas {
        1 => "1 replica".to_owned(),
        number => format!("{number} replicas"),
    };
    let next = match waiting.waits_ms {
        0 => String::new(),
        ms => format!("; next attempt in {} s", ms.div_ceil(1_000)),
    };
    let why = format!("{count}: {}{next}", waiting.reason);
    let or_none = |text: Option<String>| text.unwrap_or_else(|| UNKNOWN.to_owned());
    let (node, profile) = (or_none(waiting.node), or_none(waiting.profile));
    [waiting.model, "waiting".to_owned(), node, profile, why]
}

fn node_table(nodes: &[Node]) -> String {
    let rows: Vec<[String; 8]> = nodes
        .iter()
        .map(|node| {
            let gpus = match &node.gpu_class {
                Some(class) => format!("{}/{} {class}", node.gpus_free, node.gpus),
                None => UNKNOWN.to_owned(),
            };
            [
                node.id.clone(),
                node.state.clone(),
                gpus,
                format!("{}/{}", node.cpus_free, node.cpus),
                format!("{:.0}/{:.0}", node.memory_gib_free, node.memory_gib),
                node.replicas.len().to_string(),
                node.certificate.as_ref().map_or(UNKNOWN.to_owned(), lasts),
                node.reason.clone(),
            ]
        })
        .collect();
    let head = [
        "NODE",
        "STATE",
        "GPUS FREE",
        "CPUS FREE",
        "GIB FREE",
        "REPLICAS",
        "CERT",
        "WHY",
    ];
    table(head, &rows)
}

fn lasts(certificate: &Certificate) -> String {
    match certificate.days_left {
        ..0 => "expired".to_owned(),
        days => format!("in {days} d"),
    }
}

/// The node, if the server knows it.
async fn seen(admin: &Admin, node: &str) -> Result<Option<Node>, CtlError> {
    let answer = got(admin.get("/v1/nodes").await)?;
    let nodes = answer.get("nodes").cloned().unwrap_or_default();
    let nodes: Vec<Node> = parsed(nodes)?;
    Ok(nodes.into_iter().find(|seen| seen.id == node))
}

async fn undrain(
    admin: &Admin,
    node: &str,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CtlError> {
    let before = seen(admin, node).await?;
    let path = format!("/v1/nodes/undrain?node={}", encode(node));
    let answer = got(admin.post(&path).await)?;
    let text = match before {
        Some(before) if before.state == "ready" => {
            format!("{} was not drained, and is in use", plain(node))
        }
        _ => text_of(&answer),
    };
    show_said(&answer, &text, format, out)
}

/// The name of a replica that is given by it or by its address, as the pools have it.
async fn named(admin: &Admin, replica: &str) -> Result<String, CtlError> {
    if replica.contains('/') {
        return Ok(replica.to_owned());
    }
    let started: Vec<Started> = parsed(Value::Array(started(admin).await?.replicas))?;
    let mut there = started.into_iter();
    let is_meant = |known: &Started| known.address.as_deref() == Some(replica);
    // What is unknown is so to the server, which says what there is.
    let found = there.find(is_meant);
    Ok(found.map_or_else(|| replica.to_owned(), |known| known.id))
}

/// What came of an order.
fn show_said(
    answer: &Value,
    text: &str,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CtlError> {
    match format {
        OutputFormat::Json => writeln!(out, "{answer:#}")?,
        OutputFormat::Text => writeln!(out, "{text}")?,
    }
    Ok(())
}

fn text_of(answer: &Value) -> String {
    let message = answer.get("message").and_then(Value::as_str);
    plain(message.unwrap_or("done"))
}

fn flag(force: bool) -> &'static str {
    if force { "&force" } else { "" }
}

pub(super) fn got(answer: Result<Value, ClientError>) -> Result<Value, CtlError> {
    match answer {
        Err(ClientError::Refused { code, message, .. })
            if FAILED_CODES.contains(&code.as_str()) =>
        {
            Err(CtlError::Failed(message))
        }
        other => Ok(other?),
    }
}

/// Everything but letters, digits and `-_.` as `%XX`.
pub(super) fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'-' | b'_' | b'.' => encoded.push(char::from(byte)),
            _ if byte.is_ascii_alphanumeric() => encoded.push(char::from(byte)),
            _ => write!(encoded, "%{byte:02X}").unwrap_or_default(),
        }
    }
    encoded
}

#[cfg(test)]
mod tests;
