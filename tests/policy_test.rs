//! `llmgw policy test`, as a person and a CI run it; and the tests that a set has to pass before it comes into force.

mod harness;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use harness::Setup;
use serde_json::Value;

/// A directory of policies that goes away with its test.
struct Dir(PathBuf);

impl Dir {
    fn with(files: &[(&str, &str)]) -> Dir {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-policy-test-{}-{number}", std::process::id());
        let dir = Dir(std::env::temp_dir().join(name));
        std::fs::create_dir_all(&dir.0).unwrap();
        for (path, text) in files {
            write(&dir.0.join(path), text);
        }
        dir
    }

    /// Runs `llmgw policy test` in it; what it writes then has short paths.
    fn test(&self, args: &[&str]) -> Run {
        let output = Command::new(env!("CARGO_BIN_EXE_llmgw"))
            .args(["policy", "test", "."])
            .args(args)
            .current_dir(&self.0)
            .output()
            .unwrap();
        Run::of(output)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Run {
    status: i32,
    stdout: String,
    stderr: String,
}

impl Run {
    fn of(output: Output) -> Run {
        Run {
            status: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    #[track_caller]
    fn has(&self, lines: &[&str]) {
        for line in lines {
            let found = self.stdout.contains(line);
            assert!(
                found,
                "`{line}` is missing in\n{}{}",
                self.stdout, self.stderr
            );
        }
    }
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

fn built_in(args: &[&str]) -> Run {
    let output = Command::new(env!("CARGO_BIN_EXE_llmgw"))
        .args(["policy", "test"])
        .args(args)
        .output()
        .unwrap();
    Run::of(output)
}

fn case(body: &str) -> String {
    format!("local t = llmgw.test\nt.case(\"it\", function()\n{body}\nend)\n")
}

#[test]
fn the_shipped_policies_pass_their_own_tests() {
    let run = built_in(&["--coverage"]);
    assert_eq!(run.status, 0, "{}{}", run.stdout, run.stderr);
    run.has(&[
        "TAP version 13\n# (built-in)/admission_test.lua\nok 1 - ",
        " 0 failed in ",
        "(built-in)/placement.lua: 25 of 25 lines run\n",
        "# reasons never produced: ",
    ]);
    let again = built_in(&["--format", "json"]).stdout;
    let names = |text: &str| {
        let report: Value = serde_json::from_str(text).unwrap();
        let files = report["files"].as_array().unwrap().clone();
        files
            .iter()
            .map(|file| file["file"].to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        names(&again),
        names(&built_in(&["--format", "json"]).stdout)
    );
}

#[test]
fn a_failure_shows_the_expression_both_values_where_and_the_decisions_reasons() {
    let dir = Dir::with(&[(
        "my_test.lua",
        &case(
            "  local fleet = t.fleet(\"two-racks\")\n  fleet.nodes[\"ml-07\"].gpus_free = 4\n  \
             local d = fleet:place { model = \"llama-3.3-70b\" }\n  t.equal(d.nodes, {\n    \"ml-99\",\n  })",
        ),
    )]);
    let run = dir.test(&[]);
    assert_eq!(run.status, 1);
    run.has(&[
        "not ok 1 - it\n#   at        ./my_test.lua:6\n#   code      t.equal(d.nodes, { \"ml-99\", })\n",
        "#   expected  { \"ml-99\" }\n#   actual    { \"ml-07\" }\n",
        "#   differ    at [1]: expected \"ml-99\", actual \"ml-07\"\n",
        "#   decision  llama-3.3-70b/0 on ml-07 with profile h100, score ",
        "ml-03: gpu_class (its GPUs are l40s-45g, h100-sxm-80g is needed)",
        "1..1\n# 0 passed, 1 failed in ",
    ]);
}

#[test]
fn what_is_misspelt_fails_the_case_with_a_suggestion() {
    let cases = [
        ("t.fleet(\"two-rack\")", "did you mean 'two-racks'?"),
        (
            "t.fleet(\"two-racks\").nodes[\"ml-07\"].gpu_free = 4",
            "did you mean `gpus_free`?",
        ),
        (
            "t.ok(t.fleet(\"two-racks\").nodes[\"ml-7\"].cpus)",
            "there is no node `ml-7`",
        ),
        (
            "t.fleet(\"two-racks\").nods[\"ml-07\"].cpus = 4",
            "did you mean `nodes`?",
        ),
        (
            "t.ok(t.fleet(\"cpu-pair\"):place { model = \"smollm2\" }.palced)",
            "did you mean 'placed'?",
        ),
        (
            "t.fleet(\"cpu-pair\"):place { modl = \"smollm2\" }",
            "unknown field `modl`",
        ),
        (
            "t.fleet(\"cpu-pair\"):place { model = \"smolm2\" }",
            "did you mean `smollm2`?",
        ),
        (
            "t.fleet(\"cpu-pair\"):route { model = \"smolm2\" }",
            "did you mean `smollm2`?",
        ),
        (
            "t.classify({ band_hnt = \"batch\" }, {})",
            "did you mean 'band_hint'?",
        ),
        ("t.engine(\"vlm\")", "did you mean 'vllm'?"),
        (
            "t.engine(\"vllm\"):commands { prt = 1 }",
            "did you mean 'port'?",
        ),
        (
            "t.fault(\"routing.rnk\", \"nan\")",
            "did you mean 'routing.rank'?",
        ),
        ("t.fault(\"routing.rank\", \"nam\")", "did you mean 'nan'?"),
        (
            "t.simulate { tenants = { { cliens = 2 } } }",
            "tenant 1 has no field `cliens` (did you mean `clients`?)",
        ),
    ];
    let files: Vec<(String, String)> = cases
        .iter()
        .enumerate()
        .map(|(at, (body, _))| (format!("c{at:02}_test.lua"), case(body)))
        .collect();
    let files: Vec<(&str, &str)> = files
        .iter()
        .map(|(a, b)| (a.as_str(), b.as_str()))
        .collect();
    let dir = Dir::with(&files);
    let run = dir.test(&[]);
    assert_eq!(run.status, 1);
    let parts: Vec<&str> = run.stdout.split("not ok ").skip(1).collect();
    assert_eq!(parts.len(), cases.len(), "{}", run.stdout);
    for (part, (body, wanted)) in parts.iter().zip(cases) {
        assert!(
            part.contains(wanted),
            "{body}: `{wanted}` is missing in\n{part}"
        );
        assert!(
            part.contains("_test.lua:3\n"),
            "{body}: the line is missing in\n{part}"
        );
    }
}

#[test]
fn hostile_tests_fail_and_the_others_run() {
    let hostile = "local t = llmgw.test
t.case('loop', function() while true do end end)
t.case('loop in pcall', function() while true do pcall(function() while true do end end) end end)
t.case('memory', function() local x = {} while true do x[#x + 1] = string.rep('x', 100000) .. #x end end)
t.case('recursion', function() local function f() return 1 + f() end f() end)
t.case('a failure that pcall swallows', function() pcall(t.equal, 1, 2) end)
t.case('an error that is a table', function() error({}) end)
t.case('the VM is closed', function() t.equal(os, nil) end)
t.case('a sensible one', function() t.equal(1, 1) end)
";
    let dir = Dir::with(&[
        ("a_test.lua", hostile),
        ("b_test.lua", &case("t.ok(true)")),
        ("c_test.lua", "while true do end"),
        ("d_test.lua", "local t = llmgw.test\nt.case('x', 1)"),
    ]);
    let run = dir.test(&[]);
    assert_eq!(run.status, 1);
    run.has(&[
        "not ok 1 - loop\n#   at        ./a_test.lua:2\n",
        "took longer than 2 s",
        "not ok 2 - loop in pcall\n",
        "not ok 3 - memory\n#   at        ./a_test.lua:4\n",
        "needs more than 64 MiB of memory",
        "not ok 4 - recursion\n",
        "not ok 5 - a failure that pcall swallows\n",
        "not ok 6 - an error that is a table\n",
        "ok 8 - a sensible one\n",
        "ok 9 - it\n",
        "not ok 10 - the file loads\n#   at        ./c_test.lua:1\n",
        "not ok 11 - the file loads\n#   at        ./d_test.lua:2\n",
        "t.case takes a name and a function",
    ]);
}

#[test]
fn a_property_is_shrunk_and_its_seed_gives_the_same_input_again() {
    let text = "local t = llmgw.test
t.property('few are large', 200, function(g)
  local list = g:list(0, 20, function() return g:int(-1000, 1000) end)
  for _, n in list do t.ok(n < 57) end
end)
";
    let dir = Dir::with(&[("p_test.lua", text)]);
    let run = dir.test(&["--seed", "7"]);
    assert_eq!(run.status, 1);
    run.has(&[
        "#   input     g:list(0, 20) = { 57 }\n",
        "#   seed      7, input ",
        "#   rerun     llmgw policy test '.' --seed 7 --run 'few are large'\n",
    ]);
    let again = dir.test(&["--seed", "7", "--run", "few are large"]);
    let seed = |run: &Run| {
        let line = run.stdout.lines().find(|line| line.contains("seed "));
        line.unwrap().to_owned()
    };
    assert_eq!(seed(&run), seed(&again));
}

#[test]
fn an_injected_fault_shows_the_fallback() {
    let body = "  t.ok(t.fault(\"placement.filter\", \"error\"))
  local d = t.fleet(\"cpu-pair\"):place { model = \"smollm2\" }
  t.equal(d.placed, false)
  t.equal(d.refused[\"cpu-01\"].code, \"policy_error\")
  t.equal(t.fault(\"routing.rank\", \"nan\"), false, \"the shipped file has none\")
  t.fault(\"admission.bands\", \"error\")
  t.ok(#t.bands {} > 0)";
    let dir = Dir::with(&[("f_test.lua", &case(body))]);
    let run = dir.test(&[]);
    assert_eq!(run.status, 0, "{}", run.stdout);
}

#[test]
fn golden_values_are_written_once_and_compared_from_then_on() {
    let body = "  t.golden({ 1, { a = \"b\" } })\n  t.golden(VALUE)";
    let test = |value: &str| case(&body.replace("VALUE", value));
    let dir = Dir::with(&[("g_test.lua", &test("2"))]);
    let first = dir.test(&[]);
    assert_eq!(first.status, 1);
    first.has(&["there is no ./golden/g_test/it.json yet"]);
    let written = dir.test(&["--update-golden"]);
    assert_eq!(written.status, 0, "{}", written.stdout);
    written.has(&["# written: ./golden/g_test/it.json\n# written: ./golden/g_test/it-2.json\n"]);
    assert_eq!(dir.test(&[]).status, 0);
    write(&dir.0.join("g_test.lua"), &test("3"));
    let differs = dir.test(&[]);
    assert_eq!(differs.status, 1);
    differs.has(&["#   expected  2\n#   actual    3\n", "run --update-golden"]);
}

#[test]
fn fleets_of_the_directory_come_before_the_shipped_ones() {
    let fleet = r#"{"schema": "llmgw.fleet/1", "generated_by": "me", "taken_at": "2026-07-01T12:00:00Z",
        "nodes": {"n1": {"cpus": 4, "cpus_free": 4, "memory_gib": 8.0, "memory_gib_free": 8.0}},
        "models": {"m": {"profiles": [{"name": "cpu", "engine": "llamacpp", "cpus": 8, "slots": 4}]}}}"#;
    let body = "  local d = t.fleet(\"cpu-pair\"):place { model = \"m\" }
  t.equal(d.refused.n1.code, \"cpus\")
  t.error(function() t.fleet(\"broken\") end, \"fleets/broken.json\")";
    let dir = Dir::with(&[
        ("f_test.lua", &case(body)),
        ("fleets/cpu-pair.json", fleet),
        ("fleets/broken.json", "{"),
    ]);
    let run = dir.test(&[]);
    assert_eq!(run.status, 0, "{}", run.stdout);
}

#[test]
fn only_the_cases_asked_for_are_run_and_none_is_a_usage_error() {
    let dir = Dir::with(&[
        ("a_test.lua", &case("t.ok(false)")),
        ("b_test.lua", &case("t.ok(true)")),
    ]);
    assert_eq!(dir.test(&["--run", "b_test*it"]).status, 0);
    let none = dir.test(&["--run", "nothing like it"]);
    assert_eq!((none.status, none.stdout.as_str()), (2, ""));
    assert!(none.stderr.contains("no case matches `nothing like it`"));
    let nowhere = Run::of(
        Command::new(env!("CARGO_BIN_EXE_llmgw"))
            .args(["policy", "test", "/nowhere/at/all"])
            .output()
            .unwrap(),
    );
    assert_eq!(nowhere.status, 2);
}

#[test]
fn a_set_that_does_not_load_is_refused_with_its_line() {
    let dir = Dir::with(&[("routing.lua", "return {\n  api = 1,\n  weigths = 1,\n}\n")]);
    let run = dir.test(&[]);
    assert_eq!(run.status, 1);
    assert!(
        run.stderr
            .contains("./routing.lua:3: unknown hook 'weigths' (did you mean 'weights'?)"),
        "{}",
        run.stderr
    );
}

#[test]
fn junit_is_escaped_and_json_has_every_fact() {
    let body = "  t.equal(\"<a & 'b'>\", \"\\\"\")";
    let dir = Dir::with(&[(
        "x_test.lua",
        &case(body).replace("\"it\"", "\"a < b & 'c'\""),
    )]);
    let junit = dir.test(&["--format", "junit"]);
    assert_eq!(junit.status, 1);
    junit.has(&[
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"llmgw policy test\" tests=\"1\" failures=\"1\">",
        "name=\"a &lt; b &amp; &apos;c&apos;\" file=\"./x_test.lua\" line=\"2\"",
        "expected: &quot;\\&quot;&quot;",
    ]);
    // Between tags there is no bare `<`, and every one that opens is closed.
    let opened = junit.stdout.matches("<test").count();
    let closed = junit.stdout.matches("</test").count();
    assert_eq!((opened, closed), (3, 3), "{}", junit.stdout);
    let json: Value = serde_json::from_str(&dir.test(&["--format", "json"]).stdout).unwrap();
    assert_eq!((&json["passed"], &json["failed"]), (&0.into(), &1.into()));
    let failure = &json["files"][0]["cases"][0]["failure"];
    assert_eq!(failure["line"], 3);
    assert_eq!(failure["actual"], "\"<a & 'b'>\"");
}

/// A tick hook that turns a knob, and a test that wants it below 1000.
fn routing(kv: u32) -> String {
    format!("return {{ api = 1, weights = function(pool) return {{ kv = {kv} }} end }}\n")
}

const KV_IS_SMALL: &str = "local t = llmgw.test
t.case('kv stays small', function()
  t.ok(t.weights({}).kv < 1000, 'kv is too large')
end)
";

#[test]
fn a_set_whose_tests_fail_does_not_come_into_force() {
    let gateway = Setup::new()
        .top("policies: policies")
        .model("fake", "")
        .endpoint("vllm", "http://127.0.0.1:9", "")
        .file("policies/routing.lua", &routing(1))
        .file("policies/kv_test.lua", KV_IS_SMALL)
        .start();
    let policies = || -> Value {
        serde_json::from_slice(gateway.admin_get("/v1/policies").body.as_ref()).unwrap()
    };
    assert_eq!(policies()["generation"], 1);
    write(&gateway.dir.join("policies/routing.lua"), &routing(5000));
    gateway.until("the set is refused", || !policies()["last_error"].is_null());
    let status = policies();
    assert_eq!(status["generation"], 1, "the last good set stays");
    let error = &status["last_error"];
    assert_eq!(error["line"], 3);
    assert!(
        error["file"]
            .as_str()
            .unwrap()
            .ends_with("policies/kv_test.lua")
    );
    assert!(
        error["reason"]
            .as_str()
            .unwrap()
            .starts_with("test `kv stays small` failed: kv is too large")
    );
    assert_eq!(
        error["text"],
        "t.ok(t.weights({}).kv < 1000, 'kv is too large')"
    );
    write(&gateway.dir.join("policies/routing.lua"), &routing(2));
    gateway.until("a good set is taken", || policies()["generation"] == 2);
    assert!(policies()["last_error"].is_null());
}

#[test]
fn a_server_does_not_start_with_a_set_that_fails_its_tests() {
    let dir = Dir::with(&[
        (
            "llmgw.yaml",
            "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\npolicies: policies\nmodels:\n  - name: m\n    endpoints: [{url: \"http://127.0.0.1:9\", engine: vllm}]\n",
        ),
        ("policies/routing.lua", &routing(5000)),
        ("policies/kv_test.lua", KV_IS_SMALL),
    ]);
    let check = Command::new(env!("CARGO_BIN_EXE_llmgw"))
        .args(["server", "--config", "llmgw.yaml", "--check"])
        .current_dir(&dir.0)
        .output()
        .unwrap();
    let run = Run::of(check);
    assert_eq!(run.status, 2, "{}", run.stderr);
    assert!(
        run.stderr
            .contains("policies/kv_test.lua:3: test `kv stays small` failed"),
        "{}",
        run.stderr
    );
}
