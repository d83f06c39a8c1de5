//! The answer as text: labels in the first column, one table of reasons.

use std::fmt::{Formatter, Result};

use super::Explanation;
use super::counts::ProfileAnswer;
use crate::control::placement::{Attempt, Ranking, ScoredBy, Taken};

/// Width of the labels, the space behind them included.
const LABEL_CHARS: usize = 9;
/// Candidates after the chosen one that are shown.
const OTHERS_MAX: usize = 3;

pub(super) fn write(answer: &Explanation, f: &mut Formatter<'_>) -> Result {
    let missing = (answer.wanted as usize).saturating_sub(answer.running);
    let plural = if answer.wanted == 1 { "" } else { "s" };
    match missing {
        0 => writeln!(
            f,
            "{}  {} of {} replica{plural} started, {} ready, asked about one more",
            answer.model, answer.running, answer.wanted, answer.ready
        )?,
        _ => writeln!(
            f,
            "{}  {missing} of {} replica{plural} missing",
            answer.model, answer.wanted
        )?,
    }
    let chosen = answer.decision.chosen().map(|(attempt, _)| attempt);
    for (profile, attempt) in answer.profiles.iter().zip(&answer.decision.attempts) {
        let is_chosen = chosen.is_some_and(|chosen| std::ptr::eq(chosen, attempt));
        write_profile(profile, attempt, is_chosen, f)?;
    }
    if !answer.placed {
        let changes: Vec<&str> = answer.fits_if.iter().map(|each| &*each.text).collect();
        match changes.is_empty() {
            false => lines("fits if", changes, f)?,
            true => line(
                "fits if",
                &format!("nothing that was tried helps ({} changes)", answer.tried),
                f,
            )?,
        }
        line("retry", &answer.retry, f)?;
    }
    Ok(())
}

fn write_profile(
    profile: &ProfileAnswer,
    attempt: &Attempt,
    is_chosen: bool,
    f: &mut Formatter<'_>,
) -> Result {
    line("asked", &profile.asked, f)?;
    let fleet = &profile.fleet;
    let plural = if fleet.nodes == 1 { "" } else { "s" };
    let without = match fleet.without_gpu {
        0 => String::new(),
        number => format!("{number} without GPU, "),
    };
    let counts = format!(
        "{} node{plural}: {without}{} considered, {} fit",
        fleet.nodes, fleet.considered, fleet.fit
    );
    line("fleet", &counts, f)?;
    write_candidates(attempt, is_chosen, f)?;
    write_why(profile, f)?;
    if !attempt.candidates.is_empty() {
        return Ok(());
    }
    let nearest: Vec<String> = profile
        .nearest
        .iter()
        .map(|near| format!("{}: needs {}", near.node, near.lacks.join(", ")))
        .collect();
    lines("nearest", nearest.iter().map(String::as_str), f)
}

fn write_why(profile: &ProfileAnswer, f: &mut Formatter<'_>) -> Result {
    if profile.why.is_empty() {
        return Ok(());
    }
    let codes = profile.why.iter().map(|count| count.code.chars().count());
    let width = codes.max().unwrap_or(0).max(LABEL_CHARS) + 2;
    writeln!(f, "{:width$}nodes  alone  detail", "why")?;
    for count in &profile.why {
        writeln!(
            f,
            "{:width$}{:>5}  {:>5}  {}",
            count.code, count.nodes, count.alone, count.detail
        )?;
    }
    Ok(())
}

fn write_candidates(attempt: &Attempt, is_chosen: bool, f: &mut Formatter<'_>) -> Result {
    let shown: Vec<String> = attempt
        .candidates
        .iter()
        .take(OTHERS_MAX + 1)
        .map(place)
        .collect();
    let Some((first, others)) = shown.split_first() else {
        return Ok(());
    };
    match is_chosen {
        true => line("placed", first, f)?,
        // Else this profile would have been taken.
        false => line("avoided", &format!("{first}; it failed there lately"), f)?,
    }
    lines("next", others.iter().map(String::as_str), f)?;
    if attempt.scored_by == ScoredBy::Native {
        line(
            "scored",
            "natively, since the policy's score failed for every candidate",
            f,
        )?;
    }
    Ok(())
}

/// `ml-07 GPUs 0-3: 75 = frag 25, pack 30, spread 20`.
fn place(ranking: &Ranking) -> String {
    let nodes = ranking.candidate.nodes.iter().zip(&ranking.candidate.taken);
    let nodes: Vec<String> = nodes
        .map(|(node, taken)| match taken.is_empty() {
            true => node.clone(),
            false => format!("{node} {}", gpus(taken)),
        })
        .collect();
    let nodes = nodes.join(" + ");
    let Some(score) = &ranking.score else {
        return format!("{nodes}: the policy's score failed");
    };
    let parts: Vec<String> = score
        .parts
        .iter()
        .filter(|(_, part)| *part != 0.0)
        .map(|(name, part)| format!("{name} {}", rounded(*part)))
        .collect();
    let sum = if parts.is_empty() { "" } else { " = " };
    format!("{nodes}: {}{sum}{}", rounded(score.total), parts.join(", "))
}

/// `GPU 3`, `GPUs 0-3,6`.
fn gpus(taken: &[Taken]) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for Taken { index, .. } in taken {
        match ranges.last_mut() {
            Some((_, end)) if *end + 1 == *index => *end = *index,
            _ => ranges.push((*index, *index)),
        }
    }
    let ranges: Vec<String> = ranges
        .into_iter()
        .map(|(start, end)| match start == end {
            true => start.to_string(),
            false => format!("{start}-{end}"),
        })
        .collect();
    let plural = if taken.len() == 1 { "" } else { "s" };
    format!("GPU{plural} {}", ranges.join(","))
}

fn rounded(number: f64) -> f64 {
    (number * 100.0).round() / 100.0 + 0.0
}

fn line(label: &str, text: &str, f: &mut Formatter<'_>) -> Result {
    writeln!(f, "{label:LABEL_CHARS$}{text}")
}

/// The label stands before the first line only.
fn lines<'t>(
    label: &str,
    texts: impl IntoIterator<Item = &'t str>,
    f: &mut Formatter<'_>,
) -> Result {
    for (at, text) in texts.into_iter().enumerate() {
        line(if at == 0 { label } else { "" }, text, f)?;
    }
    Ok(())
}
