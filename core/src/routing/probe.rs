//! Is an engine ready: it says so itself, and it lists the model under a name that the model goes by.

use std::sync::Arc;
use std::time::Duration;

use llmgw_plugins::{Policies, Readiness as Probes};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::fetch::{NoAnswer, Questions};
use super::replica::{Readiness, Replica};
use crate::{clock, random};

const PROBE_INTERVAL: Duration = Duration::from_millis(1_000);
const PROBE_TIMEOUT: Duration = Duration::from_millis(2_000);
/// Timed-out probes in a row before a ready engine counts as not ready. One is not death.
const PROBE_TIMEOUTS_MAX: u32 = 3;
/// Model names shown in a reason.
const NAMES_SHOWN_MAX: usize = 5;

/// Probes one replica until it leaves the configuration.
pub async fn run(replica: Arc<Replica>, policies: Arc<Policies>) {
    let questions = Questions::new(replica.clone(), PROBE_TIMEOUT);
    let mut timeouts = 0;
    let mut heard = replica.heard();
    loop {
        let started_ms = clock::now_ms();
        let probes = policies
            .current()
            .engine(&replica.endpoint.engine)
            .map(|plugin| plugin.readiness.clone());
        let verdict = match probes {
            Some(probes) => probe(&questions, &probes, &replica).await,
            None => Some(Readiness::NotReady {
                reason: format!("there is no engine plugin `{}`", replica.endpoint.engine),
            }),
        };
        match verdict {
            Some(verdict) => {
                timeouts = 0;
                publish(&replica, verdict, started_ms);
            }
            // It is slow to answer probes because it answers requests.
            None if replica.heard() != heard => timeouts = 0,
            None => {
                timeouts += 1;
                let was_ready = matches!(replica.readiness(), Readiness::Ready { .. });
                if !was_ready || timeouts >= PROBE_TIMEOUTS_MAX {
                    publish(
                        &replica,
                        Readiness::NotReady {
                            reason: format!("its probes got no answer within {PROBE_TIMEOUT:?}"),
                        },
                        started_ms,
                    );
                }
            }
        }
        heard = replica.heard();
        replica.upstream.close_aged();
        // Jitter keeps many gateways from asking in step.
        let wait = PROBE_INTERVAL.mul_f64(0.9 + 0.2 * random::unit());
        tokio::select! {
            () = replica.retired.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

fn publish(replica: &Replica, verdict: Readiness, started_ms: u64) {
    let text = match &verdict {
        Readiness::Ready { served, .. } => format!("ready, serves `{served}`"),
        Readiness::NotReady { reason } => format!("not ready: {reason}"),
        Readiness::Unknown => "unknown".to_string(),
    };
    if replica.probed(verdict, started_ms) {
        tracing::info!(replica = %replica.id, engine = %replica.endpoint.engine, "{text}");
    }
}

/// One verdict, or none where a question timed out.
async fn probe(questions: &Questions, probes: &Probes, replica: &Replica) -> Option<Readiness> {
    if let Some(health) = &probes.health {
        match questions.get(health).await {
            Ok(answer) if answer.status.is_success() => {}
            Ok(answer) => {
                return Some(Readiness::NotReady {
                    reason: format!("{health} answers {}", answer.status.as_u16()),
                });
            }
            Err(NoAnswer::TimedOut) => return None,
            Err(NoAnswer::Failed(reason)) => return Some(Readiness::NotReady { reason }),
        }
    }
    let Some(models) = &probes.models else {
        return Some(Readiness::Ready {
            served: replica.names[0].clone(),
            card: Arc::from("{}"),
        });
    };
    match questions.get(models).await {
        Ok(answer) if answer.status.is_success() => Some(served(&answer.body, models, replica)),
        Ok(answer) => Some(Readiness::NotReady {
            reason: format!("{models} answers {}", answer.status.as_u16()),
        }),
        Err(NoAnswer::TimedOut) => None,
        Err(NoAnswer::Failed(reason)) => Some(Readiness::NotReady { reason }),
    }
}

#[derive(Deserialize)]
struct ModelList<'a> {
    #[serde(borrow)]
    data: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct ModelCard {
    id: String,
}

/// Finds the model in an engine's `/v1/models`.
fn served(body: &[u8], path: &str, replica: &Replica) -> Readiness {
    let Ok(list) = serde_json::from_slice::<ModelList<'_>>(body) else {
        return Readiness::NotReady {
            reason: format!("{path} answers no model list"),
        };
    };
    let cards: Vec<(String, &str)> = list
        .data
        .iter()
        .filter_map(|raw| {
            let card: ModelCard = serde_json::from_str(raw.get()).ok()?;
            Some((card.id, raw.get()))
        })
        .collect();
    for name in &replica.names {
        if let Some((_, card)) = cards.iter().find(|(id, _)| **id == **name) {
            return Readiness::Ready {
                served: name.clone(),
                card: Arc::from(*card),
            };
        }
    }
    let listed: Vec<String> = cards
        .iter()
        .take(NAMES_SHOWN_MAX)
        .map(|(id, _)| format!("`{id}`"))
        .collect();
    Readiness::NotReady {
        reason: format!(
            "it lists {} but not `{}`; where that is the right engine, set the endpoint's `serves` to the name it lists",
            if listed.is_empty() {
                "no model".to_string()
            } else {
                listed.join(", ")
            },
            replica.names[0]
        ),
    }
}
