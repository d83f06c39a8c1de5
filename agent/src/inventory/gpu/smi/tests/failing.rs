//! Failures, and answers that are not what was asked for.

use std::path::PathBuf;

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::gpu::{DriverState, FabricState, Gpus, HealthCode, SourceCause};

use super::joined::fabric;
use super::{Recorded, codes, inventory, of, reason, recording};
use crate::inventory::gpu::assemble::{missing_from_driver, without_source};
use crate::inventory::gpu::smi::run::{Program, Ran, RunError, Smi};
use crate::inventory::gpu::smi::{query, read};

/// Answers the first questions of a recording, and hangs at the one that begins so.
struct Hanging {
    recorded: Recorded,
    at: &'static str,
}

impl Smi for Hanging {
    fn run(&self, arguments: &[&str]) -> Result<Ran, RunError> {
        if arguments[0].starts_with(self.at) {
            return Err(RunError::Deadline {
                arguments: self.at.to_string(),
                waited: std::time::Duration::from_secs(29),
            });
        }
        self.recorded.run(arguments)
    }
}

#[test]
fn each_failure_says_what_it_is_and_what_to_do() {
    for (name, cause, message) in [
        (
            "driver-not-loaded.9.txt",
            SourceCause::DriverNotLoaded,
            "nvidia-smi exited with 9: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.",
        ),
        (
            "libnvidia-ml-missing.12.txt",
            SourceCause::LibraryMissing,
            "nvidia-smi exited with 12: NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.",
        ),
        (
            "driver-library-mismatch.18.txt",
            SourceCause::VersionMismatch,
            "nvidia-smi exited with 18: Failed to initialize NVML: Driver/library version mismatch; NVML library version: 550.144",
        ),
        (
            "init-insufficient-permissions.4.txt",
            SourceCause::NoPermission,
            "nvidia-smi exited with 4: Failed to initialize NVML: Insufficient Permissions",
        ),
        (
            "init-unknown-error.255.txt",
            SourceCause::Other,
            "nvidia-smi exited with 255: Failed to initialize NVML: Unknown Error",
        ),
        (
            "init-gpu-is-lost.15.txt",
            SourceCause::GpuLost,
            "nvidia-smi exited with 15: Failed to initialize NVML: GPU is lost",
        ),
        (
            "init-gpu-requires-reset.255.txt",
            SourceCause::NeedsReset,
            "nvidia-smi exited with 255: Failed to initialize NVML: GPU requires reset",
        ),
    ] {
        let status = name.split('.').nth(1).unwrap().parse().unwrap();
        let text = recording(&format!("failures/{name}"));
        let smi = Recorded::default().with("", text, status);
        let failure = read(&smi).unwrap_err();
        assert_eq!(failure.cause, cause, "{name}");
        assert!(failure.message.starts_with(message), "{}", failure.message);
        assert!(failure.help.is_some(), "{name}");
        let gpus = without_source(vec![failure]);
        assert_eq!(gpus.driver, DriverState::Failing, "{name}");
        assert_eq!(gpus.devices, [], "{name}");
        assert!(gpus.nvlink_domains.value().is_none(), "{name}");
    }
}

#[test]
fn gpus_that_can_t_be_opened_are_devices_even_when_they_are_all_there_is() {
    for (name, status, pci, code) in [
        ("handle-lost.15.txt", 15, "0000:02:00.0", HealthCode::Lost),
        (
            "handle-unknown-error-only.255.txt",
            255,
            "0000:07:00.0",
            HealthCode::DriverError,
        ),
    ] {
        let text = recording(&format!("failures/{name}"));
        let gpus = of(&Recorded::default().with("--query-gpu", text, status));
        assert_eq!(gpus.devices.len(), 1, "{name}");
        assert_eq!(gpus.devices[0].pci, Reading::Known(pci.to_string()));
        assert_eq!(codes(&gpus, 0), [code]);
    }
}

#[test]
fn a_driver_without_devices_answers_that_it_has_none() {
    let text = recording("failures/no-devices.6.txt");
    let gpus = of(&Recorded::default().with("", text, 6));
    assert_eq!(gpus.driver, DriverState::Answering);
    assert_eq!((gpus.devices.len(), gpus.problems.len()), (0, 0));
}

#[test]
fn a_field_that_the_driver_does_not_know_is_left_out_of_a_second_question() {
    struct Old {
        has_help: bool,
    }
    impl Smi for Old {
        fn run(&self, arguments: &[&str]) -> Result<Ran, RunError> {
            let ran = |stdout: String, status| {
                Ok(Ran {
                    status: Some(status),
                    stdout,
                    stderr: String::new(),
                })
            };
            let known = ["index", "uuid", "name", "memory.total", "fabric.state"];
            if let Some(fields) = arguments[0].strip_prefix("--query-gpu=") {
                let unknown = fields.split(',').find(|field| !known.contains(field));
                return match unknown {
                    Some(field) => ran(
                        recording("failures/invalid-field.2.txt").replace("compute_cap", field),
                        2,
                    ),
                    None => ran("0, GPU-1, NVIDIA L4, 23034, Completed\n".to_string(), 0),
                };
            }
            if arguments[0] == "--help-query-gpu" && self.has_help {
                let help = known.map(|field| format!("\"{field}\"\nWhat it is.\n\n"));
                return ran(help.concat(), 0);
            }
            ran(String::new(), 2)
        }
    }
    for has_help in [true, false] {
        let gpus = inventory(&read(&Old { has_help }).unwrap());
        let gpu = &gpus.devices[0];
        assert_eq!(gpu.class, Reading::Known("l4-22g".to_string()));
        assert_eq!(gpu.fabric.state, Reading::Known(FabricState::Completed));
        assert_eq!(
            gpu.memory.used_mib,
            Reading::unknown("the driver does not know this value")
        );
    }
}

#[test]
fn foreign_cut_and_shuffled_answers_give_what_is_certain() {
    let row = recording("query-gpu/l4.csv");
    let windows = format!("\u{feff}{}", row.replace('\n', "\r\n"));
    let gpus = of(&Recorded::new("l4").with("--query-gpu", windows, 0));
    assert_eq!(gpus.devices[0].class, Reading::Known("l4-22g".to_string()));

    // A row that breaks off within the total has no total.
    let cut = "0, GPU-1, NVIDIA L4, 230";
    let gpus = of(&Recorded::new("l4").with("--query-gpu", cut, 0));
    assert!(gpus.devices[0].memory.total_mib.value().is_none());
    assert!(gpus.devices[0].class.value().is_none());

    let twice = format!("{row}{row}hello, world\n");
    let gpus = of(&Recorded::new("l4").with("--query-gpu", twice, 0));
    assert_eq!(gpus.devices.len(), 1);
    assert_eq!(
        gpus.problems[..2],
        [
            "nvidia-smi listed GPU-5eed0001-0a0a-4b4b-8c8c-000000000001 twice",
            "nvidia-smi printed `hello, world`"
        ]
    );

    let header = "index, name, uuid, memory.total [MiB]\n";
    let shuffled = format!("{header}0, NVIDIA L4, GPU-1, 23034 MiB\n");
    let answer = query::parse(&shuffled, &["index", "uuid", "name", "memory.total"]);
    assert_eq!(answer.gpus[0].name.as_deref(), Ok("NVIDIA L4"));
    assert_eq!(answer.gpus[0].total_mib, Ok(23_034));

    let zero = of(&Recorded::new("l4").with("--query-gpu", row.replace("23034", "0"), 0));
    assert_eq!(
        zero.devices[0].memory.total_mib,
        Reading::unknown("the driver reports a total of 0")
    );
}

#[test]
fn what_hangs_after_the_rows_leaves_the_rows() {
    for at in ["-L", "--query-compute-apps", "topo", "nvlink", "--version"] {
        let recorded =
            Recorded::new("rtx-3090-2x").with_file("topo -m", "topo/rtx3090-2gpu-nv4.txt");
        let gpus = inventory(&read(&Hanging { recorded, at }).unwrap());
        assert_eq!(gpus.devices.len(), 2, "{at}");
        assert_eq!(gpus.usable().count(), 2, "{at}");
        let told = format!("`nvidia-smi {at}` had not answered 29000 ms after the first question");
        assert_eq!(gpus.problems, [told]);
        let knows_domains = ["nvlink", "--version"].contains(&at);
        assert_eq!(gpus.nvlink_domains.value().is_some(), knows_domains, "{at}");
    }
    let recorded = Recorded::new("l4");
    let at = "--query-gpu";
    let failure = read(&Hanging { recorded, at }).unwrap_err();
    assert_eq!(failure.cause, SourceCause::Unresponsive);
}

#[test]
fn one_recording_for_every_question_still_gives_its_gpus() {
    // What a replay of one file does: every question gets the rows of the main one.
    let smi = Recorded::default().with("", recording("query-gpu/l40s-8x.csv"), 0);
    let gpus = of(&smi);
    assert_eq!(gpus.devices.len(), 8);
    assert_eq!(
        gpus.devices[0].class,
        Reading::Known("l40s-45g".to_string())
    );
    assert!(gpus.nvlink_domains.value().is_none());
    assert!(gpus.devices[0].processes.value().is_none());
    assert_eq!(gpus.usable().count(), 8);
}

#[test]
fn an_inventory_is_written_and_read_back_without_loss() {
    let smi = Recorded::new("h100-mig-1x").with_file("-L", "list/h100-mig.txt");
    let gpus = of(&smi);
    for gpus in [
        gpus.clone(),
        gpus.aged(7_000),
        fabric("gb200-nvl72-node-a"),
        fabric("h100-hgx-zero-uuid"),
    ] {
        let json = serde_json::to_string(&gpus).unwrap();
        assert_eq!(serde_json::from_str::<Gpus>(&json).unwrap(), gpus);
    }
}

#[test]
fn a_program_that_is_not_there_is_told_with_where_it_was_looked_for() {
    let path = PathBuf::from("/nonexistent/nvidia-smi");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let program = Program::new(path, deadline);
    let failure = read(&program).unwrap_err();
    assert_eq!(failure.cause, SourceCause::NotInstalled);
    assert_eq!(failure.message, "there is no `/nonexistent/nvidia-smi`");
    assert_eq!(without_source(vec![failure]).driver, DriverState::Absent);
}

#[test]
fn gpus_that_are_listed_without_a_row_are_faults_not_absences() {
    let smi = Recorded::new("l4").with(
        "-L",
        "GPU 0: NVIDIA L4 (UUID: GPU-5eed0001-0a0a-4b4b-8c8c-000000000001)\n\
         GPU 1: NVIDIA L4 (UUID: GPU-gone)\n",
        0,
    );
    let gpus = of(&smi);
    assert_eq!(gpus.devices.len(), 2);
    assert_eq!(codes(&gpus, 1), [HealthCode::DriverError]);
    assert_eq!(
        reason(&gpus, 1),
        "nvidia-smi -L lists it and --query-gpu does not"
    );
}

#[test]
fn gpus_that_pci_has_and_the_driver_lacks_are_told() {
    let gpus = of(&Recorded::new("rtx-3090-2x"));
    let pci = ["0000:17:00.0", "0000:65:00.0", "0000:b3:00.0"].map(str::to_string);
    let missing = missing_from_driver(&pci, &gpus);
    assert_eq!(missing.len(), 1);
    assert!(missing[0].has(HealthCode::NotListed) && !missing[0].is_usable());
    assert_eq!(
        missing[0].health[0].reason,
        "PCI has a GPU at 0000:b3:00.0, and the driver does not list it"
    );
}
