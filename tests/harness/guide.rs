//! A guide that is followed: its files are written, its commands run, its output compared.
//!
//! A fenced block `LANGUAGE PATH` is a file. In a `console` block a prompt (`$ `, or `HOST$ ` in a guide with several machines) begins a
//! command, and what follows is what it prints; a line `...` stands for any lines. There are no other blocks, so nothing in a guide goes
//! unchecked. What a [`Place`] calls unsteady is not compared. A serial number or a fingerprint differs from run to run, but where the
//! guide shows the same one twice it has to be the same here, and another one where it shows another.
//!
//! `LLMGW_UPDATE_DOCS=1` writes what was printed into the guides.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::Path;

/// From so many hexadecimal digits on a word is a serial number or a fingerprint.
const RANDOM_MIN_DIGITS: usize = 8;
/// What a guide has installed, and what is there instead: a fake that takes its command line.
pub const LLAMA_SERVER: &str = "/opt/llama.cpp/llama-server";
const LLAMA_SCRIPT: &str = r#"#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in
    --alias) alias=$2 ;;
    --host) host=$2 ;;
    --port) port=$2 ;;
  esac
  shift
done
echo "0.01.056.996 I srv          init: listening on http://$host:$port"
exec FAKE_ENGINE --kind llamacpp --model "$alias" --listen "$host:$port" --api-key "$LLAMA_API_KEY" >/dev/null
"#;

/// Where a guide is followed.
pub trait Place {
    fn write(&mut self, path: &str, text: &str);

    /// Runs a command at a prompt and returns what it printed. One that only looks may be run until `is_expected`.
    fn run(
        &mut self,
        prompt: &str,
        command: &str,
        is_expected: &dyn Fn(&[String]) -> bool,
    ) -> Vec<String>;

    /// A line without what differs from run to run.
    fn steady(command: &str, line: &str) -> String;
}

/// Which serial number or fingerprint of the guide is which one here, both ways.
#[derive(Clone, Default)]
struct Met(BTreeMap<String, String>);

/// Follows `docs/guides/NAME.md` from its beginning to its end.
pub fn follow<P: Place>(name: &str, place: &mut P) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/guides/{name}.md"));
    let text = std::fs::read_to_string(&path).unwrap();
    let update = std::env::var_os("LLMGW_UPDATE_DOCS").is_some();
    let mut met = Met::default();
    let mut written = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        written.push_str(line);
        written.push('\n');
        let Some(kind) = line.strip_prefix("```") else {
            continue;
        };
        let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        match kind.split_once(' ') {
            Some((_, path)) => {
                place.write(path, &(block.join("\n") + "\n"));
                written.extend(block.iter().map(|line| format!("{line}\n")));
            }
            None if kind == "console" => {
                written.push_str(&console(name, &block, place, &mut met, update));
            }
            None => panic!("{name}: a block `{kind}` is neither a file nor a console"),
        }
        written.push_str("```\n");
    }
    if update {
        std::fs::write(path, written).unwrap();
    }
}

/// Runs the commands of a block; returns the block as it was printed.
fn console<P: Place>(
    guide: &str,
    block: &[&str],
    place: &mut P,
    met: &mut Met,
    update: bool,
) -> String {
    let mut printed = String::new();
    let mut at = 0;
    while at < block.len() {
        let (prompt, command) =
            command(block[at]).unwrap_or_else(|| panic!("{guide}: `{}` is no command", block[at]));
        let end = (at + 1..block.len())
            .find(|next| self::command(block[*next]).is_some())
            .unwrap_or(block.len());
        let expected = &block[at + 1..end];
        let judge = |found: &[String]| matches::<P>(command, expected, found, met);
        let found = place.run(prompt, command, &|found| judge(found).is_some());
        let same = judge(&found);
        assert!(
            same.is_some() || update,
            "{guide}\n{}\n--- the guide says\n{}\n--- it printed\n{}",
            block[at],
            expected.join("\n"),
            found.join("\n")
        );
        printed.push_str(&format!("{}\n", block[at]));
        let keep = same.is_some() || expected.contains(&"...");
        for line in found.iter().filter(|_| !keep) {
            printed.push_str(&format!("{line}\n"));
        }
        for line in expected.iter().filter(|_| keep) {
            printed.push_str(&format!("{line}\n"));
        }
        *met = same.unwrap_or_else(|| met.clone());
        at = end;
    }
    printed
}

/// The prompt's host, empty where there is one machine only, and the command.
fn command(line: &str) -> Option<(&str, &str)> {
    let (prompt, command) = line.split_once("$ ")?;
    let is_host = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    prompt.bytes().all(is_host).then_some((prompt, command))
}

/// What was met by now if output is as expected, where `...` is any lines.
fn matches<P: Place>(command: &str, expected: &[&str], found: &[String], met: &Met) -> Option<Met> {
    let gap = expected.iter().position(|line| *line == "...");
    let until = gap.unwrap_or(expected.len());
    if found.len() < until || (gap.is_none() && found.len() > until) {
        return None;
    }
    let mut met = met.clone();
    for (expected, found) in expected[..until].iter().zip(found) {
        let expected = met.take_out(&P::steady(command, expected));
        let found = met.take_out(&P::steady(command, found));
        if expected.0 != found.0 || !met.pair(&expected.1, &found.1) {
            return None;
        }
    }
    match gap {
        None => Some(met),
        Some(gap) => (gap..=found.len())
            .find_map(|from| matches::<P>(command, &expected[gap + 1..], &found[from..], &met)),
    }
}

impl Met {
    /// A line with gaps for serial numbers and fingerprints, and those.
    fn take_out(&self, line: &str) -> (String, Vec<String>) {
        let mut rest = String::new();
        let mut random = Vec::new();
        let is_hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
        for word in line.split_inclusive(|c: char| !c.is_ascii_alphanumeric()) {
            let digits = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
            if digits.len() >= RANDOM_MIN_DIGITS && digits.chars().all(is_hex) {
                random.push(digits.to_owned());
                rest.push_str("<random>");
                rest.push_str(&word[digits.len()..]);
            } else {
                rest.push_str(word);
            }
        }
        (rest, random)
    }

    /// Whether these may be those of the guide, from now on.
    fn pair(&mut self, expected: &[String], found: &[String]) -> bool {
        expected.iter().zip(found).all(|(expected, found)| {
            let there = (format!("guide {expected}"), format!("here {found}"));
            let known = [self.0.get(&there.0), self.0.get(&there.1)];
            let is_same = match known {
                [None, None] => true,
                [Some(here), Some(guide)] => *here == there.1 && *guide == there.0,
                _ => false,
            };
            self.0.insert(there.0.clone(), there.1.clone());
            self.0.insert(there.1, there.0);
            is_same
        })
    }
}

/// A program that takes llama.cpp's command line and becomes the fake engine of this file.
pub fn llama_server(fake: &Path) -> String {
    LLAMA_SCRIPT.replace("FAKE_ENGINE", fake.to_str().unwrap())
}

/// How much a node has depends on it, and which ports are free.
pub fn of_the_machine(word: &str) -> &str {
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if let Some((free, all)) = word.split_once('/')
        && is_number(free)
        && is_number(all)
    {
        return "free/all";
    }
    let is_host = |text: &str| text.split('.').count() == 4 && text.split('.').all(is_number);
    match word.trim_start_matches("http://").split_once(':') {
        Some((host, port)) if is_host(host) && port.starts_with("21") => "an engine",
        _ => word,
    }
}
