//! Models, their endpoints and their profiles.

use std::ops::RangeInclusive;

use llmgw_plugins::MetricOverride;

use super::Decode;
use crate::config::read::Field;
use crate::config::yaml::Node;
use crate::config::{Endpoint, EngineUrl, LaunchMode, Model, Profile, Secret};

const REPLICAS: RangeInclusive<u32> = 0..=10_000;
const SLOTS: RangeInclusive<u32> = 1..=65_536;
const NODES: RangeInclusive<u32> = 1..=1_024;
const GPUS_PER_NODE: RangeInclusive<u32> = 1..=64;
const PARALLEL: RangeInclusive<u32> = 1..=65_536;
const CPUS: RangeInclusive<u32> = 1..=65_536;
const MEMORY_BYTES: RangeInclusive<u64> = 1 << 20..=1 << 50;
const ENGINE_DEFAULT: &str = "openai";

impl Decode<'_, '_, '_> {
    pub(super) fn model(&mut self, field: &Field<'_>) -> Model {
        let known = [
            "name",
            "aliases",
            "labels",
            "source",
            "replicas",
            "endpoints",
            "metrics",
            "profiles",
        ];
        let fields = self.fields(field, &known);
        let replicas = fields
            .get("replicas")
            .and_then(|field| self.report.count(&field, REPLICAS));
        Model {
            name: self
                .required_text(&fields, "name", "write the name that clients ask for")
                .into(),
            aliases: self.names(fields.get("aliases")),
            labels: self.labels(&fields),
            source: self.text(&fields, "source"),
            replicas: replicas.unwrap_or(1),
            endpoints: self.items(fields.get("endpoints"), Decode::endpoint),
            metrics: fields.get("metrics").map(|field| self.metrics(&field)),
            profiles: self.items(fields.get("profiles"), Decode::profile),
        }
    }

    fn endpoint(&mut self, field: &Field<'_>) -> Endpoint {
        let fields = self.fields(
            field,
            &["url", "engine", "slots", "api_key", "serves", "labels"],
        );
        let text = self.required_text(
            &fields,
            "url",
            "write e.g. `url: \"http://127.0.0.1:8000\"`",
        );
        let url = match (EngineUrl::parse(&text), fields.get("url")) {
            (Ok(url), _) => url,
            (Err(error), Some(field)) if !text.is_empty() => {
                self.report.add(&field.place, error.wrong, error.right);
                EngineUrl::unreadable()
            }
            (Err(_), _) => EngineUrl::unreadable(),
        };
        Endpoint {
            url,
            engine: self
                .text(&fields, "engine")
                .unwrap_or_else(|| ENGINE_DEFAULT.to_owned()),
            slots: fields
                .get("slots")
                .and_then(|field| self.report.count(&field, SLOTS)),
            api_key: fields
                .get("api_key")
                .and_then(|field| self.report.secret(&field))
                .map(|text| Secret::new(&text)),
            serves: self.text(&fields, "serves"),
            labels: self.labels(&fields),
        }
    }

    fn metrics(&mut self, field: &Field<'_>) -> MetricOverride {
        if matches!(field.node, Node::Null) {
            let right = "write `{}` for vLLM's names, or leave the key out for the engine's own";
            self.report.add(
                &field.place.clone().at_key(),
                "`metrics` has no value",
                right,
            );
            return MetricOverride::default();
        }
        let fields = self.fields(field, &["running", "waiting", "kv", "path"]);
        MetricOverride {
            path: self.text(&fields, "path"),
            running: fields
                .get("running")
                .map(|field| self.report.text_or_texts(&field)),
            waiting: fields
                .get("waiting")
                .map(|field| self.report.text_or_texts(&field)),
            kv: fields
                .get("kv")
                .map(|field| self.report.text_or_texts(&field)),
        }
    }

    fn profile(&mut self, field: &Field<'_>) -> Profile {
        let known = [
            "name",
            "engine",
            "gpu",
            "gpus_per_node",
            "nodes",
            "tensor_parallel",
            "pipeline_parallel",
            "cpus",
            "memory",
            "node_selector",
            "quantization",
            "slots",
            "launch_mode",
            "args",
            "env",
        ];
        let fields = self.fields(field, &known);
        let gpu = fields
            .get("gpu")
            .map(|field| self.report.text_or_texts(&field))
            .unwrap_or_default();
        let gpus_per_node = if fields.get("gpu").is_some() { 1 } else { 0 };
        let modes = [("native", LaunchMode::Native), ("ray", LaunchMode::Ray)];
        let launch_mode = fields
            .get("launch_mode")
            .and_then(|field| self.report.word(&field, &modes));
        let env = fields
            .get("env")
            .map(|field| self.report.secrets(&field))
            .unwrap_or_default();
        let env = env
            .into_iter()
            .map(|(name, text)| (name, Secret::new(&text)));
        Profile {
            name: self
                .required_text(&fields, "name", "give each profile a name")
                .into(),
            engine: self.required_text(
                &fields,
                "engine",
                "write which engine runs it, e.g. `engine: vllm`",
            ),
            gpu,
            gpus_per_node: self
                .count(&fields, "gpus_per_node", GPUS_PER_NODE)
                .unwrap_or(gpus_per_node),
            nodes: self.count(&fields, "nodes", NODES).unwrap_or(1),
            tensor_parallel: self
                .count(&fields, "tensor_parallel", PARALLEL)
                .unwrap_or(1),
            pipeline_parallel: self
                .count(&fields, "pipeline_parallel", PARALLEL)
                .unwrap_or(1),
            cpus: self.count(&fields, "cpus", CPUS),
            memory: fields
                .get("memory")
                .and_then(|field| self.report.size(&field, MEMORY_BYTES)),
            node_selector: self.named_texts(&fields, "node_selector"),
            quantization: self.text(&fields, "quantization"),
            slots: self.count(&fields, "slots", SLOTS),
            launch_mode: launch_mode.unwrap_or_default(),
            args: self.items(fields.get("args"), |decode, item| {
                decode.report.quiet_text(item).unwrap_or_default()
            }),
            env: env.into_iter().collect(),
        }
    }
}
