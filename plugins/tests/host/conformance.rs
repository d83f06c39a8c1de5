//! The native defaults equal what the shipped files write out: random cases, from a seed, against the files with their
//! hooks switched on.

use llmgw_plugins::{
    PolicySet, Prices, RANK_CANDIDATES_MAX, ReplicaView, RequestView, RoutingWeights, TenantView,
    UsageView, init_dir,
};

use crate::Dir;

/// Cases for each hook; `LLMGW_CONFORMANCE_CASES` asks for more.
const CASES: u64 = 100_000;

fn cases() -> u64 {
    std::env::var("LLMGW_CONFORMANCE_CASES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(CASES)
}

/// The shipped files with every hook that they write out switched on.
fn shipped() -> std::sync::Arc<PolicySet> {
    let dir = Dir::new();
    init_dir(&dir.0).expect("the shipped files can be written out");
    for key in ["admission.lua", "fairness.lua", "routing.lua"] {
        let text = std::fs::read_to_string(dir.path(key)).expect("it was written");
        let enabled: String = text
            .lines()
            .map(|line| {
                line.strip_prefix("-- M.")
                    .map_or(format!("{line}\n"), |hook| format!("M.{hook}\n"))
            })
            .collect();
        assert_ne!(text, enabled, "{key} has a hook that is switched off");
        dir.write(key, enabled);
    }
    dir.load().expect("the shipped files load")
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn maybe(&mut self, n: u64) -> Option<f64> {
        (self.below(4) != 0).then(|| self.below(n) as f64)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

#[test]
fn classify_in_lua_equals_the_native_rule() {
    let (lua, native) = (shipped(), PolicySet::built_in());
    let bands = ["interactive", "standard", "batch"];
    let hints = [
        None,
        Some("interactive"),
        Some("standard"),
        Some("batch"),
        Some("gold"),
        Some(""),
    ];
    let mut random = Random(1);
    for case in 0..cases() {
        let request = RequestView {
            model: "m",
            band_hint: random.pick(&hints),
            input_tokens: random.below(1000),
            ..RequestView::default()
        };
        // A band that a reload removed is among them.
        let tenant = TenantView {
            name: "t",
            band: random.pick(&["interactive", "standard", "batch"]),
            best_band: random.pick(&["interactive", "standard", "batch", "gone"]),
            weight: 1.0,
            ..TenantView::default()
        };
        let (ours, theirs) = (
            native.classify(&request, &tenant),
            lua.classify(&request, &tenant),
        );
        assert_eq!(ours, theirs, "case {case}: {request:?} {tenant:?}");
        assert!(bands.contains(&&*ours.name));
    }
}

#[test]
fn reject_and_key_in_lua_equal_the_native_rules() {
    let (lua, native) = (shipped(), PolicySet::built_in());
    let whys = [
        "queue_full",
        "tenant_limit",
        "queue_timeout",
        "no_replica",
        "shutting_down",
        "",
    ];
    let mut random = Random(2);
    for _ in 0..cases() {
        let request = RequestView {
            model: "m",
            input_tokens: random.below(1000),
            ..RequestView::default()
        };
        let why = random.pick(&whys);
        assert_eq!(
            native.reject(&request, why),
            lua.reject(&request, why),
            "{why}"
        );
        let tenant = TenantView {
            name: "t",
            ..TenantView::default()
        };
        assert_eq!(native.key(&request, &tenant), lua.key(&request, &tenant));
    }
}

#[test]
fn tick_hooks_in_lua_equal_the_native_values() {
    let (lua, native) = (shipped(), PolicySet::built_in());
    let mut random = Random(3);
    for _ in 0..cases() / 10 {
        let pool = llmgw_plugins::PoolView {
            model: "m",
            now_ms: random.below(1 << 40) as f64,
            queued: random.below(99),
            ..Default::default()
        };
        assert_eq!(lua.routing_weights(&pool), RoutingWeights::default());
        assert_eq!(native.routing_weights(&pool), RoutingWeights::default());
        assert_eq!(lua.admission_bands(&pool), native.admission_bands(&pool));
        assert_eq!(lua.admission_gate(&pool), native.admission_gate(&pool));
        assert_eq!(
            lua.prices("m"),
            Prices {
                input: 1.0,
                cached: 0.1,
                output: 2.0
            }
        );
        assert_eq!(native.prices("m"), lua.prices("m"));
        let tenant = TenantView {
            name: "t",
            weight: 0.5 + random.below(20) as f64,
            ..TenantView::default()
        };
        assert_eq!(
            native.tenant_weight(&tenant, &UsageView::default()),
            lua.tenant_weight(&tenant, &UsageView::default())
        );
    }
    assert_eq!(native.admission_bands(&Default::default()).len(), 3);
}

#[test]
fn rank_in_lua_equals_the_formula() {
    let lua = shipped();
    let ids: Vec<String> = (0..RANK_CANDIDATES_MAX).map(|n| format!("r{n}")).collect();
    let mut random = Random(4);
    for case in 0..cases() {
        let request = RequestView {
            model: "m",
            input_tokens: random.below(4000),
            ..RequestView::default()
        };
        let count = 1 + random.below(ids.len() as u64) as usize;
        let replicas: Vec<ReplicaView<'_>> = ids[..count]
            .iter()
            .map(|id| ReplicaView {
                id,
                prefill_tokens: random.below(20_000),
                ms_per_prefill_token: random.maybe(3),
                kv: random.maybe(2),
                errors_1m: random.below(3) as f64,
                metrics_age_ms: random.maybe(5000),
                prefix_tokens: random.pick(&[0, 0, 500, 1000, 3000]),
                ..ReplicaView::default()
            })
            .collect();
        let ranked = lua.rank(&request, &replicas).expect("it chooses");
        assert_eq!(
            ranked.index,
            formula(&request, &replicas),
            "case {case}: {request:?} {replicas:?}"
        );
    }
}

/// The scorer of `policies.md`, with `decode` 0.
fn formula(request: &RequestView<'_>, replicas: &[ReplicaView<'_>]) -> usize {
    let knobs = RoutingWeights::default();
    let score = |replica: &ReplicaView<'_>| {
        let todo = request
            .input_tokens
            .saturating_sub(replica.prefix_tokens)
            .max(1);
        let stale = replica
            .metrics_age_ms
            .is_some_and(|age| age > knobs.stale_ms);
        knobs.prefill
            * (replica.prefill_tokens + todo) as f64
            * replica.ms_per_prefill_token.unwrap_or(1.0)
            + knobs.kv * replica.kv.unwrap_or(0.0)
            + knobs.error * replica.errors_1m
            + if stale { knobs.stale_penalty_ms } else { 0.0 }
    };
    let least = |among: &mut dyn Iterator<Item = usize>| {
        among
            .min_by(|a, b| score(&replicas[*a]).total_cmp(&score(&replicas[*b])))
            .expect("not empty")
    };
    let best = least(&mut (0..replicas.len()));
    let longest = replicas
        .iter()
        .map(|replica| replica.prefix_tokens)
        .max()
        .unwrap_or(0);
    let near = least(&mut (0..replicas.len()).filter(|at| replicas[*at].prefix_tokens == longest));
    let holds = longest > 0
        && longest as f64 >= knobs.affinity_min * request.input_tokens as f64
        && score(&replicas[near]) - score(&replicas[best]) <= knobs.affinity_penalty_ms;
    if holds { near } else { best }
}
