//! `nvidia-smi --query-gpu`: which fields are asked for, and what the rows say.

use std::collections::BTreeSet;

use super::cells;
use super::handle::BadHandle;
use crate::inventory::gpu::facts::{Cause, FabricFacts, Fact, GpuFacts, pci_address, quote};

/// What is asked for, in this order. Fields that a driver does not know are left out of a second try.
pub const FIELDS: [&str; 23] = [
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "compute_cap",
    "driver_version",
    "pci.bus_id",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.uncorrected.aggregate.total",
    "mig.mode.current",
    "persistence_mode",
    "remapped_rows.pending",
    "remapped_rows.failure",
    // A GPU that needs a reset may say so in these three only.
    "temperature.gpu",
    "utilization.gpu",
    "power.draw",
    "memory.reserved",
    "gpu_recovery_action",
    "fabric.state",
    "fabric.status",
    "fabric.cliqueId",
    "fabric.clusterUuid",
];

/// Fields without which the answer is of no use.
const FIELDS_MIN: usize = 2;
/// The largest nodes have 16 GPUs.
const GPUS_MAX: usize = 64;
const PROBLEMS_MAX: usize = 16;

/// What the rows say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub gpus: Vec<GpuFacts>,
    pub driver_version: Fact<String>,
    pub problems: Vec<String>,
}

/// One row by the names of its fields.
struct Row<'a> {
    fields: &'a [&'a str],
    cells: Vec<String>,
    /// Whether the last cell may be cut off.
    cut: bool,
}

/// Reads an answer to a query for `fields`, whatever else stands between the rows.
pub fn parse(text: &str, fields: &[&str]) -> Answer {
    let mut order: Vec<&str> = fields.to_vec();
    let mut answer = Answer {
        gpus: Vec::new(),
        driver_version: Err(Cause::Missing),
        problems: Vec::new(),
    };
    let mut handles = Vec::new();
    for (line, whole) in cells::lines(text) {
        if let Some(handle) = BadHandle::parse(line) {
            handles.push(handle);
            continue;
        }
        let row = cells::split(line);
        if let Some(header) = header(&row, fields) {
            order = header;
            continue;
        }
        let row = Row {
            fields: &order,
            cells: row,
            cut: !whole,
        };
        answer.add(&row, line);
    }
    answer.attach(handles);
    answer
}

/// The name in nvidia-smi's complaint: `Field "x" is not a valid field to query.`, or `x : not a valid field to query.`
pub fn unknown_field(text: &str) -> Option<&str> {
    let (before, _) = text.split_once("not a valid field to query")?;
    let before = before.lines().next_back()?.trim_end();
    if let Some(quoted) = before.strip_suffix("is") {
        let quoted = quoted.trim_end().strip_suffix('"')?;
        return quoted.rsplit_once('"').map(|(_, name)| name);
    }
    before.strip_suffix(':').map(str::trim)
}

/// The fields that `--help-query-gpu` has: each stands quoted at the beginning of a line.
pub fn known_fields(help: &str) -> BTreeSet<&str> {
    help.lines()
        .filter(|line| line.trim_start().starts_with('"'))
        .flat_map(|line| line.split('"').skip(1).step_by(2))
        .collect()
}

/// The names in a header row (`memory.total [MiB]`), as far as they were asked for.
fn header<'a>(row: &[String], fields: &[&'a str]) -> Option<Vec<&'a str>> {
    if row.first().map(String::as_str) != fields.first().copied() {
        return None;
    }
    let named = row.iter().map(|cell| {
        let name = cell.split(" [").next().unwrap_or_default();
        fields.iter().find(|field| **field == name).copied()
    });
    Some(named.map(|name| name.unwrap_or("")).collect())
}

impl Answer {
    fn add(&mut self, row: &Row<'_>, line: &str) {
        if !row.is_one() {
            return self.complain(format!("nvidia-smi printed `{}`", quote(line)));
        }
        let gpu = row.facts();
        if let Ok(uuid) = &gpu.uuid
            && self
                .gpus
                .iter()
                .any(|other| other.uuid.as_ref() == Ok(uuid))
        {
            return self.complain(format!("nvidia-smi listed {uuid} twice"));
        }
        if self.gpus.len() == GPUS_MAX {
            return self.complain(format!("nvidia-smi listed more than {GPUS_MAX} GPUs"));
        }
        if self.driver_version.is_err() {
            self.driver_version = row.cell("driver_version").and_then(cells::text);
        }
        self.gpus.push(gpu);
    }

    /// Gives each line about a handle to the row without a uuid that it stands for, or lists it as a GPU of its own.
    fn attach(&mut self, handles: Vec<BadHandle>) {
        let mut handles = handles.into_iter();
        for gpu in self.gpus.iter_mut().filter(|gpu| gpu.uuid.is_err()) {
            let Some(handle) = handles.next() else { break };
            if gpu.pci.is_err() {
                gpu.pci = handle.pci;
            }
            if !gpu.faults.contains(&handle.cause) {
                gpu.faults.push(handle.cause);
            }
        }
        let room = GPUS_MAX.saturating_sub(self.gpus.len());
        self.gpus
            .extend(handles.take(room).map(BadHandle::into_facts));
    }

    fn complain(&mut self, problem: String) {
        if self.problems.len() < PROBLEMS_MAX && !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }
}

impl Row<'_> {
    /// Whether this is a row of the answer, not some message with commas.
    fn is_one(&self) -> bool {
        let count = self.cells.len();
        let is_value = |field, read: fn(&str) -> bool| self.cell(field).is_ok_and(read);
        (FIELDS_MIN..=self.fields.len()).contains(&count)
            && is_value("index", |cell| {
                cells::cause(cell).is_some() || cells::number::<u32>(cell).is_ok()
            })
            && is_value("uuid", |cell| {
                cells::cause(cell).is_some() || cells::uuid(cell).is_ok()
            })
    }

    fn cell(&self, field: &str) -> Fact<&str> {
        let at = self.fields.iter().position(|name| *name == field);
        let at = at.ok_or(Cause::TooOld)?;
        if self.cut && at + 1 >= self.cells.len() {
            return Err(Cause::Missing);
        }
        self.cells.get(at).map(String::as_str).ok_or(Cause::Missing)
    }

    fn facts(&self) -> GpuFacts {
        let mib = |field| self.cell(field).and_then(cells::mib);
        let flag = |field| self.cell(field).and_then(cells::flag);
        GpuFacts {
            index: self.cell("index").and_then(cells::number),
            uuid: self.cell("uuid").and_then(cells::uuid),
            name: self.cell("name").and_then(cells::text),
            total_mib: mib("memory.total"),
            used_mib: mib("memory.used"),
            reserved_mib: mib("memory.reserved"),
            compute_capability: self.cell("compute_cap").and_then(cells::capability),
            pci: self
                .cell("pci.bus_id")
                .and_then(|cell| cells::cause(cell).map_or_else(|| pci_address(cell), Err)),
            numa_node: Err(Cause::NotRead(
                "nvidia-smi topo -m was not read".to_string(),
            )),
            ecc_volatile: self
                .cell("ecc.errors.uncorrected.volatile.total")
                .and_then(cells::number),
            ecc_aggregate: self
                .cell("ecc.errors.uncorrected.aggregate.total")
                .and_then(cells::number),
            remap_pending: flag("remapped_rows.pending"),
            remap_failed: flag("remapped_rows.failure"),
            mig: flag("mig.mode.current"),
            recovery: self.cell("gpu_recovery_action").and_then(cells::recovery),
            fabric: FabricFacts {
                state: self.cell("fabric.state").and_then(cells::fabric_state),
                status: self.cell("fabric.status").and_then(cells::text),
                clique_id: self.cell("fabric.cliqueId").and_then(cells::number),
                cluster_uuid: self
                    .cell("fabric.clusterUuid")
                    .and_then(cells::cluster_uuid),
            },
            nvlinks_up: Err(Cause::NotRead("nvidia-smi nvlink was not read".to_string())),
            processes: Err(Cause::NotRead(
                "nvidia-smi's list of processes was not read".to_string(),
            )),
            slices: Ok(Vec::new()),
            faults: self.faults(),
        }
    }

    /// What any cell says of the whole GPU. An unknown error counts only where a healthy GPU has a value.
    fn faults(&self) -> Vec<Cause> {
        let mut faults = BTreeSet::new();
        for (field, cell) in self.fields.iter().zip(&self.cells) {
            let Some(cause) = cells::cause(cell) else {
                continue;
            };
            let vital = ["index", "uuid", "name", "memory.total", "memory.used"].contains(field)
                || field.starts_with("ecc.");
            let whole_gpu = matches!(cause, Cause::Lost | Cause::NeedsReset | Cause::Blocked);
            if whole_gpu || (vital && matches!(cause, Cause::UnknownError | Cause::Timeout)) {
                faults.insert(cause);
            }
        }
        faults.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_complaints_name_the_field() {
        for (text, field) in [
            (
                "Field \"fabric.cliqueId\" is not a valid field to query.\n\n",
                Some("fabric.cliqueId"),
            ),
            (
                "fabric.cliqueId : not a valid field to query.\n",
                Some("fabric.cliqueId"),
            ),
            ("is not a valid field to query.", None),
            ("0, GPU-1, NVIDIA L4\n", None),
        ] {
            assert_eq!(unknown_field(text), field, "{text}");
        }
    }

    #[test]
    fn the_help_lists_fields_under_all_their_names() {
        let help = "List of valid properties to query:\n\n\"timestamp\"\nThe \"when\".\n\n\"pci.bus_id\" or \"gpu_bus_id\"\nPCI bus id.\n";
        let known: Vec<&str> = known_fields(help).into_iter().collect();
        assert_eq!(known, ["gpu_bus_id", "pci.bus_id", "timestamp"]);
    }
}
