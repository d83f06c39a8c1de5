//! Commands against a real admin listener.

use std::io::Write;
use std::path::Path;
use std::sync::atomic::Ordering;

use clap::Parser;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::client::Admin;
use super::{CtlArgs, execute};
use crate::admin::tests::listen;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: CtlArgs,
}

/// Runs a command line; returns exit status and stdout.
pub(crate) async fn ctl(words: &[&str]) -> (u8, String) {
    let args = Line::try_parse_from(["ctl"].iter().chain(words))
        .unwrap_or_else(|error| panic!("{error}"))
        .args;
    let mut out = Vec::new();
    let status = execute(&args, &mut out, false).await;
    (status, String::from_utf8(out).unwrap())
}

#[tokio::test]
async fn commands_show_what_the_server_says() {
    let admin = listen(None, Ok(())).await;
    let address = format!("http://{}", admin.address);
    let cases = [
        (&["status"][..], "up 1m1s"),
        (&["models"], "smollm2  1/1    llamacpp  default"),
        (&["replicas"], "smollm2  smollm2/0  llamacpp  ready  2/4"),
        (&["policies"], "generation  "),
        (&["status", "--format", "json"], "\"uptime_ms\": 61000"),
        (&["models", "--format", "json"], "\"name\": \"smollm2\""),
        (&["replicas", "--format", "json"], "\"model\": \"smollm2\""),
        (&["policies", "--format", "json"], "\"generation\": "),
    ];
    for (words, expected) in cases {
        let (status, text) = ctl(&[&["--admin", address.as_str()], words].concat()).await;
        assert_eq!(status, 0, "{words:?}");
        assert!(text.contains(expected), "{words:?}\n{text}");
        assert!(
            words.contains(&"json") || text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
        assert!(
            !words.contains(&"json") || serde_json::from_str::<serde_json::Value>(&text).is_ok(),
            "{text}"
        );
    }
}

#[tokio::test]
async fn a_reload_that_fails_is_1_and_one_that_works_is_0() {
    let admin = listen(None, Ok(())).await;
    let address = admin.address.to_string();
    assert_eq!(
        ctl(&["reload", "--admin", &address]).await,
        (0, "generation 2\n".to_owned())
    );
    assert_eq!(
        ctl(&["reload", "--admin", &address]).await,
        (1, String::new())
    );
    assert_eq!(admin.confirmed.load(Ordering::SeqCst), 0);
    assert_eq!(
        ctl(&["reload", "--confirm", "--admin", &address]).await.0,
        0
    );
    assert_eq!(admin.confirmed.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_server_that_refuses_or_is_not_there_is_3_and_a_bad_address_is_2() {
    let admin = listen(Some("s3cret"), Ok(())).await;
    let address = admin.address.to_string();
    let gone = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    let cases: [(&[&str], u8); 7] = [
        (&["--admin", &address, "--token", "s3cret"], 0),
        (&["--admin", &address, "--token", "wrong"], 3),
        (&["--admin", &address], 3),
        (&["--admin", &gone], 3),
        (&["--admin", "https://localhost:1"], 2),
        (&["--admin", "ftp://localhost"], 2),
        (&["--admin", &address, "--token", "a\nb"], 2),
    ];
    for (words, expected) in cases {
        assert_eq!(
            ctl(&[words, &["status"]].concat()).await.0,
            expected,
            "{words:?}"
        );
    }
}

#[tokio::test]
async fn messages_name_the_address_and_the_way_out() {
    let admin = listen(Some("s3cret"), Ok(())).await;
    let address = admin.address.to_string();
    let gone = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    let refused = Admin::new(&address, None, None)
        .unwrap()
        .get("/v1/status")
        .await
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains(&address) && refused.contains("LLMGW_ADMIN_TOKEN"),
        "{refused}"
    );
    let missing = Admin::new(&gone, None, None)
        .unwrap()
        .get("/v1/status")
        .await
        .unwrap_err()
        .to_string();
    assert!(
        missing.contains(&gone) && missing.contains("--admin URL"),
        "{missing}"
    );
    let ca = Path::new("/nonexistent/ca.pem");
    for (url, ca, parts) in [
        ("https://x", None, ["needs the authority", "LLMGW_ADMIN_CA"]),
        (
            "http://x",
            Some(ca),
            ["http would not ask for its word", "write https://"],
        ),
        (
            "https://x",
            Some(ca),
            ["--admin-ca: /nonexistent/ca.pem", "cannot be read"],
        ),
        (
            "x:1",
            Some(ca),
            ["--admin-ca: /nonexistent/ca.pem", "cannot be read"],
        ),
    ] {
        let error = Admin::new(url, None, ca).err().unwrap();
        assert_eq!(error.exit_status(), 2);
        let said = error.to_string();
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    }
}

#[test]
fn a_token_that_others_can_read_on_its_way_is_warned_about() {
    for (url, token, is_said) in [
        ("http://ctl.example:8081", Some("s3cret"), true),
        ("10.0.0.1:8081", Some("s3cret"), true),
        ("http://localhost.example:8081", Some("s3cret"), true),
        ("http://ctl.example:8081", None, false),
        ("http://ctl.example:8081", Some(""), false),
        ("http://127.0.0.1:8081", Some("s3cret"), false),
        ("http://[::1]:8081", Some("s3cret"), false),
        ("localhost", Some("s3cret"), false),
    ] {
        let said = Admin::new(url, token, None).unwrap().warning();
        assert_eq!(said.is_some(), is_said, "{url} {said:?}");
        let said = said.unwrap_or_default();
        assert!(!said.contains("s3cret") && (!is_said || said.contains(url)));
    }
}

#[tokio::test]
async fn something_else_that_listens_there_is_told_apart() {
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        "SSH-2.0-OpenSSH\r\n",
        "",
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 1024]).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        });
        assert_eq!(ctl(&["status", "--admin", &address]).await.0, 3, "{answer}");
    }
}

/// What `ctl` says of this answer.
async fn said_of(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.read(&mut [0; 1024]).await;
        let _ = stream.write_all(answer.as_bytes()).await;
    });
    let admin = Admin::new(&address, None, None).unwrap();
    admin.get("/v1/status").await.unwrap_err().to_string()
}

#[tokio::test]
async fn an_engine_that_answers_behind_the_gateway_is_not_taken_for_the_server() {
    let said = said_of(
        "HTTP/1.1 404 Not Found\r\ncontent-length: 38\r\n\r\n{\"error\":{\"message\":\"File Not Found\"}}",
    )
    .await;
    for part in [
        "answered, but not as llmgw's admin address does: status 404 Not Found, without x-llmgw-admin",
        "It may be the address for clients (`listen:`",
        "--admin URL",
    ] {
        assert!(said.contains(part), "{said}");
    }
}

#[tokio::test]
async fn an_error_of_several_lines_keeps_them() {
    let said = said_of(
        "HTTP/1.1 422 x\r\nx-llmgw-admin: 1\r\ncontent-length: 45\r\n\r\n{\"error\":{\"message\":\"a.yaml:3\\n  |\\u001b ^\"}} ",
    )
    .await;
    assert!(said.ends_with("refused (422): a.yaml:3\n  |? ^"), "{said}");
}

#[test]
fn an_address_is_shown_with_the_port_that_is_dialled() {
    let admin = Admin::new("localhost", None, None).unwrap();
    let said = admin.unreachable("refused").to_string();
    assert!(said.starts_with("cannot reach http://localhost:80: refused"));
    let said = Admin::new("https://x", None, None).err().unwrap();
    assert!(!said.to_string().contains("http://127"), "{said}");
}

#[tokio::test]
async fn a_new_key_needs_no_server() {
    let (status, text) = ctl(&["key", "new", "--tenant", "research", "--format", "json"]).await;
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, json["tenant"].as_str()), (0, Some("research")));
    assert!(json["hash"].as_str().unwrap().starts_with("sha256:"));
    assert_eq!(ctl(&["key", "new", "--tenant", "a b"]).await.0, 2);
}

#[tokio::test]
async fn a_reader_that_has_enough_is_no_failure() {
    struct Closed;
    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let admin = listen(None, Ok(())).await;
    let address = admin.address.to_string();
    let args = Line::try_parse_from(["ctl", "status", "--admin", &address])
        .unwrap()
        .args;
    assert_eq!(execute(&args, &mut Closed, false).await, 0);
}

#[tokio::test]
async fn a_generation_that_is_not_there_is_1_and_says_which_are() {
    let admin = listen(None, Ok(())).await;
    let address = admin.address.to_string();
    let cases: [(&[&str], u8, &str); 6] = [
        (&["rollback"], 1, ""),
        (&["pin", "9"], 1, ""),
        (
            &["pin", "1"],
            0,
            "generation 1 is in force, the directory is ignored",
        ),
        (
            &["unpin"],
            0,
            "generation 1 is in force, the directory is followed again",
        ),
        (&["untrip"], 0, "no hook was switched off\n"),
        (&["untrip", "--format", "json"], 0, "\"generation\": 1"),
    ];
    for (words, expected, text) in cases {
        let words = [&["policies", "--admin", &address], words].concat();
        let (status, found) = ctl(&words).await;
        assert_eq!(status, expected, "{words:?} {found}");
        assert!(found.contains(text), "{words:?} {found}");
    }
    assert!(Line::try_parse_from(["ctl", "policies", "pin", "x"]).is_err());
}
