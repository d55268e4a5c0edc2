//! 4 KiB random reads of cached data where the cache lies on a disk, beside btrfs on a loop device
//! on a file of the same disk.
//!
//! Direct I/O on both sides, so that the disk answers each read. Over FUSE, and over what else this
//! kernel has: FUSE's rings, ublk (`make bench-ublk`).

use std::{fs, process};

use anyhow::Result;

use super::{
    Bench,
    burgeon::Burgeon,
    machine::Folder,
    peers,
    reads::{FILE, Target, Way, materialise, random_file, ratios, take_turns},
    table::{Aim, Table},
    ublk::load_driver,
};

/// Against a device without a server.
const AIM: f64 = 0.8;

const WAYS: [Way; 3] = [
    Way { name: "depth 1", options: &["--ioengine=psync", "--direct=1", "--time_based"], aim: AIM },
    Way {
        name: "depth 16",
        options: &["--ioengine=io_uring", "--direct=1", "--time_based", "--iodepth=16"],
        aim: AIM,
    },
    Way {
        name: "depth 64",
        options: &["--ioengine=io_uring", "--direct=1", "--time_based", "--iodepth=64"],
        aim: AIM,
    },
];

pub(crate) fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    let mib = bench.options.file_mib;
    let disk = bench.options.disk.join(format!("bench-disk-{}", process::id()));
    let disk = Folder::new(std::path::absolute(disk)?)?;
    let tree = bench.path("disk-tree");
    fs::create_dir_all(&tree)?;
    random_file(&tree.join(FILE), mib)?;
    let burgeon = Burgeon::new(&bench.program, disk.path().join("state"));
    burgeon.run(&["build", &tree.to_string_lossy(), "image"])?;
    let (at, fast) = (bench.path("disk-at"), bench.path("disk-fast"));
    burgeon.mount_over("image", &at, "fuse")?;
    // Else a disk that is rather full has misses measured.
    burgeon.run(&["cache", "resize", "--keep-free", "0"])?;
    materialise(&at.join(FILE))?;
    let plain = peers::plain_loop(disk.path(), &bench.path("disk-loop"), &tree, mib)?;
    let mut targets = vec![at.join(FILE), plain.file(FILE)];
    let is_fast = burgeon.mount_fast("image", &fast)?;
    if is_fast {
        targets.push(fast.join(FILE));
    }
    let ublk = bench.path("disk-ublk");
    let has_ublk = load_driver().is_ok();
    if has_ublk {
        burgeon.mount_over("image", &ublk, "ublk")?;
        targets.push(ublk.join(FILE));
    }
    let ublk_target = targets.len() - 1;
    let targets: Vec<_> = targets.into_iter().map(Target::from).collect();
    let rates = take_turns(bench, &WAYS, &targets)?;
    drop(plain);
    let peer = "btrfs on a direct-I/O loop on the same disk";
    if has_ublk {
        burgeon.umount(&ublk)?;
        let what = format!("The same over ublk ÷ {peer}");
        ratios(table, what, &WAYS, &rates, (ublk_target, 1), |way| Aim::AtLeast(way.aim));
    }
    burgeon.umount(&at)?;
    let what = format!("A hit in a cache on a disk, over FUSE ÷ {peer}");
    ratios(table, what, &WAYS, &rates, (0, 1), |way| Aim::AtLeast(way.aim));
    if is_fast {
        burgeon.umount(&fast)?;
        let what = format!("The same with --fast ÷ {peer}");
        ratios(table, what, &WAYS, &rates, (2, 1), |way| Aim::AtLeast(way.aim));
    }
    Ok(())
}
