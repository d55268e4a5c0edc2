//! Mounts beside udev, which opens and probes every block device as it comes, changes and goes: the
//! lab, with systemd and Debian's udev.

#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::Instant,
};

use testkit::{Burgeon, Mounted, Rng, loop_devices, ublk_devices};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// Mounts beside each other, and their umounts side by side, in each round. The second one is given
/// loop numbers again that udev may still have in hand.
const ROUNDS: [usize; 2] = [50, 10];

/// Mounts that begin at once: a server that an emulated machine starts for all of them has a
/// minute.
const WAVE: usize = 10;

/// Mounts with a sprout: as many as the guest's memory, its disk, has room for.
const WRITABLE: usize = 8;

/// Debian 12's rules leave ublk devices alone. This treats them as any other disk.
const RULES: &str = "/run/udev/rules.d/61-ublk.rules";
const RULE: &str = r#"SUBSYSTEM=="block", KERNEL=="ublkb*", ACTION!="remove", OPTIONS+="watch", IMPORT{builtin}="blkid"
"#;

/// The rule, while a test runs.
struct Rules;

impl Rules {
    fn install() -> Self {
        fs::create_dir_all(Path::new(RULES).parent().unwrap()).unwrap();
        fs::write(RULES, RULE).unwrap();
        udevadm(&["control", "--reload"]);
        Self
    }
}

impl Drop for Rules {
    fn drop(&mut self) {
        let _ = fs::remove_file(RULES);
    }
}

fn udevadm(arguments: &[&str]) -> String {
    let output = Command::new("udevadm").args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "udevadm: {said}{arguments:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Waits until udev has handled all events of the kernel.
fn settle() {
    udevadm(&["settle", "--timeout=600"]);
}

/// The device's properties in the database of udev.
fn properties(device: &str) -> String {
    udevadm(&["info", "--query=property", &format!("--name=/dev/{device}")])
}

/// Loop devices in use, loop numbers made for mounts, ublk devices, and names below `/dev/disk`.
fn devices() -> BTreeSet<String> {
    let in_use = loop_devices().into_iter().map(|device| device.name);
    let made = fs::read_dir("/sys/block").unwrap().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().unwrap();
        let number: u32 = name.strip_prefix("loop")?.parse().ok()?;
        (number >= 16384).then_some(name)
    });
    let named = fs::read_dir("/dev/disk/by-uuid").into_iter().flatten().flatten();
    let named = named.map(|entry| entry.file_name().into_string().unwrap());
    in_use.chain(made).chain(ublk_devices()).chain(named).collect()
}

/// A command of each place, all at once. Each must succeed.
fn side_by_side(what: &str, commands: impl IntoIterator<Item = Command>) {
    let begun = Instant::now();
    let started: Vec<_> = commands
        .into_iter()
        .map(|mut command| {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            let child = command.spawn().unwrap();
            thread::spawn(move || child.wait_with_output().unwrap())
        })
        .collect();
    let ended: Vec<Output> = started.into_iter().map(|one| one.join().unwrap()).collect();
    let failed: Vec<_> = ended.iter().filter(|output| !output.status.success()).collect();
    assert!(failed.is_empty(), "{what}: {} of {}: {failed:?}", failed.len(), ended.len());
    println!("{what}, {} side by side: {:.1} s", ended.len(), begun.elapsed().as_secs_f64());
}

/// The sum of a counter over all mounts.
fn sum(burgeon: &Burgeon, counter: &str) -> u64 {
    let status = burgeon.status();
    let mounts = status["mounts"].as_array().unwrap().iter();
    mounts.map(|mount| mount["reads"][counter].as_u64().unwrap()).sum()
}

#[test]
fn mounts_side_by_side_are_not_disturbed_and_fetch_nothing() {
    let folder = std::env::temp_dir().join("udev");
    let _rules = Rules::install();
    settle();
    let before = devices();
    let tree = folder.join("tree");
    fs::create_dir_all(&tree).unwrap();
    let expected = Rng::new(50).bytes(3_000_000);
    fs::write(tree.join("data"), &expected).unwrap();
    // No namespace of its own: systemd sees the mounts, too.
    let burgeon = Burgeon::with_state(PROGRAM, folder.join("state"));
    burgeon.build(&tree, "sample");

    for count in ROUNDS {
        let places: Vec<PathBuf> = (0..count).map(|n| folder.join(format!("at/{n}"))).collect();
        places.iter().for_each(|at| fs::create_dir_all(at).unwrap());
        let mounted: Vec<_> = places.iter().map(|at| Mounted::at(at)).collect();
        let mount = |(n, at): (usize, &PathBuf)| {
            let transport = if n % 2 == 0 { "ublk" } else { "fuse" };
            let at = at.to_str().unwrap();
            let mut command = burgeon.command(&["mount", "sample", at, "--transport", transport]);
            match n < WRITABLE {
                true => command.args(["--write-limit", "256M"]),
                false => command.arg("--read-only"),
            };
            command
        };
        let commands: Vec<_> = places.iter().enumerate().collect();
        for wave in commands.chunks(WAVE) {
            side_by_side("mount", wave.iter().copied().map(mount));
        }
        settle();

        let ours = loop_devices().into_iter().filter(|l| l.backing.starts_with(burgeon.state()));
        let mut devices_seen: Vec<_> = ours.map(|device| device.name).collect();
        assert!(devices_seen.len() >= count + WRITABLE, "{devices_seen:?}");
        let char = |name: String| name.replace("ublkc", "ublkb");
        let ublk = ublk_devices().into_iter().filter(|name| !before.contains(name));
        devices_seen.extend(ublk.map(char));
        // A device for writes is blank when it comes, and nothing announces that btrfs has added
        // it: udev probes all devices once more, with their file systems mounted.
        let nodes: Vec<_> = devices_seen.iter().map(|device| format!("/dev/{device}")).collect();
        let mut trigger = vec!["trigger", "--action=change"];
        trigger.extend(nodes.iter().map(String::as_str));
        udevadm(&trigger);
        settle();
        for device in &devices_seen {
            let known = properties(device);
            assert!(known.contains("ID_FS_TYPE=btrfs"), "udev did not probe {device}: {known}");
        }
        let [hits, fetched] = ["hits", "fetched_bytes"].map(|counter| sum(&burgeon, counter));
        println!("{} devices probed: {hits} reads, {fetched} bytes fetched", devices_seen.len());
        assert!(hits > 0, "no read of a probe came to a server");
        assert_eq!((sum(&burgeon, "misses"), fetched), (0, 0), "probing has fetched lazy data");

        if count == ROUNDS[1] {
            assert!(fs::read(places[0].join("data")).unwrap() == expected);
            assert!(sum(&burgeon, "fetched_bytes") > 0, "the counter does not count");
        }
        let umount = |at: &PathBuf| burgeon.command(&["umount", at.to_str().unwrap()]);
        side_by_side("umount", places.iter().map(umount));
        mounted.into_iter().for_each(std::mem::forget);
        settle();
        assert_eq!(devices(), before, "devices are left");
    }
    drop(burgeon);
    fs::remove_dir_all(folder).unwrap();
}
