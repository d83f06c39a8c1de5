//! A small HTTP client for the admin address: one request, one connection, JSON in the answer.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, HOST};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use llmgw_proto::identity::FileProblem;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::trust::{Authority, NotTrusted};
use crate::admin::ADMIN_HEADER;
use crate::admin::guard::is_own_host;

const CONNECT_TIMEOUT_MS: u64 = 5000;
/// For the whole exchange; a reload checks and tests a whole policy set.
const ANSWER_TIMEOUT_MS: u64 = 60_000;
const ANSWER_MAX_BYTES: usize = 64 << 20;
const DEFAULT_PORT: u16 = 80;
const DEFAULT_TLS_PORT: u16 = 443;
/// Of an answer that is no JSON, so much is repeated.
const SHOWN_MAX_CHARS: usize = 120;

/// The admin address of a server.
pub struct Admin {
    /// For people, always with its port.
    url: String,
    host: String,
    port: u16,
    /// With the port, as it goes into the `host` header.
    named: String,
    /// Before every path, without a slash at its end.
    prefix: String,
    token: Option<String>,
    /// None: http.
    authority: Option<Authority>,
}

/// What came back, whoever sent it.
struct Answer {
    status: StatusCode,
    /// It says that an admin address sent it.
    is_admin: bool,
    body: Bytes,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum ClientError {
    /// What was given as the address is none.
    Url { url: String, reason: String },
    /// The token cannot be sent in a header.
    Token,
    /// The file of the authority can't be used.
    Authority(FileProblem),
    /// Whoever answers there is not to be talked to, or can't be over TLS.
    Tls { url: String, problem: NotTrusted },
    /// No connection, or none that answered.
    Unreachable { url: String, reason: String },
    /// An answer that is an error.
    Refused {
        url: String,
        status: StatusCode,
        code: String,
        message: String,
    },
    /// The address and the authority don't go together.
    Scheme { url: String, reason: &'static str },
    /// An answer that is not ours.
    NotAdmin { url: String, reason: String },
}

impl ClientError {
    pub fn exit_status(&self) -> u8 {
        match self {
            ClientError::Url { .. }
            | ClientError::Scheme { .. }
            | ClientError::Token
            | ClientError::Authority(_) => 2,
            ClientError::Unreachable { .. }
            | ClientError::Tls { .. }
            | ClientError::Refused { .. }
            | ClientError::NotAdmin { .. } => 3,
        }
    }

    /// Another try may work: the server is away, or was cut off in mid-answer.
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            ClientError::Unreachable { .. } | ClientError::NotAdmin { .. }
        )
    }
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientError::Url { url, reason } => {
                write!(
                    f,
                    "`{url}` is not an admin address: {reason}; give one like http://127.0.0.1:8081"
                )
            }
            ClientError::Scheme { url, reason } => write!(f, "`{url}`: {reason}"),
            ClientError::Token => {
                f.write_str("the token holds characters that cannot be sent in a header")
            }
            ClientError::Authority(problem) => write!(f, "the authority of --admin-ca: {problem}"),
            ClientError::Tls { url, problem } => write!(f, "{url}: {problem}"),
            ClientError::Unreachable { url, reason } => write!(
                f,
                "cannot reach {url}: {reason}\n\
                 Is `llmgw server` running, and is this its admin address (`admin:` in its configuration)? \
                 Another one is given with --admin URL or LLMGW_ADMIN."
            ),
            ClientError::Refused {
                url,
                status,
                message,
                ..
            } if *status == StatusCode::UNAUTHORIZED => write!(
                f,
                "{url} refused: {message}\n\
                 The token is given in LLMGW_ADMIN_TOKEN or with --token TOKEN."
            ),
            ClientError::Refused {
                url,
                status,
                message,
                ..
            } => {
                write!(f, "{url} refused ({}): {message}", status.as_u16())
            }
            ClientError::NotAdmin { url, reason } => write!(
                f,
                "{url} answered, but not as llmgw's admin address does: {reason}\n\
                 It may be the address for clients (`listen:` in the configuration); the one of `admin:` is given with --admin URL or LLMGW_ADMIN."
            ),
        }
    }
}

impl Admin {
    /// `url` is `http://HOST:PORT` or `https://HOST:PORT`; without a scheme it is https where there is an authority, `ca`,
    /// whose word a server needs.
    pub fn new(url: &str, token: Option<&str>, ca: Option<&Path>) -> Result<Admin, ClientError> {
        let refuse = |reason: &str| ClientError::Url {
            url: url.to_owned(),
            reason: reason.to_owned(),
        };
        let mismatch = |reason| ClientError::Scheme {
            url: url.to_owned(),
            reason,
        };
        let full = if url.contains("://") {
            url.to_owned()
        } else {
            let scheme = if ca.is_some() { "https" } else { "http" };
            format!("{scheme}://{url}")
        };
        let uri: Uri = full
            .parse()
            .map_err(|error: http::uri::InvalidUri| refuse(&error.to_string()))?;
        let authority = match (uri.scheme_str(), ca) {
            (Some("http"), None) => None,
            (Some("http"), Some(_)) => {
                return Err(mismatch(
                    "an authority is given (--admin-ca, LLMGW_ADMIN_CA), and http would not ask for its word; write https://",
                ));
            }
            (Some("https"), Some(ca)) => Some(Authority::load(ca).map_err(ClientError::Authority)?),
            (Some("https"), None) => {
                return Err(mismatch(
                    "https needs the authority that issued the server's certificate: give its file with --admin-ca FILE or LLMGW_ADMIN_CA",
                ));
            }
            _ => return Err(refuse("the scheme is neither http nor https")),
        };
        let named = uri.authority().ok_or_else(|| refuse("it names no host"))?;
        let host = named.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(refuse("it names no host"));
        }
        if named.as_str().contains('@') {
            return Err(refuse(
                "a password in it is not supported, a token goes into LLMGW_ADMIN_TOKEN",
            ));
        }
        let (scheme, default_port) = match authority {
            Some(_) => ("https", DEFAULT_TLS_PORT),
            None => ("http", DEFAULT_PORT),
        };
        let port = named.port_u16();
        let shown_port = port.map_or_else(|| format!(":{default_port}"), |_| String::new());
        let prefix = uri.path().trim_end_matches('/');
        Ok(Admin {
            url: format!("{scheme}://{named}{shown_port}{prefix}"),
            host: host.to_owned(),
            port: port.unwrap_or(default_port),
            named: named.to_string(),
            prefix: prefix.to_owned(),
            token: token.filter(|token| !token.is_empty()).map(str::to_owned),
            authority,
        })
    }

    /// What is probably not meant with it.
    pub fn warning(&self) -> Option<String> {
        let is_open = self.authority.is_none() && !is_own_host(&self.named);
        (is_open && self.token.is_some()).then(|| {
            format!(
                "the token goes to {} in clear text, where anybody on the way can read it: give the server `admin.tls`, and dial https:// with --admin-ca FILE",
                self.url
            )
        })
    }

    pub async fn get(&self, path: &str) -> Result<Value, ClientError> {
        self.ask(Method::GET, path).await
    }

    pub async fn post(&self, path: &str) -> Result<Value, ClientError> {
        self.ask(Method::POST, path).await
    }

    async fn ask(&self, method: Method, path: &str) -> Result<Value, ClientError> {
        let request = self.request(method, path)?;
        let connect = TcpStream::connect((self.host.as_str(), self.port));
        let stream =
            match tokio::time::timeout(Duration::from_millis(CONNECT_TIMEOUT_MS), connect).await {
                Ok(stream) => stream.map_err(|error| self.unreachable(error))?,
                Err(_) => {
                    return Err(
                        self.unreachable(format!("no connection within {CONNECT_TIMEOUT_MS} ms"))
                    );
                }
            };
        let exchange = async {
            let Some(authority) = &self.authority else {
                return self.exchange(stream, request).await;
            };
            let shaken = authority.shake(stream, &self.host).await;
            let stream = shaken.map_err(|problem| ClientError::Tls {
                url: self.url.clone(),
                problem,
            })?;
            self.exchange(stream, request).await
        };
        let answer = tokio::time::timeout(Duration::from_millis(ANSWER_TIMEOUT_MS), exchange);
        let answer = answer
            .await
            .map_err(|_| self.unreachable(format!("no answer within {ANSWER_TIMEOUT_MS} ms")))??;
        self.read(&answer)
    }

    fn request(&self, method: Method, path: &str) -> Result<Request<Empty<Bytes>>, ClientError> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(HOST, &self.named)
            .header(ACCEPT, "application/json");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        // Everything but the token was checked when the address was parsed.
        request.body(Empty::new()).map_err(|_| ClientError::Token)
    }

    async fn exchange(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        request: Request<Empty<Bytes>>,
    ) -> Result<Answer, ClientError> {
        let not_http = |error: hyper::Error| ClientError::NotAdmin {
            url: self.url.clone(),
            reason: error.to_string(),
        };
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(not_http)?;
        let answer = async {
            let answer = sender.send_request(request).await.map_err(not_http)?;
            let status = answer.status();
            let is_admin = answer.headers().contains_key(&ADMIN_HEADER);
            let body = Limited::new(answer.into_body(), ANSWER_MAX_BYTES)
                .collect()
                .await;
            match body {
                Ok(body) => Ok(Answer {
                    status,
                    is_admin,
                    body: body.to_bytes(),
                }),
                Err(error) => Err(self.unreachable(format!("the answer broke off: {error}"))),
            }
        };
        // The connection has to be driven for the answer to come; its own end says nothing that the answer doesn't.
        tokio::pin!(answer);
        tokio::select! {
            result = &mut answer => result,
            _ = connection => answer.await,
        }
    }

    fn read(&self, answer: &Answer) -> Result<Value, ClientError> {
        let (status, body) = (answer.status, &answer.body[..]);
        if !answer.is_admin {
            // Nothing in it counts: an engine behind the gateway answers, and refuses, in the same form.
            return Err(ClientError::NotAdmin {
                url: self.url.clone(),
                reason: match first_line(body) {
                    line if line.is_empty() => format!("status {status}, without {ADMIN_HEADER}"),
                    line => format!("status {status}, without {ADMIN_HEADER}, `{line}`"),
                },
            });
        }
        let json = serde_json::from_slice::<Value>(body);
        if status.is_success() {
            return json.map_err(|error| ClientError::NotAdmin {
                url: self.url.clone(),
                reason: error.to_string(),
            });
        }
        let error = json
            .ok()
            .and_then(|json| json.get("error").cloned())
            .unwrap_or_default();
        let text = |key: &str| {
            error
                .get(key)
                .and_then(Value::as_str)
                .map(super::table::plain_lines)
        };
        Err(match text("message") {
            Some(message) => ClientError::Refused {
                url: self.url.clone(),
                status,
                code: text("code").unwrap_or_default(),
                message,
            },
            None => ClientError::NotAdmin {
                url: self.url.clone(),
                reason: match first_line(body) {
                    line if line.is_empty() => format!("status {status} without a reason"),
                    line => format!("status {status}, `{line}`"),
                },
            },
        })
    }

    pub(super) fn unreachable(&self, reason: impl ToString) -> ClientError {
        ClientError::Unreachable {
            url: self.url.clone(),
            reason: reason.to_string(),
        }
    }
}

/// What an answer that is no JSON begins with.
fn first_line(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let line = text.lines().next().unwrap_or_default();
    super::table::plain(line)
        .chars()
        .take(SHOWN_MAX_CHARS)
        .collect()
}

/// Reads an answer as the type that it should be.
pub fn parsed<T: DeserializeOwned>(answer: Value) -> Result<T, ClientError> {
    serde_json::from_value(answer).map_err(|error| ClientError::NotAdmin {
        url: "the server".to_owned(),
        reason: error.to_string(),
    })
}
