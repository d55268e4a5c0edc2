//! containerd's content store, over containerd's socket: for one blob of one namespace.
//!
//! ```text
//!   connect ─► lease, unless the request has one ─► Write: STAT ─► WRITE … ─► COMMIT
//!                                                            └─ a failure ─► Abort
//! ```
//!
//! Invariants: every wait has a limit; a write that fails is aborted; a blob is kept by a lease, of
//! the client or of this process, and one of this process ends by itself after [`LEASE_TIME`]. So
//! nothing stays in the content store for good, even if this process dies.

use std::{
    collections::HashMap,
    future::Future,
    io,
    path::Path,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use hyper::{body::Incoming, client::conn::http2::SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use prost_types::{FieldMask, Timestamp};
use tokio::{net::UnixStream, sync::mpsc, task::JoinHandle, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code, Request, Status, Streaming, body::Body, client::Grpc, metadata::AsciiMetadataValue,
};
use tonic_prost::ProstCodec;

use crate::{
    api::Empty,
    content_api::{
        AbortRequest, AddResourceRequest, CONTENT, InfoRequest, InfoResponse, LEASES, LeaseRequest,
        Resource, UpdateRequest, WriteAction, WriteRequest, WriteResponse,
    },
};

/// The longest wait for an answer of containerd: its disk may be slow.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// The same for the answer to a commit, before which the whole blob becomes durable.
const COMMIT_TIME: Duration = Duration::from_secs(60 * 60);
/// The time that a blob is written, and then kept for its client, which is to refer to it: that of
/// containerd's own leases.
const LEASE_TIME: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest answer, in bytes.
const ANSWER_MAX: usize = 16 << 20;
/// The label with the digest of the unpacked bytes.
pub(crate) const UNCOMPRESSED: &str = "containerd.io/uncompressed";
const EXPIRE: &str = "containerd.io/gc.expire";
pub(crate) const NAMESPACE: &str = "containerd-namespace";
pub(crate) const LEASE: &str = "containerd-lease";

/// A connection to containerd, for one namespace and one lease.
#[derive(Debug)]
pub(crate) struct Containerd {
    grpc: Grpc<Channel>,
    namespace: AsciiMetadataValue,
    lease: Option<AsciiMetadataValue>,
    /// The lease is not the client's.
    has_own_lease: bool,
    driver: JoinHandle<()>,
}

impl Drop for Containerd {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// A connection as a service.
#[derive(Clone, Debug)]
struct Channel(SendRequest<Body>);

impl tower_service::Service<http::Request<Body>> for Channel {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = hyper::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// Waits for containerd.
async fn within<T>(what: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    within_time(ANSWER_TIME, what).await
}

async fn within_time<T>(
    time: Duration,
    what: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    let late = |_| {
        let seconds = time.as_secs();
        Status::unavailable(format!("containerd did not answer within {seconds} s"))
    };
    timeout(time, what).await.map_err(late)?
}

impl Containerd {
    /// Connects to the socket, which has to be one of the process `asker` if both are known.
    pub(crate) async fn connect(
        socket: &Path,
        asker: Option<i32>,
        namespace: AsciiMetadataValue,
    ) -> io::Result<Self> {
        let stream = UnixStream::connect(socket).await?;
        let listener = stream.peer_cred()?.pid();
        if let (Some(listener), Some(asker)) = (listener, asker)
            && listener != asker
            && listener != 0
            && asker != 0
        {
            let what = format!("it is of process {listener}, and process {asker} has asked");
            return Err(io::Error::other(what));
        }
        let handshake = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .handshake(TokioIo::new(stream));
        let (sender, connection) =
            timeout(ANSWER_TIME, handshake).await?.map_err(io::Error::other)?;
        let driver = tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to containerd ended");
            }
        });
        let origin = http::Uri::from_static("http://containerd");
        let grpc = Grpc::with_origin(Channel(sender), origin).max_decoding_message_size(ANSWER_MAX);
        Ok(Self { grpc, namespace, lease: None, has_own_lease: false, driver })
    }

    fn request<M>(&self, message: M) -> Request<M> {
        let mut request = Request::new(message);
        request.metadata_mut().insert(NAMESPACE, self.namespace.clone());
        if let Some(lease) = &self.lease {
            request.metadata_mut().insert(LEASE, lease.clone());
        }
        request
    }

    async fn call<M, A>(&mut self, service: &str, method: &str, message: M) -> Result<A, Status>
    where
        M: prost::Message + Default + 'static,
        A: prost::Message + Default + 'static,
    {
        let request = self.request(message);
        let grpc = &mut self.grpc;
        within(async move {
            let ready = grpc.ready().await;
            ready.map_err(|e| Status::unavailable(format!("containerd is gone: {e}")))?;
            let codec = ProstCodec::<M, A>::default();
            Ok(grpc.unary(request, path(service, method)?, codec).await?.into_inner())
        })
        .await
    }

    /// Uses the lease of the client, or one of its own if it has none.
    pub(crate) async fn hold(
        &mut self,
        lease: Option<AsciiMetadataValue>,
        name: &str,
    ) -> Result<(), Status> {
        if lease.is_none() {
            let end = Timestamp::from(SystemTime::now() + LEASE_TIME).to_string();
            let labels = HashMap::from([(EXPIRE.to_owned(), end)]);
            let request = LeaseRequest { id: name.to_owned(), labels };
            self.call::<_, Empty>(LEASES, "Create", request).await?;
            self.has_own_lease = true;
        }
        let own = || AsciiMetadataValue::try_from(name);
        let invalid = |_| Status::internal("the name of a lease is no text");
        self.lease = Some(lease.map_or_else(own, Ok).map_err(invalid)?);
        Ok(())
    }

    /// Removes its own lease, and all that it alone keeps.
    pub(crate) async fn release(&mut self) -> Result<(), Status> {
        let Some(lease) = self.lease.take().filter(|_| self.has_own_lease) else { return Ok(()) };
        let id = lease.to_str().unwrap_or_default().to_owned();
        let request = LeaseRequest { id, ..LeaseRequest::default() };
        self.call::<_, Empty>(LEASES, "Delete", request).await.map(drop)
    }

    /// Begins to write a blob.
    pub(crate) async fn ingest(&mut self, reference: &str) -> Result<Ingest, Status> {
        let (requests, outgoing) = mpsc::channel(1);
        let first = WriteRequest {
            action: WriteAction::Stat as i32,
            reference: reference.to_owned(),
            ..WriteRequest::default()
        };
        let gone = |_| Status::unavailable("containerd is gone");
        requests.send(first).await.map_err(gone)?;
        let request = self.request(ReceiverStream::new(outgoing));
        let grpc = &mut self.grpc;
        within(async move {
            let ready = grpc.ready().await;
            ready.map_err(|e| Status::unavailable(format!("containerd is gone: {e}")))?;
            let codec = ProstCodec::<WriteRequest, WriteResponse>::default();
            let path = path(CONTENT, "Write")?;
            let mut answers = grpc.streaming(request, path, codec).await?.into_inner();
            answers.message().await?.ok_or_else(ended)?;
            Ok(Ingest { requests, answers, offset: 0 })
        })
        .await
    }

    /// Gives up a write.
    pub(crate) async fn abort(&mut self, reference: &str) -> Result<(), Status> {
        let request = AbortRequest { reference: reference.to_owned() };
        match self.call::<_, Empty>(CONTENT, "Abort", request).await {
            Err(status) if status.code() == Code::NotFound => Ok(()),
            other => other.map(drop),
        }
    }

    /// The bytes of a blob that was just written, or was there before. It gets the label with the
    /// digest of its unpacked bytes if it has none.
    pub(crate) async fn settle(&mut self, digest: &str, unpacked: &str) -> Result<i64, Status> {
        let request = InfoRequest { digest: digest.to_owned() };
        let answer: InfoResponse = self.call(CONTENT, "Info", request).await?;
        let mut info = answer.info.ok_or_else(|| Status::internal("containerd knows no blob"))?;
        let size = info.size;
        if info.labels.get(UNCOMPRESSED).is_none_or(String::is_empty) {
            info.labels = HashMap::from([(UNCOMPRESSED.to_owned(), unpacked.to_owned())]);
            let mask = FieldMask { paths: vec![format!("labels.{UNCOMPRESSED}")] };
            let request = UpdateRequest { info: Some(info), update_mask: Some(mask) };
            self.call::<_, InfoResponse>(CONTENT, "Update", request).await?;
        }
        Ok(size)
    }

    /// Keeps a blob that was there before by the lease.
    pub(crate) async fn keep(&mut self, digest: &str) -> Result<(), Status> {
        let Some(Ok(lease)) = self.lease.as_ref().map(AsciiMetadataValue::to_str) else {
            return Ok(());
        };
        let resource = Resource { id: digest.to_owned(), kind: "content".to_owned() };
        let request = AddResourceRequest { id: lease.to_owned(), resource: Some(resource) };
        self.call::<_, Empty>(LEASES, "AddResource", request).await.map(drop)
    }
}

fn path(service: &str, method: &str) -> Result<http::uri::PathAndQuery, Status> {
    let path = format!("{service}{method}").parse();
    path.map_err(|_| Status::internal("the name of a method is no path"))
}

fn ended() -> Status {
    Status::unavailable("containerd ended the write of a blob")
}

/// The labels and digests of a whole blob.
#[derive(Clone, Debug)]
pub(crate) struct Blob {
    pub(crate) digest: String,
    pub(crate) size: u64,
    /// The digest of the unpacked bytes.
    pub(crate) unpacked: String,
}

/// A blob that is being written.
#[derive(Debug)]
pub(crate) struct Ingest {
    requests: mpsc::Sender<WriteRequest>,
    answers: Streaming<WriteResponse>,
    offset: i64,
}

impl Ingest {
    async fn exchange(&mut self, request: WriteRequest) -> Result<WriteResponse, Status> {
        let is_commit = request.action == WriteAction::Commit as i32;
        within_time(if is_commit { COMMIT_TIME } else { ANSWER_TIME }, async {
            // If containerd has ended the call, its answer says why.
            let _ = self.requests.send(request).await;
            self.answers.message().await?.ok_or_else(ended)
        })
        .await
    }

    /// Appends data. The first piece replaces what an earlier write of this name has left.
    pub(crate) async fn write(&mut self, data: Bytes) -> Result<(), Status> {
        let end = self.offset + data.len() as i64;
        let (action, offset) = (WriteAction::Write as i32, self.offset);
        let request = WriteRequest { action, offset, data, ..WriteRequest::default() };
        let answer = self.exchange(request).await?;
        if answer.offset != end {
            let has = answer.offset;
            let what = format!("containerd has {has} bytes of a blob instead of {end}");
            return Err(Status::data_loss(what));
        }
        self.offset = end;
        Ok(())
    }

    /// Ends the write; true if the content store had the blob before.
    pub(crate) async fn commit(
        &mut self,
        blob: &Blob,
        mut labels: HashMap<String, String>,
    ) -> Result<bool, Status> {
        labels.insert(UNCOMPRESSED.to_owned(), blob.unpacked.clone());
        let request = WriteRequest {
            action: WriteAction::Commit as i32,
            total: i64::try_from(blob.size).unwrap_or(i64::MAX),
            expected: blob.digest.clone(),
            offset: self.offset,
            labels,
            ..WriteRequest::default()
        };
        match self.exchange(request).await {
            Err(status) if status.code() == Code::AlreadyExists => Ok(true),
            other => other.map(|_| false),
        }
    }

    /// Ends the call without a commit, so that the write can be aborted.
    pub(crate) async fn close(self) {
        let Self { requests, mut answers, .. } = self;
        drop(requests);
        let end = async { while let Ok(Some(_)) = answers.message().await {} };
        let _ = timeout(ANSWER_TIME, end).await;
    }
}
