//! What hooks get to see: plain borrowed structs whose fields are the names that Lua reads.
//!
//! Units are in the names. A value that is unknown is `None` here and nil in Lua, never 0.

use crate::test::inputs::{Given, Overlay};

/// One value of a view, on its way into a Lua row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Field<'a> {
    /// Unknown.
    Nil,
    /// A flag.
    Flag(bool),
    /// A number; Lua has doubles only.
    Number(f64),
    /// A text.
    Text(&'a str),
    /// An operator's labels, a table from name to value.
    Labels(&'a [(String, String)]),
    /// Queues by band, a table from name to `{queued, oldest_ms}`.
    Bands(&'a [BandQueue<'a>]),
    /// A list of texts.
    List(&'a [String]),
    /// A list of ports.
    Ports(&'a [u16]),
    /// A node's NVLink domains, a list of `{gpus, free}`.
    Domains(&'a [Domain]),
}

/// GPUs of one node that reach each other over NVLink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Domain {
    /// GPUs in it.
    pub gpus: u32,
    /// Of these, free ones.
    pub free: u32,
}

/// The queue of one band in a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BandQueue<'a> {
    /// The band.
    pub name: &'a str,
    /// Requests waiting.
    pub queued: u64,
    /// How long the oldest of them has waited; `None` when the queue is empty.
    pub oldest_ms: Option<f64>,
}

/// A struct that becomes a row: a read-only Lua table with exactly these fields.
pub trait View {
    /// What error messages call it.
    const NOUN: &'static str;
    /// The names, in the order that `visit` uses.
    const FIELDS: &'static [&'static str];
    /// The same fields for people and editors.
    const DOCS: &'static [FieldDoc];
    /// Hands over each field's position in `FIELDS` and value.
    fn visit<'v>(&'v self, each: &mut impl Visitor<'v>);
}

/// Looks at the fields of a view. A closure does; where every nanosecond counts, a struct can ask to be inlined.
pub trait Visitor<'v> {
    /// One field: its position, and its value.
    fn field(&mut self, position: usize, field: Field<'v>);
}

impl<'v, F: FnMut(usize, Field<'v>)> Visitor<'v> for F {
    fn field(&mut self, position: usize, field: Field<'v>) {
        self(position, field);
    }
}

/// What editors and the reference say about a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldDoc {
    /// Its name.
    pub name: &'static str,
    /// Its type, as LuaLS writes it.
    pub lua: &'static str,
    /// It is nil when unknown.
    pub optional: bool,
    /// Its documentation.
    pub text: &'static str,
}

/// The Lua type of a Rust type.
pub(crate) trait LuaType {
    const LUA: &'static str;
    const OPTIONAL: bool = false;
}

macro_rules! lua_types {
    ($($kind:ty => $lua:literal),* $(,)?) => {$(
        impl LuaType for $kind {
            const LUA: &'static str = $lua;
        }
    )*};
}
lua_types! {
    bool => "boolean",
    u16 => "integer",
    u32 => "integer",
    u64 => "integer",
    f64 => "number",
    &str => "string",
    &[(String, String)] => "table<string, string>",
    &[BandQueue<'_>] => "table<string, llmgw.band_queue>",
    &[String] => "string[]",
    &[u16] => "integer[]",
    &[Domain] => "llmgw.domain[]",
}

impl<T: LuaType> LuaType for Option<T> {
    const LUA: &'static str = T::LUA;
    const OPTIONAL: bool = true;
}

/// How a Rust type becomes a [`Field`].
pub(crate) trait IntoField<'v> {
    fn field(self) -> Field<'v>;
}

macro_rules! number_fields {
    ($($kind:ty),*) => {$(
        impl<'v> IntoField<'v> for $kind {
            fn field(self) -> Field<'v> {
                Field::Number(self as f64)
            }
        }
    )*};
}
number_fields!(u16, u32, u64, f64);

impl<'v> IntoField<'v> for bool {
    fn field(self) -> Field<'v> {
        Field::Flag(self)
    }
}
impl<'v> IntoField<'v> for &'v str {
    fn field(self) -> Field<'v> {
        Field::Text(self)
    }
}
impl<'v> IntoField<'v> for &'v [(String, String)] {
    fn field(self) -> Field<'v> {
        Field::Labels(self)
    }
}
impl<'v> IntoField<'v> for &'v [BandQueue<'v>] {
    fn field(self) -> Field<'v> {
        Field::Bands(self)
    }
}
impl<'v> IntoField<'v> for &'v [u16] {
    fn field(self) -> Field<'v> {
        Field::Ports(self)
    }
}
impl<'v> IntoField<'v> for &'v [Domain] {
    fn field(self) -> Field<'v> {
        Field::Domains(self)
    }
}
impl<'v> IntoField<'v> for &'v [String] {
    fn field(self) -> Field<'v> {
        Field::List(self)
    }
}
impl<'v, T: IntoField<'v>> IntoField<'v> for Option<T> {
    fn field(self) -> Field<'v> {
        self.map_or(Field::Nil, IntoField::field)
    }
}

/// Declares a view: the struct and its `View` from one list of fields, so that the two can't differ.
/// Fields after `hidden` are not seen by Lua.
macro_rules! view {
    (
        $(#[$about:meta])*
        $noun:literal $name:ident $(<$life:lifetime>)? {
            $( $(#[doc = $doc:literal])* $field:ident: $kind:ty, )*
        }
        $( hidden { $( $(#[$hidden_doc:meta])* $hidden:ident: $hidden_kind:ty, )* } )?
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name$(<$life>)? {
            $( $(#[doc = $doc])* pub $field: $kind, )*
            $($( $(#[$hidden_doc])* pub $hidden: $hidden_kind, )*)?
        }

        impl$(<$life>)? View for $name$(<$life>)? {
            const NOUN: &'static str = $noun;
            const FIELDS: &'static [&'static str] = &[$(stringify!($field)),*];
            const DOCS: &'static [FieldDoc] = &[$(FieldDoc {
                name: stringify!($field),
                lua: <$kind as LuaType>::LUA,
                optional: <$kind as LuaType>::OPTIONAL,
                text: concat!($($doc),*),
            }),*];
            #[inline]
            fn visit<'v>(&'v self, each: &mut impl $crate::views::Visitor<'v>) {
                let mut position = 0;
                $(
                    $crate::views::Visitor::field(each, position, self.$field.field());
                    position += 1;
                )*
                let _ = position;
            }
        }

        impl$(<$life>)? $name$(<$life>)? {
            /// The same, with what a test gives for some of its fields, in the order of `FIELDS`.
            pub(crate) fn overlay(mut self, given: &$($life)? [Given]) -> Self {
                let mut given = given.iter();
                $(
                    if let Some(given) = given.next() {
                        self.$field.overlay(given);
                    }
                )*
                self
            }
        }
    };
}
pub(crate) use view;

view! {
    /// A client's request. Never the prompt.
    "request" RequestView<'a> {
        /// The model's name in the catalog.
        model: &'a str,
        /// The band that the client asked for.
        band_hint: Option<&'a str>,
        /// Request path, e.g. `/v1/chat/completions`.
        path: &'a str,
        /// The client asked for a stream.
        stream: bool,
        /// Prompt size, estimated unless `input_exact`.
        input_tokens: u64,
        /// An engine counted `input_tokens`.
        input_exact: bool,
        /// The client's own limit.
        max_tokens: Option<u64>,
        /// What the answer will probably take.
        est_output_tokens: u64,
        /// Tools are offered.
        has_tools: bool,
        /// Images are in the prompt.
        has_images: bool,
        /// Choices asked for.
        n: u32,
        /// A session or user that the client named.
        session: Option<&'a str>,
        /// Since it arrived, in ms.
        age_ms: f64,
        /// 0, then one more for each retry.
        attempt: u32,
    }
    hidden {
        /// What `llmgw.rand()` is seeded with during this request's hooks; any number that differs between requests.
        seed: u64,
    }
}

view! {
    /// Who is asking.
    "tenant" TenantView<'a> {
        /// Its name in the configuration.
        name: &'a str,
        /// The band of a request that doesn't ask for one.
        band: &'a str,
        /// The highest band that it may use.
        best_band: &'a str,
        /// Its configured share.
        weight: f64,
        /// Labels from the configuration.
        labels: &'a [(String, String)],
        /// Requests that engines are working on.
        inflight: u64,
        /// Requests that wait.
        queued: u64,
    }
}

view! {
    /// What a tenant used lately.
    "usage" UsageView {
        /// Cost charged in the last minute.
        cost_1m: f64,
        /// Its share of all cost in that minute, 0..1.
        share_1m: f64,
        /// Requests that wait.
        queued: u64,
        /// Requests that engines are working on.
        inflight: u64,
        /// 90th percentile of the time that its requests waited, in ms.
        wait_p90_ms: Option<f64>,
    }
}

view! {
    /// The replicas of one model, together.
    "pool" PoolView<'a> {
        /// The model.
        model: &'a str,
        /// Milliseconds since the Unix epoch: the only clock that a hook has.
        now_ms: f64,
        /// Replicas known.
        replicas: u64,
        /// Replicas that take requests.
        ready: u64,
        /// Slots of all replicas.
        slots: Option<u64>,
        /// How full the pool is; 1 is saturated.
        saturation: Option<f64>,
        /// Mean KV-cache use, 0..1.
        kv: Option<f64>,
        /// Requests that wait in the gateway.
        queued: u64,
        /// Their cost.
        queued_cost: f64,
        /// Median time to the first token, in ms.
        ttft_p50_ms: Option<f64>,
        /// 90th percentile of it.
        ttft_p90_ms: Option<f64>,
        /// Requests that arrive in a second.
        arrivals_s: f64,
        /// Requests refused in a second.
        rejected_s: f64,
        /// The queues by band.
        bands: &'a [BandQueue<'a>],
    }
}

view! {
    /// One candidate of `routing.rank`.
    "replica" ReplicaView<'a> {
        /// Its name; stays the same while it lives.
        id: &'a str,
        /// The machine.
        node: Option<&'a str>,
        /// The machine's rack.
        rack: Option<&'a str>,
        /// The machine's zone.
        zone: Option<&'a str>,
        /// GPU class.
        gpu: Option<&'a str>,
        /// The node's or endpoint's labels.
        labels: &'a [(String, String)],
        /// How long it reads at one prompt token, learned.
        ms_per_prefill_token: Option<f64>,
        /// Requests that it works on at the same time.
        slots: Option<u32>,
        /// Requests that the gateway has there.
        inflight: u32,
        /// Requests that wait for it in the gateway.
        queued: u32,
        /// Prompt tokens that it has yet to read, queued ones included.
        prefill_tokens: u64,
        /// Running requests, scraped.
        running: Option<f64>,
        /// Waiting requests, scraped.
        waiting: Option<f64>,
        /// KV-cache use, 0..1, scraped.
        kv: Option<f64>,
        /// Age of what was scraped, in ms.
        metrics_age_ms: Option<f64>,
        /// How much of this prompt it probably holds already.
        prefix_tokens: u64,
        /// Estimated time to the first token, in ms.
        est_ttft_ms: Option<f64>,
        /// Failures in the last minute.
        errors_1m: f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_hands_over_its_fields_in_the_order_of_their_names() {
        let request = RequestView {
            model: "m",
            input_tokens: 7,
            seed: 9,
            ..RequestView::default()
        };
        let mut seen = Vec::new();
        request
            .visit(&mut |position: usize, field| seen.push((RequestView::FIELDS[position], field)));
        assert_eq!(seen[0], ("model", Field::Text("m")));
        assert_eq!(seen[1], ("band_hint", Field::Nil));
        assert_eq!(seen[4], ("input_tokens", Field::Number(7.0)));
        assert_eq!(seen.len(), RequestView::FIELDS.len());
        assert!(
            !RequestView::FIELDS.contains(&"seed"),
            "the seed must not be readable"
        );
    }
}
