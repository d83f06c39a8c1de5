//! What an operator is told about a configuration that is valid: what needs a restart, what has no effect yet, what was probably not meant.

use std::time::Duration;

use super::{AdminListen, Config, TlsFiles};

/// The settings that differ and take effect only when the server is started again.
pub fn needs_restart(old: &Config, new: &Config) -> Vec<&'static str> {
    // Other files are taken at once; from plaintext to TLS, and from any agent to those with a certificate, is another listener.
    let agents = |config: &Config| {
        let agents = config.agents.as_ref()?;
        let tls = agents.tls.as_ref().map(|tls| tls.ca.is_some());
        Some((agents.address, tls, agents.require_identity))
    };
    let is_tls = |tls: &Option<TlsFiles>| tls.is_some();
    let differs = [
        ("listen", old.listen.address != new.listen.address),
        ("tls", is_tls(&old.listen.tls) != is_tls(&new.listen.tls)),
        ("admin.listen", old.admin.address != new.admin.address),
        (
            "admin.tls",
            is_tls(&old.admin.tls) != is_tls(&new.admin.tls),
        ),
        ("admin.token", old.admin.token != new.admin.token),
        (
            "agents.listen",
            agents(old).map(|(address, ..)| address) != agents(new).map(|(address, ..)| address),
        ),
        (
            "agents.tls",
            agents(old).and_then(|(_, tls, _)| tls) != agents(new).and_then(|(_, tls, _)| tls),
        ),
        (
            "agents.require_identity",
            agents(old).map(|(_, _, required)| required)
                != agents(new).map(|(_, _, required)| required),
        ),
        ("policies", old.policies != new.policies),
        ("state", old.state != new.state),
        ("log", old.log != new.log),
    ];
    differs
        .into_iter()
        .filter(|(_, differs)| *differs)
        .map(|(name, _)| name)
        .collect()
}

/// What is configured, valid, and without effect in this version: one sentence each.
pub fn not_yet_enforced(config: &Config) -> Vec<String> {
    let mut said = Vec::new();
    let profiles: Vec<&str> = config
        .catalog
        .models
        .iter()
        .filter(|model| !model.profiles.is_empty())
        .map(|model| &*model.name)
        .collect();
    if !profiles.is_empty() && config.agents.is_none() {
        said.push(format!(
            "`profiles` are not started without `agents`, where nodes connect (models: {})",
            profiles.join(", ")
        ));
    }
    said
}

/// Agents that lost their server try again at least every 10 s, and have to register then. Who places before they did starts second copies.
pub const RECOVERY_SAFE: Duration = Duration::from_secs(12);

/// A recovery that is over before every agent had a chance to come back. Not for `llmgw dev`, whose one agent brings all with it.
pub fn recovery_warning(config: &Config) -> Option<String> {
    let recovery = config.agents.as_ref()?.recovery;
    (recovery < RECOVERY_SAFE).then(|| {
        format!(
            "`agents.recovery` {recovery:?} is less than {RECOVERY_SAFE:?}: agents try again at least every 10 s, so a server that restarts may start second copies of what runs on nodes that are not back yet"
        )
    })
}

/// What is allowed, and probably not meant: one sentence each.
pub fn warnings(config: &Config) -> Vec<String> {
    let mut said = Vec::new();
    if config.catalog.models.is_empty() {
        said.push("`models` is empty: every request is answered with 404".to_owned());
    }
    for tenant in &config.tenants {
        if tenant.keys.is_empty() {
            said.push(format!(
                "tenant `{}` has no `keys`: nobody can be it",
                tenant.name
            ));
        }
        for pattern in &tenant.models {
            if config.catalog.names().any(|name| pattern.matches(name))
                || config.catalog.models.is_empty()
            {
                continue;
            }
            let alias = config.catalog.resolve(pattern.as_str());
            let why = alias.map_or(String::new(), |model| {
                format!("; it is an alias of `{}`, name that", model.name)
            });
            said.push(format!(
                "tenant `{}`: `{}` matches no model{why}",
                tenant.name,
                pattern.as_str()
            ));
        }
    }
    said.extend(admin_warnings(&config.admin));
    said.extend(agents_warnings(config));
    said
}

fn admin_warnings(admin: &AdminListen) -> Option<String> {
    let address = admin.address;
    if address.ip().is_loopback() {
        return None;
    }
    match (&admin.token, &admin.tls) {
        (None, Some(_)) => Some(format!(
            "`admin` {address} can be reached from other machines, and `admin.token` is not set: TLS keeps nobody out, so whoever reaches it can drain, stop and reload"
        )),
        (Some(_), None) => Some(format!(
            "`admin` {address} can be reached from other machines, and `admin.tls` is not set: whoever is on the way reads `admin.token`, and all that is answered"
        )),
        _ => None,
    }
}

fn agents_warnings(config: &Config) -> Vec<String> {
    let Some(agents) = &config.agents else {
        return Vec::new();
    };
    let mut said = Vec::new();
    let signs = agents.tls.as_ref().is_some_and(|tls| tls.ca_key.is_some());
    if signs && config.admin.token.is_none() {
        said.push(format!(
            "`agents.tls.ca_key` is set, and `admin.token` is not: whoever reaches {}, any user of this machine too, can make a token for any node",
            config.admin.address
        ));
    }
    if !agents.deny_serials.is_empty() && !agents.require_identity {
        said.push(
            "`agents.deny_serials` keeps nobody out without `agents.require_identity`: who is denied shows no certificate at all"
                .to_owned(),
        );
    }
    said
}
