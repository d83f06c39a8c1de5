//! Reading regular files, and nothing else: what opens a pipe waits for its other end, and a device may never end.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a file for reading. The kernel's own files are regular.
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_dir() {
        return Err(io::Error::from(ErrorKind::IsADirectory));
    }
    if !kind.is_file() {
        return Err(io::Error::other("is no regular file"));
    }
    Ok(file)
}

/// At most `max_bytes` of a file.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(max_bytes).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_without_another_end_is_refused_at_once() {
        let directory = std::env::temp_dir().join(format!("llmgw-regular-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let pipe = directory.join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(
            read(&pipe, 10).unwrap_err().to_string(),
            "is no regular file"
        );
        assert_eq!(
            read(&directory, 10).unwrap_err().kind(),
            ErrorKind::IsADirectory
        );
        assert!(read(Path::new("/dev/zero"), 10).is_err());
        assert!(!read(Path::new("/proc/self/stat"), 10).unwrap().is_empty());
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
