//! Programs that stand for an engine and for `nvidia-smi` on a node of a fleet.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// What stands for an engine on all nodes: a program that takes its arguments.
pub enum Program {
    /// The fake engine, through a script that translates the arguments.
    Fake,
    /// Models lie beside it.
    Real(PathBuf),
}

/// Writes a node's engines to a directory; the lines of `engines` in its configuration.
pub fn engines(dir: &Path, node: &str, program: &Program) -> String {
    let mut lines = String::new();
    for (engine, name) in [("llamacpp", "llama-server"), ("vllm", "vllm")] {
        let file = dir.join(format!("{name}-{node}"));
        write_executable(&file, &script(program, engine, node, dir));
        let _ = writeln!(lines, "  {engine}: {{commands: {{{name}: {file:?}}}}}");
    }
    lines
}

/// Writes an `nvidia-smi` with eight recorded GPUs to a directory. No two nodes with other numbers, of one digit, have the same.
pub fn gpus(dir: &Path, number: usize) {
    let recordings = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings/hw/smi");
    let rows = fs::read_to_string(recordings.join("query-gpu/h100-sxm-8x.csv")).unwrap();
    let rows = rows.replace("GPU-5eed", &format!("GPU-5ee{number}"));
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("gpus.csv"), rows).unwrap();
    let text = nvidia_smi(&dir.join("gpus.csv"), &recordings.join("topo/dgx-h100.txt"));
    write_executable(&dir.join("nvidia-smi"), &text);
}

/// A program that takes an engine's arguments, writes down that it started, and becomes what stands for the engine: the pid stays.
fn script(program: &Program, engine: &str, node: &str, dir: &Path) -> String {
    let starts = dir.join("starts");
    let run = match program {
        Program::Fake => {
            let fake = Path::new(env!("CARGO_BIN_EXE_llmgw")).with_file_name("fake-engine");
            format!(
                "exec {fake:?} --kind {engine} --model \"$name\" --listen \"$host:$port\" --slots \"${{slots:-4}}\" \
                 --api-key \"$LLAMA_API_KEY$VLLM_API_KEY\" $FAKE_ENGINE"
            )
        }
        Program::Real(path) => format!("exec {path:?} \"$@\""),
    };
    format!(
        "#!/bin/sh\nfor argument in \"$@\"; do\n  case \"$before\" in\n    --alias|--served-model-name) name=$argument ;;\n    \
         --host) host=$argument ;;\n    --port) port=$argument ;;\n    --parallel) slots=$argument ;;\n  esac\n  \
         before=$argument\ndone\necho \"$$ {node} $host:$port $LLMGW_SHARD\" >> {starts:?}\n{run}\n"
    )
}

/// An `nvidia-smi` that answers with what was recorded, as a driver of these fields does.
fn nvidia_smi(gpus: &Path, topo: &Path) -> String {
    const FIELDS: &str = "index,uuid,name,memory.total,memory.used,compute_cap,driver_version,pci.bus_id,\
        ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total,mig.mode.current,persistence_mode,\
        remapped_rows.pending,remapped_rows.failure,temperature.gpu,utilization.gpu,power.draw";
    let help: String = FIELDS
        .split(',')
        .map(|field| format!("\\\"{field}\\\"\\n"))
        .collect();
    let invalid = "echo 'Invalid combination of input arguments.'; exit 2";
    format!(
        "#!/bin/sh\nfields='{FIELDS}'\ncase \"$1\" in\n--query-gpu=$fields) cat {gpus:?} ;;\n\
         --query-gpu=*)\n  for field in $(echo \"$1\" | sed 's/.*=//; s/,/ /g'); do\n    case \",$fields,\" in\n    *,$field,*) ;;\n    \
         *) echo \"Field \\\"$field\\\" is not a valid field to query.\"; exit 2 ;;\n    esac\n  done\n  exit 2 ;;\n\
         --help-query-gpu) printf \"{help}\" ;;\n--query-compute-apps=*) ;;\n\
         topo) case \"$2\" in -m) cat {topo:?} ;; *) {invalid} ;; esac ;;\n*) {invalid} ;;\nesac\n"
    )
}

fn write_executable(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}
