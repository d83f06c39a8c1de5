//! What a replica tells those who wait for it.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use super::{Fault, Readiness, Replica};
use crate::clock;
use crate::config::{Endpoint, EngineUrl, Labels};
use crate::flow::queues::Queues;
use crate::flow::slots::Slots;
use crate::routing::breaker::BREAKER_FAULTS_MAX;
use crate::routing::prefix::PrefixIndex;

fn replica() -> Arc<Replica> {
    let endpoint = Endpoint {
        url: EngineUrl::parse("http://127.0.0.1:9").expect("it is one"),
        engine: "openai".to_owned(),
        slots: Some(1),
        api_key: None,
        serves: None,
        labels: Labels::default(),
    };
    Replica::new(
        endpoint,
        Arc::default(),
        vec!["m".into()],
        Duration::from_secs(1),
        Slots::new(Some(1)),
        PrefixIndex::new(1).join(),
        Queues::new(&[]),
    )
}

#[test]
fn a_breaker_that_a_probe_closes_is_news_to_those_who_wait_though_it_was_ready_all_along() {
    let replica = replica();
    let ready = Readiness::Ready {
        served: "m".into(),
        card: "{}".into(),
    };
    assert!(replica.probed(ready.clone(), 0));
    for _ in 0..BREAKER_FAULTS_MAX {
        let mut admitted = replica.admit(clock::now_ms()).expect("it is closed");
        admitted.fault(Fault::Reset);
    }
    assert!(replica.admit(clock::now_ms()).is_none());
    let mut changed = pin!(replica.queues.changed.notified());
    assert!(!changed.as_mut().enable());
    assert!(!replica.probed(ready.clone(), clock::now_ms()), "as before");
    assert!(changed.as_mut().enable(), "nobody was told");
    assert!(replica.admit(clock::now_ms()).is_some());
    // The next one brings no news at all.
    let mut changed = pin!(replica.queues.changed.notified());
    changed.as_mut().enable();
    replica.probed(ready, clock::now_ms());
    assert!(!changed.as_mut().enable());
}
