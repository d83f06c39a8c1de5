//! What tests found, as JUnit's XML.

use std::fmt::Write;

use llmgw_plugins::test::{CaseReport, FileReport, TestFailure, TestReport};

use super::test::place;

/// The whole document. Writing into a String can't fail.
pub(super) fn document(report: &TestReport) -> String {
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let (tests, failed) = (report.passed + report.failed, report.failed);
    let _ = writeln!(
        out,
        "<testsuites name=\"llmgw policy test\" tests=\"{tests}\" failures=\"{failed}\">"
    );
    for file in &report.files {
        suite(&mut out, file);
    }
    out.push_str("</testsuites>\n");
    out
}

fn suite(out: &mut String, file: &FileReport) {
    let failed = file.cases.iter().filter(|case| case.failure.is_some());
    let seconds: f64 = file.cases.iter().map(|case| case.time.as_secs_f64()).sum();
    let _ = writeln!(
        out,
        "  <testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" time=\"{seconds:.3}\">",
        escaped(&file.file),
        file.cases.len(),
        failed.count()
    );
    for case in &file.cases {
        one(out, file, case);
    }
    out.push_str("  </testsuite>\n");
}

fn one(out: &mut String, file: &FileReport, case: &CaseReport) {
    let _ = write!(
        out,
        "    <testcase classname=\"{}\" name=\"{}\" file=\"{}\" line=\"{}\" time=\"{:.3}\"",
        escaped(&file.file),
        escaped(&case.name),
        escaped(&file.file),
        case.line.unwrap_or(1),
        case.time.as_secs_f64()
    );
    match &case.failure {
        None => out.push_str("/>\n"),
        Some(failure) => {
            let _ = writeln!(
                out,
                ">\n      <failure message=\"{}\" type=\"failure\">{}</failure>\n    </testcase>",
                escaped(&failure.message),
                escaped(&details(failure))
            );
        }
    }
}

fn details(failure: &TestFailure) -> String {
    let mut lines = vec![place(failure)];
    lines.extend(failure.expression.clone());
    let labelled = [
        ("expected", &failure.expected),
        ("actual", &failure.actual),
        ("differ", &failure.difference),
    ];
    for (label, text) in labelled {
        lines.extend(text.as_ref().map(|text| format!("{label}: {text}")));
    }
    for (label, list) in [("decision", &failure.decisions), ("input", &failure.input)] {
        lines.extend(list.iter().map(|text| format!("{label}: {text}")));
    }
    lines.join("\n")
}

/// XML's own characters written out; what XML can't hold at all is replaced.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\n' => out.push_str("&#10;"),
            '\t' => out.push_str("&#9;"),
            c if c < ' ' || matches!(c, '\u{fffe}' | '\u{ffff}' | '\r') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn text_is_escaped_for_attributes_and_elements() {
        assert_eq!(
            escaped("a<b> & \"c\"\n'd'\u{1}"),
            "a&lt;b&gt; &amp; &quot;c&quot;&#10;&apos;d&apos;\u{fffd}"
        );
    }
}
