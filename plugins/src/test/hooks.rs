//! Functions of `llmgw.test` that call the set's hooks as the gateway does, fallbacks and clamps included.

use std::rc::Rc;

use mlua::{FromLuaMulti, Lua, MultiValue, Table, Value};
use serde::Serialize;
use serde_json::{Value as Json, json};

use crate::engine::samples::Samples;
use crate::error::did_you_mean;
use crate::hooks::Hook;
use crate::hooks::calls::RANK_CANDIDATES_MAX;
use crate::hooks::launch::{ModelView, ProfileView, ShardView};
use crate::hooks::placement::{CandidateView, JobView, NodeView, Verdict};
use crate::hooks::views::{PoolView, ReplicaView, RequestView, TenantView, UsageView};
use crate::test::host::Host;
use crate::test::inputs::{self, read};
use crate::vm::sandbox::type_name;

type Outcome = Result<Json, String>;

/// Adds them.
pub(crate) fn install(lua: &Lua, host: &Rc<Host>, table: &Table) -> mlua::Result<()> {
    let classify = lua.create_function({
        let host = Rc::clone(host);
        move |lua, (request, tenant): (Value, Value)| {
            let band = classify(&host, &request, &tenant);
            band.map_err(|reason| host.raise(lua, &reason))
        }
    })?;
    table.raw_set("classify", classify)?;
    let key = lua.create_function({
        let host = Rc::clone(host);
        move |lua, (request, tenant): (Value, Value)| {
            let key = key(&host, &request, &tenant);
            key.map_err(|reason| host.raise(lua, &reason))
        }
    })?;
    table.raw_set("key", key)?;
    let weight = lua.create_function({
        let host = Rc::clone(host);
        move |lua, (tenant, usage): (Value, Value)| {
            let weight = weight(&host, &tenant, &usage);
            weight.map_err(|reason| host.raise(lua, &reason))
        }
    })?;
    table.raw_set("weight", weight)?;
    add(lua, host, table, "bands", |host, pool: Value| {
        with_pool(&pool, |pool| data(&host.set.admission_bands(pool)))
    })?;
    add(lua, host, table, "gate", |host, pool: Value| {
        with_pool(&pool, |pool| data(&host.set.admission_gate(pool)))
    })?;
    add(lua, host, table, "weights", |host, pool: Value| {
        with_pool(&pool, |pool| data(&host.set.routing_weights(pool)))
    })?;
    add(lua, host, table, "prices", |host, model: Option<String>| {
        data(&host.set.prices(model.as_deref().unwrap_or("example")))
    })?;
    add(lua, host, table, "reject", reject)?;
    add(lua, host, table, "rank", rank)?;
    add(lua, host, table, "filter", filter)?;
    add(lua, host, table, "score", score)?;
    add(lua, host, table, "metrics", metrics)?;
    let engine = lua.create_function({
        let host = Rc::clone(host);
        move |lua, name: String| engine(lua, &host, &name)
    })?;
    table.raw_set("engine", engine)
}

/// A function whose result is data with fixed names.
fn add<A: FromLuaMulti + 'static>(
    lua: &Lua,
    host: &Rc<Host>,
    table: &Table,
    name: &str,
    call: impl Fn(&Host, A) -> Outcome + 'static,
) -> mlua::Result<()> {
    let host = Rc::clone(host);
    let function = lua.create_function(move |lua, args: A| match call(&host, args) {
        Ok(value) => host.strict(lua, &value),
        Err(reason) => Err(host.raise(lua, &reason)),
    })?;
    table.raw_set(name, function)
}

fn data<T: Serialize>(value: &T) -> Outcome {
    serde_json::to_value(value).map_err(|e| e.to_string())
}

/// The band with the least priority: what a tenant has that says nothing.
fn lowest_band(host: &Host) -> &str {
    let bands = host.set.bands_at_load().iter();
    let lowest = bands.min_by(|a, b| a.priority.total_cmp(&b.priority));
    lowest.map_or("", |band| &*band.name)
}

fn classify(host: &Host, request: &Value, tenant: &Value) -> Result<(String, Option<u64>), String> {
    let (request, tenant) = (
        read::<RequestView<'_>>(request)?,
        read::<TenantView<'_>>(tenant)?,
    );
    let tenant = inputs::tenant(&tenant, lowest_band(host));
    let band = host.set.classify(&inputs::request(&request), &tenant);
    Ok((band.name.to_string(), band.ttl_ms))
}

fn key(host: &Host, request: &Value, tenant: &Value) -> Result<Option<String>, String> {
    let (request, tenant) = (
        read::<RequestView<'_>>(request)?,
        read::<TenantView<'_>>(tenant)?,
    );
    let tenant = inputs::tenant(&tenant, lowest_band(host));
    Ok(host.set.key(&inputs::request(&request), &tenant))
}

fn weight(host: &Host, tenant: &Value, usage: &Value) -> Result<f64, String> {
    let (tenant, usage) = (read::<TenantView<'_>>(tenant)?, read::<UsageView>(usage)?);
    let tenant = inputs::tenant(&tenant, lowest_band(host));
    Ok(host.set.tenant_weight(&tenant, &inputs::usage(&usage)))
}

fn with_pool(pool: &Value, call: impl FnOnce(&PoolView<'_>) -> Outcome) -> Outcome {
    let given = read::<PoolView<'_>>(pool)?;
    let queues = inputs::queues(&given);
    call(&inputs::pool(&given, &queues))
}

fn reject(host: &Host, (request, why): (Value, String)) -> Outcome {
    let request = read::<RequestView<'_>>(&request)?;
    let refusal = host.set.reject(&inputs::request(&request), &why);
    Ok(json!({ "status": refusal.status, "wait_ms": refusal.wait_ms }))
}

fn rank(host: &Host, (request, replicas): (Value, Table)) -> Outcome {
    let request = read::<RequestView<'_>>(&request)?;
    let mut given = Vec::new();
    for replica in replicas.sequence_values::<Value>() {
        let replica = replica.map_err(|e| e.to_string())?;
        if given.len() == RANK_CANDIDATES_MAX {
            return Err(format!(
                "at most {RANK_CANDIDATES_MAX} candidates are ranked"
            ));
        }
        given.push(read::<ReplicaView<'_>>(&replica)?);
    }
    let views: Vec<_> = given.iter().map(|given| inputs::replica(given)).collect();
    let ranked = host.set.rank(&inputs::request(&request), &views);
    Ok(match ranked {
        None => Json::Null,
        Some(ranked) => json!({
            "index": ranked.index + 1,
            "id": views.get(ranked.index).map(|view| view.id),
            "reason": ranked.reason,
        }),
    })
}

fn filter(host: &Host, (job, node): (Value, Value)) -> Outcome {
    let (job, node) = (read::<JobView<'_>>(&job)?, read::<NodeView<'_>>(&node)?);
    let mut decision = host.set.decision();
    Ok(
        match decision.filter(&inputs::job(&job), &inputs::node(&node)) {
            Verdict::Fit => json!({ "fit": true, "code": null, "text": null }),
            Verdict::Unfit { code, text } => {
                host.refusals.borrow_mut().insert(code.clone());
                json!({ "fit": false, "code": code, "text": text })
            }
        },
    )
}

fn score(host: &Host, (job, candidate): (Value, Value)) -> Outcome {
    let (job, candidate) = (
        read::<JobView<'_>>(&job)?,
        read::<CandidateView<'_>>(&candidate)?,
    );
    let mut decision = host.set.decision();
    let score = decision.score(&inputs::job(&job), &inputs::candidate(&candidate));
    Ok(match score {
        None => Json::Null,
        Some(score) => {
            let parts: serde_json::Map<_, _> = score
                .parts
                .into_iter()
                .map(|(name, part)| (name, json!(part)))
                .collect();
            json!({ "total": score.total, "parts": parts })
        }
    })
}

/// As a scrape is read: by the engine's `map`, else by its names.
fn metrics(host: &Host, (engine, text): (String, String)) -> Outcome {
    let plugin = host
        .set
        .engine(&engine)
        .ok_or_else(|| no_engine(host, &engine))?;
    let samples = Samples::parse(&text);
    const DT_MS: f64 = 1000.0;
    let load = match (
        plugin.maps && host.set.defines(Hook::EngineMap),
        &plugin.metrics,
    ) {
        (true, _) => host.set.map_metrics(&engine, &samples, None, DT_MS),
        (false, Some(names)) => Some(names.read(&samples)),
        (false, None) => None,
    };
    data(&load.unwrap_or_default())
}

fn no_engine(host: &Host, name: &str) -> String {
    let hint = did_you_mean(name, host.set.engine_names());
    format!("there is no engine plugin '{name}'{hint}")
}

/// `t.engine(name)`: its data and its functions.
fn engine(lua: &Lua, host: &Rc<Host>, name: &str) -> mlua::Result<Value> {
    let Some(plugin) = host.set.engine(name) else {
        return Err(host.raise(lua, &no_engine(host, name)));
    };
    let json = data(plugin.as_ref()).map_err(|reason| host.raise(lua, &reason))?;
    // Its own `commands`, a list of executables, gives way to the function.
    let mut fields = json.as_object().cloned().unwrap_or_default();
    let executables = fields.remove("commands").unwrap_or_default();
    fields.insert("executables".to_owned(), executables);
    for function in ["commands", "validate", "classify_error", "serves_http"] {
        fields.insert(function.to_owned(), Json::Null);
    }
    let value = host.strict(lua, &Json::Object(fields))?;
    let Value::Table(table) = &value else {
        return Ok(value);
    };
    method(lua, host, table, name, "commands", commands)?;
    method(lua, host, table, name, "validate", validate)?;
    method(lua, host, table, name, "classify_error", classify_error)?;
    method(lua, host, table, name, "serves_http", serves_http)?;
    Ok(value)
}

type Method = fn(&Host, &str, &MultiValue) -> Outcome;

/// A method: its first argument is the engine itself.
fn method(
    lua: &Lua,
    host: &Rc<Host>,
    table: &Table,
    engine: &str,
    name: &'static str,
    call: Method,
) -> mlua::Result<()> {
    let (host, engine) = (Rc::clone(host), engine.to_owned());
    let function = lua.create_function(move |lua, mut args: MultiValue| {
        if !matches!(args.pop_front(), Some(Value::Table(_))) {
            let reason = format!("write t.engine(...):{name}, with a colon");
            return Err(host.raise(lua, &reason));
        }
        match call(&host, &engine, &args) {
            Ok(value) => host.strict(lua, &value),
            Err(reason) => Err(host.raise(lua, &reason)),
        }
    })?;
    table.raw_set(name, function)
}

fn arg(args: &MultiValue, at: usize) -> Value {
    args.get(at).cloned().unwrap_or(Value::Nil)
}

fn commands(host: &Host, engine: &str, args: &MultiValue) -> Outcome {
    let given = read::<ShardView<'_>>(&arg(args, 0))?;
    let commands = host
        .set
        .commands(engine, &inputs::shard(&given, engine))
        .map_err(|fault| fault.message)?;
    data(&commands)
}

fn validate(host: &Host, engine: &str, args: &MultiValue) -> Outcome {
    let profile = read::<ProfileView<'_>>(&arg(args, 0))?;
    let model = read::<ModelView<'_>>(&arg(args, 1))?;
    let profile = inputs::profile(&profile, engine);
    data(&host.set.validate(engine, &profile, &inputs::model(&model)))
}

fn classify_error(host: &Host, engine: &str, args: &MultiValue) -> Outcome {
    let status = match arg(args, 0) {
        Value::Integer(status) if (0..=999).contains(&status) => status as u16,
        Value::Number(status) if (0.0..=999.0).contains(&status) => status as u16,
        other => return Err(format!("a status is a number, not a {}", type_name(&other))),
    };
    let body = match arg(args, 1) {
        Value::Nil => Vec::new(),
        Value::String(body) => body.as_bytes().to_vec(),
        other => return Err(format!("a body is a text, not a {}", type_name(&other))),
    };
    data(&host.set.classify_error(engine, status, &body))
}

fn serves_http(host: &Host, engine: &str, args: &MultiValue) -> Outcome {
    let given = read::<ShardView<'_>>(&arg(args, 0))?;
    data(&host.set.serves_http(engine, &inputs::shard(&given, engine)))
}
