//! The program that is measured, with a state directory of its own.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};
use serde_json::Value;

use super::machine::finish;

/// One installation; its daemon ends when this is dropped.
pub(crate) struct Burgeon {
    program: PathBuf,
    state: PathBuf,
    store: Option<PathBuf>,
    cache: Option<PathBuf>,
}

impl Burgeon {
    /// With its state, and its images, in `state`.
    pub(crate) fn new(program: &Path, state: PathBuf) -> Self {
        Self { program: program.into(), state, store: None, cache: None }
    }

    /// With images in `store` instead.
    pub(crate) fn with_store(program: &Path, state: PathBuf, store: PathBuf) -> Self {
        Self { program: program.into(), state, store: Some(store), cache: None }
    }

    /// The same with its cache in this folder.
    pub(crate) fn cache_dir(mut self, cache: &Path) -> Self {
        self.cache = Some(cache.into());
        self
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--state-dir").arg(&self.state);
        if let Some(store) = &self.store {
            command.arg("--store").arg(store);
        }
        if let Some(cache) = &self.cache {
            command.arg("--cache-dir").arg(cache);
        }
        command.args(arguments).stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Result<String> {
        let what = format!("burgeon {}", arguments.first().copied().unwrap_or_default());
        finish(self.command(arguments).output(), &what)
    }

    /// Mounts read-only: a sprout would only take room in memory.
    pub(crate) fn mount(&self, image: &str, at: &Path) -> Result<()> {
        fs::create_dir_all(at)?;
        self.run(&["mount", image, &at.to_string_lossy(), "--read-only"])?;
        Ok(())
    }

    /// Mounts with `--fast`; false if the kernel does not allow it, and then nothing is mounted.
    pub(crate) fn mount_fast(&self, image: &str, at: &Path) -> Result<bool> {
        fs::create_dir_all(at)?;
        let target = at.to_string_lossy();
        let said = self.run(&["mount", image, &target, "--read-only", "--fast"])?;
        let fast = said.contains("io_uring + loop");
        if !fast {
            self.umount(at)?;
        }
        Ok(fast)
    }

    /// Mounts over a transport of one's choice.
    pub(crate) fn mount_over(&self, image: &str, at: &Path, transport: &str) -> Result<()> {
        fs::create_dir_all(at)?;
        let at = at.to_string_lossy();
        self.run(&["mount", image, &at, "--read-only", "--transport", transport])?;
        Ok(())
    }

    pub(crate) fn umount(&self, at: &Path) -> Result<()> {
        self.run(&["umount", &at.to_string_lossy()])?;
        Ok(())
    }

    pub(crate) fn status(&self) -> Result<Value> {
        let text = self.run(&["status", "--json"])?;
        serde_json::from_str(&text).with_context(|| format!("burgeon status says {text:?}"))
    }
}

impl Drop for Burgeon {
    fn drop(&mut self) {
        let _ = self.run(&["shutdown", "--force"]);
    }
}
