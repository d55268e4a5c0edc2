//! The result: rows with an aim and a verdict.

use std::fmt;

/// The bound that a value is held against.
#[derive(Clone, Copy)]
pub(crate) enum Aim {
    AtLeast(f64),
    AtMost(f64),
    /// Only to be seen.
    None,
}

impl Aim {
    fn met_by(self, value: f64) -> Option<bool> {
        match self {
            Self::AtLeast(aim) => Some(value >= aim),
            Self::AtMost(aim) => Some(value <= aim),
            Self::None => None,
        }
    }
}

struct Row {
    what: String,
    value: f64,
    unit: &'static str,
    aim: Aim,
    note: String,
}

/// Rows under headings, printed with aligned columns.
#[derive(Default)]
pub(crate) struct Table {
    parts: Vec<(String, Vec<Row>)>,
}

impl Table {
    pub(crate) fn heading(&mut self, text: impl Into<String>) {
        self.parts.push((text.into(), Vec::new()));
    }

    pub(crate) fn row(
        &mut self,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
        aim: Aim,
        note: impl Into<String>,
    ) {
        if self.parts.is_empty() {
            self.heading("");
        }
        let row = Row { what: what.into(), value, unit, aim, note: note.into() };
        // Seen at once on a terminal, long before the table is complete.
        eprintln!("  {}", line(&row));
        if let Some((_, rows)) = self.parts.last_mut() {
            rows.push(row);
        }
    }
}

impl Table {
    /// Number of aims that are missed.
    pub(crate) fn missed(&self) -> usize {
        self.count(false)
    }

    fn count(&self, met: bool) -> usize {
        let rows = self.parts.iter().flat_map(|(_, rows)| rows);
        rows.filter(|row| row.aim.met_by(row.value) == Some(met)).count()
    }
}

fn line(row: &Row) -> String {
    let number = |value: f64| match value.abs() {
        n if n >= 1000.0 => format!("{value:.0}"),
        n if n >= 100.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    };
    let aim = match row.aim {
        Aim::AtLeast(aim) => format!("≥ {}", number(aim)),
        Aim::AtMost(aim) => format!("≤ {}", number(aim)),
        Aim::None => String::new(),
    };
    let verdict = match row.aim.met_by(row.value) {
        Some(true) => "pass",
        Some(false) => "MISS",
        None => "",
    };
    let value = number(row.value);
    let Row { what, unit, note, .. } = row;
    format!("{what:<58} {value:>9} {unit:<5} {aim:>9}  {verdict:<4}  {note}").trim_end().to_owned()
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (heading, rows) in &self.parts {
            writeln!(f, "\n{heading}")?;
            for row in rows {
                writeln!(f, "  {}", line(row))?;
            }
        }
        write!(f, "\naims: {} met, {} missed", self.count(true), self.missed())
    }
}

#[cfg(test)]
mod tests {
    use super::{Aim, Table};

    #[test]
    fn rows_are_held_against_their_aims() {
        let mut table = Table::default();
        table.heading("h");
        table.row("a", 0.95, "x", Aim::AtLeast(0.9), "");
        table.row("b", 0.95, "x", Aim::AtMost(0.9), "");
        table.row("c", 12345.6, "ops", Aim::None, "seen");
        let text = table.to_string();
        assert!(
            text.contains("pass") && text.contains("MISS") && text.contains("12346 ops"),
            "{text}"
        );
        assert!(text.ends_with("aims: 1 met, 1 missed"), "{text}");
        assert_eq!(table.missed(), 1);
    }
}
