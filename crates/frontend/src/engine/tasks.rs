//! The tasks of the engine: what becomes of requests that their thread could not answer.
//!
//! Invariant: a task lets go of its request before [`super::Life::drain`] returns.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::Arc,
    task::Poll,
};

use burgeon_block::{BLOCK_SIZE, BlockDevice, ByteRange, Pages, Result};
use tokio::sync::SemaphorePermit;

use super::{
    Answer, Call, Changes, Engine, Handled, Parked, Read, Request, life::InWork, panicked,
};

impl<D: BlockDevice, A: Changes<D>> Engine<D, A> {
    /// Reads in a task of the runtime.
    #[inline(never)]
    pub(super) fn miss<C: Call>(self: &Arc<Self>, read: Read, call: C) -> Handled {
        let task = Task { parked: Some(call.park()), _in_work: self.life.enter() };
        self.runtime.spawn(self.clone().read_later(read, task));
        Handled::Parked
    }

    /// Changes the device in a task of the runtime.
    pub(super) fn change<C: Call>(self: &Arc<Self>, request: Request, call: C) -> Handled {
        let task = Task { parked: Some(call.park()), _in_work: self.life.enter() };
        self.runtime.spawn(self.clone().change_later(request, task));
        Handled::Parked
    }

    /// The task of a miss.
    async fn read_later<P: Parked>(self: Arc<Self>, read: Read, mut task: Task<P>) {
        let Some(parked) = &mut task.parked else { return };
        let request = Request::Read { at: read.at, len: read.len };
        let result = tokio::select! {
            biased;
            () = self.life.cancelled() => return,
            result = caught((self.device.name(), request), self.fetch(&read, parked)) => result,
        };
        let counters = self.counters();
        if result.is_ok() {
            counters.misses.add(1);
            counters.miss_bytes.add(read.len as u64);
            counters.miss_latency.record(read.arrival.begun.elapsed().as_nanos() as u64);
            counters.replayed.add(u64::from(read.arrival.replayed));
        } else {
            counters.failed_reads.add(1);
        }
        task.answer(match &result {
            Ok(Some(memory)) => Answer::Bytes(&memory.pages.bytes()[..read.len]),
            Ok(None) => Answer::Own(read.len),
            Err(errno) => Answer::Failed(*errno),
        });
    }

    /// Reads into the request's own memory, or into some that is held until the answer is sent.
    async fn fetch<P: Parked>(
        &self,
        read: &Read,
        parked: &mut P,
    ) -> Result<Option<Memory<'_>>, i32> {
        if let Some(bytes) = parked.memory(read.len) {
            self.device.read(read.at, bytes).await.map_err(|error| error.errno())?;
            return Ok(None);
        }
        let mut memory = self.memory(read.len).await?;
        let bytes = &mut memory.pages.bytes_mut()[..read.len];
        self.device.read(read.at, bytes).await.map_err(|error| error.errno())?;
        Ok(Some(memory))
    }

    /// The task of a write, an erasure or a flush.
    async fn change_later<P: Parked>(self: Arc<Self>, request: Request, mut task: Task<P>) {
        let Some(parked) = &mut task.parked else { return };
        let result = tokio::select! {
            biased;
            () = self.life.cancelled() => return,
            result = caught((self.device.name(), request), self.apply(request, parked)) => result,
        };
        task.answer(match (result, request) {
            (Ok(()), Request::Write { len, .. }) => Answer::Written(len),
            (Ok(()), _) => Answer::Done,
            (Err(errno), _) => Answer::Failed(errno),
        });
    }

    async fn apply<P: Parked>(&self, request: Request, parked: &mut P) -> Result<(), i32> {
        let device = &*self.device;
        let changed = match request {
            Request::Write { at, len, fua } => match parked.memory(len) {
                Some(bytes) => A::write(device, at, bytes, fua).await,
                None => {
                    let mut memory = self.memory(len).await?;
                    let bytes = &mut memory.pages.bytes_mut()[..len];
                    parked.copy_payload(bytes)?;
                    A::write(device, at, bytes, fua).await
                }
            },
            Request::Erase { at, len, how } => {
                let range = ByteRange::at(at, len).ok_or(libc::EINVAL)?;
                A::erase(device, range, how).await
            }
            Request::Flush => A::flush(device).await,
            Request::Read { .. } => return Err(libc::EINVAL),
        };
        changed.map_err(|error| error.errno())
    }

    /// Memory for `len` bytes; waits for room.
    async fn memory(&self, len: usize) -> Result<Memory<'_>, i32> {
        let blocks = len.div_ceil(BLOCK_SIZE as usize) as u32;
        // An error would mean a closed semaphore: none is.
        let room = self.room.acquire_many(blocks).await.map_err(|_| libc::EIO)?;
        let pages = Pages::zeroed(len as u64).ok_or(libc::ENOMEM)?;
        Ok(Memory { pages, _room: room })
    }
}

/// Memory of a miss or a write, and its part of the room.
struct Memory<'a> {
    pages: Pages,
    _room: SemaphorePermit<'a>,
}

/// A task's request. The fields are dropped in this order, so the request is let go of before the
/// task is no longer counted.
struct Task<P> {
    parked: Option<P>,
    _in_work: InWork,
}

impl<P: Parked> Task<P> {
    fn answer(&mut self, answer: Answer<'_>) {
        if let Some(parked) = self.parked.take() {
            parked.answer(answer);
        }
    }
}

/// Runs `future` for `request`; a panic in it is EIO.
async fn caught<T>(
    (mount, request): (&str, Request),
    future: impl Future<Output = Result<T, i32>>,
) -> Result<T, i32> {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context)));
        // It is not polled again after a panic, because this is ready then.
        polled.unwrap_or_else(|_panic| Poll::Ready(Err(panicked(mount, request))))
    })
    .await
}
