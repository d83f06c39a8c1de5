//! Random numbers for jitter, ties and request ids, and the system's own for secrets.

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use llmgw_proto::hex::hex;

/// Bytes of a secret.
const SECRET_BYTES: usize = 32;

/// Something that nobody can guess, in hex. `None` where the system has no random bytes.
pub fn secret() -> Option<String> {
    bytes::<SECRET_BYTES>().map(|random| hex(&random))
}

/// Bytes that nobody can guess. `None` where the system has none.
pub fn bytes<const N: usize>() -> Option<[u8; N]> {
    let mut random = [0; N];
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    provider.secure_random.fill(&mut random).ok()?;
    Some(random)
}

/// A random number in 0..1, for jitter.
pub fn unit() -> f64 {
    (next() >> 11) as f64 / (1u64 << 53) as f64
}

/// A random number: splitmix64 over a counter with a seed of its own in each process.
pub fn next() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let seed = *SEED.get_or_init(|| RandomState::new().hash_one(std::process::id()));
    let step = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut mixed = seed.wrapping_add(step.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
