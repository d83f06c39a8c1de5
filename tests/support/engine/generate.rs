//! A generation request from its body to its last byte, with whatever it was told to do wrong on the way.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::behave::Behave;
use super::dialect::ask::{Ask, Dialect};
use super::dialect::reply::{Burst, Reply, quoted};
use super::error::Problem;
use super::options::Kind;
use super::out::{End, Framing, Out};
use super::route::problem;
use super::server::{Exchange, LeaveRule};
use super::state::Ticket;
use super::wire::Gone;
use super::{Engine, Slot, small};

/// Milliseconds between comments unless `comment_ms` says otherwise.
const COMMENT_MS: u64 = 100;
/// Event size of `total_bytes` unless `chunk_bytes` says otherwise.
const TOTAL_EVENT_BYTES: usize = 16 * 1024;
/// Tokens of `flood` unless `tokens` says otherwise.
const FLOOD_TOKENS: u64 = 100_000;

/// One request being generated for.
pub struct Generation<'a, 'w, 'c> {
    pub engine: &'a Engine,
    exchange: &'a Exchange<'a>,
    pub ticket: &'a Ticket<'a>,
    pub out: &'a mut Out<'w, 'c>,
    pub behave: Arc<Behave>,
    pub reply: Reply,
    pub stream: bool,
    /// Given back on Drop if not before.
    pub slot: Option<Slot<'a>>,
}

/// Answers a generation request.
pub async fn generate(
    exchange: &Exchange<'_>,
    out: &mut Out<'_, '_>,
    dialect: Dialect,
) -> Result<End, Gone> {
    let engine: &Engine = exchange.engine;
    let kind = engine.options.kind;
    let Ok(body) = serde_json::from_slice::<Value>(exchange.body) else {
        return problem(out, kind, &Problem::bad_json(kind), None, None).await;
    };
    let behave = match engine
        .defaults
        .for_request(exchange.head.header("x-fake"), body.get("fake"))
    {
        Ok(behave) => behave,
        Err(error) => {
            return out
                .json(
                    400,
                    &format!(r#"{{"error":{}}}"#, quoted(&error.to_string())),
                )
                .await;
        }
    };
    // Generation is work, so there is a ticket.
    let Some(ticket) = exchange.ticket else {
        return Ok(End::Close);
    };
    out.behave(&behave);
    if let Some(model) = body.get("model").and_then(Value::as_str) {
        ticket.model(model);
    }
    engine.count_generation(&behave).await;
    if behave.echo {
        return small::echo(exchange, out).await;
    }
    if behave.hang || behave.hang_generate {
        return std::future::pending().await;
    }
    let ask = match Ask::read(kind, dialect, &body) {
        Ok(ask) => ask,
        Err(error) => return problem(out, kind, &error, None, None).await,
    };
    let model = match reply_model(engine, ask.model.as_deref()) {
        Ok(model) => model,
        Err(error) => return problem(out, kind, &error, None, None).await,
    };
    let behave = engine.fail_first(behave);
    let stream = ask.stream;
    let tokens = if behave.flood {
        FLOOD_TOKENS
    } else {
        engine.options.tokens
    };
    let mut reply = Reply::new(kind, ask, &behave, model, engine.reply_number(), tokens);
    reply.id = own_id(exchange, &body).unwrap_or(reply.id);
    set_leave_rule(exchange, out);
    Generation {
        engine,
        exchange,
        ticket,
        out,
        behave,
        reply,
        stream,
        slot: None,
    }
    .run()
    .await
}

/// The name that the reply carries.
fn reply_model(engine: &Engine, asked: Option<&str>) -> Result<String, Problem> {
    let known = asked.is_none_or(|asked| engine.options.models.iter().any(|name| name == asked));
    match engine.options.kind {
        Kind::Sglang => Ok(asked.unwrap_or("default").to_owned()),
        Kind::Llamacpp => Ok(engine.model().to_owned()),
        Kind::Vllm | Kind::Openai if !known => {
            let message = format!("The model `{}` does not exist.", asked.unwrap_or_default());
            let class = if engine.options.kind == Kind::Vllm {
                "NotFoundError"
            } else {
                "invalid_request_error"
            };
            Err(Problem {
                param: Some("model".to_owned()),
                ..Problem::new(404, class, message)
            })
        }
        Kind::Vllm => Ok(engine.model().to_owned()),
        Kind::Openai => Ok(asked.unwrap_or(engine.model()).to_owned()),
    }
}

/// vLLM takes its id from `X-Request-Id`, SGLang from the body's `rid`.
fn own_id(exchange: &Exchange<'_>, body: &Value) -> Option<String> {
    match exchange.engine.options.kind {
        Kind::Vllm => exchange.head.header("x-request-id").map(str::to_owned),
        Kind::Sglang => body.get("rid").and_then(Value::as_str).map(str::to_owned),
        Kind::Llamacpp | Kind::Openai => None,
    }
}

/// llama.cpp does not notice a departure before the first byte while it is busy, nor at all with a conversation id.
fn set_leave_rule(exchange: &Exchange<'_>, out: &mut Out<'_, '_>) {
    if exchange.engine.options.kind != Kind::Llamacpp {
        return;
    }
    if exchange.head.header("x-conversation-id").is_some() {
        out.deaf = true;
        exchange.leave.set(LeaveRule::Never);
    } else {
        exchange.leave.set(LeaveRule::WhenQuiet);
    }
}

impl Generation<'_, '_, '_> {
    async fn run(&mut self) -> Result<End, Gone> {
        let early = self.behave.headers_first;
        if early {
            self.early_head().await?;
        }
        match self.behave.first_ms {
            Some(ms) => self.silence(ms).await?,
            None if early => self.silent(std::future::pending::<()>()).await?,
            None => {}
        }
        if let Some(end) = self.failure().await? {
            return Ok(end);
        }
        let engine = self.engine;
        let Ok(place) = engine.enter() else {
            return self.full().await;
        };
        if self.stream && matches!(self.reply.kind, Kind::Vllm | Kind::Openai) {
            // A 200 while queued: no sign of admission.
            self.early_head().await?;
        }
        self.slot = Some(self.silent(place.slot()).await?);
        self.silence(self.behave.prefill_ms.unwrap_or(engine.options.prefill_ms))
            .await?;
        engine.count_prompt(self.reply.prompt_tokens);
        let end = match (self.stream, self.behave.total_bytes) {
            (true, Some(bytes)) => self.stream_bytes(bytes).await,
            (true, None) => self.stream_tokens().await,
            (false, _) => self.whole().await,
        };
        engine.result();
        end
    }

    async fn stream_tokens(&mut self) -> Result<End, Gone> {
        if self.behave.die_after == Some(0) {
            return self.die(0).await;
        }
        let engine = self.engine;
        let mut due = Instant::now();
        self.silent(engine.let_go(0)).await?;
        self.begin().await?;
        for index in 0..self.reply.tokens {
            if index > 0 && self.token_ms() > 0 {
                due += Duration::from_millis(self.token_ms());
                self.silent(tokio::time::sleep_until(due)).await?;
            }
            self.silent(engine.let_go(index)).await?;
            for burst in self.reply.token(index) {
                self.send(&burst).await?;
            }
            self.count_token();
            if self.behave.die_after == Some(index + 1) {
                return self.die(index + 1).await;
            }
        }
        self.end_stream().await
    }

    /// One event over and over, as fast as the client reads.
    async fn stream_bytes(&mut self, bytes: u64) -> Result<End, Gone> {
        self.reply.chunk_bytes.get_or_insert(TOTAL_EVENT_BYTES);
        // Never the last: the finish reason belongs to the end.
        self.reply.tokens = u64::MAX;
        self.begin().await?;
        let opening = self.reply.token(0);
        for burst in &opening {
            self.send(burst).await?;
        }
        let again = self.reply.token(1);
        let size: u64 = again.iter().map(|burst| burst.text.len() as u64).sum();
        let (mut sent, mut tokens) = (size, 1);
        self.count_token();
        while sent < bytes {
            for burst in &again {
                self.send(burst).await?;
            }
            (sent, tokens) = (sent + size, tokens + 1);
            self.count_token();
            if self.behave.die_after == Some(tokens) {
                return self.die(tokens).await;
            }
        }
        // The closing events of some dialects repeat the text, which would double the bytes: it is left empty.
        self.reply.tokens = 0;
        self.end_stream().await
    }

    /// Head and opening events, with the first token.
    async fn begin(&mut self) -> Result<(), Gone> {
        self.early_head().await?;
        self.exchange.leave.notice_now();
        for burst in self.reply.opening() {
            self.send(&burst).await?;
        }
        Ok(())
    }

    /// What is sent from here on ends the answer: slot and count go back first, as whoever gets it may ask again at once.
    pub fn ends(&mut self) {
        self.slot = None;
        self.out.ends();
    }

    async fn end_stream(&mut self) -> Result<End, Gone> {
        self.ends();
        for burst in self.reply.closing() {
            self.send(&burst).await?;
        }
        self.out.finish().await
    }

    async fn whole(&mut self) -> Result<End, Gone> {
        let engine = self.engine;
        let die_after = self.behave.die_after;
        let tokens = die_after.unwrap_or(u64::MAX).min(self.reply.tokens);
        for index in 0..tokens {
            if index > 0 {
                self.silence(self.token_ms()).await?;
            }
            self.silent(engine.let_go(index)).await?;
            self.ticket.token();
        }
        if let Some(after) = die_after {
            return self.die(after).await;
        }
        let mut body = self.reply.whole().into_bytes();
        let mut headers = vec![("Content-Type", self.json_type())];
        if self.behave.gzip {
            headers.push(("Content-Encoding", "gzip"));
            body = small::gzip(&body);
        }
        let load = self.load_header();
        headers.extend(load.as_deref().map(|load| ("endpoint-load-metrics", load)));
        if self.behave.short_body {
            self.ticket.broken();
            self.out
                .head(200, &headers, Framing::Length(body.len() + 100))
                .await?;
            self.out.write(&body).await?;
            return Ok(End::Close);
        }
        self.ends();
        self.out.whole(200, &headers, &body).await
    }

    /// The head before there is anything to say.
    pub async fn early_head(&mut self) -> Result<(), Gone> {
        if self.stream {
            self.out.stream_head().await?;
            self.ticket.streaming();
            return Ok(());
        }
        self.out
            .head(200, &[("Content-Type", self.json_type())], Framing::Chunked)
            .await
    }

    async fn send(&mut self, burst: &Burst) -> Result<(), Gone> {
        if burst.text.is_empty() {
            Ok(())
        } else {
            self.out.events(&burst.text, burst.events).await
        }
    }

    /// Silence of so many milliseconds.
    async fn silence(&mut self, ms: u64) -> Result<(), Gone> {
        if ms == 0 {
            return Ok(());
        }
        self.silent(tokio::time::sleep(Duration::from_millis(ms)))
            .await
    }

    /// Waits for `event`, with comments if they are wanted and the head is out.
    pub async fn silent<T>(&mut self, event: impl Future<Output = T>) -> Result<T, Gone> {
        if !self.behave.comments || !self.out.started() {
            return Ok(event.await);
        }
        let mut event = pin!(event);
        let every = Duration::from_millis(self.behave.comment_ms.unwrap_or(COMMENT_MS));
        let end = if self.behave.crlf { "\r\n" } else { "\n" };
        let comment = format!(": keep-alive{end}{end}");
        loop {
            match tokio::time::timeout(every, &mut event).await {
                Ok(value) => return Ok(value),
                Err(_) => self.out.chunk(comment.as_bytes()).await?,
            }
        }
    }

    fn count_token(&self) {
        self.ticket.token();
        self.engine.result();
    }

    fn token_ms(&self) -> u64 {
        if self.behave.flood {
            0
        } else {
            self.behave.token_ms.unwrap_or(self.engine.options.token_ms)
        }
    }

    pub fn json_type(&self) -> &'static str {
        if self.reply.kind == Kind::Llamacpp {
            "application/json; charset=utf-8"
        } else {
            "application/json"
        }
    }

    /// vLLM's load signal on answers that are not streamed, when asked for.
    fn load_header(&self) -> Option<String> {
        let wanted = self.exchange.head.header("endpoint-load-metrics-format")?;
        if self.reply.kind != Kind::Vllm || wanted != "TEXT" {
            return None;
        }
        let numbers = self.engine.numbers();
        Some(format!(
            "TEXT named_metrics.num_requests_waiting={:?}, named_metrics.kv_cache_usage_perc={:?}",
            numbers.waiting, numbers.kv
        ))
    }
}
