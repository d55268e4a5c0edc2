//! The files of the tree.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;

/// Every file of the tree, except build output, caches and git's own.
pub(crate) fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            let name = entry.file_name();
            let built = ["target", ".git", ".cache", "corpus", "artifacts"];
            if kind.is_dir() && !built.iter().any(|b| name == *b) {
                folders.push(entry.path());
            } else if kind.is_file() && name != ".git" {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}
