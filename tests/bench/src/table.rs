//! Medians over rounds, and the Markdown that shows them.

use std::collections::BTreeMap;

/// What was measured of one target in each round, in the order of the rounds.
#[derive(Default)]
pub struct Samples {
    values: BTreeMap<(String, String), Vec<f64>>,
    /// Figures in the order in which they were first measured.
    figures: Vec<String>,
}

impl Samples {
    pub fn add(&mut self, figure: &str, target: &str, value: f64) {
        if !self.figures.iter().any(|known| known == figure) {
            self.figures.push(figure.to_string());
        }
        let key = (figure.to_string(), target.to_string());
        self.values.entry(key).or_default().push(value);
    }

    /// One row a figure, one column a target; behind each target its ratio to nginx, the median of the rounds' own.
    pub fn markdown(&self, targets: &[String], against: &str) -> String {
        let mut out = String::from("| |");
        for target in targets {
            out.push_str(&format!(" {target} |"));
        }
        out.push_str("\n|---|");
        out.push_str(&"---|".repeat(targets.len()));
        out.push('\n');
        for figure in &self.figures {
            out.push_str(&format!("| {figure} |"));
            for target in targets {
                out.push_str(&format!(" {} |", self.cell(figure, target, against)));
            }
            out.push('\n');
        }
        out
    }

    fn cell(&self, figure: &str, target: &str, against: &str) -> String {
        let Some(own) = self.of(figure, target) else {
            return "-".to_string();
        };
        let value = number(median(own));
        match self.of(figure, against) {
            Some(base) if target != against => {
                let ratios: Vec<f64> = own.iter().zip(base).map(|(own, base)| own / base).collect();
                format!("{value} ({:.2})", median(&ratios))
            }
            _ => value,
        }
    }

    fn of(&self, figure: &str, target: &str) -> Option<&[f64]> {
        let key = (figure.to_string(), target.to_string());
        self.values.get(&key).map(Vec::as_slice)
    }
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => sorted[odd / 2],
        even => f64::midpoint(sorted[even / 2 - 1], sorted[even / 2]),
    }
}

/// Three digits that matter, thousands apart.
fn number(value: f64) -> String {
    if value.abs() < 100.0 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_has_the_median_and_the_median_ratio_of_the_rounds() {
        let mut samples = Samples::default();
        for (own, base) in [(10.0, 10.0), (4_000.0, 1_000.0), (30.0, 10.0)] {
            samples.add("speed", "own", own);
            samples.add("speed", "base", base);
        }
        let targets = ["base".to_string(), "own".to_string(), "absent".to_string()];
        assert_eq!(
            samples.markdown(&targets, "base"),
            "| | base | own | absent |\n|---|---|---|---|\n| speed | 10.0 | 30.0 (3.00) | - |\n"
        );
        assert_eq!(number(1_234_567.0), "1,234,567");
    }
}
