//! What `ctl cert` says: what a certificate is, which files were written, what to copy where and which lines go into which configuration.

use std::path::{Path, PathBuf};

use llmgw_proto::identity::Moment;
use llmgw_proto::identity::certificate::{Certificate, Usages, Validity};
use llmgw_proto::text::word;
use serde_json::{Value, json};

use crate::authority::{Authority, CERTIFICATE_FILE};

/// An answer for people and for programs.
pub(super) struct Page {
    certificates: Vec<Certificate>,
    /// What was written.
    files: Vec<PathBuf>,
    /// What to do next, in whole lines.
    next: String,
    pub(super) warnings: Vec<String>,
}

pub(super) fn authority(
    directory: &Path,
    file: &Path,
    key: &Path,
    certificate: Certificate,
) -> Page {
    let next = format!(
        "Copy {} to every machine, servers and agents: who has it trusts what this authority issues.\n\
         Leave {} here, and keep a copy in a safe place: who has it can speak as anybody.\n\
         \n\
         Next, on this machine:\n\
         \x20 llmgw ctl cert server --ca {directory} --host HOST --out DIR   HOST: a name or address that agents dial\n\
         \x20 llmgw ctl cert agent --ca {directory} --node ID --out DIR      ID: the node's id\n",
        shown(file),
        shown(key),
        directory = shown(directory),
    );
    Page::new(
        vec![certificate],
        vec![file.to_owned(), key.to_owned()],
        next,
    )
}

pub(super) fn server([file, key, authority]: [PathBuf; 3], certificate: Certificate) -> Page {
    let next = format!(
        "Copy {}, {} and {} to the server, the key readable by its user only.\n\
         \n\
         In llmgw.yaml beside them:\n\
         agents:\n\
         \x20 listen: 0.0.0.0:8443\n\
         \x20 tls: {{cert: {}, key: {}, ca: {CERTIFICATE_FILE}}}\n",
        shown(&file),
        shown(&key),
        shown(&authority),
        name(&file),
        name(&key),
    );
    Page::new(vec![certificate], vec![file, key, authority], next)
}

pub(super) fn agent(
    node: &str,
    [file, key, authority]: [PathBuf; 3],
    certificate: Certificate,
) -> Page {
    let next = format!(
        "Copy {}, {} and {} to the node, the key readable by the agent's user only.\n\
         \n\
         In agent.yaml beside them, HOST being one that the server's certificate is for:\n\
         server: https://HOST:8443\n\
         node: \"{node}\"\n\
         tls: {{ca: {CERTIFICATE_FILE}, cert: {}, key: {}}}\n",
        shown(&file),
        shown(&key),
        shown(&authority),
        name(&file),
        name(&key),
    );
    Page::new(vec![certificate], vec![file, key, authority], next)
}

pub(super) fn renewed(file: &Path, old: &Certificate, certificate: Certificate) -> Page {
    let next = format!(
        "Copy {} to where the old one is used; its key stays as it is.\n\
         The old one, serial {}, is good until {} unless `agents.deny_serials` lists it.\n",
        shown(file),
        old.serial,
        old.not_after,
    );
    Page::new(vec![certificate], vec![file.to_owned()], next)
}

pub(super) fn shown_certificates(certificates: Vec<Certificate>) -> Page {
    Page::new(certificates, Vec::new(), String::new())
}

impl Page {
    fn new(certificates: Vec<Certificate>, files: Vec<PathBuf>, next: String) -> Page {
        Page {
            certificates,
            files,
            next,
            warnings: Vec::new(),
        }
    }

    /// Warns of a certificate that ends early because its authority does.
    pub(super) fn with_end_of(mut self, authority: &Authority) -> Page {
        let end = authority.certificate.not_after;
        if self.certificates.iter().any(|one| one.not_after == end) {
            self.warnings.push(format!(
                "the authority ends on {end}, and this certificate with it; make a new authority before with `llmgw ctl cert ca --out DIR`"
            ));
        }
        self
    }

    pub(super) fn text(&self, now: Moment) -> String {
        let facts: Vec<String> = self
            .certificates
            .iter()
            .map(|certificate| facts(certificate, now))
            .collect();
        let mut text = facts.join("\n");
        for (at, file) in self.files.iter().enumerate() {
            let head = if at == 0 { "wrote" } else { "" };
            text.push_str(&format!("{head:<11}  {}\n", shown(file)));
        }
        if !self.next.is_empty() {
            text.push('\n');
            text.push_str(&self.next);
        }
        text
    }

    /// Without files it is a list of certificates, else one certificate and its files.
    pub(super) fn json(&self, now: Moment) -> Value {
        let mut certificates: Vec<Value> = self
            .certificates
            .iter()
            .map(|certificate| facts_json(certificate, now))
            .collect();
        if self.files.is_empty() {
            return Value::Array(certificates);
        }
        let files: Vec<String> = self
            .files
            .iter()
            .map(|file| file.display().to_string())
            .collect();
        json!({"certificate": certificates.pop(), "files": files})
    }
}

fn facts(certificate: &Certificate, now: Moment) -> String {
    let mut rows = vec![("subject", certificate.subject.clone())];
    if !certificate.hosts.is_empty() {
        let hosts: Vec<String> = certificate.hosts.iter().map(ToString::to_string).collect();
        rows.push(("hosts", hosts.join(", ")));
    }
    rows.extend([
        ("issuer", certificate.issuer.clone()),
        ("serial", certificate.serial.to_string()),
        (
            "valid",
            format!(
                "{} to {}, {}",
                certificate.not_before,
                certificate.not_after,
                standing(certificate, now)
            ),
        ),
        ("usage", usage(certificate)),
        ("fingerprint", certificate.fingerprint.to_string()),
    ]);
    rows.iter()
        .map(|(name, value)| format!("{name:<11}  {value}\n"))
        .collect()
}

fn standing(certificate: &Certificate, now: Moment) -> String {
    match certificate.validity(now) {
        Validity::NotYet => "NOT YET".to_owned(),
        Validity::Expired => "EXPIRED".to_owned(),
        Validity::Current => match certificate.days_left(now) {
            1 => "1 day left".to_owned(),
            days => format!("{days} days left"),
        },
    }
}

fn usage(certificate: &Certificate) -> String {
    let keys = match certificate.key_usages.as_slice() {
        [] => "any".to_owned(),
        usages => usages.join(", "),
    };
    match (certificate.is_authority, certificate.path_length) {
        (true, Some(0)) => format!("an authority for leaves only; key: {keys}"),
        (true, _) => format!("an authority; key: {keys}"),
        (false, _) => format!("{}; key: {keys}", certificate.usages),
    }
}

fn facts_json(certificate: &Certificate, now: Moment) -> Value {
    let hosts: Vec<String> = certificate.hosts.iter().map(ToString::to_string).collect();
    json!({
        "subject": certificate.subject,
        "common_name": certificate.common_name,
        "hosts": hosts,
        "issuer": certificate.issuer,
        "serial": certificate.serial.to_string(),
        "not_before": certificate.not_before.to_string(),
        "not_after": certificate.not_after.to_string(),
        "days_left": certificate.days_left(now),
        "validity": match certificate.validity(now) {
            Validity::NotYet => "not_yet",
            Validity::Current => "current",
            Validity::Expired => "expired",
        },
        "authority": certificate.is_authority,
        "path_length": certificate.path_length,
        "usages": usage_names(certificate.usages),
        "key_usages": certificate.key_usages,
        "key_id": certificate.key_id,
        "issuer_key_id": certificate.issuer_key_id,
        "fingerprint": certificate.fingerprint.to_string(),
    })
}

fn usage_names(usages: Usages) -> Vec<&'static str> {
    let all = [
        ("clientAuth", usages.client_auth),
        ("serverAuth", usages.server_auth),
    ];
    let named = all.into_iter().filter(|(_, set)| *set);
    named.map(|(name, _)| name).collect()
}

/// A path as it can be typed into a shell.
fn shown(path: &Path) -> String {
    word(&path.display().to_string())
}

fn name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
