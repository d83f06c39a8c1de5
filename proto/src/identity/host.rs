//! What is dialled, and what a certificate is for: a DNS name or a bare IP address.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use crate::text::plain;

const NAME_MAX_BYTES: usize = 253;
const LABEL_MAX_BYTES: usize = 63;
/// Of a text that is no host, so much is repeated.
const SHOWN_MAX_CHARS: usize = 80;

/// A host, without a port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Host {
    /// In lower case. In a certificate it may start with `*.`.
    Name(String),
    Address(IpAddr),
}

/// Why a text is no host, with what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoHost {
    /// The text in backticks, and what is wrong with it.
    pub wrong: String,
    /// What to write instead.
    pub right: String,
}

impl Host {
    /// Whether a certificate for this host is one for `dialled`. A `*` stands for exactly one label.
    pub fn covers(&self, dialled: &Host) -> bool {
        match (self, dialled) {
            (Host::Name(pattern), Host::Name(name)) => match pattern.strip_prefix("*.") {
                Some(rest) => name
                    .split_once('.')
                    .is_some_and(|(_, parent)| parent.eq_ignore_ascii_case(rest)),
                None => pattern.eq_ignore_ascii_case(name),
            },
            (one, other) => one == other,
        }
    }
}

/// As an operator writes it: a name, `*.` and a name, or an address, that of IPv6 with or without brackets.
impl FromStr for Host {
    type Err = NoHost;

    fn from_str(text: &str) -> Result<Host, NoHost> {
        let refuse = |wrong: &str, right: String| {
            let shown: String = plain(text).chars().take(SHOWN_MAX_CHARS).collect();
            NoHost {
                wrong: format!("`{shown}` {wrong}"),
                right,
            }
        };
        if let Some((_, rest)) = text.split_once("://") {
            let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
            let host = without_port(authority).unwrap_or(authority);
            return Err(refuse("is a URL", alone(host)));
        }
        if let Some(address) = address(text) {
            return match address.is_unspecified() {
                true => Err(refuse(
                    "is an address to listen on, which nobody dials",
                    "write the address or name that is dialled".to_owned(),
                )),
                false => Ok(Host::Address(address)),
            };
        }
        if let Some(host) = without_port(text) {
            return Err(refuse("has a port", alone(host)));
        }
        if let Some(host) = text.strip_suffix('.').filter(|host| !host.is_empty()) {
            return Err(refuse("ends with a dot", alone(host)));
        }
        name(text)
            .map(Host::Name)
            .map_err(|wrong| refuse(wrong, EXAMPLES.to_owned()))
    }
}

const EXAMPLES: &str =
    "write a name or an address, e.g. `ctl.example`, `*.ctl.example`, `10.0.0.1` or `fd00::1`";

fn alone(host: &str) -> String {
    match host.parse::<Host>() {
        Ok(host) => format!("write the host alone: `{host}`"),
        Err(_) => EXAMPLES.to_owned(),
    }
}

fn address(text: &str) -> Option<IpAddr> {
    let bracketed = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    match bracketed {
        Some(inner) => inner.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
        None => text.parse().ok(),
    }
}

/// What stands before a port.
fn without_port(text: &str) -> Option<&str> {
    let (host, port) = text.rsplit_once(':')?;
    let is_port = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let is_host = !host.contains(':') || host.ends_with(']');
    (is_port && is_host).then_some(host)
}

/// A DNS name as the verifiers of certificates take them, or why it is none.
fn name(text: &str) -> Result<String, &'static str> {
    let name = text.to_ascii_lowercase();
    let (labels, is_wildcard) = match name.strip_prefix("*.") {
        Some(rest) => (rest, true),
        None => (name.as_str(), false),
    };
    if text.is_empty() {
        return Err("is empty");
    }
    if !text.is_ascii() {
        return Err("is not ASCII; an international name is written in its `xn--` form");
    }
    if text.contains('%') {
        return Err("has a zone, which certificates cannot hold");
    }
    if name.len() > NAME_MAX_BYTES {
        return Err("is longer than the 253 bytes of a name");
    }
    if labels.contains('*') {
        return Err("has a `*` that is not its whole first label");
    }
    if is_wildcard && !labels.contains('.') {
        return Err("would cover a whole top level; two labels must follow the `*`");
    }
    let good = |label: &str| {
        let bytes = label.as_bytes();
        let ok = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
        (1..=LABEL_MAX_BYTES).contains(&bytes.len())
            && bytes.iter().all(ok)
            && bytes.first() != Some(&b'-')
            && bytes.last() != Some(&b'-')
    };
    if !labels.split('.').all(good) {
        return Err("is not a host");
    }
    let last = labels.rsplit('.').next().unwrap_or_default();
    if last.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("is neither a name nor a whole address");
    }
    Ok(name)
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Name(name) => f.write_str(name),
            Host::Address(address) => address.fmt(f),
        }
    }
}

impl fmt::Display for NoHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.wrong, self.right)
    }
}

impl std::error::Error for NoHost {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_are_hosts() {
        for (text, shown) in [
            ("ctl.example", "ctl.example"),
            ("CTL.Example", "ctl.example"),
            ("gpu_01", "gpu_01"),
            ("*.ctl.example", "*.ctl.example"),
            ("10.0.0.1", "10.0.0.1"),
            ("fd00::1", "fd00::1"),
            ("[fd00:0:0::1]", "fd00::1"),
            ("localhost", "localhost"),
        ] {
            assert_eq!(text.parse::<Host>().unwrap().to_string(), shown);
        }
        assert!(matches!("[::1]".parse(), Ok(Host::Address(IpAddr::V6(_)))));
    }

    #[test]
    fn what_is_no_host_alone_is_refused_with_what_would_be_right() {
        let long = format!("{}.example", "a".repeat(64));
        for (text, wrong, right) in [
            ("", "is empty", "e.g. `ctl.example`"),
            (
                "https://ctl.example:8443/x",
                "is a URL",
                "write the host alone: `ctl.example`",
            ),
            (
                "https://[fd00::1]:8443",
                "is a URL",
                "write the host alone: `fd00::1`",
            ),
            (
                "ctl.example:8443",
                "has a port",
                "write the host alone: `ctl.example`",
            ),
            (
                "10.0.0.1:8443",
                "has a port",
                "write the host alone: `10.0.0.1`",
            ),
            (
                "[fd00::1]:8443",
                "has a port",
                "write the host alone: `fd00::1`",
            ),
            (
                "ctl.example.",
                "ends with a dot",
                "write the host alone: `ctl.example`",
            ),
            ("0.0.0.0", "is an address to listen on", "that is dialled"),
            ("[::]", "is an address to listen on", "that is dialled"),
            ("fe80::1%eth0", "has a zone", "e.g."),
            ("10.0.0", "is neither a name nor a whole address", "e.g."),
            (
                "10.0.0.256",
                "is neither a name nor a whole address",
                "e.g.",
            ),
            ("[10.0.0.1]", "is not a host", "e.g."),
            ("*", "has a `*` that is not its whole first label", "e.g."),
            (
                "a.*.example",
                "has a `*` that is not its whole first label",
                "e.g.",
            ),
            ("*.example", "two labels must follow", "e.g."),
            ("münchen.example", "is not ASCII", "e.g."),
            ("a b", "is not a host", "e.g."),
            ("a..b", "is not a host", "e.g."),
            ("-a", "is not a host", "e.g."),
            ("ctl.example/x", "is not a host", "e.g."),
            ("a,b", "is not a host", "e.g."),
            ("a\u{1b}[2J", "is not a host", "e.g."),
            (&long, "is not a host", "e.g."),
        ] {
            let error = text.parse::<Host>().unwrap_err();
            assert!(error.wrong.contains(wrong), "{text}: {error}");
            assert!(error.right.contains(right), "{text}: {error}");
            assert!(!error.to_string().contains('\u{1b}'));
        }
    }

    #[test]
    fn a_star_covers_exactly_one_label() {
        for (pattern, dialled, covered) in [
            ("*.ctl.example", "a.ctl.example", true),
            ("*.ctl.example", "ctl.example", false),
            ("*.ctl.example", "a.b.ctl.example", false),
            ("ctl.example", "CTL.example", true),
            ("ctl.example", "a.ctl.example", false),
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("fd00::1", "[fd00:0::1]", true),
        ] {
            let (one, other): (Host, Host) = (pattern.parse().unwrap(), dialled.parse().unwrap());
            assert_eq!(one.covers(&other), covered, "{pattern} {dialled}");
        }
    }
}
