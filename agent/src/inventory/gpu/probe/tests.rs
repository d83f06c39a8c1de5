//! What a probe answers, with a real library and a real program in the place of the driver's.

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::gpu::{DriverState, HealthCode};

use super::*;
use crate::inventory::gpu::scripts::{Scripts, mock_nvml};

fn arguments() -> ProbeArguments {
    ProbeArguments {
        nvidia_smi: None,
        nvml_library: None,
        without_nvml: None,
        proc: PathBuf::from("/nonexistent"),
        sysfs: PathBuf::from("/nonexistent"),
        deadline_ms: 120_000,
    }
}

fn recording(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/recordings/hw/smi");
    root.join(path).display().to_string()
}

fn codes(gpus: &Gpus, at: usize) -> Vec<HealthCode> {
    let health = gpus.devices[at].health.iter();
    health.map(|flag| flag.code).collect()
}

#[test]
fn a_loaded_library_gives_the_whole_inventory() {
    let scripts = Scripts::new("mock");
    let gpus = answer(&ProbeArguments {
        nvml_library: Some(mock_nvml(&scripts, &[])),
        ..arguments()
    });
    assert_eq!(
        (gpus.backend, gpus.driver),
        (Backend::Nvml, DriverState::Answering)
    );
    assert!(gpus.passed_over.is_empty());
    assert_eq!(gpus.driver_version, Reading::Known("580.95.05".to_string()));
    assert_eq!(gpus.cuda_version, Reading::Known("13.1".to_string()));
    assert_eq!(gpus.devices.len(), 5);

    let first = &gpus.devices[0];
    assert!(first.is_usable());
    assert_eq!(first.uuid, Reading::Known("GPU-mock-1".to_string()));
    assert_eq!(first.class, Reading::Known("h100-sxm-80g".to_string()));
    assert_eq!(first.pci, Reading::Known("0000:11:00.0".to_string()));
    assert_eq!(first.memory.reserved_mib, Reading::Known(479));
    assert_eq!(first.nvlinks_up, Reading::Known(4));
    let clique = first.fabric.clique.known().unwrap().as_ref().unwrap();
    assert_eq!(
        clique.to_string(),
        "abababab-abab-abab-abab-abababababab.4026"
    );

    assert_eq!(
        codes(&gpus, 1),
        [
            HealthCode::NeedsReset,
            HealthCode::UncorrectedEcc,
            HealthCode::RowRemapPending,
            HealthCode::MemoryHeld
        ]
    );
    let reasons: Vec<&str> = gpus.devices[1]
        .health
        .iter()
        .map(|flag| flag.reason.as_str())
        .collect();
    assert_eq!(reasons[0], "the driver asks for `Drain and Reset`");
    assert_eq!(reasons[3], "process 4711 holds 2560 MiB");
    assert_eq!(
        gpus.devices[1].ecc.uncorrected_aggregate,
        Reading::Known(12)
    );

    assert_eq!(codes(&gpus, 2), [HealthCode::Mig]);
    let slice = &gpus.devices[3];
    assert_eq!(slice.uuid, Reading::Known("MIG-mock-31".to_string()));
    assert_eq!(
        slice.class,
        Reading::Known("h100-sxm-mig-1g.10gb".to_string())
    );
    assert_eq!(slice.memory.total_mib, Reading::Known(9_984));
    assert_eq!(codes(&gpus, 4), [HealthCode::Lost]);

    let domains = gpus.nvlink_domains.known().unwrap();
    assert_eq!(domains.len(), 1);
    assert_eq!(domains[0].gpus, ["GPU-mock-1", "GPU-mock-2"]);
}

#[test]
fn an_old_library_gives_what_it_has() {
    let scripts = Scripts::new("old-mock");
    let gpus = answer(&ProbeArguments {
        nvml_library: Some(mock_nvml(&scripts, &["-DOLD"])),
        ..arguments()
    });
    let first = &gpus.devices[0];
    assert_eq!(first.memory.total_mib, Reading::Known(81_559));
    assert_eq!(
        first.memory.used_mib,
        Reading::Known(472),
        "the driver's reserve counts as used there"
    );
    assert!(first.memory.reserved_mib.value().is_none());
    assert_eq!(
        first.fabric.clique,
        Reading::Known(None),
        "zeros are no cluster"
    );
    assert_eq!(codes(&gpus, 0), []);
    assert_eq!(gpus.devices[1].processes.known().unwrap()[0].pid, 4_711);
}

#[test]
fn a_driver_that_is_not_loaded_is_told_by_both_sources() {
    // Debian's packages without the kernel's driver.
    let scripts = Scripts::new("not-loaded");
    let failing = recording("failures/driver-not-loaded.9.txt");
    let gpus = answer(&ProbeArguments {
        nvml_library: Some(mock_nvml(&scripts, &["-DINIT_RESULT=9"])),
        nvidia_smi: None,
        ..arguments()
    });
    assert_eq!(gpus.passed_over[0].cause, SourceCause::DriverNotLoaded);
    assert_eq!(
        gpus.passed_over[0].message,
        "NVML does not start: NVIDIA driver is not loaded"
    );

    let gpus = answer(&ProbeArguments {
        nvidia_smi: Some(scripts.program("nvidia-smi", &format!("cat '{failing}'; exit 9"))),
        ..arguments()
    });
    assert_eq!(gpus.driver, DriverState::Failing);
    assert_eq!(gpus.passed_over[0].cause, SourceCause::NotAsked);
    let smi = &gpus.passed_over[1];
    assert_eq!(smi.cause, SourceCause::DriverNotLoaded);
    assert_eq!(
        smi.message,
        "nvidia-smi exited with 9: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running."
    );
    assert_eq!(
        smi.help.as_deref(),
        Some("load the NVIDIA kernel driver, or install it")
    );
}

#[test]
fn a_program_is_asked_and_the_reason_stays_visible() {
    let scripts = Scripts::new("program");
    let rows = recording("query-gpu/l40s-1x.csv");
    let script = format!(
        "case \"$1\" in --query-gpu=*) cat '{rows}';; --query-compute-apps=*) ;; *) echo unknown; exit 2;; esac"
    );
    let gpus = answer(&ProbeArguments {
        nvidia_smi: Some(scripts.program("nvidia-smi", &script)),
        ..arguments()
    });
    assert_eq!(gpus.backend, Backend::NvidiaSmi);
    assert_eq!(
        gpus.devices[0].class,
        Reading::Known("l40s-45g".to_string())
    );
    assert_eq!(gpus.passed_over[0].source, Backend::Nvml);
    assert!(gpus.passed_over[0].message.ends_with("was asked for"));
    assert!(gpus.devices[0].is_usable());
}

#[test]
fn a_program_that_hangs_is_left_before_the_probe_itself_is_killed() {
    let scripts = Scripts::new("hang");
    let gpus = answer(&ProbeArguments {
        nvidia_smi: Some(scripts.program("nvidia-smi", "exec sleep 300")),
        deadline_ms: 800,
        ..arguments()
    });
    assert_eq!(gpus.driver, DriverState::Unresponsive);
    assert_eq!(gpus.passed_over[1].cause, SourceCause::Unresponsive);
    assert!(
        gpus.passed_over[1]
            .message
            .starts_with("`nvidia-smi --query-gpu` had not answered ")
    );
}

#[test]
fn a_program_that_leaves_its_pipe_to_a_grandchild_does_not_hold_the_probe() {
    let scripts = Scripts::new("pipe");
    let rows = recording("query-gpu/l4.csv");
    let script = format!(
        "(trap '' TERM; exec sleep 300) & echo $! >> {}/left; cat '{rows}'; exit 0",
        scripts.path().display()
    );
    let gpus = answer(&ProbeArguments {
        nvidia_smi: Some(scripts.program("nvidia-smi", &script)),
        ..arguments()
    });
    assert_eq!(gpus.devices[0].class, Reading::Known("l4-22g".to_string()));
    let left = std::fs::read_to_string(scripts.path().join("left")).unwrap();
    for pid in left.lines() {
        let pid = nix::unistd::Pid::from_raw(pid.parse().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    }
}

#[test]
fn no_library_and_no_program_is_a_node_without_gpus() {
    let gpus = answer(&ProbeArguments {
        nvml_library: Some(PathBuf::from("/nonexistent/libnvidia-ml.so.1")),
        nvidia_smi: None,
        ..arguments()
    });
    assert_eq!(gpus.passed_over[0].cause, SourceCause::NotInstalled);
    assert_eq!(
        gpus.passed_over[0].message,
        "there is no libnvidia-ml.so.1 in the loader's path or the usual places"
    );
}
