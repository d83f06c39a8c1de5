//! `policy check`: what works, but should be looked at.

use llmgw_plugins::{Hook, check_dir, init_dir};

use crate::{Dir, hook};

fn warnings(dir: &Dir) -> Vec<String> {
    let report = check_dir(Some(&dir.0)).expect("it loads");
    let text = |warning: &llmgw_plugins::PolicyError| {
        warning
            .to_string()
            .replace(&dir.0.display().to_string(), "policies")
    };
    report.warnings.iter().map(text).collect()
}

#[test]
fn the_shipped_files_have_no_warnings_even_with_every_hook_switched_on() {
    assert!(
        check_dir(None)
            .expect("the built-in set loads")
            .warnings
            .is_empty()
    );
    let dir = Dir::new();
    init_dir(&dir.0).expect("the shipped files can be written out");
    for key in [
        "admission.lua",
        "fairness.lua",
        "routing.lua",
        "engines/vllm.lua",
    ] {
        let text = std::fs::read_to_string(dir.path(key)).expect("it was written");
        dir.write(key, text.replace("\n-- M.", "\nM.") + "\n");
    }
    let report = check_dir(Some(&dir.0)).expect("it loads");
    assert!(report.hooks.contains(&Hook::Rank) && report.hooks.contains(&Hook::Key));
    assert_eq!(warnings(&dir), Vec::<String>::new());
}

#[test]
fn a_request_hook_that_allocates_is_warned_about() {
    let cases = [
        (
            "key(request, tenant)",
            "  return 'user-' .. request.session",
            "fairness.lua",
            true,
        ),
        (
            "key(request, tenant)",
            "  local t = { request.session }\n  return t[1]",
            "fairness.lua",
            true,
        ),
        (
            "key(request, tenant)",
            "  return string.format('%d', request.input_tokens)",
            "fairness.lua",
            true,
        ),
        (
            "key(request, tenant)",
            "  return request.session",
            "fairness.lua",
            false,
        ),
        (
            "classify(request, tenant)",
            "  return request.stream and 'interactive' or tenant.band",
            "admission.lua",
            false,
        ),
        (
            "rank(request, replicas, n)",
            "  table.sort({ 1, 2 })\n  return 1",
            "routing.lua",
            true,
        ),
    ];
    for (head, body, key, warned) in cases {
        let found = warnings(&Dir::with(&[(key, &hook(head, body))]));
        assert_eq!(found.len(), usize::from(warned), "{body}: {found:?}");
        let name = head.split('(').next().unwrap_or_default();
        let start = format!("policies/{key}:2: '{name}' runs for every request and allocates ");
        assert!(!warned || found[0].starts_with(&start), "{found:?}");
    }
}

#[test]
fn a_request_hook_with_a_long_loop_is_warned_about() {
    let body =
        "  local n = 0\n  for i = 1, 5000 do n += i end\n  return n > 0 and 'batch' or 'standard'";
    let found = warnings(&Dir::with(&[(
        "admission.lua",
        &hook("classify(request, tenant)", body),
    )]));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].contains("runs for every request and takes 500"),
        "{found:?}"
    );
}

#[test]
fn an_argument_that_commands_and_profiles_both_set_is_warned_about() {
    let text = "local M = { api = 1, executables = { 'tgi' } }\nfunction M.validate(profile)\n  for _, arg in profile.args do\n    \
                if arg == '--port' then return { 'no' } end\n  end\nend\nfunction M.commands(shard)\n  \
                return { { command = 'tgi', args = { '--port', tostring(shard.port), '--model-id', shard.source } } }\nend\nreturn M\n";
    assert_eq!(
        warnings(&Dir::with(&[("engines/tgi.lua", text)])),
        [
            "policies/engines/tgi.lua: `commands` sets '--model-id', and `validate` lets a profile set it too"
        ]
    );
}
