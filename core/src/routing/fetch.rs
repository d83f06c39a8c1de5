//! A short question to an engine beside the requests: its own connections, a deadline, a bounded answer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};

use super::replica::Replica;
use crate::gateway::gathered::Gathered;
use crate::upstream::Upstream;

/// A metrics page of vLLM has 50 KB when idle; more than this is no metrics page.
const ANSWER_MAX_BYTES: usize = 8 * 1024 * 1024;

/// What an engine answered.
pub struct Answer {
    pub status: StatusCode,
    pub body: Bytes,
}

/// Asks one engine its questions, apart from the requests: a slow page delays no chat.
pub struct Questions {
    replica: Arc<Replica>,
    upstream: Arc<Upstream>,
    timeout: Duration,
}

/// Why there is no answer.
pub enum NoAnswer {
    /// Slow is not dead: a busy llama.cpp answers `/health` after seconds.
    TimedOut,
    Failed(String),
}

impl Questions {
    pub fn new(replica: Arc<Replica>, timeout: Duration) -> Questions {
        let url = &replica.endpoint.url;
        Questions {
            upstream: Upstream::new(url.host(), url.port(), timeout),
            replica,
            timeout,
        }
    }

    pub async fn get(&self, path: &str) -> Result<Answer, NoAnswer> {
        match tokio::time::timeout(self.timeout, self.fetch(path)).await {
            Ok(answer) => answer.map_err(NoAnswer::Failed),
            Err(_) => Err(NoAnswer::TimedOut),
        }
    }

    async fn fetch(&self, path: &str) -> Result<Answer, String> {
        let response = self
            .upstream
            .send(|| self.request(path), &mut 0)
            .await
            .map_err(|error| error.to_string())?;
        let (head, mut body) = response.into_parts();
        let mut gathered = Gathered::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| format!("answer broke off: {error}"))?;
            let Ok(chunk) = frame.into_data() else {
                continue;
            };
            if gathered.len() + chunk.len() > ANSWER_MAX_BYTES {
                return Err(format!(
                    "{path} answered more than {ANSWER_MAX_BYTES} bytes"
                ));
            }
            gathered.push(chunk);
        }
        Ok(Answer {
            status: head.status,
            body: gathered.into_bytes(),
        })
    }

    fn request(&self, path: &str) -> Request<Full<Bytes>> {
        let endpoint = &self.replica.endpoint;
        let mut request = Request::new(Full::new(Bytes::new()));
        // Paths come from an engine's plugin and a checked URL; one that is no URI asks for the root.
        *request.uri_mut() = format!("{}{path}", endpoint.url.base())
            .parse()
            .unwrap_or_default();
        let headers = request.headers_mut();
        if let Ok(host) = HeaderValue::from_str(endpoint.url.authority()) {
            headers.insert(header::HOST, host);
        }
        if let Some(key) = self.replica.authorization() {
            headers.insert(header::AUTHORIZATION, key);
        }
        request
    }
}
