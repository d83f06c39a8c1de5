//! What the server said, as text for people.

use std::time::{SystemTime, UNIX_EPOCH};

use llmgw_proto::identity::Moment;
use serde::Deserialize;
use serde_json::Value;

use super::table::{UNKNOWN, plain, plain_lines, span, table};
use crate::admin::status::{
    BandStatus, CertificateStatus, ModelStatus, ReplicaState, ReplicaStatus, StatusReport,
};

/// What `ctl` reads of `GET /v1/policies`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PolicyReport {
    generation: u64,
    source: PolicySource,
    loaded_at_ms: Option<u64>,
    /// A person chose this generation; the directory is ignored.
    pinned: bool,
    /// Generations that one can go back to, oldest first.
    history: Vec<u64>,
    last_error: Option<PolicyFailure>,
    /// Hooks that are switched off.
    trips: Vec<String>,
    errors: Vec<HookErrors>,
}

/// Where the policy set came from.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PolicySource {
    kind: String,
    path: String,
}

/// Why a newer policy set is not in force.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PolicyFailure {
    file: Option<String>,
    line: Option<u64>,
    reason: String,
    /// The line itself.
    text: Option<String>,
}

/// How often calls of a hook fell back.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct HookErrors {
    hook: String,
    kind: String,
    count: u64,
}

/// Milliseconds since the Unix epoch, to show how long ago something was.
pub fn now_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

pub fn status(report: &StatusReport, now_ms: u64) -> String {
    let config = &report.config;
    let mut text = format!(
        "llmgw {}  up {}\n",
        plain(&report.version),
        span(report.uptime_ms)
    );
    for listener in &report.listeners {
        let scheme = if listener.tls { "https" } else { "http" };
        text.push_str(&format!(
            "{:<9} {scheme}://{}\n",
            plain(&listener.name),
            plain(&listener.address)
        ));
    }
    if !config.source.is_empty() {
        text.push_str(&format!(
            "config    {}, loaded {}\n",
            plain(&config.source),
            ago(config.loaded_at_ms, now_ms)
        ));
    }
    if let Some(error) = &config.last_error {
        text.push_str(&format!(
            "          NOT IN FORCE as it is now: {}\n",
            plain_lines(error).replace('\n', "\n          ")
        ));
    }
    for key in &config.needs_restart {
        text.push_str(&format!(
            "          {} changed: takes effect with the next start\n",
            plain(key)
        ));
    }
    text.push_str(&format!("policies  generation {}\n\n", report.generation));
    let rows: Vec<[String; 6]> = report
        .models
        .iter()
        .map(|model| {
            let errors: u64 = model.replicas.iter().map(|replica| replica.errors_1m).sum();
            [
                model.name.clone(),
                ready_of(model),
                sum(&model.bands, |band| band.inflight),
                sum(&model.bands, |band| band.queued),
                errors.to_string(),
                why(model),
            ]
        })
        .collect();
    text.push_str(&table(
        ["MODEL", "READY", "INFLIGHT", "QUEUED", "ERRORS/MIN", "WHY"],
        &rows,
    ));
    text + &bands(report) + &tenants(report) + &certificates(&report.certificates)
}

/// The bands that have something, of every model.
fn bands(report: &StatusReport) -> String {
    let rows: Vec<[String; 8]> = report
        .models
        .iter()
        .flat_map(|model| model.bands.iter().map(move |band| (model, band)))
        .filter(|(_, band)| band.queued + band.inflight > 0 || band.rejected_s > 0.0)
        .map(|(model, band)| {
            [
                model.name.clone(),
                band.name.clone(),
                band.inflight.to_string(),
                band.queued.to_string(),
                band.oldest_ms.map_or_else(|| UNKNOWN.to_owned(), span),
                percent(band.share_10s),
                format!("{:.1}", band.arrivals_s),
                format!("{:.1}", band.rejected_s),
            ]
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = [
        "MODEL",
        "BAND",
        "INFLIGHT",
        "QUEUED",
        "OLDEST",
        "SHARE",
        "IN/S",
        "REFUSED/S",
    ];
    format!("\n{}", table(head, &rows))
}

/// Who was served lately, or waits.
fn tenants(report: &StatusReport) -> String {
    let rows: Vec<[String; 6]> = report
        .tenants
        .iter()
        .map(|tenant| {
            [
                tenant.name.clone(),
                tenant.weight.to_string(),
                tenant.inflight.to_string(),
                tenant.queued.to_string(),
                format!("{:.0}", tenant.cost_1m),
                percent(tenant.share_1m),
            ]
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = [
        "TENANT", "WEIGHT", "INFLIGHT", "QUEUED", "COST/MIN", "SHARE",
    ];
    format!("\n{}", table(head, &rows))
}

/// What listeners show over TLS, and which authorities they trust.
fn certificates(certificates: &[CertificateStatus]) -> String {
    let rows: Vec<[String; 5]> = certificates
        .iter()
        .map(|certificate| {
            let until = Moment(certificate.not_after_s).to_string();
            [
                certificate.serves.clone(),
                match certificate.days_left {
                    0.. => certificate.days_left.to_string(),
                    _ => "EXPIRED".to_owned(),
                },
                until.split('T').next().unwrap_or_default().to_owned(),
                certificate.serial.clone(),
                or_unknown(certificate.hosts.join(", ")),
            ]
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    let mut text = table(["CERTIFICATE", "DAYS", "UNTIL", "SERIAL", "FOR"], &rows);
    // An authority shares its listener's problem.
    let listeners = certificates.iter().filter(|one| one.serves != "agents_ca");
    for certificate in listeners {
        if let Some(problem) = &certificate.problem {
            text.push_str(&format!(
                "{}: the files are NOT IN FORCE as they are now: {}\n",
                plain(&certificate.serves),
                plain(problem)
            ));
        }
    }
    format!("\n{text}")
}

fn sum(bands: &[BandStatus], count: impl Fn(&BandStatus) -> u64) -> String {
    bands.iter().map(count).sum::<u64>().to_string()
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(
        || UNKNOWN.to_owned(),
        |share| format!("{:.0}%", share * 100.0),
    )
}

pub fn models(report: &StatusReport) -> String {
    let rows: Vec<[String; 5]> = report
        .models
        .iter()
        .map(|model| {
            let mut engines: Vec<&str> = model
                .replicas
                .iter()
                .map(|replica| replica.engine.as_str())
                .collect();
            engines.sort_unstable();
            engines.dedup();
            [
                model.name.clone(),
                ready_of(model),
                or_unknown(engines.join(", ")),
                or_unknown(model.aliases.join(", ")),
                why(model),
            ]
        })
        .collect();
    table(["MODEL", "READY", "ENGINES", "ALIASES", "WHY"], &rows)
}

pub fn replicas(report: &StatusReport) -> String {
    let rows: Vec<[String; 9]> = report
        .models
        .iter()
        .flat_map(|model| model.replicas.iter().map(move |replica| (model, replica)))
        .map(|(model, replica)| {
            [
                model.name.clone(),
                replica.id.clone(),
                replica.engine.clone(),
                replica.state.as_str().to_owned(),
                match replica.slots {
                    Some(slots) => format!("{}/{slots}", replica.inflight),
                    None => replica.inflight.to_string(),
                },
                number(replica.running),
                number(replica.waiting),
                replica
                    .kv
                    .map_or_else(|| UNKNOWN.to_owned(), |kv| format!("{:.0}%", kv * 100.0)),
                replica.reason.clone(),
            ]
        })
        .collect();
    table(
        [
            "MODEL", "REPLICA", "ENGINE", "STATE", "BUSY", "RUN", "WAIT", "KV", "WHY",
        ],
        &rows,
    )
}

/// The replicas of a status answer, each with its model's name, as the server itself wrote them.
pub fn replica_rows(answer: &Value) -> Value {
    let models = answer
        .get("models")
        .and_then(Value::as_array)
        .map(Vec::as_slice)
        .unwrap_or_default();
    let rows = models.iter().flat_map(|model| {
        let name = model.get("name").cloned().unwrap_or_default();
        let replicas = model
            .get("replicas")
            .and_then(Value::as_array)
            .map(Vec::as_slice)
            .unwrap_or_default();
        replicas
            .iter()
            .filter_map(Value::as_object)
            .map(move |replica| {
                let mut row = serde_json::Map::new();
                row.insert("model".to_owned(), name.clone());
                row.extend(replica.clone());
                Value::Object(row)
            })
    });
    Value::Array(rows.collect())
}

pub fn policies(answer: &Value, now_ms: u64) -> String {
    // A newer server may say more or say it otherwise: what can't be read is left out, the rest is shown.
    let report = PolicyReport::deserialize(answer).unwrap_or_default();
    let mut text = format!("generation  {}\n", report.generation);
    if !report.source.kind.is_empty() {
        let source = format!(
            "{} {}",
            report.source.kind.replace('_', " "),
            report.source.path
        );
        text.push_str(&format!("source      {}\n", plain(source.trim_end())));
    }
    if report.pinned {
        text.push_str(
            "pinned      changes of the directory are ignored until `ctl policies unpin`\n",
        );
    }
    if let Some(loaded_at_ms) = report.loaded_at_ms {
        text.push_str(&format!("loaded      {}\n", ago(loaded_at_ms, now_ms)));
    }
    let others: Vec<String> = report
        .history
        .iter()
        .filter(|generation| **generation != report.generation)
        .map(u64::to_string)
        .collect();
    if !others.is_empty() {
        text.push_str(&format!("kept        {}\n", others.join(", ")));
    }
    match &report.last_error {
        None => text.push_str("last error  none\n"),
        Some(failure) => text.push_str(&failed_set(failure, report.generation)),
    }
    if !report.trips.is_empty() {
        text.push_str(&format!(
            "off         {}: failed too often\n",
            plain(&report.trips.join(", "))
        ));
    }
    if !report.errors.is_empty() {
        let rows: Vec<[String; 3]> = report
            .errors
            .iter()
            .map(|row| [row.hook.clone(), row.kind.clone(), row.count.to_string()])
            .collect();
        text.push_str("\nhooks that fell back\n");
        text.push_str(&table(["HOOK", "HOW", "COUNT"], &rows));
    }
    text
}

/// Where it failed, why, and the line itself.
fn failed_set(failure: &PolicyFailure, generation: u64) -> String {
    let place = match (&failure.file, failure.line) {
        (Some(file), Some(line)) => format!("{}:{line}: ", plain(file)),
        (Some(file), None) => format!("{}: ", plain(file)),
        _ => String::new(),
    };
    let mut text = format!("last error  {place}{}\n", plain(&failure.reason));
    if let Some(line) = failure
        .text
        .as_deref()
        .filter(|line| !line.trim().is_empty())
    {
        text.push_str(&format!("            | {}\n", plain(line.trim_end())));
    }
    text + &format!("            generation {generation} stays in force until this loads\n")
}

fn count_ready(replicas: &[ReplicaStatus]) -> usize {
    replicas
        .iter()
        .filter(|replica| replica.state == ReplicaState::Ready)
        .count()
}

/// Of those that are declared, also where they do not run.
fn ready_of(model: &ModelStatus) -> String {
    let (ready, of) = counts(model);
    format!("{ready}/{of}")
}

/// The ready replicas of a model, and all that it should have.
pub fn counts(model: &ModelStatus) -> (usize, u64) {
    let known = model.replicas.len() as u64;
    let of = model.wanted.unwrap_or_default().max(known);
    (count_ready(&model.replicas), of)
}

/// What is wrong with a replica, or why some do not run.
fn why(model: &ModelStatus) -> String {
    match first_reason(&model.replicas) {
        reason if reason.is_empty() => model.reason.clone(),
        reason => reason,
    }
}

/// Why the first replica that is not ready is not.
fn first_reason(replicas: &[ReplicaStatus]) -> String {
    let down = replicas
        .iter()
        .find(|replica| replica.state != ReplicaState::Ready);
    down.map(|replica| {
        format!(
            "{}: {}",
            replica.id,
            if replica.reason.is_empty() {
                replica.state.as_str()
            } else {
                &replica.reason
            }
        )
    })
    .unwrap_or_default()
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), |value| value.to_string())
}

fn or_unknown(text: String) -> String {
    if text.is_empty() {
        UNKNOWN.to_owned()
    } else {
        text
    }
}

fn ago(then_ms: u64, now_ms: u64) -> String {
    format!("{} ago", span(now_ms.saturating_sub(then_ms)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::{ConfigStatus, ListenerStatus, TenantStatus};

    fn report() -> StatusReport {
        let ready = ReplicaStatus {
            id: "smollm2/0".into(),
            engine: "llamacpp".into(),
            state: ReplicaState::Ready,
            inflight: 3,
            slots: Some(4),
            running: Some(3.0),
            kv: Some(0.254),
            ..ReplicaStatus::default()
        };
        let down = ReplicaStatus {
            id: "smollm2/1".into(),
            engine: "vllm".into(),
            state: ReplicaState::NotReady,
            reason: "connection refused".into(),
            errors_1m: 5,
            ..ReplicaStatus::default()
        };
        StatusReport {
            version: "0.1.0".into(),
            uptime_ms: 61_000,
            generation: 4,
            listeners: vec![ListenerStatus {
                name: "clients".into(),
                address: "127.0.0.1:8080".into(),
                tls: false,
            }],
            config: ConfigStatus {
                source: "llmgw.yaml".into(),
                loaded_at_ms: 1000,
                last_error: Some("llmgw.yaml:3: no".into()),
                needs_restart: vec!["listen".into()],
            },
            models: vec![ModelStatus {
                name: "smollm2".into(),
                aliases: vec!["default".into()],
                ready: true,
                bands: vec![
                    BandStatus {
                        name: "interactive".into(),
                        inflight: 3,
                        queued: 12,
                        oldest_ms: Some(1_400),
                        share_10s: Some(0.75),
                        arrivals_s: 2.25,
                        ..BandStatus::default()
                    },
                    BandStatus {
                        name: "batch".into(),
                        ..BandStatus::default()
                    },
                ],
                replicas: vec![ready, down],
                ..ModelStatus::default()
            }],
            tenants: vec![TenantStatus {
                name: "research".into(),
                weight: 2.0,
                inflight: 3,
                queued: 12,
                cost_1m: 18_250.4,
                share_1m: Some(0.666),
            }],
            certificates: vec![
                CertificateStatus {
                    serves: "agents".into(),
                    hosts: vec!["ctl.example".into(), "10.0.0.5".into()],
                    serial: "a5".into(),
                    not_after_s: 1_798_675_200,
                    days_left: 29,
                    problem: Some("server.pem: no".into()),
                    ..CertificateStatus::default()
                },
                CertificateStatus {
                    serves: "agents_ca".into(),
                    serial: "1".into(),
                    not_after_s: 1_798_675_199,
                    days_left: -1,
                    problem: Some("server.pem: no".into()),
                    ..CertificateStatus::default()
                },
            ],
        }
    }

    #[test]
    fn status_fits_a_terminal_and_says_what_is_wrong() {
        assert_eq!(
            status(&report(), 31_000),
            "llmgw 0.1.0  up 1m1s\n\
             clients   http://127.0.0.1:8080\n\
             config    llmgw.yaml, loaded 30s ago\n\
             \x20         NOT IN FORCE as it is now: llmgw.yaml:3: no\n\
             \x20         listen changed: takes effect with the next start\n\
             policies  generation 4\n\
             \n\
             MODEL    READY  INFLIGHT  QUEUED  ERRORS/MIN  WHY\n\
             smollm2  1/2    3         12      5           smollm2/1: connection refused\n\
             \n\
             MODEL    BAND         INFLIGHT  QUEUED  OLDEST  SHARE  IN/S  REFUSED/S\n\
             smollm2  interactive  3         12      1s      75%    2.2   0.0\n\
             \n\
             TENANT    WEIGHT  INFLIGHT  QUEUED  COST/MIN  SHARE\n\
             research  2       3         12      18250     67%\n\
             \n\
             CERTIFICATE  DAYS     UNTIL       SERIAL  FOR\n\
             agents       29       2026-12-31  a5      ctl.example, 10.0.0.5\n\
             agents_ca    EXPIRED  2026-12-30  1       -\n\
             agents: the files are NOT IN FORCE as they are now: server.pem: no\n"
        );
    }

    #[test]
    fn unknown_numbers_are_dashes() {
        assert_eq!(
            replicas(&report()),
            "MODEL    REPLICA    ENGINE    STATE      BUSY  RUN  WAIT  KV   WHY\n\
             smollm2  smollm2/0  llamacpp  ready      3/4   3    -     25%\n\
             smollm2  smollm2/1  vllm      not_ready  0     -    -     -    connection refused\n"
        );
        assert_eq!(
            models(&report()),
            "MODEL    READY  ENGINES         ALIASES  WHY\n\
             smollm2  1/2    llamacpp, vllm  default  smollm2/1: connection refused\n"
        );
    }

    #[test]
    fn a_model_that_does_not_run_shows_how_many_are_wanted_and_why() {
        let reason = "no node has a place for it: `gpus_busy` on 1 node (best a: 0 free of 2)";
        let mut report = StatusReport {
            models: vec![ModelStatus {
                name: "big".into(),
                wanted: Some(2),
                reason: reason.into(),
                ..ModelStatus::default()
            }],
            ..StatusReport::default()
        };
        let row = |text: String| text.lines().last().unwrap_or_default().to_owned();
        let expected = format!("big    0/2    0         0       0           {reason}");
        assert_eq!(row(status(&report, 0)), expected);
        assert_eq!(
            row(models(&report)),
            format!("big    0/2    -        -        {reason}")
        );
        report.models[0].wanted = None;
        assert!(
            row(models(&report)).starts_with("big    0/0"),
            "an older server"
        );
    }

    #[test]
    fn a_policy_set_that_failed_is_shown_with_file_line_and_the_line_itself() {
        let answer = serde_json::json!({
            "generation": 3, "source": {"kind": "directory", "path": "policies"}, "loaded_at_ms": 1000,
            "last_error": {"file": "routing.lua", "line": 12, "reason": "attempt to call nil", "text": "  local x = nope()"},
            "trips": ["routing.rank"], "errors": [{"hook": "routing.rank", "kind": "budget", "count": 2}],
        });
        assert_eq!(
            policies(&answer, 61_000),
            "generation  3\n\
             source      directory policies\n\
             loaded      1m0s ago\n\
             last error  routing.lua:12: attempt to call nil\n\
             \x20           |   local x = nope()\n\
             \x20           generation 3 stays in force until this loads\n\
             off         routing.rank: failed too often\n\
             \n\
             hooks that fell back\n\
             HOOK          HOW     COUNT\n\
             routing.rank  budget  2\n"
        );
        assert!(policies(&serde_json::json!({"generation": 1}), 0).contains("last error  none"));
    }

    #[test]
    fn replicas_in_json_carry_their_model() {
        let rows = replica_rows(&serde_json::to_value(report()).unwrap());
        assert_eq!(rows[1]["model"], "smollm2");
        assert_eq!(rows[1]["id"], "smollm2/1");
    }
}
