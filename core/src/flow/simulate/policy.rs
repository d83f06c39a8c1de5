//! What the policies say while a simulation runs: asked as often as the gateway asks them, with the pool as it is then.

use std::sync::Arc;

use llmgw_plugins::{
    BandQueue, BandSpec, Gate, PolicySet, PoolView, RequestView, RoutingWeights, TenantView,
    UsageView,
};

use super::super::bands::BandReport;
use super::super::cost::{PRICE_SCALE, Prices};
use super::super::window::Window;
use super::plan::TenantPlan;
use crate::quantiles::Quantiles;
use crate::routing::learned::OutputLength;
use crate::routing::pool::saturation;
use crate::routing::score::Candidate;

/// The model that policies are told of.
const MODEL: &str = "example";
/// When a simulation begins, in milliseconds since 1970.
const EPOCH_MS: f64 = 1.8e12;
/// What a tenant used is counted over this time.
const USAGE_WINDOW_MS: u64 = 60_000;

/// The policies, and what they said last.
pub struct Policy<'a> {
    set: &'a PolicySet,
    pub bands: Vec<BandSpec>,
    pub gate: Gate,
    pub prices: Prices,
    pub weights: RoutingWeights,
    pub first_bytes: Quantiles,
}

/// What a tenant has and had, beside its plan.
pub struct Account {
    /// As the policy has it.
    pub weight: f64,
    pub queued: u64,
    pub inflight: u64,
    pub waits: Quantiles,
    pub lengths: OutputLength,
    used: Window,
}

/// One request for a policy to classify.
pub struct Ask {
    pub input_tokens: u64,
    pub est_output_tokens: u64,
    pub stream: bool,
    pub session: Option<String>,
    pub seed: u64,
}

impl Account {
    pub fn new(plan: &TenantPlan) -> Account {
        Account {
            weight: plan.weight,
            queued: 0,
            inflight: 0,
            waits: Quantiles::default(),
            lengths: OutputLength::default(),
            used: Window::new(USAGE_WINDOW_MS),
        }
    }

    pub fn used(&mut self, cost: u64, now_ms: u64) {
        self.used.add(now_ms, cost);
    }

    fn usage(&mut self, all: u64, now_ms: u64) -> UsageView {
        let used = self.used.sum(now_ms);
        UsageView {
            cost_1m: used as f64 / PRICE_SCALE,
            share_1m: used as f64 / all.max(1) as f64,
            queued: self.queued,
            inflight: self.inflight,
            wait_p90_ms: self.waits.p50_p90(now_ms).map(|(_, p90)| p90),
        }
    }
}

impl<'a> Policy<'a> {
    /// Begins with what the policies say of an idle pool.
    pub fn new(set: &'a PolicySet, candidates: &[Candidate]) -> Policy<'a> {
        let mut policy = Policy {
            set,
            bands: set.bands_at_load().to_vec(),
            gate: set.admission_gate(&PoolView::default()),
            prices: Prices::default(),
            weights: RoutingWeights::default(),
            first_bytes: Quantiles::default(),
        };
        policy.tick_admission(candidates, &[], 0);
        policy.tick_routing(candidates, &[], 0);
        policy.tick_prices();
        policy
    }

    pub fn tick_routing(&mut self, pool: &[Candidate], bands: &[BandReport], now_ms: u64) {
        self.weights = self.viewed(pool, bands, now_ms, PolicySet::routing_weights);
    }

    /// Returns how full the pool is.
    pub fn tick_admission(
        &mut self,
        pool: &[Candidate],
        bands: &[BandReport],
        now_ms: u64,
    ) -> Option<f64> {
        let (specs, gate) = self.viewed(pool, bands, now_ms, |set, view| {
            (set.admission_bands(view), set.admission_gate(view))
        });
        (self.bands, self.gate) = (specs, gate);
        saturation(pool, &self.gate)
    }

    pub fn tick_prices(&mut self) {
        self.prices = Prices::of(&self.set.prices(MODEL));
    }

    pub fn tick_tenants(&self, plans: &[TenantPlan], accounts: &mut [Account], now_ms: u64) {
        let sum = |all: u64, account: &mut Account| all + account.used.sum(now_ms);
        let all = accounts.iter_mut().fold(0, sum);
        for (plan, account) in plans.iter().zip(accounts) {
            let usage = account.usage(all, now_ms);
            account.weight = self.set.tenant_weight(&view(plan, account), &usage);
        }
    }

    /// The band of a request with its own time to live, where it has one, and its flow.
    pub fn classify(
        &self,
        ask: &Ask,
        plan: &TenantPlan,
        account: &Account,
    ) -> (BandSpec, Option<u64>, Option<Arc<str>>) {
        let request = RequestView {
            model: MODEL,
            band_hint: plan.band_hint.as_deref(),
            path: "/v1/chat/completions",
            stream: ask.stream,
            input_tokens: ask.input_tokens,
            est_output_tokens: ask.est_output_tokens,
            n: 1,
            session: ask.session.as_deref(),
            seed: ask.seed,
            ..RequestView::default()
        };
        let tenant = view(plan, account);
        let band = self.set.classify(&request, &tenant);
        let flow = self.set.key(&request, &tenant).map(Arc::from);
        let known = self.bands.iter().find(|spec| spec.name == band.name);
        // A set always has the bands that it classifies by.
        let spec = known.or(self.bands.first()).expect("there are bands");
        (spec.clone(), band.ttl_ms, flow)
    }

    fn viewed<R>(
        &self,
        pool: &[Candidate],
        reports: &[BandReport],
        now_ms: u64,
        look: impl FnOnce(&PolicySet, &PoolView<'_>) -> R,
    ) -> R {
        let bands: Vec<BandQueue<'_>> = reports
            .iter()
            .map(|report| BandQueue {
                name: &report.name,
                queued: u64::from(report.queued),
                oldest_ms: report.oldest_ms.map(|age| age as f64),
            })
            .collect();
        let first_bytes = self.first_bytes.p50_p90(now_ms);
        let slots = |candidate: &Candidate| candidate.slots.map(u64::from);
        let cost: u64 = reports.iter().map(|band| band.queued_cost).sum();
        let view = PoolView {
            model: MODEL,
            now_ms: EPOCH_MS + now_ms as f64,
            replicas: pool.len() as u64,
            ready: pool.len() as u64,
            slots: pool.iter().map(slots).sum(),
            saturation: saturation(pool, &self.gate),
            queued: reports.iter().map(|band| u64::from(band.queued)).sum(),
            queued_cost: cost as f64 / PRICE_SCALE,
            ttft_p50_ms: first_bytes.map(|(p50, _)| p50),
            ttft_p90_ms: first_bytes.map(|(_, p90)| p90),
            arrivals_s: reports.iter().map(|band| band.arrivals_s).sum(),
            rejected_s: reports.iter().map(|band| band.rejections_s).sum(),
            bands: &bands,
            ..PoolView::default()
        };
        look(self.set, &view)
    }
}

fn view<'v>(plan: &'v TenantPlan, account: &Account) -> TenantView<'v> {
    TenantView {
        name: &plan.name,
        band: &plan.band,
        best_band: &plan.best_band,
        weight: plan.weight,
        labels: &[],
        inflight: account.inflight,
        queued: account.queued,
    }
}
