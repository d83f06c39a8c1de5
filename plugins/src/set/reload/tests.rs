use super::*;

#[test]
fn a_refused_bundle_is_tried_again_after_pauses_that_grow_and_another_one_at_once() {
    let (bad, other) = ([1; 32], [2; 32]);
    let mut now = Instant::now();
    let mut refused = None;
    for seconds in [10, 20, 40, 80] {
        let again = Refused::again(refused, bad, now);
        assert!(!again.is_at_rest(other, now));
        now += Duration::from_secs(seconds);
        assert!(again.is_at_rest(bad, now - Duration::from_millis(1)));
        assert!(!again.is_at_rest(bad, now));
        refused = Some(again);
    }
    let after_another = Refused::again(refused.clone(), other, now);
    assert_eq!(after_another.again_at, now + REFUSED_PAUSE_FIRST);
    for _ in 0..1_000 {
        refused = Some(Refused::again(refused, bad, now));
    }
    let longest = REFUSED_PAUSE_FIRST * (1 << REFUSED_DOUBLINGS_MAX);
    assert_eq!(refused.unwrap().again_at, now + longest);
}

/// A good set that is on record as a bad one for an hour, as a machine that was held up leaves it, and why.
fn refused_for_its_time(name: &str) -> (PathBuf, Arc<Policies>, PolicyError) {
    let dir = std::env::temp_dir().join(format!("llmgw-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("routing.lua");
    std::fs::write(&file, "return { api = 1 }\n").unwrap();
    let options = PolicyOptions {
        dir: Some(dir.clone()),
        state: None,
    };
    let policies = Policies::open(options).unwrap();
    std::fs::write(&file, "-- saved\nreturn { api = 1 }\n").unwrap();
    let hash = Bundle::gather(&dir).unwrap().hash;
    let late = PolicyError::in_file("routing.lua", "took longer than 200 ms");
    policies.record(Some(hash), late.clone());
    let hour = Duration::from_secs(3_600);
    policies.progress().refused.as_mut().unwrap().again_at = Instant::now() + hour;
    (dir, policies, late)
}

#[test]
fn a_set_that_was_refused_for_its_time_comes_into_force_without_being_saved_again() {
    let (dir, policies, late) = refused_for_its_time("refused");
    assert_eq!(policies.reload().unwrap_err(), late);
    policies.progress().refused.as_mut().unwrap().again_at = Instant::now();
    assert_eq!(policies.reload().unwrap().generation, 2);
    assert_eq!(policies.status().last_error, None);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_set_that_was_refused_is_tried_at_once_when_a_person_asks() {
    let (dir, policies, late) = refused_for_its_time("asked");
    assert_eq!(policies.reload().unwrap_err(), late);
    assert_eq!(policies.reload_asked().unwrap().generation, 2);
    assert_eq!(policies.status().last_error, None);
    std::fs::remove_dir_all(&dir).unwrap();
    let (dir, policies, late) = refused_for_its_time("unpinned");
    policies.pin(Some(1)).unwrap();
    assert_eq!(policies.status().last_error, Some(late));
    assert_eq!(policies.unpin().unwrap().generation, 2);
    std::fs::remove_dir_all(&dir).unwrap();
}
