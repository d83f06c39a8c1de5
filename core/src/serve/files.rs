//! The limit of open files, and how it is shared out: what strangers at `listen` may take leaves enough for all that the server does beside.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// A client at work has its own connection and one to an engine.
const FILES_OF_CLIENT: u64 = 2;
/// For operators, health checks of engines, and files that are read and written.
const OWN_FILES: u64 = 1_024;
/// For as many connections as the agents' port takes.
const AGENTS_FILES: u64 = 16_000;
/// Where the limit is small, all that is kept is at most this part of it.
const KEPT_PART: u64 = 4;
/// Where no limit can be read: what a process has by default.
const FILES_DEFAULT: u64 = 1_024;

/// Raises the limit as far as it goes, and returns what it is: the soft limit of 1,024 is a history lesson.
pub(super) fn raise_limit() -> u64 {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!("the limit of open files could not be raised: {error}");
    }
    getrlimit(Resource::RLIMIT_NOFILE).map_or(FILES_DEFAULT, |(soft, _)| soft)
}

/// How many clients may be connected at once.
pub(super) fn clients_max(files: u64, has_agents: bool) -> usize {
    let kept = OWN_FILES + if has_agents { AGENTS_FILES } else { 0 };
    let clients = (files - kept.min(files / KEPT_PART)) / FILES_OF_CLIENT;
    usize::try_from(clients).unwrap_or(usize::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_get_what_is_left_over_half_of_it_for_their_engines() {
        for (files, has_agents, expected) in [
            (512, false, 192),
            (1_024, false, 384),
            (4_096, false, 1_536),
            (4_096, true, 1_536),
            (65_536, false, 32_256),
            (65_536, true, 24_576),
            (524_288, false, 261_632),
            (524_288, true, 253_632),
            (1 << 20, true, 515_776),
            (0, true, 1),
        ] {
            let clients = clients_max(files, has_agents);
            assert_eq!(clients, expected, "{files} {has_agents}");
        }
        assert!(clients_max(u64::MAX, true) > 1 << 24);
    }
}
