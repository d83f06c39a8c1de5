use std::os::unix::fs::PermissionsExt;

use llmgw_proto::shard::Readiness;

use super::*;

fn state_dir(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("llmgw-store-{}-{name}", std::process::id()));
    let _ = fs::remove_dir_all(&path);
    path
}

fn record(shard: &str) -> Record {
    let spec = ShardSpec {
        shard: shard.to_owned(),
        replica: "m/0".to_owned(),
        model: "m".to_owned(),
        profile: "cpu".to_owned(),
        definition: "d1".into(),
        rank: 0,
        engine: "llamacpp".to_owned(),
        commands: Vec::new(),
        gpus: Vec::new(),
        cpus: None,
        memory_bytes: None,
        ports: vec![21_000],
        host: "127.0.0.1".to_owned(),
        serves_http: true,
        readiness: Readiness {
            health: "/health".to_owned(),
            models: "/v1/models".to_owned(),
            served_name: "m".to_owned(),
            start_deadline_ms: 1_000,
        },
        slots: None,
        stop_grace_ms: 1_000,
        api_key: Some(ApiKey::new("sk-1".to_owned())),
    };
    let mut record = Record::new(spec);
    let id = ProcessId {
        pid: 7,
        start_ticks: 9,
        boot_id: "b".to_owned(),
    };
    record.processes.push(RecordedProcess::new(0, &id));
    record
}

#[test]
fn a_record_is_read_back_as_it_was_and_forgotten_without_a_trace() {
    let state = state_dir("back");
    let store = SpecStore::open(&state).unwrap();
    for shard in ["b/0/0", "a/0/0"] {
        store.save(&record(shard)).unwrap();
    }
    let found = SpecStore::open(&state).unwrap().load().unwrap();
    assert_eq!(found.records, [record("a/0/0"), record("b/0/0")]);
    store.remove("a/0/0").unwrap();
    store.remove("a/0/0").unwrap();
    assert_eq!(store.load().unwrap().records, [record("b/0/0")]);
    fs::remove_dir_all(state).unwrap();
}

#[test]
fn only_the_agents_user_may_read_what_holds_a_key() {
    let state = state_dir("mode");
    let store = SpecStore::open(&state).unwrap();
    store.save(&record("m/0/0")).unwrap();
    let key = store
        .save_key("m/0/0", &ApiKey::new("sk-1".to_owned()))
        .unwrap();
    assert_eq!(fs::read_to_string(&key).unwrap(), "sk-1");
    for (path, mode) in [
        (state.join("shards/m%2f0%2f0/shard.json"), 0o600),
        (key, 0o600),
        (state.join("shards/m%2f0%2f0"), 0o700),
        (state.clone(), 0o700),
    ] {
        let found = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(found, mode, "{}", path.display());
    }
    fs::remove_dir_all(state).unwrap();
}

#[test]
fn a_file_that_is_cut_off_at_any_byte_is_set_aside_and_the_others_are_read() {
    let state = state_dir("cut");
    let store = SpecStore::open(&state).unwrap();
    store.save(&record("good/0/0")).unwrap();
    store.save(&record("bad/0/0")).unwrap();
    let file = state.join("shards/bad%2f0%2f0/shard.json");
    let whole = fs::read(&file).unwrap();
    for length in (0..whole.len() - 1).step_by(31) {
        make_directory(file.parent().unwrap()).unwrap();
        fs::write(&file, &whole[..length]).unwrap();
        let found = store.load().unwrap();
        assert_eq!(found.records, [record("good/0/0")], "{length} bytes");
        assert_eq!(found.set_aside[0].file, file);
        let kept = found.set_aside[0].kept_as.as_ref().unwrap();
        assert_eq!(fs::read(kept.join("shard.json")).unwrap(), &whole[..length]);
    }
    let kept = fs::read_dir(state.join("set-aside")).unwrap().count();
    assert_eq!(kept, SET_ASIDE_MAX);
    fs::remove_dir_all(state).unwrap();
}

#[test]
fn what_is_no_directory_is_set_aside_too_and_the_oldest_of_it_deleted() {
    let state = state_dir("strange");
    let store = SpecStore::open(&state).unwrap();
    for number in 0..SET_ASIDE_MAX + 3 {
        let file = state.join(format!("shards/file-{number}"));
        fs::write(&file, "no shard").unwrap();
        let found = store.load().unwrap();
        let kept = found.set_aside[0].kept_as.as_ref();
        assert_eq!(fs::read(kept.unwrap()).unwrap(), b"no shard", "{number}");
    }
    let kept = fs::read_dir(state.join("set-aside")).unwrap().count();
    assert_eq!(kept, SET_ASIDE_MAX);
    fs::remove_dir_all(state).unwrap();
}

#[test]
fn a_record_that_cannot_be_read_now_stays_where_it_is_and_is_named() {
    let state = state_dir("unread");
    let store = SpecStore::open(&state).unwrap();
    store.save(&record("m/0/0")).unwrap();
    let file = state.join("shards/m%2f0%2f0/shard.json");
    fs::remove_file(&file).unwrap();
    // Where nothing is mapped the kernel answers as a disk does that fails.
    std::os::unix::fs::symlink("/proc/self/mem", &file).unwrap();
    let error = store.load().unwrap_err().to_string();
    let expected = format!("`{}`: Input/output error (os error 5); ", file.display());
    assert!(error.starts_with(&expected), "{error}");
    assert!(fs::symlink_metadata(&file).is_ok());
    assert!(!state.join("set-aside").exists());
    // A link that leads nowhere is no record.
    fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("/nowhere", &file).unwrap();
    let found = store.load().unwrap();
    assert_eq!(found.set_aside[0].file, file);
    fs::remove_dir_all(state).unwrap();
}

#[test]
fn a_record_that_is_larger_than_any_can_be_says_so() {
    let state = state_dir("large");
    let store = SpecStore::open(&state).unwrap();
    store.save(&record("m/0/0")).unwrap();
    let file = File::options()
        .write(true)
        .open(state.join("shards/m%2f0%2f0/shard.json"));
    file.unwrap().set_len(RECORD_MAX_BYTES + 1).unwrap();
    let cause = &store.load().unwrap().set_aside[0].cause;
    assert_eq!(cause, "it is larger than 4194304 bytes");
    fs::remove_dir_all(state).unwrap();
}

#[test]
fn a_file_of_another_version_or_shard_or_no_file_at_all_says_so() {
    let state = state_dir("odd");
    let store = SpecStore::open(&state).unwrap();
    for (text, cause) in [
        (
            r#"{"version": 2, "new": true}"#,
            "it has version 2, this agent reads 1",
        ),
        ("\u{0}\u{0}\u{0}", "expected value at line 1 column 1"),
        ("", "EOF while parsing a value at line 1 column 0"),
    ] {
        store.save(&record("m/0/0")).unwrap();
        fs::write(state.join("shards/m%2f0%2f0/shard.json"), text).unwrap();
        assert_eq!(store.load().unwrap().set_aside[0].cause, cause);
    }
    store.save(&record("m/0/0")).unwrap();
    fs::rename(state.join("shards/m%2f0%2f0"), state.join("shards/other")).unwrap();
    let found = store.load().unwrap();
    assert_eq!(found.set_aside[0].cause, "it is of shard `m/0/0`");
    fs::remove_dir_all(state).unwrap();
}

#[test]
fn what_an_agent_left_that_died_while_it_wrote_changes_nothing() {
    let state = state_dir("died");
    let store = SpecStore::open(&state).unwrap();
    store.save(&record("m/0/0")).unwrap();
    fs::write(state.join("shards/m%2f0%2f0/shard.new"), "{\"vers").unwrap();
    fs::create_dir(state.join("shards/never-written")).unwrap();
    let found = store.load().unwrap();
    assert_eq!(found.records, [record("m/0/0")]);
    assert!(found.set_aside.is_empty());
    assert!(!state.join("shards/never-written").exists());
    assert!(!state.join("shards/m%2f0%2f0/shard.new").exists());
    fs::remove_dir_all(state).unwrap();
}

#[test]
fn a_shards_id_never_leads_out_of_the_directory_and_no_two_ids_meet() {
    for (shard, name) in [
        (
            "llama-3.3-70b/0/0",
            Some("llama-3.3-70b%2f0%2f0".to_owned()),
        ),
        ("../x", Some("%2e.%2fx".to_owned())),
        (".", Some("%2e".to_owned())),
        ("a%2fb", Some("a%252fb".to_owned())),
        ("ü", Some("%c3%bc".to_owned())),
        ("", None),
        (&"x".repeat(NAME_MAX_BYTES + 1), None),
    ] {
        assert_eq!(directory_name(shard), name, "{shard}");
        if let Some(name) = name {
            assert_eq!(shard_of(&name), shard);
        }
    }
}
