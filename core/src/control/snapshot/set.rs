//! Reads and varies a snapshot by path, for tests of policies; a misspelt path is an error with a suggestion.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::path::{self, Step};
use super::{Node, NodeFacts, Snapshot, check, read};
use crate::config::suggestion;

/// Why a path could not be read or set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetError {
    /// As it was given.
    pub path: String,
    /// What is wrong.
    pub wrong: String,
    /// What would be right, empty where the message says it.
    pub right: String,
}

/// Maps of the snapshot.
const MAPS: [&str; 4] = ["nodes", "models", "replicas", "pools"];
/// Fields of a node that are derived, and so are in policies' inputs but not in the file.
const DERIVED: [&str; 4] = ["gpus_free", "gpu_class", "fabric", "domains"];

impl Snapshot {
    /// Sets one value: `nodes["ml-07"].gpus_free` to 4. Positions in lists count from 0; null takes an entry or an
    /// optional value away, and what a replica or a node held is released with it.
    ///
    /// Of the derived fields `gpus_free` marks GPUs as taken or gives them back, `gpu_class` sets all GPUs' class, and
    /// `fabric` becomes the only one.
    ///
    /// # Errors
    /// The path leads nowhere, or the value does not fit there. Nothing was changed.
    pub fn set(&mut self, path: &str, value: Value) -> Result<(), SetError> {
        let fail = |(wrong, right): (String, String)| SetError {
            path: path.to_owned(),
            wrong,
            right,
        };
        let steps = path::parse(path).map_err(|wrong| fail((wrong, String::new())))?;
        let (map, entry, rest) = entry(&steps).map_err(fail)?;
        let removed = rest.is_empty() && value.is_null();
        let done = match map {
            "nodes" if removed => some(self.remove_node(entry), "node", entry, &self.nodes),
            "nodes" => self.set_node(entry, rest, value),
            "models" => edit(&mut self.models, "model", entry, rest, value, |model| {
                check::model_problem(model)
            }),
            "replicas" if removed => some(self.release(entry), "replica", entry, &self.replicas),
            "replicas" => edit(&mut self.replicas, "replica", entry, rest, value, |_| None),
            _ => edit(&mut self.pools, "pool", entry, rest, value, |pool| {
                check::pool_problem(pool)
            }),
        };
        done.map_err(fail)
    }

    /// Reads one value, derived ones too. Null: it is not known.
    ///
    /// # Errors
    /// The path leads nowhere.
    pub fn get(&self, path: &str) -> Result<Value, SetError> {
        let fail = |(wrong, right): (String, String)| SetError {
            path: path.to_owned(),
            wrong,
            right,
        };
        let steps = path::parse(path).map_err(|wrong| fail((wrong, String::new())))?;
        let (map, name, rest) = entry(&steps).map_err(fail)?;
        let found = match map {
            "nodes" => self.nodes.get(name).map(|node| node_json(name, node)),
            "models" => self.models.get(name).map(json),
            "replicas" => self.replicas.get(name).map(json),
            _ => self.pools.get(name).map(json),
        };
        let value = match found {
            Some(value) => value,
            None => return Err(fail(self.absent(map, name))),
        };
        match lookup(&value, rest) {
            Some(value) => Ok(value.clone()),
            None => {
                // Either an optional field that is absent, or no field at all: setting it tells.
                let mut copy = self.clone();
                match copy.set(path, Value::Null) {
                    Err(error) if error.wrong.starts_with("unknown key") => Err(error),
                    Err(error) if error.wrong.starts_with("there is no") => Err(error),
                    _ => Ok(Value::Null),
                }
            }
        }
    }

    fn absent(&self, map: &str, name: &str) -> (String, String) {
        let missing = |kind, names: Vec<&str>| no_entry(kind, name, &names);
        match map {
            "nodes" => missing("node", keys(&self.nodes)),
            "models" => missing("model", keys(&self.models)),
            "replicas" => missing("replica", keys(&self.replicas)),
            _ => missing("pool", keys(&self.pools)),
        }
    }

    fn set_node(&mut self, id: &str, rest: &[Step], value: Value) -> Result<(), (String, String)> {
        let plain = |wrong: String| (wrong, String::new());
        let (Some(node), [Step::Key(field)]) = (self.nodes.get_mut(id), rest) else {
            return edit(
                &mut self.nodes,
                "node",
                id,
                rest,
                value,
                check::node_problem,
            );
        };
        match field.as_str() {
            "gpus_free" => {
                let Some(wanted) = whole(&value) else {
                    return Err(plain(format!("{value} is no number of GPUs")));
                };
                node.set_gpus_free(wanted).map_err(plain)
            }
            "gpu_class" | "fabric" => {
                let Value::String(text) = value else {
                    return Err(plain(format!("{value} is no text")));
                };
                if field == "fabric" {
                    node.fabrics = vec![text];
                    // They named fabrics that it no longer has.
                    node.adapters
                        .iter_mut()
                        .for_each(|adapter| adapter.fabric = None);
                } else {
                    for gpu in &mut node.gpus {
                        gpu.class.clone_from(&text);
                        gpu.compute_capability = None;
                    }
                }
                Ok(())
            }
            "domains" => Err((
                "`domains` follows from the GPUs".to_owned(),
                "set `gpus[0].domain` and so on".to_owned(),
            )),
            _ => edit(
                &mut self.nodes,
                "node",
                id,
                rest,
                value,
                check::node_problem,
            ),
        }
    }
}

impl fmt::Display for SetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.wrong)?;
        if !self.right.is_empty() {
            write!(f, " ({})", self.right)?;
        }
        Ok(())
    }
}

impl std::error::Error for SetError {}

/// The map, the entry's name and the way inside the entry.
fn entry(steps: &[Step]) -> Result<(&str, &str, &[Step]), (String, String)> {
    match steps {
        [Step::Key(map), rest @ ..] if MAPS.contains(&map.as_str()) => match rest {
            [Step::Key(name), rest @ ..] => Ok((map, name, rest)),
            _ => Err((
                format!("`{map}` is a map by name"),
                format!("write `{map}[\"name\"]`"),
            )),
        },
        [Step::Key(other), ..] => Err((format!("unknown key `{other}`"), suggestion(other, &MAPS))),
        _ => Err(("a snapshot is no list".to_owned(), suggestion("", &MAPS))),
    }
}

/// Changes one entry of a map through its JSON, where its own reader refuses what it does not know.
fn edit<T: Serialize + DeserializeOwned>(
    map: &mut BTreeMap<String, T>,
    kind: &str,
    name: &str,
    rest: &[Step],
    value: Value,
    problem: impl Fn(&T) -> Option<check::Wrong>,
) -> Result<(), (String, String)> {
    let mut whole = match map.get(name) {
        Some(entry) => json(entry),
        None if rest.is_empty() => Value::Null,
        None => return Err(no_entry(kind, name, &keys(map))),
    };
    if rest.is_empty() && value.is_null() {
        return some(map.remove(name).is_some(), kind, name, map);
    }
    *slot(&mut whole, rest)? = integral(value);
    let entry: T =
        serde_json::from_value(whole).map_err(|error| with_derived(kind, error.to_string()))?;
    if let Some((path, wrong)) = problem(&entry) {
        let inner = path.trim_start_matches('.');
        return Err((format!("{inner}: {wrong}"), String::new()));
    }
    map.insert(name.to_owned(), entry);
    Ok(())
}

/// The place of a value, which is made where the way is not there yet: absent optional fields are left out of the JSON.
fn slot<'v>(mut value: &'v mut Value, steps: &[Step]) -> Result<&'v mut Value, (String, String)> {
    for step in steps {
        value = match step {
            Step::Key(key) => {
                if value.is_null() {
                    *value = Value::Object(Map::new());
                }
                let Value::Object(fields) = value else {
                    return Err((format!("`{key}` is inside of a value"), String::new()));
                };
                fields.entry(key.as_str()).or_insert(Value::Null)
            }
            Step::Index(index) => {
                let length = value.as_array().map_or(0, Vec::len);
                match value.get_mut(*index) {
                    Some(item) => item,
                    None => {
                        let wrong = format!("there is no item {index}, the list has {length}");
                        return Err((wrong, String::new()));
                    }
                }
            }
        };
    }
    Ok(value)
}

fn lookup<'v>(value: &'v Value, steps: &[Step]) -> Option<&'v Value> {
    steps.iter().try_fold(value, |value, step| match step {
        Step::Key(key) => value.get(key.as_str()),
        Step::Index(index) => value.get(*index),
    })
}

/// Serde's message, with the derived fields of a node among the suggestions.
fn with_derived(kind: &str, message: String) -> (String, String) {
    let (wrong, right) = read::explained(message.clone());
    let node_field = kind == "node" && message.contains("`cpus_free`");
    if !node_field || !wrong.starts_with("unknown key") {
        return (wrong, right);
    }
    let mut words = message.split('`').skip(1).step_by(2);
    let word = words.next().unwrap_or("");
    let known: Vec<&str> = words.chain(DERIVED).collect();
    let right = suggestion(word, &known);
    (wrong, right)
}

fn node_json(id: &str, node: &Node) -> Value {
    let facts = NodeFacts::of(id, node);
    let domains: Vec<Value> = facts
        .domains
        .iter()
        .map(|domain| serde_json::json!({"gpus": domain.gpus, "free": domain.free}))
        .collect();
    let mut value = json(node);
    value["gpus_free"] = facts.gpus_free.into();
    value["gpu_class"] = facts.gpu_class.into();
    value["fabric"] = node.fabrics.first().map(String::as_str).into();
    value["domains"] = domains.into();
    value
}

fn json<T: Serialize>(value: &T) -> Value {
    serde_json::to_value(value).expect("a snapshot has string keys only")
}

fn keys<T>(map: &BTreeMap<String, T>) -> Vec<&str> {
    map.keys().map(String::as_str).collect()
}

fn some<T>(
    done: bool,
    kind: &str,
    name: &str,
    map: &BTreeMap<String, T>,
) -> Result<(), (String, String)> {
    match done {
        true => Ok(()),
        false => Err(no_entry(kind, name, &keys(map))),
    }
}

fn no_entry(kind: &str, name: &str, known: &[&str]) -> (String, String) {
    /// Names in a suggestion; a fleet has thousands.
    const KNOWN_MAX: usize = 8;
    let right = match suggestion(name, known) {
        right if right.starts_with("known here") => {
            suggestion("", &known[..known.len().min(KNOWN_MAX)])
        }
        right => right,
    };
    (format!("there is no {kind} `{name}`"), right)
}

/// A number of things; Lua has doubles only.
fn whole(value: &Value) -> Option<usize> {
    let number = value.as_f64()?;
    let fits = number >= 0.0 && number.fract() == 0.0 && number < 1e9;
    fits.then_some(number as usize)
}

/// Lua's 4.0 as 4, inside of tables too, so that it fits where a whole number is asked for.
fn integral(value: Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => match whole(&Value::Number(number.clone())) {
            Some(whole) => whole.into(),
            None => Value::Number(number),
        },
        Value::Array(items) => items.into_iter().map(integral).collect(),
        Value::Object(fields) => fields
            .into_iter()
            .map(|(name, value)| (name, integral(value)))
            .collect(),
        other => other,
    }
}
