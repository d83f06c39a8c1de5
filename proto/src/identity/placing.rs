//! Writing an identity's files: whole or not at all, over nothing that is there, a key readable by its owner only from the first byte on.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::files::{FileFault, FileProblem};
use crate::regular;

/// Of a private key.
pub const KEY_MODE: u32 = 0o600;
/// Of a certificate, which anybody may read.
pub const CERTIFICATE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o700;
/// The bit that lets anybody read a file, whoever has it.
const OTHERS_READ_MODE: u32 = 0o004;
/// What a draft's name ends with.
const DRAFT_SUFFIX: &str = ".draft";
/// Of a directory, so many files are looked at for drafts that somebody left.
const SWEPT_MAX: usize = 4_096;
/// A draft that is swept away before it is locked is written again.
const DRAFT_ATTEMPTS_MAX: usize = 8;

/// A file that is to be.
pub struct NewFile {
    pub path: PathBuf,
    /// PEM mostly, beside which anything may stand in any encoding.
    pub text: Vec<u8>,
    pub mode: u32,
}

/// Places files where none are: all of them, or none.
///
/// They appear in the order given, each whole. A kill between two leaves the first ones, so that a key goes before its certificate: where the
/// certificate is, the key is. What two runs want at once is had by the one that places the first file first.
pub fn place(files: &[NewFile]) -> Result<(), FileProblem> {
    for file in files {
        if fs::symlink_metadata(&file.path).is_ok() {
            return Err(FileProblem::new(&file.path, FileFault::Exists));
        }
    }
    let drafts = files
        .iter()
        .map(|file| Draft::write(file, None))
        .collect::<Result<Vec<_>, _>>()?;
    let mut placed = Placed(Vec::new());
    for (draft, file) in drafts.iter().zip(files) {
        fs::hard_link(&draft.path, &file.path)
            .map_err(|error| FileProblem::new(&file.path, not_linked(error)))?;
        placed.0.push(file.path.clone());
    }
    drop(drafts);
    for file in files {
        sync_directory(&file.path)?;
    }
    placed.0.clear();
    Ok(())
}

fn not_linked(error: io::Error) -> FileFault {
    match error.kind() {
        ErrorKind::AlreadyExists => FileFault::Exists,
        // A draft is its own writer's, so it is not for want of a right.
        ErrorKind::Unsupported => FileFault::NoLinks,
        _ if error.raw_os_error() == Some(libc::EPERM) => FileFault::NoLinks,
        _ => FileFault::NotWritten(error),
    }
}

/// Writes a file in the place of the one that is there, at once: who opens it gets the old or the new one.
///
/// A link stays, and what it leads to is replaced. The new file is the old one's owner's and group's: a service that root renews for goes on reading it.
pub fn replace(file: &NewFile) -> Result<(), FileProblem> {
    let not_written = |error| FileProblem::new(&file.path, FileFault::NotWritten(error));
    let is_there = fs::symlink_metadata(&file.path).is_ok();
    let (path, old) = match is_there {
        true => {
            let target = fs::canonicalize(&file.path).map_err(not_written)?;
            let old = fs::metadata(&target).map_err(not_written)?;
            (target, Some((old.uid(), old.gid())))
        }
        false => (file.path.clone(), None),
    };
    let target = NewFile {
        path,
        text: file.text.clone(),
        mode: file.mode,
    };
    let draft = Draft::write(&target, old)?;
    fs::rename(&draft.path, &target.path).map_err(not_written)?;
    sync_directory(&target.path)
}

/// Makes a directory, and those above it, for its owner only. One that is there is left as it is.
pub fn make_directory(path: &Path) -> Result<(), FileProblem> {
    DirBuilder::new()
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(path)
        .map_err(|error| FileProblem::new(path, FileFault::NotWritten(error)))
}

/// A file beside its place, not there yet under its name. Taken away at the end.
struct Draft {
    path: PathBuf,
    /// Locked as long as somebody is at it, so that what a kill left is told from what is being written.
    _locked: File,
}

impl Draft {
    /// `owner`: whose it will be, user and group. Default: whoever writes it.
    fn write(file: &NewFile, owner: Option<(u32, u32)>) -> Result<Draft, FileProblem> {
        let write = || -> io::Result<(Draft, File)> {
            sweep(&file.path);
            let (draft, mut target) = Draft::new(file)?;
            target.write_all(&file.text)?;
            Ok((draft, target))
        };
        let not_written = |error| FileProblem::new(&file.path, FileFault::NotWritten(error));
        let (draft, target) = write().map_err(not_written)?;
        if let Some(owner) = owner {
            give(&target, owner, file.mode).map_err(|fault| FileProblem::new(&file.path, fault))?;
        }
        let finish = || -> io::Result<()> {
            // The umask may have taken bits that others need to read a certificate.
            target.set_permissions(Permissions::from_mode(file.mode))?;
            target.sync_all()
        };
        finish().map_err(not_written)?;
        Ok(draft)
    }

    fn new(file: &NewFile) -> io::Result<(Draft, File)> {
        for _ in 0..DRAFT_ATTEMPTS_MAX {
            let path = file.path.with_file_name(format!(
                "{}{}",
                draft_prefix(&file.path)?,
                unlike_others()
            ));
            let target = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(file.mode)
                .open(&path)?;
            let draft = Draft {
                path,
                _locked: target.try_clone()?,
            };
            // Where a file system has no locks none is swept away.
            let _ = target.lock();
            if target.metadata()?.nlink() > 0 {
                return Ok((draft, target));
            }
        }
        Err(io::Error::other("its draft is taken away again and again"))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After a rename there is none.
        let _ = fs::remove_file(&self.path);
    }
}

/// Takes away the drafts of a file that a kill left: nobody is at them. One of a key is a key.
fn sweep(file: &Path) {
    let Ok(prefix) = draft_prefix(file) else {
        return;
    };
    let Ok(entries) = fs::read_dir(directory_of(file)) else {
        return;
    };
    for entry in entries.take(SWEPT_MAX).flatten() {
        if !is_draft(&entry.file_name().to_string_lossy(), &prefix) {
            continue;
        }
        let Ok(left) = regular::open(&entry.path()) else {
            continue;
        };
        if left.try_lock().is_ok() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A draft's name is this, a process's id, a time, and [`DRAFT_SUFFIX`].
fn draft_prefix(file: &Path) -> io::Result<String> {
    let name = file.file_name().ok_or(ErrorKind::InvalidInput)?;
    Ok(format!(".{}.", name.to_string_lossy()))
}

fn is_draft(name: &str, prefix: &str) -> bool {
    let middle = name
        .strip_prefix(prefix)
        .and_then(|rest| rest.strip_suffix(DRAFT_SUFFIX))
        .and_then(|middle| middle.split_once('-'));
    middle.is_some_and(|(pid, nanos)| {
        let is =
            |text: &str, good: fn(&u8) -> bool| !text.is_empty() && text.bytes().all(|c| good(&c));
        is(pid, u8::is_ascii_digit) && is(nanos, u8::is_ascii_hexdigit)
    })
}

/// Gives a draft to the owner of what it replaces, before it can be opened under its name.
fn give(draft: &File, (user, group): (u32, u32), mode: u32) -> Result<(), FileFault> {
    let own = draft.metadata().map_err(FileFault::NotWritten)?;
    if (own.uid(), own.gid()) == (user, group) {
        return Ok(());
    }
    match fchown(draft, Some(user), Some(group)) {
        Ok(()) => Ok(()),
        // It makes no difference to anybody who reads it.
        Err(_) if mode & OTHERS_READ_MODE != 0 => Ok(()),
        Err(cause) => Err(FileFault::OwnerLost { user, group, cause }),
    }
}

/// What was placed so far, taken back unless all of it was.
struct Placed(Vec<PathBuf>);

impl Drop for Placed {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

/// A name that no draft of another run has, be it one that was killed.
fn unlike_others() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let nanos = since.unwrap_or_default().as_nanos();
    format!("{}-{nanos:x}{DRAFT_SUFFIX}", std::process::id())
}

fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// A name in a directory is durable once the directory is.
fn sync_directory(file: &Path) -> Result<(), FileProblem> {
    let directory = directory_of(file);
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(|error| FileProblem::new(directory, FileFault::NotWritten(error)))
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let name = format!("llmgw-placing-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            make_directory(&path.join("below")).unwrap();
            Folder(path.join("below"))
        }

        fn new_file(&self, name: &str, text: &str, mode: u32) -> NewFile {
            NewFile {
                path: self.0.join(name),
                text: text.into(),
                mode,
            }
        }

        /// Name, mode and text of each file.
        fn files(&self) -> Vec<(String, u32, String)> {
            let mut files: Vec<_> = fs::read_dir(&self.0)
                .unwrap()
                .map(|entry| {
                    let entry = entry.unwrap();
                    let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
                    let text = fs::read_to_string(entry.path()).unwrap();
                    (entry.file_name().into_string().unwrap(), mode, text)
                })
                .collect();
            files.sort();
            files
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(self.0.parent().unwrap());
        }
    }

    fn file(name: &str, mode: u32, text: &str) -> (String, u32, String) {
        (name.to_owned(), mode, text.to_owned())
    }

    #[test]
    fn files_are_placed_with_their_modes_and_nothing_else_is_left() {
        let folder = Folder::new("modes");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder.0), 0o700);
        let key = folder.new_file("key", "k", KEY_MODE);
        place(&[key, folder.new_file("cert", "c", CERTIFICATE_MODE)]).unwrap();
        let expected = [file("cert", 0o644, "c"), file("key", 0o600, "k")];
        assert_eq!(folder.files(), expected);
        replace(&folder.new_file("cert", "d", CERTIFICATE_MODE)).unwrap();
        assert_eq!(folder.files()[0], file("cert", 0o644, "d"));
    }

    #[test]
    fn where_one_file_is_none_is_placed_nor_changed() {
        let folder = Folder::new("exists");
        fs::write(folder.0.join("cert"), "old").unwrap();
        let files = [
            folder.new_file("key", "k", KEY_MODE),
            folder.new_file("cert", "c", CERTIFICATE_MODE),
        ];
        let problem = place(&files).unwrap_err();
        assert!(
            problem
                .to_string()
                .contains("cert: it exists already and is not overwritten")
        );
        // A link that leads nowhere is there too.
        std::os::unix::fs::symlink("nowhere", folder.0.join("link")).unwrap();
        let link = place(&[folder.new_file("link", "l", KEY_MODE)]).unwrap_err();
        assert!(matches!(link.fault, FileFault::Exists));
        fs::remove_file(folder.0.join("link")).unwrap();
        assert_eq!(folder.files().len(), 1);
        assert_eq!(fs::read_to_string(folder.0.join("cert")).unwrap(), "old");

        let absent = NewFile {
            path: folder.0.join("absent/key"),
            text: Vec::new(),
            mode: KEY_MODE,
        };
        let files = [folder.new_file("key", "k", KEY_MODE), absent];
        let problem = place(&files).unwrap_err();
        assert!(matches!(problem.fault, FileFault::NotWritten(_)));
        assert_eq!(folder.files().len(), 1, "the first one was taken back");
    }

    #[test]
    fn what_a_link_leads_to_is_replaced_and_stays_its_owners() {
        let folder = Folder::new("link");
        let (target, link) = (folder.0.join("target"), folder.0.join("cert"));
        fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        // Root may give it to a service. Anybody else has it already.
        let _ = std::os::unix::fs::chown(&target, Some(12_345), Some(23_456));
        let old = fs::metadata(&target).unwrap();
        let owner = (old.uid(), old.gid());
        replace(&folder.new_file("cert", "new", KEY_MODE)).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&target).unwrap(), "new");
        let new = fs::metadata(&target).unwrap();
        assert_eq!((new.uid(), new.gid()), owner);
        assert_eq!(new.permissions().mode() & 0o777, KEY_MODE);
        fs::remove_file(&target).unwrap();
        let problem = replace(&folder.new_file("cert", "new", KEY_MODE)).unwrap_err();
        assert!(matches!(problem.fault, FileFault::NotWritten(_)));
        assert!(link.is_symlink(), "one that leads nowhere is nobody's file");
    }

    #[test]
    fn drafts_that_a_kill_left_are_swept_and_those_that_somebody_writes_are_not() {
        let folder = Folder::new("drafts");
        let left = [".key.77-1a2b.draft", ".key.1-0.draft"];
        let kept = [
            ".key.78-1a2c.draft",
            ".other.77-1a2b.draft",
            ".key.notes.draft",
            ".key.77-1a2b.draft.old",
        ];
        for name in left.iter().chain(&kept) {
            fs::write(folder.0.join(name), "secret").unwrap();
        }
        let written = File::open(folder.0.join(kept[0])).unwrap();
        written.lock().unwrap();
        place(&[folder.new_file("key", "k", KEY_MODE)]).unwrap();
        let there: Vec<String> = folder.files().into_iter().map(|file| file.0).collect();
        let mut expected: Vec<&str> = kept.into_iter().chain(["key"]).collect();
        expected.sort_unstable();
        assert_eq!(there, expected);
        // Whoever wrote it was killed.
        drop(written);
        replace(&folder.new_file("key", "l", KEY_MODE)).unwrap();
        assert!(!folder.0.join(kept[0]).exists());
    }

    #[test]
    fn a_file_system_without_hard_links_is_told_from_a_right_that_is_missing() {
        for (errno, is_without) in [
            (libc::EPERM, true),
            (libc::EOPNOTSUPP, true),
            (libc::EACCES, false),
            (libc::ENOSPC, false),
        ] {
            let fault = not_linked(io::Error::from_raw_os_error(errno));
            assert_eq!(matches!(fault, FileFault::NoLinks), is_without, "{errno}");
        }
        let said = FileProblem::new(Path::new("out/ca.pem"), FileFault::NoLinks).to_string();
        assert!(
            said.contains("out/ca.pem: it cannot be written: this file system has no hard links")
        );
    }

    #[test]
    fn of_two_that_place_the_same_files_one_has_all_of_them() {
        for round in 0..20 {
            let folder = Folder::new(&format!("race-{round}"));
            let start = Barrier::new(2);
            let run = |who: &str| {
                let files = [
                    folder.new_file("key", who, KEY_MODE),
                    folder.new_file("cert", who, CERTIFICATE_MODE),
                ];
                start.wait();
                place(&files).is_ok()
            };
            let (one, two) = std::thread::scope(|scope| {
                let one = scope.spawn(|| run("one"));
                let two = run("two");
                (one.join().unwrap(), two)
            });
            assert!(one ^ two, "{one} {two}");
            let who = if one { "one" } else { "two" };
            let expected = [file("cert", 0o644, who), file("key", 0o600, who)];
            assert_eq!(folder.files(), expected);
        }
    }
}
