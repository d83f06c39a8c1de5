//! The admin listener over real sockets.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::fleet::FleetAdmin;
use super::guard::Guard;
use super::status::{ModelStatus, ReplicaState, ReplicaStatus, StatusReport};
use super::{Admin, serve};
use crate::serve::reload::Confirmed;

/// An admin listener that stops with the test.
pub(crate) struct Listening {
    pub(crate) address: SocketAddr,
    pub(crate) reloads: Arc<AtomicU64>,
    /// Of these, those that an operator confirmed.
    pub(crate) confirmed: Arc<AtomicU64>,
    stop: CancellationToken,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Starts a listener over a fleet of one ready replica; its reload fails on every second call.
pub(crate) async fn listen(token: Option<&str>, ready: Result<(), String>) -> Listening {
    start(token, ready, None).await
}

/// The same over a fleet of its own.
pub(crate) async fn listen_over(fleet: Option<FleetAdmin>) -> Listening {
    start(None, Ok(()), fleet).await
}

async fn start(
    token: Option<&str>,
    ready: Result<(), String>,
    fleet: Option<FleetAdmin>,
) -> Listening {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (reloads, confirmed) = (Arc::default(), Arc::default());
    let admin = admin(token, ready, fleet, &reloads, &confirmed);
    let stop = CancellationToken::new();
    tokio::spawn(serve(listener, Arc::new(admin), None, stop.clone()));
    Listening {
        address,
        reloads,
        confirmed,
        stop,
    }
}

fn admin(
    token: Option<&str>,
    ready: Result<(), String>,
    fleet: Option<FleetAdmin>,
    reloads: &Arc<AtomicU64>,
    confirmed: &Arc<AtomicU64>,
) -> Admin {
    let (counted, meant) = (reloads.clone(), confirmed.clone());
    Admin {
        metrics: Arc::default(),
        policies: llmgw_plugins::Policies::open(llmgw_plugins::PolicyOptions::default()).unwrap(),
        report: Arc::new(report),
        ready: Arc::new(move || ready.clone()),
        reload: Arc::new(move |confirmed| {
            meant.fetch_add(u64::from(confirmed == Confirmed::Yes), Ordering::SeqCst);
            match counted.fetch_add(1, Ordering::SeqCst) % 2 {
                0 => Ok("generation 2".to_owned()),
                _ => Err("llmgw.yaml:3: unknown key `modles`".to_owned()),
            }
        }),
        ends: Arc::new(Vec::new),
        guard: Guard::new(token.map(str::to_owned), false),
        fleet,
    }
}

pub(crate) fn report() -> StatusReport {
    let replica = ReplicaStatus {
        id: "smollm2/0".into(),
        url: "http://127.0.0.1:9001".into(),
        engine: "llamacpp".into(),
        state: ReplicaState::Ready,
        inflight: 2,
        slots: Some(4),
        ..ReplicaStatus::default()
    };
    let model = ModelStatus {
        name: "smollm2".into(),
        aliases: vec!["default".into()],
        ready: true,
        replicas: vec![replica],
        ..ModelStatus::default()
    };
    StatusReport {
        version: "0.1.0".into(),
        uptime_ms: 61_000,
        models: vec![model],
        ..StatusReport::default()
    }
}

/// Sends raw bytes, reads to the end.
async fn send(address: SocketAddr, request: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let head = head.to_ascii_lowercase();
    // `ctl` takes no other for an answer.
    assert!(head.contains("\r\nx-llmgw-admin: 1"), "{head}");
    (
        head.split(' ').nth(1).unwrap().parse().unwrap(),
        head,
        body.to_owned(),
    )
}

async fn ask(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
) -> (u16, String, String) {
    send(
        address,
        &format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n"
        ),
    )
    .await
}

async fn json(address: SocketAddr, path: &str) -> serde_json::Value {
    let (status, head, body) = ask(address, "GET", path, "").await;
    assert_eq!(status, 200, "{path}");
    assert!(head.contains("content-type: application/json"), "{head}");
    serde_json::from_str(&body).unwrap()
}

#[tokio::test]
async fn every_route_answers_what_it_is_for() {
    let admin = listen(None, Ok(())).await;
    let address = admin.address;
    let (status, head, body) = ask(address, "GET", "/metrics", "").await;
    assert_eq!(status, 200);
    assert!(
        head.contains("content-type: text/plain; version=0.0.4"),
        "{head}"
    );
    assert!(
        body.contains(
            "llmgw_replica_inflight{model=\"smollm2\",replica=\"smollm2/0\",engine=\"llamacpp\"} 2"
        ),
        "{body}"
    );
    assert_eq!(json(address, "/healthz").await["status"], "ok");
    assert_eq!(json(address, "/readyz").await["ready"], true);
    let status: StatusReport = serde_json::from_value(json(address, "/v1/status").await).unwrap();
    assert_eq!(status, report());
    assert_eq!(
        json(address, "/v1/models").await["models"][0]["aliases"][0],
        "default"
    );
    let replica = &json(address, "/v1/replicas").await["replicas"][0];
    assert_eq!(
        (&replica["model"], &replica["state"]),
        (&"smollm2".into(), &"ready".into())
    );
    assert!(replica["running"].is_null() && replica.get("running").is_some());
    assert!(json(address, "/v1/policies").await["generation"].is_u64());
}

#[tokio::test]
async fn readiness_is_503_with_its_reason() {
    let admin = listen(None, Err("no listener is up".into())).await;
    let (status, _, body) = ask(admin.address, "GET", "/readyz", "").await;
    assert_eq!(status, 503);
    assert!(body.contains("no listener is up"), "{body}");
    assert_eq!(ask(admin.address, "GET", "/healthz", "").await.0, 200);
}

#[tokio::test]
async fn a_token_is_asked_for_everywhere_but_health() {
    let admin = listen(Some("s3cret"), Ok(())).await;
    let cases = [
        ("/v1/status", "", 401),
        ("/metrics", "", 401),
        ("/nowhere", "", 401),
        ("/v1/status", "authorization: Bearer s3cres\r\n", 401),
        ("/v1/status", "authorization: Bearer s3cret2\r\n", 401),
        ("/v1/status", "authorization: Bearer\r\n", 401),
        ("/v1/status", "authorization: Basic s3cret\r\n", 401),
        ("/v1/status", "authorization: Bearer s3cret\r\n", 200),
        ("/v1/status", "authorization: bearer s3cret\r\n", 200),
        ("/healthz", "", 200),
        ("/readyz", "", 200),
    ];
    for (path, headers, expected) in cases {
        let (status, head, body) = ask(admin.address, "GET", path, headers).await;
        assert_eq!(status, expected, "{path} {headers}");
        assert_eq!(head.contains("www-authenticate: bearer"), status == 401);
        assert!(!body.contains("s3cret"), "{body}");
    }
}

#[tokio::test]
async fn without_a_token_a_request_for_another_host_is_answered_for_health_alone() {
    let (open, closed) = (
        listen(None, Ok(())).await,
        listen(Some("s3cret"), Ok(())).await,
    );
    for (admin, path, expected) in [
        (&open, "/metrics", 403),
        (&open, "/v1/status", 403),
        (&open, "/v1/tokens/new?node=n1", 403),
        (&open, "/nowhere", 403),
        (&open, "/healthz", 200),
        (&open, "/readyz", 200),
        (&closed, "/metrics", 200),
    ] {
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: evil.example:8081\r\nauthorization: Bearer s3cret\r\nconnection: close\r\n\r\n"
        );
        let (status, _, body) = send(admin.address, &request).await;
        assert_eq!(status, expected, "{path}: {body}");
        if status == 403 {
            assert!(body.contains("foreign_host") && body.contains("`evil.example:8081`"));
        }
    }
    let old = "GET /metrics HTTP/1.0\r\n\r\n";
    assert_eq!(send(open.address, old).await.0, 200);
}

#[tokio::test]
async fn what_is_refused_says_why() {
    let admin = listen(None, Ok(())).await;
    let big = format!("content-length: {}\r\n", 1 << 20);
    let cases = [
        ("GET", "/nowhere", "", 404, "not_found"),
        ("DELETE", "/v1/status", "", 405, "method_not_allowed"),
        ("GET", "/v1/reload", "", 405, "method_not_allowed"),
        (
            "POST",
            "/v1/reload",
            "origin: http://evil.example\r\ncontent-length: 0\r\n",
            403,
            "cross_origin",
        ),
        ("POST", "/v1/reload", big.as_str(), 413, "body_too_large"),
        ("GET", "/v1/policies/pin", "", 405, "method_not_allowed"),
        (
            "POST",
            "/v1/policies/untrip",
            "origin: http://evil.example\r\ncontent-length: 0\r\n",
            403,
            "cross_origin",
        ),
        (
            "POST",
            "/v1/policies/pin",
            "content-length: 0\r\n",
            400,
            "invalid_generation",
        ),
        (
            "POST",
            "/v1/policies/pin?generation=9",
            "content-length: 0\r\n",
            404,
            "unknown_generation",
        ),
        (
            "POST",
            "/v1/policies/rollback",
            "content-length: 0\r\n",
            404,
            "unknown_generation",
        ),
    ];
    for (method, path, headers, status, code) in cases {
        let headers = if code == "body_too_large" {
            format!("{headers}\r\n{}", "x".repeat(70_000))
        } else {
            headers.into()
        };
        let got = ask(admin.address, method, path, &headers).await;
        let body: serde_json::Value = serde_json::from_str(&got.2).unwrap();
        assert_eq!(
            (got.0, body["error"]["code"].as_str()),
            (status, Some(code)),
            "{method} {path}"
        );
    }
    assert_eq!(admin.reloads.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_reload_says_what_is_in_force_or_why_nothing_changed() {
    let admin = listen(None, Ok(())).await;
    let (status, _, body) = ask(admin.address, "POST", "/v1/reload", "content-length: 0\r\n").await;
    assert_eq!(
        (status, body.contains("generation 2")),
        (200, true),
        "{body}"
    );
    let (status, _, body) = ask(admin.address, "POST", "/v1/reload", "content-length: 0\r\n").await;
    assert_eq!(
        (status, body.contains("llmgw.yaml:3")),
        (422, true),
        "{body}"
    );
}

#[tokio::test]
async fn connections_that_say_nothing_leave_room_for_others_and_a_stop_ends_all() {
    let admin = listen(None, Ok(())).await;
    let mut silent = Vec::new();
    for _ in 0..super::ADMIN_CONNECTIONS_MAX - 8 {
        silent.push(TcpStream::connect(admin.address).await.unwrap());
    }
    assert_eq!(ask(admin.address, "GET", "/healthz", "").await.0, 200);
    drop(admin);
    for stream in &mut silent {
        assert!(matches!(stream.read(&mut [0; 1]).await, Ok(0) | Err(_)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_asks_and_never_reads_loses_its_connection() {
    let admin = admin(None, Ok(()), None, &Arc::default(), &Arc::default());
    let (mut client, server) = tokio::io::duplex(1_024);
    let asking = tokio::spawn(async move {
        while client
            .write_all(b"GET /healthz HTTP/1.1\r\n\r\n")
            .await
            .is_ok()
        {}
        client
    });
    let serving = super::serve_connection(server, Arc::new(admin), CancellationToken::new());
    let ended = tokio::time::timeout(Duration::from_secs(3_600), serving).await;
    assert!(ended.is_ok(), "it keeps its place");
    asking.await.unwrap();
}

#[tokio::test]
async fn an_answer_that_is_under_way_is_given_though_the_listener_stops() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (begins, mut begun) = mpsc::unbounded_channel();
    let (release, released) = std::sync::mpsc::channel();
    let released = Mutex::new(released);
    let mut admin = admin(None, Ok(()), None, &Arc::default(), &Arc::default());
    admin.reload = Arc::new(move |_| {
        begins.send(()).unwrap();
        released.lock().unwrap().recv().unwrap();
        Ok("generation 2".to_owned())
    });
    let stop = CancellationToken::new();
    let serving = tokio::spawn(serve(listener, Arc::new(admin), None, stop.clone()));
    let asked = tokio::spawn(ask(address, "POST", "/v1/reload", ""));
    begun.recv().await.unwrap();
    stop.cancel();
    let connections = serving.await.unwrap();
    assert_eq!(connections.len(), 1, "it is to be waited for");
    release.send(()).unwrap();
    assert_eq!(asked.await.unwrap().0, 200);
    connections.wait().await;
}
