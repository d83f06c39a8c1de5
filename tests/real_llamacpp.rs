//! The gateway between real peers: llama.cpp's server with a real model behind it, the `openai` client before it.
//!
//! `tests/real/prepare` makes both ready in `.llmgw/`. Without them these tests print `skipped: …` and pass,
//! unless LLMGW_REQUIRE_REAL=1. They take turns: each has the engine, and the machine, to itself.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const MODEL: &str = "smollm2";
const READY_MAX: Duration = Duration::from_secs(90);
const READ_MAX: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// Where the prepared peers are.
struct Real {
    engine: PathBuf,
    model: PathBuf,
    python: PathBuf,
}

/// One llama.cpp process. It is killed when dropped, and ends by itself when this process does.
struct Engine {
    child: Child,
    port: u16,
}

/// One `llmgw server` over some engines, killed when dropped.
struct Gateway {
    child: Child,
    port: u16,
}

/// An answer, its body without the chunk framing.
struct Answer {
    status: u16,
    body: String,
    /// Whether it came to its proper end.
    whole: bool,
}

// === impl Real ===

impl Real {
    /// The prepared peers, and the turn to use them; `None` (having said why) where there are none.
    fn turn() -> Option<(Real, MutexGuard<'static, ()>)> {
        static TURN: Mutex<()> = Mutex::new(());
        static SAID: Once = Once::new();
        match Real::find() {
            // A test that failed in its turn must not fail the others.
            Ok(real) => Some((
                real,
                TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner()),
            )),
            Err(reason) => {
                assert_ne!(
                    std::env::var("LLMGW_REQUIRE_REAL").as_deref(),
                    Ok("1"),
                    "{reason}"
                );
                // Not `eprintln!`, which the test runner keeps to itself when a test passes.
                SAID.call_once(|| {
                    drop(writeln!(
                        std::io::stderr(),
                        "skipped: the tests with a real engine: {reason}"
                    ))
                });
                None
            }
        }
    }

    fn find() -> Result<Real, String> {
        let prepared = root().join(".llmgw");
        let real = Real {
            engine: prepared.join("engine/llama-server"),
            model: prepared.join("engine/model.gguf"),
            python: prepared.join("openai/python"),
        };
        for path in [&real.engine, &real.model, &real.python] {
            if !path.exists() {
                return Err(format!(
                    "`{}` is missing; tests/real/prepare makes it",
                    path.display()
                ));
            }
        }
        Ok(real)
    }

    /// The engine that the client's checks share. It is stopped by the end of this process.
    fn shared_engine(&self) -> &'static Engine {
        static ENGINE: OnceLock<Engine> = OnceLock::new();
        ENGINE.get_or_init(|| self.start_engine(free_port()))
    }

    /// Starts llama.cpp and waits until it has loaded the model.
    fn start_engine(&self, port: u16) -> Engine {
        let log = std::fs::File::create(scratch().join(format!("engine-{port}.log"))).unwrap();
        let child = Command::new(&self.engine)
            .arg("-m")
            .arg(&self.model)
            .arg("--chat-template-file")
            .arg(root().join("tests/real/tools.jinja"))
            .args([
                "--host",
                "127.0.0.1",
                "--port",
                &port.to_string(),
                "--alias",
                MODEL,
            ])
            // One thread: with more, llama.cpp's busy waiting starves the other processes of a small machine.
            .args([
                "-t",
                "1",
                "-tb",
                "1",
                "--parallel",
                "4",
                "-c",
                "8192",
                "--threads-http",
                "64",
                "--metrics",
            ])
            .env("LLAMA_SERVER_STOP_ON_EOF", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut engine = Engine { child, port };
        wait("llama.cpp loads the model", || {
            assert_eq!(
                engine.child.try_wait().unwrap(),
                None,
                "llama.cpp ended; its log is in {:?}",
                scratch()
            );
            get(port, "/health").is_some_and(|answer| answer.status == 200)
        });
        engine
    }

    /// Runs one named check of `tests/real/openai_client.py` through a gateway of its own.
    fn client_check(&self, name: &str) {
        let engine = self.shared_engine();
        let gateway = Gateway::start(&[engine]);
        let output = self.client(&[
            &format!("--base-url=http://127.0.0.1:{}/v1", gateway.port),
            &format!("--engine-url=http://127.0.0.1:{}", engine.port),
            "--only",
            name,
        ]);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert_eq!(said.trim_end(), format!("ok {name}"));
    }

    fn client(&self, arguments: &[&str]) -> Output {
        Command::new(&self.python)
            .arg(root().join("tests/real/openai_client.py"))
            .args(arguments)
            .output()
            .unwrap()
    }
}

// === impl Engine ===

impl Engine {
    /// Ends it as a crash would: at once, with its connections cut.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// How many requests it is working on.
    fn busy_slots(&self) -> usize {
        let Some(slots) = get(self.port, "/slots") else {
            return 0;
        };
        slots
            .json()
            .as_array()
            .unwrap()
            .iter()
            .filter(|slot| slot["is_processing"] == true)
            .count()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// === impl Gateway ===

impl Gateway {
    /// Starts `llmgw server` over the engines and waits until it lists the model.
    fn start(engines: &[&Engine]) -> Gateway {
        let (port, admin) = (free_port(), free_port());
        let endpoints: String = engines
            .iter()
            .map(|engine| {
                format!(
                    "      - {{url: \"http://127.0.0.1:{}\", engine: llamacpp, slots: 4}}\n",
                    engine.port
                )
            })
            .collect();
        let directory = scratch().join(format!("gateway-{port}"));
        std::fs::create_dir_all(&directory).unwrap();
        let config = directory.join("llmgw.yaml");
        let text = format!(
            "listen: 127.0.0.1:{port}\nadmin: 127.0.0.1:{admin}\nstate: {state}\nmodels:\n  - name: {MODEL}\n    \
             aliases: [default]\n    endpoints:\n{endpoints}",
            state = json!(directory.join("state")),
        );
        std::fs::write(&config, text).unwrap();
        let log = std::fs::File::create(directory.join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_llmgw"))
            .arg("server")
            .arg("--config")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut gateway = Gateway { child, port };
        wait("the gateway lists the model", || {
            assert_eq!(
                gateway.child.try_wait().unwrap(),
                None,
                "llmgw ended; its log is in {directory:?}"
            );
            get(port, "/v1/models")
                .is_some_and(|answer| answer.body.contains(&format!("\"{MODEL}\"")))
        });
        gateway
    }

    /// Sends a chat; the reader is at the start of the answer.
    fn send(&self, body: Value) -> BufReader<TcpStream> {
        send(self.port, "POST", "/v1/chat/completions", &body.to_string())
            .expect("the gateway takes connections")
    }

    fn chat(&self, body: Value) -> Answer {
        Answer::read(self.send(body)).expect("the gateway answers")
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// === impl Answer ===

impl Answer {
    /// Reads an answer as far as it comes; `None` when there is none.
    fn read(mut from: BufReader<TcpStream>) -> Option<Answer> {
        let (status, chunked) = read_head(&mut from)?;
        let mut body = Vec::new();
        let whole = if chunked {
            read_chunks(&mut from, &mut body).is_some()
        } else {
            // Every request here says `connection: close`.
            from.read_to_end(&mut body).is_ok()
        };
        let body = String::from_utf8(body).unwrap();
        Some(Answer {
            status,
            body,
            whole,
        })
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// What each event of a stream carries.
    fn events(&self) -> Vec<&str> {
        assert!(
            self.body.ends_with("\n\n"),
            "the last event is not whole: {}",
            self.body
        );
        self.body
            .split("\n\n")
            .filter_map(|event| event.strip_prefix("data: "))
            .collect()
    }
}

// === loopback HTTP ===

fn send(port: u16, method: &str, path: &str, body: &str) -> Option<BufReader<TcpStream>> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(READ_MAX)).unwrap();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(format!("{head}{body}").as_bytes()).ok()?;
    Some(BufReader::new(stream))
}

fn get(port: u16, path: &str) -> Option<Answer> {
    Answer::read(send(port, "GET", path, "")?)
}

/// The status, and whether the body comes in chunks.
fn read_head(from: &mut BufReader<TcpStream>) -> Option<(u16, bool)> {
    let (mut status, mut chunked) = (None, false);
    loop {
        let mut line = String::new();
        from.read_line(&mut line).ok()?;
        let line = line.trim_end().to_ascii_lowercase();
        match status {
            None => status = Some(line.split(' ').nth(1)?.parse().ok()?),
            Some(status) if line.is_empty() => return Some((status, chunked)),
            Some(_) => {
                chunked |= line.starts_with("transfer-encoding:") && line.ends_with("chunked")
            }
        }
    }
}

/// Collects the chunks up to the last, which is empty; `None` when the connection breaks off before.
fn read_chunks(from: &mut BufReader<TcpStream>, body: &mut Vec<u8>) -> Option<()> {
    loop {
        let mut size = String::new();
        from.read_line(&mut size).ok()?;
        let mut chunk = vec![0; usize::from_str_radix(size.trim_end(), 16).ok()?];
        from.read_exact(&mut chunk).ok()?;
        from.read_exact(&mut [0; 2]).ok()?;
        if chunk.is_empty() {
            return Some(());
        }
        body.extend(chunk);
    }
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

fn wait(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < READY_MAX, "waited in vain: {what}");
        std::thread::sleep(POLL);
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn scratch() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

fn question(more: Value) -> Value {
    let mut body = json!({
        "model": MODEL, "temperature": 0, "max_tokens": 24,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    });
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

/// A question whose answer goes on until its client leaves or its engine dies.
fn endless(more: Value) -> Value {
    let mut body = question(json!({"max_tokens": 1500, "ignore_eos": true}));
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

// === the openai client ===

macro_rules! client_checks {
    ($($name:ident)*) => {
        mod openai_client {
            $(#[test]
            fn $name() {
                if let Some((real, _turn)) = super::Real::turn() {
                    real.client_check(stringify!($name));
                }
            })*
        }

        #[test]
        fn every_check_of_the_openai_client_is_a_test() {
            let Some((real, _turn)) = Real::turn() else { return };
            let listed = real.client(&["--list"]).stdout;
            let listed: Vec<_> = std::str::from_utf8(&listed).unwrap().lines().collect();
            assert_eq!(listed, [$(stringify!($name)),*]);
        }
    };
}

client_checks! {
    models_list_names_the_model
    chat
    chat_by_alias_is_named_as_asked
    chat_streamed_has_the_text_of_the_plain_answer
    chat_streamed_with_usage_ends_in_it
    chat_streamed_arrives_while_it_is_made
    chat_has_several_choices
    chat_streamed_has_several_choices
    chat_has_logprobs
    chat_streamed_has_logprobs
    chat_calls_a_tool
    chat_streamed_calls_a_tool
    completion
    completion_streamed_has_the_text_of_the_plain_answer
    responses_route_passes_through
    many_requests_share_a_connection
    request_id_is_kept
    same_as_engine_plain
    same_as_engine_stop_word
    same_as_engine_cut_by_length
    same_as_engine_several_choices
    same_as_engine_logprobs
    same_as_engine_tool_call
    same_as_engine_completion
    same_as_engine_completion_logprobs
    same_as_engine_completion_several_prompts
    embeddings_error_is_the_engines_own
    unknown_model_is_not_found
    too_long_a_prompt_is_the_clients_error
    broken_json_is_the_clients_error
    leaving_a_stream_stops_the_engine
    leaving_a_stream_to_be_kept_stops_the_engine
    leaving_a_plain_chat_stops_the_engine
    leaving_a_plain_completion_stops_the_engine
    leaving_a_plain_chat_stops_a_busy_engine
    a_client_that_times_out_has_left
}

// === engines that die ===

#[test]
fn an_engine_killed_in_mid_stream_ends_the_stream_in_an_error_event() {
    let Some((real, _turn)) = Real::turn() else {
        return;
    };
    let mut engine = real.start_engine(free_port());
    let gateway = Gateway::start(&[&engine]);
    let answer = gateway.send(endless(json!({"stream": true})));
    wait("the engine works on it", || engine.busy_slots() == 1);
    // The engine sends nothing before the first word, so a byte here means that the stream has begun.
    assert!(answer.get_ref().peek(&mut [0]).unwrap() > 0);
    engine.kill();

    let answer = Answer::read(answer).expect("the gateway answers");
    assert_eq!(answer.status, 200);
    let events = answer.events();
    assert!(!events.contains(&"[DONE]"), "{events:?}");
    let (last, before) = events.split_last().unwrap();
    let last: Value = serde_json::from_str(last).unwrap();
    assert!(last["error"]["message"].is_string(), "{last}");
    for field in ["type", "code", "param"] {
        assert!(last["error"].get(field).is_some(), "no `{field}`: {last}");
    }
    assert!(
        before
            .iter()
            .all(|event| serde_json::from_str::<Value>(event).is_ok()),
        "{before:?}"
    );
}

#[test]
fn an_engine_killed_under_its_only_plain_request_is_told_as_upstream_failed() {
    let Some((real, _turn)) = Real::turn() else {
        return;
    };
    let mut engine = real.start_engine(free_port());
    let gateway = Gateway::start(&[&engine]);
    let answer = gateway.send(endless(json!({})));
    wait("the engine works on it", || engine.busy_slots() == 1);
    engine.kill();

    let answer = Answer::read(answer).expect("the gateway answers");
    assert_eq!(
        (answer.status, &answer.json()["error"]["code"]),
        (502, &json!("upstream_failed")),
        "{}",
        answer.body
    );
}

#[test]
fn one_of_two_engines_killed_under_load_fails_no_request() {
    let Some((real, _turn)) = Real::turn() else {
        return;
    };
    let (engine, mut doomed) = (
        real.start_engine(free_port()),
        real.start_engine(free_port()),
    );
    let gateway = Gateway::start(&[&engine, &doomed]);
    let over = AtomicBool::new(false);
    let (plain, streamed) = std::thread::scope(|scope| {
        let load = |client, stream| {
            let (gateway, over) = (&gateway, &over);
            scope.spawn(move || ask_until(over, gateway, client, stream))
        };
        let plain: Vec<_> = (0..4).map(|client| load(client, false)).collect();
        let streamed: Vec<_> = (4..6).map(|client| load(client, true)).collect();
        wait("both engines are busy", || {
            engine.busy_slots() > 0 && doomed.busy_slots() > 0
        });
        doomed.kill();
        for _ in 0..10 {
            assert_eq!(gateway.chat(question(json!({}))).status, 200);
        }
        over.store(true, Ordering::Relaxed);
        let join = |threads: Vec<std::thread::ScopedJoinHandle<'_, Vec<Answer>>>| -> Vec<Answer> {
            threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap())
                .collect()
        };
        (join(plain), join(streamed))
    });

    for answer in &plain {
        assert!(answer.status == 200 && answer.whole, "{}", answer.body);
        assert_ne!(answer.json()["choices"][0]["message"]["content"], "");
    }
    // A stream whose first words were out can't be asked again elsewhere: it must say that it broke.
    let broken = streamed
        .iter()
        .filter(|answer| answer.events().last() != Some(&"[DONE]"));
    let broken: Vec<_> = broken
        .map(|answer| (answer.status, *answer.events().last().unwrap()))
        .collect();
    assert!(broken.len() <= 2, "{broken:?}");
    assert!(
        broken
            .iter()
            .all(|(status, last)| *status == 200 && last.starts_with("{\"error\"")),
        "{broken:?}"
    );
}

/// One client, which asks again and again until it is over; what it was answered.
fn ask_until(over: &AtomicBool, gateway: &Gateway, client: usize, stream: bool) -> Vec<Answer> {
    let mut answers = Vec::new();
    while !over.load(Ordering::Relaxed) {
        // Each client has a prompt of its own: equal ones would rather stay on one engine's cache.
        let messages =
            json!([{"role": "user", "content": format!("{client} is my number. What is yours?")}]);
        answers.push(gateway.chat(question(json!({"messages": messages, "stream": stream}))));
    }
    answers
}

#[test]
fn an_engine_that_comes_back_is_used_again() {
    let Some((real, _turn)) = Real::turn() else {
        return;
    };
    let (mut first, mut second) = (
        real.start_engine(free_port()),
        real.start_engine(free_port()),
    );
    let gateway = Gateway::start(&[&first, &second]);
    let port = second.port;
    second.kill();
    assert_eq!(gateway.chat(question(json!({}))).status, 200);
    let _second = real.start_engine(port);
    first.kill();
    wait("the gateway has found it", || {
        gateway.chat(question(json!({}))).status == 200
    });
}
