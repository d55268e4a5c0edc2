//! The socket that containerd connects to.
//!
//! Only root and the server's own user are served, whatever the mode of the socket has become. A
//! connection is HTTP/2 without encryption, as gRPC has it on a Unix socket.

use std::{
    fs, io,
    os::unix::{
        fs::{DirBuilderExt, FileTypeExt, PermissionsExt},
        net::UnixStream as Blocking,
    },
    path::Path,
    sync::Arc,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::Semaphore,
};

use crate::{content_api::DIFF, differ::Differ, service::Service, snapshotter::Snapshotter};

/// Most connections: containerd has one or two.
const CONNECTIONS_MAX: usize = 64;
/// Most calls of a connection that wait or run.
const STREAMS_MAX: u32 = 256;
/// Threads that wait for events of sockets.
const THREADS: usize = 2;
/// The pause after the listener failed, such as for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A socket that clients can connect to.
#[derive(Debug)]
pub struct Socket {
    listener: std::os::unix::net::UnixListener,
}

impl Socket {
    /// Listens at `path`. A socket without a listener, of an earlier process, is replaced.
    pub fn bind(path: &Path) -> Result<Self> {
        let failed = |e| Error::io(format!("cannot listen at {}", path.display()), e);
        if let Some(folder) = path.parent().filter(|folder| !folder.exists()) {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(folder).map_err(failed)?;
        }
        if let Ok(found) = path.symlink_metadata() {
            if !found.file_type().is_socket() {
                let what = format!("{} is not a socket: move it away", path.display());
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            if Blocking::connect(path).is_ok() {
                let what = format!("another process listens at {}: end it first", path.display());
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
        }
        // Under another name until only its owner can connect, and by rename, so that clients
        // always find one.
        let new = path.with_extension("new");
        match fs::remove_file(&new) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
            _ => {}
        }
        let listener = std::os::unix::net::UnixListener::bind(&new).map_err(failed)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        fs::rename(&new, path).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { listener })
    }
}

/// Serves `snapshotter` at `socket` until this process ends. Every answer is durable before it is
/// sent, so the process may be killed at any moment.
pub fn serve(snapshotter: Arc<Snapshotter>, socket: Socket) -> Result<()> {
    let failed = |what: &'static str| move |e| Error::io(what, e);
    snapshotter.start_cleaner().map_err(failed("cannot start a thread"))?;
    snapshotter.start_indexer().map_err(failed("cannot start a thread"))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .map_err(failed("cannot start threads"))?;
    runtime.block_on(async move {
        let listener = UnixListener::from_std(socket.listener)
            .map_err(failed("cannot listen at the socket"))?;
        let services = (Service::new(Arc::clone(&snapshotter)), Differ::new(snapshotter));
        let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return Ok(()) };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let services = services.clone();
                    tokio::spawn(async move {
                        let _permit = permit;
                        serve_one(stream, services).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    })
}

async fn serve_one(stream: UnixStream, (snapshots, differ): (Service, Differ)) {
    let own = rustix::process::geteuid().as_raw();
    let asker = match stream.peer_cred() {
        Ok(peer) if peer.uid() == 0 || peer.uid() == own => peer.pid(),
        Ok(peer) => {
            return tracing::warn!(uid = peer.uid(), "refused a connection of another user");
        }
        Err(error) => return tracing::warn!(%error, "refused a connection of an unknown user"),
    };
    let answer = service_fn(move |request: http::Request<Incoming>| {
        let (snapshots, differ) = (snapshots.clone(), differ.clone());
        async move {
            match request.uri().path().starts_with(DIFF) {
                true => differ.answer(request, asker).await,
                false => snapshots.answer(request).await,
            }
        }
    });
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .serve_connection(TokioIo::new(stream), answer);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a connection ended");
    }
}
