//! One look at an engine over HTTP: its own word that it is ready, and its list of models. Presents the engine's key.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONNECTION, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use llmgw_proto::shard::ShardSpec;
use serde::Deserialize;
use tokio::net::TcpStream;

use super::machine::Probed;

/// A list of models is some kilobytes.
const BODY_MAX_BYTES: usize = 1 << 20;
/// Names of other models that a reason repeats.
const SHOWN_MAX_NAMES: usize = 5;
const SHOWN_MAX_CHARS: usize = 80;

/// What is asked, and where.
#[derive(Clone, Debug)]
pub struct Probe {
    address: String,
    health: String,
    models: String,
    served_name: String,
    authorization: Option<String>,
    /// For each of the two questions.
    timeout: Duration,
}

/// Why there is no answer.
enum NoAnswer {
    Timeout,
    Broken(String),
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

impl Probe {
    /// `None`: the shard serves no HTTP.
    pub fn of(spec: &ShardSpec, timeout: Duration) -> Option<Probe> {
        let key = spec.api_key.as_ref();
        Some(Probe {
            address: spec.address()?,
            health: spec.readiness.health.clone(),
            models: spec.readiness.models.clone(),
            served_name: spec.readiness.served_name.clone(),
            authorization: key.map(|key| format!("Bearer {}", key.expose())),
            timeout,
        })
    }

    /// Ready is what says so itself *and* lists the served name.
    pub async fn ask(&self) -> Probed {
        match self.get(&self.health).await {
            Err(no_answer) => return self.unanswered(&self.health, no_answer),
            Ok((StatusCode::OK, _)) => {}
            Ok((status, _)) => {
                return Probed::NotReady(format!("{} answers {}", self.health, status.as_u16()));
            }
        }
        match self.get(&self.models).await {
            Err(no_answer) => self.unanswered(&self.models, no_answer),
            Ok((StatusCode::OK, body)) => self.listed(&body),
            Ok((status, _)) => {
                Probed::NotReady(format!("{} answers {}", self.models, status.as_u16()))
            }
        }
    }

    fn listed(&self, body: &[u8]) -> Probed {
        let Ok(models) = serde_json::from_slice::<Models>(body) else {
            return Probed::NotReady(format!("{} answers no list of models", self.models));
        };
        if models.data.iter().any(|model| model.id == self.served_name) {
            return Probed::Ready;
        }
        let others = models.data.iter().take(SHOWN_MAX_NAMES);
        let shown = |model: &Model| model.id.chars().take(SHOWN_MAX_CHARS).collect();
        let others: Vec<String> = others.map(shown).collect();
        let (path, name) = (&self.models, &self.served_name);
        Probed::NotReady(format!("{path} does not list `{name}`, only {others:?}"))
    }

    fn unanswered(&self, path: &str, no_answer: NoAnswer) -> Probed {
        match no_answer {
            NoAnswer::Timeout => {
                let ms = self.timeout.as_millis();
                Probed::Silent(format!("{path} did not answer within {ms} ms"))
            }
            NoAnswer::Broken(cause) => Probed::NotReady(format!("{path} does not answer: {cause}")),
        }
    }

    async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), NoAnswer> {
        match tokio::time::timeout(self.timeout, self.exchange(path)).await {
            Err(_) => Err(NoAnswer::Timeout),
            Ok(Err(cause)) => Err(NoAnswer::Broken(cause)),
            Ok(Ok(answer)) => Ok(answer),
        }
    }

    /// One connection, one question: a connection that is kept would hold one of llama.cpp's threads.
    async fn exchange(&self, path: &str) -> Result<(StatusCode, Bytes), String> {
        let stream = TcpStream::connect(&self.address)
            .await
            .map_err(|error| error.to_string())?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| error.to_string())?;
        let mut request = Request::get(path)
            .header(HOST, &self.address)
            .header(CONNECTION, "close");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request
            .body(Empty::<Bytes>::new())
            .map_err(|error| error.to_string())?;
        let answer = async {
            let response = sender
                .send_request(request)
                .await
                .map_err(|error| error.to_string())?;
            let status = response.status();
            let body = Limited::new(response.into_body(), BODY_MAX_BYTES).collect();
            let body = body.await.map_err(|error| error.to_string())?;
            Ok((status, body.to_bytes()))
        };
        // The connection is polled here, not in a task of its own: dropped with the question.
        let mut connection = std::pin::pin!(connection);
        let mut answer = std::pin::pin!(answer);
        tokio::select! {
            biased;
            answer = &mut answer => answer,
            closed = &mut connection => match closed {
                Ok(()) => answer.await,
                Err(error) => Err(error.to_string()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use fake_engine::{Kind, Options, Running, start};
    use llmgw_proto::shard::ApiKey;

    use super::*;
    use crate::supervisor::testing;

    fn probe(engine: &Running, change: impl FnOnce(&mut ShardSpec)) -> Probe {
        let mut spec = testing::spec("m/0/0");
        spec.ports = vec![engine.addr().port()];
        change(&mut spec);
        Probe::of(&spec, Duration::from_secs(5)).unwrap()
    }

    fn engine(change: impl FnOnce(&mut Options)) -> Running {
        let mut options = Options {
            models: vec!["m".to_owned()],
            ..Options::new(Kind::Llamacpp)
        };
        change(&mut options);
        start(options).unwrap()
    }

    fn not_ready(what: &str) -> Probed {
        Probed::NotReady(what.to_owned())
    }

    #[tokio::test]
    async fn ready_is_an_engine_that_says_so_and_lists_the_name() {
        let engine = engine(|_| {});
        assert_eq!(probe(&engine, |_| {}).ask().await, Probed::Ready);
        let other = probe(&engine, |spec| spec.readiness.served_name = "x".to_owned());
        assert_eq!(
            other.ask().await,
            not_ready(r#"/v1/models does not list `x`, only ["m"]"#)
        );
    }

    #[tokio::test]
    async fn an_engine_that_answers_otherwise_is_not_ready() {
        let engine = engine(|_| {});
        for (behave, reason) in [
            (r#"{"health":"503"}"#, "/health answers 503"),
            (
                r#"{"health":"ok","models":"500"}"#,
                "/v1/models answers 500",
            ),
            (
                r#"{"models":"empty"}"#,
                "/v1/models does not list `m`, only []",
            ),
        ] {
            engine.behave(behave);
            assert_eq!(probe(&engine, |_| {}).ask().await, not_ready(reason));
        }
    }

    #[tokio::test]
    async fn an_engine_that_hangs_is_silent_and_one_that_is_not_there_is_not_ready() {
        let engine = engine(|_| {});
        engine.behave(r#"{"health":"hang"}"#);
        let mut hasty = probe(&engine, |_| {});
        hasty.timeout = Duration::from_millis(50);
        let silent = "/health did not answer within 50 ms".to_owned();
        assert_eq!(hasty.ask().await, Probed::Silent(silent));
        let gone = probe(&engine, |_| {});
        engine.stop();
        assert_eq!(
            gone.ask().await,
            not_ready("/health does not answer: Connection refused (os error 111)")
        );
    }

    #[tokio::test]
    async fn the_engines_key_is_presented() {
        let engine = engine(|options| options.api_key = Some("sk-1".to_owned()));
        let without = probe(&engine, |_| {});
        assert_eq!(without.ask().await, not_ready("/v1/models answers 401"));
        let key = || Some(ApiKey::new("sk-1".to_owned()));
        let with = probe(&engine, |spec| spec.api_key = key());
        assert_eq!(with.ask().await, Probed::Ready);
    }
}
