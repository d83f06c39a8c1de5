//! What the files of one listener hold, checked whole.

use std::path::PathBuf;
use std::sync::Arc;

use llmgw_proto::identity::certificate::Validity;
use llmgw_proto::identity::listening::AgentsTls;
use llmgw_proto::identity::problem::make_server;
use llmgw_proto::identity::verdict::NoJudge;
use llmgw_proto::identity::{Authorities, Certificate, FileProblem, Identity, Moment};
use rustls::crypto::aws_lc_rs;
use rustls::sign::CertifiedKey;

use super::{TlsListener, Use};

/// A certificate with its chain and key, and the authorities that are asked for.
#[derive(Clone)]
pub struct Material {
    pub identity: Identity,
    /// What is in the certificates that follow its own.
    pub between: Vec<Certificate>,
    pub authorities: Option<Authorities>,
    /// The identity, as rustls shows it.
    pub(super) certified: Arc<CertifiedKey>,
}

/// Why the files can't be used.
#[derive(Debug)]
pub enum MaterialProblem {
    File(FileProblem),
    /// It is for clients only.
    NotForServers(PathBuf, Box<Certificate>),
    /// An authority's own certificate, where agents expect a server's.
    Authority(PathBuf, Box<Certificate>),
    /// It, or what belongs to it, can't serve agents.
    Agents(PathBuf, NoJudge),
    /// rustls has another opinion of the key than we.
    Tls(PathBuf, rustls::Error),
    /// What is in force is valid, and this is not now.
    Dates {
        file: PathBuf,
        new: Box<Certificate>,
        in_force_until: Moment,
    },
}

impl Material {
    /// Reads all files of a listener, and checks that they belong together and can serve there.
    pub fn read(listener: &TlsListener) -> Result<Material, MaterialProblem> {
        let files = &listener.files;
        let identity = Identity::load(&files.cert, &files.key)?;
        let certificate = &identity.certificate;
        if !certificate.usages.server_auth {
            let certificate = Box::new(certificate.clone());
            return Err(MaterialProblem::NotForServers(
                files.cert.clone(),
                certificate,
            ));
        }
        if listener.serves == Use::Agents && certificate.is_authority {
            let certificate = Box::new(certificate.clone());
            return Err(MaterialProblem::Authority(files.cert.clone(), certificate));
        }
        let authorities = files.ca.as_deref().map(Authorities::load).transpose()?;
        if listener.serves == Use::Agents {
            // What it is made of again when it is shown, where nobody could be told.
            AgentsTls::new(identity.clone(), authorities.clone())
                .map_err(|why| MaterialProblem::Agents(files.cert.clone(), why))?;
        }
        let signing = aws_lc_rs::sign::any_supported_type(&identity.key)
            .map_err(|error| MaterialProblem::Tls(files.key.clone(), error))?;
        let certified = Arc::new(CertifiedKey::new(identity.chain.clone(), signing));
        let between = identity.chain.iter().skip(1);
        let between = between.filter_map(|der| Certificate::from_der(der).ok());
        Ok(Material {
            between: between.collect(),
            identity,
            authorities,
            certified,
        })
    }

    pub fn certificate(&self) -> &Certificate {
        &self.identity.certificate
    }

    /// Whether nothing that matters differs.
    pub fn is_same(&self, other: &Material) -> bool {
        let of = |material: &Material| material.authorities.as_ref().map(|all| all.der.clone());
        self.identity.chain == other.identity.chain
            && self.identity.key.secret_der() == other.identity.key.secret_der()
            && of(self) == of(other)
    }

    /// Whether somebody whom the other one trusts is not trusted here.
    pub fn lacks_authority_of(&self, other: &Material) -> bool {
        let of = |material: &Material| material.authorities.as_ref().map(|all| all.der.clone());
        let (own, others) = (of(self).unwrap_or_default(), of(other).unwrap_or_default());
        others.iter().any(|der| !own.contains(der))
    }

    /// Whether it may take the place of what is in force: a certificate that nobody takes does not drive out a valid one.
    pub fn may_follow(
        &self,
        in_force: &Material,
        listener: &TlsListener,
        now: Moment,
    ) -> Result<(), MaterialProblem> {
        let is_valid =
            |material: &Material| material.certificate().validity(now) == Validity::Current;
        if is_valid(self) || !is_valid(in_force) {
            return Ok(());
        }
        Err(MaterialProblem::Dates {
            file: listener.files.cert.clone(),
            new: Box::new(self.certificate().clone()),
            in_force_until: in_force.certificate().not_after,
        })
    }
}

impl From<FileProblem> for MaterialProblem {
    fn from(problem: FileProblem) -> MaterialProblem {
        MaterialProblem::File(problem)
    }
}

impl std::fmt::Display for MaterialProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MaterialProblem::File(problem) => problem.fmt(f),
            MaterialProblem::NotForServers(file, certificate) => write!(
                f,
                "{}: the certificate of `{}` is for {}, so no client takes it from a server; {} makes a server's",
                file.display(),
                certificate.name(),
                certificate.usages,
                make_server(&certificate.hosts, "HOST")
            ),
            MaterialProblem::Authority(file, certificate) => write!(
                f,
                "{}: this is the authority's own certificate (`{}`), which no agent takes from a server and whose key belongs on another machine; {} makes a server's",
                file.display(),
                certificate.name(),
                make_server(&certificate.hosts, "HOST")
            ),
            MaterialProblem::Agents(file, why) => {
                write!(f, "{}: it can't be shown to agents: {why}", file.display())
            }
            MaterialProblem::Tls(file, error) => {
                write!(f, "{}: TLS can't use this key: {error}", file.display())
            }
            MaterialProblem::Dates {
                file,
                new,
                in_force_until,
            } => write!(
                f,
                "{}: its certificate is valid from {} to {}, which by this machine's clock is not now; the one in force is valid until {in_force_until}",
                file.display(),
                new.not_before,
                new.not_after
            ),
        }
    }
}

impl std::error::Error for MaterialProblem {}
