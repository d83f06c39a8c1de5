//! Writes one response: head, chunks, events, in the framing that the directives ask for, each event in one write.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::behave::Behave;
use super::options::Kind;
use super::state::Ticket;
use super::wire::{Gone, Head, Writer};

/// What is to become of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The message is whole; another request may come.
    Keep,
    /// End of the connection (FIN).
    Close,
    /// TCP reset.
    Reset,
}

/// How the body's end is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    Length(usize),
    Chunked,
}

/// A response on its way.
pub struct Out<'w, 'c> {
    writer: &'w mut Writer<'c>,
    kind: Kind,
    /// `HEAD` gets no body, HTTP/1.0 no chunks.
    head_only: bool,
    http10: bool,
    keep_alive: bool,
    keepalive_header: Option<String>,
    style: Style,
    /// Bytes of events not yet written, and how many events they are.
    held: Vec<u8>,
    held_events: usize,
    started: bool,
    /// What is answered, unless it is a probe.
    ticket: Option<&'w Ticket<'w>>,
    /// The client left, yet the engine goes on (llama.cpp with `X-Conversation-Id`).
    pub deaf: bool,
}

#[derive(Default)]
struct Style {
    split: Option<usize>,
    split_ms: u64,
    merge: usize,
    crlf: bool,
    headers: Vec<(String, String)>,
}

impl<'w, 'c> Out<'w, 'c> {
    /// `keep_alive`: whether the connection stays after this answer; `keepalive_header` says so to the client.
    /// `ticket` ends with the answer.
    pub fn new(
        writer: &'w mut Writer<'c>,
        kind: Kind,
        head: &Head,
        keep_alive: bool,
        ticket: Option<&'w Ticket<'w>>,
    ) -> Out<'w, 'c> {
        Out {
            writer,
            kind,
            head_only: head.method == "HEAD",
            http10: head.http10,
            keep_alive: keep_alive && !head.http10,
            keepalive_header: None,
            style: Style::default(),
            held: Vec::new(),
            held_events: 0,
            started: false,
            ticket,
            deaf: false,
        }
    }

    /// llama.cpp says how long and how often a connection may be used.
    pub fn keepalive_header(&mut self, text: String) {
        self.keepalive_header = Some(text);
    }

    /// Takes the framing and the headers that the directives ask for.
    pub fn behave(&mut self, behave: &Behave) {
        self.style = Style {
            split: behave.split.filter(|size| *size > 0),
            split_ms: behave.split_ms.unwrap_or(0),
            merge: behave.merge.unwrap_or(1).max(1),
            crlf: behave.crlf,
            headers: behave
                .headers
                .iter()
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
        };
        if behave.hop_headers {
            let hop = [
                ("Connection", "x-secret-hop"),
                ("x-secret-hop", "1"),
                ("Keep-Alive", "timeout=5, max=100"),
                ("Proxy-Authenticate", "Basic"),
            ];
            self.style
                .headers
                .extend(hop.map(|(name, value)| (name.to_owned(), value.to_owned())));
        }
    }

    /// Whether the head is out.
    pub fn started(&self) -> bool {
        self.started
    }

    /// What is written from here on ends the answer. See [`Ticket::completed`].
    pub fn ends(&self) {
        if let Some(ticket) = self.ticket {
            ticket.completed();
        }
    }

    /// Writes a whole response in one write; its body alone if a head is out already.
    pub async fn whole(
        &mut self,
        status: u16,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<End, Gone> {
        self.ends();
        if self.started {
            self.chunk(body).await?;
            return self.finish().await;
        }
        let mut bytes = self.head_text(status, headers, Framing::Length(body.len()));
        if !self.head_only {
            bytes.extend_from_slice(body);
        }
        self.started = true;
        self.write(&bytes).await?;
        Ok(self.end_state())
    }

    /// Writes a JSON response.
    pub async fn json(&mut self, status: u16, body: &str) -> Result<End, Gone> {
        let kind = if self.kind == Kind::Llamacpp {
            "application/json; charset=utf-8"
        } else {
            "application/json"
        };
        self.whole(status, &[("Content-Type", kind)], body.as_bytes())
            .await
    }

    /// Writes the head of an event stream, once.
    pub async fn stream_head(&mut self) -> Result<(), Gone> {
        let llamacpp = [
            ("X-Accel-Buffering", "no"),
            ("Content-Type", "text/event-stream"),
        ];
        let others = [("Content-Type", "text/event-stream; charset=utf-8")];
        let headers: &[(&str, &str)] = if self.kind == Kind::Llamacpp {
            &llamacpp
        } else {
            &others
        };
        self.head(200, headers, Framing::Chunked).await
    }

    /// Writes a head, once.
    pub async fn head(
        &mut self,
        status: u16,
        headers: &[(&str, &str)],
        framing: Framing,
    ) -> Result<(), Gone> {
        if self.started {
            return Ok(());
        }
        self.started = true;
        let bytes = self.head_text(status, headers, framing);
        self.write(&bytes).await
    }

    /// Writes events that the engine sends together; `count` of them.
    pub async fn events(&mut self, text: &str, count: usize) -> Result<(), Gone> {
        if self.style.crlf {
            self.held
                .extend_from_slice(text.replace('\n', "\r\n").as_bytes());
        } else {
            self.held.extend_from_slice(text.as_bytes());
        }
        self.held_events += count;
        if self.held_events >= self.style.merge {
            self.flush().await
        } else {
            Ok(())
        }
    }

    /// Writes what is held back.
    pub async fn flush(&mut self) -> Result<(), Gone> {
        let bytes = std::mem::take(&mut self.held);
        self.held_events = 0;
        if bytes.is_empty() {
            return Ok(());
        }
        let Some(size) = self.style.split else {
            return self.chunk(&bytes).await;
        };
        for piece in bytes.chunks(size) {
            self.chunk(piece).await?;
            if self.style.split_ms > 0 {
                tokio::time::sleep(Duration::from_millis(self.style.split_ms)).await;
            } else {
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    /// Writes bytes of the body as one chunk, in one write.
    pub async fn chunk(&mut self, bytes: &[u8]) -> Result<(), Gone> {
        if self.head_only {
            return Ok(());
        }
        if self.http10 {
            return self.write(bytes).await;
        }
        let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
        framed.reserve(bytes.len() + 2);
        framed.extend_from_slice(bytes);
        framed.extend_from_slice(b"\r\n");
        self.write(&framed).await
    }

    /// Ends a chunked body as it should end.
    pub async fn finish(&mut self) -> Result<End, Gone> {
        self.ends();
        self.flush().await?;
        if !self.http10 && !self.head_only {
            self.write(b"0\r\n\r\n").await?;
        }
        Ok(self.end_state())
    }

    /// Writes bytes as they are, outside all framing.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), Gone> {
        match self.writer.write(bytes).await {
            Err(Gone) if self.deaf => Ok(()),
            result => result,
        }
    }

    fn end_state(&self) -> End {
        if self.keep_alive {
            End::Keep
        } else {
            End::Close
        }
    }

    fn head_text(&self, status: u16, headers: &[(&str, &str)], framing: Framing) -> Vec<u8> {
        let llamacpp = self.kind == Kind::Llamacpp;
        let mut text = format!("HTTP/1.1 {status} {}\r\n", reason(status));
        let mut put = |name: &str, value: &str| {
            // What the directives say replaces what the kind would say.
            if self
                .style
                .headers
                .iter()
                .any(|(own, _)| own.eq_ignore_ascii_case(name))
            {
                return;
            }
            let name = if llamacpp {
                name.to_owned()
            } else {
                name.to_ascii_lowercase()
            };
            text.push_str(&format!("{name}: {value}\r\n"));
        };
        match self.kind {
            Kind::Llamacpp => {
                put("Server", "llama.cpp");
                put("Access-Control-Allow-Origin", "");
            }
            Kind::Vllm | Kind::Sglang => {
                put("Date", &http_date());
                put("Server", "uvicorn");
            }
            Kind::Openai => put("Date", &http_date()),
        }
        for (name, value) in headers {
            put(name, value);
        }
        if matches!(self.kind, Kind::Vllm | Kind::Sglang) {
            put("Vary", "Origin");
        }
        match framing {
            Framing::Length(length) => put("Content-Length", &length.to_string()),
            Framing::Chunked if !self.http10 => put("Transfer-Encoding", "chunked"),
            Framing::Chunked => {}
        }
        if !self.keep_alive {
            put("Connection", "close");
        } else if let Some(limits) = &self.keepalive_header {
            put("Keep-Alive", limits);
        }
        for (name, value) in &self.style.headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str("\r\n");
        text.into_bytes()
    }
}

/// The reason phrase of a status.
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Payload Too Large",
        422 => "Unprocessable Entity",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Unknown",
    }
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |passed| passed.as_secs())
}

/// Now, as a `Date` header has it.
fn http_date() -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let now = unix_seconds();
    let (days, second) = (now / 86_400, now % 86_400);
    // Days to civil date, counted from 1 March of the year 0 (Howard Hinnant's algorithm).
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let week_day = DAYS[usize::try_from(days % 7).unwrap_or(0)];
    let month = MONTHS[usize::try_from(month - 1).unwrap_or(0)];
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{week_day}, {day:02} {month} {year} {hour:02}:{minute:02}:{second:02} GMT")
}
