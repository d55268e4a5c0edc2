//! The figures that the documents quote, measured beside other programs on this machine.
//!
//! ```text
//!   reads   4 KiB random reads of local data: ours ÷ peers, each in turn, round after round
//!   mounts  time to mount and list, by number of files and by bytes of data
//!   build   seconds and bytes: ours ÷ mksquashfs, mkfs.erofs
//!   memory  of the daemon's processes with idle mounts
//!   virtual mounts with a virtual area, and mapping trees into one
//!   disk    reads of cached data on a disk ÷ btrfs on a loop device on the same (only if asked for)
//!   let-go  by reflink ÷ by copy, and reads afterwards (only if asked for)
//!   start   cold starts of programs over a network (only if asked for: `make bench-start`)
//!   containers  pods beside overlayfs and stargz-snapshotter (only if asked for: `make bench-containers`)
//!   ublk    over ublk ÷ RAM disk, FUSE, rublk (only if asked for, in the lab: `make bench-ublk`);
//!           ublk-queues: numbers of queues and depths
//!   builds  this program ÷ another build of it (only if asked for: `make bench-static`)
//! ```
//!
//! Absolute figures say as much about the machine as about the program: what counts are ratios
//! of runs that took turns, and of those the median. Everything lies in memory (tmpfs), but for
//! the parts `disk` and `let-go`.
//!
//! ```text
//!   xtask bench ── waits for ──► sh, the first process of namespaces of its own
//!                                 └──► xtask bench, contained ──► burgeon, its daemon, peers
//! ```
//!
//! However the outer process ends, the shell is killed with it, with that its namespaces end, and
//! with those all processes, mounts and loop devices of the benchmark.

mod build;
mod builds;
mod burgeon;
mod containers;
mod disk;
mod let_go;
mod machine;
mod memory;
mod mounts;
mod peers;
mod reads;
mod start;
mod table;
mod trees;
mod ublk;
mod virtual_area;

use std::{
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use machine::{Folder, Mount, is_root, own_processes, private_mounts, scratch_path, tmpfs};
use table::Table;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The `burgeon` program to measure (built with --release).
    #[arg(long, default_value = "target/release/burgeon")]
    burgeon: PathBuf,
    /// Only these parts.
    #[arg(long, value_delimiter = ',', default_values = ["reads", "mounts", "build", "memory", "virtual"])]
    only: Vec<String>,
    /// Rounds of taking turns; the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds of each read run.
    #[arg(long, default_value_t = 2)]
    seconds: u32,
    /// Size of the file that is read at random, in MiB.
    #[arg(long, default_value_t = 1024)]
    file_mib: u64,
    /// Numbers of files of the images that are mounted.
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 100_000, 1_000_000])]
    files: Vec<u64>,
    /// Another build of the program, for the part `builds`.
    #[arg(long)]
    other: Option<PathBuf>,
    /// A folder on a disk, for the parts `disk` and `let-go`.
    #[arg(long, default_value = "target/tmp")]
    disk: PathBuf,
    /// The program `rublk`, for the part `ublk`; without it devices are not compared.
    #[arg(long)]
    rublk: Option<PathBuf>,
    /// The tree that images are built from; default: a Debian root that the tests have made
    /// (target/tmp), else /usr.
    #[arg(long)]
    tree: Option<PathBuf>,
    /// The Debian root whose programs are started; made with debootstrap if it is not there.
    #[arg(long, default_value = "target/tmp/start-bookworm")]
    start_tree: PathBuf,
    /// Only these programs, for the part `containers`: python3, node, java, postgres.
    #[arg(long, value_delimiter = ',')]
    programs: Vec<String>,
    /// Only these parts of the part `containers`.
    #[arg(long, value_delimiter = ',', default_values = ["starts", "write", "many"])]
    containers: Vec<String>,
    /// Number of pods of one image, for the part `containers`.
    #[arg(long, default_value_t = 100)]
    pods: usize,
    /// End with an error if an aim is missed.
    #[arg(long)]
    strict: bool,
}

/// The folder, the program and the options of all measurements.
pub(crate) struct Bench<'a> {
    options: &'a Options,
    program: PathBuf,
    tree: PathBuf,
    // Dropped in this order: unmounted, then removed.
    _memory: Mount,
    scratch: Folder,
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    ensure!(is_root(), "the benchmark mounts: run it as root");
    let Some(scratch) = std::env::var_os(SCRATCH) else { return contain() };
    let program = options.burgeon.canonicalize().with_context(|| {
        format!("{} is missing: cargo build --release --package burgeon", options.burgeon.display())
    })?;
    private_mounts()?;
    own_processes()?;
    let debian = root.join("target/tmp/debian-bookworm");
    let found = if debian.join("usr").exists() { debian } else { "/usr".into() };
    let tree = options.tree.clone().unwrap_or(found);
    let scratch = Folder::new(scratch.into())?;
    let memory = tmpfs(scratch.path())?;
    let bench = Bench { options, program, tree, _memory: memory, scratch };
    println!("{}", machine::description()?);
    let mut table = Table::default();
    for part in &options.only {
        eprintln!("measuring: {part}");
        let done = match part.as_str() {
            "reads" => reads::measure(&bench, &mut table),
            "mounts" => mounts::measure(&bench, &mut table),
            "build" => build::measure(&bench, &mut table),
            "memory" => memory::measure(&bench, &mut table),
            "virtual" => virtual_area::measure(&bench, &mut table),
            "start" => start::measure(&bench, &mut table),
            "containers" => containers::measure(&bench, &mut table),
            "builds" => builds::measure(&bench, &mut table),
            "disk" => disk::measure(&bench, &mut table),
            "let-go" => let_go::measure(&bench, &mut table),
            "ublk" => ublk::measure(&bench, &mut table),
            "ublk-queues" => ublk::measure_queues(&bench, &mut table),
            other => {
                anyhow::bail!(
                    "no part {other:?}: reads, mounts, build, memory, virtual, disk, let-go, \
                     start, containers, builds, ublk, ublk-queues"
                )
            }
        };
        done.with_context(|| format!("measuring {part}"))?;
    }
    println!("{table}");
    ensure!(!options.strict || table.missed() == 0, "{} aims are missed", table.missed());
    Ok(())
}

/// Tells the process that measures its folder.
const SCRATCH: &str = "BURGEON_BENCH_SCRATCH";

/// Runs this program once more, contained, and ends as that does.
fn contain() -> Result<()> {
    // SAFETY: only says where this process's children will be; there is one thread.
    let done = unsafe { libc::unshare(libc::CLONE_NEWPID) };
    ensure!(done == 0, "no namespace of processes: {}", std::io::Error::last_os_error());
    let mut command = Command::new("sh");
    // A shell, because somebody has to wait for daemons that have lost their parents.
    command.args(["-c", "\"$@\"; exit $?", "sh"]).arg(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).env(SCRATCH, scratch_path("burgeon-bench"));
    // SAFETY: one system call between fork and exec, which allocates nothing.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let status = command.status().context("cannot run sh")?;
    ensure!(status.success(), "the benchmark failed: {status}");
    Ok(())
}

impl Bench<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }
}

/// The middle value; the mean of the two middle ones of an even number.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
