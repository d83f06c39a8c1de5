//! `docs/reference/lua-api.md`, made from the Rust types, so that it can't say what isn't so.

use std::fmt::Write;

use crate::bench::HookBudget;
use crate::error::ErrorKind;
use crate::hooks::Hook;
use crate::hooks::calls::ERROR_BODY_MAX_BYTES;
use crate::hooks::weights::KNOBS;
use crate::set::bundle::{BUNDLE_MAX_BYTES, FILE_MAX_BYTES, FILES_MAX};
use crate::set::trip::{TRIP_ERRORS, TRIP_OVERRUNS, TRIP_WINDOW};
use crate::stubs;
use crate::vm::budget::{DECISION_MAX, REQUEST_INTERRUPTS_MAX};
use crate::vm::sandbox::VM_MAX_BYTES;

/// What a table can't say about a hook in one word.
struct HookText {
    when: &'static str,
    range: &'static str,
    fallback: &'static str,
}

/// Everything that a policy or an engine plugin can see and say, as Markdown.
pub fn lua_reference() -> String {
    let mut page = String::from(
        "# Lua API\n\n\
         What policies and engine plugins see and return, `api = 1`. Generated from llmgw's own types; \
         `LLMGW_UPDATE_DOCS=1 cargo test -p llmgw-plugins reference` writes it again. \
         How to use it: [write a policy](../guides/write-a-policy.md), [add an engine](../guides/add-an-engine.md).\n\n",
    );
    files(&mut page);
    globals(&mut page);
    hooks(&mut page);
    knobs(&mut page);
    failures(&mut page);
    types(&mut page);
    page
}

fn files(page: &mut String) {
    line(page, "## Files\n");
    line(page, "| file | hooks |\n| --- | --- |");
    for file in ["placement", "admission", "fairness", "routing"] {
        let key = format!("{file}.lua");
        let hooks: Vec<String> = Hook::ALL
            .into_iter()
            .filter(|hook| hook.file().as_deref() == Some(key.as_str()))
            .map(|hook| format!("`{}`", hook.function()))
            .collect();
        line(page, &format!("| `{key}` | {} |", hooks.join(" ")));
    }
    let engine: Vec<String> = Hook::ALL
        .into_iter()
        .filter(|hook| hook.file().is_none())
        .map(|hook| format!("`{}`", hook.function()))
        .collect();
    line(
        page,
        &format!(
            "| `engines/NAME.lua` | {}, and [data](#engine) |",
            engine.join(" ")
        ),
    );
    line(
        page,
        "| `lib/*.lua` | none: shared code, `require(\"lib/name\")` |\n| `*_test.lua` | none: tests, beside what they test |\n",
    );
    line(
        page,
        &format!(
            "Each file returns one table with `api = 1` and the hooks that it defines. A file that is missing is the embedded one. \
             An unknown key is an error. At most {FILES_MAX} files of {} KiB, {} MiB together.\n",
            FILE_MAX_BYTES >> 10,
            BUNDLE_MAX_BYTES >> 20
        ),
    );
}

fn globals(page: &mut String) {
    line(page, "## Globals\n");
    let names: Vec<String> = kept().iter().map(|name| format!("`{name}`")).collect();
    line(
        page,
        &format!(
            "Luau with {}, `require` (of the directory's own `lib/`) and `llmgw`. Nothing else: no `os`, no `io`, no `load`, no clock, \
             no `math.random`. A VM has {} MiB. Values of a module are constants: a hook is a function of its arguments, and the VM may be \
             replaced between any two calls.\n",
            names.join(" "),
            VM_MAX_BYTES >> 20
        ),
    );
    class_table(page, "global");
}

fn hooks(page: &mut String) {
    line(page, "## Hooks\n");
    for hook in Hook::ALL {
        let HookText {
            when,
            range,
            fallback,
        } = text(hook);
        line(page, &format!("### `{}`\n", hook.name()));
        let signature = match stubs::signature(hook) {
            "" => class_fields("engine")
                .into_iter()
                .find(|(name, ..)| name.trim_end_matches('?') == hook.function())
                .map_or(String::new(), |(_, kind, _)| kind),
            signature => signature.to_owned(),
        };
        line(
            page,
            &format!(
                "```\n{}\n```\n",
                signature
                    .replace("llmgw.", "")
                    .replacen("fun", hook.function(), 1)
            ),
        );
        line(page, &format!("- called: {when}"));
        line(page, &format!("- range: {range}"));
        line(page, &format!("- budget: {}", budget(hook)));
        line(page, &format!("- when it fails: {fallback}\n"));
    }
}

fn budget(hook: Hook) -> String {
    match hook.budget() {
        HookBudget::Interrupts(max) => {
            format!("{max} interrupts (a loop's turn, a call and a return are one each), no clock")
        }
        HookBudget::CallMs(max) => format!("{max} ms"),
        HookBudget::DecisionMs(max) => format!("{max} ms for all calls of a decision together"),
    }
}

/// Kept beside the enum: a new hook doesn't compile without its text.
fn text(hook: Hook) -> HookText {
    let of = |when, range, fallback| HookText {
        when,
        range,
        fallback,
    };
    const TICK: &str = "the last good value of the same model, then the embedded file's";
    match hook {
        Hook::PlacementFilter => of(
            "for each node that is natively possible, when a replica needs a place",
            "`true`, or `false, code, text`; code `[a-z_]{1,32}`",
            "the node is unfit, `policy_error`",
        ),
        Hook::PlacementScore => of(
            "for each candidate: one a node for single-node jobs, at most 256 gangs for others",
            "a number, or a table of named numbers whose sum counts and which `explain` shows; -1000 to 1000 a part",
            "the candidate goes last; when all fail, the embedded score",
        ),
        Hook::Bands => of(
            "every 250 ms for each model",
            "1 to 16 bands, see [band](#band); floors at most 0.8 together; names change by a reload only",
            TICK,
        ),
        Hook::Classify => of(
            "for each request, if defined",
            "the name of a band, clamped to the tenant's best one; then, if wanted, the time it may wait in ms",
            "the tenant's default band",
        ),
        Hook::Gate => of(
            "every 250 ms for each model",
            "see [gate](#gate); an idle replica always accepts",
            TICK,
        ),
        Hook::Reject => of(
            "when a request is refused, if defined",
            "429 or 503; then, if wanted, the time to wait, 1000 to 60000 ms",
            "429 for `queue_full` and `tenant_limit`, else 503",
        ),
        Hook::Prices => of("every second for each model", "each at least 0", TICK),
        Hook::Weight => of(
            "every second for each active tenant",
            "0.01 to 100",
            "the tenant's configured weight",
        ),
        Hook::Key => of(
            "for each request, if defined",
            "at most 64 bytes; the tenant's name is put before it. nil: the tenant is one flow",
            "the tenant is one flow",
        ),
        Hook::Weights => of(
            "every 100 ms for each model",
            "see [knobs](#knobs-of-routingweights)",
            TICK,
        ),
        Hook::Rank => of(
            "for each request, if defined; at most 8 candidates",
            "1 to `n`, then a reason of at most 64 bytes; nil: the native choice",
            "the native choice",
        ),
        Hook::EngineMap => of(
            "for each scrape, if defined",
            "`kv` 0 to 1, counts at least 0; what is left out is unknown",
            "that scrape counts as stale",
        ),
        Hook::EngineValidate => of(
            "when the catalog is loaded, by `policy check`, and before placement",
            "a list of complaints for people; nil or empty: none",
            "the profile is refused",
        ),
        Hook::EngineCommands => of(
            "when a shard is made",
            "1 to 16 commands, the last one is the shard; names from `executables` and the node's allow-list, never a shell",
            "the replica failed, with the reason",
        ),
        Hook::EngineClassifyError => of(
            "for each failed upstream call, if defined",
            "`client_fault`, `retry_other`, `fatal`; nil: the native rule",
            "transport errors and 5xx `retry_other`, 4xx and 501 `client_fault`, 429 is busy and no fault",
        ),
        Hook::EngineServesHttp => of(
            "when a shard is made, if defined",
            "true or false",
            "rank 0 does",
        ),
    }
}

fn knobs(page: &mut String) {
    line(page, "## Knobs of `routing.weights`\n");
    line(
        page,
        "| knob | default | least | most |\n| --- | --- | --- | --- |",
    );
    let defaults = serde_json::to_value(crate::RoutingWeights::default()).unwrap_or_default();
    for knob in &KNOBS {
        let default = defaults[knob.name].as_f64().unwrap_or(f64::NAN);
        let (name, (least, most)) = (knob.name, knob.range);
        line(
            page,
            &format!("| `{name}` | {default} | {least} | {most} |"),
        );
    }
    line(
        page,
        "\nA knob that is left out has its default. What each means: `routing.lua`, which `llmgw policy init DIR` writes.\n",
    );
}

fn failures(page: &mut String) {
    line(page, "## Failures\n");
    let kinds: Vec<String> = ErrorKind::ALL
        .iter()
        .map(|kind| format!("`{}`", kind.name()))
        .collect();
    line(
        page,
        &format!(
            "`llmgw_policy_errors_total{{hook,kind}}` counts them; kinds are {}. {TRIP_ERRORS} errors or {TRIP_OVERRUNS} overruns of the budget \
             within {} s switch a hook off until the next generation or `llmgw ctl policies untrip`. Hooks that run for each request have \
             {REQUEST_INTERRUPTS_MAX} interrupts, the hooks of one placement decision {} ms together. `classify_error` sees {} KiB of a body. \
             A value out of its range is clamped and counted; at load it is a mistake.\n",
            kinds.join(" "),
            TRIP_WINDOW.as_secs(),
            DECISION_MAX.as_millis(),
            ERROR_BODY_MAX_BYTES >> 10
        ),
    );
}

fn types(page: &mut String) {
    line(
        page,
        "## Inputs and results\n\n\
         Inputs are read-only. A `?` may be nil: in an input that is an unknown value, never 0; in a result the default. \
         A misspelt field of an input is an error that suggests the right one.\n",
    );
    let text = stubs::lua();
    for name in text.lines().filter_map(class_name) {
        let is_file = ["placement", "admission", "fairness", "routing"].contains(&name);
        if !is_file && name != "global" && name != "knobs" {
            line(page, &format!("### {name}\n"));
            class_table(page, name);
        }
    }
    // One empty line less at the end of the file.
    page.truncate(page.trim_end().len());
    page.push('\n');
}

fn class_table(page: &mut String, name: &str) {
    line(page, "| field | type | |\n| --- | --- | --- |");
    for (field, kind, about) in class_fields(name) {
        let kind = kind.replace('|', "\\|");
        line(page, &format!("| `{field}` | `{kind}` | {about} |"));
    }
    page.push('\n');
}

/// The fields of a class in the stubs: name, type, text. The text stands behind the type, or on lines before the field.
fn class_fields(class: &str) -> Vec<(String, String, String)> {
    let stubs = stubs::lua();
    let lines = stubs
        .lines()
        .skip_while(|line| class_name(line) != Some(class))
        .skip(1)
        .map_while(|line| line.strip_prefix("---"));
    let (mut fields, mut before) = (Vec::new(), Vec::new());
    for line in lines {
        let field = line
            .strip_prefix("@field ")
            .and_then(|field| field.split_once(' '));
        let Some((name, rest)) = field else {
            before.push(line.trim());
            continue;
        };
        let (kind, behind) = split_type(rest);
        let about = if behind.is_empty() {
            before.join(" ")
        } else {
            behind.to_owned()
        };
        before.clear();
        fields.push((name.to_owned(), kind.replace("llmgw.", ""), about));
    }
    fields
}

fn class_name(line: &str) -> Option<&str> {
    let name = line.strip_prefix("---@class ")?;
    name.strip_prefix("(exact) ")
        .unwrap_or(name)
        .strip_prefix("llmgw.")
}

/// A type as LuaLS writes it ends at the first space outside of brackets that follows neither `,` nor `:`.
fn split_type(text: &str) -> (&str, &str) {
    let mut depth = 0;
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        match c {
            '(' | '{' | '<' => depth += 1,
            ')' | '}' | '>' => depth -= 1,
            ' ' if depth == 0 && !matches!(before, ',' | ':') => {
                return (&text[..at], text[at..].trim());
            }
            _ => {}
        }
        before = c;
    }
    (text, "")
}

/// The globals that the prelude keeps.
fn kept() -> Vec<&'static str> {
    let prelude = include_str!("vm/prelude.lua");
    let list = prelude
        .split_once("local KEPT = {")
        .and_then(|(_, rest)| rest.split_once('}'))
        .map_or("", |(list, _)| list);
    list.split(',')
        .filter_map(|entry| entry.trim().strip_suffix(" = true"))
        .collect()
}

fn line(page: &mut String, text: &str) {
    // Writing into a String can't fail.
    let _ = writeln!(page, "{text}");
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Compares a committed file with what is generated, or writes it when `LLMGW_UPDATE_DOCS` is set.
    fn check(path: &str, expected: &str) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
        if std::env::var_os("LLMGW_UPDATE_DOCS").is_some() {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, expected).unwrap();
        }
        let found = std::fs::read_to_string(&file).unwrap_or_default();
        let differs = found
            .lines()
            .zip(expected.lines())
            .position(|(found, expected)| found != expected);
        assert!(
            found == expected,
            "{path} is not current, its line {} differs: LLMGW_UPDATE_DOCS=1 cargo test -p llmgw-plugins reference",
            differs.map_or("count".to_owned(), |at| (at + 1).to_string())
        );
    }

    #[test]
    fn the_committed_reference_is_what_the_types_say() {
        check("docs/reference/lua-api.md", &lua_reference());
    }

    #[test]
    fn the_committed_stubs_are_what_the_types_say() {
        for (key, text) in stubs::files() {
            check(&format!("policies/{key}"), &text);
        }
    }

    #[test]
    fn the_reference_names_every_hook_knob_and_field() {
        let page = lua_reference();
        for hook in Hook::ALL {
            let heading = format!("### `{}`\n", hook.name());
            assert!(page.contains(&heading), "{heading}");
        }
        for row in [
            "| `affinity_min` | 0.3 | 0 | 1 |",
            "| `band_hint?` | `string` | The band that the client asked for. |",
            "| `labels` | `table<string, string>` | Labels from the configuration. |",
            "| `oldest_ms?` | `number` | How long the oldest of them has waited. |",
            "| `log` | `fun(text: string)` | Writes to the log; not in hooks that run for every request. |",
            "map(samples: table<string, series[]>, previous: load?, dt_ms: number): load",
        ] {
            assert!(page.contains(row), "{row}");
        }
        assert!(kept().contains(&"rawlen") && kept().len() > 20);
    }
}
