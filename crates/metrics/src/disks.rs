//! The counters of disks, as `burgeon disks` has last published them.

use serde::{Deserialize, Serialize};

/// Disks that are exported.
pub const DISKS_MAX: usize = 24;

/// The file with them.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
#[serde(default)]
pub struct Disks {
    /// The time of the survey, in seconds since 1970.
    pub seen_unix_seconds: u64,
    /// The disks.
    pub disks: Vec<DiskNow>,
}

/// A disk. Bytes of the drive's life are missing if their unit is not certain.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
#[serde(default)]
pub struct DiskNow {
    /// Its name now.
    pub name: String,
    /// Model, or empty.
    pub model: String,
    /// Serial number, or empty.
    pub serial: String,
    /// World-wide name, or empty.
    pub wwn: String,
    /// Bytes read by this host.
    pub read_bytes: u64,
    /// Bytes written by this host.
    pub written_bytes: u64,
    /// Bytes read over the drive's life.
    pub life_read_bytes: Option<u64>,
    /// Bytes written over the drive's life.
    pub life_written_bytes: Option<u64>,
    /// Endurance used, in percent.
    pub endurance_used_percent: Option<u64>,
    /// Time until the endurance is used at the present rate, in seconds.
    pub endurance_left_seconds: Option<u64>,
}
