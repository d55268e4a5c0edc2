//! A copy of the tree, in which mends are undone.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

/// Makes `tree` the same as what git knows of `root`, as it lies there. Files that are the same
/// keep their times, so that cargo compiles nothing twice.
pub(super) fn copy_tree(root: &Path, tree: &Path) -> Result<()> {
    let list = |options: &[&str]| -> Result<Vec<PathBuf>> {
        let mut command = Command::new("git");
        command.arg("ls-files").arg("-z").args(options).current_dir(root);
        let output = command.output().context("cannot run git")?;
        ensure!(output.status.success(), "git ls-files: {}", output.status);
        let names = output.stdout.split(|b| *b == 0).filter(|name| !name.is_empty());
        Ok(names.map(|name| PathBuf::from(String::from_utf8_lossy(name).into_owned())).collect())
    };
    fs::create_dir_all(tree)?;
    let names = list(&["--cached", "--others", "--exclude-standard"])?;
    // A test program that is gone must not be compiled from the copy.
    for path in crate::files::files(tree)? {
        if path.strip_prefix(tree).is_ok_and(|name| names.iter().all(|n| n != name)) {
            fs::remove_file(&path)?;
        }
    }
    for name in names {
        let (from, to) = (root.join(&name), tree.join(&name));
        let Ok(bytes) = fs::read(&from) else {
            // Removed, and git has not been told.
            let _ = fs::remove_file(&to);
            continue;
        };
        if fs::read(&to).is_ok_and(|old| old == bytes) {
            continue;
        }
        fs::create_dir_all(to.parent().context("a file without a folder")?)?;
        fs::write(&to, bytes).with_context(|| format!("{}", to.display()))?;
        fs::set_permissions(&to, fs::metadata(&from)?.permissions())?;
    }
    Ok(())
}
