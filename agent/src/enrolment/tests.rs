//! What is planned from a token and the files that are there, which key is asked for, and which answers are kept.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use fake_engine::authority::{Authority, Leaf, Use};
use llmgw_proto::enrolment::Enrolled;
use llmgw_proto::identity::Fingerprint;
use llmgw_proto::identity::moment::DAY_SECONDS;

use super::*;

/// A state directory, removed when dropped.
struct State(PathBuf);

impl State {
    fn new() -> State {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-first-contact-{}-{number}", std::process::id());
        let state = State(std::env::temp_dir().join(name));
        fs::create_dir_all(&state.0).unwrap();
        state
    }

    fn files(&self) -> AgentTls {
        in_state(&self.0)
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn token(node: &str, authority: &Authority) -> EnrolmentToken {
    let fingerprint = Fingerprint::of(&authority.der);
    EnrolmentToken::new(node, [0xab; 16], fingerprint).unwrap()
}

fn given(token: &EnrolmentToken) -> TokenArgument {
    token.expose().into()
}

fn plan(given: &TokenArgument, server: &str, files: &AgentTls) -> Result<bool, String> {
    let server: ServerUrl = server.parse().unwrap();
    let files = (files, Keeper::Agent);
    let planned = Enrolling::plan(given, &server, "n1", files, Moment::now());
    planned
        .map(|planned| planned.is_some())
        .map_err(|error| error.to_string())
}

const SERVER: &str = "https://ctl.example";

/// What an authority would answer for the key in the files.
fn answer(authority: &Authority, files: &AgentTls, name: &str) -> Enrolled {
    let key = fs::read_to_string(&files.key).unwrap();
    let leaf = Leaf {
        name: Some(name),
        ..Leaf::agent()
    };
    Enrolled {
        certificate: authority.issue_for(&leaf, &key).pem,
        authority: authority.pem.clone(),
    }
}

fn keep(files: &AgentTls, enrolled: &Enrolled, token: &EnrolmentToken) -> Result<(), String> {
    let key = files::key(&files.key).unwrap();
    files::keep(files, Keeper::Agent, enrolled, key, token).map(|_| ())
}

#[test]
fn a_token_is_used_where_there_is_no_certificate() {
    let (state, authority) = (State::new(), Authority::new("fleet"));
    let text = given(&token("n1", &authority));
    assert_eq!(plan(&text, SERVER, &state.files()), Ok(true));
    let file = state.0.join("token");
    fs::write(&file, format!("{}\n", token("n1", &authority).expose())).unwrap();
    let at_file = TokenArgument::from(format!("@{}", file.display()));
    assert_eq!(plan(&at_file, SERVER, &state.files()), Ok(true));
}

#[test]
fn what_the_operator_has_to_change_is_said_and_the_token_is_not() {
    let (state, authority) = (State::new(), Authority::new("fleet"));
    let (own, other) = (token("n1", &authority), token("n2", &authority));
    let cut = own.expose()[..40].to_owned();
    let absent = state.0.join("absent");
    let full = state.0.join("full");
    fs::write(&full, other.expose().repeat(3)).unwrap();
    for (text, server, said) in [
        (
            own.expose(),
            "http://127.0.0.1:1",
            "dial `https://127.0.0.1:1`",
        ),
        (
            other.expose(),
            SERVER,
            "the token is for node `n2`, this is node `n1`",
        ),
        (cut, SERVER, "that is no token"),
        (
            format!("@{}", absent.display()),
            SERVER,
            "absent: it cannot be read",
        ),
        (
            format!("@{}", full.display()),
            SERVER,
            "full: that is no token",
        ),
    ] {
        let error = plan(&text.into(), server, &state.files()).unwrap_err();
        assert!(error.contains(said), "{error}");
        assert!(!error.contains("abab"), "{error}");
    }
    assert_eq!(format!("{:?}", given(&own)), "***");
}

#[test]
fn a_key_is_made_once_for_its_owner_only_and_asked_for_again_by_the_next_start() {
    let state = State::new();
    let files = state.files();
    let first = files::request(&files::key(&files.key).unwrap(), "n1").unwrap();
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&files.key), 0o600);
    assert_eq!(mode(files.key.parent().unwrap()), 0o700);
    let text = fs::read_to_string(&files.key).unwrap();
    let second = files::request(&files::key(&files.key).unwrap(), "n1").unwrap();
    assert_eq!(fs::read_to_string(&files.key).unwrap(), text);
    let key = |request: &str| llmgw_proto::identity::RequestedKey::from_pem(request).unwrap();
    assert_eq!(key(&first), key(&second));
    assert!(!files.cert.exists());
}

#[test]
fn an_answer_is_kept_and_a_certificate_that_lasts_makes_the_token_needless() {
    let (state, authority) = (State::new(), Authority::new("fleet"));
    let (files, token) = (state.files(), token("n1", &authority));
    files::key(&files.key).unwrap();
    keep(&files, &answer(&authority, &files, "n1"), &token).unwrap();
    let loaded = llmgw_proto::identity::Identity::load(&files.cert, &files.key);
    assert_eq!(
        loaded.unwrap().certificate.common_name.as_deref(),
        Some("n1")
    );
    assert_eq!(fs::read_to_string(&files.ca).unwrap(), authority.pem);
    assert_eq!(plan(&given(&token), SERVER, &files), Ok(false));
    let absent = TokenArgument::from("@/absent/token".to_owned());
    assert_eq!(plan(&absent, SERVER, &files), Ok(false), "nor its file");
    let planned = |days: i64, given: &TokenArgument| {
        let server: ServerUrl = SERVER.parse().unwrap();
        let now = Moment::now().after(days * DAY_SECONDS);
        Enrolling::plan(given, &server, "n1", (&files, Keeper::Agent), now)
    };
    // It is for 90 days.
    assert!(planned(58, &given(&token)).unwrap().is_none());
    let soon = planned(70, &given(&token)).unwrap().unwrap();
    assert_eq!(soon.can_wait, Some(ENDS_SOON), "it still works");
    assert!(planned(70, &absent).unwrap().is_none(), "nor must it");
    let over = planned(91, &given(&token)).unwrap().unwrap();
    assert_eq!(over.can_wait, None);
    assert!(planned(91, &absent).is_err());
}

#[test]
fn a_token_of_another_authority_is_used_although_the_certificate_lasts() {
    let (state, old) = (State::new(), Authority::new("old"));
    let (files, token_of_old) = (state.files(), token("n1", &old));
    files::key(&files.key).unwrap();
    keep(&files, &answer(&old, &files, "n1"), &token_of_old).unwrap();
    let new = Authority::new("new");
    let token_of_new = token("n1", &new);
    let planned = |token: &EnrolmentToken, keeper| {
        let server: ServerUrl = SERVER.parse().unwrap();
        let files = (&files, keeper);
        Enrolling::plan(&given(token), &server, "n1", files, Moment::now()).unwrap()
    };
    assert!(planned(&token_of_old, Keeper::Agent).is_none());
    let used = planned(&token_of_new, Keeper::Agent).unwrap();
    assert_eq!(
        used.can_wait,
        Some(OTHER_AUTHORITY),
        "the old one still works"
    );
    // Another node's token, and a file of the operator's that lacks the new one, change nothing.
    assert!(planned(&token("n2", &new), Keeper::Agent).is_none());
    assert!(planned(&token_of_new, Keeper::Operator).is_none());
    // Both are trusted, and the certificate is still the old one's.
    fs::write(&files.ca, format!("{}{}", old.pem, new.pem)).unwrap();
    assert!(planned(&token_of_old, Keeper::Agent).is_none());
    for keeper in [Keeper::Agent, Keeper::Operator] {
        assert!(planned(&token_of_new, keeper).is_some());
    }
    keep(&files, &answer(&new, &files, "n1"), &token_of_new).unwrap();
    assert!(planned(&token_of_new, Keeper::Agent).is_none());
}

#[test]
fn an_authority_that_is_trusted_already_keeps_its_company() {
    let (state, authority) = (State::new(), Authority::new("fleet"));
    let (files, token) = (state.files(), token("n1", &authority));
    files::key(&files.key).unwrap();
    let both = format!("{}{}", Authority::new("other").pem, authority.pem);
    fs::write(&files.ca, &both).unwrap();
    let enrolled = answer(&authority, &files, "n1");
    keep(&files, &enrolled, &token).unwrap();
    assert_eq!(fs::read_to_string(&files.ca).unwrap(), both);
    fs::write(&files.ca, Authority::new("other").pem).unwrap();
    keep(&files, &enrolled, &token).unwrap();
    assert_eq!(fs::read_to_string(&files.ca).unwrap(), authority.pem);
}

#[test]
fn an_authority_that_the_operator_put_there_is_not_written_over() {
    let (state, authority) = (State::new(), Authority::new("fleet"));
    let (files, token) = (state.files(), token("n1", &authority));
    files::key(&files.key).unwrap();
    let enrolled = answer(&authority, &files, "n1");
    let plan = || {
        let server: ServerUrl = SERVER.parse().unwrap();
        let theirs = (&files, Keeper::Operator);
        let planned = Enrolling::plan(&given(&token), &server, "n1", theirs, Moment::now());
        planned.map(|_| ()).map_err(|error| error.to_string())
    };
    let keep = || {
        let key = files::key(&files.key).unwrap();
        files::keep(&files, Keeper::Operator, &enrolled, key, &token).map(|_| ())
    };
    let other = Authority::new("other").pem;
    // A link is what it leads to.
    let linked = state.0.join("site-ca.pem");
    std::os::unix::fs::symlink(&linked, &files.ca).unwrap();
    for (text, said) in [
        (
            other.as_str(),
            "is not among those in it, and it is not written over; add that authority's ca.pem",
        ),
        ("hello", "it is not written over, move it away"),
    ] {
        fs::write(&linked, text).unwrap();
        for error in [plan().unwrap_err(), keep().unwrap_err()] {
            assert!(error.contains("tls/ca.pem: "), "{error}");
            assert!(error.contains(said), "{error}");
        }
        assert_eq!(fs::read_to_string(&linked).unwrap(), text);
        assert!(!files.cert.exists());
    }
    fs::write(&linked, format!("{other}{}", authority.pem)).unwrap();
    plan().unwrap();
    keep().unwrap();
    assert!(files.ca.is_symlink() && files.cert.exists());
    // Where there is none it is placed.
    for file in [&files.ca, &files.cert] {
        fs::remove_file(file).unwrap();
    }
    plan().unwrap();
    keep().unwrap();
    assert_eq!(fs::read_to_string(&files.ca).unwrap(), authority.pem);
}

#[test]
fn an_answer_that_is_not_for_this_node_key_and_authority_leaves_no_file() {
    let (state, authority) = (State::new(), Authority::new("fleet"));
    let (files, token) = (state.files(), token("n1", &authority));
    files::key(&files.key).unwrap();
    let good = answer(&authority, &files, "n1");
    let other = Authority::new("other");
    let key = fs::read_to_string(&files.key).unwrap();
    let as_server = Leaf {
        name: Some("n1"),
        used: Use::Server,
        ..Leaf::agent()
    };
    for (certificate, authority, said) in [
        (&good.certificate, &other.pem, "is not among those in it"),
        (&good.certificate, &String::new(), "its authority: "),
        (&good.certificate, &good.certificate, "its authority: "),
        (&String::new(), &authority.pem, "its certificate: "),
        (
            &authority.agent("n1").pem,
            &authority.pem,
            "this key does not belong to the certificate",
        ),
        (
            &answer(&authority, &files, "n2").certificate,
            &authority.pem,
            "its certificate is of `n2`, not of node `n1`",
        ),
        (
            &answer(&other, &files, "n1").certificate,
            &authority.pem,
            "was not issued by the token's authority",
        ),
        (
            &authority.issue_for(&as_server, &key).pem,
            &authority.pem,
            "its certificate is for serverAuth only",
        ),
    ] {
        let enrolled = Enrolled {
            certificate: certificate.clone(),
            authority: authority.clone(),
        };
        let error = keep(&files, &enrolled, &token).unwrap_err();
        assert!(error.contains(said), "{error}");
        assert!(!files.cert.exists() && !files.ca.exists(), "{error}");
    }
}

#[test]
fn files_of_another_node_and_broken_ones_are_not_written_over() {
    let (state, authority) = (State::new(), Authority::new("fleet"));
    let (files, token) = (state.files(), token("n1", &authority));
    files::key(&files.key).unwrap();
    let other = answer(&authority, &files, "n2").certificate;
    fs::write(&files.cert, &other).unwrap();
    let error = plan(&given(&token), SERVER, &files).unwrap_err();
    let said = "is the certificate of `n2`, not of node `n1`; remove it and ";
    assert!(error.contains(said), "{error}");
    fs::write(&files.cert, "").unwrap();
    let error = plan(&given(&token), SERVER, &files).unwrap_err();
    assert!(error.contains("agent.pem: "), "{error}");
    assert!(error.contains("to enrol anew"), "{error}");
}
