use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use llmgw_proto::identity::moment::DAY_SECONDS;
use llmgw_proto::identity::placing::{CERTIFICATE_MODE, KEY_MODE, NewFile, make_directory, place};
use llmgw_proto::identity::{Host, Moment, RequestedKey, request};
use rcgen::{CertificateParams, IsCa, KeyUsagePurpose, PublicKeyData};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;

use super::*;

const NOW: Moment = Moment(1_800_000_000);

/// A directory of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let name = format!("llmgw-authority-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        make_directory(&path).unwrap();
        Folder(path)
    }

    fn write(&self, name: &str, text: &str, mode: u32) {
        let path = self.0.join(name);
        let _ = fs::remove_file(&path);
        let text = text.into();
        place(&[NewFile { path, text, mode }]).unwrap();
    }

    fn authority(&self, now: Moment) -> MadeAuthority {
        let made = make(now).unwrap();
        self.write(CERTIFICATE_FILE, &made.pem, CERTIFICATE_MODE);
        self.write(KEY_FILE, &made.key_pem, KEY_MODE);
        made
    }

    fn refusal(&self, now: Moment) -> String {
        let problem = Authority::load(&self.0, now).err().unwrap().to_string();
        problem.replace(&format!("{}/", self.0.display()), "")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn der(pem: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

fn key() -> Vec<u8> {
    KeyPair::generate().unwrap().subject_public_key_info()
}

#[test]
fn an_authority_issues_for_servers_and_agents() {
    let folder = Folder::new("issues");
    let made = folder.authority(NOW);
    assert!(made.certificate.is_authority);
    assert_eq!(made.certificate.path_length, Some(0));
    assert_eq!(made.certificate.key_usages, ["keyCertSign", "cRLSign"]);
    assert_eq!(made.certificate.days_left(NOW), AUTHORITY_DAYS);
    assert!(made.certificate.name().starts_with("llmgw authority "));

    let authority = Authority::load(&folder.0, NOW).unwrap();
    assert_eq!(authority.trusted, made.pem);
    let hosts = ["ctl.example", "*.ctl.example", "10.0.0.1", "fd00::1"];
    let hosts: Vec<Host> = hosts.map(|host| host.parse().unwrap()).into();
    let public_key = key();
    let server = authority
        .issue(&Holder::server(hosts.clone()), &public_key, NOW)
        .unwrap()
        .certificate;
    assert_eq!(server.hosts, hosts);
    assert_eq!(server.name(), "ctl.example");
    assert_eq!(server.usages.to_string(), "serverAuth only");
    assert_eq!(server.key_usages, ["digitalSignature"]);
    assert_eq!(server.public_key, public_key);
    assert_eq!(server.issuer, made.certificate.subject);
    assert_eq!(server.issuer_key_id, made.certificate.key_id);
    assert_eq!(server.not_before, NOW.after(-SKEW_SECONDS));
    assert_eq!(server.days_left(NOW), LEAF_DAYS);
    assert!(!server.is_authority);
    assert_eq!(server.serial.to_string().len(), 32);

    let key_pem = request::make_key().unwrap();
    let agents = PrivateKeyDer::from_pem_slice(key_pem.as_bytes()).unwrap();
    let asked = request::request_for(&agents, "anything").unwrap();
    let requested = RequestedKey::from_pem(&asked).unwrap();
    let agent = authority
        .sign("gpu-01", &requested, NOW)
        .unwrap()
        .certificate;
    assert_eq!(agent.common_name.as_deref(), Some("gpu-01"));
    assert_eq!(agent.usages.to_string(), "clientAuth only");
    assert_eq!(agent.hosts, []);
    assert_eq!(agent.public_key, requested.der());
    assert_ne!(agent.serial, server.serial);

    let long: Host = format!("{}.{}.example", "a".repeat(60), "b".repeat(60))
        .parse()
        .unwrap();
    let named = authority.issue(&Holder::server(vec![long]), &key(), NOW);
    assert_eq!(named.unwrap().certificate.name(), "llmgw server");
}

#[test]
fn nothing_outlives_its_authority() {
    let folder = Folder::new("outlives");
    let made = folder.authority(NOW.after(-(AUTHORITY_DAYS - 10) * DAY_SECONDS));
    let authority = Authority::load(&folder.0, NOW).unwrap();
    let agent = authority.issue(&Holder::agent("gpu-01"), &key(), NOW);
    assert_eq!(
        agent.unwrap().certificate.not_after,
        made.certificate.not_after
    );
}

#[test]
fn an_authority_that_cannot_issue_says_why_and_what_to_do() {
    let folder = Folder::new("refused");
    let none = folder.refusal(NOW);
    assert!(
        none.starts_with("ca.pem: it cannot be read: No such file"),
        "{none}"
    );

    let made = folder.authority(NOW);
    let later = NOW.after((AUTHORITY_DAYS + 1) * DAY_SECONDS);
    let ended = folder.refusal(later);
    let expected = format!(
        "ca.pem: the authority ended on {}, which by this machine's clock is past; make a new one with `llmgw ctl cert ca --out DIR`",
        made.certificate.not_after
    );
    assert_eq!(ended, expected);
    let early = folder.refusal(NOW.after(-DAY_SECONDS));
    assert!(early.contains("is in force from"), "{early}");
    assert!(early.ends_with("; set the clock"), "{early}");

    let open = folder.0.join(KEY_FILE);
    fs::set_permissions(&open, fs::Permissions::from_mode(0o640)).unwrap();
    let open = folder.refusal(NOW);
    assert!(
        open.starts_with(
            "ca-key.pem: others than its owner get at this private key (mode 0640); run `chmod 600 "
        ),
        "{open}"
    );

    let other = make(NOW).unwrap();
    folder.write(KEY_FILE, &other.key_pem, KEY_MODE);
    assert_eq!(
        folder.refusal(NOW),
        "ca-key.pem: this key is that of no authority in ca.pem; both must come from the same `llmgw ctl cert ca` run"
    );
    // While an authority is exchanged for another one, both are trusted.
    let both = format!("{}{}", made.pem, other.pem);
    let noted = format!(
        "our own: do not tell\r\n{}\n# {}",
        made.pem.replace('\n', "\r\n"),
        other.pem
    );
    let noted = noted.replace("# -----BEGIN", "# the next one\n-----BEGIN");
    folder.write(CERTIFICATE_FILE, &noted, CERTIFICATE_MODE);
    let authority = Authority::load(&folder.0, NOW).unwrap();
    assert_eq!(authority.certificate, other.certificate);
    assert_eq!(authority.trusted, both);

    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::CrlSign];
    let lame = params.self_signed(&key).unwrap().pem();
    folder.write(CERTIFICATE_FILE, &lame, CERTIFICATE_MODE);
    folder.write(KEY_FILE, &key.serialize_pem(), KEY_MODE);
    let lame = folder.refusal(NOW);
    assert!(lame.contains("lacks keyCertSign"), "{lame}");
}

#[test]
fn a_renewed_certificate_keeps_names_and_key() {
    let folder = Folder::new("renews");
    let made = folder.authority(NOW);
    let authority = Authority::load(&folder.0, NOW).unwrap();
    let hosts: Vec<Host> = vec!["ctl.example".parse().unwrap(), "fd00::1".parse().unwrap()];
    let later = NOW.after(300 * DAY_SECONDS);
    for holder in [Holder::server(hosts), Holder::agent("gpu-01")] {
        let old = authority.issue(&holder, &key(), NOW).unwrap();
        let new = authority
            .renew(Path::new("x.pem"), &der(&old.pem), later)
            .unwrap()
            .certificate;
        let old = old.certificate;
        assert_eq!(new.subject, old.subject);
        assert_eq!(new.hosts, old.hosts);
        assert_eq!(new.usages, old.usages);
        assert_eq!(new.public_key, old.public_key);
        assert_ne!(new.serial, old.serial);
        assert_eq!(new.days_left(later), LEAF_DAYS);
    }

    let refused = |pem: &str| {
        authority
            .renew(Path::new("x.pem"), &der(pem), NOW)
            .unwrap_err()
            .to_string()
    };
    let own = refused(&made.pem);
    assert!(
        own.starts_with("x.pem: it is an authority's own certificate, which is not renewed"),
        "{own}"
    );
    let elsewhere = Folder::new("elsewhere");
    let other = elsewhere.authority(NOW);
    let foreign = Authority::load(&elsewhere.0, NOW)
        .unwrap()
        .issue(&Holder::agent("gpu-01"), &key(), NOW)
        .unwrap();
    assert_eq!(
        refused(&foreign.pem),
        format!(
            "x.pem: it was issued by `{}`, not by this authority, `{}`; give the right one with --ca, or make a new certificate with `llmgw ctl cert`",
            other.certificate.subject, made.certificate.subject
        )
    );
    // Made by hand with the same authority.
    let by_hand = |purposes: Vec<rcgen::ExtendedKeyUsagePurpose>| {
        let mut params = CertificateParams::new(vec!["a b".to_owned()]).unwrap();
        params.extended_key_usages = purposes;
        let key = KeyPair::generate().unwrap();
        params.signed_by(&key, &authority.issuer).unwrap().pem()
    };
    let both = refused(&by_hand(Vec::new()));
    assert!(
        both.starts_with("x.pem: it is for clientAuth and serverAuth, and"),
        "{both}"
    );
    let odd = refused(&by_hand(vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth]));
    assert!(odd.starts_with("x.pem: it is for `a b`, which"), "{odd}");
}
