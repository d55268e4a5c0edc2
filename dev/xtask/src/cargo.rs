//! Commands of cargo.

use std::process::{Command, Stdio};

/// The cargo that runs this program, or the one of `PATH`.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

/// Cargo as rustup's proxy, which knows `+nightly`; `cargo run` sets `CARGO` to one toolchain's.
pub(crate) fn cargo_by_rustup(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments);
    ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC", "RUSTDOC"].iter().for_each(|name| {
        command.env_remove(name);
    });
    command
}

/// True if cargo knows this command.
pub(crate) fn works(arguments: &[&str]) -> bool {
    let mut command = cargo_by_rustup(arguments);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
