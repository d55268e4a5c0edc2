//! Counters of disks: bytes that were read and written, the endurance used, and how far each
//! figure can be trusted.
//!
//! ```text
//!   /sys/block ──► kernel ─────────────┐
//!   smartctl ──► report, names ──► survey ──► record, units ──► state (one file), figures
//! ```
//!
//! Invariants: a total never goes down; a figure whose unit is not certain is unknown, never a
//! guess. Held by the tests of `record` and `units`.

mod kernel;
mod names;
mod record;
mod report;
mod smartctl;
mod state;
mod survey;
mod units;

pub use kernel::{KernelDisk, disks};
pub use record::{DiskRecord, DriveTotal, Figures, Observation, Sectors, UnitOrigin};
pub use report::{DriveReport, Figure, REPORT_MAX, Trouble, Unit};
pub use smartctl::Smartctl;
pub use state::{DiskRecords, Locked, STATE_MAX};
pub use survey::{SurveyedDisk, survey};
pub use units::{CANDIDATES, Evidence, UnitMatch, Window};
