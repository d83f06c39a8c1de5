//! A small HTTP client for the admin address: one request, one connection, JSON in the answer.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, HOST};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::TcpStream;

const CONNECT_TIMEOUT_MS: u64 = 5000;
/// For the whole exchange; a reload checks and tests a whole policy set.
const ANSWER_TIMEOUT_MS: u64 = 60_000;
const ANSWER_MAX_BYTES: usize = 64 << 20;
const DEFAULT_PORT: u16 = 80;

/// The admin address of a server.
pub struct Admin {
    url: String,
    host: String,
    port: u16,
    /// As it goes into the `host` header.
    authority: String,
    /// Before every path, without a slash at its end.
    prefix: String,
    token: Option<String>,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum ClientError {
    /// What was given as the address is none.
    Url { url: String, reason: String },
    /// The token cannot be sent in a header.
    Token,
    /// No connection, or none that answered.
    Unreachable { url: String, reason: String },
    /// An answer that is an error.
    Refused {
        url: String,
        status: StatusCode,
        code: String,
        message: String,
    },
    /// An answer that is not ours.
    NotAdmin { url: String, reason: String },
}

impl ClientError {
    pub fn exit_status(&self) -> u8 {
        match self {
            ClientError::Url { .. } | ClientError::Token => 2,
            ClientError::Unreachable { .. }
            | ClientError::Refused { .. }
            | ClientError::NotAdmin { .. } => 3,
        }
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
            ClientError::Token => {
                f.write_str("the token holds characters that cannot be sent in a header")
            }
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
                 Clients and ctl have different ports (`listen:` and `admin:` in the configuration)."
            ),
        }
    }
}

impl Admin {
    /// `url` is `http://HOST:PORT`, or `HOST:PORT`.
    pub fn new(url: &str, token: Option<&str>) -> Result<Admin, ClientError> {
        let refuse = |reason: &str| ClientError::Url {
            url: url.to_owned(),
            reason: reason.to_owned(),
        };
        let full = if url.contains("://") {
            url.to_owned()
        } else {
            format!("http://{url}")
        };
        let uri: Uri = full
            .parse()
            .map_err(|error: http::uri::InvalidUri| refuse(&error.to_string()))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(refuse("https is not supported by ctl yet")),
            _ => return Err(refuse("the scheme is not http")),
        }
        let authority = uri.authority().ok_or_else(|| refuse("it names no host"))?;
        let host = authority
            .host()
            .trim_start_matches('[')
            .trim_end_matches(']');
        if host.is_empty() {
            return Err(refuse("it names no host"));
        }
        if authority.as_str().contains('@') {
            return Err(refuse(
                "a password in it is not supported, a token goes into LLMGW_ADMIN_TOKEN",
            ));
        }
        Ok(Admin {
            url: full.trim_end_matches('/').to_owned(),
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(DEFAULT_PORT),
            authority: authority.to_string(),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            token: token.filter(|token| !token.is_empty()).map(str::to_owned),
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
        let answer = tokio::time::timeout(
            Duration::from_millis(ANSWER_TIMEOUT_MS),
            self.exchange(stream, request),
        );
        let (status, body) = answer
            .await
            .map_err(|_| self.unreachable(format!("no answer within {ANSWER_TIMEOUT_MS} ms")))??;
        self.read(status, &body)
    }

    fn request(&self, method: Method, path: &str) -> Result<Request<Empty<Bytes>>, ClientError> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(HOST, &self.authority)
            .header(ACCEPT, "application/json");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        // Everything but the token was checked when the address was parsed.
        request.body(Empty::new()).map_err(|_| ClientError::Token)
    }

    async fn exchange(
        &self,
        stream: TcpStream,
        request: Request<Empty<Bytes>>,
    ) -> Result<(StatusCode, Bytes), ClientError> {
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
            let body = Limited::new(answer.into_body(), ANSWER_MAX_BYTES)
                .collect()
                .await;
            match body {
                Ok(body) => Ok((status, body.to_bytes())),
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

    fn read(&self, status: StatusCode, body: &[u8]) -> Result<Value, ClientError> {
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
                .map(super::table::plain)
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
                reason: format!("status {status} without a reason"),
            },
        })
    }

    fn unreachable(&self, reason: impl ToString) -> ClientError {
        ClientError::Unreachable {
            url: self.url.clone(),
            reason: reason.to_string(),
        }
    }
}

/// Reads an answer as the type that it should be.
pub fn parsed<T: DeserializeOwned>(answer: Value) -> Result<T, ClientError> {
    serde_json::from_value(answer).map_err(|error| ClientError::NotAdmin {
        url: "the server".to_owned(),
        reason: error.to_string(),
    })
}
