//! The opener: opens files of this host for the server, which may read none of them itself.
//!
//! ```text
//!   supervisor ── control ── Serve + socket ──► burgeon __open ── openat2 ──► files of this host
//!        │                                         ▲      │
//!        └── link ── Opener + socket ──► server ───┘ path │ descriptor, or errno
//!                                          ▲──────────────┘
//! ```
//!
//! A file may lie on a file system that does not answer (NFS), so each request has a thread, and a
//! time limit on the server's side. The opener outlives neither supervisor and server, but either
//! one of them: an orphan server keeps its socket, and a new supervisor starts an opener of its own.
//!
//! Invariants: the opener parses nothing but a path, writes no file, and has no network; it returns
//! descriptors that are open for reading, of files, block devices and folders. A request of the
//! server that meets a dead opener is sent to the next one (`client.rs`).

mod client;
mod process;

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use burgeon_source::opening::Manner;
use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
};
use serde::{Deserialize, Serialize};

pub(crate) use self::client::Client;
pub use self::process::open_files;

/// From the supervisor to the opener, whose standard input is the stream.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub(crate) enum ToOpener {
    /// Open the files that the other end of this socket asks for.
    Serve,
}

/// The longest request: the longest path, and the fields before it.
const REQUEST_MAX: usize = HEAD_LEN + libc::PATH_MAX as usize;
const HEAD_LEN: usize = 9;
const ANSWER_LEN: usize = 12;

/// Makes the socket between a server and its opener. It keeps the borders of messages.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// A request of the server.
#[derive(PartialEq, Eq, Debug)]
struct OpenRequest {
    number: u64,
    manner: Manner,
    path: PathBuf,
}

impl OpenRequest {
    fn encode(number: u64, manner: Manner, path: &Path) -> Vec<u8> {
        let manner = match manner {
            Manner::Stored => 0,
            Manner::Referred => 1,
            Manner::Identified => 2,
            Manner::Folder => 3,
        };
        let path = path.as_os_str().as_bytes();
        [&number.to_le_bytes()[..], &[manner], path].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk()?;
        let (manner, path) = rest.split_first()?;
        let manner = match manner {
            0 => Manner::Stored,
            1 => Manner::Referred,
            2 => Manner::Identified,
            3 => Manner::Folder,
            _ => return None,
        };
        let path = PathBuf::from(std::ffi::OsStr::from_bytes(path));
        path.is_absolute().then(|| Self { number: u64::from_le_bytes(*number), manner, path })
    }
}

/// The errno for a path that is neither a file nor a block device.
const NOT_A_FILE: i32 = -1;

/// The answer to the request of this number: an errno, or 0 with a descriptor.
struct OpenAnswer {
    number: u64,
    errno: i32,
}

impl OpenAnswer {
    fn encode(&self) -> [u8; ANSWER_LEN] {
        let mut bytes = [0; ANSWER_LEN];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..].copy_from_slice(&self.errno.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk()?;
        let errno = i32::from_le_bytes(rest.try_into().ok()?);
        Some(Self { number: u64::from_le_bytes(*number), errno })
    }
}

fn send(
    socket: impl AsFd,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
    how: SendFlags,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fd.into_iter().collect();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    loop {
        match sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, how | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return Ok(other.map(drop)?),
        }
    }
}

/// Receives one message, with its descriptor if it has one; `None` if the other side has ended.
fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<Option<(&[u8], Option<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let len = loop {
        let mut slices = [IoSliceMut::new(bytes)];
        match recvmsg(&socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            other => break other?.bytes,
        }
    };
    if len == 0 {
        return Ok(None);
    }
    let mut fd = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fd = rights.last();
        }
    }
    Ok(Some((&bytes[..len], fd)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use burgeon_source::opening::Manner;

    use super::{OpenAnswer, OpenRequest};

    #[test]
    fn requests_and_answers_round_trip_and_others_are_refused() {
        let path = Path::new("/a/b");
        for manner in [Manner::Stored, Manner::Referred, Manner::Identified, Manner::Folder] {
            let bytes = OpenRequest::encode(7, manner, path);
            let request = OpenRequest { number: 7, manner, path: path.to_owned() };
            assert_eq!(OpenRequest::decode(&bytes), Some(request));
        }
        let relative = OpenRequest::encode(7, Manner::Stored, Path::new("a/b"));
        let unknown = [&[0; 8][..], &[9], b"/a"].concat();
        for bytes in [&relative[..], &unknown, &[0; 8], b""] {
            assert_eq!(OpenRequest::decode(bytes), None);
        }
        let answer = OpenAnswer { number: 1 << 40, errno: 13 };
        let bytes = answer.encode();
        let decoded = OpenAnswer::decode(&bytes).unwrap();
        assert_eq!((decoded.number, decoded.errno), (1 << 40, 13));
        assert!(OpenAnswer::decode(&bytes[1..]).is_none());
    }
}
