//! A guest of the lab that carries out one request after another: `dev/lab/cluster-node`.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use testkit::wait_until;

use super::{Network, failed};

/// For one request. Emulation on a busy machine takes minutes for what takes seconds.
pub(super) const LIMIT: Duration = Duration::from_secs(600);

pub(super) struct Guest {
    lab: Child,
    name: String,
    tap: String,
    out: PathBuf,
    asked: String,
}

impl Guest {
    /// Starts `lab1` or `lab2`.
    pub(super) fn start(
        network: &Network,
        number: u8,
        program: &Path,
        layer: &Path,
    ) -> Result<Self> {
        let (name, tap) = (format!("lab{number}"), format!("tap{number}"));
        let log = File::create(network.out.join(format!("{name}.log")))?;
        let mut lab = network.command(network.root.join("dev/lab/run"));
        lab.args(["6.12", "bash"]).arg(network.root.join("dev/lab/cluster-node"));
        lab.arg(&network.out).arg(program);
        lab.env("LAB_TAP", &tap).env("LAB_LAYER", layer).env("LAB_OUT", &network.out);
        lab.env("LAB_MEMORY_MB", "1280").env("LAB_TIMEOUT", "3000");
        // It ends as a whole.
        lab.process_group(0).stdout(log.try_clone()?).stderr(Stdio::from(log));
        let lab = lab.spawn()?;
        Ok(Self { lab, name, tap, out: network.out.clone(), asked: String::new() })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    fn file(&self, what: &str) -> PathBuf {
        self.out.join(format!("{}.{what}", self.name))
    }

    /// Runs a function of the guest's, and returns its output.
    pub(super) fn ask(&mut self, words: &str) -> Result<String> {
        self.begin_to_ask(words)?;
        self.answer()
    }

    pub(super) fn begin_to_ask(&mut self, words: &str) -> Result<()> {
        let new = self.file("ask.new");
        fs::write(&new, format!("{words}\n"))?;
        self.asked = words.to_owned();
        Ok(fs::rename(new, self.file("ask"))?)
    }

    pub(super) fn answer(&mut self) -> Result<String> {
        let done = self.file("done");
        let mut ended = None;
        let has_answer = || {
            ended = self.lab.try_wait().ok().flatten();
            ended.is_some() || done.exists()
        };
        let answered = wait_until(LIMIT, has_answer);
        let said = || fs::read_to_string(self.file("said")).unwrap_or_default();
        ensure!(ended.is_none(), "{} has ended: see {}", self.name, self.file("log").display());
        if !answered {
            return failed(&self.name, &self.asked, &said());
        }
        let status = fs::read_to_string(&done)?;
        fs::remove_file(&done)?;
        match status.trim() {
            "0" => Ok(said()),
            _ => failed(&self.name, &self.asked, &said()),
        }
    }

    /// Kills its emulator, as a loss of power ends a machine.
    pub(super) fn kill(&self) -> Result<()> {
        let emulator = self.emulator().context("the guest has no emulator")?;
        kill_process(emulator, Signal::KILL)?;
        Ok(())
    }

    /// The process of this guest's processors.
    fn emulator(&self) -> Option<Pid> {
        let tap = format!("ifname={},", self.tap);
        let out = self.out.to_string_lossy().into_owned();
        let is_its = |words: &str| {
            words.starts_with("qemu-system") && words.contains(&tap) && words.contains(&out)
        };
        let numbers = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| {
            let number: i32 = entry.file_name().to_str()?.parse().ok()?;
            let words = fs::read(entry.path().join("cmdline")).ok()?;
            is_its(&String::from_utf8_lossy(&words)).then_some(number)
        });
        numbers.into_iter().find_map(Pid::from_raw)
    }

    /// Shows the end of its logs.
    pub(super) fn tell(&self) {
        for log in ["log", "pacemaker", "pacemaker-out", "corosync-out"] {
            let text = fs::read_to_string(self.file(log)).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            println!("-- {}.{log}", self.name);
            lines[lines.len().saturating_sub(40)..].iter().for_each(|line| println!("{line}"));
        }
    }

    /// Until it has ended, which it has been told to, or because it is dead.
    pub(super) fn wait(mut self) -> Result<()> {
        let ended = wait_until(LIMIT, || self.lab.try_wait().is_ok_and(|ended| ended.is_some()));
        ensure!(ended, "{} does not end", self.name);
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if self.lab.try_wait().is_ok_and(|ended| ended.is_some()) {
            return;
        }
        if let Some(emulator) = self.emulator() {
            let _ = kill_process(emulator, Signal::KILL);
        }
        // The script ends when its emulator does; its helpers go with it.
        let gone = || self.lab.try_wait().is_ok_and(|ended| ended.is_some());
        if !wait_until(Duration::from_secs(30), gone)
            && let Some(group) = Pid::from_raw(self.lab.id() as i32)
        {
            let _ = kill_process_group(group, Signal::KILL);
            let _ = self.lab.wait();
        }
    }
}
