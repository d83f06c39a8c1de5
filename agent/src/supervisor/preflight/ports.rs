//! Whether a port is free, and if not, whose it is.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;

use tokio::net::TcpSocket;

/// The state of a listening socket in `/proc/net/tcp`.
const LISTENING: &str = "0A";
/// A process's name, as the kernel keeps it, is shorter.
const NAME_MAX_CHARS: usize = 64;

/// The process that listens on a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortOwner {
    pub pid: u32,
    pub name: String,
}

impl PortOwner {
    pub fn by(&self) -> String {
        format!("by process {} ({})", self.pid, self.name)
    }
}

/// Whether one could listen there.
pub fn check_free(host: &str, port: u16) -> io::Result<()> {
    let mut refused = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in (host, port).to_socket_addrs()? {
        match bind(address) {
            Ok(_) => return Ok(()),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

/// With SO_REUSEADDR, so that connections of an engine that just left don't count; whoever listens does. It does not listen itself: a
/// child that is forked meanwhile has a copy until it executes, and the port would stay taken as long.
fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// Who listens on a port, on any address. `None`: nobody, or it is not for us to see.
pub fn owner(proc: &Path, port: u16) -> Option<PortOwner> {
    let sockets: BTreeSet<String> = ["net/tcp", "net/tcp6"]
        .iter()
        .filter_map(|table| fs::read_to_string(proc.join(table)).ok())
        .flat_map(|table| listening(&table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    if sockets.is_empty() {
        return None;
    }
    let processes = fs::read_dir(proc).ok()?;
    processes.flatten().find_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let mut descriptors = fs::read_dir(entry.path().join("fd")).ok()?.flatten();
        descriptors.find(|descriptor| {
            fs::read_link(descriptor.path())
                .is_ok_and(|target| sockets.contains(target.to_string_lossy().as_ref()))
        })?;
        let name = fs::read(entry.path().join("comm")).unwrap_or_default();
        let name = String::from_utf8_lossy(&name);
        let shown = name.trim_end().chars().filter(|char| !char.is_control());
        Some(PortOwner {
            pid,
            name: shown.take(NAME_MAX_CHARS).collect(),
        })
    })
}

/// The inodes of the sockets that listen on a port, from `/proc/net/tcp`.
fn listening(table: &str, port: u16) -> Vec<u64> {
    let of_line = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (_, local) = fields.get(1)?.rsplit_once(':')?;
        let is_it = u16::from_str_radix(local, 16) == Ok(port) && fields.get(3) == Some(&LISTENING);
        is_it.then(|| fields.get(9)?.parse().ok()).flatten()
    };
    table.lines().skip(1).filter_map(of_line).collect()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn only_sockets_that_listen_on_the_port_count() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: 0100007F:5208 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0\n\
             1: 0100007F:5208 0100007F:D431 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 30 10 -1\n\
             2: 0100007F:5209 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0 100 0 0 10 0\n\
             3: torn";
        assert_eq!(listening(table, 21_000), [4711]);
        assert_eq!(listening(table, 80), [0_u64; 0]);
    }

    #[test]
    fn a_port_that_this_process_listens_on_is_its() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let taken = check_free("127.0.0.1", port).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(
            owner(Path::new("/proc"), port).unwrap().pid,
            std::process::id()
        );
        drop(listener);
        check_free("127.0.0.1", port).unwrap();
    }

    #[test]
    fn a_port_that_was_looked_at_is_free_although_a_child_has_a_copy_of_the_socket() {
        let socket = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = socket.local_addr().unwrap();
        // What a fork does to every descriptor.
        let copy = socket.as_fd().try_clone_to_owned().unwrap();
        drop(socket);
        check_free("127.0.0.1", address.port()).unwrap();
        TcpListener::bind(address).unwrap();
        drop(copy);
    }
}
