//! Writing an identity's files: whole or not at all, over nothing that is there, a key readable by its owner only from the first byte on.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::files::{FileFault, FileProblem};

/// Of a private key.
pub const KEY_MODE: u32 = 0o600;
/// Of a certificate, which anybody may read.
pub const CERTIFICATE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o700;

/// A file that is to be.
pub struct NewFile {
    pub path: PathBuf,
    pub text: String,
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
        .map(Draft::write)
        .collect::<Result<Vec<_>, _>>()?;
    let mut placed = Placed(Vec::new());
    for (draft, file) in drafts.iter().zip(files) {
        fs::hard_link(&draft.0, &file.path).map_err(|error| {
            let fault = match error.kind() {
                ErrorKind::AlreadyExists => FileFault::Exists,
                _ => FileFault::NotWritten(error),
            };
            FileProblem::new(&file.path, fault)
        })?;
        placed.0.push(file.path.clone());
    }
    drop(drafts);
    for file in files {
        sync_directory(&file.path)?;
    }
    placed.0.clear();
    Ok(())
}

/// Writes a file in the place of the one that is there, at once: who opens it gets the old or the new one.
pub fn replace(file: &NewFile) -> Result<(), FileProblem> {
    let draft = Draft::write(file)?;
    fs::rename(&draft.0, &file.path)
        .map_err(|error| FileProblem::new(&file.path, FileFault::NotWritten(error)))?;
    sync_directory(&file.path)
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
struct Draft(PathBuf);

impl Draft {
    fn write(file: &NewFile) -> Result<Draft, FileProblem> {
        let write = || -> io::Result<Draft> {
            let name = file.path.file_name().ok_or(ErrorKind::InvalidInput)?;
            let path = file.path.with_file_name(format!(
                ".{}.{}",
                name.to_string_lossy(),
                unlike_others()
            ));
            let mut target = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(file.mode)
                .open(&path)?;
            let draft = Draft(path);
            // The umask may have taken bits that others need to read a certificate.
            target.set_permissions(Permissions::from_mode(file.mode))?;
            target.write_all(file.text.as_bytes())?;
            target.sync_all()?;
            Ok(draft)
        };
        write().map_err(|error| FileProblem::new(&file.path, FileFault::NotWritten(error)))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After a rename there is none.
        let _ = fs::remove_file(&self.0);
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
    format!("{}-{nanos:x}.draft", std::process::id())
}

/// A name in a directory is durable once the directory is.
fn sync_directory(file: &Path) -> Result<(), FileProblem> {
    let directory = match file.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
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
                text: text.to_owned(),
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
            text: String::new(),
            mode: KEY_MODE,
        };
        let files = [folder.new_file("key", "k", KEY_MODE), absent];
        let problem = place(&files).unwrap_err();
        assert!(matches!(problem.fault, FileFault::NotWritten(_)));
        assert_eq!(folder.files().len(), 1, "the first one was taken back");
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
