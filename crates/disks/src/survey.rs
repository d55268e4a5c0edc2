//! A look at all disks: counters, drives, records.

use std::{
    path::Path,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::{
    kernel::KernelDisk,
    record::{DiskRecord, Figures, Observation},
    report::{DriveReport, Figure, Trouble, Unit},
    smartctl::Smartctl,
    state::Locked,
};

/// Drives that are asked at the same time.
const THREADS: usize = 8;

/// One disk with all of its figures.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SurveyedDisk {
    /// Its name now.
    pub name: String,
    /// Model, or empty.
    pub model: String,
    /// Serial number, or empty.
    pub serial: String,
    /// World-wide name, or empty.
    pub wwn: String,
    /// Bytes read by this host, as far as it was seen.
    pub read_bytes: u64,
    /// Bytes written by this host, as far as it was seen.
    pub written_bytes: u64,
    /// The first look, in seconds since 1970; `None` if only the time since the boot is known.
    pub kept_since_unix_seconds: Option<u64>,
    /// The drive's own figures.
    pub drive: Figures,
    /// Hours under power.
    pub power_on_hours: Option<u64>,
    /// Reasons for unknown figures.
    pub notes: Vec<String>,
}

/// Looks at `disks`, asks their drives by `smartctl` without a lock, and then continues the
/// records in `folder`.
pub fn survey(
    disks: &[KernelDisk],
    smartctl: Option<&Smartctl>,
    folder: &Path,
) -> Result<Vec<Result<SurveyedDisk>>> {
    let boot = boot_id()?;
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((index, disk)) = {
            let index = next.fetch_add(1, Relaxed);
            disks.get(index).map(|disk| (index, disk))
        } {
            done.push((index, look(disk, smartctl, &boot)));
        }
        done
    };
    let mut looks: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS.min(disks.len())).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
    });
    looks.sort_by_key(|(index, _)| *index);
    let mut locked = Locked::open(folder)?;
    let state = locked.state();
    let mut result = Vec::new();
    for (index, look) in looks {
        let disk = &disks[index];
        result.push(look.map(|(seen, notes)| match disk.key() {
            Some(key) => shown(disk, state.record(&key), &seen, notes, true),
            None => shown(disk, &mut DiskRecord::default(), &seen, notes, false),
        }));
    }
    locked.publish()?;
    Ok(result)
}

/// One observation, and why it lacks the drive's figures.
fn look(
    disk: &KernelDisk,
    smartctl: Option<&Smartctl>,
    boot: &str,
) -> Result<(Observation, Vec<String>)> {
    let since_boot = clock_gettime(ClockId::Boottime);
    let before = disk.sectors()?;
    let mut notes = Vec::new();
    let drive = smartctl.and_then(|smartctl| match smartctl.ask(&disk.device()) {
        Ok(drive) => Some(drive),
        Err(error) => {
            notes.push(error.to_string());
            None
        }
    });
    notes.extend(drive.as_ref().and_then(|drive| drive.trouble.as_ref()).map(explain));
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seen = Observation {
        boot: boot.to_owned(),
        since_boot_ns: since_boot.tv_sec as u64 * 1_000_000_000 + since_boot.tv_nsec as u64,
        time_s: time.as_secs(),
        appearance: disk.appearance,
        before,
        after: disk.sectors()?,
        drive,
    };
    Ok((seen, notes))
}

fn explain(trouble: &Trouble) -> String {
    match trouble {
        Trouble::Denied => {
            "smartctl needs root: run `burgeon disks` as root, for example with sudo, for the \
             drive's own figures"
                .to_owned()
        }
        Trouble::Standby => "the disk sleeps, and was not woken for its figures".to_owned(),
        Trouble::Other(said) => format!("smartctl: {said}"),
    }
}

fn unit_unknown(figure: &Figure) -> String {
    match figure.unit {
        Unit::Unknown => {
            "the unit of the drive's counter is not certain yet: it is measured between calls, as \
             data is read and written"
        }
        _ => {
            "the unit that the drive's counter should have contradicts the kernel's counters or the \
             drive's hours, so its total is unknown"
        }
    }
    .to_owned()
}

fn shown(
    disk: &KernelDisk,
    record: &mut DiskRecord,
    seen: &Observation,
    mut notes: Vec<String>,
    is_kept: bool,
) -> SurveyedDisk {
    let figures = record.observe(seen);
    let drive = seen.drive.clone().unwrap_or_default();
    let DriveReport { read, written, power_on_hours, .. } = &drive;
    let sides = [(read, figures.read), (written, figures.written)];
    let unknown = sides.iter().filter(|(_, total)| total.is_none());
    notes.extend(unknown.filter_map(|(figure, _)| figure.as_ref()).next().map(unit_unknown));
    if !is_kept {
        notes.push(
            "the disk has no WWN and no serial number of its own: its counters begin at the boot"
                .to_owned(),
        );
    }
    let either = |one: &str, other: &str| if one.is_empty() { other } else { one }.to_owned();
    SurveyedDisk {
        name: disk.name.clone(),
        model: either(&drive.model, &disk.model),
        serial: either(&drive.serial, &disk.serial),
        wwn: disk.wwn.clone(),
        read_bytes: record.read_bytes,
        written_bytes: record.written_bytes,
        kept_since_unix_seconds: is_kept.then_some(record.first_s),
        drive: figures,
        power_on_hours: *power_on_hours,
        notes,
    }
}

fn boot_id() -> Result<String> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let failed = |e| Error::io(format!("cannot read {PATH}"), e);
    let id = std::fs::read_to_string(PATH).map_err(failed)?.trim().to_owned();
    match id.is_empty() {
        true => Err(Error::new(ErrorKind::LocalIo, format!("{PATH} is empty"))),
        false => Ok(id),
    }
}
