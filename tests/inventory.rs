//! `llmgw agent inventory`: the real binary on recorded nodes, on drivers that fail and hang, and on this machine.

#[path = "../agent/tests/recorded/mod.rs"]
mod recorded;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use recorded::{TempTree, recordings};
use serde_json::Value;

struct Ran {
    status: i32,
    stdout: String,
    stderr: String,
}

fn inventory(arguments: &[&str]) -> Ran {
    let output = Command::new(env!("CARGO_BIN_EXE_llmgw"))
        .args(["agent", "inventory"])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Ran {
        status: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn page(arguments: &[&str]) -> String {
    let ran = inventory(arguments);
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""), "{}", ran.stdout);
    for line in ran.stdout.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    ran.stdout
}

fn json(arguments: &[&str]) -> Value {
    let ran = inventory(&[arguments, &["--format", "json"]].concat());
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
    serde_json::from_str(&ran.stdout).unwrap()
}

/// The `sys` of a recorded node.
fn sys(tree: &TempTree) -> String {
    tree.path().join("sys").to_str().unwrap().to_owned()
}

/// Writes an executable script.
fn script(tree: &TempTree, name: &str, text: &str) -> String {
    let path = tree.path().join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

fn smi(path: &str) -> PathBuf {
    recordings().join("smi").join(path)
}

/// The fields that the recorded rows have; a driver voids a question for any other.
const FIELDS: &str = "index,uuid,name,memory.total,memory.used,compute_cap,driver_version,pci.bus_id,\
ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total,mig.mode.current,persistence_mode,\
remapped_rows.pending,remapped_rows.failure,temperature.gpu,utilization.gpu,power.draw";

/// An nvidia-smi that answers with what was recorded, as a driver of these fields does.
fn replay(tree: &TempTree, gpus: &str, topo: &str) -> String {
    let help: String = FIELDS
        .split(',')
        .map(|field| format!("\\\"{field}\\\"\\n"))
        .collect();
    let text = format!(
        "fields='{FIELDS}'\n\
         case \"$1\" in\n\
         --query-gpu=$fields) cat '{gpus}';;\n\
         --query-gpu=*) for field in $(echo \"$1\" | sed 's/.*=//; s/,/ /g'); do\n\
           case \",$fields,\" in *,$field,*) ;; *) echo \"Field \\\"$field\\\" is not a valid field to query.\"; exit 2;; esac\n\
         done; exit 2;;\n\
         --help-query-gpu) printf \"{help}\";;\n\
         --query-compute-apps=*) ;;\n\
         topo) case \"$2\" in -m) cat '{topo}';; *) echo 'Invalid combination of input arguments.'; exit 2;; esac;;\n\
         *) echo 'Invalid combination of input arguments.'; exit 2;;\n\
         esac",
        gpus = smi(&format!("query-gpu/{gpus}")).display(),
        topo = smi(&format!("topo/{topo}")).display(),
    );
    script(tree, "nvidia-smi", &text)
}

#[test]
fn this_machine_has_a_page_and_a_registration_and_exits_with_zero() {
    let page = page(&[]);
    assert!(page.starts_with("node "), "{page}");
    assert!(page.contains("\nhost\n  CPU "), "{page}");
    let registered = json(&[]);
    assert_eq!(registered["agent_version"], env!("CARGO_PKG_VERSION"));
    assert!(registered["host"]["memory"]["total_bytes"].as_u64() > Some(0));
}

#[test]
fn a_machine_without_gpu_and_infiniband_has_a_calm_page() {
    let tree = recorded::sysfs("no-infiniband");
    let ran = page(&["--sysfs", &sys(&tree)]);
    assert!(ran.contains("\nadapters: none (no RDMA device)\n"), "{ran}");
    assert!(ran.contains("\nfabrics: none\n"), "{ran}");
}

#[test]
fn a_dgx_shows_its_gpus_its_domain_its_adapters_and_its_fabric() {
    let tree = recorded::sysfs("dgx-h100");
    let nvidia_smi = replay(&tree, "h100-sxm-8x.csv", "dgx-h100.txt");
    let arguments = ["--sysfs", &sys(&tree), "--nvidia-smi", &nvidia_smi];
    let found = json(&arguments);
    let gpus = &found["gpus"];
    assert_eq!(gpus["backend"], "nvidia-smi");
    assert_eq!(gpus["driver_version"], "570.195.03");
    assert_eq!(gpus["passed_over"][0]["cause"], "not-asked");
    let devices = gpus["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 8, "those on PCI are those of the driver");
    for gpu in devices {
        assert_eq!(gpu["class"], "h100-sxm-80g");
        assert_eq!(gpu["health"], Value::Array(Vec::new()), "{gpu}");
    }
    let domains = gpus["nvlink_domains"].as_array().unwrap();
    assert_eq!(domains.len(), 1);
    assert_eq!(domains[0]["gpus"].as_array().unwrap().len(), 8);
    assert_eq!(found["adapters"].as_array().unwrap().len(), 12);
    let compute = &found["fabrics"][0];
    assert_eq!(compute["name"], "ib:fe80:0000:0000:0000/sm-0x1");
    assert_eq!(compute["standing"], "primary");
    assert_eq!(compute["decided_by"]["by"], "subnet-and-manager");
    assert_eq!(compute["adapters"].as_array().unwrap().len(), 8);

    let page = page(&arguments);
    let mut lines = page.lines();
    assert!(
        lines.next().unwrap().ends_with(": 1 thing to look at"),
        "{page}"
    );
    assert!(
        page.contains("GPUs: 8 of 8 usable; driver 570.195.03"),
        "{page}"
    );
    assert!(page.contains("adapters: 12 of 12 usable"), "{page}");
}

#[test]
fn every_recorded_node_gives_a_page_and_a_registration_that_list_the_same() {
    for (name, adapters, usable) in [
        ("cx6-two-port", 2, 1),
        ("dgx-h100-custom-prefix", 12, 12),
        ("dgx-h100-peer", 12, 12),
        ("dgx-spark", 4, 2),
        ("efa", 2, 0),
        ("l40s-roce", 5, 3),
        ("no-infiniband", 0, 0),
        ("quirks", 14, 5),
        ("roce-container-gids", 1, 1),
    ] {
        let tree = recorded::sysfs(name);
        let arguments = ["--sysfs", &sys(&tree)];
        let found = json(&arguments);
        let all = found["adapters"].as_array().unwrap();
        let good = all
            .iter()
            .filter(|adapter| adapter["usability"] == "usable");
        assert_eq!((all.len(), good.count()), (adapters, usable), "{name}");
        let page = page(&arguments);
        let expected = match adapters {
            0 => "\nadapters: none".to_owned(),
            _ => format!("\nadapters: {usable} of {adapters} usable\n"),
        };
        assert!(page.contains(&expected), "{name}: {page}");
    }
}

#[test]
fn one_lost_gpu_among_others_is_named_first_and_costs_the_others_nothing() {
    let tree = recorded::sysfs("no-infiniband");
    let nvidia_smi = replay(
        &tree,
        "health-handle-error-line-mixed.csv",
        "rtx3090-2gpu-nv4.txt",
    );
    let page = page(&["--sysfs", &sys(&tree), "--nvidia-smi", &nvidia_smi]);
    let usable = "GPUs: 2 of 3 usable";
    assert!(page.contains(usable), "{page}");
    let complaint = page.find("  - GPU").unwrap();
    assert!(complaint < page.find(usable).unwrap(), "{page}");
}

#[test]
fn a_driver_that_is_not_loaded_is_said_in_its_own_words() {
    let tree = recorded::sysfs("no-infiniband");
    let recorded = smi("failures/driver-not-loaded.9.txt");
    let nvidia_smi = script(
        &tree,
        "nvidia-smi",
        &format!("cat '{}'; exit 9", recorded.display()),
    );
    let arguments = ["--sysfs", &sys(&tree), "--nvidia-smi", &nvidia_smi];
    let said = page(&arguments).replace("\n    ", " ");
    assert!(
        said.contains("couldn't communicate with the NVIDIA driver"),
        "{said}"
    );
    assert!(
        said.contains("GPUs: none (the driver does not answer, and PCI shows none)"),
        "{said}"
    );
    let found = json(&arguments);
    assert_eq!(found["gpus"]["driver"], "failing");
    assert_eq!(
        found["gpus"]["passed_over"][1]["cause"],
        "driver-not-loaded"
    );
}

#[test]
fn a_hanging_nvidia_smi_is_killed_and_the_rest_of_the_node_is_there() {
    let tree = recorded::sysfs("dgx-h100");
    let pid_file = tree.path().join("pid");
    // It ignores what can be ignored and keeps its pipes open, as one that waits for the kernel does.
    let text = format!(
        "echo $$ > '{}'; trap '' TERM INT; while :; do sleep 1; done",
        pid_file.display()
    );
    let nvidia_smi = script(&tree, "nvidia-smi", &text);
    let arguments = [
        "--sysfs",
        &sys(&tree),
        "--nvidia-smi",
        &nvidia_smi,
        "--deadline",
        "8s",
    ];
    let found = json(&arguments);
    assert_eq!(found["gpus"]["driver"], "unresponsive");
    let devices = found["gpus"]["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 8, "PCI has them all the same");
    assert!(
        devices
            .iter()
            .all(|gpu| gpu["health"][0]["code"] == "not-listed")
    );
    assert_eq!(found["adapters"].as_array().unwrap().len(), 12);
    let pid = fs::read_to_string(&pid_file).unwrap();
    let stat = Path::new("/proc").join(pid.trim()).join("stat");
    assert!(!is_running(&stat), "it was killed");
    // From the probe about nvidia-smi, or from the agent about a probe that came too late to say so.
    let words = ["had not answered", "did not answer within"];
    let told = found["gpus"].to_string();
    assert!(words.iter().any(|words| told.contains(words)), "{told}");
}

/// A zombie has ended: whoever adopted it may not have reaped it.
fn is_running(stat: &Path) -> bool {
    let line = fs::read_to_string(stat).unwrap_or_default();
    line.rsplit_once(')')
        .is_some_and(|(_, fields)| !fields.trim_start().starts_with(['Z', 'X']))
}

#[test]
fn the_configuration_names_the_node_its_fabric_and_its_interface() {
    let tree = recorded::sysfs("dgx-h100");
    let config = tree.path().join("agent.yaml");
    tree.add(
        "agent.yaml |\n\
         \tnode: gpu-01\n\
         \tserver: http://127.0.0.1:8443\n\
         \tlabels: {rack: r1}\n\
         \tsocket_interface: eth0\n\
         \tfabrics: [{name: ib-east, adapters: [mlx5_0, mlx5_3]}]\n",
    );
    let found = json(&["--sysfs", &sys(&tree), "--config", config.to_str().unwrap()]);
    assert_eq!(found["node"], "gpu-01");
    assert_eq!(found["labels"]["rack"], "r1");
    assert_eq!(found["fabrics"][0]["name"], "ib-east");
    assert_eq!(found["fabrics"][0]["decided_by"]["by"], "operator-label");
    assert_eq!(found["route"]["interface"], "eth0");
    assert_eq!(found["route"]["source"], "127.0.0.1");
}

#[test]
fn a_wrong_configuration_or_flag_is_refused_with_what_would_be_right() {
    let tree = TempTree::empty();
    let config = tree.path().join("agent.yaml");
    tree.add("agent.yaml |\n\tnode: a\n\tsever: http://x\n");
    let ran = inventory(&["--config", config.to_str().unwrap()]);
    assert_eq!((ran.status, ran.stdout.as_str()), (2, ""));
    assert!(
        ran.stderr
            .contains("agent.yaml:2:1: sever: unknown key `sever`"),
        "{}",
        ran.stderr
    );
    assert!(
        ran.stderr.contains("did you mean `server`?"),
        "{}",
        ran.stderr
    );
    let ran = inventory(&["--deadline", "10ms"]);
    assert_eq!(
        (ran.status, ran.stderr.as_str()),
        (2, "error: `--deadline 10ms` is shorter than `1s`\n")
    );
    let ran = inventory(&["--format", "xml"]);
    assert_eq!(ran.status, 2);
}
