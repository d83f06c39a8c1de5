//! What becomes of a configuration that was read, and when it is read again.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use llmgw_plugins::{Policies, PolicyOptions};
use llmgw_proto::identity::Moment;

use tokio::net::TcpListener;

use super::*;
use crate::control::controller::tests::fleet::Fleet as Agents;
use crate::control::enrolment::tests::State as Enrolling;
use crate::control::observed::Timing;
use crate::control::sessions::{Door, Sessions, SessionsOptions};
use crate::telemetry::{Telemetry, log};

const FIRST: &str = "models: []\n";

const RUNNING: &str =
    "models: [{name: m, replicas: 2, profiles: [{name: p, engine: llamacpp, cpus: 4}]}]\n";
const PLUGIN: &str = "return { api = 1, name = \"corvid\", needs_gpu = false, multi_node = false, tensor_parallel = false, \
                      readiness = { models = \"/v1/models\", start_deadline_ms = 600000 } }\n";

/// A server's configuration and what reloads it.
struct Server {
    directory: PathBuf,
    reloads: Arc<Reloads>,
    /// Where who may enrol is kept.
    _state: Enrolling,
}

impl Server {
    /// Started with [`FIRST`]; it has no agents.
    fn new() -> Server {
        Server::over(FIRST, |_| None)
    }

    /// Started again with [`RUNNING`], which runs; its agents still report.
    async fn recovering() -> Server {
        let mut agents = Agents::new(&["a", "b"], &RUNNING["models: ".len()..]);
        agents.ready("m/0");
        agents.ready("m/1");
        agents.restart_server();
        agents.join("a");
        agents.join("b");
        agents.look();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Server::over(RUNNING, |state| {
            let timing = Timing::from(&config::Agents::default());
            let options = SessionsOptions::new(timing, false);
            Some(Fleet {
                sessions: Sessions::start(listener, Door::Plain, options),
                controller: agents.controller.clone(),
                enrolment: Arc::new(state.server(&Arc::default())),
            })
        })
    }

    fn over(text: &str, fleet: impl FnOnce(&Enrolling) -> Option<Fleet>) -> Server {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-reload-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(directory.join("policies/engines")).unwrap();
        let config = directory.join("llmgw.yaml");
        std::fs::write(&config, text).unwrap();
        let options = PolicyOptions {
            dir: Some(directory.join("policies")),
            state: None,
        };
        let policies = Policies::open(options).unwrap();
        let telemetry = Telemetry::start(log::LogFormat::Text);
        let gateway = Gateway::new(config::load(&config).unwrap(), policies, telemetry);
        let options = ServerOptions {
            config,
            policies: None,
            listen: None,
            admin: None,
            agents: None,
            check: false,
            dev: false,
        };
        let state = Enrolling::new();
        let nodes = Arc::new(Vec::new);
        let certificates = Certificates::new(Vec::new(), nodes, Arc::new(Moment::now));
        let reloads = Reloads::new(options, gateway, fleet(&state), certificates);
        Server {
            directory,
            reloads,
            _state: state,
        }
    }

    fn write(&self, text: &str) {
        let fresh = self.directory.join("fresh");
        std::fs::write(&fresh, text).unwrap();
        std::fs::rename(fresh, &self.reloads.options.config).unwrap();
    }

    fn error(&self) -> Option<String> {
        self.reloads.state().last_error
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_that_was_away_as_it_was_read_is_read_again_though_its_text_is_known() {
    let server = Server::new();
    std::fs::remove_file(&server.reloads.options.config).unwrap();
    assert!(server.reloads.now(Confirmed::No).is_err());
    assert!(
        server
            .error()
            .is_some_and(|why| why.contains("no such file"))
    );
    // The watch takes this text for known, so it says nothing of it.
    server.write(FIRST);
    let stop = CancellationToken::new();
    let watching = tokio::spawn(server.reloads.clone().watch(stop.clone()));
    let healed = async {
        while server.error().is_some() {
            tokio::time::sleep(RETRY / 10).await;
        }
    };
    let healed = tokio::time::timeout(RETRY * 2, healed).await;
    assert!(healed.is_ok(), "{:?}", server.error());
    stop.cancel();
    watching.await.unwrap();
}

#[tokio::test]
async fn another_text_than_the_one_that_was_refused_is_not_taken_before_it_stays() {
    let server = Server::new();
    let reloads = &server.reloads;
    server.write("models: [{name: a, endpoints: [{url: 'http://127.0.0.1:9', engine: raven}]}]\n");
    assert!(reloads.take(Occasion::Changed).is_err());
    let models = || reloads.gateway.runtime.load().config.catalog.models.len();
    // It may be half written: the watch waits for that.
    server.write("models: [{name: a, endpoints: [{url: 'http://127.0.0.1:9'}]}]\n");
    assert_eq!(reloads.take(Occasion::Retry), Ok(()));
    assert!(server.error().is_some_and(|why| why.contains("raven")));
    assert_eq!(models(), 0);
    assert_eq!(reloads.take(Occasion::Retry), Ok(()));
    assert_eq!((server.error(), models()), (None, 1));
}

#[tokio::test]
async fn a_change_that_an_operator_confirmed_is_not_held_when_its_file_is_looked_at_afterwards() {
    let server = Server::recovering().await;
    let reloads = &server.reloads;
    server.write(FIRST);
    let held = reloads.take(Occasion::Asked(Confirmed::No)).unwrap_err();
    assert!(held.contains("would stop 2 of 2 running"), "{held}");
    reloads.take(Occasion::Asked(Confirmed::Yes)).unwrap();
    for occasion in [Occasion::Changed, Occasion::Retry] {
        assert_eq!(reloads.take(occasion), Ok(()));
    }
    // Nor where it is what a mistake is taken back to.
    server.write("models: [\n");
    assert!(reloads.take(Occasion::Changed).is_err());
    assert!(server.error().is_some());
    server.write(FIRST);
    assert_eq!(reloads.take(Occasion::Changed), Ok(()));
    assert_eq!(server.error(), None);
}

/// A server that was told to confirm a change for which a plugin is missing, and was looked at by others since. Its text.
async fn missing_a_plugin() -> (Server, &'static str) {
    let text =
        "models: [{name: fixed, endpoints: [{url: 'http://127.0.0.1:9', engine: corvid}]}]\n";
    let server = Server::recovering().await;
    server.write(text);
    for occasion in [
        Occasion::Asked(Confirmed::Yes),
        Occasion::Changed,
        Occasion::Asked(Confirmed::No),
    ] {
        let missed = server.reloads.take(occasion).unwrap_err();
        assert!(missed.contains("corvid"), "{missed}");
        assert!(server.reloads.state().is_retried);
    }
    let plugin = server.directory.join("policies/engines/corvid.lua");
    std::fs::write(plugin, PLUGIN).unwrap();
    server.reloads.gateway.policies.reload().unwrap();
    (server, text)
}

#[tokio::test]
async fn a_change_that_an_operator_confirmed_is_meant_when_what_it_waited_for_is_there() {
    let (server, _) = missing_a_plugin().await;
    assert_eq!(server.reloads.take(Occasion::Retry), Ok(()));
    assert_eq!(server.error(), None);
}

#[tokio::test]
async fn another_text_than_the_one_that_an_operator_confirmed_is_held() {
    let (server, text) = missing_a_plugin().await;
    for other in [&format!("# Another one.\n{text}"), text] {
        server.write(other);
        let held = server.reloads.take(Occasion::Changed).unwrap_err();
        assert!(held.contains("would stop 2 of 2 running"), "{held}");
        assert!(!server.reloads.state().is_retried);
    }
}
