//! How many requests of one model wait in each band: counted exactly, so that a bound is one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::HashMap;

/// The waiting requests of one model by band. Shared by the pools of that model over reloads.
#[derive(Default)]
pub struct Queues {
    by_band: Mutex<HashMap<Arc<str>, u32>>,
}

/// One request's place in a queue; given back when dropped.
pub struct Place {
    queues: Arc<Queues>,
    band: Arc<str>,
}

impl Queues {
    /// Takes a place, or says that the band has as many already as it may. Looked at and taken in one step.
    pub fn enter(self: &Arc<Self>, band: &Arc<str>, queue_max: u32) -> Option<Place> {
        let mut by_band = self.lock();
        let waiting = by_band.entry(band.clone()).or_insert(0);
        if *waiting >= queue_max {
            return None;
        }
        *waiting += 1;
        Some(Place {
            queues: self.clone(),
            band: band.clone(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, u32>> {
        self.by_band.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut by_band = self.queues.lock();
        if let Some(waiting) = by_band.get_mut(&self.band) {
            *waiting -= 1;
            // A band that a policy no longer has leaves nothing behind.
            if *waiting == 0 {
                by_band.remove(&self.band);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_band_refuses_and_leaves_the_others_their_places() {
        let queues = Arc::new(Queues::default());
        let (batch, standard): (Arc<str>, Arc<str>) = ("batch".into(), "standard".into());
        let first = queues.enter(&batch, 2).unwrap();
        let _second = queues.enter(&batch, 2).unwrap();
        assert!(queues.enter(&batch, 2).is_none());
        assert!(queues.enter(&standard, 1).is_some());
        drop(first);
        assert!(queues.enter(&batch, 2).is_some());
    }

    #[test]
    fn the_bound_is_exact_whoever_comes_at_the_same_time_and_nothing_stays_behind() {
        let queues = Arc::new(Queues::default());
        let band: Arc<str> = "standard".into();
        let places: Vec<Place> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| (0..100).filter_map(|_| queues.enter(&band, 250)).collect())
                })
                .collect();
            let taken = threads.into_iter().map(|thread| thread.join().unwrap());
            taken
                .collect::<Vec<Vec<Place>>>()
                .into_iter()
                .flatten()
                .collect()
        });
        assert_eq!(places.len(), 250);
        drop(places);
        assert!(queues.lock().is_empty());
    }
}
