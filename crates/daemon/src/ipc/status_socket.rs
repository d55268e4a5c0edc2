//! The status socket: a snapshot for metrics, to each process that connects.
//!
//! ```text
//!   supervisor ── one message: a snapshot ──► burgeon metrics (group burgeon, no privileges)
//!              ◄── nothing: it reads no byte
//! ```
//!
//! Invariant: nobody but root and the group can connect (mode 0660).

use std::{
    fs::{self, DirBuilder, OpenOptions, Permissions},
    io::{self, Read},
    net::Shutdown,
    os::unix::{
        fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_metrics::MetricsSnapshot;
use rustix::fs::OFlags;

use super::{silence::is_readable, wire};
use crate::state::paths::StateDir;

/// The group whose processes may read the status.
pub const GROUP: &str = "burgeon";

/// The folder of the default state directory's socket: others cannot enter the state directory.
const PUBLIC: &str = "/run/burgeon";

/// The default state directory of root.
const DEFAULT_STATE: &str = "/var/lib/burgeon";

const NAME: &str = "status.sock";

/// The longest list of groups that is read.
const GROUPS_MAX: u64 = 1 << 20;

/// Time limit for the daemon's answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// The folder of the socket, and of what else is published for metrics.
pub fn folder(state: &Path) -> PathBuf {
    match state == Path::new(DEFAULT_STATE) {
        true => PathBuf::from(PUBLIC),
        false => state.join("run"),
    }
}

/// The path of the socket of the daemon of `state`.
pub fn path(state: &Path) -> PathBuf {
    folder(state).join(NAME)
}

/// Makes the folder, which everybody may enter if it is the public one.
pub fn make_folder(state: &Path) -> Result<PathBuf> {
    let folder = folder(state);
    let failed = |e| Error::io(format!("cannot make {}", folder.display()), e);
    if folder == Path::new(PUBLIC) {
        match DirBuilder::new().mode(0o755).create(&folder) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed(e)),
            _ => fs::set_permissions(&folder, Permissions::from_mode(0o755)).map_err(failed)?,
        }
    }
    Ok(folder)
}

/// Lets the group, if there is one, and nobody else but the owner, use the file at `path`.
pub fn share_with_group(path: &Path, mode: u32) -> Result<()> {
    let failed = |e: io::Error| Error::io(format!("cannot share {}", path.display()), e);
    if let Some(group) = group().filter(|_| rustix::process::geteuid().is_root()) {
        std::os::unix::fs::chown(path, None, Some(group)).map_err(failed)?;
    }
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)
}

/// The number of the group in `/etc/group`: other sources of groups are programs of others.
fn group() -> Option<u32> {
    let file = OpenOptions::new().read(true).open("/etc/group").ok()?;
    let mut text = String::new();
    file.take(GROUPS_MAX).read_to_string(&mut text).ok()?;
    group_in(&text)
}

fn group_in(text: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_ours = fields.next() == Some(GROUP);
        is_ours.then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

/// Listens. The caller holds the state directory's lock, so nobody else does.
pub(crate) fn bind(state: &StateDir) -> Result<UnixListener> {
    let folder = make_folder(state.root())?;
    let failed = |e| Error::io(format!("cannot listen on {}", folder.join(NAME).display()), e);
    // By a descriptor: the path may be longer than a socket's.
    let opened = fs::File::open(&folder).map_err(failed)?;
    let path = burgeon_source::beneath::link_to(&opened).join(NAME);
    match fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    // The process's umask lets nobody else connect before the next step.
    let listener = UnixListener::bind(&path).map_err(failed)?;
    share_with_group(&path, 0o660)?;
    Ok(listener)
}

/// Asks the daemon behind the socket `path`; `NotFound` if none listens there. The listener must be
/// root or this user.
pub fn ask(path: &Path) -> Result<MetricsSnapshot> {
    let shown = path.display();
    let parent = path.parent().unwrap_or(Path::new("/"));
    // Its names need not be readable.
    let flags = (OFlags::PATH | OFlags::DIRECTORY).bits() as i32;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(parent);
    let opened = opened.map_err(|e| Error::io(format!("cannot reach {shown}"), e))?;
    let name = path.file_name().unwrap_or_default();
    let stream = UnixStream::connect(burgeon_source::beneath::link_to(&opened).join(name));
    let stream = stream.map_err(|e| match e.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => {
            let what = format!(
                "no daemon listens on {shown}: `burgeon mount` starts it, and `burgeon upgrade` \
                 replaces one of an earlier version"
            );
            Error::with_source(ErrorKind::NotFound, what, e)
        }
        io::ErrorKind::PermissionDenied => {
            let what = format!(
                "{shown} is for root and the group {GROUP}: add this user to the group, or run \
                 burgeon-metrics.service"
            );
            Error::with_source(ErrorKind::Invalid, what, e)
        }
        _ => Error::io(format!("cannot connect to {shown}"), e),
    })?;
    let failed = |e| Error::io(format!("cannot use {shown}"), e);
    let peer = rustix::net::sockopt::socket_peercred(&stream).map_err(|e| failed(e.into()))?;
    if !peer.uid.is_root() && peer.uid != rustix::process::geteuid() {
        let what = format!("a process of uid {} listens on {shown}: end it", peer.uid.as_raw());
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    stream.set_read_timeout(Some(ANSWER_MAX)).map_err(failed)?;
    stream.shutdown(Shutdown::Write).map_err(failed)?;
    if !is_readable(&stream, ANSWER_MAX).map_err(failed)? {
        let what = format!(
            "the daemon of {shown} does not answer within {} s: `burgeon health` tells more",
            ANSWER_MAX.as_secs()
        );
        return Err(Error::new(ErrorKind::Unavailable, what));
    }
    let received = wire::receive::<MetricsSnapshot>(&stream)?;
    let ended = || Error::new(ErrorKind::Unavailable, format!("the daemon of {shown} is ending"));
    received.map(|(snapshot, _)| snapshot).ok_or_else(ended)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{group_in, path};

    #[test]
    fn only_the_default_directory_has_a_public_socket() {
        assert_eq!(path(Path::new("/var/lib/burgeon")), Path::new("/run/burgeon/status.sock"));
        assert_eq!(path(Path::new("/srv/b")), Path::new("/srv/b/run/status.sock"));
    }

    #[test]
    fn the_group_is_found_by_its_whole_name() {
        assert_eq!(group_in("burgeon2:x:1:\nburgeon:x:998:a,b\n"), Some(998));
        assert_eq!(group_in("burgeon:x\nburgeo:x:5:"), None);
    }
}
