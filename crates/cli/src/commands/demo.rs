//! `burgeon demo`: the main use on a real tree, in its own state directory and mount namespace. It
//! leaves nothing behind.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use burgeon_daemon::{Client, StateDir, protocol::Request};
use rustix::{
    mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount},
    thread::{UnshareFlags, unshare_unsafe},
};

use crate::{
    args,
    attributes::Attributes,
    commands::{Context, images, mount, need_mount_privilege, umount},
    config::Config,
    exit,
    output::{self, bytes, counted, duration_us, percent},
};

/// Has room for images of a few GiB on most machines; `/tmp` is often memory.
const SCRATCH: &str = "/var/tmp";

/// Longest wait of a signal for busy mounts.
const CLEANING_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest wait after the cleanup for the demonstration to notice.
const REST_TIMEOUT: Duration = Duration::from_secs(1);

/// Enough for the writes of a demonstration.
const WRITE_LIMIT: u64 = 1 << 30;

pub(crate) fn demo(json: bool, args: &args::Demo) -> Result<ExitCode> {
    need_mount_privilege("demo")?;
    if json {
        output::turn_aside();
    }
    // SAFETY: this process has only one thread here, and only its view of mounts changes.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.context("cannot make a mount namespace")?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)
        .context("cannot keep mounts to this demonstration")?;
    let stage = Arc::new(Stage::new()?);
    let shown = stage.tree(args).and_then(|tree| {
        stage.handle_signals()?;
        stage.run(&tree)
    });
    stage.leave_to_signals();
    let cleaned = stage.clean();
    stage.leave_to_signals();
    shown?;
    cleaned?;
    if json {
        output::print_json(&serde_json::json!({ "demo": "done" }))?;
    } else {
        println!(
            "\nEverything is cleaned up. Next: burgeon build DIR NAME; burgeon mount NAME PATH"
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// The demonstration's folder, and a context whose state lies there.
struct Stage {
    folder: PathBuf,
    context: Context,
    /// Held while mounting and while cleaning up: a daemon that is being started cannot be ended.
    turn: Mutex<()>,
    /// A signal arrived, and decides how this process ends.
    interrupted: AtomicBool,
    /// The demonstration has ended, and puts nothing more into the folder.
    rests: AtomicBool,
}

impl Stage {
    fn new() -> Result<Self> {
        let folder = Path::new(SCRATCH).join(format!("burgeon-demo-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        for name in ["a", "b"] {
            fs::create_dir(folder.join(name))?;
        }
        let state = StateDir::open(&folder.join("state"))?;
        let config = Config::default();
        let context = Context { state, store: None, repository: None, config, json: false };
        let (interrupted, rests) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { folder, context, turn: Mutex::default(), interrupted, rests })
    }

    fn tree(&self, args: &args::Demo) -> Result<PathBuf> {
        if args.debian { self.debootstrap() } else { Ok(args.tree.clone()) }
    }

    /// From now on an interrupt cleans up, too.
    fn handle_signals(self: &Arc<Self>) -> Result<()> {
        let signals = burgeon_daemon::block_termination().context("cannot block signals")?;
        let stage = Arc::clone(self);
        thread::spawn(move || {
            let Ok(signal) = signals.wait() else { return };
            stage.interrupted.store(true, SeqCst);
            let (begun, mut gone) = (Instant::now(), None);
            loop {
                // A running build makes its folders anew until it fails.
                let rests = stage.rests.load(SeqCst);
                match stage.clean() {
                    Err(e) if stage.folder.exists() => {
                        if begun.elapsed() > CLEANING_TIMEOUT {
                            exit::say(&e);
                            break;
                        }
                    }
                    _ => {
                        let gone: &Instant = gone.get_or_insert_with(Instant::now);
                        if rests || gone.elapsed() > REST_TIMEOUT {
                            break;
                        }
                    }
                }
                thread::sleep(Duration::from_millis(20));
            }
            std::process::exit(128 + signal);
        });
        Ok(())
    }

    /// Does not return after a signal: the signal caused the demonstration's failure.
    fn leave_to_signals(&self) {
        while self.interrupted.load(SeqCst) {
            self.rests.store(true, SeqCst);
            thread::park();
        }
    }

    fn run(&self, tree: &Path) -> Result<()> {
        step(&format!("build an image of {}", tree.display()));
        images::build_tree(&self.context, tree, "demo")?;

        step("mount it");
        let (a, b) = (self.folder.join("a"), self.folder.join("b"));
        let took = self.mount(&a)?;
        println!("mounted in {took}; names, sizes and owners are all here, data is not");

        step("list all of it with find");
        let begun = Instant::now();
        let names = count_names(&a)?;
        println!("{names} names in {}", since(begun));

        step("run a program of it, in a chroot");
        run_program(&a)?;

        step("write, and make a reflink copy of its largest file");
        write_and_clone(&a)?;

        step("mount it a second time: none of that is there");
        let took = self.mount(&b)?;
        ensure!(!b.join("hello-from-a").exists(), "the second mount sees the first one's writes");
        println!("mounted in {took}; independent");

        step("the costs");
        self.numbers(&a)
    }

    fn mount(&self, at: &Path) -> Result<String> {
        let begun = Instant::now();
        let args = args::Mount {
            name: "demo".to_owned(),
            path: at.to_owned(),
            index: None,
            checked: false,
            pull: None,
            writes: None,
            read_only: false,
            write_limit: Some(WRITE_LIMIT),
            reserve: None,
            thin: false,
            writes_device: None,
            fill: None,
            let_go: false,
            profile: Some("none".to_owned()),
            transport: None,
            persist: false,
            virtual_size: None,
            fetch_limit: None,
            fast: false,
            attributes: Attributes::default(),
        };
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        mount::place(&self.context, args)?;
        Ok(since(begun))
    }

    fn numbers(&self, at: &Path) -> Result<()> {
        let Some((_, status)) = Client::connect_and_ask(&self.context.state)? else {
            bail!("the daemon is gone")
        };
        let Some(mount) = status.mounts.iter().find(|mount| mount.target == at) else {
            bail!("the first mount is gone");
        };
        let local = mount.materialised_bytes.unwrap_or(0);
        println!("data in the image   {}", bytes(mount.data_bytes));
        println!(
            "made local          {} ({} of the data), fetched as {} in {}",
            bytes(local),
            percent(local as f64 / mount.data_bytes.max(1) as f64),
            bytes(mount.reads.fetched_bytes),
            counted(mount.reads.fetches, "chunk")
        );
        println!("errors              {}", mount.reads.failed_reads);
        Ok(())
    }

    fn debootstrap(&self) -> Result<PathBuf> {
        step("make a Debian root with debootstrap");
        let root = self.folder.join("debian");
        let status = Command::new("debootstrap")
            .args(["--variant=minbase", "bookworm"])
            .arg(&root)
            .stdout(Stdio::null())
            .status()
            .context("cannot run debootstrap: install it, or leave --debian away")?;
        ensure!(status.success(), "debootstrap failed: {status}");
        Ok(root)
    }

    /// Removes everything, also after a partial failure.
    fn clean(&self) -> Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut first_error = None;
        for name in ["b", "a"] {
            let path = self.folder.join(name);
            if let Err(e) = umount::one(&self.context, &path) {
                let mounted = unmount(&path, UnmountFlags::DETACH).is_ok();
                first_error = first_error.or(mounted.then_some(e));
            }
        }
        if let Ok(Some(client)) = Client::connect(&self.context.state) {
            client.call(&Request::Shutdown { force: true })?;
            client.wait_for_end()?;
        }
        fs::remove_dir_all(&self.folder)
            .with_context(|| format!("cannot remove {}", self.folder.display()))?;
        first_error.map_or(Ok(()), Err)
    }
}

fn step(what: &str) {
    println!("\n── {what}");
}

fn since(begun: Instant) -> String {
    duration_us(begun.elapsed().as_micros() as f64)
}

fn count_names(root: &Path) -> Result<u64> {
    let output = Command::new("find").arg(root).args(["-printf", "."]).output();
    let output = output.context("cannot run find")?;
    ensure!(output.status.success(), "find: {}", String::from_utf8_lossy(&output.stderr));
    Ok(output.stdout.len() as u64)
}

/// Runs the tree's own shell, if it has one, with the tree as its root.
fn run_program(root: &Path) -> Result<()> {
    if !root.join("bin/sh").exists() {
        println!("this tree has no /bin/sh to run");
        return Ok(());
    }
    let begun = Instant::now();
    let output = Command::new("chroot")
        .arg(root)
        .args(["/bin/sh", "-c", "echo hello from $(uname -sr), root has $(ls / | wc -l) entries"])
        .env("PATH", "/bin:/sbin:/usr/bin:/usr/sbin")
        .output()
        .context("cannot run chroot")?;
    ensure!(output.status.success(), "the program: {}", String::from_utf8_lossy(&output.stderr));
    println!("{}", String::from_utf8_lossy(&output.stdout).trim_end());
    println!("in {}, with every page of it fetched just now", since(begun));
    Ok(())
}

fn write_and_clone(root: &Path) -> Result<()> {
    let mut hello = File::create(root.join("hello-from-a"))?;
    hello.write_all(b"written into a lazily mounted image\n")?;
    hello.sync_all()?;
    println!("wrote and synced {}", root.join("hello-from-a").display());
    let Some((largest, len)) = largest_file(root)? else { return Ok(()) };
    let begun = Instant::now();
    let from = File::open(&largest)?;
    let to = File::create(root.join("clone"))?;
    rustix::fs::ioctl_ficlone(&to, &from).context("cannot make a reflink copy")?;
    to.sync_all()?;
    let name = largest.file_name().unwrap_or(OsStr::new("?")).to_string_lossy();
    println!("cloned {name} ({}) in {}: no byte of it was fetched", bytes(len), since(begun));
    Ok(())
}

fn largest_file(root: &Path) -> Result<Option<(PathBuf, u64)>> {
    let mut largest = None;
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)?.flatten() {
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                folders.push(entry.path());
            } else if metadata.is_file()
                && largest.as_ref().is_none_or(|(_, len)| metadata.len() > *len)
            {
                largest = Some((entry.path(), metadata.len()));
            }
        }
    }
    Ok(largest)
}
