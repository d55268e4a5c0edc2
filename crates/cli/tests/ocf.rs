//! The OCF resource agent: each of its actions on a slow device that is a loop device, and a cache
//! that goes from one node to another. Two nodes are two state directories of this machine. Needs
//! root, the package libxml2-utils, and a kernel that sends the requests of a dead server again.

#![allow(clippy::unwrap_used)]

mod agent;
mod slow;

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
};

use agent::{CONFIGURED, GENERIC, INSTALLED, NOT_RUNNING, Resource, SUCCESS, UNIMPLEMENTED, agent};
use slow::{
    Ends, MIB, PROGRAM, Slow, counter, file_of, hash_of, is_dirty, kill_all, mount, run, status,
};
use testkit::{Burgeon, PATIENCE, Space, kill, processes_with, wait_until};

/// Its rules, and that each parameter which the agent reads is described.
#[test]
fn the_meta_data_follows_the_standard() {
    let output = Command::new(agent()).arg("meta-data").env_clear().output().unwrap();
    assert_eq!(output.status.code(), Some(SUCCESS));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meta-data.xml");
    fs::write(&path, &output.stdout).unwrap();
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/schemas/ocf-agent.rng");
    run(Command::new("xmllint").args(["--noout", "--relaxng"]).arg(&schema).arg(&path));
    let xpath = |query: &str| {
        let found = run(Command::new("xmllint").args(["--xpath", query]).arg(&path));
        let values = found.split_whitespace().map(|value| value.split('"').nth(1).unwrap());
        values.map(str::to_owned).collect::<BTreeSet<_>>()
    };
    let described = xpath("//parameter/@name");
    let script = fs::read_to_string(agent()).unwrap();
    let reads = script.split("OCF_RESKEY_").skip(1).map(|rest| {
        rest.split(|c: char| !c.is_ascii_lowercase() && c != '_').next().unwrap().to_owned()
    });
    // Names that are made of a variable, and that of the cluster.
    let reads: BTreeSet<_> = reads.filter(|name| !name.is_empty()).collect();
    assert_eq!(described, reads);
    let actions = xpath("//action/@name");
    for action in ["start", "stop", "monitor", "validate-all", "meta-data"] {
        assert!(actions.contains(action), "{action}");
    }
}

#[test]
fn each_action_tells_the_state_by_its_exit_code() {
    let space = Space::new("ocf-actions");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 64);
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image));
    let slow = Slow::new(&image, &[]);
    let cache = space.path("cache");
    let cache = cache.to_str().unwrap();
    let resource = Resource::on(
        &burgeon,
        &[("cache", "fast"), ("slow_device", slow.text()), ("name", "ocf-actions")],
    );
    refuses_what_is_not_configured(&resource);
    assert!(resource.act("start", GENERIC).contains("ocf-exit-reason:"), "no reason");
    burgeon.ok(&["accelerate", "create", "fast", "--cache", cache, "--size", "32M"]);
    resource.act("monitor", NOT_RUNNING);
    resource.act("stop", SUCCESS);
    for _ in 0..2 {
        resource.act("start", SUCCESS);
        resource.act("monitor", SUCCESS);
    }
    let (code, said) = resource.act_with("monitor", &[("OCF_CHECK_LEVEL", "10")]);
    assert_eq!(code, SUCCESS, "{said}");
    // In use, it is not stopped.
    let at = space.make_folder("mnt");
    let mounted = mount(Path::new("/dev/burgeon/ocf-actions"), &at);
    assert!(resource.act("stop", GENERIC).contains("unmount"));
    resource.act("monitor", SUCCESS);
    fs::write(at.join("file"), [7; 4096]).unwrap();
    drop(mounted);
    // Failed is neither running nor stopped.
    let link = Path::new("/dev/burgeon/ocf-actions");
    let device = fs::read_link(link).unwrap();
    fs::remove_file(link).unwrap();
    resource.act("monitor", GENERIC);
    std::os::unix::fs::symlink(device, link).unwrap();
    // As after the death of all its processes.
    kill_all(&burgeon);
    let is_gone = || resource.act_with("monitor", &[]).0 == NOT_RUNNING;
    assert!(wait_until(PATIENCE, is_gone), "it is taken for running");
    resource.act("start", SUCCESS);
    // Its server goes on for a while without a supervisor, which alone can detach.
    processes_with(&burgeon.state().join("accelerate")).into_iter().for_each(kill);
    for _ in 0..2 {
        resource.act("stop", SUCCESS);
    }
    resource.act("monitor", NOT_RUNNING);
    assert!(!link.exists());
    let mounted = mount(&slow.path, &at);
    assert!(fs::read(at.join("file")).unwrap() == [7; 4096]);
    drop(mounted);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

fn refuses_what_is_not_configured(resource: &Resource) {
    resource.act("validate-all", SUCCESS);
    resource.act("promote", UNIMPLEMENTED);
    for name in ["cache", "slow_device", "name"] {
        let said = resource.with(name, "").act("validate-all", CONFIGURED);
        assert!(said.contains(name), "{said}");
    }
    let mode = resource.with("mode", "write-back");
    for action in ["validate-all", "start"] {
        mode.act(action, CONFIGURED);
        mode.with("cache_device", "/dev/null").act(action, CONFIGURED);
        resource.with("mode", "fast").act(action, CONFIGURED);
    }
    mode.with("cache_device", "/dev/null").with("cache_shared", "yes").act("validate-all", SUCCESS);
    let absent = resource.with("binary", "/nowhere/burgeon");
    absent.act("start", INSTALLED);
    absent.act("monitor", NOT_RUNNING);
    absent.act("stop", SUCCESS);
}

/// Another node writes to the slow device while this one does not have it.
#[test]
fn a_start_serves_nothing_of_before() {
    let space = Space::new("ocf-cold");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 16);
    let slow = Slow::new(&image, &[]);
    let cache = space.path("cache");
    let cache = cache.to_str().unwrap();
    burgeon.ok(&["accelerate", "create", "fast", "--cache", cache, "--size", "32M"]);
    let parameters = [("cache", "fast"), ("slow_device", slow.text()), ("name", "ocf-cold")];
    let resource = Resource::on(&burgeon, &parameters);
    let fill = |byte: u8| {
        let device = OpenOptions::new().write(true).open(&slow.path).unwrap();
        device.write_all_at(&vec![byte; MIB as usize], 0).unwrap();
        device.sync_all().unwrap();
    };
    let read = || {
        // Without its page cache, in a process that has it open alone.
        let device = File::open("/dev/burgeon/ocf-cold").unwrap();
        let mut bytes = vec![0; MIB as usize];
        device.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    for byte in 1..4 {
        fill(byte);
        resource.act("start", SUCCESS);
        let settings = ["policy=clock", "sequential-cutoff=off"];
        burgeon.ok(&[&["accelerate", "set", "ocf-cold"], &settings[..]].concat());
        let hits = counter(&burgeon, "cache_hit_bytes");
        assert!(read() == vec![byte; MIB as usize], "an older version was served");
        assert_eq!(counter(&burgeon, "cache_hit_bytes"), hits, "content of before was used");
        let used = status(&burgeon)["caches"][0]["used_blocks"].as_u64().unwrap();
        assert!(used >= MIB / 4096, "nothing is cached, so nothing was shown: {used}");
        resource.act("stop", SUCCESS);
    }
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// The first node dies with dirty blocks in a cache that both reach; the other one goes on.
#[test]
fn dirty_blocks_go_with_a_shared_cache_to_the_other_node() {
    let space = Space::new("ocf-shared");
    let [first, second] = ["first", "second"]
        .map(|node| Burgeon::with_state(PROGRAM, space.make_folder(node).join("state")));
    let ends = (Ends(&first), Ends(&second));
    let image = file_of(&space, "slow", 64);
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image));
    let slow = Slow::new(&image, &[]);
    let cache = space.path("cache");
    let cache = cache.to_str().unwrap();
    first.ok(&["accelerate", "create", "fast", "--cache", cache, "--size", "64M"]);
    let parameters = [
        ("cache", "fast"),
        ("slow_device", slow.text()),
        ("name", "ocf-shared"),
        ("mode", "write-back"),
        ("cache_device", cache),
        ("cache_shared", "true"),
    ];
    let nodes = [&first, &second].map(|node| Resource::on(node, &parameters));
    let device = Path::new("/dev/burgeon/ocf-shared");
    let at = space.make_folder("mnt");

    nodes[0].act("start", SUCCESS);
    let lazy = ["dirty-age=3600", "dirty-limit=100%"];
    first.ok(&[&["accelerate", "set", "ocf-shared"], &lazy[..]].concat());
    let mounted = mount(device, &at);
    let content = testkit::Rng::new(7).bytes(3 << 20);
    fs::write(at.join("file"), &content).unwrap();
    File::open(at.join("file")).unwrap().sync_all().unwrap();
    assert!(is_dirty(&first), "nothing is in the cache alone");
    let slow_alone = hash_of(&image);
    // The node dies: its file system is not unmounted in order, and nothing is detached.
    kill_all(&first);
    drop(mounted);

    let adopt = ["accelerate", "adopt", "fast", "--cache", cache];
    let adopted = || second.run(&adopt).code == Some(0);
    assert!(wait_until(PATIENCE, adopted), "{:?}", second.run(&adopt));
    assert!(second.ok(&adopt).contains("in the cache alone"), "the dirty blocks have gone");
    assert!(second.ok(&["accelerate", "status"]).contains("IS NOT ATTACHED"));
    nodes[1].act("start", SUCCESS);
    // In use, it is left alone; and another device is not taken for it.
    assert!(second.ok(&adopt).contains("in use on this host"));
    second.fails(&["accelerate", "adopt", "fast", "--cache", slow.text()], 1, "another cache");
    let mounted = mount(device, &at);
    assert!(fs::read(at.join("file")).unwrap() == content, "a flushed file is not intact");
    drop(mounted);
    let seen = hash_of(device);
    nodes[1].act("stop", SUCCESS);
    assert_eq!(hash_of(&slow.path), seen, "the slow device differs after the stop");
    assert_ne!(seen, slow_alone, "nothing was in the cache alone");

    // The first node comes back. It knows of dirty blocks, which the other one has written back.
    assert!(first.ok(&["accelerate", "status"]).contains("IS NOT ATTACHED"));
    nodes[0].act("start", SUCCESS);
    assert!(!is_dirty(&first));
    nodes[0].act("stop", SUCCESS);
    assert!(!first.ok(&["accelerate", "status"]).contains("IS NOT ATTACHED"));
    assert_eq!(hash_of(&slow.path), seen);
    let other = file_of(&space, "other", 8);
    second.fails(&["accelerate", "adopt", "more", "--cache", cache], 1, "knows as fast");
    let other = other.to_str().unwrap();
    second.fails(&["accelerate", "adopt", "more", "--cache", other], 3, "");
    first.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}
