//! What the admin address shows of a running server.

use std::net::SocketAddr;
use std::sync::Arc;

use llmgw_proto::identity::Certificate;

use super::reload::Reloads;
use crate::admin::status::{
    BandStatus, CertificateStatus, ConfigStatus, ListenerStatus, ModelStatus, ReplicaState,
    ReplicaStatus, StatusReport, TenantStatus,
};
use crate::admin::{Ready, Report};
use crate::certificates::{Certificates, Owner};
use crate::clock;
use crate::config::Model;
use crate::flow::BandReport;
use crate::flow::cost::PRICE_SCALE;
use crate::gateway::auth::Tenants;
use crate::gateway::state::Gateway;
use crate::routing::outlook::{NONE_READY, Outlook};
use crate::routing::pool::Pool;
use crate::routing::replica::{Readiness, Replica, Standing};

/// The addresses that are really listened on.
#[derive(Debug, Clone)]
pub struct Addresses {
    pub clients: SocketAddr,
    pub clients_tls: bool,
    pub admin: SocketAddr,
    pub admin_tls: bool,
    /// None: no agent may connect.
    pub agents: Option<SocketAddr>,
    pub agents_tls: bool,
}

/// The whole gateway, described when asked.
pub fn of(
    gateway: Arc<Gateway>,
    addresses: Addresses,
    reloads: Arc<Reloads>,
    certificates: Arc<Certificates>,
) -> Report {
    Arc::new(move || {
        let runtime = gateway.runtime.load();
        let reload = reloads.state();
        let listener = |name: &str, address: SocketAddr, tls| ListenerStatus {
            name: name.to_string(),
            address: address.to_string(),
            tls,
        };
        StatusReport {
            version: env!("CARGO_PKG_VERSION").to_string(),
            uptime_ms: clock::now_ms(),
            generation: gateway.policies.current().generation(),
            listeners: [
                Some(listener(
                    "clients",
                    addresses.clients,
                    addresses.clients_tls,
                )),
                Some(listener("admin", addresses.admin, addresses.admin_tls)),
                addresses
                    .agents
                    .map(|address| listener("agents", address, addresses.agents_tls)),
            ]
            .into_iter()
            .flatten()
            .collect(),
            certificates: certificate_statuses(&certificates),
            config: ConfigStatus {
                source: runtime.config.source.display().to_string(),
                loaded_at_ms: reload.loaded_at_ms,
                needs_restart: reloads
                    .needs_restart()
                    .into_iter()
                    .map(str::to_owned)
                    .collect(),
                last_error: reload.last_error.or_else(|| reloads.held_since_start()),
            },
            models: runtime
                .config
                .catalog
                .models
                .iter()
                .filter_map(|model| runtime.fleet.pool(&model.name))
                .map(|pool| model_status(pool))
                .collect(),
            tenants: tenant_statuses(&runtime.tenants),
        }
    })
}

fn certificate_statuses(certificates: &Certificates) -> Vec<CertificateStatus> {
    let now = certificates.now();
    let row = |owner: &Owner, certificate: &Certificate, problem: &Option<String>| {
        let file = owner.file().map(|file| file.display().to_string());
        CertificateStatus {
            serves: owner.serves().to_owned(),
            file: file.unwrap_or_default(),
            subject: certificate.subject.clone(),
            hosts: certificate.hosts.iter().map(ToString::to_string).collect(),
            serial: certificate.serial.to_string(),
            fingerprint: certificate.fingerprint.to_string(),
            not_before_s: certificate.not_before.0,
            not_after_s: certificate.not_after.0,
            days_left: certificate.days_left(now),
            problem: problem.clone(),
        }
    };
    let held = certificates.held();
    let mut rows = Vec::new();
    for held in held.iter() {
        let of = held.certificates();
        rows.extend(of.map(|(owner, certificate)| row(&owner, certificate, &held.problem)));
    }
    rows
}

/// Whether clients can be served: listeners are up and a policy set is in force by the time this is asked.
pub fn readiness(gateway: Arc<Gateway>) -> Ready {
    Arc::new(move || {
        if gateway.is_draining() {
            return Err("the gateway is shutting down".to_string());
        }
        Ok(())
    })
}

fn model_status(pool: &Pool) -> ModelStatus {
    let lanes = pool.queues.lane_reports();
    let queued = |replica: &Replica| {
        let lane = lanes.iter().find(|lane| lane.name == replica.id);
        lane.map_or(0, |lane| u64::from(lane.queued))
    };
    let replicas: Vec<ReplicaStatus> = pool
        .replicas
        .iter()
        .map(|replica| ReplicaStatus {
            queued: queued(replica),
            ..replica_status(replica)
        })
        .collect();
    let ready = replicas
        .iter()
        .filter(|replica| replica.state == ReplicaState::Ready)
        .count();
    ModelStatus {
        wanted: Some(wanted(&pool.model)),
        reason: missing_reason(&pool.model, ready, &pool.outlook.load()),
        name: pool.model.name.to_string(),
        aliases: pool.model.aliases.iter().map(ToString::to_string).collect(),
        ready: ready > 0,
        bands: pool.queues.band_reports().iter().map(band_status).collect(),
        replicas,
    }
}

fn wanted(model: &Model) -> u64 {
    let started = match model.profiles.is_empty() {
        true => 0,
        false => u64::from(model.replicas),
    };
    model.endpoints.len() as u64 + started
}

/// What the control plane says of those that are missing; nothing where none is, or where it starts none.
fn missing_reason(model: &Model, ready: usize, outlook: &Outlook) -> String {
    let is_missing = !model.profiles.is_empty() && (ready as u64) < wanted(model);
    let is_news = ready == 0 || outlook.reason != NONE_READY;
    match is_missing && is_news {
        true => outlook.reason.clone(),
        false => String::new(),
    }
}

/// Those that have requests, or had some in the last minute.
fn tenant_statuses(tenants: &Tenants) -> Vec<TenantStatus> {
    let mut rows: Vec<(u64, TenantStatus)> = tenants
        .accounts()
        .map(|account| {
            let used = account.usage();
            let status = TenantStatus {
                name: account.name.to_string(),
                weight: account.weight(),
                queued: u64::from(account.queued()),
                inflight: u64::from(account.inflight()),
                cost_1m: used.cost as f64 / PRICE_SCALE,
                share_1m: None,
            };
            (used.cost, status)
        })
        .filter(|(cost, row)| cost + row.queued + row.inflight > 0)
        .collect();
    let total: u64 = rows.iter().map(|(cost, _)| cost).sum();
    rows.sort_by(|left, right| left.1.name.cmp(&right.1.name));
    rows.into_iter()
        .map(|(cost, row)| TenantStatus {
            share_1m: (total > 0).then(|| cost as f64 / total as f64),
            ..row
        })
        .collect()
}

fn band_status(band: &BandReport) -> BandStatus {
    BandStatus {
        name: band.name.to_string(),
        queued: u64::from(band.queued),
        oldest_ms: band.oldest_ms,
        inflight: u64::from(band.inflight),
        share_10s: band.share,
        arrivals_s: band.arrivals_s,
        rejected_s: band.rejections_s,
    }
}

fn replica_status(replica: &Replica) -> ReplicaStatus {
    let now = clock::now_ms();
    let numbers = replica.numbers(now);
    let (state, reason) = match (&numbers.readiness, replica.standing(now)) {
        (Readiness::Unknown, _) => (ReplicaState::Unknown, "not probed yet".to_string()),
        (Readiness::NotReady { reason }, _) => (ReplicaState::NotReady, reason.clone()),
        (Readiness::Ready { .. }, Standing::Closed { reason, .. }) => (ReplicaState::Open, reason),
        (Readiness::Ready { .. }, Standing::OnTrial) => (
            ReplicaState::Open,
            "one request is trying it again".to_string(),
        ),
        (Readiness::Ready { .. }, _) => (
            ReplicaState::Ready,
            numbers
                .scrape_error
                .map(|error| format!("no load from its metrics: {error}"))
                .unwrap_or_default(),
        ),
    };
    let served_name = match &numbers.readiness {
        Readiness::Ready { served, .. } => Some(served.to_string()),
        _ => None,
    };
    ReplicaStatus {
        id: replica.id.to_string(),
        url: replica.endpoint.url.to_string(),
        engine: replica.engine.to_string(),
        state,
        reason,
        served_name,
        inflight: u64::from(replica.slots.inflight()),
        slots: replica.slots.limit().map(u64::from),
        running: numbers.load.running,
        waiting: numbers.load.waiting,
        kv: numbers.load.kv,
        metrics_age_ms: numbers.metrics_age_ms,
        breaker: numbers.breaker.to_string(),
        errors_1m: u64::from(numbers.errors_1m),
        ms_per_prefill_token: Some(numbers.ms_per_prefill_token),
        ..ReplicaStatus::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn what_is_missing_counts_as_wanted_and_has_the_control_planes_reason() {
        let text = "models: [{name: m, replicas: 2, profiles: [{name: p, engine: llamacpp, cpus: 4}]}, \
                    {name: fixed, endpoints: [{url: 'http://127.0.0.1:9'}]}]\n";
        let parsed = config::parse("llmgw.yaml".as_ref(), text.to_owned(), &|_| None);
        let models = parsed.expect("it is one").catalog.models;
        let [started, fixed] = &models[..] else {
            panic!("there are two");
        };
        assert_eq!((wanted(started), wanted(fixed)), (2, 1));
        let outlook = |reason: &str| Outlook {
            recovering: false,
            reason: reason.to_owned(),
        };
        let no_place = outlook("no node has a place for it");
        for (ready, outlook, reason) in [
            (0, &no_place, &*no_place.reason),
            (1, &no_place, &no_place.reason),
            (2, &no_place, ""),
            (0, &outlook(NONE_READY), NONE_READY),
            (1, &outlook(NONE_READY), ""),
        ] {
            assert_eq!(missing_reason(started, ready, outlook), reason, "{ready}");
            assert_eq!(missing_reason(fixed, ready, outlook), "");
        }
    }
}
