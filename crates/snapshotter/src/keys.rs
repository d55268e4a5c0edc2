//! Locks of names: calls about one snapshot follow one another, and all others go on.
//!
//! A call takes all names that it needs at once, so calls cannot wait for one another in a circle.
//! A parent is taken shared: its children are made side by side, and it is not removed meanwhile.
//! No lock is held while something is asked from a network. Shown by the tests below.

use std::{
    collections::HashMap,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The longest wait for another call about the same snapshot.
const WAIT: Duration = Duration::from_secs(120);

/// The names in use.
#[derive(Debug, Default)]
pub(crate) struct NamesInUse {
    used: Mutex<HashMap<String, Use>>,
    freed: Condvar,
}

#[derive(Debug)]
enum Use {
    Alone,
    Shared(usize),
}

/// Names that are taken until this is dropped.
#[derive(Debug)]
pub(crate) struct Taken<'a> {
    keys: &'a NamesInUse,
    names: Vec<String>,
}

impl NamesInUse {
    /// Takes `alone` and `shared`, or nothing if another call has one of them for too long.
    pub(crate) fn take(&self, alone: &[&str], shared: Option<&str>) -> Option<Taken<'_>> {
        self.take_within(alone, shared, WAIT)
    }

    fn take_within(
        &self,
        alone: &[&str],
        shared: Option<&str>,
        wait: Duration,
    ) -> Option<Taken<'_>> {
        let end = Instant::now() + wait;
        let mut used = self.lock();
        // A name that is taken alone need not be shared as well.
        let shared = shared.filter(|name| !alone.contains(name));
        while alone.iter().any(|name| used.contains_key(*name))
            || shared.is_some_and(|name| matches!(used.get(name), Some(Use::Alone)))
        {
            let left = end.checked_duration_since(Instant::now())?;
            used = match self.freed.wait_timeout(used, left) {
                Ok((used, _)) => used,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        let mut names: Vec<_> = alone.iter().map(|name| (*name).to_owned()).collect();
        names.dedup();
        used.extend(names.iter().map(|name| (name.clone(), Use::Alone)));
        if let Some(name) = shared {
            match used.entry(name.to_owned()).or_insert(Use::Shared(0)) {
                Use::Shared(count) => *count += 1,
                Use::Alone => {}
            }
            names.push(name.to_owned());
        }
        Some(Taken { keys: self, names })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Use>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut used = self.keys.lock();
        for name in &self.names {
            match used.get_mut(name) {
                Some(Use::Shared(count)) if *count > 1 => *count -= 1,
                _ => drop(used.remove(name)),
            }
        }
        self.keys.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::NamesInUse;

    const NONE: Duration = Duration::ZERO;

    #[test]
    fn a_name_is_taken_alone_or_shared() {
        let keys = NamesInUse::default();
        let first = keys.take_within(&["a"], Some("p"), NONE).unwrap();
        let second = keys.take_within(&["b"], Some("p"), NONE).unwrap();
        assert!(keys.take_within(&["a"], None, NONE).is_none());
        assert!(keys.take_within(&["c", "p"], None, NONE).is_none());
        drop(first);
        assert!(keys.take_within(&["p"], None, NONE).is_none(), "the second still has it");
        drop(second);
        let alone = keys.take_within(&["p", "a"], None, NONE).unwrap();
        assert!(keys.take_within(&["c"], Some("p"), NONE).is_none());
        drop(alone);
        // A parent that is taken alone by the same call, and a name given twice.
        drop(keys.take_within(&["p", "p"], Some("p"), NONE).unwrap());
        assert!(keys.lock().is_empty());
    }

    #[test]
    fn a_waiting_call_goes_on_when_the_name_is_free() {
        let keys = NamesInUse::default();
        let taken = keys.take(&["a"], None).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| keys.take(&["a"], None).is_some());
            drop(taken);
            assert!(waiting.join().unwrap());
        });
    }
}
