//! A fake inference engine that speaks as vLLM, SGLang, llama.cpp or a hosted OpenAI server, and misbehaves on request.
//!
//! Within a test: [`start`]. As a child process that can be killed, stopped and left with orphans: [`process::Process`].
//! Beside it, certificates for tests of who may speak: [`authority`].

pub mod authority;
mod engine;
mod patience;
pub mod process;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

pub use engine::behave::{Behave, BehaveError, How, Shape};
pub use engine::options::{Kind, Options};
pub use engine::state::{RequestView, StateView};
pub use patience::Patience;

use engine::Engine;
use engine::server::{self, Door};

/// How long [`Running::until`] sleeps at most, in milliseconds; changes wake it.
const LOOK_EVERY_MS: u64 = 50;
/// How long the listener, or the engine's end, is waited for at most.
const SETTLE_MAX: Duration = Duration::from_secs(60);

/// An engine within this process, on threads of its own; gone when dropped, as a killed process is.
pub struct Running {
    engine: Arc<Engine>,
    control: Option<SocketAddr>,
    runtime: Option<Runtime>,
}

/// Starts an engine. Returns when the port is bound; whether it listens yet is a matter of kind and `load_ms`.
pub fn start(options: Options) -> io::Result<Running> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(options.threads.max(1))
        .enable_all()
        .build()?;
    let socket = server::bind(options.listen)?;
    let addr = socket.local_addr()?;
    let control_socket = options.control.map(server::bind).transpose()?;
    let control = control_socket
        .as_ref()
        .map(|socket| socket.local_addr())
        .transpose()?;
    let engine = Engine::new(options, addr, runtime.handle().clone())
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let engine = Arc::new(engine);
    engine.begin();
    let entered = runtime.enter();
    let door = if engine.listens_at_once() {
        Door::Open(server::open(socket)?)
    } else {
        Door::Bound(socket)
    };
    runtime.spawn(server::listen(engine.clone(), door));
    if let Some(socket) = control_socket {
        runtime.spawn(server::listen_control(
            engine.clone(),
            server::open(socket)?,
        ));
    }
    drop(entered);
    Ok(Running {
        engine,
        control,
        runtime: Some(runtime),
    })
}

impl Running {
    /// Where the engine listens.
    pub fn addr(&self) -> SocketAddr {
        self.engine.addr
    }

    /// Where `/fake/...` alone is served, if [`Options::control`] was set.
    pub fn control(&self) -> Option<SocketAddr> {
        self.control
    }

    /// `http://ADDR`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr())
    }

    /// What the engine has seen so far.
    pub fn state(&self) -> StateView {
        self.engine.state.view()
    }

    /// Sets keys of the engine's own behaviour, as `POST /fake/behave`.
    ///
    /// # Panics
    /// On keys or values that do not exist: a test with a typing error must not pass. And when the listener never becomes what they say.
    pub fn behave(&self, json: &str) {
        if let Err(error) = self.engine.merge(json) {
            panic!("{error}: {json}");
        }
        // The listener closes and opens in the engine's own time.
        let mut patience = Patience::new(SETTLE_MAX);
        while !self.engine.is_settled() {
            assert!(!patience.is_over(), "the listener is not as told: {json}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Counters to nothing, behaviour to what the engine was started with.
    pub fn reset(&self) {
        self.engine.reset();
    }

    /// Waits until the state is as wanted, or `within` is over; the last state either way (`Err`: never as wanted).
    pub fn wait(
        &self,
        within: Duration,
        wanted: impl Fn(&StateView) -> bool,
    ) -> Result<StateView, Box<StateView>> {
        let mut patience = Patience::new(within);
        loop {
            let state = self.state();
            if wanted(&state) {
                return Ok(state);
            }
            if patience.is_over() {
                return Err(Box::new(state));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The same for async tests: woken by every change.
    pub async fn until(
        &self,
        within: Duration,
        wanted: impl Fn(&StateView) -> bool,
    ) -> Result<StateView, Box<StateView>> {
        let mut patience = Patience::new(within);
        let mut changes = self.engine.state.changes();
        loop {
            let state = self.state();
            if wanted(&state) {
                return Ok(state);
            }
            if patience.is_over() {
                return Err(Box::new(state));
            }
            // Token counts move without a change being told, hence the limit.
            let _ =
                tokio::time::timeout(Duration::from_millis(LOOK_EVERY_MS), changes.changed()).await;
        }
    }

    /// Ends the engine as a killed process ends: listener and connections are gone.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        // On a thread of its own: a runtime must not be waited for from within another.
        let ending = std::thread::spawn(move || {
            runtime.shutdown_timeout(SETTLE_MAX);
        });
        let _ = ending.join();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}
