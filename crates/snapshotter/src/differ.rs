//! The differ: the service `Diff` of containerd, for snapshots of this root.
//!
//! ```text
//!   containerd ── Diff ──► trees.rs ─► a thread: changes.rs ─► tar ─► gzip or zstd ── chunks ──┐
//!        ▲                                                                                     │
//!        └──────────────── content.rs: Write to its content store ◄── a task ◄─────────────────┘
//! ```
//!
//! `Unimplemented` passes a request on to the next differ of containerd's list: for all of `Apply`,
//! for mounts that are not ours, and for layers that only the kernel understands.
//!
//! Invariants: a difference that is cancelled stops reading, and its write is aborted; at most
//! [`DIFFS_MAX`] run; a blob is committed only if no snapshot that was read is gone.

use std::{
    convert::Infallible,
    io::{self, Write},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::SystemTime,
};

use burgeon_block::Error;
use bytes::{Bytes, BytesMut};
use flate2::write::GzEncoder;
use hyper::body::Incoming;
use sha2::{Digest, Sha256};
use tokio::sync::{Semaphore, mpsc};
use tonic::{Code, Status, body::Body, metadata::AsciiMetadataValue, server::Grpc};
use tonic_prost::ProstCodec;

use crate::{
    changes::check,
    content::{Blob, Containerd, LEASE, NAMESPACE},
    content_api::{DIFF, Descriptor, DiffRequest, DiffResponse},
    layer::Epoch,
    service::{Handler, MESSAGE_MAX, status},
    snapshotter::{CallError, Snapshotter},
    trees::Found,
};

/// Most differences at the same time.
const DIFFS_MAX: usize = 4;
/// Bytes of a piece of a blob.
const CHUNK: usize = 256 << 10;
/// Pieces that wait for containerd.
const CHUNKS: usize = 4;

/// Serves the differences of one snapshotter.
#[derive(Clone, Debug)]
pub(crate) struct Differ {
    snapshotter: Arc<Snapshotter>,
    /// containerd's socket.
    containerd: Option<PathBuf>,
    running: Arc<Semaphore>,
}

/// The form of a layer.
#[derive(Clone, Copy, Debug)]
enum Form {
    Plain,
    Gzip,
    Zstd,
}

impl Form {
    fn of(media_type: &str) -> Option<Self> {
        match media_type.strip_prefix("application/vnd.oci.image.layer.v1.tar")? {
            "" => Some(Self::Plain),
            "+gzip" => Some(Self::Gzip),
            "+zstd" => Some(Self::Zstd),
            _ => None,
        }
    }
}

/// The request, and where it came from.
struct Call {
    request: DiffRequest,
    form: Form,
    namespace: AsciiMetadataValue,
    lease: Option<AsciiMetadataValue>,
    asker: Option<i32>,
    socket: PathBuf,
}

/// Stops a difference when its client is gone.
struct StopAtDrop(Arc<AtomicBool>);

impl Drop for StopAtDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Differ {
    pub(crate) fn new(snapshotter: Arc<Snapshotter>) -> Self {
        let containerd = snapshotter.containerd.clone();
        Self { snapshotter, containerd, running: Arc::new(Semaphore::new(DIFFS_MAX)) }
    }

    /// Answers a request of HTTP that comes from the process `asker`.
    pub(crate) async fn answer(
        self,
        request: http::Request<Incoming>,
        asker: Option<i32>,
    ) -> Result<http::Response<Body>, Infallible> {
        let next = |why: &str| Ok(Status::unimplemented(why).into_http());
        match (request.uri().path().strip_prefix(DIFF), self.containerd.clone()) {
            (Some("Diff"), Some(socket)) => Ok(self.diff(request, asker, socket).await),
            (Some("Diff"), None) => next("this snapshotter knows no socket of containerd"),
            // Its own differ does this.
            _ => next("no such method"),
        }
    }

    async fn diff(
        self,
        request: http::Request<Incoming>,
        asker: Option<i32>,
        socket: PathBuf,
    ) -> http::Response<Body> {
        let header = |key| -> Option<AsciiMetadataValue> {
            AsciiMetadataValue::try_from(request.headers().get(key)?.as_bytes()).ok()
        };
        let (namespace, lease) = (header(NAMESPACE), header(LEASE));
        let codec = ProstCodec::<DiffResponse, DiffRequest>::default();
        let handler = Handler(move |mut request: DiffRequest| {
            let (differ, socket) = (self.clone(), socket.clone());
            let (namespace, lease) = (namespace.clone(), lease.clone());
            async move {
                if request.media_type.is_empty() {
                    request.media_type = "application/vnd.oci.image.layer.v1.tar+gzip".to_owned();
                }
                let unknown = || Status::unimplemented("this type of a layer is not known here");
                let form = Form::of(&request.media_type).ok_or_else(unknown)?;
                let missing = || Status::invalid_argument("the request names no namespace");
                let namespace = namespace.ok_or_else(missing)?;
                let call = Call { request, form, namespace, lease, asker, socket };
                Ok(DiffResponse { diff: Some(differ.run(call).await?) })
            }
        });
        Grpc::new(codec)
            .max_decoding_message_size(MESSAGE_MAX)
            .max_encoding_message_size(MESSAGE_MAX)
            .unary(handler, request)
            .await
    }

    async fn run(self, mut call: Call) -> Result<Descriptor, Status> {
        let ends = |_| Status::unavailable("the snapshotter ends");
        let permit = Arc::clone(&self.running).acquire_owned().await.map_err(ends)?;
        let stop = Arc::new(AtomicBool::new(false));
        let _stop = StopAtDrop(Arc::clone(&stop));
        let panicked = |_| Status::internal("a difference panicked: see the log");
        // A task of its own: it ends the write also if this call is cancelled.
        let task = tokio::spawn(async move {
            let _permit = permit;
            let snapshotter = Arc::clone(&self.snapshotter);
            let (left, right) = (call.request.left.clone(), call.request.right.clone());
            let found = tokio::task::spawn_blocking(move || snapshotter.trees(&left, &right)).await;
            let found = found.map_err(panicked)?.map_err(|failure| status(&failure))?;
            let Some(found) = found else {
                return Err(Status::unimplemented("these mounts are not of this snapshotter"));
            };
            let connected =
                Containerd::connect(&call.socket, call.asker, call.namespace.clone()).await;
            let mut containerd = connected.map_err(|error| {
                let socket = &call.socket;
                tracing::warn!(
                    ?socket, %error,
                    "containerd's own differ is used: the socket of --containerd cannot be"
                );
                Status::unimplemented("the snapshotter does not reach the content store")
            })?;
            let written = self.upload(&mut containerd, &mut call, found, stop).await;
            if let Err(status) = &written {
                match status.code() {
                    Code::Unimplemented => {
                        tracing::info!(why = status.message(), "containerd's own differ is used");
                    }
                    _ => tracing::error!(%status, "a difference failed"),
                }
                if let Err(error) = containerd.release().await {
                    tracing::warn!(%error, "a lease stays until it ends");
                }
            }
            written
        });
        task.await.map_err(panicked)?
    }

    /// Writes the difference into the content store.
    async fn upload(
        &self,
        containerd: &mut Containerd,
        call: &mut Call,
        found: Found,
        stop: Arc<AtomicBool>,
    ) -> Result<Descriptor, Status> {
        let name = unique();
        containerd.hold(call.lease.take(), &name).await?;
        let given = &call.request.reference;
        let reference = if given.is_empty() { name } else { given.clone() };
        let mut ingest = containerd.ingest(&reference).await?;
        let epoch = call.request.source_date_epoch.map(|it| (it.seconds, i64::from(it.nanos)));
        let labels = std::mem::take(&mut call.request.labels);
        let made = async {
            let (sender, mut chunks) = mpsc::channel(CHUNKS);
            let (snapshotter, form) = (Arc::clone(&self.snapshotter), call.form);
            let writer = stop.clone();
            let thread = tokio::task::spawn_blocking(move || {
                produce(&snapshotter, found, form, epoch, sender, &writer)
            });
            let mut written = Ok(());
            while let Some(chunk) = chunks.recv().await {
                written = ingest.write(chunk).await;
                if written.is_err() {
                    stop.store(true, Ordering::Relaxed);
                    break;
                }
            }
            drop(chunks);
            let produced = thread.await;
            // Without containerd the thread fails, too.
            written?;
            let produced = produced.map_err(|_| Status::internal("a difference panicked"))?;
            let blob = produced.map_err(|failure| match failure {
                Failure::Unsupported(why) => Status::unimplemented(why),
                Failure::Call(failure) => status(&failure),
            })?;
            let was_there = ingest.commit(&blob, labels).await?;
            Ok((blob, was_there))
        };
        let (blob, was_there) = match made.await {
            Ok(made) => made,
            Err(failure) => {
                let failure: Status = failure;
                ingest.close().await;
                if let Err(error) = containerd.abort(&reference).await {
                    tracing::warn!(%reference, %error, "a write stays until its lease ends");
                }
                return Err(failure);
            }
        };
        if was_there && let Err(error) = containerd.keep(&blob.digest).await {
            tracing::warn!(digest = blob.digest, %error, "a blob is not kept for its client");
        }
        let size = containerd.settle(&blob.digest, &blob.unpacked).await?;
        tracing::info!(digest = blob.digest, size, "wrote a difference");
        let media_type = std::mem::take(&mut call.request.media_type);
        Ok(Descriptor { media_type, digest: blob.digest, size })
    }
}

/// A name for a write and its lease.
fn unique() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("burgeon-diff-{}-{}-{count}", since.as_nanos(), std::process::id())
}

/// The reason why a difference cannot be made.
enum Failure {
    /// containerd's own differ may be able to.
    Unsupported(String),
    Call(CallError),
}

/// Sends the layer in pieces.
fn produce(
    snapshotter: &Snapshotter,
    found: Found,
    form: Form,
    epoch: Option<Epoch>,
    to: mpsc::Sender<Bytes>,
    stop: &AtomicBool,
) -> Result<Blob, Failure> {
    let write = || -> io::Result<Blob> {
        let chunks = Chunks { to, buffer: BytesMut::with_capacity(CHUNK), stop };
        let packed = Packed::new(form, Summed::new(chunks))?;
        let is_shared = |one: &_, other: &_| snapshotter.have_same_extents(one, other);
        let unpacked = found.trees.write(Summed::new(packed), epoch, &is_shared, stop)?;
        let (packed, unpacked, _) = unpacked.finish();
        let (mut chunks, digest, size) = packed.finish()?.finish();
        chunks.send()?;
        Ok(Blob { digest, size, unpacked })
    };
    let name = found.used.first().map_or_else(String::new, |one| one.name.clone());
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::Unsupported => Failure::Unsupported(e.to_string()),
        _ => {
            let what = format!("cannot compare the snapshot {name:?} with its parent");
            Failure::Call(Error::io(what, e).into())
        }
    };
    let used = found.used.clone();
    let blob = write().map_err(failed)?;
    snapshotter.check_used(&used).map_err(|error| Failure::Call(error.into()))?;
    Ok(blob)
}

/// Passes on pieces of [`CHUNK`] bytes.
struct Chunks<'a> {
    to: mpsc::Sender<Bytes>,
    buffer: BytesMut,
    stop: &'a AtomicBool,
}

impl Chunks<'_> {
    fn send(&mut self) -> io::Result<()> {
        check(self.stop)?;
        let chunk = self.buffer.split().freeze();
        let gone = |_| io::Error::other("the content store takes no more");
        if chunk.is_empty() { Ok(()) } else { self.to.blocking_send(chunk).map_err(gone) }
    }
}

impl Write for Chunks<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = bytes.len().min(CHUNK - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..len]);
        if self.buffer.len() == CHUNK {
            self.send()?;
            self.buffer.reserve(CHUNK);
        }
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Counts and digests what it passes on.
struct Summed<W> {
    to: W,
    sum: Sha256,
    len: u64,
}

impl<W> Summed<W> {
    fn new(to: W) -> Self {
        Self { to, sum: Sha256::new(), len: 0 }
    }

    /// The digest, and the number of bytes.
    fn finish(self) -> (W, String, u64) {
        let hex: String = self.sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        (self.to, format!("sha256:{hex}"), self.len)
    }
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.to.write(bytes)?;
        self.sum.update(&bytes[..len]);
        self.len += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Compresses what it passes on.
enum Packed<W: Write> {
    Plain(W),
    Gzip(GzEncoder<W>),
    Zstd(zstd::Encoder<'static, W>),
}

impl<W: Write> Packed<W> {
    fn new(form: Form, to: W) -> io::Result<Self> {
        Ok(match form {
            Form::Plain => Self::Plain(to),
            Form::Gzip => Self::Gzip(GzEncoder::new(to, flate2::Compression::default())),
            Form::Zstd => Self::Zstd(zstd::Encoder::new(to, zstd::DEFAULT_COMPRESSION_LEVEL)?),
        })
    }

    fn finish(self) -> io::Result<W> {
        match self {
            Self::Plain(to) => Ok(to),
            Self::Gzip(encoder) => encoder.finish(),
            Self::Zstd(encoder) => encoder.finish(),
        }
    }
}

impl<W: Write> Write for Packed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(to) => to.write(bytes),
            Self::Gzip(encoder) => encoder.write(bytes),
            Self::Zstd(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(to) => to.flush(),
            Self::Gzip(encoder) => encoder.flush(),
            Self::Zstd(encoder) => encoder.flush(),
        }
    }
}
