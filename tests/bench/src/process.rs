//! What the kernel says about a process and its children: CPU time and memory.

use std::fs;
use std::io;

/// A process whose cost is measured, children included.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub pid: u32,
}

impl Measured {
    /// Nanoseconds on a CPU so far, over all threads that are alive, those of the children included.
    pub fn cpu_ns(self) -> io::Result<u64> {
        let mut total = 0;
        for pid in self.family()? {
            for task in fs::read_dir(format!("/proc/{pid}/task"))? {
                let path = task?.path().join("schedstat");
                let text = fs::read_to_string(path)?;
                total += field(&text, 0)?;
            }
        }
        Ok(total)
    }

    /// Bytes of memory that are resident and not shared with files: what the process has made itself.
    pub fn anonymous_bytes(self) -> io::Result<u64> {
        let mut total = 0;
        for pid in self.family()? {
            let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("RssAnon:"))
                .ok_or_else(|| io::Error::other("no RssAnon in /proc/PID/status"))?;
            total += field(line, 0)? * 1024;
        }
        Ok(total)
    }

    fn family(self) -> io::Result<Vec<u32>> {
        let pid = self.pid;
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        let mut family = vec![pid];
        family.extend(
            children
                .split_whitespace()
                .filter_map(|text| text.parse::<u32>().ok()),
        );
        Ok(family)
    }
}

fn field(text: &str, index: usize) -> io::Result<u64> {
    text.split_whitespace()
        .nth(index)
        .and_then(|word| word.parse().ok())
        .ok_or_else(|| {
            io::Error::other(format!(
                "`{}` is not what was expected of /proc",
                text.trim()
            ))
        })
}
