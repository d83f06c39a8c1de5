//! A node's first contact: a token becomes a certificate, for a key that is made here and never leaves.
//!
//! ```text
//! plan   argument.rs   is there a token, is it this node's, is it needed at all
//! key    files.rs      on disk before anything is asked, so that a start that was killed asks again for the same one
//! ask    ask.rs        the server is known by the token's fingerprint before the token leaves
//! keep   files.rs      the authority first, the certificate last: where that is, all is
//! ```

mod argument;
mod ask;
mod files;

use std::fmt;
use std::time::Duration;

use llmgw_proto::enrolment::EnrolmentRequest;
use llmgw_proto::identity::moment::EXPIRY_WARNED_DAYS;
use llmgw_proto::identity::{EnrolmentToken, Moment};
use llmgw_proto::link::KeepAlive;

use self::argument::NoTokenGiven;
pub use self::argument::TokenArgument;
use self::ask::NotAnswered;
use self::files::Have;
pub use self::files::{Keeper, in_state};
use crate::config::AgentTls;
use crate::session::backoff::{Backoff, Outcome, unit};
use crate::session::dial::ServerUrl;

/// What is to be done before the first session.
#[derive(Debug)]
pub struct Enrolling {
    server: ServerUrl,
    node: String,
    files: AgentTls,
    keeper: Keeper,
    token: EnrolmentToken,
    /// There is a certificate, which still works without this: why it should not do so for long.
    can_wait: Option<&'static str>,
}

const ENDS_SOON: &str = "the certificate ends soon";
const OTHER_AUTHORITY: &str = "the certificate is of another authority than the enrolment token";

/// How a server is spoken to.
#[derive(Clone, Copy, Debug)]
pub struct Manners {
    pub keep_alive: KeepAlive,
    /// For each step of an attempt.
    pub patience: Duration,
}

/// Why nothing can be planned: what the operator wrote is wrong.
#[derive(Debug)]
pub enum NoPlan {
    Plaintext {
        server: ServerUrl,
    },
    Token(NoTokenGiven),
    OtherNode {
        token: String,
        node: String,
    },
    /// What is in the files, and what would help.
    Files(String),
}

/// Why the node has no certificate. Trying again is of no use.
#[derive(Debug)]
pub struct NotEnrolled {
    server: ServerUrl,
    node: String,
    why: String,
}

impl Enrolling {
    /// Whether a token that was given is to be used. `None`: the certificate that is there will do.
    ///
    /// # Errors
    /// What the operator has to change.
    pub fn plan(
        given: &TokenArgument,
        server: &ServerUrl,
        node: &str,
        (files, keeper): (&AgentTls, Keeper),
        now: Moment,
    ) -> Result<Option<Enrolling>, NoPlan> {
        if !server.is_tls {
            let server = server.clone();
            return Err(NoPlan::Plaintext { server });
        }
        let have = files::look(files, node, now).map_err(NoPlan::Files)?;
        // Another authority took over, and what there is works for as long as the server trusts the old one too.
        let is_replaced = || {
            let token = token_for(given, node);
            token.is_ok_and(|token| files::is_of_another(files, token.authority()))
        };
        let can_wait = match have {
            Have::Nothing => None,
            Have::Certificate { days_left } if days_left <= EXPIRY_WARNED_DAYS => {
                (days_left >= 0).then_some(ENDS_SOON)
            }
            Have::Certificate { .. } if is_replaced() => Some(OTHER_AUTHORITY),
            Have::Certificate { days_left } => {
                tracing::info!(
                    "the enrolment token is not used: node `{node}` has a certificate for {days_left} more days ({})",
                    files.cert.display()
                );
                return Ok(None);
            }
        };
        let usable = token_for(given, node).and_then(|token| {
            // Before the token is used up.
            files::lacks_authority(files, keeper, token.authority()).map_err(NoPlan::Files)?;
            Ok(token)
        });
        let token = match usable {
            Ok(token) => token,
            Err(why) => {
                let Some(cause) = can_wait else {
                    return Err(why);
                };
                tracing::warn!("{cause}, and there will be no new one: {why}");
                return Ok(None);
            }
        };
        Ok(Some(Enrolling {
            server: server.clone(),
            node: node.to_owned(),
            files: files.clone(),
            keeper,
            token,
            can_wait,
        }))
    }

    /// Asks until there is an answer. Nothing is lost if this is dropped.
    ///
    /// # Errors
    /// The server refused, or is not the one that the token is of.
    pub async fn run(&self, manners: Manners) -> Result<(), NotEnrolled> {
        let Err(why) = self.enrol(manners).await else {
            return Ok(());
        };
        if let Some(cause) = self.can_wait {
            tracing::warn!("{cause}, and there is no new one: {why}");
            return Ok(());
        }
        Err(NotEnrolled {
            server: self.server.clone(),
            node: self.node.clone(),
            why,
        })
    }

    async fn enrol(&self, manners: Manners) -> Result<(), String> {
        let key = files::key(&self.files.key).map_err(|problem| problem.to_string())?;
        let request = EnrolmentRequest {
            token: self.token.clone(),
            node: self.node.clone(),
            signing_request: files::request(&key, &self.node)?,
        };
        let mut backoff = Backoff::default();
        let enrolled = loop {
            match ask::ask(&self.server, &request, manners).await {
                Ok(enrolled) => break enrolled,
                Err(NotAnswered::ForGood(why)) => return Err(why),
                Err(NotAnswered::Yet(why)) if self.can_wait.is_some() => return Err(why),
                Err(NotAnswered::Yet(why)) => {
                    let wait = backoff.next(Outcome::Broke, unit());
                    tracing::warn!(
                        "{} does not enrol node `{}` yet: {why}; next attempt in {:.1} s",
                        self.server,
                        self.node,
                        wait.as_secs_f64()
                    );
                    tokio::time::sleep(wait).await;
                }
            }
        };
        let certificate = files::keep(&self.files, self.keeper, &enrolled, key, &self.token)?;
        tracing::info!(
            "node `{}` is enrolled at {}: its certificate {} has serial {} and ends at {}",
            self.node,
            self.server,
            self.files.cert.display(),
            certificate.serial,
            certificate.not_after
        );
        Ok(())
    }
}

fn token_for(given: &TokenArgument, node: &str) -> Result<EnrolmentToken, NoPlan> {
    let token = given.read().map_err(NoPlan::Token)?;
    if token.node() != node {
        return Err(NoPlan::OtherNode {
            token: token.node().to_owned(),
            node: node.to_owned(),
        });
    }
    Ok(token)
}

impl fmt::Display for NoPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoPlan::Plaintext { server } => {
                let server = ServerUrl {
                    is_tls: true,
                    ..server.clone()
                };
                write!(
                    f,
                    "`--enroll` needs TLS, else anybody on the way can read the token; dial `{server}`"
                )
            }
            NoPlan::Token(why) => write!(f, "`--enroll`: {why}"),
            NoPlan::OtherNode { token, node } => write!(
                f,
                "`--enroll`: the token is for node `{token}`, this is node `{node}`; give `--node {token}`, or make one with `llmgw ctl cert token --node {node}`"
            ),
            NoPlan::Files(why) => write!(f, "`--enroll`: {why}"),
        }
    }
}

impl fmt::Display for NotEnrolled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotEnrolled { server, node, why } = self;
        write!(f, "{server} does not enrol node `{node}`: {why}")
    }
}

impl std::error::Error for NoPlan {}
impl std::error::Error for NotEnrolled {}

#[cfg(test)]
mod tests;
