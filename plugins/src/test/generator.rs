//! `g` in a property: draws inputs that shrink.

use std::rc::Rc;

use mlua::{Function, Lua, Table, UserData, UserDataMethods, Value};

use crate::test::choices::DRAWS_MAX;
use crate::test::host::Host;
use crate::test::plain::Plain;
use crate::vm::sandbox::{cut, type_name};

/// Steps between the least and the greatest number of `g:number`.
const NUMBER_STEPS: u64 = 1 << 20;
/// Items of `g:list`, characters of `g:text`.
const LENGTH_MAX: u64 = 10_000;
/// Whole numbers beyond this are not exact as doubles.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;
/// Characters of `g:text`: the simplest first.
const CHARACTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyz0123456789-_ ";
/// What a failure shows of one draw.
const DRAW_MAX_BYTES: usize = 200;
/// How many it shows.
const DRAWS_SHOWN_MAX: usize = 100;

/// The generator of one input.
pub(crate) struct Generator(pub(crate) Rc<Host>);

impl Generator {
    fn draw(&self, lua: &Lua, max: u64) -> mlua::Result<u64> {
        let drawn = self.0.choices.borrow_mut().draw(max);
        drawn.ok_or_else(|| {
            let reason = format!("an input may take {DRAWS_MAX} draws");
            self.0.raise(lua, &reason)
        })
    }

    /// Whole numbers shrink towards 0, or towards the end that is nearer to it.
    fn int(&self, lua: &Lua, low: f64, high: f64) -> mlua::Result<f64> {
        let whole = |n: f64| n.fract() == 0.0 && n.abs() <= WHOLE_MAX;
        if !whole(low) || !whole(high) || low > high {
            let reason = format!("g:int takes two whole numbers in order, not {low} and {high}");
            return Err(self.0.raise(lua, &reason));
        }
        let simplest = 0.0f64.clamp(low, high);
        let above = high - simplest;
        let drawn = self.draw(lua, (high - low) as u64)? as f64;
        Ok(if drawn <= above {
            simplest + drawn
        } else {
            simplest - (drawn - above)
        })
    }

    fn number(&self, lua: &Lua, low: f64, high: f64) -> mlua::Result<f64> {
        if !(low.is_finite() && high.is_finite() && low <= high) {
            let reason =
                format!("g:number takes two finite numbers in order, not {low} and {high}");
            return Err(self.0.raise(lua, &reason));
        }
        let step = self.draw(lua, NUMBER_STEPS)?;
        if step == NUMBER_STEPS {
            return Ok(high);
        }
        Ok(low + (high - low) * (step as f64 / NUMBER_STEPS as f64))
    }

    fn pick(&self, lua: &Lua, list: &Table) -> mlua::Result<Value> {
        let length = list.raw_len() as u64;
        if length == 0 {
            return Err(self
                .0
                .raise(lua, "g:pick needs a list with something in it"));
        }
        list.raw_get(self.draw(lua, length - 1)? + 1)
    }

    fn list(&self, lua: &Lua, low: f64, high: f64, item: &Function) -> mlua::Result<Table> {
        let fits = 0.0 <= low && low <= high && high <= LENGTH_MAX as f64;
        if !fits {
            let reason = format!(
                "g:list takes its least and greatest length, 0 to {LENGTH_MAX}, and a function"
            );
            return Err(self.0.raise(lua, &reason));
        }
        let length = self.int(lua, low.floor(), high.floor())?;
        let list = lua.create_table()?;
        for at in 1..=length as u64 {
            list.raw_push(item.call::<Value>(at)?)?;
        }
        Ok(list)
    }

    fn text(&self, lua: &Lua, max: f64) -> mlua::Result<String> {
        let length = self.int(lua, 0.0, max.floor().clamp(0.0, LENGTH_MAX as f64))?;
        let last = CHARACTERS.len() as u64 - 1;
        (0..length as u64)
            .map(|_| Ok(char::from(CHARACTERS[self.draw(lua, last)? as usize])))
            .collect()
    }

    /// Runs one draw and notes it, unless it is part of another one.
    fn noted<T>(
        &self,
        call: impl FnOnce() -> String,
        draw: impl FnOnce() -> mlua::Result<T>,
        value: impl FnOnce(&T) -> String,
    ) -> mlua::Result<T> {
        self.0.case.borrow_mut().draw_depth += 1;
        let drawn = draw();
        let mut case = self.0.case.borrow_mut();
        case.draw_depth = case.draw_depth.saturating_sub(1);
        let drawn = drawn?;
        if case.draw_depth == 0 && case.draws.len() < DRAWS_SHOWN_MAX {
            let line = format!("{} = {}", call(), value(&drawn));
            case.draws.push(cut(&line, DRAW_MAX_BYTES));
        }
        Ok(drawn)
    }
}

fn show(value: &Value) -> String {
    Plain::of(value).map_or_else(|_| type_name(value).to_owned(), |plain| plain.show())
}

impl UserData for Generator {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        methods.add_method("int", |lua, g, (low, high): (f64, f64)| {
            let call = || format!("g:int({low}, {high})");
            g.noted(call, || g.int(lua, low, high), f64::to_string)
        });
        methods.add_method("number", |lua, g, (low, high): (f64, f64)| {
            let call = || format!("g:number({low}, {high})");
            g.noted(call, || g.number(lua, low, high), f64::to_string)
        });
        methods.add_method("bool", |lua, g, ()| {
            let draw = || Ok(g.draw(lua, 1)? == 1);
            g.noted(|| "g:bool()".to_owned(), draw, bool::to_string)
        });
        methods.add_method("pick", |lua, g, list: Table| {
            g.noted(|| "g:pick".to_owned(), || g.pick(lua, &list), show)
        });
        methods.add_method("maybe", |lua, g, item: Function| {
            let draw = || match g.draw(lua, 1)? {
                0 => Ok(Value::Nil),
                _ => item.call::<Value>(()),
            };
            g.noted(|| "g:maybe".to_owned(), draw, show)
        });
        methods.add_method("list", |lua, g, (low, high, item): (f64, f64, Function)| {
            let call = || format!("g:list({low}, {high})");
            let shown = |list: &Table| show(&Value::Table(list.clone()));
            g.noted(call, || g.list(lua, low, high, &item), shown)
        });
        methods.add_method("text", |lua, g, max: f64| {
            let call = || format!("g:text({max})");
            g.noted(call, || g.text(lua, max), |text| format!("{text:?}"))
        });
    }
}
