//! The whole text: each family that has samples, with its meaning and type.

use std::fmt::Write as _;

use crate::{
    Disks, FAMILIES, MetricsSnapshot,
    format::{Exported, Family, Samples},
};

/// The text with everything that is known.
pub fn render(snapshot: Option<&MetricsSnapshot>, disks: &Disks) -> String {
    let source = Exported { snapshot, disks };
    let mut text = String::new();
    for family in FAMILIES {
        let mut lines = String::new();
        (family.samples)(&source, &mut Samples { family, text: &mut lines });
        if !lines.is_empty() {
            let Family { name, kind, help, .. } = family;
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
            text.push_str(&lines);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::render;
    use crate::{CacheValues, Disks, MetricsSnapshot};

    #[test]
    fn no_digit_is_lost() {
        for value in [(1 << 32) + 1, (1 << 53) + 1, u64::MAX] {
            let cache = CacheValues { written: value, ..CacheValues::default() };
            let snapshot = MetricsSnapshot { cache, ..MetricsSnapshot::default() };
            let text = render(Some(&snapshot), &Disks::default());
            let line = format!("\nburgeon_cache_written_bytes_total {value}\n");
            assert!(text.contains(&line), "{text}");
        }
    }
}
