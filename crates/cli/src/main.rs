//! The `burgeon` command.
//!
//! ```text
//!   args ──► commands::<verb> ──► burgeon-image, burgeon-source      build, list, inspect, verify, …
//!                             ──► burgeon-daemon's client            mount, umount, status, …
//!                             ──► config                           settings that no option gives
//!        ──► helper::main                     called as mount.burgeon, by mount(8)
//!        ──► PROCESSES: __supervise, __serve, …, which re-run this program
//!            __probe: for tests, the remaining abilities of those
//!            __docs: for packages, man pages and completions
//! ```
//!
//! With `--json`, standard output carries exactly one JSON document, also when the command fails.

// First, because of its macros.
#[macro_use]
mod output;

mod args;
mod attributes;
mod commands;
mod config;
mod container_args;
mod data_args;
mod documents;
mod exit;
mod global;
mod helper;
mod holders;
mod namespace;
mod progress;
mod pull;
mod quantities;
mod redact;
mod transport;
mod watch_args;

use std::{ffi::OsString, path::Path, process::ExitCode};

use burgeon_container::run;
use burgeon_daemon::{
    log,
    roles::{self, ROLES},
};
use burgeon_source::registry::KUBELET_LOGIN;

/// The allocator of musl maps and unmaps every large buffer, and the kernel clears its pages: reads
/// of stored chunks took twice as long with it. `dist/build` says how much this one reserves.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The main function of a process.
type Main = fn(&[OsString]) -> ExitCode;

/// The process that all others of a daemon come from. It alone reads the configuration.
const SUPERVISE: &str = "__supervise";

/// The other processes that stay; the rest do one task.
const LASTING: [&str; 5] =
    ["__serve", "__open", "__hold", "__accelerate-supervise", "__accelerate-serve"];

/// The processes of a running system: verb, number of arguments, main function.
const PROCESSES: &[(&str, usize, Main)] = &[
    (SUPERVISE, 1, |arguments| burgeon_daemon::supervise(first(arguments))),
    ("__serve", 1, |arguments| burgeon_daemon::serve_forever(first(arguments))),
    ("__open", 1, |arguments| burgeon_daemon::open_files(first(arguments))),
    ("__hold", 1, |_| burgeon_daemon::hold()),
    ("__help", 1, |_| burgeon_daemon::help()),
    ("__prepare", 4, burgeon_daemon::prepare_process),
    ("__read", 0, commands::reading::process),
    (KUBELET_LOGIN, 0, |_| commands::kubelet::process()),
    ("__accelerate-supervise", 1, |arguments| {
        burgeon_accelerator::supervise_process(first(arguments))
    }),
    ("__accelerate-serve", 0, |_| burgeon_accelerator::serve_process()),
    ("__accelerate-loop", 3, burgeon_accelerator::loop_process),
    ("__accelerate-ublk", 2, burgeon_accelerator::ublk_process),
];

fn first(arguments: &[OsString]) -> &Path {
    arguments.first().map(Path::new).unwrap_or(Path::new(""))
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if helper::is_called(&arguments) {
        return helper::main(&arguments);
    }
    if let [_, verb, rest @ ..] = arguments.as_slice() {
        if verb.as_encoded_bytes().starts_with(b"__") {
            // Process lists would otherwise show `exe`, since the program is run by that link. If
            // it fails, only such lists look different.
            let _ = rustix::thread::set_name(c"burgeon");
            burgeon_daemon::forbid_core_dumps();
            match verb == SUPERVISE {
                true => config::begin_daemon(),
                false if LASTING.iter().any(|name| verb == name) => {
                    log::begin(log::LogOwner::Daemon);
                }
                false => log::begin(log::LogOwner::Task),
            }
        }
        let process = PROCESSES.iter().find(|(name, ..)| verb == name);
        if let Some((name, count, run)) = process {
            let is_option = |argument: &OsString| argument.as_encoded_bytes().starts_with(b"-");
            if rest.len() != *count || rest.iter().any(is_option) {
                return internal(name);
            }
            return run(rest);
        }
        if verb == "__probe" {
            return probe(rest);
        }
        if verb == run::CONTAIN {
            return run::contain(rest);
        }
        if verb == run::INIT {
            return run::init(rest);
        }
        if verb == "__docs" {
            return documents::process(rest);
        }
    }
    let args = match args::Args::parse_line(&arguments) {
        Ok(args) => args,
        Err(e) => {
            if e.use_stderr() && arguments.iter().any(|argument| argument == "--json") {
                exit::report_usage(&e);
            }
            if let Some((option, variable)) = global::blamed_variable(&e, &arguments) {
                eprintln!("note: {option} is taken from the environment variable {variable}");
            }
            // Help is lost on a full disk, as any output.
            if let Err(refused) = e.print()
                && !e.use_stderr()
            {
                output::note(Err(refused));
            }
            let code = ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
            return complete(code);
        }
    };
    if let Some(level) = args.global.log_level {
        log::begin_at(level, log::LogOwner::Command);
    }
    let json = args.global.json;
    complete(commands::run(args).unwrap_or_else(|e| exit::report(&e, json)))
}

/// The exit code of a command that has printed its output, or could not.
fn complete(code: ExitCode) -> ExitCode {
    match output::refused() {
        Some(e) if code == ExitCode::SUCCESS => {
            let e = e.into();
            exit::say(&e);
            exit::code_of(&e)
        }
        _ => code,
    }
}

/// The end of an internal verb that a person has typed, perhaps with `--help`: it starts nothing.
fn internal(verb: &str) -> ExitCode {
    eprintln!(
        "burgeon: {verb} is internal: the daemon and the commands start it themselves; see `burgeon --help`"
    );
    ExitCode::from(2)
}

/// `burgeon __probe ROLE FOLDER [PART…]`, for tests: prints the remaining rights of the role, and
/// the parts of the folder in which it can make a file, a line each. `burgeon __probe` prints all
/// processes with their roles.
fn probe(arguments: &[OsString]) -> ExitCode {
    let [role, folder, parts @ ..] = arguments else {
        if !arguments.is_empty() {
            return internal("__probe");
        }
        for (process, ..) in PROCESSES {
            let roles = ROLES.iter().filter(|role| role.process == *process);
            let names: Vec<_> = roles.map(|role| role.name).collect();
            println!("{process}: {}", names.join(", "));
        }
        return ExitCode::SUCCESS;
    };
    match roles::probe(&role.to_string_lossy(), folder.as_ref(), parts) {
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
