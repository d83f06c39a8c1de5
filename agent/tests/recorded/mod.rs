//! Recorded trees of `/sys`: one text file each, unpacked into a directory of its own for one test.
//!
//! ```text
//! # a comment
//! & other.tree                    begin with this tree
//! @ sys/class/infiniband          a directory; the names below are in it
//! mlx5_0 -> ../../devices/...     a symbolic link
//! lid = 0x18                      a file of this line; \n \t \\ \xNN are escapes, \c at the end: no newline
//! topo |                          a file of the lines that follow and begin with a tab
//! state !                         unreadable: a directory, so that reading it fails, as a kernel's EINVAL does
//! ```

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// An unpacked tree, removed when dropped.
pub struct TempTree {
    path: PathBuf,
}

impl TempTree {
    /// An empty directory.
    pub fn empty() -> TempTree {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-recorded-{}-{number}", std::process::id());
        // In memory where there is a place for that: a tree is hundreds of files.
        let memory = PathBuf::from("/dev/shm");
        let base = if memory.is_dir() {
            memory
        } else {
            std::env::temp_dir()
        };
        let path = base.join(name);
        fs::create_dir(&path).unwrap();
        TempTree { path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes what `text` describes over what is there.
    pub fn add(&self, text: &str) {
        self.write(text, Path::new(""));
    }

    fn write(&self, text: &str, beside: &Path) {
        let mut directory = self.path.clone();
        let mut block: Option<(PathBuf, String)> = None;
        for line in text.lines() {
            if let Some((_, content)) = block.as_mut()
                && let Some(line) = line.strip_prefix('\t')
            {
                content.push_str(&unescape(line));
                continue;
            }
            if let Some((path, content)) = block.take() {
                place(&path, content.as_bytes());
            }
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(other) = line.strip_prefix("& ") {
                let other = beside.join(other);
                self.write(&fs::read_to_string(&other).unwrap(), beside);
            } else if let Some(name) = line.strip_prefix("@ ") {
                directory = self.path.join(name);
                fs::create_dir_all(&directory).unwrap();
            } else if let Some(name) = line.strip_suffix(" !") {
                fs::create_dir_all(directory.join(name)).unwrap();
            } else if let Some(name) = line.strip_suffix(" |") {
                block = Some((directory.join(name), String::new()));
            } else if let Some((name, target)) = line.split_once(" -> ") {
                let link = directory.join(name);
                fs::create_dir_all(link.parent().unwrap()).unwrap();
                symlink(target, link).unwrap();
            } else if let Some((name, content)) = line.split_once(" =") {
                let content = content.strip_prefix(' ').unwrap_or(content);
                place(&directory.join(name), unescape(content).as_bytes());
            } else {
                panic!("not a line of a tree: {line}");
            }
        }
        if let Some((path, content)) = block {
            place(&path, content.as_bytes());
        }
    }
}

impl Drop for TempTree {
    fn drop(&mut self) {
        // Left behind rather than a second panic.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Where the recordings are.
pub fn recordings() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    [
        root.join("tests/recordings/hw"),
        root.join("../tests/recordings/hw"),
    ]
    .into_iter()
    .find(|path| path.is_dir())
    .unwrap()
}

/// Unpacks `tests/recordings/hw/sysfs/NAME.tree`. Its `sys` is the root that `--sysfs` takes.
pub fn sysfs(name: &str) -> TempTree {
    let directory = recordings().join("sysfs");
    let text = fs::read_to_string(directory.join(format!("{name}.tree"))).unwrap();
    let tree = TempTree::empty();
    tree.write(&text, &directory);
    tree
}

/// Replaces a file or an empty directory.
fn place(path: &Path, content: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    if path.is_dir() {
        fs::remove_dir(path).unwrap();
    }
    fs::write(path, content).unwrap();
}

/// The line that is meant, with its newline.
fn unescape(text: &str) -> String {
    let mut content = String::with_capacity(text.len() + 1);
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c != '\\' {
            content.push(c);
            continue;
        }
        match rest.next() {
            Some('n') => content.push('\n'),
            Some('t') => content.push('\t'),
            Some('r') => content.push('\r'),
            Some('e') => content.push('\u{1b}'),
            Some('\\') => content.push('\\'),
            Some('c') => return content,
            Some('x') => {
                let hex: String = rest.by_ref().take(2).collect();
                content.push(char::from(u8::from_str_radix(&hex, 16).unwrap()));
            }
            other => panic!("not an escape: \\{other:?}"),
        }
    }
    content.push('\n');
    content
}
