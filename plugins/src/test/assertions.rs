//! `llmgw.test`: how cases are declared, and what they can assert.

use std::rc::Rc;

use mlua::{Function, Lua, MultiValue, Table, Value};

use crate::test::fleet::{Answer, FleetPath};
use crate::test::golden;
use crate::test::host::{CASES_MAX, Declared, Host};
use crate::test::plain::Plain;
use crate::test::report::TestFailure;
use crate::vm::sandbox::{fault, type_name};

/// Inputs of one property.
const INPUTS_MAX: u64 = 100_000;

/// Makes the table. `find` is the VM's own `string.find`.
pub(crate) fn table(lua: &Lua, host: &Rc<Host>) -> mlua::Result<Table> {
    let table = lua.create_table()?;
    declarations(lua, host, &table)?;
    assertions(lua, host, &table)?;
    failing_calls(lua, host, &table)?;
    kernels(lua, host, &table)?;
    crate::test::hooks::install(lua, host, &table)?;
    Ok(table)
}

fn declarations(lua: &Lua, host: &Rc<Host>, table: &Table) -> mlua::Result<()> {
    let own = Rc::clone(host);
    let case = lua.create_function(move |lua, (name, function): (Value, Value)| {
        declare(lua, &own, &name, None, &function)
    })?;
    table.raw_set("case", case)?;
    let own = Rc::clone(host);
    let property = lua.create_function(
        move |lua, (name, inputs, function): (Value, Value, Value)| {
            let inputs = match inputs {
                Value::Integer(n) if n > 0 => n as u64,
                Value::Number(n) if n >= 1.0 && n.fract() == 0.0 && n <= INPUTS_MAX as f64 => {
                    n as u64
                }
                _ => 0,
            };
            if !(1..=INPUTS_MAX).contains(&inputs) {
                let reason =
                    format!("t.property takes a name, 1 to {INPUTS_MAX} inputs, and a function");
                return Err(own.raise(lua, &reason));
            }
            declare(lua, &own, &name, Some(inputs), &function)
        },
    )?;
    table.raw_set("property", property)
}

fn declare(
    lua: &Lua,
    host: &Host,
    name: &Value,
    inputs: Option<u64>,
    function: &Value,
) -> mlua::Result<()> {
    let (Value::String(name), Value::Function(function)) = (name, function) else {
        let what = if inputs.is_some() {
            "t.property"
        } else {
            "t.case"
        };
        return Err(host.raise(lua, &format!("{what} takes a name and a function")));
    };
    if !host.declaring.get() {
        return Err(host.raise(lua, "a case can't be declared inside of another one"));
    }
    let name = name.to_string_lossy();
    let line = host.line(lua);
    let mut declared = host.declared.borrow_mut();
    if declared.iter().any(|known| known.name == name) {
        return Err(host.raise(lua, &format!("there is a case '{name}' already")));
    }
    if declared.len() == CASES_MAX {
        return Err(host.raise(lua, &format!("more than {CASES_MAX} cases in one file")));
    }
    declared.push(Declared {
        name,
        line,
        inputs,
        function: function.clone(),
    });
    Ok(())
}

fn assertions(lua: &Lua, host: &Rc<Host>, table: &Table) -> mlua::Result<()> {
    let own = Rc::clone(host);
    let equal = lua.create_function(
        move |lua, (actual, expected, note): (Value, Value, Option<String>)| {
            equal(lua, &own, &actual, &expected, note)
        },
    )?;
    table.raw_set("equal", equal)?;
    for name in ["ok", "truthy"] {
        let own = Rc::clone(host);
        let ok = lua.create_function(move |lua, (value, note): (Value, Option<String>)| {
            if !matches!(value, Value::Nil | Value::Boolean(false)) {
                return Ok(value);
            }
            let failure = TestFailure {
                message: note.unwrap_or_else(|| "is not true".to_owned()),
                expected: Some("true, or any value".to_owned()),
                actual: Some(show(&value)),
                ..TestFailure::default()
            };
            Err(own.fail(lua, failure))
        })?;
        table.raw_set(name, ok)?;
    }
    let own = Rc::clone(host);
    let near = lua.create_function(
        move |lua, (actual, expected, within): (Value, Value, Option<f64>)| {
            near(lua, &own, &actual, &expected, within)
        },
    )?;
    table.raw_set("near", near)
}

fn equal(
    lua: &Lua,
    host: &Host,
    actual: &Value,
    expected: &Value,
    note: Option<String>,
) -> mlua::Result<()> {
    let plain = |value: &Value| Plain::of(value).map_err(|reason| host.raise(lua, &reason));
    let (actual, expected) = (plain(actual)?, plain(expected)?);
    let Some(found) = actual.difference(&expected) else {
        return Ok(());
    };
    let difference = (!found.path.is_empty()).then(|| {
        format!(
            "at {}: expected {}, actual {}",
            found.path, found.expected, found.actual
        )
    });
    let failure = TestFailure {
        message: note.unwrap_or_else(|| "the two differ".to_owned()),
        expected: Some(expected.show()),
        actual: Some(actual.show()),
        difference,
        ..TestFailure::default()
    };
    Err(host.fail(lua, failure))
}

/// `within` is the largest difference allowed, by default a millionth of the expected number.
fn near(
    lua: &Lua,
    host: &Host,
    actual: &Value,
    expected: &Value,
    within: Option<f64>,
) -> mlua::Result<()> {
    const DEFAULT_SHARE: f64 = 1e-6;
    let number = |value: &Value| match value {
        Value::Integer(number) => Ok(*number as f64),
        Value::Number(number) => Ok(*number),
        other => Err(host.raise(
            lua,
            &format!("t.near compares numbers, not a {}", type_name(other)),
        )),
    };
    let expected = number(expected)?;
    let within = within.unwrap_or(DEFAULT_SHARE * expected.abs().max(1.0));
    let found = match actual {
        Value::Nil => None,
        actual => Some(number(actual)?),
    };
    if found.is_some_and(|actual| (actual - expected).abs() <= within || actual == expected) {
        return Ok(());
    }
    let failure = TestFailure {
        message: "the two are not near each other".to_owned(),
        expected: Some(format!("{expected} ± {within}")),
        actual: Some(show(actual)),
        ..TestFailure::default()
    };
    Err(host.fail(lua, failure))
}

fn failing_calls(lua: &Lua, host: &Rc<Host>, table: &Table) -> mlua::Result<()> {
    let strings: Table = lua.globals().get("string")?;
    let find: Function = strings.get("find")?;
    let own = Rc::clone(host);
    let error = lua.create_function(
        move |lua, (function, pattern): (Function, Option<String>)| {
            let raised = match function.call::<MultiValue>(()) {
                Err(error) => fault(&error).message,
                Ok(_) => {
                    let failure = TestFailure {
                        message: "no error was raised".to_owned(),
                        expected: Some(match &pattern {
                            Some(pattern) => format!("an error like {pattern:?}"),
                            None => "an error".to_owned(),
                        }),
                        actual: Some("none".to_owned()),
                        ..TestFailure::default()
                    };
                    return Err(own.fail(lua, failure));
                }
            };
            let Some(pattern) = pattern else {
                return Ok(raised);
            };
            let as_text: Value = find.call((raised.as_str(), pattern.as_str(), 1, true))?;
            let matches = !as_text.is_nil()
                || !find
                    .call::<Value>((raised.as_str(), pattern.as_str()))?
                    .is_nil();
            if matches {
                return Ok(raised);
            }
            let failure = TestFailure {
                message: "another error was raised".to_owned(),
                expected: Some(format!("an error like {pattern:?}")),
                actual: Some(format!("{raised:?}")),
                ..TestFailure::default()
            };
            Err(own.fail(lua, failure))
        },
    )?;
    table.raw_set("error", error)?;
    let own = Rc::clone(host);
    let fail = lua.create_function(move |lua, note: Option<String>| -> mlua::Result<()> {
        let failure = TestFailure {
            message: note.unwrap_or_else(|| "the test says so".to_owned()),
            ..TestFailure::default()
        };
        Err(own.fail(lua, failure))
    })?;
    table.raw_set("fail", fail)
}

fn kernels(lua: &Lua, host: &Rc<Host>, table: &Table) -> mlua::Result<()> {
    let own = Rc::clone(host);
    let fleet = lua.create_function(move |lua, name: String| {
        let fleet = own.fleet(&name).map_err(|reason| own.raise(lua, &reason))?;
        Ok(FleetPath::root(Rc::clone(&own), fleet))
    })?;
    table.raw_set("fleet", fleet)?;
    let own = Rc::clone(host);
    let inject = lua.create_function(move |lua, (hook, kind): (String, String)| {
        own.inject(&hook, &kind)
            .map_err(|reason| own.raise(lua, &reason))
    })?;
    table.raw_set("fault", inject)?;
    let own = Rc::clone(host);
    let golden = lua.create_function(move |lua, value: Value| {
        let json = Plain::of(&value).and_then(|plain| plain.json());
        let json = json.map_err(|reason| own.raise(lua, &reason))?;
        match golden::compare(&own, &json) {
            Ok(()) => Ok(()),
            Err(failure) => Err(own.fail(lua, *failure)),
        }
    })?;
    table.raw_set("golden", golden)?;
    let own = Rc::clone(host);
    let simulate = lua.create_function(move |lua, ask: Value| {
        let answer = simulate(&own, &ask).map_err(|reason| own.raise(lua, &reason))?;
        own.decided(&answer);
        own.strict(lua, &answer.value)
    })?;
    table.raw_set("simulate", simulate)
}

fn simulate(host: &Host, ask: &Value) -> Result<Answer, String> {
    let Some(kernels) = &host.kernels else {
        return Err("nothing can be simulated here: there are no queues to drive".to_owned());
    };
    if !matches!(ask, Value::Table(_)) {
        return Err("t.simulate takes a table, e.g. t.simulate{ tenants = { {} } }".to_owned());
    }
    kernels.simulate(&host.set, &Plain::of(ask)?.json()?)
}

fn show(value: &Value) -> String {
    Plain::of(value).map_or_else(|reason| reason, |plain| plain.show())
}
