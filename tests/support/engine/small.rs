//! The endpoints that show what was received, and the gzip that needs no compressor.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::behave::How;
use super::dialect::reply::quoted;
use super::error::Problem;
use super::out::{End, Out};
use super::route::problem;
use super::server::Exchange;
use super::wire::Gone;

/// Larger bodies are shown by length and checksum alone.
const ECHO_BODY_MAX_BYTES: usize = 64 * 1024;
/// A stored block of deflate holds at most this.
const STORED_BLOCK_MAX_BYTES: usize = 65_535;

/// What the directives ask of an endpoint that does not generate: silence, refusal, a status, a death before any byte.
pub async fn misbehave(
    exchange: &Exchange<'_>,
    out: &mut Out<'_, '_>,
    field: Option<&Value>,
) -> Result<Option<End>, Gone> {
    let engine = exchange.engine;
    let kind = engine.options.kind;
    let behave = match engine
        .defaults
        .for_request(exchange.head.header("x-fake"), field)
    {
        Ok(behave) => engine.fail_first(behave),
        Err(error) => {
            let body = format!(r#"{{"error":{}}}"#, quoted(&error.to_string()));
            return out.json(400, &body).await.map(Some);
        }
    };
    out.behave(&behave);
    if behave.hang_generate {
        return std::future::pending().await;
    }
    tokio::time::sleep(Duration::from_millis(behave.first_ms.unwrap_or(0))).await;
    if let Some(status) = behave.status {
        let error = Problem::plain(kind, status, behave.error_message.as_deref());
        return problem(out, kind, &error, behave.error_shape, behave.retry_after)
            .await
            .map(Some);
    }
    if !behave.refuse && behave.die_after.is_none() {
        return Ok(None);
    }
    if behave.die_after.is_some() && behave.how == How::Stall {
        return std::future::pending().await;
    }
    exchange.ticket.inspect(|ticket| ticket.broken());
    if behave.die_after.is_some() && behave.how == How::Exit {
        engine.exit().await;
    }
    let reset = behave.die_after.is_some() && behave.how == How::Rst;
    Ok(Some(if reset { End::Reset } else { End::Close }))
}

/// `/v1/echo`: method, path, headers in order, length and SHA-256 of the body, and the body if small and UTF-8.
pub async fn echo(exchange: &Exchange<'_>, out: &mut Out<'_, '_>) -> Result<End, Gone> {
    let head = exchange.head;
    let headers: Vec<String> = head
        .headers
        .iter()
        .map(|(name, value)| format!("[{},{}]", quoted(name), quoted(value)))
        .collect();
    let small = (exchange.body.len() <= ECHO_BODY_MAX_BYTES)
        .then(|| std::str::from_utf8(exchange.body).ok());
    let body = small.flatten().map_or("null".to_owned(), quoted);
    let json = format!(
        r#"{{"method":{},"path":{},"headers":[{}],"body_bytes":{},"sha256":"{}","body":{body}}}"#,
        quoted(&head.method),
        quoted(&head.target),
        headers.join(","),
        exchange.body.len(),
        sha256_hex(exchange.body),
    );
    out.json(200, &json).await
}

/// `/v1/audio/transcriptions`: the `model` field found in the multipart body, and length and SHA-256 of all of it.
pub async fn transcription(exchange: &Exchange<'_>, out: &mut Out<'_, '_>) -> Result<End, Gone> {
    if let Some(end) = misbehave(exchange, out, None).await? {
        return Ok(end);
    }
    let content_type = exchange.head.header("content-type").unwrap_or_default();
    let boundary = content_type
        .split("boundary=")
        .nth(1)
        .map(|text| text.split(';').next().unwrap_or(text));
    let model = boundary
        .and_then(|boundary| form_field(exchange.body, boundary.trim_matches('"'), "model"));
    if let (Some(ticket), Some(model)) = (exchange.ticket, &model) {
        ticket.model(model);
    }
    let model = model.map_or("null".to_owned(), |model| quoted(&model));
    let (bytes, sum) = (exchange.body.len(), sha256_hex(exchange.body));
    let json =
        format!(r#"{{"text":"t0 t1 t2","model":{model},"body_bytes":{bytes},"sha256":"{sum}"}}"#);
    out.json(200, &json).await
}

/// The value of one field of a multipart form.
fn form_field(body: &[u8], boundary: &str, name: &str) -> Option<String> {
    let delimiter = format!("--{boundary}");
    let wanted = format!("name=\"{name}\"");
    let mut rest = body;
    while let Some(at) = find(rest, delimiter.as_bytes()) {
        let part = &rest[at + delimiter.len()..];
        let end = find(part, delimiter.as_bytes()).unwrap_or(part.len());
        let content = &part[..end];
        if let Some(split) = find(content, b"\r\n\r\n") {
            let header = String::from_utf8_lossy(&content[..split]);
            if header.contains(&wanted) {
                let value = String::from_utf8_lossy(&content[split + 4..]).into_owned();
                return Some(value.strip_suffix("\r\n").unwrap_or(&value).to_owned());
            }
        }
        rest = part;
    }
    None
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}

/// SHA-256 as hex digits.
pub fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .fold(String::new(), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// A gzip file that holds `bytes` uncompressed (RFC 1952, RFC 1951 3.2.4).
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut file = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let blocks: Vec<&[u8]> = bytes.chunks(STORED_BLOCK_MAX_BYTES).collect();
    for (index, block) in blocks.iter().enumerate() {
        file.push(u8::from(index + 1 == blocks.len()));
        let length = u16::try_from(block.len()).unwrap_or(u16::MAX);
        file.extend_from_slice(&length.to_le_bytes());
        file.extend_from_slice(&(!length).to_le_bytes());
        file.extend_from_slice(block);
    }
    file.extend_from_slice(&crc32(bytes).to_le_bytes());
    file.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
    file
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0xedb8_8320
            } else {
                crc >> 1
            };
        }
    }
    !crc
}
