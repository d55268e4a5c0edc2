//! Defaults of mounts from the configuration's section `[mount]`: values of options that the
//! command line leaves out.
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

#[cfg(test)]
mod tests {
    use burgeon_daemon::StateDir;
    use clap::Parser;

    use super::{Context, apply};
    use crate::{
        args::{Args, Command},
        config::Config,
    };

    #[test]
    fn an_option_wins_over_a_default_and_over_one_that_it_excludes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("c.toml");
        std::fs::write(&file, "[mount]\nwrite-limit = '1G'\nreserve = true\nfill = true\n")
            .unwrap();
        let context = Context {
            state: StateDir::looked_at(folder.path().to_owned()),
            store: None,
            repository: None,
            config: Config::load(Some(file.as_os_str())).unwrap(),
            json: false,
        };
        let applied = |options: &[&str]| {
            let line = [&["burgeon", "mount", "app", "/b"], options].concat();
            let Command::Mount(mut mount) = Args::try_parse_from(line).unwrap().command else {
                panic!()
            };
            apply(&context, &mut mount);
            (mount.write_limit, mount.reserve, mount.fill)
        };
        assert_eq!(applied(&[]), (Some(1 << 30), Some(true), Some(true)));
        assert_eq!(applied(&["--writes", "new"]), (Some(1 << 30), Some(true), Some(true)));
        assert_eq!(applied(&["--read-only"]), (None, None, Some(true)));
        assert_eq!(applied(&["--writes-device", "/dev/x"]), (None, None, Some(true)));
        assert_eq!(applied(&["--thin", "--fill"]), (Some(1 << 30), None, Some(true)));
        let given = ["--write-limit", "2G", "--reserve=false", "--fill=false"];
        assert_eq!(applied(&given), (Some(2 << 30), Some(false), Some(false)));
    }
}
