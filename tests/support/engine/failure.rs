//! How a generation fails when it was told to: before it starts, in its first event, or half-way.

use super::behave::{How, Text};
use super::dialect::ask::Dialect;
use super::dialect::reply::{data, named, quoted};
use super::error::Problem;
use super::generate::Generation;
use super::options::Kind;
use super::out::{End, Framing};
use super::route::problem;
use super::wire::Gone;

impl Generation<'_, '_, '_> {
    /// Failures before anything is generated.
    pub async fn failure(&mut self) -> Result<Option<End>, Gone> {
        let (kind, behave) = (self.reply.kind, self.behave.clone());
        if behave.refuse {
            self.ticket.broken();
            return Ok(Some(End::Close));
        }
        if let Some(status) = behave.status {
            let error = Problem::plain(kind, status, behave.error_message.as_deref());
            return problem(
                self.out,
                kind,
                &error,
                behave.error_shape,
                behave.retry_after,
            )
            .await
            .map(Some);
        }
        if behave.first_event_error {
            let error = Problem::plain(
                kind,
                503,
                Some(
                    behave
                        .error_message
                        .as_deref()
                        .unwrap_or("The request queue is full."),
                ),
            );
            return self.error_instead(&error).await.map(Some);
        }
        let Some(raw) = &behave.raw else {
            return Ok(None);
        };
        let pieces = match raw {
            Text::One(text) => std::slice::from_ref(text),
            Text::Each(texts) => texts.as_slice(),
        };
        if !self.stream {
            return self.out.json(200, &pieces.concat()).await.map(Some);
        }
        self.early_head().await?;
        for (index, piece) in pieces.iter().enumerate() {
            if index + 1 == pieces.len() {
                self.ends();
            }
            self.out.events(piece, 1).await?;
        }
        self.out.finish().await.map(Some)
    }

    /// The queue is full: SGLang tells a stream so in a 200.
    pub async fn full(&mut self) -> Result<End, Gone> {
        let (kind, status) = match self.reply.kind {
            Kind::Openai => (Kind::Openai, 429),
            kind => (kind, 503),
        };
        let error = Problem::plain(kind, status, Some("The request queue is full."));
        if self.out.started() || kind == Kind::Sglang && self.stream {
            return self.error_instead(&error).await;
        }
        let retry_after = (kind == Kind::Openai).then_some(1);
        problem(self.out, kind, &error, None, retry_after).await
    }

    /// 200, the error as the only event, and a clean end; or, without a stream, the error's own status.
    async fn error_instead(&mut self, error: &Problem) -> Result<End, Gone> {
        if !self.stream {
            return problem(self.out, self.reply.kind, error, None, None).await;
        }
        self.early_head().await?;
        self.ends();
        self.error_event(error).await?;
        self.out.finish().await
    }

    async fn error_event(&mut self, error: &Problem) -> Result<(), Gone> {
        let json = error.event_json();
        match self.reply.dialect {
            Dialect::Chat | Dialect::Completions => {
                self.out.events(&data(&json), 1).await?;
                self.out.events("data: [DONE]\n\n", 1).await
            }
            Dialect::Messages => {
                let message = quoted(&error.message);
                let json = format!(
                    r#"{{"type":"error","error":{{"type":"api_error","message":{message}}}}}"#
                );
                self.out.events(&named("error", &json), 1).await
            }
            Dialect::Responses => {
                let message = quoted(&error.message);
                let json = format!(
                    r#"{{"type":"error","code":"server_error","message":{message},"param":null}}"#
                );
                self.out.events(&named("error", &json), 1).await
            }
        }
    }

    /// The end that was asked for, with `tokens` out.
    pub async fn die(&mut self, tokens: u64) -> Result<End, Gone> {
        let how = self.behave.how;
        self.out.flush().await?;
        if how == How::Stall {
            return self.silent(std::future::pending::<End>()).await;
        }
        self.ticket.broken();
        self.slot = None;
        let error = Problem::plain(
            self.reply.kind,
            500,
            Some(
                self.behave
                    .error_message
                    .as_deref()
                    .unwrap_or("EngineCore encountered an issue."),
            ),
        );
        match how {
            How::Exit => {
                self.engine.exit().await;
                Ok(End::Close)
            }
            How::Rst => Ok(End::Reset),
            How::Fin => Ok(End::Close),
            How::ErrorEventThenDone => self.error_instead(&error).await,
            How::CleanEnd if self.stream => {
                self.early_head().await?;
                self.out.finish().await
            }
            How::HalfEvent if self.stream => {
                self.early_head().await?;
                let event = self
                    .reply
                    .text_event(0, tokens, &self.reply.token_text(tokens));
                self.out.chunk(&event.as_bytes()[..event.len() / 2]).await?;
                Ok(End::Close)
            }
            How::CleanEnd | How::HalfEvent | How::Stall => {
                self.die_whole(how == How::CleanEnd).await
            }
        }
    }

    /// Half the body, framed as if it were all, or as what it is.
    async fn die_whole(&mut self, clean: bool) -> Result<End, Gone> {
        let body = self.reply.whole();
        let half = &body.as_bytes()[..body.len() / 2];
        let headers = [("Content-Type", self.json_type())];
        if clean {
            return self.out.whole(200, &headers, half).await;
        }
        self.out
            .head(200, &headers, Framing::Length(body.len()))
            .await?;
        self.out.write(half).await?;
        Ok(End::Close)
    }
}
