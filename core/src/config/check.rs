//! The rules of the configuration beyond shape: what contradicts what, asked of the decoded values and nothing else.
//!
//! This is the one place where a model is judged. Rules that need an engine's plugin (does it need a card, can it span nodes)
//! are that plugin's `validate`; rules that need hardware (which class a group really gets) are placement's.

use std::collections::HashMap;
use std::net::SocketAddr;

use super::problem::{Finding, Place};
use super::profile;
use super::suggest::suggestion;
use super::yaml::shown;
use super::{Config, ConfigErrors, KeyHash, Model, Tenant};

const MODEL_NAME_MAX_BYTES: usize = 256;
const NAME_MAX_BYTES: usize = 64;

/// All that contradicts itself or something else.
pub(super) fn rules(config: &Config) -> Vec<Finding> {
    let mut found = Vec::new();
    listeners(config, &mut found);
    agents(config, &mut found);
    tenants(&config.tenants, &mut found);
    let place = Place::root().key("models");
    for (index, model) in config.catalog.models.iter().enumerate() {
        model_rules(model, &place.index(index), &mut found);
    }
    model_names(config, &place, &mut found);
    found
}

/// Engines that no plugin describes: what the configuration can't know by itself, asked once the policy set is loaded.
///
/// # Errors
/// Each use of an engine that is not among `known`, with its line.
pub fn check_engines(config: &Config, known: &[&str]) -> Result<(), ConfigErrors> {
    let mut found = Vec::new();
    let models = Place::root().key("models");
    let mut one = |engine: &str, place: Place| {
        if !known.contains(&engine) {
            let wrong = format!("no engine plugin is called `{}`", shown(engine));
            found.push(Finding::new(place, wrong, suggestion(engine, known)));
        }
    };
    for (index, model) in config.catalog.models.iter().enumerate() {
        for (number, endpoint) in model.endpoints.iter().enumerate() {
            one(
                &endpoint.engine,
                models
                    .index(index)
                    .key("endpoints")
                    .index(number)
                    .key("engine"),
            );
        }
        for (number, profile) in model.profiles.iter().enumerate() {
            one(
                &profile.engine,
                models
                    .index(index)
                    .key("profiles")
                    .index(number)
                    .key("engine"),
            );
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    Err(ConfigErrors::locate(&config.source, &config.text.0, found))
}

fn listeners(config: &Config, found: &mut Vec<Finding>) {
    let root = Place::root();
    if let Err(wrong) = config.admin.check() {
        let right = format!(
            "write `admin: {{listen: \"{0}\", token: \"${{LLMGW_ADMIN_TOKEN}}\"}}` or give it `tls`, or bind `127.0.0.1:{1}`",
            config.admin.address,
            config.admin.address.port()
        );
        found.push(Finding::new(root.key("admin"), wrong, right));
    }
    let mut taken = vec![("listen", config.listen.address)];
    let agents = config
        .agents
        .as_ref()
        .map(|agents| ("agents", agents.address));
    for (name, address) in std::iter::once(("admin", config.admin.address)).chain(agents) {
        if let Some((other, _)) = taken.iter().find(|(_, other)| collide(*other, address)) {
            let wrong = format!("`{address}` is taken by `{other}` already");
            found.push(Finding::new(
                root.key(name),
                wrong,
                "give each listener its own port",
            ));
        }
        taken.push((name, address));
    }
}

/// Whether both cannot be bound at once; port 0 is a different one each time.
fn collide(one: SocketAddr, other: SocketAddr) -> bool {
    let all = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() == other.port() && one.port() != 0 && (all || one.ip() == other.ip())
}

fn agents(config: &Config, found: &mut Vec<Finding>) {
    let Some(agents) = &config.agents else { return };
    let place = Place::root().key("agents");
    let authority = agents.tls.as_ref().is_some_and(|tls| tls.ca.is_some());
    let signs = agents.tls.as_ref().is_some_and(|tls| tls.ca_key.is_some());
    if let Err(wrong) = agents.check() {
        found.push(Finding::new(
            place.key("listen"),
            wrong,
            "set `tls: {cert, key, ca}`, or `allow_plaintext: true`",
        ));
    }
    if agents.require_identity && !authority {
        let wrong = "needs `tls.ca`: without an authority no certificate can be asked for";
        found.push(Finding::new(
            place.key("require_identity"),
            wrong,
            "set `tls.ca`, or `require_identity: false`",
        ));
    }
    if signs && !authority {
        found.push(Finding::new(
            place.key("tls").key("ca_key"),
            "needs `ca`: nodes that enrol get that certificate along with their own",
            "set `ca: ca.pem` beside it",
        ));
    }
    if agents.lost_after < agents.heartbeat {
        let wrong = "is shorter than `heartbeat`: each node would be lost between two reports";
        found.push(Finding::new(
            place.key("lost_after"),
            wrong,
            "write a longer one, e.g. `60s`",
        ));
    }
}

fn tenants(tenants: &[Tenant], found: &mut Vec<Finding>) {
    let list = Place::root().key("tenants");
    let mut names: HashMap<&str, usize> = HashMap::new();
    let mut keys: HashMap<KeyHash, usize> = HashMap::new();
    for (index, tenant) in tenants.iter().enumerate() {
        let place = list.index(index);
        plain_name(&tenant.name, "tenant", place.key("name"), found);
        if let Some(first) = names
            .insert(&tenant.name, index)
            .filter(|_| !tenant.name.is_empty())
        {
            let wrong = format!("tenants[{first}] is called `{}` too", tenant.name);
            found.push(Finding::new(
                place.key("name"),
                wrong,
                "give each tenant its own name",
            ));
        }
        for (number, key) in tenant.keys.iter().enumerate() {
            if let Some(first) = keys.insert(key.hash, index) {
                let wrong = match first == index {
                    true => "is listed twice".to_owned(),
                    false => format!(
                        "is a key of tenants[{first}] (`{}`) too",
                        tenants[first].name
                    ),
                };
                found.push(Finding::new(
                    place.key("keys").index(number),
                    wrong,
                    "a key names one tenant: keep one of them",
                ));
            }
        }
        for (number, band) in tenant.bands.iter().enumerate() {
            plain_name(band, "band", place.key("bands").index(number), found);
            if tenant.bands[..number].contains(band) && !band.is_empty() {
                let wrong = format!("`{band}` is listed twice");
                found.push(Finding::new(
                    place.key("bands").index(number),
                    wrong,
                    "keep one of them",
                ));
            }
        }
        if tenant.models.is_empty() {
            let right = "write `[\"*\"]` for all models, or remove the tenant";
            found.push(Finding::new(
                place.key("models"),
                "is empty: the tenant could use no model",
                right,
            ));
        }
    }
}

fn model_rules(model: &Model, place: &Place, found: &mut Vec<Finding>) {
    model_name(&model.name, place.key("name"), found);
    for (index, alias) in model.aliases.iter().enumerate() {
        model_name(alias, place.key("aliases").index(index), found);
    }
    if model.endpoints.is_empty() && model.profiles.is_empty() {
        let right =
            "list `endpoints` for engines that run already, or `profiles` for agents to start";
        found.push(Finding::new(
            place.clone(),
            "has neither `endpoints` nor `profiles`",
            right,
        ));
    }
    if model.replicas != 1 && model.profiles.is_empty() && !model.endpoints.is_empty() {
        let right = "remove it: each endpoint is a replica";
        found.push(Finding::new(
            place.key("replicas"),
            "has no effect without `profiles`",
            right,
        ));
    }
    source_rule(model, place, found);
    for (index, endpoint) in model.endpoints.iter().enumerate() {
        let here = place.key("endpoints").index(index);
        plain_name(&endpoint.engine, "engine", here.key("engine"), found);
        if let Some(first) = model.endpoints[..index]
            .iter()
            .position(|other| other.url == endpoint.url)
        {
            let wrong = format!("endpoints[{first}] has `{}` too", endpoint.url);
            found.push(Finding::new(
                here.key("url"),
                wrong,
                "list each engine once",
            ));
        }
    }
    if let Some(metrics) = &model.metrics {
        metric_rules(metrics, &place.key("metrics"), found);
    }
    for (index, profile) in model.profiles.iter().enumerate() {
        let here = place.key("profiles").index(index);
        let twice = model.profiles[..index]
            .iter()
            .any(|other| other.name == profile.name);
        if twice && !profile.name.is_empty() {
            let wrong = format!(
                "another profile of this model is called `{}` too",
                profile.name
            );
            found.push(Finding::new(
                here.key("name"),
                wrong,
                "give each profile its own name",
            ));
        }
        profile::rules(profile, &here, found);
    }
}

/// A source that is a relative path stays below the node's `models_dir`; which ones are paths, each engine's plugin knows.
fn source_rule(model: &Model, place: &Place, found: &mut Vec<Finding>) {
    let (key, source) = match &model.source {
        Some(source) => ("source", &**source),
        None if model.profiles.is_empty() => return,
        None => ("name", &*model.name),
    };
    if !source.starts_with('/') && source.split('/').any(|part| part == "..") {
        let wrong = format!("`{}` leads out of a node's `models_dir`", shown(source));
        let right = "write a path below `models_dir` without `..`, or an absolute one as `source`";
        found.push(Finding::new(place.key(key), wrong, right));
    }
}

fn metric_rules(metrics: &llmgw_plugins::MetricOverride, place: &Place, found: &mut Vec<Finding>) {
    if metrics
        .path
        .as_ref()
        .is_some_and(|path| !path.starts_with('/'))
    {
        found.push(Finding::new(
            place.key("path"),
            "does not begin with `/`",
            "write e.g. `path: /metrics`",
        ));
    }
    let kinds = [
        ("running", &metrics.running),
        ("waiting", &metrics.waiting),
        ("kv", &metrics.kv),
    ];
    for (kind, names) in kinds {
        let Some(names) = names else { continue };
        if names.is_empty() {
            let wrong = "names no metric";
            found.push(Finding::new(
                place.key(kind),
                wrong,
                "write a metric's name, or leave the key out",
            ));
        }
        if names
            .iter()
            .any(|name| name.contains(|c: char| c.is_whitespace() || c.is_control() || c == '{'))
        {
            let wrong = "a metric's name has no spaces and no labels";
            found.push(Finding::new(
                place.key(kind),
                wrong,
                "write the name alone, e.g. `vllm:num_requests_running`",
            ));
        }
    }
}

/// A name is one model's, as its name or as one of its aliases.
fn model_names(config: &Config, list: &Place, found: &mut Vec<Finding>) {
    let mut owners: HashMap<&str, (usize, bool)> = HashMap::new();
    let models = &config.catalog.models;
    for (index, model) in models
        .iter()
        .enumerate()
        .filter(|(_, model)| !model.name.is_empty())
    {
        if let Some((first, _)) = owners.get(&*model.name) {
            let wrong = format!("models[{first}] is called `{}` too", shown(&model.name));
            found.push(Finding::new(
                list.index(index).key("name"),
                wrong,
                "give each model its own name",
            ));
        } else {
            owners.insert(&model.name, (index, true));
        }
    }
    for (index, model) in models.iter().enumerate() {
        for (number, alias) in model
            .aliases
            .iter()
            .enumerate()
            .filter(|(_, alias)| !alias.is_empty())
        {
            let Some((first, is_name)) = owners.insert(alias, (index, false)) else {
                continue;
            };
            owners.insert(alias, (first, is_name));
            let what = if is_name { "the name" } else { "an alias" };
            let wrong = match first == index {
                true => format!("`{}` is {what} of this model already", shown(alias)),
                false => format!("`{}` is {what} of models[{first}] already", shown(alias)),
            };
            let place = list.index(index).key("aliases").index(number);
            found.push(Finding::new(
                place,
                wrong,
                "a name leads to one model: keep one of them",
            ));
        }
    }
}

/// What clients may ask for: no spaces, and no `*` since tenants' patterns use it.
fn model_name(name: &str, place: Place, found: &mut Vec<Finding>) {
    let bad = |c: char| c.is_whitespace() || c.is_control() || c == '*';
    if name.len() > MODEL_NAME_MAX_BYTES || name.contains(bad) {
        let wrong = format!("`{}` is not a model's name", shown(name));
        let right = format!(
            "use at most {MODEL_NAME_MAX_BYTES} bytes without spaces, control characters and `*`"
        );
        found.push(Finding::new(place, wrong, right));
    }
}

/// A name that ends up in metric labels, paths and logs.
pub(super) fn plain_name(name: &str, what: &str, place: Place, found: &mut Vec<Finding>) {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    if name.len() > NAME_MAX_BYTES || !name.bytes().all(allowed) {
        let wrong = format!("`{}` is not a name for a {what}", shown(name));
        let right = format!("use at most {NAME_MAX_BYTES} of letters, digits, `_`, `-` and `.`");
        found.push(Finding::new(place, wrong, right));
    }
}
