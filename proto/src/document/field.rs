//! A node of the file with its place, and the entries of a mapping whose keys are known.

use super::problem::Place;
use super::yaml::Node;

/// A node and where it is.
#[derive(Clone)]
pub struct Field<'n> {
    pub node: &'n Node,
    pub place: Place,
}

/// The entries of a mapping whose keys are known.
pub struct Fields<'n> {
    pub(super) place: Place,
    pub(super) entries: Vec<(&'n str, &'n Node)>,
}

impl<'n> Field<'n> {
    /// Empty for what is no list.
    pub(super) fn items(&self) -> Vec<Field<'n>> {
        let Node::List(items) = self.node else {
            return Vec::new();
        };
        let one = |(index, node)| Field {
            node,
            place: self.place.index(index),
        };
        items.iter().enumerate().map(one).collect()
    }
}

impl<'n> Fields<'n> {
    /// Of what is no mapping.
    pub fn none(place: Place) -> Self {
        Fields {
            place,
            entries: Vec::new(),
        }
    }

    pub fn get(&self, key: &str) -> Option<Field<'n>> {
        let (_, node) = self.entries.iter().find(|(name, _)| *name == key)?;
        Some(Field {
            node,
            place: self.place.key(key),
        })
    }
}
