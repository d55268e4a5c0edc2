//! Progress of long work: a bar on a terminal, periodic lines elsewhere.

use std::{
    io::IsTerminal,
    sync::Mutex,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

/// Interval of lines in a log.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Shows the progress of some work over bytes.
pub(crate) struct Progress {
    what: String,
    begun: Instant,
    bar: Option<ProgressBar>,
    last_line: Mutex<Instant>,
}

impl Progress {
    /// Starts the work called `what`. Draws a bar on a terminal's standard error; with `--json`
    /// and elsewhere it prints lines, so that a log shows activity.
    pub(crate) fn new(what: impl Into<String>) -> Self {
        let what = what.into();
        let now = Instant::now();
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
            bar.set_message(what.clone());
            bar
        });
        Self { what, begun: now, bar, last_line: Mutex::new(now) }
    }

    /// Reports `done` bytes, of `total` if that is known.
    pub(crate) fn update(&self, done: u64, total: Option<u64>) {
        if let Some(bar) = &self.bar {
            if total != bar.length() {
                bar.set_style(style(total.is_some()));
                if let Some(total) = total {
                    bar.set_length(total);
                }
            }
            bar.set_position(done);
            return;
        }
        let Ok(mut last) = self.last_line.try_lock() else { return };
        if last.elapsed() >= LOG_INTERVAL {
            *last = Instant::now();
            let of = total.map(|total| format!(" of {}", output::bytes(total))).unwrap_or_default();
            eprintln!(
                "{}: {}{of}, {}/s",
                self.what,
                output::bytes(done),
                output::bytes(self.rate(done))
            );
        }
    }

    /// Average bytes a second.
    fn rate(&self, done: u64) -> u64 {
        (done as f64 / self.begun.elapsed().as_secs_f64().max(0.001)) as u64
    }

    /// Ends the display.
    pub(crate) fn finish(self) -> Duration {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.begun.elapsed()
    }
}

fn style(has_total: bool) -> ProgressStyle {
    let template = if has_total {
        "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}, {eta} left"
    } else {
        "{msg} {spinner} {bytes} {bytes_per_sec}"
    };
    // The templates are constants; a mistake in one shows as the plain default.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
