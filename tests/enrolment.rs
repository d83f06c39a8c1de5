//! A node's first contact through real processes: from `ctl cert ca` to a node that is ready, and every way that it must not go.

mod harness;
#[path = "harness/site.rs"]
mod site;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use site::{Site, llmgw};

/// A token's third part.
fn secret(token: &str) -> &str {
    let (rest, _) = token.rsplit_once('.').unwrap();
    rest.rsplit_once('.').unwrap().1
}

/// The same token with another digit at the end of the part that holds `part`.
fn forged(token: &str, part: &str) -> String {
    let digit = match part.ends_with('0') {
        true => "1",
        false => "0",
    };
    let other = format!("{}{digit}", &part[..part.len() - 1]);
    token.replace(part, &other)
}

#[test]
fn a_token_is_all_that_a_node_needs_to_become_ready_and_its_secret_stays_nowhere() {
    let mut site = Site::new(true);
    let token = site.token("n1");
    // It is on disk, as a hash.
    site.kill_server();
    site.start_server();
    let file = site.token_file(&token);
    site.start_agent("n1", "n1", &site.url(), &["--enroll", &file]);
    site.ready("n1");
    let said = site.said("n1");
    assert!(said.contains("node `n1` is enrolled at https://"), "{said}");
    let said = site.said("server");
    assert!(
        said.contains("node `n1` was enrolled from 127.0.0.1:"),
        "{said}"
    );
    assert!(said.contains("its certificate has serial "), "{said}");

    let secret = secret(&token);
    let cmdline = format!("/proc/{}/cmdline", site.agents[0].id());
    let cmdline = fs::read_to_string(cmdline).unwrap();
    assert!(cmdline.contains("--enroll") && !cmdline.contains(secret));
    let files = site.files();
    let names = |name: &str| files.iter().filter(|path| path.ends_with(name)).count();
    assert_eq!(
        names("enrolment.json") + names("tls/agent-key.pem"),
        2,
        "{files:?}"
    );
    for file in &files {
        let bytes = fs::read(file).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        assert!(!text.contains(secret), "{}", file.display());
    }
    for page in ["/v1/status", "/v1/nodes", "/v1/snapshot", "/metrics"] {
        assert!(!site.admin(page).contains(secret), "{page}");
    }

    // A unit file may keep the argument, whatever became of the file.
    site.kill_agents();
    fs::remove_file(site.at("token")).unwrap();
    site.start_agent("n1", "n1", &site.url(), &["--enroll", &file]);
    site.until("the token is ignored", |site| {
        site.said("n1").contains("the enrolment token is not used")
    });
    site.kill_agents();
    site.start_agent("n1", "n1", &site.url(), &[]);
    let connected = format!("connected to {} as `n1`", site.url());
    site.until("the agent is welcomed", |site| {
        site.said("n1").contains(&connected)
    });
    site.ready("n1");
}

#[test]
fn a_token_in_the_environment_will_do() {
    let mut site = Site::new(true);
    let token = site.token("n1");
    let mut agent = site.agent("n1", "n1", &site.url(), &[]);
    let agent = agent.env("LLMGW_ENROLL_TOKEN", token).spawn().unwrap();
    site.agents.push(agent);
    site.ready("n1");
}

/// Hands everything on, until the client has spoken for the second time: from then on nothing comes back. That is the handshake, and the
/// question without its answer.
fn swallow_answers(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let Ok((mut client, _)) = listener.accept() else {
            return;
        };
        let mut upstream = TcpStream::connect(server).unwrap();
        let spoken: &'static AtomicUsize = Box::leak(Box::default());
        let (mut back, mut to_client) =
            (upstream.try_clone().unwrap(), client.try_clone().unwrap());
        std::thread::spawn(move || {
            let mut buffer = [0; 16 << 10];
            while let Ok(count @ 1..) = back.read(&mut buffer) {
                if spoken.load(Ordering::SeqCst) < 2
                    && to_client.write_all(&buffer[..count]).is_err()
                {
                    return;
                }
            }
        });
        let mut buffer = [0; 16 << 10];
        while let Ok(count @ 1..) = client.read(&mut buffer) {
            spoken.fetch_add(1, Ordering::SeqCst);
            if upstream.write_all(&buffer[..count]).is_err() {
                return;
            }
        }
    });
    address
}

#[test]
fn an_agent_that_is_killed_before_the_answer_gets_its_certificate_and_no_other_agent_does() {
    let mut site = Site::new(true);
    let file = site.token_file(&site.token("n1"));
    let proxy = format!("https://{}", swallow_answers(site.addresses[2]));
    site.start_agent("n1", "n1", &proxy, &["--enroll", &file]);
    site.until("the server signed", |site| {
        site.said("server").contains("was enrolled from")
    });
    site.kill_agents();
    let state = Path::new(&site.at("n1")).join("tls");
    assert!(state.join("agent-key.pem").exists());
    assert!(!state.join("agent.pem").exists());
    // The server forgets nothing either.
    site.kill_server();
    site.start_server();
    let url = site.url();
    let (status, said) = site.agent_ends("other", "n1", &url, &["--enroll", &file]);
    assert_eq!(status, 1, "{said}");
    assert!(
        said.contains("used_token: the token of node `n1` was used already"),
        "{said}"
    );
    site.start_agent("n1", "n1", &url, &["--enroll", &file]);
    site.ready("n1");
}

#[test]
fn a_server_of_another_authority_never_sees_the_token() {
    let mut site = Site::new(true);
    let token = site.token("n1");
    let (_, authority) = token.rsplit_once('.').unwrap();
    let file = site.token_file(&forged(&token, authority));
    let url = site.url();
    let (status, said) = site.agent_ends("n1", "n1", &url, &["--enroll", &file]);
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("the token was not sent"), "{said}");
    assert!(said.contains(&format!("sha256:{authority}")), "{said}");
    let said = site.said("server");
    assert!(!said.contains("enrolled"), "{said}");
    // The same token as it was still works: nobody had it.
    let file = site.token_file(&token);
    site.start_agent("n1", "n1", &url, &["--enroll", &file]);
    site.ready("n1");
}

#[test]
fn a_token_that_is_refused_ends_the_agent_with_the_reason_on_both_sides() {
    let mut site = Site::new(true);
    let url = site.url();
    let token = site.token("n1");
    let unknown = forged(&token, secret(&token));
    let expired = site.ask_token("n1", &["--expires", "1s", "--format", "json"]);
    let expired: Value = serde_json::from_slice(&expired.stdout).unwrap();
    let expired = expired["token"].as_str().unwrap().to_owned();
    // Its second is over once the clock has shown another two.
    let seconds = || {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs()
    };
    let made = seconds();
    site.until("the token has expired", |_| seconds() > made + 1);
    for (token, code, sentence) in [
        (
            &token,
            "unknown_token",
            "is not the last one that was made for it here",
        ),
        (&unknown, "unknown_token", "llmgw ctl cert token --node n1"),
        (&expired, "expired_token", "expired at 20"),
    ] {
        let file = site.token_file(token);
        let (status, said) = site.agent_ends("n1", "n1", &url, &["--enroll", &file]);
        assert_eq!(status, 1, "{said}");
        assert!(
            said.contains(&format!("does not enrol node `n1`: {code}: ")),
            "{said}"
        );
        assert!(said.contains(sentence), "{said}");
        let told = site.said("server");
        assert!(
            told.contains(&format!("was not enrolled as node `n1`: {code}: ")),
            "{told}"
        );
        for text in [said, told] {
            assert!(!text.contains(secret(token)), "{text}");
        }
    }
}

#[test]
fn what_is_wrong_with_the_arguments_is_said_before_anything_is_dialled() {
    let mut site = Site::new(true);
    let token = site.token("n1");
    let plain = format!("http://{}", site.addresses[2]);
    let file = site.token_file(&token);
    for (node, server, words, said) in [
        (
            "n2",
            site.url(),
            &file,
            "the token is for node `n1`, this is node `n2`",
        ),
        ("n1", plain, &file, "`--enroll` needs TLS"),
        (
            "n1",
            site.url(),
            &"@absent".to_owned(),
            "absent: it cannot be read",
        ),
        (
            "n1",
            site.url(),
            &token[..60].to_owned(),
            "that is no token",
        ),
    ] {
        let (status, told) = site.agent_ends("n1", node, &server, &["--enroll", words]);
        assert_eq!(status, 2, "{told}");
        assert!(told.contains(said), "{told}");
        assert!(!told.contains(secret(&token)), "{told}");
    }
    let said = site.said("server");
    for trace in ["enrolled", "handshake"] {
        assert!(!said.contains(trace), "{said}");
    }
}

#[test]
fn a_server_without_the_authoritys_key_says_what_there_is_instead() {
    let mut site = Site::new(true);
    let file = site.token_file(&site.token("n1"));
    site.kill_server();
    site.configure(false);
    site.start_server();
    let refused = site.ask_token("n1", &[]);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.stdout.is_empty());
    let url = site.url();
    let (status, told) = site.agent_ends("n1", "n1", &url, &["--enroll", &file]);
    assert_eq!(status, 1, "{told}");
    for text in [said, told] {
        assert!(text.contains("enrolment is off on this server"), "{text}");
        assert!(text.contains("`agents.tls.ca_key`"), "{text}");
        assert!(text.contains("`llmgw ctl cert agent`"), "{text}");
    }
}

#[test]
fn an_authoritys_key_that_cannot_be_used_is_told_by_check_and_keeps_the_server_from_starting() {
    let site = Site::new(true);
    let other = site.at("other");
    site.cert(&["ca", "--out", &other]);
    fs::copy(site.at("ca/ca-key.pem"), site.at("kept-key.pem")).unwrap();
    fs::copy(format!("{other}/ca-key.pem"), site.at("ca/ca-key.pem")).unwrap();
    let checked = llmgw()
        .args(["server", "--check", "--config", &site.at("llmgw.yaml")])
        .output()
        .unwrap();
    assert_eq!(checked.status.code(), Some(2), "{checked:?}");
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(said.contains("`agents.tls.ca_key`: "), "{said}");
    assert!(said.contains("ca-key.pem"), "{said}");
    // A server that runs does not take it either.
    let reloaded = site.ctl(&["reload"]);
    assert_eq!(reloaded.status.code(), Some(1), "{reloaded:?}");
    let said = String::from_utf8_lossy(&reloaded.stderr);
    assert!(said.contains("`agents.tls.ca_key`: "), "{said}");
    // Once the file can be used the rest is taken as well, without anybody having asked for it.
    fs::copy(site.at("kept-key.pem"), site.at("ca/ca-key.pem")).unwrap();
    site.until("the configuration is taken", |site| {
        let status: Value = serde_json::from_str(&site.admin("/v1/status")).unwrap();
        status["config"]["last_error"].is_null()
    });
    assert_eq!(site.said("server").matches("was not reloaded").count(), 1);
}

#[test]
fn an_authority_that_signs_before_the_servers_certificate_is_of_it_makes_no_token() {
    let site = Site::new(true);
    let (ca, new, other) = (site.at("ca"), site.at("new"), site.at("other"));
    site.cert(&["ca", "--out", &new]);
    // Both are trusted, the new one signs, and the server still shows what the old one issued.
    let both = [&ca, &new].map(|dir| fs::read_to_string(format!("{dir}/ca.pem")).unwrap());
    fs::write(format!("{ca}/ca.pem"), both.concat()).unwrap();
    fs::copy(format!("{new}/ca-key.pem"), format!("{ca}/ca-key.pem")).unwrap();
    assert!(site.ctl(&["reload"]).status.success());
    let refused = site.ask_token("n1", &[]);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("no token would work: "), "{said}");
    let words = ["server", "--check", "--config", &site.at("llmgw.yaml")];
    let checked = llmgw().args(words).output().unwrap();
    assert!(checked.status.success());
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(
        said.contains("warning: `agents.tls.ca_key`: no token would work: "),
        "{said}"
    );
    // As it says.
    site.cert(&[
        "server",
        "--ca",
        &new,
        "--host",
        "127.0.0.1",
        "--out",
        &other,
    ]);
    for file in ["server.pem", "server-key.pem"] {
        fs::copy(format!("{other}/{file}"), site.at(&format!("tls/{file}"))).unwrap();
    }
    assert!(site.ctl(&["reload"]).status.success());
    site.token("n1");
}

#[test]
fn a_certificate_that_was_revoked_takes_its_token_and_its_key_with_it() {
    let mut site = Site::new(true);
    let (file, url) = (site.token_file(&site.token("n1")), site.url());
    site.start_agent("n1", "n1", &url, &["--enroll", &file]);
    site.ready("n1");
    site.kill_agents();
    let tls = site.at("n1/tls");
    let first = fs::read_to_string(format!("{tls}/agent.pem")).unwrap();
    let told = site.said("server");
    let (_, serial) = told.split_once("its certificate has serial ").unwrap();
    let serial = serial.split(' ').next().unwrap();
    let config = fs::read_to_string(site.at("llmgw.yaml")).unwrap();
    let denies = config.replace(
        "heartbeat:",
        &format!("deny_serials: [\"{serial}\"], heartbeat:"),
    );
    fs::write(site.at("llmgw.yaml"), denies).unwrap();
    assert!(site.ctl(&["reload"]).status.success());
    // Its token is as good as it was, and its key is the same; and so it is with a new token.
    fs::remove_file(format!("{tls}/agent.pem")).unwrap();
    let told = format!("serial {serial}, which was revoked: remove its `agent-key.pem` too");
    for makes_new in [false, true] {
        if makes_new {
            site.token_file(&site.token("n1"));
        }
        let (status, said) = site.agent_ends("n1", "n1", &url, &["--enroll", &file]);
        assert_eq!(status, 1, "{said}");
        assert!(
            said.contains("revoked_key: ") && said.contains(&told),
            "{said}"
        );
        assert!(!Path::new(&tls).join("agent.pem").exists());
    }
    // As it says.
    fs::remove_file(format!("{tls}/agent-key.pem")).unwrap();
    site.start_agent("n1", "n1", &url, &["--enroll", &file]);
    site.ready("n1");
    let again = fs::read_to_string(format!("{tls}/agent.pem")).unwrap();
    assert_ne!(again, first);
}
