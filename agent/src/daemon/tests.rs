//! What an agent finds out before it starts, and how it ends.

use std::time::Instant;

use llmgw_proto::shard::{ShardState, ShardStatus};
use tokio::time::timeout;

use super::*;
use crate::supervisor::gpu::{GpuFact, GpuFacts};
use crate::supervisor::testing;

/// No test waits for longer; a shard waits for its GPUs for longer.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(5);

#[test]
fn a_state_directory_has_one_name_however_it_is_written() {
    let place = std::env::temp_dir().join(format!("llmgw-daemon-{}", std::process::id()));
    let state = place.join("state");
    let name = state_dir(&state).expect("it can be made");
    let link = place.join("link");
    std::os::unix::fs::symlink(&state, &link).expect("it can be made");
    for written in [&state, &link, &place.join("state/../state/.")] {
        assert_eq!(state_dir(written).expect("it is there"), name);
    }
    let other = state_dir(&place.join("other")).expect("it can be made");
    assert_ne!(other, name);
    std::fs::remove_dir_all(&place).expect("it is there");
}

/// A GPU that nobody looks at.
struct Unseen(Instant);

impl GpuFacts for Unseen {
    fn gpu(&self, _: &str) -> Option<GpuFact> {
        Some(GpuFact {
            problems: Vec::new(),
            used_mib: Some(3),
            holders: Vec::new(),
            read_at: self.0,
        })
    }
}

#[tokio::test]
async fn a_signal_ends_an_agent_that_has_lost_something_and_waits_for_its_gpus() {
    let state = std::env::temp_dir().join(format!("llmgw-lost-{}", std::process::id()));
    let executables = [("serve".to_owned(), PathBuf::from("/bin/sleep"))].into();
    let allowance = EngineAllowance {
        executables,
        env: BTreeMap::new(),
    };
    let mut options =
        SupervisorOptions::new(state.clone(), [("fake".to_owned(), allowance)].into());
    options.gpus = Arc::new(Unseen(Instant::now()));
    let (supervisor, _) = Supervisor::start(options).await.unwrap();
    let mut spec = testing::spec("m/0/0");
    spec.commands[0].args = vec!["600".to_owned()];
    (spec.serves_http, spec.gpus) = (false, vec!["GPU-1".to_owned()]);
    spec.readiness.start_deadline_ms = 60_000;
    let mut changes = supervisor.status();
    assert_eq!(supervisor.start_shard(spec), None);
    let is_ready = |status: &ShardStatus| status.state == ShardState::Ready;
    let ready = async { while !changes.next().await.iter().any(is_ready) {} };
    timeout(PATIENCE, ready).await.unwrap();
    let asked = CancellationToken::new();
    let mut stop = Stop::Once(Some(asked.clone()));
    let ends = shut_down(&supervisor, true, &mut stop);
    let asks = async {
        let has_ended = || supervisor.processes().is_ok_and(|all| all.own.is_empty());
        while !has_ended() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        asked.cancel();
    };
    let ended = timeout(PATIENCE, async { tokio::join!(ends, asks) }).await;
    std::fs::remove_dir_all(&state).unwrap();
    ended.unwrap();
}
