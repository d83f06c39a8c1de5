//! One question to the server, which is known by its authority's fingerprint before anything is said.

use llmgw_proto::enrolment::{Enrolled, EnrolmentRequest};
use llmgw_proto::identity::dialling::{Trust, connect};
use llmgw_proto::link;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Manners;
use crate::session::dial::ServerUrl;

/// Why there is no certificate.
#[derive(Debug)]
pub(super) enum NotAnswered {
    /// It may be otherwise at the next attempt.
    Yet(String),
    ForGood(String),
}

/// Dials, checks that the server is the token's, and asks.
pub(super) async fn ask(
    server: &ServerUrl,
    request: &EnrolmentRequest,
    manners: Manners,
) -> Result<Enrolled, NotAnswered> {
    let patience = manners.patience;
    let late = |what: &str| NotAnswered::Yet(format!("{what}: not within {patience:?}"));
    let connecting = TcpStream::connect((server.host.as_str(), server.port));
    let socket = timeout(patience, connecting)
        .await
        .map_err(|_| late("connecting"))?
        .map_err(|error| NotAnswered::Yet(format!("connecting: {error}")))?;
    let trust = Trust::Pinned(request.token.authority());
    let shaking = connect(socket, &server.host, &trust, None);
    let stream = timeout(patience, shaking)
        .await
        .map_err(|_| late("the TLS handshake"))?
        .map_err(|problem| match problem.needs_a_person() {
            true => NotAnswered::ForGood(format!("the token was not sent: {problem}")),
            false => NotAnswered::Yet(problem.to_string()),
        })?;
    let answer = timeout(patience, link::enrol(stream, manners.keep_alive, request))
        .await
        .map_err(|_| late("the answer"))?
        .map_err(|error| NotAnswered::Yet(error.to_string()))?;
    answer.map_err(|refusal| match refusal.code.passes() {
        true => NotAnswered::Yet(refusal.to_string()),
        false => NotAnswered::ForGood(refusal.to_string()),
    })
}
