//! The files of the configuration: their places, their bounds, and the right to write them.
//!
//! ```text
//!   no place given    /etc/burgeon/config.toml, then /etc/burgeon/config.d/*.toml by name; each may
//!                     be absent
//!   a folder          the same two in it; the folder has to be there
//!   a file            that file, which has to be there
//!   none, or empty    nothing
//! ```
//! Invariants (held by the tests below and `crates/cli/tests/config.rs`): at most [`LEN_MAX`] bytes
//! a file and [`FILES_MAX`] files of `config.d`; root reads no file that another user can write or
//! replace in its folder; nothing but a regular file is read.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, Metadata},
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::{fs::OFlags, process::geteuid};

use super::Problem;

/// The folder of the host's configuration.
const FOLDER: &str = "/etc/burgeon";

/// Longest file, in bytes: hundreds of stores.
const LEN_MAX: u64 = 64 << 10;

/// Most files of `config.d`.
const FILES_MAX: usize = 64;

/// The place of the configuration.
pub(super) enum ConfigPath {
    None,
    /// `/etc/burgeon`
    Host,
    Folder(PathBuf),
    File(PathBuf),
}

/// A file's text.
pub(super) struct Document {
    pub(super) path: PathBuf,
    pub(super) text: String,
    /// The file belongs to the user of this process.
    pub(super) is_own: bool,
}

impl ConfigPath {
    /// The place that the user has `given`; a relative one is below the working directory.
    pub(super) fn new(given: Option<&OsStr>) -> (Self, Vec<Problem>) {
        let Some(given) = given else { return (Self::Host, Vec::new()) };
        if given.is_empty() || given == "none" {
            return (Self::None, Vec::new());
        }
        match std::path::absolute(given) {
            Ok(path) if path.is_dir() => (Self::Folder(path), Vec::new()),
            Ok(path) => (Self::File(path), Vec::new()),
            Err(e) => (Self::None, vec![problem(Path::new(given), format!("cannot find it: {e}"))]),
        }
    }

    /// The place as it can be given to other processes; `None` for that of the host.
    pub(super) fn named(&self) -> Option<OsString> {
        match self {
            Self::Host => None,
            Self::None => Some("none".into()),
            Self::Folder(path) | Self::File(path) => Some(path.into()),
        }
    }

    /// Reads all files, in the order in which they hold; skips those that cannot be read, and
    /// returns the reasons.
    pub(super) fn read(&self) -> (Vec<Document>, Vec<Problem>) {
        let folder = match self {
            Self::None => return Default::default(),
            Self::Host => Path::new(FOLDER),
            Self::Folder(folder) => folder,
            Self::File(file) => {
                return match read(file) {
                    Ok(document) => (vec![document], Vec::new()),
                    Err(e) => (Vec::new(), vec![problem(file, reason(&e, geteuid().is_root()))]),
                };
            }
        };
        let (more, mut problems) = dropped_in(&folder.join("config.d"));
        let mut documents = Vec::new();
        for file in [folder.join("config.toml")].into_iter().chain(more) {
            match read(&file) {
                Ok(document) => documents.push(document),
                // A link that leads nowhere is a mistake.
                Err(e) if is_absent(&e) && file.symlink_metadata().is_err() => {}
                Err(e) => problems.push(problem(&file, reason(&e, geteuid().is_root()))),
            }
        }
        (documents, problems)
    }
}

/// The files `*.toml` of `config.d`, by name. Hidden ones are left out, as editors make them.
fn dropped_in(folder: &Path) -> (Vec<PathBuf>, Vec<Problem>) {
    let listed = fs::read_dir(folder).and_then(|entries| {
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry?.path();
            let is_hidden = path.file_name().is_none_or(|n| n.as_encoded_bytes().starts_with(b"."));
            if path.extension().is_some_and(|extension| extension == "toml") && !is_hidden {
                paths.push(path);
            }
            if paths.len() > FILES_MAX {
                let what = format!("it holds more than {FILES_MAX} files: join some of them");
                return Err(io::Error::other(what));
            }
        }
        paths.sort();
        Ok(paths)
    });
    match listed {
        Ok(paths) => (paths, Vec::new()),
        Err(e) if is_absent(&e) => Default::default(),
        Err(e) => (Vec::new(), vec![problem(folder, reason(&e, geteuid().is_root()))]),
    }
}

fn read(path: &Path) -> io::Result<Document> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    // A FIFO would not answer.
    let mut file = File::options().read(true).custom_flags(flags.bits() as i32).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file: remove it, or name another"));
    }
    if geteuid().is_root() {
        refuse_writers(path, &metadata)?;
    }
    let mut bytes = Vec::new();
    (&mut file).take(LEN_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LEN_MAX {
        let what =
            format!("it is longer than {} KiB: move a part into a file of config.d", LEN_MAX >> 10);
        return Err(io::Error::other(what));
    }
    let text = String::from_utf8(bytes).map_err(|e| {
        let valid = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = 1 + valid.iter().filter(|byte| **byte == b'\n').count();
        io::Error::other(format!("line {line} is not UTF-8: save the file as UTF-8"))
    })?;
    let is_own = metadata.uid() == geteuid().as_raw();
    Ok(Document { path: path.to_owned(), text, is_own })
}

/// Fails if anybody but root can change the open file, or put another one in its place.
fn refuse_writers(path: &Path, metadata: &Metadata) -> io::Result<()> {
    let refuse = |path: &Path, writer: &str, mode: &str| {
        let path = path.display();
        io::Error::other(format!(
            "{writer} can write {path}, and the configuration of root is for root alone: `chown root \
             {path} && chmod {mode} {path}`"
        ))
    };
    if let Some(writer) = writer(metadata.uid(), metadata.mode()) {
        return Err(refuse(path, writer, "go-w"));
    }
    let folder = path.parent().unwrap_or(Path::new("/"));
    let metadata = fs::metadata(folder)?;
    // In a sticky folder, such as /tmp, others cannot replace a file of root.
    let is_sticky = metadata.mode() & 0o1000 != 0;
    let mode = if is_sticky { metadata.mode() & !0o022 } else { metadata.mode() };
    match writer(metadata.uid(), mode) {
        Some(writer) => Err(refuse(folder, writer, "go-w")),
        None => Ok(()),
    }
}

/// The others, besides root, who can write a file of this owner and mode.
fn writer(uid: u32, mode: u32) -> Option<&'static str> {
    match (uid, mode & 0o020, mode & 0o002) {
        (0, 0, 0) => None,
        (0, _, 0) => Some("a group"),
        (0, ..) => Some("every user"),
        _ => Some("another user"),
    }
}

fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

fn reason(error: &io::Error, is_root: bool) -> String {
    match error.kind() {
        io::ErrorKind::Other => error.to_string(),
        io::ErrorKind::PermissionDenied if !is_root => {
            format!("cannot read it: {error}; it holds no secret, so root may `chmod a+r` it")
        }
        _ => format!("cannot read it: {error}"),
    }
}

fn problem(path: &Path, message: String) -> Problem {
    Problem { file: path.to_owned(), line: None, key: None, message }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{ConfigPath, FILES_MAX, LEN_MAX, writer};

    fn said(place: &ConfigPath) -> Vec<String> {
        place.read().1.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn only_root_may_write_the_files_of_root() {
        assert_eq!(writer(0, 0o100644), None);
        assert_eq!(writer(0, 0o100600), None);
        assert_eq!(writer(0, 0o100664), Some("a group"));
        assert_eq!(writer(0, 0o100646), Some("every user"));
        assert_eq!(writer(1000, 0o100644), Some("another user"));
    }

    #[test]
    fn files_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        let place = ConfigPath::Folder(folder.path().to_owned());
        fs::write(&file, "#".repeat(LEN_MAX as usize)).unwrap();
        assert_eq!((place.read().0.len(), said(&place)), (1, Vec::new()));
        fs::write(&file, "#".repeat(LEN_MAX as usize + 1)).unwrap();
        assert!(said(&place)[0].contains("longer than 64 KiB"));
        fs::write(&file, b"# \n\xff").unwrap();
        assert!(said(&place)[0].contains("line 2 is not UTF-8"));
        fs::remove_file(&file).unwrap();
        assert!(said(&place).is_empty());

        fs::create_dir(folder.path().join("config.d")).unwrap();
        for number in 0..=FILES_MAX {
            fs::write(folder.path().join(format!("config.d/{number}.toml")), "").unwrap();
        }
        assert!(said(&place)[0].contains("more than 64 files"));
        fs::remove_file(folder.path().join("config.d/0.toml")).unwrap();
        assert_eq!(place.read().0.len(), FILES_MAX);
    }

    #[test]
    fn a_link_that_leads_nowhere_and_a_folder_are_faults() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        let place = ConfigPath::Folder(folder.path().to_owned());
        std::os::unix::fs::symlink("nowhere", &file).unwrap();
        assert!(said(&place)[0].contains("cannot read it"));
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        assert!(said(&place)[0].contains("not a regular file"));
    }
}
