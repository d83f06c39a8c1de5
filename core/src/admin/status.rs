//! What the admin listener reports about the gateway, as JSON. `llmgw ctl` reads the same types back.
//!
//! Unknown numbers are `null`, never 0. Readers ignore fields that they don't know and default those that are missing,
//! so that ctl and server may differ in version.

use serde::{Deserialize, Serialize};

/// `GET /v1/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StatusReport {
    pub version: String,
    pub uptime_ms: u64,
    /// Of the policy set in force.
    pub generation: u64,
    pub listeners: Vec<ListenerStatus>,
    /// Those that listeners show, and the authorities that they trust.
    pub certificates: Vec<CertificateStatus>,
    pub config: ConfigStatus,
    /// In the order of the configuration.
    pub models: Vec<ModelStatus>,
    /// Those that have requests or were served in the last minute, by name.
    pub tenants: Vec<TenantStatus>,
}

/// An address that is listened on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListenerStatus {
    /// `clients`, `admin`, `agents`.
    pub name: String,
    pub address: String,
    pub tls: bool,
}

/// A certificate that is in force at a listener.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CertificateStatus {
    /// `listen`, `admin`, `agents`; `agents_ca` for an authority.
    #[serde(rename = "use")]
    pub serves: String,
    pub file: String,
    pub subject: String,
    /// The names and addresses that it is for.
    pub hosts: Vec<String>,
    pub serial: String,
    pub fingerprint: String,
    /// Seconds since the Unix epoch.
    pub not_before_s: i64,
    pub not_after_s: i64,
    /// Whole days until it ends; negative once it has.
    pub days_left: i64,
    /// Why the files as they are now are not in force. None: they are.
    pub problem: Option<String>,
}

/// The configuration in force.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigStatus {
    pub source: String,
    /// Milliseconds since the Unix epoch.
    pub loaded_at_ms: u64,
    /// Why the file as it is now is not in force. None: it is.
    pub last_error: Option<String>,
    /// Settings of it that take effect with the next start.
    pub needs_restart: Vec<String>,
}

/// A model of the catalog.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelStatus {
    pub name: String,
    pub aliases: Vec<String>,
    /// At least one replica takes requests.
    pub ready: bool,
    /// Replicas that are declared: endpoints, and those that the server keeps running. None: the server is older and does not say.
    pub wanted: Option<u64>,
    /// Why the server runs fewer than that; empty: nothing is known to be wrong.
    pub reason: String,
    /// The highest first.
    pub bands: Vec<BandStatus>,
    pub replicas: Vec<ReplicaStatus>,
}

/// A band of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BandStatus {
    pub name: String,
    /// Requests that wait, and how long the one that waits longest has waited.
    pub queued: u64,
    pub oldest_ms: Option<u64>,
    /// Requests that engines work on.
    pub inflight: u64,
    /// Of the model's service in the last 10 s, 0 to 1.
    pub share_10s: Option<f64>,
    /// Requests that came and that were refused, a second.
    pub arrivals_s: f64,
    pub rejected_s: f64,
}

/// A tenant, over all models.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantStatus {
    pub name: String,
    /// Its weight as the policy has it now.
    pub weight: f64,
    pub queued: u64,
    pub inflight: u64,
    /// What it was charged in the last minute, in prices of tokens, and its share of what all were charged, 0 to 1.
    pub cost_1m: f64,
    pub share_1m: Option<f64>,
}

/// A replica of a model, as the router sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReplicaStatus {
    pub id: String,
    pub url: String,
    pub engine: String,
    pub state: ReplicaState,
    /// Why it is not ready; empty when it is.
    pub reason: String,
    /// The name under which the engine lists the model.
    pub served_name: Option<String>,
    /// Requests that this gateway has there now, those of other models included.
    pub inflight: u64,
    /// Requests of this model that wait in this gateway for their turn there.
    pub queued: u64,
    /// Requests that may be there at once.
    pub slots: Option<u64>,
    /// Scraped from the engine: requests that run, that wait, and the share of KV cache in use (0 to 1).
    pub running: Option<f64>,
    pub waiting: Option<f64>,
    pub kv: Option<f64>,
    /// Age of the scraped numbers.
    pub metrics_age_ms: Option<u64>,
    /// `closed`, `open`, `half_open`.
    pub breaker: String,
    /// Failures in the last minute.
    pub errors_1m: u64,
    /// Learned from answers: milliseconds of prefill for each prompt token.
    pub ms_per_prefill_token: Option<f64>,
}

/// Whether a replica takes requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplicaState {
    Ready,
    /// The engine says no, or doesn't list the model.
    NotReady,
    /// The circuit breaker is open.
    Open,
    /// Not probed yet, or a state that a newer server has.
    #[default]
    #[serde(other)]
    Unknown,
}

impl ReplicaState {
    pub fn as_str(self) -> &'static str {
        match self {
            ReplicaState::Ready => "ready",
            ReplicaState::NotReady => "not_ready",
            ReplicaState::Open => "open",
            ReplicaState::Unknown => "unknown",
        }
    }
}
