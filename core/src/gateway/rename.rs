//! The name a client asked for, put where an engine wrote its own. No other byte changes.

use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;

use super::splice::{self, ModelFinder};
use super::sse::Event;
use super::usage::value_after;

/// What an engine's bytes said about the model.
pub enum Shown {
    /// No model in it.
    Nothing,
    /// The name that was asked for already: the rest of the stream need not be looked at.
    AsAsked,
    Renamed(Bytes),
}

static KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"model\""));

/// Renames the model in a JSON answer.
pub fn in_json(json: &Bytes, asked: &str) -> Bytes {
    if names_only(json, asked) {
        return json.clone();
    }
    match splice::response_model_range(json) {
        Some(range) if !is_name(&json[range.clone()], asked) => {
            splice::replace_model(json, range, asked)
        }
        _ => json.clone(),
    }
}

/// Whether each `model` in the bytes has this name, however deep it stands: then whichever counts needs no change,
/// and a search is enough where it would take a parse to tell them apart.
fn names_only(json: &[u8], asked: &str) -> bool {
    let mut places = KEY.find_iter(json).peekable();
    places.peek().is_some()
        && places.all(|at| {
            value_after(json, at + "\"model\"".len())
                .and_then(|value| value.strip_prefix(b"\""))
                .and_then(|value| value.strip_prefix(asked.as_bytes()))
                .is_some_and(|rest| rest.starts_with(b"\""))
        })
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
    fn an_answer_under_another_name_is_renamed_wherever_else_the_asked_name_stands() {
        for (json, expected) in [
            (
                r#"{"model":"mine","n":1.50}"#,
                r#"{"model":"mine","n":1.50}"#,
            ),
            (
                r#"{"model":"smol","n":1.50}"#,
                r#"{"model":"mine","n":1.50}"#,
            ),
            (
                r#"{"a":{"model":"mine"},"model" : "mine2"}"#,
                r#"{"a":{"model":"mine"},"model" : "mine"}"#,
            ),
            (
                r#"{"text":"\"model\":\"x\"","model":"smol"}"#,
                r#"{"text":"\"model\":\"x\"","model":"mine"}"#,
            ),
            (r#"{"model":"mi\"ne"}"#, r#"{"model":"mine"}"#),
            (r#"{"model":null}"#, r#"{"model":null}"#),
            (r#"{"n":1}"#, r#"{"n":1}"#),
        ] {
            let renamed = in_json(&Bytes::copy_from_slice(json.as_bytes()), "mine");
            assert_eq!(renamed, expected.as_bytes(), "{json}");
        }
    }

    #[test]
    fn data_over_several_lines_stays_one_event() {
        let text = event_text("event: e\ndata: {\"model\":\ndata: \"smol\"}\n\n", "mine").unwrap();
        assert_eq!(text, "event: e\ndata: {\"model\":\ndata: \"mine\"}\n\n");
    }
}
