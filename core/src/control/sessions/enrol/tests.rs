//! Questions for a certificate as they come in.

use std::collections::BTreeSet;

use fake_engine::authority::Authority;
use llmgw_proto::identity::listening::AgentsTls;
use llmgw_proto::identity::{Certificate, EnrolmentToken, Fingerprint, Identity};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::*;
use crate::control::enrolment::LIFETIME_DEFAULT;
use crate::control::enrolment::tests::{Fake, State};
use crate::control::sessions::Door;

fn plain() -> Gate {
    Gate::new(Door::Plain, false, BTreeSet::new())
}

fn tls() -> Gate {
    let issued = Authority::new("fleet").server(&["127.0.0.1"]);
    let identity = Identity {
        chain: vec![CertificateDer::from(issued.der.clone())],
        key: Arc::new(PrivateKeyDer::try_from(issued.key_der.clone()).unwrap()),
        certificate: Certificate::from_der(&issued.der).unwrap(),
    };
    let tls = AgentsTls::new(identity, None).unwrap();
    Gate::new(Door::Tls(Arc::new(tls)), true, BTreeSet::new())
}

fn asks(token: EnrolmentToken, node: &str) -> Result<EnrolmentRequest, WireError> {
    Ok(EnrolmentRequest {
        token,
        node: node.to_owned(),
        signing_request: "a".to_owned(),
    })
}

async fn asked(
    enrolment: Option<&Arc<Enrolment>>,
    asked: Result<EnrolmentRequest, WireError>,
    gate: &Gate,
) -> Result<Enrolled, &'static str> {
    let address = SocketAddr::from(([10, 0, 0, 1], 1));
    let answered = answer(enrolment, asked, address, gate).await;
    answered.map_err(|refusal| refusal.code.as_str())
}

#[tokio::test]
async fn a_token_is_turned_into_a_certificate_over_tls_only() {
    let (state, authority) = (State::new(), Arc::new(Fake::default()));
    let enrolment = Arc::new(state.server(&authority));
    let issued = enrolment.issue("n1", LIFETIME_DEFAULT, UtcTime::now());
    let token = issued.unwrap().token;
    let enrolment = Some(&enrolment);
    let plaintext = asked(enrolment, asks(token.clone(), "n1"), &plain()).await;
    assert_eq!(plaintext, Err("plaintext"));
    let other = asked(enrolment, asks(token.clone(), "n2"), &tls()).await;
    assert_eq!(other, Err("other_node"));
    let odd = asked(enrolment, asks(token.clone(), "n1\nn2"), &tls()).await;
    assert_eq!(odd, Err("unreadable_request"));
    let enrolled = asked(enrolment, asks(token, "n1"), &tls()).await;
    assert_eq!(enrolled.unwrap().certificate, "n1 a");
}

#[tokio::test]
async fn where_nobody_signs_and_where_nothing_was_asked_says_so() {
    let token = EnrolmentToken::new("n1", [1; 16], Fingerprint([2; 32])).unwrap();
    assert_eq!(
        asked(None, asks(token, "n1"), &tls()).await,
        Err("enrolment_off")
    );
    let error = WireError {
        field: "enroll.token".to_owned(),
        problem: llmgw_proto::wire::error::WireProblem::Missing,
    };
    assert_eq!(
        asked(None, Err(error), &tls()).await,
        Err("unreadable_request")
    );
}
