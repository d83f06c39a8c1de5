//! Scripts that mean harm, or went wrong as if they did. Each must end in bounded time with a known fallback, and
//! leave the host able to answer the next call.

use std::time::{Duration, Instant};

use llmgw_plugins::{
    BandQueue, ErrorKind, Hook, Policies, PoolView, RequestView, TRIP_OVERRUNS, TenantView,
};

use crate::{Dir, hook};

/// Bounds the time of one hostile call, on a machine that stalls; idle, the slowest takes some 30 ms.
const CALL_MAX: Duration = Duration::from_secs(60);

fn tenant() -> TenantView<'static> {
    TenantView {
        name: "t",
        band: "standard",
        best_band: "interactive",
        weight: 1.0,
        ..TenantView::default()
    }
}

fn request(model: &str) -> RequestView<'_> {
    RequestView {
        model,
        path: "/v1/chat/completions",
        input_tokens: 100,
        ..RequestView::default()
    }
}

/// `classify` that behaves for the example at load and for the model "good".
fn evil(body: &str) -> String {
    let guard = "  if request.model ~= 'evil' then return 'batch' end";
    hook("classify(request, tenant)", &format!("{guard}\n{body}"))
}

fn kinds(policies: &Policies, hook: Hook) -> Vec<ErrorKind> {
    policies
        .error_counts()
        .into_iter()
        .filter(|count| count.hook == hook)
        .map(|count| count.kind)
        .collect()
}

const ENDLESS: &[(&str, &str, &[ErrorKind])] = &[
    ("endless loop", "while true do end", &[ErrorKind::Budget]),
    (
        "counted loop",
        "for i = 1, 1e15 do end",
        &[ErrorKind::Budget],
    ),
    (
        "loop inside pcall",
        "while true do pcall(function() while true do end end) end",
        &[ErrorKind::Budget],
    ),
    (
        "pcall that swallows the budget error",
        "pcall(function() while true do end end) return 'batch'",
        &[ErrorKind::Budget],
    ),
    (
        "pcall that swallows it deep inside",
        "local function f() while true do pcall(f) end end f()",
        &[ErrorKind::Budget],
    ),
    (
        "a returned error object",
        "local ok, e = pcall(function() while true do end end) error(e)",
        &[ErrorKind::Budget],
    ),
    (
        "recursion",
        "local function f() return 1 + f() end return f()",
        &[ErrorKind::Error, ErrorKind::Budget],
    ),
    (
        "tail calls",
        "local function f() return f() end return f()",
        &[ErrorKind::Error, ErrorKind::Budget],
    ),
    (
        "recursion through metatables",
        "local t = setmetatable({}, {__index = function(t, k) return t[k + 1] end}) return t[1]",
        &[ErrorKind::Error, ErrorKind::Budget],
    ),
    (
        "pathological pattern",
        "return string.find(string.rep('a', 5000), '.-.-.-.-.-b')",
        &[ErrorKind::Budget],
    ),
    (
        "quadratic gsub",
        "return string.rep('a', 1e5):gsub('a*b', 'x')",
        &[ErrorKind::Budget],
    ),
    (
        "gsub that calls a loop",
        "return string.rep('a', 1e5):gsub('a', function() while true do end end)",
        &[ErrorKind::Budget],
    ),
    (
        "sort with a comparison that loops",
        "local t = {3, 2, 1} table.sort(t, function() while true do end end)",
        &[ErrorKind::Budget],
    ),
    (
        "__tostring that loops",
        "error(setmetatable({}, {__tostring = function() while true do end end}))",
        &[ErrorKind::Budget, ErrorKind::Error],
    ),
    (
        "iterator that never ends",
        "for k in function() return 1 end do end",
        &[ErrorKind::Budget],
    ),
];

const GREEDY: &[(&str, &str, &[ErrorKind])] = &[
    (
        "string.rep bomb",
        "return #string.rep('x', 1e9)",
        &[ErrorKind::Memory],
    ),
    (
        "doubling",
        "local s = 'x' for i = 1, 40 do s = s .. s end return s",
        &[ErrorKind::Memory],
    ),
    (
        "many long strings",
        "while true do local s = string.rep('x', 1e6) end",
        &[ErrorKind::Memory, ErrorKind::Budget],
    ),
    (
        "one kept string after another",
        "local t = {} while true do t[#t + 1] = string.rep('x', 1000 + #t) end",
        &[ErrorKind::Memory, ErrorKind::Budget],
    ),
    (
        "gsub bomb",
        "return #(string.rep('x', 1e6):gsub('.', string.rep('y', 1000)))",
        &[ErrorKind::Memory, ErrorKind::Budget],
    ),
    (
        "table growth",
        "local t = {} while true do t[#t + 1] = {} end",
        &[ErrorKind::Memory, ErrorKind::Budget],
    ),
    (
        "table.create",
        "return #table.create(1e9, 1)",
        &[ErrorKind::Memory, ErrorKind::Error],
    ),
    (
        "buffer.create",
        "return buffer.len(buffer.create(1e9))",
        &[ErrorKind::Memory, ErrorKind::Error],
    ),
    (
        "a long buffer, filled for ever",
        "local b = buffer.create(1e7) while true do buffer.fill(b, 0, 1) end",
        &[ErrorKind::Budget],
    ),
    (
        "table.concat for ever",
        "local t = table.create(1e5, 'x') while true do local s = table.concat(t) end",
        &[ErrorKind::Budget, ErrorKind::Memory],
    ),
    (
        "table.insert at the front",
        "local t = table.create(1e5, 1) while true do table.insert(t, 1, 1) end",
        &[ErrorKind::Budget],
    ),
    (
        "table.find for ever",
        "local t = table.create(5e5, 1) while true do table.find(t, 2) end",
        &[ErrorKind::Budget],
    ),
    (
        "long comparisons",
        "local a, b = string.rep('a', 2e6) .. 'b', string.rep('a', 2e6) .. 'c' while true do local x = a < b end",
        &[ErrorKind::Budget],
    ),
    (
        "string.upper for ever",
        "local s = string.rep('x', 1e6) while true do s:upper() end",
        &[ErrorKind::Budget, ErrorKind::Memory],
    ),
    (
        "memory errors swallowed",
        "while true do pcall(string.rep, 'x', 1e9) end",
        &[ErrorKind::Budget, ErrorKind::Memory],
    ),
    (
        "unpack",
        "return select('#', table.unpack({}, 1, 1e8))",
        &[ErrorKind::Error, ErrorKind::Memory],
    ),
    (
        "table.move over a huge range",
        "return table.move({}, 1, 2^31, 2)",
        &[ErrorKind::Error],
    ),
    (
        "plain find with two long texts",
        "local s = string.rep('a', 4e6) return string.find(s, string.rep('a', 2e6) .. 'b', 1, true)",
        &[ErrorKind::Error],
    ),
    (
        "the same as a method",
        "local s = string.rep('a', 4e6) return s:find(string.rep('a', 2e6) .. 'b')",
        &[ErrorKind::Error],
    ),
    (
        "split with two long texts",
        "local s = string.rep('a', 4e6) return s:split(string.rep('a', 2e6) .. 'b')",
        &[ErrorKind::Error],
    ),
    (
        "sort of a huge table",
        "local t = table.create(5e5, 1) table.sort(t)",
        &[ErrorKind::Error],
    ),
];

const NOSY: &[(&str, &str, &[ErrorKind])] = &[
    (
        "coroutines",
        "return coroutine.wrap(function() return 'batch' end)()",
        &[ErrorKind::Error],
    ),
    (
        "metatable of strings",
        "getmetatable('').__index = function() return 1 end",
        &[ErrorKind::Error],
    ),
    (
        "string library",
        "string.format = function() return 'x' end",
        &[ErrorKind::Error],
    ),
    (
        "string library through its metatable",
        "getmetatable('').__index.format = nil",
        &[ErrorKind::Error],
    ),
    (
        "metatable of an input",
        "setmetatable(request, {})",
        &[ErrorKind::Error],
    ),
    (
        "the input's metatable, read",
        "getmetatable(request).__index = nil",
        &[ErrorKind::Error],
    ),
    (
        "writing a known field",
        "request.path = '/x'",
        &[ErrorKind::Error],
    ),
    (
        "writing an unknown field of an input",
        "request.memory = 1",
        &[ErrorKind::Error],
    ),
    (
        "writing labels",
        "tenant.labels.x = 'y'",
        &[ErrorKind::Error],
    ),
    (
        "table.insert into an input",
        "table.insert(request, 1)",
        &[ErrorKind::Error],
    ),
    (
        "table.clear of an input",
        "table.clear(request)",
        &[ErrorKind::Error],
    ),
    (
        "globals as hidden state",
        "hidden = (hidden or 0) + 1",
        &[ErrorKind::Error],
    ),
    (
        "its own module as hidden state",
        "M.count = 1",
        &[ErrorKind::Error],
    ),
    (
        "a misspelt field",
        "return request.modle",
        &[ErrorKind::Error],
    ),
    (
        "chance without a seed",
        "return math.random() < 2 and 'batch'",
        &[ErrorKind::Error],
    ),
    (
        "files",
        "return io.open('/etc/passwd')",
        &[ErrorKind::Error],
    ),
    ("commands", "return os.execute('id')", &[ErrorKind::Error]),
    ("the clock", "return os.time()", &[ErrorKind::Error]),
    ("load", "return load('return 1')()", &[ErrorKind::Error]),
    (
        "loadstring",
        "return loadstring('return 1')()",
        &[ErrorKind::Error],
    ),
    ("environments", "return getfenv(0)", &[ErrorKind::Error]),
    ("setfenv", "setfenv(1, {})", &[ErrorKind::Error]),
    ("debug", "return debug.info(1, 'l')", &[ErrorKind::Error]),
    (
        "garbage collection",
        "collectgarbage('stop')",
        &[ErrorKind::Error],
    ),
    ("newproxy", "return newproxy(true)", &[ErrorKind::Error]),
    ("xpcall", "return xpcall(error, error)", &[ErrorKind::Error]),
    (
        "rawset",
        "rawset(request, 'model', 'x')",
        &[ErrorKind::Error],
    ),
    ("_G", "_G.x = 1", &[ErrorKind::Error]),
    (
        "require of a file outside",
        "require('../../etc/passwd')",
        &[ErrorKind::Error],
    ),
    (
        "require of a policy file",
        "require('routing')",
        &[ErrorKind::Error],
    ),
    (
        "require of a folder up",
        "require('lib/../routing')",
        &[ErrorKind::Error],
    ),
    (
        "a line in the log for each request",
        "llmgw.log('x')",
        &[ErrorKind::Error],
    ),
    ("changing llmgw", "llmgw.api = 2", &[ErrorKind::Error]),
];

const WRONG: &[(&str, &str, &[ErrorKind])] = &[
    ("nothing", "", &[ErrorKind::Nil]),
    ("nil", "return nil", &[ErrorKind::Nil]),
    ("a number", "return 5", &[ErrorKind::Error]),
    ("a table", "return {}", &[ErrorKind::Error]),
    ("a function", "return function() end", &[ErrorKind::Error]),
    ("an unknown band", "return 'gold'", &[ErrorKind::Unknown]),
    (
        "a huge string",
        "return string.rep('x', 1e6)",
        &[ErrorKind::Unknown],
    ),
    (
        "a string that is no text",
        "return '\\255\\254\\0'",
        &[ErrorKind::Unknown],
    ),
    ("NaN", "return 'standard', 0/0", &[ErrorKind::Nan]),
    (
        "infinity",
        "return 'standard', math.huge",
        &[ErrorKind::Range],
    ),
    ("minus zero", "return 'standard', -0", &[ErrorKind::Range]),
    (
        "a time as text",
        "return 'standard', '5s'",
        &[ErrorKind::Error],
    ),
    (
        "an error that is a table",
        "error({ code = 3 })",
        &[ErrorKind::Error],
    ),
    ("an error that is nil", "error(nil)", &[ErrorKind::Error]),
    (
        "an error in __tostring",
        "error(setmetatable({}, {__tostring = function() error('x') end}))",
        &[ErrorKind::Error],
    ),
    (
        "an error that is huge",
        "error(string.rep('x', 1e6))",
        &[ErrorKind::Error],
    ),
    (
        "an error that is no text",
        "error('\\255\\0')",
        &[ErrorKind::Error],
    ),
];

#[test]
fn a_hostile_classify_ends_in_bounded_time_and_the_tenants_default_band_answers() {
    for (what, body, expected) in [ENDLESS, GREEDY, NOSY, WRONG].concat() {
        let dir = Dir::with(&[("admission.lua", &evil(body))]);
        let policies = dir.open().unwrap_or_else(|error| panic!("{what}: {error}"));
        let set = policies.current();
        let start = Instant::now();
        let band = set.classify(&request("evil"), &tenant());
        assert!(
            start.elapsed() < CALL_MAX,
            "{what} took {:?}",
            start.elapsed()
        );
        assert_eq!(&*band.name, "standard", "{what}");
        let found = kinds(&policies, Hook::Classify);
        assert!(
            found.len() == 1 && expected.contains(&found[0]),
            "{what}: counted as {found:?}"
        );
        assert_eq!(
            &*set.classify(&request("good"), &tenant()).name,
            "batch",
            "{what}: the next call is fine"
        );
    }
}

#[test]
fn a_hostile_file_is_refused_at_load_in_bounded_time() {
    for (what, body, _) in [ENDLESS, GREEDY].concat() {
        let start = Instant::now();
        let module = format!(
            "local function run()\n{body}\nend\nrun()\nwhile true do end\nreturn {{ api = 1 }}"
        );
        assert!(
            Dir::with(&[("routing.lua", &module)]).load().is_err(),
            "{what} at load"
        );
        let classify = hook("classify(request, tenant)", body);
        assert!(
            Dir::with(&[("admission.lua", &classify)]).load().is_err(),
            "{what} in the example call"
        );
        assert!(
            start.elapsed() < 2 * CALL_MAX,
            "{what} took {:?}",
            start.elapsed()
        );
    }
}

#[test]
fn a_budget_error_says_where_the_script_was() {
    let dir = Dir::with(&[(
        "admission.lua",
        &hook("classify(request, tenant)", "  while true do\n  end"),
    )]);
    assert_eq!(
        dir.refusal(),
        "policies/admission.lua:3: took more than 20000 steps"
    );
}

#[test]
fn a_tick_hook_that_loops_gives_the_last_good_value_and_trips() {
    let body = "  if pool.queued > 5 then while true do end end\n  return { kv = 7 }";
    let dir = Dir::with(&[("routing.lua", &hook("weights(pool)", body))]);
    let policies = dir.open().expect("it behaves for the example");
    let set = policies.current();
    let bands = [BandQueue {
        name: "batch",
        queued: 9,
        oldest_ms: Some(1.0),
    }];
    let calm = PoolView {
        model: "m",
        bands: &bands,
        ..PoolView::default()
    };
    let busy = PoolView { queued: 9, ..calm };
    assert_eq!(set.routing_weights(&calm).kv, 7.0);
    let start = Instant::now();
    for _ in 0..TRIP_OVERRUNS {
        assert_eq!(set.routing_weights(&busy).kv, 7.0, "the last good value");
    }
    assert!(start.elapsed() < CALL_MAX);
    assert_eq!(policies.status().trips, [Hook::Weights]);
    assert_eq!(
        set.routing_weights(&calm).kv,
        500.0,
        "switched off: the native default"
    );
    set.untrip();
    assert_eq!(set.routing_weights(&calm).kv, 7.0);
}

#[test]
fn a_tick_hook_without_a_last_good_value_falls_back_to_the_built_in_file() {
    let body = "  if pool.model == 'm' then error('boom') end\n  return { kv = 7 }";
    let policies = Dir::with(&[("routing.lua", &hook("weights(pool)", body))])
        .open()
        .expect("it loads");
    let weights = policies.current().routing_weights(&PoolView {
        model: "m",
        ..PoolView::default()
    });
    assert_eq!(weights, llmgw_plugins::RoutingWeights::default());
}

#[test]
fn a_kept_reference_to_an_input_is_harmless_and_never_another_threads() {
    let body = "local M = { api = 1 }\nlocal kept\nfunction M.classify(request, tenant)\n  kept = kept or request\n  \
                if kept.model == request.model then return 'batch' end\n  return 'standard'\nend\nreturn M\n";
    let set = Dir::with(&[("admission.lua", body)])
        .load()
        .expect("it loads");
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let set = set.clone();
            std::thread::spawn(move || {
                (0..200).all(|n| {
                    let model = format!("m{thread}-{n}");
                    &*set.classify(&request(&model), &tenant()).name == "batch"
                })
            })
        })
        .collect();
    for thread in threads {
        assert!(
            thread.join().expect("no thread panics"),
            "the row is this thread's own, and up to date"
        );
    }
}

#[test]
fn what_editors_leave_behind_is_ignored() {
    let dir = Dir::new();
    for name in [
        ".routing.lua.swp",
        ".routing.lua",
        "routing.lua~",
        "#routing.lua#",
        "notes.txt",
        "4913",
    ] {
        dir.write(name, b"\xff not lua");
    }
    dir.load().expect("nothing of that is a policy");
}

#[test]
fn shared_code_is_required_once_and_cycles_are_named() {
    let dir = Dir::with(&[
        ("lib/knobs.lua", "return { kv = 42 }"),
        (
            "routing.lua",
            "local knobs = require('lib/knobs')\nreturn { api = 1, weights = function() return { kv = knobs.kv } end }",
        ),
    ]);
    let set = dir.load().expect("it loads");
    assert_eq!(
        set.routing_weights(&PoolView {
            model: "m",
            ..PoolView::default()
        })
        .kv,
        42.0
    );

    dir.write("lib/knobs.lua", "return require('lib/knobs')");
    assert_eq!(
        dir.refusal(),
        "policies/lib/knobs.lua:1: 'lib/knobs' requires itself"
    );
    dir.write("lib/knobs.lua", "return {");
    assert!(dir.refusal().starts_with("policies/lib/knobs.lua:1: "));
    dir.write("lib/knobs.lua", "local t = nil\nreturn t.x");
    assert_eq!(
        dir.refusal(),
        "policies/lib/knobs.lua:2: attempt to index nil with 'x'"
    );
    std::fs::rename(dir.path("lib/knobs.lua"), dir.path("lib/knobz.lua")).expect("rename");
    dir.write("lib/knobz.lua", "return {}");
    assert_eq!(
        dir.refusal(),
        "policies/routing.lua:1: no module 'lib/knobs' in the policy directory's lib/ (did you mean 'lib/knobz'?)"
    );
}

#[test]
fn chance_is_reproducible_by_the_requests_seed() {
    let body = "  return llmgw.rand() < 0.5 and 'batch' or 'standard'";
    let set = Dir::with(&[("admission.lua", &hook("classify(request, tenant)", body))])
        .load()
        .expect("it loads");
    let band = |seed| {
        set.classify(
            &RequestView {
                seed,
                ..request("m")
            },
            &tenant(),
        )
        .name
    };
    let first: Vec<_> = (0..200).map(band).collect();
    let second: Vec<_> = (0..200).map(band).collect();
    assert_eq!(first, second);
    let batch = first.iter().filter(|name| &***name == "batch").count();
    assert!((60..140).contains(&batch), "{batch} of 200 is not half");
}
