//! The log: one line per event, on standard error.
//!
//! ```text
//!   tracing::warn!(mount = %id, "…")
//!     ──►  2026-11-21T09:30:00Z burgeon[7]: warn: … mount=12ab   in run/daemon.log
//!     ──►  MESSAGE="… mount=12ab" PRIORITY=4 BURGEON_MOUNT=12ab …     in the journal
//!     ──►  {"time":"…","level":"warn","message":"…","mount":"12ab"}   as JSON, if asked for
//! ```
//!
//! Under systemd an event is an entry of the journal with its fields apart (`journal.rs`). Where
//! the journal's socket does not take it at once, and for lines in JSON, it is a line on standard
//! error with its priority, as in `sd-daemon(3)`. So are the last events of a process: the journal
//! reads a sender's unit from its cgroup, and from the stream only if the sender is gone.
//!
//! An event is logged by the code that handles an error; code that returns an error leaves the
//! event to its caller. A hit logs none. Invariants: foreign text cannot begin a line, because
//! control characters are escaped; each line is one write, so that lines of two processes do not
//! mix; one place in the program logs at most [`BURST`] lines in [`WINDOW`], apart from `debug`; no
//! process of the daemon waits for the reader of its log (`stream.rs`).
//!
//! Level and format can be changed while a process runs (`change`); children inherit both.

mod journal;
mod stream;

use std::{
    collections::HashMap,
    fmt::{self, Debug, Write as _},
    io::{self, Write as _},
    path::Path,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use serde_json::{Map, Value};
use tracing::{
    Event, Level, Subscriber,
    callsite::Identifier,
    field::{Field, Visit},
};
pub use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::{
    Layer,
    filter::Targets,
    layer::{Context, SubscriberExt},
    reload,
};

pub(crate) use self::stream::Stream;

/// The variable with the level, as `--log-level`: the daemon's processes inherit it.
pub const VARIABLE: &str = "BURGEON_LOG";

/// The variable with the format, `json` or `text`.
pub const FORMAT: &str = "BURGEON_LOG_FORMAT";

/// Lines that one place in the program logs within [`WINDOW`]; the rest is counted.
const BURST: u32 = 50;
const WINDOW: Duration = Duration::from_secs(10);

/// The level that this process was given, or was changed to: that of its children, too.
static GIVEN: Mutex<Option<LevelFilter>> = Mutex::new(None);
/// Lines are JSON: the format that this process was given, or was changed to, as above.
static JSON: Mutex<Option<bool>> = Mutex::new(None);
/// Changes the level of this process.
static CHANGE: OnceLock<Box<dyn Fn(LevelFilter) + Send + Sync>> = OnceLock::new();

/// A process that logs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogOwner {
    /// A command: it waits for the reader of its standard error, and loses no line.
    Command,
    /// A process of the daemon that does one task. It may have ended before the journal has read an
    /// entry, so it writes lines to the unit's stream.
    Task,
    /// A process of the daemon that stays.
    Daemon,
}

/// Takes lines.
trait Sink: Send + Sync {
    /// Writes a line, which has its end. It reports that `reported` lines before it were left out.
    fn put(&self, line: &str, reported: u64);

    /// The number of lines that could not be written, and that the next line reports.
    fn take_lost(&self) -> u64;
}

/// Standard error of a command.
struct Waiting;

impl Sink for Waiting {
    fn put(&self, line: &str, _: u64) {
        let _ = io::stderr().write_all(line.as_bytes());
    }

    fn take_lost(&self) -> u64 {
        0
    }
}

/// This process is about to end: entries of the journal would lack its unit.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Called before the last events of a process, which go to its stream.
pub(crate) fn prepare_to_end() {
    ENDING.store(true, Ordering::Relaxed);
}

/// Logs events of this process from `level` on, and makes the daemons that it starts do the same.
pub fn begin_at(level: LevelFilter, process: LogOwner) {
    note(level);
    if let Some(format) = format_of_environment() {
        set_json(format == "json");
    }
    let journal = is_journal();
    let connect = || journal::Journal::connect(Path::new(journal::SOCKET)).ok();
    let entries = (journal && process == LogOwner::Daemon).then(connect).flatten();
    let sink: Arc<dyn Sink> = match process {
        LogOwner::Command => Arc::new(Waiting),
        LogOwner::Task | LogOwner::Daemon => Arc::new(Stream::new(rustix::stdio::stderr())),
    };
    if process != LogOwner::Command {
        report_panics(journal, Arc::clone(&sink));
    }
    let events = Lines { journal, entries, ending: &ENDING, sink };
    // Events of libraries are left out.
    let (filter, handle) = reload::Layer::new(ours(level));
    let subscriber = tracing_subscriber::registry().with(filter).with(events);
    // Fails if this was done before: the first level stays.
    if tracing::subscriber::set_global_default(subscriber).is_ok() {
        let _ = CHANGE.set(Box::new(move |level| {
            let _ = handle.reload(ours(level));
        }));
    }
}

/// Writes the message of a panic to `sink`, because the usual hook would wait for the stream's
/// reader. It takes no lock of the log: the panicking thread may have it.
fn report_panics(journal: bool, sink: Arc<dyn Sink>) {
    std::panic::set_hook(Box::new(move |panic| {
        let trace = std::backtrace::Backtrace::capture();
        let is_traced = trace.status() == std::backtrace::BacktraceStatus::Captured;
        let trace = if is_traced { format!("\n{trace}") } else { String::new() };
        let text = one_line(&format!("{panic}{trace}"));
        sink.put(&format!("{}{text}\n", prefix(journal, Level::ERROR)), 0);
    }));
}

/// Changes level and format of this process, and of those that it starts from now on.
pub(crate) fn change(level: Option<LevelFilter>, json: Option<bool>) {
    if let (Some(level), Some(change)) = (level, CHANGE.get()) {
        note(level);
        change(level);
    }
    json.into_iter().for_each(set_json);
}

/// Sets the format, in place of that of the environment.
pub fn set_json(json: bool) {
    *JSON.lock().unwrap_or_else(PoisonError::into_inner) = Some(json);
}

/// The format now.
pub(crate) fn is_json() -> bool {
    given_json().unwrap_or(false)
}

fn given_json() -> Option<bool> {
    *JSON.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The variables from which a process that this one starts takes level and format.
pub(crate) fn variables() -> impl Iterator<Item = (&'static str, String)> {
    // They may come from the command line or the configuration.
    let level = given().map(|level| (VARIABLE, level.to_string()));
    let format = given_json().map(|json| (FORMAT, if json { "json" } else { "text" }.to_owned()));
    level.into_iter().chain(format)
}

fn note(level: LevelFilter) {
    *GIVEN.lock().unwrap_or_else(PoisonError::into_inner) = Some(level);
}

fn ours(level: LevelFilter) -> Targets {
    Targets::new().with_target("burgeon", level)
}

/// The same at the level from the environment, by default `info`.
pub fn begin(process: LogOwner) {
    let level = std::env::var(VARIABLE).ok().and_then(|level| level.parse().ok());
    begin_at(level.unwrap_or(LevelFilter::INFO), process);
}

/// True if the environment has a level: it takes precedence over the configuration.
pub fn is_set() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// The format of the environment, which takes precedence in the same way.
pub fn format_of_environment() -> Option<String> {
    std::env::var(FORMAT).ok().filter(|format| !format.is_empty())
}

/// Logs a problem from which the daemon recovers.
pub fn warn(what: &str) {
    tracing::warn!("{what}");
}

/// The level that [`begin_at`] or [`change`] was given.
pub(crate) fn given() -> Option<LevelFilter> {
    *GIVEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The recent lines of one place in the program, counted.
struct Lately {
    since: Instant,
    lines: u32,
    left_out: u64,
}

/// The number of lines that were left out since the last line of this place; `None` if this one is
/// to be left out, too. There are as many entries as places.
fn admit(place: Identifier, now: Instant) -> Option<u64> {
    static PLACES: Mutex<Option<HashMap<Identifier, Lately>>> = Mutex::new(None);
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    let places = places.get_or_insert_default();
    let lately = places.entry(place).or_insert(Lately { since: now, lines: 0, left_out: 0 });
    if now.duration_since(lately.since) >= WINDOW {
        (lately.since, lately.lines) = (now, 0);
    }
    if lately.lines >= BURST {
        lately.left_out += 1;
        return None;
    }
    lately.lines += 1;
    Some(std::mem::take(&mut lately.left_out))
}

/// True if standard error is a stream of the journal: systemd then gives its device and inode.
fn is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let here = rustix::fs::fstat(rustix::stdio::stderr());
    here.is_ok_and(|here| stream == format!("{}:{}", here.st_dev, here.st_ino))
}

/// The log of this process.
struct Lines {
    /// Standard error is a stream of the journal.
    journal: bool,
    /// The journal, if it takes entries, too.
    entries: Option<journal::Journal>,
    /// It gets no more entries.
    ending: &'static AtomicBool,
    sink: Arc<dyn Sink>,
}

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let level = *event.metadata().level();
        let left_out = match level {
            Level::ERROR | Level::WARN | Level::INFO => {
                match admit(event.metadata().callsite(), Instant::now()) {
                    Some(left_out) => left_out,
                    None => return,
                }
            }
            _ => 0,
        };
        let left_out = left_out + self.sink.take_lost();
        if is_json() {
            let prefix = if self.journal { prefix(true, level) } else { String::new() };
            let json = json(event, level, left_out);
            return self.sink.put(&format!("{prefix}{json}\n"), left_out);
        }
        let mut words = Words::default();
        event.record(&mut words);
        if left_out > 0 {
            words.fields.push_str(&format!(" left_out={left_out}"));
        }
        let text = words.message + &words.fields;
        if let Some(journal) =
            self.entries.as_ref().filter(|_| !self.ending.load(Ordering::Relaxed))
            && journal.takes(event, &text, priority(level), left_out)
        {
            return;
        }
        self.sink.put(&format!("{}{text}\n", prefix(self.journal, level)), left_out);
    }
}

/// The beginning of a line: its priority for the journal, or the time, this process and the level.
fn prefix(journal: bool, level: Level) -> String {
    if journal {
        return format!("<{}>", priority(level));
    }
    let (now, name) = (Utc::now(), level.as_str().to_ascii_lowercase());
    format!("{} burgeon[{}]: {name}: ", shown(&now), std::process::id())
}

/// The event as one JSON object. Its own keys win over fields of the same name.
fn json(event: &Event<'_>, level: Level, left_out: u64) -> Value {
    let mut object = Object::default();
    event.record(&mut object);
    let mut object = object.0;
    if left_out > 0 {
        object.insert("left_out".to_owned(), left_out.into());
    }
    object.insert("time".to_owned(), shown(&Utc::now()).to_string().into());
    object.insert("level".to_owned(), level.as_str().to_ascii_lowercase().into());
    object.insert("pid".to_owned(), std::process::id().into());
    Value::Object(object)
}

#[derive(Default)]
struct Object(Map<String, Value>);

impl Visit for Object {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
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

/// `text` with its control characters escaped: they would begin another line, or command a
/// terminal.
pub fn one_line(text: &str) -> String {
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
        sync::{
            Arc, Mutex,
            atomic::{AtomicU64, Ordering},
        },
        time::Instant,
    };

    use chrono::DateTime;
    use tracing_subscriber::{
        Layer,
        layer::{Context, SubscriberExt},
    };

    use super::{BURST, Lines, Sink, WINDOW, admit, shown};

    #[derive(Default)]
    struct Written {
        lines: Mutex<Vec<String>>,
        lost: AtomicU64,
    }

    impl Sink for Written {
        fn put(&self, line: &str, _: u64) {
            self.lines.lock().unwrap().push(line.to_owned());
        }

        fn take_lost(&self) -> u64 {
            self.lost.swap(0, Ordering::Relaxed)
        }
    }

    fn lines(journal: bool, events: impl Fn()) -> Vec<String> {
        lines_after(journal, 0, events)
    }

    /// The same after `lost` lines that could not be written.
    fn lines_after(journal: bool, lost: u64, events: impl Fn()) -> Vec<String> {
        let written = Arc::new(Written { lost: lost.into(), ..Written::default() });
        let events_to =
            Lines { journal, entries: None, ending: &super::ENDING, sink: written.clone() };
        let subscriber = tracing_subscriber::registry().with(events_to);
        tracing::subscriber::with_default(subscriber, events);
        std::mem::take(&mut *written.lines.lock().unwrap())
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
    fn a_place_that_logs_too_much_is_counted() {
        let written = lines(true, || {
            for number in 0..BURST + 7 {
                tracing::warn!(number, "again");
            }
        });
        assert_eq!(written.len(), BURST as usize);
        let place = || tracing::callsite::Identifier(&CALLSITE);
        let now = Instant::now();
        assert!((0..BURST).all(|_| admit(place(), now) == Some(0)));
        assert_eq!((admit(place(), now), admit(place(), now)), (None, None));
        assert_eq!(admit(place(), now + WINDOW), Some(2));
    }

    /// A place in the program.
    static CALLSITE: Place = Place;
    struct Place;
    impl tracing::Callsite for Place {
        fn set_interest(&self, _: tracing::subscriber::Interest) {}
        fn metadata(&self) -> &tracing::Metadata<'_> {
            unreachable!("nobody asks")
        }
    }

    #[test]
    fn a_line_reports_those_that_could_not_be_written() {
        let written = lines_after(true, 3, || {
            tracing::warn!("a");
            tracing::warn!("b");
        });
        assert_eq!(written, ["<4>a left_out=3\n", "<4>b\n"]);
    }

    #[test]
    fn an_event_in_json_is_one_object_on_one_line() {
        let seen = Arc::new(Mutex::new(String::new()));
        let subscriber = tracing_subscriber::registry().with(Json(seen.clone()));
        tracing::subscriber::with_default(subscriber, || {
            tracing::error!(mount = "12ab", tries = 3u64, level = "mine", "cannot\n{}", "fetch");
        });
        let text = seen.lock().unwrap();
        assert_eq!(text.lines().count(), 1);
        let object: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (object["message"].as_str(), object["tries"].as_u64()),
            (Some("cannot\nfetch"), Some(3))
        );
        assert_eq!(
            (object["mount"].as_str(), object["level"].as_str()),
            (Some("12ab"), Some("error"))
        );
    }

    /// The format in JSON, whatever this process was told.
    struct Json(Arc<Mutex<String>>);
    impl<S: tracing::Subscriber> Layer<S> for Json {
        fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
            let level = *event.metadata().level();
            self.0.lock().unwrap().push_str(&super::json(event, level, 0).to_string());
        }
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
