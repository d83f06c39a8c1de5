//! Words survive the wire, whatever they are; what does not belong there is named; a peer of another version stops nobody.

use std::sync::Arc;

use prost::Message;

use super::{Framed, Words, check, check_up};
use crate::inventory::Inventory;
use crate::inventory::gpu::{HealthCode, HealthFlag};
use crate::session::{
    AgentMessage, DrainNode, Goodbye, GpuBeat, Heartbeat, LogChunk, PortRange, Refusal,
    RefusalCode, Register, SHARDS_MAX, ServerMessage, SessionId, ShardReport, StartShard, StopHow,
    StopShard, TailLog, Told, Welcome,
};
use crate::shard::{
    ApiKey, Exit, LogLine, Readiness, ShardCommand, ShardSpec, ShardState, ShardStatus, WaitFor,
};
use crate::wire;
use crate::wire::error::WireProblem;
use crate::wire::shape::{LINE_MAX_BYTES, LINES_MAX, Shaped};

/// Messages of each direction that are tried.
const ROUNDS: u64 = 600;
const INVENTORY: &str = include_str!("../../../tests/recordings/inventory/two-gpus.json");

/// What is done to a registration on its way.
type Change = fn(&mut wire::Register);

/// Random words from a seed.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn bool(&mut self) -> bool {
        self.below(2) == 0
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize].clone()
    }

    fn maybe<T>(&mut self, draw: impl FnOnce(&mut Draws) -> T) -> Option<T> {
        self.bool().then(|| draw(self))
    }

    fn list<T>(&mut self, max: u64, mut draw: impl FnMut(&mut Draws) -> T) -> Vec<T> {
        (0..self.below(max + 1)).map(|_| draw(self)).collect()
    }

    /// Not empty, with what tends to hurt.
    fn text(&mut self) -> String {
        let pieces = ["a", "é", "\u{1F980}", "\n", "\"", "\\", " ", "llmgw", "0"];
        let mut text = "x".to_owned();
        for _ in 0..self.below(8) {
            text.push_str(self.of(&pieces));
        }
        text
    }

    fn address(&mut self) -> String {
        self.of(&[
            "10.0.0.1",
            "127.0.0.1",
            "fd00::1",
            "::ffff:10.0.0.1",
            "0::1",
        ])
        .to_owned()
    }

    fn number(&mut self) -> u64 {
        let bits = self.below(65) as u32;
        self.next().checked_shr(bits).unwrap_or(0)
    }

    fn time(&mut self) -> u64 {
        self.below(super::words::TIME_MAX_MS + 1)
    }

    fn lines(&mut self) -> Vec<LogLine> {
        self.list(4, |draws| LogLine {
            at_ms: draws.number(),
            text: draws.text(),
        })
    }

    fn port(&mut self) -> u16 {
        1 + self.below(65_535) as u16
    }

    fn spec(&mut self) -> Arc<ShardSpec> {
        Arc::new(ShardSpec {
            shard: self.text(),
            replica: self.text(),
            model: self.text(),
            profile: self.text(),
            definition: self.text(),
            rank: self.number() as u32,
            engine: self.text(),
            commands: self.list(3, Draws::command),
            gpus: self.list(8, Draws::text),
            cpus: self.maybe(|draws| draws.number() as u32),
            memory_bytes: self.maybe(Draws::number),
            ports: self.list(4, Draws::port),
            host: self.address(),
            serves_http: self.bool(),
            readiness: Readiness {
                health: self.text(),
                models: self.text(),
                served_name: self.text(),
                start_deadline_ms: self.time(),
            },
            slots: self.maybe(|draws| draws.number() as u32),
            stop_grace_ms: self.time(),
            api_key: self.maybe(|draws| ApiKey::new(draws.text())),
        })
    }

    fn command(&mut self) -> ShardCommand {
        ShardCommand {
            executable: self.text(),
            args: self.list(5, Draws::text),
            env: self
                .list(4, |draws| (draws.text(), draws.text()))
                .into_iter()
                .collect(),
            wait_for: self.maybe(|draws| WaitFor {
                address: draws.text(),
                timeout_ms: draws.time(),
            }),
            sidecar: self.bool(),
        }
    }

    fn report(&mut self, with_spec: bool) -> ShardReport {
        let exits = [
            Exit::Unknown,
            Exit::Status(0),
            Exit::Status(-7),
            Exit::Signal(9),
        ];
        ShardReport {
            spec: with_spec.then(|| self.spec()),
            status: ShardStatus {
                shard: self.text(),
                spec_hash: self.text(),
                state: self.of(&ShardState::ALL),
                reason: self.text(),
                exit: self.maybe(|draws| draws.of(&exits)),
                log_tail: self.lines(),
                since_ms: self.number(),
                adopted: self.bool(),
            },
        }
    }

    fn inventory(&mut self) -> Told {
        let mut inventory = inventory();
        inventory.node = self.text();
        inventory.labels = self
            .list(3, |draws| (draws.text(), draws.text()))
            .into_iter()
            .collect();
        Told::Inventory(Arc::new(inventory))
    }

    fn gpu(&mut self) -> GpuBeat {
        let codes = [
            HealthCode::Lost,
            HealthCode::UncorrectedEcc,
            HealthCode::Other,
        ];
        GpuBeat {
            uuid: self.text(),
            used_mib: self.maybe(Draws::number),
            health: self.list(3, |draws| HealthFlag {
                code: draws.of(&codes),
                reason: draws.text(),
            }),
        }
    }

    fn up(&mut self) -> AgentMessage {
        let first = self.port();
        match self.below(5) {
            0 => AgentMessage::Register(Box::new(Register {
                node: self.text(),
                agent_version: self.text(),
                run: self.text(),
                machine: self.text(),
                advertise: self.address(),
                ports: PortRange {
                    first,
                    last: first.max(self.port()),
                },
                engines: self.list(4, Draws::text),
                models_dir: self.maybe(Draws::text),
                state_dir: self.text(),
                draining: self.bool(),
                inventory: self.inventory(),
                shards: self.list(4, |draws| draws.report(true)),
            })),
            1 => AgentMessage::Heartbeat(Box::new(Heartbeat {
                draining: self.bool(),
                gpus: self.list(8, Draws::gpu),
                inventory: self.maybe(Draws::inventory),
            })),
            2 => {
                let with_spec = self.bool();
                AgentMessage::ShardStatus(Box::new(self.report(with_spec)))
            }
            3 => AgentMessage::LogChunk(LogChunk {
                request: self.number(),
                lines: self.lines(),
                is_last: self.bool(),
                problem: self.maybe(Draws::text),
            }),
            _ => AgentMessage::Goodbye(Goodbye {
                reason: self.text(),
                engines_stay: self.bool(),
            }),
        }
    }

    fn down(&mut self) -> ServerMessage {
        let hows = [StopHow::Drain, StopHow::Stop, StopHow::Kill];
        let codes = [
            RefusalCode::Identity,
            RefusalCode::NodeTaken,
            RefusalCode::Superseded,
            RefusalCode::Malformed,
            RefusalCode::TooSlow,
            RefusalCode::Full,
            RefusalCode::Other,
        ];
        match self.below(7) {
            0 => ServerMessage::Welcome(Welcome {
                heartbeat_ms: self.time().max(1),
                server_version: self.text(),
            }),
            1 => ServerMessage::StartShard(Box::new(StartShard {
                spec: self.spec(),
                spec_hash: self.text(),
            })),
            2 => ServerMessage::StopShard(StopShard {
                shard: self.text(),
                how: self.of(&hows),
            }),
            3 => ServerMessage::DrainNode(DrainNode {
                draining: self.bool(),
            }),
            4 => ServerMessage::TailLog(TailLog {
                request: self.number(),
                shard: self.text(),
                lines: self.number() as u32,
            }),
            5 => ServerMessage::Refused(Refusal {
                code: self.of(&codes),
                message: self.text(),
                certificate: self.maybe(Draws::text),
                claimed: self.text(),
            }),
            _ => ServerMessage::Leaving(self.text()),
        }
    }
}

fn inventory() -> Inventory {
    serde_json::from_str(INVENTORY).unwrap()
}

fn register() -> Register {
    Register {
        node: "n1".into(),
        agent_version: "0.1.0".into(),
        run: "r".into(),
        machine: "m".into(),
        advertise: "10.0.0.1".into(),
        ports: PortRange { first: 1, last: 2 },
        engines: Vec::new(),
        models_dir: None,
        state_dir: String::new(),
        draining: false,
        inventory: Told::Inventory(Arc::new(inventory())),
        shards: Vec::new(),
    }
}

/// What the other side makes of a message's bytes.
fn arrive<W: Words>(bytes: &[u8]) -> Result<Framed<W>, crate::wire::error::WireError> {
    W::Wire::SHAPE.check(bytes)?;
    W::from_wire(W::Wire::decode(bytes).unwrap())
}

fn round<W: Words + Clone>(message: &W, session: u64) -> Framed<W> {
    let bytes = message.to_wire(SessionId(session)).encode_to_vec();
    arrive(&bytes).unwrap()
}

/// The error that a message from the wire's side of things gives.
fn refused(kind: wire::agent_message::Kind) -> String {
    let message = wire::AgentMessage {
        session: 0,
        kind: Some(kind),
    };
    let refused = arrive::<AgentMessage>(&message.encode_to_vec());
    refused.unwrap_err().to_string()
}

fn wire_register(change: impl FnOnce(&mut wire::Register)) -> wire::agent_message::Kind {
    let message = AgentMessage::Register(Box::new(Register {
        shards: vec![Draws(1).report(true), Draws(2).report(true)],
        ..register()
    }));
    let Some(wire::agent_message::Kind::Register(mut register)) =
        message.to_wire(SessionId(0)).kind
    else {
        panic!("it is a registration");
    };
    change(&mut register);
    wire::agent_message::Kind::Register(register)
}

#[test]
fn every_message_arrives_as_it_was_sent() {
    let mut draws = Draws(7);
    for turn in 0..ROUNDS {
        let (up, down) = (draws.up(), draws.down());
        let sent = |message| Framed {
            session: SessionId(turn),
            message,
        };
        assert_eq!(round(&up, turn), sent(up), "turn {turn}");
        let arrived = round(&down, turn);
        assert_eq!((arrived.session, arrived.message), (SessionId(turn), down));
    }
}

#[test]
fn a_spec_has_the_same_hash_on_both_ends() {
    let mut draws = Draws(3);
    for _ in 0..200 {
        let sent = ServerMessage::start(draws.spec());
        let ServerMessage::StartShard(start) = round(&sent, 1).message else {
            panic!("it is a start");
        };
        assert_eq!(start.spec.hash(), start.spec_hash);
    }
}

#[test]
fn a_message_cut_anywhere_is_refused_or_read_and_never_more() {
    let mut draws = Draws(11);
    for _ in 0..12 {
        let bytes = draws.up().to_wire(SessionId(9)).encode_to_vec();
        for length in (0..bytes.len()).step_by(3) {
            let cut = &bytes[..length];
            if wire::AgentMessage::SHAPE.check(cut).is_ok() {
                // A cut between two fields is a message.
                let _ = wire::AgentMessage::decode(cut).map(AgentMessage::from_wire);
            }
        }
    }
}

#[test]
fn bytes_that_are_flipped_crash_nobody() {
    let mut draws = Draws(13);
    for _ in 0..1_000 {
        let mut bytes = draws.up().to_wire(SessionId(9)).encode_to_vec();
        for _ in 0..=draws.below(4) {
            let at = draws.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << draws.below(8);
        }
        let looked = wire::AgentMessage::SHAPE.check(&bytes);
        let decoded = wire::AgentMessage::decode(&bytes[..]);
        if let (Ok(()), Ok(message)) = (looked, decoded) {
            let _ = AgentMessage::from_wire(message);
        }
    }
}

#[test]
fn what_is_missing_or_out_of_range_is_named_by_its_path() {
    let table: [(Change, &str); 12] = [
        (|r| r.node.clear(), "`register.node` is missing"),
        (|r| r.advertise.clear(), "`register.advertise` is missing"),
        (
            |r| r.advertise = "n1.example".to_owned(),
            "`register.advertise` is \"n1.example\", which is no IP address",
        ),
        (
            |r| r.shards[1].spec.as_mut().unwrap().host = "localhost".to_owned(),
            "`register.shards[1].spec.host` is \"localhost\", which is no IP address",
        ),
        (
            |r| r.shards[0].spec.as_mut().unwrap().host = "fe80::1%eth0".to_owned(),
            "`register.shards[0].spec.host` is \"fe80::1%eth0\", which is no IP address",
        ),
        (|r| r.ports = None, "`register.ports` is missing"),
        (
            |r| r.ports.as_mut().unwrap().last = 65_536,
            "`register.ports.last` can't be 65536",
        ),
        (
            |r| r.shards[1].spec = None,
            "`register.shards[1].spec` is missing",
        ),
        (
            |r| r.shards[1].status = None,
            "`register.shards[1].status` is missing",
        ),
        (
            |r| r.shards[0].spec.as_mut().unwrap().readiness = None,
            "`register.shards[0].spec.readiness` is missing",
        ),
        (
            |r| r.shards[0].spec.as_mut().unwrap().stop_grace_ms = u64::MAX,
            "`register.shards[0].spec.stop_grace_ms` can't be 18446744073709551615",
        ),
        (
            |r| r.shards[0].spec.as_mut().unwrap().ports.insert(0, 0),
            "`register.shards[0].spec.ports[0]` can't be 0",
        ),
    ];
    for (change, said) in table {
        assert_eq!(refused(wire_register(change)), said);
    }
}

#[test]
fn what_is_too_long_or_too_many_is_found_before_it_is_decoded() {
    let table: [(Change, &str); 7] = [
        (
            |r| r.state_dir = "x".repeat(1_025),
            "`register.state_dir` is longer than 1024 bytes",
        ),
        (
            |r| r.models_dir = Some("x".repeat(1_025)),
            "`register.models_dir` is longer than 1024 bytes",
        ),
        (
            |r| r.node = "x".repeat(257),
            "`register.node` is longer than 256 bytes",
        ),
        (
            |r| r.shards = vec![wire::ShardReport::default(); SHARDS_MAX + 1],
            "`register.shards` has more than 512 elements",
        ),
        (
            |r| r.engines = vec![String::new(); 65],
            "`register.engines` has more than 64 elements",
        ),
        (
            |r| r.inventory.as_mut().unwrap().json = vec![b' '; (1 << 20) + 1],
            "`register.inventory.json` is longer than 1048576 bytes",
        ),
        (
            |r| {
                let status = r.shards[1].status.as_mut().unwrap();
                status.log_tail = vec![wire::LogLine::default(); LINES_MAX + 1];
            },
            "`register.shards[1].status.log_tail` has more than 200 elements",
        ),
    ];
    for (change, said) in table {
        assert_eq!(refused(wire_register(change)), said);
    }
}

#[test]
fn a_kind_that_stands_twice_does_not_add_up() {
    let one = wire::AgentMessage {
        session: 0,
        kind: Some(wire_register(|_| {})),
    };
    // Protobuf would merge the two, and their lists with them.
    let twice = [one.encode_to_vec(), one.encode_to_vec()].concat();
    let refused = arrive::<AgentMessage>(&twice).unwrap_err();
    assert_eq!(refused.to_string(), "`register` has more than 1 elements");
}

#[test]
fn output_and_reasons_of_any_length_are_cut_by_the_sender_at_whole_characters() {
    let long = "é".repeat(5_000);
    let line = |number: usize| LogLine {
        at_ms: number as u64,
        text: long.clone(),
    };
    let mut report = Draws(5).report(true);
    report.status.reason = long.clone();
    report.status.log_tail = (0..1_000).map(line).collect();
    let one = AgentMessage::ShardStatus(Box::new(report.clone()));
    let AgentMessage::ShardStatus(arrived) = round(&one, 1).message else {
        panic!("it is a status");
    };
    let tail = &arrived.status.log_tail;
    assert_eq!(tail.last().unwrap().at_ms, 999, "the end is what matters");
    assert_eq!(tail.last().unwrap().text.len(), LINE_MAX_BYTES);
    assert_eq!(tail.len(), 16, "64 KiB of 4 KiB each");
    // More than is kept, and not so many that they are most of what this test does.
    report.status.log_tail.truncate(20);
    let all = AgentMessage::Register(Box::new(Register {
        shards: vec![report; SHARDS_MAX],
        ..register()
    }));
    assert_eq!(
        check_up(&all),
        Ok(()),
        "and all of them fit into one message"
    );
}

#[test]
fn a_spec_that_would_not_arrive_is_known_before_it_is_sent() {
    let mut spec = ShardSpec::clone(&Draws(2).spec());
    spec.commands = vec![ShardCommand {
        executable: "vllm".into(),
        args: vec!["x".repeat(40_000)],
        env: std::collections::BTreeMap::new(),
        wait_for: None,
        sidecar: false,
    }];
    let error = check(&ServerMessage::start(Arc::new(spec))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`start_shard.spec.commands[0].args` is longer than 32768 bytes"
    );
}

#[test]
fn fields_of_a_newer_peer_are_skipped_and_the_rest_is_read() {
    let message = Draws(4).up();
    let mut bytes = message.to_wire(SessionId(4)).encode_to_vec();
    // Field 900: a text, a number, eight bytes, four bytes.
    for (kind, content) in [
        (2, &b"\x03new"[..]),
        (0, b"\x07"),
        (1, &[1; 8]),
        (5, &[1; 4]),
    ] {
        prost::encoding::encode_varint(900 << 3 | kind, &mut bytes);
        bytes.extend_from_slice(content);
    }
    assert_eq!(arrive::<AgentMessage>(&bytes).unwrap().message, message);
}

#[test]
fn a_message_of_a_kind_that_is_not_known_is_skipped_not_fatal() {
    let mut bytes = vec![8, 1];
    prost::encoding::encode_varint(900 << 3 | 2, &mut bytes);
    bytes.extend_from_slice(b"\x03new");
    let error = arrive::<AgentMessage>(&bytes).unwrap_err();
    assert_eq!(error.problem, WireProblem::UnknownKind);
    assert!(error.is_of_a_newer_peer());
    let stop = wire::ServerMessage {
        session: 1,
        kind: Some(wire::server_message::Kind::StopShard(wire::StopShard {
            shard: "m/0/0".into(),
            how: 9,
        })),
    };
    let error = arrive::<ServerMessage>(&stop.encode_to_vec()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`stop_shard.how` is 9, which this version does not know"
    );
    assert!(error.is_of_a_newer_peer());
}

#[test]
fn a_shard_in_an_unknown_state_gets_no_requests_and_keeps_what_it_has() {
    let kind = wire_register(|r| r.shards[0].status.as_mut().unwrap().state = 99);
    let message = wire::AgentMessage {
        session: 0,
        kind: Some(kind),
    };
    let arrived = arrive::<AgentMessage>(&message.encode_to_vec()).unwrap();
    let AgentMessage::Register(register) = arrived.message else {
        panic!("it is a registration");
    };
    let status = &register.shards[0].status;
    assert_eq!(status.state, ShardState::Loading);
    assert!(
        status.reason.starts_with("state 99 of a newer agent"),
        "{}",
        status.reason
    );
    assert!(register.shards[0].spec.is_some());
}

#[test]
fn an_inventory_that_cannot_be_read_costs_the_inventory_and_nothing_else() {
    let table: [(Change, &str); 3] = [
        (|r| r.inventory = None, "the agent sent no inventory"),
        (
            |r| r.inventory.as_mut().unwrap().schema = "llmgw.inventory/2".into(),
            "the agent's inventory has the format `llmgw.inventory/2`, this version reads `llmgw.inventory/1`",
        ),
        (
            |r| r.inventory.as_mut().unwrap().json.truncate(20),
            "the agent's inventory can't be read: EOF while parsing",
        ),
    ];
    for (change, said) in table {
        let message = wire::AgentMessage {
            session: 0,
            kind: Some(wire_register(change)),
        };
        let arrived = arrive::<AgentMessage>(&message.encode_to_vec()).unwrap();
        let AgentMessage::Register(register) = arrived.message else {
            panic!("it is a registration");
        };
        let Told::Unreadable(why) = &register.inventory else {
            panic!("{said}");
        };
        assert!(why.starts_with(said), "{why}");
        assert_eq!(register.shards.len(), 2);
    }
}

#[test]
fn an_inventory_with_words_of_a_newer_agent_is_read() {
    let newer = INVENTORY.replace("\"answering\"", "\"dreaming\"").replacen(
        "\"node\"",
        "\"colour\": \"green\", \"node\"",
        1,
    );
    let kind = wire_register(|r| r.inventory.as_mut().unwrap().json = newer.into_bytes());
    let message = wire::AgentMessage {
        session: 0,
        kind: Some(kind),
    };
    let arrived = arrive::<AgentMessage>(&message.encode_to_vec()).unwrap();
    let AgentMessage::Register(register) = arrived.message else {
        panic!("it is a registration");
    };
    assert!(register.inventory().is_some());
}

#[test]
fn a_refusal_tells_the_certificates_name_and_the_claim() {
    let refusal = Refusal {
        code: RefusalCode::Identity,
        message: "the certificate is for another node".into(),
        certificate: Some("gpu-02".into()),
        claimed: "gpu-01".into(),
    };
    assert_eq!(
        refusal.to_string(),
        "the certificate is for another node (identity; claimed node `gpu-01`, certificate `gpu-02`)"
    );
}
