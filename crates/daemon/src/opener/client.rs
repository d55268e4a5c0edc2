//! The server's end: asks the opener, and the next one where it dies.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use burgeon_source::opening::{Manner, Opening, not_a_file, not_granted};
use rustix::net::{SendFlags, Shutdown, shutdown};
use tokio::sync::{Notify, Semaphore, oneshot};

use super::{
    ANSWER_MAX, HEAD_LEN, NOT_A_FILE, NOT_GRANTED, OpenAnswer, OpenTarget, REQUEST_MAX, receive,
    send,
};
use crate::state::checksums::ChecksumPath;

/// Requests that wait for the opener at a time.
pub(super) const AT_ONCE: usize = 32;

/// Time limit of a request, for callers without an earlier one: a read's own deadline is 30 s, and
/// a try of it takes at most 10 s.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time limit of a request for a device: nobody reads from it meanwhile, and its readers wait.
const DEVICE_PATIENCE: Duration = Duration::from_secs(30);

/// The pause before another try to send, where the opener does not receive.
const PAUSE: Duration = Duration::from_millis(50);

/// The line to the opener.
pub(crate) struct Client {
    state: Mutex<State>,
    /// Notified at every new line.
    connected: Notify,
    permits: Semaphore,
}

#[derive(Default)]
struct State {
    line: Option<Arc<OwnedFd>>,
    /// Requests sent so far.
    number: u64,
    waiting: HashMap<u64, Waiting>,
}

struct Waiting {
    line: Arc<OwnedFd>,
    sender: oneshot::Sender<(OpenAnswer, Option<OwnedFd>)>,
}

/// The opener's positive answer.
struct Opened {
    file: Option<File>,
    process: Option<u32>,
}

impl Opened {
    fn file(self) -> io::Result<File> {
        // Without one, this process has too many open.
        self.file.ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))
    }
}

impl Default for Client {
    fn default() -> Self {
        let permits = Semaphore::new(AT_ONCE);
        Self { state: Mutex::default(), connected: Notify::new(), permits }
    }
}

impl Client {
    /// Asks the opener at the other end of `socket` from now on.
    pub(crate) fn connect(self: &Arc<Self>, socket: OwnedFd) {
        let line = Arc::new(socket);
        let before = self.lock().line.replace(Arc::clone(&line));
        // Its thread then repeats the unanswered requests.
        before.map(|before| shutdown(&*before, Shutdown::Both));
        self.connected.notify_waiters();
        let client = Arc::clone(self);
        thread::spawn(move || client.listen(&line));
    }

    /// Opens `path` by the opener. `TimedOut` if it does not answer.
    pub(crate) fn open(self: &Arc<Self>, path: &Path, manner: Manner) -> Opening {
        let (client, wanted) = (Arc::clone(self), OpenTarget::File(manner, path.to_owned()));
        let is_long = path.as_os_str().len() > REQUEST_MAX - HEAD_LEN;
        Box::pin(async move {
            if is_long {
                return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
            }
            let opened = async {
                // Never closed, so it is always had.
                let _permit = client.permits.acquire().await;
                client.ask(wanted).await
            };
            within(PATIENCE, opened).await?.file()
        })
    }

    /// Opens recorded checksums, for reading and writing. `InvalidData` if something else has their
    /// name.
    pub(crate) async fn open_checksums(&self, path: &ChecksumPath) -> io::Result<File> {
        within(PATIENCE, self.ask(OpenTarget::Checksums(path.clone()))).await?.file()
    }

    /// Opens `/dev/ublkcN`, for reading and writing. Also returns the process that has opened it.
    pub(crate) async fn open_ublk(&self, number: u32) -> io::Result<(File, u32)> {
        let opened = within(DEVICE_PATIENCE, self.ask(OpenTarget::UblkQueues(number))).await?;
        let process = opened.process.ok_or(io::ErrorKind::InvalidData)?;
        Ok((opened.file()?, process))
    }

    /// True if nobody uses `/dev/ublkbN`.
    pub(crate) async fn is_unused_ublk(&self, number: u32) -> io::Result<bool> {
        match within(PATIENCE, self.ask(OpenTarget::UblkUnused(number))).await {
            Ok(_) => Ok(true),
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Asks one opener after another until one answers.
    async fn ask(&self, wanted: OpenTarget) -> io::Result<Opened> {
        loop {
            // Before the look, so that no line is missed.
            let mut connected = std::pin::pin!(self.connected.notified());
            connected.as_mut().enable();
            let Some(asked) = self.send(&wanted) else {
                // The supervisor starts another one.
                connected.await;
                continue;
            };
            match asked {
                Ok(mut asked) => {
                    if let Ok((answer, fd)) = (&mut asked.receiver).await {
                        return match answer.errno {
                            0 => Ok(Opened { file: fd.map(File::from), process: answer.process }),
                            NOT_A_FILE => Err(not_a_file(match wanted {
                                OpenTarget::File(manner, _) => manner,
                                OpenTarget::Checksums(_) => return Err(odd()),
                                _ => Manner::Referred,
                            })),
                            NOT_GRANTED => Err(not_granted()),
                            errno => Err(io::Error::from_raw_os_error(errno)),
                        };
                    }
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Sends a request; `None` without an opener.
    fn send(&self, wanted: &OpenTarget) -> Option<io::Result<Asked<'_>>> {
        let mut state = self.lock();
        let line = Arc::clone(state.line.as_ref()?);
        state.number += 1;
        let number = state.number;
        if let Err(e) = send(&*line, &wanted.encode(number), None, SendFlags::DONTWAIT) {
            return Some(Err(e));
        }
        let (sender, receiver) = oneshot::channel();
        state.waiting.insert(number, Waiting { line, sender });
        Some(Ok(Asked { client: self, number, receiver }))
    }

    /// Takes the answers of one opener until it ends.
    fn listen(&self, line: &Arc<OwnedFd>) {
        let mut bytes = [0; ANSWER_MAX];
        while let Ok(Some((answer, fd))) = receive(&**line, &mut bytes) {
            let Some(answer) = OpenAnswer::decode(answer) else { break };
            // Nobody may wait any longer.
            if let Some(waiting) = self.lock().waiting.remove(&answer.number) {
                let _ = waiting.sender.send((answer, fd));
            }
        }
        let mut state = self.lock();
        if state.line.as_ref().is_some_and(|now| Arc::ptr_eq(now, line)) {
            state.line = None;
        }
        state.waiting.retain(|_, waiting| !Arc::ptr_eq(&waiting.line, line));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn odd() -> io::Error {
    let what = "it is not a regular file: remove it; the next mount makes it again";
    io::Error::new(io::ErrorKind::InvalidData, what)
}

async fn within<T>(
    patience: Duration,
    asked: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    tokio::time::timeout(patience, asked).await.unwrap_or_else(|_| {
        let what = format!("the opener did not answer within {} s", patience.as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, what))
    })
}

/// A request that was sent; forgotten when it is dropped.
struct Asked<'a> {
    client: &'a Client,
    number: u64,
    receiver: oneshot::Receiver<(OpenAnswer, Option<OwnedFd>)>,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.client.lock().waiting.remove(&self.number);
    }
}
