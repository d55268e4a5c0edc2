//! The opener: opens files of this host for the server, which may read none of them itself.
//!
//! ```text
//!   supervisor ── control ── Serve + socket ──► burgeon __open ── openat2 ──► files of this host
//!        │                                         ▲ ▲    │
//!        ├── grants/<id> ──────────────────────────┼─┘    │
//!        └── link ── Opener + socket ──► server ───┘ path │ descriptor, or errno
//!                                          ▲──────────────┘
//! ```
//!
//! A file may lie on a file system that does not answer (NFS), so each request has a thread, and a
//! time limit on the server's side. The opener outlives neither supervisor and server, but either
//! one of them: an orphan server keeps its socket, and a new supervisor starts an opener of its
//! own.
//!
//! Invariants: the opener opens only the files that the grants of a living mount name, or what lies
//! beneath a folder that they name (`granted.rs`); it parses nothing else but a path or a number,
//! writes no file, and has no network; it returns descriptors that are open for reading, of files,
//! block devices and folders, and for writing, of `/dev/ublkcN` (`devices.rs`) and of recorded
//! checksums (`state/checksums.rs`) alone. A request of the server that meets a dead opener
//! is sent to the next one (`client.rs`).

mod client;
mod devices;
mod granted;
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

use crate::state::checksums::ChecksumPath;

pub(crate) use self::client::Client;
pub use self::process::open_files;

/// From the supervisor to the opener, whose standard input is the stream.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub(crate) enum ToOpener {
    /// Open the files that the other end of this socket asks for.
    Serve,
    /// Log at this level and in this format from now on.
    Log { level: String, json: bool },
}

/// The longest request: the longest path, and the fields before it.
const REQUEST_MAX: usize = HEAD_LEN + libc::PATH_MAX as usize;
const HEAD_LEN: usize = 9;
/// An answer with the opener's process id; most have none.
const ANSWER_MAX: usize = 16;

/// Makes the socket between a server and its opener. It keeps the borders of messages.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// A request of the server.
#[derive(PartialEq, Eq, Debug)]
struct OpenRequest {
    number: u64,
    wanted: OpenTarget,
}

/// The object of a request.
#[derive(PartialEq, Eq, Clone, Debug)]
enum OpenTarget {
    File(Manner, PathBuf),
    /// Recorded checksums, for reading and writing.
    Checksums(ChecksumPath),
    /// `/dev/ublkcN`, for reading and writing.
    UblkQueues(u32),
    /// No descriptor: an errno if somebody uses `/dev/ublkbN`.
    UblkUnused(u32),
}

impl OpenTarget {
    fn encode(&self, number: u64) -> Vec<u8> {
        let device;
        let (kind, rest) = match self {
            Self::File(manner, path) => {
                let kind = match manner {
                    Manner::Stored => 0,
                    Manner::Referred => 1,
                    Manner::Identified => 2,
                    Manner::Folder => 3,
                };
                (kind, path.as_os_str().as_bytes())
            }
            Self::Checksums(path) => (6, path.as_path().as_os_str().as_bytes()),
            Self::UblkQueues(number) => {
                device = number.to_le_bytes();
                (4, &device[..])
            }
            Self::UblkUnused(number) => {
                device = number.to_le_bytes();
                (5, &device[..])
            }
        };
        [&number.to_le_bytes()[..], &[kind], rest].concat()
    }
}

impl OpenRequest {
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk()?;
        let (kind, rest) = rest.split_first()?;
        let file = |manner| {
            let path = PathBuf::from(std::ffi::OsStr::from_bytes(rest));
            path.is_absolute().then_some(OpenTarget::File(manner, path))
        };
        let device = || rest.try_into().ok().map(u32::from_le_bytes);
        let wanted = match kind {
            0 => file(Manner::Stored),
            1 => file(Manner::Referred),
            2 => file(Manner::Identified),
            3 => file(Manner::Folder),
            4 => device().map(OpenTarget::UblkQueues),
            5 => device().map(OpenTarget::UblkUnused),
            6 => {
                let path = Path::new(std::ffi::OsStr::from_bytes(rest));
                ChecksumPath::new(path).map(OpenTarget::Checksums)
            }
            _ => None,
        };
        Some(Self { number: u64::from_le_bytes(*number), wanted: wanted? })
    }
}

/// The errno for a path that is neither a file nor a block device.
const NOT_A_FILE: i32 = -1;

/// The errno for a file that no living mount may read.
const NOT_GRANTED: i32 = -2;

/// The answer to the request of this number: an errno, or 0 with a descriptor where one was asked
/// for.
#[derive(PartialEq, Eq, Debug)]
struct OpenAnswer {
    number: u64,
    errno: i32,
    /// The opener, with a device that the kernel knows its opener of.
    process: Option<u32>,
}

impl OpenAnswer {
    fn encode(&self) -> Vec<u8> {
        let process = self.process.map(u32::to_le_bytes);
        let process = process.as_ref().map_or(&[][..], |process| &process[..]);
        [&self.number.to_le_bytes()[..], &self.errno.to_le_bytes(), process].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk()?;
        let (errno, process) = rest.split_first_chunk()?;
        let process = match process {
            [] => None,
            process => Some(u32::from_le_bytes(process.try_into().ok()?)),
        };
        let (number, errno) = (u64::from_le_bytes(*number), i32::from_le_bytes(*errno));
        Some(Self { number, errno, process })
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
    use std::path::{Path, PathBuf};

    use burgeon_source::opening::Manner;

    use super::{ChecksumPath, OpenAnswer, OpenRequest, OpenTarget};

    #[test]
    fn requests_and_answers_round_trip_and_others_are_refused() {
        let file = |manner| OpenTarget::File(manner, PathBuf::from("/a/b"));
        let manners = [Manner::Stored, Manner::Referred, Manner::Identified, Manner::Folder];
        let devices = [OpenTarget::UblkQueues(3), OpenTarget::UblkUnused(1 << 31)];
        let checksums = Path::new("writes/w/area/checksums");
        let checksums = ChecksumPath::new(checksums).map(OpenTarget::Checksums);
        for wanted in manners.map(file).into_iter().chain(checksums).chain(devices) {
            let bytes = wanted.encode(7);
            assert_eq!(OpenRequest::decode(&bytes), Some(OpenRequest { number: 7, wanted }));
        }
        let relative = OpenTarget::File(Manner::Stored, PathBuf::from("a/b")).encode(7);
        let unknown = [&[0; 8][..], &[9], b"/a"].concat();
        let other = [&[0; 8][..], &[6], b"grants/0a1b2c3d"].concat();
        let long = [&OpenTarget::UblkQueues(3).encode(7)[..], b"/"].concat();
        for bytes in [&relative[..], &unknown, &other, &long, &[0; 8], b""] {
            assert_eq!(OpenRequest::decode(bytes), None);
        }
        for process in [None, Some(1 << 20)] {
            let answer = OpenAnswer { number: 1 << 40, errno: 13, process };
            let bytes = answer.encode();
            assert_eq!(OpenAnswer::decode(&bytes), Some(answer));
            assert!(OpenAnswer::decode(&bytes[1..]).is_none());
        }
    }
}
