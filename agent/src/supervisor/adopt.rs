//! What became of a shard while no agent ran, told from its record and one look at the process table. Pure.
//!
//! A process is the recorded one if pid, start time and boot agree, and its environment names the shard. An environment that
//! the engine has overwritten (`setproctitle`) contradicts nothing. What has only the number is another process: it is
//! never touched.

use super::machine::{Kind, Plan, Reason, Remnant};
use super::spec_store::{Record, RecordedProcess};
use super::tree::{Environ, ProcessTable};
use crate::process_id::ProcessId;

/// What is left of one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub remnant: Remnant,
    /// The processes that run and are the shard's, by command.
    pub alive: Vec<(usize, ProcessId)>,
}

/// What became of one recorded process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Alive,
    /// It has ended; a zombie has too, and a number that another process has now says the same.
    Dead,
    /// It is that very process, and its environment does not say that it is the shard's.
    Unidentified,
    /// The machine was started anew since.
    Rebooted,
}

/// Judges a shard.
pub fn judge(
    record: &Record,
    state_dir: &str,
    table: &ProcessTable,
    environ: &dyn Fn(u32) -> Environ,
) -> Verdict {
    let plan = Plan::of(&record.spec);
    let fate = |process: &RecordedProcess| fate(process, record, state_dir, table, environ);
    let alive = record
        .processes
        .iter()
        .filter(|process| fate(process) == Fate::Alive)
        .map(|process| (process.command, process.id()))
        .collect();
    let remnant = remnant(record, &plan, &fate);
    Verdict { remnant, alive }
}

fn remnant(record: &Record, plan: &Plan, fate: &dyn Fn(&RecordedProcess) -> Fate) -> Remnant {
    let mut next = 0;
    for (command, planned) in plan.commands.iter().enumerate() {
        let process = record
            .processes
            .iter()
            .find(|process| process.command == command);
        let Some(process) = process else {
            break;
        };
        let (name, pid) = (&planned.name, process.pid);
        let broken = |code, text: String| Remnant::Broken(Reason::new(code, text));
        match fate(process) {
            Fate::Rebooted => {
                let text = "the node was started anew, so nothing of it runs any more";
                return broken("rebooted", text.to_owned());
            }
            _ if process.done => {}
            Fate::Alive if planned.kind == Kind::Step => {
                let text = format!(
                    "`{name}` (process {pid}) ran when the agent ended, so how it ends can't be told"
                );
                return broken("step_interrupted", text);
            }
            Fate::Alive => {}
            // It was never seen executing: the agent died at its start, and may have taken it along.
            Fate::Dead | Fate::Unidentified if !process.confirmed => break,
            Fate::Dead => {
                let text =
                    format!("`{name}` (process {pid}) ended while no agent ran, how is not known");
                return broken("ended_alone", text);
            }
            Fate::Unidentified => {
                let text = format!("`{name}` (process {pid}) does not say that it is this shard's");
                return broken("unidentified", text);
            }
        }
        next = command + 1;
    }
    match next {
        0 => Remnant::Untouched,
        next => Remnant::Runs {
            next,
            was_ready: record.ready,
        },
    }
}

fn fate(
    process: &RecordedProcess,
    record: &Record,
    state_dir: &str,
    table: &ProcessTable,
    environ: &dyn Fn(u32) -> Environ,
) -> Fate {
    if process.boot_id != table.boot_id() {
        return Fate::Rebooted;
    }
    if !table.is(&process.id()) {
        return Fate::Dead;
    }
    match environ(process.pid) {
        Environ::Engine {
            shard,
            state_dir: theirs,
        } if shard == record.spec.shard && theirs == state_dir => Fate::Alive,
        Environ::Illegible if process.confirmed => Fate::Alive,
        _ => Fate::Unidentified,
    }
}

#[cfg(test)]
mod tests {
    use llmgw_proto::shard::ShardCommand;

    use super::*;
    use crate::supervisor::testing;

    const BOOT: &str = "5eed";
    const STATE: &str = "/state";

    fn ours() -> Environ {
        Environ::Engine {
            shard: "m/0/0".to_owned(),
            state_dir: STATE.to_owned(),
        }
    }

    fn process(command: usize, pid: u32) -> RecordedProcess {
        RecordedProcess {
            command,
            pid,
            start_ticks: 100,
            boot_id: BOOT.to_owned(),
            confirmed: true,
            done: false,
        }
    }

    /// A sidecar and a server.
    fn record(processes: Vec<RecordedProcess>) -> Record {
        let mut spec = testing::spec("m/0/0");
        let sidecar = ShardCommand {
            executable: "ray".to_owned(),
            sidecar: true,
            ..spec.commands[0].clone()
        };
        spec.commands.insert(0, sidecar);
        let mut record = Record::new(spec);
        (record.processes, record.ready) = (processes, true);
        record
    }

    /// The process table with these, each the leader of a session, started at tick 100.
    fn table(name: &str, pids: &[(u32, char)]) -> ProcessTable {
        let proc = std::env::temp_dir().join(format!("llmgw-adopt-{}-{name}", std::process::id()));
        let random = proc.join("sys/kernel/random");
        std::fs::create_dir_all(&random).unwrap();
        std::fs::write(random.join("boot_id"), format!("{BOOT}\n")).unwrap();
        for (pid, state) in pids {
            let directory = proc.join(pid.to_string());
            std::fs::create_dir_all(&directory).unwrap();
            let zeros = "0 ".repeat(15);
            let line = format!("{pid} (x) {state} 1 {pid} {pid} {zeros}100 0\n");
            std::fs::write(directory.join("stat"), line).unwrap();
        }
        let table = ProcessTable::read(&proc).unwrap();
        std::fs::remove_dir_all(proc).unwrap();
        table
    }

    fn judged(name: &str, record: &Record, pids: &[(u32, char)], environ: Environ) -> Remnant {
        judge(record, STATE, &table(name, pids), &|_| environ.clone()).remnant
    }

    fn broken(code: &'static str, text: &str) -> Remnant {
        Remnant::Broken(Reason::new(code, text))
    }

    #[test]
    fn a_shard_whose_processes_all_run_is_adopted_with_them() {
        let record = record(vec![process(0, 10), process(1, 11)]);
        let table = table("all", &[(10, 'S'), (11, 'R')]);
        let verdict = judge(&record, STATE, &table, &|_| ours());
        let runs = Remnant::Runs {
            next: 2,
            was_ready: true,
        };
        assert_eq!(verdict.remnant, runs);
        let ids = vec![(0, process(0, 10).id()), (1, process(1, 11).id())];
        assert_eq!(verdict.alive, ids);
        // A title over the environment says nothing against it.
        let titled = judge(&record, STATE, &table, &|_| Environ::Illegible);
        assert_eq!(titled.remnant, runs);
    }

    #[test]
    fn a_process_that_ended_and_a_zombie_and_a_recycled_number_are_dead() {
        let ended = broken(
            "ended_alone",
            "`serve` (process 11) ended while no agent ran, how is not known",
        );
        let record = record(vec![process(0, 10), process(1, 11)]);
        assert_eq!(judged("ended", &record, &[(10, 'S')], ours()), ended);
        assert_eq!(
            judged("zombie", &record, &[(10, 'S'), (11, 'Z')], ours()),
            ended
        );
        let mut earlier = record.clone();
        earlier.processes[1].start_ticks = 99;
        assert_eq!(
            judged("recycled", &earlier, &[(10, 'S'), (11, 'S')], ours()),
            ended
        );
    }

    #[test]
    fn after_a_reboot_nothing_is_left_whatever_has_the_numbers_now() {
        let mut record = record(vec![process(0, 10), process(1, 11)]);
        for process in &mut record.processes {
            process.boot_id = "before".to_owned();
        }
        let verdict = judge(
            &record,
            STATE,
            &table("boot", &[(10, 'S'), (11, 'S')]),
            &|_| ours(),
        );
        let text = "the node was started anew, so nothing of it runs any more";
        assert_eq!(verdict.remnant, broken("rebooted", text));
        assert_eq!(verdict.alive, []);
    }

    #[test]
    fn a_process_that_does_not_say_whose_it_is_is_not_adopted() {
        let record = record(vec![process(0, 10), process(1, 11)]);
        let stranger = Environ::Engine {
            shard: "m/0/0".to_owned(),
            state_dir: "/another".to_owned(),
        };
        let text = "`ray` (process 10) does not say that it is this shard's";
        for environ in [Environ::Other, stranger] {
            let judged = judged("unidentified", &record, &[(10, 'S'), (11, 'S')], environ);
            assert_eq!(judged, broken("unidentified", text));
        }
    }

    #[test]
    fn an_interrupted_start_goes_on_where_it_was() {
        let unconfirmed = |command, pid| RecordedProcess {
            confirmed: false,
            ..process(command, pid)
        };
        let runs = |next| Remnant::Runs {
            next,
            was_ready: true,
        };
        for (processes, pids, expected) in [
            // Nothing was forked, or what was forked never ran.
            (vec![], vec![], Remnant::Untouched),
            (vec![unconfirmed(0, 10)], vec![], Remnant::Untouched),
            // It ran, and the agent died before it wrote that down.
            (vec![unconfirmed(0, 10)], vec![(10, 'S')], runs(1)),
            (
                vec![process(0, 10), unconfirmed(1, 11)],
                vec![(10, 'S')],
                runs(1),
            ),
            (
                vec![process(0, 10), unconfirmed(1, 11)],
                vec![(10, 'S'), (11, 'S')],
                runs(2),
            ),
        ] {
            let record = record(processes);
            assert_eq!(
                judged("start", &record, &pids, ours()),
                expected,
                "{record:?}"
            );
        }
        // It still stands at its gate, with the agent's own environment: it will never run.
        let gated = record(vec![unconfirmed(0, 10)]);
        assert_eq!(
            judged("gate", &gated, &[(10, 'S')], Environ::Other),
            Remnant::Untouched
        );
    }

    #[test]
    fn a_step_that_is_done_counts_and_one_that_ran_cannot_be_judged() {
        let mut record = record(vec![process(0, 10)]);
        record.spec.commands[0].sidecar = false;
        let text = "`ray` (process 10) ran when the agent ended, so how it ends can't be told";
        assert_eq!(
            judged("step", &record, &[(10, 'S')], ours()),
            broken("step_interrupted", text)
        );
        record.processes[0].done = true;
        let runs = Remnant::Runs {
            next: 1,
            was_ready: true,
        };
        assert_eq!(judged("done", &record, &[], ours()), runs);
    }
}
