//! Which variables decide what code a process runs, whatever its executable is: the server may set none of them.
//!
//! A fence around the executables of the allow-list, no prison: an engine's arguments come from the server too, and some
//! engines have options that load code.

/// By how they begin: the dynamic linker's, a shell's (exported functions included), an interpreter's.
const PREFIXES: [&str; 5] = ["LD_", "BASH", "PYTHON", "PERL5", "RUBY"];
/// Python's that change how the same code runs.
const PYTHONS_OWN: [&str; 9] = [
    "PYTHONASYNCIODEBUG",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONFAULTHANDLER",
    "PYTHONHASHSEED",
    "PYTHONIOENCODING",
    "PYTHONMALLOC",
    "PYTHONNOUSERSITE",
    "PYTHONUNBUFFERED",
    "PYTHONUTF8",
];
const NAMES: [&str; 14] = [
    // The shells'.
    "ENV",
    "PS4",
    "SHELLOPTS",
    // The C library's.
    "GCONV_PATH",
    "GLIBC_TUNABLES",
    // What is found by its name; and Python's packages of a user, below the home.
    "HOME",
    "PATH",
    // Files that CUDA, llama.cpp, the JVM and Node load.
    "CUDA_INJECTION64_PATH",
    "GGML_BACKEND_PATH",
    "JAVA_TOOL_OPTIONS",
    "JDK_JAVA_OPTIONS",
    "NODE_OPTIONS",
    "NODE_PATH",
    "_JAVA_OPTIONS",
];

/// Whether only the node's operator may set it.
pub(super) fn decides_code(name: &str) -> bool {
    let begins = PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    (begins || NAMES.contains(&name)) && !PYTHONS_OWN.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_decides_what_code_runs_is_told_from_one_that_does_not() {
        for name in [
            "LD_PRELOAD",
            "LD_LIBRARY_PATH",
            "LD_AUDIT",
            "GLIBC_TUNABLES",
            "GCONV_PATH",
            "PATH",
            "HOME",
            "ENV",
            "BASH_ENV",
            "BASH_FUNC_ls%%",
            "SHELLOPTS",
            "PS4",
            "PYTHONPATH",
            "PYTHONHOME",
            "PYTHONSTARTUP",
            "PYTHONUSERBASE",
            "PYTHONPYCACHEPREFIX",
            "PYTHONWARNINGS",
            "PYTHONBREAKPOINT",
            "PERL5OPT",
            "RUBYOPT",
            "NODE_OPTIONS",
            "JAVA_TOOL_OPTIONS",
            "CUDA_INJECTION64_PATH",
            "GGML_BACKEND_PATH",
        ] {
            assert!(decides_code(name), "{name}");
        }
        for name in [
            "CUDA_DEVICE_ORDER",
            "GGML_CUDA_FORCE_MMQ",
            "HF_HOME",
            "HF_HUB_OFFLINE",
            "HTTPS_PROXY",
            "NCCL_IB_HCA",
            "NODE_RANK",
            "OMP_NUM_THREADS",
            "PYTHONHASHSEED",
            "PYTHONUNBUFFERED",
            "PYTORCH_CUDA_ALLOC_CONF",
            "TMPDIR",
            "VLLM_USE_V1",
            "XDG_CACHE_HOME",
            "path",
        ] {
            assert!(!decides_code(name), "{name}");
        }
    }
}
