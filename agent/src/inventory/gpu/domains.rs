//! NVLink domains: the connected components of what NVLink joins. Never "all GPUs of the node".

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::gpu::NvlinkDomain;

use super::facts::{DriverFacts, reading};

/// The domains, numbered in the order of their first GPUs. A GPU that nothing joins is in none.
pub fn domains(facts: &DriverFacts) -> Reading<Vec<NvlinkDomain>> {
    reading(&facts.joined).map(|joined| {
        let groups = components(facts.gpus.len(), &joined);
        let named = groups.into_iter().map(|group| {
            group
                .into_iter()
                .filter_map(|at| facts.gpus[at].uuid.clone().ok())
                .collect::<Vec<_>>()
        });
        (0..)
            .zip(named.filter(|gpus| gpus.len() > 1))
            .map(|(number, gpus)| NvlinkDomain { number, gpus })
            .collect()
    })
}

/// The groups of two or more of `0..count`, each ascending, in the order of their first members. Pairs beyond are ignored.
fn components(count: usize, pairs: &[(usize, usize)]) -> Vec<Vec<usize>> {
    // Each one's group is called after its smallest member.
    let mut group: Vec<usize> = (0..count).collect();
    for &(first, second) in pairs {
        if first < count && second < count && group[first] != group[second] {
            let (to, from) = (
                group[first].min(group[second]),
                group[first].max(group[second]),
            );
            for name in &mut group {
                if *name == from {
                    *name = to;
                }
            }
        }
    }
    (0..count)
        .map(|name| (0..count).filter(|at| group[*at] == name).collect())
        .filter(|members: &Vec<usize>| members.len() > 1)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::components;

    #[test]
    fn groups_are_what_is_joined_and_nothing_more() {
        for (count, pairs, groups) in [
            (0, vec![], vec![]),
            (4, vec![], vec![]),
            (4, vec![(0, 1), (2, 3)], vec![vec![0, 1], vec![2, 3]]),
            (4, vec![(3, 2), (1, 3)], vec![vec![1, 2, 3]]),
            (4, vec![(0, 3), (1, 2), (3, 1)], vec![vec![0, 1, 2, 3]]),
            (2, vec![(0, 0), (0, 7), (9, 9)], vec![]),
        ] {
            assert_eq!(components(count, &pairs), groups, "{pairs:?}");
        }
    }
}
