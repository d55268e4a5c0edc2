//! The command line.

use std::{ffi::OsString, path::PathBuf};

use clap::{
    Args as ClapArgs, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum,
    parser::ValueSource,
};

use crate::{
    attributes::Attributes,
    commands::{accelerate, cache, config, disks, health, log, metrics, snapshotter},
    container_args::{self, Bundle, Run},
    data_args::{self, LetGo, Pin, Prefetch},
    global::{self, Global},
    pull,
    quantities::{parse_size, parse_virtual_size, parse_write_limit, parse_writes},
    transport::Transport,
    watch_args,
};

const EXAMPLES: &str = "\
Examples:
  burgeon build /srv/debian-12 debian:12       make an image of a directory
  burgeon mount debian:12 /mnt/a               mount it; writes are discarded at umount
  burgeon mount debian:12 /mnt/b --writes b    a second mount, whose writes are kept as \"b\"
  burgeon status                               show what is mounted and how it performs
  burgeon umount /mnt/b                        unmount it; plain `umount /mnt/b` works, too
  burgeon doctor                               check this machine, with a remedy for each problem

Exit codes:
  0  done
  1  failed, or `doctor` found something that stops Burgeon from working
  2  invalid command line
  3  the named object does not exist
  4  bytes are damaged, or of a format that this version does not know
  5  a store or the daemon cannot be reached, or something is in use
  6  no space
  7  a privilege is missing

Environment:
  BURGEON_STATE_DIR, BURGEON_STORE, BURGEON_CACHE_DIR, BURGEON_LOG, BURGEON_CONFIG
             as --state-dir, --store, --cache-dir, --log-level and --config";

/// Mount a file tree lazily: all names at once, each block when it is first read, verified,
/// cached and writable.
#[derive(Parser, Debug)]
#[command(name = "burgeon", version, after_help = EXAMPLES, max_term_width = 100)]
#[command(arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Args {
    /// Parses the command line, and remembers the options whose values are from the environment.
    pub(crate) fn parse_line(arguments: &[OsString]) -> Result<Self, clap::Error> {
        let mut matches =
            global::without_empty_variables(Self::command()).try_get_matches_from(arguments)?;
        let from_environment =
            |id: &&str| matches.value_source(id) == Some(ValueSource::EnvVariable);
        let variables =
            ["store", "state_dir", "cache_dir", "log_level"].into_iter().filter(from_environment);
        let variables = variables.collect();
        let args = Self::from_arg_matches_mut(&mut matches);
        let mut args = args.map_err(|e| e.format(&mut Self::command()))?;
        args.global.from_environment = variables;
        Ok(args)
    }
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Make an image from a directory or an archive
    #[command(
        allow_missing_positional = true,
        after_help = "\
Examples:
  burgeon build /srv/debian-12 debian:12
  burgeon build rootfs.tar.zst debian:12
  docker export c1 | burgeon build - app:7
  burgeon build oci://docker.io/debian:12 debian:12     or oci-layout:DIR:TAG, or https://host/rootfs.tar
  burgeon build --by-reference /dev/vg/data data     read a file, device or folder in place, copy nothing"
    )]
    Build(Build),
    /// Make the index of an OCI image, so that it can be read lazily from its layers
    #[command(after_help = "\
Examples:
  burgeon index oci-layout:DIR:TAG                    this host reads the image from there
  burgeon index oci-layout:DIR:TAG --push             publishes the index, and prints its digest
  burgeon index oci://registry.example/app:7 --push   the same in a registry
  burgeon mount oci-layout:DIR:TAG /mnt/o --index sha256:…    on any host, by that digest")]
    Index(Index),
    /// Mount an image; the mount is usable when the command returns
    #[command(after_help = "\
Examples:
  burgeon mount debian:12 /mnt/a                      writes are discarded at umount
  burgeon mount debian:12 /mnt/b --writes b           writes are kept, and found again by name
  burgeon mount debian:12 /mnt/c --read-only
  burgeon mount oci://docker.io/python:3.12 /mnt/p    an OCI image of a registry
  burgeon mount oci-layout:DIR:TAG /mnt/o             the same from a folder
  burgeon mount https://host/rootfs.tar /mnt/r
  burgeon mount debian:12 /mnt/d --writes d --write-limit 50G
  burgeon mount debian:12 /mnt/e --fill               also fetches everything in the background
  burgeon mount debian:12 /mnt/f --virtual 16P        with a virtual area for `burgeon map`")]
    Mount(Mount),
    /// Make an OCI runtime bundle of a mounted image, for runc, crun and others
    #[command(after_help = container_args::BUNDLE_EXAMPLES)]
    Bundle(Bundle),
    /// Run the program of an image in namespaces of its own, without a container runtime
    #[command(after_help = container_args::RUN_EXAMPLES)]
    Run(Run),
    /// Push an image to a registry, from where it can be mounted and pulled
    #[command(after_help = "\
Examples:
  burgeon push app:7 oci://registry.example/team/app:7
  burgeon mount oci://registry.example/team/app:7 /mnt/a")]
    Push(Push),
    /// Fetch the data that a mount of an image needs first, or all of the image
    #[command(after_help = "\
Examples:
  burgeon pull oci://registry.example/team/app:7             the next mount of it takes less time
  burgeon pull --eager oci://registry.example/team/app:7     all of it, as app:7 of the local store
  burgeon pull --eager app:7 --store s3://bucket/images --as app")]
    Pull(Pull),
    /// Mount an empty file system to map files and trees into
    #[command(after_help = "\
Examples:
  burgeon create-empty /mnt/x --writes x
  burgeon create-empty /mnt/x --writes x --virtual 4E")]
    CreateEmpty(CreateEmpty),
    /// Make a file or a tree of any size appear in a mount, without copying it
    #[command(after_help = "\
Examples:
  burgeon map /mnt/a/models/llama.bin --from /srv/llama.bin
  burgeon map /mnt/a/models --from /srv/models        a whole tree
  burgeon map /mnt/a/debian --from debian:12          an image of the store
  burgeon map /mnt/a/bin --from debian:12:/usr/bin
  burgeon map /mnt/a/pattern.bin --computed block-number --size 3T
  burgeon map --list /mnt/a

The mount needs a virtual area: burgeon mount --virtual SIZE")]
    Map(Map),
    /// Fetch files of a mount now, so that later reads are local
    #[command(after_help = "\
Examples:
  burgeon prefetch /mnt/a/usr/bin
  burgeon prefetch /mnt/a --rate 50M")]
    Prefetch(Prefetch),
    /// Run a command, and record which data of a mounted image it reads first
    #[command(after_help = "\
Examples:
  burgeon record /mnt/a -- chroot /mnt/a python3 -c 'import pandas'
  burgeon record /mnt/a -- timeout 10 chroot /mnt/a /usr/sbin/server
  burgeon mount app:7 /mnt/b                          prefetches that, in this order

`record` ends with the command's exit code.")]
    Record(Record),
    /// List, show or remove recorded profiles
    Profile(Profile),
    /// Fetch files now, and again whenever their cached data has been lost
    #[command(after_help = "\
Examples:
  burgeon pin /mnt/a/models/llama.bin
  burgeon pin --remove /mnt/a/models/llama.bin")]
    Pin(Pin),
    /// Copy all data of a mount to a plain file, so that it no longer needs a process of Burgeon
    #[command(after_help = data_args::LET_GO_EXAMPLES)]
    LetGo(LetGo),
    /// Unmount, and wait until all devices and files are released
    Umount(Umount),
    /// Write a mount's tree, or kept writes, as a tar archive
    #[command(after_help = "\
Examples:
  burgeon export /mnt/a -o a.tar                     the tree of a mount
  burgeon export --writes work -o work.tar           kept writes that are not mounted
  burgeon export /mnt/a | ssh host tar -x -C /srv/a --xattrs --xattrs-include='*' --acls

A file that changes while it is read is named, and the exit code is 1; the archive is complete
otherwise.")]
    Export(Export),
    /// Show each mount: how much of it is local, its speed and its errors
    Status,
    /// Show or change the host's cache, which all mounts share
    #[command(after_help = cache::EXAMPLES)]
    Cache(cache::Cache),
    /// List the images of the store
    #[command(alias = "ls")]
    List,
    /// Show the parts of an image
    Inspect(Inspect),
    /// Check every byte of an image in its store, and name damaged files
    Verify(Named),
    /// Remove an image; its data goes with the next `gc`
    Rm(Named),
    /// Remove data that no image, mount or writes need
    Gc(Gc),
    /// List or remove kept writes
    Writes(Writes),
    /// Put a cache on a fast device in front of slow block devices
    #[command(after_help = accelerate::EXAMPLES)]
    Accelerate(accelerate::Accelerate),
    /// Show how much this host's disks have read and written, and how worn they are
    #[command(after_help = disks::EXAMPLES)]
    Disks(disks::Disks),
    /// Export metrics for Prometheus: print them, serve them over HTTP, or keep a file of them
    #[command(after_help = metrics::EXAMPLES)]
    Metrics(metrics::Metrics),
    /// Serve snapshots to containerd, or show them
    #[command(after_help = snapshotter::EXAMPLES)]
    Snapshotter(snapshotter::Snapshots),
    /// Check or show the configuration of this host
    #[command(after_help = config::EXAMPLES)]
    Config(config::Config),
    /// Report by exit code whether every mount is served
    #[command(after_help = health::EXAMPLES)]
    Health(health::Health),
    /// Show or change the level and the format of the running daemon's log
    #[command(after_help = log::EXAMPLES)]
    Log(log::Log),
    /// Show which reads of a mount had to wait: when, how long, for which file and object
    #[command(after_help = watch_args::TRACE_EXAMPLES)]
    Trace(watch_args::Trace),
    /// Show rates, waits and the slowest files of all mounts on one screen
    #[command(after_help = watch_args::TOP_EXAMPLES)]
    Top(watch_args::Top),
    /// Check this machine: kernel, devices, privileges, limits, leftovers
    Doctor(watch_args::Doctor),
    /// Demonstrate Burgeon on a real tree, and clean up
    Demo(Demo),
    /// End the daemon
    Shutdown(Shutdown),
    /// Replace the running daemon's program with this one, while everything stays mounted
    Upgrade(Upgrade),
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Upgrade {
    /// Say whether this program can take over, and change nothing
    #[arg(long)]
    pub check: bool,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Export {
    /// A mount, or a folder in one
    #[arg(value_name = "MOUNT", conflicts_with = "writes")]
    pub(crate) path: Option<PathBuf>,
    /// Export the tree of these kept writes, which must not be mounted
    #[arg(long, value_name = "NAME", value_parser = parse_writes)]
    pub(crate) writes: Option<String>,
    /// The archive; - is standard output
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub(crate) output: PathBuf,
    /// Format of the archive
    #[arg(long, value_enum, default_value = "tar")]
    pub(crate) format: Format,
}

#[derive(ValueEnum, Clone, Copy, Debug)]
pub(crate) enum Format {
    /// POSIX tar (pax), for GNU tar, bsdtar and others
    Tar,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Build {
    /// A directory; a .tar, .tar.gz, .tar.zst or .tar.xz; - for an archive on standard input; an
    /// OCI image: oci://REGISTRY/REPOSITORY[:TAG|@DIGEST], oci-layout:DIR[:TAG]; or the URL of
    /// an archive
    #[arg(required_unless_present = "computed")]
    pub(crate) source: Option<PathBuf>,
    /// The image's name, such as debian:12
    pub(crate) name: String,
    /// Take the name even from an image that was pulled or that another host built; an image that
    /// this host built under the name is replaced without this option
    #[arg(long)]
    pub(crate) replace: bool,
    /// Checksum of each block
    #[arg(long, value_enum, default_value = "crc32c")]
    pub(crate) checksum: Checksum,
    /// zstd level, 1 to 19; up to 12 with parameters that are tuned for chunks
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(i32).range(1..=19))]
    pub(crate) level: i32,
    /// Describe a file, block device or directory in place, without copying it: it must not change
    /// while the image is used
    #[arg(long)]
    pub(crate) by_reference: bool,
    /// Store the data that this profile names together, in its order: the profile of an earlier
    /// image of a similar tree, or of a FILE. The new image gets the profile, too
    #[arg(long, value_name = "NAME|FILE", conflicts_with_all = ["by_reference", "computed"])]
    pub(crate) profile: Option<String>,
    /// Make an image of one file of computed bytes, for measurements
    #[arg(long, value_enum, conflicts_with_all = ["source", "by_reference"], requires = "size")]
    pub(crate) computed: Option<Computed>,
    /// Size of the computed file
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "computed")]
    pub(crate) size: Option<u64>,
}

#[derive(ValueEnum, Debug, Clone, Copy)]
pub(crate) enum Computed {
    /// Zeros
    Zeros,
    /// Bytes 0x5a
    Byte,
    /// Each block holds its own number
    BlockNumber,
}

#[derive(ValueEnum, Debug, Clone, Copy)]
pub(crate) enum Checksum {
    Crc32c,
    Xxhash64,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Index {
    /// The image: oci://REGISTRY/REPOSITORY[:TAG|@DIGEST] or oci-layout:DIR[:TAG|@DIGEST]
    pub(crate) source: String,
    /// Publish the index in the image's registry or layout, where other hosts find it
    #[arg(long)]
    pub(crate) push: bool,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Mount {
    /// The image: a name of the store; an OCI image, oci://REGISTRY/REPOSITORY[:TAG|@DIGEST] or
    /// oci-layout:DIR[:TAG]; or the URL of an archive
    pub(crate) name: String,
    /// An empty directory
    pub(crate) path: PathBuf,
    /// Read an OCI image lazily by its published index of this digest (`burgeon index --push`). The
    /// author of the index decides what the files hold: trust the digest first
    #[arg(long, value_name = "sha256:…")]
    pub(crate) index: Option<String>,
    /// Use no table of contents of an OCI image's publisher: read its layers as a whole unless it
    /// has an index here, and compare them with the digests in its configuration
    #[arg(long, conflicts_with = "index")]
    pub(crate) checked: bool,
    /// Policy for asking a registry, a remote store or the server of an archive for the current
    /// image [default: newer]
    #[arg(long, value_enum, value_name = "POLICY")]
    pub(crate) pull: Option<pull::Pull>,
    /// Keep writes under this name; a later mount with the same name restores them
    #[arg(long, value_name = "NAME", value_parser = parse_writes)]
    pub(crate) writes: Option<String>,
    /// Allow no writes
    #[arg(long, conflicts_with_all = ["writes", "write_limit", "thin", "reserve", "writes_device"])]
    pub(crate) read_only: bool,
    /// Limit of the writes, reserved step by step ahead of them [default: 10G, or a quarter of the
    /// free space]
    #[arg(long, value_name = "SIZE", value_parser = parse_write_limit)]
    pub(crate) write_limit: Option<u64>,
    /// Reserve the whole write limit at once: no write fails because the host is full, and one
    /// `fallocate` may use all of it
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[arg(value_name = "true|false", hide_possible_values = true)]
    pub(crate) reserve: Option<bool>,
    /// Accepted without effect: without --reserve, space is always reserved in steps
    #[arg(long, hide = true, conflicts_with = "reserve")]
    pub(crate) thin: bool,
    /// Write to this block device instead of a file; its earlier content is lost
    #[arg(long, value_name = "DEVICE", conflicts_with_all = ["write_limit", "thin", "reserve"])]
    pub(crate) writes_device: Option<PathBuf>,
    /// Fetch the whole image in the background
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[arg(value_name = "true|false", hide_possible_values = true)]
    pub(crate) fill: Option<bool>,
    /// Fetch all data, and let the mount go when it is here: `burgeon let-go`
    #[arg(long, conflicts_with = "virtual_size")]
    pub(crate) let_go: bool,
    /// Profile to prefetch: the image's recorded one (auto), none, or that in a FILE of
    /// `burgeon record --output` [default: auto]
    #[arg(long, value_name = "auto|none|FILE")]
    pub(crate) profile: Option<String>,
    /// Transport between the kernel and the data: ublk is faster, FUSE works on every kernel
    /// [default: auto]
    #[arg(long, value_enum)]
    pub(crate) transport: Option<Transport>,
    /// Over FUSE, receive requests over io_uring where the kernel allows it: faster, but when the
    /// serving process dies, reads fail until the next one serves
    #[arg(long)]
    pub(crate) fast: bool,
    /// Add a virtual area to map files into (`burgeon map`): takes no space, but kernel memory, 1.3
    /// KiB for each 256 TiB (without a size: 16P). With --writes, its size is fixed at the first
    /// mount
    #[arg(long = "virtual", value_name = "SIZE", value_parser = parse_virtual_size)]
    #[arg(num_args = 0..=1, default_missing_value = VIRTUAL_DEFAULT, conflicts_with = "read_only")]
    pub(crate) virtual_size: Option<u64>,
    /// Most bytes that the mount may fetch; reads beyond it fail with EIO
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) fetch_limit: Option<u64>,
    /// Also mount it at each boot: write and enable a unit of systemd (`burgeon umount --forget`)
    #[arg(long)]
    pub(crate) persist: bool,
    #[command(flatten)]
    pub(crate) attributes: Attributes,
}

/// Default size of a virtual area: 65 chunks, some 85 KiB of kernel memory, so a host with 100
/// mounts spends less than 10 MiB. 4 EiB would take 2 GiB there.
const VIRTUAL_DEFAULT: &str = "16P";
pub(crate) const VIRTUAL_DEFAULT_BYTES: u64 = 16 << 50;

#[derive(ClapArgs, Debug)]
pub(crate) struct CreateEmpty {
    /// An empty directory
    pub(crate) path: PathBuf,
    /// Keep mapped files and writes under this name; `burgeon mount` finds them again
    #[arg(long, value_name = "NAME", value_parser = parse_writes)]
    pub(crate) writes: String,
    /// Size of the virtual area [default: 16P; for kept writes, their own]
    #[arg(long = "virtual", value_name = "SIZE", value_parser = parse_virtual_size)]
    pub(crate) virtual_size: Option<u64>,
    /// Limit of the writes [default: 10G, or a quarter of the free space]
    #[arg(long, value_name = "SIZE", value_parser = parse_write_limit)]
    pub(crate) write_limit: Option<u64>,
    /// Reserve the whole write limit at once
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[arg(value_name = "true|false", hide_possible_values = true)]
    pub(crate) reserve: Option<bool>,
    /// Most bytes that the mount may fetch; reads beyond it fail with EIO
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) fetch_limit: Option<u64>,
}

#[derive(ClapArgs, Debug)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["from", "computed", "list"]))]
pub(crate) struct Map {
    /// The new path in a mount, which must not exist yet; with --list, the mount
    pub(crate) target: PathBuf,
    /// A local file or directory, which must stay unchanged and in place; or IMAGE[:PATH], an image
    /// of the store, or a file or folder in it
    #[arg(long, value_name = "PATH|IMAGE[:PATH]")]
    pub(crate) from: Option<PathBuf>,
    /// Make a file of computed bytes: zeros, block-number, or byte-XX with two hexadecimal digits
    #[arg(long, value_name = "NAME", requires = "size")]
    pub(crate) computed: Option<String>,
    /// Size of the computed file
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "computed")]
    pub(crate) size: Option<u64>,
    /// List the mappings of a mount
    #[arg(long)]
    pub(crate) list: bool,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Push {
    /// The image in the store
    pub(crate) name: String,
    /// The destination: oci://REGISTRY/REPOSITORY:TAG
    #[arg(value_name = "OCI-URL")]
    pub(crate) to: String,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Pull {
    /// The image: oci://REGISTRY/REPOSITORY[:TAG|@DIGEST], oci-layout:DIR[:TAG], or a name in the
    /// store of --store
    pub(crate) source: String,
    /// Fetch all data of the image, into the state directory's own store
    #[arg(long)]
    pub(crate) eager: bool,
    /// The image's name there [default: the end of the reference, as app:7 of
    /// oci://registry.example/team/app:7]
    #[arg(long = "as", value_name = "NAME", requires = "eager")]
    pub(crate) name: Option<String>,
    /// Take the name even from another image that has it
    #[arg(long, requires = "eager")]
    pub(crate) replace: bool,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Record {
    /// The mount point of the image
    pub(crate) path: PathBuf,
    /// Write the profile only to this file, for `mount --profile` and `build --profile`
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Profile {
    #[command(subcommand)]
    pub(crate) command: ProfileCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum ProfileCommand {
    /// List the images that have a profile
    List,
    /// Show files and ranges, in the order in which they are prefetched
    Show {
        /// The image, or a profile's file
        name: String,
    },
    /// Remove the profile of an image
    Rm {
        /// The image
        name: String,
    },
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Umount {
    /// Mount points
    #[arg(required = true)]
    pub(crate) paths: Vec<PathBuf>,
    /// Detach the mount even if it is in use; it is released when its last user has gone
    #[arg(long, short)]
    pub(crate) lazy: bool,
    /// Also disable and remove the unit of `burgeon mount --persist`
    #[arg(long)]
    pub(crate) forget: bool,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Inspect {
    /// The image
    pub(crate) name: String,
    /// List every file with its addresses and chunks
    #[arg(long)]
    pub(crate) map: bool,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Named {
    /// The image
    pub(crate) name: String,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Gc {
    /// Only print the objects that would be removed
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Writes {
    #[command(subcommand)]
    pub(crate) command: WritesCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum WritesCommand {
    /// List all kept writes
    List,
    /// Remove kept writes permanently
    Rm {
        /// Their name
        name: String,
    },
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Demo {
    /// The tree to demonstrate on
    #[arg(long, value_name = "DIR", default_value = "/usr")]
    pub(crate) tree: PathBuf,
    /// Demonstrate on a Debian root, made with debootstrap
    #[arg(long, conflicts_with = "tree")]
    pub(crate) debian: bool,
}

#[derive(ClapArgs, Debug)]
pub(crate) struct Shutdown {
    /// Unmount everything first; refused if a mount is in use
    #[arg(long, conflicts_with = "force")]
    pub(crate) unmount: bool,
    /// End the daemon even if mounts are in use: they are detached, and their reads of data that is
    /// not local fail
    #[arg(long)]
    pub(crate) force: bool,
}

#[cfg(test)]
#[path = "args_tests.rs"]
mod tests;
