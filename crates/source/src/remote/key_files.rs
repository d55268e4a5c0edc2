//! Files with credentials that a setting names and a cloud's library opens by their path, in a
//! process whose files others open.
//!
//! ```text
//!   /home/me/key.json ── opener ──► a copy in memory ──► /proc/self/fd/7, for the library
//!                     ▲─ again every minute: tokens in such files are renewed
//! ```

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
    thread,
    time::Duration,
};

use rustix::fs::MemfdFlags;

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

/// Longest file with credentials.
const LEN_MAX: u64 = 1 << 20;

/// Tokens are valid for some minutes at least, and renewed before they expire.
const RENEWAL: Duration = Duration::from_secs(60);

static COPIES: OnceLock<Mutex<HashMap<PathBuf, File>>> = OnceLock::new();

/// The value for the setting `name`: the path of a copy if it names a file that this process may
/// not open. A file that cannot be opened keeps its path, and the library reports it.
pub(super) fn usable(name: &str, value: String) -> String {
    let path = Path::new(&value);
    if !SETTINGS.contains(&name) || !path.is_absolute() || !opening::is_elsewhere(path) {
        return value;
    }
    match copy(path) {
        Ok(copy) => copy.to_string_lossy().into_owned(),
        Err(error) => {
            tracing::warn!(setting = name, %error, "cannot read the key file of the setting");
            value
        }
    }
}

/// The path of a copy of `path`. It has the same name every time, and is kept.
fn copy(path: &Path) -> io::Result<PathBuf> {
    let bytes = read(path)?;
    let copies = COPIES.get_or_init(|| {
        thread::spawn(renew);
        Mutex::default()
    });
    let mut copies = copies.lock().unwrap_or_else(PoisonError::into_inner);
    let copy = match copies.remove(path) {
        Some(copy) => copy,
        None => rustix::fs::memfd_create("burgeon-credentials", MemfdFlags::CLOEXEC)?.into(),
    };
    write(&copy, &bytes)?;
    let link = link_to(&copy);
    copies.insert(path.to_owned(), copy);
    Ok(link)
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    opened_now(path, Manner::Stored)?.take(LEN_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn write(copy: &File, bytes: &[u8]) -> io::Result<()> {
    copy.write_all_at(bytes, 0)?;
    copy.set_len(bytes.len() as u64)
}

fn renew() {
    loop {
        thread::sleep(RENEWAL);
        let lock = || COPIES.get().map(|all| all.lock().unwrap_or_else(PoisonError::into_inner));
        let paths: Vec<_> = lock().iter().flat_map(|all| all.keys().cloned()).collect();
        for path in paths {
            // Without the lock: it may take long. An unreadable file leaves its copy as it is.
            let Ok(bytes) = read(&path) else { continue };
            if let Some(copy) = lock().as_ref().and_then(|all| all.get(&path)) {
                let _ = write(copy, &bytes);
            }
        }
    }
}
