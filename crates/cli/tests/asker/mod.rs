//! An opener of the test's own, which is asked as a server would ask it.

use std::{
    fs::File,
    io::{IoSlice, IoSliceMut, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, net::UnixStream},
    },
    path::Path,
    process::{Child, Command, Stdio},
};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, send, sendmsg, socketpair,
};

/// Manners of opening a file, as in `opener.rs` of the daemon.
pub(crate) const STORED: u8 = 0;
pub(crate) const REFERRED: u8 = 1;
pub(crate) const IDENTIFIED: u8 = 2;
pub(crate) const FOLDER: u8 = 3;
const UBLK_QUEUES: u8 = 4;
const UBLK_UNUSED: u8 = 5;

/// Its answer for a file that no living mount may read.
pub(crate) const NOT_GRANTED: i32 = -2;

/// The opener; it ends when this is dropped.
pub(crate) struct Asker {
    process: Child,
    line: OwnedFd,
}

impl Asker {
    /// Starts `burgeon __open` on `state`.
    pub(crate) fn new(program: &str, state: &Path) -> Self {
        let (mut control, theirs) = UnixStream::pair().unwrap();
        let process = Command::new(program)
            .arg("__open")
            .arg(state)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .unwrap();
        let flags = SocketFlags::CLOEXEC;
        let (line, openers) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let message = br#"{"message":"serve"}"#;
        send_with(&control, &(message.len() as u32).to_le_bytes(), openers.as_fd());
        control.write_all(message).unwrap();
        Self { process, line }
    }

    /// Opens `path`; returns the errno of a failure.
    pub(crate) fn open(&self, manner: u8, path: &Path) -> Result<File, i32> {
        self.ask(manner, path.as_os_str().as_bytes()).map(|file| file.unwrap().into())
    }

    /// The errnos of both requests for the ublk device `number`.
    pub(crate) fn device(&self, number: u32) -> [Option<i32>; 2] {
        [UBLK_QUEUES, UBLK_UNUSED].map(|kind| self.ask(kind, &number.to_le_bytes()).err())
    }

    fn ask(&self, kind: u8, about: &[u8]) -> Result<Option<OwnedFd>, i32> {
        let request = [&7u64.to_le_bytes()[..], &[kind], about].concat();
        send(&self.line, &request, SendFlags::NOSIGNAL).unwrap();
        let mut answer = [0; 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut answer)];
        recvmsg(&self.line, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        });
        assert_eq!(answer[..8], 7u64.to_le_bytes(), "the opener has ended");
        match i32::from_le_bytes(answer[8..12].try_into().unwrap()) {
            0 => Ok(fd),
            errno => Err(errno),
        }
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn send_with(stream: &UnixStream, bytes: &[u8], fd: BorrowedFd<'_>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}
