//! Log lines on standard error: one line an event, with its time.

use std::time::{SystemTime, UNIX_EPOCH};

/// Writes one line to the log.
macro_rules! log {
    ($($words:tt)*) => {
        $crate::log_line(format_args!($($words)*))
    };
}

/// What `log!` calls.
pub(crate) fn log_line(words: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    // One write a line, so that the lines of two processes do not mix. A log that cannot be
    // written is no reason to stop serving.
    let line = format!("{} burgeon[{}]: {words}\n", utc(now), std::process::id());
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Seconds since 1970 as `2026-11-21T09:30:00Z`.
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant's `civil_from_days`, for days since 1970 that are never negative.
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn times_are_utc() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_795_253_400), "2026-11-21T09:30:00Z");
    }
}
