//! Defaults of mounts from the configuration's section `[mount]`: values of options that the command
//! line leaves out.
//!
//! Invariant: an option of the command line wins, also one that excludes the setting, such as
//! `--read-only` a write limit (`crates/cli/tests/config.rs`).

use burgeon_daemon::writes;

use super::Context;
use crate::{args, config::Setting};

/// Fills in the options that `args` leaves out.
pub(crate) fn apply(context: &Context, args: &mut args::Mount) {
    let defaults = &context.config.mount;
    let is_existing = |name: &String| matches!(writes::find(&context.state, name), Ok(Some(_)));
    // Existing writes keep the limit that they were made with.
    let makes_writes = !args.read_only
        && args.writes_device.is_none()
        && !args.writes.as_ref().is_some_and(is_existing);
    if makes_writes {
        fill_in(&mut args.write_limit, &defaults.write_limit);
        if !args.thin {
            fill_in(&mut args.reserve, &defaults.reserve);
        }
    }
    fill_in(&mut args.fetch_limit, &defaults.fetch_limit);
    fill_in(&mut args.fill, &defaults.fill);
    fill_in(&mut args.profile, &defaults.profile);
    fill_in(&mut args.pull, &defaults.pull);
    fill_in(&mut args.transport, &defaults.transport);
}

fn fill_in<T: Clone>(option: &mut Option<T>, setting: &Option<Setting<T>>) {
    if option.is_none() {
        *option = setting.as_ref().map(|setting| setting.value.clone());
    }
}
