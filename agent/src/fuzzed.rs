//! What holds for any input of the parsers of `/sys`, `/proc` and agent.yaml: for the fuzz targets in `agent/fuzz`, and for
//! the recordings in the tests. Those of the GPUs are in `inventory/gpu/fuzzed.rs`, those of who may speak in `fuzzed/identity.rs`.

pub mod identity;

use std::collections::BTreeSet;
use std::path::Path;

use llmgw_proto::identity::EnrolmentToken;
use llmgw_proto::session::is_node_id;

use crate::config;
use crate::inventory::host::{self, limits};
use crate::inventory::infiniband::text;
use crate::inventory::network;
use crate::inventory::page::layout;
use crate::process_files::{Cgroups, split_arguments, split_environment};
use crate::process_id::Stat;

/// Asserts what must hold for an input.
pub type Target = fn(&[u8]);

/// Every target by its name.
pub const TARGETS: [(&str, Target); 9] = [
    ("sysfs_values", sysfs_values),
    ("sysfs_gids", sysfs_gids),
    ("proc_stat", proc_stat),
    ("proc_meminfo", proc_meminfo),
    ("proc_route", proc_route),
    ("proc_files", proc_files),
    ("agent_yaml", agent_yaml),
    ("enrolment_token", enrolment_token),
    ("page_layout", page_layout),
];

/// Each line is a value of every kind.
pub fn sysfs_values(data: &[u8]) {
    for line in String::from_utf8_lossy(data).lines() {
        if let Some(state) = text::state(line) {
            assert!(line.ends_with(state.as_str()) || line.trim().ends_with(state.as_str()));
        }
        if text::physical_state(line).is_some() {
            assert!(line.contains(": "));
        }
        if let Some(rate) = text::rate_mbps(line) {
            assert!(rate % 500 == 0, "halves of a gigabit");
            let whole = (rate / 1_000).to_string();
            let digits = line.trim_start().trim_start_matches('0');
            assert!(rate < 1_000 || digits.starts_with(&whole), "{line}");
        }
        if let Some(number) = text::hex(line) {
            let digits = line.trim().trim_start_matches("0x").trim_start_matches('0');
            let expected = format!("{number:x}");
            assert!(
                number == 0 || digits.eq_ignore_ascii_case(&expected),
                "{line}"
            );
        }
        assert!(!matches!(text::lid(line), Some(0 | 0xffff)));
        if let Some(guid) = text::guid(line) {
            assert_eq!(guid, line.trim());
        }
        let _ = (text::link_layer(line), text::numa_node(line));
    }
}

/// Each line is a GID.
pub fn sysfs_gids(data: &[u8]) {
    for line in String::from_utf8_lossy(data).lines() {
        let Some(gid) = text::gid(line) else { continue };
        let written: Vec<String> = gid.segments().map(|group| format!("{group:04x}")).into();
        assert_eq!(written.join(":"), line.trim().to_ascii_lowercase());
        if let Some(prefix) = text::prefix(gid) {
            assert!(line.trim().to_ascii_lowercase().starts_with(&prefix));
        }
        if text::ipv4_of(gid).is_some() {
            assert!(line.trim().starts_with("0000:0000:0000:0000:0000:"));
        }
    }
}

/// Whatever stands in the name changes nothing of what comes after it.
pub fn proc_stat(data: &[u8]) {
    let line = String::from_utf8_lossy(data);
    let parsed = Stat::parse(&line);
    if let Some((_, fields)) = line.rsplit_once(')') {
        assert_eq!(Stat::parse(&format!("1 (x){fields}")), parsed);
        assert_eq!(Stat::parse(&format!("1 (a) R 1 (b){fields}")), parsed);
    } else {
        assert!(parsed.is_err());
    }
}

/// meminfo, and the lists and limits of processors and memory.
pub fn proc_meminfo(data: &[u8]) {
    let input = String::from_utf8_lossy(data);
    let info = host::meminfo(&input);
    for bytes in [info.total_bytes, info.available_bytes]
        .into_iter()
        .flatten()
    {
        assert_eq!(bytes % 1_024, 0);
        assert!(input.contains(&(bytes / 1_024).to_string()));
    }
    for line in input.lines() {
        if let Some(cpus) = host::cpu_list(line) {
            assert!(!cpus.is_empty());
        }
        let _ = limits::quota_millis(line);
    }
    let _ = limits::idle_files(&input);
}

/// The routing tables of both versions.
pub fn proc_route(data: &[u8]) {
    let input = String::from_utf8_lossy(data);
    let routes = network::ipv4_routes(&input);
    assert!(routes.len() <= input.lines().count());
    let is_name = |name: &str| !name.is_empty() && !name.contains(char::is_whitespace);
    assert!(routes.iter().all(|route| is_name(&route.interface)));
    if let Some(interface) = network::ipv6_default(&input) {
        assert!(is_name(&interface) && interface != "lo");
    }
    for line in input.lines() {
        if let Some((host, _)) = network::host_and_port(line) {
            assert!(!host.is_empty());
        }
    }
}

/// Control groups, arguments, environment.
pub fn proc_files(data: &[u8]) {
    let input = String::from_utf8_lossy(data);
    let cgroups = Cgroups::parse(&input);
    if let Some(unit) = cgroups.unit() {
        assert!(unit.ends_with(".service") || unit.ends_with(".scope"));
        assert!(!unit.contains('/'));
    }
    assert!(cgroups.controllers.keys().all(|name| !name.is_empty()));
    let arguments = split_arguments(data);
    assert!(arguments.iter().all(|argument| !argument.contains('\0')));
    assert_ne!(arguments.last().map(String::as_str), Some(""));
    let environment = split_environment(data);
    let names: BTreeSet<&String> = environment.iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), environment.len(), "each name once");
}

/// What is accepted keeps the rules, and what is not says why.
pub fn agent_yaml(data: &[u8]) {
    let Ok(input) = std::str::from_utf8(data) else {
        return;
    };
    match config::parse(Path::new("agent.yaml"), input, &|_| None) {
        Ok(config) => {
            let names: BTreeSet<&String> = config.fabrics.iter().map(|label| &label.name).collect();
            assert_eq!(names.len(), config.fabrics.len(), "each name once");
            let adapters: Vec<&String> = config
                .fabrics
                .iter()
                .flat_map(|label| &label.adapters)
                .collect();
            let once: BTreeSet<&&String> = adapters.iter().collect();
            assert_eq!(once.len(), adapters.len(), "an adapter is in one fabric");
            assert!(
                config
                    .fabrics
                    .iter()
                    .all(|label| !label.adapters.is_empty())
            );
        }
        Err(errors) => {
            assert!(!errors.problems.is_empty());
            assert!(errors.to_string().starts_with("agent.yaml:"));
        }
    }
}

/// What is read is written the same way, and what is not says where tokens come from.
pub fn enrolment_token(data: &[u8]) {
    let Ok(input) = std::str::from_utf8(data) else {
        return;
    };
    match input.parse::<EnrolmentToken>() {
        Ok(token) => {
            assert_eq!(token.expose(), input);
            assert!(is_node_id(token.node()));
            assert!(!format!("{token:?}").contains(&input[input.len() - 97..input.len() - 65]));
        }
        Err(why) => {
            let why = why.to_string();
            assert!(why.contains("llmgw ctl cert token"));
        }
    }
}

/// No line is wider than the page, and no word is lost.
pub fn page_layout(data: &[u8]) {
    let input = String::from_utf8_lossy(data);
    let out = layout::wrapped("  - ", &input);
    assert!(
        out.lines()
            .all(|line| line.chars().count() <= layout::WIDTH_CHARS)
    );
    let letters = |text: &str| text.chars().filter(|c| !c.is_whitespace()).count();
    assert_eq!(letters(&out), letters(&input) + 1);
}

/// What both sets of targets are held to.
#[cfg(test)]
pub(crate) mod checks {
    use std::path::{Path, PathBuf};

    use super::Target;

    /// Each recording is also cut off after so many equal parts.
    const CUTS: usize = 12;

    /// No target finds anything in a recording, whole or cut off.
    pub(crate) fn hold_for(targets: &[(&str, Target)], recordings: &[PathBuf]) {
        for path in recordings {
            let bytes = std::fs::read(path).unwrap();
            for cut in 0..=CUTS {
                for (_, target) in targets {
                    target(&bytes[..bytes.len() * cut / CUTS]);
                }
            }
        }
    }

    /// Every target is one of the fuzz crate's.
    pub(crate) fn are_in_the_fuzz_crate(targets: &[(&str, Target)]) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
        let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
        for (name, _) in targets {
            assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
            let file = root.join(format!("fuzz_targets/{name}.rs"));
            let text = std::fs::read_to_string(file).unwrap();
            assert!(text.contains(&format!("fuzzed::{name}(data)")), "{name}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn what_must_hold_holds_for_every_recording_whole_and_cut_off() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/recordings");
        let mut recordings: Vec<PathBuf> = Vec::new();
        for directory in ["proc", "hw/host", "hw/sysfs", "tokens"] {
            let entries = std::fs::read_dir(root.join(directory))
                .into_iter()
                .flatten();
            recordings.extend(entries.map(|entry| entry.unwrap().path()));
        }
        assert!(recordings.len() > 25, "{}", recordings.len());
        checks::hold_for(&TARGETS, &recordings);
    }

    #[test]
    fn every_target_has_its_file_in_the_fuzz_crate() {
        checks::are_in_the_fuzz_crate(&TARGETS);
    }
}
