//! Failure of a command: one sentence on standard error, and an exit code for the kind of failure.

use std::process::ExitCode;

use burgeon_block::ErrorKind;
use serde_json::json;

use crate::{output, redact};

/// A privilege is missing; the sentence names it.
#[derive(Debug)]
pub(crate) struct NotPermitted(pub(crate) String);

impl std::fmt::Display for NotPermitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotPermitted {}

/// Something is in use; the sentence names its users.
#[derive(Debug)]
pub(crate) struct Busy(pub(crate) String);

impl std::fmt::Display for Busy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Busy {}

/// The command line is invalid in a way that clap does not see; the sentence says what to type.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Reports the error and returns its exit code.
pub(crate) fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    say(error);
    if json {
        let _ = output::print_json(&json!({ "error": document(error) }));
    }
    code_of(error)
}

/// Prints the error on standard error.
pub(crate) fn say(error: &anyhow::Error) {
    eprintln!("burgeon: {}", message(error));
}

/// The error in JSON.
pub(crate) fn document(error: &anyhow::Error) -> serde_json::Value {
    json!({ "kind": classify(error).0, "message": message(error) })
}

/// The error's text. Users give URLs of stores where names belong, and errors name what they gave.
pub(crate) fn message(error: &anyhow::Error) -> String {
    redact::urls(&format!("{error:#}"))
}

/// The exit code of the error.
pub(crate) fn code_of(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(classify(error).1)
}

/// Prints the JSON document of an invalid command line; clap prints the rest on standard error.
pub(crate) fn report_usage(error: &clap::Error) {
    println!("{}", json!({ "error": { "kind": "usage", "message": error.to_string() } }));
}

fn classify(error: &anyhow::Error) -> (&'static str, u8) {
    for cause in error.chain() {
        if cause.is::<NotPermitted>() {
            return ("not-permitted", 7);
        }
        if cause.is::<Usage>() {
            return ("usage", 2);
        }
        if cause.is::<Busy>() {
            return ("busy", 5);
        }
        if let Some(error) = cause.downcast_ref::<burgeon_block::Error>() {
            return (error.kind().name(), code(error.kind()));
        }
    }
    ("failed", 1)
}

fn code(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Invalid | ErrorKind::LocalIo | ErrorKind::Unmapped | ErrorKind::OverLimit => 1,
        ErrorKind::NotFound => 3,
        ErrorKind::Corrupt | ErrorKind::UnsupportedFormat => 4,
        ErrorKind::Unavailable => 5,
        ErrorKind::NoSpace => 6,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use burgeon_block::{Error, ErrorKind};

    use super::{Busy, NotPermitted, Usage, classify};

    /// The documentation lists exactly these kinds, each in the row of its code.
    #[test]
    fn the_table_of_exit_codes_is_complete() {
        let kinds = [
            ErrorKind::Invalid,
            ErrorKind::NotFound,
            ErrorKind::Unavailable,
            ErrorKind::Corrupt,
            ErrorKind::NoSpace,
            ErrorKind::UnsupportedFormat,
            ErrorKind::LocalIo,
            ErrorKind::Unmapped,
            ErrorKind::OverLimit,
        ];
        let errors = kinds.map(|kind| anyhow::Error::new(Error::new(kind, "what")));
        let others = [
            NotPermitted(String::new()).into(),
            anyhow::Error::new(Busy(String::new())),
            Usage(String::new()).into(),
            anyhow::anyhow!("another"),
        ];
        let made = errors.iter().chain(&others).map(|error| {
            let (kind, code) = classify(error);
            (code, kind.to_owned())
        });
        let made: BTreeSet<_> = made.collect();
        let docs = include_str!("../../../docs/cli.md");
        let table = docs.split("## Exit codes").nth(1).unwrap().split("\n## ").next().unwrap();
        let mut told = BTreeSet::new();
        for row in table.lines().filter(|row| row.starts_with("| ")) {
            let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
            let Ok(code) = cells[0].parse::<u8>() else { continue };
            let kinds = cells[2].split(", ").filter(|kind| !kind.is_empty());
            told.extend(kinds.map(|kind| (code, kind.trim_matches('`').to_owned())));
        }
        assert_eq!(told, made);
    }
}
