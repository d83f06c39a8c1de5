//! The examples and the configurations in the documents are right: `--check` takes each of them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// What `examples/*/run` says of the ports and engines that it starts.
const FROM_THE_RUN_SCRIPTS: [(&str, &str); 5] = [
    ("GATEWAY_PORT", "8080"),
    ("ADMIN_PORT", "8081"),
    ("ENGINE_PORT", "9001"),
    ("ENGINE", "vllm"),
    ("STATE", ".llmgw"),
];

/// A directory with an example and the certificates that it names, which no repository holds.
fn with_certificates(example: &Path) -> PathBuf {
    let name = format!("llmgw-example-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&directory).unwrap();
    for words in [
        "ca --out authority",
        "server --ca authority --host 10.0.0.1 --out .",
        "agent --ca authority --node n1 --out .",
    ] {
        let made = Command::new(env!("CARGO_BIN_EXE_llmgw"))
            .args(["ctl", "cert"])
            .args(words.split(' '))
            .current_dir(&directory)
            .output()
            .unwrap();
        assert!(made.status.success(), "{words}: {made:?}");
    }
    for file in files_below(example) {
        std::fs::copy(&file, directory.join(file.file_name().unwrap())).unwrap();
    }
    directory
}

/// The server checks its own files, `inventory` reads an agent's.
fn checked(directory: &Path, file: &Path) {
    let is_agent = file.file_name().is_some_and(|name| name == "agent.yaml");
    let arguments: &[&str] = match is_agent {
        true => &["agent", "inventory", "--config"],
        false => &["server", "--check", "--config"],
    };
    let ran = Command::new(env!("CARGO_BIN_EXE_llmgw"))
        .args(arguments)
        .arg(file)
        .current_dir(directory)
        // What the examples take from the environment.
        .env("ENGINE_KEY", "secret")
        .envs(FROM_THE_RUN_SCRIPTS)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{}: {said}", file.display());
}

#[test]
fn every_example_passes_its_check() {
    let examples = Path::new(ROOT).join("examples");
    let fleet = with_certificates(&examples.join("fleet"));
    let mut files = files_below(&examples);
    files.retain(|path| !path.starts_with(examples.join("fleet")));
    files.extend(files_below(&fleet));
    files.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "yaml")
    });
    assert!(files.len() > 2, "{files:?}");
    for file in files {
        checked(&examples, &file);
    }
    std::fs::remove_dir_all(&fleet).unwrap();
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => files_below(&path),
            false => vec![path],
        })
        .collect()
}

#[test]
fn the_configurations_in_the_documents_pass_their_check() {
    let directory = std::env::temp_dir().join(format!("llmgw-documents-{}", std::process::id()));
    // One of them names a policy directory.
    std::fs::create_dir_all(directory.join("policies")).unwrap();
    for document in ["README.md", "docs/configuration.md"] {
        let text = std::fs::read_to_string(Path::new(ROOT).join(document)).unwrap();
        let blocks: Vec<&str> = text
            .split("```yaml\n")
            .skip(1)
            .filter_map(|rest| rest.split("```").next())
            .collect();
        assert!(!blocks.is_empty(), "{document}");
        for block in blocks {
            let file = directory.join("llmgw.yaml");
            std::fs::write(&file, block).unwrap();
            checked(&directory, &file);
        }
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn the_units_of_systemd_are_right_where_systemd_can_say_so() {
    let units = Path::new(ROOT).join("examples/systemd");
    let directory = std::env::temp_dir().join(format!("llmgw-units-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    for name in ["llmgw-server.service", "llmgw-agent.service"] {
        let text = std::fs::read_to_string(units.join(name)).unwrap();
        let (installed, here) = ("/usr/local/bin/llmgw", env!("CARGO_BIN_EXE_llmgw"));
        assert!(text.contains(installed), "{name}");
        let file = directory.join(name);
        std::fs::write(&file, text.replace(installed, here)).unwrap();
        let ran = Command::new("systemd-analyze")
            .arg("verify")
            .arg(&file)
            .output();
        let ran = match ran {
            Ok(ran) => ran,
            Err(error) => {
                not_verified(&error);
                break;
            }
        };
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success() && said.is_empty(), "{name}: {said}");
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Not every machine that runs tests has systemd; where all tests must run, it is to be installed.
fn not_verified(error: &std::io::Error) {
    let reason = format!("systemd-analyze (Debian: systemd) can't be started: {error}");
    let required = std::env::var("LLMGW_REQUIRE_REAL");
    assert_ne!(required.as_deref(), Ok("1"), "{reason}");
    // Not `eprintln!`, which the test runner keeps to itself when a test passes.
    let _ = writeln!(std::io::stderr(), "skipped: the units of systemd: {reason}");
}

#[test]
fn systemd_never_gives_up_on_a_unit() {
    for name in ["llmgw-server.service", "llmgw-agent.service"] {
        let unit = Path::new(ROOT).join("examples/systemd").join(name);
        let unit = std::fs::read_to_string(unit).unwrap();
        // By systemd's default the fifth failure within ten seconds is the last. The line counts in this section only.
        let section = unit.split("[Service]").next().unwrap();
        let line = "StartLimitIntervalSec=0";
        assert!(section.lines().any(|found| found == line), "{name}: {line}");
        assert!(unit.lines().any(|found| found == "Restart=always"));
    }
}

#[test]
fn the_agents_unit_lets_engines_outlive_it_and_gives_them_a_home_to_write_to() {
    let agent = Path::new(ROOT).join("examples/systemd/llmgw-agent.service");
    let agent = std::fs::read_to_string(agent).unwrap();
    for line in [
        "KillMode=process",
        "Delegate=yes",
        "OOMPolicy=continue",
        // The first is the user's home: of a path alone systemd leaves what is above it to root.
        "StateDirectory=llmgw llmgw/agent",
    ] {
        assert!(agent.lines().any(|found| found == line), "{line}");
    }
}
