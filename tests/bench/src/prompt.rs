//! The requests that are sent: chat bodies as clients send them, filled with prose up to a size.

/// The model that the bench asks for, by the name that the engine lists.
pub const MODEL: &str = "bench";
/// Tells the engine how to answer: `EVENTS;GAP_US`, or `EVENTS;hold`. Proxies pass it on like any other header.
pub const STREAM_HEADER: &str = "x-bench-stream";

const WORDS: &str = "The harbour master wrote down every ship that came in, its \\\"papers\\\" and its cargo, and \
    on quiet days he added what the weather had done to the pier.\\nNobody had asked him to; r\u{e9}sum\u{e9}s were kept elsewhere. ";

/// How an engine is to stream its answer.
#[derive(Debug, Clone, Copy)]
pub struct Streamed {
    pub events: u32,
    pub pace: Pace,
}

/// What comes between two events.
#[derive(Debug, Clone, Copy)]
pub enum Pace {
    /// Microseconds; 0 sends as fast as the other streams let it.
    GapUs(u64),
    /// After the last event nothing more comes.
    Hold,
}

/// One whole HTTP/1.1 request, body included. No two `serial`s share the beginning of their prompts.
pub fn request(body_bytes: usize, serial: u64, streamed: Option<Streamed>) -> Vec<u8> {
    let body = body(body_bytes, serial, streamed.is_some());
    let stream = streamed.map_or_else(String::new, |streamed| {
        let pace = match streamed.pace {
            Pace::GapUs(gap) => gap.to_string(),
            Pace::Hold => "hold".to_string(),
        };
        format!("{STREAM_HEADER}: {};{pace}\r\n", streamed.events)
    });
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\naccept: application/json\r\naccept-encoding: gzip, deflate\r\n\
         content-type: application/json\r\nuser-agent: OpenAI/Python 2.8.1\r\nx-stainless-lang: python\r\n\
         x-stainless-retry-count: 0\r\n{stream}content-length: {}\r\n\r\n",
        body.len()
    );
    let mut request = head.into_bytes();
    request.extend_from_slice(body.as_bytes());
    request
}

fn body(bytes: usize, serial: u64, stream: bool) -> String {
    let start = format!(
        r#"{{"model":"{MODEL}","messages":[{{"role":"system","content":"You are a careful assistant."}},{{"role":"user","content":"Note {serial}. "#
    );
    let end = format!(r#""}}],"temperature":0.7,"max_tokens":256,"stream":{stream}}}"#);
    let mut body = start;
    while body.len() + end.len() + WORDS.len() <= bytes {
        body.push_str(WORDS);
    }
    let rest = bytes.saturating_sub(body.len() + end.len());
    body.extend(std::iter::repeat_n('.', rest));
    body.push_str(&end);
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_valid_json_of_the_size_that_was_asked_for() {
        for bytes in [1_000, 8_000, 100_000] {
            let body = body(bytes, 7, true);
            assert_eq!(body.len(), bytes);
            serde_json::from_str::<serde_json::Value>(&body).unwrap();
        }
    }
}
