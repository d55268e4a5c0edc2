//! `burgeon accelerate set`.

use std::process::ExitCode;

use anyhow::Result;
use burgeon_accelerator::{
    control::{ControlRequest, Set},
    folder::CacheFolder,
};
use burgeon_block::ErrorKind;

use super::found::{find, tell, text};
use crate::{commands::Context, exit::Usage, quantities::parse_size};

/// A length, or `off`.
pub(super) fn parse_cutoff(text: &str) -> Result<u64, String> {
    match text {
        "0" | "off" => Ok(0),
        size => parse_size(size),
    }
}

fn parse_percent(text: &str) -> Result<u8, String> {
    match text.strip_suffix('%').unwrap_or(text).parse() {
        Ok(percent @ 0..=100) => Ok(percent),
        _ => Err(format!("{text:?} is not a share: use 0% to 100%")),
    }
}

fn parse_seconds(text: &str) -> Result<u64, String> {
    let seconds = text.strip_suffix('s').unwrap_or(text).parse();
    seconds.map_err(|_| format!("{text:?} is not a time: use seconds, such as 30"))
}

/// Bytes a second, or `auto`.
fn parse_rate(text: &str) -> Result<u64, String> {
    match text {
        "auto" => Ok(0),
        size => match parse_size(size)? {
            0 => Err("a rate of 0 would write back nothing: use auto".to_owned()),
            rate => Ok(rate),
        },
    }
}

/// The settings of `NAME=VALUE` texts.
fn parse(name: String, settings: &[String]) -> Result<Set, String> {
    let mut set = Set { name, ..Set::default() };
    for setting in settings {
        match setting.split_once('=') {
            Some(("mode", value)) => set.mode = Some(value.to_owned()),
            Some(("policy", value)) => set.policy = Some(value.to_owned()),
            Some(("sequential-cutoff", value)) => set.cutoff = Some(parse_cutoff(value)?),
            Some(("dirty-limit", value)) => set.dirty_limit = Some(parse_percent(value)?),
            Some(("dirty-age", value)) => set.dirty_age = Some(parse_seconds(value)?),
            Some(("writeback-rate", value)) => set.writeback_rate = Some(parse_rate(value)?),
            _ => {
                let known =
                    "mode=, policy=, sequential-cutoff=, dirty-limit=, dirty-age=, writeback-rate=";
                return Err(format!("unknown setting {setting:?}: there are {known}"));
            }
        }
    }
    Ok(set)
}

pub(super) fn set(context: &Context, name: String, settings: &[String]) -> Result<ExitCode> {
    let set = parse(name, settings).map_err(Usage)?;
    let folder = find(context, &set.name)?;
    let former = set.mode.as_ref().and_then(|_| mode_of(&folder, &set.name));
    let former =
        former.map(|mode| Set { name: set.name.clone(), mode: Some(mode), ..Set::default() });
    let set = ControlRequest::Set(set);
    // First the supervisor: a server that starts in between has the settings of it.
    match folder.ask_supervisor(&set) {
        // A server without a supervisor has no successor.
        Err(error) if error.kind() == ErrorKind::Unavailable => {}
        remembered => drop(remembered?),
    }
    let done = folder.ask_server(&set).inspect_err(|_| {
        // The servers to come must not have a mode that this one has refused.
        former
            .into_iter()
            .for_each(|former| drop(folder.ask_supervisor(&ControlRequest::Set(former))));
    })?;
    tell(context, &done, |_| ())
}

/// The mode in which the device is served.
fn mode_of(folder: &CacheFolder, name: &str) -> Option<String> {
    let status = folder.ask_server(&ControlRequest::Status).ok()?;
    let device = status["devices"].as_array()?.iter().find(|device| text(&device["name"]) == name);
    device.and_then(|device| device["mode"].as_str()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn settings_are_understood_or_refused() {
        let parsed = |text: &str| parse("data".to_owned(), &[text.to_owned()]);
        assert_eq!(parsed("dirty-limit=20%").unwrap().dirty_limit, Some(20));
        assert_eq!(parsed("dirty-limit=0").unwrap().dirty_limit, Some(0));
        assert_eq!(parsed("dirty-age=90s").unwrap().dirty_age, Some(90));
        assert_eq!(parsed("writeback-rate=auto").unwrap().writeback_rate, Some(0));
        assert_eq!(parsed("writeback-rate=2M").unwrap().writeback_rate, Some(2 << 20));
        assert_eq!(parsed("sequential-cutoff=off").unwrap().cutoff, Some(0));
        assert_eq!(parsed("mode=write-back").unwrap().mode.as_deref(), Some("write-back"));
        for wrong in
            ["dirty-limit=101%", "dirty-age=soon", "writeback-rate=0", "colour=red", "mode"]
        {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
