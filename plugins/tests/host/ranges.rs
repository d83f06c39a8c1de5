//! The table of hooks in the contract, row by row: the range of what each returns, what is clamped, what answers instead
//! of a value that can't be used, and as which kind that counts.
//!
//! Each policy behaves for the example at load and says the value under test for the model, or the node, `odd` only.

use std::fmt::Debug;
use std::sync::Arc;

use llmgw_plugins::ErrorKind::{Budget, Error, Memory, Nan, Nil, Range, Unknown};
use llmgw_plugins::{
    Band, BandSpec, ErrorClass, ErrorKind, Gate, Hook, ModelView, Policies, PolicySet, PoolView,
    Prices, ProfileView, Refusal, ReplicaView, RequestView, RoutingWeights, ShardView, TenantView,
    UsageView,
};

use crate::{Dir, hook};

/// What is returned, what comes of it, and which kinds are counted.
type Case<T> = (&'static str, T, &'static [ErrorKind]);

/// One row of the table.
struct Row {
    hook: Hook,
    file: &'static str,
    /// The function's name and parameters.
    head: &'static str,
    /// What it returns for everything but `odd`.
    good: &'static str,
    /// True in Lua where the odd value is asked for.
    odd: &'static str,
}

impl Row {
    fn open(&self, value: &str) -> Arc<Policies> {
        let body = format!(
            "  if {} then return {value} end\n  return {}",
            self.odd, self.good
        );
        let dir = Dir::with(&[(self.file, &hook(self.head, &body))]);
        dir.open()
            .unwrap_or_else(|error| panic!("{}: {value}: {error}", self.head))
    }

    fn check<T: PartialEq + Debug>(&self, ask: impl Fn(&PolicySet) -> T, cases: Vec<Case<T>>) {
        for (value, expected, kinds) in cases {
            let policies = self.open(value);
            let found = ask(&policies.current());
            let name = self.hook.name();
            assert_eq!(found, expected, "{name} returned {value}");
            let counted: Vec<ErrorKind> = policies
                .error_counts()
                .into_iter()
                .inspect(|count| assert_eq!(count.hook, self.hook, "{name}: {value}"))
                .map(|count| count.kind)
                .collect();
            assert_eq!(counted, kinds, "{name} returned {value}");
        }
    }
}

/// A loop that ends by the budget only, as an expression.
const ENDLESS: &str = "(function() while true do end end)()";

fn request() -> RequestView<'static> {
    RequestView {
        model: "odd",
        ..RequestView::default()
    }
}

fn tenant() -> TenantView<'static> {
    TenantView {
        name: "odd",
        band: "standard",
        best_band: "standard",
        weight: 3.0,
        ..TenantView::default()
    }
}

fn pool(model: &str) -> PoolView<'_> {
    PoolView {
        model,
        ..PoolView::default()
    }
}

#[test]
fn classify_gives_a_band_that_the_tenant_may_use_and_a_time_within_a_day() {
    let row = Row {
        hook: Hook::Classify,
        file: "admission.lua",
        head: "classify(request, tenant)",
        good: "'batch'",
        odd: "request.model == 'odd'",
    };
    let band = |name: &str, ttl_ms| Band {
        name: name.into(),
        ttl_ms,
    };
    let default = || band("standard", None);
    row.check(
        |set| set.classify(&request(), &tenant()),
        vec![
            ("'batch', 5", band("batch", Some(5)), &[]),
            ("'batch', nil, 'more', {}", band("batch", None), &[]),
            ("'interactive', 5", band("standard", Some(5)), &[]),
            ("'batch', 0", band("batch", Some(1)), &[Range]),
            ("'batch', 1e9", band("batch", Some(86_400_000)), &[Range]),
            ("'gold'", default(), &[Unknown]),
            ("nil", default(), &[Nil]),
            ("7", default(), &[Error]),
            ("'batch', {}", default(), &[Error]),
            ("'batch', 0/0", default(), &[Nan]),
            ("('x'):rep(1e9)", default(), &[Memory]),
            (ENDLESS, default(), &[Budget]),
        ],
    );
}

#[test]
fn reject_gives_429_or_503_and_a_second_to_a_minute() {
    let row = Row {
        hook: Hook::Reject,
        file: "admission.lua",
        head: "reject(request, why)",
        good: "503",
        odd: "request.model == 'odd' and why == 'queue_full'",
    };
    let refusal = |status, wait_ms| Refusal { status, wait_ms };
    let native = || refusal(429, None);
    row.check(
        |set| set.reject(&request(), "queue_full"),
        vec![
            ("503, 2000", refusal(503, Some(2000)), &[]),
            ("503", refusal(503, None), &[]),
            ("nil", native(), &[]),
            ("503, 1", refusal(503, Some(1000)), &[Range]),
            ("503, math.huge", refusal(503, Some(60_000)), &[Range]),
            ("200", native(), &[Range]),
            ("'503'", native(), &[Error]),
            ("0/0", native(), &[Nan]),
            ("503, 0/0", native(), &[Nan]),
            (ENDLESS, native(), &[Budget]),
        ],
    );
}

#[test]
fn key_is_a_text_of_at_most_64_bytes() {
    let row = Row {
        hook: Hook::Key,
        file: "fairness.lua",
        head: "key(request, tenant)",
        good: "nil",
        odd: "request.model == 'odd'",
    };
    row.check(
        |set| set.key(&request(), &tenant()),
        vec![
            ("'a'", Some("a".to_owned()), &[]),
            ("''", Some(String::new()), &[]),
            ("nil", None, &[]),
            ("('x'):rep(64)", Some("x".repeat(64)), &[]),
            ("('x'):rep(65)", None, &[Range]),
            ("5", None, &[Error]),
            ("('x'):rep(1e9)", None, &[Memory]),
            (ENDLESS, None, &[Budget]),
        ],
    );
}

#[test]
fn rank_gives_one_of_the_candidates() {
    let row = Row {
        hook: Hook::Rank,
        file: "routing.lua",
        head: "rank(request, replicas, n)",
        good: "nil",
        odd: "request.model == 'odd'",
    };
    let replicas = ["a", "b"].map(|id| ReplicaView {
        id,
        ..ReplicaView::default()
    });
    let chosen = |index, reason: Option<&str>| Some((index, reason.map(str::to_owned)));
    row.check(
        |set| {
            let ranked = set.rank(&request(), &replicas);
            ranked.map(|ranked| (ranked.index, ranked.reason))
        },
        vec![
            ("2, 'why'", chosen(1, Some("why")), &[]),
            ("n, 7", chosen(1, None), &[]),
            ("nil", None, &[]),
            ("0", None, &[Range]),
            ("3", None, &[Range]),
            ("1.5", None, &[Range]),
            ("-math.huge", None, &[Range]),
            ("'a'", None, &[Error]),
            ("0/0", None, &[Nan]),
            (ENDLESS, None, &[Budget]),
        ],
    );
}

#[test]
fn weight_is_a_hundredth_to_a_hundred() {
    let row = Row {
        hook: Hook::Weight,
        file: "fairness.lua",
        head: "weight(tenant, usage)",
        good: "1",
        odd: "tenant.name == 'odd'",
    };
    row.check(
        |set| set.tenant_weight(&tenant(), &UsageView::default()),
        vec![
            ("2.5", 2.5, &[]),
            ("0", 0.01, &[Range]),
            ("-0", 0.01, &[Range]),
            ("math.huge", 100.0, &[Range]),
            ("nil", 3.0, &[Nil]),
            ("'2'", 3.0, &[Error]),
            ("0/0", 3.0, &[Nan]),
            (ENDLESS, 3.0, &[Budget]),
        ],
    );
}

#[test]
fn prices_are_not_negative_and_complete() {
    let row = Row {
        hook: Hook::Prices,
        file: "fairness.lua",
        head: "prices(model)",
        good: "{ input = 1, cached = 1, output = 1 }",
        odd: "model == 'odd'",
    };
    let prices = |input, cached, output| Prices {
        input,
        cached,
        output,
    };
    let native = || prices(1.0, 0.1, 2.0);
    row.check(
        |set| set.prices("odd"),
        vec![
            (
                "{ input = 2, cached = 0, output = 3 }",
                prices(2.0, 0.0, 3.0),
                &[],
            ),
            (
                "{ input = -2, cached = 0, output = 3 }",
                prices(0.0, 0.0, 3.0),
                &[Range],
            ),
            ("{ input = 2, cached = 0 }", native(), &[Nil]),
            ("{ input = 2, cached = 0, output = 0/0 }", native(), &[Nan]),
            (
                "{ input = 2, cached = 0, outptu = 3 }",
                native(),
                &[Unknown],
            ),
            ("{ 1, 2, 3 }", native(), &[Unknown]),
            ("nil", native(), &[Nil]),
            ("5", native(), &[Error]),
            (ENDLESS, native(), &[Budget]),
        ],
    );
}

#[test]
fn weights_are_knobs_within_their_ranges() {
    let row = Row {
        hook: Hook::Weights,
        file: "routing.lua",
        head: "weights(pool)",
        good: "{ kv = 7 }",
        odd: "pool.model == 'odd'",
    };
    let kv = |kv| RoutingWeights {
        kv,
        ..RoutingWeights::default()
    };
    let native = RoutingWeights::default;
    row.check(
        |set| set.routing_weights(&pool("odd")),
        vec![
            ("{ kv = 9 }", kv(9.0), &[]),
            ("{}", native(), &[]),
            ("{ kv = -1 }", kv(0.0), &[Range]),
            ("{ kv = math.huge }", kv(86_400_000.0), &[Range]),
            ("{ kv = '9' }", native(), &[Error]),
            ("{ vk = 9 }", native(), &[Unknown]),
            ("{ kv = 0/0 }", native(), &[Nan]),
            ("nil", native(), &[Nil]),
            ("pool.quue", native(), &[Error]),
            (ENDLESS, native(), &[Budget]),
        ],
    );
}

#[test]
fn the_gate_lets_at_least_one_request_through() {
    let row = Row {
        hook: Hook::Gate,
        file: "admission.lua",
        head: "gate(pool)",
        good: "{}",
        odd: "pool.model == 'odd'",
    };
    let gate = |hold_ms, kv_max, inflight_max| Gate {
        hold_ms,
        kv_max,
        inflight_max,
    };
    let native = || gate(500.0, 0.9, None);
    row.check(
        |set| set.admission_gate(&pool("odd")),
        vec![
            (
                "{ hold_ms = 1, kv_max = 0.5, inflight_max = 3 }",
                gate(1.0, 0.5, Some(3)),
                &[],
            ),
            ("{}", native(), &[]),
            ("{ inflight_max = 0 }", gate(500.0, 0.9, Some(1)), &[Range]),
            ("{ kv_max = 2 }", gate(500.0, 1.0, None), &[Range]),
            ("{ hold = 1 }", native(), &[Unknown]),
            ("{ hold_ms = 0/0 }", native(), &[Nan]),
            ("nil", native(), &[Nil]),
            ("true", native(), &[Error]),
            (ENDLESS, native(), &[Budget]),
        ],
    );
}

#[test]
fn bands_keep_their_names_and_leave_something_to_share_by_priority() {
    let row = Row {
        hook: Hook::Bands,
        file: "admission.lua",
        head: "bands(pool)",
        good: "{ { name = 'a', priority = 1 }, { name = 'b', priority = 0 } }",
        odd: "pool.model == 'odd'",
    };
    let band = |name: &str, priority, floor| BandSpec {
        name: name.into(),
        priority,
        floor,
        max_queue: 5000,
        ttl_ms: 120_000,
        shed: None,
    };
    let at_load = || vec![band("a", 1.0, 0.0), band("b", 0.0, 0.0)];
    // There is no last good value, and the embedded bands have other names: those of the load stay.
    row.check(
        |set| set.admission_bands(&pool("odd")),
        vec![
            (
                "{ { name = 'a', priority = 9, floor = 0.5 }, { name = 'b', priority = 0 } }",
                vec![band("a", 9.0, 0.5), band("b", 0.0, 0.0)],
                &[],
            ),
            (
                "{ { name = 'a', priority = 1, floor = 0.5 }, { name = 'b', priority = 0, floor = 0.5 } }",
                vec![band("a", 1.0, 0.4), band("b", 0.0, 0.4)],
                &[Range],
            ),
            (
                "{ { name = 'a', priority = 1, floor = 0.9 }, { name = 'b', priority = 0 } }",
                vec![band("a", 1.0, 0.5), band("b", 0.0, 0.0)],
                &[Range],
            ),
            ("{ { name = 'a', priority = 1 } }", at_load(), &[Unknown]),
            (
                "{ { name = 'a', priority = 1 }, { name = 'c', priority = 0 } }",
                at_load(),
                &[Unknown],
            ),
            (
                "{ { name = 'a', priority = 1 }, { name = 'a', priority = 0 } }",
                at_load(),
                &[Error],
            ),
            ("{ { name = 'a' }, { name = 'b' } }", at_load(), &[Nil]),
            ("table.create(17, { name = 'a', priority = 1 })", at_load(), &[Range]),
            ("{}", at_load(), &[Range]),
            ("nil", at_load(), &[Nil]),
            ("'a'", at_load(), &[Error]),
            (ENDLESS, at_load(), &[Budget]),
        ],
    );
}

/// An engine whose functions behave but for what is asked about `odd`.
fn engine(functions: &str) -> Arc<Policies> {
    let text = format!(
        "local M = {{ api = 1, name = 'odd', commands = {{ 'serve' }} }}\n{functions}\nreturn M\n"
    );
    let dir = Dir::with(&[("engines/odd.lua", &text)]);
    dir.open()
        .unwrap_or_else(|error| panic!("{functions}: {error}"))
}

fn counted(policies: &Policies) -> Vec<(Hook, ErrorKind)> {
    let counts = policies.error_counts().into_iter();
    counts.map(|count| (count.hook, count.kind)).collect()
}

#[test]
fn classify_error_gives_a_class_or_the_native_one() {
    for (value, expected, kinds) in [
        ("'client_fault'", ErrorClass::ClientFault, &[][..]),
        ("'retry_other'", ErrorClass::RetryOther, &[]),
        ("'fatal'", ErrorClass::Fatal, &[]),
        ("nil", ErrorClass::ClientFault, &[]),
        ("'retry'", ErrorClass::ClientFault, &[Unknown]),
        ("7", ErrorClass::ClientFault, &[Error]),
        (ENDLESS, ErrorClass::ClientFault, &[Budget]),
    ] {
        let policies = engine(&format!(
            "function M.classify_error(status, body)\n  if status == 404 then return {value} end\n  return 'fatal'\nend"
        ));
        let class = policies.current().classify_error("odd", 404, b"{}");
        assert_eq!(class, expected, "{value}");
        let kinds: Vec<_> = kinds
            .iter()
            .map(|kind| (Hook::EngineClassifyError, *kind))
            .collect();
        assert_eq!(counted(&policies), kinds, "{value}");
    }
}

#[test]
fn validate_and_commands_that_fail_refuse_and_say_why() {
    let functions = format!(
        "function M.validate(profile, model)\n  if model.name == 'odd' then return {ENDLESS} end\nend\n\
         function M.commands(shard)\n  if shard.model == 'odd' then return {ENDLESS} end\n  return {{ {{ command = 'serve' }} }}\nend"
    );
    let policies = engine(&functions);
    let set = policies.current();
    let model = ModelView {
        name: "odd",
        ..ModelView::default()
    };
    let complaints = set.validate("odd", &ProfileView::default(), &model);
    assert!(
        complaints.len() == 1 && complaints[0].contains("took longer than 50 ms"),
        "{complaints:?}"
    );
    let shard = ShardView {
        model: "odd",
        ..ShardView::default()
    };
    let fault = set.commands("odd", &shard).expect_err("it never ends");
    assert_eq!(fault.kind, Budget, "{fault}");
    assert!(fault.message.contains("took longer than 50 ms"), "{fault}");
    assert_eq!(
        counted(&policies),
        [
            (Hook::EngineValidate, Budget),
            (Hook::EngineCommands, Budget)
        ]
    );
}
