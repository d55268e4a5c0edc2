//! The text format of Prometheus, version 0.0.4.
//!
//! Invariants: a number loses no digit; a label's value cannot end its quotes.

use std::fmt::Write as _;

use crate::{Disks, MetricsSnapshot, label::label};

/// The kind of a family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FamilyKind {
    /// It never goes down, and outlives processes.
    Counter,
    /// It goes up and down.
    Gauge,
    /// Numbers of reads by their time, in seconds, their sum and their count: three counters.
    Histogram,
}

impl FamilyKind {
    /// Its name in the text.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A metric with all of its series.
#[derive(Debug)]
pub struct Family {
    /// Its name.
    pub name: &'static str,
    /// Its kind.
    pub kind: FamilyKind,
    /// Its labels, in order.
    pub labels: &'static [&'static str],
    /// Its meaning.
    pub help: &'static str,
    pub(crate) samples: fn(&Exported<'_>, &mut Samples<'_>),
}

/// The figures that are exported.
#[derive(Debug)]
pub(crate) struct Exported<'a> {
    /// Missing while no daemon runs.
    pub(crate) snapshot: Option<&'a MetricsSnapshot>,
    pub(crate) disks: &'a Disks,
}

/// The samples of one family.
#[derive(Debug)]
pub(crate) struct Samples<'a> {
    pub(crate) family: &'a Family,
    pub(crate) text: &'a mut String,
}

impl Samples<'_> {
    /// A whole number.
    pub(crate) fn count(&mut self, labels: &[&str], value: u64) {
        self.line("", labels, None, &value.to_string());
    }

    /// A time in seconds, given in nanoseconds.
    pub(crate) fn seconds(&mut self, labels: &[&str], nanoseconds: u64) {
        self.line("", labels, None, &seconds(nanoseconds));
    }

    /// A share.
    pub(crate) fn share(&mut self, labels: &[&str], part: u64, whole: u64) {
        if whole > 0 {
            self.line("", labels, None, &format!("{}", part as f64 / whole as f64));
        }
    }

    /// A histogram: counts below powers of two in nanoseconds, and all of them.
    pub(crate) fn histogram(
        &mut self,
        labels: &[&str],
        below: impl Iterator<Item = (u32, u64)>,
        (count, nanoseconds): (u64, u64),
    ) {
        for (power, below) in below {
            let bound = seconds(1 << power);
            self.line("_bucket", labels, Some(bound.trim_end_matches('0')), &below.to_string());
        }
        self.line("_bucket", labels, Some("+Inf"), &count.to_string());
        self.line("_sum", labels, None, &seconds(nanoseconds));
        self.line("_count", labels, None, &count.to_string());
    }

    fn line(&mut self, suffix: &str, values: &[&str], bound: Option<&str>, number: &str) {
        debug_assert_eq!(values.len(), self.family.labels.len(), "{}", self.family.name);
        let mut pairs: Vec<_> = self
            .family
            .labels
            .iter()
            .zip(values)
            .map(|(label, value)| format!("{label}=\"{}\"", escaped(value)))
            .collect();
        pairs.extend(bound.map(|bound| format!("le=\"{bound}\"")));
        let labels = match pairs.is_empty() {
            true => String::new(),
            false => format!("{{{}}}", pairs.join(",")),
        };
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{}{suffix}{labels} {number}", self.family.name);
    }
}

fn seconds(nanoseconds: u64) -> String {
    format!("{}.{:09}", nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000)
}

fn escaped(value: &str) -> String {
    let mut text = String::new();
    for c in label(value).chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            c => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{escaped, seconds};

    #[test]
    fn seconds_have_all_digits() {
        assert_eq!(seconds(u64::MAX), "18446744073.709551615");
        assert_eq!(seconds(1 << 30), "1.073741824");
    }

    #[test]
    fn no_value_of_a_label_leaves_its_quotes() {
        assert_eq!(escaped("a\"} 7\nb\\"), "a\\\"} 7\\nb\\\\");
        assert!(escaped("a\u{1b}").starts_with("a\u{fffd}…"));
        assert_eq!(escaped(&"é".repeat(1000)).chars().count(), 200);
    }
}
