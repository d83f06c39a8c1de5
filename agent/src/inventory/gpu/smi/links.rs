//! `nvidia-smi nvlink --status`: how many links of each GPU are up. It does not say to whom they lead.

use super::{cells, list};
use crate::inventory::gpu::facts::{Cause, Fact, quote};

/// Current drivers have 36 links at most.
const LINKS_MAX: u32 = 72;

/// A GPU's links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Links {
    pub uuid: String,
    pub up: Fact<u32>,
}

/// The GPUs in the answer; of one that is absent nothing is known.
pub fn parse(text: &str) -> Vec<Links> {
    let mut gpus: Vec<Links> = Vec::new();
    for (line, whole) in cells::lines(text) {
        if let Some(gpu) = list::gpu(line) {
            gpus.push(Links {
                uuid: gpu.uuid,
                up: Err(Cause::Missing),
            });
            continue;
        }
        let Some(gpu) = gpus.last_mut() else { continue };
        match link(line) {
            // Half a line says nothing.
            Some(_) if !whole => gpu.up = Err(Cause::Missing),
            Some(true) if gpu.up.as_ref().is_ok_and(|up| *up >= LINKS_MAX) => {}
            Some(true) => gpu.up = Ok(gpu.up.as_ref().map_or(1, |up| up + 1)),
            Some(false) => gpu.up = Ok(*gpu.up.as_ref().unwrap_or(&0)),
            None => gpu.up = message(line),
        }
    }
    gpus
}

/// `Link 3: 26.562 GB/s` is up, `Link 3: <inactive>` is down.
fn link(line: &str) -> Option<bool> {
    let (number, state) = line.trim().strip_prefix("Link ")?.split_once(": ")?;
    cells::number::<u32>(number).ok()?;
    if state == "<inactive>" {
        return Some(false);
    }
    let speed = state.strip_suffix(" GB/s")?;
    speed.parse::<f64>().ok().map(|speed| speed > 0.0)
}

fn message(line: &str) -> Fact<u32> {
    let lower = line.to_ascii_lowercase();
    if lower.contains("all links are inactive") {
        Ok(0)
    } else if lower.contains("does not have or support nvlink") {
        Err(Cause::NotSupported)
    } else if lower.contains("in mig mode") {
        Err(Cause::NotRead("not told in MIG mode".to_string()))
    } else {
        Err(Cause::Said(quote(line)))
    }
}
