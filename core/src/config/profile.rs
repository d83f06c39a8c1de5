//! Whether a profile makes sense by itself, before anything is launched.

use super::Profile;
use super::check::plain_name;
use super::problem::{Finding, Place};
use super::yaml::shown;

/// GPU models below compute capability 8.9, which have no fp8 units (NVIDIA's tables; the first words of a class).
const WITHOUT_FP8: [&str; 21] = [
    "p4", "p40", "p100", "v100", "t4", "a2", "a10", "a10g", "a16", "a30", "a40", "a100", "a800",
    "a4000", "a4500", "a5000", "a5500", "a6000", "rtx3080", "rtx3090", "rtx2080",
];

/// The rules that need no engine plugin and no hardware.
pub(super) fn rules(profile: &Profile, place: &Place, found: &mut Vec<Finding>) {
    plain_name(&profile.name, "profile", place.key("name"), found);
    plain_name(&profile.engine, "engine", place.key("engine"), found);
    for name in profile.env.keys() {
        let valid = name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && name
                .bytes()
                .next()
                .is_some_and(|byte| !byte.is_ascii_digit());
        if !valid {
            let wrong = format!("`{}` is no name of an environment variable", shown(name));
            found.push(Finding::new(
                place.key("env").key(name).at_key(),
                wrong,
                "use letters, digits and `_`",
            ));
        }
    }
    if profile.gpu.is_empty() {
        return cpu_rules(profile, place, found);
    }
    for (index, class) in profile.gpu.iter().enumerate() {
        let gpu = place.key("gpu");
        let here = if profile.gpu.len() > 1 {
            gpu.index(index)
        } else {
            gpu
        };
        gpu_class(class, profile, &here, index, found);
    }
    let gpus = u64::from(profile.nodes) * u64::from(profile.gpus_per_node);
    let (tensor, pipeline) = (profile.tensor_parallel, profile.pipeline_parallel);
    let ranks = u64::from(tensor) * u64::from(pipeline);
    if gpus != ranks {
        let wrong = format!(
            "nodes x gpus_per_node is {} x {} = {gpus}, but tensor_parallel x pipeline_parallel is {tensor} x {pipeline} = {ranks}",
            profile.nodes, profile.gpus_per_node
        );
        let right = match gpus.is_multiple_of(u64::from(pipeline)) {
            true => format!("set `tensor_parallel: {}`", gpus / u64::from(pipeline)),
            false => "make both the same".to_owned(),
        };
        found.push(Finding::new(place.key("tensor_parallel"), wrong, right));
    }
}

/// Whether this GPU class is known to be below compute capability 8.9.
pub(crate) fn lacks_fp8(class: &str) -> bool {
    WITHOUT_FP8.contains(&class.split('-').next().unwrap_or(""))
}

/// The same rules for a profile that came from elsewhere than the configuration: `key: what is wrong; what is right`.
pub(crate) fn problems(profile: &Profile) -> Vec<String> {
    let mut found = Vec::new();
    rules(profile, &Place::root(), &mut found);
    found
        .into_iter()
        .map(|finding| format!("{}: {}; {}", finding.place, finding.wrong, finding.right))
        .collect()
}

/// A profile without a GPU class runs on CPUs, so nothing in it may speak of cards.
fn cpu_rules(profile: &Profile, place: &Place, found: &mut Vec<Finding>) {
    let cards = [
        ("gpus_per_node", profile.gpus_per_node > 0),
        ("nodes", profile.nodes > 1),
        ("tensor_parallel", profile.tensor_parallel > 1),
        ("pipeline_parallel", profile.pipeline_parallel > 1),
    ];
    for (key, set) in cards {
        if set {
            let right = format!("name the class, e.g. `gpu: h100-sxm-80g`, or remove `{key}`");
            found.push(Finding::new(
                place.key(key),
                "is set, but the profile has no `gpu` class and so means CPU",
                right,
            ));
        }
    }
}

fn gpu_class(
    class: &str,
    profile: &Profile,
    place: &Place,
    index: usize,
    found: &mut Vec<Finding>,
) {
    if class.is_empty() {
        return;
    }
    let gib = class
        .rsplit_once('-')
        .and_then(|(_, gib)| gib.strip_suffix('g'));
    let sized =
        gib.is_some_and(|gib| !gib.is_empty() && gib.bytes().all(|byte| byte.is_ascii_digit()));
    let slug = class
        .bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    if !sized || !slug {
        let lower = class.to_ascii_lowercase().replace([' ', '_'], "-");
        let right = match lower == class {
            true => "write the model and the GiB that the driver reports, e.g. `h100-sxm-80g`; `llmgw agent inventory` prints it".to_owned(),
            false => format!("write lower case with dashes: `{lower}`"),
        };
        found.push(Finding::new(
            place.clone(),
            format!("`{}` is not a GPU class", shown(class)),
            right,
        ));
    }
    if profile.gpu[..index].iter().any(|other| other == class) {
        found.push(Finding::new(
            place.clone(),
            format!("`{class}` is listed twice"),
            "keep one of them",
        ));
    }
    let fp8 = profile
        .quantization
        .as_ref()
        .is_some_and(|kind| kind.to_ascii_lowercase().contains("fp8"));
    if fp8 && lacks_fp8(class) {
        let wrong = format!("fp8 needs compute capability 8.9, which `{class}` does not have");
        found.push(Finding::new(
            place.clone(),
            wrong,
            "remove the class, or choose another `quantization`",
        ));
    }
}
