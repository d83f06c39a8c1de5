//! Which replicas have probably cached the beginning of a prompt: an approximate index of hashed blocks, one per model pool.
//!
//! A prompt is cut at fixed, growing boundaries and each block's hash covers all that precedes it, so the longest
//! common beginning is found by walking the blocks. Only hashes are kept, seeded anew in each process, never text.
//! Entries live in two generations: when the young one is full, it becomes the old one and the former old one is forgotten.
//! A prompt that is used again is written into the young one, for the replica that served it only, so what a replica
//! hasn't seen for long is forgotten although another one still gets it.

use std::hash::{BuildHasher, Hasher};

use foldhash::SharedSeed;
use foldhash::quality::SeedableRandomState;

/// `(block size in bytes, where blocks of this size end)`: fine where system prompts differ, coarse where only long conversations go on.
const BLOCK_TIERS: [(usize, usize); 3] =
    [(256, 2 << 10), (1 << 10, 16 << 10), (4 << 10, 256 << 10)];
/// Blocks of the longest prompt: 8 + 14 + 60. What comes after 256 KiB isn't looked at.
pub const PREFIX_BLOCKS_MAX: usize = 82;
/// Default capacity of an index, in blocks of all its prompts.
pub const PREFIX_INDEX_MAX_BLOCKS: usize = 65_536;
/// Replicas of one pool that an index can tell apart.
pub const PREFIX_REPLICAS_MAX: usize = 64;

/// Size of the block that starts at this offset; `None` past the last one.
fn block_bytes(offset: usize) -> Option<usize> {
    BLOCK_TIERS
        .iter()
        .find(|(_, end)| offset < *end)
        .map(|(size, _)| *size)
}

/// Where each block ends, in bytes from the start of the prompt.
static BLOCK_ENDS: [u32; PREFIX_BLOCKS_MAX] = {
    let mut ends = [0; PREFIX_BLOCKS_MAX];
    let (mut block, mut tier, mut end) = (0, 0, 0);
    while tier < BLOCK_TIERS.len() {
        while end < BLOCK_TIERS[tier].1 {
            end += BLOCK_TIERS[tier].0;
            ends[block] = end as u32;
            block += 1;
        }
        tier += 1;
    }
    assert!(block == PREFIX_BLOCKS_MAX && end == BLOCK_TIERS[2].1);
    ends
};

/// The chained hashes of a prompt's blocks. A last block that isn't full is left out.
#[derive(Debug, Clone)]
pub struct PromptHashes {
    hashes: Vec<u64>,
}

impl PromptHashes {
    /// Hashes the concatenation of the parts; how it was divided makes no difference.
    pub fn of(parts: &[&[u8]]) -> PromptHashes {
        let mut prompt = PromptHashes { hashes: Vec::new() };
        // A block that spans parts is put together here, the others are hashed where they lie.
        let mut spanning = Vec::new();
        let mut offset = 0;
        for (index, part) in parts.iter().enumerate() {
            let is_last = index + 1 == parts.len();
            let mut rest = *part;
            while let Some(size) = block_bytes(offset) {
                let needed = size - spanning.len();
                if rest.len() < needed {
                    if !is_last {
                        spanning.extend_from_slice(rest);
                    }
                    break;
                }
                let (block, after) = rest.split_at(needed);
                if spanning.is_empty() {
                    prompt.push(block);
                } else {
                    spanning.extend_from_slice(block);
                    prompt.push(&spanning);
                    spanning.clear();
                }
                rest = after;
                offset += size;
            }
        }
        prompt
    }

    /// How many whole blocks the prompt has.
    pub fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Whether the prompt is too short to have one.
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    fn push(&mut self, block: &[u8]) {
        let before = self.hashes.last().copied().unwrap_or(0);
        let mut hasher =
            SeedableRandomState::with_seed(before, SharedSeed::global_random()).build_hasher();
        hasher.write(block);
        self.hashes.push(hasher.finish());
    }

    fn as_slice(&self) -> &[u64] {
        &self.hashes
    }
}

/// A replica's place in an index, from [`PrefixIndex::join`] until [`PrefixIndex::forget`]. Afterwards it matches
/// nothing and inserts nothing, whoever has the place then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaSlot {
    /// Which bit of the masks; [`PREFIX_REPLICAS_MAX`] where none was free.
    bit: usize,
    /// How often that bit had been given away before.
    generation: u64,
}

/// Who has a bit of the masks.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    generation: u64,
    taken: bool,
}

/// Sets of replicas (as masks) by block hash.
type Blocks = foldhash::HashMap<u64, u64>;

/// The blocks that the replicas of one pool have served.
#[derive(Debug)]
pub struct PrefixIndex {
    /// Takes the inserts.
    young: Blocks,
    /// Was young before; only read.
    old: Blocks,
    /// Bound on each of them.
    half_blocks: usize,
    places: [Place; PREFIX_REPLICAS_MAX],
}

impl Default for PrefixIndex {
    fn default() -> Self {
        Self::new(PREFIX_INDEX_MAX_BLOCKS)
    }
}

impl PrefixIndex {
    /// An index that never holds more than `capacity` blocks (16 bytes each, and what the table needs).
    pub fn new(capacity: usize) -> PrefixIndex {
        PrefixIndex {
            young: Blocks::default(),
            old: Blocks::default(),
            half_blocks: capacity / 2,
            places: [Place::default(); PREFIX_REPLICAS_MAX],
        }
    }

    /// Gives a new replica a place. Where [`PREFIX_REPLICAS_MAX`] have one already, it gets a slot that never matches.
    pub fn join(&mut self) -> ReplicaSlot {
        let free = self.places.iter().position(|place| !place.taken);
        let Some(bit) = free else {
            return ReplicaSlot {
                bit: PREFIX_REPLICAS_MAX,
                generation: 0,
            };
        };
        self.places[bit].taken = true;
        ReplicaSlot {
            bit,
            generation: self.places[bit].generation,
        }
    }

    /// Forgets all that this replica has cached and takes its place away: it left, or restarted (and joins anew).
    /// Visits every entry.
    pub fn forget(&mut self, slot: ReplicaSlot) {
        let Some(mask) = self.mask(slot) else { return };
        for blocks in [&mut self.young, &mut self.old] {
            blocks.retain(|_, replicas| {
                *replicas &= !mask;
                *replicas != 0
            });
        }
        self.places[slot.bit] = Place {
            generation: slot.generation + 1,
            taken: false,
        };
    }

    /// Notes that this replica now has the prompt in its cache.
    pub fn insert(&mut self, prompt: &PromptHashes, slot: ReplicaSlot) {
        let Some(mask) = self.mask(slot) else { return };
        let blocks = &prompt.as_slice()[..prompt.len().min(self.half_blocks)];
        // Before, not in between: the blocks of one prompt stay in one generation.
        if self.young.len() + blocks.len() > self.half_blocks {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
        }
        for hash in blocks {
            *self.young.entry(*hash).or_insert(0) |= mask;
        }
    }

    /// Writes into `matched[i]` how many bytes of the prompt's beginning `replicas[i]` probably has cached.
    pub fn lookup(&self, prompt: &PromptHashes, replicas: &[ReplicaSlot], matched: &mut [u64]) {
        let wanted = replicas
            .iter()
            .filter_map(|slot| self.mask(*slot))
            .fold(0, |all, mask| all | mask);
        let mut bytes = [0u32; PREFIX_REPLICAS_MAX];
        let (mut matching, mut end) = (wanted, 0);
        for (hash, block_end) in prompt.as_slice().iter().zip(BLOCK_ENDS) {
            let still = matching & self.replicas_with(*hash);
            set_each(&mut bytes, matching & !still, end);
            (matching, end) = (still, block_end);
            if matching == 0 {
                break;
            }
        }
        set_each(&mut bytes, matching, end);
        for (slot, matched) in replicas.iter().zip(matched) {
            *matched = self.mask(*slot).map_or(0, |_| u64::from(bytes[slot.bit]));
        }
    }

    /// Blocks that are held, a block in both generations counted twice.
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn replicas_with(&self, hash: u64) -> u64 {
        let in_blocks = |blocks: &Blocks| blocks.get(&hash).copied().unwrap_or(0);
        in_blocks(&self.young) | in_blocks(&self.old)
    }

    /// The replica's bit, while its place is its own.
    fn mask(&self, slot: ReplicaSlot) -> Option<u64> {
        let place = self.places.get(slot.bit)?;
        (place.taken && place.generation == slot.generation).then_some(1 << slot.bit)
    }
}

/// Sets the element of each bit in the mask.
fn set_each(bytes: &mut [u32; PREFIX_REPLICAS_MAX], mut mask: u64, value: u32) {
    while mask != 0 {
        bytes[mask.trailing_zeros() as usize] = value;
        mask &= mask - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::score::SplitMix;
    use super::{
        BLOCK_ENDS, PREFIX_BLOCKS_MAX, PREFIX_REPLICAS_MAX, PrefixIndex, PromptHashes, ReplicaSlot,
    };

    fn text(bytes: usize, seed: u64) -> Vec<u8> {
        let mut random = SplitMix(seed);
        (0..bytes).map(|_| random.next() as u8).collect()
    }

    fn hashes(text: &[u8]) -> PromptHashes {
        PromptHashes::of(&[text])
    }

    fn matched(index: &PrefixIndex, text: &[u8], replicas: &[ReplicaSlot]) -> Vec<u64> {
        let mut matched = vec![u64::MAX; replicas.len()];
        index.lookup(&hashes(text), replicas, &mut matched);
        matched
    }

    #[test]
    fn blocks_grow_with_the_prompt_and_end_at_256_kib() {
        let cases = [
            (0, 0),
            (255, 0),
            (256, 1),
            (2047, 7),
            (2048, 8),
            (3071, 8),
            (3072, 9),
            (16 << 10, 22),
            ((20 << 10) - 1, 22),
            (20 << 10, 23),
            (256 << 10, 82),
            (300 << 10, 82),
        ];
        for (bytes, blocks) in cases {
            let prompt = hashes(&vec![b'a'; bytes]);
            assert_eq!(prompt.len(), blocks, "{bytes} bytes");
            assert_eq!(prompt.is_empty(), blocks == 0);
        }
        assert_eq!(BLOCK_ENDS[7..10], [2048, 3072, 4096]);
        assert_eq!(BLOCK_ENDS[21..23], [16 << 10, 20 << 10]);
        assert_eq!(BLOCK_ENDS[PREFIX_BLOCKS_MAX - 1], 256 << 10);
    }

    #[test]
    fn how_a_prompt_is_divided_into_parts_makes_no_difference() {
        let mut random = SplitMix(7);
        for round in 0..200 {
            let text = text(random.below(40_000), round);
            let mut parts = Vec::new();
            let mut rest = text.as_slice();
            while !rest.is_empty() {
                let most = [1, 300, 5_000, 40_000][random.below(4)];
                let (part, after) = rest.split_at(
                    random
                        .below(most)
                        .clamp(usize::from(rest.len() == 1), rest.len()),
                );
                parts.push(part);
                rest = after;
            }
            assert_eq!(
                PromptHashes::of(&parts).as_slice(),
                hashes(&text).as_slice(),
                "round {round}"
            );
        }
    }

    #[test]
    fn a_block_with_the_same_text_after_another_beginning_is_another_block() {
        let (a, b, same) = (text(256, 1), text(256, 2), text(256, 3));
        let after_a = PromptHashes::of(&[&a, &same]);
        let after_b = PromptHashes::of(&[&b, &same]);
        assert_ne!(after_a.as_slice()[1], after_b.as_slice()[1]);
    }

    #[test]
    fn each_replica_matches_as_far_as_it_has_seen_the_prompt() {
        let mut index = PrefixIndex::default();
        let slots = [index.join(), index.join(), index.join()];
        let prompt = text(10_000, 1);
        index.insert(&hashes(&prompt), slots[0]);
        index.insert(&hashes(&prompt[..1_000]), slots[1]);
        assert_eq!(matched(&index, &prompt, &slots), [9 << 10, 768, 0]);
        assert_eq!(matched(&index, &prompt[..5_000], &slots), [4 << 10, 768, 0]);

        let mut forked = prompt.clone();
        forked[3_000] ^= 1;
        assert_eq!(
            matched(&index, &forked, &slots),
            [2048, 768, 0],
            "the text differs from byte 3000 on"
        );
        assert_eq!(matched(&index, &text(10_000, 2), &slots), [0, 0, 0]);
        assert_eq!(
            matched(&index, b"hello", &slots),
            [0, 0, 0],
            "too short for a block"
        );
    }

    #[test]
    fn a_place_that_is_given_to_another_replica_inherits_nothing() {
        let mut index = PrefixIndex::default();
        let prompt = text(5_000, 1);
        let first = index.join();
        let other = index.join();
        index.insert(&hashes(&prompt), first);
        index.insert(&hashes(&prompt[..1_000]), other);
        index.forget(first);
        let second = index.join();
        assert_eq!(second.bit, first.bit, "the bit is recycled");
        assert_eq!(
            matched(&index, &prompt, &[first, second, other]),
            [0, 0, 768]
        );
        assert_eq!(index.len(), 3, "entries of nobody are gone");

        index.insert(&hashes(&prompt), first);
        assert_eq!(
            matched(&index, &prompt, &[first, second]),
            [0, 0],
            "a late insert of the one that left is ignored"
        );
        index.insert(&hashes(&prompt), second);
        index.forget(first);
        assert_eq!(
            matched(&index, &prompt, &[first, second]),
            [0, 4 << 10],
            "so is a second farewell"
        );
    }

    #[test]
    fn more_replicas_than_places_are_served_without_affinity() {
        let mut index = PrefixIndex::default();
        let slots: Vec<_> = (0..PREFIX_REPLICAS_MAX + 2).map(|_| index.join()).collect();
        let prompt = text(1_000, 1);
        for slot in &slots {
            index.insert(&hashes(&prompt), *slot);
        }
        let found = matched(&index, &prompt, &slots);
        assert!(
            found[..PREFIX_REPLICAS_MAX]
                .iter()
                .all(|bytes| *bytes == 768)
        );
        assert_eq!(found[PREFIX_REPLICAS_MAX..], [0, 0]);
        index.forget(slots[PREFIX_REPLICAS_MAX]);
        index.forget(slots[63]);
        assert_eq!(index.join().bit, 63);
    }

    #[test]
    fn what_one_replica_still_gets_does_not_keep_anothers_entries_alive() {
        let mut index = PrefixIndex::new(2_000);
        let slots = [index.join(), index.join()];
        let prompt = text(5_000, 0);
        index.insert(&hashes(&prompt), slots[1]);
        for seed in 1..300 {
            index.insert(&hashes(&prompt), slots[0]);
            index.insert(&hashes(&text(5_000, seed)), slots[1]);
        }
        assert_eq!(matched(&index, &prompt, &slots), [4 << 10, 0]);
    }

    #[test]
    fn the_index_never_exceeds_its_capacity_and_never_finds_more_than_the_prompt() {
        let mut random = SplitMix(11);
        for capacity in [0, 1, 2, 10, 100, 163, 164, 1_000] {
            let mut index = PrefixIndex::new(capacity);
            let mut slots: Vec<_> = (0..5).map(|_| index.join()).collect();
            for _ in 0..400 {
                let prompt = text(random.below(30_000), random.next() % 20);
                let which = random.below(5);
                match random.below(10) {
                    0 => {
                        index.forget(slots[which]);
                        slots[which] = index.join();
                    }
                    1..6 => index.insert(&hashes(&prompt), slots[which]),
                    _ => assert!(
                        matched(&index, &prompt, &slots)
                            .iter()
                            .all(|bytes| *bytes <= prompt.len() as u64)
                    ),
                }
                assert!(index.len() <= capacity, "{} of {capacity}", index.len());
            }
        }
    }
}
