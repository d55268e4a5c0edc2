//! Standard error and standard output of a process that must not wait for their reader.
//!
//! ```text
//!   pipe, terminal ─► opened anew, with O_NONBLOCK      socket ─► MSG_DONTWAIT      file ─► write(2)
//! ```
//!
//! A reader that has stopped, such as a stuck journal or the log driver of a container, must not
//! stop the daemon. Invariants: the shared descriptor keeps its flags, because other programs write
//! to it, too; a line that is not taken at once is dropped and counted; a line that was cut off
//! never joins the next.

use std::{
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use rustix::{
    fs::{FileType, Mode, OFlags, fstat, open},
    io::Errno,
    net::{SendFlags, send},
};

use super::Sink;

/// A stream of lines.
pub(crate) struct Stream {
    to: To,
    /// The last line was cut off.
    is_torn: AtomicBool,
    /// Lines that were dropped, and not reported yet.
    lost: AtomicU64,
}

enum To {
    /// With a flag of its own, so that writing waits for nobody.
    Opened(OwnedFd),
    Socket(BorrowedFd<'static>),
    /// A file; or a pipe where `/proc` is missing, whose reader is waited for.
    Shared(BorrowedFd<'static>),
}

impl Stream {
    /// The stream behind `fd`. Called before the process enters its sandbox.
    pub(crate) fn new(fd: BorrowedFd<'static>) -> Self {
        let kind = fstat(fd).map(|it| FileType::from_raw_mode(it.st_mode));
        let to = match kind {
            Ok(FileType::Fifo | FileType::CharacterDevice) => {
                let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
                let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                open(path, flags, Mode::empty()).map_or(To::Shared(fd), To::Opened)
            }
            Ok(FileType::Socket) => To::Socket(fd),
            _ => To::Shared(fd),
        };
        Self { to, is_torn: AtomicBool::new(false), lost: AtomicU64::new(0) }
    }

    /// Writes what is taken at once, and returns its length.
    fn write(&self, bytes: &[u8]) -> usize {
        loop {
            let written = match &self.to {
                To::Opened(fd) => rustix::io::write(fd, bytes),
                To::Socket(fd) => send(fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
                To::Shared(fd) => rustix::io::write(fd, bytes),
            };
            if written != Err(Errno::INTR) {
                return written.unwrap_or(0);
            }
        }
    }
}

impl Stream {
    /// Writes a line of `words`.
    pub(crate) fn say(&self, words: &str) {
        self.put(&format!("{words}\n"), 0);
    }
}

impl Sink for Stream {
    fn put(&self, line: &str, reported: u64) {
        let is_torn = self.is_torn.load(Ordering::Relaxed);
        let line = if is_torn { format!("\n{line}") } else { line.to_owned() };
        let taken = self.write(line.as_bytes());
        if taken > 0 {
            self.is_torn.store(taken < line.len(), Ordering::Relaxed);
        }
        if taken < line.len() {
            self.lost.fetch_add(reported + 1, Ordering::Relaxed);
        }
    }

    fn take_lost(&self) -> u64 {
        self.lost.swap(0, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::Read,
        os::fd::{BorrowedFd, OwnedFd},
        os::unix::net::UnixStream,
        sync::mpsc,
        thread,
        time::Duration,
    };

    use rustix::{
        fs::{OFlags, fcntl_getfl, fcntl_setfl},
        pipe::{PIPE_BUF, pipe},
    };

    use super::{super::Sink, Stream};

    const LINES: u64 = 20_000;

    /// Writes lines that nobody reads. Returns the number of those that were dropped.
    fn fill(theirs: impl Into<OwnedFd>, line: &'static str) -> (Stream, BorrowedFd<'static>, u64) {
        // For as long as the test program runs, as standard error.
        let fd: &'static OwnedFd = Box::leak(Box::new(theirs.into()));
        let fd = std::os::fd::AsFd::as_fd(fd);
        let (tell, told) = mpsc::channel();
        // In a thread, because it would wait for ever if it waited at all.
        thread::spawn(move || {
            let stream = Stream::new(fd);
            (0..LINES).for_each(|_| stream.put(line, 0));
            let _ = tell.send(stream);
        });
        let stream = told.recv_timeout(Duration::from_secs(60));
        let stream = stream.expect("writing waits for a reader");
        let lost = stream.take_lost();
        (stream, fd, lost)
    }

    #[test]
    fn nobody_waits_for_the_reader_of_a_pipe() {
        let (ours, theirs) = pipe().unwrap();
        let (stream, fd, lost) = fill(theirs, "a line\n");
        assert!(lost > 0 && lost < LINES, "{lost}");
        assert!(!fcntl_getfl(fd).unwrap().contains(OFlags::NONBLOCK), "others share it");
        // A line that is dropped keeps the number that it would have reported.
        stream.put("a line\n", 7);
        assert_eq!(stream.take_lost(), 8);
        let mut ours = File::from(ours);
        let mut text = vec![0; PIPE_BUF];
        ours.read_exact(&mut text).unwrap();
        stream.put("the reader is back\n", 0);
        assert_eq!(stream.take_lost(), 0);
    }

    #[test]
    fn a_line_that_was_cut_off_does_not_join_the_next_one() {
        let long: &'static str = Box::leak(format!("{}\n", "x".repeat(3 * PIPE_BUF)).into());
        let (ours, theirs) = pipe().unwrap();
        let (stream, _, lost) = fill(theirs, long);
        // A full pipe need not be full to its last byte: pages are not always filled.
        fcntl_setfl(&ours, OFlags::NONBLOCK).unwrap();
        let mut ours = File::from(ours);
        let mut text = Vec::new();
        for _ in 0..2 {
            let end = ours.read_to_end(&mut text).unwrap_err();
            assert_eq!(end.kind(), std::io::ErrorKind::WouldBlock);
            stream.put("the next\n", 0);
        }
        let text = String::from_utf8(text).unwrap();
        let whole = text.lines().filter(|line| line.len() + 1 == long.len()).count();
        assert_eq!(whole as u64 + lost, LINES);
        assert_eq!(text.lines().last(), Some("the next"), "{}", &text[text.len() - 20..]);
        assert_eq!(stream.take_lost(), 0);
    }

    #[test]
    fn nobody_waits_for_the_reader_of_a_socket() {
        let (_ours, theirs) = UnixStream::pair().unwrap();
        let (_, _, lost) = fill(theirs, "a line\n");
        assert!(lost > 0 && lost < LINES, "{lost}");
    }

    #[test]
    fn a_file_takes_every_line() {
        let file = tempfile::tempfile().unwrap();
        let (_, _, lost) = fill(file.try_clone().unwrap(), "a line\n");
        assert_eq!((lost, file.metadata().unwrap().len()), (0, LINES * 7));
    }
}
