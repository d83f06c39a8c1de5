//! Lua values as plain data: to compare them deeply, to show them, and to exchange them with the kernels as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;

use mlua::{Lua, Table, Value};
use serde_json::{Map, Value as Json};

use crate::test::fleet::FleetPath;
use crate::vm::sandbox::{cut, type_name};

/// Tables in tables.
const DEPTH_MAX: usize = 32;
/// Values in one value.
const VALUES_MAX: usize = 200_000;
/// What is shown of a value.
const SHOWN_MAX_BYTES: usize = 1000;

/// A value without identity.
#[derive(Clone, Debug)]
pub(crate) enum Plain {
    Nil,
    Flag(bool),
    Number(f64),
    Text(String),
    Table(BTreeMap<Key, Plain>),
    /// A function or the like: what it is called.
    Other(String),
}

/// A key of a table; numbers come first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    Position(i64),
    Text(String),
    Other(String),
}

impl Plain {
    /// Copies a value. The error says why it can't be copied.
    pub(crate) fn of(value: &Value) -> Result<Plain, String> {
        let mut left = VALUES_MAX;
        copy(value, DEPTH_MAX, &mut left)
    }

    /// JSON, in which a table is a list when its keys are 1 to n. NaN and the infinities have no JSON.
    pub(crate) fn json(&self) -> Result<Json, String> {
        match self {
            Plain::Nil => Ok(Json::Null),
            Plain::Flag(flag) => Ok(Json::Bool(*flag)),
            Plain::Number(number) => json_number(*number),
            Plain::Text(text) => Ok(Json::String(text.clone())),
            Plain::Table(table) if is_list(table) => {
                table.values().map(Plain::json).collect::<Result<_, _>>()
            }
            Plain::Table(table) => {
                let mut object = Map::new();
                for (key, value) in table {
                    object.insert(key.plain_name(), value.json()?);
                }
                Ok(Json::Object(object))
            }
            Plain::Other(name) => Err(format!("a {name} is no data")),
        }
    }

    pub(crate) fn of_json(json: &Json) -> Plain {
        match json {
            Json::Null => Plain::Nil,
            Json::Bool(flag) => Plain::Flag(*flag),
            Json::Number(number) => Plain::Number(number.as_f64().unwrap_or(f64::NAN)),
            Json::String(text) => Plain::Text(text.clone()),
            Json::Array(list) => Plain::Table(
                list.iter()
                    .enumerate()
                    .map(|(at, value)| (Key::Position(at as i64 + 1), Plain::of_json(value)))
                    .collect(),
            ),
            Json::Object(object) => Plain::Table(
                object
                    .iter()
                    .filter(|(_, value)| !value.is_null())
                    .map(|(name, value)| (Key::Text(name.clone()), Plain::of_json(value)))
                    .collect(),
            ),
        }
    }

    /// As Lua would write it, keys sorted, cut where it is long.
    pub(crate) fn show(&self) -> String {
        let mut text = String::new();
        self.write(&mut text);
        cut(&text, SHOWN_MAX_BYTES)
    }

    fn write(&self, out: &mut String) {
        if out.len() > SHOWN_MAX_BYTES {
            return;
        }
        // Writing into a String can't fail.
        let _ = match self {
            Plain::Nil => write!(out, "nil"),
            Plain::Flag(flag) => write!(out, "{flag}"),
            Plain::Number(number) => write!(out, "{number}"),
            Plain::Text(text) => write!(out, "{text:?}"),
            Plain::Other(name) => write!(out, "{name}"),
            Plain::Table(table) if table.is_empty() => write!(out, "{{}}"),
            Plain::Table(table) => {
                let list = is_list(table);
                out.push_str("{ ");
                for (at, (key, value)) in table.iter().enumerate() {
                    if at > 0 {
                        out.push_str(", ");
                    }
                    if !list {
                        out.push_str(&key.show());
                        out.push_str(" = ");
                    }
                    value.write(out);
                }
                write!(out, " }}")
            }
        };
    }

    /// Where two values differ first: the path, and what stands there in each. `None`: they are equal. NaN equals NaN.
    pub(crate) fn difference(&self, other: &Plain) -> Option<Difference> {
        match (self, other) {
            (Plain::Nil, Plain::Nil) => None,
            (Plain::Flag(a), Plain::Flag(b)) if a == b => None,
            (Plain::Number(a), Plain::Number(b)) if a == b || (a.is_nan() && b.is_nan()) => None,
            (Plain::Text(a), Plain::Text(b)) | (Plain::Other(a), Plain::Other(b)) if a == b => None,
            (Plain::Table(a), Plain::Table(b)) => {
                let keys: std::collections::BTreeSet<&Key> = a.keys().chain(b.keys()).collect();
                keys.into_iter().find_map(|key| {
                    let (a, b) = (a.get(key), b.get(key));
                    let nil = Plain::Nil;
                    let found = a.unwrap_or(&nil).difference(b.unwrap_or(&nil))?;
                    Some(Difference {
                        path: format!("{}{}", key.step(), found.path),
                        ..found
                    })
                })
            }
            _ => Some(Difference {
                path: String::new(),
                actual: self.show(),
                expected: other.show(),
            }),
        }
    }

    /// Writes it into a VM.
    pub(crate) fn lua(&self, lua: &Lua) -> mlua::Result<Value> {
        Ok(match self {
            Plain::Nil | Plain::Other(_) => Value::Nil,
            Plain::Flag(flag) => Value::Boolean(*flag),
            Plain::Number(number) => Value::Number(*number),
            Plain::Text(text) => Value::String(lua.create_string(text)?),
            Plain::Table(entries) => {
                let table = lua.create_table()?;
                for (key, value) in entries {
                    let value = value.lua(lua)?;
                    match key {
                        Key::Position(at) => table.raw_set(*at, value)?,
                        Key::Text(name) | Key::Other(name) => {
                            table.raw_set(name.as_str(), value)?
                        }
                    }
                }
                Value::Table(table)
            }
        })
    }
}

/// The first place where two values differ.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// `.nodes[1]`; empty: the values themselves.
    pub(crate) path: String,
    pub(crate) actual: String,
    pub(crate) expected: String,
}

impl Key {
    fn plain_name(&self) -> String {
        match self {
            Key::Position(at) => at.to_string(),
            Key::Text(name) | Key::Other(name) => name.clone(),
        }
    }

    fn is_word(name: &str) -> bool {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    }

    fn show(&self) -> String {
        match self {
            Key::Position(at) => format!("[{at}]"),
            Key::Text(name) if Key::is_word(name) => name.clone(),
            Key::Text(name) => format!("[{name:?}]"),
            Key::Other(name) => format!("[{name}]"),
        }
    }

    fn step(&self) -> String {
        match self {
            Key::Text(name) if Key::is_word(name) => format!(".{name}"),
            other => other.show(),
        }
    }
}

/// Keys 1 to n, and at least one of them.
fn is_list(table: &BTreeMap<Key, Plain>) -> bool {
    let mut keys = table.keys().zip(1..);
    !table.is_empty() && keys.all(|(key, at)| *key == Key::Position(at))
}

fn json_number(number: f64) -> Result<Json, String> {
    /// Whole numbers beyond this are not exact as doubles.
    const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;
    if number.fract() == 0.0 && number.abs() <= WHOLE_MAX {
        return Ok(Json::from(number as i64));
    }
    serde_json::Number::from_f64(number)
        .map(Json::Number)
        .ok_or_else(|| format!("{number} is no number that can be written down"))
}

fn copy(value: &Value, depth: usize, left: &mut usize) -> Result<Plain, String> {
    *left = left
        .checked_sub(1)
        .ok_or_else(|| format!("the value holds more than {VALUES_MAX} values"))?;
    Ok(match value {
        Value::Nil => Plain::Nil,
        Value::Boolean(flag) => Plain::Flag(*flag),
        Value::Integer(number) => Plain::Number(*number as f64),
        Value::Number(number) => Plain::Number(*number),
        Value::String(text) => Plain::Text(text.to_string_lossy()),
        Value::Table(table) => Plain::Table(copy_table(table, depth, left)?),
        Value::UserData(data) => match data.borrow::<FleetPath>() {
            Ok(path) => Plain::of_json(&path.read()?),
            Err(_) => Plain::Other("userdata".to_owned()),
        },
        other => Plain::Other(type_name(other).to_owned()),
    })
}

fn copy_table(
    table: &Table,
    depth: usize,
    left: &mut usize,
) -> Result<BTreeMap<Key, Plain>, String> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(format!(
            "the value has more than {DEPTH_MAX} tables in tables"
        ));
    };
    let mut entries = BTreeMap::new();
    for pair in table.pairs::<Value, Value>() {
        let (key, value) = pair.map_err(|e| e.to_string())?;
        let key = match key {
            Value::Integer(at) => Key::Position(at),
            Value::Number(at) if at.fract() == 0.0 && at.abs() < 1e15 => Key::Position(at as i64),
            Value::Number(at) => Key::Other(at.to_string()),
            Value::String(name) => Key::Text(name.to_string_lossy()),
            other => Key::Other(format!("{} {}", type_name(&other), entries.len())),
        };
        entries.insert(key, copy(&value, depth, left)?);
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(lua: &Lua, text: &str) -> Plain {
        Plain::of(&lua.load(text).eval().expect("it runs")).expect("it is plain")
    }

    #[test]
    fn the_first_difference_is_named_with_its_path() {
        let lua = Lua::new();
        let cases = [
            ("1", "1", None),
            ("0/0", "0/0", None),
            (
                "{ a = { 1, 2 } }",
                "{ a = { 1, 3 } }",
                Some((".a[2]", "2", "3")),
            ),
            ("{ ['ml-07'] = 1 }", "{}", Some(("[\"ml-07\"]", "1", "nil"))),
            ("{}", "{ x = false }", Some((".x", "nil", "false"))),
            ("'1'", "1", Some(("", "\"1\"", "1"))),
            ("{ 1, 2, 3 }", "{ 1, 2 }", Some(("[3]", "3", "nil"))),
        ];
        for (actual, expected, wanted) in cases {
            let found = plain(&lua, actual).difference(&plain(&lua, expected));
            let found = found.map(|d| (d.path, d.actual, d.expected));
            let wanted = wanted.map(|(p, a, e)| (p.to_owned(), a.to_owned(), e.to_owned()));
            assert_eq!(found, wanted, "{actual} and {expected}");
        }
    }

    #[test]
    fn a_value_is_shown_as_lua_writes_it() {
        let lua = Lua::new();
        for (text, shown) in [
            ("{ 1, 'x', { y = true } }", "{ 1, \"x\", { y = true } }"),
            ("{ ['a b'] = 0.5 }", "{ [\"a b\"] = 0.5 }"),
            ("{ [3] = 1 }", "{ [3] = 1 }"),
            ("print", "function"),
            ("{}", "{}"),
        ] {
            assert_eq!(plain(&lua, text).show(), shown);
        }
    }

    #[test]
    fn a_table_that_holds_itself_is_refused() {
        let lua = Lua::new();
        let value = lua
            .load("local x = {}; x.x = x; return x")
            .eval()
            .expect("it runs");
        assert!(Plain::of(&value).is_err());
    }
}
