//! Files with credentials that a setting names and a cloud's library opens by their path, in a
//! process whose files others open.
//!
//! ```text
//!   /home/me/key.json ── opener ──► a copy in memory ──► /proc/self/fd/7, for the library
//!                     ▲─ again every minute: tokens in such files are renewed
//! ```
//!
//! Invariants: a copy never changes, because it is sealed. A renewed one takes over the number of
//! the old one, so the library reads either of them, never a mixture (`tests`).

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read, Write},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::{
    fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, memfd_create},
    io::{DupFlags, dup3},
};

use crate::{
    beneath::link_to,
    opening::{self, Manner, opened_now},
};

/// Settings whose value is a path, in lower case.
const SETTINGS: [&str; 7] = [
    "aws_container_authorization_token_file",
    "aws_web_identity_token_file",
    "azure_federated_token_file",
    "azure_identity_token_file",
    "google_application_credentials",
    "google_service_account",
    "google_service_account_path",
];

/// The absolute path that the setting `name` names, if its value is one.
pub(crate) fn named<'a>(name: &str, value: &'a str) -> Option<&'a Path> {
    let path = Path::new(value);
    (SETTINGS.contains(&name) && path.is_absolute()).then_some(path)
}

/// Longest file with credentials.
const LEN_MAX: u64 = 1 << 20;

/// Tokens are valid for some minutes at least, and renewed before they expire.
const RENEWAL: Duration = Duration::from_secs(60);

static COPIES: OnceLock<Copies> = OnceLock::new();

/// The value for the setting `name`: the path of a copy if it names a file that this process may
/// not open. A file that cannot be opened keeps its path, and the library reports it.
pub(super) fn usable(name: &str, value: String) -> String {
    let Some(path) = named(name, &value).filter(|path| opening::is_elsewhere(path)) else {
        return value;
    };
    match copies().path_of_copy(path) {
        Ok(copy) => copy.to_string_lossy().into_owned(),
        Err(error) => {
            tracing::warn!(setting = name, %error, "cannot read the key file of the setting");
            value
        }
    }
}

/// The setting of Google's library for its default file, if others open that for this process.
pub(super) fn google_default() -> Option<(String, String)> {
    copied_for_google(&default_file_of_google()?)
}

fn copied_for_google(path: &Path) -> Option<(String, String)> {
    if !opening::is_elsewhere(path) {
        return None;
    }
    match copies().path_of_copy(path) {
        Ok(copy) => {
            let setting = "google_application_credentials".to_owned();
            Some((setting, copy.to_string_lossy().into_owned()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!(file = %path.display(), %error, "cannot read Google's default credentials");
            None
        }
    }
}

/// The file that Google's tools keep for this user, whether or not it exists.
pub fn default_file_of_google() -> Option<PathBuf> {
    Some(std::env::home_dir()?.join(".config/gcloud/application_default_credentials.json"))
}

/// Refuses a file of the setting `name` that the library would wait for, such as a FIFO.
pub(super) fn check(name: &str, value: &str) -> Result<()> {
    let path = named(name, value).filter(|path| !opening::is_elsewhere(path));
    match path.map(|path| (path, path.metadata())) {
        Some((path, Ok(metadata))) if !metadata.is_file() => {
            let (name, path) = (name.to_ascii_uppercase(), path.display());
            let what = format!(
                "{name} names {path}, which is not a regular file: name the file with the key"
            );
            Err(Error::new(ErrorKind::Invalid, what))
        }
        _ => Ok(()),
    }
}

fn copies() -> &'static Copies {
    COPIES.get_or_init(|| {
        thread::spawn(renew);
        Copies::default()
    })
}

fn renew() {
    loop {
        thread::sleep(RENEWAL);
        if let Some(copies) = COPIES.get() {
            copies.renew();
        }
    }
}

/// The copies, by the path of the original. They are kept as long as this process lives.
#[derive(Default)]
struct Copies(Mutex<HashMap<PathBuf, OwnedFd>>);

impl Copies {
    /// Copies `path` anew. The copy's own path is the same every time.
    fn path_of_copy(&self, path: &Path) -> io::Result<PathBuf> {
        let new = copy_of(path)?;
        let mut copies = self.lock();
        if let Some(copy) = copies.get_mut(path) {
            dup3(&new, copy, DupFlags::CLOEXEC)?;
            return Ok(link_to(copy));
        }
        let link = link_to(&new);
        copies.insert(path.to_owned(), new);
        Ok(link)
    }

    /// Copies all files anew. An unreadable file keeps its copy.
    fn renew(&self) {
        let paths: Vec<_> = self.lock().keys().cloned().collect();
        for path in paths {
            // Without the lock: it may take long.
            let _ = self.path_of_copy(&path);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A sealed copy in memory that only this user may read.
fn copy_of(path: &Path) -> io::Result<OwnedFd> {
    let mut bytes = Vec::new();
    opened_now(path, Manner::Stored)?.take(LEN_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LEN_MAX {
        let what = format!("{} is longer than {LEN_MAX} bytes", path.display());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut copy = File::from(memfd_create("burgeon-credentials", flags)?);
    copy.write_all(&bytes)?;
    fchmod(&copy, Mode::RUSR)?;
    fcntl_add_seals(
        &copy,
        SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL,
    )?;
    Ok(copy.into())
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        io::{self, Read},
        os::unix::fs::MetadataExt,
        path::Path,
    };

    use super::{Copies, LEN_MAX, check, copied_for_google, usable};
    use crate::opening::{Manner, Opener, Opening, open_checked, open_files_by};

    #[test]
    fn a_copy_has_the_content_of_the_file_at_its_last_renewal() {
        let temp = tempfile::tempdir().unwrap();
        let (copies, [a, b]) = (Copies::default(), ["a", "b"].map(|name| temp.path().join(name)));
        fs::write(&a, "a long first token").unwrap();
        fs::write(&b, "other").unwrap();
        let [copy, other] = [&a, &b].map(|path| copies.path_of_copy(path).unwrap());
        let mut reader = File::open(&copy).unwrap();
        fs::write(&a, "a short one").unwrap();
        assert_eq!(fs::read_to_string(&copy).unwrap(), "a long first token");
        copies.renew();
        assert_eq!(fs::read_to_string(&copy).unwrap(), "a short one");
        assert_eq!(fs::read_to_string(&other).unwrap(), "other");
        // An open reader keeps the old one, whole.
        let mut read = String::new();
        reader.read_to_string(&mut read).unwrap();
        assert_eq!(read, "a long first token");
        assert_eq!(copies.path_of_copy(&a).unwrap(), copy, "its path stays");
        assert_eq!(copies.lock().len(), 2);
    }

    #[test]
    fn a_file_that_is_gone_or_too_long_keeps_its_copy_and_a_new_one_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let (copies, path) = (Copies::default(), temp.path().join("token"));
        let kind = |result: io::Result<_>| result.map(drop).unwrap_err().kind();
        assert_eq!(kind(copies.path_of_copy(&path)), io::ErrorKind::NotFound);
        fs::write(&path, vec![b'x'; LEN_MAX as usize]).unwrap();
        let copy = copies.path_of_copy(&path).unwrap();
        fs::write(&path, vec![b'y'; LEN_MAX as usize + 1]).unwrap();
        assert_eq!(kind(copies.path_of_copy(&path)), io::ErrorKind::FileTooLarge);
        copies.renew();
        fs::remove_file(&path).unwrap();
        copies.renew();
        assert_eq!(fs::read(&copy).unwrap(), vec![b'x'; LEN_MAX as usize]);
    }

    #[test]
    fn a_copy_is_for_this_user_alone_and_never_changes() {
        let temp = tempfile::tempdir().unwrap();
        let (copies, path) = (Copies::default(), temp.path().join("token"));
        fs::write(&path, "token").unwrap();
        let copy = copies.path_of_copy(&path).unwrap();
        assert_eq!(fs::metadata(&copy).unwrap().mode() & 0o777, 0o400);
        // Root may open it for writing, and cannot write.
        let written = File::options().write(true).open(&copy).and_then(|file| file.set_len(0));
        assert!(written.is_err());
        assert_eq!(fs::read_to_string(&copy).unwrap(), "token");
    }

    #[test]
    fn a_setting_that_names_no_regular_file_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let (fifo, file) = (temp.path().join("fifo"), temp.path().join("key.json"));
        let (mode, kind) = (rustix::fs::Mode::from_raw_mode(0o600), rustix::fs::FileType::Fifo);
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, mode, 0).unwrap();
        fs::write(&file, "key").unwrap();
        let (name, text) = ("google_service_account", |path: &Path| path.display().to_string());
        let error = check(name, &text(&fifo)).unwrap_err().to_string();
        assert!(error.starts_with("GOOGLE_SERVICE_ACCOUNT names "), "{error}");
        check(name, &text(&file)).unwrap();
        check(name, &text(&temp.path().join("missing"))).unwrap();
        check("aws_region", &text(&fifo)).unwrap();
    }

    /// Folders with this in their name are opened elsewhere.
    const ELSEWHERE: &str = "opened-elsewhere";

    struct Elsewhere;

    impl Opener for Elsewhere {
        fn is_for(&self, path: &Path) -> bool {
            path.to_string_lossy().contains(ELSEWHERE)
        }

        fn open(&self, path: &Path, manner: Manner) -> Opening {
            Box::pin(std::future::ready(open_checked(path, manner)))
        }
    }

    #[test]
    fn settings_that_name_files_of_others_get_the_path_of_a_copy() {
        open_files_by(Elsewhere);
        let temp = tempfile::Builder::new().prefix(ELSEWHERE).tempdir().unwrap();
        let (own, name) = (tempfile::NamedTempFile::new().unwrap(), "google_service_account");
        let path = temp.path().join("key.json");
        fs::write(&path, "key").unwrap();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let used = usable(name, text(&path));
        assert!(used.starts_with("/proc/self/fd/"), "{used}");
        assert_eq!(fs::read_to_string(used).unwrap(), "key");
        for (name, value) in [
            ("aws_secret_access_key", text(&path)),
            (name, text(own.path())),
            (name, format!("{ELSEWHERE}/key.json")),
            (name, text(&temp.path().join("none.json"))),
        ] {
            assert_eq!(usable(name, value.clone()), value);
        }
        let (setting, used) = copied_for_google(&path).unwrap();
        assert_eq!(
            (&*setting, fs::read_to_string(used).unwrap()),
            ("google_application_credentials", "key".into())
        );
        assert_eq!(copied_for_google(own.path()), None);
        assert_eq!(copied_for_google(&temp.path().join("none.json")), None);
    }
}
