//! The certificates that this server shows and trusts: read and judged before anything listens, and kept fresh while it runs.
//!
//! [`TlsListener`] is a listener with TLS and its files, [`Material`] what they hold. [`Certificates`] keeps the last good
//! material of each listener and follows the files; [`Port`] is where clients shake hands over it. Connections that are
//! open keep what they were made with.

mod expiry;
mod fit;
mod kept;
mod material;
mod port;
mod trial;

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::config::Config;

pub use expiry::{Ends, Owner};
pub use kept::{Certificates, Clock, Held, Nodes, Shows, Staged};
pub use material::Material;
pub use port::{Port, Shown};

/// What a certificate is shown for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    Listen,
    Admin,
    Agents,
}

/// A listener with TLS, as it is configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsListener {
    pub serves: Use,
    pub address: SocketAddr,
    pub files: Files,
}

/// PEM files that are read together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Who issues the certificates of those who connect.
    pub ca: Option<PathBuf>,
}

/// A listener, and what its files held.
pub struct Opened {
    pub listener: TlsListener,
    pub material: Material,
}

impl Use {
    /// In metrics and in the status.
    pub fn as_str(self) -> &'static str {
        match self {
            Use::Listen => "listen",
            Use::Admin => "admin",
            Use::Agents => "agents",
        }
    }

    /// Where the configuration names the files.
    pub fn key(self) -> &'static str {
        match self {
            Use::Listen => "listen.tls",
            Use::Admin => "admin.tls",
            Use::Agents => "agents.tls",
        }
    }
}

impl TlsListener {
    /// All listeners with TLS.
    pub fn all(config: &Config) -> Vec<TlsListener> {
        let mut listeners = Vec::new();
        let clients = (Use::Listen, config.listen.address, &config.listen.tls);
        let operators = (Use::Admin, config.admin.address, &config.admin.tls);
        for (serves, address, tls) in [clients, operators] {
            listeners.extend(tls.as_ref().map(|tls| TlsListener {
                serves,
                address,
                files: Files {
                    cert: tls.cert.clone(),
                    key: tls.key.clone(),
                    ca: None,
                },
            }));
        }
        let agents = config.agents.as_ref();
        let agents = agents.and_then(|agents| Some((agents.address, agents.tls.as_ref()?)));
        listeners.extend(agents.map(|(address, tls)| TlsListener {
            serves: Use::Agents,
            address,
            files: Files {
                cert: tls.cert.clone(),
                key: tls.key.clone(),
                ca: tls.ca.clone(),
            },
        }));
        listeners
    }
}

/// Reads the files of every listener with TLS.
///
/// # Errors
/// What is wrong with the first one that can't be used.
pub fn open(config: &Config) -> Result<Vec<Opened>, String> {
    let open = |listener: TlsListener| match Material::read(&listener) {
        Ok(material) => Ok(Opened { listener, material }),
        Err(problem) => Err(format!("`{}`: {problem}", listener.serves.key())),
    };
    TlsListener::all(config).into_iter().map(open).collect()
}

impl Opened {
    /// What can be used and is probably not meant: one sentence each. Their ends are not among them ([`expiry`]).
    pub fn remarks(&self) -> Vec<String> {
        fit::remarks(&self.listener, &self.material.identity.certificate)
    }

    /// The ends of what is shown and trusted here.
    pub fn ends(&self) -> Vec<Ends> {
        expiry::certificates(&self.listener, &self.material)
            .map(|(owner, certificate)| Ends::of(owner, certificate))
            .collect()
    }
}

#[cfg(test)]
pub(crate) mod tests;
