//! Who may import whom, who may name Lua, who may start a process: `docs/architecture.md` says it, this holds it.

use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A crate, and which of ours it may depend on outside of its tests.
const ARROWS: [(&str, &[&str]); 4] = [
    ("proto", &[]),
    ("plugins", &["llmgw-proto"]),
    ("core", &["llmgw-plugins", "llmgw-proto"]),
    ("agent", &["llmgw-proto"]),
];

/// The top level is fixed: nothing beside these, dot-files and what git ignores.
const TOP_LEVEL: [&str; 12] = [
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "agent",
    "core",
    "docs",
    "examples",
    "plugins",
    "policies",
    "proto",
    "tests",
];

fn manifest(name: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(name).join("Cargo.toml")).unwrap()
}

/// The names under `[dependencies]`, those of the tests left out.
fn dependencies(manifest: &str) -> Vec<&str> {
    manifest
        .split("\n[")
        .filter(|section| section.starts_with("dependencies]"))
        .flat_map(|section| section.lines().skip(1))
        .filter_map(|line| line.split(['.', '=', ' ']).next())
        .filter(|name| !name.is_empty() && !name.starts_with('#'))
        .collect()
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// What comes before the tests of a file.
fn code_of(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    text.split("#[cfg(test)]").next().unwrap().to_string()
}

#[test]
fn each_crate_imports_only_those_below_it() {
    for (name, allowed) in ARROWS {
        let manifest = manifest(name);
        for dependency in dependencies(&manifest) {
            assert!(
                !dependency.starts_with("llmgw-") || allowed.contains(&dependency),
                "{name} may not depend on {dependency}"
            );
        }
    }
}

#[test]
fn only_plugins_names_lua() {
    for (name, _) in ARROWS {
        let manifest = manifest(name);
        let names_lua = dependencies(&manifest).contains(&"mlua");
        assert_eq!(names_lua, name == "plugins", "{name}");
    }
}

#[test]
fn only_proto_names_grpc() {
    for (name, _) in ARROWS {
        let manifest = manifest(name);
        for grpc in ["tonic", "prost"] {
            let names_it = dependencies(&manifest).contains(&grpc);
            assert_eq!(names_it, name == "proto", "{name} and {grpc}");
        }
    }
}

#[test]
fn no_crate_but_the_agent_starts_a_process() {
    for (name, _) in ARROWS.iter().filter(|(name, _)| *name != "agent") {
        let mut files = Vec::new();
        sources(&Path::new(ROOT).join(name).join("src"), &mut files);
        for file in files {
            // Tests beside the code may.
            if file.ends_with("tests.rs") {
                continue;
            }
            let code = code_of(&file);
            for way in [
                "process::Command",
                "Command::new",
                "libc::fork",
                "libc::exec",
            ] {
                assert!(!code.contains(way), "{} has `{way}`", file.display());
            }
        }
    }
}

#[test]
fn nothing_was_added_to_the_top_level() {
    let mut names: Vec<String> = fs::read_dir(ROOT)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with('.') && name != "target")
        .collect();
    names.sort();
    assert_eq!(names, TOP_LEVEL);
}
