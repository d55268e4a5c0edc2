//! Finds the mount namespaces that processes and threads of this machine are in.
//!
//! ```text
//!   /proc/7/ns/mnt, /proc/7/task/*/ns/mnt ──► mnt:[…], each once ──► /proc/7/task/9/mountinfo
//! ```
//!
//! A thread may have a namespace of its own, as those of container engines do. Invariants: the
//! first thread of each process is looked at; of all others, at most [`THREADS_MAX`].

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

/// Further threads that are looked at in all: about a second's work.
const THREADS_MAX: usize = 1 << 16;

/// A mount namespace, and a thread that is in it.
#[derive(Debug, PartialEq, Eq)]
pub struct MountNamespace {
    /// Such as `mnt:[4026532281]`.
    pub name: PathBuf,
    /// The thread's process.
    pub process: u32,
    /// The thread's folder, such as `/proc/7/task/9`.
    pub task: PathBuf,
}

impl MountNamespace {
    /// True if the thread is not the first one of its process.
    pub fn is_of_a_thread(&self) -> bool {
        number(&self.task) != Some(self.process)
    }
}

/// The mount namespaces other than the calling thread's that this process may see, by the lowest
/// process id in each.
pub fn others() -> Vec<MountNamespace> {
    let own = fs::read_link("/proc/thread-self/ns/mnt").unwrap_or_default();
    others_than(own, Path::new("/proc"), THREADS_MAX)
}

fn others_than(own: PathBuf, proc: &Path, threads_max: usize) -> Vec<MountNamespace> {
    let (mut seen, mut found) = (BTreeSet::from([own]), Vec::new());
    let mut processes: Vec<_> =
        numbered(proc).unwrap_or_default().iter().filter_map(|process| number(process)).collect();
    processes.sort_unstable();
    let mut look = |process: u32, task: PathBuf| {
        // Without it the thread has ended, or is hidden from this user.
        if let Ok(name) = fs::read_link(task.join("ns/mnt"))
            && seen.insert(name.clone())
        {
            found.push(MountNamespace { name, process, task });
        }
    };
    let tasks_of = |process: u32| proc.join(process.to_string()).join("task");
    for process in &processes {
        look(*process, tasks_of(*process).join(process.to_string()));
    }
    let threads = processes.iter().flat_map(|process| {
        let tasks = numbered(&tasks_of(*process)).unwrap_or_default();
        let others = tasks.into_iter().filter(|task| number(task) != Some(*process));
        others.map(|task| (*process, task))
    });
    threads.take(threads_max).for_each(|(process, task)| look(process, task));
    found
}

/// The entries of a folder of `/proc` whose names are numbers.
pub(crate) fn numbered(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    Ok(paths.filter(|path| number(path).is_some()).collect())
}

fn number(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path};

    use super::others_than;

    fn add(proc: &Path, process: u32, thread: u32, namespace: &str) {
        let task = proc.join(format!("{process}/task/{thread}/ns"));
        fs::create_dir_all(&task).unwrap();
        symlink(namespace, task.join("mnt")).unwrap();
    }

    #[test]
    fn namespaces_of_threads_are_found_and_the_look_is_bounded() {
        let temp = tempfile::tempdir().unwrap();
        let proc = temp.path();
        fs::create_dir_all(proc.join("self/task")).unwrap();
        for (process, thread, namespace) in
            [(1, 1, "a"), (20, 20, "own"), (3, 3, "b"), (100, 100, "b"), (3, 9, "c"), (20, 21, "a")]
        {
            add(proc, process, thread, namespace);
        }
        let found = |max| -> Vec<_> {
            let all = others_than("own".into(), proc, max).into_iter();
            all.map(|one| {
                (one.name.to_str().unwrap().to_owned(), one.process, one.is_of_a_thread())
            })
            .collect()
        };
        let (a, b, c) = (("a".into(), 1, false), ("b".into(), 3, false), ("c".into(), 3, true));
        assert_eq!(found(10), [a.clone(), b.clone(), c.clone()]);
        // Every process counts, however many threads there are.
        add(proc, 3, 8, "own");
        add(proc, 4, 4, "d");
        assert_eq!(found(0), [a, b, ("d".into(), 4, false)]);
    }
}
