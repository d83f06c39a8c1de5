//! The examples and the configurations in the documents are right: `--check` takes each of them.

use std::path::{Path, PathBuf};
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn checked(directory: &Path, file: &Path) {
    let ran = Command::new(env!("CARGO_BIN_EXE_llmgw"))
        .args(["server", "--check", "--config"])
        .arg(file)
        .current_dir(directory)
        // What the examples take from the environment.
        .env("ENGINE_KEY", "secret")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{}: {said}", file.display());
}

#[test]
fn every_example_passes_its_check() {
    let examples = Path::new(ROOT).join("examples");
    let files: Vec<PathBuf> = std::fs::read_dir(&examples)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "yaml")
        })
        .collect();
    assert!(!files.is_empty());
    for file in files {
        checked(&examples, &file);
    }
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
