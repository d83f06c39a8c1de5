//! `t.simulate`: a test's few words as a plan, run over this program's own dispatcher.

use std::sync::Arc;

use llmgw_plugins::PolicySet;
use llmgw_plugins::test::Answer;
use serde_json::{Map, Value};

use crate::config::suggestion;
use crate::flow::simulate::plan::{Load, Plan, ReplicaPlan, Span, TenantPlan};
use crate::flow::simulate::{Discipline, simulate};

/// Where a test doesn't say it.
const SECONDS: f64 = 20.0;
const SECONDS_MAX: f64 = 3_600.0;
const TENANTS_MAX: usize = 200;
const REPLICAS_MAX: usize = 64;
const SLOTS_MAX: u64 = 4_096;
const CLIENTS_MAX: u64 = 10_000;
const REQUESTS_S_MAX: f64 = 10_000.0;
const TOKENS_MAX: u64 = 1_000_000;
/// A prompt token, or a step: an hour.
const STEP_MAX_MS: f64 = 3_600_000.0;
const WEIGHT_RANGE: (f64, f64) = (0.01, 100.0);
/// More is more than a test may take.
const EVENTS_MAX: u64 = 200_000;

const KEYS: [&str; 4] = ["seconds", "seed", "replicas", "tenants"];
const REPLICA_KEYS: [&str; 6] = [
    "slots",
    "ms_per_prefill_token",
    "ms_per_decode_step",
    "ms_per_other_stream",
    "dies_ms",
    "returns_ms",
];
const TENANT_KEYS: [&str; 13] = [
    "name",
    "weight",
    "band",
    "best_band",
    "band_hint",
    "clients",
    "think_ms",
    "requests_s",
    "input_tokens",
    "output_tokens",
    "stream",
    "sessions",
    "leaves_ms",
];

/// Simulates what a test asks for. The error is one sentence.
pub(super) fn answer(set: &PolicySet, ask: &Value) -> Result<Answer, String> {
    let plan = plan(set, ask).map_err(|reason| format!("t.simulate: {reason}"))?;
    let outcome = simulate(&plan, set, Discipline::Policy);
    let outcome = outcome.map_err(|error| format!("t.simulate: {error}"))?;
    Ok(Answer {
        value: outcome.json(),
        story: outcome.story(),
    })
}

fn plan(set: &PolicySet, ask: &Value) -> Result<Plan, String> {
    let ask = Fields::of("it".to_owned(), ask, &KEYS)?;
    let seconds = ask.number("seconds", (0.001, SECONDS_MAX))?;
    let replicas = match ask.list("replicas", REPLICAS_MAX)? {
        Some(list) => list
            .iter()
            .enumerate()
            .map(replica)
            .collect::<Result<_, _>>()?,
        None => vec![ReplicaPlan::default()],
    };
    let list = ask.list("tenants", TENANTS_MAX)?;
    let list = list.ok_or("`tenants` is missing: who asks for what")?;
    let mut tenants: Vec<TenantPlan> = Vec::new();
    for (at, value) in list.iter().enumerate() {
        let tenant = tenant(set, at, value)?;
        if tenants.iter().any(|known| known.name == tenant.name) {
            return Err(format!("two tenants are called `{}`", tenant.name));
        }
        tenants.push(tenant);
    }
    Ok(Plan {
        seed: ask.whole("seed", u64::MAX >> 12)?.unwrap_or(0),
        end_ms: Some((seconds.unwrap_or(SECONDS) * 1e3) as u64),
        events_max: EVENTS_MAX,
        replicas,
        tenants,
        recorded: Vec::new(),
    })
}

fn replica((at, value): (usize, &Value)) -> Result<ReplicaPlan, String> {
    let ask = Fields::of(format!("replica {}", at + 1), value, &REPLICA_KEYS)?;
    let plain = ReplicaPlan::default();
    let step =
        |name, default| Ok::<_, String>(ask.number(name, (0.0, STEP_MAX_MS))?.unwrap_or(default));
    Ok(ReplicaPlan {
        slots: match ask.whole("slots", SLOTS_MAX)? {
            Some(0) => return Err(ask.wrong("slots", "at least 1")),
            slots => slots.map_or(plain.slots, |slots| slots as u32),
        },
        ms_per_prefill_token: step("ms_per_prefill_token", plain.ms_per_prefill_token)?,
        ms_per_decode_step: step("ms_per_decode_step", plain.ms_per_decode_step)?,
        ms_per_other_stream: step("ms_per_other_stream", plain.ms_per_other_stream)?,
        dies_ms: ask.whole("dies_ms", u64::MAX >> 12)?,
        returns_ms: ask.whole("returns_ms", u64::MAX >> 12)?,
    })
}

fn tenant(set: &PolicySet, at: usize, value: &Value) -> Result<TenantPlan, String> {
    let ask = Fields::of(format!("tenant {}", at + 1), value, &TENANT_KEYS)?;
    let name = ask
        .text("name")?
        .map_or_else(|| format!("t{}", at + 1), str::to_owned);
    let bands = set.bands_at_load();
    let known: Vec<&str> = bands.iter().map(|band| &*band.name).collect();
    let band = |key| match ask.text(key)? {
        Some(name) if !known.contains(&name) => {
            let hint = suggestion(name, &known);
            Err(format!("there is no band `{name}` ({hint})"))
        }
        name => Ok(name.map(Arc::from)),
    };
    let lowest = bands
        .iter()
        .min_by(|a, b| a.priority.total_cmp(&b.priority));
    let lowest = lowest.map_or_else(|| Arc::from(""), |band| band.name.clone());
    let own = band("band")?.unwrap_or(lowest);
    let plain = TenantPlan::new(&name, &own);
    Ok(TenantPlan {
        weight: ask.number("weight", WEIGHT_RANGE)?.unwrap_or(plain.weight),
        best_band: band("best_band")?.unwrap_or(own),
        band_hint: ask.text("band_hint")?.map(Arc::from),
        load: load(&ask)?,
        input_tokens: ask.span("input_tokens")?.unwrap_or(plain.input_tokens),
        output_tokens: ask.span("output_tokens")?.unwrap_or(plain.output_tokens),
        stream: ask.flag("stream")?.unwrap_or(plain.stream),
        sessions: ask.whole("sessions", CLIENTS_MAX)?.unwrap_or(0) as u32,
        leaves_ms: ask.whole("leaves_ms", u64::MAX >> 12)?,
        ..plain
    })
}

fn load(ask: &Fields<'_>) -> Result<Load, String> {
    let clients = ask.whole("clients", CLIENTS_MAX)?;
    let think_ms = ask.whole("think_ms", u64::MAX >> 12)?;
    match ask.number("requests_s", (1e-6, REQUESTS_S_MAX))? {
        None => Ok(Load::Clients {
            count: clients.unwrap_or(1) as u32,
            think_ms: think_ms.unwrap_or(0),
        }),
        Some(_) if clients.is_some() || think_ms.is_some() => {
            Err(ask.wrong("requests_s", "given without `clients` and `think_ms`"))
        }
        Some(per_s) => Ok(Load::Rate { per_s }),
    }
}

/// A table of the test, whose keys are known.
struct Fields<'a> {
    what: String,
    fields: Option<&'a Map<String, Value>>,
}

impl<'a> Fields<'a> {
    fn of(what: String, value: &'a Value, known: &[&str]) -> Result<Fields<'a>, String> {
        let fields = match value {
            Value::Object(fields) => Some(fields),
            // An empty table is a list.
            Value::Array(items) if items.is_empty() => None,
            _ => return Err(format!("{what} takes a table with names")),
        };
        for name in fields.into_iter().flat_map(Map::keys) {
            if !known.contains(&name.as_str()) {
                let hint = suggestion(name, known);
                return Err(format!("{what} has no field `{name}` ({hint})"));
            }
        }
        Ok(Fields { what, fields })
    }

    fn get(&self, name: &str) -> Option<&'a Value> {
        let value = self.fields?.get(name)?;
        (!value.is_null()).then_some(value)
    }

    fn wrong(&self, name: &str, wanted: &str) -> String {
        format!("`{name}` of {} is {wanted}", self.what)
    }

    fn number(&self, name: &str, (least, most): (f64, f64)) -> Result<Option<f64>, String> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = value.as_f64().filter(|n| (least..=most).contains(n));
        let wrong = || self.wrong(name, &format!("a number from {least} to {most}"));
        number.map(Some).ok_or_else(wrong)
    }

    fn whole(&self, name: &str, most: u64) -> Result<Option<u64>, String> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let wrong = || self.wrong(name, &format!("a whole number from 0 to {most}"));
        whole(value, most).map(Some).ok_or_else(wrong)
    }

    fn text(&self, name: &str) -> Result<Option<&'a str>, String> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_str()
            .map(Some)
            .ok_or_else(|| self.wrong(name, "a text"))
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, String> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let wrong = || self.wrong(name, "true or false");
        value.as_bool().map(Some).ok_or_else(wrong)
    }

    fn list(&self, name: &str, most: usize) -> Result<Option<&'a [Value]>, String> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let list = value.as_array().map(Vec::as_slice);
        let list = list.filter(|list| (1..=most).contains(&list.len()));
        let wrong = || self.wrong(name, &format!("a list of 1 to {most} tables"));
        list.map(Some).ok_or_else(wrong)
    }

    /// A number of tokens, or the least and the greatest.
    fn span(&self, name: &str) -> Result<Option<Span>, String> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let tokens = |value: &Value| whole(value, TOKENS_MAX).filter(|tokens| *tokens > 0);
        let span = match value.as_array().map(Vec::as_slice) {
            Some([least, greatest]) => tokens(least).zip(tokens(greatest)),
            Some(_) => None,
            None => tokens(value).map(|tokens| (tokens, tokens)),
        };
        let span = span.filter(|(least, greatest)| least <= greatest);
        let wanted =
            format!("1 to {TOKENS_MAX} tokens, or the least and the greatest: {{ 100, 500 }}");
        let (least, greatest) = span.ok_or_else(|| self.wrong(name, &wanted))?;
        Ok(Some(Span { least, greatest }))
    }
}

fn whole(value: &Value, most: u64) -> Option<u64> {
    let number = value.as_f64()?;
    let is_whole = number.fract() == 0.0 && (0.0..=most as f64).contains(&number);
    is_whole.then_some(number as u64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn simulated(ask: &Value) -> Result<Value, String> {
        let found = answer(&PolicySet::built_in(), ask);
        found.map(|answer| answer.value)
    }

    #[test]
    fn a_few_words_are_enough_and_every_tenant_gets_its_figures() {
        let found = simulated(&json!({
            "seconds": 10,
            "tenants": [
                { "name": "light", "input_tokens": 100, "output_tokens": 20 },
                { "name": "heavy", "clients": 12, "input_tokens": [500, 1500], "output_tokens": 50 },
            ],
        }))
        .unwrap();
        let (light, heavy) = (&found["tenants"]["light"], &found["tenants"]["heavy"]);
        assert!(light["served"].as_u64().unwrap() > 5, "{found:#}");
        assert!(heavy["waiting"].as_u64().unwrap() > 5, "{found:#}");
        assert!(light["wait_p90_ms"].as_f64() < heavy["wait_p90_ms"].as_f64());
        assert_eq!(
            (&found["ms"], &found["refused"]),
            (&json!(10_000), &json!(0))
        );
        assert!(found["bands"]["batch"]["served"].as_u64().unwrap() > 5);
        assert_eq!(found["bands"]["interactive"]["wait_p90_ms"], Value::Null);
    }

    #[test]
    fn what_makes_no_sense_is_an_error_that_says_what_would() {
        let cases = [
            (json!({}), "t.simulate: `tenants` is missing"),
            (
                json!({ "tenant": [] }),
                "it has no field `tenant` (did you mean `tenants`?)",
            ),
            (
                json!({ "tenants": [] }),
                "`tenants` of it is a list of 1 to 200 tables",
            ),
            (
                json!({ "tenants": [{}, { "cliens": 2 }] }),
                "tenant 2 has no field `cliens` (did you mean `clients`?)",
            ),
            (
                json!({ "tenants": [{ "band": "bach" }] }),
                "there is no band `bach` (did you mean `batch`?)",
            ),
            (
                json!({ "tenants": [{ "name": "a" }, { "name": "a" }] }),
                "two tenants are called `a`",
            ),
            (
                json!({ "tenants": [{ "input_tokens": [5, 1] }] }),
                "`input_tokens` of tenant 1 is 1 to 1000000 tokens, or the least and the greatest",
            ),
            (
                json!({ "tenants": [{ "requests_s": 1, "clients": 2 }] }),
                "`requests_s` of tenant 1 is given without `clients` and `think_ms`",
            ),
            (
                json!({ "tenants": [{}], "replicas": [{ "slots": 0 }] }),
                "`slots` of replica 1 is at least 1",
            ),
            (
                json!({ "tenants": [{}], "replicas": [{ "slot": 1 }] }),
                "replica 1 has no field `slot` (did you mean `slots`?)",
            ),
            (
                json!({ "tenants": [{ "clients": 10_000, "output_tokens": 1 }], "seconds": 3_600,
                        "replicas": [{ "ms_per_prefill_token": 0, "ms_per_decode_step": 0.01 }] }),
                "t.simulate: more than 200000 events, after ",
            ),
        ];
        for (ask, wanted) in cases {
            let error = simulated(&ask).unwrap_err();
            assert!(error.contains(wanted), "{error} instead of {wanted}");
        }
    }
}
