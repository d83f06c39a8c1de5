//! A client that leaves stops its engine at once, on every endpoint, in every phase, however it leaves.

mod harness;

use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fake_engine::process::{Process, beside_this_test};
use fake_engine::{Kind, Options, Running, start};
use harness::ask::{self, Ask};
use harness::{CANCEL_MAX, Client, End, Gateway, PATIENCE, Setup, chat, data};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

/// How a client goes.
#[derive(Clone, Copy, Debug)]
enum Way {
    Close,
    /// It says that it will send no more: most clients that leave are seen like this.
    HalfClose,
    Reset,
    /// With a second request sent behind the first, so that its bytes are in the way of the connection's end.
    Pipelined,
}

const WAYS: [Way; 4] = [Way::Close, Way::HalfClose, Way::Reset, Way::Pipelined];

impl Way {
    /// Goes. A client that has closed one half stays, to keep the other open.
    fn go(self, client: Client) -> Option<Client> {
        match self {
            Way::Close | Way::Pipelined => None,
            Way::HalfClose => {
                client.half_close();
                Some(client)
            }
            Way::Reset => {
                client.reset();
                None
            }
        }
    }
}

/// What the engine is doing when the client goes.
struct Phase {
    name: &'static str,
    fake: &'static str,
    /// Waits until it is so.
    reached: fn(&mut Client, &Running),
}

const MID_STREAM: Phase = Phase {
    name: "silent in mid-stream",
    fake: r#"{"die_after":2,"how":"stall"}"#,
    reached: |client, _| {
        assert_eq!(client.head().status, 200);
        client.body_until("t1");
    },
};
const BEFORE_FIRST_BYTE: Phase = Phase {
    name: "silent before the first byte",
    fake: r#"{"first_ms":60000}"#,
    reached: |_, engine| {
        engine.wait(PATIENCE, |state| state.open == 1).unwrap();
    },
};
const AFTER_HEADERS: Phase = Phase {
    name: "silent after its headers",
    fake: r#"{"headers_first":true}"#,
    reached: |_, engine| {
        engine.wait(PATIENCE, |state| state.open == 1).unwrap();
    },
};
const GENERATING: Phase = Phase {
    name: "generating",
    fake: r#"{"tokens":100000,"token_ms":5}"#,
    reached: |_, engine| {
        engine.wait(PATIENCE, |state| state.tokens >= 3).unwrap();
    },
};

/// Runs one request into a phase, leaves, and looks at what is left of it.
fn leave(gateway: &Gateway, engine: &Running, ask: &Ask, phase: &Phase, way: Way) {
    engine.reset();
    let mut client = gateway.client();
    ask.send(&mut client, phase.fake);
    if matches!(way, Way::Pipelined) {
        ask.send(&mut client, phase.fake);
    }
    (phase.reached)(&mut client, engine);
    let half_closed = way.go(client);
    let seen = engine.wait(CANCEL_MAX, |state| state.open == 0);
    let case = format!("{ask}, {}, {way:?}", phase.name);
    let state = seen.unwrap_or_else(|state| panic!("{case}: {state:?}"));
    assert_eq!((state.total, state.cancelled), (1, 1), "{case}");
    drop(half_closed);
}

/// Every way at the same time, each with a gateway of its own: a departure that has to be looked for takes a while.
fn leave_in_every_way(engine_name: &str, kind: Kind, asks: &[Ask], phase: &Phase) {
    let leave_in = |way| {
        let engine = start(Options::new(kind)).unwrap();
        let gateway = Gateway::over(engine_name, &[&engine]);
        for ask in asks {
            leave(&gateway, &engine, ask, phase, way);
        }
        gateway.counters_are_zero();
        gateway.until("every departure is on record as one", || {
            gateway.metric("llmgw_requests_total", "client_left") == asks.len() as f64
        });
    };
    std::thread::scope(|scope| {
        for way in WAYS {
            scope.spawn(move || leave_in(way));
        }
    });
}

#[test]
fn a_client_that_leaves_in_mid_stream_cancels_although_the_engine_is_silent() {
    for (name, kind) in [
        ("vllm", Kind::Vllm),
        ("sglang", Kind::Sglang),
        ("llamacpp", Kind::Llamacpp),
        ("openai", Kind::Openai),
    ] {
        leave_in_every_way(name, kind, &ask::streams(), &MID_STREAM);
    }
}

#[test]
fn a_client_that_leaves_before_the_first_byte_cancels_upstream() {
    leave_in_every_way("vllm", Kind::Vllm, &ask::all(), &BEFORE_FIRST_BYTE);
}

#[test]
fn a_client_that_leaves_after_the_engines_headers_cancels_upstream() {
    let asks: Vec<Ask> = ask::all().into_iter().take(8).collect();
    leave_in_every_way("vllm", Kind::Vllm, &asks, &AFTER_HEADERS);
}

#[test]
fn a_client_that_did_not_ask_for_a_stream_cancels_too() {
    let asks: Vec<Ask> = ask::all().into_iter().skip(4).take(4).collect();
    leave_in_every_way("vllm", Kind::Vllm, &asks, &GENERATING);
}

#[test]
fn a_whole_answer_of_llamacpp_is_streamed_so_that_it_can_be_cancelled_while_the_engine_is_busy() {
    let engine = start(Options::new(Kind::Llamacpp)).unwrap();
    let gateway = Gateway::over("llamacpp", &[&engine]);
    // Another request keeps llama.cpp busy: then it would not notice the departure of one that is not streamed.
    for ask in ask::all().iter().filter(|ask| !ask.stream).take(2) {
        for way in WAYS {
            engine.reset();
            let mut busy = gateway.client();
            busy.post(
                "/v1/chat/completions",
                &chat(true),
                r#"{"tokens":100000,"token_ms":5}"#,
            );
            assert_eq!(busy.head().status, 200);
            busy.body_until("t2");
            let mut client = gateway.client();
            ask.send(&mut client, r#"{"tokens":100000,"token_ms":300}"#);
            if matches!(way, Way::Pipelined) {
                ask.send(&mut client, "{}");
            }
            engine
                .wait(PATIENCE, |state| state.open_streams == 2)
                .unwrap();
            let half_closed = way.go(client);
            let seen = engine.wait(CANCEL_MAX, |state| state.open == 1 && state.cancelled == 1);
            seen.unwrap_or_else(|state| panic!("{ask}, {way:?}: {state:?}"));
            drop((half_closed, busy));
            engine.wait(CANCEL_MAX, |state| state.open == 0).unwrap();
        }
    }
    gateway.counters_are_zero();
}

#[test]
fn a_client_that_leaves_the_queue_never_reaches_an_engine() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Setup::new()
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "slots: 1")
        .start();
    gateway.ready("fake", 1);
    let mut first = gateway.client();
    first.post("/v1/chat/completions", &chat(true), MID_STREAM.fake);
    assert_eq!(first.head().status, 200);
    for ask in ask::all() {
        for way in WAYS {
            let mut queued = gateway.client();
            ask.send(&mut queued, "{}");
            if matches!(way, Way::Pipelined) {
                ask.send(&mut queued, "{}");
            }
            gateway.queued(1);
            let half_closed = way.go(queued);
            gateway.queued(0);
            drop(half_closed);
        }
    }
    assert_eq!(engine.state().total, 1);
    drop(first);
    gateway.counters_are_zero();
}

#[test]
fn a_client_that_leaves_in_the_middle_of_its_own_body_is_forgotten_at_once() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    let length = "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 100000\r\n\r\n{\"model\":\"fake\",";
    let chunked = "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n10\r\n{\"model\":\"fake\",\r\n";
    let mut left = 0.0;
    for half in [length, chunked] {
        for way in [Way::Close, Way::HalfClose, Way::Reset] {
            let mut client = gateway.client();
            client.send(half.as_bytes());
            let half_closed = way.go(client);
            left += 1.0;
            gateway.until("the request is over", || {
                gateway.metric("llmgw_requests_total", "") == left
            });
            drop(half_closed);
        }
    }
    assert_eq!(engine.state().total, 0);
    gateway.counters_are_zero();
}

#[test]
fn a_client_that_leaves_cancels_although_the_engine_has_not_read_its_body() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    // More than the sockets between gateway and engine can hold.
    let prompt = "x".repeat(16 << 20);
    let body = format!(
        r#"{{"model":"fake","stream":true,"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
    );
    let mut client = gateway.client();
    client.post(
        "/v1/echo",
        &body,
        r#"{"ignore_body":true,"first_ms":60000}"#,
    );
    engine.wait(PATIENCE, |state| state.open == 1).unwrap();
    drop(client);
    gateway.counters_are_zero();
    gateway.until("the departure is on record", || {
        gateway.metric("llmgw_requests_total", "client_left") == 1.0
    });
}

#[test]
fn a_request_that_was_pipelined_behind_another_is_answered_after_it() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    let mut client = gateway.client();
    // The second one lies in the connection while the first is at work, for longer than the pause between two
    // looks at whether the client is still there.
    client.post(
        "/v1/chat/completions",
        &chat(true),
        r#"{"tokens":4,"token_ms":200}"#,
    );
    client.post("/v1/chat/completions", &chat(false), r#"{"text":"second"}"#);
    let first = client.answer();
    assert_eq!((first.status(), first.end), (200, End::Complete));
    assert_eq!(first.data().last().unwrap(), "[DONE]");
    let second = client.answer();
    assert!(second.text().contains("second"), "{}", second.text());
}

#[test]
fn a_reset_stream_of_http2_cancels_that_request_and_no_other() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let mut sender = h2(&gateway).await;
        for phase in [&MID_STREAM, &BEFORE_FIRST_BYTE, &AFTER_HEADERS] {
            engine.reset();
            let mut stays = sender.clone();
            stays.ready().await.unwrap();
            let mut stays = stays.send_request(h2_chat(MID_STREAM.fake)).await.unwrap();
            stays.frame().await.unwrap().unwrap();
            sender.ready().await.unwrap();
            let leaves = tokio::spawn(sender.send_request(h2_chat(phase.fake)));
            engine
                .until(PATIENCE, |state| state.open == 2)
                .await
                .unwrap();
            if phase.name == MID_STREAM.name {
                let mut body = leaves.await.unwrap().unwrap();
                body.frame().await.unwrap().unwrap();
                drop(body);
            } else {
                leaves.abort();
            }
            let seen = engine.until(CANCEL_MAX, |state| state.open == 1).await;
            let state = seen.unwrap_or_else(|state| panic!("{}: {state:?}", phase.name));
            assert_eq!(state.cancelled, 1, "{}", phase.name);
            drop(stays);
            engine
                .until(CANCEL_MAX, |state| state.open == 0)
                .await
                .unwrap();
        }
        // And the connection as a whole.
        let mut body = sender.send_request(h2_chat(MID_STREAM.fake)).await.unwrap();
        body.frame().await.unwrap().unwrap();
        drop((body, sender));
        engine
            .until(CANCEL_MAX, |state| state.open == 0)
            .await
            .unwrap();
    });
    drop(runtime);
    gateway.counters_are_zero();
}

async fn h2(gateway: &Gateway) -> http2::SendRequest<Full<Bytes>> {
    let stream = TcpStream::connect(gateway.addr).await.unwrap();
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    sender
}

fn h2_chat(fake: &str) -> http::Request<Full<Bytes>> {
    http::Request::post("http://gateway/v1/chat/completions")
        .header("x-fake", fake)
        .body(Full::from(chat(true)))
        .unwrap()
}

#[test]
fn a_frozen_engine_ends_its_streams_with_an_error_and_gets_no_more_requests() {
    let engine = || Process::spawn(&beside_this_test().unwrap(), ["--kind", "vllm"]).unwrap();
    let (frozen, other) = (engine(), engine());
    let gateway = Setup::new()
        .limit("first_byte_timeout", "5s")
        .limit("idle_timeout", "5s")
        .model("fake", "")
        .endpoint("vllm", &frozen.url(), "")
        .endpoint("vllm", &other.url(), "")
        .start();
    gateway.ready("fake", 2);
    let fake = r#"{"tokens":100000,"token_ms":20}"#;
    let (mut on_frozen, mut on_other) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let mut client = gateway.client();
        let headers = [("x-fake", fake), ("x-llmgw-debug", "1")];
        client.request(
            "POST",
            "/v1/chat/completions",
            &headers,
            chat(true).as_bytes(),
        );
        let replica = client.head().header("x-llmgw-replica").unwrap().to_owned();
        client.body_until("t1");
        match frozen.url().ends_with(&replica) {
            true => on_frozen.push(client),
            false => on_other.push(client),
        }
    }
    assert!(!on_frozen.is_empty(), "the frozen engine got none of four");
    // Nothing of theirs may be late if the machine stalls.
    drop(on_other);
    frozen.freeze().unwrap();
    for client in &mut on_frozen {
        let (rest, end) = client.rest();
        let last = data(&rest).pop().unwrap();
        assert!(last.contains(r#""code":"upstream_failed""#), "{last}");
        assert_ne!(end, End::Complete);
    }
    // Its port still accepts, and its breaker has to know better.
    for _ in 0..8 {
        let answer = gateway.post("/v1/chat/completions", &chat(false), "");
        assert_eq!(answer.status(), 200, "{}", answer.text());
    }
    gateway.counters_are_zero();
    frozen.thaw().unwrap();
}

#[test]
fn every_request_ends_while_engines_come_and_go() {
    const CLIENTS: usize = 6;
    const REQUESTS: usize = 400;
    const FLIP_MIN: Duration = Duration::from_millis(15);
    let stays = start(Options::new(Kind::Vllm)).unwrap();
    let mut changing: Vec<Option<Running>> = (0..3)
        .map(|_| Some(start(Options::new(Kind::Vllm)).unwrap()))
        .collect();
    let addresses: Vec<_> = changing.iter().flatten().map(Running::addr).collect();
    let mut setup = Setup::new()
        .limit("first_byte_timeout", "5s")
        .model("fake", "")
        .endpoint("vllm", &stays.url(), "");
    for address in &addresses {
        setup = setup.endpoint("vllm", &format!("http://{address}"), "");
    }
    let gateway = setup.start();
    gateway.ready("fake", 4);
    let (took_us, asked) = (AtomicU64::new(0), AtomicU64::new(0));
    let answered = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                scope.spawn({
                    let (gateway, took_us, asked) = (&gateway, &took_us, &asked);
                    let ask = move |index: &usize| {
                        let began = Instant::now();
                        let is_whole = one_of_many(gateway, number + index);
                        let took = u64::try_from(began.elapsed().as_micros()).unwrap();
                        took_us.fetch_add(took, Ordering::Relaxed);
                        asked.fetch_add(1, Ordering::Relaxed);
                        is_whole
                    };
                    move || (0..REQUESTS).filter(ask).count()
                })
            })
            .collect();
        let mut turn = 0;
        while clients.iter().any(|client| !client.is_finished()) {
            let which = turn % changing.len();
            turn += 1;
            changing[which] = match changing[which].take() {
                Some(running) => {
                    running.stop();
                    None
                }
                None => start(Options {
                    listen: addresses[which],
                    ..Options::new(Kind::Vllm)
                })
                .ok(),
            };
            // On a machine that is slow, so is this: else most streams would meet an end.
            let asked = asked.load(Ordering::Relaxed).max(1);
            let mean = Duration::from_micros(took_us.load(Ordering::Relaxed) / asked);
            std::thread::sleep(FLIP_MIN.max(10 * mean));
        }
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .sum::<usize>()
    });
    // One engine was always there. What died in mid-answer can't all be repeated, and retries have a budget.
    let all = CLIENTS * REQUESTS;
    assert!(
        answered * 100 >= all * 90,
        "{answered} of {all} were answered"
    );
    gateway.counters_are_zero();
}

/// One request, streamed or not; true if it was answered in full. Panics when it does not end.
fn one_of_many(gateway: &Gateway, number: usize) -> bool {
    let stream = number.is_multiple_of(2);
    let answer = gateway.post(
        "/v1/chat/completions",
        &chat(stream),
        r#"{"tokens":3,"token_ms":1}"#,
    );
    if answer.status() != 200 {
        assert!(matches!(answer.status(), 502..=504), "{}", answer.text());
        return false;
    }
    let whole = answer.end == End::Complete;
    if stream && whole {
        assert_eq!(answer.data().last().unwrap(), "[DONE]");
    }
    whole
}

#[test]
fn requests_over_http2_that_are_taken_back_unread_end_no_other_one_on_their_connection() {
    const TAKEN_BACK: u32 = 200;
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let gateway = Gateway::over("vllm", &[&engine]);
    // `GET /v1/models`: method and scheme by number, the path in letters.
    let headers = [&[0x82, 0x86, 0x04, 10], &b"/v1/models"[..]].concat();
    let stream_of = |number: u32| 2 * number + 1;
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(h2_frame(SETTINGS, 0, 0, &[]));
    for number in 0..=TAKEN_BACK {
        bytes.extend(h2_frame(HEADERS, 0x5, stream_of(number), &headers));
        if number < TAKEN_BACK {
            bytes.extend(h2_frame(
                RST_STREAM,
                0,
                stream_of(number),
                &8_u32.to_be_bytes(),
            ));
        }
    }
    let mut stream = std::net::TcpStream::connect(gateway.addr).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // In one piece: all are there before the first one is looked at.
    stream.write_all(&bytes).unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload).unwrap();
        let text = String::from_utf8_lossy(&payload);
        assert_ne!(head[3], GOAWAY, "the connection was ended: {text}");
        let id = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        if head[3] == HEADERS && id == stream_of(TAKEN_BACK) {
            // `:status 200`, by number.
            assert_eq!(payload[0], 0x88, "{payload:?}");
            return;
        }
    }
}

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

fn h2_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
    [&head, payload].concat()
}
