//! What a client may ask for and how it is refused: routes, names, bodies, keys, and the ways to connect.

mod harness;

use std::fmt::Write as _;
use std::net::TcpStream;
use std::sync::Arc;

use bytes::Bytes;
use fake_engine::{Kind, Options, Running, start};
use harness::ask::{self, transcription};
use harness::{Answer, Client, End, Gateway, PATIENCE, Setup, chat};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use serde_json::json;
use sha2::{Digest, Sha256};

/// Two models, of which the second has an alias and is served under another name, the third nowhere.
struct Fleet {
    first: Running,
    second: Running,
    gateway: Gateway,
}

fn fleet() -> Fleet {
    let first = start(Options::new(Kind::Vllm)).unwrap();
    let second = start(Options::new(Kind::Vllm).model("/models/second")).unwrap();
    let gone = start(Options::new(Kind::Vllm)).unwrap();
    let nowhere = gone.url();
    gone.stop();
    let gateway = Setup::new()
        .limit("body_max", "64KiB")
        .model("fake", "")
        .endpoint("vllm", &first.url(), "")
        .model("org/second:7b", "aliases: [nick, default]")
        .endpoint("vllm", &second.url(), "serves: /models/second")
        .model("down", "")
        .endpoint("vllm", &nowhere, "")
        .start();
    gateway.ready("fake", 1);
    gateway.ready("org/second:7b", 1);
    Fleet {
        first,
        second,
        gateway,
    }
}

/// A request with these headers, on a connection of its own.
fn ask_with(
    gateway: &Gateway,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Answer {
    let mut client = gateway.client();
    client.request(method, path, headers, body.as_bytes());
    client.answer()
}

#[test]
fn the_list_of_models_has_every_name_with_the_engines_own_card_though_a_replica_is_down() {
    let fleet = fleet();
    let list = fleet.gateway.get("/v1/models").json();
    assert_eq!(list["object"], "list");
    let names: Vec<&str> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|card| card["id"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["fake", "org/second:7b", "nick", "default", "down"]);
    let card = &list["data"][0];
    assert_eq!(card["object"], "model");
    // What vLLM says of it, to the last unknown field.
    assert!(
        card["max_model_len"].is_number() && card["permission"][0]["id"].is_string(),
        "{card}"
    );
    assert_eq!(card["replicas_ready"], 1);
    assert_eq!(list["data"][4]["replicas_ready"], 0);
    assert_eq!(list["data"][2]["alias_of"], "org/second:7b");
    for (path, id) in [
        ("/v1/models/fake", "fake"),
        ("/v1/models/org/second:7b", "org/second:7b"),
        ("/v1/models/org%2Fsecond%3A7b", "org/second:7b"),
        ("/v1/models/nick", "nick"),
        ("/v1/models/down", "down"),
    ] {
        let answer = fleet.gateway.get(path);
        assert_eq!(
            (answer.status(), &answer.json()["id"]),
            (200, &json!(id)),
            "{path}"
        );
    }
    let answer = fleet.gateway.get("/v1/models/none");
    assert_eq!(
        (answer.status(), answer.code()),
        (404, "model_not_found".to_owned())
    );
}

#[test]
fn an_alias_reaches_the_engine_as_its_own_name_and_comes_back_as_the_clients() {
    let fleet = fleet();
    for (name, fake) in [
        ("org/second:7b", "{}"),
        ("nick", "{}"),
        ("nick", r#"{"split":7}"#),
        ("nick", r#"{"merge":5}"#),
        ("nick", r#"{"crlf":true,"split":50}"#),
    ] {
        for ask in ask::all() {
            let body = ask
                .body
                .replace("\"fake\"", &format!("\"{name}\""))
                .replace("\nfake\r", &format!("\n{name}\r"));
            let headers = [("content-type", ask.content_type), ("x-fake", fake)];
            let answer = ask_with(&fleet.gateway, "POST", ask.path, &headers, &body);
            let text = answer.text();
            assert_eq!(
                (answer.status(), answer.end),
                (200, End::Complete),
                "{ask}: {text}"
            );
            assert!(text.contains(name), "{ask}: {text}");
            let echoes_the_form = ask.path == "/v1/audio/transcriptions";
            assert!(
                echoes_the_form || !text.contains("/models/second"),
                "{ask}: {text}"
            );
            let seen = fleet.second.state().newest(ask.path).unwrap().clone();
            assert_eq!(seen.model.as_deref(), Some("/models/second"), "{ask}");
            // Nothing else of the body moved.
            assert_eq!(
                seen.body.unwrap(),
                body.replace(name, "/models/second"),
                "{ask}"
            );
        }
    }
    assert_eq!(fleet.first.state().total, 0);
}

#[test]
fn a_name_written_with_escapes_is_the_same_name() {
    let fleet = fleet();
    let body =
        r#"{"messages":[{"role":"user","content":"\"model\":\"fake\""}],"model":"ni\u0063k"}"#;
    let answer = fleet.gateway.post("/v1/chat/completions", body, "");
    assert_eq!(
        (answer.status(), &answer.json()["model"]),
        (200, &json!("nick"))
    );
    let seen = fleet
        .second
        .state()
        .newest("/v1/chat/completions")
        .unwrap()
        .body
        .clone()
        .unwrap();
    assert_eq!(seen, body.replace(r"ni\u0063k", "/models/second"));
}

#[test]
fn requests_that_cannot_be_placed_are_refused_with_what_is_wrong() {
    let fleet = fleet();
    let messages = r#""messages":[{"role":"user","content":"hi"}]"#;
    let with = |model: &str| format!("{{{model}{messages}}}");
    for (path, body, status, code) in [
        (
            "/v1/chat/completions",
            with(r#""model":"nobody","#),
            404,
            "model_not_found",
        ),
        ("/v1/chat/completions", with(""), 400, "missing_model"),
        (
            "/v1/completions",
            r#"{"prompt":"x"}"#.to_owned(),
            400,
            "missing_model",
        ),
        (
            "/v1/embeddings",
            r#"{"input":"x"}"#.to_owned(),
            400,
            "missing_model",
        ),
        (
            "/v1/chat/completions",
            with(r#""model":"fake","model":"nick","#),
            400,
            "invalid_json",
        ),
        (
            "/v1/chat/completions",
            with(r#""model":"fake","mod\u0065l":"nick","#),
            400,
            "invalid_json",
        ),
        (
            "/v1/chat/completions",
            with(r#""model":7,"#),
            400,
            "invalid_json",
        ),
        ("/v1/chat/completions", String::new(), 400, "invalid_json"),
        ("/v1/chat/completions", "[]".to_owned(), 400, "invalid_json"),
        (
            "/v1/chat/completions",
            with(r#""model":"fake","#)[..40].to_owned(),
            400,
            "invalid_json",
        ),
        (
            "/v1/chat/completions",
            with(r#""model":"fake","#) + "x",
            400,
            "invalid_json",
        ),
        (
            "/v1/chat/completions",
            with(r#""model":"fake","n":01,"#),
            400,
            "invalid_json",
        ),
        (
            "/chat/completions",
            with(r#""model":"fake","#),
            404,
            "unknown_route",
        ),
        ("/", String::new(), 404, "unknown_route"),
        ("/metrics", String::new(), 404, "unknown_route"),
    ] {
        let answer = fleet.gateway.post(path, &body, "");
        assert_eq!(
            (answer.status(), answer.code().as_str()),
            (status, code),
            "{path} {body}: {}",
            answer.text()
        );
        let error = &answer.json()["error"];
        assert!(
            error["message"].is_string()
                && error["type"].is_string()
                && error.get("param").is_some()
        );
        assert!(answer.header("x-request-id").is_some());
    }
    let anthropic = fleet
        .gateway
        .post("/v1/messages", &with(r#""model":"nobody","#), "");
    assert_eq!(
        (anthropic.status(), &anthropic.json()["type"]),
        (404, &json!("error"))
    );
    assert!(
        anthropic.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("`nobody`")
    );
    assert_eq!(fleet.first.state().total + fleet.second.state().total, 0);
}

#[test]
fn a_route_without_a_model_takes_the_header_or_the_only_model() {
    let fleet = fleet();
    let answer = fleet.gateway.get("/v1/responses/resp_1");
    assert_eq!(
        (answer.status(), answer.code()),
        (400, "missing_model".to_owned())
    );
    let headers = [("x-llmgw-model", "nick")];
    // The fake engine has no such route; what it says comes through.
    let answer = ask_with(
        &fleet.gateway,
        "GET",
        "/v1/responses/resp_1?a=b%20c",
        &headers,
        "",
    );
    assert_eq!(answer.status(), 404);
    let seen = fleet.second.state().last.pop().unwrap();
    assert_eq!(
        (seen.method.as_str(), seen.path.as_str()),
        ("GET", "/v1/responses/resp_1?a=b%20c")
    );
    assert_eq!(seen.header("x-llmgw-model"), None);
    let alone = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&alone]);
    for (method, path) in [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/files/f"),
        ("PUT", "/v1/echo/x?y"),
        ("PATCH", "/v1/echo"),
    ] {
        gateway_passes(&gateway, &alone, method, path);
    }
}

fn gateway_passes(gateway: &Gateway, engine: &Running, method: &str, path: &str) {
    ask_with(gateway, method, path, &[], "");
    let seen = engine.state().last.pop().unwrap();
    assert_eq!((seen.method.as_str(), seen.path.as_str()), (method, path));
}

#[test]
fn a_body_over_the_limit_is_413_whether_its_length_was_announced_or_not() {
    let fleet = fleet();
    let prompt = "x".repeat(70_000);
    let body = format!(r#"{{"model":"fake","prompt":"{prompt}"}}"#);
    // The client need not have sent it: the length is enough.
    let mut client = fleet.gateway.client();
    client.send(b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 70000\r\n\r\n");
    let announced = client.answer();
    let mut client = fleet.gateway.client();
    client.send(b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n");
    client.send(format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len()).as_bytes());
    let chunked = client.answer();
    for answer in [
        announced,
        chunked,
        fleet.gateway.post("/v1/completions", &body, ""),
        // More than the kernel holds for either side: it writes on until it is read to its end.
        fleet.gateway.post("/v1/completions", &body.repeat(500), ""),
    ] {
        assert_eq!(
            (answer.status(), answer.code()),
            (413, "body_too_large".to_owned())
        );
        assert!(
            answer.json()["error"]["message"]
                .as_str()
                .unwrap()
                .contains("65536")
        );
    }
    assert_eq!(fleet.first.state().total, 0);
}

#[test]
fn what_is_refused_unread_is_read_to_its_end_so_that_the_client_sees_why() {
    let fleet = fleet();
    let body = vec![b'x'; 32 << 20];
    for (method, path, status) in [
        ("POST", "/nowhere", 404),
        ("POST", "/v1/completions", 413),
        ("GET", "/v1/models", 200),
    ] {
        let mut client = fleet.gateway.client();
        for _ in 0..2 {
            client.request(method, path, &[], &body);
            assert_eq!(client.answer().status(), status, "{path}");
        }
    }
}

#[test]
fn more_idle_clients_than_there_is_room_for_keep_nobody_else_from_working() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Setup::new()
        .open_files(512)
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .start();
    gateway.ready("fake", 1);
    let mut early = gateway.client();
    let mut asks = || {
        early.post("/v1/chat/completions", &chat(false), "");
        assert_eq!(early.answer().status(), 200);
    };
    asks();
    let idle: Vec<TcpStream> = (0..400)
        .map(|_| TcpStream::connect(gateway.addr).unwrap())
        .collect();
    gateway.until("somebody waits", || {
        gateway.metric("llmgw_client_connections_waited_total", "") > 0.0
    });
    assert_eq!(gateway.metric("llmgw_client_connections_max", ""), 192.0);
    gateway.await_log("`listen` is full: 192 clients are connected");
    asks();
    drop(idle);
    let late = gateway.post("/v1/chat/completions", &chat(false), "");
    assert_eq!(late.status(), 200);
    let log = gateway.log();
    assert!(!log.contains("could not be accepted"), "{log}");
}

#[test]
fn a_client_that_waits_to_be_asked_for_its_body_is_asked() {
    let fleet = fleet();
    let body = chat(false);
    let mut client = fleet.gateway.client();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.send(head.as_bytes());
    assert_eq!(client.head().status, 100);
    client.send(body.as_bytes());
    assert_eq!(client.answer().status(), 200);
}

#[test]
fn forms_are_read_for_their_model_and_refused_when_it_is_ambiguous() {
    let fleet = fleet();
    let send = |body: &str, content_type: &str| {
        ask_with(
            &fleet.gateway,
            "POST",
            "/v1/audio/transcriptions",
            &[("content-type", content_type)],
            body,
        )
    };
    let form = transcription("nick");
    assert_eq!(send(&form.body, form.content_type).status(), 200);
    let field = "--Xy7\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nfake\r\n";
    let twice = form
        .body
        .replacen("--Xy7\r\n", &format!("{field}--Xy7\r\n"), 1);
    let unfinished = form.body.replace("--Xy7--", "");
    for (body, content_type, code) in [
        (twice.as_str(), form.content_type, "invalid_json"),
        (&unfinished, form.content_type, "invalid_json"),
        (&form.body, "multipart/form-data", "invalid_json"),
        (
            &transcription("nobody").body,
            form.content_type,
            "model_not_found",
        ),
    ] {
        let answer = send(body, content_type);
        assert_eq!(answer.code(), code, "{}", answer.text());
    }
    assert_eq!(
        (fleet.first.state().total, fleet.second.state().total),
        (0, 1)
    );
}

#[test]
fn a_request_id_is_the_clients_own_or_a_new_one_and_the_engine_gets_the_same() {
    let fleet = fleet();
    let long = "x".repeat(129);
    for (own, kept) in [("abc-123", true), (long.as_str(), false), ("", false)] {
        let headers = [("x-request-id", own)];
        for (body, engine_sees) in [
            (chat(false), true),
            (chat(true), true),
            ("{".to_owned(), false),
        ] {
            let answer = ask_with(
                &fleet.gateway,
                "POST",
                "/v1/chat/completions",
                &headers,
                &body,
            );
            let id = answer.header("x-request-id").unwrap().to_owned();
            assert_eq!(id == own, kept, "{own}: {id}");
            assert!(!id.is_empty() && id.len() <= 128);
            let of_name = answer
                .head
                .headers
                .iter()
                .filter(|(name, _)| name == "x-request-id");
            assert_eq!(of_name.count(), 1);
            if engine_sees {
                let seen = fleet.first.state().last.pop().unwrap();
                assert_eq!(seen.header("x-request-id"), Some(&*id));
                fleet.gateway.await_log(&format!("request_id={id}"));
            }
        }
    }
}

#[test]
fn the_debug_header_tells_what_the_gateway_did_and_nothing_does_without_it() {
    let fleet = fleet();
    for stream in [false, true] {
        let path = "/v1/chat/completions";
        let told = ask_with(
            &fleet.gateway,
            "POST",
            path,
            &[("x-llmgw-debug", "1")],
            &chat(stream),
        );
        assert_eq!(
            told.header("x-llmgw-replica"),
            Some(&*fleet.first.addr().to_string())
        );
        assert_eq!(told.header("x-llmgw-band"), Some("standard"));
        assert!(
            told.header("x-llmgw-queue-ms")
                .unwrap()
                .parse::<f64>()
                .is_ok()
        );
        assert!(
            told.header("x-llmgw-policy-generation")
                .unwrap()
                .parse::<u64>()
                .is_ok()
        );
        let untold = ask_with(
            &fleet.gateway,
            "POST",
            path,
            &[("x-llmgw-debug", "0")],
            &chat(stream),
        );
        assert!(
            untold
                .head
                .headers
                .iter()
                .all(|(name, _)| !name.starts_with("x-llmgw")),
            "{:?}",
            untold.head
        );
    }
}

// === HTTP/2, TLS ===

/// One chat over an HTTP/2 connection, streamed and not.
async fn chat_over_h2<S>(io: S)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(io))
            .await
            .unwrap();
    tokio::spawn(connection);
    let request = |stream, fake: &str| {
        http::Request::post("http://gateway/v1/chat/completions")
            .header("x-fake", fake)
            .header("x-request-id", "over-h2")
            .body(Full::<Bytes>::from(chat(stream)))
            .unwrap()
    };
    for stream in [false, true] {
        let response = sender.send_request(request(stream, "{}")).await.unwrap();
        assert_eq!(
            (response.status(), &response.headers()["x-request-id"]),
            (
                200.try_into().unwrap(),
                &"over-h2".parse::<http::HeaderValue>().unwrap()
            )
        );
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(body.to_vec()).unwrap();
        assert_eq!(stream, text.trim_end().ends_with("[DONE]"), "{text}");
    }
    // A stream that dies is reset after its error event, not ended.
    let response = sender
        .send_request(request(true, r#"{"die_after":2}"#))
        .await
        .unwrap();
    let mut body = response.into_body();
    let mut text = String::new();
    let error = loop {
        match body.frame().await {
            Some(Ok(frame)) => {
                text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap())
            }
            Some(Err(error)) => break error,
            None => panic!("a clean end after {text}"),
        }
    };
    assert!(text.contains("upstream_failed"), "{text}, {error}");
}

#[test]
fn http2_is_spoken_with_prior_knowledge() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        chat_over_h2(tokio::net::TcpStream::connect(gateway.addr).await.unwrap()).await;
    });
    gateway.counters_are_zero();
}

#[test]
fn tls_offers_both_versions_of_http_and_the_client_chooses() {
    let certified = rcgen::generate_simple_self_signed(vec!["gateway.test".to_owned()]).unwrap();
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Setup::new()
        .top("listen: {listen: 127.0.0.1:0, tls: {cert: cert.pem, key: key.pem}}")
        .file("cert.pem", &certified.cert.pem())
        .file("key.pem", &certified.signing_key.serialize_pem())
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .start();
    gateway.ready("fake", 1);
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certified.cert.der().clone()).unwrap();
    let config = |alpn: &[&[u8]]| {
        let mut config = rustls::ClientConfig::builder()
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        Arc::new(config)
    };
    let name = ServerName::try_from("gateway.test").unwrap();
    for alpn in [&[b"http/1.1".as_slice()][..], &[]] {
        let socket = TcpStream::connect(gateway.addr).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let session = rustls::ClientConnection::new(config(alpn), name.clone()).unwrap();
        let mut client = Client::over(rustls::StreamOwned::new(session, socket));
        for stream in [true, false] {
            client.post("/v1/chat/completions", &chat(stream), "");
            let answer = client.answer();
            assert_eq!((answer.status(), answer.end), (200, End::Complete));
        }
        // A client over TLS that leaves is noticed as well.
        client.post(
            "/v1/chat/completions",
            &chat(true),
            r#"{"die_after":2,"how":"stall"}"#,
        );
        client.head();
        client.body_until("t1");
        drop(client);
        engine
            .wait(harness::CANCEL_MAX, |state| state.open == 0)
            .unwrap();
    }
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let socket = tokio::net::TcpStream::connect(gateway.addr).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(config(&[b"h2", b"http/1.1"]));
        let stream = connector.connect(name, socket).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        chat_over_h2(stream).await;
    });
    gateway.counters_are_zero();
}

// === Keys ===

/// The hash of an API key, as the configuration has it.
fn key_hash(key: &str) -> String {
    let mut text = String::from("sha256:");
    for byte in Sha256::digest(key.as_bytes()) {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Two tenants: `all` may use everything, `some` only what begins with `fa`.
fn with_tenants(engine: &Running, more: &str) -> Gateway {
    let (all, some) = (key_hash("key-all"), key_hash("key-some"));
    let gateway = Setup::new()
        .top(&format!(
            "tenants:\n  - {{name: all, keys: [\"{all}\"], models: [\"*\"]}}\n  - {{name: some, keys: [\"{some}\"], models: [\"fa*\"]}}"
        ))
        .model("fake", "")
        .endpoint("vllm", &engine.url(), more)
        .model("other", "aliases: [false-friend]")
        .endpoint("vllm", &engine.url(), &format!("serves: fake, {more}"))
        .start();
    gateway.ready("fake", 1);
    gateway.ready("other", 1);
    gateway
}

#[test]
fn a_key_is_needed_where_tenants_are_configured_and_names_what_it_may_use() {
    let engine = start(Options {
        api_key: Some("engine-key".to_owned()),
        ..Options::new(Kind::Vllm)
    })
    .unwrap();
    let gateway = with_tenants(&engine, "api_key: engine-key");
    let path = "/v1/chat/completions";
    let send = |headers: &[(&str, &str)], model: &str| {
        ask_with(
            &gateway,
            "POST",
            path,
            headers,
            &chat(false).replace("fake", model),
        )
    };
    for headers in [
        &[][..],
        &[("authorization", "Bearer wrong")],
        &[("authorization", "Bearer engine-key")],
        &[("authorization", "Basic key-all")],
        &[("x-api-key", "key")],
    ] {
        let answer = send(headers, "fake");
        assert_eq!(
            (answer.status(), answer.code()),
            (401, "invalid_api_key".to_owned()),
            "{headers:?}"
        );
        assert_eq!(
            ask_with(&gateway, "GET", "/v1/models", headers, "").status(),
            401
        );
    }
    assert_eq!(engine.state().total, 0);
    for headers in [
        [("authorization", "Bearer key-some")],
        [("x-api-key", "key-some")],
    ] {
        let answer = send(&headers, "fake");
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let seen = engine.state().newest(path).unwrap().clone();
        assert_eq!(seen.header("authorization"), Some("Bearer engine-key"));
        assert_eq!(seen.header("x-api-key"), None);
        // An alias is no way around, though its own text would match.
        for model in ["other", "false-friend", "nobody"] {
            let answer = send(&headers, model);
            assert_eq!(
                (answer.status(), answer.code()),
                (404, "model_not_found".to_owned()),
                "{model}"
            );
            let message = answer.json()["error"]["message"]
                .as_str()
                .unwrap()
                .to_owned();
            assert!(message.ends_with("there are: `fake`"), "{message}");
        }
        let list = ask_with(&gateway, "GET", "/v1/models", &headers, "").json();
        assert_eq!(list["data"].as_array().unwrap().len(), 1, "{list}");
    }
    assert_eq!(
        send(&[("authorization", "Bearer key-all")], "false-friend").status(),
        200
    );
    assert_eq!(
        send(&[("authorization", "bearer key-all")], "other").status(),
        200
    );
}
