//! Where an engine's output goes, and how the agent reads it: a file in the shard's directory.
//!
//! Not a pipe: with the agent dead nobody would read it, and the engine's next line would end it by SIGPIPE, or block it
//! once 64 KiB wait. The file is opened for appending, so a restarted agent simply reads on, and what was written while
//! none ran is not lost.
//!
//! The file is bounded by giving back the disk space of what was read (a hole is punched, its size only grows on paper).
//! No line is lost in that. Where a file system has no holes it is truncated instead, and then what the engine writes between
//! the last read and the truncation is lost. What fails, in reading or in bounding, is told once and tried again for as long
//! as the shard lives: an engine goes on writing whatever its reader thinks of the disk. While no agent runs nothing bounds it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::LogTail;
use crate::supervisor::kernel;

/// What is read at a time.
const READ_MAX_BYTES: u64 = 256 * 1024;
/// An engine that writes faster than this much between two reads is read from its end.
const BEHIND_MAX_BYTES: u64 = 4 * 1024 * 1024;
/// Kept on disk behind what was read, for the agent after this one.
const KEPT_MIN_BYTES: u64 = 512 * 1024;
/// Disk space is given back in pieces of at least this size.
const PUNCH_MIN_BYTES: u64 = 4 * 1024 * 1024;

/// The output of one shard, as the agent reads it.
pub struct Output {
    file: File,
    /// Up to where it was read.
    offset: u64,
    /// Up to where its space was given back, or was to be: a hole begins at the start of the file, so that the next one makes up
    /// for one that failed.
    punched: u64,
    /// Gives back the space of a range; tests put in one that fails.
    punch: fn(&File, u64, u64) -> io::Result<()>,
    /// Somebody was told that something fails.
    told: bool,
}

impl Output {
    /// Opens the file for an engine to write to, and makes it where there is none.
    pub fn writer(path: &Path) -> io::Result<File> {
        OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path)
    }

    /// Opens it for reading, from its start or, adopted, so far from the end as is still kept.
    pub fn open(path: &Path) -> io::Result<Output> {
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path)?;
        let offset = file.metadata()?.size().saturating_sub(KEPT_MIN_BYTES);
        Ok(Output {
            file,
            offset,
            punched: 0,
            punch: kernel::punch_hole,
            told: false,
        })
    }

    /// Reads on to the end, and bounds the file.
    ///
    /// # Errors
    /// The first that there is. The next call tries again, and keeps what fails then to itself.
    pub fn read_into(&mut self, tail: &mut LogTail, now_ms: u64) -> io::Result<()> {
        let read = self.read_on(tail, now_ms);
        // Whatever became of the reading, it may have come further.
        let done = read.and(self.bound());
        match done {
            Err(_) if self.told => Ok(()),
            Err(error) => {
                self.told = true;
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    fn read_on(&mut self, tail: &mut LogTail, now_ms: u64) -> io::Result<()> {
        let mut end = self.file.metadata()?.size();
        if end < self.offset {
            // Somebody truncated it.
            self.offset = 0;
        }
        if end - self.offset > BEHIND_MAX_BYTES {
            let skipped = end - self.offset - READ_MAX_BYTES;
            tail.finish(now_ms);
            tail.note(&format!("{skipped} bytes of output passed over"), now_ms);
            self.offset += skipped;
        }
        while self.offset < end {
            let wanted = (end - self.offset).min(READ_MAX_BYTES);
            let mut bytes = Vec::new();
            self.file.seek(SeekFrom::Start(self.offset))?;
            let read = (&self.file).take(wanted).read_to_end(&mut bytes)?;
            if read == 0 {
                end = self.offset;
            }
            tail.take(&bytes, now_ms);
            self.offset += read as u64;
        }
        Ok(())
    }

    fn bound(&mut self) -> io::Result<()> {
        let until = self.offset.saturating_sub(KEPT_MIN_BYTES);
        if until < self.punched + PUNCH_MIN_BYTES {
            return Ok(());
        }
        self.punched = until;
        match (self.punch)(&self.file, 0, until) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                self.file.set_len(0)?;
                (self.offset, self.punched) = (0, 0);
                Ok(())
            }
            punched => punched,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;

    use super::*;

    fn path(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("llmgw-output-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    fn texts(tail: &LogTail) -> Vec<String> {
        tail.last(9).into_iter().map(|line| line.text).collect()
    }

    #[test]
    fn what_is_written_is_read_once_and_a_later_reader_goes_on() {
        let path = path("on");
        let mut writer = Output::writer(&path).unwrap();
        let (mut output, mut tail) = (Output::open(&path).unwrap(), LogTail::new(None));
        writer.write_all(b"one\ntw").unwrap();
        output.read_into(&mut tail, 1).unwrap();
        writer.write_all(b"o\n").unwrap();
        output.read_into(&mut tail, 2).unwrap();
        assert_eq!(texts(&tail), ["one", "two"]);
        let (mut later, mut tail) = (Output::open(&path).unwrap(), LogTail::new(None));
        later.read_into(&mut tail, 3).unwrap();
        assert_eq!(texts(&tail), ["one", "two"]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn the_disk_space_of_an_engine_that_writes_for_ever_is_bounded_and_no_line_is_lost() {
        let path = path("bounded");
        let mut writer = Output::writer(&path).unwrap();
        let (mut output, mut tail) = (Output::open(&path).unwrap(), LogTail::new(None));
        let line = [b'x'; 1023];
        for round in 0..40 {
            for _ in 0..1024 {
                writer.write_all(&line).unwrap();
                writer.write_all(b"\n").unwrap();
            }
            output.read_into(&mut tail, round).unwrap();
        }
        let (_, lines) = tail.from(u64::MAX, 0);
        assert_eq!(lines, 40 * 1024);
        let on_disk = std::fs::metadata(&path).unwrap().blocks() * 512;
        let bound = PUNCH_MIN_BYTES + KEPT_MIN_BYTES + 1024 * 1024 + 64 * 1024;
        assert!(on_disk <= bound, "{on_disk} > {bound}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn an_error_in_bounding_is_told_once_and_the_file_is_bounded_once_it_is_over() {
        let path = path("failing");
        let mut writer = Output::writer(&path).unwrap();
        let (mut output, mut tail) = (Output::open(&path).unwrap(), LogTail::new(None));
        let mut line = [b'x'; 1024];
        line[1023] = b'\n';
        let mut round = |output: &mut Output| {
            for _ in 0..1024 {
                writer.write_all(&line).unwrap();
            }
            output.read_into(&mut tail, 0).map_err(|error| error.kind())
        };
        output.punch = |_, _, _| Err(io::ErrorKind::StorageFull.into());
        let told: Vec<io::ErrorKind> = (0..10).filter_map(|_| round(&mut output).err()).collect();
        assert_eq!(told, [io::ErrorKind::StorageFull]);
        output.punch = kernel::punch_hole;
        for _ in 0..5 {
            round(&mut output).unwrap();
        }
        let (_, lines) = tail.from(u64::MAX, 0);
        assert_eq!(lines, 15 * 1024, "none was lost");
        let on_disk = std::fs::metadata(&path).unwrap().blocks() * 512;
        let bound = PUNCH_MIN_BYTES + KEPT_MIN_BYTES + 1024 * 1024 + 64 * 1024;
        assert!(on_disk <= bound, "{on_disk} > {bound}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_flood_is_passed_over_and_the_tail_says_so() {
        let path = path("flood");
        let mut writer = Output::writer(&path).unwrap();
        let (mut output, mut tail) = (Output::open(&path).unwrap(), LogTail::new(None));
        for _ in 0..6 * 1024 {
            writer.write_all(&[b'\n'; 1024]).unwrap();
        }
        writer.write_all(b"last\n").unwrap();
        output.read_into(&mut tail, 0).unwrap();
        let lines = tail.last(usize::MAX);
        assert_eq!(lines.last().unwrap().text, "last");
        std::fs::remove_file(path).unwrap();
        // The note itself was pushed out by the lines after it: their number says that they were not all read.
        assert!(tail.from(u64::MAX, 0).1 < 300 * 1024);
    }
}
