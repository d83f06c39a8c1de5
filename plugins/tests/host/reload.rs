//! Loading, swapping and keeping the last good set.

use std::sync::Arc;
use std::time::Instant;

use llmgw_plugins::test::{Answer, Fleet, GATE_MAX, Kernels};
use llmgw_plugins::{
    Hook, Policies, PolicyOptions, PolicySet, PoolView, RoutingWeights, Source, init_dir,
};

use crate::{Dir, hook};

fn pool() -> PoolView<'static> {
    PoolView {
        model: "m",
        now_ms: 1.8e12,
        ..PoolView::default()
    }
}

#[test]
fn an_unknown_knob_is_refused_with_file_line_and_suggestion() {
    let text = "-- knobs\nlocal M = { api = 1 }\nfunction M.weights(pool)\n  return {\n    affinity_penalty = 3,\n  }\nend\nreturn M\n";
    let dir = Dir::with(&[("routing.lua", text)]);
    assert_eq!(
        dir.refusal(),
        "policies/routing.lua:5: unknown knob 'affinity_penalty' (did you mean 'affinity_penalty_ms'?)"
    );
    assert_eq!(
        dir.load().unwrap_err().text.as_deref(),
        Some("affinity_penalty = 3,")
    );
}

#[test]
fn a_mistake_is_refused_with_its_place_and_reason() {
    let cases: &[(&str, &str, &str)] = &[
        (
            "routing.lua",
            "local M = { api = 1 }\nfunction M.weights(pool\n",
            "policies/routing.lua:3: Expected ')' (to close '(' at line 2), got <eof>",
        ),
        (
            "routing.lua",
            "return 7",
            "policies/routing.lua: must return a table with `api = 1`, it returned a number",
        ),
        (
            "routing.lua",
            "return function() end",
            "policies/routing.lua: must return a table with `api = 1`, it returned a function",
        ),
        (
            "routing.lua",
            "local x = 1",
            "policies/routing.lua: must return a table with `api = 1`, it returned a nil",
        ),
        (
            "routing.lua",
            "return { weights = function() end }",
            "policies/routing.lua: the returned table needs `api = 1`",
        ),
        (
            "routing.lua",
            "return {\n  api = 2 }",
            "policies/routing.lua:2: `api` is 2, this llmgw knows 1",
        ),
        (
            "routing.lua",
            "return { api = 1,\n  weight = function() end }",
            "policies/routing.lua:2: unknown hook 'weight' (did you mean 'weights'?)",
        ),
        (
            "routing.lua",
            "return { api = 1,\n  weights = 5 }",
            "policies/routing.lua:2: hook 'weights' is a number, a function is needed",
        ),
        (
            "routing.lua",
            "return { api = 1, weights = function(pool)\n  return { kv = pool.quue } end }",
            "policies/routing.lua:2: no field 'quue' (did you mean 'queued'?)",
        ),
        (
            "routing.lua",
            "return { api = 1, weights = function(pool)\n  return { kv = -1 } end }",
            "policies/routing.lua:2: knob 'kv' is -1, its range is 0 to 86400000",
        ),
        (
            "routing.lua",
            "return { api = 1, weights = function(pool)\n  return { kv = 0/0 } end }",
            "policies/routing.lua:2: knob 'kv' is NaN",
        ),
        (
            "routing.lua",
            "x = 1\nreturn { api = 1 }",
            "policies/routing.lua:1: attempt to modify a readonly table",
        ),
        (
            "rooting.lua",
            "return { api = 1 }",
            "policies/rooting.lua: unknown policy file (did you mean 'routing.lua'?); shared code belongs into lib/, engines into engines/",
        ),
        (
            "engines/trtllm.lua",
            "return { api = 1, name = 'trtllm',\n  metrics = { runing = { 'x' } } }",
            "policies/engines/trtllm.lua:2: unknown key 'metrics.runing' (did you mean 'running'?)",
        ),
        (
            "engines/trtllm.lua",
            "return { api = 1,\n  name = 'vllm' }",
            "policies/engines/trtllm.lua:2: `name` must be 'trtllm', as the file is called",
        ),
        (
            "admission.lua",
            &hook("classify(request, tenant)", "  return 'standrd'"),
            "policies/admission.lua:3: unknown band 'standrd' (did you mean 'standard'?)",
        ),
        (
            "admission.lua",
            &hook(
                "bands(pool)",
                "  return { { name = 'a', priority = 1, floor = 0.5 }, { name = 'b', priority = 0, floor = 0.5 } }",
            ),
            "policies/admission.lua:2: the floors of all bands sum up to 1, at most 0.8 is possible",
        ),
    ];
    for (key, text, expected) in cases {
        assert_eq!(
            &Dir::with(&[(key, text)]).refusal(),
            expected,
            "{key}: {text}"
        );
    }
}

#[test]
fn an_edit_is_swapped_in_whole_and_a_broken_one_leaves_the_last_good_set() {
    let dir = Dir::with(&[("routing.lua", &hook("weights(pool)", "  return { kv = 1 }"))]);
    let policies = dir.open().expect("the first set loads");
    let first = policies.current();
    assert_eq!(
        (first.generation(), first.routing_weights(&pool()).kv),
        (1, 1.0)
    );

    assert_eq!(policies.reload().expect("nothing changed").generation(), 1);
    dir.write("routing.lua", hook("weights(pool)", "  return { kv = 2 }"));
    assert_eq!(policies.reload().expect("the edit loads").generation(), 2);
    assert_eq!(policies.current().routing_weights(&pool()).kv, 2.0);
    assert_eq!(
        first.routing_weights(&pool()).kv,
        1.0,
        "a pinned generation goes on as it was"
    );

    dir.write("routing.lua", "return {");
    let error = policies.reload().expect_err("the edit is broken");
    assert_eq!(policies.current().generation(), 2);
    let status = policies.status();
    assert_eq!(status.last_error, Some(error));
    assert_eq!(
        status.last_error.and_then(|error| error.text).as_deref(),
        Some("return {")
    );

    dir.write("routing.lua", hook("weights(pool)", "  return { kv = 2 }"));
    assert_eq!(
        policies
            .reload()
            .expect("the mistake is taken back")
            .generation(),
        2
    );
    assert_eq!(policies.status().last_error, None);
}

#[test]
fn a_missing_file_is_the_built_in_one_and_an_unchanged_one_costs_nothing() {
    let dir = Dir::new();
    let set = dir.load().expect("an empty directory is fine");
    assert_eq!(set.engine_names(), ["llamacpp", "openai", "sglang", "vllm"]);
    assert!(!set.defines(Hook::Weights));
    assert_eq!(set.routing_weights(&pool()), RoutingWeights::default());

    let written = init_dir(&dir.0).expect("the built-in files can be written out");
    assert_eq!(
        written.len(),
        8 + 7 + 3,
        "policies, tests, and what editors need"
    );
    assert_eq!(
        init_dir(&dir.0).expect("a second time"),
        Vec::<std::path::PathBuf>::new()
    );
    let set = dir.load().expect("the written files load");
    assert!(!set.defines(Hook::Weights) && !set.defines(Hook::Classify));
    dir.write("routing.lua", hook("weights(pool)", "  return {}"));
    assert!(dir.load().expect("the edit loads").defines(Hook::Weights));
}

#[test]
fn a_new_engine_is_a_new_file() {
    let text =
        "return { api = 1, name = 'tgi', metrics = { path = '/stats', running = 'tgi_running' } }";
    let set = Dir::with(&[("engines/tgi.lua", text)])
        .load()
        .expect("the engine loads");
    let plugin = set.engine("tgi").expect("the engine is known");
    assert_eq!(
        plugin.metrics.as_ref().map(|names| names.path.as_str()),
        Some("/stats")
    );
    assert_eq!(plugin.readiness.health.as_deref(), Some("/health"));
    assert!(set.engine("vllm").is_some());
}

#[test]
fn the_last_good_set_survives_a_restart_and_says_that_it_is_in_use() {
    let (dir, state) = (
        Dir::with(&[("routing.lua", &hook("weights(pool)", "  return { kv = 7 }"))]),
        Dir::new(),
    );
    let options = PolicyOptions {
        dir: Some(dir.0.clone()),
        state: Some(state.0.clone()),
    };
    Policies::open(options.clone()).expect("the set loads");
    dir.write("routing.lua", "return {");
    let policies = Policies::open(options.clone()).expect("the last good set is used");
    assert!(matches!(policies.status().source, Source::LastGood(_)));
    assert!(
        policies
            .status()
            .last_error
            .is_some_and(|error| error.line == Some(1))
    );
    assert_eq!(policies.current().routing_weights(&pool()).kv, 7.0);

    dir.write("routing.lua", hook("weights(pool)", "  return { kv = 7 }"));
    policies.reload().expect("the directory is whole again");
    assert!(matches!(policies.status().source, Source::Directory(_)));

    std::fs::remove_dir_all(&dir.0).expect("the directory can be removed");
    assert!(Policies::open(options).is_ok(), "without a directory too");
    let nothing_kept = PolicyOptions {
        dir: Some(dir.0.clone()),
        state: None,
    };
    assert!(Policies::open(nothing_kept).is_err());
}

#[test]
fn a_kept_set_that_is_damaged_is_not_started_with() {
    let good = hook("weights(pool)", "  return { kv = 7 }");
    let (dir, state) = (Dir::with(&[("routing.lua", &good)]), Dir::new());
    let options = PolicyOptions {
        dir: Some(dir.0.clone()),
        state: Some(state.0.clone()),
    };
    Policies::open(options.clone()).expect("the set loads");
    let kept = state.path("policies.last-good.json");
    let text = std::fs::read_to_string(&kept).expect("it was kept");
    dir.write("routing.lua", "return {");
    Policies::open(options.clone()).expect("what was kept is whole");
    for (what, damaged) in [
        ("nothing in it", String::new()),
        ("a half", text[..text.len() / 2].to_owned()),
        (
            "of another version",
            text.replace("policies/1", "policies/2"),
        ),
        ("a set that doesn't load", text.replace("kv = 7", "vk = 7")),
    ] {
        assert_ne!(damaged, text, "{what}");
        std::fs::write(&kept, damaged).expect("write");
        let error = Policies::open(options.clone()).expect_err(what);
        assert_eq!(
            error.line,
            Some(1),
            "{what}: the directory's mistake: {error}"
        );
    }
}

#[test]
fn a_mistake_far_down_a_long_path_still_has_its_line() {
    let dir = Dir::new();
    let deep = dir.path(&format!("{}/{}", "a".repeat(150), "b".repeat(150)));
    std::fs::create_dir_all(&deep).expect("folders can be made");
    std::fs::write(deep.join("routing.lua"), "local x = nil\nreturn x.y").expect("write");
    let options = PolicyOptions {
        dir: Some(deep),
        state: None,
    };
    let error = Policies::open(options).expect_err("it is broken");
    assert_eq!(
        error.to_string(),
        "routing.lua:2: attempt to index nil with 'y'"
    );
}

#[test]
fn what_is_in_force_can_be_asked_for_while_a_set_is_loaded() {
    let dir = Dir::with(&[("routing.lua", "return { api = 1 }")]);
    let policies = dir.open().expect("it loads");
    dir.write("routing.lua", "local t = {}\nwhile true do t.x = 1 end");
    let slow = std::sync::Arc::clone(&policies);
    let reload = std::thread::spawn(move || slow.reload().map(|set| set.generation()));
    while !reload.is_finished() {
        assert_eq!(policies.status().generation, 1);
    }
    assert!(reload.join().expect("it ends").is_err());
    assert_eq!(
        policies.status().last_error.and_then(|error| error.line),
        Some(2)
    );
}

/// No test of this directory asks for a fleet.
struct NoKernels;

impl Kernels for NoKernels {
    fn fleet_names(&self) -> Vec<String> {
        Vec::new()
    }

    fn fleet_text(&self, _: &str) -> Option<String> {
        None
    }

    fn open(&self, _: &str) -> Result<Box<dyn Fleet>, String> {
        Err("there is no kernel".to_owned())
    }

    fn refusal_codes(&self) -> Vec<&'static str> {
        Vec::new()
    }

    fn simulate(&self, _: &PolicySet, _: &serde_json::Value) -> Result<Answer, String> {
        Err("there is no kernel".to_owned())
    }
}

#[test]
fn tests_that_do_not_end_keep_a_set_out_after_the_time_that_they_have_together() {
    let dir = Dir::with(&[("lib/x.lua", "return 1")]);
    let options = PolicyOptions {
        dir: Some(dir.0.clone()),
        state: None,
    };
    let policies = Policies::open_tested(options, Arc::new(NoKernels)).expect("it loads");
    let cases = "local function endless()\n  while true do pcall(function() while true do end end) end\nend\n\
                 for n = 1, 100 do llmgw.test.case('endless ' .. n, endless) end\n";
    dir.write("lib/x.lua", "return 2");
    dir.write("routing_test.lua", cases);
    let start = Instant::now();
    let error = policies.reload().expect_err("its tests don't end");
    // Alone it is 5 s; one case after the other, each with its own time, would be 200 s.
    assert!(start.elapsed() < 10 * GATE_MAX, "{:?}", start.elapsed());
    assert!(
        error
            .reason
            .starts_with("test `endless 1` failed: took longer than 2 s"),
        "{error}"
    );
    assert_eq!(policies.current().generation(), 1);
    assert_eq!(policies.status().last_error, Some(error));
}
