//! The wire format between Burgeon's processes: JSON messages after their length, with file
//! descriptors.
//!
//! ```text
//!   ┌────────────┬──────────────────────────────┐
//!   │ length u32 │ JSON, at most MESSAGE_MAX    │   + up to FDS_MAX descriptors (SCM_RIGHTS)
//!   └────────────┴──────────────────────────────┘     on the first byte of the length
//! ```
//!
//! Invariants: a length beyond the bound allocates nothing; an unexpected descriptor is closed.

use std::{
    io::{IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Serialize, de::DeserializeOwned};

/// Longest message, in bytes: the status of a thousand mounts fits.
pub(crate) const MESSAGE_MAX: usize = 4 << 20;

/// Most descriptors on one message.
pub(crate) const FDS_MAX: usize = 4;

/// The remedy for a message that cannot be read.
const OTHER_VERSION: &str = "is that process of another version? `burgeon upgrade` replaces it";

/// Sends `message` with `fds`.
pub(crate) fn send(
    mut stream: &UnixStream,
    message: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> Result<()> {
    let bytes = encode(message)?;
    let (length, body) = bytes.split_at(size_of::<u32>());
    send_bytes(stream, length, fds)?;
    stream.write_all(body).map_err(cannot_send)
}

/// The bytes of `message`: its length and its body.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; size_of::<u32>()];
    serde_json::to_writer(&mut bytes, message).map_err(|e| {
        let what = "cannot encode a message to another process of Burgeon: do the names and \
                        paths in the command consist of UTF-8?";
        Error::with_source(ErrorKind::Invalid, what, e)
    })?;
    let length = bytes.len() - size_of::<u32>();
    let Some(head) = u32::try_from(length).ok().filter(|_| length <= MESSAGE_MAX) else {
        let what = format!(
            "a message to another process of Burgeon has {length} bytes, above the limit of \
             {MESSAGE_MAX}: ask for less at once, such as a map of fewer files"
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    };
    bytes[..size_of::<u32>()].copy_from_slice(&head.to_le_bytes());
    Ok(bytes)
}

/// Sends a few `bytes`, with `fds` on the first of them.
pub(crate) fn send_bytes(
    mut stream: &UnixStream,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        let what = format!(
            "a message to another process of Burgeon has {} file descriptors, above the limit of \
             {FDS_MAX}: ask for less at once",
            fds.len()
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    let sent = loop {
        match sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other.map_err(|e| cannot_send(e.into()))?,
        }
    };
    stream.write_all(&bytes[sent..]).map_err(cannot_send)
}

fn cannot_send(error: std::io::Error) -> Error {
    Error::io("cannot send to the other process of Burgeon", error)
}

/// Receives a message and its descriptors; `None` if the other side has closed.
pub(crate) fn receive<T: DeserializeOwned>(
    mut stream: &UnixStream,
) -> Result<Option<(T, Vec<OwnedFd>)>> {
    let Some((head, fds)) = receive_bytes(stream)? else { return Ok(None) };
    let length = u32::from_le_bytes(head) as usize;
    if length > MESSAGE_MAX {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "a message from another process of Burgeon has {length} bytes, above the limit of \
                 {MESSAGE_MAX}: {OTHER_VERSION}"
            ),
        ));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).map_err(cannot_receive)?;
    let message = serde_json::from_slice(&body).map_err(|e| {
        let what = format!(
            "a message from another process of Burgeon cannot be understood: {OTHER_VERSION}"
        );
        Error::with_source(ErrorKind::Invalid, what, e)
    })?;
    Ok(Some((message, fds)))
}

/// Receives `N` bytes and the descriptors sent with them; `None` if the other side has closed.
pub(crate) fn receive_bytes<const N: usize>(
    mut stream: &UnixStream,
) -> Result<Option<([u8; N], Vec<OwnedFd>)>> {
    let mut bytes = [0; N];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut slices = [IoSliceMut::new(&mut bytes)];
        match recvmsg(stream, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            other => break other.map_err(|e| cannot_receive(e.into()))?.bytes,
        }
    };
    if received == 0 {
        return Ok(None);
    }
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    stream.read_exact(&mut bytes[received..]).map_err(cannot_receive)?;
    Ok(Some((bytes, fds)))
}

fn cannot_receive(error: std::io::Error) -> Error {
    Error::io("cannot receive from the other process of Burgeon", error)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read, Write},
        os::{fd::AsFd, unix::net::UnixStream},
        thread,
    };

    use super::{MESSAGE_MAX, receive, send};

    #[test]
    fn messages_and_descriptors_arrive_in_order() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        (&file).write_all(b"hello").unwrap();
        let long = "x".repeat(MESSAGE_MAX - 2);
        let sender = thread::spawn(move || {
            send(&a, &"first", &[file.as_fd()]).unwrap();
            send(&a, &long, &[]).unwrap();
        });
        let (text, mut fds) = receive::<String>(&b).unwrap().unwrap();
        assert_eq!((text.as_str(), fds.len()), ("first", 1));
        let mut file = File::from(fds.remove(0));
        std::io::Seek::rewind(&mut file).unwrap();
        let mut content = String::new();
        file.read_to_string(&mut content).unwrap();
        assert_eq!(content, "hello");
        let (text, fds) = receive::<String>(&b).unwrap().unwrap();
        assert_eq!((text.len(), fds.len()), (MESSAGE_MAX - 2, 0));
        sender.join().unwrap();
        assert!(receive::<String>(&b).unwrap().is_none());
    }

    #[test]
    fn hostile_lengths_and_bodies_are_refused() {
        for bytes in [&[0xff, 0xff, 0xff, 0xff][..], &[1, 0, 0, 0, b'{'], &[9, 0, 0, 0, b'1']] {
            let (mut a, b) = UnixStream::pair().unwrap();
            a.write_all(bytes).unwrap();
            drop(a);
            assert!(receive::<u32>(&b).is_err(), "{bytes:?}");
        }
        let (a, _b) = UnixStream::pair().unwrap();
        assert!(send(&a, &"x".repeat(MESSAGE_MAX), &[]).is_err());
    }
}
