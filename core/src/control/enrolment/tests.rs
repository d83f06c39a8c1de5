//! A server's tokens over their whole life, with an authority that signs nothing real.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use llmgw_proto::identity::placing::{KEY_MODE, NewFile, make_directory, place};
use llmgw_proto::identity::{Certificate, Moment};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::*;
use crate::authority::{MadeAuthority, make};

const NOW: UtcTime = UtcTime(1_796_000_000);

/// A state directory, removed when dropped.
pub(crate) struct State(PathBuf);

impl State {
    pub(crate) fn new() -> State {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-enrolling-{}-{number}", std::process::id());
        State(std::env::temp_dir().join(name))
    }

    /// A server on it, as after a start.
    pub(crate) fn server(&self, authority: &Arc<Fake>) -> Enrolment {
        let enrolment = Enrolment::open(&self.0, authority.leads.clone()).unwrap();
        enrolment.set_signing(Some(authority.clone()));
        enrolment
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Takes any text for a request, whose first byte is its key.
pub(crate) struct Fake {
    fails: AtomicBool,
    signed: Arc<AtomicU32>,
    /// How often the authority was replaced by another one.
    replaced: AtomicU32,
    leads: Leads,
}

impl Default for Fake {
    fn default() -> Fake {
        Fake {
            fails: AtomicBool::default(),
            signed: Arc::default(),
            replaced: AtomicU32::default(),
            leads: Arc::new(|_| true),
        }
    }
}

struct FakeSigner {
    fingerprint: Fingerprint,
    fails: bool,
    signed: Arc<AtomicU32>,
}

impl Signing for Fake {
    fn authority(&self) -> Result<Box<dyn Signer>, String> {
        let number = self.replaced.load(Ordering::Relaxed);
        Ok(Box::new(FakeSigner {
            fingerprint: Fingerprint([9 + number as u8; 32]),
            fails: self.fails.load(Ordering::Relaxed),
            signed: self.signed.clone(),
        }))
    }

    fn requested_key(&self, request: &str) -> Result<KeyDigest, String> {
        let key = request.bytes().next();
        Ok(KeyDigest([key.ok_or("there is nothing in it")?; 32]))
    }
}

impl Signer for FakeSigner {
    fn trusted(&self) -> Trusted {
        Trusted {
            fingerprint: self.fingerprint,
            pem: "authority".to_owned(),
        }
    }

    fn sign(&self, node: &str, request: &str) -> Result<Certified, String> {
        if self.fails {
            return Err("its key is gone".to_owned());
        }
        let serial = self.signed.fetch_add(1, Ordering::Relaxed).to_string();
        Ok(Certified {
            certificate: format!("{node} {request}"),
            serial,
            not_after: String::new(),
        })
    }
}

fn asks(issued: &Issued, key: &str) -> EnrolmentRequest {
    EnrolmentRequest {
        token: issued.token.clone(),
        node: issued.token.node().to_owned(),
        signing_request: key.to_owned(),
    }
}

fn code(answer: Result<Signed, EnrolmentRefusal>) -> &'static str {
    answer.unwrap_err().code.as_str()
}

#[test]
fn a_token_becomes_a_certificate_for_one_key_also_after_a_restart() {
    let (state, fake) = (State::new(), Arc::new(Fake::default()));
    let issued = state
        .server(&fake)
        .issue("gpu-01", LIFETIME_DEFAULT, NOW)
        .unwrap();
    assert_eq!(issued.expires, UtcTime(NOW.0 + 3_600));
    assert_eq!(issued.token.authority(), Fingerprint([9; 32]));
    let server = state.server(&fake);
    let signed = server.enrol(&asks(&issued, "a"), NOW).unwrap();
    assert_eq!(signed.certified.certificate, "gpu-01 a");
    assert_eq!(signed.certified.serial, "0");
    // The answer was lost, and the server killed.
    let server = state.server(&fake);
    let again = server.enrol(&asks(&issued, "a"), NOW).unwrap();
    assert_eq!(again, signed, "not a second certificate");
    assert_eq!(code(server.enrol(&asks(&issued, "b"), NOW)), "used_token");
    let later = UtcTime(NOW.0 + 3_600);
    let refused = server.enrol(&asks(&issued, "a"), later);
    assert_eq!(code(refused), "expired_token");
    assert_eq!(fake.signed.load(Ordering::Relaxed), 1);
}

#[test]
fn a_key_whose_certificate_was_revoked_gets_none_with_a_new_token_also_after_a_restart() {
    let (state, fake) = (State::new(), Arc::new(Fake::default()));
    let server = state.server(&fake);
    let first = server.issue("gpu-01", LIFETIME_DEFAULT, NOW).unwrap();
    let signed = server.enrol(&asks(&first, "a"), NOW).unwrap();
    let server = state.server(&fake);
    let denied: Serial = signed.certified.serial.parse().unwrap();
    server.deny([denied].into());
    assert_eq!(code(server.enrol(&asks(&first, "a"), NOW)), "revoked_key");
    let second = server.issue("gpu-01", LIFETIME_DEFAULT, NOW).unwrap();
    assert_eq!(code(server.enrol(&asks(&second, "a"), NOW)), "revoked_key");
    assert_eq!(fake.signed.load(Ordering::Relaxed), 1);
    // The token is not used up by that.
    server.enrol(&asks(&second, "b"), NOW).unwrap();
}

#[test]
fn two_tokens_differ_and_each_replaces_the_one_before_it() {
    let (state, fake) = (State::new(), Arc::new(Fake::default()));
    let server = state.server(&fake);
    let issue = || server.issue("n", LIFETIME_DEFAULT, NOW).unwrap();
    let (old, new) = (issue(), issue());
    assert_ne!(old.token, new.token);
    assert_eq!(code(server.enrol(&asks(&old, "a"), NOW)), "unknown_token");
    assert!(server.enrol(&asks(&new, "a"), NOW).is_ok());
}

#[test]
fn a_request_that_proves_no_key_uses_nothing_up() {
    let (state, fake) = (State::new(), Arc::new(Fake::default()));
    let server = state.server(&fake);
    let issued = server.issue("n", LIFETIME_DEFAULT, NOW).unwrap();
    let refusal = server.enrol(&asks(&issued, ""), NOW).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "unreadable_request: there is nothing in it"
    );
    assert!(server.enrol(&asks(&issued, "a"), NOW).is_ok());
}

#[test]
fn a_node_that_claims_another_id_than_its_tokens_is_refused() {
    let (state, fake) = (State::new(), Arc::new(Fake::default()));
    let server = state.server(&fake);
    let issued = server.issue("n1", LIFETIME_DEFAULT, NOW).unwrap();
    let request = EnrolmentRequest {
        node: "n2".to_owned(),
        ..asks(&issued, "a")
    };
    assert_eq!(code(server.enrol(&request, NOW)), "other_node");
}

#[test]
fn an_authority_that_fails_uses_nothing_up() {
    let (state, fake) = (State::new(), Arc::new(Fake::default()));
    let server = state.server(&fake);
    let issued = server.issue("n", LIFETIME_DEFAULT, NOW).unwrap();
    fake.fails.store(true, Ordering::Relaxed);
    let refusal = server.enrol(&asks(&issued, "a"), NOW).unwrap_err();
    assert_eq!(refusal.code, EnrolmentRefusalCode::Failed);
    assert!(refusal.code.passes());
    assert!(!refusal.message.contains("gone"), "{refusal}");
    fake.fails.store(false, Ordering::Relaxed);
    assert!(server.enrol(&asks(&issued, "a"), NOW).is_ok());
}

#[test]
fn a_token_of_an_authority_that_was_replaced_is_refused_also_for_the_key_that_used_it() {
    let (state, fake) = (State::new(), Arc::new(Fake::default()));
    let server = state.server(&fake);
    let used = server.issue("n1", LIFETIME_DEFAULT, NOW).unwrap();
    let unused = server.issue("n2", LIFETIME_DEFAULT, NOW).unwrap();
    assert!(server.enrol(&asks(&used, "a"), NOW).is_ok());
    fake.replaced.store(1, Ordering::Relaxed);
    for (issued, node) in [(&used, "n1"), (&unused, "n2")] {
        let refusal = server.enrol(&asks(issued, "a"), NOW).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            format!(
                "unknown_token: the token of node `{node}` is from another authority than the one that signs now; \
                 make one with `llmgw ctl cert token --node {node}`"
            )
        );
    }
    assert_eq!(fake.signed.load(Ordering::Relaxed), 1);
}

/// An authority whose files are another one's as soon as they were read.
struct Replaced<F> {
    files: AuthorityFiles,
    replace: F,
}

impl<F: Fn() + Send + Sync + 'static> Signing for Replaced<F> {
    fn authority(&self) -> Result<Box<dyn Signer>, String> {
        let read = self.files.authority();
        (self.replace)();
        read
    }

    fn requested_key(&self, request: &str) -> Result<KeyDigest, String> {
        self.files.requested_key(request)
    }
}

#[test]
fn what_becomes_of_a_token_is_of_its_own_authority_also_where_that_is_replaced_meanwhile() {
    let (state, now) = (State::new(), Moment::now());
    make_directory(&state.0).unwrap();
    let files = AuthorityFiles {
        certificate: state.0.join("ca.pem"),
        key: state.0.join("ca-key.pem"),
    };
    let put = |made: &MadeAuthority, files: &AuthorityFiles| {
        for (path, text) in [(&files.certificate, &made.pem), (&files.key, &made.key_pem)] {
            let _ = fs::remove_file(path);
            let (path, text) = (path.clone(), text.clone().into());
            let mode = KEY_MODE;
            place(&[NewFile { path, text, mode }]).unwrap();
        }
    };
    let (first, second) = (make(now).unwrap(), make(now).unwrap());
    put(&first, &files);
    let server = Enrolment::open(&state.0, Arc::new(|_| true)).unwrap();
    server.set_signing(Some(Arc::new(files.clone())));
    let now = UtcTime::now();
    let issued = server.issue("n1", LIFETIME_DEFAULT, now).unwrap();
    let replaced = files.clone();
    server.set_signing(Some(Arc::new(Replaced {
        files,
        replace: move || put(&second, &replaced),
    })));
    let key = KeyPair::generate().unwrap();
    let request = CertificateParams::default().serialize_request(&key);
    let request = asks(&issued, &request.unwrap().pem().unwrap());
    let signed = server.enrol(&request, now).unwrap();
    assert_eq!(signed.authority, first.pem);
    let der = CertificateDer::from_pem_slice(signed.certified.certificate.as_bytes());
    let certificate = Certificate::from_der(&der.unwrap()).unwrap();
    assert_eq!(certificate.issuer_key_id, first.certificate.key_id);
    assert_eq!(code(server.enrol(&request, now)), "unknown_token");
}

#[test]
fn a_book_that_cannot_be_written_gives_no_certificate_and_no_token() {
    let (state, fake) = (State::new(), Arc::new(Fake::default()));
    let server = state.server(&fake);
    let issued = server.issue("n", LIFETIME_DEFAULT, NOW).unwrap();
    // A directory has the file's name.
    let file = state.0.join("enrolment.json");
    let aside = state.0.join("aside");
    fs::rename(&file, &aside).unwrap();
    fs::create_dir(&file).unwrap();
    let refused = server.enrol(&asks(&issued, "a"), NOW);
    assert_eq!(code(refused), "enrolment_failed");
    let error = server.issue("n", LIFETIME_DEFAULT, NOW).unwrap_err();
    assert!(matches!(error, IssueError::Store(_)), "{error}");
    fs::remove_dir(&file).unwrap();
    assert!(
        server.enrol(&asks(&issued, "b"), NOW).is_ok(),
        "nothing was used up, and the token was not replaced"
    );
}

#[test]
fn without_an_authoritys_key_nobody_is_enrolled_and_the_way_out_is_told() {
    let (state, fake) = (State::new(), Arc::new(Fake::default()));
    let server = state.server(&fake);
    let issued = server.issue("n", LIFETIME_DEFAULT, NOW).unwrap();
    server.set_signing(None);
    let refusal = server.enrol(&asks(&issued, "a"), NOW).unwrap_err();
    assert_eq!(refusal.code, EnrolmentRefusalCode::Off);
    for way_out in ["`agents.tls.ca_key`", "`llmgw ctl cert agent`"] {
        assert!(refusal.message.contains(way_out), "{refusal}");
    }
    let error = server.issue("n", LIFETIME_DEFAULT, NOW).unwrap_err();
    assert_eq!(error.to_string(), refusal.message);
}

#[test]
fn a_token_needs_a_node_and_works_for_a_second_to_a_week() {
    let (state, fake) = (State::new(), Arc::new(Fake::default()));
    let server = state.server(&fake);
    for node in ["", "a b", "é", &"n".repeat(65)] {
        let error = server.issue(node, LIFETIME_DEFAULT, NOW).unwrap_err();
        assert!(error.to_string().contains("is not a node id"), "{error}");
    }
    for (seconds, works) in [(0, false), (1, true), (604_800, true), (604_801, false)] {
        let issued = server.issue("n", Duration::from_secs(seconds), NOW);
        assert_eq!(issued.is_ok(), works, "{seconds}");
    }
}

#[test]
fn no_token_is_made_that_no_agent_could_use_here() {
    let state = State::new();
    let fake = Arc::new(Fake {
        leads: Arc::new(|authority| *authority != Fingerprint([9; 32])),
        ..Fake::default()
    });
    let server = state.server(&fake);
    let error = server.issue("n", LIFETIME_DEFAULT, NOW).unwrap_err();
    let said = error.to_string();
    assert!(said.contains(&Fingerprint([9; 32]).to_string()), "{said}");
    assert!(said.contains("`llmgw ctl cert server --ca DIR`"), "{said}");
    fake.replaced.store(1, Ordering::Relaxed);
    assert!(server.issue("n", LIFETIME_DEFAULT, NOW).is_ok());
}
