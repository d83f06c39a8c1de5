//! Which headers go on, in either direction. What concerns one connection stays on it; the rest is forwarded.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

/// The client's own id of a request, or ours.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Asks for the headers that tell what the gateway did.
pub const X_LLMGW_DEBUG: HeaderName = HeaderName::from_static("x-llmgw-debug");
/// Names the model of a request that has none in its path or body.
pub const X_LLMGW_MODEL: HeaderName = HeaderName::from_static("x-llmgw-model");
/// The band a client would like.
pub const X_LLMGW_BAND: HeaderName = HeaderName::from_static("x-llmgw-band");
/// An API key, in the form that Anthropic's clients send.
pub const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// A client's id longer than this is replaced by our own: it goes into every log line.
const REQUEST_ID_MAX_BYTES: usize = 128;

/// Headers that end at the next hop, whatever `Connection` says (RFC 9110, 7.6.1).
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Headers that speak to the gateway and end here.
const OURS: [HeaderName; 7] = [
    header::AUTHORIZATION,
    X_API_KEY,
    header::HOST,
    header::EXPECT,
    X_LLMGW_DEBUG,
    X_LLMGW_MODEL,
    X_LLMGW_BAND,
];

/// Removes what concerns one connection only, the headers that `Connection` names included.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(header::CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| name.trim().parse().ok())
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

/// Turns a client's headers into those an engine gets. Its length is set anew with its body.
pub fn towards_engine(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    for name in &OURS {
        headers.remove(name);
    }
    headers.remove(header::CONTENT_LENGTH);
}

/// Turns an engine's headers into those a client gets.
pub fn towards_client(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    // llama.cpp sends it empty, and a browser refuses the answer for that.
    if headers
        .get(header::ACCESS_CONTROL_ALLOW_ORIGIN)
        .is_some_and(HeaderValue::is_empty)
    {
        headers.remove(header::ACCESS_CONTROL_ALLOW_ORIGIN);
    }
}

/// No proxy on the way may hold an event back.
pub fn for_stream(headers: &mut HeaderMap) {
    headers.insert(X_ACCEL_BUFFERING, HeaderValue::from_static("no"));
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-cache"));
}

/// The client's request id where it can be kept, else a new one.
pub fn request_id(headers: &HeaderMap) -> HeaderValue {
    match headers.get(X_REQUEST_ID) {
        Some(own) if is_fit(own) => own.clone(),
        _ => {
            let id = format!(
                "{:016x}{:016x}",
                crate::random::next(),
                crate::random::next()
            );
            // Hexadecimal digits are always a header value.
            HeaderValue::from_str(&id).unwrap_or(HeaderValue::from_static("unknown"))
        }
    }
}

fn is_fit(id: &HeaderValue) -> bool {
    let bytes = id.as_bytes();
    !bytes.is_empty()
        && bytes.len() <= REQUEST_ID_MAX_BYTES
        && bytes.iter().all(u8::is_ascii_graphic)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn what_connection_names_ends_here_and_everything_else_goes_on() {
        let mut headers = map(&[
            ("connection", "keep-alive, X-Secret-Hop"),
            ("x-secret-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("content-type", "text/plain"),
            ("x-own", "a"),
            ("x-own", "b"),
        ]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(
            headers,
            map(&[
                ("content-type", "text/plain"),
                ("x-own", "a"),
                ("x-own", "b")
            ])
        );
    }

    #[test]
    fn keys_end_at_the_gateway() {
        let mut headers = map(&[
            ("authorization", "Bearer secret"),
            ("x-api-key", "secret"),
            ("content-length", "3"),
            ("traceparent", "00-1"),
        ]);
        towards_engine(&mut headers);
        assert_eq!(headers, map(&[("traceparent", "00-1")]));
    }

    #[test]
    fn an_empty_cors_header_of_an_engine_is_taken_out() {
        let mut headers = map(&[("access-control-allow-origin", "")]);
        towards_client(&mut headers);
        assert!(headers.is_empty());
    }

    #[test]
    fn a_request_id_is_kept_where_it_can_stand_in_a_log_line() {
        for (own, kept) in [
            ("abc-1", true),
            ("", false),
            ("with space", false),
            (&"x".repeat(129) as &str, false),
        ] {
            let headers = map(&[("x-request-id", own)]);
            assert_eq!(request_id(&headers) == own, kept, "{own}");
        }
        assert_eq!(request_id(&HeaderMap::new()).len(), 32);
    }
}
