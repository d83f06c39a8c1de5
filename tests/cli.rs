//! The command line: exit statuses, and messages that a person can act on.

mod harness;
#[path = "harness/more.rs"]
mod more;

use std::path::PathBuf;

use fake_engine::Kind;

use harness::Gateway;
use more::{Ran, ctl, engine, llmgw};

/// A directory of one test, gone when dropped.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let path = std::env::temp_dir().join(format!("llmgw-cli-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.join(name), text).unwrap();
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        llmgw(&self.0, arguments)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const GOOD: &str = "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nmodels:\n  - name: fake\n    endpoints:\n      - {url: \"http://127.0.0.1:9\", engine: vllm}\n";

/// Data on stdout, messages on stderr.
fn assert_refused(ran: &Ran, status: i32, parts: &[&str]) {
    assert_eq!(ran.status, status, "{} {}", ran.stdout, ran.stderr);
    assert_eq!(ran.stdout, "", "messages go to stderr");
    for part in parts {
        assert!(ran.stderr.contains(part), "`{part}` in {}", ran.stderr);
    }
}

#[test]
fn a_check_of_a_good_configuration_says_ok_and_leaves_nothing_behind() {
    let dir = Dir::new("check");
    dir.write("llmgw.yaml", GOOD);
    let ran = dir.run(&["server", "--config", "llmgw.yaml", "--check"]);
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    assert!(ran.stdout.contains("llmgw.yaml: ok"), "{}", ran.stdout);
    let files: Vec<_> = std::fs::read_dir(&dir.0).unwrap().collect();
    assert_eq!(files.len(), 1, "{files:?}");
}

#[test]
fn mistakes_in_the_configuration_are_status_2_and_name_file_line_path_and_what_would_be_right() {
    let dir = Dir::new("mistakes");
    for (text, parts) in [
        (
            format!("{GOOD}tenats: []\n"),
            &["llmgw.yaml:7", "tenats", "tenants"][..],
        ),
        (
            GOOD.replace("engine: vllm", "engin: vllm"),
            &["llmgw.yaml:6", "models[0].endpoints[0]", "engin", "engine"],
        ),
        (
            GOOD.replace("engine: vllm", "engine: vlmm"),
            &["llmgw.yaml:6", "vlmm", "vllm"],
        ),
        (
            format!("{GOOD}limits: {{connect_timeout: soon}}\n"),
            &["llmgw.yaml:7", "limits.connect_timeout", "soon"],
        ),
        (
            GOOD.replace("9\"", "9\", api_key: \"${LLMGW_TEST_UNSET_VARIABLE}\""),
            &["llmgw.yaml:6", "LLMGW_TEST_UNSET_VARIABLE"],
        ),
        (
            GOOD.replace("admin: 127.0.0.1:0", "admin: 0.0.0.0:0"),
            &["llmgw.yaml:2", "admin", "token"],
        ),
    ] {
        dir.write("llmgw.yaml", &text);
        for arguments in [
            &["server", "--config", "llmgw.yaml", "--check"][..],
            &["server", "--config", "llmgw.yaml"],
        ] {
            assert_refused(&dir.run(arguments), 2, parts);
        }
    }
    assert_refused(
        &dir.run(&["server", "--config", "absent.yaml"]),
        2,
        &["absent.yaml"],
    );
}

#[test]
fn wrong_usage_is_status_2() {
    let dir = Dir::new("usage");
    for arguments in [
        &["server"][..],
        &["server", "--config", "a", "--nonsense"],
        &["nonsense"],
        &["ctl"],
        &["ctl", "nonsense"],
        &["ctl", "--admin", "not a url", "status"],
        &["ctl", "--format", "xml", "status"],
        &["policy"],
    ] {
        assert_refused(&dir.run(arguments), 2, &[]);
    }
    assert_eq!(dir.run(&["--version"]).status, 0);
    assert_eq!(dir.run(&["--help"]).status, 0);
}

#[test]
fn an_address_that_is_taken_is_status_1_and_says_which() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let dir = Dir::new("taken");
    dir.write("llmgw.yaml", GOOD);
    for flag in ["--listen", "--admin"] {
        let arguments = ["server", "--config", "llmgw.yaml", flag, &address];
        let ran = dir.run(&arguments);
        assert_eq!(ran.status, 1, "{} {}", ran.stdout, ran.stderr);
        assert!(ran.stderr.contains(&address), "{}", ran.stderr);
    }
}

#[test]
fn ctl_without_a_server_is_status_3() {
    // Nobody listens on a port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let admin = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let dir = Dir::new("unreachable");
    for command in ["status", "models", "replicas", "policies", "reload"] {
        assert_refused(
            &dir.run(&["ctl", "--admin", &admin, command]),
            3,
            &[&admin[7..]],
        );
    }
}

#[test]
fn ctl_shows_a_running_server_to_people_and_to_programs() {
    let engine = engine(Kind::Vllm, "{}");
    let gateway = Gateway::over("vllm", &[&engine]);
    for (command, part) in [
        ("status", "fake"),
        ("models", "fake"),
        ("replicas", &*engine.addr().to_string()),
        ("policies", "1"),
    ] {
        let ran = ctl(&gateway, &[command]);
        assert_eq!((ran.status, &*ran.stderr), (0, ""), "{command}");
        assert!(ran.stdout.contains(part), "{command}: {}", ran.stdout);
        assert!(!ran.stdout.contains('\u{1b}'), "no colour: {}", ran.stdout);
        let ran = ctl(&gateway, &["--format", "json", command]);
        assert_eq!(ran.status, 0);
        serde_json::from_str::<serde_json::Value>(&ran.stdout).unwrap();
    }
    let ran = ctl(&gateway, &["reload"]);
    assert_eq!(ran.status, 0, "{}", ran.stderr);
}

#[test]
fn a_wrong_admin_token_is_status_3() {
    let setup = harness::Setup::new().top("");
    let engine = engine(Kind::Vllm, "{}");
    let yaml = setup
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .yaml();
    let token = "admin: {listen: \"127.0.0.1:0\", token: right-token}";
    let dir = Dir::new("token");
    dir.write("llmgw.yaml", &yaml.replace("admin: 127.0.0.1:0", token));
    let ran = dir.run(&["server", "--config", "llmgw.yaml", "--check"]);
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    let gateway = harness::Setup::new()
        .top(token)
        .model("fake", "")
        .endpoint("vllm", &engine.url(), "")
        .start();
    assert_eq!(
        ctl(&gateway, &["--token", "right-token", "status"]).status,
        0
    );
    assert_refused(
        &ctl(&gateway, &["--token", "wrong", "status"]),
        3,
        &["token"],
    );
    assert_refused(&ctl(&gateway, &["status"]), 3, &["token"]);
    assert_eq!(
        gateway.admin_get("/readyz").status(),
        200,
        "probes need no token"
    );
}

#[test]
fn policies_that_were_written_out_pass_their_check_and_are_never_overwritten() {
    let dir = Dir::new("policies");
    let ran = dir.run(&["policy", "init", "mine"]);
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    let routing = dir.0.join("mine/routing.lua");
    assert!(ran.stdout.contains("mine/routing.lua"), "{}", ran.stdout);
    assert!(dir.0.join("mine/engines/vllm.lua").exists());
    let ran = dir.run(&["policy", "check", "mine"]);
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    let mine = std::fs::read_to_string(&routing).unwrap() + "-- mine\n";
    std::fs::write(&routing, &mine).unwrap();
    dir.run(&["policy", "init", "mine"]);
    assert_eq!(std::fs::read_to_string(&routing).unwrap(), mine);
    std::fs::write(&routing, "local M = { api = 1 }\nM.weights = 7\nreturn M\n").unwrap();
    let ran = dir.run(&["policy", "check", "mine"]);
    assert_refused(&ran, 1, &["routing.lua", "weights"]);
    dir.write("llmgw.yaml", GOOD);
    let arguments = [
        "server",
        "--config",
        "llmgw.yaml",
        "--policies",
        "mine",
        "--check",
    ];
    assert_refused(&dir.run(&arguments), 2, &["routing.lua", "weights"]);
    assert_eq!(dir.run(&["policy", "check"]).status, 0, "the built-in ones");
}
