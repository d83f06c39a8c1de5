//! One simulation: its events in their order, from the first arrival to the last answer.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::sync::Arc;

use llmgw_plugins::PolicySet;

use super::super::rotation::Ticket;
use super::super::slots::Slots;
use super::engine::{Engine, RequestId};
use super::outcome::{Outcome, Tally};
use super::plan::{Load, Plan, Span};
use super::policy::{Account, Ask, Policy};
use super::queueing::{Discipline, Queueing};
use super::request::{End, Request, State, candidate};
use crate::routing::score::{Candidate, SplitMix};

/// The step of all ticks, and after how many each is due: as in the server.
const STEP_US: u64 = 50_000;
const ROUTING_STEPS: u64 = 2;
const ADMISSION_STEPS: u64 = 5;
const FAIRNESS_STEPS: u64 = 20;
/// Clients begin within this time, not all at once.
const BEGIN_US: u64 = 200_000;

/// A simulation had more events than its plan lets it have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLong {
    pub events_max: u64,
    /// How far it had come.
    pub ms: u64,
}

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "more than {} events, after {} ms: simulate fewer requests, a shorter time, or shorter answers",
            self.events_max, self.ms
        )
    }
}

impl std::error::Error for TooLong {}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// A client of a tenant asks.
    Comes {
        tenant: usize,
    },
    /// The next request of the trace.
    Recorded,
    /// A prompt was read.
    Read {
        request: RequestId,
        stage: u32,
    },
    /// Some tokens came.
    Tokens {
        request: RequestId,
        stage: u32,
    },
    /// It waited for as long as it may.
    Expires {
        request: RequestId,
        stage: u32,
    },
    Leaves {
        request: RequestId,
    },
    Dies {
        replica: usize,
    },
    Returns {
        replica: usize,
    },
    Tick {
        step: u64,
    },
}

impl Event {
    fn brings_more(self) -> bool {
        matches!(self, Event::Comes { .. } | Event::Recorded)
    }
}

/// A simulation under way.
pub(super) struct Run<'a> {
    pub(super) plan: &'a Plan,
    pub(super) discipline: Discipline,
    pub(super) policy: Policy<'a>,
    pub(super) accounts: Vec<Account>,
    pub(super) engines: Vec<Engine>,
    pub(super) slots: Vec<Arc<Slots>>,
    pub(super) queueing: Queueing,
    pub(super) requests: Vec<Request>,
    pub(super) waiting: HashMap<Ticket, RequestId>,
    pub(super) events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// Events so far; breaks ties among those of one moment.
    pub(super) count: u64,
    pub(super) now_us: u64,
    pub(super) random: SplitMix,
    pub(super) next_recorded: usize,
    /// Requests that are not over.
    pub(super) active: usize,
    /// Events that may bring more of them.
    pub(super) coming: usize,
    pub(super) tenants: Vec<Tally>,
    pub(super) bands: Vec<(Arc<str>, Tally)>,
}

/// Runs a plan under a policy set, to its end.
pub fn simulate(plan: &Plan, set: &PolicySet, discipline: Discipline) -> Result<Outcome, TooLong> {
    let mut run = Run::new(plan, set, discipline);
    run.all()?;
    Ok(run.outcome())
}

impl<'a> Run<'a> {
    pub(super) fn new(plan: &'a Plan, set: &'a PolicySet, discipline: Discipline) -> Run<'a> {
        let engines: Vec<Engine> = plan.replicas.iter().cloned().map(Engine::new).collect();
        let slots: Vec<Arc<Slots>> = plan
            .replicas
            .iter()
            .map(|replica| Slots::new(Some(replica.slots)))
            .collect();
        let places: Vec<(Arc<Slots>, f64)> = engines
            .iter()
            .zip(&slots)
            .map(|(engine, slots)| (slots.clone(), engine.plan.ms_per_prefill_token))
            .collect();
        let policy = Policy::new(set, &candidates(&engines, &slots));
        let mut bands = policy.bands.clone();
        bands.sort_by(|left, right| right.priority.total_cmp(&left.priority));
        let mut run = Run {
            queueing: Queueing::new(discipline, &policy.bands, &policy.gate, &places),
            plan,
            discipline,
            policy,
            accounts: plan.tenants.iter().map(Account::new).collect(),
            engines,
            slots,
            requests: Vec::new(),
            waiting: HashMap::new(),
            events: BinaryHeap::new(),
            count: 0,
            now_us: 0,
            random: SplitMix(plan.seed),
            next_recorded: 0,
            active: 0,
            coming: 0,
            tenants: vec![Tally::default(); plan.tenants.len()],
            bands: bands
                .into_iter()
                .map(|band| (band.name, Tally::default()))
                .collect(),
        };
        run.begin();
        run
    }

    fn begin(&mut self) {
        for (tenant, plan) in self.plan.tenants.iter().enumerate() {
            match plan.load {
                Load::Clients { count, .. } => (0..count).for_each(|_| {
                    let after = self.random.below(BEGIN_US as usize) as u64;
                    self.after(after, Event::Comes { tenant });
                }),
                Load::Rate { .. } => self.comes_later(tenant),
                Load::Recorded => {}
            }
        }
        if let Some(first) = self.plan.recorded.first() {
            self.after(first.at_us, Event::Recorded);
        }
        for (replica, plan) in self.plan.replicas.iter().enumerate() {
            if let Some(ms) = plan.dies_ms {
                self.after(ms * 1_000, Event::Dies { replica });
            }
            if let Some(ms) = plan.returns_ms {
                self.after(ms * 1_000, Event::Returns { replica });
            }
        }
        self.after(STEP_US, Event::Tick { step: 1 });
    }

    pub(super) fn all(&mut self) -> Result<(), TooLong> {
        let end_us = self.plan.end_ms.map_or(u64::MAX, |ms| ms * 1_000);
        while let Some(Reverse((at_us, _, event))) = self.events.pop() {
            if at_us > end_us {
                break;
            }
            self.now_us = at_us;
            if self.count > self.plan.events_max {
                return Err(TooLong {
                    events_max: self.plan.events_max,
                    ms: self.now_ms(),
                });
            }
            self.happens(event);
            if self.active == 0 && self.coming == 0 {
                break;
            }
        }
        Ok(())
    }

    fn happens(&mut self, event: Event) {
        self.coming -= usize::from(event.brings_more());
        match event {
            Event::Comes { tenant } => self.comes(tenant),
            Event::Recorded => self.recorded(),
            Event::Read { request, stage } if self.is_in(request, stage) => self.read(request),
            Event::Tokens { request, stage } if self.is_in(request, stage) => self.tokens(request),
            Event::Expires { request, stage } if self.is_in(request, stage) => {
                self.end(request, End::TimedOut);
            }
            Event::Read { .. } | Event::Tokens { .. } | Event::Expires { .. } => {}
            Event::Leaves { request } => {
                if !matches!(self.requests[request].state, State::Over) {
                    self.end(request, End::Left);
                }
            }
            Event::Dies { replica } => self.dies(replica),
            Event::Returns { replica } => self.returns(replica),
            Event::Tick { step } => self.tick(step),
        }
    }

    // Requests.

    fn comes(&mut self, tenant: usize) {
        let plan = &self.plan.tenants[tenant];
        let input_tokens = draw(&mut self.random, plan.input_tokens);
        let output_tokens = draw(&mut self.random, plan.output_tokens);
        if matches!(plan.load, Load::Rate { .. }) {
            self.comes_later(tenant);
        }
        let again = matches!(plan.load, Load::Clients { .. });
        self.admit(tenant, input_tokens, output_tokens, again);
    }

    /// The next one of those that come at random.
    fn comes_later(&mut self, tenant: usize) {
        if let Load::Rate { per_s } = self.plan.tenants[tenant].load
            && self.plan.end_ms.is_some()
        {
            let unit = (self.random.next() >> 11) as f64 / (1u64 << 53) as f64;
            let gap_s = -(1.0 - unit).ln() / per_s;
            self.after((gap_s * 1e6) as u64, Event::Comes { tenant });
        }
    }

    fn recorded(&mut self) {
        let recorded = self.plan.recorded[self.next_recorded];
        self.next_recorded += 1;
        if let Some(next) = self.plan.recorded.get(self.next_recorded) {
            let gap = next.at_us.saturating_sub(self.now_us);
            self.after(gap, Event::Recorded);
        }
        let (input, output) = (recorded.input_tokens, recorded.output_tokens);
        self.admit(recorded.tenant, input, output, false);
    }

    /// A request is classified, and gets in line.
    fn admit(&mut self, tenant: usize, input_tokens: u64, output_tokens: u64, again: bool) {
        let plan = &self.plan.tenants[tenant];
        let session = match plan.sessions {
            0 => None,
            sessions => Some(format!("s{}", self.random.below(sessions as usize))),
        };
        let ask = Ask {
            input_tokens,
            est_output_tokens: self.accounts[tenant].lengths.estimate(None),
            stream: plan.stream,
            session,
            seed: self.random.next(),
        };
        let (band, ttl_ms, flow) = self.policy.classify(&ask, plan, &self.accounts[tenant]);
        let request = self.requests.len();
        self.requests.push(Request {
            tenant,
            flow,
            again,
            came_us: self.now_us,
            expires_us: self.now_us + ttl_ms.unwrap_or(band.ttl_ms) * 1_000,
            band,
            input_tokens,
            output_tokens,
            est_output_tokens: ask.est_output_tokens,
            stream: plan.stream,
            generated: 0,
            was_sent: false,
            tried: Vec::new(),
            state: State::Comes,
            stage: 0,
        });
        self.active += 1;
        self.note(request, |tally| tally.requests += 1);
        if let Some(ms) = plan.leaves_ms {
            self.after(ms * 1_000, Event::Leaves { request });
        }
        self.enter(request);
    }

    // Replicas.

    /// What it had begun to answer is lost; what it had not goes to another one, before all others there.
    fn dies(&mut self, replica: usize) {
        self.engines[replica].is_up = false;
        let ms = self.engines[replica].plan.ms_per_prefill_token;
        let orphans = self.queueing.tell(replica, false, ms, self.now_ms());
        let mut unread = Vec::new();
        let mut lost = Vec::new();
        for (request, asked) in self.requests.iter().enumerate() {
            match asked.state {
                State::Sent(at, _) if at == replica => unread.push(request),
                State::Answered(at, _) if at == replica => lost.push(request),
                _ => {}
            }
        }
        lost.into_iter()
            .for_each(|request| self.end(request, End::Failed));
        for request in unread {
            self.take_back(request, End::Failed);
            self.requests[request].tried.push(replica);
            self.requests[request].stage += 1;
            self.enter(request);
        }
        for ticket in orphans {
            let Some(request) = self.waiting.get(&ticket).copied() else {
                continue;
            };
            match self.choose(request) {
                Some(other) if self.queueing.bind(ticket, other) => {}
                _ => self.end(request, End::Failed),
            }
        }
        self.fill(None);
    }

    fn returns(&mut self, replica: usize) {
        self.engines[replica].is_up = true;
        let ms = self.engines[replica].plan.ms_per_prefill_token;
        self.queueing.tell(replica, true, ms, self.now_ms());
        self.fill(None);
    }

    // Time.

    fn tick(&mut self, step: u64) {
        let now_ms = self.now_ms();
        let pool: Vec<Candidate> = self
            .engines
            .iter()
            .zip(&self.slots)
            .filter(|(engine, _)| engine.is_up)
            .map(|(engine, slots)| candidate(engine, slots))
            .collect();
        let reports = self.queueing.band_reports(now_ms);
        if step.is_multiple_of(ADMISSION_STEPS) {
            let saturation = self.policy.tick_admission(&pool, &reports, now_ms);
            let policy = &self.policy;
            self.queueing
                .set_admission(&policy.bands, &policy.gate, saturation);
            self.fill(None);
        }
        if step.is_multiple_of(FAIRNESS_STEPS) {
            self.policy.tick_prices();
            self.policy
                .tick_tenants(&self.plan.tenants, &mut self.accounts, now_ms);
            self.queueing.tidy();
        }
        if step.is_multiple_of(ROUTING_STEPS) {
            self.policy.tick_routing(&pool, &reports, now_ms);
            if self.queueing.queued() > 0 {
                let penalty_ms = self.policy.weights.affinity_penalty_ms;
                self.queueing.balance(penalty_ms, now_ms);
                self.fill(None);
            }
        }
        self.after(STEP_US, Event::Tick { step: step + 1 });
    }

    pub(super) fn after(&mut self, us: u64, event: Event) {
        self.count += 1;
        self.coming += usize::from(event.brings_more());
        self.events
            .push(Reverse((self.now_us + us, self.count, event)));
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.now_us / 1_000
    }

    // Bookkeeping.

    fn is_in(&self, request: RequestId, stage: u32) -> bool {
        let asked = &self.requests[request];
        asked.stage == stage && !matches!(asked.state, State::Over)
    }

    pub(super) fn goes_on(&mut self, request: RequestId, state: State) -> u32 {
        let asked = &mut self.requests[request];
        asked.state = state;
        asked.stage += 1;
        asked.stage
    }

    pub(super) fn note(&mut self, request: RequestId, note: impl Fn(&mut Tally)) {
        let asked = &self.requests[request];
        note(&mut self.tenants[asked.tenant]);
        let name = &asked.band.name;
        if let Some((_, tally)) = self.bands.iter_mut().find(|(known, _)| known == name) {
            note(tally);
        }
    }

    /// The figures; what waits now is counted for as long as it has waited.
    pub(super) fn outcome(mut self) -> Outcome {
        for request in 0..self.requests.len() {
            let asked = &self.requests[request];
            if matches!(asked.state, State::Waits(_)) {
                let wait_ms = (self.now_us - asked.came_us) as f64 / 1e3;
                let is_first = !asked.was_sent;
                self.note(request, |tally| {
                    tally.waiting += 1;
                    if is_first {
                        tally.waited(wait_ms);
                    }
                });
            }
        }
        let mut all = Tally::default();
        self.tenants.iter().for_each(|tally| all.add(tally));
        all.sort();
        self.tenants.iter_mut().for_each(Tally::sort);
        self.bands.iter_mut().for_each(|(_, tally)| tally.sort());
        let names = self.plan.tenants.iter().map(|tenant| tenant.name.clone());
        Outcome {
            discipline: self.discipline.name(),
            ms: self.now_ms(),
            all,
            tenants: names.zip(self.tenants).collect(),
            bands: self.bands,
        }
    }
}

fn candidates(engines: &[Engine], slots: &[Arc<Slots>]) -> Vec<Candidate> {
    let both = engines.iter().zip(slots);
    both.map(|(engine, slots)| candidate(engine, slots))
        .collect()
}

fn draw(random: &mut SplitMix, span: Span) -> u64 {
    let width = span.greatest.saturating_sub(span.least) as usize + 1;
    span.least + random.below(width) as u64
}
