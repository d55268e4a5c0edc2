//! The log: one line per event, on standard error.
//!
//! ```text
//!   tracing::warn!(mount = %id, "…")
//!     ──►  2026-11-21T09:30:00Z burgeon[7]: warn: … mount=12ab   in run/daemon.log
//!     ──►  <4>… mount=12ab                                       in the journal
//! ```
//!
//! Under systemd the lines begin with the priorities of `sd-daemon(3)`. The journal's own socket
//! would keep the fields apart, but the server would need that socket inside its sandbox, and an
//! event would be lost when the socket is full; standard error is open already.
//!
//! An event is logged by the code that handles an error; code that returns an error leaves the
//! event to its caller. A hit logs none. Invariants: foreign text cannot begin a line, because
//! control characters are escaped; each line is one write, so that lines of two processes do not
//! mix.

use std::{
    fmt::{self, Debug, Write as _},
    io,
    sync::OnceLock,
};

use chrono::{DateTime, Utc};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
pub use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::{
    filter::Targets,
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    layer::SubscriberExt,
    registry::LookupSpan,
};

/// The variable with the level, as `--log-level`: the daemon's processes inherit it.
pub const VARIABLE: &str = "BURGEON_LOG";

/// The level that a command was given for the daemons it starts.
static GIVEN: OnceLock<LevelFilter> = OnceLock::new();

/// Logs events of this process from `level` on, and makes the daemons that it starts do the same.
pub fn begin_at(level: LevelFilter) {
    let _ = GIVEN.set(level);
    let events = tracing_subscriber::fmt::layer()
        .event_format(Line { journal: is_journal() })
        .with_writer(io::stderr);
    // Events of libraries are left out.
    let ours = Targets::new().with_target("burgeon", level);
    let subscriber = tracing_subscriber::registry().with(ours).with(events);
    // Fails if this was done before: the first level stays.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// The same in a process of the daemon, at the level from the environment, by default `info`.
pub fn begin() {
    let level = std::env::var(VARIABLE).ok().and_then(|level| level.parse().ok());
    begin_at(level.unwrap_or(LevelFilter::INFO));
}

/// True if the environment has a level: it takes precedence over the configuration.
pub fn is_set() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Logs a problem from which the daemon recovers.
pub fn warn(what: &str) {
    tracing::warn!("{what}");
}

/// The level that [`begin_at`] was given.
pub(crate) fn given() -> Option<LevelFilter> {
    GIVEN.get().copied()
}

/// True if standard error is a stream of the journal: systemd then gives its device and inode.
fn is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let here = rustix::fs::fstat(rustix::stdio::stderr());
    here.is_ok_and(|here| stream == format!("{}:{}", here.st_dev, here.st_ino))
}

struct Line {
    journal: bool,
}

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = *event.metadata().level();
        match self.journal {
            true => write!(out, "<{}>", priority(level))?,
            false => {
                let (now, name) = (Utc::now(), level.as_str().to_ascii_lowercase());
                write!(out, "{} burgeon[{}]: {name}: ", shown(&now), std::process::id())?;
            }
        }
        let mut words = Words::default();
        event.record(&mut words);
        writeln!(out, "{}{}", words.message, words.fields)
    }
}

/// A moment as `2026-11-21T09:30:00Z`.
fn shown(moment: &DateTime<Utc>) -> impl fmt::Display {
    moment.format("%Y-%m-%dT%H:%M:%SZ")
}

/// The priority of `syslog(3)`.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

#[derive(Default)]
struct Words {
    message: String,
    fields: String,
}

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let value = format!("{value:?}");
        self.record_str(field, &value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let value = one_line(value);
        if field.name() == "message" {
            self.message = value;
        } else if value.is_empty() || value.contains([' ', '"', '=']) {
            let _ = write!(self.fields, " {}=\"{}\"", field.name(), value.replace('"', "\\\""));
        } else {
            let _ = write!(self.fields, " {}={value}", field.name());
        }
    }
}

/// `text` with its control characters escaped.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() {
            true => line.extend(c.escape_default()),
            false => line.push(c),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use std::{
        io::{self, Write},
        sync::{Arc, Mutex},
    };

    use chrono::DateTime;
    use tracing_subscriber::layer::SubscriberExt;

    use super::{Line, shown};

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<Vec<u8>>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().push(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines(journal: bool, events: impl Fn()) -> Vec<String> {
        let written = Written::default();
        let writer = written.clone();
        let layer = tracing_subscriber::fmt::layer()
            .event_format(Line { journal })
            .with_writer(move || writer.clone());
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, events);
        let written = std::mem::take(&mut *written.0.lock().unwrap());
        written.into_iter().map(|line| String::from_utf8(line).unwrap()).collect()
    }

    #[test]
    fn an_event_is_one_write_of_one_line() {
        let hostile = "no answer\n<0>panic=\"now\"\u{1b}[2J";
        let event = || {
            tracing::warn!(mount = "12ab", tries = 3, error = %hostile, "cannot fetch {}", "a\nb");
        };
        let fields = r#"mount=12ab tries=3 error="no answer\n<0>panic=\"now\"\u{1b}[2J""#;
        assert_eq!(lines(true, event), [format!("<4>cannot fetch a\\nb {fields}\n")]);
        let written = lines(false, event);
        let end = format!(" burgeon[{}]: warn: cannot fetch a\\nb {fields}\n", std::process::id());
        assert_eq!(written.len(), 1);
        assert_eq!(written[0].get("2026-11-21T09:30:00Z".len()..), Some(&*end));
    }

    #[test]
    fn the_journal_gets_priorities() {
        let events = || {
            tracing::error!("a");
            tracing::info!("b");
            tracing::debug!("c");
        };
        assert_eq!(lines(true, events), ["<3>a\n", "<6>b\n", "<7>c\n"]);
    }

    #[test]
    fn times_are_utc() {
        let at = |seconds| shown(&DateTime::from_timestamp(seconds, 0).unwrap()).to_string();
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(at(1_795_253_400), "2026-11-21T09:30:00Z");
    }
}
