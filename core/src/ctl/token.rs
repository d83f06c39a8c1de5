//! `llmgw ctl cert token`: a one-time token for a node's first contact, made by the server.

use std::io::Write;

use clap::Args;
use serde::Deserialize;

use super::cert::node_id;
use super::client::{Admin, parsed};
use super::fleet::{encode, got};
use super::key::end_of;
use super::table::plain;
use super::{CtlError, OutputFormat};
use crate::config::UtcTime;

#[derive(Debug, Args)]
pub struct TokenArgs {
    /// The node that may use it, once.
    #[arg(long, value_name = "ID", value_parser = node_id)]
    node: String,
    /// How long it works: a duration such as `30m` or `2d`, seven days at most. Default: an hour.
    #[arg(long, value_name = "D")]
    expires: Option<String>,
}

/// What the server answers. No `Debug`: the token is a secret.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Made {
    token: String,
    node: String,
    expires: String,
}

/// Asks for a token, and prints it: alone on standard output, so that a script can hand it on.
pub(super) async fn run(
    admin: &Admin,
    arguments: &TokenArgs,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CtlError> {
    let path = path(arguments, UtcTime::now())?;
    let answer = got(admin.post(&path).await)?;
    if format == OutputFormat::Json {
        return Ok(writeln!(out, "{answer:#}")?);
    }
    let made: Made = parsed(answer)?;
    writeln!(out, "{}", plain(&made.token))?;
    out.flush()?;
    eprint!("{}", advice(&made));
    Ok(())
}

fn path(arguments: &TokenArgs, now: UtcTime) -> Result<String, CtlError> {
    let node = encode(&arguments.node);
    let Some(text) = &arguments.expires else {
        return Ok(format!("/v1/tokens/new?node={node}"));
    };
    let end = end_of(text, now).ok_or_else(|| {
        let text = plain(text);
        CtlError::Usage(format!(
            "`--expires {text}` is no time to come: give a duration such as `30m`, `1h` or `2d`"
        ))
    })?;
    let lifetime_ms = (end.0 - now.0).saturating_mul(1_000);
    Ok(format!(
        "/v1/tokens/new?node={node}&lifetime_ms={lifetime_ms}"
    ))
}

/// What to do with it, on the node. The token is not repeated: a file keeps it out of the list of processes.
fn advice(made: &Made) -> String {
    let (node, expires) = (plain(&made.node), plain(&made.expires));
    format!(
        "It works once, for node {node}, until {expires}. Put it into a file on the node that only you can read, and run there\n  \
         llmgw agent --server https://HOST:8443 --node {node} --enroll @FILE\n\
         with the server's host as its certificate names it. `--enroll TOKEN` works too, where nobody else sees the list of processes.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(expires: Option<&str>) -> TokenArgs {
        TokenArgs {
            node: "gpu.01".to_owned(),
            expires: expires.map(str::to_owned),
        }
    }

    #[test]
    fn a_lifetime_is_asked_for_in_milliseconds_or_left_to_the_server() {
        for (expires, path_expected) in [
            (None, "/v1/tokens/new?node=gpu.01"),
            (
                Some("30m"),
                "/v1/tokens/new?node=gpu.01&lifetime_ms=1800000",
            ),
            (
                Some("2d"),
                "/v1/tokens/new?node=gpu.01&lifetime_ms=172800000",
            ),
        ] {
            let path = path(&arguments(expires), UtcTime(1_796_000_000)).unwrap();
            assert_eq!(path, path_expected);
        }
        for expires in ["", "0s", "soon", "2020-01-01"] {
            let error = path(&arguments(Some(expires)), UtcTime(1_796_000_000)).unwrap_err();
            assert_eq!(error.exit_status(), 2);
            assert!(error.to_string().contains("is no time to come"), "{error}");
        }
    }

    #[test]
    fn the_advice_names_the_command_and_not_the_token() {
        let made = Made {
            token: "llmgw1.n1.secret".to_owned(),
            node: "n1".to_owned(),
            expires: "2026-12-31T00:00:00Z".to_owned(),
        };
        let advice = advice(&made);
        let command = "llmgw agent --server https://HOST:8443 --node n1 --enroll @FILE";
        assert!(advice.contains(command), "{advice}");
        assert!(advice.contains("until 2026-12-31T00:00:00Z"), "{advice}");
        assert!(!advice.contains("secret"), "{advice}");
    }
}
