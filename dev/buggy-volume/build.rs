//! Copies `crates/volume/src` and puts the bugs of `bugs.rs` into the copy.

// The tests read the rest of it.
#[allow(dead_code)]
#[path = "bugs.rs"]
mod bugs;

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

use bugs::{BUGS, SWITCH};

fn main() -> io::Result<()> {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let from = here.join("../../crates/volume/src");
    let to = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("volume");
    println!("cargo::rerun-if-changed={}", from.display());
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=bugs.rs");
    if to.exists() {
        fs::remove_dir_all(&to)?;
    }
    copy(&from, &to)?;
    for bug in BUGS {
        for (file, find, replace) in bug.patches {
            let path = to.join(file);
            let text = fs::read_to_string(&path)?;
            let count = text.matches(find).count();
            if count != 1 {
                let first = find.lines().next().unwrap_or_default();
                return Err(io::Error::other(format!(
                    "dev/buggy-volume/bugs.rs, {}: its text occurs {count} times in \
                     crates/volume/src/{file}, instead of once: {first:?}",
                    bug.name
                )));
            }
            let switch = format!("crate::bugs::is_on({:?})", bug.name);
            fs::write(&path, text.replacen(find, &replace.replace(SWITCH, &switch), 1))?;
        }
    }
    // The text is included, and included text has no inner documentation.
    let lib = to.join("lib.rs");
    let text = fs::read_to_string(&lib)?;
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with("//!")).collect();
    fs::write(lib, lines.join("\n"))
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            // The original runs its unit tests.
            let text = fs::read_to_string(entry.path())?;
            fs::write(target, text.replace("#[cfg(test)]", "#[cfg(any())]"))?;
        }
    }
    Ok(())
}
