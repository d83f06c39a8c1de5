//! The end of a server: what is at work may finish, nothing new begins, and nothing waits for ever.

mod harness;
#[path = "harness/more.rs"]
mod more;

use std::net::TcpStream;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fake_engine::authority::Authority;
use fake_engine::{Kind, Running};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use nix::sys::signal::Signal;

use harness::{CANCEL_MAX, Client, End, Gateway, PATIENCE, Setup, chat};
use more::{await_records, begin_stream, chat_of, engine, finish_stream, record_of, signal};

const CHAT: &str = "/v1/chat/completions";
const FOREVER: &str = r#"{"token_ms":50,"tokens":100000}"#;
/// A drain that no test waits for: what ends before has not waited for it.
const AGES: &str = "10m";
/// Longer than connections have to close, once nothing is at work.
const CLOSED_BY: Duration = Duration::from_secs(7);

fn over(engine: &Running, drain_timeout: &str) -> Gateway {
    let setup = Setup::new()
        .top("log: {format: json}")
        .limit("drain_timeout", drain_timeout)
        .model("fake", "");
    let gateway = setup.endpoint("vllm", &engine.url(), "").start();
    gateway.ready("fake", 1);
    gateway
}

/// An engine whose streams have one token, and the others when they are let go.
fn holding() -> Running {
    engine(Kind::Vllm, r#"{"hold_after":1}"#)
}

fn let_go(engine: &Running) {
    engine.behave(r#"{"hold_after":null}"#);
}

fn refuses_connections(gateway: &Gateway) {
    gateway.until("no connection is accepted any more", || {
        TcpStream::connect(gateway.addr).is_err()
    });
}

#[test]
fn a_stream_finishes_after_sigterm_and_the_exit_status_is_zero() {
    let engine = holding();
    let mut gateway = over(&engine, AGES);
    assert_eq!(gateway.admin_get("/readyz").status(), 200);
    let stream = begin_stream(&gateway, &chat(true), "");
    gateway.terminate();
    refuses_connections(&gateway);
    let ready = gateway.admin_get("/readyz");
    assert_eq!(ready.status(), 503);
    assert!(ready.text().contains("shutting down"), "{}", ready.text());
    assert_eq!(gateway.admin_get("/healthz").status(), 200);
    let_go(&engine);
    finish_stream(stream);
    let status = gateway.exited(PATIENCE).expect("it ended");
    assert_eq!(status.code(), Some(0));
    let records = await_records(&gateway, 1);
    assert_eq!((records.len(), &records[0]["outcome"]), (1, &"ok".into()));
}

#[test]
fn nothing_at_work_means_an_end_at_once_though_clients_keep_connections_open() {
    let engine = engine(Kind::Vllm, "{}");
    let mut gateway = over(&engine, AGES);
    let mut idle = gateway.client();
    idle.post(CHAT, &chat(false), "");
    assert_eq!(idle.answer().status(), 200);
    let unused = Client::new(gateway.addr);
    gateway.terminate();
    let status = gateway.exited(PATIENCE).expect("it ended");
    assert_eq!(status.code(), Some(0));
    let log = gateway.log();
    assert!(!log.contains("connections were cut off"), "{log}");
    drop(unused);
}

#[test]
fn a_client_that_is_silent_before_its_tls_handshake_does_not_put_off_the_end() {
    let engine = engine(Kind::Vllm, "{}");
    let issued = Authority::new("test authority").server(&["127.0.0.1"]);
    let mut gateway = Setup::new()
        .top("listen: {listen: \"127.0.0.1:0\", tls: {cert: server.pem, key: server-key.pem}}")
        .file("server.pem", &issued.pem)
        .file("server-key.pem", &issued.key_pem)
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .start();
    let silent = TcpStream::connect(gateway.addr).unwrap();
    gateway.until("it is let in", || {
        gateway.metric("llmgw_client_connections", "") == 1.0
    });
    gateway.terminate();
    let status = gateway.exited(PATIENCE).expect("it ended");
    assert_eq!(status.code(), Some(0));
    let log = gateway.log();
    assert!(!log.contains("connections were cut off"), "{log}");
    drop(silent);
}

#[test]
fn a_request_on_a_connection_that_is_still_open_is_told_that_the_gateway_shuts_down() {
    let engine = holding();
    let mut gateway = over(&engine, AGES);
    let mut kept = gateway.client();
    kept.post(CHAT, &chat(false), r#"{"tokens":1}"#);
    assert_eq!(kept.answer().status(), 200);
    let stream = begin_stream(&gateway, &chat(true), "");
    gateway.terminate();
    refuses_connections(&gateway);
    kept.post(CHAT, &chat(false), "");
    let answer = kept.answer();
    assert_eq!((answer.status(), &*answer.code()), (503, "shutting_down"));
    assert!(answer.header("retry-after").is_some());
    assert_eq!(answer.header("connection"), Some("close"));
    let_go(&engine);
    finish_stream(stream);
    let status = gateway.exited(PATIENCE).expect("it ended");
    assert_eq!(status.code(), Some(0));
}

#[test]
fn an_answer_whose_client_does_not_read_yet_is_at_work_until_it_does() {
    let text = "x".repeat(1_000_000);
    let engine = engine(Kind::Vllm, &format!(r#"{{"tokens":1,"text":"{text}"}}"#));
    let mut gateway = over(&engine, AGES);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let answer = runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(gateway.addr).await.unwrap();
        // Room that does not depend on the kernel's buffers.
        let (mut sender, connection) =
            hyper::client::conn::http2::Builder::new(TokioExecutor::new())
                .initial_stream_window_size(16 * 1024)
                .handshake(TokioIo::new(stream))
                .await
                .unwrap();
        tokio::spawn(connection);
        let request = http::Request::post("http://gateway/v1/chat/completions")
            .body(Full::<Bytes>::from(chat(false)))
            .unwrap();
        sender.send_request(request).await.unwrap()
    });
    gateway.until("the engine is let go", || {
        gateway.replicas()[0]["inflight"] == 0
    });
    gateway.terminate();
    refuses_connections(&gateway);
    assert!(gateway.exited(CLOSED_BY).is_none());
    let read = runtime.block_on(answer.into_body().collect()).unwrap();
    let read = String::from_utf8(read.to_bytes().into()).unwrap();
    assert!(read.contains(&text), "{} bytes", read.len());
    assert_eq!(gateway.exited(PATIENCE).unwrap().code(), Some(0));
    let log = gateway.log();
    assert!(!log.contains("cut off"), "{log}");
}

/// Reads to the end of a stream that is cut; how it ended.
fn cut_off(mut stream: Client) -> End {
    loop {
        if let Err(end) = stream.piece() {
            return end;
        }
    }
}

#[test]
fn what_is_not_finished_within_the_drain_timeout_is_cut_off_and_recorded() {
    let engine = engine(Kind::Vllm, "{}");
    let mut gateway = over(&engine, "600ms");
    let stream = begin_stream(&gateway, &chat(true), FOREVER);
    let mut silent = gateway.client();
    silent.post(CHAT, &chat(false), r#"{"first_ms":60000}"#);
    gateway.until("both are at work", || {
        gateway.replicas()[0]["inflight"] == 2
    });
    let started = Instant::now();
    gateway.terminate();
    assert_ne!(cut_off(stream), End::Complete);
    assert!(silent.try_head().is_none());
    let status = gateway.exited(PATIENCE).expect("it ended");
    let took = started.elapsed();
    assert_eq!(status.code(), Some(0));
    assert!(took >= Duration::from_millis(600), "{took:?}");
    gateway.await_log("requests cut off");
    assert_eq!(await_records(&gateway, 2).len(), 2);
    let gone = engine.wait(CANCEL_MAX, |state| state.open == 0);
    assert!(gone.is_ok(), "the engine was let go");
}

#[test]
fn a_second_signal_cuts_off_at_once() {
    for second in [Signal::SIGTERM, Signal::SIGINT] {
        let engine = engine(Kind::Vllm, "{}");
        let mut gateway = over(&engine, AGES);
        let stream = begin_stream(&gateway, &chat(true), FOREVER);
        gateway.terminate();
        refuses_connections(&gateway);
        assert!(gateway.exited(Duration::ZERO).is_none());
        signal(&gateway, second);
        assert_ne!(cut_off(stream), End::Complete);
        let status = gateway.exited(PATIENCE).expect("it ended");
        assert_eq!(status.code(), Some(0));
        assert_eq!(await_records(&gateway, 1).len(), 1);
    }
}

#[test]
fn a_reload_during_the_shutdown_harms_nothing() {
    let engine = holding();
    let mut gateway = over(&engine, AGES);
    let stream = begin_stream(&gateway, &chat(true), "");
    gateway.terminate();
    refuses_connections(&gateway);
    signal(&gateway, Signal::SIGHUP);
    let_go(&engine);
    finish_stream(stream);
    assert_eq!(gateway.exited(PATIENCE).unwrap().code(), Some(0));
}

#[test]
fn a_request_that_waits_for_a_slot_is_served_within_the_drain() {
    let engine = engine(Kind::Llamacpp, r#"{"hold_after":1}"#);
    let setup = Setup::new().top("log: {format: json}").model("fake", "");
    let mut gateway = setup
        .endpoint("llamacpp", &engine.url(), "slots: 1")
        .start();
    gateway.ready("fake", 1);
    let holds = begin_stream(&gateway, &chat(true), "");
    let mut waits = gateway.client();
    waits.request(
        "POST",
        CHAT,
        &[
            ("content-type", "application/json"),
            ("x-request-id", "waits"),
        ],
        chat_of("fake", false).as_bytes(),
    );
    gateway.queued(1);
    gateway.terminate();
    let_go(&engine);
    finish_stream(holds);
    assert_eq!(waits.answer().status(), 200);
    assert_eq!(gateway.exited(PATIENCE).unwrap().code(), Some(0));
    let records = await_records(&gateway, 2);
    assert!(record_of(&records, "waits")["queue_ms"].as_f64().unwrap() > 1.0);
}
