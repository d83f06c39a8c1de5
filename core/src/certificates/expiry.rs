//! When certificates end, and when that is said: 30 days before, once a day each, and at once when it is news.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use llmgw_proto::identity::moment::{DAY_SECONDS, EXPIRY_WARNED_DAYS};
use llmgw_proto::identity::{Certificate, Moment, Serial};
use llmgw_proto::text::word;
use tracing::Level;

use super::{Material, TlsListener, Use};

/// From then on it is said that one ends.
/// Nodes that are named at a time; a fleet whose certificates were made on one day ends on one day.
const NODES_SAID_MAX: usize = 16;

/// When a certificate that matters here ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ends {
    pub owner: Owner,
    pub serial: Serial,
    /// None: it began long ago, else it would not have been taken.
    pub not_before: Option<Moment>,
    pub not_after: Moment,
}

/// Whose a certificate is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// A listener's, from this file.
    Shown(Use, PathBuf),
    /// That of an authority which follows the listener's own in this file.
    Between(Use, PathBuf),
    /// That of an authority, in the file of `agents.tls.ca`.
    Trusted(PathBuf),
    Node(String),
}

/// What was said of whom, and when.
#[derive(Debug, Default)]
pub struct Reminders {
    said: HashMap<Key, (Level, Moment)>,
}

type Key = (Owner, Serial);

/// What is shown and trusted at a listener: the listener's own first. One between that ends takes the listener's with it.
pub(super) fn certificates<'a>(
    listener: &'a TlsListener,
    material: &'a Material,
) -> impl Iterator<Item = (Owner, &'a Certificate)> {
    let files = &listener.files;
    let own = Owner::Shown(listener.serves, files.cert.clone());
    let trusted = files.ca.iter().zip(&material.authorities);
    let trusted = trusted.flat_map(|(ca, authorities)| {
        let certificates = authorities.certificates.iter();
        certificates.map(|certificate| (Owner::Trusted(ca.clone()), certificate))
    });
    let between = material.between.iter().map(|certificate| {
        let owner = Owner::Between(listener.serves, files.cert.clone());
        (owner, certificate)
    });
    std::iter::once((own, material.certificate()))
        .chain(between)
        .chain(trusted)
}

impl Owner {
    /// The label `use` of the metric.
    pub fn serves(&self) -> &'static str {
        match self {
            Owner::Shown(serves, _) | Owner::Between(serves, _) => serves.as_str(),
            Owner::Trusted(_) => "agents_ca",
            Owner::Node(_) => "node",
        }
    }

    /// Empty where it is the server's own.
    pub fn node(&self) -> &str {
        match self {
            Owner::Node(node) => node,
            _ => "",
        }
    }

    pub fn file(&self) -> Option<&Path> {
        match self {
            Owner::Shown(_, file) | Owner::Between(_, file) | Owner::Trusted(file) => Some(file),
            Owner::Node(_) => None,
        }
    }

    fn way_out(&self) -> String {
        match self {
            Owner::Shown(_, file) => format!(
                "`llmgw ctl cert renew {} --ca DIR` makes it last longer",
                word(&file.display().to_string())
            ),
            Owner::Between(..) => {
                "clients refuse the listener's with it: put the authority's new one behind the listener's own in the file"
                    .to_owned()
            }
            Owner::Trusted(_) => "`llmgw ctl cert ca --out DIR` makes a new authority; \
                keep both in the file until every certificate comes from the new one"
                .to_owned(),
            Owner::Node(_) => {
                "`llmgw ctl cert renew agent.pem --ca DIR` makes that node's last longer".to_owned()
            }
        }
    }
}

/// For whom it is, where it lies.
impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Shown(serves, file) => write!(f, "`{}`: {}", serves.key(), file.display()),
            Owner::Between(serves, file) => write!(
                f,
                "`{}`: {}, of an authority behind the listener's own",
                serves.key(),
                file.display()
            ),
            Owner::Trusted(file) => {
                write!(f, "`{}.ca`: {}", Use::Agents.key(), file.display())
            }
            Owner::Node(node) => write!(f, "node `{node}`"),
        }
    }
}

impl Ends {
    pub fn of(owner: Owner, certificate: &Certificate) -> Ends {
        Ends {
            owner,
            serial: certificate.serial.clone(),
            not_before: Some(certificate.not_before),
            not_after: certificate.not_after,
        }
    }

    /// What is to be said of it at `now`. None: it is valid for long enough.
    pub fn remark(&self, now: Moment) -> Option<(Level, String)> {
        let Ends {
            owner, not_after, ..
        } = self;
        let what = format!("{owner}: the certificate with serial {}", self.serial);
        let way_out = owner.way_out();
        if let Some(not_before) = self.not_before.filter(|from| now < *from) {
            return Some((
                Level::ERROR,
                format!(
                    "{what} is not valid before {not_before}, and this machine's clock says {now}: \
                     one of the clocks is wrong, or it is used too early"
                ),
            ));
        }
        let left = not_after.0.saturating_sub(now.0);
        match (left, left / DAY_SECONDS) {
            (..0, _) => Some((
                Level::ERROR,
                format!(
                    "{what} expired at {not_after}, and this machine's clock says {now}: {way_out}, unless the clock is wrong"
                ),
            )),
            (_, days) if left <= EXPIRY_WARNED_DAYS * DAY_SECONDS => {
                let days = match days {
                    0 => "in less than a day".to_owned(),
                    1 => "in 1 day".to_owned(),
                    days => format!("in {days} days"),
                };
                let sentence = format!("{what} expires {days}, at {not_after}: {way_out}");
                Some((Level::WARN, sentence))
            }
            _ => None,
        }
    }
}

impl Reminders {
    /// What is to be said now of all that are in force. Who is not among them any more is forgotten.
    pub fn due(&mut self, all: &[Ends], now: Moment) -> Vec<(Level, String)> {
        let mut still = HashMap::with_capacity(self.said.len());
        let mut lines = Vec::new();
        let (mut nodes, mut worst) = (0_usize, Level::WARN);
        for ends in all {
            let Some((level, sentence)) = ends.remark(now) else {
                continue;
            };
            let key = (ends.owner.clone(), ends.serial.clone());
            // The same certificate twice, as in a file with one authority twice.
            if still.contains_key(&key) {
                continue;
            }
            let before = self.said.get(&key).filter(|(before, at)| {
                *before == level && (at.0..at.0.saturating_add(DAY_SECONDS)).contains(&now.0)
            });
            if let Some(before) = before {
                still.insert(key, *before);
                continue;
            }
            still.insert(key, (level, now));
            if !ends.owner.node().is_empty() {
                nodes += 1;
                worst = worst.min(level);
            }
            if ends.owner.node().is_empty() || nodes <= NODES_SAID_MAX {
                lines.push((level, sentence));
            }
        }
        self.said = still;
        if nodes > NODES_SAID_MAX {
            let more = nodes - NODES_SAID_MAX;
            lines.push((
                worst,
                format!("the certificates of {more} more nodes end soon or have: `llmgw ctl nodes` shows them"),
            ));
        }
        lines
    }
}

#[cfg(test)]
mod tests;
