//! The three numbers that say how loaded an engine is, and the names that engines give them.

use serde::Serialize;

use crate::engine::samples::Samples;

/// How loaded an engine says it is. What it doesn't say is `None`, never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Load {
    /// Requests that it works on.
    pub running: Option<f64>,
    /// Requests that wait inside of it.
    pub waiting: Option<f64>,
    /// KV-cache use, 0..1.
    pub kv: Option<f64>,
}

/// Where an engine's numbers are. Each list holds the names over the engine's versions; the first one present counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MetricNames {
    /// Path of the scrape, e.g. `/metrics`.
    pub path: String,
    /// Running requests; several series are summed.
    pub running: Vec<String>,
    /// Waiting requests; several series are summed.
    pub waiting: Vec<String>,
    /// KV-cache use, 0..1; of several series the greatest.
    pub kv: Vec<String>,
}

/// A model's own `metrics:` in the configuration. What is not written is `None`; all `None` is the empty mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricOverride {
    /// Path of the scrape.
    pub path: Option<String>,
    /// Names for [`MetricNames::running`].
    pub running: Option<Vec<String>>,
    /// Names for [`MetricNames::waiting`].
    pub waiting: Option<Vec<String>>,
    /// Names for [`MetricNames::kv`].
    pub kv: Option<Vec<String>>,
}

/// Where nothing else is said.
const DEFAULT_PATH: &str = "/metrics";

impl MetricNames {
    /// Which names count for a model (mission P7). `None`: there is nothing to scrape.
    ///
    /// - No override: the engine plugin's own names, or none.
    /// - An empty mapping: vLLM's names.
    /// - One that names `running` is a complete statement: what it leaves out stays unknown.
    /// - Any other one changes single entries of its engine's mapping (of vLLM's, where the engine has none).
    pub fn resolve(
        engine: Option<&MetricNames>,
        override_: Option<&MetricOverride>,
        vllm: &MetricNames,
    ) -> Option<MetricNames> {
        let Some(own) = override_ else {
            return engine.cloned();
        };
        if *own == MetricOverride::default() {
            return Some(vllm.clone());
        }
        let base = match &own.running {
            Some(_) => {
                let path =
                    engine.map_or_else(|| DEFAULT_PATH.to_owned(), |engine| engine.path.clone());
                MetricNames {
                    path,
                    ..MetricNames::default()
                }
            }
            None => engine.unwrap_or(vllm).clone(),
        };
        Some(MetricNames {
            path: own.path.clone().unwrap_or(base.path),
            running: own.running.clone().unwrap_or(base.running),
            waiting: own.waiting.clone().unwrap_or(base.waiting),
            kv: own.kv.clone().unwrap_or(base.kv),
        })
    }

    /// Finds the numbers in a scrape. A value that can't be one (NaN, infinite, negative) counts as absent.
    pub fn read(&self, samples: &Samples) -> Load {
        let sum = |values: &mut dyn Iterator<Item = f64>| values.sum();
        let greatest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max).min(1.0);
        Load {
            running: first_present(&self.running, samples, &sum),
            waiting: first_present(&self.waiting, samples, &sum),
            kv: first_present(&self.kv, samples, &greatest),
        }
    }
}

/// Folds the usable values of the first name that has any.
fn first_present(
    names: &[String],
    samples: &Samples,
    fold: &dyn Fn(&mut dyn Iterator<Item = f64>) -> f64,
) -> Option<f64> {
    names.iter().find_map(|name| {
        let mut values = samples
            .values(name)
            .filter(|value| value.is_finite() && *value >= 0.0)
            .peekable();
        values.peek()?;
        Some(fold(&mut values))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &str, running: &str, waiting: &str, kv: &str) -> MetricNames {
        let list = |name: &str| {
            if name.is_empty() {
                Vec::new()
            } else {
                vec![name.to_owned()]
            }
        };
        MetricNames {
            path: path.to_owned(),
            running: list(running),
            waiting: list(waiting),
            kv: list(kv),
        }
    }

    #[test]
    fn a_mapping_is_resolved_as_mission_p7_says() {
        let vllm = names("/metrics", "v:r", "v:w", "v:kv");
        let llama = names("/stats", "l:r", "l:w", "l:kv");
        let list = |name: &str| Some(vec![name.to_owned()]);
        let none = MetricOverride::default;
        let cases = [
            (
                "absent = the engine's",
                Some(&llama),
                None,
                Some(llama.clone()),
            ),
            (
                "absent, an engine without metrics = nothing",
                None,
                None,
                None,
            ),
            (
                "empty = vLLM's, even on another engine",
                Some(&llama),
                Some(none()),
                Some(vllm.clone()),
            ),
            (
                "empty, an engine without metrics = vLLM's",
                None,
                Some(none()),
                Some(vllm.clone()),
            ),
            (
                "naming running = complete: the rest is unknown",
                Some(&llama),
                Some(MetricOverride {
                    running: list("x"),
                    ..none()
                }),
                Some(names("/stats", "x", "", "")),
            ),
            (
                "complete with two names",
                None,
                Some(MetricOverride {
                    running: list("x"),
                    kv: list("k"),
                    ..none()
                }),
                Some(names("/metrics", "x", "", "k")),
            ),
            (
                "one entry of the engine's mapping",
                Some(&llama),
                Some(MetricOverride {
                    kv: list("k"),
                    ..none()
                }),
                Some(names("/stats", "l:r", "l:w", "k")),
            ),
            (
                "only a path",
                Some(&llama),
                Some(MetricOverride {
                    path: Some("/m".to_owned()),
                    ..none()
                }),
                Some(names("/m", "l:r", "l:w", "l:kv")),
            ),
        ];
        for (what, engine, own, expected) in cases {
            assert_eq!(
                MetricNames::resolve(engine, own.as_ref(), &vllm),
                expected,
                "{what}"
            );
        }
    }

    #[test]
    fn several_series_are_summed_and_kv_is_the_maximum() {
        let samples = Samples::parse(
            "r{e=\"0\"} 2\nr{e=\"1\"} 3\nr{e=\"2\"} NaN\nkv{e=\"0\"} 0.2\nkv{e=\"1\"} 0.7\nw -1\n",
        );
        let load = names("/metrics", "r", "w", "kv").read(&samples);
        assert_eq!(
            load,
            Load {
                running: Some(5.0),
                waiting: None,
                kv: Some(0.7)
            }
        );
    }

    #[test]
    fn a_renamed_metric_is_found_under_any_of_its_names_and_an_absent_one_is_unknown() {
        let mut wanted = names("/metrics", "new", "gone", "k");
        wanted.running.push("old".to_owned());
        assert_eq!(wanted.read(&Samples::parse("old 4")).running, Some(4.0));
        assert_eq!(
            wanted.read(&Samples::parse("old 4\nnew 1")).running,
            Some(1.0),
            "not both"
        );
        assert_eq!(
            wanted.read(&Samples::parse("k 1.5")),
            Load {
                kv: Some(1.0),
                ..Load::default()
            }
        );
    }
}
