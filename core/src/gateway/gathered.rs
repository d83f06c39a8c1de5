//! A body that is read whole, of which one chunk is the usual case and needs no copy.

use bytes::{Bytes, BytesMut};

/// The chunks so far. The reader bounds them.
#[derive(Default)]
pub struct Gathered {
    /// The only chunk, as long as it is one.
    first: Bytes,
    joined: BytesMut,
    /// The whole length, where it was announced: room is made once, if there is a second chunk.
    announced: usize,
}

impl Gathered {
    pub fn announced(bytes: usize) -> Gathered {
        Gathered {
            announced: bytes,
            ..Gathered::default()
        }
    }

    pub fn len(&self) -> usize {
        self.first.len() + self.joined.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn push(&mut self, chunk: Bytes) {
        if self.is_empty() {
            self.first = chunk;
            return;
        }
        if self.joined.is_empty() {
            self.joined.reserve(self.announced);
            self.joined
                .extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.joined.extend_from_slice(&chunk);
    }

    pub fn into_bytes(self) -> Bytes {
        if self.joined.is_empty() {
            self.first
        } else {
            self.joined.freeze()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_chunk_is_handed_on_as_it_is_and_several_are_joined_in_order() {
        let only = Bytes::from_static(b"only");
        let mut one = Gathered::default();
        one.push(Bytes::new());
        one.push(only.clone());
        assert_eq!(one.into_bytes().as_ptr(), only.as_ptr());
        let mut several = Gathered::announced(6);
        for chunk in ["ab", "", "cd", "ef"] {
            several.push(Bytes::from_static(chunk.as_bytes()));
        }
        assert_eq!(several.len(), 6);
        assert_eq!(several.into_bytes(), "abcdef");
        assert!(Gathered::default().into_bytes().is_empty());
    }
}
