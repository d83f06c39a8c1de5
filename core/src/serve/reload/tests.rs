//! What becomes of a configuration that was read, and when it is read again.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use llmgw_plugins::{Policies, PolicyOptions};
use llmgw_proto::identity::Moment;

use super::*;
use crate::telemetry::{Telemetry, log};

const FIRST: &str = "models: []\n";

/// A server's configuration and what reloads it.
struct Server {
    directory: PathBuf,
    reloads: Arc<Reloads>,
}

impl Server {
    /// Started with [`FIRST`]; nothing runs on agents.
    fn new() -> Server {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-reload-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let config = directory.join("llmgw.yaml");
        std::fs::write(&config, FIRST).unwrap();
        let policies = Policies::open(PolicyOptions::default()).unwrap();
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
        let nodes = Arc::new(Vec::new);
        let certificates = Certificates::new(Vec::new(), nodes, Arc::new(Moment::now));
        let reloads = Reloads::new(options, gateway, None, certificates);
        Server { directory, reloads }
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
