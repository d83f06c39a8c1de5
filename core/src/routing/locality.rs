//! Where a replica is and on what: nothing that the gateway itself chooses by, but an operator's `rank` may.

use std::sync::Arc;

use crate::config::{Endpoint, Labels};

/// What is not known is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Locality {
    pub node: Option<String>,
    pub rack: Option<String>,
    pub zone: Option<String>,
    /// GPU class; absent on CPUs.
    pub gpu: Option<String>,
    /// The node's, or the endpoint's own.
    pub labels: Labels,
}

/// A replica that the control plane started: how it is reached, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    pub endpoint: Endpoint,
    pub locality: Arc<Locality>,
}

impl Locality {
    /// On `node`, if that is known; `rack` and `zone` are labels of these names.
    pub fn new(node: Option<String>, gpu: Option<String>, labels: Labels) -> Arc<Locality> {
        let label = |wanted: &str| {
            let found = labels.iter().find(|(name, _)| name == wanted);
            found.map(|(_, value)| value.clone())
        };
        Arc::new(Locality {
            node,
            rack: label("rack"),
            zone: label("zone"),
            gpu,
            labels,
        })
    }
}
