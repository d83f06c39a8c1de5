//! A node's first contact: tokens that an operator hands out, and the certificates that they are turned into.
//!
//! ```text
//! issue    ctl cert token   a secret is drawn, its hash goes into the book, the token is printed once
//! enrol    an agent asks    the token is looked up, a certificate is made and put on record with its key, and only then it leaves
//! ```
//!
//! What is on record survives a `kill -9` between two steps: the token then gives the same certificate to the key that it was used with, and
//! nothing to any other. One token makes one certificate: when that is revoked, the token is worth nothing either.

mod authority;
pub mod book;
mod store;

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use llmgw_proto::enrolment::{EnrolmentRefusal, EnrolmentRefusalCode, EnrolmentRequest};
use llmgw_proto::identity::{EnrolmentToken, FileProblem, Fingerprint, Serial};
use llmgw_proto::session::{NODE_ID_MAX_BYTES, is_node_id};

pub use self::authority::AuthorityFiles;
use self::book::{Allowed, Book, Full, KeyDigest, NotAllowed, TOKENS_MAX};
use self::store::Store;
use crate::config::{Agents, UtcTime};
use crate::random;

/// How long a token works where nobody says otherwise.
pub const LIFETIME_DEFAULT: Duration = Duration::from_secs(3_600);
const LIFETIME_MIN: Duration = Duration::from_secs(1);
/// For machines that are installed over a weekend. A token is as good as a certificate while it works.
const LIFETIME_MAX: Duration = Duration::from_secs(7 * 24 * 3_600);

/// What the authority's key is asked for. The errors are for a person.
pub trait Signing: Send + Sync + 'static {
    /// The authority as it is now.
    fn authority(&self) -> Result<Box<dyn Signer>, String>;

    /// The key that a signing request is for, where it proves that the sender has it.
    fn requested_key(&self, request: &str) -> Result<KeyDigest, String>;
}

/// An authority as it was read: what it signs is its own, whatever has come into its place meanwhile.
pub trait Signer {
    fn trusted(&self) -> Trusted;

    /// A certificate for the key of a signing request, with this node's id as its name. Nothing else of the request is taken.
    fn sign(&self, node: &str, request: &str) -> Result<Certified, String>;
}

/// The authority that signs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trusted {
    pub fingerprint: Fingerprint,
    /// PEM: this one, and those that are trusted beside it.
    pub pem: String,
}

/// A certificate that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certified {
    /// PEM.
    pub certificate: String,
    pub serial: String,
    pub not_after: String,
}

/// What a node gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    pub certified: Certified,
    /// PEM: the one that issued it, and those that are trusted beside it.
    pub authority: String,
}

/// A new token.
#[derive(Debug)]
pub struct Issued {
    pub token: EnrolmentToken,
    pub expires: UtcTime,
}

/// Why there is no new token.
#[derive(Debug)]
pub enum IssueError {
    /// No authority's key is on this server.
    Off,
    Node(String),
    Lifetime(Duration),
    Full,
    NoRandom,
    Authority(String),
    /// The server's own certificate is from another one than this, which signs.
    NotShown(Fingerprint),
    Store(FileProblem),
}

/// The tokens of one server. Asked by operators and agents, told by the configuration who signs.
pub struct Enrolment {
    store: Store,
    /// From the first time that somebody signs.
    held: Mutex<Option<File>>,
    /// Held while it is written, so that what is on disk is never older than what is here.
    book: Mutex<Book>,
    /// None: enrolment is off.
    signing: RwLock<Option<Arc<dyn Signing>>>,
    /// Serial numbers of certificates that are revoked: their keys get no others.
    denied: RwLock<BTreeSet<Serial>>,
    leads: Leads,
}

/// Whether what the agents' port shows of the server leads to an authority: an agent with a token takes no other server.
pub type Leads = Arc<dyn Fn(&Fingerprint) -> bool + Send + Sync>;

/// Why enrolment is off, and what there is instead.
const OFF: &str = "enrolment is off on this server: set `agents.tls.ca_key` there, or make the certificate with `llmgw ctl cert agent` and copy it";

impl Enrolment {
    /// Reads the tokens of an earlier run.
    ///
    /// # Errors
    /// They can't be read.
    pub fn open(state: &Path, leads: Leads) -> Result<Enrolment, FileProblem> {
        let store = Store::of(state);
        Ok(Enrolment {
            book: Mutex::new(store.load()?),
            store,
            held: Mutex::default(),
            signing: RwLock::new(None),
            denied: RwLock::default(),
            leads,
        })
    }

    /// From now on the authority of this configuration signs, if it names one with its key.
    ///
    /// # Errors
    /// Another server does so with the same state: nobody signs here.
    pub fn configure(&self, agents: Option<&Agents>) -> Result<(), FileProblem> {
        let denied = agents.map(|agents| agents.deny_serials.iter().cloned());
        self.deny(denied.into_iter().flatten().collect());
        let files = agents.and_then(AuthorityFiles::of);
        if files.is_some() {
            self.hold().inspect_err(|_| self.set_signing(None))?;
        }
        self.set_signing(files.map(|files| Arc::new(files) as Arc<dyn Signing>));
        Ok(())
    }

    /// Whether the authority of this configuration may sign here, if it names one with its key.
    ///
    /// # Errors
    /// As of `configure`.
    pub fn prepare(&self, agents: Option<&Agents>) -> Result<(), FileProblem> {
        match agents.and_then(AuthorityFiles::of) {
            Some(_) => self.hold(),
            None => Ok(()),
        }
    }

    fn hold(&self) -> Result<(), FileProblem> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.is_none() {
            let lock = self.store.lock()?;
            // What another server wrote before it ended.
            *self.lock() = self.store.load()?;
            *held = Some(lock);
        }
        Ok(())
    }

    fn deny(&self, serials: BTreeSet<Serial>) {
        *self.denied.write().unwrap_or_else(PoisonError::into_inner) = serials;
    }

    /// From now on this authority signs; `None`: nobody does.
    pub fn set_signing(&self, signing: Option<Arc<dyn Signing>>) {
        *self.signing.write().unwrap_or_else(PoisonError::into_inner) = signing;
    }

    /// Makes a token for a node, in place of its last one. Waits for the disk.
    ///
    /// # Errors
    /// Why there is none; the last one still works.
    pub fn issue(
        &self,
        node: &str,
        lifetime: Duration,
        now: UtcTime,
    ) -> Result<Issued, IssueError> {
        let signing = self.signing().ok_or(IssueError::Off)?;
        if !is_node_id(node) {
            return Err(IssueError::Node(node.to_owned()));
        }
        if !(LIFETIME_MIN..=LIFETIME_MAX).contains(&lifetime) {
            return Err(IssueError::Lifetime(lifetime));
        }
        let authority = signing.authority().map_err(IssueError::Authority)?;
        let authority = authority.trusted().fingerprint;
        if !(self.leads)(&authority) {
            return Err(IssueError::NotShown(authority));
        }
        let secret = random::bytes().ok_or(IssueError::NoRandom)?;
        let token = EnrolmentToken::new(node, secret, authority)
            .map_err(|_| IssueError::Node(node.to_owned()))?;
        let expires = UtcTime(now.0.saturating_add(lifetime.as_secs()));
        let mut book = self.lock();
        let mut changed = book.clone();
        changed
            .add(node, token.secret_hash(), expires, now)
            .map_err(|Full| IssueError::Full)?;
        self.store.save(&changed).map_err(IssueError::Store)?;
        *book = changed;
        Ok(Issued { token, expires })
    }

    /// Turns a token into a certificate. Waits for the disk.
    ///
    /// # Errors
    /// Why the node gets none.
    pub fn enrol(
        &self,
        request: &EnrolmentRequest,
        now: UtcTime,
    ) -> Result<Signed, EnrolmentRefusal> {
        let signing = self.signing().ok_or_else(off)?;
        let (token, claimed) = (&request.token, &request.node);
        // Who has no token has nothing of theirs parsed.
        self.lock()
            .find(token, claimed, now)
            .map_err(|why| refused(&why))?;
        let key = signing
            .requested_key(&request.signing_request)
            .map_err(|why| refusal(EnrolmentRefusalCode::Unreadable, why))?;
        let no = |why: &dyn fmt::Display| {
            tracing::error!("no certificate for node `{}`: {why}", token.node());
            failed()
        };
        // Held while it is signed: of two questions at once the second one gets what the first one made.
        let mut book = self.lock();
        // Read once: what goes on record is signed by the one that the token is from.
        let authority = signing.authority().map_err(|why| no(&why))?;
        let trusted = authority.trusted();
        // What the agent pins: it takes nothing from another one.
        if trusted.fingerprint != token.authority() {
            let node = token.node().to_owned();
            return Err(refused(&NotAllowed::OtherAuthority { node }));
        }
        let denied = self.denied.read().unwrap_or_else(PoisonError::into_inner);
        let allowed = book.check(token, claimed, key, &denied, now);
        drop(denied);
        let certified = match allowed.map_err(|why| refused(&why))? {
            Allowed::Again(certified) => certified,
            Allowed::First => {
                let made = authority.sign(token.node(), &request.signing_request);
                let certified = made.map_err(|why| no(&why))?;
                let mut changed = book.clone();
                changed.use_up(token.node(), key, certified.clone(), now);
                self.store.save(&changed).map_err(|error| no(&error))?;
                *book = changed;
                certified
            }
        };
        Ok(Signed {
            certified,
            authority: trusted.pem,
        })
    }

    fn signing(&self) -> Option<Arc<dyn Signing>> {
        self.signing
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What every agent is told where nobody signs.
pub fn off() -> EnrolmentRefusal {
    refusal(EnrolmentRefusalCode::Off, OFF.to_owned())
}

/// What is to be done where tokens of the authority that signs would work nowhere.
pub fn not_shown(authority: &Fingerprint) -> String {
    format!(
        "no token would work: an agent trusts the authority that signs, {authority}, and the certificate that `agents.tls.cert` shows it is not of that one; \
         make it anew with `llmgw ctl cert server --ca DIR`, DIR being that authority's, or set `agents.tls.ca_key` to the key of the one that issued it"
    )
}

fn failed() -> EnrolmentRefusal {
    let message =
        "the server could not do it at this moment, its log says why; the token still works";
    refusal(EnrolmentRefusalCode::Failed, message.to_owned())
}

fn refused(why: &NotAllowed) -> EnrolmentRefusal {
    refusal(why.code(), why.to_string())
}

fn refusal(code: EnrolmentRefusalCode, message: String) -> EnrolmentRefusal {
    EnrolmentRefusal { code, message }
}

impl fmt::Debug for Enrolment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_on = self.signing().is_some();
        f.debug_struct("Enrolment").field("is_on", &is_on).finish()
    }
}

impl fmt::Display for IssueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IssueError::Off => f.write_str(OFF),
            IssueError::Node(node) => write!(
                f,
                "`{node}` is not a node id: at most {NODE_ID_MAX_BYTES} letters, digits, `.`, `_` and `-`"
            ),
            IssueError::Lifetime(lifetime) => write!(
                f,
                "a token does not work for {} s: give it a second to 7 days (`--expires 1h`)",
                lifetime.as_secs_f64()
            ),
            IssueError::Full => write!(
                f,
                "{TOKENS_MAX} nodes have a token that still works; wait until some have expired"
            ),
            IssueError::NoRandom => f.write_str("the system gave no random bytes"),
            IssueError::Authority(why) => f.write_str(why),
            IssueError::NotShown(authority) => f.write_str(&not_shown(authority)),
            IssueError::Store(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for IssueError {}

#[cfg(test)]
pub(crate) mod tests;
