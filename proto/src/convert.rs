//! Between our words and the wire's: one function each way for each word, and an error that names the field.
//!
//! Lists and texts are under their limits when they come in (`wire::shape`); what goes out and may be of any length (output, reasons) is cut
//! here. A word that a newer peer has and we don't is read as the most cautious one of ours, or the message is skipped.

use std::net::IpAddr;

use prost::Message;

use crate::enrolment::EnrolmentRequest;
use crate::session::{
    AgentMessage, Goodbye, GpuBeat, Heartbeat, LogChunk, PortRange, Register, ServerMessage,
    SessionId, ShardReport, StartShard, StopShard, TailLog, Welcome,
};
use crate::session::{DrainNode, Refusal};
use crate::wire;
use crate::wire::error::{WireError, WireProblem};
use crate::wire::shape::{
    GPUS_MAX, HEALTH_FLAGS_MAX, MESSAGE_MAX_BYTES, NAME_MAX_BYTES, PATH_MAX_BYTES,
    SENTENCE_MAX_BYTES, Shaped,
};

pub(crate) mod enrolment;
mod inventory;
mod shard;
mod words;

use shard::{TAIL_MAX_BYTES, TAILS_MAX_BYTES};

type Result<T> = std::result::Result<T, WireError>;

/// A message and the session that it belongs to.
#[derive(Clone, Debug, PartialEq)]
pub struct Framed<M> {
    /// 0 in a registration.
    pub session: SessionId,
    pub message: M,
}

/// What travels, in both directions.
pub(crate) trait Words: Sized {
    type Wire: Message + Shaped + Default + Send + 'static;

    fn to_wire(&self, session: SessionId) -> Self::Wire;

    fn from_wire(wire: Self::Wire) -> Result<Framed<Self>>;
}

/// What an agent says, out of bytes: by the limits and the rules that a session holds it to.
///
/// # Errors
/// Which field is wrong.
pub fn read_up(bytes: &[u8]) -> Result<Framed<AgentMessage>> {
    AgentMessage::from_wire(decoded(bytes)?)
}

/// A question for a certificate, out of bytes, in the same way.
///
/// # Errors
/// Which field is wrong.
pub fn read_question(bytes: &[u8]) -> Result<EnrolmentRequest> {
    enrolment::request_in(decoded(bytes)?)
}

fn decoded<W: Message + Shaped + Default>(bytes: &[u8]) -> Result<W> {
    W::SHAPE.check(bytes)?;
    W::decode(bytes).map_err(|error| WireError::at("", WireProblem::Garbled(error.to_string())))
}

/// Whether the other side would take this message: for those that a person's configuration can make too long.
///
/// # Errors
/// What is too long.
pub fn check(message: &ServerMessage) -> Result<()> {
    checked::<ServerMessage>(message)
}

/// As [`check`], of what goes up.
///
/// # Errors
/// What is too long.
pub fn check_up(message: &AgentMessage) -> Result<()> {
    checked::<AgentMessage>(message)
}

fn checked<W: Words>(message: &W) -> Result<()> {
    let bytes = message.to_wire(SessionId(0)).encode_to_vec();
    if bytes.len() > MESSAGE_MAX_BYTES {
        let max_bytes = MESSAGE_MAX_BYTES;
        return Err(WireError::at("", WireProblem::TooLong { max_bytes }));
    }
    W::Wire::SHAPE.check(&bytes)
}

impl Words for AgentMessage {
    type Wire = wire::AgentMessage;

    fn to_wire(&self, session: SessionId) -> wire::AgentMessage {
        use wire::agent_message::Kind;
        let kind = match self {
            AgentMessage::Register(register) => Kind::Register(register_out(register)),
            AgentMessage::Heartbeat(heartbeat) => Kind::Heartbeat(heartbeat_out(heartbeat)),
            AgentMessage::ShardStatus(report) => {
                Kind::ShardStatus(shard::report_out(report, TAIL_MAX_BYTES))
            }
            AgentMessage::LogChunk(chunk) => Kind::LogChunk(wire::LogChunk {
                request: chunk.request,
                lines: shard::lines_out(&chunk.lines, TAILS_MAX_BYTES),
                is_last: chunk.is_last,
                problem: chunk.problem.as_deref().map(sentence),
            }),
            AgentMessage::Goodbye(goodbye) => Kind::Goodbye(wire::Goodbye {
                reason: sentence(&goodbye.reason),
                engines_stay: goodbye.engines_stay,
            }),
        };
        wire::AgentMessage {
            session: session.0,
            kind: Some(kind),
        }
    }

    fn from_wire(wire: wire::AgentMessage) -> Result<Framed<AgentMessage>> {
        use wire::agent_message::Kind;
        let Some(kind) = wire.kind else {
            return Err(WireError::at("", WireProblem::UnknownKind));
        };
        let message = match kind {
            Kind::Register(register) => register_in(register)
                .map(|register| AgentMessage::Register(Box::new(register)))
                .map_err(within("register"))?,
            Kind::Heartbeat(heartbeat) => {
                AgentMessage::Heartbeat(Box::new(heartbeat_in(heartbeat)))
            }
            Kind::ShardStatus(report) => shard::report_in(report)
                .map(|report| AgentMessage::ShardStatus(Box::new(report)))
                .map_err(within("shard_status"))?,
            Kind::LogChunk(chunk) => AgentMessage::LogChunk(LogChunk {
                request: chunk.request,
                lines: shard::lines_in(chunk.lines),
                is_last: chunk.is_last,
                problem: chunk.problem,
            }),
            Kind::Goodbye(goodbye) => AgentMessage::Goodbye(Goodbye {
                reason: goodbye.reason,
                engines_stay: goodbye.engines_stay,
            }),
        };
        Ok(Framed {
            session: SessionId(wire.session),
            message,
        })
    }
}

impl Words for ServerMessage {
    type Wire = wire::ServerMessage;

    fn to_wire(&self, session: SessionId) -> wire::ServerMessage {
        use wire::server_message::Kind;
        let kind = match self {
            ServerMessage::Welcome(welcome) => Kind::Welcome(wire::Welcome {
                heartbeat_ms: welcome.heartbeat_ms,
                server_version: welcome.server_version.clone(),
            }),
            ServerMessage::StartShard(start) => Kind::StartShard(wire::StartShard {
                spec: Some(shard::spec_out(&start.spec)),
                spec_hash: start.spec_hash.clone(),
            }),
            ServerMessage::StopShard(stop) => Kind::StopShard(wire::StopShard {
                shard: stop.shard.clone(),
                how: words::stop_out(stop.how).into(),
            }),
            ServerMessage::DrainNode(drain) => Kind::DrainNode(wire::DrainNode {
                draining: drain.draining,
            }),
            ServerMessage::TailLog(tail) => Kind::TailLog(wire::TailLog {
                request: tail.request,
                shard: tail.shard.clone(),
                lines: tail.lines,
            }),
            ServerMessage::Refused(refusal) => Kind::Refused(refusal_out(refusal)),
            ServerMessage::Leaving(reason) => Kind::Leaving(wire::Leaving {
                reason: sentence(reason),
            }),
        };
        wire::ServerMessage {
            session: session.0,
            kind: Some(kind),
        }
    }

    fn from_wire(wire: wire::ServerMessage) -> Result<Framed<ServerMessage>> {
        use wire::server_message::Kind;
        let Some(kind) = wire.kind else {
            return Err(WireError::at("", WireProblem::UnknownKind));
        };
        let message = match kind {
            Kind::Welcome(welcome) => ServerMessage::Welcome(Welcome {
                heartbeat_ms: match words::time(welcome.heartbeat_ms, "welcome.heartbeat_ms")? {
                    0 => return Err(out_of_range("welcome.heartbeat_ms", 0)),
                    heartbeat_ms => heartbeat_ms,
                },
                server_version: welcome.server_version,
            }),
            Kind::StartShard(start) => start_in(start).map_err(within("start_shard"))?,
            Kind::StopShard(stop) => ServerMessage::StopShard(StopShard {
                shard: named(stop.shard, "stop_shard.shard")?,
                how: words::stop_in(stop.how).map_err(within("stop_shard"))?,
            }),
            Kind::DrainNode(drain) => ServerMessage::DrainNode(DrainNode {
                draining: drain.draining,
            }),
            Kind::TailLog(tail) => ServerMessage::TailLog(TailLog {
                request: tail.request,
                shard: named(tail.shard, "tail_log.shard")?,
                lines: tail.lines,
            }),
            Kind::Refused(refused) => ServerMessage::Refused(Refusal {
                code: words::refusal_in(refused.code),
                message: refused.message,
                certificate: refused.certificate,
                claimed: refused.claimed,
            }),
            Kind::Leaving(leaving) => ServerMessage::Leaving(leaving.reason),
        };
        Ok(Framed {
            session: SessionId(wire.session),
            message,
        })
    }
}

fn start_in(start: wire::StartShard) -> Result<ServerMessage> {
    let spec = start.spec.ok_or_else(|| missing("spec"))?;
    let spec = shard::spec_in(spec).map_err(within("spec"))?;
    Ok(ServerMessage::StartShard(Box::new(StartShard {
        spec: spec.into(),
        spec_hash: named(start.spec_hash, "spec_hash")?,
    })))
}

fn refusal_out(refusal: &Refusal) -> wire::Refused {
    wire::Refused {
        code: words::refusal_out(refusal.code).into(),
        message: sentence(&refusal.message),
        certificate: refusal.certificate.as_deref().map(name),
        claimed: name(&refusal.claimed),
    }
}

fn register_out(register: &Register) -> wire::Register {
    // All of them have to go into one message, and what runs is more important than what failed ones said last.
    let tail_max_bytes = TAIL_MAX_BYTES.min(TAILS_MAX_BYTES / register.shards.len().max(1));
    wire::Register {
        node: register.node.clone(),
        agent_version: register.agent_version.clone(),
        run: register.run.clone(),
        machine: register.machine.clone(),
        advertise: register.advertise.clone(),
        ports: Some(wire::PortRange {
            first: register.ports.first.into(),
            last: register.ports.last.into(),
        }),
        engines: register.engines.clone(),
        models_dir: register.models_dir.clone(),
        state_dir: cut(&register.state_dir, PATH_MAX_BYTES).to_owned(),
        draining: register.draining,
        inventory: inventory::out(&register.inventory),
        shards: register
            .shards
            .iter()
            .map(|report| shard::report_out(report, tail_max_bytes))
            .collect(),
    }
}

fn register_in(register: wire::Register) -> Result<Register> {
    let shards = register.shards.into_iter().enumerate();
    let shards = shards.map(|(index, report)| {
        let report = shard::report_in(report)
            .and_then(|report| match report.spec {
                Some(_) => Ok(report),
                None => Err(missing("spec")),
            })
            .map_err(|error| error.within("shards", Some(index)))?;
        Ok(report)
    });
    Ok(Register {
        shards: shards.collect::<Result<Vec<ShardReport>>>()?,
        node: named(register.node, "node")?,
        agent_version: register.agent_version,
        run: register.run,
        machine: register.machine,
        advertise: address(register.advertise, "advertise")?,
        ports: ports_in(register.ports.ok_or_else(|| missing("ports"))?)
            .map_err(within("ports"))?,
        engines: register.engines,
        models_dir: register.models_dir.filter(|dir| !dir.is_empty()),
        state_dir: register.state_dir,
        draining: register.draining,
        inventory: inventory::taken(register.inventory),
    })
}

fn ports_in(ports: wire::PortRange) -> Result<PortRange> {
    let first = words::port(ports.first).map_err(within("first"))?;
    let last = words::port(ports.last).map_err(within("last"))?;
    match first <= last {
        true => Ok(PortRange { first, last }),
        false => Err(out_of_range("last", last.into())),
    }
}

fn heartbeat_out(heartbeat: &Heartbeat) -> wire::Heartbeat {
    wire::Heartbeat {
        draining: heartbeat.draining,
        gpus: heartbeat
            .gpus
            .iter()
            .take(GPUS_MAX)
            .map(|gpu| wire::GpuBeat {
                uuid: gpu.uuid.clone(),
                used_mib: gpu.used_mib,
                health: gpu
                    .health
                    .iter()
                    .take(HEALTH_FLAGS_MAX)
                    .map(inventory::flag_out)
                    .collect(),
            })
            .collect(),
        inventory: heartbeat.inventory.as_ref().and_then(inventory::out),
    }
}

fn heartbeat_in(heartbeat: wire::Heartbeat) -> Heartbeat {
    Heartbeat {
        draining: heartbeat.draining,
        gpus: heartbeat
            .gpus
            .into_iter()
            .map(|gpu| GpuBeat {
                uuid: gpu.uuid,
                used_mib: gpu.used_mib,
                health: gpu.health.into_iter().map(inventory::flag_in).collect(),
            })
            .collect(),
        inventory: heartbeat
            .inventory
            .map(|inventory| inventory::taken(Some(inventory))),
    }
}

/// A sentence for people, cut to what may travel.
fn sentence(text: &str) -> String {
    cut(text, SENTENCE_MAX_BYTES).to_owned()
}

/// A name that was taken from outside, cut.
fn name(text: &str) -> String {
    cut(text, NAME_MAX_BYTES).to_owned()
}

/// The beginning of a text, at most so long and never half a character.
fn cut(text: &str, max_bytes: usize) -> &str {
    &text[..text.floor_char_boundary(max_bytes)]
}

fn named(text: String, field: &str) -> Result<String> {
    match text.is_empty() {
        true => Err(missing(field)),
        false => Ok(text),
    }
}

/// As it was written: a spec's hash is over it.
fn address(text: String, field: &str) -> Result<String> {
    let text = named(text, field)?;
    match text.parse::<IpAddr>() {
        Ok(_) => Ok(text),
        Err(_) => Err(WireError::at(field, WireProblem::NoAddress(text))),
    }
}

fn missing(field: &str) -> WireError {
    WireError::at(field, WireProblem::Missing)
}

fn out_of_range(field: &str, value: u64) -> WireError {
    WireError::at(field, WireProblem::OutOfRange(value))
}

fn within(field: &'static str) -> impl Fn(WireError) -> WireError {
    move |error| error.within(field, None)
}

#[cfg(test)]
mod tests;
