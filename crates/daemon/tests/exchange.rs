//! The exchange of the file below a mounted file system, against a model of the kernel's locks, in
//! many orders of the steps of everybody concerned, run by shuttle. An order in which all wait for
//! each other fails the test, as in the kernel it would hang the loop device until a reboot.
//!
//! The module is compiled here once more.

#![allow(clippy::unwrap_used, unreachable_pub, dead_code)]

#[path = "../src/supervisor/exchange/order.rs"]
mod order;

use std::sync::Arc;

use burgeon_block::{Error, ErrorKind, Result};
use order::{Mounted, exchange};
use shuttle::{
    sync::{Condvar, Mutex},
    thread,
};

/// Number of orders tried by each test.
const ORDERS: usize = 3000;

/// A file system on a loop device on a FUSE file that has lost its server.
struct Kernel {
    /// `lo_mutex`: held to open, to change and to close the loop device.
    loop_device: Mutex<()>,
    /// `s_umount`.
    umount: Mutex<()>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Active references of the superblock: mounts and open files. Without any it is released.
    active: u32,
    is_frozen: bool,
    old_requests_fail: bool,
    is_exchanged: bool,
}

impl Kernel {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            loop_device: Mutex::new(()),
            umount: Mutex::new(()),
            state: Mutex::new(State { active: 1, ..State::default() }),
            changed: Condvar::new(),
        })
    }

    /// Reads through the old connection.
    fn read_old(&self) {
        let mut state = self.state.lock().unwrap();
        while !state.old_requests_fail && !state.is_exchanged {
            state = self.changed.wait(state).unwrap();
        }
    }

    /// Drops an active reference. The last one releases the file system, which has to read.
    fn unmount(&self) {
        let umount = self.umount.lock().unwrap();
        let is_last = {
            let mut state = self.state.lock().unwrap();
            state.active -= 1;
            state.active == 0
        };
        if is_last {
            self.read_old();
            drop(self.loop_device.lock().unwrap());
        }
        drop(umount);
    }
}

struct Pin(Arc<Kernel>);

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.unmount();
    }
}

struct Live(Arc<Kernel>);

impl Mounted for Live {
    type Pin = Pin;

    fn fail_old_requests(&self) -> Result<()> {
        drop(self.0.loop_device.lock().unwrap());
        self.0.state.lock().unwrap().old_requests_fail = true;
        self.0.changed.notify_all();
        Ok(())
    }

    fn pin(&self) -> Result<Pin> {
        let _umount = self.0.umount.lock().unwrap();
        let mut state = self.0.state.lock().unwrap();
        if state.active == 0 {
            return Err(Error::new(ErrorKind::NotFound, "it is over"));
        }
        state.active += 1;
        Ok(Pin(Arc::clone(&self.0)))
    }

    fn freeze(&self, _: &Pin) -> Result<()> {
        let _umount = self.0.umount.lock().unwrap();
        self.0.state.lock().unwrap().is_frozen = true;
        Ok(())
    }

    fn change_file(&self) -> Result<()> {
        let _loop = self.0.loop_device.lock().unwrap();
        let _umount = self.0.umount.lock().unwrap();
        let mut state = self.0.state.lock().unwrap();
        assert!(state.active > 0, "the file system was released meanwhile");
        assert!(state.is_frozen, "dirty data would be lost");
        state.is_exchanged = true;
        Ok(())
    }

    fn thaw(&self, _: &Pin) {
        let _umount = self.0.umount.lock().unwrap();
        self.0.state.lock().unwrap().is_frozen = false;
    }
}

#[test]
fn an_umount_at_any_time_finishes_and_is_never_met_by_an_exchange() {
    shuttle::check_random(
        || {
            let kernel = Kernel::new();
            let user = thread::spawn({
                let kernel = Arc::clone(&kernel);
                move || kernel.unmount()
            });
            let exchanged = exchange(&Live(Arc::clone(&kernel)));
            user.join().unwrap();
            let state = kernel.state.lock().unwrap();
            assert_eq!((state.active, state.is_frozen), (0, false));
            assert_eq!(exchanged.is_ok(), state.is_exchanged);
        },
        ORDERS,
    );
}

/// As a thaw does whose process was killed: it reads a superblock.
#[test]
fn a_killed_process_that_waits_for_the_old_connection_does_not_stop_an_exchange() {
    shuttle::check_random(
        || {
            let kernel = Kernel::new();
            let killed = thread::spawn({
                let kernel = Arc::clone(&kernel);
                move || {
                    let _umount = kernel.umount.lock().unwrap();
                    kernel.read_old();
                }
            });
            exchange(&Live(Arc::clone(&kernel))).unwrap();
            killed.join().unwrap();
            let state = kernel.state.lock().unwrap();
            assert!(state.is_exchanged && !state.is_frozen);
        },
        ORDERS,
    );
}
