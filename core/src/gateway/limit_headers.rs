//! `x-ratelimit-*`: what a tenant has left of its own limits, in the form that OpenAI's clients know.

use http::header::{HeaderMap, HeaderName, HeaderValue};

use crate::flow::ledger::{Balance, Left};

/// Limit, remaining, reset.
const REQUESTS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKENS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

/// Puts the balance of a tenant that has such a limit in the place of whatever an engine said. Without a limit the
/// engine's own headers stay.
pub fn write(headers: &mut HeaderMap, balance: &Balance) {
    if *balance == Balance::default() {
        return;
    }
    for (names, left) in [(REQUESTS, balance.requests), (TOKENS, balance.tokens)] {
        for name in &names {
            headers.remove(name);
        }
        let Some(left) = left else {
            continue;
        };
        let Left {
            limit,
            remaining,
            reset_ms,
        } = left;
        let [limit_name, remaining_name, reset_name] = names;
        headers.insert(limit_name, HeaderValue::from(limit));
        headers.insert(remaining_name, HeaderValue::from(remaining));
        if let Ok(reset) = HeaderValue::from_str(&duration(reset_ms)) {
            headers.insert(reset_name, reset);
        }
    }
}

/// `0s`, `120ms`, `8.64s`, `6m0s`, `1h0m0s`: as OpenAI writes durations, which is Go's way.
fn duration(ms: u64) -> String {
    if ms == 0 {
        return "0s".to_string();
    }
    if ms < 1_000 {
        return format!("{ms}ms");
    }
    let (minutes, ms) = (ms / 60_000, ms % 60_000);
    let fraction = format!("{:03}", ms % 1_000);
    let fraction = fraction.trim_end_matches('0');
    let point = if fraction.is_empty() { "" } else { "." };
    let seconds = format!("{}{point}{fraction}s", ms / 1_000);
    match (minutes / 60, minutes % 60) {
        (0, 0) => seconds,
        (0, minutes) => format!("{minutes}m{seconds}"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_openai_writes_them() {
        for (ms, text) in [
            (0, "0s"),
            (6, "6ms"),
            (120, "120ms"),
            (1_000, "1s"),
            (8_640, "8.64s"),
            (59_999, "59.999s"),
            (60_000, "1m0s"),
            (61_005, "1m1.005s"),
            (360_000, "6m0s"),
            (3_600_000, "1h0m0s"),
            (3_661_500, "1h1m1.5s"),
        ] {
            assert_eq!(duration(ms), text);
        }
    }

    #[test]
    fn an_engines_own_headers_are_replaced_only_for_a_tenant_with_such_a_limit() {
        let engine = || {
            let mut headers = HeaderMap::new();
            for name in REQUESTS.into_iter().chain(TOKENS) {
                headers.insert(name, HeaderValue::from_static("engine"));
            }
            headers
        };
        let mut headers = engine();
        write(&mut headers, &Balance::default());
        assert_eq!(headers, engine());
        let tokens = Left {
            limit: 1_000,
            remaining: 400,
            reset_ms: 36_000,
        };
        let balance = Balance {
            requests: None,
            tokens: Some(tokens),
        };
        write(&mut headers, &balance);
        let mut expected = HeaderMap::new();
        for (name, value) in TOKENS.into_iter().zip(["1000", "400", "36s"]) {
            expected.insert(name, HeaderValue::from_static(value));
        }
        assert_eq!(headers, expected);
    }
}
