//! Who uses a file system: the answer to "target is busy".

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use burgeon_daemon::mountinfo;

/// Most holders that are named.
const NAMED_MAX: usize = 5;

/// Says, as a sentence, what keeps `target` from being unmounted, as far as this process may see.
pub(crate) fn describe(target: &Path) -> String {
    let mut holders = mounted_below(target);
    if let Ok(metadata) = fs::metadata(target) {
        holders.extend(processes(metadata.dev()));
    }
    if holders.is_empty() {
        return "something that this user cannot see uses it".to_owned();
    }
    let more = holders.len().saturating_sub(NAMED_MAX);
    holders.truncate(NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("in use by {}{more}", holders.join(", "))
}

fn mounted_below(target: &Path) -> Vec<String> {
    let mounts = mountinfo::read(Path::new("/proc/thread-self/mountinfo")).unwrap_or_default();
    mounts
        .iter()
        .filter(|mount| mount.target != target && mount.target.starts_with(target))
        .map(|mount| format!("the mount {}", mount.target.display()))
        .collect()
}

/// Processes with a file, a mapping or a folder of the file system `device`.
fn processes(device: u64) -> Vec<String> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let own = std::process::id();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != own)
        .filter_map(|pid| {
            let folder = PathBuf::from(format!("/proc/{pid}"));
            let how = how_it_holds(&folder, device)?;
            let name = fs::read_to_string(folder.join("comm")).unwrap_or_default();
            Some(format!("{} (process {pid}, {how})", name.trim_end()))
        })
        .collect()
}

fn how_it_holds(process: &Path, device: u64) -> Option<&'static str> {
    let on_it = |path: &Path| fs::metadata(path).is_ok_and(|metadata| metadata.dev() == device);
    let any_in = |folder: &Path| {
        let files = fs::read_dir(folder).into_iter().flatten().flatten();
        files.map(|file| file.path()).any(|path| on_it(&path))
    };
    if on_it(&process.join("cwd")) {
        return Some("its working directory");
    }
    if on_it(&process.join("root")) {
        return Some("its root");
    }
    if on_it(&process.join("exe")) {
        return Some("its program");
    }
    // Threads may have open files of their own.
    let threads = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    if threads.map(|thread| thread.path().join("fd")).any(|folder| any_in(&folder)) {
        return Some("an open file");
    }
    any_in(&process.join("map_files")).then_some("a mapped file")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_process_in_a_folder_is_named() {
        let temp = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .current_dir(temp.path())
            .spawn()
            .unwrap();
        let device = temp.path().metadata().unwrap().dev();
        let all = super::processes(device);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(all.iter().any(|one| one.contains(&format!("process {},", child.id()))), "{all:?}");
    }
}
