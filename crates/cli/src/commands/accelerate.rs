//! `burgeon accelerate`: a cache on a fast device in front of slow block devices.

use std::{
    fs::OpenOptions,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Result;
use burgeon_accelerate::{Mode, format::Layout, policy::Kind};
use burgeon_accelerator::{
    control::{Ask, Attach, MODES, Set},
    disk::Disk,
    folder::{Folder, check_name},
    probe,
};
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::refuse_accelerated;
use clap::{Args as ClapArgs, Subcommand, builder::PossibleValuesParser};
use serde_json::{Value, json};

use super::{Context, need_mount_privilege};
use crate::{
    exit::Usage,
    output::{self, bytes},
    quantities::parse_size,
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  burgeon accelerate create fast --cache /dev/nvme0n1p3
  burgeon accelerate attach fast /dev/sdb --name data    prints the device; also /dev/burgeon/data
  mount /dev/burgeon/data /srv
  burgeon accelerate status
  burgeon accelerate set data mode=write-around sequential-cutoff=off
  burgeon accelerate detach data                         after umount; /dev/sdb holds everything
  burgeon accelerate destroy fast

A slow device is cached in place: nothing on it changes, and it mounts without the cache, too. While
it is attached, use the new device alone.";

#[derive(ClapArgs, Debug)]
pub(crate) struct Accelerate {
    #[command(subcommand)]
    pub(crate) command: AccelerateCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum AccelerateCommand {
    /// Make a cache on a device or file, and overwrite its content
    Create {
        /// The cache's name
        cache_name: String,
        /// A block device, or a file, which is made if --size is given
        #[arg(long, value_name = "DEVICE|FILE")]
        cache: PathBuf,
        /// Size of a new file
        #[arg(long, value_parser = parse_size)]
        size: Option<u64>,
        /// Overwrite a file system, a partition table or another cache
        #[arg(long)]
        force: bool,
    },
    /// Put a cache in front of a slow device, and print the device to use instead
    Attach {
        /// The cache's name
        cache_name: String,
        /// The slow device, or a file
        slow: PathBuf,
        /// Name of the new device, also in /dev/burgeon [default: the file name of SLOW]
        #[arg(long)]
        name: Option<String>,
        /// Writes go to the slow device; then write-through updates the cache, and write-around
        /// drops the blocks from it
        #[arg(long, default_value = "write-through",
            value_parser = PossibleValuesParser::new(MODES.map(Mode::name)))]
        mode: String,
        /// The blocks that the cache keeps; of all its devices [default: as before, at first
        /// adaptive]
        #[arg(long, value_parser = PossibleValuesParser::new(Kind::ALL.map(|(_, name)| name)))]
        policy: Option<String>,
        /// Let sequential requests bypass the cache from this length on; off for never
        #[arg(long, default_value = "4M", value_parser = parse_cutoff)]
        sequential_cutoff: u64,
        /// Keep cached content: nothing else has written to the slow device since it was detached
        #[arg(long)]
        trust_clean: bool,
    },
    /// Show all caches and their devices
    Status,
    /// Show the counters of a device, or of all
    Stats {
        /// The device's name
        name: Option<String>,
    },
    /// Change settings of a device: mode=, policy=, sequential-cutoff=
    Set {
        /// The device's name
        name: String,
        /// Such as mode=write-around
        #[arg(required = true, value_name = "SETTING=VALUE")]
        settings: Vec<String>,
    },
    /// Make all writes of a device durable, and store the cache's index
    Flush {
        /// The device's name
        name: String,
    },
    /// Compare each cached block of a device with the slow device
    Check {
        /// The device's name
        name: String,
    },
    /// Take the cache away from a device that is not mounted
    Detach {
        /// The device's name
        name: String,
    },
    /// Remove a cache that nothing is attached to
    Destroy {
        /// The cache's name
        cache_name: String,
    },
}

/// A length, or `off`.
fn parse_cutoff(text: &str) -> Result<u64, String> {
    match text {
        "0" | "off" => Ok(0),
        size => parse_size(size),
    }
}

pub(super) fn accelerate(context: &Context, command: AccelerateCommand) -> Result<ExitCode> {
    need_mount_privilege("accelerate")?;
    match command {
        AccelerateCommand::Create { cache_name, cache, size, force } => {
            create(context, &cache_name, &cache, size, force)
        }
        AccelerateCommand::Attach {
            cache_name,
            slow,
            name,
            mode,
            policy,
            sequential_cutoff: cutoff,
            trust_clean,
        } => {
            let name = match name {
                Some(name) => name,
                None => slow.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            };
            let slow = std::path::absolute(slow)?;
            let attach = Attach { slow, name, mode, cutoff, policy, trust_clean };
            run_attach(context, &cache_name, attach)
        }
        AccelerateCommand::Status => status(context),
        AccelerateCommand::Stats { name } => stats(context, name.as_deref()),
        AccelerateCommand::Set { name, settings } => set(context, name, &settings),
        AccelerateCommand::Flush { name } => {
            let done = find(context, &name)?.ask_server(&Ask::Flush { name })?;
            tell(context, &done, |done| {
                println!("{} is durable", text(&done["name"]));
            })
        }
        AccelerateCommand::Check { name } => check(context, &name),
        AccelerateCommand::Detach { name } => {
            let done = find(context, &name)?.ask_supervisor(&Ask::Detach { name })?;
            tell(context, &done, |done| {
                println!("{} is detached", text(&done["name"]));
            })
        }
        AccelerateCommand::Destroy { cache_name } => destroy(context, &cache_name),
    }
}

/// The text of a string in a document.
fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn tell(context: &Context, document: &Value, say: impl FnOnce(&Value)) -> Result<ExitCode> {
    match context.json {
        true => output::print_json(document)?,
        false => say(document),
    }
    Ok(ExitCode::SUCCESS)
}

fn create(
    context: &Context,
    name: &str,
    cache: &Path,
    size: Option<u64>,
    force: bool,
) -> Result<ExitCode> {
    let folder = Folder::of(context.state.root(), name)?;
    if folder.exists() {
        let what = format!("there is a cache {name} already: `burgeon accelerate destroy {name}`");
        return Err(Error::new(ErrorKind::Invalid, what).into());
    }
    refuse_accelerated(context.state.root())?;
    let cache = std::path::absolute(cache)?;
    if let Some(size) = size {
        layout_of(size)?;
        let failed = |e| Error::io(format!("cannot make {}", cache.display()), e);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&cache);
        file.and_then(|file| file.set_len(size)).map_err(failed)?;
    }
    let disk = Disk::open(&cache)?;
    let layout = layout_of(disk.size())?;
    if let Some(found) = probe::content(&disk, disk.size())?
        && !force
    {
        let what = format!("{} holds {found}: --force overwrites it", cache.display());
        return Err(Error::new(ErrorKind::Invalid, what).into());
    }
    let mut id = [0; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("cannot get random bytes", e.into()))?;
    burgeon_accelerate::create_with(&disk, layout, id)?;
    folder.record(&cache)?;
    let document = json!({ "name": name, "cache": cache, "size": disk.size() });
    tell(context, &document, |_| {
        println!("cache {name}: {} on {}", bytes(disk.size()), cache.display())
    })
}

/// Without a log, as long as no mode that is served writes to one.
fn layout_of(size: u64) -> Result<Layout, Error> {
    Layout::with_log(size, 0)
}

fn run_attach(context: &Context, cache_name: &str, attach: Attach) -> Result<ExitCode> {
    check_name(&attach.name)?;
    let folder = Folder::of(context.state.root(), cache_name)?;
    folder.cache()?;
    refuse_accelerated(context.state.root())?;
    match find(context, &attach.name) {
        Ok(other) => {
            let what =
                format!("a device {} is attached to the cache {}", attach.name, other.name());
            return Err(Error::new(ErrorKind::Invalid, what).into());
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    // Said here before anything starts; the supervisor opens it again, for good.
    drop(Disk::open(&attach.slow)?);
    folder.start_supervisor()?;
    let done = folder.ask_supervisor(&Ask::Attach(attach))?;
    tell(context, &done, |done| println!("{}", text(&done["device"])))
}

/// The cache with an attached device `name`.
fn find(context: &Context, name: &str) -> Result<Folder, Error> {
    let mut silent = None;
    for folder in Folder::all(context.state.root()) {
        match folder.ask_server(&Ask::Status) {
            Ok(status) => {
                let mut devices = status["devices"].as_array().into_iter().flatten();
                if devices.any(|device| text(&device["name"]) == name) {
                    return Ok(folder);
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            // It may have the device, unless another cache has.
            Err(error) => silent = Some(error),
        }
    }
    Err(silent.unwrap_or_else(|| {
        let what = format!("no device {name} is attached: `burgeon accelerate status` lists them");
        Error::new(ErrorKind::NotFound, what)
    }))
}

/// A document for each cache.
fn documents(context: &Context) -> Result<Vec<Value>> {
    let mut caches = Vec::new();
    for folder in Folder::all(context.state.root()) {
        let mut document = match folder.ask_server(&Ask::Status) {
            Ok(document) => document,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                json!({ "cache": folder.cache()?, "state": "idle", "devices": [] })
            }
            Err(error) => json!({
                "cache": folder.cache()?,
                "state": "unreachable",
                "error": error.to_string(),
                "devices": [],
            }),
        };
        document["name"] = folder.name().into();
        caches.push(document);
    }
    Ok(caches)
}

fn status(context: &Context) -> Result<ExitCode> {
    let caches = documents(context)?;
    tell(context, &json!({ "caches": caches }), |_| {
        if caches.is_empty() {
            println!("no caches");
        }
        for cache in &caches {
            let blocks = |key: &str| cache[key].as_u64().unwrap_or(0) * 4096;
            let used = match cache["blocks"].is_null() {
                true => String::new(),
                false => format!(
                    ", {} of {} used, {}",
                    bytes(blocks("used_blocks")),
                    bytes(blocks("blocks")),
                    text(&cache["policy"])
                ),
            };
            println!(
                "{} on {}: {}{used}",
                text(&cache["name"]),
                text(&cache["cache"]),
                text(&cache["state"])
            );
            for device in cache["devices"].as_array().into_iter().flatten() {
                let count = |key: &str| device["counters"][key].as_u64().unwrap_or(0);
                let hits = count("cache_hit_bytes") + count("memory_hit_bytes");
                let read = hits + count("miss_bytes");
                let ratio = match read {
                    0 => "nothing read".to_owned(),
                    read => format!("{:.1} % hits", 100.0 * hits as f64 / read as f64),
                };
                let failed = device["flush_failed"] == true;
                println!(
                    "  {} on {}: {}, {ratio}{}",
                    text(&device["name"]),
                    text(&device["slow"]),
                    text(&device["mode"]),
                    if failed { ", A FLUSH FAILED: nothing is written any more" } else { "" }
                );
            }
        }
    })
}

fn stats(context: &Context, name: Option<&str>) -> Result<ExitCode> {
    let caches = documents(context)?;
    let devices = caches.iter().flat_map(|cache| cache["devices"].as_array().into_iter().flatten());
    let chosen: Vec<&Value> =
        devices.filter(|device| name.is_none_or(|name| text(&device["name"]) == name)).collect();
    if let (Some(name), true) = (name, chosen.is_empty()) {
        find(context, name)?;
    }
    let document =
        |device: &&Value| json!({ "name": device["name"], "counters": device["counters"] });
    let devices: Vec<_> = chosen.iter().map(document).collect();
    tell(context, &json!({ "devices": devices }), |_| {
        for device in &chosen {
            println!("{}", text(&device["name"]));
            for (name, count) in device["counters"].as_object().into_iter().flatten() {
                println!("  {:<20} {count}", name.replace('_', " "));
            }
        }
    })
}

fn set(context: &Context, name: String, settings: &[String]) -> Result<ExitCode> {
    let (mut mode, mut policy, mut cutoff) = (None, None, None);
    for setting in settings {
        match setting.split_once('=') {
            Some(("mode", value)) => mode = Some(value.to_owned()),
            Some(("policy", value)) => policy = Some(value.to_owned()),
            Some(("sequential-cutoff", value)) => {
                cutoff = Some(parse_cutoff(value).map_err(Usage)?)
            }
            _ => {
                let known = "mode=, policy=, sequential-cutoff=";
                return Err(Usage(format!("unknown setting {setting:?}: there are {known}")).into());
            }
        }
    }
    let folder = find(context, &name)?;
    let set = Ask::Set(Set { name, mode, policy, cutoff });
    // First the supervisor: a server that starts in between has the settings of it.
    match folder.ask_supervisor(&set) {
        // A server without a supervisor has no successor.
        Err(error) if error.kind() == ErrorKind::Unavailable => {}
        remembered => drop(remembered?),
    }
    let done = folder.ask_server(&set)?;
    tell(context, &done, |_| ())
}

/// Compares all blocks of a device, some at a time.
fn check(context: &Context, name: &str) -> Result<ExitCode> {
    let folder = find(context, name)?;
    let (mut compared, mut wrong, mut next) = (0, 0, Some(0));
    while let Some(from) = next {
        let done = folder.ask_server(&Ask::Check { name: name.to_owned(), from })?;
        compared += done["compared_blocks"].as_u64().unwrap_or(0);
        wrong += done["wrong_blocks"].as_u64().unwrap_or(0);
        next = done["next"].as_u64().and_then(|next| u32::try_from(next).ok());
        if next.is_some_and(|next| next <= from) {
            let what = format!("the server of {name} does not go on with the check: try again");
            return Err(Error::new(ErrorKind::Unavailable, what).into());
        }
    }
    let done = json!({ "name": name, "compared_blocks": compared, "wrong_blocks": wrong });
    tell(context, &done, |_| println!("{compared} blocks compared, {wrong} wrong"))?;
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::from(4) })
}

/// True if a cache may have data in a log.
fn has_log(disk: &Disk) -> bool {
    let head = burgeon_accelerate::read_super(disk, disk.size());
    head.is_ok_and(|head| head.layout.log_blocks != 0)
}

fn destroy(context: &Context, name: &str) -> Result<ExitCode> {
    let folder = Folder::of(context.state.root(), name)?;
    let path = folder.cache()?;
    if folder.is_served() {
        let what = format!("the cache {name} has attached devices: detach them first");
        return Err(Error::new(ErrorKind::Unavailable, what).into());
    }
    match Disk::open(&path) {
        // The name of a device may be that of another one since a restart.
        Ok(disk) => match probe::content(&disk, disk.size())? {
            Some(probe::CACHE) if has_log(&disk) => {
                let what = format!(
                    "{} has a log for write-back, perhaps with data that no other device has: destroy it with the \
                     version of Burgeon that made it",
                    path.display()
                );
                return Err(Error::new(ErrorKind::UnsupportedFormat, what).into());
            }
            Some(probe::CACHE) => burgeon_accelerate::destroy(&disk)?,
            other => {
                let (shown, other) = (path.display(), other.unwrap_or("no cache of Burgeon"));
                eprintln!(
                    "note: {shown} now has {other}, and was left alone: only the record of {name} is removed"
                );
            }
        },
        // The device is gone; its record goes, too.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    folder.remove()?;
    tell(context, &json!({ "name": name }), |_| println!("cache {name} is gone"))
}
