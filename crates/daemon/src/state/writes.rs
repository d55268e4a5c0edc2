//! Named writes: user data, and the files needed to mount it again.
//!
//! ```text
//!   writes/<name>/
//!     record.json   the record; written last, so a folder without one has nothing of value
//!     template, seed.info, map, manifest   hard links into images/<digest>/: the exact seed
//!     area/         the map of the virtual area, if there is one, and files of mapped images
//!     pins.json     the pins, if any
//!     sprout        the writable device, unless the record names a block device
//! ```
//!
//! A sprout refers to blocks of its seed, so the seed's exact bytes (template and fsid), the
//! address map and the chunks it names live as long as the sprout. Hard links keep them when the
//! image is removed, collected or built anew under its name.
//!
//! Invariants: a record is published only when all files it refers to are durable; one mount at a
//! time holds the lock `writes/<name>.lock`; only [`remove`] removes anything here.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_source::Location;
use serde::{Deserialize, Serialize};

use crate::{
    host::backing_devices,
    id::{DigestText, Fsid},
    state::{
        files::{self, Lock},
        paths::StateDir,
        space,
    },
};

/// The version of [`WritesRecord`] that this program writes and reads.
pub const RECORD_FORMAT: u32 = 1;

/// Longest name, in bytes.
pub const NAME_LEN_MAX: usize = 128;

/// The record of named writes.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct WritesRecord {
    /// [`RECORD_FORMAT`].
    pub format: u32,
    /// The name: that of the folder, whatever the file says. A folder may have been renamed, or
    /// copied beside the original.
    pub name: String,
    /// The image's name when the writes were created.
    pub image: String,
    /// The manifest they are based on.
    pub manifest: DigestText,
    /// The store with the chunks; `None` is the state directory's own.
    pub store: Option<Location>,
    /// The fsid of the seed they are based on.
    pub seed_fsid: Fsid,
    /// BLAKE3 of the seed's template.
    pub template_digest: DigestText,
    /// Length of the template in bytes.
    pub template_len: u64,
    /// BLAKE3 of the address map.
    pub map_digest: DigestText,
    /// Length of the address map in bytes; 0 in early records.
    #[serde(default)]
    pub map_len: u64,
    /// The user's block device, or `None` for the file `sprout`.
    pub device: Option<PathBuf>,
    /// Largest size of the sprout, in bytes.
    pub limit: u64,
    /// The sprout grows up to that.
    pub thin: bool,
    /// False until the sprout has been added to its seed: before that it has no data.
    pub sprouted: bool,
    /// The sprout's own fsid, which identifies its device; `None` in early records.
    #[serde(default)]
    pub sprout_fsid: Option<Fsid>,
    /// Bytes of the virtual area; 0 for none, as in early records.
    #[serde(default)]
    pub virtual_bytes: u64,
}

/// Checks a name: it must be printable and a valid folder name.
pub fn check_name(name: &str) -> Result<()> {
    let good = !name.is_empty()
        && name.len() <= NAME_LEN_MAX
        && !name.starts_with('.')
        && name
            .bytes()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.' | b':'));
    if good && !name.ends_with(".lock") {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Invalid,
        format!(
            "{name:?} is not a valid name for writes: use up to {NAME_LEN_MAX} letters, digits, '-', '_', \
             '.' or ':', not beginning with '.' nor ending with '.lock'"
        ),
    ))
}

/// The folder of `name`.
pub fn folder(state: &StateDir, name: &str) -> PathBuf {
    state.writes().join(name)
}

/// Locks `name` for one mount; `Unavailable` while another has it.
pub fn lock(state: &StateDir, name: &str) -> Result<Lock> {
    check_name(name)?;
    let path = state.writes().join(format!("{name}.lock"));
    Lock::try_take(&path)?.ok_or_else(|| {
        Error::new(
            ErrorKind::Unavailable,
            format!(
                "the writes {name:?} are mounted already: unmount them first, or take another name"
            ),
        )
    })
}

/// Locks `name`, and checks that it is not mounted: a lock ends with its process, a mount does not.
pub(crate) fn take(state: &StateDir, name: &str) -> Result<Lock> {
    let lock = lock(state, name)?;
    match held_on(state, name) {
        None => Ok(lock),
        Some(device) => Err(Error::new(
            ErrorKind::Unavailable,
            format!(
                "the writes {name:?} are mounted on {device}, though no daemon knows of it: unmount \
                 them first, or let `burgeon doctor --repair` find it"
            ),
        )),
    }
}

/// The record of `name`, or `None` if there are no such writes.
pub fn find(state: &StateDir, name: &str) -> Result<Option<WritesRecord>> {
    check_name(name)?;
    let path = folder(state, name).join("record.json");
    match files::read_json::<WritesRecord>(&path) {
        Ok(record) if record.format == RECORD_FORMAT => {
            Ok(Some(WritesRecord { name: name.to_owned(), ..record }))
        }
        Ok(record) => Err(Error::new(
            ErrorKind::UnsupportedFormat,
            format!(
                "the writes {name:?} have format {}, this Burgeon knows {RECORD_FORMAT}: use the version \
                 that made them",
                record.format
            ),
        )),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        // A raised format may not even parse in this version.
        Err(e) => Err(e),
    }
}

/// Publishes a record in place of the previous one.
pub fn publish(state: &StateDir, record: &WritesRecord) -> Result<()> {
    let folder = folder(state, &record.name);
    files::sync_parent(&folder)?;
    files::publish_json(&folder.join("record.json"), record)
}

/// All names, sorted; includes those with an unreadable record.
pub fn names(state: &StateDir) -> Result<Vec<String>> {
    let failed = |e| Error::io(format!("cannot list {}", state.writes().display()), e);
    let mut names = Vec::new();
    for entry in fs::read_dir(state.writes()).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_folder = entry.file_type().map_err(failed)?.is_dir();
        if let (true, Ok(name)) = (is_folder, entry.file_name().into_string())
            && entry.path().join("record.json").exists()
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Removes `name` and all its data. Refused while it is mounted. The sprout is removed first: after
/// a crash the record is still there and can be removed again, so a sprout without a record always
/// means a lost record ([`refuse_lost_record`]).
pub fn remove(state: &StateDir, name: &str) -> Result<()> {
    check_name(name)?;
    let folder = folder(state, name);
    if !folder.join("record.json").exists() {
        return Err(not_found(state, name));
    }
    let _lock = take(state, name)?;
    discard(&folder)
}

/// The device on which the kernel has the sprout of `name` now, independent of any daemon.
fn held_on(state: &StateDir, name: &str) -> Option<String> {
    // An unreadable record names no device; the sprout's own file is sufficient then.
    let own = find(state, name).ok().flatten().and_then(|record| record.device);
    let own = own.filter(|device| is_held(device)).map(|device| device.display().to_string());
    own.or_else(|| backing_devices::loop_on(&folder(state, name).join("sprout")))
}

/// True if the block device is mounted or otherwise claimed.
fn is_held(device: &Path) -> bool {
    use std::os::unix::fs::OpenOptionsExt;
    // On a block device O_EXCL without O_CREAT asks for exclusive use: EBUSY while it is mounted.
    let alone = fs::File::options().read(true).custom_flags(libc::O_EXCL).open(device);
    alone.is_err_and(|error| error.kind() == std::io::ErrorKind::ResourceBusy)
}

/// Removes a folder and its sprout, if any, in an order that is safe against a crash.
pub(crate) fn discard(folder: &Path) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    for file in ["sprout", "record.json"] {
        files::remove_file(&folder.join(file))?;
        files::sync_parent(&folder.join(file))?;
    }
    files::remove_folder(folder)
}

/// Refuses to create `name` over data without a record, as after an incomplete restore.
pub(crate) fn refuse_lost_record(state: &StateDir, name: &str) -> Result<()> {
    let folder = folder(state, name);
    let sprout = folder.join("sprout");
    if folder.join("record.json").exists()
        || !sprout.exists()
        || space::btrfs_on(&sprout)?.is_none()
    {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Corrupt,
        format!(
            "{} holds writes, but their record.json is lost: restore it from a backup, take another \
             name, or remove the folder",
            folder.display()
        ),
    ))
}

/// True if a mount uses `name` now, or is being made.
pub fn is_mounted(state: &StateDir, name: &str) -> Result<bool> {
    check_name(name)?;
    let lock = Lock::try_take(&state.writes().join(format!("{name}.lock")))?;
    Ok(lock.is_none() || held_on(state, name).is_some())
}

/// Refuses a block device with kept writes: a new sprout would destroy them.
pub(crate) fn refuse_device_in_use(state: &StateDir, device: &Path) -> Result<()> {
    let fsid = space::btrfs_on(device)?;
    for name in names(state)? {
        let Ok(Some(record)) = find(state, &name) else { continue };
        let same_path = record.device.as_deref() == Some(device);
        if record.sprouted && (same_path || (fsid.is_some() && record.sprout_fsid == fsid)) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{} holds the writes {name:?}: take another device, or remove them with \
                     `burgeon writes rm {name}`",
                    device.display()
                ),
            ));
        }
    }
    Ok(())
}

/// Refuses a sprout other than the record's: block devices change their names.
pub(crate) fn check_sprout(record: &WritesRecord, sprout: &Path) -> Result<()> {
    let Some(expected) = record.sprout_fsid else { return Ok(()) };
    let found = space::btrfs_on(sprout)?;
    if found == Some(expected) {
        return Ok(());
    }
    let found = found.map_or("no btrfs".to_owned(), |fsid| format!("the btrfs {fsid}"));
    Err(Error::new(
        ErrorKind::Corrupt,
        format!(
            "the writes {:?} are on the btrfs {expected}, but {} holds {found}: find their \
             device with `blkid` and correct `device` in their record.json, or restore them from \
             a backup",
            record.name,
            sprout.display()
        ),
    ))
}

/// Bytes that the sprout of `record` uses on the host.
pub fn reserved(state: &StateDir, record: &WritesRecord) -> u64 {
    match record.device {
        Some(_) => 0,
        None => space::reserved(&folder(state, &record.name).join("sprout")).unwrap_or(0),
    }
}

/// The error for writes that do not exist; it lists those that do.
pub fn not_found(state: &StateDir, name: &str) -> Error {
    let known = names(state).unwrap_or_default();
    let hint = match known.is_empty() {
        true => "this state directory has none".to_owned(),
        false => format!("there are: {}", known.join(", ")),
    };
    Error::new(ErrorKind::NotFound, format!("there are no writes {name:?}; {hint}"))
}

/// Hard-links `file` of a prepared image into a writes folder, replacing a leftover.
pub fn keep(from: &Path, to: &Path) -> Result<()> {
    files::remove_file(to)?;
    fs::hard_link(from, to)
        .map_err(|e| Error::io(format!("cannot keep {} as {}", from.display(), to.display()), e))
}

#[cfg(test)]
pub(crate) mod tests {
    use burgeon_block::{Digest, ErrorKind};

    use super::{
        RECORD_FORMAT, WritesRecord, check_name, check_sprout, find, folder, lock, names, publish,
        refuse_device_in_use, refuse_lost_record, remove,
    };
    use crate::{
        id::{DigestText, Fsid},
        state::paths::StateDir,
    };

    pub(crate) fn record(name: &str) -> WritesRecord {
        let digest = DigestText(Digest::of(b"x"));
        WritesRecord {
            format: RECORD_FORMAT,
            name: name.into(),
            image: "debian:12".into(),
            manifest: digest,
            store: None,
            seed_fsid: Fsid::random().unwrap(),
            template_digest: digest,
            template_len: 1 << 27,
            map_digest: digest,
            map_len: 1,
            device: None,
            limit: 1 << 30,
            thin: false,
            sprouted: true,
            sprout_fsid: None,
            virtual_bytes: 0,
        }
    }

    #[test]
    fn names_are_checked() {
        for bad in ["", ".", "..", ".hidden", "a/b", "a b", "x.lock", "ä", &"n".repeat(129)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        for good in ["b", "ci-42", "debian:12_test.1"] {
            check_name(good).unwrap();
        }
    }

    #[test]
    fn records_are_found_listed_and_removed_but_not_while_mounted() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        assert_eq!(find(&state, "b").unwrap(), None);
        assert_eq!(remove(&state, "b").unwrap_err().kind(), ErrorKind::NotFound);
        std::fs::create_dir(folder(&state, "b")).unwrap();
        std::fs::create_dir(folder(&state, "half-made")).unwrap();
        publish(&state, &record("b")).unwrap();
        assert_eq!(find(&state, "b").unwrap().unwrap().image, "debian:12");
        assert_eq!(names(&state).unwrap(), ["b"]);
        std::fs::rename(folder(&state, "b"), folder(&state, "c")).unwrap();
        assert_eq!(find(&state, "c").unwrap().unwrap().name, "c");
        std::fs::rename(folder(&state, "c"), folder(&state, "b")).unwrap();
        let mounted = lock(&state, "b").unwrap();
        assert!(lock(&state, "b").is_err());
        assert!(remove(&state, "b").unwrap_err().to_string().contains("mounted already"));
        drop(mounted);
        remove(&state, "b").unwrap();
        assert!(!folder(&state, "b").exists());
    }

    /// The start of a device with a btrfs superblock of this fsid.
    fn device(path: &std::path::Path, fsid: Fsid) {
        let mut bytes = vec![0; 70_000];
        bytes[65_568..65_584].copy_from_slice(&fsid.0);
        bytes[65_600..65_608].copy_from_slice(b"_BHRfS_M");
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn a_device_with_kept_writes_is_known_by_path_and_by_content() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(&temp.path().join("state")).unwrap();
        std::fs::create_dir(folder(&state, "b")).unwrap();
        let (a, b) = (temp.path().join("a"), temp.path().join("b"));
        let (ours, other) = (Fsid::random().unwrap(), Fsid::random().unwrap());
        device(&a, other);
        device(&b, ours);
        let record =
            WritesRecord { device: Some(a.clone()), sprout_fsid: Some(ours), ..record("b") };
        publish(&state, &record).unwrap();
        for held in [&a, &b] {
            let error = refuse_device_in_use(&state, held).unwrap_err();
            assert!(error.to_string().contains("writes rm b"), "{error}");
        }
        // The devices have swapped their names: the old one has other contents.
        assert_eq!(check_sprout(&record, &a).unwrap_err().kind(), ErrorKind::Corrupt);
        check_sprout(&record, &b).unwrap();
        let empty = temp.path().join("empty");
        std::fs::write(&empty, "").unwrap();
        refuse_device_in_use(&state, &empty).unwrap();
        assert_eq!(check_sprout(&record, &empty).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn a_sprout_with_a_lost_record_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(&temp.path().join("state")).unwrap();
        let folder = folder(&state, "b");
        std::fs::create_dir(&folder).unwrap();
        // Reserved but unused: a mount was killed.
        std::fs::write(folder.join("sprout"), vec![0; 70_000]).unwrap();
        refuse_lost_record(&state, "b").unwrap();
        device(&folder.join("sprout"), Fsid::random().unwrap());
        let error = refuse_lost_record(&state, "b").unwrap_err();
        assert!(error.to_string().contains("record.json is lost"), "{error}");
        publish(&state, &record("b")).unwrap();
        refuse_lost_record(&state, "b").unwrap();
        remove(&state, "b").unwrap();
        assert!(!folder.exists());
    }

    #[test]
    fn a_later_format_is_refused_by_name() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        std::fs::create_dir(folder(&state, "b")).unwrap();
        publish(&state, &WritesRecord { format: RECORD_FORMAT + 1, ..record("b") }).unwrap();
        assert_eq!(find(&state, "b").unwrap_err().kind(), ErrorKind::UnsupportedFormat);
    }
}
