//! Programs for tests: shell scripts in a directory of their own.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A directory with scripts, removed when dropped.
pub struct Scripts {
    path: PathBuf,
}

impl Scripts {
    /// `test` must be unique among the tests of this process.
    pub fn new(test: &str) -> Scripts {
        let name = format!("llmgw-scripts-{test}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Scripts { path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes an executable script. A child writes it: a file that this process has open for writing while another test
    /// forks can't be executed.
    pub fn program(&self, name: &str, script: &str) -> PathBuf {
        let path = self.path.join(name);
        let mut writer = Command::new("sh")
            .args(["-c", "cat > \"$0\" && chmod 755 \"$0\""])
            .arg(&path)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut pipe = writer.stdin.take().unwrap();
        write!(pipe, "#!/bin/sh\n{script}\n").unwrap();
        drop(pipe);
        assert!(writer.wait().unwrap().success());
        path
    }
}

impl Drop for Scripts {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Compiles `nvml/mock.c` into a library, with these definitions.
pub fn mock_nvml(scripts: &Scripts, definitions: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/inventory/gpu/nvml/mock.c");
    let library = scripts.path().join("libnvidia-ml.so.1");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
        .args([&library, &source])
        .args(definitions)
        .status();
    assert!(
        compiled
            .expect("a C compiler, which the build needs anyway")
            .success()
    );
    library
}
