//! The Debian package as it is built: twice the same, and without a complaint of lintian's.
//! `package.rs` installs it.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds the package of this program in `folder`, under `mask`.
fn build(folder: &Path, mask: &str) -> PathBuf {
    let script = checkout().join("dist/deb/build");
    let mut command = Command::new("sh");
    command.args(["-c", "umask \"$0\" && exec \"$1\"", mask]).arg(script);
    command.env("DEB_BINARY", PROGRAM).env("DEB_OUT", folder);
    command.env("DPKG_DEB_COMPRESSOR_TYPE", "gzip").env("SOURCE_DATE_EPOCH", "1800000000");
    let output = command.env("DEB_MAINTAINER", "Tester <tester@example.org>").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

#[test]
fn the_package_is_reproducible_and_lintian_accepts_it() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let packages = [build(folders[0].path(), "022"), build(folders[1].path(), "077")];
    let [first, second] = packages.each_ref().map(|path| fs::read(path).unwrap());
    assert!(first == second, "two builds of one program differ");

    // dpkg keeps an administrator's changes of a conffile.
    let mut told = Command::new("dpkg-deb");
    let told = told.arg("--info").arg(&packages[0]).arg("conffiles").output().unwrap();
    let conffiles = String::from_utf8(told.stdout).unwrap();
    assert!(conffiles.lines().any(|line| line == "/etc/burgeon/config.toml"), "{conffiles}");

    let mut lintian = Command::new("lintian");
    lintian.args(["--allow-root", "--fail-on", "error,warning"]).arg(&packages[0]);
    match lintian.output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{said}");
        }
        Err(error) => println!("left out: lintian: {error}"),
    }
}
