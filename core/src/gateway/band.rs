//! Which band a request waits in: what its client would like, what the policy says, what its tenant may use.

use std::sync::Arc;
use std::time::Duration;

use llmgw_plugins::{Band, BandSpec, Hook, PolicySet, TenantView};

use super::auth::Caller;
use super::job::{Facts, Job};
use crate::config::Labels;
use crate::flow::tenant::TenantAccount;

/// The band of callers who have none of their own.
pub const OPEN_BAND: &str = "standard";
/// Where a client's word for "later" leads.
const LATER_BAND: &str = "batch";
/// Requests that may wait in a band that no policy lists, and how long.
const UNLISTED_QUEUE_MAX: u64 = 2_000;
const UNLISTED_TTL_MS: u64 = 30_000;

/// The band that the client would like: what the header says, else what the body says in its API's own words.
///
/// A body's `service_tier` or `priority` that means nothing here is no hint; a header is the policy's to understand.
pub fn hint(
    set: &PolicySet,
    caller: &Caller,
    header: Option<String>,
    facts: &Facts,
) -> Option<Arc<str>> {
    match header {
        Some(header) => Some(Arc::from(header)),
        None => in_body(set.bands_at_load(), allowed(caller), facts),
    }
}

/// Asks the policy for the band, and for the flow within it. Whatever it says, the band is one that the tenant may use.
pub fn classify(job: &mut Job, caller: &Caller) {
    let set = job.set.clone();
    let (bands, allowed) = (set.bands_at_load(), allowed(caller));
    let labels = caller.account.labels();
    let tenant = tenant_view(bands, allowed, &caller.account, &labels);
    let band = set.classify(&job.view(0), &tenant);
    let band = within(bands, allowed, band);
    if set.defines(Hook::Key) {
        job.flow = set.key(&job.view(0), &tenant).map(Arc::from);
    }
    job.queue_ttl = band.ttl_ms.map(Duration::from_millis);
    job.band = match find(bands, &band.name) {
        Some(spec) => spec.clone(),
        None => unlisted(band.name),
    };
}

/// A tenant as policies see it.
pub fn tenant_view<'a>(
    bands: &'a [BandSpec],
    allowed: &'a [Arc<str>],
    account: &'a TenantAccount,
    labels: &'a Labels,
) -> TenantView<'a> {
    TenantView {
        name: &account.name,
        band: allowed.first().map_or(OPEN_BAND, |band| &**band),
        best_band: best(bands, allowed).map_or(OPEN_BAND, |band| &*band.name),
        weight: account.configured_weight(),
        inflight: u64::from(account.inflight()),
        queued: u64::from(account.queued()),
        labels,
    }
}

/// A band of a policy that lists none: some may wait, for a while.
pub fn unlisted(name: Arc<str>) -> BandSpec {
    BandSpec {
        name,
        priority: 0.0,
        floor: 0.0,
        max_queue: UNLISTED_QUEUE_MAX,
        ttl_ms: UNLISTED_TTL_MS,
        shed: None,
    }
}

fn find<'a>(bands: &'a [BandSpec], name: &str) -> Option<&'a BandSpec> {
    bands.iter().find(|band| &*band.name == name)
}

/// The names of the bands that a tenant may use; none listed means all.
fn allowed(caller: &Caller) -> &[Arc<str>] {
    match &caller.tenant {
        Some(tenant) => &tenant.bands,
        None => &[],
    }
}

/// The band that goes first among those that a tenant may use.
fn best<'a>(bands: &'a [BandSpec], allowed: &[Arc<str>]) -> Option<&'a BandSpec> {
    bands
        .iter()
        .filter(|band| allowed.is_empty() || allowed.contains(&band.name))
        .max_by(|left, right| left.priority.total_cmp(&right.priority))
}

/// OpenAI's `service_tier`, then vLLM's `priority`, of which a lower one goes earlier.
fn in_body(bands: &[BandSpec], allowed: &[Arc<str>], facts: &Facts) -> Option<Arc<str>> {
    let first = || best(bands, allowed);
    let later = || find(bands, LATER_BAND);
    let by_tier = facts.service_tier.as_deref().and_then(|tier| {
        find(bands, tier).or_else(|| match tier {
            "priority" => first(),
            "flex" => later(),
            // `default`, `auto` and words that nobody knows leave it to the tenant.
            _ => None,
        })
    });
    let by_priority = || match facts.priority? {
        ..0 => first(),
        0 => None,
        1.. => later(),
    };
    by_tier.or_else(by_priority).map(|band| band.name.clone())
}

/// The band itself where the tenant may use it, else the next one below, else the lowest that it may use. Where a
/// policy has none of its bands, the lowest of all.
fn within(bands: &[BandSpec], allowed: &[Arc<str>], band: Band) -> Band {
    if allowed.is_empty() || allowed.contains(&band.name) {
        return band;
    }
    let priority = find(bands, &band.name).map_or(f64::NEG_INFINITY, |spec| spec.priority);
    let usable = || bands.iter().filter(|spec| allowed.contains(&spec.name));
    let below = usable()
        .filter(|spec| spec.priority <= priority)
        .max_by(|left, right| left.priority.total_cmp(&right.priority));
    let found = below
        .or_else(|| lowest(usable()))
        .or_else(|| lowest(bands.iter()));
    match found {
        Some(spec) => Band {
            name: spec.name.clone(),
            ..band
        },
        None => band,
    }
}

fn lowest<'a>(bands: impl Iterator<Item = &'a BandSpec>) -> Option<&'a BandSpec> {
    bands.min_by(|left, right| left.priority.total_cmp(&right.priority))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bands(names: &[&str]) -> Vec<BandSpec> {
        let mut bands = PolicySet::built_in().bands_at_load().to_vec();
        bands.retain(|band| names.contains(&&*band.name));
        assert_eq!(bands.len(), names.len());
        bands
    }

    fn names(names: &[&str]) -> Vec<Arc<str>> {
        names.iter().copied().map(Arc::from).collect()
    }

    const ALL: &[&str] = &["interactive", "standard", "batch"];

    #[test]
    fn a_body_says_its_band_in_the_words_of_its_api() {
        let few = &["standard", "batch"][..];
        for (known, allowed, tier, priority, expected) in [
            (ALL, &[][..], None, None, None),
            (ALL, &[], Some("interactive"), None, Some("interactive")),
            (ALL, &[], Some("batch"), Some(-1), Some("batch")),
            (ALL, &[], Some("flex"), None, Some("batch")),
            (ALL, &[], Some("priority"), None, Some("interactive")),
            (ALL, few, Some("priority"), None, Some("standard")),
            (ALL, &[], Some("default"), None, None),
            (ALL, &[], Some("auto"), Some(3), Some("batch")),
            (ALL, &[], Some("no such tier"), None, None),
            (ALL, &[], None, Some(-5), Some("interactive")),
            (ALL, few, None, Some(i64::MIN), Some("standard")),
            (ALL, &[], None, Some(0), None),
            (ALL, &[], None, Some(i64::MAX), Some("batch")),
            (
                &["interactive", "standard"],
                &[],
                Some("flex"),
                Some(9),
                None,
            ),
        ] {
            let facts = Facts {
                service_tier: tier.map(str::to_string),
                priority,
                ..Facts::default()
            };
            let hint = in_body(&bands(known), &names(allowed), &facts);
            assert_eq!(
                hint.as_deref(),
                expected,
                "{tier:?} {priority:?} {allowed:?}"
            );
        }
    }

    #[test]
    fn a_band_that_the_tenant_may_not_use_becomes_the_next_lower_one_that_it_may() {
        for (allowed, band, expected) in [
            (&[][..], "interactive", "interactive"),
            (&["interactive", "batch"], "interactive", "interactive"),
            (&["interactive", "batch"], "standard", "batch"),
            (&["standard", "interactive"], "batch", "standard"),
            (&["standard"], "interactive", "standard"),
            (&["gone"], "interactive", "batch"),
            (&["gone", "standard"], "interactive", "standard"),
        ] {
            let band = Band {
                name: band.into(),
                ttl_ms: Some(7),
            };
            let got = within(&bands(ALL), &names(allowed), band.clone());
            assert_eq!(
                (&*got.name, got.ttl_ms),
                (expected, Some(7)),
                "{allowed:?} {band:?}"
            );
        }
    }
}
