//! The VMs of one policy set: made ready before a request needs one, kept by the threads that use them.
//!
//! Building a VM and running its files takes half a millisecond, a hundred times what a hook takes. So a set is published
//! with a VM on its shelf for every thread that serves requests; a thread takes one at its first request of that generation
//! and keeps it. What a thread has no place for goes back to the shelf of its set, for as long as that set is pinned by a
//! request; what is broken or left over is freed by the keeper, a thread of its own, which also puts spare VMs on the shelf.

use std::cell::RefCell;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use crate::error::{ErrorKind, Fault};
use crate::hooks::Hook;
use crate::vm::sandbox::Program;
use crate::vm::{FileLines, Injected, Vm, injected};

/// VMs that a thread keeps: the current generation's, and one more for requests that began under the previous one.
const THREAD_VMS_MAX: usize = 2;
/// VMs on the shelf beyond one for each thread, and of a generation that is not in force any more: for a VM that ran out of
/// memory, or for a request that went to a thread that had no VM of its generation.
const SPARES: usize = 1;
/// Errands of the keeper that may wait; whoever has one more does it itself.
const ERRANDS_MAX: usize = 256;

thread_local! {
    /// This thread's VMs, in the order in which it got them: generations come and go in that order, too.
    static VMS: RefCell<Vec<Kept>> = const { RefCell::new(Vec::new()) };
    /// Lines that VMs had run, of those that are gone, with the ids of their policy sets; only where lines are counted.
    static LINES_RUN: RefCell<Vec<(u64, FileLines)>> = const { RefCell::new(Vec::new()) };
}

/// A VM of this thread.
struct Kept {
    set: u64,
    stock: Weak<Stock>,
    vm: Box<Vm>,
}

/// A function that requests' threads call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Serving {
    /// Of a policy file.
    Policy(Hook),
    /// Of an engine's plugin.
    Engine(String, Hook),
}

/// Which thread asks for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Thread {
    /// It serves requests: it takes a VM from the shelf.
    Serves,
    /// Ticks, decisions, tools: it builds its own, so that the shelf is for those who may not wait.
    Waits,
}

/// The VMs of one policy set that no thread has.
pub(crate) struct Stock {
    set: u64,
    program: Arc<Program>,
    serving: Vec<Serving>,
    shelf: Mutex<Shelf>,
}

#[derive(Default)]
struct Shelf {
    ready: Vec<Parcel>,
    /// So many may lie there; 0 until the set is about to be published.
    room: usize,
}

impl Shelf {
    /// It has fewer than `count` VMs, and room for one more.
    fn lacks(&self, count: usize) -> bool {
        self.ready.len() < count.min(self.room)
    }
}

/// A VM on its way from one thread to another.
struct Parcel(Box<Vm>);

// SAFETY: What keeps a VM from being `Send` are the `Rc`s in it: mlua's, those of its sandbox and those that its functions
// hold. All of them point into the same VM, none is handed out of `Vm`, and a parcel has the whole of it, so that no other
// thread can touch one of their counters. mlua and Luau keep nothing of a VM in thread-local storage.
unsafe impl Send for Parcel {}

impl std::fmt::Debug for Stock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ready = self.shelf().ready.len();
        f.debug_struct("Stock").field("ready", &ready).finish()
    }
}

impl Stock {
    /// Of a set with this id. Nothing is built before [`Stock::fill`].
    pub(crate) fn new(set: u64, program: Arc<Program>, serving: Vec<Serving>) -> Arc<Stock> {
        Arc::new(Stock {
            set,
            program,
            serving,
            shelf: Mutex::default(),
        })
    }

    /// Puts a VM for each of so many threads on the shelf, and the spare ones. Takes a millisecond a VM or less.
    pub(crate) fn fill(&self, threads: usize) {
        if self.serving.is_empty() {
            return;
        }
        keeper();
        let room = threads + SPARES;
        self.shelf().room = room;
        self.build(room);
    }

    /// The set is not in force any more: only spare VMs stay, for requests that began under it.
    pub(crate) fn retire(&self) {
        let mut shelf = self.shelf();
        shelf.room = shelf.room.min(SPARES);
        let keep = shelf.room.min(shelf.ready.len());
        let left_over = shelf.ready.split_off(keep);
        drop(shelf);
        drop(left_over);
    }

    /// Builds until so many are there.
    fn build(&self, count: usize) {
        while self.shelf().lacks(count) {
            match Vm::new(Arc::clone(&self.program)) {
                Ok(mut vm) => {
                    vm.warm_up(&self.serving);
                    self.shelf().ready.push(Parcel(Box::new(vm)));
                }
                Err(fault) => {
                    // A request then builds its own, or says why it can't.
                    tracing::warn!("a VM can't be made ready: {fault}");
                    return;
                }
            }
        }
    }

    fn take(self: &Arc<Self>) -> Option<Box<Vm>> {
        let mut shelf = self.shelf();
        let Parcel(vm) = shelf.ready.pop()?;
        let few = shelf.ready.len() < SPARES;
        drop(shelf);
        if few {
            send(Errand::Refill(Arc::downgrade(self)));
        }
        Some(vm)
    }

    /// Takes a VM back if there is room for it.
    fn give_back(&self, parcel: Parcel) -> Result<(), Parcel> {
        let mut shelf = self.shelf();
        if shelf.ready.len() >= shelf.room {
            return Err(parcel);
        }
        shelf.ready.push(parcel);
        Ok(())
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        // A list and a number, each changed in one go.
        self.shelf
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Runs `work` in this thread's VM of the set. A VM that ran out of memory, or holds too much, is dropped afterwards:
    /// the next call gets a new one.
    pub(crate) fn with_vm<R>(
        self: &Arc<Self>,
        thread: Thread,
        work: impl FnOnce(&mut Vm) -> Result<R, Fault>,
    ) -> Result<R, Fault> {
        VMS.with_borrow_mut(|vms| {
            let at = match vms.iter().position(|kept| kept.set == self.set) {
                Some(at) => at,
                None => {
                    let kept = self.first_use(thread)?;
                    if vms.len() == THREAD_VMS_MAX {
                        put_away(vms.remove(0));
                    }
                    vms.push(kept);
                    vms.len() - 1
                }
            };
            let vm = &mut vms[at].vm;
            vm.injected = injected(self.set);
            let result = work(vm);
            let out_of_memory = matches!(&result, Err(fault) if fault.kind == ErrorKind::Memory)
                && vm.injected == Injected(0);
            if out_of_memory || vm.is_unusable() {
                free(vms.remove(at));
            }
            result
        })
    }

    fn first_use(self: &Arc<Self>, thread: Thread) -> Result<Kept, Fault> {
        let ready = match thread {
            Thread::Serves => self.take(),
            Thread::Waits => None,
        };
        let vm = match ready {
            Some(vm) => vm,
            None => Box::new(Vm::new(Arc::clone(&self.program))?),
        };
        Ok(Kept {
            set: self.set,
            stock: Arc::downgrade(self),
            vm,
        })
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        // The last one to hold a set may be a request.
        for parcel in std::mem::take(&mut self.shelf().ready) {
            send(Errand::Free(parcel));
        }
    }
}

/// A good VM that a thread has no place for.
fn put_away(kept: Kept) {
    match kept.stock.upgrade() {
        Some(stock) => {
            keep_lines_run(kept.set, &kept.vm);
            if let Err(parcel) = stock.give_back(Parcel(kept.vm)) {
                send(Errand::Free(parcel));
            }
        }
        None => free(kept),
    }
}

/// A VM that nobody will use again.
fn free(kept: Kept) {
    keep_lines_run(kept.set, &kept.vm);
    send(Errand::Free(Parcel(kept.vm)));
}

/// Which lines this thread's VMs of a policy set have run, by file; one VM after the other.
pub(crate) fn lines_run(set: u64) -> Vec<FileLines> {
    let mut files: Vec<FileLines> = LINES_RUN.with_borrow(|kept| {
        let own = kept.iter().filter(|(id, _)| *id == set);
        own.map(|(_, lines)| lines.clone()).collect()
    });
    VMS.with_borrow(|vms| {
        let kept = vms.iter().find(|kept| kept.set == set);
        files.extend(kept.map(|kept| kept.vm.lines_run()).unwrap_or_default());
    });
    files
}

/// Before a VM goes.
fn keep_lines_run(set: u64, vm: &Vm) {
    let lines = vm.lines_run();
    LINES_RUN.with_borrow_mut(|kept| kept.extend(lines.into_iter().map(|lines| (set, lines))));
}

/// What a request's thread leaves to the keeper.
enum Errand {
    /// Put the spare VMs on a shelf again.
    Refill(Weak<Stock>),
    /// Free what a VM holds, up to [`VM_MAX_BYTES`](crate::VM_MAX_BYTES).
    Free(Parcel),
    /// Say so once all errands before this one are done.
    #[cfg(test)]
    Report(SyncSender<()>),
}

static KEEPER: OnceLock<SyncSender<Errand>> = OnceLock::new();

/// The way to the keeper, which is started at the first call; not for a request's thread.
fn keeper() -> &'static SyncSender<Errand> {
    KEEPER.get_or_init(|| {
        let (errands, received) = sync_channel(ERRANDS_MAX);
        let started = std::thread::Builder::new()
            .name("policy-vms".to_owned())
            .spawn(move || keep(&received));
        if let Err(e) = started {
            tracing::warn!("requests' threads free VMs themselves, since there is no other: {e}");
        }
        errands
    })
}

fn keep(errands: &Receiver<Errand>) {
    while let Ok(errand) = errands.recv() {
        match errand {
            Errand::Refill(stock) => {
                if let Some(stock) = stock.upgrade() {
                    stock.build(SPARES);
                }
            }
            Errand::Free(parcel) => drop(parcel),
            #[cfg(test)]
            Errand::Report(to) => drop(to.send(())),
        }
    }
}

/// An errand that can't be sent is one that can be missed, or a VM that is freed here.
fn send(errand: Errand) {
    if let Some(keeper) = KEEPER.get() {
        let _ = keeper.try_send(errand);
    }
}

#[cfg(test)]
mod tests;
