//! The first stop of a block that misses: a queue in memory, so that a block which is read once
//! costs no write to the cache device.

use std::collections::{HashMap, VecDeque};

use crate::keys::Key;

/// A bounded queue of keys, each with a note whether it was hit.
pub(super) struct Window {
    queue: VecDeque<(Key, u32)>,
    /// The number of a key's current place in the queue, and whether it was hit there.
    here: HashMap<Key, (u32, bool)>,
    count_max: usize,
    next: u32,
}

impl Window {
    pub(super) fn new(count_max: usize) -> Self {
        let count_max = count_max.max(1);
        Self {
            queue: VecDeque::with_capacity(2 * count_max + 1),
            here: HashMap::with_capacity(count_max + 1),
            count_max,
            next: 0,
        }
    }

    pub(super) fn touch(&mut self, key: Key) -> bool {
        self.here.get_mut(&key).map(|(_, hit)| *hit = true).is_some()
    }

    pub(super) fn remove(&mut self, key: Key) -> bool {
        self.here.remove(&key).is_some()
    }

    pub(super) fn push(&mut self, key: Key) {
        self.next = self.next.wrapping_add(1);
        self.here.insert(key, (self.next, false));
        self.queue.push_back((key, self.next));
        // Places of removed keys stay in the queue until they are its oldest, or too many.
        if self.queue.len() > 2 * self.count_max {
            let here = &self.here;
            self.queue.retain(|(key, number)| here.get(key).is_some_and(|(n, _)| n == number));
        }
    }

    /// The oldest key, and whether it was hit, while there are too many.
    pub(super) fn overflow(&mut self) -> Option<(Key, bool)> {
        if self.here.len() <= self.count_max {
            return None;
        }
        loop {
            let (key, number) = self.queue.pop_front()?;
            if let Some((current, hit)) = self.here.get(&key).copied()
                && current == number
            {
                self.here.remove(&key);
                return Some((key, hit));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Window;
    use crate::keys::Key;

    #[test]
    fn the_oldest_leaves_first_and_removed_keys_take_no_room() {
        let key = |block| Key { device: 0, block };
        let mut window = Window::new(3);
        for block in 0..3 {
            window.push(key(block));
        }
        assert!(window.touch(key(1)) && window.remove(key(0)) && !window.touch(key(0)));
        window.push(key(0));
        assert_eq!(window.overflow(), None);
        window.push(key(4));
        assert_eq!(window.overflow(), Some((key(1), true)));
        window.push(key(5));
        assert_eq!(window.overflow(), Some((key(2), false)));
        for _ in 0..1000 {
            window.remove(key(0));
            window.push(key(0));
        }
        assert!(window.queue.len() <= 7);
    }
}
