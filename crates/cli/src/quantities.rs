//! Values on the command line: sizes, rates, numbers of threads, names of writes.

use std::num::NonZeroUsize;

use burgeon_daemon::{WRITE_LIMIT_MIN, protocol::CacheAmount, writes};

/// A name of writes.
pub(crate) fn parse_writes(text: &str) -> Result<String, String> {
    writes::check_name(text).map(|()| text.to_owned()).map_err(|e| e.to_string())
}

/// A write limit that btrfs can work with, in bytes.
pub(crate) fn parse_write_limit(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        size if size < WRITE_LIMIT_MIN => {
            Err(format!("{text} is too small: btrfs needs at least {} MiB", WRITE_LIMIT_MIN >> 20))
        }
        size => Ok(size),
    }
}

/// A number of bytes a second.
pub(crate) fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("at this rate nothing is ever read".to_owned()),
        rate => Ok(rate),
    }
}

/// 1 to 64 threads.
pub(crate) fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    let threads = text.parse().map_err(|_| format!("{text:?} is not a number above 0"))?;
    if threads > THREADS_MAX { Err(format!("at most {THREADS_MAX}")) } else { Ok(threads) }
}

/// Threads of a prefetch: each holds a buffer of 1 MiB, and the daemon fetches no more at once.
const THREADS_MAX: NonZeroUsize = NonZeroUsize::new(64).unwrap();

/// A number of bytes, with K, M, G, T, P or E for powers of 1024.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("{text:?} is not a whole number with K, M, G, T, P or E behind it"));
    }
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        "P" | "PIB" => 50,
        "E" | "EIB" => 60,
        unit => return Err(format!("{unit:?} is not a unit: use K, M, G, T, P or E")),
    };
    let number = digits.parse().ok().and_then(|number: u64| number.checked_mul(1 << shift));
    number.ok_or_else(|| format!("{text} is too much: at most {} bytes", u64::MAX))
}

/// An amount such as `200G` or `10%`.
pub(crate) fn parse_amount(text: &str) -> Result<CacheAmount, String> {
    let Some(percent) = text.trim().strip_suffix('%') else {
        return parse_size(text).map(CacheAmount::Bytes);
    };
    match percent.trim().parse() {
        Ok(percent @ 0..=100) => Ok(CacheAmount::Percent(percent)),
        _ => Err(format!("{text:?} is not a share: use 0% to 100%")),
    }
}

/// Parses the size of a virtual area.
pub(crate) fn parse_virtual_size(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("a virtual area of no size holds nothing: leave the option out".to_owned()),
        size => Ok(size),
    }
}

#[cfg(test)]
mod tests {
    use burgeon_daemon::protocol::CacheAmount;

    use super::{parse_amount, parse_size, parse_virtual_size, parse_write_limit, parse_writes};

    #[test]
    fn a_virtual_area_has_a_size() {
        assert_eq!(parse_virtual_size("1K"), Ok(1 << 10));
        assert!(parse_virtual_size("0").is_err() && parse_virtual_size("0G").is_err());
    }

    #[test]
    fn writes_have_a_name_and_room() {
        assert_eq!(parse_writes("w:1"), Ok("w:1".to_owned()));
        for bad in ["", "..", "a/b", "a.lock"] {
            assert!(parse_writes(bad).unwrap_err().contains("not a valid name"), "{bad}");
        }
        assert_eq!(parse_write_limit("1G"), Ok(1 << 30));
        for bad in ["0", "1M", "255M"] {
            assert!(parse_write_limit(bad).unwrap_err().contains("too small"), "{bad}");
        }
    }

    #[test]
    fn amounts_are_sizes_or_shares() {
        assert_eq!(parse_amount("200G"), Ok(CacheAmount::Bytes(200 << 30)));
        assert_eq!(parse_amount("10%"), Ok(CacheAmount::Percent(10)));
        for bad in ["101%", "-1%", "%", "1.5%", "G"] {
            assert!(parse_amount(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("10G"), Ok(10 << 30));
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("512MiB"), Ok(512 << 20));
        assert_eq!(parse_size("4E"), Ok(4 << 60));
        for bad in ["", "G", "1.5G", "-1", "+1", "5X", "99999999999T", "16E"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        for much in ["16E", "99999999999999999999G"] {
            assert!(parse_size(much).unwrap_err().contains("too much"), "{much}");
        }
    }
}
