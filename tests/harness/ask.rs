//! One request for each endpoint that an engine serves, for tests that hold for all of them.

use super::Client;

/// A request of the model `fake`.
pub struct Ask {
    pub path: &'static str,
    pub content_type: &'static str,
    pub body: String,
    pub stream: bool,
    /// What the proper end of this endpoint's stream has in it; no text of a token does.
    pub end_mark: &'static str,
}

/// A streamed request for each of the four endpoints that stream.
pub fn streams() -> Vec<Ask> {
    generating(true)
}

/// All endpoints, those that stream in both ways.
pub fn all() -> Vec<Ask> {
    let mut all = generating(true);
    all.append(&mut generating(false));
    all.push(json(
        "/v1/embeddings",
        r#"{"model":"fake","input":"hello you"}"#,
        false,
        "",
    ));
    all.push(transcription("fake"));
    all
}

/// A form with an audio file in it.
pub fn transcription(model: &str) -> Ask {
    let body = format!(
        "--Xy7\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\ncontent-type: audio/wav\r\n\r\n\
         RIFF\u{1}\u{2}--Xy\r\n\r\n--Xy7\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n--Xy7--\r\n"
    );
    Ask {
        path: "/v1/audio/transcriptions",
        content_type: "multipart/form-data; boundary=Xy7",
        body,
        stream: false,
        end_mark: "",
    }
}

fn generating(stream: bool) -> Vec<Ask> {
    let messages = r#""messages":[{"role":"user","content":"hello you"}]"#;
    [
        ("/v1/chat/completions", messages.to_owned(), "[DONE]"),
        (
            "/v1/completions",
            r#""prompt":"hello you""#.to_owned(),
            "[DONE]",
        ),
        (
            "/v1/responses",
            r#""input":"hello you""#.to_owned(),
            "response.completed",
        ),
        (
            "/v1/messages",
            format!(r#""max_tokens":64,{messages}"#),
            "message_stop",
        ),
    ]
    .into_iter()
    .map(|(path, prompt, end_mark)| {
        let body = format!(r#"{{"model":"fake","stream":{stream},{prompt}}}"#);
        json(path, &body, stream, end_mark)
    })
    .collect()
}

fn json(path: &'static str, body: &str, stream: bool, end_mark: &'static str) -> Ask {
    Ask {
        path,
        content_type: "application/json",
        body: body.to_owned(),
        stream,
        end_mark,
    }
}

impl Ask {
    /// Sends it, with directives for the engine.
    pub fn send(&self, client: &mut Client, fake: &str) {
        let headers = [("content-type", self.content_type), ("x-fake", fake)];
        client.request("POST", self.path, &headers, self.body.as_bytes());
    }
}

impl std::fmt::Display for Ask {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let how = if self.stream { "streamed" } else { "whole" };
        write!(out, "{} {how}", self.path)
    }
}
