//! What a policy gets to see of its VM.

use super::*;

/// As the contract lists them, by the alphabet.
const GLOBALS: &str = "assert bit32 buffer error getmetatable ipairs llmgw math next pairs pcall rawequal rawget rawlen \
                       require select setmetatable string table tonumber tostring type typeof utf8";

fn sandbox() -> Sandbox {
    Sandbox::new(Arc::new(Program {
        generation: 1,
        modules: BTreeMap::new(),
        coverage: false,
    }))
    .unwrap()
}

/// Names in a table and in whatever it gets missing ones from.
fn names(table: &Table) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut next = Some(table.clone());
    while let Some(table) = next {
        names.extend(table.pairs::<String, Value>().map(|pair| pair.unwrap().0));
        let meta = table.metatable();
        next = meta.and_then(|meta| meta.raw_get("__index").ok());
    }
    names.sort();
    names.dedup();
    names
}

#[test]
fn the_globals_are_those_of_the_contract_and_no_others() {
    let sandbox = sandbox();
    let globals = sandbox.lua.globals();
    assert_eq!(names(&globals).join(" "), GLOBALS);
    let llmgw: Table = globals.get("llmgw").unwrap();
    assert_eq!(names(&llmgw), ["api", "generation", "log", "rand"]);
    let math: Table = globals.get("math").unwrap();
    let chance = names(&math)
        .into_iter()
        .find(|name| name.starts_with("random"));
    assert_eq!(chance, None, "chance comes from llmgw.rand");
}

#[test]
fn every_global_and_every_library_is_locked() {
    let sandbox = sandbox();
    let globals = sandbox.lua.globals();
    assert!(globals.is_readonly());
    for name in names(&globals) {
        if let Value::Table(library) = globals.get(name.as_str()).unwrap() {
            assert!(library.is_readonly(), "{name}");
        }
    }
}

#[test]
fn the_log_takes_ten_lines_a_second() {
    let lines = LogLines::new();
    let admitted = |second| (0..100).filter(|_| lines.admit(second)).count();
    assert_eq!(admitted(0), 10);
    assert_eq!(admitted(0), 0, "it is still the same second");
    assert_eq!(admitted(1), 10);
    assert_eq!(admitted(7), 10);
}
