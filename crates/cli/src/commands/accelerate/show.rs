//! `burgeon accelerate status` and `stats`, and what `doctor` says of caches.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_accelerator::{control::ControlRequest, folder::CacheFolder};
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::doctor::{Finding, Level};
use serde_json::{Value, json};

use super::found::{find, tell, text};
use crate::{commands::Context, output::bytes};

/// Slow devices that the cache may have newer content of, and that are not attached: names and
/// places.
fn absent(folder: &CacheFolder, document: &Value) -> Vec<(String, String)> {
    let attached: Vec<&str> =
        document["devices"].as_array().into_iter().flatten().map(|d| text(&d["name"])).collect();
    let dirty = folder.dirty().into_iter().filter(|(name, _)| !attached.contains(&name.as_str()));
    dirty.map(|(name, owner)| (name, owner.slow.display().to_string())).collect()
}

/// A slow device whose place may be unknown.
fn shown(slow: &str) -> &str {
    if slow.is_empty() { "its slow device" } else { slow }
}

fn how_to_attach(cache: &str, name: &str, slow: &str) -> String {
    let slow = if slow.is_empty() { "DEVICE" } else { slow };
    format!(
        "`burgeon accelerate attach {cache} {slow} --name {name}`, then `detach {name}`; or `flush {name} \
         --offline` while no device of that cache is attached"
    )
}

/// The dirty bytes of a device, in words.
fn dirt(device: &Value) -> String {
    let mut said = match (device["dirty_bytes"].as_u64(), device["dirty_seconds"].as_u64()) {
        (Some(dirty @ 1..), age) => {
            format!(", {} dirty since {} s", bytes(dirty), age.unwrap_or(0))
        }
        _ => String::new(),
    };
    if let Some(gone) = device["gone"]["bytes"].as_u64() {
        said += &format!(", {} FAIL: they were dirty when the cache device failed", bytes(gone));
    }
    said
}

/// Problems of the caches of this host.
pub(crate) fn findings(context: &Context) -> Vec<Finding> {
    let mut findings = Vec::new();
    for folder in
        CacheFolder::all(context.state.root()).into_iter().filter(|f| !f.dirty().is_empty())
    {
        // Of a server that does not answer, all devices count as attached.
        let document = match folder.ask_server(&ControlRequest::Status) {
            Ok(document) => document,
            Err(error) if error.kind() == ErrorKind::NotFound => Value::Null,
            Err(_) => continue,
        };
        for (name, slow) in absent(&folder, &document) {
            let cache = folder.name();
            let place = shown(&slow);
            findings.push(Finding {
                subject: format!("cache {cache}"),
                level: Level::Problem,
                found: format!("has newer content of {name} ({place}), which is not attached"),
                cost: Some(format!(
                    "{place} alone has older content; what is written to it without the cache will be \
                     overwritten"
                )),
                remedy: Some(how_to_attach(&cache, &name, &slow)),
                repairable: false,
            });
        }
    }
    findings
}

/// A document for each cache.
pub(super) fn documents(context: &Context) -> Result<Vec<Value>> {
    let mut caches = Vec::new();
    for folder in CacheFolder::all(context.state.root()) {
        let mut document = match folder.ask_server(&ControlRequest::Status) {
            Ok(document) => document,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                json!({ "cache": folder.cache()?, "state": "idle", "devices": [] })
            }
            Err(error) => json!({
                "cache": folder.cache()?,
                "state": "unreachable",
                "error": error.to_string(),
                "devices": [],
            }),
        };
        document["name"] = folder.name().into();
        document["absent_dirty"] = absent(&folder, &document)
            .into_iter()
            .map(|(name, slow)| json!({ "name": name, "slow": slow }))
            .collect();
        caches.push(document);
    }
    Ok(caches)
}

pub(super) fn status(context: &Context, name: Option<&str>) -> Result<ExitCode> {
    let mut caches = documents(context)?;
    if let Some(name) = name {
        let has = |list: &Value| {
            let mut all = list.as_array().into_iter().flatten();
            all.any(|device| text(&device["name"]) == name)
        };
        caches.retain(|cache| {
            text(&cache["name"]) == name || has(&cache["devices"]) || has(&cache["absent_dirty"])
        });
        if caches.is_empty() {
            let what = format!(
                "no cache and no device is called {name}: `burgeon accelerate status` lists them"
            );
            return Err(Error::new(ErrorKind::NotFound, what).into());
        }
    }
    tell(context, &json!({ "caches": caches }), |_| {
        if caches.is_empty() {
            println!("no caches");
        }
        for cache in &caches {
            let blocks = |key: &str| cache[key].as_u64().unwrap_or(0) * 4096;
            let used = match cache["blocks"].is_null() {
                true => String::new(),
                false => format!(
                    ", {} of {} used, {}",
                    bytes(blocks("used_blocks")),
                    bytes(blocks("blocks")),
                    text(&cache["policy"])
                ),
            };
            println!(
                "{} on {}: {}{used}",
                text(&cache["name"]),
                text(&cache["cache"]),
                text(&cache["state"])
            );
            for absent in cache["absent_dirty"].as_array().into_iter().flatten() {
                let (name, slow) = (text(&absent["name"]), text(&absent["slow"]));
                println!(
                    "  {name} IS NOT ATTACHED, and {} lacks content that only this cache has: {}",
                    shown(slow),
                    how_to_attach(text(&cache["name"]), name, slow)
                );
            }
            if let Some(error) = cache["write_back_error"].as_str() {
                println!("  DIRTY BLOCKS ARE NOT WRITTEN BACK, and stay in the cache: {error}");
            }
            for device in cache["devices"].as_array().into_iter().flatten() {
                let count = |key: &str| device["counters"][key].as_u64().unwrap_or(0);
                let hits = count("cache_hit_bytes") + count("memory_hit_bytes");
                let read = hits + count("miss_bytes");
                let ratio = match read {
                    0 => "nothing read".to_owned(),
                    read => format!("{:.1} % hits", 100.0 * hits as f64 / read as f64),
                };
                let failed = device["flush_failed"] == true;
                println!(
                    "  {} on {}: {}, {ratio}{}{}",
                    text(&device["name"]),
                    text(&device["slow"]),
                    text(&device["mode"]),
                    dirt(device),
                    if failed { ", A FLUSH FAILED: nothing is written any more" } else { "" }
                );
            }
        }
    })
}

/// All bytes that the device has had written to the cache device, and how many times the bytes of
/// the blocks among them that is.
fn to_cache(device: &Value) -> (u64, Option<f64>) {
    let count = |key: &str| device["counters"][key].as_u64().unwrap_or(0);
    let blocks = count("cache_written_bytes");
    let all = blocks + count("cache_meta_bytes");
    (all, (blocks > 0).then(|| all as f64 / blocks as f64))
}

/// Of `caches`, each device called `name`, or all, with its cache. `NotFound` if there is none of
/// that name.
pub(super) fn chosen<'a>(
    context: &Context,
    caches: &'a [Value],
    name: Option<&str>,
) -> Result<Vec<(&'a Value, &'a Value)>> {
    let devices = caches.iter().flat_map(|cache| {
        let devices = cache["devices"].as_array().into_iter().flatten();
        devices.map(move |device| (cache, device))
    });
    let is_chosen = |device: &Value| name.is_none_or(|name| text(&device["name"]) == name);
    let chosen: Vec<_> = devices.filter(|(_, device)| is_chosen(device)).collect();
    if let (Some(name), true) = (name, chosen.is_empty()) {
        find(context, name)?;
    }
    Ok(chosen)
}

pub(super) fn stats(context: &Context, name: Option<&str>) -> Result<ExitCode> {
    let caches = documents(context)?;
    let chosen = chosen(context, &caches, name)?;
    let document = |(_, device): &(&Value, &Value)| {
        let (written, factor) = to_cache(device);
        json!({
            "name": device["name"],
            "counters": device["counters"],
            "cache_device": { "written_bytes": written, "amplification": factor },
        })
    };
    let devices: Vec<_> = chosen.iter().map(document).collect();
    tell(context, &json!({ "devices": devices }), |_| {
        for (_, device) in &chosen {
            println!("{}", text(&device["name"]));
            for (name, count) in device["counters"].as_object().into_iter().flatten() {
                println!("  {:<20} {count}", name.replace('_', " "));
            }
            let (written, factor) = to_cache(device);
            let factor =
                factor.map_or(String::new(), |factor| format!(", {factor:.3} times the blocks"));
            println!("  written to the cache device: {}{factor}", bytes(written));
        }
    })
}
