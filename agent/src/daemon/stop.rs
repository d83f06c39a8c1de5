//! Who stops an agent.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

pub(super) enum Stop {
    /// Of a process of its own: the operator, who may ask twice.
    Signals(Signals),
    /// Of `llmgw dev`: the server's end, once.
    Once(Option<CancellationToken>),
}

/// SIGTERM and SIGINT stop an agent, and SIGHUP does, which comes when its terminal is closed.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// `None`: it is ignored.
    hangup: Option<Signal>,
}

impl Stop {
    pub(super) async fn asked(&mut self) {
        match self {
            Stop::Signals(signals) => signals.stop().await,
            Stop::Once(Some(token)) => {
                token.cancelled().await;
                *self = Stop::Once(None);
            }
            Stop::Once(None) => std::future::pending().await,
        }
    }

    pub(super) fn hint(&self) -> &'static str {
        match self {
            Stop::Signals(_) => "; a second signal leaves them running",
            Stop::Once(_) => "",
        }
    }
}

impl Signals {
    pub(super) fn install(ignores_hangup: bool) -> std::io::Result<Signals> {
        let hangup = || signal(SignalKind::hangup());
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: (!ignores_hangup).then(hangup).transpose()?,
        })
    }

    async fn stop(&mut self) {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            // A closed terminal says so twice within a moment (its shell and the kernel), and nobody means the second one.
            _ = hangup => self.hangup = None,
        }
    }
}

/// Whoever started this process wants it to outlive the terminal (`nohup`).
pub(super) fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status");
    status.is_ok_and(|status| ignores(&status, libc::SIGHUP))
}

/// Whether a process ignores a signal, by its `/proc/PID/status`.
fn ignores(status: &str, signal: i32) -> bool {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_closed_terminal_stops_an_agent() {
        let mut signals = Signals::install(false).unwrap();
        let raise = |which| nix::sys::signal::raise(which).unwrap();
        let mut heard = signal(SignalKind::hangup()).unwrap();
        raise(nix::sys::signal::Signal::SIGHUP);
        heard.recv().await;
        signals.stop().await;
        // The second one of the same terminal is no second word of the operator.
        raise(nix::sys::signal::Signal::SIGHUP);
        heard.recv().await;
        tokio::select! {
            biased;
            () = signals.stop() => panic!("a terminal is closed once"),
            () = std::future::ready(()) => {}
        }
        raise(nix::sys::signal::Signal::SIGTERM);
        signals.stop().await;
    }

    #[test]
    fn an_ignored_signal_is_told_from_its_mask() {
        let status = "Name:\tllmgw\nSigBlk:\t0000000000000003\nSigIgn:\t0000000000001001\n";
        assert!(ignores(status, libc::SIGHUP));
        assert!(!ignores(status, libc::SIGTERM));
        let plain = "SigIgn:\t0000000000001000\n";
        assert!(!ignores(plain, libc::SIGHUP) && ignores(plain, libc::SIGPIPE));
        assert!(!ignores("", libc::SIGHUP));
    }
}
