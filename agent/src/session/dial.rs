//! The way to the server: its URL, a socket, a session on it.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use llmgw_proto::convert::Framed;
use llmgw_proto::link::{self, Dialled, Hearing};
use llmgw_proto::session::{AgentMessage, ServerMessage, SessionId};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{Ended, Session, ShardChanges};

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
    /// From before the registration on, so that nothing falls between the two.
    pub(super) changes: Box<dyn ShardChanges>,
    /// What was registered.
    pub(super) told: super::report::Told,
}

/// Dials the server and registers.
pub(super) async fn open(session: &Session) -> Result<Opened, Ended> {
    let options = &session.options;
    let server = &options.server;
    let broken = |what: &str, why: &dyn fmt::Display| Ended::Broken(format!("{what}: {why}"));
    let late = |what: &str| Ended::Broken(format!("{what}: not within {:?}", options.patience));
    let connecting = TcpStream::connect((server.host.as_str(), server.port));
    let socket = timeout(options.patience, connecting)
        .await
        .map_err(|_| late("connecting"))?
        .map_err(|error| broken("connecting", &error))?;
    socket
        .set_nodelay(true)
        .map_err(|error| broken("connecting", &error))?;
    let own = socket
        .local_addr()
        .map_err(|error| broken("connecting", &error))?;
    let changes = session.shards.changes();
    let (register, told) = session.register(options.advertise.unwrap_or(own.ip().to_canonical()));
    let (outgoing, taken) = mpsc::channel(OUTGOING_MAX);
    let first = Framed {
        session: SessionId(0),
        message: register,
    };
    // The queue is new and empty.
    let _ = outgoing.try_send(first);
    let dialling = link::dial(socket, options.keep_alive, taken);
    let (heard, dialled) = timeout(options.patience, dialling)
        .await
        .map_err(|_| late("opening the session"))?
        .map_err(|error| broken("opening the session", &error))?;
    Ok(Opened {
        heard,
        outgoing,
        dialled,
        changes,
        told,
    })
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
