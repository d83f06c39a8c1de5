//! An agent's question for a certificate: asked of the tokens, and told in the log with the node and the address, never with the token.

use std::net::SocketAddr;
use std::sync::Arc;

use llmgw_proto::enrolment::{Enrolled, EnrolmentRefusal, EnrolmentRefusalCode, EnrolmentRequest};
use llmgw_proto::session::is_node_id;
use llmgw_proto::wire::error::WireError;

use super::door::Gate;
use crate::config::UtcTime;
use crate::control::enrolment::{Enrolment, Signed, off};

/// Answers it. Whoever asks has shown nothing yet but that they speak our protocol.
pub(super) async fn answer(
    enrolment: Option<&Arc<Enrolment>>,
    asked: Result<EnrolmentRequest, WireError>,
    address: SocketAddr,
    gate: &Gate,
) -> Result<Enrolled, EnrolmentRefusal> {
    let refuse = |node: &str, refusal: EnrolmentRefusal| {
        if let Some(unsaid) = gate.may_say(address, refusal.code.as_str()) {
            tracing::warn!("{address} was not enrolled{node}: {refusal}{unsaid}");
        }
        refusal
    };
    let request = readable(asked).map_err(|why| refuse("", why))?;
    let node = request.node.clone();
    let answered = match enrolment {
        _ if gate.is_plain() => Err(refusal(
            EnrolmentRefusalCode::Plaintext,
            "without TLS anybody on the way has read the token; set `agents.tls` on the server, and make a new token",
        )),
        None => Err(off()),
        Some(enrolment) => sign(enrolment.clone(), request, gate).await,
    };
    let signed = answered.map_err(|why| refuse(&format!(" as node `{node}`"), why))?;
    tracing::info!(
        "node `{node}` was enrolled from {address}: its certificate has serial {} and ends at {}",
        signed.certified.serial,
        signed.certified.not_after
    );
    Ok(Enrolled {
        certificate: signed.certified.certificate,
        authority: signed.authority,
    })
}

fn readable(
    asked: Result<EnrolmentRequest, WireError>,
) -> Result<EnrolmentRequest, EnrolmentRefusal> {
    let unreadable = |why: &str| refusal(EnrolmentRefusalCode::Unreadable, why);
    let request = asked.map_err(|error| unreadable(&error.to_string()))?;
    match is_node_id(&request.node) {
        true => Ok(request),
        false => Err(unreadable("`enroll.node` is not a node id")),
    }
}

/// It writes to the disk, so it has a thread to itself, and some only have one at a time.
async fn sign(
    enrolment: Arc<Enrolment>,
    request: EnrolmentRequest,
    gate: &Gate,
) -> Result<Signed, EnrolmentRefusal> {
    let turn = gate.enrolling().await;
    let signing = tokio::task::spawn_blocking(move || {
        // Until it is done, not until nobody waits for it any more.
        let _turn = turn;
        enrolment.enrol(&request, UtcTime::now())
    });
    let died = "the answer panicked, see the server's log";
    signing
        .await
        .unwrap_or_else(|_| Err(refusal(EnrolmentRefusalCode::Failed, died)))
}

fn refusal(code: EnrolmentRefusalCode, message: &str) -> EnrolmentRefusal {
    EnrolmentRefusal {
        code,
        message: message.to_owned(),
    }
}

#[cfg(test)]
mod tests;
