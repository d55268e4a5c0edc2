//! The server's end: asks the opener, and the next one where it dies.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use burgeon_source::opening::{Manner, Opening, not_a_file};
use rustix::net::{SendFlags, Shutdown, shutdown};
use tokio::sync::{Notify, Semaphore, oneshot};

use super::{
    ANSWER_LEN, HEAD_LEN, NOT_A_FILE, OpenAnswer, OpenRequest, REQUEST_MAX, receive, send,
};

/// Requests that wait for the opener at a time.
pub(super) const AT_ONCE: usize = 32;

/// Time limit of a request, for callers without an earlier one: a read's own deadline is 30 s, and a
/// try of it takes at most 10 s.
const PATIENCE: Duration = Duration::from_secs(10);

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
    sender: oneshot::Sender<io::Result<File>>,
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
        let (client, path) = (Arc::clone(self), path.to_owned());
        Box::pin(async move {
            let opened = tokio::time::timeout(PATIENCE, client.open_by_any(path, manner)).await;
            opened.unwrap_or_else(|_| {
                let what = format!("the opener did not answer within {} s", PATIENCE.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, what))
            })
        })
    }

    async fn open_by_any(&self, path: PathBuf, manner: Manner) -> io::Result<File> {
        if path.as_os_str().len() > REQUEST_MAX - HEAD_LEN {
            return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        }
        // Never closed, so it is always had.
        let _permit = self.permits.acquire().await;
        loop {
            // Before the look, so that no line is missed.
            let mut connected = std::pin::pin!(self.connected.notified());
            connected.as_mut().enable();
            let Some(asked) = self.send(&path, manner) else {
                // The supervisor starts another one.
                connected.await;
                continue;
            };
            match asked {
                Ok(mut asked) => {
                    if let Ok(answer) = (&mut asked.receiver).await {
                        return answer;
                    }
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Sends a request; `None` without an opener.
    fn send(&self, path: &Path, manner: Manner) -> Option<io::Result<Asked<'_>>> {
        let mut state = self.lock();
        let line = Arc::clone(state.line.as_ref()?);
        state.number += 1;
        let number = state.number;
        let request = OpenRequest::encode(number, manner, path);
        if let Err(e) = send(&*line, &request, None, SendFlags::DONTWAIT) {
            return Some(Err(e));
        }
        let (sender, receiver) = oneshot::channel();
        state.waiting.insert(number, Waiting { line, sender });
        Some(Ok(Asked { client: self, number, receiver }))
    }

    /// Takes the answers of one opener until it ends.
    fn listen(&self, line: &Arc<OwnedFd>) {
        let mut bytes = [0; ANSWER_LEN];
        while let Ok(Some((answer, fd))) = receive(&**line, &mut bytes) {
            let Some(OpenAnswer { number, errno }) = OpenAnswer::decode(answer) else { break };
            let result = match (errno, fd) {
                (0, Some(fd)) => Ok(File::from(fd)),
                // This process has too many open.
                (0, None) => Err(io::Error::from_raw_os_error(libc::EMFILE)),
                (NOT_A_FILE, _) => Err(not_a_file()),
                (errno, _) => Err(io::Error::from_raw_os_error(errno)),
            };
            // Nobody may wait any longer.
            if let Some(waiting) = self.lock().waiting.remove(&number) {
                let _ = waiting.sender.send(result);
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

/// A request that was sent; forgotten when it is dropped.
struct Asked<'a> {
    client: &'a Client,
    number: u64,
    receiver: oneshot::Receiver<io::Result<File>>,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.client.lock().waiting.remove(&self.number);
    }
}
