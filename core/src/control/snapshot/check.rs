//! What must be true in a snapshot beyond its shape.

use std::collections::BTreeSet;

use super::{
    FOREIGN, Gpu, ModelEntry, NODE_GPUS_MAX, NODES_MAX, Node, PoolReplica, RESERVED, Replica,
    Snapshot,
};
use crate::config::profile_problems;

/// A path and what is wrong there.
pub(super) type Wrong = (String, String);

impl Snapshot {
    /// The first contradiction.
    pub(super) fn problem(&self) -> Option<Wrong> {
        if self.nodes.len() > NODES_MAX {
            return Some(("nodes".to_owned(), format!("more than {NODES_MAX} nodes")));
        }
        if !is_time(&self.taken_at) {
            let wrong = format!(
                "`{}` is no time such as `2026-07-01T12:00:00Z`",
                self.taken_at
            );
            return Some(("taken_at".to_owned(), wrong));
        }
        let mut uuids = BTreeSet::new();
        let mut nodes = self.nodes.iter();
        let mut models = self.models.iter();
        let mut replicas = self.replicas.iter();
        let mut pools = self.pools.iter();
        let entry =
            |map: &str, name: &str, (path, wrong): Wrong| (format!("{map}[{name:?}]{path}"), wrong);
        nodes
            .find_map(|(id, node)| {
                let found = node_problem(node)
                    .or_else(|| users_problem(id, node, self))
                    .or_else(|| twice(node, &mut uuids));
                found.map(|wrong| entry("nodes", id, wrong))
            })
            .or_else(|| {
                models.find_map(|(id, model)| model_problem(model).map(|w| entry("models", id, w)))
            })
            .or_else(|| {
                replicas.find_map(|(id, replica)| {
                    replica_problem(id, replica, self).map(|w| entry("replicas", id, w))
                })
            })
            .or_else(|| {
                pools.find_map(|(id, pool)| pool_problem(pool).map(|w| entry("pools", id, w)))
            })
    }
}

/// What is wrong with a node by itself.
pub(super) fn node_problem(node: &Node) -> Option<Wrong> {
    let wrong = |path: &str, text: String| Some((path.to_owned(), text));
    if node.cpus_free > node.cpus {
        let text = format!("{} cores are free of {}", node.cpus_free, node.cpus);
        return wrong(".cpus_free", text);
    }
    let (free, all) = (node.memory_gib_free, node.memory_gib);
    if !(free.is_finite() && all.is_finite() && 0.0 <= free && free <= all) {
        return wrong(".memory_gib_free", format!("{free} GiB are free of {all}"));
    }
    if node.gpus.len() > NODE_GPUS_MAX {
        return wrong(".gpus", format!("more than {NODE_GPUS_MAX} GPUs"));
    }
    let mut indexes = BTreeSet::new();
    for (at, gpu) in node.gpus.iter().enumerate() {
        if !indexes.insert(gpu.index) {
            let text = format!("another GPU has the index {} too", gpu.index);
            return wrong(&format!(".gpus[{at}].index"), text);
        }
        if let Some((path, text)) = gpu_problem(gpu) {
            return wrong(&format!(".gpus[{at}]{path}"), text);
        }
    }
    for (at, adapter) in node.adapters.iter().enumerate() {
        if let Some(fabric) = adapter.fabric.as_ref()
            && !node.fabrics.contains(fabric)
        {
            let text = format!("`{fabric}` is none of the node's `fabrics`");
            return wrong(&format!(".adapters[{at}].fabric"), text);
        }
    }
    None
}

fn gpu_problem(gpu: &Gpu) -> Option<Wrong> {
    if gpu.class.is_empty() {
        return Some((".class".to_owned(), "it is empty".to_owned()));
    }
    let capability = gpu.compute_capability.as_deref()?;
    if capability_of(capability).is_none() {
        let text = format!("`{capability}` is no compute capability such as `9.0`");
        return Some((".compute_capability".to_owned(), text));
    }
    None
}

/// `8.9` as (8, 9), which compares where the text does not: 12.0 is more than 8.9.
pub(crate) fn capability_of(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn users_problem(id: &str, node: &Node, snapshot: &Snapshot) -> Option<Wrong> {
    node.gpus.iter().enumerate().find_map(|(at, gpu)| {
        let user = gpu.used_by.as_deref()?;
        let on_node = |replica: &Replica| replica.shards.iter().any(|shard| shard.node == id);
        let known = user == FOREIGN
            || user == RESERVED
            || snapshot.replicas.get(user).is_some_and(on_node);
        let text = format!("`replicas` has no `{user}` with a shard here; `{FOREIGN}` is for processes that llmgw did not start");
        (!known).then(|| (format!(".gpus[{at}].used_by"), text))
    })
}

fn twice<'a>(node: &'a Node, uuids: &mut BTreeSet<&'a str>) -> Option<Wrong> {
    node.gpus.iter().enumerate().find_map(|(at, gpu)| {
        let text = format!("another GPU is `{}` too", gpu.uuid);
        (!uuids.insert(&gpu.uuid)).then(|| (format!(".gpus[{at}].uuid"), text))
    })
}

/// What is wrong with a model: the configuration's own rules for profiles.
pub(super) fn model_problem(model: &ModelEntry) -> Option<Wrong> {
    let mut names = BTreeSet::new();
    model.profiles.iter().enumerate().find_map(|(at, profile)| {
        let place = format!(".profiles[{at}]");
        if !names.insert(&profile.name) {
            let text = format!("another profile is `{}` too", profile.name);
            return Some((place + ".name", text));
        }
        if !profile
            .memory_gib
            .is_none_or(|gib| (0.0..1e6).contains(&gib))
        {
            return Some((
                place + ".memory_gib",
                "it is no amount of memory".to_owned(),
            ));
        }
        let text = profile_problems(&profile.profile()).into_iter().next()?;
        Some((place, text))
    })
}

fn replica_problem(id: &str, replica: &Replica, snapshot: &Snapshot) -> Option<Wrong> {
    let number = id
        .strip_prefix(replica.model.as_str())
        .and_then(|rest| rest.strip_prefix('/'))
        .and_then(|number| number.parse::<u32>().ok());
    if number.is_none() {
        let text = format!("a replica's id is `{}/<number>`", replica.model);
        return Some((String::new(), text));
    }
    if replica.shards.is_empty() {
        return Some((".shards".to_owned(), "it is empty".to_owned()));
    }
    let mut nodes = BTreeSet::new();
    replica.shards.iter().enumerate().find_map(|(at, shard)| {
        let text = if !snapshot.nodes.contains_key(&shard.node) {
            format!("there is no node `{}`", shard.node)
        } else if !nodes.insert(&shard.node) {
            format!("another shard is on `{}` too", shard.node)
        } else if !(0.0..1e6).contains(&shard.memory_gib) {
            return Some((
                format!(".shards[{at}].memory_gib"),
                "it is no amount of memory".to_owned(),
            ));
        } else {
            return None;
        };
        Some((format!(".shards[{at}].node"), text))
    })
}

/// What is wrong with a pool.
pub(super) fn pool_problem(pool: &[PoolReplica]) -> Option<Wrong> {
    let mut ids = BTreeSet::new();
    pool.iter().enumerate().find_map(|(at, replica)| {
        if !ids.insert(&replica.id) {
            let text = format!("another replica is `{}` too", replica.id);
            return Some((format!("[{at}].id"), text));
        }
        let text = format!("{:?} is not in 0..1", replica.kv);
        let wrong = replica.kv.is_some_and(|kv| !(0.0..=1.0).contains(&kv));
        wrong.then(|| (format!("[{at}].kv"), text))
    })
}

/// The shape of RFC 3339 in UTC to the second; a fraction may follow.
fn is_time(text: &str) -> bool {
    const SHAPE: &[u8] = b"dddd-dd-ddTdd:dd:dd";
    let Some((time, fraction)) = text
        .strip_suffix('Z')
        .and_then(|text| text.split_at_checked(SHAPE.len()))
    else {
        return false;
    };
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let shaped = time.bytes().zip(SHAPE).all(|(byte, shape)| match shape {
        b'd' => byte.is_ascii_digit(),
        shape => byte == *shape,
    });
    shaped && (fraction.is_empty() || fraction.strip_prefix('.').is_some_and(digits))
}
