//! Events that code under test makes, gathered in this thread.

use std::{
    fmt::{Debug, Write},
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use tracing::{
    Dispatch, Event, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
    subscriber::DefaultGuard,
};

/// Gathers the events of this thread until it is dropped.
pub struct Events {
    lines: Arc<Mutex<Vec<String>>>,
    _guard: DefaultGuard,
}

impl Events {
    /// Begins to gather.
    pub fn gather() -> Self {
        // While there is one dispatcher alone, `tracing` decides by the calling thread's whether an
        // event is ever wanted: a thread without one would turn it off for all.
        SECOND.get_or_init(|| Dispatch::new(Gatherer(Arc::default())));
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let guard = tracing::subscriber::set_default(Gatherer(Arc::clone(&lines)));
        Self { lines, _guard: guard }
    }

    /// The events since the last call: `WARN message field=value …`, one an event.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.lines.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A second dispatcher, which no thread uses.
static SECOND: OnceLock<Dispatch> = OnceLock::new();

struct Gatherer(Arc<Mutex<Vec<String>>>);

impl Subscriber for Gatherer {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event()
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut words = Words::default();
        event.record(&mut words);
        let line = format!("{} {}{}", event.metadata().level(), words.message, words.fields);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Words {
    message: String,
    fields: String,
}

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            name => _ = write!(self.fields, " {name}={value:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Events;

    fn say() {
        tracing::warn!("said");
    }

    #[test]
    fn an_event_that_another_thread_met_first_is_gathered() {
        let events = Events::gather();
        std::thread::spawn(say).join().unwrap();
        assert!(events.take().is_empty());
        say();
        assert_eq!(events.take(), ["WARN said"]);
    }
}
