//! Recognises sequential reads and writes, which bypass the cache: a slow disk serves them well,
//! and they would push out blocks that it serves badly.

use std::collections::VecDeque;

/// Streams that are followed at once.
const STREAMS_MAX: usize = 64;
/// Distance in bytes by which requests of a stream may overtake one another.
const REORDERED_MAX: u64 = 1 << 20;

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
    /// Notes a request, and returns the length of the stream that it belongs to, itself included.
    ///
    /// Requests of one stream come in any order, because many are in flight at once: one that
    /// begins a little before or behind the end belongs to it. Only its bytes behind the end count.
    pub(crate) fn note(&mut self, at: u64, len: u64) -> u64 {
        let near = |stream: &Stream| at.abs_diff(stream.end) <= REORDERED_MAX;
        let place = self.streams.iter().rposition(near);
        let Stream { end, len: before } = place
            .and_then(|place| self.streams.remove(place))
            .unwrap_or(Stream { end: at, len: 0 });
        if self.streams.len() == STREAMS_MAX {
            self.streams.pop_front();
        }
        let new_end = end.max(at.saturating_add(len));
        let stream = Stream { end: new_end, len: before.saturating_add(len.min(new_end - end)) };
        let total = stream.len;
        self.streams.push_back(stream);
        total
    }
}

#[cfg(test)]
mod tests {
    use super::Streams;

    #[test]
    fn interleaved_and_reordered_streams_grow() {
        let mut streams = Streams::default();
        for step in 0..10 {
            assert_eq!(streams.note(step * 4096, 4096), (step + 1) * 4096);
            assert_eq!(streams.note((1 << 30) + step * 8192, 8192), (step + 1) * 8192);
        }
        for step in [1, 0, 3, 2, 5, 4, 7, 6] {
            streams.note((2 << 30) + (step << 16), 1 << 16);
        }
        // Half of them came after a later one.
        assert_eq!(streams.note((2 << 30) + (8 << 16), 1 << 16), 5 << 16);
    }

    #[test]
    fn random_requests_are_no_stream() {
        let (mut streams, mut rng) = (Streams::default(), testkit::Rng::new(1));
        // In a small device, and far apart.
        for size in [8 << 20, 1 << 40] {
            let longest =
                (0..20_000).map(|_| streams.note(rng.below(size / 4096) * 4096, 4096)).max();
            assert!(longest < Some(1 << 20), "{longest:?}");
        }
    }
}
