//! Other people's programs in Go, of versions that a `go.sum` of this project pins.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

/// The oldest Go that fetches the version which a module asks for.
const OLDEST: (u32, u32) = (1, 21);

/// Makes the tests of the module `dev/NAME` into a program, and returns its path. The caches stay
/// in `target/tools`. Panics, with the remedy, if there is no Go or the modules cannot be had: a
/// test that is left out would count as done.
///
/// `go test -c` links anew each time, which takes seconds: so a process does it once. Two makers
/// would write the same file, so one waits for the other.
pub fn go_tests(name: &str) -> PathBuf {
    static MADE: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    made.entry(name.to_owned()).or_insert_with(|| make_tests(name)).clone()
}

/// Makes the commands of the module `dev/NAME` that it names as packages, and returns the folder of
/// their programs.
pub fn go_programs(name: &str, packages: &[&str]) -> PathBuf {
    static MAKING: Mutex<()> = Mutex::new(());
    let _one = MAKING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let programs = tools().join(name);
    std::fs::create_dir_all(&programs).expect("the folder of tools can be made");
    // Without the parts of containerd that need other programs, and tables for debuggers.
    let tags = "no_btrfs,no_devmapper,no_tracing,no_zfs";
    let build = ["build", "-tags", tags, "-ldflags=-s -w", "-o"];
    go(&module(name), &build, &programs, packages);
    programs
}

fn make_tests(name: &str) -> PathBuf {
    let program = tools().join(format!("{name}.test"));
    go(&module(name), &["test", "-c", "-o"], &program, &["."]);
    program
}

fn module(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dev").join(name)
}

/// The folder of made and fetched programs, which outlives the tests.
pub fn tools() -> PathBuf {
    let program = env::current_exe().expect("a running program has a path");
    // target/debug/deps/PROGRAM of a test, target/release/PROGRAM of others, of whichever target
    // folder it is.
    let folder = program.parent().expect("a program lies in a folder");
    let profile = if folder.ends_with("deps") { folder.parent() } else { Some(folder) };
    let target = profile.and_then(Path::parent).expect("it lies below the target folder");
    target.join("tools")
}

fn go(module: &Path, before: &[&str], out: &Path, after: &[&str]) {
    let tools = tools();
    let mut command = Command::new(find());
    command.current_dir(module).args(before).arg(out).args(after);
    command.env("GOCACHE", tools.join("go-cache")).env("GOMODCACHE", tools.join("go-modules"));
    // As go.sum says; a folder of modules that can be removed like any other; no repository needed.
    command.env("GOFLAGS", "-mod=readonly -modcacherw -buildvcs=false");
    command.env("CGO_ENABLED", "0").env_remove("GOROOT").env_remove("GOPATH");
    if env::var_os("HOME").is_none() {
        command.env("GOPATH", tools.join("go"));
    }
    let output = command.output().expect("Go was just found");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "go cannot make {}: {said}", module.display());
}

fn find() -> OsString {
    let given = env::var_os("GO");
    let fetched = tools().join("bin/go").into();
    let usual = ["go".into(), "/usr/local/go/bin/go".into(), fetched];
    let mut places = given.into_iter().chain(usual);
    let found = places.find(|go| version(go).is_some_and(|version| version >= OLDEST));
    found.expect("Go 1.21 or newer is needed: `dev/go target/tools` gets one")
}

fn version(go: &OsString) -> Option<(u32, u32)> {
    let output = Command::new(go).args(["env", "GOVERSION"]).output().ok()?;
    let version = String::from_utf8(output.stdout).ok()?;
    let mut parts = version.trim().strip_prefix("go")?.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}
