//! Replicas that the control plane starts, in the gateway's pools.

use std::path::Path;
use std::sync::Arc;

use llmgw_plugins::{Policies, PolicyOptions, RequestView};
use tokio::net::TcpListener;

use super::Fleet;
use crate::config::{self, Agents, Config, Endpoint, EngineUrl, Labels, Secret, UtcTime};
use crate::control::controller::Serving;
use crate::control::enrolment::tests::{Fake, State};
use crate::control::enrolment::{IssueError, LIFETIME_DEFAULT};
use crate::control::observed::Timing;
use crate::control::sessions::{Door, Sessions, SessionsOptions};
use crate::flow::slots::Room;
use crate::gateway::state::Gateway;
use crate::routing::fleet::Started;
use crate::routing::locality::{Locality, Placed};
use crate::routing::outlook::Outlook;
use crate::routing::pool::{Asked, Pool, Unavailable};
use crate::routing::prefix::PromptHashes;
use crate::telemetry::{Telemetry, log};

// Nothing listens there: what is tested is who is in the pool, not what engines answer.
const ONE: &str = "127.0.0.1:9";
const TWO: &str = "127.0.0.2:9";
const MODELS: &str = "[{name: m, profiles: [{name: p, engine: llamacpp, cpus: 4}]}, \
                      {name: fixed, endpoints: [{url: 'http://127.0.0.3:9'}]}]";

fn parse(models: &str) -> Config {
    let text = format!("models: {models}\n");
    config::parse(Path::new("llmgw.yaml"), text, &|_| None).expect("it is one")
}

fn gateway() -> Arc<Gateway> {
    let policies = Policies::open(PolicyOptions::default()).expect("the built-in ones load");
    let telemetry = Telemetry::start(log::LogFormat::Text);
    Gateway::new(parse(MODELS), policies, telemetry)
}

fn endpoint(address: &str, key: &str) -> Endpoint {
    Endpoint {
        url: EngineUrl::parse(&format!("http://{address}")).expect("it is one"),
        engine: "llamacpp".to_owned(),
        slots: Some(2),
        api_key: Some(Secret::new(key)),
        serves: Some("m".to_owned()),
        labels: Labels::default(),
    }
}

fn started(endpoints: &[Endpoint]) -> Arc<Started> {
    started_for("m", endpoints)
}

fn started_for(model: &str, endpoints: &[Endpoint]) -> Arc<Started> {
    let placed = endpoints.iter().map(|endpoint| Placed {
        endpoint: endpoint.clone(),
        locality: Arc::default(),
    });
    Arc::new([(model.to_owned(), placed.collect())].into())
}

fn pool(gateway: &Gateway, model: &str) -> Arc<Pool> {
    gateway
        .runtime
        .load()
        .fleet
        .pool(model)
        .expect("it is there")
        .clone()
}

fn unavailable(gateway: &Gateway, model: &str) -> Unavailable {
    let set = gateway.policies.current();
    let (asked, prompt) = (Asked::default(), PromptHashes::of(&[]));
    let chosen = pool(gateway, model).choose(&asked, &prompt, &[], &set, &RequestView::default());
    chosen.err().expect("no engine is there")
}

#[tokio::test]
async fn a_started_replica_is_an_endpoint_and_stays_the_same_over_changes_around_it() {
    let gateway = gateway();
    gateway.serve(started(&[endpoint(ONE, "k1")]));
    let first = pool(&gateway, "m").replicas[0].clone();
    assert_eq!((&*first.id, first.slots.limit()), (ONE, Some(2)));
    let key = first.authorization().expect("it has a key");
    assert_eq!(key.to_str().expect("it is text"), "Bearer k1");
    assert_eq!(
        first.names.iter().map(|name| &**name).collect::<Vec<_>>(),
        ["m"]
    );
    gateway.serve(started(&[endpoint(TWO, "k2"), endpoint(ONE, "k1")]));
    gateway.apply(parse(MODELS));
    let now = pool(&gateway, "m");
    assert_eq!(now.replicas.len(), 2, "a reload keeps what is started");
    assert!(Arc::ptr_eq(&now.replicas[1], &first));
    assert!(!first.retired.is_cancelled());
    assert_eq!(pool(&gateway, "fixed").replicas.len(), 1);
}

#[tokio::test]
async fn a_node_that_says_something_else_about_itself_changes_nothing_but_what_policies_see() {
    let gateway = gateway();
    let say = |zone: &str| {
        let labels = Labels::new(vec![("zone".to_owned(), zone.to_owned())]);
        let placed = Placed {
            endpoint: endpoint(ONE, "k1"),
            locality: Locality::new(Some("a".to_owned()), None, labels),
        };
        gateway.serve(Arc::new([("m".to_owned(), vec![placed])].into()));
        pool(&gateway, "m").replicas[0].clone()
    };
    let (first, second) = (say("east"), say("west"));
    assert!(Arc::ptr_eq(&first, &second));
    assert_eq!(first.locality().zone.as_deref(), Some("west"));
}

#[tokio::test]
async fn an_endpoint_that_gets_another_label_goes_on_as_it_is() {
    let gateway = gateway();
    let label = |disk: &str| {
        let endpoint = format!("{{url: 'http://{ONE}', labels: {{disk: {disk}}}}}");
        gateway.apply(parse(&format!("[{{name: m, endpoints: [{endpoint}]}}]")));
        pool(&gateway, "m").replicas[0].clone()
    };
    let (first, second) = (label("ssd"), label("nvme"));
    assert!(Arc::ptr_eq(&first, &second));
    let labels = vec![("disk".to_owned(), "nvme".to_owned())];
    assert_eq!(*first.locality().labels, labels);
}

#[tokio::test]
async fn requests_on_a_replica_that_left_are_counted_to_their_end() {
    let gateway = gateway();
    gateway.serve(started(&[endpoint(ONE, "k1")]));
    let replica = pool(&gateway, "m").replicas[0].clone();
    let room = Room {
        inflight_max: 8,
        prefill_max_tokens: 1_000,
    };
    assert!(replica.slots.try_take(1, &room));
    gateway.serve(started(&[]));
    assert!(pool(&gateway, "m").replicas.is_empty());
    assert!(replica.retired.is_cancelled());
    assert_eq!(gateway.requests(ONE), 1);
    replica.slots.give_back();
    assert_eq!(gateway.requests(ONE), 0);
    drop(replica);
    assert_eq!(gateway.requests(TWO), 0);
}

#[tokio::test]
async fn a_model_without_profiles_has_no_started_replicas() {
    let gateway = gateway();
    gateway.serve(started_for("fixed", &[endpoint(ONE, "k")]));
    assert_eq!(pool(&gateway, "fixed").replicas.len(), 1);
}

#[tokio::test]
async fn requests_wait_while_the_server_recovers_and_are_told_the_reason_afterwards() {
    let gateway = gateway();
    let outlook = |recovering, reason: &str| Outlook {
        recovering,
        reason: reason.to_owned(),
    };
    let tell = |outlook| gateway.expect([("m".to_owned(), outlook)].into());
    tell(outlook(true, "agents still report"));
    let told = unavailable(&gateway, "m");
    assert_eq!(
        (told.recovering, &*told.reason),
        (true, "agents still report")
    );
    assert!(
        !unavailable(&gateway, "fixed").recovering,
        "nobody starts anything for it"
    );
    // The change is news to those who wait.
    let pool = pool(&gateway, "m");
    let changed = pool.queues.changed.notified();
    tokio::pin!(changed);
    changed.as_mut().enable();
    tell(outlook(false, "no node has registered"));
    changed.await;
    let told = unavailable(&gateway, "m");
    assert_eq!(
        (told.recovering, &*told.reason),
        (false, "no node has registered")
    );
    gateway.apply(parse(MODELS));
    assert_eq!(unavailable(&gateway, "m").reason, "no node has registered");
}

#[tokio::test]
async fn a_reload_without_agents_ends_enrolment() {
    let (state, authority) = (State::new(), Arc::new(Fake::default()));
    let enrolment = Arc::new(state.server(&authority));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("it is free");
    let options = SessionsOptions::new(Timing::from(&Agents::default()), false);
    let sessions = Sessions::start(listener, Door::Plain, options);
    let fleet = Fleet::over(sessions, enrolment.clone(), &gateway());
    let issue = || enrolment.issue("n1", LIFETIME_DEFAULT, UtcTime::now());
    assert!(issue().is_ok());
    fleet.configured(None);
    assert!(matches!(issue(), Err(IssueError::Off)));
    fleet.sessions.stop().await;
}
