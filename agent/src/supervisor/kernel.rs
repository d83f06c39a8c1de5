//! The system calls that neither the standard library nor nix offers: pidfds, closing what a child must not inherit,
//! holes in files, leaving a session. All of the agent's unsafe code but the fork itself is here.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Where `close_range` is missing (before Linux 5.11) descriptors are marked one by one, up to here.
const DESCRIPTORS_MAX: i32 = 65_536;

/// Opens a descriptor that means this process for ever, whoever gets its number later. It polls readable once the process
/// has ended.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: takes two integers and returns a new descriptor that nobody else owns.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_pidfd_open,
            libc::pid_t::try_from(pid).unwrap_or(-1),
            0,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sends a signal to the process that the descriptor means. `ESRCH` where it has ended and was reaped.
pub fn pidfd_send_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: the descriptor is open for the length of the call; no siginfo is passed.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            signal,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    answer(result)
}

/// Gives back the disk space of a part of a file; its size and what stands elsewhere stay as they are.
pub fn punch_hole(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let offset = i64::try_from(offset).map_err(io::Error::other)?;
    let length = i64::try_from(length).map_err(io::Error::other)?;
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the file is open for the length of the call.
    answer(i64::from(unsafe {
        libc::fallocate(file.as_raw_fd(), mode, offset, length)
    }))
}

/// In a forked child: its own session and group, so that no terminal and no signal to the agent's group reaches it.
///
/// Only calls that are allowed between fork and exec.
pub fn leave_session() -> io::Result<()> {
    // SAFETY: no pointers; it is async-signal-safe.
    answer(i64::from(unsafe { libc::setsid() }))
}

/// In a forked child: signals that somebody made the agent ignore (a shell does so with SIGINT for a background job)
/// end the engine again.
pub fn restore_signals() {
    for signal in [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGUSR1,
        libc::SIGUSR2,
        libc::SIGCHLD,
    ] {
        // SAFETY: sets a default, no handler of ours is involved; async-signal-safe.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// In a forked child: every descriptor but 0, 1 and 2 closes at exec. Marked, not closed, because the standard library
/// still needs one of them to tell why an exec failed.
pub fn close_others_at_exec() {
    // SAFETY: integers only; async-signal-safe.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3_u32,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if result == 0 {
        return;
    }
    for fd in 3..DESCRIPTORS_MAX {
        // SAFETY: as above; a number that is no descriptor fails harmlessly.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// In a forked child: closes the parent's end of a pipe, which the fork copied.
pub fn close(fd: i32) {
    // SAFETY: the caller names a descriptor of the child that nothing in the child uses.
    unsafe { libc::close(fd) };
}

/// In a forked child: writes all of a few bytes.
pub fn write(fd: i32, bytes: &[u8]) -> io::Result<()> {
    loop {
        // SAFETY: the buffer outlives the call; async-signal-safe.
        let written = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
        // A few bytes go into a pipe whole or not at all.
        if written >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// In a forked child: waits for one byte. `false`: the other end was closed instead.
pub fn read_one(fd: i32) -> io::Result<bool> {
    let mut byte = [0_u8];
    loop {
        // SAFETY: the buffer outlives the call; async-signal-safe.
        let read = unsafe { libc::read(fd, byte.as_mut_ptr().cast(), 1) };
        if read >= 0 {
            return Ok(read == 1);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn answer(result: i64) -> io::Result<()> {
    match result < 0 {
        true => Err(io::Error::last_os_error()),
        false => Ok(()),
    }
}
