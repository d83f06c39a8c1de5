//! Commands against a real admin listener over a fleet in memory.

use std::sync::Arc;

use llmgw_proto::enrolment::EnrolmentRequest;
use llmgw_proto::identity::EnrolmentToken;
use llmgw_proto::shard::LogLine;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::Node;
use super::drain::{self, left_behind, without_replica};
use crate::admin::fleet::FleetAdmin;
use crate::admin::status::{ModelStatus, ReplicaState, ReplicaStatus};
use crate::admin::tests::{Listening, listen_over};
use crate::config::UtcTime;
use crate::control::controller::tests::fleet::Fleet;
use crate::control::enrolment::Enrolment;
use crate::control::enrolment::tests::{Fake, State};
use crate::control::snapshot::Snapshot;
use crate::ctl::client::Admin;
use crate::ctl::tests::ctl;
use crate::ctl::{CtlError, OutputFormat};

const MODELS: &str = "[{name: org/m, profiles: [{name: p, engine: llamacpp, cpus: 4}]}]";

/// A node `a` with one replica that loads.
async fn fleet() -> (Fleet, Listening) {
    fleet_with(None).await
}

async fn fleet_with(enrolment: Option<Arc<Enrolment>>) -> (Fleet, Listening) {
    let fleet = Fleet::new(&["a"], MODELS);
    let admin = FleetAdmin {
        controller: fleet.controller.clone(),
        enrolment,
        tail: Arc::new(|_, shard, _| {
            let text = format!("{shard}: out of \u{1b}[2J memory");
            Box::pin(async move { Ok(vec![LogLine { at_ms: 7, text }]) })
        }),
    };
    (fleet, listen_over(Some(admin)).await)
}

async fn run(admin: &Listening, words: &[&str]) -> (u8, String) {
    let address = format!("http://{}", admin.address);
    ctl(&[&["--admin", &address], words].concat()).await
}

#[tokio::test]
async fn the_fleet_is_shown() {
    let (_fleet, admin) = fleet().await;
    for (words, expected) in [
        (
            &["nodes"][..],
            "a     ready  2/2 h100-sxm-80g  92/96      540/540   1",
        ),
        (&["nodes", "--format", "json"], "\"id\": \"a\""),
        (&["replicas"], "org/m/0  loading  a     p"),
        (&["replicas", "--format", "json"], "\"profile\": \"p\""),
        (&["explain", "org/m"], "replica  org/m/0 is loading on a"),
        (&["explain", "org/m", "--format", "json"], "\"waits_ms\": 0"),
        (&["logs", "org/m/0"], "org/m/0/0: out of ?[2J memory"),
        (&["snapshot"], "\"schema\": \"llmgw.fleet/1\""),
    ] {
        let (status, text) = run(&admin, words).await;
        assert_eq!(status, 0, "{words:?}");
        assert!(text.contains(expected), "{words:?}\n{text}");
    }
}

#[tokio::test]
async fn a_replica_that_waits_for_its_next_attempt_is_a_row_of_its_own() {
    let (mut fleet, admin) = fleet().await;
    fleet.fail("org/m/0");
    let (status, text) = run(&admin, &["replicas"]).await;
    assert_eq!(status, 0);
    let row = "\
        STARTED  STATE    NODE  PROFILE  WHY\n\
        org/m    waiting  a     p        1 replica: exited: it exited with status 1; next attempt in 5 s\n";
    assert!(text.ends_with(row), "{text}");
}

#[tokio::test]
async fn a_snapshot_that_is_written_to_a_file_is_one() {
    let (_fleet, admin) = fleet().await;
    let name = format!("llmgw-snapshot-{}.json", std::process::id());
    let file = std::env::temp_dir().join(name);
    let path = file.to_str().expect("it is text");
    assert_eq!(
        run(&admin, &["snapshot", "-o", path]).await,
        (0, String::new())
    );
    let read = Snapshot::read(&file);
    std::fs::remove_file(&file).expect("it is there");
    assert!(read.expect("it is one").nodes.contains_key("a"));
}

#[tokio::test]
async fn orders_are_carried_out_and_a_drain_waits_until_the_node_is_empty() {
    let (mut fleet, admin) = fleet().await;
    fleet.ready("org/m/0");
    let (status, text) = run(&admin, &["stop", "org/m/0"]).await;
    assert_eq!((status, &*text), (0, "org/m/0 leaves\n"));
    fleet.pass(3);
    let obeying = async {
        while fleet.controller.nodes()[0].state != "draining" {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        fleet.pass(1);
    };
    let (drained, ()) = tokio::join!(run(&admin, &["drain", "a", "--force"]), obeying);
    assert_eq!(drained, (0, "a is empty\n".to_owned()));
    let (status, text) = run(&admin, &["undrain", "a"]).await;
    assert_eq!((status, &*text), (0, "a is put back into use\n"));
}

#[tokio::test]
async fn a_forced_drain_of_an_absent_node_returns_once_its_replicas_are_given_up() {
    let (mut fleet, admin) = fleet().await;
    fleet.ready("org/m/0");
    fleet.cut("a");
    let looking = async {
        while fleet.controller.nodes()[0].leaving.is_empty() {
            fleet.look();
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    let (drained, ()) = tokio::join!(run(&admin, &["drain", "a", "--force"]), looking);
    assert_eq!(drained, (1, String::new()));
    let one = Node {
        id: "a".to_owned(),
        reason: "reset".to_owned(),
        replicas: vec!["org/m/0".to_owned()],
        ..Node::default()
    };
    let said = "a is out of use, but unreachable (reset): its replica gets no more requests, and stops when it is back";
    assert_eq!(left_behind(&one), said);
}

/// Answers one connection after the other; none: it is closed without a word.
async fn answers(listener: TcpListener, answers: Vec<Option<Value>>) {
    for answer in answers {
        let (mut socket, _) = listener.accept().await.expect("ctl comes");
        let Some(answer) = answer else { continue };
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let read = socket.read_buf(&mut request).await.expect("it asks");
            assert!(read > 0, "it asks before it goes");
        }
        let body = answer.to_string();
        let head = format!(
            "HTTP/1.1 200 OK\r\nx-llmgw-admin: 1\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        let whole = head + &body;
        socket
            .write_all(whole.as_bytes())
            .await
            .expect("it listens");
    }
}

#[tokio::test]
async fn a_drain_outlives_a_server_that_restarts_and_does_not_know_the_node_at_first() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it has one").to_string();
    let node = |replicas: &[&str]| {
        let node = json!({"id": "a", "state": "draining", "replicas": replicas});
        Some(json!({"nodes": [node]}))
    };
    let told = vec![
        node(&["m/0"]),
        Some(json!({"message": "a is taken out of use"})),
        node(&["m/0"]),
        None,
        Some(json!({"nodes": []})),
        node(&["m/0"]),
        node(&[]),
    ];
    let words = ["--admin", &address, "drain", "a"];
    let (drained, ()) = tokio::join!(ctl(&words), answers(listener, told));
    assert_eq!(drained, (0, "a is empty\n".to_owned()));
}

#[tokio::test]
async fn a_drain_of_a_node_that_the_server_forgets_fails() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it has one").to_string();
    let told = vec![
        Some(json!({"nodes": [{"id": "a", "state": "ready"}]})),
        Some(json!({"message": "a is taken out of use"})),
        Some(json!({"nodes": []})),
    ];
    let words = ["--admin", &address, "drain", "a"];
    let (drained, ()) = tokio::join!(ctl(&words), answers(listener, told));
    assert_eq!(drained, (1, String::new()));
}

/// What becomes of a drain of a node that was seen in these states, with these replicas.
async fn drained(seen: [(&str, &[&str]); 2]) -> (u8, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it has one").to_string();
    let [before, after] = seen.map(|(state, replicas)| {
        let node = json!({"id": "a", "state": state, "reason": "reset", "replicas": replicas});
        Some(json!({"nodes": [node]}))
    });
    let ordered = Some(json!({"message": "a is taken out of use"}));
    let words = ["--admin", &address, "drain", "a"];
    let (drained, ()) = tokio::join!(ctl(&words), answers(listener, vec![before, ordered, after]));
    drained
}

#[tokio::test]
async fn an_absent_node_is_empty_only_where_it_had_heard_of_the_drain() {
    let nothing: &[&str] = &[];
    let absent = ("unreachable", nothing);
    assert_eq!(drained([absent, absent]).await, (1, String::new()));
    let (status, text) = drained([("draining", &["m/0"]), absent]).await;
    assert_eq!((status, &*text), (0, "a is empty\n"));
    let one = Node {
        id: "a".to_owned(),
        reason: "reset".to_owned(),
        ..Node::default()
    };
    let said = "a is out of use, but unreachable (reset): nothing is known to run there, and it hears of the drain when it is back";
    assert_eq!(left_behind(&one), said);
}

#[tokio::test]
async fn a_drain_that_a_person_interrupts_goes_on_and_says_so() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it has one").to_string();
    let admin = Admin::new(&address, None, None).expect("it is an address");
    let order = drain::Order {
        node: "a",
        timeout: None,
        force: false,
    };
    let told = vec![
        Some(json!({"nodes": [{"id": "a", "state": "ready"}]})),
        Some(json!({"message": "a is taken out of use"})),
    ];
    let mut out = Vec::new();
    let now = std::future::ready(());
    let draining = drain::run(&admin, order, OutputFormat::Text, &mut out, now);
    let (drained, ()) = tokio::join!(draining, answers(listener, told));
    let error = drained.expect_err("it is not empty");
    assert!(matches!(error, CtlError::Interrupted(_)), "{error}");
    assert_eq!(error.exit_status(), 130);
    let said = "the drain of a goes on; `llmgw ctl undrain a` ends it";
    assert_eq!(error.to_string(), said);
}

#[test]
fn a_model_that_a_drain_leaves_without_a_replica_is_named() {
    let ready = ReplicaStatus {
        state: ReplicaState::Ready,
        ..ReplicaStatus::default()
    };
    let model = |wanted, replicas| ModelStatus {
        name: "m".to_owned(),
        wanted: Some(wanted),
        replicas,
        ..ModelStatus::default()
    };
    let said = without_replica(&model(2, Vec::new()));
    let expected = "m now has no replica (0 of 2); `llmgw ctl explain m` says what it waits for";
    assert_eq!(said.as_deref(), Some(expected));
    assert_eq!(without_replica(&model(2, vec![ready])), None);
    assert_eq!(without_replica(&model(0, Vec::new())), None);
}

#[tokio::test]
async fn a_replica_is_also_known_by_its_address_and_a_node_that_is_not_drained_is_not_put_back() {
    let (mut fleet, admin) = fleet().await;
    fleet.ready("org/m/0");
    let address = fleet.controller.replicas()[0].address.clone();
    let address = address.expect("it listens");
    let (status, text) = run(&admin, &["logs", &address]).await;
    assert_eq!((status, &*text), (0, "org/m/0/0: out of ?[2J memory\n"));
    assert_eq!(run(&admin, &["logs", "127.0.0.1:1"]).await.0, 1);
    let (status, text) = run(&admin, &["undrain", "a"]).await;
    assert_eq!((status, &*text), (0, "a was not drained, and is in use\n"));
    let (status, text) = run(&admin, &["stop", &address]).await;
    assert_eq!((status, &*text), (0, "org/m/0 leaves\n"));
}

#[tokio::test]
async fn what_there_is_not_fails_with_1() {
    let (_fleet, admin) = fleet().await;
    for words in [
        &["explain", "m"][..],
        &["logs", "m/0"],
        &["drain", "b"],
        &["undrain", "b"],
        &["stop", "m/0"],
    ] {
        assert_eq!(run(&admin, words).await.0, 1, "{words:?}");
    }
    let none = listen_over(None).await;
    assert_eq!(run(&none, &["nodes"]).await.0, 1);
}

#[tokio::test]
async fn a_token_is_printed_once_and_alone() {
    let (state, authority) = (State::new(), Arc::new(Fake::default()));
    let enrolment = Arc::new(state.server(&authority));
    let (_fleet, admin) = fleet_with(Some(enrolment.clone())).await;
    let (status, text) = run(&admin, &["cert", "token", "--node", "gpu.01"]).await;
    assert_eq!(status, 0);
    let token: EnrolmentToken = text.trim_end().parse().expect("it is one");
    assert_eq!(token.node(), "gpu.01");
    let request = EnrolmentRequest {
        node: token.node().to_owned(),
        token,
        signing_request: "a".to_owned(),
    };
    let signed = enrolment.enrol(&request, UtcTime::now());
    assert!(signed.is_ok(), "{signed:?}");
    let words = [
        "cert",
        "token",
        "--node",
        "n",
        "--expires",
        "2d",
        "--format",
        "json",
    ];
    let (status, text) = run(&admin, &words).await;
    assert_eq!(status, 0);
    let made: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    let expires: UtcTime = made["expires"]
        .as_str()
        .and_then(|at| at.parse().ok())
        .expect("a time");
    let left = expires.0 - UtcTime::now().0;
    assert!((172_000..=172_800).contains(&left), "{left}");
    let (status, text) = run(&admin, &["cert", "token", "--node", "n", "--expires", "8d"]).await;
    assert_eq!((status, &*text), (1, ""), "more than the server allows");
}

#[tokio::test]
async fn a_server_that_does_not_sign_makes_no_token_and_ctl_fails_with_1() {
    let state = State::new();
    let enrolment = state.server(&Arc::new(Fake::default()));
    enrolment.set_signing(None);
    for enrolment in [None, Some(Arc::new(enrolment))] {
        let (_fleet, admin) = fleet_with(enrolment).await;
        let (status, text) = run(&admin, &["cert", "token", "--node", "n"]).await;
        assert_eq!((status, &*text), (1, ""));
    }
}
