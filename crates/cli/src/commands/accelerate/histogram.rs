//! `burgeon accelerate histogram`: how long requests took, and how large they were.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_accelerator::{control::ControlRequest, folder::CacheFolder};
use serde_json::{Value, json};

use super::{
    found::{tell, text},
    show::{chosen, documents},
};
use crate::{
    commands::Context,
    output::{bytes, duration_us},
};

/// The rows: their keys in the document, and their names.
const DURATIONS: [(&str, &str); 5] = [
    ("read_memory_ns", "read from memory"),
    ("read_cache_ns", "read from the cache"),
    ("read_slow_ns", "read from the slow device"),
    ("write_ns", "write"),
    ("flush_ns", "flush"),
];
const SIZES: [(&str, &str); 2] = [("read_bytes", "read"), ("write_bytes", "write")];

/// The columns.
const QUANTILES: [&str; 5] = ["p50", "p90", "p99", "p99_9", "max"];

pub(super) fn histogram(context: &Context, name: Option<&str>) -> Result<ExitCode> {
    let caches = documents(context)?;
    let mut devices = Vec::new();
    for (cache, device) in chosen(context, &caches, name)? {
        let folder = CacheFolder::of(context.state.root(), text(&cache["name"]))?;
        let name = text(&device["name"]).to_owned();
        devices.push(folder.ask_server(&ControlRequest::Histogram { name })?);
    }
    tell(context, &json!({ "devices": devices }), |_| {
        for device in &devices {
            println!("{}", text(&device["name"]));
            part(device, "duration", &DURATIONS, |ns| duration_us(ns as f64 / 1000.0));
            part(device, "size", &SIZES, bytes);
        }
    })
}

fn part(document: &Value, what: &str, rows: &[(&str, &str)], show: impl Fn(u64) -> String) {
    let head: String = QUANTILES.map(|name| format!("{:>12}", name.replace('_', "."))).concat();
    println!("  {what:<26}{:>12}{head}", "requests");
    for (key, name) in rows {
        let row = &document[*key];
        let value = |key: &str| row[key].as_u64().map_or_else(|| "-".to_owned(), &show);
        let values = QUANTILES.map(|key| format!("{:>12}", value(key))).concat();
        println!("  {name:<26}{:>12}{values}", row["count"].as_u64().unwrap_or(0));
    }
}
