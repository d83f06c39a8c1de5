//! The Lua host from outside: what a directory of policies does to a running process.

mod check;
mod conformance;
mod engines;
mod hostile;
mod inputs;
mod launch;
mod placement;
mod ranges;
mod reload;
mod unreadable;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use llmgw_plugins::{Policies, PolicyError, PolicyOptions, PolicySet};

/// A directory of policies that goes away with its test.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Dir {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "policies-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&path).expect("a temporary directory can be made");
        Dir(path)
    }

    /// A directory with these files.
    fn with(files: &[(&str, &str)]) -> Dir {
        let dir = Dir::new();
        for (key, text) in files {
            dir.write(key, text);
        }
        dir
    }

    fn path(&self, key: &str) -> PathBuf {
        self.0.join(key)
    }

    fn write(&self, key: &str, text: impl AsRef<[u8]>) {
        let path = self.path(key);
        std::fs::create_dir_all(path.parent().expect("a key has a parent"))
            .expect("folders can be made");
        std::fs::write(path, text).expect("a policy can be written");
    }

    fn open(&self) -> Result<Arc<Policies>, PolicyError> {
        Policies::open(PolicyOptions {
            dir: Some(self.0.clone()),
            state: None,
        })
    }

    fn load(&self) -> Result<Arc<PolicySet>, PolicyError> {
        self.open().map(|policies| policies.current())
    }

    /// The error with the directory's own path replaced by `policies`.
    fn refusal(&self) -> String {
        let error = self.load().expect_err("the directory must be refused");
        error
            .to_string()
            .replace(&self.0.display().to_string(), "policies")
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A policy file with one hook whose body is given.
fn hook(head: &str, body: &str) -> String {
    format!("local M = {{ api = 1 }}\nfunction M.{head}\n{body}\nend\nreturn M\n")
}
