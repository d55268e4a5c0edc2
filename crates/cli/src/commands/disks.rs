//! `burgeon disks`: counters of this host's disks.

use std::{
    path::Path,
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::status_socket;
use burgeon_disks::{DriveTotal, KernelDisk, Smartctl, SurveyedDisk, UnitOrigin};
use burgeon_metrics::Disks as Published;
use serde_json::json;

use super::{
    Context,
    metrics::{DISKS, publish_and},
};
use crate::{exit, output};

/// A year of the drives' figures.
const YEAR_SECONDS: f64 = 365.25 * 24.0 * 3600.0;

pub(crate) const EXAMPLES: &str = "\
Examples:
  burgeon disks               all disks; as root, with the drives' own figures
  burgeon disks sda nvme0n1
  burgeon disks --json        run it from a timer: it accumulates totals

The drives' own figures need smartctl, of smartmontools.";

#[derive(clap::Args, Debug)]
pub(crate) struct Disks {
    /// Names of disks, such as sda [default: all]
    names: Vec<String>,
}

const NO_SMARTCTL: &str = "smartctl is not installed, so these are the kernel's counters alone: \
    install smartmontools for the drives' own figures and their endurance";

pub(super) fn disks(context: &Context, disks: &Disks) -> Result<ExitCode> {
    let found = named(burgeon_disks::disks(Path::new("/sys/block"))?, &disks.names)?;
    let smartctl = Smartctl::find();
    let folder = context.state.root().join("disks");
    let (mut shown, mut errors) = (Vec::new(), Vec::new());
    for (disk, result) in
        found.iter().zip(burgeon_disks::survey(&found, smartctl.as_ref(), &folder)?)
    {
        match result {
            Ok(disk) => shown.push(disk),
            Err(error) => errors.push((disk.name.clone(), anyhow::Error::from(error))),
        }
    }
    errors.iter().for_each(|(_, error)| exit::say(error));
    if disks.names.is_empty() {
        publish(context.state.root(), &shown)?;
    }
    if context.json {
        let failed: Vec<_> = errors
            .iter()
            .map(|(name, error)| json!({ "name": name, "error": exit::document(error) }))
            .collect();
        let program = smartctl.as_ref().map(|smartctl| &smartctl.program);
        output::print_json(&json!({ "smartctl": program, "disks": shown, "failed": failed }))?;
    } else {
        print(&shown, smartctl.is_some());
    }
    Ok(errors.first().map_or(ExitCode::SUCCESS, |(_, error)| exit::code_of(error)))
}

/// Publishes the counters of all disks for `burgeon metrics`, beside the daemon's status socket.
fn publish(state: &Path, disks: &[SurveyedDisk]) -> Result<()> {
    let folder = status_socket::make_folder(state)?;
    let exported = disks.iter().map(|disk| burgeon_metrics::DiskNow {
        name: disk.name.clone(),
        model: disk.model.clone(),
        serial: disk.serial.clone(),
        wwn: disk.wwn.clone(),
        read_bytes: disk.read_bytes,
        written_bytes: disk.written_bytes,
        life_read_bytes: disk.drive.read.map(|total| total.bytes),
        life_written_bytes: disk.drive.written.map(|total| total.bytes),
        endurance_used_percent: disk.drive.endurance_used_percent,
        endurance_left_seconds: disk.drive.years_left.map(|years| (years * YEAR_SECONDS) as u64),
    });
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let disks = Published { seen_unix_seconds: now.as_secs(), disks: exported.collect() };
    let text = serde_json::to_vec(&disks)?;
    let share = |path: &Path| status_socket::share_with_group(path, 0o640);
    Ok(publish_and(&folder.join(DISKS), &text, 0o600, share)?)
}

/// The disks with these names, or all.
fn named(all: Vec<KernelDisk>, names: &[String]) -> Result<Vec<KernelDisk>> {
    let names: Vec<_> =
        names.iter().map(|name| name.strip_prefix("/dev/").unwrap_or(name)).collect();
    let is_there = |name: &str| all.iter().any(|disk| disk.name == name);
    if let Some(name) = names.iter().find(|name| !is_there(name)) {
        let what = format!("there is no disk {name}: `burgeon disks` lists all disks");
        return Err(Error::new(ErrorKind::NotFound, what).into());
    }
    let is_wanted = |disk: &KernelDisk| names.is_empty() || names.contains(&disk.name.as_str());
    Ok(all.into_iter().filter(is_wanted).collect())
}

fn print(disks: &[SurveyedDisk], has_smartctl: bool) {
    if disks.is_empty() {
        println!("this host has no disks");
        return;
    }
    let heading = [
        "DISK",
        "MODEL",
        "SERIAL",
        "READ",
        "WRITTEN",
        "LIFE READ",
        "LIFE WRITTEN",
        "UNIT",
        "USED",
        "YEARS LEFT",
    ];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(disks.iter().map(row));
    output::table(&rows);
    for disk in disks {
        disk.notes.iter().for_each(|note| println!("{}: {note}", disk.name));
    }
    if !has_smartctl {
        println!("{NO_SMARTCTL}");
    }
}

fn row(disk: &SurveyedDisk) -> Vec<String> {
    let drive = &disk.drive;
    let unknown = |text: Option<String>| text.unwrap_or_else(|| "unknown".to_owned());
    let known = |text: &str| unknown(Some(text.to_owned()).filter(|text| !text.is_empty()));
    let bytes = |total: Option<DriveTotal>| unknown(total.map(|total| output::bytes(total.bytes)));
    let source = drive.written.or(drive.read).map(|total| match total.unit_source {
        UnitOrigin::Standard => "standard".to_owned(),
        UnitOrigin::Name => "name".to_owned(),
        UnitOrigin::Measured => "measured".to_owned(),
    });
    vec![
        disk.name.clone(),
        known(&disk.model),
        known(&disk.serial),
        output::bytes(disk.read_bytes),
        output::bytes(disk.written_bytes),
        bytes(drive.read),
        bytes(drive.written),
        unknown(source),
        unknown(drive.endurance_used_percent.map(|used| format!("{used} %"))),
        unknown(drive.years_left.map(|years| format!("{years:.1}"))),
    ]
}
