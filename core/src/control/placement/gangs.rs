//! Which nodes together: each fitting node for a single-node job, else gangs inside one fabric, at most [`GANGS_MAX`].

use std::collections::{BTreeMap, BTreeSet};

use super::candidates::Place;
use super::need::Need;
use super::reason::{Reason, code, counted};

/// Gangs that are scored for a multi-node job.
pub const GANGS_MAX: usize = 256;

/// A class and a fabric, and the positions of the fitting nodes that have both.
type Pools<'p> = BTreeMap<(Option<usize>, &'p str), Vec<usize>>;

/// Complete gangs, and whether there are more than were enumerated. Nodes that fit but are in no gang are refused.
pub(super) fn gangs<'p, 'a>(
    need: &Need,
    places: &'p [Place<'a>],
    refused: &mut BTreeMap<String, Vec<Reason>>,
) -> (Vec<Vec<&'p Place<'a>>>, bool) {
    let size = need.nodes as usize;
    if size == 1 {
        return (places.iter().map(|place| vec![place]).collect(), false);
    }
    let mut pools: Pools<'_> = BTreeMap::new();
    for (at, place) in places.iter().enumerate() {
        for fabric in &place.facts.node.fabrics {
            pools.entry((place.class, fabric)).or_default().push(at);
        }
    }
    refuse_lonely(places, &pools, size, refused);
    pools.retain(|_, members| members.len() >= size);
    let mut found: BTreeSet<Vec<usize>> = BTreeSet::new();
    let mut bounded = false;
    let mut left = pools.len();
    for members in pools.values() {
        // Each pool gets its part of what is left, so that one large fabric does not hide the others.
        let share = (GANGS_MAX - found.len()).div_ceil(left);
        left -= 1;
        if combinations_at_most(members.len(), size, share) {
            all(members, size, &mut found);
        } else {
            bounded = true;
            some(places, members, size, share, &mut found);
        }
    }
    let gangs = found
        .into_iter()
        .map(|gang| gang.into_iter().map(|at| &places[at]).collect())
        .collect();
    (gangs, bounded)
}

/// Nodes that fit by themselves, but whose fabrics have too few others.
fn refuse_lonely(
    places: &[Place<'_>],
    pools: &Pools<'_>,
    size: usize,
    refused: &mut BTreeMap<String, Vec<Reason>>,
) {
    for (at, place) in places.iter().enumerate() {
        let most = pools
            .iter()
            .filter(|(_, members)| members.contains(&at))
            .max_by_key(|(_, members)| members.len());
        let Some(((_, fabric), members)) = most.filter(|(_, members)| members.len() < size) else {
            continue;
        };
        let fit = members.len();
        let verb = if fit == 1 { "fits" } else { "fit" };
        let reason = Reason::new(
            code::FABRIC,
            format!(
                "{} of fabric {fabric} {verb}, {size} are needed",
                counted(fit, "node")
            ),
            format!("{} of {fabric} {verb}", counted(fit, "node")),
            format!("{} of {fabric} that fit", counted(size - fit, "more node")),
        );
        refused.insert(
            place.facts.id.to_owned(),
            vec![reason.with(fit as f64, size as f64, "nodes")],
        );
    }
}

/// Whether `size` can be chosen out of `members` in at most `most` ways.
fn combinations_at_most(members: usize, size: usize, most: usize) -> bool {
    let size = size.min(members - size);
    let mut ways: u128 = 1;
    for chosen in 0..size {
        // Exact at each step: the product of so many neighbours is divisible.
        ways = ways * (members - chosen) as u128 / (chosen + 1) as u128;
        if ways > most as u128 {
            return false;
        }
    }
    true
}

/// Every combination, in order.
fn all(members: &[usize], size: usize, found: &mut BTreeSet<Vec<usize>>) {
    let mut picks: Vec<usize> = (0..size).collect();
    loop {
        found.insert(picks.iter().map(|pick| members[*pick]).collect());
        let movable = (0..size)
            .rev()
            .find(|slot| picks[*slot] < members.len() - size + slot);
        let Some(slot) = movable else {
            return;
        };
        picks[slot] += 1;
        for after in slot + 1..size {
            picks[after] = picks[after - 1] + 1;
        }
    }
}

/// Neighbours in three orders that matter: the fullest nodes, the same rack, the same zone.
fn some(
    places: &[Place<'_>],
    members: &[usize],
    size: usize,
    share: usize,
    found: &mut BTreeSet<Vec<usize>>,
) {
    let key = |at: &usize| {
        let facts = places[*at].facts;
        let node = facts.node;
        (&node.rack, &node.zone, facts.gpus_free, *at)
    };
    let mut by_use = members.to_vec();
    by_use.sort_by_key(|at| (key(at).2, *at));
    let mut by_rack = members.to_vec();
    by_rack.sort_by_key(|at| key(at));
    let mut by_zone = members.to_vec();
    by_zone.sort_by_key(|at| (key(at).1, key(at).2, *at));
    let end = found.len() + share;
    for step in 0..=members.len() - size {
        for order in [&by_use, &by_rack, &by_zone] {
            if found.len() == end {
                return;
            }
            let mut gang = order[step..step + size].to_vec();
            gang.sort_unstable();
            found.insert(gang);
        }
    }
}
