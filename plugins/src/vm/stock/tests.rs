//! No thread that serves requests builds a VM: counted, not timed.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Barrier, mpsc};
use std::thread;

use super::*;
use crate::hooks::views::{ReplicaView, RequestView, TenantView};
use crate::set::PolicySet;
use crate::set::reload::{Policies, PolicyOptions, serving_threads};
use crate::vm::built;

const GENERATIONS: u64 = 6;

/// Policies whose hooks say which generation they are; `exhaust` as the session makes one run out of memory.
struct Fleet {
    dir: PathBuf,
    policies: Arc<Policies>,
}

impl Fleet {
    fn new() -> Fleet {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-stock-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        save(&dir, 1);
        let options = PolicyOptions {
            dir: Some(dir.clone()),
            state: None,
        };
        let policies = Policies::open(options).unwrap();
        Fleet { dir, policies }
    }

    fn reload(&self, generation: u64) {
        save(&self.dir, generation);
        let set = self.policies.reload().unwrap();
        assert_eq!(set.generation(), generation);
    }

    /// The sets of generations 1 to `count`.
    fn generations(&self, count: u64) -> Vec<Arc<PolicySet>> {
        let mut sets = vec![self.policies.current()];
        for generation in 2..=count {
            self.reload(generation);
            sets.push(self.policies.current());
        }
        sets
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn save(dir: &std::path::Path, generation: u64) {
    let admission = format!(
        "local M = {{ api = 1 }}\nfunction M.key(request)\n  if request.session == 'exhaust' then return ('x'):rep(1e9) end\n  return 'g{generation}'\nend\nreturn M\n"
    );
    std::fs::write(dir.join("fairness.lua"), admission).unwrap();
    let routing = "local M = { api = 1 }\nfunction M.rank(_, replicas, n) return n, 'g' .. llmgw.generation end\nreturn M\n";
    std::fs::write(dir.join("routing.lua"), routing).unwrap();
}

/// What a request of this set gets, from both of its hooks.
fn request(set: &PolicySet) -> [String; 2] {
    let replica = ReplicaView {
        id: "a",
        ..ReplicaView::default()
    };
    let key = set.key(&RequestView::default(), &TenantView::default());
    let ranked = set.rank(&RequestView::default(), &[replica]).unwrap();
    [key.unwrap(), ranked.reason.unwrap()]
}

fn answer(generation: u64) -> [String; 2] {
    [(); 2].map(|()| format!("g{generation}"))
}

fn exhaust(set: &PolicySet) {
    let exhausting = RequestView {
        session: Some("exhaust"),
        ..RequestView::default()
    };
    assert_eq!(set.key(&exhausting, &TenantView::default()), None);
}

/// Waits until the keeper has done what it was asked for.
fn wait_for_keeper() {
    let (done, is_done) = mpsc::sync_channel(1);
    keeper().send(Errand::Report(done)).unwrap();
    is_done.recv().unwrap();
}

#[test]
fn no_thread_that_serves_builds_a_vm_over_many_reloads() {
    let fleet = Fleet::new();
    let threads = serving_threads();
    let turn = Barrier::new(threads + 1);
    thread::scope(|scope| {
        let serve = || {
            let mut pinned: Option<Arc<PolicySet>> = None;
            for generation in 1..=GENERATIONS {
                turn.wait();
                let set = fleet.policies.current();
                assert_eq!(request(&set), answer(generation));
                if let Some(pinned) = &pinned {
                    let before = generation - 1;
                    assert_eq!(request(pinned), answer(before), "it began before the swap");
                }
                pinned = Some(set);
                turn.wait();
            }
            built()
        };
        let serving: Vec<_> = (0..threads).map(|_| scope.spawn(serve)).collect();
        for generation in 1..=GENERATIONS {
            if generation > 1 {
                fleet.reload(generation);
            }
            turn.wait();
            turn.wait();
        }
        for thread in serving {
            assert_eq!(thread.join().unwrap(), 0, "VMs built, or files run in them");
        }
    });
}

#[test]
fn a_set_that_nobody_made_ready_is_built_by_the_thread_that_asks() {
    let fleet = Fleet::new();
    let set = fleet.policies.current();
    set.stock.shelf().ready.clear();
    let built = thread::scope(|scope| {
        let serve = || {
            assert_eq!(request(&set), answer(1));
            built()
        };
        scope.spawn(serve).join().unwrap()
    });
    assert_eq!(built, 3, "one VM, and the files of its two hooks");
}

#[test]
fn a_vm_that_ran_out_of_memory_is_replaced_by_a_spare_one() {
    let fleet = Fleet::new();
    let set = fleet.policies.current();
    thread::scope(|scope| {
        let serve = || {
            for _ in 0..5 {
                assert_eq!(request(&set), answer(1));
                exhaust(&set);
                wait_for_keeper();
            }
            assert_eq!(request(&set), answer(1));
            built()
        };
        assert_eq!(scope.spawn(serve).join().unwrap(), 0);
    });
}

#[test]
fn requests_pinned_to_more_generations_than_a_thread_has_vms_for_cost_no_build() {
    let fleet = Fleet::new();
    let sets = fleet.generations(GENERATIONS);
    thread::scope(|scope| {
        let serve = || {
            for _ in 0..3 {
                for (set, generation) in sets.iter().zip(1..) {
                    assert_eq!(request(set), answer(generation));
                }
            }
            built()
        };
        assert_eq!(scope.spawn(serve).join().unwrap(), 0);
    });
}

#[test]
fn a_generation_that_a_person_goes_back_to_is_ready_on_all_threads() {
    let fleet = Fleet::new();
    let sets = fleet.generations(4);
    let threads = serving_threads();
    fleet.policies.pin(Some(1)).unwrap();
    thread::scope(|scope| {
        let serve = || {
            assert_eq!(request(&fleet.policies.current()), answer(1));
            built()
        };
        let serving: Vec<_> = (0..threads).map(|_| scope.spawn(serve)).collect();
        for thread in serving {
            assert_eq!(thread.join().unwrap(), 0);
        }
    });
    drop(sets);
}

#[test]
fn generations_that_are_over_keep_spare_vms_only() {
    let fleet = Fleet::new();
    let sets = fleet.generations(GENERATIONS);
    let ready: Vec<usize> = sets
        .iter()
        .map(|set| set.stock.shelf().ready.len())
        .collect();
    let (current, over) = ready.split_last().unwrap();
    assert_eq!(*current, serving_threads() + SPARES);
    assert_eq!(over, [SPARES; GENERATIONS as usize - 1]);
}

#[test]
fn the_embedded_policies_are_ready_for_what_their_engines_define() {
    let set = PolicySet::built_in();
    set.stock.fill(1);
    let body = br#"{"error":"image input is not supported"}"#;
    thread::scope(|scope| {
        let serve = || {
            let class = set.classify_error("llamacpp", 500, body);
            assert_eq!(class, crate::ErrorClass::ClientFault);
            built()
        };
        assert_eq!(scope.spawn(serve).join().unwrap(), 0);
    });
}
