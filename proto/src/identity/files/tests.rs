use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

use super::*;

/// A directory of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-identity-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str, text: impl AsRef<[u8]>, mode: u32) -> PathBuf {
        use std::io::Write;
        let path = self.0.join(name);
        let mut file = fs::OpenOptions::new()
            .create_new(true)
            .write(true)
            .mode(mode)
            .open(&path)
            .unwrap();
        file.write_all(text.as_ref()).unwrap();
        // The umask took some of the bits.
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    /// Without the path, which differs.
    fn said(&self, problem: &FileProblem) -> String {
        problem
            .to_string()
            .replace(&format!("{}/", self.0.display()), "")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct Pair {
    certificate: String,
    key: String,
    der: Vec<u8>,
}

fn pair(is_authority: bool) -> Pair {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["ctl.example".to_owned()]).unwrap();
    if is_authority {
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    }
    let certificate = params.self_signed(&key).unwrap();
    Pair {
        certificate: certificate.pem(),
        key: key.serialize_pem(),
        der: certificate.der().to_vec(),
    }
}

#[test]
fn a_certificate_its_chain_and_its_key_are_loaded() {
    let folder = Folder::new();
    let (leaf, authority) = (pair(false), pair(true));
    let text = format!(
        "# made by hand\n{}\n{}",
        leaf.certificate, authority.certificate
    );
    let certificate = folder.file("agent.pem", text, 0o644);
    // openssl writes the curve's parameters before such a key.
    let parameters =
        "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n";
    let key = folder.file("agent-key.pem", format!("{parameters}{}", leaf.key), 0o400);
    let identity = Identity::load(&certificate, &key).unwrap();
    assert_eq!(identity.chain.len(), 2);
    assert_eq!(identity.chain[0].as_ref(), leaf.der);
    assert_eq!(identity.certificate.hosts_shown(), "ctl.example");
    assert!(!format!("{:?}", identity.key).contains("MIG"));

    let file = folder.file("ca.pem", authority.certificate.repeat(2), 0o644);
    let authorities = Authorities::load(&file).unwrap();
    assert_eq!(
        (authorities.certificates.len(), authorities.der.len()),
        (2, 2)
    );
    assert_eq!(authorities.der[0].as_ref(), authority.der);
}

#[test]
fn what_is_wrong_with_a_pair_is_said_with_the_file_and_the_way_out() {
    let folder = Folder::new();
    let (one, other, authority) = (pair(false), pair(false), pair(true));
    let good = folder.file("good.pem", &one.certificate, 0o644);
    let good_key = folder.file("good-key.pem", &one.key, 0o600);
    let reversed = format!("{}{}", authority.certificate, one.certificate);
    let cut = &one.certificate[..one.certificate.len() / 2];
    let spoilt = one.certificate.replacen("MI", "~~", 1);
    let no_x509 = "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n";
    let legacy = "-----BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES\n\naGVsbG8=\n-----END EC PRIVATE KEY-----\n";
    let encrypted = legacy
        .replace("EC PRIVATE", "ENCRYPTED PRIVATE")
        .replace("Proc-Type: 4,ENCRYPTED\nDEK-Info: AES\n\n", "");
    let no_key = "-----BEGIN PRIVATE KEY-----\naGVsbG8=\n-----END PRIVATE KEY-----\n";
    let crl = "-----BEGIN X509 CRL-----\naGVsbG8=\n-----END X509 CRL-----\n";
    let large = vec![b'\n'; FILE_MAX_BYTES as usize + 1];
    let as_certificate: [(&str, &[u8], &str); 8] = [
        (
            "empty.pem",
            b"",
            "empty.pem: there is no PEM in it; it should have a line `-----BEGIN CERTIFICATE-----`",
        ),
        (
            "der.pem",
            &one.der,
            "der.pem: it is DER, not PEM; convert it: `openssl x509 -inform der -in der.pem -out NEW.pem`",
        ),
        (
            "cut.pem",
            cut.as_bytes(),
            "cut.pem: its PEM cannot be read: it breaks off before its `-----END`",
        ),
        (
            "spoilt.pem",
            spoilt.as_bytes(),
            "spoilt.pem: its PEM cannot be read: what stands between `BEGIN` and `END` is not base64",
        ),
        (
            "hello.pem",
            no_x509.as_bytes(),
            "hello.pem: it is no X.509 certificate: ",
        ),
        (
            "swapped.pem",
            one.key.as_bytes(),
            "swapped.pem: it holds a private key where a certificate is expected; are `cert` and `key` exchanged?",
        ),
        (
            "crl.pem",
            crl.as_bytes(),
            "crl.pem: it holds PEM, but neither a certificate nor a private key",
        ),
        (
            "large.pem",
            &large,
            "large.pem: it is larger than 1048576 bytes",
        ),
    ];
    for (name, text, said) in as_certificate {
        let file = folder.file(name, text, 0o644);
        let problem = Identity::load(&file, &good_key).err().unwrap();
        assert!(folder.said(&problem).starts_with(said), "{problem}");
    }
    let as_key: [(&str, &str, u32, &str); 9] = [
        (
            "all.pem",
            &one.key,
            0o644,
            "all.pem: others than its owner get at this private key (mode 0644); run `chmod 600 all.pem`",
        ),
        (
            "world.pem",
            &one.key,
            0o604,
            "(mode 0604); run `chmod 600 world.pem`",
        ),
        (
            "writable.pem",
            &one.key,
            0o620,
            "(mode 0620); run `chmod 600 writable.pem`",
        ),
        (
            "swapped-key.pem",
            &one.certificate,
            0o644,
            "swapped-key.pem: it holds a certificate where a private key is expected; are `cert` and `key` exchanged?",
        ),
        (
            "other-key.pem",
            &other.key,
            0o600,
            "other-key.pem: this key does not belong to the certificate in good.pem; give the key that this certificate was made for",
        ),
        (
            "legacy.pem",
            legacy,
            0o600,
            "legacy.pem: the key wants a passphrase",
        ),
        (
            "encrypted.pem",
            &encrypted,
            0o600,
            "write it without one: `openssl pkey -in encrypted.pem -out NEW.pem`",
        ),
        (
            "no-key.pem",
            no_key,
            0o600,
            "no-key.pem: TLS can't use this private key; it takes RSA",
        ),
        (
            "crl-key.pem",
            crl,
            0o600,
            "crl-key.pem: it holds PEM, but neither",
        ),
    ];
    for (name, text, mode, said) in as_key {
        let file = folder.file(name, text, mode);
        let problem = Identity::load(&good, &file).err().unwrap();
        assert!(folder.said(&problem).contains(said), "{problem}");
    }
    let file = folder.file("reversed.pem", reversed, 0o644);
    let problem = Identity::load(&file, &good_key).err().unwrap();
    assert_eq!(
        folder.said(&problem),
        "good-key.pem: this key belongs to a later certificate in reversed.pem; its own must come first there"
    );
    let absent = Identity::load(&folder.0.join("absent.pem"), &good_key)
        .err()
        .unwrap();
    assert!(
        folder
            .said(&absent)
            .starts_with("absent.pem: it cannot be read: No such file")
    );
    let directory = Identity::load(&good, &folder.0).err().unwrap();
    assert!(
        directory.to_string().contains("is a directory"),
        "{directory}"
    );
}

#[test]
fn only_authorities_are_trusted() {
    let folder = Folder::new();
    let (leaf, authority) = (pair(false), pair(true));
    let mixed = format!("{}{}", authority.certificate, leaf.certificate);
    let with_key = format!("{}{}", authority.certificate, authority.key);
    for (name, text, said) in [
        (
            "leaf.pem",
            mixed,
            "leaf.pem: the certificate of `rcgen self signed cert` in it is no authority's (clientAuth and serverAuth); `ca` wants the authority's own, ca.pem",
        ),
        (
            "with-key.pem",
            with_key,
            "with-key.pem: it holds a private key beside the authority's certificate; an authority's key stays on one machine",
        ),
        (
            "key.pem",
            authority.key,
            "key.pem: it holds a private key where a certificate is expected",
        ),
        (
            "none.pem",
            "hello".to_owned(),
            "none.pem: there is no PEM in it",
        ),
    ] {
        let file = folder.file(name, text, 0o644);
        let problem = Authorities::load(&file).err().unwrap();
        assert!(folder.said(&problem).starts_with(said), "{problem}");
    }
}

#[test]
fn a_key_is_its_owners_alone_or_that_of_a_group_that_root_chose() {
    use Readers::{Owner, OwnerOrRootsGroup};
    const SOMEBODY: u32 = 1_000;
    for (readers, mode, owner, suffices) in [
        (Owner, 0o600, SOMEBODY, true),
        (Owner, 0o400, ROOT, true),
        (Owner, 0o640, ROOT, false),
        (OwnerOrRootsGroup, 0o600, SOMEBODY, true),
        (OwnerOrRootsGroup, 0o640, ROOT, true),
        (OwnerOrRootsGroup, 0o440, ROOT, true),
        (OwnerOrRootsGroup, 0o440, SOMEBODY, false),
        (OwnerOrRootsGroup, 0o660, ROOT, false),
        (OwnerOrRootsGroup, 0o644, ROOT, false),
    ] {
        let found = readers.suffice(mode, owner);
        assert_eq!(found, suffices, "{readers:?} {mode:o} of {owner}");
    }
}
