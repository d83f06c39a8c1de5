//! A test's tables as the inputs that hooks get: what it leaves out has an unremarkable value, what it misspells fails.

use mlua::{Table, Value};

use crate::error::did_you_mean;
use crate::hooks::launch::{ModelView, ProfileView, ShardView};
use crate::hooks::placement::{CandidateView, JobView, NodeView};
use crate::hooks::views::{
    BandQueue, Domain, FieldDoc, PoolView, ReplicaView, RequestView, TenantView, UsageView, View,
};
use crate::vm::sandbox::{cut, type_name};

/// Entries of one list or map in an input.
const ENTRIES_MAX: usize = 10_000;

/// One field of an input, as a test gave it; owned, since views borrow.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Given {
    /// The test says nothing about it.
    Absent,
    Flag(bool),
    Number(f64),
    Text(String),
    Labels(Vec<(String, String)>),
    List(Vec<String>),
    Ports(Vec<u16>),
    Domains(Vec<Domain>),
    Bands(Vec<(String, u64, Option<f64>)>),
}

/// A field of a view that can take what a test gave.
pub(crate) trait Overlay<'v> {
    fn overlay(&mut self, given: &'v Given);
}

macro_rules! overlay_numbers {
    ($($kind:ty),*) => {$(
        impl Overlay<'_> for $kind {
            fn overlay(&mut self, given: &Given) {
                if let Given::Number(number) = given {
                    *self = *number as $kind;
                }
            }
        }
    )*};
}
overlay_numbers!(u16, u32, u64, f64);

macro_rules! overlay_borrowed {
    ($($kind:ty, $variant:ident;)*) => {$(
        impl<'v> Overlay<'v> for &'v $kind {
            fn overlay(&mut self, given: &'v Given) {
                if let Given::$variant(value) = given {
                    *self = value;
                }
            }
        }
    )*};
}
overlay_borrowed! {
    str, Text;
    [(String, String)], Labels;
    [String], List;
    [u16], Ports;
    [Domain], Domains;
}

impl Overlay<'_> for bool {
    fn overlay(&mut self, given: &Given) {
        if let Given::Flag(flag) = given {
            *self = *flag;
        }
    }
}

/// Queues by band borrow their names from another list: see [`pool`].
impl<'v> Overlay<'v> for &'v [BandQueue<'v>] {
    fn overlay(&mut self, _: &'v Given) {}
}

impl<'v, T: Overlay<'v> + Default> Overlay<'v> for Option<T> {
    fn overlay(&mut self, given: &'v Given) {
        if *given != Given::Absent {
            self.get_or_insert_default().overlay(given);
        }
    }
}

/// Reads a test's table as a view's fields. `name` is what the input is called in the message, e.g. `request`.
pub(crate) fn read<V: View>(value: &Value) -> Result<Vec<Given>, String> {
    let table = match value {
        Value::Nil => return Ok(vec![Given::Absent; V::FIELDS.len()]),
        Value::Table(table) => table,
        other => {
            return Err(format!(
                "{} is a {}, a table is needed",
                V::NOUN,
                type_name(other)
            ));
        }
    };
    for pair in table.pairs::<Value, Value>() {
        let (key, _) = pair.map_err(|e| e.to_string())?;
        let Value::String(name) = &key else {
            return Err(format!(
                "{} has a key of type {}, its fields have names",
                V::NOUN,
                type_name(&key)
            ));
        };
        let name = cut(&name.to_string_lossy(), 64);
        if !V::FIELDS.contains(&name.as_str()) {
            let hint = did_you_mean(&name, V::FIELDS.iter().copied());
            return Err(format!("{} has no field '{name}'{hint}", V::NOUN));
        }
    }
    V::DOCS
        .iter()
        .map(|doc| {
            field(table, doc).map_err(|reason| format!("{} of {} {reason}", doc.name, V::NOUN))
        })
        .collect()
}

fn field(table: &Table, doc: &FieldDoc) -> Result<Given, String> {
    let value: Value = table.raw_get(doc.name).map_err(|e| e.to_string())?;
    match (doc.lua, &value) {
        (_, Value::Nil) => Ok(Given::Absent),
        ("boolean", Value::Boolean(flag)) => Ok(Given::Flag(*flag)),
        ("string", Value::String(text)) => Ok(Given::Text(text.to_string_lossy())),
        ("number" | "integer", Value::Integer(_) | Value::Number(_)) => number(&value, doc.lua),
        ("table<string, string>", Value::Table(table)) => labels(table).map(Given::Labels),
        ("string[]", Value::Table(table)) => list(table, text).map(Given::List),
        ("integer[]", Value::Table(table)) => {
            list(table, |value| whole(value).map(|n| n as u16)).map(Given::Ports)
        }
        ("llmgw.domain[]", Value::Table(table)) => list(table, domain).map(Given::Domains),
        ("table<string, llmgw.band_queue>", Value::Table(table)) => bands(table).map(Given::Bands),
        (wanted, other) => Err(format!("is a {}, a {wanted} is needed", type_name(other))),
    }
}

fn number(value: &Value, kind: &str) -> Result<Given, String> {
    if kind == "integer" {
        return whole(value).map(|number| Given::Number(number as f64));
    }
    match value {
        Value::Integer(number) => Ok(Given::Number(*number as f64)),
        Value::Number(number) if number.is_finite() => Ok(Given::Number(*number)),
        _ => Err("is not finite".to_owned()),
    }
}

fn whole(value: &Value) -> Result<u64, String> {
    match value {
        Value::Integer(number) if *number >= 0 => Ok(*number as u64),
        Value::Number(number) if *number >= 0.0 && number.fract() == 0.0 && *number < 1e15 => {
            Ok(*number as u64)
        }
        _ => Err("must be a whole number from 0".to_owned()),
    }
}

fn text(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.to_string_lossy()),
        other => Err(format!("holds a {}, texts are needed", type_name(other))),
    }
}

fn list<T>(table: &Table, each: impl Fn(&Value) -> Result<T, String>) -> Result<Vec<T>, String> {
    let mut found = Vec::new();
    for value in table.sequence_values::<Value>() {
        if found.len() == ENTRIES_MAX {
            return Err(format!("has more than {ENTRIES_MAX} entries"));
        }
        found.push(each(&value.map_err(|e| e.to_string())?)?);
    }
    Ok(found)
}

fn entries<T>(
    table: &Table,
    each: impl Fn(String, &Value) -> Result<T, String>,
) -> Result<Vec<(String, T)>, String> {
    let mut found = Vec::new();
    for pair in table.pairs::<Value, Value>() {
        let (name, value) = pair.map_err(|e| e.to_string())?;
        if found.len() == ENTRIES_MAX {
            return Err(format!("has more than {ENTRIES_MAX} entries"));
        }
        let name = text(&name)?;
        found.push((name.clone(), each(name, &value)?));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

fn labels(table: &Table) -> Result<Vec<(String, String)>, String> {
    entries(table, |_, value| text(value))
}

/// The fields of one small table, which has no others.
fn small(value: &Value, noun: &str, known: [&str; 2]) -> Result<[Value; 2], String> {
    let Value::Table(table) = value else {
        return Err(format!("holds a {}, a {noun} is a table", type_name(value)));
    };
    for pair in table.pairs::<Value, Value>() {
        let (name, _) = pair.map_err(|e| e.to_string())?;
        let name = text(&name)?;
        if !known.contains(&name.as_str()) {
            let hint = did_you_mean(&name, known);
            return Err(format!(
                "holds a {noun} with an unknown field '{name}'{hint}"
            ));
        }
    }
    let get = |name: &str| table.raw_get::<Value>(name).map_err(|e| e.to_string());
    Ok([get(known[0])?, get(known[1])?])
}

fn domain(value: &Value) -> Result<Domain, String> {
    let [gpus, free] = small(value, "domain", ["gpus", "free"])?;
    Ok(Domain {
        gpus: whole(&gpus)? as u32,
        free: whole(&free)? as u32,
    })
}

fn bands(table: &Table) -> Result<Vec<(String, u64, Option<f64>)>, String> {
    let found = entries(table, |_, value| {
        let [queued, oldest] = small(value, "band", ["queued", "oldest_ms"])?;
        let oldest_ms = match oldest {
            Value::Nil => None,
            oldest => match number(&oldest, "number")? {
                Given::Number(ms) => Some(ms),
                _ => None,
            },
        };
        Ok((whole(&queued)?, oldest_ms))
    })?;
    Ok(found
        .into_iter()
        .map(|(name, (queued, oldest_ms))| (name, queued, oldest_ms))
        .collect())
}

/// The queues of a pool, whose names stay in `given`.
pub(crate) fn queues(given: &[Given]) -> Vec<BandQueue<'_>> {
    let bands = given.iter().find_map(|given| match given {
        Given::Bands(bands) => Some(bands),
        _ => None,
    });
    bands
        .into_iter()
        .flatten()
        .map(|(name, queued, oldest_ms)| BandQueue {
            name,
            queued: *queued,
            oldest_ms: *oldest_ms,
        })
        .collect()
}

/// What a test's request is where it doesn't say. Whatever may be unknown is.
pub(crate) fn request(given: &[Given]) -> RequestView<'_> {
    let base = RequestView {
        model: "example",
        path: "/v1/chat/completions",
        input_tokens: 300,
        est_output_tokens: 150,
        n: 1,
        ..RequestView::default()
    };
    base.overlay(given)
}

/// The same for a tenant: it may use no band but its own, unless the test says so. `lowest` is the least band there is.
pub(crate) fn tenant<'v>(given: &'v [Given], lowest: &'v str) -> TenantView<'v> {
    let base = TenantView {
        name: "example",
        weight: 1.0,
        ..TenantView::default()
    };
    let mut tenant = base.overlay(given);
    if tenant.band.is_empty() {
        tenant.band = lowest;
    }
    if tenant.best_band.is_empty() {
        tenant.best_band = tenant.band;
    }
    tenant
}

/// The same for what a tenant used: nothing.
pub(crate) fn usage(given: &[Given]) -> UsageView {
    UsageView::default().overlay(given)
}

/// The same for a pool: one idle replica.
pub(crate) fn pool<'v>(given: &'v [Given], queues: &'v [BandQueue<'v>]) -> PoolView<'v> {
    let base = PoolView {
        model: "example",
        now_ms: 1.8e12,
        replicas: 1,
        ready: 1,
        ..PoolView::default()
    };
    PoolView {
        bands: queues,
        ..base.overlay(given)
    }
}

/// The same for a replica: idle, and nothing is known of it.
pub(crate) fn replica(given: &[Given]) -> ReplicaView<'_> {
    let base = ReplicaView {
        id: "example/0",
        ..ReplicaView::default()
    };
    base.overlay(given)
}

/// The same for a job: one replica on one GPU.
pub(crate) fn job(given: &[Given]) -> JobView<'_> {
    let base = JobView {
        kind: "gpu",
        model: "example",
        profile: "example",
        engine: "vllm",
        gpus: 1,
        gpus_per_node: 1,
        nodes: 1,
        replicas: 1,
        ..JobView::default()
    };
    base.overlay(given)
}

/// The same for a node: it is ready, and has nothing.
pub(crate) fn node(given: &[Given]) -> NodeView<'_> {
    let base = NodeView {
        id: "node-1",
        state: "ready",
        ..NodeView::default()
    };
    base.overlay(given)
}

/// The same for a candidate: a node of its own, far from all others.
pub(crate) fn candidate(given: &[Given]) -> CandidateView<'_> {
    let base = CandidateView {
        gpus: 1,
        domains: 1,
        fabrics: 1,
        ..CandidateView::default()
    };
    base.overlay(given)
}

/// The same for a profile: one node.
pub(crate) fn profile<'v>(given: &'v [Given], engine: &'v str) -> ProfileView<'v> {
    let base = ProfileView {
        name: "example",
        engine,
        nodes: 1,
        tensor_parallel: 1,
        pipeline_parallel: 1,
        ..ProfileView::default()
    };
    base.overlay(given)
}

/// The same for a model.
pub(crate) fn model(given: &[Given]) -> ModelView<'_> {
    let base = ModelView {
        name: "example",
        source: Some("org/example"),
        replicas: 1,
    };
    base.overlay(given)
}

/// The same for a shard: the only one of its replica.
pub(crate) fn shard<'v>(given: &'v [Given], engine: &'v str) -> ShardView<'v> {
    let base = ShardView {
        model: "example",
        source: "org/example",
        served_name: "example",
        profile: "example",
        engine,
        nodes: 1,
        leader_address: "10.0.0.1",
        port: 21000,
        rendezvous_port: Some(21001),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        models_dir: Some("/models"),
        ..ShardView::default()
    };
    base.overlay(given)
}
