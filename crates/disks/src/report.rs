//! The reader of smartctl's JSON: the few figures of it that Burgeon uses.
//!
//! ```text
//!   nvme_smart_health_information_log   data units of 512,000 bytes, by the standard
//!   scsi_error_counter_log              gigabytes processed, with three decimals
//!   ata_device_statistics               logical sectors, by the standard
//!   ata_smart_attributes                a unit by name, or one to be measured
//! ```
//!
//! Invariants: any bytes are refused or give a report, whose strings are short and printable;
//! a field of a wrong type or size is as good as missing. Held by the fuzz target `disks`.

use burgeon_block::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::names::{Direction, NamedUnit, endurance_used, host_counter};

/// The longest output that is read; real ones take up to 100 KB.
pub const REPORT_MAX: usize = 1 << 20;
/// Characters of a model or serial number.
const TEXT_MAX: usize = 64;
/// NVMe base specification: thousands of 512-byte units.
const NVME_DATA_UNIT: u64 = 512_000;
/// smartctl prints gigabytes with three decimals.
const SCSI_UNIT: u64 = 1_000_000;

/// The origin of a counter's unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// A standard defines it: bytes.
    Standard(u64),
    /// The attribute's name contains it: bytes.
    Name(u64),
    /// It has to be measured.
    Unknown,
}

/// A counter of the drive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Figure {
    /// The place of the counter; readings of different places are not comparable.
    pub counter: String,
    /// Its value, in units.
    pub raw: u64,
    /// The unit.
    pub unit: Unit,
    /// True if the counter may be of 32 bits.
    pub may_wrap: bool,
    /// True if the kernel's bytes can disprove the unit.
    pub is_ata: bool,
}

/// The reason for a report without figures.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// The caller may not open the device.
    Denied,
    /// The disk sleeps, and was not woken.
    Standby,
    /// smartctl's own words.
    Other(String),
}

/// The figures of one drive.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DriveReport {
    /// Model, or empty.
    pub model: String,
    /// Serial number, or empty.
    pub serial: String,
    /// Data that hosts have read.
    pub read: Option<Figure>,
    /// Data that hosts have written.
    pub written: Option<Figure>,
    /// Endurance used, in percent; may pass 100.
    pub endurance_used_percent: Option<u64>,
    /// Hours under power.
    pub power_on_hours: Option<u64>,
    /// The reason why figures are missing.
    pub trouble: Option<Trouble>,
}

impl DriveReport {
    /// Reads the output of `smartctl --json`.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let refused = |why: String| {
            Error::new(ErrorKind::Corrupt, format!("smartctl's output is not a report: {why}"))
        };
        if bytes.len() > REPORT_MAX {
            return Err(refused(format!("it is longer than {REPORT_MAX} bytes")));
        }
        let all: Value = serde_json::from_slice(bytes).map_err(|e| refused(e.to_string()))?;
        if !all["smartctl"].is_object() {
            return Err(refused("it has no object \"smartctl\"".to_owned()));
        }
        let mut report = Self {
            model: first_text(&all, &["model_name", "scsi_model_name"]),
            serial: text(&all["serial_number"]),
            read: figure(&all, Direction::Read),
            written: figure(&all, Direction::Written),
            endurance_used_percent: endurance(&all),
            power_on_hours: all["power_on_time"]["hours"].as_u64(),
            trouble: None,
        };
        if report.read.is_none() && report.written.is_none() {
            report.trouble = trouble(&all);
        }
        Ok(report)
    }
}

fn first_text(all: &Value, names: &[&str]) -> String {
    names.iter().map(|name| text(&all[*name])).find(|it| !it.is_empty()).unwrap_or_default()
}

/// A short printable text, or an empty one.
fn text(value: &Value) -> String {
    let printable = |c: &char| c.is_ascii_graphic() || *c == ' ';
    let text: String =
        value.as_str().unwrap_or_default().chars().filter(printable).take(TEXT_MAX).collect();
    text.trim().to_owned()
}

fn figure(all: &Value, direction: Direction) -> Option<Figure> {
    nvme(all, direction)
        .or_else(|| scsi(all, direction))
        .or_else(|| statistics(all, direction))
        .or_else(|| attribute(all, direction))
}

fn nvme(all: &Value, direction: Direction) -> Option<Figure> {
    let field = match direction {
        Direction::Read => "data_units_read",
        Direction::Written => "data_units_written",
    };
    // By the standard, a drive that does not count says 0.
    let raw = all["nvme_smart_health_information_log"][field].as_u64().filter(|raw| *raw > 0)?;
    Some(Figure {
        counter: field.to_owned(),
        raw,
        unit: Unit::Standard(NVME_DATA_UNIT),
        may_wrap: false,
        is_ata: false,
    })
}

fn scsi(all: &Value, direction: Direction) -> Option<Figure> {
    let side = match direction {
        Direction::Read => "read",
        Direction::Written => "write",
    };
    let raw = &all["scsi_error_counter_log"][side]["gigabytes_processed"];
    Some(Figure {
        counter: format!("scsi {side}"),
        raw: thousandths(raw.as_str()?)?,
        unit: Unit::Standard(SCSI_UNIT),
        may_wrap: false,
        is_ata: false,
    })
}

/// "1234.567" in thousandths, without a detour over floating point.
fn thousandths(number: &str) -> Option<u64> {
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(part) {
        return None;
    }
    let part: String = part.chars().chain("000".chars()).take(3).collect();
    whole.parse::<u64>().ok()?.checked_mul(1000)?.checked_add(part.parse().ok()?)
}

/// Entries of all pages of the device statistics.
fn statistic<'a>(all: &'a Value, name: &str) -> Option<&'a Value> {
    let pages = all["ata_device_statistics"]["pages"].as_array()?;
    let mut entries = pages.iter().filter_map(|page| page["table"].as_array()).flatten();
    entries.find(|entry| {
        entry["name"].as_str() == Some(name) && entry["flags"]["valid"].as_bool() == Some(true)
    })
}

fn statistics(all: &Value, direction: Direction) -> Option<Figure> {
    let name = match direction {
        Direction::Read => "Logical Sectors Read",
        Direction::Written => "Logical Sectors Written",
    };
    Some(Figure {
        counter: name.to_owned(),
        raw: statistic(all, name)?["value"].as_u64()?,
        unit: Unit::Standard(logical_block(all)?),
        may_wrap: false,
        is_ata: true,
    })
}

/// 512 unless the drive says 4096; `None` of anything else.
fn logical_block(all: &Value) -> Option<u64> {
    match &all["logical_block_size"] {
        Value::Null => Some(512),
        size => size.as_u64().filter(|size| [512, 4096].contains(size)),
    }
}

fn attribute(all: &Value, direction: Direction) -> Option<Figure> {
    let table = all["ata_smart_attributes"]["table"].as_array()?;
    let named = |entry: &'_ Value| {
        let (id, name) = (entry["id"].as_u64()?, entry["name"].as_str()?);
        let (of, unit) = host_counter(id, name)?;
        (of == direction).then_some((id, unit, entry["raw"]["value"].as_u64()?))
    };
    let unnamed = |entry: &'_ Value| {
        let id = entry["id"].as_u64()?;
        let usual = match direction {
            Direction::Read => 242,
            Direction::Written => 241,
        };
        let is_unnamed = entry["name"].as_str() == Some("Unknown_Attribute");
        let raw = entry["raw"]["value"].as_u64()?;
        (id == usual && is_unnamed).then_some((id, NamedUnit::None, raw))
    };
    let has_high_part =
        |entry: &'_ Value| entry["name"].as_str().is_some_and(|name| name.ends_with("_Expanded"));
    if table.iter().any(has_high_part) {
        return None;
    }
    let mut found: Vec<_> = table.iter().filter_map(named).collect();
    // A unit in the name first, then the usual number.
    found.sort_by_key(|(id, unit, _)| {
        (!matches!(unit, NamedUnit::Bytes(_)), !matches!(id, 241 | 242), *id)
    });
    let (id, unit, raw) = found.into_iter().next().or_else(|| table.iter().find_map(unnamed))?;
    // smartctl calls attribute 241 "Total_LBAs_Written" for drives that it does not know, and for
    // some that it knows (Dell's S3520): those count in the unit that another name tells.
    let in_bytes = |entry: &'_ Value| {
        let (id, name) = (entry["id"].as_u64()?, entry["name"].as_str()?);
        matches!(host_counter(id, name)?.1, NamedUnit::Bytes(_)).then_some(())
    };
    let is_known = all["in_smartctl_database"].as_bool() == Some(true)
        && table.iter().find_map(in_bytes).is_none();
    let unit = match unit {
        NamedUnit::Bytes(bytes) => Unit::Name(bytes),
        NamedUnit::LogicalBlocks if is_known => {
            logical_block(all).map_or(Unit::Unknown, Unit::Name)
        }
        _ => Unit::Unknown,
    };
    Some(Figure { counter: format!("attribute {id}"), raw, unit, may_wrap: true, is_ata: true })
}

fn endurance(all: &Value) -> Option<u64> {
    let attributes = || {
        let table = all["ata_smart_attributes"]["table"].as_array()?;
        table.iter().find_map(|entry| {
            let (id, name) = (entry["id"].as_u64()?, entry["name"].as_str()?);
            endurance_used(id, name, entry["value"].as_u64()?, entry["raw"]["value"].as_u64()?)
        })
    };
    let percent = all["nvme_smart_health_information_log"]["percentage_used"]
        .as_u64()
        .or_else(|| all["scsi_percentage_used_endurance_indicator"].as_u64())
        .or_else(|| statistic(all, "Percentage Used Endurance Indicator")?["value"].as_u64())
        .or_else(|| all["endurance_used"]["current_percent"].as_u64())
        .filter(|percent| *percent <= 255);
    percent.or_else(attributes)
}

fn trouble(all: &Value) -> Option<Trouble> {
    let messages = all["smartctl"]["messages"].as_array()?;
    let said: Vec<String> = messages.iter().map(|message| text(&message["string"])).collect();
    let whole: Vec<&str> = messages.iter().filter_map(|m| m["string"].as_str()).collect();
    let says = |word: &str| whole.iter().any(|text| text.contains(word));
    if says("Permission denied") || says("Operation not permitted") {
        return Some(Trouble::Denied);
    }
    if says("STANDBY") || says("SLEEP") {
        return Some(Trouble::Standby);
    }
    said.into_iter().find(|text| !text.is_empty()).map(Trouble::Other)
}
