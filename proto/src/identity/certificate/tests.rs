use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType, SerialNumber,
};
use time::OffsetDateTime;

use super::*;
use crate::identity::moment::DAY_SECONDS;

fn params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = OffsetDateTime::from_unix_timestamp(1_000_000).unwrap();
    params.not_after = OffsetDateTime::from_unix_timestamp(1_000_000 + 10 * DAY_SECONDS).unwrap();
    params
}

fn self_signed(params: &CertificateParams) -> Vec<u8> {
    let key = KeyPair::generate().unwrap();
    params.self_signed(&key).unwrap().der().to_vec()
}

fn read(params: &CertificateParams) -> Certificate {
    Certificate::from_der(&self_signed(params)).unwrap()
}

#[test]
fn a_leaf_says_for_whom_by_whom_and_for_what_it_is() {
    let ca_key = KeyPair::generate().unwrap();
    let mut ca = params("test authority");
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let ca_der = ca.self_signed(&ca_key).unwrap();
    let issuer = Issuer::from_params(&ca, &ca_key);

    let key = KeyPair::generate().unwrap();
    let mut leaf = params("ctl");
    leaf.serial_number = Some(SerialNumber::from(vec![0x00, 0x0a, 0xff]));
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.use_authority_key_identifier_extension = true;
    leaf.subject_alt_names = vec![
        SanType::DnsName("CTL.example".try_into().unwrap()),
        SanType::IpAddress("10.0.0.1".parse().unwrap()),
        SanType::IpAddress("fd00::1".parse().unwrap()),
        SanType::URI("spiffe://x/y".try_into().unwrap()),
    ];
    let der = leaf.signed_by(&key, &issuer).unwrap();

    let read = Certificate::from_der(der.der()).unwrap();
    assert_eq!(read.common_name.as_deref(), Some("ctl"));
    assert_eq!(read.name(), "ctl");
    assert_eq!(read.hosts_shown(), "ctl.example, 10.0.0.1, fd00::1");
    assert_eq!(read.serial.to_string(), "aff");
    assert_eq!(read.subject, "CN=ctl");
    assert_eq!(read.issuer, "CN=test authority");
    assert_eq!(read.not_before.to_string(), "1970-01-12T13:46:40Z");
    assert_eq!(read.not_after.to_string(), "1970-01-22T13:46:40Z");
    assert_eq!(read.usages.to_string(), "serverAuth only");
    assert_eq!(read.key_usages, ["digitalSignature"]);
    assert!(!read.is_authority);
    assert_eq!(read.fingerprint, Fingerprint::of(der.der()));

    let authority = Certificate::from_der(ca_der.der()).unwrap();
    assert!(authority.is_authority);
    assert_eq!(authority.path_length, Some(0));
    assert_eq!(authority.key_usages, ["keyCertSign", "cRLSign"]);
    assert_eq!(read.issuer_key_id, authority.key_id);
    assert!(authority.key_id.is_some());

    assert!(is_issued_by(der.der(), ca_der.der()));
    assert!(!is_issued_by(ca_der.der(), der.der()));
    let twin = self_signed(&ca);
    assert!(!is_issued_by(der.der(), &twin), "same name, another key");
    assert!(!is_issued_by(&der.der()[1..], ca_der.der()));
}

#[test]
fn only_a_single_common_name_names_somebody() {
    let single = read(&params("gpu-01"));
    assert_eq!(single.common_name.as_deref(), Some("gpu-01"));

    let mut nobody = params("x");
    nobody.distinguished_name = rcgen::DistinguishedName::new();
    nobody
        .distinguished_name
        .push(DnType::OrganizationName, "acme");
    let nobody = read(&nobody);
    assert_eq!(nobody.common_name, None);
    assert_eq!(nobody.name(), "O=acme");

    // rcgen writes each kind of name once: a second common name is made of one of another kind with as long an identifier.
    let mut twice = params("gpu-01");
    twice
        .distinguished_name
        .push(DnType::OrganizationName, "gpu-02");
    let mut der = self_signed(&twice);
    const ORGANIZATION: [u8; 5] = [0x06, 0x03, 0x55, 0x04, 0x0a];
    while let Some(at) = der.windows(5).position(|window| window == ORGANIZATION) {
        der[at + 4] = 0x03;
    }
    let twice = Certificate::from_der(&der).unwrap();
    assert_eq!(twice.subject, "CN=gpu-01, CN=gpu-02");
    assert_eq!(twice.common_name, None);
}

#[test]
fn what_would_deceive_a_terminal_is_not_shown() {
    let mut hostile = params("gpu\u{1b}[2J\n\u{202e}");
    hostile.subject_alt_names = vec![SanType::DnsName("a\r\nb".try_into().unwrap())];
    let read = read(&hostile);
    assert_eq!(read.common_name.as_deref(), Some("gpu?[2J??"));
    assert_eq!(read.subject, "CN=gpu?[2J??");
    assert_eq!(read.hosts_shown(), "a??b");

    let long = self::read(&params(&"x".repeat(1_000)));
    assert_eq!(long.common_name.unwrap().chars().count(), 257);
}

#[test]
fn a_certificate_without_usages_may_be_shown_for_both() {
    assert_eq!(
        read(&params("x")).usages.to_string(),
        "clientAuth and serverAuth"
    );
    for (purposes, shown) in [
        (vec![ExtendedKeyUsagePurpose::ClientAuth], "clientAuth only"),
        (
            vec![ExtendedKeyUsagePurpose::CodeSigning],
            "neither clientAuth nor serverAuth",
        ),
    ] {
        let mut params = params("x");
        params.extended_key_usages = purposes;
        assert_eq!(read(&params).usages.to_string(), shown);
    }
}

#[test]
fn days_are_counted_down_to_the_end_and_below() {
    let certificate = read(&params("x"));
    let end = certificate.not_after;
    for (seconds, days, validity) in [
        (-10 * DAY_SECONDS - 1, 10, Validity::NotYet),
        (-10 * DAY_SECONDS, 10, Validity::Current),
        (-DAY_SECONDS, 1, Validity::Current),
        (-1, 0, Validity::Current),
        (0, 0, Validity::Current),
        (1, -1, Validity::Expired),
        (DAY_SECONDS + 1, -2, Validity::Expired),
    ] {
        let now = end.after(seconds);
        assert_eq!(certificate.days_left(now), days, "{seconds}");
        assert_eq!(certificate.validity(now), validity, "{seconds}");
    }
}

#[test]
fn many_hosts_are_not_all_listed() {
    let mut params = params("x");
    params.subject_alt_names = (0..15)
        .map(|n| SanType::DnsName(format!("h{n}").try_into().unwrap()))
        .collect();
    let certificate = read(&params);
    assert!(certificate.hosts_shown().ends_with("h11 and 3 more"));
    assert!(certificate.covers(&"h14".parse().unwrap()));
    assert_eq!(read(&self::params("x")).hosts_shown(), "none");
}

#[test]
fn bytes_that_are_no_certificate_say_so() {
    let der = self_signed(&params("x"));
    assert!(matches!(
        Certificate::from_der(&der[..der.len() - 1]),
        Err(NoCertificate::Malformed(_))
    ));
    let mut longer = der.clone();
    longer.push(0);
    assert_eq!(
        Certificate::from_der(&longer),
        Err(NoCertificate::Trailing(1))
    );
    assert_eq!(
        Certificate::from_der(&vec![0x30; CERTIFICATE_MAX_BYTES + 1]),
        Err(NoCertificate::TooLarge(CERTIFICATE_MAX_BYTES + 1))
    );
    // subjectAltName, whose value is no list of names.
    let mut broken = params("x");
    broken.custom_extensions = vec![CustomExtension::from_oid_content(
        &[2, 5, 29, 17],
        vec![0xff; 4],
    )];
    assert!(matches!(
        Certificate::from_der(&self_signed(&broken)),
        Err(NoCertificate::Malformed(_))
    ));
}

#[test]
fn serials_and_fingerprints_read_back_as_openssl_prints_them() {
    for (text, shown) in [("0A:FF", "aff"), ("0aff", "aff"), ("00", "0"), ("7f", "7f")] {
        assert_eq!(text.parse::<Serial>().unwrap().to_string(), shown);
    }
    assert_eq!(Serial::from_bytes(&[0]).to_string(), "0");
    assert_eq!("".parse::<Serial>(), Err(NotHex));
    assert_eq!("0x1".parse::<Serial>(), Err(NotHex));

    // FIPS 180-2, the one-block message sample.
    let shown = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let fingerprint = Fingerprint::of(b"abc");
    assert_eq!(fingerprint.to_string(), shown);
    let digits = &shown["sha256:".len()..];
    let colons: Vec<String> = (0..32)
        .map(|at| digits[2 * at..2 * at + 2].to_uppercase())
        .collect();
    for text in [shown, digits, &colons.join(":")] {
        assert_eq!(text.parse(), Ok(fingerprint), "{text}");
    }
    for text in ["", "sha256:", "sha256:ba78", "é", &"zz".repeat(32)] {
        assert_eq!(text.parse::<Fingerprint>(), Err(NotHex), "{text}");
    }
}
