//! `llmgw ctl cert`: openssl agrees with what it issues, and files are written whole, for their owner, over nothing that is there.

mod harness;
#[path = "harness/more.rs"]
mod more;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use harness::Setup;
use llmgw_proto::identity::files::{Readers, read_key};
use llmgw_proto::identity::request::{make_key, request_for};
use llmgw_proto::identity::{Identity, RequestedKey};
use more::{Ran, ctl, llmgw};
use serde_json::Value;

/// Runs that are killed.
const KILLS: u32 = 40;

/// A directory of one test, gone when dropped.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let path = std::env::temp_dir().join(format!("llmgw-cert-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    /// `llmgw ctl cert` and these words.
    fn cert(&self, words: &str) -> Ran {
        let words: Vec<&str> = words.split_whitespace().collect();
        llmgw(&self.0, &[&["ctl", "cert"], words.as_slice()].concat())
    }

    fn done(&self, words: &str) -> String {
        let ran = self.cert(words);
        assert_eq!((ran.status, &*ran.stderr), (0, ""), "{words}");
        ran.stdout
    }

    fn refused(&self, words: &str, status: i32) -> String {
        let ran = self.cert(words);
        assert_eq!(
            (ran.status, &*ran.stdout),
            (status, ""),
            "{words}\n{}",
            ran.stderr
        );
        ran.stderr
    }

    /// Whether openssl agrees, and what it says on both outputs.
    fn openssl(&self, words: &str) -> (bool, String) {
        let output = Command::new("openssl")
            .current_dir(&self.0)
            .args(words.split_whitespace())
            .stdin(Stdio::null())
            .output()
            .expect("openssl is needed: install Debian's package `openssl`");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        (output.status.success(), text)
    }

    fn agrees(&self, words: &str) -> String {
        let (is_good, text) = self.openssl(words);
        assert!(is_good, "openssl {words}\n{text}");
        text
    }

    fn disagrees(&self, words: &str, why: &str) {
        let (is_good, text) = self.openssl(words);
        assert!(!is_good && text.contains(why), "openssl {words}\n{text}");
    }

    fn json(&self, words: &str) -> Value {
        serde_json::from_str(&self.done(&format!("{words} --format json"))).unwrap()
    }

    fn mode(&self, path: &str) -> u32 {
        let metadata = fs::metadata(self.0.join(path)).unwrap();
        metadata.permissions().mode() & 0o7777
    }

    fn set_mode(&self, path: &str, mode: u32) {
        fs::set_permissions(self.0.join(path), fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Every file below, with its bytes.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut open = vec![self.0.clone()];
        while let Some(directory) = open.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => open.push(path),
                    false => {
                        let name = path.strip_prefix(&self.0).unwrap().to_owned();
                        found.insert(name, fs::read(&path).unwrap());
                    }
                }
            }
        }
        found
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const HOSTS: &str =
    "--host ctl.example --host 10.0.0.1 --host [fd00::1] --host *.pool.example --host ctl.example";

#[test]
fn openssl_verifies_what_is_issued_for_what_it_is_and_nothing_else() {
    let dir = Dir::new("verify");
    dir.done("ca --out ca");
    dir.done(&format!("server --ca ca {HOSTS} --out server"));
    dir.done("agent --ca ca --node gpu-01 --out agent");
    let verify = "verify -x509_strict -check_ss_sig -CAfile ca/ca.pem";
    dir.agrees(&format!("{verify} ca/ca.pem"));
    dir.agrees(&format!("{verify} -purpose sslserver server/server.pem"));
    dir.agrees(&format!("{verify} -purpose sslclient agent/agent.pem"));
    let unsuitable = "unsuitable certificate purpose";
    dir.disagrees(
        &format!("{verify} -purpose sslclient server/server.pem"),
        unsuitable,
    );
    dir.disagrees(
        &format!("{verify} -purpose sslserver agent/agent.pem"),
        unsuitable,
    );

    let server = format!("{verify} -purpose sslserver server/server.pem");
    for good in [
        "-verify_hostname ctl.example",
        "-verify_hostname a.pool.example",
        "-verify_ip 10.0.0.1",
        "-verify_ip fd00::1",
    ] {
        dir.agrees(&server.replace(" server/", &format!(" {good} server/")));
    }
    for (bad, why) in [
        ("-verify_hostname other.example", "hostname mismatch"),
        ("-verify_hostname pool.example", "hostname mismatch"),
        ("-verify_ip 10.0.0.2", "IP address mismatch"),
        ("-verify_ip fd00::2", "IP address mismatch"),
    ] {
        dir.disagrees(&server.replace(" server/", &format!(" {bad} server/")), why);
    }

    dir.done("ca --out other");
    let other = "verify -CAfile other/ca.pem agent/agent.pem";
    dir.disagrees(other, "unable to get local issuer certificate");
    for (file, key) in [
        ("ca/ca.pem", "ca/ca-key.pem"),
        ("server/server.pem", "server/server-key.pem"),
        ("agent/agent.pem", "agent/agent-key.pem"),
    ] {
        let of_file = dir.agrees(&format!("x509 -in {file} -noout -pubkey"));
        assert_eq!(of_file, dir.agrees(&format!("pkey -in {key} -pubout")));
        dir.agrees(&format!("pkey -in {key} -noout -check"));
        let (file, key) = (dir.0.join(file), dir.0.join(key));
        Identity::load(&file, &key).unwrap();
    }
}

#[test]
fn openssl_reads_what_show_says() {
    let dir = Dir::new("show");
    dir.done("ca --out ca");
    dir.done(&format!("server --ca ca {HOSTS} --out server"));
    dir.done("agent --ca ca --node gpu-01 --out agent");
    for (file, extensions) in [
        (
            "ca/ca.pem",
            &[
                "CA:TRUE, pathlen:0",
                "Certificate Sign, CRL Sign",
                "Subject Key Identifier",
            ][..],
        ),
        (
            "server/server.pem",
            &[
                "CA:FALSE",
                "Digital Signature",
                "TLS Web Server Authentication",
                "DNS:ctl.example, IP Address:10.0.0.1, IP Address:FD00:0:0:0:0:0:0:1, DNS:*.pool.example",
                "Authority Key Identifier",
            ],
        ),
        (
            "agent/agent.pem",
            &[
                "CA:FALSE",
                "Digital Signature",
                "TLS Web Client Authentication",
                "Authority Key Identifier",
            ],
        ),
    ] {
        let shown = &dir.json(&format!("show {file}"))[0];
        let text = |key: &str| shown[key].as_str().unwrap().to_owned();
        let openssl = |what: &str| {
            let line = dir.agrees(&format!("x509 -in {file} -noout {what}"));
            line.trim().split_once('=').unwrap().1.to_owned()
        };
        assert_eq!(openssl("-serial").to_lowercase(), text("serial"));
        let fingerprint = openssl("-fingerprint -sha256").replace(':', "");
        assert_eq!(
            format!("sha256:{}", fingerprint.to_lowercase()),
            text("fingerprint")
        );
        let subject = openssl("-subject -nameopt RFC2253");
        assert_eq!(subject, text("subject"));
        assert_eq!(openssl("-issuer -nameopt RFC2253"), text("issuer"));
        let date = |what: &str| openssl(&format!("{what} -dateopt iso_8601")).replace(' ', "T");
        assert_eq!(date("-startdate"), text("not_before"));
        assert_eq!(date("-enddate"), text("not_after"));
        let printed = dir.agrees(&format!("x509 -in {file} -noout -text"));
        for extension in extensions {
            assert!(
                printed.contains(extension),
                "{file}: {extension}\n{printed}"
            );
        }
        assert_eq!(printed.contains("Alternative"), file.starts_with("server"));

        let page = dir.done(&format!("show {file}"));
        for part in ["serial", "fingerprint", "subject", "not_after"] {
            assert!(page.contains(&text(part)), "{part}\n{page}");
        }
        let days = if file.starts_with("ca") { 3_649 } else { 364 };
        let left = shown["days_left"].as_i64().unwrap();
        assert!((days..=days + 1).contains(&left), "{left}");
        // A second later it may be a day less.
        let is_said = |left: i64| page.contains(&format!("{left} days left"));
        assert!(is_said(left) || is_said(left - 1), "{page}");
    }
}

#[test]
fn every_certificate_of_a_chain_is_shown() {
    let dir = Dir::new("chain");
    dir.done("ca --out ca");
    dir.done(&format!("server --ca ca {HOSTS} --out server"));
    let chain = [dir.0.join("server/server.pem"), dir.0.join("ca/ca.pem")];
    let chain = chain.map(|path| fs::read_to_string(path).unwrap()).concat();
    fs::write(dir.0.join("chain.pem"), chain).unwrap();
    let shown = dir.json("show chain.pem");
    assert_eq!(shown.as_array().unwrap().len(), 2);
    assert_eq!(shown[0]["hosts"][2], "fd00::1");
    assert_eq!(shown[0]["usages"], serde_json::json!(["serverAuth"]));
    assert_eq!(shown[1]["authority"], true);
}

#[test]
fn what_to_copy_where_is_said_and_no_key_is() {
    let dir = Dir::new("pages");
    let ca = dir.done("ca --out ca");
    for part in [
        "Copy ca/ca.pem to every machine",
        "Leave ca/ca-key.pem here",
        "llmgw ctl cert agent --ca ca --node ID",
    ] {
        assert!(ca.contains(part), "{ca}");
    }
    let server = dir.done("server --ca ca --host ctl.example --out server");
    let lines = "agents:\n  listen: 0.0.0.0:8443\n  tls: {cert: server.pem, key: server-key.pem, ca: ca.pem}\n";
    assert!(server.contains(lines), "{server}");
    let agent = dir.done("agent --ca ca --node gpu-01 --out agent");
    let lines = "server: https://HOST:8443\nnode: \"gpu-01\"\ntls: {ca: ca.pem, cert: agent.pem, key: agent-key.pem}\n";
    assert!(agent.contains(lines), "{agent}");
    let json = dir.json("agent --ca ca --node gpu-02 --out second");
    assert_eq!(json["certificate"]["common_name"], "gpu-02");
    let files = ["second/agent.pem", "second/agent-key.pem", "second/ca.pem"];
    assert_eq!(json["files"], serde_json::json!(files));

    let pages = [ca, server, agent, json.to_string()].concat();
    for (path, bytes) in dir.files() {
        let text = String::from_utf8(bytes).unwrap();
        if path.to_string_lossy().contains("-key") {
            assert!(text.starts_with("-----BEGIN PRIVATE KEY-----"), "{text}");
            let secret = text.lines().nth(2).unwrap();
            assert!(!pages.contains(secret), "{pages}");
        }
    }
}

#[test]
fn keys_are_their_owners_whatever_the_umask() {
    let dir = Dir::new("modes");
    for (umask, name) in [("000", "open"), ("077", "closed")] {
        let script = format!(
            "umask {umask}; \"$0\" ctl cert ca --out {name}/ca && \"$0\" ctl cert agent --ca {name}/ca --node gpu-01 --out {name}/agent"
        );
        let status = Command::new("sh")
            .current_dir(&dir.0)
            .args(["-c", &script, env!("CARGO_BIN_EXE_llmgw")])
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        for (path, mode) in [
            ("ca", 0o700),
            ("ca/ca.pem", 0o644),
            ("ca/ca-key.pem", 0o600),
            ("agent", 0o700),
            ("agent/agent.pem", 0o644),
            ("agent/agent-key.pem", 0o600),
            ("agent/ca.pem", 0o644),
        ] {
            assert_eq!(dir.mode(&format!("{name}/{path}")), mode, "{name}/{path}");
        }
        assert_eq!(
            fs::read_dir(dir.0.join(name).join("agent"))
                .unwrap()
                .count(),
            3
        );
    }
}

#[test]
fn nothing_is_overwritten_and_a_refusal_leaves_nothing_behind() {
    let dir = Dir::new("refuse");
    dir.done("ca --out ca");
    dir.done("ca --out other");
    dir.done("server --ca ca --host ctl.example --out server");
    fs::create_dir(dir.0.join("half")).unwrap();
    fs::write(dir.0.join("half/agent.pem"), "mine").unwrap();
    let before = dir.files();
    for (words, file) in [
        ("ca --out ca", "ca/ca-key.pem"),
        (
            "server --ca ca --host new.example --out server",
            "server/server-key.pem",
        ),
        ("agent --ca ca --node gpu-01 --out half", "half/agent.pem"),
    ] {
        let said = dir.refused(words, 1);
        let expected = format!(
            "llmgw ctl: {file}: it exists already and is not overwritten; move it away, or write to another directory\n"
        );
        assert_eq!(said, expected);
    }
    let said = dir.refused("agent --ca other --node gpu-01 --out server", 1);
    assert!(
        said.contains("server/ca.pem: it differs from the ca.pem in other"),
        "{said}"
    );
    let said = dir.refused("agent --ca absent --node gpu-01 --out new", 1);
    assert!(said.contains("absent/ca.pem: it cannot be read"), "{said}");
    assert!(said.contains("`llmgw ctl cert ca --out DIR`"), "{said}");
    dir.set_mode("ca/ca-key.pem", 0o640);
    let said = dir.refused("agent --ca ca --node gpu-01 --out new", 1);
    assert!(
        said.contains("(mode 0640); run `chmod 600 ca/ca-key.pem`"),
        "{said}"
    );
    assert_eq!(dir.files(), before);
    assert!(!dir.0.join("new").exists());
    dir.set_mode("ca/ca-key.pem", 0o400);
    // A server's and an agent's files may lie side by side, with one ca.pem.
    dir.done("agent --ca ca --node gpu-01 --out server");
    assert_eq!(dir.files().len(), before.len() + 2);
}

#[test]
fn slips_of_the_command_line_are_2_and_say_what_would_be_right() {
    let dir = Dir::new("usage");
    dir.done("ca --out ca");
    for (words, said) in [
        (
            "server --ca ca --host https://ctl.example:8443 --out new",
            "is a URL; write the host alone: `ctl.example`",
        ),
        (
            "server --ca ca --host ctl.example:8443 --out new",
            "has a port; write the host alone: `ctl.example`",
        ),
        (
            "server --ca ca --host 0.0.0.0 --out new",
            "is an address to listen on",
        ),
        ("server --ca ca --out new", "--host <HOST>"),
        (
            "agent --ca ca --node gpu/01 --out new",
            "a node id is at most 64 letters, digits",
        ),
        ("agent --ca ca --out new", "--node <ID>"),
        ("show", "<FILE>"),
        ("renew ca/ca.pem", "--ca <DIR>"),
    ] {
        let stderr = dir.refused(words, 2);
        assert!(stderr.contains(said), "{words}\n{stderr}");
    }
    for (words, said) in [
        (
            "show ca/ca-key.pem",
            "ca/ca-key.pem: it holds a private key where a certificate is expected",
        ),
        (
            "show absent.pem",
            "absent.pem: it cannot be read: No such file",
        ),
        (
            "renew ca/ca.pem --ca ca",
            "ca/ca.pem: it is an authority's own certificate, which is not renewed",
        ),
    ] {
        let stderr = dir.refused(words, 1);
        assert!(stderr.contains(said), "{words}\n{stderr}");
    }
    assert!(!dir.0.join("new").exists());
}

#[test]
fn a_renewed_certificate_has_the_same_names_and_key_and_openssl_verifies_it() {
    let dir = Dir::new("renew");
    dir.done("ca --out ca");
    dir.done(&format!("server --ca ca {HOSTS} --out server"));
    dir.done("agent --ca ca --node gpu-01 --out agent");
    let file = dir.0.join("agent/agent.pem");
    let text = format!("# gpu-01, rack 1\n{}", fs::read_to_string(&file).unwrap());
    fs::write(&file, text).unwrap();
    dir.set_mode("agent/agent.pem", 0o640);
    std::os::unix::fs::symlink("agent/agent.pem", dir.0.join("link.pem")).unwrap();
    for (name, file, purpose) in [
        ("server/server.pem", "server/server.pem", "sslserver"),
        ("link.pem", "agent/agent.pem", "sslclient"),
    ] {
        let old = dir.json(&format!("show {file}"))[0].clone();
        let key = dir.agrees(&format!("x509 -in {file} -noout -pubkey"));
        let said = dir.done(&format!("renew {name} --ca ca"));
        let new = dir.json(&format!("show {file}"))[0].clone();
        for part in [
            "subject",
            "hosts",
            "issuer",
            "usages",
            "key_usages",
            "key_id",
        ] {
            assert_eq!(new[part], old[part], "{part}");
        }
        let serial = old["serial"].as_str().unwrap();
        assert_ne!(new["serial"].as_str().unwrap(), serial);
        assert!(
            said.contains(&format!("The old one, serial {serial}, is good until")),
            "{said}"
        );
        assert_eq!(key, dir.agrees(&format!("x509 -in {file} -noout -pubkey")));
        dir.agrees(&format!(
            "verify -x509_strict -CAfile ca/ca.pem -purpose {purpose} {file}"
        ));
    }
    assert!(
        fs::read_to_string(&file)
            .unwrap()
            .starts_with("# gpu-01, rack 1\n")
    );
    assert_eq!(dir.mode("agent/agent.pem"), 0o640);
    assert!(
        fs::symlink_metadata(dir.0.join("link.pem"))
            .unwrap()
            .is_symlink()
    );

    dir.done("ca --out other");
    let before = dir.files();
    let said = dir.refused("renew agent/agent.pem --ca other", 1);
    assert!(
        said.contains("agent/agent.pem: it was issued by `CN=llmgw authority"),
        "{said}"
    );
    assert_eq!(dir.files(), before);
}

#[test]
fn an_authority_that_openssl_made_issues_too() {
    let dir = Dir::new("foreign");
    for (name, key) in [
        ("rsa", "rsa:2048"),
        ("p384", "ec -pkeyopt ec_paramgen_curve:P-384"),
        ("ed25519", "ed25519"),
    ] {
        fs::create_dir(dir.0.join(name)).unwrap();
        dir.agrees(&format!(
            "req -x509 -newkey {key} -nodes -days 30 -subj /C=DE/O=Example/CN=root -addext keyUsage=critical,keyCertSign \
             -keyout {name}/ca-key.pem -out {name}/ca.pem"
        ));
        dir.set_mode(&format!("{name}/ca-key.pem"), 0o600);
        let ran = dir.cert(&format!(
            "agent --ca {name} --node gpu-01 --out {name}/agent"
        ));
        assert_eq!(ran.status, 0, "{name}: {}", ran.stderr);
        let early = "and this certificate with it; make a new authority";
        assert!(ran.stderr.contains(early), "{}", ran.stderr);
        dir.agrees(&format!(
            "verify -x509_strict -CAfile {name}/ca.pem -purpose sslclient {name}/agent/agent.pem"
        ));
    }
}

#[test]
fn signing_requests_are_those_of_openssl() {
    let dir = Dir::new("requests");
    fs::write(dir.0.join("ours-key.pem"), make_key().unwrap()).unwrap();
    fs::set_permissions(
        dir.0.join("ours-key.pem"),
        fs::Permissions::from_mode(0o600),
    )
    .unwrap();
    let key = read_key(&dir.0.join("ours-key.pem"), Readers::Owner).unwrap();
    let ours = request_for(&key, "gpu-01").unwrap();
    fs::write(dir.0.join("ours.pem"), ours).unwrap();
    let said = dir.agrees("req -in ours.pem -noout -verify -subject");
    assert!(
        said.contains("OK") && said.contains("CN = gpu-01"),
        "{said}"
    );

    dir.agrees("req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x -keyout key.pem -outform der -out theirs.der");
    let theirs = fs::read(dir.0.join("theirs.der")).unwrap();
    let requested = RequestedKey::from_request(&theirs).unwrap();
    dir.agrees("pkey -in key.pem -pubout -outform der -out public.der");
    assert_eq!(requested.der(), fs::read(dir.0.join("public.der")).unwrap());
}

#[test]
fn a_kill_at_any_instant_leaves_no_broken_file_and_no_open_key() {
    let dir = Dir::new("kill");
    dir.done("ca --out ca");
    let run = |out: &Path| {
        Command::new(env!("CARGO_BIN_EXE_llmgw"))
            .current_dir(&dir.0)
            .args(["ctl", "cert", "agent", "--ca", "ca", "--node", "gpu-01"])
            .arg("--out")
            .arg(out)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let begin = Instant::now();
    let first = dir.0.join("out");
    assert!(run(&first).wait().unwrap().success());
    assert!(is_whole(&first));
    let whole_run = begin.elapsed();
    for step in 0..KILLS {
        let out = dir.0.join(format!("out-{step}"));
        let mut child = run(&out);
        // The kills spread over the time that a run takes. Which instants they hit differs; the files' rules hold at each.
        std::thread::sleep(whole_run * step / KILLS);
        child.kill().unwrap();
        child.wait().unwrap();
        is_whole(&out);
    }
}

/// Checks what is there, and says whether all of it is.
fn is_whole(out: &Path) -> bool {
    let Ok(entries) = fs::read_dir(out) else {
        return false;
    };
    for entry in entries {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
        assert!(!name.contains("-key") || mode == 0o600, "{name} {mode:o}");
        let is_draft = name.starts_with('.') && name.ends_with(".draft");
        let known = ["agent.pem", "agent-key.pem", "ca.pem"];
        assert!(is_draft || known.contains(&name.as_str()), "{name}");
        if !is_draft {
            let text = fs::read_to_string(entry.path()).unwrap();
            assert!(text.trim_end().ends_with("-----"), "{name}: {text}");
        }
    }
    let certificate = out.join("agent.pem");
    if !certificate.exists() {
        return false;
    }
    // The certificate comes last.
    Identity::load(&certificate, &out.join("agent-key.pem")).unwrap();
    assert!(out.join("ca.pem").exists());
    true
}

#[test]
fn a_configuration_without_agents_signs_for_no_node_from_then_on() {
    let dir = Dir::new("closed");
    dir.done("ca --out ca");
    dir.done("server --ca ca --host 127.0.0.1 --out tls");
    let agents = "agents: {listen: \"127.0.0.1:0\", tls: {cert: tls/server.pem, key: tls/server-key.pem, ca: ca/ca.pem, ca_key: ca/ca-key.pem}}";
    let mut setup = Setup::new().top(agents).model("fake", "");
    for file in [
        "ca/ca.pem",
        "ca/ca-key.pem",
        "tls/server.pem",
        "tls/server-key.pem",
    ] {
        let text = fs::read_to_string(dir.0.join(file)).unwrap();
        setup = setup.file(file, &text);
    }
    let gateway = setup.endpoint("vllm", "http://127.0.0.1:9", "").start();
    let token = || ctl(&gateway, &["cert", "token", "--node", "n1"]);
    let made = token();
    assert_eq!(made.status, 0, "{}", made.stderr);
    let yaml = fs::read_to_string(gateway.dir.join("llmgw.yaml")).unwrap();
    gateway.write_config(&yaml.replace(agents, ""));
    let reloaded = ctl(&gateway, &["reload"]);
    assert_eq!(reloaded.status, 0, "{}", reloaded.stderr);
    let refused = token();
    assert_eq!(refused.status, 1);
    assert!(
        refused.stderr.contains("enrolment is off on this server"),
        "{}",
        refused.stderr
    );
}
