//! `nvidia-smi topo -m`: which GPUs NVLink joins, and which processors are near them.
//!
//! Also `topo -p2p n`, which has the same form and says of each pair whether it can use NVLink.

use std::collections::BTreeMap;

use crate::inventory::gpu::facts::{Cause, Fact};

const GPUS_MAX: usize = 64;
const LINE_MAX_BYTES: usize = 16 * 1_024;

/// What `topo -m` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Pairs of the driver's numbers, the smaller one first.
    pub joined: Vec<(u32, u32)>,
    pub numa: BTreeMap<u32, Fact<u32>>,
    pub problems: Vec<String>,
}

/// A square of cells, one row and one column for each GPU, and what stands right of it.
struct Matrix {
    gpus: Vec<u32>,
    cells: BTreeMap<(u32, u32), String>,
    numa: BTreeMap<u32, String>,
}

pub fn parse(text: &str) -> Result<Topology, Cause> {
    let matrix = Matrix::parse(text)?;
    let mut problems = Vec::new();
    let joined = matrix.pairs(is_nvlink, &mut problems);
    let numa = matrix
        .numa
        .iter()
        .map(|(gpu, cell)| (*gpu, super::cells::number(cell)))
        .collect();
    Ok(Topology {
        joined,
        numa,
        problems,
    })
}

/// The pairs that may use NVLink, from `topo -p2p n`.
pub fn parse_peers(text: &str) -> Result<Vec<(u32, u32)>, Cause> {
    let matrix = Matrix::parse(text)?;
    Ok(matrix.pairs(|cell| cell == "OK", &mut Vec::new()))
}

/// `NV18`: that many links.
fn is_nvlink(cell: &str) -> bool {
    cell.strip_prefix("NV")
        .is_some_and(|links| links.parse::<u32>().is_ok_and(|links| links > 0))
}

impl Matrix {
    fn parse(text: &str) -> Result<Matrix, Cause> {
        let mut lines = text
            .split('\n')
            .take_while(|line| line.len() <= LINE_MAX_BYTES)
            .map(|line| without_escapes(line.trim_end_matches('\r')));
        let header = lines
            .find(|line| line.split('\t').any(|cell| gpu(cell).is_some()))
            .ok_or_else(|| no_matrix("it shows no GPUs"))?;
        let columns: Vec<&str> = header.split('\t').map(str::trim).collect();
        let mut matrix = Matrix {
            gpus: columns.iter().filter_map(|cell| gpu(cell)).collect(),
            cells: BTreeMap::new(),
            numa: BTreeMap::new(),
        };
        matrix.check_header()?;
        for line in lines {
            matrix.add(&columns, &line);
        }
        let size = matrix.gpus.len();
        if matrix.cells.len() != size * size {
            return Err(no_matrix("it is not a whole matrix"));
        }
        Ok(matrix)
    }

    fn check_header(&self) -> Result<(), Cause> {
        let mut sorted = self.gpus.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != self.gpus.len() || sorted.len() > GPUS_MAX {
            return Err(no_matrix("its header names a GPU twice"));
        }
        Ok(())
    }

    /// A row, if it is one of a GPU in the header. The first of two rows counts.
    fn add(&mut self, columns: &[&str], line: &str) {
        let mut cells = line.split('\t').map(str::trim);
        let Some(row) = cells.next().and_then(gpu) else {
            return;
        };
        if !self.gpus.contains(&row) || self.cells.keys().any(|(other, _)| *other == row) {
            return;
        }
        // The header begins with an empty cell over the names of the rows.
        for (column, cell) in columns.iter().skip(1).zip(cells) {
            if let Some(column) = gpu(column) {
                if !cell.is_empty() {
                    self.cells.insert((row, column), cell.to_string());
                }
            } else if *column == "NUMA Affinity" {
                self.numa.insert(row, cell.to_string());
            }
        }
    }

    /// The pairs that say yes in both directions.
    fn pairs(&self, yes: fn(&str) -> bool, problems: &mut Vec<String>) -> Vec<(u32, u32)> {
        let says = |row, column| self.cells.get(&(row, column)).is_some_and(|cell| yes(cell));
        let mut pairs = Vec::new();
        for (at, &first) in self.gpus.iter().enumerate() {
            for &second in &self.gpus[at + 1..] {
                match (says(first, second), says(second, first)) {
                    (true, true) => pairs.push((first.min(second), first.max(second))),
                    (false, false) => {}
                    _ => problems.push(format!(
                        "nvidia-smi topo disagrees with itself about GPU{first} and GPU{second}: taken as not joined"
                    )),
                }
            }
        }
        pairs
    }
}

fn no_matrix(why: &str) -> Cause {
    Cause::NotRead(format!("nvidia-smi topo gave no topology: {why}"))
}

/// `GPU0`.
fn gpu(cell: &str) -> Option<u32> {
    super::cells::number(cell.trim().strip_prefix("GPU")?).ok()
}

/// The line without terminal escapes: drivers underline the header even in a pipe.
fn without_escapes(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut rest = line.chars().peekable();
    while let Some(c) = rest.next() {
        if c != '\u{1b}' {
            plain.push(c);
        } else if rest.next_if_eq(&'[').is_some() {
            // Parameters, then one letter.
            while rest.next_if(|c| !c.is_ascii_alphabetic()).is_some() {}
            rest.next();
        }
    }
    plain
}
