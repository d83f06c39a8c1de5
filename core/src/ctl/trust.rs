//! Whose word an admin address needs over TLS: an authority whose file the operator names, and nobody else's.

use std::fmt;
use std::path::{Path, PathBuf};

use llmgw_proto::identity::dialling::{ConnectProblem, Trust, connect_speaking};
use llmgw_proto::identity::problem::{CertificateProblem, of_server};
use llmgw_proto::identity::{Authorities, Certificate, FileProblem};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// The admin address speaks no other.
const PROTOCOL: &[u8] = b"http/1.1";

/// The authority that issued the server's certificate.
pub struct Authority {
    file: PathBuf,
    trust: Trust,
}

/// Why whoever answers is not talked to.
#[derive(Debug)]
pub struct NotTrusted {
    /// Of the authority.
    file: PathBuf,
    problem: ConnectProblem,
}

impl Authority {
    pub fn load(file: &Path) -> Result<Authority, FileProblem> {
        Ok(Authority {
            file: file.to_owned(),
            trust: Trust::Authorities(Authorities::load(file)?),
        })
    }

    /// Shakes hands with a server whose certificate is for this host. The caller limits how long that takes.
    pub async fn shake(
        &self,
        stream: TcpStream,
        host: &str,
    ) -> Result<TlsStream<TcpStream>, NotTrusted> {
        connect_speaking(PROTOCOL, stream, host, &self.trust, None)
            .await
            .map_err(|problem| NotTrusted {
                file: self.file.clone(),
                problem,
            })
    }
}

impl fmt::Display for NotTrusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.display();
        match &self.problem {
            ConnectProblem::Certificate {
                certificate,
                problem: CertificateProblem::UnknownAuthority { shown, known },
            } => {
                let known: Vec<String> = known.iter().map(ToString::to_string).collect();
                let shown = shown.map_or_else(
                    || "whose certificate was not sent".to_owned(),
                    |shown| shown.to_string(),
                );
                write!(
                    f,
                    "the certificate there ({}) was issued by `{}` ({shown}), and {file} holds {}; \
                     give the ca.pem of that server's authority with --admin-ca FILE or LLMGW_ADMIN_CA",
                    numbers(certificate),
                    certificate.issuer,
                    known.join(", ")
                )
            }
            ConnectProblem::Certificate {
                certificate,
                problem,
            } => write!(
                f,
                "{} (it is {})",
                of_server(certificate, problem),
                described(certificate)
            ),
            ConnectProblem::Own(why) => write!(f, "{file} can't be used: {why}"),
            ConnectProblem::NoTls => f.write_str(
                "no TLS is spoken there: write http://, or give `admin` in the server's configuration its `tls`",
            ),
            ConnectProblem::HungUp => f.write_str(
                "the connection ended in the middle of the TLS handshake; is this the server's admin address?",
            ),
            other => other.fmt(f),
        }
    }
}

/// Which certificate it is, for who wants to find it.
fn described(certificate: &Certificate) -> String {
    format!(
        "for {}, {}",
        certificate.hosts_shown(),
        numbers(certificate)
    )
}

/// All that is repeated of a certificate that nobody vouches for.
fn numbers(certificate: &Certificate) -> String {
    format!("serial {}, {}", certificate.serial, certificate.fingerprint)
}
