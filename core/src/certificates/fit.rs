//! Whether a certificate fits the address that shows it, judged from both alone: one sentence for each thing that was probably not meant.

use std::net::IpAddr;

use llmgw_proto::identity::problem::make_server;
use llmgw_proto::identity::{Certificate, Host};

use super::TlsListener;

pub(super) fn remarks(listener: &TlsListener, certificate: &Certificate) -> Vec<String> {
    let said = |what: String| {
        let (key, file) = (listener.serves.key(), listener.files.cert.display());
        format!("`{key}`: {file}: {what}")
    };
    let wrong = [authority(certificate), hosts(listener, certificate)];
    wrong.into_iter().flatten().map(said).collect()
}

/// Agents are refused one before this is asked; other clients differ in what they take.
fn authority(certificate: &Certificate) -> Option<String> {
    certificate.is_authority.then(|| {
        format!(
            "this is an authority's own certificate (`{}`), which many clients refuse from a server; {} makes a server's",
            certificate.name(),
            make_server(&certificate.hosts, "HOST")
        )
    })
}

fn hosts(listener: &TlsListener, certificate: &Certificate) -> Option<String> {
    let address = listener.address.ip();
    let hosts = &certificate.hosts;
    let make = |host: &str| make_server(&certificate.hosts, host);
    if hosts.is_empty() {
        return Some(format!(
            "the certificate is for no host at all (a subject does not count), so clients refuse it; {} makes one",
            make(&to_dial(address))
        ));
    }
    if address.is_loopback() {
        return None;
    }
    let shown = certificate.hosts_shown();
    if hosts.iter().all(is_loopback) {
        return Some(format!(
            "the certificate is only for {shown}, so clients on other machines refuse it, and {} is there for them; {} makes one for both",
            listener.address,
            make(&to_dial(address))
        ));
    }
    // Where it has a name, that is what clients dial.
    let is_for_it = |host: &Host| match host {
        Host::Name(_) => !is_loopback(host),
        Host::Address(own) => *own == address,
    };
    if address.is_unspecified() || hosts.iter().any(is_for_it) {
        return None;
    }
    Some(format!(
        "the certificate is for {shown}, so clients that dial {address}, which is listened on, refuse it; {} makes one for both",
        make(&to_dial(address))
    ))
}

fn is_loopback(host: &Host) -> bool {
    match host {
        Host::Name(name) => name == "localhost" || name.ends_with(".localhost"),
        Host::Address(address) => address.is_loopback(),
    }
}

/// What a certificate for this address would have to be for.
fn to_dial(address: IpAddr) -> String {
    match address.is_unspecified() {
        true => "HOST".to_owned(),
        false => address.to_string(),
    }
}
