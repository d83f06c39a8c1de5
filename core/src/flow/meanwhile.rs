//! For tests of races: what another thread does between two steps, done by this one at that very point.

use std::cell::RefCell;

/// Where something may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// A replica is chosen for a request, which does not wait for it yet.
    Chosen,
    /// A request is queued, and not counted yet.
    Queued,
    /// A request that waits for any replica listens to changes and has not looked yet.
    Listening,
    /// A permit is dropped, and its slot not given back yet.
    Releasing,
}

type Happens = Box<dyn FnOnce()>;

thread_local! {
    static NEXT: RefCell<Option<(Point, Happens)>> = const { RefCell::new(None) };
}

/// Has something happen once, when this thread comes to a point.
pub fn at(point: Point, happens: impl FnOnce() + 'static) {
    NEXT.set(Some((point, Box::new(happens))));
}

/// The point.
pub fn reached(point: Point) {
    let next = NEXT.with_borrow_mut(|next| next.take_if(|(at, _)| *at == point));
    if let Some((_, happens)) = next {
        happens();
    }
}
