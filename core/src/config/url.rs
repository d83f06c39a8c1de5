//! The address of an engine: `http://host:port` with an optional base path.

use std::fmt;
use std::sync::Arc;

use http::Uri;

/// Where an engine listens. Plain HTTP only: engines stand on the organisation's own network.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct EngineUrl {
    /// A host name or an IP address, IPv6 without brackets.
    host: Arc<str>,
    port: u16,
    /// `host:port` as the `host` header has it.
    authority: Arc<str>,
    /// Before the client's own path: empty, or `/...` without a trailing slash.
    base: Arc<str>,
}

/// Why a text is no address of an engine, with what would be right.
#[derive(Debug, PartialEq, Eq)]
pub struct UrlError {
    pub wrong: &'static str,
    pub right: String,
}

/// The port that HTTP means where none is written.
const HTTP_PORT: u16 = 80;

impl EngineUrl {
    /// Parses `http://host[:port][/base]`.
    ///
    /// # Errors
    /// What is wrong; the message does not repeat the text, which may hold a password.
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        let example = "write e.g. `http://127.0.0.1:8000`".to_owned();
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(UrlError {
                wrong: "is no URL: it does not begin with `http://`",
                right: example,
            });
        };
        if scheme.eq_ignore_ascii_case("https") {
            let right = "use `http://`; where the network is not trusted, put a TLS tunnel beside the gateway".to_owned();
            return Err(UrlError {
                wrong: "is https, which is not supported towards engines",
                right,
            });
        }
        if !scheme.eq_ignore_ascii_case("http") {
            return Err(UrlError {
                wrong: "has a scheme other than http",
                right: example,
            });
        }
        if rest.contains(['?', '#']) {
            let right = "leave out what follows `?` or `#`".to_owned();
            return Err(UrlError {
                wrong: "has a query or a fragment",
                right,
            });
        }
        if rest
            .split('/')
            .next()
            .is_some_and(|authority| authority.contains('@'))
        {
            let right = "leave them out, and set `api_key` if the engine asks for one".to_owned();
            return Err(UrlError {
                wrong: "has credentials",
                right,
            });
        }
        let uri: Uri = format!("http://{rest}").parse().map_err(|_| UrlError {
            wrong: "is not a valid URL",
            right: example.clone(),
        })?;
        EngineUrl::from_uri(&uri, example)
    }

    fn from_uri(uri: &Uri, example: String) -> Result<Self, UrlError> {
        let host = uri.host().unwrap_or("");
        if host.is_empty() {
            return Err(UrlError {
                wrong: "has no host",
                right: example,
            });
        }
        let written = uri.authority().map_or("", |authority| authority.as_str());
        let port = match written
            .strip_prefix(host)
            .and_then(|rest| rest.strip_prefix(':'))
        {
            None => Some(HTTP_PORT),
            Some(port) => port.parse().ok().filter(|port| *port != 0),
        };
        let Some(port) = port else {
            let right = "write a port from 1 to 65535".to_owned();
            return Err(UrlError {
                wrong: "has no valid port",
                right,
            });
        };
        let base = uri.path().trim_end_matches('/');
        if base.ends_with("/v1") {
            let right = "leave out `/v1`: the client's own path is appended".to_owned();
            return Err(UrlError {
                wrong: "ends in `/v1`",
                right,
            });
        }
        Ok(EngineUrl {
            host: host.trim_start_matches('[').trim_end_matches(']').into(),
            port,
            authority: format!("{host}:{port}").into(),
            base: base.into(),
        })
    }

    /// Stands for a URL that was reported as wrong; no configuration that holds it is ever used.
    pub(super) fn unreadable() -> Self {
        EngineUrl {
            host: "".into(),
            port: 0,
            authority: "".into(),
            base: "".into(),
        }
    }

    /// A host name or an IP address, IPv6 without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// `host:port`, IPv6 in brackets.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// What goes before the client's own path: empty, or `/...` without a trailing slash.
    pub fn base(&self) -> &str {
        &self.base
    }
}

impl fmt::Display for EngineUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.base)
    }
}

impl fmt::Debug for EngineUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_scheme_host_port_and_base() {
        let cases = [
            (
                "http://127.0.0.1:9001",
                ("127.0.0.1", 9001, "127.0.0.1:9001", ""),
            ),
            ("HTTP://gpu-1", ("gpu-1", 80, "gpu-1:80", "")),
            ("http://gpu-1:8000/", ("gpu-1", 8000, "gpu-1:8000", "")),
            (
                "http://gpu-1:8000/a/b/",
                ("gpu-1", 8000, "gpu-1:8000", "/a/b"),
            ),
            ("http://[::1]:8000/a", ("::1", 8000, "[::1]:8000", "/a")),
        ];
        for (text, expected) in cases {
            let url = EngineUrl::parse(text).unwrap();
            assert_eq!(
                (url.host(), url.port(), url.authority(), url.base()),
                expected,
                "{text}"
            );
        }
        assert_eq!(
            EngineUrl::parse("http://[::1]:8000/a/")
                .unwrap()
                .to_string(),
            "http://[::1]:8000/a"
        );
    }

    #[test]
    fn a_text_that_is_no_address_says_why() {
        let cases = [
            (
                "127.0.0.1:9001",
                "is no URL: it does not begin with `http://`",
            ),
            (
                "https://gpu-1:8000",
                "is https, which is not supported towards engines",
            ),
            ("ftp://gpu-1", "has a scheme other than http"),
            ("http://:8000", "has no host"),
            ("http://", "is not a valid URL"),
            ("http://a b", "is not a valid URL"),
            ("http://gpu-1:0", "has no valid port"),
            ("http://gpu-1:", "has no valid port"),
            ("http://gpu-1:99999", "has no valid port"),
            ("http://me:pw@gpu-1", "has credentials"),
            ("http://gpu-1?x=1", "has a query or a fragment"),
            ("http://gpu-1:8000/v1", "ends in `/v1`"),
        ];
        for (text, wrong) in cases {
            assert_eq!(EngineUrl::parse(text).unwrap_err().wrong, wrong, "{text}");
        }
    }
}
