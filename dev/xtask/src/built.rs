//! The paths of the programs that cargo has built.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result};

/// Runs a cargo command with `--message-format=json` and returns the programs it made of these
/// targets, by package and name, in that order.
pub(crate) fn executables(mut command: Command, targets: &[(&str, &str)]) -> Result<Vec<PathBuf>> {
    let output = command.output().context("cannot run cargo")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let messages: Vec<serde_json::Value> =
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let find = |&(package, name): &(&str, &str)| {
        let made = messages.iter().find(|message| {
            let id = message["package_id"].as_str().unwrap_or_default();
            let of_ours = id.contains(&format!("#{package}@"));
            of_ours && message["target"]["name"] == name && message["executable"].is_string()
        });
        let path = made.and_then(|message| message["executable"].as_str()).map(PathBuf::from);
        path.with_context(|| {
            let errors = String::from_utf8_lossy(&output.stderr);
            format!("cargo made no program {name} of {package}: {errors}")
        })
    };
    targets.iter().map(find).collect()
}
