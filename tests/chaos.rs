//! Everything at once, by a seed: clients stream, wait and leave while engines die, freeze and return, policies and configuration change.
//! Afterwards every request has ended in a way that is allowed, and nothing is left of any.
//!
//! `LLMGW_CHAOS_SECONDS=600` makes it longer, `LLMGW_CHAOS_SEED=1` repeats what was rolled (not how threads met).

#[path = "harness/crowd.rs"]
mod crowd;
#[path = "harness/dice.rs"]
mod dice;
mod harness;
#[path = "harness/more.rs"]
mod more;

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fake_engine::process::{Process, beside_this_test};
use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::runtime::Runtime;

use crowd::{Door, Got};
use dice::Dice;
use harness::{Gateway, PATIENCE, Setup};
use more::{chat_of, records};

const SECONDS: u64 = 15;
const CLIENTS: u64 = 300;
const ENGINES: [&str; 4] = ["vllm", "vllm", "sglang", "llamacpp"];
const MODELS: [&str; 2] = ["fake", "other"];
const TENANTS: [&str; 4] = ["free", "heavy", "narrow", "paced"];
const SLOTS: usize = 8;
/// What the tenant of that name may have open.
const NARROW: u64 = 4;
/// A stream that has begun and never ends.
const HOLDS: &str = r#"{"die_after":1,"how":"stall"}"#;
/// A refusal for want of a first probe comes no sooner than this: the probe's two questions may take 2 s each.
const FIRST_PROBE_MIN: Duration = Duration::from_secs(4);
/// No band lets a request wait for longer than a few seconds, and no answer takes one.
const REQUEST_PATIENCE: Duration = Duration::from_secs(60);
/// So often at least policies and configuration have really changed.
const RELOADS_MIN: usize = 2;
/// Between two disturbances, in milliseconds.
const PAUSE_MAX_MS: u64 = 200;

/// How a request may end for a client that stays: status, code, whether its body came to a proper end, and why. A stream that got a
/// comment while it waited has its 200, and is refused by an event.
const ALLOWED: [(u16, &str, bool, &str); 13] = [
    (200, "", true, "an engine answered"),
    (
        200,
        "upstream_failed",
        false,
        "its engine died or fell silent while it streamed",
    ),
    (
        200,
        "engine_error",
        false,
        "its engine ended in the middle of a stream, and said so",
    ),
    (
        200,
        "no_replica",
        false,
        "no engine was there, after a comment",
    ),
    (
        200,
        "queue_full",
        false,
        "no engine was there, and when one was, as many waited as its band allows",
    ),
    (
        200,
        "queue_timeout",
        false,
        "it waited for as long as its band lets it, with comments",
    ),
    (
        200,
        "first_byte_timeout",
        false,
        "every engine that was tried was silent, after a comment",
    ),
    (429, "queue_full", true, "as many waited as its band allows"),
    (429, "tenant_limit", true, "its tenant had what it may have"),
    (
        502,
        "upstream_failed",
        true,
        "every engine that was tried died before its first event",
    ),
    (503, "no_replica", true, "no engine was there"),
    (
        503,
        "queue_timeout",
        true,
        "it waited for as long as its band lets it",
    ),
    (
        504,
        "first_byte_timeout",
        true,
        "every engine that was tried was silent",
    ),
];

/// Admission policies that take turns; the last one is refused, and the one before stays.
const ADMISSIONS: [&str; 4] = [
    "local M = { api = 1 }\nfunction M.bands(pool)\n  return {\n\
     { name = 'interactive', priority = 100, floor = 0, max_queue = 2000, ttl_ms = 5000 },\n\
     { name = 'standard', priority = 50, floor = 0.1, max_queue = 2000, ttl_ms = 5000 },\n\
     { name = 'batch', priority = 0, floor = 0.1, max_queue = 2000, ttl_ms = 5000 } }\nend\nreturn M\n",
    "local M = { api = 1 }\nfunction M.bands(pool)\n  return {\n\
     { name = 'standard', priority = 50, floor = 0, max_queue = 20, ttl_ms = 400 },\n\
     { name = 'other', priority = 60, floor = 0.3, max_queue = 3, ttl_ms = 5000 } }\nend\n\
     function M.classify(request, tenant)\n  return request.stream and 'other' or 'standard', 1000\nend\nreturn M\n",
    "local M = { api = 1 }\nfunction M.bands(pool)\n  return { { name = 'batch', priority = 0, floor = 0, max_queue = 500, ttl_ms = 2000 } }\nend\n\
     function M.gate(pool)\n  return { hold_ms = 20, kv_max = 0.5, inflight_max = 3 }\nend\nreturn M\n",
    "local M = { api = 1 }\nfunction M.bands(",
];
/// In force when nothing is disturbed any more: who waits gets their turn, however slow the machine is.
const CALM: &str = "local M = { api = 1 }\nfunction M.bands(pool)\n  return {\n\
     { name = 'standard', priority = 50, floor = 0, max_queue = 2000, ttl_ms = 60000 } }\nend\nreturn M\n";
const FAIRNESSES: [&str; 2] = [
    "local M = { api = 1 }\nfunction M.prices(model)\n  return { input = 0, cached = 0, output = 100 }\nend\n\
     function M.key(request, tenant)\n  return request.stream and 'streams' or nil\nend\nreturn M\n",
    "local M = { api = 1 }\nfunction M.weight(tenant, usage)\n  return 1 + usage.inflight\nend\nreturn M\n",
];
const ROUTINGS: [&str; 2] = [
    "local M = { api = 1 }\nfunction M.rank(request, replicas)\n  return #replicas\nend\nreturn M\n",
    "local M = { api = 1 }\nfunction M.weights(pool)\n  return { affinity_min = 1 }\nend\nreturn M\n",
];

/// One engine's process, which comes back to the same address.
struct Site {
    kind: &'static str,
    addr: SocketAddr,
    process: Option<Process>,
}

impl Site {
    fn new(kind: &'static str) -> Site {
        let process = Site::spawn(kind, "127.0.0.1:0").unwrap();
        Site {
            kind,
            addr: process.addr(),
            process: Some(process),
        }
    }

    fn spawn(kind: &str, listen: &str) -> std::io::Result<Process> {
        Process::spawn(&beside_this_test()?, ["--kind", kind, "--listen", listen])
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
        }
    }

    /// Starts it where it is not; somebody may have its port for a moment.
    fn revive(&mut self) -> bool {
        if self.process.is_none() {
            self.process = Site::spawn(self.kind, &self.addr.to_string()).ok();
        }
        self.process.is_some()
    }
}

/// What a client has seen of one request.
struct Seen {
    id: String,
    took: Duration,
    /// Absent: it left.
    got: Option<Got>,
}

/// The tenants, of whom one has another limit at times.
fn tenants(narrow: u64) -> String {
    let line = |name: &&str| {
        let digest = Sha256::digest(name.as_bytes());
        let hash: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let limit = match *name {
            "narrow" => format!(", max_concurrency: {narrow}"),
            "paced" => ", requests_per_minute: 600, tokens_per_minute: 100000".to_owned(),
            _ => String::new(),
        };
        format!("\n  - {{name: {name}, keys: [\"sha256:{hash}\"]{limit}}}")
    };
    let lines: String = TENANTS.iter().map(line).collect();
    format!("tenants:{lines}")
}

/// The whole fleet.
fn whole(sites: &[Site]) -> Setup {
    let slots = format!("slots: {SLOTS}");
    setup(sites, NARROW, |_, _| Some(slots.clone()))
}

/// A configuration with some of the engines under each model.
fn setup(
    sites: &[Site],
    narrow: u64,
    mut more: impl FnMut(&str, usize) -> Option<String>,
) -> Setup {
    let mut setup = Setup::new()
        .top("log: {format: json}")
        .top("policies: policies")
        .top(&tenants(narrow))
        .file("policies/admission.lua", ADMISSIONS[0]);
    for model in MODELS {
        setup = setup.model(model, "");
        for (number, site) in sites.iter().enumerate() {
            // The second model shares two of the engines.
            if model == "other" && number > 1 {
                continue;
            }
            if let Some(more) = more(model, number) {
                let more = format!(
                    "serves: fake{}{more}",
                    if more.is_empty() { "" } else { ", " }
                );
                setup = setup.endpoint(site.kind, &format!("http://{}", site.addr), &more);
            }
        }
    }
    setup
}

/// Any configuration in which no model is without an engine.
fn rolled(sites: &[Site], dice: &mut Dice) -> Setup {
    let narrow = 1 + dice.below(8);
    let always = dice.below(2) as usize;
    let limits = [
        ("keepalive", dice.one_of(&["off", "50ms"])),
        ("first_byte_timeout", dice.one_of(&["10m", "200ms"])),
        ("idle_timeout", dice.one_of(&["5m", "200ms"])),
        ("connect_timeout", dice.one_of(&["1s", "2s"])),
        ("retries", dice.one_of(&["0", "2"])),
    ];
    let setup = setup(sites, narrow, |_, number| {
        let slots = dice.one_of(&["slots: 1", "slots: 2", "slots: 8", ""]);
        (number == always || dice.below(3) > 0).then(|| slots.to_owned())
    });
    let limit = |setup: Setup, (name, value)| setup.limit(name, value);
    limits.into_iter().fold(setup, limit)
}

/// Replaces a file as editors do: whole, by a rename.
fn save(path: &Path, text: &str) {
    let fresh = path.with_extension("fresh");
    std::fs::write(&fresh, text).unwrap();
    std::fs::rename(&fresh, path).unwrap();
}

/// One disturbance; what it was.
fn disturb(gateway: &Gateway, sites: &mut [Site], dice: &mut Dice) -> String {
    let which = dice.below(sites.len() as u64) as usize;
    let policies = gateway.dir.join("policies");
    match dice.below(12) {
        0..=1 => {
            sites[which].kill();
            format!("kill engine {which}")
        }
        2..=6 => format!("revive engine {which}: {}", sites[which].revive()),
        7 => {
            if let Some(process) = &sites[which].process {
                process.freeze().unwrap();
                std::thread::sleep(Duration::from_millis(dice.below(300)));
                process.thaw().unwrap();
            }
            format!("freeze engine {which}")
        }
        8 => {
            // Now and then one that is broken, until the next.
            let good = ADMISSIONS.len() as u64 - 1;
            let number = if dice.below(8) == 0 {
                good
            } else {
                dice.below(good)
            };
            let text = ADMISSIONS[number as usize];
            save(&policies.join("admission.lua"), text);
            format!("admission: {}", text.lines().last().unwrap_or_default())
        }
        9 => {
            save(&policies.join("fairness.lua"), dice.one_of(&FAIRNESSES));
            save(&policies.join("routing.lua"), dice.one_of(&ROUTINGS));
            "fairness and routing".to_owned()
        }
        10 => {
            save(&gateway.dir.join("llmgw.yaml"), &rolled(sites, dice).yaml());
            "configuration".to_owned()
        }
        _ => {
            let answer = gateway.admin_post("/v1/reload");
            // A policy that is broken at this moment is refused, and nothing else.
            assert!(matches!(answer.status(), 200 | 422), "{}", answer.text());
            "reload".to_owned()
        }
    }
}

fn request(id: &str, dice: &mut Dice) -> Request<Full<Bytes>> {
    let (tokens, token_ms) = (1 + dice.below(20), dice.below(6));
    let body = match dice.below(40) {
        // Now and then a long prompt.
        0 => chat_of(dice.one_of(&MODELS), false).replace("hello you", &"word ".repeat(5_000)),
        _ => chat_of(dice.one_of(&MODELS), dice.below(2) == 0),
    };
    Request::post("http://gateway/v1/chat/completions")
        .header("host", "gateway")
        .header("content-type", "application/json")
        .header("authorization", format!("Bearer {}", dice.one_of(&TENANTS)))
        .header(
            "x-llmgw-band",
            dice.one_of(&["interactive", "standard", "batch", "other", "absent"]),
        )
        .header("x-request-id", id)
        .header(
            "x-fake",
            json!({"tokens": tokens, "token_ms": token_ms}).to_string(),
        )
        .body(Full::from(body))
        .unwrap()
}

/// One client: one request after the other, some of which it leaves.
async fn client(door: Arc<Door>, stop: Arc<AtomicBool>, number: u64, seed: u64) -> Vec<Seen> {
    let mut dice = Dice(seed ^ (number + 1).wrapping_mul(0x2545_f491_4f6c_dd1d));
    let mut seen = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let id = format!("c{number}-{}", seen.len());
        let request = request(&id, &mut dice);
        let asked_at = Instant::now();
        let got = match dice.below(6) {
            0 => {
                let stays = Duration::from_millis(dice.below(200));
                let asked = door.ask(seen.len(), request);
                tokio::time::timeout(stays, asked).await.ok()
            }
            // It leaves a stream, or an answer of which it read nothing.
            1 => match door.begin(seen.len(), request).await {
                Ok(mut begun) if begun.status == 200 => {
                    begun.piece().await;
                    None
                }
                Ok(begun) => Some(begun.rest(seen.len()).await),
                Err(error) => panic!("{id}: {error}"),
            },
            _ => {
                let asked = door.ask(seen.len(), request);
                let ended = tokio::time::timeout(REQUEST_PATIENCE, asked).await;
                Some(ended.unwrap_or_else(|_| panic!("{id} did not end")))
            }
        };
        // Refused, it comes back later, though sooner than it was told.
        let was_refused = got.as_ref().is_some_and(|got| got.status != 200);
        let pause_max_ms = if was_refused { 1_000 } else { 50 };
        let took = asked_at.elapsed();
        seen.push(Seen { id, took, got });
        let pause = Duration::from_millis(dice.below(pause_max_ms));
        tokio::time::sleep(pause).await;
    }
    seen
}

/// The disturbances, until the time is over and policies and configuration have really changed.
fn disturb_for(time: Duration, gateway: &Gateway, sites: &mut [Site], dice: &mut Dice) {
    let began = Instant::now();
    while began.elapsed() < time
        || (reloads(gateway)
            .iter()
            .any(|(_, count)| *count < RELOADS_MIN)
            && began.elapsed() < time + PATIENCE)
    {
        let what = disturb(gateway, sites, dice);
        println!("{:6} ms {what}", began.elapsed().as_millis());
        std::thread::sleep(Duration::from_millis(dice.below(PAUSE_MAX_MS)));
    }
}

/// All engines are there, and the configuration and the policies of the beginning.
fn restore(gateway: &Gateway, sites: &mut [Site]) {
    let mut all_back = || sites.iter_mut().all(Site::revive);
    gateway.until("every engine is back", &mut all_back);
    let policies = gateway.dir.join("policies");
    save(&policies.join("admission.lua"), CALM);
    for more in ["fairness.lua", "routing.lua"] {
        let _ = std::fs::remove_file(policies.join(more));
    }
    save(&gateway.dir.join("llmgw.yaml"), &whole(sites).yaml());
    let answer = gateway.admin_post("/v1/reload");
    assert_eq!(answer.status(), 200, "{}", answer.text());
    gateway.ready("fake", ENGINES.len());
    gateway.ready("other", 2);
}

/// What was seen is allowed, by the table; how often each way was.
fn check_outcomes(seen: &[Seen]) {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for one in seen {
        let Some(got) = &one.got else {
            *counts.entry("the client left").or_default() += 1;
            continue;
        };
        let found = ALLOWED.iter().find(|(status, code, whole, _)| {
            (*status, *code, *whole) == (got.status, &*got.code, got.whole)
        });
        let (.., why) =
            found.unwrap_or_else(|| panic!("{} ended in no allowed way: {got:?}", one.id));
        if matches!(got.status, 429 | 503) {
            assert!(
                got.headers.contains_key("retry-after"),
                "{}: {got:?}",
                one.id
            );
        }
        assert!(
            one.took >= FIRST_PROBE_MIN || !got.body.contains("not probed yet"),
            "{} was refused before a probe was over: {got:?}",
            one.id
        );
        *counts.entry(why).or_default() += 1;
    }
    println!("{counts:#?}");
    for why in ["an engine answered", "the client left"] {
        assert!(counts.contains_key(why), "{counts:?}");
    }
}

/// Every request is on record once; one that its client left at once may not have come at all.
fn check_records(gateway: &Gateway, seen: &[Seen]) {
    let status_of = |records: &[Value]| -> HashMap<String, Vec<Value>> {
        let mut by_id: HashMap<String, Vec<Value>> = HashMap::new();
        for record in records {
            let id = record["request_id"].as_str().unwrap().to_owned();
            by_id.entry(id).or_default().push(record["status"].clone());
        }
        by_id
    };
    let stayed = |one: &&Seen| one.got.is_some();
    let mut by_id = HashMap::new();
    gateway.until("everybody who stayed is on record", || {
        by_id = status_of(&records(gateway));
        seen.iter()
            .filter(stayed)
            .all(|one| by_id.contains_key(&one.id))
    });
    for one in seen {
        let statuses = by_id.get(&one.id).map_or(&[][..], Vec::as_slice);
        match &one.got {
            Some(got) => assert_eq!(statuses, [json!(got.status)], "{}", one.id),
            None => assert!(statuses.len() <= 1, "{}: {statuses:?}", one.id),
        }
    }
}

/// How often policies and configuration were put in force.
fn reloads(gateway: &Gateway) -> [(&'static str, usize); 2] {
    let log = gateway.log();
    ["policies reloaded", "configuration reloaded"]
        .map(|reloaded| (reloaded, log.matches(reloaded).count()))
}

/// The changes were not refused all the time.
fn check_changes(gateway: &Gateway) {
    for (reloaded, count) in reloads(gateway) {
        println!("{reloaded}: {count} times");
        assert!(count >= RELOADS_MIN, "{reloaded}: {count} times");
    }
}

/// Nothing is counted as open anywhere.
fn nothing_is_left(gateway: &Gateway, sites: &[Site]) {
    gateway.counters_are_zero();
    assert_eq!(gateway.metric("llmgw_inflight_requests", ""), 0.0);
    let status = gateway.admin_get("/v1/status").json();
    for model in status["models"].as_array().unwrap() {
        for band in model["bands"].as_array().unwrap() {
            assert_eq!(
                (&band["queued"], &band["inflight"]),
                (&json!(0), &json!(0)),
                "{band}"
            );
        }
    }
    for tenant in status["tenants"].as_array().unwrap() {
        assert_eq!(
            (&tenant["queued"], &tenant["inflight"]),
            (&json!(0), &json!(0)),
            "{tenant}"
        );
    }
    for site in sites {
        let process = site.process.as_ref().unwrap();
        let idle = process.wait(PATIENCE, |state| state.open == 0 && state.waiting == 0);
        assert!(
            idle.is_ok(),
            "{} engine at {}: {idle:?}",
            site.kind,
            site.addr
        );
    }
}

/// It serves as on the first day: all models, and as much at once as engines and tenants may have.
fn serves_again(gateway: &Gateway, door: &Arc<Door>, runtime: &Runtime) {
    let asked = |tenant: &str, model: &str, stream: bool, fake: &str| {
        Request::post("http://gateway/v1/chat/completions")
            .header("host", "gateway")
            .header("authorization", format!("Bearer {tenant}"))
            .header("x-fake", fake)
            .body(Full::from(chat_of(model, stream)))
            .unwrap()
    };
    let answers = runtime.block_on(async {
        let ask = |number: usize| asked("free", MODELS[number % 2], number.is_multiple_of(3), "{}");
        let mut answers = crowd::send(door, 100, ask);
        crowd::next(&mut answers, 100).await
    });
    for got in &answers {
        assert!(got.is_ok(), "{got:?}\n{}", gateway.log());
    }
    // What leaked of slots, of prompts that are unread, or of open requests, would be missing here.
    let mut held = Vec::new();
    for number in 0..ENGINES.len() * SLOTS {
        let tenant = if number < NARROW as usize {
            "narrow"
        } else {
            "free"
        };
        let begins = door.begin(number, asked(tenant, "fake", true, HOLDS));
        let begun = runtime.block_on(async { tokio::time::timeout(PATIENCE, begins).await });
        let begun = begun
            .unwrap_or_else(|_| panic!("stream {number} has no slot: {:#?}", gateway.replicas()));
        let begun = begun.unwrap();
        assert_eq!(begun.status, 200, "stream {number} of `{tenant}`");
        held.push(begun);
    }
}

#[test]
fn every_request_ends_in_an_allowed_way_and_nothing_is_left_whatever_happens_meanwhile() {
    let (seed, time) = dice::seed_and_time(SECONDS);
    let mut sites: Vec<Site> = ENGINES.into_iter().map(Site::new).collect();
    let gateway = whole(&sites).start();
    gateway.ready("fake", ENGINES.len());
    gateway.ready("other", 2);
    assert!(
        crowd::fits_http1(CLIENTS as usize),
        "the limit of file descriptors is too low"
    );
    let runtime = Runtime::new().unwrap();
    let doors = [
        Arc::new(Door::Http1(gateway.addr)),
        Arc::new(runtime.block_on(Door::http2(gateway.addr, CLIENTS as usize))),
    ];
    let stop = Arc::new(AtomicBool::new(false));
    let start = |number| {
        let door = doors[number as usize % doors.len()].clone();
        runtime.spawn(client(door, stop.clone(), number, seed))
    };
    let clients: Vec<_> = (0..CLIENTS).map(start).collect();
    disturb_for(time, &gateway, &mut sites, &mut Dice(seed));
    stop.store(true, Ordering::Relaxed);
    restore(&gateway, &mut sites);
    let joined = clients
        .into_iter()
        .map(|client| runtime.block_on(client).unwrap());
    let seen: Vec<Seen> = joined.flatten().collect();
    println!("{} requests", seen.len());
    check_outcomes(&seen);
    nothing_is_left(&gateway, &sites);
    check_records(&gateway, &seen);
    check_changes(&gateway);
    for door in &doors {
        serves_again(&gateway, door, &runtime);
        nothing_is_left(&gateway, &sites);
    }
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}
