//! `burgeon doctor`.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use burgeon_daemon::{
    Client,
    doctor::{self, Finding, Level},
    protocol::{DaemonStatus, Reply, Request},
};
use serde_json::json;

use super::{Context, accelerate::show, finding, need_mount_privilege, places::places_of, report};
use crate::{holders, output, watch_args::Doctor};

/// The longest wait for the daemon's answer; another check reports a daemon that does not answer.
const ANSWER_MAX: Duration = Duration::from_secs(3);

pub(super) fn doctor(context: &Context, args: Doctor) -> Result<ExitCode> {
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
    // A finding that recurs was not repaired.
    let unmended = |mend: &Finding| {
        findings
            .iter()
            .any(|finding| finding.subject == mend.subject && !matches!(finding.level, Level::Fine))
    };
    let (failed, mended): (Vec<_>, Vec<_>) =
        mends.iter().partition(|mend| !args.dry_run && unmended(mend));
    findings.extend(held(context));
    findings.extend(show::findings(context));
    let bad = findings.iter().any(|finding| finding.level == Level::Problem)
        || (args.repair && !failed.is_empty());
    if let Some(path) = &args.report {
        report::write(context, &findings, path)?;
    }
    if context.json {
        output::print_json(&json!({
            "findings": findings,
            "repairs": if args.repair { mended } else { Vec::new() },
            "failed_repairs": if args.repair { failed } else { Vec::new() },
            "dry_run": args.dry_run,
        }))?;
    } else {
        findings.iter().for_each(finding::show);
        if let Some(path) = &args.report {
            println!("the report is {}; read it before you pass it on", path.display());
        }
        if args.repair {
            show_repairs(&mended, &failed, args.dry_run);
        }
    }
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Mounts that are in place nowhere in this namespace, with their holders.
fn held(context: &Context) -> Vec<Finding> {
    let Some(status) = ask_soon(context) else { return Vec::new() };
    let placed = status.mounts.iter().filter(|mount| mount.state != "preparing");
    let held = placed.filter_map(|mount| {
        let fsid = mount.fsid.filter(|fsid| places_of(*fsid).is_empty())?;
        let holders = holders::of(fsid)?;
        // A mount that a container made in its own namespace is as intended.
        let as_asked = holders::elsewhere(fsid).iter().any(|other| other.target == mount.target);
        let (level, cost, remedy) = match as_asked {
            true => (Level::Fine, None, None),
            false => (
                Level::Warning,
                Some("its devices, its space, and the name of its writes stay in use".to_owned()),
                Some("it is released when they let go: end them, or unmount it there".to_owned()),
            ),
        };
        Some(Finding {
            subject: format!("mount {}", mount.target.display()),
            level,
            found: format!("is not mounted here, but held by {holders}"),
            cost,
            remedy,
            repairable: false,
        })
    });
    held.collect()
}

/// The daemon's status, if it answers.
fn ask_soon(context: &Context) -> Option<DaemonStatus> {
    let client = Client::connect(&context.state).ok()??;
    client.wait_at_most(ANSWER_MAX);
    match client.call(&Request::Status).ok()?.0 {
        Reply::Status(status) => Some(*status),
        _ => None,
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
