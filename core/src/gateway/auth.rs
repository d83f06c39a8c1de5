//! Who is asking: an API key names a tenant.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use http::HeaderMap;
use http::header::AUTHORIZATION;

use super::headers::X_API_KEY;
use super::respond::Failure;
use crate::config::{Config, KeyHash, Tenant, TenantKey, UtcTime};
use crate::flow::tenant::TenantAccount;

/// The tenant of everybody where none is configured.
pub const OPEN_TENANT: &str = "default";

/// Why a key is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyProblem {
    /// There is none.
    Missing,
    /// It is nobody's.
    Unknown,
    Expired {
        at: UtcTime,
    },
}

/// Who a request is for.
#[derive(Debug, Clone)]
pub struct Caller {
    pub name: Arc<str>,
    /// Absent where no tenants are configured: then everybody may use everything.
    pub tenant: Option<Arc<Tenant>>,
    /// What its requests count against.
    pub account: Arc<TenantAccount>,
}

impl Caller {
    pub fn may_use(&self, model: &str) -> bool {
        self.tenant
            .as_ref()
            .is_none_or(|tenant| tenant.may_use(model))
    }
}

/// The configured tenants, as requests look them up.
pub struct Tenants {
    known: Vec<Known>,
    /// Every key of every tenant by the beginning of its hash: a request costs the same with one tenant and with
    /// ten thousand.
    by_key: HashMap<u64, Vec<(TenantKey, usize)>>,
    open: Arc<TenantAccount>,
}

struct Known {
    tenant: Arc<Tenant>,
    account: Arc<TenantAccount>,
}

impl Tenants {
    /// `before` are those of the configuration that goes: a tenant keeps its account by its name.
    pub fn new(config: &Config, before: Option<&Tenants>) -> Tenants {
        let mut kept: HashMap<&str, &Arc<TenantAccount>> = HashMap::new();
        for known in before.iter().flat_map(|before| &before.known) {
            kept.insert(&known.tenant.name, &known.account);
        }
        let mut by_key: HashMap<u64, Vec<(TenantKey, usize)>> = HashMap::new();
        let mut known = Vec::with_capacity(config.tenants.len());
        for (index, tenant) in config.tenants.iter().enumerate() {
            for key in &tenant.keys {
                let same = by_key.entry(beginning(&key.hash)).or_default();
                same.push((*key, index));
            }
            let account = match kept.get(&*tenant.name) {
                Some(account) => {
                    account.configure(tenant);
                    Arc::clone(account)
                }
                None => Arc::new(TenantAccount::of(tenant)),
            };
            known.push(Known {
                tenant: Arc::new(tenant.clone()),
                account,
            });
        }
        let open = before.map(|before| before.open.clone());
        Tenants {
            known,
            by_key,
            open: open.unwrap_or_else(|| Arc::new(TenantAccount::open(OPEN_TENANT))),
        }
    }

    /// Finds the tenant of a key. Keys are found by the beginning of their hashes, which nobody can choose, and told
    /// apart in constant time.
    pub fn authenticate(&self, headers: &HeaderMap) -> Result<Caller, Failure> {
        if self.known.is_empty() {
            return Ok(Caller {
                name: self.open.name.clone(),
                tenant: None,
                account: self.open.clone(),
            });
        }
        let Some(presented) = presented(headers) else {
            return Err(Failure::InvalidKey(KeyProblem::Missing));
        };
        let hash = KeyHash::of(presented);
        let same = self.by_key.get(&beginning(&hash));
        let mut found = None;
        for (key, index) in same.into_iter().flatten() {
            if key.hash.matches(&hash) {
                found = Some((key, &self.known[*index]));
            }
        }
        let Some((key, known)) = found else {
            return Err(Failure::InvalidKey(KeyProblem::Unknown));
        };
        match key.expires {
            Some(at) if at <= UtcTime::now() => {
                Err(Failure::InvalidKey(KeyProblem::Expired { at }))
            }
            _ => Ok(Caller {
                name: known.tenant.name.clone(),
                tenant: Some(known.tenant.clone()),
                account: known.account.clone(),
            }),
        }
    }

    /// As [`Tenants::accounts`], each with the bands that the tenant may use; none listed means all.
    pub fn with_bands(&self) -> impl Iterator<Item = (&[Arc<str>], &Arc<TenantAccount>)> {
        let open = self.known.is_empty().then_some((&[][..], &self.open));
        self.known
            .iter()
            .map(|known| (&*known.tenant.bands, &known.account))
            .chain(open)
    }

    /// The accounts of all tenants, in the configuration's order; where none is configured, that of everybody.
    pub fn accounts(&self) -> impl Iterator<Item = &Arc<TenantAccount>> {
        let open = self.known.is_empty().then_some(&self.open);
        self.known.iter().map(|known| &known.account).chain(open)
    }
}

fn beginning(hash: &KeyHash) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *hash.as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// The key of `Authorization: Bearer KEY`, else of `x-api-key`.
fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    bearer
        .or_else(|| headers.get(X_API_KEY).map(|value| value.as_bytes()))
        .map(<[u8]>::trim_ascii)
}
