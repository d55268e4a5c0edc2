//! Events as entries of systemd's journal, each field apart: its native protocol.
//!
//! ```text
//!   start:   standard error is a stream of the journal ─► connect to its socket ─► enter the sandbox
//!   event:   MESSAGE, PRIORITY, BURGEON_MOUNT, … in one datagram ── not taken ─► a line on standard error
//! ```
//!
//! Invariants: a process connects before it enters its sandbox, which allows it to send; sending
//! never waits; a datagram is at most [`VALUE_MAX`] a field; a value may hold any byte, because its
//! length precedes it.

use std::{fmt::Debug, io, os::unix::net::UnixDatagram, path::Path};

use rustix::net::{SendFlags, send};
use tracing::{
    Event,
    field::{Field, Visit},
};

/// The socket of the journal.
pub(super) const SOCKET: &str = "/run/systemd/journal/socket";

/// Longest value of a field. An event has at most 32 fields, so an entry fits into a socket's
/// buffer.
const VALUE_MAX: usize = 4 << 10;

/// Longest name of a field in the journal.
const NAME_MAX: usize = 64;

/// The name of the program in each entry, as `journalctl -t` takes it.
const IDENTIFIER: &str = "burgeon";

/// The line to the journal.
pub(super) struct Journal {
    socket: UnixDatagram,
}

impl Journal {
    /// The journal whose socket is at `path`.
    pub(super) fn connect(path: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        Ok(Self { socket })
    }

    /// Sends the event, whose line for people is `message`. False if the journal does not take it:
    /// the caller writes the line then.
    pub(super) fn takes(
        &self,
        event: &Event<'_>,
        message: &str,
        priority: u8,
        left_out: u64,
    ) -> bool {
        let mut entry = Entry::default();
        entry.put("MESSAGE", message);
        entry.put("PRIORITY", &priority.to_string());
        entry.put("SYSLOG_IDENTIFIER", IDENTIFIER);
        event.record(&mut entry);
        if left_out > 0 {
            entry.put("BURGEON_LEFT_OUT", &left_out.to_string());
        }
        loop {
            match send(&self.socket, &entry.0, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Err(rustix::io::Errno::INTR) => {}
                sent => return sent.is_ok_and(|len| len == entry.0.len()),
            }
        }
    }
}

/// The bytes of an entry.
#[derive(Default)]
struct Entry(Vec<u8>);

impl Entry {
    /// Appends a field.
    fn put(&mut self, name: &str, value: &str) {
        let end = (0..=VALUE_MAX.min(value.len())).rev().find(|at| value.is_char_boundary(*at));
        let value = &value.as_bytes()[..end.unwrap_or(0)];
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'\n');
        self.0.extend_from_slice(&(value.len() as u64).to_le_bytes());
        self.0.extend_from_slice(value);
        self.0.push(b'\n');
    }
}

impl Visit for Entry {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() != "message" {
            self.put(&name(field.name()), value);
        }
    }
}

/// The journal's name of a field of ours: capitals, digits and underscores.
fn name(field: &str) -> String {
    let capital = |c: char| match c.to_ascii_uppercase() {
        c if c.is_ascii_alphanumeric() => c,
        _ => '_',
    };
    "BURGEON_".chars().chain(field.chars().map(capital)).take(NAME_MAX).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        fs,
        os::unix::net::UnixDatagram,
        sync::{
            Arc, Mutex,
            atomic::{AtomicBool, Ordering},
        },
    };

    use tracing_subscriber::layer::SubscriberExt;

    use super::{
        super::{Lines, Sink},
        Journal, VALUE_MAX,
    };

    /// The fields of an entry, as the journal reads them.
    fn parsed(mut bytes: &[u8]) -> BTreeMap<String, String> {
        let mut fields = BTreeMap::new();
        while !bytes.is_empty() {
            let end = bytes.iter().position(|byte| *byte == b'\n').unwrap();
            let name = String::from_utf8(bytes[..end].to_vec()).unwrap();
            let (len, rest) = bytes[end + 1..].split_first_chunk().unwrap();
            let (value, rest) = rest.split_at(usize::try_from(u64::from_le_bytes(*len)).unwrap());
            assert_eq!(rest[0], b'\n');
            bytes = &rest[1..];
            let before = fields.insert(name, String::from_utf8(value.to_vec()).unwrap());
            assert!(before.is_none(), "a field comes once");
        }
        fields
    }

    #[derive(Default)]
    struct Written(Mutex<String>);

    impl Sink for Written {
        fn put(&self, line: &str, _: u64) {
            self.0.lock().unwrap().push_str(line);
        }

        fn take_lost(&self) -> u64 {
            0
        }
    }

    /// The lines of standard error, with a journal behind a socket that `events` may end.
    fn logged(journal: Journal, events: impl FnOnce()) -> String {
        logged_while(journal, &super::super::ENDING, events)
    }

    fn logged_while(
        journal: Journal,
        ending: &'static AtomicBool,
        events: impl FnOnce(),
    ) -> String {
        let written = Arc::new(Written::default());
        let layer = Lines { journal: true, entries: Some(journal), ending, sink: written.clone() };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), events);
        std::mem::take(&mut *written.0.lock().unwrap())
    }

    #[test]
    fn an_event_is_one_entry_with_its_fields_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let theirs = UnixDatagram::bind(&path).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let journal = Journal::connect(&path).unwrap();
        let hostile = "no answer\nPRIORITY=0\n";
        let long = "ä".repeat(VALUE_MAX);
        let written = logged(journal, || {
            tracing::warn!(mount = "12ab", tries = 3, error = %hostile, long, "cannot fetch\n{}", 7);
        });
        assert_eq!(written, "");
        let mut bytes = vec![0; 1 << 20];
        let len = theirs.recv(&mut bytes).unwrap();
        let fields = parsed(&bytes[..len]);
        let begins =
            fields["MESSAGE"].starts_with("cannot fetch\\n7 mount=12ab tries=3 error=\"no");
        assert!(begins, "{}", fields["MESSAGE"]);
        let of = |name: &str| fields[name].as_str();
        assert_eq!((of("PRIORITY"), of("SYSLOG_IDENTIFIER")), ("4", "burgeon"));
        assert_eq!((of("BURGEON_MOUNT"), of("BURGEON_TRIES")), ("12ab", "3"));
        assert_eq!(of("BURGEON_ERROR"), hostile);
        assert_eq!(of("BURGEON_LONG").len(), VALUE_MAX);
        assert_eq!(fields.len(), 7, "{fields:?}");
        assert!(theirs.recv(&mut bytes).is_err(), "one entry");
    }

    #[test]
    fn the_last_events_of_a_process_go_to_its_stream() {
        static ENDING: AtomicBool = AtomicBool::new(false);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let theirs = UnixDatagram::bind(&path).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let written = logged_while(Journal::connect(&path).unwrap(), &ENDING, || {
            tracing::warn!("before");
            ENDING.store(true, Ordering::Relaxed);
            tracing::error!(error = "no disk", "ending");
        });
        assert_eq!(written, "<3>ending error=\"no disk\"\n");
        let mut bytes = [0; 1024];
        let len = theirs.recv(&mut bytes).unwrap();
        assert_eq!(parsed(&bytes[..len])["MESSAGE"], "before");
        assert!(theirs.recv(&mut bytes).is_err());
    }

    #[test]
    fn a_journal_that_takes_nothing_costs_no_event_and_no_wait() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let theirs = UnixDatagram::bind(&path).unwrap();
        // Nobody reads: the socket's queue is full at some point.
        let all = super::super::BURST;
        let written = logged(Journal::connect(&path).unwrap(), || {
            (0..all).for_each(|number| tracing::warn!(number, "again"));
        });
        theirs.set_nonblocking(true).unwrap();
        let mut bytes = vec![0; 1 << 16];
        let entries = std::iter::from_fn(|| theirs.recv(&mut bytes).ok()).count();
        let lines = written.lines().filter(|line| line.starts_with("<4>again number=")).count();
        assert!(lines > 0 && entries > 0, "{lines} {entries}");
        assert_eq!(lines + entries, all as usize);
        // Nobody is there any more.
        drop(theirs);
        let journal = Journal::connect(&path);
        assert!(journal.is_err());
        fs::remove_file(&path).unwrap();
        let theirs = UnixDatagram::bind(&path).unwrap();
        let journal = Journal::connect(&path).unwrap();
        drop(theirs);
        assert_eq!(logged(journal, || tracing::error!("gone")), "<3>gone\n");
    }
}
