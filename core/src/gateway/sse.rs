//! Server-sent events, cut at event boundaries as the bytes arrive and read without copying.
//!
//! A stream is lines; a blank line ends an event. Lines end in LF, CRLF or CR, and a read from the
//! network may end anywhere, also between the CR and the LF of one line ending.

use std::borrow::Cow;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use memchr::{memchr2, memrchr2};

/// The largest incomplete event that is held back. A longer one passes through in pieces: it can't
/// be read any more, yet it arrives.
pub const EVENT_MAX_BYTES: usize = 1024 * 1024;

/// U+FEFF in UTF-8: allowed once, at the very start of a stream.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What a position before the first byte of an event looks like: the start of a line.
const LINE_START: [u8; 2] = *b"\n\n";

/// Cuts a byte stream at event boundaries.
///
/// Every byte that was pushed comes out once, in order: through `push`, or through `finish`.
#[derive(Debug)]
pub struct EventSplitter {
    /// The beginning of an event whose end hasn't arrived.
    held: BytesMut,
    /// The last two bytes that came before what `push` gets next, or `LINE_START` between events.
    before: [u8; 2],
    /// Inside an event that grew beyond the limit and is passed through.
    oversize: bool,
    /// Where the whole events lie in what the last `push` returned.
    whole: Range<usize>,
    max_bytes: usize,
}

/// One event, borrowed from the bytes that it came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event<'a> {
    /// All bytes of the event, its blank line included. Those of successive events are contiguous.
    pub raw: &'a [u8],
    /// The value of the last `event:` line.
    pub name: Option<&'a [u8]>,
    /// The value of the `data:` line (borrowed from `raw`), or of several, joined by LF.
    pub data: Cow<'a, [u8]>,
    /// There is no `data:` line: comments (keep-alives), or fields that clients ignore without one.
    pub is_comment: bool,
}

/// Iterates over the events in some bytes. See [`events`].
#[derive(Debug, Clone)]
pub struct Events<'a> {
    rest: &'a [u8],
}

impl Default for EventSplitter {
    fn default() -> Self {
        EventSplitter::new()
    }
}

impl EventSplitter {
    pub fn new() -> Self {
        EventSplitter::with_limit(EVENT_MAX_BYTES)
    }

    /// Holds back at most `max_bytes` of an incomplete event.
    pub fn with_limit(max_bytes: usize) -> Self {
        EventSplitter {
            held: BytesMut::new(),
            before: LINE_START,
            oversize: false,
            whole: 0..0,
            max_bytes,
        }
    }

    /// Takes the next bytes of the stream and returns what may be passed on: all events that are
    /// whole now, contiguous, and pieces of an event beyond the limit. [`whole`](Self::whole)
    /// says which part of it can be read as events.
    ///
    /// A chunk that ends at a boundary comes back as it is. Bytes are copied only where an event was split.
    pub fn push(&mut self, chunk: Bytes) -> Option<Bytes> {
        self.whole = 0..0;
        if chunk.is_empty() {
            return None;
        }
        if self.oversize {
            return Some(self.push_oversize(chunk));
        }
        let end = last_boundary(self.before, &chunk);
        if end == chunk.len() && self.held.is_empty() {
            self.whole = 0..end;
            return Some(chunk);
        }
        if chunk.len() - end + if end == 0 { self.held.len() } else { 0 } > self.max_bytes {
            return Some(self.start_oversize(chunk, end));
        }
        if end == 0 {
            self.remember(&chunk);
            self.held.extend_from_slice(&chunk);
            return None;
        }
        let whole = self.join(chunk.slice(..end));
        self.before = LINE_START;
        self.remember(&chunk[end..]);
        self.held.extend_from_slice(&chunk[end..]);
        self.whole = 0..whole.len();
        Some(whole)
    }

    /// Which bytes of what the last `push` returned are whole events. It is everything, save around
    /// an event beyond the limit, whose pieces must not be read as events.
    pub fn whole(&self) -> Range<usize> {
        self.whole.clone()
    }

    /// How many bytes wait for the end of their event.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// The client has got the beginning of an event and not its end. An event of our own can't be put here.
    pub fn is_inside_oversize(&self) -> bool {
        self.oversize
    }

    /// What was held back when the stream ended: an event without its end.
    pub fn finish(&mut self) -> Bytes {
        self.before = LINE_START;
        std::mem::take(&mut self.held).freeze()
    }

    fn push_oversize(&mut self, chunk: Bytes) -> Bytes {
        let Some(tail) = first_boundary(self.before, &chunk) else {
            self.remember(&chunk);
            return chunk;
        };
        self.oversize = false;
        self.before = LINE_START;
        match self.push(chunk.slice(tail..)) {
            // Whatever came back is contiguous with the tail: only `start_oversize` and `join` build
            // new bytes, and nothing is held here for them to build from.
            Some(more) => {
                self.whole = self.whole.start + tail..self.whole.end + tail;
                chunk.slice(..tail + more.len())
            }
            None => chunk.slice(..tail),
        }
    }

    fn start_oversize(&mut self, chunk: Bytes, end: usize) -> Bytes {
        let held = self.held.len();
        if end > 0 {
            self.before = LINE_START;
            self.whole = 0..held + end;
        }
        self.remember(&chunk[end..]);
        self.oversize = true;
        self.join(chunk)
    }

    /// What was held, followed by `bytes`.
    fn join(&mut self, bytes: Bytes) -> Bytes {
        if self.held.is_empty() {
            return bytes;
        }
        let mut held = std::mem::take(&mut self.held);
        held.extend_from_slice(&bytes);
        held.freeze()
    }

    fn remember(&mut self, bytes: &[u8]) {
        match bytes {
            [] => {}
            [last] => self.before = [self.before[1], *last],
            [.., before_last, last] => self.before = [*before_last, *last],
        }
    }
}

impl Event<'_> {
    /// Where `data` lies in `raw`; `None` where it was joined from several lines.
    pub fn data_range(&self) -> Option<Range<usize>> {
        match &self.data {
            Cow::Borrowed(data) => {
                let start = (data.as_ptr() as usize).checked_sub(self.raw.as_ptr() as usize)?;
                (start + data.len() <= self.raw.len()).then(|| start..start + data.len())
            }
            Cow::Owned(_) => None,
        }
    }
}

/// The events in `bytes`, which start at an event. A last event that lacks its blank line is
/// returned too, so pass whole events unless the stream is over.
///
/// Blank lines before an event count as part of it; an LF whose CR already ended the event before
/// looks like one.
pub fn events(bytes: &[u8]) -> Events<'_> {
    Events { rest: bytes }
}

impl<'a> Iterator for Events<'a> {
    type Item = Event<'a>;

    fn next(&mut self) -> Option<Event<'a>> {
        let bytes = self.rest;
        if bytes.is_empty() {
            return None;
        }
        let mut name = None;
        let mut data: Option<Cow<'a, [u8]>> = None;
        let mut any_line = false;
        let mut at = if bytes.starts_with(BYTE_ORDER_MARK) {
            BYTE_ORDER_MARK.len()
        } else {
            0
        };
        while at < bytes.len() {
            let (line, next) = read_line(bytes, at);
            at = next;
            if line.is_empty() {
                if any_line {
                    break;
                }
                continue;
            }
            any_line = true;
            if let Some(value) = field(line, b"data") {
                data = Some(match data {
                    None => Cow::Borrowed(value),
                    Some(earlier) => joined(earlier, value),
                });
            } else if let Some(value) = field(line, b"event") {
                name = Some(value);
            }
        }
        let (raw, rest) = bytes.split_at(at);
        self.rest = rest;
        let is_comment = data.is_none();
        Some(Event {
            raw,
            name,
            data: data.unwrap_or(Cow::Borrowed(&[])),
            is_comment,
        })
    }
}

/// The line that starts at `at`, and where the next one starts.
fn read_line(bytes: &[u8], at: usize) -> (&[u8], usize) {
    let rest = &bytes[at..];
    match memchr2(b'\n', b'\r', rest) {
        None => (rest, bytes.len()),
        Some(len) => {
            let is_crlf = rest[len] == b'\r' && rest.get(len + 1) == Some(&b'\n');
            (&rest[..len], at + len + if is_crlf { 2 } else { 1 })
        }
    }
}

/// The value of `line` if its field is `name`: after the colon, less one space.
fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    match line.strip_prefix(name)? {
        [] => Some(&line[line.len()..]),
        [b':', b' ', value @ ..] | [b':', value @ ..] => Some(value),
        _ => None,
    }
}

fn joined<'a>(earlier: Cow<'a, [u8]>, line: &[u8]) -> Cow<'a, [u8]> {
    let mut all = earlier.into_owned();
    all.push(b'\n');
    all.extend_from_slice(line);
    Cow::Owned(all)
}

/// Where the last event in `chunk` ends, 0 if none does. `before` are the two bytes in front of it.
fn last_boundary(before: [u8; 2], chunk: &[u8]) -> usize {
    let mut end = chunk.len();
    while let Some(at) = memrchr2(b'\n', b'\r', &chunk[..end]) {
        if ends_blank_line(before, chunk, at) {
            return at + 1;
        }
        end = at;
    }
    0
}

/// Where the first event in `chunk` ends.
fn first_boundary(before: [u8; 2], chunk: &[u8]) -> Option<usize> {
    let mut start = 0;
    while let Some(len) = memchr2(b'\n', b'\r', &chunk[start..]) {
        let at = start + len;
        if ends_blank_line(before, chunk, at) {
            let is_crlf = chunk[at] == b'\r' && chunk.get(at + 1) == Some(&b'\n');
            return Some(at + if is_crlf { 2 } else { 1 });
        }
        start = at + 1;
    }
    None
}

/// Whether the line ending whose last byte is at `at` ends an empty line.
fn ends_blank_line(before: [u8; 2], chunk: &[u8], at: usize) -> bool {
    let byte = |back: usize| {
        if back <= at {
            chunk[at - back]
        } else {
            before[1 + at - (back - 1)]
        }
    };
    let is_end = |byte: u8| byte == b'\n' || byte == b'\r';
    if chunk[at] == b'\n' && byte(1) == b'\r' {
        is_end(byte(2))
    } else {
        is_end(byte(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::recordings;

    /// Owned (name, data, raw) of each event.
    type Read = Vec<(Option<Vec<u8>>, Vec<u8>)>;

    fn read(bytes: &[u8]) -> Read {
        let owned = |event: Event<'_>| (event.name.map(<[u8]>::to_vec), event.data.into_owned());
        events(bytes)
            .filter(|event| !event.is_comment)
            .map(owned)
            .collect()
    }

    /// Pushes pieces, and checks that each result is whole events and that no byte is lost.
    fn push_all<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Read, Vec<u8>) {
        let (mut splitter, mut found, mut bytes, mut expected) =
            (EventSplitter::new(), Vec::new(), Vec::new(), Vec::new());
        for piece in pieces {
            expected.extend_from_slice(piece);
            if let Some(out) = splitter.push(Bytes::copy_from_slice(piece)) {
                assert_eq!(splitter.whole(), 0..out.len());
                found.extend(read(&out));
                bytes.extend_from_slice(&out);
            }
            assert_eq!(splitter.held(), expected.len() - bytes.len());
        }
        let rest = splitter.finish();
        bytes.extend_from_slice(&rest);
        assert_eq!(bytes, expected);
        (found, rest.to_vec())
    }

    const STREAM: &str = "\u{feff}: hi\n\ndata: 1\n\ndata:2\nid: 7\ndata:  3\n\nevent: ping\ndata\n\ndata: {\"a\":\"\\n\"}\n\n:\n\n\ndata: [DONE]\n\n";

    fn stream_events() -> Read {
        let event = |data: &str| (None, data.as_bytes().to_vec());
        vec![
            event("1"),
            event("2\n 3"),
            (Some(b"ping".to_vec()), Vec::new()),
            event("{\"a\":\"\\n\"}"),
            event("[DONE]"),
        ]
    }

    #[test]
    fn every_line_ending_gives_the_same_events_split_at_any_two_bytes() {
        for ending in ["\n", "\r\n", "\r"] {
            let stream = STREAM.replace('\n', ending).into_bytes();
            let stream = stream.as_slice();
            for first in 0..=stream.len() {
                for second in first..=stream.len() {
                    let (found, rest) =
                        push_all([&stream[..first], &stream[first..second], &stream[second..]]);
                    assert_eq!(
                        found,
                        stream_events(),
                        "{ending:?} split at {first} and {second}"
                    );
                    assert!(rest.is_empty(), "{ending:?} split at {first} and {second}");
                }
            }
        }
    }

    #[test]
    fn bytes_one_by_one_give_the_same_events() {
        for ending in ["\n", "\r\n", "\r"] {
            let stream = STREAM.replace('\n', ending).into_bytes();
            assert_eq!(push_all(stream.chunks(1)).0, stream_events(), "{ending:?}");
        }
    }

    #[test]
    fn every_recording_split_at_every_byte_gives_the_same_events() {
        for recording in recordings::all()
            .iter()
            .filter(|recording| recording.is_stream())
        {
            let body = recording.body();
            let (expected, rest) = push_all(recording.chunks.iter().map(Vec::as_slice));
            assert!(expected.len() > 3, "{}", recording.name);
            assert!(rest.is_empty(), "{}", recording.name);
            let step = 1 + body.len() / 1000;
            for at in (0..=body.len()).step_by(step) {
                assert_eq!(
                    push_all([&body[..at], &body[at..]]).0,
                    expected,
                    "{} split at {at}",
                    recording.name
                );
            }
            let (mut seed, mut pieces, mut at) = (body.len() as u64, Vec::new(), 0);
            while at < body.len() {
                seed = seed
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                let next = (at + 1 + (seed >> 33) as usize % 300).min(body.len());
                pieces.push(&body[at..next]);
                at = next;
            }
            assert_eq!(push_all(pieces).0, expected, "{} in pieces", recording.name);
        }
    }

    #[test]
    fn a_chunk_that_ends_at_a_boundary_is_not_copied() {
        let mut splitter = EventSplitter::new();
        let chunk = Bytes::from_static(b"data: 1\n\ndata: 2\n\n");
        let out = splitter.push(chunk.clone()).unwrap();
        assert_eq!((out.as_ptr(), out.len()), (chunk.as_ptr(), chunk.len()));
        let chunk = Bytes::from_static(b"data: 3\n\ndata: 4");
        let out = splitter.push(chunk.clone()).unwrap();
        assert_eq!(
            (out.as_ptr(), out.len(), splitter.held()),
            (chunk.as_ptr(), 9, 7)
        );
        assert!(matches!(
            events(&out).next().unwrap().data,
            Cow::Borrowed(b"3")
        ));
    }

    #[test]
    fn the_raw_bytes_of_events_are_contiguous_and_complete() {
        for ending in ["\n", "\r\n", "\r"] {
            let stream = (STREAM.replace('\n', ending) + "data: cut").into_bytes();
            let raw: Vec<u8> = events(&stream)
                .flat_map(|event| event.raw.to_vec())
                .collect();
            assert_eq!(raw, stream);
            for event in events(&stream) {
                if let Some(range) = event.data_range() {
                    assert_eq!(&event.raw[range], event.data.as_ref());
                }
            }
        }
    }

    #[test]
    fn an_event_beyond_the_limit_passes_in_pieces_and_the_next_ones_are_read() {
        let before = "data: before\n\n";
        let long = format!("data: {}\ndata: [DONE]\n\n", "x".repeat(40));
        for ending in ["\n", "\r\n", "\r"] {
            let stream = format!("{before}{long}data: after\n\n")
                .replace('\n', ending)
                .into_bytes();
            for size in 1..stream.len() {
                let (mut splitter, mut out, mut seen) =
                    (EventSplitter::with_limit(16), Vec::new(), Vec::new());
                for piece in stream.chunks(size) {
                    if let Some(bytes) = splitter.push(Bytes::copy_from_slice(piece)) {
                        seen.extend(read(&bytes[splitter.whole()]));
                        out.extend_from_slice(&bytes);
                    }
                    assert!(splitter.held() <= 16);
                }
                assert_eq!(out, stream, "{ending:?} {size}");
                assert!(!splitter.is_inside_oversize());
                let seen: Vec<_> = seen
                    .iter()
                    .map(|(_, data)| String::from_utf8_lossy(data))
                    .collect();
                assert_eq!(
                    (seen[0].as_ref(), seen[seen.len() - 1].as_ref()),
                    ("before", "after"),
                    "{ending:?} {size}"
                );
                assert!(
                    seen.iter().all(|data| data != "[DONE]"),
                    "{ending:?} {size}: {seen:?}"
                );
            }
        }
    }
}
