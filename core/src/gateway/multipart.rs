//! Finds the form field `model` in a multipart body (RFC 7578), such as that of an audio transcription.

use std::fmt;
use std::ops::Range;

use memchr::memmem::{self, Finder};

/// The longest boundary that RFC 2046 allows, and then some.
pub const BOUNDARY_MAX_BYTES: usize = 200;
/// The longest header section of a part.
pub const PART_HEADERS_MAX_BYTES: usize = 16 * 1024;
/// The most parts in a form.
pub const PARTS_MAX_COUNT: usize = 10_000;

/// Why a form is refused. All are the client's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MultipartError {
    /// The content type names no boundary, or no possible one.
    NoBoundary,
    /// The body has no part at all.
    NoPart,
    /// A part's headers can't be read.
    BadPart { offset: usize },
    /// The last boundary is missing: the body was cut off.
    Unfinished,
    /// Two parts are the field: an engine might read the other one.
    DuplicateModel,
    /// The form has too many parts.
    TooManyParts,
}

impl std::error::Error for MultipartError {}

impl fmt::Display for MultipartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MultipartError::NoBoundary => f.write_str("the content type has no valid `boundary`"),
            MultipartError::NoPart => {
                f.write_str("the form has no part with the boundary of its content type")
            }
            MultipartError::BadPart { offset } => {
                write!(f, "the form's part at byte {offset} has no valid headers")
            }
            MultipartError::Unfinished => f.write_str("the form lacks its last boundary"),
            MultipartError::DuplicateModel => f.write_str("the form has the field `model` twice"),
            MultipartError::TooManyParts => {
                write!(f, "the form has more than {PARTS_MAX_COUNT} parts")
            }
        }
    }
}

/// Where the value of the field `model` is in a form, if it has one. A body of another content type is no
/// form and has none.
pub fn find_model(body: &[u8], content_type: &str) -> Result<Option<Range<usize>>, MultipartError> {
    if !is_form(content_type) {
        return Ok(None);
    }
    let boundary = parameter(content_type.as_bytes(), b"boundary")
        .ok()
        .flatten()
        .unwrap_or_default();
    if boundary.is_empty() || boundary.len() > BOUNDARY_MAX_BYTES {
        return Err(MultipartError::NoBoundary);
    }
    let delimiter = [b"\r\n--", boundary.as_slice()].concat();
    let delimiters = Delimiters {
        body,
        delimiter: Finder::new(&delimiter),
    };
    let mut found = None;
    let mut part = delimiters.first().ok_or(MultipartError::NoPart)?;
    for _ in 0..PARTS_MAX_COUNT {
        if part.is_last {
            return Ok(found);
        }
        let next = delimiters
            .next(part.end)
            .ok_or(MultipartError::Unfinished)?;
        let (is_model, value) = read_part(&body[..next.start], part.end)?;
        if is_model && found.replace(value).is_some() {
            return Err(MultipartError::DuplicateModel);
        }
        part = next;
    }
    Err(MultipartError::TooManyParts)
}

/// Whether a content type is that of a form.
pub fn is_form(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default();
    kind.trim().eq_ignore_ascii_case("multipart/form-data")
}

/// A line with the boundary.
struct Delimiter {
    /// Where the line ending before it starts, which is part of it.
    start: usize,
    /// Where the next part starts.
    end: usize,
    is_last: bool,
}

struct Delimiters<'a> {
    body: &'a [u8],
    /// With the line ending before it.
    delimiter: Finder<'a>,
}

impl Delimiters<'_> {
    /// At the very start, or behind a preamble.
    fn first(&self) -> Option<Delimiter> {
        let line = &self.delimiter.needle()[2..];
        let at_start = self
            .body
            .starts_with(line)
            .then(|| self.read(0, line.len()))
            .flatten();
        at_start.or_else(|| self.next(0))
    }

    /// The next one whose line starts at `from` or later.
    fn next(&self, from: usize) -> Option<Delimiter> {
        // The line ending of one delimiter can be that of the next, around an empty part.
        let mut from = from.saturating_sub(2);
        loop {
            let at = from + self.delimiter.find(self.body.get(from..)?)?;
            let end = at + self.delimiter.needle().len();
            match self.read(at, end) {
                Some(delimiter) => return Some(delimiter),
                None => from = at + 2,
            }
        }
    }

    /// What the rest of the line makes of it: a longer text that merely starts with the boundary is none.
    fn read(&self, start: usize, end: usize) -> Option<Delimiter> {
        if self.body[end..].starts_with(b"--") {
            return Some(Delimiter {
                start,
                end: end + 2,
                is_last: true,
            });
        }
        let padding = self.body[end..]
            .iter()
            .take_while(|byte| matches!(byte, b' ' | b'\t'))
            .count();
        let end = end + padding;
        self.body[end..].starts_with(b"\r\n").then_some(Delimiter {
            start,
            end: end + 2,
            is_last: false,
        })
    }
}

/// Whether the part that starts at `start` and ends with `body` is the field, and where its value is.
fn read_part(body: &[u8], start: usize) -> Result<(bool, Range<usize>), MultipartError> {
    let bad = MultipartError::BadPart { offset: start };
    let part = body.get(start..).ok_or(bad)?;
    let window = &part[..part.len().min(PART_HEADERS_MAX_BYTES)];
    let (headers, value) = match memmem::find(window, b"\r\n\r\n") {
        _ if part.starts_with(b"\r\n") => (&part[..0], start + 2),
        Some(len) => (&part[..len], start + len + 4),
        None => return Err(bad),
    };
    let mut is_model = false;
    for line in unfold(headers) {
        let colon = memchr::memchr(b':', &line).ok_or(bad)?;
        if line[..colon]
            .trim_ascii()
            .eq_ignore_ascii_case(b"content-disposition")
        {
            let name = parameter(&line[colon + 1..], b"name").map_err(|Twice| bad)?;
            is_model |= name.as_deref() == Some(b"model");
        }
    }
    Ok((is_model, value..body.len()))
}

/// Header lines, those that go on in the next one joined.
fn unfold(headers: &[u8]) -> Vec<Vec<u8>> {
    let mut lines: Vec<Vec<u8>> = Vec::new();
    let mut at = 0;
    while at < headers.len() {
        let len = memmem::find(&headers[at..], b"\r\n").unwrap_or(headers.len() - at);
        let line = &headers[at..at + len];
        match lines.last_mut() {
            Some(last) if line.starts_with(b" ") || line.starts_with(b"\t") => {
                last.extend_from_slice(line)
            }
            _ => lines.push(line.to_vec()),
        }
        at += len + 2;
    }
    lines
}

/// A parameter is there twice.
struct Twice;

/// The value of a parameter in `value; name=token; name="quoted"`.
fn parameter(header: &[u8], wanted: &[u8]) -> Result<Option<Vec<u8>>, Twice> {
    let mut rest = &header[memchr::memchr(b';', header).unwrap_or(header.len())..];
    let mut found = None;
    while let Some(after) = rest.strip_prefix(b";") {
        let end_of_name = memchr::memchr2(b'=', b';', after).unwrap_or(after.len());
        let name = after[..end_of_name].trim_ascii();
        let (value, next) = match after[end_of_name..].strip_prefix(b"=") {
            Some(value) => parameter_value(value.trim_ascii_start()),
            None => (Vec::new(), &after[end_of_name..]),
        };
        if name.eq_ignore_ascii_case(wanted) && found.replace(value).is_some() {
            return Err(Twice);
        }
        rest = next;
    }
    Ok(found)
}

/// A token or a quoted string, and what follows from the next semicolon on.
fn parameter_value(text: &[u8]) -> (Vec<u8>, &[u8]) {
    let Some(quoted) = text.strip_prefix(b"\"") else {
        let end = memchr::memchr(b';', text).unwrap_or(text.len());
        return (text[..end].trim_ascii().to_vec(), &text[end..]);
    };
    let (mut value, mut at) = (Vec::new(), 0);
    while at < quoted.len() && quoted[at] != b'"' {
        // Only a quote and a backslash are escaped: browsers of old sent Windows paths as they were.
        if quoted[at] == b'\\' && matches!(quoted.get(at + 1), Some(b'"' | b'\\')) {
            at += 1;
        }
        value.push(quoted[at]);
        at += 1;
    }
    let rest = &quoted[(at + 1).min(quoted.len())..];
    let semicolon = memchr::memchr(b';', rest).unwrap_or(rest.len());
    (value, &rest[semicolon..])
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=XYZ";

    fn found(body: &str, content_type: &str) -> Result<Option<String>, MultipartError> {
        let range = find_model(body.as_bytes(), content_type)?;
        Ok(range.map(|range| body[range].to_owned()))
    }

    fn form(parts: &[(&str, &str)]) -> String {
        let part =
            |(headers, value): &(&str, &str)| format!("--XYZ\r\n{headers}\r\n\r\n{value}\r\n");
        parts.iter().map(part).collect::<String>() + "--XYZ--\r\n"
    }

    const FILE: (&str, &str) = (
        "Content-Disposition: form-data; name=\"file\"; filename=\"a; name=\\\"model\\\".wav\"\r\nContent-Type: audio/wav",
        "RIFF\r\n--XY\r\n--XYZZ\r\n\r\nmodel\0",
    );
    const MODEL: (&str, &str) = (
        "Content-Disposition: form-data; name=\"model\"",
        "whisper-1",
    );

    #[test]
    fn the_field_is_found_wherever_it_stands() {
        for parts in [
            vec![MODEL],
            vec![FILE, MODEL],
            vec![MODEL, FILE],
            vec![FILE, MODEL, FILE],
        ] {
            assert_eq!(found(&form(&parts), TYPE), Ok(Some("whisper-1".to_owned())));
        }
        assert_eq!(found(&form(&[FILE]), TYPE), Ok(None));
    }

    #[test]
    fn content_types_and_headers_are_read_as_clients_write_them() {
        let body = form(&[FILE, MODEL]);
        for content_type in [
            "multipart/form-data; boundary=\"XYZ\"",
            "Multipart/Form-Data;Boundary=XYZ",
            "multipart/form-data; charset=utf-8; boundary=XYZ ; x=y",
        ] {
            assert_eq!(
                found(&body, content_type),
                Ok(Some("whisper-1".to_owned())),
                "{content_type}"
            );
        }
        for headers in [
            "content-disposition:form-data;name=model",
            "CONTENT-DISPOSITION: form-data;\r\n name=\"model\"",
            "Content-Type: text/plain\r\nContent-Disposition: form-data; x=1; Name=\"mod\\el\""
                .replace("\\", "")
                .as_str(),
            "Content-Disposition: form-data; name=\"model\"; filename=\"\"",
        ] {
            assert_eq!(
                found(&form(&[FILE, (headers, "m")]), TYPE),
                Ok(Some("m".to_owned())),
                "{headers}"
            );
        }
        for headers in [
            "Content-Disposition: form-data; filename=\"model\"; name=\"x\"",
            "Content-Disposition: form-data; name=\"models\"",
            "Content-Disposition: form-data; name=\"MODEL\"",
            "X-Content-Disposition: form-data; name=\"model\"",
            "Content-Disposition: form-data; name*=utf-8''model",
        ] {
            assert_eq!(found(&form(&[(headers, "m")]), TYPE), Ok(None), "{headers}");
        }
        assert_eq!(found("{\"model\":1}", "application/json"), Ok(None));
    }

    #[test]
    fn a_preamble_an_epilogue_and_padding_are_passed_over() {
        let body = form(&[MODEL]).replace("XYZ\r\n", "XYZ \t\r\n");
        let body = format!("preamble --XYZ\r\nname=\"model\"\r\n{body}epilogue\r\n--XYZ\r\n");
        assert_eq!(found(&body, TYPE), Ok(Some("whisper-1".to_owned())));
        assert_eq!(found("--XYZ--", TYPE), Ok(None));
        let empty = "--XYZ\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n\r\n--XYZ--";
        assert_eq!(found(empty, TYPE), Ok(Some(String::new())));
    }

    #[test]
    fn broken_forms_are_refused() {
        let good = form(&[FILE, MODEL]);
        let cases = [
            (
                good.clone(),
                "multipart/form-data",
                MultipartError::NoBoundary,
            ),
            (
                good.clone(),
                "multipart/form-data; boundary=\"\"",
                MultipartError::NoBoundary,
            ),
            (
                good.clone(),
                "multipart/form-data; boundary=XYZ; boundary=ABC",
                MultipartError::NoBoundary,
            ),
            (
                good.clone(),
                "multipart/form-data; boundary=OTHER",
                MultipartError::NoPart,
            ),
            (
                good.replace("--XYZ--\r\n", ""),
                TYPE,
                MultipartError::Unfinished,
            ),
            (
                good.replace("--XYZ--", "--XYZ-"),
                TYPE,
                MultipartError::Unfinished,
            ),
            (
                form(&[MODEL, FILE, MODEL]),
                TYPE,
                MultipartError::DuplicateModel,
            ),
            (
                "--XYZ\r\nno headers\r\n--XYZ--".to_owned(),
                TYPE,
                MultipartError::BadPart { offset: 7 },
            ),
            (
                form(&[("Content-Disposition: form-data; name=x; name=model", "m")]),
                TYPE,
                MultipartError::BadPart { offset: 7 },
            ),
            (String::new(), TYPE, MultipartError::NoPart),
        ];
        for (body, content_type, expected) in cases {
            assert_eq!(
                found(&body, content_type),
                Err(expected),
                "{content_type} {body}"
            );
        }
    }

    #[test]
    fn every_cut_of_a_form_is_refused_or_has_its_end() {
        let body = form(&[FILE, MODEL]);
        for at in 0..body.len() {
            let result = found(&body[..at], TYPE);
            assert!(
                result.is_err()
                    || body[..at].ends_with("--XYZ--")
                    || body[..at].ends_with("--XYZ--\r"),
                "{at}"
            );
        }
    }

    #[test]
    fn the_value_can_be_replaced_and_all_else_stays() {
        let body = form(&[FILE, MODEL, FILE]);
        let mut edits = crate::gateway::splice::Edits::new();
        edits.replace(find_model(body.as_bytes(), TYPE).unwrap().unwrap(), *b"m");
        let edited = edits.apply(&bytes::Bytes::from(body.clone()));
        assert_eq!(edited, body.replace("whisper-1", "m"));
    }
}
