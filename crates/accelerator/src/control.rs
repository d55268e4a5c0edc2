//! The sockets of a cache: one JSON document each way, then the connection ends.
//!
//! ```text
//!   supervise.sock     the supervisor: attach, detach, set, grow, replace
//!   serve.sock    the server: status, histogram, set, flush, check; the supervisor listens and passes it on
//! ```
//!
//! Both lie in the cache's folder, which only root can enter. A document is bounded, and a peer
//! that does not answer in time is left.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

/// The longest document.
const LEN_MAX: u64 = 1 << 20;
/// A peer that says nothing for so long is left.
const PATIENCE: Duration = Duration::from_secs(120);
/// A slow disk needs minutes for what is written back at once.
const PATIENCE_FOR_DISKS: Duration = Duration::from_secs(600);
/// One that asks has its question ready.
const QUESTION: Duration = Duration::from_secs(5);

/// A question.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum ControlRequest {
    /// To the supervisor: attach a slow device.
    Attach(Attach),
    /// To the supervisor: detach the slow device.
    Detach {
        /// Of the device.
        name: String,
        /// Dirty blocks stay in the cache.
        leave_dirty: bool,
    },
    /// To the supervisor: take a cache device or file that has become larger.
    Grow {
        /// Bytes that the file of the cache gets before.
        size: Option<u64>,
    },
    /// To the supervisor: put another device under the cache. Asked again until the answer has
    /// `is_replaced`: dirty blocks are written back meanwhile.
    Replace {
        /// Path of the new device.
        cache: std::path::PathBuf,
        /// Bytes of its log; `None` for the usual length.
        log_size: Option<u64>,
    },
    /// To the server: all figures.
    Status,
    /// To the supervisor, which remembers it for later servers, and then to the server: change
    /// settings of a device.
    Set(Set),
    /// To the server: write back dirty blocks of a device for a moment. The answer has the dirty
    /// bytes that are left, and a `before` for the next request.
    WriteBack {
        /// Of the device.
        name: String,
        /// From an earlier answer: what became dirty after the first request is not waited for.
        before: Option<u64>,
        /// Its mode becomes write-through, and the server leaves nothing of it dirty when it ends.
        ends: bool,
    },
    /// To the server: make everything durable, and clear the marks.
    Flush {
        /// Of the device.
        name: String,
    },
    /// To the server: compare some cached blocks of a device with the slow device.
    Check {
        /// Of the device.
        name: String,
        /// The slot to begin with; the answer names the next one as `next`, or none at the end.
        from: u32,
    },
    /// To the server: the distributions of durations and sizes of a device's requests.
    Histogram {
        /// Of the device.
        name: String,
    },
}

/// New settings of a device; `None` leaves one as it is.
#[derive(Serialize, Deserialize, Clone, Debug, Default)]
pub struct Set {
    /// Of the device.
    pub name: String,
    /// As [`Attach::mode`].
    pub mode: Option<String>,
    /// As [`Attach::policy`].
    pub policy: Option<String>,
    /// As [`Attach::cutoff`].
    pub cutoff: Option<u64>,
    /// Of the whole cache: the percentage of its log from which on it is written back.
    pub dirty_limit: Option<u8>,
    /// Of the whole cache: the age in seconds from which on a block is written back.
    pub dirty_age: Option<u64>,
    /// Of the whole cache: bytes a second that are written back; 0 for what the slow device's idle
    /// time allows.
    pub writeback_rate: Option<u64>,
}

/// A slow device to attach.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct Attach {
    /// Path of the slow device.
    pub slow: std::path::PathBuf,
    /// Its name in this cache.
    pub name: String,
    /// The name of a [`burgeon_accelerate::Mode`].
    pub mode: String,
    /// Bytes of a sequence from which on it bypasses the cache.
    pub cutoff: u64,
    /// The policy of the cache; `None` leaves it as it is.
    pub policy: Option<String>,
    /// Keep cached content: the user vouches that nobody else has written to the device.
    pub trust_clean: bool,
    /// Dirty blocks of another device of this name are given up.
    pub accept_loss: bool,
    /// Commands of earlier versions do not name it: it is FUSE.
    #[serde(default)]
    pub transport: Transport,
}

/// The kernel's way to a device.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug, Default)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// ublk if the kernel has it, else FUSE.
    Auto,
    /// ublk, or an error.
    Ublk,
    /// A FUSE file and a loop device.
    #[default]
    Fuse,
}

/// An answer.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "kebab-case")]
pub enum ControlAnswer {
    /// Done; a document.
    Done(Value),
    /// An error: its kind and text.
    Failed {
        /// Name of its kind.
        kind: String,
        /// Its text.
        what: String,
    },
}

impl From<Result<Value>> for ControlAnswer {
    fn from(result: Result<Value>) -> Self {
        match result {
            Ok(document) => Self::Done(document),
            Err(error) => {
                Self::Failed { kind: error.kind().name().to_owned(), what: error.to_string() }
            }
        }
    }
}

impl ControlAnswer {
    pub(crate) fn into_result(self) -> Result<Value> {
        match self {
            Self::Done(document) => Ok(document),
            Self::Failed { kind, what } => Err(Error::new(ErrorKind::from_name(&kind), what)),
        }
    }
}

/// Asks whoever listens at `socket`. `NotFound` if nobody does.
pub fn ask(socket: &Path, question: &ControlRequest) -> Result<Value> {
    let mut stream = UnixStream::connect(socket).map_err(|error| {
        Error::with_source(
            ErrorKind::NotFound,
            format!("nobody listens at {}", socket.display()),
            error,
        )
    })?;
    let failed = |error| Error::io(format!("cannot ask at {}", socket.display()), error);
    let patience = match question {
        ControlRequest::Attach(_)
        | ControlRequest::Detach { .. }
        | ControlRequest::Grow { .. }
        | ControlRequest::Replace { .. }
        | ControlRequest::WriteBack { .. } => PATIENCE_FOR_DISKS,
        _ => PATIENCE,
    };
    stream.set_read_timeout(Some(patience)).map_err(failed)?;
    send(&mut stream, question)?;
    receive::<ControlAnswer>(&stream)?.into_result()
}

pub(crate) fn send(stream: &mut impl Write, document: &impl Serialize) -> Result<()> {
    let mut bytes = serde_json::to_vec(document)
        .map_err(|error| Error::with_source(ErrorKind::Invalid, "cannot write a message", error))?;
    bytes.push(b'\n');
    stream.write_all(&bytes).map_err(|e| Error::io("cannot send a message", e))
}

pub(crate) fn receive<T: DeserializeOwned>(stream: impl Read) -> Result<T> {
    let mut line = Vec::new();
    let mut reader = BufReader::new(stream.take(LEN_MAX));
    reader.read_until(b'\n', &mut line).map_err(|e| Error::io("cannot receive a message", e))?;
    serde_json::from_slice(&line).map_err(|error| {
        Error::with_source(ErrorKind::Unavailable, "the process of the cache gave no answer, or a broken one: see `burgeon accelerate status`", error)
    })
}

/// Answers one connection.
pub(crate) fn answer(stream: UnixStream, answer: impl FnOnce(ControlRequest) -> Result<Value>) {
    // A peer that asks nothing gets no answer.
    if let Ok(question) = question(&stream) {
        reply(stream, answer(question));
    }
}

/// The question of a connection.
pub(crate) fn question(stream: &UnixStream) -> Result<ControlRequest> {
    stream
        .set_read_timeout(Some(QUESTION))
        .map_err(|e| Error::io("cannot limit a wait", e))
        .and_then(|()| receive::<ControlRequest>(stream))
}

/// Answers it.
pub(crate) fn reply(mut stream: UnixStream, result: Result<Value>) {
    // A peer that has left gets no answer.
    let _ = send(&mut stream, &ControlAnswer::from(result));
}
