//! What the first bytes of a connection say: TLS where none is served, none where it is, and the way to tell a peer so in its own words.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::io::InspectReader;

/// As many as tell one from the other.
const OPENING_MAX_BYTES: usize = 8;
/// Of a peer that is turned away, so much is read before the socket is closed: a close over unread bytes takes the answer with it.
const LINGER_MAX_BYTES: usize = 64 << 10;
const LINGER_MAX: Duration = Duration::from_millis(1_000);

/// A fatal `unexpected_message`: what TLS says to who speaks none.
const TLS_ALERT: [u8; 7] = [21, 3, 3, 0, 2, 2, 10];
const HTTP_1_TLS_WANTED: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\nthis port wants TLS: write https://\n";
const HTTP_1_NO_TLS: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\nthis port speaks no TLS: write http://\n";

/// How a client begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    Tls,
    /// The preface of HTTP/2, as an agent sends it without TLS.
    Http2,
    /// `GET `, or another method.
    Http1,
    Other,
    /// The end came before anything else.
    Nothing,
}

/// Waits for the first bytes of a connection, and leaves them there. The caller limits how long that takes.
///
/// # Errors
/// As reading.
pub async fn peek(stream: &TcpStream) -> io::Result<Opening> {
    let mut first = [0; OPENING_MAX_BYTES];
    let length = stream.peek(&mut first).await?;
    Ok(Opening::of(&first[..length]))
}

impl Opening {
    pub fn of(first: &[u8]) -> Opening {
        const METHODS: [&[u8]; 7] = [
            b"GET ", b"POST", b"PUT ", b"HEAD", b"DELETE", b"OPTIONS", b"CONNECT",
        ];
        let begins = |with: &[u8]| {
            let length = first.len().min(with.len());
            first[..length] == with[..length]
        };
        match first {
            [] => Opening::Nothing,
            // A handshake record of any version; one byte may come alone.
            [22] | [22, 3, ..] => Opening::Tls,
            _ if begins(b"PRI * HT") => Opening::Http2,
            _ if METHODS.iter().any(|method| begins(method)) => Opening::Http1,
            _ => Opening::Other,
        }
    }

    /// For a sentence about a client that speaks no TLS.
    pub fn in_words(self) -> &'static str {
        match self {
            Opening::Tls => "TLS",
            Opening::Http2 => "HTTP/2 without TLS",
            Opening::Http1 => "HTTP/1.1 without TLS",
            Opening::Other => "neither TLS nor HTTP",
            Opening::Nothing => "nothing at all",
        }
    }
}

/// Tells a client that this port wants TLS, and closes.
pub async fn ask_for_tls(stream: TcpStream, opening: Opening) {
    let answer: &[u8] = match opening {
        Opening::Http1 => HTTP_1_TLS_WANTED,
        _ => &TLS_ALERT,
    };
    turn_away(stream, answer).await;
}

/// Tells a client that this port speaks no TLS, and closes.
pub async fn deny_tls(stream: TcpStream) {
    turn_away(stream, HTTP_1_NO_TLS).await;
}

async fn turn_away(mut stream: TcpStream, answer: &[u8]) {
    let telling = async {
        stream.write_all(answer).await?;
        stream.shutdown().await?;
        let mut rest = (&mut stream).take(LINGER_MAX_BYTES as u64);
        tokio::io::copy(&mut rest, &mut tokio::io::sink()).await
    };
    // Whoever does not listen is closed all the same.
    let _ = timeout(LINGER_MAX, telling).await;
}

/// A connection of which the first bytes that it yields are noted.
pub type Noted<S> = InspectReader<S, Box<dyn FnMut(&[u8]) + Send>>;

/// What a [`Noted`] connection yielded first.
#[derive(Clone, Debug)]
pub struct FirstAnswer(Arc<OnceLock<Answer>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Tls,
    /// A letter, as HTTP/1.1 begins with.
    Text,
    Other,
}

pub fn note<S: AsyncRead>(inner: S) -> (Noted<S>, FirstAnswer) {
    let first = Arc::new(OnceLock::new());
    let answer = first.clone();
    let note = move |read: &[u8]| {
        if let Some(byte) = read.first() {
            let _ = answer.set(Answer::of(*byte));
        }
    };
    (
        InspectReader::new(inner, Box::new(note)),
        FirstAnswer(first),
    )
}

impl Answer {
    /// An alert or a handshake record. HTTP/2 begins with a length below 2^22, HTTP/1.1 with a letter.
    fn of(first: u8) -> Answer {
        match first {
            21 | 22 => Answer::Tls,
            letter if letter.is_ascii_alphabetic() => Answer::Text,
            _ => Answer::Other,
        }
    }
}

impl FirstAnswer {
    /// The other side answered plaintext with TLS.
    pub fn is_tls(&self) -> bool {
        self.0.get() == Some(&Answer::Tls)
    }

    /// It speaks HTTP/1.1, or something else that begins with a word.
    pub fn is_text(&self) -> bool {
        self.0.get() == Some(&Answer::Text)
    }

    /// It has said nothing so far.
    pub fn is_nothing(&self) -> bool {
        self.0.get().is_none()
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn first_bytes_tell_how_a_client_begins() {
        for (first, opening) in [
            (&b""[..], Opening::Nothing),
            (&[22][..], Opening::Tls),
            (&[22, 3, 1, 2, 0, 1, 0, 1], Opening::Tls),
            (&[22, 4, 1], Opening::Other),
            (b"PRI * HT", Opening::Http2),
            (b"PRI", Opening::Http2),
            (b"GET / HT", Opening::Http1),
            (b"POST /v1", Opening::Http1),
            (b"CONNECT ", Opening::Http1),
            (&[0xaa; 8], Opening::Other),
            (b"SSH-2.0-", Opening::Other),
        ] {
            assert_eq!(Opening::of(first), opening, "{first:?}");
        }
    }

    #[tokio::test]
    async fn a_look_at_the_first_bytes_takes_none_of_them() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        client.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        assert_eq!(peek(&server).await.unwrap(), Opening::Http1);
        let mut read = [0; 18];
        server.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"GET / HTTP/1.1\r\n\r\n");
    }

    #[tokio::test]
    async fn who_is_turned_away_reads_the_answer_although_it_said_more_than_was_looked_at() {
        for (opening, begins) in [
            (Opening::Http2, &TLS_ALERT[..]),
            (Opening::Http1, b"HTTP/1.1 400 Bad Request\r\n"),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).await;
            let (client, first) = note(client.unwrap());
            let mut client = client;
            client.write_all(&[b'x'; 40_000]).await.unwrap();
            let (server, _) = listener.accept().await.unwrap();
            let serving = tokio::spawn(ask_for_tls(server, opening));
            let mut read = Vec::new();
            client.read_to_end(&mut read).await.unwrap();
            assert!(read.starts_with(begins), "{read:?}");
            assert_eq!(first.is_tls(), opening == Opening::Http2);
            drop(client);
            serving.await.unwrap();
        }
    }
}
