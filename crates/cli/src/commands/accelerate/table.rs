//! `burgeon accelerate table`: how each device is set up.

use std::process::ExitCode;

use anyhow::Result;
use serde_json::{Value, json};

use super::{
    found::{tell, text},
    show::{chosen, documents},
};
use crate::{commands::Context, output::bytes};

/// Settings that a device shares with the others of its cache.
const OF_CACHE: [&str; 5] = ["policy", "log_bytes", "dirty_limit", "dirty_age", "writeback_rate"];
/// Settings of the device.
const OWN: [&str; 4] = ["slow", "size", "mode", "sequential_cutoff"];

pub(super) fn table(context: &Context, name: Option<&str>) -> Result<ExitCode> {
    let caches = documents(context)?;
    let devices = chosen(context, &caches, name)?;
    let document = |(cache, device): &(&Value, &Value)| {
        let mut document = json!({
            "name": device["name"],
            "device": format!("/dev/burgeon/{}", text(&device["name"])),
            "cache": { "name": cache["name"], "device": cache["cache"] },
        });
        OWN.iter().for_each(|key| document[*key] = device[*key].clone());
        OF_CACHE.iter().for_each(|key| document[*key] = cache[*key].clone());
        document
    };
    let devices: Vec<_> = devices.iter().map(document).collect();
    tell(context, &json!({ "devices": devices }), |_| devices.iter().for_each(print))
}

fn print(device: &Value) {
    let number = |key: &str| device[key].as_u64().unwrap_or(0);
    let line = |what: &str, is: String| println!("  {what:<20}{is}");
    println!("{}", text(&device["name"]));
    line("device", format!("{}, {}", text(&device["device"]), bytes(number("size"))));
    line("slow device", text(&device["slow"]).to_owned());
    let (cache, file) = (&device["cache"]["name"], &device["cache"]["device"]);
    line("cache", format!("{} on {}", text(cache), text(file)));
    line("mode", text(&device["mode"]).to_owned());
    line("policy", text(&device["policy"]).to_owned());
    line(
        "sequential cut-off",
        match number("sequential_cutoff") {
            0 => "off".to_owned(),
            length => bytes(length),
        },
    );
    line(
        "write-back",
        match number("log_bytes") {
            0 => "the cache has no log for it".to_owned(),
            log => format!(
                "a log of {}, from {} % or {} s on, {}",
                bytes(log),
                number("dirty_limit"),
                number("dirty_age"),
                match number("writeback_rate") {
                    0 => "while the slow device is idle".to_owned(),
                    rate => format!("at most {}/s", bytes(rate)),
                }
            ),
        },
    );
}
