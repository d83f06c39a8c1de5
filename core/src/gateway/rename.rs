//! The name a client asked for, put where an engine wrote its own. No other byte changes.

use bytes::Bytes;

use super::splice::{self, ModelFinder};
use super::sse::Event;

/// What an engine's bytes said about the model.
pub enum Shown {
    /// No model in it.
    Nothing,
    /// The name that was asked for already: the rest of the stream need not be looked at.
    AsAsked,
    Renamed(Bytes),
}

/// Renames the model in a JSON answer.
pub fn in_json(json: &Bytes, asked: &str) -> Bytes {
    match splice::response_model_range(json) {
        Some(range) if !is_name(&json[range.clone()], asked) => {
            splice::replace_model(json, range, asked)
        }
        _ => json.clone(),
    }
}

/// Renames the model in one event, its `event:` line and line ends untouched.
pub fn in_event(finder: &mut ModelFinder, event: &Event<'_>, asked: &str) -> Shown {
    match finder.range(&event.data) {
        None => Shown::Nothing,
        Some(range) if is_name(&event.data[range.clone()], asked) => Shown::AsAsked,
        Some(_) => finder
            .rename(event, asked)
            .map_or(Shown::Nothing, Shown::Renamed),
    }
}

/// Whether a JSON string is this name. A name written with escapes is not recognised, and only rewritten.
fn is_name(json: &[u8], asked: &str) -> bool {
    json.strip_prefix(b"\"")
        .and_then(|rest| rest.strip_suffix(b"\""))
        .is_some_and(|name| name == asked.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::super::sse;
    use super::*;

    fn event_text(raw: &str, asked: &str) -> Option<String> {
        let event = sse::events(raw.as_bytes()).next().unwrap();
        match in_event(&mut ModelFinder::new(), &event, asked) {
            Shown::Renamed(bytes) => Some(String::from_utf8(bytes.to_vec()).unwrap()),
            Shown::Nothing | Shown::AsAsked => None,
        }
    }

    #[test]
    fn only_the_top_level_model_of_an_event_changes() {
        for (raw, expected) in [
            (
                "data: {\"a\":{\"model\":\"x\"},\"model\":\"smol\",\"n\":1.50}\n\n",
                Some("data: {\"a\":{\"model\":\"x\"},\"model\":\"mine\",\"n\":1.50}\n\n"),
            ),
            (
                "event: response.created\r\ndata: {\"response\":{\"model\":\"smol\"}}\r\n\r\n",
                Some(
                    "event: response.created\r\ndata: {\"response\":{\"model\":\"mine\"}}\r\n\r\n",
                ),
            ),
            ("data: {\"model\":\"mine\"}\n\n", None),
            ("data: [DONE]\n\n", None),
            ("data: {\"x\":\"a \\\"model\\\":\\\"smol\\\"\"}\n\n", None),
        ] {
            assert_eq!(event_text(raw, "mine").as_deref(), expected, "{raw}");
        }
    }

    #[test]
    fn data_over_several_lines_stays_one_event() {
        let text = event_text("event: e\ndata: {\"model\":\ndata: \"smol\"}\n\n", "mine").unwrap();
        assert_eq!(text, "event: e\ndata: {\"model\":\ndata: \"mine\"}\n\n");
    }
}
