//! The way to the server: its URL, a socket, a session on it.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use llmgw_proto::convert::Framed;
use llmgw_proto::identity::Fingerprint;
use llmgw_proto::identity::dialling::{Trust, connect};
use llmgw_proto::link::{self, Dialled, Hearing};
use llmgw_proto::session::{AgentMessage, ServerMessage, SessionId};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;

use super::credentials::Credentials;
use super::silence::{LastHeard, Listened, listen};
use super::{Ended, Session, SessionOptions, ShardChanges};

/// Messages that wait for the connection to take them.
pub(super) const OUTGOING_MAX: usize = 64;
const HTTPS_PORT: u16 = 8443;

/// Where the server listens for agents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerUrl {
    pub is_tls: bool,
    /// A name or an address, IPv6 without brackets.
    pub host: String,
    pub port: u16,
}

/// Text that is no URL of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoServerUrl {
    pub text: String,
}

/// A session that is open and not welcomed yet.
pub(super) struct Opened {
    pub(super) heard: Hearing<ServerMessage>,
    pub(super) outgoing: mpsc::Sender<Framed<AgentMessage>>,
    /// Holds the connection open.
    pub(super) dialled: Dialled,
    pub(super) last_heard: LastHeard,
    /// From before the registration on, so that nothing falls between the two.
    pub(super) changes: Box<dyn ShardChanges>,
    /// What was registered.
    pub(super) told: super::report::Told,
    /// The certificate that was shown. None: without TLS.
    pub(super) shown: Option<Fingerprint>,
}

/// Dials the server and registers.
pub(super) async fn open(session: &Session) -> Result<Opened, Ended> {
    let options = &session.options;
    let server = &options.server;
    // Before anything is dialled: without them there is nothing to say.
    let credentials = credentials(session).await?;
    let connecting = TcpStream::connect((server.host.as_str(), server.port));
    let socket = timeout(options.patience, connecting)
        .await
        .map_err(|_| late("connecting", options.patience))?
        .map_err(|error| broken("connecting", &error))?;
    socket
        .set_nodelay(true)
        .map_err(|error| broken("connecting", &error))?;
    let own = socket
        .local_addr()
        .map_err(|error| broken("connecting", &error))?;
    let (socket, last_heard) = listen(socket);
    let line = Line::over(socket, options, credentials.as_ref()).await?;
    let changes = session.shards.changes();
    let (register, told) = session.register(options.advertise.unwrap_or(own.ip().to_canonical()));
    let (outgoing, taken) = mpsc::channel(OUTGOING_MAX);
    let first = Framed {
        session: SessionId(0),
        message: register,
    };
    // The queue is new and empty.
    let _ = outgoing.try_send(first);
    let (heard, dialled) = timeout(options.patience, line.dial(options, taken))
        .await
        .map_err(|_| late("opening the session", options.patience))??;
    Ok(Opened {
        heard,
        outgoing,
        dialled,
        last_heard,
        changes,
        told,
        shown: credentials.map(|credentials| credentials.identity.certificate.fingerprint),
    })
}

/// What is shown to a server with TLS; none without.
async fn credentials(session: &Session) -> Result<Option<Credentials>, Ended> {
    if !session.options.server.is_tls {
        return Ok(None);
    }
    let files = session.options.tls.as_ref();
    let files = files.ok_or_else(|| broken("`tls`", &"it is not set"))?;
    let patience = session.options.patience;
    let credentials = timeout(patience, files.read())
        .await
        .map_err(|_| late("reading the `tls` files", patience))?
        .map_err(|problem| broken("`tls`", &problem))?;
    session.shows(&credentials.identity.certificate);
    Ok(Some(credentials))
}

/// A socket on which a session can be opened.
enum Line {
    Plain(Listened<TcpStream>),
    Tls(Box<TlsStream<Listened<TcpStream>>>),
}

impl Line {
    async fn over(
        socket: Listened<TcpStream>,
        options: &SessionOptions,
        credentials: Option<&Credentials>,
    ) -> Result<Line, Ended> {
        let Some(credentials) = credentials else {
            return Ok(Line::Plain(socket));
        };
        let trust = Trust::Authorities(credentials.authorities.clone());
        let host = &options.server.host;
        let shaking = connect(socket, host, &trust, Some(&credentials.identity));
        let stream = timeout(options.patience, shaking)
            .await
            .map_err(|_| late("the TLS handshake", options.patience))?;
        match stream {
            Ok(stream) => Ok(Line::Tls(Box::new(stream))),
            Err(problem) if problem.needs_a_person() => Err(Ended::Distrusted(problem.to_string())),
            Err(problem) => Err(Ended::Broken(problem.to_string())),
        }
    }

    async fn dial(
        self,
        options: &SessionOptions,
        outgoing: mpsc::Receiver<Framed<AgentMessage>>,
    ) -> Result<(Hearing<ServerMessage>, Dialled), Ended> {
        let keep_alive = options.keep_alive;
        let dialled = match self {
            Line::Plain(socket) => link::dial(socket, keep_alive, outgoing).await,
            Line::Tls(socket) => link::dial(*socket, keep_alive, outgoing).await,
        };
        dialled.map_err(|error| match error.met_tls && !options.server.is_tls {
            true => {
                let server = ServerUrl {
                    is_tls: true,
                    ..options.server.clone()
                };
                Ended::Broken(format!(
                    "the server hung up on plaintext: its port wants TLS, so write `server: {server}` and `tls` in agent.yaml"
                ))
            }
            false => broken("opening the session", &error),
        })
    }
}

fn broken(what: &str, why: &dyn fmt::Display) -> Ended {
    Ended::Broken(format!("{what}: {why}"))
}

fn late(what: &str, patience: Duration) -> Ended {
    Ended::Broken(format!("{what}: not within {patience:?}"))
}

impl ServerUrl {
    /// Whether what is said there stays on this machine.
    pub fn is_loopback(&self) -> bool {
        let address = self.host.parse::<IpAddr>();
        self.host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }
}

impl FromStr for ServerUrl {
    type Err = NoServerUrl;

    fn from_str(text: &str) -> Result<ServerUrl, NoServerUrl> {
        let parse = || {
            let (scheme, rest) = text.split_once("://")?;
            let is_tls = match scheme {
                "https" => true,
                "http" => false,
                _ => return None,
            };
            let rest = rest.strip_suffix('/').unwrap_or(rest);
            let (host, port) = match rest.strip_prefix('[') {
                Some(rest) => {
                    let (host, port) = rest.split_once(']')?;
                    let _: std::net::Ipv6Addr = host.parse().ok()?;
                    let port = match port {
                        "" => None,
                        port => Some(port.strip_prefix(':')?),
                    };
                    (host, port)
                }
                None => match rest.split_once(':') {
                    Some((host, port)) => (host, Some(port)),
                    None => (rest, None),
                },
            };
            let is_name = |c: char| c.is_ascii_alphanumeric() || ".-_:".contains(c);
            if host.is_empty() || !host.chars().all(is_name) {
                return None;
            }
            let port = port.map_or(Some(HTTPS_PORT), |port| port.parse().ok())?;
            (port != 0).then(|| ServerUrl {
                is_tls,
                host: host.to_owned(),
                port,
            })
        };
        parse().ok_or_else(|| NoServerUrl {
            text: text.to_owned(),
        })
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        match self.host.contains(':') {
            true => write!(f, "{scheme}://[{}]:{}", self.host, self.port),
            false => write!(f, "{scheme}://{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Display for NoServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` is not a server; write e.g. `https://ctl.example:8443`",
            self.text
        )
    }
}

impl std::error::Error for NoServerUrl {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_a_scheme_a_host_and_perhaps_a_port() {
        for (text, is_tls, host, port, shown) in [
            (
                "https://ctl.example:9000",
                true,
                "ctl.example",
                9_000,
                "https://ctl.example:9000",
            ),
            (
                "https://ctl.example",
                true,
                "ctl.example",
                8_443,
                "https://ctl.example:8443",
            ),
            (
                "http://127.0.0.1:1/",
                false,
                "127.0.0.1",
                1,
                "http://127.0.0.1:1",
            ),
            (
                "http://[::1]:8443",
                false,
                "::1",
                8_443,
                "http://[::1]:8443",
            ),
            (
                "https://[fd00::1]",
                true,
                "fd00::1",
                8_443,
                "https://[fd00::1]:8443",
            ),
        ] {
            let url: ServerUrl = text.parse().unwrap();
            assert_eq!(
                (url.is_tls, url.host.as_str(), url.port),
                (is_tls, host, port)
            );
            assert_eq!(url.to_string(), shown);
        }
        for text in [
            "",
            "ctl.example:8443",
            "ftp://x",
            "http://",
            "http://a b",
            "http://x:0",
            "http://x:65536",
            "http://x/path",
            "http://user@x",
            "http://[::1",
            "http://[x]",
            "http://::1:8443",
        ] {
            let refused = text.parse::<ServerUrl>();
            assert!(refused.is_err(), "{text}: {refused:?}");
        }
    }

    #[test]
    fn what_stays_on_the_machine_is_known() {
        for (text, stays) in [
            ("http://localhost:1", true),
            ("http://127.1.2.3:1", true),
            ("http://[::1]:1", true),
            ("http://10.0.0.1:1", false),
            ("http://localhost.example:1", false),
        ] {
            let url: ServerUrl = text.parse().unwrap();
            assert_eq!(url.is_loopback(), stays, "{text}");
        }
    }
}
