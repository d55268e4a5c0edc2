//! Measures a piece of work in a process of its own.
//!
//! ```text
//!   test ── measure("part"): makes the input ──► the same program, only this test, PART=part
//!                                                  └─ measure("part"): works, and tells what it took
//! ```

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use rustix::process::{Resource, Rlimit, setrlimit};

/// Names the part of a test that is to be done by this process.
const PART: &str = "BURGEON_TEST_PART";
/// The path of that part's input.
const INPUT: &str = "BURGEON_TEST_INPUT";
/// Before each thing that the process tells.
const MARK: &str = "measured:";

/// Most memory, in bytes, and processor time, in seconds, that the process gets: more than any test
/// allows, and little enough that work without a bound of its own harms nobody else.
const DATA_MAX: u64 = 2 << 30;
const CPU_MAX: u64 = 120;

/// The result of a process, and the resources it took.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The text that the work has returned.
    pub said: String,
    /// The most memory that was resident, in bytes (`VmHWM`).
    pub peak_bytes: u64,
    /// Processor time of all threads, which does not depend on other work of the machine.
    pub cpu: Duration,
}

/// Does `work`, which the test `test` calls `part`, on what `input` has made here, in a process of
/// its own, and measures that. `None` in such a process. Panics when that takes 2 GiB or two
/// minutes of processor time.
pub fn measure(
    test: &str,
    part: &str,
    input: impl FnOnce() -> PathBuf,
    work: impl FnOnce(&Path) -> String,
) -> Option<Measured> {
    if let Ok(wanted) = std::env::var(PART) {
        if wanted == part {
            limit(Resource::Data, DATA_MAX);
            limit(Resource::Cpu, CPU_MAX);
            let input = std::env::var_os(INPUT).expect("whoever names the part names its input");
            let said = work(input.as_ref()).replace('\n', " ");
            println!("\n{MARK}{said}\n{MARK}{}\n{MARK}{}", peak_kib(), cpu_ms());
        }
        return None;
    }
    let mut command = Command::new(std::env::current_exe().expect("a test is a program"));
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command.env(PART, part).env(INPUT, input());
    let output = command.output().expect("the test runs again");
    let text = String::from_utf8_lossy(&output.stdout);
    let mut told = text.lines().filter_map(|line| line.strip_prefix(MARK));
    let (Some(said), Some(peak), Some(cpu)) = (told.next(), told.next(), told.next()) else {
        let errors = String::from_utf8_lossy(&output.stderr);
        panic!("{test}, {part}: {}\n{text}{errors}", output.status);
    };
    let number = |text: &str| text.parse::<u64>().expect("a number");
    Some(Measured {
        said: said.to_owned(),
        peak_bytes: number(peak) << 10,
        cpu: Duration::from_millis(number(cpu)),
    })
}

fn limit(resource: Resource, most: u64) {
    let most = Some(most);
    setrlimit(resource, Rlimit { current: most, maximum: most }).expect("a limit may be lowered");
}

fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
    number.and_then(|number| number.trim().parse().ok()).expect("VmHWM in kB")
}

fn cpu_ms() -> u64 {
    // All threads of the process, in ticks: fields 14 and 15, behind the name in parentheses.
    let stat = fs::read_to_string("/proc/self/stat").expect("/proc is mounted");
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks =
        rest.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok());
    // USER_HZ is 100 on every architecture that Burgeon runs on.
    ticks.sum::<u64>() * 10
}
