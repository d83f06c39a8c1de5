//! What survives a restart, what a file looks like, and what becomes of one that makes no sense.

use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicU32, Ordering};

use llmgw_proto::identity::{EnrolmentToken, Fingerprint};

use super::*;

/// A state directory, removed when dropped.
struct State(PathBuf);

impl State {
    fn new() -> State {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-enrolment-{}-{number}", std::process::id());
        State(std::env::temp_dir().join(name))
    }

    fn store(&self) -> Store {
        Store::of(&self.0)
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn book() -> Book {
    let mut book = Book::default();
    for (number, node) in ["gpu-01", "rack.1.gpu_02"].into_iter().enumerate() {
        let token = EnrolmentToken::new(node, [0xab; 16], Fingerprint([0xcd; 32])).unwrap();
        let expires = UtcTime(1_796_003_600 + number as u64);
        book.add(node, token.secret_hash(), expires, UtcTime(1_796_000_000))
            .unwrap();
    }
    let certified = Certified {
        certificate: "a certificate\n".to_owned(),
        serial: "4a".to_owned(),
        not_after: "2027-12-01T00:00:00Z".to_owned(),
    };
    book.use_up(
        "gpu-01",
        KeyDigest([7; 32]),
        certified,
        UtcTime(1_796_000_000),
    );
    book
}

#[test]
fn a_book_is_the_same_after_a_restart_and_holds_no_secret() {
    let state = State::new();
    assert_eq!(state.store().load().unwrap(), Book::default());
    assert!(!state.0.exists(), "to look leaves nothing behind");
    state.store().save(&book()).unwrap();
    assert_eq!(state.store().load().unwrap(), book());
    let file = state.0.join(FILE);
    let mode = fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let text = fs::read_to_string(file).unwrap();
    assert!(text.contains(r#""node": "gpu-01""#), "{text}");
    assert!(text.contains(&format!("sha256:{}", "07".repeat(32))));
    assert!(!text.contains("abab"), "{text}");
    let left: Vec<_> = fs::read_dir(&state.0).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn a_file_that_makes_no_sense_is_kept_aside_and_its_tokens_work_no_more() {
    let good = {
        let state = State::new();
        state.store().save(&book()).unwrap();
        fs::read_to_string(state.0.join(FILE)).unwrap()
    };
    for text in [
        String::new(),
        good[..good.len() / 2].to_owned(),
        good.replace("\"version\": 1", "\"version\": 2"),
        good.replace("\"tokens\"", "\"keys\""),
        good.replace("gpu-01", "gpu/01"),
        good.replace("rack.1.gpu_02", "gpu-01"),
        good.replacen("sha256:", "sha512:", 1),
        good.replacen("Z\"", "\"", 1),
    ] {
        let state = State::new();
        fs::create_dir_all(&state.0).unwrap();
        fs::write(state.0.join(FILE), &text).unwrap();
        assert_eq!(state.store().load().unwrap(), Book::default(), "{text}");
        assert!(!state.0.join(FILE).exists());
        let kept = fs::read_to_string(state.0.join(SET_ASIDE)).unwrap();
        assert_eq!(kept, text);
    }
}

#[test]
fn a_file_that_the_system_does_not_give_is_an_error_that_names_it() {
    let state = State::new();
    fs::create_dir_all(state.0.join(FILE)).unwrap();
    let error = state.store().load().unwrap_err().to_string();
    assert!(error.contains("enrolment.json: "), "{error}");
    assert!(state.0.join(FILE).exists(), "nothing was moved");
    let error = state.store().save(&book()).unwrap_err().to_string();
    assert!(error.contains("enrolment.json: "), "{error}");
}

#[test]
fn of_two_servers_on_one_state_one_may_write_until_it_ends() {
    let state = State::new();
    let held = state.store().lock().unwrap();
    let refused = state.store().lock().unwrap_err().to_string();
    assert!(refused.contains("enrolment.lock: "), "{refused}");
    assert!(
        refused.contains("has the same `state`: give each its own"),
        "{refused}"
    );
    drop(held);
    state.store().lock().unwrap();
}
