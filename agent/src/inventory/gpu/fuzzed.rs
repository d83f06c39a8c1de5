//! What holds for any input of the parsers: for the fuzz targets in `agent/fuzz`, and for the recordings in the tests.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::gpu::{Backend, Gpus, SourceFailure};

use super::assemble::{Machine, assemble, without_source};
use super::class::{Model, class_of};
use super::facts::{Cause, DriverFacts, GpuFacts};
use super::health::settle_memory_held;
use super::smi::run::{Ran, RunError, Smi};
use super::smi::{compute_apps, failure, links, list, query, read, topo};

pub use crate::fuzzed::Target;

/// Every target by its name.
pub const TARGETS: [(&str, Target); 8] = [
    ("smi_query", smi_query),
    ("smi_compute_apps", smi_compute_apps),
    ("smi_topo", smi_topo),
    ("smi_nvlink", smi_nvlink),
    ("smi_list", smi_list),
    ("smi_failure", smi_failure),
    ("smi_read", smi_read),
    ("class_name", class_name),
];

/// An nvidia-smi that answers each question with the next piece of an input, and the first again when there are no more.
struct Pieces<'a> {
    pieces: Vec<&'a [u8]>,
    next: RefCell<usize>,
}

impl Smi for Pieces<'_> {
    fn run(&self, _arguments: &[&str]) -> Result<Ran, RunError> {
        let at = self.next.replace_with(|next| *next + 1);
        let piece = self.pieces.get(at).or(self.pieces.first());
        Ok(ran(piece.copied().unwrap_or_default()))
    }
}

pub fn smi_query(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for fields in [&query::FIELDS[..], &query::FIELDS[..4]] {
        let answer = query::parse(&text, fields);
        for gpu in &answer.gpus {
            numbers_stand_in(&text, gpu);
        }
        hold(&inventory(DriverFacts {
            driver_version: answer.driver_version,
            cuda_version: Err(Cause::Missing),
            gpus: answer.gpus,
            joined: Ok(Vec::new()),
            problems: answer.problems,
        }));
    }
    let _ = query::unknown_field(&text);
    let _ = query::known_fields(&text);
}

pub fn smi_compute_apps(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for processes in compute_apps::parse(&text).by_gpu.values().flatten() {
        for process in processes {
            assert_ne!(process.pid, 0);
            if let Some(mib) = process.memory_mib.known() {
                stands_in(&text, *mib);
            }
        }
    }
}

pub fn smi_topo(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(topology) = topo::parse(&text) {
        for (first, second) in topology.joined {
            assert!(first < second);
            assert!(text.contains("NV"), "nothing is joined without a link");
        }
        for node in topology.numa.values().flatten() {
            stands_in(&text, u64::from(*node));
        }
    }
    if let Ok(pairs) = topo::parse_peers(&text) {
        assert!(pairs.is_empty() || text.contains("OK"));
    }
}

pub fn smi_nvlink(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let lines = text.lines().count();
    for links in links::parse(&text) {
        assert!(links.up.is_err() || links.up.is_ok_and(|up| up as usize <= lines));
    }
}

pub fn smi_list(data: &[u8]) {
    let listing = list::parse(&String::from_utf8_lossy(data));
    let uuids: BTreeSet<&String> = listing.gpus.iter().map(|gpu| &gpu.uuid).collect();
    assert_eq!(uuids.len(), listing.gpus.len(), "each uuid once");
}

pub fn smi_failure(data: &[u8]) {
    let failure = failure::failure(&ran(data));
    assert!(!failure.message.is_empty() && !failure.message.contains('\n'));
    let json = serde_json::to_string(&failure).expect("a failure is plain data");
    let back: SourceFailure = serde_json::from_str(&json).expect("what was written is read");
    assert_eq!(back, failure);
    assert!(without_source(vec![failure]).devices.is_empty());
}

/// Pieces are parted by a byte that no text has.
pub fn smi_read(data: &[u8]) {
    let smi = Pieces {
        pieces: data.split(|byte| *byte == 0xff).collect(),
        next: RefCell::new(0),
    };
    if let Ok(facts) = read(&smi) {
        hold(&inventory(facts));
    }
}

pub fn class_name(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for line in text.lines() {
        let slug = Model::of(line).slug;
        assert!(!slug.is_empty());
        assert!(
            slug.bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        );
        let total = 1 + data.len() as u64 * 997;
        let name = Reading::Known(line.to_string());
        let class = class_of(&name, &Reading::Known(total));
        assert!(class.known().is_some_and(|class| !class.ends_with("-0g")));
        assert_eq!(class_of(&name, &Reading::unknown("x")).value(), None);
    }
}

fn ran(bytes: &[u8]) -> Ran {
    Ran {
        status: bytes.first().map(|byte| i32::from(*byte)),
        stdout: String::from_utf8_lossy(bytes).into_owned(),
        stderr: String::new(),
    }
}

fn inventory(facts: DriverFacts) -> Gpus {
    let nowhere = Path::new("/nonexistent");
    let machine = Machine {
        proc: nowhere,
        sysfs: nowhere,
    };
    assemble(&facts, Backend::NvidiaSmi, Vec::new(), &machine)
}

/// What no inventory may say, wherever it came from.
fn hold(gpus: &Gpus) {
    let mut uuids = BTreeSet::new();
    for gpu in &gpus.devices {
        assert_ne!(gpu.memory.total_mib.value(), Some(&0), "unknown is not 0");
        let class = gpu.class.value();
        assert!(class.is_none_or(|class| !class.ends_with("-0g")));
        assert!(
            gpu.slice.is_some() || class.is_none() || gpu.memory.total_mib.value().is_some(),
            "no class without a total"
        );
        if gpu.slice.is_none()
            && let Some(uuid) = gpu.uuid.value()
        {
            assert!(uuids.insert(uuid), "each uuid once");
        }
        assert!(gpu.health.iter().all(|flag| !flag.reason.is_empty()));
        settle_memory_held(&mut gpu.clone(), &|_| true);
    }
    let mut placed = BTreeSet::new();
    for domain in gpus.nvlink_domains.value().into_iter().flatten() {
        assert!(domain.gpus.len() > 1);
        assert!(
            domain.gpus.iter().all(|gpu| placed.insert(gpu)),
            "in one domain only"
        );
    }
    let json = serde_json::to_string(gpus).expect("an inventory is plain data");
    let back: Gpus = serde_json::from_str(&json).expect("what was written is read");
    assert_eq!(&back, gpus);
}

/// A number of the inventory was in the input: none is made up.
fn numbers_stand_in(text: &str, gpu: &GpuFacts) {
    let numbers = [
        &gpu.total_mib,
        &gpu.used_mib,
        &gpu.reserved_mib,
        &gpu.ecc_volatile,
        &gpu.ecc_aggregate,
    ];
    for number in numbers.into_iter().flatten() {
        stands_in(text, *number);
    }
}

fn stands_in(text: &str, number: u64) {
    assert!(
        text.contains(&number.to_string()),
        "{number} is not in the input"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzzed::checks;
    use std::path::PathBuf;

    fn files(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                files(&path, found);
            } else {
                found.push(path);
            }
        }
    }

    #[test]
    fn what_must_hold_holds_for_every_recording_whole_and_cut_off() {
        let mut recordings = Vec::new();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/recordings/hw");
        files(&root.join("smi"), &mut recordings);
        files(&root.join("nvml"), &mut recordings);
        assert!(recordings.len() > 100);
        checks::hold_for(&TARGETS, &recordings);
    }

    #[test]
    fn every_recording_says_where_it_is_from() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/recordings/hw");
        let mut recordings = Vec::new();
        files(&root.join("smi"), &mut recordings);
        files(&root.join("nvml"), &mut recordings);
        let table = std::fs::read_to_string(root.join("gpus.tsv")).unwrap();
        let sources: std::collections::BTreeMap<&str, &str> = table
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split_once('\t'))
            .collect();
        assert_eq!(sources.len(), recordings.len());
        for path in recordings {
            let name = path.strip_prefix(&root).unwrap().to_str().unwrap();
            let source = sources.get(name).unwrap_or_else(|| panic!("{name}"));
            assert!(
                ["R\t", "C\t"].iter().any(|kind| source.starts_with(kind)),
                "{name}"
            );
        }
    }

    #[test]
    fn every_target_has_its_file_in_the_fuzz_crate() {
        checks::are_in_the_fuzz_crate(&TARGETS);
    }
}
