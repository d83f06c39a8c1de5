//! Reloads leave nothing behind. Alone in its process, since it looks at the process's memory.

use std::path::Path;

use llmgw_plugins::{Policies, PolicyOptions, RequestView, TenantView};

/// Reloads measured; `LLMGW_RELOADS` asks for more, such as 10000.
const RELOADS: u32 = 300;
/// Reloads before the first measurement, after which allocator and history are full.
const WARM_UP: u32 = 60;
/// What may be left: noise of the allocator, far below 300 leaked VMs of 250 KB.
const GROWTH_MAX_KIB: u64 = 16 * 1024;

#[test]
fn many_reloads_do_not_grow_the_process() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("memory-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("mkdir");
    let save = |n: u32| {
        let text = format!(
            "local M = {{ api = 1 }}\nfunction M.classify(request, tenant)\n  return ({n} % 2 == 0) and 'batch' or 'standard'\nend\nreturn M\n"
        );
        std::fs::write(dir.join("admission.lua"), text).expect("write");
    };
    save(0);
    let policies = Policies::open(PolicyOptions {
        dir: Some(dir.clone()),
        state: None,
    })
    .expect("it loads");
    let reloads = std::env::var("LLMGW_RELOADS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(RELOADS);
    let tenant = TenantView {
        name: "t",
        band: "batch",
        best_band: "interactive",
        ..TenantView::default()
    };
    let mut before = 0;
    for n in 1..=WARM_UP + reloads {
        save(n);
        let set = policies.reload().expect("it loads");
        assert_eq!(set.generation(), u64::from(n) + 1);
        let band = set.classify(&RequestView::default(), &tenant).name;
        assert_eq!(&*band, if n % 2 == 0 { "batch" } else { "standard" });
        if n == WARM_UP {
            before = resident_kib();
        }
    }
    let after = resident_kib();
    let _ = std::fs::remove_dir_all(&dir);
    println!("{before} KiB before, {after} KiB after {reloads} reloads");
    assert!(
        after < before + GROWTH_MAX_KIB,
        "{before} KiB before, {after} KiB after {reloads} reloads"
    );
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs is there");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .expect("VmRSS is there");
    line.trim()
        .trim_end_matches(" kB")
        .trim()
        .parse()
        .expect("a number")
}
