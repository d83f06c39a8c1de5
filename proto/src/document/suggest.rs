//! Finds the word that was probably meant.

/// The known word that was probably meant, else all of them.
pub fn suggestion(word: &str, known: &[&str]) -> String {
    let lower = word.to_lowercase();
    let underscored = lower.replace('-', "_");
    // A key with the wrong dashes is meant as often as a name that has some.
    let distance = |known: &str| distance(&lower, known).min(distance(&underscored, known));
    let nearest = known
        .iter()
        // Among equals the one that begins alike: `cpu` means `cpus` rather than `gpu`.
        .min_by_key(|known| {
            (
                distance(known),
                known.chars().next() != lower.chars().next(),
            )
        });
    match nearest {
        Some(nearest) if distance(nearest) <= (nearest.chars().count() / 3).max(1) => {
            format!("did you mean `{nearest}`?")
        }
        _ => format!("known here: {}", known.join(", ")),
    }
}

/// The longest word that is compared; a longer one is no typing error.
const WORD_MAX_CHARS: usize = 64;

/// How many characters have to be put in, left out, replaced, or swapped with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    if a.len().max(b.len()) > WORD_MAX_CHARS {
        return usize::MAX;
    }
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    rows[0] = (0..=b.len()).collect();
    for i in 1..=a.len() {
        rows[i][0] = i;
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}
