use std::net::TcpListener;
use std::time::Instant;

use llmgw_proto::shard::API_KEY_PLACE;

use super::*;
use crate::supervisor::gpu::GpuFact;
use crate::supervisor::testing::spec;

/// GPU-ok is free, GPU-ecc broken, GPU-held full; there are no others.
struct Gpus;

impl GpuFacts for Gpus {
    fn gpu(&self, uuid: &str) -> Option<GpuFact> {
        let fact = GpuFact {
            problems: Vec::new(),
            used_mib: Some(3),
            holders: Vec::new(),
            read_at: Instant::now(),
        };
        match uuid {
            "GPU-ok" => Some(fact),
            "GPU-ecc" => Some(GpuFact {
                problems: vec!["2 uncorrected errors".to_owned()],
                ..fact
            }),
            "GPU-held" => Some(GpuFact {
                used_mib: Some(58_222),
                ..fact
            }),
            _ => None,
        }
    }
}

fn refused(spec: &ShardSpec, path: &str) -> Option<String> {
    let allowance = EngineAllowance {
        executables: [("serve".to_owned(), PathBuf::from(path))].into(),
        env: BTreeMap::new(),
    };
    let claims = Claims {
        gpus: [("GPU-claimed".to_owned(), "other/0/0".to_owned())].into(),
        ports: [(21_999, "other/0/0".to_owned())].into(),
    };
    // The claimed one is there as well.
    struct Claimed;
    impl GpuFacts for Claimed {
        fn gpu(&self, uuid: &str) -> Option<GpuFact> {
            Gpus.gpu(if uuid == "GPU-claimed" {
                "GPU-ok"
            } else {
                uuid
            })
        }
    }
    let node = Node {
        allow: &[("fake".to_owned(), allowance)].into(),
        gpus: &Claimed,
        proc: Path::new("/proc"),
        claims: &claims,
    };
    check(spec, &node)
        .err()
        .map(|refusal| refusal.reason().to_string())
}

fn with(change: impl FnOnce(&mut ShardSpec)) -> Option<String> {
    let mut spec = spec("m/0/0");
    change(&mut spec);
    refused(&spec, "/bin/sh")
}

#[test]
fn a_shard_that_the_node_can_run_is_not_refused() {
    assert_eq!(with(|spec| spec.gpus = vec!["GPU-ok".to_owned()]), None);
}

#[test]
fn only_executables_of_the_nodes_own_configuration_are_started() {
    for (change, reason) in [
        (
            (|spec| spec.engine = "vllm".to_owned()) as fn(&mut ShardSpec),
            "engine_not_allowed: the node's configuration does not list engine `vllm`, only `fake`",
        ),
        (
            |spec| spec.commands[0].executable = "/bin/sh".to_owned(),
            "executable_not_allowed: the node's configuration does not let engine `fake` start `/bin/sh`, only `serve`",
        ),
        (
            |spec| {
                spec.commands[0]
                    .env
                    .insert("LD_PRELOAD".to_owned(), "/tmp/x.so".to_owned());
            },
            "variable_not_allowed: variable `LD_PRELOAD` decides what code runs: only the node's configuration may set it, in `engines`",
        ),
        (
            |spec| {
                spec.commands[0]
                    .env
                    .insert("PYTHONPATH".to_owned(), "/tmp".to_owned());
            },
            "variable_not_allowed: variable `PYTHONPATH` decides what code runs: only the node's configuration may set it, in `engines`",
        ),
    ] {
        assert_eq!(with(change).as_deref(), Some(reason));
    }
}

#[test]
fn an_executable_must_be_a_file_that_can_be_executed() {
    for (path, cause) in [
        ("/nowhere/serve", "No such file or directory (os error 2)"),
        ("/tmp", "it is no file"),
        ("serve", "the path is not absolute"),
        ("/etc/passwd", "permission denied"),
    ] {
        let reason = refused(&spec("m/0/0"), path).unwrap();
        let expected =
            format!("executable_missing: `serve` is `{path}`, which can't be executed: {cause}");
        assert_eq!(reason, expected);
    }
}

#[test]
fn gpus_must_be_there_healthy_and_free() {
    for (uuid, reason) in [
        ("GPU-0", "gpu_missing: GPU GPU-0 is not here"),
        (
            "GPU-ecc",
            "gpu_unhealthy: GPU GPU-ecc is not healthy: 2 uncorrected errors",
        ),
        (
            "GPU-claimed",
            "gpu_claimed: GPU GPU-claimed is shard `other/0/0`'s",
        ),
        (
            "GPU-held",
            "gpu_busy: GPU GPU-held has 58222 MiB in use, by no process that the driver names",
        ),
    ] {
        let refused = with(|spec| spec.gpus = vec!["GPU-ok".to_owned(), uuid.to_owned()]);
        assert_eq!(refused.as_deref(), Some(reason));
    }
}

#[test]
fn a_port_must_be_free_and_who_has_it_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let taken = with(|spec| spec.ports = vec![port]).unwrap();
    let owner = std::process::id();
    let start = format!("port_taken: port {port} on 127.0.0.1 is taken, by process {owner} (");
    assert!(taken.starts_with(&start), "{taken}");
    let claimed = with(|spec| spec.ports = vec![21_999]);
    assert_eq!(
        claimed.as_deref(),
        Some("port_claimed: port 21999 is shard `other/0/0`'s")
    );
    let elsewhere = with(|spec| {
        spec.host = "192.0.2.1".to_owned();
        spec.ports = vec![21_998];
    });
    assert!(
        elsewhere
            .unwrap()
            .starts_with("address: nothing can listen on 192.0.2.1, port 21998: ")
    );
}

#[test]
fn a_spec_that_makes_no_sense_is_refused_before_anything_is_looked_at() {
    for (change, reason) in [
        (
            (|spec| spec.shard.clear()) as fn(&mut ShardSpec),
            "shard_name: `` is empty, or too long for the name of a directory",
        ),
        (
            |spec| spec.commands.clear(),
            "commands: 0 commands, where 1 to 16 can be",
        ),
        (
            |spec| spec.commands[0].args.push("a\0b".to_owned()),
            "nul_byte: a zero byte is in an argument",
        ),
        (
            |spec| spec.commands[0].args.push(API_KEY_PLACE.to_owned()),
            "no_api_key: `serve` wants an API key, and the shard has none",
        ),
    ] {
        assert_eq!(with(change).as_deref(), Some(reason));
    }
}

#[test]
fn files_of_an_allowance_that_could_not_be_started_are_named_with_the_cause() {
    let allowance = EngineAllowance {
        executables: [
            ("sh", "/bin/sh"),
            ("gone", "/nowhere/serve"),
            ("directory", "/tmp"),
        ]
        .map(|(name, path)| (name.to_owned(), PathBuf::from(path)))
        .into(),
        env: BTreeMap::new(),
    };
    let missing = allowance.missing();
    let said: Vec<_> = missing
        .iter()
        .map(|(name, path, cause)| format!("{name} {}: {cause}", path.display()))
        .collect();
    assert_eq!(
        said,
        [
            "directory /tmp: it is no file",
            "gone /nowhere/serve: No such file or directory (os error 2)"
        ]
    );
}
