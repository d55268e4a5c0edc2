//! The costs of an idle container, and of overlayfs: disk, memory, threads, devices, and the time
//! to make and remove it. `make bench-containers` runs it with 200 containers, and prints the
//! figures.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    time::{Duration, Instant},
};

use testkit::{Burgeon, PATIENCE, Registry, Space, loop_devices, wait_until};

use node::{Node, chain_of, push_estargz};

mod node;

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const MIB: u64 = 1 << 20;
/// Native containers take room of the disk, and beyond a tenth of it new ones are overlay.
const NATIVE_MAX: u64 = 16;

/// The resources that a host has given.
#[derive(Debug)]
struct Cost {
    /// Bytes of the file system of state and snapshots.
    disk: u64,
    /// Bytes of resident memory of all of Burgeon's processes.
    memory: u64,
    threads: u64,
    devices: u64,
}

impl Cost {
    fn now(space: &Space) -> Self {
        let folder = fs::File::open(space.folder()).unwrap();
        rustix::fs::syncfs(&folder).unwrap();
        // Of files here alone: others write to the same disk.
        let mut size = std::process::Command::new("du");
        let output = size.args(["-s", "-x", "-B1"]).arg(space.folder()).output().unwrap();
        let disk = String::from_utf8(output.stdout).unwrap();
        let mut cost = Self { disk: 0, memory: 0, threads: 0, devices: 0 };
        cost.disk = disk.split_whitespace().next().unwrap().parse().unwrap();
        for process in testkit::processes_with(space.folder()) {
            let program = fs::read_link(format!("/proc/{process}/exe")).unwrap_or_default();
            if !program.ends_with("burgeon") {
                continue;
            }
            let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
            let field = |name: &str| -> u64 {
                let line = status.lines().find_map(|line| line.strip_prefix(name));
                line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
            };
            cost.memory += field("VmRSS:") << 10;
            cost.threads += field("Threads:");
        }
        let own = |one: &testkit::LoopDevice| one.backing.starts_with(space.folder());
        cost.devices = loop_devices().iter().filter(|one| own(one)).count() as u64;
        cost
    }
}

/// The number of containers of each form.
fn count() -> u64 {
    std::env::var("CONTAINERS").ok().and_then(|text| text.parse().ok()).unwrap_or(8)
}

/// Makes, mounts and removes so many containers; returns the cost of all and the time of one: made
/// and removed, each by a process of `ctr`.
fn measure(
    node: &Node<'_>,
    (snapshotter, form): (&str, &str),
    chain: &str,
    count: u64,
) -> (Cost, [Duration; 2]) {
    let before = Cost::now(node.space);
    let name = |at: u64| format!("{form}-{at}");
    let begun = Instant::now();
    let mounted: Vec<_> =
        (0..count).map(|at| node.mounted(snapshotter, &name(at), chain)).collect();
    let made = begun.elapsed() / count as u32;
    let after = Cost::now(node.space);
    drop(mounted);
    let begun = Instant::now();
    for at in 0..count {
        node.ctr(&["snapshots", "--snapshotter", snapshotter, "rm", &name(at)]).unwrap();
    }
    let removed = begun.elapsed() / count as u32;
    let less = |after: u64, before: u64| after.saturating_sub(before);
    let cost = Cost {
        disk: less(after.disk, before.disk),
        memory: less(after.memory, before.memory),
        threads: less(after.threads, before.threads),
        devices: less(after.devices, before.devices),
    };
    println!(
        "| {form} | {count} | {:.2} | {:.2} | {:.2} | {:.2} | {} | {} |",
        cost.disk as f64 / (count * MIB) as f64,
        cost.memory as f64 / (count * MIB) as f64,
        cost.threads as f64 / count as f64,
        cost.devices as f64 / count as f64,
        made.as_millis(),
        removed.as_millis()
    );
    (cost, [made, removed])
}

#[test]
fn an_idle_container_takes_no_more_than_it_may() {
    let space = Space::new("density");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let image = format!("{}/app:1", registry.address());
    let pushed = push_estargz(&space, &image, "layer", None);
    let chain = chain_of(&pushed.diff_ids);
    let options = |form| ["--containers", form, "--trust", "*"];
    let mut node = Node::start(&space, &options("overlay"));
    println!(
        "| form | containers | MiB of disk | MiB of memory | threads | loop devices | ms to make | to remove |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    node.ctr(&["images", "pull", "--plain-http", "--snapshotter", "overlayfs", &image]).unwrap();
    measure(&node, ("overlayfs", "overlayfs"), &chain, count());
    node.namespace += "-lazy";
    node.pull(&image).unwrap();
    // The first one mounts the chain, for all of them.
    let first = node.mounted("burgeon", "first", &chain);
    let (cost, _) = measure(&node, ("burgeon", "overlay"), &chain, count());
    assert_eq!((cost.threads, cost.devices), (0, 0), "an overlay container takes neither");
    assert!(cost.disk < MIB * count(), "{cost:?}");
    drop(first);
    node.ctr(&["snapshots", "--snapshotter", "burgeon", "rm", "first"]).unwrap();
    node.serve(&options("native"));
    let natives = count().min(NATIVE_MAX);
    let disk = rustix::fs::statvfs(space.path("root")).unwrap();
    let free = disk.f_bavail * disk.f_frsize;
    let (cost, _) = measure(&node, ("burgeon", "native"), &chain, natives);
    assert!(cost.devices >= natives, "{cost:?}");
    // The reservation for their writes, which depends on the free space (docs/cli.md), and the rest
    // of a mount.
    let first = (free / 128).clamp(256 * MIB, 1024 * MIB);
    assert!(cost.disk <= (first + 4 * MIB) * natives, "{cost:?}");
    // All of it is given back.
    let chains = || space.path("root/chains").read_dir().unwrap().count();
    node.ctr(&["images", "rm", "--sync", &image]).unwrap();
    assert!(wait_until(PATIENCE, || chains() == 0), "{} chains", chains());
    let loops = || loop_devices().iter().any(|one| one.backing.starts_with(space.folder()));
    assert!(wait_until(PATIENCE, || !loops()), "{:?}", loop_devices());
    let writes = burgeon.ok(&["--json", "writes", "list"]);
    assert!(!writes.contains("snapshot-"), "{writes}");
}
