//! `mount.burgeon`, the program that mount(8) runs for the type `burgeon`: this program, called by
//! another name.
//!
//! ```text
//!   mount -t burgeon debian:12 /mnt/a -o ro,_netdev      or a line of /etc/fstab, or a unit of systemd
//!     └► mount.burgeon debian:12 /mnt/a -o ro,_netdev
//!          options ─► arguments of `burgeon mount` ─► the same is mounted there? ─ yes ─► done
//!                                                        └ no ─► mounted, as by `burgeon mount`
//! ```
//! The kernel shows a mount as a btrfs on some device, so mount(8) does not see that a line of
//! /etc/fstab is mounted already: `mount -a` calls this program each time.
//!
//! Invariant (`tests/systemd.rs`): the target is not touched before the mount is moved onto it,
//! because an automount there waits for this very process.

mod options;
mod remount;

use std::{
    ffi::OsString,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::{ExitCode, exit},
    thread,
    time::Instant,
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::{Client, block_termination, log, protocol::Mounted};
use clap::{CommandFactory, Parser};

use self::options::Options;
use crate::{
    args::{Args, Command},
    commands::{
        Context, mount, mount_defaults,
        mount_point::Opened,
        need_mount_privilege,
        resume::{already, resume},
    },
    config::Config,
    exit::message,
    exit::{NotPermitted, Usage},
    namespace::Namespace,
};

/// The name by which mount(8) calls this program.
const NAME: &str = "mount.burgeon";

/// Exit codes of mount(8).
const USAGE: u8 = 1;
const SYSTEM: u8 = 2;
const BUG: u8 = 4;
const INTERRUPTED: u8 = 8;
const FAILED: u8 = 32;

const EXAMPLES: &str = "\
Examples:
  mount -t burgeon debian:12 /mnt/a -o writes=w,noatime
  debian:12                      /mnt/a  burgeon  _netdev,nofail,writes=w   0 0     in /etc/fstab
  oci://docker.io/library/nginx  /mnt/n  burgeon  _netdev,nofail,ro         0 0

Options of -o: the attributes of `burgeon mount -o`, and its other options without dashes, such as
  store=, state-dir=, writes=, write-limit=, profile=, fill

Exit codes:
  0  mounted, or the same was mounted there already
  1  invalid command line, or a privilege is missing
  2  system error: out of space, a local file cannot be read or written
  4  internal error
  8  interrupted
  32 mount failed";

/// Mount an image of Burgeon: called by mount(8) for the type burgeon
#[derive(Parser, Debug)]
#[command(name = NAME, version, after_help = EXAMPLES, max_term_width = 100)]
struct Line {
    /// The image, as for `burgeon mount`
    spec: String,
    /// The mount point, an empty directory
    dir: PathBuf,
    /// Ignore unknown options
    #[arg(short)]
    sloppy: bool,
    /// Check the options and the mount point, and mount nothing
    #[arg(short)]
    fake: bool,
    /// Accepted without effect: there is no mtab
    #[arg(short = 'n')]
    no_mtab: bool,
    /// Print what is done
    #[arg(short)]
    verbose: bool,
    /// Mount in this mount namespace: the number of a process, or a file
    #[arg(short = 'N', value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// The type, burgeon
    #[arg(short = 't', value_name = "TYPE")]
    kind: Option<String>,
    /// Options, separated by commas
    #[arg(short = 'o', value_name = "OPTION,…")]
    options: Vec<String>,
}

/// The helper's command line, for its man page.
pub(crate) fn command() -> clap::Command {
    Line::command()
}

/// True if the program was called as mount(8)'s helper.
pub(crate) fn is_called(arguments: &[OsString]) -> bool {
    let name = arguments.first().map(Path::new).and_then(Path::file_name);
    name.is_some_and(|name| name == NAME)
}

/// The main function of the helper.
pub(crate) fn main(arguments: &[OsString]) -> ExitCode {
    if let Ok(signals) = block_termination() {
        // The daemon unmounts a mount that nobody takes.
        thread::spawn(move || signals.wait().map(|_| exit(INTERRUPTED.into())));
    }
    let line = match Line::try_parse_from(arguments) {
        Ok(line) => line,
        Err(e) if !e.use_stderr() => e.exit(),
        Err(e) => {
            let _ = e.print();
            return ExitCode::from(USAGE);
        }
    };
    // The panic's message is on standard error by now.
    match catch_unwind(AssertUnwindSafe(|| call(line))) {
        Err(_) => ExitCode::from(BUG),
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(e)) => {
            eprintln!("{NAME}: {}", message(&e));
            ExitCode::from(code_of(&e))
        }
    }
}

fn code_of(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if cause.is::<Usage>() || cause.is::<NotPermitted>() {
            return USAGE;
        }
        if let Some(error) = cause.downcast_ref::<burgeon_block::Error>() {
            return match error.kind() {
                ErrorKind::LocalIo | ErrorKind::NoSpace => SYSTEM,
                _ => FAILED,
            };
        }
    }
    FAILED
}

fn call(line: Line) -> Result<()> {
    if let Some(kind) = line.kind.as_deref().filter(|kind| *kind != "burgeon") {
        return Err(Usage(format!("the type {kind} is not burgeon, which has no subtypes")).into());
    }
    let options = Options::parse(line.options.iter().map(String::as_str));
    match options.unknown.first() {
        Some(option) if !line.sloppy => {
            return Err(Usage(options::explain(&options, option)).into());
        }
        _ => {}
    }
    let args = arguments(&line, &options)?;
    let Command::Mount(mut mount) = args.command else {
        return Err(Usage("only a mount can be requested".to_owned()).into());
    };
    need_mount_privilege("mount -t burgeon")?;
    if let Some(level) = args.global.log_level {
        log::begin_at(level, log::LogOwner::Command);
    }
    if let Some(folder) = args.global.state_dir.as_ref().filter(|folder| !folder.exists()) {
        // A typing error in /etc/fstab would silently make another daemon with another store.
        eprintln!(
            "{NAME}: note: there is no state directory {}: it is made now; if that is a typing \
             error, unmount {}, and correct -o state-dir=",
            folder.display(),
            line.dir.display()
        );
    }
    let config = Config::load(args.global.config.as_deref())?;
    let context = Context::new(args.global, config, true, false)?;
    mount_defaults::apply(&context, &mut mount);
    if options.remount {
        if line.namespace.is_some() {
            let what = "-N and remount exclude each other: enter the namespace with nsenter(1)";
            return Err(Usage(what.to_owned()).into());
        }
        return remount::remount(&context, &mount, &options, line.fake, line.verbose);
    }
    let is_elsewhere = line.namespace.is_some();
    if is_elsewhere {
        // Another namespace has another working directory: its root.
        mount.path = std::path::absolute(&mount.path)
            .map_err(|e| Error::io(format!("cannot find {}", mount.path.display()), e))?;
    }
    let namespace = line.namespace.as_deref().map(Namespace::open).transpose()?;
    let opened = Opened::new(&mount.path, namespace)?;
    if already(&context, &mount, &opened)?.is_some() {
        if !line.fake && !is_elsewhere && Client::connect(&context.state)?.is_none() {
            resume(&context, &mount)?;
        }
        say(line.verbose, || format!("{} is mounted already", mount.path.display()));
        return Ok(());
    }
    if line.fake {
        let path = opened.path()?;
        opened.check()?;
        say(line.verbose, || format!("would mount {} at {}", mount.name, path.display()));
        return Ok(());
    }
    let wanted = mount.attributes.request()?;
    let begun = Instant::now();
    let (mounted, target) = mount::place_at(&context, mount, opened)?;
    let ms = begun.elapsed().as_millis() as u64;
    report(line.verbose, &mounted, || mount::describe(&mounted, &target, ms, wanted));
    Ok(())
}

/// The arguments of `burgeon` that do the same.
fn arguments(line: &Line, options: &Options) -> Result<Args> {
    let arguments = options.arguments();
    let words = ["burgeon", "mount"].into_iter().chain(arguments.iter().map(String::as_str));
    let words = words.chain(["--", &line.spec]).map(OsString::from);
    let words: Vec<_> = words.chain([line.dir.clone().into_os_string()]).collect();
    Args::parse_line(&words).map_err(|e| {
        // The first paragraph says what is wrong; the others are about `burgeon`.
        let text = e.to_string();
        let told = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
        Usage(told.replace("'--", "'-o ")).into()
    })
}

/// Prints a line with `-v`.
fn say(verbose: bool, line: impl FnOnce() -> String) {
    if verbose {
        println!("{NAME}: {}", line());
    }
}

/// Prints the mount's properties with `-v`, and otherwise its notes.
fn report(verbose: bool, mounted: &Mounted, describe: impl FnOnce()) {
    if verbose {
        return describe();
    }
    for note in &mounted.notes {
        eprintln!("{NAME}: note: {note}");
    }
}
