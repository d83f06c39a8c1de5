//! That this node is taken out of use: a file in the state directory, since the server keeps nothing. Synced: an
//! operator who was told that the node drains may take its power next.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::durable;
use crate::session::DrainFlag;

const FILE: &str = "draining";

#[derive(Debug)]
pub(super) struct DrainFile {
    path: PathBuf,
    draining: AtomicBool,
}

impl DrainFile {
    pub(super) fn open(state: &Path) -> DrainFile {
        let path = state.join(FILE);
        let draining = path.exists();
        if draining {
            tracing::warn!(
                "this node is draining, as an operator said before; `llmgw ctl undrain` puts it back"
            );
        }
        DrainFile {
            path,
            draining: AtomicBool::new(draining),
        }
    }
}

impl DrainFlag for DrainFile {
    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    fn set(&self, draining: bool) -> io::Result<()> {
        self.draining.store(draining, Ordering::Relaxed);
        match draining {
            true => durable::write_whole(&self.path, b""),
            false => durable::remove(&self.path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draining_survives_a_restart_and_its_end_does_too() {
        let state = std::env::temp_dir().join(format!("llmgw-drain-{}", std::process::id()));
        std::fs::create_dir_all(&state).unwrap();
        for draining in [true, true, false, false] {
            let file = DrainFile::open(&state);
            file.set(draining).unwrap();
            assert_eq!(file.is_draining(), draining);
            assert_eq!(DrainFile::open(&state).is_draining(), draining);
        }
        std::fs::remove_dir_all(&state).unwrap();
    }
}
