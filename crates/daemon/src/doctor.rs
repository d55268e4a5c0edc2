//! Looks at the machine and at what crashes have left, and says what to do about each.
//!
//! Repair is what any start of the daemon does anyway (see `supervisor/recover.rs`): it adopts a
//! server that lost its supervisor, serves mounts again that lost their server, and takes away
//! the folders of mounts that are gone. Besides, it removes what killed builds left in the store,
//! and ublk devices whose daemon and folder are gone.
//! It never touches `writes/`.

mod area;

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, ObjectStore, Result};
use burgeon_frontend::ublk::Control;
use burgeon_source::Directory;
use rustix::{
    fs::{Access, access},
    io::Errno,
    process::{Resource, getrlimit},
    thread::{CapabilitySet, capabilities},
};
use serde::Serialize;

use crate::{
    host::{
        chain,
        system::{self, module_is_there},
    },
    id::MountId,
    ipc::{
        client::Client,
        protocol::{MountStatus, Reply, Request, Status},
    },
    read_only,
    state::{
        files,
        paths::StateDir,
        prepared,
        record::{Transport, mount_ids, read_record},
        space, writes,
    },
    supervisor::{is_alive, remove_unused_loops},
    transport,
};

/// The oldest kernel that everything here was measured on.
const KERNEL_MIN: (u32, u32) = (6, 1);

/// Free space below which a warning is worth it: nothing useful fits.
const FREE_MIN: u64 = 1 << 30;

/// How long a daemon may take to say how it is.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// How long a new daemon may take to serve a mount again that has lost its server, and how often it is
/// asked.
const SERVE_MAX: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

/// How bad a finding is.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// As it should be.
    Fine,
    /// Works, and could be better.
    Warning,
    /// Something does not work.
    Problem,
}

/// One thing that was looked at.
#[derive(Serialize, Clone, Debug)]
pub struct Finding {
    /// What was looked at, in a word or two.
    pub subject: String,
    /// How bad it is.
    pub level: Level,
    /// What was found.
    pub found: String,
    /// What to do about it.
    pub remedy: Option<String>,
    /// Whether `--repair` does that.
    pub repairable: bool,
}

impl Finding {
    fn fine(subject: &str, found: impl Into<String>) -> Self {
        Self {
            subject: subject.to_owned(),
            level: Level::Fine,
            found: found.into(),
            remedy: None,
            repairable: false,
        }
    }

    fn bad(level: Level, subject: &str, found: impl Into<String>, remedy: &str) -> Self {
        Self { level, remedy: Some(remedy.to_owned()), ..Self::fine(subject, found) }
    }

    fn repairable(subject: &str, found: impl Into<String>, remedy: &str) -> Self {
        Self { repairable: true, ..Self::bad(Level::Problem, subject, found, remedy) }
    }
}

/// Looks at everything: this machine, the state directory, and what builds left in `store`, if
/// that is a folder. (In a bucket they leave nothing but a mark, which ends by itself.)
pub fn examine(state: &StateDir, store: Option<&Path>) -> Vec<Finding> {
    let mut findings = vec![kernel(), file_system("btrfs", "btrfs"), file_system("FUSE", "fuse")];
    findings.extend([
        device("/dev/fuse", "modprobe fuse, or give the container the device 10:229"),
        device("/dev/loop-control", "modprobe loop, or give the container the device 10:237"),
        device("/dev/btrfs-control", "modprobe btrfs, or give the container the device 10:234"),
        loops(),
        ublk(),
        rings(),
        privileges(),
        memory_lock(),
        place(state),
    ]);
    let mut runs = ask(state);
    let left = leftovers(state, &runs);
    if let Ok(Some(status)) = &mut runs {
        findings.extend(unserved(status));
        read_only::note(status);
        findings.extend(status.mounts.iter().filter_map(forced_read_only));
    }
    findings.push(daemon(runs));
    findings.extend(left);
    findings.extend(strays(state));
    findings.extend(store.and_then(builds));
    findings.extend(kept_writes(state));
    findings
}

/// Mends what can be mended; returns whether there was anything to do. Mounts that have lost their
/// server are waited for; one that is not served then is found by [`examine`].
pub fn repair(state: &StateDir, store: Option<&Path>) -> Result<bool> {
    let store = store.filter(|store| stale_builds(store) > 0);
    if let Some(store) = store {
        // Removes what has no living writer before it gives the lease out.
        drop(Directory::open(store)?.begin_collect()?);
    }
    let strays = transport::strays(&mount_ids(state));
    strays.iter().try_for_each(|number| transport::remove_stray(*number))?;
    remove_unused_loops();
    if !leftovers(state, &ask(state)).iter().any(|finding| finding.repairable) {
        return Ok(store.is_some() || !strays.is_empty());
    }
    let client = Client::connect_or_start(state)?;
    let begun = Instant::now();
    while begun.elapsed() < SERVE_MAX {
        let Reply::Status(status) = client.call(&Request::Status)?.0 else { break };
        if !status.mounts.iter().any(|mount| mount.state == "recovering") {
            break;
        }
        thread::sleep(PAUSE);
    }
    Ok(true)
}

fn kernel() -> Finding {
    let release = system::kernel_release();
    match system::kernel_version() {
        Some(version) if version >= KERNEL_MIN => {
            Finding::fine("kernel", format!("Linux {release}"))
        }
        _ => Finding::bad(
            Level::Problem,
            "kernel",
            format!("Linux {release}"),
            "Burgeon needs Linux 6.1 or later",
        ),
    }
}

fn file_system(subject: &str, name: &str) -> Finding {
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if known.lines().any(|line| line.split_whitespace().last() == Some(name)) {
        return Finding::fine(subject, "known to the kernel");
    }
    if module_is_there(name) {
        return Finding::fine(subject, "a module of the kernel, loaded when it is needed");
    }
    Finding::bad(
        Level::Problem,
        subject,
        "not known to the kernel",
        "take a kernel that has it, as those of the distributions do",
    )
}

/// What the kernel lacks for the faster transport.
fn ublk() -> Finding {
    let there = fs::metadata("/dev/ublk-control").is_ok();
    if !there && module_is_there("ublk_drv") {
        return Finding::fine("ublk", "a module of the kernel, loaded by the first mount");
    }
    if there && !may_administrate() {
        return Finding::fine("ublk", "known to the kernel");
    }
    match Control::open() {
        Ok(_) => Finding::fine("ublk", "mounts use it"),
        Err(e) => Finding::bad(
            Level::Warning,
            "ublk",
            format!("{e}; mounts go over FUSE and a loop device, which is slower"),
            "take a kernel with CONFIG_BLK_DEV_UBLK, 6.5 or later, where speed matters",
        ),
    }
}

fn may_administrate() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

fn device(path: &str, remedy: &str) -> Finding {
    match fs::metadata(path) {
        Ok(_) => Finding::fine(path, "is there"),
        Err(e) => Finding::bad(Level::Problem, path, e.to_string(), remedy),
    }
}

fn loops() -> Finding {
    let used = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let used = used.filter(|entry| entry.path().join("loop").exists()).count();
    let most = fs::read_to_string("/sys/module/loop/parameters/max_loop")
        .ok()
        .and_then(|text| text.trim().parse::<usize>().ok())
        .unwrap_or(0);
    // Newer kernels make devices on demand, whatever this number says, unless it was set.
    let found = format!("{used} in use, max_loop={most}");
    let on_demand = fs::metadata("/dev/loop-control").is_ok();
    if on_demand || used + 3 <= most {
        return Finding::fine("loop devices", found);
    }
    Finding::bad(
        Level::Problem,
        "loop devices",
        found,
        "detach some (`losetup -a` lists them), or boot with a greater max_loop",
    )
}

/// Not having it is no defect: `mount --fast` then falls back, and says so.
fn rings() -> Finding {
    let found = match system::fuse_rings() {
        Ok(()) => "the kernel allows it: `burgeon mount --fast` uses it".to_owned(),
        Err(reason) => format!("not for `burgeon mount --fast`: {reason}"),
    };
    Finding::fine("FUSE over io_uring", found)
}

fn privileges() -> Finding {
    let lacks = match (may_administrate(), is_first_user_namespace()) {
        (true, true) => return Finding::fine("privileges", "CAP_SYS_ADMIN: may mount"),
        (true, false) => "CAP_SYS_ADMIN is that of a user namespace",
        (false, _) => "CAP_SYS_ADMIN is missing",
    };
    Finding::bad(
        Level::Warning,
        "privileges",
        format!("{lacks}: build, inspect and verify work, mount does not"),
        "run `burgeon mount` as root of the machine",
    )
}

/// Whether this is not a container with users of its own: no btrfs can be mounted in there.
fn is_first_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.is_empty() || map.split_whitespace().eq(["0", "0", "4294967295"])
}

fn memory_lock() -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    let sets = capabilities(None).map(|sets| sets.effective).unwrap_or(CapabilitySet::empty());
    if limit.is_none() || sets.contains(CapabilitySet::IPC_LOCK) {
        return Finding::fine("locked memory", "no limit");
    }
    Finding::bad(
        Level::Warning,
        "locked memory",
        format!(
            "at most {} KiB: the server can stall when memory is short",
            limit.unwrap_or(0) >> 10
        ),
        "raise the limit (ulimit -l unlimited, or LimitMEMLOCK= of the unit)",
    )
}

fn place(state: &StateDir) -> Finding {
    let shown = state.root().display();
    if let Err(e) = chain::refuse_burgeon(state.root(), "the state directory") {
        return Finding::bad(
            Level::Problem,
            "state directory",
            e.to_string(),
            "take another --state-dir",
        );
    }
    if access(state.root(), Access::WRITE_OK) == Err(Errno::ROFS) {
        return Finding::bad(
            Level::Problem,
            "state directory",
            format!("{shown}: its file system is read-only"),
            "mount it writable, or take another --state-dir",
        );
    }
    match space::free_space(state.root()) {
        Ok(free) if free < FREE_MIN => Finding::bad(
            Level::Warning,
            "state directory",
            format!("{shown}: only {} MiB free", free >> 20),
            "free some space; `burgeon gc` and `burgeon writes list` show what Burgeon keeps",
        ),
        Ok(free) => Finding::fine("state directory", format!("{shown}: {} GiB free", free >> 30)),
        Err(e) => Finding::bad(
            Level::Problem,
            "state directory",
            e.to_string(),
            "take another --state-dir",
        ),
    }
}

fn daemon(runs: Result<Option<Status>>) -> Finding {
    match runs {
        Ok(Some(_)) => Finding::fine("daemon", "runs and answers"),
        Ok(None) => Finding::fine("daemon", "does not run; `burgeon mount` starts it"),
        Err(e) => Finding::bad(
            Level::Problem,
            "daemon",
            e.to_string(),
            "end its processes, then `burgeon doctor --repair`",
        ),
    }
}

/// What a daemon that runs says, unless it is just dying: then it still takes connections. An error
/// if it is silent.
fn ask(state: &StateDir) -> Result<Option<Status>> {
    let Some(client) = Client::connect(state)? else { return Ok(None) };
    client.wait_at_most(SILENCE_MAX)?;
    let asked = Instant::now();
    if let Ok((Reply::Status(status), _)) = client.call(&Request::Status) {
        return Ok(Some(*status));
    }
    if asked.elapsed() < SILENCE_MAX {
        return Ok(None);
    }
    let what = format!("process {} does not answer", client.supervisor()?.as_raw_nonzero());
    Err(Error::new(ErrorKind::Unavailable, what))
}

/// Mounts that the daemon that runs does not serve.
fn unserved(status: &Status) -> Vec<Finding> {
    let finding = |mount: &MountStatus| {
        let subject = format!("mount {}", mount.target.display());
        match mount.state.as_str() {
            "failed" => Some(Finding::bad(
                Level::Problem,
                &subject,
                format!(
                    "is not served: {}; data that is not in memory gives EIO",
                    mount.problem.as_deref().unwrap_or("its server has said no more")
                ),
                "mend that, and the daemon serves it again by itself; or unmount it, and mount it again",
            )),
            "recovering" => Some(Finding::bad(
                Level::Warning,
                &subject,
                "is not served yet: its server is being started",
                "look again in a moment; the daemon's log says what it waits for",
            )),
            _ => None,
        }
    };
    status.mounts.iter().filter_map(finding).collect()
}

fn forced_read_only(mount: &MountStatus) -> Option<Finding> {
    let (found, remedy) = mount.read_only_problem()?;
    let subject = format!("mount {}", mount.target.display());
    Some(Finding::bad(Level::Problem, &subject, found, remedy))
}

/// What is left of a daemon that does not run any more. While one runs, all of this is its own.
fn leftovers(state: &StateDir, runs: &Result<Option<Status>>) -> Vec<Finding> {
    if !matches!(runs, Ok(None)) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    if orphan_serves(state) {
        findings.push(Finding::repairable(
            "supervisor",
            "was killed; its server goes on serving",
            "start a supervisor, which takes over; nothing is interrupted",
        ));
        return findings;
    }
    for id in mount_ids(state) {
        let record = read_record(state, id);
        findings.push(match record {
            Ok(record) if is_alive(&record) => Finding::repairable(
                &format!("mount {}", record.target.display()),
                match record.attach.transport {
                    Transport::Fuse | Transport::Rings { .. } => {
                        "has lost its server: data that is not local gives EIO"
                    }
                    Transport::Ublk { .. } => "has lost its server: readers of data wait for it",
                },
                "start the daemon, which serves it again",
            ),
            _ => match chain::loop_below(&state.mount(id)) {
                Some(device) => lost_record(id, &device),
                None => Finding::repairable(
                    &format!("folder of mount {id}"),
                    match transport::devices_of(id).first() {
                        None => "belongs to a mount that is gone".to_owned(),
                        Some(device) => {
                            format!("belongs to a mount that is gone; so does /dev/ublkb{device}")
                        }
                    },
                    "remove it: named writes are kept elsewhere",
                ),
            },
        });
    }
    findings
}

/// ublk devices that have lost their daemon, its folder, and their last user.
fn strays(state: &StateDir) -> Vec<Finding> {
    let finding = |number| {
        Finding::repairable(
            &format!("/dev/ublkb{number}"),
            "belongs to a daemon that is dead, and nobody uses it",
            "remove it",
        )
    };
    transport::strays(&mount_ids(state)).into_iter().map(finding).collect()
}

/// How many mounts the kernel still has while no daemon runs.
pub fn mounts_without_daemon(state: &StateDir) -> usize {
    let alive = |id: &MountId| match read_record(state, *id) {
        Ok(record) => is_alive(&record),
        Err(_) => chain::loop_below(&state.mount(*id)).is_some(),
    };
    mount_ids(state).iter().filter(|id| alive(id)).count()
}

fn lost_record(id: MountId, device: &str) -> Finding {
    Finding::bad(
        Level::Problem,
        &format!("mount {id}"),
        format!("is in use on {device}, but its record mount.json cannot be read"),
        "unmount it: data that is not local gives EIO, and nothing but a new mount mends that",
    )
}

/// What killed builds have left in the store: bytes.
fn stale_builds(store: &Path) -> u64 {
    // A store that cannot be looked at is the matter of the commands that use it.
    Directory::open(store).and_then(|store| store.stale_bytes()).unwrap_or(0)
}

fn builds(store: &Path) -> Option<Finding> {
    let stale = stale_builds(store);
    (stale > 0).then(|| Finding {
        repairable: true,
        ..Finding::bad(
            Level::Warning,
            "killed builds",
            format!("left {} KiB in {}", stale.div_ceil(1 << 10), store.join("tmp").display()),
            "remove them (so does `burgeon gc`)",
        )
    })
}

fn orphan_serves(state: &StateDir) -> bool {
    // Only looked at: connecting would make the server believe in a new supervisor.
    let path = state.run().join("adopt.sock");
    let listening = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    // The server bound it through a descriptor of the folder, so only the name's end is known;
    // whether somebody listens is told by the lock that the server holds.
    path.exists()
        && listening.contains("adopt.sock")
        && files::Lock::try_take(&state.run().join("server.lock")).is_ok_and(|lock| lock.is_none())
}

fn kept_writes(state: &StateDir) -> Vec<Finding> {
    let names = match writes::names(state) {
        Ok(names) => names,
        Err(e) => {
            return vec![Finding::bad(Level::Problem, "writes", e.to_string(), "mend that first")];
        }
    };
    let of = |name: &String| [Some(check_writes(state, name)), area::examine(state, name)];
    names.iter().flat_map(of).flatten().collect()
}

/// Whether everything that the writes were made on is still exactly that.
fn check_writes(state: &StateDir, name: &str) -> Finding {
    let subject = format!("writes {name}");
    let problem = |found: String| {
        Finding::bad(
            Level::Problem,
            &subject,
            found,
            "mount them, which makes `seed`, `seed.info` and `map` again from the image; if that fails, \
             restore the folder from a backup: Burgeon never removes it by itself",
        )
    };
    let record = match writes::find(state, name) {
        Ok(Some(record)) => record,
        Ok(None) => return Finding::fine(&subject, "removed meanwhile"),
        Err(e) => return problem(e.to_string()),
    };
    if !record.sprouted {
        // Its mount was killed before it handed anything out; the next one may have been, too,
        // while it took the rest away.
        return Finding::fine(&subject, "nothing is in them: the next mount makes them anew");
    }
    let folder = writes::folder(state, name);
    for (file, digest) in [("seed", record.template_digest), ("map", record.map_digest)] {
        match prepared::digest_file(&folder.join(file)) {
            Ok((found, _)) if found == digest.0 => {}
            Ok(_) => return problem(format!("{} is damaged", folder.join(file).display())),
            Err(e) => return problem(e.to_string()),
        }
    }
    let sprout = record.device.clone().unwrap_or_else(|| folder.join("sprout"));
    if !Path::new(&sprout).exists() {
        return problem(format!("{} is missing", sprout.display()));
    }
    if let Err(e) = writes::check_sprout(&record, &sprout) {
        return problem(e.to_string());
    }
    Finding::fine(&subject, format!("whole, on {}", record.image))
}

#[cfg(test)]
mod tests {
    use super::{Level, examine, repair};
    use crate::state::{
        paths::StateDir,
        writes::{self, Record, tests::record},
    };

    #[test]
    fn a_fresh_directory_has_no_leftovers_and_a_stale_folder_is_one() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        assert!(!repair(&state, Some(&state.store())).unwrap());
        std::fs::create_dir(state.mounts().join("0a1b2c3d")).unwrap();
        let findings = examine(&state, Some(&state.store()));
        let stale: Vec<_> = findings.iter().filter(|finding| finding.repairable).collect();
        assert_eq!(stale.len(), 1, "{findings:?}");
        assert_eq!(stale[0].level, Level::Problem);
        assert!(stale[0].subject.contains("0a1b2c3d"));
    }
    #[test]
    fn writes_that_nobody_has_written_to_may_lack_everything() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        std::fs::create_dir(writes::folder(&state, "b")).unwrap();
        for (sprouted, level) in [(false, Level::Fine), (true, Level::Problem)] {
            writes::publish(&state, &Record { sprouted, ..record("b") }).unwrap();
            let findings = examine(&state, None);
            let found = findings.iter().find(|finding| finding.subject == "writes b").unwrap();
            assert_eq!(found.level, level, "{found:?}");
        }
    }
}
