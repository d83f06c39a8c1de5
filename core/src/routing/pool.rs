//! The replicas of one model, and the choice among them for one request.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use foldhash::HashMap;
use llmgw_plugins::{
    BandQueue, BandSpec, Gate, Hook, PolicySet, PoolView, ReplicaView, RequestView, RoutingWeights,
};

use super::learned::{OutputLength, TokenRatio};
use super::locality::Locality;
use super::outlook::Outlook;
use super::prefix::{PREFIX_INDEX_MAX_BLOCKS, PrefixIndex, PromptHashes, ReplicaSlot};
use super::replica::{Admitted, KV_FRESH_MS, Readiness, Replica, Standing};
use super::score::{self, Ask, Candidate};
use crate::config::Model;
use crate::flow::BandReport;
use crate::flow::cost::{PRICE_SCALE, Prices};
use crate::flow::queues::Queues;
use crate::gateway::usage::Usage;
use crate::quantiles::Quantiles;
use crate::telemetry::metrics::ModelMetrics;
use crate::{clock, random};

/// Candidates that a `routing.rank` hook is shown: the best ones by the native score.
const RANKED_MAX: usize = 8;
/// A gate that lets no KV-cache use at all is taken for this, where it is divided by.
const KV_MAX_MIN: f64 = 0.01;
/// Images, sound and forms are no text: their bytes count as no more than this, in tokens.
const NOT_TEXT_MAX_TOKENS: u64 = 4_096;
/// Answers to one prompt that are counted (`n`): OpenAI's own limit.
const CHOICES_MAX: u32 = 128;
/// Tenants whose answers' length is known apart, of one model.
const OUTPUTS_MAX: usize = 4_096;
/// Reasons named in one refusal.
const REASONS_SHOWN_MAX: usize = 5;

/// What one request asks of a pool, and what the choice believed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Asked {
    pub ask: Ask,
    /// Bytes of the prompt, from which `ask.input_tokens` was estimated.
    pub input_bytes: u64,
    /// Bytes that are no text (images) teach nothing about tokens.
    pub is_text: bool,
    /// Answers to the same prompt.
    pub choices: u32,
    /// Tokens of the prompt that the chosen replica probably has cached.
    pub prefix_tokens: u64,
    /// Uncached tokens that were ahead on the chosen replica.
    pub prefill_before: u64,
}

/// What is known of a request when it comes.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    pub tenant: &'a str,
    pub input_bytes: u64,
    pub max_tokens: Option<u64>,
    /// Answers that it wants to the same prompt (`n`).
    pub choices: u32,
    /// Bytes that are no text say little about tokens.
    pub is_text: bool,
}

/// A replica for one request, and the breaker's leave to use it.
pub struct Chosen {
    pub admitted: Admitted,
    pub reason: String,
    pub prefix_tokens: u64,
    pub prefill_before: u64,
    /// How long it is better off waiting for this replica, which has its prefix, than going to another at once.
    pub stay: Duration,
}

/// Why no replica can take the request.
#[derive(Debug, Clone, PartialEq)]
pub struct Unavailable {
    pub reason: String,
    pub retry_in: Duration,
    /// A replica's first probe or its trial is under way, and may change everything.
    pub undecided: bool,
    /// The server has only just started: its agents may still say that the model runs.
    pub recovering: bool,
}

/// What a model's requests taught; shared by the pools of one model over reloads.
#[derive(Default)]
pub struct Lessons {
    ratio: TokenRatio,
    output: OutputLength,
    /// By tenant; those that are missing have the model's.
    outputs: HashMap<Arc<str>, OutputLength>,
    first_byte: Quantiles,
}

impl Lessons {
    fn output_of(&self, tenant: &str) -> &OutputLength {
        self.outputs.get(tenant).unwrap_or(&self.output)
    }

    fn output(&mut self, tenant: &Arc<str>, tokens: u64) {
        self.output.usage(tokens);
        if self.outputs.len() < OUTPUTS_MAX && !self.outputs.contains_key(tenant) {
            // It begins with what the model's answers were like.
            self.outputs.insert(tenant.clone(), self.output.clone());
        }
        if let Some(known) = self.outputs.get_mut(tenant) {
            known.usage(tokens);
        }
    }
}

/// The replicas of one model.
pub struct Pool {
    pub model: Arc<Model>,
    pub replicas: Vec<Arc<Replica>>,
    pub metrics: Arc<ModelMetrics>,
    pub prefix: Arc<Mutex<PrefixIndex>>,
    pub lessons: Arc<Mutex<Lessons>>,
    /// The knobs of the native scorer, published by the policy tick.
    pub weights: Arc<ArcSwap<RoutingWeights>>,
    /// Who waits for a replica, and who goes next.
    pub queues: Arc<Queues>,
    /// What the control plane says of replicas that are not there.
    pub outlook: Arc<ArcSwap<Outlook>>,
}

impl Pool {
    pub fn new(
        model: Arc<Model>,
        replicas: Vec<Arc<Replica>>,
        metrics: Arc<ModelMetrics>,
        shared: Shared,
    ) -> Pool {
        Pool {
            model,
            replicas,
            metrics,
            prefix: shared.prefix,
            lessons: shared.lessons,
            weights: shared.weights,
            queues: shared.queues,
            outlook: shared.outlook,
        }
    }

    pub fn shared(&self) -> Shared {
        Shared {
            prefix: self.prefix.clone(),
            lessons: self.lessons.clone(),
            weights: self.weights.clone(),
            queues: self.queues.clone(),
            outlook: self.outlook.clone(),
        }
    }

    /// What to expect from now on. Those who wait for a replica look again where that changes.
    pub fn expect(&self, outlook: Outlook) {
        if **self.outlook.load() != outlook {
            self.outlook.store(Arc::new(outlook));
            self.queues.changed.notify_waiters();
        }
    }

    /// Estimates what a request asks for, from its bytes and from what requests of this model and tenant taught.
    pub fn ask(&self, wanted: &Wanted<'_>) -> Asked {
        let lessons = lock(&self.lessons);
        let input_tokens = lessons.ratio.tokens(wanted.input_bytes);
        let output = lessons.output_of(wanted.tenant);
        let choices = wanted.choices.clamp(1, CHOICES_MAX);
        Asked {
            ask: Ask {
                input_tokens: match wanted.is_text {
                    true => input_tokens,
                    false => input_tokens.min(NOT_TEXT_MAX_TOKENS),
                },
                est_output_tokens: output.estimate(wanted.max_tokens) * u64::from(choices),
            },
            input_bytes: wanted.input_bytes,
            is_text: wanted.is_text,
            choices,
            ..Asked::default()
        }
    }

    /// Chooses a replica, none of `tried`. A suspect replica whose time has come gets one request as its trial.
    pub fn choose(
        &self,
        asked: &Asked,
        prompt: &PromptHashes,
        tried: &[Arc<str>],
        set: &PolicySet,
        request: &RequestView<'_>,
    ) -> Result<Chosen, Unavailable> {
        let now = clock::now_ms();
        let mut refusals = Refusals::default();
        let mut open: Vec<&Arc<Replica>> = Vec::with_capacity(self.replicas.len());
        // Suspect, and its slots are held by what hangs there: a trial would wait for one while others are idle.
        let mut occupied: Option<&Arc<Replica>> = None;
        for replica in &self.replicas {
            if tried.contains(&replica.id) {
                refusals.tried += 1;
                continue;
            }
            match replica.standing(now) {
                Standing::Open => open.push(replica),
                Standing::Trial if !self.queues.has_room(replica.lane) => occupied = Some(replica),
                Standing::Trial => match trial(replica, now) {
                    Some(chosen) => return Ok(chosen),
                    None => refusals.on_trial(replica),
                },
                Standing::OnTrial => refusals.on_trial(replica),
                Standing::Closed {
                    reason,
                    retry_in_ms,
                } => refusals.add(reason, retry_in_ms),
                Standing::Unknown => refusals.unprobed = true,
            }
        }
        let candidates = self.candidates(&open, prompt, now);
        let weights = self.weights.load();
        // A replica may turn suspect between the look and the choice; then the others are looked at.
        let Some(choice) = score::choose(&asked.ask, &candidates, &weights, random::next()) else {
            if let Some(replica) = occupied {
                if let Some(chosen) = trial(replica, now) {
                    return Ok(chosen);
                }
                refusals.on_trial(replica);
            }
            return Err(refusals.into_unavailable(&self.model, &self.outlook.load()));
        };
        let (index, reason) = match self.rank(asked, &open, &candidates, choice.index, set, request)
        {
            Some(ranked) => ranked,
            None => (choice.index, choice.reason.as_str().to_string()),
        };
        let candidate = &candidates[index];
        match open[index].admit(now) {
            Some(admitted) => Ok(Chosen {
                admitted,
                reason,
                prefix_tokens: candidate.prefix_tokens,
                prefill_before: candidate.prefill_tokens,
                stay: saved(candidate),
            }),
            None => {
                let mut tried = tried.to_vec();
                tried.push(open[index].id.clone());
                self.choose(asked, prompt, &tried, set, request)
            }
        }
    }

    fn candidates(
        &self,
        open: &[&Arc<Replica>],
        prompt: &PromptHashes,
        now_ms: u64,
    ) -> Vec<Candidate> {
        let mut matched = vec![0u64; open.len()];
        if !prompt.is_empty() && open.len() > 1 {
            let slots: Vec<ReplicaSlot> = open.iter().map(|replica| replica.prefix_slot).collect();
            lock(&self.prefix).lookup(prompt, &slots, &mut matched);
        }
        let ratio = lock(&self.lessons).ratio.bytes_per_token();
        open.iter()
            .zip(matched)
            .map(|(replica, bytes)| replica.candidate(now_ms, (bytes as f64 / ratio) as u64))
            .collect()
    }

    /// Lets the operator's own hook choose among the best; `None` is the native choice.
    fn rank(
        &self,
        asked: &Asked,
        open: &[&Arc<Replica>],
        candidates: &[Candidate],
        native: usize,
        set: &PolicySet,
        request: &RequestView<'_>,
    ) -> Option<(usize, String)> {
        if !set.defines(Hook::Rank) {
            return None;
        }
        // The native choice first, then the others in their order: few fleets have more than eight candidates.
        let mut shown: Vec<usize> = (0..open.len()).filter(|index| *index != native).collect();
        shown.insert(0, native);
        shown.truncate(RANKED_MAX);
        let localities: Vec<Arc<Locality>> =
            shown.iter().map(|index| open[*index].locality()).collect();
        let views: Vec<ReplicaView<'_>> = shown
            .iter()
            .zip(&localities)
            .map(|(index, locality)| view(open[*index], locality, &candidates[*index], asked))
            .collect();
        let ranked = set.rank(request, &views)?;
        let reason = ranked.reason.unwrap_or_else(|| "rank".to_string());
        Some((*shown.get(ranked.index)?, reason))
    }

    /// Notes that a replica has worked through a prompt, so that the next one like it finds it there.
    pub fn remember(&self, prompt: &PromptHashes, replica: &Replica) {
        if !prompt.is_empty() && self.replicas.len() > 1 {
            lock(&self.prefix).insert(prompt, replica.prefix_slot);
        }
    }

    pub fn learn_first_byte(&self, first_byte: Duration) {
        lock(&self.lessons)
            .first_byte
            .record(first_byte.as_secs_f64() * 1e3, clock::now_ms());
    }

    pub fn learn_usage(&self, asked: &Asked, usage: &Usage, tenant: &Arc<str>) {
        let mut lessons = lock(&self.lessons);
        if let (Some(input), true) = (usage.input, asked.is_text) {
            lessons.ratio.usage(asked.input_bytes, input);
        }
        if let Some(output) = usage.output {
            lessons.output(tenant, output / u64::from(asked.choices.max(1)));
        }
    }
}

impl Pool {
    /// Tells the queue what may be sent to each replica, all at once.
    pub fn tell_queue(&self) {
        // Looked at before the queue is locked.
        let news: Vec<_> = self
            .replicas
            .iter()
            .filter_map(|replica| replica.news())
            .collect();
        self.queues.tell(news);
    }
}

/// What the policy says of a pool, a few times a second. On the tick thread, never on a request's path.
impl Pool {
    /// Asks for the scorer's knobs, and lets those who wait for too long go elsewhere.
    pub fn tick_routing(&self, set: &PolicySet) {
        let weights = self.viewed(|view| set.routing_weights(view));
        self.queues.balance(weights.affinity_penalty_ms);
        if **self.weights.load() != weights {
            self.weights.store(Arc::new(weights));
        }
        self.tell_queue();
    }

    /// Asks for the bands and for how much is sent to one replica.
    pub fn tick_admission(&self, set: &PolicySet) {
        let (bands, gate, saturation) = self.viewed(|view| {
            let bands = set.admission_bands(view);
            (bands, set.admission_gate(view), view.saturation)
        });
        self.queues.set(&bands, gate, saturation);
    }

    /// Asks for the prices of tokens.
    pub fn tick_fairness(&self, set: &PolicySet) {
        let prices = Prices::of(&set.prices(&self.model.name));
        if **self.queues.prices.load() != prices {
            self.queues.prices.store(Arc::new(prices));
        }
        self.queues.tidy();
    }

    /// The pool as policies see it.
    fn viewed<R>(&self, look: impl FnOnce(&PoolView<'_>) -> R) -> R {
        let now = clock::now_ms();
        let candidates: Vec<Candidate> = self
            .replicas
            .iter()
            .filter(|replica| matches!(replica.readiness(), Readiness::Ready { .. }))
            .map(|replica| replica.candidate(now, 0))
            .collect();
        let (p50, p90) = match lock(&self.lessons).first_byte.p50_p90(now) {
            Some((p50, p90)) => (Some(p50), Some(p90)),
            None => (None, None),
        };
        let slots = candidates
            .iter()
            .map(|candidate| candidate.slots.map(u64::from))
            .sum::<Option<u64>>();
        let reports = self.queues.band_reports();
        let bands: Vec<BandQueue<'_>> = reports.iter().map(band_queue).collect();
        look(&PoolView {
            model: &self.model.name,
            now_ms: clock::unix_ms() as f64,
            replicas: self.replicas.len() as u64,
            ready: candidates.len() as u64,
            slots: slots.filter(|_| !candidates.is_empty()),
            saturation: saturation(&candidates, &self.queues.gate()),
            kv: mean(candidates.iter().filter_map(|candidate| candidate.kv)),
            queued: u64::from(self.queues.queued()),
            queued_cost: reports.iter().map(|band| band.queued_cost).sum::<u64>() as f64
                / PRICE_SCALE,
            ttft_p50_ms: p50,
            ttft_p90_ms: p90,
            arrivals_s: reports.iter().map(|band| band.arrivals_s).sum(),
            rejected_s: reports.iter().map(|band| band.rejections_s).sum(),
            bands: &bands,
        })
    }
}

fn band_queue(report: &BandReport) -> BandQueue<'_> {
    BandQueue {
        name: &report.name,
        queued: u64::from(report.queued),
        oldest_ms: report.oldest_ms.map(|age| age as f64),
    }
}

/// What outlives a reload: what was learned stays learned, and the knobs hold until the next tick.
pub struct Shared {
    pub prefix: Arc<Mutex<PrefixIndex>>,
    pub lessons: Arc<Mutex<Lessons>>,
    pub weights: Arc<ArcSwap<RoutingWeights>>,
    pub queues: Arc<Queues>,
    pub outlook: Arc<ArcSwap<Outlook>>,
}

impl Shared {
    /// A model's first pool.
    pub fn new(bands: &[BandSpec]) -> Shared {
        Shared {
            prefix: Arc::new(Mutex::new(PrefixIndex::new(PREFIX_INDEX_MAX_BLOCKS))),
            lessons: Arc::default(),
            weights: Arc::default(),
            queues: Queues::new(bands),
            outlook: Arc::default(),
        }
    }
}

/// Why each replica can't take a request.
#[derive(Default)]
struct Refusals {
    reasons: Vec<String>,
    more: usize,
    tried: usize,
    /// Some replica has not been asked yet.
    unprobed: bool,
    on_trial: bool,
    retry_in_ms: Option<u64>,
}

impl Refusals {
    fn add(&mut self, reason: String, retry_in_ms: u64) {
        self.retry_in_ms = Some(self.retry_in_ms.unwrap_or(u64::MAX).min(retry_in_ms));
        if self.reasons.len() < REASONS_SHOWN_MAX {
            self.reasons.push(reason);
        } else {
            self.more += 1;
        }
    }

    /// One request is finding out whether it works again.
    fn on_trial(&mut self, replica: &Replica) {
        self.on_trial = true;
        self.add(format!("{}: being tried again", replica.id), 1_000);
    }

    fn into_unavailable(mut self, model: &Model, outlook: &Outlook) -> Unavailable {
        if self.more > 0 {
            self.reasons.push(format!("and {} more", self.more));
        }
        if self.tried > 0 {
            self.reasons.push(format!("{} tried already", self.tried));
        }
        if self.unprobed {
            self.reasons.push("some were not probed yet".to_string());
        }
        // An empty list is a model whose replicas are all still to come.
        if self.reasons.is_empty() || (outlook.recovering && !model.profiles.is_empty()) {
            let reason = match outlook.reason.is_empty() {
                true => "this server starts no replicas: it does not listen to `agents`",
                false => &outlook.reason,
            };
            self.reasons.insert(0, reason.to_owned());
        }
        Unavailable {
            reason: self.reasons.join("; "),
            retry_in: Duration::from_millis(self.retry_in_ms.unwrap_or(1_000)),
            undecided: self.unprobed || self.on_trial,
            recovering: outlook.recovering && !model.profiles.is_empty(),
        }
    }
}

/// Sends this request to a suspect replica, unless another one is on its way there.
fn trial(replica: &Arc<Replica>, now_ms: u64) -> Option<Chosen> {
    Some(Chosen {
        admitted: replica.admit(now_ms)?,
        reason: "trial".to_string(),
        prefix_tokens: 0,
        prefill_before: replica.slots.prefill_tokens(),
        stay: Duration::ZERO,
    })
}

/// The time that a known prefix saves on a replica.
fn saved(candidate: &Candidate) -> Duration {
    let ms = candidate.prefix_tokens as f64 * candidate.ms_per_prefill_token;
    Duration::from_secs_f64(ms / 1e3)
}

fn view<'a>(
    replica: &'a Replica,
    locality: &'a Locality,
    candidate: &Candidate,
    asked: &Asked,
) -> ReplicaView<'a> {
    let todo = asked
        .ask
        .input_tokens
        .saturating_sub(candidate.prefix_tokens)
        .max(1);
    let ahead = (candidate.prefill_tokens + todo) as f64;
    ReplicaView {
        id: &replica.id,
        node: locality.node.as_deref(),
        rack: locality.rack.as_deref(),
        zone: locality.zone.as_deref(),
        gpu: locality.gpu.as_deref(),
        labels: &locality.labels,
        ms_per_prefill_token: Some(candidate.ms_per_prefill_token),
        slots: candidate.slots,
        inflight: candidate.inflight,
        queued: candidate.queued,
        prefill_tokens: candidate.prefill_tokens,
        running: candidate.running,
        waiting: candidate.waiting,
        kv: candidate.kv,
        metrics_age_ms: candidate.metrics_age_ms,
        prefix_tokens: candidate.prefix_tokens,
        est_ttft_ms: Some(ahead * candidate.ms_per_prefill_token),
        errors_1m: f64::from(candidate.errors_1m),
    }
}

/// How full a pool is: each replica as far as the gate lets it be, where its KV-cache use is unknown by slots. Only an engine
/// that says so itself counts for more than full: what the gateway knows by itself closes nothing.
pub(crate) fn saturation(candidates: &[Candidate], gate: &Gate) -> Option<f64> {
    mean(candidates.iter().map(|candidate| {
        let unread = candidate.sent_tokens as f64 * candidate.ms_per_prefill_token;
        let prefill = (unread / gate.hold_ms.max(1.0)).min(1.0);
        let is_fresh = candidate
            .metrics_age_ms
            .is_some_and(|age| age <= KV_FRESH_MS as f64);
        match (candidate.kv.filter(|_| is_fresh), candidate.slots) {
            (Some(kv), _) => prefill.max(kv / gate.kv_max.max(KV_MAX_MIN)),
            (None, Some(slots)) => {
                prefill.max((f64::from(candidate.inflight) / f64::from(slots.max(1))).min(1.0))
            }
            (None, None) => prefill,
        }
    }))
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = values.fold((0u32, 0.0), |(count, sum), value| (count + 1, sum + value));
    (count > 0).then(|| sum / f64::from(count))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
