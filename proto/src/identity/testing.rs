//! What tests of identity share: files' contents without files, and a server that takes one connection.

use std::sync::Arc;

use fake_engine::authority::{Authority, Issued};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};

use super::dialling::{ConnectProblem, Trust, connect};
use super::listening::{AcceptProblem, Accepted, AgentsTls};
use super::{Authorities, Certificate, Identity};

pub fn identity(issued: &Issued) -> Identity {
    Identity {
        chain: vec![CertificateDer::from(issued.der.clone())],
        key: Arc::new(PrivateKeyDer::try_from(issued.key_der.clone()).unwrap()),
        certificate: Certificate::from_der(&issued.der).unwrap(),
    }
}

pub fn authorities(of: &[&Authority]) -> Authorities {
    let der: Vec<_> = of
        .iter()
        .map(|authority| CertificateDer::from(authority.der.clone()))
        .collect();
    Authorities {
        certificates: der
            .iter()
            .map(|der| Certificate::from_der(der).unwrap())
            .collect(),
        der,
    }
}

pub fn trust(of: &Authority) -> Trust {
    Trust::Authorities(authorities(&[of]))
}

/// A connected pair of sockets: the client's, the server's.
pub async fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (client, server) = tokio::join!(TcpStream::connect(address), listener.accept());
    (client.unwrap(), server.unwrap().0)
}

type Dialled = Result<tokio_rustls::client::TlsStream<TcpStream>, ConnectProblem>;

/// Both ends of one handshake.
pub async fn handshake(
    server: &AgentsTls,
    host: &str,
    trust: &Trust,
    identity: Option<&Identity>,
) -> (Dialled, Result<Accepted, AcceptProblem>) {
    let (client, accepted) = sockets().await;
    tokio::join!(
        connect(client, host, trust, identity),
        server.accept(accepted)
    )
}
