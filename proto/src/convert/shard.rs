//! Shards: what is to run, and how it is doing.

use std::collections::BTreeMap;

use super::{Result, address, cut, missing, named, sentence, within, words};
use crate::session::ShardReport;
use crate::shard::{
    ApiKey, LogLine, Readiness, ShardCommand, ShardSpec, ShardState, ShardStatus, WaitFor,
};
use crate::wire;
use crate::wire::shape::{LINE_MAX_BYTES, LINES_MAX};

/// Output in one report.
pub(super) const TAIL_MAX_BYTES: usize = 64 << 10;
/// Output in all reports of one message.
pub(super) const TAILS_MAX_BYTES: usize = 1 << 20;

pub(super) fn report_out(report: &ShardReport, tail_max_bytes: usize) -> wire::ShardReport {
    let status = &report.status;
    wire::ShardReport {
        spec: report.spec.as_deref().map(spec_out),
        status: Some(wire::ShardStatus {
            shard: status.shard.clone(),
            spec_hash: status.spec_hash.clone(),
            state: words::state_out(status.state).into(),
            reason: sentence(&status.reason),
            exit: status.exit.map(words::exit_out),
            log_tail: lines_out(&status.log_tail, tail_max_bytes),
            since_ms: status.since_ms,
            adopted: status.adopted,
        }),
    }
}

pub(super) fn report_in(report: wire::ShardReport) -> Result<ShardReport> {
    let status = report.status.ok_or_else(|| missing("status"))?;
    let spec = report
        .spec
        .map(spec_in)
        .transpose()
        .map_err(within("spec"))?;
    Ok(ShardReport {
        spec: spec.map(Into::into),
        status: status_in(status).map_err(within("status"))?,
    })
}

fn status_in(status: wire::ShardStatus) -> Result<ShardStatus> {
    // A state without a word here may be anything. As loading it keeps what it has and gets no requests.
    let (state, reason) = match words::state_in(status.state) {
        Some(state) => (state, status.reason),
        None => {
            let unknown = format!(
                "state {} of a newer agent, which this server does not know; {}",
                status.state, status.reason
            );
            (
                ShardState::Loading,
                sentence(unknown.trim_end_matches("; ")),
            )
        }
    };
    Ok(ShardStatus {
        shard: named(status.shard, "shard")?,
        spec_hash: named(status.spec_hash, "spec_hash")?,
        state,
        reason,
        exit: status.exit.as_ref().map(words::exit_in),
        log_tail: lines_in(status.log_tail),
        since_ms: status.since_ms,
        adopted: status.adopted,
    })
}

/// The last lines that fit: a failure's cause is at the end.
pub(super) fn lines_out(lines: &[LogLine], max_bytes: usize) -> Vec<wire::LogLine> {
    let mut bytes_left = max_bytes;
    let mut out: Vec<wire::LogLine> = lines
        .iter()
        .rev()
        .take(LINES_MAX)
        .map_while(|line| {
            let text = cut(&line.text, LINE_MAX_BYTES);
            bytes_left = bytes_left.checked_sub(text.len())?;
            Some(wire::LogLine {
                at_ms: line.at_ms,
                text: text.to_owned(),
            })
        })
        .collect();
    out.reverse();
    out
}

pub(super) fn lines_in(lines: Vec<wire::LogLine>) -> Vec<LogLine> {
    lines
        .into_iter()
        .map(|line| LogLine {
            at_ms: line.at_ms,
            text: line.text,
        })
        .collect()
}

pub(super) fn spec_out(spec: &ShardSpec) -> wire::ShardSpec {
    wire::ShardSpec {
        shard: spec.shard.clone(),
        replica: spec.replica.clone(),
        model: spec.model.clone(),
        profile: spec.profile.clone(),
        definition: spec.definition.clone(),
        rank: spec.rank,
        engine: spec.engine.clone(),
        commands: spec.commands.iter().map(command_out).collect(),
        gpus: spec.gpus.clone(),
        cpus: spec.cpus,
        memory_bytes: spec.memory_bytes,
        ports: spec.ports.iter().copied().map(u32::from).collect(),
        host: spec.host.clone(),
        serves_http: spec.serves_http,
        readiness: Some(wire::Readiness {
            health: spec.readiness.health.clone(),
            models: spec.readiness.models.clone(),
            served_name: spec.readiness.served_name.clone(),
            start_deadline_ms: spec.readiness.start_deadline_ms,
        }),
        slots: spec.slots,
        stop_grace_ms: spec.stop_grace_ms,
        api_key: spec.api_key.as_ref().map(|key| key.expose().to_owned()),
    }
}

pub(super) fn spec_in(spec: wire::ShardSpec) -> Result<ShardSpec> {
    let readiness = spec.readiness.ok_or_else(|| missing("readiness"))?;
    let commands = spec.commands.into_iter().enumerate();
    let commands = commands.map(|(index, command)| {
        command_in(command).map_err(|error| error.within("commands", Some(index)))
    });
    let ports = spec.ports.into_iter().enumerate();
    let ports = ports
        .map(|(index, port)| words::port(port).map_err(|error| error.within("ports", Some(index))));
    Ok(ShardSpec {
        commands: commands.collect::<Result<_>>()?,
        ports: ports.collect::<Result<_>>()?,
        shard: named(spec.shard, "shard")?,
        replica: named(spec.replica, "replica")?,
        model: named(spec.model, "model")?,
        profile: named(spec.profile, "profile")?,
        definition: spec.definition,
        rank: spec.rank,
        engine: named(spec.engine, "engine")?,
        gpus: spec.gpus,
        cpus: spec.cpus,
        memory_bytes: spec.memory_bytes,
        host: address(spec.host, "host")?,
        serves_http: spec.serves_http,
        readiness: Readiness {
            health: readiness.health,
            models: readiness.models,
            served_name: readiness.served_name,
            start_deadline_ms: words::time(
                readiness.start_deadline_ms,
                "readiness.start_deadline_ms",
            )?,
        },
        slots: spec.slots,
        stop_grace_ms: words::time(spec.stop_grace_ms, "stop_grace_ms")?,
        api_key: spec.api_key.map(ApiKey::new),
    })
}

fn command_out(command: &ShardCommand) -> wire::ShardCommand {
    wire::ShardCommand {
        executable: command.executable.clone(),
        args: command.args.clone(),
        env: command.env.clone().into_iter().collect(),
        wait_for: command.wait_for.as_ref().map(|wait_for| wire::WaitFor {
            address: wait_for.address.clone(),
            timeout_ms: wait_for.timeout_ms,
        }),
        sidecar: command.sidecar,
    }
}

fn command_in(command: wire::ShardCommand) -> Result<ShardCommand> {
    let wait_for = command.wait_for.map(|wait_for| {
        Ok(WaitFor {
            address: named(wait_for.address, "wait_for.address")?,
            timeout_ms: words::time(wait_for.timeout_ms, "wait_for.timeout_ms")?,
        })
    });
    Ok(ShardCommand {
        executable: named(command.executable, "executable")?,
        args: command.args,
        env: command.env.into_iter().collect::<BTreeMap<_, _>>(),
        wait_for: wait_for.transpose()?,
        sidecar: command.sidecar,
    })
}
