//! One request as the gateway understood it: what it asks for, and how it may be changed for an engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Request, header};
use http_body_util::Full;
use llmgw_plugins::{BandSpec, PolicySet, RequestView};

use super::dialect::Dialect;
use super::multipart;
use super::peek::{self, Peek};
use super::respond::Failure;
use super::splice::{self, Edits};
use super::state::Gateway;
use crate::clock;
use crate::config::Config;
use crate::flow::dispatch::{Ahead, Arrival, Size, Unseen};
use crate::flow::ledger::Ask;
use crate::flow::tenant::Reservation;
use crate::routing::pool::{Asked, Chosen, Pool};
use crate::routing::prefix::PromptHashes;
use crate::routing::replica::Replica;
use crate::telemetry::OpenRecord;

/// A request on its way. The record in it is written when it is dropped, wherever that is.
pub struct Job {
    pub gateway: Arc<Gateway>,
    pub config: Arc<Config>,
    pub pool: Arc<Pool>,
    /// Pinned for the whole request: no decision sees two generations.
    pub set: Arc<PolicySet>,
    pub method: Method,
    pub path_and_query: PathAndQuery,
    /// As an engine gets them, but for its own key and host.
    pub headers: HeaderMap,
    pub body: Body,
    pub dialect: Dialect,
    /// The model as the client named it.
    pub asked_name: Arc<str>,
    pub facts: Facts,
    pub asked: Asked,
    pub prompt: PromptHashes,
    /// Whose it is, and which of the tenant's flows.
    pub tenant: Arc<str>,
    pub weight: f64,
    pub flow: Option<Arc<str>>,
    /// The band that the client would like, as its header or its body says.
    pub band_hint: Option<Arc<str>>,
    /// Where it waits, as its generation of policies has it.
    pub band: BandSpec,
    /// How long it may wait for its turn, where that is not the band's own time.
    pub queue_ttl: Option<Duration>,
    /// What was before it when it came, if it had to wait.
    pub ahead: Option<Ahead>,
    /// For `llmgw.rand()` in request hooks.
    pub seed: u64,
    /// The tenant's accounting needs the engine's own count of tokens.
    pub needs_usage: bool,
    pub debug: bool,
    /// Set once the client has a status, which is 200 whatever comes, since comments are sent to it; shared with those comments' body.
    pub committed: Option<Arc<AtomicBool>>,
    /// Moves into the exchange with the replica that answers.
    pub record: Option<OpenRecord>,
    /// What it holds of its tenant's limits; moves as the record does.
    pub reservation: Option<Reservation>,
}

/// A body, as far as it was understood.
#[derive(Clone)]
pub enum Body {
    Json(Bytes),
    /// A form; its `model` field can be renamed.
    Form {
        bytes: Bytes,
        content_type: String,
    },
    /// Nothing in it that the gateway knows.
    Opaque(Bytes),
}

/// What the body said, for policies and routing. Never the prompt.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    pub stream: bool,
    pub asked_usage: bool,
    pub max_tokens: Option<u64>,
    pub n: u32,
    pub has_tools: bool,
    pub has_images: bool,
    pub session: Option<String>,
    /// As OpenAI's clients say how urgent it is.
    pub service_tier: Option<String>,
    /// As vLLM's clients do: a lower one goes earlier.
    pub priority: Option<i64>,
}

/// How a request goes to one engine.
pub struct Outgoing {
    pub body: Bytes,
    /// The client did not ask for a stream; its answer is put together from one.
    pub assemble: bool,
    /// The gateway asked for the usage chunk, the client did not.
    pub drop_usage_chunk: bool,
}

impl Body {
    pub fn bytes(&self) -> &Bytes {
        match self {
            Body::Json(bytes) | Body::Form { bytes, .. } | Body::Opaque(bytes) => bytes,
        }
    }
}

impl Facts {
    pub fn of(peek: &Peek<'_>) -> Facts {
        Facts {
            stream: peek.stream,
            asked_usage: peek.include_usage,
            max_tokens: peek.max_tokens,
            n: peek.n.unwrap_or(1).try_into().unwrap_or(u32::MAX),
            has_tools: peek.has_tools,
            has_images: peek.has_images,
            session: peek.session.as_deref().map(str::to_string),
            service_tier: peek.service_tier.as_deref().map(str::to_string),
            priority: peek.priority,
        }
    }
}

impl Job {
    pub fn view(&self, attempt: u32) -> RequestView<'_> {
        let age_ms = self
            .record
            .as_ref()
            .map_or(0.0, |record| record.started().elapsed().as_secs_f64() * 1e3);
        RequestView {
            model: &self.pool.model.name,
            band_hint: self.band_hint.as_deref(),
            path: self.path_and_query.path(),
            stream: self.facts.stream,
            input_tokens: self.asked.ask.input_tokens,
            max_tokens: self.facts.max_tokens,
            est_output_tokens: self.asked.ask.est_output_tokens,
            has_tools: self.facts.has_tools,
            has_images: self.facts.has_images,
            n: self.facts.n,
            session: self.facts.session.as_deref(),
            age_ms,
            attempt,
            seed: self.seed,
            ..RequestView::default()
        }
    }

    /// What the request will probably take of its tenant's limits.
    pub fn wanted(&self) -> Ask {
        Ask {
            input_tokens: self.asked.ask.input_tokens,
            output_tokens: self.asked.ask.est_output_tokens,
            is_text: self.asked.is_text,
        }
    }

    /// What the queue has to know, for a replica that was chosen.
    pub fn arrival(&self, chosen: &Chosen, goes_first: bool) -> Arrival<'_> {
        let ask = &self.asked.ask;
        let prices = **self.pool.queues.prices.load();
        let output_cost = prices.output(ask.est_output_tokens);
        let first_cost = prices.prompt(ask.input_tokens, chosen.prefix_tokens);
        let comes_at_once = !self.facts.stream && !self.assembles(&chosen.admitted.replica);
        let replica = &chosen.admitted.replica;
        Arrival {
            band: &self.band,
            tenant: &self.tenant,
            weight: self.weight,
            flow: self.flow.as_ref(),
            size: Size {
                input_tokens: ask.input_tokens,
                todo_tokens: ask.input_tokens.saturating_sub(chosen.prefix_tokens),
                first_cost,
                expected_cost: first_cost.saturating_add(output_cost),
                unseen: comes_at_once.then(|| Unseen {
                    cost: output_cost,
                    ms: ask.est_output_tokens as f64 * replica.ms_per_decode_step(),
                }),
            },
            lane: replica.lane,
            goes_first,
            stay_until_ms: clock::now_ms() + chosen.stay.as_millis() as u64,
        }
    }

    /// Goes over to the model's present pool, where a reload made another one. True if it did.
    pub fn follow_reload(&mut self) -> bool {
        let runtime = self.gateway.runtime.load();
        match runtime.fleet.pool(&self.pool.model.name) {
            Some(now) if !Arc::ptr_eq(now, &self.pool) => {
                self.pool = now.clone();
                true
            }
            // A model that is gone keeps what it had for the requests that began with it.
            _ => false,
        }
    }

    /// The body as this engine needs it. Unchanged bytes where nothing has to change.
    pub fn outgoing(&self, replica: &Replica, served: &str) -> Result<Outgoing, Failure> {
        match &self.body {
            Body::Opaque(bytes) => Ok(Outgoing::unchanged(bytes.clone())),
            Body::Form {
                bytes,
                content_type,
            } => self.outgoing_form(bytes, content_type, served),
            Body::Json(bytes) => self.outgoing_json(bytes, replica, served),
        }
    }

    fn outgoing_json(
        &self,
        bytes: &Bytes,
        replica: &Replica,
        served: &str,
    ) -> Result<Outgoing, Failure> {
        let assembled_dialect = matches!(self.dialect, Dialect::Chat | Dialect::Completions);
        let assemble = self.assembles(replica);
        let ask_usage = assembled_dialect
            && !self.facts.asked_usage
            && (assemble || (self.facts.stream && self.needs_usage));
        let rename = *served != *self.asked_name;
        if !assemble && !ask_usage && !rename {
            return Ok(Outgoing::unchanged(bytes.clone()));
        }
        let peek = peek::peek(bytes).map_err(|error| Failure::InvalidJson(error.to_string()))?;
        let mut edits = Edits::default();
        if rename {
            splice::rename_model(&mut edits, &peek, served);
        }
        if assemble {
            splice::force_stream(&mut edits, &peek, ask_usage);
        } else if ask_usage {
            splice::ask_usage(&mut edits, &peek);
        }
        Ok(Outgoing {
            body: edits.apply(bytes),
            assemble,
            drop_usage_chunk: ask_usage && !assemble,
        })
    }

    /// The engine is asked to stream for a client that did not ask for it.
    fn assembles(&self, replica: &Replica) -> bool {
        matches!(self.dialect, Dialect::Chat | Dialect::Completions)
            && !self.facts.stream
            && self.method == Method::POST
            && matches!(self.body, Body::Json(_))
            && self
                .set
                .engine(&replica.endpoint.engine)
                .is_some_and(|plugin| plugin.cancel_needs_stream)
    }

    fn outgoing_form(
        &self,
        bytes: &Bytes,
        content_type: &str,
        served: &str,
    ) -> Result<Outgoing, Failure> {
        if *served == *self.asked_name {
            return Ok(Outgoing::unchanged(bytes.clone()));
        }
        let found = multipart::find_model(bytes, content_type)
            .map_err(|error| Failure::InvalidJson(error.to_string()))?;
        let body = match found {
            Some(range) => {
                let mut edits = Edits::default();
                edits.replace(range, served.as_bytes().to_vec());
                edits.apply(bytes)
            }
            None => bytes.clone(),
        };
        Ok(Outgoing::unchanged(body))
    }

    /// The request for one engine. Built again for the one retry that a stale connection gets.
    pub fn request(&self, replica: &Replica, outgoing: &Outgoing) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(outgoing.body.clone()));
        *request.method_mut() = self.method.clone();
        let url = &replica.endpoint.url;
        *request.uri_mut() = if url.base().is_empty() {
            self.path_and_query.clone().into()
        } else {
            // It was a client's valid path behind a checked base.
            format!("{}{}", url.base(), self.path_and_query)
                .parse()
                .unwrap_or_default()
        };
        let headers = request.headers_mut();
        *headers = self.headers.clone();
        if let Some(host) = replica.host() {
            headers.insert(header::HOST, host);
        }
        if let Some(key) = replica.authorization() {
            headers.insert(header::AUTHORIZATION, key);
        }
        if outgoing.assemble || self.facts.stream {
            // The relay reads the events, so they must come as they are.
            headers.remove(header::ACCEPT_ENCODING);
        }
        if let Some(plugin) = self.set.engine(&replica.endpoint.engine) {
            for name in &plugin.drop_request_headers {
                headers.remove(name.as_str());
            }
        }
        request
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let is_committed = |flag: &Arc<AtomicBool>| flag.load(Ordering::Relaxed);
        if let (Some(record), true) = (
            &mut self.record,
            self.committed.as_ref().is_some_and(is_committed),
        ) {
            record.status = 200;
        }
    }
}

impl Outgoing {
    fn unchanged(body: Bytes) -> Outgoing {
        Outgoing {
            body,
            assemble: false,
            drop_usage_chunk: false,
        }
    }
}
