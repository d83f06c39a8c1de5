//! Fleets in tests: a snapshot that a test varies, and the kernels of the control plane that it drives.

use std::cell::RefCell;
use std::rc::Rc;

use mlua::{Lua, MetaMethod, MultiValue, UserData, UserDataMethods, Value};
use serde_json::Value as Json;

use crate::set::PolicySet;
use crate::test::host::Host;
use crate::test::plain::Plain;
use crate::vm::sandbox::type_name;

/// What tests drive and this crate doesn't have: the pure kernels of placement, routing and flow control.
pub trait Kernels: Send + Sync {
    /// Names of the fleets that ship with llmgw.
    fn fleet_names(&self) -> Vec<String>;
    /// The text of one of them.
    fn fleet_text(&self, name: &str) -> Option<String>;
    /// Reads a snapshot. The error is one sentence that says where.
    fn open(&self, text: &str) -> Result<Box<dyn Fleet>, String>;
    /// Codes that nodes are refused with natively.
    fn refusal_codes(&self) -> Vec<&'static str>;
    /// Tenants that ask and replicas that answer for some time, under this set. The error is one sentence.
    fn simulate(&self, set: &PolicySet, ask: &Json) -> Result<Answer, String>;
}

/// One step of a path into a snapshot: `nodes`, `ml-07`, `gpus`, 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A field, or an entry of a map.
    Name(String),
    /// An item of a list, from 1 as Lua counts.
    Position(usize),
}

/// A snapshot that can be varied and asked.
pub trait Fleet {
    /// A copy that varies on its own.
    fn boxed_clone(&self) -> Box<dyn Fleet>;
    /// What is at a path. A path that can't be is an error with a suggestion.
    fn look(&self, path: &[Step]) -> Result<Found, String>;
    /// The names in the map at a path.
    fn names(&self, path: &[Step]) -> Result<Vec<String>, String>;
    /// All that is at a path.
    fn read(&self, path: &[Step]) -> Result<Json, String>;
    /// Changes one value; null takes it away.
    fn set(&mut self, path: &[Step], value: Json) -> Result<(), String>;
    /// Where a replica would go.
    fn place(&self, set: &PolicySet, ask: &Json) -> Result<Answer, String>;
    /// Which replica a request would go to.
    fn route(&self, set: &PolicySet, ask: &Json) -> Result<Answer, String>;
}

/// What is at a path.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// A plain value; null where it is unknown.
    Leaf(Json),
    /// A table with names.
    Map,
    /// A list of so many.
    List(usize),
}

/// A decision for a test.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// What the test gets.
    pub value: Json,
    /// What a failing test shows of it: one line, then one for each refusal.
    pub story: Vec<String>,
}

/// A fleet, or something in it, in the hands of a test.
#[derive(Clone)]
pub(crate) struct FleetPath {
    host: Rc<Host>,
    fleet: Rc<RefCell<Box<dyn Fleet>>>,
    path: Vec<Step>,
}

impl FleetPath {
    pub(crate) fn root(host: Rc<Host>, fleet: Box<dyn Fleet>) -> FleetPath {
        FleetPath {
            host,
            fleet: Rc::new(RefCell::new(fleet)),
            path: Vec::new(),
        }
    }

    /// Everything below it.
    pub(crate) fn read(&self) -> Result<Json, String> {
        self.fleet.borrow().read(&self.path)
    }

    fn step(&self, key: &Value) -> Result<FleetPath, String> {
        let step = match key {
            Value::String(name) => Step::Name(name.to_string_lossy()),
            Value::Integer(at) if *at > 0 => Step::Position(*at as usize),
            Value::Number(at) if *at > 0.0 && at.fract() == 0.0 => Step::Position(*at as usize),
            Value::Integer(_) | Value::Number(_) => return Err("lists begin at 1".to_owned()),
            other => return Err(format!("a fleet has no key of type {}", type_name(other))),
        };
        let mut below = self.clone();
        below.path.push(step);
        Ok(below)
    }

    fn index(&self, lua: &Lua, key: &Value) -> Result<Value, String> {
        let below = self.step(key)?;
        // Reading past a list's end is how Lua finds it.
        if let Some(Step::Position(at)) = below.path.last()
            && let Found::List(length) = self.look(&self.path)?
            && *at > length
        {
            return Ok(Value::Nil);
        }
        let value = match self.look(&below.path)? {
            Found::Leaf(leaf) => Plain::of_json(&leaf).lua(lua),
            Found::Map | Found::List(_) => lua.create_userdata(below).map(Value::UserData),
        };
        value.map_err(|e| e.to_string())
    }

    fn look(&self, path: &[Step]) -> Result<Found, String> {
        self.fleet.borrow().look(path)
    }

    /// What can be asked for here, in order.
    fn keys(&self) -> Result<Vec<Step>, String> {
        Ok(match self.look(&self.path)? {
            Found::Map => {
                let names = self.fleet.borrow().names(&self.path)?;
                names.into_iter().map(Step::Name).collect()
            }
            Found::List(length) => (1..=length).map(Step::Position).collect(),
            Found::Leaf(_) => Vec::new(),
        })
    }

    fn assign(&self, name: &Value, value: &Value) -> Result<(), String> {
        let below = self.step(name)?;
        let value = Plain::of(value)?.json()?;
        self.fleet.borrow_mut().set(&below.path, value)
    }

    fn ask(&self, lua: &Lua, args: &MultiValue, what: Asked) -> Result<Value, String> {
        let name = match what {
            Asked::Place => "place",
            Asked::Route => "route",
        };
        let ask = match args.front() {
            Some(table @ Value::Table(_)) => Plain::of(table)?.json()?,
            _ => {
                return Err(format!(
                    "fleet:{name} takes a table, e.g. fleet:{name}{{ model = \"...\" }}"
                ));
            }
        };
        let fleet = self.fleet.borrow();
        let answer = match what {
            Asked::Place => fleet.place(&self.host.set, &ask),
            Asked::Route => fleet.route(&self.host.set, &ask),
        }?;
        self.host.decided(&answer);
        self.host
            .strict(lua, &answer.value)
            .map_err(|e| e.to_string())
    }
}

#[derive(Clone, Copy)]
enum Asked {
    Place,
    Route,
}

impl UserData for FleetPath {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        methods.add_method("place", |lua, this, args: MultiValue| {
            let answer = this.ask(lua, &args, Asked::Place);
            answer.map_err(|reason| this.host.raise(lua, &reason))
        });
        methods.add_method("route", |lua, this, args: MultiValue| {
            let answer = this.ask(lua, &args, Asked::Route);
            answer.map_err(|reason| this.host.raise(lua, &reason))
        });
        methods.add_meta_method(MetaMethod::Index, |lua, this, name: Value| {
            this.index(lua, &name)
                .map_err(|reason| this.host.raise(lua, &reason))
        });
        methods.add_meta_method(
            MetaMethod::NewIndex,
            |lua, this, (name, value): (Value, Value)| {
                this.assign(&name, &value)
                    .map_err(|reason| this.host.raise(lua, &reason))
            },
        );
        methods.add_meta_method(MetaMethod::Len, |lua, this, ()| {
            let keys = this.keys();
            keys.map(|keys| keys.len())
                .map_err(|reason| this.host.raise(lua, &reason))
        });
        methods.add_meta_method(MetaMethod::Iter, |lua, this, ()| {
            let this = this.clone();
            let keys = this
                .keys()
                .map_err(|reason| this.host.raise(lua, &reason))?;
            let mut keys = keys.into_iter();
            lua.create_function_mut(move |lua, _: MultiValue| {
                let key = match keys.next() {
                    None => return Ok((Value::Nil, Value::Nil)),
                    Some(Step::Name(name)) => Value::String(lua.create_string(&name)?),
                    Some(Step::Position(at)) => Value::Number(at as f64),
                };
                let value = this
                    .index(lua, &key)
                    .map_err(|reason| this.host.raise(lua, &reason))?;
                Ok((key, value))
            })
        });
    }
}
