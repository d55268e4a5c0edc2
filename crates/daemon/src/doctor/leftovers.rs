//! Finds the leftovers of crashes and killed commands: mounts without a daemon, folders of mounts
//! that have ended, ublk devices, and builds.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burgeon_block::{ErrorKind, Result};
use burgeon_source::Directory;

use super::{Finding, Level, machine::is_read_only};
use crate::{
    holder,
    host::backing_devices,
    id::MountId,
    ipc::protocol::DaemonStatus,
    state::{
        files,
        paths::StateDir,
        record::{Transport, mount_ids, read_record},
    },
    transport,
};

/// The leftovers of a dead daemon. While a daemon runs, all of this is in use.
pub(super) fn leftovers(state: &StateDir, runs: &Result<Option<DaemonStatus>>) -> Vec<Finding> {
    if !matches!(runs, Ok(None)) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    if orphan_serves(state) {
        findings.push(without_supervisor());
        return findings;
    }
    let waiting = holder::waiting(state);
    for id in mount_ids(state) {
        let record = read_record(state, id);
        findings.push(match record {
            Ok(record) if record.plain && record.is_alive() => Finding::fine(
                &format!("mount {}", record.target.display()),
                "was let go: the kernel alone serves it",
            ),
            Ok(record) if record.is_alive() => Finding::repairable(
                &format!("mount {}", record.target.display()),
                match record.attach.transport {
                    Transport::Fuse if waiting.contains(&id) => {
                        "has lost its server: readers of data wait for it"
                    }
                    Transport::Fuse | Transport::Rings { .. } => {
                        "has lost its server: data that is not local gives EIO"
                    }
                    Transport::Ublk { .. } => "has lost its server: readers of data wait for it",
                },
                "programs that read it wait or get EIO",
                "start the daemon, which serves it again",
            ),
            _ => match backing_devices::loop_below(&state.mount(id)) {
                Some(device) => lost_record(id, &device),
                None => left_folder(id),
            },
        });
    }
    findings
}

/// ublk devices without a daemon, its folder, and users.
pub(super) fn leftover_devices(state: &StateDir) -> Vec<Finding> {
    let finding = |number| {
        Finding::repairable(
            &format!("/dev/ublkb{number}"),
            "belongs to a daemon that is dead, and nobody uses it",
            "a device number and some memory of the kernel",
            "remove it",
        )
    };
    transport::leftover_devices(&mount_ids(state)).into_iter().map(finding).collect()
}

/// The number of mounts that the kernel still has while no daemon runs.
pub fn mounts_without_daemon(state: &StateDir) -> usize {
    let alive = |id: &MountId| match read_record(state, *id) {
        Ok(record) => record.is_alive(),
        Err(_) => backing_devices::loop_below(&state.mount(*id)).is_some(),
    };
    mount_ids(state).iter().filter(|id| alive(id)).count()
}

/// The places of those that were let go: they need no daemon.
pub fn mounts_let_go(state: &StateDir) -> Vec<PathBuf> {
    let records = mount_ids(state).into_iter().filter_map(|id| read_record(state, id).ok());
    let let_go = records.filter(|record| record.plain && record.is_alive());
    let_go.map(|record| record.target).collect()
}

/// The folder of a mount that is gone; a warning, unless it has left a device, too.
fn left_folder(id: MountId) -> Finding {
    let (level, found) = match transport::devices_of(id).first() {
        None => (Level::Warning, "belongs to a mount that is gone".to_owned()),
        Some(device) => {
            let what = format!("belongs to a mount that is gone; so does /dev/ublkb{device}");
            (Level::Problem, what)
        }
    };
    let (subject, cost) = (format!("folder of mount {id}"), "the space of its files");
    let remedy = "remove it: named writes are kept elsewhere";
    Finding { level, ..Finding::repairable(&subject, found, cost, remedy) }
}

/// Mounts in use that a running daemon does not know, because it cannot read their records.
pub(super) fn lost_records(state: &StateDir) -> Vec<Finding> {
    let lost = |id: MountId| match read_record(state, id) {
        Ok(_) => None,
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(_) => Some(lost_record(id, &backing_devices::loop_below(&state.mount(id))?)),
    };
    mount_ids(state).into_iter().filter_map(lost).collect()
}

fn lost_record(id: MountId, device: &str) -> Finding {
    Finding::bad(
        Level::Problem,
        &format!("mount {id}"),
        format!("is in use on {device}, but its record mount.json cannot be read"),
        "programs that read data which is not local get EIO, or wait if no daemon runs",
        "unmount it and mount it again; if the umount refuses, `burgeon shutdown --force` first",
    )
}

/// Bytes that killed builds have left in the store.
pub(super) fn stale_builds(store: &Path) -> u64 {
    // An unreadable store is reported by the commands that use it.
    Directory::open(store).and_then(|store| store.stale_bytes()).unwrap_or(0)
}

pub(super) fn builds(store: &Path) -> Option<Finding> {
    let stale = stale_builds(store);
    (stale > 0).then(|| Finding {
        repairable: true,
        ..Finding::bad(
            Level::Warning,
            "killed builds",
            format!("left {} KiB in {}", stale.div_ceil(1 << 10), store.join("tmp").display()),
            "their space",
            "remove them (so does `burgeon gc`)",
        )
    })
}

/// The mounts are served, and nobody manages them.
pub(super) fn without_supervisor() -> Finding {
    Finding::repairable(
        "supervisor",
        "was killed; its server goes on serving",
        "nothing can be mounted, unmounted by `burgeon`, or shown, until the next daemon starts",
        "start a supervisor, which takes over; nothing is interrupted",
    )
}

/// True if a server goes on serving whose supervisor is dead.
pub fn orphan_serves(state: &StateDir) -> bool {
    // Never connect: the server would take this for a new supervisor.
    let path = state.run().join("adopt.sock");
    let listening = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    // The server bound it through a descriptor of the folder, so only the end of the name is known;
    // the server's lock tells if a server listens.
    let is_listening = path.exists() && listening.contains("adopt.sock");
    // On a disk that has become read-only no server can listen, and goes on nevertheless.
    (is_listening || is_read_only(state.root()))
        && files::Lock::try_take(&state.run().join("server.lock")).is_ok_and(|lock| lock.is_none())
}
