//! Why a model has no replica at this moment, as its requests are told it.

/// The reason where nothing in particular is known.
pub const NONE_READY: &str = "none of its replicas is ready";

/// What to expect of a model whose replicas the server starts itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outlook {
    /// The server has only just started, and agents still have to say what runs: a request does better to wait.
    pub recovering: bool,
    /// One sentence without a period; empty where nothing is known.
    pub reason: String,
}
