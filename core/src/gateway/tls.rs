//! TLS for clients: one certificate, HTTP/2 or HTTP/1.1 as the client prefers.

use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::config::TlsFiles;

/// What is wrong with a certificate or its key, and in which file.
#[derive(Debug)]
pub struct TlsError(String);

impl std::fmt::Display for TlsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TlsError {}

/// Reads the certificate chain and the key, and checks that they belong together.
pub fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, TlsError> {
    let chain = CertificateDer::pem_file_iter(&files.cert)
        .and_then(|certificates| certificates.collect::<Result<Vec<_>, _>>())
        .map_err(|error| unreadable(&files.cert, "certificate", &error))?;
    if chain.is_empty() {
        return Err(TlsError(format!(
            "{}: there is no certificate in it; it should begin with `-----BEGIN CERTIFICATE-----`",
            files.cert.display()
        )));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| unreadable(&files.key, "private key", &error))?;
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| {
            TlsError(format!(
                "{} and {} can't be used together: {error}",
                files.cert.display(),
                files.key.display()
            ))
        })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn unreadable(path: &Path, what: &str, error: &rustls::pki_types::pem::Error) -> TlsError {
    TlsError(format!(
        "{}: the {what} can't be read: {error}",
        path.display()
    ))
}
