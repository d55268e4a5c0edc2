//! Recognises sequential reads and writes, which go round the cache: a slow disk serves them well,
//! and they would push out blocks that it serves badly.

use std::collections::VecDeque;

/// Streams that are followed at once.
const STREAMS_MAX: usize = 64;

/// The latest streams, the newest last.
#[derive(Default)]
pub(crate) struct Streams {
    streams: VecDeque<Stream>,
}

struct Stream {
    end: u64,
    len: u64,
}

impl Streams {
    /// Notes a request, and returns the length of the stream that it ends, itself included.
    pub(crate) fn note(&mut self, at: u64, len: u64) -> u64 {
        let follows = self.streams.iter().rposition(|stream| stream.end == at);
        let before = follows.and_then(|place| self.streams.remove(place)).map_or(0, |s| s.len);
        if self.streams.len() == STREAMS_MAX {
            self.streams.pop_front();
        }
        let len = before.saturating_add(len);
        self.streams.push_back(Stream { end: at.saturating_add(len - before), len });
        len
    }
}

#[cfg(test)]
mod tests {
    use super::Streams;

    #[test]
    fn interleaved_streams_grow_and_random_requests_do_not() {
        let mut streams = Streams::default();
        for step in 0..10 {
            assert_eq!(streams.note(step * 4096, 4096), (step + 1) * 4096);
            assert_eq!(streams.note((1 << 30) + step * 8192, 8192), (step + 1) * 8192);
            assert_eq!(streams.note(step * 1_000_000 + 1, 4096), 4096);
        }
        for other in 0..200 {
            streams.note((2 << 30) + other * 1_000_000, 4096);
        }
        assert_eq!(streams.note(10 * 4096, 4096), 4096);
    }
}
