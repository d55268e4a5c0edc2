//! The tasks of the server's mounts in many orders of their steps, run by shuttle: a supervisor
//! that attaches a mount repeatedly (a server's restart, a `map`, a `pin`), and a fake frontend
//! whose servers end by themselves.
//!
//! The module is compiled here once more, with shuttle's locks.

#![allow(clippy::unwrap_used, unreachable_pub, dead_code)]

#[path = "../src/server/tasks.rs"]
mod tasks;

/// Replaces the crate's own module of this name.
mod sync {
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
}

use std::sync::Arc;

use shuttle::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
};
use tasks::Tasks;

/// Number of orders tried by each test.
const ORDERS: usize = 3000;
const MOUNT: u32 = 7;

enum Job {
    /// Serve the mount unless it is served already.
    Attach,
    /// The server of this number has ended.
    Ended(u64),
}

/// A server without files and without a kernel.
#[derive(Default)]
struct Serving {
    tasks: Tasks<u32, Job>,
    /// The number of the mount's server.
    mount: Mutex<Option<u64>>,
    servers: AtomicU64,
    /// Number of servers that have the mount's slots now.
    owners: AtomicU64,
    done: AtomicU64,
    how: How,
}

#[derive(Clone, Copy, PartialEq, Default)]
enum How {
    #[default]
    Well,
    /// The former design: a task for each message.
    ATaskEach,
    /// The end of any server counts as the end of the mount's present one.
    AnyEnd,
}

impl Serving {
    fn add(self: &Arc<Self>, job: Job) {
        if self.how == How::ATaskEach {
            let serving = Arc::clone(self);
            thread::spawn(move || serving.perform(job));
            return;
        }
        if self.tasks.add(MOUNT, job) {
            let serving = Arc::clone(self);
            thread::spawn(move || {
                while let Some(job) = serving.tasks.next(MOUNT) {
                    serving.perform(job);
                }
            });
        }
    }

    /// The steps of `server/mounts.rs`.
    fn perform(&self, job: Job) {
        match job {
            Job::Attach if self.mount.lock().unwrap().is_some() => {}
            Job::Attach => {
                // Stands for opening files.
                thread::yield_now();
                assert_eq!(self.owners.fetch_add(1, SeqCst), 0, "the slots have two servers");
                let server = self.servers.fetch_add(1, SeqCst);
                *self.mount.lock().unwrap() = Some(server);
            }
            Job::Ended(server) => {
                let mut mount = self.mount.lock().unwrap();
                if *mount == Some(server) || (self.how == How::AnyEnd && mount.is_some()) {
                    *mount = None;
                    self.owners.fetch_sub(1, SeqCst);
                }
            }
        }
        self.done.fetch_add(1, SeqCst);
    }
}

/// Threads of three supervisors attach; a server ends, and its end is reported twice.
fn attached_again_and_again(how: How) {
    let serving = Arc::new(Serving { how, ..Serving::default() });
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let serving = Arc::clone(&serving);
            thread::spawn(move || serving.add(Job::Attach))
        })
        .collect();
    serving.add(Job::Ended(0));
    serving.add(Job::Ended(0));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    serving.add(Job::Attach);
    while serving.done.load(SeqCst) < 6 {
        thread::yield_now();
    }
    assert!(serving.mount.lock().unwrap().is_some(), "the live server is forgotten");
    assert_eq!(serving.owners.load(SeqCst), 1);
}

#[test]
fn a_mount_has_one_server_at_a_time() {
    shuttle::check_random(|| attached_again_and_again(How::Well), ORDERS);
}

#[test]
fn two_tasks_of_a_mount_are_noticed() {
    let tried = std::panic::catch_unwind(|| {
        shuttle::check_random(|| attached_again_and_again(How::ATaskEach), ORDERS);
    });
    assert!(tried.is_err(), "shuttle does not see that a mount is served twice");
}

#[test]
fn the_end_of_an_earlier_server_is_told_from_that_of_its_successor() {
    let check = |how| {
        move || {
            let serving = Arc::new(Serving { how, ..Serving::default() });
            for job in [Job::Attach, Job::Ended(0), Job::Attach, Job::Ended(0)] {
                serving.add(job);
            }
            while serving.done.load(SeqCst) < 4 {
                thread::yield_now();
            }
            assert!(serving.mount.lock().unwrap().is_some(), "the live server is forgotten");
        }
    };
    shuttle::check_random(check(How::Well), ORDERS);
    let tried = std::panic::catch_unwind(|| shuttle::check_random(check(How::AnyEnd), ORDERS));
    assert!(tried.is_err(), "shuttle does not see that the live server is forgotten");
}
