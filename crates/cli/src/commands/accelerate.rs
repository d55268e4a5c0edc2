//! `burgeon accelerate`: a cache on a fast device in front of slow block devices.

mod adopt;
mod change;
mod drained;
mod found;
mod histogram;
mod settings;
pub(crate) mod show;
mod table;

use std::{
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Result;
use burgeon_accelerate::{Mode, policy::PolicyKind};
use burgeon_accelerator::{
    control::{Attach, ControlRequest},
    dirty::refuse_elsewhere,
    disk::Disk,
    folder::{CacheFolder, check_name},
    probe,
    replace::{layout_of, new_id, settle},
};
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::refuse_accelerated;
use clap::{Args as ClapArgs, Subcommand, builder::PossibleValuesParser};
use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};
use serde_json::json;

use self::{
    found::{find, tell, text},
    settings::parse_cutoff,
};
use super::{Context, need_mount_privilege};
use crate::{output::bytes, quantities::parse_size, transport::Transport};

pub(crate) const EXAMPLES: &str = "\
Examples:
  burgeon accelerate create fast --cache /dev/nvme0n1p3
  burgeon accelerate attach fast /dev/sdb --mode write-back --name data
                                                         prints the device; also /dev/burgeon/data
  mount /dev/burgeon/data /srv
  burgeon accelerate status
  burgeon accelerate set data mode=write-through sequential-cutoff=off dirty-limit=20%
  burgeon accelerate flush data                          writes back its dirty blocks
  burgeon accelerate grow fast                           after its device became larger
  burgeon accelerate replace fast --cache /dev/nvme1n1   moves the cache, while its devices are used
  burgeon accelerate detach data                         after umount; /dev/sdb holds everything
  burgeon accelerate destroy fast

A slow device is cached in place, and mounts without the cache, too, once it is detached. While it is
attached, use the new device alone. In write-back, the newest content is in the cache alone for a while.";

#[derive(ClapArgs, Debug)]
pub(crate) struct Accelerate {
    #[command(subcommand)]
    pub(crate) command: AccelerateCommand,
}

/// The device of a cache that is made.
#[derive(ClapArgs, Debug)]
pub(crate) struct NewCache {
    /// A block device, or a file, which is made if --size is given
    #[arg(long, value_name = "DEVICE|FILE")]
    cache: PathBuf,
    /// Size of a new file
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Size of the log for write-back, 0 for none [default: a tenth of the cache, at most 16G]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    log_size: Option<u64>,
    /// Overwrite a file system, a partition table or another cache
    #[arg(long)]
    force: bool,
}

#[derive(Subcommand, Debug)]
pub(crate) enum AccelerateCommand {
    /// Make a cache on a device or file, and overwrite its content
    Create {
        /// The cache's name
        cache_name: String,
        #[command(flatten)]
        on: NewCache,
        /// With --force: overwrite the device even if it holds blocks that were not written back
        #[arg(long)]
        accept_loss: bool,
    },
    /// Take over a cache that another host has made, with its dirty blocks; nothing is overwritten
    Adopt {
        /// The cache's name on this host
        cache_name: String,
        /// The block device or file that has it
        #[arg(long, value_name = "DEVICE|FILE")]
        cache: PathBuf,
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
        /// write-through: writes go to the slow device and the cache; write-around: to the slow
        /// device alone; write-back: to the cache, and later to the slow device
        #[arg(long, default_value = "write-through",
            value_parser = PossibleValuesParser::new(Mode::ALL.map(|(_, name)| name)))]
        mode: String,
        /// Eviction policy of the whole cache [default: unchanged; adaptive for a new cache]
        #[arg(long, value_parser = PossibleValuesParser::new(PolicyKind::ALL.map(|(_, name)| name)))]
        policy: Option<String>,
        /// Let sequential requests bypass the cache from this length on; off for never
        #[arg(long, value_name = "SIZE|off", default_value = "4M", value_parser = parse_cutoff)]
        sequential_cutoff: u64,
        /// Keep cached content: nothing else has written to the slow device since it was detached
        #[arg(long)]
        trust_clean: bool,
        /// Give up the dirty blocks of another device of this name
        #[arg(long)]
        accept_loss: bool,
        /// The kernel's way to the new device
        #[arg(long, value_enum, default_value_t = Transport::Fuse)]
        transport: Transport,
    },
    /// Show all caches and their devices
    Status {
        /// A cache or a device, to show it alone
        name: Option<String>,
    },
    /// Show the counters of a device, or of all
    Stats {
        /// The device's name
        name: Option<String>,
    },
    /// Show the settings of a device, or of all
    Table {
        /// The device's name
        name: Option<String>,
    },
    /// Show how long reads, writes and flushes of a device took, and how large they were
    Histogram {
        /// The device's name [default: all]
        name: Option<String>,
    },
    /// Change settings: mode= and sequential-cutoff= of the device; of its whole cache policy=,
    /// dirty-limit=, dirty-age= and writeback-rate=
    Set {
        /// The device's name
        name: String,
        /// Such as mode=write-around
        #[arg(required = true, value_name = "SETTING=VALUE")]
        settings: Vec<String>,
    },
    /// Write the device's dirty blocks back, and make them durable
    Flush {
        /// The device's name
        name: String,
        /// Of a device that is not attached: nothing is served meanwhile
        #[arg(long)]
        offline: bool,
    },
    /// Compare each cached block of a device with the slow device
    Check {
        /// The device's name
        name: String,
    },
    /// Write back, and take the cache away from a device that is not mounted
    Detach {
        /// The device's name
        name: String,
        /// Leave dirty blocks in the cache: the device lacks them until it is attached again
        #[arg(long)]
        leave_dirty: bool,
    },
    /// Take the space of a device or file that has become larger
    Grow {
        /// The cache's name
        cache_name: String,
        /// Size that the file of the cache gets before
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        size: Option<u64>,
    },
    /// Write back, and move a cache to another device, also while its devices are used
    Replace {
        /// The cache's name
        cache_name: String,
        #[command(flatten)]
        on: NewCache,
    },
    /// Remove a cache that nothing is attached to
    Destroy {
        /// The cache's name
        cache_name: String,
        /// Give up blocks that were not written back
        #[arg(long)]
        accept_loss: bool,
    },
}

pub(super) fn accelerate(context: &Context, command: AccelerateCommand) -> Result<ExitCode> {
    need_mount_privilege("accelerate")?;
    match command {
        AccelerateCommand::Create { cache_name, on, accept_loss } => {
            create(context, &cache_name, &on, accept_loss)
        }
        AccelerateCommand::Adopt { cache_name, cache } => {
            adopt::adopt(context, &cache_name, &cache)
        }
        AccelerateCommand::Attach {
            cache_name,
            slow,
            name,
            mode,
            policy,
            sequential_cutoff: cutoff,
            trust_clean,
            accept_loss,
            transport,
        } => {
            let name = match name {
                Some(name) => name,
                None => slow.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            };
            let slow = std::path::absolute(slow)?;
            let transport = transport.into();
            let attach =
                Attach { slow, name, mode, cutoff, policy, trust_clean, accept_loss, transport };
            run_attach(context, &cache_name, attach)
        }
        AccelerateCommand::Status { name } => show::status(context, name.as_deref()),
        AccelerateCommand::Stats { name } => show::stats(context, name.as_deref()),
        AccelerateCommand::Table { name } => table::table(context, name.as_deref()),
        AccelerateCommand::Histogram { name } => histogram::histogram(context, name.as_deref()),
        AccelerateCommand::Set { name, settings } => settings::set(context, name, &settings),
        AccelerateCommand::Flush { name, offline: false } => drained::flush(context, name),
        AccelerateCommand::Flush { name, offline: true } => drained::flush_offline(context, &name),
        AccelerateCommand::Check { name } => check(context, &name),
        AccelerateCommand::Detach { name, leave_dirty } => {
            drained::detach(context, name, leave_dirty)
        }
        AccelerateCommand::Grow { cache_name, size } => change::grow(context, &cache_name, size),
        AccelerateCommand::Replace { cache_name, on } => change::replace(context, &cache_name, on),
        AccelerateCommand::Destroy { cache_name, accept_loss } => {
            destroy(context, &cache_name, accept_loss)
        }
    }
}

fn create(context: &Context, name: &str, on: &NewCache, accept_loss: bool) -> Result<ExitCode> {
    let folder = CacheFolder::of(context.state.root(), name)?;
    if folder.exists() {
        let what = format!(
            "cache {name} exists already: remove it with `burgeon accelerate destroy {name}`, or take \
             another name"
        );
        return Err(Error::new(ErrorKind::Invalid, what).into());
    }
    refuse_accelerated(context.state.root())?;
    let cache = std::path::absolute(&on.cache)?;
    make_file(&cache, on.size, on.log_size)?;
    let disk = Disk::open(&cache)?;
    let layout = layout_of(disk.size(), on.log_size)?;
    refuse_content(&disk, on.force)?;
    if !accept_loss {
        refuse_dirty(&disk, "create")?;
        // It may be a slow device that looks empty, because a cache has its content.
        refuse_elsewhere(&folder, "", &disk)?;
    }
    let id = new_id()?;
    burgeon_accelerate::create_with(&disk, layout, id)?;
    folder.record(&cache, id)?;
    let document = json!({ "name": name, "cache": cache, "size": disk.size() });
    tell(context, &document, |_| {
        println!("cache {name}: {} on {}", bytes(disk.size()), cache.display())
    })
}

/// Makes the file of a cache, if it is to have a size. True if it did.
fn make_file(cache: &Path, size: Option<u64>, log_size: Option<u64>) -> Result<bool, Error> {
    let Some(size) = size else { return Ok(false) };
    layout_of(size, log_size)?;
    let failed = |e| Error::io(format!("cannot make {}", cache.display()), e);
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(cache);
    let file = file.map_err(failed)?;
    // Its space is taken now: a cache that runs out of it later fails.
    let allocated = match fallocate(&file, FallocateFlags::empty(), 0, size) {
        Err(Errno::OPNOTSUPP) => file.set_len(size),
        done => done.map_err(Into::into),
    };
    allocated.inspect_err(|_| drop(fs::remove_file(cache))).map_err(failed)?;
    Ok(true)
}

/// `Invalid` if the device holds something whose format is known, unless that may be overwritten.
fn refuse_content(disk: &Disk, force: bool) -> Result<(), Error> {
    match probe::content(disk, disk.size())?.filter(|_| !force) {
        Some(found) => {
            let what = format!("{} holds {found}: --force overwrites it", disk.path().display());
            Err(Error::new(ErrorKind::Invalid, what))
        }
        None => Ok(()),
    }
}

/// `Unavailable` if the cache on `disk` has content that no slow device has, or may have.
fn refuse_dirty(disk: &Disk, verb: &str) -> Result<(), Error> {
    let dirty = match burgeon_accelerate::dirty_in(disk, disk.size()) {
        Ok(dirty) => dirty,
        // It holds no cache.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        // One of another version, or one that was cut off: its log is not known.
        Err(error) => {
            let what = format!(
                "{} may have content that no slow device has: {error}; `{verb} --accept-loss` gives it up",
                disk.path().display()
            );
            return Err(Error::with_source(error.kind(), what, error));
        }
    };
    let Some(first) = dirty.first() else { return Ok(()) };
    let what = format!(
        "{} has {} of {} that the slow device lacks: attach it, and detach it; or `{verb} --accept-loss` gives \
         them up",
        disk.path().display(),
        bytes(first.bytes()),
        first.name
    );
    Err(Error::new(ErrorKind::Unavailable, what))
}

fn run_attach(context: &Context, cache_name: &str, attach: Attach) -> Result<ExitCode> {
    check_name(&attach.name)?;
    let folder = CacheFolder::of(context.state.root(), cache_name)?;
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
    if !folder.is_served() {
        settle(&folder)?;
    }
    folder.start_supervisor()?;
    let done = folder.ask_supervisor(&ControlRequest::Attach(attach))?;
    if let Some(note) = done["note"].as_str() {
        eprintln!("note: {note}");
    }
    tell(context, &done, |done| println!("{}", text(&done["device"])))
}

/// Compares all blocks of a device, some at a time.
fn check(context: &Context, name: &str) -> Result<ExitCode> {
    let folder = find(context, name)?;
    let (mut compared, mut wrong, mut next) = (0, 0, Some(0));
    while let Some(from) = next {
        let done = folder.ask_server(&ControlRequest::Check { name: name.to_owned(), from })?;
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

fn destroy(context: &Context, name: &str, accept_loss: bool) -> Result<ExitCode> {
    let folder = CacheFolder::of(context.state.root(), name)?;
    let path = folder.cache()?;
    if folder.is_served() {
        let what = format!("the cache {name} has attached devices: detach them first");
        return Err(Error::new(ErrorKind::Unavailable, what).into());
    }
    folder.refuse_waiting()?;
    let known = folder.dirty();
    if let Some((dirty, _)) = known.first()
        && !accept_loss
    {
        let what = format!(
            "the cache {name} has newer content of the slow device {dirty}: attach it, and detach it; or \
             `destroy --accept-loss` gives it up"
        );
        return Err(Error::new(ErrorKind::Unavailable, what).into());
    }
    settle(&folder)?;
    match Disk::open(&path) {
        // The name of a device may be that of another one since a restart.
        Ok(disk) => match probe::content(&disk, disk.size())? {
            // One that cannot be read by its version is refused below.
            Some(probe::CACHE)
                if burgeon_accelerate::read_super(&disk, disk.size())
                    .is_ok_and(|read| !folder.is_its_cache(read.id)) =>
            {
                let shown = path.display();
                eprintln!(
                    "note: {shown} is another cache device now, and was left alone: only the record of {name} \
                     is removed"
                );
            }
            Some(probe::CACHE) => {
                if !accept_loss {
                    refuse_dirty(&disk, "destroy")?;
                }
                burgeon_accelerate::destroy(&disk)?;
            }
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
