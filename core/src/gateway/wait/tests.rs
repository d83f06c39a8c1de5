//! A request that waits while replicas come and go, polled by hand: what happens between two polls is the test's choice.

use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method};
use llmgw_plugins::{Policies, PolicyOptions};

use super::{Chosen, Failure, Permit, left_without_replica, place};
use crate::clock;
use crate::config;
use crate::flow::meanwhile::{self, Point};
use crate::flow::queues::Entered;
use crate::gateway::band;
use crate::gateway::dialect::Dialect;
use crate::gateway::job::{Body, Facts, Job};
use crate::gateway::state::Gateway;
use crate::routing::breaker::Fault;
use crate::routing::pool::{Asked, Pool, Shared};
use crate::routing::prefix::PromptHashes;
use crate::routing::replica::{Readiness, Replica, Standing};
use crate::telemetry::{Telemetry, log};

/// For what takes a second by itself.
const PATIENCE: Duration = Duration::from_secs(60);
// Nothing listens there: no request is sent.
const MODELS: &str = "models: [{name: m, endpoints: [{url: 'http://127.0.0.1:9', slots: 1}]}]";
const TWO: &str = "models: [{name: m, endpoints: [{url: 'http://127.0.0.1:9', slots: 1}, {url: 'http://127.0.0.2:9', slots: 1}]}]";

fn config(text: &str) -> config::Config {
    config::parse(Path::new("llmgw.yaml"), text.to_string(), &|_| None).expect("it is one")
}

fn gateway() -> Arc<Gateway> {
    let policies = Policies::open(PolicyOptions::default()).expect("the built-in ones load");
    Gateway::new(
        config("models: []"),
        policies,
        Telemetry::start(log::LogFormat::Text),
    )
}

/// The pool of a model whose replicas nobody probes: they are what the test says.
fn pool(gateway: &Gateway, models: &str) -> Arc<Pool> {
    let model = config(models).catalog.models[0].clone();
    let shared = Shared::new(&[band::unlisted("only".into())]);
    let metrics = gateway.telemetry.metrics.model(&model.name);
    let replicas = model.endpoints.iter().map(|endpoint| {
        let slots = crate::flow::slots::Slots::new(endpoint.slots);
        let place = shared.prefix.lock().unwrap().join();
        Replica::new(
            endpoint.clone(),
            Arc::default(),
            vec![model.name.clone()],
            Duration::from_secs(1),
            slots,
            place,
            shared.queues.clone(),
        )
    });
    Arc::new(Pool::new(
        model.clone(),
        replicas.collect(),
        metrics,
        shared,
    ))
}

/// The pool that is in force, whose probes do not run before the test awaits something.
fn pool_of(gateway: &Gateway) -> Arc<Pool> {
    let runtime = gateway.runtime.load();
    runtime.fleet.pool("m").expect("it is there").clone()
}

fn is_ready(replica: &Replica) {
    let served = Arc::from("m");
    let card = Arc::from("{}");
    replica.probed(Readiness::Ready { served, card }, 0);
}

fn job(gateway: &Arc<Gateway>, pool: &Arc<Pool>) -> Job {
    Job {
        gateway: gateway.clone(),
        config: gateway.runtime.load().config.clone(),
        pool: pool.clone(),
        set: gateway.policies.current(),
        method: Method::POST,
        path_and_query: PathAndQuery::from_static("/v1/chat/completions"),
        headers: HeaderMap::new(),
        body: Body::Json(Bytes::from_static(b"{}")),
        dialect: Dialect::Chat,
        asked_name: "m".into(),
        facts: Facts::default(),
        asked: Asked::default(),
        prompt: PromptHashes::of(&[]),
        tenant: "t".into(),
        weight: 1.0,
        flow: None,
        band_hint: None,
        band: band::unlisted("only".into()),
        queue_ttl: None,
        ahead: None,
        seed: 0,
        needs_usage: false,
        debug: false,
        committed: None,
        record: None,
        reservation: None,
    }
}

type Placed = Result<(Chosen, Permit), Failure>;

fn poll(placing: std::pin::Pin<&mut impl Future<Output = Placed>>) -> Poll<Placed> {
    placing.poll(&mut Context::from_waker(Waker::noop()))
}

/// Somebody else's request, which has a replica's only slot.
fn takes_the_slot(job: &Job) -> Permit {
    let chosen = super::choose(job, &[]).expect("a replica is open");
    match job.pool.queues.enter(&job.arrival(&chosen, false)) {
        Entered::Now(permit) => permit,
        _ => panic!("the slot is free"),
    }
}

fn ends(replica: &Arc<Replica>, fault: Fault) {
    let mut admitted = replica.admit(clock::now_ms()).expect("it is open");
    admitted.fault(fault);
}

#[tokio::test]
async fn a_request_whose_turn_came_as_the_replica_failed_waits_for_its_trial_like_the_others() {
    let gateway = gateway();
    let pool = pool(&gateway, MODELS);
    let only = &pool.replicas[0];
    is_ready(only);
    let mut waits = job(&gateway, &pool);
    let other = takes_the_slot(&waits);
    let mut placing = pin!(place(&mut waits, &[]));
    assert!(poll(placing.as_mut()).is_pending());
    // The slot is its own now, and before it looks the breaker opens.
    drop(other);
    ends(only, Fault::Connect);
    assert!(poll(placing.as_mut()).is_pending());
    let placed = tokio::time::timeout(PATIENCE, placing).await;
    let placed = placed.expect("it is over in time");
    let (chosen, _permit) = placed.expect("the trial is its own");
    assert!(chosen.admitted.is_trial());
}

#[tokio::test]
async fn a_trial_that_has_to_wait_is_given_up_for_a_replica_that_opened_as_it_was_chosen() {
    let gateway = gateway();
    let pool = pool(&gateway, TWO);
    let (hung, other) = (&pool.replicas[0], &pool.replicas[1]);
    is_ready(hung);
    let mut waits = job(&gateway, &pool);
    let _hangs = takes_the_slot(&waits);
    ends(hung, Fault::IdleTimeout);
    while hung.standing(clock::now_ms()) != Standing::Trial {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let opens = other.clone();
    meanwhile::at(Point::Chosen, move || is_ready(&opens));
    let mut placing = pin!(place(&mut waits, &[]));
    let Poll::Ready(Ok((chosen, _permit))) = poll(placing.as_mut()) else {
        panic!("it waits for the one that hangs");
    };
    assert!(Arc::ptr_eq(&chosen.admitted.replica, other));
    assert_eq!(hung.standing(clock::now_ms()), Standing::Trial);
}

#[tokio::test]
async fn a_reload_at_the_moment_when_a_request_begins_to_wait_for_a_replica_is_seen() {
    let gateway = gateway();
    gateway.apply(config(MODELS));
    let pool = pool_of(&gateway);
    let mut waits = job(&gateway, &pool);
    let reloaded = gateway.clone();
    meanwhile::at(Point::Listening, move || {
        reloaded.apply(config(&MODELS.replace(":9'", ":10'")));
        is_ready(&pool_of(&reloaded).replicas[0]);
    });
    let mut placing = pin!(place(&mut waits, &[]));
    let Poll::Ready(Ok((chosen, _permit))) = poll(placing.as_mut()) else {
        panic!("it waits for a replica that is gone");
    };
    assert_eq!(*chosen.admitted.replica.id, *"127.0.0.1:10");
}

#[test]
fn the_time_that_is_left_is_the_shorter_of_two_that_both_run() {
    let s = Duration::from_secs;
    for (most, without, own, left) in [
        (s(5), s(0), None, s(5)),
        (s(5), s(2), None, s(3)),
        (s(5), s(6), None, s(0)),
        (s(10), s(0), Some(s(4)), s(4)),
        // Its own 4 s have shrunk to 2 meanwhile, and are not shortened again by the 2 that passed.
        (s(10), s(2), Some(s(2)), s(2)),
        (s(10), s(9), Some(s(60)), s(1)),
        (s(10), s(2), Some(s(0)), s(0)),
    ] {
        let found = left_without_replica(most, without, own);
        assert_eq!(found, left, "{most:?} {without:?} {own:?}");
    }
}
