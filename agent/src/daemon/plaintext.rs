//! Whether a server may be talked to without TLS: never by mistake, and off loopback only where agent.yaml says so.

use std::fmt;

use crate::session::dial::ServerUrl;

/// Why it may not, with what to write instead.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoPlaintext {
    /// There are files to dial with, which would not be used.
    TlsIsSet(ServerUrl),
    /// What is said leaves this machine.
    NotLoopback(ServerUrl),
}

/// `has_tls`: agent.yaml has `tls`. `allowed`: and `allow_plaintext: true`.
pub(super) fn check(server: &ServerUrl, has_tls: bool, allowed: bool) -> Result<(), NoPlaintext> {
    match () {
        () if server.is_tls => Ok(()),
        () if has_tls => Err(NoPlaintext::TlsIsSet(server.clone())),
        () if server.is_loopback() || allowed => Ok(()),
        () => Err(NoPlaintext::NotLoopback(server.clone())),
    }
}

impl fmt::Display for NoPlaintext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (NoPlaintext::TlsIsSet(server) | NoPlaintext::NotLoopback(server)) = self;
        let secure = ServerUrl {
            is_tls: true,
            ..server.clone()
        };
        match self {
            NoPlaintext::TlsIsSet(_) => write!(
                f,
                "`tls` of agent.yaml is for `https://`, and {server} is dialled without it; \
                 write `server: {secure}`, or take `tls` out"
            ),
            NoPlaintext::NotLoopback(_) => write!(
                f,
                "{server} is not on this machine, and anybody on the way could read and change what is said, engines' keys included; \
                 write `server: {secure}` with `tls`, or `allow_plaintext: true` into agent.yaml where the network is yours alone"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plaintext_is_for_loopback_or_where_it_is_allowed_and_never_beside_tls() {
        const AWAY: &str = "http://10.0.0.1:8443";
        const HERE: &str = "http://127.0.0.1:8443";
        let has_tls = "write `server: https://10.0.0.1:8443`, or take `tls` out";
        let is_away =
            "write `server: https://10.0.0.1:8443` with `tls`, or `allow_plaintext: true`";
        for (server, tls, allowed, said) in [
            ("https://10.0.0.1", true, false, None),
            ("https://10.0.0.1", false, false, None),
            (HERE, false, false, None),
            ("http://[::1]:8443", false, false, None),
            ("http://localhost:8443", false, false, None),
            (AWAY, false, true, None),
            (AWAY, false, false, Some(is_away)),
            (AWAY, true, false, Some(has_tls)),
            (AWAY, true, true, Some(has_tls)),
            (
                HERE,
                true,
                false,
                Some("`tls` of agent.yaml is for `https://`"),
            ),
            // What a name leads to is not known here, and changes.
            (
                "http://ctl.example",
                false,
                false,
                Some("http://ctl.example:8443 is not on this machine"),
            ),
        ] {
            let checked = check(&server.parse().unwrap(), tls, allowed);
            let told = checked.err().map(|why| why.to_string());
            match (told, said) {
                (None, None) => {}
                (Some(told), Some(said)) => assert!(told.contains(said), "{told}"),
                (told, said) => panic!("{server}: {told:?}, not {said:?}"),
            }
        }
    }
}
