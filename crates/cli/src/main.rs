//! The `burgeon` command.
//!
//! ```text
//!   args ──► commands::<verb> ──► burgeon-image, burgeon-source      build, list, inspect, verify, …
//!                             ──► burgeon-daemon's client            mount, umount, status, …
//!        ──► __supervise, __serve, __hold, __help, __prepare, __read: its processes, which re-run this program
//!            __probe: for tests, what those can still do
//! ```
//!
//! With `--json`, standard output carries exactly one JSON document, also when the command fails.

// First, because of its macros.
#[macro_use]
mod output;

mod args;
mod attributes;
mod commands;
mod demo;
mod exit;
mod holders;
mod progress;
mod pull;
mod quantities;

use std::{path::Path, process::ExitCode};

use clap::Parser;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if let [_, verb, rest @ ..] = arguments.as_slice() {
        if verb.as_encoded_bytes().starts_with(b"__") {
            // Process lists would otherwise show `exe`, since the program is run by that link. If
            // it fails, only such lists look different.
            let _ = rustix::thread::set_name(c"burgeon");
            burgeon_daemon::log::begin();
        }
        let path = rest.first().map(Path::new).unwrap_or(Path::new(""));
        match verb.to_str() {
            Some("__supervise") => return burgeon_daemon::supervise(path),
            Some("__serve") => return burgeon_daemon::serve_forever(path),
            Some("__hold") => return burgeon_daemon::hold(),
            Some("__help") => return burgeon_daemon::help(),
            Some("__prepare") => return burgeon_daemon::prepare_process(rest),
            Some("__read") => return commands::reading::process(rest),
            Some("__probe") => return probe(rest),
            _ => {}
        }
    }
    let args = match args::Args::try_parse_from(&arguments) {
        Ok(args) => args,
        Err(e) => {
            if e.use_stderr() && arguments.iter().any(|argument| argument == "--json") {
                exit::report_usage(&e);
            }
            e.exit()
        }
    };
    if let Some(level) = args.global.log_level {
        burgeon_daemon::log::begin_at(level);
    }
    let json = args.global.json;
    let code = commands::run(args).unwrap_or_else(|e| exit::report(&e, json));
    match output::refused() {
        Some(e) if code == ExitCode::SUCCESS => {
            let e = e.into();
            exit::say(&e);
            exit::code_of(&e)
        }
        _ => code,
    }
}

/// `burgeon __probe ROLE FOLDER`, for tests: prints the remaining rights of the role, a line each.
fn probe(arguments: &[std::ffi::OsString]) -> ExitCode {
    let [role, folder] = arguments else { return ExitCode::from(2) };
    match burgeon_daemon::roles::probe(&role.to_string_lossy(), folder.as_ref()) {
        Ok(can) => {
            can.iter().for_each(|what| println!("{what}"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("burgeon: {error}");
            ExitCode::FAILURE
        }
    }
}
