//! The names that smartctl's database gives to attributes of ATA drives.
//!
//! Only names of which every word is known count: `Host_Writes_32MiB` is bytes of the host,
//! `NAND_Writes_1GiB` is not. A name without a unit, or in GB (which vendors use for GiB, too),
//! leaves the unit to be measured.

/// Direction of a counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    Read,
    Written,
}

/// A name's unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NamedUnit {
    Bytes(u64),
    /// The drive's logical blocks. smartctl gives that name to attributes 241 and 242 of drives
    /// that it does not know, too.
    LogicalBlocks,
    None,
}

/// The meaning of the attribute `id` that is called `name`, if it counts data of the host.
pub(crate) fn host_counter(id: u64, name: &str) -> Option<(Direction, NamedUnit)> {
    let words: Vec<String> = name.split('_').map(str::to_ascii_lowercase).collect();
    let (mut direction, mut of_host, mut unit) = (None, false, NamedUnit::None);
    for (index, word) in words.iter().enumerate() {
        match word.as_str() {
            "host" | "user" => of_host = true,
            // Not of the host by themselves, but these two attributes are.
            "total" | "lifetime" => of_host |= matches!(id, 241 | 242 | 246),
            "writes" | "written" | "write" if direction.is_none() => {
                direction = Some(Direction::Written);
            }
            "reads" | "read" if direction.is_none() => direction = Some(Direction::Read),
            "lbas" | "sectors" | "sector" => unit = NamedUnit::LogicalBlocks,
            "gb" | "mb" | "kb" | "tb" => {}
            word if index + 1 == words.len() => unit = NamedUnit::Bytes(binary_unit(word)?),
            _ => return None,
        }
    }
    Some((direction.filter(|_| of_host)?, unit))
}

/// The bytes of "32MiB" or "GiB".
fn binary_unit(word: &str) -> Option<u64> {
    let digits = word.len() - word.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = word.split_at(digits);
    let number = if number.is_empty() { 1 } else { number.parse::<u64>().ok()? };
    let shift = match unit {
        "kib" => 10,
        "mib" => 20,
        "gib" => 30,
        "tib" => 40,
        _ => return None,
    };
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0)
}

/// The endurance used, in percent, by the attribute `id` called `name`, whose normalised `value`
/// falls from 100.
pub(crate) fn endurance_used(id: u64, name: &str, value: u64, raw: u64) -> Option<u64> {
    const REMAINING: &[&str] = &[
        "Percent_Lifetime_Remain",
        "Percent_Lifetime_Used",
        "Percent_Life_Remaining",
        "Remaining_Lifetime_Perc",
        "SSD_Life_Left",
        "SSD_Life_Left_Perc",
    ];
    let used = 100_u64.checked_sub(value).filter(|_| value > 0)?;
    // Of other numbers, and thus vendors, these two names have other meanings.
    let is_known = match name {
        "Media_Wearout_Indicator" => id == 233,
        "Wear_Leveling_Count" => id == 177,
        // The value of some controllers stays at 100 for ever, and only their raw value counts.
        name => REMAINING.contains(&name) && (raw == value || raw == used),
    };
    is_known.then_some(used)
}

#[cfg(test)]
mod tests {
    use super::{Direction::*, NamedUnit::*, endurance_used, host_counter};

    #[test]
    fn only_writes_of_the_host_are_writes_of_the_host() {
        for (id, name, meaning) in [
            (241, "Total_LBAs_Written", Some((Written, LogicalBlocks))),
            (242, "Total_LBAs_Read", Some((Read, LogicalBlocks))),
            (246, "Total_LBAs_Written", Some((Written, LogicalBlocks))),
            (246, "Total_Host_Sector_Write", Some((Written, LogicalBlocks))),
            (225, "Host_Writes_32MiB", Some((Written, Bytes(32 << 20)))),
            (242, "Host_Reads_32MiB", Some((Read, Bytes(32 << 20)))),
            (241, "Host_Writes_GiB", Some((Written, Bytes(1 << 30)))),
            (241, "Lifetime_Writes_GiB", Some((Written, Bytes(1 << 30)))),
            (241, "Total_Writes_GiB", Some((Written, Bytes(1 << 30)))),
            (233, "Total_Writes_GiB", Option::None),
            (175, "Host_Reads_MiB", Some((Read, Bytes(1 << 20)))),
            (241, "Host_Writes", Some((Written, None))),
            (241, "Total_Writes_GB", Some((Written, None))),
            (241, "Unknown_Attribute", Option::None),
            (249, "NAND_Writes_1GiB", Option::None),
            (233, "Flash_Writes_GiB", Option::None),
            (243, "Total_LBAs_Written_Expanded", Option::None),
            (247, "Host_Program_Page_Count", Option::None),
            (1, "Raw_Read_Error_Rate", Option::None),
            (241, "", Option::None),
            (241, "Host_Writes_0MiB", Option::None),
            (241, "Host_Writes_99999999999999999999GiB", Option::None),
        ] {
            assert_eq!(host_counter(id, name), meaning, "{id} {name}");
        }
    }

    #[test]
    fn endurance_comes_from_known_names_and_sane_values() {
        for (id, name, value, raw, used) in [
            (233, "Media_Wearout_Indicator", 97, 0, Some(3)),
            (230, "Media_Wearout_Indicator", 1, 0x1400, Option::None),
            (177, "Wear_Leveling_Count", 99, 17, Some(1)),
            (173, "Wear_Leveling_Count", 99, 17, Option::None),
            (231, "SSD_Life_Left", 88, 88, Some(12)),
            (202, "Percent_Lifetime_Remain", 91, 9, Some(9)),
            (169, "Remaining_Lifetime_Perc", 100, 93, Option::None),
            (231, "SSD_Life_Left", 200, 200, Option::None),
            (231, "SSD_Life_Left", 0, 0, Option::None),
            (231, "Temperature", 50, 50, Option::None),
        ] {
            assert_eq!(endurance_used(id, name, value, raw), used, "{id} {name}");
        }
    }
}
