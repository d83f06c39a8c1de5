//! How a returned Lua value becomes a hook's result: ranges, clamps, and what counts as which error.

use std::sync::Arc;

use mlua::{Table, Value};

use crate::error::{ErrorKind, Fault, did_you_mean};
use crate::hooks::weights::{KNOBS, RoutingWeights};
use crate::hooks::{BandSpec, ErrorClass, Gate, Prices, Ranked, Refusal};
use crate::vm::crossing::Answer;
use crate::vm::sandbox::cut;

/// Bands at most.
pub const BANDS_MAX: usize = 16;
/// All floors together.
pub const FLOORS_MAX: f64 = 0.8;
/// A day: the longest time to wait that a hook may ask for.
const TTL_MAX_MS: f64 = 86_400_000.0;
/// A name of a band, a tenant's flow key, a reason.
const NAME_MAX_BYTES: usize = 64;

/// A value and the range faults that were clamped away on the way to it.
pub(crate) type Clamped<T> = (T, Vec<Fault>);

/// Reads numbers out of a returned table.
pub(crate) fn number(value: &Value, what: &str) -> Result<f64, Fault> {
    match value {
        Value::Integer(n) => Ok(*n as f64),
        Value::Number(n) => number_answer(&Answer::Number(*n), what),
        Value::Nil => number_answer(&Answer::Nil, what),
        other => Err(wrong_type(what, other, "a number")),
    }
}

/// The same for a value that was returned as it is.
fn number_answer(answer: &Answer<'_>, what: &str) -> Result<f64, Fault> {
    match answer {
        Answer::Number(number) if number.is_nan() => {
            Err(Fault::new(ErrorKind::Nan, format!("{what} is NaN")))
        }
        Answer::Number(number) => Ok(*number),
        Answer::Nil => Err(Fault::new(
            ErrorKind::Nil,
            format!("{what} is nil, a number is needed"),
        )),
        other => Err(wrong_answer(what, other, "a number")),
    }
}

/// A number of a returned table, brought into its range. A zero is never negative.
pub(crate) fn clamped(
    value: &Value,
    what: &str,
    range: (f64, f64),
    faults: &mut Vec<Fault>,
) -> Result<f64, Fault> {
    number(value, what).map(|number| clamp(number, what, range, faults))
}

/// The same for a value that was returned as it is.
fn within(
    answer: &Answer<'_>,
    what: &str,
    range: (f64, f64),
    faults: &mut Vec<Fault>,
) -> Result<f64, Fault> {
    number_answer(answer, what).map(|number| clamp(number, what, range, faults))
}

fn clamp(number: f64, what: &str, range: (f64, f64), faults: &mut Vec<Fault>) -> f64 {
    let inside = number.clamp(range.0, range.1) + 0.0;
    if inside != number {
        let message = format!(
            "{what} is {number}, its range is {} to {}",
            range.0, range.1
        );
        faults.push(Fault::new(ErrorKind::Range, message));
    }
    inside
}

fn wrong_type(what: &str, value: &Value, wanted: &str) -> Fault {
    of_type(what, crate::vm::sandbox::type_name(value), wanted)
}

fn wrong_answer(what: &str, answer: &Answer<'_>, wanted: &str) -> Fault {
    of_type(what, answer.type_name(), wanted)
}

fn of_type(what: &str, name: &str, wanted: &str) -> Fault {
    Fault::new(
        ErrorKind::Error,
        format!("{what} is a {name}, {wanted} is needed"),
    )
}

/// The returned table, whose keys must be known ones.
fn table<'v>(value: &'v Value, what: &str, noun: &str, known: &[&str]) -> Result<&'v Table, Fault> {
    let table = match value {
        Value::Table(table) => table,
        Value::Nil => {
            return Err(Fault::new(
                ErrorKind::Nil,
                format!("{what} returned nil, a table is needed"),
            ));
        }
        other => return Err(wrong_type(what, other, "a table")),
    };
    only(table, noun, known)?;
    Ok(table)
}

/// Refuses a table with a key that nobody knows.
pub(crate) fn only(table: &Table, noun: &str, known: &[&str]) -> Result<(), Fault> {
    for pair in table.pairs::<Value, Value>() {
        let (key, _) = pair.map_err(|e| crate::vm::sandbox::fault(&e))?;
        let Value::String(key) = &key else {
            return Err(Fault::new(
                ErrorKind::Unknown,
                format!(
                    "unknown {noun} of type {}",
                    crate::vm::sandbox::type_name(&key)
                ),
            ));
        };
        let key = cut(&key.to_string_lossy(), NAME_MAX_BYTES);
        if !known.contains(&key.as_str()) {
            let hint = did_you_mean(&key, known.iter().copied());
            return Err(Fault::new(
                ErrorKind::Unknown,
                format!("unknown {noun} '{key}'{hint}"),
            ));
        }
    }
    Ok(())
}

fn get(table: &Table, key: &str) -> Result<Value, Fault> {
    table
        .raw_get(key)
        .map_err(|e| crate::vm::sandbox::fault(&e))
}

/// `routing.weights`.
pub(crate) fn weights(value: &Value) -> Result<Clamped<RoutingWeights>, Fault> {
    let known: Vec<&str> = KNOBS.iter().map(|knob| knob.name).collect();
    let table = table(value, "weights", "knob", &known)?;
    let mut weights = RoutingWeights::default();
    let mut faults = Vec::new();
    for knob in &KNOBS {
        let value = get(table, knob.name)?;
        if !value.is_nil() {
            let what = format!("knob '{}'", knob.name);
            (knob.set)(
                &mut weights,
                clamped(&value, &what, knob.range, &mut faults)?,
            );
        }
    }
    Ok((weights, faults))
}

/// `admission.bands`.
pub(crate) fn bands(value: &Value) -> Result<Clamped<Vec<BandSpec>>, Fault> {
    let list = match value {
        Value::Table(list) => list,
        Value::Nil => {
            return Err(Fault::new(
                ErrorKind::Nil,
                "bands returned nil, a list is needed",
            ));
        }
        other => return Err(wrong_type("bands", other, "a list")),
    };
    let count = list.raw_len();
    if count == 0 || count > BANDS_MAX {
        return Err(Fault::new(
            ErrorKind::Range,
            format!("bands returned {count} bands, 1 to {BANDS_MAX} are possible"),
        ));
    }
    let mut bands: Vec<BandSpec> = Vec::with_capacity(count);
    let mut faults = Vec::new();
    for at in 1..=count {
        let value: Value = list
            .raw_get(at)
            .map_err(|e| crate::vm::sandbox::fault(&e))?;
        let band = band(&value, &mut faults)?;
        if bands.iter().any(|other| other.name == band.name) {
            return Err(Fault::new(
                ErrorKind::Error,
                format!("band '{}' is there twice", band.name),
            ));
        }
        bands.push(band);
    }
    let floors: f64 = bands.iter().map(|band| band.floor).sum();
    if floors > FLOORS_MAX + 1e-9 {
        let message =
            format!("the floors of all bands sum up to {floors}, at most {FLOORS_MAX} is possible");
        faults.push(Fault::new(ErrorKind::Range, message));
        bands
            .iter_mut()
            .for_each(|band| band.floor *= FLOORS_MAX / floors);
    }
    Ok((bands, faults))
}

fn band(value: &Value, faults: &mut Vec<Fault>) -> Result<BandSpec, Fault> {
    let known = ["name", "priority", "floor", "max_queue", "ttl_ms", "shed"];
    let table = table(value, "a band", "key of a band", &known)?;
    let name = match get(table, "name")? {
        Value::String(name) => name.to_string_lossy(),
        other => return Err(wrong_type("a band's name", &other, "a string")),
    };
    if name.is_empty() || name.len() > NAME_MAX_BYTES {
        return Err(Fault::new(
            ErrorKind::Range,
            format!("a band's name has 1 to {NAME_MAX_BYTES} bytes"),
        ));
    }
    let mut field = |key: &str, range, default: Option<f64>| match (get(table, key)?, default) {
        (Value::Nil, Some(default)) => Ok(default),
        (value, _) => clamped(&value, &format!("{key} of band '{name}'"), range, faults),
    };
    Ok(BandSpec {
        priority: field("priority", (-1e6, 1e6), None)?,
        floor: field("floor", (0.0, 0.5), Some(0.0))?,
        max_queue: field("max_queue", (0.0, 1e7), Some(5000.0))? as u64,
        ttl_ms: field("ttl_ms", (1.0, TTL_MAX_MS), Some(120_000.0))? as u64,
        shed: match field("shed", (0.0, 1.0), Some(-1.0))? {
            never if never < 0.0 => None,
            above => Some(above),
        },
        name: Arc::from(name.as_str()),
    })
}

/// `admission.gate`.
pub(crate) fn gate(value: &Value) -> Result<Clamped<Gate>, Fault> {
    let table = table(
        value,
        "gate",
        "key of the gate",
        &["hold_ms", "kv_max", "inflight_max"],
    )?;
    let mut faults = Vec::new();
    let mut gate = Gate {
        hold_ms: 500.0,
        kv_max: 0.9,
        inflight_max: None,
    };
    match get(table, "hold_ms")? {
        Value::Nil => {}
        value => gate.hold_ms = clamped(&value, "hold_ms", (0.0, TTL_MAX_MS), &mut faults)?,
    }
    match get(table, "kv_max")? {
        Value::Nil => {}
        value => gate.kv_max = clamped(&value, "kv_max", (0.0, 1.0), &mut faults)?,
    }
    match get(table, "inflight_max")? {
        Value::Nil => {}
        value => {
            gate.inflight_max =
                Some(clamped(&value, "inflight_max", (1.0, 1e6), &mut faults)? as u32)
        }
    }
    Ok((gate, faults))
}

/// `fairness.prices`.
pub(crate) fn prices(value: &Value) -> Result<Clamped<Prices>, Fault> {
    let table = table(value, "prices", "price", &["input", "cached", "output"])?;
    let mut faults = Vec::new();
    let mut price = |key: &str| {
        clamped(
            &get(table, key)?,
            &format!("price '{key}'"),
            (0.0, 1e6),
            &mut faults,
        )
    };
    let prices = Prices {
        input: price("input")?,
        cached: price("cached")?,
        output: price("output")?,
    };
    Ok((prices, faults))
}

/// `fairness.weight`.
pub(crate) fn weight(answer: &Answer<'_>) -> Result<Clamped<f64>, Fault> {
    let mut faults = Vec::new();
    let weight = within(answer, "weight", (0.01, 100.0), &mut faults)?;
    Ok((weight, faults))
}

/// `fairness.key`: nil leaves the tenant whole.
pub(crate) fn key(answer: &Answer<'_>) -> Result<Option<String>, Fault> {
    match answer {
        Answer::Nil => Ok(None),
        Answer::Text { beginning, bytes } if *bytes <= NAME_MAX_BYTES => {
            Ok(Some(String::from_utf8_lossy(beginning).into_owned()))
        }
        Answer::Text { .. } => Err(Fault::new(
            ErrorKind::Range,
            format!("key is longer than {NAME_MAX_BYTES} bytes"),
        )),
        other => Err(wrong_answer("key", other, "a string")),
    }
}

/// `admission.classify`: a position in `bands`, and a time to wait.
pub(crate) fn classify(
    [name, ttl_ms, _]: &[Answer<'_>; 3],
    bands: &[BandSpec],
) -> Result<Clamped<(usize, Option<u64>)>, Fault> {
    let known = match name {
        // A name of a band is shorter than what is read of a text.
        Answer::Text { beginning, .. } => bands
            .iter()
            .position(|band| band.name.as_bytes() == *beginning),
        Answer::Nil => {
            return Err(Fault::new(
                ErrorKind::Nil,
                "classify returned nil, a band is needed",
            ));
        }
        other => {
            let wanted = "a band's name";
            return Err(wrong_answer("what classify returned", other, wanted));
        }
    };
    let position = known.ok_or_else(|| {
        let name = name.text(NAME_MAX_BYTES).unwrap_or_default();
        let hint = did_you_mean(&name, bands.iter().map(|band| &*band.name));
        Fault::new(ErrorKind::Unknown, format!("unknown band '{name}'{hint}"))
    })?;
    let mut faults = Vec::new();
    let ttl_ms = match ttl_ms {
        Answer::Nil => None,
        answer => Some(within(answer, "ttl_ms", (1.0, TTL_MAX_MS), &mut faults)? as u64),
    };
    Ok(((position, ttl_ms), faults))
}

/// `admission.reject`: nil is the native answer.
pub(crate) fn reject(
    [status, wait_ms, _]: &[Answer<'_>; 3],
) -> Result<Option<Clamped<Refusal>>, Fault> {
    let status = match status {
        Answer::Nil => return Ok(None),
        answer => number_answer(answer, "status")?,
    };
    if status != 429.0 && status != 503.0 {
        return Err(Fault::new(
            ErrorKind::Range,
            format!("status is {status}, 429 and 503 are possible"),
        ));
    }
    let mut faults = Vec::new();
    let wait_ms = match wait_ms {
        Answer::Nil => None,
        answer => Some(within(answer, "wait_ms", (1000.0, 60_000.0), &mut faults)? as u64),
    };
    Ok(Some((
        Refusal {
            status: status as u16,
            wait_ms,
        },
        faults,
    )))
}

/// `routing.rank`: nil is the native choice.
pub(crate) fn rank(
    [index, reason, _]: &[Answer<'_>; 3],
    candidates: usize,
) -> Result<Option<Ranked>, Fault> {
    let index = match index {
        Answer::Nil => return Ok(None),
        answer => number_answer(answer, "index")?,
    };
    if index.fract() != 0.0 || index < 1.0 || index > candidates as f64 {
        return Err(Fault::new(
            ErrorKind::Range,
            format!("index is {index}, 1 to {candidates} are possible"),
        ));
    }
    Ok(Some(Ranked {
        index: index as usize - 1,
        reason: reason.text(NAME_MAX_BYTES),
    }))
}

/// `engine.classify_error`: nil is the native rule.
pub(crate) fn error_class(value: &Value) -> Result<Option<ErrorClass>, Fault> {
    let name = match value {
        Value::Nil => return Ok(None),
        Value::String(name) => cut(&name.to_string_lossy(), NAME_MAX_BYTES),
        other => return Err(wrong_type("what classify_error returned", other, "a name")),
    };
    match name.as_str() {
        "client_fault" => Ok(Some(ErrorClass::ClientFault)),
        "retry_other" => Ok(Some(ErrorClass::RetryOther)),
        "fatal" => Ok(Some(ErrorClass::Fatal)),
        _ => {
            let hint = did_you_mean(&name, ["client_fault", "retry_other", "fatal"]);
            Err(Fault::new(
                ErrorKind::Unknown,
                format!("unknown class '{name}'{hint}"),
            ))
        }
    }
}

/// `engine.map`: what it leaves out is unknown.
pub(crate) fn load(value: &Value) -> Result<Clamped<crate::engine::metrics::Load>, Fault> {
    let table = table(value, "map", "metric", &["running", "waiting", "kv"])?;
    let mut faults = Vec::new();
    let mut field = |key: &str, max: f64| match get(table, key)? {
        Value::Nil => Ok(None),
        value => clamped(&value, key, (0.0, max), &mut faults).map(Some),
    };
    let load = crate::engine::metrics::Load {
        running: field("running", 1e9)?,
        waiting: field("waiting", 1e9)?,
        kv: field("kv", 1.0)?,
    };
    Ok((load, faults))
}
