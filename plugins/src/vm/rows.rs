//! Inputs inside of a VM: one read-only table for each view, kept, and refreshed where something changed.
//!
//! Building fresh tables for 8 candidates costs 3.8 µs, refreshing kept ones 1.2 µs. What differs is only noted here; the call
//! that needs it writes it, see `crossing`.

use std::collections::HashMap;
use std::ffi::c_int;

use mlua::{Lua, LuaString, Table};

use crate::hooks::views::{BandQueue, Domain, Field, ReplicaView, View, Visitor};
use crate::vm::crossing::{Changes, Key, NameAt, RowAt, Written};
use crate::vm::sandbox::Sandbox;

/// Replica rows that one VM keeps; when there are more replicas than that, all rows are given out anew.
const REPLICA_ROWS_MAX: usize = 1024;

/// What the table holds, to compare with.
#[derive(Clone, Debug, PartialEq)]
enum Shadow {
    Nil,
    Flag(bool),
    Number(f64),
    Text(String),
    Labels(Vec<(String, String)>),
    /// Compared by nobody: rebuilt each time.
    Fresh,
}

/// A view's shape in one VM: its interned names and its metatable.
pub(crate) struct Shape {
    names: Vec<NameAt>,
    keys: Vec<LuaString>,
    metatable: Table,
}

/// One input table.
pub(crate) struct Row {
    at: RowAt,
    table: Table,
    shadow: Vec<Shadow>,
}

impl Shape {
    pub(crate) fn of<V: View>(sandbox: &Sandbox) -> mlua::Result<Shape> {
        let keys = V::FIELDS
            .iter()
            .map(|name| sandbox.lua.create_string(name))
            .collect::<mlua::Result<_>>()?;
        Ok(Shape {
            names: sandbox.crossing.add_names(V::FIELDS)?,
            keys,
            metatable: sandbox.input_metatable(V::NOUN, V::FIELDS)?,
        })
    }

    /// An empty row.
    pub(crate) fn row(&self, sandbox: &Sandbox) -> mlua::Result<Row> {
        let table = sandbox
            .lua
            .create_table_with_capacity(0, self.names.len())?;
        table.set_metatable(Some(self.metatable.clone()))?;
        table.set_readonly(true);
        Ok(Row {
            at: sandbox.crossing.add_row(&table)?,
            table,
            shadow: vec![Shadow::Nil; self.names.len()],
        })
    }
}

impl Row {
    pub(crate) fn at(&self) -> RowAt {
        self.at
    }

    pub(crate) fn table(&self) -> Table {
        self.table.clone()
    }

    /// Notes what differs, to be written with the next call. Fields that are tables themselves are written at once.
    pub(crate) fn refresh<V: View>(
        &mut self,
        lua: &Lua,
        shape: &Shape,
        view: &V,
        changes: &mut Changes,
    ) -> mlua::Result<RowAt> {
        let mut refresh = Refresh {
            row: self,
            lua,
            shape,
            changes,
            result: Ok(()),
        };
        view.visit(&mut refresh);
        refresh.result.map(|()| self.at)
    }

    #[inline(never)]
    fn change(
        &self,
        lua: &Lua,
        shape: &Shape,
        position: usize,
        field: &Field<'_>,
        changes: &mut Changes,
    ) -> mlua::Result<()> {
        let key = Key::Name(shape.names[position]);
        match *field {
            Field::Nil => changes.push(self.at, key, Written::Nil),
            Field::Flag(flag) => changes.push(self.at, key, Written::Flag(flag)),
            Field::Number(number) => changes.push(self.at, key, Written::Number(number)),
            Field::Text(text) => changes.push_text(self.at, key, text),
            Field::Labels(_)
            | Field::Bands(_)
            | Field::List(_)
            | Field::Ports(_)
            | Field::Domains(_) => {
                return write_table(lua, &self.table, &shape.keys[position], field);
            }
        }
        Ok(())
    }
}

/// A row that is being refreshed.
struct Refresh<'r> {
    row: &'r mut Row,
    lua: &'r Lua,
    shape: &'r Shape,
    changes: &'r mut Changes,
    result: mlua::Result<()>,
}

impl<'v> Visitor<'v> for Refresh<'_> {
    // Most fields are as they were, and nothing but this is done for them: 144 times in a call of `routing.rank`.
    #[inline(always)]
    fn field(&mut self, position: usize, field: Field<'v>) {
        let Some(shadow) = self.row.shadow.get_mut(position) else {
            return;
        };
        if !shadow.equals(&field) && self.result.is_ok() {
            shadow.set(&field);
            self.result = self
                .row
                .change(self.lua, self.shape, position, &field, self.changes);
        }
    }
}

impl Shadow {
    #[inline(always)]
    fn equals(&self, field: &Field<'_>) -> bool {
        match (self, field) {
            (Shadow::Nil, Field::Nil) => true,
            (Shadow::Flag(a), Field::Flag(b)) => a == b,
            (Shadow::Number(a), Field::Number(b)) => a.to_bits() == b.to_bits(),
            (Shadow::Text(a), Field::Text(b)) => a == b,
            (Shadow::Labels(a), Field::Labels(b)) => a == b,
            _ => false,
        }
    }

    fn set(&mut self, field: &Field<'_>) {
        match (&mut *self, *field) {
            (Shadow::Text(old), Field::Text(text)) => text.clone_into(old),
            (_, Field::Nil) => *self = Shadow::Nil,
            (_, Field::Flag(flag)) => *self = Shadow::Flag(flag),
            (_, Field::Number(number)) => *self = Shadow::Number(number),
            (_, Field::Text(text)) => *self = Shadow::Text(text.to_owned()),
            (_, Field::Labels(labels)) => *self = Shadow::Labels(labels.to_vec()),
            (_, Field::Bands(_) | Field::List(_) | Field::Ports(_) | Field::Domains(_)) => {
                *self = Shadow::Fresh;
            }
        }
    }
}

/// Writes a field that is a table itself.
fn write_table(lua: &Lua, table: &Table, key: &LuaString, field: &Field<'_>) -> mlua::Result<()> {
    let inner = match *field {
        Field::Labels(labels) => lua.create_table_from(
            labels
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str())),
        )?,
        Field::Bands(bands) => band_table(lua, bands)?,
        Field::Ports(ports) => lua.create_sequence_from(ports.iter().copied())?,
        Field::Domains(domains) => domain_list(lua, domains)?,
        Field::List(list) => lua.create_sequence_from(list.iter().map(String::as_str))?,
        Field::Nil | Field::Flag(_) | Field::Number(_) | Field::Text(_) => return Ok(()),
    };
    inner.set_readonly(true);
    table.set_readonly(false);
    let result = table.raw_set(key, inner);
    table.set_readonly(true);
    result
}

fn band_table(lua: &Lua, bands: &[BandQueue<'_>]) -> mlua::Result<Table> {
    let table = lua.create_table_with_capacity(0, bands.len())?;
    for band in bands {
        let inner = lua.create_table_with_capacity(0, 2)?;
        inner.raw_set("queued", band.queued as f64)?;
        inner.raw_set("oldest_ms", band.oldest_ms)?;
        inner.set_readonly(true);
        table.raw_set(band.name, inner)?;
    }
    Ok(table)
}

fn domain_list(lua: &Lua, domains: &[Domain]) -> mlua::Result<Table> {
    let list = lua.create_table_with_capacity(domains.len(), 0)?;
    for domain in domains {
        let inner = lua.create_table_with_capacity(0, 2)?;
        inner.raw_set("gpus", domain.gpus)?;
        inner.raw_set("free", domain.free)?;
        inner.set_readonly(true);
        list.raw_push(inner)?;
    }
    Ok(list)
}

/// The rows of `routing.rank`'s candidates, by replica, and the list that it gets.
pub(crate) struct ReplicaRows {
    shape: Shape,
    /// Rows that were made, the first `by_id.len()` of them given to replicas.
    rows: Vec<ReplicaRow>,
    by_id: HashMap<String, usize>,
    list: RowAt,
    /// Positions in `rows` of what is in the list, in its order.
    listed: Vec<usize>,
}

struct ReplicaRow {
    id: String,
    row: Row,
}

impl ReplicaRows {
    pub(crate) fn new(sandbox: &Sandbox) -> mlua::Result<ReplicaRows> {
        let list = sandbox.lua.create_table()?;
        list.set_readonly(true);
        Ok(ReplicaRows {
            shape: Shape::of::<ReplicaView<'_>>(sandbox)?,
            rows: Vec::new(),
            by_id: HashMap::new(),
            list: sandbox.crossing.add_row(&list)?,
            listed: Vec::new(),
        })
    }

    /// Notes what differs in rows and list, and gives the list.
    pub(crate) fn refresh(
        &mut self,
        sandbox: &Sandbox,
        replicas: &[ReplicaView<'_>],
        changes: &mut Changes,
    ) -> mlua::Result<RowAt> {
        if self.by_id.len() + replicas.len() > REPLICA_ROWS_MAX {
            self.by_id.clear();
            self.shorten(0, changes);
        }
        for (at, replica) in replicas.iter().enumerate() {
            let found = self.find(sandbox, at, replica.id)?;
            let Some(ReplicaRow { row, .. }) = self.rows.get_mut(found) else {
                continue;
            };
            let row = row.refresh(&sandbox.lua, &self.shape, replica, changes)?;
            match self.listed.get_mut(at) {
                Some(listed) if *listed == found => continue,
                Some(listed) => *listed = found,
                None => self.listed.push(found),
            }
            changes.push(self.list, position(at), Written::Row(row));
        }
        self.shorten(replicas.len(), changes);
        Ok(self.list)
    }

    /// The replica's row. Mostly the candidates are those of the last call, in the same order.
    fn find(&mut self, sandbox: &Sandbox, at: usize, id: &str) -> mlua::Result<usize> {
        let same = |listed: &&usize| self.rows.get(**listed).is_some_and(|row| row.id == id);
        let listed = self.listed.get(at).filter(same);
        if let Some(found) = listed.or_else(|| self.by_id.get(id)) {
            return Ok(*found);
        }
        let next = self.by_id.len();
        match self.rows.get_mut(next) {
            Some(row) => id.clone_into(&mut row.id),
            None => self.rows.push(ReplicaRow {
                id: id.to_owned(),
                row: self.shape.row(sandbox)?,
            }),
        }
        self.by_id.insert(id.to_owned(), next);
        Ok(next)
    }

    /// Takes the list's end off.
    fn shorten(&mut self, len: usize, changes: &mut Changes) {
        while self.listed.len() > len {
            self.listed.pop();
            changes.push(self.list, position(self.listed.len()), Written::Nil);
        }
    }
}

/// Lua counts from 1.
fn position(at: usize) -> Key {
    Key::At(at as c_int + 1)
}
