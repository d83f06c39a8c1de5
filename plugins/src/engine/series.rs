//! A scrape as `engine.map` sees it.

use mlua::{Lua, Table, Value};

use crate::engine::metrics::Load;
use crate::engine::samples::Samples;

/// Series of one name that a script sees at most.
const SERIES_MAX: usize = 4096;

/// `samples[name]` is a list of `{value, labels}`, nil where there is no such metric; `previous` is what `map` returned
/// the last time, nil at first.
///
/// All names are put in, since a function that did it on demand would need the scrape to outlive the call.
pub(crate) fn tables(
    lua: &Lua,
    samples: &Samples,
    previous: Option<&Load>,
) -> mlua::Result<(Table, Value)> {
    let table = lua.create_table()?;
    for (name, labels, value) in samples.all().take(SERIES_MAX) {
        let series = lua.create_table_with_capacity(0, 2)?;
        series.raw_set("value", value)?;
        series.raw_set("labels", lua.create_table_from(labels)?)?;
        let list: Option<Table> = table.raw_get(name)?;
        match list {
            Some(list) => list.raw_push(series)?,
            None => table.raw_set(name, lua.create_sequence_from([series])?)?,
        }
    }
    let previous = match previous {
        None => Value::Nil,
        Some(load) => {
            let fields = [
                ("running", load.running),
                ("waiting", load.waiting),
                ("kv", load.kv),
            ];
            Value::Table(lua.create_table_from(fields)?)
        }
    };
    Ok((table, previous))
}
