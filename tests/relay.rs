//! What flows through: each event when it comes, no more of it than a slow reader takes, and every byte as it was sent.

mod harness;

use std::io::Read;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fake_engine::{Kind, Options, Running, start};
use harness::ask::{self, Ask};
use harness::{Answer, CANCEL_MAX, Client, End, Gateway, PATIENCE, Setup, chat};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};

/// How much the gateway may grow for streams that nobody reads.
const GROWTH_MAX_KIB: u64 = 16 * 1024;
/// How long one request may take beside streams that take all they can get.
const BESIDE_A_FLOOD_MAX: Duration = Duration::from_secs(20);

fn one(kind: Kind, engine_name: &str) -> (Running, Gateway) {
    let engine = start(Options::new(kind)).unwrap();
    let gateway = Gateway::over(engine_name, &[&engine]);
    (engine, gateway)
}

/// Reads a stream up to the token that its engine stopped at.
fn arrives(gateway: &Gateway, ask: &Ask, fake: &Value, last: &str) {
    let mut client = gateway.client();
    ask.send(&mut client, &fake.to_string());
    let head = client.head();
    assert_eq!(head.status, 200, "{ask} {fake}");
    client.body_until(last);
    assert!(
        client.is_silent(Duration::from_millis(20)),
        "{ask}: more than the engine sent"
    );
}

#[test]
fn every_event_arrives_while_the_engine_holds_back_the_next() {
    for (name, kind) in [
        ("vllm", Kind::Vllm),
        ("sglang", Kind::Sglang),
        ("llamacpp", Kind::Llamacpp),
    ] {
        let (_engine, gateway) = one(kind, name);
        for ask in ask::streams() {
            for tokens in 1..=3 {
                let fake = json!({"die_after": tokens, "how": "stall"});
                arrives(&gateway, &ask, &fake, &format!("t{}", tokens - 1));
            }
            arrives(
                &gateway,
                &ask,
                &json!({"die_after": 2, "how": "stall", "split": 5}),
                "t1",
            );
        }
    }
}

#[test]
fn tracing_at_its_most_talkative_does_not_hold_an_event_back() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Setup::new()
        .top("log: {format: json, level: trace}")
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .start();
    gateway.ready("fake", 1);
    for ask in ask::streams() {
        arrives(
            &gateway,
            &ask,
            &json!({"die_after": 2, "how": "stall"}),
            "t1",
        );
    }
}

#[test]
fn bytes_that_are_no_events_are_not_held_back_either() {
    let (_engine, gateway) = one(Kind::Vllm, "vllm");
    let headers = json!({"Content-Type": "audio/mpeg"});
    for ask in ask::streams() {
        let fake = json!({"die_after": 2, "how": "stall", "headers": headers});
        arrives(&gateway, &ask, &fake, "t1");
    }
}

#[test]
fn an_event_is_there_before_the_engine_generates_the_next() {
    let (engine, gateway) = one(Kind::Vllm, "vllm");
    let mut client = gateway.client();
    // It generates no more than so many until the last of them is there.
    let hold_after = |tokens| engine.behave(&format!(r#"{{"hold_after":{tokens}}}"#));
    hold_after(1);
    client.post("/v1/chat/completions", &chat(true), r#"{"tokens":5}"#);
    client.head();
    for token in 0..5 {
        hold_after(token + 1);
        client.body_until(&format!("t{token}"));
    }
    assert_eq!(client.rest().1, End::Complete);
}

#[test]
fn each_event_is_a_chunk_of_its_own() {
    let (_engine, gateway) = one(Kind::Vllm, "vllm");
    let mut client = gateway.client();
    client.post(
        "/v1/chat/completions",
        &chat(true),
        r#"{"tokens":6,"token_ms":40}"#,
    );
    client.head();
    let mut chunks = Vec::new();
    while let Ok(chunk) = client.piece() {
        chunks.push(String::from_utf8(chunk).unwrap());
    }
    // Role, six tokens, [DONE]; the last token and [DONE] come together.
    assert!(chunks.len() >= 6, "{chunks:#?}");
    assert!(
        chunks.iter().all(|chunk| chunk.ends_with("\n\n")),
        "{chunks:#?}"
    );
}

#[test]
fn streams_that_take_all_they_can_get_do_not_starve_the_others() {
    let engine = start(Options {
        threads: 2,
        ..Options::new(Kind::Vllm)
    })
    .unwrap();
    let quiet = start(Options::new(Kind::Vllm).model("quiet")).unwrap();
    let gateway = Setup::new()
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .model("quiet", "")
        .endpoint("vllm", &quiet.url(), "")
        .start();
    gateway.ready("fake", 1);
    gateway.ready("quiet", 1);
    let mut floods: Vec<Client> = (0..6)
        .map(|_| {
            let mut client = gateway.client();
            client.post("/v1/chat/completions", &chat(true), r#"{"flood":true}"#);
            assert_eq!(client.head().status, 200);
            client
        })
        .collect();
    std::thread::scope(|scope| {
        let stops: Vec<_> = floods
            .iter()
            .map(|client| client.stream.try_clone().unwrap())
            .collect();
        for client in &mut floods {
            scope.spawn(move || {
                let mut bytes = [0; 16 * 1024];
                while client.stream.read(&mut bytes).is_ok_and(|count| count > 0) {}
            });
        }
        engine.wait(PATIENCE, |state| state.tokens > 5_000).unwrap();
        let body = chat(true).replace("fake", "quiet");
        for _ in 0..20 {
            let before = Instant::now();
            let answer = gateway.post("/v1/chat/completions", &body, "");
            assert_eq!((answer.status(), answer.end), (200, End::Complete));
            let took = before.elapsed();
            assert!(
                took < BESIDE_A_FLOOD_MAX,
                "{took:?} beside {} tokens",
                engine.state().tokens
            );
        }
        assert_eq!(gateway.admin_get("/healthz").status(), 200);
        for stream in stops {
            stream.shutdown(std::net::Shutdown::Both).unwrap();
        }
    });
    drop(floods);
    engine.wait(PATIENCE, |state| state.open == 0).unwrap();
    gateway.counters_are_zero();
}

/// Waits until an engine sends no more; how many tokens it has sent.
fn stuck_at(engine: &Running) -> u64 {
    let (mut tokens, mut since) = (engine.state().tokens, Instant::now());
    let deadline = Instant::now() + PATIENCE;
    while since.elapsed() < Duration::from_secs(3) {
        assert!(Instant::now() < deadline, "the engine sends on: {tokens}");
        std::thread::sleep(Duration::from_millis(10));
        let now = engine.state().tokens;
        if now != tokens {
            (tokens, since) = (now, Instant::now());
        }
    }
    tokens
}

#[test]
fn a_reader_that_stops_stops_the_engine_and_costs_the_gateway_little_memory() {
    const STREAM_BYTES: u64 = 200 << 20;
    const EVENT_BYTES: u64 = 16 << 10;
    for content_type in ["text/event-stream", "application/octet-stream"] {
        let (engine, gateway) = one(Kind::Vllm, "vllm");
        for ask in ask::streams() {
            arrives(
                &gateway,
                &ask,
                &json!({"die_after": 2, "how": "stall"}),
                "t1",
            );
        }
        engine.wait(PATIENCE, |state| state.open == 0).unwrap();
        engine.reset();
        let before = gateway.rss_kib();
        let fake = json!({"total_bytes": STREAM_BYTES, "chunk_bytes": EVENT_BYTES, "headers": {"Content-Type": content_type}});
        let mut unread: Vec<Client> = (0..3)
            .map(|_| {
                let mut client = gateway.client();
                client.post("/v1/chat/completions", &chat(true), &fake.to_string());
                client.stream.read_exact(&mut [0; 1024]).unwrap();
                client
            })
            .collect();
        let tokens = stuck_at(&engine);
        let grown = gateway.rss_kib().saturating_sub(before);
        assert!(
            grown < GROWTH_MAX_KIB,
            "{content_type}: {grown} KiB for three streams that nobody reads"
        );
        let sent = tokens * EVENT_BYTES;
        assert!(
            sent < 3 * STREAM_BYTES / 4,
            "the engine sent {sent} bytes to nobody"
        );
        // Read on, and it goes on; leave, and it stops.
        let mut rest = vec![0; 64 << 20];
        unread[0].stream.read_exact(&mut rest).unwrap();
        assert!(engine.state().tokens > tokens);
        drop(unread);
        let state = engine.wait(CANCEL_MAX, |state| state.open == 0).unwrap();
        assert_eq!(state.cancelled, 3);
        gateway.counters_are_zero();
    }
}

#[test]
fn a_reader_of_http2_that_stops_stops_the_engine_too() {
    let (engine, gateway) = one(Kind::Vllm, "vllm");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(gateway.addr).await.unwrap();
        let io = TokioIo::new(stream);
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), io)
                .await
                .unwrap();
        tokio::spawn(connection);
        let before = gateway.rss_kib();
        let request = http::Request::post("http://gateway/v1/chat/completions")
            .header("x-fake", r#"{"total_bytes":209715200,"chunk_bytes":16384}"#)
            .body(Full::<Bytes>::from(chat(true)))
            .unwrap();
        let mut body = sender.send_request(request).await.unwrap();
        body.frame().await.unwrap().unwrap();
        let tokens = tokio::task::block_in_place(|| stuck_at(&engine));
        let grown = gateway.rss_kib().saturating_sub(before);
        assert!(
            grown < GROWTH_MAX_KIB,
            "{grown} KiB for a stream that nobody reads"
        );
        assert!(tokens * 16384 < 150 << 20);
        drop(body);
        engine
            .until(CANCEL_MAX, |state| state.open == 0)
            .await
            .unwrap();
    });
}

#[test]
fn an_engine_that_failed_is_let_go_though_its_client_reads_nothing_of_that() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let setup = Setup::new()
        .limit("idle_timeout", "500ms")
        .model("fake", "");
    let gateway = setup.endpoint("vllm", &engine.url(), "").start();
    gateway.ready("fake", 1);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(gateway.addr).await.unwrap();
        // Less than the first event takes, so none of the error event leaves.
        let (mut sender, connection) =
            hyper::client::conn::http2::Builder::new(TokioExecutor::new())
                .initial_stream_window_size(16)
                .handshake(TokioIo::new(stream))
                .await
                .unwrap();
        tokio::spawn(connection);
        let request = http::Request::post("http://gateway/v1/completions")
            .header("x-fake", r#"{"die_after":1,"how":"stall"}"#)
            .body(Full::<Bytes>::from(
                r#"{"model":"fake","stream":true,"prompt":"hello"}"#,
            ))
            .unwrap();
        let unread = sender.send_request(request).await.unwrap();
        assert_eq!(unread.status(), 200);
        let gone = engine.until(PATIENCE, |state| state.open == 0).await;
        assert!(gone.is_ok(), "the engine is still held");
        drop(unread);
    });
}

#[test]
fn four_hundred_streams_run_side_by_side() {
    const STREAMS: u64 = 400;
    // Both ends of each are in this process.
    let (_, hard) =
        nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let engine = start(Options {
        slots: 1_024,
        ..Options::new(Kind::Vllm)
    })
    .unwrap();
    let setup = Setup::new().model("fake", "");
    let gateway = setup.endpoint("vllm", &engine.url(), "slots: 1024").start();
    gateway.ready("fake", 1);
    let mut clients: Vec<Client> = (0..STREAMS)
        .map(|_| {
            let mut client = gateway.client();
            client.post(
                "/v1/chat/completions",
                &chat(true),
                r#"{"die_after":2,"how":"stall"}"#,
            );
            client
        })
        .collect();
    for client in &mut clients {
        assert_eq!(client.head().status, 200);
        client.body_until("t1");
    }
    assert_eq!(engine.state().open_streams, STREAMS);
    drop(clients);
    engine.wait(PATIENCE, |state| state.open == 0).unwrap();
    gateway.counters_are_zero();
}

#[test]
fn no_proxy_on_the_way_is_allowed_to_hold_a_stream_back() {
    for (name, kind) in [("vllm", Kind::Vllm), ("llamacpp", Kind::Llamacpp)] {
        let (_engine, gateway) = one(kind, name);
        for ask in ask::all().iter().filter(|ask| !ask.end_mark.is_empty()) {
            let mut client = gateway.client();
            ask.send(&mut client, "{}");
            let answer = client.answer();
            let (no, no_cache) = (Some("no"), Some("no-cache"));
            let (buffering, cache) = (
                answer.header("x-accel-buffering"),
                answer.header("cache-control"),
            );
            if ask.stream {
                assert_eq!((buffering, cache), (no, no_cache), "{ask}");
                assert_eq!(answer.header("content-length"), None, "{ask}");
                assert!(
                    answer
                        .header("content-type")
                        .unwrap()
                        .starts_with("text/event-stream")
                );
            } else {
                assert_eq!((buffering, cache), (None, None), "{name} {ask}");
                let length = answer.body.len().to_string();
                assert_eq!(answer.header("content-length"), Some(&*length), "{ask}");
                assert!(
                    answer
                        .header("content-type")
                        .unwrap()
                        .starts_with("application/json")
                );
            }
        }
    }
}

/// The same request to the engine itself and through the gateway, until both were answered in the same second, which
/// is in the answer.
fn direct_and_through(
    engine: &Running,
    gateway: &Gateway,
    ask: &Ask,
    headers: &[(&str, &str)],
) -> (Answer, Answer) {
    let headers = [
        headers,
        &[("content-type", ask.content_type), ("x-request-id", "same")],
    ]
    .concat();
    let send = |addr| {
        let mut client = Client::new(addr);
        client.request("POST", ask.path, &headers, ask.body.as_bytes());
        client.answer()
    };
    loop {
        let (before, through, after) =
            (send(engine.addr()), send(gateway.addr), send(engine.addr()));
        if before.body == after.body {
            return (before, through);
        }
    }
}

#[test]
fn an_answer_passes_byte_for_byte_on_every_endpoint() {
    let (engine, gateway) = one(Kind::Vllm, "vllm");
    for ask in ask::all() {
        let (direct, through) = direct_and_through(&engine, &gateway, &ask, &[]);
        assert_eq!(
            (through.status(), through.end),
            (200, End::Complete),
            "{ask}"
        );
        assert_eq!(through.text(), direct.text(), "{ask}");
        assert_eq!(
            through.header("content-type"),
            direct.header("content-type"),
            "{ask}"
        );
    }
}

#[test]
fn a_compressed_answer_keeps_its_encoding_and_its_bytes() {
    let (engine, gateway) = one(Kind::Vllm, "vllm");
    let headers = [("accept-encoding", "gzip"), ("x-fake", r#"{"gzip":true}"#)];
    for ask in ask::all().iter().filter(|ask| !ask.stream).take(4) {
        let (direct, through) = direct_and_through(&engine, &gateway, ask, &headers);
        assert_eq!(through.header("content-encoding"), Some("gzip"), "{ask}");
        assert!(through.body.starts_with(&[0x1f, 0x8b]), "{ask}");
        assert_eq!(through.body, direct.body, "{ask}");
        let request = engine.state().newest(ask.path).unwrap().clone();
        assert_eq!(request.header("accept-encoding"), Some("gzip"), "{ask}");
    }
}

#[test]
fn a_request_passes_byte_for_byte_on_every_endpoint() {
    let (engine, gateway) = one(Kind::Vllm, "vllm");
    // What a float round trip, a re-ordering or a tidying up would change.
    let odd = "\t\"temperature\": 0.70,\r\n \"top_p\":1e-1, \"seed\" : 12345678901234567890,\"logit_bias\":{\"50256\":-100.0},\
               \"z\":null,\"unknown\":{\"b\":[1.10,\"\\u00e9\\/\"],\"a\":\"\u{65e5}\u{672c}\"} ,";
    for ask in ask::all()
        .iter()
        .filter(|ask| ask.content_type == "application/json")
    {
        let body = ask.body.replacen('{', &format!("  {{{odd}"), 1) + "\n ";
        let mut client = gateway.client();
        client.post(ask.path, &body, "");
        let answer = client.answer();
        assert_eq!(answer.status(), 200, "{ask}: {}", answer.text());
        let seen = engine.state().newest(ask.path).unwrap().clone();
        assert_eq!(seen.body.as_deref(), Some(&*body), "{ask}");
        let length = body.len().to_string();
        assert_eq!(seen.header("content-length"), Some(&*length), "{ask}");
    }
    let form = ask::transcription("fake");
    let mut client = gateway.client();
    form.send(&mut client, "{}");
    assert_eq!(client.answer().status(), 200);
    let seen = engine.state().newest(form.path).unwrap().clone();
    assert_eq!(seen.body.as_deref(), Some(&*form.body));
    assert_eq!(seen.header("content-type"), Some(form.content_type));
}

#[test]
fn a_body_of_several_megabytes_arrives_whole_in_whatever_pieces_it_was_sent() {
    let (_engine, gateway) = one(Kind::Vllm, "vllm");
    let text: String = (0..300_000).map(|n| format!("{n:09}|")).collect();
    let body = format!(r#"{{"model":"fake","text":"{text}"}}"#);
    let whole = gateway.post("/v1/echo", &body, "").json();
    assert_eq!(whole["body_bytes"], body.len());
    let mut client = gateway.client();
    client.send(b"POST /v1/echo HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n");
    for piece in body.as_bytes().chunks(77_777) {
        client.send(format!("{:x}\r\n", piece.len()).as_bytes());
        client.send(piece);
        client.send(b"\r\n");
    }
    client.send(b"0\r\n\r\n");
    let chunked = client.answer().json();
    assert_eq!(
        (&chunked["sha256"], &chunked["body_bytes"]),
        (&whole["sha256"], &whole["body_bytes"])
    );
}

#[test]
fn headers_of_one_connection_stay_on_it_and_all_others_go_on() {
    let (engine, gateway) = one(Kind::Vllm, "vllm");
    let ours = [
        ("connection", "keep-alive, x-client-hop"),
        ("x-client-hop", "1"),
        ("keep-alive", "timeout=9"),
        ("te", "trailers"),
        ("proxy-authorization", "Basic abc"),
        ("proxy-connection", "keep-alive"),
        ("upgrade", "websocket"),
        ("authorization", "Bearer of-the-client"),
        ("x-api-key", "of-the-client"),
        ("x-custom", "one"),
        ("x-custom", "two"),
        ("openai-organization", "org-1"),
        (
            "traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        ("user-agent", "curl/8"),
        ("accept", "*/*"),
        ("x-request-id", "mine"),
    ];
    for ask in ask::all() {
        let fake = r#"{"hop_headers":true,"headers":{"x-engine":"e1","set-cookie":"a=b"}}"#;
        let mut client = gateway.client();
        let headers = [
            &ours[..],
            &[("content-type", ask.content_type), ("x-fake", fake)],
        ]
        .concat();
        client.request("POST", ask.path, &headers, ask.body.as_bytes());
        let answer = client.answer();
        assert_eq!(answer.status(), 200, "{ask}: {}", answer.text());
        for gone in ["x-secret-hop", "keep-alive", "proxy-authenticate"] {
            assert_eq!(answer.header(gone), None, "{ask}: {gone}");
        }
        if ask.path != "/v1/embeddings" {
            assert_eq!(answer.header("x-engine"), Some("e1"), "{ask}");
            assert_eq!(answer.header("set-cookie"), Some("a=b"), "{ask}");
        }
        let seen = engine.state().newest(ask.path).unwrap().clone();
        for (name, _) in &ours[..9] {
            if *name != "connection" {
                assert_eq!(seen.header(name), None, "{ask}: {name}");
            }
        }
        for (name, value) in &ours[9..] {
            let mut of_name = seen.headers.iter().filter(|(n, _)| n == name);
            assert!(
                of_name.any(|(_, v)| v == value),
                "{ask}: {name}: {value} is lost"
            );
        }
        assert_eq!(
            seen.header("host"),
            Some(&*engine.addr().to_string()),
            "{ask}"
        );
    }
}

#[test]
fn requests_one_after_the_other_share_one_connection_to_the_engine() {
    const REQUESTS: u64 = 40;
    let (engine, gateway) = one(Kind::Vllm, "vllm");
    engine.reset();
    for number in 0..REQUESTS {
        let answer = gateway.post("/v1/chat/completions", &chat(number % 2 == 0), "");
        assert_eq!((answer.status(), answer.end), (200, End::Complete));
    }
    let state = engine.state();
    assert_eq!(state.total, REQUESTS);
    let probes: u64 = state
        .by_path
        .iter()
        .filter(|(path, _)| path.starts_with("GET "))
        .map(|(_, count)| count)
        .sum();
    assert!(
        state.accepted_connections <= probes + 2,
        "{} connections, {probes} probes",
        state.accepted_connections
    );
}
