//! `burgeon writes`: lists and removes kept writes.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_daemon::writes::{self, WritesRecord};
use serde_json::json;

use super::{Context, taken};
use crate::{
    args::WritesCommand,
    output::{self, bytes},
};

pub(super) fn writes(context: &Context, command: WritesCommand) -> Result<ExitCode> {
    match command {
        WritesCommand::List => list(context),
        WritesCommand::Rm { name } => {
            writes::remove(&context.state, &name)
                .map_err(|e| taken::explain_writes(context, &name, "", e.into()))?;
            if context.json {
                output::print_json(&json!({ "removed": name }))?;
            } else {
                println!("removed the writes {name:?}");
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn list(context: &Context) -> Result<ExitCode> {
    context.need_state()?;
    let mut rows = vec![["NAME", "IMAGE", "LIMIT", "RESERVED", "STATE"].map(String::from).to_vec()];
    let mut documents = Vec::new();
    let mut damaged = false;
    for name in writes::names(&context.state)? {
        match writes::find(&context.state, &name) {
            Ok(Some(record)) => {
                let reserved = writes::reserved(&context.state, &record);
                let state =
                    if writes::is_mounted(&context.state, &name)? { "mounted" } else { "kept" };
                rows.push(row(&record, reserved, state));
                documents.push(json!({ "record": record, "reserved": reserved, "state": state }));
            }
            Ok(None) => {}
            Err(e) => {
                damaged = true;
                rows.push(vec![name.clone(), "?".into(), "?".into(), "?".into(), e.to_string()]);
                documents.push(json!({ "name": name, "error": e.to_string() }));
            }
        }
    }
    if context.json {
        output::print_json(&json!({ "writes": documents }))?;
    } else if rows.len() == 1 {
        println!("no writes are kept in {}", context.state.root().display());
    } else {
        output::table(&rows);
    }
    Ok(if damaged { ExitCode::from(4) } else { ExitCode::SUCCESS })
}

fn row(record: &WritesRecord, reserved: u64, state: &str) -> Vec<String> {
    vec![
        record.name.clone(),
        record.image.clone(),
        bytes(record.limit),
        if record.thin { format!("{} so far", bytes(reserved)) } else { bytes(reserved) },
        state.to_owned(),
    ]
}
