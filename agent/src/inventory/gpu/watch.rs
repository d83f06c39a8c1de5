//! The GPUs as they were last seen, for a supervisor that reads them at each heartbeat and must never wait.
//!
//! A thread of its own probes. When the driver falls silent or fails, the last values stay, marked stale, and each GPU is flagged: nothing new
//! may be placed on a driver that does not answer.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::gpu::{Backend, DriverState, Gpus, SourceCause};
use tokio::sync::watch;

use super::class::Classes;
use super::health::flag_silence;
use super::prober::{GpuSources, Probed, Prober};

/// How often GPUs are looked at. Each look initialises the driver's library, which costs it some 100 ms.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// Holds the last values; probing ends when it is dropped.
pub struct GpuWatch {
    seen: watch::Receiver<Option<Arc<Seen>>>,
    /// Asks the thread for a probe; dropped to end it.
    ask: SyncSender<()>,
}

/// Tells of probes that have ended, those of before it was made included.
pub struct Probes(watch::Receiver<Option<Arc<Seen>>>);

/// The thread that probes has ended before its watch: it panicked, or its watch was dropped. What was last seen stays so for ever.
#[derive(Debug, PartialEq, Eq)]
pub struct WatchEnded;

/// What is known, and since when.
#[derive(Debug, Clone)]
struct Seen {
    gpus: Gpus,
    /// When the driver was asked for it: the values are at least as new as that.
    asked: Instant,
}

impl GpuWatch {
    /// Begins to probe in a thread of its own.
    pub fn start(sources: GpuSources, interval: Duration) -> std::io::Result<GpuWatch> {
        let mut prober = Prober::new(sources);
        GpuWatch::with(move || prober.probe(), interval)
    }

    /// The same with another way to probe.
    pub(crate) fn with(
        mut probe: impl FnMut() -> Probed + Send + 'static,
        interval: Duration,
    ) -> std::io::Result<GpuWatch> {
        let (sender, seen) = watch::channel(None);
        // With room for one: a probe that has not begun serves all who asked for it.
        let (ask, asks) = sync_channel::<()>(1);
        std::thread::Builder::new()
            .name("gpu-watch".to_string())
            .spawn(move || {
                let mut classes = Classes::default();
                let mut last: Option<Arc<Seen>> = None;
                while !sender.is_closed() {
                    let asked = Instant::now();
                    let probed = probe();
                    let next = Arc::new(follow(last.as_deref(), probed, asked, &mut classes));
                    log_change(last.as_deref().map(|seen| &seen.gpus), &next.gpus);
                    sender.send_replace(Some(Arc::clone(&next)));
                    last = Some(next);
                    if asks.recv_timeout(interval) == Err(RecvTimeoutError::Disconnected) {
                        return;
                    }
                }
            })?;
        Ok(GpuWatch { seen, ask })
    }

    /// What was last seen, as if no process were this node's own, and when the driver was asked for it. `None`: the first probe is still
    /// on its way.
    pub fn latest(&self) -> Option<(Gpus, Instant)> {
        let seen = self.seen.borrow().clone()?;
        Some((seen.at(Instant::now()), seen.asked))
    }

    /// Asks for a probe that begins after this, as soon as the one that is under way has ended. Returns at once.
    pub fn look_now(&self) {
        let _ = self.ask.try_send(());
    }

    /// To wait for probes.
    pub fn probes(&self) -> Probes {
        Probes(self.seen.clone())
    }
}

impl Probes {
    /// Until another probe has ended. Nothing is lost if this is dropped before it returns.
    ///
    /// # Errors
    /// No further one will.
    pub async fn next(&mut self) -> Result<(), WatchEnded> {
        self.0.changed().await.map_err(|_| WatchEnded)
    }
}

impl fmt::Display for WatchEnded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the thread that looks at the GPUs has ended")
    }
}

impl std::error::Error for WatchEnded {}

impl Seen {
    /// The values at a time: those of a driver that no longer answers carry their age, and a flag.
    fn at(&self, now: Instant) -> Gpus {
        if self.gpus.driver == DriverState::Answering {
            return self.gpus.clone();
        }
        let age = now.saturating_duration_since(self.asked).as_millis();
        let mut gpus = self
            .gpus
            .clone()
            .aged(u64::try_from(age).unwrap_or(u64::MAX));
        for gpu in &mut gpus.devices {
            flag_silence(gpu, self.gpus.driver);
        }
        gpus
    }
}

/// What is known after a probe: its answer, or the old values and what went wrong now.
fn follow(last: Option<&Seen>, probed: Probed, asked: Instant, classes: &mut Classes) -> Seen {
    let mut gpus = probed.into_gpus();
    if gpus.driver == DriverState::Answering {
        keep_classes(&mut gpus, classes);
        return Seen { gpus, asked };
    }
    let Some(last) = last else {
        return Seen { gpus, asked };
    };
    Seen {
        gpus: Gpus {
            driver: gpus.driver,
            passed_over: gpus.passed_over,
            ..last.gpus.clone()
        },
        asked: last.asked,
    }
}

/// Gives each GPU its first class, and says which would have another.
fn keep_classes(gpus: &mut Gpus, classes: &mut Classes) {
    for gpu in &mut gpus.devices {
        let (Some(uuid), Some(class)) = (gpu.uuid.value(), gpu.class.value()) else {
            continue;
        };
        let (kept, change) = classes.settle(uuid, class);
        gpu.class = Reading::Known(kept);
        gpus.problems
            .extend(change.map(|change| change.to_string()));
    }
}

/// Tells the log what changed about the sources; a fallback is never silent.
fn log_change(before: Option<&Gpus>, now: &Gpus) {
    // Messages may count seconds; that alone is no change.
    let causes = |gpus: &Gpus| -> Vec<(Backend, SourceCause)> {
        let failures = gpus.passed_over.iter();
        failures
            .map(|failure| (failure.source, failure.cause))
            .collect()
    };
    let is_same = before.is_some_and(|before| {
        before.driver == now.driver
            && before.backend == now.backend
            && causes(before) == causes(now)
    });
    if !is_same {
        log_sources(now);
    }
    let known = before.map_or(&[][..], |before| &before.problems);
    for problem in now
        .problems
        .iter()
        .filter(|problem| !known.contains(problem))
    {
        tracing::warn!(%problem, "GPUs");
    }
}

/// Tells the log which source answered and why others did not.
fn log_sources(gpus: &Gpus) {
    for failure in &gpus.passed_over {
        let help = failure.help.as_deref().unwrap_or_default();
        match gpus.driver {
            DriverState::Absent => {
                tracing::info!(source = %failure.source, "no GPUs: {}", failure.message)
            }
            _ => {
                tracing::warn!(source = %failure.source, help, "GPU source passed over: {}", failure.message)
            }
        }
    }
    tracing::info!(backend = %gpus.backend, devices = gpus.devices.len(), "GPUs");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::gpu::assemble::without_source;
    use crate::inventory::gpu::facts::source_failure;
    use crate::inventory::gpu::scripts::Scripts;
    use crate::inventory::gpu::smi;
    use llmgw_proto::inventory::gpu::{HealthCode, HealthFlag};

    /// No test waits for longer.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn answer(rows: &str) -> Probed {
        let smi = smi::tests::Recorded::new(rows);
        Probed::Answered(smi::tests::inventory(&smi::read(&smi).unwrap()))
    }

    fn silent() -> Probed {
        let said = "the driver did not answer";
        Probed::Silent(source_failure(
            Backend::Nvml,
            SourceCause::Unresponsive,
            said,
        ))
    }

    #[test]
    fn the_last_values_of_a_silent_driver_are_kept_and_marked_stale() {
        let (start, mut classes) = (Instant::now(), Classes::default());
        let seen = follow(None, answer("l40s-8x"), start, &mut classes);
        assert_eq!(
            seen.at(start + Duration::from_secs(5)).devices[0]
                .memory
                .total_mib,
            Reading::Known(46_068)
        );

        let later = start + Duration::from_secs(40);
        let seen = follow(Some(&seen), silent(), later, &mut classes);
        let gpus = seen.at(later + Duration::from_secs(2));
        assert_eq!(gpus.driver, DriverState::Unresponsive);
        assert_eq!(gpus.passed_over[0].message, "the driver did not answer");
        assert_eq!(gpus.devices.len(), 8);
        let stale = Reading::Stale {
            value: 46_068,
            age_ms: 42_000,
        };
        assert_eq!(gpus.devices[7].memory.total_mib, stale);
        assert_eq!(gpus.devices[7].class.known(), None);
        assert_eq!(gpus.devices[7].class.value().unwrap(), "l40s-45g");
        // As they are said a minute later: a text that changed would be news each time.
        let later_still = seen.at(later + Duration::from_secs(60));
        for gpu in gpus.devices.iter().chain(&later_still.devices) {
            let flag = HealthFlag {
                code: HealthCode::DriverError,
                reason: "the driver does not respond, and what is known is from before".to_owned(),
            };
            assert_eq!(gpu.health, [flag]);
        }

        let back = follow(Some(&seen), answer("l40s-8x"), later, &mut classes);
        let gpus = back.at(later);
        assert_eq!(gpus.driver, DriverState::Answering);
        assert_eq!(gpus.devices[0].memory.total_mib, Reading::Known(46_068));
        assert!(gpus.passed_over.is_empty());
        assert!(gpus.devices.iter().all(|gpu| gpu.health.is_empty()));
    }

    #[test]
    fn a_driver_that_fails_after_an_upgrade_leaves_its_gpus_in_sight() {
        let (now, mut classes) = (Instant::now(), Classes::default());
        let seen = follow(None, answer("l4"), now, &mut classes);
        let mismatch = source_failure(Backend::Nvml, SourceCause::VersionMismatch, "mismatch");
        let failing = Probed::Answered(without_source(vec![mismatch]));
        let gpus = follow(Some(&seen), failing, now, &mut classes).at(now);
        assert_eq!(gpus.driver, DriverState::Failing);
        assert_eq!(gpus.devices.len(), 1);
        assert!(gpus.devices[0].uuid.known().is_none());
        let flag = &gpus.devices[0].health[0];
        assert_eq!(flag.code, HealthCode::DriverError);
        assert!(flag.reason.starts_with("the driver fails, "));
    }

    #[test]
    fn a_driver_that_is_silent_from_the_start_has_no_values() {
        let gpus = follow(None, silent(), Instant::now(), &mut Classes::default()).gpus;
        assert_eq!(gpus.driver, DriverState::Unresponsive);
        assert!(gpus.devices.is_empty() && gpus.nvlink_domains.value().is_none());
    }

    #[test]
    fn a_class_stays_and_its_change_is_a_problem_that_is_told() {
        let (now, mut classes) = (Instant::now(), Classes::default());
        follow(None, answer("a6000-ecc-on"), now, &mut classes);
        let gpus = follow(None, answer("a6000-ecc-off"), now, &mut classes).gpus;
        assert_eq!(
            gpus.devices[0].class,
            Reading::Known("a6000-45g".to_string())
        );
        assert_eq!(gpus.devices[0].memory.total_mib, Reading::Known(49_140));
        assert!(
            gpus.problems[0].contains("would be `a6000-48g`"),
            "{:?}",
            gpus.problems
        );
    }

    #[tokio::test]
    async fn a_watch_shows_the_last_values_whatever_becomes_of_the_probe() {
        let scripts = Scripts::new("watch");
        let Probed::Answered(gpus) = answer("h100-sxm-1x-load") else {
            unreachable!()
        };
        // A probe answers until it is told to end without an answer.
        let directory = scripts.path().display();
        let script = format!("if [ -e {directory}/fail ]; then exit 1; fi; cat {directory}/answer");
        let answer = serde_json::to_string(&gpus).unwrap();
        std::fs::write(scripts.path().join("answer"), answer).unwrap();
        let sources = GpuSources {
            executable: Some(scripts.program("probe", &script)),
            deadline: Duration::from_secs(120),
            ..GpuSources::default()
        };
        let watch = GpuWatch::start(sources, Duration::from_millis(1)).unwrap();
        let mut probes = watch.probes();
        probes.next().await.unwrap();
        let (seen, _) = watch.latest().unwrap();
        assert!(seen.devices[0].has(HealthCode::MemoryHeld));
        assert_eq!(seen.driver, DriverState::Answering);
        // Now one fails: what was known stays, and is stale.
        std::fs::write(scripts.path().join("fail"), "").unwrap();
        let seen = loop {
            probes.next().await.unwrap();
            let (seen, _) = watch.latest().unwrap();
            if seen.driver != DriverState::Answering {
                break seen;
            }
        };
        assert_eq!(seen.driver, DriverState::Failing);
        assert!(matches!(seen.devices[0].uuid, Reading::Stale { .. }));
    }

    #[tokio::test]
    async fn who_waits_for_a_probe_is_told_that_the_thread_has_ended() {
        let mut left = 1;
        let probe = move || {
            assert!(left > 0, "a probe that panics");
            left -= 1;
            answer("l4")
        };
        let watch = GpuWatch::with(probe, Duration::from_millis(1)).unwrap();
        let mut probes = watch.probes();
        assert_eq!(probes.next().await, Ok(()));
        let ended = tokio::time::timeout(PATIENCE, probes.next()).await;
        assert_eq!(ended, Ok(Err(WatchEnded)));
        assert_eq!(watch.latest().unwrap().0.devices.len(), 1);
    }

    #[tokio::test]
    async fn a_probe_that_is_asked_for_begins_after_that_also_while_another_one_is_under_way() {
        let (begins, mut begun) = tokio::sync::mpsc::unbounded_channel();
        let (go_on, goes_on) = std::sync::mpsc::channel::<()>();
        let probe = move || {
            begins.send(Instant::now()).unwrap();
            // Its end is the test's.
            let _ = goes_on.recv();
            answer("l4")
        };
        let watch = GpuWatch::with(probe, PATIENCE * 60).unwrap();
        let mut begun = async || {
            let begun = tokio::time::timeout(PATIENCE, begun.recv()).await;
            begun.expect("no probe began").unwrap()
        };
        let mut probes = watch.probes();
        begun().await;
        let asked = Instant::now();
        watch.look_now();
        // Whoever asks beside waits for the same one.
        watch.look_now();
        go_on.send(()).unwrap();
        probes.next().await.unwrap();
        assert!(watch.latest().unwrap().1 <= asked, "it was under way");
        assert!(begun().await >= asked);
        go_on.send(()).unwrap();
        probes.next().await.unwrap();
        // None is under way now.
        let asked = Instant::now();
        watch.look_now();
        assert!(begun().await >= asked);
    }
}
