//! Memory is short for the applications: the daemon is not among them, so their dirty pages and
//! cold reads go on.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use testkit::{Burgeon, PATIENCE, Rng, Space, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// The applications' memory: less than the data that they write, and than the data that they read.
const MEMORY: u64 = 64 << 20;

/// A memory cgroup of the test's own, of whichever version this machine has.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(name: &str) -> Self {
        let old = Path::new("/sys/fs/cgroup/memory");
        let (top, limit) = match old.is_dir() {
            true => (old, "memory.limit_in_bytes"),
            false => (Path::new("/sys/fs/cgroup"), "memory.max"),
        };
        let path = top.join(format!("{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        if !path.join(limit).exists() {
            fs::write(top.join("cgroup.subtree_control"), "+memory").unwrap();
        }
        fs::write(path.join(limit), MEMORY.to_string()).unwrap();
        Self(path)
    }

    /// A shell in this cgroup that will run `script`.
    fn shell(&self, script: &str) -> Command {
        let mut command = Command::new("sh");
        let enter = format!("echo $$ > {}/cgroup.procs && {script}", self.0.display());
        command.arg("-ec").arg(enter).stdin(Stdio::null());
        command
    }

    fn processes(&self) -> Vec<String> {
        let text = fs::read_to_string(self.0.join("cgroup.procs")).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for process in self.processes() {
            let _ = Command::new("kill").args(["-9", &process]).status();
        }
        wait_until(PATIENCE, || fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn a_small_cgroup_writes_and_reads_more_than_it_has_memory() {
    let space = Space::new("pressure");
    let tree = space.make_folder("tree");
    let content = Rng::new(1).bytes(100 << 20);
    fs::write(tree.join("data"), &content).unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let at = space.make_folder("at");
    let cgroup = Cgroup::new("burgeon-test");
    // The daemon is started from within, and must not stay there.
    let state = burgeon.state().display();
    let mount = format!(
        "'{PROGRAM}' --state-dir '{state}' mount sample '{}' --write-limit 512M > /dev/null",
        at.display()
    );
    assert!(cgroup.shell(&mount).status().unwrap().success());
    let status = burgeon.status();
    for process in ["supervisor_pid", "server_pid"] {
        let pid = status[process].to_string();
        assert!(!cgroup.processes().contains(&pid), "the {process} is in its readers' cgroup");
    }
    let script = format!(
        "cd '{at}'; dd if=/dev/zero of=dirty bs=1M count=200 2> /dev/null & \
         cmp '{at}/data' '{tree}/data'; wait; sync -f '{at}'",
        at = at.display(),
        tree = tree.display()
    );
    let mut child = cgroup.shell(&script).spawn().unwrap();
    let mut ended = None;
    wait_until(PATIENCE, || {
        ended = child.try_wait().unwrap();
        ended.is_some()
    });
    let status = burgeon.status();
    if ended.is_none() {
        let _ = child.kill();
        panic!("the applications hang: {status:#}");
    }
    assert!(ended.unwrap().success(), "{ended:?}");
    assert_eq!(status["mounts"][0]["reads"]["failed_reads"], 0, "{status:#}");
    assert_eq!(status["server_restarts"], 0, "the server died: {status:#}");
    drop(cgroup);
    burgeon.ok(&["umount", at.to_str().unwrap()]);
}
