//! Numbers for people, and documents for programs.
//!
//! A closed reader (`| head`) or a full disk does not stop the command: a write error on standard
//! output is recorded and reported when the command ends. The macros of the standard library panic
//! instead, so this module replaces them.

use std::{
    fmt::Arguments,
    io::{self, ErrorKind, Write},
    path::Path,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use burgeon_block::Error;
use burgeon_daemon::log::one_line;
use serde::Serialize;

/// Prints a line on standard output.
macro_rules! println {
    () => { $crate::output::line(format_args!("")) };
    ($($words:tt)*) => { $crate::output::line(format_args!($($words)*)) };
}

/// Prints a line on standard error and ignores errors.
macro_rules! eprintln {
    ($($words:tt)*) => { $crate::output::say(format_args!($($words)*)) };
}

/// True if `println!` goes to standard error.
static ASIDE: AtomicBool = AtomicBool::new(false);

/// Redirects `println!` to standard error, because standard output carries the one document.
pub(crate) fn turn_aside() {
    ASIDE.store(true, Relaxed);
}

/// First write error of standard output.
static REFUSED: OnceLock<io::Error> = OnceLock::new();

/// Implements `println!`.
pub(crate) fn line(words: Arguments<'_>) {
    match ASIDE.load(Relaxed) {
        true => say(words),
        false => note(writeln!(io::stdout(), "{words}")),
    }
}

/// Implements `eprintln!`.
pub(crate) fn say(words: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{words}");
}

/// Records the first error of writing to standard output.
pub(crate) fn note(result: io::Result<()>) {
    if let Err(error) = result {
        let _ = REFUSED.set(error);
    }
}

/// The first write error of standard output, unless its reader has closed it.
pub(crate) fn refused() -> Option<Error> {
    let error = REFUSED.get().filter(|error| error.kind() != ErrorKind::BrokenPipe)?;
    let error = error.raw_os_error().map_or(error.kind().into(), io::Error::from_raw_os_error);
    Some(Error::io("cannot write to standard output", error))
}

/// Prints `value` as the command's one JSON document.
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    note(writeln!(io::stdout(), "{}", serde_json::to_string_pretty(value)?));
    Ok(())
}

/// A path in a line for people.
pub(crate) fn path(path: &Path) -> String {
    one_line(&path.to_string_lossy())
}

/// Formats a number of things: "1 file", "2 files", "3 fetches", "4 directories".
pub(crate) fn counted(count: u64, noun: &str) -> String {
    if count == 1 {
        return format!("{count} {noun}");
    }
    match noun.strip_suffix('y') {
        Some(stem) => format!("{count} {stem}ies"),
        None if noun.ends_with("ch") => format!("{count} {noun}es"),
        None => format!("{count} {noun}s"),
    }
}

/// Formats bytes with three digits and a binary unit.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// Formats microseconds with a fitting unit.
pub(crate) fn duration_us(us: f64) -> String {
    match us {
        us if us < 1000.0 => format!("{us:.0} µs"),
        us if us < 1e6 => format!("{:.1} ms", us / 1e3),
        us => format!("{:.1} s", us / 1e6),
    }
}

/// Formats a fraction as a percentage.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Prints rows in aligned columns; the first row is the heading.
pub(crate) fn table(rows: &[Vec<String>]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            line.push_str(cell);
            let pad = widths[column] - cell.chars().count() + 2;
            line.extend(std::iter::repeat_n(' ', pad));
        }
        println!("{}", line.trim_end());
    }
}

#[cfg(test)]
mod tests {
    use super::{bytes, counted, duration_us, path, percent};

    #[test]
    fn a_path_is_one_line() {
        assert_eq!(path("/a b/ü".as_ref()), "/a b/ü");
        assert_eq!(path("/a\n\u{1b}[2J".as_ref()), "/a\\n\\u{1b}[2J");
    }

    #[test]
    fn one_thing_is_no_plural() {
        for (count, noun, shown) in [
            (1, "mount", "1 mount"),
            (0, "mount", "0 mounts"),
            (2, "directory", "2 directories"),
            (3, "fetch", "3 fetches"),
            (1, "fetch", "1 fetch"),
        ] {
            assert_eq!(counted(count, noun), shown);
        }
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(10 << 30), "10.0 GiB");
        assert_eq!(bytes(1023 << 20), "1.00 GiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(duration_us(12.4), "12 µs");
        assert_eq!(duration_us(12_400.0), "12.4 ms");
        assert_eq!(percent(0.5), "50.0 %");
    }
}
