//! Loop numbers for devices that are written to: made for one device, and removed after it.
//!
//! ```text
//!   /dev/loop0 … loop7        LOOP_CTL_GET_FREE hands the lowest unused number to anybody
//!   /dev/loop16384 …          add ─► attach, discard off, or on ─► detached by its last user ─► remove_unused
//! ```
//!
//! From Linux 6.9 on, 0 in `queue/discard_max_bytes` outlives the detach and cannot be raised
//! again: the next owner of the number would have no discard. Only removing the number cures it. So
//! a device that is to have discard gets a new number, too: an old one may have lost it.
//!
//! Invariants:
//! - Discard is turned off only below numbers of this range, which others get from the kernel only
//!   when every lower number is in use.
//! - Everything unused in the range is a leftover. No record is needed, so a number whose mount and
//!   daemon were killed is removed by the next daemon, of whichever state directory.

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::PathBuf,
};

use burgeon_block::Result;

use crate::sys::{failed, ioctl_number};

const LOOP_CTL_ADD: std::ffi::c_ulong = 0x4C80;
const LOOP_CTL_REMOVE: std::ffi::c_ulong = 0x4C81;

/// The range: above numbers that people choose, and below 65,536, where minor numbers end for a
/// driver that was loaded with 16 partitions a device.
const FIRST: u32 = 16_384;
const END: u32 = 49_152;

/// Opens the control device, which hands out and removes the numbers of loop devices.
pub(crate) fn open_control() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/loop-control")
}

/// Makes a loop device with a number of the range.
pub(crate) fn add(control: &File) -> io::Result<u32> {
    for number in (FIRST..END).filter(|number| !exists(*number)) {
        match ioctl_number(control, LOOP_CTL_ADD, number.into()) {
            // Another process was faster.
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
            added => return added,
        }
    }
    Err(io::Error::from_raw_os_error(libc::ENOSPC))
}

/// Removes the loop devices of the range that have no file; returns how many could not be removed,
/// because a process has them open at this moment.
pub fn remove_unused() -> Result<usize> {
    let unused = unused()?;
    if unused.is_empty() {
        return Ok(0);
    }
    let control = open_control().map_err(|e| failed("cannot open /dev/loop-control", e))?;
    let mut left = 0;
    for number in unused {
        match ioctl_number(&control, LOOP_CTL_REMOVE, number.into()) {
            Ok(_) => remove_node(number),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => left += 1,
            // Another process has removed it.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
            Err(error) => return Err(failed(format!("cannot remove /dev/loop{number}"), error)),
        }
    }
    Ok(left)
}

/// True if there is a loop device of this number.
pub(crate) fn exists(number: u32) -> bool {
    folder(number).exists()
}

fn unused() -> Result<Vec<u32>> {
    let blocks = fs::read_dir("/sys/block").map_err(|e| failed("cannot list /sys/block", e))?;
    let number = |entry: fs::DirEntry| -> Option<u32> {
        entry.file_name().to_str()?.strip_prefix("loop")?.parse().ok()
    };
    let of_the_range = blocks.flatten().filter_map(number).filter(|n| (FIRST..END).contains(n));
    Ok(of_the_range.filter(|number| !folder(*number).join("loop").exists()).collect())
}

/// Removes the number's node: nobody else does so if `/dev` is a plain directory.
fn remove_node(number: u32) {
    if exists(number) {
        return;
    }
    let _ = fs::remove_file(format!("/dev/loop{number}"));
}

fn folder(number: u32) -> PathBuf {
    PathBuf::from(format!("/sys/block/loop{number}"))
}
