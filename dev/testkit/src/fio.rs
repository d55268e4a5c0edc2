//! Load with verification, by fio.

use std::{ffi::OsString, path::Path, process::Child, process::Command, process::Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// One fio run of one job.
pub struct Fio {
    arguments: Vec<OsString>,
}

/// A measurement by fio.
#[derive(Clone, Debug, Default)]
pub struct FioResult {
    /// Reads a second.
    pub read_iops: f64,
    /// Writes a second.
    pub write_iops: f64,
    /// Errors fio counted, verification failures among them.
    pub errors: u64,
    /// The slowest read, in milliseconds.
    pub read_latency_ms_max: f64,
}

impl Fio {
    /// A job on the file `path`, with `options` such as `--rw=randread`.
    pub fn new(path: &Path, options: &[&str]) -> Self {
        let mut file = OsString::from("--filename=");
        // fio splits file names at colons.
        file.push(path.to_string_lossy().replace(':', "\\:"));
        let mut arguments: Vec<OsString> =
            ["--name=job", "--output-format=json", "--group_reporting=1"]
                .map(OsString::from)
                .into();
        arguments.push(file);
        arguments.extend(options.iter().map(OsString::from));
        Self { arguments }
    }

    /// Starts it in the background, in the folder `scratch` (fio may leave state files there).
    pub fn start(&self, scratch: &Path) -> Result<Child> {
        Command::new("fio")
            .args(&self.arguments)
            .current_dir(scratch)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run fio: install the package fio")
    }

    /// Runs it to its end.
    pub fn run(&self, scratch: &Path) -> Result<FioResult> {
        Self::finish(self.start(scratch)?)
    }

    /// Waits for a started run. Errors and verification failures make it an error.
    pub fn finish(child: Child) -> Result<FioResult> {
        let output = child.wait_with_output()?;
        let (text, errors) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let json = text.find('{').map(|start| &text[start..]).unwrap_or("");
        let parsed: Value =
            serde_json::from_str(json).with_context(|| format!("fio said {text:?} {errors:?}"))?;
        let job = &parsed["jobs"][0];
        let result = FioResult {
            read_iops: job["read"]["iops"].as_f64().unwrap_or_default(),
            write_iops: job["write"]["iops"].as_f64().unwrap_or_default(),
            errors: job["total_err"].as_u64().unwrap_or_default()
                + job["error"].as_u64().unwrap_or_default(),
            read_latency_ms_max: job["read"]["lat_ns"]["max"].as_f64().unwrap_or_default() / 1e6,
        };
        if !output.status.success() || result.errors > 0 {
            bail!("fio failed ({}): {result:?} {errors}", output.status);
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::OpenOptions, os::unix::fs::FileExt};

    use super::Fio;
    use crate::Space;

    #[test]
    fn a_wrong_byte_is_an_error() {
        let space = Space::new("fio");
        let path = space.path("data");
        let options = ["--rw=write", "--bs=4k", "--size=1m", "--verify=crc32c"];
        let written = Fio::new(&path, &options).run(space.folder()).unwrap();
        assert!(written.write_iops > 0.0);
        let check = Fio::new(&path, &["--rw=read", "--bs=4k", "--size=1m", "--verify=crc32c"]);
        check.run(space.folder()).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&[1, 2], 9000).unwrap();
        assert!(check.run(space.folder()).is_err());
    }
}
