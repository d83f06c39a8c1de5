//! TLS of a server's listeners: who shakes hands with which certificate, and what keeps them fresh.

use std::collections::BTreeMap;
use std::sync::Arc;

use llmgw_proto::identity::Moment;
use llmgw_proto::identity::listening::AgentsTls;

use crate::certificates::{
    self, Certificates, Ends, Material, Nodes, Opened, Owner, Port, Shown, Shows, Use,
};
use crate::config::Config;
use crate::control::observed::ObservedNode;
use crate::control::sessions::{Door, Sessions};

/// What clients are offered, the one that is liked best first.
const CLIENT_PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// The admin address speaks no other.
const ADMIN_PROTOCOLS: [&[u8]; 1] = [b"http/1.1"];

/// The listeners with TLS, before they serve.
#[derive(Default)]
pub struct Tls {
    pub clients: Option<Arc<Port>>,
    pub admin: Option<Arc<Port>>,
    agents: Option<(Opened, Arc<AgentsTls>)>,
    /// Those of clients and operators, each with who shows its certificate.
    others: Vec<(Opened, Arc<dyn Shows>)>,
}

/// The agents' side of a change: new handshakes see it, and who is connected has to stand up to it.
struct Agents {
    tls: Arc<AgentsTls>,
    /// None: nobody listens for agents.
    sessions: Option<Arc<Sessions>>,
}

impl Tls {
    /// Reads the files of every listener with TLS.
    ///
    /// # Errors
    /// What is wrong with the first one that can't be used.
    pub fn open(config: &Config) -> Result<Tls, String> {
        let mut tls = Tls::default();
        for opened in certificates::open(config)? {
            let (serves, material) = (opened.listener.serves, &opened.material);
            if serves == Use::Agents {
                let (identity, authorities) = (&material.identity, &material.authorities);
                let agents = AgentsTls::new(identity.clone(), authorities.clone())
                    .map_err(|why| format!("`{}`: {why}", serves.key()))?;
                tls.agents = Some((opened, Arc::new(agents)));
                continue;
            }
            let shown = Shown::new(material);
            let port = |protocols| Some(Port::new(serves.as_str(), shown.clone(), protocols));
            match serves {
                Use::Admin => tls.admin = port(&ADMIN_PROTOCOLS),
                _ => tls.clients = port(&CLIENT_PROTOCOLS),
            }
            tls.others.push((opened, shown));
        }
        Ok(tls)
    }

    /// What is in force at each listener at first.
    pub fn opened(&self) -> impl Iterator<Item = &Opened> {
        let agents = self.agents.iter().map(|(opened, _)| opened);
        self.others.iter().map(|(opened, _)| opened).chain(agents)
    }

    /// How agents come in.
    pub fn door(&self) -> Door {
        match &self.agents {
            Some((_, tls)) => Door::Tls(tls.clone()),
            None => Door::Plain,
        }
    }

    /// The certificates, to be followed from now on, and those of the nodes that these sessions know.
    pub fn keep(self, sessions: Option<&Arc<Sessions>>) -> Arc<Certificates> {
        let mut listeners = self.others;
        if let Some((opened, tls)) = self.agents {
            let sessions = sessions.cloned();
            listeners.push((opened, Arc::new(Agents { tls, sessions })));
        }
        let nodes: Nodes = match sessions {
            Some(sessions) => {
                let observed = sessions.observed();
                Arc::new(move || of_nodes(&observed.borrow().clone().nodes))
            }
            None => Arc::new(Vec::new),
        };
        Certificates::new(listeners, nodes, Arc::new(Moment::now))
    }
}

impl Shows for Agents {
    fn show(&self, material: &Material) {
        let (identity, authorities) = (material.identity.clone(), material.authorities.clone());
        let change = || self.tls.replace(identity, authorities);
        let changed = match &self.sessions {
            Some(sessions) => sessions.trust(change),
            None => change().map(|()| 0),
        };
        match changed {
            // It was made of the same files when they were read.
            Err(why) => tracing::error!(
                "`{}`: what agents see did not change: {why}",
                Use::Agents.key()
            ),
            Ok(0) => {}
            Ok(cut) => tracing::warn!(
                "{cut} agents were cut off: no authority that is trusted now issued their certificates"
            ),
        }
    }
}

/// The ends of the certificates that nodes showed.
fn of_nodes(nodes: &BTreeMap<String, Arc<ObservedNode>>) -> Vec<Ends> {
    let ends = |(node, observed): (&String, &Arc<ObservedNode>)| {
        let certificate = observed.certificate.as_ref()?;
        Some(Ends {
            owner: Owner::Node(node.clone()),
            serial: certificate.serial.clone(),
            not_before: None,
            not_after: certificate.not_after,
        })
    };
    nodes.iter().filter_map(ends).collect()
}
