//! Bytes as people compare them: two hex digits each.

use std::fmt::Write;

pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing into a String doesn't fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// The bytes that [`hex`] writes so: exactly as many, in lower-case digits.
pub fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_two_digits() {
        assert_eq!(hex(&[0, 10, 255]), "000aff");
        assert_eq!(unhex("000aff"), Some([0, 10, 255]));
    }

    #[test]
    fn what_is_no_byte_in_two_lower_case_digits_is_none() {
        for text in ["", "0", "00aF", "00a", "0 aa", "00aa0", "00aag0", "é0"] {
            assert_eq!(unhex::<2>(text), None, "{text}");
        }
    }
}
