//! `burgeon doctor`.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_daemon::doctor::{self, Finding, Level};
use serde_json::json;

use super::{Context, need_mount_privilege};
use crate::{args, output};

pub(super) fn doctor(context: &Context, args: args::Doctor) -> Result<ExitCode> {
    let location = context.store_location();
    let store = location.folder();
    let before = doctor::examine(&context.state, store);
    let mends: Vec<_> = before.iter().filter(|finding| finding.repairable).cloned().collect();
    let mut findings = before;
    if args.repair && !args.dry_run && !mends.is_empty() {
        need_mount_privilege("doctor --repair")?;
        doctor::repair(&context.state, store)?;
        findings = doctor::examine(&context.state, store);
    }
    // What is named once more is not as it should be yet.
    let unmended = |mend: &Finding| {
        findings
            .iter()
            .any(|finding| finding.subject == mend.subject && !matches!(finding.level, Level::Fine))
    };
    let (failed, mended): (Vec<_>, Vec<_>) =
        mends.iter().partition(|mend| !args.dry_run && unmended(mend));
    let bad = findings.iter().any(|finding| finding.level == Level::Problem)
        || (args.repair && !failed.is_empty());
    if context.json {
        output::print_json(&json!({
            "findings": findings,
            "repairs": if args.repair { mended } else { Vec::new() },
            "failed_repairs": if args.repair { failed } else { Vec::new() },
            "dry_run": args.dry_run,
        }))?;
    } else {
        findings.iter().for_each(show);
        if args.repair {
            show_repairs(&mended, &failed, args.dry_run);
        }
    }
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn show(finding: &Finding) {
    let mark = match finding.level {
        Level::Fine => "ok     ",
        Level::Warning => "warning",
        Level::Problem => "PROBLEM",
    };
    println!("{mark}  {}: {}", finding.subject, finding.found);
    if let Some(remedy) = &finding.remedy {
        let by = if finding.repairable { " (`burgeon doctor --repair` does that)" } else { "" };
        println!("         → {remedy}{by}");
    }
}

fn show_repairs(mended: &[&Finding], failed: &[&Finding], dry_run: bool) {
    if mended.is_empty() && failed.is_empty() {
        println!("nothing to repair");
    }
    let verb = if dry_run { "would repair" } else { "repaired" };
    let verbs = [(verb, mended), ("NOT repaired", failed)];
    for (verb, mend) in verbs.iter().flat_map(|(verb, of)| of.iter().map(move |mend| (verb, mend)))
    {
        println!("{verb}  {}: {}", mend.subject, mend.remedy.as_deref().unwrap_or_default());
    }
}
