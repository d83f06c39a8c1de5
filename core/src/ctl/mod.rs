//! `llmgw ctl`: shows and changes a running server through its admin address.
//!
//! Data goes to stdout, messages to stderr. Exit status: 0 done, 1 the thing asked for failed, 2 usage,
//! 3 the server could not be reached or refused, 130 interrupted.

mod cert;
mod client;
mod fleet;
mod key;
mod policies;
mod show;
pub(crate) mod table;
mod token;
mod trust;

use std::fmt;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::Value;

pub use cert::CertCommand;
use client::{Admin, ClientError};
pub use fleet::FleetCommand;
pub use policies::PoliciesCommand;
pub use token::TokenArgs;

use crate::config::UtcTime;

/// `ctl status --watch` asks this often.
const WATCH_INTERVAL_MS: u64 = 2000;

/// The arguments of `llmgw ctl`.
#[derive(Debug, Args)]
pub struct CtlArgs {
    /// The server's admin address.
    #[arg(
        long,
        global = true,
        env = "LLMGW_ADMIN",
        default_value = "http://127.0.0.1:8081",
        value_name = "URL"
    )]
    pub admin: String,
    /// The admin token, where the server asks for one. Better given in the environment, where `ps` doesn't show it.
    #[arg(
        long,
        global = true,
        env = "LLMGW_ADMIN_TOKEN",
        hide_env_values = true,
        value_name = "TOKEN"
    )]
    pub token: Option<String>,
    /// The authority (PEM) that issued the certificate of the admin address, which is then dialled over https.
    // `ctl cert` has a `--ca` of its own, which is a directory.
    #[arg(long, global = true, env = "LLMGW_ADMIN_CA", value_name = "FILE")]
    pub admin_ca: Option<PathBuf>,
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        value_name = "FORMAT"
    )]
    pub format: OutputFormat,
    #[command(subcommand)]
    pub command: CtlCommand,
}

/// How `ctl` prints what it was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Tables for people.
    #[default]
    Text,
    /// The server's own JSON.
    Json,
}

/// What `ctl` can be asked for.
#[derive(Debug, Subcommand)]
pub enum CtlCommand {
    /// Version, uptime, configuration, and how each model does.
    Status {
        /// Ask again every two seconds.
        #[arg(long)]
        watch: bool,
    },
    /// Models with their aliases and how many replicas are ready.
    Models,
    /// Every replica: state, load, and why it is not ready.
    Replicas,
    /// The policy set in force, and why a newer one is not; or choose another one.
    Policies {
        #[command(subcommand)]
        change: Option<PoliciesCommand>,
    },
    #[command(flatten)]
    Fleet(FleetCommand),
    /// Reload configuration and policies now.
    Reload {
        /// Also a change that stops more than half of the running replicas.
        #[arg(long)]
        confirm: bool,
    },
    /// API keys of tenants.
    Key {
        #[command(subcommand)]
        command: KeyCommand,
    },
    /// Certificates that servers and agents show each other. The server is asked for a token only.
    Cert {
        #[command(subcommand)]
        command: Certificates,
    },
}

/// What can be done with certificates.
#[derive(Debug, Subcommand)]
pub enum Certificates {
    #[command(flatten)]
    Files(CertCommand),
    /// Have the server make a token, which a new node gets its certificate with, once.
    Token(TokenArgs),
}

/// What can be done with keys.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make a key: printed once, with the line for the configuration. The server is not asked.
    New {
        /// The tenant that the key is for.
        #[arg(long)]
        tenant: String,
        /// When it ends: a duration from now (`90d`, `12h`) or a date (`2026-12-31`, UTC). Never, where it is left out.
        #[arg(long, value_name = "D")]
        expires: Option<String>,
    },
}

/// Why a command did not do what it was asked.
#[derive(Debug)]
enum CtlError {
    Client(ClientError),
    Key(key::KeyError),
    Cert(cert::CertError),
    /// What is wrong with the arguments.
    Usage(String),
    /// The server did not do it, and said why.
    Failed(String),
    /// A person had enough of waiting. What goes on without them.
    Interrupted(String),
    Output(std::io::Error),
}

impl CtlError {
    fn exit_status(&self) -> u8 {
        match self {
            CtlError::Client(error) => error.exit_status(),
            CtlError::Key(error) => error.exit_status(),
            CtlError::Usage(_) => 2,
            CtlError::Cert(_) | CtlError::Failed(_) | CtlError::Output(_) => 1,
            CtlError::Interrupted(_) => 130,
        }
    }
}

impl fmt::Display for CtlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CtlError::Client(error) => error.fmt(f),
            CtlError::Key(error) => error.fmt(f),
            CtlError::Cert(error) => error.fmt(f),
            CtlError::Usage(reason) | CtlError::Failed(reason) | CtlError::Interrupted(reason) => {
                f.write_str(reason)
            }
            CtlError::Output(error) => write!(f, "could not write the output: {error}"),
        }
    }
}

impl From<ClientError> for CtlError {
    fn from(error: ClientError) -> CtlError {
        CtlError::Client(error)
    }
}

impl From<std::io::Error> for CtlError {
    fn from(error: std::io::Error) -> CtlError {
        CtlError::Output(error)
    }
}

/// Runs one command. Starts a runtime of its own: not to be called within one.
pub fn main(args: CtlArgs) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("llmgw ctl: {error}");
            return ExitCode::from(1);
        }
    };
    let mut stdout = std::io::stdout();
    let terminal = stdout.is_terminal();
    ExitCode::from(runtime.block_on(execute(&args, &mut stdout, terminal)))
}

/// Runs one command with its data on `out`, and returns the exit status.
async fn execute(args: &CtlArgs, out: &mut dyn Write, terminal: bool) -> u8 {
    match command(args, out, terminal).await {
        Ok(()) => 0,
        // Who reads has read enough (`ctl replicas | head`).
        Err(CtlError::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => 0,
        Err(error) => {
            eprintln!("llmgw ctl: {error}");
            error.exit_status()
        }
    }
}

async fn command(args: &CtlArgs, out: &mut dyn Write, terminal: bool) -> Result<(), CtlError> {
    let path = match &args.command {
        CtlCommand::Key {
            command: KeyCommand::New { tenant, expires },
        } => return new_key(tenant, expires.as_deref(), args.format, out),
        CtlCommand::Cert {
            command: Certificates::Files(command),
        } => return cert::run(command, args.format, out),
        CtlCommand::Cert {
            command: Certificates::Token(arguments),
        } => {
            let admin = admin(args)?;
            return token::run(&admin, arguments, args.format, out).await;
        }
        CtlCommand::Reload { confirm } => return reload(args, *confirm, out).await,
        CtlCommand::Policies {
            change: Some(change),
        } => {
            let admin = admin(args)?;
            return policies::change(&admin, *change, args.format, out).await;
        }
        CtlCommand::Fleet(command) => {
            let admin = admin(args)?;
            return fleet::run(&admin, command, args.format, out).await;
        }
        CtlCommand::Replicas => return replicas(args, out).await,
        CtlCommand::Status { watch: true } => return watch(args, out, terminal).await,
        CtlCommand::Status { watch: false } | CtlCommand::Models => "/v1/status",
        CtlCommand::Policies { change: None } => "/v1/policies",
    };
    let admin = admin(args)?;
    let answer = admin.get(path).await?;
    print(args, answer, out)
}

fn admin(args: &CtlArgs) -> Result<Admin, ClientError> {
    // An empty variable is one that is not set.
    let ca = args.admin_ca.as_deref();
    let ca = ca.filter(|ca| !ca.as_os_str().is_empty());
    let admin = Admin::new(&args.admin, args.token.as_deref(), ca)?;
    if let Some(warning) = admin.warning() {
        eprintln!("llmgw ctl: warning: {warning}");
    }
    Ok(admin)
}

/// Prints what the server said about what was asked for.
fn print(args: &CtlArgs, answer: Value, out: &mut dyn Write) -> Result<(), CtlError> {
    if args.format == OutputFormat::Json {
        let part = match args.command {
            CtlCommand::Models => "models",
            _ => return Ok(writeln!(out, "{answer:#}")?),
        };
        return Ok(writeln!(
            out,
            "{:#}",
            answer.get(part).unwrap_or(&Value::Null)
        )?);
    }
    let text = match args.command {
        CtlCommand::Policies { .. } => show::policies(&answer, show::now_ms()),
        CtlCommand::Models => show::models(&client::parsed(answer)?),
        _ => show::status(&client::parsed(answer)?, show::now_ms()),
    };
    Ok(write!(out, "{text}")?)
}

/// Shows the replicas in the pools, and those that the server started.
async fn replicas(args: &CtlArgs, out: &mut dyn Write) -> Result<(), CtlError> {
    let admin = admin(args)?;
    let answer = admin.get("/v1/status").await?;
    let started = fleet::started(&admin).await?;
    if args.format == OutputFormat::Json {
        let mut rows = show::replica_rows(&answer);
        if let Value::Array(rows) = &mut rows {
            rows.extend(started.replicas);
        }
        return Ok(writeln!(out, "{rows:#}")?);
    }
    let pools = show::replicas(&client::parsed(answer)?);
    Ok(write!(out, "{pools}{}", fleet::started_table(started)?)?)
}

/// Shows the status again and again. Once it was shown, a server that is away is waited for.
async fn watch(args: &CtlArgs, out: &mut dyn Write, terminal: bool) -> Result<(), CtlError> {
    let admin = admin(args)?;
    let mut answer = Ok(admin.get("/v1/status").await?);
    loop {
        if terminal && args.format == OutputFormat::Text {
            // Home and clear; anything but a terminal gets one block after the other.
            write!(out, "\x1b[H\x1b[2J")?;
        }
        match answer {
            Ok(answer) if args.format == OutputFormat::Json => writeln!(out, "{answer}")?,
            Ok(answer) => print(args, answer, out)?,
            Err(error) => eprintln!("llmgw ctl: {error}"),
        }
        out.flush()?;
        tokio::time::sleep(Duration::from_millis(WATCH_INTERVAL_MS)).await;
        if !terminal && args.format == OutputFormat::Text {
            writeln!(out)?;
        }
        answer = admin.get("/v1/status").await;
    }
}

async fn reload(args: &CtlArgs, confirm: bool, out: &mut dyn Write) -> Result<(), CtlError> {
    let admin = admin(args)?;
    let path = match confirm {
        true => "/v1/reload?confirm",
        false => "/v1/reload",
    };
    match admin.post(path).await {
        Ok(answer) if args.format == OutputFormat::Json => Ok(writeln!(out, "{answer:#}")?),
        Ok(answer) => {
            let message = answer
                .get("message")
                .and_then(Value::as_str)
                .unwrap_or("reloaded");
            Ok(writeln!(out, "{}", table::plain(message))?)
        }
        Err(ClientError::Refused { code, message, .. }) if code == "reload_failed" => {
            Err(CtlError::Failed(format!(
                "not reloaded, what was in force still is: {message}"
            )))
        }
        Err(error) => Err(error.into()),
    }
}

fn new_key(
    tenant: &str,
    expires: Option<&str>,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CtlError> {
    let key = key::Key::new(tenant, expires, UtcTime::now()).map_err(CtlError::Key)?;
    match format {
        OutputFormat::Json => writeln!(out, "{:#}", key.json())?,
        OutputFormat::Text => {
            eprintln!("The key is shown this once; the configuration holds only its hash.");
            write!(out, "{}", key.text())?;
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
