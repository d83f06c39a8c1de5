//! The limits of every message, and the look at its bytes that holds them before anything is allocated.
//!
//! Two bytes on the wire may become hundreds in memory (an empty element of a list of messages), so limits that are checked after decoding come too late: a peer could
//! make 4 MiB into gigabytes. Fields that are not listed here are numbers, or of a newer release: the decoder skips those without storing them.

use super::error::{WireError, WireProblem};

/// One message, encoded.
pub const MESSAGE_MAX_BYTES: usize = 8 << 20;
/// The inventory as JSON.
pub const INVENTORY_MAX_BYTES: usize = 1 << 20;
/// Lines of a shard's output in one message.
pub const LINES_MAX: usize = 200;
/// One of those lines.
pub const LINE_MAX_BYTES: usize = 4 << 10;
/// A sentence for people.
pub const SENTENCE_MAX_BYTES: usize = 4 << 10;

const SHARDS_MAX: usize = crate::session::SHARDS_MAX;
/// A name or an id.
pub const NAME_MAX_BYTES: usize = 256;
pub const PATH_MAX_BYTES: usize = 1_024;
const ARGUMENT_MAX_BYTES: usize = 32 << 10;
const ARGUMENTS_MAX: usize = 512;
const VARIABLES_MAX: usize = 256;
const COMMANDS_MAX: usize = 16;
/// GPUs, slices of them included, in one heartbeat.
pub const GPUS_MAX: usize = 1_024;
const PORTS_MAX_BYTES: usize = 256;
/// What can be wrong with one GPU at a time.
pub const HEALTH_FLAGS_MAX: usize = 16;
const ENGINES_MAX: usize = 64;
const PEM_MAX_BYTES: usize = 16 << 10;

/// A message's fields that can grow.
#[derive(Debug)]
pub(crate) struct Shape(&'static [Field]);

#[derive(Debug)]
struct Field {
    number: u32,
    name: &'static str,
    /// How often it may occur.
    max: usize,
    /// How long each may be.
    max_bytes: usize,
    /// What is in it, where it is a message.
    inner: Option<&'static Shape>,
}

/// A message whose bytes are looked at before they are decoded.
pub(crate) trait Shaped {
    const SHAPE: &'static Shape;
}

const fn text(number: u32, name: &'static str, max_bytes: usize) -> Field {
    texts(number, name, 1, max_bytes)
}

const fn texts(number: u32, name: &'static str, max: usize, max_bytes: usize) -> Field {
    Field {
        number,
        name,
        max,
        max_bytes,
        inner: None,
    }
}

const fn one(number: u32, name: &'static str, inner: &'static Shape) -> Field {
    many(number, name, 1, inner)
}

const fn many(number: u32, name: &'static str, max: usize, inner: &'static Shape) -> Field {
    Field {
        number,
        name,
        max,
        max_bytes: MESSAGE_MAX_BYTES,
        inner: Some(inner),
    }
}

const NUMBERS: Shape = Shape(&[]);

const AGENT_MESSAGE: Shape = Shape(&[
    one(2, "register", &REGISTER),
    one(3, "heartbeat", &HEARTBEAT),
    one(4, "shard_status", &SHARD_REPORT),
    one(5, "log_chunk", &LOG_CHUNK),
    one(6, "goodbye", &SENTENCE),
]);

const SERVER_MESSAGE: Shape = Shape(&[
    one(2, "welcome", &WELCOME),
    one(3, "start_shard", &START_SHARD),
    one(4, "stop_shard", &STOP_SHARD),
    one(5, "drain_node", &NUMBERS),
    one(6, "tail_log", &TAIL_LOG),
    one(7, "refused", &REFUSED),
    one(8, "leaving", &SENTENCE),
]);

const REGISTER: Shape = Shape(&[
    text(1, "node", NAME_MAX_BYTES),
    text(2, "agent_version", NAME_MAX_BYTES),
    text(3, "run", NAME_MAX_BYTES),
    text(4, "machine", NAME_MAX_BYTES),
    text(5, "advertise", NAME_MAX_BYTES),
    one(6, "ports", &NUMBERS),
    texts(7, "engines", ENGINES_MAX, NAME_MAX_BYTES),
    one(9, "inventory", &INVENTORY),
    many(10, "shards", SHARDS_MAX, &SHARD_REPORT),
    text(11, "models_dir", PATH_MAX_BYTES),
    text(12, "state_dir", PATH_MAX_BYTES),
]);

const INVENTORY: Shape = Shape(&[
    text(1, "schema", NAME_MAX_BYTES),
    text(2, "json", INVENTORY_MAX_BYTES),
]);

const HEARTBEAT: Shape = Shape(&[
    many(2, "gpus", GPUS_MAX, &GPU_BEAT),
    one(3, "inventory", &INVENTORY),
]);

const GPU_BEAT: Shape = Shape(&[
    text(1, "uuid", NAME_MAX_BYTES),
    many(3, "health", HEALTH_FLAGS_MAX, &HEALTH_FLAG),
]);

const HEALTH_FLAG: Shape = Shape(&[
    text(1, "code", NAME_MAX_BYTES),
    text(2, "reason", SENTENCE_MAX_BYTES),
]);

const SHARD_REPORT: Shape = Shape(&[one(1, "spec", &SHARD_SPEC), one(2, "status", &SHARD_STATUS)]);

const SHARD_SPEC: Shape = Shape(&[
    text(1, "shard", PATH_MAX_BYTES),
    text(2, "replica", PATH_MAX_BYTES),
    text(3, "model", NAME_MAX_BYTES),
    text(4, "profile", NAME_MAX_BYTES),
    text(6, "engine", NAME_MAX_BYTES),
    many(7, "commands", COMMANDS_MAX, &SHARD_COMMAND),
    texts(8, "gpus", GPUS_MAX, NAME_MAX_BYTES),
    // Packed: all of them in one. Unpacked ones are as many at most.
    texts(11, "ports", PORTS_MAX_BYTES, PORTS_MAX_BYTES),
    text(12, "host", NAME_MAX_BYTES),
    one(14, "readiness", &READINESS),
    text(17, "api_key", PATH_MAX_BYTES),
    text(18, "definition", NAME_MAX_BYTES),
]);

const SHARD_COMMAND: Shape = Shape(&[
    text(1, "executable", NAME_MAX_BYTES),
    texts(2, "args", ARGUMENTS_MAX, ARGUMENT_MAX_BYTES),
    many(3, "env", VARIABLES_MAX, &VARIABLE),
    one(4, "wait_for", &WAIT_FOR),
]);

const VARIABLE: Shape = Shape(&[
    text(1, "key", NAME_MAX_BYTES),
    text(2, "value", ARGUMENT_MAX_BYTES),
]);

const WAIT_FOR: Shape = Shape(&[text(1, "address", PATH_MAX_BYTES)]);

const READINESS: Shape = Shape(&[
    text(1, "health", PATH_MAX_BYTES),
    text(2, "models", PATH_MAX_BYTES),
    text(3, "served_name", PATH_MAX_BYTES),
]);

const SHARD_STATUS: Shape = Shape(&[
    text(1, "shard", PATH_MAX_BYTES),
    text(2, "spec_hash", NAME_MAX_BYTES),
    text(4, "reason", SENTENCE_MAX_BYTES),
    one(5, "exit", &NUMBERS),
    many(6, "log_tail", LINES_MAX, &LOG_LINE),
]);

const LOG_LINE: Shape = Shape(&[text(2, "text", LINE_MAX_BYTES)]);

const LOG_CHUNK: Shape = Shape(&[
    many(2, "lines", LINES_MAX, &LOG_LINE),
    text(4, "problem", SENTENCE_MAX_BYTES),
]);

/// A message with a reason as its first field.
const SENTENCE: Shape = Shape(&[text(1, "reason", SENTENCE_MAX_BYTES)]);

const WELCOME: Shape = Shape(&[text(2, "server_version", NAME_MAX_BYTES)]);

const START_SHARD: Shape = Shape(&[
    one(1, "spec", &SHARD_SPEC),
    text(2, "spec_hash", NAME_MAX_BYTES),
]);

const STOP_SHARD: Shape = Shape(&[text(1, "shard", PATH_MAX_BYTES)]);

const TAIL_LOG: Shape = Shape(&[text(2, "shard", PATH_MAX_BYTES)]);

const REFUSED: Shape = Shape(&[
    text(2, "message", SENTENCE_MAX_BYTES),
    text(3, "certificate", NAME_MAX_BYTES),
    text(4, "claimed", NAME_MAX_BYTES),
]);

const ENROLL_REQUEST: Shape = Shape(&[
    text(1, "token", NAME_MAX_BYTES),
    text(2, "node", NAME_MAX_BYTES),
    text(3, "signing_request", PEM_MAX_BYTES),
]);

const ENROLL_RESPONSE: Shape = Shape(&[
    text(1, "certificate", PEM_MAX_BYTES),
    text(2, "authority", crate::enrolment::AUTHORITY_MAX_BYTES),
    one(3, "refused", &ENROLL_REFUSED),
]);

const ENROLL_REFUSED: Shape = Shape(&[text(2, "message", SENTENCE_MAX_BYTES)]);

impl Shaped for super::AgentMessage {
    const SHAPE: &'static Shape = &AGENT_MESSAGE;
}

impl Shaped for super::ServerMessage {
    const SHAPE: &'static Shape = &SERVER_MESSAGE;
}

impl Shaped for super::EnrollRequest {
    const SHAPE: &'static Shape = &ENROLL_REQUEST;
}

impl Shaped for super::EnrollResponse {
    const SHAPE: &'static Shape = &ENROLL_RESPONSE;
}

impl Shape {
    /// Looks at every field of an encoded message, and of those in it.
    pub(crate) fn check(&self, mut bytes: &[u8]) -> Result<(), WireError> {
        let mut seen = vec![0; self.0.len()];
        while !bytes.is_empty() {
            let (key, rest) = varint(bytes)?;
            let (content, rest) = field(key & 7, rest)?;
            bytes = rest;
            let number = key >> 3;
            let known = self
                .0
                .iter()
                .position(|field| u64::from(field.number) == number);
            let Some(known) = known else { continue };
            seen[known] += 1;
            self.0[known].check(content, seen[known])?;
        }
        Ok(())
    }
}

impl Field {
    /// `count`: the how-manieth of its kind it is.
    fn check(&self, content: &[u8], count: usize) -> Result<(), WireError> {
        let problem = match () {
            () if count > self.max => WireProblem::TooMany { max: self.max },
            () if content.len() > self.max_bytes => WireProblem::TooLong {
                max_bytes: self.max_bytes,
            },
            () => {
                let Some(inner) = self.inner else {
                    return Ok(());
                };
                let index = (self.max > 1).then_some(count - 1);
                let within = |error: WireError| error.within(self.name, index);
                return inner.check(content).map_err(within);
            }
        };
        Err(WireError::at(self.name, problem))
    }
}

/// A field's content, empty for numbers, and what comes after it.
fn field(kind: u64, bytes: &[u8]) -> Result<(&[u8], &[u8]), WireError> {
    const EMPTY: &[u8] = &[];
    let cut = |length: usize| match bytes.len() < length {
        true => Err(garbled("it ends in the middle of a field")),
        false => Ok(bytes.split_at(length)),
    };
    match kind {
        0 => varint(bytes).map(|(_, rest)| (EMPTY, rest)),
        1 => cut(8).map(|(_, rest)| (EMPTY, rest)),
        5 => cut(4).map(|(_, rest)| (EMPTY, rest)),
        2 => {
            let (length, rest) = varint(bytes)?;
            match usize::try_from(length) {
                Ok(length) if length <= rest.len() => Ok(rest.split_at(length)),
                _ => Err(garbled("a field is longer than the message")),
            }
        }
        _ => Err(garbled("a field is of no known type")),
    }
}

fn varint(bytes: &[u8]) -> Result<(u64, &[u8]), WireError> {
    let mut value = 0;
    for (index, byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Ok((value, &bytes[index + 1..]));
        }
    }
    Err(garbled("a number has no end"))
}

fn garbled(how: &'static str) -> WireError {
    WireError {
        field: String::new(),
        problem: WireProblem::Garbled(how.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const PROTO: &str = include_str!("../../llmgw/v1/agent.proto");

    /// A field, as the file says it.
    #[derive(Debug)]
    struct Declared<'a> {
        kind: &'a str,
        is_list: bool,
        name: &'a str,
        number: u32,
    }

    /// The messages of the file, by name.
    fn messages() -> BTreeMap<&'static str, Vec<Declared<'static>>> {
        let mut messages: BTreeMap<&str, Vec<Declared>> = BTreeMap::new();
        let mut message = None;
        for line in PROTO.lines() {
            let line = line.split("//").next().unwrap_or_default().trim();
            if let Some(name) = line.strip_prefix("message ") {
                message = name.split_whitespace().next();
            } else if line.starts_with("enum ") || line.starts_with("service ") {
                message = None;
            }
            let (Some(message), Some((left, number))) = (message, line.split_once(" = ")) else {
                continue;
            };
            let (left, is_list) = match left.strip_prefix("repeated ") {
                Some(left) => (left, true),
                None => (left.strip_prefix("optional ").unwrap_or(left), false),
            };
            let (kind, name) = left.rsplit_once(' ').unwrap();
            messages.entry(message).or_default().push(Declared {
                kind,
                is_list: is_list || kind.starts_with("map<"),
                name,
                number: number.trim_end_matches(';').parse().unwrap(),
            });
        }
        messages
    }

    /// Every field that can grow has its limit, in every message that can come in.
    fn compare(message: &str, shape: &Shape, messages: &BTreeMap<&str, Vec<Declared>>) {
        for declared in &messages[message] {
            let is_message = messages.contains_key(declared.kind);
            let can_grow =
                is_message || declared.is_list || ["string", "bytes"].contains(&declared.kind);
            let field = shape.0.iter().find(|field| field.number == declared.number);
            let Some(field) = field else {
                assert!(!can_grow, "{message}.{} has no limit", declared.name);
                continue;
            };
            assert_eq!(field.name, declared.name, "{message}");
            assert_eq!(field.max > 1, declared.is_list, "{message}.{}", field.name);
            match field.inner {
                Some(inner) if is_message => compare(declared.kind, inner, messages),
                inner => assert_eq!(
                    inner.is_some(),
                    is_message || declared.kind.starts_with("map<"),
                    "{message}.{}",
                    field.name
                ),
            }
        }
    }

    #[test]
    fn every_field_that_can_grow_has_a_limit() {
        let messages = messages();
        compare("AgentMessage", &AGENT_MESSAGE, &messages);
        compare("ServerMessage", &SERVER_MESSAGE, &messages);
        compare("EnrollRequest", &ENROLL_REQUEST, &messages);
        compare("EnrollResponse", &ENROLL_RESPONSE, &messages);
    }

    #[test]
    fn bytes_that_are_no_message_say_why() {
        for (bytes, said) in [
            (&[0x12][..], "a number has no end"),
            (&[0xff; 11], "a number has no end"),
            (&[0x12, 5, 1], "a field is longer than the message"),
            (&[0x09, 1], "it ends in the middle of a field"),
            (&[0x0b], "a field is of no known type"),
        ] {
            let error = AGENT_MESSAGE.check(bytes).unwrap_err();
            assert_eq!(error.to_string(), format!("the message is garbled: {said}"));
        }
    }
}
