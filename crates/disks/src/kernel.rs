//! The kernel's disks and their counters, from /sys.
//!
//! A disk is known by its WWN and serial number as the kernel tells them, which needs neither root
//! nor smartctl and holds whatever the disk is called. Disks that share both (the paths of one
//! disk, or adapters whose serial number is all the same) have no identity, and no kept totals.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};

use crate::record::Sectors;

/// The longest attribute that is read.
const ATTRIBUTE_MAX: u64 = 4096;
/// The longest part of an identity.
const ID_MAX: usize = 128;
/// Disks that are looked at.
const DISKS_MAX: usize = 512;

/// A disk of the kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelDisk {
    /// Its name now, such as sda.
    pub name: String,
    /// The model, or empty.
    pub model: String,
    /// World-wide name, or empty.
    pub wwn: String,
    /// Serial number, or empty.
    pub serial: String,
    /// The number of its appearance; `None` if a change of the medium counts as one, too.
    pub appearance: Option<u64>,
    folder: PathBuf,
}

impl KernelDisk {
    /// The identity, if the disk has one.
    pub fn key(&self) -> Option<String> {
        let is_known = !self.wwn.is_empty() || !self.serial.is_empty();
        is_known.then(|| format!("{}|{}", self.wwn, self.serial))
    }

    /// The counters now.
    pub fn sectors(&self) -> Result<Sectors> {
        let path = self.folder.join("stat");
        let failed = || {
            let what = format!("cannot read {}: is the disk {} gone?", path.display(), self.name);
            Error::new(ErrorKind::NotFound, what)
        };
        let text = text(&path).ok_or_else(failed)?;
        sectors(&text).ok_or_else(failed)
    }

    /// The device file.
    pub fn device(&self) -> PathBuf {
        // The kernel writes the slash of a name as an exclamation mark.
        Path::new("/dev").join(self.name.replace('!', "/"))
    }
}

/// Sectors read and written: the third and the seventh number.
fn sectors(stat: &str) -> Option<Sectors> {
    let mut numbers = stat.split_ascii_whitespace().map(|number| number.parse().ok());
    Some(Sectors { read: numbers.nth(2)??, written: numbers.nth(3)?? })
}

/// The disks below `block` (/sys/block), by name: not partitions, and no devices that the kernel
/// makes of others (loop, dm, md, zram), as their data is counted at the disks.
pub fn disks(block: &Path) -> Result<Vec<KernelDisk>> {
    let failed = |e| Error::io(format!("cannot list {}", block.display()), e);
    let mut disks = Vec::new();
    for entry in fs::read_dir(block).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-!.".contains(c);
        if !name.chars().all(is_plain) || name.starts_with('.') || name.contains("..") {
            continue;
        }
        disks.extend(disk(&entry.path(), name));
    }
    disks.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
    disks.truncate(DISKS_MAX);
    forget_shared_identities(&mut disks);
    Ok(disks)
}

fn disk(folder: &Path, name: String) -> Option<KernelDisk> {
    let attribute = |name: &str| text(&folder.join(name)).unwrap_or_default();
    let is_disk = folder.join("device").exists()
        && attribute("hidden") != "1"
        // A drive for CDs, and a floppy drive.
        && attribute("device/type") != "5"
        && !name.starts_with("fd");
    if !is_disk {
        return None;
    }
    let first = |names: &[&str]| {
        names.iter().map(|name| plain(&attribute(name))).find(|text| !text.is_empty())
    };
    let serial = first(&["serial", "device/serial"]).or_else(|| page_80(folder));
    let is_removable = attribute("removable") == "1";
    Some(KernelDisk {
        model: first(&["device/model"]).unwrap_or_default(),
        wwn: first(&["wwid", "device/wwid"]).unwrap_or_default(),
        serial: serial.unwrap_or_default(),
        appearance: attribute("diskseq").parse().ok().filter(|_| !is_removable),
        folder: folder.to_owned(),
        name,
    })
}

/// The serial number that SCSI and ATA disks tell: a header of four bytes, then text.
fn page_80(folder: &Path) -> Option<String> {
    let page = bytes(&folder.join("device/vpd_pg80"))?;
    let text = plain(&String::from_utf8_lossy(page.get(4..)?));
    (!text.is_empty()).then_some(text)
}

fn forget_shared_identities(disks: &mut [KernelDisk]) {
    let mut counts = BTreeMap::new();
    for disk in disks.iter() {
        *counts.entry(disk.key()).or_insert(0) += 1;
    }
    for disk in disks.iter_mut().filter(|disk| counts[&disk.key()] > 1) {
        disk.wwn.clear();
        disk.serial.clear();
    }
}

fn plain(text: &str) -> String {
    let text: String =
        text.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').take(ID_MAX).collect();
    text.split_ascii_whitespace().collect::<Vec<_>>().join(" ")
}

fn bytes(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(ATTRIBUTE_MAX).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

fn text(path: &Path) -> Option<String> {
    Some(String::from_utf8_lossy(&bytes(path)?).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::disks;
    use crate::record::Sectors;

    fn make(block: &Path, name: &str, attributes: &[(&str, &str)]) {
        for (attribute, value) in attributes {
            let path = block.join(name).join(attribute);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, value).unwrap();
        }
    }

    const STAT: &str =
        "  238096 49561 25618290 377046 69742 132339 115791040 1087040 0 5 1473475\n";

    #[test]
    fn disks_are_found_with_their_identity_and_counters() {
        let block = tempfile::tempdir().unwrap();
        let block = block.path();
        make(
            block,
            "sda",
            &[
                ("stat", STAT),
                ("device/wwid", "naa.5002538e40a1b2c3\n"),
                ("device/vpd_pg80", "\0\u{1}\0\u{4}S3Z8 \n"),
                ("device/model", "Samsung SSD 860 \n"),
                ("diskseq", "9\n"),
                ("removable", "0\n"),
            ],
        );
        make(block, "sdaa", &[("stat", STAT), ("device/type", "0")]);
        make(block, "sdb", &[("device/wwid", "t10.x"), ("removable", "1"), ("diskseq", "3")]);
        make(block, "nvme0n1", &[("wwid", "eui.1"), ("device/serial", "N1"), ("device/x", "")]);
        make(block, "nvme0c0n1", &[("hidden", "1\n"), ("device/x", "")]);
        make(block, "sr0", &[("device/type", "5\n")]);
        make(block, "loop0", &[("stat", STAT)]);
        let found = disks(block).unwrap();
        let names: Vec<_> = found.iter().map(|disk| disk.name.as_str()).collect();
        assert_eq!(names, ["sda", "sdb", "sdaa", "nvme0n1"]);
        assert_eq!(found[0].key().unwrap(), "naa.5002538e40a1b2c3|S3Z8");
        assert_eq!((found[0].appearance, found[1].appearance), (Some(9), None));
        assert_eq!(found[0].model, "Samsung SSD 860");
        let counted = Sectors { read: 25_618_290, written: 115_791_040 };
        assert_eq!(found[0].sectors().unwrap(), counted);
        assert!(found[1].sectors().is_err());
        assert_eq!(found[2].key(), None);
        assert_eq!(found[3].key().unwrap(), "eui.1|N1");
    }

    #[test]
    fn disks_that_share_an_identity_have_none() {
        let block = tempfile::tempdir().unwrap();
        for name in ["sda", "sdb"] {
            make(block.path(), name, &[("device/wwid", "naa.5"), ("stat", STAT)]);
        }
        make(block.path(), "sdc", &[("device/wwid", "naa.6")]);
        let keys: Vec<_> = disks(block.path()).unwrap().iter().map(|disk| disk.key()).collect();
        assert_eq!(keys, [None, None, Some("naa.6|".to_owned())]);
    }
}
