//! A finding of `doctor` and `health`, for people.

use burgeon_daemon::doctor::{Finding, Level};

/// Prints it: its level, what was found, what it costs, and what to do.
pub(super) fn show(finding: &Finding) {
    let mark = match finding.level {
        Level::Fine => "ok     ",
        Level::Warning => "warning",
        Level::Problem => "PROBLEM",
    };
    println!("{mark}  {}: {}", finding.subject, finding.found);
    if let Some(cost) = &finding.cost {
        println!("         costs: {cost}");
    }
    if let Some(remedy) = &finding.remedy {
        let by = if finding.repairable { " (`burgeon doctor --repair` does that)" } else { "" };
        println!("         → {remedy}{by}");
    }
}
