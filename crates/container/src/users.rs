//! Users and groups by the files of an image.
//!
//! Invariants: a file is opened within the root, whatever symlinks are in its path; only regular
//! files of at most 1 MiB are read; lines that are not of the format are skipped.

use std::{
    fs::File,
    io::Read,
    os::fd::{AsRawFd, BorrowedFd},
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::{
    fs::{FileType, Mode, OFlags, ResolveFlags, fstat, openat2},
    io::Errno,
};
use serde::{Deserialize, Serialize};

/// Longest file of users or groups.
const FILE_MAX: u64 = 1 << 20;
/// Most groups of a user, as the kernel allows.
const GROUPS_MAX: usize = 65_536;

/// A user of an image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct User {
    /// Number of the user.
    pub uid: u32,
    /// Number of the group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: String,
}

/// The user `text` (`USER[:GROUP]`, each a name or a number; empty for root), as the files in
/// `root` have it.
pub(crate) fn find(root: BorrowedFd<'_>, text: &str) -> Result<User> {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (text, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let number = id(user);
    let passwd = read(root, "etc/passwd")?;
    let found = lines(&passwd).find(|fields| {
        // A name of digits is a number, as for other programs.
        let found = fields.get(2).and_then(|text| id(text));
        found.is_some() && if number.is_some() { found == number } else { fields[0] == user }
    });
    let (uid, gid, name, home) = match &found {
        Some(fields) => {
            let id = |at: usize| fields.get(at).and_then(|text| id(text));
            let home = fields.get(5).filter(|home| home.starts_with('/')).copied();
            (id(2).unwrap_or(0), id(3).unwrap_or(0), Some(fields[0]), home)
        }
        None => {
            let uid = number.ok_or_else(|| missing("user", user, "/etc/passwd"))?;
            (uid, 0, None, None)
        }
    };
    let groups = read(root, "etc/group")?;
    let id_of = |fields: &Vec<&str>| fields.get(2).and_then(|text| id(text));
    let (gid, groups) = match group {
        Some(group) => {
            let by_name = lines(&groups).find(|fields| fields[0] == group);
            let gid = id(group).or_else(|| by_name.as_ref().and_then(id_of));
            (gid.ok_or_else(|| missing("group", group, "/etc/group"))?, Vec::new())
        }
        None => {
            let is_member = |fields: &Vec<&str>| {
                let members = fields.get(3).copied().unwrap_or_default();
                name.is_some_and(|name| members.split(',').any(|member| member == name))
            };
            let of = lines(&groups).filter(is_member).filter_map(|fields| id_of(&fields));
            (gid, of.take(GROUPS_MAX).collect())
        }
    };
    Ok(User { uid, gid, groups, home: home.unwrap_or("/").to_owned() })
}

/// A number of a user or a group. The last one is none: for system calls it means no change.
fn id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

fn missing(kind: &str, name: &str, file: &str) -> Error {
    let shown: String = name.escape_default().take(100).collect();
    let what = format!(
        "the image has no {kind} \"{shown}\" in its {file}: give a user of its own, or a number, \
         with --user"
    );
    Error::new(ErrorKind::NotFound, what)
}

fn lines(text: &str) -> impl Iterator<Item = Vec<&str>> {
    let lines = text.lines().map(|line| line.split(':').collect::<Vec<_>>());
    lines.filter(|fields| fields.len() >= 3 && !fields[0].is_empty())
}

/// The text of the file `path` within `root`; empty if there is none.
fn read(root: BorrowedFd<'_>, path: &str) -> Result<String> {
    let cannot =
        |errno: Errno| Error::io(format!("cannot read /{path} of the image"), errno.into());
    let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    // Opening a FIFO or a device may wait, or do something: the kind is asked about before.
    let found = match openat2(root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), within) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(String::new()),
        found => found.map_err(cannot)?,
    };
    let stat = fstat(&found).map_err(cannot)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        let what = format!("/{path} of the image is not a regular file, so its users are unknown");
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    let failed = |error| Error::io(format!("cannot read /{path} of the image"), error);
    let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(FILE_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_MAX {
        let what = format!("/{path} of the image is larger than 1 MiB, so its users are unknown");
        return Err(Error::new(ErrorKind::OverLimit, what));
    }
    // Names in other encodings are only looked for by nobody.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        os::{fd::AsFd, unix::fs::symlink},
        path::Path,
    };

    use super::{FILE_MAX, User, find};

    fn in_root(root: &Path, user: &str) -> Result<User, String> {
        let root = File::open(root).unwrap();
        find(root.as_fd(), user).map_err(|error| error.to_string())
    }

    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        let passwd = "root:x:0:0::/root:/bin/sh\n:x:1\nbroken\nwww:x:33:34::/srv:\nodd:x:x:1::/:\n\
                      7:x:8:9::/seven:\n";
        fs::write(root.path().join("etc/passwd"), passwd).unwrap();
        let group = "root:x:0:\nweb:x:34:\nmore:x:50:other,www\nlog:x:51:www\nbad:x:y:www\n";
        fs::write(root.path().join("etc/group"), group).unwrap();
        root
    }

    #[test]
    fn names_and_numbers_are_those_of_the_image() {
        let root = root();
        let user = |uid, gid, groups: &[u32], home: &str| {
            Ok(User { uid, gid, groups: groups.to_vec(), home: home.to_owned() })
        };
        for (text, expected) in [
            ("", user(0, 0, &[], "/root")),
            ("www", user(33, 34, &[50, 51], "/srv")),
            ("33", user(33, 34, &[50, 51], "/srv")),
            ("www:root", user(33, 0, &[], "/srv")),
            ("www:1234", user(33, 1234, &[], "/srv")),
            (":more", user(0, 50, &[], "/root")),
            ("4000", user(4000, 0, &[], "/")),
            // Digits are a number, also if a user has them for a name.
            ("7", user(7, 0, &[], "/")),
        ] {
            assert_eq!(in_root(root.path(), text), expected, "{text}");
        }
        for (text, said) in [
            ("nobody", "no user \"nobody\""),
            ("odd", "no user"),
            ("www:none", "no group \"none\""),
            ("4294967295", "no user"),
            ("4294967296", "no user"),
            ("www:4294967295", "no group"),
            ("-1", "no user"),
        ] {
            let error = in_root(root.path(), text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn files_are_read_within_the_root_and_only_regular_ones() {
        let root = root();
        let etc = root.path().join("etc");
        // A host's user must not appear.
        fs::remove_file(etc.join("passwd")).unwrap();
        symlink("/usr/passwd", etc.join("passwd")).unwrap();
        assert!(in_root(root.path(), "daemon").unwrap_err().contains("no user"));
        fs::create_dir(root.path().join("usr")).unwrap();
        fs::write(root.path().join("usr/passwd"), "daemon:x:77:0::/:\n").unwrap();
        assert_eq!(in_root(root.path(), "daemon").unwrap().uid, 77);
        fs::remove_file(etc.join("passwd")).unwrap();
        symlink("../../../../../../../../etc/passwd", etc.join("passwd")).unwrap();
        assert!(in_root(root.path(), "root").is_err(), "it is a loop within the root");
        fs::remove_file(etc.join("passwd")).unwrap();
        let fifo = etc.join("passwd");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, 0o600.into()).unwrap();
        assert!(in_root(root.path(), "root").unwrap_err().contains("not a regular file"));
        fs::remove_file(&fifo).unwrap();
        File::create(&fifo).unwrap().set_len(FILE_MAX + 1).unwrap();
        assert!(in_root(root.path(), "root").unwrap_err().contains("1 MiB"));
        fs::remove_file(&fifo).unwrap();
        assert_eq!(in_root(root.path(), "5").unwrap().uid, 5);
    }
}
