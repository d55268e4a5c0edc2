//! `burgeon metrics`: the metrics of this host for Prometheus, as a process without privileges.
//!
//! ```text
//!   daemon ── status.sock: a snapshot ──┐
//!   `burgeon disks` ── disks.json ──────┴► text ─► standard output, once
//!                                               ─► textfile: a file, replaced every few seconds
//!                                               ─► http: GET /metrics
//! ```
//!
//! Invariants: root parses no HTTP; a reader of the file sees a whole text, always.

mod http;
mod textfile;

use std::{
    fs::File,
    io::Read,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    process::ExitCode,
    sync::Mutex,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::status_socket;
use burgeon_metrics::{Disks, MetricsSnapshot};

use crate::{
    config::Config,
    exit::{self, Usage},
    global::Global,
    output,
};
pub(crate) use textfile::publish_and;

pub(crate) const EXAMPLES: &str = "\
Examples:
  burgeon metrics                                    print them once
  burgeon metrics --listen 127.0.0.1:9876            serve them at /metrics; not available to root
  burgeon metrics --textfile /run/burgeon-metrics/burgeon.prom    for node_exporter

docs/metrics.md describes each metric.";

/// The counters of disks that `burgeon disks` publishes, beside the status socket.
pub(crate) const DISKS: &str = "disks.json";

/// The longest file of disks that is read.
const DISKS_LEN_MAX: u64 = 1 << 20;

#[derive(clap::Args, Debug)]
pub(crate) struct Metrics {
    /// Serve them over HTTP at this address, until it is ended
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
    /// Write them to this file again and again, until it is ended
    #[arg(long, value_name = "PATH")]
    textfile: Option<PathBuf>,
    /// Seconds between two writes of the file
    #[arg(long, value_name = "SECONDS", default_value = "10", requires = "textfile")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// The daemon's status socket [default: /run/burgeon/status.sock; that of the state directory,
    /// if another one is given or configured]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

pub(super) fn metrics(global: &Global, metrics: Metrics) -> Result<ExitCode> {
    let socket = metrics.socket.unwrap_or_else(|| status_socket::path(&state_dir(global)));
    let source = Source { socket, trouble: Mutex::default() };
    if metrics.listen.is_none() && metrics.textfile.is_none() {
        return once(&source, global.json);
    }
    let listener = metrics.listen.map(listen).transpose()?;
    if global.json {
        let what = "--json prints one document: leave it out with --listen and --textfile";
        return Err(Usage(what.to_owned()).into());
    }
    let interval = Duration::from_secs(metrics.interval);
    match (listener, metrics.textfile) {
        (None, None) => Ok(ExitCode::SUCCESS),
        (Some(listener), None) => http::serve(&listener, &|| source.text()),
        (None, Some(path)) => textfile::write_for_ever(&path, interval, &|| source.text()),
        (Some(listener), Some(path)) => thread::scope(|scope| {
            scope.spawn(|| http::serve::<ExitCode>(&listener, &|| source.text()));
            textfile::write_for_ever(&path, interval, &|| source.text())
        }),
    }
}

/// The state directory, which this command needs no access to. Problems of the configuration are
/// those of the commands that use the rest of it.
fn state_dir(global: &Global) -> PathBuf {
    let configured = || Config::examine(global.config.as_deref()).0.state_dir;
    let state = global.state_dir.clone().or_else(|| configured().map(|setting| setting.value));
    let Some(state) = state else { return PathBuf::from("/var/lib/burgeon") };
    state.canonicalize().or_else(|_| std::path::absolute(&state)).unwrap_or(state)
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    if rustix::process::geteuid().is_root() {
        let what = "root parses no HTTP: run it as another user in the group burgeon, as \
                    burgeon-metrics.service does, or use --textfile";
        return Err(Usage(what.to_owned()).into());
    }
    TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))
}

/// Prints the text, or the snapshot as JSON.
fn once(source: &Source, json: bool) -> Result<ExitCode> {
    if json {
        output::print_json(&source.ask()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let asked = source.ask();
    let snapshot = asked.as_ref().map_or(None, Option::as_ref);
    println!("{}", burgeon_metrics::render(snapshot, &source.disks()).trim_end());
    Ok(match asked {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            let error = error.into();
            exit::say(&error);
            exit::code_of(&error)
        }
    })
}

/// The source of the figures.
struct Source {
    socket: PathBuf,
    /// The last error, which is said once.
    trouble: Mutex<String>,
}

impl Source {
    /// The text now. If the daemon cannot be asked, it says that it is down.
    fn text(&self) -> String {
        let (snapshot, trouble) = match self.ask() {
            Ok(snapshot) => (snapshot, String::new()),
            Err(error) => (None, error.to_string()),
        };
        let mut last = self.trouble.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *last != trouble && !trouble.is_empty() {
            eprintln!("burgeon: {trouble}");
        }
        *last = trouble;
        drop(last);
        burgeon_metrics::render(snapshot.as_ref(), &self.disks())
    }

    /// `None` if no daemon runs, which starts with the first mount.
    fn ask(&self) -> Result<Option<MetricsSnapshot>, Error> {
        match status_socket::ask(&self.socket) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }

    /// The counters of disks; none if nobody has published any.
    fn disks(&self) -> Disks {
        let path = self.socket.with_file_name(DISKS);
        let Ok(file) = File::open(path) else { return Disks::default() };
        let mut bytes = Vec::new();
        let read = file.take(DISKS_LEN_MAX).read_to_end(&mut bytes);
        read.ok().and_then(|_| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
    }
}
