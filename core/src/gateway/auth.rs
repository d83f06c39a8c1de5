//! Who is asking: an API key names a tenant.

use std::sync::Arc;

use http::HeaderMap;
use http::header::AUTHORIZATION;

use super::headers::X_API_KEY;
use super::respond::Failure;
use crate::config::{Config, KeyHash, Tenant};

/// The tenant of everybody where none is configured.
pub const OPEN_TENANT: &str = "default";

/// Who a request is for.
#[derive(Debug, Clone)]
pub struct Caller {
    pub name: Arc<str>,
    /// Absent where no tenants are configured: then everybody may use everything.
    pub tenant: Option<Arc<Tenant>>,
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
    known: Vec<Arc<Tenant>>,
    open: Arc<str>,
}

impl Tenants {
    pub fn new(config: &Config) -> Tenants {
        Tenants {
            known: config.tenants.iter().cloned().map(Arc::new).collect(),
            open: Arc::from(OPEN_TENANT),
        }
    }

    /// Compares the hash of the key with every configured one, in constant time and always to the end.
    pub fn authenticate(&self, headers: &HeaderMap) -> Result<Caller, Failure> {
        if self.known.is_empty() {
            return Ok(Caller {
                name: self.open.clone(),
                tenant: None,
            });
        }
        let Some(key) = presented(headers) else {
            return Err(Failure::InvalidKey { present: false });
        };
        let hash = KeyHash::of(key);
        let mut found = None;
        for tenant in &self.known {
            for known in &tenant.keys {
                if known.matches(&hash) {
                    found = Some(tenant);
                }
            }
        }
        match found {
            Some(tenant) => Ok(Caller {
                name: tenant.name.clone(),
                tenant: Some(tenant.clone()),
            }),
            None => Err(Failure::InvalidKey { present: true }),
        }
    }
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
