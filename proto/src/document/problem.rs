//! What is wrong with a configuration, and how a person is shown it: file, line, path, message, the line with a caret, and what would be right.

use std::fmt;
use std::path::{Path, PathBuf};

use super::mask::mask;
use super::yaml;

/// Everything that was found wrong with one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigErrors {
    pub file: PathBuf,
    /// Never empty, in the order of the text.
    pub problems: Vec<Problem>,
    /// Problems found beyond [`PROBLEMS_MAX`], which are not kept.
    pub omitted: usize,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Line and column, from 1 and in characters; None where the file as a whole is meant.
    pub position: Option<(usize, usize)>,
    /// `models[1].profiles[0].gpu`, empty for the whole file.
    pub path: String,
    /// What is wrong.
    pub wrong: String,
    /// What would be right, empty where the message says it already.
    pub right: String,
    /// The line of the text with credentials masked, empty where there is none.
    pub source_line: String,
}

/// Where a problem is: a value, or the key before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub steps: Vec<Step>,
    pub at: At,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The nth entry of this key, 0 unless it is written twice.
    Key(String, usize),
    Index(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    Key,
    Value,
}

/// A problem whose line has not been looked up.
#[derive(Clone, Debug)]
pub struct Finding {
    pub place: Place,
    pub wrong: String,
    pub right: String,
    /// The value may be a credential, so its line is cut before it.
    pub sensitive: bool,
}

/// Each line is found by reading the file again, so this bounds the time too.
pub const PROBLEMS_MAX: usize = 20;

/// Longer lines are shown around the caret only.
const SOURCE_LINE_MAX_CHARS: usize = 160;

impl ConfigErrors {
    /// One problem of the file as a whole.
    pub fn whole(file: &Path, wrong: String, right: &str) -> Self {
        let problem = Problem {
            position: None,
            path: String::new(),
            wrong,
            right: right.to_owned(),
            source_line: String::new(),
        };
        ConfigErrors {
            file: file.to_owned(),
            problems: vec![problem],
            omitted: 0,
        }
    }

    /// One problem at a position, such as one of the YAML itself.
    pub fn at(
        file: &Path,
        text: &str,
        position: Option<(usize, usize)>,
        wrong: String,
        right: String,
    ) -> Self {
        let source_line = position.map_or(String::new(), |(line, _)| mask(line_of(text, line)));
        let problem = Problem {
            position,
            path: String::new(),
            wrong,
            right,
            source_line,
        };
        ConfigErrors {
            file: file.to_owned(),
            problems: vec![problem],
            omitted: 0,
        }
    }

    /// Looks up the line of each finding.
    pub fn locate(file: &Path, text: &str, findings: Vec<Finding>) -> Self {
        let omitted = findings.len().saturating_sub(PROBLEMS_MAX);
        let mut problems: Vec<Problem> = findings
            .into_iter()
            .take(PROBLEMS_MAX)
            .map(|finding| finding.located(text))
            .collect();
        problems.sort_by_key(|problem| problem.position);
        ConfigErrors {
            file: file.to_owned(),
            problems,
            omitted,
        }
    }
}

impl Finding {
    pub fn new(place: Place, wrong: impl Into<String>, right: impl Into<String>) -> Self {
        Finding {
            place,
            wrong: wrong.into(),
            right: right.into(),
            sensitive: false,
        }
    }

    fn located(self, text: &str) -> Problem {
        let position = yaml::position(text, &self.place);
        let source_line = match position {
            None => String::new(),
            Some((line, column)) if self.sensitive => {
                let kept: String = line_of(text, line).chars().take(column - 1).collect();
                mask(&kept) + "***"
            }
            Some((line, _)) => mask(line_of(text, line)),
        };
        Problem {
            position,
            path: self.place.to_string(),
            wrong: self.wrong,
            right: self.right,
            source_line,
        }
    }
}

impl Place {
    pub fn root() -> Self {
        Place {
            steps: Vec::new(),
            at: At::Value,
        }
    }

    pub fn key(&self, name: &str) -> Self {
        self.nth_key(name, 0)
    }

    pub fn nth_key(&self, name: &str, nth: usize) -> Self {
        let mut steps = self.steps.clone();
        steps.push(Step::Key(name.to_owned(), nth));
        Place {
            steps,
            at: At::Value,
        }
    }

    pub fn index(&self, index: usize) -> Self {
        let mut steps = self.steps.clone();
        steps.push(Step::Index(index));
        Place {
            steps,
            at: At::Value,
        }
    }

    /// The same entry, but its key rather than its value.
    pub fn at_key(mut self) -> Self {
        self.at = At::Key;
        self
    }

    /// The mapping that a rule about this place looks at: its own, or itself where it is an item or a section.
    pub fn scope(&self) -> &[Step] {
        match self.steps.last() {
            Some(Step::Key(..)) if self.steps.len() > 1 => &self.steps[..self.steps.len() - 1],
            _ => &self.steps,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.steps.iter().enumerate() {
            match step {
                Step::Key(name, _) if index == 0 => f.write_str(name)?,
                Step::Key(name, _) => write!(f, ".{name}")?,
                Step::Index(number) => write!(f, "[{number}]")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{}:{problem}", self.file.display())?;
        }
        if self.omitted > 0 {
            write!(f, "\n{}: and {} more", self.file.display(), self.omitted)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

/// Follows the file's name and a colon.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((line, column)) = self.position {
            write!(f, "{line}:{column}:")?;
        }
        if !self.path.is_empty() {
            write!(f, " {}:", self.path)?;
        }
        write!(f, " {}", self.wrong)?;
        if let Some((line, column)) = self.position {
            let (shown, caret) = clip(&self.source_line, column);
            let gutter = line.to_string();
            let blank = " ".repeat(gutter.len());
            // Tabs are kept, so that the caret stands below its character however wide they are shown.
            let pad: String = shown
                .chars()
                .take(caret - 1)
                .map(|c| if c == '\t' { '\t' } else { ' ' })
                .collect();
            write!(f, "\n  {gutter} | {shown}\n  {blank} | {pad}^")?;
        }
        if !self.right.is_empty() {
            write!(f, "\n  help: {}", self.right)?;
        }
        Ok(())
    }
}

/// The nth line, from 1.
fn line_of(text: &str, line: usize) -> &str {
    text.lines().nth(line - 1).unwrap_or("")
}

/// The part of the line around the column, and the column in that part.
fn clip(line: &str, column: usize) -> (String, usize) {
    let column = column.min(line.chars().count() + 1);
    if line.chars().count() <= SOURCE_LINE_MAX_CHARS {
        return (line.to_owned(), column);
    }
    let start = column.saturating_sub(SOURCE_LINE_MAX_CHARS / 2);
    (
        line.chars()
            .skip(start)
            .take(SOURCE_LINE_MAX_CHARS)
            .collect(),
        column - start,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_line_is_shown_around_its_caret() {
        let line = format!("{}x{}", "a".repeat(300), "b".repeat(300));
        let (shown, caret) = clip(&line, 301);
        assert_eq!(shown.chars().nth(caret - 1), Some('x'));
        assert_eq!(shown.chars().count(), SOURCE_LINE_MAX_CHARS);
    }
}
