//! Questions and orders over a fleet in memory.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::Duration;

use http::{StatusCode, Uri};
use llmgw_proto::shard::LogLine;
use serde_json::{Value, json};

use super::{FleetAdmin, FleetError, FleetOrder, FleetQuestion, Query, ask, order};
use crate::control::controller::tests::fleet::{Fleet, lock};
use crate::control::snapshot::Snapshot;

const MODELS: &str = "[{name: org/m, profiles: [{name: p, engine: llamacpp, cpus: 4}]}, {name: fixed, endpoints: [{url: 'http://127.0.0.1:9'}]}]";

/// A node `a`, and one replica on it that loads; its log has one line, which says what was asked.
fn fleet() -> (Fleet, FleetAdmin) {
    let fleet = Fleet::new(&["a"], MODELS);
    let admin = FleetAdmin {
        controller: fleet.controller.clone(),
        enrolment: None,
        tail: Arc::new(|node, shard, lines| {
            Box::pin(async move {
                match lines {
                    0 => Err("the node does not answer".to_owned()),
                    _ => {
                        let text = format!("{node} {shard} {lines}");
                        Ok(vec![LogLine { at_ms: 7, text }])
                    }
                }
            })
        }),
    };
    (fleet, admin)
}

fn query(text: &str) -> Query {
    let uri: Uri = format!("/v1/x?{text}").parse().expect("it is one");
    Query::of(&uri)
}

async fn asked(admin: &FleetAdmin, question: FleetQuestion, text: &str) -> Value {
    ask(Some(admin), question, query(text))
        .await
        .unwrap_or_else(|error| panic!("{error}"))
}

#[tokio::test]
async fn every_question_is_answered() {
    let (_fleet, admin) = fleet();
    let nodes = asked(&admin, FleetQuestion::Nodes, "").await;
    let node = &nodes["nodes"][0];
    assert_eq!(
        (&node["id"], &node["state"]),
        (&json!("a"), &json!("ready"))
    );
    assert_eq!(
        (&node["cpus_free"], &node["gpus_free"]),
        (&json!(92), &json!(2))
    );
    assert_eq!(node["replicas"], json!(["org/m/0"]));
    let started = asked(&admin, FleetQuestion::Started, "").await;
    let replica = &started["replicas"][0];
    assert_eq!(
        (&replica["state"], &replica["node"]),
        (&json!("loading"), &json!("a"))
    );
    assert_eq!(
        (&replica["profile"], &replica["outdated"]),
        (&json!("p"), &json!(false))
    );
    let explained = asked(&admin, FleetQuestion::Explain, "model=org%2Fm").await;
    let text = explained["text"].as_str().expect("it is text");
    assert!(text.contains("replica  org/m/0 is loading on a"), "{text}");
    assert_eq!(explained["explanation"]["decision"]["placed"], json!(true));
    let logs = asked(&admin, FleetQuestion::Logs, "replica=org/m/0&lines=3").await;
    assert_eq!(logs["lines"][0]["text"], "a org/m/0/0 3");
    let snapshot = asked(&admin, FleetQuestion::Snapshot, "").await;
    let read = Snapshot::parse(std::path::Path::new("f"), &snapshot.to_string());
    assert_eq!(read.expect("it is one").replicas.len(), 1);
}

#[tokio::test]
async fn what_has_no_answer_says_why() {
    let (_fleet, admin) = fleet();
    for (question, text, code, status) in [
        (
            FleetQuestion::Explain,
            "",
            "invalid_query",
            StatusCode::BAD_REQUEST,
        ),
        (
            FleetQuestion::Explain,
            "model=n",
            "unknown_name",
            StatusCode::NOT_FOUND,
        ),
        (
            FleetQuestion::Explain,
            "model=fixed",
            "no_profiles",
            StatusCode::NOT_FOUND,
        ),
        (
            FleetQuestion::Logs,
            "replica=org/m/9",
            "unknown_name",
            StatusCode::NOT_FOUND,
        ),
        (
            FleetQuestion::Logs,
            "replica=org/m/0&rank=x",
            "invalid_query",
            StatusCode::BAD_REQUEST,
        ),
        (
            FleetQuestion::Logs,
            "replica=org/m/0&lines=0",
            "no_logs",
            StatusCode::BAD_GATEWAY,
        ),
    ] {
        let error = ask(Some(&admin), question, query(text))
            .await
            .expect_err("it has none");
        assert_eq!((error.code(), error.status()), (code, status), "{text}");
    }
    let none = ask(None, FleetQuestion::Nodes, query(""))
        .await
        .expect_err("there is none");
    assert!(matches!(none, FleetError::NoFleet));
}

#[tokio::test]
async fn who_asks_for_output_while_the_fleet_is_looked_at_keeps_no_thread_of_the_runtime_waiting() {
    const PATIENCE: Duration = Duration::from_secs(60);
    let (fleet, admin) = fleet();
    let (begins, begun) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let (tell, was_released) = mpsc::channel();
    let mut first = Some(released);
    *lock(&fleet.rest.then) = Some(Box::new(move || {
        if let Some(released) = first.take() {
            begins.send(()).expect("the test waits for it");
            let _ = tell.send(released.recv_timeout(PATIENCE).is_ok());
        }
    }));
    let controller = fleet.controller.clone();
    let look = std::thread::spawn(move || controller.look());
    begun.recv_timeout(PATIENCE).expect("it looks");
    let mut logs = pin!(asked(&admin, FleetQuestion::Logs, "replica=org/m/0"));
    let asking = poll_fn(|context| Poll::Ready(logs.as_mut().poll(context).is_pending()));
    assert!(asking.await, "it waits, and others have the thread");
    release.send(()).expect("the look waits for it");
    assert_eq!(logs.await["node"], "a");
    assert_eq!(was_released.recv(), Ok(true), "the look lasted until then");
    look.join().expect("it ends");
}

#[tokio::test]
async fn the_output_of_a_replica_on_an_absent_node_is_refused_with_the_node_and_the_way_out() {
    let (mut fleet, admin) = fleet();
    fleet.cut("a");
    let refused = ask(Some(&admin), FleetQuestion::Logs, query("replica=org/m/0"));
    let error = refused.await.expect_err("its agent is not there");
    let (code, status) = (error.code(), error.status());
    assert_eq!((code, status), ("no_logs", StatusCode::BAD_GATEWAY));
    let said = error.to_string();
    assert!(
        said.starts_with("org/m/0 is on a, which is unreachable"),
        "{said}"
    );
    assert!(said.contains("`llmgw ctl nodes`"), "{said}");
}

#[tokio::test]
async fn orders_are_carried_out() {
    let (mut fleet, admin) = fleet();
    let said = order(Some(&admin), FleetOrder::Drain, query("node=a&force")).await;
    assert_eq!(
        said.expect("it is there"),
        "a is taken out of use, 1 replica leaves it"
    );
    fleet.pass(1);
    assert_eq!(fleet.running(), Vec::<String>::new());
    let said = order(Some(&admin), FleetOrder::Undrain, query("node=a")).await;
    assert_eq!(said.expect("it is there"), "a is put back into use");
    fleet.pass(6);
    assert_eq!(fleet.running(), ["org/m/0 on a: loading"]);
    let said = order(Some(&admin), FleetOrder::Stop, query("replica=org/m/0")).await;
    assert_eq!(said.expect("it is there"), "org/m/0 leaves");
    let unknown = order(Some(&admin), FleetOrder::Drain, query("node=b")).await;
    assert_eq!(unknown.expect_err("there is none").code(), "unknown_name");
    let bad = order(
        Some(&admin),
        FleetOrder::Drain,
        query("node=a&timeout_ms=soon"),
    )
    .await;
    assert_eq!(bad.expect_err("it is no number").code(), "invalid_query");
}
