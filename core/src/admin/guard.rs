//! Who is answered on the admin address: who has the token, or where none is set, who asks this machine by a name of its own.

use std::net::IpAddr;

use http::header::{AUTHORIZATION, HOST};
use http::uri::Authority;
use http::{HeaderMap, Uri};
use subtle::ConstantTimeEq;

/// What is asked of a request before it is looked at. `/healthz` and `/readyz` are asked for nothing: whoever probes them is told no more than
/// that they are up.
pub enum Guard {
    /// A bearer token.
    Token(String),
    /// Neither token nor TLS, so the address is loopback. Who is on this machine is let in, and nobody whom others sent there: a web page
    /// whose own name leads to 127.0.0.1 (DNS rebinding), or this gateway, dialling an engine that isn't one. Both name another host.
    OwnHosts,
    /// TLS without a token: whoever reaches it. Who was sent there knows it by another name than the certificate's, and hangs up.
    Nothing,
}

/// Why a request is not answered.
#[derive(Debug, PartialEq, Eq)]
pub enum Denied {
    /// The token is missing or wrong.
    Token,
    /// It was meant for another host, which it named so.
    Host(String),
}

impl Guard {
    pub fn new(token: Option<String>, has_tls: bool) -> Guard {
        match (token, has_tls) {
            (Some(token), _) => Guard::Token(token),
            (None, false) => Guard::OwnHosts,
            (None, true) => Guard::Nothing,
        }
    }

    /// # Errors
    /// Why it is not answered.
    pub fn admit(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Denied> {
        match self {
            Guard::Token(token) if is_given(token, headers) => Ok(()),
            Guard::Token(_) => Err(Denied::Token),
            Guard::OwnHosts => {
                foreign_host(uri, headers).map_or(Ok(()), |name| Err(Denied::Host(name)))
            }
            Guard::Nothing => Ok(()),
        }
    }
}

/// Whether a host, with or without a port, is this machine whoever looks its name up. Not what merely leads here: anybody's name can.
pub fn is_own_host(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let name = authority.host();
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    match bare.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => {
            let name = bare.strip_suffix('.').unwrap_or(bare);
            name.eq_ignore_ascii_case("localhost") && !host.contains('@')
        }
    }
}

/// The comparison takes as long for any wrong token of the right length.
fn is_given(token: &str, headers: &HeaderMap) -> bool {
    let given = headers
        .get(AUTHORIZATION)
        .and_then(|value| value.as_bytes().split_at_checked("Bearer ".len()));
    given.is_some_and(|(scheme, given)| {
        scheme.eq_ignore_ascii_case(b"Bearer ")
            && bool::from(given.trim_ascii().ct_eq(token.as_bytes()))
    })
}

/// The first host that a request names and that isn't this machine. Browsers and this gateway always name one, probes that speak HTTP/1.0
/// often none.
fn foreign_host(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    let in_line = uri.authority().map(|host| host.as_str().to_owned());
    let in_headers = headers
        .get_all(HOST)
        .iter()
        .map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned());
    in_line
        .into_iter()
        .chain(in_headers)
        .find(|host| !host.is_empty() && !is_own_host(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a guard says to a request with this target and these headers.
    fn ask(guard: &Guard, uri: &str, headers: &[(http::HeaderName, &str)]) -> Result<(), Denied> {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.clone(), value.parse().expect("it is a value")))
            .collect();
        guard.admit(&uri.parse().expect("it is a target"), &headers)
    }

    #[test]
    fn without_token_and_tls_only_this_machines_own_hosts_are_answered() {
        let guard = Guard::new(None, false);
        for own in [
            "127.0.0.1",
            "127.0.0.1:8081",
            "127.8.9.10:1",
            "[::1]",
            "[::1]:8081",
            "[::ffff:127.0.0.1]:8081",
            "localhost",
            "localhost:9999",
            "LocalHost.:8081",
            "",
        ] {
            assert_eq!(ask(&guard, "/metrics", &[(HOST, own)]), Ok(()), "{own}");
        }
        for foreign in [
            "evil.example",
            "evil.example:8081",
            "localhost.evil.example",
            "127.0.0.1.evil.example:8081",
            "notlocalhost",
            "10.0.0.1:8081",
            "0.0.0.0:8081",
            "[::]:8081",
            "[fd00::1]:8081",
            "localhost@evil.example",
            "evil.example@localhost",
            "localhost, evil.example",
            "evil.example#localhost",
            "::1",
        ] {
            let said = ask(&guard, "/metrics", &[(HOST, foreign)]);
            assert_eq!(said, Err(Denied::Host(foreign.to_owned())));
        }
        assert_eq!(ask(&guard, "/metrics", &[]), Ok(()), "HTTP/1.0");
    }

    #[test]
    fn every_host_that_is_named_has_to_be_an_own_one() {
        let guard = Guard::new(None, false);
        let foreign = || Err(Denied::Host("evil.example".to_owned()));
        for (uri, hosts, expected) in [
            ("http://evil.example/metrics", &["localhost"][..], foreign()),
            ("http://localhost/metrics", &["evil.example"], foreign()),
            ("/metrics", &["localhost", "evil.example"], foreign()),
            ("http://localhost:8081/metrics", &["[::1]:8081"], Ok(())),
        ] {
            let headers: Vec<_> = hosts.iter().map(|host| (HOST, *host)).collect();
            assert_eq!(ask(&guard, uri, &headers), expected, "{uri} {hosts:?}");
        }
    }

    #[test]
    fn a_token_or_a_certificate_stands_for_the_host() {
        let host = (HOST, "ctl.example:8081");
        let token = Guard::new(Some("s3cret".to_owned()), false);
        let good = (AUTHORIZATION, "Bearer s3cret");
        assert_eq!(ask(&token, "/metrics", &[host.clone(), good]), Ok(()));
        let wrong = (AUTHORIZATION, "Bearer s3cre");
        let local = (HOST, "localhost");
        assert_eq!(ask(&token, "/metrics", &[local, wrong]), Err(Denied::Token));
        let tls = Guard::new(None, true);
        assert_eq!(ask(&tls, "/metrics", &[host]), Ok(()));
    }
}
