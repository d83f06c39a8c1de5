//! From nodes to [`Config`]: which keys each section has, their types, units, ranges and defaults.
//!
//! A value that cannot be read is reported and replaced by its default, never left out, so that `check` finds the same indices as the file has.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use llmgw_proto::identity::Serial;

use crate::config::problem::Place;
use crate::config::read::{Field, Fields, Report};
use crate::config::yaml::Node;
use crate::config::{
    AdminListen, Agents, AgentsTls, Catalog, Config, KeyHash, Labels, Limits, Listen, Log,
    LogFormat, ModelPattern, Secret, SourceText, Tenant, TenantKey, TlsFiles, UtcTime,
};

mod catalog;

const BODY_BYTES: RangeInclusive<u64> = 1 << 10..=4 << 30;
const QUEUED_BYTES: RangeInclusive<u64> = 1 << 20..=1 << 40;
const TIMEOUT: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(24 * 3600);
const DRAIN: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(24 * 3600);
const HEARTBEAT: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(300);
const RETRIES: RangeInclusive<u32> = 0..=10;
const WEIGHT: RangeInclusive<f64> = 0.01..=100.0;
const CONCURRENCY: RangeInclusive<u32> = 1..=1_000_000;
const PER_MINUTE: RangeInclusive<u64> = 1..=1_000_000_000_000;

const LISTEN_DEFAULT: ([u8; 4], u16) = ([127, 0, 0, 1], 8080);
const ADMIN_DEFAULT: ([u8; 4], u16) = ([127, 0, 0, 1], 8081);
const STATE_DEFAULT: &str = ".llmgw";

const LEVELS: [(&str, tracing::Level); 5] = [
    ("error", tracing::Level::ERROR),
    ("warn", tracing::Level::WARN),
    ("info", tracing::Level::INFO),
    ("debug", tracing::Level::DEBUG),
    ("trace", tracing::Level::TRACE),
];

/// The whole file; relative paths in it start at `directory`.
pub(in crate::config) fn config(report: &mut Report<'_>, root: &Node, directory: &Path) -> Config {
    let root = Field {
        node: root,
        place: Place::root(),
    };
    let known = [
        "listen", "tls", "admin", "policies", "state", "log", "agents", "limits", "tenants",
        "models",
    ];
    let mut decode = Decode { report, directory };
    let fields = decode.fields(&root, &known);
    Config {
        listen: decode.listen(&fields),
        admin: decode.admin(fields.get("admin")),
        policies: fields.get("policies").map(|field| decode.path(&field)),
        state: match fields.get("state") {
            Some(field) => decode.path(&field),
            None => directory.join(STATE_DEFAULT),
        },
        log: fields
            .get("log")
            .map(|field| decode.log(&field))
            .unwrap_or_default(),
        agents: fields.get("agents").map(|field| decode.agents(&field)),
        limits: fields
            .get("limits")
            .map(|field| decode.limits(&field))
            .unwrap_or_default(),
        tenants: decode.items(fields.get("tenants"), Decode::tenant),
        catalog: Catalog::new(decode.items(fields.get("models"), |decode, field| {
            Arc::new(decode.model(field))
        })),
        source: PathBuf::new(),
        text: SourceText("".into()),
    }
}

struct Decode<'r, 'e, 'd> {
    report: &'r mut Report<'e>,
    directory: &'d Path,
}

impl Decode<'_, '_, '_> {
    /// The public address: a text with `tls` beside it, or `{listen, tls}` like the other listeners.
    fn listen(&mut self, fields: &Fields<'_>) -> Listen {
        let (address, within) = match fields.get("listen") {
            Some(field) if matches!(field.node, Node::Mapping(_)) => {
                let inner = self.fields(&field, &["listen", "tls"]);
                (
                    self.address(inner.get("listen"), LISTEN_DEFAULT),
                    inner.get("tls"),
                )
            }
            field => (self.address(field, LISTEN_DEFAULT), None),
        };
        let beside = fields.get("tls");
        if let (Some(_), Some(beside)) = (&within, &beside) {
            let place = beside.place.clone().at_key();
            self.report.add(
                &place,
                "`tls` is given here and within `listen`",
                "keep one of them",
            );
        }
        Listen {
            address,
            tls: within.or(beside).map(|field| self.tls(&field)),
        }
    }

    fn admin(&mut self, field: Option<Field<'_>>) -> AdminListen {
        match field {
            Some(field) if matches!(field.node, Node::Mapping(_)) => {
                let inner = self.fields(&field, &["listen", "tls", "token"]);
                AdminListen {
                    address: self.address(inner.get("listen"), ADMIN_DEFAULT),
                    tls: inner.get("tls").map(|field| self.tls(&field)),
                    token: inner
                        .get("token")
                        .and_then(|field| self.report.secret(&field))
                        .map(|text| Secret::new(&text)),
                }
            }
            field => AdminListen {
                address: self.address(field, ADMIN_DEFAULT),
                tls: None,
                token: None,
            },
        }
    }

    fn tls(&mut self, field: &Field<'_>) -> TlsFiles {
        let fields = self.fields(field, &["cert", "key"]);
        TlsFiles {
            cert: self.required_path(&fields, "cert"),
            key: self.required_path(&fields, "key"),
        }
    }

    fn log(&mut self, field: &Field<'_>) -> Log {
        let fields = self.fields(field, &["format", "level"]);
        let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
        let format = fields
            .get("format")
            .and_then(|field| self.report.word(&field, &formats));
        let level = fields
            .get("level")
            .and_then(|field| self.report.word(&field, &LEVELS));
        let default = Log::default();
        Log {
            format: format.unwrap_or(default.format),
            level: level.unwrap_or(default.level),
        }
    }

    fn agents(&mut self, field: &Field<'_>) -> Agents {
        let known = [
            "listen",
            "tls",
            "require_identity",
            "allow_plaintext",
            "deny_serials",
            "heartbeat",
            "lost_after",
            "recovery",
        ];
        let fields = self.fields(field, &known);
        let default = Agents::default();
        let tls = fields.get("tls").map(|field| {
            let inner = self.fields(&field, &["cert", "key", "ca", "ca_key"]);
            AgentsTls {
                cert: self.required_path(&inner, "cert"),
                key: self.required_path(&inner, "key"),
                ca: inner.get("ca").map(|field| self.path(&field)),
                ca_key: inner.get("ca_key").map(|field| self.path(&field)),
            }
        });
        let authority = tls.as_ref().is_some_and(|tls| tls.ca.is_some());
        Agents {
            address: fields
                .get("listen")
                .and_then(|field| self.report.address(&field))
                .unwrap_or(default.address),
            require_identity: self.boolean(&fields, "require_identity", authority),
            allow_plaintext: self.boolean(&fields, "allow_plaintext", false),
            deny_serials: self.items(fields.get("deny_serials"), Decode::serial),
            heartbeat: self.duration(&fields, "heartbeat", HEARTBEAT, default.heartbeat),
            lost_after: self.duration(&fields, "lost_after", TIMEOUT, default.lost_after),
            recovery: self.duration(&fields, "recovery", DRAIN, default.recovery),
            tls,
        }
    }

    /// As `openssl x509 -serial` and `ctl cert show` print it, with or without colons.
    fn serial(&mut self, field: &Field<'_>) -> Serial {
        let none = Serial::from_bytes(&[]);
        let Some(text) = self.report.text(field) else {
            return none;
        };
        text.parse().unwrap_or_else(|_| {
            self.report.add(
                &field.place,
                format!("`{text}` is not a serial number"),
                "write hex digits, e.g. `\"0a:1b:2c\"`",
            );
            none
        })
    }

    fn limits(&mut self, field: &Field<'_>) -> Limits {
        let known = [
            "body_max",
            "queued_bytes_max",
            "connect_timeout",
            "first_byte_timeout",
            "idle_timeout",
            "keepalive",
            "retries",
            "drain_timeout",
        ];
        let fields = self.fields(field, &known);
        let default = Limits::default();
        let body_max = fields
            .get("body_max")
            .and_then(|field| self.report.size(&field, BODY_BYTES));
        let queued_bytes_max = fields
            .get("queued_bytes_max")
            .and_then(|field| self.report.size(&field, QUEUED_BYTES));
        let retries = fields
            .get("retries")
            .and_then(|field| self.report.count(&field, RETRIES));
        Limits {
            body_max: body_max.unwrap_or(default.body_max),
            queued_bytes_max: queued_bytes_max.unwrap_or(default.queued_bytes_max),
            connect_timeout: self.duration(
                &fields,
                "connect_timeout",
                TIMEOUT,
                default.connect_timeout,
            ),
            first_byte_timeout: self.duration(
                &fields,
                "first_byte_timeout",
                TIMEOUT,
                default.first_byte_timeout,
            ),
            idle_timeout: self.duration(&fields, "idle_timeout", TIMEOUT, default.idle_timeout),
            keepalive: fields
                .get("keepalive")
                .and_then(|field| self.keepalive(&field)),
            retries: retries.unwrap_or(default.retries),
            drain_timeout: self.duration(&fields, "drain_timeout", DRAIN, default.drain_timeout),
        }
    }

    /// `off` or a duration; `false` is what programs that know YAML 1.1 make of `off`.
    fn keepalive(&mut self, field: &Field<'_>) -> Option<Duration> {
        match field.node {
            Node::Bool(false) => None,
            Node::Text(text) if text == "off" => None,
            _ => self.report.duration(field, TIMEOUT),
        }
    }

    fn tenant(&mut self, field: &Field<'_>) -> Tenant {
        let known = [
            "name",
            "weight",
            "labels",
            "bands",
            "keys",
            "models",
            "max_concurrency",
            "requests_per_minute",
            "tokens_per_minute",
        ];
        let fields = self.fields(field, &known);
        let weight = fields
            .get("weight")
            .and_then(|field| self.report.number(&field, WEIGHT));
        let models = match fields.get("models") {
            Some(field) => self
                .report
                .texts(&field)
                .iter()
                .map(|text| ModelPattern::new(text))
                .collect(),
            None => vec![ModelPattern::new("*")],
        };
        let keys = fields
            .get("keys")
            .map(|field| self.report.quiet_list(&field))
            .unwrap_or_default();
        let keys = keys.iter().map(|field| self.tenant_key(field)).collect();
        let max_concurrency = fields.get("max_concurrency");
        if let Some(bands) = fields
            .get("bands")
            .filter(|field| *field.node == Node::List(Vec::new()))
        {
            let right = "list at least one band, or leave the key out for all of them";
            self.report.add(
                &bands.place,
                "is empty: the tenant could use no band",
                right,
            );
        }
        Tenant {
            name: self
                .required_text(&fields, "name", "give each tenant a name")
                .into(),
            weight: weight.unwrap_or(1.0),
            labels: self.labels(&fields),
            bands: self.names(fields.get("bands")),
            keys,
            models,
            max_concurrency: max_concurrency
                .and_then(|field| self.report.count(&field, CONCURRENCY)),
            requests_per_minute: self.per_minute(&fields, "requests_per_minute"),
            tokens_per_minute: self.per_minute(&fields, "tokens_per_minute"),
        }
    }

    /// The hash alone, or `{hash, expires}`.
    fn tenant_key(&mut self, field: &Field<'_>) -> TenantKey {
        let Node::Mapping(entries) = field.node else {
            let hash = self.key_hash(field);
            return TenantKey {
                hash,
                expires: None,
            };
        };
        let is_known =
            |key: &Node| matches!(key, Node::Text(key) if matches!(&**key, "hash" | "expires"));
        let fields = match entries.iter().all(|(key, _)| is_known(key)) {
            true => self.fields(field, &["hash", "expires"]),
            false => {
                // It may be the API key itself, so it is not repeated as other unknown keys are.
                let right = "write `{hash: \"sha256:...\", expires: 2026-12-31}`";
                self.report.add_quietly(field, "has an unknown key", right);
                Fields::none(field.place.clone())
            }
        };
        let hash = match fields.get("hash") {
            Some(hash) => self.key_hash(&hash),
            None => {
                let right = "write `hash: \"sha256:...\"`";
                self.report.missing(&fields, "hash", right);
                KeyHash([0; 32])
            }
        };
        let expires = fields.get("expires").and_then(|field| {
            let any = UtcTime(0)..=UtcTime::LAST;
            let expected = "a date such as `2026-12-31`";
            self.report.measure(&field, expected, any)
        });
        TenantKey { hash, expires }
    }

    /// The text may be the key itself, put here by mistake, so no message repeats it.
    fn key_hash(&mut self, field: &Field<'_>) -> KeyHash {
        let text = self.report.quiet_text(field);
        let hash = text.as_deref().map(KeyHash::parse);
        if let Some(None) = hash {
            let right = "write `sha256:` and the 64 hex digits of the key's hash; `llmgw ctl key new` prints the line";
            self.report
                .add_quietly(field, "is not the hash of a key", right);
        }
        hash.flatten().unwrap_or(KeyHash([0; 32]))
    }

    fn fields<'n>(&mut self, field: &Field<'n>, known: &[&str]) -> Fields<'n> {
        self.report
            .fields(field, known)
            .unwrap_or_else(|| Fields::none(field.place.clone()))
    }

    fn items<'n, T>(
        &mut self,
        field: Option<Field<'n>>,
        one: impl Fn(&mut Self, &Field<'n>) -> T,
    ) -> Vec<T> {
        let items = field
            .map(|field| self.report.list(&field))
            .unwrap_or_default();
        items.iter().map(|item| one(self, item)).collect()
    }

    fn names(&mut self, field: Option<Field<'_>>) -> Vec<Arc<str>> {
        let texts = field
            .map(|field| self.report.texts(&field))
            .unwrap_or_default();
        texts.into_iter().map(Arc::from).collect()
    }

    fn labels(&mut self, fields: &Fields<'_>) -> Labels {
        Labels::new(self.named_texts(fields, "labels").into_iter().collect())
    }

    fn named_texts(&mut self, fields: &Fields<'_>, key: &str) -> BTreeMap<String, String> {
        let texts = fields.get(key).map(|field| self.report.named_texts(&field));
        texts.unwrap_or_default().into_iter().collect()
    }

    fn text(&mut self, fields: &Fields<'_>, key: &str) -> Option<String> {
        self.report.text(&fields.get(key)?)
    }

    fn required_text(&mut self, fields: &Fields<'_>, key: &str, right: &str) -> String {
        match fields.get(key) {
            Some(field) => self.report.text(&field).unwrap_or_default(),
            None => {
                self.report.missing(fields, key, right);
                String::new()
            }
        }
    }

    fn required_path(&mut self, fields: &Fields<'_>, key: &str) -> PathBuf {
        let text = self.required_text(fields, key, &format!("write `{key}: FILE.pem`"));
        self.directory.join(text)
    }

    fn path(&mut self, field: &Field<'_>) -> PathBuf {
        self.directory
            .join(self.report.text(field).unwrap_or_default())
    }

    fn address(&mut self, field: Option<Field<'_>>, default: ([u8; 4], u16)) -> SocketAddr {
        field
            .and_then(|field| self.report.address(&field))
            .unwrap_or(default.into())
    }

    fn boolean(&mut self, fields: &Fields<'_>, key: &str, default: bool) -> bool {
        fields
            .get(key)
            .and_then(|field| self.report.boolean(&field))
            .unwrap_or(default)
    }

    fn count(&mut self, fields: &Fields<'_>, key: &str, range: RangeInclusive<u32>) -> Option<u32> {
        self.report.count(&fields.get(key)?, range)
    }

    fn per_minute(&mut self, fields: &Fields<'_>, key: &str) -> Option<u64> {
        self.report.whole(&fields.get(key)?, PER_MINUTE)
    }

    fn duration(
        &mut self,
        fields: &Fields<'_>,
        key: &str,
        range: RangeInclusive<Duration>,
        default: Duration,
    ) -> Duration {
        fields
            .get(key)
            .and_then(|field| self.report.duration(&field, range))
            .unwrap_or(default)
    }
}
