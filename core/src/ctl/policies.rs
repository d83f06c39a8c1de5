//! `llmgw ctl policies rollback | pin GENERATION | unpin | untrip`: changes which policies a running server uses.

use std::io::Write;

use clap::Subcommand;
use serde_json::Value;

use super::client::{Admin, ClientError};
use super::table::plain;
use super::{CtlError, OutputFormat};

/// What can be done with the policies of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Subcommand)]
pub enum PoliciesCommand {
    /// Go back to the generation before this one, and ignore the directory until `unpin`.
    Rollback,
    /// Go to a generation that the server still has, and ignore the directory until `unpin`.
    Pin {
        /// Its number; `ctl policies` lists them.
        generation: u64,
    },
    /// Follow the directory again.
    Unpin,
    /// Switch on again the hooks that were switched off because they failed too often.
    Untrip,
}

/// Codes of refusals that are the answer to what was asked, and no trouble with the server.
const FAILED_CODES: [&str; 2] = ["unknown_generation", "reload_failed"];

impl PoliciesCommand {
    fn path(self) -> String {
        match self {
            PoliciesCommand::Rollback => "/v1/policies/rollback".to_owned(),
            PoliciesCommand::Pin { generation } => {
                format!("/v1/policies/pin?generation={generation}")
            }
            PoliciesCommand::Unpin => "/v1/policies/unpin".to_owned(),
            PoliciesCommand::Untrip => "/v1/policies/untrip".to_owned(),
        }
    }
}

/// Asks the server to do it, and prints what is in force now.
pub(super) async fn change(
    admin: &Admin,
    command: PoliciesCommand,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CtlError> {
    match admin.post(&command.path()).await {
        Ok(answer) if format == OutputFormat::Json => Ok(writeln!(out, "{answer:#}")?),
        Ok(answer) => {
            let message = answer
                .get("message")
                .and_then(Value::as_str)
                .unwrap_or("done");
            Ok(writeln!(out, "{}", plain(message))?)
        }
        Err(ClientError::Refused { code, message, .. })
            if FAILED_CODES.contains(&code.as_str()) =>
        {
            Err(CtlError::Failed(message))
        }
        Err(error) => Err(error.into()),
    }
}
