//! A GPU's class: its model and the GiB that the driver reports, `l40s-45g`.
//!
//! Names are compared word by word (`GH200` is no `H200`). Of a model that `classes.tsv` knows, a total within 2 % of a known one has
//! that one's class, so that a few MiB more or less in another driver don't rename it; any other total is rounded.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

use llmgw_proto::inventory::Reading;

/// The data. Each row has a source; `docs/hardware.md` says how to add one.
const TABLE: &str = include_str!("classes.tsv");
/// A total this close to a known one is that one: 1/50 = 2 %.
const TOLERANCE_DIVISOR: u64 = 50;
/// Drivers' names are shorter.
const NAME_MAX_BYTES: usize = 128;
const MIB_PER_GIB: u64 = 1_024;
/// Nodes have at most 16 GPUs of 7 slices; replaced cards add some.
const REMEMBERED_MAX: usize = 512;

/// Words of brands and sales that say nothing of the model.
const BRANDS: [&str; 7] = [
    "nvidia", "tesla", "geforce", "quadro", "grid", "nvgpu", "graphics",
];
/// Words that a model without a row is named without, too.
const DECORATION: [&str; 11] = [
    "hbm2",
    "hbm2e",
    "hbm3",
    "hbm3e",
    "hbm4",
    "gddr6",
    "gddr6x",
    "gddr7",
    "edition",
    "generation",
    "gpu",
];
/// Words that are written together with the one that follows: `rtx4090`.
const PREFIXES: [&str; 4] = ["rtx", "gtx", "titan", "pro"];

/// What a driver's name says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// `h100-sxm`: the class without its GiB.
    pub slug: String,
    /// Whether the table has it.
    pub known: bool,
    /// It has no memory of its own.
    pub unified: bool,
    /// It is a hypervisor's share of a GPU, named after its profile.
    pub vgpu: bool,
}

/// The class that each GPU got first, for as long as this process lives: a total that drifts over a boundary must not
/// rename a GPU under a running replica.
#[derive(Debug, Default)]
pub struct Classes {
    first: BTreeMap<String, String>,
}

/// A GPU that would have another class now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassChange {
    pub uuid: String,
    pub kept: String,
    pub now: String,
}

/// A row of the table.
struct Row {
    model: &'static str,
    words: Vec<String>,
    unified: bool,
    total_mib: Option<u64>,
    class: &'static str,
}

static ROWS: LazyLock<Vec<Row>> = LazyLock::new(|| TABLE.lines().filter_map(row).collect());

impl Model {
    pub fn of(name: &str) -> Model {
        let words = words(name);
        let vgpu = is_profile(&words);
        let row = ROWS.iter().find(|row| row.words == words);
        Model {
            slug: row.map_or_else(|| slug(&words, vgpu), |row| row.model.to_string()),
            known: row.is_some(),
            unified: row.is_some_and(|row| row.unified),
            vgpu,
        }
    }
}

impl Classes {
    /// The class to show for a GPU, and whether that hides a change.
    pub fn settle(&mut self, uuid: &str, class: &str) -> (String, Option<ClassChange>) {
        match self.first.get(uuid) {
            Some(kept) if kept == class => (kept.clone(), None),
            Some(kept) => {
                let change = ClassChange {
                    uuid: uuid.to_string(),
                    kept: kept.clone(),
                    now: class.to_string(),
                };
                (kept.clone(), Some(change))
            }
            None => {
                if self.first.len() < REMEMBERED_MAX {
                    self.first.insert(uuid.to_string(), class.to_string());
                }
                (class.to_string(), None)
            }
        }
    }
}

impl fmt::Display for ClassChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} would be `{}` now and keeps its class `{}` until the agent restarts",
            self.uuid, self.now, self.kept
        )
    }
}

/// The class of a whole GPU. Without a total there is none: nothing unknown becomes `0g`.
pub fn class_of(name: &Reading<String>, total_mib: &Reading<u64>) -> Reading<String> {
    let name = match name {
        Reading::Unknown(why) => return Reading::unknown(format!("name unknown: {why}")),
        Reading::Known(name) | Reading::Stale { value: name, .. } => name,
    };
    match total_mib {
        Reading::Unknown(why) => Reading::unknown(format!("memory unknown: {why}")),
        Reading::Known(total) | Reading::Stale { value: total, .. } => {
            Reading::Known(class(name, *total))
        }
    }
}

/// The class of a MIG slice: the profile names its memory.
pub fn slice_class(name: &Reading<String>, profile: &Reading<String>) -> Reading<String> {
    match (name.value(), profile.value()) {
        (Some(name), Some(profile)) => {
            Reading::Known(format!("{}-mig-{profile}", Model::of(name).slug))
        }
        (None, _) => Reading::unknown("the name of its GPU is unknown"),
        (_, None) => Reading::unknown("its profile is unknown"),
    }
}

fn class(name: &str, total_mib: u64) -> String {
    let words = words(name);
    let near = ROWS
        .iter()
        .filter(|row| row.words == words)
        .filter_map(|row| Some((row.total_mib?.abs_diff(total_mib), row)))
        .filter(|(apart, row)| {
            apart.saturating_mul(TOLERANCE_DIVISOR) <= row.total_mib.unwrap_or(0)
        })
        .min_by_key(|(apart, _)| *apart);
    match near {
        Some((_, row)) => row.class.to_string(),
        None => format!("{}-{}g", Model::of(name).slug, rounded_gib(total_mib)),
    }
}

/// To the nearest GiB, as operators write it; never to none.
fn rounded_gib(total_mib: u64) -> u64 {
    let nearest = total_mib / MIB_PER_GIB + u64::from(total_mib % MIB_PER_GIB >= MIB_PER_GIB / 2);
    nearest.max(1)
}

/// The words of a name that tell models apart, in order: no brand, no size.
fn words(name: &str) -> Vec<String> {
    let end = (0..=NAME_MAX_BYTES.min(name.len()))
        .rev()
        .find(|end| name.is_char_boundary(*end));
    name[..end.unwrap_or(0)]
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_ascii_lowercase)
        .filter(|word| !BRANDS.contains(&word.as_str()) && !is_size(word))
        .collect()
}

/// `80gb`, `144g`.
fn is_size(word: &str) -> bool {
    ["gb", "g", "gib"].iter().any(|unit| {
        word.strip_suffix(unit).is_some_and(|digits| {
            !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit())
        })
    })
}

/// `A100D-20C`, `H100L-2-24C`: a board and a share of it that ends in the kind of licence.
fn is_profile(words: &[String]) -> bool {
    let [_, .., last] = words else {
        return false;
    };
    let last = last.strip_suffix("me").unwrap_or(last);
    ["a", "b", "c", "q"].iter().any(|kind| {
        last.strip_suffix(kind).is_some_and(|digits| {
            !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit())
        })
    })
}

/// What a model without a row is called.
fn slug(words: &[String], vgpu: bool) -> String {
    let mut slug = String::new();
    let mut joined = true;
    let plain = words
        .iter()
        .filter(|word| vgpu || !DECORATION.contains(&word.as_str()));
    for word in plain {
        if !joined {
            slug.push('-');
        }
        slug.push_str(word);
        joined = PREFIXES.contains(&word.as_str());
    }
    if slug.is_empty() {
        slug.push_str("gpu");
    }
    slug
}

fn row(line: &'static str) -> Option<Row> {
    if line.starts_with('#') {
        return None;
    }
    let cells: Vec<&str> = line.split('\t').collect();
    let [model, name, memory, total_mib, class, _source] = cells.as_slice() else {
        return None;
    };
    Some(Row {
        model,
        words: words(name),
        unified: *memory == "unified",
        total_mib: total_mib.parse().ok(),
        class,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class_for(name: &str, total_mib: u64) -> String {
        let known = Reading::Known(name.to_string());
        let class = class_of(&known, &Reading::Known(total_mib));
        class.value().unwrap().clone()
    }

    #[test]
    fn every_row_of_the_table_is_whole_and_has_a_source() {
        let lines = TABLE.lines().filter(|line| !line.starts_with('#'));
        let mut number = 0;
        for line in lines {
            let cells: Vec<&str> = line.split('\t').collect();
            assert_eq!(cells.len(), 6, "{line}");
            assert!(cells.iter().all(|cell| !cell.is_empty()), "{line}");
            assert!(["own", "unified"].contains(&cells[2]), "{line}");
            if let Ok(total) = cells[3].parse::<u64>() {
                let rounded = format!("{}-{}g", cells[0], rounded_gib(total));
                assert_eq!(
                    cells[4], rounded,
                    "a class is its model and its GiB: {line}"
                );
            }
            number += 1;
        }
        assert_eq!(ROWS.len(), number);
    }

    #[test]
    fn each_gpu_of_the_record_has_the_class_that_operators_write() {
        let record = include_str!("../../../../tests/recordings/hw/gpu_classes.tsv");
        let mut classed = 0;
        for line in record.lines().skip(1) {
            let cells: Vec<&str> = line.split('\t').collect();
            let (slug, name, total, class) = (cells[0], cells[1], cells[2], cells[4]);
            let model = Model::of(name);
            assert_eq!(model.slug, slug, "{name}");
            assert!(model.known && !model.vgpu, "{name}");
            assert_eq!(model.unified, class == "(unified)", "{name}");
            match total.parse() {
                Ok(total) => assert_eq!(class_for(name, total), class, "{name} {total}"),
                Err(_) => {
                    let none = Reading::unknown("not supported");
                    let class = class_of(&Reading::Known(name.to_string()), &none);
                    assert_eq!(
                        class,
                        Reading::unknown("memory unknown: not supported"),
                        "{name} must not become 0g"
                    );
                }
            }
            classed += 1;
        }
        assert_eq!(classed, 42);
    }

    #[test]
    fn a_name_within_a_name_is_another_model() {
        for (name, slug) in [
            ("NVIDIA H200", "h200"),
            ("NVIDIA GH200 480GB", "gh200"),
            ("NVIDIA B200", "b200"),
            ("NVIDIA GB200", "gb200"),
            ("NVIDIA L40", "l40"),
            ("NVIDIA L4", "l4"),
            ("NVIDIA A10", "a10"),
            ("NVIDIA A10G", "a10g"),
            ("NVIDIA A100-SXM4-40GB", "a100-sxm4"),
            ("A100-SXM4-40GB", "a100-sxm4"),
        ] {
            let model = Model::of(name);
            assert_eq!((model.slug.as_str(), model.known), (slug, true), "{name}");
        }
    }

    #[test]
    fn a_model_without_a_row_is_named_by_rule() {
        for (name, total, class) in [
            ("NVIDIA GeForce RTX 2080 SUPER", 8_192, "rtx2080-super-8g"),
            ("NVIDIA GeForce RTX 4080 SUPER", 16_376, "rtx4080-super-16g"),
            ("Tesla P100-PCIE-16GB", 16_280, "p100-pcie-16g"),
            ("Quadro RTX 8000", 49_152, "rtx8000-48g"),
            (
                "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
                97_887,
                "rtxpro6000-blackwell-workstation-96g",
            ),
            ("NVIDIA H100 96GB HBM3", 97_871, "h100-sxm-96g"),
            ("NVIDIA H100 64GB HBM2", 65_247, "h100-64g"),
            ("", 1_024, "gpu-1g"),
            ("\u{fffd}\u{1f600}", 1_024, "gpu-1g"),
        ] {
            assert_eq!(class_for(name, total), class, "{name}");
        }
    }

    #[test]
    fn a_share_of_a_gpu_is_never_taken_for_the_whole() {
        for (name, total, class) in [
            ("GRID A100D-20C", 20_480, "a100d-20c-20g"),
            ("NVIDIA H100L-2-24C", 24_576, "h100l-2-24c-24g"),
            ("GRID T4-16Q", 16_384, "t4-16q-16g"),
        ] {
            let model = Model::of(name);
            assert!(model.vgpu && !model.known, "{name}");
            assert_eq!(class_for(name, total), class);
        }
        assert!(!Model::of("NVIDIA RTX A2000 12GB").vgpu);
    }

    #[test]
    fn a_total_near_a_known_one_has_its_class_and_another_is_rounded() {
        // 6 MiB more and rounding would say 23g.
        assert_eq!(class_for("NVIDIA L4", 23_040), "l4-22g");
        assert_eq!(rounded_gib(23_040), 23);
        // Of two known totals the nearer one counts.
        assert_eq!(class_for("NVIDIA A100-SXM4-80GB", 81_300), "a100-sxm4-79g");
        assert_eq!(class_for("NVIDIA A100-SXM4-80GB", 81_900), "a100-sxm4-80g");
        // The kernel of another DGX Spark keeps less for itself.
        assert_eq!(class_for("NVIDIA GB10", 124_610), "gb10-120g");
        // Beyond 2 % it is another thing: an L40S of 96 GiB.
        assert_eq!(class_for("NVIDIA L40S", 98_304), "l40s-96g");
        assert_eq!(
            class_for("NVIDIA L40S", u64::MAX),
            "l40s-18014398509481984g"
        );
    }

    #[test]
    fn a_gpu_keeps_its_first_class_and_the_change_is_told() {
        let mut classes = Classes::default();
        assert_eq!(
            classes.settle("GPU-1", "a6000-45g"),
            ("a6000-45g".into(), None)
        );
        assert_eq!(classes.settle("GPU-2", "a6000-48g").1, None);
        let (kept, change) = classes.settle("GPU-1", "a6000-48g");
        assert_eq!(kept, "a6000-45g");
        let change = change.unwrap();
        assert_eq!(
            change.to_string(),
            "GPU-1 would be `a6000-48g` now and keeps its class `a6000-45g` until the agent restarts"
        );
        for number in 0..2 * REMEMBERED_MAX {
            classes.settle(&format!("GPU-x{number}"), "l4-22g");
        }
        assert_eq!(classes.first.len(), REMEMBERED_MAX);
    }

    #[test]
    fn a_slice_is_classed_by_its_profile() {
        let name = Reading::Known("NVIDIA H100 80GB HBM3".to_string());
        assert_eq!(
            slice_class(&name, &Reading::Known("1g.10gb".to_string())),
            Reading::Known("h100-sxm-mig-1g.10gb".to_string())
        );
    }
}
