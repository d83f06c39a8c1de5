//! A large fleet out of a seed: the same seed and size always give the same fleet, which a test pins.

use super::{
    Adapter, FOREIGN, Gpu, Link, ModelEntry, Node, NodeState, ProfileEntry, Replica, Shard,
    ShardState, Snapshot,
};

/// Nodes in a rack.
const RACK_NODES: usize = 16;
/// Racks in a zone.
const ZONE_RACKS: usize = 21;

/// A sequence of random numbers (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Draws(pub u64);

/// A kind of machine.
struct Kind {
    /// How many of a hundred nodes are of it.
    share: u64,
    class: &'static str,
    capability: &'static str,
    gpus: u32,
    /// GPUs in an NVLink domain, 0 without NVLink.
    domain: u32,
    link: Option<Link>,
    cpus: u32,
    memory_gib: f64,
}

const KINDS: [Kind; 6] = [
    kind(55, "h100-sxm-80g", "9.0", 8, 8, Some(Link::Infiniband)),
    kind(12, "h200-140g", "9.0", 8, 8, Some(Link::Infiniband)),
    kind(10, "a100-sxm4-80g", "8.0", 8, 8, Some(Link::Roce)),
    kind(8, "h100-nvl-94g", "9.0", 4, 2, None),
    kind(8, "l40s-45g", "8.9", 4, 0, None),
    kind(7, "", "", 0, 0, None),
];

const fn kind(
    share: u64,
    class: &'static str,
    capability: &'static str,
    gpus: u32,
    domain: u32,
    link: Option<Link>,
) -> Kind {
    Kind {
        share,
        class,
        capability,
        gpus,
        domain,
        link,
        cpus: if gpus == 8 { 192 } else { 64 },
        memory_gib: if gpus == 8 { 2048.0 } else { 512.0 },
    }
}

impl Draws {
    /// The next number in 0..2^64.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number in 0..bound; bound is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// True in so many of a hundred cases.
    pub fn percent(&mut self, share: u64) -> bool {
        self.below(100) < share
    }
}

/// A fleet of so many nodes: six kinds of machines, partly in use, a few of them broken.
pub fn generate(seed: u64, nodes: usize) -> Snapshot {
    let mut draws = Draws(seed);
    let mut snapshot = Snapshot {
        generated_by: format!("llmgw generator, seed {seed}"),
        models: models().into_iter().collect(),
        ..Snapshot::default()
    };
    for number in 0..nodes {
        let (id, node) = node(number, &mut draws);
        snapshot.nodes.insert(id.clone(), node);
        fill(&mut snapshot, &id, &mut draws);
    }
    snapshot
}

fn node(number: usize, draws: &mut Draws) -> (String, Node) {
    let mut left = draws.below(100);
    let kind = KINDS.iter().find(|kind| {
        let found = left < kind.share;
        left = left.wrapping_sub(kind.share);
        found
    });
    let kind = kind.unwrap_or(&KINDS[0]);
    let rack = number / RACK_NODES;
    let zone = char::from(b'a' + u8::try_from(rack / ZONE_RACKS % 26).unwrap_or(0));
    let fabric = kind.link.map(|link| match link {
        Link::Infiniband => format!("ib-{zone}"),
        Link::Roce => format!("roce-{zone}"),
    });
    let state = match draws.below(100) {
        0 => NodeState::Lost,
        1 => NodeState::Draining,
        2 => NodeState::Unreachable,
        _ => NodeState::Ready,
    };
    let node = Node {
        state,
        rack: Some(format!("r{rack:02}")),
        zone: Some(zone.to_string()),
        fabrics: fabric.iter().cloned().collect(),
        gpus: (0..kind.gpus)
            .map(|index| gpu(kind, number, index, draws))
            .collect(),
        adapters: kind.link.map_or(Vec::new(), |link| {
            let adapter = |port: u32| Adapter {
                name: format!("mlx5_{port}"),
                link,
                rate_gbit: Some(400.0),
                fabric: fabric.clone(),
            };
            (0..kind.gpus).map(adapter).collect()
        }),
        cpus: kind.cpus,
        cpus_free: kind.cpus,
        memory_gib: kind.memory_gib,
        memory_gib_free: kind.memory_gib,
        ..Node::default()
    };
    (format!("n{number:04}"), node)
}

fn gpu(kind: &Kind, node: usize, index: u32, draws: &mut Draws) -> Gpu {
    let broken = draws.below(1000) < 8;
    let foreign = draws.below(1000) < 4;
    Gpu {
        uuid: format!("GPU-{node:04}-{index}"),
        index,
        class: kind.class.to_owned(),
        domain: (kind.domain > 0).then(|| index / kind.domain),
        compute_capability: Some(kind.capability.to_owned()),
        healthy: !broken,
        reason: broken.then(|| "uncorrected ECC".to_owned()),
        used_by: foreign.then(|| FOREIGN.to_owned()),
        memory_free_gib: None,
    }
}

/// Puts replicas on a new node: about half of the GPUs are in use.
fn fill(snapshot: &mut Snapshot, id: &str, draws: &mut Draws) {
    let node = snapshot.nodes.get_mut(id).expect("it was put there");
    let sizes: &[usize] = match node.gpus.len() {
        0 => &[0],
        8 => &[4, 4, 8, 2],
        _ => &[1, 2, 1],
    };
    for size in sizes {
        if !draws.percent(45) {
            continue;
        }
        let free = |gpu: &&mut Gpu| gpu.free();
        if node.gpus.iter().filter(|gpu| gpu.free()).count() < *size || node.cpus_free < 8 {
            continue;
        }
        let model = match size {
            0 => "smollm2",
            1 | 2 => "embed-small",
            4 => "llama-3.3-70b",
            _ => "qwen3-235b",
        };
        let numbers = snapshot.replicas.len();
        let replica = format!("{model}/{numbers}");
        for gpu in node.gpus.iter_mut().filter(free).take(*size) {
            gpu.used_by = Some(replica.clone());
        }
        node.cpus_free -= 8;
        node.memory_gib_free -= 16.0;
        let shard = Shard {
            node: id.to_owned(),
            cpus: 8,
            memory_gib: 16.0,
            state: None,
        };
        let running = Replica {
            model: model.to_owned(),
            profile: if *size == 0 { "cpu" } else { "gpu" }.to_owned(),
            state: ShardState::Ready,
            shards: vec![shard],
        };
        snapshot.replicas.insert(replica, running);
    }
}

fn models() -> [(String, ModelEntry); 5] {
    let gpu = |classes: &[&str], gpus_per_node: u32, nodes: u32| ProfileEntry {
        name: "gpu".to_owned(),
        engine: "vllm".to_owned(),
        gpu: classes.iter().map(|class| (*class).to_owned()).collect(),
        gpus_per_node: Some(gpus_per_node),
        nodes,
        tensor_parallel: gpus_per_node,
        pipeline_parallel: nodes,
        ..ProfileEntry::from(&bare())
    };
    let cpu = ProfileEntry {
        name: "cpu".to_owned(),
        engine: "llamacpp".to_owned(),
        cpus: Some(8),
        memory_gib: Some(16.0),
        ..ProfileEntry::from(&bare())
    };
    let model = |name: &str, replicas: u32, profile: ProfileEntry| {
        let entry = ModelEntry {
            source: None,
            labels: Default::default(),
            replicas,
            profiles: vec![profile],
        };
        (name.to_owned(), entry)
    };
    [
        model("smollm2", 8, cpu),
        model("embed-small", 16, gpu(&["l40s-45g", "h100-nvl-94g"], 1, 1)),
        model(
            "llama-3.3-70b",
            32,
            gpu(&["h100-sxm-80g", "h200-140g"], 4, 1),
        ),
        model("qwen3-235b", 8, gpu(&["h100-sxm-80g"], 8, 1)),
        model("deepseek-v3", 4, gpu(&["h200-140g", "h100-sxm-80g"], 8, 2)),
    ]
}

fn bare() -> crate::config::Profile {
    crate::config::Profile {
        name: "".into(),
        engine: String::new(),
        gpu: Vec::new(),
        gpus_per_node: 0,
        nodes: 1,
        tensor_parallel: 1,
        pipeline_parallel: 1,
        cpus: None,
        memory: None,
        node_selector: Default::default(),
        quantization: None,
        slots: None,
        launch_mode: crate::config::LaunchMode::Native,
        args: Vec::new(),
        env: Default::default(),
    }
}
