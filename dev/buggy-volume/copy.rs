//! Copies the sources of a crate, and puts the bugs of a list into the copy.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

/// File, text, replacement.
pub type Patch = (&'static str, &'static str, &'static str);

/// Copies `crates/NAME/src` to `OUT_DIR/NAME`, with the patches of each named bug. `switch` stands
/// in a replacement for the question whether the bug is on.
pub fn copy_with_bugs<'a>(
    name: &str,
    switch: &str,
    bugs: impl Iterator<Item = (&'a str, &'a [Patch])>,
) -> io::Result<()> {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let from = here.join("../../crates").join(name).join("src");
    let to = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join(name);
    println!("cargo::rerun-if-changed={}", from.display());
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=bugs.rs");
    if to.exists() {
        fs::remove_dir_all(&to)?;
    }
    copy(&from, &to)?;
    for (bug, patches) in bugs {
        for (file, find, replace) in patches {
            let path = to.join(file);
            let text = fs::read_to_string(&path)?;
            let count = text.matches(find).count();
            if count != 1 {
                let first = find.lines().next().unwrap_or_default();
                return Err(io::Error::other(format!(
                    "{}, {bug}: its text occurs {count} times in crates/{name}/src/{file}, instead \
                     of once: {first:?}",
                    here.join("bugs.rs").display()
                )));
            }
            let question = format!("crate::bugs::is_on({bug:?})");
            fs::write(&path, text.replacen(find, &replace.replace(switch, &question), 1))?;
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
