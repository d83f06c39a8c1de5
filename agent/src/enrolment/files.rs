//! The three files of a node's identity, as enrolment makes them.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use llmgw_proto::enrolment::Enrolled;
use llmgw_proto::identity::certificate::{Certificate, is_issued_by};
use llmgw_proto::identity::files::{FileFault, FileProblem, PrivateKey, Readers, read_key};
use llmgw_proto::identity::placing::{
    CERTIFICATE_MODE, KEY_MODE, NewFile, make_directory, place, replace,
};
use llmgw_proto::identity::request::{make_key, request_for};
use llmgw_proto::identity::{Authorities, EnrolmentToken, Fingerprint, Identity, Moment};

use crate::config::AgentTls;

/// What there is of a certificate for this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Have {
    Nothing,
    /// Negative: it ended.
    Certificate {
        days_left: i64,
    },
}

/// Where they are when agent.yaml names none.
pub fn in_state(state: &Path) -> AgentTls {
    let directory = state.join("tls");
    AgentTls {
        ca: directory.join("ca.pem"),
        cert: directory.join("agent.pem"),
        key: directory.join("agent-key.pem"),
    }
}

/// Whose files they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// agent.yaml names them. An authority that is there was put there by somebody.
    Operator,
    /// They are [`in_state`]: nobody but an enrolment writes them.
    Agent,
}

/// What is there. The error says what to do with files that are not this node's: none of them is written over.
pub(super) fn look(files: &AgentTls, node: &str, now: Moment) -> Result<Have, String> {
    let (cert, key) = (files.cert.display(), files.key.display());
    let found = fs::symlink_metadata(&files.cert);
    if found.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Ok(Have::Nothing);
    }
    let identity = Identity::load(&files.cert, &files.key)
        .map_err(|problem| format!("{problem}; remove {cert} and {key} to enrol anew"))?;
    let certificate = identity.certificate;
    if certificate.common_name.as_deref() != Some(node) {
        return Err(format!(
            "{cert} is the certificate of `{}`, not of node `{node}`; remove it and {key} to enrol anew, or name other files in `tls`",
            certificate.name()
        ));
    }
    let days_left = certificate.days_left(now);
    Ok(Have::Certificate { days_left })
}

/// Whether the certificate that is there came from an authority other than this one, or this one is not trusted yet.
pub(super) fn is_of_another(files: &AgentTls, authority: Fingerprint) -> bool {
    let of = |known: &Certificate| known.fingerprint == authority;
    let trusted = Authorities::load(&files.ca).ok();
    let issuer = trusted.as_ref().and_then(|trusted| {
        let at = trusted.certificates.iter().position(of)?;
        trusted.der.get(at)
    });
    let own = Identity::load(&files.cert, &files.key).ok();
    let is_issued = issuer
        .zip(own.as_ref())
        .is_some_and(|(issuer, own)| is_issued_by(&own.chain[0], issuer));
    !is_issued
}

/// Whether the token's authority is still to be written. The error says that the file is there, and whom it trusts instead.
pub(super) fn lacks_authority(
    files: &AgentTls,
    keeper: Keeper,
    authority: Fingerprint,
) -> Result<bool, String> {
    let found = fs::symlink_metadata(&files.ca);
    if found.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Ok(true);
    }
    let of = |known: &Certificate| known.fingerprint == authority;
    let trusted = Authorities::load(&files.ca);
    match (trusted, keeper) {
        // Where it is among others already, those stay.
        (Ok(trusted), _) if trusted.certificates.iter().any(of) => Ok(false),
        (_, Keeper::Agent) => Ok(true),
        (Err(problem), Keeper::Operator) => Err(format!(
            "{problem}; it is not written over, move it away to enrol with this token"
        )),
        (Ok(_), Keeper::Operator) => Err(format!(
            "{ca}: the token's authority, {authority}, is not among those in it, and it is not written over; \
             add that authority's ca.pem to it, or move it away",
            ca = files.ca.display()
        )),
    }
}

/// The node's key: the one that is there, or a new one, on disk when this returns.
pub(super) fn key(path: &Path) -> Result<PrivateKey, FileProblem> {
    let is_there = fs::symlink_metadata(path).is_ok();
    if !is_there {
        if let Some(directory) = path.parent().filter(|parent| *parent != Path::new("")) {
            make_directory(directory)?;
        }
        let text = make_key().map_err(|error| {
            let fault = FileFault::NotWritten(std::io::Error::other(error.to_string()));
            FileProblem::new(path, fault)
        })?;
        place(&[NewFile {
            path: path.to_owned(),
            text: text.into_bytes(),
            mode: KEY_MODE,
        }])?;
    }
    read_key(path, Readers::OwnerOrRootsGroup)
}

pub(super) fn request(key: &PrivateKey, node: &str) -> Result<String, String> {
    request_for(key, node).map_err(|error| error.to_string())
}

/// Checks what the server answered, and keeps it: when this returns it survives a power cut.
pub(super) fn keep(
    files: &AgentTls,
    keeper: Keeper,
    enrolled: &Enrolled,
    key: PrivateKey,
    token: &EnrolmentToken,
) -> Result<Certificate, String> {
    let certificate = checked(enrolled, key, token)
        .map_err(|why| format!("the server's answer can't be used: {why}"))?;
    let lacks_authority = lacks_authority(files, keeper, token.authority())?;
    let keeping = || -> Result<(), FileProblem> {
        for path in [&files.ca, &files.cert] {
            if let Some(directory) = path.parent().filter(|parent| *parent != Path::new("")) {
                make_directory(directory)?;
            }
        }
        let new = |path: &Path, text: &str| NewFile {
            path: path.to_owned(),
            text: text.into(),
            mode: CERTIFICATE_MODE,
        };
        let authority = new(&files.ca, &enrolled.authority);
        match (lacks_authority, keeper) {
            (false, _) => {}
            (true, Keeper::Operator) => place(&[authority])?,
            (true, Keeper::Agent) => replace(&authority)?,
        }
        replace(&new(&files.cert, &enrolled.certificate))
    };
    keeping().map_err(|problem| problem.to_string())?;
    Ok(certificate)
}

/// The certificate, if it is for this node and this key, and of the authority that the token names.
fn checked(
    enrolled: &Enrolled,
    key: PrivateKey,
    token: &EnrolmentToken,
) -> Result<Certificate, String> {
    let authorities = Authorities::from_pem(enrolled.authority.as_bytes())
        .map_err(|fault| format!("its authority: {fault}"))?;
    let of = |known: &Certificate| known.fingerprint == token.authority();
    let Some(issuer) = authorities.certificates.iter().position(of) else {
        return Err(format!(
            "the token's authority, {}, is not among those in it",
            token.authority()
        ));
    };
    let identity = Identity::from_pem(enrolled.certificate.as_bytes(), key)
        .map_err(|fault| format!("its certificate: {fault}"))?;
    let certificate = identity.certificate;
    match () {
        () if certificate.common_name.as_deref() != Some(token.node()) => Err(format!(
            "its certificate is of `{}`, not of node `{}`",
            certificate.name(),
            token.node()
        )),
        () if !certificate.usages.client_auth => {
            Err(format!("its certificate is for {}", certificate.usages))
        }
        () if !is_issued_by(&identity.chain[0], &authorities.der[issuer]) => {
            Err("its certificate was not issued by the token's authority".to_owned())
        }
        () => Ok(certificate),
    }
}
