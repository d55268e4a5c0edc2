//! Reusable buffers, one per thread: fresh memory for every megabyte of nodes would cost more in
//! page faults than filling it.

use std::cell::Cell;

thread_local! {
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Lends `len` bytes of undefined content. The thread's buffer is taken out meanwhile: code that
/// waits inside rayon may run other work on this thread, which then gets another buffer.
pub(crate) fn with_buffer<T>(len: usize, use_it: impl FnOnce(&mut [u8]) -> T) -> T {
    let mut buffer = BUFFER.take();
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    let result = use_it(&mut buffer[..len]);
    BUFFER.set(buffer);
    result
}
