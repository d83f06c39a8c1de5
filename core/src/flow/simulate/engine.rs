//! One engine: it reads prompts one after the other, and generates for all that it has read.

use std::collections::VecDeque;

use super::plan::ReplicaPlan;

/// A request, by its place in the run.
pub type RequestId = usize;

/// What an engine has at work. How much is sent to it is decided elsewhere.
pub struct Engine {
    pub plan: ReplicaPlan,
    pub is_up: bool,
    /// The prompt that it reads now, and those that it has yet to read.
    unread: VecDeque<RequestId>,
    /// Requests that it generates for.
    streams: u32,
}

impl Engine {
    pub fn new(plan: ReplicaPlan) -> Engine {
        Engine {
            plan,
            is_up: true,
            unread: VecDeque::new(),
            streams: 0,
        }
    }

    /// A prompt comes. True: it is read at once.
    pub fn send(&mut self, request: RequestId) -> bool {
        self.unread.push_back(request);
        self.unread.len() == 1
    }

    /// A prompt was read, and is answered from now on. Returns the next to read.
    pub fn read(&mut self) -> Option<RequestId> {
        self.unread.pop_front();
        self.streams += 1;
        self.unread.front().copied()
    }

    /// A request whose prompt was read is over.
    pub fn ended(&mut self) {
        self.streams -= 1;
    }

    /// A request leaves before its prompt was read. Returns the next to read, where it was being read.
    pub fn forget(&mut self, request: RequestId) -> Option<RequestId> {
        let was_first = self.unread.front() == Some(&request);
        self.unread.retain(|other| *other != request);
        self.unread.front().copied().filter(|_| was_first)
    }

    pub fn prompt_us(&self, tokens: u64) -> u64 {
        (tokens as f64 * self.plan.ms_per_prefill_token * 1e3) as u64
    }

    /// How long so many tokens of one stream take, as many streams as there are now.
    pub fn tokens_us(&self, tokens: u64) -> u64 {
        let others = f64::from(self.streams.saturating_sub(1));
        let step_ms = self.plan.ms_per_decode_step + others * self.plan.ms_per_other_stream;
        (tokens as f64 * step_ms * 1e3) as u64
    }
}
