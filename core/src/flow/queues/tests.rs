//! Queues and those who make room at the same moment.

use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use llmgw_plugins::BandSpec;

use super::{Entered, Place, Queues, Turn};
use crate::clock;
use crate::flow::dispatch::{Arrival, Size};
use crate::flow::lane::LaneFacts;
use crate::flow::meanwhile::{self, Point};
use crate::flow::permit::Permit;
use crate::flow::slots::Slots;
use crate::flow::turns::LaneId;

/// More than an engine may have unread at half a millisecond each.
const LONG_PROMPT: u64 = 5_000;

fn only() -> BandSpec {
    BandSpec {
        name: "only".into(),
        priority: 0.0,
        floor: 0.0,
        max_queue: 100,
        ttl_ms: 60_000,
        shed: None,
    }
}

/// The queues of a model with this engine as its replica.
fn queues(slots: &Arc<Slots>) -> (Arc<Queues>, LaneId) {
    let queues = Queues::new(&[only()]);
    (queues.clone(), open_lane(&queues, slots))
}

fn open_lane(queues: &Queues, slots: &Arc<Slots>) -> LaneId {
    let lane = queues.lane(&"r".into(), slots);
    let facts = LaneFacts {
        open: true,
        ms_per_prefill_token: 0.5,
        kv: None,
    };
    queues.tell([(lane, facts)]);
    lane
}

fn enter(queues: &Queues, lane: LaneId, stay_ms: u64) -> Entered {
    queues.enter(&Arrival {
        band: &only(),
        tenant: &"t".into(),
        weight: 1.0,
        flow: None,
        size: Size {
            input_tokens: LONG_PROMPT,
            todo_tokens: LONG_PROMPT,
            ..Size::default()
        },
        lane,
        goes_first: false,
        stay_until_ms: clock::now_ms() + stay_ms,
    })
}

fn now(entered: Entered) -> Permit {
    match entered {
        Entered::Now(permit) => permit,
        _ => panic!("there is room"),
    }
}

fn waits(entered: Entered) -> Place {
    match entered {
        Entered::Waits(place) => place,
        _ => panic!("there is no room"),
    }
}

fn has_its_turn(place: &mut Place) -> bool {
    let turn = pin!(place.turn());
    let told = turn.poll(&mut Context::from_waker(Waker::noop()));
    matches!(told, Poll::Ready(Turn::Granted(_)))
}

#[test]
fn room_that_is_made_while_a_request_is_queued_is_its_own_though_it_stays_for_its_prefix() {
    for stay_ms in [0, 60_000] {
        let (queues, lane) = queues(&Slots::new(Some(2)));
        let first = Rc::new(RefCell::new(now(enter(&queues, lane, 0))));
        let read = first.clone();
        meanwhile::at(Point::Queued, move || read.borrow_mut().first_byte());
        let mut place = waits(enter(&queues, lane, stay_ms));
        assert!(has_its_turn(&mut place), "stays for {stay_ms} ms");
    }
}

#[test]
fn a_slot_that_is_given_back_goes_to_a_model_that_came_to_the_engine_at_that_moment() {
    let slots = Slots::new(Some(1));
    let (one, lane) = queues(&slots);
    let permit = now(enter(&one, lane, 0));
    let place = Rc::new(RefCell::new(None));
    let came = place.clone();
    meanwhile::at(Point::Releasing, move || {
        let (two, lane) = queues(&slots);
        *came.borrow_mut() = Some(waits(enter(&two, lane, 60_000)));
    });
    drop(permit);
    let mut place = place.take().expect("it came");
    assert!(has_its_turn(&mut place));
}
