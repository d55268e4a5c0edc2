//! Commands of cargo.

use std::{
    ffi::OsString,
    process::{Command, Stdio},
};

/// Beginnings of the names of what `cargo run` tells this program about its package. Build scripts
/// (that of ring) name some of them as their input, so a cargo that inherited them would compile
/// once more what a user's cargo has compiled.
const OF_PACKAGE: [&str; 5] =
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"];

/// The cargo that runs this program, or the one of `PATH`.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(arguments);
    without_package(&mut command, std::env::vars_os().map(|(name, _)| name));
    command
}

fn without_package(command: &mut Command, names: impl Iterator<Item = OsString>) {
    let is_of_package = |name: &OsString| {
        let name = name.to_string_lossy();
        OF_PACKAGE.iter().any(|begin| name.starts_with(begin))
    };
    names.filter(is_of_package).for_each(|name| {
        command.env_remove(name);
    });
}

/// Cargo as rustup's proxy, which knows `+nightly`; `cargo run` sets `CARGO` to one toolchain's.
pub(crate) fn cargo_by_rustup(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments);
    ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC", "RUSTDOC"].iter().for_each(|name| {
        command.env_remove(name);
    });
    without_package(&mut command, std::env::vars_os().map(|(name, _)| name));
    command
}

/// True if cargo knows this command.
pub(crate) fn works(arguments: &[&str]) -> bool {
    let mut command = cargo_by_rustup(arguments);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::without_package;

    #[test]
    fn cargo_hears_nothing_of_the_package_that_calls_it() {
        let mut command = Command::new("cargo");
        let names = ["CARGO_PKG_NAME", "PATH", "CARGO_MANIFEST_DIR", "CARGO_TARGET_DIR"];
        without_package(&mut command, names.map(Into::into).into_iter());
        let removed: Vec<_> =
            command.get_envs().map(|(name, value)| (name, value.is_none())).collect();
        assert_eq!(removed.len(), 2);
        assert!(removed.contains(&("CARGO_PKG_NAME".as_ref(), true)), "{removed:?}");
        assert!(removed.contains(&("CARGO_MANIFEST_DIR".as_ref(), true)), "{removed:?}");
    }
}
