//! `llmgw ctl drain`: orders it, and waits until the node is empty.

use std::collections::BTreeSet;
use std::future::Future;
use std::io::Write;
use std::time::{Duration, Instant};

use llmgw_proto::units::HumanDuration;

use super::super::client::{Admin, parsed};
use super::super::table::plain;
use super::super::{CtlError, OutputFormat, show};
use super::{Node, encode, flag, got, seen, text_of};
use crate::admin::status::{ModelStatus, StatusReport};

/// `ctl drain` looks this often whether the node is empty.
const DRAIN_POLL: Duration = Duration::from_millis(500);
/// `ctl drain` waits no longer; the drain goes on.
const DRAIN_WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// What is ordered.
pub(super) struct Order<'a> {
    pub(super) node: &'a str,
    pub(super) timeout: Option<&'a HumanDuration>,
    pub(super) force: bool,
}

/// Orders the drain, then waits until the node is empty.
pub(super) async fn run(
    admin: &Admin,
    order: Order<'_>,
    format: OutputFormat,
    out: &mut dyn Write,
    interrupted: impl Future<Output = ()>,
) -> Result<(), CtlError> {
    let Order {
        node,
        timeout,
        force,
    } = order;
    let timeout = timeout.map_or_else(String::new, |timeout| {
        format!("&timeout_ms={}", timeout.0.as_millis())
    });
    let path = format!(
        "/v1/nodes/drain?node={}{timeout}{}",
        encode(node),
        flag(force)
    );
    let mut draining = Draining::default();
    if let Some(before) = seen(admin, node).await? {
        draining.notes(&before);
    }
    let message = got(admin.post(&path).await)?;
    eprintln!("{}", text_of(&message));
    let emptied = async {
        let emptied = draining.wait(admin, node).await;
        for lost in draining.models_without_replica(admin).await {
            eprintln!("{lost}");
        }
        emptied
    };
    tokio::select! {
        emptied = emptied => emptied?,
        () = interrupted => {
            let node = plain(node);
            return Err(CtlError::Interrupted(format!(
                "the drain of {node} goes on; `llmgw ctl undrain {node}` ends it"
            )));
        }
    }
    match format {
        OutputFormat::Json => writeln!(out, "{{\"node\": {node:?}, \"empty\": true}}")?,
        OutputFormat::Text => writeln!(out, "{} is empty", plain(node))?,
    }
    Ok(())
}

/// Ends when a person interrupts. Where that can't be heard of, the default ends the process.
pub(super) async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// What was seen of a node that drains.
#[derive(Default)]
struct Draining {
    /// What it waits for, as told last.
    told: String,
    /// It was connected and drained: it knows.
    has_heard: bool,
    /// Those that it ran.
    models: BTreeSet<String>,
}

impl Draining {
    /// Waits until the node is empty; what it waits for is told as it changes.
    async fn wait(&mut self, admin: &Admin, node: &str) -> Result<(), CtlError> {
        let started = Instant::now();
        // The server was away since the node was last seen: it may have to hear of the node again.
        let mut was_away = false;
        while started.elapsed() < DRAIN_WAIT_MAX {
            match seen(admin, node).await {
                Ok(Some(seen)) => {
                    was_away = false;
                    self.notes(&seen);
                    if is_empty(&seen, self.has_heard)? {
                        return Ok(());
                    }
                    self.tell(plain(&seen.reason));
                }
                Ok(None) if was_away => {
                    self.tell(format!("{node} has not connected to the server yet"));
                }
                Ok(None) => return Err(CtlError::Failed(format!("{node} is no longer known"))),
                Err(CtlError::Client(error)) if error.may_pass() => {
                    was_away = true;
                    self.tell(format!("{error}\nIt is asked again until it answers."));
                }
                Err(error) => return Err(error),
            }
            tokio::time::sleep(DRAIN_POLL).await;
        }
        Err(CtlError::Failed(format!(
            "{node} is not empty after a day; the drain goes on"
        )))
    }

    fn notes(&mut self, seen: &Node) {
        self.has_heard |= seen.state == "draining";
        let models = seen
            .replicas
            .iter()
            .filter_map(|name| name.rsplit_once('/'));
        self.models
            .extend(models.map(|(model, _)| model.to_owned()));
    }

    fn tell(&mut self, what: String) {
        if what != self.told {
            eprintln!("{what}");
            self.told = what;
        }
    }

    /// What the drain left nobody to serve; nothing where the server can't be asked any more.
    async fn models_without_replica(&self, admin: &Admin) -> Vec<String> {
        let report = admin
            .get("/v1/status")
            .await
            .and_then(parsed::<StatusReport>);
        let models = report.map(|report| report.models).unwrap_or_default();
        let mine = models
            .iter()
            .filter(|model| self.models.contains(&model.name));
        mine.filter_map(without_replica).collect()
    }
}

pub(super) fn without_replica(model: &ModelStatus) -> Option<String> {
    let name = plain(&model.name);
    match show::counts(model) {
        (0, of @ 1..) => Some(format!(
            "{name} now has no replica (0 of {of}); `llmgw ctl explain {name}` says what it waits for"
        )),
        _ => None,
    }
}

/// Whether a node that drains is done; an error where it never will be. `has_heard`: it was told of the drain, and obeyed.
fn is_empty(seen: &Node, has_heard: bool) -> Result<bool, CtlError> {
    let node = &seen.id;
    match &*seen.state {
        "ready" => Err(CtlError::Failed(format!("{node} was put back into use"))),
        "lost" => Err(CtlError::Failed(format!("{node} is lost: {}", seen.reason))),
        // What is known is what it told before, and that it drains is not among it.
        "unreachable" if seen.replicas.is_empty() && !has_heard => {
            Err(CtlError::Failed(left_behind(seen)))
        }
        _ if seen.replicas.is_empty() => Ok(true),
        // Nobody is there to say that it is empty, and nothing else is left to do here.
        "unreachable" if seen.leaving.len() == seen.replicas.len() => {
            Err(CtlError::Failed(left_behind(seen)))
        }
        _ => Ok(false),
    }
}

pub(super) fn left_behind(absent: &Node) -> String {
    let (node, reason) = (plain(&absent.id), plain(&absent.reason));
    let rest = match absent.replicas.len() {
        0 => "nothing is known to run there, and it hears of the drain when it is back".to_owned(),
        1 => "its replica gets no more requests, and stops when it is back".to_owned(),
        number => {
            format!("its {number} replicas get no more requests, and stop when it is back")
        }
    };
    format!("{node} is out of use, but unreachable ({reason}): {rest}")
}
