//! `llmgw ctl cert`: makes an authority, and with its key the certificates of servers and agents, as files to copy to where they are used.

mod page;

use std::fmt;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use llmgw_proto::identity::certificate::{Certificate, NoCertificate};
use llmgw_proto::identity::files::{FILE_MAX_BYTES, FileFault, FileProblem, read_certificates};
use llmgw_proto::identity::placing::{self, CERTIFICATE_MODE, KEY_MODE, NewFile};
use llmgw_proto::identity::{Authorities, Host, Moment};
use llmgw_proto::regular;
use llmgw_proto::session::{NODE_ID_MAX_BYTES, is_node_id};
use memchr::memmem;
use rcgen::{KeyPair, PublicKeyData};

use super::{CtlError, OutputFormat};
use crate::authority::{
    self, Authority, AuthorityProblem, CERTIFICATE_FILE, Holder, KEY_FILE, Made, pem_of,
};
use page::Page;

const SERVER_FILES: (&str, &str) = ("server.pem", "server-key.pem");
const AGENT_FILES: (&str, &str) = ("agent.pem", "agent-key.pem");

/// What can be done with certificates.
#[derive(Debug, Subcommand)]
pub enum CertCommand {
    /// Make an authority: a certificate that every machine gets, and a key that stays on this one.
    Ca {
        /// Where `ca.pem` and `ca-key.pem` are written; the directory is made where it is missing.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Make a server's certificate and key.
    Server {
        /// The authority's directory.
        #[arg(long, value_name = "DIR")]
        ca: PathBuf,
        /// A name or address that agents dial, without a port; once for each of them.
        #[arg(long = "host", value_name = "HOST", required = true)]
        hosts: Vec<Host>,
        /// Where `server.pem`, `server-key.pem` and a copy of `ca.pem` are written.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Make an agent's certificate and key.
    Agent {
        /// The authority's directory.
        #[arg(long, value_name = "DIR")]
        ca: PathBuf,
        /// The id of the node: `node` in its agent.yaml, which is its host name by default.
        #[arg(long, value_name = "ID", value_parser = node_id)]
        node: String,
        /// Where `agent.pem`, `agent-key.pem` and a copy of `ca.pem` are written.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Show what a file's certificates say: for whom, by whom, until when.
    Show {
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Write a new certificate over an old one: for the same names and the same key.
    Renew {
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// The directory of the authority that issued it.
        #[arg(long, value_name = "DIR")]
        ca: PathBuf,
    },
}

/// Why nothing was made or shown.
#[derive(Debug)]
pub enum CertError {
    Authority(AuthorityProblem),
    /// There is no authority in the directory.
    NoAuthority(FileProblem),
    /// Beside the new certificate is another authority's `ca.pem`.
    OtherAuthority {
        file: PathBuf,
        directory: PathBuf,
    },
}

/// Does what was asked for and says so on `out`. Nothing is written unless all of it can be.
pub(super) fn run(
    command: &CertCommand,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CtlError> {
    let now = Moment::now();
    let page = match command {
        CertCommand::Ca { out } => make_authority(out, now),
        CertCommand::Server { ca, hosts, out } => make_server(ca, hosts, out, now),
        CertCommand::Agent { ca, node, out } => make_agent(ca, node, out, now),
        CertCommand::Show { file } => show(file),
        CertCommand::Renew { file, ca } => renew(file, ca, now),
    };
    let page = page.map_err(CtlError::Cert)?;
    for warning in &page.warnings {
        eprintln!("llmgw ctl: {warning}");
    }
    match format {
        OutputFormat::Text => write!(out, "{}", page.text(now))?,
        OutputFormat::Json => writeln!(out, "{:#}", page.json(now))?,
    }
    Ok(())
}

fn make_authority(out: &Path, now: Moment) -> Result<Page, CertError> {
    let made = authority::make(now)?;
    let key = out.join(KEY_FILE);
    let certificate = out.join(CERTIFICATE_FILE);
    placing::make_directory(out)?;
    placing::place(&[
        new_key(&key, made.key_pem),
        new_certificate(&certificate, made.pem),
    ])?;
    Ok(page::authority(out, &certificate, &key, made.certificate))
}

fn make_server(ca: &Path, hosts: &[Host], out: &Path, now: Moment) -> Result<Page, CertError> {
    let mut once: Vec<Host> = Vec::new();
    for host in hosts {
        if !once.contains(host) {
            once.push(host.clone());
        }
    }
    let authority = load(ca, now)?;
    let holder = Holder::server(once);
    let (made, files) = issue(&authority, &holder, (ca, out), SERVER_FILES, now)?;
    Ok(page::server(files, made.certificate).with_end_of(&authority))
}

fn make_agent(ca: &Path, node: &str, out: &Path, now: Moment) -> Result<Page, CertError> {
    let authority = load(ca, now)?;
    let holder = Holder::agent(node);
    let (made, files) = issue(&authority, &holder, (ca, out), AGENT_FILES, now)?;
    Ok(page::agent(node, files, made.certificate).with_end_of(&authority))
}

/// Issues a certificate for a new key, and writes both and the authority's certificate into one directory. The files: certificate, key, authority.
fn issue(
    authority: &Authority,
    holder: &Holder,
    (ca, out): (&Path, &Path),
    (certificate, key): (&str, &str),
    now: Moment,
) -> Result<(Made, [PathBuf; 3]), CertError> {
    let pair = KeyPair::generate().map_err(AuthorityProblem::Make)?;
    let made = authority.issue(holder, &pair.subject_public_key_info(), now)?;
    let files = [certificate, key, CERTIFICATE_FILE].map(|name| out.join(name));
    let mut new = vec![new_key(&files[1], pair.serialize_pem())];
    if !holds(&files[2], authority, ca)? {
        new.push(new_certificate(&files[2], authority.trusted.clone()));
    }
    // The last one: where it is, the others are.
    new.push(new_certificate(&files[0], made.pem.clone()));
    placing::make_directory(out)?;
    placing::place(&new)?;
    Ok((made, files))
}

/// Whether the authority's certificate is there already.
fn holds(file: &Path, authority: &Authority, ca: &Path) -> Result<bool, CertError> {
    match regular::read(file, FILE_MAX_BYTES) {
        Ok(text) if is_of(&text, authority) => Ok(true),
        Ok(_) => Err(CertError::OtherAuthority {
            file: file.to_owned(),
            directory: ca.to_owned(),
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(FileProblem::new(file, FileFault::Io(error)).into()),
    }
}

/// Whether the same certificates are in a file's text, whatever else is.
fn is_of(text: &[u8], authority: &Authority) -> bool {
    Authorities::from_pem(text).is_ok_and(|found| pem_of(&found.der) == authority.trusted)
}

fn show(file: &Path) -> Result<Page, CertError> {
    let bad = |error: NoCertificate| FileProblem::new(file, FileFault::BadCertificate(error));
    let certificates = read_certificates(file)?
        .iter()
        .map(|der| Certificate::from_der(der).map_err(bad))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(page::shown_certificates(certificates))
}

fn renew(file: &Path, ca: &Path, now: Moment) -> Result<Page, CertError> {
    let authority = load(ca, now)?;
    let io = |error| FileProblem::new(file, FileFault::Io(error));
    // The file itself, not a link to it.
    let target = fs::canonicalize(file).map_err(io)?;
    let mode = fs::metadata(&target).map_err(io)?.permissions().mode() & 0o777;
    let chain = read_certificates(file)?;
    let old = Certificate::from_der(&chain[0])
        .map_err(|error| FileProblem::new(file, FileFault::BadCertificate(error)))?;
    let made = authority.renew(file, &chain[0], now)?;
    let text = regular::read(&target, FILE_MAX_BYTES).map_err(io)?;
    let text = with_first_certificate(&text, &made.pem);
    placing::replace(&NewFile {
        path: target,
        text,
        mode,
    })?;
    Ok(page::renewed(file, &old, made.certificate).with_end_of(&authority))
}

/// A file with another first certificate, and all else in it as it was, byte by byte: comments are in any encoding.
fn with_first_certificate(file: &[u8], pem: &str) -> Vec<u8> {
    const BEGIN: &[u8] = b"-----BEGIN CERTIFICATE-----";
    const END: &[u8] = b"-----END CERTIFICATE-----";
    // Where a line begins: a comment may name the mark too.
    let begins_line = |at: &usize| *at == 0 || matches!(file[*at - 1], b'\n' | b'\r');
    let start = memmem::find_iter(file, BEGIN)
        .find(begins_line)
        .unwrap_or(0);
    let end = memmem::find(&file[start..], END).map(|at| start + at + END.len());
    let mut rest = end.map_or(&file[..0], |end| &file[end..]);
    while let [b'\r' | b'\n', behind @ ..] = rest {
        rest = behind;
    }
    [&file[..start], pem.trim_end().as_bytes(), b"\n", rest].concat()
}

fn load(directory: &Path, now: Moment) -> Result<Authority, CertError> {
    Authority::load(directory, now).map_err(|problem| match problem {
        AuthorityProblem::File(FileProblem {
            file,
            fault: FileFault::Io(error),
        }) if error.kind() == ErrorKind::NotFound => {
            CertError::NoAuthority(FileProblem::new(&file, FileFault::Io(error)))
        }
        problem => CertError::Authority(problem),
    })
}

fn new_key(path: &Path, text: String) -> NewFile {
    NewFile {
        path: path.to_owned(),
        text: text.into_bytes(),
        mode: KEY_MODE,
    }
}

fn new_certificate(path: &Path, text: String) -> NewFile {
    NewFile {
        path: path.to_owned(),
        text: text.into_bytes(),
        mode: CERTIFICATE_MODE,
    }
}

pub(super) fn node_id(text: &str) -> Result<String, String> {
    match is_node_id(text) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "a node id is at most {NODE_ID_MAX_BYTES} letters, digits, `.`, `_` and `-`"
        )),
    }
}

impl fmt::Display for CertError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CertError::Authority(problem) => problem.fmt(f),
            CertError::NoAuthority(problem) => write!(
                f,
                "{problem}; --ca names the directory that `llmgw ctl cert ca --out DIR` wrote, on the machine where the authority's key is"
            ),
            CertError::OtherAuthority { file, directory } => write!(
                f,
                "{}: it differs from the {CERTIFICATE_FILE} in {}, and is not overwritten; write to another directory",
                file.display(),
                directory.display()
            ),
        }
    }
}

impl std::error::Error for CertError {}

impl From<AuthorityProblem> for CertError {
    fn from(problem: AuthorityProblem) -> CertError {
        CertError::Authority(problem)
    }
}

impl From<FileProblem> for CertError {
    fn from(problem: FileProblem) -> CertError {
        CertError::Authority(AuthorityProblem::File(problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_certificate_of_a_file_is_exchanged() {
        let block = |name: &str| {
            format!("-----BEGIN CERTIFICATE-----\n{name}\n-----END CERTIFICATE-----\n")
        };
        let (old, new, authority) = (block("old"), block("new"), block("ca"));
        for (text, expected) in [
            (old.clone(), new.clone()),
            (
                format!("# gpu-01\n{old}\n{authority}"),
                format!("# gpu-01\n{new}{authority}"),
            ),
            (
                format!("{old}{authority}# end"),
                format!("{new}{authority}# end"),
            ),
            (old.replace('\n', "\r\n"), new.clone()),
            (
                format!("# -----BEGIN CERTIFICATE-----\n{old}"),
                format!("# -----BEGIN CERTIFICATE-----\n{new}"),
            ),
        ] {
            let changed = with_first_certificate(text.as_bytes(), &new);
            assert_eq!(String::from_utf8(changed).unwrap(), expected);
        }
        // A comment in Latin-1.
        let comment = b"# K\xf6ln\n";
        let file = [comment, old.as_bytes(), comment].concat();
        let expected = [comment, new.as_bytes(), comment].concat();
        assert_eq!(with_first_certificate(&file, &new), expected);
    }

    #[test]
    fn a_node_id_is_what_a_session_takes() {
        assert_eq!(node_id("gpu-01.rack_2"), Ok("gpu-01.rack_2".to_owned()));
        for text in ["", "gpu 01", "gpu/01", "ä", &"x".repeat(65)] {
            assert!(node_id(text).unwrap_err().contains("at most 64"), "{text}");
        }
    }
}
