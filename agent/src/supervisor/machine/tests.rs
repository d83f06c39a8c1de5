use super::probing::{SILENCE_MAX_MS, SILENCE_TOLD_MS};
use super::*;

const SECOND_MS: u64 = 1_000;

fn planned(name: &str, kind: Kind, wait_for: Option<&str>) -> Planned {
    Planned {
        name: name.to_owned(),
        kind,
        wait_for: wait_for.map(|address| WaitFor {
            address: address.to_owned(),
            timeout_ms: 2 * SECOND_MS,
        }),
    }
}

fn plan(commands: Vec<Planned>) -> Plan {
    Plan {
        commands,
        serves_http: true,
        start_deadline_ms: 60 * SECOND_MS,
        stop_grace_ms: 30 * SECOND_MS,
    }
}

fn single() -> Plan {
    plan(vec![planned("server", Kind::Main, None)])
}

/// Ray's shape: a head beside the server, which waits for it.
fn pair() -> Plan {
    plan(vec![
        planned("ray", Kind::Sidecar, None),
        planned("server", Kind::Main, Some("10.0.0.1:6379")),
    ])
}

fn exited(command: usize, exit: Exit) -> Event {
    Event::Exited { command, exit }
}

fn not_ready(what: &str) -> Event {
    Event::Probed(Probed::NotReady(what.to_owned()))
}

/// A shard that events happen to, one second after the other.
struct Story {
    plan: Plan,
    life: Life,
    now_ms: u64,
    last: Vec<Action>,
}

impl Story {
    fn new(plan: Plan) -> Story {
        let (life, last) = Life::new();
        Story {
            plan,
            life,
            now_ms: 0,
            last,
        }
    }

    fn adopted(plan: Plan, remnant: Remnant, asked: Asked) -> Story {
        let (life, last) = Life::adopted(&plan, remnant, asked, 0);
        Story {
            plan,
            life,
            now_ms: 0,
            last,
        }
    }

    fn then(mut self, event: Event) -> Story {
        self.now_ms += SECOND_MS;
        (self.life, self.last) = self.life.step(&self.plan, &event, self.now_ms);
        self
    }

    /// To the next deadline, and its tick.
    fn time_passes(mut self) -> Story {
        self.now_ms = self.life.next_tick_ms().expect("a deadline");
        (self.life, self.last) = self.life.step(&self.plan, &Event::Tick, self.now_ms);
        self
    }

    fn is(self, state: ShardState, reason: &str, actions: &[Action]) -> Story {
        assert_eq!(
            (self.life.state, self.life.reason.as_str()),
            (state, reason)
        );
        assert_eq!(self.last, actions, "{state:?} {reason}");
        self
    }

    fn started(self) -> Story {
        self.then(Event::Checked)
            .then(Event::Started { command: 0 })
    }

    fn ready(self) -> Story {
        self.started().then(Event::Probed(Probed::Ready))
    }
}

#[test]
fn a_shard_is_ready_when_its_engine_says_so_and_not_when_its_process_runs() {
    let start = Action::Start { command: 0 };
    let story = Story::new(single())
        .is(ShardState::Pending, "", &[Action::Report, Action::Check])
        .then(Event::Checked)
        .is(ShardState::Starting, "", &[Action::Report, start])
        .then(Event::Started { command: 0 })
        .is(
            ShardState::Loading,
            "",
            &[Action::Report, Action::ProbeOften],
        )
        .then(not_ready("/health answers 503"))
        .is(
            ShardState::Loading,
            "/health answers 503",
            &[Action::Report],
        )
        .then(not_ready("/health answers 503"))
        .is(ShardState::Loading, "/health answers 503", &[])
        .then(Event::Probed(Probed::Ready));
    let actions = [
        Action::RecordReady(true),
        Action::Report,
        Action::ProbeSeldom,
    ];
    story.is(ShardState::Ready, "", &actions);
}

#[test]
fn a_shard_without_http_is_ready_while_its_commands_run() {
    let silent = Plan {
        serves_http: false,
        ..single()
    };
    let actions = [Action::RecordReady(true), Action::Report, Action::LetBe];
    Story::new(silent)
        .started()
        .is(ShardState::Ready, "", &actions)
        .then(exited(0, Exit::Status(1)))
        .is(
            ShardState::Stopping,
            "exited: `server` exited with status 1",
            &[Action::LetBe, Action::Report, Action::Terminate],
        );
}

#[test]
fn a_node_that_cannot_run_it_refuses_and_nothing_is_left_on_record() {
    let reason = Reason::new("port_taken", "port 21000 is taken by process 7 (nginx)");
    let story = Story::new(single()).then(Event::Refused(reason)).is(
        ShardState::Failed,
        "port_taken: port 21000 is taken by process 7 (nginx)",
        &[Action::Forget, Action::Report],
    );
    assert!(story.life.is_over());
}

#[test]
fn commands_start_in_order_each_after_its_address_listens() {
    Story::new(pair())
        .then(Event::Checked)
        .then(Event::Started { command: 0 })
        .is(
            ShardState::Starting,
            "`server` waits for 10.0.0.1:6379",
            &[Action::Report, Action::Await { command: 1 }],
        )
        .then(Event::Listens { command: 1 })
        .is(
            ShardState::Starting,
            "`server` waits for 10.0.0.1:6379",
            &[Action::Start { command: 1 }],
        )
        .then(Event::Started { command: 1 })
        .is(
            ShardState::Loading,
            "",
            &[Action::Report, Action::ProbeOften],
        );
}

#[test]
fn an_address_that_does_not_listen_in_time_fails_the_shard() {
    Story::new(pair())
        .then(Event::Checked)
        .then(Event::Started { command: 0 })
        .time_passes()
        .is(
            ShardState::Stopping,
            "wait_timeout: `server` was not started: 10.0.0.1:6379 did not listen within 2000 ms",
            &[Action::LetBe, Action::Report, Action::Terminate],
        );
}

#[test]
fn a_step_must_end_well_before_the_next_command_starts() {
    let commands = || {
        plan(vec![
            planned("fetch", Kind::Step, None),
            planned("server", Kind::Main, None),
        ])
    };
    let running = || Story::new(commands()).started();
    running()
        .is(ShardState::Starting, "", &[])
        .then(exited(0, Exit::Status(0)))
        .is(
            ShardState::Starting,
            "",
            &[Action::Report, Action::Start { command: 1 }],
        );
    for (exit, reason) in [
        (Exit::Status(3), "exited: `fetch` exited with status 3"),
        (Exit::Unknown, "exited: `fetch` ended, how is not known"),
    ] {
        let story = running().then(exited(0, exit));
        assert_eq!(
            (story.life.reason.as_str(), story.life.exit),
            (reason, Some(exit))
        );
    }
}

#[test]
fn an_unasked_exit_is_a_failure_whatever_its_code_and_whosever() {
    for (command, exit, reason) in [
        (
            1,
            Exit::Status(0),
            "exited: `server` exited with status 0 without being asked to",
        ),
        (
            1,
            Exit::Signal(9),
            "exited: `server` was killed by signal 9",
        ),
        (0, Exit::Status(1), "exited: `ray` exited with status 1"),
    ] {
        let story = Story::new(pair())
            .then(Event::Checked)
            .then(Event::Started { command: 0 })
            .then(Event::Listens { command: 1 })
            .then(Event::Started { command: 1 })
            .then(Event::Probed(Probed::Ready))
            .then(exited(command, exit));
        let actions = [Action::LetBe, Action::Report, Action::Terminate];
        let story = story.is(ShardState::Stopping, reason, &actions);
        assert_eq!(story.life.exit, Some(exit));
        story.then(Event::Gone).then(Event::Released).is(
            ShardState::Failed,
            reason,
            &[Action::Forget, Action::Report],
        );
    }
}

#[test]
fn what_is_left_of_a_failed_shard_gets_a_short_grace() {
    let story = Story::new(single())
        .ready()
        .then(exited(0, Exit::Signal(9)));
    let failed_at = story.now_ms;
    let story = story.time_passes();
    assert_eq!(story.now_ms - failed_at, FAILURE_GRACE_MAX_MS);
    assert_eq!(story.last, [Action::Kill]);
}

#[test]
fn a_shard_that_is_not_ready_in_time_fails_and_says_what_it_saw_last() {
    Story::new(single())
        .started()
        .then(not_ready("connection refused"))
        .time_passes()
        .is(
            ShardState::Stopping,
            "start_deadline: it was not ready within 60000 ms; at last: connection refused",
            &[Action::LetBe, Action::Report, Action::Terminate],
        );
}

#[test]
fn a_shard_that_never_had_its_turn_to_be_started_says_so() {
    let listens = || {
        Story::new(pair())
            .then(Event::Checked)
            .then(Event::Started { command: 0 })
            .then(Event::Listens { command: 1 })
    };
    let reason = "start_deadline: it was not ready within 60000 ms; at last: `server` was not executed yet, and processes are started one at a time";
    for story in [Story::new(single()).then(Event::Checked), listens()] {
        story.time_passes().is(
            ShardState::Stopping,
            reason,
            &[Action::LetBe, Action::Report, Action::Terminate],
        );
    }
}

#[test]
fn an_engine_that_is_silent_or_says_no_once_stays_ready() {
    let mut story = Story::new(single()).ready();
    for _ in 0..10 {
        story = story
            .then(Event::Probed(Probed::Silent(
                "no answer in 2000 ms".to_owned(),
            )))
            .is(ShardState::Ready, "", &[]);
    }
    story
        .then(not_ready("503"))
        .then(not_ready("503"))
        .then(Event::Probed(Probed::Ready))
        .then(not_ready("503"))
        .is(ShardState::Ready, "", &[]);
}

fn silent() -> Event {
    Event::Probed(Probed::Silent("/health did not answer".to_owned()))
}

impl Story {
    /// Asked each ten seconds, from the first question that is not answered on.
    fn silent_for(mut self, ms: u64) -> Story {
        self = self.then(silent());
        let until_ms = self.now_ms + ms;
        while self.now_ms < until_ms {
            self.now_ms += 9 * SECOND_MS;
            self = self.then(silent());
        }
        self
    }
}

#[test]
fn an_engine_that_answers_nothing_for_a_minute_has_that_said_of_it_until_it_answers() {
    let said = "no answer for 60 s: /health did not answer";
    let story = || Story::new(single()).ready();
    story()
        .silent_for(SILENCE_TOLD_MS - 10 * SECOND_MS)
        .is(ShardState::Ready, "", &[])
        .then(Event::Probed(Probed::Ready))
        .silent_for(SILENCE_TOLD_MS - 10 * SECOND_MS)
        .is(ShardState::Ready, "", &[]);
    for answer in [Event::Probed(Probed::Ready), not_ready("503")] {
        story()
            .silent_for(SILENCE_TOLD_MS)
            .is(ShardState::Ready, said, &[Action::Report])
            .then(silent())
            .is(ShardState::Ready, said, &[])
            .then(answer)
            .is(ShardState::Ready, "", &[Action::Report]);
    }
}

#[test]
fn an_engine_that_answers_nothing_at_all_fails_in_the_end() {
    let told = "no answer for 60 s: /health did not answer";
    Story::new(single())
        .ready()
        .silent_for(SILENCE_MAX_MS - 10 * SECOND_MS)
        .is(ShardState::Ready, told, &[])
        .silent_for(10 * SECOND_MS)
        .is(
            ShardState::Stopping,
            "unresponsive: no answer for 600 s: /health did not answer",
            &[Action::LetBe, Action::Report, Action::Terminate],
        );
}

#[test]
fn an_agent_that_was_frozen_does_not_take_its_own_silence_for_the_engines() {
    let mut story = Story::new(single()).ready().then(silent());
    story.now_ms += 2 * SILENCE_MAX_MS;
    story
        .then(silent())
        .is(ShardState::Ready, "", &[])
        .then(Event::Probed(Probed::Ready))
        .is(ShardState::Ready, "", &[]);
}

#[test]
fn an_engine_that_says_no_again_and_again_is_not_ready_and_fails_if_it_stays_so() {
    let lost = "it was ready, and is not any more: 503";
    // The next agent must not take it for ready either.
    let fallen = [
        Action::RecordReady(false),
        Action::Report,
        Action::ProbeOften,
    ];
    Story::new(single())
        .ready()
        .then(not_ready("503"))
        .then(not_ready("503"))
        .then(not_ready("503"))
        .is(ShardState::Loading, lost, &fallen)
        .time_passes()
        .is(
            ShardState::Stopping,
            "start_deadline: it was not ready within 60000 ms; at last: it was ready, and is not any more: 503",
            &[Action::LetBe, Action::Report, Action::Terminate],
        );
}

#[test]
fn a_stop_is_a_request_a_grace_period_and_a_kill_and_over_when_everything_is_given_back() {
    let stopping = Story::new(single())
        .ready()
        .then(Event::Asked(Asked::Drain))
        .is(ShardState::Draining, "", &[Action::LetBe, Action::Report])
        .then(Event::Asked(Asked::Stop))
        .is(
            ShardState::Stopping,
            "",
            &[Action::LetBe, Action::Report, Action::Terminate],
        );
    let asked_at = stopping.now_ms;
    let killed = stopping
        .then(Event::Remains("process 7".to_owned()))
        .time_passes();
    assert_eq!(killed.now_ms - asked_at, 30 * SECOND_MS);
    killed
        .is(ShardState::Stopping, "", &[Action::Kill])
        .then(exited(0, Exit::Signal(9)))
        .then(Event::Gone)
        .is(ShardState::Stopping, "", &[Action::Release])
        .then(Event::Held("GPU-1 has 9000 MiB in use".to_owned()))
        .is(ShardState::Stopping, "", &[])
        .then(Event::Released)
        .is(ShardState::Stopped, "", &[Action::Forget, Action::Report]);
}

#[test]
fn a_stop_works_in_every_state() {
    let plan = pair;
    let pending = || Story::new(plan());
    let waiting = || {
        pending()
            .then(Event::Checked)
            .then(Event::Started { command: 0 })
    };
    let loading = || {
        waiting()
            .then(Event::Listens { command: 1 })
            .then(Event::Started { command: 1 })
    };
    let ready = || loading().then(Event::Probed(Probed::Ready));
    for story in [
        pending(),
        pending().then(Event::Checked),
        waiting(),
        loading(),
        ready(),
        ready().then(Event::Asked(Asked::Drain)),
    ] {
        let from = story.life.state;
        let story = story.then(Event::Asked(Asked::Stop));
        assert_eq!(story.last.last(), Some(&Action::Terminate), "{from:?}");
        let story = story.then(Event::Gone).then(Event::Released);
        assert_eq!(story.life.state, ShardState::Stopped, "{from:?}");
        assert!(story.life.is_over());
    }
}

#[test]
fn a_forced_stop_kills_at_once_also_when_a_stop_is_under_way() {
    let story = Story::new(single()).ready().then(Event::Asked(Asked::Kill));
    assert_eq!(story.last, [Action::LetBe, Action::Report, Action::Kill]);
    let story = Story::new(single())
        .ready()
        .then(Event::Asked(Asked::Stop))
        .then(Event::Asked(Asked::Kill));
    assert_eq!(story.last, [Action::Kill]);
}

#[test]
fn processes_that_no_signal_ends_are_reported_and_not_waited_for() {
    let reason = "not_gone: SIGKILL did not end process 7 (D)";
    let story = Story::new(single())
        .ready()
        .then(Event::Asked(Asked::Stop))
        .time_passes()
        .then(Event::Remains("process 7 (D)".to_owned()))
        .time_passes()
        .is(ShardState::Failed, reason, &[Action::Report]);
    assert!(!story.life.is_over(), "it still holds its GPUs");
    assert_eq!(story.life.next_tick_ms(), None);
    let reason = "not_gone: SIGKILL did not end process 7 (D); they are gone now";
    let story = story.then(Event::Gone);
    let story = story.is(
        ShardState::Failed,
        reason,
        &[Action::Forget, Action::Report],
    );
    assert!(story.life.is_over());
}

#[test]
fn gpu_memory_that_does_not_fall_is_a_failure_beside_the_first_one() {
    let held = "gpu_held: its processes are gone, and GPU-1 has 9000 MiB in use";
    let ending = |story: Story| {
        story
            .then(Event::Gone)
            .then(Event::Held("GPU-1 has 9000 MiB in use".to_owned()))
            .time_passes()
    };
    let actions = [Action::Forget, Action::Report];
    let stopped = Story::new(single()).ready().then(Event::Asked(Asked::Stop));
    ending(stopped).is(ShardState::Failed, held, &actions);
    let failed = Story::new(single())
        .ready()
        .then(exited(0, Exit::Signal(9)));
    let both = format!("exited: `server` was killed by signal 9; {held}");
    ending(failed).is(ShardState::Failed, &both, &actions);
}

#[test]
fn the_time_for_gpu_memory_to_fall_begins_with_the_first_look_at_it() {
    let stopped = || {
        Story::new(single())
            .ready()
            .then(Event::Asked(Asked::Stop))
            .then(Event::Gone)
            .then(Event::Unseen("GPU-1 was not looked at since".to_owned()))
    };
    let mut story = stopped();
    story.now_ms += RELEASE_WAIT_MAX_MS;
    let story = story
        .then(Event::Tick)
        .is(ShardState::Stopping, "", &[])
        .then(Event::Held("GPU-1 has 9000 MiB in use".to_owned()));
    let until_ms = story.now_ms + RELEASE_WAIT_MAX_MS;
    assert_eq!(story.life.next_tick_ms(), Some(until_ms));
    let actions = [Action::Forget, Action::Report];
    story
        .then(Event::Released)
        .is(ShardState::Stopped, "", &actions);
    // No look at all, although two probes were waited for.
    let unseen = "gpu_held: its processes are gone, and GPU-1 was not looked at since";
    stopped()
        .time_passes()
        .is(ShardState::Failed, unseen, &actions);
}

#[test]
fn an_adopted_shard_goes_on_where_it_was() {
    let runs = |next, was_ready| Remnant::Runs { next, was_ready };
    for (remnant, state, last) in [
        (Remnant::Untouched, ShardState::Pending, Action::Check),
        (
            runs(1, false),
            ShardState::Starting,
            Action::Await { command: 1 },
        ),
        (runs(2, false), ShardState::Loading, Action::ProbeOften),
        (runs(2, true), ShardState::Ready, Action::ProbeSeldom),
    ] {
        let story = Story::adopted(pair(), remnant.clone(), Asked::Run);
        assert_eq!(story.life.state, state, "{remnant:?}");
        assert_eq!(story.last.last(), Some(&last), "{remnant:?}");
    }
    let broken = Remnant::Broken(Reason::new("ended_alone", "x"));
    let story = Story::adopted(pair(), broken, Asked::Run);
    assert_eq!(story.life.reason, "ended_alone: x");
    let story = story.then(Event::Gone).then(Event::Released);
    assert_eq!(story.life.state, ShardState::Failed);
}

#[test]
fn what_was_asked_of_a_shard_before_its_agent_died_still_holds() {
    let runs = || Remnant::Runs {
        next: 1,
        was_ready: true,
    };
    for (asked, state, last) in [
        (Asked::Drain, ShardState::Draining, Action::Report),
        (Asked::Stop, ShardState::Stopping, Action::Terminate),
        (Asked::Kill, ShardState::Stopping, Action::Kill),
    ] {
        let story = Story::adopted(single(), runs(), asked);
        assert_eq!(story.life.state, state);
        assert_eq!(story.last.last(), Some(&last));
    }
    // It ended while no agent ran, or never ran: that is what was asked for.
    for remnant in [
        Remnant::Untouched,
        Remnant::Broken(Reason::new("ended_alone", "x")),
    ] {
        let story = Story::adopted(single(), remnant, Asked::Stop);
        assert!(!story.last.contains(&Action::Check));
        let story = story.then(Event::Gone).then(Event::Released);
        assert_eq!(story.life.state, ShardState::Stopped);
    }
}
