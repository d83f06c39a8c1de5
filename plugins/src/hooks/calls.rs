//! Typed calls: one method a hook, each with its budget, its range and its fallback.

use std::collections::HashMap;
use std::sync::Arc;

use mlua::Value;

use crate::engine::metrics::Load;
use crate::engine::samples::Samples;
use crate::error::{ErrorKind, Fault};
use crate::hooks::returns::{self, Clamped};
use crate::hooks::views::{PoolView, ReplicaView, RequestView, TenantView, UsageView};
use crate::hooks::weights::RoutingWeights;
use crate::hooks::{Band, BandSpec, ErrorClass, Gate, Hook, Prices, Ranked, Refusal};
use crate::set::{Memory, PolicySet};
use crate::vm::Vm;
use crate::vm::budget::{Limit, TICK_MAX};
use crate::vm::crossing::Arg;
use crate::vm::stock::Thread;

/// Candidates that `routing.rank` gets at most; the native scorer chooses which.
pub const RANK_CANDIDATES_MAX: usize = 8;
/// Of an error's body, `engine.classify_error` sees this much.
pub const ERROR_BODY_MAX_BYTES: usize = 4096;
/// Models, or tenants, whose last good values are remembered.
const LAST_GOOD_MAX: usize = 4096;

/// What tick hooks returned last, by model.
#[derive(Debug, Default)]
pub(crate) struct LastGood {
    weights: Memory<RoutingWeights>,
    bands: Memory<Vec<BandSpec>>,
    gate: Memory<Gate>,
    prices: Memory<Prices>,
}

impl LastGood {
    /// Forgets everything, so that a test's cases don't see each other.
    pub(crate) fn forget(&self) {
        forget(&self.weights);
        forget(&self.bands);
        forget(&self.gate);
        forget(&self.prices);
    }
}

/// Hooks that run for every request.
impl PolicySet {
    /// The band of a request. Whatever the policy says, it is one that the tenant may use.
    pub fn classify(&self, request: &RequestView<'_>, tenant: &TenantView<'_>) -> Band {
        if !self.defines(Hook::Classify) {
            return self.native_classify(request, tenant);
        }
        let bands = &self.bands;
        match self.serve(|vm| classify(vm, request, tenant, bands)) {
            Ok(((position, ttl_ms), faults)) => {
                self.note_all(Hook::Classify, &faults);
                self.allowed(position, ttl_ms, tenant)
            }
            Err(fault) => {
                self.note(Hook::Classify, &fault);
                self.default_band(tenant)
            }
        }
    }

    /// A choice among at most [`RANK_CANDIDATES_MAX`] candidates; `None` is the native choice.
    pub fn rank(&self, request: &RequestView<'_>, replicas: &[ReplicaView<'_>]) -> Option<Ranked> {
        if !self.defines(Hook::Rank) || replicas.is_empty() {
            return None;
        }
        let replicas = &replicas[..replicas.len().min(RANK_CANDIDATES_MAX)];
        self.serve(|vm| rank(vm, request, replicas))
            .unwrap_or_else(|fault| {
                self.note(Hook::Rank, &fault);
                None
            })
    }

    /// How a refused request is answered. `why` is the error code, e.g. `queue_full`.
    pub fn reject(&self, request: &RequestView<'_>, why: &str) -> Refusal {
        let native = Refusal {
            status: if matches!(why, "queue_full" | "tenant_limit") {
                429
            } else {
                503
            },
            wait_ms: None,
        };
        if !self.defines(Hook::Reject) {
            return native;
        }
        match self.serve(|vm| reject(vm, request, why)) {
            Ok(None) => native,
            Ok(Some((refusal, faults))) => {
                self.note_all(Hook::Reject, &faults);
                refusal
            }
            Err(fault) => {
                self.note(Hook::Reject, &fault);
                native
            }
        }
    }

    /// What splits a tenant into flows; `None`: nothing does. The caller puts the tenant's name before it, so that no key
    /// can reach into another tenant.
    pub fn key(&self, request: &RequestView<'_>, tenant: &TenantView<'_>) -> Option<String> {
        if !self.defines(Hook::Key) {
            return None;
        }
        self.serve(|vm| key(vm, request, tenant))
            .unwrap_or_else(|fault| {
                self.note(Hook::Key, &fault);
                None
            })
    }

    /// What a failed upstream call means. Status 0 is a transport error; of the body 4 KiB are looked at.
    pub fn classify_error(&self, engine: &str, status: u16, body: &[u8]) -> ErrorClass {
        let native = ErrorClass::native(status);
        let hook = Hook::EngineClassifyError;
        if status == 0
            || !self
                .engines
                .get(engine)
                .is_some_and(|plugin| plugin.classifies_errors)
            || !self.defines(hook)
        {
            return native;
        }
        let body = &body[..body.len().min(ERROR_BODY_MAX_BYTES)];
        let result = self.serve(|vm| classify_error(vm, engine, status, body));
        match result {
            Ok(class) => class.unwrap_or(native),
            Err(fault) => {
                self.note(hook, &fault);
                native
            }
        }
    }

    /// An engine's own reading of a scrape. `None`: it has no `map`, or this scrape counts as stale.
    pub fn map_metrics(
        &self,
        engine: &str,
        samples: &Samples,
        previous: Option<&Load>,
        dt_ms: f64,
    ) -> Option<Load> {
        let hook = Hook::EngineMap;
        if !self.engines.get(engine).is_some_and(|plugin| plugin.maps) || !self.defines(hook) {
            return None;
        }
        let result = self.serve(|vm| map_metrics(vm, engine, samples, previous, dt_ms));
        match result {
            Ok((load, faults)) => {
                self.note_all(hook, &faults);
                Some(load)
            }
            Err(fault) => {
                self.note(hook, &fault);
                None
            }
        }
    }

    /// For hooks that requests wait for: a VM is ready.
    fn serve<R>(&self, work: impl FnOnce(&mut Vm) -> Result<R, Fault>) -> Result<R, Fault> {
        self.stock.with_vm(Thread::Serves, work)
    }

    /// For the others, whose thread may build its VM.
    pub(crate) fn run<R>(
        &self,
        work: impl FnOnce(&mut Vm) -> Result<R, Fault>,
    ) -> Result<R, Fault> {
        self.stock.with_vm(Thread::Waits, work)
    }

    fn note_all(&self, hook: Hook, faults: &[Fault]) {
        faults.iter().for_each(|fault| self.note(hook, fault));
    }
}

/// The native rule for bands, which `admission.lua` writes out.
impl PolicySet {
    fn native_classify(&self, request: &RequestView<'_>, tenant: &TenantView<'_>) -> Band {
        let hinted = request.band_hint.and_then(|hint| self.band_position(hint));
        match hinted {
            Some(position) => self.allowed(position, None, tenant),
            None => self.default_band(tenant),
        }
    }

    fn band_position(&self, name: &str) -> Option<usize> {
        self.bands.iter().position(|band| &*band.name == name)
    }

    /// The tenant's default band. One that a reload removed is replaced by the lowest there is.
    fn default_band(&self, tenant: &TenantView<'_>) -> Band {
        let lowest = || {
            (0..self.bands.len())
                .min_by(|a, b| self.bands[*a].priority.total_cmp(&self.bands[*b].priority))
        };
        match self.band_position(tenant.band).or_else(lowest) {
            Some(position) => self.allowed(position, None, tenant),
            None => Band {
                name: Arc::from(tenant.band),
                ttl_ms: None,
            },
        }
    }

    /// Never above the tenant's best band. One that a reload removed allows no more than the default band does.
    fn allowed(&self, position: usize, ttl_ms: Option<u64>, tenant: &TenantView<'_>) -> Band {
        let best = self
            .band_position(tenant.best_band)
            .or_else(|| self.band_position(tenant.band));
        let position = match best {
            Some(best) if self.bands[position].priority > self.bands[best].priority => best,
            _ => position,
        };
        Band {
            name: Arc::clone(&self.bands[position].name),
            ttl_ms,
        }
    }
}

/// Hooks that run in the background, a few times a second for each model or tenant.
///
/// Each has 5 ms. What fails is answered with the last good value of the same model, then by the embedded file's own
/// function, then natively. They run on the calling
/// thread, in the VM that it keeps for all hooks: call them from one thread of their own, off the requests' path.
impl PolicySet {
    /// The scorer's knobs.
    pub fn routing_weights(&self, pool: &PoolView<'_>) -> RoutingWeights {
        let call = |vm: &mut Vm| {
            pool_call(vm, Hook::Weights, pool).and_then(|value| returns::weights(&value))
        };
        self.tick(
            Hook::Weights,
            pool.model,
            &self.last_good.weights,
            &call,
            RoutingWeights::default,
        )
    }

    /// The bands of a model. Names are those of the load: a list with others is refused.
    pub fn admission_bands(&self, pool: &PoolView<'_>) -> Vec<BandSpec> {
        let call = |vm: &mut Vm| {
            let (bands, faults) = returns::bands(&pool_call(vm, Hook::Bands, pool)?)?;
            let same = bands.len() == self.bands.len()
                && bands
                    .iter()
                    .all(|band| self.band_position(&band.name).is_some());
            if !same {
                return Err(Fault::new(
                    ErrorKind::Unknown,
                    "bands returned other names than at load: names change by a reload only",
                ));
            }
            Ok((bands, faults))
        };
        self.tick(
            Hook::Bands,
            pool.model,
            &self.last_good.bands,
            &call,
            || self.bands.clone(),
        )
    }

    /// How much is sent to one replica.
    pub fn admission_gate(&self, pool: &PoolView<'_>) -> Gate {
        let call =
            |vm: &mut Vm| pool_call(vm, Hook::Gate, pool).and_then(|value| returns::gate(&value));
        let native = || Gate {
            hold_ms: 500.0,
            kv_max: 0.9,
            inflight_max: None,
        };
        self.tick(Hook::Gate, pool.model, &self.last_good.gate, &call, native)
    }

    /// What a model's tokens cost.
    pub fn prices(&self, model: &str) -> Prices {
        let call = |vm: &mut Vm| prices(vm, model).and_then(|value| returns::prices(&value));
        let native = || Prices {
            input: 1.0,
            cached: 0.1,
            output: 2.0,
        };
        self.tick(Hook::Prices, model, &self.last_good.prices, &call, native)
    }

    /// A tenant's weight, 0.01..100. What fails is answered with the configured one.
    pub fn tenant_weight(&self, tenant: &TenantView<'_>, usage: &UsageView) -> f64 {
        if !self.defines(Hook::Weight) {
            return tenant.weight;
        }
        match self.run(|vm| weight(vm, tenant, usage)) {
            Ok((weight, faults)) => {
                self.note_all(Hook::Weight, &faults);
                weight
            }
            Err(fault) => {
                self.note(Hook::Weight, &fault);
                tenant.weight
            }
        }
    }

    fn tick<T: Clone>(
        &self,
        hook: Hook,
        key: &str,
        last_good: &Memory<T>,
        call: &dyn Fn(&mut Vm) -> Result<Clamped<T>, Fault>,
        native: impl FnOnce() -> T,
    ) -> T {
        if !self.defines(hook) {
            return native();
        }
        match self.run(call) {
            Ok((value, faults)) => {
                self.note_all(hook, &faults);
                remember(last_good, key, value.clone());
                value
            }
            Err(fault) => {
                self.note(hook, &fault);
                let embedded = || {
                    self.fallback
                        .as_ref()
                        .and_then(|built_in| built_in.run(call).ok())
                };
                recall(last_good, key)
                    .or_else(|| embedded().map(|(value, _)| value))
                    .unwrap_or_else(native)
            }
        }
    }
}

fn remember<T>(memory: &Memory<T>, key: &str, value: T) {
    let mut values = memory
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    match values.get_mut(key) {
        Some(slot) => *slot = value,
        None => {
            if values.len() >= LAST_GOOD_MAX {
                values.clear();
            }
            values.insert(key.to_owned(), value);
        }
    }
}

fn forget<T>(memory: &Memory<T>) {
    memory
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
        .clear();
}

fn recall<T: Clone>(memory: &Memory<T>, key: &str) -> Option<T> {
    let values: std::sync::MutexGuard<'_, HashMap<String, T>> = memory
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    values.get(key).cloned()
}

pub(crate) fn classify(
    vm: &mut Vm,
    request: &RequestView<'_>,
    tenant: &TenantView<'_>,
    bands: &[BandSpec],
) -> Result<Clamped<(usize, Option<u64>)>, Fault> {
    let answers = vm.ask(
        Hook::Classify,
        Limit::Count,
        request.seed,
        |inputs, into| {
            Ok([
                inputs.request.arg(into, request)?,
                inputs.tenant.arg(into, tenant)?,
            ])
        },
    )?;
    returns::classify(&answers, bands)
}

pub(crate) fn rank(
    vm: &mut Vm,
    request: &RequestView<'_>,
    replicas: &[ReplicaView<'_>],
) -> Result<Option<Ranked>, Fault> {
    let answers = vm.ask(Hook::Rank, Limit::Count, request.seed, |inputs, into| {
        Ok([
            inputs.request.arg(into, request)?,
            inputs.replicas(into, replicas)?,
            Arg::Number(replicas.len() as f64),
        ])
    })?;
    returns::rank(&answers, replicas.len())
}

pub(crate) fn reject(
    vm: &mut Vm,
    request: &RequestView<'_>,
    why: &str,
) -> Result<Option<Clamped<Refusal>>, Fault> {
    let answers = vm.ask(Hook::Reject, Limit::Count, request.seed, |inputs, into| {
        Ok([inputs.request.arg(into, request)?, Arg::Text(why)])
    })?;
    returns::reject(&answers)
}

pub(crate) fn key(
    vm: &mut Vm,
    request: &RequestView<'_>,
    tenant: &TenantView<'_>,
) -> Result<Option<String>, Fault> {
    let [key, ..] = vm.ask(Hook::Key, Limit::Count, request.seed, |inputs, into| {
        Ok([
            inputs.request.arg(into, request)?,
            inputs.tenant.arg(into, tenant)?,
        ])
    })?;
    returns::key(&key)
}

pub(crate) fn classify_error(
    vm: &mut Vm,
    engine: &str,
    status: u16,
    body: &[u8],
) -> Result<Option<ErrorClass>, Fault> {
    let value = vm.call_engine(
        engine,
        Hook::EngineClassifyError,
        Limit::Count,
        |_, into| Ok((status, into.sandbox.lua.create_string(body)?)),
    )?;
    returns::error_class(&value)
}

pub(crate) fn map_metrics(
    vm: &mut Vm,
    engine: &str,
    samples: &Samples,
    previous: Option<&Load>,
    dt_ms: f64,
) -> Result<Clamped<Load>, Fault> {
    let value = vm.call_engine(engine, Hook::EngineMap, Limit::Count, |_, into| {
        let (samples, previous) =
            crate::engine::series::tables(&into.sandbox.lua, samples, previous)?;
        Ok((samples, previous, dt_ms))
    })?;
    returns::load(&value)
}

pub(crate) fn pool_call(vm: &mut Vm, hook: Hook, pool: &PoolView<'_>) -> Result<Value, Fault> {
    let seed = pool.now_ms.to_bits();
    vm.call(hook, Limit::Clock(TICK_MAX), seed, |inputs, into| {
        Ok([inputs.pool.arg(into, pool)?])
    })
}

pub(crate) fn prices(vm: &mut Vm, model: &str) -> Result<Value, Fault> {
    vm.call(Hook::Prices, Limit::Clock(TICK_MAX), 0, |_, _| {
        Ok([Arg::Text(model)])
    })
}

pub(crate) fn weight(
    vm: &mut Vm,
    tenant: &TenantView<'_>,
    usage: &UsageView,
) -> Result<Clamped<f64>, Fault> {
    let [weight, ..] = vm.ask(Hook::Weight, Limit::Count, 0, |inputs, into| {
        Ok([
            inputs.tenant.arg(into, tenant)?,
            inputs.usage.arg(into, usage)?,
        ])
    })?;
    returns::weight(&weight)
}
