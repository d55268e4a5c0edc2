//! The state that the reader threads of one FUSE file share: the descriptor, the slots and their
//! owners; and the replies.

use std::{
    io::IoSlice,
    os::fd::OwnedFd,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use burgeon_block::{Pages, Shape};
use zerocopy::IntoBytes;

use crate::{
    engine::{self, Answer, End, Life},
    fuse::{self, Operation, OutHeader, small_payload},
    slots::{SLOT_COUNT, Slots},
};

/// The part of a server that does not depend on its device: descriptor, slots, their owners.
pub(super) struct Control {
    pub(super) fuse: OwnedFd,
    pub(super) slots: Arc<Slots>,
    pub(super) life: Arc<Life>,
    owners: Mutex<Owners>,
    /// A slot was freed, or it is time to stop.
    changed: Condvar,
}

/// The slots without an owner. Both vectors have their final capacity from the start.
struct Owners {
    replay: Vec<u32>,
    free: Vec<u32>,
}

impl Control {
    pub(super) fn new(fuse: OwnedFd, slots: Arc<Slots>, life: Arc<Life>) -> Self {
        let mut owners = Owners {
            replay: Vec::with_capacity(SLOT_COUNT as usize),
            free: Vec::with_capacity(SLOT_COUNT as usize),
        };
        for slot in (0..SLOT_COUNT).rev() {
            match slots.is_unanswered(slot) {
                true => owners.replay.push(slot),
                false => owners.free.push(slot),
            }
        }
        Self { fuse, slots, life, owners: Mutex::new(owners), changed: Condvar::new() }
    }

    fn owners(&self) -> MutexGuard<'_, Owners> {
        // No code that can panic runs under this lock.
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot that a predecessor left unanswered; the caller owns it.
    pub(super) fn next_replay(&self) -> Option<u32> {
        if self.is_stopping() { None } else { self.owners().replay.pop() }
    }

    /// An empty slot; waits for one. `None` when stopping.
    pub(super) fn take_free(&self) -> Option<u32> {
        let mut owners = self.owners();
        loop {
            if self.is_stopping() {
                return None;
            }
            if let Some(slot) = owners.free.pop() {
                return Some(slot);
            }
            owners = self.changed.wait(owners).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives an empty slot back.
    pub(super) fn free(&self, slot: u32) {
        self.owners().free.push(slot);
        self.changed.notify_one();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.life.is_stopping()
    }

    pub(super) fn request_stop(&self) {
        self.end(End::Stopped);
    }

    /// Serving is over; the first reason counts. Threads leave at their next step.
    pub(super) fn end(&self, end: End) {
        self.life.end(end);
        {
            // Under the lock, so that no thread reads the flag just before and waits just after.
            let _owners = self.owners();
            self.life.stop();
        }
        self.changed.notify_all();
        if end != End::Stopped {
            self.life.cancel();
        }
    }

    pub(super) fn reply(&self, unique: u64, payload: &[u8]) {
        let header = OutHeader::answer(unique, payload.len());
        self.send(&[IoSlice::new(header.as_bytes()), IoSlice::new(payload)]);
    }

    pub(super) fn reply_error(&self, unique: u64, errno: i32) {
        self.send(&[IoSlice::new(OutHeader::error(unique, errno).as_bytes())]);
    }

    pub(super) fn reply_small(&self, unique: u64, operation: Operation, shape: &Shape) {
        self.reply(unique, small_payload(operation, shape, &mut [0; 104]));
    }

    /// The kernel takes a reply whole or refuses it, and refuses it only if no reader waits any
    /// more: it was killed, the connection is gone, or a predecessor answered.
    fn send(&self, parts: &[IoSlice<'_>]) {
        let _ = rustix::io::retry_on_intr(|| rustix::io::writev(&self.fuse, parts));
    }
}

/// Has the kernel send the unanswered requests of a predecessor again, with the payloads of their
/// writes. Where it cannot (before Linux 6.9), the requests stay in their slots.
pub(super) fn have_requests_sent_again(fuse: &OwnedFd, slots: &Slots) {
    if slots.unanswered() == 0 {
        return;
    }
    // First the message: a server killed between the two leaves slots whose requests the kernel
    // sends again, and its successor asks for that once more.
    if rustix::io::retry_on_intr(|| rustix::io::write(fuse, fuse::resend().as_bytes())).is_ok() {
        slots.forget_requests();
    }
}

/// A slot that belongs to a task. Dropped without an answer, its request stays for a successor.
pub(super) struct Parked {
    control: Arc<Control>,
    slot: u32,
    unique: u64,
    payload: Option<Pages>,
}

impl Parked {
    /// `payload`: a write's.
    pub(super) fn new(
        control: Arc<Control>,
        slot: u32,
        unique: u64,
        payload: Option<Pages>,
    ) -> Self {
        Self { control, slot, unique, payload }
    }
}

impl engine::Parked for Parked {
    fn memory(&mut self, len: usize) -> Option<&mut [u8]> {
        self.payload.as_mut().map(|pages| &mut pages.bytes_mut()[..len])
    }

    fn copy_payload(&mut self, _into: &mut [u8]) -> Result<(), i32> {
        // A write has its payload already.
        Err(libc::EIO)
    }

    fn answer(self, answer: Answer<'_>) {
        let Self { control, slot, unique, .. } = self;
        match answer {
            Answer::Bytes(bytes) => control.reply(unique, bytes),
            Answer::Written(len) => control.reply(unique, &fuse::written(len)),
            Answer::Done => control.reply(unique, &[]),
            Answer::Failed(errno) => control.reply_error(unique, errno),
            // A read has no memory of its own here.
            Answer::Own(_) => control.reply_error(unique, libc::EIO),
        }
        control.slots.clear(slot);
        control.free(slot);
    }
}
