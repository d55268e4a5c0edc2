//! Mounts, loop devices and programs, each released when dropped.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

pub(crate) fn is_root() -> bool {
    // SAFETY: takes nothing, touches nothing, cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Gives this process a mount namespace of its own. Call it before any thread starts.
pub(crate) fn private_mounts() -> Result<()> {
    // SAFETY: changes this process's view of mounts only; there is one thread yet.
    let done = unsafe { libc::unshare(libc::CLONE_NEWNS) };
    ensure!(done == 0, "cannot make a mount namespace: {}", std::io::Error::last_os_error());
    run("mount", &["--make-rprivate", "/"])?;
    Ok(())
}

/// Shows this process's own namespace of processes in `/proc`, in its own mounts.
pub(crate) fn own_processes() -> Result<()> {
    run("mount", &["-t", "proc", "proc", "/proc"]).map(drop)
}

/// Runs a program to its end; gives its standard output.
pub(crate) fn run<A: AsRef<OsStr>>(program: &str, arguments: &[A]) -> Result<String> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    finish(command.output(), program)
}

pub(crate) fn finish(
    output: std::io::Result<std::process::Output>,
    program: &str,
) -> Result<String> {
    let output = output.with_context(|| format!("cannot run {program}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{program} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(text)
}

/// Seconds that `work` takes, and its result.
pub(crate) fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let started = Instant::now();
    let result = work()?;
    Ok((started.elapsed().as_secs_f64(), result))
}

/// A path for this process's folder below the system's temporary one. The folders of killed
/// processes go; they are empty, because their content was mounted there.
pub(crate) fn scratch_path(label: &str) -> PathBuf {
    let temporary = std::env::temp_dir();
    for entry in fs::read_dir(&temporary).into_iter().flatten().flatten() {
        let name = entry.file_name().into_string().unwrap_or_default();
        let owner = name.strip_prefix(label).and_then(|name| name.strip_prefix('-'));
        if owner.is_some_and(|id| !Path::new("/proc").join(id).exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
    temporary.join(format!("{label}-{}", std::process::id()))
}

/// A new folder, removed with all it holds.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(path: PathBuf) -> Result<Self> {
        fs::create_dir_all(&path).with_context(|| format!("{path:?}"))?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A mount, undone when dropped.
pub(crate) struct Mount(PathBuf);

impl Mount {
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if run("umount", &[&self.0]).is_err() {
            let _ = run("umount", &[OsStr::new("-l"), self.0.as_os_str()]);
        }
    }
}

/// Memory as a file system. Large: measurements must not depend on a disk.
pub(crate) fn tmpfs(at: &Path) -> Result<Mount> {
    mount(&["-t", "tmpfs", "-o", "size=90%", "bench"], at)
}

/// `mount OPTIONS AT`.
pub(crate) fn mount(options: &[&str], at: &Path) -> Result<Mount> {
    fs::create_dir_all(at)?;
    let mut arguments: Vec<&OsStr> = options.iter().map(OsStr::new).collect();
    arguments.push(at.as_os_str());
    run("mount", &arguments)?;
    Ok(Mount(at.to_path_buf()))
}

/// A loop device with direct I/O and 4 KiB blocks, read-only. Dropped while something is mounted
/// from it, it goes with that mount.
pub(crate) struct Loop(String);

impl Loop {
    pub(crate) fn new(file: &Path) -> Result<Self> {
        let options = ["--find", "--show", "--read-only", "--direct-io=on", "--sector-size=4096"];
        let mut arguments: Vec<&OsStr> = options.iter().map(OsStr::new).collect();
        arguments.push(file.as_os_str());
        Ok(Self(run("losetup", &arguments)?.trim().to_owned()))
    }

    pub(crate) fn device(&self) -> &str {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run("losetup", &["--detach", &self.0]);
    }
}

/// A program in the background, ended when dropped.
pub(crate) struct Background(Child);

impl Background {
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Ok(Self(command.spawn().with_context(|| format!("cannot run {command:?}"))?))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // By SIGTERM, so that a FUSE server unmounts.
        // SAFETY: signals the child this value owns, which has not been waited for.
        unsafe { libc::kill(self.0.id() as libc::pid_t, libc::SIGTERM) };
        let _ = self.0.wait();
    }
}

/// Waits until `condition` holds, at most ten seconds.
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(10);
    while !condition() {
        ensure!(Instant::now() < end, "{what} did not happen");
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Kernel, processors and memory, with which a reader can place the figures.
pub(crate) fn description() -> Result<String> {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let series: String = kernel.trim().split('-').next().unwrap_or_default().into();
    let memory = fs::read_to_string("/proc/meminfo")?;
    let kib = memory.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    let processors = thread::available_parallelism().map_or(1, |n| n.get());
    Ok(format!("Linux {series}, {processors} processors, {} GiB of memory", kib >> 20))
}
