//! `burgeon accelerate` with an image of a real Ceph as the slow device.
//!
//! ```text
//!   Ceph, in a network namespace ◄── qemu-storage-daemon (librbd) ── FUSE ── loop device = slow device
//!        ▲                                                                      ▲
//!        └── `rbd export`: reads past Burgeon                     cached device ┘
//! ```
//!
//! `make soak` runs it. Needs root, and the Debian packages ceph-mon, ceph-osd, ceph-common,
//! qemu-system-common and qemu-block-extra.

#![allow(clippy::unwrap_used)]

mod agent;
mod slow;

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead, BufReader},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
};

use agent::{GENERIC, Resource, SUCCESS};
use slow::{
    Ends, MIB, PROGRAM, Slow, await_writes, file_of, hash_of, is_dirty, kill_all, mount,
    read_files, replace_server, run, status, write_files,
};
use testkit::{Burgeon, PATIENCE, Space, wait_until};

/// One of its own for the whole test, with nothing but the loopback device.
struct Ceph {
    holder: Child,
    folder: PathBuf,
}

impl Ceph {
    fn start(space: &Space) -> Self {
        let mut hold = Command::new("unshare");
        hold.args(["--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]);
        let mut holder = hold.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        let ceph = Self { holder, folder: space.path("ceph") };
        run(ceph.command(&Self::script()).arg("start").arg(&ceph.folder));
        ceph
    }

    fn script() -> String {
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../dev/ceph").to_owned()
    }

    /// A program that reaches it.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.holder.id())).arg(program);
        command.env("CEPH_CONF", self.folder.join("ceph.conf")).stdin(Stdio::null());
        command
    }

    fn ask(&self, program: &str, arguments: &[&str]) -> String {
        run(self.command(program).args(arguments))
    }

    /// The image's content as another client reads it.
    fn export(&self, image: &str, to: &Path) -> u64 {
        let _ = fs::remove_file(to);
        self.ask("rbd", &["export", "--no-progress", image, to.to_str().unwrap()]);
        hash_of(to)
    }
}

impl Drop for Ceph {
    fn drop(&mut self) {
        let _ = self.command(&Self::script()).arg("stop").arg(&self.folder).status();
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// An image as a block device of this machine. Each is a client of its own.
struct Rbd {
    daemon: Child,
    file: PathBuf,
    slow: Option<Slow>,
}

impl Rbd {
    fn attach(ceph: &Ceph, space: &Space, image: &str, client: &str) -> Self {
        let file = space.path(&format!("{image}-{client}"));
        File::create(&file).unwrap();
        let configuration = ceph.folder.join("ceph.conf");
        let node = format!(
            "driver=rbd,node-name=image,pool=rbd,image={image},conf={},discard=unmap",
            configuration.display()
        );
        let export = format!(
            "type=fuse,id=export,node-name=image,mountpoint={},writable=on",
            file.display()
        );
        let mut command = ceph.command("qemu-storage-daemon");
        command.args(["--blockdev", &node, "--export", &export]);
        let mut rbd = Self { daemon: command.spawn().unwrap(), file, slow: None };
        let is_there = || fs::metadata(&rbd.file).is_ok_and(|file| file.len() > 0);
        assert!(wait_until(PATIENCE, is_there), "the image does not appear");
        rbd.slow = Some(Slow::new(&rbd.file, &["--direct-io=on"]));
        rbd
    }

    fn slow(&self) -> &Slow {
        self.slow.as_ref().unwrap()
    }
}

impl Drop for Rbd {
    fn drop(&mut self) {
        self.slow = None;
        let _ = Command::new("umount").arg("--lazy").arg(&self.file).status();
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[test]
fn an_image_behind_a_cache_holds_what_was_written() {
    let space = Space::new("rbd");
    let ceph = Ceph::start(&space);
    for mode in ["write-through", "write-back"] {
        survives(&space, &ceph, mode);
    }
}

/// A file system in `mode` whose server dies while files are written, and in the end all processes.
fn survives(space: &Space, ceph: &Ceph, mode: &str) {
    let burgeon = Burgeon::with_state(PROGRAM, space.make_folder(mode).join("state"));
    let ends = Ends(&burgeon);
    ceph.ask("rbd", &["create", "--size", "384M", mode]);
    let image = Rbd::attach(ceph, space, mode, "client");
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image.slow().path));
    let cache = space.path(&format!("cache-{mode}"));
    let cache = cache.to_str().unwrap();
    burgeon.ok(&["accelerate", "create", "fast", "--cache", cache, "--size", "64M"]);
    let name = format!("rbd-{}", std::process::id());
    let slow = image.slow().text();
    let attach = ["accelerate", "attach", "fast", slow, "--name", &name, "--mode", mode];
    let device = PathBuf::from(burgeon.ok(&attach).trim());
    assert_eq!(status(&burgeon)["caches"][0]["devices"][0]["mode"], mode);
    let at = space.make_folder(&format!("mnt-{mode}"));
    let mounted = mount(&device, &at);
    let stop = AtomicBool::new(false);
    let versions = thread::scope(|scope| {
        let writer = scope.spawn(|| write_files(&at, &stop));
        for _ in 0..4 {
            await_writes(&burgeon);
            replace_server(&burgeon);
        }
        stop.store(true, SeqCst);
        writer.join().unwrap()
    });
    kill_all(&burgeon);
    drop(mounted);
    let attached = || burgeon.run(&attach).code == Some(0);
    assert!(wait_until(PATIENCE, attached), "{:?}", burgeon.run(&attach));
    let device = fs::read_link(Path::new("/dev/burgeon").join(&name)).unwrap();
    let mounted = mount(&device, &at);
    read_files(&at, &versions);
    drop(mounted);
    let seen = hash_of(&device);
    burgeon.ok(&["accelerate", "detach", &name]);
    // The daemon is still there: what another client reads is not in its memory alone.
    assert_eq!(ceph.export(mode, &space.path("export")), seen, "{mode}: the image differs");
    drop(image);
    let image = Rbd::attach(ceph, space, mode, "later");
    run(Command::new("e2fsck").arg("-fn").arg(&image.slow().path));
    let mounted = mount(&image.slow().path, &at);
    read_files(&at, &versions);
    drop(mounted);
    drop(image);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// Ceph refuses a client for ever, as it does when another host has broken its lock.
#[test]
fn a_blocklisted_client_writes_no_more_and_its_dirty_blocks_go_elsewhere() {
    let space = Space::new("rbd-blocklist");
    let ceph = Ceph::start(&space);
    let [first, second] = ["first", "second"]
        .map(|node| Burgeon::with_state(PROGRAM, space.make_folder(node).join("state")));
    let ends = (Ends(&first), Ends(&second));
    ceph.ask("rbd", &["create", "--size", "64M", "img"]);
    let image = Rbd::attach(&ceph, &space, "img", "first");
    let cache = file_of(&space, "cache", 64);
    let cache = cache.to_str().unwrap();
    first.ok(&["accelerate", "create", "fast", "--cache", cache]);
    let parameters = [
        ("cache", "fast"),
        ("name", "rbd-blocklist"),
        ("mode", "write-back"),
        ("cache_device", cache),
        ("cache_shared", "true"),
    ];
    let resource = Resource::on(&first, &parameters).with("slow_device", image.slow().text());
    resource.act("start", SUCCESS);
    let settings = ["dirty-age=3600", "dirty-limit=100%", "sequential-cutoff=off"];
    first.ok(&[&["accelerate", "set", "rbd-blocklist"], &settings[..]].concat());
    let device = Path::new("/dev/burgeon/rbd-blocklist");
    let written = testkit::Rng::new(8).bytes(MIB as usize);
    let write = |at: u64| {
        let device = OpenOptions::new().write(true).open(device).unwrap();
        let done = device.write_all_at(&written, at * MIB).and_then(|()| device.sync_all());
        done.map_err(|error| error.raw_os_error())
    };
    // The client takes the image's lock, so that it has one to lose.
    write(40).unwrap();
    first.ok(&["accelerate", "flush", "rbd-blocklist"]);
    write(1).unwrap();
    resource.act("monitor", SUCCESS);
    let before = ceph.export("img", &space.path("export"));

    let watchers = ceph.ask("rbd", &["status", "img"]);
    let client = watchers.split("watcher=").nth(1).unwrap().split_whitespace().next().unwrap();
    ceph.ask("ceph", &["osd", "blocklist", "add", client]);

    // Dirty blocks are served, and stay: a flush of the slow device's content fails.
    let flush = first.run(&["accelerate", "flush", "rbd-blocklist"]);
    assert_ne!(flush.code, Some(0), "{flush:?}");
    let mut read = vec![0; MIB as usize];
    let cached = File::open(device).unwrap();
    cached.read_exact_at(&mut read, MIB).unwrap();
    assert!(read == written, "dirty blocks are not served");
    let uncached = cached.read_exact_at(&mut read, 20 * MIB).unwrap_err();
    assert_eq!(uncached.raw_os_error(), Some(libc_eio()), "{uncached}");
    drop(cached);
    assert!(is_dirty(&first), "dirty blocks were given up");
    // As when they are old enough to be written back.
    first.ok(&["accelerate", "set", "rbd-blocklist", "dirty-age=0"]);
    let status = || first.ok(&["accelerate", "status"]);
    let tells = || status().contains("DIRTY BLOCKS ARE NOT WRITTEN BACK");
    assert!(wait_until(PATIENCE, tells), "{}", status());
    let said = resource.act("monitor", GENERIC);
    assert!(said.contains("DIRTY BLOCKS ARE NOT WRITTEN BACK"), "{said}");
    first.ok(&["accelerate", "set", "rbd-blocklist", "mode=write-through"]);
    assert_eq!(write(30), Err(Some(libc_eio())));
    assert_eq!(ceph.export("img", &space.path("export")), before, "it still writes");

    let (code, said) = resource.act_with("stop", &[("OCF_RESKEY_CRM_meta_timeout", "20000")]);
    assert_eq!(code, SUCCESS, "{said}");
    assert!(first.ok(&["accelerate", "status"]).contains("IS NOT ATTACHED"));
    assert_eq!(ceph.export("img", &space.path("export")), before);
    drop(image);

    let image = Rbd::attach(&ceph, &space, "img", "second");
    let other = Resource::on(&second, &parameters).with("slow_device", image.slow().text());
    other.act("start", SUCCESS);
    File::open(device).unwrap().read_exact_at(&mut read, MIB).unwrap();
    assert!(read == written, "dirty blocks are lost");
    let seen = hash_of(device);
    other.act("stop", SUCCESS);
    assert_eq!(ceph.export("img", &space.path("export")), seen);
    assert_ne!(seen, before, "nothing was dirty");
    drop(image);
    second.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

fn libc_eio() -> i32 {
    rustix::io::Errno::IO.raw_os_error()
}
