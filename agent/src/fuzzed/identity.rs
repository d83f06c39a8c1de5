//! What holds for any input of what is parsed before anybody knows who speaks: certificates, the files that hold them, signing requests, hosts, and
//! the first messages of a connection.

use std::fmt::Display;

use llmgw_proto::convert;
use llmgw_proto::identity::certificate::{Validity, is_issued_by};
use llmgw_proto::identity::{Authorities, Certificate, Fingerprint, Host, Moment, RequestedKey};
use llmgw_proto::session::{AgentMessage, is_node_id};
use llmgw_proto::text::hides;

use super::Target;

/// Every target by its name.
pub const TARGETS: [(&str, Target); 6] = [
    ("identity_pem", identity_pem),
    ("certificate", certificate),
    ("signing_request", signing_request),
    ("hosts", hosts),
    ("agent_message", agent_message),
    ("enrolment_question", enrolment_question),
];

/// A line of base64 in a key is longer than what may be repeated of a file.
const REPEATED_MAX_BYTES: usize = 32;
/// SubjectPublicKeyInfo of a P-256 key.
const PUBLIC_KEY_BYTES: usize = 91;
/// A certificate's name is cut before it is shown.
const NAME_MAX_CHARS: usize = 257;

/// A file of trusted authorities.
pub fn identity_pem(data: &[u8]) {
    match Authorities::from_pem(data) {
        Ok(authorities) => {
            assert!(!authorities.der.is_empty());
            assert_eq!(authorities.certificates.len(), authorities.der.len());
            for (facts, der) in authorities.certificates.iter().zip(&authorities.der) {
                assert!(facts.is_authority);
                assert_eq!(Certificate::from_der(der).as_ref(), Ok(facts));
            }
        }
        Err(fault) => {
            let said = said(&fault);
            // The file may hold a key.
            let text = String::from_utf8_lossy(data);
            let mut lines = text.lines().filter(|line| line.len() > REPEATED_MAX_BYTES);
            assert!(lines.all(|line| !said.contains(line)), "{said}");
        }
    }
}

/// What a peer shows.
pub fn certificate(data: &[u8]) {
    let facts = match Certificate::from_der(data) {
        Ok(facts) => facts,
        Err(problem) => {
            said(&problem);
            return;
        }
    };
    assert_eq!(facts.fingerprint, Fingerprint::of(data));
    assert_eq!(facts.fingerprint.to_string().parse(), Ok(facts.fingerprint));
    assert_eq!(facts.serial.to_string().parse(), Ok(facts.serial.clone()));
    let hosts = facts.hosts.iter().map(Host::to_string);
    let names = hosts.chain([
        facts.subject.clone(),
        facts.issuer.clone(),
        facts.name().to_owned(),
    ]);
    for name in names {
        assert!(!name.contains(hides), "{name:?}");
        assert!(name.chars().count() <= NAME_MAX_CHARS, "{name}");
    }
    for now in [
        facts.not_before,
        facts.not_after,
        Moment(i64::MIN),
        Moment(i64::MAX),
    ] {
        let is_over = facts.validity(now) == Validity::Expired;
        assert!(!is_over || facts.days_left(now) < 0 || now < facts.not_before);
    }
    let _ = (facts.hosts_shown(), is_issued_by(data, data));
}

/// What an agent sends at its enrolment.
pub fn signing_request(data: &[u8]) {
    match RequestedKey::from_request(data) {
        Ok(key) => {
            assert_eq!(key.der().len(), PUBLIC_KEY_BYTES);
            let is_there = data.windows(PUBLIC_KEY_BYTES).any(|part| part == key.der());
            assert!(is_there, "the key is the one that was sent");
        }
        Err(problem) => {
            said(&problem);
        }
    }
}

/// Each line is a host.
pub fn hosts(data: &[u8]) {
    for line in String::from_utf8_lossy(data).lines() {
        match line.parse::<Host>() {
            Ok(host) => {
                let shown = host.to_string();
                assert!(!shown.contains(hides) && !shown.contains(['/', ' ', ',']));
                assert_eq!(shown.parse().as_ref(), Ok(&host));
                assert!(host.covers(&host) || shown.starts_with("*."));
            }
            Err(problem) => {
                said(&problem);
            }
        }
    }
}

/// The first words of a connection, from whoever opened it.
pub fn agent_message(data: &[u8]) {
    match convert::read_up(data) {
        Ok(framed) => {
            if let AgentMessage::Register(register) = framed.message {
                assert!(!register.node.is_empty() && !register.advertise.is_empty());
                assert!(register.ports.first <= register.ports.last);
            }
        }
        Err(problem) => {
            said(&problem);
        }
    }
}

/// A question for a certificate, from whoever has no certificate.
pub fn enrolment_question(data: &[u8]) {
    match convert::read_question(data) {
        Ok(question) => {
            assert!(is_node_id(question.token.node()) && !question.signing_request.is_empty());
            let shown = format!("{question:?}");
            let token = question.token.expose();
            let secret = &token[token.len() - 97..token.len() - 65];
            // Where it stands in another field, too, that is not ours.
            let is_elsewhere = [&question.node, &question.signing_request]
                .iter()
                .any(|text| text.contains(secret));
            assert!(is_elsewhere || !shown.contains(secret));
        }
        Err(problem) => {
            said(&problem);
        }
    }
}

/// A message of one line.
fn said(problem: &impl Display) -> String {
    let text = problem.to_string();
    assert!(!text.is_empty() && !text.contains(hides), "{text:?}");
    text
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::super::checks;
    use super::*;

    fn recordings() -> Vec<PathBuf> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/recordings/identity");
        let entries = std::fs::read_dir(root).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn what_must_hold_holds_for_every_recording_whole_and_cut_off() {
        checks::hold_for(&TARGETS, &recordings());
    }

    #[test]
    fn each_recording_is_what_its_name_says() {
        let (mut read, mut refused) = (0, 0);
        for path in recordings() {
            let bytes = std::fs::read(&path).unwrap();
            let name = path.file_name().unwrap().to_str().unwrap();
            let is_read = match name.split_once('-').unwrap().0 {
                "authorities" => Authorities::from_pem(&bytes).is_ok(),
                "certificate" => Certificate::from_der(&bytes).is_ok(),
                "request" => RequestedKey::from_request(&bytes).is_ok(),
                "hosts" => continue,
                "message" => convert::read_up(&bytes).is_ok(),
                "question" => convert::read_question(&bytes).is_ok(),
                other => panic!("{other}: no target reads it"),
            };
            assert_eq!(is_read, !name.contains("refused"), "{name}");
            *(if is_read { &mut read } else { &mut refused }) += 1;
        }
        assert!(read >= 6 && refused >= 5, "{read} {refused}");
    }

    #[test]
    fn every_target_has_its_file_in_the_fuzz_crate() {
        checks::are_in_the_fuzz_crate(&TARGETS);
    }
}
