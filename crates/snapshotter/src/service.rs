//! The gRPC service: requests of containerd become calls of [`Snapshotter`].
//!
//! Each call runs on a thread of its own, of at most [`CALLS_MAX`]; further ones wait in their
//! connection. Those that may wait for a mount are at most [`MOUNTING_MAX`], so that the others
//! always find a thread. Every message is bounded before it is decoded.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use burgeon_block::ErrorKind;
use hyper::body::Incoming;
use tokio::sync::Semaphore;
use tonic::{Code, Request, Response, Status, body::Body, server::Grpc};
use tonic_prost::ProstCodec;

use crate::{
    api::{self, SERVICE},
    filter::Filter,
    model::{Labels, Refusal, Snapshot, SnapshotKind},
    snapshotter::{CallError, CallResult, Snapshotter},
};

/// The longest message in either direction, in bytes: that of containerd.
pub(crate) const MESSAGE_MAX: usize = 16 << 20;
/// Most calls at the same time.
const CALLS_MAX: usize = 64;
/// Most of them that may mount a chain, and so wait for a registry.
const MOUNTING_MAX: usize = 32;
/// Most snapshots in a message of `List`, as containerd's own server has it.
const PAGE: usize = 100;

/// Serves one snapshotter.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    snapshotter: Arc<Snapshotter>,
    calls: Arc<Semaphore>,
    /// `None` for a call that mounts nothing.
    mounting: Option<Arc<Semaphore>>,
}

impl Service {
    pub(crate) fn new(snapshotter: Arc<Snapshotter>) -> Self {
        let [calls, mounting] =
            [CALLS_MAX, MOUNTING_MAX].map(|most| Arc::new(Semaphore::new(most)));
        Self { snapshotter, calls, mounting: Some(mounting) }
    }

    /// Answers a request of HTTP.
    pub(crate) async fn answer(
        mut self,
        request: http::Request<Incoming>,
    ) -> Result<http::Response<Body>, Infallible> {
        let method = request.uri().path().strip_prefix(SERVICE).unwrap_or_default().to_owned();
        if !matches!(method.as_str(), "Prepare" | "View" | "Mounts" | "Commit") {
            self.mounting = None;
        }
        Ok(match method.as_str() {
            "Prepare" => self.call(request, |all, r| create(all, SnapshotKind::Active, r)).await,
            "View" => self.call(request, |all, r| create(all, SnapshotKind::View, r)).await,
            "Mounts" => {
                self.call(request, |all, r: api::KeyRequest| {
                    Ok(api::MountsResponse { mounts: all.mounts(&r.key)? })
                })
                .await
            }
            "Commit" => {
                self.call(request, |all, r: api::CommitRequest| {
                    all.commit(&r.key, &r.name, given(&r.parent), Labels::from_iter(r.labels))?;
                    Ok(api::Empty {})
                })
                .await
            }
            "Remove" => {
                self.call(request, |all, r: api::KeyRequest| {
                    all.remove(&r.key)?;
                    Ok(api::Empty {})
                })
                .await
            }
            "Stat" => {
                self.call(request, |all, r: api::KeyRequest| {
                    Ok(api::InfoResponse { info: Some(info(all.stat(&r.key)?)) })
                })
                .await
            }
            "Update" => self.call(request, update).await,
            "List" => self.list(request).await,
            "Usage" => {
                self.call(request, |all, r: api::KeyRequest| {
                    let usage = all.usage(&r.key)?;
                    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
                    let (size, inodes) = (number(usage.bytes), number(usage.inodes));
                    Ok(api::UsageResponse { size, inodes })
                })
                .await
            }
            "Cleanup" => {
                self.call(request, |all, _: api::Empty| {
                    all.cleanup();
                    Ok(api::Empty {})
                })
                .await
            }
            _ => Status::unimplemented("no such method").into_http(),
        })
    }

    /// A method with one answer.
    async fn call<M, A>(
        self,
        request: http::Request<Incoming>,
        run: fn(&Snapshotter, M) -> CallResult<A>,
    ) -> http::Response<Body>
    where
        M: prost::Message + Default + 'static,
        A: prost::Message + Default + 'static,
    {
        let codec = ProstCodec::<A, M>::default();
        let handler = Handler(move |message: M| {
            let service = self.clone();
            async move { service.run(move |all| run(all, message)).await }
        });
        Grpc::new(codec)
            .max_decoding_message_size(MESSAGE_MAX)
            .max_encoding_message_size(MESSAGE_MAX)
            .unary(handler, request)
            .await
    }

    async fn list(self, request: http::Request<Incoming>) -> http::Response<Body> {
        let codec = ProstCodec::<api::ListResponse, api::ListRequest>::default();
        let handler = Handler(move |message: api::ListRequest| {
            let service = self.clone();
            async move {
                let run = move |all: &Snapshotter| Ok(all.list(&Filter::parse(&message.filters)?));
                let found = service.run(run).await?;
                let mut found = found.into_iter().map(info);
                let pages = std::iter::from_fn(move || {
                    let page: Vec<_> = found.by_ref().take(PAGE).collect();
                    (!page.is_empty()).then_some(Ok(api::ListResponse { info: page }))
                });
                Ok(tokio_stream::iter(pages))
            }
        });
        Grpc::new(codec)
            .max_decoding_message_size(MESSAGE_MAX)
            .max_encoding_message_size(MESSAGE_MAX)
            .server_streaming(handler, request)
            .await
    }

    /// Runs a call that blocks.
    async fn run<A: Send + 'static>(
        &self,
        run: impl FnOnce(&Snapshotter) -> CallResult<A> + Send + 'static,
    ) -> Result<A, Status> {
        let over = |_| Status::unavailable("the snapshotter ends");
        // First, so that a call that waits for it takes no thread from the others.
        let mounting = match &self.mounting {
            Some(mounting) => Some(Arc::clone(mounting).acquire_owned().await.map_err(over)?),
            None => None,
        };
        let permit = Arc::clone(&self.calls).acquire_owned().await.map_err(over)?;
        let snapshotter = Arc::clone(&self.snapshotter);
        let task = tokio::task::spawn_blocking(move || {
            // Until the call ends: its client may be gone before.
            let _permits = (permit, mounting);
            run(&snapshotter)
        });
        let answer = task.await.map_err(|_| Status::internal("a call panicked: see the log"))?;
        answer.map_err(|failure| {
            if failure.is_of_host() {
                tracing::error!(%failure, "a call failed");
            }
            status(&failure)
        })
    }
}

/// A function as a service of one method.
#[derive(Clone)]
pub(crate) struct Handler<F>(pub(crate) F);

impl<F, M, A, R> tower_service::Service<Request<M>> for Handler<F>
where
    F: FnMut(M) -> R,
    R: Future<Output = Result<A, Status>> + Send + 'static,
{
    type Response = Response<A>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Response<A>, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<M>) -> Self::Future {
        let answer = (self.0)(request.into_inner());
        Box::pin(async move { answer.await.map(Response::new) })
    }
}

fn create(
    all: &Snapshotter,
    kind: SnapshotKind,
    request: api::CreateRequest,
) -> CallResult<api::MountsResponse> {
    let labels = Labels::from_iter(request.labels);
    let mounts = all.create(kind, &request.key, given(&request.parent), labels)?;
    Ok(api::MountsResponse { mounts })
}

fn update(all: &Snapshotter, request: api::UpdateRequest) -> CallResult<api::InfoResponse> {
    let missing = || Refusal::Invalid("the request names no snapshot".into());
    let wanted = request.info.ok_or_else(missing)?;
    let paths = request.update_mask.map(|mask| mask.paths).unwrap_or_default();
    let changed = all.update(&wanted.name, &Labels::from_iter(wanted.labels), &paths)?;
    Ok(api::InfoResponse { info: Some(info(changed)) })
}

/// An empty text stands for none.
fn given(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

fn info(snapshot: Snapshot) -> api::Info {
    api::Info {
        name: snapshot.name,
        parent: snapshot.parent.unwrap_or_default(),
        kind: match snapshot.kind {
            SnapshotKind::View => 1,
            SnapshotKind::Active => 2,
            SnapshotKind::Committed => 3,
        },
        created_at: Some(snapshot.created.into()),
        updated_at: Some(snapshot.updated.into()),
        labels: snapshot.labels.into_iter().collect(),
    }
}

/// containerd decides by these codes.
pub(crate) fn status(failure: &CallError) -> Status {
    let code = match failure {
        CallError::Refused(Refusal::NotFound(_)) => Code::NotFound,
        CallError::Refused(Refusal::Exists(_)) => Code::AlreadyExists,
        CallError::Refused(Refusal::Precondition(_)) => Code::FailedPrecondition,
        CallError::Refused(Refusal::Invalid(_)) => Code::InvalidArgument,
        CallError::Refused(Refusal::Full(_)) => Code::ResourceExhausted,
        CallError::Busy(_) => Code::Unavailable,
        CallError::Failed(error) => match error.kind() {
            ErrorKind::Invalid => Code::InvalidArgument,
            ErrorKind::NoSpace => Code::ResourceExhausted,
            ErrorKind::Unavailable => Code::Unavailable,
            _ => Code::Internal,
        },
    };
    Status::new(code, failure.to_string())
}
