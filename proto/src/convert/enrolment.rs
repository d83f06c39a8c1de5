//! Enrolment: the question up, the answer down.

use super::{Result, missing, named, sentence, within};
use crate::enrolment::{Enrolled, EnrolmentRefusal, EnrolmentRefusalCode, EnrolmentRequest};
use crate::identity::token::NoToken;
use crate::wire;
use crate::wire::error::{WireError, WireProblem};

pub(crate) fn request_out(request: &EnrolmentRequest) -> wire::EnrollRequest {
    wire::EnrollRequest {
        token: request.token.expose(),
        node: request.node.clone(),
        signing_request: request.signing_request.clone(),
    }
}

pub(crate) fn request_in(request: wire::EnrollRequest) -> Result<EnrolmentRequest> {
    let read = |request: wire::EnrollRequest| {
        let token = named(request.token, "token")?;
        let garbled = |why: String| WireError::at("token", WireProblem::Garbled(why));
        Ok(EnrolmentRequest {
            token: token
                .parse()
                .map_err(|error: NoToken| garbled(error.to_string()))?,
            node: named(request.node, "node")?,
            signing_request: named(request.signing_request, "signing_request")?,
        })
    };
    read(request).map_err(within("enroll"))
}

pub(crate) fn answer_out(
    answer: std::result::Result<Enrolled, EnrolmentRefusal>,
) -> wire::EnrollResponse {
    match answer {
        Ok(enrolled) => wire::EnrollResponse {
            certificate: enrolled.certificate,
            authority: enrolled.authority,
            refused: None,
        },
        Err(refusal) => wire::EnrollResponse {
            refused: Some(wire::EnrollRefused {
                code: code_out(refusal.code).into(),
                message: sentence(&refusal.message),
            }),
            ..wire::EnrollResponse::default()
        },
    }
}

pub(crate) fn answer_in(
    answer: wire::EnrollResponse,
) -> Result<std::result::Result<Enrolled, EnrolmentRefusal>> {
    if let Some(refused) = answer.refused {
        return Ok(Err(EnrolmentRefusal {
            code: code_in(refused.code),
            message: refused.message,
        }));
    }
    let pem = |text: String, field: &str| match text.is_empty() {
        true => Err(missing(field)).map_err(within("enroll")),
        false => Ok(text),
    };
    Ok(Ok(Enrolled {
        certificate: pem(answer.certificate, "certificate")?,
        authority: pem(answer.authority, "authority")?,
    }))
}

fn code_out(code: EnrolmentRefusalCode) -> wire::EnrollRefusalCode {
    match code {
        EnrolmentRefusalCode::Off => wire::EnrollRefusalCode::Off,
        EnrolmentRefusalCode::Plaintext => wire::EnrollRefusalCode::Plaintext,
        EnrolmentRefusalCode::Unreadable => wire::EnrollRefusalCode::Unreadable,
        EnrolmentRefusalCode::OtherNode => wire::EnrollRefusalCode::OtherNode,
        EnrolmentRefusalCode::UnknownToken => wire::EnrollRefusalCode::UnknownToken,
        EnrolmentRefusalCode::Expired => wire::EnrollRefusalCode::Expired,
        EnrolmentRefusalCode::Used => wire::EnrollRefusalCode::Used,
        EnrolmentRefusalCode::Failed => wire::EnrollRefusalCode::Failed,
        EnrolmentRefusalCode::RevokedKey => wire::EnrollRefusalCode::RevokedKey,
        EnrolmentRefusalCode::Other => wire::EnrollRefusalCode::Unspecified,
    }
}

/// A reason that this version has no word for is one that does not pass.
fn code_in(code: i32) -> EnrolmentRefusalCode {
    match wire::EnrollRefusalCode::try_from(code) {
        Ok(wire::EnrollRefusalCode::Off) => EnrolmentRefusalCode::Off,
        Ok(wire::EnrollRefusalCode::Plaintext) => EnrolmentRefusalCode::Plaintext,
        Ok(wire::EnrollRefusalCode::Unreadable) => EnrolmentRefusalCode::Unreadable,
        Ok(wire::EnrollRefusalCode::OtherNode) => EnrolmentRefusalCode::OtherNode,
        Ok(wire::EnrollRefusalCode::UnknownToken) => EnrolmentRefusalCode::UnknownToken,
        Ok(wire::EnrollRefusalCode::Expired) => EnrolmentRefusalCode::Expired,
        Ok(wire::EnrollRefusalCode::Used) => EnrolmentRefusalCode::Used,
        Ok(wire::EnrollRefusalCode::Failed) => EnrolmentRefusalCode::Failed,
        Ok(wire::EnrollRefusalCode::RevokedKey) => EnrolmentRefusalCode::RevokedKey,
        Ok(wire::EnrollRefusalCode::Unspecified) | Err(_) => EnrolmentRefusalCode::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::{EnrolmentToken, Fingerprint};

    fn request() -> EnrolmentRequest {
        EnrolmentRequest {
            token: EnrolmentToken::new("n1", [0xab; 16], Fingerprint([0xcd; 32])).unwrap(),
            node: "n1".to_owned(),
            signing_request: "pem".to_owned(),
        }
    }

    #[test]
    fn a_request_arrives_as_it_left() {
        assert_eq!(request_in(request_out(&request())), Ok(request()));
    }

    #[test]
    fn a_request_that_lacks_a_part_or_holds_no_token_names_the_field_and_not_the_token() {
        let sent = || request_out(&request());
        for (request, said) in [
            (
                wire::EnrollRequest {
                    token: String::new(),
                    ..sent()
                },
                "`enroll.token` is missing",
            ),
            (
                wire::EnrollRequest {
                    token: sent().token[1..].to_owned(),
                    ..sent()
                },
                "`enroll.token` is garbled: that is no token: it does not begin with `llmgw1.`",
            ),
            (
                wire::EnrollRequest {
                    node: String::new(),
                    ..sent()
                },
                "`enroll.node` is missing",
            ),
            (
                wire::EnrollRequest {
                    signing_request: String::new(),
                    ..sent()
                },
                "`enroll.signing_request` is missing",
            ),
        ] {
            let error = request_in(request).unwrap_err().to_string();
            assert!(error.starts_with(said), "{error}");
            assert!(!error.contains("abab"), "{error}");
        }
    }

    #[test]
    fn an_answer_is_both_certificates_or_a_refusal_with_its_code() {
        let enrolled = Enrolled {
            certificate: "one".to_owned(),
            authority: "two".to_owned(),
        };
        let answer = answer_in(answer_out(Ok(enrolled.clone())));
        assert_eq!(answer, Ok(Ok(enrolled)));
        for code in [
            EnrolmentRefusalCode::Off,
            EnrolmentRefusalCode::Plaintext,
            EnrolmentRefusalCode::Unreadable,
            EnrolmentRefusalCode::OtherNode,
            EnrolmentRefusalCode::UnknownToken,
            EnrolmentRefusalCode::Expired,
            EnrolmentRefusalCode::Used,
            EnrolmentRefusalCode::Failed,
            EnrolmentRefusalCode::RevokedKey,
            EnrolmentRefusalCode::Other,
        ] {
            let refusal = EnrolmentRefusal {
                code,
                message: "why".to_owned(),
            };
            let answer = answer_in(answer_out(Err(refusal.clone())));
            assert_eq!(answer, Ok(Err(refusal)));
            assert_eq!(code.passes(), code == EnrolmentRefusalCode::Failed);
        }
        let newer = wire::EnrollResponse {
            refused: Some(wire::EnrollRefused {
                code: 99,
                message: String::new(),
            }),
            ..wire::EnrollResponse::default()
        };
        let refusal = answer_in(newer).unwrap().unwrap_err();
        assert_eq!(refusal.code, EnrolmentRefusalCode::Other);
        let empty = answer_in(wire::EnrollResponse::default()).unwrap_err();
        assert_eq!(empty.to_string(), "`enroll.certificate` is missing");
    }
}
