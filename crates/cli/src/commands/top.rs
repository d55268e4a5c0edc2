//! `burgeon top`: one screen about all mounts, again and again.
//!
//! ```text
//!   status now, minus status before ──► rates; waits of each mount ──► slowest files
//! ```

use std::{
    collections::HashMap,
    io::{self, IsTerminal},
    path::PathBuf,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use burgeon_block::{Digest, Error, ErrorKind};
use burgeon_daemon::{
    Client, MountId,
    doctor::mounts_without_daemon,
    log::one_line,
    protocol::{DaemonStatus, HostCache, MountStatus},
};
use burgeon_image::Manifest;
use serde::Serialize;

use super::{Context, trace};
use crate::output::{self, bytes, duration_us};
use crate::watch_args::Top;

/// The size of a terminal that does not tell its own.
const LINES: usize = 24;
const COLUMNS: usize = 80;

/// Files that are shown.
const FILES_MAX: usize = 5;

/// Lines beside those of mounts and files.
const OTHER_LINES: usize = 7;

/// The counters of one moment.
#[derive(Default)]
struct Look {
    /// Hits, misses and fetched bytes of each mount.
    mounts: HashMap<MountId, (u64, u64, u64)>,
    hit_bytes: u64,
    miss_bytes: u64,
}

impl Look {
    fn at(status: &DaemonStatus) -> Self {
        let of = |mount: &MountStatus| {
            let reads = &mount.reads;
            (mount.id, (reads.hits, reads.misses, reads.fetched_bytes + reads.background_bytes))
        };
        let read = status.cache.as_ref().map(|cache| cache.read).unwrap_or_default();
        let mounts = status.mounts.iter().map(of).collect();
        Self { mounts, hit_bytes: read.hit, miss_bytes: read.miss }
    }
}

pub(super) fn top(context: &Context, options: &Top) -> Result<ExitCode> {
    let mut before: Option<(Look, Instant)> = None;
    let mut manifests = HashMap::new();
    let mut shown = 0;
    while options.count.is_none_or(|count| shown < count) {
        let found = Client::connect_and_ask(&context.state)?;
        let now = Instant::now();
        let look = found.as_ref().map(|(_, status)| Look::at(status)).unwrap_or_default();
        // The first screen of a person comes at once, without rates.
        let seconds = before.as_ref().map(|(_, at)| now.duration_since(*at).as_secs_f64());
        if seconds.is_some() || options.count.is_none() || found.is_none() {
            let last = before.take().map(|(last, _)| last).unwrap_or_default();
            let rates = Rates { last: &last, now: &look, seconds };
            let screen = found.as_ref().map(|(client, status)| {
                let files = slowest(context, client, status, &mut manifests);
                Screen::new(status, &rates, files)
            });
            // As for the commands that ask a daemon once; a person's screen waits for the next one.
            let is_once = options.count.is_some() && screen.is_none();
            if is_once && mounts_without_daemon(&context.state) > 0 {
                let what = super::without_daemon::no_daemon(context);
                return Err(Error::new(ErrorKind::Unavailable, what).into());
            }
            show(context, screen.as_ref())?;
            shown += 1;
        }
        before = Some((look, now));
        if options.count.is_none_or(|count| shown < count) {
            thread::sleep(Duration::from_secs(options.interval));
        }
    }
    Ok(ExitCode::SUCCESS)
}

struct Rates<'a> {
    last: &'a Look,
    now: &'a Look,
    /// Between both; `None` at the first look.
    seconds: Option<f64>,
}

impl Rates<'_> {
    fn of(&self, before: u64, now: u64) -> f64 {
        self.seconds.map_or(0.0, |seconds| now.saturating_sub(before) as f64 / seconds.max(0.001))
    }

    /// Hits, misses and bytes a second of a mount.
    fn mount(&self, id: MountId) -> [f64; 3] {
        let now = self.now.mounts.get(&id).copied().unwrap_or_default();
        let last = self.last.mounts.get(&id).copied().unwrap_or(now);
        [self.of(last.0, now.0), self.of(last.1, now.1), self.of(last.2, now.2)]
    }
}

/// The files with the longest waits that are remembered, over all mounts.
fn slowest(
    context: &Context,
    client: &Client,
    status: &DaemonStatus,
    manifests: &mut HashMap<Digest, Option<Manifest>>,
) -> Vec<(u64, u64, String)> {
    let mut files = Vec::new();
    manifests.retain(|digest, _| status.mounts.iter().any(|mount| mount.digest.0 == *digest));
    for mount in &status.mounts {
        let digest = mount.digest.0;
        let load = || trace::manifest(context, mount).ok();
        let Some(manifest) = manifests.entry(digest).or_insert_with(load) else { continue };
        let Ok(waits) = trace::ask(client, mount.id, 0) else { continue };
        files.extend(trace::by_file(&trace::located(manifest, &digest, waits, 1)));
    }
    files.sort_by(|a, b| b.cmp(a));
    files.truncate(FILES_MAX);
    files
}

/// All that one screen shows, for people and for programs.
#[derive(Serialize, Default)]
struct Screen {
    /// Of the daemon; none if no daemon runs.
    version: Option<String>,
    /// Read from the cache, and waited for.
    local_bytes_per_second: f64,
    waited_bytes_per_second: f64,
    /// The former's part of both; none if nothing was read.
    hit_ratio: Option<f64>,
    cache: Option<CacheSize>,
    /// The busiest first.
    mounts: Vec<Row>,
    slowest_files: Vec<File>,
}

#[derive(Serialize)]
struct CacheSize {
    used_bytes: u64,
    limit_bytes: u64,
}

/// A mount.
#[derive(Serialize)]
struct Row {
    target: PathBuf,
    image: String,
    state: String,
    hits_per_second: f64,
    misses_per_second: f64,
    fetched_bytes_per_second: f64,
    /// Of all reads since it is served that waited.
    p50_us: Option<f64>,
    p99_us: Option<f64>,
    /// Fetches in flight, and readers that wait.
    in_flight: u64,
    waiting_readers: u64,
}

#[derive(Serialize)]
struct File {
    waited_us: u64,
    waits: u64,
    file: String,
}

impl Screen {
    fn new(status: &DaemonStatus, rates: &Rates<'_>, files: Vec<(u64, u64, String)>) -> Self {
        let local = rates.of(rates.last.hit_bytes, rates.now.hit_bytes);
        let waited = rates.of(rates.last.miss_bytes, rates.now.miss_bytes);
        let mut mounts: Vec<_> = status.mounts.iter().map(|mount| Row::new(mount, rates)).collect();
        mounts.sort_by(|a, b| {
            let misses = b.misses_per_second.total_cmp(&a.misses_per_second);
            misses.then(b.hits_per_second.total_cmp(&a.hits_per_second))
        });
        let file = |(waited_us, waits, file)| File { waited_us, waits, file };
        let size =
            |cache: &HostCache| CacheSize { used_bytes: cache.used, limit_bytes: cache.limit };
        Self {
            version: Some(status.version.clone()),
            local_bytes_per_second: local,
            waited_bytes_per_second: waited,
            hit_ratio: (local + waited > 0.0).then(|| local / (local + waited)),
            cache: status.cache.as_ref().map(size),
            mounts,
            slowest_files: files.into_iter().map(file).collect(),
        }
    }

    /// As lines, with at most `room` mounts.
    fn lines(&self, room: usize) -> Vec<String> {
        let rate = |rate: f64| bytes(rate as u64);
        let ratio =
            self.hit_ratio.map_or("–".to_owned(), |part| format!("{:.0} %", part * 100.0));
        let mut text = vec![format!(
            "burgeon {}  mounts {}  local {}/s  waited for {}/s  hits {ratio}",
            self.version.as_deref().unwrap_or_default(),
            self.mounts.len(),
            rate(self.local_bytes_per_second),
            rate(self.waited_bytes_per_second),
        )];
        if let Some(cache) = &self.cache {
            let (used, limit) = (bytes(cache.used_bytes), bytes(cache.limit_bytes));
            text.push(format!("cache {used} of {limit}"));
        }
        text.push(String::new());
        match self.mounts.len().saturating_sub(room) {
            _ if self.mounts.is_empty() => text.push("nothing is mounted".to_owned()),
            more => {
                text.push(
                    "  HITS/S MISSES/S  FETCHED/S      P50      P99 QUEUE WAIT  MOUNT".to_owned(),
                );
                text.extend(self.mounts.iter().take(room).map(Row::line));
                text.extend((more > 0).then(|| format!("… and {more} more, less busy")));
            }
        }
        if !self.slowest_files.is_empty() {
            text.extend([String::new(), "WAITED      WAITS  FILE".to_owned()]);
            text.extend(self.slowest_files.iter().map(|File { waited_us, waits, file }| {
                format!("{:>9} {waits:>7}  {}", duration_us(*waited_us as f64), one_line(file))
            }));
        }
        text
    }
}

impl Row {
    fn new(mount: &MountStatus, rates: &Rates<'_>) -> Self {
        let [hits_per_second, misses_per_second, fetched_bytes_per_second] = rates.mount(mount.id);
        let latency = &mount.reads.source_latency;
        Self {
            target: mount.target.clone(),
            image: mount.image.clone(),
            state: mount.state.clone(),
            hits_per_second,
            misses_per_second,
            fetched_bytes_per_second,
            p50_us: latency.p50_us,
            p99_us: latency.p99_us,
            in_flight: mount.cache.as_ref().map_or(0, |cache| cache.in_flight),
            waiting_readers: mount.cache.as_ref().map_or(0, |cache| cache.waiting_readers),
        }
    }

    fn line(&self) -> String {
        let latency = |us: Option<f64>| us.map_or("–".to_owned(), duration_us);
        let mark = if self.state == "serving" { "" } else { " NOT SERVED" };
        format!(
            "{:>8.0} {:>8.0} {:>10} {:>8} {:>8} {:>5} {:>4}  {} {}{mark}",
            self.hits_per_second,
            self.misses_per_second,
            bytes(self.fetched_bytes_per_second as u64),
            latency(self.p50_us),
            latency(self.p99_us),
            self.in_flight,
            self.waiting_readers,
            self.image,
            output::path(&self.target),
        )
    }
}

/// Shows a screen; none if no daemon runs.
fn show(context: &Context, screen: Option<&Screen>) -> Result<()> {
    if context.json {
        return match screen {
            Some(screen) => output::print_json(screen),
            None => output::print_json(&Screen::default()),
        };
    }
    let is_screen = io::stdout().is_terminal();
    let (lines, columns) = size();
    let text = match screen {
        None => vec![format!("burgeon: {}", super::without_daemon::no_daemon(context))],
        Some(screen) => {
            let others = OTHER_LINES + screen.slowest_files.len();
            screen.lines(lines.saturating_sub(others).max(1))
        }
    };
    if !is_screen {
        text.iter().for_each(|line| println!("{line}"));
        return Ok(());
    }
    // Home, each line to its end, and the rest of the screen empty.
    let cut = |line: &String| line.chars().take(columns).collect::<String>() + "\u{1b}[K";
    let rows: Vec<_> = text.iter().take(lines.saturating_sub(1)).map(cut).collect();
    println!("\u{1b}[H{}\u{1b}[J", rows.join("\n"));
    Ok(())
}

/// Lines and columns of the terminal.
fn size() -> (usize, usize) {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout());
    let known = size.ok().filter(|size| size.ws_row > 0 && size.ws_col > 0);
    known.map_or((LINES, COLUMNS), |size| (size.ws_row.into(), size.ws_col.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(target: &str, state: &str) -> Row {
        Row {
            target: target.into(),
            image: "model:1".to_owned(),
            state: state.to_owned(),
            hits_per_second: 1200.0,
            misses_per_second: 34.0,
            fetched_bytes_per_second: 5.0 * 1024.0 * 1024.0,
            p50_us: Some(1500.0),
            p99_us: None,
            in_flight: 6,
            waiting_readers: 7,
        }
    }

    fn screen(mounts: Vec<Row>) -> Screen {
        Screen {
            version: Some("1.2.3".to_owned()),
            local_bytes_per_second: 3.0 * 1024.0 * 1024.0,
            waited_bytes_per_second: 1024.0 * 1024.0,
            hit_ratio: Some(0.75),
            cache: Some(CacheSize { used_bytes: 1 << 30, limit_bytes: 4 << 30 }),
            mounts,
            slowest_files: vec![File { waited_us: 2_000_000, waits: 9, file: "a\nb".to_owned() }],
        }
    }

    #[test]
    fn every_column_has_its_value() {
        let lines = screen(vec![row("/mnt/a", "serving"), row("/mnt/b", "recovering")]).lines(9);
        let words = |line: usize| lines[line].split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            words(0),
            "burgeon 1.2.3 mounts 2 local 3.00 MiB/s waited for 1.00 MiB/s hits 75 %"
        );
        assert_eq!(words(1), "cache 1.00 GiB of 4.00 GiB");
        assert_eq!(words(3), "HITS/S MISSES/S FETCHED/S P50 P99 QUEUE WAIT MOUNT");
        assert_eq!(words(4), "1200 34 5.00 MiB 1.5 ms – 6 7 model:1 /mnt/a");
        assert_eq!(words(5), "1200 34 5.00 MiB 1.5 ms – 6 7 model:1 /mnt/b NOT SERVED");
        assert_eq!(words(7), "WAITED WAITS FILE");
        assert_eq!(words(8), "2.0 s 9 a\\nb");
        assert_eq!(lines.len(), 9);
    }

    #[test]
    fn mounts_beyond_the_room_are_counted() {
        let lines = screen((0..5).map(|n| row(&format!("/{n}"), "serving")).collect()).lines(2);
        assert!(lines[5].ends_with("/1") && lines[6] == "… and 3 more, less busy", "{lines:?}");
    }

    #[test]
    fn programs_get_all_that_people_see() {
        let told = serde_json::to_value(screen(vec![row("/mnt/a", "serving")])).unwrap();
        assert_eq!(told["hit_ratio"], 0.75);
        assert_eq!(told["cache"]["limit_bytes"], 4_u64 << 30);
        assert_eq!(told["mounts"][0]["p50_us"], 1500.0);
        assert_eq!(told["mounts"][0]["waiting_readers"], 7);
        assert_eq!(told["slowest_files"][0]["file"], "a\nb");
    }
}
