//! What lies where a policy file should, and can't be read: refused with the file's name, and the last good set stays.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use llmgw_plugins::{Policies, PolicyError, ReplicaView, RequestView};

use crate::{Dir, hook};

/// `nobody` on every Linux: it owns no file.
const NOBODY: u32 = 65534;

/// A directory that anybody can get to, wherever this is built.
fn open_to_all() -> Dir {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("llmgw-unreadable-{}-{number}", std::process::id());
    let dir = Dir(std::env::temp_dir().join(name));
    fs::create_dir_all(&dir.0).expect("mkdir");
    fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o755)).expect("chmod");
    dir
}

/// Reloads with the rights of somebody who is not root: those of a thread are its own.
fn reload_as_nobody(policies: &Policies) -> Result<(), PolicyError> {
    std::thread::scope(|scope| {
        let reload = || {
            // SAFETY: it takes a number, and concerns this thread only, which ends right after.
            unsafe { libc::setfsuid(NOBODY) };
            policies.reload().map(drop)
        };
        scope.spawn(reload).join().expect("no panic")
    })
}

/// Which set answers.
fn answer(policies: &Policies) -> String {
    let replica = ReplicaView {
        id: "a",
        ..ReplicaView::default()
    };
    let ranked = policies
        .current()
        .rank(&RequestView::default(), &[replica])
        .expect("the hook answers");
    ranked.reason.expect("it says who it is")
}

fn rank(reason: &str) -> String {
    hook(
        "rank(request, replicas, n)",
        &format!("return 1, '{reason}'"),
    )
}

/// One way of spoiling the directory, and what is said about it.
struct Case {
    what: &'static str,
    /// Root may read what nobody else may.
    by_nobody: bool,
    /// Gets `routing.lua`, which is a good file then.
    spoil: fn(&Path),
    expected: &'static str,
}

const CASES: [Case; 12] = [
    Case {
        what: "a file that nobody may read",
        by_nobody: true,
        spoil: |file| {
            fs::set_permissions(file, fs::Permissions::from_mode(0o000)).expect("chmod");
        },
        expected: "policies/routing.lua: can't be read: Permission denied (os error 13)",
    },
    Case {
        what: "a file whose reading fails: regular by its type, with nothing at its beginning",
        by_nobody: false,
        spoil: |file| {
            link(file, "/proc/self/mem");
        },
        expected: "policies/routing.lua: can't be read: Input/output error (os error 5)",
    },
    Case {
        what: "a folder that nobody may read",
        by_nobody: true,
        spoil: |file| {
            let folder = lib(file);
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o000)).expect("chmod");
        },
        expected: "policies/lib: can't read the policy directory: Permission denied (os error 13)",
    },
    Case {
        what: "a directory",
        by_nobody: false,
        spoil: |file| {
            fs::remove_file(file).expect("it is there");
            fs::create_dir(file).expect("mkdir");
        },
        expected: "policies/routing.lua: is a directory, not a file",
    },
    Case {
        what: "a FIFO, which nobody writes to",
        by_nobody: false,
        spoil: |file| {
            fs::remove_file(file).expect("it is there");
            let made = Command::new("mkfifo").arg(file).status();
            assert!(made.expect("mkfifo runs").success());
        },
        expected: "policies/routing.lua: is not a regular file",
    },
    Case {
        what: "a device that never ends",
        by_nobody: false,
        spoil: |file| {
            link(file, "/dev/zero");
        },
        expected: "policies/routing.lua: is not a regular file",
    },
    Case {
        what: "a link to itself",
        by_nobody: false,
        spoil: |file| {
            link(file, "routing.lua");
        },
        expected: "policies/routing.lua: can't be read: Too many levels of symbolic links (os error 40)",
    },
    Case {
        what: "a link that leads nowhere",
        by_nobody: false,
        spoil: |file| {
            link(file, "nowhere.lua");
        },
        expected: "policies/routing.lua: went away while it was read, or is a link that leads nowhere",
    },
    Case {
        what: "a file of 100 MB",
        by_nobody: false,
        spoil: |file| {
            let file = fs::File::create(file).expect("create");
            file.set_len(100 << 20).expect("a sparse file");
        },
        expected: "policies/routing.lua: is longer than 262144 bytes",
    },
    Case {
        what: "bytecode of Lua",
        by_nobody: false,
        spoil: |file| fs::write(file, b"\x1bLua\x54\x00\x19\x93").expect("write"),
        expected: NO_TEXT,
    },
    Case {
        what: "bytecode of Luau, which is no UTF-8 either",
        by_nobody: false,
        spoil: |file| fs::write(file, b"\x06\x03\x00\xff\xfe").expect("write"),
        expected: NO_TEXT,
    },
    Case {
        what: "more files than a set may have",
        by_nobody: false,
        spoil: |file| {
            let folder = lib(file);
            (0..300).for_each(|n| {
                fs::write(folder.join(format!("x{n}.lua")), "return {}").expect("write");
            });
        },
        expected: "policies/lib: more than 256 policy files",
    },
];

const NO_TEXT: &str = "policies/routing.lua: is not a text file (Lua source in UTF-8 is expected)";

/// Puts a link in the file's place.
fn link(file: &Path, to: &str) {
    fs::remove_file(file).expect("it is there");
    symlink(to, file).expect("symlink");
}

/// The folder for shared code, made now.
fn lib(file: &Path) -> PathBuf {
    let folder = file.with_file_name("lib");
    fs::create_dir(&folder).expect("mkdir");
    folder
}

/// Takes away whatever a case put there.
fn clear(dir: &Dir) {
    let lib = dir.path("lib");
    if lib.exists() {
        fs::set_permissions(&lib, fs::Permissions::from_mode(0o755)).expect("chmod");
        fs::remove_dir_all(&lib).expect("it can be removed");
    }
    let file = dir.path("routing.lua");
    let removed = match file.is_dir() {
        true => fs::remove_dir(&file),
        false => fs::remove_file(&file),
    };
    removed.expect("it can be removed");
}

#[test]
fn what_can_not_be_read_is_named_and_the_last_good_set_stays() {
    for Case {
        what,
        by_nobody,
        spoil,
        expected,
    } in CASES
    {
        let dir = open_to_all();
        dir.write("routing.lua", rank("good"));
        let policies = dir.open().expect("it loads");
        spoil(&dir.path("routing.lua"));
        let error = match by_nobody {
            true => reload_as_nobody(&policies).expect_err(what),
            false => policies.reload().expect_err(what),
        };
        let root = dir.0.display().to_string();
        assert_eq!(
            error.to_string().replace(&root, "policies"),
            expected,
            "{what}"
        );
        let status = policies.status();
        assert_eq!(status.last_error, Some(error), "{what}");
        assert_eq!(status.generation, 1, "{what}");
        assert_eq!(answer(&policies), "good", "{what}: the last good set stays");
        assert!(
            by_nobody || dir.open().is_err(),
            "{what}: nothing to start with"
        );
        clear(&dir);
        dir.write("routing.lua", rank("repaired"));
        policies.reload().expect("it loads again");
        assert_eq!(policies.status().last_error, None, "{what}");
        assert_eq!(answer(&policies), "repaired", "{what}");
    }
}
