//! A decision becomes a shard: the engine plugin renders the commands, the rest is taken from the node that was chosen.

use std::fmt;

use llmgw_plugins::{
    EngineCommand, EnginePlugin, Fault, ModelView, PolicySet, ProfileView, ShardView,
};
use llmgw_proto::hex::hex;
use llmgw_proto::shard::{API_KEY_PLACE, ApiKey, Readiness, ShardCommand, ShardSpec, WaitFor};
use llmgw_proto::wire::error::WireError;
use sha2::{Digest, Sha256};

use super::memory::Memory;
use super::observed::{Observed, ObservedNode};
use super::ports::Ports;
use super::snapshot::memory_gib;
use crate::config::{Catalog, LaunchMode, Model, Profile};
use crate::control::reconcile::{Desired, Wanted};
use crate::random;

/// Between SIGTERM and SIGKILL. Requests had their time before: a replica leaves the pool first.
pub const STOP_GRACE_MS: u64 = 10_000;

/// Where a replica was put.
#[derive(Clone, Copy, Debug)]
pub struct Chosen<'a> {
    pub model: &'a Model,
    pub profile: &'a Profile,
    pub number: u32,
    pub node: &'a ObservedNode,
    /// By uuid.
    pub gpus: &'a [String],
}

/// Why a replica that has a place can't be started there.
#[derive(Debug)]
pub enum LaunchError {
    NoPlugin {
        engine: String,
    },
    /// The plugin's `commands` failed, or rendered something that can't be started.
    Commands {
        engine: String,
        fault: Fault,
    },
    NoPort {
        first: u16,
        last: u16,
    },
    /// The system gave no random bytes for its key.
    NoRandom,
    /// No agent would take so much: what in it is too long.
    TooLarge(WireError),
}

/// What is declared, with what each profile makes.
pub fn desired(catalog: &Catalog) -> Desired {
    let models = catalog
        .models
        .iter()
        .filter(|model| !model.profiles.is_empty());
    let wanted = |model: &Model| Wanted {
        replicas: model.replicas,
        definitions: model
            .profiles
            .iter()
            .map(|profile| (profile.name.to_string(), definition(model, profile)))
            .collect(),
    };
    Desired {
        models: models
            .map(|model| (model.name.to_string(), wanted(model)))
            .collect(),
    }
}

/// What a replica is made from, as a hash: the source and the whole profile but its name. What only decides where it may go (GPU classes,
/// labels of nodes) is in it too, since a replica where it is no longer allowed is outdated.
pub fn definition(model: &Model, profile: &Profile) -> String {
    let env: Vec<(&String, &str)> = profile
        .env
        .iter()
        .map(|(name, value)| (name, value.expose()))
        .collect();
    let mut made_from = serde_json::json!([
        source(model),
        profile.engine,
        profile.gpu,
        profile.gpus_per_node,
        profile.nodes,
        profile.tensor_parallel,
        profile.pipeline_parallel,
        profile.cpus,
        profile.memory,
        profile.quantization,
        profile.slots,
        launch_mode(profile),
        profile.args,
        env,
    ]);
    // Only where there is one: what runs is not to be replaced because the server is a newer one.
    if let (false, Some(list)) = (profile.node_selector.is_empty(), made_from.as_array_mut()) {
        list.push(serde_json::json!(profile.node_selector));
    }
    hex(&Sha256::digest(made_from.to_string()))
}

/// What keeps a profile from being started at all, whatever the fleet; empty: nothing.
pub fn problems(set: &PolicySet, model: &Model, profile: &Profile) -> Vec<String> {
    let Some(plugin) = set.engine(&profile.engine) else {
        return vec![format!("there is no engine plugin `{}`", profile.engine)];
    };
    let mut problems = Vec::new();
    if !plugin.starts {
        problems.push(format!(
            "the engine plugin `{}` has no `commands`: it is for endpoints that run already",
            profile.engine
        ));
    }
    if profile.nodes > 1 {
        problems.push(format!(
            "it asks for {} nodes, and replicas over several nodes come with multi-node",
            profile.nodes
        ));
    }
    let gib = memory_gib(profile);
    let env = environment(profile);
    let view = ProfileView {
        name: &profile.name,
        engine: &profile.engine,
        gpu: &profile.gpu,
        gpus_per_node: Some(profile.gpus_per_node),
        nodes: profile.nodes,
        tensor_parallel: profile.tensor_parallel,
        pipeline_parallel: profile.pipeline_parallel,
        quantization: profile.quantization.as_deref(),
        slots: profile.slots,
        cpus: profile.cpus,
        memory_gib: gib,
        launch_mode: Some(launch_mode(profile)),
        args: &profile.args,
        env: &env,
    };
    let model = ModelView {
        name: &model.name,
        source: model.source.as_deref(),
        replicas: model.replicas,
    };
    problems.extend(set.validate(&profile.engine, &view, &model));
    problems
}

/// The spec of a replica's only shard. `key` is its own API key, used where the plugin asks for one.
pub fn shard_spec(
    set: &PolicySet,
    chosen: &Chosen<'_>,
    port: u16,
    key: ApiKey,
) -> Result<ShardSpec, LaunchError> {
    let (model, profile) = (chosen.model, chosen.profile);
    let Some(plugin) = set.engine(&profile.engine) else {
        return Err(LaunchError::NoPlugin {
            engine: profile.engine.clone(),
        });
    };
    let env = environment(profile);
    let view = view(chosen, port, &env);
    let rendered = set
        .commands(&profile.engine, &view)
        .map_err(|fault| LaunchError::Commands {
            engine: profile.engine.clone(),
            fault,
        })?;
    let takes_key = rendered.iter().any(has_key_place);
    let readiness = readiness(plugin, &model.name);
    let replica = format!("{}/{}", model.name, chosen.number);
    Ok(ShardSpec {
        shard: format!("{replica}/0"),
        replica,
        model: model.name.to_string(),
        profile: profile.name.to_string(),
        definition: definition(model, profile),
        rank: 0,
        engine: profile.engine.clone(),
        commands: rendered
            .into_iter()
            .map(|rendered| command(rendered, readiness.start_deadline_ms))
            .collect(),
        gpus: chosen.gpus.to_vec(),
        cpus: profile.cpus,
        memory_bytes: profile.memory,
        ports: vec![port],
        host: chosen.node.advertise.clone(),
        serves_http: set.serves_http(&profile.engine, &view),
        readiness,
        slots: profile.slots,
        stop_grace_ms: STOP_GRACE_MS,
        api_key: takes_key.then_some(key),
    })
}

fn view<'a>(chosen: &Chosen<'a>, port: u16, env: &'a [(String, String)]) -> ShardView<'a> {
    let (model, profile, node) = (chosen.model, chosen.profile, chosen.node);
    ShardView {
        model: &model.name,
        source: source(model),
        served_name: &model.name,
        profile: &profile.name,
        engine: &profile.engine,
        rank: 0,
        nodes: 1,
        leader_address: &node.advertise,
        port,
        rendezvous_port: None,
        extra_ports: &[],
        tensor_parallel: profile.tensor_parallel,
        pipeline_parallel: profile.pipeline_parallel,
        quantization: profile.quantization.as_deref(),
        slots: profile.slots,
        gpus: profile.gpus_per_node,
        cpus: profile.cpus,
        memory_gib: memory_gib(profile),
        args: &profile.args,
        env,
        adapters: &[],
        socket_interface: None,
        advertise: Some(&node.advertise),
        models_dir: node.models_dir.as_deref(),
        launch_mode: Some(launch_mode(profile)),
    }
}

fn command(rendered: EngineCommand, timeout_ms: u64) -> ShardCommand {
    ShardCommand {
        executable: rendered.command,
        args: rendered.args,
        env: rendered.env,
        wait_for: rendered.wait_for.map(|address| WaitFor {
            address,
            timeout_ms,
        }),
        sidecar: rendered.sidecar,
    }
}

/// The key itself is never rendered: the agent puts it, or the path of a file with it, where its place is.
fn has_key_place(command: &EngineCommand) -> bool {
    // Without the brace it is also the beginning of the file's place.
    let place = API_KEY_PLACE.trim_end_matches('}');
    command
        .args
        .iter()
        .chain(command.env.values())
        .any(|text| text.contains(place))
}

/// An engine that names only one of the paths is asked there for both.
fn readiness(plugin: &EnginePlugin, served_name: &str) -> Readiness {
    let said = &plugin.readiness;
    let models = said.models.clone().or_else(|| said.health.clone());
    let models = models.unwrap_or_else(|| "/v1/models".to_owned());
    Readiness {
        health: said.health.clone().unwrap_or_else(|| models.clone()),
        models,
        served_name: served_name.to_owned(),
        start_deadline_ms: said.start_deadline_ms,
    }
}

/// The least port of the node that nothing has.
pub fn free_port(
    id: &str,
    node: &ObservedNode,
    observed: &Observed,
    memory: &Memory,
) -> Result<u16, LaunchError> {
    let least = Ports::of(observed, memory).least_free(id, node);
    least.ok_or(LaunchError::NoPort {
        first: node.ports.first,
        last: node.ports.last,
    })
}

/// A key of its own for each replica.
pub fn random_key() -> Result<ApiKey, LaunchError> {
    random::secret()
        .map(ApiKey::new)
        .ok_or(LaunchError::NoRandom)
}

fn source(model: &Model) -> &str {
    model.source.as_deref().unwrap_or(&model.name)
}

fn launch_mode(profile: &Profile) -> &'static str {
    match profile.launch_mode {
        LaunchMode::Native => "native",
        LaunchMode::Ray => "ray",
    }
}

fn environment(profile: &Profile) -> Vec<(String, String)> {
    let pairs = profile.env.iter();
    pairs
        .map(|(name, value)| (name.clone(), value.expose().to_owned()))
        .collect()
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LaunchError::NoPlugin { engine } => write!(f, "there is no engine plugin `{engine}`"),
            LaunchError::Commands { engine, fault } => {
                write!(
                    f,
                    "the engine plugin `{engine}` rendered no commands: {fault}"
                )
            }
            LaunchError::NoPort { first, last } => {
                write!(f, "no port of {first}-{last} is free on the node")
            }
            LaunchError::NoRandom => f.write_str("the system gave no random bytes for its key"),
            LaunchError::TooLarge(error) => write!(f, "no agent would take its shard: {error}"),
        }
    }
}

impl std::error::Error for LaunchError {}

#[cfg(test)]
mod tests;
