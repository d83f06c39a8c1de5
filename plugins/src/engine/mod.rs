//! What llmgw knows about an engine: the data of its plugin, checked.

pub(crate) mod metrics;
pub(crate) mod samples;
pub(crate) mod series;

use std::sync::Arc;

use mlua::{Table, Value};
use serde::Serialize;

use crate::engine::metrics::MetricNames;
use crate::error::did_you_mean;

/// One engine, from `engines/NAME.lua`. Its functions are called through the policy set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EnginePlugin {
    /// As in `engine:` of the configuration.
    pub name: Arc<str>,
    /// Names of its metrics; `None`: nothing to scrape, own counters only.
    pub metrics: Option<MetricNames>,
    /// How to tell that it is ready.
    pub readiness: Readiness,
    /// It doesn't notice that a non-streaming client left: stream upstream, and assemble the answer.
    pub cancel_needs_stream: bool,
    /// Request headers, in lower case, that it must not get.
    pub drop_request_headers: Vec<String>,
    /// It can't serve without a GPU.
    pub needs_gpu: bool,
    /// One replica may span machines.
    pub multi_node: bool,
    /// It splits a model over GPUs.
    pub tensor_parallel: bool,
    /// Executables that its commands may name. Empty: only the node's own allow-list decides.
    pub commands: Vec<String>,
    /// It has a `map` function, which replaces `metrics` where both are there.
    pub maps: bool,
    /// It has a `validate` function.
    pub validates: bool,
    /// It has a `commands` function; without one it is for static endpoints only.
    pub starts: bool,
    /// It has a `classify_error` function.
    pub classifies_errors: bool,
    /// It has a `serves_http` function; the default is rank 0.
    pub decides_http: bool,
}

/// How to tell that an engine is ready: the health path answers 200 *and* the served name is listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Readiness {
    /// Path of the health probe; `None`: there is none.
    pub health: Option<String>,
    /// Path of the list of models; `None`: not looked at.
    pub models: Option<String>,
    /// How long it may take from start to ready.
    pub start_deadline_ms: u64,
}

impl Default for Readiness {
    fn default() -> Readiness {
        Readiness {
            health: Some("/health".to_owned()),
            models: Some("/v1/models".to_owned()),
            start_deadline_ms: START_DEADLINE_MS,
        }
    }
}

/// Ten minutes: a large model from a slow disk.
const START_DEADLINE_MS: u64 = 600_000;
/// A day.
const START_DEADLINE_MAX_MS: f64 = 86_400_000.0;
/// Entries of one list in a plugin.
const LIST_MAX: usize = 64;

/// Keys of the returned table.
const KEYS: [&str; 15] = [
    "api",
    "name",
    "needs_gpu",
    "multi_node",
    "tensor_parallel",
    "cancel_needs_stream",
    "drop_request_headers",
    "executables",
    "commands",
    "metrics",
    "readiness",
    "map",
    "validate",
    "classify_error",
    "serves_http",
];

/// A mistake in a plugin's table: the key that it is about, and the reason.
#[derive(Debug)]
pub(crate) struct PluginError {
    pub(crate) key: String,
    pub(crate) reason: String,
}

impl EnginePlugin {
    /// Reads the table that `engines/NAME.lua` returned.
    pub(crate) fn read(name: &str, table: &Table) -> Result<EnginePlugin, PluginError> {
        let reader = Reader { table, path: "" };
        reader.only(&KEYS)?;
        if reader.text("name")?.is_some_and(|own| own != name) {
            return Err(refused(
                "name",
                format!("`name` must be '{name}', as the file is called"),
            ));
        }
        // One name for two things: a list of executables, or the function that renders commands.
        let starts = matches!(reader.get("commands")?, Value::Function(_));
        let commands = if starts {
            reader.list("executables")?
        } else {
            reader.list("commands")?.or(reader.list("executables")?)
        };
        Ok(EnginePlugin {
            name: Arc::from(name),
            metrics: reader
                .section("metrics")?
                .map(|section| metrics(&section))
                .transpose()?,
            readiness: reader
                .section("readiness")?
                .map_or(Ok(Readiness::default()), |section| readiness(&section))?,
            cancel_needs_stream: reader.flag("cancel_needs_stream")?,
            drop_request_headers: reader
                .list("drop_request_headers")?
                .unwrap_or_default()
                .iter()
                .map(|header| header.to_ascii_lowercase())
                .collect(),
            needs_gpu: reader.flag("needs_gpu")?,
            multi_node: reader.flag("multi_node")?,
            tensor_parallel: reader.flag("tensor_parallel")?,
            commands: commands.unwrap_or_default(),
            maps: reader.function("map")?,
            validates: reader.function("validate")?,
            starts,
            classifies_errors: reader.function("classify_error")?,
            decides_http: reader.function("serves_http")?,
        })
    }
}

fn metrics(section: &Section) -> Result<MetricNames, PluginError> {
    let reader = section.reader();
    reader.only(&["path", "running", "waiting", "kv"])?;
    Ok(MetricNames {
        path: reader
            .path("path")?
            .unwrap_or_else(|| "/metrics".to_owned()),
        running: reader.list("running")?.unwrap_or_default(),
        waiting: reader.list("waiting")?.unwrap_or_default(),
        kv: reader.list("kv")?.unwrap_or_default(),
    })
}

fn readiness(section: &Section) -> Result<Readiness, PluginError> {
    let reader = section.reader();
    reader.only(&["health", "models", "start_deadline_ms"])?;
    let start_deadline_ms = match reader.get("start_deadline_ms")? {
        Value::Nil => START_DEADLINE_MS,
        value => match crate::hooks::returns::number(&value, "start_deadline_ms") {
            Ok(ms) if (1.0..=START_DEADLINE_MAX_MS).contains(&ms) => ms as u64,
            _ => {
                return Err(refused(
                    "start_deadline_ms",
                    "`readiness.start_deadline_ms` must be 1 to 86400000".to_owned(),
                ));
            }
        },
    };
    Ok(Readiness {
        health: reader.path("health")?,
        models: Some(
            reader
                .path("models")?
                .unwrap_or_else(|| "/v1/models".to_owned()),
        ),
        start_deadline_ms,
    })
}

/// A nested table and where it is.
struct Section {
    table: Table,
    path: String,
}

impl Section {
    fn reader(&self) -> Reader<'_> {
        Reader {
            table: &self.table,
            path: &self.path,
        }
    }
}

/// Typed access to one table of a plugin.
struct Reader<'a> {
    table: &'a Table,
    /// `metrics.` for a nested one.
    path: &'a str,
}

impl Reader<'_> {
    fn get(&self, key: &str) -> Result<Value, PluginError> {
        self.table
            .raw_get(key)
            .map_err(|e| refused(key, e.to_string()))
    }

    fn only(&self, known: &[&str]) -> Result<(), PluginError> {
        for pair in self.table.pairs::<Value, Value>() {
            let (key, _) = pair.map_err(|e| refused("", e.to_string()))?;
            let Value::String(key) = &key else {
                return Err(refused(
                    "",
                    format!(
                        "a key of type {} makes no sense here",
                        crate::vm::sandbox::type_name(&key)
                    ),
                ));
            };
            let key = crate::vm::sandbox::cut(&key.to_string_lossy(), 64);
            if !known.contains(&key.as_str()) {
                let hint = did_you_mean(&key, known.iter().copied());
                return Err(refused(
                    &key,
                    format!("unknown key '{}{key}'{hint}", self.path),
                ));
            }
        }
        Ok(())
    }

    fn wrong(&self, key: &str, value: &Value, wanted: &str) -> PluginError {
        refused(
            key,
            format!(
                "`{}{key}` is a {}, {wanted} is needed",
                self.path,
                crate::vm::sandbox::type_name(value)
            ),
        )
    }

    fn flag(&self, key: &str) -> Result<bool, PluginError> {
        match self.get(key)? {
            Value::Nil => Ok(false),
            Value::Boolean(flag) => Ok(flag),
            other => Err(self.wrong(key, &other, "true or false")),
        }
    }

    fn text(&self, key: &str) -> Result<Option<String>, PluginError> {
        match self.get(key)? {
            Value::Nil => Ok(None),
            Value::String(text) => Ok(Some(text.to_string_lossy())),
            other => Err(self.wrong(key, &other, "a string")),
        }
    }

    fn path(&self, key: &str) -> Result<Option<String>, PluginError> {
        match self.text(key)? {
            Some(path) if !path.starts_with('/') => Err(refused(
                key,
                format!("`{}{key}` must be a path that begins with /", self.path),
            )),
            path => Ok(path),
        }
    }

    /// A list of strings; one string is a list of one.
    fn list(&self, key: &str) -> Result<Option<Vec<String>>, PluginError> {
        let list = match self.get(key)? {
            Value::Nil => return Ok(None),
            Value::String(one) => return Ok(Some(vec![one.to_string_lossy()])),
            Value::Table(list) => list,
            other => return Err(self.wrong(key, &other, "a list of strings")),
        };
        let mut texts = Vec::new();
        for value in list.sequence_values::<Value>() {
            match value {
                Ok(Value::String(text)) if texts.len() < LIST_MAX => {
                    texts.push(text.to_string_lossy())
                }
                Ok(Value::String(_)) => {
                    return Err(refused(
                        key,
                        format!("`{}{key}` has more than {LIST_MAX} entries", self.path),
                    ));
                }
                Ok(other) => return Err(self.wrong(key, &other, "a list of strings")),
                Err(e) => return Err(refused(key, e.to_string())),
            }
        }
        Ok(Some(texts))
    }

    fn section(&self, key: &str) -> Result<Option<Section>, PluginError> {
        match self.get(key)? {
            Value::Nil => Ok(None),
            Value::Table(table) => Ok(Some(Section {
                table,
                path: format!("{key}."),
            })),
            other => Err(self.wrong(key, &other, "a table")),
        }
    }

    fn function(&self, key: &str) -> Result<bool, PluginError> {
        match self.get(key)? {
            Value::Nil => Ok(false),
            Value::Function(_) => Ok(true),
            other => Err(self.wrong(key, &other, "a function")),
        }
    }
}

fn refused(key: &str, reason: String) -> PluginError {
    PluginError {
        key: key.to_owned(),
        reason,
    }
}
