//! Certificates made for the test, judged against listeners; files that change under a server's certificates.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use llmgw_proto::identity::moment::DAY_SECONDS;
use llmgw_proto::identity::{Certificate, Moment};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair, SerialNumber};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

use super::kept::Shows;
use super::trial::SETTLE_MS;
use super::{Certificates, Files, Material, Opened, Owner, TlsListener, Use, fit};

/// What a test waits for at most; reached only by a failure.
const PATIENCE: Duration = Duration::from_secs(60);
/// The clock of every test.
pub(crate) const NOW: Moment = Moment(1_800_000_000);
const YEAR_DAYS: i64 = 365;

/// A certificate in the making, valid for a year around `NOW`.
pub(crate) struct Make {
    pub hosts: &'static [&'static str],
    pub serial: u64,
    pub from_days: i64,
    pub until_days: i64,
    pub usage: ExtendedKeyUsagePurpose,
    pub is_authority: bool,
}

/// A certificate and its key, both as PEM.
pub(crate) struct Made {
    pub cert: String,
    pub key: String,
    pub der: Vec<u8>,
}

impl Default for Make {
    fn default() -> Make {
        Make {
            hosts: &["localhost"],
            serial: 1,
            from_days: -1,
            until_days: YEAR_DAYS,
            usage: ExtendedKeyUsagePurpose::ServerAuth,
            is_authority: false,
        }
    }
}

impl Make {
    pub fn serial(serial: u64) -> Made {
        let make = Make {
            serial,
            ..Make::default()
        };
        make.sign()
    }

    pub fn sign(self) -> Made {
        let hosts: Vec<String> = self.hosts.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        let at =
            |days: i64| OffsetDateTime::from_unix_timestamp(NOW.0 + days * DAY_SECONDS).unwrap();
        params.serial_number = Some(SerialNumber::from(self.serial));
        params.not_before = at(self.from_days);
        params.not_after = at(self.until_days);
        params.extended_key_usages = vec![self.usage];
        if self.is_authority {
            params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
            params.extended_key_usages = Vec::new();
        }
        let key = KeyPair::generate().unwrap();
        let cert = params.self_signed(&key).unwrap();
        Made {
            cert: cert.pem(),
            key: key.serialize_pem(),
            der: cert.der().to_vec(),
        }
    }

    pub fn read(self) -> Certificate {
        Certificate::from_der(&self.sign().der).unwrap()
    }
}

pub(crate) fn listener(serves: Use, address: &str) -> TlsListener {
    TlsListener {
        serves,
        address: address.parse::<SocketAddr>().unwrap(),
        files: Files {
            cert: PathBuf::from("/tls/server.pem"),
            key: PathBuf::from("/tls/server-key.pem"),
            ca: None,
        },
    }
}

#[test]
fn a_certificate_that_clients_of_its_address_would_refuse_is_remarked_with_the_command() {
    // Hosts, address, and what is said.
    let cases: [(&[&str], &str, Option<&str>); 12] = [
        (&["localhost", "127.0.0.1"], "127.0.0.1:8443", None),
        (&["localhost", "::1"], "[::1]:8443", None),
        (&["10.0.0.5"], "10.0.0.5:8443", None),
        (&["10.0.0.5"], "0.0.0.0:8443", None),
        (&["ctl.example"], "10.0.0.5:8443", None),
        (&["localhost", "ctl.example"], "[::]:8443", None),
        (
            &["localhost", "127.0.0.1"],
            "0.0.0.0:8443",
            Some(
                "is only for localhost, 127.0.0.1, so clients on other machines refuse it, and 0.0.0.0:8443 is there for them; `llmgw ctl cert server --ca DIR --host localhost --host 127.0.0.1 --host HOST --out DIR` makes one for both",
            ),
        ),
        (
            &["::1"],
            "10.0.0.5:8443",
            Some("--host ::1 --host 10.0.0.5 --out DIR`"),
        ),
        (
            &["10.0.0.9"],
            "10.0.0.5:8443",
            Some(
                "is for 10.0.0.9, so clients that dial 10.0.0.5, which is listened on, refuse it; `llmgw ctl cert server --ca DIR --host 10.0.0.9 --host 10.0.0.5 --out DIR` makes one for both",
            ),
        ),
        (
            &["localhost", "10.0.0.9"],
            "[fd00::1]:8443",
            Some("that dial fd00::1, which is listened on"),
        ),
        (
            &[],
            "127.0.0.1:8443",
            Some("is for no host at all (a subject does not count)"),
        ),
        (
            &[],
            "0.0.0.0:8443",
            Some("--host HOST --out DIR` makes one"),
        ),
    ];
    for (hosts, address, expected) in cases {
        let make = Make {
            hosts: Box::leak(hosts.to_vec().into_boxed_slice()),
            ..Make::default()
        };
        let said = fit::remarks(&listener(Use::Agents, address), &make.read());
        let Some(expected) = expected else {
            assert!(said.is_empty(), "{hosts:?} {address} {said:?}");
            continue;
        };
        assert_eq!(said.len(), 1, "{hosts:?} {address} {said:?}");
        assert!(said[0].contains(expected), "{said:?}");
        assert!(
            said[0].starts_with("`agents.tls`: /tls/server.pem: "),
            "{said:?}"
        );
    }
}

/// A directory with `server.pem` and `server-key.pem`.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Directory {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("llmgw-served-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write(&self, name: &str, text: &str) {
        write_private(&self.at(name), text);
    }

    fn put(&self, made: &Made) {
        self.write("server.pem", &made.cert);
        self.write("server-key.pem", &made.key);
    }

    fn listener(&self, serves: Use) -> TlsListener {
        TlsListener {
            files: Files {
                cert: self.at("server.pem"),
                key: self.at("server-key.pem"),
                ca: None,
            },
            ..listener(serves, "127.0.0.1:8443")
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Written beside it and renamed over it, readable by its owner.
fn write_private(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(&new, path).unwrap();
}

#[test]
fn files_that_can_not_serve_are_refused_with_their_name_and_the_way_out() {
    let directory = Directory::new();
    let client = Make {
        usage: ExtendedKeyUsagePurpose::ClientAuth,
        ..Make::default()
    };
    let authority = Make {
        is_authority: true,
        ..Make::default()
    };
    let (good, client, authority) = (Make::serial(1), client.sign(), authority.sign());
    let ca = Some(directory.at("ca.pem"));
    // What the files hold, where they serve, and what is said of which file.
    let cases = [
        (&good, &good.key, None, Use::Listen, Ok(())),
        (
            &good,
            &client.key,
            None,
            Use::Listen,
            Err(("server-key.pem", "does not belong to the certificate in")),
        ),
        (
            &client,
            &client.key,
            None,
            Use::Admin,
            Err((
                "server.pem",
                "is for clientAuth only, so no client takes it from a server; `llmgw ctl cert server --ca DIR",
            )),
        ),
        (
            &authority,
            &authority.key,
            None,
            Use::Agents,
            Err(("server.pem", "this is the authority's own certificate")),
        ),
        (&authority, &authority.key, None, Use::Listen, Ok(())),
        (
            &good,
            &good.key,
            Some(&good.cert),
            Use::Agents,
            Err(("ca.pem", "is no authority's")),
        ),
        (&good, &good.key, Some(&authority.cert), Use::Agents, Ok(())),
    ];
    for (made, key, trusted, serves, expected) in cases {
        directory.write("server.pem", &made.cert);
        directory.write("server-key.pem", key);
        let mut listener = directory.listener(serves);
        if let Some(trusted) = trusted {
            directory.write("ca.pem", trusted);
            listener.files.ca.clone_from(&ca);
        }
        let found = Material::read(&listener).map(drop);
        match expected {
            Ok(()) => found.unwrap(),
            Err((file, what)) => {
                let said = found.unwrap_err().to_string();
                let at = directory.at(file).display().to_string();
                assert!(said.starts_with(&format!("{at}: ")), "{said}");
                assert!(said.contains(what), "{said}");
            }
        }
    }
    // What agents would refuse, other clients may take: it is remarked.
    let said = fit::remarks(
        &listener(Use::Listen, "127.0.0.1:1"),
        &Certificate::from_der(&authority.der).unwrap(),
    );
    assert!(
        said[0].contains("which many clients refuse from a server"),
        "{said:?}"
    );
}

/// Remembers the serial numbers that it was given.
#[derive(Default)]
struct Seen(Mutex<Vec<String>>);

impl Seen {
    fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

impl Shows for Seen {
    fn show(&self, material: &Material) {
        let serial = material.certificate().serial.to_string();
        self.0.lock().unwrap().push(serial);
    }
}

fn keep(listener: TlsListener) -> (Arc<Certificates>, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    let material = Material::read(&listener).unwrap();
    let opened = Opened { listener, material };
    // A second passes with every look.
    let looks = AtomicI64::new(0);
    let certificates = Certificates::new(
        vec![(opened, seen.clone() as Arc<dyn Shows>)],
        Arc::new(Vec::new),
        Arc::new(move || NOW.after(looks.fetch_add(1, Ordering::Relaxed))),
    );
    (certificates, seen)
}

#[test]
fn a_pair_is_taken_whole_and_half_of_one_keeps_the_last_good_one() {
    let directory = Directory::new();
    let (one, two) = (Make::serial(1), Make::serial(2));
    directory.put(&one);
    let (certificates, seen) = keep(directory.listener(Use::Listen));
    assert!(!certificates.look(0));
    directory.write("server.pem", &two.cert);
    assert!(certificates.look(0), "half a change is looked at again");
    assert_eq!(certificates.held()[0].problem, None);
    directory.write("server-key.pem", &two.key);
    assert!(!certificates.look(1));
    assert_eq!(seen.all(), ["2"]);
    // Half a change that stays is said, and what was in force stays so.
    directory.write("server.pem", &one.cert);
    assert!(certificates.look(10));
    assert!(!certificates.look(10 + SETTLE_MS));
    let held = certificates.held();
    let problem = held[0].problem.as_ref().unwrap();
    assert!(
        problem.contains("server-key.pem: this key does not belong"),
        "{problem}"
    );
    assert_eq!(held[0].material.certificate().serial.to_string(), "2");
    let asked = certificates.look_now().unwrap_err();
    assert!(
        asked.starts_with("`listen.tls`: ") && asked.contains(problem),
        "{asked}"
    );
    directory.write("server.pem", &two.cert);
    assert!(!certificates.look(11 + SETTLE_MS));
    assert_eq!(certificates.held()[0].problem, None);
    assert_eq!(certificates.look_now(), Ok(()));
    assert_eq!(seen.all(), ["2"]);
}

#[test]
fn a_certificate_that_nobody_takes_now_does_not_drive_out_a_valid_one() {
    for (from_days, until_days) in [(-9, -1), (1, 9)] {
        let directory = Directory::new();
        let other = || Make {
            serial: 2,
            from_days,
            until_days,
            ..Make::default()
        };
        directory.put(&Make::serial(1));
        let (certificates, seen) = keep(directory.listener(Use::Agents));
        directory.put(&other().sign());
        assert!(certificates.look(0));
        certificates.look(SETTLE_MS);
        // It is one problem, whatever the time.
        assert!(!certificates.look(2 * SETTLE_MS));
        let held = certificates.held();
        let problem = held[0].problem.as_ref().unwrap();
        assert!(
            problem.contains("server.pem: its certificate is valid from"),
            "{problem}"
        );
        assert!(
            problem.contains("which by this machine's clock is not now; the one in force"),
            "{problem}"
        );
        assert!(seen.all().is_empty());
        // Where the one in force is no better, the newer one is what was meant.
        directory.put(&other().sign());
        let (certificates, seen) = keep(directory.listener(Use::Agents));
        directory.put(
            &Make {
                serial: 3,
                ..other()
            }
            .sign(),
        );
        assert!(!certificates.look(0));
        assert_eq!(seen.all(), ["3"]);
    }
}

#[test]
fn other_files_are_read_before_the_configuration_that_names_them_is_taken() {
    let directory = Directory::new();
    directory.put(&Make::serial(1));
    let config = |tls: &str| {
        let text = format!("listen: 127.0.0.1:1\ntls: {{{tls}}}\nmodels: []\n");
        crate::config::parse(&directory.at("llmgw.yaml"), text, &|_| None).unwrap()
    };
    let (certificates, seen) = keep(directory.listener(Use::Listen));
    certificates.put(
        certificates
            .stage(&config("cert: server.pem, key: server-key.pem"))
            .unwrap(),
    );
    assert!(seen.all().is_empty(), "the same files are no change");
    let other = config("cert: new.pem, key: new-key.pem");
    let error = certificates.stage(&other).err().unwrap();
    assert!(
        error.starts_with("`listen.tls`: ") && error.contains("new.pem"),
        "{error}"
    );
    let new = Make::serial(7);
    directory.write("new.pem", &new.cert);
    directory.write("new-key.pem", &new.key);
    certificates.put(certificates.stage(&other).unwrap());
    assert_eq!(seen.all(), ["7"]);
    let held = certificates.held();
    assert_eq!(held[0].listener.files.cert, directory.at("new.pem"));
    // From then on it is these that are followed.
    directory.put(&Make::serial(8));
    certificates.look(0);
    assert_eq!(seen.all(), ["7"]);
}

#[tokio::test]
async fn files_are_followed_through_the_links_of_a_volume() {
    let directory = Directory::new();
    let version = |number: u64| {
        let made = Make::serial(number);
        fs::create_dir_all(directory.at(&format!("..{number}"))).unwrap();
        directory.write(&format!("..{number}/server.pem"), &made.cert);
        directory.write(&format!("..{number}/server-key.pem"), &made.key);
        symlink(format!("..{number}"), directory.at("..new")).unwrap();
        fs::rename(directory.at("..new"), directory.at("..data")).unwrap();
    };
    version(1);
    for name in ["server.pem", "server-key.pem"] {
        symlink(format!("..data/{name}"), directory.at(name)).unwrap();
    }
    let (certificates, seen) = keep(directory.listener(Use::Listen));
    let stop = CancellationToken::new();
    let running = tokio::spawn(certificates.run(stop.clone()));
    for number in [2, 3] {
        version(number);
        let wanted = number.to_string();
        tokio::time::timeout(PATIENCE, async {
            while seen.all().last() != Some(&wanted) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap();
    }
    stop.cancel();
    running.await.unwrap();
}

#[test]
fn what_stands_behind_the_listeners_own_certificate_ends_too() {
    let directory = Directory::new();
    let own = Make::serial(1);
    let authority = Make {
        serial: 7,
        until_days: 20,
        is_authority: true,
        ..Make::default()
    };
    directory.put(&own);
    let both = format!("{}{}", own.cert, authority.sign().cert);
    directory.write("server.pem", &both);
    let (certificates, _) = keep(directory.listener(Use::Listen));
    let file = directory.at("server.pem");
    let ends = certificates.ends();
    let found = ends
        .iter()
        .map(|ends| (&ends.owner, ends.serial.to_string()));
    assert_eq!(
        found.collect::<Vec<_>>(),
        [
            (&Owner::Shown(Use::Listen, file.clone()), "1".to_owned()),
            (&Owner::Between(Use::Listen, file), "7".to_owned()),
        ]
    );
}

#[test]
fn authorities_that_are_gone_from_the_file_are_given_time_to_come_back() {
    let directory = Directory::new();
    let authority = || {
        let make = Make {
            is_authority: true,
            ..Make::default()
        };
        make.sign().cert
    };
    let (one, two) = (authority(), authority());
    let both = format!("{one}{two}");
    directory.put(&Make::serial(1));
    directory.write("ca.pem", &both);
    let mut listener = directory.listener(Use::Agents);
    listener.files.ca = Some(directory.at("ca.pem"));
    let (certificates, seen) = keep(listener);
    let trusted = || {
        let held = certificates.held();
        held[0].material.authorities.as_ref().unwrap().der.len()
    };
    // Half of a file that is written in place, and then the whole.
    directory.write("ca.pem", &one);
    assert!(certificates.look(0), "it looks again");
    assert!(certificates.look(SETTLE_MS - 1));
    directory.write("ca.pem", &both);
    assert!(!certificates.look(SETTLE_MS));
    assert_eq!((trusted(), seen.all().len()), (2, 0), "nobody was cut off");
    // One that was meant.
    directory.write("ca.pem", &two);
    assert!(certificates.look(10 * SETTLE_MS));
    assert_eq!(trusted(), 2);
    assert!(!certificates.look(11 * SETTLE_MS));
    assert_eq!((trusted(), seen.all().len()), (1, 1));
    // More of them are taken at once, and so are fewer that somebody asked for.
    directory.write("ca.pem", &both);
    assert!(!certificates.look(20 * SETTLE_MS));
    assert_eq!(trusted(), 2);
    directory.write("ca.pem", &one);
    certificates.look_now().unwrap();
    assert_eq!(trusted(), 1);
}
