//! A fleet of real engines: two agents, three replicas of a small model in llama.cpp, and clients that go on asking while the server,
//! an agent and an engine are killed, a node is drained, another one hangs, and models come and go.
//!
//! One story in one test, since engines that load and answer need the machine to themselves. `tests/real/prepare` makes them ready;
//! without that this prints `skipped: …` and passes, unless LLMGW_REQUIRE_REAL=1.

#[path = "harness/fleet.rs"]
mod fleet;
mod harness;
#[path = "harness/real.rs"]
mod real;

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use fleet::{Fleet, PATIENT, Program, models};
use harness::{Client, End};

/// As long as agents may take to come back.
const RECOVERING: &str = "heartbeat: 3s, lost_after: 10m, recovery: 20s";
const IMPATIENT: &str = "heartbeat: 3s, lost_after: 12s, recovery: 20s";
/// The least time between a failure and the next start.
const BACKOFF_FIRST: Duration = Duration::from_secs(5);
/// How long an answer may be silent: for longer than a request may have to wait.
const SILENT_MAX: Duration = Duration::from_secs(60);
/// Before a client tries again to reach a server that is not there.
const REFUSED_PAUSE: Duration = Duration::from_millis(20);

#[test]
fn a_fleet_of_real_engines_serves_on_whatever_happens_to_it() {
    let Some(engine) = real::prepared("the fleet of real engines") else {
        return;
    };
    let mut fleet = Fleet::start(PATIENT, Program::Real(engine));
    fleet.declare(&catalog(&[("fake", 3, "model.gguf")]));
    fleet.ready(3);
    three_replicas_are_spread_over_both_nodes(&fleet);
    let crowd = Crowd::start(fleet.clients());
    crowd.goes_on(&fleet, |_| false);
    a_server_that_is_killed_loses_no_replica_and_starts_none_twice(&mut fleet, &crowd);
    an_agent_that_is_killed_adopts_its_engines_again(&mut fleet, &crowd);
    an_engine_that_is_killed_costs_no_request_that_had_no_answer(&fleet, &crowd);
    a_node_is_drained(&fleet, &crowd);
    a_model_whose_file_is_missing_says_so_and_leaves(&mut fleet, &crowd);
    a_node_that_hangs_is_replaced_and_its_surplus_goes(&mut fleet, &crowd);
    drop(crowd);
    a_model_that_leaves_the_catalog_is_stopped(&mut fleet);
}

fn three_replicas_are_spread_over_both_nodes(fleet: &Fleet) {
    let mut spread = fleet.spread();
    spread.sort();
    assert_eq!(spread, [1, 2]);
    assert_eq!((fleet.starts().len(), fleet.engines().len()), (3, 3));
    fleet.asserts_replay("fake");
}

fn a_server_that_is_killed_loses_no_replica_and_starts_none_twice(
    fleet: &mut Fleet,
    crowd: &Crowd,
) {
    let (before, replicas) = (fleet.engines(), fleet.replicas());
    fleet.set_timing(RECOVERING);
    crowd.server_is_away(|| {
        fleet.kill_server();
        assert_eq!(fleet.engines(), before, "they serve without the server");
        fleet.start_server();
    });
    fleet.until("the recovery is over", |fleet| !fleet.is_recovering());
    fleet.ready(3);
    assert_eq!(fleet.replicas(), replicas);
    assert_eq!((fleet.engines(), fleet.starts()), (before.clone(), before));
    // Those that were in flight, or came while nobody listened.
    crowd.goes_on(fleet, |came| {
        came.server_was_away && came.how == How::NoAnswer
    });
}

fn an_agent_that_is_killed_adopts_its_engines_again(fleet: &mut Fleet, crowd: &Crowd) {
    let (before, replicas) = (fleet.engines(), fleet.replicas());
    fleet.kill_agent("n1");
    fleet.until("the node is missed", |fleet| {
        fleet.node_state("n1") == "unreachable"
    });
    crowd.goes_on(fleet, |_| false);
    fleet.start_agent("n1");
    fleet.until("the node is back", |fleet| {
        fleet.node_state("n1") == "ready"
    });
    fleet.ready(3);
    assert_eq!(fleet.replicas(), replicas);
    assert_eq!((fleet.engines(), fleet.starts()), (before.clone(), before));
    crowd.goes_on(fleet, |_| false);
}

fn an_engine_that_is_killed_costs_no_request_that_had_no_answer(fleet: &Fleet, crowd: &Crowd) {
    // Its agent started it, and so knows how it ended.
    let mut replicas = fleet.replicas();
    replicas.retain(|replica| replica.node == "n2");
    let doomed = replicas.remove(0);
    let killed = Instant::now();
    kill(Pid::from_raw(fleet.engine(&doomed).pid), Signal::SIGKILL).unwrap();
    fleet.until("another one is started", |fleet| fleet.starts().len() == 4);
    assert!(killed.elapsed() >= BACKOFF_FIRST, "{:?}", killed.elapsed());
    fleet.ready(3);
    let text = fleet.shown(&["explain", "fake"]);
    let failed = format!("failed   {} on n2 ", doomed.id);
    assert!(text.contains(&failed), "{text}");
    assert!(text.contains("was killed by signal 9"), "{text}");
    assert_eq!(fleet.starts()[3].node, "n1", "{text}");
    // The engine had one slot: whose words had begun may hear that they end.
    let mut broken = 0;
    crowd.goes_on(fleet, |came| {
        broken += 1;
        came.is_stream && came.how == How::Broken && broken == 1
    });
}

fn a_node_is_drained(fleet: &Fleet, crowd: &Crowd) {
    let said = fleet.shown(&["drain", "n1"]);
    assert!(said.ends_with("n1 is empty\n"), "{said}");
    fleet.ready(3);
    let engines = fleet.engines();
    assert_eq!(engines.len(), 3, "{}", fleet.story());
    assert!(engines.iter().all(|engine| engine.node == "n2"));
    crowd.goes_on(fleet, |_| false);
    fleet.shown(&["undrain", "n1"]);
    fleet.until("the node is in use", |fleet| {
        fleet.node_state("n1") == "ready"
    });
}

fn a_model_whose_file_is_missing_says_so_and_leaves(fleet: &mut Fleet, crowd: &Crowd) {
    let before = fleet.engines();
    let both = [("fake", 3, "model.gguf"), ("absent", 1, "absent.gguf")];
    fleet.declare(&catalog(&both));
    fleet.until("what is missing is told", |fleet| {
        let explained = fleet.ctl(&["explain", "absent"]).stdout;
        let explained = String::from_utf8(explained).unwrap();
        explained.contains("failed   absent/0 on ") && explained.contains("absent.gguf'")
    });
    fleet.declare(&catalog(&both[..1]));
    fleet.until("nobody knows the model", |fleet| {
        !fleet.ctl(&["explain", "absent"]).status.success()
    });
    fleet.ready(3);
    fleet.until("only the others run", |fleet| fleet.engines() == before);
    crowd.goes_on(fleet, |_| false);
}

fn a_node_that_hangs_is_replaced_and_its_surplus_goes(fleet: &mut Fleet, crowd: &Crowd) {
    fleet.set_timing(IMPATIENT);
    fleet.signal_agent("n2", Signal::SIGSTOP);
    fleet.until("the node is lost", |fleet| fleet.node_state("n2") == "lost");
    fleet.until("others are ready in its place", |fleet| {
        let mut replicas = fleet.replicas();
        replicas.retain(|replica| replica.node == "n1" && replica.state == "ready");
        replicas.len() == 3
    });
    crowd.goes_on(fleet, |_| false);
    fleet.signal_agent("n2", Signal::SIGCONT);
    fleet.until("the node is back", |fleet| {
        fleet.node_state("n2") == "ready"
    });
    fleet.ready(3);
    fleet.until("the surplus is gone", |fleet| fleet.engines().len() == 3);
    crowd.goes_on(fleet, |_| false);
}

fn a_model_that_leaves_the_catalog_is_stopped(fleet: &mut Fleet) {
    fleet.declare("models: []");
    let held = fleet.ctl(&["reload"]);
    let said = String::from_utf8(held.stderr).unwrap();
    let reason = "the change would stop 3 of 3 running replicas (fake: 3), so it is held";
    assert!(said.contains(reason), "{said}");
    assert_eq!(fleet.engines().len(), 3);
    fleet.shown(&["reload", "--confirm"]);
    fleet.until("nothing runs", |fleet| {
        fleet.replicas().is_empty() && fleet.engines().is_empty()
    });
}

/// Models with so many replicas of a file in the agents' models_dir.
fn catalog(wanted: &[(&str, usize, &str)]) -> String {
    // One thread: with more, llama.cpp's busy waiting starves the other processes of a small machine.
    let args = r#"args: ["-t", "1", "-tb", "1", "-c", "512"]"#;
    let mut yaml = models(&[]);
    for (name, count, file) in wanted {
        let (_, model) = models(&[(name, *count)])
            .split_once('\n')
            .map(|(key, model)| (key.to_owned(), model.to_owned()))
            .unwrap();
        yaml += &model
            .replace("/m.gguf", file)
            .replace("slots: 1", &format!("slots: 1, {args}"));
    }
    yaml
}

/// One client that asks for streams and one that asks for whole answers, each again and again until this is dropped.
struct Crowd {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<()>>,
}

struct Shared {
    over: AtomicBool,
    /// Odd while the server is away; another number each time that it went or came.
    away: AtomicU32,
    /// Since somebody looked last.
    came: Mutex<Vec<Came>>,
}

/// What became of one request.
#[derive(Clone, Debug)]
struct Came {
    is_stream: bool,
    how: How,
    /// At some moment while it was asked.
    server_was_away: bool,
    began: Instant,
    /// For who reads a test's failure.
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// A 200 that is whole.
    Whole,
    /// A 200 whose stream told of an error.
    Broken,
    /// An error's status.
    Refused,
    /// Nobody listened, or the connection ended.
    NoAnswer,
}

impl Crowd {
    fn start(server: SocketAddr) -> Crowd {
        let shared = Arc::new(Shared {
            over: AtomicBool::new(false),
            away: AtomicU32::new(0),
            came: Mutex::default(),
        });
        let clients = [true, false].map(|is_stream| {
            let shared = shared.clone();
            std::thread::spawn(move || shared.ask(server, is_stream))
        });
        Crowd {
            shared,
            clients: clients.into(),
        }
    }

    fn server_is_away(&self, work: impl FnOnce()) {
        self.shared.away.fetch_add(1, Ordering::SeqCst);
        work();
        self.shared.away.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until requests of both kinds that begin now are answered. Of all since the last time only those failed that are excused.
    fn goes_on(&self, fleet: &Fleet, mut is_excused: impl FnMut(&Came) -> bool) {
        let now = Instant::now();
        fleet.until("requests go on", |_| {
            let came = self.shared.lock();
            [true, false].iter().all(|is_stream| {
                let mut mine = came.iter().filter(|came| came.is_stream == *is_stream);
                mine.any(|came| came.began >= now && came.how == How::Whole)
            })
        });
        let came = std::mem::take(&mut *self.shared.lock());
        let failed = came.iter().filter(|came| came.how != How::Whole);
        let failed = failed.filter(|came| !is_excused(came));
        let failed: Vec<_> = failed
            .map(|came| (came.is_stream, came.how, &came.text))
            .collect();
        assert!(failed.is_empty(), "{failed:#?}\n{}", fleet.story());
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        for client in self.clients.drain(..) {
            let _ = client.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Came>> {
        self.came.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, server: SocketAddr, is_stream: bool) {
        while !self.over.load(Ordering::Relaxed) {
            let began = Instant::now();
            let away = self.away.load(Ordering::SeqCst);
            let (how, text) = one_chat(server, is_stream).unwrap_or_else(|why| {
                std::thread::sleep(REFUSED_PAUSE);
                (How::NoAnswer, why)
            });
            let came = Came {
                is_stream,
                how,
                server_was_away: away % 2 == 1 || away != self.away.load(Ordering::SeqCst),
                began,
                text,
            };
            self.lock().push(came);
        }
    }
}

/// One chat on a connection of its own. `Err`: it got no answer, or not all of it.
fn one_chat(server: SocketAddr, is_stream: bool) -> Result<(How, String), String> {
    let mut stream = TcpStream::connect(server).map_err(|error| error.to_string())?;
    stream.set_read_timeout(Some(SILENT_MAX)).unwrap();
    // A model that says little is enough, and does not wear out anybody's patience.
    let body = format!(
        r#"{{"model":"fake","stream":{is_stream},"max_tokens":12,"messages":[{{"role":"user","content":"Tell me of streams: {is_stream}"}}]}}"#
    );
    let head =
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n";
    let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    stream
        .write_all(request.as_bytes())
        .map_err(|error| error.to_string())?;
    let mut client = Client::over(stream);
    let head = client.try_head().ok_or("the connection ended")?;
    let (text, end) = client.rest();
    let is_whole = match is_stream {
        true => text.trim_end().ends_with("data: [DONE]"),
        false => text.contains("\"chat.completion\""),
    };
    match (head.status, end) {
        (200, End::Complete) if is_whole => Ok((How::Whole, text)),
        (200, _) if text.contains("\"error\"") => Ok((How::Broken, text)),
        (200, end) => Err(format!("{end:?}: {text}")),
        (status, _) => Ok((How::Refused, format!("{status}: {text}"))),
    }
}
