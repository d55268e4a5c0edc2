//! The end of threads that go on until they are told.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Sets the flag when it is dropped, so that a failed assertion ends the threads of a scope, too.
pub struct Ends<'a>(pub &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}
